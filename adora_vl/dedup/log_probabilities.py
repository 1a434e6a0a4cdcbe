"""The log-probabilities of a batch: with shared prompts and no padding where that is less work, else as in TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.batch import Batch
from adora_vl.config.speed import SpeedOptions
from adora_vl.dedup.packed_forward import PackedForward, Result
from adora_vl.dedup.without_images import with_image_columns

Seen = Callable[[Tensor], None]
Pass = Callable[..., Result]  # TRL's `_get_per_token_logps_and_entropies`, of a model

# What TRL hands on to a pass besides tokens, as in its `_compute_loss`
_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Inside the block the model has no dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def of_generation(batch: Batch, policy: Pass, rows: int, pixels: Tensor | None = None) -> Tensor:
    """Log-probabilities of the completions of a whole generation, (B, C), without gradients, `rows` at a time. `pixels`
    take the place of the batch's.
    """
    inputs = {name: batch[name] for name in _INPUTS if name in batch}  # type: ignore[literal-required]
    if pixels is not None:
        inputs["pixel_values"] = pixels
    with torch.no_grad():
        return policy(
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=rows,
            **inputs,
        )[0]


class LogProbabilities:
    """What TRL's `_get_per_token_logps_and_entropies` computes, for the policy, the old policy and the reference."""

    def __init__(self, accelerator: Accelerator, switches: SpeedOptions, *, images: bool = False) -> None:
        """`images`: whether rows of other passes have images, so that rows without any get the same columns."""
        self._accelerator, self._switches, self._images = accelerator, switches, images
        self.packed = PackedForward()
        self._seen: Seen | None = None

    @contextmanager
    def watched(self, seen: Seen) -> Iterator[None]:
        """Inside the block, `seen` is called once, with the detached log-probabilities of the first pass."""
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None

    def __call__(
        self,
        separate_rows: Callable[..., Result],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> Result:
        """Same arguments and result as TRL's method, which is `separate_rows`.

        The result is log-probabilities (B, C), entropies or None, and the auxiliary loss or None.
        """
        inputs = with_image_columns(inputs, input_ids) if self._images else inputs
        tokens = (input_ids, attention_mask, logits_to_keep, batch_size)
        separate = partial(separate_rows, model, *tokens, compute_entropy, compute_aux_loss, **inputs)
        result: Result | None = None
        if self._switches.adora_share_prompt and not compute_aux_loss and not self.packed.refused:
            result = self.packed(self._accelerator, model, *tokens, compute_entropy, inputs, separate)
        result = result if result is not None else separate()
        if self._seen is not None:
            seen, self._seen = self._seen, None
            seen(result[0].detach())
        return result
