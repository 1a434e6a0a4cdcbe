"""Numbers that identify the rollouts of a step, for figures that are only known after the policy's forward pass."""

from __future__ import annotations

import torch
from torch import Tensor


class RolloutNumbers:
    """Numbers the rollouts of a rank in the current optimizer step, counting over its generations. Every rank knows a
    rollout by the same number.
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
        """Note the drift of these rollouts, of any rank, in nats per token."""
        for number, drift in zip(numbers_B.tolist(), drift_B.tolist(), strict=True):
            if number % self._ranks == self._rank:
                self._drift[number // self._ranks] = drift
            else:
                self._of_others.append((number, drift))

    def take_of_others(self) -> list[tuple[int, float]]:
        """Numbers and drift of the other ranks' rollouts that this rank has measured since the last call."""
        taken, self._of_others = self._of_others, []
        return taken

    def heard(self, found: list[tuple[int, float]]) -> None:
        """Take what all ranks have measured for others, and keep what concerns this rank."""
        for number, drift in found:
            if number % self._ranks == self._rank:
                self._drift[number // self._ranks] = drift

    def take(self) -> list[float]:
        """The drift of all rollouts since the last call; NaN where the policy's forward pass did not measure it."""
        taken, self._drift = self._drift, []
        return taken
