"""Ctrl-C before a command has begun its work, mostly while it still imports its libraries: one line, exit code 130.

The commands are found by what makes them one, so a new one is tried without being written down here.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from adora_vl import train
from adora_vl.commands import EXIT_INTERRUPTED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# The first of these that a command imports, or the first file that it was told to read, is where Ctrl-C comes.
AT_FIRST = ("numpy", "torch", "transformers", "datasets", "pyarrow", "yaml", "PIL", "safetensors", "a.json")
WORDS = {
    "adora_vl.export": ["RUN", "OUT"],
    "adora_vl.report.gain": ["a.json", "b.json"],
    "eval.compare": ["a.json", "b.json"],
    "eval": ["geometry3k", "score"],
}
NO_COMMAND = {
    "adora_vl.rewards.worker": "a worker of the grader, which has no user",
    "adora_vl.rewards.explain": "imports nothing that takes long, and answers at once",
}
PRESS = f"""
import os, runpy, signal, sys
module, sys.argv[1:] = sys.argv[1], sys.argv[2:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background passes on that it is ignored
pressed = []
def hook(event, values):
    if event in ("import", "open") and str(values[0]) in {AT_FIRST} and not pressed:
        pressed.append(values[0])
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""
AS_MODULE = PRESS + "runpy.run_module(module, run_name='__main__', alter_sys=True)"
AS_SCRIPT = PRESS + "from importlib import import_module; sys.exit(import_module(module).main())"


def commands() -> list[str]:
    found = []
    for top in ("adora_vl", "data_prep", "eval"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if '__name__ == "__main__"' in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.append(name.removesuffix(".__main__"))
    return [name for name in found if name not in NO_COMMAND]


def scripts() -> list[str]:
    """The modules that the installed commands such as `adora-vl-train` import."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return [target.removesuffix(":main") for target in declared.values()]


def press_ctrl_c(code: str, module: str, folder: Path) -> tuple[int, str]:
    (folder / "a.json").write_text("{}")
    words = WORDS.get(module.removesuffix(".__main__"), ["--config", str(ROOT / "configs/train/smoke_cpu.yaml")])
    done = subprocess.run(
        [sys.executable, "-c", code, module, *words],
        cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", commands())
def test_a_module_that_is_interrupted_says_so_in_one_line(module: str, tmp_path: Path) -> None:
    code, said = press_ctrl_c(AS_MODULE, module, tmp_path)
    assert code == EXIT_INTERRUPTED, said
    assert said.startswith("interrupted") and said.count("\n") == 1, said
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("module", scripts())
def test_so_does_an_installed_command(module: str, tmp_path: Path) -> None:
    code, said = press_ctrl_c(AS_SCRIPT, module, tmp_path)
    assert code == EXIT_INTERRUPTED, said
    assert said.startswith("interrupted") and said.count("\n") == 1, said


@pytest.mark.parametrize("place", ["prepare", "build_trainer"])
def test_a_run_that_is_interrupted_before_its_first_step(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    config = type("Config", (), {"model_init_kwargs": None})
    monkeypatch.setattr(train, "prepare", lambda *_: type("Run", (), {"finished": None, "config": config}))
    monkeypatch.setattr(train, place, interrupted)
    assert train.main([]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted outside the training; checkpoints are as they were\n"
