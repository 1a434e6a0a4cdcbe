"""An output folder that appears complete or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adora_vl.errors import UserError
from data_prep.storage import MANIFEST_NAME, read_manifest


@contextmanager
def complete_or_absent(output: Path) -> Iterator[Path]:
    """A folder to write into, `.NAME.partial-*` beside `output`, that takes the place of `output` when the block ends.

    On any exception it is removed and `output` stays as it was; after a kill only the hidden folder is left, to be
    deleted by hand. Raises `UserError` where `output` holds anything that we did not prepare.
    """
    output = output.resolve()
    refuse_foreign(output)
    partial = output.with_name(f".{output.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"output: {str(output)!r} cannot be made ({error.strerror}); choose another folder") from error
    try:
        yield partial
        refuse_foreign(output)  # again, since preparing takes long
        _replace(output, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already where all went well


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


def _replace(output: Path, new: Path) -> None:
    """Put `new` in the place of `output`. The old one is deleted last, and put back if that fails."""
    old = output.with_name(new.name.replace(".partial-", ".old-"))
    had_old = output.exists()
    if had_old:
        output.rename(old)
    try:
        new.rename(output)
    except OSError:
        if had_old:
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)
