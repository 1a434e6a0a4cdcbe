"""What the tiny models, `synthetic` and `knights` stand for in a config: made where they are missing."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from adora_vl.builtin import WarmStart
from adora_vl.builtin.small_model import is_built
from adora_vl.builtin.tiny_perimeter import PerimeterStart, build_perimeter_model
from adora_vl.builtin.tiny_text import TextStart, build_tiny_text_model
from adora_vl.builtin.tiny_vl import build_tiny_model
from adora_vl.builtin.tiny_zoom import ZoomStart, build_zoom_model
from adora_vl.config import AdoraScriptArguments
from adora_vl.data.dataset import read_manifest
from adora_vl.models.load import SHIPPED, TINY_PERIMETER_MODEL, TINY_TEXT_MODEL, TINY_ZOOM_MODEL, local_model
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import cache_folder
from data_prep.convert import ensure_converted
from data_prep.generated import ensure_drawn, puzzles, synthetic

SYNTHETIC_DATA, KNIGHTS_DATA = "synthetic", "knights"
SYNTHETIC_TEST_ROWS, SYNTHETIC_SIZE, SYNTHETIC_SEED = 512, 56, 0
KNIGHTS_PEOPLE = TextStart.people  # what the tiny model was taught a little of


def resolve_model(name: str) -> str:
    """As `local_model`, but the tiny models are built in this process where they are missing."""
    if name == TINY_TEXT_MODEL:
        return _built(TINY_TEXT_MODEL, build_tiny_text_model, asdict(TextStart()))
    if name not in SHIPPED or (SHIPPED[name] / "model.safetensors").is_file():
        return local_model(name)
    if name == TINY_ZOOM_MODEL:
        return _built(name, build_zoom_model, asdict(ZoomStart()))
    if name == TINY_PERIMETER_MODEL:
        return _built(name, build_perimeter_model, asdict(PerimeterStart()))
    return _built(name, build_tiny_model, asdict(WarmStart()))


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
        drawn = puzzles(rows=rows, test_rows=SYNTHETIC_TEST_ROWS, people=KNIGHTS_PEOPLE)
        return str(ensure_drawn(cache_folder() / f"knights-{rows}", drawn))
    if name != SYNTHETIC_DATA:
        if columns is None or _is_prepared(name):
            return name
        return str(ensure_converted(name, columns, cache_folder()))
    drawn = synthetic(rows=rows, test_rows=SYNTHETIC_TEST_ROWS, seed=SYNTHETIC_SEED, size=SYNTHETIC_SIZE)
    return str(ensure_drawn(cache_folder() / f"synthetic-{rows}", drawn))


def _is_prepared(name: str) -> bool:
    """Whether a data set needs no `adora_columns`: it is made here, or was converted before."""
    return name in (SYNTHETIC_DATA, KNIGHTS_DATA) or read_manifest(Path(name)) is not None


def data_folders(script: AdoraScriptArguments) -> list[str]:
    """The folder of each data set, made where it is missing. Raises `UserError`."""
    columns = script.adora_columns
    assert not isinstance(columns, str), "the arguments have read it"
    file = next((name for name in script.dataset_name if columns is None and Path(name).is_file()), None)
    if file is not None:
        example = "adora_columns: {problem: question, answer: label}"
        raise UserError(f"dataset_name: {file!r} is a file; say which of its columns is what, such as {example}")
    if columns is not None and all(map(_is_prepared, script.dataset_name)):
        raise UserError(
            f"adora_columns: {columns} names columns of a table, but dataset_name: {', '.join(script.dataset_name)} "
            "has its columns already; leave adora_columns out, or name the table"
        )
    return [resolve_dataset(name, script.adora_synthetic_rows, columns) for name in script.dataset_name]
