"""Passes on rows whose image can no longer be read, so that the run can name them before it stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset, DatasetInfo, Features, Image, List

from adora_vl.errors import in_one_line


@dataclass(frozen=True)
class UnreadableImage:
    """Takes the place of an image that cannot be decoded in a row's `images`."""

    reason: str


class DecodedRows:
    """The transform of a data set that decodes the images of a column, and does nothing else."""

    def __init__(self, column: str) -> None:
        self._column, self._decoder = column, Image()

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        column = self._column
        if column not in rows:
            return rows
        return {**rows, column: [[self._decoded(stored) for stored in images or []] for images in rows[column]]}

    def _decoded(self, stored: dict[str, Any]) -> Any:
        try:
            return self._decoder.decode_example(stored)
        except Exception as error:  # Pillow raises what its formats raise: OSError, SyntaxError, struct.error, ...
            return UnreadableImage(in_one_line(error))


def only_decodes(dataset: Any) -> bool:
    """Whether reading a row gives the same at any time and on any thread. A transform of the user's may draw random
    numbers, and so may a data set of the user's own class.
    """
    if not isinstance(dataset, Dataset):
        return False
    return dataset.format["type"] != "custom" or isinstance(
        dataset.format["format_kwargs"].get("transform"), DecodedRows
    )


def hand_on_unreadable(dataset: Dataset, column: str = "images") -> Dataset:
    """`dataset` with the images of `column` decoded on access, and an `UnreadableImage` where that fails.

    The error would otherwise be raised in the data loader of one rank, without the row's id, while the others wait.
    """
    feature = dataset.features.get(column)
    if not isinstance(feature, List) or not isinstance(feature.feature, Image):
        return dataset
    assert dataset._indices is None, "the table has to be in the order of the rows"
    # cast_column would write all images to the disk once more; what is stored is the same with and without decoding
    info = DatasetInfo(features=Features({**dataset.features, column: List(Image(decode=False))}))
    return Dataset(dataset.data, info, dataset.split).with_transform(DecodedRows(column))


def unreadable_rows(rows: list[dict[str, Any]], column: str = "images") -> list[tuple[str, str]]:
    """Id and reason of each row with an image that could not be read, each id once."""
    found: dict[str, str] = {}
    for number, row in enumerate(rows):
        for image in row.get(column) or []:
            if isinstance(image, UnreadableImage):
                found.setdefault(str(row.get("id", f"#{number} of the batch")), image.reason)
    return list(found.items())
