"""The rows of the record: what is known about each rollout and its group."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from adora_vl.advantage.criteria import GroupFacts
from adora_vl.rollout_log.diagrams import Diagrams
from adora_vl.rollout_log.parts import IMAGES, ROLLOUTS, cut_after, merge_small, rotate, write_part

SETTINGS = b"adora_vl"  # key of the run's settings in every file's metadata
_TYPES: dict[str, pa.DataType] = {
    "step": pa.int32(),  # the first optimizer step that learns from it, as in metrics.jsonl
    "group": pa.int32(),  # number of the group in its step
    "rollout": pa.int16(),  # number of the rollout in its group
    "id": pa.string(),
    "problem": pa.string(),
    "answer": pa.string(),
    "images": pa.list_(pa.string()),  # file names in rollouts/_images
    "completion": pa.string(),
    "verdict": pa.string(),
    "extracted": pa.string(),
    "reason": pa.string(),  # the rule that decided, from the grader
    "reward": pa.float32(),  # the weighted sum of the parts, which are reward/<function>
    "advantage_raw": pa.float32(),
    "advantage": pa.float32(),  # as the loss gets it
    "weight": pa.float32(),
    "tds": pa.bool_(),
    "pass_rate": pa.float32(),
    "longest_right": pa.float32(),  # tokens; null where none is right
    "mean_wrong": pa.float32(),  # tokens, of the untruncated wrong ones; null where there is none
    "length": pa.int32(),
    "truncated": pa.bool_(),
    "distorted": pa.bool_(),  # sampled on a distorted image (adora_noisy_rollouts); its drift is unknown
    "visual_dependency": pa.float32(),  # nats per token (adora_visual_tokens); null without an image
    "visual_scale": pa.float32(),  # the factor of the advantage on those tokens that are learned from
    "drift": pa.float32(),  # mean |log-probability difference| of engine and trainer, nats per token
}
Columns = dict[str, list[Any]]


def criteria_columns(facts: GroupFacts) -> Columns:
    """What the criteria look at, for each rollout of each group: lists of P x G values."""
    nothing = torch.tensor(math.nan, device=facts.lengths_PG.device)
    longest_P = torch.where(facts.correct_PG, facts.lengths_PG, -torch.inf).amax(dim=1)
    wrong_P = torch.where(facts.finished_wrong_PG, facts.lengths_PG, 0.0).sum(dim=1)
    mean_P = wrong_P / facts.finished_wrong_PG.sum(dim=1)  # 0 / 0 is NaN, which becomes null
    columns_P = {
        "pass_rate": facts.pass_rate_P,
        "longest_right": torch.where(facts.any_correct_P, longest_P, nothing),
        "mean_wrong": mean_P,
    }
    group = facts.lengths_PG.shape[1]
    return {name: column_P.repeat_interleave(group).tolist() for name, column_P in columns_P.items()}


def as_table(columns: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]) -> pa.Table:
    """The rows with the types of the record. A figure that is missing or not finite is null."""
    count = len(columns["step"])
    types = {**_TYPES, **{name: pa.float32() for name in columns if name not in _TYPES}}
    arrays = []
    for name, kind in types.items():
        values = columns.get(name) or [None] * count
        if pa.types.is_floating(kind):
            values = [value if value is not None and math.isfinite(value) else None for value in values]
        arrays.append(pa.array(values, kind))
    schema = pa.schema(list(types.items()), metadata={SETTINGS: json.dumps(settings, sort_keys=True, default=str)})
    return pa.table(arrays, schema=schema)


class Record:
    """The record of one run: rows are kept until their step ends, and written then. One process writes."""

    def __init__(self, output_dir: Path, limit_gb: float, settings: Mapping[str, Any], ranks: int = 1) -> None:
        self.folder = output_dir / ROLLOUTS
        self._limit_bytes = limit_gb * 1e9 / 2  # the other half is for the diagrams
        self._settings = settings
        self._waiting: list[Columns] = []
        self.diagrams = Diagrams(self.folder / IMAGES, self._limit_bytes / ranks)
        self.failed: str | None = None

    def start(self, step: int) -> None:
        """Start recording after `step`. The records of later steps are deleted."""
        self._waiting.clear()
        cut_after(self.folder, step)

    def add(self, columns: Columns, generations: int) -> None:
        """Add the rows of one generation, of all ranks, group by group."""
        before = sum(len(waiting["step"]) for waiting in self._waiting) // generations
        count = len(columns["step"])
        columns["group"] = [before + row // generations for row in range(count)]
        columns["rollout"] = [row % generations for row in range(count)]
        self._waiting.append(columns)

    def set_drift(self, generations: Sequence[Sequence[float]]) -> None:
        """Fill in the drift of the waiting generations, where it is known (not NaN)."""
        for columns, late in zip(self._waiting, generations, strict=False):
            both = zip(columns["drift"], late, strict=True)
            columns["drift"] = [before if math.isnan(now) else now for before, now in both]

    def flush(self, step: int) -> None:
        """Write the waiting rows. If the disk refuses, one line says so and recording ends, but the run goes on."""
        if not self._waiting:
            return
        tables = [as_table(columns, self._settings) for columns in self._waiting]
        self._waiting.clear()
        try:
            write_part(self.folder, pa.concat_tables(tables, promote_options="default"), step, step)
            merge_small(self.folder)
            rotate(self.folder, self._limit_bytes)
        except OSError as error:
            self.failed = str(error)
            print(f"step {step}: the rollouts are no longer recorded ({error})", file=sys.stderr, flush=True)
