"""Attention in one call for all spans gives what attention span by span gives, in float64.

A packed sequence has a group's prompt and its rollouts. A span is what attends together: the prompt
with its longest rollout, and each other rollout, which sees the prompt's keys and its own.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from adora_vl.packing.shared_prompt import GroupLayout, PackedLayout
from adora_vl.packing.span_attention import attend_by_sdpa
from adora_vl.packing.varlen_attention import (
    VarlenAttention,
    attend_spans,
    keys_of_spans,
    probe_error,
)
from tests.support.small_models import FLOAT64_BOUND
from tests.support.varlen import varlen_attn

HEAD_SIZE = 8  # of a head
SCALING = 0.3  # of the scores


def packed_layout(*groups: tuple[int, list[int]]) -> PackedLayout:
    """Return the layout of groups, in which the longest rollout of each comes first.

    `groups`: for each group the length of its prompt, and the lengths of its rollouts.
    """
    layouts = []
    for prompt, rollouts in groups:
        longest_first = tuple(sorted(rollouts, reverse=True))
        layouts.append(GroupLayout(prompt_length=prompt, rollout_lengths=longest_first))
    return PackedLayout(tuple(layouts), torch.zeros(1, dtype=torch.long))


def random_tensor(heads: int, length: int, seed: int) -> Tensor:
    """Return random queries, keys or values, (1, heads, length, HEAD_SIZE), with gradients."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(
        1,
        heads,
        length,
        HEAD_SIZE,
        dtype=torch.float64,
        generator=generator,
    )
    return values.requires_grad_()


def output_and_gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return attention's output, (1, S, H, D), and the gradients of its inputs.

    They are gradients of a sum in which every number of the output has its own weight.
    """
    output = attend(*inputs)
    weights = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=5)), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(GROUPS, st.sampled_from([(4, 4), (4, 2), (6, 1)]))
def test_one_call_is_attention_span_by_span(groups, heads):
    """One call for all spans gives the outputs and gradients of a call for each span.

    A span is a prompt with its longest rollout, or another rollout with the prompt's keys. `heads`:
    the numbers of heads of queries and of keys.
    """
    layout = packed_layout(*groups)
    length = sum(layout.span_lengths)
    query_heads, key_heads = heads
    inputs = [
        random_tensor(query_heads, length, seed=0),
        random_tensor(key_heads, length, seed=1),
        random_tensor(key_heads, length, seed=2),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(varlen, "varlen_attn", varlen_attn)
        one_call_results = output_and_gradients(
            partial(attend_spans, layout=layout, scaling=SCALING), inputs
        )
    span_results = output_and_gradients(
        partial(attend_by_sdpa, layout=layout, scaling=SCALING), inputs
    )
    names = ("output", "queries", "keys", "values")
    for name, one_call, by_span in zip(names, one_call_results, span_results, strict=True):
        gap = (one_call - by_span).abs().max()
        # A single token sees itself alone: the gradient of its query is 0, but for rounding.
        scale = by_span.abs().max().clamp(min=1e-3)
        assert gap <= FLOAT64_BOUND * scale, name


def test_span_by_span_no_mask_of_a_long_rollout_is_kept():
    """What is saved for the backward pass grows with a rollout's length, not with its square."""
    layout = packed_layout((8, [64, 64, 8]))
    length = sum(layout.span_lengths)
    query = random_tensor(heads=1, length=length, seed=0)
    key = random_tensor(heads=1, length=length, seed=1)
    value = random_tensor(heads=1, length=length, seed=2)
    sizes: list[int] = []

    def record_size(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        attend_by_sdpa(query, key, value, layout=layout, scaling=SCALING)
    # The largest are the keys that a long rollout sees. Its mask would have 64 x 72 entries.
    assert max(sizes) == (8 + 64) * HEAD_SIZE


def test_each_span_has_the_prompt_s_keys_and_its_own():
    """A span has the keys of its prompt and its own, so a prompt's keys come once for each span.

    The first group has a prompt of two tokens and rollouts of 2, 1 and 1: positions 0 to 5. Its
    spans have the keys 0 1 2 3 (prompt and longest rollout), 0 1 4 and 0 1 5. The second group is
    the prompt 6 alone.
    """
    layout = packed_layout((2, [2, 1, 1]), (1, []))
    assert layout.key_positions_K.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 5, 6]
    assert layout.span_bounds.key_bounds.tolist() == [0, 4, 7, 10, 11]
    keys = torch.arange(7.0).view(1, 1, 7, 1)
    laid_out = keys_of_spans(keys, layout)
    assert laid_out.shape == (1, 1, 11, 1)
    assert laid_out.flatten().tolist() == layout.key_positions_K.tolist()


def test_gradients_of_a_prompts_keys_are_added_up_before_they_are_rounded():
    """The gradient of a prompt's key is the sum over all spans in more precision than bfloat16.

    The first of nine spans adds 256 to it, and eight add 1 each. In bfloat16 256 + 1 is 256, so
    added one by one they would leave 256.
    """
    layout = packed_layout((1, [1] * 9))
    keys = torch.zeros(
        1,
        1,
        10,
        1,
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    weights = torch.ones(len(layout.key_positions_K), dtype=torch.bfloat16)
    weights[0] = 256
    (keys_of_spans(keys, layout).flatten() * weights).sum().backward()

    assert keys.grad is not None
    assert float(keys.grad[0, 0, 0, 0]) == 256 + 8


def fake_gpu_tensor(
    dtype: torch.dtype = torch.bfloat16, heads: int = 4, size: int = HEAD_SIZE
) -> Any:
    """Return an object that looks like queries or keys on a GPU where a kernel is chosen."""
    shape = (1, heads, 10, size)
    device = torch.device("cpu")
    return SimpleNamespace(
        is_cuda=True,
        dtype=dtype,
        device=device,
        size=shape.__getitem__,
    )


def attention_with_wrong_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    *_: int,
    **__: object,
) -> Tensor:
    """Attend as a wrong kernel would: the mask is aligned to the first key, and not to the last."""
    ends_q = cu_seq_q.tolist()
    ends_k = cu_seq_k.tolist()
    outputs = []
    for number in range(len(ends_q) - 1):
        span_q = slice(ends_q[number], ends_q[number + 1])
        span_k = slice(ends_k[number], ends_k[number + 1])
        span_query = query[span_q].transpose(0, 1)
        span_key = key[span_k].transpose(0, 1)
        span_value = value[span_k].transpose(0, 1)
        allowed = torch.ones(span_query.size(1), span_key.size(1), dtype=torch.bool).tril()
        output = torch.nn.functional.scaled_dot_product_attention(
            span_query, span_key, span_value, allowed, enable_gqa=True
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1).transpose(0, 1)


def test_the_kernel_is_tried_once_for_its_kind_before_it_is_used(monkeypatch):
    """A GPU's kernel is tried for each dtype and head size, and refused where it has no support."""
    kernel = Mock(side_effect=varlen_attn)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    attention = VarlenAttention()
    query = fake_gpu_tensor()
    key = fake_gpu_tensor(heads=2)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert attention.supports(query, key, 0.0)
        assert attention.supports(query, key, 0.0)
    assert kernel.call_count == 1
    wider_query = fake_gpu_tensor(size=16)
    wider_key = fake_gpu_tensor(heads=2, size=16)
    assert attention.supports(wider_query, wider_key, 0.0)
    assert kernel.call_count == 2
    assert not attention.supports(query, key, 0.1), "it has no dropout"
    in_float32 = fake_gpu_tensor(torch.float32)
    assert not attention.supports(in_float32, in_float32, 0.0)
    of_odd_size = fake_gpu_tensor(size=12)
    assert not attention.supports(of_odd_size, of_odd_size, 0.0)
    on_cpu = torch.zeros(1, 4, 10, HEAD_SIZE, dtype=torch.bfloat16)
    assert not attention.supports(on_cpu, on_cpu, 0.0)


def test_a_kernel_that_refuses_or_differs_is_not_used_and_a_warning_says_so_once(monkeypatch):
    """A kernel that raises an error or gives other numbers is not used, with a single warning."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    for kernel, reason in (
        (refuse, "Ampere"),
        (attention_with_wrong_mask, "differs from plain attention"),
    ):
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        attention = VarlenAttention()
        with pytest.warns(UserWarning, match=reason) as noted:
            assert not attention.supports(fake_gpu_tensor(), fake_gpu_tensor(heads=2), 0.0)
            assert not attention.supports(fake_gpu_tensor(), fake_gpu_tensor(heads=2), 0.0)
        assert len(noted) == 1
        assert reason in attention.disabled_reason


def test_a_gpu_without_memory_says_nothing_of_the_kernel(monkeypatch):
    """A kernel whose trial runs out of memory is not refused for it; the error is raised."""

    def run_out_of_memory(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(varlen, "varlen_attn", run_out_of_memory)
    attention = VarlenAttention()
    with pytest.raises(torch.OutOfMemoryError):
        attention.supports(fake_gpu_tensor(), fake_gpu_tensor(), 0.0)
    assert not attention.disabled_reason


def test_a_kernel_with_wrong_gradients_is_found(monkeypatch):
    """`probe_error` compares gradients too, relative to those of plain attention."""

    def attention_with_half_a_gradient(**arguments) -> Tensor:
        output = varlen_attn(**arguments)
        return (output + output.detach()) / 2

    monkeypatch.setattr(varlen, "varlen_attn", attention_with_half_a_gradient)
    query = torch.zeros(1, 4, 1, HEAD_SIZE, dtype=torch.bfloat16)
    # Half of each gradient is missing. bfloat16 alone is off by a hundredth.
    assert probe_error(query, query) > 0.4
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    assert probe_error(query, query[:, :2]) < 0.02
