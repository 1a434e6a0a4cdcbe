"""bfloat16 under ZeRO-3, with real DeepSpeed: the constants of policy and reference are those of a
plain model.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from adora_vl.models.load import PRETRAINED
from tests.integration.precision_run import POSITIONS, constants
from tests.support.launch import launch

pytestmark = pytest.mark.slow
ROLES = ("policy", "reference")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `precision_run.py` saw in one process.

    ZeRO-3 shards and casts the same in one process as in eight.
    """
    folder: Path = tmp_path_factory.mktemp("precision")
    launch(
        "cpu_zero3",
        "--num_processes",
        "1",
        "--mixed_precision",
        "bf16",
        "-m",
        "tests.integration.precision_run",
        str(folder),
        "--config",
        "configs/train/smoke_cpu.yaml",
        "--output_dir",
        str(folder / "run"),
        "--use_vllm",
        "false",
        "--bf16",
        "true",
        "--dtype",
        "bfloat16",
        "--beta",
        "0.04",
        "--adora_synthetic_rows",
        "64",
        "--num_generations",
        "4",
        "--per_device_train_batch_size",
        "8",
    )
    return json.loads((folder / "facts.json").read_text()), load_file(
        folder / "tensors.safetensors"
    )


@pytest.fixture(scope="module")
def plain() -> Qwen2_5_VLForConditionalGeneration:
    """The same bfloat16 weights, loaded without DeepSpeed: its rotary frequencies are float32."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        PRETRAINED, dtype=torch.bfloat16
    ).eval()
    assert {b.dtype for name, b in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    return model


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("role", ROLES)
def test_every_constant_is_that_of_a_plain_model(sharded, plain, role):
    facts, tensors = sharded
    assert facts["sharded"]
    assert facts["dtype"] == "torch.bfloat16"
    actual = part(tensors, f"{role}/constants/")
    expected = constants(plain)
    assert actual.keys() == expected.keys()
    assert {name: value.dtype for name, value in actual.items()} == {
        n: v.dtype for n, v in expected.items()
    }
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("position", POSITIONS)
def test_log_probabilities_far_from_the_start_are_those_of_float32_angles(sharded, role, position):
    """Three passes of one process over the same tokens agree to the bit.

    Between them the angles alone may change.
    """
    built = sharded[1][f"{role}/built/{position}"]
    right = sharded[1][f"{role}/float32/{position}"]
    rounded = sharded[1][f"{role}/rounded/{position}"]
    assert not torch.equal(rounded, right)
    assert torch.equal(built, right)


def test_training_would_begin_with_them_and_is_refused_with_rounded_ones(sharded):
    refusals = sharded[0]["refusals"]
    assert refusals["built"] == ""
    for role in ROLES:
        assert refusals[role].startswith(f"before the first step: {role}: ")
        assert "language_model.rotary_emb.inv_freq is bfloat16, not float32" in refusals[role]
        assert "\n" not in refusals[role]
