"""The context that a part of a training step is built from, for tests of that part alone."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from adora_vl.types import Batch, LogFigure, PolicyLogps, SaveNow, StepContext
from tests.support.stand_ins import config_of


def no_checkpoint() -> Path:
    raise AssertionError("nothing is to be saved")


def no_pass(batch: Batch, pixels: Tensor | None = None) -> Tensor:
    raise AssertionError("the policy makes no pass")


def step_context(
    log: dict[str, float] | LogFigure | None = None,
    *,
    accelerator: Any = None,
    save_now: SaveNow = no_checkpoint,
    state: TrainerState | None = None,
    policy_logps: PolicyLogps = no_pass,
    **keys: Any,
) -> StepContext:
    """`keys`: those of the config that are not to be the defaults.

    `log`: gets the figures; the last one of a name.
    """
    config = config_of(**keys)
    trainer_state = state or TrainerState()
    accelerator = Accelerator(cpu=True) if accelerator is None else accelerator
    figures = {} if log is None else log
    keep = figures.__setitem__ if isinstance(figures, dict) else figures

    def keep_part(name: str, value: float, weight: float) -> None:
        keep(name, value)

    return StepContext(
        accelerator=accelerator,
        config=config,
        log=keep,
        pad_id=99,
        state=lambda: trainer_state,
        policy_logps=policy_logps,
        save_now=save_now,
        log_part=keep_part,
    )
