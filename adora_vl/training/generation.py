"""One generation of a run, from the rows to the micro-batches, and where an experimental method may change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.training.advantages import Advantages
from adora_vl.training.scores import Scores
from adora_vl.types import Batch, Row


@dataclass
class Generation:
    """One batch of this rank: B rows in groups of G. N: the rows of all ranks, P x G."""

    rows: list[Row]  # (B,)
    mode: Literal["train", "eval"]
    step: int  # optimizer steps made before it
    key: str  # that step and the micro-batch in it, "12/0": seeds whatever is drawn for it
    attempt: int  # 0, or which further batch of dynamic sampling
    group_size: int  # G
    sampling: SamplingRequest
    first_micro_step: int = 0  # TRL's `_step` where it begins
    scores: Scores | None = None
    batch: Batch = field(default_factory=Batch)
    advantages: Advantages | None = None
    micro_batches: list[Batch] = field(default_factory=list)  # an empty one has no work

    @classmethod
    def restored(cls, first_micro_step: int, micro_batches: list[Batch]) -> Generation:
        """A generation that a checkpoint was written within. It has nothing but its micro-batches."""
        return cls([], "train", 0, "", 0, 0, SamplingRequest(), first_micro_step, micro_batches=micro_batches)

    def release(self) -> None:
        """Let go of all but the micro-batches, which are copies: the policy learns from nothing else."""
        self.rows, self.batch, self.scores, self.advantages = [], Batch(), None, None

    @property
    def where(self) -> str:
        """Names this batch among all of a run; a resumed run arrives at the same name."""
        return f"{self.mode}/{self.key}{f'/{self.attempt}' if self.attempt else ''}"

    def of_rank(self, values_N: Tensor, rank: int) -> Tensor:
        """This rank's part of a value per rollout of all ranks, (B,)."""
        return values_N[rank * len(self.rows) : (rank + 1) * len(self.rows)]


class Extension:
    """The hooks for partial rollouts and methods of `adora_vl.experimental`; these do nothing. All ranks call them in
    one order.
    """

    needs_old_logps = False  # whether each generation needs the log-probabilities of the policy that sampled it

    def before_sampling(self, generation: Generation) -> None:
        """The request is complete. `sampling.alter_images` may be set, and rows and `sampling.answers` replaced."""

    def before_weighing(self, generation: Generation) -> None:
        """A training batch is sampled, graded and refilled. Groups of it may be replaced, the last time."""

    def after_weighing(self, generation: Generation) -> None:
        """The advantages of a training batch are final, (B,). They may become (B, C)."""

    def on_exploded_ratio(self) -> None:
        """A step was skipped since the policy had moved too far from the one that sampled."""

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs into a checkpoint that is being written."""

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote; nothing where it wrote nothing."""
