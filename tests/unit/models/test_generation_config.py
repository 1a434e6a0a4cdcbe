"""Generation configs as people's models have them: a checkpoint has to be able to hold each."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import GenerationConfig

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.prompts import conversation
from adora_vl.export import export
from adora_vl.models.generation_config import check_generation_config
from adora_vl.models.load import PRETRAINED_FOLDER, load_model
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils.errors import UserError


def copy_model_with_generation_config(tmp_path: Path, **settings: Any) -> Path:
    """Return a model folder whose generation config has further settings."""
    folder = tmp_path / "model"
    shutil.copytree(PRETRAINED_FOLDER, folder)
    config_file = folder / "generation_config.json"
    config = json.loads(config_file.read_text())
    del config["_from_model_config"]  # else Transformers would take the settings for defaults
    config_file.write_text(json.dumps({**config, **settings}))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        {"do_sample": False, "temperature": 0.01},
        {"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.05},
    ],
)
def test_a_model_that_says_how_to_sample_but_not_whether_can_be_saved(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Settings of sampling make `do_sample` true where it is missing or contradicts them."""
    folder = copy_model_with_generation_config(tmp_path, **settings)

    check_generation_config(str(folder), None)
    load_model(str(folder), {"device_map": None}).save_pretrained(tmp_path / "checkpoint")

    saved = GenerationConfig.from_pretrained(tmp_path / "checkpoint")
    assert saved.do_sample is True
    assert {name: getattr(saved, name) for name in settings if name != "do_sample"} == {
        name: value for name, value in settings.items() if name != "do_sample"
    }


def test_a_run_from_such_a_model_is_saved(tmp_path: Path) -> None:
    """A trainer saves the model with the settings that it came with."""
    folder = copy_model_with_generation_config(tmp_path, temperature=0.7, repetition_penalty=1.05)
    config = AdoraGRPOConfig(
        str(tmp_path / "run"), use_cpu=True, bf16=False, num_generations=8, report_to="none"
    )
    rows = Dataset.from_list([{"prompt": conversation("2 + 3?"), "answer": "5"}] * 8)
    trainer = AdoraGRPOTrainer(str(folder), "accuracy", config, rows)

    trainer.save_model(str(tmp_path / "saved"))

    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.do_sample, saved.temperature, saved.repetition_penalty) == (True, 0.7, 1.05)


@pytest.mark.parametrize(
    "settings, words_of_error",
    [
        ({"early_stopping": True}, "`early_stopping`: `num_beams` is set to"),
        ({"temperature": 0.7, "length_penalty": 2.0}, "`length_penalty`"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be greater than 0"),
    ],
)
def test_one_that_no_checkpoint_can_have_is_refused_before_the_run(
    tmp_path: Path, settings: dict[str, Any], words_of_error: str
) -> None:
    """A config that Transformers would refuse to save is refused with its file and its fault."""
    folder = copy_model_with_generation_config(tmp_path, **settings)

    with pytest.raises(UserError) as refused:
        check_generation_config(str(folder), None)

    message = str(refused.value)
    assert message.startswith(
        f"model_name_or_path: generation_config.json of {str(folder)!r} could"
    )
    assert words_of_error in message
    assert message.endswith("; correct it")


def test_weights_of_several_ranks_are_exported_with_the_generation_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export out of a ZeRO checkpoint keeps the model's generation config."""
    checkpoint = copy_model_with_generation_config(
        tmp_path, eos_token_id=[2, 0], repetition_penalty=1.05
    )
    whole_weights = load_model(str(checkpoint), {"device_map": None}).state_dict()
    (checkpoint / "model.safetensors").unlink()
    monkeypatch.setattr(
        "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
        lambda folder: whole_weights,
    )
    monkeypatch.setattr("adora_vl.export.find_weights", lambda run: run)

    export(checkpoint, tmp_path / "exported")

    exported = GenerationConfig.from_pretrained(tmp_path / "exported")
    assert (exported.eos_token_id, exported.repetition_penalty) == ([2, 0], 1.05)


def test_a_model_without_a_generation_config_is_fine(tmp_path: Path) -> None:
    """A folder with only `config.json` raises nothing."""
    (tmp_path / "config.json").write_text("{}")

    check_generation_config(str(tmp_path), None)
