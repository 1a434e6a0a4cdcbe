"""Checks of the rows of a dataset, made before a row is trained on or evaluated."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.compute as pc

from adora_vl.data.prompts import IMAGE_PLACEHOLDER, control_token_in
from adora_vl.utils.cli import amount, shown
from adora_vl.utils.errors import UserError

_TEXT_COLUMNS = ("id", "problem", "answer")
_EMPTY_IMAGES = (None, {"bytes": None, "path": None})

Row = Mapping[str, Any]


def problem_with_row(row: Row) -> str | None:
    """Return what makes a row unusable, in one line without the row's id; None for a sound row.

    The line is `column: value; remedy`. The columns `id`, `problem`, `answer`, `images` and
    `choices` are checked. Images are counted and not decoded, so each may be bytes, a Pillow image,
    or anything else that is not null.
    """
    for column in _TEXT_COLUMNS:
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
        # Only a dict is compared, since comparing other objects may be slow, or an error.
        is_empty_struct = isinstance(image, dict) and image in _EMPTY_IMAGES
        if image is None or is_empty_struct:
            return (
                f"images: image {number} of {len(images)} is null; put the picture in, or remove "
                "the row"
            )
    choices = row.get("choices")
    is_list = isinstance(choices, list | tuple)
    is_sound = choices is None or (is_list and all(isinstance(c, str) for c in choices))
    if not is_sound:
        return (
            f"choices: {shown(choices)} is not a list of texts; make it one, or null for an open "
            "question"
        )
    fault = _fault_in_text(row["problem"], len(images))
    if fault:
        return f"problem: {shown(row['problem'])} {fault}"
    for choice in choices or ():
        fault = _fault_in_text(choice)
        if fault:
            return f"choices: {shown(choice)} {fault}"
    return None


def _fault_in_text(text: str, images: int | None = None) -> str | None:
    """Return what makes a text of a prompt unusable, as words after its name; None if nothing does.

    `images`: the number of images of the row. If the text has placeholders for images, they have to
    be as many. None where placeholders are not checked.
    """
    token = control_token_in(text)
    if token is not None:
        return f"has the model's own token {token}; remove it from the text"
    placeholders = text.count(IMAGE_PLACEHOLDER)
    if images is not None and placeholders and placeholders != images:
        has = f"has {placeholders} {IMAGE_PLACEHOLDER} with {amount(images, 'image')}"
        return f"{has}; give one for each image, or none to have them before the text"
    return None


def problem_with_prompt(text: str, images: int) -> str | None:
    """Return what makes the text that a template makes of a row unusable, in one line, else None.

    `images`: the number of images of the row.
    """
    if fault := _fault_in_text(text, images):
        return f"its text {fault}"
    return None if text.strip() else "its text is empty; name a column that has a value"


def require_sound_rows(rows: Iterable[Row], where: str) -> None:
    """Raise `UserError` for rows that cannot be used; it names the first one and counts the others.

    `where`: names the data set, at the beginning of the message.
    """
    first_fault = ""
    later_faults = 0
    for number, row in enumerate(rows):
        fault = problem_with_row(row)
        if fault and first_fault:
            later_faults += 1
        elif fault:
            row_id = row.get("id")
            has_id = isinstance(row_id, str) and row_id.strip()
            first_fault = f"row {row_id if has_id else f'number {number}'}: {fault}"
    if first_fault:
        count_note = f" (and {later_faults} more such rows)" if later_faults else ""
        raise UserError(f"{where}: {first_fault}{count_note}")


def rows_without_pixels(table: pa.Table) -> Iterator[Row]:
    """Yield the rows of a table for `problem_with_row`, without copying the bytes of images.

    In place of an image a row has True, or None for an image with neither bytes nor a path.
    Thousands of rows take a fraction of a second. `table`: of our schema.
    """
    names = [name for name in (*_TEXT_COLUMNS, "choices") if name in table.column_names]
    columns = {name: table[name].to_pylist() for name in names}
    images: Iterable[Any] = [None] * table.num_rows
    if "images" in table.column_names:
        images = chain.from_iterable(map(_image_marks, table["images"].chunks))
    for number, marks in enumerate(images):
        row = {name: values[number] for name, values in columns.items()}
        yield {**row, "images": marks}


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row, from either of TRL's columns, `images` or `image`."""
    if row.get("images"):
        return list(row["images"])
    image = row.get("image")
    return [] if image is None else [image]


def has_images(table: pa.Table) -> bool:
    """Return whether any row of a table has an image in its column `images`."""
    # None for a table without rows.
    return bool(pc.sum(pc.list_value_length(table["images"])).as_py())


def has_choices(table: pa.Table) -> bool:
    """Return whether any row of a table has choices in its column `choices`.

    An empty list counts as no choices, and so does a column of anything but lists.
    """
    if "choices" not in table.column_names:
        return False
    column_type = table.schema.field("choices").type
    is_list = pa.types.is_list(column_type) or pa.types.is_large_list(column_type)
    if not is_list:
        return False
    return bool(pc.sum(pc.list_value_length(table["choices"])).as_py())


def _image_marks(chunk: pa.ListArray) -> Iterator[list[bool | None] | None]:
    """Yield a list for each row, with True for an image that is there and None for a null image.

    A row whose list is null gives None. For example, a row with a picture and a null image gives
    [True, None], and a row without images gives []. `chunk`: a part of the column `images`.
    """
    lengths = pc.list_value_length(chunk).to_pylist()
    values = chunk.flatten()
    is_present = values.is_valid()
    if pa.types.is_struct(values.type):
        has_bytes = values.field("bytes").is_valid()
        has_path = values.field("path").is_valid()
        is_present = pc.and_(is_present, pc.or_(has_bytes, has_path))
    marks = iter([True if mark else None for mark in is_present.to_pylist()])
    for length in lengths:
        if length is None:
            yield None
        else:
            yield [next(marks) for _ in range(length)]
