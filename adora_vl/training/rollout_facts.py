"""What is known of rollouts that were graded: rewards, lengths, ends, calls of tools.

Ranks measure their own rollouts and gather once. From then on every rank holds the facts of all
ranks on the host, so each computes alike whatever follows from them, without a collective call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.advantage.groups import lacking_scores, rollouts_that_leave, rollouts_without_reward

_ALONE = "no other rollout of its group has a reward"


def rows_of_rank(values_N: Tensor, accelerator: Accelerator) -> Tensor:
    """Return the part of this rank, (B,), of values of all ranks' rollouts, (N,).

    Every rank has B = N / processes rollouts, and the ranks follow each other.
    """
    rows = len(values_N) // accelerator.num_processes
    first = accelerator.process_index * rows
    return values_N[first : first + rows]


def weighted_sum(rewards_BF: Tensor, weights_F: Tensor) -> Tensor:
    """One reward per rollout, (B,), as TRL sums them; NaN where no function scored it."""
    rewards_B = (rewards_BF * weights_F.to(rewards_BF.device)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_BF).all(dim=1), torch.nan, rewards_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFacts:
    """The facts of N rollouts of all ranks, on the host. There are F reward functions.

    Whole groups are neighbours, as everywhere in a training.
    """

    rewards_NF: Tensor
    """The reward of each function, float32; NaN where it gave no score."""
    counted_NF: Tensor
    """The rewards as they count: NaN throughout for rollouts that have left their group, which is
    known once `counting` has looked at whole groups."""
    prompt_length_N: Tensor
    """Tokens of the prompt."""
    length_N: Tensor
    """Tokens that the policy has sampled."""
    cut_off_N: Tensor
    """Whether the rollout has no end, by `StopCriteria`, bool."""
    reflective_N: Tensor
    """Reflective words in the text of the last turn."""
    surprisal_N: Tensor
    """Mean surprisal in nats per token; NaN where the sampler gives no log-probabilities."""
    calls_N: Tensor
    """Calls of tools."""
    failed_calls_N: Tensor
    """Calls of tools that failed."""
    tool_seconds_N: Tensor
    """Seconds that all calls took together."""
    unanswered_N: Tensor
    """Whether the last turn may call a tool and nobody answers, bool."""
    work_N: Tensor
    """True and new claims of the rollout less its errors, at least 0, as `steps` counts them. NaN
    where a row has no figure, and where nothing counts them."""
    missing: tuple[str | None, ...] = ()
    """Why a rollout has no reward; None where it has one."""
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    """Columns of N values that reward functions asked to show."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Figures that reward functions asked to log."""

    @classmethod
    def gathered(cls, measured: RolloutFacts, accelerator: Accelerator) -> RolloutFacts:
        """Return the facts of all ranks, from those that each has measured.

        Collective: one gather, for which all facts are columns of one tensor.
        """
        if accelerator.num_processes == 1:
            return measured
        names = [spec.name for spec in fields(cls) if spec.name.endswith("_N")]
        columns = [getattr(measured, name).float()[:, None] for name in names]
        packed_BK = torch.cat([measured.rewards_NF, *columns], dim=1)
        packed_NK = accelerator.gather(packed_BK.to(accelerator.device, non_blocking=True)).cpu()
        functions = measured.rewards_NF.size(1)
        rewards_NF = packed_NK[:, :functions]
        unpacked: dict[str, Any] = {"rewards_NF": rewards_NF, "counted_NF": rewards_NF}
        for name, values_N in zip(names, packed_NK[:, functions:].unbind(dim=1), strict=True):
            unpacked[name] = values_N.to(getattr(measured, name).dtype)
        return cls(**unpacked)

    def counting(
        self,
        failed: Mapping[tuple[int, int], str],
        weights_F: Tensor,
        names: Sequence[str],
        generations: int,
    ) -> RolloutFacts:
        """Return the facts, with the rollouts taken out of their groups that lack a reward.

        Args:
            failed: why a function failed, by the numbers of the rollout and of the function.
            weights_F: of the functions.
            names: of the functions.
            generations: rollouts of a group.
        """
        failed_NF = torch.zeros_like(self.rewards_NF, dtype=torch.bool)
        weights_F = weights_F.to(self.rewards_NF.device)
        for rollout, function in failed:
            failed_NF[rollout, function] = True
        lacks_NF = lacking_scores(
            self.rewards_NF, failed_BF=failed_NF, weights_F=weights_F, generations=generations
        )
        unrewarded_N = rollouts_without_reward(self.rewards_NF, lacks_NF, weights_F)
        missing: list[str | None] = [None] * len(self.rewards_NF)
        for row in unrewarded_N.nonzero().flatten().tolist():
            lacks = lacks_NF[row].nonzero().flatten().tolist()
            reasons = [f"{names[number]}: {failed.get((row, number), 'None')}" for number in lacks]
            missing[row] = "; ".join(reasons) or "no reward function scored it"
        has_left_N = rollouts_that_leave(unrewarded_N, generations)
        counted_NF = torch.where(has_left_N[:, None], torch.nan, self.rewards_NF)
        return replace(self, counted_NF=counted_NF, missing=tuple(missing))

    def selected(self, rows: Sequence[int]) -> RolloutFacts:
        """Return the facts of these rollouts, without what reward functions showed."""
        selected: dict[str, Any] = {
            name: values[list(rows)] for name, values in self._tensors().items()
        }
        missing = tuple(self.missing[row] for row in rows)
        return replace(self, **selected, missing=missing, extra={}, logged={})

    def joined(self, appended: RolloutFacts) -> RolloutFacts:
        """Return the facts of these rollouts, and of the appended ones behind them."""
        appended_tensors = appended._tensors()
        joined: dict[str, Any] = {
            name: torch.cat([values, appended_tensors[name]])
            for name, values in self._tensors().items()
        }
        return replace(self, **joined, missing=(*self.missing, *appended.missing))

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of their fields."""
        names = [spec.name for spec in fields(self) if spec.name.endswith(("_N", "_NF"))]
        return {name: getattr(self, name) for name in names}

    @property
    def why_left(self) -> list[str | None]:
        """Why each rollout has left its group; None where it has not."""
        gone = torch.isnan(self.counted_NF).all(dim=1).tolist()
        return [
            reason or (_ALONE if is_gone else None)
            for reason, is_gone in zip(self.missing, gone, strict=True)
        ]

    @property
    def missing_share(self) -> float:
        """Share of the rollouts without a reward."""
        return sum(reason is not None for reason in self.missing) / len(self.missing)

    @property
    def reflective_per_1000_tokens(self) -> float:
        """Reflective words per 1,000 tokens of all rollouts; NaN where no rollout has a token."""
        return (1000 * self.reflective_N.sum() / self.length_N.sum()).item()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and completions."""
        return int(self.prompt_length_N.double().sum() + self.length_N.double().sum())

    def with_shown(
        self, extra: Mapping[str, list[Any]], logged: Mapping[str, float]
    ) -> RolloutFacts:
        """Return the facts with what reward functions showed of the rollouts of all ranks.

        Args:
            extra: columns of N values. Where they hold `new` (new claims that are true) and
                `false` (claims that are not), a rollout's work is `new` less `false`, at least 0.
            logged: figures for the log.
        """
        nothing = [None] * len(self.length_N)
        work = []
        for new_claims, false_claims in zip(
            extra.get("new", nothing), extra.get("false", nothing), strict=True
        ):
            is_known = new_claims is not None and false_claims is not None
            work.append(max(0.0, float(new_claims - false_claims)) if is_known else torch.nan)
        work_N = torch.tensor(work, dtype=torch.float32)
        return replace(self, extra=extra, logged=logged, work_N=work_N)
