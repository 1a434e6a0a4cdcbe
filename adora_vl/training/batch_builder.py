"""Makes complete groups of rollouts into a batch.

On the same rollouts every column is TRL 1.16's to the bit (`tests/parity/test_own_generation.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.trainer.utils import pad

from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rewards.completion import completion_text
from adora_vl.rewards.thinking import closes_block, opens_thinking
from adora_vl.rollout.rollouts import Rollout, RolloutGroup
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.training.generation import BuiltGroups, Generation
from adora_vl.types import Batch, StepContext

_BY_TOKEN = ("token_type_ids", "mm_token_type_ids")  # fields of prompts with a value for each token


def answers_of(processor: Any, prompts: PromptBatch, completions: Sequence[list[int]]) -> list[Any]:
    """Return the answers of these completions, (B,).

    They are lists of messages where the prompts are messages, else texts. A tokenizer with a
    template or schema of responses takes a message apart as TRL does, for example into thinking
    and content.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    conversational = not isinstance(prompts.messages[0], str)
    parses_messages = conversational and any(
        getattr(tokenizer, f"response_{kind}", None) is not None for kind in ("template", "schema")
    )
    if parses_messages:
        pairs = zip(completions, prompts.ids, strict=True)
        return [[parse_response(tokenizer, ids, prefix=prompt)] for ids, prompt in pairs]
    texts: list[str] = processor.batch_decode(completions, skip_special_tokens=True)
    if conversational:
        return [[{"role": "assistant", "content": text}] for text in texts]
    return texts


@dataclass(frozen=True)
class BatchBuilder:
    """Makes the rollouts of complete groups into a batch.

    `build` is collective: every rank calls it, with equally many groups.
    """

    context: StepContext
    images: DistinctImages
    processor: Any
    ends: StopCriteria
    to_device: Callable[[Any], Any]  # Transformers' way there, which may round pixels
    scored: bool  # whether the sampler returns log-probabilities
    multiple: int | None = None  # the widths of columns are multiples of it; None for any width
    tools: bool = False  # whether some tokens may be those of tools
    has_stale: bool = False  # whether rollouts of a training may be older than their generation
    other_images: bool = False  # whether some rollouts see other images than the trainer

    def build(
        self, generation: Generation, groups: Sequence[RolloutGroup], prompts: PromptBatch
    ) -> BuiltGroups:
        """Return the groups as a batch, with what the reward functions get.

        Args:
            generation: that the groups are built for.
            groups: of this rank, complete.
            prompts: of all rollouts in their order.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        # What is graded is the last turn.
        answers = answers_of(
            self.processor, prompts, [rollout.last_turn_tokens for rollout in rollouts]
        )
        texts = [completion_text(answer) for answer in answers]
        has_end = list(map(self.ends.has_end, rollouts, texts))
        return BuiltGroups(
            groups=groups,
            prompts=prompts,
            answers=answers,
            texts=texts,
            has_end=has_end,
            thinking_opened=self.thinking_opened(prompts, rollouts, texts),
            batch=self.columns(generation, groups, prompts, has_end),
        )

    def thinking_opened(
        self, prompts: PromptBatch, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> list[bool]:
        """Return whether the last turn of each rollout began inside a block of thinking, (B,).

        Templates of thinking models end the prompt with `<think>`. Where the tokenizer has parsed a
        closed block out of the message, `texts` is the answer alone, and begins outside.
        """
        opened: list[bool] = []
        for prompt, rollout, text in zip(prompts.ids, rollouts, texts, strict=True):
            last_turn = rollout.last_turn_tokens
            earlier_tokens = rollout.tokens[: len(rollout.tokens) - len(last_turn)]
            is_open = opens_thinking([*prompt, *earlier_tokens], self.ends.decode)
            if is_open:
                was_parsed = not closes_block(text) and closes_block(self.ends.decode(last_turn))
                is_open = not was_parsed
            opened.append(is_open)
        return opened

    def columns(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        prompts: PromptBatch,
        has_end: Sequence[bool],
    ) -> Batch:
        """Return the columns that follow from how the rollouts were sampled.

        `has_end` says for each rollout whether it has an end, (B,). Where rollouts may be older
        than their generation, the batch gets the columns `stale_tokens`, `segments` and `age`.
        """
        config = self.context.config
        is_training = generation.key.mode == "train"
        has_aged_rollouts = is_training and self.has_stale
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        logps = [rollout.logps for rollout in rollouts] if self.scored else None
        counts_in_loss = (
            list(has_end) if config.mask_truncated_completions else [True] * len(rollouts)
        )
        policy_mask = None
        if self.tools:
            policy_mask = [rollout.policy_mask for rollout in rollouts]
            # Masked-out rollouts get no image tokens, so their images are not needed.
            tool_images = [
                [picture.image for picture in rollout.pictures if is_counted]
                for rollout, is_counted in zip(rollouts, counts_in_loss, strict=True)
            ]
            prompts = self.images.with_tool_images(prompts, tool_images, generation.key.mode)
        sampled = self.collated(
            prompts,
            completions=[rollout.tokens for rollout in rollouts],
            logps=logps,
            counts_in_loss=counts_in_loss,
            policy_mask=policy_mask,
        )
        extra_values: dict[str, list[int]] = {}
        if has_aged_rollouts or (is_training and self.other_images):
            extra_values["stale_tokens"] = [
                rollout.stale_tokens(generation.key.step) for rollout in rollouts
            ]
        if has_aged_rollouts:
            extra_values["segments"] = [
                sum(segment.logps is not None for segment in rollout.segments)
                for rollout in rollouts
            ]
            extra_values["age"] = [
                generation.number - group.began for group in groups for _ in group.rollouts
            ]
        device = self.context.accelerator.device
        extra_columns = {
            name: torch.tensor(values).to(device, non_blocking=True)
            for name, values in extra_values.items()
        }
        return self.images.completed(cast("Batch", {**sampled, **extra_columns}))

    def collated(
        self,
        prompts: PromptBatch,
        completions: Sequence[list[int]],
        logps: Sequence[list[float | None]] | None,
        counts_in_loss: Sequence[bool],
        policy_mask: Sequence[list[bool]] | None = None,
    ) -> Batch:
        """Return the rollouts of this rank as padded columns, B rows.

        Args:
            prompts: with the images of the completions behind their own.
            completions: token ids, those of tools included.
            logps: the engine's; None for a token that it was not asked for, which becomes NaN.
            counts_in_loss: whether the loss counts a rollout.
            policy_mask: which tokens the policy has sampled; None: all of them.
        """
        pad_id = self.context.pad_id
        image_id = getattr(self.processor, "image_token_id", None)

        # Positions are counted by the mask, so a rollout that it leaves out has no image tokens.
        completions = [
            ids if is_counted else [pad_id if token == image_id else token for token in ids]
            for ids, is_counted in zip(completions, counts_in_loss, strict=True)
        ]
        completion_mask = [
            [int(is_counted)] * len(ids)
            for ids, is_counted in zip(completions, counts_in_loss, strict=True)
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
                    is_image_in_completion = batch["completion_ids"] == image_id
                else:
                    is_image_in_completion = torch.zeros_like(batch["completion_ids"])
                types_of_prompts = self._padded(values, 0, "left")
                batch[name] = torch.cat([types_of_prompts, is_image_in_completion.long()], dim=1)
        if policy_mask is not None:
            batch["tool_mask"] = self._padded(policy_mask, 1, "right")
        on_device: Batch = self.to_device(batch)
        if logps is not None:
            logps_BC = self._padded(logps, fill=0.0, side="right", dtype=np.float32)
            on_device["sampling_per_token_logps"] = logps_BC.to(
                on_device["prompt_ids"].device, non_blocking=True
            )
        if prompts.images is not None:
            on_device["num_images"] = prompts.num_images
        return on_device

    def _padded(
        self, values: Sequence[Any], fill: float, side: str, dtype: type[np.generic] = np.int64
    ) -> Tensor:
        """Return rows of unequal lengths as one tensor, padded with `fill` on a side.

        A None among numbers becomes NaN.
        """
        # NumPy reads a list of numbers a few times as fast as torch.
        rows = [torch.from_numpy(np.array(row, dtype=dtype)) for row in values]
        padded: Tensor = pad(
            rows, padding_value=fill, padding_side=side, pad_to_multiple_of=self.multiple
        )
        return padded
