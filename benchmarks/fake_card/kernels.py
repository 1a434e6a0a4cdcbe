"""The kernels that a card would take: attention as torch 2.13 chooses it on an H100, launches of
Triton, and bitsandbytes' for layers in 4 bits.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.fake_card.card import Card, aten
from benchmarks.fake_card.device import CARD

import torch  # isort: skip
import bitsandbytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import BitsAndBytesConfig
from transformers.integrations import replace_with_bnb_linear

bits: Any = torch.ops.bitsandbytes


class KernelLaunch:
    """Takes the place of a Triton kernel, which writes into its arguments."""

    def __init__(self, card: Card, name: str) -> None:
        self.card = card
        self.name = name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*tensors: Any, **constants: Any) -> None:
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.device.type != "cuda":
                    raise ValueError(
                        f"{self.name}: Pointer argument cannot be accessed from Triton (cpu "
                        "tensor?)"
                    )
                if isinstance(tensor, FakeTensor):
                    self.card.forget(tensor)
            self.card.kernels[self.name] += 1
            self.card.launches[self.card.phase] += 1

        return launch


@contextmanager
def use_card_attention(card: Card) -> Iterator[None]:
    """Compute attention inside the block by the kernel that a card takes with cuDNN's switched off.

    Every module's `scaled_dot_product_attention` is replaced, since a `TorchFunctionMode` is not
    active where a checkpoint computes a layer again.
    """
    stock = torch.nn.functional.scaled_dot_product_attention
    stock_tensor = torch.tensor

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (_attention_of_card(card, stock) if query.device.type == "cuda" else stock)(
            query, key, value, *args, **kwargs
        )

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, (list, tuple)):  # C++ would look at the values below all modes
            data = tree_map_only(FakeTensor, lambda element: element.item(), data)
        return stock_tensor(data, *args, **kwargs)

    # all modules that have it under its name, but of torch's own the public one alone
    modules = [
        module
        for module in list(sys.modules.values())
        if getattr(module, "scaled_dot_product_attention", None) is stock
        and (not module.__name__.startswith("torch") or module is torch.nn.functional)
    ]
    torch.tensor = tensor
    for module in modules:
        module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.tensor = stock_tensor
        for module in modules:
            module.scaled_dot_product_attention = stock  # type: ignore[attr-defined]


def _attention_of_card(card: Card, stock: Any) -> Any:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled("cuda"):  # which casts the arguments of this function
            query, key, value = (
                part.to(torch.get_autocast_dtype("cuda")) for part in (query, key, value)
            )
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(
                f"attention: query is {query.dtype}, key {key.dtype} and value {value.dtype}"
            )
        alike = query.size(1) == key.size(1)
        size = query.size(-1)
        if not alike and not enable_gqa:
            raise RuntimeError(
                f"attention: {query.size(1)} heads of the query, {key.size(1)} of the key, no "
                "enable_gqa"
            )
        bias = attn_mask
        lower_right = False
        if isinstance(bias, CausalBias):
            lower_right = (
                bias.seq_len_q != bias.seq_len_kv and bias.variant != CausalVariant.UPPER_LEFT
            )
            is_causal = True
            attn_mask = None
        half = query.dtype in (torch.float16, torch.bfloat16)
        square = query.size(-2) == key.size(-2)
        if half and attn_mask is None and size <= 256 and (not is_causal or square or lower_right):
            card.kernels["attention: flash"] += 1
            scale = scale if scale is not None else size**-0.5
            spare = -size % 8
            parts = (
                (pad(part, (0, spare)) for part in (query, key, value))
                if spare
                else (query, key, value)
            )
            out = aten._scaled_dot_product_flash_attention(
                *parts, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., :size] if spare else out
        if alike and not lower_right:
            card.kernels["attention: efficient" + ("" if attn_mask is None else ", masked")] += 1
            grad = torch.is_grad_enabled() and any(
                part.requires_grad for part in (query, key, value)
            )
            added = None if attn_mask is None else _add_bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, added, grad, dropout_p, is_causal, scale=scale
            )[0]
        card.kernels["attention: math"] += 1
        if lower_right:
            attn_mask = bias._materialize(query.device)
            is_causal = False
        return stock(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attend


def _add_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the efficient kernel adds it to the scores: rows padded to 16 places."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf")).to(query.dtype)
    if spare := -mask.size(-1) % 16:
        mask = pad(mask, (0, spare))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def quantise(model: Any, config: BitsAndBytesConfig) -> None:
    """Have layers of a model on the card in 4 bits, as bitsandbytes quantises them.

    Weights are plain parameters with what its layers ask theirs for: a fake tensor takes no class
    of another one.
    """
    bitsandbytes.functional.name2qmap.clear()  # a table on the card of the run before
    replace_with_bnb_linear(model, config.llm_int8_skip_modules, config)
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            nested = config.bnb_4bit_use_double_quant
            kind = config.bnb_4bit_quant_type
            full_weight = torch.empty(layer.weight.shape, dtype=torch.bfloat16, device=CARD)
            packed, state = bitsandbytes.functional.quantize_4bit(
                full_weight, compress_statistics=nested, quant_type=kind
            )
            weight: Any = nn.Parameter(packed, requires_grad=False)
            weight.quant_state = layer.quant_state = state
            weight.compress_statistics = nested
            weight.quant_type = kind
            weight.quant_storage = packed.dtype
            layer.weight = weight
            if layer.bias is not None:
                layer.bias = nn.Parameter(
                    torch.empty_like(layer.bias, dtype=full_weight.dtype, device=CARD), False
                )
    model.is_loaded_in_4bit = True


def gemm_4bit(
    rows: Tensor,
    packed: Tensor,
    shape: Any,
    absmax: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Compute a 4-bit layer as bitsandbytes 0.50 does on CUDA with more than 1,536 rows.

    That is the scales, the whole weight, then a product as of any layer (backends/cuda/ops.py).
    Fewer rows may take a kernel that holds no whole weight.
    """
    if absmax_8bit is not None:
        scales = bits.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = scales + absmax_offset
    weight = bits.dequantize_4bit(packed, absmax, block, kind, shape, rows.dtype)
    return nn.functional.linear(rows, weight, bias)
