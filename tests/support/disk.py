"""A disk that gets full, and what lies on it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Inside, no file gets longer than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def folder_contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, where every link leads, and every folder below `folder`, hidden
    ones too.
    """

    def held(path: Path) -> bytes | None:
        return (
            bytes(path.readlink())
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )

    return {path.relative_to(folder).as_posix(): held(path) for path in folder.rglob("*")}


def file_contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
