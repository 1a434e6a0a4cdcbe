"""Runs the vision tower once per distinct image and gives its features to every copy of the image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adora_vl import compat
from adora_vl.dedup.image_bank import Banks, ImageBank
from adora_vl.dedup.windows import batch_windows


def vision_model(model: nn.Module) -> Any | None:
    """The submodule that holds the vision tower (`visual`), inside any wrappers. None if there is none."""
    for module in model.modules():
        if "visual" in module._modules and hasattr(module, "get_image_features") and hasattr(module, "get_rope_index"):
            return module
    return None


class SharedVision:
    """Makes a model accept references (`adora_vl.dedup.image_bank`) in place of pixels.

    `seen` counts the images that went through the vision tower.
    """

    def __init__(self, banks: Banks) -> None:
        self.banks = banks
        self.share = True
        self.seen = 0
        self._towers: list[Any] = []

    def install(self, model: nn.Module) -> bool:
        """Make `model` accept references from now on. Returns False if it has no vision tower of a known kind.

        Pixels still go to the model's own method, so generation and everything else work as before.
        """
        inner = vision_model(model)
        if inner is None:
            return False
        original = inner.get_image_features

        def get_image_features(pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any) -> Any:
            if pixel_values.is_floating_point() or image_grid_thw is None:
                self.seen += 0 if image_grid_thw is None else len(image_grid_thw)
                return original(pixel_values, image_grid_thw, **kwargs)
            return self._features(inner, original, pixel_values, image_grid_thw, kwargs)

        compat.VISION_FEATURES.install(get_image_features, on=inner)
        self._towers.append(inner.visual)
        return True

    def batch_windows(self, on: bool) -> None:
        """Switch on or off that the towers attend to all windows of one size at once (`adora_vl.dedup.windows`)."""
        for tower in self._towers:
            batch_windows(tower, on)

    def _features(self, inner: Any, original: Any, references: Tensor, grids: Tensor, kwargs: dict[str, Any]) -> Any:
        rows = grids.prod(dim=-1)
        first = torch.cat([rows.new_zeros(1), rows.cumsum(0)[:-1]])
        starts = references[first.to(references.device), 0].tolist()
        bank = self.banks.of(starts[0])
        if not self.share:
            return self._pass(bank, starts, original, references.device, kwargs)
        distinct = list(dict.fromkeys(starts))
        if not any(parameter.requires_grad for parameter in inner.visual.parameters()):
            return self._frozen(bank, starts, original, references.device, kwargs)
        output = self._pass(bank, distinct, original, references.device, kwargs)
        place = {start: position for position, start in enumerate(distinct)}
        output.pooler_output = tuple(output.pooler_output[place[start]] for start in starts)
        return output

    def _pass(self, bank: ImageBank, starts: list[int], original: Any, device: Any, kwargs: dict[str, Any]) -> Any:
        pixels, grids = bank.pixels(starts)
        self.seen += len(starts)
        return original(pixels, grids.to(device), **kwargs)

    def _frozen(self, bank: ImageBank, starts: list[int], original: Any, device: Any, kwargs: dict[str, Any]) -> Any:
        """Features of a frozen tower: computed for all images of the bank when first needed, then read from memory.

        A rank without new images computes one image again. All ranks must take part in the same passes, because these
        gather sharded weights.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        if bank.features_due:
            new = [start for start in bank.starts if start not in bank.frozen_features] or bank.starts[:1]
            with torch.no_grad():
                output = self._pass(bank, new, original, device, kwargs)
            bank.frozen_features |= dict(zip(new, output.pooler_output, strict=True))
            bank.features_due = False
        return BaseModelOutputWithPooling(pooler_output=tuple(bank.frozen_features[start] for start in starts))
