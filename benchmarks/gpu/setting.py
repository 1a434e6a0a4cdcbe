"""The setting of a check: the device, and models with few layers and random weights.

The models have the published shapes at the full size.
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
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from adora_vl.models.load import load_config
from adora_vl.models.shape import SHAPES_FOLDER
from adora_vl.packing.split_attention import disable_cudnn_attention
from adora_vl.utils.files import GIB
from benchmarks.gpu.table import CheckLine, failed_line, one_line, skipped_line

SMALL_VOCABULARY = 1000
_PIECE_ELEMENTS = 2**24  # of a tensor that is compared in float64
INTENDED_CARD_GIB = 75  # the sizes of the checks fit a card of 80 GB
JUDGED_ON_GPU_ONLY = "seconds are judged on a GPU only"
WRONG_BUILD = skipped_line(
    "all of it", "the vLLM that is installed is the CPU build; a GPU wants `pip install vllm`"
)


@dataclass(frozen=True)
class Setting:
    """Where a check runs, and at which size."""

    # The published widths; else widths that a CPU takes in seconds, with heads of the same size.
    full: bool
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def config(
        self, size: str, *, layers: int, eye_layers: int = 1, vocabulary: int | None = None
    ) -> PretrainedConfig:
        """Return the config of Qwen2.5-VL-`size` with these numbers of text and vision layers."""
        config = load_config(str(SHAPES_FOLDER / f"Qwen2.5-VL-{size}-Instruct"))
        text = config.text_config
        vision = config.vision_config
        if not self.full:
            heads = {"3B": 2, "7B": 4}[size]  # of 128 numbers each, as in the published models
            text.hidden_size = 128 * heads
            text.intermediate_size = 256 * heads
            text.num_attention_heads = heads
            text.num_key_value_heads = heads // 2
            text.vocab_size = SMALL_VOCABULARY
            # heads of 80
            vision.hidden_size = 160
            vision.num_heads = 2
            vision.intermediate_size = 320
            vision.out_hidden_size = text.hidden_size
        text.num_hidden_layers = layers
        text.layer_types = ["full_attention"] * layers
        text.max_window_layers = layers
        vision.depth = eye_layers
        vision.fullatt_block_indexes = [n for n in vision.fullatt_block_indexes if n < eye_layers]
        if vocabulary is not None and self.full:
            text.vocab_size = vocabulary
        return config

    def model(self, config: PretrainedConfig, dtype: torch.dtype, attention: str = "sdpa") -> Any:
        """Build a model with random weights, the same for the same config and device.

        The config stays as it is.
        """
        config = copy.deepcopy(config)
        torch.manual_seed(0)
        with self.device:
            return AutoModelForImageTextToText.from_config(
                config, dtype=dtype, attn_implementation=attention
            )


def float32_copy(model: PreTrainedModel) -> Any:
    """Return another model with the same (rounded) weights that computes in float32.

    The copy uses PyTorch's attention, because flash attention does not compute in float32.
    """
    with next(model.parameters()).device:
        copied_model = AutoModelForImageTextToText.from_config(
            copy.deepcopy(model.config), dtype=torch.float32, attn_implementation="sdpa"
        )
    copied_model.load_state_dict(model.state_dict())
    return copied_model


def current_setting(full: bool) -> Setting:
    """Return the setting of the first GPU, or of the CPU where there is none."""
    disable_cudnn_attention()  # as a run does
    return Setting(
        full, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )


def free_bytes(setting: Setting) -> int:
    """Return how many bytes the card has free; those of the host without a card."""
    if setting.on_gpu:
        return torch.cuda.mem_get_info(setting.device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lines_while_memory_lasts(
    setting: Setting, title: str, lines: Iterator[CheckLine]
) -> Iterator[CheckLine]:
    """Yield the lines of a check until memory runs out.

    A last line then says so: a failure on a card of 80 GB, for which the sizes are chosen, else
    skipped.
    """
    try:
        yield from lines
    except torch.OutOfMemoryError as error:
        card_gib = 0.0
        if setting.on_gpu:
            card_gib = torch.cuda.get_device_properties(setting.device).total_memory / GIB
        too_small = f"does not fit into a card of {card_gib:.0f} GiB"
        line = (
            failed_line(f"{title}: the rest", one_line(error))
            if card_gib >= INTENDED_CARD_GIB
            else skipped_line(f"{title}: the rest", too_small)
        )
    else:
        return
    gc.collect()  # what the lines held; their error is gone with its block
    if setting.on_gpu:
        torch.cuda.empty_cache()
    yield line


def random_token_ids(setting: Setting, rows: int, length: int, vocabulary: int) -> Tensor:
    """Return random ids of ordinary tokens, (rows, length), the same in every call."""
    ids = torch.randint(
        1, min(vocabulary, 150_000), (rows, length), generator=torch.Generator().manual_seed(0)
    )
    return ids.to(setting.device)


def take_gradients(model: nn.Module) -> Tensor:
    """Return all gradients as one float32 vector on the CPU, and clear the model's own.

    Several of a 7B model's width do not fit a card of 24 GB.
    """
    parts = [
        parameter.grad.flatten().float().cpu()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def relative_distance(values: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference as a share of the norm of `reference`.

    It is computed in float64, a piece at a time.
    """
    squared_distance = 0.0
    squared_norm = 0.0
    parts = zip(
        values.flatten().split(_PIECE_ELEMENTS),
        reference.flatten().split(_PIECE_ELEMENTS),
        strict=True,
    )
    for part, reference_part in parts:
        squared_distance += float((part.double() - reference_part.double()).square().sum())
        squared_norm += float(reference_part.double().square().sum())
    return math.sqrt(squared_distance / squared_norm) if squared_norm else math.nan


@contextmanager
def process_group(setting: Setting) -> Iterator[None]:
    """Give a process group of this one process, as DeepSpeed needs it."""
    from adora_vl.utils.launch import prepare_engine_environment

    prepare_engine_environment()  # a free port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("nccl" if setting.on_gpu else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
