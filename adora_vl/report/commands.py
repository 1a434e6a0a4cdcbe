"""The commands that a person runs next, ready to be copied."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

SECRET = ("token", "password", "secret")  # ends of keys whose values are never shown


def launch_command(arguments: Sequence[str], parent: Path | None = None) -> str:
    """The command that started this run: `accelerate launch ...` if the parent process was started so (Linux can
    tell), else `python -m adora_vl.train` with the same arguments. The values of secret keys are left out.
    """
    words = _accelerate(Path(f"/proc/{os.getppid()}/cmdline") if parent is None else parent)
    if words is None or "-m" not in words:  # the trainer was started by another script
        words = [interpreter(), "-m", "adora_vl.train", *arguments]
    return shlex.join(_without_secrets(words))


def interpreter() -> str:
    """This Python interpreter, as one calls it from the folder in which the run was started: `python` instead of
    `python3` where both are the same program, as in every virtual environment.
    """
    program = Path(sys.executable)
    plain = program.with_name("python")
    return as_called(str(plain if plain.is_file() and plain.samefile(program) else program))


def as_called(program: str) -> str:
    """A relative path such as `.venv/bin/python` for programs below the current folder, else only the name."""
    path = Path(program)
    if not path.is_absolute():
        return program
    below = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if below else path.name


def _accelerate(cmdline: Path) -> list[str] | None:
    try:
        words = [word.decode(errors="replace") for word in cmdline.read_bytes().split(b"\0") if word]
    except OSError:
        return None
    for at, word in enumerate(words):
        if Path(word).name == "accelerate" and words[at + 1 : at + 2] == ["launch"]:
            return [as_called(word), *words[at + 1 :]]
        if word == "accelerate.commands.launch":
            return [as_called(str(Path(sys.executable).with_name("accelerate"))), "launch", *words[at + 1 :]]
    return None


def _without_secrets(words: Sequence[str]) -> list[str]:
    kept, secret = [], False
    for word in words:
        key, sign, _ = word.partition("=")
        hidden = key.startswith("--") and key.endswith(SECRET)
        kept.append("..." if secret else f"{key}=..." if hidden and sign else word)
        secret = hidden and not sign
    return kept


def evaluate_command(model: Path, data: str, output: Path, max_tokens: int) -> str | None:
    """The command that evaluates `model` on the held-out split of `data`; None if there is no such split."""
    if not list(Path(data).glob("data/test-*.parquet")):
        return None
    words = ["--model", str(model), "--data", data, "--output", str(output), "--max-tokens", str(max_tokens)]
    manifest = Path(data) / "manifest.json"
    source = json.loads(manifest.read_text()).get("source") if manifest.is_file() else None
    benchmark = "eval.knights" if source == "knights" else "eval.geometry3k"
    return shlex.join([interpreter(), "-m", benchmark, "run", *words])


def evaluate_any_command(model: Path, output: Path) -> str:
    """The command that evaluates `model`, with a placeholder for the dataset."""
    words = ["--model", str(model), "--data", "DATA", "--output", str(output)]
    return shlex.join([interpreter(), "-m", "eval.geometry3k", "run", *words])


def merge_command(run: Path) -> str | None:
    """The command that merges a run's LoRA adapter, to where the evaluators look for it; None for a whole model."""
    if not (run / "adapter_config.json").is_file() or (run / "config.json").is_file():
        return None
    return shlex.join([interpreter(), "-m", "adora_vl.export", str(run), str(run / "merged")])


def view_command(*runs: Path) -> str:
    return shlex.join([interpreter(), "-m", "adora_vl.report", *map(str, runs)])
