"""ADORA (arXiv 2602.10019): weighs each group by how much can be learned from it at this step.

The criteria call a group temporarily advantageous (TAS) or temporarily disadvantageous (TDS).
Attenuation lowers the weight of TDS groups, amplification raises that of TAS groups.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from adora_vl.advantage.groups import Groups, Schedule, scheduled
from adora_vl.advantage.method import Method, RunKeys, option

if TYPE_CHECKING:
    from adora_vl.advantage.methods import AdvantagePipeline


@dataclass(frozen=True)
class AdoraWeighting:
    """The weights of one batch and the reasons for them.

    A group without a correct rollout may be neither TDS nor TAS.
    """

    weights_P: Tensor
    """The weight of each group, float32."""
    tds_P: Tensor
    """Whether a group is temporarily disadvantageous, bool."""
    tas_P: Tensor
    """Whether a group is temporarily advantageous, bool."""
    groups: Groups
    """The groups that were weighed."""
    ties_P: Tensor
    """Whether a group is TDS and fails a criterion of length or work by an equal measure, bool."""
    rate: float = 1.0
    """The factor of the learning rate for this batch."""


@dataclass(frozen=True)
class Adora(Method):
    """ADORA's weighting as a method.

    Raises `ValueError` for an unknown word, or a factor on the wrong side of 1.
    """

    source = "arXiv 2602.10019"

    mode: Literal["attenuation", "amplification", "off"] = option(
        "attenuation",
        "attenuation (TDS prompts x factor), amplification (TAS prompts x factor) or off (no "
        "weights).",
    )
    factor: Schedule | float = option(
        0.1, "The weight that the mode gives; the reference attenuates by 0.1."
    )
    criteria: tuple[Literal["length", "difficulty", "working"], ...] = option(
        ("length",),
        "Criteria of an advantageous prompt; working compares true and new claims on the figure, "
        "as the reward steps counts them, where length compares lengths.",
    )
    combine: Literal["any", "all"] = option("any", "A prompt is TAS if any or all criteria hold.")
    tau: Schedule | float = option(
        0.5, "The highest pass rate at which the difficulty criterion holds (Eq. 6)."
    )
    empty_wrong: Literal["attenuate", "keep"] = option(
        "attenuate",
        "Length and working criterion without an untruncated wrong rollout: attenuate (VLM "
        "reference) or keep.",
    )
    ties: Literal["attenuate", "keep"] = option(
        "attenuate",
        "Length and working criterion where right and wrong measure the same: attenuate (as the "
        "references) or keep.",
    )
    no_figure: Literal["length", "keep"] = option(
        "length",
        "Working criterion where a problem has no figure: length (its groups are compared by "
        "length) or keep (the criterion says nothing of them).",
    )
    no_correct: Literal["keep", "attenuate"] = option(
        "keep",
        "Groups without a correct rollout that meet no criterion, whose rewards can still differ: "
        "keep (VLM reference) or attenuate (LLM reference).",
    )
    needs_correct: bool = option(
        False,
        "The difficulty criterion does not hold at a pass rate of 0; the paper's holds there.",
    )
    steps: tuple[int, int] | None = option(
        None, "[first, end): the only steps in which it is on; null: all."
    )
    assign: Literal["criterion", "random", "reversed", "rate"] = option(
        "criterion", "Which groups get the weights; all but criterion are controls."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.criteria:
            raise ValueError(
                "criteria: [] is empty; name one or more of length, difficulty, working"
            )
        # A schedule stays between its first and its last value.
        low, high = sorted(scheduled(self.factor).values)
        if self.mode == "attenuation" and not 0 < low <= high <= 1:
            wrong = high if high > 1 else low
            raise ValueError(
                f"factor: {wrong:g} must be above 0 and at most 1 with mode: attenuation"
            )
        if self.mode == "amplification" and low < 1:
            raise ValueError(f"factor: {low:g} must be at least 1 with mode: amplification")
        lowest, highest = sorted(scheduled(self.tau).values)
        if not 0 < lowest <= highest <= 1:
            raise ValueError(f"tau: {lowest} to {highest} must be above 0 and at most 1")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise ValueError(
                f"steps: {list(self.steps)} must be a half-open range [first, end] with 0 <= "
                "first < end"
            )

    def is_on(self, step: int) -> bool:
        """Return whether groups get other weights than 1 in a step, counted from 0."""
        if self.mode == "off":
            return False
        if self.steps is None:
            return True
        first_step, end_step = self.steps
        return first_step <= step < end_step

    @property
    def plain(self) -> bool:
        return self.mode == "off" or set(scheduled(self.factor).values) == {1.0}

    def assign_weights(
        self, weighting: AdoraWeighting, signal_P: Tensor, *, seed: int, step: int
    ) -> AdoraWeighting:
        """Return the weighting with the weights that `assign` says; the criteria are not changed.

        - `criterion` leaves the weights as they are.
        - `random` shuffles the weights among the groups with signal, so that as many groups are
          attenuated as by the criteria. Seed and step alone decide the order, so that all ranks
          shuffle alike.
        - `reversed` gives the factor to the opposite side: to TAS groups under attenuation, to TDS
          groups under amplification.
        - `rate` gives every group the weight 1, and multiplies the learning rate by the mean of the
          weights that the criteria give to groups with signal.

        Args:
            weighting: the weights by the criteria.
            signal_P: which groups of all ranks have signal, bool.
            seed: that of the run.
            step: the optimizer step, counted from 0.
        """
        weights_P = weighting.weights_P
        if self.assign == "criterion" or not self.is_on(step):
            return weighting
        if self.assign == "reversed":
            reweighted_P = weighting.tas_P if self.mode == "attenuation" else weighting.tds_P
            factor = scheduled(self.factor).at(step)
            reversed_P = torch.where(reweighted_P, factor, torch.ones_like(weights_P))
            return replace(weighting, weights_P=reversed_P)
        if self.assign == "random":
            digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
            step_seed = int.from_bytes(digest[:8], "big") >> 1  # below 2^63, as torch wants it
            generator = torch.Generator().manual_seed(step_seed)
            signal_weights = weights_P[signal_P]
            order = torch.randperm(len(signal_weights), generator=generator)
            shuffled_P = weights_P.clone()
            shuffled_P[signal_P] = signal_weights[order.to(signal_weights.device)]
            return replace(weighting, weights_P=shuffled_P)
        rate = 1.0
        if bool(signal_P.any()):
            rate = weights_P[signal_P].mean().item()
        return replace(weighting, weights_P=torch.ones_like(weights_P), rate=rate)

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        assert run.weighting is not None
        return advantages_PG * run.weighting.weights_P[:, None]

    def check(self, keys: RunKeys) -> None:
        """Raise `ValueError` where `assign: rate` cannot scale the learning rate.

        It needs optimizer steps that belong to one generation each.
        """
        if self.assign != "rate":
            return
        accumulated = keys.gradient_accumulation_steps
        micro_batches = keys.steps_per_generation * keys.num_iterations  # of one generation
        if micro_batches % accumulated:
            raise ValueError(
                f"steps_per_generation: {keys.steps_per_generation} with assign: rate, which "
                "needs optimizer steps of one generation each; make steps_per_generation x "
                f"num_iterations a multiple of gradient_accumulation_steps: {accumulated}"
            )
        if keys.deepspeed is not None or getattr(keys, "deepspeed_plugin", None) is not None:
            raise ValueError(
                "assign: rate does not work with DeepSpeed, which takes its optimizer step before "
                "its learning rate can be scaled; train without DeepSpeed"
            )


def weigh_groups(groups: Groups, options: Adora | None = None, step: int = 0) -> AdoraWeighting:
    """Return the weights of the group-normalised advantages of each prompt, and why.

    A group is temporarily advantageous to learn from (TAS) if it is judged and its criteria hold,
    and temporarily disadvantageous (TDS) if it is judged and they do not. With
    `no_correct: keep`, a group without a correct rollout is not TDS.

    Args:
        groups: whole groups. A rollout is correct if its reward is above `groups.correct_above`;
            NaN marks a rollout that was not scored.
        options: None is the reference's attenuation by length.
        step: the number of optimizer steps so far, for options that change during training.

    Raises `ValueError` if rewards and lengths are not both (P, G), or if work is a criterion and was
    not measured.
    """
    options = Adora() if options is None else options
    rewards_PG = groups.rewards_PG
    lengths_PG = groups.lengths_PG
    if rewards_PG.ndim != 2 or rewards_PG.shape != lengths_PG.shape:
        raise ValueError(
            f"rewards {tuple(rewards_PG.shape)} and lengths {tuple(lengths_PG.shape)} must both "
            "be (P, G)"
        )
    if "working" in options.criteria and groups.work_PG is None:
        raise ValueError("criteria: working needs the work of each rollout, which is not measured")
    verdicts = [_verdict_of_criterion(groups, options, name, step) for name in options.criteria]
    # (criteria, P)
    holds_KP = torch.stack([verdict.holds_P for verdict in verdicts])
    applies_KP = torch.stack([verdict.applies_P for verdict in verdicts])
    is_judged_P = applies_KP.any(dim=0)
    if options.combine == "any":
        tas_P = (holds_KP & applies_KP).any(dim=0)
    else:  # all of those that say anything
        tas_P = (holds_KP | ~applies_KP).all(dim=0) & is_judged_P
    # A group of which no criterion says anything keeps its weight.
    tds_P = ~tas_P & is_judged_P
    if options.no_correct == "keep":
        tds_P = tds_P & groups.correct_PG.any(dim=1)
    reweighted_P = tds_P if options.mode == "attenuation" else tas_P
    ones_P = torch.ones(len(rewards_PG), dtype=torch.float32, device=rewards_PG.device)
    weights_P = ones_P
    if options.is_on(step):
        weights_P = torch.where(reweighted_P, scheduled(options.factor).at(step), ones_P)
    tied_P = torch.stack([verdict.tied_P for verdict in verdicts]).any(dim=0)
    ties_P = tds_P & tied_P
    return AdoraWeighting(
        weights_P=weights_P, tds_P=tds_P, tas_P=tas_P, groups=groups, ties_P=ties_P
    )


@dataclass(frozen=True)
class _CriterionVerdict:
    """What one criterion says of each group, (P,) each, bool."""

    holds_P: Tensor
    """Whether the group is advantageous by this criterion."""
    applies_P: Tensor
    """Whether the criterion says anything of the group."""
    tied_P: Tensor
    """Whether it compares two equal measures."""


def _verdict_of_criterion(
    groups: Groups, options: Adora, criterion: str, step: int
) -> _CriterionVerdict:
    """Return what a criterion says of each group at a step.

    `criterion`: a word of the option `criteria`.
    """
    all_groups_P = torch.ones_like(groups.scored_PG[:, 0])
    if criterion == "difficulty":
        # Paper, Eq. 6, includes a pass rate of 0. `needs_correct` excludes it, so that TAS means
        # hard now, but solvable. A group without a scored rollout has no pass rate, so it is not
        # TAS.
        required_PG = groups.correct_PG if options.needs_correct else groups.scored_PG
        is_hard_P = groups.pass_rate_P <= scheduled(options.tau).at(step)
        return _CriterionVerdict(
            holds_P=required_PG.any(dim=1) & is_hard_P,
            applies_P=all_groups_P,
            tied_P=torch.zeros_like(all_groups_P),
        )
    by_length = _compare_by_measure(groups, options, groups.lengths_PG, all_groups_P)
    if criterion == "length":
        return by_length
    assert groups.work_PG is not None, "weigh_groups has looked"
    # The paper's inequality with another measure: work that is true and new in place of length.
    by_work = _compare_by_measure(groups, options, groups.work_PG, groups.has_work_P)
    if options.no_figure == "keep":
        return by_work
    return _CriterionVerdict(
        holds_P=torch.where(groups.has_work_P, by_work.holds_P, by_length.holds_P),
        applies_P=all_groups_P,
        tied_P=torch.where(groups.has_work_P, by_work.tied_P, by_length.tied_P),
    )


def _compare_by_measure(
    groups: Groups, options: Adora, measure_PG: Tensor, applies_P: Tensor
) -> _CriterionVerdict:
    """Return whether the largest measure of a correct rollout is above the mean of the wrong ones.

    Without an untruncated wrong rollout there is no mean to compare with: the VLM reference takes
    it as +inf, so the group is TDS, the LLM reference as -inf, so it is TAS.

    Args:
        groups: whole groups.
        options: what decides ties, and groups without an untruncated wrong rollout.
        measure_PG: what is compared: the lengths of rollouts, or their work.
        applies_P: the groups that have such a measure.
    """
    missing_mean = torch.inf if options.empty_wrong == "attenuate" else -torch.inf
    has_finished_wrong_P = groups.finished_wrong_PG.any(dim=1)
    mean_wrong_P = torch.where(
        has_finished_wrong_P, groups.mean_of_finished_wrong_P(measure_PG), missing_mean
    )
    is_above_P = groups.largest_correct_P(measure_PG) > mean_wrong_P
    tied_P = groups.ties_P(measure_PG)
    holds_P = is_above_P | tied_P if options.ties == "keep" else is_above_P
    return _CriterionVerdict(holds_P=holds_P, applies_P=applies_P, tied_P=tied_P)
