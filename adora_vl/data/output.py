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
    naming_write_errors,
    recover_folder,
    replacing_folder,
    unwritable_error,
)

# The argument that changes no row. Users are told to raise it, so it may differ in a second try.
_ARGUMENT_WITHOUT_EFFECT_ON_ROWS = "allow_quarantined"


@contextmanager
def complete_or_absent(
    output: Path, description: Mapping[str, Any] | None = None, *, overwrite: bool = True
) -> Iterator[Path]:
    """Yield a hidden folder to write a data set into, which becomes `output` when the block ends.

    On any exception it is removed, and `output` stays as it was.

    Args:
        output: the folder of the data set.
        description: the source and arguments that the manifest will have, by which the data set is
            told from another one; needed only without `overwrite`.
        overwrite: whether another prepared data set in `output` may be replaced.

    Raises:
        UserError: `output` holds something that may not be replaced, or cannot be written, as on a
            full disk.
    """
    output = output.resolve()
    with naming_write_errors("output", output):  # turns an OSError into a `UserError`
        recover_folder(output)  # undoes what a process that was killed has left half done
    _refuse_to_replace(output, description, overwrite)
    try:
        with replacing_folder(output) as folder:  # a new folder, which is renamed at the end
            yield folder
            _refuse_to_replace(output, description, overwrite)  # again, since preparing takes long
    except OSError as error:
        path = Path(error.filename or output)
        is_about_output = path in (output, *output.parents) or _is_in_hidden_folder(path, output)
        is_disk_error = error.errno is not None
        if not is_disk_error or not is_about_output:
            raise  # an error of the block, about another file
        raise unwritable_error("output", output, error) from error


def _is_in_hidden_folder(path: Path, output: Path) -> bool:
    """Return whether `path` is in the hidden folder beside `output` that is being written."""
    for folder in (path, *path.parents):
        is_hidden_name = folder.name.startswith(f".{output.name}.")
        if folder.parent == output.parent and is_partial(folder) and is_hidden_name:
            return True
    return False


def _refuse_to_replace(
    output: Path, description: Mapping[str, Any] | None, overwrite: bool
) -> None:
    """Raise `UserError` where `output` holds something that may not be replaced.

    That is anything but a prepared data set. Without `overwrite` it is also a data set of another
    `description`.
    """
    refuse_unknown_files(output)
    manifest = read_manifest(output)
    if overwrite or manifest is None:
        return
    assert description is not None, "without it no dataset is the same"
    stored_identity = _identity_of_description(manifest)
    # The manifest was stored as JSON, in which tuples become lists.
    new_identity = _identity_of_description(json.loads(json.dumps(description)))
    for key in (*new_identity, *stored_identity):
        stored_value = stored_identity.get(key)
        new_value = new_identity.get(key)
        if stored_value != new_value:
            raise UserError(
                f"output: {str(output)!r} holds another prepared dataset ({key[-1]} "
                f"{stored_value!r:.60}, this one {new_value!r:.60}); choose another folder, or "
                "replace it with --overwrite"
            )


def _identity_of_description(description: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return what identifies a dataset: two with equal identities come from the same command.

    `description` is what the manifest says of the source and the arguments. The keys of the result
    are paths in it, such as `("source",)` or `("arguments", "seed")`.
    """
    identity: dict[tuple[str, ...], Any] = {}
    for key in ("source", "input", "revision"):
        identity[(key,)] = description.get(key)
    for key, value in (description.get("arguments") or {}).items():
        if key != _ARGUMENT_WITHOUT_EFFECT_ON_ROWS:
            identity[("arguments", key)] = value
    return identity


def refuse_unknown_files(output: Path) -> None:
    """Raise `UserError` unless `output` is absent, empty, or holds only a prepared dataset."""
    with naming_write_errors("output", output):  # turns an OSError into a `UserError`
        if not output.exists():
            return
        if not output.is_dir():
            raise UserError(f"output: {str(output)!r} is a file; choose another folder")
        if not any(output.iterdir()):
            return
    manifest = read_manifest(output)
    if manifest is None:
        raise UserError(
            f"output: {str(output)!r} is not empty and not a prepared dataset (no {MANIFEST_NAME} "
            "of ours); choose another folder or empty it"
        )
    file_names = {
        path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()
    }
    unknown_names = file_names - {MANIFEST_NAME, *manifest["files"]}
    if unknown_names:
        raise UserError(
            f"output: {str(output)!r} holds {min(unknown_names)!r}, which is not part of the "
            "prepared dataset there; move it away or choose another folder"
        )


def remove_quarantine_report(folder: Path) -> None:
    """Delete a folder with the unusable rows of an earlier try, which prepared no data set.

    It stays if somebody has put other files into it.
    """
    manifest = read_manifest(folder)
    is_report = manifest is not None and not manifest["counts"]
    if is_report:
        with suppress(UserError):
            refuse_unknown_files(folder)
            shutil.rmtree(folder)
