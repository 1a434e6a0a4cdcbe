"""Stand-ins for what a part of a run is given by the rest of it, one builder for each kind.

The class of a run itself is built wherever that takes no time, since a stand-in of one's own goes
on passing after the real class has changed. Only several processes are played.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from adora_vl.config import AdoraGRPOConfig


@cache
def _defaults() -> AdoraGRPOConfig:
    return AdoraGRPOConfig(output_dir="x", use_cpu=True, bf16=False)


def training_config(**keys: Any) -> AdoraGRPOConfig:
    """Build the config of a run on a CPU with the values of `keys`, the rest at their defaults.

    The values are set as they are: what the checks of a start would do with them is left out.
    """
    config = copy.copy(_defaults())
    for name, value in keys.items():
        assert hasattr(config, name), f"{name} is no key"
        setattr(config, name, value)
    return config


def trainer_state(step: int = 0, *, last: int = 10, is_first_rank: bool = True) -> TrainerState:
    """Build the state of a trainer after `step` of `last` optimizer steps."""
    return TrainerState(global_step=step, max_steps=last, is_world_process_zero=is_first_rank)


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class FakeAccelerator:
    """The Accelerator of one process among several, of which the others are played.

    `gather` returns the tensors of all processes from this one's; without it there is this one's
    alone. Waiting takes no time.
    """

    process_index: int = 0
    num_processes: int = 1
    gather: Callable[[Tensor], Tensor] = _alone
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main_process(self) -> bool:
        """Tell whether this is the process that writes."""
        return self.process_index == 0

    def wait_for_everyone(self) -> None:
        """Return at once: the other processes are always there."""
