"""A model is asked as it was trained, wherever its weights have been exported to."""

import json
import shutil
from pathlib import Path

import pytest
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from adora_vl.checkpoint.run_files import list_users_files, recording_saved_files
from adora_vl.checkpoint.training_prompts import read_training_config
from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT
from adora_vl.evals.inference.engines import build_settings
from adora_vl.evals.inference.provenance import resolve_prompts
from adora_vl.evals.inference.requests import EngineOptions
from adora_vl.evals.options import PROMPT_OF_TRAINING
from adora_vl.export import export, save_merged
from adora_vl.models.load import PRETRAINED_FOLDER, load_model, load_processor

TRAINED_WITH = {
    "adora_system_prompt": "Think aloud.",
    "adora_prompt": None,
    "chat_template_kwargs": {"enable_thinking": False},
    "generation_kwargs": {"stop": "</answer>", "stop_token_ids": [7]},
}
PROMPTS_OF_TRAINING = {"system_prompt": PROMPT_OF_TRAINING, "prompt": PROMPT_OF_TRAINING}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return the folder of a finished run, whose config has prompts that are not the default."""
    folder = tmp_path / "run"
    shutil.copytree(PRETRAINED_FOLDER, folder)
    manifest = {"made_by": "adora_vl.train", "config": {**TRAINED_WITH, "learning_rate": 1e-6}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_an_exported_model_is_asked_with_the_prompts_of_its_training(
    run_folder: Path, tmp_path: Path
) -> None:
    """An export has the prompts of the training in a file beside the weights.

    `run_folder` was trained with the config `TRAINED_WITH`.
    """
    exported = tmp_path / "served" / "mine"

    export(run_folder, exported)

    expected = {"system_prompt": "Think aloud.", "prompt": None}
    assert resolve_prompts(str(run_folder), PROMPTS_OF_TRAINING) == expected
    assert resolve_prompts(str(exported), PROMPTS_OF_TRAINING) == expected
    assert read_training_config(str(exported)) == TRAINED_WITH


def test_what_is_exported_once_more_still_knows_its_prompts(
    run_folder: Path, tmp_path: Path
) -> None:
    """An export of an export has the prompts of the training, those of `TRAINED_WITH`."""
    export(run_folder, tmp_path / "first")

    export(tmp_path / "first", tmp_path / "second")

    assert read_training_config(str(tmp_path / "second")) == TRAINED_WITH


def test_an_answer_ends_where_a_rollout_of_the_training_did(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation takes over the strings and tokens at which rollouts of the training ended.

    They are part of its fingerprint. A server is not told of them, and a line says so. The training
    of `run_folder` had the string `</answer>` and the token 7.
    """
    export(run_folder, tmp_path / "exported")

    for folder in (run_folder, tmp_path / "exported"):
        settings = build_settings(EngineOptions(model=str(folder), engine="transformers"))
        assert settings.stop is not None
        assert settings.stop.strings == ("</answer>",)
        assert settings.stop.token_ids == (7,)
        assert settings.fingerprint_fields["stop"] == ["</answer>"]
        assert settings.fingerprint_fields["stop_token_ids"] == [7]
        assert "stop: that of the model's training, ['</answer>']" in capsys.readouterr().err

    on_server = EngineOptions(model=str(run_folder), engine="openai", base_url="http://a:1/v1")
    settings = build_settings(on_server)
    assert settings.stop is None
    assert "note: stop: the model's training ended answers at ['</answer>'], and --engine" in (
        capsys.readouterr().err
    )


def test_all_chat_templates_of_a_model_are_exported(run_folder: Path, tmp_path: Path) -> None:
    """An export has every chat template of a run; one that was changed by hand is the user's file.

    Transformers writes the templates beside the first into a folder of their own.
    """
    processor = load_processor(str(PRETRAINED_FOLDER))
    processor.chat_template = {"default": processor.chat_template, "tool_use": "{{ tools }}"}
    with recording_saved_files(run_folder, saves_model=True):
        processor.save_pretrained(run_folder)

    export(run_folder, tmp_path / "exported")

    exported = load_processor(str(tmp_path / "exported"))
    assert exported.chat_template == processor.chat_template
    template = "additional_chat_templates/tool_use.jinja"
    assert template not in list_users_files(run_folder), "the run has written it"
    (run_folder / template).write_text("mine")
    assert template in list_users_files(run_folder)


def test_a_merged_model_that_is_copied_away_still_knows_its_prompts(
    run_folder: Path, tmp_path: Path
) -> None:
    """A merged model has the training's prompts in its own folder, so a copy has them too.

    The policy is a LoRA adapter, which is merged into its base model in a folder of the run, that
    of `TRAINED_WITH`.
    """
    model = load_model(str(PRETRAINED_FOLDER), {"device_map": None})
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    processor = load_processor(str(PRETRAINED_FOLDER))

    assert save_merged(policy, processor, run_folder / "merged", Accelerator(cpu=True))

    copy = shutil.copytree(run_folder / "merged", tmp_path / "elsewhere")
    assert read_training_config(str(copy)) == TRAINED_WITH


def test_a_model_of_unknown_training_is_exported_without_prompts(tmp_path: Path) -> None:
    """The shipped model has no prompts of a training, so that the defaults are used."""
    exported = tmp_path / "exported"

    export(PRETRAINED_FOLDER, exported)

    assert not (exported / "training_prompts.json").exists()
    default_prompts = {"system_prompt": SYSTEM_PROMPT, "prompt": DEFAULT_PROMPT}
    assert resolve_prompts(str(exported), PROMPTS_OF_TRAINING) == default_prompts
