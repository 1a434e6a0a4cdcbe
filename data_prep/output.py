"""What the output folder of a preparation may replace; it appears complete or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adora_vl.data.dataset import MANIFEST_NAME, read_manifest
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import is_partial, recover_folder, replacing_folder, unwritable, written_to

# The keys of a manifest that identify a dataset: where they are equal, the same command makes it again.
_IDENTITY = ("source", "input", "revision", "arguments")
_DECIDES_NO_ROW = "allow_quarantined"  # people are told to raise it, and the rows stay the same


@contextmanager
def complete_or_absent(
    output: Path, description: Mapping[str, Any] | None = None, *, overwrite: bool = True
) -> Iterator[Path]:
    """A folder to write into, hidden beside `output`, that takes the place of `output` when the block ends.

    On any exception it is removed and `output` stays as it was; what a killed process left of it is removed by the next
    preparation of the same output. Raises `UserError` where `output` holds anything that we did not prepare, without
    `overwrite` also where it holds another dataset than that of `description`, and where the disk is full.
    """
    output = output.resolve()
    with written_to("output", output):
        recover_folder(output)
    _refuse(output, description, overwrite)
    try:
        with replacing_folder(output) as folder:
            yield folder
            _refuse(output, description, overwrite)  # again, since preparing takes long
    except OSError as error:
        path = Path(error.filename or output)
        places = [place for place in (path, *path.parents) if place.parent == output.parent and is_partial(place)]
        hidden = any(place.name.startswith(f".{output.name}.") for place in places)  # in the hidden folder beside it
        if error.errno is None or not (hidden or path in (output, *output.parents)):
            raise  # something else than what is written here
        raise unwritable("output", output, error) from error


def _refuse(output: Path, description: Mapping[str, Any] | None, overwrite: bool) -> None:
    refuse_foreign(output)
    if not overwrite:
        assert description is not None, "without it no dataset is the same"
        refuse_another(output, description)


def refuse_another(output: Path, description: Mapping[str, Any]) -> None:
    """Raise `UserError` where `output` is a prepared dataset with another `description`."""
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
    """The first difference of two descriptions, in a few words."""
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
        what = f"is not empty and not a prepared dataset (no {MANIFEST_NAME} of ours)"
        raise UserError(f"output: {str(output)!r} {what}; choose another folder or empty it")
    there = {path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()}
    foreign = there - {MANIFEST_NAME, *manifest["files"]}
    if foreign:
        holds = f"{str(output)!r} holds {min(foreign)!r}, which is not part of the prepared dataset there"
        raise UserError(f"output: {holds}; move it away or choose another folder")


def remove_report(folder: Path) -> None:
    """Delete the report of an earlier try, unless somebody has put files of their own into it."""
    manifest = read_manifest(folder)
    if manifest is None or manifest["counts"]:
        return
    with suppress(UserError):
        refuse_foreign(folder)
        shutil.rmtree(folder)
