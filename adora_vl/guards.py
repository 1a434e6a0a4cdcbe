"""Steps whose gradients are not finite: skipped and counted, and a run of them ends the training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    from adora_vl.trainer import AdoraGRPOTrainer


class SkipBadSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """A NaN in one batch would stay in Adam's moments for good, so such a step leaves weights and optimizer alone.

    After `patience` of them in a row the run saves and stops (`reason` says why). DeepSpeed keeps its gradients to
    itself and has taken the step by then: there the first such step stops the run, and what it spoilt is not saved.
    """

    def __init__(self, trainer: AdoraGRPOTrainer, patience: int) -> None:
        self.trainer, self.patience = trainer, patience
        self.in_a_row = 0
        self.reason: str | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """All ranks see the same reduced gradients, and so decide alike."""
        if self.trainer.is_deepspeed_enabled:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]) if parameters else torch.zeros(())
        bad = not math.isfinite(norm)
        self.trainer.log_figure("adora/skipped_steps", float(bad))
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if not bad:
            return
        for parameter in parameters:
            parameter.grad = None
        if self.in_a_row >= self.patience:
            self.reason = (
                f"{self.in_a_row} steps in a row had gradients that are not finite; the weights are those of before. "
                "Likely causes: a reward that is not finite, float16, or a learning rate that is too high"
            )
            control.should_save = control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.is_deepspeed_enabled:
            return
        norm = self.trainer.model_wrapped.get_global_grad_norm()
        if norm is not None and not math.isfinite(norm):
            self.reason = (
                f"the gradients of step {state.global_step} are not finite and DeepSpeed has applied them; go on from "
                "the newest checkpoint with a lower learning rate, or look at the rewards of this step"
            )
            control.should_save, control.should_training_stop = False, True
