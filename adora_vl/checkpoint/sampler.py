"""TRL's sampler, with an order that depends only on the epoch, not on how many epochs this process has run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from trl.trainer.utils import RepeatSampler


class EpochRepeatSampler(RepeatSampler):  # type: ignore[misc]  # TRL is untyped to mypy
    """Stock TRL draws each epoch's order from one generator, so a resumed run repeats the first epoch's order.

    Here the generator is seeded for each epoch from (seed, epoch). Epoch 0 has the same order as in TRL.
    """

    epoch = 0

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

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator = torch.Generator()
            self.generator.manual_seed((self.seed or 0) + 1_000_003 * self.epoch)
        return iter(super().__iter__())
