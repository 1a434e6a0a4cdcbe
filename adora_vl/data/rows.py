"""Checks of the rows of a dataset, made before a row is trained on or evaluated."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.compute as pc

from adora_vl.data.prompts import PLACEHOLDER, control_token_in
from adora_vl.utils.cli import amount, shown
from adora_vl.utils.errors import UserError

_TEXTS = ("id", "problem", "answer")
_EMPTY_IMAGES = (None, {"bytes": None, "path": None})

Row = Mapping[str, Any]


def problem_with_row(row: Row) -> str | None:
    """Return what makes `row` unusable, or None for a sound row.

    The result is one line, `column: value; remedy`, without the row's id. The columns `id`,
    `problem`, `answer`, `images` and `choices` of the schema are looked at. Images are counted and
    not decoded: each may be bytes, a Pillow image, or anything else that is not null.
    """
    for column in _TEXTS:
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            return f"{column}: {shown(text)} is not a text; write it in, or remove the row"
    images = row.get("images")
    if not isinstance(images, list | tuple):
        return (
            f"images: {shown(images)} is not a list; make it a list of images, [] for a problem "
            "without any"
        )
    for number, image in enumerate(images):
        if any(
            image is empty or (isinstance(image, dict) and image == empty)
            for empty in _EMPTY_IMAGES
        ):
            return (
                f"images: image {number} of {len(images)} is null; put the picture in, or remove "
                "the row"
            )
    choices = row.get("choices")
    if choices is not None and not (
        isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)
    ):
        return (
            f"choices: {shown(choices)} is not a list of texts; make it one, or null for an open "
            "question"
        )
    fault = _fault_in(row["problem"], len(images))
    if fault:
        return f"problem: {shown(row['problem'])} {fault}"
    for choice in choices or ():
        fault = _fault_in(choice)
        if fault:
            return f"choices: {shown(choice)} {fault}"
    return None


def _fault_in(text: str, images: int | None = None) -> str | None:
    """Return what makes a text of a prompt unusable, worded to follow its name; None if nothing.

    `images`: the number of images of the row, which placeholders have to match where the text has
    any; None where placeholders are not checked.
    """
    token = control_token_in(text)
    if token is not None:
        return f"has the model's own token {token}; remove it from the text"
    placeholders = text.count(PLACEHOLDER)
    if images is not None and placeholders and placeholders != images:
        has = f"has {placeholders} {PLACEHOLDER} with {amount(images, 'image')}"
        return f"{has}; give one for each image, or none to have them before the text"
    return None


def problem_with_prompt(text: str, images: int) -> str | None:
    """Return what makes the text that a template made of a row unusable, in one line, else None."""
    if fault := _fault_in(text, images):
        return f"its text {fault}"
    return None if text.strip() else "its text is empty; name a column that has a value"


def require_sound_rows(rows: Iterable[Row], where: str) -> None:
    """Raise `UserError` for the first row of `rows` that cannot be used, by its id.

    `where` begins the message.
    """
    first = ""
    later_faults = 0
    for number, row in enumerate(rows):
        problem = problem_with_row(row)
        if problem and first:
            later_faults += 1
        elif problem:
            name = row.get("id")
            first = (
                f"row {name if isinstance(name, str) and name.strip() else f'number {number}'}: "
                f"{problem}"
            )
    if first:
        raise UserError(
            f"{where}: {first}{f' (and {later_faults} more such rows)' if later_faults else ''}"
        )


def rows_without_pixels(table: pa.Table) -> Iterator[Row]:
    """Yield the rows of a table of the schema, for `problem_with_row`, without copying image bytes.

    An image is True, or None where it has neither bytes nor a path. Thousands of rows take a
    fraction of a second.
    """
    names = [name for name in (*_TEXTS, "choices") if name in table.column_names]
    columns = {name: table[name].to_pylist() for name in names}
    images: Iterable[Any] = [None] * table.num_rows
    if "images" in table.column_names:
        images = chain.from_iterable(map(_image_marks, table["images"].chunks))
    for number, marks in enumerate(images):
        row = {name: values[number] for name, values in columns.items()}
        yield {**row, "images": marks}


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row, from either of TRL's columns, `images` or `image`."""
    image = row.get("image")
    return list(row.get("images") or ([] if image is None else [image]))


def has_images(table: pa.Table) -> bool:
    """Return whether any row of a table of the schema has an image."""
    return bool(pc.sum(pc.list_value_length(table["images"])).as_py())


def has_choices(table: pa.Table) -> bool:
    """Return whether any row of a table of the schema has choices.

    An empty list counts as no choices, and so does a column that holds anything but lists.
    """
    kind = table.schema.field("choices").type if "choices" in table.column_names else None
    if kind is None or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    return bool(pc.sum(pc.list_value_length(table["choices"])).as_py())


def _image_marks(chunk: pa.ListArray) -> Iterator[list[bool | None] | None]:
    """Yield for each row of a chunk of image lists one mark per image, or None for a null list."""
    lengths = pc.list_value_length(chunk).to_pylist()
    values = chunk.flatten()
    is_present = values.is_valid()
    if pa.types.is_struct(values.type):
        has_bytes = values.field("bytes").is_valid()
        has_path = values.field("path").is_valid()
        is_present = pc.and_(is_present, pc.or_(has_bytes, has_path))
    marks = iter([True if mark else None for mark in is_present.to_pylist()])
    for length in lengths:
        yield None if length is None else [next(marks) for _ in range(length)]
