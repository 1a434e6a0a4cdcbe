"""Loading of a run's rows: their order, each row read once per batch, and images read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset
from trl.trainer.utils import RepeatSampler

from adora_vl.data.images import UnreadableImageError, upright_rgb_copy
from adora_vl.data.loading import UnreadableImage
from adora_vl.data.shared_images import KeptImage, as_kept_image


def shown_rows(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the rows with pictures as a person sees them (`upright_rgb_copy`), each a `KeptImage`.

    Every row of a run passes here, whoever has read it. One object that stands in several rows
    stays one; a picture that cannot be shown becomes an `UnreadableImage`, and what is no picture
    stays as it is.
    """
    shown_images: dict[int, Any] = {}

    def shown(image: Any) -> Any:
        """Return an image as the model sees it, and the same object for the same image."""
        if isinstance(image, KeptImage) or not isinstance(image, Image.Image):
            return image
        if id(image) not in shown_images:
            shown_images[id(image)] = _shown(image)
        return shown_images[id(image)]

    new_rows = []
    for row in rows:
        changed = dict(row)
        if isinstance(row.get("images"), list | tuple):
            changed["images"] = [shown(image) for image in row["images"]]
        if isinstance(row.get("image"), Image.Image):
            changed["image"] = shown(row["image"])
        new_rows.append(changed)
    return new_rows


def _shown(image: Image.Image) -> Any:
    """Return an image as the model sees it, or what marks it as unreadable."""
    try:
        return as_kept_image(upright_rgb_copy(image))
    except UnreadableImageError as error:
        return UnreadableImage(str(error))


# the column with the number of a row in the data set, where rows are numbered
ROW_NUMBER = "adora_row"


class DistinctRows(Dataset[dict[str, Any]]):
    """A dataset that decodes each row of a batch once; copies of the row share its images.

    TRL's sampler repeats the rows of a generation for each of its micro-batches. So the rows of the
    last batch are stored, and returned again if the next batch asks for them. With
    `dataloader_num_workers` each worker process has a copy of this object, and decodes for itself.
    `read_ahead` is called on another thread (by `ImagePrefetch`), everything else on the loader's.
    """

    def __init__(self, rows: Any, *, numbered: bool = False, share: bool = True) -> None:
        """Wrap rows; none is read yet.

        `numbered`: each row says its number, in the column `ROW_NUMBER`. `share`: copies of a row
        are read once; else each is read, as stock TRL does.
        """
        self._rows = rows
        self._numbered = numbered
        self.share = share
        self._last: dict[int, dict[str, Any]] = {}  # of the batch before, by index
        self._ahead: dict[int, dict[str, Any]] = {}  # of a batch to come

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return what torch's loader calls with the indices of a whole batch."""
        if not self.share:
            return [self._read(index) for index in indices]
        before = self._last
        ahead = self._ahead
        distinct = dict.fromkeys(indices)
        self._last = {
            index: before.get(index) or ahead.pop(index, None) or self._read(index)
            for index in distinct
        }
        return [dict(self._last[index]) for index in indices]

    @property
    def latest(self) -> list[int]:
        """The distinct indices of the last batch."""
        return list(self._last)

    def read_ahead(self, index: int) -> dict[str, Any]:
        """Return a row of the batch to come, read now and kept until the batch asks for it.

        Raises what reading it raises.
        """
        row = self._last.get(index, self._ahead.get(index))
        if row is None:
            row = self._ahead[index] = self._read(index)
        return row

    def rows_after(
        self, numbers: Sequence[int], order: EpochRepeatSampler, generations: int = 1
    ) -> list[Any]:
        """Read the rows that take the places of rows `numbers` `generations` generations later.

        Returns an empty list where those rows are not known.
        """
        distinct = list(dict.fromkeys(numbers))
        after = dict(
            zip(distinct, order.following(distinct, order.epoch, generations), strict=False)
        )
        read = self.read_ahead if self.share else self._read
        return [dict(read(after[number])) for number in numbers] if after else []

    def forget_ahead(self, but: Collection[int] = ()) -> None:
        """Drop rows that were read ahead and that no batch has asked for, except those in `but`."""
        self._ahead = {index: row for index, row in self._ahead.items() if index in but}

    def _read(self, index: int) -> dict[str, Any]:
        """Read one row."""
        [row] = shown_rows([self._rows[index]])
        return self._with_number(row, index)

    def _with_number(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a row with its number in the data set."""
        return {**row, ROW_NUMBER: index} if self._numbered else row


# puts the images of a row into the cache, and returns their bytes there
Process = Callable[[dict[str, Any]], int]


class NoPrefetch:
    """The interface of a prefetch, which reads nothing ahead."""

    def start(self) -> None:
        """Begin when a generation is complete, and the policy is about to learn from it."""

    def finish(self) -> None:
        """Finish before a generation, which has the cache for itself, and at the end."""


class ImagePrefetch(NoPrefetch):
    """Reads and processes the next generation's images on a thread while the policy trains.

    It fills two stores that the next generation looks into first: decoded rows, and the cache of
    processed images. It draws no random number and moves no loader, so a run with it takes the same
    steps. A row that cannot be read or processed is skipped, and the error is raised where the
    loader reads it.
    """

    def __init__(
        self, rows: DistinctRows, order: EpochRepeatSampler, process: Process, limit_bytes: int
    ) -> None:
        """Create a prefetch that stops after `limit_bytes` of processed images.

        With more, the cache would drop some before their use.
        """
        self._rows = rows
        self._order = order
        self._process = process
        self._limit_bytes = limit_bytes
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def start(self) -> None:
        """Process the loader's last batch, then read and process the one after it.

        The loader may be a batch ahead of the generation that the policy learns from; the images of
        its last batch are still to be processed then.
        """
        self.finish()
        latest = self._rows.latest
        coming = dict.fromkeys([*latest, *self._order.following(latest, self._order.epoch)])
        # what was asked for ahead has read the next ones already
        self._rows.forget_ahead(but=coming)
        self._ending.clear()
        self._thread = threading.Thread(target=self._work, args=(list(coming),), name="prefetch")
        self._thread.start()

    def finish(self) -> None:
        """Stop after the row that is being processed, and wait for it."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
            self._thread = None

    def _work(self, coming: list[int]) -> None:
        """Read and process the images, on the thread."""
        processed_bytes = 0
        for index in coming:
            interpreter_ends = not threading.main_thread().is_alive()  # it waits for this thread
            if self._ending.is_set() or interpreter_ends or processed_bytes > self._limit_bytes:
                return
            with suppress(Exception):
                processed_bytes += self._process(self._rows.read_ahead(index))


class EpochRepeatSampler(RepeatSampler):  # type: ignore[misc]  # TRL is untyped to mypy
    """Seeds the generator for each epoch from (seed, epoch); epoch 0 has the same order as in TRL.

    Stock TRL draws all orders from one generator, so a resumed run repeats the first epoch's.
    Without `shuffle` it begins every epoch at the first row, so that rows at the end that fill no
    generation are never learned from. Ours goes on behind the last row of the epoch before.
    """

    epoch = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # by epoch, for the last epochs that `following` was called for
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def like(cls, sampler: RepeatSampler, seed: int) -> EpochRepeatSampler:
        """Return a sampler with the rows and repetitions of `sampler`, in the orders of `seed`."""
        return cls(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as `transformers.Trainer` does before each epoch."""
        self.epoch = epoch

    def following(self, rows: Sequence[int], epoch: int, generations: int = 1) -> list[int]:
        """Return the rows that take the places of `rows` `generations` generations later.

        These may be in another epoch. `rows`: the distinct rows of one process in one generation of
        `epoch`. The result is empty where they are not all of one generation. No random state is
        used or changed, and no position of a loader.
        """
        order = self._order(epoch)
        size = self.batch_size
        try:
            first = order.index(rows[0]) // size * size
            offsets = [order.index(row, first, first + size) - first for row in rows]
        except (IndexError, ValueError):
            return []
        epochs, after = divmod(first + generations * size, len(order))
        return [self._order(epoch + epochs)[after + offset] for offset in offsets]

    def _order(self, epoch: int) -> list[int]:
        """Return the distinct rows of an epoch in their order, whole generations only."""
        if epoch not in self._orders:
            once = type(self)(self.data_source, 1, self.batch_size, 1, self.shuffle, self.seed)
            once.set_epoch(epoch)
            self._orders = {
                number: order for number, order in self._orders.items() if number == epoch - 1
            }
            self._orders[epoch] = list(once)
        return self._orders[epoch]

    def __iter__(self) -> Iterator[int]:
        """Return the rows of the present epoch, each as often as TRL's sampler repeats it."""
        if self.shuffle:
            self.generator = torch.Generator()
            self.generator.manual_seed((self.seed or 0) + 1_000_003 * self.epoch)
            return iter(super().__iter__())
        rows = self.num_samples
        # Rows at the end that fill no generation are left to the next epoch.
        generations_per_epoch = rows // self.batch_size
        first = self.epoch * generations_per_epoch * self.batch_size
        return ((first + index) % rows for index in super().__iter__())
