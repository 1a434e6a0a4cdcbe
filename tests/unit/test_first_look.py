"""The first look finds what the parser would find, with the same words, and without TRL and Transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adora_vl.config import first_look as module
from adora_vl.config.command_line import parse
from adora_vl.config.first_look import TABLE, first_look, key_table
from adora_vl.errors import UserError

ROOT = Path(__file__).parents[2]
CPU = ["--use_cpu", "true", "--bf16", "false"]
WRONG = [
    ["--beta", "nan"],
    ["--beta=-1"],
    ["--max_steps", "-7"],
    ["--optim", "adamm"],
    ["--lr_scheduler_type", "cosin"],
    ["--report_to", "foo"],
    ["--adora_criteria", "length", "size"],
    ["--dtype", "bf16"],
    ["--reward_weights", "1", "nan"],
    ["--reward_weights", "[1,x]"],
    ["--bf16", "maybe"],
    ["--report_to="],
    ["--report_to", "[wandb"],
    ["--num_generations", "null"],
    ["--model_init_kwargs", "[1]"],
    ["--lerning_rate", "1"],
    ["--adora-taau", "1"],
    ["--adora_less_padding", "true"],
    ["--config", "nowhere.yaml"],
    ["--config"],
    ["--config=a", "--config", "b"],
]


def line_of(read, arguments: list[str]) -> str:
    with pytest.raises(UserError) as refused:
        read(arguments)
    return str(refused.value)


def test_the_table_is_what_the_installed_dataclasses_say():
    """Where this fails, the versions or a dataclass changed: `python setup/write_key_table.py` writes it anew."""
    assert json.loads(TABLE.read_bytes()) == key_table()


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_mistake_is_told_with_the_words_of_the_parser(words):
    assert line_of(first_look, words) == line_of(parse, [*CPU, *words])


def test_a_file_is_read_as_the_parser_reads_it(tmp_path):
    path = tmp_path / "c.yaml"
    for content in ("beta: .nan", "betta: 1", "env: 3", "reward_weights: [1, x]", "optim: 7", "beta: 1\nbeta: 2", "["):
        path.write_text(content)
        assert line_of(first_look, ["--config", str(path)]) == line_of(parse, [*CPU, "--config", str(path)]), content


def test_the_command_line_counts_where_both_give_a_key(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("beta: -1")
    first_look(["--config", str(path), "--beta", "0.1"])
    parse([*CPU, "--config", str(path), "--beta", "0.1"])


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs" / "train").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_passes(recipe):
    first_look(["--config", str(recipe)])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("use_peft: null", ["--use_peft"]),
        ("adora_share_prompt: maybe", ["--no_adora_share_prompt"]),
        ("{}", ["--report_to", "null"]),
        ("{}", ["--report_to=~"]),
        ("{}", ["--optim_target_modules="]),
        ("{}", ["--optim_target_modules", "[[ab]]"]),
        ("{}", ["--reward_weights", "1", "2"]),
    ],
)
def test_what_the_parser_takes_passes(content, words, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    first_look(["--config", str(path), *words])
    parse([*CPU, "--config", str(path), *words])


@pytest.mark.parametrize("words", [["--beta", "nan", "--help"], ["--adora_criteria", "length", "-h"]], ids=" ".join)
def test_whoever_asks_for_help_gets_it(words):
    first_look(words)


def test_what_only_the_parser_can_read_is_left_to_it():
    """A switch without a word, a negated one, a list in several words, and several words for one."""
    first_look(["--bf16", "--no_adora_share_prompt", "--reward_weights", "1", "2", "--beta", "1", "2"])


def test_another_version_of_a_library_is_left_to_the_parser(monkeypatch):
    monkeypatch.setattr(module, "version", lambda library: "1.16.1")
    first_look(["--beta", "nan", "--unknown_key", "1"])


@pytest.mark.parametrize("words", [["--beta", "nan"], ["--dry-run", "--beta", "nan"]], ids=" ".join)
def test_nothing_slow_is_imported_before_a_mistake_is_told(words):
    code = f"import sys; from adora_vl.train import main; print(main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("2 False\n", "error: beta: nan is not a number of at least 0\n")
