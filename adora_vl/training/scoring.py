"""Scores rollouts: calls the reward functions, and gathers what is known of all ranks' rollouts."""

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
from adora_vl.rollout.rollouts import row_for_rewards
from adora_vl.training.generation import UnscoredGroups
from adora_vl.training.guards import RewardGuard
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, StepContext, loss_mask

# Columns of a row that functions do not get: `prompts`, `completions` and `completion_ids` of the
# rollouts take their place.
_REPLACED_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class FunctionScores:
    """What the F reward functions return for B rollouts of one rank."""

    rewards_BF: Tensor
    """The rewards, float32 on the CPU; NaN where a function gave no score."""
    extra_columns: Mapping[str, list[Any]]
    """The values that functions gave to TRL's `log_extra`, by the column's name."""
    logged_metrics: Mapping[str, list[float]]
    """The values that functions gave to TRL's `log_metric`, by the metric's name."""


@dataclass(frozen=True)
class RewardFunctions:
    """Calls the reward functions of a run as TRL 1.16 does, in its `_calculate_rewards`.

    There are F of them: functions, coroutine functions, or reward models, which score B rollouts.
    As in TRL a function may call `log_extra(column, values)` to log a value for each completion,
    and `log_metric(name, value)`.
    """

    functions: Sequence[Any]
    tokenizers: Sequence[Any]
    """The tokenizer of each reward model, None for the other functions."""
    template_kwargs: Mapping[str, Any]
    """Arguments for the chat templates of reward models."""
    to_device: Callable[[Any], Any]
    """Moves the inputs of a reward model to the device."""
    event_loop: Callable[[], asyncio.AbstractEventLoop]
    """Returns the loop in which coroutines run, on a thread of its own."""

    def score(self, unscored_groups: UnscoredGroups, state: TrainerState) -> FunctionScores:
        """Call every reward function on this rank's rollouts, and return rewards and logged values.

        There is no collective call inside, so the ranks may have unequal numbers of rollouts.

        Args:
            unscored_groups: the groups whose rollouts are scored, with at least one rollout.
            state: the trainer's state, which functions get as `trainer_state`.
        """
        # Filled while the functions run, by their calls of TRL's `log_metric` and `log_extra`.
        logged_metrics = defaultdict[str, list[float]](list)
        columns_by_function: list[dict[str, list[Any]]] = [{} for _ in self.functions]
        rewards_by_function = self._call_functions(
            unscored_groups,
            arguments={
                **_function_arguments(unscored_groups),
                "trainer_state": state,
                "log_metric": lambda name, value: logged_metrics[name].append(value),
            },
            columns_by_function=columns_by_function,
        )
        extra_columns: dict[str, list[Any]] = {}
        for logged_columns in columns_by_function:
            # If two functions log a column of the same name, the later function's column is taken.
            extra_columns |= logged_columns
        # One row for each function. It is transposed below: a batch has a row for each rollout.
        rewards_FB = [
            [torch.nan if reward is None else reward for reward in rewards]
            for rewards in rewards_by_function
        ]
        return FunctionScores(
            rewards_BF=torch.tensor(rewards_FB, dtype=torch.float32).T,
            extra_columns=extra_columns,
            logged_metrics=logged_metrics,
        )

    def _call_functions(
        self,
        unscored_groups: UnscoredGroups,
        arguments: Mapping[str, Any],
        columns_by_function: Sequence[dict[str, list[Any]]],
    ) -> list[list[float | None]]:
        """Return for each function the rewards of all rollouts.

        Reward models get only prompts and completions. Coroutine functions run after the others,
        concurrently. For example, two functions and three rollouts give [[1, 0, 1], [0.5, None,
        0]].

        Args:
            unscored_groups: the groups whose rollouts are scored.
            arguments: the keyword arguments of every function, beside TRL's `log_extra`.
            columns_by_function: for each function a dict, which gets the columns that the function
                logs with `log_extra`, by their names.
        """

        def call(function_index: int) -> Any:
            """Call a reward function, and return its rewards.

            A coroutine function returns a coroutine, whose result are the rewards.
            """
            logged_columns = columns_by_function[function_index]

            def log_extra(column: str, values: Iterable[Any]) -> None:
                logged_columns.setdefault(column, []).extend(values)

            return self.functions[function_index](**arguments, log_extra=log_extra)

        rewards_by_index: dict[int, Any] = {}
        coroutine_indices = []
        for index, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                rewards_by_index[index] = self._score_by_model(
                    function,
                    tokenizer=self.tokenizers[index],
                    prompts=unscored_groups.prompts.messages,
                    completions=unscored_groups.completions,
                )
            elif is_async(function):
                coroutine_indices.append(index)
            else:
                rewards_by_index[index] = call(index)
        if coroutine_indices:

            async def run_together() -> list[Any]:
                return await asyncio.gather(*map(call, coroutine_indices))

            # The coroutines run in the thread of the event loop. `result` waits for all of them.
            future_rewards = asyncio.run_coroutine_threadsafe(run_together(), self.event_loop())
            rewards_by_index.update(zip(coroutine_indices, future_rewards.result(), strict=True))
        return [rewards_by_index[index] for index in range(len(self.functions))]

    def _score_by_model(
        self, model: nn.Module, tokenizer: Any, prompts: list[Any], completions: list[Any]
    ) -> list[float]:
        """Return the rewards of a reward model: its first logit for each prompt and completion.

        Args:
            model: the reward model.
            tokenizer: its tokenizer.
            prompts: the prompt of each rollout, a text or a list of messages.
            completions: the completion of each rollout, in the same form.
        """
        conversations = [
            prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = conversations
        if not isinstance(prompts[0], str):
            texts = [
                apply_chat_template({"messages": messages}, tokenizer, **self.template_kwargs)[
                    "text"
                ]
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


def _function_arguments(unscored_groups: UnscoredGroups) -> dict[str, Any]:
    """Return the keyword arguments that reward functions get, with a value for each rollout.

    As in TRL they are `prompts`, `completions`, `completion_ids`, and the columns of the data set.
    For example, two rollouts of a row with the answer "4" give `answer=["4", "4"]`. There is also
    `thinking_opened`: whether each completion begins inside a block of thinking.
    """
    rollouts = unscored_groups.rollouts
    rows = [
        row_for_rewards(row, rollout)
        for row, rollout in zip(unscored_groups.rows, rollouts, strict=True)
    ]
    arguments: dict[str, Any] = {}
    for name in rows[0]:
        if name not in _REPLACED_COLUMNS:
            arguments[name] = [row.get(name) for row in rows]
    # They replace columns of the same names. A data set may have completions of another model.
    return arguments | {
        "prompts": unscored_groups.prompts.messages,
        "completions": unscored_groups.completions,
        "completion_ids": [rollout.policy_tokens for rollout in rollouts],
        "thinking_opened": unscored_groups.thinking_opened,
    }


@dataclass(frozen=True)
class Scorer:
    """Gathers rewards and other facts of all ranks' rollouts, once each rank has scored its own.

    A call is collective. There are F reward functions, and B rollouts of each rank.
    """

    context: StepContext
    guard: RewardGuard
    """Knows which calls of reward functions failed, and ends the run for them."""
    weights_F: Tensor
    """The weights of the reward functions."""
    function_names: Sequence[str]
    """The names of the reward functions."""

    def score(
        self, unscored_groups: UnscoredGroups, scores: FunctionScores, group_size: int, step: int
    ) -> RolloutFacts:
        """Return rewards, lengths and further facts of the rollouts of all ranks. Collective.

        Rollouts for which a function failed lose their reward.

        Args:
            unscored_groups: this rank's groups with their batch.
            scores: what the reward functions have returned for them.
            group_size: how many rollouts a group has.
            step: how many optimizer steps have been made, for messages.

        Raises:
            RunError: a function failed for all of its completions, or no rollout has a reward.
        """
        self.guard.check(step)
        # A function may also have failed for single completions. Those have no reward.
        reason_by_failed_call = self.guard.pop_failed_calls(
            rows_per_rank=len(unscored_groups.rollouts)
        )
        measured = measured_facts(unscored_groups, scores.rewards_BF)
        facts = RolloutFacts.gather_from_ranks(
            measured, self.context.accelerator
        ).without_unrewarded(
            reason_by_failed_call,
            weights_F=self.weights_F,
            function_names=self.function_names,
            group_size=group_size,
        )
        self.guard.check_scored(facts.missing_reward_reasons, step)
        extra_columns, logged_metrics = _logged_on_all_ranks(scores, len(unscored_groups.rollouts))
        return facts.with_logged(extra_columns, logged_metrics)


def measured_facts(unscored_groups: UnscoredGroups, rewards_BF: Tensor) -> RolloutFacts:
    """Return the rewards, lengths and further facts of this rank's B rollouts.

    `net_claims_N` follows from a column that the reward function `steps` logs. It is NaN here, and
    `RolloutFacts.with_logged` fills it.

    `rewards_BF`: the rewards that the F reward functions gave them.
    """

    def column(values: Iterable[float]) -> Tensor:
        """Return a value for each rollout as a tensor, (B,)."""
        return torch.tensor([*values], dtype=torch.float32)

    rollouts = unscored_groups.rollouts
    return RolloutFacts(
        rewards_NF=rewards_BF,
        counted_rewards_NF=rewards_BF,
        prompt_length_N=column(len(ids) for ids in unscored_groups.prompts.ids),
        length_N=column(len(rollout.policy_tokens) for rollout in rollouts),
        has_no_end_N=torch.tensor([not has_ended for has_ended in unscored_groups.ended_by_itself]),
        reflective_words_N=column(
            sum(reflective_words(text).values()) for text in unscored_groups.completion_texts
        ),
        surprisal_N=surprisal(unscored_groups.batch).float().cpu(),
        tool_calls_N=column(len(rollout.calls) for rollout in rollouts),
        failed_calls_N=column(sum(call.failed for call in rollout.calls) for rollout in rollouts),
        tool_seconds_N=column(sum(call.seconds for call in rollout.calls) for rollout in rollouts),
        net_claims_N=torch.full((len(rollouts),), torch.nan),
        unanswered_N=torch.tensor([rollout.finish_reason.is_unanswered for rollout in rollouts]),
    )


def surprisal(batch: Batch) -> Tensor:
    """Return the mean surprisal of each of this rank's B rollouts in nats per token, (B,).

    It is the mean of -log p over those of the C tokens that the loss counts. p is the probability
    that the engine gave to the token. For example, the log-probabilities -1 and -3 give 2. All are
    NaN if the batch lacks the engine's log-probabilities.
    """
    logps_BC = batch.get("sampling_per_token_logps")
    mask_BC = loss_mask(batch)
    if logps_BC is None:
        return torch.full((len(mask_BC),), torch.nan, device=mask_BC.device)
    total_B = (torch.nan_to_num(logps_BC) * mask_BC).sum(dim=1)
    return -total_B / mask_BC.sum(dim=1).clamp(min=1)


def _logged_on_all_ranks(
    scores: FunctionScores, rows_per_rank: int
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Gather what reward functions logged on all ranks: extra columns, and means of metrics.

    For example, rank 0 has two rollouts, for which a function logs a column ["a", "b"], and [1, 3]
    for a metric. Rank 1 also has two, without the column, and logs [5] for the metric. The column
    is then ["a", "b", None, None], and the mean of the metric 3. Collective.

    Args:
        scores: what the functions of this rank have logged.
        rows_per_rank: rollouts of each rank. A column that a rank did not log has None for
            each of them.

    Returns:
        The columns by name, with a value for each rollout of all ranks; and the means of the
        metrics by name.
    """
    gathered = gather_object([(dict(scores.extra_columns), dict(scores.logged_metrics))])
    columns_of_ranks = [extra_columns for extra_columns, _ in gathered]
    metrics_of_ranks = [logged_metrics for _, logged_metrics in gathered]
    # The names in the order of the alphabet, each once.
    column_names = sorted({name for extra_columns in columns_of_ranks for name in extra_columns})
    metric_names = sorted({name for logged_metrics in metrics_of_ranks for name in logged_metrics})
    columns: dict[str, list[Any]] = {}
    for name in column_names:
        columns[name] = []
        for extra_columns in columns_of_ranks:
            columns[name] += extra_columns.get(name, [None] * rows_per_rank)
    means = {}
    for name in metric_names:
        values_of_ranks = [logged_metrics.get(name, []) for logged_metrics in metrics_of_ranks]
        # As TRL sums them: in float32, each of R ranks for itself at first.
        sums_R = torch.tensor([sum(values) for values in values_of_ranks], dtype=torch.float32)
        means[name] = sums_R.sum().item() / sum(map(len, values_of_ranks))
    return columns, means
