"""The vision tower of Qwen2.5-VL with its windows batched and looped: forward and backward at three sizes of image."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from adora_vl.dedup.batched_windows import batch_windows
from adora_vl.memory import GIB
from benchmarks.gpu.setting import ON_A_GPU_ONLY, Setting, apart, by_turns, gradients, peak_bytes
from benchmarks.gpu.table import Line, at_most, holds, skipped

SLACK = 1.5
# Height and width in patches, four to an image token; the edges of all but the last cut windows
_FULL = {"300 tokens": [(30, 40)], "8 x 300": [(30, 40)] * 8, "1024": [(64, 64)]}
_SMALL = {"30 tokens": [(10, 12)], "2 x 16": [(8, 8)] * 2, "49": [(14, 14)]}


def run(setting: Setting) -> Iterator[Line]:
    config = setting.config("7B", layers=1, eye_layers=32 if setting.full else 9).vision_config  # 9: one sees it all
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with setting.device:
        exact = Qwen2_5_VisionTransformerPretrainedModel(config).bfloat16().float().train()
        tower = Qwen2_5_VisionTransformerPretrainedModel(config).train()
    tower.load_state_dict(exact.state_dict())
    frequencies = tower.rotary_pos_emb.inv_freq.clone()
    tower.bfloat16()
    tower.rotary_pos_emb.inv_freq.data = frequencies  # the cast has rounded them
    for name, sides in (_FULL if setting.full else _SMALL).items():
        grids = torch.tensor([[1, *side] for side in sides], device=setting.device)
        pixels = torch.randn(int(grids.prod(dim=1).sum()), 1176, generator=torch.Generator().manual_seed(0))
        yield from _image(setting, name, tower, exact, pixels.to(setting.device), grids)


def _image(setting: Setting, name: str, tower: Any, exact: Any, pixels: Tensor, grids: Tensor) -> Iterator[Line]:
    right = passed(exact, pixels, grids, batched=False)
    loop, batched = (passed(tower, pixels, grids, batched=on) for on in (False, True))
    for number, what in enumerate(("features", "gradients")):
        bound = SLACK * apart(loop[number], right[number])
        source = f"{SLACK} times the loop's own error in bfloat16"
        yield at_most(
            f"{name}, batched: {what}, from float32", apart(batched[number], right[number]), bound, "", source
        )
    del right, loop, batched
    ways = {
        label: partial(passed, tower, pixels, grids, batched=on) for label, on in (("loop", False), ("batched", True))
    }
    times = by_turns(setting.device, ways, 3 if setting.full else 1)
    if not setting.on_gpu:
        yield skipped(
            f"{name}: both ways", ON_A_GPU_ONLY, ", ".join(f"{way} {spent:.3g} s" for way, spent in times.items())
        )
        return
    peaks = {way: peak_bytes(setting.device, go) / GIB for way, go in ways.items()}
    figure = "; ".join(f"{way} {times[way]:.3g} s, {peaks[way]:.2g} GiB" for way in ways)
    yield at_most(
        f"{name}: batched, of the loop's time",
        times["batched"] / times["loop"],
        1.0,
        "",
        f"else it has no use; {figure}",
    )
    fits = peaks["batched"] <= 1.2 * peaks["loop"]
    yield holds(
        f"{name}: both ways", figure, "at most 1.2 of the loop's memory", fits, "a reordered copy of q, k and v"
    )


def passed(tower: Any, pixels: Tensor, grids: Tensor, *, batched: bool) -> tuple[Tensor, Tensor]:
    """Features, and the gradients of a weighted sum of them."""
    assert batch_windows(tower, batched) is batched
    features = tower(pixels.to(tower.dtype), grid_thw=grids).pooler_output
    weights = torch.linspace(-1, 1, features.size(-1), device=features.device)
    (features.float() * weights).sum().backward()
    return features.detach(), gradients(tower)
