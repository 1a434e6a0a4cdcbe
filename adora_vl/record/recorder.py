"""The recorder of rollouts, with their grades and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from adora_vl.data.rows import images_of
from adora_vl.record.rollouts import RecordColumns, RolloutStore, criteria_columns, describe_turns
from adora_vl.record.trackers import set_final_values
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.importance import rollout_drift
from adora_vl.training.advantages import Advantages, GroupAssessment
from adora_vl.training.generation import ScoredGroups, UnscoredGroups
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, Row, StepContext, engine_comparison_mask
from adora_vl.utils.cli import to_json_types
from adora_vl.utils.secrets import without_secrets

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.tools.ours import View

# Columns that the reward functions add to TRL's table of completions
_REWARD_COLUMNS = ("verdict", "extracted", "reason", "new", "false", "steps")
_MAX_CLAIMS = 2**15  # of a rollout, in the 16 bits of their column
# Settings of TRL that the record holds beside all keys that begin with `adora_`
_RECORDED_SETTINGS = (
    "num_generations",
    "scale_rewards",
    "loss_type",
    "reward_weights",
)
# Columns of a batch, (B,), that only some runs have: those that continue unfinished rollouts
_OPTIONAL_BATCH_COLUMNS = ("segments", "age")


class Recorder(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Keeps the rollouts of a step until the step ends, then writes them, before a checkpoint.

    Collective: all ranks call every method, in the same order; the first rank writes. A suffix says
    a tensor's shape: B rollouts of this rank with C tokens each, N rollouts of all ranks, P groups
    of G rollouts.
    """

    def __init__(
        self,
        context: StepContext,
        decode: Callable[[Sequence[int]], str] | None = None,
        view: View | None = None,
    ) -> None:
        """Build an empty recorder from the settings of the run; nothing is read or written yet.

        Args:
            context: the run's config, accelerator and state.
            decode: turns token ids into text, in a run with tools; None in a run without tools.
            view: the size in pixels at which the model sees a picture, in a run with tools. It is
                recorded, because a tool call refers to points of the picture at that size.
        """
        config = context.config
        accelerator = context.accelerator
        self.accelerator = accelerator
        self.decode = decode
        self._is_enabled = config.adora_record_gb > 0
        # how many rollouts this rank has added in the present step so far
        self._rollout_count_in_step = 0
        # the numbers of the rollouts of all ranks that `add` has got last
        self._newest_rollout_numbers: list[int] = []
        # what `add_measured_drift` has measured on this rank, by the number of the rollout, which
        # may be any rank's
        self._drift_by_rollout_number: dict[int, float] = {}
        adora_keys = [field.name for field in fields(config) if field.name.startswith("adora_")]
        recorded_keys = (*adora_keys, *_RECORDED_SETTINGS)
        settings = without_secrets(
            to_json_types({key: getattr(config, key) for key in recorded_keys})
        )
        settings["truncated_at"] = config.truncated_at
        if view is not None:
            settings["view"] = asdict(view)
        self.record = RolloutStore(
            output_dir=Path(config.output_dir),
            limit_gb=config.adora_record_gb,
            settings=settings,
            rank_count=accelerator.num_processes,
        )

    def number_next_rollouts(self, count: int) -> Tensor:
        """Return numbers for this rank's next `count` rollouts, (B,), before `add` gets them.

        A number is unique in the step over all ranks, so that a value that is computed later, on
        any rank, finds its rollout again: number = position on its rank * ranks + rank.
        """
        rank = self.accelerator.process_index
        return torch.tensor(
            self._rollout_numbers_of_rank(rank, count), device=self.accelerator.device
        )

    def _rollout_numbers_of_rank(self, rank: int, count: int) -> list[int]:
        """Return the numbers of the next `count` rollouts of a rank; all ranks add equally many."""
        positions = range(self._rollout_count_in_step, self._rollout_count_in_step + count)
        return [position * self.accelerator.num_processes + rank for position in positions]

    def add(
        self,
        step: int,
        unscored_groups: UnscoredGroups,
        scored_groups: ScoredGroups,
        table: Mapping[str, Any],
        function_names: Sequence[str],
    ) -> None:
        """Add rollouts that were just scored to the record of the present step.

        Collective, where rollouts are recorded: columns and rows are gathered from all ranks.

        Args:
            step: optimizer steps that had been made when the rollouts were sampled.
            unscored_groups: the rollouts of this rank.
            scored_groups: rewards, lengths and advantages of the rollouts of all ranks.
            table: TRL's `_logs`, the table of completions, whose last rows are these rollouts.
            function_names: the names of the reward functions.
        """
        rollout_count = len(unscored_groups.rows)
        # The rows of all ranks are gathered rank by rank.
        self._newest_rollout_numbers = [
            rollout_number
            for rank in range(self.accelerator.num_processes)
            for rollout_number in self._rollout_numbers_of_rank(rank, rollout_count)
        ]
        self._rollout_count_in_step += rollout_count
        if not self._is_enabled:
            return
        batch_columns = self._gather_batch_columns(scored_groups.batch)
        dataset_columns = self._gather_dataset_columns(unscored_groups)
        # Recording has ended if the first rank's disk has refused an earlier step.
        if self.accelerator.is_main_process and not self.record.failure_reason:
            columns = _graded_columns(
                scored_groups.facts,
                assessment=scored_groups.assessment,
                table=table,
                function_names=function_names,
            )
            # a step is recorded under the number that it has once it is made
            columns["step"] = [step + 1] * len(columns["completion"])
            columns |= batch_columns
            columns |= dataset_columns
            group_size = scored_groups.assessment.groups.rewards_PG.shape[1]
            self.record.add(columns, group_size, self._newest_rollout_numbers)

    def _gather_batch_columns(self, batch: Batch) -> RecordColumns:
        """Return the record's columns that are tensors of the batch, from all ranks. Collective.

        `drift` is the mean difference between the log-probabilities of the engine, which sampled
        the rollout, and those of the policy, in nats per token. The policy's log-probabilities may
        be known only after the forward pass of the loss. `on_step_end` then fills in the drift.
        """
        gather = self.accelerator.gather
        columns: RecordColumns = {}
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            drift_B = rollout_drift(
                batch["old_per_token_logps"],
                batch["sampling_per_token_logps"],
                engine_comparison_mask(batch),
            )
            columns["drift"] = gather(drift_B).tolist()
        for name in _OPTIONAL_BATCH_COLUMNS:
            if name in batch:
                columns[name] = gather(batch[name]).tolist()  # type: ignore[literal-required]
        return columns

    def _gather_dataset_columns(self, unscored_groups: UnscoredGroups) -> RecordColumns:
        """Return what the dataset says of each rollout's problem, from all ranks. Collective.

        In a run with tools the conversation of the rollout comes with it. Pictures are stored by
        the rank that has them, and only the names of their files are gathered.
        """
        rank_rows = [self._dataset_values(row) for row in unscored_groups.rows]
        if self.decode is not None:
            for values, rollout in zip(rank_rows, unscored_groups.rollouts, strict=True):
                values["calls"] = len(rollout.calls)
                values["turns"] = describe_turns(rollout, self.decode, self._store_images)
        all_rows = gather_object(rank_rows)
        return {name: [values[name] for values in all_rows] for name in all_rows[0]}

    def add_final_advantages(
        self, batch: Batch, advantages: Advantages, table: Mapping[str, Any]
    ) -> None:
        """Fill in the final advantages of the rollouts that the loss uses; `add` leaves them at 0.

        They are computed once groups without signal have been replaced. A rollout of a replaced
        group is not in `batch`, and its advantage in the record stays 0. Collective: the numbers of
        the rollouts are gathered.

        Args:
            batch: this rank's rollouts that the loss uses, with their numbers.
            advantages: the advantages of all ranks' rollouts, in the order of the gathered batches.
            table: TRL's `_logs`, the table of completions. It has only the rollouts that were
                graded last. The values of earlier rollouts go into the record alone.
        """
        rollout_numbers = self.accelerator.gather(batch["rollout_number"]).tolist()
        trl_advantages_PG = advantages.assessment.trl_advantages_PG
        group_size = trl_advantages_PG.shape[1]
        values_by_column = {
            "advantage_raw": trl_advantages_PG.flatten(),
            "advantage": advantages.final_PG.flatten(),
            "weight": advantages.assessment.weighting.weights_P.repeat_interleave(group_size),
        }
        for name, values_N in values_by_column.items():
            value_by_rollout_number = dict(
                zip(rollout_numbers, values_N.float().tolist(), strict=True)
            )
            self.record.fill_in_column(name, value_by_rollout_number)
            newest_values = [
                value_by_rollout_number.get(rollout_number)
                for rollout_number in self._newest_rollout_numbers
            ]
            set_final_values(table, name, newest_values)

    def add_measured_drift(self, micro_batch: Batch, logps_BC: Tensor) -> None:
        """Measure the drift of rollouts from log-probabilities that the loss's forward pass gave.

        Drift is the mean difference to the engine's log-probabilities, in nats per token. It stays
        on this rank until `on_step_end` gathers it.

        Args:
            micro_batch: B rollouts, which other ranks may have sampled.
            logps_BC: the policy's log-probabilities of their C completion tokens.
        """
        drift_B = rollout_drift(
            logps_BC, micro_batch["sampling_per_token_logps"], engine_comparison_mask(micro_batch)
        )
        # The host waits for the GPU once, since both columns come in one tensor. float64 holds
        # every number exactly.
        number_and_drift = [micro_batch["rollout_number"].double(), drift_B.double()]
        for rollout_number, drift in torch.stack(number_and_drift, dim=1).tolist():
            self._drift_by_rollout_number[int(rollout_number)] = drift

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Start the record at the step where the run begins or resumes.

        A resumed run makes the steps after its checkpoint again, so their rollouts are deleted.
        """
        # deleting may empty the folder of diagrams, which are then stored anew
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
        """Write the rollouts of the step that ends, and begin the next one empty. Collective.

        Before that, the drift that ranks have measured during the step (`add_measured_drift`) is
        gathered and filled in: a rank may have measured it for rollouts of another rank.
        """
        # All ranks have added the same generations, so either all of them gather or none does.
        if self._is_enabled and self._rollout_count_in_step > 0:
            drift_by_rollout_number: dict[int, float] = {}
            for drift_of_rank in gather_object([self._drift_by_rollout_number]):
                drift_by_rollout_number |= drift_of_rank
            self.record.fill_in_column("drift", drift_by_rollout_number)
        self._rollout_count_in_step = 0
        self._drift_by_rollout_number = {}
        self.record.flush(state.global_step)

    def _dataset_values(self, row: Row) -> dict[str, Any]:
        """Return the record's values of a rollout that come from its row of the dataset, by column.

        A row without the column `problem` shows its prompt as text instead.
        """
        row_id = None if row.get("id") is None else str(row["id"])
        problem = row.get("problem") or completion_text(row["prompt"])
        answer = row.get("answer")
        choices = [str(choice) for choice in row.get("choices") or ()]
        return {
            "id": row_id,
            "problem": str(problem),
            "choices": choices or None,
            "answer": None if answer is None else str(answer),
            "images": self._store_images(images_of(row), row_id),
        }

    def _store_images(self, images: Sequence[object], row_id: str | None = None) -> list[str]:
        """Store images in the record's folder and return the names of their files.

        The list is empty where the disk is full, since that is no reason to end a training.

        `row_id`: the id of the dataset's row, whose images are stored once; None for images that a
        tool has made.
        """
        try:
            return self.record.diagrams.store(row_id, images)
        except OSError:
            return []


def _graded_columns(
    facts: RolloutFacts,
    assessment: GroupAssessment,
    table: Mapping[str, Any],
    function_names: Sequence[str],
) -> RecordColumns:
    """Return the record's columns that grading gives, of the N rollouts of all ranks.

    The rollouts are P groups of G, and have the rewards of F functions.

    The column `advantage` is 0 until `Recorder.add_final_advantages` fills in the final advantages
    of the rollouts that the loss uses.

    Args:
        facts: rewards, lengths and ends of the rollouts.
        assessment: the same rollouts as groups, with ADORA's weights.
        table: TRL's `_logs`, the table of completions, whose last rows are these rollouts.
        function_names: the names of the reward functions.
    """
    groups = assessment.groups
    weighting = assessment.weighting
    rewards_NF = facts.rewards_NF
    rollout_count = len(rewards_NF)
    group_size = groups.rewards_PG.shape[1]
    completions = list(table["completion"])[-rollout_count:]
    columns: RecordColumns = {
        "completion": [completion_text(completion) for completion in completions],
        "reward": groups.rewards_PG.flatten().tolist(),
        # why a rollout is left out of its group, such as a missing score; None if it is not
        "missing": facts.reasons_not_learned_from,
        "advantage_raw": assessment.trl_advantages_PG.flatten().tolist(),
        "advantage": [0.0] * rollout_count,
        "weight": weighting.weights_P.repeat_interleave(group_size).tolist(),
        "tds": weighting.tds_P.repeat_interleave(group_size).tolist(),
        "length": [int(length) for length in facts.length_N.tolist()],
        "truncated": groups.truncated_PG.flatten().tolist(),
    }
    for name, rewards_N in zip(function_names, rewards_NF.unbind(dim=1), strict=True):
        columns[f"reward/{name}"] = rewards_N.tolist()
    for name in _REWARD_COLUMNS:
        # The column is empty if no reward function adds it.
        logged = list(table["extra"].get(name, ()))[-rollout_count:]
        columns[name] = [_recorded_value(name, value) for value in logged]
    columns |= criteria_columns(weighting.groups)
    return columns


def _recorded_value(column: str, value: object) -> object:
    """Convert a value that a reward function has logged to the type of its column in the record.

    A function of the user's may log any value under the name of a column. In the columns `new`,
    `false` and `steps`, a value in another form than the reward `steps` writes becomes None. In any
    other column a value becomes a text.
    """
    if value is None:
        return None
    if column in ("new", "false"):
        is_count = isinstance(value, int) and 0 <= value < _MAX_CLAIMS
        return value if is_count else None
    if column == "steps":
        is_json_list = isinstance(value, str) and value.startswith("[")
        return value if is_json_list else None
    return str(value)
