"""The kernels that a card would take, in place of those of a CPU.

They are attention as torch 2.13 chooses it on an H100, launches of Triton, and bitsandbytes'
kernels for layers in 4 bits.
"""

import sys
from collections.abc import Callable, Iterator
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
MAX_FLASH_HEAD_SIZE = 256  # numbers of a head that the flash kernel takes


class KernelLaunch:
    """Takes the place of a Triton kernel, which writes into its arguments."""

    def __init__(self, card: Card, name: str) -> None:
        """Take the card that counts the launches, and the name under which it does."""
        self.card = card
        self.name = name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        """Return what launches the kernel, as `kernel[grid](...)` does for Triton."""

        def launch(*tensors: object, **constants: object) -> None:
            """Count a launch, and forget the values of all tensors, of which any may be written.

            Raises `ValueError` for a tensor on the CPU, as Triton does.
            """
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
    card_attention = CardAttention(card, stock)

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        function = card_attention if query.device.type == "cuda" else stock
        result: Tensor = function(query, *args, **kwargs)
        return result

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, (list, tuple)):
            # C++ would look at the values below all modes.
            data = tree_map_only(FakeTensor, lambda element: element.item(), data)
        return stock_tensor(data, *args, **kwargs)

    modules = []
    for module in list(sys.modules.values()):
        has_stock = getattr(module, "scaled_dot_product_attention", None) is stock
        # Of torch's own modules only the public one is called by models.
        is_inside_torch = module.__name__.startswith("torch")
        if has_stock and (not is_inside_torch or module is torch.nn.functional):
            modules.append(module)
    torch.tensor = tensor
    for module in modules:
        module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.tensor = stock_tensor
        for module in modules:
            module.scaled_dot_product_attention = stock  # type: ignore[attr-defined]


class CardAttention:
    """Stands for `scaled_dot_product_attention` on a card, and counts which kernel it takes."""

    def __init__(self, card: Card, stock: Callable[..., Tensor]) -> None:
        """Take the card that counts the kernels, and torch's own function."""
        self.card = card
        self.stock = stock

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | CausalBias | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention by the kernel that a card takes; the arguments are torch's.

        Raises `RuntimeError` where a card would: for tensors of unlike dtypes or numbers of heads.
        """
        if torch.is_autocast_enabled("cuda"):  # which casts the arguments of this function
            dtype = torch.get_autocast_dtype("cuda")
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        _check_attention_inputs(query, key, value, enable_gqa=enable_gqa)
        bias = None
        is_lower_right = False
        if isinstance(attn_mask, CausalBias):
            bias = attn_mask
            attn_mask = None
            is_causal = True
            is_square_bias = bias.seq_len_q == bias.seq_len_kv
            is_lower_right = not is_square_bias and bias.variant != CausalVariant.UPPER_LEFT
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        is_square = query.size(-2) == key.size(-2)
        flash_knows_mask = attn_mask is None and (not is_causal or is_square or is_lower_right)
        if is_half and flash_knows_mask and query.size(-1) <= MAX_FLASH_HEAD_SIZE:
            return self._flash(
                query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
            )
        has_equal_heads = query.size(1) == key.size(1)
        if has_equal_heads and not is_lower_right:
            return self._efficient(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
            )
        self.card.kernels["attention: math"] += 1
        if is_lower_right:
            assert bias is not None
            attn_mask = bias._materialize(query.device)
            is_causal = False
        return self.stock(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Compute attention by the flash kernel, which takes heads of multiples of 8 numbers."""
        self.card.kernels["attention: flash"] += 1
        head_size = query.size(-1)
        # The scale of heads without padding.
        scale = scale if scale is not None else head_size**-0.5
        padding = -head_size % 8
        if padding:
            query = pad(query, (0, padding))
            key = pad(key, (0, padding))
            value = pad(value, (0, padding))
        result: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result[..., :head_size] if padding else result

    def _efficient(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Compute attention by the memory-efficient kernel, which takes any mask."""
        kernel = "attention: efficient"
        bias = None
        if attn_mask is not None:
            kernel += ", masked"
            bias = _add_bias(attn_mask, query, key)
        self.card.kernels[kernel] += 1
        parts_need_gradients = any(part.requires_grad for part in (query, key, value))
        needs_gradients = torch.is_grad_enabled() and parts_need_gradients
        result: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_gradients, dropout_p, is_causal, scale=scale
        )[0]
        return result


def _check_attention_inputs(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> None:
    """Raise `RuntimeError` where a card would refuse the dtypes or heads of attention's inputs."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"attention: query is {query.dtype}, key {key.dtype} and value {value.dtype}"
        )
    if query.size(1) != key.size(1) and not enable_gqa:
        raise RuntimeError(
            f"attention: {query.size(1)} heads of the query, {key.size(1)} of the key, no enable_gqa"
        )


def _add_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the efficient kernel adds it to scores, with rows padded to 16 numbers."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf")).to(query.dtype)
    padding = -mask.size(-1) % 16
    if padding:
        # The rows are padded in memory, and the mask shows them as long as they were.
        mask = pad(mask, (0, padding))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def quantise(model: nn.Module, config: BitsAndBytesConfig) -> None:
    """Put the linear layers of a model on the card into 4 bits, in place, as bitsandbytes does.

    Their weights are plain parameters with the attributes that bitsandbytes' layers look at, since
    a fake tensor cannot be of another class of tensors.
    """
    bitsandbytes.functional.name2qmap.clear()  # a table on the card of the run before
    replace_with_bnb_linear(model, config.llm_int8_skip_modules, config)
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            _quantise_layer(layer, config)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # as Transformers notes it


def _quantise_layer(layer: bitsandbytes.nn.Linear4bit, config: BitsAndBytesConfig) -> None:
    """Give a linear layer a weight in 4 bits, and its bias, on the card."""
    full_weight = torch.empty(layer.weight.shape, dtype=torch.bfloat16, device=CARD)
    packed, state = bitsandbytes.functional.quantize_4bit(
        full_weight,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
    )
    weight: Any = nn.Parameter(packed, requires_grad=False)
    weight.quant_state = state
    weight.compress_statistics = config.bnb_4bit_use_double_quant
    weight.quant_type = config.bnb_4bit_quant_type
    weight.quant_storage = packed.dtype
    layer.weight = weight
    layer.quant_state = state
    if layer.bias is not None:
        bias = torch.empty_like(layer.bias, dtype=full_weight.dtype, device=CARD)
        layer.bias = nn.Parameter(bias, requires_grad=False)


def gemm_4bit(  # noqa: PLR0913  # an operator of bitsandbytes
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
