"""The recorder of rollouts, with their grades and advantages, and the logger of a generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from adora_vl.data.rows import images_of
from adora_vl.record.rollout_figures import (
    TieNotice,
    assessment_figures,
    learned_figures,
    tool_figures,
)
from adora_vl.record.rollouts import Columns, Record, criteria_columns, turns_of
from adora_vl.record.trackers import add_rows, logs_images, logs_tables, set_weighed
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.importance import rollout_drift
from adora_vl.training.advantages import Advantages, GroupAssessment
from adora_vl.training.generation import BuiltGroups, Generation, ScoredGroups
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, Row, StepContext, compared_mask
from adora_vl.utils.cli import plain
from adora_vl.utils.secrets import masked

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.tools.ours import View

# Columns that the reward functions add to TRL's table of completions
_EXTRA = ("verdict", "extracted", "reason", "new", "false", "steps")
# Settings of TRL that the record holds beside all keys that begin with `adora_`
_RECORDED_SETTINGS = (
    "num_generations",
    "scale_rewards",
    "loss_type",
    "reward_weights",
)
# Columns of a batch, (B,), that only some runs have: those that continue unfinished rollouts
_OPTIONAL = ("segments", "age")


class Recorder(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Keeps the rollouts of a step until the step ends, then writes them, before a checkpoint.

    Collective: all ranks call every method, in the same order; the first rank writes.
    """

    def __init__(
        self,
        context: StepContext,
        decode: Callable[[Sequence[int]], str] | None = None,
        view: View | None = None,
    ) -> None:
        """Take the settings from the context.

        Args:
            context: the run's config, accelerator and state.
            decode: turns tokens into text, in a run with tools; None in a run without tools.
            view: what the model sees of a picture, in a run with tools: coordinates of calls refer
                to it.
        """
        config = context.config
        accelerator = context.accelerator
        self.accelerator = accelerator
        self.decode = decode
        self._records = config.adora_record_gb > 0
        # how many rollouts of this rank were graded in the present step
        self._step_count = 0
        # how many rollouts of this rank were graded last
        self._last_count = 0
        # drift that this rank has measured, by the number of the rollout, which may be any rank's
        self._drift: dict[int, float] = {}
        # the recorded rollouts of this rank in the present step, one slice per generation
        self._generation_slices: list[slice] = []
        adora_keys = [field.name for field in fields(config) if field.name.startswith("adora_")]
        settings = masked(
            plain({name: getattr(config, name) for name in (*adora_keys, *_RECORDED_SETTINGS)})
        )
        settings["truncated_at"] = config.truncated_at
        if view is not None:
            settings["view"] = asdict(view)
        self.record = Record(
            output_dir=Path(config.output_dir),
            limit_gb=config.adora_record_gb,
            settings=settings,
            ranks=accelerator.num_processes,
        )

    def number(self, rows: int) -> Tensor:
        """Number this rank's next rollouts, (rows,); a number is unique in the step over all ranks.

        A rollout's number is its position on its rank, times the number of ranks, plus its rank.
        """
        accelerator = self.accelerator
        positions_B = torch.arange(
            self._step_count, self._step_count + rows, device=accelerator.device
        )
        numbers_B: Tensor = positions_B * accelerator.num_processes + accelerator.process_index
        return numbers_B

    def add(
        self,
        step: int,
        built: BuiltGroups,
        scored: ScoredGroups,
        table: Mapping[str, Any],
        functions: Sequence[str],
    ) -> None:
        """Add rollouts that were just scored.

        Collective, where rollouts are recorded: columns and rows are gathered on all ranks.

        Args:
            step: optimizer steps that had been made when they were sampled.
            built: the rollouts of this rank.
            scored: what is known of the rollouts of all ranks.
            table: TRL's table of completions.
            functions: the names of the reward functions.
        """
        rows = built.rows
        batch = scored.batch
        self._last_count = len(rows)
        self._step_count += len(rows)
        if not self._records:
            return
        self._generation_slices.append(slice(self._step_count - len(rows), self._step_count))
        drift = self._drift_of(batch)
        optional = {
            name: self.accelerator.gather(batch[name]).tolist()  # type: ignore[literal-required]
            for name in _OPTIONAL
            if name in batch
        }
        row_columns = [self._row_columns(row) for row in rows]
        if self.decode is not None:
            keep = partial(self._store_images, None)
            for values, rollout in zip(row_columns, built.rollouts, strict=True):
                values["calls"] = len(rollout.calls)
                values["turns"] = turns_of(rollout, self.decode, keep)
        gathered = gather_object(row_columns)
        if self.accelerator.is_main_process and not self.record.failed:
            columns = _graded_columns(scored.facts, scored.assessment, table, functions)
            columns["step"] = [step + 1] * len(gathered)
            columns["drift"] = drift or [math.nan] * len(gathered)
            columns |= optional
            columns |= {name: [values[name] for values in gathered] for name in gathered[0]}
            self.record.add(columns, scored.assessment.groups.rewards_PG.shape[1])

    def weighed(self, batch: Batch, advantages: Advantages, table: Mapping[str, Any]) -> None:
        """Put the final advantages of the rollouts that the loss uses into the record and `table`.

        The rows of `table` are those of the batch that was graded last. A rollout that was replaced
        keeps an advantage of 0. Collective: the numbers of the rollouts are gathered.
        """
        gather = self.accelerator.gather
        trl_advantages_PG = advantages.assessment.trl_advantages_PG
        group_size = trl_advantages_PG.shape[1]
        columns = {
            "advantage_raw": trl_advantages_PG.flatten(),
            "advantage": advantages.final_PG.flatten(),
            "weight": advantages.weighting.weights_P.repeat_interleave(group_size),
        }
        numbers_N = gather(batch["rollout_number"]).cpu()
        for name, values_N in columns.items():
            late_RB = self._set_late(name, numbers_N, values_N)
            set_weighed(table, name, late_RB[:, -self._last_count :].flatten().tolist())

    def _set_late(self, name: str, numbers_N: Tensor, values_N: Tensor) -> Tensor:
        """Fill in a column of the present step's rollouts, once its values are known.

        Args:
            name: the column.
            numbers_N: the numbers of the rollouts that have a value, as `number` gives them, (N,).
            values_N: their values, (N,).

        Returns:
            the column by rank and position on the rank, (R, B), NaN where a rollout has no value.
        """
        ranks = self.accelerator.num_processes
        late_RB = torch.full((ranks, self._step_count), torch.nan)
        late_RB[numbers_N % ranks, numbers_N // ranks] = values_N.float()
        if self.accelerator.is_main_process:
            self.record.set_late(
                name, [late_RB[:, span].flatten().tolist() for span in self._generation_slices]
            )
        return late_RB

    def measured(self, micro: Batch, logps_BC: Tensor) -> None:
        """Add the drift of a micro-batch whose log-probabilities only the loss's forward pass gives.

        Args:
            micro: the micro-batch, B rollouts of any ranks.
            logps_BC: the policy's log-probabilities of their tokens, (B, C).
        """
        drift_B = rollout_drift(logps_BC, micro["sampling_per_token_logps"], compared_mask(micro))
        # One tensor, so that the host waits for the GPU once
        pairs = torch.stack([micro["rollout_number"].double(), drift_B.double()], dim=1).tolist()
        self._drift |= {int(number): drift for number, drift in pairs}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Start the record: rollouts of steps that a resumed run makes again are deleted."""
        self.record.diagrams.forget()
        if state.is_world_process_zero:
            self.record.start(state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Fill in the drift, gathered from all ranks, and write the rows of the step."""
        # All ranks have recorded the same generations, so all of them gather or none does.
        if self._generation_slices:
            drift: dict[int, float] = {}
            for rank_drift in gather_object([self._drift]):
                drift |= rank_drift
            numbers_N = torch.tensor([*drift], dtype=torch.long)
            self._set_late("drift", numbers_N, torch.tensor([*drift.values()]))
        self._step_count = 0
        self._generation_slices = []
        self._drift = {}
        self.record.flush(state.global_step)

    def _drift_of(self, batch: Batch) -> list[float]:
        """Return the drift of each rollout of all ranks, in nats per token.

        The list is empty where the log-probabilities are known only after the loss's forward pass.
        """
        if "old_per_token_logps" not in batch or "sampling_per_token_logps" not in batch:
            return []
        drift_B = rollout_drift(
            batch["old_per_token_logps"], batch["sampling_per_token_logps"], compared_mask(batch)
        )
        drift: list[float] = self.accelerator.gather(drift_B).tolist()
        return drift

    def _row_columns(self, row: Row) -> dict[str, Any]:
        """Return the columns of a rollout that come from the dataset."""
        row_id = None if row.get("id") is None else str(row["id"])
        problem = row.get("problem") or completion_text(row["prompt"])
        answer = row.get("answer")
        return {
            "id": row_id,
            "problem": str(problem),
            "choices": [str(choice) for choice in row.get("choices") or ()] or None,
            "answer": None if answer is None else str(answer),
            "images": self._store_images(row_id, images_of(row)),
        }

    def _store_images(self, row_id: str | None, images: Sequence[object]) -> list[str]:
        """Store images and return the names of their files; none where the disk is full.

        Recording is no reason to end a training, so its rows then come without diagrams.
        """
        try:
            return self.record.diagrams.keep(row_id, images)
        except OSError:
            return []


def _graded_columns(
    facts: RolloutFacts,
    assessment: GroupAssessment,
    table: Mapping[str, Any],
    functions: Sequence[str],
) -> Columns:
    """The columns of the rollouts of all ranks, from which nothing is learned yet.

    `table` is TRL's table of completions, whose last rows are these rollouts.
    """
    groups = assessment.groups
    weighting = assessment.weighting
    rewards_NF = facts.rewards_NF
    count = len(rewards_NF)
    generations = groups.rewards_PG.shape[1]
    extra = {name: list(table["extra"].get(name, ()))[-count:] for name in _EXTRA}
    rewards = {f"reward/{name}": rewards_NF[:, i].tolist() for i, name in enumerate(functions)}
    completions = list(table["completion"])[-count:]
    return {
        "completion": [completion_text(completion) for completion in completions],
        "reward": groups.rewards_PG.flatten().tolist(),
        **rewards,
        "missing": facts.why_left,
        **extra,
        "advantage_raw": assessment.trl_advantages_PG.flatten().tolist(),
        "advantage": [0.0] * count,
        "weight": weighting.weights_P.repeat_interleave(generations).tolist(),
        "tds": weighting.tds_P.repeat_interleave(generations).tolist(),
        **criteria_columns(weighting.groups),
        "length": [int(length) for length in facts.length_N.tolist()],
        "truncated": groups.truncated_PG.flatten().tolist(),
    }


class MetricsLogger:
    """Logs each generation: its figures, the table of completions, and the record of rollouts.

    Collective: all ranks call every method, in the same order.
    """

    def __init__(
        self,
        context: StepContext,
        recorder: Recorder,
        figures: Mapping[str, Mapping[str, list[float]]],
        table: Mapping[str, Any],
        functions: Sequence[str],
        notice: TieNotice,
        bytes_sent: Callable[[], int] | None,
    ) -> None:
        """Keep what the figures go into.

        Args:
            context: the run's config, log and state.
            recorder: the recorder of rollouts.
            figures: TRL's `_metrics`, lists of values by mode and name.
            table: TRL's `_logs`, the table of completions.
            functions: the names of the reward functions.
            notice: the warning about ties of length.
            bytes_sent: how many bytes the last weight sync has sent; None without an engine.
        """
        self.recorder = recorder
        self.figures = figures
        self.table = table
        self.functions = functions
        self.notice = notice
        self.bytes_sent = bytes_sent
        self.log = context.log
        self.state = context.state
        self.texts = logs_tables(context.config)
        self.images = logs_images(context.config)

    def scored(self, generation: Generation, built: BuiltGroups, scored: ScoredGroups) -> None:
        """Log all rollouts that were scored, also those that `refill` replaces.

        In a training the batch gets the column `rollout_number`.

        Args:
            generation: that they were sampled for.
            built: the rollouts of this rank.
            scored: what is known of the rollouts of all ranks.
        """
        facts = scored.facts
        assessment = scored.assessment
        training = generation.key.mode == "train"
        figures = self.figures[generation.key.mode]
        state = self.state()
        if training:
            state.num_input_tokens_seen += facts.tokens
        if training and self.bytes_sent is not None:
            self.log("adora/sync_mb", self.bytes_sent() / 2**20)
        figures["num_tokens"][:] = [state.num_input_tokens_seen]
        for name, value in assessment_figures(assessment, facts, self.functions).items():
            figures[name].append(value)
        if self.recorder.decode is not None:
            for name, value in tool_figures(assessment.groups.rewards_PG, facts).items():
                figures[name].append(value)
        images: list[Any] = []
        if self.images:
            images = built.prompts.images or [None] * len(built.completions)
        add_rows(
            self.table,
            built=built,
            scored=scored,
            images=images,
            functions=self.functions,
            learned=training,
            texts=self.texts,
        )
        if training:
            scored.batch["rollout_number"] = self.recorder.number(len(built.completions))
            self.recorder.add(generation.key.step, built, scored, self.table, self.functions)

    def weighed(self, batch: Batch, advantages: Advantages) -> None:
        """Log the rollouts that the loss uses, with their final advantages."""
        for name, value in learned_figures(advantages).items():
            self.log(name, value)
        self.notice.count(advantages.weighting)
        self.recorder.weighed(batch, advantages, self.table)
