"""Metrics of an optimizer step are over all of it, however it is divided into micro-batches."""

import pytest
import torch
from trl import GRPOTrainer

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.trainer import AdoraGRPOTrainer
from tests.support.tiny_run import train_tiny_run

pytestmark = pytest.mark.slow


def read_steps(run):
    """Return the lines of the log that are of training steps."""
    lines = read_metrics(run / METRICS_FILE)
    return [line for line in lines if line["kind"] == "train"]


def test_the_entropy_is_the_mean_over_the_tokens_of_a_step(tmp_path, monkeypatch):
    """The logged entropy of a step is the sum over its tokens, divided by their number.

    The mean over micro-batches would be another, since they have unequal numbers of tokens.
    """
    entropies_and_masks: list[tuple[torch.Tensor, torch.Tensor]] = []
    compute_entropies = AdoraGRPOTrainer._get_per_token_logps_and_entropies
    compute_loss = GRPOTrainer._compute_loss
    last_entropies: list[torch.Tensor] = []

    def record_entropies(trainer, *args, **kwargs):
        outputs = compute_entropies(trainer, *args, **kwargs)
        if kwargs.get("compute_entropy"):
            last_entropies[:] = [outputs[1].detach().clone()]
        return outputs

    def record_mask(trainer, model, inputs):
        loss = compute_loss(trainer, model, inputs)
        entropies_and_masks.append((last_entropies[0], inputs["completion_mask"].clone()))
        return loss

    monkeypatch.setattr(AdoraGRPOTrainer, "_get_per_token_logps_and_entropies", record_entropies)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", record_mask)
    run = train_tiny_run(
        tmp_path / "out",
        max_steps=1,
        save_strategy="no",
        gradient_accumulation_steps=4,
        per_device_train_batch_size=4,
    )
    (step,) = read_steps(run)
    token_counts = []
    entropy_sums = []
    for entropies_BC, mask_BC in entropies_and_masks:
        token_counts.append(int(mask_BC.sum()))
        entropy_sums.append(float((entropies_BC * mask_BC).sum()))
    assert len(set(token_counts)) > 1
    expected = sum(entropy_sums) / sum(token_counts)
    assert step["entropy"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_policy_loss_is_the_loss_where_the_entropy_bonus_is_next_to_nothing(tmp_path, loss_type):
    """With an entropy bonus of next to nothing `policy_loss` is the loss, for each `loss_type`.

    That holds with four micro-batches a step too.
    """
    run = train_tiny_run(
        tmp_path / "out",
        max_steps=2,
        save_strategy="no",
        gradient_accumulation_steps=4,
        per_device_train_batch_size=4,
        loss_type=loss_type,
        entropy_coef=1e-9,
    )
    for step in read_steps(run):
        assert step["policy_loss"] == pytest.approx(step["loss"], rel=1e-3, abs=1e-6)


def test_the_seconds_of_a_shorter_step_are_its_own(tmp_path):
    """An epoch of five generations ends with a step of two, at which TRL's count is out of step."""
    run = train_tiny_run(
        tmp_path / "out",
        max_steps=3,
        save_strategy="no",
        gradient_accumulation_steps=3,
        steps_per_generation=1,
        adora_synthetic_rows=20,
    )
    steps = read_steps(run)
    epochs = [step["epoch"] for step in steps]

    # After three of an epoch's five generations, after all five, and after three of the next five.
    assert epochs == [
        pytest.approx(0.6),
        1.0,
        pytest.approx(1.6),
    ]
    for step in steps:
        seconds = 0.0
        for name, value in step.items():
            if name.startswith("seconds/"):
                seconds += value
        assert step["step_time"] > 0.75 * seconds
        # rounding, and what lies between the two clocks
        assert step["step_time"] <= 1.01 * seconds
