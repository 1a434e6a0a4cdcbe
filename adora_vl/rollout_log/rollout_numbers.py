"""Which rollout of the step a row of a micro-batch is, for what is known of it only after the policy's pass."""

from __future__ import annotations

import torch
from torch import Tensor


class RolloutNumbers:
    """A rank's rollouts of the present optimizer step, counted up over its generations, known by the same number on
    every rank.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self._drift: list[float] = []
        self._of_others: list[tuple[int, float]] = []

    def numbers(self, rows: int, device: torch.device) -> Tensor:
        """The numbers of the next `rows` rollouts, (rows,)."""
        first = len(self._drift)
        self._drift += [torch.nan] * rows
        return torch.arange(first, first + rows, device=device) * self._ranks + self._rank

    def measured(self, numbers_B: Tensor, drift_B: Tensor) -> None:
        """The drift of these rollouts, of whichever rank, in nats a token."""
        for number, drift in zip(numbers_B.tolist(), drift_B.tolist(), strict=True):
            if number % self._ranks == self._rank:
                self._drift[number // self._ranks] = drift
            else:
                self._of_others.append((number, drift))

    def take_of_others(self) -> list[tuple[int, float]]:
        """Numbers and drift of other ranks' rollouts that were measured here since the last call."""
        taken, self._of_others = self._of_others, []
        return taken

    def heard(self, found: list[tuple[int, float]]) -> None:
        """What all ranks measured for others; those that are this rank's are kept."""
        for number, drift in found:
            if number % self._ranks == self._rank:
                self._drift[number // self._ranks] = drift

    def take(self) -> list[float]:
        """The drift of all rollouts since the last call, NaN where it was not measured in the policy's pass."""
        taken, self._drift = self._drift, []
        return taken
