"""A disk that gets full, and what lies on it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let no file get longer than `size` bytes inside the block, as on a full disk.

    The kernel refuses the bytes after that (RLIMIT_FSIZE), whichever library writes them.
    """
    limits_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits_before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits_before)


def folder_contents(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every path below `folder`, hidden ones too, by its relative path.

    The content is a file's bytes, a link's target, or None for a folder. Two results are equal
    where nothing was written, removed or replaced in between.
    """
    contents: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            contents[name] = bytes(path.readlink())
        elif path.is_file():
            contents[name] = path.read_bytes()
        else:
            contents[name] = None
    return contents


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `folder`, by its relative path: {"a/b.txt": b"..."}."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
