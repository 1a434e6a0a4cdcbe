"""Rows that are the same problem, read and decoded once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from PIL import Image
from torch.utils.data import Dataset


class KeptImage(Image.Image):
    """A decoded image that is never copied: TRL deep-copies the prompts of a batch, and nothing here draws on one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptImage:
        return self

    @cached_property
    def digest(self) -> str:
        """`content_digest`, computed once for the processor of the trainer, that of the engine, and the engine."""
        return content_digest(self)


def content_digest(image: Image.Image) -> str:
    """Of mode, size and pixels."""
    digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    if image.mode == "P":
        digest.update(bytes(image.getpalette() or []))
    return digest.hexdigest()


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

    `read_ahead` is called on another thread (`adora_vl.rollout.prefetch`), everything else on the loader's.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._last: dict[int, dict[str, Any]] = {}  # of the batch before, by index
        self._ahead: dict[int, dict[str, Any]] = {}  # of a batch to come
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
        self._last = {index: before[index] if index in before else self._taken(index) for index in wanted}
        return [dict(self._last[index]) for index in indices]

    @property
    def latest(self) -> list[int]:
        """The distinct indices of the last batch."""
        return list(self._last)

    def read_ahead(self, index: int) -> dict[str, Any]:
        """A row of the batch to come, read now and kept until the batch asks for it. Raises what reading it raises."""
        row = self._last.get(index, self._ahead.get(index))
        if row is None:
            row = self._ahead[index] = self._read(index)
        return row

    def forget_ahead(self) -> None:
        """Let go of rows that were read ahead and that no batch has asked for."""
        self._ahead = {}

    def _taken(self, index: int) -> dict[str, Any]:
        ahead = self._ahead.pop(index, None)
        return self._read(index) if ahead is None else ahead

    def _read(self, index: int) -> dict[str, Any]:
        row = dict(self._rows[index])
        if row.get("images"):
            row["images"] = [kept(image) for image in row["images"]]
        return row
