"""A config, a trainer state and an Accelerator, for tests of a part of a run alone.

Config and state are of the real classes, since a fake would go on passing after the real class has
changed. The Accelerator is a fake, since it plays several processes.
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
from adora_vl.rollout.engine_settings import EngineSettings


@cache
def _default_config() -> AdoraGRPOConfig:
    """Return a config with the defaults, made once since that takes long."""
    return AdoraGRPOConfig(output_dir="x", use_cpu=True, bf16=False)


def training_config(**keys: Any) -> AdoraGRPOConfig:
    """Return the config of a run on a CPU: the defaults, and the values of `keys`.

    The values are set as they are, without the checks and conversions of the constructor.
    """
    config = copy.copy(_default_config())
    for name, value in keys.items():
        assert hasattr(config, name), f"{name} is no key"
        setattr(config, name, value)
    return config


def checked_config(**keys: Any) -> AdoraGRPOConfig:
    """Return the config of a run on a CPU, with the checks and conversions of the constructor."""
    return AdoraGRPOConfig(
        use_cpu=True,
        bf16=False,
        output_dir="nowhere",
        max_steps=10,
        **keys,
    )


def trainer_state(step: int = 0, *, last: int = 10, is_first_rank: bool = True) -> TrainerState:
    """Return the `TrainerState` after `step` of `last` optimizer steps.

    `is_first_rank`: whether this process is the one that writes logs.
    """
    return TrainerState(global_step=step, max_steps=last, is_world_process_zero=is_first_rank)


def settings_of_engine(
    *,
    enforce_eager: bool | None = None,
    weight_folder: str | None = None,
    answer_timeout_s: float = 900.0,
    output_dir: str = ".",
) -> EngineSettings:
    """Return the settings of an engine, by default of one in this process."""
    return EngineSettings(
        dtype=None,
        revision=None,
        enforce_eager=enforce_eager,
        max_num_batched_tokens=4096,
        engine_caches_images=True,
        weight_folder=weight_folder,
        answer_timeout_s=answer_timeout_s,
        output_dir=output_dir,
    )


def _gather_of_one_process(tensor: Tensor) -> Tensor:
    """Return the tensor itself, as a gather does where there is one process."""
    return tensor


@dataclass
class FakeAccelerator:
    """A fake Accelerator of one process among `num_processes`; the other processes do not exist.

    A test may pass `gather`: it gets this process's tensor, and returns what a gather over all
    processes would. By default that is the tensor itself, as with one process. It may also set
    `sync_gradients`: whether the present micro-batch ends an optimizer step.
    """

    process_index: int = 0
    num_processes: int = 1
    gather: Callable[[Tensor], Tensor] = _gather_of_one_process
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sync_gradients: bool = True

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes."""
        return self.process_index == 0

    def pad_across_processes(self, tensor: Tensor, **_: object) -> Tensor:
        """Return the tensor itself: no other process has a longer one."""
        return tensor

    def reduce(self, tensor: Tensor, **_: object) -> Tensor:
        """Return the tensor itself: no other process has a value to add."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Return at once: the other processes are always there."""
