"""Mistakes that Transformers and TRL find only once the weights are loaded are refused before.

Where they would end in a traceback, ours is one line.
"""

from __future__ import annotations

import re
import shutil
from copy import copy, deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError, model_validator
from transformers import Trainer
from trl import ModelConfig

from adora_vl.checkpoint.fingerprint import compute_fingerprint
from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.export import main as export
from adora_vl.models.check import check_model_parts, make_lora_config
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.preflight import check_keys, check_machine
from adora_vl.preflight.check_model import check_tensor_parallel
from adora_vl.preflight.check_sampling import check_sampling, notes_on_filters
from adora_vl.record.manifest import TrainingData, run_manifest
from adora_vl.train import main
from adora_vl.utils.errors import UserError, describe_error
from benchmarks.gpu.setting import Setting
from tests.support.stand_ins import checked_config
from tests.support.tiny_run import tiny_run_arguments


def error_of(check: Any, *values: Any, **options: int) -> str:
    """Return the error that a check raises for these arguments; empty if it raises none."""
    try:
        check(*values, **options)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture
def error_of_training(tmp_path: Path, no_weights: None, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs the training command with some keys, and returns its last error line.

    The command has to refuse the keys before it loads weights.
    """

    def run(**keys: object) -> str:
        keys = {"output_dir": tmp_path / "run", **keys}
        assert main(tiny_run_arguments(**keys)) == 2, keys
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err.splitlines()[-1]

    return run


def test_sampling_that_the_trainer_would_not_know_of_is_refused_by_every_way_into_a_run(
    subtests, error_of_training
):
    """Sampling parameters whose effect the trainer could not reckon with are refused.

    A command, a dry run and Python code all make the config that is checked here.
    """
    vllm: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    sequence = {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "temperature": 0.8,
    }
    # Parameters of vLLM in `generation_kwargs`, and a part of the error about them.
    refused_parameters: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.3}, "temperature: 0.3 is what the key temperature says"),
        ({"max_tokens": 3}, "max_tokens: 3 .* the key max_completion_length"),
        ({"n": 2}, "n: 2 is what the key num_generations says; set"),
        ({"logprobs": 5}, "logprobs: 5 is for the trainer to set; leave"),
    ]
    # Keys, and how the error about them begins.
    cases: list[tuple[dict[str, Any], str]] = [
        *(
            ({**vllm, "generation_kwargs": parameters}, f"generation_kwargs: {message}")
            for parameters, message in refused_parameters
        ),
        (
            {"generation_kwargs": {"num_beams": 4}},
            "generation_kwargs: num_beams: 4 is for the trainer to set",
        ),
        (
            {"generation_kwargs": {"top_p_": 0.9}},
            "generation_kwargs: top_p_: 0.9 is nothing that Transformers knows",
        ),
        ({**vllm, "temperature": 0.004}, "temperature: 0.004 is below 0.01"),
        (
            {**sequence, "top_p": 0.9},
            "top_p: 0.9 with .* vllm_importance_sampling_mode: sequence_mask multiplies",
        ),
        (
            {**sequence, "generation_kwargs": {"bad_words": ["x"]}},
            "generation_kwargs: bad_words with another temper",
        ),
    ]
    for keys, message in cases:
        with subtests.test(message):
            error = error_of(check_sampling, checked_config(**keys))
            assert re.match(message, error), error
            assert "\n" not in error
    # What is not refused has a note at the start of a run, if the engine filters tokens.
    assert notes_on_filters(checked_config(**sequence)) == []
    assert notes_on_filters(checked_config(**{**sequence, "temperature": 1.0, "top_p": 0.9})) == []
    assert notes_on_filters(checked_config(**vllm, temperature=0.8, top_k=5)) != []
    assert "the key temperature says" in error_of_training(generation_kwargs='{"temperature": 0.3}')


def test_an_option_of_a_dry_run_alone_says_where_it_belongs(error_of_training: Any) -> None:
    """Without `--dry-run` such an option is refused, and not taken for an unknown key."""
    for option in ("write_config", "write-config", "json", "card_gib"):
        line = error_of_training(**{option: "80"})
        assert line == (
            f"error: --{option.replace('_', '-')}: belongs to --dry-run; add --dry-run, or leave it "
            "out"
        )


def test_no_secret_of_a_config_is_in_a_file_a_tracker_or_an_error(tmp_path: Path) -> None:
    """Tokens, keys and passwords are hidden in all that is written, and kept for the run."""
    secrets = ["hf_abcdefgh", "hf_ijklmnop", "sk-qrstuvwx", "yz12345678"]
    address = f"http://me:{secrets[3]}@10.0.0.1:8000"
    reward = {"mine.py:f": {"judges": [{"api_key": secrets[2], "eos_token": "<|im_end|>"}]}}
    config_with_secrets = checked_config(
        hub_token=secrets[0],
        model_init_kwargs={"token": secrets[1]},
        vllm_server_base_url=address,
    )
    script = AdoraScriptArguments(dataset_name=["d"], adora_reward=[reward])
    torch.save(config_with_secrets, tmp_path / "training_args.bin")
    unpickled = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert (unpickled.hub_token, unpickled.model_init_kwargs) == (None, {"token": None})
    assert unpickled.learning_rate == config_with_secrets.learning_rate
    assert unpickled.vllm_server_base_url == "http://...@10.0.0.1:8000"
    run_fingerprint = compute_fingerprint(
        script,
        config_with_secrets,
        data=[],
        model="tiny",
        revision="main",
        processes=1,
    )
    command_words = [
        "--model_init_kwargs",
        f'{{"token": "{secrets[1]}"}}',
        f"--vllm_server_base_url={address}",
    ]
    manifest = run_manifest(
        script,
        config_with_secrets,
        data=TrainingData(folders=["d"], row_count=1),
        fingerprint={},
        batch_plan="",
        processes=1,
        checkpoint=None,
        arguments=command_words,
    )
    texts = [
        str(manifest),
        str(run_fingerprint),
        config_with_secrets.to_json_string(),
        str(config_with_secrets),
        repr(config_with_secrets),
        str(UserError(f"no {secrets[2]}")),
    ]
    texts += [describe_error(OSError(f"{word}: {address}")) for word in secrets]
    for text in (*texts, (tmp_path / "training_args.bin").read_bytes().decode("latin-1")):
        assert not any(secret in text for secret in secrets), text
    assert manifest["command"].endswith(
        """'{"token": "..."}' --vllm_server_base_url=http://...@10.0.0.1:8000"""
    )
    assert "<|im_end|>" in str(run_fingerprint), "the model's own tokens are no secrets"
    assert config_with_secrets.model_init_kwargs == {"token": secrets[1]}, "the run has them"
    assert config_with_secrets.vllm_server_base_url == address, "the run has them"


def test_a_copied_config_is_whole_and_a_pickled_one_lacks_secrets_and_methods() -> None:
    """A copy of a config keeps its secrets and methods, and a pickled config has none.

    A config is pickled into training_args.bin, which people publish with a model.
    """
    secret = "hf_abcdefgh"  # noqa: S105  # of no account
    original = checked_config(hub_token=secret, adora_method="dapo")
    for copied in (copy(original), deepcopy(original)):
        assert copied.hub_token == secret
        assert copied.methods is original.methods
        assert vars(copied).keys() == vars(original).keys()
    pickled = original.__getstate__()
    assert pickled["hub_token"] is None
    assert "methods" not in pickled
    assert pickled["adora_method"] == original.adora_method


def test_a_printed_command_whose_secrets_are_left_out_is_not_run_with_their_dots() -> None:
    """A key whose secret is `...` is refused, as in a command that was copied from a manifest.

    A manifest has `...` for a secret, and the command would log in with the dots.
    """
    left_out: list[dict[str, Any]] = [
        {"hub_token": "..."},
        {"model_init_kwargs": {"token": "..."}},
        {"vllm_server_base_url": "http://...@a:8000"},
    ]
    for keys in left_out:
        (name,) = keys
        with pytest.raises(
            UserError, match=f"^{name}: '...' stands for a secret that was left out"
        ):
            checked_config(**keys)


def test_keys_that_go_together_are_taken() -> None:
    """Keys that go together are not refused.

    Those that do not are in the table of tests/integration/test_one_road.py.
    """
    check_machine.check_optimizer(
        checked_config(optim="sgd", optim_args="momentum=0.9, nesterov=false")
    )
    schedule = checked_config(
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}
    )
    check_machine.check_schedule(schedule)
    check_machine.build_lr_schedule(schedule, 10)
    with_budget: dict[str, Any] = {
        "adora_rollouts": {"budget": 100},
        "use_vllm": True,
        "per_device_train_batch_size": 16,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    on_servers = {"vllm_mode": "server", "adora_weight_transfer": "file"}
    # Each run below differs from `with_budget` by these keys.
    changed_keys_of_runs: list[dict[str, Any]] = [
        {},
        {"adora_rollouts": {"budget": 100, "refill": 2}, "vllm_tensor_parallel_size": 2},
        {"generation_kwargs": {"stop_token_ids": [3], "repetition_detection": {}}},
        {"adora_rollouts": {"ahead": 1}, **on_servers},
        {"vllm_server_base_url": "http://a:1,http://b:1", **on_servers},
        {"adora_rollouts": {}, "use_vllm": False, "dataloader_num_workers": 2},
    ]
    for changed_keys in changed_keys_of_runs:
        config = checked_config(**{**with_budget, **changed_keys})
        check_keys.check_budget(config)
        check_keys.check_sampling_ahead(config)
        check_keys.check_servers(config)


def test_rollouts_that_wait_need_steps_that_end_with_generations() -> None:
    """A run whose rollouts may wait is refused if an optimizer step goes over a generation's end.

    Rollouts wait with a budget of tokens, and where servers sample ahead. 3 micro-batches of a
    generation are one step of 2, and half of the next.
    """
    keys: dict[str, Any] = {
        "use_vllm": True,
        "per_device_train_batch_size": 16,
        "vllm_importance_sampling_mode": "token_truncate",
        "gradient_accumulation_steps": 2,
    }
    servers = {"vllm_mode": "server", "adora_weight_transfer": "file"}
    waits_for_budget = checked_config(
        **keys, adora_rollouts={"budget": 100}, steps_per_generation=3
    )
    samples_ahead = checked_config(
        **keys, adora_rollouts={"ahead": 1}, steps_per_generation=3, **servers
    )
    for line in (
        error_of(check_keys.check_budget, waits_for_budget),
        error_of(check_keys.check_sampling_ahead, samples_ahead),
    ):
        assert "does not go with 3 micro-batches of a generation and 2 of an optimizer step" in line
    for steps in (1, 2, 4):
        check_keys.check_budget(
            checked_config(**keys, adora_rollouts={"budget": 100}, steps_per_generation=steps)
        )


def test_the_engines_log_probabilities_are_old_ones_where_nothing_else_corrects() -> None:
    """`old_logps: engine` is refused with keys that correct for the engine in another way.

    It takes vLLM's log-probabilities for those of the old policy.
    """
    keys: dict[str, Any] = {
        "adora_rollouts": {"old_logps": "engine"},
        "use_vllm": True,
        "vllm_importance_sampling_correction": False,
    }
    # Changed keys, and a part of the error about them; empty: they are taken.
    for changed_keys, message in (
        ({}, ""),
        ({"use_vllm": False}, "does not go with use_vllm: false"),
        ({"vllm_importance_sampling_correction": True}, "set it to false"),
        ({"adora_stock_step": True}, "does not go with adora_stock_step"),
        ({"adora_stock_step": ["skip_old_pass"]}, "does not go with adora_stock_step"),
        ({"adora_stock_step": ["share_prompt"]}, ""),
    ):
        line = error_of(check_keys.check_old_logps, checked_config(**{**keys, **changed_keys}))
        if message:
            assert message in line, changed_keys
            assert line.startswith("adora_rollouts.old_logps: engine ")
        else:
            assert line == "", changed_keys


def test_what_samples_with_older_weights_learns_by_the_engine_in_either_way() -> None:
    """A budget of tokens needs vLLM's importance correction, or `old_logps: engine`.

    Rollouts then last several steps, and are sampled with older weights.
    """
    keys: dict[str, Any] = {
        "use_vllm": True,
        "per_device_train_batch_size": 16,
        "vllm_importance_sampling_correction": False,
    }
    policy = checked_config(adora_rollouts={"budget": 100}, **keys)
    line = error_of(check_keys.check_budget, policy)
    assert "does not go with vllm_importance_sampling_correction: false" in line
    engine = checked_config(adora_rollouts={"budget": 100, "old_logps": "engine"}, **keys)
    assert not error_of(check_keys.check_budget, engine)


def test_a_schedule_whose_rate_is_no_number_is_refused() -> None:
    """Transformers makes a rate of 0 of NaN."""
    for rate in (float("nan"), float("inf")):
        config = checked_config(lr_scheduler_type="cosine_with_min_lr")
        config.lr_scheduler_kwargs = {"min_lr_rate": rate}
        line = error_of(check_machine.check_schedule, config)
        assert line.startswith("lr_scheduler_kwargs: min_lr_rate: "), line


def test_arguments_of_an_optimizer_are_pairs_of_names_and_finite_numbers() -> None:
    for arguments_text in ("lr=nan", "foo", "a=1,b", "=1", "a=-inf", ","):
        line = error_of(check_machine.check_optimizer, checked_config(optim_args=arguments_text))
        assert line.startswith(f"optim_args: {arguments_text!r} is not NAME=VALUE"), line


def test_arguments_of_an_optimizer_that_needs_the_model_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers builds GaLore only with a model, so nothing can be said about its arguments."""

    def refuse_without_model(config: object) -> None:
        raise ValueError("You need to pass a model to initialize galore_adamw optimizer.")

    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(refuse_without_model))
    arguments = "rank=64, update_proj_gap=100, scale=0.10"
    check_machine.check_optimizer(checked_config(optim="galore_adamw", optim_args=arguments))


@pytest.mark.parametrize("bf16", [True, False])
def test_a_dry_run_for_another_machine_takes_tf32(bf16: bool) -> None:
    """Transformers refuses it where this machine has no such GPU, and the planned one may have."""
    config = AdoraGRPOConfig(output_dir="nowhere", bf16=bf16, tf32=True, planned_processes=1)
    assert config.tf32 is True


def test_partial_rollouts_want_two_whole_groups_on_each_process() -> None:
    """A budget of tokens is refused if a process has less than a whole group in a micro-batch."""
    config = checked_config(
        adora_rollouts={"budget": 100},
        use_vllm=True,
        per_device_train_batch_size=16,
        vllm_importance_sampling_mode="token_truncate",
    )
    # Half a group of 8 on each of two processes, which TRL allows.
    config.per_device_train_batch_size = 4
    line = error_of(check_keys.check_budget, config)
    assert "4 rollouts per process, which are no whole groups" in line


def model_config_with(text: dict[str, int], tower: dict[str, int]) -> Any:
    """A config of Transformers, with these sizes of the language model and the vision tower."""
    text_config = SimpleNamespace(**text)
    vision_config = SimpleNamespace(**tower)
    return SimpleNamespace(get_text_config=lambda: text_config, vision_config=vision_config)


def test_an_engine_is_divided_into_equal_parts_or_not_at_all() -> None:
    """Tensor parallelism over two cards is refused where a number of heads or columns is odd.

    One key-value head is taken, since vLLM repeats it. In server mode nothing is checked.
    """
    config = checked_config(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2)
    text = {"num_attention_heads": 4, "num_key_value_heads": 1}
    tower = {"num_heads": 4, "intermediate_size": 8}
    model_config = model_config_with(text, tower)
    assert error_of(check_tensor_parallel, config, model_config, processes=4) == ""
    for sizes, name, wrong_size, part_in_words in (
        (text, "num_attention_heads", 3, "3 attention heads of the model"),
        (tower, "num_heads", 5, "5 attention heads of its vision tower"),
        (tower, "intermediate_size", 9, "9 columns of its vision tower's MLP"),
        (text, "num_key_value_heads", 3, "3 key-value heads"),
    ):
        right_size = sizes[name]
        sizes[name] = wrong_size
        model_config = model_config_with(text, tower)
        line = error_of(check_tensor_parallel, config, model_config, processes=4)
        assert line.startswith(f"vllm_tensor_parallel_size: 2 does not divide the {part_in_words}")
        sizes[name] = right_size
    config.vllm_mode = "server"
    check_tensor_parallel(config, model_config_with(text, tower), processes=3)


INDEX = "model.safetensors.index.json"
# a file of a model folder, what a broken download left in it (None: nothing), a part of the error
BROKEN: list[tuple[str, bytes | None, str]] = [
    ("model.safetensors", None, "has no weights"),
    ("model.safetensors", b"", "is damaged"),
    ("model.safetensors", b"12345", "is damaged"),
    (
        INDEX,
        b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
        "has no model-2.safetensors",
    ),
    (INDEX, b"{", f"{INDEX}' is damaged"),
    (INDEX, b"[]", f"{INDEX}' is damaged"),
    ("tokenizer.json", b"{", "cannot be loaded ("),
]


def test_a_model_whose_download_was_broken_off(tmp_path, capsys, subtests):
    """Training and export both refuse it, and neither leaves anything behind."""
    for number, (file, content, message) in enumerate(BROKEN):
        with subtests.test(f"{file} {content!r:.12}"):
            (tmp_path / str(number)).mkdir()
            check_broken_model_is_refused(file, content, message, tmp_path / str(number), capsys)


def check_broken_model_is_refused(
    file: str,
    content: bytes | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that a training and an export refuse a model with a broken file in one line.

    `file`: its name. `content`: what is in it; None: it is missing. `message`: a part of the line.
    """
    model = tmp_path / "model"
    shutil.copytree(PRETRAINED_FOLDER, model)
    (model / file).unlink() if content is None else (model / file).write_bytes(content)
    assert main(tiny_run_arguments(tmp_path / "run", model_name_or_path=model)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: model_name_or_path: ")
    assert message in line
    if file == "tokenizer.json":  # read with the model; export copies it
        return
    assert export([str(model), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: RUN: ")
    assert content is None or message in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_goes_wrong_while_loading_ends_in_one_line(tmp_path, monkeypatch, capsys):
    """An error while the model or the engine is loaded becomes one line with its first line."""

    def fails(run: object) -> None:
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr("adora_vl.train.build_trainer", fails)
    assert main(tiny_run_arguments(tmp_path / "run")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: the model or the engine could not be loaded (RuntimeError: no room)"


def test_an_error_of_pydantic_says_what_was_wrong() -> None:
    """An error of pydantic becomes one line that has its reason.

    vLLM checks its options with pydantic, whose errors have a first line without a reason.
    """

    class EngineOptions(BaseModel):
        """Options of which one is a number."""

        heads: int

    with pytest.raises(ValidationError) as caught:
        EngineOptions.model_validate({"heads": "many"})
    assert describe_error(caught.value) == (
        "ValidationError: Input should be a valid integer, unable to parse string as an integer"
    )

    class RefusedOptions(BaseModel):
        """Options that are refused as a whole, by an error that names no field."""

        @model_validator(mode="after")
        def refuse(self) -> RefusedOptions:
            raise ValueError("the engine is too small")

    with pytest.raises(ValidationError) as caught:
        RefusedOptions()
    assert describe_error(caught.value) == "ValidationError: Value error, the engine is too small"


def test_an_adapter_on_one_of_two_tied_embeddings_is_refused_by_its_key() -> None:
    """An adapter on the input embeddings or the output layer is refused if these share a weight.

    They do in Qwen2.5-VL-3B; 7B has two weights.
    """
    setting = Setting(full=False, device=torch.device("cpu"))
    tied = setting.config("3B", layers=1)
    untied = setting.config("7B", layers=1)
    for name, key in (
        ("embed_tokens", "lora_target_modules"),
        ("lm_head", "lora_modules_to_save"),
    ):
        modules_by_key = {
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_modules_to_save": ["input_layernorm"],
        }
        modules_by_key[key].append(name)
        model = ModelConfig(use_peft=True, **modules_by_key)
        check_model_parts(model, untied, make_lora_config(model), [])
        with pytest.raises(UserError, match=f"^{key}: '{name}' shares its weight"):
            check_model_parts(model, tied, make_lora_config(model), [])
