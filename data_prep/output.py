"""Makes an output folder appear complete or not at all, even if the power, the process or the disk fails."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from adora_vl.files import unwritable, written_to
from data_prep.storage import MANIFEST_NAME, read_manifest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


# What of a manifest tells one prepared dataset from another: the same of it, and the same command makes it again.
_IDENTITY = ("source", "input", "revision", "arguments")
_DECIDES_NO_ROW = "allow_quarantined"  # an argument that the error about too many broken rows tells people to raise


@contextmanager
def complete_or_absent(
    output: Path, description: Mapping[str, Any] | None = None, *, overwrite: bool = True
) -> Iterator[Path]:
    """A folder to write into, `.NAME.partial-*` beside `output`, that takes the place of `output` when the block ends.

    On any exception it is removed and `output` stays as it was; what a killed process left of it is removed by the next
    preparation of the same output. Raises `UserError` where `output` holds anything that we did not prepare, without
    `overwrite` also where it holds another dataset than that of `description`, and where the disk is full.
    """
    output = output.resolve()
    with written_to("output", output):
        _recover(output)
    _refuse(output, description, overwrite)
    partial, lock = _made(output)
    try:
        yield partial
        _refuse(output, description, overwrite)  # again, since preparing takes long
        with written_to("output", output):
            _on_disk(partial)
            _replace(output, partial)
    except OSError as error:
        if error.errno is None or (error.filename is not None and partial not in Path(str(error.filename)).parents):
            raise  # something else than what is written here
        raise unwritable("output", output, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # by now the old output, or nothing
        os.close(lock)


def _refuse(output: Path, description: Mapping[str, Any] | None, overwrite: bool) -> None:
    refuse_foreign(output)
    if not overwrite:
        assert description is not None, "without it no dataset is the same"
        refuse_another(output, description)


def refuse_another(output: Path, description: Mapping[str, Any]) -> None:
    """Raise `UserError` where `output` is a prepared dataset with another `description`, which cannot be made again by
    the command that would replace it.
    """
    manifest = read_manifest(output)
    if manifest is None:
        return
    here, new = (_identity(found) for found in (manifest, json.loads(json.dumps(description))))
    differing = next((key for key in _IDENTITY if here[key] != new[key]), None)
    if differing:
        raise UserError(
            f"output: {str(output)!r} holds another prepared dataset ({_difference(differing, here, new)}); "
            "choose another folder, or replace it with --overwrite"
        )


def _identity(description: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: description.get(key) for key in _IDENTITY}
    if isinstance(found["arguments"], dict):
        found["arguments"] = {key: value for key, value in found["arguments"].items() if key != _DECIDES_NO_ROW}
    return found


def _difference(key: str, here: dict[str, Any], new: dict[str, Any]) -> str:
    """Where two descriptions part, in a few words."""
    old, now = here[key], new[key]
    if key == "arguments" and isinstance(old, dict):
        key = next(name for name in (*now, *old) if now.get(name) != old.get(name))
        old, now = old.get(key), now.get(key)
    return f"{key} {old!r:.60}, this one {now!r:.60}"


def refuse_foreign(output: Path) -> None:
    """Raise `UserError` unless `output` is absent, empty, or a prepared folder with nothing else in it."""
    with written_to("output", output):
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


def remove_report(folder: Path) -> None:
    """Delete the report of an earlier try, to which nobody added; anything else stays."""
    manifest = read_manifest(folder)
    if manifest is None or manifest["counts"]:
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
            raise unwritable("output", output, error) from error
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
