"""Runs the vision tower once per distinct image and gives its features to every copy of the image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from adora_vl import compat
from adora_vl.dedup.batched_windows import batch_windows
from adora_vl.dedup.image_bank import ImageBank, ImageBanks
from adora_vl.dedup.split_attention import ARGUMENT
from adora_vl.families import DEEPSTACK, EMBEDDINGS, family_of

Features = dict[str, list[Tensor]]  # of one image: by field, a tensor (image tokens, width) for each layer it enters at


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

    def __init__(self, banks: ImageBanks) -> None:
        self.banks = banks
        self.share = True
        self.seen = 0
        self._towers: list[Any] = []

    def install(self, model: nn.Module) -> bool:
        """Make `model` accept references from now on. Returns False if it has no vision tower of a known kind.

        Pixels still go to the model's own method, so generation and everything else work as before.
        """
        inner = vision_model(model)
        if inner is None or family_of(inner.config) is None:
            return False
        original = inner.get_image_features

        def get_image_features(pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any) -> Any:
            if image_grid_thw is not None and not len(image_grid_thw):
                return self._nothing(inner, original, image_grid_thw.device, kwargs)
            if pixel_values.is_floating_point() or image_grid_thw is None:
                self.seen += 0 if image_grid_thw is None else len(image_grid_thw)
                return original(pixel_values, image_grid_thw, **kwargs)
            return self._features(inner, original, pixel_values, image_grid_thw, kwargs)

        compat.VISION_FEATURES.install(get_image_features, on=inner)
        self._towers.append(inner.visual)
        return True

    def batch_windows(self, on: bool) -> None:
        """Switch on or off that the towers attend to all windows of one size at once (see `batched_windows`)."""
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
        if _is_frozen(inner):
            return self._frozen(bank, starts, inner, original, references.device, kwargs)
        output = self._pass(bank, distinct, original, references.device, kwargs)
        own = _by_image(output, inner)
        place = {start: position for position, start in enumerate(distinct)}
        return _joined(output, [own[place[start]] for start in starts])

    def _pass(self, bank: ImageBank, starts: list[int], original: Any, device: Any, kwargs: dict[str, Any]) -> Any:
        pixels, grids = bank.pixels(starts)
        self.seen += len(starts)
        kwargs.pop(ARGUMENT, None)  # of the text's attention: Qwen3-VL hands its arguments on to the tower's
        return original(pixels, grids.to(device), **kwargs)

    def _frozen(
        self, bank: ImageBank, starts: list[int], inner: Any, original: Any, device: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Features of a frozen tower: computed for all images of the bank when first needed, then read from memory.

        A rank without new images computes one image again. All ranks must take part in the same passes, because these
        gather sharded weights.
        """
        if bank.features_due:
            new = [start for start in bank.starts if start not in bank.frozen_features] or bank.starts[:1]
            with torch.no_grad():
                output = self._pass(bank, new, original, device, kwargs)
            bank.frozen_features |= dict(zip(new, _by_image(output, inner), strict=True))
            bank.features_due = False
        return _joined(BaseModelOutputWithPooling(), [bank.frozen_features[start] for start in starts])

    def _nothing(self, inner: Any, original: Any, device: Any, kwargs: dict[str, Any]) -> Any:
        """The features of no image. With several processes the tower still runs whenever others run it, because it
        gathers weights and reduces gradients. The gradients are zero here.
        """
        config = inner.config
        width = config.get_text_config().hidden_size
        none = torch.zeros(0, width, dtype=inner.visual.dtype, device=device)
        layers = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        images: list[Features] = [{EMBEDDINGS: [none], **({DEEPSTACK: [none] * layers} if layers else {})}]
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return _joined(BaseModelOutputWithPooling(), images)
        bank = self.banks.of_training() if self.share and _is_frozen(inner) else None
        if bank is not None and not bank.features_due:
            return _joined(BaseModelOutputWithPooling(), images)
        if bank is not None and bank.starts:  # of other rows of this rank
            self._frozen(bank, bank.starts[:1], inner, original, device, kwargs)
            return _joined(BaseModelOutputWithPooling(), images)
        output = _empty_picture(inner, original, device, kwargs)
        if bank is not None:
            bank.features_due = False
        first = _by_image(output, inner)[0]
        return _joined(output, [{name: [part[:0] for part in parts] for name, parts in first.items()}])


def _is_frozen(inner: Any) -> bool:
    return not any(parameter.requires_grad for parameter in inner.visual.parameters())


def _empty_picture(inner: Any, original: Any, device: Any, kwargs: dict[str, Any]) -> Any:
    """The output of a vision pass over an empty picture of one image token."""
    vision = inner.config.vision_config
    side = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    values = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, values, dtype=inner.visual.dtype, device=device)
    kwargs.pop(ARGUMENT, None)
    return original(pixels, torch.tensor([[1, side, side]], device=device), **kwargs)


def _by_image(output: Any, inner: Any) -> list[Features]:
    """The features of a vision pass, image by image, in all fields that its family names."""
    family = family_of(inner.config)
    assert family is not None and family.vision is not None
    embeddings = output[EMBEDDINGS]  # a tensor per image
    found: list[Features] = [{EMBEDDINGS: [own]} for own in embeddings]
    if DEEPSTACK in family.vision.features:
        for layer in output[DEEPSTACK]:  # a tensor for all images
            for image, part in zip(found, torch.split(layer, [len(own) for own in embeddings]), strict=True):
                image.setdefault(DEEPSTACK, []).append(part)
    return found


def _joined(output: Any, images: list[Features]) -> Any:
    """`output` with the features of these images, in the form in which the model reads them."""
    output[EMBEDDINGS] = tuple(image[EMBEDDINGS][0] for image in images)
    if DEEPSTACK in images[0]:
        output[DEEPSTACK] = [torch.cat(layer) for layer in zip(*(i[DEEPSTACK] for i in images), strict=True)]
    return output
