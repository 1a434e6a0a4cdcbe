"""LoRA where no layer is named: what is adapted, and that it is the same on each way into a run."""

import json
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl import ModelConfig

from adora_vl.config import AdoraGRPOConfig
from adora_vl.models.check import choose_layers, make_lora_config
from adora_vl.models.families import FAMILIES, LANGUAGE_MODEL, component_of
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.shape import language_layer_names, layers_pattern
from adora_vl.train import main
from adora_vl.trainer import AdoraGRPOTrainer
from tests.support.families import build_on_meta, family_config
from tests.support.tiny_run import tiny_run_arguments

TINY_LAYER_NAMES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SMALL_LORA_KEYS = {
    "use_peft": "true",
    "lora_r": 2,
    "lora_dropout": 0,
    "max_steps": 1,
    "save_steps": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_the_language_model_is_adapted_and_no_other(family):
    """Neither the vision tower, the projector nor the output head has an adapter."""
    config = family_config(family)
    model_config = ModelConfig(use_peft=True, lora_r=2)
    peft_config = make_lora_config(model_config)
    [note] = choose_layers(peft_config, model_config, config)
    assert ", ".join(language_layer_names(config)) in note
    model = build_on_meta(config)
    output_head = model.get_output_embeddings()
    linear_layers = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output_head
    }
    expected = {name for name in linear_layers if component_of(f"{name}.weight") == LANGUAGE_MODEL}
    with torch.device("meta"):
        adapted = get_peft_model(model, deepcopy(peft_config), autocast_adapter_dtype=False)
    adapted_layers = {
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if hasattr(module, "lora_A")
    }
    assert expected
    assert adapted_layers == expected
    assert (
        model_config.lora_target_modules
        == peft_config.target_modules
        == layers_pattern(language_layer_names(config))
    )


def test_named_layers_and_parameters_stay_as_they_are():
    """Where the user names layers or parameters, nothing is chosen and nothing is noted."""
    config = family_config("qwen2")
    for layer_choice in (
        {"lora_target_modules": ["q_proj"]},
        {"lora_target_parameters": ["q_proj.weight"]},
    ):
        model_config = ModelConfig(use_peft=True, **layer_choice)
        peft_config = make_lora_config(model_config)
        config_before = peft_config.to_dict()
        assert choose_layers(peft_config, model_config, config) == []
        assert peft_config.to_dict() == config_before
    assert make_lora_config(ModelConfig()) is None
    assert choose_layers(None, ModelConfig(), config) == []


def test_the_command_the_dry_run_and_python_choose_the_same(tmp_path, capsys):
    """A run, its dry run and a trainer built in Python adapt the layers of one pattern."""
    note_on_layers = f"every linear layer of the language model: {', '.join(TINY_LAYER_NAMES)}"
    pattern = layers_pattern(TINY_LAYER_NAMES)
    assert main(tiny_run_arguments(tmp_path / "run", **SMALL_LORA_KEYS)) == 0
    assert note_on_layers in capsys.readouterr().out
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert adapter["target_modules"] == pattern
    assert pattern in json.dumps(manifest).replace("\\\\", "\\")
    assert main([*tiny_run_arguments(tmp_path / "dry", **SMALL_LORA_KEYS), "--dry-run"]) == 0
    assert note_on_layers in " ".join(capsys.readouterr().out.split())

    user_config = LoraConfig(r=2, lora_dropout=0.0)
    trainer = AdoraGRPOTrainer(
        str(PRETRAINED_FOLDER),
        reward_funcs="accuracy",
        args=AdoraGRPOConfig(
            str(tmp_path / "python"), use_cpu=True, bf16=False, report_to="none", num_generations=4
        ),
        train_dataset=make_rows(),
        peft_config=user_config,
    )
    assert trainer.model.peft_config["default"].target_modules == pattern
    assert user_config.target_modules is None, "the user's object is for other models too"
    assert pattern in trainer.run.fingerprint["peft_config"].replace("\\\\", "\\")


def make_rows():
    """Return eight problems in TRL's form, with a picture each."""
    from datasets import Dataset
    from PIL import Image

    picture = Image.new("RGB", (56, 56), "gray")
    prompt = [{"role": "user", "content": "How many corners?"}]
    return Dataset.from_list([{"prompt": prompt, "images": [picture], "answer": "4"}] * 8)
