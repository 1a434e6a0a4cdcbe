"""Attention over all spans of a packed sequence in one call, by torch's own kernel for them.

`torch.nn.attention.varlen` is flash attention over rows of different lengths. Each row has its own
bounds for queries and keys. A span of a packed sequence is such a row: its keys are the prompt's
keys and its own. The kernel needs a GPU and half precision. Before its first use its outputs and
gradients are compared with attention span by span in float32, on a few tokens. If it raises an
error or differs, each span stays a call (`adora_vl.packing.span_attention`), and one warning says
so.
"""

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import varlen

from adora_vl.packing.shared_prompt import GroupLayout, PackedLayout
from adora_vl.packing.span_attention import attend_by_sdpa

_MAX_HEAD_SIZE = 256  # of flash attention's kernels, in multiples of 8
# The largest error that counts as rounding, as a share of the largest value. Rounding to bfloat16
# makes 0.01 of it; a mask that is aligned to the upper left makes most of it.
_MAX_PROBE_ERROR = 0.05
# Groups of the compared sequence: with a later rollout, and with no rollout at all.
_PROBED_GROUPS = (
    GroupLayout(prompt_length=3, rollout_lengths=(4, 2)),
    GroupLayout(prompt_length=2, rollout_lengths=()),
)


class VarlenAttention:
    """Torch's kernel for rows of different lengths, as far as it works on this machine."""

    def __init__(self) -> None:
        self.disabled_reason = ""  # why it is not used; empty while nothing is known against it
        # (device, dtype, heads of queries, heads of keys, head size) that have been compared
        self._probed_shapes: set[tuple[Any, ...]] = set()

    def supports(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        """Return whether the kernel can compute this attention.

        It needs a GPU, half precision and certain head sizes, and has no dropout. The first call
        for a device, a dtype, and a number and size of heads also tries the kernel on a few tokens.

        Args:
            query: (1, H, S, D): H heads, S positions, D values per head.
            key: (1, Hk, S, D), with Hk heads.
            dropout: share of the attention weights that are dropped.
        """
        head_size = query.size(-1)
        has_half_precision = query.dtype in (torch.float16, torch.bfloat16)
        size_fits = head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE
        if not (query.is_cuda and has_half_precision and size_fits):
            return False
        if self.disabled_reason or dropout:
            return False
        shape = (query.device, query.dtype, query.size(1), key.size(1), head_size)
        if shape not in self._probed_shapes:
            self._probe(query, key)  # may set `disabled_reason`
            self._probed_shapes.add(shape)
        return not self.disabled_reason

    def _probe(self, query: Tensor, key: Tensor) -> None:
        """Compare the kernel with plain attention in float32; set `disabled_reason` if they differ.

        It is also set, with a warning, where the kernel raises an error. `query` and `key` give the
        device, the dtype, and the number and size of heads; their values are not used.
        """
        try:
            error_ratio = probe_error(query, key)
        # Out of memory is a `RuntimeError` too, but it does not mean that the kernel fails here.
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a kernel raises it for what it does not support
            self.disabled_reason = " ".join(str(error).split())[:200]
        else:
            if not error_ratio <= _MAX_PROBE_ERROR:  # NaN is refused too
                self.disabled_reason = (
                    f"it differs from plain attention by {error_ratio:.2g} of the largest value"
                )
        if self.disabled_reason:
            warnings.warn(
                "attention: each rollout's is a call of its own, because torch's kernel for "
                f"rows of different lengths cannot be used: {self.disabled_reason}",
                stacklevel=2,
            )


def attend_spans(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float
) -> Tensor:
    """Compute attention over a packed sequence in one call of torch's varlen kernel: (1, S, H, D).

    A span is a run of queries, with the keys that these may see. A prompt and its longest rollout,
    which stands right behind it, are one span: its queries see its own keys. Every other rollout is
    a span whose queries see the prompt's keys and its own.

    For example, the sequence `p0 p1 a0 a1 b0` of a prompt p and its rollouts a and b has two spans:

        queries       keys
        p0 p1 a0 a1   p0 p1 a0 a1
        b0            p0 p1 b0

    Args:
        query: (1, H, S, D): H heads, S positions, D values per head.
        key: (1, Hk, S, D), with Hk heads.
        value: (1, Hk, S, D).
        layout: where prompts and rollouts are in the sequence.
        scaling: factor of the scores.
    """
    spans = layout.span_bounds
    output: Any = varlen.varlen_attn(
        query=query[0].transpose(0, 1),  # (S, H, D)
        # (K, Hk, D): the K keys, or values, of one span after the other. Those of the prompt are
        # repeated for each span that sees them.
        key=_select_rows(key, layout.key_positions_K),
        value=_select_rows(value, layout.key_positions_K),
        cu_seq_q=spans.query_bounds,
        cu_seq_k=spans.key_bounds,
        max_q=spans.max_queries,
        max_k=spans.max_keys,
        scale=scaling,
        # Causal, aligned to the lower right: the last query of a span sees all keys of the span.
        window_size=(-1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    result: Tensor = output[None]
    return result


def keys_of_spans(tensor: Tensor, layout: PackedLayout) -> Tensor:
    """Copy keys or values, (1, Hk, S, D), into the order in which spans see them, (1, Hk, K, D).

    The K keys of the spans stand one behind the other (`attend_spans` says what a span is). For
    example, p0 p1 a0 a1 b0 becomes p0 p1 a0 a1 p0 p1 b0.
    """
    return _select_rows(tensor, layout.key_positions_K).transpose(0, 1)[None]


def _select_rows(tensor: Tensor, positions_K: Tensor) -> Tensor:
    """Select keys or values at K of the S positions of a sequence.

    From (1, Hk, S, D), with Hk heads of D values, they become (K, Hk, D).
    """
    rows_K: Tensor = _SelectRows.apply(  # type: ignore[no-untyped-call]
        tensor[0].transpose(0, 1), positions_K
    )
    return rows_K


class _SelectContext(Protocol):
    """The autograd context that the forward of `_SelectRows` fills for its backward."""

    row_count: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep these tensors."""


class _SelectRows(torch.autograd.Function):
    """Selects K of S rows by number, with a more exact backward than torch's.

    A row has D values for each of H heads. A prompt's row is selected once for every rollout, so
    its gradient is a sum over the copies. For example, if the rows 0 1 0 are selected, the gradient
    of row 0 is g0 + g2. Torch's own backward would add up in the dtype of the rows, such as
    bfloat16, and round after each addition.
    """

    @staticmethod
    def forward(ctx: _SelectContext, rows: Tensor, row_numbers: Tensor) -> Tensor:
        """Return the rows with these numbers, (K, H, D)."""
        ctx.save_for_backward(row_numbers)
        ctx.row_count = len(rows)
        return rows.index_select(0, row_numbers)

    @staticmethod
    def backward(ctx: _SelectContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the rows, (S, H, D); `gradients` is that of the K selected rows.

        If a row was selected several times, the gradients of its copies are added up in float32 or
        better, and the sum is rounded once. The row numbers get no gradient.
        """
        (gradient,) = gradients
        (row_numbers,) = ctx.saved_tensors
        sum_dtype = torch.promote_types(gradient.dtype, torch.float32)
        sums = gradient.new_zeros((ctx.row_count, *gradient.shape[1:]), dtype=sum_dtype)
        sums.index_add_(0, row_numbers, gradient.to(sum_dtype))
        return sums.to(gradient.dtype), None


def probe_error(query: Tensor, key: Tensor) -> float:
    """Return how far the kernel is from plain attention, on two short groups of made-up values.

    It is the largest difference of an output or gradient, divided by the largest value of the same
    tensor. Heads, dtype and device are those of `query` (1, H, S, D) and `key` (1, Hk, S, D), whose
    values are not used.
    """
    # Only the LM head would read these positions. Here they say which device the layout is on.
    unread_positions = torch.zeros(1, dtype=torch.long, device=query.device)
    layout = PackedLayout(_PROBED_GROUPS, predicting_positions=unread_positions)
    length = sum(layout.span_lengths)
    # Query, key and value. Each has another frequency, so that no two are equal.
    waves = [
        _pseudo_random_values(query, length, frequency=0.7),
        _pseudo_random_values(key, length, frequency=0.7 + 0.37),
        _pseudo_random_values(key, length, frequency=0.7 + 0.37 * 2),
    ]
    loss_weights = _pseudo_random_values(query, length, frequency=0.7 + 0.37 * 3).transpose(1, 2)
    scaling = query.size(-1) ** -0.5
    # The caller may be in a pass without gradients, or under autocast.
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        half_inputs = [wave.to(query.dtype).requires_grad_() for wave in waves]
        # The same rounded numbers in float32, so that only the kernel's own error is measured.
        full_inputs = [tensor.detach().float().requires_grad_() for tensor in half_inputs]
        half_query, half_key, half_value = half_inputs
        kernel_output = attend_spans(half_query, half_key, half_value, layout, scaling)
        full_query, full_key, full_value = full_inputs
        plain_output = attend_by_sdpa(full_query, full_key, full_value, layout, scaling)
        kernel_gradients = torch.autograd.grad((kernel_output * loss_weights).sum(), half_inputs)
        plain_gradients = torch.autograd.grad((plain_output * loss_weights).sum(), full_inputs)
    kernel_results = (kernel_output, *kernel_gradients)
    plain_results = (plain_output, *plain_gradients)
    error_ratios = []
    for kernel_result, plain_result in zip(kernel_results, plain_results, strict=True):
        gap = (kernel_result.float() - plain_result).abs().max()
        error_ratios.append(gap / plain_result.abs().max())
    return torch.stack(error_ratios).max().item()


def _pseudo_random_values(like: Tensor, length: int, frequency: float) -> Tensor:
    """Return values between -2 and 2 that look random, without drawing random numbers.

    They are (1, H, length, D), float32, with heads and device of `like`, (1, H, S, D).
    """
    heads = like.size(1)
    head_size = like.size(-1)
    steps = torch.arange(heads * length * head_size, device=like.device, dtype=torch.float32)
    return 2 * (steps * frequency).sin().view(1, heads, length, head_size)
