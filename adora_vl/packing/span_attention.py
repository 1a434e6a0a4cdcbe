"""Attention over a packed sequence, with a call for each span.

A span is a prompt with its longest rollout, or one other rollout
(`adora_vl.packing.shared_prompt`). A span sees itself, and the prompt of its group. Every device
can compute attention so. Where a kernel takes all spans in one call
(`adora_vl.packing.varlen_attention`), that is faster.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from adora_vl.packing.shared_prompt import PackedLayout


def attend_each_span(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
) -> Tensor:
    """Compute attention over a packed sequence span by span: (1, H, S, D).

    For example, `p0 p1 a0 a1 b0` is a prompt p with its rollouts a and b. `attend` is called twice:

        queries       keys and values
        p0 p1 a0 a1   p0 p1 a0 a1
        b0            p0 p1 b0

    Args:
        attend: computes causal attention of L queries (1, H, L, D) to M >= L keys and values
            (1, Hk, M, D). The last query sees all keys, the one before it one key less.
        query: (1, H, S, D): H heads, S positions, D values per head.
        key: (1, Hk, S, D), with Hk heads.
        value: (1, Hk, S, D).
        layout: where prompts and rollouts are in the sequence.
    """
    query_spans = torch.split(query, layout.span_lengths, dim=2)
    key_spans = torch.split(key, layout.span_lengths, dim=2)
    value_spans = torch.split(value, layout.span_lengths, dim=2)
    spans = zip(query_spans, key_spans, value_spans, strict=True)
    outputs = []
    for group in layout.groups:
        # The first span of a group is the prompt with the longest rollout.
        first_query, first_key, first_value = next(spans)
        outputs.append(attend(first_query, first_key, first_value))
        prompt_key = first_key[:, :, : group.prompt_length]
        prompt_value = first_value[:, :, : group.prompt_length]
        for _ in group.later_rollout_lengths:
            rollout_query, rollout_key, rollout_value = next(spans)
            visible_key = torch.cat([prompt_key, rollout_key], dim=2)
            visible_value = torch.cat([prompt_value, rollout_value], dim=2)
            outputs.append(attend(rollout_query, visible_key, visible_value))
    return torch.cat(outputs, dim=2)


def attend_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention over a packed sequence by PyTorch's SDPA, span by span: (1, S, H, D).

    Args:
        query: (1, H, S, D): H heads, S positions, D values per head.
        key: (1, Hk, S, D), with Hk heads.
        value: (1, Hk, S, D).
        layout: where prompts and rollouts are in the sequence.
        scaling: factor of the scores.
        dropout: share of the attention weights that are dropped.
    """
    attend = partial(_causal_sdpa, scaling=scaling, dropout=dropout)
    output = attend_each_span(attend, query=query, key=key, value=value, layout=layout)
    return output.transpose(1, 2)


def _causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Compute causal attention, (1, H, L, D), by PyTorch's SDPA.

    The last query sees all keys, and each query before it one key less (`lower_right_mask`). For
    that SDPA gets, in the order of the code:

        as many queries as keys             its option `is_causal`
        other numbers, flash attention      an alignment to the last key
        at least half as many queries       zero queries before the first one, and `is_causal`
        fewer queries                       a mask

    `query` is (1, H, L, D): H heads, L queries, D values per head. `key` and `value` are
    (1, Hk, M, D), with Hk heads and M >= L keys.
    """
    has_flash_attention = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and not has_flash_attention:
        # Without flash attention, only PyTorch's memory-efficient kernel does not store all scores.
        # It needs as many heads of keys as of queries.
        repeats = query.size(1) // key.size(1)
        key = repeat_kv(key, repeats)
        value = repeat_kv(value, repeats)
    options: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": query.size(1) != key.size(1),
    }
    queries = query.size(2)
    keys = key.size(2)
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if has_flash_attention:  # it needs no mask to align queries and keys
        alignment = causal_lower_right(queries, keys)
        return scaled_dot_product_attention(query, key, value, alignment, **options)
    if keys <= 2 * queries:
        # This rollout is at least as long as its prompt. A mask for it would be the largest tensor
        # of the layer, and would be kept in the dtype of the queries for the backward pass. With
        # zero queries put first there is a query for each key, and no mask is needed. That is no
        # slower, since a causal kernel skips half of the scores.
        missing_queries = keys - queries
        square_query = pad(query, (0, 0, missing_queries, 0))  # zeros before the first query
        output = scaled_dot_product_attention(square_query, key, value, is_causal=True, **options)
        return output[:, :, missing_queries:]
    mask = lower_right_mask(queries, keys, query.device)
    return scaled_dot_product_attention(query, key, value, mask, **options)


def lower_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a causal mask (queries, keys), True where a query may see a key.

    The last query sees all keys, and each query before it one key less. For 2 queries and 4 keys:

        1 1 1 0
        1 1 1 1
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
