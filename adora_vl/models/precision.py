"""Computed buffers that a cast has rounded: restored at the build, checked before the first step.

Under ZeRO-3 DeepSpeed's `zero.Init` gives every float tensor that a constructor creates the
training dtype, and `model.to(torch.bfloat16)` casts buffers along with the weights. In bfloat16 the
rotary frequencies are off by up to 0.4 %. The error of an angle grows with the distance, to radians
after some 1,000 tokens (`docs/rollouts.md`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.utils.errors import RunError

ROTARY = "inv_freq"


# Policy and reference model by their role; None where there is no reference. A function returns
# them, since FSDP puts another object into the trainer when the training begins.
ModelsByRole = Callable[[], Mapping[str, nn.Module | None]]


def restore_buffers(model: nn.Module) -> list[str]:
    """Give every computed float buffer the value and dtype that its module's config says.

    Returns the buffers that changed. A buffer that a checkpoint contains (a persistent one) is left
    alone, and so is a module that needs more than its config to be built: `wrong_buffers` looks at
    the rotary ones among those.
    """
    restored = []
    for name, buffer, expected in _computed_buffers(model):
        if expected is None:
            continue
        is_right = buffer.dtype == expected.dtype and torch.equal(buffer.cpu(), expected)
        if not is_right:
            buffer.data = expected.to(buffer.device)
            restored.append(name)
    return restored


def wrong_buffers(model: nn.Module) -> list[str]:
    """Return a line for every computed float buffer that differs from what its config gives.

    Where a module cannot be built anew, only its rotary buffers are checked, to be float32.
    """
    lines = []
    for name, buffer, expected in _computed_buffers(model):
        expected_dtype = torch.float32 if expected is None else expected.dtype
        is_checked = expected is not None or ROTARY in name
        if is_checked and buffer.dtype != expected_dtype:
            lines.append(f"{name} is {dtype_name(buffer.dtype)}, not {dtype_name(expected_dtype)}")
        elif expected is not None and not torch.equal(buffer.cpu(), expected):
            lines.append(f"{name} has other values than its config gives")
    return lines


class RefuseWrongBuffers(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Stops a training before its first step if a cast rounded a constant of a model.

    The models are the policy and the reference.
    """

    def __init__(self, models: ModelsByRole) -> None:
        self.models = models
        self._has_updated = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check both models, which DeepSpeed or accelerate has prepared by now.

        Raises `RunError` on all ranks alike.
        """
        # collective: every rank gathers the lines of all, so that all of them stop
        lines = gather_object(wrong_in(self.models()))
        if lines:
            count_note = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            why = "The model would learn under other constants than it is used with."
            raise RunError(f"before the first step: {lines[0]}{count_note}. {why} {REMEDY}")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check once more before the first update.

        FSDP casts in its first forward pass, and TRL for continuous batching.
        """
        if not self._has_updated:
            self.on_train_begin(args, state, control)
        self._has_updated = True


REMEDY = (
    "Something casts buffers after the model was built: look at data_types.buffer_dtype in "
    "DeepSpeed's config, at buffer_dtype in FSDP's mixed precision, and for .to(dtype) in code of "
    "your own."
)


def wrong_in(models: Mapping[str, nn.Module | None]) -> list[str]:
    """Return the lines of `wrong_buffers` for models by their role, each with its role in front."""
    lines = []
    for role, model in models.items():
        if model is not None:
            lines += [f"{role}: {line}" for line in wrong_buffers(model)]
    return lines


def _computed_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield name, buffer and expected value of every non-persistent float buffer.

    The value is None where the module cannot be built from its config alone.
    """
    for prefix, module in model.named_modules():
        computed_buffers = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and name in module._non_persistent_buffers_set
        }
        expected_by_name: dict[str, Tensor] = {}
        config = getattr(module, "config", None)
        # A module with parameters would be a part of the model, or all of it; others may need more
        # than a config.
        if computed_buffers and config is not None and next(module.parameters(), None) is None:
            with torch.device("cpu"), suppress(TypeError):
                expected_by_name = dict(type(module)(config).named_buffers(recurse=False))
        for name, buffer in computed_buffers.items():
            full_name = f"{prefix}.{name}" if prefix else name
            yield full_name, buffer, expected_by_name.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configs and messages, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
