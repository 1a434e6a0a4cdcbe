"""What is refused before a weight is loaded, because keys do not fit each other, the model or the
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, PretrainedConfig, Trainer, get_scheduler

from adora_vl.config.advantage import check_method, method_needs
from adora_vl.config.batch_plan import regroup_obstacle, regroups
from adora_vl.config.losses import check_loss
from adora_vl.config.values import check_finite
from adora_vl.utils.cli import spelled
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line, refuse

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# updates, where their number is not known; without a warmup in steps the curve is the same
ANY_LENGTH = 1000
# optimizers that cannot be tried without one
_NEED_A_MODEL = (
    "galore",
    "apollo",
    "lomo",
    "adalomo",
)


def check_config(config: AdoraGRPOConfig, *, trl_evaluates: bool = False) -> None:
    """Raise `UserError` for the first fault of the keys alone.

    `trl_evaluates`: on a data set that Python gave.
    """
    _check_unsupported(config)
    if not trl_evaluates:
        _check_evaluation(config)
    check_method(config)
    check_loss(config)
    check_schedule(config)
    _check_rollouts(config)


def _check_unsupported(config: AdoraGRPOConfig) -> None:
    """Refuse the keys of TRL that a run would ignore, or would fail on late."""
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
    strategy = spelled(config.eval_strategy)
    steps = config.eval_steps
    if strategy == "no":
        return
    refuse(
        (
            strategy != "steps",
            f"eval_strategy: {strategy!r} is not supported; use steps with eval_steps, or no",
        ),
        (
            not config.use_vllm,
            "eval_strategy: steps needs use_vllm: true; else set it to no and evaluate checkpoints "
            "with `python -m eval.problems`",
        ),
        (
            not steps or steps != int(steps),  # null: logging_steps
            f"eval_steps: {steps} must be a whole number of optimizer steps",
        ),
    )


def _check_rollouts(config: AdoraGRPOConfig) -> None:
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


def check_servers(config: Any) -> None:
    """Raises `UserError` for weights that could not reach the servers of a run by NCCL."""
    if (
        not config.use_vllm
        or config.vllm_mode != "server"
        or config.adora_weight_transfer != "nccl"
    ):
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


def check_filling(config: Any) -> None:
    """Check what replaces groups without signal against the other keys. Raises `UserError`."""
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
    _refuse_beside(key, (obstacle, f"{obstacle}, which depends on the rows of a micro-batch"))


def _rows(config: Any) -> int:
    """Rollouts that a process samples at a time."""
    return int(config.per_device_train_batch_size * config.steps_per_generation)


# Of vLLM's parameters those that say nothing about the beginning or the length of an answer. A loop
# that had begun before an answer goes on is found some repetitions later.
_KNOW_NO_BEGINNING = {
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "repetition_detection",
}


def check_budget(config: Any) -> None:
    """Check the budget of partial rollouts against the other keys. Raises `UserError`."""
    budget = config.adora_rollouts.budget
    rows = _rows(config)
    if budget is None:
        return
    key = f"adora_rollouts.budget: {budget}"
    parameters = sorted({*(config.generation_kwargs or {})} - _KNOW_NO_BEGINNING)
    obstacle = regroup_obstacle(config)
    not_regrouped = obstacle or (
        "" if regroups(config) else "the keys of micro-batches of whole groups all false"
    )
    _refuse_beside(
        key,
        (not config.use_vllm, "use_vllm: false"),
        (
            not config.vllm_importance_sampling_correction,
            "vllm_importance_sampling_correction: false",
        ),
        (config.vllm_structured_outputs_regex, "vllm_structured_outputs_regex"),
        (parameters, f"generation_kwargs: {', '.join(parameters)}"),
        (not_regrouped, not_regrouped),
        (rows % config.num_generations, f"{rows} rollouts per process, which are no whole groups"),
        (
            rows < 2 * config.num_generations,
            "one group per process, which has to end in every generation",
        ),
    )
    mode = config.vllm_importance_sampling_mode
    if mode.startswith("sequence"):
        raise UserError(
            f"{key} learns less from an answer the longer it is where the ratio to the earlier "
            f"weights is one for the whole answer (vllm_importance_sampling_mode: {mode}, TRL's "
            "default is sequence_mask); set vllm_importance_sampling_mode: token_truncate"
        )


def _refuse_beside(key: str, *others: tuple[object, str]) -> None:
    """Raise `UserError` for the first of `others` that holds: it does not go with `key`."""
    for holds, reason in others:
        if holds:
            raise UserError(f"{key} does not go with {reason}; leave out one of the two")


def check_async(config: Any) -> None:
    """Check rollouts that are asked for a generation ahead against the other keys.

    Raises `UserError`.
    """
    if not config.adora_rollouts.ahead:
        return
    by_file = (
        config.use_vllm and config.vllm_mode == "server" and config.adora_weight_transfer != "nccl"
    )
    uncorrected = not config.vllm_importance_sampling_correction
    _refuse_beside(
        f"adora_rollouts.ahead: {config.adora_rollouts.ahead}",
        (not by_file, "another engine than vllm_mode: server with adora_weight_transfer: file"),
        (uncorrected, "vllm_importance_sampling_correction: false"),
        (config.dataloader_num_workers, f"dataloader_num_workers: {config.dataloader_num_workers}"),
    )


COOLEST = 0.01  # vLLM samples at no lower temperature, and takes 0 for the likeliest token
# Parameters of vLLM and of Transformers that a key says, by that key
_KEYS = {
    **{
        name: name
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    },
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "num_generations"),
    "cache_implementation": "cache_implementation",
}
# Those that the trainer sets, since it reads what comes of them, or takes another way of sampling
# for granted
_OWN = {
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
# They move probability between the tokens that are left, as a temperature does; a ban or a filter
# takes tokens away
_SHIFTS = {
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "thinking_token_budget",
    "extra_args",
}
_FILTERS = {"allowed_token_ids", "bad_words", "structured_outputs", "min_tokens"}
_EVERY = GenerationConfig()


def engine_scores_raw(
    temperature: float, repetition_penalty: float, further: Mapping[str, Any]
) -> bool:
    """Whether the engine can be asked for log-probabilities before filters and bans, as the trainer
    computes them: not where temperature or penalties have changed what it samples from. `further`:
    `generation_kwargs`.
    """
    return (temperature, repetition_penalty) == (1.0, 1.0) and not _SHIFTS & {*further}


def check_sampling_keys(config: Any) -> None:
    """Raise `UserError` for `generation_kwargs` beside a key, and for sampling that the trainer
    cannot account for.
    """
    given = dict(config.generation_kwargs or {})
    for name, value in given.items():
        meant = did_you_mean(name, [known for known in vars(_EVERY) if not known.startswith("_")])
        if name in _KEYS:
            raise UserError(
                f"generation_kwargs: {name}: {value} is what the key {_KEYS.get(name)} says; set "
                "that one"
            )
        if name in _OWN:
            raise UserError(
                f"generation_kwargs: {name}: {value} is for the trainer to set; leave it out"
            )
        if not config.use_vllm and not hasattr(_EVERY, name):
            raise UserError(
                f"generation_kwargs: {name}: {value} is nothing that Transformers knows{meant}; "
                "leave it out"
            )
    lost = sampling_needs(config)
    mode = config.vllm_importance_sampling_mode
    if "structured_outputs" in given and config.vllm_structured_outputs_regex:
        raise UserError(
            "generation_kwargs: structured_outputs contradicts vllm_structured_outputs_regex; "
            "leave out one"
        )
    if config.use_vllm and config.temperature < COOLEST:
        raise UserError(
            f"temperature: {config.temperature:g} is below {COOLEST}: vLLM would sample at "
            f"another one than the trainer computes with; set {COOLEST} or more"
        )
    if lost and mode.startswith("sequence"):
        raise UserError(
            f"{''.join(lost)}, and vllm_importance_sampling_mode: {mode} multiplies this over a "
            "whole answer; set it to token_truncate, or sample at temperature: 1.0 without "
            "penalties"
        )


def sampling_needs(config: Any) -> list[str]:
    """What the ratio to the engine lacks, for the first lines of the run: no line or one."""
    given = dict(config.generation_kwargs or {})
    raw = not config.use_vllm or engine_scores_raw(
        config.temperature, config.repetition_penalty, given
    )
    if raw or not config.vllm_importance_sampling_correction:
        return []
    filters = {
        f"top_p: {config.top_p}": config.top_p < 1,
        f"top_k: {config.top_k}": (config.top_k or 0) > 0,
        f"min_p: {config.min_p}": bool(config.min_p),
        "vllm_structured_outputs_regex": bool(config.vllm_structured_outputs_regex),
        **{f"generation_kwargs: {name}": name in given for name in sorted(_FILTERS)},
    }
    lacks = (
        "with another temperature than 1, or a penalty: each token's ratio to the engine lacks "
        "the share that"
    )
    return [f"{name} {lacks} was cut off" for name, on in filters.items() if on][:1]


def schedule_of(config: Any, updates: int) -> Any:
    """The schedule of a run with so many updates, as Transformers makes it, on one parameter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    return get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )


def is_curve(schedule: Any) -> bool:
    """Whether the rate depends on the step alone, and not on how the training goes."""
    return isinstance(schedule, LambdaLR)


def check_optimizer(config: Any) -> None:
    """Raises `UserError` for an optimizer or kernels not installed here, or an optimizer that
    refuses its arguments.
    """
    if config.use_liger_kernel and find_spec("liger_kernel") is None:
        raise UserError(
            "use_liger_kernel: true is not installed here; pip install liger-kernel, or leave it "
            "out"
        )
    name = spelled(config.optim)
    for pair in (config.optim_args or "").replace(" ", "").split(",") if config.optim_args else ():
        key, equals, value = pair.partition("=")
        if not (key and equals and value) or value.lower().lstrip("+-") in (
            "nan",
            "inf",
            "infinity",
        ):
            raise UserError(
                f"optim_args: {config.optim_args!r} is not NAME=VALUE,NAME=VALUE with finite "
                "numbers"
            )
    try:
        made = Trainer.get_optimizer_cls_and_kwargs(config)
        if isinstance(made[0], type) and issubclass(made[0], torch.optim.Optimizer):
            made[0]([torch.nn.Parameter(torch.zeros(1))], **made[1])
    except ImportError as error:
        raise UserError(
            f"optim: {name} is not installed ({in_one_line(error)}); use adamw_torch"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if not name.startswith(_NEED_A_MODEL):
            raise UserError(
                f"optim: {name} cannot be used here ({in_one_line(error)}); use adamw_torch"
            ) from error


def check_schedule(config: Any) -> None:
    """Raises `UserError` for a schedule that Transformers cannot make of its arguments, or that
    takes none.
    """
    name = spelled(config.lr_scheduler_type)
    updates = config.max_steps if config.max_steps > 0 else ANY_LENGTH
    given = dict(config.lr_scheduler_kwargs or {})
    check_finite("lr_scheduler_kwargs", given)
    if given and name.startswith("constant"):  # Transformers does not look at them
        raise UserError(
            f"lr_scheduler_kwargs: {given} has no meaning for lr_scheduler_type: {name}; leave it "
            "out"
        )
    try:
        schedule = schedule_of(config, updates)
        if is_curve(schedule):
            schedule.lr_lambdas[0](updates // 2)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        why = f"does not fit lr_scheduler_type: {name} ({in_one_line(error)})"
        raise UserError(f"lr_scheduler_kwargs: {given} {why}") from error


def check_machines(config: AdoraGRPOConfig, processes: int, machines: int) -> None:
    """Raise `UserError` for what several machines, or one process, cannot do.

    `processes`: of all machines together.
    """
    parts = config.vllm_tensor_parallel_size
    local = processes // machines
    several = machines > 1
    divided = config.use_vllm and config.vllm_mode == "colocate"
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
    if several and divided and local % parts:
        raise UserError(
            f"vllm_tensor_parallel_size: {parts} does not divide the {local} "
            "processes of one machine; an engine lies on one machine"
        )


def check_tensor_parallel(
    config: AdoraGRPOConfig, model_config: PretrainedConfig, processes: int
) -> None:
    """Refuse a division that vLLM would refuse only when it loads the weights: each process gets an
    equal part.
    """
    parts = config.vllm_tensor_parallel_size
    if not config.use_vllm or config.vllm_mode != "colocate" or parts == 1:
        return
    text = model_config.get_text_config()
    vision = getattr(model_config, "vision_config", None)
    keys = getattr(text, "num_key_value_heads", None) or parts
    of_parts = f"vllm_tensor_parallel_size: {parts} does not divide the "
    refuse(
        *(
            (
                number % parts,
                f"{of_parts}{number} {things}; an engine is divided into equal parts, one per "
                "process",
            )
            for number, things in (
                (processes, "processes"),
                (text.num_attention_heads, "attention heads of the model"),
                (
                    keys if parts % keys else parts,
                    "key-value heads of the model",
                ),  # vLLM copies them if they are fewer
                (getattr(vision, "num_heads", parts), "attention heads of its vision tower"),
                (getattr(vision, "intermediate_size", parts), "columns of its vision tower's MLP"),
            )
        )
    )


def check_tools(
    config: Any, *, tools: bool, environments: bool, trl_evaluates: bool = False
) -> None:
    """Check rollouts of several turns, with tools or environments, against the other keys.

    Raises `UserError`.
    """
    rollouts = config.adora_rollouts
    if environments:
        budget = rollouts.budget
        ahead = rollouts.ahead
        why = "as no checkpoint could keep their state"
        evaluates = spelled(config.eval_strategy) != "no" and not trl_evaluates
        _refuse_beside(
            "environment_factory",
            (budget, f"adora_rollouts.budget: {budget}, {why}"),
            (ahead, f"adora_rollouts.ahead: {ahead}, {why}"),
            (evaluates, "eval_strategy: steps, whose evaluators know no environments"),
        )
    _refuse_beside(
        "tools" if tools else "environment_factory",
        (not config.use_vllm, "use_vllm: false"),
    )
    most = config.max_completion_length
    least = config.adora_tool_options.turn_tokens
    if least and least > most:
        raise UserError(
            f"adora_tool_options.turn_tokens: {least} is above max_completion_length: {most}; "
            "lower it"
        )


def costs_of(config: AdoraGRPOConfig) -> list[str]:
    """What the run does beyond plain GRPO, one line each, for its first lines."""
    return [*method_needs(config), *sampling_needs(config)]
