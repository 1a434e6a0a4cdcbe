"""Every key takes what it says, in any spelling, and refuses the rest in one line that names key,
value and range.
"""

import re
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig, ModelConfig

from adora_vl.advantage import METHODS
from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.blocks import RolloutOptions, ToolOptions
from adora_vl.config.command import read_file
from adora_vl.config.schema import DATACLASSES, parse
from adora_vl.config.trl_ranges import RANGES
from adora_vl.config.values import annotations_of_keys, convert
from adora_vl.utils.cli import dotted
from adora_vl.utils.errors import UserError
from tests.support.recipes import key_defaults

ROOT = Path(__file__).parents[3]
CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "nowhere"]
KEYS: dict[str, Any] = {
    key: hint for dataclass in DATACLASSES for key, hint in annotations_of_keys(dataclass).items()
}
BLOCKS = {
    "adora_rollouts": RolloutOptions,
    "adora_tool_options": ToolOptions,
}
KEYS |= {
    f"{block}.{name}": hint
    for block, kind in BLOCKS.items()
    for name, hint in annotations_of_keys(kind).items()
}
OURS = (
    {key for key in KEYS if "." in key}
    | set(annotations_of_keys(AdoraScriptArguments))
    | set(annotations_of_keys(AdoraGRPOConfig)) - set(annotations_of_keys(GRPOConfig))
)

METHOD_OPTIONS: dict[str, Any] = {
    f"adora_method.{name}.{option.name}": get_type_hints(method)[option.name]
    for name, method in METHODS.items()
    for option in fields(method)
}

# Of numbers of each kind: what is refused, what is taken, and the range as a person reads it.
NUMBERS: dict[str, tuple[list[object], list[object], str]] = {
    "adora_synthetic_rows": ([0, -1, 1.5], [1, "1e3"], "a whole number of at least 1"),
    "adora_mixture": ([[0, 1], [0.5, 1.5]], [[1.0]], "a number above 0 and at most 1"),
    "adora_rollouts.refill": ([-1, 1.5], [0, 3], "a whole number of at least 0"),
    "adora_rollouts.budget": (
        [0, 1.5],
        [1, "250", None],
        "a whole number of at least 1 or auto or null",
    ),
    "adora_rollouts.ahead": ([-1, 5, 0.5], [0, 4], "a whole number of at least 0 and at most 4"),
    "adora_recompute": ([-1, 1.5], [0, 12], "a whole number of at least 0 or auto or all"),
    "adora_record_gb": ([-1], [0, 0.5], "a number of at least 0"),
    "adora_max_ratio": ([0, 0.9, -1], [1, None], "a number of at least 1 or null"),
    "adora_reward_timeout": (
        [0, -1, 1e10],
        [0.1, None],
        "a number of at least 0.001 and at most 1000000000 or null",
    ),
    "adora_tool_options.max_pixels": (
        [783, 1.5],
        [784, None],
        "a whole number of at least 784 or null",
    ),
    "adora_correct_above": ([], [-3, 0, 0.5], "a number"),
    "adora_truncated": ([0, 1.5], [1, None], "a whole number of at least 1 or eos or null"),
}
NO_NUMBER: list[object] = [
    "nan",
    "inf",
    "-inf",
    float("nan"),
    float("inf"),
    "1e999",
    "three",
    "",
    "0x10",
    True,
    {"a": 1},
]
FILLED = (
    "dataset_name",
    "dataset_train_split",
    "adora_method",
    "vllm_server_host",
    "output_dir",
    "model_name_or_path",
)
# What can only be a mistake in a key of TRL's that configs/train/annotated.yaml explains, or that
# our code reads.
THEIRS = {
    "beta": -1,
    "learning_rate": -1,
    "temperature": 0,
    "num_train_epochs": 0,
    "max_steps": -7,
    "num_generations": 1,
    "max_completion_length": 0,
    "seed": -1,
    "vllm_gpu_memory_utilization": 7,
    "save_steps": 0,
    "save_total_limit": 0,
    "per_device_train_batch_size": 0,
    "gradient_accumulation_steps": 0,
    "steps_per_generation": 0,
    "lora_r": 0,
    "num_iterations": 0,
    "lora_alpha": 0,
    "lora_dropout": 1,
    "logging_steps": 0,
    "eval_steps": 0.5,
    "generation_batch_size": 0,
    "vllm_tensor_parallel_size": 0,
    "vllm_max_model_length": 0,
    "num_completions_to_print": -1,
    "vllm_importance_sampling_clip_max": 0,
    "vllm_importance_sampling_clip_min": -1,
    "loss_type": "gpro",
    "vllm_mode": "colocated",
    "vllm_importance_sampling_mode": "token",
    "scale_rewards": "groups",
    "multi_objective_aggregation": "sum",
    "importance_sampling_level": "tokens",
    "attn_implementation": "eger",
    "report_to": "wandbb",
    "lr_scheduler_type": "cosin",
    "optim": "adamm",
    "eval_strategy": "step",
    "save_strategy": "step",
    "dtype": "bf16",
    "log_level": "loud",
    "top_p": 3,
    "top_k": -2,
    "min_p": 1.5,
    "repetition_penalty": 0,
    "epsilon_high": -0.1,
    "delta": 0,
    "off_policy_mask_threshold": 0,
    "sapo_temperature_pos": 0,
    "sapo_temperature_neg": -1,
    "vespo_k_pos": -1,
    "vespo_lambda_pos": -1,
    "vespo_k_neg": -1,
    "vespo_lambda_neg": -1,
    "top_entropy_quantile": 0,
    "entropy_coef": -0.01,
    "entropy_coef_min": -1,
    "entropy_coef_max": -1,
    "entropy_coef_delta": -1,
    "entropy_target": -1,
    "max_tool_calling_iterations": 0,
}


def arms(hint: Any) -> set[Any]:
    """The plain types of a hint: float for `Annotated[float, ...] | None`, and those inside of a
    list too.
    """
    if get_origin(hint) is Annotated:
        return arms(get_args(hint)[0])
    if get_origin(hint) in (None, Literal, dict):
        return {get_origin(hint) or hint}
    return {get_origin(hint)}.union(*map(arms, get_args(hint)))


def names_of(hint: Any) -> tuple[str, ...]:
    """The names of which a hint wants one."""
    return get_args(hint) if get_origin(hint) is Literal else sum(map(names_of, get_args(hint)), ())


NAMES = {key: names for key in OURS if (names := names_of(KEYS[key]))}


def said(key: str, value: object) -> str:
    """The line of the refusal; empty where the value is taken."""
    try:
        convert(key, value, {**KEYS, **METHOD_OPTIONS}[key])
    except UserError as error:
        return str(error)
    return ""


def said_by_parser(*words: str) -> str:
    try:
        parse([*CPU, *words])
    except UserError as error:
        return str(error)
    return ""


def is_refusal(line: str, key: str, expected: str = "") -> bool:
    return (
        line.startswith(f"{key}: ")
        and f" is not {expected}" in line
        and len(line.splitlines()) == 1
    )


def test_a_number_outside_its_range_is_refused_with_key_value_and_range():
    wrong = []
    for key, (refused, _, words) in NUMBERS.items():
        for value in refused:
            shown = (
                next(each for each in value if not 0 < each <= 1)
                if isinstance(value, list)
                else value
            )
            for written in (value, str(value)):
                if said(key, written) != f"{key}: {shown} is not {words}":
                    wrong.append((key, written, said(key, written)))
    assert wrong == []


def test_what_lies_in_the_range_is_taken_in_every_spelling_with_its_type():
    wrong = []
    for key, (_, taken, words) in NUMBERS.items():
        for value in taken:
            number = None if value is None else float(str(value).strip("[]"))
            number = int(number) if number is not None and words.startswith("a whole") else number
            for written in (
                value,
                str(value),
                *([] if isinstance(value, list) else [f" {value} "]),
            ):
                found = convert(
                    key, "null" if str(written).strip() == "None" else written, KEYS[key]
                )
                if repr(found) not in (repr(number), repr([number])):
                    wrong.append((key, written, found))
    assert wrong == []


def test_nan_infinity_and_what_is_no_number_is_refused_by_every_number_of_ours():
    numbers = [key for key in OURS if arms(KEYS[key]) & {int, float}]
    bad = [(key, value) for key in numbers for value in NO_NUMBER]
    assert [(key, value) for key, value in bad if not is_refusal(said(key, value), key)] == []
    never_null = [key for key in numbers if NoneType not in arms(KEYS[key])]
    assert len(never_null) >= 10
    assert [
        key
        for key in never_null
        for value in (None, "null", "~")
        if not is_refusal(said(key, value), key)
    ] == []


def test_nan_and_infinity_are_refused_by_every_key_also_within_a_mapping_or_list():
    takes = {**KEYS, **METHOD_OPTIONS}
    numbers = [
        key for key, hint in takes.items() if arms(hint) & {int, float} and str not in arms(hint)
    ]
    assert "adora_method.adora.tau" in numbers
    mappings = [
        key
        for key, hint in KEYS.items()
        if dict in arms(hint) and key not in ("adora_method", "adora_reward")
    ]
    assert len(numbers) > 70
    assert len(mappings) > 10
    for inf in (float("nan"), float("inf"), float("-inf"), 10**400):
        assert [key for key in numbers if not is_refusal(said(key, inf), key)] == []
        assert [key for key in numbers if not is_refusal(said(key, str(inf)), key)] == []
        assert [key for key in mappings if not is_refusal(said(key, {"a": [inf]}), key)] == []
    assert [key for key in mappings if not is_refusal(said(key, '{"a": NaN}'), key)] == []


def test_a_name_is_one_of_its_list_and_a_wrong_one_is_answered_with_the_nearest():
    for key, names in NAMES.items():
        assert [name for name in names if convert(key, name, KEYS[key]) not in (name, [name])] == []
        bad = ["nonsense", "", "1.5", 7, {"a": 1}, None, names[0][:-1]]
        expected = f"one of {', '.join(names)}"
        lines = {str(value): said(key, value) for value in bad}
        listed = ("", "{'a': 1}", "None") if list in arms(KEYS[key]) else ()
        assert [
            v
            for v, line in lines.items()
            if not is_refusal(line, key, "" if v in listed else expected)
        ] == []
        assert lines[names[0][:-1]].endswith(f"; did you mean '{names[0]}'?")


def test_a_switch_is_true_or_false():
    switches = [
        key
        for key, hint in KEYS.items()
        if bool in arms(hint) and not arms(hint) & {Literal, str, dict}
    ]
    assert len(switches) > 60
    for key in switches:
        assert [
            v
            for v in ("maybe", "", 2, [True], {"a": True}, "nan")
            if not is_refusal(said(key, v), key)
        ] == []
        assert all(
            convert(key, word, KEYS[key]) is True for word in (True, "true", "Yes", "1", 1, "t")
        )
        assert all(
            convert(key, word, KEYS[key]) is False for word in (False, "false", "NO", "0", 0, "f")
        )


def test_a_name_of_a_place_is_not_empty_and_a_mapping_is_one():
    assert [
        key for key in FILLED for value in ("", "  ", True) if not is_refusal(said(key, value), key)
    ] == []
    mappings = [
        key
        for key, hint in KEYS.items()
        if dict in arms(hint) and key not in ("adora_method", "adora_reward")
    ]
    assert [
        key
        for key in mappings
        for v in ("{", "[1]", 5, "", "nowhere")
        if not is_refusal(said(key, v), key)
    ] == []
    assert "a JSON file with a mapping in it" in said("deepspeed", __file__)


def test_a_key_of_trl_that_the_annotated_config_explains_has_a_range():
    wrong = {
        key: said(key, value)
        for key, value in THEIRS.items()
        if not is_refusal(said(key, str(value)), key)
    }
    assert wrong == {}
    assert is_refusal(said("seed", 2**32), "seed"), "what numpy takes"
    assert said("seed", 2**32 - 1) == "", "what numpy takes"
    explained = read_file(ROOT / "configs" / "train" / "annotated.yaml").keys() - OURS
    free = {key for key in explained if KEYS[key] in (bool, bool | None, list[str] | None)}
    assert explained - free <= THEIRS.keys() | set(FILLED)


SENTENCES = {
    "--generation_batch_size=3": "generation_batch_size (3) must be divisible by the global batch size (8).",
    "--warmup_steps=-1": "warmup_steps must be an integer or a float",
    "--auto_find_batch_size": "auto_find_batch_size is not supported by GRPO",
    "--dataloader_prefetch_factor=2": "--dataloader_prefetch_factor can only be set when data is loaded in",
    '--accelerator_config={"a": 1}': "got an unexpected keyword argument 'a'",
}


def test_what_trl_refuses_is_told_in_its_own_sentence_in_one_line():
    lines = {word: said_by_parser(word) for word in SENTENCES}
    assert {
        word: line for word, line in lines.items() if SENTENCES[word] not in line or "\n" in line
    } == {}


def test_file_command_line_and_python_say_the_same(tmp_path):
    """A value of each kind, by each of the three ways."""
    path = tmp_path / "c.yaml"
    wrong = {}
    rows: dict[str, Any] = {"adora_max_drift": -2, "adora_max_ratio": float("nan"), "beta": -1}
    rows |= {
        "loss_type": "gpro",
        "adora_vllm_dtype": "boost",
        "adora_self_check": "maybe",
        "adora_record_gb": None,
    }
    for key, value in {**rows, "epsilon": float("inf")}.items():
        path.write_text(yaml.safe_dump({key: value}))
        word = "null" if value is None else value
        lines = {
            re.sub("'", "", said_by_parser(*way))
            for way in (["--config", str(path)], [f"--{key}={word}"])
        }
        with pytest.raises(UserError) as refused:
            AdoraGRPOConfig(
                use_cpu=True,
                bf16=False,
                output_dir="nowhere",
                **{key: value},
            )
        lines.add(re.sub("'", "", str(refused.value)))
        if len(lines) > 1 or not is_refusal(lines.pop(), key):
            wrong[key] = lines
    assert wrong == {}
    with pytest.raises(
        UserError, match=r"^adora_mixture: 2 is not a number above 0 and at most 1$"
    ):
        AdoraScriptArguments(adora_mixture=[2])


@given(
    st.sampled_from(sorted(KEYS)),
    st.sampled_from(["null", "NULL", "~", " null ", None, "none", "None", ["null"]]),
)
def test_null_and_none_are_null_or_refused_and_never_a_text(key, written):
    """`--adora_system_prompt none` would train with the prompt "none"."""
    hint = KEYS[key]
    word = str(written).lower()
    if key == "resume_from_checkpoint" or (
        "none" in word and NoneType not in arms(hint) and written is not None
    ):
        return
    line = said(key, written)
    if line:
        assert line.startswith(f"{key}: ")
        assert " is not " in line
    else:
        found = convert(key, written, hint)
        assert found is None or "none" in (found, *(found if isinstance(found, list) else ()))
        assert found is None or key in ("report_to", "scale_rewards")


def test_the_documentation_has_every_key_of_ours_with_its_default():
    """In the tables of docs/configuration.md, which say two defaults in words."""
    rows = re.findall(
        r"^\| (`[\w.]+`(?:, `\w+`)*) \| (.*?) \|",
        (ROOT / "docs/configuration.md").read_text(),
        re.M,
    )
    stated = {
        key: text.strip("`") for keys, text in rows for key in re.findall(r"`([\w.]+)`", keys)
    }
    in_words = {"adora_eval"}
    assert stated["adora_prompt"].replace("\\n", "\n") == key_defaults()["adora_prompt"]
    assert stated.keys() >= OURS
    wrong = {}
    for key in OURS - in_words - {"adora_prompt"}:
        read = yaml.safe_load(stated[key])
        if key_defaults()[key] not in (read, [read]):
            wrong[key] = (stated[key], key_defaults()[key])
    assert wrong == {}


def test_keys_of_ours_are_few_and_each_is_explained_in_the_annotated_config():
    """More of them would be more than a person reads; one that is nowhere shown is never used."""
    keys = OURS - BLOCKS.keys()
    shown = read_file(ROOT / "configs" / "train" / "annotated.yaml")
    explained = {name for key, value in shown.items() for name in dotted(key, value)}
    # These two may be written in one line or with a block of their own.
    explained |= {"adora_method", "adora_extensions"} & shown.keys()
    assert len(keys) <= 42
    assert keys <= explained


def test_the_ranges_of_theirs_are_of_keys_that_they_have():
    assert RANGES.keys() <= set(annotations_of_keys(GRPOConfig)) | set(
        annotations_of_keys(ModelConfig)
    )
