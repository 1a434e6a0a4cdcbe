"""The memory formulas against what torch itself counts in the policy's real forward and backward pass, on a CPU."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
from trl.trainer import utils as trl_utils

from adora_vl.memory import activations
from adora_vl.memory.activations import Dtypes, MicroBatch, head_saved, head_transient, saved
from adora_vl.memory.model import ModelShape, describe
from adora_vl.models.components import freeze
from adora_vl.models.tiny.build import PRETRAINED

SMALL = MicroBatch(sequences=4, prompt_tokens=76, completion_tokens=40, image_tokens=16)
LONG = MicroBatch(sequences=8, prompt_tokens=264, completion_tokens=300, image_tokens=64)
WIDE = MicroBatch(sequences=2, prompt_tokens=656, completion_tokens=600, image_tokens=256)


class Policy:
    """The tiny model as TRL trains it, with one micro-batch of `size`, and the formulas' inputs for it."""

    def __init__(
        self,
        size: MicroBatch,
        *,
        checkpointing: bool = False,
        dtype: torch.dtype = torch.float32,
        frozen: tuple[str, ...] = (),
        kv_heads: int = 1,
        padded: bool = True,
    ) -> None:
        config = AutoConfig.from_pretrained(PRETRAINED)
        config.text_config.num_key_value_heads = kv_heads
        self.size, self.checkpointing, self.padded = size, checkpointing, padded
        self.model = Qwen2_5_VLForConditionalGeneration(config).to(dtype).train()
        freeze(self.model, frozen)
        trl_utils.add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        self.shape: ModelShape = describe(config, dtype=str(dtype).removeprefix("torch."), frozen=frozen)
        self.dtypes = Dtypes(dtype.itemsize, dtype.itemsize)
        self.inputs, self.labels = self._batch(config)

    def _batch(self, config: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        size, side = self.size, int(self.size.image_tokens**0.5) * 2
        image = [config.vision_start_token_id, *[config.image_token_id] * size.image_tokens, config.vision_end_token_id]
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
            "pixel_values": torch.randn(size.patches(2), self.shape.patch_values),
            "image_grid_thw": torch.tensor([[1, side, side]] * size.sequences),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }, labels

    def forward(self) -> torch.Tensor:
        log_probs: torch.Tensor = self.model(**self.inputs, labels=self.labels, fused_lm_head=True).log_probs
        return log_probs

    def kept(self) -> int:
        """By the formulas."""
        parts = saved(self.shape, self.size, self.dtypes, checkpointing=self.checkpointing, masked=self.padded)
        return parts.text + parts.vision + head_saved(self.shape, self.size, self.dtypes, compact=False)

    def measured_kept(self) -> int:
        """Distinct storages that autograd still holds after the forward pass, but for weights and inputs."""
        given = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.inputs.values())}
        held: list[weakref.ref[torch.Tensor]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held.append(weakref.ref(tensor))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = self.forward()
        alive = [tensor for tensor in (reference() for reference in held) if tensor is not None]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        assert result.requires_grad
        return sum(size for place, size in sizes.items() if place not in given)


CASES = {
    "small": (Policy, {"size": SMALL}, 0.02),
    "long": (Policy, {"size": LONG}, 0.02),
    "wide images": (Policy, {"size": WIDE}, 0.02),
    "checkpointing": (Policy, {"size": LONG, "checkpointing": True}, 0.02),
    "three heads of keys": (Policy, {"size": LONG, "kv_heads": 3}, 0.02),
    "without padding": (Policy, {"size": LONG, "padded": False}, 0.02),
    "bfloat16": (Policy, {"size": LONG, "dtype": torch.bfloat16}, 0.03),
    "bfloat16 and checkpointing": (Policy, {"size": LONG, "dtype": torch.bfloat16, "checkpointing": True}, 0.03),
    "frozen tower": (Policy, {"size": LONG, "frozen": ("vision_tower",)}, 0.02),
    "frozen tower and projector": (
        Policy,
        {"size": LONG, "frozen": ("vision_tower", "projector"), "checkpointing": True},
        0.03,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_keeps_is_what_the_formulas_say(name):
    make, settings, tolerance = CASES[name]
    policy = make(**settings)
    measured = policy.measured_kept()
    assert policy.kept() == pytest.approx(measured, rel=tolerance), f"{policy.kept() / measured - 1:+.1%}"


@contextlib.contextmanager
def head_tile(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> Any:
    """Another width of TRL's tile of logits: at its own the LM head dwarfs every layer of a model this small."""
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", vocabulary)
    monkeypatch.setattr(activations, "TILE_VOCABULARY", vocabulary)
    yield


@pytest.mark.parametrize("tile", [32768, 64], ids=["the head is the peak", "a layer is the peak"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("size", [SMALL, LONG, WIDE], ids=["small", "long", "wide"])
def test_the_peak_of_a_forward_and_backward_pass(size, checkpointing, tile, monkeypatch):
    """The tracker sees every allocation of torch, so this is the whole peak: weights, inputs, kept and passing."""
    with head_tile(monkeypatch, tile):
        policy = Policy(size, checkpointing=checkpointing)
        tracker = MemTracker()
        tracker.track_external(policy.model, *policy.inputs.values())
        with tracker:
            policy.forward().sum().backward()
        measured = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
        parts = saved(policy.shape, size, policy.dtypes, checkpointing=checkpointing)
        head = head_transient(policy.shape, size, policy.dtypes, compact=False)
    given = policy.shape.total * 4 + sum(t.nbytes for t in policy.inputs.values())
    predicted = given + policy.kept() + max(head, parts.recomputed + parts.layer_gradients)
    print(f"{predicted / measured - 1:+.1%}", "head" if head > parts.recomputed + parts.layer_gradients else "layer")
    assert predicted == pytest.approx(measured, rel=0.1), f"{predicted / measured - 1:+.1%}"
