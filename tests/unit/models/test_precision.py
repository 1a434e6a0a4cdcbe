"""Computed buffers that a cast has rounded are found and restored, and nothing else of a model."""

import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from adora_vl.models import precision
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.precision import RefuseWrongBuffers, describe_wrong_buffers, restore_buffers
from adora_vl.utils.errors import RunError

# The rotary buffers of the tiny model.
ROTARY_BUFFERS = [
    f"model.{part}.{name}"
    for part in ("visual.rotary_pos_emb", "language_model.rotary_emb")
    for name in ("inv_freq", "original_inv_freq")
]


def load_tiny_model() -> Qwen2_5_VLForConditionalGeneration:
    """Load the shipped tiny model."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        PRETRAINED_FOLDER, dtype=torch.float32
    )


# casts as a user's script or a library does them
CAST_BY_DTYPE = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.half(),
    "rounded and back": lambda model: model.to(torch.bfloat16).to(
        torch.float32
    ),  # the dtype alone does not tell
}


def test_a_cast_model_gets_its_constants_back_and_keeps_its_weights(subtests):
    """A cast rounds the rotary buffers; they are restored to the bit and in their own dtype."""
    for (cast_name, cast_model), lora in product(CAST_BY_DTYPE.items(), (False, True)):
        with subtests.test(f"{cast_name} {lora}"):
            model = load_tiny_model()
            if lora:
                model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
            expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
            assert describe_wrong_buffers(model) == []
            cast_model(model)
            weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
            assert len(describe_wrong_buffers(model)) == len(ROTARY_BUFFERS)
            restore_buffers(model)
            assert describe_wrong_buffers(model) == []
            restored = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
            restore_buffers(model)
            assert restored == {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
            for name, buffer in model.named_buffers():
                assert buffer.dtype == expected[name].dtype
                assert torch.equal(buffer, expected[name])
            for name, parameter in model.named_parameters():
                assert parameter.dtype == weights[name].dtype
                assert torch.equal(parameter, weights[name])


ROPE_SCALINGS = [
    {"rope_type": "default"},
    *(
        {"rope_type": name, "factor": factor}
        for name, factor in (("linear", 4.0), ("dynamic", 2.0), ("yarn", 4.0))
    ),
]


@settings(max_examples=30)
@given(
    half_head_size=st.integers(4, 64),
    theta=st.floats(1e3, 1e7),
    scaling=st.sampled_from(ROPE_SCALINGS),
    distance=st.integers(1, 8000),
)
def test_angles_are_right_at_every_distance_and_for_every_scaling(
    half_head_size, theta, scaling, distance
):
    """The angle of position `distance` is the one before the cast, for each way of scaling."""
    rope = {**scaling, "rope_theta": theta}
    config = Qwen2Config(
        hidden_size=4 * half_head_size,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters=rope,
    )
    rotary = Qwen2RotaryEmbedding(config)
    expected = rotary.inv_freq.double() * distance
    module_in_bfloat16 = nn.ModuleDict({"rotary": rotary}).to(torch.bfloat16)
    restore_buffers(module_in_bfloat16)
    assert torch.equal(rotary.inv_freq.double() * distance, expected)
    assert describe_wrong_buffers(module_in_bfloat16) == []


class BuiltFromMoreThanItsConfig(nn.Module):
    """A rotary module whose constructor takes more than a config.

    It also has a buffer that a checkpoint contains, and one of whole numbers.
    """

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.register_buffer("inv_freq", scale * torch.rand(size), persistent=False)
        self.register_buffer("running_mean", torch.rand(size))
        self.register_buffer("ids", torch.arange(size), persistent=False)


def test_a_rotary_module_of_a_kind_that_we_cannot_build_is_refused_and_not_guessed():
    """The wrong buffer of a rotary module that we cannot build is reported, and not replaced.

    It stays as the cast has left it.
    """
    model = nn.ModuleDict({"own": BuiltFromMoreThanItsConfig(4, scale=2.0)})
    assert describe_wrong_buffers(model) == []
    cast_copy = copy.deepcopy(model).to(torch.bfloat16)
    model.to(torch.bfloat16)
    assert describe_wrong_buffers(model) == ["own.inv_freq is bfloat16, not float32"]
    restore_buffers(model)
    for buffer, cast_buffer in zip(model.buffers(), cast_copy.buffers(), strict=True):
        assert torch.equal(buffer, cast_buffer)


def test_training_is_refused_in_one_line_that_names_the_buffer(subtests):
    """A policy or reference that was cast ends the run, at its begin or before an update."""
    for role, event in product(
        ("policy", "reference"), ("on_train_begin", "on_pre_optimizer_step")
    ):
        with subtests.test(f"{role} {event}"):
            models = {"policy": load_tiny_model(), "reference": load_tiny_model()}
            guard = RefuseWrongBuffers(models)
            guard.on_train_begin(args=None, state=None, control=None)
            models[role].to(torch.bfloat16)
            hook = getattr(guard, event)
            with pytest.raises(RunError) as refusal:
                hook(args=None, state=None, control=None)
            text = str(refusal.value)
            # the tiny model has four rotary buffers
            assert text.startswith(
                f"before the first step: {role}: {ROTARY_BUFFERS[0]} is bfloat16, not float32 (and 3 more)"
            )
            assert "\n" not in text
            assert precision.CAST_REMEDY in text
    without_reference = RefuseWrongBuffers({"policy": load_tiny_model(), "reference": None})
    without_reference.on_train_begin(args=None, state=None, control=None)


def test_nothing_of_it_is_saved(tmp_path):
    """Computed buffers are computed when a model is loaded, so no saved model has rounded ones."""
    model = load_tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert not [name for name in model.state_dict() if "inv_freq" in name]
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert describe_wrong_buffers(loaded) == []
