"""What `tiny`, `tiny_text`, `synthetic` and `knights` stand for in a config: made where they are missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from filelock import FileLock

from adora_vl.errors import UserError
from adora_vl.models.tiny.build import PRETRAINED, build_tiny_model
from adora_vl.models.tiny.place import is_built
from adora_vl.models.tiny.text import TextStart, build_tiny_text_model
from adora_vl.models.tiny.warm_start import WarmStart
from data_prep.convert import ensure_converted
from data_prep.prepare import ensure_knights, ensure_synthetic
from data_prep.storage import read_manifest

TINY_MODEL, TINY_TEXT_MODEL = "tiny", "tiny_text"
ADAPTER, MERGED = "adapter_config.json", "merged"
SYNTHETIC_DATA, KNIGHTS_DATA = "synthetic", "knights"
SYNTHETIC_TEST_ROWS, SYNTHETIC_SIZE, SYNTHETIC_SEED = 512, 56, 0
KNIGHTS_PEOPLE = TextStart.people  # what the tiny model was taught a little of


def cache_folder() -> Path:
    """`ADORA_VL_HOME`, or `adora_vl` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ADORA_VL_HOME") or Path(cache) / "adora_vl")


def resolve_model(name: str) -> str:
    """The folder of the tiny model for `tiny` (the shipped one, or one built now) and for `tiny_text` (built where it
    is missing, one to two minutes); for the output_dir of a run with LoRA the merged model inside; any other name as
    it is.

    Raises `UserError` for a LoRA adapter without a merged model.
    """
    if name == TINY_TEXT_MODEL:
        return _built(TINY_TEXT_MODEL, build_tiny_text_model, asdict(TextStart()))
    if name != TINY_MODEL:
        return _merged(name)
    if (PRETRAINED / "model.safetensors").is_file():
        return str(PRETRAINED)
    return _built(TINY_MODEL, build_tiny_model, asdict(WarmStart()))


def _merged(name: str) -> str:
    """A LoRA run's folder holds the adapter, which cannot be loaded alone, and the whole model in `merged`."""
    folder = Path(name)
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return name
    merged = folder / MERGED
    if not (merged / "config.json").is_file():
        raise UserError(
            f"model: {name!r} holds a LoRA adapter alone; make a model of it with `python -m adora_vl.export "
            f"{quote(name)} OUT` and name OUT"
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{name} holds a LoRA adapter; its merged model is used: {merged}", file=sys.stderr)
    return str(merged)


def _built(name: str, build: Callable[[Path], object], plan: Mapping[str, object]) -> str:
    """The folder of a model that is built where it is missing, or was built by another `plan` than this version's.
    Machines that share the folder build it once.
    """
    folder = cache_folder() / name
    if not is_built(folder, plan):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not is_built(folder, plan):
                build(folder)
    return str(folder)


def resolve_dataset(name: str, rows: int, columns: Mapping[str, Any] | None = None) -> str:
    """The folder of `rows` training rows for `synthetic` and `knights` (puzzles with two people); with `columns`
    (`adora_columns`) that of a table, folder or hub id, converted here; any other name, or a prepared folder, as it is.
    """
    if name == KNIGHTS_DATA:
        folder = cache_folder() / f"knights-{rows}"
        return str(ensure_knights(folder, rows=rows, test_rows=SYNTHETIC_TEST_ROWS, people=KNIGHTS_PEOPLE))
    if name != SYNTHETIC_DATA:
        if columns is None or read_manifest(Path(name)) is not None:
            return name
        return str(ensure_converted(name, columns, cache_folder()))
    folder = cache_folder() / f"synthetic-{rows}"
    return str(
        ensure_synthetic(folder, rows=rows, test_rows=SYNTHETIC_TEST_ROWS, seed=SYNTHETIC_SEED, size=SYNTHETIC_SIZE)
    )
