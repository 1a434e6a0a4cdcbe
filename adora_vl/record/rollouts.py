"""The record of rollouts: Parquet files in `output_dir/rollouts`, with each diagram stored once."""

import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from adora_vl.advantage.groups import Groups
from adora_vl.rollout.rollouts import Rollout
from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.files import remove_partial, replacing

ROLLOUTS = "rollouts"
IMAGES = "_images"
_NAME = re.compile(r"rollouts-(\d+)-(\d+)\.parquet")
# When so many of the newest files are all within this size, they are merged
_MERGE_COUNT = 32
_MERGE_BYTES = 8_000_000


@dataclass(frozen=True)
class Part:
    """One file of the record and the first and last step in it."""

    path: Path
    first: int
    last: int


def parts(folder: Path) -> list[Part]:
    """Return the files that count, in the order of their steps.

    A file whose steps another one has too is left out: it was merged, and a crash has kept it from
    being deleted.
    """
    candidates = [_part_of_path(path) for path in folder.glob("*")]
    all_parts = [part for part in candidates if part is not None]
    merged = set()
    for outer in all_parts:
        for inner in all_parts:
            if outer != inner and outer.first <= inner.first and inner.last <= outer.last:
                merged.add(inner)
    return sorted(set(all_parts) - merged, key=lambda part: part.first)


def _part_of_path(path: Path) -> Part | None:
    """Return the part with this path; None if the name is not that of a part."""
    match = _NAME.fullmatch(path.name)
    return Part(path, int(match[1]), int(match[2])) if match else None


def write_part(folder: Path, table: pa.Table, first: int, last: int) -> Part:
    """Write the rows of the steps `first` to `last`.

    The data are on the disk before the file gets its name.
    """
    part = Part(folder / f"rollouts-{first:08}-{last:08}.parquet", first, last)
    with replacing(part.path) as stream:
        pq.write_table(table, stream, compression="zstd")
    return part


def merge_small(folder: Path) -> None:
    """Merge the newest files if they are many and small, so that a long run leaves few files."""
    newest = parts(folder)[-_MERGE_COUNT:]
    if len(newest) < _MERGE_COUNT or any(
        part.path.stat().st_size > _MERGE_BYTES for part in newest
    ):
        return
    write_part(folder, table=read_parts(newest), first=newest[0].first, last=newest[-1].last)
    for part in newest:
        part.path.unlink()


def rotate(folder: Path, limit_bytes: float) -> None:
    """Delete the oldest files until the rest is within the limit; the newest file always stays."""
    sizes = {part: part.path.stat().st_size for part in parts(folder)}
    total = sum(sizes.values())
    for part in list(sizes)[:-1]:
        if total <= limit_bytes:
            return
        total -= sizes[part]
        part.path.unlink()


def cut_after(folder: Path, step: int) -> None:
    """Delete everything after `step`, because the run resumes there; 0 deletes all.

    Other files are not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counted = parts(folder)
    remove_partial(folder)
    remove_partial(folder / IMAGES)
    for path in folder.glob("rollouts-*"):
        if _part_of_path(path) is not None and path not in [part.path for part in counted]:
            path.unlink()
    for part in counted:
        if part.first <= step < part.last:
            write_part(
                folder,
                table=read_part(part).filter(pc.field("step") <= step),
                first=part.first,
                last=step,
            )
        if part.last > step:
            part.path.unlink()
    if step == 0:
        shutil.rmtree(folder / IMAGES, ignore_errors=True)


def read_parts(chosen: list[Part]) -> pa.Table:
    """Return the rows of several files in one table.

    A column that a file lacks is null in its rows.
    """
    return pa.concat_tables([read_part(part) for part in chosen], promote_options="default")


def read_part(part: Part, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of one file.

    Raises `UserError` where it is damaged, and `FileNotFoundError` where it is gone.
    """
    try:
        return pq.read_table(part.path, columns=columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"the record's file {str(part.path)!r} cannot be read ({in_one_line(error)}); move it "
            f"out of the run, and the record lacks the steps {part.first} to {part.last} and no "
            "others"
        ) from error


# pixels; a diagram is legible at this size, and a data set of 100,000 stays at about a GB
_LONGEST_SIDE = 512
# The note in a stored diagram that says how large it was
_SIZE_NOTE = "original size"


def picture_size(path: Path) -> tuple[int, int] | None:
    """Return the width and height that a stored diagram had before it was made smaller.

    None where it is damaged.
    """
    try:
        with Image.open(path) as image:
            note = image.info.get(_SIZE_NOTE)
            if note is None:  # stored before the note was written, or not by this module
                return image.size
            width, height = note.split()
            return int(width), int(height)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


class Diagrams:
    """The diagrams of the recorded rollouts, as PNG files that are named by their content.

    Files are written until the folder holds `limit_bytes`. Every rank may write: equal content has
    an equal name.
    """

    def __init__(self, folder: Path, limit_bytes: float) -> None:
        """Nothing is read or written yet."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._names: dict[str, list[str]] = {}
        self._bytes: int | None = None

    def forget(self) -> None:
        """Forget what was stored, because the folder may have been emptied."""
        self._names.clear()
        self._bytes = None

    def keep(self, row_id: str | None, images: Sequence[object]) -> list[str]:
        """Store those images of a row that are new, and return all their file names.

        A row with an id is looked at once. `OSError` is raised where the disk refuses.
        """
        if row_id is not None and row_id in self._names:
            return self._names[row_id]
        names = [self._store(image) for image in images if isinstance(image, Image.Image)]
        if row_id is not None:
            self._names[row_id] = names
        return names

    def _store(self, image: Image.Image) -> str:
        """Store an image, if it is new and there is room, and return the name of its file."""
        digest = hashlib.sha256(f"{image.mode} {image.size} ".encode())
        digest.update(image.tobytes())
        path = self.folder / f"{digest.hexdigest()[:16]}.png"
        if not path.exists() and self._used_bytes() < self.limit_bytes:
            self.folder.mkdir(parents=True, exist_ok=True)
            small = image.convert("RGB")
            small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
            before = self._used_bytes()
            notes = PngInfo()
            notes.add_text(_SIZE_NOTE, f"{image.width} {image.height}")
            with replacing(path, durable=False) as stream:
                small.save(stream, "PNG", pnginfo=notes)
            self._bytes = before + path.stat().st_size
        return path.name

    def _used_bytes(self) -> int:
        """Return bytes of all files in the folder; counted once, and added to afterwards."""
        if self._bytes is None:
            self._bytes = sum(path.stat().st_size for path in self.folder.glob("*"))
        return self._bytes


SETTINGS = b"adora_vl"  # key of the run's settings in every file's metadata
_TYPES: dict[str, pa.DataType] = {
    "step": pa.int32(),  # the first optimizer step that learns from it, as in metrics.jsonl
    "group": pa.int32(),  # number of the group in its step
    "rollout": pa.int16(),  # number of the rollout in its group
    "id": pa.string(),
    "problem": pa.string(),
    "choices": pa.list_(pa.string()),  # null where the problem is open
    "answer": pa.string(),
    "images": pa.list_(pa.string()),  # file names in rollouts/_images
    "completion": pa.string(),
    "verdict": pa.string(),
    "extracted": pa.string(),
    "reason": pa.string(),  # the rule that decided, from the grader
    # of the reward `steps`: its true and new claims, its errors, and all claims as JSON, each with
    # its first and last character and its verdict; null without it, and where a row has no figure
    "new": pa.int16(),
    "false": pa.int16(),
    "steps": pa.string(),
    # the weighted sum of the parts, which are reward/<function>; null without one
    "reward": pa.float32(),
    "missing": pa.string(),  # why the rollout has left its group; null where it has not
    "advantage_raw": pa.float32(),
    "advantage": pa.float32(),  # as the loss gets it; 0 for a rollout of a group that was replaced
    "weight": pa.float32(),
    "tds": pa.bool_(),
    "pass_rate": pa.float32(),
    "longest_right": pa.float32(),  # tokens; null where none is right
    "mean_wrong": pa.float32(),  # tokens, of the untruncated wrong ones; null where there is none
    "length": pa.int32(),
    "truncated": pa.bool_(),
    "segments": pa.int16(),  # in how many parts it was sampled (adora_rollouts.budget)
    "age": pa.int16(),  # generations since its group began
    "calls": pa.int16(),  # of tools; null in a run without
    # the texts of the model and of tools, in order; `completion` is the last turn
    "turns": pa.list_(
        pa.struct(
            {
                "by": pa.string(),
                "text": pa.string(),
                "tokens": pa.int32(),
                "images": pa.list_(pa.string()),
                "seconds": pa.float32(),
                "failed": pa.bool_(),
            }
        )
    ),
    # mean |log-probability difference| of engine and trainer, nats per token
    "drift": pa.float32(),
}
Columns = dict[str, list[Any]]


def turns_of(
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str],
    keep: Callable[[Sequence[object]], list[str]],
) -> list[dict[str, Any]]:
    """Return a rollout as a conversation: one turn of `model` or `tool` for each of its segments.

    Args:
        rollout: the rollout.
        decode: turns tokens into text.
        keep: stores pictures, and returns the names of their files.
    """
    turns = []
    for number, segment in enumerate(rollout.segments):
        calls = [call for call in rollout.calls if call.span == number]
        pictures = [picture.image for picture in rollout.pictures if picture.span == number]
        if segment.logps is not None:
            speaker = "model"
            text = decode(segment.tokens)
        else:
            speaker = "tool"
            text = "\n".join(call.text for call in calls)
        turns.append(
            {
                "by": speaker,
                "text": text,
                "tokens": len(segment.tokens),
                "images": keep(pictures),
                "seconds": sum(call.seconds for call in calls),
                "failed": any(call.failed for call in calls),
            }
        )
    return turns


def criteria_columns(groups: Groups) -> Columns:
    """Return what ADORA's criteria compare in each group, as columns of the record.

    That is the length of its longest right and the mean length of its wrong rollouts, and the same
    of their work: the share of true new steps that the reward `steps` has measured. Each column has
    one value per rollout, P x G; NaN, where a group has no such rollout, becomes null.
    """
    columns_P = {
        "pass_rate": groups.pass_rate_P,
        "longest_right": groups.longest_correct_P.where(groups.correct_PG.any(dim=1), math.nan),
        "mean_wrong": groups.mean_finished_wrong_P,
    }
    if groups.work_PG is not None:
        has_right_P = groups.correct_PG.any(dim=1) & groups.has_work_P
        work_right_P = groups.largest_correct_P(groups.work_PG)
        columns_P["work_right"] = work_right_P.where(has_right_P, math.nan)
        columns_P["work_wrong"] = groups.mean_of_finished_wrong_P(groups.work_PG)
    rollouts = groups.lengths_PG.shape[1]
    return {
        name: column_P.repeat_interleave(rollouts).tolist() for name, column_P in columns_P.items()
    }


def as_table(columns: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]) -> pa.Table:
    """Return the rows with the types of the record; a figure that is missing or not finite is null.

    `settings` become the metadata of the table.
    """
    count = len(columns["step"])
    types = {**_TYPES, **{name: pa.float32() for name in columns if name not in _TYPES}}
    arrays = []
    for name, kind in types.items():
        values = columns.get(name) or [None] * count
        if pa.types.is_floating(kind):
            values = [
                value if value is not None and math.isfinite(value) else None for value in values
            ]
        arrays.append(pa.array(values, kind))
    schema = pa.schema(
        list(types.items()), metadata={SETTINGS: json.dumps(settings, sort_keys=True, default=str)}
    )
    return pa.table(arrays, schema=schema)


class Record:
    """The record of one run: rows wait until their step ends, and are written then.

    One process writes.
    """

    def __init__(
        self, output_dir: Path, limit_gb: float, settings: Mapping[str, Any], ranks: int = 1
    ) -> None:
        """Nothing is read or written yet.

        Args:
            output_dir: the folder of the run.
            limit_gb: the size of the record, in GB.
            settings: the keys of the run that every file of the record has.
            ranks: how many ranks share the room for diagrams.
        """
        self.folder = output_dir / ROLLOUTS
        self._limit_bytes = limit_gb * 1e9 / 2  # the other half is for the diagrams
        self._settings = settings
        self._waiting: list[Columns] = []
        self.diagrams = Diagrams(self.folder / IMAGES, self._limit_bytes / ranks)
        # why recording has ended; None while it goes on
        self.failed: str | None = None

    def start(self, step: int) -> None:
        """Start recording after `step`; the records of later steps are deleted."""
        self._waiting.clear()
        cut_after(self.folder, step)

    def add(self, columns: Columns, generations: int) -> None:
        """Add the rows of one batch of all ranks, group by group, of `generations` rows each."""
        # groups of one step are numbered through, also where it has several generations
        waiting_rows = sum(len(waiting["step"]) for waiting in self._waiting)
        waiting_groups = waiting_rows // generations
        count = len(columns["step"])
        columns["group"] = [waiting_groups + row // generations for row in range(count)]
        columns["rollout"] = [row % generations for row in range(count)]
        self._waiting.append(columns)

    def set_late(self, name: str, batches: Sequence[Sequence[float]]) -> None:
        """Fill in a column of the waiting batches, where its value is known now (not NaN).

        `batches`: the values of each waiting batch, in the order in which the batches were added.
        """
        # A record that has failed has no waiting batches, though its values go on to come.
        for columns, late_values in zip(self._waiting, batches, strict=False):
            earlier_values = columns.get(name) or late_values
            pairs = zip(earlier_values, late_values, strict=True)
            columns[name] = [early if math.isnan(late) else late for early, late in pairs]

    def flush(self, step: int) -> None:
        """Write the waiting rows.

        If the disk refuses, one line says so and recording ends, but the run goes on.
        """
        if not self._waiting:
            return
        tables = [as_table(columns, self._settings) for columns in self._waiting]
        self._waiting.clear()
        try:
            write_part(
                self.folder,
                table=pa.concat_tables(tables, promote_options="default"),
                first=step,
                last=step,
            )
            merge_small(self.folder)
            rotate(self.folder, self._limit_bytes)
        except OSError as error:
            self.failed = str(error)
            print(
                f"step {step}: the rollouts are no longer recorded ({error})",
                file=sys.stderr,
                flush=True,
            )
