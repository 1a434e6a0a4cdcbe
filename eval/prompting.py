"""The prompt that a model was trained with, so that it is asked in the same words."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from adora_vl.prompts import SYSTEM_PROMPT

OF_THE_RUN: Any = object()  # the default of the two options: what the run says, in whose folder the model is
_MADE_BY = "adora_vl.train"
_KEYS = {"system_prompt": ("adora_system_prompt", SYSTEM_PROMPT), "prompt": ("adora_prompt", None)}


def settle_prompts(options: Namespace) -> None:
    """Put what the model's run was trained with in the place of prompts that were not given, else the defaults."""
    config: dict[str, Any] | None = None
    for name, (key, default) in _KEYS.items():
        if getattr(options, name, None) is not OF_THE_RUN:
            continue
        if config is None:
            config = trained_with(options.model)
        value = config.get(key, default)
        vars(options)[name] = value
        if value != default:
            print(f"{name}: that of the model's training, {value!r:.80}", file=sys.stderr)


def unusual_prompts(options: Namespace) -> dict[str, Any]:
    """The settled prompts that are not the defaults, for a manifest."""
    return {name: getattr(options, name) for name, (_, default) in _KEYS.items() if getattr(options, name) != default}


def trained_with(model: str | None) -> dict[str, Any]:
    """The config in the manifest of the run that wrote this model: its folder, or a checkpoint or `merged` in it.

    Empty for any other model.
    """
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return {}
    for place in (folder, folder.resolve().parent):
        try:
            manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict) and manifest.get("made_by") == _MADE_BY:
            config = manifest.get("config")
            return config if isinstance(config, dict) else {}
    return {}
