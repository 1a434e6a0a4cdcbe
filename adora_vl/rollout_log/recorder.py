"""Records every rollout of a step with what was decided about it: rewards, advantage, weight and the reason for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from adora_vl.batch import Batch, Row, loss_mask
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.drift import rollout_drift
from adora_vl.rollout_log.rollout_numbers import RolloutNumbers
from adora_vl.rollout_log.rollouts import Columns, Record, criteria_columns
from adora_vl.weighing import Scores, Weighed

# The reward functions' columns of TRL's completions table
_EXTRA = ("verdict", "extracted", "reason")
# Columns of a batch, (B,), that only some runs have
_NOW_AND_THEN = ("distorted", "visual_dependency", "visual_scale")


class Recorder:
    """Keeps what a step did until the step ends, then writes it. All ranks call every method; the first one writes."""

    def __init__(self, record: Record, accelerator: Accelerator, *, every: int, cycle_steps: int) -> None:
        """`every`: record the rollouts of every n-th generation, 0 of none. `cycle_steps`: optimizer steps that learn
        from one generation.
        """
        self.record, self.accelerator = record, accelerator
        self.every, self.cycle_steps = every, max(1, cycle_steps)
        self.numbers = RolloutNumbers(accelerator.process_index, accelerator.num_processes)
        self._counted = 0  # this rank's rollouts in the present step
        self._spans: list[slice] = []  # the recorded ones, one entry per generation

    def number(self, rows: int) -> Tensor:
        """The numbers of this rank's next `rows` rollouts, valid on every rank, (rows,)."""
        return self.numbers.numbers(rows, self.accelerator.device)

    def records(self, step: int) -> bool:
        """Whether the generation of this step is to be recorded."""
        return self.every > 0 and step // self.cycle_steps % self.every == 0

    def add(
        self,
        rows: Sequence[Row],
        batch: Batch,
        scores: Scores,
        weighed: Weighed,
        table: Mapping[str, Any],
        functions: Sequence[str],
        step: int,
    ) -> None:
        """Add a generation whose advantages are final. `rows` and `batch` are this rank's, `scores` and `weighed` all
        ranks'; `table` is TRL's completions table, `functions` the names of the reward functions.
        """
        self._counted += len(rows)
        if not self.records(step):
            return
        self._spans.append(slice(self._counted - len(rows), self._counted))
        drift_B = self.accelerator.gather(self._drift(batch, len(rows)))
        now_and_then = {
            name: self.accelerator.gather(batch[name]).tolist()  # type: ignore[literal-required]
            for name in _NOW_AND_THEN
            if name in batch
        }
        facts = gather_object([self._of_row(row) for row in rows])
        if self.accelerator.is_main_process and not self.record.failed:
            columns = _columns(scores, weighed, table, functions)
            columns["step"] = [step + 1] * len(facts)
            columns["drift"] = drift_B.tolist()
            columns |= now_and_then
            columns |= {name: [row[name] for row in facts] for name in facts[0]}
            self.record.add(columns, weighed.groups.rewards_PG.shape[1])

    def measured(self, micro: Batch, logps_BC: Tensor) -> None:
        """Add the drift of rollouts for which it is only known after the policy's own forward pass."""
        drift_B = rollout_drift(logps_BC, micro["sampling_per_token_logps"], loss_mask(micro))
        self.numbers.measured(micro["rollout_number"], drift_B)

    def complete(self, *, moved: bool) -> None:
        """Called at the end of a step. `moved`: whether any rollout was learned from on another rank than its own."""
        if moved:
            self.numbers.heard(gather_object(self.numbers.take_of_others()))
        late, spans = self.numbers.take(), self._spans
        self._counted, self._spans = 0, []
        if not late or not spans:
            return
        drift_RB = self.accelerator.gather(torch.tensor(late, device=self.accelerator.device)[None])
        if self.accelerator.is_main_process:
            self.record.set_drift([drift_RB[:, span].flatten().tolist() for span in spans])

    def _drift(self, batch: Batch, rows: int) -> Tensor:
        """The drift of each rollout in nats per token, (rows,); NaN if only the policy's forward pass will tell."""
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            return rollout_drift(
                batch["old_per_token_logps"], batch["sampling_per_token_logps"], batch["completion_mask"]
            )
        return torch.full((rows,), torch.nan, device=self.accelerator.device)

    def _of_row(self, row: Row) -> dict[str, Any]:
        """The columns of a rollout that come from the dataset."""
        name = None if row.get("id") is None else str(row["id"])
        try:
            images = self.record.diagrams.keep(name, _images_of(row))
        except OSError:  # if the disk is full, this diagram is left out of the record
            images = []
        problem, answer = row.get("problem") or completion_text(row["prompt"]), row.get("answer")
        return {
            "id": name, "problem": str(problem), "answer": None if answer is None else str(answer), "images": images
        }  # fmt: skip


def _images_of(row: Row) -> list[Any]:
    """The images of a row, in either of TRL's columns."""
    one = row.get("image")
    return list(row.get("images") or ([] if one is None else [one]))


def _columns(scores: Scores, weighed: Weighed, table: Mapping[str, Any], functions: Sequence[str]) -> Columns:
    """The columns that come from grading and weighing, for the rollouts of all ranks."""
    groups, weighting = weighed.groups, weighed.weighting
    count, generations = len(scores.rewards_BF), groups.rewards_PG.shape[1]
    extra = {name: list(table["extra"].get(name, ()))[-count:] for name in _EXTRA}
    parts = {f"reward/{name}": scores.rewards_BF[:, i].tolist() for i, name in enumerate(functions)}
    return {
        "completion": [completion_text(one) for one in list(table["completion"])[-count:]],
        "reward": groups.rewards_PG.flatten().tolist(),
        **parts,
        **extra,
        "advantage_raw": weighed.raw_PG.flatten().tolist(),
        "advantage": weighed.advantages_PG.flatten().tolist(),
        "weight": weighting.weights_P.repeat_interleave(generations).tolist(),
        "tds": weighting.tds_P.repeat_interleave(generations).tolist(),
        **criteria_columns(weighting.facts),
        "length": [int(length) for length in scores.lengths_B.tolist()],
        "truncated": groups.truncated_PG.flatten().tolist(),
    }


class KeepRecord(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The first rank writes a step's rollouts at its end, before anything is saved."""

    def __init__(self, recorder: Recorder, moved: Callable[[], bool]) -> None:
        """`moved()`: whether rollouts of the step were learned from on another rank than their own, asked once."""
        self.recorder, self.moved = recorder, moved

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.record.diagrams.forget()
        if state.is_world_process_zero:
            self.recorder.record.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.complete(moved=self.moved())
        self.recorder.record.flush(state.global_step)
