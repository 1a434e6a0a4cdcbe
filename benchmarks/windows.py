"""The windows of the vision tower in few attention calls, beside one call per window: `python -m benchmarks.windows`.

Forward and backward of the attention of one block within windows, without the projections around it, as wide as in
Qwen2.5-VL (hidden 1280, 16 heads, windows of 112 pixels), in float32, both ways by turns; medians. "calls" are those of
the attention in the tower's 32 blocks, 4 of them within images. `--tower N`: whole towers of N blocks instead, with the
projections and MLPs that both ways have in common.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_window_index

from adora_vl.dedup.batched_windows import batch_windows

# Height and width in patches, four to an image token; the edges of all but the last cut windows
IMAGES = {"300": [(30, 40)], "1000": [(50, 80)], "8 x 300": [(30, 40)] * 8, "1024": [(64, 64)]}


class Given(nn.Module):
    """In the place of the projection to queries, keys and values."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(patches, 3 * 1280))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.values


def build(blocks: int) -> Any:
    config = Qwen2_5_VLVisionConfig(
        depth=blocks, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=3584, window_size=112,
        fullatt_block_indexes=list(range(1, blocks, 8)),
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return Qwen2_5_VisionTransformerPretrainedModel(config).train()


def attention_alone(tower: Any, grids: Tensor) -> Callable[[], Tensor]:
    """The first block's attention with given queries, keys and values."""
    patches, attention = int(grids.prod(dim=1).sum()), tower.blocks[0].attn
    bounds = get_vision_window_index(grids, 2, 112, 14)[1]
    hidden, turned = torch.empty(patches, 1280), (torch.ones(patches, 80), torch.zeros(patches, 80))
    attention.qkv, attention.proj = Given(patches), nn.Identity()
    return lambda: attention(hidden, cu_seqlens=bounds, position_embeddings=turned)


def timed(tower: Any, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds of forward and backward, and a gradient."""
    tower.zero_grad()
    start = time.perf_counter()
    run().square().mean().backward()
    gradients = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return time.perf_counter() - start, gradients[0].clone()


def calls(grids: Tensor, batched: bool) -> int:
    windows, images = get_vision_window_index(grids, 2, 112, 14)[1].diff(), grids.prod(dim=1)
    within, whole = (len(sizes.unique()) if batched else len(sizes) for sizes in (windows, images))
    return 28 * within + 4 * whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'image tokens':<14}{'calls':>7}{'batched':>9}{'loop s':>9}{'batched s':>11}{'ratio':>7}{'apart':>10}")
    for name, sides in IMAGES.items():
        grids = torch.tensor([[1, *side] for side in sides])
        tower = build(options.tower or 1)
        pixels = torch.randn(int(grids.prod(dim=1).sum()), 1176)
        run = (
            (lambda eye=tower, p=pixels, g=grids: eye(p, grid_thw=g).pooler_output)
            if options.tower
            else attention_alone(tower, grids)
        )
        times: dict[bool, list[float]] = {False: [], True: []}
        gradient: dict[bool, Tensor] = {}
        for _ in range(options.repeats):
            for on in (False, True):
                batch_windows(tower, on)
                seconds, gradient[on] = timed(tower, run)
                times[on].append(seconds)
        loop, batched = (statistics.median(times[on]) for on in (False, True))
        apart = float((gradient[True] - gradient[False]).norm() / gradient[False].norm())
        number = [calls(grids, on) for on in (False, True)]
        print(f"{name:<14}{number[0]:>7}{number[1]:>9}{loop:>9.3f}{batched:>11.3f}", end="")
        print(f"{batched / loop:>7.2f}{apart:>10.1e}", flush=True)


if __name__ == "__main__":
    main()
