"""What a checkpoint knows of callbacks: their states, how training ends, the end of an epoch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    IntervalStrategy,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from adora_vl.checkpoint.run_files import read_run_manifest
from adora_vl.checkpoint.store import read_checkpoint_manifest

# Key of a checkpoint's manifest: whether a callback had ended the training when it was written
ENDED_KEY = "ended_by_callback"


def restore_callback_states(
    callbacks: Sequence[TrainerCallback], saved_states: Mapping[str, Any]
) -> None:
    """Give callbacks the attributes that they had when a checkpoint was written.

    An example is how often the metric of early stopping has not improved. Arguments, such as its
    patience, stay those that the user has set now. A callback that the checkpoint does not know
    begins anew.

    Args:
        callbacks: those of the trainer.
        saved_states: what `TrainerState.stateful_callbacks` was then, by the name of a class of
            callbacks. A class with one callback has a state, a class with several a list of states.
            Transformers appends to this list at each save, so the newest states are last.
    """
    callbacks_by_class: dict[str, list[TrainerCallback]] = defaultdict(list)
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            callbacks_by_class[type(callback).__name__].append(callback)
    for name, callbacks_of_class in callbacks_by_class.items():
        state_or_states = saved_states.get(name, [])
        states = state_or_states if isinstance(state_or_states, list) else [state_or_states]
        newest_states = states[-len(callbacks_of_class) :]
        # Not strict: the checkpoint may know fewer callbacks of this class.
        for callback, state in zip(callbacks_of_class, newest_states, strict=False):
            vars(callback).update(state["attributes"])


def was_ended_by_callback(checkpoint: Path, callbacks: Sequence[TrainerCallback]) -> bool:
    """Return whether a callback ended the run at this checkpoint, so that no step is left.

    A run that was killed after such a checkpoint ends there, as it would have done. Early stopping
    is final, unless it has more patience now. Any other run that has ended in order goes on, as
    with Transformers: its callback may have been a limit of time, and more of it is granted.

    `callbacks`: those of the trainer, with the states of the checkpoint.
    """
    if not read_checkpoint_manifest(checkpoint).get(ENDED_KEY, False):
        return False
    status = read_run_manifest(checkpoint.parent).get("status")
    was_killed = status not in (None, "finished")
    if was_killed:
        return True
    for callback in callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            misses = callback.early_stopping_patience_counter
            if misses >= callback.early_stopping_patience:
                return True
    return False


class EpochEnd(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Saves the checkpoint of an epoch's last step after the figures of the epoch are complete.

    Transformers writes it when the step is done, and then logs and evaluates the epoch. A run that
    is killed in between would resume with the next epoch, without these figures. So the checkpoint
    waits for them, which concerns runs that log or evaluate by the epoch.

    Where a signal or an error stops a run within an epoch, Transformers would log, evaluate and
    save as at its end. The resumed run comes to that end later, so nothing is done here.
    """

    def __init__(self) -> None:
        """Begin without a checkpoint that waits."""
        self._saves_later = False
        # The step of the newest checkpoint, and whether the training had ended by then.
        self._saved_step = -1
        self._had_ended_at_save = False

    def note_save(self, step: int, *, ended: bool) -> None:
        """Note that a checkpoint is written, before the callbacks hear of it.

        `ended`: whether the training has ended by now. A signal or an error stops the training only
        after its checkpoint is written, so `ended` is false then, and the run can go on later.
        """
        self._saved_step = step
        self._had_ended_at_save = ended

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Let the checkpoint of an epoch's last step wait for the epoch's end."""
        figures_by_epoch = IntervalStrategy.EPOCH in (args.logging_strategy, args.eval_strategy)
        ends_epoch = (
            float(state.epoch).is_integer()
            or control.should_epoch_stop
            or control.should_training_stop
        )
        if control.should_save and figures_by_epoch and ends_epoch:
            control.should_save = False
            self._saves_later = True

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Save the checkpoint that has waited; leave out the end of an epoch that is not over."""
        if self._saves_later:
            control.should_save = True
            self._saves_later = False
        is_saved = self._saved_step == state.global_step
        goes_on_later = control.should_training_stop and is_saved and not self._had_ended_at_save
        if goes_on_later and not float(state.epoch).is_integer():
            control.should_log = False
            control.should_evaluate = False
            control.should_save = False
