"""The vision tower: run once per distinct image, with windows of equal size in one call."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

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
from adora_vl.packing.split_attention import LAYOUT_ARGUMENT
from adora_vl.utils import compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Transformers passes the bounds of all windows to an implementation with "flash" in its name, and
# calls every other implementation once per window.
BATCHED_ATTENTION = "sdpa_windows_flash_bounds"
STOCK_ATTENTION = "sdpa"


def can_batch(tower: nn.Module) -> bool:
    """Return whether every attention module of the tower is Qwen2.5-VL's."""
    blocks = getattr(tower, "blocks", None) or []
    attention_types = {type(getattr(block, "attn", None)) for block in blocks}
    return attention_types == {Qwen2_5_VLVisionAttention}


def batch_windows(tower: "PreTrainedModel", on: bool) -> bool:
    """Switch a vision tower between batched windows and Transformers' loop over windows.

    Returns whether the windows are batched now. A tower of another kind, or with another attention
    than `sdpa`, is left unchanged. Only the attention modules get a configuration that names the
    implementation; if the tower's own did, no other model could be built from it.
    """
    if tower.config._attn_implementation != STOCK_ATTENTION or not can_batch(tower):
        return False
    attention_config = tower.config
    if on:
        AttentionInterface.register(BATCHED_ATTENTION, attend_windows)
        attention_config = copy.copy(tower.config)
        compat.VISION_ATTENTION.install(BATCHED_ATTENTION, on=attention_config)
    for block in tower.blocks:
        block.attn.config = attention_config
    return on


@lru_cache(maxsize=16)
def sort_windows(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
    """Sort windows by size, in the order in which the sizes first occur.

    `lengths`: the number of patches of each window. Returns (size, number of windows) for each
    size, the permutation of the patches into that order, and its inverse. Both permutations are
    None if the patches are in that order already.
    """
    sizes = list(dict.fromkeys(lengths))
    windows = range(len(lengths))
    sorted_windows = sorted(windows, key=lambda window: sizes.index(lengths[window]))
    counts = [(size, lengths.count(size)) for size in sizes]
    if sorted_windows == list(windows):
        return counts, None, None
    bounds = [0, *accumulate(lengths)]
    patches_by_window = [
        torch.arange(bounds[window], bounds[window + 1]) for window in sorted_windows
    ]
    with torch.inference_mode(False):  # later passes reuse these tensors, some with gradients
        order = torch.cat(patches_by_window)
        return counts, order.to(device), order.argsort().to(device)


def attend_windows(
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
    """Compute attention of packed patches within their windows, one kernel call per window size.

    It has the signature of a kernel for variable lengths. `query`, `key`, `value`: (1, heads, S,
    head size). `cu_seq_lens_q`, `cu_seq_lens_k`: (windows + 1,), the bounds of the windows. Returns
    (1, S, heads, head size), and None for the attention weights.
    """
    assert cu_seq_lens_q is cu_seq_lens_k
    assert attention_mask is None
    assert not is_causal
    assert len(query) == 1
    window_lengths = tuple(cu_seq_lens_q.diff().tolist())
    sizes, order, inverse = sort_windows(window_lengths, query.device)
    sorted_qkv = []  # queries, keys and values, each (heads, S, head size)
    for tensor in (query, key, value):
        sorted_qkv.append(tensor[0] if order is None else tensor[0].index_select(1, order))
    outputs = []
    start = 0
    for size, windows in sizes:
        end = start + size * windows
        batch = []
        for tensor in sorted_qkv:
            patches = tensor[:, start:end]
            # (heads, windows x size, head size) -> (windows, heads, size, head size)
            batch.append(patches.reshape(len(tensor), windows, size, -1).transpose(0, 1))
        output, _ = sdpa_attention_forward(
            module, *batch, None, dropout=dropout, scaling=scaling, is_causal=False
        )
        outputs.append(output.flatten(0, 1))
        start = end
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if inverse is not None:
        joined = joined.index_select(0, inverse)
    return joined[None], None


RunTower = Callable[[Tensor, Tensor], Any]  # a vision pass: pixels, grids -> features


def run_tower(
    tower: "PreTrainedModel",
    original: Callable[..., Any],
    kwargs: dict[str, Any],
    device: torch.device,
    pixels: Tensor,
    grids: Tensor,
) -> Any:
    """Compute the features of images on `device`.

    Args:
        tower: the vision tower.
        original: the model's own `get_image_features`.
        kwargs: further arguments of `original`.
        device: where the tower is.
        pixels: (R, D), the patches of all images.
        grids: (images, 3), on the host.
    """
    # This argument is for the text's attention, but Qwen3-VL passes it on to the tower.
    kwargs.pop(LAYOUT_ARGUMENT, None)
    if not can_batch(tower):
        return original(pixels, grids.to(device, non_blocking=True), **kwargs)
    return original(pixels, grids, **{**kwargs, **window_arguments(tower, grids, device)})


def window_arguments(
    tower: "PreTrainedModel", grids: Tensor, device: torch.device | str
) -> dict[str, Any]:
    """Return what Qwen2.5-VL's tower computes from the grids, as arguments of its forward.

    With grids on a device every block would wait for the bounds of its windows and for the longest
    window. Here they are computed on the host. A flash kernel reads the bounds on the device; every
    other kernel reads them on the host.
    """
    merge = tower.spatial_merge_size
    index, window_bounds = get_vision_window_index(
        grids, merge, tower.window_size, tower.patch_size
    )
    bounds = {"cu_seqlens": get_vision_cu_seqlens(grids), "cu_window_seqlens": window_bounds}
    longest = {
        "max_seqlen": int(bounds["cu_seqlens"].diff().max()),
        "max_window_seqlen": int(bounds["cu_window_seqlens"].diff().max()),
    }
    if is_flash_attention_requested(tower.config):
        bounds = {name: tensor.to(device, non_blocking=True) for name, tensor in bounds.items()}
    # The forward reads these on the device, whatever the kernel.
    indices = {"window_index": index, "position_ids": get_vision_position_ids(grids, merge)}
    indices = {name: tensor.to(device, non_blocking=True) for name, tensor in indices.items()}
    arguments = {**bounds, **longest, **indices}
    return {f"image_{name}": value for name, value in arguments.items()}


# One image's features: for each field a tensor (image tokens, width) per layer that it enters at.
Features = dict[str, list[Tensor]]


def vision_model(model: nn.Module) -> Any | None:
    """Return the submodule that has the vision tower (`visual`), inside any wrappers; else None."""
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
            """Return the features of images.

            References into a bank get those of their image, computed once; patches themselves go
            to the model's own method.
            """
            run_on_device = partial(run_tower, inner.visual, original, kwargs)
            if image_grid_thw is not None and not len(image_grid_thw):
                return self._features_of_no_image(inner, run_on_device, image_grid_thw.device)
            if pixel_values.is_floating_point() or image_grid_thw is None:
                if image_grid_thw is not None:
                    self.seen += len(image_grid_thw)
                    # a packed pass has it on the host
                    image_grid_thw = image_grid_thw.to(pixel_values.device)
                return original(pixel_values, image_grid_thw, **kwargs)
            starts = first_patches(pixel_values, image_grid_thw)  # references may be on the host
            run = partial(run_on_device, inner.visual.device)
            return self._features_of_images(inner, run, starts)

        compat.VISION_FEATURES.install(get_image_features, on=inner)
        self._towers.append(inner.visual)
        return True

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Let every pass inside the block compute the features of its own images.

        So the ranks make the same passes, also where one of them has no image.
        """
        share_before = self.share
        self.share = False
        try:
            yield
        finally:
            self.share = share_before

    def batch_windows(self, on: bool) -> None:
        """Switch batched windows on or off for all towers (see `attend_windows`)."""
        for tower in self._towers:
            batch_windows(tower, on)

    def _features_of_images(
        self, inner: "PreTrainedModel", run: RunTower, starts: list[int]
    ) -> Any:
        """Compute the features of images by the numbers of their first patches.

        Each distinct image goes through the tower once, unless sharing is switched off.
        """
        bank = self.banks.of(starts[0])
        if not self.share:
            return self._pass(bank, starts, run)
        if _is_frozen(inner):
            return self._frozen_features(bank, starts=starts, inner=inner, run=run)
        distinct = list(dict.fromkeys(starts))
        output = self._pass(bank, distinct, run)
        features_by_start = dict(zip(distinct, _split_by_image(output, inner), strict=True))
        return _fill_output(output, [features_by_start[start] for start in starts])

    def _pass(self, bank: ImageBank, starts: list[int], run: RunTower) -> Any:
        """Run the tower over the images whose first patches are `starts`."""
        self.seen += len(starts)
        pixels, grids = bank.pixels(starts)
        return run(pixels, grids)

    def _frozen_features(
        self, bank: ImageBank, starts: list[int], inner: "PreTrainedModel", run: RunTower
    ) -> Any:
        """Return features of a frozen tower, computed once for all images of the bank.

        Collective: all ranks take part in the same passes, because these gather sharded weights. A rank
        with fewer new images than another one computes its first image again.
        """
        if bank.features_due:
            new_starts = [start for start in bank.starts if start not in bank.frozen_features]
            patch_counts = [len(bank.image(start)[1]) for start in new_starts]
            passes = split_into_passes(new_starts, patch_counts, PATCHES_A_PASS)
            for number in range(_max_over_ranks(len(passes), inner.visual.device)):
                pass_starts = passes[number] if number < len(passes) else bank.starts[:1]
                with torch.no_grad():
                    output = self._pass(bank, pass_starts, run)
                for start, features in zip(
                    pass_starts, _split_by_image(output, inner), strict=True
                ):
                    bank.frozen_features.setdefault(start, features)
            bank.features_due = False
        images = [bank.frozen_features[start] for start in starts]
        return _fill_output(BaseModelOutputWithPooling(), images)

    def _features_of_no_image(
        self, inner: "PreTrainedModel", run_on_device: Callable[..., Any], device: torch.device
    ) -> Any:
        """Return empty features, for a batch without images.

        `run_on_device`: a vision pass, of a device, pixels and grids. `device`: of the batch.

        With several processes the tower still runs whenever it runs on other ranks, because it gathers
        weights and reduces gradients. Its gradients are zero here.
        """
        empty = _fill_output(BaseModelOutputWithPooling(), [_empty_features(inner, device)])
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return empty
        # Where features of a frozen tower are computed once for a bank, the ranks run the tower only
        # while the features of new images are due; otherwise they run it in every pass.
        bank = self.banks.of_training() if self.share and _is_frozen(inner) else None
        if bank is not None and not bank.features_due:
            return empty
        if bank is not None and bank.starts:  # other rows of this rank have images
            run = partial(run_on_device, device)
            self._frozen_features(bank, starts=bank.starts[:1], inner=inner, run=run)
            return empty
        passes = 1 if bank is None else _max_over_ranks(1, device)
        for _ in range(passes):
            output = _run_on_empty_picture(inner, partial(run_on_device, device), device)
        if bank is not None:
            bank.features_due = False
        # Slices of a real output are empty too, and connect the loss to the tower's weights.
        picture_features = _split_by_image(output, inner)[0]
        empty_slices = {}
        for name, layers in picture_features.items():
            empty_slices[name] = [layer[:0] for layer in layers]
        return _fill_output(output, [empty_slices])


def split_into_passes(
    starts: Sequence[int], patch_counts: Sequence[int], limit: int
) -> list[list[int]]:
    """Divide images, in their order, into passes of at most `limit` patches.

    A larger image has a pass of its own. `starts`: the number of each image's first patch.
    `patch_counts`: how many patches each image has.
    """
    passes: list[list[int]] = []
    remaining = 0
    for start, count in zip(starts, patch_counts, strict=True):
        if count > remaining:
            passes.append([])
            remaining = limit
        passes[-1].append(start)
        remaining -= count
    return passes


def _max_over_ranks(passes: int, device: torch.device) -> int:
    """Return the largest number of passes on any rank, at least 1. Collective."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return max(passes, 1)
    # Every rank has to make as many passes as the one with the most, or the others would wait.
    largest = torch.tensor([passes], device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return max(int(largest), 1)


def _is_frozen(inner: "PreTrainedModel") -> bool:
    """Return whether no parameter of the vision tower is trained."""
    return not any(parameter.requires_grad for parameter in inner.visual.parameters())


def _empty_features(inner: "PreTrainedModel", device: torch.device) -> Features:
    """Return the features of no image at all, for each layer that they enter at."""
    config = inner.config
    width = config.get_text_config().hidden_size
    empty = torch.zeros(0, width, dtype=inner.visual.dtype, device=device)
    layers = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    features: Features = {EMBEDDINGS: [empty]}
    if layers:
        features[DEEPSTACK] = [empty] * layers
    return features


def _run_on_empty_picture(inner: "PreTrainedModel", run: RunTower, device: torch.device) -> Any:
    """Return the output of a vision pass over an empty picture of one image token."""
    vision = inner.config.vision_config
    side = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    values = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, values, dtype=inner.visual.dtype, device=device)
    return run(pixels, torch.tensor([[1, side, side]]))


def _split_by_image(output: BaseModelOutputWithPooling, inner: "PreTrainedModel") -> list[Features]:
    """Split the output of a vision pass by image, in all fields that the model's family has."""
    family = family_of(inner.config)
    assert family is not None
    assert family.vision is not None
    embeddings = output[EMBEDDINGS]  # a tensor per image
    images: list[Features] = [{EMBEDDINGS: [embedding]} for embedding in embeddings]
    if DEEPSTACK not in family.vision.features:
        return images
    lengths = [len(embedding) for embedding in embeddings]
    for layer in output[DEEPSTACK]:  # a tensor for all images
        for image, features in zip(images, torch.split(layer, lengths), strict=True):
            image.setdefault(DEEPSTACK, []).append(features)
    return images


def _fill_output(output: BaseModelOutputWithPooling, images: list[Features]) -> Any:
    """Fill `output` with the features of these images, in the form that the model reads."""
    output[EMBEDDINGS] = tuple(image[EMBEDDINGS][0] for image in images)
    if DEEPSTACK in images[0]:
        layers_of_images = [image[DEEPSTACK] for image in images]
        output[DEEPSTACK] = [torch.cat(layer) for layer in zip(*layers_of_images, strict=True)]
    return output
