"""What grading says of a generation: every function's reward, lengths, and which rollouts lack a reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.advantage.groups import lacking_scores, leaving, unrewarded
from adora_vl.rewards.completion import completion_text, reflective_words
from adora_vl.training.guards import RewardGuard
from adora_vl.types import StepContext

_ALONE = "no other rollout of its group has a reward"


@dataclass(frozen=True)
class Rewards:
    """What the reward functions said of a generation, of all ranks, and which rollouts lack a reward."""

    all_BF: Tensor  # of each function; NaN where it gave no score
    counted_BF: Tensor  # the same, and NaN throughout for rollouts that have left their group
    missing: tuple[str | None, ...]  # why a rollout has no reward; None where it has one

    @classmethod
    def of(
        cls,
        all_BF: Tensor,
        failed: Mapping[tuple[int, int], str],
        weights_F: Tensor,
        names: Sequence[str],
        generations: int,
    ) -> Rewards:
        """`all_BF`: as TRL gathers it. `failed`: the reason by rollout and function for which a call failed.
        `weights_F`, `names`: of the functions.
        """
        failed_BF, weights_F = torch.zeros_like(all_BF, dtype=torch.bool), weights_F.to(all_BF.device)
        for place in failed:
            failed_BF[place] = True
        lacks_BF = lacking_scores(all_BF, failed_BF, weights_F, generations)
        unrewarded_B = unrewarded(all_BF, lacks_BF, weights_F)
        missing: list[str | None] = [None] * len(all_BF)
        for row in unrewarded_B.nonzero().flatten().tolist():
            lacks = lacks_BF[row].nonzero().flatten().tolist()
            reasons = [f"{names[number]}: {failed.get((row, number), 'None')}" for number in lacks]
            missing[row] = "; ".join(reasons) or "no reward function scored it"
        counted_BF = torch.where(leaving(unrewarded_B, generations)[:, None], torch.nan, all_BF)
        return cls(all_BF, counted_BF, tuple(missing))

    @property
    def why_left(self) -> list[str | None]:
        """Why each rollout has left its group; None where it has not."""
        gone = torch.isnan(self.counted_BF).all(dim=1).tolist()
        return [why or (_ALONE if left else None) for why, left in zip(self.missing, gone, strict=True)]

    @property
    def missing_share(self) -> float:
        """Share of the rollouts without a reward."""
        return sum(reason is not None for reason in self.missing) / len(self.missing)


@dataclass(frozen=True)
class Ends:
    """What ends an answer, whoever samples it."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()  # vLLM's `stop`
    decode: Callable[[Sequence[int]], str] = str

    @classmethod
    def of(cls, tokens: Iterable[int], asked: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> Ends:
        """`tokens`: that end a turn. `asked`: `generation_kwargs`. `decode`: as the texts are made."""
        stop = asked.get("stop") or ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(frozenset({*tokens, *(asked.get("stop_token_ids") or ())}), strings, decode)

    def ended(self, ids: Sequence[int], text: str) -> bool:
        """Whether an answer of these tokens has ended: it is empty, or its last token ends it or completes a string.

        One that was stopped at its limit, or because it repeats itself, has not.
        """
        if not ids or ids[-1] in self.tokens:
            return True
        return any(string in text and string not in self.decode(ids[:-1]) for string in self.strings)


@dataclass(frozen=True)
class Scores:
    """What is known of a generation after grading, of all ranks."""

    rewards: Rewards
    lengths_B: Tensor  # completion tokens
    unended_B: Tensor  # bool: cut off (`Ends`)
    reflective_B: Tensor  # reflective words in its text

    @classmethod
    def gathered(
        cls,
        rewards: Rewards,
        completions: Sequence[Sequence[int]],
        texts: Sequence[str],
        ends: Ends,
        accelerator: Accelerator,
    ) -> Scores:
        """`rewards` is of all ranks; `completions` are this rank's token ids and `texts` what they say."""
        facts_B3 = torch.tensor(
            [
                [len(ids), not ends.ended(ids, text), sum(reflective_words(text).values())]
                for ids, text in zip(completions, texts, strict=True)
            ],
            dtype=torch.float32,
        )
        if accelerator.num_processes > 1:
            facts_B3 = accelerator.gather(facts_B3.to(accelerator.device, non_blocking=True)).cpu()
        return cls(rewards, facts_B3[:, 0], facts_B3[:, 1] > 0, facts_B3[:, 2])

    @property
    def reflective_per_1000_tokens(self) -> float:
        """Reflective words per 1,000 tokens of all rollouts; NaN where no rollout has a token."""
        return (1000 * self.reflective_B.sum() / self.lengths_B.sum()).item()


def weighted_sum(rewards_BF: Tensor, weights_F: Tensor) -> Tensor:
    """One reward per rollout, (B,), as TRL sums them; NaN where no function scored it."""
    rewards_B = (rewards_BF * weights_F.to(rewards_BF.device)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_BF).all(dim=1), torch.nan, rewards_B)


class Grader:
    """Makes the scores of a generation from what its reward functions have returned. All ranks call it together."""

    def __init__(
        self,
        context: StepContext,
        guard: RewardGuard,
        weights_F: Tensor,
        names: Sequence[str],
        ends: Ends,
    ) -> None:
        """`weights_F`, `names`: of the reward functions."""
        self.accelerator, self.guard = context.accelerator, guard
        self.weights_F, self.names, self.ends = weights_F, names, ends

    def __call__(
        self, all_BF: Tensor, completions: Sequence[Any], ids: Sequence[Sequence[int]], generations: int, step: int
    ) -> Scores:
        """`all_BF`: the rewards as TRL has gathered them. `completions`, `ids`: this rank's, as messages or text and as
        tokens. Raises `RunError` where a function failed, or where no rollout has a reward.
        """
        self.guard.check(step)
        failed = self.guard.failed_calls(len(ids))
        rewards = Rewards.of(all_BF.cpu(), failed, self.weights_F, self.names, generations)
        self.guard.check_scored(rewards.missing, step)
        texts = [completion_text(completion) for completion in completions]
        return Scores.gathered(rewards, ids, texts, self.ends, self.accelerator)
