"""From complete groups to a batch that is graded and judged: what is said, its columns, rewards and criteria."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.prompts import PromptBatch
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.rollouts import RolloutGroup, graded
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.collate import said
from adora_vl.training.generation import Generation
from adora_vl.training.guards import DriftGuard
from adora_vl.training.scores import Ends, Grader, RewardFunctions
from adora_vl.types import Batch, StepContext, loss_mask


class Watcher(Protocol):
    """Notes what becomes of a generation; for all ranks together."""

    def graded(self, generation: Generation, prompts: PromptBatch, answers: list[Any]) -> None:
        """Its rollouts are graded and judged. `prompts`, `answers`: of this rank, as messages or texts."""

    def weighed(self, generation: Generation) -> None:
        """The advantages of those that are learned from are final."""


@dataclass(frozen=True)
class Judge:
    """All ranks call it together, with equally many groups."""

    context: StepContext
    images: DistinctImages
    processor: Any
    ends: Ends
    rewards: RewardFunctions
    grader: Grader
    collated: Callable[..., Batch]  # for this run
    score: Callable[[Batch, str], None]  # puts earlier log-probabilities into a batch of a mode
    advantages: AdvantageComputer
    drift_guard: DriftGuard
    watcher: Watcher
    phase: Callable[[str], AbstractContextManager[None]]  # inside, the seconds count as this one's
    scored: bool  # whether who samples says log-probabilities
    tools: bool = False  # whether not all tokens are the policy's

    def __call__(
        self, generation: Generation, groups: Sequence[RolloutGroup], prompts: PromptBatch | None, *, aged: bool
    ) -> None:
        """Fill the generation. `prompts`: of its rollouts, None: to be read. `aged`: the batch has their ages."""
        step, mode = generation.step, generation.mode
        rows = generation.rows = [group.row for group in groups for _ in group.rollouts]
        rollouts = generation.rollouts = [rollout for group in groups for rollout in group.rollouts]
        prompts = prompts or self.images.prompts(rows, mode, further=generation.attempt > 0)
        completions, turns = [rollout.said for rollout in rollouts], [rollout.turn for rollout in rollouts]
        answers = said(self.processor, prompts, turns)  # the last turn is what is graded
        texts = [completion_text(answer) for answer in answers]
        ended = [*map(self.ends.has_end, rollouts, texts)]
        given = [*map(graded, rows, rollouts)]
        batch = generation.batch = self.columns(generation, groups, prompts, ended, aged=aged)
        self.score(batch, mode)
        with self.phase("grading"):
            grades = self.rewards(given, prompts.messages, answers, completions, self.context.state())
        size = generation.group_size
        scores = self.grader(grades, prompts.ids, completions, texts, ended, size, step)
        generation.scores, training = scores, mode == "train"
        if training:
            self.drift_guard.check_batch(batch, step)
        else:  # in a training those are counted that are learned from
            batch["num_items_in_batch"] = self.loss_tokens(batch)
        generation.advantages = self.advantages.judged(scores, batch, size, step, training=training)
        with self.phase("other"):
            self.watcher.graded(generation, prompts, answers)

    def columns(
        self, generation: Generation, groups: Sequence[RolloutGroup], prompts: PromptBatch, ended: Sequence[bool], *,
        aged: bool,
    ) -> Batch:  # fmt: skip
        """What is known of rollouts from how they were sampled. `ended`: whether each has an end."""
        config, rollouts = self.context.config, [rollout for group in groups for rollout in group.rollouts]
        logps = [rollout.logps for rollout in rollouts] if self.scored else None
        counted = list(ended) if config.mask_truncated_completions else [True] * len(rollouts)
        own = None
        if self.tools:
            own = [rollout.own for rollout in rollouts]
            # What the loss does not count shows no image.
            pictures = [[p.image for p in one.pictures if sees] for one, sees in zip(rollouts, counted, strict=True)]
            prompts = self.images.shown_later(prompts, pictures, generation.mode)
        found = self.collated(prompts, [rollout.tokens for rollout in rollouts], logps, counted, own)
        facts: dict[str, Any] = {}
        if generation.mode == "train" and config.adora_extensions.noisy_rollouts.share:
            facts["distorted"] = [rollout.distorted for rollout in rollouts]
        if aged:
            facts["stale_tokens"] = [rollout.stale(generation.step) for rollout in rollouts]
            facts["segments"] = [sum(span.logps is not None for span in one.spans) for one in rollouts]
            facts["age"] = [generation.number - group.began for group in groups for _ in group.rollouts]
        device = self.context.accelerator.device
        made = {name: torch.tensor(values).to(device, non_blocking=True) for name, values in facts.items()}
        return self.images.completed(cast("Batch", {**found, **made}))

    def again(self, groups: Sequence[RolloutGroup]) -> Batch:
        """The columns of groups of an earlier generation that are remade for the present one."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rows = [group.row for group in groups for _ in group.rollouts]
        prompts = self.images.prompts(rows, "train", further=True)
        ended = [self.ends.has_end(one, self.ends.decode(one.turn)) for one in rollouts]
        now = Generation(rows, "train", 0, "0/0", 1, len(groups[0].rollouts))
        return self.columns(now, groups, prompts, ended, aged=False)

    def weigh(self, generation: Generation, extensions: Sequence[Any]) -> None:
        """Weigh the groups that are learned from, once: no later part replaces one."""
        batch, accelerator = generation.batch, self.context.accelerator
        weighed = generation.advantages = self.advantages(batch, generation.group_size, generation.step)
        own_B = generation.of_rank(weighed.advantages_PG.flatten(), accelerator.process_index)
        batch["advantages"] = own_B.to(accelerator.device, non_blocking=True)
        batch["num_items_in_batch"] = self.loss_tokens(batch)
        with self.phase("policy"):
            for extension in extensions:
                extension.after_weighing(generation)
        del batch["grades"], batch["signal"]
        with self.phase("other"):
            self.watcher.weighed(generation)

    def loss_tokens(self, batch: Batch) -> torch.Tensor:
        """Of all ranks, ()."""
        tokens: torch.Tensor = self.context.accelerator.gather(loss_mask(batch).sum()).sum()
        return tokens
