"""Attention over a sequence of groups (`adora_vl.packing.shared_prompt`) in parts: each prompt with
its first rollout on itself, and the other rollouts as a batch, each on (prompt, itself). Nothing
grows with the square of a group's tokens.

It is an attention implementation of Transformers' `AttentionInterface` on top of the model's own
one, and takes part only in a forward that is given `shared_prompts`; everything else goes to the
model's own. What it has to know comes as that argument alone, which gradient checkpointing hands
over again when it computes a layer once more.
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
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.packing.shared_prompt import SharedPrompts
from adora_vl.utils import compat

ARGUMENT = "shared_prompts"  # of the model's forward
_PREFIX = "shared_prompt|"  # as Transformers' own `paged|sdpa`
# Without a kernel for "causal to the lower right", queries are computed in blocks that share a
# mask. Half a square of each block is computed in vain, and each block is a call, which costs time
# too. So a block has at least this many queries, and otherwise as many as waste a quarter of the
# work.
_BLOCK = 256


def plan_no_shapes() -> None:
    """Keep cuDNN out of `scaled_dot_product_attention` in this process; flash attention takes its
    place.

    On H100, H200 and B200 torch 2.13 prefers cuDNN, which builds a plan for every shape (23 ms and
    more, again backward) and keeps it without limit. Packed sequences have a new length in almost
    every micro-batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def own_attention(config: Any) -> str:
    """The implementation that the user chose, whether or not ours is on top of it."""
    name: str = config.get_text_config()._attn_implementation
    return name


def prepared_mask(device: torch.device) -> Tensor:
    """A mask that Transformers passes on unchanged, so that it makes none over all groups.

    `_attention` ignores it.
    """
    return torch.empty(1, 1, 0, 0, device=device)


def install(model: Any) -> None:
    """Let `model`, in whatever wrapper, take `shared_prompts` from now on.

    Its attention modules get a configuration of their own that names the implementation; the
    model's stays as it is, so masks, saved files and other models that are built from it know
    nothing of it. It stays installed: gradient checkpointing looks the attention up again in the
    backward pass.
    """
    decoder = model.get_decoder()
    modules = [layer.self_attn for layer in decoder.layers]
    if modules[0].config._attn_implementation.startswith(_PREFIX):
        return
    own = own_attention(decoder.config)
    AttentionInterface.register(_PREFIX + own, partial(_attention, own))
    config = _naming(decoder.config, _PREFIX + own)
    for module in modules:
        module.config = config
    decoder.register_forward_hook(_scored_positions, with_kwargs=True)


def _naming(config: Any, attention: str) -> Any:
    """A copy of `config` that names this implementation."""
    view = copy.copy(config)
    compat.TEXT_ATTENTION.install(attention, on=view)
    return view


def _scored_positions(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The positions that predict a completion token, for the LM head; a prompt's last one comes
    once per rollout.
    """
    shared: SharedPrompts | None = kwargs.get(ARGUMENT)
    if shared is not None:
        output.last_hidden_state = output.last_hidden_state[:, shared.predicting_K]
    return output


def _attention(
    own: str,
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
    """Query (N, H, S, D), key and value (N, Hk, S, D); the result is (N, S, H, D), as of every
    implementation.
    """
    function = _function(own, module)
    flash = is_flash_attention_requested(requested_attention_implementation=own)
    if flash:
        module = _as_configured(module, own)
    given: dict[str, Any] = {"scaling": scaling, "dropout": dropout}
    if shared_prompts is None:
        return function(module, query, key, value, attention_mask, **given, **kwargs)
    if flash:
        ends_Q, ends_K, most_Q, most_K = shared_prompts.bounds
        key, value = (_keys_of_spans(tensor, shared_prompts) for tensor in (key, value))
        bounds = {
            "cu_seq_lens_q": ends_Q,
            "cu_seq_lens_k": ends_K,
            "max_length_q": most_Q,
            "max_length_k": most_K,
        }
        return function(module, query, key, value, None, **given, **bounds)
    # Under autocast float32 weights give float32 queries and keys, since rotary positions are added
    # in float32. The kernel would cast them, but which kernel there is, is decided here.
    query, key = (tensor.to(value.dtype) for tensor in (query, key))
    attend = partial(_eager if own == "eager" else _sdpa, partial(function, module), **given)
    return _by_parts(attend, query=query, key=key, value=value, shared=shared_prompts).transpose(
        1, 2
    ).contiguous(), None


def _function(own: str, module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if own == "eager":  # not in the interface: each model's file has its own
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[own]  # type: ignore[no-any-return]


def _as_configured(module: Any, own: str) -> Any:
    """The module with the implementation's own name in its configuration, by which flash attention
    finds its kernel.
    """
    view = copy.copy(module)
    view.config = _naming(module.config, own)
    return view


def _keys_of_spans(tensor: Tensor, shared: SharedPrompts) -> Tensor:
    """(1, Hk, S, D) to what the spans see in turn: a group's first itself, the others the prompt
    and themselves.
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
    """(1, H, S, D).

    `attend`: causal to the lower right, for queries (B, H, L, D) and keys (B, Hk, M, D), M >= L.
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
            own = zip(*(next(spans) for _ in lengths), strict=True)
            # (1, H, L, D) each to (R, H, longest, D); causal masks hide the padding, which comes
            # last
            rows = ([part[0].transpose(0, 1) for part in each] for each in own)
            parts = [pad_sequence(each, batch_first=True).transpose(1, 2) for each in rows]
            again = _prompt_queries_pay(group.prompt, lengths[0], query)
            for place in range(0 if again else 1, 3):
                before = prompt[place].expand(len(lengths), -1, -1, -1)
                parts[place] = torch.cat([before, parts[place]], dim=2)
            found = attend(*parts)[:, :, group.prompt if again else 0 :]
            results += [found[row : row + 1, :, :length] for row, length in enumerate(lengths)]
    return torch.cat(results, dim=2)


def _prompt_queries_pay(prompt: int, rollout: int, query: Tensor) -> bool:
    """Whether attention is less work if the prompt's queries are put before those of a rollout.

    Their results are not needed, but the mask is then a plain causal one, of which kernels compute
    only one half.
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
    """The bounds of the blocks of queries that share a mask."""
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
    given: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": query.size(1) != key.size(1),
    }
    queries = query.size(2)
    keys = key.size(2)
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **given)
    if _knows_lower_right(query):
        return scaled_dot_product_attention(
            query, key, value, causal_lower_right(queries, keys), **given
        )
    if query.is_cuda:  # with a mask its kernels want as many heads of keys as of queries
        key, value = (repeat_kv(tensor, query.size(1) // key.size(1)) for tensor in (key, value))
    results = []
    for start, end in _blocks(queries, keys):
        seen = keys - queries + end
        own = query[:, :, start:end], key[:, :, :seen], value[:, :, :seen]
        results.append(
            scaled_dot_product_attention(
                *own, _lower_right(end - start, seen, query.device), **given
            )
        )
    return torch.cat(results, dim=2)


def _eager(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    allowed = _lower_right(query.size(2), key.size(2), query.device)
    mask = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(
        ~allowed, torch.finfo(query.dtype).min
    )
    found: Tensor = function(query, key, value, mask[None, None], scaling=scaling, dropout=dropout)[
        0
    ]
    return found.transpose(1, 2)


def _lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query may see a key. The last query sees all keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
