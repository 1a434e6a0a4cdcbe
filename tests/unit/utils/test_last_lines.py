"""What a command prints for the user to copy works as it stands.

What cannot be written or loaded is one line.
"""

import errno
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.builtin.builtin_data import resolve_model
from adora_vl.evals.inference.engines import check_model
from adora_vl.export import main as export
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.record.manifest import python_command, shortest_program_path, write_manifest
from adora_vl.record.summary import evaluate_command, view_command
from adora_vl.report.page import write_page
from adora_vl.train import main as train
from adora_vl.utils.errors import RunError, UserError
from data_prep.cli import main as data_prep
from eval.__main__ import main as evaluate

ROOT = Path(__file__).parents[3]
NO_SPACE_ERROR = OSError(errno.ENOSPC, "No space left on device")


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1))
def test_a_path_of_any_letters_can_be_copied_into_a_shell(name):
    folder = Path("runs") / name
    assert shlex.split(view_command(folder))[-1] == str(folder)
    arguments = shlex.split(evaluate_command(folder, "DATA", folder / "eval", max_tokens=40))
    assert str(folder) in arguments
    assert str(folder / "eval") in arguments


@pytest.mark.parametrize(
    ("file", "is_named"), [("eval.py", False), ("eval/__init__.py", False), ("eval/a.json", True)]
)
def test_the_evaluation_is_not_a_file_of_the_users(monkeypatch, tmp_path, file, is_named):
    """The proposed evaluation is `adora-vl eval` where a user's `eval` would hide our package.

    A folder without `__init__.py` hides no package, so results in `eval/` change nothing.
    """
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(evaluate_command(Path("run"), "DATA", Path("out"), max_tokens=40))
    if is_named:
        assert arguments[1:3] == ["-m", "eval.problems"]
    else:
        assert arguments[:3] == ["adora-vl", "eval", "problems"]


def test_python_is_called_as_the_user_does(monkeypatch, tmp_path):
    """The interpreter's path is relative to the folder where the user is, and short."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert python_command() == ".venv/bin/python"
    assert view_command(Path("r")).startswith(".venv/bin/python -m ")
    monkeypatch.chdir("/")
    assert shortest_program_path("/elsewhere/bin/accelerate") in (
        "accelerate",
        "elsewhere/bin/accelerate",
    )
    monkeypatch.chdir(tmp_path / ".venv")
    assert shortest_program_path("/elsewhere/bin/accelerate") == "accelerate"


def test_a_lora_run_is_resolved_to_its_merged_model(tmp_path, capsys):
    """Without the merged model the error has the command that makes it; with it, both use it."""
    run_folder = tmp_path / "a run"
    (run_folder / "merged").mkdir(parents=True)
    (run_folder / "adapter_config.json").write_text("{}")
    for resolve in (resolve_model, check_model):
        with pytest.raises(
            UserError, match=r"^model: .* LoRA adapter alone; .*adora_vl.export '.*a run' OUT`"
        ):
            resolve(str(run_folder))
    (run_folder / "merged" / "config.json").write_text("{}")
    assert (
        resolve_model(str(run_folder)) == check_model(str(run_folder)) == str(run_folder / "merged")
    )
    assert capsys.readouterr().err.count("its merged model is used: ") == 2


def test_tiny_is_the_same_model_in_training_and_evaluation():
    """The word `tiny` is the shipped model for both."""
    assert check_model("tiny") == resolve_model("tiny") == str(PRETRAINED_FOLDER)


def test_an_option_of_another_command_is_not_proposed(capsys):
    """`--source` is an option of `knights`, and unknown to `convert`."""
    assert data_prep(["convert", "--source", "x", "--output", "y"]) == 2
    assert "--source x; '--source' belongs to another command; see" in capsys.readouterr().err


def test_every_console_script_is_a_function_that_returns_an_exit_code(capsys):
    """`adora-vl` is the only script; a mistake in its arguments is exit code 2."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"adora-vl"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))
    assert evaluate(["geometry"]) == 2
    assert evaluate([]) == 0
    assert "did you mean 'geometry3k'?" in capsys.readouterr().err
    assert evaluate(["mmstar", "run"]) == 2
    assert "--model is missing" in capsys.readouterr().err


def test_a_mistake_that_one_rank_alone_finds_is_said_by_it(monkeypatch, capsys):
    """The first rank prints a mistake at once, another one after a wait and with its number.

    If all ranks find the mistake, the launcher ends the others while they wait.
    """
    sleeps: list[float] = []
    stock_sleep = time.sleep

    def note_sleep_of_main_thread(seconds: float) -> None:
        # threads that other tests have left behind go on sleeping
        if threading.current_thread() is threading.main_thread():
            sleeps.append(seconds)
        else:
            stock_sleep(seconds)

    monkeypatch.setattr("adora_vl.train.time.sleep", note_sleep_of_main_thread)
    for rank, suffix in (("0", ""), ("1", " (rank 1 of 2)")):
        for name, value in (
            ("LOCAL_RANK", rank),
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
        ):
            monkeypatch.setenv(name, value)
        assert train(["--learning_rte", "1"]) == 2
        assert capsys.readouterr().err.startswith(f"error{suffix}: ")
        assert len(sleeps) == int(rank), "the second rank waits once"


def raise_no_space(*args: object, **kwargs: object) -> None:
    """Stand for a function that writes to a full disk."""
    raise NO_SPACE_ERROR


def test_a_full_disk_ends_in_one_line_and_leaves_nothing_half_written(
    monkeypatch, tmp_path, capsys
):
    """A manifest, a page and an export whose last move fails leave no file."""
    monkeypatch.setattr(Path, "replace", raise_no_space)
    manifest = {"status": "running", "starts": [{"checkpoint": None}]}
    with pytest.raises(
        RunError, match="^output_dir: .*manifest.json' cannot be written .No space left on device"
    ):
        write_manifest(manifest, tmp_path)
    message = "^--output: .* cannot be written .No space left on device.; free some space, or"
    with pytest.raises(UserError, match=message):
        write_page("<html>", tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("adora_vl.export.copy_model", raise_no_space)
    capsys.readouterr()
    assert export([str(PRETRAINED_FOLDER), str(tmp_path / "out")]) == 2
    assert "error: OUT: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_export_cannot_write_to_is_refused(tmp_path, capsys, monkeypatch):
    """Below a file, nowhere and in /proc no model can be written: one line each."""
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("")
    for output in ("a_file/out", "", "/proc/nowhere/out"):
        assert export([str(PRETRAINED_FOLDER), output]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1, output


def test_a_command_whose_output_nobody_reads_on_ends_quietly() -> None:
    """A command whose stdout is closed, as by `| head`, ends as by SIGPIPE and prints no error.

    The text stays in the buffer until the end, or is too long for it.
    """
    for lines in (1, 100_000):
        code = (
            "import sys; from adora_vl.utils.cli import run_command; say = lambda: print('a "
            f"line\\n' * {lines})"
        )
        command = [
            sys.executable,
            "-c",
            f"{code}; sys.exit(run_command(say, interrupt_note='nothing'))",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
        process.stderr.close()
