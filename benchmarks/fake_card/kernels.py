"""The kernels that a card would take: attention as torch 2.13 chooses it on an H100, and launches of Triton."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.fake_card.card import Card, aten

import torch  # isort: skip
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only


class Launch:
    """Takes the place of a Triton kernel, which writes into its arguments."""

    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*tensors: Any, **constants: Any) -> None:
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.device.type != "cuda":
                    raise ValueError(f"{self.name}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
                if isinstance(tensor, FakeTensor):
                    self.card.forget(tensor)
            self.card.kernels[self.name] += 1
            self.card.launches[self.card.phase] += 1

        return launch


@contextmanager
def chosen(card: Card) -> Iterator[None]:
    """Inside, attention on the card takes a card's kernel, with cuDNN's switched off, as this project does.

    Functions are replaced, since a `TorchFunctionMode` is not active where a checkpoint computes a layer again.
    """
    stock, make = torch.nn.functional.scaled_dot_product_attention, torch.tensor

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (_attend(card, stock) if query.device.type == "cuda" else stock)(query, key, value, *args, **kwargs)

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, (list, tuple)):  # C++ would look at the values below all modes
            data = tree_map_only(FakeTensor, lambda one: one.item(), data)
        return make(data, *args, **kwargs)

    holders = [m for m in list(sys.modules.values()) if getattr(m, "scaled_dot_product_attention", None) is stock]
    holders = [m for m in holders if not m.__name__.startswith("torch") or m is torch.nn.functional]
    torch.tensor = tensor
    for module in holders:
        module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.tensor = make
        for module in holders:
            module.scaled_dot_product_attention = stock  # type: ignore[attr-defined]


def _attend(card: Card, stock: Any) -> Any:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if torch.is_autocast_enabled("cuda"):  # which casts the arguments of this function
            query, key, value = (part.to(torch.get_autocast_dtype("cuda")) for part in (query, key, value))
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(f"attention: query is {query.dtype}, key {key.dtype} and value {value.dtype}")
        alike, size = query.size(1) == key.size(1), query.size(-1)
        if not alike and not enable_gqa:
            raise RuntimeError(
                f"attention: {query.size(1)} heads of the query, {key.size(1)} of the key, no enable_gqa"
            )
        bias, lower_right = attn_mask, False
        if isinstance(bias, CausalBias):
            lower_right = bias.seq_len_q != bias.seq_len_kv and bias.variant != CausalVariant.UPPER_LEFT
            is_causal, attn_mask = True, None
        half = query.dtype in (torch.float16, torch.bfloat16)
        square = query.size(-2) == key.size(-2)
        if half and attn_mask is None and size <= 256 and (not is_causal or square or lower_right):
            card.kernels["attention: flash"] += 1
            scale, spare = scale if scale is not None else size**-0.5, -size % 8
            parts = (pad(part, (0, spare)) for part in (query, key, value)) if spare else (query, key, value)
            out = aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :size] if spare else out
        if alike and not lower_right:
            card.kernels["attention: efficient" + ("" if attn_mask is None else ", masked")] += 1
            grad = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
            added = None if attn_mask is None else _added(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, added, grad, dropout_p, is_causal, scale=scale
            )[0]
        card.kernels["attention: math"] += 1
        if lower_right:
            attn_mask, is_causal = bias._materialize(query.device), False
        return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend


def _added(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the efficient kernel takes it: added to the scores, its rows padded to 16 places."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf")).to(query.dtype)
    if spare := -mask.size(-1) % 16:
        mask = pad(mask, (0, spare))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
