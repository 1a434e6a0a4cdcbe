"""The output folder of a preparation: it appears complete or not at all, and replaces only ours."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adora_vl.data.dataset import MANIFEST_NAME, read_manifest
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import (
    is_partial,
    recover_folder,
    replacing_folder,
    unwritable,
    written_to,
)

_DECIDES_NO_ROW = "allow_quarantined"  # people are told to raise it, and the rows stay the same


@contextmanager
def complete_or_absent(
    output: Path, description: Mapping[str, Any] | None = None, *, overwrite: bool = True
) -> Iterator[Path]:
    """Yield a hidden folder beside `output` that takes its place when the block ends.

    On any exception it is removed and `output` stays as it was. Raises `UserError` where that holds
    what we did not prepare, without `overwrite` also another dataset than that of `description`,
    and where the disk is full.
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
        partial_folders = [
            folder
            for folder in (path, *path.parents)
            if folder.parent == output.parent and is_partial(folder)
        ]
        # in the hidden folder beside it
        hidden = any(folder.name.startswith(f".{output.name}.") for folder in partial_folders)
        if error.errno is None or not (hidden or path in (output, *output.parents)):
            raise  # something else than what is written here
        raise unwritable("output", output, error) from error


def _refuse(output: Path, description: Mapping[str, Any] | None, overwrite: bool) -> None:
    """Raise `UserError` where `output` holds something that may not be replaced.

    That is anything but a prepared data set, and without `overwrite` one of another `description`.
    """
    refuse_foreign(output)
    manifest = read_manifest(output)
    if overwrite or manifest is None:
        return
    assert description is not None, "without it no dataset is the same"
    stored = _identity(manifest)
    # through JSON, as the manifest was: tuples become lists
    new = _identity(json.loads(json.dumps(description)))
    for key in (*new, *stored):
        if stored.get(key) != new.get(key):
            difference = f"{key[-1]} {stored.get(key)!r:.60}, this one {new.get(key)!r:.60}"
            raise UserError(
                f"output: {str(output)!r} holds another prepared dataset ({difference}); choose "
                "another folder, or replace it with --overwrite"
            )


def _identity(description: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return what identifies a dataset: two with equal identities come from the same command."""
    arguments = {
        key: value
        for key, value in (description.get("arguments") or {}).items()
        if key != _DECIDES_NO_ROW
    }
    origin = {(key,): description.get(key) for key in ("source", "input", "revision")}
    return origin | {("arguments", key): value for key, value in arguments.items()}


def refuse_foreign(output: Path) -> None:
    """Raise `UserError` unless `output` is absent, empty, or holds only a prepared dataset."""
    with written_to("output", output):
        if not output.exists():
            return
        if not output.is_dir():
            raise UserError(f"output: {str(output)!r} is a file; choose another folder")
        if not any(output.iterdir()):
            return
    manifest = read_manifest(output)
    if manifest is None:
        reason = f"is not empty and not a prepared dataset (no {MANIFEST_NAME} of ours)"
        raise UserError(f"output: {str(output)!r} {reason}; choose another folder or empty it")
    present = {
        path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()
    }
    foreign = present - {MANIFEST_NAME, *manifest["files"]}
    if foreign:
        holds = (
            f"{str(output)!r} holds {min(foreign)!r}, which is not part of the prepared dataset "
            "there"
        )
        raise UserError(f"output: {holds}; move it away or choose another folder")


def remove_report(folder: Path) -> None:
    """Delete the report of an earlier try, unless somebody has put files of their own into it."""
    manifest = read_manifest(folder)
    if manifest is not None and not manifest["counts"]:
        with suppress(UserError):
            refuse_foreign(folder)
            shutil.rmtree(folder)
