"""The columns of data sets that Python code passes: pictures, and reference answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Image, IterableDataset, List, Value
from tqdm import tqdm

from adora_vl.preflight.python_inputs import arrow_tables, is_plain_table, row_names
from adora_vl.rewards.choose import RewardSet
from adora_vl.rewards.presets import PRESETS, describe_reference_fault
from adora_vl.utils.cli import short_repr
from adora_vl.utils.errors import UserError

# The rewards of ours that compare with the column `answer`. The last two are for puzzles, whose
# answers are not graded as mathematics.
_REWARDS_WITH_ANSWER = (*PRESETS, "knights", "knights_logic_rl")
_BAR_DELAY_S = 2.0  # after which a progress bar is shown


def refuse_undecoded_columns(key: str, dataset: Dataset | IterableDataset) -> None:
    """Raise `UserError` for a data set whose rows do not come as Python objects and pictures.

    Paths, bytes and URLs are decoded only if the column says that they are images, and in a format
    such as `torch` everything is a tensor. The model's processor would raise an error of its own at
    the first step, after the weights are loaded.

    `key`: the argument with the data set, for the error.
    """
    if isinstance(dataset, Dataset):
        # A transform makes the pictures itself, so what is stored says nothing of them.
        if not is_plain_table(dataset):
            return
        row_format = dataset.format["type"]
        if row_format is not None:
            raise UserError(
                f"{key}: its rows are in the format {row_format!r}, where messages and pictures "
                "are no Python objects; give dataset.with_format(None)"
            )
    # Not every stream knows its features. Its pictures are looked at when they are drawn.
    for name, feature in (dataset.features or {}).items():
        _refuse_undecoded_images(key, name, feature)


def _refuse_undecoded_images(key: str, name: str, feature: object) -> None:
    """Raise `UserError` for a column of pictures that `datasets` does not decode.

    Args:
        key: The argument with the data set, for the error.
        name: The column. TRL reads lists of pictures from `images`, and one a row from `image`.
        feature: What the data set says of the values of the column.
    """
    is_one_picture = _is_decoded(feature)
    # A list of fixed length is stored in another way, in which our checks would find no picture.
    is_list_of_pictures = (
        isinstance(feature, List) and feature.length == -1 and _is_decoded(feature.feature)
    )
    is_always_empty = feature in (Value("null"), List(Value("null")))
    if name == "images" and not is_list_of_pictures and not is_always_empty:
        remedy = "cast_column('images', datasets.List(datasets.Image()))"
        if is_one_picture:
            remedy = "rename_column('images', 'image')"
    elif name == "image" and not is_one_picture and not is_always_empty:
        remedy = "cast_column('image', datasets.Image())"
        if is_list_of_pictures:
            remedy = "rename_column('image', 'images')"
    else:
        return
    kind = "lists of decoded pictures" if name == "images" else "decoded pictures"
    raise UserError(
        f"{key}: the column {name!r} is {short_repr(feature)}, and has to hold {kind}; give "
        f"dataset.{remedy}"
    )


def _is_decoded(feature: object) -> bool:
    """Return whether `datasets` decodes the values of a column as pictures."""
    return isinstance(feature, Image) and feature.decode


def refuse_unusable_answers(
    key: str, rewards: RewardSet, dataset: Dataset | IterableDataset
) -> None:
    """Raise `UserError` for reference answers that the rewards cannot compare with.

    Such a row would end the run at the step in which it is drawn. The answers of a stream, and
    those that a transform makes, are known only then.

    Args:
        key: The argument with the data set, for the error.
        rewards: The reward functions of the run.
        dataset: The data set.
    """
    comparing = [entry for entry in rewards.entries if entry in _REWARDS_WITH_ANSWER]
    is_table = is_plain_table(dataset)
    columns = dataset.column_names  # None for a stream that does not know them
    has_transform = isinstance(dataset, Dataset) and not is_table
    if not comparing or columns is None or has_transform:
        return
    if "answer" not in columns:
        raise UserError(
            f"adora_reward: {comparing[0]!r} needs 'answer', which is no column of {key} (it has "
            f"{', '.join(sorted(columns))}); rename the column of the reference answers"
        )
    is_graded = any(entry in PRESETS for entry in comparing)
    if is_graded and is_table:
        _refuse_ungradable_answers(key, dataset)


def _is_list_of_texts(choices: object) -> bool:
    """Return whether a row's choices are what the graders take: a list of texts."""
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)


def _references(dataset: Dataset) -> Iterator[tuple[Any, Any, Any]]:
    """Yield of each row its name for messages, its `answer`, and its `choices` or None."""
    first_number = 0
    for table in arrow_tables(dataset, ["id", "answer", "choices"]):
        names = row_names(table, first_number)
        first_number += table.num_rows
        columns = table.to_pydict()
        choices_of_rows = columns.get("choices") or [None] * table.num_rows
        yield from zip(names, columns["answer"], choices_of_rows, strict=True)


def _refuse_ungradable_answers(key: str, dataset: Dataset) -> None:
    """Raise `UserError` for the first row whose reference answer no answer could be equal to.

    `key`: the argument with the data set, for the error.
    """
    usable = set[str]()
    # An answer takes half a millisecond. With `disable=None` the bar is for a terminal alone.
    bar = tqdm(
        _references(dataset),
        desc="reference answers",
        total=len(dataset),
        unit="row",
        delay=_BAR_DELAY_S,
        disable=None,
    )
    for name, answer, choices in bar:
        # As text, since a faulty column may have lists, which no set can hold.
        reference = f"{answer!r} {choices!r}"
        if reference in usable:
            continue
        fault: str | None = "choices: write a list of texts"
        if choices is None:
            fault = describe_reference_fault(answer, choices=None)
        elif _is_list_of_texts(choices):
            fault = describe_reference_fault(answer, tuple(choices))
        if fault is not None:
            raise UserError(
                f"{key}: row {name}: answer {short_repr(answer)} cannot be graded against "
                f"({fault}); write it as docs/rewards.md#forms-of-answers says"
            )
        usable.add(reference)
