"""The metrics of a generation in the log: rewards, lengths, calls of tools, and ADORA's shares."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from adora_vl.advantage import Adora, AdoraWeighting
from adora_vl.advantage.grpo import nan_standard_deviation
from adora_vl.record.shown_metrics import SIGNAL_SHARE_KEY
from adora_vl.training.advantages import Advantages, GroupAssessment
from adora_vl.training.rollout_facts import RolloutFacts


def _mean_where(values: Tensor, mask: Tensor) -> float:
    """Return the mean of the values where the mask is True.

    It is NaN, which the log leaves out, where the mask is True nowhere.
    """
    return values[mask].mean().item() if bool(mask.any()) else math.nan


def adora_metrics(weighting: AdoraWeighting) -> dict[str, float]:
    """Return the metrics of ADORA for the log: shares of groups, and mean lengths in tokens.

    `tds_share` is the share of the groups that ADORA's criteria call temporarily disadvantageous
    (TDS) to learn from. In a tie the longest correct rollout of a group is exactly as long as the
    mean of the wrong ones, so that only the rule for ties decides. `ties` is the share of ties
    among the groups that may tie (`_may_tie_P`). A group without any reward counts in no metric.
    The suffixes are P for the groups, and PG for the groups and the G rollouts of each.
    """
    groups = weighting.groups
    has_reward_P = groups.has_reward_PG.any(dim=1)
    has_correct_P = groups.correct_PG.any(dim=1)
    has_wrong_P = groups.wrong_PG.any(dim=1)
    has_finished_wrong_P = groups.finished_wrong_PG.any(dim=1)
    all_correct_P = has_correct_P & ~has_wrong_P
    wrong_all_truncated_P = has_wrong_P & ~has_finished_wrong_P
    lengths_PG = groups.lengths_PG.float()
    return {
        "tds_share": _mean_where(weighting.tds_P.float(), has_reward_P),
        "weight_mean": _mean_where(weighting.weights_P, has_reward_P),
        "no_correct_share": _mean_where((~has_correct_P).float(), has_reward_P),
        "all_correct_share": _mean_where(all_correct_P.float(), has_reward_P),
        "wrong_all_truncated_share": _mean_where(wrong_all_truncated_P.float(), has_reward_P),
        "length_correct": _mean_where(lengths_PG, groups.correct_PG),
        "length_wrong": _mean_where(lengths_PG, groups.wrong_PG),
        # of rollouts, like the mean reward: groups may have unequally many with a reward
        "pass_rate": _mean_where(groups.correct_PG.float(), groups.has_reward_PG),
        "ties": _mean_where(weighting.tds_by_tie_P.float(), _may_tie_P(weighting)),
    }


def _may_tie_P(weighting: AdoraWeighting) -> Tensor:
    """Return which of the P groups of G rollouts could be ties of length, bool, (P,).

    A tie needs correct and wrong rollouts whose lengths are compared. Only groups that ADORA calls
    temporarily disadvantageous (`tds_P`) count, since a tie makes a group disadvantageous.
    """
    groups = weighting.groups
    return weighting.tds_P & groups.correct_PG.any(dim=1) & groups.wrong_PG.any(dim=1)


class TieNotice:
    """Says once in a run, on the first rank, that many of the attenuated groups are ties of length.

    In a tie the longest correct rollout is exactly as long as the mean of the wrong ones. The
    notice comes once at least `MIN_GROUPS` groups could tie and more than the share `MAX_TIE_SHARE`
    of them do.
    """

    MAX_TIE_SHARE = 0.1
    MIN_GROUPS = 50

    def __init__(self, options: Adora, *, prints: bool) -> None:
        """Start the count.

        Args:
            options: the options of the run's ADORA. Their mode is `off` in a run without ADORA.
            prints: whether this is the first rank, which alone prints.
        """
        # The criterion `working` compares numbers of true steps instead of tokens. They are small,
        # so their ties are common, and no reason for a notice.
        compares_length = "working" not in options.criteria
        # If TRL's advantages are kept the factor is always 1, so no group loses weight by a tie.
        attenuates = options.mode == "attenuation" and not options.keeps_trl_advantages
        self._is_silent = not (prints and attenuates and compares_length)
        self._groups_that_may_tie = 0
        self._tied_groups = 0

    def count(self, weighting: AdoraWeighting) -> None:
        """Count the groups of a generation that the loss uses, and print the notice if many tie."""
        if self._is_silent:  # the notice was printed, or is not this rank's to print
            return
        self._groups_that_may_tie += int(_may_tie_P(weighting).sum())
        self._tied_groups += int(weighting.tds_by_tie_P.sum())
        has_enough_groups = self._groups_that_may_tie >= self.MIN_GROUPS
        has_many_ties = self._tied_groups > self.MAX_TIE_SHARE * self._groups_that_may_tie
        if has_enough_groups and has_many_ties:
            self._is_silent = True
            tqdm.write(
                f"{self._tied_groups} of {self._groups_that_may_tie} attenuated groups are ties: "
                "their longest right answer is exactly as long as the mean of the wrong ones, so length says nothing "
                "there. The reference attenuates them too; adora_method.adora.ties: keep leaves "
                "them their weight",
                file=sys.stderr,
            )


def learned_metrics(advantages: Advantages) -> dict[str, float]:
    """Return the metrics of the rollouts that the loss uses, by their names in the log.

    They are the mean reward and what the methods (ADORA and others) report of themselves.
    """
    # of P groups of G rollouts; NaN where a rollout has no reward
    rewards_PG = advantages.assessment.groups.rewards_PG
    learned_reward = torch.nanmean(rewards_PG).item()
    metrics = {"learned_reward": learned_reward, **advantages.metrics}
    return {f"adora/{name}": value for name, value in metrics.items()}


def assessment_metrics(
    assessment: GroupAssessment, facts: RolloutFacts, function_names: Sequence[str]
) -> dict[str, float]:
    """Return the metrics of all rollouts that were graded, by their names in the log.

    They are those of stock TRL, those of ADORA, and those that the reward functions log. The
    suffixes are N for the rollouts, which are P groups of G, and F for the reward functions.

    Args:
        assessment: the groups of all ranks, with ADORA's weights.
        facts: rewards and lengths of the same rollouts.
        function_names: the names of the reward functions.
    """
    metrics = {
        f"adora/{name}": value for name, value in adora_metrics(assessment.weighting).items()
    }
    metrics["adora/reflective_per_1000_tokens"] = facts.reflective_per_1000_tokens
    metrics["rewards/missing"] = facts.missing_reward_share
    # An answer that does not come to its end is cut off, which TRL calls clipped.
    metrics["completions/clipped_ratio"] = facts.has_no_end_N.float().mean().item()
    terminated_lengths = facts.length_N[~facts.has_no_end_N]
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": torch.mean,
        "min": torch.amin,
        "max": torch.amax,
    }
    for name, reduce in reductions.items():
        metrics[f"completions/{name}_length"] = reduce(facts.length_N).item()
        # 0 where no rollout came to its end, as in TRL
        terminated_length = reduce(terminated_lengths).item() if len(terminated_lengths) else 0.0
        metrics[f"completions/{name}_terminated_length"] = terminated_length
    # Rollouts that have left their group do not count: their rewards are NaN here.
    for name, rewards_N in zip(function_names, facts.counted_rewards_NF.unbind(dim=1), strict=True):
        metrics |= _mean_and_deviation(
            rewards_N, mean_name=f"rewards/{name}/mean", deviation_name=f"rewards/{name}/std"
        )
    metrics |= _mean_and_deviation(
        assessment.groups.rewards_PG.flatten(), mean_name="reward", deviation_name="reward_std"
    )
    metrics["frac_reward_zero_std"] = assessment.equal_reward_share
    metrics[SIGNAL_SHARE_KEY] = _mean_where(
        assessment.has_signal_P.float(), assessment.groups.has_reward_PG.any(dim=1)
    )
    return {**metrics, **facts.logged_metrics}


def tool_metrics(rewards_PG: Tensor, facts: RolloutFacts) -> dict[str, float]:
    """Return what a run with tools logs about their calls, by the names in the log.

    Names that begin with `tools/` are those of stock TRL. `adora/tool_gain` says what calls are
    worth. In a group it is the mean reward of the rollouts that called a tool minus the mean reward
    of those that did not. For example, rewards (1, 1, 0, 1) of which the first two rollouts called
    a tool give 1 - 0.5 = 0.5. The metric is the mean over the groups that have both kinds of
    rollouts, and is left out where no group has both.

    Args:
        rewards_PG: the rewards of P groups of G rollouts, NaN where a rollout has none.
        facts: calls, failures and seconds of the same N = P x G rollouts.
    """
    has_call_PG = facts.tool_calls_N.view_as(rewards_PG) > 0
    has_both_P = has_call_PG.any(dim=1) & ~has_call_PG.all(dim=1)
    # rewards that do not count in a mean become NaN, which `nanmean` leaves out
    nan = torch.tensor(torch.nan)
    mean_with_call_P = torch.where(has_call_PG, rewards_PG, nan).nanmean(dim=1)
    mean_without_call_P = torch.where(~has_call_PG, rewards_PG, nan).nanmean(dim=1)
    gain = (mean_with_call_P - mean_without_call_P)[has_both_P].nanmean().item()
    # 0 where no tool was called
    failure_frequency = facts.failed_calls_N.sum() / facts.tool_calls_N.sum().clamp(min=1)
    metrics = {
        "tools/call_frequency": facts.tool_calls_N.mean().item(),
        "tools/failure_frequency": failure_frequency.item(),
        "adora/called": has_call_PG.float().mean().item(),
        "adora/unanswered_calls": facts.unanswered_N.float().mean().item(),
        "adora/tools_s": facts.tool_seconds_N.sum().item(),
    }
    if not math.isnan(gain):
        metrics["adora/tool_gain"] = gain
    return metrics


def _mean_and_deviation(rewards_N: Tensor, mean_name: str, deviation_name: str) -> dict[str, float]:
    """Return mean and standard deviation of N rewards under these two names; NaN is left out."""
    mean = torch.nanmean(rewards_N)
    return {mean_name: mean.item(), deviation_name: nan_standard_deviation(rewards_N, mean).item()}
