"""Ends the run, or skips the step, when something goes wrong: an image that cannot be read, a reward function that
fails, an engine that drifts from the policy, an importance ratio that explodes, gradients that are not finite. All
ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from adora_vl.batch import Batch, LogFigure, Row, compared_mask
from adora_vl.errors import EngineError, RolloutError, RunError, UserError, in_one_line, lost_contact
from adora_vl.rewards.safe_call import RewardFailure, safe_call
from adora_vl.rollout.drift import drift_message, drift_sums, merge_drift
from adora_vl.unreadable_images import unreadable_rows

SaveNow = Callable[[], Path]  # the checkpoint of the present step, written by all ranks unless it is there


class RowGuard:
    """Finds rows whose image cannot be read, where a generation begins: there a checkpoint is exact."""

    def __init__(self, save: SaveNow) -> None:
        self.save = save

    def check(self, rows: Sequence[Row], step: int) -> None:
        """Raises `RunError` on all ranks, with the row and the checkpoint to go on from, if any rank has such a row."""
        found = gather_object(unreadable_rows(list(rows)))
        if not found:
            return
        checkpoint = self.save()
        (row, reason), more = found[0], len({name for name, _ in found}) - 1
        raise RunError(
            f"step {step + 1}: row {row}: an image cannot be read: {reason}"
            f"{f' (and {more} more rows)' if more else ''}. Nothing of this step was applied. Repair or remove the "
            f"row, and go on with --resume_from_checkpoint {checkpoint}"
        )


class RewardGuard:
    """Ends the run where a reward function fails, hangs or returns nonsense."""

    def __init__(self, timeout: float | None, save: SaveNow, figures: dict[str, list[float]]) -> None:
        """`timeout`: `adora_reward_timeout`, seconds for a function; None is no limit. Presets have their own.

        `figures`: the values for the next log, of which those of the generation that failed are not to be saved.
        """
        self.timeout, self.save, self.figures = timeout, save, figures
        self.failures: list[RewardFailure] = []  # of this rank, in the present generation
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """Called where a generation begins."""
        self._counts = {name: len(values) for name, values in self.figures.items()}

    def around(self, functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The functions as TRL is to call them. Reward models, which are modules, stay as they are."""
        return [
            function
            if isinstance(function, torch.nn.Module)
            else safe_call(function, name, None if _has_deadlines(function) else self.timeout, self.failures)
            for function, name in zip(functions, names, strict=True)
        ]

    def check(self, step: int) -> None:
        """Raises `RunError` on all ranks, with function, row and the checkpoint to go on from, if any rank failed."""
        found = gather_object(self.failures[:])
        self.failures.clear()
        if not found:
            return
        for name, values in list(self.figures.items()):  # the generation will be made again
            del values[self._counts.get(name, 0) :]
            if not values:
                del self.figures[name]  # TRL's log takes the mean of each
        checkpoint = self.save()
        failure = RewardFailure(*found[0])
        raise RunError(
            f"step {step + 1}: reward {failure.function}: {failure.row}: {failure.reason}. Nothing of this step was "
            f"applied. Repair the function, and go on with --resume_from_checkpoint {checkpoint}"
        )


def _has_deadlines(function: Any) -> bool:
    """Whether a function is one of ours: those bound the time for each answer, or for each call of a judge."""
    return str(getattr(function, "__module__", "")).startswith("adora_vl.rewards.")


class DriftGuard:
    """Stops the run where engine and trainer disagree on the sampled tokens."""

    def __init__(self, accelerator: Accelerator, bound: float | None, save: SaveNow, log: LogFigure) -> None:
        """`bound`: nats per token on average; None only logs."""
        self.accelerator, self.bound, self.save, self.log = accelerator, bound, save, log

    def check_batch(self, batch: Batch, step: int, logps_BC: Tensor | None = None) -> None:
        """As `check`, for the log-probabilities of a batch. Called in the first pass that scores these rollouts.

        `logps_BC`: the policy's log-probabilities, by default the old ones of the batch. If they or the engine's are
        missing, nothing is compared.
        """
        logps_BC = logps_BC if logps_BC is not None else batch.get("old_per_token_logps")
        sampling_BC = batch.get("sampling_per_token_logps")
        if logps_BC is not None and sampling_BC is not None:
            self.check(logps_BC, sampling_BC, compared_mask(batch), step)

    def check(self, logps_BC: Tensor, sampling_BC: Tensor, mask_BC: Tensor, step: int) -> None:
        """The policy's log-probabilities against the engine's. Raises `RolloutError` on all ranks together."""
        sums_3 = drift_sums(logps_BC, sampling_BC, mask_BC)
        sums_R3 = self.accelerator.gather(sums_3[None])
        if not sums_R3[:, 1].any():  # nothing that could be compared, as where all rollouts saw distorted images
            return
        drift = merge_drift(sums_R3)
        self.log("adora/drift", drift.mean)
        if self.bound is not None and not drift.mean <= self.bound:
            raise RolloutError(drift_message(drift, self.bound, step, str(self.save())))


def largest_ratio(log_ratios_BC: Tensor, mask_BC: Tensor, level: str = "token") -> Tensor:
    """The largest importance ratio of a batch, (), float32, and at least 1; NaN if any ratio is NaN.

    `level`: `token`, or `sequence` for the ratio of a sequence's mean, as TRL's `importance_sampling_level`.
    """
    counted_BC = torch.where(mask_BC.bool(), log_ratios_BC.float(), 0.0)  # a padded place may hold anything
    if level == "sequence":
        counted_BC = counted_BC.sum(dim=1, keepdim=True) / mask_BC.sum(dim=1, keepdim=True).clamp(min=1)
    return counted_BC.max().clamp(min=0.0).exp()


class RatioGuard:
    """Skips an optimizer step with an importance ratio, new policy to old, above a bound."""

    def __init__(self, accelerator: Accelerator, bound: float | None, level: str, log: LogFigure) -> None:
        """`bound`: `adora_max_ratio`, None only logs. `level`: TRL's `importance_sampling_level`."""
        self.accelerator, self.bound, self.level, self.log = accelerator, bound, level, log
        self.exploded: float | None = None  # the ratio above the bound, in this optimizer step

    def loss(self, loss: Tensor, logps_BC: Tensor | None, micro: Batch) -> Tensor:
        """Returns `loss`, or NaN if the ratio is above the bound. With NaN every backend finds gradients that are not
        finite on all ranks, and the step is skipped and counted like any such step.

        `logps_BC`: the policy's log-probabilities from its pass for this loss.
        """
        old_BC = micro.get("old_per_token_logps")
        if old_BC is None or logps_BC is None:  # nothing was learned since sampling: every ratio is 1
            return loss
        largest = largest_ratio(logps_BC - old_BC, micro["completion_mask"], self.level)
        worst = self.accelerator.gather(largest[None]).max().item()  # NaN where one is NaN
        self.log("adora/ratio_max", worst)
        if self.bound is None or worst <= self.bound:
            return loss
        self.exploded = worst
        return loss * torch.nan

    def take(self) -> float | None:
        """Returns the ratio that exploded in this step, if any, and forgets it."""
        taken, self.exploded = self.exploded, None
        return taken


@contextmanager
def located(step: Callable[[], int], where_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Wraps the training. An error of the engine, or an unexpected one, is raised again with the step at which it
    happened and the checkpoint that a new start goes on from.
    """
    try:
        yield
    except EngineError as error:
        cause: BaseException = error.__cause__ or error
        raise RunError(f"step {step() + 1}: {error}; {where_to_go_on()}") from cause
    except (RolloutError, RunError, UserError):
        raise
    except Exception as error:
        what = lost_contact(error) or in_one_line(error)
        raise RunError(f"step {step() + 1}: {what}; {where_to_go_on()}") from error


class DeepSpeedSteps:
    """What DeepSpeed knows of the step that it has just taken."""

    def __init__(self, engine: Callable[[], Any], accelerator: Accelerator) -> None:
        """`engine`: the wrapped model, which is there once the training has begun."""
        self._engine, self._accelerator = engine, accelerator

    def is_bad(self) -> bool:
        """Whether the gradients' norm, of all ranks, was not finite."""
        norm = self._engine().get_global_grad_norm()
        return norm is not None and not math.isfinite(norm)

    def was_skipped(self) -> bool:
        return bool(self._accelerator.optimizer_step_was_skipped)


class SkipBadSteps(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """A NaN in one batch would stay in Adam's moments for good, so such a step leaves weights and optimizer alone.

    After `patience` of them in a row the run saves and stops (`reason` says why). DeepSpeed (0.19.8) finds and skips
    such a step itself, with ZeRO on all ranks, before a callback sees it: there it is only counted. With float16 its
    search for a loss scale consists of such steps and ends with an error of its own, so there they do not stop a run.
    """

    def __init__(
        self, patience: int, ratios: RatioGuard, log: LogFigure, deepspeed: DeepSpeedSteps | None, fp16: bool
    ) -> None:
        self.patience = math.inf if deepspeed is not None and fp16 else patience
        self.ratios, self.log, self.deepspeed = ratios, log, deepspeed
        self.in_a_row = 0
        self.reason: str | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """All ranks see the same reduced gradients, and so decide alike."""
        if self.deepspeed is not None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]) if parameters else torch.zeros(())
        bad = not math.isfinite(norm)
        if bad:
            for parameter in parameters:
                parameter.grad = None
        self._count(bad, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """DeepSpeed's norm is infinite where it has skipped the step."""
        if self.deepspeed is None:
            return
        bad = self.deepspeed.is_bad()
        if bad and not self.deepspeed.was_skipped():
            self.reason = (
                f"the gradients of step {state.global_step} are not finite and DeepSpeed has applied them (its "
                "check_grad_overflow is off?); go on from the newest checkpoint"
            )
            control.should_save, control.should_training_stop = False, True
            return
        self._count(bad, control)

    def _count(self, bad: bool, control: Any) -> None:
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
            why = f"were skipped: the largest importance ratio of the last is {ratio:.3g} (adora_max_ratio: {bound})"
            causes = "a learning rate that is too high, too many optimizer steps per generation, or old replayed groups"
        self.reason = f"{self.in_a_row} steps in a row {why}; the weights are those of before. Likely causes: {causes}"
        control.should_save = control.should_training_stop = True
