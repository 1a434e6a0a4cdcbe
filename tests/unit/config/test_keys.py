"""Every key takes the values that it should, in any spelling, and refuses all others.

The error is one line that names key, value and range.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig, ModelConfig

from adora_vl.advantage import METHODS
from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.blocks import RolloutOptions, ToolOptions
from adora_vl.config.command import read_config_file
from adora_vl.config.trl_ranges import TYPE_BY_TRL_KEY
from adora_vl.config.values import annotations_of_keys, convert_key
from adora_vl.utils.cli import with_dotted_keys
from adora_vl.utils.errors import UserError
from tests.support.commands import CONFIG_DATACLASSES, parse
from tests.support.recipes import key_defaults

ROOT = Path(__file__).parents[3]
CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "nowhere"]
ANNOTATION_BY_KEY: dict[str, Any] = {
    key: hint
    for dataclass in CONFIG_DATACLASSES
    for key, hint in annotations_of_keys(dataclass).items()
}
OPTION_CLASSES = {
    "adora_rollouts": RolloutOptions,
    "adora_tool_options": ToolOptions,
}
ANNOTATION_BY_KEY |= {
    f"{block}.{name}": hint
    for block, kind in OPTION_CLASSES.items()
    for name, hint in annotations_of_keys(kind).items()
}
OUR_KEYS = (
    {key for key in ANNOTATION_BY_KEY if "." in key}
    | set(annotations_of_keys(AdoraScriptArguments))
    | set(annotations_of_keys(AdoraGRPOConfig)) - set(annotations_of_keys(GRPOConfig))
)

ANNOTATION_BY_METHOD_OPTION: dict[str, Any] = {
    f"adora_method.{name}.{option.name}": get_type_hints(method)[option.name]
    for name, method in METHODS.items()
    for option in fields(method)
}


class NumberCase(NamedTuple):
    """Values of a key that are refused and accepted, and its range as an error line has it."""

    refused_values: list[object]
    accepted_values: list[object]
    range_in_words: str


NUMBER_CASE_BY_KEY: dict[str, NumberCase] = {
    "adora_synthetic_rows": NumberCase([0, -1, 1.5], [1, "1e3"], "a whole number of at least 1"),
    "adora_mixture": NumberCase([[0, 1], [0.5, 1.5]], [[1.0]], "a number above 0 and at most 1"),
    "adora_rollouts.refill": NumberCase([-1, 1.5], [0, 3], "a whole number of at least 0"),
    "adora_rollouts.budget": NumberCase(
        [0, 1.5],
        [1, "250", None],
        "a whole number of at least 1 or auto or null",
    ),
    "adora_rollouts.ahead": NumberCase(
        [-1, 5, 0.5], [0, 4], "a whole number of at least 0 and at most 4"
    ),
    "adora_recompute": NumberCase(
        [-1, 1.5], [0, 12], "a whole number of at least 0 or auto or all"
    ),
    "adora_record_gb": NumberCase([-1], [0, 0.5], "a number of at least 0"),
    "adora_max_ratio": NumberCase([0, 0.9, -1], [1, None], "a number of at least 1 or null"),
    "adora_reward_timeout": NumberCase(
        [0, -1, 1e10],
        [0.1, None],
        "a number of at least 0.001 and at most 1000000000 or null",
    ),
    "adora_tool_options.max_pixels": NumberCase(
        [783, 1.5],
        [784, None],
        "a whole number of at least 784 or null",
    ),
    "adora_correct_above": NumberCase([], [-3, 0, 0.5], "a number"),
    "adora_truncated": NumberCase(
        [0, 1.5], [1, None], "a whole number of at least 1 or eos or null"
    ),
}
NOT_NUMBERS: list[object] = [
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
NEVER_EMPTY = (
    "dataset_name",
    "dataset_train_split",
    "adora_method",
    "vllm_server_host",
    "output_dir",
    "model_name_or_path",
)
# What can only be a mistake in a key of TRL's that configs/train/annotated.yaml explains, or that
# our code reads.
MISTAKES_IN_TRL_KEYS = {
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


def types_in(hint: Any) -> set[Any]:
    """Return an annotation's plain types: {float, NoneType} for `Annotated[float, ...] | None`.

    The types of a list's entries are among them.
    """
    if get_origin(hint) is Annotated:
        return types_in(get_args(hint)[0])
    if get_origin(hint) in (None, Literal, dict):
        return {get_origin(hint) or hint}
    return {get_origin(hint)}.union(*map(types_in, get_args(hint)))


def words_in(hint: Any) -> tuple[str, ...]:
    """Return the words of the `Literal` in an annotation; empty if there is none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    words: tuple[str, ...] = ()
    for argument in get_args(hint):
        words += words_in(argument)
    return words


# The words of each key that takes one of a list.
WORDS_BY_KEY = {
    key: words_in(ANNOTATION_BY_KEY[key]) for key in OUR_KEYS if words_in(ANNOTATION_BY_KEY[key])
}
MAPPING_KEYS = [
    key
    for key, hint in ANNOTATION_BY_KEY.items()
    if dict in types_in(hint) and key not in ("adora_method", "adora_reward")
]


def error_of(key: str, value: object) -> str:
    """Return the error for a value of a key; empty if the value is taken."""
    try:
        convert_key(key, value, {**ANNOTATION_BY_KEY, **ANNOTATION_BY_METHOD_OPTION}[key])
    except UserError as error:
        return str(error)
    return ""


def error_of_command(*arguments: str) -> str:
    """Return the error for the words of a training command; empty if they are taken."""
    try:
        parse([*CPU, *arguments])
    except UserError as error:
        return str(error)
    return ""


def is_refusal(line: str, key: str, expected: str = "") -> bool:
    """Return whether an error is the one line `key: VALUE is not EXPECTED`."""
    return (
        line.startswith(f"{key}: ")
        and f" is not {expected}" in line
        and len(line.splitlines()) == 1
    )


def wrongly_taken(keys: Iterable[str], values: Iterable[object]) -> list[tuple[str, object]]:
    """Return each key with each of the values that it takes, or refuses in the wrong words."""
    pairs = product(keys, values)
    return [(key, value) for key, value in pairs if not is_refusal(error_of(key, value), key)]


def test_a_number_outside_its_range_is_refused_with_key_value_and_range():
    """A value is refused as a number and as a text, with the same line for both."""
    for key, case in NUMBER_CASE_BY_KEY.items():
        for value in case.refused_values:
            value_in_error = value
            if isinstance(value, list):
                # The line has the first entry that is wrong.
                value_in_error = next(entry for entry in value if not 0 < entry <= 1)
            for spelling in (value, str(value)):
                assert (
                    error_of(key, spelling)
                    == f"{key}: {value_in_error} is not {case.range_in_words}"
                )


def test_what_lies_in_the_range_is_taken_in_every_spelling_with_its_type():
    """`4`, `"4"` and `" 4 "` are the number 4, a float for a key of fractions; None is null."""
    for key, case in NUMBER_CASE_BY_KEY.items():
        for value in case.accepted_values:
            number: float | None = None
            if value is not None:
                number = float(str(value).strip("[]"))
                if case.range_in_words.startswith("a whole"):
                    number = int(number)
            spellings = [value, str(value)]
            if not isinstance(value, list):
                spellings.append(f" {value} ")
            for spelling in spellings:
                word = "null" if str(spelling).strip() == "None" else spelling
                converted = convert_key(key, word, ANNOTATION_BY_KEY[key])
                # `repr` tells 1 from 1.0; a key with a list has a list of one.
                assert repr(converted) in (repr(number), repr([number])), (key, spelling)


def test_nan_infinity_and_what_is_no_number_is_refused_by_every_number_of_ours():
    """Our keys with a number refuse `NOT_NUMBERS`, and null if they are never None."""
    number_keys = [key for key in OUR_KEYS if types_in(ANNOTATION_BY_KEY[key]) & {int, float}]
    never_null = [key for key in number_keys if NoneType not in types_in(ANNOTATION_BY_KEY[key])]

    assert wrongly_taken(number_keys, NOT_NUMBERS) == []
    assert len(never_null) >= 10
    assert wrongly_taken(never_null, [None, "null", "~"]) == []


def test_nan_and_infinity_are_refused_by_every_key_also_within_a_mapping_or_list():
    """NaN and infinity are refused by every key with numbers, and within mappings and lists.

    Keys of TRL and options of methods are among them.
    """
    numbers: list[str] = []
    for key, hint in {**ANNOTATION_BY_KEY, **ANNOTATION_BY_METHOD_OPTION}.items():
        types = types_in(hint)
        if types & {int, float} and str not in types:
            numbers.append(key)
    assert "adora_method.adora.tau" in numbers
    assert len(numbers) > 70
    assert len(MAPPING_KEYS) > 10
    for not_finite in (float("nan"), float("inf"), float("-inf"), 10**400):
        assert wrongly_taken(numbers, [not_finite, str(not_finite)]) == []
        assert wrongly_taken(MAPPING_KEYS, [{"a": [not_finite]}]) == []
    assert wrongly_taken(MAPPING_KEYS, ['{"a": NaN}']) == []


def test_a_name_is_one_of_its_list_and_a_wrong_one_is_answered_with_the_nearest():
    """A key with a list of names takes these alone; a misspelt one is answered with the right one.

    The misspelt name lacks the last letter of the first one.
    """
    for key, names in WORDS_BY_KEY.items():
        hint = ANNOTATION_BY_KEY[key]
        for name in names:
            assert convert_key(key, name, hint) in (name, [name]), key
        misspelt = names[0][:-1]
        for value in ("nonsense", "", "1.5", 7, {"a": 1}, None, misspelt):
            expected = f"one of {', '.join(names)}"
            # A key with a list of names has another line for what is no list of words.
            if list in types_in(hint) and value in ("", {"a": 1}, None):
                expected = ""
            assert is_refusal(error_of(key, value), key, expected), (key, value)
        assert error_of(key, misspelt).endswith(f"; did you mean '{names[0]}'?")


def test_a_switch_is_true_or_false():
    """Every key with the annotation bool takes the words that people write for true and false."""
    switches: list[str] = []
    for key, hint in ANNOTATION_BY_KEY.items():
        types = types_in(hint)
        if bool in types and not types & {Literal, str, dict}:
            switches.append(key)
    assert len(switches) > 60
    assert wrongly_taken(switches, ["maybe", "", 2, [True], {"a": True}, "nan"]) == []
    for key in switches:
        for word in (True, "true", "Yes", "1", 1, "t"):
            assert convert_key(key, word, ANNOTATION_BY_KEY[key]) is True
        for word in (False, "false", "NO", "0", 0, "f"):
            assert convert_key(key, word, ANNOTATION_BY_KEY[key]) is False


def test_a_name_of_a_place_is_not_empty_and_a_mapping_is_one():
    """An empty name of a model, data set, host or folder is refused, and a mapping that is none.

    `deepspeed` may name a JSON file with a mapping, which needs a stage of ZeRO.
    """
    assert wrongly_taken(NEVER_EMPTY, ["", "  ", True]) == []
    assert wrongly_taken(MAPPING_KEYS, ["{", "[1]", 5, "", "nowhere"]) == []
    assert "a JSON file with a mapping in it" in error_of("deepspeed", __file__)
    for zero in (3, None, {"stage": 7}, {"stage": True}):
        line = error_of("deepspeed", {"zero_optimization": zero})
        assert line.startswith("deepspeed: zero_optimization: ")
        assert "is not a mapping with a stage from 0 to 3, such as {stage: 2}" in line
    assert "null is not a mapping with a stage" in error_of("deepspeed", "{a: 1}")


def test_a_key_of_trl_that_the_annotated_config_explains_has_a_range():
    """A value out of its range is refused, and no explained number or text is without a range."""
    for key, value in MISTAKES_IN_TRL_KEYS.items():
        assert is_refusal(error_of(key, str(value)), key), key
    assert is_refusal(error_of("seed", 2**32), "seed"), "numpy takes a seed below 2**32"
    assert error_of("seed", 2**32 - 1) == ""
    explained = read_config_file(ROOT / "configs" / "train" / "annotated.yaml").keys() - OUR_KEYS
    without_range = {
        key for key in explained if ANNOTATION_BY_KEY[key] in (bool, bool | None, list[str] | None)
    }
    assert explained - without_range <= MISTAKES_IN_TRL_KEYS.keys() | set(NEVER_EMPTY)


ERRORS_OF_TRL = {
    "--generation_batch_size=3": "generation_batch_size (3) must be divisible by the global batch size (8).",
    "--warmup_steps=-1": "warmup_steps must be an integer or a float",
    "--auto_find_batch_size": "auto_find_batch_size is not supported by GRPO",
    "--dataloader_prefetch_factor=2": "--dataloader_prefetch_factor can only be set when data is loaded in",
}


def test_what_trl_refuses_is_told_in_its_own_sentence_in_one_line():
    """`ERRORS_OF_TRL` has, by word, a part of the error that TRL raises for it."""
    for word, error_of_trl in ERRORS_OF_TRL.items():
        line = error_of_command(word)
        assert error_of_trl in line
        assert "\n" not in line


def test_file_command_line_and_python_say_the_same(tmp_path):
    """A wrong value has the same error line in a file, on the command line and in Python."""
    path = tmp_path / "c.yaml"
    wrong_values: dict[str, Any] = {
        "adora_max_drift": -2,
        "adora_max_ratio": float("nan"),
        "beta": -1,
        "loss_type": "gpro",
        "adora_vllm_dtype": "boost",
        "adora_self_check": "maybe",
        "adora_record_gb": None,
        "epsilon": float("inf"),
    }
    for key, value in wrong_values.items():
        path.write_text(yaml.safe_dump({key: value}))
        value_as_word = "null" if value is None else value
        with pytest.raises(UserError) as refused:
            AdoraGRPOConfig(
                use_cpu=True,
                bf16=False,
                output_dir="nowhere",
                **{key: value},
            )
        lines = [
            error_of_command("--config", str(path)),
            error_of_command(f"--{key}={value_as_word}"),
            str(refused.value),
        ]
        # Quotation marks may differ: on the command line a value is a text.
        unquoted_lines = {line.replace("'", "") for line in lines}
        assert len(unquoted_lines) == 1
        assert is_refusal(unquoted_lines.pop(), key)
    with pytest.raises(
        UserError, match=r"^adora_mixture: 2 is not a number above 0 and at most 1$"
    ):
        AdoraScriptArguments(adora_mixture=[2])


# Values as YAML reads them: `1e-3` is a text there, and so is what stands in quotes.
SPELLINGS_IN_YAML = (0, 1, 2, 3.0, 0.5, -1, "1e-3", "4e0", "2", "true", "none", None, True, "auto")
# Keys of TRL whose values this project converts. Without an `output_dir` Python code gets TRL's.
KEYS_OF_BOTH_WAYS = sorted(
    (TYPE_BY_TRL_KEY.keys() | {"max_tool_calling_iterations", "vllm_server_host"})
    & set(annotations_of_keys(AdoraGRPOConfig)) - {"output_dir"}
)


def value_or_error(build: Callable[[], AdoraGRPOConfig], key: str) -> str:
    """Return a key's value in the config that `build` makes, 1 told from 1.0; else the error."""
    try:
        return repr(getattr(build(), key))
    except (UserError, ValueError) as error:
        return " ".join(str(error).split())


@pytest.mark.parametrize("key", KEYS_OF_BOTH_WAYS)
def test_python_code_gets_the_value_and_type_that_a_config_file_gets(key, tmp_path):
    """A config that Python code reads from a YAML file is the one that `--config` reads from it."""
    path = tmp_path / "c.yaml"
    settings = {"use_cpu": True, "bf16": False, "output_dir": "nowhere"}
    for written in SPELLINGS_IN_YAML:
        values: dict[str, Any] = {**settings, key: written}
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        from_file = value_or_error(lambda: parse(["--config", str(path)])[1], key)
        from_python = value_or_error(partial(AdoraGRPOConfig, **values), key)
        assert from_python == from_file, written


@given(
    st.sampled_from(sorted(ANNOTATION_BY_KEY)),
    st.sampled_from(["null", "NULL", "~", " null ", None, "none", "None", ["null"]]),
)
def test_null_and_none_are_null_or_refused_and_never_a_text(key, written):
    """null and none, in any spelling, become None or are refused; two keys have a value none.

    Otherwise `--adora_system_prompt none` would train with the prompt "none".
    """
    hint = ANNOTATION_BY_KEY[key]
    # Here none is a path, or a text of a key that is never null.
    says_none = written is not None and "none" in str(written).lower()
    if key == "resume_from_checkpoint" or (says_none and NoneType not in types_in(hint)):
        return
    line = error_of(key, written)
    if line:
        assert is_refusal(line, key)
        return
    converted = convert_key(key, written, hint)
    # These two take the word none.
    if converted is not None:
        assert key in ("report_to", "scale_rewards")
        assert converted in ("none", ["none"])


def test_the_documentation_has_every_key_of_ours_with_its_default():
    """The tables of docs/configuration.md have every key of this project with its default."""
    page = (ROOT / "docs/configuration.md").read_text()
    # A row is | `key`, `key` | default | ...
    rows = re.findall(r"^\| (`[\w.]+`(?:, `\w+`)*) \| (.*?) \|", page, re.M)
    text_by_key: dict[str, str] = {}
    for keys, text in rows:
        for key in re.findall(r"`([\w.]+)`", keys):
            text_by_key[key] = text.strip("`")
    assert text_by_key.keys() >= OUR_KEYS
    defaults = key_defaults()
    assert text_by_key["adora_prompt"].replace("\\n", "\n") == defaults["adora_prompt"]
    # the page says its default in words
    in_words = {"adora_eval"}
    for key in OUR_KEYS - in_words - {"adora_prompt"}:
        documented = yaml.safe_load(text_by_key[key])
        assert defaults[key] in (documented, [documented]), key


def test_keys_of_ours_are_few_and_each_is_explained_in_the_annotated_config():
    """This project has at most 42 keys of its own, each of which annotated.yaml explains.

    More would be more than a person reads; a key that is nowhere shown is never used.
    """
    keys = OUR_KEYS - OPTION_CLASSES.keys()
    annotated_config = read_config_file(ROOT / "configs" / "train" / "annotated.yaml")
    explained = {
        name for key, value in annotated_config.items() for name in with_dotted_keys(key, value)
    }
    # These two may be written in one line or with a block of their own.
    explained |= {"adora_method", "adora_extensions"} & annotated_config.keys()
    assert len(keys) <= 42  # as many as there are today
    assert keys <= explained


def test_the_ranges_of_theirs_are_of_keys_that_they_have():
    """A key that TRL renames has no range any more, so this fails."""
    assert TYPE_BY_TRL_KEY.keys() <= set(annotations_of_keys(GRPOConfig)) | set(
        annotations_of_keys(ModelConfig)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bf16": True, "fp16": True}, "bf16: true, but fp16: true as well; set one of them"),
        (
            {"generation_batch_size": 8, "steps_per_generation": 3},
            "generation_batch_size: 8, but steps_per_generation: 3 says the same in other words",
        ),
    ],
)
def test_keys_that_exclude_each_other_are_named_with_their_values(keys, message):
    with pytest.raises(UserError) as refused:
        AdoraGRPOConfig("out", use_cpu=True, **{"bf16": False, **keys})
    assert str(refused.value).startswith(message)
