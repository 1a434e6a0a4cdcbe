"""The vision tower: run once per distinct image, with windows of equal size in one call."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

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

    Batched windows are `attend_windows`: windows of one size share a call of the attention kernel.
    A tower of another kind, or with another attention than `sdpa`, is left unchanged.

    Returns:
        whether the windows are batched now.
    """
    if tower.config._attn_implementation != STOCK_ATTENTION or not can_batch(tower):
        return False
    attention_config = tower.config
    if on:
        AttentionInterface.register(BATCHED_ATTENTION, attend_windows)
        # A copy for the attention modules alone: if the tower's own configuration named this
        # implementation, no other model could be built from it.
        attention_config = copy.copy(tower.config)
        compat.VISION_ATTENTION.install(BATCHED_ATTENTION, on=attention_config)
    for block in tower.blocks:
        block.attn.config = attention_config
    return on


class SortedWindows(NamedTuple):
    """Attention windows sorted by their number of patches."""

    count_by_size: dict[int, int]  # number of windows for each size, in the order of the patches
    # permutation of the patches into that order, and its inverse; None if they are in it already
    order: Tensor | None
    inverse_order: Tensor | None


# The cache holds the windows of the last passes: every block of a tower asks for the same ones.
@lru_cache(maxsize=16)
def sort_windows(lengths: tuple[int, ...], device: torch.device) -> SortedWindows:
    """Sort attention windows by size, so that windows of one size are neighbours.

    Args:
        lengths: the number of patches of each window. Sizes keep the order in which they first
            occur here.
        device: where the permutations are put.
    """
    sizes = list(dict.fromkeys(lengths))
    windows = range(len(lengths))
    sorted_windows = sorted(windows, key=lambda window: sizes.index(lengths[window]))
    count_by_size = {size: lengths.count(size) for size in sizes}
    if sorted_windows == list(windows):
        return SortedWindows(count_by_size, order=None, inverse_order=None)
    bounds = [0, *accumulate(lengths)]
    patches_by_window = [
        torch.arange(bounds[window], bounds[window + 1]) for window in sorted_windows
    ]
    # Later passes reuse these tensors, some with gradients, so they are no inference tensors.
    with torch.inference_mode(False):
        order = torch.cat(patches_by_window)
        return SortedWindows(
            count_by_size, order=order.to(device), inverse_order=order.argsort().to(device)
        )


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

    It has the signature of Transformers' attention for variable lengths.

    Args:
        module: the attention module of a block.
        query: (1, heads, S, head size).
        key: (1, heads, S, head size).
        value: (1, heads, S, head size).
        attention_mask: None.
        cu_seq_lens_q: (windows + 1,), the bounds of the windows.
        cu_seq_lens_k: the same tensor.
        dropout: share of the attention weights that are dropped.
        scaling: factor of the scores.
        is_causal: False.
        kwargs: further arguments of that signature, which are not needed here.

    Returns:
        (1, S, heads, head size), and None for the attention weights.
    """
    assert cu_seq_lens_q is cu_seq_lens_k
    assert attention_mask is None
    assert not is_causal
    assert len(query) == 1
    window_lengths = tuple(cu_seq_lens_q.diff().tolist())
    windows = sort_windows(window_lengths, query.device)
    sorted_qkv = []  # queries, keys and values, each (heads, S, head size)
    for tensor in (query, key, value):
        patches = tensor[0]  # the batch is a single row
        if windows.order is not None:
            patches = patches.index_select(1, windows.order)
        sorted_qkv.append(patches)
    outputs = []
    start = 0
    for size, window_count in windows.count_by_size.items():
        end = start + size * window_count
        batch_qkv = []
        for tensor in sorted_qkv:
            patches = tensor[:, start:end]
            # (heads, windows x size, head size) -> (windows, heads, size, head size)
            batch = patches.reshape(len(tensor), window_count, size, -1).transpose(0, 1)
            batch_qkv.append(batch)
        output, _ = sdpa_attention_forward(
            module,
            *batch_qkv,
            attention_mask=None,
            dropout=dropout,
            scaling=scaling,
            is_causal=False,
        )
        outputs.append(output.flatten(0, 1))
        start = end
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if windows.inverse_order is not None:  # back to the order of the patches
        joined = joined.index_select(0, windows.inverse_order)
    return joined[None], None


# A pass of the vision tower: takes pixels (R, D) and grids (images, 3), and returns its output.
RunTower = Callable[[Tensor, Tensor], Any]


def run_tower(
    tower: "PreTrainedModel",
    model_method: Callable[..., Any],
    kwargs: dict[str, Any],
    device: torch.device,
    pixels: Tensor,
    grids: Tensor,
) -> Any:
    """Compute the features of images by the model's own method, without waiting for the device.

    Args:
        tower: the vision tower.
        model_method: the model's own `get_image_features`.
        kwargs: further arguments of `model_method`.
        device: where the tower is.
        pixels: (R, D), the patches of all images.
        grids: (images, 3), on the CPU: each image's (temporal, height, width) in patches.
    """
    # This argument is for the text's attention, but Qwen3-VL passes it on to the tower.
    kwargs.pop(LAYOUT_ARGUMENT, None)
    if not can_batch(tower):
        return model_method(pixels, grids.to(device, non_blocking=True), **kwargs)
    # With these arguments Qwen2.5-VL's tower computes nothing from the grids any more.
    computed_arguments = window_arguments(tower, grids, device)
    return model_method(pixels, grids, **{**kwargs, **computed_arguments})


def window_arguments(
    tower: "PreTrainedModel", grids: Tensor, device: torch.device | str
) -> dict[str, Any]:
    """Return what Qwen2.5-VL's tower computes from the grids, as arguments of its forward.

    If the tower computed it from grids on a GPU, every block would wait for the bounds of its
    windows and for the longest window.

    Args:
        tower: the vision tower.
        grids: (images, 3), on the CPU.
        device: where the tower is.
    """
    merge_size = tower.spatial_merge_size
    window_index, window_bounds = get_vision_window_index(
        grids, merge_size, tower.window_size, tower.patch_size
    )
    image_bounds = get_vision_cu_seqlens(grids)
    position_ids = get_vision_position_ids(grids, merge_size)
    max_seqlen = int(image_bounds.diff().max())
    max_window_seqlen = int(window_bounds.diff().max())
    # A flash kernel reads the bounds on the device, every other kernel on the CPU.
    if is_flash_attention_requested(tower.config):
        image_bounds = image_bounds.to(device, non_blocking=True)
        window_bounds = window_bounds.to(device, non_blocking=True)
    return {
        "image_cu_seqlens": image_bounds,
        "image_cu_window_seqlens": window_bounds,
        "image_max_seqlen": max_seqlen,
        "image_max_window_seqlen": max_window_seqlen,
        # The forward reads these on the device, whatever the kernel.
        "image_window_index": window_index.to(device, non_blocking=True),
        "image_position_ids": position_ids.to(device, non_blocking=True),
    }


# One image's features: for each field of the tower's output (`pooler_output`, `deepstack_features`)
# a tensor (image tokens, width) for each layer of the language model that it enters at.
ImageFeatures = dict[str, list[Tensor]]


def vision_language_model(model: nn.Module) -> Any | None:
    """Return the submodule that has the vision tower as `visual`; None without a vision tower.

    It is searched inside of any wrappers.
    """
    for module in model.modules():
        # A wrapper may hand the attribute `visual` through, but it has no such submodule.
        has_tower = "visual" in module._modules
        has_methods = hasattr(module, "get_image_features") and hasattr(module, "get_rope_index")
        if has_tower and has_methods:
            return module
    return None


class SharedVision:
    """Makes models accept references into image banks in place of pixels.

    A reference is the number of a patch that an image bank stores (`adora_vl.packing.image_store`).
    """

    def __init__(self, banks: ImageBanks) -> None:
        self.banks = banks
        self.share = True  # whether a pass runs the tower once per distinct image
        self.image_passes = 0  # how often an image has gone through a tower
        self._towers: list[Any] = []

    def install(self, model: nn.Module) -> bool:
        """Make `model` accept references from now on, in place of pixels.

        Its `get_image_features` is replaced. Pixels still go to the model's own method, so
        generation and everything else work as before. Returns False if the model has no vision
        tower of a known kind.
        """
        vl_model = vision_language_model(model)
        if vl_model is None or family_of(vl_model.config) is None:
            return False
        model_method = vl_model.get_image_features

        def get_image_features(
            pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
        ) -> Any:
            """Return the features of images, which are given as references or as pixels.

            References are integers. Each gets the features of its image, which are computed once.
            """
            run_on_device = partial(run_tower, vl_model.visual, model_method, kwargs)
            if image_grid_thw is not None and not len(image_grid_thw):
                return self._features_of_no_image(vl_model, run_on_device, image_grid_thw.device)
            if image_grid_thw is None:
                return model_method(pixel_values, image_grid_thw, **kwargs)
            has_references = not pixel_values.is_floating_point()
            if has_references:
                starts = first_patches(pixel_values, image_grid_thw)
                run = partial(run_on_device, vl_model.visual.device)
                return self._features_of_images(vl_model, run, starts)
            self.image_passes += len(image_grid_thw)
            # A packed pass has the grids on the CPU.
            grids = image_grid_thw.to(pixel_values.device)
            return model_method(pixel_values, grids, **kwargs)

        compat.VISION_FEATURES.install(get_image_features, on=vl_model)
        self._towers.append(vl_model.visual)
        return True

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Run the tower in every pass inside the block, over the images of that pass alone.

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
        self, vl_model: "PreTrainedModel", run: RunTower, starts: list[int]
    ) -> Any:
        """Compute the features of images that an image bank stores.

        Each distinct image goes through the vision tower once, unless sharing is switched off. A
        frozen tower sees an image once for all passes over the bank.

        Args:
            vl_model: the model that has the vision tower.
            run: runs the tower on pixels and grids.
            starts: the number of each image's first patch, which identifies it.
        """
        bank = self.banks.of(starts[0])
        if not self.share:
            return self._run_on_images(bank, starts, run)
        if _is_frozen(vl_model):
            return self._frozen_features(bank, starts=starts, vl_model=vl_model, run=run)
        distinct_starts = list(dict.fromkeys(starts))
        output = self._run_on_images(bank, distinct_starts, run)
        distinct_features = _split_by_image(output, vl_model)
        features_by_start = dict(zip(distinct_starts, distinct_features, strict=True))
        return _fill_output(output, [features_by_start[start] for start in starts])

    def _run_on_images(self, bank: ImageBank, starts: list[int], run: RunTower) -> Any:
        """Run the vision tower over images of the bank, and return its output.

        `starts`: the number of each image's first patch. `run`: runs the tower.
        """
        self.image_passes += len(starts)
        pixels, grids = bank.pixels(starts)
        return run(pixels, grids)

    def _frozen_features(
        self, bank: ImageBank, starts: list[int], vl_model: "PreTrainedModel", run: RunTower
    ) -> Any:
        """Return features of a frozen tower, computed once for all images of the bank.

        Collective where images have been added to the bank since the last call (`features_due`).

        Args:
            bank: stores the images of this rank's batch.
            starts: the number of the first patch of each image whose features are wanted.
            vl_model: the model that has the vision tower.
            run: runs the tower on pixels and grids.
        """
        if bank.features_due:
            self._compute_due_features(bank, vl_model, run)
        features = [bank.frozen_features[start] for start in starts]
        return _fill_output(BaseModelOutputWithPooling(), features)

    def _compute_due_features(
        self, bank: ImageBank, vl_model: "PreTrainedModel", run: RunTower
    ) -> None:
        """Compute the features of the bank's new images, and store them in the bank. Collective.

        All ranks make equally many passes, because a pass gathers sharded weights. A rank with
        fewer new images than another one computes its first image again.
        """
        new_starts = [start for start in bank.starts if start not in bank.frozen_features]
        patch_counts = []
        for start in new_starts:
            _, patches, _ = bank.image(start)
            patch_counts.append(len(patches))
        passes = split_into_passes(new_starts, patch_counts, PATCHES_A_PASS)
        for number in range(_max_over_ranks(len(passes), vl_model.visual.device)):
            pass_starts = passes[number] if number < len(passes) else bank.starts[:1]
            with torch.no_grad():
                output = self._run_on_images(bank, pass_starts, run)
            pass_features = _split_by_image(output, vl_model)
            for start, image_features in zip(pass_starts, pass_features, strict=True):
                bank.frozen_features.setdefault(start, image_features)
        bank.features_due = False

    def _features_of_no_image(
        self, vl_model: "PreTrainedModel", run_on_device: Callable[..., Any], device: torch.device
    ) -> Any:
        """Return empty features for a batch without images, in step with the other ranks.

        A rank whose batch has no image still runs the vision tower whenever the other ranks do,
        because the tower gathers weights and reduces gradients. Its gradients are zero here.

        Args:
            vl_model: the model that has the vision tower.
            run_on_device: a pass of the tower; its arguments are a device, pixels and grids.
            device: that of the batch.
        """
        empty = _fill_output(BaseModelOutputWithPooling(), [_empty_features(vl_model, device)])
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return empty
        # A frozen tower runs only while features of new images are due, in which case a rank makes
        # as many passes as the one with the most. Any other tower runs once in every pass.
        bank = self.banks.of_training() if self.share and _is_frozen(vl_model) else None
        if bank is not None and not bank.features_due:
            return empty
        run = partial(run_on_device, device)
        if bank is not None and bank.starts:  # other rows of this rank have images
            self._compute_due_features(bank, vl_model, run)
            return empty
        passes = 1 if bank is None else _max_over_ranks(1, device)
        for _ in range(passes):
            output = _run_on_empty_picture(vl_model, run, device)
        if bank is not None:
            bank.features_due = False
        # Empty slices of a real output, unlike `empty`, connect the loss to the tower's weights.
        picture_features = _split_by_image(output, vl_model)[0]
        empty_slices = {}
        for name, layers in picture_features.items():
            empty_slices[name] = [layer[:0] for layer in layers]
        return _fill_output(output, [empty_slices])


def split_into_passes(
    starts: Sequence[int], patch_counts: Sequence[int], max_patches: int
) -> list[list[int]]:
    """Divide images, in their order, into passes of the vision tower of at most `max_patches`.

    An image with more patches has a pass of its own. Returns the `starts` of each pass.

    Args:
        starts: the number of each image's first patch, which identifies the image.
        patch_counts: how many patches each image has.
        max_patches: of one pass.
    """
    passes: list[list[int]] = []
    free_patches = 0  # of the last pass
    for start, count in zip(starts, patch_counts, strict=True):
        if count > free_patches:
            passes.append([])
            free_patches = max_patches
        passes[-1].append(start)
        free_patches -= count
    return passes


def _max_over_ranks(passes: int, device: torch.device) -> int:
    """Return the largest number of passes on any rank, at least 1. Collective.

    Every rank has to make so many passes of the vision tower, or the others would wait for it.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return max(passes, 1)
    largest = torch.tensor([passes], device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return max(int(largest), 1)


def _is_frozen(vl_model: "PreTrainedModel") -> bool:
    """Return whether no parameter of the vision tower is trained."""
    return not any(parameter.requires_grad for parameter in vl_model.visual.parameters())


def _empty_features(vl_model: "PreTrainedModel", device: torch.device) -> ImageFeatures:
    """Return features of no image token: empty tensors for each field of the tower's output.

    `DEEPSTACK` features, which some families have, enter the language model at several layers.
    """
    config = vl_model.config
    width = config.get_text_config().hidden_size
    empty = torch.zeros(0, width, dtype=vl_model.visual.dtype, device=device)
    deepstack_layers = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    features: ImageFeatures = {EMBEDDINGS: [empty]}
    if deepstack_layers:
        features[DEEPSTACK] = [empty] * len(deepstack_layers)
    return features


def _run_on_empty_picture(vl_model: "PreTrainedModel", run: RunTower, device: torch.device) -> Any:
    """Run the vision tower over a picture of zeros of one image token, and return its output.

    `run`: runs the tower on pixels and grids. `device`: where the pixels are put.
    """
    vision = vl_model.config.vision_config
    side = vision.spatial_merge_size  # patches of an image token's side
    channels = getattr(vision, "in_channels", 3)
    patch_values = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, patch_values, dtype=vl_model.visual.dtype, device=device)
    return run(pixels, torch.tensor([[1, side, side]]))


def _split_by_image(
    output: BaseModelOutputWithPooling, vl_model: "PreTrainedModel"
) -> list[ImageFeatures]:
    """Split the output of a vision pass by image.

    Returns for each image its features by the name of the output's field. A field has a tensor
    (image tokens, width) for each layer of the language model that it enters at.
    """
    family = family_of(vl_model.config)
    assert family is not None
    assert family.vision is not None
    embeddings = output[EMBEDDINGS]  # a tensor per image; they enter at the first layer alone
    images: list[ImageFeatures] = [{EMBEDDINGS: [embedding]} for embedding in embeddings]
    if DEEPSTACK not in family.vision.features:
        return images
    token_counts = [len(embedding) for embedding in embeddings]
    for layer in output[DEEPSTACK]:  # a tensor per layer, for all images together
        for image, layer_features in zip(images, torch.split(layer, token_counts), strict=True):
            image.setdefault(DEEPSTACK, []).append(layer_features)
    return images


def _fill_output(output: BaseModelOutputWithPooling, images: list[ImageFeatures]) -> Any:
    """Put the features of these images into `output`, in the form that the model reads.

    `images`: for each image its features by the name of the output's field, as `_split_by_image`
    returns them.
    """
    output[EMBEDDINGS] = tuple(image[EMBEDDINGS][0] for image in images)
    if DEEPSTACK in images[0]:
        # A tensor per layer, with the tokens of all images.
        layers_of_images = [image[DEEPSTACK] for image in images]
        output[DEEPSTACK] = [torch.cat(layer) for layer in zip(*layers_of_images, strict=True)]
    return output
