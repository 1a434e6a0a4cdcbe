"""The distance between engine and trainer, and what a person is told about it."""

from __future__ import annotations

import pytest
import torch

from adora_vl.rollout.drift import CAUSES, drift_message, drift_sums, merge_drift


def test_the_mean_is_over_tokens_and_not_over_ranks():
    one = drift_sums(torch.tensor([[1.0, 1.0, 1.0]]), torch.zeros(1, 3), torch.ones(1, 3))
    other = drift_sums(torch.tensor([[5.0, 9.0]]), torch.zeros(1, 2), torch.tensor([[1, 0]]))
    drift = merge_drift(torch.stack([one, other]))
    assert drift.mean == pytest.approx((1 + 1 + 1 + 5) / 4)
    assert drift.largest == 5  # the masked 9 does not count


def test_a_token_that_the_engine_could_not_score_is_left_out():
    sums = drift_sums(torch.tensor([[1.0, 2.0]]), torch.tensor([[float("nan"), 1.5]]), torch.ones(1, 2))
    assert merge_drift(sums[None]).mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("trainer", "engine"), [([float("nan"), 1.0], [1.0, 1.0]), ([1.0, 1.0], [float("nan"), float("nan")])]
)
def test_a_policy_that_is_nan_or_an_engine_that_scores_nothing_is_no_agreement(trainer, engine):
    sums = drift_sums(torch.tensor([trainer]), torch.tensor([engine]), torch.ones(1, 2))
    assert merge_drift(sums[None]).mean == float("inf")


def test_nothing_sampled_is_no_drift():
    sums = drift_sums(torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    assert merge_drift(sums[None]).mean == 0.0


def test_the_message_says_how_far_where_and_why():
    message = drift_message(merge_drift(torch.tensor([[5.0, 2.0, 4.0]])), 0.3, 7, "out/checkpoint-7")
    assert "step 7" in message and "2.5 nats" in message and "adora_max_drift is 0.3" in message
    assert "out/checkpoint-7" in message
    assert all(cause in message for cause in CAUSES)
