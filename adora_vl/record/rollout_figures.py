"""The figures of a generation in the log: rewards, lengths, calls of tools, and ADORA's shares."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from adora_vl.advantage import Adora, AdoraWeighting
from adora_vl.advantage.grpo import deviation
from adora_vl.training.advantages import Advantages, GroupAssessment
from adora_vl.training.rollout_facts import RolloutFacts


def _mean_where(values: Tensor, chosen: Tensor) -> float:
    """Return the mean of the chosen values; NaN if none is chosen, which TRL's log leaves out."""
    return values[chosen].mean().item() if bool(chosen.any()) else float("nan")


def adora_metrics(weighting: AdoraWeighting) -> dict[str, float]:
    """Return ADORA's figures by name: shares of prompts, and mean lengths of rollouts in tokens.

    A group without any reward counts nowhere.
    """
    groups = weighting.groups
    judged_P = groups.scored_PG.any(dim=1)
    any_correct_P = groups.correct_PG.any(dim=1)
    any_wrong_P = groups.wrong_PG.any(dim=1)
    wrong_all_truncated_P = any_wrong_P & ~groups.finished_wrong_PG.any(dim=1)
    all_correct_P = any_correct_P & ~any_wrong_P
    lengths_PG = groups.lengths_PG.float()
    return {
        "tds_share": _mean_where(weighting.tds_P.float(), judged_P),
        "weight_mean": _mean_where(weighting.weights_P, judged_P),
        "no_correct_share": _mean_where((~any_correct_P).float(), judged_P),
        "all_correct_share": _mean_where(all_correct_P.float(), judged_P),
        "wrong_all_truncated_share": _mean_where(wrong_all_truncated_P.float(), judged_P),
        "length_correct": _mean_where(lengths_PG, groups.correct_PG),
        "length_wrong": _mean_where(lengths_PG, groups.wrong_PG),
        "pass_rate": _mean_where(groups.pass_rate_P, judged_P),
        "ties": _mean_where(weighting.ties_P.float(), _comparable_groups_P(weighting)),
    }


def _comparable_groups_P(weighting: AdoraWeighting) -> Tensor:
    """Return TDS groups that have both right and wrong rollouts, bool, (P,)."""
    groups = weighting.groups
    return weighting.tds_P & groups.correct_PG.any(dim=1) & groups.wrong_PG.any(dim=1)


class TieNotice:
    """Says once in a run, on the first rank, that many of the attenuated groups are ties of length.

    It stays silent until there are `GROUPS` comparable groups, and a share of ties above `SHARE`.
    """

    SHARE = 0.1
    GROUPS = 50

    def __init__(self, options: Adora, *, speaks: bool) -> None:
        """Start the count.

        Args:
            options: those of the run's ADORA, with the mode `off` where the run has none.
            speaks: whether this is the first rank.
        """
        # Ties of work are common, and no accident of tokens.
        compares_length = "working" not in options.criteria
        attenuates = options.mode == "attenuation" and not options.plain
        self._is_silent = not (speaks and attenuates and compares_length)
        self._comparable_count = 0
        self._tie_count = 0

    def count(self, weighting: AdoraWeighting) -> None:
        """Count the groups of a generation that the loss uses, and say so if many are ties."""
        if self._is_silent:
            return
        self._comparable_count += int(_comparable_groups_P(weighting).sum())
        self._tie_count += int(weighting.ties_P.sum())
        if (
            self._comparable_count >= self.GROUPS
            and self._tie_count > self.SHARE * self._comparable_count
        ):
            self._is_silent = True
            tqdm.write(
                f"{self._tie_count} of {self._comparable_count} attenuated groups are ties: their longest right "
                "answer is exactly as long as the mean of the wrong ones, so length says nothing "
                "there. The reference attenuates them too; adora_method.adora.ties: keep leaves "
                "them their weight",
                file=sys.stderr,
            )


def learned_figures(advantages: Advantages) -> dict[str, float]:
    """Return the figures of the rollouts that the loss uses, by their names in the log."""
    learned_reward = torch.nanmean(advantages.assessment.groups.rewards_PG).item()
    figures = {"learned_reward": learned_reward, **advantages.figures}
    return {f"adora/{name}": value for name, value in figures.items()}


def assessment_figures(
    assessment: GroupAssessment, facts: RolloutFacts, functions: Sequence[str]
) -> dict[str, float]:
    """Return the figures of all rollouts that were graded, by their names in the log.

    They are TRL's, ADORA's, and those that the reward functions log.

    Args:
        assessment: the groups of all ranks, weighed by ADORA's criteria.
        facts: rewards and lengths of the same rollouts.
        functions: the names of the reward functions.
    """
    figures = {
        f"adora/{name}": value for name, value in adora_metrics(assessment.weighting).items()
    }
    figures["adora/reflective_per_1000_tokens"] = facts.reflective_per_1000_tokens
    figures["rewards/missing"] = facts.missing_share
    figures["completions/clipped_ratio"] = facts.has_no_end_N.float().mean().item()
    ended = facts.length_N[~facts.has_no_end_N]
    for name, reduce in (("mean", torch.mean), ("min", torch.amin), ("max", torch.amax)):
        figures[f"completions/{name}_length"] = reduce(facts.length_N).item()
        figures[f"completions/{name}_terminated_length"] = (
            reduce(ended).item() if len(ended) else 0.0
        )
    for name, rewards_N in zip(functions, facts.counted_rewards_NF.unbind(dim=1), strict=True):
        mean, std = _mean_and_deviation(rewards_N)
        figures[f"rewards/{name}/mean"] = mean
        figures[f"rewards/{name}/std"] = std
    mean, std = _mean_and_deviation(assessment.groups.rewards_PG.flatten())
    figures["reward"] = mean
    figures["reward_std"] = std
    figures["frac_reward_zero_std"] = assessment.equal_reward_share
    return {**figures, **facts.logged_metrics}


def tool_figures(rewards_PG: Tensor, facts: RolloutFacts) -> dict[str, float]:
    """Return the figures of a run with tools, by their names in the log.

    Those of TRL begin with `tools/`. `adora/tool_gain` is the mean reward of the rollouts that
    called a tool minus that of the others in their group, over the groups that have both; it is
    left out where no group has.

    Args:
        rewards_PG: the rewards of all rollouts, (P, G), NaN where a rollout has none.
        facts: of the same rollouts, P x G of them.
    """
    called_PG = facts.tool_calls_N.view_as(rewards_PG) > 0
    has_both_P = called_PG.any(1) & ~called_PG.all(1)
    nan = torch.tensor(torch.nan)
    mean_with_call_P = torch.where(called_PG, rewards_PG, nan).nanmean(1)
    mean_without_call_P = torch.where(~called_PG, rewards_PG, nan).nanmean(1)
    gain = (mean_with_call_P - mean_without_call_P)[has_both_P].nanmean().item()
    failure_frequency = facts.failed_calls_N.sum() / facts.tool_calls_N.sum().clamp(min=1)
    figures = {
        "tools/call_frequency": facts.tool_calls_N.mean().item(),
        "tools/failure_frequency": failure_frequency.item(),
        "adora/called": called_PG.float().mean().item(),
        "adora/unanswered_calls": facts.unanswered_N.float().mean().item(),
        "adora/tools_s": facts.tool_seconds_N.sum().item(),
    }
    if not math.isnan(gain):
        figures["adora/tool_gain"] = gain
    return figures


def _mean_and_deviation(values: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation of the values that are not NaN."""
    mean = torch.nanmean(values)
    return mean.item(), deviation(values, mean).item()
