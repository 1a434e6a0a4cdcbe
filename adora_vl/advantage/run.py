"""The methods of one run, which are applied one after the other, and what they remember from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adora_vl.advantage.adora import AdoraWeighting, weigh_groups
from adora_vl.advantage.assignment import assign_weights
from adora_vl.advantage.daro import DaroWeights
from adora_vl.advantage.groups import Groups
from adora_vl.advantage.grpo import is_constant
from adora_vl.advantage.methods import METHODS
from adora_vl.advantage.options import AdoraOptions, DaroOptions


class MethodRun:
    """Applies the chosen methods in order. Holds what they remember over the run, and the figures of the last batch."""

    def __init__(
        self,
        chosen: Mapping[str, Any],
        *,
        scale: str = "group",
        max_length: int = 0,
        sums_rewards: bool = True,
        judged_by: AdoraOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Set up a run.

        Args:
            chosen: the options of each method, in order.
            scale: TRL's `scale_rewards`.
            max_length: TRL's `max_completion_length`.
            sums_rewards: whether a group of constant rewards has advantages of 0.
            judged_by: ADORA's options if it is not among the methods. Its figures are logged in any case.
            seed: the run's, for what a method leaves to chance.
        """
        self.chosen = dict(chosen)
        self.judged_by: AdoraOptions = self.chosen.get("adora", judged_by or AdoraOptions(mode="off"))
        self.scale = scale
        self.max_length = max_length
        self.sums_rewards = sums_rewards
        self.seed = seed
        self.rate = 1.0  # by which the learning rate of the present generation's optimizer steps is multiplied
        self.figures: dict[str, float] = {}
        self.weighting: AdoraWeighting | None = None  # of the last batch
        self._daro: DaroWeights | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether TRL's advantages stay unchanged, to the bit."""
        return all(METHODS[name].plain(options) for name, options in self.chosen.items())

    def judge(self, groups: Groups) -> AdoraWeighting:
        """ADORA's weights and their reasons. The weights are 1 if ADORA is not among the methods."""
        how, step = self.judged_by.weighing(groups.step), groups.step
        weighting = weigh_groups(
            groups.rewards_PG,
            groups.lengths_PG,
            truncated=groups.truncated_PG,
            correct_above=groups.correct_above,
            **how,
        )
        given = {"mode": how["mode"], "factor": how["factor"], "seed": self.seed, "step": step}
        return assign_weights(weighting, groups.rewards_PG, self.judged_by.assign, **given)

    def __call__(self, groups: Groups, advantages_PG: Tensor) -> Tensor:
        """Turn TRL's advantages of whole groups into the ones to learn from, both (P, G).

        Afterwards `weighting` holds the weights that were applied, and their reasons.
        """
        self.figures, self.weighting = {}, self.judge(groups)
        self.rate = self.weighting.rate
        if self.judged_by.assign == "rate":
            self.figures["rate_scale"] = self.rate
        if self.is_plain:
            return advantages_PG
        if self.sums_rewards:  # TRL's float32 mean leaves up to 6e-4 in a constant group
            advantages_PG = torch.where(is_constant(groups.rewards_PG)[:, None], 0.0, advantages_PG)
        for name, options in self.chosen.items():
            apply = METHODS[name].apply
            if apply is not None:
                advantages_PG = apply(groups, advantages_PG, options, self)
        return advantages_PG

    def daro_weights(self, bins: int, options: DaroOptions) -> DaroWeights:
        """DARO's learnable weights, which are created at the first batch."""
        if self._daro is None:
            self._daro = DaroWeights(bins, options.learning_rate, options.floor)
            if self._saved is not None:
                self._daro.load(self._saved)
        return self._daro

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, in a form that JSON can hold. Empty if no method remembers anything."""
        daro = {"daro": self._daro.state()} if self._daro is not None else {}
        return {**daro, **({"rate": self.rate} if self.judged_by.assign == "rate" else {})}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Call it before the first batch."""
        self._saved, self._daro = state.get("daro"), None
        self.rate = float(state.get("rate", 1.0))
