"""The attention windows of Qwen2.5-VL's vision tower: those of equal size in one call."""

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from adora_vl.utils import compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Transformers passes the bounds of all windows to an implementation with "flash" in its name, and
# calls every other implementation once per window.
BATCHED_ATTENTION = "sdpa_windows_flash_bounds"
STOCK_ATTENTION = "sdpa"  # Transformers' implementation, which batched windows replace


def is_qwen2_5_vl_tower(tower: nn.Module) -> bool:
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
    # Of the known towers only Qwen2.5-VL's has windows. `attend_windows` computes SDPA's attention.
    if tower.config._attn_implementation != STOCK_ATTENTION or not is_qwen2_5_vl_tower(tower):
        return False
    attention_config = tower.config
    if on:
        AttentionInterface.register(BATCHED_ATTENTION, attend_windows)
        # A copy for the attention modules alone: if the tower's own configuration named this
        # implementation, no other model could be built from it.
        attention_config = copy.copy(tower.config)
        # `VISION_ATTENTION` is the attribute of a config that names the implementation.
        compat.VISION_ATTENTION.install(BATCHED_ATTENTION, on=attention_config)
    for block in tower.blocks:
        block.attn.config = attention_config
    return on


class SortedWindows(NamedTuple):
    """Attention windows sorted by their size, which is their number of patches.

    For example, windows of 2, 1 and 2 patches have the patches 0 1, 2, 3 4. Sorted by size they are
    0 1, 3 4, 2. `count_by_size` is {2: 2, 1: 1}, `order` is 0 1 3 4 2, `inverse_order` is 0 1 4 2
    3.
    """

    count_by_size: dict[int, int]  # number of windows of each size, in the sorted order
    order: Tensor | None  # the patches in the sorted order; None if they are sorted already
    inverse_order: Tensor | None  # takes the sorted patches back; None likewise


# The cache holds the windows of the last passes: every block of a tower asks for the same ones.
@lru_cache(maxsize=16)
def sort_windows(lengths: tuple[int, ...], device: torch.device) -> SortedWindows:
    """Return attention windows sorted by size, so that windows of one size are neighbours.

    Sizes keep the order in which they first occur: windows of 2, 1 and 2 patches become 2, 2, 1.

    Args:
        lengths: the number of patches of each window.
        device: where the permutations are put.
    """
    sizes = list(dict.fromkeys(lengths))
    windows = range(len(lengths))
    sorted_windows = sorted(windows, key=lambda window: sizes.index(lengths[window]))
    count_by_size = {size: lengths.count(size) for size in sizes}
    if sorted_windows == list(windows):  # sorted already, so no patch has to move
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


def attend_windows(  # noqa: PLR0913  # the interface of Transformers
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

    For example, windows of 2, 1 and 2 patches take two calls: a batch of two windows of 2 patches,
    and a batch of one window of 1 patch. The function has the signature of Transformers' attention
    for variable lengths.

    Args:
        module: the attention module of a block.
        query: (1, heads, S, head size), of S patches.
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
    attend = partial(sdpa_attention_forward, module, dropout=dropout, scaling=scaling)
    outputs = []
    first_patch = 0
    for size, window_count in windows.count_by_size.items():
        end_patch = first_patch + size * window_count
        patches_qkv = [tensor[:, first_patch:end_patch] for tensor in sorted_qkv]
        outputs.append(_attend_equal_windows(attend, patches_qkv, window_count))
        first_patch = end_patch
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if windows.inverse_order is not None:  # back to the order of the patches
        joined = joined.index_select(0, windows.inverse_order)
    return joined[None], None


def _attend_equal_windows(
    attend: Callable[..., tuple[Tensor, None]], patches_qkv: Sequence[Tensor], window_count: int
) -> Tensor:
    """Compute attention within neighbouring windows of one size, as a batch of windows.

    For example, 8 patches in 2 windows become a batch of 2 rows with 4 patches each.

    Args:
        attend: Transformers' attention for a batch, bound to its module.
        patches_qkv: queries, keys and values, each (heads, patches, head size).
        window_count: how many windows the patches are in.

    Returns:
        (patches, heads, head size).
    """
    batch_qkv = []
    for patches in patches_qkv:
        heads, patch_count, head_size = patches.shape
        window_size = patch_count // window_count
        windows = patches.reshape(heads, window_count, window_size, head_size)
        batch_qkv.append(windows.transpose(0, 1))  # (windows, heads, window size, head size)
    output, _ = attend(*batch_qkv, attention_mask=None, is_causal=False)
    return output.flatten(0, 1)


def window_arguments(
    tower: "PreTrainedModel", grids: Tensor, device: torch.device | str
) -> dict[str, Any]:
    """Return the arguments of the forward of Qwen2.5-VL's tower that describe its windows.

    Without them the tower computes the same from the grids. But with grids on a GPU, every block
    would wait for the GPU to read the bounds of its windows and the longest window.

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
