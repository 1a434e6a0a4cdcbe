"""Attention over all spans of a packed sequence in one call, by torch's own kernel for them.

`torch.nn.attention.varlen` is flash attention over rows of different lengths, each with bounds of
its own for queries and keys. A span of a packed sequence is such a row: its keys are the prompt's
and its own. The kernel needs a GPU and half precision. Before its first use it is compared with
plain attention, outputs and gradients, on two rows of a few tokens. Where it refuses or differs,
attention goes on in parts (`adora_vl.packing.split_attention`), and a warning says so once.
"""

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from adora_vl.packing.shared_prompt import GroupLayout, SharedPrompts

_MAX_HEAD_SIZE = 256  # of flash attention's kernels, in multiples of 8
# The largest error that counts as rounding, as a share of the largest value. Rounding to bfloat16
# makes 0.01 of it; a mask that is aligned to the upper left makes most of it.
_PROBE_BOUND = 0.05
# Groups of the compared sequence: with a later rollout, and with no rollout at all.
_PROBED_GROUPS = (
    GroupLayout(prompt_length=3, rollout_lengths=(4, 2)),
    GroupLayout(prompt_length=2, rollout_lengths=()),
)


class VarlenAttention:
    """Torch's kernel for rows of different lengths, as far as it works on this machine.

    `refusal` says why it is not used; empty while nothing is known against it.
    """

    def __init__(self) -> None:
        self.refusal = ""
        # (device, dtype, heads of queries, heads of keys, head size) that have been compared
        self._probed_kinds: set[tuple[Any, ...]] = set()

    def supports(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        """Return whether the kernel computes this attention; the first call for its kind tries it.

        `query` is (1, H, S, D), `key` (1, Hk, S, D). The kernel has no dropout.
        """
        head_size = query.size(-1)
        has_half_precision = query.dtype in (torch.float16, torch.bfloat16)
        size_fits = head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE
        if not (query.is_cuda and has_half_precision and size_fits):
            return False
        if self.refusal or dropout:
            return False
        kind = (query.device, query.dtype, query.size(1), key.size(1), head_size)
        if kind not in self._probed_kinds:
            self._probe(query, key)
            self._probed_kinds.add(kind)
        return not self.refusal

    def _probe(self, query: Tensor, key: Tensor) -> None:
        """Compare the kernel with plain attention in float32; a difference is a refusal.

        `query` and `key` say the kind: device, dtype, and numbers and size of heads.
        """
        try:
            error_ratio = probe_error(query, key)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # how a kernel says what it does not support
            self.refusal = " ".join(str(error).split())[:200]
        else:
            if not error_ratio <= _PROBE_BOUND:  # NaN is refused too
                self.refusal = (
                    f"it differs from plain attention by {error_ratio:.2g} of the largest value"
                )
        if self.refusal:
            warnings.warn(
                "attention: each rollout's is a call of its own, because torch's kernel for "
                f"rows of different lengths cannot be used: {self.refusal}",
                stacklevel=2,
            )


def attend_spans(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts, scaling: float
) -> Tensor:
    """Compute attention over the spans of a packed sequence, (1, S, H, D).

    Args:
        query: (1, H, S, D).
        key: (1, Hk, S, D).
        value: (1, Hk, S, D).
        shared: the layout of the sequence.
        scaling: factor of the scores.
    """
    spans = shared.span_bounds
    query_rows = query[0].transpose(0, 1)
    key_rows = _select_rows(key, shared.key_positions)
    value_rows = _select_rows(value, shared.key_positions)
    output: Any = varlen.varlen_attn(
        query_rows,
        key_rows,
        value_rows,
        spans.query_bounds,
        spans.key_bounds,
        spans.most_queries,
        spans.most_keys,
        scale=scaling,
        # causal, and aligned to the lower right: a span's last query sees all of its keys
        window_size=(-1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    result: Tensor = output[None]
    return result


def keys_of_spans(tensor: Tensor, shared: SharedPrompts) -> Tensor:
    """Return keys or values (1, Hk, S, D), laid out span by span as the queries see them.

    A group's first span sees itself; each other span sees a copy of the prompt and itself.
    """
    return _select_rows(tensor, shared.key_positions).transpose(0, 1)[None]


def _select_rows(tensor: Tensor, positions_K: Tensor) -> Tensor:
    """Return keys or values, (1, Hk, S, D), at these positions of the sequence, as (K, Hk, D)."""
    rows_K: Tensor = _SelectRows.apply(  # type: ignore[no-untyped-call]
        tensor[0].transpose(0, 1), positions_K
    )
    return rows_K


class _SelectContext(Protocol):
    """What the forward of `_SelectRows` leaves for its backward."""

    row_count: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep these tensors."""


class _SelectRows(torch.autograd.Function):
    """Selects rows of (S, H, D) by their numbers, (K,).

    A prompt's row is selected once for every rollout. Torch's own backward would add their gradients
    up in the dtype of the rows, and round after each.
    """

    @staticmethod
    def forward(ctx: _SelectContext, rows: Tensor, row_numbers: Tensor) -> Tensor:
        """Return the rows with these numbers, (K, H, D)."""
        ctx.save_for_backward(row_numbers)
        ctx.row_count = len(rows)
        return rows.index_select(0, row_numbers)

    @staticmethod
    def backward(ctx: _SelectContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the rows, (S, H, D), from that of the selected rows, (K, H, D).

        Those of one row are added up in float32 at least, and rounded once.
        """
        (gradient,) = gradients
        (row_numbers,) = ctx.saved_tensors
        sum_dtype = torch.promote_types(gradient.dtype, torch.float32)
        sums = gradient.new_zeros((ctx.row_count, *gradient.shape[1:]), dtype=sum_dtype)
        sums.index_add_(0, row_numbers, gradient.to(sum_dtype))
        return sums.to(gradient.dtype), None


def probe_error(query: Tensor, key: Tensor) -> float:
    """Return the largest difference of the kernel from plain attention, of the largest value.

    It is that of outputs or gradients on a few tokens, with heads, dtype and device of `query`
    (1, H, S, D) and `key` (1, Hk, S, D).
    """
    shared = SharedPrompts(_PROBED_GROUPS, torch.zeros(1, dtype=torch.long, device=query.device))
    length = sum(shared.span_lengths)
    # Queries, keys and values; values have the heads of the keys.
    waves = [_wave(like, length, number) for number, like in enumerate((query, key, key))]
    scaling = query.size(-1) ** -0.5
    # The pass that this is called from may be one without gradients, and under autocast.
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        half_inputs = [wave.to(query.dtype).requires_grad_() for wave in waves]
        output = attend_spans(half_inputs[0], half_inputs[1], half_inputs[2], shared, scaling)
        # The same rounded numbers in float32, so that only the kernel's own error is measured.
        full_inputs = [tensor.detach().float().requires_grad_() for tensor in half_inputs]
        expected = plain_attention(full_inputs[0], full_inputs[1], full_inputs[2], shared, scaling)
        loss_weights = _wave(query, length, 3).transpose(1, 2)
        gradients = torch.autograd.grad((output * loss_weights).sum(), half_inputs)
        expected_gradients = torch.autograd.grad((expected * loss_weights).sum(), full_inputs)
    kernel_results = (output, *gradients)
    plain_results = (expected, *expected_gradients)
    error_ratios = []
    for kernel_result, plain_result in zip(kernel_results, plain_results, strict=True):
        gap = (kernel_result.float() - plain_result).abs().max()
        error_ratios.append(gap / plain_result.abs().max())
    return torch.stack(error_ratios).max().item()


def _wave(like: Tensor, length: int, number: int) -> Tensor:
    """Return values between -2 and 2 that look drawn and take no random number.

    They are (1, H, length, D), float32, with heads and device of `like`, (1, H, S, D).
    """
    heads = like.size(1)
    value_count = heads * length * like.size(-1)
    steps = torch.arange(value_count, device=like.device, dtype=torch.float32)
    # no two tensors have the same frequency
    waves = (steps * (0.7 + 0.37 * number)).sin()
    return 2 * waves.view(1, heads, length, like.size(-1))


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts, scaling: float
) -> Tensor:
    """Compute the attention of `attend_spans` by its definition, span by span with a mask.

    It is for comparing: every span is a call, and keys and values are repeated for every head. The
    arguments are those of `attend_spans`.
    """
    outputs = []
    start = 0
    for group in shared.groups:
        prompt_positions = torch.arange(start, start + group.prompt_length, device=query.device)
        for number, length in enumerate((group.first_span_length, *group.later_rollout_lengths)):
            positions = torch.arange(start, start + length, device=query.device)
            visible = positions
            if number:  # the first span has the prompt inside
                visible = torch.cat([prompt_positions, positions])
            mask = visible[None, :] <= positions[:, None]
            visible_key = key[:, :, visible]
            visible_value = value[:, :, visible]
            repeats = query.size(1) // key.size(1)
            output = scaled_dot_product_attention(
                query[:, :, positions],
                visible_key.repeat_interleave(repeats, dim=1),
                visible_value.repeat_interleave(repeats, dim=1),
                mask,
                scale=scaling,
            )
            outputs.append(output)
            start += length
    return torch.cat(outputs, dim=2).transpose(1, 2)
