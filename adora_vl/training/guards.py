"""Guards that end the run, or skip the step, when something goes wrong.

They look for an image that cannot be read, a reward function that fails, an engine that drifts from
the policy, a reference that is not the policy's start, an importance ratio that explodes. All ranks
decide alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from adora_vl.data.loading import unreadable_rows
from adora_vl.data.prompts import CONTROL_TOKENS, problem_with_messages
from adora_vl.rewards.safe_call import RewardFailure, safe_call
from adora_vl.rollout.importance import drift_message, drift_sums, merge_drift
from adora_vl.training.batch_rows import RowReader
from adora_vl.types import Batch, PolicyLogps, Row, StepContext, compared_mask, loss_mask
from adora_vl.utils.errors import (
    DiskFullError,
    EngineError,
    NoServerError,
    RolloutError,
    RunError,
    SharedUserError,
    TranslatedErrors,
    UserError,
    in_one_line,
    lost_contact,
)
from adora_vl.utils.files import disk_is_full
from adora_vl.utils.stop_message import stopped_before, stopped_in

# Nats per token between a policy and its reference before any update. They are the same weights in
# the same pass, so float32 gives 0; what is above this is another model.
START_BOUND = 1e-3


class GenerationGuard:
    """Ends the run, with a checkpoint, where a generation is sampled.

    A checkpoint is exact there, so nothing is lost.
    """

    def __init__(
        self, context: StepContext, control_tokens: Sequence[str] = CONTROL_TOKENS
    ) -> None:
        """Build a guard.

        `control_tokens` are those of the model, which no prompt may have.
        """
        self.save = context.save_now
        self.state = context.state
        self.control_tokens = control_tokens

    def check(self, rows: Sequence[Row], step: int) -> None:
        """Refuse rows that cannot be used. Collective.

        Rows of a stream are seen here for the first time.

        Args:
            rows: of this rank's generation.
            step: optimizer steps that have been made.

        Raises:
            RunError: an image cannot be read on some rank; names row and checkpoint.
            SharedUserError: a prompt cannot be used on some rank.
        """
        self._check_prompts(rows, step)
        unreadable = gather_object(unreadable_rows(rows))
        if not unreadable:
            return
        checkpoint = self.save()
        (row_name, reason) = unreadable[0]
        further_row_count = len({name for name, _ in unreadable}) - 1
        further_rows_text = f" (and {further_row_count} more rows)" if further_row_count else ""
        raise RunError(
            stopped_before(
                step,
                f"row {row_name}: an image cannot be read: {reason}{further_rows_text}",
                remedy="Repair or remove the row",
                checkpoint=checkpoint,
            )
        )

    def _check_prompts(self, rows: Sequence[Row], step: int) -> None:
        """Raise `SharedUserError` on all ranks where a prompt cannot be used on any."""
        faults = []
        checked_ids = set[int]()  # the rows of a group share one prompt
        for number, row in enumerate(rows):
            prompt = row.get("prompt")
            if id(prompt) in checked_ids:
                continue
            checked_ids.add(id(prompt))
            fault = problem_with_messages(prompt, self.control_tokens)
            if fault is not None:
                faults.append(f"row {row.get('id', f'#{number} of the batch')}: {fault}")
        faults = gather_object(faults)
        if faults:
            raise SharedUserError(stopped_before(step, faults[0], checkpoint=self.save()))

    @contextmanager
    def beginning(self, step: int) -> Iterator[None]:
        """Inside, a user's code begins the rollouts of rows. Collective.

        Raises `SharedUserError` on all ranks, with the checkpoint to go on from, where any rank has
        raised `UserError`.
        """
        fault = ""
        try:
            yield
        except UserError as error:
            fault = str(error)
        faults = [text for text in gather_object([fault]) if text]
        if faults:
            raise SharedUserError(stopped_before(step, faults[0], checkpoint=self.save()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, all ranks use the servers, or give them weights.

        Raises `RunError` on all ranks together where no server is left.
        """
        try:
            yield
        except NoServerError as error:
            step = self.state().global_step
            raise RunError(stopped_before(step, str(error), checkpoint=self.save())) from None


class RewardGuard:
    """Ends the run where a reward function fails, hangs or returns nonsense.

    It also knows which calls of a function failed for single completions.
    """

    def __init__(self, context: StepContext) -> None:
        # seconds for a function; presets have their own
        self.timeout = context.config.adora_reward_timeout
        self.save = context.save_now
        self.failures: list[RewardFailure] = []  # of this rank, in the present generation
        # for each function, why its call failed, by the number of this rank's completion
        self._unscored: list[dict[int, str]] = []

    def around(self, functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The functions as TRL is to call them: with a time limit, and failures noted.

        Reward models, which are modules, stay as they are.
        """
        self._unscored = [{} for _ in functions]
        return [
            function
            if isinstance(function, torch.nn.Module)
            else safe_call(
                function,
                name=name,
                timeout=None if _is_bounded(function) else self.timeout,
                failures=self.failures,
                unscored=unscored,
            )
            for function, name, unscored in zip(functions, names, self._unscored, strict=True)
        ]

    def check(self, step: int) -> None:
        """End the run on all ranks if a function failed on any. Collective.

        Raises:
            RunError: names function, row and the checkpoint to go on from.
            SharedUserError: the failure is a mistake of the user.
        """
        failures = [RewardFailure(*fields) for fields in gather_object(self.failures[:])]
        self.failures.clear()
        if not failures:
            return
        mistake = next((failure.reason for failure in failures if failure.mistake), None)
        if mistake is not None:
            raise SharedUserError(stopped_before(step, mistake, checkpoint=self.save()))
        failure = failures[0]
        raise RunError(
            stopped_before(
                step,
                f"reward {failure.function}: {failure.row}: {failure.reason}",
                remedy="Repair the function",
                checkpoint=self.save(),
            )
        )

    def take_failed_calls(self, rows_per_rank: int) -> dict[tuple[int, int], str]:
        """Return why functions gave an exception in place of a reward, and forget it. Collective.

        Returns the reasons by the number of the rollout over all ranks and the number of the
        function. Every rank has `rows_per_rank` rollouts.
        """
        calls_of_rank = [
            (completion, function, reason)
            for function, unscored in enumerate(self._unscored)
            for completion, reason in unscored.items()
        ]
        for unscored in self._unscored:
            unscored.clear()
        reasons = {}
        for rank, calls in enumerate(gather_object([calls_of_rank])):
            for completion, function, reason in calls:
                reasons[rank * rows_per_rank + completion, function] = reason
        return reasons

    def check_scored(self, missing: Sequence[str | None], step: int) -> None:
        """Raise `RunError` if not one rollout has a reward.

        `missing` says why each rollout of all ranks has none; None for a rollout with a reward.
        """
        if not all(missing):
            return
        raise RunError(
            stopped_before(
                step,
                f"not one of {len(missing)} rollouts has a reward ({missing[0]})",
                remedy="Repair the reward",
                checkpoint=self.save(),
            )
        )


def _is_bounded(function: object) -> bool:
    """Whether a function is one of ours, and needs no time limit.

    Ours bound the work for each answer, or the time for each call of a judge.
    """
    return str(getattr(function, "__module__", "")).startswith("adora_vl.rewards.")


class DriftGuard:
    """Stops the run where engine and trainer disagree on the sampled tokens."""

    def __init__(self, context: StepContext) -> None:
        self.accelerator = context.accelerator
        self.log = context.log
        self.save = context.save_now
        self.bound = context.config.adora_max_drift  # nats per token on average; None only logs

    def check_batch(self, batch: Batch, step: int, logps_BC: Tensor | None = None) -> None:
        """Check the log-probabilities of a batch, as `check` does.

        It is called in the first pass that scores these rollouts. `logps_BC` are the policy's, by
        default the old ones of the batch. Where they or the engine's are missing, nothing is
        compared.
        """
        logps_BC = logps_BC if logps_BC is not None else batch.get("old_per_token_logps")
        sampling_BC = batch.get("sampling_per_token_logps")
        if logps_BC is not None and sampling_BC is not None:
            self.check(logps_BC, sampling_BC, compared_mask(batch), step)

    def check(self, logps_BC: Tensor, sampling_BC: Tensor, mask_BC: Tensor, step: int) -> None:
        """Compare the policy's log-probabilities with the engine's, and log the drift. Collective.

        Raises `RolloutError` on all ranks together where the mean drift is above the bound.
        """
        sums_3 = drift_sums(logps_BC, sampling_BC, mask_BC)
        drift = merge_drift(self.accelerator.gather(sums_3[None]))
        # nothing that could be compared, as where all rollouts saw other images
        if not drift.tokens:
            return
        self.log("adora/drift", drift.mean)
        if self.bound is not None and not drift.mean <= self.bound:
            raise RolloutError(
                drift_message(drift, bound=self.bound, step=step, checkpoint=self.save())
            )


def largest_ratio(log_ratios_BC: Tensor, mask_BC: Tensor, level: str = "token") -> Tensor:
    """The largest importance ratio of a batch, (), float32, and at least 1; NaN if any is NaN.

    The `level` is `token`, or `sequence` for the ratio of a sequence's mean, as TRL's
    `importance_sampling_level`.
    """
    # a padded position may hold anything
    counted_BC = torch.where(mask_BC.bool(), log_ratios_BC.float(), 0.0)
    if level == "sequence":
        counted_BC = counted_BC.sum(dim=1, keepdim=True) / mask_BC.sum(dim=1, keepdim=True).clamp(
            min=1
        )
    return counted_BC.max().clamp(min=0.0).exp()


class ReferenceGuard:
    """Stops the run before its first update where the reference is not the policy's start.

    The KL term would then pull the policy to the reference before anything was learned.
    """

    def __init__(self, context: StepContext, rounding: float) -> None:
        """Build a guard.

        `rounding` is how far two right passes may differ on average, in nats per token.
        """
        self.accelerator = context.accelerator
        self.beta = context.config.beta
        self.rows = context.config.per_device_train_batch_size
        self.bound = max(START_BOUND, rounding)
        self._is_done = not self.beta

    def is_due(self, step: int) -> bool:
        """Whether a batch is to be checked: the first one of a run that has made no update."""
        return step == 0 and not self._is_done

    def check(self, batch: Batch, policy_logps: PolicyLogps) -> None:
        """Compare the policy with its reference. Collective.

        Raises `SharedUserError` where they differ by more than rounding. `policy_logps` scores the
        batch's first rows where the batch has no log-probabilities of the policy yet.
        """
        self._is_done = True
        policy_BC = batch.get("old_per_token_logps")
        if policy_BC is None:
            first_rows = range(min(self.rows, len(batch["completion_ids"])))
            batch = RowReader(batch).take(first_rows)
            policy_BC = policy_logps(batch)
        sums_3 = drift_sums(policy_BC, batch["ref_per_token_logps"], loss_mask(batch))
        distance = merge_drift(self.accelerator.gather(sums_3[None]))
        if distance.tokens and not distance.mean <= self.bound:
            raise SharedUserError(
                f"beta: {self.beta:g}: the policy starts {distance.mean:.3g} nats per token from "
                f"its reference, and rounding makes no more than {self.bound:g} of it, so the KL "
                "term would pull it away from its start; initialise the adapter so that it "
                "changes no answer, or set beta: 0"
            )


class RatioGuard:
    """Skips an optimizer step with an importance ratio, new policy to old, above a bound."""

    def __init__(self, context: StepContext) -> None:
        self.accelerator = context.accelerator
        self.log = context.log
        self.bound = context.config.adora_max_ratio  # None only logs
        self.level = context.config.importance_sampling_level
        self.exceeding_ratio: float | None = (
            None  # the ratio above the bound, in this optimizer step
        )

    def loss(self, loss: Tensor, logps_BC: Tensor | None, micro: Batch) -> Tensor:
        """Return the loss, or NaN if the ratio is above the bound. Collective.

        With NaN every backend finds gradients that are not finite on all ranks, and the step is
        skipped and counted like any such step. `logps_BC` are the policy's log-probabilities from
        its pass for this loss.
        """
        old_BC = micro.get("old_per_token_logps")
        # nothing was learned since sampling: every ratio is 1
        if old_BC is None or logps_BC is None:
            return loss
        largest_on_rank = largest_ratio(logps_BC - old_BC, loss_mask(micro), self.level)
        largest_anywhere = (
            self.accelerator.gather(largest_on_rank[None]).max().item()
        )  # NaN where one is NaN
        self.log("adora/ratio_max", largest_anywhere)
        if self.bound is None or largest_anywhere <= self.bound:
            return loss
        self.exceeding_ratio = largest_anywhere
        return loss * torch.nan

    def take(self) -> float | None:
        """Return the ratio above the bound in this step, if any, and forget it."""
        ratio = self.exceeding_ratio
        self.exceeding_ratio = None
        return ratio


def errors_with_step(
    step: Callable[[], int], where_to_go_on: Callable[[], str]
) -> TranslatedErrors:
    """A context for the training, which raises errors again with the step that failed.

    An error of the engine, or an unexpected one, also names the checkpoint that a new start goes on
    from.

    Args:
        step: returns the optimizer steps that have been made.
        where_to_go_on: returns words on the checkpoint.
    """

    def translated(error: Exception) -> Exception | None:
        """The error to raise instead; None for one that says all this already."""
        if isinstance(error, EngineError):
            failed = RunError(stopped_in(step(), str(error), where_to_go_on()))
            failed.__cause__ = error.__cause__ or error
            return failed
        if isinstance(error, RolloutError | RunError | UserError):
            return None
        if disk_is_full(error):
            return _full_disk(error, step(), where_to_go_on())
        reason = lost_contact(error) or in_one_line(error)
        failed = RunError(stopped_in(step(), reason, where_to_go_on()))
        failed.__cause__ = error
        return failed

    return TranslatedErrors(translated)


def _full_disk(error: Exception, step: int, where_to_go_on: str) -> DiskFullError:
    """The error of a step that found the disk full; it names the file where that is known."""
    file = getattr(error, "filename", None)
    of_file = f" of {str(file)!r}" if file else ""
    reason = f"no space left on the disk{of_file}"
    return DiskFullError(stopped_in(step, reason, f"make room there, and {where_to_go_on}"))
