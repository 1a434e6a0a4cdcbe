"""Puts each rollout of a generation into the record, with its grades, its advantages and their
reasons.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.data.rows import images_of
from adora_vl.packing.prompts import PromptBatch
from adora_vl.record.metrics import TieNotice, judged_figures, learned_figures, tool_figures
from adora_vl.record.rollouts import Columns, Record, criteria_columns, turns_of
from adora_vl.record.trackers import add_rows, logs_images, logs_tables, set_weighed
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.importance import rollout_drift
from adora_vl.training.advantages import Advantages
from adora_vl.training.generation import Generation
from adora_vl.training.scoring import Scores
from adora_vl.types import Batch, Row, StepContext, compared_mask
from adora_vl.utils.cli import plain
from adora_vl.utils.secrets import masked

# The reward functions' columns of TRL's completions table
_EXTRA = ("verdict", "extracted", "reason")
# beside our own keys
_RECORDED_SETTINGS = (
    "num_generations",
    "scale_rewards",
    "loss_type",
    "reward_weights",
)
# Columns of a batch, (B,), that only some runs have
_OPTIONAL = ("segments", "age")


class Recorder(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Keeps what a step did until it ends, then writes it.

    All ranks call every method; the first one writes.
    """

    def __init__(
        self, context: StepContext, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        """`decode`: what a run with tools says; None without."""
        config = context.config
        accelerator = context.accelerator
        self.accelerator = accelerator
        self.decode = decode
        # the rollouts of every n-th generation are recorded; 0: of none
        self.every = config.adora_record_every
        self.updates = BatchLayout.of(config).updates
        # this rank's rollouts in the present step, and those graded last
        self._counted = self._latest = 0
        self._drift: dict[
            int, float
        ] = {}  # of rollouts of any rank, by their numbers, as this one has measured it
        self._spans: list[slice] = []  # the recorded ones, one entry per generation
        own = [each.name for each in fields(config) if each.name.startswith("adora_")]
        settings = masked(
            plain({name: getattr(config, name) for name in (*own, *_RECORDED_SETTINGS)})
        )
        settings["truncated_at"] = config.truncated_at
        self.record = Record(
            output_dir=Path(config.output_dir),
            limit_gb=config.adora_record_gb,
            settings=settings,
            ranks=accelerator.num_processes,
        )

    def number(self, rows: int) -> Tensor:
        """The numbers of this rank's next `rows` rollouts, by which all ranks know them in this
        step, (rows,).
        """
        own_B = torch.arange(self._counted, self._counted + rows, device=self.accelerator.device)
        numbers_B: Tensor = own_B * self.accelerator.num_processes + self.accelerator.process_index
        return numbers_B

    def records(self, step: int) -> bool:
        return self.every > 0 and step // self.updates % self.every == 0

    def add(
        self, generation: Generation, table: Mapping[str, Any], functions: Sequence[str]
    ) -> None:
        """Add rollouts that were just graded.

        `table`: TRL's completions table. `functions`: names of the rewards.
        """
        rows = generation.rows
        batch = generation.batch
        step = generation.step
        scores = generation.scores
        weighed = generation.advantages
        assert scores is not None and weighed is not None
        self._latest = len(rows)
        self._counted += len(rows)
        if not self.records(step):
            return
        self._spans.append(slice(self._counted - len(rows), self._counted))
        drift = self._drift_of(batch)
        optional = {
            name: self.accelerator.gather(batch[name]).tolist()  # type: ignore[literal-required]
            for name in _OPTIONAL
            if name in batch
        }
        own = [self._of_row(row) for row in rows]
        if self.decode is not None:
            keep = partial(self._keep, None)
            for row, one in zip(own, generation.rollouts, strict=True):
                row |= {"calls": len(one.calls), "turns": turns_of(one, self.decode, keep)}
        facts = gather_object(own)
        if self.accelerator.is_main_process and not self.record.failed:
            columns = _columns(scores, weighed, table, functions)
            columns["step"] = [step + 1] * len(facts)
            columns["drift"] = drift or [math.nan] * len(facts)
            columns |= optional
            columns |= {name: [row[name] for row in facts] for name in facts[0]}
            self.record.add(columns, weighed.groups.rewards_PG.shape[1])

    def weighed(self, generation: Generation, table: Mapping[str, Any]) -> None:
        """Put the final advantages of those rollouts that are learned from into the record, and
        into the rows of `table`, those of the batch that was graded last. A rollout that was
        replaced keeps an advantage of 0.
        """
        batch = generation.batch
        weighed = generation.advantages
        gather = self.accelerator.gather
        assert weighed is not None
        columns = {
            "advantage_raw": weighed.raw_PG.flatten(),
            "advantage": weighed.advantages_PG.flatten(),
            "weight": weighed.weighting.weights_P.repeat_interleave(weighed.raw_PG.shape[1]),
        }
        numbers_N = gather(batch["rollout_number"]).cpu()
        for name, values_N in columns.items():
            late_RB = self._set_late(name, numbers_N, values_N)
            set_weighed(table, name, late_RB[:, -self._latest :].flatten().tolist())

    def _set_late(self, name: str, numbers_N: Tensor, values_N: Tensor) -> Tensor:
        """Fill in a column of the step's rollouts, (ranks, rollouts of each), NaN where nothing is
        known of one.
        """
        ranks = self.accelerator.num_processes
        late_RB = torch.full((ranks, self._counted), torch.nan)
        late_RB[numbers_N % ranks, numbers_N // ranks] = values_N.float()
        if self.accelerator.is_main_process:
            self.record.set_late(
                name, [late_RB[:, span].flatten().tolist() for span in self._spans]
            )
        return late_RB

    def measured(self, micro: Batch, logps_BC: Tensor) -> None:
        """Add the drift of rollouts for which it is only known after the policy's own forward pass."""
        drift_B = rollout_drift(logps_BC, micro["sampling_per_token_logps"], compared_mask(micro))
        both = torch.stack(
            [micro["rollout_number"].double(), drift_B.double()], dim=1
        ).tolist()  # one wait for both
        self._drift |= {int(number): drift for number, drift in both}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.diagrams.forget()
        if state.is_world_process_zero:
            self.record.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._spans:
            found = {
                number: drift
                for each in gather_object([self._drift])
                for number, drift in each.items()
            }
            self._set_late(
                "drift", torch.tensor([*found], dtype=torch.long), torch.tensor([*found.values()])
            )
        self._counted = 0
        self._spans = []
        self._drift = {}
        self.record.flush(state.global_step)

    def _drift_of(self, batch: Batch) -> list[float]:
        """The drift of each rollout of all ranks, nats per token; empty if only the policy's
        forward pass will tell.
        """
        if "old_per_token_logps" not in batch or "sampling_per_token_logps" not in batch:
            return []
        logps = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        drift: list[float] = self.accelerator.gather(
            rollout_drift(*logps, compared_mask(batch))
        ).tolist()
        return drift

    def _of_row(self, row: Row) -> dict[str, Any]:
        """The columns of a rollout that come from the dataset."""
        name = None if row.get("id") is None else str(row["id"])
        problem = row.get("problem") or completion_text(row["prompt"])
        answer = row.get("answer")
        return {
            "id": name,
            "problem": str(problem),
            "choices": [str(choice) for choice in row.get("choices") or ()] or None,
            "answer": None if answer is None else str(answer),
            "images": self._keep(name, images_of(row)),
        }

    def _keep(self, row: str | None, images: Sequence[Any]) -> list[str]:
        try:
            return self.record.diagrams.keep(row, images)
        except OSError:  # if the disk is full, these are left out of the record
            return []


def _columns(
    scores: Scores, weighed: Advantages, table: Mapping[str, Any], functions: Sequence[str]
) -> Columns:
    """The columns that come from grading and weighing, for the rollouts of all ranks."""
    groups = weighed.groups
    weighting = weighed.weighting
    rewards_BF = scores.rewards.all_BF
    count = len(rewards_BF)
    generations = groups.rewards_PG.shape[1]
    extra = {name: list(table["extra"].get(name, ()))[-count:] for name in _EXTRA}
    parts = {f"reward/{name}": rewards_BF[:, i].tolist() for i, name in enumerate(functions)}
    return {
        "completion": [completion_text(one) for one in list(table["completion"])[-count:]],
        "reward": groups.rewards_PG.flatten().tolist(),
        **parts,
        "missing": scores.rewards.why_left,
        **extra,
        "advantage_raw": weighed.raw_PG.flatten().tolist(),
        "advantage": weighed.advantages_PG.flatten().tolist(),
        "weight": weighting.weights_P.repeat_interleave(generations).tolist(),
        "tds": weighting.tds_P.repeat_interleave(generations).tolist(),
        **criteria_columns(weighting.groups),
        "length": [int(length) for length in scores.lengths_B.tolist()],
        "truncated": groups.truncated_PG.flatten().tolist(),
    }


class MetricsLogger:
    """What a generation leaves behind: figures, the table of completions, and the record.

    On all ranks together.
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
        """`figures`, `table`: TRL's `_metrics` and `_logs`.

        `functions`: the names of the reward functions. `bytes_sent`: of the last weight sync, None
        without an engine.
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

    def graded(self, generation: Generation, prompts: PromptBatch, answers: list[Any]) -> None:
        """Of all that were graded, also of those that are replaced.

        `prompts`, `answers`: of this rank.
        """
        scores = generation.scores
        judged = generation.advantages
        training = generation.mode == "train"
        assert scores is not None and judged is not None
        figures = self.figures[generation.mode]
        state = self.state()
        if training:
            state.num_input_tokens_seen += scores.tokens
        if training and self.bytes_sent is not None:
            self.log("adora/sync_mb", self.bytes_sent() / 2**20)
        figures["num_tokens"][:] = [state.num_input_tokens_seen]
        for name, value in judged_figures(judged, scores, self.functions).items():
            figures[name].append(value)
        if self.recorder.decode is not None:
            facts = [
                [
                    len(r.calls),
                    sum(c.failed for c in r.calls),
                    sum(c.seconds for c in r.calls),
                    r.ended in ("calls", "room"),
                ]
                for r in generation.rollouts
            ]
            gather = self.recorder.accelerator.gather
            device = self.recorder.accelerator.device
            # whole where nothing was called
            facts_N4 = gather(torch.tensor(facts, dtype=torch.float32, device=device))
            for name, value in tool_figures(judged.groups.rewards_PG.cpu(), facts_N4.cpu()).items():
                figures[name].append(value)
        images = (prompts.images or [None] * len(answers)) if self.images else []
        add_rows(
            self.table,
            prompts=prompts.messages,
            answers=answers,
            images=images,
            scores=scores,
            judged=judged,
            functions=self.functions,
            texts=self.texts,
        )
        if training:
            generation.batch["rollout_number"] = self.recorder.number(len(answers))
            self.recorder.add(generation, self.table, self.functions)

    def weighed(self, generation: Generation) -> None:
        """Of those that are learned from."""
        assert generation.advantages is not None
        for name, value in learned_figures(generation.advantages).items():
            self.log(name, value)
        self.notice.count(generation.advantages.weighting)
        self.recorder.weighed(generation, self.table)
