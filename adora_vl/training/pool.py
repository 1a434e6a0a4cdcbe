"""Fills a generation: its groups are sampled, graded, judged, replaced where they teach nothing, and weighed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from adora_vl.data.dataloader import DistinctRows
from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.prompts import PromptBatch
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.rollout.sources import Sampler
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.collate import said
from adora_vl.training.dynamic_sampling import DynamicSampling
from adora_vl.training.generation import Extension, Generation
from adora_vl.training.guards import DriftGuard, RowGuard, ServerGuard
from adora_vl.training.scores import Ends, Grader, RewardFunctions
from adora_vl.types import Batch, Row, StepContext, loss_mask


class Watcher(Protocol):
    """Notes what becomes of a generation; for all ranks together."""

    def graded(self, generation: Generation, prompts: PromptBatch, answers: list[Any]) -> None:
        """Its rollouts are graded and judged. `prompts`, `answers`: of this rank, as messages or texts."""

    def weighed(self, generation: Generation) -> None:
        """The advantages of those that are learned from are final."""


@dataclass(frozen=True)
class Pool:
    """All ranks call it together."""

    context: StepContext
    images: DistinctImages
    sampler: Sampler
    processor: Any
    ends: Ends
    rewards: RewardFunctions
    grader: Grader
    columns: Callable[..., Batch]  # `collated` for this run
    score: Callable[[Batch, str], None]  # puts earlier log-probabilities into a batch of a mode
    advantages: AdvantageComputer
    guards: tuple[RowGuard, ServerGuard, DriftGuard]
    extensions: Sequence[Extension]
    watcher: Watcher
    phase: Callable[[str], AbstractContextManager[None]]  # inside, the seconds count as this one's
    dataset: Any  # whose rows are trained on

    def fill(self, generation: Generation) -> None:
        """Sample, grade and judge the rows. In a training, replace groups without signal, and weigh what is left."""
        self.collect(generation)
        if generation.mode == "eval":
            return

        def further(rows: list[Row], attempt: int) -> Batch:
            new: dict[str, Any] = {"sampling": SamplingRequest(), "batch": Batch(), "scores": None, "advantages": None}
            return self.collect(replace(generation, rows=rows, attempt=attempt, **new)).batch

        resample, rows = DynamicSampling(self.context), DistinctRows(self.dataset)
        generation.batch = resample(generation.batch, further, rows, generation.key)
        for extension in self.extensions:
            extension.before_weighing(generation)
        self._weigh(generation)

    def collect(self, generation: Generation) -> Generation:
        """Sample, grade and judge these rollouts, once."""
        config, (row_guard, server_guard, drift_guard) = self.context.config, self.guards
        row_guard.check(generation.rows, generation.step)
        if config.own("seeded_rollouts"):
            generation.sampling.seed = (config.seed, generation.where)
        with self.phase("rollout"), server_guard.watching():
            for extension in self.extensions:
                extension.before_sampling(generation)
            rows, size, mode = generation.rows, generation.group_size, generation.mode
            prompts = self.images.prompts(rows, mode, further=generation.attempt > 0)
            completions, logps = self.sampler.sample(rows, prompts, generation.sampling, size)
            answers = said(self.processor, prompts, completions)
        texts = [completion_text(answer) for answer in answers]
        ended = [self.ends.ended(ids, text) for ids, text in zip(completions, texts, strict=True)]
        counted = ended if config.mask_truncated_completions else [True] * len(rows)
        columns = {**self.columns(prompts, completions, logps, counted), **self._sampled_columns(generation.sampling)}
        batch = generation.batch = self.images.completed(cast("Batch", columns))
        self.score(batch, mode)
        with self.phase("grading"):
            grades = self.rewards(rows, prompts.messages, answers, completions, self.context.state())
        scores = self.grader(grades, prompts.ids, completions, texts, ended, size, generation.step)
        generation.scores, training = scores, mode == "train"
        if training:
            drift_guard.check_batch(batch, generation.step)
        else:  # in a training `_weigh` counts those that are learned from
            batch["num_items_in_batch"] = self._loss_tokens(batch)
        judged = self.advantages.judged(scores, batch, size, generation.step, training=training)
        generation.advantages = judged
        with self.phase("other"):
            self.watcher.graded(generation, prompts, answers)
        return generation

    def _sampled_columns(self, request: SamplingRequest) -> dict[str, torch.Tensor]:
        """What is known of the rollouts from how they were sampled."""
        found: dict[str, Any] = {} if request.alter_images is None else {"distorted": request.altered}
        if request.answers is not None:
            found |= request.answers.columns
        device = self.context.accelerator.device
        return {name: torch.tensor(values).to(device, non_blocking=True) for name, values in found.items()}

    def _weigh(self, generation: Generation) -> None:
        """Weigh the groups that are learned from, once: no later part replaces one."""
        batch, accelerator = generation.batch, self.context.accelerator
        weighed = generation.advantages = self.advantages(batch, generation.group_size, generation.step)
        own_B = generation.of_rank(weighed.advantages_PG.flatten(), accelerator.process_index)
        batch["advantages"] = own_B.to(accelerator.device, non_blocking=True)
        batch["num_items_in_batch"] = self._loss_tokens(batch)
        with self.phase("policy"):
            for extension in self.extensions:
                extension.after_weighing(generation)
        del batch["grades"], batch["signal"]
        with self.phase("other"):
            self.watcher.weighed(generation)

    def _loss_tokens(self, batch: Batch) -> torch.Tensor:
        """Of all ranks, ()."""
        tokens: torch.Tensor = self.context.accelerator.gather(loss_mask(batch).sum()).sum()
        return tokens
