"""Steps that are not finite are skipped and counted, and a run of them ends the training; other errors say where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from adora_vl.errors import EngineError, RolloutError, RunError, UserError, in_one_line

if TYPE_CHECKING:
    from adora_vl.trainer import AdoraGRPOTrainer


@contextmanager
def located(trainer: AdoraGRPOTrainer) -> Iterator[None]:
    """Around the training: an error of the engine, or one that nobody expected, says at which step it happened and
    what a new start goes on from.
    """
    try:
        yield
    except EngineError as error:
        cause: BaseException = error.__cause__ or error
        raise RunError(f"{_place(trainer)}: {error}; {trainer.where_to_go_on()}") from cause
    except (RolloutError, RunError, UserError):
        raise
    except Exception as error:
        raise RunError(f"{_place(trainer)}: {in_one_line(error)}; {trainer.where_to_go_on()}") from error


def _place(trainer: AdoraGRPOTrainer) -> str:
    return f"step {trainer.state.global_step + 1}"


class SkipBadSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """A NaN in one batch would stay in Adam's moments for good, so such a step leaves weights and optimizer alone.

    After `patience` of them in a row the run saves and stops (`reason` says why). DeepSpeed (0.19.8) finds and skips
    such a step itself, with ZeRO on all ranks, before a callback sees it: there it is only counted. With float16 its
    search for a loss scale consists of such steps and ends with an error of its own, so there they do not stop a run.
    """

    def __init__(self, trainer: AdoraGRPOTrainer, patience: int) -> None:
        self.trainer = trainer
        self.patience = math.inf if trainer.is_deepspeed_enabled and trainer.args.fp16 else patience
        self.in_a_row = 0
        self.reason: str | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """All ranks see the same reduced gradients, and so decide alike."""
        if self.trainer.is_deepspeed_enabled:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]) if parameters else torch.zeros(())
        bad = not math.isfinite(norm)
        if bad:
            for parameter in parameters:
                parameter.grad = None
        self._count(bad, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """DeepSpeed's norm is that of all ranks, infinite where it has skipped the step."""
        if not self.trainer.is_deepspeed_enabled:
            return
        norm = self.trainer.model_wrapped.get_global_grad_norm()
        bad = norm is not None and not math.isfinite(norm)
        if bad and not self.trainer.accelerator.optimizer_step_was_skipped:
            self.reason = (
                f"the gradients of step {state.global_step} are not finite and DeepSpeed has applied them (its "
                "check_grad_overflow is off?); go on from the newest checkpoint"
            )
            control.should_save, control.should_training_stop = False, True
            return
        self._count(bad, control)

    def _count(self, bad: bool, control: Any) -> None:
        self.trainer.log_figure("adora/skipped_steps", float(bad))
        self.in_a_row = self.in_a_row + 1 if bad else 0
        ratio, self.trainer.exploded_ratio = self.trainer.exploded_ratio, None
        if self.in_a_row < self.patience:
            return
        bound = self.trainer.args.adora_max_ratio
        if ratio is None:
            why = "had gradients that are not finite"
            causes = "a reward that is not finite, float16, or a learning rate that is too high"
        else:
            why = f"were skipped: the largest importance ratio of the last is {ratio:.3g} (adora_max_ratio: {bound})"
            causes = "a learning rate that is too high, or too many steps a generation"
        self.reason = f"{self.in_a_row} steps in a row {why}; the weights are those of before. Likely causes: {causes}"
        control.should_save = control.should_training_stop = True
