"""The folder of a model that is built here: it appears complete, and takes the place of nothing but such a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from adora_vl.files import check_folder, replacing_folder, written_to

_FACTS = "build.json"


def check_place(folder: Path) -> None:
    """Raise `UserError` unless `folder` is absent, empty or a model that was built here."""
    check_folder("output", folder.parent)
    with written_to("output", folder):
        there = folder.exists()
        if there and not folder.is_dir():
            raise UserError(f"output: {str(folder)!r} is a file; choose a folder")
        if there and any(folder.iterdir()) and not (folder / _FACTS).is_file():
            raise UserError(f"output: {str(folder)!r} holds something else than a tiny model; choose another folder")


def is_built(folder: Path, plan: Mapping[str, object]) -> bool:
    """Whether a model is there whose facts name this `plan`, as JSON keeps it."""
    if not (folder / "model.safetensors").is_file():
        return False
    try:
        built = json.loads((folder / _FACTS).read_text(encoding="utf-8"))["plan"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(built == json.loads(json.dumps(plan)))


def save_built(folder: Path, model: Any, processor: Any, facts: Mapping[str, object]) -> None:
    """Save a model, its processor and how both were made. What was at `folder` goes when they are whole.

    Raises `UserError` where that cannot be written.
    """
    with written_to("output", folder), replacing_folder(folder) as made:
        model.save_pretrained(made)
        processor.save_pretrained(made)
        (made / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
