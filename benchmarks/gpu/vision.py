"""Compares the vision tower of Qwen2.5-VL with its windows batched and with its loop over windows.

Both ways run forward and backward at three sizes of image.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from adora_vl.models.precision import restore_buffers
from adora_vl.packing.vision_windows import batch_windows, window_arguments
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import (
    JUDGED_ON_GPU_ONLY,
    Setting,
    free_bytes,
    lines_while_memory_lasts,
    relative_distance,
    take_gradients,
)
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line, verdict_line
from benchmarks.measure import median_seconds_by_turns, peak_bytes

ROUNDING_SLACK = 1.5
# Height and width in patches, four to an image token; the edges of all but the last cut windows
_FULL_GRIDS = {"300 tokens": [(30, 40)], "8 x 300": [(30, 40)] * 8, "1024": [(64, 64)]}
_SMALL_GRIDS = {"30 tokens": [(10, 12)], "2 x 16": [(8, 8)] * 2, "49": [(14, 14)]}
_IMAGE_GIB = 5  # that the float32 tower's pass takes for an image of 300 tokens
_TOWERS_GIB = 9  # that both towers take with their gradients


def run(setting: Setting) -> Iterator[CheckLine]:
    """Compare batched attention of the vision tower with the loop over pictures."""
    config = setting.config(
        "7B", layers=1, eye_layers=32 if setting.full else 9
    ).vision_config  # 9: one sees it all
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with setting.device:
        exact = Qwen2_5_VisionTransformerPretrainedModel(config).bfloat16().float().train()
    tower = copy.deepcopy(exact).bfloat16()
    for model in (exact, tower):
        # both have been through bfloat16, which rounds the rotary frequencies
        restore_buffers(model)
    for name, sides in (at_size(free_bytes(setting)) if setting.full else _SMALL_GRIDS).items():
        grids = torch.tensor([[1, *side] for side in sides])
        # A patch has 3 colours of 2 frames of 14 x 14 pixels, 1,176 numbers.
        pixels = torch.randn(
            int(grids.prod(dim=1).sum()), 1176, generator=torch.Generator().manual_seed(0)
        )
        lines = _image(
            setting,
            name=name,
            tower=tower,
            exact=exact,
            pixels=pixels.to(setting.device),
            grids=grids,
        )
        yield from lines_while_memory_lasts(setting, name, lines)


def at_size(free: int) -> dict[str, list[tuple[int, int]]]:
    """Return the grids of the full size, with as many images at once as fit into `free` bytes.

    For example, 29 GiB leave 20 beside the towers, so `8 x 300` becomes `4 x 300`.
    """
    images_that_fit = int((free / GIB - _TOWERS_GIB) / _IMAGE_GIB)
    several = max(2, min(8, images_that_fit))
    return {
        (name if len(sides) == 1 else f"{several} x 300"): sides[:several]
        for name, sides in _FULL_GRIDS.items()
    }


def _image(
    setting: Setting,
    name: str,
    tower: Qwen2_5_VisionTransformerPretrainedModel,
    exact: Qwen2_5_VisionTransformerPretrainedModel,
    pixels: Tensor,
    grids: Tensor,
) -> Iterator[CheckLine]:
    """Compare features, gradients, seconds and memory for one set of pictures.

    `exact` is the tower in float32 with the same weights. Both ways in bfloat16 have rounding
    errors, and that of the batched way may be 1.5 times that of the loop.
    """
    right = forward_and_backward(exact, pixels, grids, batched=False)
    loop = forward_and_backward(tower, pixels, grids, batched=False)
    batched = forward_and_backward(tower, pixels, grids, batched=True)
    for number, tensor_name in enumerate(("features", "gradients")):
        bound = ROUNDING_SLACK * relative_distance(loop[number], right[number])
        source = f"{ROUNDING_SLACK} times the loop's own error in bfloat16"
        yield at_most_line(
            f"{name}, batched: {tensor_name}, from float32",
            value=relative_distance(batched[number], right[number]),
            bound=bound,
            unit="",
            source=source,
        )
    del right, loop, batched
    ways = {
        label: partial(_features_and_gradients, tower, pixels, grids, batched=on)
        for label, on in (("loop", False), ("batched", True))
    }
    times = median_seconds_by_turns(setting.device, ways, 3 if setting.full else 1)
    if not setting.on_gpu:
        yield skipped_line(
            f"{name}: both ways",
            JUDGED_ON_GPU_ONLY,
            ", ".join(f"{way} {spent:.3g} s" for way, spent in times.items()),
        )
        return
    waits = count_syncs(ways["batched"])
    source = f"else a block waits for a bound of its windows; the loop {count_syncs(ways['loop'])}"
    yield at_most_line(
        f"{name}: waits for the device",
        value=waits,
        bound=len(tower.blocks) - 1,
        unit="",
        source=source,
    )
    peaks = {way: peak_bytes(setting.device, go) / GIB for way, go in ways.items()}
    figure = "; ".join(f"{way} {times[way]:.3g} s, {peaks[way]:.2g} GiB" for way in ways)
    yield at_most_line(
        f"{name}: batched, of the loop's time",
        value=times["batched"] / times["loop"],
        bound=1.0,
        unit="",
        source=f"else it has no use; {figure}",
    )
    fits = peaks["batched"] <= 1.2 * peaks["loop"]
    yield verdict_line(
        f"{name}: both ways",
        figure,
        "at most 1.2 of the loop's memory",
        fits,
        "a reordered copy of q, k and v",
    )


def count_syncs(go: Callable[[], object]) -> int:
    """Return how often the host waits for the GPU, as torch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            go()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def forward_and_backward(
    tower: Qwen2_5_VisionTransformerPretrainedModel,
    pixels: Tensor,
    grids: Tensor,
    *,
    batched: bool,
) -> tuple[Tensor, Tensor]:
    """Return features, and the gradients of a weighted sum of them."""
    features = _features_and_gradients(tower, pixels, grids, batched=batched).detach()
    return features, take_gradients(tower)


def _features_and_gradients(
    tower: Qwen2_5_VisionTransformerPretrainedModel,
    pixels: Tensor,
    grids: Tensor,
    *,
    batched: bool,
) -> Tensor:
    """Run the tower forward and backward. Returns features, and leaves gradients in the tower.

    Without `batched` the tower loops over windows, as in Transformers. With it, the bounds of the
    windows are passed to the tower, as in training.
    """
    assert batch_windows(tower, batched) is batched
    tower.zero_grad(set_to_none=True)
    bounds = window_arguments(tower, grids, pixels.device) if batched else {}
    arguments = {name.removeprefix("image_"): value for name, value in bounds.items()}
    features: Tensor = tower(
        pixels.to(tower.dtype), grid_thw=grids.to(pixels.device), **arguments
    ).pooler_output
    weights = torch.linspace(-1, 1, features.size(-1), device=features.device)
    (features.float() * weights).sum().backward()
    return features
