"""A replacement on the CPU for flash attention over rows of different lengths."""

from itertools import pairwise
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class VarlenOptions(TypedDict):
    """The keyword arguments of torch's function that are passed here."""

    scale: float
    window_size: tuple[int, int]
    enable_gqa: bool


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    **options: Unpack[VarlenOptions],
) -> Tensor:
    """Compute what `torch.nn.attention.varlen.varlen_attn` documents, row by row.

    Rows stand end to end, so tensors are (T, H, D): all tokens, heads, dimensions. In each row the
    last query attends to all keys, the one before it to all but the last, and so on.

    Args:
        query: the queries of all rows.
        key: the keys.
        value: the values.
        cu_seq_q: where the queries of each row begin, and the end of the last row.
        cu_seq_k: the same for keys.
        max_q: the most queries of a row.
        max_k: the most keys of a row.
        options: see `VarlenOptions`.
    """
    assert options["window_size"] == (-1, 0)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    ends_q = cu_seq_q.tolist()
    ends_k = cu_seq_k.tolist()
    assert max_q == max(end - start for start, end in pairwise(ends_q))
    assert max_k == max(end - start for start, end in pairwise(ends_k))
    assert ends_q[-1] == len(query)
    assert ends_k[-1] == len(key) == len(value)
    rows = []
    for bounds_q, bounds_k in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        queries = query[slice(*bounds_q)].transpose(0, 1)
        keys = key[slice(*bounds_k)].transpose(0, 1)
        values = value[slice(*bounds_k)].transpose(0, 1)
        query_count = queries.size(1)
        key_count = keys.size(1)
        allowed = torch.ones(query_count, key_count, dtype=torch.bool)
        allowed = allowed.tril(key_count - query_count)
        rows.append(
            F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                allowed,
                scale=options["scale"],
                enable_gqa=options["enable_gqa"],
            )
        )
    return torch.cat(rows, dim=1).transpose(0, 1)
