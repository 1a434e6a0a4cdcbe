"""Whether the output folder can be written to, and has room for what the run will write."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from adora_vl.doctor.result import Check, failed, passed
from adora_vl.memory import GIB


def _nearest(folder: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def check_writable(folder: Path) -> Check:
    """A file can be made in it, or in what will be above it. Nothing is left behind."""
    title, place = "output folder is writable", _nearest(folder)
    try:
        if not place.is_dir():
            raise NotADirectoryError(f"{str(place)!r} is a file")
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"adora_vl")
    except OSError as error:
        detail = f"{folder}: {error.strerror or error}"
        return failed(title, detail, "choose another output_dir, or give this user the right to write there")
    return passed(title, str(folder))


def check_room(folder: Path, needed: int, checkpoint: int, kept: int) -> Check:
    """Free bytes against `needed`, all that the run's folder will hold at most."""
    title = "output folder has room"
    free = shutil.disk_usage(_nearest(folder)).free
    facts = (
        f"{free / GIB:.3g} GiB free, {needed / GIB:.3g} needed: {kept} checkpoint{'' if kept == 1 else 's'} of "
        f"{checkpoint / GIB:.3g}, one being written, the model"
    )
    if free < needed:
        return failed(title, facts, "lower save_total_limit, make room, or choose an output_dir on a larger disk")
    return passed(title, facts)
