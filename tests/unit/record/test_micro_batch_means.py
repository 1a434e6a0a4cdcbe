"""Figures of unequal micro-batches are those of all their rollouts together."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from adora_vl.record.micro_batch_means import MicroBatchMeans
from adora_vl.types import Batch
from tests.support.stand_ins import training_config

Metrics = dict[str, list[float]]


def micro_batch(rows: int, tokens: int) -> Batch:
    """A micro-batch of which the means read its number of rollouts, and of tokens in the loss."""
    return {"completion_mask": torch.ones(rows, 1), "loss_tokens": tokens}


def log_step(config: dict[str, Any], *micro_batches: tuple[Batch, dict[str, float]]) -> Metrics:
    """Return the metrics after TRL's loss has logged its metrics of each micro-batch of a step."""
    metrics: Metrics = defaultdict(list)
    means = MicroBatchMeans(training_config(**config), metrics)
    for micro, value_by_name in micro_batches:
        with means.combine_logged(micro):
            for name, value in value_by_name.items():
                metrics[name].append(value)
    return metrics


def test_a_token_weighs_the_same_in_a_small_micro_batch():
    """Entropy and KL are weighted by the tokens of a micro-batch, and GRPO's loss by rollouts."""
    metrics = log_step(
        {"loss_type": "grpo"},
        (micro_batch(rows=2, tokens=30), {"entropy": 1.0, "kl": 0.2, "policy_loss": 4.0}),
        (micro_batch(rows=6, tokens=10), {"entropy": 3.0, "kl": 0.6, "policy_loss": 8.0}),
    )
    assert metrics == {
        "entropy": [pytest.approx((30 * 1.0 + 10 * 3.0) / 40)],
        "kl": [pytest.approx((30 * 0.2 + 10 * 0.6) / 40)],
        "policy_loss": [pytest.approx((2 * 4.0 + 6 * 8.0) / 8)],
    }


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", (30 * 0.1 + 10 * 0.5) / 40), ("sequence", (2 * 0.1 + 6 * 0.5) / 8)],
)
def test_ratios_of_rollouts_count_rollouts(level, expected):
    """A share of clipped ratios is weighted by tokens, or by rollouts where each has one ratio."""
    name = "clip_ratio/low_mean"
    metrics = log_step(
        {"importance_sampling_level": level},
        (micro_batch(rows=2, tokens=30), {name: 0.1}),
        (micro_batch(rows=6, tokens=10), {name: 0.5}),
    )
    assert metrics[name] == [pytest.approx(expected)]


def test_the_next_step_has_a_value_of_its_own_also_after_a_line_of_the_log():
    """Each step has one value, the weighted mean over its micro-batches.

    `begin` starts a step. TRL empties the metrics when it logs a line, maybe within a step.
    """
    metrics: Metrics = defaultdict(list)
    means = MicroBatchMeans(training_config(), metrics)
    name = "sampling/importance_sampling_ratio"
    for value, weight in ((0.5, 1), (2.0, 3)):
        for figure in ("min", "mean", "max"):
            means.add(f"{name}/{figure}", value, weight=weight)
    assert metrics[f"{name}/min"] == [0.5]
    assert metrics[f"{name}/mean"] == [(0.5 * 1 + 2.0 * 3) / 4]
    assert metrics[f"{name}/max"] == [2.0]
    means.begin()
    means.add(f"{name}/mean", 1.0, weight=9)
    assert metrics[f"{name}/mean"] == [(0.5 * 1 + 2.0 * 3) / 4, 1.0]
    metrics.clear()  # as TRL does when it logs a line
    # Of the same step: the mean of 1.0 and 3.0, which weigh the same.
    means.add(f"{name}/mean", 3.0, weight=9)
    assert metrics[f"{name}/mean"] == [2.0]


def test_what_a_micro_batch_without_memory_has_logged_is_undone():
    """A micro-batch that runs out of memory is made once more, and its metrics count once.

    Metrics of steps before it stay.
    """
    metrics: Metrics = defaultdict(list, {"drift": [9.0], "reward": [0.5]})
    means = MicroBatchMeans(training_config(), metrics)

    def log_micro_batch(value: float) -> None:
        undo = means.snapshot()
        for is_last_try in (False, True):
            means.add("drift", value, weight=1)
            metrics["loss"].append(value)
            if not is_last_try:
                undo()

    log_micro_batch(1.0)
    assert metrics == {"drift": [9.0, 1.0], "reward": [0.5], "loss": [1.0]}
    log_micro_batch(4.0)
    assert metrics == {"drift": [9.0, (1.0 + 4.0) / 2], "reward": [0.5], "loss": [1.0, 4.0]}


def test_micro_batches_without_a_token_of_the_loss_do_not_hide_the_others():
    """The entropy over no tokens is NaN, which must not make the mean NaN."""
    metrics = log_step(
        {},
        (micro_batch(rows=2, tokens=0), {"entropy": math.nan}),
        (micro_batch(rows=2, tokens=5), {"entropy": 2.0}),
    )
    assert metrics["entropy"] == [2.0]


def test_the_most_clipped_rollout_of_a_step_is_that_of_all_its_micro_batches():
    """The extremes of a step are the smallest and largest of its micro-batches, without NaN.

    A mean over micro-batches would depend on how the rows are divided.
    """
    low = "clip_ratio/low_min"
    high = "clip_ratio/high_max"
    metrics = log_step(
        {},
        (micro_batch(rows=2, tokens=30), {low: 0.2, high: 0.1}),
        (micro_batch(rows=2, tokens=10), {low: 0.1, high: 0.5}),
        (micro_batch(rows=2, tokens=0), {low: math.nan, high: math.nan}),
    )
    assert metrics == {low: [0.1], high: [0.5]}


def test_a_generation_of_masked_answers_is_left_out_of_the_mean_of_a_step():
    """The entropy of a step without a token in the loss is NaN, and not the 0 that TRL logs.

    TRL's loss logs 0 of a micro-batch without a token, as where all answers are truncated.
    """
    metrics: Metrics = defaultdict(list)
    means = MicroBatchMeans(training_config(), metrics)
    for tokens, entropy in ((0, 0.0), (5, 2.0)):
        means.begin()
        with means.combine_logged(micro_batch(rows=2, tokens=tokens)):
            metrics["entropy"].append(entropy)
    assert math.isnan(metrics["entropy"][0])
    assert metrics["entropy"][1] == 2.0
