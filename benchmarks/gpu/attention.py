"""Times attention on shapes that it has not seen before.

In training a packed sequence has another length in almost every micro-batch. Here each call of
PyTorch's attention gets a new length too, forward and backward. A kernel that plans for every shape
is slow here, and fast in a benchmark of one shape.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.setting import JUDGED_ON_GPU_ONLY, Setting
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line
from benchmarks.measure import run_seconds

_CALLS_TIMED = 12


def run(setting: Setting) -> Iterator[CheckLine]:
    """Time attention with a new length in every call, as training has it, and with one length."""
    length, heads = (4096, 28) if setting.full else (96, 4)
    same = _seconds(setting, length, heads, step=0)
    fresh = _seconds(setting, length, heads, step=8)
    figure = f"{1e3 * fresh:.3g} ms, and {1e3 * same:.3g} ms for one length again and again"
    if not setting.on_gpu:
        yield skipped_line("a new length in every call", JUDGED_ON_GPU_ONLY, figure)
        return
    # the fresh ones are longer too, and attention grows with the square
    longer = 1 + 8 * _CALLS_TIMED / length
    bound = 1.25 * longer**2
    yield at_most_line(
        "a new length in every call, of one length's time",
        value=fresh / same,
        bound=bound,
        unit="",
        source=f"no plans; {figure}",
    )
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        planned = _seconds(setting, length + 8 * _CALLS_TIMED, heads, step=8)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
    reason = "for comparison: torch's own choice, which our runs switch off"
    yield skipped_line("the same with cuDNN allowed", reason, f"{1e3 * planned:.3g} ms")


def _seconds(setting: Setting, length: int, heads: int, step: int) -> float:
    """Return the median of some calls, of `length` and `step` more tokens each time.

    The first one is not counted.
    """
    inputs = [_inputs(setting, length + step * number, heads) for number in range(_CALLS_TIMED + 1)]
    spent = [
        run_seconds(setting.device, partial(_forward_and_backward, *tensors)) for tensors in inputs
    ]
    return statistics.median(spent[1:])


def _inputs(setting: Setting, length: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values of one length."""
    new_tensor = partial(
        torch.randn, dtype=torch.bfloat16, device=setting.device, requires_grad=True
    )
    query = new_tensor(1, heads, length, 128)
    key = new_tensor(1, heads // 2, length, 128)
    value = new_tensor(1, heads // 2, length, 128)
    return query, key, value


def _forward_and_backward(query: Tensor, key: Tensor, value: Tensor) -> None:
    scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).sum().backward()
