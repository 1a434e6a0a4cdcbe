"""Callbacks around the optimizer's steps: skip bad ones, and scale the learning rate."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.training.guards import RatioGuard
from adora_vl.types import StepContext

MOST_BAD_STEPS = 3  # in a row, after which a run stops


class SkipBadSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Skips optimizer steps whose gradients are not finite.

    A NaN in one batch would stay in Adam's moments for good, so such a step leaves weights and
    optimizer alone.

    After `MOST_BAD_STEPS` of them in a row the run saves and stops, and `reason` says why.
    DeepSpeed (0.19.8) finds and skips such a step itself, on all ranks, before a callback sees it:
    there it is only counted. With float16 its search for a loss scale consists of such steps and
    ends with an error of its own, so they do not stop a run.
    """

    def __init__(
        self, context: StepContext, ratios: RatioGuard, deepspeed: Callable[[], Any] | None
    ) -> None:
        """Build the callback.

        Args:
            context: what every part of a training step is built from.
            ratios: says whether an importance ratio made the step bad.
            deepspeed: returns the model in DeepSpeed's engine, which exists once the training has
                begun; None without DeepSpeed.
        """
        self.patience = (
            math.inf if deepspeed is not None and context.config.fp16 else MOST_BAD_STEPS
        )
        self.ratios = ratios
        self.log = context.log
        self.deepspeed = deepspeed
        self.accelerator = context.accelerator
        self.in_a_row = 0
        self.reason: str | None = None

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer,
        **kwargs: object,
    ) -> None:
        """Drop gradients that are not finite, without DeepSpeed.

        All ranks see the same reduced gradients, and so decide alike.
        """
        if self.deepspeed is not None:
            return
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = (
            torch.nn.utils.get_total_norm([p.grad for p in parameters])
            if parameters
            else torch.zeros(())
        )
        bad = not math.isfinite(norm)
        if bad:
            for parameter in parameters:
                parameter.grad = None
        self._count(bad, control)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Count steps that DeepSpeed has skipped: its norm is infinite there."""
        if self.deepspeed is None:
            return
        norm = self.deepspeed().get_global_grad_norm()  # of all ranks
        bad = norm is not None and not math.isfinite(norm)
        if bad and not self.accelerator.optimizer_step_was_skipped:
            self.reason = (
                f"the gradients of step {state.global_step} are not finite and DeepSpeed has "
                "applied them (its check_grad_overflow is off?); go on from the newest "
                "checkpoint"
            )
            control.should_save = False
            control.should_training_stop = True
            return
        self._count(bad, control)

    def _count(self, bad: bool, control: TrainerControl) -> None:
        """Count a step, and stop the run after too many bad ones in a row."""
        self.log("adora/skipped_steps", float(bad))
        self.in_a_row = self.in_a_row + 1 if bad else 0
        ratio = self.ratios.take()
        if self.in_a_row < self.patience:
            return
        if ratio is None:
            why = "had gradients that are not finite"
            causes = "a reward that is not finite, float16, or a learning rate that is too high"
        else:
            bound = self.ratios.bound
            why = (
                f"were skipped: the largest importance ratio of the last is {ratio:.3g} "
                f"(adora_max_ratio: {bound})"
            )
            causes = "a learning rate that is too high, or too many optimizer steps per generation"
        self.reason = (
            f"{self.in_a_row} steps in a row {why}; the weights are those of before. Likely "
            f"causes: {causes}"
        )
        control.should_save = True
        control.should_training_stop = True


class ScaledRate(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Multiplies the rate of every parameter group for the time of one optimizer step.

    Afterwards the rates are restored to the bit. Multiplying advantages would not do: Adam divides
    by the size of the gradient, so a factor that stays the same over the steps changes nothing.
    """

    def __init__(self, factor: Callable[[], float]) -> None:
        """Build the callback.

        `factor` returns the factor of the coming step; 1 leaves the rates alone.
        """
        self.factor = factor
        self._rates_before: list[float] = []

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer,
        **kwargs: object,
    ) -> None:
        """Multiply the rates."""
        factor = self.factor()
        self._rates_before = []
        if factor != 1.0:
            self._rates_before = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer,
        **kwargs: object,
    ) -> None:
        """Restore the rates."""
        for group, rate in zip(optimizer.param_groups, self._rates_before, strict=False):
            group["lr"] = rate
        self._rates_before = []
