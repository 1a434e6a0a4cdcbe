"""Attention over a packed sequence of groups (`adora_vl.packing.shared_prompt`).

Each prompt with its first rollout attends to itself. Every other rollout attends to the prompt and
to itself. On a GPU one call computes all of them (`adora_vl.packing.varlen_attention`). Elsewhere
they are computed in parts, where the other rollouts of a group are batches of similar lengths.
Nothing grows with the square of a group's tokens.

This is an attention implementation of Transformers' `AttentionInterface` on top of the model's own
implementation. It takes part only in a forward that gets the argument `shared_prompts`; every other
forward goes to the model's own. The layout comes as that argument alone, since gradient
checkpointing passes the arguments again when it recomputes a layer.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.packing.shared_prompt import SharedPrompts
from adora_vl.packing.varlen_attention import VarlenAttention, attend_spans, keys_of_spans
from adora_vl.utils import compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast

LAYOUT_ARGUMENT = "shared_prompts"  # name of the argument of the model's forward
_PREFIX = "shared_prompt|"  # in the style of Transformers' own `paged|sdpa`
# Without a kernel for a causal mask that is aligned to the lower right, queries are computed in
# blocks that share a mask. Half of each block's square is wasted, but each block is a call, which
# costs time too. So a block has at least this many queries, and for longer rollouts as many as
# waste a quarter of the work.
_MIN_BLOCK_QUERIES = 256
VARLEN_ATTENTION = VarlenAttention()  # what a process knows of the kernel for all spans at once


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
    """Return an empty mask that Transformers passes on unchanged and `_attention` ignores.

    Without it Transformers would build a mask over all groups of the sequence.
    """
    return torch.empty(1, 1, 0, 0, device=device)


def install_split_attention(model: "PreTrainedModel") -> None:
    """Make `model`, in whatever wrapper, accept the argument `shared_prompts` from now on.

    Its attention modules get a copy of the configuration that names our implementation. The model's
    configuration is unchanged, so masks, saved files and other models that are built from it are
    not affected. The implementation stays installed, because gradient checkpointing looks it up
    again in the backward pass.
    """
    decoder = model.get_decoder()
    modules = [layer.self_attn for layer in decoder.layers]
    is_installed = modules[0].config._attn_implementation.startswith(_PREFIX)
    if is_installed:
        return
    implementation = configured_attention(decoder.config)
    AttentionInterface.register(_PREFIX + implementation, partial(_attention, implementation))
    attention_config = _config_with(decoder.config, _PREFIX + implementation)
    for module in modules:
        module.config = attention_config
    decoder.register_forward_hook(_keep_scored_positions, with_kwargs=True)


def _config_with(config: PreTrainedConfig, attention: str) -> Any:
    """Return a copy of `config` that names `attention` as its implementation."""
    config_copy = copy.copy(config)
    compat.TEXT_ATTENTION.install(attention, on=config_copy)
    return config_copy


def _keep_scored_positions(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: "BaseModelOutputWithPast",
) -> Any:
    """Leave only the positions which predict a scored token; a forward hook of the decoder.

    The LM head then computes nothing else. A prompt's last position comes once per rollout.
    """
    shared: SharedPrompts | None = kwargs.get(LAYOUT_ARGUMENT)
    if shared is not None:
        output.last_hidden_state = output.last_hidden_state[:, shared.predicting_K]
    return output


def _attention(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    shared_prompts: SharedPrompts | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention in Transformers' interface, on top of `implementation`.

    `query` is (N, H, S, D), `key` and `value` are (N, Hk, S, D). The result is (N, S, H, D) and, as
    far as the implementation returns them, the attention weights.
    """
    own_attention = _implementation_function(implementation, module)
    is_flash = is_flash_attention_requested(requested_attention_implementation=implementation)
    if is_flash:
        module = _module_copy_with(module, implementation)
    options: dict[str, Any] = {"scaling": scaling, "dropout": dropout}
    if shared_prompts is None:
        return own_attention(module, query, key, value, attention_mask, **options, **kwargs)
    if is_flash:
        spans = shared_prompts.span_bounds
        key = keys_of_spans(key, shared_prompts)
        value = keys_of_spans(value, shared_prompts)
        bounds = {
            "cu_seq_lens_q": spans.query_bounds,
            "cu_seq_lens_k": spans.key_bounds,
            "max_length_q": spans.most_queries,
            "max_length_k": spans.most_keys,
        }
        return own_attention(module, query, key, value, None, **options, **bounds)
    # Under autocast float32 weights give float32 queries and keys, since rotary positions are added
    # in float32. The kernel would cast them, but the kernel is chosen here, by their dtype.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if implementation == "sdpa" and VARLEN_ATTENTION.supports(query, key, dropout):
        return attend_spans(query, key, value, shared_prompts, scaling), None
    if implementation == "sdpa":
        output = attend_in_parts(query, key, value, shared_prompts, scaling, dropout)
        return output.contiguous(), None
    attend = partial(_eager_attention, partial(own_attention, module), **options)
    output = _attend_groups(attend, query=query, key=key, value=value, shared=shared_prompts)
    return output.transpose(1, 2).contiguous(), None


def attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedPrompts,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute by PyTorch's kernels what `attend_spans` computes, with several calls for each group.

    The arguments are those of `attend_spans`, and the share of weights that are dropped.
    """
    attend = partial(_sdpa_attention, scaling=scaling, dropout=dropout)
    output = _attend_groups(attend, query=query, key=key, value=value, shared=shared)
    return output.transpose(1, 2)


def _implementation_function(
    implementation: str, module: Any
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return Transformers' function of this name, for the model that `module` is a part of."""
    if implementation == "eager":  # not in the interface: each model's file has its own
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[implementation]  # type: ignore[no-any-return]


def _module_copy_with(module: Any, implementation: str) -> Any:
    """Return a copy of the module that is configured with `implementation` instead of ours.

    Flash attention finds its kernel by the name in the configuration.
    """
    module_copy = copy.copy(module)
    module_copy.config = _config_with(module.config, implementation)
    return module_copy


def _attend_groups(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedPrompts,
) -> Tensor:
    """Compute attention over the spans of a packed sequence: (1, H, S, D).

    A prompt with its longest rollout is one call. The other rollouts of a group are batches of
    similar lengths, in which each rollout sees the prompt and itself.

    Args:
        attend: causal attention that is aligned to the lower right, for queries (B, H, L, D) and
            keys and values (B, Hk, M, D), M >= L.
        query: (1, H, S, D), the queries of the sequence.
        key: (1, Hk, S, D).
        value: (1, Hk, S, D).
        shared: the layout of the sequence.
    """
    query_spans = iter(torch.split(query, shared.span_lengths, dim=2))
    key_spans = iter(torch.split(key, shared.span_lengths, dim=2))
    value_spans = iter(torch.split(value, shared.span_lengths, dim=2))
    outputs = []
    for group in shared.groups:
        first_query = next(query_spans)
        first_key = next(key_spans)
        first_value = next(value_spans)
        outputs.append(attend(first_query, first_key, first_value))
        prompt_query = first_query[:, :, : group.prompt_length]
        prompt_key = first_key[:, :, : group.prompt_length]
        prompt_value = first_value[:, :, : group.prompt_length]
        for batch_lengths in group.rollout_batches:
            batch_query = _stack_padded([next(query_spans) for _ in batch_lengths])
            batch_key = _stack_padded([next(key_spans) for _ in batch_lengths])
            batch_value = _stack_padded([next(value_spans) for _ in batch_lengths])
            unused_queries = 0
            if _prompt_queries_pay(group.prompt_length, batch_lengths[0], query):
                batch_query = _with_prompt_before(prompt_query, batch_query)
                unused_queries = group.prompt_length  # their outputs are thrown away
            batch_key = _with_prompt_before(prompt_key, batch_key)
            batch_value = _with_prompt_before(prompt_value, batch_value)
            output = attend(batch_query, batch_key, batch_value)[:, :, unused_queries:]
            for row, length in enumerate(batch_lengths):
                outputs.append(output[row : row + 1, :, :length])
    return torch.cat(outputs, dim=2)


def _stack_padded(spans: list[Tensor]) -> Tensor:
    """Stack R spans of (1, H, L, D) as (R, H, longest, D).

    The padding comes last, where causal masks hide it.
    """
    rows = [span[0].transpose(0, 1) for span in spans]
    return pad_sequence(rows, batch_first=True).transpose(1, 2)


def _with_prompt_before(prompt: Tensor, batch: Tensor) -> Tensor:
    """Put the prompt, (1, H, P, D), before each row of a batch, (R, H, L, D)."""
    return torch.cat([prompt.expand(len(batch), -1, -1, -1), batch], dim=2)


def _prompt_queries_pay(prompt_length: int, rollout_length: int, query: Tensor) -> bool:
    """Return whether attention is less work with the prompt's queries before a rollout's.

    Their outputs are thrown away, but the mask is then a plain causal one, and kernels compute only
    half of that. Lengths are in tokens; `query` tells what the kernel supports.
    """
    if _supports_lower_right_mask(query):
        return False
    keys = prompt_length + rollout_length
    plain_work = keys * keys / 2  # pairs of a query and a key
    block_work = 0
    for start, end in _query_blocks(rollout_length, keys):
        visible_keys = prompt_length + end
        block_work += (end - start) * visible_keys
    return plain_work < block_work


def _supports_lower_right_mask(query: Tensor) -> bool:
    """Return whether the kernel can align a causal mask to the lower right.

    Flash attention's can.
    """
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _query_blocks(queries: int, keys: int) -> list[tuple[int, int]]:
    """Return the bounds of the blocks of queries that share a mask (see `_MIN_BLOCK_QUERIES`)."""
    # Half of a block's square is wasted, of about block x (keys - queries / 2) pairs.
    block_size = max(_MIN_BLOCK_QUERIES, (keys - queries // 2) // 2)
    starts = range(0, queries, block_size)
    return [(start, min(start + block_size, queries)) for start in starts]


def _sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Compute causal attention, aligned to the lower right, by PyTorch's kernels.

    `query` is (B, H, L, D), `key` and `value` are (B, Hk, M, D), M >= L. Returns (B, H, L, D).
    """
    options: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": query.size(1) != key.size(1),
    }
    queries = query.size(2)
    keys = key.size(2)
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if _supports_lower_right_mask(query):
        mask = causal_lower_right(queries, keys)
        return scaled_dot_product_attention(query, key, value, mask, **options)
    if query.is_cuda:  # with a mask its kernels want as many heads of keys as of queries
        repeats = query.size(1) // key.size(1)
        key = repeat_kv(key, repeats)
        value = repeat_kv(value, repeats)
    outputs = []
    for start, end in _query_blocks(queries, keys):
        visible = keys - queries + end  # the block's last query sees this many keys
        output = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, :visible],
            value[:, :, :visible],
            _lower_right_mask(end - start, visible, query.device),
            **options,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _eager_attention(
    own_attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Compute causal attention by the model file's own `eager_attention_forward`.

    Its mask is added to the scores, so it is 0 or a very small number. Shapes are those of
    `_sdpa_attention`. `own_attention`: that function, for one attention module.
    """
    allowed = _lower_right_mask(query.size(2), key.size(2), query.device)
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    mask = zero.masked_fill(~allowed, torch.finfo(query.dtype).min)
    output: Tensor = own_attention(
        query, key, value, mask[None, None], scaling=scaling, dropout=dropout
    )[0]
    return output.transpose(1, 2)


def _lower_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask (queries, keys), True where a query may see a key.

    The last query sees all keys.
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
