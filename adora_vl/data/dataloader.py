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

from adora_vl.data.images import UnreadableImageError, refuse_narrow, upright_rgb_copy
from adora_vl.data.loading import UnreadableImage
from adora_vl.data.shared_images import ImageWithDigest, as_image_with_digest


def with_upright_rgb_images(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return copies of rows whose pictures are as a person sees them: upright, in RGB, on white.

    Every row of a run passes here, whoever has read it. A picture becomes an `ImageWithDigest`, or
    an `UnreadableImage` if no model could see it. So does what is no picture of Pillow, such as a
    path or an array: it would not be recorded, nor be known again. A picture that is in several
    rows stays one object.
    """
    converted_by_id: dict[int, Any] = {}  # by Python's id of the picture object

    def convert(image: Any) -> Any:
        """Return an image as the model sees it, or an `UnreadableImage`."""
        if isinstance(image, ImageWithDigest | UnreadableImage):  # it was here before
            return image
        if not isinstance(image, Image.Image):
            kind = type(image).__name__
            return UnreadableImage(f"it is of the type {kind}, and no picture of Pillow (PIL)")
        if id(image) not in converted_by_id:
            converted_by_id[id(image)] = _upright_or_unreadable(image)
        return converted_by_id[id(image)]

    new_rows = []
    for row in rows:
        new_row = dict(row)
        images = row.get("images")
        if isinstance(images, list | tuple):
            new_row["images"] = [convert(image) for image in images]
        elif images is not None:
            kind = type(images).__name__
            new_row["images"] = [UnreadableImage(f"'images' is of the type {kind}, and no list")]
        if row.get("image") is not None:
            new_row["image"] = convert(row["image"])
        new_rows.append(new_row)
    return new_rows


def _upright_or_unreadable(image: Image.Image) -> Any:
    """Return an image upright, in RGB, on white; an `UnreadableImage` where no model could see it.

    Such an image cannot be decoded, or is too narrow: the processor would end the run in the middle
    of a step, without the row's name.
    """
    try:
        refuse_narrow(image)
        return as_image_with_digest(upright_rgb_copy(image))
    except UnreadableImageError as error:
        return UnreadableImage(str(error))


# the column with the number of a row in the data set, where rows are numbered
ROW_NUMBER_COLUMN = "adora_row"


class DistinctRows(Dataset[dict[str, Any]]):
    """A dataset that decodes each distinct row of a batch once; its copies share the images.

    TRL's sampler repeats the rows of a generation for each of its micro-batches. So the rows of the
    last batch are stored, and returned again if the next batch asks for them. With
    `dataloader_num_workers` each worker process has a copy of this object, and decodes for itself.
    `read_ahead` is called on another thread (by `ImagePrefetch`), everything else on the thread of
    the data loader.
    """

    def __init__(self, rows: Any, *, numbered: bool = False, share: bool = True) -> None:
        """Wrap a data set; no row is read yet.

        Args:
            rows: the data set.
            numbered: whether each row gets its number, in the column `ROW_NUMBER_COLUMN`.
            share: whether copies of a row are read once; else each is read, as stock TRL does.
        """
        self._rows = rows
        self._numbered = numbered
        self.share = share  # whether copies of a row are read once
        self._last_batch: dict[int, dict[str, Any]] = {}  # its distinct rows, by index
        self._ahead_rows: dict[int, dict[str, Any]] = {}  # rows of a batch to come, by index

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a whole batch; torch's loader calls it with their indices."""
        if not self.share:
            return [self._read(index) for index in indices]
        batch: dict[int, dict[str, Any]] = {}
        for index in dict.fromkeys(indices):
            row = self._last_batch.get(index) or self._ahead_rows.pop(index, None)
            batch[index] = row or self._read(index)
        self._last_batch = batch
        # Copies, since the trainer writes into rows.
        return [dict(batch[index]) for index in indices]

    @property
    def latest_indices(self) -> list[int]:
        """The distinct indices of the last batch."""
        return list(self._last_batch)

    def read_ahead(self, index: int) -> dict[str, Any]:
        """Return a row of a batch to come, and store it until that batch asks for it.

        Raises what reading the row raises.
        """
        row = self._last_batch.get(index, self._ahead_rows.get(index))
        if row is None:
            row = self._read(index)
            self._ahead_rows[index] = row
        return row

    def rows_after(
        self, sampler: EpochRepeatSampler, row_numbers: Sequence[int], generations: int
    ) -> list[Any]:
        """Return the rows that come some generations later, in the same positions as present rows.

        Args:
            sampler: the loader's sampler.
            row_numbers: the numbers of the present rows in the data set. A row may come several
                times.
            generations: how many generations later.

        Returns:
            A row for each of `row_numbers`; an empty list where the later rows are not known.
        """
        distinct_numbers = list(dict.fromkeys(row_numbers))
        later_numbers = sampler.following(distinct_numbers, sampler.epoch, generations)
        if not later_numbers:
            return []
        later_by_number = dict(zip(distinct_numbers, later_numbers, strict=True))
        read_row = self.read_ahead if self.share else self._read
        # A copy for each, since a row that comes several times is read once.
        return [dict(read_row(later_by_number[number])) for number in row_numbers]

    def drop_ahead_rows(self, keep: Collection[int]) -> None:
        """Drop rows that were read ahead for a batch, except those with the indices `keep`."""
        self._ahead_rows = {index: row for index, row in self._ahead_rows.items() if index in keep}

    def _read(self, index: int) -> dict[str, Any]:
        """Return one row of the data set, with its number in a column where rows are numbered."""
        row: dict[str, Any] = with_upright_rgb_images([self._rows[index]])[0]
        return {**row, ROW_NUMBER_COLUMN: index} if self._numbered else row


# Processes the images of a row into the cache, and returns how many bytes they have there.
ProcessImages = Callable[[dict[str, Any]], int]


class NoPrefetch:
    """The interface of a prefetch, which reads nothing ahead."""

    def start(self) -> None:
        """Start reading ahead, when a generation is complete and about to be learned from."""

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
        self,
        rows: DistinctRows,
        sampler: EpochRepeatSampler,
        process_images: ProcessImages,
        limit_bytes: int,
    ) -> None:
        """Prepare a prefetch, without starting its thread.

        Args:
            rows: the data set that the loader reads.
            sampler: the loader's sampler, which knows the rows of the next generation.
            process_images: processes the images of a row into the cache, and returns how many bytes
                they have there.
            limit_bytes: how many bytes are processed. With more, the cache would drop some before
                their use.
        """
        self._rows = rows
        self._sampler = sampler
        self._process_images = process_images
        self._limit_bytes = limit_bytes
        self._thread: threading.Thread | None = None
        self._should_stop = threading.Event()

    def start(self) -> None:
        """Begin to process the images of the loader's last batch and of the batch after it.

        The last batch may be one that the policy does not learn from yet. Then its rows are read,
        and its images are not processed yet.
        """
        self.finish()
        latest_indices = self._rows.latest_indices
        next_indices = self._sampler.following(latest_indices, self._sampler.epoch)
        indices = list(dict.fromkeys([*latest_indices, *next_indices]))
        # Rows that were read ahead for another batch would stay in memory.
        self._rows.drop_ahead_rows(keep=indices)
        self._should_stop.clear()
        self._thread = threading.Thread(target=self._work, args=(indices,), name="prefetch")
        self._thread.start()

    def finish(self) -> None:
        """Stop after the row that is being processed, and wait for it."""
        if self._thread is not None:
            self._should_stop.set()
            self._thread.join()
            self._thread = None

    def _work(self, indices: list[int]) -> None:
        """Read the rows with these indices and process their images, on the thread."""
        processed_bytes = 0
        for index in indices:
            # The interpreter waits for this thread when it ends.
            interpreter_ends = not threading.main_thread().is_alive()
            is_full = processed_bytes > self._limit_bytes
            if self._should_stop.is_set() or interpreter_ends or is_full:
                return
            with suppress(Exception):  # raised again where the loader reads the row
                processed_bytes += self._process_images(self._rows.read_ahead(index))


class EpochRepeatSampler(RepeatSampler):  # type: ignore[misc]  # TRL is untyped to mypy
    """Seeds the generator for each epoch from (seed, epoch); epoch 0 has the same order as in TRL.

    Stock TRL draws the orders of all epochs from one generator, so a resumed run repeats the order
    of the first epoch. Without `shuffle` it begins every epoch at the first row. Then the rows at
    the end that fill no generation are never learned from. This sampler goes on after the last row
    of the epoch before.
    """

    epoch = 0  # the present one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # by epoch, for the last epochs that `following` was called for
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def from_sampler(cls, sampler: RepeatSampler, seed: int) -> EpochRepeatSampler:
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
        """Return the numbers of the rows that come in the same positions of a later generation.

        For example, 10 rows without shuffling make generations of 4 rows: 0 to 3 and 4 to 7 in
        epoch 0, and 8, 9, 0, 1 and 2 to 5 in epoch 1. One generation after the rows 1 and 2 come 5
        and 6; after 5 and 6 come 9 and 0. No random state and no position of a loader is used or
        changed.

        Args:
            rows: the numbers of the distinct rows of one process in one generation.
            epoch: the epoch of the generation.
            generations: how many generations later.

        Returns:
            A row for each of `rows`; an empty list where these are not all of one generation.
        """
        order = self._order(epoch)
        generation_size = self.batch_size  # distinct rows of a generation, on all processes
        try:
            generation_start = order.index(rows[0]) // generation_size * generation_size
            generation_end = generation_start + generation_size
            indices = [order.index(row, generation_start, generation_end) for row in rows]
        except (IndexError, ValueError):
            return []
        later_start = generation_start + generations * generation_size
        epochs_later, start_in_epoch = divmod(later_start, len(order))
        later_order = self._order(epoch + epochs_later)
        offset = start_in_epoch - generation_start
        return [later_order[index + offset] for index in indices]

    def _order(self, epoch: int) -> list[int]:
        """Return the numbers of the distinct rows of an epoch in their order.

        Rows at the end that fill no generation are left out.
        """
        if epoch not in self._orders:
            # A sampler that gives each row once.
            without_repeats = type(self)(
                data_source=self.data_source,
                mini_repeat_count=1,
                batch_size=self.batch_size,
                repeat_count=1,
                shuffle=self.shuffle,
                seed=self.seed,
            )
            without_repeats.set_epoch(epoch)
            # Besides this epoch only the one before is still needed.
            self._orders = {
                number: order for number, order in self._orders.items() if number == epoch - 1
            }
            self._orders[epoch] = list(without_repeats)
        return self._orders[epoch]

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the epoch's rows, each as often as TRL's sampler repeats it."""
        if self.shuffle:
            self.generator = torch.Generator()
            # A large prime, so that the epochs of runs with neighbouring seeds have other orders.
            self.generator.manual_seed((self.seed or 0) + 1_000_003 * self.epoch)
            return iter(super().__iter__())
        row_count = self.num_samples
        # Rows at the end that fill no generation are left to the next epoch.
        generations_per_epoch = row_count // self.batch_size
        first_row = self.epoch * generations_per_epoch * self.batch_size
        # TRL's order begins at row 0 in every epoch, so it is moved to the first row of this one.
        return ((first_row + row) % row_count for row in super().__iter__())
