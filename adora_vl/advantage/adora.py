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

from adora_vl.advantage.groups import Groups, Schedule, as_schedule
from adora_vl.advantage.method import Method, RunKeys, option

if TYPE_CHECKING:
    from adora_vl.advantage.methods import AdvantagePipeline


@dataclass(frozen=True)
class AdoraWeighting:
    """The weights of the P groups of one batch, and the verdicts that they follow from.

    A group may be neither TDS nor TAS: one without a correct rollout, or one to which no criterion
    applies.
    """

    weights_P: Tensor
    """The weight of each group, float32."""
    tds_P: Tensor
    """Whether a group is temporarily disadvantageous, bool."""
    tas_P: Tensor
    """Whether a group is temporarily advantageous, bool."""
    groups: Groups
    """The groups that were weighed."""
    tds_by_tie_P: Tensor
    """Whether a group is TDS, and its correct and wrong rollouts compare as equal, bool."""
    learning_rate_factor: float = 1.0
    """What the learning rate is multiplied with for this batch."""


@dataclass(frozen=True)
class Adora(Method):
    """ADORA's weighting of groups as a method, with its options.

    Attenuation lowers the weight of groups that are disadvantageous to learn from now (TDS),
    amplification raises the weight of advantageous ones (TAS). There are P groups of G rollouts.

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
        """Raise `ValueError` for options that contradict each other or lie outside of their bounds.

        `factor` and `tau` may be schedules, whose values are all checked.
        """
        super().__post_init__()
        if not self.criteria:
            raise ValueError(
                "criteria: [] is empty; name one or more of length, difficulty, working"
            )
        # A schedule stays between its first and its last value.
        lowest_factor, highest_factor = sorted(as_schedule(self.factor).values)
        if self.mode == "attenuation" and not 0 < lowest_factor <= highest_factor <= 1:
            refused_factor = highest_factor if highest_factor > 1 else lowest_factor
            raise ValueError(
                f"factor: {refused_factor:g} must be above 0 and at most 1 with mode: attenuation"
            )
        if self.mode == "amplification" and lowest_factor < 1:
            raise ValueError(
                f"factor: {lowest_factor:g} must be at least 1 with mode: amplification"
            )
        lowest_tau, highest_tau = sorted(as_schedule(self.tau).values)
        if not 0 < lowest_tau <= highest_tau <= 1:
            raise ValueError(f"tau: {lowest_tau} to {highest_tau} must be above 0 and at most 1")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise ValueError(
                f"steps: {list(self.steps)} must be a half-open range [first, end] with 0 <= "
                "first < end"
            )

    def idle_options(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if self.mode == "off":
            # The criteria still decide what the log says of each group.
            reasons |= dict.fromkeys(("factor", "steps", "assign"), "mode: off")
        if "difficulty" not in self.criteria:
            reasons |= dict.fromkeys(("tau", "needs_correct"), "criteria without difficulty")
        if "working" not in self.criteria:
            reasons["no_figure"] = "criteria without working"
        if not {"length", "working"} & {*self.criteria}:
            reasons |= dict.fromkeys(("empty_wrong", "ties"), "difficulty as the only criterion")
        if len(self.criteria) == 1:
            reasons["combine"] = "one criterion"
        return reasons

    def is_on(self, step: int) -> bool:
        """Return whether groups can get weights other than 1 at an optimizer step.

        `step` is counted from 0.
        """
        if self.mode == "off":
            return False
        if self.steps is None:
            return True
        first_step, end_step = self.steps
        return first_step <= step < end_step

    @property
    def keeps_trl_advantages(self) -> bool:
        is_factor_one = set(as_schedule(self.factor).values) == {1.0}
        return self.mode == "off" or is_factor_one

    def assign_weights(
        self, weighting: AdoraWeighting, has_signal_P: Tensor, *, seed: int, step: int
    ) -> AdoraWeighting:
        """Redistribute the weights among the groups, as the option `assign` says.

        ADORA itself is `criterion`, which leaves the weights as they are. The other values are
        controls for experiments: they show whether it matters which groups get the weights.

        - `random` shuffles the weights among the groups with signal, so that as many groups are
          attenuated as by the criteria.
        - `reversed` gives the factor to the other side: attenuation hits the advantageous groups
          (TAS), and amplification the disadvantageous ones (TDS).
        - `rate` gives every group the weight 1, and multiplies the learning rate by the mean of the
          weights that the criteria give to groups with signal.

        Args:
            weighting: the weights by the criteria. Its verdicts, TAS and TDS, stay as they are.
            has_signal_P: which groups of all ranks have signal, that is an advantage other than 0;
                bool.
            seed: that of the run.
            step: the optimizer step, counted from 0.
        """
        weights_P = weighting.weights_P
        if self.assign == "criterion" or not self.is_on(step):
            return weighting
        if self.assign == "reversed":
            gets_factor_P = weighting.tas_P if self.mode == "attenuation" else weighting.tds_P
            factor = as_schedule(self.factor).at(step)
            reversed_P = torch.where(gets_factor_P, factor, torch.ones_like(weights_P))
            return replace(weighting, weights_P=reversed_P)
        if self.assign == "random":
            shuffled_P = weights_P.clone()
            shuffled_P[has_signal_P] = _shuffle(weights_P[has_signal_P], seed=seed, step=step)
            return replace(weighting, weights_P=shuffled_P)
        # What remains is `rate`. Where no group has signal, nothing is learned anyway.
        learning_rate_factor = 1.0
        if bool(has_signal_P.any()):
            learning_rate_factor = weights_P[has_signal_P].mean().item()
        return replace(
            weighting,
            weights_P=torch.ones_like(weights_P),
            learning_rate_factor=learning_rate_factor,
        )

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        # The pipeline computes the weighting before it applies the methods.
        assert run.weighting is not None
        return advantages_PG * run.weighting.weights_P[:, None]

    def check(self, keys: RunKeys) -> None:
        """Raise `ValueError` where `assign: rate` cannot scale the learning rate.

        The factor is computed once in a generation (one sampling of rollouts). So no optimizer step
        may accumulate micro-batches of two generations.
        """
        if self.assign != "rate":
            return
        accumulation_steps = keys.gradient_accumulation_steps
        micro_batches_per_generation = keys.steps_per_generation * keys.num_iterations
        if micro_batches_per_generation % accumulation_steps != 0:
            raise ValueError(
                f"steps_per_generation: {keys.steps_per_generation} with assign: rate, which "
                "needs optimizer steps of one generation each; make steps_per_generation x "
                f"num_iterations a multiple of gradient_accumulation_steps: {accumulation_steps}"
            )


def _shuffle(weights: Tensor, *, seed: int, step: int) -> Tensor:
    """Return weights in a random order, which depends on the seed and the step alone.

    So all ranks shuffle alike, and the global random state is not touched.
    """
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    step_seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as torch wants it
    generator = torch.Generator().manual_seed(step_seed)
    order = torch.randperm(len(weights), generator=generator)
    return weights[order.to(weights.device)]


def weigh_groups(groups: Groups, options: Adora | None = None, step: int = 0) -> AdoraWeighting:
    """Compute the weight with which ADORA multiplies the advantages of each group, and the reasons.

    Each criterion holds for a group or not, or does not apply to it. A group is temporarily
    advantageous to learn from (TAS) if the criteria that apply to it hold: any or all of them, as
    `options.combine` says. It is temporarily disadvantageous (TDS) if they do not. A group to which
    no criterion applies is neither, and keeps the weight 1.

    Attenuation multiplies TDS groups with the factor, amplification multiplies TAS groups. For
    example, by length and with attenuation by 0.1:

        correct    wrong       verdict                                 weight
        40 tokens  20, 30      TAS: 40 is longer than 25, the mean     1
        20 tokens  20, 30      TDS: 20 is not longer than 25           0.1

    The criterion `working` compares net claims in place of lengths: the true and new claims of a
    rollout about the figure, less its false ones.

    Args:
        groups: P whole groups of G rollouts. A rollout is correct if its reward is above
            `groups.correct_above`; NaN marks a rollout that was not scored.
        options: None is the reference's attenuation by length.
        step: the number of optimizer steps so far, for options that change during training.

    Raises `ValueError` if rewards and lengths are not both (P, G), or if `criteria` has `working`
    and the net claims of the rollouts were not measured.
    """
    options = Adora() if options is None else options
    rewards_PG = groups.rewards_PG
    lengths_PG = groups.lengths_PG
    if rewards_PG.ndim != 2 or rewards_PG.shape != lengths_PG.shape:
        raise ValueError(
            f"rewards {tuple(rewards_PG.shape)} and lengths {tuple(lengths_PG.shape)} must both "
            "be (P, G)"
        )
    if "working" in options.criteria and groups.net_claims_PG is None:
        raise ValueError(
            "criteria: working needs the net claims of each rollout, which are unknown"
        )
    verdict = _judge_by_all_criteria(groups, options, step)
    tas_P = verdict.applies_P & verdict.holds_P
    tds_P = verdict.applies_P & ~verdict.holds_P
    if options.no_correct == "keep":
        # A group without a correct rollout keeps the weight 1.
        has_correct_P = groups.correct_PG.any(dim=1)
        tds_P = tds_P & has_correct_P
    gets_factor_P = tds_P if options.mode == "attenuation" else tas_P
    weights_P = torch.ones(len(rewards_PG), dtype=torch.float32, device=rewards_PG.device)
    if options.is_on(step):
        weights_P = torch.where(gets_factor_P, as_schedule(options.factor).at(step), weights_P)
    return AdoraWeighting(
        weights_P=weights_P,
        tds_P=tds_P,
        tas_P=tas_P,
        groups=groups,
        # A tie: correct and wrong rollouts compare as equal, such as equally long.
        tds_by_tie_P=tds_P & verdict.is_tie_P,
    )


@dataclass(frozen=True)
class _CriterionVerdict:
    """What one criterion, or all of them together, say of each group: (P,) each, bool."""

    holds_P: Tensor
    """Whether the group is advantageous to learn from."""
    applies_P: Tensor
    """Whether anything is said of the group."""
    is_tie_P: Tensor
    """Whether its correct and wrong rollouts compare as equal."""


def _judge_by_all_criteria(groups: Groups, options: Adora, step: int) -> _CriterionVerdict:
    """Decide for each of P groups whether any, or all, of the criteria that apply to it hold.

    `options.combine` says whether `any` or `all`. For example, if `length` holds and `difficulty`
    does not, the group is advantageous with `any` and not with `all`.
    """
    verdicts = [
        _judge_by_criterion(groups, options, criterion=name, step=step) for name in options.criteria
    ]
    # (K, P) for K criteria
    holds_KP = torch.stack([verdict.holds_P for verdict in verdicts])
    applies_KP = torch.stack([verdict.applies_P for verdict in verdicts])
    is_tie_KP = torch.stack([verdict.is_tie_P for verdict in verdicts])
    holds_P = (holds_KP & applies_KP).any(dim=0)
    if options.combine == "all":
        # A criterion that does not apply must not stop the others.
        holds_P = (holds_KP | ~applies_KP).all(dim=0)
    return _CriterionVerdict(
        holds_P=holds_P, applies_P=applies_KP.any(dim=0), is_tie_P=is_tie_KP.any(dim=0)
    )


def _judge_by_criterion(
    groups: Groups, options: Adora, criterion: str, step: int
) -> _CriterionVerdict:
    """Decide for each of P groups of G rollouts whether one criterion holds, at an optimizer step.

    - `difficulty` holds where the pass rate is at most `tau` (Eq. 6 of the paper).
    - `length` holds where the longest correct rollout is longer than the wrong ones on average.
    - `working` compares the net claims of rollouts in place of their length: their true and new
      claims about the figure less their false ones. They are unknown for a problem without a
      figure. Such a group is compared by length, or with `no_figure: keep` the criterion does not
      apply.
    """
    if criterion == "difficulty":
        is_hard_P = groups.pass_rate_P <= as_schedule(options.tau).at(step)
        # A group without a scored rollout has no pass rate, so the criterion does not hold for it.
        can_hold_P = groups.has_reward_PG.any(dim=1)
        if options.needs_correct:
            # Eq. 6 holds for a pass rate of 0 too. With this option a group has to be hard, but
            # solvable: it needs a correct rollout.
            can_hold_P = groups.correct_PG.any(dim=1)
        # This criterion applies to every group, and knows no ties.
        return _CriterionVerdict(
            holds_P=can_hold_P & is_hard_P,
            applies_P=torch.ones_like(is_hard_P),
            is_tie_P=torch.zeros_like(is_hard_P),
        )
    by_length = _compare_correct_with_wrong(groups, options, measure_PG=groups.lengths_PG)
    if criterion == "length":
        return by_length
    assert groups.net_claims_PG is not None, "weigh_groups refuses groups without it"
    by_net_claims = _compare_correct_with_wrong(groups, options, measure_PG=groups.net_claims_PG)
    if options.no_figure == "keep":
        return replace(by_net_claims, applies_P=groups.has_net_claims_P)
    return _CriterionVerdict(
        holds_P=torch.where(groups.has_net_claims_P, by_net_claims.holds_P, by_length.holds_P),
        applies_P=torch.ones_like(groups.has_net_claims_P),
        is_tie_P=torch.where(groups.has_net_claims_P, by_net_claims.is_tie_P, by_length.is_tie_P),
    )


def _compare_correct_with_wrong(
    groups: Groups, options: Adora, measure_PG: Tensor
) -> _CriterionVerdict:
    """Decide for each of P groups whether a correct rollout exceeds the mean of its wrong ones.

    The largest measure of a correct rollout, such as its length, is compared with the mean measure
    of the wrong rollouts. Truncated ones are left out of the mean. Where no wrong rollout remains
    there is no mean, and the option `empty_wrong` decides:

    - `attenuate` takes the mean as +inf, as the reference for vision-language models does. The
      criterion does not hold, so the group is disadvantageous.
    - `keep` takes it as -inf, as the reference for language models does. The criterion holds if the
      group has a correct rollout.

    Where both sides are equal, the criterion holds only with `ties: keep`.

    Args:
        groups: whole groups.
        options: those of the method; `empty_wrong` and `ties` are read.
        measure_PG: what is compared, one number for each of G rollouts: its length in tokens, or
            its net claims, which are its true and new claims about the figure less its false ones.
    """
    mean_without_wrong = torch.inf if options.empty_wrong == "attenuate" else -torch.inf
    has_finished_wrong_P = groups.finished_wrong_PG.any(dim=1)
    mean_wrong_P = torch.where(
        has_finished_wrong_P, groups.mean_of_finished_wrong_P(measure_PG), mean_without_wrong
    )
    largest_correct_P = groups.largest_correct_P(measure_PG)
    holds_P = largest_correct_P > mean_wrong_P
    # A group without correct rollouts and without finished wrong ones has -inf on both sides, with
    # `empty_wrong: keep`. It compares nothing, so it is no tie.
    is_tie_P = has_finished_wrong_P & (largest_correct_P == mean_wrong_P)
    if options.ties == "keep":
        holds_P = holds_P | is_tie_P
    return _CriterionVerdict(holds_P=holds_P, applies_P=torch.ones_like(holds_P), is_tie_P=is_tie_P)
