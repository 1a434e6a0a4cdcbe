"""The distance between engine and policy, what a person is told about it, and the ratio that corrects for it."""

import math
from typing import Any

import pytest
import torch

from adora_vl.rollout import importance
from tests.support.step_context import step_context


def test_the_mean_is_over_tokens_and_not_over_ranks():
    one = importance.drift_sums(torch.tensor([[1.0, 1.0, 1.0]]), torch.zeros(1, 3), torch.ones(1, 3))
    other = importance.drift_sums(torch.tensor([[5.0, 9.0]]), torch.zeros(1, 2), torch.tensor([[1, 0]]))
    drift = importance.merge_drift(torch.stack([one, other]))
    assert drift.mean == pytest.approx((1 + 1 + 1 + 5) / 4)
    assert drift.largest == 5  # the masked 9 does not count


def test_a_token_that_the_engine_could_not_score_is_left_out():
    sums = importance.drift_sums(torch.tensor([[1.0, 2.0]]), torch.tensor([[float("nan"), 1.5]]), torch.ones(1, 2))
    assert importance.merge_drift(sums[None]).mean == pytest.approx(0.5)


def test_a_policy_that_is_nan_or_an_engine_that_scores_nothing_is_no_agreement(subtests):
    cases = [([float("nan"), 1.0], [1.0, 1.0]), ([1.0, 1.0], [float("nan"), float("nan")])]
    for trainer, engine in cases:
        with subtests.test(f"{trainer} {engine}"):
            sums = importance.drift_sums(torch.tensor([trainer]), torch.tensor([engine]), torch.ones(1, 2))
            assert importance.merge_drift(sums[None]).mean == float("inf")


def test_nothing_sampled_is_no_drift():
    sums = importance.drift_sums(torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    assert importance.merge_drift(sums[None]).mean == 0.0


def test_the_message_says_how_far_where_and_why():
    message = importance.drift_message(
        importance.merge_drift(torch.tensor([[5.0, 2.0, 4.0]])), 0.3, 7, "out/checkpoint-7"
    )
    assert "step 7" in message and "2.5 nats" in message and "adora_max_drift is 0.3" in message
    assert "out/checkpoint-7" in message
    assert all(cause in message for cause in importance.CAUSES)


RATIOS = {
    "token_truncate": [[2.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "token_mask": [[0.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "sequence_truncate": [[2.0], [0.25]],
    "sequence_mask": [[0.0], [0.25]],
}


def test_the_importance_ratio_by_hand(subtests):
    """Row 0 is 8, 0.5, (masked): its product is 4. Row 1 is (no score), 0.25, 1."""
    for mode, expected in RATIOS.items():
        with subtests.test(mode):
            log = torch.log(torch.tensor([[8.0, 0.5, 9.0], [5.0, 0.25, 1.0]]))
            sampling = torch.tensor([[0.0, 0, 0], [math.nan, 0, 0]])
            mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
            ratio = importance.importance_ratio(log, sampling, mask, mode=mode, clip_min=None, clip_max=2.0)
            assert torch.allclose(ratio, torch.tensor(expected))


def test_the_ratio_of_a_micro_batch_has_the_bounds_of_the_run_and_is_logged():
    """Row 1 was sampled on a distorted image: its tokens have no score, and it is in no figure."""
    bounds: dict[str, Any] = {"vllm_importance_sampling_clip_min": 0.3, "vllm_importance_sampling_clip_max": 2.0}
    ratio = importance.ImportanceRatio(step_context(vllm_importance_sampling_mode="token_mask", **bounds))
    logps = torch.log(torch.tensor([[8.0, 0.5, 0.25, 9.0], [1.0, 1.0, 1.0, 1.0]]))
    sampling = torch.zeros(2, 4)
    sampling[1] = math.nan
    micro: Any = {"sampling_per_token_logps": sampling, "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    micro["distorted"] = torch.tensor([False, True])
    assert ratio.is_due(micro)
    log = ratio.complete(micro, logps)
    assert not ratio.is_due(micro)
    found = micro["importance_sampling_ratio"]
    assert torch.allclose(found[0, :3], torch.tensor([0.0, 0.5, 0.0])) and (found[1] == 1).all()
    figures = {name.removeprefix("sampling/"): value for name, value in log.items()}
    assert figures["importance_sampling_ratio/max"] == pytest.approx(0.5) and len(figures) == 5
    assert figures["sampling_logp_difference/max"] == pytest.approx(math.log(8))
    for stale in ([0, 0], [3, 4]):  # the ratio corrects for earlier weights as well
        again: Any = {**micro, "stale_tokens": torch.tensor(stale)}
        ratio.complete(again, logps)
        assert torch.equal(again["importance_sampling_ratio"], found)


def test_one_step_ahead_the_ratio_is_that_of_the_two_policies():
    """A policy with three tokens and the logits z is moved by one step of its own; weights 0 sampled, weights 1 learn.
    The probabilities are written out; float64 leaves their ratios equal to 12 digits.
    """
    logits_2V = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.2, -0.3]], dtype=torch.float64)
    tokens_BC = torch.tensor([[0, 1], [2, 0]])
    logps_2BC = logits_2V.log_softmax(dim=-1)[:, tokens_BC]
    sampled, learning = logps_2BC
    ratio = importance.importance_ratio(
        learning, sampled, torch.tensor([[1, 1], [1, 0]]), mode="token_truncate", clip_min=None, clip_max=None
    )
    before, after = ([math.exp(z) for z in row] for row in logits_2V.tolist())
    chances = [[one / sum(row) for one in row] for row in (before, after)]
    by_hand = [[chances[1][token] / chances[0][token] for token in row] for row in tokens_BC.tolist()]
    by_hand[1][1] = 1.0  # a padded place
    assert torch.allclose(ratio, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=0)
