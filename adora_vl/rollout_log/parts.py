"""The record on disk: Parquet files, named by the range of steps that they hold. Every file is whole.

output_dir/rollouts/rollouts-00000001-00000032.parquet    steps 1 to 32
output_dir/rollouts/_images/<hash>.png                    the diagrams, each once

Readers of a folder of Parquet files pass over names that begin with . or _. A file is written under such a name and
then renamed. When small files are merged, the merged file is renamed first and the small ones are deleted afterwards.
If a crash happens in between, files whose range lies inside that of another one are ignored, so no row is read twice.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from adora_vl.files import remove_partial, replacing

ROLLOUTS, IMAGES = "rollouts", "_images"
_NAME = re.compile(r"rollouts-(\d+)-(\d+)\.parquet")
_MERGE_COUNT, _MERGE_BYTES = 32, 8_000_000  # when this many consecutive files are below this size, they are merged


@dataclass(frozen=True)
class Part:
    """One file of the record and the first and last step in it."""

    path: Path
    first: int
    last: int

    def covers(self, other: Part) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


def parts(folder: Path) -> list[Part]:
    """The files that count, in the order of their steps."""
    every = [] if not folder.is_dir() else [_part(path) for path in folder.iterdir()]
    found = [part for part in every if part is not None]
    return sorted((p for p in found if not any(other.covers(p) for other in found)), key=lambda part: part.first)


def _part(path: Path) -> Part | None:
    match = _NAME.fullmatch(path.name)
    return Part(path, int(match[1]), int(match[2])) if match else None


def write_part(folder: Path, table: pa.Table, first: int, last: int) -> Part:
    """Write the rows of the steps `first` to `last`. The data are on the disk before the file gets its name."""
    part = Part(folder / f"rollouts-{first:08}-{last:08}.parquet", first, last)
    with replacing(part.path) as stream:
        pq.write_table(table, stream, compression="zstd")
    return part


def merge_small(folder: Path) -> None:
    """Merge the newest files if they are many and small: a long run must not leave 100,000 files."""
    newest = parts(folder)[-_MERGE_COUNT:]
    if len(newest) < _MERGE_COUNT or any(part.path.stat().st_size > _MERGE_BYTES for part in newest):
        return
    write_part(folder, read_parts(newest), newest[0].first, newest[-1].last)
    for part in newest:
        part.path.unlink()


def rotate(folder: Path, limit_bytes: float) -> None:
    """Delete the oldest files until the rest is within the limit. The newest file always stays."""
    sizes = {part: part.path.stat().st_size for part in parts(folder)}
    total = sum(sizes.values())
    for part in list(sizes)[:-1]:
        if total <= limit_bytes:
            return
        total -= sizes[part]
        part.path.unlink()


def cut_after(folder: Path, step: int) -> None:
    """Delete everything after `step`, because the run resumes there; 0 deletes all. Other files are not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    counted = parts(folder)
    remove_partial(folder)
    remove_partial(folder / IMAGES)
    for path in folder.glob("rollouts-*"):
        if _part(path) is not None and path not in [part.path for part in counted]:
            path.unlink()
    for part in counted:
        if part.first <= step < part.last:
            table = pq.read_table(part.path)
            write_part(folder, table.filter(pc.field("step") <= step), part.first, step)
        if part.last > step:
            part.path.unlink()
    if step == 0:
        shutil.rmtree(folder / IMAGES, ignore_errors=True)


def read_parts(chosen: list[Part], columns: list[str] | None = None) -> pa.Table:
    """The rows of several files in one table. A column that a file lacks is null in its rows."""
    tables = [pq.read_table(part.path, columns=columns) for part in chosen]
    return pa.concat_tables(tables, promote_options="default")
