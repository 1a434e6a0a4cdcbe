"""Checks that the keys of a run fit each other, before anything is read from disk or hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adora_vl.config.batch_plan import BatchLayout, asks_for_regrouping, setting_against_regrouping
from adora_vl.config.losses import check_loss
from adora_vl.config.unused_keys import refuse_unusable_keys
from adora_vl.utils.cli import enum_value
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.preflight.request import RunRequest

# The default is false, so that leaving the key out is no remedy.
ENGINE_REMEDY = "set use_vllm: true"


def check_keys(request: RunRequest) -> None:
    """Raise `UserError` for the first key that contradicts another, or is not supported.

    Nothing is read but the keys themselves.
    """
    config = request.config
    _check_unsupported(config)
    if not request.trl_evaluates:
        _check_evaluation(config)
    check_loss(config)
    _check_rollouts(config)
    check_old_logps(config)
    check_servers(config)
    check_budget(config)
    check_sampling_ahead(config)
    check_refill(config)
    refuse_unusable_keys(config, trl_evaluates=request.trl_evaluates)
    _check_turns(request)


def _check_unsupported(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys of TRL that a run would ignore, or fail on late."""
    liger = dict(config.liger_kernel_config or {})
    # The correction for vLLM then has one importance ratio for a whole answer.
    if config.loss_type == "vespo" and config.corrects_per_sequence:
        mode = config.vllm_importance_sampling_mode
        raise UserError(
            f"loss_type: vespo does not go with vllm_importance_sampling_mode: {mode}; set it to "
            "token_truncate"
        )
    if config.use_liger_kernel and liger.get("fused_linear_cross_entropy"):
        raise UserError(
            "liger_kernel_config: fused_linear_cross_entropy: true replaces the pass that "
            "log-probabilities are computed by; leave it out"
        )
    if config.trust_remote_code or dict(config.model_init_kwargs or {}).get("trust_remote_code"):
        raise UserError(
            "trust_remote_code: true: code that comes with a model is not run here; set it to false"
        )
    if config.use_transformers_continuous_batching or config.use_transformers_paged:
        raise UserError(
            "use_transformers_continuous_batching: true is not supported; set use_vllm: true "
            "instead"
        )
    if config.torch_compile:
        raise UserError(
            "torch_compile: true would compile again for nearly every micro-batch, as each has "
            "another length; leave it out"
        )
    if config.remove_unused_columns:
        raise UserError(
            "remove_unused_columns: true takes the columns away that the rewards read; leave it out"
        )
    if config.sync_ref_model and not config.beta:
        raise UserError(
            "sync_ref_model: true with beta: 0 has no reference model; set "
            "beta above 0, or leave it out"
        )


def _check_evaluation(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys with which nothing could be evaluated during training.

    This is about this project's evaluation on benchmarks, and not about TRL's evaluation.
    """
    if not config.evaluates:
        return
    strategy = enum_value(config.eval_strategy)
    steps = config.eval_steps
    if strategy != "steps":
        raise UserError(
            f"eval_strategy: {strategy!r} is not supported; use steps with eval_steps, or no"
        )
    if not config.use_vllm and not config.ds3_gather_for_generation:
        # With ZeRO-3 every forward pass is then collective, and ranks may have problems with and
        # without images: only some of them would call the vision tower.
        raise UserError(
            "ds3_gather_for_generation: false with eval_strategy: steps needs use_vllm: true; leave "
            "it out, or set eval_strategy: no"
        )
    # Transformers replaces null by logging_steps, which may be a share of the run.
    if not steps or steps != int(steps):
        raise UserError(f"eval_steps: {steps} must be a whole number of optimizer steps")


def _check_rollouts(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys of sampling that contradict each other."""
    # The drift guard stops a run whose policy and engine disagree: it compares their
    # log-probabilities. A run asks vLLM for them only if its loss depends on them.
    lacks_engine_logps = config.use_vllm and not config.loss_uses_engine_logps
    if lacks_engine_logps and config.adora_max_drift is not None:
        raise UserError(
            "vllm_importance_sampling_correction: false leaves the drift guard nothing to "
            "measure; set it to true, or adora_max_drift: null to train unguarded"
        )
    # Without the engine's log-probabilities the mask would not see how far it is from the policy.
    if lacks_engine_logps and config.off_policy_mask_threshold is not None:
        raise conflict_error(
            f"off_policy_mask_threshold: {config.off_policy_mask_threshold:g}",
            "vllm_importance_sampling_correction: false, without which the engine's "
            "log-probabilities are not there",
        )
    max_completion = config.max_completion_length
    if config.truncated_at is not None and config.truncated_at > max_completion:
        raise UserError(
            f"adora_truncated: {config.truncated_at} is above max_completion_length: "
            f"{max_completion}, no rollout would ever count as truncated; remove it to derive it"
        )
    max_total = config.vllm_max_model_length
    if config.use_vllm and max_total is not None and max_total <= max_completion:
        raise UserError(
            f"vllm_max_model_length: {max_total} leaves no room for a prompt beside "
            f"max_completion_length: {max_completion}"
        )


def check_old_logps(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys that do not go with `adora_rollouts.old_logps: engine`.

    With it the old log-probabilities of the policy ratio are those that vLLM returns. The ratio
    then contains the difference of engine and trainer, so that nothing else may correct for it.
    """
    if config.adora_rollouts.old_logps != "engine":
        return
    setting = "adora_rollouts.old_logps: engine"
    if not config.use_vllm:
        raise conflict_error(setting, "use_vllm: false, where no engine scores", ENGINE_REMEDY)
    if config.vllm_importance_sampling_correction:
        raise UserError(
            f"{setting} compares the policy with the engine already, and "
            "vllm_importance_sampling_correction: true would weigh their difference twice; set it "
            "to false"
        )
    # Stock TRL makes a pass for the policy's own old log-probabilities.
    if not config.uses("skip_old_pass"):
        raise conflict_error(setting, "adora_stock_step, whose skip_old_pass makes the pass")


def check_servers(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` if NCCL cannot bring the weights of a run to its vLLM servers."""
    if not config.uses_servers or config.adora_weight_transfer != "nccl":
        return
    if config.use_cpu:
        raise UserError(
            "adora_weight_transfer: nccl needs GPUs on both sides, and use_cpu is true; set it to "
            "file"
        )
    if "," in (config.vllm_server_base_url or ""):
        raise UserError(
            f"vllm_server_base_url: {config.vllm_server_base_url} names "
            "several servers, which NCCL does not reach; set adora_weight_transfer: file"
        )


def check_refill(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys that do not go with `adora_rollouts.refill`.

    With this option, groups whose advantages are all zero are replaced by further groups. So each
    process needs whole groups, and the loss must not depend on which rows share a micro-batch.
    """
    refill = config.adora_rollouts.refill
    if refill == 0:
        return
    setting = f"adora_rollouts.refill: {refill}"
    # One process samples as many rollouts whatever the number of processes is.
    rows = BatchLayout.of(config, processes=1).rows_per_process
    if rows % config.num_generations != 0:
        raise UserError(
            f"{setting} needs whole groups on every process, but one samples {rows} rollouts at a "
            f"time and num_generations is {config.num_generations}; make "
            "per_device_train_batch_size a multiple of it"
        )
    # Such as `loss_type: bnpo`, whose loss depends on which rows share a micro-batch; else empty.
    forbidding_setting = setting_against_regrouping(config)
    if forbidding_setting:
        raise conflict_error(
            setting, f"{forbidding_setting}, which depends on the rows of a micro-batch"
        )


# Parameters of vLLM that do not depend on the beginning or the length of an answer, so that they
# mean the same where an answer is continued. (A repetition that began before is found a little
# later.)
_PARAMETERS_FOR_CONTINUED_ANSWERS = {
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "repetition_detection",
}


def check_budget(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys that do not go with `adora_rollouts.budget`.

    With this option a generation samples at most this many tokens of an answer. The next generation
    continues the unfinished answers with newer weights. So the loss has to correct for the
    difference of the weights, token by token. And a group has to stay together until its last
    answer is finished.
    """
    budget = config.adora_rollouts.budget
    if budget is None:
        return
    setting = f"adora_rollouts.budget: {budget}"
    _check_continued_answers(config, setting)
    _check_groups_that_wait(config, setting)
    if config.corrects_per_sequence:
        mode = config.vllm_importance_sampling_mode
        raise UserError(
            f"{setting} learns less from an answer the longer it is where the ratio to the earlier "
            f"weights is one for the whole answer (vllm_importance_sampling_mode: {mode}, TRL's "
            "default is sequence_mask); set vllm_importance_sampling_mode: token_truncate"
        )


def _check_continued_answers(config: AdoraGRPOConfig, setting: str) -> None:
    """Raise `UserError` if answers cannot be sampled in several parts.

    `setting`: the key that asks for it, with its value.
    """
    if not config.use_vllm:
        raise conflict_error(setting, "use_vllm: false", ENGINE_REMEDY)
    # The loss corrects for older weights by the log-probabilities that vLLM returns.
    if not config.loss_uses_engine_logps:
        raise conflict_error(setting, "vllm_importance_sampling_correction: false")
    # vLLM would match the pattern, and apply many other parameters, to the continued part alone.
    if config.vllm_structured_outputs_regex:
        raise conflict_error(setting, "vllm_structured_outputs_regex")
    parameters = set(config.generation_kwargs or {})
    unfit_parameters = sorted(parameters - _PARAMETERS_FOR_CONTINUED_ANSWERS)
    if unfit_parameters:
        raise conflict_error(setting, f"generation_kwargs: {', '.join(unfit_parameters)}")


def _check_groups_that_wait(config: AdoraGRPOConfig, setting: str) -> None:
    """Raise `UserError` if a group cannot wait as a whole until its last answer is finished.

    A group stays together only in micro-batches of whole groups. No setting may forbid such
    micro-batches, and one of some keys has to ask for them (`asks_for_regrouping`).

    `setting`: the key that lets groups wait, with its value.
    """
    forbidding_setting = setting_against_regrouping(config)
    if forbidding_setting:
        raise conflict_error(setting, forbidding_setting)
    if not asks_for_regrouping(config):
        raise conflict_error(setting, "the keys of micro-batches of whole groups all false")
    # One process samples as many rollouts whatever the number of processes is.
    rows = BatchLayout.of(config, processes=1).rows_per_process
    if rows % config.num_generations != 0:
        raise conflict_error(setting, f"{rows} rollouts per process, which are no whole groups")
    if rows < 2 * config.num_generations:
        raise conflict_error(setting, "one group per process, which has to end in every generation")
    _refuse_steps_across_generations(config, setting)


def _refuse_steps_across_generations(config: AdoraGRPOConfig, setting: str) -> None:
    """Raise `UserError` where an optimizer step may begin in one generation and end in the next.

    A rollout that waits for a later generation carries the number of the generation in which it
    began. That number is computed from the number of optimizer steps so far, so all steps need the
    same length. If a step may begin in one generation and end in the next, the last step of an
    epoch may be shorter. For example, 6 micro-batches of a generation and 4 of a step are refused.

    `setting`: the key that lets rollouts wait, with its value.
    """
    # The counts below do not depend on the number of processes.
    layout = BatchLayout.of(config, processes=1)
    if not layout.generation_has_whole_steps and not layout.generation_has_one_step:
        raise conflict_error(
            setting,
            f"{layout.micro_batches_per_generation} micro-batches of a generation and "
            f"{layout.gradient_accumulation_steps} of an optimizer step, of which neither is a "
            "multiple of the other",
        )


def conflict_error(
    setting: str, other_setting: str, remedy: str = "leave out one of the two"
) -> UserError:
    """Return the error for two settings that contradict each other.

    `setting`: a key with its value, such as `adora_rollouts.refill: 2`. `other_setting`: the
    setting that contradicts it, in words. `remedy`: what the user can do.
    """
    return UserError(f"{setting} does not go with {other_setting}; {remedy}")


def check_sampling_ahead(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys that do not go with `adora_rollouts.ahead`.

    With this option vLLM servers sample further generations, with older weights, while the policy
    learns. So the weights have to reach the servers by files, which do not stop the trainer. And
    the loss has to correct for the difference of the weights.
    """
    ahead = config.adora_rollouts.ahead
    if ahead == 0:
        return
    setting = f"adora_rollouts.ahead: {ahead}"
    if not config.uses_servers or config.adora_weight_transfer == "nccl":
        raise conflict_error(
            setting, "another engine than vllm_mode: server with adora_weight_transfer: file"
        )
    if not config.loss_uses_engine_logps:
        raise conflict_error(setting, "vllm_importance_sampling_correction: false")
    workers = config.dataloader_num_workers
    if workers > 0:
        raise conflict_error(setting, f"dataloader_num_workers: {workers}")
    _refuse_steps_across_generations(config, setting)


def _check_turns(request: RunRequest) -> None:
    """Raise `UserError` for keys that do not go with rollouts of several turns.

    A rollout has several turns if the model may call tools, or acts in an environment.
    """
    config = request.config
    # Tools are named in the config, or passed to the trainer in Python.
    has_tools = bool(config.tools or request.tools)
    has_environments = request.environment is not None
    if not has_tools and not has_environments:
        return
    if has_environments:
        _check_environments(request)
    max_tokens = config.max_completion_length
    turn_tokens = config.adora_tool_options.turn_tokens
    if turn_tokens and turn_tokens > max_tokens:
        raise UserError(
            f"adora_tool_options.turn_tokens: {turn_tokens} is above max_completion_length: "
            f"{max_tokens}; lower it"
        )


def _check_environments(request: RunRequest) -> None:
    """Raise `UserError` for keys that do not go with environments.

    A rollout must be finished in its generation, because no checkpoint could have the state of an
    environment.
    """
    config = request.config
    setting = "environment_factory"
    rollouts = config.adora_rollouts
    reason = "as no checkpoint could keep their state"
    if rollouts.budget is not None:
        raise conflict_error(setting, f"adora_rollouts.budget: {rollouts.budget}, {reason}")
    if rollouts.ahead > 0:
        raise conflict_error(setting, f"adora_rollouts.ahead: {rollouts.ahead}, {reason}")
    if config.evaluates and not request.trl_evaluates:
        raise conflict_error(setting, "eval_strategy: steps, whose evaluators know no environments")
