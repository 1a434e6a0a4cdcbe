"""The log-probabilities of a batch: with shared prompts and no padding where that is less work, else as in TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from adora_vl.config.speed import SpeedOptions
from adora_vl.dedup.packed_forward import PackedForward, Result
from adora_vl.dedup.without_images import with_image_columns

Seen = Callable[[Tensor], None]


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
