"""Makes complete groups of rollouts into a batch, grades and judges it.

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
from adora_vl.rollout.rollouts import Rollout, RolloutGroup, row_for_rewards
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.extensions import Extension
from adora_vl.training.first_answers import FirstAnswers
from adora_vl.training.generation import Generation
from adora_vl.training.guards import DriftGuard
from adora_vl.training.scoring import Grader, RewardFunctions, StopCriteria
from adora_vl.types import Batch, StepContext, loss_mask

_BY_TOKEN = ("token_type_ids", "mm_token_type_ids")  # fields of prompts with a value for each token


def answers_of(processor: Any, prompts: PromptBatch, completions: Sequence[list[int]]) -> list[Any]:
    """The answers of these completions, (B,).

    They are lists of messages where the prompts are messages, else texts. A tokenizer with a
    template or schema of responses takes a message apart as TRL does, for example into thinking
    and content.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    conversational = not isinstance(prompts.messages[0], str)
    parses = conversational and any(
        getattr(tokenizer, f"response_{kind}", None) is not None for kind in ("template", "schema")
    )
    if parses:
        pairs = zip(completions, prompts.ids, strict=True)
        return [[parse_response(tokenizer, ids, prefix=prompt)] for ids, prompt in pairs]
    texts: list[str] = processor.batch_decode(completions, skip_special_tokens=True)
    if conversational:
        return [[{"role": "assistant", "content": text}] for text in texts]
    return texts


class GenerationCallback(Protocol):
    """Notes what becomes of a generation; every rank calls each method."""

    def graded(self, generation: Generation, prompts: PromptBatch, answers: list[Any]) -> None:
        """Called when the rollouts of a generation are graded and judged.

        `prompts` and `answers` are those of this rank, as messages or texts.
        """

    def weighed(self, generation: Generation) -> None:
        """Called when the advantages of the groups that are learned from are final."""


@dataclass(frozen=True)
class BatchBuilder:
    """Makes the rollouts of complete groups into a batch, grades and judges them.

    The methods are collective: every rank calls each of them, with equally many groups.
    """

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
    scored: bool  # whether the sampler returns log-probabilities
    multiple: int | None = None  # the widths of columns are multiples of it; None for any width
    tools: bool = False  # whether some tokens may be those of tools
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
        """Fill a generation with the batch, the scores and the advantages of these groups.

        Args:
            generation: gets them, and the rows and rollouts of the groups.
            groups: of this rank, complete.
            prompts: of all rollouts in their order; None where they have to be read.
            aged: whether the batch gets the ages of its rollouts.

        Raises:
            RunError: a reward function failed, or no rollout has a reward.
            RolloutError: the engine and the policy drift apart.
        """
        step = generation.key.step
        mode = generation.key.mode
        is_training = mode == "train"
        rows = [group.row for group in groups for _ in group.rollouts]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        generation.rows = rows
        generation.rollouts = rollouts
        if not prompts:
            prompts = self.images.prompts(rows, mode, refill=generation.key.attempt > 0)
        completions = [rollout.policy_tokens for rollout in rollouts]
        # What is graded is the last turn.
        answers = answers_of(
            self.processor, prompts, [rollout.last_turn_tokens for rollout in rollouts]
        )
        texts = [completion_text(answer) for answer in answers]
        ended = list(map(self.ends.has_end, rollouts, texts))
        reward_rows = list(map(row_for_rewards, rows, rollouts))
        opened = self.thinking_opened(prompts, rollouts, texts)
        batch = self.columns(generation, groups, prompts, ended, aged=aged)
        generation.batch = batch
        self.score(batch, mode)
        with self.phase("grading"):
            grades = self.rewards(
                reward_rows,
                prompts.messages,
                answers,
                completions,
                thinking_opened=opened,
                state=self.context.state(),
            )
        size = generation.group_size
        scores = self.grader(grades, prompts.ids, completions, texts, ended, size, step)
        generation.scores = scores
        if is_training and self.context.accelerator.is_main_process:
            self.first_answers.look(rows, scores)
        if is_training:
            self.drift_guard.check_batch(batch, step)
        else:  # in a training `weigh` counts the tokens of the rollouts that are learned from
            batch["num_items_in_batch"] = self.loss_tokens(batch)
        generation.advantages = self.advantages.judged(
            scores, batch, size, step, training=is_training
        )
        with self.phase("other"):
            self.watcher.graded(generation, prompts, answers)

    def thinking_opened(
        self, prompts: PromptBatch, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> list[bool]:
        """Whether the last turn of each rollout began inside a block of thinking, (B,).

        Templates of thinking models end the prompt with `<think>`. Where the tokenizer has parsed a
        closed block out of the message, `texts` is the answer alone, and begins outside.
        """
        opened: list[bool] = []
        for prompt, rollout, text in zip(prompts.ids, rollouts, texts, strict=True):
            turn = rollout.last_turn_tokens
            before = rollout.tokens[: len(rollout.tokens) - len(turn)]
            is_open = opens_thinking([*prompt, *before], self.ends.decode)
            if is_open:
                was_parsed = not closes_block(text) and closes_block(self.ends.decode(turn))
                is_open = not was_parsed
            opened.append(is_open)
        return opened

    def columns(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        prompts: PromptBatch,
        ended: Sequence[bool],
        *,
        aged: bool,
    ) -> Batch:
        """The columns that follow from how the rollouts were sampled.

        `ended` says for each rollout whether it has an end, (B,). With `aged` the batch gets the
        columns `stale_tokens`, `segments` and `age`.
        """
        config = self.context.config
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        logps = [rollout.logps for rollout in rollouts] if self.scored else None
        counted = list(ended) if config.mask_truncated_completions else [True] * len(rollouts)
        policy_mask = None
        if self.tools:
            policy_mask = [rollout.policy_mask for rollout in rollouts]
            # Masked-out rollouts get no image tokens, so their images are not needed.
            pictures = [
                [picture.image for picture in rollout.pictures if is_counted]
                for rollout, is_counted in zip(rollouts, counted, strict=True)
            ]
            prompts = self.images.with_tool_images(prompts, pictures, generation.key.mode)
        sampled = self.collated(
            prompts,
            completions=[rollout.tokens for rollout in rollouts],
            logps=logps,
            counted=counted,
            policy_mask=policy_mask,
        )
        facts: dict[str, list[int]] = {}
        if aged or (self.other_images and generation.key.mode == "train"):
            facts["stale_tokens"] = [
                rollout.stale_tokens(generation.key.step) for rollout in rollouts
            ]
        if aged:
            facts["segments"] = [
                sum(segment.logps is not None for segment in rollout.segments)
                for rollout in rollouts
            ]
            facts["age"] = [
                generation.number - group.began for group in groups for _ in group.rollouts
            ]
        device = self.context.accelerator.device
        further_columns = {
            name: torch.tensor(values).to(device, non_blocking=True)
            for name, values in facts.items()
        }
        return self.images.completed(cast("Batch", {**sampled, **further_columns}))

    def collated(
        self,
        prompts: PromptBatch,
        completions: Sequence[list[int]],
        logps: Sequence[list[float | None]] | None,
        counted: Sequence[bool],
        policy_mask: Sequence[list[bool]] | None = None,
    ) -> Batch:
        """The rollouts of this rank as padded columns, B rows.

        Args:
            prompts: with the images of the completions behind their own.
            completions: token ids, those of tools included.
            logps: the engine's; None for a token that it was not asked for, which becomes NaN.
            counted: whether the loss counts a rollout.
            policy_mask: which tokens the policy has sampled; None: all of them.
        """
        pad_id = self.context.pad_id
        image_id = getattr(self.processor, "image_token_id", None)

        # Positions are counted by the mask, so a rollout that it leaves out has no image tokens.
        completions = [
            [pad_id if token == image_id and not is_counted else token for token in ids]
            for ids, is_counted in zip(completions, counted, strict=True)
        ]
        completion_mask = [
            [int(is_counted)] * len(ids)
            for ids, is_counted in zip(completions, counted, strict=True)
        ]
        batch: dict[str, Any] = {
            "prompt_ids": self._padded(prompts.ids, pad_id, "left"),
            "prompt_mask": self._padded([[1] * len(ids) for ids in prompts.ids], 0, "left"),
            "completion_ids": self._padded(completions, pad_id, "right"),
            "completion_mask": self._padded(completion_mask, 0, "right"),
        }
        fields = prompts.fields if prompts.images is not None else {}
        for name, values in fields.items():
            batch[name] = values
            if name in _BY_TOKEN:
                # Only this field tells the tokens of images from others.
                if name == "mm_token_type_ids" and image_id is not None:
                    of_completions = batch["completion_ids"] == image_id
                else:
                    of_completions = torch.zeros_like(batch["completion_ids"])
                of_prompts = self._padded(values, 0, "left")
                batch[name] = torch.cat([of_prompts, of_completions.long()], dim=1)
        if policy_mask is not None:
            batch["tool_mask"] = self._padded(policy_mask, 1, "right")
        moved: Batch = self.to_device(batch)
        if logps is not None:
            nan_logps = [[torch.nan if logp is None else logp for logp in row] for row in logps]
            logps_BC = self._padded(nan_logps, fill=0.0, side="right", dtype=torch.float32)
            moved["sampling_per_token_logps"] = logps_BC.to(
                moved["prompt_ids"].device, non_blocking=True
            )
        if prompts.images is not None:
            moved["num_images"] = prompts.num_images
        return moved

    def _padded(
        self, values: Sequence[Any], fill: float, side: str, dtype: torch.dtype = torch.long
    ) -> Tensor:
        """Rows of unequal lengths as one tensor, padded with `fill` on a side."""
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        padded: Tensor = pad(
            rows, padding_value=fill, padding_side=side, pad_to_multiple_of=self.multiple
        )
        return padded

    def weigh(self, generation: Generation, extensions: Sequence[Extension]) -> None:
        """Weigh the groups that are learned from, once no group is replaced any more.

        Afterwards the batch has its final advantages, (B,), and the number of tokens in the loss,
        and lacks the columns that only refill needs.
        """
        batch = generation.batch
        accelerator = self.context.accelerator
        final = self.advantages(batch, generation.group_size, generation.key.step)
        generation.advantages = final
        advantages_B = generation.of_rank(final.advantages_PG.flatten(), accelerator.process_index)
        batch["advantages"] = advantages_B.to(accelerator.device, non_blocking=True)
        batch["num_items_in_batch"] = self.loss_tokens(batch)
        with self.phase("policy"):
            for extension in extensions:
                extension.after_weighing(generation)
        del batch["grades"], batch["signal"]
        with self.phase("other"):
            self.watcher.weighed(generation)

    def loss_tokens(self, batch: Batch) -> Tensor:
        """Number of tokens in the loss over all ranks, ()."""
        tokens: Tensor = self.context.accelerator.gather(loss_mask(batch).sum()).sum()
        return tokens
