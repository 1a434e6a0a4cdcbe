"""Attention over all rollouts of a micro-batch in one call, and span by span.

The call is that of torch's kernel for rows of different lengths. Both are compared with attention
in float32.

Outputs and gradients of queries, keys and values in bfloat16, and seconds of forward and backward
for one layer, with heads of the 3B and 7B models. A CPU has the calls span by span alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from adora_vl.packing.shared_prompt import GroupLayout, PackedLayout
from adora_vl.packing.span_attention import attend_by_sdpa
from adora_vl.packing.varlen_attention import VarlenAttention, attend_spans
from benchmarks.gpu.setting import Setting, relative_distance
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line, verdict_line
from benchmarks.measure import median_seconds_by_turns

# Queries and keys of a layer, and the size of a head
_HEADS_AND_SIZE_BY_MODEL = {"3B": (16, 2, 128), "7B": (28, 4, 128)}
_ANSWER_LENGTHS = (1024, 760, 520, 430, 380, 300, 210, 117)  # of a group of real lengths
# Prompt and answers of a group, and how many such groups share a micro-batch
_FULL_SHAPES = (
    (1079, _ANSWER_LENGTHS, 1),
    (1079, _ANSWER_LENGTHS, 3),
    (512, (1024,) * 8, 1),
    (256, (64,) * 16, 4),
)
_SMALL_SHAPES = ((40, (24, 17, 9, 5), 2),)
# Each rounding of bfloat16 is 2^-9 at most; weights of attention, sums and outputs have one each
_DISTANCE_BOUND = 0.02
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(setting: Setting) -> Iterator[CheckLine]:
    """Compare attention of shared prompts in one call with that span by span, at several shapes."""
    shapes = _FULL_SHAPES if setting.full else _SMALL_SHAPES
    for size, heads in _HEADS_AND_SIZE_BY_MODEL.items():
        for prompt, answers, groups in shapes:
            layout = _packed_layout(setting, prompt, answers=answers, groups=groups)
            name = f"{size}, {groups} x (prompt {prompt}, {len(answers)} x up to {answers[0]})"
            yield from _comparison_lines(setting, name, layout=layout, heads=heads)


def _packed_layout(
    setting: Setting, prompt: int, answers: tuple[int, ...], groups: int
) -> PackedLayout:
    """Return the layout of equal groups with one prompt and answers of these lengths."""
    # a rollout's last token is no query
    group = GroupLayout(prompt, tuple(length - 1 for length in answers))
    return PackedLayout((group,) * groups, torch.zeros(1, dtype=torch.long, device=setting.device))


def _comparison_lines(
    setting: Setting, name: str, layout: PackedLayout, heads: tuple[int, int, int]
) -> Iterator[CheckLine]:
    """Compare the outputs, the gradients and the seconds of both ways of attention.

    Both have the same random bfloat16 inputs, and the reference is span by span in float32. Of the
    output and the three gradients the one with the largest error is reported. `heads` are the
    numbers of heads of queries and of keys, and the size of a head.
    """
    queries, keys, size = heads
    length = sum(layout.span_lengths)
    inputs = [
        torch.randn(1, number, length, size, dtype=torch.bfloat16, device=setting.device)
        for number in (queries, keys, keys)
    ]
    scaling = size**-0.5
    ways: dict[str, Attend] = {
        "span by span": partial(attend_by_sdpa, layout=layout, scaling=scaling),
        "one call": partial(attend_spans, layout=layout, scaling=scaling),
    }
    kernel = VarlenAttention()
    if setting.on_gpu:
        works = kernel.supports(inputs[0], inputs[1], 0.0)
        yield verdict_line(
            f"{name}: one call", kernel.disabled_reason or "used", "used", works, "VarlenAttention"
        )
    else:
        works = False
        yield skipped_line(f"{name}: one call", "torch's kernel needs a GPU")
    if not works:
        del ways["one call"]
    wide = [tensor.float() for tensor in inputs]
    right = _outputs_and_gradients(partial(attend_by_sdpa, layout=layout, scaling=scaling), wide)
    for way, attend in ways.items():
        results = _outputs_and_gradients(attend, inputs)
        names = ("output", "gradient of queries", "of keys", "of values")
        errors = [
            relative_distance(result, exact) for result, exact in zip(results, right, strict=True)
        ]
        worst = max(range(len(errors)), key=errors.__getitem__)
        yield at_most_line(
            f"{name}, {way}: from float32",
            value=errors[worst],
            bound=_DISTANCE_BOUND,
            unit="",
            source=f"roundings to bfloat16; the {names[worst]}",
        )
    if not works:
        return
    times = median_seconds_by_turns(
        setting.device,
        {way: partial(_outputs_and_gradients, attend, inputs) for way, attend in ways.items()},
        5,
    )
    yield at_most_line(
        f"{name}: one call, of the time span by span",
        value=times["one call"] / times["span by span"],
        bound=1.1,
        unit="",
        source="a tenth is noise; "
        + ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in times.items()),
    )


def _outputs_and_gradients(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, (1, S, H, D), and the gradients of its weighted sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    weights = torch.linspace(-1, 1, output.size(1), device=output.device)[None, :, None, None]
    gradients = torch.autograd.grad((output * weights.to(output.dtype)).sum(), leaves)
    return [output.detach(), *gradients]
