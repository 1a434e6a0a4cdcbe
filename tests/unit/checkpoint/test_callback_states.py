"""A checkpoint knows what callbacks remember, and whether one of them has ended the training."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, IntervalStrategy, TrainerControl, TrainerState

from adora_vl.checkpoint.callback_states import (
    ENDED_KEY,
    EpochEnd,
    restore_callback_states,
    was_ended_by_callback,
)
from adora_vl.checkpoint.run_files import MADE_BY
from adora_vl.checkpoint.store import MANIFEST_FILE


def early_stopping(*, patience: int = 2, misses: int = 0) -> EarlyStoppingCallback:
    """Return a callback whose metric has not improved in this many evaluations."""
    callback = EarlyStoppingCallback(early_stopping_patience=patience)
    callback.early_stopping_patience_counter = misses
    return callback


def test_a_callback_goes_on_counting_with_the_patience_that_it_has_now():
    saved_states = {"EarlyStoppingCallback": early_stopping(patience=1, misses=1).state()}
    callback = early_stopping(patience=3)
    restore_callback_states([callback], saved_states)
    assert callback.early_stopping_patience_counter == 1
    assert callback.early_stopping_patience == 3


def test_of_two_callbacks_of_a_class_each_gets_its_newest_state():
    """Transformers appends their states to those of the save before."""
    begun = [early_stopping().state(), early_stopping().state()]
    newest = [early_stopping(misses=1).state(), early_stopping(misses=2).state()]
    callbacks = [early_stopping(), early_stopping()]
    restore_callback_states(callbacks, {"EarlyStoppingCallback": [*begun, *newest]})
    assert [callback.early_stopping_patience_counter for callback in callbacks] == [1, 2]


def test_a_callback_that_the_checkpoint_does_not_know_begins_anew():
    callback = early_stopping()
    restore_callback_states([callback], {"TrainerControl": TrainerControl().state()})
    assert callback.early_stopping_patience_counter == 0


@pytest.mark.parametrize(
    ("ended", "status", "patience", "is_over"),
    [
        (True, "running", 5, True),  # killed, whatever callback ended it
        (True, "failed", 5, True),
        (True, "finished", 1, True),  # early stopping is final
        (True, "finished", 5, False),  # more patience now, or a limit of time
        (True, None, 5, False),
        (False, "running", 1, False),
    ],
)
def test_a_run_is_over_where_a_callback_ended_it(tmp_path, ended, status, patience, is_over):
    """A run that a callback ended is over if it died then, or if early stopping has no patience.

    `ended`: what the checkpoint notes. `status`: that of the run's manifest, None without one.
    `patience`: of early stopping, whose metric has not improved once.
    """
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / MANIFEST_FILE).write_text(json.dumps({ENDED_KEY: ended}))
    if status is not None:
        manifest = {**MADE_BY, "status": status}
        (tmp_path / MANIFEST_FILE).write_text(json.dumps(manifest))
    callbacks = [early_stopping(patience=patience, misses=1)]
    assert was_ended_by_callback(checkpoint, callbacks) is is_over


def control_after_epoch(
    callback: EpochEnd, *, strategy: IntervalStrategy, epoch: float, stops_after_save: bool = False
) -> tuple[bool, TrainerControl]:
    """Let `callback` see an epoch's last step, in which a checkpoint is due, and the epoch's end.

    Returns whether the checkpoint is written in the step, and the control after the epoch's end.
    `stops_after_save`: whether the trainer stops after that checkpoint, as it does after a signal.
    """
    args: Any = SimpleNamespace(logging_strategy=strategy, eval_strategy=IntervalStrategy.NO)
    state = TrainerState(epoch=epoch, global_step=4)
    control = TrainerControl(should_save=True)
    callback.on_step_end(args, state, control)
    saves_in_step = control.should_save
    if saves_in_step:
        callback.note_save(4, ended=control.should_training_stop)
        control.should_save = False
        control.should_training_stop = stops_after_save
    # What Transformers asks for at the end of an epoch.
    control.should_log = True
    callback.on_epoch_end(args, state, control)
    return saves_in_step, control


def test_the_checkpoint_of_an_epochs_last_step_waits_for_its_figures():
    saves_in_step, control = control_after_epoch(
        EpochEnd(), strategy=IntervalStrategy.EPOCH, epoch=2.0
    )
    assert not saves_in_step
    assert control.should_log
    assert control.should_save


@pytest.mark.parametrize(
    ("strategy", "epoch"), [(IntervalStrategy.STEPS, 2.0), (IntervalStrategy.EPOCH, 1.5)]
)
def test_any_other_checkpoint_is_written_in_its_step(strategy, epoch):
    saves_in_step, control = control_after_epoch(EpochEnd(), strategy=strategy, epoch=epoch)
    assert saves_in_step
    assert not control.should_save


def test_a_run_that_a_signal_stops_within_an_epoch_does_not_log_the_epoch():
    _, control = control_after_epoch(
        EpochEnd(), strategy=IntervalStrategy.EPOCH, epoch=1.5, stops_after_save=True
    )
    assert control.should_training_stop
    assert not control.should_log
