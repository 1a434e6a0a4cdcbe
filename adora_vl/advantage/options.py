"""The options of each method. No two methods share an option name, so one block can hold the options of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adora_vl.advantage.adora import COMBINATIONS, CRITERIA, EMPTY_WRONG, MODES, NO_CORRECT
from adora_vl.advantage.assignment import ASSIGNMENTS
from adora_vl.advantage.daro import MEASURES
from adora_vl.advantage.mc_grpo import CENTRES, SPREADS
from adora_vl.advantage.schedule import Schedule, within


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that is fully described by keys of TRL."""


@dataclass(frozen=True)
class AdoraOptions:
    """ADORA's options. Those that are not given take the values of the `adora_*` keys.

    `steps` is a half-open range of steps, [first, end): ADORA is on in these steps only. None means all steps. `assign`
    says which groups get the weights; all but `criterion` are controls.
    """

    mode: str = "attenuation"
    factor: Schedule = field(default_factory=lambda: Schedule(0.1))
    criteria: tuple[str, ...] = ("length",)
    combine: str = "any"
    tau: Schedule = field(default_factory=lambda: Schedule(0.5))
    empty_wrong: str = "attenuate"
    no_correct: str = "keep"
    difficulty_needs_correct: bool = False
    steps: tuple[int, int] | None = None
    assign: str = "criterion"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("combine", self.combine, COMBINATIONS)
        _one_of("empty_wrong", self.empty_wrong, EMPTY_WRONG)
        _one_of("no_correct", self.no_correct, NO_CORRECT)
        _one_of("assign", self.assign, ASSIGNMENTS)
        for name in self.criteria:
            _one_of("criteria", name, CRITERIA)
        low, high = min(self.factor.values), max(self.factor.values)
        if self.mode == "attenuation" and not 0 < low <= high <= 1:
            raise ValueError(f"factor: {low} to {high} must be above 0 and at most 1 with attenuation")
        if self.mode == "amplification" and low < 1:
            raise ValueError(f"factor: {low} must be at least 1 with amplification")
        if not 0 < min(self.tau.values) <= max(self.tau.values) <= 1:
            raise ValueError(f"tau: {min(self.tau.values)} to {max(self.tau.values)} must be above 0 and at most 1")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise ValueError(f"steps: {list(self.steps)} must be a half-open range [first, end] with 0 <= first < end")

    def weighing(self, step: int) -> dict[str, Any]:
        """The arguments of `weigh_groups` in this step."""
        on = within(step, self.steps)
        return {
            "mode": self.mode if on else "off",
            "factor": self.factor.at(step),
            "criteria": self.criteria,
            "combine": self.combine,
            "tau": self.tau.at(step),
            "empty_wrong": self.empty_wrong,
            "no_correct": self.no_correct,
            "difficulty_needs_correct": self.difficulty_needs_correct,
        }


@dataclass(frozen=True)
class McGrpoOptions:
    centre: str = "median"
    spread: str = "mad"
    exclude_pivot: bool = True

    def __post_init__(self) -> None:
        _one_of("centre", self.centre, CENTRES)
        _one_of("spread", self.spread, SPREADS)


@dataclass(frozen=True)
class NgrpoOptions:
    virtual: int = 1
    max_reward: float = 1.0

    def __post_init__(self) -> None:
        if self.virtual < 0:
            raise ValueError(f"virtual: {self.virtual} must be at least 0")


@dataclass(frozen=True)
class AGraeOptions:
    curriculum: bool = True
    alpha: float | None = 1.0

    def __post_init__(self) -> None:
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"alpha: {self.alpha} must be above 0, or null")


@dataclass(frozen=True)
class CanonOptions:
    """`measure` is length or entropy. Entropy is estimated by the mean of -log p over the sampled tokens."""

    measure: str = "entropy"
    inter: Schedule = field(default_factory=lambda: Schedule(1.0))

    def __post_init__(self) -> None:
        _one_of("measure", self.measure, ("length", "entropy"))
        if not 0 <= min(self.inter.values) <= max(self.inter.values) <= 1:
            raise ValueError(f"inter: {self.inter.values} must lie between 0 and 1")


@dataclass(frozen=True)
class D3sOptions:
    """The authors begin with few rollouts and keep more later. The default of 0.5 is ours."""

    keep: Schedule = field(default_factory=lambda: Schedule(0.5))
    across: str = "group"

    def __post_init__(self) -> None:
        _one_of("across", self.across, ("group", "batch"))
        if not 0 < min(self.keep.values) <= max(self.keep.values) <= 1:
            raise ValueError(f"keep: {self.keep.values} must be above 0 and at most 1")


@dataclass(frozen=True)
class SsbOptions:
    share: float = 1.0
    replay_alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.replay_alpha < 0:
            raise ValueError(f"share: {self.share} must be in 0 to 1, replay_alpha: {self.replay_alpha} at least 0")


@dataclass(frozen=True)
class RrbOptions:
    """`full_range`: the best reward minus the worst, 1 for our presets. The power is 1 in the paper; 0 is GRPO."""

    full_range: float = 1.0
    range_power: float = 1.0

    def __post_init__(self) -> None:
        if self.full_range <= 0 or self.range_power < 0:
            raise ValueError(
                f"full_range: {self.full_range} must be above 0, range_power: {self.range_power} at least 0"
            )


@dataclass(frozen=True)
class DapoOptions:
    """`overlong_cache`: over so many tokens before the length limit the reward falls by up to 1. None: it does not."""

    drop_constant: bool = True
    overlong_cache: int | None = None


@dataclass(frozen=True)
class DaroOptions:
    learning_rate: float = 0.05
    bin_loss: str = "magnitude"
    by_bin_tokens: bool = True
    drop_outside: bool = True
    floor: float = 1e-2

    def __post_init__(self) -> None:
        _one_of("bin_loss", self.bin_loss, MEASURES)
        if self.learning_rate < 0 or self.floor <= 0:
            raise ValueError(f"learning_rate: {self.learning_rate} must be at least 0 and floor: {self.floor} above 0")
