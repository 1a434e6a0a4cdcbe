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
from adora_vl.data.prompts import CONTROL_TOKENS, fault_in_messages
from adora_vl.rewards.safe_call import RewardFailure, safe_call
from adora_vl.rollout.importance import drift_message, drift_over_ranks
from adora_vl.training.batch_rows import RowReader
from adora_vl.types import Batch, PolicyLogps, Row, StepContext, engine_comparison_mask, loss_mask
from adora_vl.utils.errors import (
    DiskFullError,
    EngineError,
    NoServerError,
    RolloutError,
    RunError,
    SharedUserError,
    TranslatedErrors,
    UserError,
    describe_error,
    lost_contact_message,
)
from adora_vl.utils.files import disk_is_full
from adora_vl.utils.open_files import open_files_message
from adora_vl.utils.stop_message import stop_message, stop_message_with_checkpoint

# The largest distance of a policy from its reference before any update, in nats per token. Both are
# the same weights in the same pass, so it is 0 in float32. A larger one means another model.
MAX_START_DISTANCE = 1e-3


class GenerationGuard:
    """Ends the run, with a checkpoint, for what goes wrong while a generation is sampled.

    That is a row that cannot be used, code of the user that raises, or a lack of servers. Nothing
    of the optimizer step has changed then, so a run that resumes loses nothing.
    """

    def __init__(
        self, context: StepContext, control_tokens: Sequence[str] = CONTROL_TOKENS
    ) -> None:
        """Build a guard.

        `control_tokens` are those of the model, which no prompt may have.
        """
        self.save_now = context.save_now
        self.state = context.state
        self.control_tokens = control_tokens

    def refuse_unusable(self, rows: Sequence[Row], step: int) -> None:
        """End the run on all ranks if any rank has a row that cannot be used. Collective.

        The rows of a prepared data set were checked before the run. Those of a streamed one are
        read here for the first time.

        Args:
            rows: the rows of this rank's generation.
            step: optimizer steps that have been made.

        Raises:
            RunError: an image cannot be read. The message names the row, and the checkpoint that
                was written.
            SharedUserError: a prompt cannot be used.
        """
        self._check_prompts(rows, step)
        # Pairs of a row's id and the reason why its image cannot be read, of all ranks.
        ids_and_reasons = gather_object(unreadable_rows(rows))
        if not ids_and_reasons:
            return
        checkpoint = self.save_now()
        first_id, reason = ids_and_reasons[0]
        # A row may be listed once for each rollout of its group, and is counted once.
        other_rows = len({row_id for row_id, _ in ids_and_reasons}) - 1
        others_text = f" (and {other_rows} more rows)" if other_rows else ""
        raise RunError(
            stop_message_with_checkpoint(
                step,
                f"row {first_id}: an image cannot be read: {reason}{others_text}",
                remedy="Repair or remove the row",
                checkpoint=checkpoint,
            )
        )

    def _check_prompts(self, rows: Sequence[Row], step: int) -> None:
        """Raise `SharedUserError` on all ranks if a prompt cannot be used on any rank. Collective.

        A prompt cannot be used if it is no list of messages with role and content, or if it has
        control tokens of the model, such as `<|im_end|>`. The arguments are those of
        `refuse_unusable`.
        """
        faults = []
        # The rows of a group share one prompt object, which is checked once.
        checked_objects = set[int]()
        for number, row in enumerate(rows):
            prompt = row.get("prompt")
            if id(prompt) in checked_objects:
                continue
            checked_objects.add(id(prompt))
            fault = fault_in_messages(prompt, self.control_tokens)  # None: nothing is wrong
            if fault is not None:
                row_name = row.get("id", f"#{number} of the batch")
                faults.append(f"row {row_name}: {fault}")
        faults_of_ranks = gather_object(faults)
        if faults_of_ranks:
            raise SharedUserError(
                stop_message_with_checkpoint(step, faults_of_ranks[0], checkpoint=self.save_now())
            )

    @contextmanager
    def ending_run_on_user_error(self, step: int) -> Iterator[None]:
        """End the run on all ranks if the user's code inside the block raises on any. Collective.

        An example is an environment's `reset`. If any rank raises `UserError` inside, all ranks
        save a checkpoint and raise `SharedUserError`.

        `step`: optimizer steps that have been made, for the message.
        """
        fault = ""  # stays empty where this rank raises nothing
        try:
            yield
        except UserError as error:
            fault = str(error)
        faults = [text for text in gather_object([fault]) if text]
        if faults:
            raise SharedUserError(
                stop_message_with_checkpoint(step, faults[0], checkpoint=self.save_now())
            )

    @contextmanager
    def ending_run_if_no_server_is_left(self) -> Iterator[None]:
        """End the run if no vLLM server is left for what the block asks of them. Collective.

        All ranks then save a checkpoint, and raise `RunError` in place of `NoServerError`.
        """
        try:
            yield
        except NoServerError as error:
            step = self.state().global_step
            raise RunError(
                stop_message_with_checkpoint(step, str(error), checkpoint=self.save_now())
            ) from None


class RewardGuard:
    """Ends the run where a reward function fails, hangs or returns something else than rewards.

    A function may also fail for single completions. Those have no reward, and the run goes on.
    """

    def __init__(self, context: StepContext) -> None:
        # Seconds that a call of a user's function may take.
        self.timeout = context.config.adora_reward_timeout
        self.save_now = context.save_now
        # Functions that have failed on this rank for all completions of the present generation.
        self.failures: list[RewardFailure] = []
        # For each function: why it failed for single completions, by their number on this rank.
        self._reasons_by_function: list[dict[int, str]] = []

    def wrap_functions(self, functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Return the reward functions, wrapped so that failures are collected in this object.

        A wrapped function of the user also has a time limit. Reward models, which are modules, stay
        as they are.

        Args:
            functions: the reward functions of the run.
            names: their names for the log.
        """
        # Each wrapper fills the dict of its own function.
        self._reasons_by_function = [{} for _ in functions]
        wrapped_functions: list[Any] = []
        for function, name, reason_by_completion in zip(
            functions, names, self._reasons_by_function, strict=True
        ):
            if isinstance(function, torch.nn.Module):
                wrapped_functions.append(function)
                continue
            wrapped_function = safe_call(
                function,
                name=name,
                # The functions of this package limit their own time.
                timeout=None if _is_of_this_package(function) else self.timeout,
                # The wrapper adds to `failures` when the whole call fails. When it fails for single
                # completions, it adds the reason to `unscored`, by the completion's number.
                failures=self.failures,
                unscored=reason_by_completion,
            )
            wrapped_functions.append(wrapped_function)
        return wrapped_functions

    def check(self, step: int) -> None:
        """End the run on all ranks if a reward function failed on any. Collective.

        A function has failed if it raised an error, or no reward came out of its call.

        `step`: optimizer steps that have been made, for the message.

        Raises:
            RunError: the message names function, row and the checkpoint to go on from.
            SharedUserError: the failure is a mistake of the user, such as a wrong key of an API.
        """
        # Gathering makes named tuples plain ones.
        failures = [RewardFailure(*fields) for fields in gather_object(list(self.failures))]
        self.failures.clear()
        if not failures:
            return
        # A mistake of the user is reported first: repairing the function would not help.
        for failure in failures:
            if failure.is_users_mistake:
                raise SharedUserError(
                    stop_message_with_checkpoint(step, failure.reason, checkpoint=self.save_now())
                )
        first_failure = failures[0]
        raise RunError(
            stop_message_with_checkpoint(
                step,
                f"reward {first_failure.function}: {first_failure.rows_in_words}: {first_failure.reason}",
                remedy="Repair the function",
                checkpoint=self.save_now(),
            )
        )

    def pop_failed_calls(self, rows_per_rank: int) -> dict[tuple[int, int], str]:
        """Return why functions failed for single completions of any rank, and forget the reasons.

        A function fails for a completion if it returns an exception in place of its reward.
        Collective.

        Args:
            rows_per_rank: rollouts that every rank has.

        Returns:
            The reasons by the number of the rollout over all ranks and the number of the function.
            For example, with 4 rollouts per rank, a failure of function 1 for completion 2 of rank
            1 has the key (6, 1).
        """
        failed_calls = [
            (completion, function, reason)
            for function, reason_by_completion in enumerate(self._reasons_by_function)
            for completion, reason in reason_by_completion.items()
        ]
        for reason_by_completion in self._reasons_by_function:
            reason_by_completion.clear()
        reason_by_failed_call = {}
        for rank, failed_calls_of_rank in enumerate(gather_object([failed_calls])):
            first_rollout = rank * rows_per_rank
            for completion, function, reason in failed_calls_of_rank:
                reason_by_failed_call[first_rollout + completion, function] = reason
        return reason_by_failed_call

    def check_scored(self, reasons: Sequence[str | None], step: int) -> None:
        """Raise `RunError` if not one rollout of all ranks has a reward.

        Args:
            reasons: for each rollout, why it has no reward; None for a rollout with one.
            step: optimizer steps that have been made, for the message.
        """
        has_any_reward = None in reasons
        if has_any_reward:
            return
        raise RunError(
            stop_message_with_checkpoint(
                step,
                f"not one of {len(reasons)} rollouts has a reward ({reasons[0]})",
                remedy="Repair the reward",
                checkpoint=self.save_now(),
            )
        )


def _is_of_this_package(function: object) -> bool:
    """Return whether a reward function is one of this package, and so needs no time limit.

    Each of these bounds its work for each completion, or the time of each call of a judge.
    """
    return str(getattr(function, "__module__", "")).startswith("adora_vl.rewards.")


class DriftGuard:
    """Stops the run where engine and trainer disagree on the sampled tokens.

    There are B rollouts of C tokens.
    """

    def __init__(self, context: StepContext) -> None:
        self.accelerator = context.accelerator
        self.log_weighted = context.log_weighted
        self.save_now = context.save_now
        # The bound on the mean drift in nats per token. None: the drift is only logged.
        self.max_drift = context.config.adora_max_drift

    def check_batch(self, batch: Batch, step: int, logps_BC: Tensor | None = None) -> None:
        """Log the drift on the tokens of a batch, and end the run if it is too large. Collective.

        The drift is how far the engine's log-probabilities are from the policy's. Nothing is done
        where one of the two is missing: not every engine returns them, and not every batch needs
        those of the policy. Raises `RolloutError`, as `check` does.

        Args:
            batch: has the engine's log-probabilities.
            step: optimizer steps that have been made, for the message.
            logps_BC: the policy's log-probabilities; None: the old ones of the batch.
        """
        policy_logps_BC = logps_BC if logps_BC is not None else batch.get("old_per_token_logps")
        engine_logps_BC = batch.get("sampling_per_token_logps")
        if policy_logps_BC is not None and engine_logps_BC is not None:
            self.check(policy_logps_BC, engine_logps_BC, engine_comparison_mask(batch), step)

    def check(
        self, policy_logps_BC: Tensor, engine_logps_BC: Tensor, mask_BC: Tensor, step: int
    ) -> None:
        """Log the drift, and raise `RolloutError` where it is above `adora_max_drift`. Collective.

        The drift is how far the engine's log-probabilities are from the policy's: the mean
        difference in nats per token, over all ranks. All ranks raise together.

        Args:
            policy_logps_BC: the policy's log-probabilities of the sampled tokens.
            engine_logps_BC: the engine's.
            mask_BC: 1 at the tokens that are compared.
            step: optimizer steps that have been made, for the message.
        """
        drift = drift_over_ranks(self.accelerator, policy_logps_BC, engine_logps_BC, mask_BC)
        # No token is compared where all rollouts saw other images, for example. The drift is then
        # 0, and no figure of the log. It is infinite where the engine scored no sampled token.
        if drift.tokens > 0:
            self.log_weighted("adora/drift", drift.mean, weight=drift.tokens)
        # Not `>`: a drift that is NaN is too large.
        if self.max_drift is not None and not drift.mean <= self.max_drift:
            checkpoint = self.save_now()  # so that nothing that was learned is lost
            raise RolloutError(
                drift_message(drift, bound=self.max_drift, step=step, checkpoint=checkpoint)
            )


def largest_ratio(log_ratios_BC: Tensor, mask_BC: Tensor, level: str = "token") -> Tensor:
    """Return the largest importance ratio of a batch, (), float32; NaN if any is NaN.

    It is at least 1, since tokens that do not count are given the ratio 1. For example, the log
    ratios 0.1 and -0.5 of a sequence give exp(0.1) by `token`. By `sequence` their mean is -0.2,
    and the result is 1.

    Args:
        log_ratios_BC: log-probabilities by the new policy minus those by the old one, of B rollouts
            with C tokens.
        mask_BC: 1 at the tokens of the loss.
        level: TRL's `importance_sampling_level`: `token`, or `sequence`, where a sequence has one
            ratio, from the mean of its log ratios.
    """
    # `where`, since a position that does not count may hold NaN, and NaN times 0 is NaN.
    log_ratios_BC = torch.where(mask_BC.bool(), log_ratios_BC.float(), 0.0)
    if level == "sequence":
        tokens_B1 = mask_BC.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratios_BC = log_ratios_BC.sum(dim=1, keepdim=True) / tokens_B1
    return log_ratios_BC.max().clamp(min=0.0).exp()


class ReferenceGuard:
    """Stops the run before its first update where the reference is not the policy's start.

    The KL term would then pull the policy to the reference before anything was learned. There are B
    rollouts of C tokens.
    """

    def __init__(self, context: StepContext, rounding: float) -> None:
        """Build a guard.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            rounding: how far two passes by the same weights may differ on average, in nats per
                token.
        """
        self.accelerator = context.accelerator
        self.beta = context.config.beta
        self.rows_per_pass = context.config.per_device_train_batch_size
        self.max_distance = max(MAX_START_DISTANCE, rounding)
        # Without a KL term there is no reference to check.
        self._is_done = not self.beta

    def needs_check(self, step: int) -> bool:
        """Return whether the next batch is to be checked: the first of a run, before any update.

        `step`: optimizer steps that have been made.
        """
        return step == 0 and not self._is_done

    def check(self, batch: Batch, policy_logps: PolicyLogps) -> None:
        """Raise `SharedUserError` if policy and reference differ on a batch. Collective.

        Their log-probabilities may differ by rounding alone, as long as the policy has not learned.

        Args:
            batch: a generation, with the log-probabilities of the reference.
            policy_logps: computes those of the policy where the batch has none. It is called for
                the rows of one pass only, which is enough to see a difference.
        """
        self._is_done = True
        policy_logps_BC = batch.get("old_per_token_logps")
        if policy_logps_BC is None:
            first_rows = range(min(self.rows_per_pass, len(batch["completion_ids"])))
            batch = RowReader(batch).take(first_rows)
            policy_logps_BC = policy_logps(batch)
        distance = drift_over_ranks(
            self.accelerator, policy_logps_BC, batch["ref_per_token_logps"], loss_mask(batch)
        )
        # Without tokens there is nothing to compare. Not `>`: a distance that is NaN is too large.
        if distance.tokens and not distance.mean <= self.max_distance:
            raise SharedUserError(
                f"beta: {self.beta:g}: the policy starts {distance.mean:.3g} nats per token from "
                f"its reference, and rounding makes no more than {self.max_distance:g} of it, so "
                "the KL term would pull it away from its start; initialise the adapter so that it "
                "changes no answer, or set beta: 0"
            )


class RatioGuard:
    """Skips an optimizer step with an importance ratio, new policy to old, above a bound.

    A micro-batch has B rollouts of C tokens.
    """

    def __init__(self, context: StepContext) -> None:
        self.accelerator = context.accelerator
        self.log = context.log
        self.max_ratio = context.config.adora_max_ratio  # None: it is only logged
        self.level = context.config.importance_sampling_level
        # A ratio above the bound in this optimizer step, if there was one.
        self.exceeding_ratio: float | None = None

    def loss_or_nan(self, loss: Tensor, logps_BC: Tensor | None, micro_batch: Batch) -> Tensor:
        """Return the loss, or NaN if an importance ratio is above `adora_max_ratio`. Collective.

        With NaN every backend finds gradients that are not finite on all ranks, and skips the
        optimizer step.

        Args:
            loss: the loss of a micro-batch, ().
            logps_BC: the policy's log-probabilities in the pass of this loss; None: not observed.
            micro_batch: the micro-batch, with old log-probabilities if the policy has learned since
                it was sampled. Without them every ratio is 1.
        """
        old_logps_BC = micro_batch.get("old_per_token_logps")
        if old_logps_BC is None or logps_BC is None:
            return loss
        largest_on_rank = largest_ratio(logps_BC - old_logps_BC, loss_mask(micro_batch), self.level)
        # `max` returns NaN if the ratio of any rank is NaN, and then the comparison below is false.
        largest_of_ranks = self.accelerator.gather(largest_on_rank[None]).max().item()
        self.log("adora/ratio_max", largest_of_ranks)
        if self.max_ratio is None or largest_of_ranks <= self.max_ratio:
            return loss
        # Read by the callback that counts skipped steps, to tell why this one was skipped.
        self.exceeding_ratio = largest_of_ranks
        return loss * torch.nan

    def pop_exceeding_ratio(self) -> float | None:
        """Return the ratio above the bound in this optimizer step, if any, and forget it."""
        ratio = self.exceeding_ratio
        self.exceeding_ratio = None
        return ratio


def errors_with_step(
    count_steps: Callable[[], int], describe_resume_point: Callable[[], str]
) -> TranslatedErrors:
    """Return a context manager for the training, which adds the step to the errors inside.

    An error of the engine, or an unexpected one, becomes a `RunError` that names the step, and the
    checkpoint from which a new start goes on. Errors that already name them stay as they are.

    Args:
        count_steps: returns the number of optimizer steps that have been made.
        describe_resume_point: returns the part of the message that says how to go on from a
            checkpoint.
    """

    def translate(error: Exception) -> Exception | None:
        """Return the error to raise instead; None where the error itself is to be raised."""
        if isinstance(error, EngineError):
            run_error = RunError(stop_message(count_steps(), str(error), describe_resume_point()))
            run_error.__cause__ = error.__cause__ or error
            return run_error
        # These name step and remedy already.
        if isinstance(error, RolloutError | RunError | UserError):
            return None
        if disk_is_full(error):
            return _full_disk_error(error, count_steps(), describe_resume_point())
        # `lost_contact_message` is empty, unless a rank has lost contact with another one.
        reason = lost_contact_message(error) or open_files_message(error) or describe_error(error)
        run_error = RunError(stop_message(count_steps(), reason, describe_resume_point()))
        run_error.__cause__ = error
        return run_error

    return TranslatedErrors(translate)


def _full_disk_error(error: Exception, step: int, resume_hint: str) -> DiskFullError:
    """Return the error for a step in which the disk is full; it names the file if it is known.

    Args:
        error: the error of the operating system.
        step: optimizer steps that have been made.
        resume_hint: the part of the message that says how to go on from a checkpoint.
    """
    file = getattr(error, "filename", None)
    of_file = f" of {str(file)!r}" if file else ""
    reason = f"no space left on the disk{of_file}"
    return DiskFullError(stop_message(step, reason, f"make room there, and {resume_hint}"))
