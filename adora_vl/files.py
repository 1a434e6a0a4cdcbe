"""Files that are there whole or not at all, and one line for the user where the disk refuses them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from adora_vl.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PARTIAL = ".partial-"
NFS_DELAY_S = 60.0  # a client of NFS may not see another one's new file for this long (the default of `acdirmax`)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A hidden neighbour of `path` to write into, which is renamed over `path` when the block ends.

    Whatever goes wrong, the neighbour is removed and what was at `path` stays. Unless `durable` is false, the bytes are
    on the disk before the file gets its name. What is no file, such as /dev/stdout, is written to as it is. Raises
    `OSError`.
    """
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        with path.open("wb") as file:
            yield file
        return
    # not named after the process: two machines that share a disk may have processes of equal number
    partial = path.with_name(f".{path.name}{_PARTIAL}{token_hex(8)}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file with `replacing`. Raises `OSError`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def appears(path: Path, patience_s: float = NFS_DELAY_S) -> bool:
    """Whether a file is there that another machine has made on a shared disk, if need be after a while."""
    end = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.2)
        with suppress(OSError):  # reading the folder makes a client of NFS ask the server again
            next(path.parent.iterdir(), None)
    return True


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder, hidden beside `folder`, which takes its place when the block ends; the old one goes after that.

    Whatever goes wrong, the new one is removed and the old one stays. Raises `OSError`.
    """
    beside = folder.with_name(f".{folder.name}{_PARTIAL}{token_hex(8)}")
    new, old = beside / "new", beside / "old"
    try:
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left in `folder` of files and folders that they were replacing.

    Call it where nobody else writes at the same time.
    """
    for path in folder.glob(f".*{_PARTIAL}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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


def check_json(option: str, path: Path, what: str, is_ours: Callable[[Any], bool]) -> None:
    """Raise `UserError` where a JSON file cannot be written, or would take the place of anything but `what`.

    `is_ours`: whether the content of such a file is what this command writes.
    """
    check_folder(option, path.parent)
    if not path.exists() or not (path.is_file() or path.is_dir()):  # /dev/stdout is written to as it is
        return
    try:
        content = path.read_bytes()
        fine = not content or is_ours(json.loads(content))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise UserError(f"{option}: {str(path)!r} is there and not {what}; choose another name")


def make_folder(option: str, folder: Path) -> None:
    """Make a folder that may be there already. Raises `UserError` where it cannot be made, or not be written into."""
    check_folder(option, folder)
    with written_to(option, folder):
        folder.mkdir(parents=True, exist_ok=True)
