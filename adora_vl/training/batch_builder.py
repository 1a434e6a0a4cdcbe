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
from adora_vl.packing.prompts import TOKEN_TYPE_FIELDS, PromptBatch
from adora_vl.rewards.completion import completion_text
from adora_vl.rewards.thinking import closes_block, opens_thinking
from adora_vl.rollout.rollouts import Rollout, RolloutGroup
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.training.generation import Generation, UnscoredGroups
from adora_vl.types import Batch, StepContext


def decoded_completions(
    processor: Any, prompts: PromptBatch, completion_ids: Sequence[list[int]]
) -> list[Any]:
    """Decode B completions into what reward functions get as `completions`, (B,).

    As in TRL a completion has the form of the prompts:

    - If they are messages, it is a list with one message, such as
      `[{"role": "assistant", "content": "4"}]`. A tokenizer with `response_template` or
      `response_schema` parses the message, for example into thinking and content.
    - If they are texts, it is a text.

    Args:
        processor: that of the model, or a tokenizer.
        prompts: the prompt of each completion.
        completion_ids: the token ids of each completion.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    is_conversational = not isinstance(prompts.messages[0], str)
    has_template = getattr(tokenizer, "response_template", None) is not None
    has_schema = getattr(tokenizer, "response_schema", None) is not None
    if is_conversational and (has_template or has_schema):
        return [
            [parse_response(tokenizer, ids, prefix=prompt_ids)]
            for ids, prompt_ids in zip(completion_ids, prompts.ids, strict=True)
        ]
    texts: list[str] = processor.batch_decode(completion_ids, skip_special_tokens=True)
    if is_conversational:
        return [[{"role": "assistant", "content": text}] for text in texts]
    return texts


@dataclass(frozen=True, kw_only=True)
class BatchBuilder:
    """Makes the rollouts of complete groups into a batch.

    With tools a completion has tokens of the policy and tokens of tools, and its last turn is what
    the policy says after the last answer of a tool. A batch has B rollouts, with prompts of P and
    completions of C tokens. `build` is collective: every rank calls it, with equally many groups.
    """

    context: StepContext
    images: DistinctImages
    processor: Any
    stop_criteria: StopCriteria
    to_device: Callable[[Any], Any]
    """Transformers' method for it, which may round pixels to the training dtype."""
    has_engine_logps: bool
    """Whether the sampler returns log-probabilities."""
    pad_to_multiple_of: int | None
    """The widths of columns are multiples of it; None for any width."""
    has_tools: bool
    """Whether some tokens may be those of tools."""
    allows_stale_rollouts: bool
    """Whether rollouts of a training may be older than their generation."""
    shows_other_images: bool
    """Whether an extension shows the engine other images than the trainer learns from."""

    def build(
        self, generation: Generation, groups: Sequence[RolloutGroup], prompts: PromptBatch
    ) -> UnscoredGroups:
        """Make complete groups into a batch, and decode what the reward functions get. Collective.

        Args:
            generation: the present one. A training batch gets columns that an evaluation does not
                need, such as how many tokens earlier weights have sampled.
            groups: this rank's groups, whose rollouts have all ended.
            prompts: the prompt of each rollout, (B,).
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        # With tools a rollout has several turns. The last one is graded.
        completions = decoded_completions(
            self.processor, prompts, [rollout.last_turn_tokens for rollout in rollouts]
        )
        # A completion may be a list of messages; its text is what they say.
        completion_texts = [completion_text(completion) for completion in completions]
        ended_by_itself = [
            self.stop_criteria.rollout_has_stopped(rollout, text)
            for rollout, text in zip(rollouts, completion_texts, strict=True)
        ]
        return UnscoredGroups(
            groups=groups,
            prompts=prompts,
            completions=completions,
            completion_texts=completion_texts,
            ended_by_itself=ended_by_itself,
            thinking_opened=self.thinking_opened(prompts, rollouts, completion_texts),
            batch=self._make_batch(generation, groups, prompts, ended_by_itself),
        )

    def thinking_opened(
        self, prompts: PromptBatch, rollouts: Sequence[Rollout], completion_texts: Sequence[str]
    ) -> list[bool]:
        """Return for each rollout whether the text of its last turn begins inside a thinking block.

        The chat templates of thinking models end the prompt with `<think>`. If the policy then
        samples `2 + 2</think>4`, that text begins inside the block. If the tokenizer parses the
        completion and removes the block, the text is `4`, which is outside of it.

        Args:
            prompts: the prompt of each rollout.
            rollouts: the rollouts.
            completion_texts: the text of each rollout's last turn.
        """
        begins_inside: list[bool] = []
        decode = self.stop_criteria.decode
        for prompt_ids, rollout, text in zip(prompts.ids, rollouts, completion_texts, strict=True):
            last_turn_ids = rollout.last_turn_tokens
            earlier_ids = rollout.tokens[: len(rollout.tokens) - len(last_turn_ids)]
            is_inside = opens_thinking([*prompt_ids, *earlier_ids], decode)
            # The tokens of the turn still have the end of the block, also where parsing has removed
            # it from the text.
            if is_inside and closes_block(decode(last_turn_ids)) and not closes_block(text):
                is_inside = False  # the turn closes the block, and its text has lost the block
            begins_inside.append(is_inside)
        return begins_inside

    def _make_batch(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        prompts: PromptBatch,
        ended_by_itself: Sequence[bool],
    ) -> Batch:
        """Return the batch with all columns that are known before the rollouts are graded.

        With `mask_truncated_completions` the loss leaves out rollouts that were cut off: their
        `completion_mask` is 0.

        Args:
            generation: the present one.
            groups: this rank's groups, with B rollouts.
            prompts: the prompt of each rollout.
            ended_by_itself: whether a token or string of the stop criteria ended each rollout.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        counts_in_loss = [True] * len(rollouts)
        if self.context.config.mask_truncated_completions:
            counts_in_loss = list(ended_by_itself)
        policy_mask = None
        if self.has_tools:
            policy_mask = [rollout.policy_mask for rollout in rollouts]
            # Where the loss does not count a rollout, `collate` replaces its image tokens, so it
            # needs no images.
            tool_images = [
                [picture.image for picture in rollout.pictures if is_counted]
                for rollout, is_counted in zip(rollouts, counts_in_loss, strict=True)
            ]
            prompts = self.images.with_tool_images(prompts, tool_images, generation.key.mode)
        batch = self.collate(
            prompts,
            completions=[rollout.tokens for rollout in rollouts],
            logps=[rollout.logps for rollout in rollouts] if self.has_engine_logps else None,
            counts_in_loss=counts_in_loss,
            policy_mask=policy_mask,
        )
        age_columns: dict[str, Tensor] = {}
        if generation.key.mode == "train":
            age_columns = self._age_columns(generation, groups)
        # A batch without images gets empty columns for them where other batches may have some.
        return self.images.fill_image_columns(cast("Batch", {**batch, **age_columns}))

    def _age_columns(
        self, generation: Generation, groups: Sequence[RolloutGroup]
    ) -> dict[str, Tensor]:
        """Return the columns that say how old rollouts are, (B,) each, on the device.

        A rollout may have begun in an earlier generation (`adora_rollouts.budget` and `ahead`):

        - `stale_tokens`: how many of its tokens were sampled by earlier weights.
        - `segments`: in how many parts it was sampled.
        - `age`: how many generations ago its group began.

        For example, a rollout that began in the previous generation, where earlier weights sampled
        its first 250 tokens, has 250 stale tokens, 2 segments and age 1. A run in which no rollout
        can be older than its generation has no such columns.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        values_by_column: dict[str, list[int]] = {}
        # An extension may show the engine other images than the policy learns from. Tokens that
        # were sampled with those count as stale too.
        if self.allows_stale_rollouts or self.shows_other_images:
            values_by_column["stale_tokens"] = [
                rollout.stale_tokens(generation.key.step) for rollout in rollouts
            ]
        if self.allows_stale_rollouts:
            # A segment is a part that was sampled at once, or an answer of a tool. Answers of tools
            # do not count.
            values_by_column["segments"] = [
                sum(segment.is_sampled for segment in rollout.segments) for rollout in rollouts
            ]
            values_by_column["age"] = [
                generation.number - group.start_generation
                for group in groups
                for _ in group.rollouts
            ]
        device = self.context.accelerator.device
        return {
            name: torch.tensor(values).to(device, non_blocking=True)
            for name, values in values_by_column.items()
        }

    def collate(
        self,
        prompts: PromptBatch,
        completions: Sequence[list[int]],
        logps: Sequence[list[float | None]] | None,
        counts_in_loss: Sequence[bool],
        policy_mask: Sequence[list[bool]] | None = None,
    ) -> Batch:
        """Return B rollouts as columns on the device: prompts of P tokens, completions of C tokens.

        Prompts are padded on the left, completions on the right.

        Args:
            prompts: the prompt of each rollout, with its images. Where a completion has images
                too, they stand behind those of its prompt.
            completions: token ids, those of tools included.
            logps: the engine's log-probabilities of the completions. A token that the engine
                was not asked for, such as a tool's, has None, which becomes NaN.
            counts_in_loss: whether the loss counts a rollout; if not, its `completion_mask` is 0.
            policy_mask: which tokens the policy has sampled; None: all of them.
        """
        pad_id = self.context.pad_id
        image_token_id = getattr(self.processor, "image_token_id", None)

        # If the loss does not count a completion, its mask is 0, and the model gives its image
        # tokens no positions. So these tokens are replaced by padding.
        completions = [
            ids if is_counted else [pad_id if token == image_token_id else token for token in ids]
            for ids, is_counted in zip(completions, counts_in_loss, strict=True)
        ]
        completion_mask = [
            [int(is_counted)] * len(ids)
            for ids, is_counted in zip(completions, counts_in_loss, strict=True)
        ]
        batch: dict[str, Any] = {
            "prompt_ids": self._pad(prompts.ids, fill=pad_id, side="left"),
            "prompt_mask": self._pad([[1] * len(ids) for ids in prompts.ids], fill=0, side="left"),
            "completion_ids": self._pad(completions, fill=pad_id, side="right"),
            "completion_mask": self._pad(completion_mask, fill=0, side="right"),
        }
        if prompts.images is not None:
            batch |= self._image_fields(prompts, batch["completion_ids"], image_token_id)
        if policy_mask is not None:
            batch["tool_mask"] = self._pad(policy_mask, fill=1, side="right")
        on_device: Batch = self.to_device(batch)
        if logps is not None:
            logps_BC = self._pad(logps, fill=0.0, side="right", dtype=np.float32)
            on_device["sampling_per_token_logps"] = logps_BC.to(
                on_device["prompt_ids"].device, non_blocking=True
            )
        if prompts.images is not None:
            on_device["num_images"] = prompts.num_images
        return on_device

    def _image_fields(
        self, prompts: PromptBatch, completion_ids_BC: Tensor, image_token_id: int | None
    ) -> dict[str, Any]:
        """Return the processor's outputs for images, such as `pixel_values`, as columns of a batch.

        `token_type_ids` and `mm_token_type_ids` have a type for each token of the prompts, and are
        extended to the completions, (B, P + C). The second is 1 at image tokens: with the image
        token 9, a prompt of the types 0 1 1 and the completion 9 7 give 0 1 1 1 0. The first is 0
        in completions.

        Args:
            prompts: with the processor's outputs for the prompts.
            completion_ids_BC: the padded completions.
            image_token_id: the id of the image token; None for a text model.
        """
        fields = dict[str, Any](prompts.fields)
        for name in TOKEN_TYPE_FIELDS:
            if name not in fields:
                continue
            types_of_completions_BC = torch.zeros_like(completion_ids_BC)
            if name == "mm_token_type_ids" and image_token_id is not None:
                types_of_completions_BC = (completion_ids_BC == image_token_id).long()
            types_of_prompts_BP = self._pad(fields[name], fill=0, side="left")
            fields[name] = torch.cat([types_of_prompts_BP, types_of_completions_BC], dim=1)
        return fields

    def _pad(
        self, values: Sequence[Any], *, fill: float, side: str, dtype: type[np.generic] = np.int64
    ) -> Tensor:
        """Return rows of unequal lengths as one padded tensor, (B, longest row).

        For example, [1, 2] and [3] with 0 on the left give [[1, 2], [0, 3]]. In a float dtype None
        becomes NaN.

        Args:
            values: the rows.
            fill: the value that shorter rows are padded with.
            side: where they are padded, "left" or "right".
            dtype: that of the result.
        """
        # NumPy reads a list of numbers a few times as fast as torch.
        rows = [torch.from_numpy(np.array(row, dtype=dtype)) for row in values]
        padded: Tensor = pad(
            rows, padding_value=fill, padding_side=side, pad_to_multiple_of=self.pad_to_multiple_of
        )
        return padded
