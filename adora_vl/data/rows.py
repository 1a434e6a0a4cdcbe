"""Checks of the rows of a dataset, made before a row is trained on or evaluated."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.compute as pc

from adora_vl.data.prompts import IMAGE_PLACEHOLDER, find_control_token
from adora_vl.utils.cli import pluralize, short_repr
from adora_vl.utils.errors import UserError

_TEXT_COLUMNS = ("id", "problem", "answer")
_EMPTY_IMAGES = (None, {"bytes": None, "path": None})

Row = Mapping[str, Any]


def fault_in_row(row: Row) -> str | None:
    """Return what makes a row unusable, in one line without the row's id; None for a sound row.

    The line is `column: value; remedy`. The columns `id`, `problem`, `answer`, `images` and
    `choices` are checked. Images are counted and not decoded, so each may be bytes, a Pillow image,
    or anything else that is not null.
    """
    for column in _TEXT_COLUMNS:
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            return f"{column}: {short_repr(text)} is not a text; write it in, or remove the row"
    images = row.get("images")
    if not isinstance(images, list | tuple):
        return (
            f"images: {short_repr(images)} is not a list; make it a list of images, [] for a problem "
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
    is_list_of_texts = isinstance(choices, list | tuple) and all(
        isinstance(choice, str) for choice in choices
    )
    if choices is not None and not is_list_of_texts:
        return (
            f"choices: {short_repr(choices)} is not a list of texts; make it one, or null for an open "
            "question"
        )
    fault = _fault_in_text(row["problem"], len(images))
    if fault:
        return f"problem: {short_repr(row['problem'])} {fault}"
    for choice in choices or ():
        fault = _fault_in_text(choice)
        if fault:
            return f"choices: {short_repr(choice)} {fault}"
    return None


def _fault_in_text(text: str, image_count: int | None = None) -> str | None:
    """Return what makes a text of a prompt unusable, or None where nothing does.

    The words follow the name of the text: `has the model's own token <|im_end|>; remove it from the
    text`. `image_count` is the number of images of the row. If the text has placeholders for
    images, they have to be as many. With None they are not checked.
    """
    token = find_control_token(text)
    if token is not None:
        return f"has the model's own token {token}; remove it from the text"
    placeholder_count = text.count(IMAGE_PLACEHOLDER)
    if image_count is None or placeholder_count in (0, image_count):
        return None
    return (
        f"has {placeholder_count} {IMAGE_PLACEHOLDER} with {pluralize(image_count, 'image')}; give "
        "one for each image, or none to have them before the text"
    )


def fault_in_prompt(text: str, image_count: int) -> str | None:
    """Return what makes a text that a template made of a row unusable, or None where nothing does.

    `image_count` is the number of images of the row.
    """
    fault = _fault_in_text(text, image_count)
    if fault:
        return f"its text {fault}"
    return None if text.strip() else "its text is empty; name a column that has a value"


def require_sound_rows(rows: Iterable[Row], where: str) -> None:
    """Raise `UserError` for rows that cannot be used; it names the first one and counts the others.

    `where` names the data set, at the beginning of the message.
    """
    first_fault = ""
    further_count = 0  # of unusable rows after the first one
    for number, row in enumerate(rows):
        fault = fault_in_row(row)
        if fault and first_fault:
            further_count += 1
        elif fault:
            row_id = row.get("id")
            has_id = isinstance(row_id, str) and row_id.strip()
            row_name = row_id if has_id else f"number {number}"
            first_fault = f"row {row_name}: {fault}"
    if first_fault:
        further_rows = f" (and {further_count} more such rows)" if further_count else ""
        raise UserError(f"{where}: {first_fault}{further_rows}")


def rows_without_pixels(table: pa.Table) -> Iterator[Row]:
    """Yield the rows of a table for a check by `fault_in_row`, without the bytes of images.

    The table has our schema. In place of an image a row has True, or None for an image with neither
    bytes nor a path. Thousands of rows take a fraction of a second.
    """
    names = [name for name in (*_TEXT_COLUMNS, "choices") if name in table.column_names]
    columns = {name: table[name].to_pylist() for name in names}
    images_of_rows: Iterable[Any] = [None] * table.num_rows
    if "images" in table.column_names:
        images_of_rows = chain.from_iterable(map(_image_presence, table["images"].chunks))
    for number, images in enumerate(images_of_rows):
        row = {name: values[number] for name, values in columns.items()}
        yield {**row, "images": images}


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


def _image_presence(chunk: pa.ListArray) -> Iterator[list[bool | None] | None]:
    """Yield a list for each row, with True for an image that is there and None for a null image.

    For example, a row with a picture and a null image gives [True, None], a row without images
    gives [], and a row whose list is null gives None. `chunk` is a part of the column `images`.
    """
    lengths = pc.list_value_length(chunk).to_pylist()
    values = chunk.flatten()
    is_present = values.is_valid()
    if pa.types.is_struct(values.type):
        has_bytes = values.field("bytes").is_valid()
        has_path = values.field("path").is_valid()
        is_present = pc.and_(is_present, pc.or_(has_bytes, has_path))
    presence = iter([True if present else None for present in is_present.to_pylist()])
    for length in lengths:
        yield None if length is None else list(islice(presence, length))
