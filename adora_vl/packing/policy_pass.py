"""The policy's forward pass over a micro-batch, with shared prompts where they save work."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.config.keys import AdoraKeys
from adora_vl.models.activations import PassSize
from adora_vl.packing.images import with_image_columns
from adora_vl.packing.packed_forward import (
    LearningBlock,
    PackedForward,
    PassResult,
    no_learning_block,
)
from adora_vl.packing.pass_differences import evaluation_mode
from adora_vl.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# takes the detached log-probabilities (B, C) and the entropies of a pass
PassObserver = Callable[[Tensor, Tensor | None], None]
# TRL's `_get_per_token_logps_and_entropies`, bound to a model
ModelPass = Callable[..., PassResult]
# The columns that TRL's `_compute_loss` hands to a pass besides the tokens. `tool_mask` is not one
# of the model's inputs: it tells which tokens the policy has sampled.
_INPUT_COLUMNS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
    "tool_mask",
)


def separate_size(input_ids: Tensor, completion_width: int, pixels: Tensor | None) -> PassSize:
    """Return the size of a pass over padded rows.

    Args:
        input_ids: (B, P + C).
        completion_width: C, the width of the completions.
        pixels: of the rows' images, or references to them; those of an image may be there twice.
    """
    rows, length = input_ids.shape
    return PassSize(
        rows=rows,
        row_length=length,
        scored_tokens=rows * completion_width,
        patches=0 if pixels is None else len(pixels),
        has_padding_mask=True,
    )


def generation_logps(
    batch: Batch, policy: ModelPass, rows: int, pixels: Tensor | None = None
) -> Tensor:
    """Return log-probabilities of a generation's completions, (B, C), without gradients.

    Args:
        batch: the generation, or some rows of it.
        policy: the pass of the model that scores them.
        rows: rows of one forward pass.
        pixels: used in place of the batch's pixels.
    """
    inputs = {name: batch[name] for name in _INPUT_COLUMNS if name in batch}  # type: ignore[literal-required]
    if pixels is not None:
        inputs["pixel_values"] = pixels
    with torch.no_grad():
        logps_BC, _, _ = policy(
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=rows,
            **inputs,
        )
    return logps_BC


class PolicyPass:
    """TRL's `_get_per_token_logps_and_entropies`, with shared prompts where they save work.

    It serves the policy, the old policy and the reference model.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: AdoraKeys,
        *,
        may_have_images: bool = False,
        learning_block: LearningBlock = no_learning_block,
    ) -> None:
        """Create the pass.

        Args:
            accelerator: the one that has prepared the models.
            config: says whether prompts are shared (`share_prompt`).
            may_have_images: whether any pass may have images; rows without any then get empty
                columns.
            learning_block: the block in which a model computes a pass that learns.
        """
        self._config = config
        self._may_have_images = may_have_images
        self._learning_block = learning_block
        self.packed_forward = PackedForward(accelerator, learning_block)
        self._observer: PassObserver | None = None
        self._micro_batch = Batch()
        self._only_checks = False

    @property
    def shares_prompts(self) -> bool:
        """Whether passes share prompts where that is less work, which is known after `check`."""
        is_confirmed = self.packed_forward.is_checked and not self.packed_forward.refusal
        return self._config.uses("share_prompt") and is_confirmed

    @property
    def check_is_due(self) -> bool:
        """Whether packed rows are still to be compared with separate ones."""
        is_known = self.packed_forward.is_checked or bool(self.packed_forward.refusal)
        return self._config.uses("share_prompt") and not is_known

    def check(self, batch: Batch, policy: ModelPass) -> None:
        """Compare packed rows of a batch with separate ones. Collective.

        If they disagree on any rank, every rank goes on with separate rows. `policy`: the pass of
        the model that learns, which comes back to `__call__`.
        """
        self._only_checks = True
        try:
            generation_logps(batch, policy, len(batch["completion_ids"]))
        finally:
            self._only_checks = False

    @contextmanager
    def watch(self, observer: PassObserver | None, micro_batch: Batch) -> Iterator[None]:
        """Call `observer` once inside the block, with the results of the first pass.

        Args:
            observer: takes the results; None where nobody does.
            micro_batch: the micro-batch whose rows all passes inside the block read.
        """
        self._observer = observer
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._observer = None
            self._micro_batch = Batch()

    def __call__(
        self,
        separate_rows: Callable[..., PassResult],
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> PassResult:
        """Compute log-probabilities (B, C), entropies or None, and the auxiliary loss or None.

        The arguments are those of TRL's method, which is `separate_rows`. Tokens that the policy
        has not sampled (`tool_mask`) get a log-probability of 0, so that no two passes differ where
        the loss does not look.

        A pass without gradients scores tokens for a comparison, with an engine, an older policy or
        a reference. None of these has dropout, so the pass has none either; TRL's pass has.
        """
        learns = torch.is_grad_enabled()
        with nullcontext() if learns else evaluation_mode(model):
            result = self._compute(
                separate_rows,
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                inputs,
            )
        if self._observer is not None:
            logps_BC, entropies_BC, _ = result
            observer = self._observer
            self._observer = None  # it sees the first pass alone
            observer(logps_BC.detach(), entropies_BC)
        return result

    def _compute(
        self,
        separate_rows: Callable[..., PassResult],
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        compute_aux_loss: bool,
        inputs: dict[str, Any],
    ) -> PassResult:
        """Compute a pass, packed where that is less work; the arguments are those of `__call__`."""
        # 0 at tokens that tools wrote, which the policy did not choose.
        policy_mask_BC = inputs.get("tool_mask", self._micro_batch.get("tool_mask"))
        if policy_mask_BC is not None:
            inputs = {**inputs, "tool_mask": policy_mask_BC}
        if self._may_have_images:
            inputs = with_image_columns(inputs, input_ids)

        def separate(rows: int | None = None, inputs: dict[str, Any] = inputs) -> PassResult:
            """Compute the first `rows` rows, by default all, as TRL does."""
            model_inputs = {name: value for name, value in inputs.items() if name != "tool_mask"}
            return separate_rows(
                model,
                input_ids[:rows],
                attention_mask[:rows],
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **model_inputs,
            )

        result: PassResult | None = None
        packs = self._config.uses("share_prompt") and not self.packed_forward.refusal
        if packs and not compute_aux_loss:  # a packed pass computes no auxiliary loss
            result = self.packed_forward(
                model=model,
                input_ids=input_ids,
                attention_mask=attention_mask,
                completion_width=logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                inputs=inputs,
                separate=separate,
                host=self._micro_batch.get("host"),
                only_checks=self._only_checks,
            )
        if self._only_checks:  # nobody reads the result
            no_logps_BC = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return no_logps_BC, None, None
        if result is None:  # packing is off, refused, or would not save work here
            block: AbstractContextManager[None] = nullcontext()
            if torch.is_grad_enabled():
                pixels = inputs.get("pixel_values")
                size = separate_size(input_ids, logits_to_keep, pixels)
                block = self._learning_block(size)
            with block:
                result = separate()
        if policy_mask_BC is not None:
            logps_BC, entropies_BC, auxiliary_loss = result
            sampled_logps_BC = torch.where(policy_mask_BC.bool(), logps_BC, 0.0)
            return sampled_logps_BC, entropies_BC, auxiliary_loss
        return result
