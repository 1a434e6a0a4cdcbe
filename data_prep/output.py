"""An output folder that appears complete or not at all, whenever the power, the process or the disk gives up."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adora_vl.errors import UserError
from data_prep.storage import MANIFEST_NAME, read_manifest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


@contextmanager
def complete_or_absent(output: Path) -> Iterator[Path]:
    """A folder to write into, `.NAME.partial-*` beside `output`, that takes the place of `output` when the block ends.

    On any exception it is removed and `output` stays as it was; what a killed process left of it is removed by the next
    preparation of the same output. Raises `UserError` where `output` holds anything that we did not prepare.
    """
    output = output.resolve()
    _recover(output)
    refuse_foreign(output)
    partial, lock = _made(output)
    try:
        yield partial
        refuse_foreign(output)  # again, since preparing takes long
        _on_disk(partial)
        _replace(output, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # by now the old output, or nothing
        os.close(lock)


def refuse_foreign(output: Path) -> None:
    """Raise `UserError` unless `output` is absent, empty, or a prepared folder with nothing else in it."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"output: {str(output)!r} is a file; choose another folder")
    if not any(output.iterdir()):
        return
    manifest = read_manifest(output)
    if manifest is None:
        raise UserError(
            f"output: {str(output)!r} is not empty and not a prepared dataset (no {MANIFEST_NAME} of ours); "
            "choose another folder or empty it"
        )
    ours = {MANIFEST_NAME, *manifest["files"]}
    foreign = sorted(
        name
        for path in output.rglob("*")
        if not path.is_dir() and (name := path.relative_to(output).as_posix()) not in ours
    )
    if foreign:
        raise UserError(
            f"output: {str(output)!r} holds {foreign[0]!r}, which is not part of the prepared dataset there; "
            "move it away or choose another folder"
        )


def remove_prepared(folder: Path) -> None:
    """Delete a folder that we made and nobody added to; anything else stays."""
    if read_manifest(folder) is None:
        return
    with suppress(UserError):
        refuse_foreign(folder)
        shutil.rmtree(folder)


def _made(output: Path) -> tuple[Path, int]:
    """A new hidden folder and the open lock on it, by which others know that its process lives."""
    while True:
        partial = output.with_name(f".{output.name}.partial-{uuid.uuid4().hex[:8]}")
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"output: {str(output)!r} cannot be made ({error.strerror}); choose another folder"
            ) from error
        lock = _locked(partial)
        if lock is not None and partial.exists():  # else a clean-up got it before it was locked
            return partial, lock


def _locked(folder: Path) -> int | None:
    """The open lock on a folder; None where a living process has it or it is gone. The kernel drops a dead one's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _recover(output: Path) -> None:
    """Finish or undo what a killed preparation left beside `output`."""
    for kind in ("old", "partial"):
        for left in sorted(output.parent.glob(f".{_escaped(output.name)}.{kind}-*")):
            lock = _locked(left)
            if lock is None:
                continue
            if kind == "old" and not output.exists():
                left.rename(output)  # killed between the two renames of `_replace_in_two_steps`
            else:
                shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _escaped(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _on_disk(folder: Path) -> None:
    """Have the kernel write everything below `folder`, so that a power cut cannot leave the new name on empty files."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(output: Path, new: Path) -> None:
    """Put `new` in the place of `output`, whose old content then is at `new`, in one step of the file system."""
    if not output.exists():
        new.rename(output)
    elif not _exchanged(output, new):
        _replace_in_two_steps(output, new)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two names at once (Linux, most of its file systems). Returns whether that could be done."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _replace_in_two_steps(output: Path, new: Path) -> None:
    """Where names cannot be swapped: for a moment there is no output, and `_recover` undoes a kill in that moment."""
    old = output.with_name(new.name.replace(".partial-", ".old-"))
    output.rename(old)
    lock = _locked(old)
    try:
        new.rename(output)
    except OSError:
        old.rename(output)
        raise
    else:
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)
