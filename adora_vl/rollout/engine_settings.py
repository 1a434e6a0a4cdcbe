"""The settings that the engine is built with, and the limits of a CPU engine."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BaseImageProcessor, PreTrainedConfig

from adora_vl.config import AdoraGRPOConfig
from adora_vl.models.load import pixel_limits
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB

# vLLM's parameter to stop an answer that repeats itself
LOOP_DETECTION_PARAMETER = "repetition_detection"
_BAN_BIAS = -100.0  # a bias on a token's logit, with which it is never sampled
# vLLM's parameters that move probability between tokens, as a temperature does.
_PARAMETERS_THAT_CHANGE_DISTRIBUTION = {
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "thinking_token_budget",
    "extra_args",
}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of the engine that TRL has no field for."""

    dtype: str | None  # None: the policy's own
    revision: str | None  # TRL loads the policy at a revision, but the engine always at the newest
    enforce_eager: bool | None  # whether torch.compile and CUDA graphs are off; None: only on a CPU
    max_num_batched_tokens: int
    engine_caches_images: bool  # whether vLLM caches processed images itself
    weight_folder: str | None  # where servers read weights; None: they get them by NCCL
    answer_timeout_s: float  # how many seconds a server may take to sample a group
    output_dir: str  # identifies this run's files in the weight folder


def training_dtype(args: AdoraGRPOConfig) -> str | None:
    """Return the dtype in which the policy computes in mixed precision.

    None without mixed precision, where it computes in its own dtype.
    """
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 else None


def engine_dtype(args: AdoraGRPOConfig) -> str | None:
    """Return the engine's dtype; None stands for the policy's own.

    With `adora_vllm_dtype: auto` it is the dtype in which the trainer computes. vLLM's own `auto`
    turns a float32 checkpoint into bfloat16, which moves log-probabilities by 0.04 nats per token.
    """
    return training_dtype(args) if args.adora_vllm_dtype == "auto" else args.adora_vllm_dtype


def engine_settings(args: AdoraGRPOConfig, revision: str | None) -> EngineSettings:
    """Return the settings of the engine for this config; `revision` is that of the model."""
    # `adora_weight_transfer` is `nccl`, `file` for a folder inside of `output_dir`, or the path of
    # another folder.
    weight_folder = None
    if args.vllm_mode == "server" and args.adora_weight_transfer == "file":
        weight_folder = str(Path(args.output_dir, ".weights"))
    elif args.vllm_mode == "server" and args.adora_weight_transfer != "nccl":
        weight_folder = args.adora_weight_transfer
    return EngineSettings(
        dtype=engine_dtype(args),
        revision=revision,
        enforce_eager=args.adora_vllm_enforce_eager,
        max_num_batched_tokens=args.adora_vllm_max_num_batched_tokens,
        # Images that the trainer caches need no second cache in vLLM.
        engine_caches_images=not args.uses("cache_images"),
        weight_folder=weight_folder,
        # The other ranks wait for `ddp_timeout`. After half of that time there is as much time left
        # to ask another server.
        answer_timeout_s=args.ddp_timeout / 2,
        output_dir=args.output_dir,
    )


def engine_scores_raw(
    temperature: float, repetition_penalty: float, generation_kwargs: Mapping[str, Any]
) -> bool:
    """Return whether vLLM's raw log-probabilities are those that the trainer computes.

    vLLM returns either raw log-probabilities, or those after every change and filter. Raw ones do
    not fit where a temperature or a penalty changes the distribution that the engine samples from.

    `generation_kwargs`: vLLM's further sampling parameters, by their names in the config.
    """
    is_unchanged = temperature == 1.0 and repetition_penalty == 1.0
    return is_unchanged and not _PARAMETERS_THAT_CHANGE_DISTRIBUTION & {*generation_kwargs}


def engine_runs_on_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build, whatever the trainer runs on."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def complete_generation_kwargs(
    generation_kwargs: Mapping[str, Any], *, banned_ids: Sequence[int], is_colocated: bool
) -> dict[str, Any]:
    """Return a config's `generation_kwargs` in the form that vLLM takes, with bans added.

    Args:
        generation_kwargs: vLLM's sampling parameters, as the config has them.
        banned_ids: tokens that are never sampled.
        is_colocated: whether the engine is in this process, and not on a server.

    Raises `UserError` for a `repetition_detection` or a `logit_bias` that vLLM does not take.
    """
    completed = dict(generation_kwargs)
    logit_bias = _with_int_keys(completed.get("logit_bias") or {}) | banning_logit_bias(banned_ids)
    if logit_bias:
        completed["logit_bias"] = logit_bias
    if not is_colocated:
        return completed
    # The trainer reads only token ids. vLLM needs the text only to find strings to stop at.
    if not completed.get("stop"):
        completed.setdefault("detokenize", False)
    if isinstance(completed.get(LOOP_DETECTION_PARAMETER), dict):
        # It imports vLLM, which only a colocated engine needs.
        from adora_vl.rollout.llm import loop_detection_params

        completed[LOOP_DETECTION_PARAMETER] = loop_detection_params(
            completed[LOOP_DETECTION_PARAMETER]
        )
    return completed


def _with_int_keys(logit_bias: Mapping[Any, Any]) -> dict[int, float]:
    """Return a `logit_bias` with token ids as keys, which are strings in JSON.

    Raises `UserError` where it is no mapping of token ids to numbers.
    """
    try:
        return {int(token): float(bias) for token, bias in logit_bias.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"generation_kwargs: logit_bias: {logit_bias!r} is no mapping of token ids to "
            'biases; give {"50": -1.0}'
        ) from error


def banning_logit_bias(token_ids: Iterable[int]) -> dict[int, float]:
    """Return vLLM's `logit_bias` with which these tokens are never sampled."""
    return dict.fromkeys(token_ids, _BAN_BIAS)


def machine_options(
    max_length: int | None, max_batched_tokens: int, eager: bool | None = None
) -> dict[str, Any]:
    """Return the arguments of `LLM` that differ between a GPU and a CPU.

    On a CPU vLLM 0.31 compiles again at every start ("Compiling model again due to a load
    failure"), which takes longer than it saves. So compilation is off there. It also cannot process
    a prompt in chunks, which would rewind a random generator ("CPU Generator does not use offset").
    So the longest prompt has to fit into one batch.

    Args:
        max_length: the largest number of tokens of a prompt and its completion.
        max_batched_tokens: the largest number of tokens that are processed at once.
        eager: whether torch.compile and CUDA graphs are off; None: only on a CPU.
    """
    on_cpu = engine_runs_on_cpu()
    options: dict[str, Any] = {
        "enforce_eager": on_cpu if eager is None else eager,
        "max_num_batched_tokens": max_batched_tokens,
    }
    if on_cpu:
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(max_batched_tokens, max_length or 0)
    return options


def image_options(
    image_processor: BaseImageProcessor | None, *, caches_images: bool
) -> dict[str, Any]:
    """Return the arguments of `LLM` that concern images.

    Args:
        image_processor: the trainer's. vLLM would read pixel limits from the model's folder, and
            its prompts would then differ from the trainer's.
        caches_images: whether vLLM caches processed images. Where the trainer caches them itself,
            a second cache would only take memory.
    """
    options: dict[str, Any] = {
        "mm_processor_kwargs": pixel_limits(image_processor),
        "limit_mm_per_prompt": {"video": 0},  # otherwise vLLM reserves memory for a video
    }
    if not caches_images:
        options["mm_processor_cache_gb"] = 0
    return options


def disable_tf32_of_float32_engine(dtype: str) -> None:
    """Let Triton's kernels multiply in float32, for an engine whose dtype is float32.

    By default Triton rounds the factors to TF32 on a GPU, which keeps 10 of 23 bits. Engine and
    trainer would then differ by more than float32's rounding. Triton reads the variable when it
    compiles a kernel. A value that the user has set stays as it is.
    """
    if dtype.removeprefix("torch.") == "float32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def refuse_taken_card(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` where less GPU memory is free than the engine will take.

    vLLM refuses that as well, but only after the weights are loaded.
    """
    if not config.has_colocated_engine or config.use_cpu or not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info(config.device)
    share = config.vllm_gpu_memory_utilization  # of the whole GPU memory
    if free >= share * total:
        return
    raise UserError(
        f"vllm_gpu_memory_utilization: {share:g} is {share * total / GIB:.3g} of "
        f"{total / GIB:.3g} GiB, and {free / GIB:.3g} GiB of this card are free; end what has the "
        "rest (nvidia-smi names it, and a trainer before this one in Python has close()), or "
        "choose another card with CUDA_VISIBLE_DEVICES"
    )


def refuse_on_cpu(config: PreTrainedConfig, sleep_mode: bool) -> None:
    """Raise `UserError` for a model or a mode that vLLM does not support on a CPU.

    Args:
        config: that of the model.
        sleep_mode: whether the engine is to free its memory while the policy learns.
    """
    if not engine_runs_on_cpu():
        return
    if config.tie_word_embeddings:
        raise UserError(
            "tie_word_embeddings: true, but vLLM on a CPU refreshes only one of the two uses of a "
            "tied embedding when weights are synced, so rollouts would drift from the policy; use "
            "an untied model, a GPU or use_vllm: false"
        )
    if sleep_mode:
        raise UserError("vllm_enable_sleep_mode: true needs a GPU; set it to false on a CPU")
