"""Optimizer and schedule are tried on one parameter: Transformers would refuse them when the weights are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, get_scheduler

from adora_vl.config.values import check_finite
from adora_vl.errors import UserError, in_one_line

_ANY_LENGTH = 1000  # updates, where their number is not known
_NEED_A_MODEL = ("galore", "apollo", "lomo", "adalomo")  # optimizers that cannot be tried without one


def schedule_of(config: Any, updates: int) -> Any:
    """The schedule of a run with so many updates, as Transformers makes it, on one parameter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    return get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )


def is_curve(schedule: Any) -> bool:
    """Whether the rate depends on the step alone, and not on how the training goes."""
    return isinstance(schedule, LambdaLR)


def check_optimizer(config: Any) -> None:
    """Raises `UserError` for an optimizer that is not installed here, or does not take its arguments."""
    name = str(getattr(config.optim, "value", config.optim))
    for pair in (config.optim_args or "").replace(" ", "").split(",") if config.optim_args else ():
        key, equals, value = pair.partition("=")
        if not (key and equals and value) or value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            raise UserError(f"optim_args: {config.optim_args!r} is not NAME=VALUE,NAME=VALUE with finite numbers")
    try:
        made = Trainer.get_optimizer_cls_and_kwargs(config)
        if isinstance(made[0], type) and issubclass(made[0], torch.optim.Optimizer):
            made[0]([torch.nn.Parameter(torch.zeros(1))], **made[1])
    except ImportError as error:
        raise UserError(f"optim: {name} is not installed ({in_one_line(error)}); use adamw_torch") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if not name.startswith(_NEED_A_MODEL):
            raise UserError(f"optim: {name} cannot be used here ({in_one_line(error)}); use adamw_torch") from error


def check_schedule(config: Any) -> None:
    """Raises `UserError` for a schedule that Transformers cannot make of its arguments, or that takes none."""
    name = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    updates = config.max_steps if config.max_steps > 0 else _ANY_LENGTH
    given = dict(config.lr_scheduler_kwargs or {})
    check_finite("lr_scheduler_kwargs", given)
    if given and name.startswith("constant"):  # Transformers does not look at them
        raise UserError(f"lr_scheduler_kwargs: {given} has no meaning for lr_scheduler_type: {name}; leave it out")
    try:
        schedule = schedule_of(config, updates)
        if is_curve(schedule):
            schedule.lr_lambdas[0](updates // 2)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise UserError(
            f"lr_scheduler_kwargs: {given} does not fit lr_scheduler_type: {name} ({in_one_line(error)})"
        ) from error
