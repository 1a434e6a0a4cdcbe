"""Scores rollouts: calls the reward functions, and gathers the facts of all ranks once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerState
from trl.data_utils import apply_chat_template

from adora_vl.rewards.completion import reflective_words
from adora_vl.rewards.safe_call import is_async
from adora_vl.training.generation import BuiltGroups
from adora_vl.training.guards import RewardGuard
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, Row, StepContext, loss_mask

_RENAMED = ("prompt", "completion", "completion_ids")  # columns that functions get by other names


@dataclass(frozen=True)
class FunctionScores:
    """What the reward functions return for B rollouts of one rank."""

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
    ) -> FunctionScores:
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
        return FunctionScores(torch.tensor(values, dtype=torch.float32).T, extra, logged)

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


class Scorer:
    """Makes the scores of this rank's rollouts the facts of all ranks'.

    A call is collective.
    """

    def __init__(
        self,
        context: StepContext,
        guard: RewardGuard,
        weights_F: Tensor,
        names: Sequence[str],
    ) -> None:
        """Build a scorer.

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

    def score(
        self, built: BuiltGroups, scores: FunctionScores, generations: int, step: int
    ) -> RolloutFacts:
        """Return the facts of the rollouts of all ranks.

        Args:
            built: this rank's rollouts and their batch.
            scores: what the reward functions return for them.
            generations: rollouts of a group.
            step: optimizer steps that have been made.

        Raises:
            RunError: a function failed, or no rollout has a reward.
        """
        self.guard.check(step)
        failed = self.guard.take_failed_calls(len(built.rollouts))
        facts = RolloutFacts.gathered(measured_facts(built, scores.rewards_BF), self.accelerator)
        facts = facts.counting(
            failed, weights_F=self.weights_F, names=self.names, generations=generations
        )
        self.guard.check_scored(facts.missing, step)
        extra, logged = _of_all_ranks(scores, len(built.rollouts))
        return facts.with_shown(extra, logged)


def measured_facts(built: BuiltGroups, rewards_BF: Tensor) -> RolloutFacts:
    """Return the facts of this rank's B rollouts, whose reward functions gave `rewards_BF`."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor([*values], dtype=torch.float32)

    rollouts = built.rollouts
    return RolloutFacts(
        rewards_NF=rewards_BF,
        counted_NF=rewards_BF,
        prompt_length_N=column(len(ids) for ids in built.prompts.ids),
        length_N=column(len(rollout.policy_tokens) for rollout in rollouts),
        cut_off_N=torch.tensor([not has_end for has_end in built.ended_by_itself]),
        reflective_N=column(
            sum(reflective_words(text).values()) for text in built.completion_texts
        ),
        surprisal_N=surprisal(built.batch).float().cpu(),
        calls_N=column(len(rollout.calls) for rollout in rollouts),
        failed_calls_N=column(sum(call.failed for call in rollout.calls) for rollout in rollouts),
        tool_seconds_N=column(sum(call.seconds for call in rollout.calls) for rollout in rollouts),
        work_N=torch.full((len(rollouts),), torch.nan),
        unanswered_N=torch.tensor([rollout.finish_reason.is_unanswered for rollout in rollouts]),
    )


def surprisal(batch: Batch) -> Tensor:
    """Return the mean surprisal of each rollout of this rank in nats per token, (B,).

    NaN where the batch lacks the engine's log-probabilities.
    """
    logps_BC = batch.get("sampling_per_token_logps")
    mask_BC = loss_mask(batch)
    if logps_BC is None:
        return torch.full((len(mask_BC),), torch.nan, device=mask_BC.device)
    total_B = (torch.nan_to_num(logps_BC) * mask_BC).sum(dim=1)
    return -total_B / mask_BC.sum(dim=1).clamp(min=1)


def _of_all_ranks(
    scores: FunctionScores, rows: int
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the columns that functions of any rank asked to show, and the means of their figures.

    Each rank has `rows` rollouts; a rank whose functions show no such column gets None in it.
    """
    gathered = gather_object([(dict(scores.extra), dict(scores.logged))])
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
