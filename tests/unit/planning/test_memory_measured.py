"""The memory formulas against what torch counts.

It counts in the policy's real forward and backward pass, on a CPU.
"""

import contextlib
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl.trainer import utils as trl_utils

from adora_vl.builtin.tiny_vl import build_config
from adora_vl.models import activations
from adora_vl.models.activations import (
    DtypeBytes,
    PassSize,
    head_saved_bytes,
    head_transient_bytes,
    saved_bytes,
)
from adora_vl.models.families import freeze
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.shape import model_shape
from adora_vl.planning.memory import PlannedMicroBatch

pytestmark = pytest.mark.slow

SMALL_BATCH = PlannedMicroBatch(
    sequences=4,
    prompt_tokens=76,
    completion_tokens=40,
    image_tokens=16,
)
LONG_BATCH = PlannedMicroBatch(
    sequences=3,
    prompt_tokens=264,
    completion_tokens=300,
    image_tokens=64,
)
WIDE_BATCH = PlannedMicroBatch(
    sequences=1,
    prompt_tokens=656,
    completion_tokens=300,
    image_tokens=256,
)


class TinyPolicy:
    """The tiny model as TRL trains it, with one micro-batch of a given size.

    It also has the inputs of the formulas for them.
    """

    def __init__(
        self,
        size: PlannedMicroBatch,
        *,
        checkpointing: bool = False,
        dtype: torch.dtype = torch.float32,
        frozen: tuple[str, ...] = (),
        kv_heads: int = 1,
        padded: bool = True,
        lora: bool = False,
        family: str = "qwen2_5_vl",
    ) -> None:
        config = build_config(AutoTokenizer.from_pretrained(PRETRAINED_FOLDER), family)
        config.text_config.num_key_value_heads = kv_heads
        self.size = size
        self.checkpointing = checkpointing
        self.padded = padded
        self.model = AutoModelForImageTextToText.from_config(config).to(dtype).train()
        trl_utils.add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        adapter = (
            LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
            if lora
            else None
        )
        freeze(get_peft_model(self.model, adapter) if adapter else self.model, frozen)
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        self.shape = model_shape(
            config, dtype=str(dtype).removeprefix("torch."), frozen=frozen, peft_config=adapter
        )
        self.dtypes = DtypeBytes(dtype.itemsize, dtype.itemsize)
        self.measures = PassSize(
            rows=size.sequences,
            row_length=size.prompt_tokens + size.completion_tokens,
            scored_tokens=size.sequences * size.completion_tokens,
            image_patches=size.sequences * size.image_tokens * self.shape.merge_size**2,
            has_padding_mask=padded,
        )
        self.inputs, self.labels = self._batch(config)

    def _batch(self, config: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        size = self.size
        side = int(self.size.image_tokens**0.5) * 2
        image = [
            config.vision_start_token_id,
            *[config.image_token_id] * size.image_tokens,
            config.vision_end_token_id,
        ]
        row = [20] * (size.prompt_tokens - len(image)) + image + [21] * size.completion_tokens
        ids = torch.tensor([row] * size.sequences)
        mask = torch.ones_like(ids)
        if self.padded:
            mask[0, :2] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : size.prompt_tokens] = -100
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "pixel_values": torch.randn(self.measures.image_patches, self.shape.patch_values),
            "image_grid_thw": torch.tensor([[1, side, side]] * size.sequences),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }, labels

    def forward(self) -> torch.Tensor:
        log_probs: torch.Tensor = self.model(
            **self.inputs, labels=self.labels, fused_lm_head=True
        ).log_probs
        return log_probs

    def kept(self) -> int:
        """Return the bytes that the formulas expect autograd to keep."""
        parts = saved_bytes(
            self.shape, self.measures, self.dtypes, checkpointing=self.checkpointing
        )
        head = head_saved_bytes(self.shape, self.measures, self.dtypes, on_gpu=False)
        return parts.text_bytes + parts.vision_bytes + head

    def measured_kept(self) -> int:
        """Return the bytes that autograd holds after the forward pass, without weights and inputs.

        A storage that several tensors share counts once.
        """
        input_pointers = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self.model.parameters(), *self.inputs.values())
        }
        tensors: list[weakref.ref[torch.Tensor]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(weakref.ref(tensor))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = self.forward()
        alive = [tensor for tensor in (reference() for reference in tensors) if tensor is not None]
        sizes = {}
        for tensor in alive:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        assert result.requires_grad
        return sum(size for pointer, size in sizes.items() if pointer not in input_pointers)


# the settings of a `TinyPolicy`, and by how much its memory may differ from the formulas
POLICY_AND_TOLERANCE_BY_CASE: dict[str, tuple[dict[str, Any], float]] = {
    "small": ({"size": SMALL_BATCH}, 0.02),
    "long": ({"size": LONG_BATCH}, 0.02),
    "wide images": ({"size": WIDE_BATCH}, 0.02),
    "checkpointing": ({"size": LONG_BATCH, "checkpointing": True}, 0.02),
    "three heads of keys": ({"size": LONG_BATCH, "kv_heads": 3}, 0.02),
    "without padding": ({"size": LONG_BATCH, "padded": False}, 0.02),
    "bfloat16": ({"size": LONG_BATCH, "dtype": torch.bfloat16}, 0.03),
    "bfloat16 and checkpointing": (
        {"size": LONG_BATCH, "dtype": torch.bfloat16, "checkpointing": True},
        0.03,
    ),
    "LoRA": ({"size": LONG_BATCH, "lora": True, "frozen": ("vision_tower",)}, 0.2),
    "frozen tower": ({"size": LONG_BATCH, "frozen": ("vision_tower",)}, 0.02),
    "frozen tower and projector": (
        {"size": LONG_BATCH, "frozen": ("vision_tower", "projector"), "checkpointing": True},
        0.03,
    ),
    "Qwen3-VL": ({"size": LONG_BATCH, "family": "qwen3_vl"}, 0.02),
    "Qwen3-VL, wide images": ({"size": WIDE_BATCH, "family": "qwen3_vl"}, 0.02),
    "Qwen3-VL, three heads of keys": (
        {"size": LONG_BATCH, "kv_heads": 3, "family": "qwen3_vl"},
        0.02,
    ),
    "Qwen3-VL, bfloat16": (
        {"size": LONG_BATCH, "dtype": torch.bfloat16, "family": "qwen3_vl"},
        0.03,
    ),
    "Qwen3-VL, checkpointing": (
        {"size": LONG_BATCH, "checkpointing": True, "family": "qwen3_vl"},
        0.02,
    ),
    "Qwen3-VL, frozen tower": (
        {"size": WIDE_BATCH, "frozen": ("vision_tower",), "family": "qwen3_vl"},
        0.02,
    ),
}


def test_what_autograd_keeps_is_what_the_formulas_say(subtests):
    """The predicted bytes that a forward pass keeps are the measured ones, within a tolerance.

    They are measured by the storages that are still alive.
    """
    for name, (settings, tolerance) in POLICY_AND_TOLERANCE_BY_CASE.items():
        with subtests.test(name):
            policy = TinyPolicy(**settings)
            relative_error = policy.kept() / policy.measured_kept() - 1
            print(f"{name}: {relative_error:+.1%}")
            assert abs(relative_error) <= tolerance, f"{relative_error:+.1%}"


@contextlib.contextmanager
def head_tile(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> Any:
    """Give TRL's tile of logits another width.

    At its own width the LM head needs far more memory than any layer of a model this small.
    """
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", vocabulary)
    monkeypatch.setattr(activations, "HEAD_TILE_VOCABULARY", vocabulary)
    yield


# By the width of the tile the LM head is the peak, or a layer is.
PEAK_CASES = list(product((SMALL_BATCH, WIDE_BATCH), (False, True), (32768, 64)))


def test_the_peak_of_a_forward_and_backward_pass(monkeypatch, subtests):
    """The predicted peak is the measured one, which has every allocation of torch.

    That is weights, inputs, and tensors that are kept or soon freed.
    """
    for size, checkpointing, tile in PEAK_CASES:
        with subtests.test(f"{size} {checkpointing=} {tile=}"):
            check_peak(size, checkpointing, tile, monkeypatch)


def check_peak(size, checkpointing, tile, monkeypatch):
    """Check that the predicted peak of a forward and backward pass is within 2 % of a measured one.

    `tile`: the `head_tile` under which both are taken. The prediction is the sum of inputs, of what
    the forward pass keeps, and of the larger of two moments: the output layer, or a layer's
    backward pass.
    """
    with head_tile(monkeypatch, tile):
        policy = TinyPolicy(size, checkpointing=checkpointing)
        tracker = MemTracker()
        tracker.track_external(policy.model, *policy.inputs.values())
        with tracker:
            policy.forward().sum().backward()
        measured = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
        sizes = policy.measures
        parts = saved_bytes(policy.shape, sizes, policy.dtypes, checkpointing=checkpointing)
        head = head_transient_bytes(policy.shape, sizes, policy.dtypes, on_gpu=False)
    input_bytes = policy.shape.total_parameters * 4 + sum(t.nbytes for t in policy.inputs.values())
    predicted = (
        input_bytes
        + policy.kept()
        + max(head, parts.largest_recomputed_bytes + parts.layer_gradient_bytes)
    )
    print(f"{predicted / measured - 1:+.1%}")
    assert predicted == pytest.approx(measured, rel=0.02), f"{predicted / measured - 1:+.1%}"
