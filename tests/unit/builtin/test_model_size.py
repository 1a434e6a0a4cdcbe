"""Width, depth and dtype of a small model are options, and what no model can have is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from adora_vl.builtin import DTYPES, SHIPPED_SIZE, TINY_FAMILIES, ModelSize, WarmStart
from adora_vl.builtin.__main__ import main
from adora_vl.builtin.tiny_vl import build_config, build_tiny_model
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.utils.errors import UserError

TWO_STEPS_PLAN = WarmStart(
    steps=2,
    short_prompt_steps=1,
    batch_size=2,
    rows=8,
)


def count_parameters(size: ModelSize, family: str = "qwen2_5_vl") -> int:
    """Return the number of parameters, counted without memory."""
    config = build_config(AutoTokenizer.from_pretrained(PRETRAINED_FOLDER), family, size)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_shipped_model_has_the_default_size():
    config = AutoConfig.from_pretrained(PRETRAINED_FOLDER)
    assert config.text_config.hidden_size == SHIPPED_SIZE.width
    assert config.text_config.num_hidden_layers == SHIPPED_SIZE.layers
    assert config.vision_config.depth == SHIPPED_SIZE.layers
    recorded = json.loads((PRETRAINED_FOLDER / "build.json").read_text())
    assert count_parameters(SHIPPED_SIZE) == recorded["parameters"]


def test_sixty_million_parameters_are_reached():
    assert 55e6 < count_parameters(ModelSize(width=640, layers=7)) < 65e6


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("layers", [1, 5])
def test_every_family_has_any_depth(family, layers):
    size = ModelSize(width=64, layers=layers)
    config = build_config(AutoTokenizer.from_pretrained(PRETRAINED_FOLDER), family, size)
    assert config.text_config.num_hidden_layers == layers
    assert config.vision_config.depth == layers
    assert count_parameters(size, family) < count_parameters(
        ModelSize(width=64, layers=layers + 1), family
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_saved_in_its_dtype_after_training_in_it(dtype, tmp_path):
    size = ModelSize(width=64, layers=2, dtype=dtype)
    facts = build_tiny_model(tmp_path / "model", TWO_STEPS_PLAN, size=size)
    assert facts["size"] == {"width": 64, "layers": 2, "dtype": dtype}
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert sum(tensor.numel() for tensor in weights.values()) == facts["parameters"]


def test_training_in_bfloat16_keeps_weights_that_bfloat16_would_round():
    """At the end of a cycle the rate is so low that a bfloat16 weight would stay where it is."""
    size = ModelSize(width=64, layers=1, dtype="bfloat16")
    model = train_both_starts(replace(TWO_STEPS_PLAN, learning_rate=1e-6), size)
    start = train_both_starts(replace(TWO_STEPS_PLAN, steps=0), size)
    moved = model["lm_head.weight"] - start["lm_head.weight"]
    assert model["lm_head.weight"].dtype == torch.float32
    assert 0 < moved.abs().max() < 1e-5


def train_both_starts(plan: WarmStart, size: ModelSize) -> dict[str, torch.Tensor]:
    """Return the weights of a model after its stages, before they are saved."""
    from adora_vl.builtin.small_model import fit
    from adora_vl.builtin.tiny_vl import prepare_tiny

    untaught = prepare_tiny(plan, size=size)
    for stage in untaught.stages:
        fit(
            untaught.model,
            loss_of=stage.loss_of,
            steps=stage.steps,
            learning_rate=stage.learning_rate,
            dtype=untaught.dtype,
        )
    weights: dict[str, torch.Tensor] = untaught.model.state_dict()
    return weights


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"width": 100}, "width: 100 is no multiple of 32"),
        ({"width": 0}, "width: 0 is no multiple of 32"),
        ({"layers": 0}, "layers: 0 is no depth"),
        ({"dtype": "float8"}, "dtype: 'float8' is not float32 or bfloat16"),
    ],
)
def test_what_is_no_size_is_refused_in_one_line(options, named, tmp_path, capsys):
    with pytest.raises(UserError, match=named):
        ModelSize(**options)
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    assert main(["--output", str(tmp_path / "model"), "--steps", "0", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {named}")
    assert not (tmp_path / "model").exists()


def test_a_start_that_goes_on_from_the_shipped_model_has_no_other_size(tmp_path, capsys):
    words = ["--output", str(tmp_path / "model"), "--start", "tiny_perimeter", "--width", "64"]
    assert main(words) == 2
    assert "tiny_perimeter goes on from the shipped tiny" in capsys.readouterr().err
