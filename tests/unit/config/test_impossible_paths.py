"""A text that can be the path of no file is refused in one line, wherever a path is written."""

import argparse

import pytest

from adora_vl.config.values import convert_key
from adora_vl.utils.cli import path_option
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import path_problem
from data_prep.cli import main as data_prep
from eval.__main__ import main as evaluate

PATH_KEYS = ("model_name_or_path", "output_dir", "resume_from_checkpoint")


@pytest.fixture
def loop(tmp_path):
    """Return a link that leads to itself."""
    link = tmp_path / "loop"
    link.symlink_to(link)
    return str(link)


def test_a_key_with_a_path_that_cannot_exist_is_refused(loop, subtests):
    """A path that is too long, has a null character or loops is refused by every key with a path.

    `loop`: a link to itself.
    """
    reasons = {
        "x" * 300: "File name too long",
        "a/" * 3000: "File name too long",
        "run\0": "a null character is in it",
        "caf\udce9": "it is not UTF-8",  # what Python makes of the byte E9 of a command line
        loop: "Too many levels of symbolic links",
    }
    for value, reason in reasons.items():
        for key in PATH_KEYS:
            with subtests.test(key=key, reason=reason), pytest.raises(UserError) as refused:
                convert_key(key, value, str)
            line = str(refused.value)
            assert line.startswith(f"{key}: '")
            assert line.endswith(f"cannot be a path ({reason}); write another one")
            assert len(line) < 200
        with subtests.test(key="dataset_name", reason=reason), pytest.raises(UserError):
            convert_key("dataset_name", ["data/mine", value], list[str])


@pytest.mark.parametrize("value", ["runs/not there", "Qwen/Qwen2.5-VL-3B-Instruct", "ñandú ☃"])
def test_a_path_where_nothing_is_yet_may_be_named(value):
    assert path_problem(value) == ""
    assert convert_key("output_dir", value, str) == value


def test_an_option_with_a_loop_of_links_is_refused(loop):
    with pytest.raises(argparse.ArgumentTypeError, match="Too many levels of symbolic links"):
        path_option(loop)


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (data_prep, ["convert", "--columns", "problem=p", "--output", "out", "--input"]),
        (data_prep, ["inspect", "data", "--model"]),
        (evaluate, ["compare"]),
        (evaluate, ["problems", "run", "--data", "data", "--output", "out", "--model"]),
        (evaluate, ["problems", "run", "--model", "tiny", "--output", "out", "--data"]),
    ],
)
def test_a_path_or_hub_id_that_can_be_neither_is_refused(main, argv, loop, capsys):
    for value in ("x" * 300, loop):
        assert main([*argv, value]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: argument ")
        assert "cannot be a path (" in line
        assert line.count("\n") == 1


def test_a_value_that_was_pasted_into_the_wrong_key_does_not_fill_the_screen():
    line = str(UserError(f"adora_method: '{'x' * 5000}' is no method; use one of grpo, adora"))
    assert len(line) < 250
    assert line.startswith("adora_method: 'xxx")
    assert line.endswith("xxx' is no method; use one of grpo, adora")
