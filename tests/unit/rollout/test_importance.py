"""The drift of the engine from the policy, its message, and the ratio that corrects for it.

Engine and policy compute slightly different log-probabilities for the same weights. Drift is the
mean absolute difference, in nats per token. The importance ratio is the policy's probability of a
token over the engine's.
"""

import math
from typing import Any

import pytest
import torch

from adora_vl.rollout import importance
from adora_vl.rollout.rollouts import logp_or_minus_infinity
from tests.support.step_context import step_context


def drift_sums(trainer: list[float], engine: list[float], mask: list[int]) -> torch.Tensor:
    """Return the sums over a rollout's tokens from which drift is computed.

    `trainer` and `engine`: their log-probabilities of each token. `mask`: 1 for tokens that count.
    """
    return importance.drift_sums(
        torch.tensor([trainer]),
        torch.tensor([engine]),
        torch.tensor([mask]),
    )


def test_the_mean_is_over_tokens_and_not_over_ranks():
    """Drift is the mean difference over the tokens of all ranks, not the mean of their means.

    Rank 0 has three tokens with a difference of 1, and rank 1 has one of 5.
    """
    of_rank_0 = drift_sums(trainer=[1.0, 1.0, 1.0], engine=[0.0, 0.0, 0.0], mask=[1, 1, 1])
    of_rank_1 = drift_sums(trainer=[5.0, 9.0], engine=[0.0, 0.0], mask=[1, 0])
    drift = importance.merge_drift_sums(torch.stack([of_rank_0, of_rank_1]))
    assert drift.mean == pytest.approx((1 + 1 + 1 + 5) / 4)
    assert drift.largest == 5  # the masked 9 does not count


# (log-probabilities of the trainer, of the engine, the mask, the mean drift). Infinite drift is no
# agreement.
DRIFTS: dict[str, tuple[list[float], list[float], list[int], float]] = {
    "a token that the engine was not asked for is left out": (
        [1.0, 2.0],
        [math.nan, 1.5],
        [1, 1],
        0.5,
    ),
    "a policy that is NaN is no agreement": (
        [math.nan, 1.0],
        [1.0, 1.0],
        [1, 1],
        math.inf,
    ),
    "an engine that scores nothing is none": (
        [1.0, 1.0],
        [math.nan, math.nan],
        [1, 1],
        math.inf,
    ),
    "an engine that gives no number is none": (
        [1.0, 1.0],
        [-math.inf, 1.0],
        [1, 1],
        math.inf,
    ),
    "nothing sampled is no drift": (
        [1.0, 1.0],
        [0.0, 0.0],
        [0, 0],
        0.0,
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_token_without_a_log_probability_is_left_out_or_counts_as_infinite_drift(name):
    """A token that the engine was not asked for (NaN) is left out of the mean drift.

    A value of the policy or the engine that is no number makes the drift infinite, and so does an
    engine that has scored none of the tokens.
    """
    trainer, engine, mask, mean = DRIFTS[name]
    sums = drift_sums(trainer, engine, mask)
    assert importance.merge_drift_sums(sums[None]).mean == mean


def test_the_message_says_how_far_where_and_why():
    """The message of too much drift has the step, the drift, the bound, and possible causes.

    The sums are 5 nats over 2 tokens, so drift is 2.5. Steps are counted from 1 in messages.
    """
    drift = importance.merge_drift_sums(torch.tensor([[5.0, 2.0, 4.0]]))
    message = importance.drift_message(drift, bound=0.3, step=6, checkpoint="out/checkpoint-6")
    assert "step 7" in message
    assert "2.5 nats" in message
    assert "adora_max_drift is 0.3" in message
    assert "out/checkpoint-6" in message
    assert all(cause in message for cause in importance.DRIFT_CAUSES)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None])
def test_a_score_that_is_no_number_is_never_taken_for_one_that_was_not_asked_for(value):
    """A log-probability of the engine that is no number counts as infinite drift and a ratio of 0.

    vLLM gives NaN where weights overflow, and TRL's client reads that as None.
    `logp_or_minus_infinity` makes it differ from the NaN of a token without an engine's number.
    """
    logp = logp_or_minus_infinity(value)
    sums = drift_sums(trainer=[-1.0, -1.0], engine=[logp, -1.0], mask=[1, 1])
    assert importance.merge_drift_sums(sums[None]).mean == math.inf
    ratio = importance.importance_ratio(
        torch.tensor([[-1.0, -1.0]]),
        torch.tensor([[logp, -1.0]]),
        torch.ones(1, 2),
        mode="token_mask",
        clip_min=None,
        clip_max=2.0,
    )
    assert ratio.tolist() == [[0.0, 1.0]], "such a token teaches nothing"


def test_a_finite_log_probability_of_the_engine_stays():
    assert logp_or_minus_infinity(-0.5) == -0.5


RATIOS = {
    "token_truncate": [[2.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "token_mask": [[0.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "sequence_truncate": [[2.0], [0.25]],
    "sequence_mask": [[0.0], [0.25]],
}


@pytest.mark.parametrize("mode", RATIOS)
def test_the_importance_ratio_by_hand(mode):
    """A ratio above the bound of 2 becomes 2 in the "truncate" modes, and 0 in the "mask" modes.

    Row 0 has the ratios 8 and 0.5, so their product is 4. Its third token is masked. Row 1 has the
    ratios 0.25 and 1. Its first token has no log-probability of the engine, so its ratio is 1. The
    "sequence" modes give one ratio for each row, the product of those of its tokens.
    """
    logps_BC = torch.log(torch.tensor([[8.0, 0.5, 9.0], [5.0, 0.25, 1.0]]))
    sampling_BC = torch.tensor([[0.0, 0, 0], [math.nan, 0, 0]])
    mask_BC = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ratio = importance.importance_ratio(
        logps_BC,
        sampling_BC,
        mask_BC,
        mode=mode,
        clip_min=None,
        clip_max=2.0,
    )
    assert torch.allclose(ratio, torch.tensor(RATIOS[mode]))


def test_the_ratio_of_a_micro_batch_has_the_bounds_of_the_run_and_is_logged():
    """A ratio outside of the run's bounds, 0.3 and 2, is 0; metrics are of compared tokens alone.

    Row 0 has the ratios 8, 0.5 and 0.25, and a masked token. In row 1 the engine has seen another
    image, so its tokens have no score (NaN), their ratio is 1, and no metric counts them.
    """
    keys: dict[str, Any] = {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.3,
        "vllm_importance_sampling_clip_max": 2.0,
    }
    ratio = importance.ImportanceRatio(step_context(**keys))
    logps = torch.log(torch.tensor([[8.0, 0.5, 0.25, 9.0], [1.0, 1.0, 1.0, 1.0]]))
    sampling = torch.zeros(2, 4)
    sampling[1] = math.nan
    micro_batch: Any = {
        "sampling_per_token_logps": sampling,
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    }

    assert ratio.needs_ratio(micro_batch)
    metrics = ratio.add_to_batch(micro_batch, logps)
    assert not ratio.needs_ratio(micro_batch)
    ratio_BC = micro_batch["importance_sampling_ratio"]
    assert torch.allclose(ratio_BC[0, :3], torch.tensor([0.0, 0.5, 0.0]))
    assert (ratio_BC[1] == 1).all()
    value_by_metric = {metric.name.removeprefix("sampling/"): metric.value for metric in metrics}
    assert value_by_metric["importance_sampling_ratio/max"] == pytest.approx(0.5)
    assert len(value_by_metric) == 5
    assert value_by_metric["sampling_logp_difference/max"] == pytest.approx(math.log(8))
    assert {metric.weight for metric in metrics} == {3}, "the tokens that were compared"
    # Tokens that earlier weights have sampled are corrected as well.
    for stale_counts in ([0, 0], [3, 4]):
        batch_with_stale_tokens: Any = {**micro_batch, "stale_tokens": torch.tensor(stale_counts)}
        ratio.add_to_batch(batch_with_stale_tokens, logps)
        assert torch.equal(batch_with_stale_tokens["importance_sampling_ratio"], ratio_BC)


def ratio_sums_of_rank(engine_logps: list[list[float]], mask: list[list[int]]) -> torch.Tensor:
    """Return the sums of a rank from which the metrics of the importance ratio are computed.

    The policy's log-probabilities are all 0, so the ratio of a token is exp(-engine).
    """
    engine_BC = torch.tensor(engine_logps)
    mask_BC = torch.tensor(mask)
    logps_BC = torch.zeros_like(engine_BC)
    ratio_BC = importance.importance_ratio(
        logps_BC, engine_BC, mask_BC, mode="token_truncate", clip_min=None, clip_max=None
    )
    return importance.ratio_sums(ratio_BC, logps_BC, engine_BC, mask_BC)


def test_metrics_of_the_ratio_are_over_tokens_and_not_over_ranks():
    """Metrics of the ratio are means over the tokens of all ranks, here three and one.

    The one token of the second rank has a larger difference and a larger ratio.
    """
    log_2 = math.log(2)
    of_rank_0 = ratio_sums_of_rank([[0.0, 0.0, -log_2]], mask=[[1, 1, 1]])
    of_rank_1 = ratio_sums_of_rank([[-3 * log_2, -9.0, -9.0]], mask=[[1, 0, 0]])
    metrics = importance.merge_ratio_sums(torch.stack([of_rank_0, of_rank_1]))
    assert {metric.weight for metric in metrics} == {4}
    value_by_name = {metric.name.removeprefix("sampling/"): metric.value for metric in metrics}
    assert value_by_name == {
        "sampling_logp_difference/mean": pytest.approx(log_2),
        "sampling_logp_difference/max": pytest.approx(3 * log_2),
        "importance_sampling_ratio/min": 1,
        "importance_sampling_ratio/mean": pytest.approx((1 + 1 + 2 + 8) / 4),
        "importance_sampling_ratio/max": pytest.approx(8),
    }


def test_a_rank_that_can_compare_nothing_does_not_lower_the_metrics_of_the_others():
    """A rank without any score of the engine has no weight in the metrics of the ratio.

    Its rollouts have seen other images, so that the scores are missing (NaN). If no rank has one,
    the metrics are NaN.
    """
    of_rank_0 = ratio_sums_of_rank([[math.nan, math.nan]], mask=[[1, 1]])
    of_rank_1 = ratio_sums_of_rank([[-1.0, -1.0]], mask=[[1, 1]])
    for metric in importance.merge_ratio_sums(torch.stack([of_rank_0, of_rank_1])):
        assert metric.value >= 1
        assert metric.weight == 2
    for metric in importance.merge_ratio_sums(of_rank_0[None]):
        assert math.isnan(metric.value)
        assert metric.weight == 0
