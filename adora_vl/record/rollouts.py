"""The record of rollouts: which columns it has, and how the rows of a step come into it."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from adora_vl.advantage.groups import Groups
from adora_vl.record.diagrams import DiagramStore
from adora_vl.record.record_files import (
    IMAGES_FOLDER,
    ROLLOUTS_FOLDER,
    delete_oldest_record_files,
    delete_steps_after,
    merge_small_record_files,
    write_record_file,
)
from adora_vl.rollout.rollouts import Rollout

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

    Each segment of the rollout becomes one turn. It is a turn of the model if its tokens were
    sampled, and else of the tools that the model called. The `segment_number` of a call or picture
    is the index of the segment that it stands in.

    Args:
        rollout: the rollout.
        decode: turns token ids into text.
        store_images: stores pictures and returns the names of their files.
    """
    turns = []
    for segment_index, segment in enumerate(rollout.segments):
        calls = [call for call in rollout.calls if call.segment_number == segment_index]
        pictures = [
            picture.image for picture in rollout.pictures if picture.segment_number == segment_index
        ]
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

        pass_rate       the group's share of correct rollouts
        longest_right   the length of its longest correct rollout
        mean_wrong      the mean length of its wrong rollouts that were not truncated
        work_right      as `longest_right`, with net claims in place of the length
        work_wrong      as `mean_wrong`, with net claims in place of the length

    Net claims are a rollout's true new claims less its false ones. They are there only in a run
    whose reward `steps` counts them.

    Each column has one value per rollout (P groups of G rollouts), equal within a group. The value
    is NaN where a group has no such rollout. The record writes NaN as null.
    """
    columns_P = {
        "pass_rate": groups.pass_rate_P,
        "longest_right": groups.longest_correct_P.where(groups.correct_PG.any(dim=1), math.nan),
        "mean_wrong": groups.mean_finished_wrong_P,
    }
    if groups.net_claims_PG is not None:
        has_right_P = groups.correct_PG.any(dim=1) & groups.has_net_claims_P
        largest_correct_claims_P = groups.largest_correct_P(groups.net_claims_PG)
        columns_P["work_right"] = largest_correct_claims_P.where(has_right_P, math.nan)
        columns_P["work_wrong"] = groups.mean_of_finished_wrong_P(groups.net_claims_PG)
    group_size = groups.lengths_PG.shape[1]
    return {
        name: column_P.repeat_interleave(group_size).tolist()
        for name, column_P in columns_P.items()
    }


def make_table(columns: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]) -> pa.Table:
    """Return rollouts as an Arrow table with the columns and types of the record.

    Args:
        columns: the values by column. A column of the record that is missing here becomes null. A
            column that the record does not know, such as `reward/<function>`, becomes a float.
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


class RolloutStore:
    """The record of one run: rollouts wait until their step ends, and are written then.

    Only one process writes.
    """

    def __init__(
        self, output_dir: Path, limit_gb: float, settings: Mapping[str, Any], rank_count: int = 1
    ) -> None:
        """Build an empty record; nothing is read or written yet.

        Args:
            output_dir: the folder of the run.
            limit_gb: the largest size of the record, in GB: half of it for the rollouts, half for
                their diagrams.
            settings: settings of the run, which stand in every file of the record.
            rank_count: how many ranks share the half for diagrams, as each of them writes its own.
        """
        self.folder = output_dir / ROLLOUTS_FOLDER
        self._limit_bytes = limit_gb * 1e9 / 2
        self._settings = settings
        # the batches of the present step, in the order in which they were added
        self._waiting_batches: list[RecordColumns] = []
        # for each of them the numbers by which its rows are found again
        self._rollout_numbers_of_batches: list[Sequence[int]] = []
        self.diagrams = DiagramStore(
            self.folder / IMAGES_FOLDER, limit_bytes=self._limit_bytes / rank_count
        )
        # why recording has ended: the message of the disk; None while it goes on
        self.failure_reason: str | None = None

    def start(self, step: int) -> None:
        """Start recording after `step`; rollouts that were recorded for later steps are deleted."""
        self._clear()
        delete_steps_after(self.folder, step)

    def _clear(self) -> None:
        """Drop the waiting rows."""
        self._waiting_batches.clear()
        self._rollout_numbers_of_batches.clear()

    def add(
        self, columns: RecordColumns, group_size: int, rollout_numbers: Sequence[int] = ()
    ) -> None:
        """Add a batch of rollouts, which waits until `flush` writes it.

        For example, a second batch of 4 rows in groups of 2, after a first batch of 6 rows, gets
        the groups 3, 3, 4, 4 and the rollouts 0, 1, 0, 1.

        Args:
            columns: the values of the rollouts of all ranks by column, group after group. The
                columns `group` and `rollout` are added to it.
            group_size: rollouts of a group.
            rollout_numbers: a number of each rollout, by which `fill_in_column` finds it; empty
                where nothing is filled in.
        """
        # The groups of a step are numbered through all of its batches.
        waiting_rows = sum(len(batch["step"]) for batch in self._waiting_batches)
        first_group = waiting_rows // group_size
        row_count = len(columns["step"])
        columns["group"] = [first_group + row // group_size for row in range(row_count)]
        columns["rollout"] = [row % group_size for row in range(row_count)]
        self._waiting_batches.append(columns)
        self._rollout_numbers_of_batches.append(rollout_numbers)

    def fill_in_column(self, name: str, value_by_rollout_number: Mapping[int, float]) -> None:
        """Write values that are known only now into a column of the rows that wait for `flush`.

        Args:
            name: the column. A batch that lacks it gets it.
            value_by_rollout_number: the values by the numbers of their rollouts. A row without a
                value, or with NaN, keeps what it has.
        """
        for columns, rollout_numbers in zip(
            self._waiting_batches, self._rollout_numbers_of_batches, strict=True
        ):
            values = columns.get(name) or [None] * len(rollout_numbers)
            for row, rollout_number in enumerate(rollout_numbers):
                value = value_by_rollout_number.get(rollout_number, math.nan)
                if not math.isnan(value):
                    values[row] = value
            columns[name] = values

    def flush(self, step: int) -> None:
        """Write the waiting rows as the file of `step`, and keep the record within its limit.

        If the disk refuses, one line says so and recording ends, but the run goes on.
        """
        if not self._waiting_batches:
            return
        tables = [make_table(columns, self._settings) for columns in self._waiting_batches]
        self._clear()
        try:
            write_record_file(
                self.folder,
                table=pa.concat_tables(tables, promote_options="default"),
                first_step=step,
                last_step=step,
            )
            merge_small_record_files(self.folder)
            delete_oldest_record_files(self.folder, self._limit_bytes)
        except OSError as error:
            self.failure_reason = str(error)
            print(
                f"step {step}: the rollouts are no longer recorded ({error})",
                file=sys.stderr,
                flush=True,
            )
