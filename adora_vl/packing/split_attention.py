"""Attention over a packed sequence of groups (`adora_vl.packing.shared_prompt`), in parts.

Each prompt with its first rollout attends to itself. The other rollouts of a group are a batch, in
which each attends to the prompt and to itself. Nothing grows with the square of a group's tokens.

This is an attention implementation of Transformers' `AttentionInterface` on top of the model's own
implementation. It takes part only in a forward that gets the argument `shared_prompts`; every other
forward goes to the model's own. The layout comes as that argument alone, since gradient
checkpointing passes the arguments again when it recomputes a layer.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

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
from adora_vl.utils import compat

ARGUMENT = "shared_prompts"  # name of the argument of the model's forward
_PREFIX = "shared_prompt|"  # in the style of Transformers' own `paged|sdpa`
# Without a kernel for a causal mask that is aligned to the lower right, queries are computed in
# blocks that share a mask. Half of each block's square is wasted, but each block is a call, which
# costs time too. So a block has at least this many queries, and for longer rollouts as many as
# waste a quarter of the work.
_BLOCK = 256


def plan_no_shapes() -> None:
    """Keep cuDNN out of `scaled_dot_product_attention`, in favour of flash attention.

    This holds for the whole process. On H100, H200 and B200 torch 2.13 prefers cuDNN, which builds
    a plan for every shape (23 ms and more, and once more for the backward pass) and keeps it
    without limit. Packed sequences have a new length in almost every micro-batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def own_attention(config: PreTrainedConfig) -> str:
    """The attention implementation that the user chose, also where ours is installed on top."""
    name: str = config.get_text_config()._attn_implementation
    return name


def prepared_mask(device: torch.device) -> Tensor:
    """An empty mask that Transformers passes on unchanged and `_attention` ignores.

    Without it Transformers would build a mask over all groups of the sequence.
    """
    return torch.empty(1, 1, 0, 0, device=device)


def install(model: Any) -> None:
    """Make `model`, in whatever wrapper, accept the argument `shared_prompts` from now on.

    Its attention modules get a copy of the configuration that names our implementation. The model's
    configuration is unchanged, so masks, saved files and other models that are built from it are
    not affected. The implementation stays installed, because gradient checkpointing looks it up
    again in the backward pass.
    """
    decoder = model.get_decoder()
    modules = [layer.self_attn for layer in decoder.layers]
    if modules[0].config._attn_implementation.startswith(_PREFIX):
        return
    implementation = own_attention(decoder.config)
    AttentionInterface.register(_PREFIX + implementation, partial(_attention, implementation))
    config = _naming(decoder.config, _PREFIX + implementation)
    for module in modules:
        module.config = config
    decoder.register_forward_hook(_scored_positions, with_kwargs=True)


def _naming(config: Any, attention: str) -> Any:
    """A copy of `config` that names `attention` as its implementation."""
    view = copy.copy(config)
    compat.TEXT_ATTENTION.install(attention, on=view)
    return view


def _scored_positions(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook that leaves only the positions which predict a scored token.

    The LM head then computes nothing else. A prompt's last position comes once per rollout.
    """
    shared: SharedPrompts | None = kwargs.get(ARGUMENT)
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
    """An attention function of Transformers' interface, on top of `implementation`.

    `query` is (N, H, S, D), `key` and `value` are (N, Hk, S, D). The result is (N, S, H, D) and, as
    far as the implementation returns them, the attention weights.
    """
    function = _function(implementation, module)
    flash = is_flash_attention_requested(requested_attention_implementation=implementation)
    if flash:
        module = _as_configured(module, implementation)
    options: dict[str, Any] = {"scaling": scaling, "dropout": dropout}
    if shared_prompts is None:
        return function(module, query, key, value, attention_mask, **options, **kwargs)
    if flash:
        ends_Q, ends_K, max_length_Q, max_length_K = shared_prompts.bounds
        key = _keys_of_spans(key, shared_prompts)
        value = _keys_of_spans(value, shared_prompts)
        bounds = {
            "cu_seq_lens_q": ends_Q,
            "cu_seq_lens_k": ends_K,
            "max_length_q": max_length_Q,
            "max_length_k": max_length_K,
        }
        return function(module, query, key, value, None, **options, **bounds)
    # Under autocast float32 weights give float32 queries and keys, since rotary positions are added
    # in float32. The kernel would cast them, but the kernel is chosen here, by their dtype.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    kernel = _eager if implementation == "eager" else _sdpa
    attend = partial(kernel, partial(function, module), **options)
    output = _by_parts(attend, query=query, key=key, value=value, shared=shared_prompts)
    return output.transpose(1, 2).contiguous(), None


def _function(implementation: str, module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Transformers' function of this name, for the model that `module` is a part of."""
    if implementation == "eager":  # not in the interface: each model's file has its own
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[implementation]  # type: ignore[no-any-return]


def _as_configured(module: Any, implementation: str) -> Any:
    """A copy of the module that is configured with `implementation` instead of ours.

    Flash attention finds its kernel by the name in the configuration.
    """
    view = copy.copy(module)
    view.config = _naming(module.config, implementation)
    return view


def _keys_of_spans(tensor: Tensor, shared: SharedPrompts) -> Tensor:
    """Keys or values (1, Hk, S, D), laid out span by span as the queries see them.

    A group's first span sees itself; each other span sees a copy of the prompt and itself.
    """
    spans = iter(torch.split(tensor, shared.spans, dim=2))
    parts = []
    for group in shared.groups:
        first = next(spans)
        parts.append(first)
        for _ in group.others:
            parts += [first[:, :, : group.prompt], next(spans)]
    return torch.cat(parts, dim=2)


def _by_parts(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedPrompts,
) -> Tensor:
    """Attention over the spans of a packed sequence; returns (1, H, S, D).

    `attend`: causal attention that is aligned to the lower right, for queries (B, H, L, D) and keys
    and values (B, Hk, M, D), M >= L.
    """
    spans = zip(
        *(torch.split(tensor, shared.spans, dim=2) for tensor in (query, key, value)), strict=True
    )
    results = []
    for group in shared.groups:
        first = next(spans)
        results.append(attend(*first))
        prompt = [tensor[:, :, : group.prompt] for tensor in first]
        for lengths in group.batches:
            batch = [next(spans) for _ in lengths]
            parts = []  # queries, keys and values of the rollouts
            for tensors in zip(*batch, strict=True):
                # Each (1, H, L, D) becomes a row of (R, H, longest, D). The padding comes last,
                # where causal masks hide it.
                rows = [tensor[0].transpose(0, 1) for tensor in tensors]
                parts.append(pad_sequence(rows, batch_first=True).transpose(1, 2))
            repeat_queries = _prompt_queries_pay(group.prompt, lengths[0], query)
            for index in range(0 if repeat_queries else 1, 3):
                before = prompt[index].expand(len(lengths), -1, -1, -1)
                parts[index] = torch.cat([before, parts[index]], dim=2)
            output = attend(*parts)[:, :, group.prompt if repeat_queries else 0 :]
            results += [output[row : row + 1, :, :length] for row, length in enumerate(lengths)]
    return torch.cat(results, dim=2)


def _prompt_queries_pay(prompt: int, rollout: int, query: Tensor) -> bool:
    """Whether attention is less work with the prompt's queries before those of a rollout.

    Their results are thrown away, but the mask is then a plain causal one, and kernels compute only
    half of that.
    """
    if _knows_lower_right(query):
        return False
    keys = prompt + rollout
    blocks = _blocks(rollout, keys)
    return keys * keys / 2 < sum((end - start) * (prompt + end) for start, end in blocks)


def _knows_lower_right(query: Tensor) -> bool:
    """Whether the kernel can align a causal mask to the lower right, as flash attention's does."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _blocks(queries: int, keys: int) -> list[tuple[int, int]]:
    """The bounds of the blocks of queries that share a mask (see `_BLOCK`)."""
    block = max(_BLOCK, (keys - queries // 2) // 2)
    return [(start, min(start + block, queries)) for start in range(0, queries, block)]


def _sdpa(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attention by PyTorch's kernels. `function` is not used; `_eager` has the same signature."""
    options: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": query.size(1) != key.size(1),
    }
    queries = query.size(2)
    keys = key.size(2)
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if _knows_lower_right(query):
        mask = causal_lower_right(queries, keys)
        return scaled_dot_product_attention(query, key, value, mask, **options)
    if query.is_cuda:  # with a mask its kernels want as many heads of keys as of queries
        repeats = query.size(1) // key.size(1)
        key = repeat_kv(key, repeats)
        value = repeat_kv(value, repeats)
    results = []
    for start, end in _blocks(queries, keys):
        visible = keys - queries + end
        output = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, :visible],
            value[:, :, :visible],
            _lower_right(end - start, visible, query.device),
            **options,
        )
        results.append(output)
    return torch.cat(results, dim=2)


def _eager(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attention by the model file's own `eager_attention_forward`, with an additive mask."""
    allowed = _lower_right(query.size(2), key.size(2), query.device)
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    mask = zero.masked_fill(~allowed, torch.finfo(query.dtype).min)
    output: Tensor = function(
        query, key, value, mask[None, None], scaling=scaling, dropout=dropout
    )[0]
    return output.transpose(1, 2)


def _lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """A mask (queries, keys), True where a query may see a key. The last query sees all keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
