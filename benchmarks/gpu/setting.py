"""Where and how large: the device, and models of the published shapes with few layers and random
weights.
"""

import copy
import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PretrainedConfig

from adora_vl.models.load import load_config
from adora_vl.models.shape import SHAPES
from adora_vl.packing.split_attention import disable_cudnn_attention
from adora_vl.utils.files import GIB
from benchmarks.gpu.table import Line, failed, one_line, skipped

SMALL_VOCABULARY = 1000
_PIECE = 2**24  # elements
MADE_FOR = 75  # GiB: the sizes of the checks fit a card of 80 GB
ON_A_GPU_ONLY = "seconds are judged on a GPU only"
WRONG_BUILD = skipped(
    "all of it", "the vLLM that is installed is the CPU build; a GPU wants `pip install vllm`"
)


@dataclass(frozen=True)
class Setting:
    """`full`: the published widths; else widths that a CPU takes in seconds, with the same size of
    head.
    """

    full: bool
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def config(
        self, size: str, *, layers: int, eye_layers: int = 1, vocabulary: int | None = None
    ) -> PretrainedConfig:
        """The config of Qwen2.5-VL-`size` with so many text and vision layers."""
        config = load_config(str(SHAPES / f"Qwen2.5-VL-{size}-Instruct"))
        text = config.text_config
        eye = config.vision_config
        if not self.full:
            heads = {"3B": 2, "7B": 4}[size]  # of 128 numbers each, as in the published models
            text.hidden_size = 128 * heads
            text.intermediate_size = 256 * heads
            text.num_attention_heads = heads
            text.num_key_value_heads = heads // 2
            text.vocab_size = SMALL_VOCABULARY
            # heads of 80
            eye.hidden_size = 160
            eye.num_heads = 2
            eye.intermediate_size = 320
            eye.out_hidden_size = text.hidden_size
        text.num_hidden_layers = layers
        text.layer_types = ["full_attention"] * layers
        text.max_window_layers = layers
        eye.depth = eye_layers
        eye.fullatt_block_indexes = [n for n in eye.fullatt_block_indexes if n < eye_layers]
        if vocabulary is not None and self.full:
            text.vocab_size = vocabulary
        return config

    def model(self, config: PretrainedConfig, dtype: torch.dtype, attention: str = "sdpa") -> Any:
        """A model with random weights, the same for the same config and device.

        The config stays as it is.
        """
        config = copy.deepcopy(config)
        torch.manual_seed(0)
        with self.device:
            return AutoModelForImageTextToText.from_config(
                config, dtype=dtype, attn_implementation=attention
            )


def in_float32(model: Any) -> Any:
    """Another model with the same (rounded) weights, which computes in float32; flash attention
    cannot.
    """
    with next(model.parameters()).device:
        copied_model = AutoModelForImageTextToText.from_config(
            copy.deepcopy(model.config), dtype=torch.float32, attn_implementation="sdpa"
        )
    copied_model.load_state_dict(model.state_dict())
    return copied_model


def here(full: bool) -> Setting:
    """The first GPU, or the CPU where there is none."""
    disable_cudnn_attention()  # as a run does
    return Setting(
        full, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )


def free_bytes(setting: Setting) -> int:
    """What a card, or the host without one, has free."""
    if setting.on_gpu:
        return torch.cuda.mem_get_info(setting.device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def as_far_as_it_fits(setting: Setting, what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """The lines.

    Where memory runs out, one says so in place of the rest: a failure on a card of 80 GB alone.
    """
    try:
        yield from lines
    except torch.OutOfMemoryError as error:
        size = (
            torch.cuda.get_device_properties(setting.device).total_memory / GIB
            if setting.on_gpu
            else 0.0
        )
        small = f"does not fit into a card of {size:.0f} GiB"
        line = (
            failed(f"{what}: the rest", one_line(error))
            if size >= MADE_FOR
            else skipped(f"{what}: the rest", small)
        )
    else:
        return
    gc.collect()  # what the lines held; their error is gone with its block
    if setting.on_gpu:
        torch.cuda.empty_cache()
    yield line


def words(setting: Setting, rows: int, length: int, vocabulary: int) -> Tensor:
    """Random ids of ordinary tokens, (rows, length)."""
    ids = torch.randint(
        1, min(vocabulary, 150_000), (rows, length), generator=torch.Generator().manual_seed(0)
    )
    return ids.to(setting.device)


def gradients(model: nn.Module) -> Tensor:
    """All gradients as one float32 vector on the CPU, since several of a 7B model's width do not
    fit a card of 24 GB; the model's own are cleared.
    """
    parts = [
        parameter.grad.flatten().float().cpu()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, as a share of the norm of `other`; in float64, a piece at a time."""
    gap = size = 0.0
    for part, right in zip(one.flatten().split(_PIECE), other.flatten().split(_PIECE), strict=True):
        gap += float((part.double() - right.double()).square().sum())
        size += float(right.double().square().sum())
    return math.sqrt(gap / size) if size else math.nan


@contextmanager
def process_group(setting: Setting) -> Iterator[None]:
    """A group of this one process, as DeepSpeed wants it."""
    from adora_vl.utils.launch import prepare_engine_environment

    prepare_engine_environment()  # a free port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("nccl" if setting.on_gpu else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
