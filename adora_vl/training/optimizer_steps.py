"""Callbacks around the optimizer's steps: skip bad ones, and scale the learning rate."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.training.guards import RatioGuard
from adora_vl.types import StepContext

MAX_BAD_STEPS_IN_A_ROW = 3  # the run stops after this many


class SkipBadSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Skips optimizer steps whose gradients are not finite.

    A NaN in one batch would stay in Adam's moments for good, so such a step leaves weights and
    optimizer alone.

    After `MAX_BAD_STEPS_IN_A_ROW` of them in a row the run saves and stops, and `stop_reason` says
    why.

    DeepSpeed (0.19.8) finds and skips such a step itself, on all ranks, before a callback sees it.
    With DeepSpeed the callback only counts these steps. With float16 such steps are normal:
    DeepSpeed lowers its loss scale after steps that overflow, and raises an error of its own if
    that does not help. So with float16 and DeepSpeed no number of bad steps stops a run here.
    """

    def __init__(
        self,
        context: StepContext,
        ratio_guard: RatioGuard,
        get_deepspeed_engine: Callable[[], Any] | None,
    ) -> None:
        """Build the callback.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            ratio_guard: says whether an importance ratio made the step bad.
            get_deepspeed_engine: returns the model in DeepSpeed's engine, which exists once the
                training has begun; None without DeepSpeed.
        """
        # With float16 DeepSpeed searches a loss scale: it lowers the scale after a step that
        # overflows, so that such steps are normal, however many there are in a row.
        searches_loss_scale = get_deepspeed_engine is not None and context.config.fp16
        self.max_bad_steps = math.inf if searches_loss_scale else MAX_BAD_STEPS_IN_A_ROW
        self.ratio_guard = ratio_guard
        self.log = context.log
        self.get_deepspeed_engine = get_deepspeed_engine
        self.accelerator = context.accelerator
        self.bad_steps_in_a_row = 0
        self.stop_reason: str | None = None  # why the run has stopped, if it has
        self._weights_are_lost = False  # DeepSpeed has applied gradients that are not finite

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
        if self.get_deepspeed_engine is not None:
            return
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        is_bad = False
        if parameters:
            gradients = [parameter.grad for parameter in parameters]
            is_bad = not math.isfinite(torch.nn.utils.get_total_norm(gradients))
        if is_bad:
            # The optimizer skips parameters without a gradient.
            for parameter in parameters:
                parameter.grad = None
        self._count_step(control, is_bad=is_bad)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Count a step that DeepSpeed has skipped, since the norm of its gradients is not finite.

        If DeepSpeed has applied such gradients, the weights are lost, and the run stops unsaved.
        """
        if self.get_deepspeed_engine is None:
            return
        # The norm over all ranks; None where DeepSpeed has not computed it.
        engine = self.get_deepspeed_engine()
        gradient_norm = engine.get_global_grad_norm()
        is_bad = gradient_norm is not None and not math.isfinite(gradient_norm)
        if is_bad and not self.accelerator.optimizer_step_was_skipped:
            self.stop_reason = (
                f"the gradients of step {state.global_step} are not finite and DeepSpeed has "
                "applied them (its check_grad_overflow is off?); go on from the newest "
                "checkpoint"
            )
            self._weights_are_lost = True
            control.should_save = False
            control.should_training_stop = True
            return
        self._count_step(control, is_bad=is_bad)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Keep Transformers from saving lost weights, as it would with `save_strategy: epoch`.

        Weights are lost once DeepSpeed has applied gradients that are not finite.
        """
        if self._weights_are_lost:
            control.should_save = False

    def _count_step(self, control: TrainerControl, *, is_bad: bool) -> None:
        """Count a step, and let the run save after too many bad ones in a row.

        `on_save` then stops it, as `stop_reason` is set.

        Args:
            control: told to save, where the run is to stop.
            is_bad: whether the step was skipped, since its gradients are not finite. `RatioGuard`
                makes them so on purpose where an importance ratio is too large.
        """
        self.log("adora/skipped_steps", float(is_bad))
        self.bad_steps_in_a_row = self.bad_steps_in_a_row + 1 if is_bad else 0
        # None unless `RatioGuard` has made the gradients of this step not finite.
        exceeding_ratio = self.ratio_guard.pop_exceeding_ratio()
        if self.bad_steps_in_a_row < self.max_bad_steps:
            return
        if exceeding_ratio is None:
            fault = "had gradients that are not finite"
            causes = "a reward that is not finite, float16, or a learning rate that is too high"
        else:
            fault = (
                f"were skipped: the largest importance ratio of the last is {exceeding_ratio:.3g} "
                f"(adora_max_ratio: {self.ratio_guard.max_ratio})"
            )
            causes = "a learning rate that is too high, or too many optimizer steps per generation"
        self.stop_reason = (
            f"{self.bad_steps_in_a_row} steps in a row {fault}; the weights are those of before. "
            f"Likely causes: {causes}"
        )
        control.should_save = True

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Stop the training once the checkpoint of a run that cannot go on is written.

        Not before: a checkpoint notes whether the training has ended, and this one is to go on.
        """
        if self.stop_reason is not None:
            control.should_training_stop = True

    def bad_steps_to_save(self) -> int:
        """Return the bad steps in a row for a checkpoint.

        A run that has stopped for them begins to count anew, since its cause may be mended.
        """
        return self.bad_steps_in_a_row if self.stop_reason is None else 0


class ScaledRate(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Multiplies the learning rate of every parameter group by a factor, for one optimizer step.

    Afterwards the rates are restored to the bit. A method that scales all advantages cannot do so
    by the advantages themselves: Adam divides by the size of the gradient, so a factor on the
    gradient that stays the same over the steps would change nothing.
    """

    def __init__(self, get_factor: Callable[[], float]) -> None:
        """Build the callback.

        `get_factor` returns the factor of the coming step; 1 leaves the rates alone.
        """
        self.get_factor = get_factor
        self._rates_before: list[float] = []

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer,
        **kwargs: object,
    ) -> None:
        """Multiply the learning rates, and keep the old ones for `on_optimizer_step`."""
        factor = self.get_factor()
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
        """Restore the learning rates. There is nothing to restore where the factor was 1."""
        for group, rate in zip(optimizer.param_groups, self._rates_before, strict=False):
            group["lr"] = rate
        self._rates_before = []
