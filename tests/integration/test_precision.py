"""bfloat16 under ZeRO-3, with real DeepSpeed: computed constants stay those of a plain model.

ZeRO-3 would round the rotary frequencies of policy and reference.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from adora_vl.models.load import PRETRAINED_FOLDER
from tests.integration.precision_run import FAR_POSITIONS, constant_tensors
from tests.support.launch import accelerate_launch, cli_arguments

pytestmark = pytest.mark.slow
MODEL_ROLES = ("policy", "reference")


@pytest.fixture(scope="module")
def zero3_results(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Build policy and reference under ZeRO-3 in bfloat16, and return what they compute with.

    First the facts: refusals by role, whether the weights are sharded, and the dtype. Then tensors
    by `role/kind/name`. ZeRO-3 shards and casts the same in one process as in eight.
    """
    folder: Path = tmp_path_factory.mktemp("precision")
    accelerate_launch(
        "cpu_zero3",
        "--num_processes",
        "1",
        "--mixed_precision",
        "bf16",
        "-m",
        "tests.integration.precision_run",
        str(folder),
        *cli_arguments(
            config="configs/train/smoke_cpu.yaml",
            output_dir=folder / "run",
            use_vllm="false",
            bf16="true",
            dtype="bfloat16",
            beta="0.04",
            adora_synthetic_rows=64,
            num_generations=4,
            per_device_train_batch_size=8,
        ),
    )
    return json.loads((folder / "facts.json").read_text()), load_file(
        folder / "tensors.safetensors"
    )


@pytest.fixture(scope="module")
def plain_model() -> Qwen2_5_VLForConditionalGeneration:
    """Load the same bfloat16 weights without DeepSpeed; the rotary frequencies are float32."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        PRETRAINED_FOLDER, dtype=torch.bfloat16
    ).eval()
    assert {b.dtype for name, b in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    return model


def tensors_with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_every_constant_is_that_of_a_plain_model(zero3_results, plain_model, role):
    """The tensors that are no parameters are those of a plain model, to the bit.

    ZeRO-3 builds the models in bfloat16, and would round what is computed and not loaded.
    """
    facts, tensors = zero3_results
    assert facts["sharded"]
    assert facts["dtype"] == "torch.bfloat16"
    actual = tensors_with_prefix(tensors, f"{role}/constants/")
    expected = constant_tensors(plain_model)
    assert actual.keys() == expected.keys()
    assert {name: value.dtype for name, value in actual.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("role", MODEL_ROLES)
@pytest.mark.parametrize("position", FAR_POSITIONS)
def test_log_probabilities_far_from_the_start_are_those_of_float32_angles(
    zero3_results, role, position
):
    """A model as built has the log-probabilities of exact frequencies, and not of rounded ones.

    The three passes of one process over the same tokens differ in the angles alone.
    """
    _, tensors = zero3_results
    logps_as_built = tensors[f"{role}/built/{position}"]
    logps_with_float32 = tensors[f"{role}/float32/{position}"]
    logps_with_rounded = tensors[f"{role}/rounded/{position}"]
    assert not torch.equal(logps_with_rounded, logps_with_float32)
    assert torch.equal(logps_as_built, logps_with_float32)


def test_training_would_begin_with_them_and_is_refused_with_rounded_ones(zero3_results):
    """A training begins with exact frequencies, and rounded ones are refused in one line.

    The line names the model and the buffer.
    """
    facts, _ = zero3_results
    refusals = facts["refusals"]
    assert refusals["built"] == ""
    for role in MODEL_ROLES:
        assert refusals[role].startswith(f"before the first step: {role}: ")
        assert "language_model.rotary_emb.inv_freq is bfloat16, not float32" in refusals[role]
        assert "\n" not in refusals[role]
