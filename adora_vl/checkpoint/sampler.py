"""TRL's sampler, with an order that depends only on the epoch, not on how many epochs this process has run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler


class EpochRepeatSampler(RepeatSampler):  # type: ignore[misc]  # TRL is untyped to mypy
    """Stock TRL draws each epoch's order from one generator, so a resumed run repeats the first epoch's order.

    Here the generator is seeded for each epoch from (seed, epoch). Epoch 0 has the same order as in TRL.
    """

    epoch = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._orders: dict[int, list[int]] = {}  # of the epochs that `following` was asked about last

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochRepeatSampler:
        """A sampler with the same rows and repetitions as `sampler`."""
        return cls(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by `transformers.Trainer` before each epoch."""
        self.epoch = epoch

    def following(self, rows: Sequence[int], epoch: int) -> list[int]:
        """The rows that take the places of `rows` in the next generation, which may be the first of the next epoch.

        `rows`: one process's distinct rows of a generation of this epoch. No random state is used or changed, and no
        position of a loader. Empty where the rows are not of one generation of this epoch.
        """
        order, size = self._order(epoch), self.batch_size
        try:
            first = order.index(rows[0]) // size * size
            places = [order.index(row, first, first + size) - first for row in rows]
        except (IndexError, ValueError):
            return []
        after = order[first + size : first + 2 * size] or self._order(epoch + 1)[:size]
        return [after[place] for place in places]

    def _order(self, epoch: int) -> list[int]:
        """The distinct rows of an epoch in their order, whole generations only."""
        if epoch not in self._orders:
            once = type(self)(self.data_source, 1, self.batch_size, 1, self.shuffle, self.seed)
            once.set_epoch(epoch)
            self._orders = {near: order for near, order in self._orders.items() if near == epoch - 1}
            self._orders[epoch] = list(once)
        return self._orders[epoch]

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator = torch.Generator()
            self.generator.manual_seed((self.seed or 0) + 1_000_003 * self.epoch)
        return iter(super().__iter__())
