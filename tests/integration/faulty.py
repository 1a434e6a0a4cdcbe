"""The training command, in which things go wrong on purpose at given steps.

`FAULTS=nan:2:1,drift:3 accelerate launch ... -m tests.integration.faulty` makes the loss NaN at
step 2 on rank 1, and lets the engine drift at step 3. A fault is `name:step`, or `name:step:rank`
for one rank alone. Steps are counted from 1, as they are logged.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# patches a place (by pytest's MonkeyPatch); the fault happens there while `due()` is true
Fault = Callable[[Any, Callable[[], bool]], None]


@contextmanager
def inject_faults(faults: str) -> Iterator[None]:
    """Let these faults happen inside the block, to whatever trainer runs.

    `faults`: `name:step[:rank]`, with commas between several. Without a rank the fault happens on
    all of them.
    """
    from pytest import MonkeyPatch

    from adora_vl.training.guards import GenerationGuard

    patches = MonkeyPatch()
    current = {"step": 1}
    stock_check = GenerationGuard.refuse_unusable

    def record_step(self: Any, rows: Any, step: int) -> None:  # what every generation begins with
        current["step"] = step + 1
        stock_check(self, rows, step)

    patches.setattr(GenerationGuard, "refuse_unusable", record_step)

    def is_step_due(step: int, on_this_rank: bool) -> bool:
        return on_this_rank and current["step"] == step

    for fault in filter(None, faults.split(",")):
        name, step, *rank = fault.split(":")
        on_this_rank = not rank or os.environ.get("RANK", "0") == rank[0]
        FAULT_BY_NAME[name](patches, partial(is_step_due, int(step), on_this_rank))
    try:
        yield
    finally:
        patches.undo()


def _make_loss_nan(patches: Any, is_due: Callable[[], bool]) -> None:
    """Make a loss that is not a number."""
    from trl import GRPOTrainer

    stock = GRPOTrainer._compute_loss
    patches.setattr(
        GRPOTrainer, "_compute_loss", lambda *args: stock(*args) * (torch.nan if is_due() else 1.0)
    )


def _enlarge_ratio(patches: Any, is_due: Callable[[], bool]) -> None:
    """Make a policy that has run away from the one that sampled."""
    from adora_vl.training import guards

    stock = guards.largest_ratio
    patches.setattr(
        guards, "largest_ratio", lambda *args: stock(*args) * (1e6 if is_due() else 1.0)
    )


def _enlarge_drift(patches: Any, is_due: Callable[[], bool]) -> None:
    """Make an engine that does not have the trainer's weights."""
    from adora_vl.rollout import importance

    stock = importance.drift_sums
    # The sums of this rank alone, before they are gathered.
    patches.setattr(
        importance,
        "drift_sums",
        lambda *args: stock(*args) + torch.tensor([1e9, 0.0, 0.0]) * is_due(),
    )


def _break_generation(patches: Any, is_due: Callable[[], bool]) -> None:
    """Make an engine that dies over its requests."""
    from adora_vl.utils.launch import prepare_engine_environment

    prepare_engine_environment()  # the next module imports vLLM
    from adora_vl.rollout import llm, rollouts

    stock = rollouts.merge_requests
    patches.setattr(
        llm,
        "merge_requests",
        lambda requests: raise_engine_error() if is_due() else stock(requests),
    )


def _break_weight_sync(patches: Any, is_due: Callable[[], bool]) -> None:
    """Make an engine that dies over new weights."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock = GPUModelRunner.reload_weights
    patches.setattr(
        GPUModelRunner,
        "reload_weights",
        lambda *a, **k: raise_engine_error() if is_due() else stock(*a, **k),
    )


def raise_engine_error(*args: Any, **kwargs: Any) -> Any:
    """Raise the error that an engine's core raises when it dies."""
    raise ValueError("the engine core died\nits second line")


def _fill_disk(patches: Any, is_due: Callable[[], bool]) -> None:
    """Raise the error of a full disk while a checkpoint is written."""
    from adora_vl.checkpoint import store
    from adora_vl.utils.files import replace_file as stock

    def write(*args: Any) -> None:
        if is_due():
            raise OSError(errno.ENOSPC, "No space left on device")
        stock(*args)

    patches.setattr(store, "replace_file", write)


def _break_reward(patches: Any, is_due: Callable[[], bool]) -> None:
    """Make a reward function that raises."""
    from adora_vl.rewards import safe_call

    stock = safe_call.check_returned_rewards

    def check_or_raise(*args: Any) -> Any:
        if is_due():
            raise ZeroDivisionError("the reward's own mistake")
        return stock(*args)

    patches.setattr(safe_call, "check_returned_rewards", check_or_raise)


FAULT_BY_NAME: dict[str, Fault] = {
    "nan": _make_loss_nan,
    "ratio": _enlarge_ratio,
    "drift": _enlarge_drift,
    "generate": _break_generation,
    "sync": _break_weight_sync,
    "disk": _fill_disk,
    "reward": _break_reward,
}


def start_in_turn(arguments: list[str], starts: list[str]) -> int:
    """Start the command once for each entry of `starts`, all with the first one's engine.

    An entry is `FAULTS [argument ...]`. Prints `start N ended with CODE` for each, and returns the
    last code.
    """
    from adora_vl import train

    build = train.build_trainer
    trainers: list[Any] = []

    def build_once(run: Any) -> Any:
        if trainers:
            # the new start has forgotten the accelerator of the one before
            trainers[0].create_accelerator_and_postprocess()
        else:
            trainers.append(build(run))
        trainer = trainers[0]
        trainer.train_dataset = run.data.train_dataset
        trainer.run = run
        trainer.parts.skip_bad_steps.bad_steps_in_a_row = 0
        trainer.parts.skip_bad_steps.stop_reason = None
        # as in a new process
        trainer._step = 0
        trainer._micro_steps_of_generation = range(0)
        trainer.parts.sampler.synced_step = -1
        trainer.parts.checkpoint_writer.last_saved_step = None
        trainer.parts.checkpoint_writer.resumed_from = None
        trainer.callback_handler.callbacks = [  # without those of the command
            callback
            for callback in trainer.callback_handler.callbacks
            if type(callback).__name__ not in ("StopOnSignal", "Speak")
        ]
        return trainer

    train.build_trainer = build_once
    code = 0
    for number, start in enumerate(starts):
        faults, *extra_arguments = start.split()
        # `-` stands for no fault
        with contextlib.redirect_stderr(sys.stdout), inject_faults(faults.strip("-")):
            code = train.main([*arguments, *extra_arguments])
        print(f"start {number} ended with {code}", flush=True)
    return code


def main() -> int:
    """Run the training command with the faults of the environment variable `FAULTS`.

    Where `STARTS` is set, run it once for each of its entries, which have their own faults.
    """
    from adora_vl.train import main as train

    if "STARTS" in os.environ:
        return start_in_turn(sys.argv[1:], os.environ["STARTS"].split(";"))
    with inject_faults(os.environ["FAULTS"]):
        return train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
