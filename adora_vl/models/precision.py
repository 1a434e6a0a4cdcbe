"""Restores computed buffers that a cast has rounded, and checks them before the first step.

Under ZeRO-3 DeepSpeed's `zero.Init` gives every float tensor that a constructor creates the
training dtype, and `model.to(torch.bfloat16)` casts buffers along with the weights. In bfloat16 the
rotary frequencies are off by up to 0.4 %. The error of an angle grows with the distance, to radians
after some 1,000 tokens (`docs/rollouts.md`).
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.utils.errors import RunError

ROTARY_BUFFER_NAME = "inv_freq"


# The models by their role, "policy" and "reference"; None where there is no reference
ModelsByRole = Mapping[str, nn.Module | None]


def restore_buffers(model: nn.Module) -> None:
    """Recompute every computed float buffer, such as rotary frequencies, from its module's config.

    A cast such as `model.to(torch.bfloat16)` may have rounded it. Two kinds of buffers stay as they
    are: persistent ones, which come from a checkpoint, and those of a module that needs more than
    its config to be built.
    """
    for _, buffer, expected_values in _computed_buffers(model):
        if expected_values is None:  # the module needs more than its config to be built
            continue
        has_right_dtype = buffer.dtype == expected_values.dtype
        # `torch.equal` raises for tensors of two dtypes, so these are compared first.
        if not has_right_dtype or not torch.equal(buffer.cpu(), expected_values):
            buffer.data = expected_values.to(buffer.device)


def describe_wrong_buffers(model: nn.Module) -> list[str]:
    """Return a line for every computed float buffer that differs from what its config gives.

    A cast has rounded such a buffer. For example: `rotary.inv_freq is bfloat16, not float32`. If a
    module needs more than its config to be built, its expected values are unknown. Then only the
    dtype of its rotary buffers is checked, which has to be float32.
    """
    lines = []
    for name, buffer, expected_values in _computed_buffers(model):
        expected_dtype = torch.float32 if expected_values is None else expected_values.dtype
        has_known_dtype = expected_values is not None or ROTARY_BUFFER_NAME in name
        if has_known_dtype and buffer.dtype != expected_dtype:
            lines.append(f"{name} is {dtype_name(buffer.dtype)}, not {dtype_name(expected_dtype)}")
        elif expected_values is not None and not torch.equal(buffer.cpu(), expected_values):
            lines.append(f"{name} has other values than its config gives")
    return lines


class RefuseWrongBuffers(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Stops a training before its first update if a cast rounded a computed buffer of a model.

    The models are the policy and the reference.
    """

    def __init__(self, models: ModelsByRole) -> None:
        self.models = models
        self._has_checked_again = False  # set before the first update

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check both models, which DeepSpeed or accelerate has prepared by now. Collective.

        Raises `RunError` on all ranks, if any rank has a wrong buffer.
        """
        # Every rank gets the lines of all ranks, so that all of them stop.
        lines = gather_object(describe_wrong_buffers_by_role(self.models))
        if lines:
            count_note = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            why = "The model would learn under other constants than it is used with."
            raise RunError(f"before the first step: {lines[0]}{count_note}. {why} {CAST_REMEDY}")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the buffers once more before the first update, and not before later ones.

        Some casts come after the training has begun, such as TRL's for continuous batching.
        """
        if not self._has_checked_again:
            self.on_train_begin(args, state, control)
        self._has_checked_again = True


CAST_REMEDY = (
    "Something casts buffers after the model was built: look at data_types.buffer_dtype in "
    "DeepSpeed's config, and for .to(dtype) in code of your own."
)


def describe_wrong_buffers_by_role(models: ModelsByRole) -> list[str]:
    """Return the lines of `describe_wrong_buffers` for several models.

    Each line begins with the role of its model.

    `models`: by their role, such as `policy`; None for a role without a model.
    """
    lines = []
    for role, model in models.items():
        if model is not None:
            lines += [f"{role}: {line}" for line in describe_wrong_buffers(model)]
    return lines


class _ComputedBuffer(NamedTuple):
    """A float buffer that a module computes when it is built, such as rotary frequencies."""

    name: str  # in the model, such as `model.rotary_emb.inv_freq`
    buffer: Tensor
    expected_values: Tensor | None  # None where the module needs more than its config to be built


def _computed_buffers(model: nn.Module) -> Iterator[_ComputedBuffer]:
    """Yield every computed float buffer of a model with the values that it should have.

    A computed buffer is a non-persistent one: no checkpoint contains it, so the module computes it
    when it is built. To get the expected values, the module is built a second time from its config.
    """
    for prefix, module in model.named_modules():
        computed_buffers = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and name in module._non_persistent_buffers_set
        }
        expected_by_name: dict[str, Tensor] = {}
        config = getattr(module, "config", None)
        has_parameters = next(module.parameters(), None) is not None
        # A module with parameters is not built again: it is a large part of the model.
        if computed_buffers and config is not None and not has_parameters:
            # A `TypeError` says that the constructor needs more than a config.
            with torch.device("cpu"), suppress(TypeError):
                expected_by_name = dict(type(module)(config).named_buffers(recurse=False))
        for name, buffer in computed_buffers.items():
            full_name = f"{prefix}.{name}" if prefix else name
            yield _ComputedBuffer(full_name, buffer, expected_by_name.get(name))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configs and messages, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
