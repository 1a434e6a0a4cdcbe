"""What `tiny`, `tiny_text`, `synthetic` and `knights` stand for in a config: made where they are missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from adora_vl.models.tiny.build import PRETRAINED, build_tiny_model
from adora_vl.models.tiny.text import build_tiny_text_model
from data_prep.prepare import ensure_knights, ensure_synthetic

TINY_MODEL, TINY_TEXT_MODEL = "tiny", "tiny_text"
SYNTHETIC_DATA, KNIGHTS_DATA = "synthetic", "knights"
SYNTHETIC_TEST_ROWS, SYNTHETIC_SIZE, SYNTHETIC_SEED = 512, 56, 0


def cache_folder() -> Path:
    """`ADORA_VL_HOME`, or `adora_vl` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ADORA_VL_HOME") or Path(cache) / "adora_vl")


def resolve_model(name: str) -> str:
    """The folder of the tiny model for `tiny` (the shipped one, or one built now) and for `tiny_text` (built where it
    is missing, half a minute); any other name as it is.
    """
    if name == TINY_TEXT_MODEL:
        return _built(TINY_TEXT_MODEL, build_tiny_text_model)
    if name != TINY_MODEL:
        return name
    if (PRETRAINED / "model.safetensors").is_file():
        return str(PRETRAINED)
    return _built(TINY_MODEL, build_tiny_model)


def _built(name: str, build: Callable[[Path], object]) -> str:
    folder = cache_folder() / name
    if not (folder / "model.safetensors").is_file():
        build(folder)
    return str(folder)


def resolve_dataset(name: str, rows: int) -> str:
    """The folder of `rows` training rows for `synthetic` and `knights` (puzzles with three people); any other name as
    it is.
    """
    if name == KNIGHTS_DATA:
        return str(ensure_knights(cache_folder() / f"knights-{rows}", rows=rows, test_rows=SYNTHETIC_TEST_ROWS))
    if name != SYNTHETIC_DATA:
        return name
    folder = cache_folder() / f"synthetic-{rows}"
    return str(
        ensure_synthetic(folder, rows=rows, test_rows=SYNTHETIC_TEST_ROWS, seed=SYNTHETIC_SEED, size=SYNTHETIC_SIZE)
    )
