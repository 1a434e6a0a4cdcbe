"""The context that a part of a training step is built from, for tests of that part alone."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from adora_vl.rollout.rollouts import StepKey
from adora_vl.types import Batch, LogMetric, PolicyLogps, SaveNow, StepContext
from tests.support.stand_ins import training_config

# "0/0": the optimizer step, and the micro-batch within it, at which a run's first generation
# begins. A generation's position seeds which of its groups go into which optimizer step.
FIRST_GENERATION = StepKey(mode="train", step=0, micro=0).position


def no_checkpoint() -> Path:
    """Fail: the part that is tested is not to save a checkpoint."""
    raise AssertionError("nothing is to be saved")


def no_pass(batch: Batch, pixels: Tensor | None = None) -> Tensor:
    """Fail: the part that is tested is not to run the policy."""
    raise AssertionError("the policy makes no pass")


def step_context(
    log: dict[str, float] | LogMetric | None = None,
    *,
    accelerator: Any = None,
    save_now: SaveNow = no_checkpoint,
    state: TrainerState | None = None,
    policy_logps: PolicyLogps = no_pass,
    **keys: Any,
) -> StepContext:
    """Build the context of a training step; what is not an argument is as in a run on one CPU.

    Args:
        log: where logged metrics go, if a test looks at them. A dictionary keeps the last value of
            each name. A function is called with each name and value.
        accelerator: the Accelerator, or a fake of one process among several.
        save_now: saves a checkpoint; by default a test in which it is called fails.
        state: the trainer's state, by default that of a run that has not begun.
        policy_logps: makes a pass of the policy; by default a test in which it is called fails.
        keys: the keys of the config that differ from their defaults.
    """
    config = training_config(**keys)
    trainer_state = state or TrainerState()
    accelerator = Accelerator(cpu=True) if accelerator is None else accelerator
    metrics = {} if log is None else log
    log_metric = metrics.__setitem__ if isinstance(metrics, dict) else metrics

    def log_weighted(name: str, value: float, weight: float) -> None:
        """Log the figure of a micro-batch as it is, without a mean by weights."""
        log_metric(name, value)

    return StepContext(
        accelerator=accelerator,
        config=config,
        log=log_metric,
        pad_id=99,
        state=lambda: trainer_state,
        policy_logps=policy_logps,
        save_now=save_now,
        log_weighted=log_weighted,
    )
