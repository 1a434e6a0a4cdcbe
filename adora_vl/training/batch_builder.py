"""From complete groups to a batch that is graded and judged: what is said, its columns, rewards and
criteria.

On the same rollouts every column is TRL 1.16's to the bit (`tests/parity/test_own_generation.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.trainer.utils import pad

from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rewards.completion import completion_text
from adora_vl.rewards.thinking import closes_block, opens_thinking
from adora_vl.rollout.rollouts import Rollout, RolloutGroup, graded
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.extensions import Extension
from adora_vl.training.first_answers import FirstAnswers
from adora_vl.training.generation import Generation
from adora_vl.training.guards import DriftGuard
from adora_vl.training.scoring import Grader, RewardFunctions, StopCriteria
from adora_vl.types import Batch, StepContext, loss_mask

_BY_TOKEN = ("token_type_ids", "mm_token_type_ids")  # fields of prompts with a value for each token


def said(processor: Any, prompts: PromptBatch, completions: Sequence[list[int]]) -> list[Any]:
    """What was answered, (B,): as messages where the prompts are messages, else as texts."""
    tokenizer = getattr(processor, "tokenizer", processor)
    conversational = not isinstance(prompts.messages[0], str)
    if conversational and any(
        getattr(tokenizer, f"response_{of}", None) is not None for of in ("template", "schema")
    ):
        pairs = zip(completions, prompts.ids, strict=True)
        return [[parse_response(tokenizer, ids, prefix=prompt)] for ids, prompt in pairs]
    texts: list[str] = processor.batch_decode(completions, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts


class GenerationCallback(Protocol):
    """Notes what becomes of a generation; for all ranks together."""

    def graded(self, generation: Generation, prompts: PromptBatch, answers: list[Any]) -> None:
        """Its rollouts are graded and judged.

        `prompts`, `answers`: of this rank, as messages or texts.
        """

    def weighed(self, generation: Generation) -> None:
        """The advantages of those that are learned from are final."""


@dataclass(frozen=True)
class BatchBuilder:
    """All ranks call it together, with equally many groups."""

    context: StepContext
    images: DistinctImages
    processor: Any
    ends: StopCriteria
    rewards: RewardFunctions
    grader: Grader
    to_device: Callable[[Any], Any]  # Transformers' way there, which may round pixels
    score: Callable[[Batch, str], None]  # puts earlier log-probabilities into a batch of a mode
    advantages: AdvantageComputer
    drift_guard: DriftGuard
    watcher: GenerationCallback
    phase: Callable[[str], AbstractContextManager[None]]  # inside, the seconds count as this one's
    scored: bool  # whether who samples says log-probabilities
    multiple: int | None = None  # of which the widths of columns are multiples; None for any
    tools: bool = False  # whether not all tokens are the policy's
    first_answers: FirstAnswers = field(default_factory=FirstAnswers)
    other_images: bool = False  # whether some rollouts see other images than the trainer

    def __call__(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        prompts: PromptBatch | None,
        *,
        aged: bool,
    ) -> None:
        """Fill the generation.

        `prompts`: of its rollouts, None: to be read. `aged`: the batch has their ages.
        """
        step = generation.step
        mode = generation.mode
        rows = generation.rows = [group.row for group in groups for _ in group.rollouts]
        rollouts = generation.rollouts = [rollout for group in groups for rollout in group.rollouts]
        prompts = prompts or self.images.prompts(rows, mode, refill=generation.attempt > 0)
        completions = [rollout.said for rollout in rollouts]
        turns = [rollout.turn for rollout in rollouts]
        answers = said(self.processor, prompts, turns)  # the last turn is what is graded
        texts = [completion_text(answer) for answer in answers]
        ended = [*map(self.ends.has_end, rollouts, texts)]
        given = [*map(graded, rows, rollouts)]
        opened = self.thinking_opened(prompts, rollouts, texts)
        batch = generation.batch = self.columns(generation, groups, prompts, ended, aged=aged)
        self.score(batch, mode)
        with self.phase("grading"):
            grades = self.rewards(
                given,
                prompts.messages,
                answers,
                completions,
                thinking_opened=opened,
                state=self.context.state(),
            )
        size = generation.group_size
        scores = self.grader(grades, prompts.ids, completions, texts, ended, size, step)
        generation.scores = scores
        training = mode == "train"
        if training and self.context.accelerator.is_main_process:
            self.first_answers.look(rows, scores)
        if training:
            self.drift_guard.check_batch(batch, step)
        else:  # in a training those are counted that are learned from
            batch["num_items_in_batch"] = self.loss_tokens(batch)
        generation.advantages = self.advantages.judged(scores, batch, size, step, training=training)
        with self.phase("other"):
            self.watcher.graded(generation, prompts, answers)

    def thinking_opened(
        self, prompts: PromptBatch, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> list[bool]:
        """Whether the last turn of each rollout began inside a block of thinking, (B,).

        Templates of thinking models end the prompt with `<think>`. Where the tokenizer has parsed a
        closed block out of the message, `texts` is the answer alone, and begins outside.
        """
        found: list[bool] = []
        for prompt, rollout, text in zip(prompts.ids, rollouts, texts, strict=True):
            turn = rollout.turn
            before = rollout.tokens[: len(rollout.tokens) - len(turn)]
            is_open = opens_thinking([*prompt, *before], self.ends.decode)
            if is_open:
                was_parsed = not closes_block(text) and closes_block(self.ends.decode(turn))
                is_open = not was_parsed
            found.append(is_open)
        return found

    def columns(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        prompts: PromptBatch,
        ended: Sequence[bool],
        *,
        aged: bool,
    ) -> Batch:
        """What is known of rollouts from how they were sampled.

        `ended`: whether each has an end.
        """
        config = self.context.config
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        logps = [rollout.logps for rollout in rollouts] if self.scored else None
        counted = list(ended) if config.mask_truncated_completions else [True] * len(rollouts)
        own = None
        if self.tools:
            own = [rollout.own for rollout in rollouts]
            # What the loss does not count shows no image.
            pictures = [
                [p.image for p in one.pictures if sees]
                for one, sees in zip(rollouts, counted, strict=True)
            ]
            prompts = self.images.shown_later(prompts, pictures, generation.mode)
        found = self.collated(
            prompts,
            completions=[rollout.tokens for rollout in rollouts],
            logps=logps,
            counted=counted,
            own=own,
        )
        facts: dict[str, Any] = {}
        if aged or (self.other_images and generation.mode == "train"):
            facts["stale_tokens"] = [rollout.stale(generation.step) for rollout in rollouts]
        if aged:
            facts["segments"] = [
                sum(span.logps is not None for span in one.spans) for one in rollouts
            ]
            facts["age"] = [
                generation.number - group.began for group in groups for _ in group.rollouts
            ]
        device = self.context.accelerator.device
        made = {
            name: torch.tensor(values).to(device, non_blocking=True)
            for name, values in facts.items()
        }
        return self.images.completed(cast("Batch", {**found, **made}))

    def collated(
        self,
        prompts: PromptBatch,
        completions: Sequence[list[int]],
        logps: Sequence[list[float | None]] | None,
        counted: Sequence[bool],
        own: Sequence[list[bool]] | None = None,
    ) -> Batch:
        """The rollouts of this rank, B rows.

        `prompts`: with the images of the completions behind their own.

        `logps`: the engine's; None for a token that it was not asked for, which becomes NaN.
        `counted`: whether the loss counts a rollout. `own`: which tokens the policy has sampled,
        where tools may have said others.
        """
        pad_id = self.context.pad_id
        image_id = getattr(self.processor, "image_token_id", None)

        def wide(
            values: Sequence[Any], fill: float, side: str, dtype: torch.dtype = torch.long
        ) -> Tensor:
            rows = [torch.tensor(row, dtype=dtype) for row in values]
            padded: Tensor = pad(
                rows, padding_value=fill, padding_side=side, pad_to_multiple_of=self.multiple
            )
            return padded

        # Positions are counted by the mask, so what it leaves out shows no image.
        answers = zip(completions, counted, strict=True)
        completions = [
            [pad_id if t == image_id and not counts else t for t in ids] for ids, counts in answers
        ]
        ones = [[int(one)] * len(ids) for ids, one in zip(completions, counted, strict=True)]
        batch: dict[str, Any] = {
            "prompt_ids": wide(prompts.ids, pad_id, "left"),
            "prompt_mask": wide([[1] * len(ids) for ids in prompts.ids], 0, "left"),
            "completion_ids": wide(completions, pad_id, "right"),
            "completion_mask": wide(ones, 0, "right"),
        }
        fields = prompts.fields if prompts.images is not None else {}
        for name, values in fields.items():
            batch[name] = values
            if name in _BY_TOKEN:
                shows = name == "mm_token_type_ids" and image_id is not None
                behind = (
                    batch["completion_ids"] == image_id
                    if shows
                    else torch.zeros_like(batch["completion_ids"])
                )
                batch[name] = torch.cat([wide(values, 0, "left"), behind.long()], dim=1)
        if own is not None:
            batch["tool_mask"] = wide(own, 1, "right")
        moved: Batch = self.to_device(batch)
        if logps is not None:
            scored = [[torch.nan if logp is None else logp for logp in row] for row in logps]
            seen = wide(scored, fill=0.0, side="right", dtype=torch.float32)
            moved["sampling_per_token_logps"] = seen.to(
                moved["prompt_ids"].device, non_blocking=True
            )
        if prompts.images is not None:
            moved["num_images"] = prompts.num_images
        return moved

    def weigh(self, generation: Generation, extensions: Sequence[Extension]) -> None:
        """Weigh the groups that are learned from, once: no later part replaces one."""
        batch = generation.batch
        accelerator = self.context.accelerator
        weighed = generation.advantages = self.advantages(
            batch, generation.group_size, generation.step
        )
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
