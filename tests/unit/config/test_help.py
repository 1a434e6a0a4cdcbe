"""What the commands say of themselves: at once, and every key once."""

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from adora_vl.config.help import asks_for_help, help_text
from adora_vl.config.trl_keys import config_key_by_name
from adora_vl.utils.convert import field_default
from tests.support.commands import CONFIG_DATACLASSES

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
    """No command imports one of the slow libraries `SLOW` to print its help.

    Seconds would depend on the machine. All commands run in one process, since a slow import would
    be noticed after any of them.
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
    process = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    end_lines = [line for line in process.stdout.splitlines() if line.startswith("ENDS")]
    assert end_lines == [f"ENDS {command} 0 set()" for command in COMMANDS], process.stderr
    # The help of the training command begins with what it does, and not with its usage.
    assert process.stdout.count("usage: ") >= len(COMMANDS) - 1


def test_the_short_help_fits_on_a_screen_and_shows_the_defaults_of_today():
    """The short help has at most 45 lines of 100 characters, and each key in it exists."""
    text = help_text(["--config", "nowhere.yaml", "--help"])
    assert len(text.splitlines()) <= 45  # the lines of a screen
    assert max(map(len, text.splitlines())) <= 100
    for expected_text in (
        "--dry-run",
        "--write-config",
        "--help-all",
        "num_generations: 8 ",
        "adora_method: adora ",
    ):
        assert expected_text in text
    keys_in_help = re.findall(r"^  (\w+): ", text, re.MULTILINE)
    assert len(keys_in_help) >= 20
    assert set(keys_in_help) <= set(config_key_by_name())


def test_every_key_stands_once_in_the_long_help_with_what_it_means():
    """A key is a line `name: DEFAULT` with its help below; ours come first, then TRL's."""
    text = help_text(["--help-all"])
    assert sorted(re.findall(r"^(\w+):(?: |$)", text, re.MULTILINE)) == sorted(
        set(config_key_by_name())
    )
    parts_in_order = [
        "Keys of this project",
        "adora_correct_above: 0.5\n",
        "Keys of TRL",
        "\nbeta: 0.0\n    KL coefficient",
        "Keys of Transformers",
        "\nsave_steps: 500\n",
    ]
    positions = [text.index(part) for part in parts_in_order]
    assert positions == sorted(positions)
    assert [key.name for key in config_key_by_name().values() if not key.help] == []
    assert max(map(len, text.splitlines())) <= 200  # a default or an address may be long


def test_the_defaults_read_from_the_sources_are_those_of_the_classes():
    """A default that is read from the source code of a config class is that of the class itself.

    MISSING stands for a default that is computed, which the source does not show.
    """
    key_by_name = config_key_by_name()
    wrong_defaults = {}
    all_fields = [field for dataclass in CONFIG_DATACLASSES for field in fields(dataclass)]
    for field in all_fields:
        if not field.init:
            continue
        default = field_default(field)
        default_from_source = key_by_name[field.name].default
        if default_from_source not in (default, MISSING):
            wrong_defaults[field.name] = (default_from_source, default)
    assert wrong_defaults == {}
    defaults_not_read = sum(key.default is MISSING for key in key_by_name.values())
    assert defaults_not_read <= 3, "most can be read"


def test_help_is_asked_for_by_its_own_words_alone():
    assert all(asks_for_help(["--beta", "1", word]) for word in ("-h", "--help", "--help-all"))
    assert not asks_for_help(["--run_name", "help"])
