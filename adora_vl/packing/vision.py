"""The vision tower: run once per distinct image, with windows of equal size in one call."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from adora_vl.models.families import DEEPSTACK, EMBEDDINGS, family_of
from adora_vl.models.shape import PATCHES_A_PASS
from adora_vl.packing.image_store import ImageBank, ImageBanks, first_patches
from adora_vl.packing.split_attention import ARGUMENT
from adora_vl.utils import compat

# Transformers passes the bounds of all windows to an implementation with "flash" in its name, and
# calls every other implementation once per window.
BATCHED = "sdpa_windows_flash_bounds"
STOCK = "sdpa"


def can_batch(tower: nn.Module) -> bool:
    """Whether every attention module of the tower is Qwen2.5-VL's."""
    blocks = getattr(tower, "blocks", None) or []
    return len(blocks) > 0 and all(
        type(getattr(block, "attn", None)) is Qwen2_5_VLVisionAttention for block in blocks
    )


def batch_windows(tower: Any, on: bool) -> bool:
    """Switch a vision tower between batched windows and Transformers' loop over windows.

    Returns whether the windows are batched now. A tower of another kind, or with another attention
    than `sdpa`, is left unchanged. Only the attention modules get a configuration that names the
    implementation; if the tower's own did, no other model could be built from it.
    """
    if tower.config._attn_implementation != STOCK or not can_batch(tower):
        return False
    if on:
        AttentionInterface.register(BATCHED, attend)
        config = copy.copy(tower.config)
        compat.VISION_ATTENTION.install(BATCHED, on=config)
    for block in tower.blocks:
        block.attn.config = config if on else tower.config
    return on


@lru_cache(maxsize=16)
def by_size(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
    """Sort windows by size, in the order in which the sizes come first.

    `lengths`: the number of patches of each window. Returns (size, number of windows) for each
    size, the permutation of the patches into that order, and its inverse. Both permutations are
    None if the patches are in that order already.
    """
    sizes = list(dict.fromkeys(lengths))
    ordered = sorted(range(len(lengths)), key=lambda window: sizes.index(lengths[window]))
    counts = [(size, lengths.count(size)) for size in sizes]
    if ordered == list(range(len(lengths))):
        return counts, None, None
    bounds = [0, *accumulate(lengths)]
    with torch.inference_mode(False):  # later passes reuse these tensors, some with gradients
        order = torch.cat([torch.arange(bounds[window], bounds[window + 1]) for window in ordered])
        return counts, order.to(device), order.argsort().to(device)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed patches within their windows, one kernel call per window size.

    It has the signature of a kernel for variable lengths. `query`, `key`, `value`: (1, heads, S,
    head size). `cu_seq_lens_q`, `cu_seq_lens_k`: (windows + 1,), the bounds of the windows. Returns
    (1, S, heads, head size), and None for the attention weights.
    """
    assert (
        cu_seq_lens_q is cu_seq_lens_k
        and attention_mask is None
        and not is_causal
        and len(query) == 1
    )
    sizes, order, back = by_size(tuple(cu_seq_lens_q.diff().tolist()), query.device)
    parts = [
        tensor[0] if order is None else tensor[0].index_select(1, order)
        for tensor in (query, key, value)
    ]
    outputs = []
    at = 0
    for size, windows in sizes:
        slices = [part[:, at : at + size * windows] for part in parts]
        batch = [part.reshape(len(part), windows, size, -1).transpose(0, 1) for part in slices]
        output, _ = sdpa_attention_forward(
            module, *batch, None, dropout=dropout, scaling=scaling, is_causal=False
        )
        outputs.append(output.flatten(0, 1))
        at += size * windows
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (joined if back is None else joined.index_select(0, back))[None], None


See = Callable[[Tensor, Tensor], Any]  # a vision pass: pixels, grids -> features


def look(
    tower: Any, original: Any, kwargs: dict[str, Any], device: Any, pixels: Tensor, grids: Tensor
) -> Any:
    """Run `original` (`get_image_features`) over pixels on `device`.

    `grids`: (images, 3), on the host.
    """
    # This argument is for the text's attention, but Qwen3-VL passes it on to the tower.
    kwargs.pop(ARGUMENT, None)
    if not can_batch(tower):
        return original(pixels, grids.to(device, non_blocking=True), **kwargs)
    return original(pixels, grids, **{**kwargs, **host_bounds(tower, grids, device)})


def host_bounds(tower: Any, grids: Tensor, device: Any) -> dict[str, Any]:
    """The values that Qwen2.5-VL's tower computes from the grids, as arguments of its forward.

    With grids on a device every block would wait for the bounds of its windows and for the longest
    window. Here they are computed on the host. A flash kernel reads the bounds on the device; every
    other kernel reads them on the host.
    """
    merge = tower.spatial_merge_size
    index, windows = get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
    bounds = {"cu_seqlens": get_vision_cu_seqlens(grids), "cu_window_seqlens": windows}
    longest = {
        name.replace("cu_", "max_").rstrip("s"): int(ends.diff().max())
        for name, ends in bounds.items()
    }
    if is_flash_attention_requested(tower.config):
        bounds = {name: tensor.to(device, non_blocking=True) for name, tensor in bounds.items()}
    indices = {"window_index": index, "position_ids": get_vision_position_ids(grids, merge)}
    indices = {name: tensor.to(device, non_blocking=True) for name, tensor in indices.items()}
    return {f"image_{name}": value for name, value in {**bounds, **longest, **indices}.items()}


# One image's features: for each field a tensor (image tokens, width) per layer that it enters at.
Features = dict[str, list[Tensor]]


def vision_model(model: nn.Module) -> Any | None:
    """The submodule that has the vision tower (`visual`), inside any wrappers; else None."""
    for module in model.modules():
        if (
            "visual" in module._modules
            and hasattr(module, "get_image_features")
            and hasattr(module, "get_rope_index")
        ):
            return module
    return None


class SharedVision:
    """Makes models accept references (`adora_vl.packing.image_store`) in place of pixels.

    `share` tells whether a pass runs the tower once per distinct image. `seen` counts the images
    that went through the vision tower.
    """

    def __init__(self, banks: ImageBanks) -> None:
        self.banks = banks
        self.share = True
        self.seen = 0
        self._towers: list[Any] = []

    def install(self, model: nn.Module) -> bool:
        """Make `model` accept references from now on.

        Pixels still go to the model's own method, so generation and everything else work as before.
        Returns False if the model has no vision tower of a known kind.
        """
        inner = vision_model(model)
        if inner is None or family_of(inner.config) is None:
            return False
        original = inner.get_image_features

        def get_image_features(
            pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
        ) -> Any:
            see = partial(look, inner.visual, original, kwargs)
            if image_grid_thw is not None and not len(image_grid_thw):
                return self._nothing(inner, see, image_grid_thw.device)
            if pixel_values.is_floating_point() or image_grid_thw is None:
                if image_grid_thw is not None:
                    self.seen += len(image_grid_thw)
                    # a packed pass has it on the host
                    image_grid_thw = image_grid_thw.to(pixel_values.device)
                return original(pixel_values, image_grid_thw, **kwargs)
            starts = first_patches(pixel_values, image_grid_thw)  # references may be on the host
            return self._features(inner, partial(see, inner.visual.device), starts)

        compat.VISION_FEATURES.install(get_image_features, on=inner)
        self._towers.append(inner.visual)
        return True

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Inside the block every pass computes the features of its own images.

        So the ranks make the same passes, also where one of them has no image.
        """
        share = self.share
        self.share = False
        try:
            yield
        finally:
            self.share = share

    def batch_windows(self, on: bool) -> None:
        """Switch batched windows on or off for all towers (see `attend`)."""
        for tower in self._towers:
            batch_windows(tower, on)

    def _features(self, inner: Any, see: See, starts: list[int]) -> Any:
        """Features of the images whose first patches are `starts`, each distinct one seen once."""
        bank = self.banks.of(starts[0])
        if not self.share:
            return self._pass(bank, starts, see)
        distinct = list(dict.fromkeys(starts))
        if _is_frozen(inner):
            return self._frozen(bank, starts=starts, inner=inner, see=see)
        output = self._pass(bank, distinct, see)
        features_of = dict(zip(distinct, _by_image(output, inner), strict=True))
        return _joined(output, [features_of[start] for start in starts])

    def _pass(self, bank: ImageBank, starts: list[int], see: See) -> Any:
        """Run the tower over these images."""
        self.seen += len(starts)
        return see(*bank.pixels(starts))

    def _frozen(self, bank: ImageBank, starts: list[int], inner: Any, see: See) -> Any:
        """Features of a frozen tower, computed once for all images of the bank and then reused.

        All ranks take part in the same passes, because these gather sharded weights. A rank with
        fewer new images than others computes one image again.
        """
        if bank.features_due:
            new = [start for start in bank.starts if start not in bank.frozen_features]
            parts = in_passes(new, [len(bank.image(start)[1]) for start in new], PATCHES_A_PASS)
            for number in range(_most_of_ranks(len(parts), inner.visual.device)):
                part = parts[number] if number < len(parts) else bank.starts[:1]
                with torch.no_grad():
                    output = self._pass(bank, part, see)
                for start, features in zip(part, _by_image(output, inner), strict=True):
                    bank.frozen_features.setdefault(start, features)
            bank.features_due = False
        images = [bank.frozen_features[start] for start in starts]
        return _joined(BaseModelOutputWithPooling(), images)

    def _nothing(self, inner: Any, see: Callable[..., Any], device: Any) -> Any:
        """Empty features, for a batch without images.

        With several processes the tower still runs whenever it runs on other ranks, because it
        gathers weights and reduces gradients. Its gradients are zero here.
        """
        config = inner.config
        width = config.get_text_config().hidden_size
        empty = torch.zeros(0, width, dtype=inner.visual.dtype, device=device)
        layers = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        features: Features = {EMBEDDINGS: [empty]}
        if layers:
            features[DEEPSTACK] = [empty] * layers
        images = [features]
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return _joined(BaseModelOutputWithPooling(), images)
        bank = self.banks.of_training() if self.share and _is_frozen(inner) else None
        if bank is not None and not bank.features_due:
            return _joined(BaseModelOutputWithPooling(), images)
        if bank is not None and bank.starts:  # other rows of this rank have images
            self._frozen(bank, starts=bank.starts[:1], inner=inner, see=partial(see, device))
            return _joined(BaseModelOutputWithPooling(), images)
        for _ in range(1 if bank is None else _most_of_ranks(1, device)):
            output = _empty_picture(inner, partial(see, device), device)
        if bank is not None:
            bank.features_due = False
        first = _by_image(output, inner)[0]
        return _joined(
            output, [{name: [part[:0] for part in parts] for name, parts in first.items()}]
        )


def in_passes(starts: Sequence[int], patches: Sequence[int], limit: int) -> list[list[int]]:
    """Divide images, in their order, into passes of at most `limit` patches.

    `patches`: the number of each image's patches. A larger image has a pass of its own.
    """
    parts: list[list[int]] = []
    remaining = 0
    for start, count in zip(starts, patches, strict=True):
        if count > remaining:
            parts.append([])
            remaining = limit
        parts[-1].append(start)
        remaining -= count
    return parts


def _most_of_ranks(passes: int, device: Any) -> int:
    """The largest number of passes on any rank, at least 1. All ranks call it together."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return max(passes, 1)
    largest = torch.tensor([passes], device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return max(int(largest), 1)


def _is_frozen(inner: Any) -> bool:
    """Whether no parameter of the vision tower is trained."""
    return not any(parameter.requires_grad for parameter in inner.visual.parameters())


def _empty_picture(inner: Any, see: See, device: Any) -> Any:
    """The output of a vision pass over an empty picture of one image token."""
    vision = inner.config.vision_config
    side = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    values = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, values, dtype=inner.visual.dtype, device=device)
    return see(pixels, torch.tensor([[1, side, side]]))


def _by_image(output: Any, inner: Any) -> list[Features]:
    """Split the output of a vision pass by image, in all fields that the model's family has."""
    family = family_of(inner.config)
    assert family is not None and family.vision is not None
    embeddings = output[EMBEDDINGS]  # a tensor per image
    images: list[Features] = [{EMBEDDINGS: [embedding]} for embedding in embeddings]
    if DEEPSTACK in family.vision.features:
        lengths = [len(embedding) for embedding in embeddings]
        for layer in output[DEEPSTACK]:  # a tensor for all images
            for image, part in zip(images, torch.split(layer, lengths), strict=True):
                image.setdefault(DEEPSTACK, []).append(part)
    return images


def _joined(output: Any, images: list[Features]) -> Any:
    """Fill `output` with the features of these images, in the form that the model reads."""
    output[EMBEDDINGS] = tuple(image[EMBEDDINGS][0] for image in images)
    if DEEPSTACK in images[0]:
        output[DEEPSTACK] = [
            torch.cat(layer) for layer in zip(*(i[DEEPSTACK] for i in images), strict=True)
        ]
    return output
