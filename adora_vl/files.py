"""Files that are there whole or not at all, and one line for the user where the disk refuses them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adora_vl.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file in one step: into a hidden neighbour, to the disk, then renamed over `path`.

    Whatever goes wrong, the neighbour is removed and what was at `path` stays. Raises `OSError`.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def written_to(option: str, path: Path) -> Iterator[None]:
    """An `OSError` inside the block is the user's to mend: the option, the path, the reason, what to do."""
    try:
        yield
    except OSError as error:
        raise unwritable(option, path, error) from error


def unwritable(option: str, path: Path, error: OSError) -> UserError:
    """The error of a place that could not be written to."""
    remedy = "free some space, or choose another place" if error.errno in _FULL else "choose another place"
    return UserError(f"{option}: {str(path)!r} cannot be written ({error.strerror or error}); {remedy}")


def check_folder(option: str, folder: Path) -> None:
    """Raise `UserError` where a folder can be neither made nor written into, without making it."""
    with written_to(option, folder):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir():
            raise UserError(f"{option}: {str(there)!r} is a file, and a folder is needed; choose another place")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def make_folder(option: str, folder: Path) -> None:
    """Make a folder that may be there already. Raises `UserError` where it cannot be made, or not be written into."""
    check_folder(option, folder)
    with written_to(option, folder):
        folder.mkdir(parents=True, exist_ok=True)
