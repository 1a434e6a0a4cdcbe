"""The policy's forward pass over a micro-batch, with shared prompts where they save work."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.config.keys import AdoraKeys
from adora_vl.models.activations import PassSize
from adora_vl.packing.images import with_image_columns
from adora_vl.packing.packed_forward import (
    CheckpointingContext,
    PackedForward,
    PassInputs,
    PassResult,
)
from adora_vl.packing.pass_differences import evaluation_mode
from adora_vl.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# TRL's `_get_per_token_logps_and_entropies`; each use says whether it is bound to a model
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


def padded_size(input_ids: Tensor, completion_width: int, pixels: Tensor | None) -> PassSize:
    """Return the size of a pass over padded rows, from which its memory is computed.

    Args:
        input_ids: (B, P + C), B rows with prompts of P and completions of C tokens.
        completion_width: C.
        pixels: the patches of all images, or the numbers of patches: one entry for each patch. Rows
            of the same prompt each have their own copy of its patches.
    """
    rows, row_length = input_ids.shape
    return PassSize(
        rows=rows,
        row_length=row_length,
        scored_tokens=rows * completion_width,
        image_patches=0 if pixels is None else len(pixels),
        has_padding_mask=True,
    )


def generation_logps(
    batch: Batch, model_pass: ModelPass, rows_per_pass: int, pixels: Tensor | None = None
) -> Tensor:
    """Return a model's log-probabilities of a generation's completions, (B, C), without gradients.

    There are B rollouts, whose completions are padded to C tokens.

    Args:
        batch: the generation, or some rows of it.
        model_pass: TRL's `_get_per_token_logps_and_entropies`, bound to the model.
        rows_per_pass: rows of one forward pass.
        pixels: used in place of the batch's pixels; None for the batch's own.
    """
    columns = _input_columns(batch)
    if pixels is not None:
        columns["pixel_values"] = pixels
    with torch.no_grad():
        logps_BC, _, _ = model_pass(*_token_arguments(batch), batch_size=rows_per_pass, **columns)
    return logps_BC


def _token_arguments(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Return a pass's arguments for B rows: token ids (B, P + C), their mask, and C.

    P is the width of the prompts, C that of the completions.
    """
    return (
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        batch["completion_ids"].size(1),
    )


def _input_columns(batch: Batch) -> dict[str, Any]:
    """Return those columns of a batch that a pass gets besides the tokens."""
    return {name: batch[name] for name in _INPUT_COLUMNS if name in batch}  # type: ignore[literal-required]


@dataclass
class WatchedPass:
    """A micro-batch of B rollouts with C tokens, and what the first pass over it has computed."""

    micro_batch: Batch
    on_logps: Callable[[Tensor], None] | None = None
    """Called with the log-probabilities, before the caller of the pass gets them."""
    logps_BC: Tensor | None = None
    """The log-probabilities of the first pass, detached; None before it."""
    entropies_BC: Tensor | None = None
    """Its entropies, with gradients; None before it, and where it has not computed any."""

    def keep_first_result(self, logps_BC: Tensor, entropies_BC: Tensor | None) -> None:
        """Store the result of the first pass, and hand it to `on_logps`. Later calls do nothing.

        Args:
            logps_BC: the log-probabilities that the pass has computed.
            entropies_BC: its entropies; None where it has not computed any.
        """
        if self.logps_BC is not None:
            return
        self.logps_BC = logps_BC.detach()
        self.entropies_BC = entropies_BC
        if self.on_logps is not None:
            self.on_logps(self.logps_BC)


class PolicyPass:
    """TRL's `_get_per_token_logps_and_entropies`, with shared prompts where they save work.

    A shared prompt is computed once for all completions of its group, in packed rows without
    padding. The first pass of a run compares packed with padded rows, and prompts are not shared if
    these differ: `packed_forward` computes packed rows, and has the reason if they may not be used.
    All passes of the policy and of the reference model go through this object. A pass has B rows,
    whose completions are padded to C tokens.
    """

    def __init__(
        self,
        trl_pass: ModelPass,
        accelerator: Accelerator,
        config: AdoraKeys,
        *,
        may_have_images: bool,
        checkpointing_context: CheckpointingContext,
    ) -> None:
        """Create the pass.

        Args:
            trl_pass: TRL's `_get_per_token_logps_and_entropies`, whose first argument is the model.
            accelerator: the one that has prepared the models.
            config: says whether prompts are shared (`share_prompt`).
            may_have_images: whether any pass of the run may have images. Then a pass over rows
                without images gets image columns too, which are empty.
            checkpointing_context: returns the context in which a pass with gradients is run; it
                chooses the layers that gradient checkpointing recomputes.
        """
        self._trl_pass = trl_pass
        self._config = config
        self._may_have_images = may_have_images
        self._checkpointing_context = checkpointing_context
        self.packed_forward = PackedForward(accelerator, checkpointing_context)
        self._watched_pass: WatchedPass | None = None  # set inside of `watch`

    @property
    def shares_prompts(self) -> bool:
        """Whether passes share prompts where that is less work, which is known after `check`."""
        is_confirmed = self.packed_forward.is_checked and not self.packed_forward.disabled_reason
        return self._config.uses("share_prompt") and is_confirmed

    @property
    def needs_check(self) -> bool:
        """Whether packed rows are still to be compared with padded ones."""
        is_decided = self.packed_forward.is_checked or bool(self.packed_forward.disabled_reason)
        return self._config.uses("share_prompt") and not is_decided

    def check(self, model: "PreTrainedModel", batch: Batch) -> None:
        """Compare the log-probabilities of a batch from packed and from padded rows. Collective.

        If they disagree on any rank, every rank goes on with padded rows.
        """
        input_ids, attention_mask, completion_width = _token_arguments(batch)
        inputs = self._with_micro_batch(
            PassInputs(
                model=model,
                input_ids=input_ids,
                attention_mask=attention_mask,
                completion_width=completion_width,
                batch_size=None,
                compute_entropy=False,
                batch_columns=_input_columns(batch),
            )
        )
        self.packed_forward.compare(
            inputs, partial(self._compute_padded, inputs, compute_aux_loss=False)
        )

    @contextmanager
    def watch(
        self, micro_batch: Batch, on_logps: Callable[[Tensor], None] | None = None
    ) -> Iterator[WatchedPass]:
        """Let the passes inside the block read a micro-batch, and keep the result of the first one.

        The block calls TRL's loss, which calls this object for a pass. TRL's loss does not hand the
        micro-batch on to the pass, and does not return what the pass has computed. So the pass
        reads the micro-batch from here, and leaves its result in the object that is yielded.

        Args:
            micro_batch: the micro-batch whose rows all passes inside the block read.
            on_logps: called once, with the detached log-probabilities of the first pass, (B, C),
                before TRL's loss gets them.
        """
        self._watched_pass = WatchedPass(micro_batch, on_logps)
        try:
            yield self._watched_pass
        finally:
            self._watched_pass = None

    @property
    def _micro_batch(self) -> Batch:
        """The micro-batch of the present pass; empty where it is not known."""
        return Batch() if self._watched_pass is None else self._watched_pass.micro_batch

    def __call__(
        self,
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **batch_columns: Any,
    ) -> PassResult:
        """Compute log-probabilities (B, C), entropies or None, and the auxiliary loss or None.

        The arguments are those of TRL's method. `batch_columns` are the batch's columns of images
        and tools, by their names. Tokens that a tool wrote (0 in `tool_mask`) get a log-probability
        of 0: the loss does not read them, and comparisons of two passes see no difference there.

        A pass without gradients is compared with an engine, an older policy or a reference. None of
        these has dropout, so it is switched off here; TRL leaves it on.
        """
        inputs = self._with_micro_batch(
            PassInputs(
                model=model,
                input_ids=input_ids,
                attention_mask=attention_mask,
                completion_width=logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                batch_columns=batch_columns,
            )
        )
        has_gradients = torch.is_grad_enabled()
        with nullcontext() if has_gradients else evaluation_mode(model):
            result = self._compute(inputs, compute_aux_loss)
        logps_BC, entropies_BC, auxiliary_loss = result
        sampled_mask_BC = inputs.batch_columns.get("tool_mask")
        if sampled_mask_BC is not None:
            logps_BC = torch.where(sampled_mask_BC.bool(), logps_BC, 0.0)
        if self._watched_pass is not None:
            self._watched_pass.keep_first_result(logps_BC, entropies_BC)
        return logps_BC, entropies_BC, auxiliary_loss

    def _with_micro_batch(self, inputs: PassInputs) -> PassInputs:
        """Add to the arguments of a pass what TRL does not hand on to it.

        The mask of tool tokens comes from the micro-batch of `watch`, as do the copies of its
        tokens on the CPU, which save a wait for the GPU. Rows without images get empty image
        columns.
        """
        batch_columns = dict(inputs.batch_columns)
        if "tool_mask" in self._micro_batch:
            batch_columns.setdefault("tool_mask", self._micro_batch["tool_mask"])
        if self._may_have_images:
            batch_columns = with_image_columns(batch_columns, inputs.input_ids)
        return replace(
            inputs,
            batch_columns=batch_columns,
            known_rows_on_cpu=self._micro_batch.get("rows_on_cpu"),
        )

    def _compute_padded(
        self,
        inputs: PassInputs,
        row_count: int,
        columns: dict[str, Any],
        *,
        compute_aux_loss: bool,
    ) -> PassResult:
        """Compute the first `row_count` rows as TRL does, each with its own prompt and padding.

        `columns`: the columns of images and tools of these rows.
        """
        model_columns = {name: value for name, value in columns.items() if name != "tool_mask"}
        return self._trl_pass(
            inputs.model,
            inputs.input_ids[:row_count],
            inputs.attention_mask[:row_count],
            inputs.completion_width,
            inputs.batch_size,
            inputs.compute_entropy,
            compute_aux_loss,
            **model_columns,
        )

    def _compute(self, inputs: PassInputs, compute_aux_loss: bool) -> PassResult:
        """Compute a pass: packed where that is less work, else by TRL's method.

        `compute_aux_loss`: whether the auxiliary loss of a mixture of experts is needed too.
        """
        compute_padded = partial(self._compute_padded, inputs, compute_aux_loss=compute_aux_loss)
        may_pack = self._config.uses("share_prompt") and not self.packed_forward.disabled_reason
        if may_pack and not compute_aux_loss:  # a packed pass computes no auxiliary loss
            result = self.packed_forward(inputs, compute_padded)
            if result is not None:
                return result
        checkpointing: AbstractContextManager[None] = nullcontext()
        if torch.is_grad_enabled():
            size = padded_size(
                inputs.input_ids, inputs.completion_width, inputs.batch_columns.get("pixel_values")
            )
            checkpointing = self._checkpointing_context(size)
        with checkpointing:
            return compute_padded(len(inputs.input_ids), inputs.batch_columns)
