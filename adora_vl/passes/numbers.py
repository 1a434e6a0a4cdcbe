"""Which rollout of the step a row of a micro-batch is, for what is known of it only after the policy's pass."""

from __future__ import annotations

import torch
from torch import Tensor


class RolloutNumbers:
    """This rank's rollouts of the present optimizer step, counted up over its generations."""

    def __init__(self) -> None:
        self._drift: list[float] = []

    def numbers(self, rows: int, device: torch.device) -> Tensor:
        """The numbers of the next `rows` rollouts, (rows,)."""
        first = len(self._drift)
        self._drift += [torch.nan] * rows
        return torch.arange(first, first + rows, device=device)

    def measured(self, numbers_B: Tensor, drift_B: Tensor) -> None:
        """The drift of these rollouts, in nats a token."""
        for number, drift in zip(numbers_B.tolist(), drift_B.tolist(), strict=True):
            self._drift[number] = drift

    def take(self) -> list[float]:
        """The drift of all rollouts since the last call, NaN where it was not measured in the policy's pass."""
        taken, self._drift = self._drift, []
        return taken
