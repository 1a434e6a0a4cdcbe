"""Gradients that are not finite change nothing, and do not go on for long; a save that fails loses nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl
from trl import GRPOTrainer

from adora_vl.checkpoint.store import STAGING, checkpoints
from adora_vl.errors import RunError
from adora_vl.guards import SkipBadSteps
from adora_vl.trainer import AdoraGRPOTrainer


@pytest.fixture
def training():
    """A model of two numbers, Adam, and the guard, with `step(gradient)`."""
    weights = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    logged: list[float] = []
    trainer = SimpleNamespace(is_deepspeed_enabled=False, log_figure=lambda name, value: logged.append(value))
    guard, control = SkipBadSteps(trainer, patience=2), TrainerControl()

    def step(*gradient: float) -> list[float]:
        weights.grad = torch.tensor(gradient)
        guard.on_pre_optimizer_step(None, None, control, optimizer=optimizer)
        optimizer.step()
        return weights.tolist()

    return SimpleNamespace(step=step, guard=guard, control=control, logged=logged, optimizer=optimizer, weights=weights)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_is_skipped_and_the_next_one_is_as_if_it_had_not_been(training, bad):
    before = training.step(1.0, 1.0)
    moments = {k: v.clone() for k, v in training.optimizer.state[training.weights].items()}
    assert training.step(bad, 1.0) == before
    assert all(torch.equal(training.optimizer.state[training.weights][k], v) for k, v in moments.items())
    assert training.step(1.0, 1.0) != before
    assert training.logged == [0.0, 1.0, 0.0] and training.guard.reason is None


def test_bad_steps_in_a_row_save_and_stop(training):
    training.step(1.0, 1.0)
    training.step(float("nan"), 1.0)
    assert not training.control.should_training_stop
    training.step(float("nan"), 1.0)
    assert "2 steps in a row" in training.guard.reason
    assert training.control.should_save and training.control.should_training_stop


def test_with_deepspeed_the_first_one_stops_and_nothing_is_saved():
    engine = SimpleNamespace(get_global_grad_norm=lambda: float("nan"))
    guard = SkipBadSteps(SimpleNamespace(is_deepspeed_enabled=True, model_wrapped=engine), patience=2)
    control = TrainerControl(should_save=True)
    guard.on_step_end(None, SimpleNamespace(global_step=7), control)
    assert "step 7 are not finite" in guard.reason
    assert control.should_training_stop and not control.should_save


def test_a_full_disk_while_saving_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / "checkpoint-4"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", full)
    trainer = object.__new__(AdoraGRPOTrainer)
    trainer.args, trainer.state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=4)
    with pytest.raises(RunError, match=r"checkpoint-4 could not be written .*No space left.*older checkpoints are as"):
        trainer._save_checkpoint(None, None)
    assert checkpoints(tmp_path) == [] and list((tmp_path / STAGING).iterdir()) == []
