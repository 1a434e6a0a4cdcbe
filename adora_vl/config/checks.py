"""Checks that keys fit each other, the model and the machine, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import GenerationConfig, PretrainedConfig, Trainer, get_scheduler

from adora_vl.config.batch_plan import regroup_obstacle, regroups
from adora_vl.config.losses import check_loss
from adora_vl.config.methods import check_methods, method_overheads
from adora_vl.config.values import check_finite
from adora_vl.utils.cli import spelled
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# Optimizer steps of a schedule whose length is not known yet. Unless its warmup is given in steps,
# the curve is the same for every length.
ANY_LENGTH = 1000
# Optimizers that cannot be tried without a model.
_NEED_A_MODEL = (
    "galore",
    "apollo",
    "lomo",
    "adalomo",
)


def check_config(config: AdoraGRPOConfig, *, trl_evaluates: bool = False) -> None:
    """Raise `UserError` for the first fault of the keys alone.

    `trl_evaluates`: whether TRL evaluates during training, on a data set from Python.
    """
    _check_unsupported(config)
    if not trl_evaluates:
        _check_evaluation(config)
    check_methods(config)
    check_loss(config)
    check_schedule(config)
    _check_rollouts(config)


def _check_unsupported(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys of TRL that a run would ignore, or fail on late."""
    corrects = config.use_vllm and config.vllm_importance_sampling_correction
    mode = config.vllm_importance_sampling_mode
    liger = dict(config.liger_kernel_config or {})
    if config.loss_type == "vespo" and corrects and mode.startswith("sequence"):
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
    """Raise `UserError` for keys with which nothing could be evaluated during training."""
    strategy = spelled(config.eval_strategy)
    steps = config.eval_steps
    if strategy == "no":
        return
    if strategy != "steps":
        raise UserError(
            f"eval_strategy: {strategy!r} is not supported; use steps with eval_steps, or no"
        )
    if not config.use_vllm:
        raise UserError(
            "eval_strategy: steps needs use_vllm: true; else set it to no and evaluate checkpoints "
            "with `python -m eval.problems`"
        )
    # Transformers replaces null by logging_steps, which may be a share of the run.
    if not steps or steps != int(steps):
        raise UserError(f"eval_steps: {steps} must be a whole number of optimizer steps")


def _check_rollouts(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys of sampling that contradict each other."""
    unguarded = config.use_vllm and not config.vllm_importance_sampling_correction
    if unguarded and config.adora_max_drift is not None:
        raise UserError(
            "vllm_importance_sampling_correction: false leaves the drift guard nothing to "
            "measure; set it to true, or adora_max_drift: null to train unguarded"
        )
    check_servers(config)
    check_budget(config)
    check_async(config)
    check_filling(config)
    limit = config.vllm_max_model_length
    longest = config.max_completion_length
    if config.truncated_at is not None and config.truncated_at > longest:
        raise UserError(
            f"adora_truncated: {config.truncated_at} is above max_completion_length: {longest}, "
            "no rollout would ever count as truncated; remove it to derive it"
        )
    if config.use_vllm and limit is not None and limit <= longest:
        raise UserError(
            f"vllm_max_model_length: {limit} leaves no room for a prompt beside "
            f"max_completion_length: {longest}"
        )


def check_servers(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` where NCCL could not bring the weights to the vLLM servers of a run."""
    on_server = config.use_vllm and config.vllm_mode == "server"
    if not on_server or config.adora_weight_transfer != "nccl":
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


def check_filling(config: AdoraGRPOConfig) -> None:
    """Check `adora_rollouts.refill`, which replaces groups without signal. Raises `UserError`."""
    if not config.adora_rollouts.refill:
        return
    key = f"adora_rollouts.refill: {config.adora_rollouts.refill}"
    rows = _rows(config)
    if rows % config.num_generations:
        raise UserError(
            f"{key} needs whole groups on every process, but one samples {rows} rollouts at a "
            f"time and num_generations is {config.num_generations}; make "
            "per_device_train_batch_size a multiple of it"
        )
    obstacle = regroup_obstacle(config)
    if obstacle:
        raise _contradiction(key, f"{obstacle}, which depends on the rows of a micro-batch")


def _rows(config: AdoraGRPOConfig) -> int:
    """The number of rollouts that a process samples for one generation."""
    return int(config.per_device_train_batch_size * config.steps_per_generation)


# Parameters of vLLM that do not depend on the beginning or the length of an answer, so that they
# mean the same where an answer is continued. (A repetition that began before is found a little
# later.)
_FIT_CONTINUED_ANSWERS = {
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "repetition_detection",
}


def check_budget(config: AdoraGRPOConfig) -> None:
    """Check `adora_rollouts.budget`, of partial rollouts. Raises `UserError`.

    An answer that is continued was begun by earlier weights, so the ratio to what the engine
    sampled has to be corrected, token by token; and a group has to stay in one micro-batch.
    """
    budget = config.adora_rollouts.budget
    rows = _rows(config)
    if budget is None:
        return
    key = f"adora_rollouts.budget: {budget}"
    parameters = sorted({*(config.generation_kwargs or {})} - _FIT_CONTINUED_ANSWERS)
    obstacle = regroup_obstacle(config)
    if not config.use_vllm:
        raise _contradiction(key, "use_vllm: false")
    if not config.vllm_importance_sampling_correction:
        raise _contradiction(key, "vllm_importance_sampling_correction: false")
    if config.vllm_structured_outputs_regex:
        raise _contradiction(key, "vllm_structured_outputs_regex")
    if parameters:
        raise _contradiction(key, f"generation_kwargs: {', '.join(parameters)}")
    if obstacle:
        raise _contradiction(key, obstacle)
    if not regroups(config):
        raise _contradiction(key, "the keys of micro-batches of whole groups all false")
    if rows % config.num_generations:
        raise _contradiction(key, f"{rows} rollouts per process, which are no whole groups")
    if rows < 2 * config.num_generations:
        raise _contradiction(key, "one group per process, which has to end in every generation")
    mode = config.vllm_importance_sampling_mode
    if mode.startswith("sequence"):
        raise UserError(
            f"{key} learns less from an answer the longer it is where the ratio to the earlier "
            f"weights is one for the whole answer (vllm_importance_sampling_mode: {mode}, TRL's "
            "default is sequence_mask); set vllm_importance_sampling_mode: token_truncate"
        )


def _contradiction(key: str, reason: str) -> UserError:
    """The error for a key that does not go with another setting."""
    return UserError(f"{key} does not go with {reason}; leave out one of the two")


def check_async(config: AdoraGRPOConfig) -> None:
    """Check `adora_rollouts.ahead`, of rollouts sampled while the policy learns.

    Servers sample with older weights then, so these have to reach them by files, without stopping
    the trainer, and the ratio to them has to be corrected. Raises `UserError`.
    """
    if not config.adora_rollouts.ahead:
        return
    key = f"adora_rollouts.ahead: {config.adora_rollouts.ahead}"
    workers = config.dataloader_num_workers
    on_server = config.use_vllm and config.vllm_mode == "server"
    if not on_server or config.adora_weight_transfer == "nccl":
        reason = "another engine than vllm_mode: server with adora_weight_transfer: file"
        raise _contradiction(key, reason)
    if not config.vllm_importance_sampling_correction:
        raise _contradiction(key, "vllm_importance_sampling_correction: false")
    if workers:
        raise _contradiction(key, f"dataloader_num_workers: {workers}")


# vLLM raises lower temperatures to this one, and takes the likeliest token at 0.
COOLEST = 0.01
# The key that sets a parameter of vLLM or Transformers, by the parameter.
_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "num_generations"),
    "cache_implementation": "cache_implementation",
}
# Parameters that the trainer itself sets, because it reads their results, or relies on the way of
# sampling that they would change.
_SET_BY_TRAINER = {
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "trace_decode_token_ids",
    "do_sample",
    "num_beams",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "stop_strings",
    "disable_compile",
}
# Parameters that move probability between tokens, as a temperature does. Filters take tokens away
# instead.
_SHIFTS = {
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "thinking_token_budget",
    "extra_args",
}
_FILTERS = {"allowed_token_ids", "bad_words", "structured_outputs", "min_tokens"}
_TRANSFORMERS_DEFAULTS = GenerationConfig()


def engine_scores_raw(
    temperature: float, repetition_penalty: float, generation_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the engine can return log-probabilities before filters, as the trainer computes them.

    It cannot where a temperature or a penalty has changed the distribution that it samples from:
    vLLM returns either raw log-probabilities, or those after every change and filter.
    """
    unchanged = (temperature, repetition_penalty) == (1.0, 1.0)
    return unchanged and not _SHIFTS & {*generation_kwargs}


def check_sampling_keys(config: AdoraGRPOConfig) -> None:
    """Check `generation_kwargs`, and that the trainer can account for the way of sampling.

    Raises `UserError` for a parameter that a key sets, that the trainer sets, or that Transformers
    does not know.
    """
    generation_kwargs = dict(config.generation_kwargs or {})
    parameters = [name for name in vars(_TRANSFORMERS_DEFAULTS) if not name.startswith("_")]
    for name, value in generation_kwargs.items():
        hint = did_you_mean(name, parameters)
        if name in _KEYS:
            raise UserError(
                f"generation_kwargs: {name}: {value} is what the key {_KEYS.get(name)} says; set "
                "that one"
            )
        if name in _SET_BY_TRAINER:
            raise UserError(
                f"generation_kwargs: {name}: {value} is for the trainer to set; leave it out"
            )
        if not config.use_vllm and not hasattr(_TRANSFORMERS_DEFAULTS, name):
            raise UserError(
                f"generation_kwargs: {name}: {value} is nothing that Transformers knows{hint}; "
                "leave it out"
            )
    filters = sampling_needs(config)
    mode = config.vllm_importance_sampling_mode
    if "structured_outputs" in generation_kwargs and config.vllm_structured_outputs_regex:
        raise UserError(
            "generation_kwargs: structured_outputs contradicts vllm_structured_outputs_regex; "
            "leave out one"
        )
    if config.use_vllm and config.temperature < COOLEST:
        raise UserError(
            f"temperature: {config.temperature:g} is below {COOLEST}: vLLM would sample at "
            f"another one than the trainer computes with; set {COOLEST} or more"
        )
    if filters and mode.startswith("sequence"):
        raise UserError(
            f"{''.join(filters)}, and vllm_importance_sampling_mode: {mode} multiplies this over a "
            "whole answer; set it to token_truncate, or sample at temperature: 1.0 without "
            "penalties"
        )


def sampling_needs(config: AdoraGRPOConfig) -> list[str]:
    """What the ratio to the engine lacks, for the first lines of the run: no line or one.

    With a temperature or a penalty the engine returns log-probabilities after its filters, which
    are larger by the probability that the filters took from the other tokens.
    """
    generation_kwargs = dict(config.generation_kwargs or {})
    if not config.use_vllm or not config.vllm_importance_sampling_correction:
        return []
    if engine_scores_raw(config.temperature, config.repetition_penalty, generation_kwargs):
        return []
    filters: list[str] = []
    if config.top_p < 1:
        filters.append(f"top_p: {config.top_p}")
    if (config.top_k or 0) > 0:
        filters.append(f"top_k: {config.top_k}")
    if config.min_p:
        filters.append(f"min_p: {config.min_p}")
    if config.vllm_structured_outputs_regex:
        filters.append("vllm_structured_outputs_regex")
    for name in sorted(_FILTERS & generation_kwargs.keys()):
        filters.append(f"generation_kwargs: {name}")
    if not filters:
        return []
    return [
        f"{filters[0]} with another temperature than 1, or a penalty: each token's ratio to the "
        "engine lacks the share that was cut off"
    ]


def schedule_of(config: AdoraGRPOConfig, updates: int) -> LRScheduler:
    """Build the schedule of a run with `updates` optimizer steps, on a single parameter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule: LRScheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )
    return schedule


def is_curve(schedule: LRScheduler) -> TypeGuard[LambdaLR]:
    """Whether the rate depends on the step alone, and not on how the training goes."""
    return isinstance(schedule, LambdaLR)


def check_optimizer(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for an optimizer that is not installed, or that refuses its arguments.

    Liger's kernels are looked for too.
    """
    if config.use_liger_kernel and find_spec("liger_kernel") is None:
        raise UserError(
            "use_liger_kernel: true is not installed here; pip install liger-kernel, or leave it "
            "out"
        )
    name = spelled(config.optim)
    pairs = config.optim_args.replace(" ", "").split(",") if config.optim_args else []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        is_finite = value.lower().lstrip("+-") not in ("nan", "inf", "infinity")
        if not (key and equals and value and is_finite):
            raise UserError(
                f"optim_args: {config.optim_args!r} is not NAME=VALUE,NAME=VALUE with finite "
                "numbers"
            )
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(config)
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer):
            optimizer_class([torch.nn.Parameter(torch.zeros(1))], **kwargs)
    except ImportError as error:
        raise UserError(
            f"optim: {name} is not installed ({in_one_line(error)}); use adamw_torch"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if not name.startswith(_NEED_A_MODEL):
            raise UserError(
                f"optim: {name} cannot be used here ({in_one_line(error)}); use adamw_torch"
            ) from error


def check_schedule(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for `lr_scheduler_kwargs` that the schedule refuses or does not read."""
    name = spelled(config.lr_scheduler_type)
    updates = config.max_steps if config.max_steps > 0 else ANY_LENGTH
    kwargs = dict(config.lr_scheduler_kwargs or {})
    check_finite("lr_scheduler_kwargs", kwargs)
    # Transformers ignores them for these schedules.
    if kwargs and name.startswith("constant"):
        raise UserError(
            f"lr_scheduler_kwargs: {kwargs} has no meaning for lr_scheduler_type: {name}; leave it "
            "out"
        )
    try:
        schedule = schedule_of(config, updates)
        if is_curve(schedule):
            schedule.lr_lambdas[0](updates // 2)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        reason = f"does not fit lr_scheduler_type: {name} ({in_one_line(error)})"
        raise UserError(f"lr_scheduler_kwargs: {kwargs} {reason}") from error


def check_machines(config: AdoraGRPOConfig, processes: int, machines: int) -> None:
    """Raise `UserError` for what several machines, or a single process, cannot do.

    `processes`: their number on all machines together.
    """
    parts = config.vllm_tensor_parallel_size
    local_processes = processes // machines
    several = machines > 1
    colocated = config.use_vllm and config.vllm_mode == "colocate"
    if config.fsdp and processes == 1:
        raise UserError(
            f"fsdp: {config.fsdp} needs several processes; leave it out, or start with accelerate "
            "launch"
        )
    if several and config.save_on_each_node:
        raise UserError(
            "save_on_each_node: true is not supported, because a checkpoint is one folder into "
            "which all machines write; leave it out, and choose an output_dir on a disk that they "
            "share"
        )
    if several and colocated and local_processes % parts:
        raise UserError(
            f"vllm_tensor_parallel_size: {parts} does not divide the {local_processes} "
            "processes of one machine; an engine lies on one machine"
        )


def check_tensor_parallel(
    config: AdoraGRPOConfig, model_config: PretrainedConfig, processes: int
) -> None:
    """Raise `UserError` for a model that cannot be divided evenly over the engine's processes.

    vLLM would refuse it only when it loads the weights.
    """
    parts = config.vllm_tensor_parallel_size
    if not config.use_vllm or config.vllm_mode != "colocate" or parts == 1:
        return
    text = model_config.get_text_config()
    vision = getattr(model_config, "vision_config", None)
    key_value_heads = getattr(text, "num_key_value_heads", None) or parts
    counts = [
        (processes, "processes"),
        (text.num_attention_heads, "attention heads of the model"),
        (getattr(vision, "num_heads", parts), "attention heads of its vision tower"),
        (getattr(vision, "intermediate_size", parts), "columns of its vision tower's MLP"),
    ]
    # vLLM copies key-value heads to several processes where there are fewer heads than processes.
    if parts % key_value_heads:
        counts.insert(2, (key_value_heads, "key-value heads of the model"))
    for count, things in counts:
        if count % parts:
            raise UserError(
                f"vllm_tensor_parallel_size: {parts} does not divide the {count} {things}; an "
                "engine is divided into equal parts, one per process"
            )


def check_tools(
    config: AdoraGRPOConfig, *, tools: bool, environments: bool, trl_evaluates: bool = False
) -> None:
    """Check rollouts of several turns, with tools or environments, against the other keys.

    `tools`, `environments`: whether the run has any. `trl_evaluates`: whether TRL evaluates during
    training, on a data set from Python. Raises `UserError`.
    """
    rollouts = config.adora_rollouts
    if environments:
        key = "environment_factory"
        reason = "as no checkpoint could keep their state"
        evaluates = spelled(config.eval_strategy) != "no" and not trl_evaluates
        if rollouts.budget:
            raise _contradiction(key, f"adora_rollouts.budget: {rollouts.budget}, {reason}")
        if rollouts.ahead:
            raise _contradiction(key, f"adora_rollouts.ahead: {rollouts.ahead}, {reason}")
        if evaluates:
            raise _contradiction(key, "eval_strategy: steps, whose evaluators know no environments")
    if not config.use_vllm:
        raise _contradiction("tools" if tools else "environment_factory", "use_vllm: false")
    max_tokens = config.max_completion_length
    turn_tokens = config.adora_tool_options.turn_tokens
    if turn_tokens and turn_tokens > max_tokens:
        raise UserError(
            f"adora_tool_options.turn_tokens: {turn_tokens} is above max_completion_length: "
            f"{max_tokens}; lower it"
        )


def costs_of(config: AdoraGRPOConfig) -> list[str]:
    """What the run does beyond plain GRPO, one line each, for its first lines."""
    return [*method_overheads(config), *sampling_needs(config)]
