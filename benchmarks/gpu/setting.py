"""Where and how large: the device, and models of the published shapes with few layers and random weights."""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, PretrainedConfig

from adora_vl.memory.model import SHAPES
from adora_vl.models.load import load_config

SMALL_VOCABULARY = 1000
ON_A_GPU_ONLY = "seconds are judged on a GPU only"


@dataclass(frozen=True)
class Setting:
    """`full`: the published widths; else widths that a CPU takes in seconds, with the same size of head."""

    full: bool
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def config(self, size: str, *, layers: int, eye_layers: int = 1, vocabulary: int | None = None) -> PretrainedConfig:
        """Of Qwen2.5-VL-`size`, with so many layers for the text and the eye."""
        config = load_config(str(SHAPES / f"Qwen2.5-VL-{size}-Instruct"))
        text, eye = config.text_config, config.vision_config
        if not self.full:
            heads = {"3B": 2, "7B": 4}[size]  # of 128 numbers each, as in the published models
            text.hidden_size, text.intermediate_size = 128 * heads, 256 * heads
            text.num_attention_heads, text.num_key_value_heads = heads, heads // 2
            text.vocab_size = SMALL_VOCABULARY
            eye.hidden_size, eye.num_heads, eye.intermediate_size = 160, 2, 320  # heads of 80
            eye.out_hidden_size = text.hidden_size
        text.num_hidden_layers, text.layer_types = layers, ["full_attention"] * layers
        text.max_window_layers = layers
        eye.depth, eye.fullatt_block_indexes = eye_layers, [n for n in eye.fullatt_block_indexes if n < eye_layers]
        if vocabulary is not None and self.full:
            text.vocab_size = vocabulary
        return config

    def model(self, config: PretrainedConfig, dtype: torch.dtype, attention: str = "sdpa") -> Any:
        """With random weights, the same for the same config and device. The config stays as it is."""
        config = copy.deepcopy(config)
        torch.manual_seed(0)
        with self.device:
            return AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=attention)


def in_float32(model: Any) -> Any:
    """Another model with the same (rounded) weights, which computes in float32; flash attention cannot."""
    with next(model.parameters()).device:
        other = AutoModelForImageTextToText.from_config(
            copy.deepcopy(model.config), dtype=torch.float32, attn_implementation="sdpa"
        )
    other.load_state_dict(model.state_dict())
    return other


def here(full: bool) -> Setting:
    """The first GPU, or the CPU where there is none."""
    return Setting(full, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def words(setting: Setting, rows: int, length: int, vocabulary: int) -> Tensor:
    """Random ids of ordinary tokens, (rows, length)."""
    ids = torch.randint(1, min(vocabulary, 150_000), (rows, length), generator=torch.Generator().manual_seed(0))
    return ids.to(setting.device)


def gradients(model: nn.Module) -> Tensor:
    """All of them as one float32 vector on the model's device; the model has none afterwards."""
    parts = [parameter.grad.flatten().float() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, of the norm of `other`."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    """Until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def by_turns(device: torch.device, ways: Mapping[str, Callable[..., object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one run that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            spent = seconds_of(device, run)
            if turn:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """The most that tensors took on top of what was there: torch's allocator on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with NewTensors() as new:
        run()
    return new.peak


class NewTensors(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there; `peak`: the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._sizes = 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (number := _storage(leaf)) not in given | self._sizes.keys():
                self._sizes[number] = leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self._sizes.pop, number, None)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def process_group(setting: Setting) -> Iterator[None]:
    """A group of this one process, as DeepSpeed wants it."""
    import os

    from adora_vl.rollout.environment import prepare_engine_environment

    prepare_engine_environment()  # a free port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("nccl" if setting.on_gpu else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
