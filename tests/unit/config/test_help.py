"""What the commands say of themselves: at once, and every key once."""

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from adora_vl.config.help import asks_for_help, help_text
from adora_vl.config.schema import CONFIG_DATACLASSES
from adora_vl.config.trl_keys import read_keys

ROOT = Path(__file__).parents[3]
COMMANDS = (
    "adora_vl.train",
    "adora_vl.doctor",
    "adora_vl.report",
    "adora_vl.export",
    "adora_vl.builtin",
    "adora_vl.rewards.explain",
    "data_prep",
    "data_prep synthetic",
    "data_prep knights",
    "data_prep geometry3k",
    "data_prep convert",
    "data_prep filter",
    "data_prep inspect",
    "eval",
    "eval.geometry3k run",
    "eval.mathvista run",
    "eval.mmstar run",
    "eval.knights score",
    "eval.compare",
)
SLOW = ("torch", "transformers", "trl", "vllm", "datasets")


def test_help_answers_at_once():
    """The time depends on the machine, so what is imported is looked at.

    One process for all, since none adds to it.
    """
    code = (
        "import runpy, sys\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = [*command.split(), '--help']\n"
        "    try:\n"
        "        runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=False)\n"
        "    except SystemExit as end:\n"
        f"        print('ENDS', command, end.code or 0, {{*{SLOW}}} & {{*sys.modules}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("ENDS")]
    assert ends == [f"ENDS {command} 0 set()" for command in COMMANDS], done.stderr
    assert (
        done.stdout.count("usage: ") >= len(COMMANDS) - 1
    )  # the training's own begins with what it does


def test_the_short_help_fits_on_a_screen_and_shows_the_defaults_of_today():
    text = help_text(["--config", "nowhere.yaml", "--help"])
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100
    for words in (
        "--dry-run",
        "--write-config",
        "--help-all",
        "num_generations: 8 ",
        "adora_method: adora ",
    ):
        assert words in text
    shown = re.findall(r"^  (\w+): ", text, re.MULTILINE)
    assert len(shown) >= 20
    assert set(shown) <= set(read_keys())


def test_every_key_stands_once_in_the_long_help_with_what_it_means():
    text = help_text(["--help-all"])
    assert sorted(re.findall(r"^(\w+):(?: |$)", text, re.MULTILINE)) == sorted(set(read_keys()))
    order = [
        "Keys of this project",
        "adora_correct_above: 0.5\n",
        "Keys of TRL",
        "\nbeta: 0.0\n    KL coefficient",
    ]
    places = [text.index(line) for line in (*order, "Keys of Transformers", "\nsave_steps: 500\n")]
    assert places == sorted(places)
    assert [key.name for key in read_keys().values() if not key.help] == []
    assert max(map(len, text.splitlines())) <= 200  # a default or an address may be long


def test_the_defaults_read_from_the_sources_are_those_of_the_classes():
    found = read_keys()
    wrong = {}
    for field in (
        field for dataclass in CONFIG_DATACLASSES for field in fields(dataclass) if field.init
    ):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if found[field.name].default not in (default, MISSING):
            wrong[field.name] = (found[field.name].default, default)
    assert wrong == {}
    assert sum(key.default is MISSING for key in found.values()) <= 3, "most can be read"


def test_help_is_asked_for_by_its_own_words_alone():
    assert all(asks_for_help(["--beta", "1", word]) for word in ("-h", "--help", "--help-all"))
    assert not asks_for_help(["--run_name", "help"])
