"""Rows that are the same problem, read and decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch.utils.data import Dataset


class KeptImage(Image.Image):
    """A decoded image that is never copied: TRL deep-copies the prompts of a batch, and nothing here draws on one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptImage:
        return self


def kept(image: Any) -> Any:
    """`image` itself, loaded, as a `KeptImage`; what is no PIL image stays."""
    if isinstance(image, Image.Image):
        image.load()
        image.__class__ = KeptImage
    return image


class DistinctRows(Dataset[dict[str, Any]]):
    """A dataset that decodes each row of a batch once; the copies that a sampler asks for share its images.

    TRL's sampler asks for the rows of a generation once for each of its micro-batches, and Transformers holds those of
    an optimizer step at the same time. So the rows of the batch before are kept, and given again where they come again.
    A worker process of the loader (`dataloader_num_workers`) has a copy of this, and reads once for itself.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._last: dict[int, dict[str, Any]] = {}  # of the batch before, by index
        self.share = True  # false: a read for every copy, as stock TRL does

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """What torch's loader calls with the indices of a whole batch."""
        if not self.share:
            return [dict(self._rows[index]) for index in indices]
        before, wanted = self._last, dict.fromkeys(indices)
        self._last = {index: before[index] if index in before else self._read(index) for index in wanted}
        return [dict(self._last[index]) for index in indices]

    def _read(self, index: int) -> dict[str, Any]:
        row = dict(self._rows[index])
        if row.get("images"):
            row["images"] = [kept(image) for image in row["images"]]
        return row
