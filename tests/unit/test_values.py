"""Every key of the configuration refuses what it cannot use, in one line that names it; the dataclasses say which."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from adora_vl.advantage import METHODS
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.advantage import chosen_methods
from adora_vl.config.command_line import DATACLASSES, parse
from adora_vl.config.names import names_of
from adora_vl.config.ranges import RANGES
from adora_vl.config.values import convert, declared
from adora_vl.errors import UserError
from adora_vl.train import main
from adora_vl.words import split_list

CPU = ["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "tiny", "--output_dir", "nowhere"]
KEYS = {key: facts for dataclass in DATACLASSES for key, facts in declared(dataclass).items()}
NAMED = {key: names for key, facts in KEYS.items() if (names := names_of(key, *facts))}

# Keys that take any text or mapping, or whose values are checked elsewhere: not fuzzed here, and why.
FREE = {
    **dict.fromkeys(
        (
            "run_name", "project", "trackio_space_id", "trackio_bucket_id", "hub_token", "hub_model_id", "hub_revision",
            "log_completions_hub_repo", "length_column_name", "adora_system_prompt", "metric_for_best_model",
            "adora_prompt", "adora_system_prompt_file",
        ),
        "a name or text of the user's own",
    ),
    **dict.fromkeys(
        ("output_dir", "dataset_name", "dataset_train_split", "model_name_or_path", "model_revision"),
        "a place: refused when it is empty, else looked up (test_bad_input.py)",
    ),
    **dict.fromkeys(
        ("adora_reward", "adora_method", "adora_eval", "resume_from_checkpoint"),
        "looked up in a registry or on the disk (test_bad_input.py, test_method_keys.py, test_checkpoint.py)",
    ),
    **dict.fromkeys(
        (
            "optim_args", "optim_target_modules", "torch_compile_backend", "torch_compile_mode", "debug", "fsdp",
            "cache_implementation", "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host",
            "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "lora_task_type",
            "bnb_4bit_quant_storage", "include_for_metrics", "label_names", "trackio_static_space_id",
        ),
        "handed on to a library, whose values we cannot list",
    ),
    "parallelism_config": "an object that only Python can give",
}  # fmt: skip


def kinds(hint: Any) -> set[Any]:
    return {get_origin(each) or each for each in (hint, *get_args(hint))}


BOOLS = [key for key, (hint, _) in KEYS.items() if bool in kinds(hint) and key not in NAMED and key not in FREE]
MAPPINGS = [key for key, (hint, _) in KEYS.items() if dict in kinds(hint) and key != "adora_method_options"]


def bad_numbers(key: str) -> list[Any]:
    """Values outside the range of `key`, of a wrong kind, and none at all."""
    limits = RANGES[key]
    bad: list[Any] = ["nan", "inf", "-inf", "three", "", "1,2,three", "true", {"a": 1}]
    if limits.low > -1e300:
        bad += [limits.low - 1, -1e30, *([limits.low] if limits.above else [])]
    if limits.high < 1e300:
        bad += [limits.high + 1, 1e30, *([limits.high] if limits.below else [])]
    if limits.whole:
        bad += [limits.low + 1.5]
    if get_origin(KEYS[key][0]) is not list and list not in kinds(KEYS[key][0]):
        bad += [[2, 3]] + ([] if limits.null else ["null", None])
    return [value for value in bad if value not in limits.also]


def bad_names(key: str) -> list[Any]:
    return [value for value in ("nonsense", "", "1.5", 7, {"a": 1}) if value not in NAMED[key]]


BAD: dict[str, list[Any]] = {
    **{key: bad_numbers(key) for key in RANGES},
    **{key: bad_names(key) for key in NAMED},
    **{key: ["maybe", "", 2, [True], {"a": True}] for key in BOOLS},
    **{key: ["{", "[1]", 5, ""] for key in MAPPINGS},
}


@pytest.mark.parametrize("key", BAD)
def test_what_a_key_cannot_use_is_refused_in_one_line_that_names_it(key):
    for value in BAD[key]:
        with pytest.raises(UserError) as refused:
            convert(key, value, *KEYS[key])
            pytest.fail(f"{key}: {value!r} was taken")
        line = str(refused.value)
        assert line.startswith(f"{key}: ") and " is not " in line and len(line.splitlines()) == 1


def test_every_key_is_in_the_fuzz_or_has_its_reason():
    numbers = {key for key, (hint, _) in KEYS.items() if kinds(hint) & {int, float}}
    assert numbers <= RANGES.keys() | NAMED.keys() | set(BOOLS)
    covered = {*RANGES, *NAMED, *BOOLS, *MAPPINGS, "adora_method_options", *FREE}
    assert covered == KEYS.keys()
    assert not FREE.keys() & {*RANGES, *NAMED}


# The fuzz above reads the table of ranges; these say what the table has to refuse.
NONSENSE = {
    "beta": -1, "learning_rate": -1, "temperature": 0, "num_train_epochs": 0, "max_steps": -7, "num_generations": 1,
    "max_completion_length": 0, "seed": -1, "vllm_gpu_memory_utilization": 7, "adora_max_ratio": -1, "epsilon": -0.1,
    "adora_max_bad_steps": 0, "adora_factor": 0, "adora_tau": 0, "adora_max_drift": 0, "save_steps": 0, "top_p": 0,
    "per_device_train_batch_size": 0, "gradient_accumulation_steps": 0, "steps_per_generation": 0, "lora_r": 0,
    "num_iterations": 0, "adam_beta1": 1, "max_grad_norm": -1, "save_total_limit": 0, "adora_record_gb": 0,
}  # fmt: skip


@pytest.mark.parametrize("key", NONSENSE)
def test_a_number_that_can_only_be_a_mistake_is_refused(key):
    with pytest.raises(UserError, match=f"^{key}: {NONSENSE[key]} is not "):
        convert(key, str(NONSENSE[key]), *KEYS[key])


@pytest.mark.parametrize("key", sorted(RANGES))
def test_the_ends_of_a_range_and_the_default_are_taken(key):
    limits = RANGES[key]
    default = next(each.default for dataclass in DATACLASSES for each in fields(dataclass) if each.name == key)
    taken = [default] if default is not None else []
    taken += [limits.low] if limits.low > -1e300 and not limits.above else []
    taken += [limits.high] if limits.high < 1e300 and not limits.below else []
    assert taken or limits.null or key == "reward_weights"
    for value in taken:
        for written in (value, str(value)):
            found = convert(key, written, *KEYS[key])
            assert found in (value, [value]) and (not limits.whole or type(found) in (int, str))
    if limits.null:
        assert convert(key, "null", *KEYS[key]) is None is convert(key, None, *KEYS[key])


@pytest.mark.parametrize("key", sorted(NAMED))
def test_every_name_of_a_key_is_taken(key):
    for name in NAMED[key]:
        assert convert(key, name, *KEYS[key]) in (name, [name])


@pytest.fixture
def refused(monkeypatch, capsys):
    def no_weights(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", no_weights)

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main([*CPU, *words]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if line.startswith("error: ")]) == 1 == len(lines)
        return lines[0]

    return run


@pytest.mark.parametrize("key", BAD)
def test_the_command_ends_with_that_line_and_exit_code_2(refused, key):
    assert refused(f"--{key}={BAD[key][0]}").startswith(f"error: {key}: ")


def test_a_file_is_checked_as_the_command_line_is(refused, tmp_path):
    """The same keys, in a YAML file with YAML's own kinds; several a file would stop at the first."""
    path = tmp_path / "c.yaml"
    on_the_command_line = {word[2:] for word in CPU}
    for key in sorted(BAD.keys() - on_the_command_line)[::16]:
        for value in (BAD[key][0], BAD[key][-1]):
            path.write_text(yaml.safe_dump({key: value}))
            assert refused("--config", str(path)).startswith(f"error: {key}: "), (key, value)


def test_python_gets_the_same_checks():
    wrong: dict[str, Any] = {"beta": float("nan"), "adora_max_ratio": -1, "loss_type": "gpro", "num_generations": 0}
    for key, value in wrong.items():
        with pytest.raises(UserError, match=f"^{key}: "):
            AdoraGRPOConfig(use_cpu=True, bf16=False, output_dir="nowhere", **{key: value})


@settings(deadline=None)
@given(st.sampled_from(sorted(KEYS)), st.sampled_from(["null", "NULL", "~", " null ", None]))
def test_null_is_null_or_refused_and_never_a_text(key, written):
    try:
        value = convert(key, written, *KEYS[key])
    except UserError as error:
        assert str(error).startswith(f"{key}: null is not ")
    else:
        assert value is None or (key, value) == ("report_to", "none")


@pytest.mark.parametrize("key", sorted(KEYS))
def test_none_is_null_or_a_name_and_no_text_of_a_key_that_may_be_null(key):
    """`--adora_system_prompt none` would train with the prompt "none"."""
    hint, choices = KEYS[key]
    if type(None) not in get_args(hint) or key == "resume_from_checkpoint":
        return
    for written in ("none", "None", " NONE "):
        try:
            found = convert(key, written, hint, choices)
        except UserError as error:
            assert str(error).startswith(f"{key}: "), error
        else:
            assert found is None or "none" in NAMED.get(key, ()), (key, found)


def test_null_on_the_command_line_is_no_system_prompt(tmp_path):
    (tmp_path / "c.yaml").write_text("adora_system_prompt: null\n")
    for words in (
        ["--adora_system_prompt", "null"],
        ["--adora_system_prompt", "None"],
        ["--config", str(tmp_path / "c.yaml")],
    ):
        assert parse([*CPU, *words])[0].adora_system_prompt is None


entries = st.lists(st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True).filter(lambda w: w not in ("y", "n", "no",
    "on", "yes", "off", "true", "null", "false")), min_size=1, max_size=4)  # fmt: skip


@settings(deadline=None)
@given(entries)
def test_a_list_is_written_with_spaces_commas_or_brackets(words):
    inside = ", ".join(words)
    for written in (words, [",".join(words)], [f"[{inside}]"], f"[{inside}]".split(" "), [f"[{','.join(words)}]"]):
        assert split_list(written) == words


@pytest.mark.parametrize("word", [r"^(?!.*visual).*(q|v)_proj$", r"layers\.[0-9]{1,2}\.q_proj", "[qv]_proj|o_proj"])
def test_a_regular_expression_is_one_entry(word):
    assert parse([*CPU, "--lora_target_modules", word])[2].lora_target_modules == word


@pytest.mark.parametrize("name", METHODS)
def test_no_option_of_a_method_takes_a_number_that_is_not_finite(name):
    for option in fields(METHODS[name].options):
        default = option.default if isinstance(option.default, (int, float)) else None
        scheduled = "Schedule" in str(option.type)
        if isinstance(default, bool) or (default is None and not scheduled):
            continue
        for bad in ("NaN", "Infinity", "-Infinity"):
            options = f'{{"{option.name}": {bad}}}'
            config = AdoraGRPOConfig(
                use_cpu=True, bf16=False, output_dir="nowhere", adora_method=name, num_generations=8,
                adora_method_options=options,
            )  # fmt: skip
            with pytest.raises(UserError, match=f"adora_method_options: {option.name}: .* is not a finite number"):
                chosen_methods(config)


def test_a_gpu_recipe_on_a_cpu_names_the_key_and_the_recipe_for_a_cpu(monkeypatch, refused):
    for name in ("is_torch_bf16_gpu_available", "is_torch_cuda_available", "is_torch_xla_available"):
        monkeypatch.setattr(f"adora_vl.config.device.{name}", lambda: False)
    for key in ("bf16", "fp16"):
        line = refused("--use_cpu", "false", "--bf16", "false", f"--{key}", "true")
        assert line.startswith(f"error: {key}: true needs a GPU") and "smoke_cpu.yaml" in line
