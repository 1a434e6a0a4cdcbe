"""The methods by name, and the pipeline that applies the methods of a run in their order."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adora_vl.advantage.adora import Adora, AdoraWeighting, weigh_groups
from adora_vl.advantage.daro import Daro, DaroWeights
from adora_vl.advantage.groups import Groups
from adora_vl.advantage.grpo import Dapo, DrGrpo, Grpo
from adora_vl.advantage.method import Method

METHODS: Mapping[str, type[Method]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "adora": Adora,
    "daro": Daro,
}


class AdvantagePipeline:
    """Applies the methods of a run in order (GRPO, DAPO, ADORA, ...), and keeps their state.

    A generation has P groups of G rollouts.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        scale: str = "group",
        max_length: int = 0,
        sums_rewards: bool = True,
        seed: int = 0,
    ) -> None:
        """Store the methods of a run and the settings that they read.

        Args:
            methods: the methods of the run by name, in order.
            scale: TRL's `scale_rewards`.
            max_length: TRL's `max_completion_length`.
            sums_rewards: whether the advantages come from the sum of the rewards, so that a group
                of equal sums gets 0.
            seed: the seed of the run, for methods that draw at random.
        """
        self.methods = dict(methods)
        adora = self.methods.get("adora")
        # The verdicts of ADORA's criteria are logged even if ADORA is not among the methods.
        self.adora_options = adora if isinstance(adora, Adora) else Adora(mode="off")
        self.scale = scale
        self.max_length = max_length
        self.sums_rewards = sums_rewards
        self.seed = seed
        # `compute_advantages` sets these three.
        self.learning_rate_factor = 1.0  # of the generation's optimizer steps
        self.metrics: dict[str, float] = {}  # to log, by name
        self.weighting: AdoraWeighting | None = None
        # DARO's weights are created at its first batch, from the state of the checkpoint if there
        # is one.
        self._daro_weights: DaroWeights | None = None
        self._saved_daro_state: dict[str, Any] | None = None

    @property
    def compares_net_claims(self) -> bool:
        """Whether ADORA compares the true and new claims of rollouts."""
        return "working" in self.adora_options.criteria

    @property
    def keeps_trl_advantages(self) -> bool:
        """Whether no method changes TRL's advantages, which then stay the same to the bit."""
        return all(method.keeps_trl_advantages for method in self.methods.values())

    def weigh(self, groups: Groups) -> AdoraWeighting:
        """Return ADORA's weight of each group and the verdicts that it follows from.

        All weights are 1 without ADORA among the methods.
        """
        weighting = weigh_groups(groups, self.adora_options, groups.step)
        return self.adora_options.assign_weights(
            weighting,
            has_signal_P=self.groups_with_signal(groups),
            seed=self.seed,
            step=groups.step,
        )

    def groups_with_signal(self, groups: Groups) -> Tensor:
        """Return which groups get an advantage other than 0, so that they can be learned from.

        The answer for a group does not depend on the rest of the batch. So groups can be selected
        by it before they are weighed. The call changes no state. Returns a bool tensor, (P,).
        """
        # Equal rewards give equal advantages, which are 0.
        has_signal_P = groups.rewards_differ_P
        for method in self.methods.values():
            has_signal_P = method.groups_with_signal(groups, has_signal_P, self)
        return has_signal_P & groups.has_reward_PG.any(dim=1)

    def compute_advantages(
        self, groups: Groups, trl_advantages_PG: Tensor, weighting: AdoraWeighting
    ) -> Tensor:
        """Turn TRL's advantages of whole groups into the advantages to learn from, both (P, G).

        Call it once in a generation, with exactly the groups that are learned from. Some methods
        weigh a group by the other groups, and DARO updates its weights at each call. The call also
        sets `weighting`, `learning_rate_factor` and `metrics`.

        Args:
            groups: the groups that are learned from.
            trl_advantages_PG: TRL's advantages.
            weighting: what `weigh` returns for the groups.
        """
        self.weighting = weighting
        self.learning_rate_factor = weighting.learning_rate_factor
        self.metrics = {}
        if self.adora_options.assign == "rate":
            self.metrics["rate_scale"] = self.learning_rate_factor
        # For example plain GRPO changes nothing. Its advantages are TRL's to the bit.
        if self.keeps_trl_advantages:
            return trl_advantages_PG
        # In a group of equal rewards the rounding of TRL's float32 mean leaves advantages of up to
        # 6e-4, which a method could scale up.
        advantages_PG = torch.where(groups.rewards_differ_P[:, None], trl_advantages_PG, 0.0)
        for method in self.methods.values():
            advantages_PG = method.apply(groups, advantages_PG, self)
        return advantages_PG

    def daro_weights(self, bin_count: int, options: Daro) -> DaroWeights:
        """Return DARO's learnable weights, one for each bin of prompts by pass rate.

        The first call creates them, and restores those of a checkpoint that `load` has read.
        """
        if self._daro_weights is None:
            self._daro_weights = DaroWeights(
                bin_count, learning_rate=options.learning_rate, min_loss=options.floor
            )
            if self._saved_daro_state is not None:
                self._daro_weights.load(self._saved_daro_state)
        return self._daro_weights

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves for a resumed run, as JSON can hold it.

        It is empty for methods without any state.
        """
        state: dict[str, Any] = {}
        # Before the first batch of a resumed run, DARO's state is still that of the checkpoint.
        daro_state = self._saved_daro_state
        if self._daro_weights is not None:
            daro_state = self._daro_weights.state()
        if daro_state is not None:
            state["daro"] = daro_state
        if self.adora_options.assign == "rate":
            state["rate"] = self.learning_rate_factor
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Call it before the first batch."""
        self._saved_daro_state = state.get("daro")
        self._daro_weights = None
        self.learning_rate_factor = float(state.get("rate", 1.0))
