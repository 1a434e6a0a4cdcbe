"""Attention over a packed sequence of groups (`adora_vl.packing.shared_prompt`).

Each prompt with its longest rollout is a span that attends to itself. Every other rollout is a span
that attends to the prompt and to itself. On a GPU one call computes all spans
(`adora_vl.packing.varlen_attention`). Elsewhere each span is a call
(`adora_vl.packing.span_attention`). No rollout attends to another one, so no tensor grows with the
square of a group's tokens. On a CPU, and in float32 on a GPU, the call for a rollout that is
shorter than its prompt needs a mask of (its tokens, tokens that they see).

This is an attention implementation of Transformers' `AttentionInterface`, on top of the model's own
implementation. It takes part only in a forward that gets the argument `packed_layout`. Every other
forward goes to the model's own implementation. The layout is passed as an argument and stored
nowhere, since gradient checkpointing passes the arguments again when it recomputes a layer.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.packing.shared_prompt import PackedLayout
from adora_vl.packing.span_attention import attend_by_sdpa, attend_each_span, lower_right_mask
from adora_vl.packing.varlen_attention import VarlenAttention, attend_spans, keys_of_spans
from adora_vl.utils import compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast

LAYOUT_ARGUMENT = "packed_layout"  # of the model's forward, a `PackedLayout`
_IMPLEMENTATION_PREFIX = "shared_prompt|"  # in the style of Transformers' own `paged|sdpa`
VARLEN_ATTENTION = VarlenAttention()  # of this process: whether torch's varlen kernel works


def disable_cudnn_attention() -> None:
    """Keep cuDNN out of `scaled_dot_product_attention`, in favour of flash attention.

    This holds for the whole process. On H100, H200 and B200 torch 2.13 prefers cuDNN, which builds
    a plan for every shape (23 ms and more, and once more for the backward pass) and keeps it
    without limit. Packed sequences have a new length in almost every micro-batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def configured_attention(config: PreTrainedConfig) -> str:
    """Return the attention implementation that the user chose, even if ours is on top."""
    name: str = config.get_text_config()._attn_implementation
    return name


def empty_mask(device: torch.device) -> Tensor:
    """Return an empty mask, which keeps Transformers from building one over the whole sequence.

    Transformers passes a mask of four dimensions on unchanged, and `_packed_or_stock_attention`
    ignores it.
    """
    return torch.empty(1, 1, 0, 0, device=device)


def install_packed_attention(model: "PreTrainedModel") -> None:
    """Make `model`, with or without a wrapper, accept the argument `packed_layout` from now on.

    A forward with it attends within groups, and its decoder returns the hidden states that predict
    a scored token alone. Every other forward is as before.

    The attention modules get a copy of the configuration that names our implementation. The model's
    configuration is unchanged, so masks, saved files and other models that are built from it are
    not affected. The implementation stays installed, because gradient checkpointing looks it up
    again in the backward pass. A second call changes nothing.
    """
    decoder = model.get_decoder()
    modules = [layer.self_attn for layer in decoder.layers]
    is_installed = modules[0].config._attn_implementation.startswith(_IMPLEMENTATION_PREFIX)
    if is_installed:
        return
    implementation = configured_attention(decoder.config)
    AttentionInterface.register(
        _IMPLEMENTATION_PREFIX + implementation, partial(_packed_or_stock_attention, implementation)
    )
    # A copy, so that the model's own configuration still names the user's implementation.
    attention_config = _config_with_attention(
        decoder.config, _IMPLEMENTATION_PREFIX + implementation
    )
    for module in modules:
        module.config = attention_config
    decoder.register_forward_hook(_select_predicting_states, with_kwargs=True)


def _config_with_attention(config: PreTrainedConfig, attention: str) -> Any:
    """Return a copy of `config` that names `attention` as its attention implementation."""
    config_copy = copy.copy(config)
    # `TEXT_ATTENTION` is the private attribute of Transformers with this name.
    compat.TEXT_ATTENTION.install(attention, on=config_copy)
    return config_copy


def _select_predicting_states(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: "BaseModelOutputWithPast",
) -> Any:
    """Keep only the hidden states that predict a scored token; a forward hook of the decoder.

    The LM head, which comes next, then computes nothing else. The hidden state of a prompt's last
    token is kept once for each rollout, since it predicts the first token of all of them. For
    example, the rollouts `a0 a1 a2` and `b0 b1` are packed as `p0 p1 a0 a1 b0`, without their last
    tokens. The hidden states 1 2 3 predict a's tokens, and 1 4 those of b, so 1 2 3 1 4 are kept.
    Passes that are not packed are left as they are.
    """
    layout: PackedLayout | None = kwargs.get(LAYOUT_ARGUMENT)
    if layout is not None:
        output.last_hidden_state = output.last_hidden_state[:, layout.predicting_positions]
    return output


def _packed_or_stock_attention(  # noqa: PLR0913  # the interface of Transformers
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention in Transformers' interface, on top of `implementation`.

    In a packed pass each rollout attends to its prompt and to itself. The cases, in order:

        no `packed_layout`        the implementation itself
        flash attention           its own call for variable lengths, for all spans together
        sdpa, on a GPU that can   torch's kernel for variable lengths, for all spans together
        sdpa, elsewhere           a call of SDPA for each span
        eager                     a call of the model file's function for each span

    Args:
        implementation: the name of the attention that the user chose, such as `sdpa`.
        module: the attention module of a layer.
        query: (N, H, S, D): N rows, H heads, S positions, D values per head.
        key: (N, Hk, S, D), with Hk heads.
        value: (N, Hk, S, D).
        attention_mask: the implementation's own; a packed pass has none.
        scaling: factor of the scores.
        dropout: share of the attention weights that are dropped.
        packed_layout: where prompts and rollouts are in the sequence.
        kwargs: further arguments of the implementation.

    Returns:
        (N, S, H, D), and the attention weights as far as the implementation returns them.
    """
    stock_attention = _implementation_function(implementation, module)
    is_flash = is_flash_attention_requested(requested_attention_implementation=implementation)
    if is_flash:
        # Flash attention finds its kernel by the name in the module's config, which is our name.
        module = _module_copy_with(module, implementation)
    options: dict[str, Any] = {"scaling": scaling, "dropout": dropout}
    if packed_layout is None:
        return stock_attention(module, query, key, value, attention_mask, **options, **kwargs)
    if is_flash:
        attend = partial(stock_attention, module, **options)
        return _flash_attention_of_spans(attend, query, key, value, packed_layout)
    # Under autocast the model applies rotary positions in float32, so queries and keys are float32
    # here while values are not. The choice below depends on the dtype, so they are cast before it.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if implementation == "sdpa" and VARLEN_ATTENTION.supports(query, key, dropout):
        return attend_spans(query, key, value, packed_layout, scaling), None
    if implementation == "sdpa":
        output = attend_by_sdpa(query, key, value, packed_layout, scaling, dropout)
        return output.contiguous(), None
    eager = partial(_eager_attention, partial(stock_attention, module), **options)
    output = attend_each_span(eager, query=query, key=key, value=value, layout=packed_layout)
    return output.transpose(1, 2).contiguous(), None


def _implementation_function(
    implementation: str, module: Any
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return Transformers' function of this name, for the model that `module` is a part of."""
    if implementation == "eager":  # not in the interface: each model's file has its own
        return (  # type: ignore[no-any-return]
            sys.modules[type(module).__module__].eager_attention_forward
        )
    return ALL_ATTENTION_FUNCTIONS[implementation]  # type: ignore[no-any-return]


def _flash_attention_of_spans(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over a packed sequence in one call of Transformers' flash attention.

    The kernel gets the queries of the sequence as they are. It gets the keys span by span, with the
    prompt's keys repeated before the keys of each later rollout. The bounds of the spans take the
    place of a mask. For example, `p0 p1 a0 a1 b0` is a prompt p with its rollouts a and b:

        queries   p0 p1 a0 a1 | b0
        keys      p0 p1 a0 a1 | p0 p1 b0

    Returns the output, (1, S, H, D), and None for the attention weights.

    Args:
        attend: the flash attention, bound to an attention module and its options.
        query: (1, H, S, D): H heads, S positions, D values per head.
        key: (1, Hk, S, D), with Hk heads.
        value: (1, Hk, S, D).
        layout: where prompts and rollouts are in the sequence.
    """
    spans = layout.span_bounds
    output: tuple[Tensor, Tensor | None] = attend(
        query,
        keys_of_spans(key, layout),
        keys_of_spans(value, layout),
        None,  # no mask
        cu_seq_lens_q=spans.query_bounds,
        cu_seq_lens_k=spans.key_bounds,
        max_length_q=spans.max_queries,
        max_length_k=spans.max_keys,
    )
    return output


def _module_copy_with(module: Any, implementation: str) -> Any:
    """Return a copy of the module that is configured with `implementation` instead of ours.

    Flash attention finds its kernel by the name in the configuration. The module itself keeps our
    name.
    """
    module_copy = copy.copy(module)
    module_copy.config = _config_with_attention(module.config, implementation)
    return module_copy


def _eager_attention(
    model_attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Compute causal attention by the model file's own `eager_attention_forward`.

    Args:
        model_attention: `eager_attention_forward`, bound to an attention module.
        query: (B, H, L, D): B rows, H heads, L queries, D values per head.
        key: (B, Hk, M, D): Hk heads, M >= L keys. The last query sees all keys.
        value: (B, Hk, M, D).
        scaling: factor of the scores.
        dropout: share of the attention weights that are dropped.

    Returns:
        (B, H, L, D).
    """
    allowed = lower_right_mask(query.size(2), key.size(2), query.device)
    # The mask is added to the scores: 0 where a query sees a key, the smallest number elsewhere.
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    mask = zero.masked_fill(~allowed, torch.finfo(query.dtype).min)
    output: Tensor
    output, _ = model_attention(
        query, key, value, mask[None, None], scaling=scaling, dropout=dropout
    )
    return output.transpose(1, 2)
