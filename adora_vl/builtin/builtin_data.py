"""What the tiny models, `synthetic` and `knights` stand for in a config: made where missing."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from adora_vl.builtin import WarmStart
from adora_vl.builtin.small_model import UntrainedModel, is_built, train_and_save
from adora_vl.builtin.tiny_perimeter import PerimeterStart, prepare_perimeter
from adora_vl.builtin.tiny_text import TextStart, prepare_text
from adora_vl.builtin.tiny_vl import prepare_tiny
from adora_vl.builtin.tiny_zoom import ZoomStart, prepare_zoom
from adora_vl.config import AdoraScriptArguments
from adora_vl.conversion.convert import ensure_converted
from adora_vl.data.dataset import read_manifest
from adora_vl.models import load
from adora_vl.models.load import FOLDER_BY_TINY_MODEL, resolve_model_name
from adora_vl.synthetic.generated import describe_puzzles, describe_synthetic, ensure_drawn
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import cache_folder

SYNTHETIC_DATA = "synthetic"
KNIGHTS_DATA = "knights"


@dataclass(frozen=True)
class TinyModelRecipe:
    """How a tiny model is built: the numbers of its training, and the function that prepares it."""

    plan: Any  # a dataclass with the numbers of its training
    prepare: Callable[[Any], UntrainedModel]  # builds model and training stages from the plan


RECIPE_BY_TINY_MODEL: dict[str, TinyModelRecipe] = {
    load.TINY_MODEL: TinyModelRecipe(plan=WarmStart(), prepare=prepare_tiny),
    load.TINY_PERIMETER_MODEL: TinyModelRecipe(plan=PerimeterStart(), prepare=prepare_perimeter),
    load.TINY_TEXT_MODEL: TinyModelRecipe(plan=TextStart(), prepare=prepare_text),
    load.TINY_ZOOM_MODEL: TinyModelRecipe(plan=ZoomStart(), prepare=prepare_zoom),
}


def resolve_model(name: str) -> str:
    """Return the folder or hub id of the model that a user calls `name`.

    A tiny model is built in this process, if it is missing or was built by another plan than this
    version's. Processes and machines that share the cache folder build it once.
    """
    is_shipped = (
        name in FOLDER_BY_TINY_MODEL
        and (FOLDER_BY_TINY_MODEL[name] / "model.safetensors").is_file()
    )
    if name not in RECIPE_BY_TINY_MODEL or is_shipped:
        return resolve_model_name(name)
    folder = cache_folder() / name
    recipe = RECIPE_BY_TINY_MODEL[name]
    plan = asdict(recipe.plan)
    if not is_built(folder, plan):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not is_built(folder, plan):  # another process may have built it meanwhile
                train_and_save(folder, recipe.plan, recipe.prepare)
    return str(folder)


def resolve_dataset(name: str, rows: int, columns: Mapping[str, Any] | None) -> str:
    """Return the folder of the data set that a user calls `name`, made here if need be.

    Args:
        name: `synthetic`, `knights`, or a prepared folder, which is returned as it is. With
            `columns` it may also be a table, folder or hub id, which is converted.
        rows: training rows of `synthetic` or `knights`.
        columns: which column of a table is what (`adora_columns`); None without a table.
    """
    if name == KNIGHTS_DATA:
        # `tiny_text` has learned a little of puzzles with so many people.
        drawn_dataset = describe_puzzles(rows=rows, people=TextStart.people)
    elif name == SYNTHETIC_DATA:
        drawn_dataset = describe_synthetic(rows=rows)
    elif columns is None or _is_prepared(name):
        return name
    else:
        return str(ensure_converted(name, columns, cache_folder()))
    return str(ensure_drawn(cache_folder() / f"{name}-{rows}", drawn_dataset))


def _is_prepared(name: str) -> bool:
    """Return whether a data set needs no `adora_columns`, since it has our columns already."""
    return name in (SYNTHETIC_DATA, KNIGHTS_DATA) or read_manifest(Path(name)) is not None


def data_folders(script: AdoraScriptArguments) -> list[str]:
    """Return the folder of each data set of a run, made where it is missing. Raises `UserError`."""
    columns = script.adora_columns
    assert not isinstance(columns, str), "the arguments have parsed it"
    files = [name for name in script.dataset_name if Path(name).is_file()]
    if files and columns is None:
        file = files[0]
        example = "adora_columns: {problem: question, answer: label}"
        raise UserError(
            f"dataset_name: {file!r} is a file; say which of its columns is what, such as {example}"
        )
    if columns is not None and all(map(_is_prepared, script.dataset_name)):
        raise UserError(
            f"adora_columns: {columns} names columns of a table, but dataset_name: "
            f"{', '.join(script.dataset_name)} has its columns already; leave adora_columns out, "
            "or name the table"
        )
    return [
        resolve_dataset(name, script.adora_synthetic_rows, columns) for name in script.dataset_name
    ]
