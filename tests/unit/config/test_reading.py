"""How command line and config file are read: spellings, precedence, and mistakes of form."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from enum import Enum
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.config import command, trl_keys
from adora_vl.config.blocks import RolloutOptions
from adora_vl.config.command import COMMAND_OPTIONS, parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.help import help_text
from adora_vl.config.methods import build_pipeline
from adora_vl.utils.cli import read_mapping, split_list
from adora_vl.utils.errors import UserError
from tests.support.commands import CONFIG_DATACLASSES, parse

ROOT = Path(__file__).parents[3]
SLOW = {"torch", "transformers", "trl", "vllm"}
CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "nowhere"]


# the content of the config file, words of the command line, a key, and its value in the config
SPELLINGS: list[tuple[str, list[str], str, object]] = [
    ("adora_truncated: eos", [], "adora_truncated", "eos"),
    ("eval_strategy: no", [], "eval_strategy", "no"),
    ("scale_rewards: false", [], "scale_rewards", "none"),
    ("scale_rewards: true", [], "scale_rewards", "group"),
    ("report_to: null", [], "report_to", []),
    ("report_to: [wandb, tensorboard]", [], "report_to", ["wandb", "tensorboard"]),
    ("resume_from_checkpoint: true", [], "resume_from_checkpoint", True),
    ("learning_rate: 1e-6", [], "learning_rate", 1e-6),
    ("save_steps: 1e3", [], "save_steps", 1000),
    ("run_name: 2020-01-01", [], "run_name", "2020-01-01"),
    ("attn_implementation: owner/kernel", [], "attn_implementation", "owner/kernel"),
    ("adora_self_check: true", ["--no_adora_self_check"], "adora_self_check", False),
    ("use_peft: null", ["--use_peft"], "use_peft", True),
    ("adora_reward: easyr1", [], "adora_reward", ["easyr1"]),
    (
        "adora_reward: easyr1",
        ["--adora_reward", "accuracy", "format"],
        "adora_reward",
        ["accuracy", "format"],
    ),
    ("adora_system_prompt: null", [], "adora_system_prompt", None),
    ("{}", ["--adora_system_prompt", "None"], "adora_system_prompt", None),
    ("{}", ["--lora_target_modules", "null"], "lora_target_modules", None),
    (
        "{}",
        ["--lora_target_modules", r"^(?!.*visual).*(q|v)_proj$"],
        "lora_target_modules",
        r"^(?!.*visual).*(q|v)_proj$",
    ),
    ("{}", ["--reward_weights=[1, 2]"], "reward_weights", [1.0, 2.0]),
    ("{}", ["--adora_columns", '{"problem": "q"}'], "adora_columns", {"problem": "q"}),
    (
        "{}",
        ["--adora_columns", '{problem: q, "images": a.b}'],
        "adora_columns",
        {"problem": "q", "images": "a.b"},
    ),
    (
        "{}",
        ["--chat_template_kwargs={enable_thinking: false}"],
        "chat_template_kwargs",
        {"enable_thinking": False},
    ),
    (
        "{}",
        ["--adora_method", "{dapo: {overlong_cache: 5}}"],
        "adora_method",
        {"dapo": {"drop_constant": True, "overlong_cache": 5}},
    ),
    (
        "adora_method: dapo+daro",
        ["--adora_method.daro.floor", "0.2", "--adora_method.dapo.keep_settings", "beta"],
        "adora_method",
        {
            "dapo": {"drop_constant": True, "overlong_cache": None, "keep_settings": ["beta"]},
            "daro": {
                "learning_rate": 0.05,
                "bin_loss": "magnitude",
                "by_bin_tokens": True,
                "drop_outside": True,
                "floor": 0.2,
            },
        },
    ),
    ("{}", ["--max_completion_length", "4096"], "truncated_at", 4094),
    ("adora_truncated: 100", ["--max_completion_length", "4096"], "truncated_at", 100),
]


def test_how_people_write_a_value(tmp_path):
    """Each spelling of a value in `SPELLINGS` gives the expected value, of the expected type."""
    misread = []
    for content, arguments, key, expected in SPELLINGS:
        (tmp_path / "c.yaml").write_text(content)
        dataclasses_of_command = parse(["--config", str(tmp_path / "c.yaml"), *CPU, *arguments])
        value = next(
            getattr(dataclass, key)
            for dataclass in dataclasses_of_command
            if hasattr(dataclass, key)
        )
        if isinstance(value, Enum):
            value = value.value
        if (value, type(value)) != (expected, type(expected)):
            misread.append((content, arguments, value))
    assert misread == []


LIST_ENTRIES = st.lists(
    st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True).filter(
        lambda word: word not in ("y", "n", "no", "on", "yes", "off", "true", "null", "false")
    ),
    min_size=1,
    max_size=4,
)


@given(LIST_ENTRIES)
def test_a_list_is_written_with_spaces_commas_or_brackets(words):
    """`a b`, `a,b`, `[a, b]` as one word or as two, and `[a,b]` are the same list."""
    inside = ", ".join(words)
    for written in (
        words,
        [",".join(words)],
        [f"[{inside}]"],
        f"[{inside}]".split(" "),
        [f"[{','.join(words)}]"],
    ):
        assert split_list(written) == words


def test_command_line_over_file_over_default(tmp_path, monkeypatch):
    """The command line comes before the file, and the file before the default.

    `learning_rate` is in both, `num_generations` in the file, `adora_truncated` in neither.
    """
    monkeypatch.setenv("OF_THE_FILE", "before")
    (tmp_path / "c.yaml").write_text(
        "env: {OF_THE_FILE: 7}\nlearning_rate: 0.3\nnum_generations: 4\nbeta: -1\n"
    )
    config = parse(
        ["--config", str(tmp_path / "c.yaml"), *CPU, "--learning_rate", "0.2", "--beta", "0.1"]
    )[1]
    assert config.learning_rate == 0.2
    assert config.num_generations == 4
    assert config.adora_truncated is None
    assert config.beta == 0.1, "a value of the file that the command line replaces is not looked at"
    assert os.environ["OF_THE_FILE"] == "7"


BAD_FILES = {
    "adora_rollouts.refill: 2\n": "dots are for the command line; write adora_rollouts: {refill: 2}",
    "num_generation: 8\n": "unknown key 'num_generation'; did you mean 'num_generations'",
    "- a\n- b\n": "expected `key: value` lines, found list",
    "a: [1\n": "not valid YAML",
    "[" * 3000: "nested too deeply",
    "seed: 1\nbeta: 0\nseed: 2\n": "line 3 gives 'seed' a second time",
    "seed: 2020-13-45\n": "not valid YAML",
    "a0: &a0 [x, x]\n"
    + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40)
    ): "its aliases make it larger than any config",
    "a: &a {b: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)).replace(
        "*a0", "*a"
    ): "its aliases make it larger than any config",
    "seed: 1\nadora_method: &x {a: [*x]}\n": "nested too deeply",
    "? [a]\n: 1\n": "not valid YAML",
    "env: 5\n": "env: 5 is not a mapping of environment variables",
    "env: {1: 2}\n": "env: 1: 2 is not a name and a text",
    "env: {A=B: 2}\n": "env: 'A=B': 2 is not",
    "env: {A: [2]}\n": "env: 'A': [2] is not",
}
BAD_WORDS = {
    "--learning_rat 1": "command line: unknown key 'learning_rat'; did you mean 'learning_rate'?",
    "--adora-facter=0.2": "command line: unknown key 'adora_facter'; did you mean 'adora_method.adora.factor'?",
    '--adora_columns {"problem":1,"problem":2}': "adora_columns: 'problem' is given twice in one object",
    "--adora_mode off": "unknown key 'adora_mode'; did you mean 'adora_method.adora.mode'?",
    "--adora_rollouts.refil 2": "adora_rollouts: unknown option 'refil', it has refill, budget",
    "--adora_rollouts.refill -2": "adora_rollouts.refill: -2 is not a whole number of at least 0",
    "--pad_to_multiple_of false": "pad_to_multiple_of: 'false' is not a whole number of at least 1 or auto or null",
    "--beta.x 1": "beta: {'x': 1} is not a number",
    "--zzzz 1": "command line: unknown key 'zzzz'",
    "--no_adora_self_chek": "command line: unknown key 'no_adora_self_chek'; did you mean 'adora_self_check'?",
    "--config nowhere.yaml": "--config: no file 'nowhere.yaml'",
    "--confg a.yaml": "command line: unknown key 'confg'; did you mean '--config'?",
    "--dry-rn": "command line: unknown key 'dry_rn'; did you mean '--dry-run'?",
    "--fsdp_confg a": "command line: unknown key 'fsdp_confg'; did you mean 'fsdp_config'?",
    "a.yaml": "command line: 'a.yaml' belongs to no key; write --config FILE.yaml, or --key value",
    "--config": "--config: expected the path of a YAML file after it",
    "--config a.yaml --config=b.yaml": "--config: given twice",
}


def test_an_unknown_key_and_a_bad_file_are_named(tmp_path):
    """A line about the content of a config file begins with the path of the file."""
    path = tmp_path / "c.yaml"
    unexpected_lines = {}
    # The words of a command and its error line, by what is written into the config file.
    cases = {arguments: (arguments.split(), expected) for arguments, expected in BAD_WORDS.items()}
    for content, expected in BAD_FILES.items():
        cases[content] = (["--config", str(path)], expected)
    for content, (arguments, expected) in cases.items():
        path.write_text(content)
        with pytest.raises(UserError) as refused:
            parse_command(arguments)
        line = str(refused.value)
        names_file = str(path) in line or content not in BAD_FILES
        if expected not in line or "\n" in line or not names_file:
            unexpected_lines[content[:60]] = line
    assert unexpected_lines == {}
    with pytest.raises(UserError, match="command line: 'stray' belongs to no key"):
        parse([*CPU, "stray"])


def test_a_recipe_is_found_by_its_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    """`--config smoke_cpu` is the shipped recipe of that name, unless a file has that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("smoke_cpu", "smoke_cpu.yaml"):
        assert parse_command(["--config", name]).file.parent.name == "train"
    Path("smoke_cpu.yaml").write_text("model_name_or_path: mine")
    assert parse_command(["--config", "smoke_cpu.yaml"]).set_keys == {"model_name_or_path"}
    with pytest.raises(UserError, match="no file 'runs/smoke_cpu.yaml'"):
        parse_command(["--config", "runs/smoke_cpu.yaml"])


def test_a_file_is_read_once_and_a_list_in_it_may_have_mappings(tmp_path, monkeypatch):
    """A config file is read once, and a list in it may have mappings and texts with commas.

    `accuracy, {judge: ...}, 'a,b'` are four rewards, of which one has options.
    """
    (tmp_path / "c.yaml").write_text("adora_reward: [accuracy, {judge: {model: m}}, 'a,b']\n")
    counting_read = Mock(wraps=read_mapping)
    monkeypatch.setattr(command, "read_mapping", counting_read)
    cli_args = parse_command(["--config", str(tmp_path / "c.yaml"), "--model_name_or_path", "m"])
    counting_read.assert_called_once()
    assert cli_args.converted_values["adora_reward"] == [
        "accuracy",
        {"judge": {"model": "m"}},
        "a",
        "b",
    ]


def test_a_dot_reaches_into_a_block_over_the_file_and_a_key_without_one_replaces_it(tmp_path):
    """`--adora_rollouts.refill` keeps the file's budget; `--adora_rollouts` replaces the block."""
    (tmp_path / "c.yaml").write_text(
        "adora_rollouts: {refill: 1, budget: 8}\nchat_template_kwargs: {a: 1}\n"
    )
    file = ["--config", str(tmp_path / "c.yaml"), *CPU]
    config = parse([*file, "--adora-rollouts.refill=3", "--chat_template_kwargs.b", "true"])[1]
    assert (config.adora_rollouts, config.chat_template_kwargs) == (
        RolloutOptions(refill=3, budget=8),
        {"a": 1, "b": True},
    )
    assert parse([*file, "--adora_rollouts", "{ahead: 1}"])[1].adora_rollouts == RolloutOptions(
        ahead=1
    )
    assert parse([*CPU, "--adora_rollouts.budget", "auto"])[1].adora_rollouts.budget == "auto"


def test_another_method_on_the_command_line_leaves_the_groups_judged_by_the_criteria_of_the_recipe(
    tmp_path,
):
    """ADORA's criteria in a config stay, without weights, if the command line names another method.

    Then both runs log the same metrics of the groups. A method that names ADORA, or is a mapping,
    replaces all.
    """
    path = tmp_path / "c.yaml"
    path.write_text("adora_method: {adora: {criteria: [difficulty], tau: 0.3, factor: 0.2}}")
    # ADORA without its weights, so that both runs log the same metrics of the groups
    judged = {"criteria": ["difficulty"], "tau": 0.3, "mode": "off"}
    for method, expected in (
        ("grpo", {"grpo": {}, "adora": judged}),
        ("dapo+adora", "dapo+adora"),
        ("{daro: {}}", {"daro": {}}),
    ):
        command = parse_command(
            ["--config", str(path), "--adora_method", method, "--model_name_or_path", "m"]
        )
        assert command.converted_values["adora_method"] == expected
    training_config = parse(["--config", str(path), *CPU, "--adora_method", "grpo"])[1]
    assert build_pipeline(training_config).keeps_trl_advantages


def test_every_option_of_the_help_is_known_for_a_word_that_is_nearly_one():
    """`COMMAND_OPTIONS` are the words that "did you mean" proposes beside the keys."""
    text = help_text(["--help"])
    options = {name.removeprefix("--") for name in re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)}
    [second_option_of_a_line] = re.findall(r"or --(\S+) FILE", text)
    options.add(second_option_of_a_line)
    assert options <= set(COMMAND_OPTIONS)


@pytest.mark.parametrize("option", [field.name for field in fields(DryRunOptions)])
def test_a_misspelt_option_of_the_dry_run_is_proposed(option):
    """An option of `DryRunOptions` is proposed for a word that lacks its second letter."""
    misspelt = f"--{option[0]}{option[2:]}"
    proposal = option.replace("_", "-")
    with pytest.raises(UserError, match=f"did you mean '--{proposal}'"):
        parse_command([misspelt, "1"])


def test_all_keys_are_known_before_their_classes_are_imported(monkeypatch):
    """The keys that are read from the libraries' sources are those of the config classes.

    Another version of TRL, which is imitated with files that do not exist, ends in one line.
    """
    assert trl_keys.config_key_by_name().keys() == {
        key.name for dataclass in CONFIG_DATACLASSES for key in fields(dataclass) if key.init
    }
    for files in (("trainer/grpo_config.py", "trainer/model_config.py"), ("trainer/elsewhere.py",)):
        monkeypatch.setitem(trl_keys._CONFIG_FILES_BY_LIBRARY, "trl", files)
        trl_keys.config_key_by_name.cache_clear()
        with pytest.raises(
            UserError, match="^the installed TRL or Transformers is another version"
        ):
            parse_command(["--beta", "1"])
    trl_keys.config_key_by_name.cache_clear()


# the words of a command that is refused before a slow import, and its error line
EARLY = {
    "--learning_rate 1e-5": "model_name_or_path: not set; name a file with --config FILE.yaml, or a model folder, a "
    "hub id or 'tiny' (`python -m adora_vl.train --help`)",
    "--betta 1": "command line: unknown key 'betta'; did you mean 'beta'?",
    "--dry-run --betta 1": "command line: unknown key 'betta'; did you mean 'beta'?",
    "--adora_tool_options.images 0": "adora_tool_options.images: 0 "
    "is not a whole number of at least 1",
    "--num_generations=1": "num_generations: 1 is not a whole number of at least 2",
    "--adora_vllm_dtype flaot32": "adora_vllm_dtype: 'flaot32' is not one of auto, float32, bfloat16, float16; did you "
    "mean 'float32'?",
    "--adora_factor 0.3": "command line: unknown key 'adora_factor'; did you mean "
    "'adora_method.adora.factor'?",
    "--config {file}": "adora_max_ratio: 0 is not a number of at least 1 or null",
    "--config {file} --adora_max_ratio 5 --no_adora_self_check --seed -1": "seed: -1 is not a whole "
    "number of at least 0 and at most 4294967295",
}


def test_nothing_slow_is_imported_before_a_wrong_key_or_value_is_named(tmp_path):
    """Each program names all mistakes in one process, and does not import a slow library for it.

    A wrong value in the config file is no mistake where the command line replaces it.
    """
    (tmp_path / "c.yaml").write_text("adora_max_ratio: 0\nadora_self_check: maybe\n")
    for module in ("train", "doctor.__main__"):
        commands: list[list[str]] = []
        lines: list[str] = []
        for words, line in EARLY.items():
            if module == "train" or "--dry-run" not in words:  # which the doctor does not have
                commands.append(words.format(file=tmp_path / "c.yaml").split())
                lines.append(f"error: {line}")
        # prints the exit code of each command, and which slow libraries are imported then
        code = (
            f"from adora_vl.{module} import main; "
            f"print([main(words) for words in {commands!r}], {SLOW} & {{*sys.modules}})"
        )
        process = subprocess.run(
            [sys.executable, "-c", f"import sys; {code}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert process.stdout == f"{[2] * len(commands)} set()\n"
        assert process.stderr.splitlines() == lines
