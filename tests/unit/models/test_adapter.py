"""A run that starts from an adapter: its first weights, its reference, and what comes out."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from adora_vl.export import main as export
from adora_vl.models.adapter import without_reference_adapter
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.train import main
from tests.support.adapters import TEXT_MODULES_PATTERN, sft_adapter
from tests.support.hub_cache import copy_into_hub_cache
from tests.support.launch import accelerate_launch
from tests.support.tiny_run import tiny_run_arguments, train_tiny_run

# of a new adapter on top
LORA_KEYS = {
    "use_peft": "true",
    "lora_r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0,
    "lora_target_modules": ".*q_proj",
}


def test_a_save_that_fails_leaves_the_reference_adapter_to_the_policy():
    """The reference's adapter is hidden during a save, and is back after an error too."""
    policy: Any = SimpleNamespace(peft_config={"default": "trained", "ref": "reference"})
    with pytest.raises(OSError, match="disk"), without_reference_adapter(policy):
        assert policy.peft_config == {"default": "trained"}
        raise OSError("the disk is full")
    assert policy.peft_config == {"default": "trained", "ref": "reference"}


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load the model in a folder, and return its weights by name."""
    return dict(AutoModelForImageTextToText.from_pretrained(folder).state_dict())


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a number in two sets of weights with the same names."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def sft_folder(tmp_path_factory):
    """Write an adapter of the tiny model as supervised fine-tuning leaves it; return its folder."""
    return sft_adapter(tmp_path_factory.mktemp("sft") / "adapter")


def test_an_adapter_goes_on_training_and_is_its_own_reference(sft_folder, tmp_path, capsys):
    """A run from an adapter trains it, with its start as the reference, and is exported."""
    run_folder = train_tiny_run(
        tmp_path / "run", model_name_or_path=sft_folder, beta=0.1, max_steps=2
    )
    log = json.loads((run_folder / "trainer_state.json").read_text())["log_history"]
    assert log[0]["kl"] == 0, "the policy starts as its reference, and moves away from it"
    assert log[1]["kl"] > 0, "the policy starts as its reference, and moves away from it"
    adapter_before = load_file(sft_folder / "adapter_model.safetensors")
    adapter_after = load_file(run_folder / "adapter_model.safetensors")
    assert adapter_before.keys() == adapter_after.keys()
    assert all(
        not torch.equal(adapter_before[name], adapter_after[name]) for name in adapter_before
    )
    reference = load_file(run_folder / "ref" / "adapter_model.safetensors")
    for name, tensor in adapter_before.items():  # the head's too
        assert torch.equal(tensor, reference[name]), name
    model = json.loads((run_folder / "manifest.json").read_text())["model"]
    assert model["name"] == str(sft_folder)
    assert model["base"] == str(PRETRAINED_FOLDER)
    assert " on " in model["fingerprint"]
    assert "goes on training" in capsys.readouterr().out

    # what is exported
    assert export([str(run_folder), str(tmp_path / "out")]) == 0
    assert (
        largest_difference(load_weights(tmp_path / "out"), load_weights(run_folder / "merged"))
        < 1e-6
    )
    assert export([str(run_folder), str(tmp_path / "adapter"), "--adapter"]) == 0
    printed = capsys.readouterr().out
    assert f"vllm serve {tmp_path / 'out'}" in printed
    assert "vLLM serves it merged alone" in printed  # it has a head

    # an adapter of another start does not go on in this folder
    another_adapter = sft_adapter(tmp_path / "other", modules_to_save=None, r=5)
    manifest = (run_folder / "manifest.json").read_bytes()
    assert (
        main(
            tiny_run_arguments(
                run_folder, model_name_or_path=another_adapter, beta=0.1, max_steps=3
            )
        )
        == 2
    )
    assert "of another run: model: " in capsys.readouterr().err
    assert (run_folder / "manifest.json").read_bytes() == manifest
    assert export([str(another_adapter), str(tmp_path / "plain"), "--adapter"]) == 0
    arguments = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert arguments[2:5] == ["vllm", "serve", str(PRETRAINED_FOLDER)]
    adapter = f"policy={tmp_path / 'plain'}"
    # 8: the smallest rank of vLLM's that holds the adapter's rank of 5
    assert arguments[-5:] == ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter]


def test_a_new_adapter_on_top_is_trained_and_exported_with_the_one_beneath(
    sft_folder, tmp_path, capsys
):
    """With keys of LoRA the adapter is merged into its base, and a new one is trained on top."""
    run_folder = train_tiny_run(
        tmp_path / "run", model_name_or_path=sft_folder, max_steps=2, **LORA_KEYS
    )
    assert "is merged into its base" in capsys.readouterr().out
    new_config = json.loads((run_folder / "adapter_config.json").read_text())
    assert new_config["r"] == 2
    assert new_config["base_model_name_or_path"] == str(sft_folder)

    assert not list(sft_folder.glob("tokenizer*"))
    assert export([str(sft_folder), str(tmp_path / "start")]) == 0
    assert load_processor(str(tmp_path / "start")).chat_template, (
        "the base's, as the adapter has none"
    )
    assert export([str(run_folder), str(tmp_path / "out")]) == 0
    start_weights = load_weights(tmp_path / "start")
    final_weights = load_weights(tmp_path / "out")
    assert largest_difference(final_weights, load_weights(run_folder / "merged")) < 1e-6
    assert largest_difference(final_weights, start_weights) > 1e-6
    # `LORA_KEYS` adapt the query projections alone
    changed_names = {
        name
        for name, weights in final_weights.items()
        if not torch.equal(weights, start_weights[name])
    }
    assert changed_names == {name for name in final_weights if ".q_proj.w" in name}
    second_run = train_tiny_run(
        tmp_path / "again", model_name_or_path=run_folder, max_steps=2, learning_rate=0
    )
    assert largest_difference(load_weights(second_run / "merged"), final_weights) < 1e-6, (
        "an adapter whose base is an adapter goes on training too"
    )


@pytest.mark.slow
def test_an_adapter_of_the_hub_is_that_of_its_revision_and_so_is_its_base(
    tmp_path, capsys, monkeypatch
):
    """The commits of adapter and base are pinned, in the run's manifest and in what it exports."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    copy_into_hub_cache("somebody/tiny", PRETRAINED_FOLDER, v1="1" * 40)  # there is no main of it
    copy_into_hub_cache(
        "somebody/sft", sft_adapter(tmp_path / "other", "somebody/nobody"), main="2" * 40
    )
    sft_folder = sft_adapter(tmp_path / "sft", "somebody/tiny", revision="v1", modules_to_save=None)
    copy_into_hub_cache("somebody/sft", sft_folder, v2="3" * 40)
    run_keys = {
        "model_name_or_path": "somebody/sft",
        "model_revision": "v2",
        "learning_rate": 0,
        "max_steps": 1,
    }
    run_folder = train_tiny_run(tmp_path / "run", **run_keys)
    new_run_folder = train_tiny_run(tmp_path / "new", **run_keys, **LORA_KEYS)
    adapter_before = load_file(sft_folder / "adapter_model.safetensors")
    adapter_after = load_file(run_folder / "adapter_model.safetensors")
    assert all(torch.equal(adapter_before[name], adapter_after[name]) for name in adapter_before)
    pinned_fingerprint = f"{'3' * 40} on {'1' * 40}"
    for folder, base in (
        (run_folder, ("somebody/tiny", "1" * 40)),
        (new_run_folder, ("somebody/sft", "3" * 40)),
    ):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["model"]["fingerprint"] == pinned_fingerprint
        assert manifest["model"]["base"] == "somebody/tiny"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == base, (
            "of what is merged into it later"
        )
        assert export([str(folder), str(folder / "out")]) == 0
    assert (
        largest_difference(load_weights(run_folder / "out"), load_weights(new_run_folder / "out"))
        < 1e-6
    )
    assert export([str(run_folder), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert (
        f"vllm serve somebody/tiny --generation-config vllm --host 127.0.0.1 --revision {'1' * 40} "
        in (capsys.readouterr().out)
    )
    (tmp_path / "hub" / "models--somebody--sft" / "refs" / "v2").write_text("2" * 40)
    assert main(tiny_run_arguments(tmp_path / "run", **run_keys)) == 2
    assert "'somebody/nobody' is neither a model folder here nor" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, LORA_KEYS], ids=["goes on", "is merged"])
def test_an_adapter_that_zero3_has_in_parts_takes_the_steps_of_a_whole_one(
    keys, sft_folder, tmp_path
):
    """A run whose weights ZeRO-3 divides logs the metrics of a run without DeepSpeed."""
    run_keys = {"model_name_or_path": sft_folder, "beta": 0.1, "max_steps": 2, **keys}
    train_tiny_run(tmp_path / "whole", **run_keys)
    accelerate_launch(
        "cpu_zero3",
        "--num_processes",
        "1",
        "-m",
        "adora_vl.train",
        *tiny_run_arguments(tmp_path / "parts", **run_keys),
    )
    whole_log = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())["log_history"]
    parts_log = json.loads((tmp_path / "parts" / "trainer_state.json").read_text())["log_history"]
    for whole_entry, parts_entry in zip(whole_log[:2], parts_log[:2], strict=True):
        for metric in ("reward", "entropy", "grad_norm", "kl"):
            assert parts_entry[metric] == pytest.approx(whole_entry[metric], rel=1e-3, abs=1e-6), (
                metric
            )
    assert whole_log[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("adapter_change", "keys", "beginning_of_error"),
    [
        (
            {},
            {"lora_target_modules": "q_proj"},
            "lora_target_modules: q_proj, but the adapter 'SFT' has target_modu",
        ),
        (
            {"base_model_name_or_path": None},
            {},
            "model_name_or_path: 'SFT/adapter_config.json' names no base_model_na",
        ),
        (
            {"base_model_name_or_path": "SFT"},
            {},
            "model_name_or_path: the adapter 'SFT' is its own base",
        ),
        ({"peft_type": "NONE"}, {}, "model_name_or_path: 'SFT/adapter_config.json' cannot be read"),
        (
            {"target_modules": ["nosuch"]},
            {},
            "lora_target_modules: 'nosuch' is no module of this model",
        ),
        (None, {}, "model_name_or_path: 'SFT' has no weights (*.safetensors)"),
    ],
)
def test_an_adapter_that_cannot_go_on_is_refused_in_one_line(
    adapter_change, keys, beginning_of_error, tmp_path, capsys, monkeypatch
):
    """A change of a good adapter's config, or missing weights, ends the command with one error.

    SFT stands for the adapter's folder.
    """
    monkeypatch.setattr(
        "adora_vl.utils.hub.hub_unavailable_reason", lambda: "the hub does not answer"
    )
    folder = sft_adapter(tmp_path / "sft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == TEXT_MODULES_PATTERN
    if adapter_change is None:
        (folder / "adapter_model.safetensors").unlink()
    else:
        text = json.dumps({**config, **adapter_change}).replace("SFT", str(folder))
        (folder / "adapter_config.json").write_text(text)
    arguments = tiny_run_arguments(tmp_path / "run", model_name_or_path=folder, **keys)
    assert main(arguments) == 2
    errors = [
        printed_line
        for printed_line in capsys.readouterr().err.splitlines()
        if printed_line.startswith("error: ")
    ]
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"error: {beginning_of_error.replace('SFT', str(folder))}"), errors
