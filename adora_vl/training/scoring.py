"""What grading says of a generation: every function's reward, lengths, and which rollouts lack a
reward.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.data_utils import apply_chat_template

from adora_vl.advantage.groups import lacking_scores, leaving, unrewarded
from adora_vl.rewards.completion import reflective_words
from adora_vl.rewards.safe_call import is_async
from adora_vl.rollout.rollouts import Rollout
from adora_vl.training.guards import RewardGuard
from adora_vl.types import Row, StepContext

_GIVEN = ("prompt", "completion", "completion_ids")  # columns that functions get by other names
_ALONE = "no other rollout of its group has a reward"


@dataclass(frozen=True)
class Rewards:
    """What the reward functions said of a generation, of all ranks, and which rollouts lack a
    reward.
    """

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
        """`all_BF`: as TRL gathers it.

        `failed`: why, by rollout and function. `weights_F`, `names`: of these.
        """
        failed_BF = torch.zeros_like(all_BF, dtype=torch.bool)
        weights_F = weights_F.to(all_BF.device)
        for place in failed:
            failed_BF[place] = True
        lacks_BF = lacking_scores(
            all_BF, failed_BF=failed_BF, weights_F=weights_F, generations=generations
        )
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
        return [
            why or (_ALONE if left else None) for why, left in zip(self.missing, gone, strict=True)
        ]

    @property
    def missing_share(self) -> float:
        """Share of the rollouts without a reward."""
        return sum(reason is not None for reason in self.missing) / len(self.missing)


@dataclass(frozen=True)
class StopCriteria:
    """What ends an answer, whoever samples it."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()  # vLLM's `stop`
    decode: Callable[[Sequence[int]], str] = str

    @classmethod
    def of(
        cls, tokens: Iterable[int], asked: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
    ) -> StopCriteria:
        """`tokens`: that end a turn.

        `asked`: `generation_kwargs`. `decode`: as the texts are made.
        """
        stop = asked.get("stop") or ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(frozenset({*tokens, *(asked.get("stop_token_ids") or ())}), strings, decode)

    def ended(self, ids: Sequence[int], text: str) -> bool:
        """Whether an answer of these tokens has ended: it is empty, or its last token ends it or
        completes a string.

        One that was stopped at its limit, or because it repeats itself, has not.
        """
        if not ids or ids[-1] in self.tokens:
            return True
        return any(
            string in text and string not in self.decode(ids[:-1]) for string in self.strings
        )

    def has_end(self, rollout: Rollout, text: str) -> bool:
        """Whether a rollout whose last turn is this text has come to its end by itself.

        One whose call nobody answers, or for whose answer there is no room, has not, whatever its
        last token is.
        """
        return rollout.ended not in ("calls", "room") and self.ended(rollout.turn, text)


@dataclass(frozen=True)
class Scores:
    """What is known of a generation after grading, of all ranks."""

    rewards: Rewards
    lengths_B: Tensor  # tokens that the policy has sampled
    unended_B: Tensor  # bool: cut off (`StopCriteria`)
    reflective_B: Tensor  # reflective words in its text
    tokens: int = 0  # of prompts and completions
    # columns of the reward functions', (B,)
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)  # their figures

    @property
    def reflective_per_1000_tokens(self) -> float:
        """Reflective words per 1,000 tokens of all rollouts; NaN where no rollout has a token."""
        return (1000 * self.reflective_B.sum() / self.lengths_B.sum()).item()


def weighted_sum(rewards_BF: Tensor, weights_F: Tensor) -> Tensor:
    """One reward per rollout, (B,), as TRL sums them; NaN where no function scored it."""
    rewards_B = (rewards_BF * weights_F.to(rewards_BF.device)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_BF).all(dim=1), torch.nan, rewards_B)


@dataclass(frozen=True)
class Grades:
    """What the reward functions of one rank said of B rollouts."""

    rewards_BF: Tensor  # float32 on the host; NaN where a function gave no score
    extra: Mapping[str, list[Any]]  # columns that they asked to show
    logged: Mapping[str, list[float]]  # figures that they asked to log


@dataclass(frozen=True)
class RewardFunctions:
    """The reward functions of a run as TRL 1.16 calls them, in `_calculate_rewards`: functions,
    coroutines, models.
    """

    functions: Sequence[Any]
    tokenizers: Sequence[Any]  # of the models, None for the others
    template: Mapping[str, Any]  # arguments of their chat templates
    to_device: Callable[[Any], Any]  # what a model is given
    loop: Callable[[], asyncio.AbstractEventLoop]  # on which coroutines run, on a thread of its own

    def __call__(
        self,
        rows: Sequence[Row],
        prompts: list[Any],
        completions: list[Any],
        ids: list[list[int]],
        thinking_opened: list[bool],
        state: Any,
    ) -> Grades:
        """Of this rank's rollouts.

        There is no collective call inside: each rank may have a number of its own.

        `prompts`, `completions`: as messages, or texts. `thinking_opened`: whether each prompt ends
        in `<think>`, which TRL does not say. `state`: the trainer's, which functions are shown.
        """
        extra = defaultdict[str, list[Any]](list)
        logged = defaultdict[str, list[float]](list)
        columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in _GIVEN}
        given: dict[str, Any] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": ids,
            **columns,
        }
        given["thinking_opened"] = thinking_opened
        given["trainer_state"] = state
        given["log_extra"] = lambda column, values: extra[column].extend(values)
        given["log_metric"] = lambda name, value: logged[name].append(value)
        found: dict[int, Any] = {}
        later = []
        for number, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                found[number] = self._of_model(
                    function,
                    tokenizer=self.tokenizers[number],
                    prompts=prompts,
                    completions=completions,
                )
            elif is_async(function):
                later.append(number)
            else:
                found[number] = function(**given)
        if later:

            async def together() -> list[Any]:
                return await asyncio.gather(*(self.functions[number](**given) for number in later))

            answers = asyncio.run_coroutine_threadsafe(together(), self.loop()).result()
            found.update(zip(later, answers, strict=True))
        values = [
            [torch.nan if one is None else one for one in found[number]]
            for number in range(len(found))
        ]
        return Grades(torch.tensor(values, dtype=torch.float32).T, extra, logged)

    def _of_model(
        self, model: nn.Module, tokenizer: Any, prompts: list[Any], completions: list[Any]
    ) -> list[float]:
        texts = [
            prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if not isinstance(prompts[0], str):
            rendered = ({"messages": messages} for messages in texts)
            texts = [
                apply_chat_template(one, tokenizer, **self.template)["text"] for one in rendered
            ]
        read = tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            found: list[float] = model(**self.to_device(read)).logits[:, 0].float().tolist()
        return found


class Grader:
    """Makes the scores of a generation from what its reward functions have returned.

    All ranks call it together.
    """

    def __init__(
        self,
        context: StepContext,
        guard: RewardGuard,
        weights_F: Tensor,
        names: Sequence[str],
    ) -> None:
        """`weights_F`, `names`: of the reward functions."""
        self.accelerator = context.accelerator
        self.guard = guard
        self.weights_F = weights_F
        self.names = names

    def __call__(
        self,
        grades: Grades,
        prompts: Sequence[list[int]],
        completions: Sequence[list[int]],
        texts: Sequence[str],
        ended: Sequence[bool],
        generations: int,
        step: int,
    ) -> Scores:
        """Of this rank's rollouts, (B,): their tokens, those of completions as far as the policy
        has sampled them; what they say; and whether they have an end. Raises `RunError` where a
        function failed, or no rollout has a reward.
        """
        self.guard.check(step)
        failed = self.guard.failed_calls(len(texts))
        words = [sum(reflective_words(text).values()) for text in texts]
        sizes = [map(len, prompts), map(len, completions)]
        facts_B4 = torch.tensor([*zip(*sizes, ended, words, strict=True)], dtype=torch.float32)
        all_BK = torch.cat([grades.rewards_BF, facts_B4], dim=1)
        if self.accelerator.num_processes > 1:
            all_BK = self.accelerator.gather(
                all_BK.to(self.accelerator.device, non_blocking=True)
            ).cpu()
        rewards = Rewards.of(all_BK[:, :-4], failed, self.weights_F, self.names, generations)
        self.guard.check_scored(rewards.missing, step)
        prompts_B, lengths_B, ended_B, words_B = all_BK[:, -4:].unbind(dim=1)
        tokens = int(prompts_B.double().sum() + lengths_B.double().sum())
        return Scores(
            rewards, lengths_B, ended_B == 0, words_B, tokens, *_of_all_ranks(grades, len(texts))
        )


def _of_all_ranks(grades: Grades, rows: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """The columns that functions of any rank asked to show, and the means of their figures.

    `rows`: of each rank.
    """
    everyone = gather_object([(dict(grades.extra), dict(grades.logged))])
    columns = {
        name: [value for extra, _ in everyone for value in extra.get(name, [None] * rows)]
        for name in sorted({name for extra, _ in everyone for name in extra})
    }
    means = {}
    for name in sorted({name for _, logged in everyone for name in logged}):
        values = [logged.get(name, []) for _, logged in everyone]
        total = torch.tensor([sum(one) for one in values], dtype=torch.float32).sum().item()
        means[name] = total / sum(map(len, values))
    return columns, means
