"""Attends to all windows of one size in the vision tower with one call, instead of one call per window.

Most blocks of Qwen2.5-VL's vision tower attend within windows of 8 x 8 patches, or fewer at the edges. Under `sdpa`,
Transformers splits the patches at the bounds of the windows and calls the attention once per window, in every block.
Here all windows of one size form the batch of one call. Each window is a row that attends only to itself, so the result
is that of the loop up to rounding. Blocks with full attention have one window per image and are treated the same way.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention

from adora_vl import compat

# Transformers passes the bounds of all windows to an implementation with "flash" in its name. It calls any other one
# window by window.
BATCHED = "sdpa_windows_flash_bounds"
STOCK = "sdpa"


def can_batch(tower: Any) -> bool:
    """Whether every attention module of the tower is of the kind that we know."""
    blocks = getattr(tower, "blocks", None) or []
    return len(blocks) > 0 and all(type(getattr(block, "attn", None)) is Qwen2_5_VLVisionAttention for block in blocks)


def batch_windows(tower: Any, on: bool) -> bool:
    """Switch a vision tower between the batched windows and Transformers' loop. Returns whether they are batched now.

    A tower of another kind, or with another attention than `sdpa`, is left unchanged. Only the attention modules get a
    configuration that names the implementation. With the tower's own no other model could be built from it.
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
    """Sort the windows by size.

    Returns the number of windows of each size as (size, number), the permutation of the patches into that order, and
    its inverse. Both permutations are None if the patches are in that order already.
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
    """Attention of packed patches within their windows, with the signature of a kernel for variable lengths.

    Args:
        query, key, value: (1, heads, S, head size).
        cu_seq_lens_q, cu_seq_lens_k: (windows + 1,), the bounds of the windows.

    Returns:
        (1, S, heads, head size), and None for the attention weights.
    """
    assert cu_seq_lens_q is cu_seq_lens_k and attention_mask is None and not is_causal and len(query) == 1
    sizes, order, back = by_size(tuple(cu_seq_lens_q.diff().tolist()), query.device)
    parts = [tensor[0] if order is None else tensor[0].index_select(1, order) for tensor in (query, key, value)]
    outputs, at = [], 0
    for size, windows in sizes:
        own = [part[:, at : at + size * windows] for part in parts]
        batch = [part.reshape(len(part), windows, size, -1).transpose(0, 1) for part in own]
        output, _ = sdpa_attention_forward(module, *batch, None, dropout=dropout, scaling=scaling, is_causal=False)
        outputs.append(output.flatten(0, 1))
        at += size * windows
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (joined if back is None else joined.index_select(0, back))[None], None
