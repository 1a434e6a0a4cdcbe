"""One generation of a run, from the rows to the micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from adora_vl.rollout.rollouts import Rollout, StepKey
from adora_vl.training.advantages import Advantages
from adora_vl.training.scoring import Scores
from adora_vl.types import Batch, Row


@dataclass
class Generation:
    """One generation of this rank: B rows in groups of G. All ranks have N = P x G rows."""

    rows: list[Row]  # (B,)
    key: StepKey  # where in the run it is sampled
    group_size: int  # G
    # index among the generations of a training, where rollouts may be older than theirs
    number: int = 0
    first_micro_step: int = 0  # TRL's `_step` where it begins
    rollouts: list[Rollout] = field(default_factory=list)  # (B,)
    scores: Scores | None = None
    batch: Batch = field(default_factory=Batch)
    advantages: Advantages | None = None
    micro_batches: list[Batch] = field(default_factory=list)  # an empty one has no work

    @classmethod
    def restored(cls, first_micro_step: int, micro_batches: list[Batch]) -> Generation:
        """The rest of a generation that a checkpoint was written within.

        It has nothing but its micro-batches, and where they begin.
        """
        return cls(
            rows=[],
            key=StepKey(mode="train", step=0, micro=0),
            group_size=0,
            first_micro_step=first_micro_step,
            micro_batches=micro_batches,
        )

    def release(self) -> None:
        """Let go of all but the micro-batches, which are copies.

        The policy learns from nothing else, and images take much memory.
        """
        self.rows = []
        self.rollouts = []
        self.batch = Batch()
        self.scores = None
        self.advantages = None

    def attempt(self, number: int) -> Generation:
        """This generation at the round `number` of further problems."""
        return replace(self, key=replace(self.key, attempt=number))

    def of_rank(self, values_N: Tensor, rank: int) -> Tensor:
        """The part of rank `rank`, (B,), of values of all ranks' rollouts, (N,)."""
        return values_N[rank * len(self.rows) : (rank + 1) * len(self.rows)]
