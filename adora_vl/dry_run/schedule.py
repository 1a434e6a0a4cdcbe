"""The learning rate over the run, as Transformers' own schedule gives it."""

from __future__ import annotations

from typing import Any

from adora_vl.config.optimizer import is_curve, schedule_of

_ANY_LENGTH = 1000  # where the number of updates is not known; without a warmup in steps the curve is the same


def learning_rates(config: Any, updates: int | None) -> dict[str, float] | None:
    """The rate at the first, the middle and the last update; None for a schedule that depends on the training."""
    total = updates or _ANY_LENGTH
    schedule = schedule_of(config, total)
    if not is_curve(schedule):
        return None
    places = {"first": 0, "middle": total // 2, "last": total - 1}
    return {name: config.learning_rate * schedule.lr_lambdas[0](step) for name, step in places.items()}


def schedule_name(config: Any) -> str:
    """The name of the schedule as the config spells it."""
    return str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))


def learning_rate_line(config: Any, updates: int | None) -> str:
    """The schedule's name and its curve, in words."""
    rates = learning_rates(config, updates)
    if rates is None:
        return f"Learning rate: {schedule_name(config)} from {config.learning_rate:g} on, as the training goes."
    return (
        f"Learning rate: {schedule_name(config)}, {rates['first']:.3g} at the first update, {rates['middle']:.3g} "
        f"half-way, {rates['last']:.3g} at the last."
    )
