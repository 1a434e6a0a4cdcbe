"""Everything about a run that can be wrong and can be known before a weight is loaded."""

from __future__ import annotations

from transformers import PretrainedConfig
from trl import ModelConfig

from adora_vl.advantage.adora import CRITERIA
from adora_vl.config.advantage import check_method, method_needs
from adora_vl.config.arithmetic import BatchPlan, check_rows, plan_batches
from adora_vl.config.noise import check_noise
from adora_vl.config.optimizer import check_optimizer, check_schedule
from adora_vl.config.replay import check_replay, replay_needs
from adora_vl.config.schema import AdoraGRPOConfig
from adora_vl.config.speed import check_speed
from adora_vl.config.visual import check_visual, visual_needs
from adora_vl.errors import UserError
from adora_vl.rollout.sync import refuse_on_cpu


def _check_adora(config: AdoraGRPOConfig) -> None:
    if not config.adora_criteria:
        raise UserError(f"adora_criteria: empty; name one or both of {', '.join(CRITERIA)}")
    mode, factor = config.adora_mode, config.adora_factor
    if (mode == "attenuation" and not 0 < factor <= 1) or (mode == "amplification" and factor < 1):
        right = "above 0 and at most 1" if mode == "attenuation" else "at least 1"
        raise UserError(f"adora_factor: {factor} with adora_mode: {mode} must be {right}")


def _check_unsupported(config: AdoraGRPOConfig, model: ModelConfig, num_processes: int) -> None:
    """Keys that TRL knows and this command would take and then ignore or fail on late."""
    if model.load_in_4bit or model.load_in_8bit:
        raise UserError("load_in_4bit/load_in_8bit: quantised training is not supported; use LoRA on bfloat16 weights")
    if config.trust_remote_code or dict(config.model_init_kwargs or {}).get("trust_remote_code"):
        raise UserError("trust_remote_code: true: code that comes with a model is not run here; set it to false")
    if config.fsdp and num_processes == 1:
        raise UserError(f"fsdp: {config.fsdp} needs several processes; leave it out, or start with accelerate launch")
    if config.use_transformers_continuous_batching or config.use_transformers_paged:
        raise UserError("use_transformers_continuous_batching: true is not supported; set use_vllm: true instead")
    if config.remove_unused_columns:
        raise UserError("remove_unused_columns: true takes the columns away that the rewards read; leave it out")
    if config.sync_ref_model and not config.beta:
        raise UserError("sync_ref_model: true with beta: 0 has no reference model; set beta above 0, or leave it out")
    saves = str(getattr(config.save_strategy, "value", config.save_strategy))
    if saves == "best" or config.load_best_model_at_end:
        key = "load_best_model_at_end: true" if config.load_best_model_at_end else "save_strategy: best"
        raise UserError(f"{key} needs Transformers' own evaluation, which is not used here; use save_strategy: steps")
    strategy = str(getattr(config.eval_strategy, "value", config.eval_strategy))
    if strategy == "no":
        return
    if strategy != "steps":
        raise UserError(f"eval_strategy: {strategy!r} is not supported; use steps with eval_steps, or no")
    if not config.use_vllm or config.vllm_mode != "colocate" or config.vllm_tensor_parallel_size > 1:
        raise UserError(
            "eval_strategy: steps needs use_vllm: true, vllm_mode: colocate and vllm_tensor_parallel_size: 1; else set "
            "it to no and evaluate checkpoints with `python -m eval.geometry3k`"
        )
    if not config.eval_steps or config.eval_steps != int(config.eval_steps):  # null: logging_steps
        raise UserError(f"eval_steps: {config.eval_steps} must be a whole number of optimizer steps")


def _check_rollouts(config: AdoraGRPOConfig, model_config: PretrainedConfig, *, for_this_machine: bool) -> None:
    if for_this_machine and config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(model_config, config.vllm_enable_sleep_mode)
    unguarded = config.use_vllm and not config.vllm_importance_sampling_correction
    if unguarded and config.adora_max_drift is not None:
        raise UserError(
            "vllm_importance_sampling_correction: false leaves the drift guard nothing to measure; set it to true, or "
            "adora_max_drift: null to train unguarded"
        )
    if config.adora_truncated_at is not None and config.adora_truncated_at > config.max_completion_length:
        raise UserError(
            f"adora_truncated_at: {config.adora_truncated_at} is above max_completion_length: "
            f"{config.max_completion_length}, no rollout would ever count as truncated; remove it to derive it"
        )
    check_speed(config)
    limit = config.vllm_max_model_length
    if config.use_vllm and limit is not None and limit <= config.max_completion_length:
        raise UserError(
            f"vllm_max_model_length: {limit} leaves no room for a prompt beside max_completion_length: "
            f"{config.max_completion_length}"
        )


def batch_plan(config: AdoraGRPOConfig, num_processes: int) -> BatchPlan:
    """The run's arithmetic. `GRPOConfig` has by then filled in both generation sizes, for this process count or 1."""
    return plan_batches(
        per_device_train_batch_size=config.per_device_train_batch_size,
        num_processes=num_processes,
        num_generations=config.num_generations,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        steps_per_generation=config.steps_per_generation,
        num_iterations=config.num_iterations,
    )


def check_machines(config: AdoraGRPOConfig, processes: int, machines: int) -> None:
    """Raise `UserError` for what several machines cannot do. `processes` are those of all machines together."""
    if machines == 1:
        return
    if config.save_on_each_node:
        raise UserError(
            "save_on_each_node: true is not supported, because a checkpoint is one folder into which all machines "
            "write; leave it out, and choose an output_dir on a disk that they share"
        )
    parts, local = config.vllm_tensor_parallel_size, processes // machines
    if config.use_vllm and config.vllm_mode == "colocate" and local % parts:
        raise UserError(
            f"vllm_tensor_parallel_size: {parts} does not divide the {local} processes of one machine; an engine lies "
            "on one machine"
        )


def check_divided_engine(config: AdoraGRPOConfig, model_config: PretrainedConfig, processes: int) -> None:
    """vLLM gives each process of an engine an equal part of the layers, and finds out when the weights are loaded."""
    parts = config.vllm_tensor_parallel_size
    if not config.use_vllm or config.vllm_mode != "colocate" or parts == 1:
        return
    text, vision = model_config.get_text_config(), getattr(model_config, "vision_config", None)
    keys = getattr(text, "num_key_value_heads", None) or parts
    for number, things in (
        (processes, "processes"),
        (text.num_attention_heads, "attention heads of the model"),
        (keys if parts % keys else parts, "key-value heads of the model"),  # fewer of them are copied
        (getattr(vision, "num_heads", parts), "attention heads of its vision tower"),
        (getattr(vision, "intermediate_size", parts), "columns of its vision tower's MLP"),
    ):
        if number % parts:
            raise UserError(
                f"vllm_tensor_parallel_size: {parts} does not divide the {number} {things}; an engine is divided into "
                "equal parts, one per process"
            )


def check_run(
    config: AdoraGRPOConfig,
    model: ModelConfig,
    model_config: PretrainedConfig,
    rows: int,
    num_processes: int,
    *,
    for_this_machine: bool = True,
) -> BatchPlan:
    """Raise `UserError` for the first thing that cannot work; returns the batch arithmetic.

    `for_this_machine`: false leaves out what only vLLM on this machine's CPU cannot do.
    """
    _check_unsupported(config, model, num_processes)
    _check_adora(config)
    check_method(config)
    check_noise(config)
    check_replay(config)
    check_visual(config, model_config)
    check_schedule(config)
    if for_this_machine:
        check_optimizer(config)
    _check_rollouts(config, model_config, for_this_machine=for_this_machine)
    check_divided_engine(config, model_config, num_processes)
    plan = batch_plan(config, num_processes)
    check_rows(plan, rows)
    return plan


def costs_of(config: AdoraGRPOConfig) -> list[str]:
    """What the run does beyond plain GRPO, one line each, for its first lines."""
    return [*method_needs(config), *replay_needs(config), *visual_needs(config)]
