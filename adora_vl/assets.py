"""What `tiny` and `synthetic` stand for in a config: a model and a dataset that are made where they are missing."""

from __future__ import annotations

import os
from pathlib import Path

from adora_vl.models.tiny.build import PRETRAINED, build_tiny_model
from data_prep.prepare import ensure_synthetic

TINY_MODEL, SYNTHETIC_DATA = "tiny", "synthetic"
SYNTHETIC_TEST_ROWS, SYNTHETIC_SIZE, SYNTHETIC_SEED = 512, 56, 0


def cache_folder() -> Path:
    """`ADORA_VL_HOME`, or `adora_vl` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ADORA_VL_HOME") or Path(cache) / "adora_vl")


def resolve_model(name: str) -> str:
    """The folder of the tiny model for `tiny` (the shipped one, or one built now); any other name as it is."""
    if name != TINY_MODEL:
        return name
    if (PRETRAINED / "model.safetensors").is_file():
        return str(PRETRAINED)
    folder = cache_folder() / "tiny"
    if not (folder / "model.safetensors").is_file():
        build_tiny_model(folder)
    return str(folder)


def resolve_dataset(name: str, rows: int) -> str:
    """The folder of a synthetic dataset of `rows` training rows for `synthetic`; any other name as it is."""
    if name != SYNTHETIC_DATA:
        return name
    folder = cache_folder() / f"synthetic-{rows}"
    return str(
        ensure_synthetic(folder, rows=rows, test_rows=SYNTHETIC_TEST_ROWS, seed=SYNTHETIC_SEED, size=SYNTHETIC_SIZE)
    )
