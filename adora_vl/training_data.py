"""The rows that a run trains on: one data set or several, with the prompt of each row.

The order of the rows depends on the data, the shares and the seed alone, and the sampler's on the epoch. So a run that
goes on sees the rows that an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc  # pyarrow ships no types
from datasets import Dataset, concatenate_datasets, interleave_datasets

from adora_vl.assets import resolve_dataset
from adora_vl.config import AdoraScriptArguments
from adora_vl.errors import UserError
from adora_vl.prompt_template import Template, template
from adora_vl.prompts import conversations
from adora_vl.rows import problem_with_prompt, require_sound_rows, rows_without_pixels
from adora_vl.unreadable_images import hand_on_unreadable
from data_prep.storage import load_split


def data_folders(script: AdoraScriptArguments) -> list[str]:
    """The folder of each data set, made where it is missing. Raises `UserError`."""
    columns = script.adora_columns
    assert not isinstance(columns, str), "the arguments have read it"
    file = next((name for name in script.dataset_name if columns is None and Path(name).is_file()), None)
    if file is not None:
        raise UserError(
            f"dataset_name: {file!r} is a file; say which of its columns is what, such as adora_columns: "
            "{problem: question, answer: label}"
        )
    return [resolve_dataset(name, script.adora_synthetic_rows, columns) for name in script.dataset_name]


def load_rows(script: AdoraScriptArguments, folders: Sequence[str], seed: int) -> Dataset:
    """The rows with a conversational `prompt` column; images are decoded when a row is read. Raises `UserError`."""
    split, made = script.dataset_train_split, template(script.adora_prompt) if script.adora_prompt else None
    parts, prompts = [], []
    for folder in folders:
        dataset = load_split(folder, split)
        where = f"dataset: {folder!r} split {split!r}"
        require_sound_rows(rows_without_pixels(dataset.data.table), where)
        prompts += problem_texts(dataset, made, where)
        parts.append(dataset)
    _require_different_ids(parts, folders)
    dataset = parts[0] if len(parts) == 1 else _one_table(parts)
    images = pc.list_value_length(dataset.data.table["images"]).to_pylist()
    messages = conversations(prompts, images, script.adora_system_prompt)
    dataset = hand_on_unreadable(dataset.add_column("prompt", messages))
    if script.adora_mixture is None or len(parts) == 1:
        return dataset
    return dataset.select(mixed_rows([len(part) for part in parts], script.adora_mixture, seed))


def problem_texts(dataset: Dataset, made: Template | None, where: str) -> list[str]:
    """The text of each row's message: its problem, or what the template makes of its columns.

    Raises `UserError` for a column that is not there, and for a row whose text has a token of the model, or `<image>`
    another number of times than the row has images.
    """
    if made is None:
        return list(dataset["problem"])
    made.check_columns(dataset.column_names, where)
    images = pc.list_value_length(dataset.data.table["images"]).to_pylist()
    texts = []
    for row, count in zip(dataset.select_columns(["id", *made.names]), images, strict=True):
        text = made(row)
        fault = problem_with_prompt(text, count)
        if fault:
            raise UserError(f"adora_prompt: row {row['id']} of {where}: {fault}")
        texts.append(text)
    return texts


def mixed_rows(sizes: Sequence[int], shares: Sequence[float], seed: int) -> list[int]:
    """Row numbers of data sets that stand one after the other, drawn by `shares` until each row has come once.

    Rows of a data set that is too small for its share are repeated.
    """
    first, numbers = 0, []
    for size in sizes:
        numbers.append(Dataset.from_dict({"row": list(range(first, first + size))}))
        first += size
    drawn = interleave_datasets(
        numbers, probabilities=[share / sum(shares) for share in shares], seed=seed, stopping_strategy="all_exhausted"
    )
    return list(drawn["row"])


def _one_table(parts: Sequence[Dataset]) -> Dataset:
    """All rows one after the other; a column that one data set lacks is null there."""
    try:
        return concatenate_datasets(list(parts))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"dataset_name: the data sets have columns of different types ({error}); prepare them in one way"
        ) from error


def _require_different_ids(parts: Sequence[Dataset], folders: Sequence[str]) -> None:
    """Raise `UserError` where two rows share an id, by which rollouts are recorded and shown."""
    seen: dict[Any, str] = {}
    for part, folder in zip(parts, folders, strict=True):
        ids = part.data.table["id"].to_pylist()
        if len(set(ids)) < len(ids):
            twice = next(row for row, count in Counter(ids).items() if count > 1)
            raise UserError(f"dataset_name: {folder!r} has the row {twice!r} twice; give each row an id of its own")
        double = next((row for row in ids if row in seen), None)
        if double is not None:
            names = " and ".join(Path(one).name for one in (seen[double], folder))
            raise UserError(f"dataset_name: {names} both have a row {double!r}; convert one with another --name")
        seen.update(dict.fromkeys(ids, folder))
