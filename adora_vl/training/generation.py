"""One generation of a run, from the rows to the micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from adora_vl.rollout.rollouts import Rollout
from adora_vl.training.advantages import Advantages
from adora_vl.training.scoring import Scores
from adora_vl.types import Batch, Row


@dataclass
class Generation:
    """One batch of this rank: B rows in groups of G. N: the rows of all ranks, P x G."""

    rows: list[Row]  # (B,)
    mode: Literal["train", "eval"]
    step: int  # optimizer steps made before it
    key: str  # that step and the micro-batch in it, "12/0": seeds whatever is drawn for it
    attempt: int  # 0, or which round of further problems
    group_size: int  # G
    number: int = 0  # of the generations of a training, where rollouts may be older
    first_micro_step: int = 0  # TRL's `_step` where it begins
    rollouts: list[Rollout] = field(default_factory=list)  # (B,)
    scores: Scores | None = None
    batch: Batch = field(default_factory=Batch)
    advantages: Advantages | None = None
    micro_batches: list[Batch] = field(default_factory=list)  # an empty one has no work

    @classmethod
    def restored(cls, first_micro_step: int, micro_batches: list[Batch]) -> Generation:
        """A generation that a checkpoint was written within.

        It has nothing but its micro-batches.
        """
        return cls([], "train", 0, "", 0, 0, 0, first_micro_step, micro_batches=micro_batches)

    def release(self) -> None:
        """Let go of all but the micro-batches, which are copies: the policy learns from nothing
        else.
        """
        self.rows = []
        self.rollouts = []
        self.batch = Batch()
        self.scores = None
        self.advantages = None

    @property
    def where(self) -> str:
        """Names this batch among all of a run; a resumed run arrives at the same name."""
        return f"{self.mode}/{self.key}{f'/{self.attempt}' if self.attempt else ''}"

    @property
    def micro(self) -> int:
        """The micro-batch of the optimizer step before which it is sampled."""
        return int(self.key.split("/")[1])

    def of_rank(self, values_N: Tensor, rank: int) -> Tensor:
        """This rank's part of a value per rollout of all ranks, (B,)."""
        return values_N[rank * len(self.rows) : (rank + 1) * len(self.rows)]
