"""Grades a generation: rewards of every function, lengths, and which rollouts lack a reward."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerState
from trl.data_utils import apply_chat_template

from adora_vl.advantage.groups import lacking_scores, leaving, unrewarded
from adora_vl.rewards.completion import reflective_words
from adora_vl.rewards.safe_call import is_async
from adora_vl.rollout.rollouts import Rollout
from adora_vl.training.guards import RewardGuard
from adora_vl.types import Row, StepContext

_RENAMED = ("prompt", "completion", "completion_ids")  # columns that functions get by other names
_ALONE = "no other rollout of its group has a reward"


@dataclass(frozen=True)
class Rewards:
    """Rewards of a generation, of all ranks: B rollouts, F functions."""

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
        """The rewards, with the rollouts taken out of their groups that lack one.

        Args:
            all_BF: as TRL gathers it; NaN where a function gave no score.
            failed: why a function failed, by the numbers of the rollout and of the function.
            weights_F: of the functions.
            names: of the functions.
            generations: rollouts of a group.
        """
        failed_BF = torch.zeros_like(all_BF, dtype=torch.bool)
        weights_F = weights_F.to(all_BF.device)
        for rollout, function in failed:
            failed_BF[rollout, function] = True
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
            reason or (_ALONE if is_gone else None)
            for reason, is_gone in zip(self.missing, gone, strict=True)
        ]

    @property
    def missing_share(self) -> float:
        """Share of the rollouts without a reward."""
        return sum(reason is not None for reason in self.missing) / len(self.missing)


@dataclass(frozen=True)
class StopCriteria:
    """The tokens and strings that end an answer, for every kind of sampler."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()  # vLLM's `stop`
    decode: Callable[[Sequence[int]], str] = str  # token ids to the text that strings are sought in

    @classmethod
    def of(
        cls,
        tokens: Iterable[int],
        generation_kwargs: Mapping[str, Any],
        decode: Callable[[Sequence[int]], str],
    ) -> StopCriteria:
        """The criteria of a run.

        Args:
            tokens: that end a turn.
            generation_kwargs: the key of the run, which may name further tokens and strings.
            decode: makes the texts of token ids.
        """
        stop = generation_kwargs.get("stop") or ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        further_tokens = generation_kwargs.get("stop_token_ids") or ()
        return cls(frozenset({*tokens, *further_tokens}), strings, decode)

    def ended(self, ids: Sequence[int], text: str) -> bool:
        """Whether an answer of these tokens and this text has ended by itself.

        It has if it is empty, or if its last token ends it or completes a string. An answer that
        was stopped at its limit, or because it repeats itself, has not.
        """
        if not ids or ids[-1] in self.tokens:
            return True
        return any(
            string in text and string not in self.decode(ids[:-1]) for string in self.strings
        )

    def has_end(self, rollout: Rollout, text: str) -> bool:
        """Whether a rollout whose last turn has this text has come to its end by itself.

        False for a rollout that stopped at an unanswered tool call or for lack of context, whatever
        its last token is.
        """
        return not rollout.finish_reason.is_unanswered and self.ended(
            rollout.last_turn_tokens, text
        )


@dataclass(frozen=True)
class Scores:
    """The facts of a graded generation, of all ranks: B rollouts."""

    rewards: Rewards
    lengths_B: Tensor  # tokens that the policy has sampled
    unended_B: Tensor  # bool: cut off, by `StopCriteria`
    reflective_B: Tensor  # reflective words in the text
    tokens: int = 0  # of all prompts and completions
    # columns that reward functions asked to show, (B,) each
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    # figures that reward functions asked to log
    logged: Mapping[str, float] = field(default_factory=dict)

    @property
    def work_B(self) -> Tensor:
        """True and new claims of each rollout less its errors, at least 0, as `steps` counts them.

        NaN where a row has no figure, and where nothing counts them.
        """
        count = len(self.lengths_B)
        new = self.extra.get("new", [None] * count)
        false = self.extra.get("false", [None] * count)
        work = [
            torch.nan if right is None or wrong is None else max(0.0, float(right - wrong))
            for right, wrong in zip(new, false, strict=True)
        ]
        return torch.tensor(work, dtype=torch.float32, device=self.lengths_B.device)

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
    """Rewards of B rollouts of one rank, before the ranks exchange them."""

    rewards_BF: Tensor  # float32 on the host; NaN where a function gave no score
    extra: Mapping[str, list[Any]]  # columns that they asked to show
    logged: Mapping[str, list[float]]  # figures that they asked to log


@dataclass(frozen=True)
class RewardFunctions:
    """Calls the reward functions of a run as TRL 1.16 does, in its `_calculate_rewards`.

    They are functions, coroutine functions, or reward models.
    """

    functions: Sequence[Any]
    tokenizers: Sequence[Any]  # of the reward models, None for the others
    template: Mapping[str, Any]  # arguments of their chat templates
    to_device: Callable[[Any], Any]  # moves the inputs of a reward model
    # where coroutines run, on a thread of its own
    loop: Callable[[], asyncio.AbstractEventLoop]

    def __call__(
        self,
        rows: Sequence[Row],
        prompts: list[Any],
        completions: list[Any],
        ids: list[list[int]],
        thinking_opened: list[bool],
        state: TrainerState,
    ) -> Grades:
        """Call every function on this rank's rollouts.

        There is no collective call inside, so each rank may have another number of rollouts.

        Args:
            rows: of the rollouts; their columns become keyword arguments.
            prompts: as messages or texts.
            completions: as messages or texts.
            ids: token ids of the completions.
            thinking_opened: whether each completion begins inside a block of thinking, which stock
                TRL does not tell.
            state: the trainer's, which functions get too.
        """
        extra = defaultdict[str, list[Any]](list)
        logged = defaultdict[str, list[float]](list)
        columns = {
            name: [row.get(name) for row in rows] for name in rows[0] if name not in _RENAMED
        }
        kwargs: dict[str, Any] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": ids,
            **columns,
        }
        kwargs["thinking_opened"] = thinking_opened
        kwargs["trainer_state"] = state
        kwargs["log_extra"] = lambda column, values: extra[column].extend(values)
        kwargs["log_metric"] = lambda name, value: logged[name].append(value)
        rewards: dict[int, Any] = {}  # by the number of the function
        coroutines = []
        for number, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                rewards[number] = self._of_model(
                    function,
                    tokenizer=self.tokenizers[number],
                    prompts=prompts,
                    completions=completions,
                )
            elif is_async(function):
                coroutines.append(number)
            else:
                rewards[number] = function(**kwargs)
        if coroutines:

            async def run_together() -> list[Any]:
                calls = (self.functions[number](**kwargs) for number in coroutines)
                return await asyncio.gather(*calls)

            results = asyncio.run_coroutine_threadsafe(run_together(), self.loop()).result()
            rewards.update(zip(coroutines, results, strict=True))
        values = [
            [torch.nan if reward is None else reward for reward in rewards[number]]
            for number in range(len(rewards))
        ]
        return Grades(torch.tensor(values, dtype=torch.float32).T, extra, logged)

    def _of_model(
        self, model: nn.Module, tokenizer: Any, prompts: list[Any], completions: list[Any]
    ) -> list[float]:
        """Rewards of a reward model: its first logit for prompt and completion together."""
        texts = [
            prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if not isinstance(prompts[0], str):
            conversations = ({"messages": messages} for messages in texts)
            texts = [
                apply_chat_template(messages, tokenizer, **self.template)["text"]
                for messages in conversations
            ]
        inputs = tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            logits = model(**self.to_device(inputs)).logits
            rewards: list[float] = logits[:, 0].float().tolist()
        return rewards


class Grader:
    """Gathers the rewards of all ranks and makes them the scores of a generation.

    A call is collective.
    """

    def __init__(
        self,
        context: StepContext,
        guard: RewardGuard,
        weights_F: Tensor,
        names: Sequence[str],
    ) -> None:
        """Build a grader.

        Args:
            context: what every part of a training step is built from.
            guard: knows which calls failed, and ends the run.
            weights_F: of the reward functions.
            names: of the reward functions.
        """
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
        """The scores of a generation, of all ranks.

        Args:
            grades: of this rank's B rollouts.
            prompts: token ids, (B,).
            completions: token ids that the policy has sampled, (B,).
            texts: of the answers, (B,).
            ended: whether each rollout has an end, (B,).
            generations: rollouts of a group.
            step: optimizer steps that have been made.

        Raises:
            RunError: a function failed, or no rollout has a reward.
        """
        self.guard.check(step)
        failed = self.guard.failed_calls(len(texts))
        words = [sum(reflective_words(text).values()) for text in texts]
        prompt_lengths = map(len, prompts)
        lengths = map(len, completions)
        facts_B4 = torch.tensor(
            list(zip(prompt_lengths, lengths, ended, words, strict=True)), dtype=torch.float32
        )
        # Rewards and facts travel as one tensor, so that the ranks gather once.
        columns_BK = torch.cat([grades.rewards_BF, facts_B4], dim=1)
        if self.accelerator.num_processes > 1:
            columns_BK = self.accelerator.gather(
                columns_BK.to(self.accelerator.device, non_blocking=True)
            ).cpu()
        rewards_BF, facts_B4 = torch.split(columns_BK, [grades.rewards_BF.size(1), 4], dim=1)
        rewards = Rewards.of(rewards_BF, failed, self.weights_F, self.names, generations)
        self.guard.check_scored(rewards.missing, step)
        prompt_lengths_B, lengths_B, ended_B, words_B = facts_B4.unbind(dim=1)
        tokens = int(prompt_lengths_B.double().sum() + lengths_B.double().sum())
        extra, logged = _of_all_ranks(grades, len(texts))
        return Scores(
            rewards=rewards,
            lengths_B=lengths_B,
            unended_B=ended_B == 0,
            reflective_B=words_B,
            tokens=tokens,
            extra=extra,
            logged=logged,
        )


def _of_all_ranks(grades: Grades, rows: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """The columns that functions of any rank asked to show, and the means of their figures.

    Each rank has `rows` rollouts; a rank whose functions show no such column gets None in it.
    """
    gathered = gather_object([(dict(grades.extra), dict(grades.logged))])
    extra_of_ranks = [extra for extra, _ in gathered]
    logged_of_ranks = [logged for _, logged in gathered]
    columns: dict[str, list[Any]] = {}
    for name in sorted({name for extra in extra_of_ranks for name in extra}):
        columns[name] = []
        for extra in extra_of_ranks:
            columns[name] += extra.get(name, [None] * rows)
    means = {}
    for name in sorted({name for logged in logged_of_ranks for name in logged}):
        values_of_ranks = [logged.get(name, []) for logged in logged_of_ranks]
        sums_R = torch.tensor([sum(values) for values in values_of_ranks], dtype=torch.float32)
        means[name] = sums_R.sum().item() / sum(map(len, values_of_ranks))
    return columns, means
