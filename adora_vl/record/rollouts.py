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
from adora_vl.utils.files import remove_partial, replacing_file

ROLLOUTS_FOLDER = "rollouts"
IMAGES_FOLDER = "_images"
_PART_NAME_PATTERN = re.compile(r"rollouts-(\d+)-(\d+)\.parquet")
# When so many of the newest files are all within this size, they are merged
_PARTS_TO_MERGE = 32
_MAX_BYTES_TO_MERGE = 8_000_000


@dataclass(frozen=True)
class RecordPart:
    """One file of the record and the first and last step in it."""

    path: Path
    first_step: int
    last_step: int


def list_parts(folder: Path) -> list[RecordPart]:
    """Return the record's files in `folder`, in the order of their steps.

    A file whose steps another one has too is left out: it was merged into that one, and a crash
    came before it was deleted.
    """
    parts_or_none = [_part_of_path(path) for path in folder.glob("*")]
    all_parts = [part for part in parts_or_none if part is not None]
    merged_parts = set()
    for outer in all_parts:
        for inner in all_parts:
            is_within = outer.first_step <= inner.first_step and inner.last_step <= outer.last_step
            if is_within and inner != outer:
                merged_parts.add(inner)
    return sorted(set(all_parts) - merged_parts, key=lambda part: part.first_step)


def _part_of_path(path: Path) -> RecordPart | None:
    """Return the part with this path; None if the name is not that of a part."""
    match = _PART_NAME_PATTERN.fullmatch(path.name)
    if match is None:
        return None
    return RecordPart(path, first_step=int(match[1]), last_step=int(match[2]))


def write_part(folder: Path, table: pa.Table, first_step: int, last_step: int) -> RecordPart:
    """Write the rows of the steps from `first_step` to `last_step` as one file of the record.

    The data are on the disk before the file gets its name, so that no crash leaves half a file.
    """
    name = f"rollouts-{first_step:08}-{last_step:08}.parquet"
    part = RecordPart(folder / name, first_step=first_step, last_step=last_step)
    with replacing_file(part.path) as stream:
        pq.write_table(table, stream, compression="zstd")
    return part


def merge_small_parts(folder: Path) -> None:
    """Merge the newest files if they are many and small, so that a long run leaves few files."""
    newest_parts = list_parts(folder)[-_PARTS_TO_MERGE:]
    are_small = all(part.path.stat().st_size <= _MAX_BYTES_TO_MERGE for part in newest_parts)
    if len(newest_parts) < _PARTS_TO_MERGE or not are_small:
        return
    # A crash between here and the last deletion does no harm: `list_parts` leaves merged files out.
    write_part(
        folder,
        table=read_parts(newest_parts),
        first_step=newest_parts[0].first_step,
        last_step=newest_parts[-1].last_step,
    )
    for part in newest_parts:
        part.path.unlink()


def delete_oldest_parts(folder: Path, limit_bytes: float) -> None:
    """Delete the record's oldest files until the rest has at most `limit_bytes`.

    The newest file always stays.
    """
    bytes_by_part = {part: part.path.stat().st_size for part in list_parts(folder)}
    total_bytes = sum(bytes_by_part.values())
    oldest_first = list(bytes_by_part)
    for part in oldest_first[:-1]:
        if total_bytes <= limit_bytes:
            return
        total_bytes -= bytes_by_part[part]
        part.path.unlink()


def delete_steps_after(folder: Path, step: int) -> None:
    """Delete the rollouts of all steps after `step` from the record, as a run resumes there.

    0 deletes all of them and the diagrams. Files that are not the record's are not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    current_parts = list_parts(folder)
    current_paths = [part.path for part in current_parts]
    remove_partial(folder)
    remove_partial(folder / IMAGES_FOLDER)
    for path in folder.glob("rollouts-*"):
        is_merged = _part_of_path(path) is not None and path not in current_paths
        if is_merged:
            path.unlink()
    for part in current_parts:
        has_steps_on_both_sides = part.first_step <= step < part.last_step
        if has_steps_on_both_sides:
            # the rows up to `step` become a file of their own before their old file is deleted
            write_part(
                folder,
                table=read_part(part).filter(pc.field("step") <= step),
                first_step=part.first_step,
                last_step=step,
            )
        if part.last_step > step:
            part.path.unlink()
    if step == 0:
        shutil.rmtree(folder / IMAGES_FOLDER, ignore_errors=True)


def read_parts(record_parts: list[RecordPart]) -> pa.Table:
    """Return the rows of several files of the record in one table.

    A column that a file lacks is null in its rows.
    """
    tables = [read_part(part) for part in record_parts]
    return pa.concat_tables(tables, promote_options="default")


def read_part(part: RecordPart, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of one file of the record.

    Args:
        part: the file.
        columns: the columns to read; None reads all.

    Raises:
        UserError: the file is damaged.
        FileNotFoundError: the file is gone, as when a run that goes on has merged it meanwhile.
    """
    try:
        return pq.read_table(part.path, columns=columns)
    except FileNotFoundError:
        # an OSError too, but for the caller to handle: the file is not damaged
        raise
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"the record's file {str(part.path)!r} cannot be read ({in_one_line(error)}); move it "
            f"out of the run, and the record lacks the steps {part.first_step} to {part.last_step} and no "
            "others"
        ) from error


# pixels; a diagram is legible at this size, and a data set of 100,000 stays at about a GB
_MAX_SIDE_PIXELS = 512
# The note in a stored diagram that says how large it was
_SIZE_NOTE_KEY = "original size"


def read_original_size(path: Path) -> tuple[int, int] | None:
    """Return the width and height that a stored diagram had before `DiagramStore` made it smaller.

    They stand in a text note in the PNG file, as "640 480". None where the file is damaged.
    """
    try:
        with Image.open(path) as image:
            size_note = image.info.get(_SIZE_NOTE_KEY)
            if size_note is None:  # from a run of an older version, or not stored by `DiagramStore`
                return image.size
            width, height = size_note.split()
            return int(width), int(height)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


class DiagramStore:
    """The diagrams of the recorded rollouts, as PNG files that are named by their content.

    Files are written until the folder holds `limit_bytes`. Every rank may write: equal content has
    an equal name.
    """

    def __init__(self, folder: Path, limit_bytes: float) -> None:
        """Begin without knowing what the folder holds; nothing is read or written yet."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        # names of the image files of each dataset row whose images were stored already
        self._names_by_row_id: dict[str, list[str]] = {}
        # size of the folder, which `_used_bytes` counts when it is asked first
        self._folder_bytes: int | None = None

    def forget(self) -> None:
        """Forget what was stored, because the folder may have been emptied."""
        self._names_by_row_id.clear()
        self._folder_bytes = None

    def store(self, row_id: str | None, images: Sequence[object]) -> list[str]:
        """Store the images of a dataset row that are not stored yet, and return all file names.

        Args:
            row_id: the row's id. The images of an id are looked at once, and its later calls return
                the same names. None for images without such a row, which are always looked at.
            images: what is no image of PIL among them is left out.

        Raises:
            OSError: the disk is full, or refuses for another reason.
        """
        if row_id is not None and row_id in self._names_by_row_id:
            return self._names_by_row_id[row_id]
        names = [self._store(image) for image in images if isinstance(image, Image.Image)]
        if row_id is not None:
            self._names_by_row_id[row_id] = names
        return names

    def _store(self, image: Image.Image) -> str:
        """Store an image, if it is new and the limit allows it, and return the name of its file.

        The name is a hash of mode, size and pixels, so equal images share one file.
        """
        digest = hashlib.sha256(f"{image.mode} {image.size} ".encode())
        digest.update(image.tobytes())
        path = self.folder / f"{digest.hexdigest()[:16]}.png"
        if not path.exists() and self._used_bytes() < self.limit_bytes:
            self.folder.mkdir(parents=True, exist_ok=True)
            small_image = image.convert("RGB")
            small_image.thumbnail((_MAX_SIDE_PIXELS, _MAX_SIDE_PIXELS))
            # counted before the new file is there, which would be counted twice otherwise
            bytes_before = self._used_bytes()
            png_notes = PngInfo()
            png_notes.add_text(_SIZE_NOTE_KEY, f"{image.width} {image.height}")
            # A diagram that a crash of the machine loses does no harm, so the disk is not waited for.
            with replacing_file(path, durable=False) as stream:
                small_image.save(stream, "PNG", pnginfo=png_notes)
            self._folder_bytes = bytes_before + path.stat().st_size
        return path.name

    def _used_bytes(self) -> int:
        """Return the size of all files in the folder, which is counted once and kept up after."""
        if self._folder_bytes is None:
            self._folder_bytes = sum(_size_or_zero(path) for path in self.folder.glob("*"))
        return self._folder_bytes


def _size_or_zero(path: Path) -> int:
    """Return the bytes of a file, or 0 if it has gone since the folder was listed.

    The hidden file that another rank writes goes when it gets its name. To fail there would lose the
    names of this rank's diagrams in the record, as a full disk does.
    """
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


SETTINGS_METADATA_KEY = b"adora_vl"  # key of the run's settings in every file's metadata
_TYPE_BY_COLUMN: dict[str, pa.DataType] = {
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
# values of the rollouts by the column's name, equally many in each column
RecordColumns = dict[str, list[Any]]


def describe_turns(
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str],
    store_images: Callable[[Sequence[object]], list[str]],
) -> list[dict[str, Any]]:
    """Return a rollout with tools as a conversation, for the column `turns` of the record.

    Each segment of the rollout becomes one turn, either of the model, whose tokens were sampled, or
    of the tools that it called. Calls and pictures name the segment that they stand in by its
    index, `span`.

    Args:
        rollout: the rollout.
        decode: turns token ids into text.
        store_images: stores pictures and returns the names of their files.
    """
    turns = []
    for segment_index, segment in enumerate(rollout.segments):
        calls = [call for call in rollout.calls if call.span == segment_index]
        pictures = [picture.image for picture in rollout.pictures if picture.span == segment_index]
        if segment.is_sampled:
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
                "images": store_images(pictures),
                "seconds": sum(call.seconds for call in calls),
                "failed": any(call.failed for call in calls),
            }
        )
    return turns


def criteria_columns(groups: Groups) -> RecordColumns:
    """Return what ADORA's criteria compare in each group, as columns of the record.

    These are the group's share of correct rollouts, the length of its longest correct rollout and
    the mean length of its wrong ones that were not truncated. Where the reward `steps` counts a
    rollout's true new claims less its errors (its "work"), the same two values of work follow.

    Each column has one value per rollout, P x G of them, equal within a group. It is NaN where a
    group has no such rollout, which the record writes as null.
    """
    columns_P = {
        "pass_rate": groups.pass_rate_P,
        "longest_right": groups.longest_correct_P.where(groups.correct_PG.any(dim=1), math.nan),
        "mean_wrong": groups.mean_finished_wrong_P,
    }
    if groups.work_PG is not None:
        has_right_P = groups.correct_PG.any(dim=1) & groups.has_work_P
        largest_correct_work_P = groups.largest_correct_P(groups.work_PG)
        columns_P["work_right"] = largest_correct_work_P.where(has_right_P, math.nan)
        columns_P["work_wrong"] = groups.mean_of_finished_wrong_P(groups.work_PG)
    group_size = groups.lengths_PG.shape[1]
    return {
        name: column_P.repeat_interleave(group_size).tolist()
        for name, column_P in columns_P.items()
    }


def make_table(columns: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]) -> pa.Table:
    """Return rollouts as an Arrow table with the columns and types of the record.

    Args:
        columns: the values by column. A column that the record has and these lack becomes null; one
            that only these have, as `reward/<function>`, becomes a float.
        settings: the run's settings, which become the metadata of the table.
    """
    row_count = len(columns["step"])
    further_types = {name: pa.float32() for name in columns if name not in _TYPE_BY_COLUMN}
    type_by_column = {**_TYPE_BY_COLUMN, **further_types}
    arrays = []
    for name, data_type in type_by_column.items():
        values = columns.get(name) or [None] * row_count
        if pa.types.is_floating(data_type):
            # NaN and infinity become null, which every reader of Parquet leaves out of a mean
            values = [
                value if value is not None and math.isfinite(value) else None for value in values
            ]
        arrays.append(pa.array(values, data_type))
    settings_json = json.dumps(settings, sort_keys=True, default=str)
    schema = pa.schema(
        list(type_by_column.items()), metadata={SETTINGS_METADATA_KEY: settings_json}
    )
    return pa.table(arrays, schema=schema)


class Record:
    """The record of one run: rollouts wait until their step ends, and are written then.

    Only one process writes.
    """

    def __init__(
        self, output_dir: Path, limit_gb: float, settings: Mapping[str, Any], ranks: int = 1
    ) -> None:
        """Build an empty record; nothing is read or written yet.

        Args:
            output_dir: the folder of the run.
            limit_gb: the largest size of the record, in GB: half of it for the rollouts, half for
                their diagrams.
            settings: settings of the run, which stand in every file of the record.
            ranks: how many ranks share the half for diagrams, as each of them writes its own.
        """
        self.folder = output_dir / ROLLOUTS_FOLDER
        self._limit_bytes = limit_gb * 1e9 / 2
        self._settings = settings
        # the batches of the present step, in the order in which they were added
        self._waiting_batches: list[RecordColumns] = []
        self.diagrams = DiagramStore(
            self.folder / IMAGES_FOLDER, limit_bytes=self._limit_bytes / ranks
        )
        # why recording has ended: the message of the disk; None while it goes on
        self.failure_reason: str | None = None

    def start(self, step: int) -> None:
        """Start recording after `step`; rollouts that were recorded for later steps are deleted."""
        self._waiting_batches.clear()
        delete_steps_after(self.folder, step)

    def add(self, columns: RecordColumns, group_size: int) -> None:
        """Add a batch of rollouts, which waits until `flush` writes it.

        Args:
            columns: the values of the rollouts of all ranks by column, group after group. The
                columns `group` and `rollout` are added to it.
            group_size: rollouts of a group.
        """
        # groups of one step are numbered through, also where it has several batches
        waiting_rows = sum(len(batch["step"]) for batch in self._waiting_batches)
        first_group = waiting_rows // group_size
        row_count = len(columns["step"])
        columns["group"] = [first_group + row // group_size for row in range(row_count)]
        columns["rollout"] = [row % group_size for row in range(row_count)]
        self._waiting_batches.append(columns)

    def fill_in(self, name: str, values_by_batch: Sequence[Sequence[float]]) -> None:
        """Write values that are known only now into a column of the rows that wait for `flush`.

        Args:
            name: the column. A batch that lacks it gets it.
            values_by_batch: for each waiting batch, in the order in which they were added, a value
                for each of its rows. Where it is NaN, the row keeps the value that it has.
        """
        # `strict=False`: values still come after the disk has refused a file, but no batch waits.
        for columns, new_values in zip(self._waiting_batches, values_by_batch, strict=False):
            old_values = columns.get(name) or new_values
            columns[name] = [
                old if math.isnan(new) else new
                for old, new in zip(old_values, new_values, strict=True)
            ]

    def flush(self, step: int) -> None:
        """Write the waiting rows as the file of `step`, and keep the record within its limit.

        If the disk refuses, one line says so and recording ends, but the run goes on.
        """
        if not self._waiting_batches:
            return
        tables = [make_table(columns, self._settings) for columns in self._waiting_batches]
        self._waiting_batches.clear()
        try:
            write_part(
                self.folder,
                table=pa.concat_tables(tables, promote_options="default"),
                first_step=step,
                last_step=step,
            )
            merge_small_parts(self.folder)
            delete_oldest_parts(self.folder, self._limit_bytes)
        except OSError as error:
            self.failure_reason = str(error)
            print(
                f"step {step}: the rollouts are no longer recorded ({error})",
                file=sys.stderr,
                flush=True,
            )
