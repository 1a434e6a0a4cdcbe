"""The settings that the engine is built with, and the limits of a CPU engine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from adora_vl.config import AdoraGRPOConfig
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB

# Parameters that move probability between tokens, as a temperature does.
_SHIFTS = {
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "thinking_token_budget",
    "extra_args",
}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine that TRL has no field for."""

    dtype: str | None = None  # None: the policy's own
    # TRL loads the policy at a revision, but the engine always at the newest
    revision: str | None = None
    enforce_eager: bool | None = None  # without torch.compile and CUDA graphs; None: on a CPU
    max_num_batched_tokens: int = 4096
    keeps_images: bool = True  # vLLM's own store of processed images
    weight_folder: str | None = None  # where servers read weights; None: they get them by NCCL
    answer_s: float = 900.0  # how many seconds a server may take to sample a group
    output_dir: str = "."  # identifies this run's files in the weight folder


def training_dtype(args: AdoraGRPOConfig) -> str | None:
    """Return the dtype of mixed precision.

    None without it, where passes have the policy's own dtype.
    """
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 else None


def engine_dtype(args: AdoraGRPOConfig) -> str | None:
    """Return the engine's dtype; None is the policy's own.

    With `adora_vllm_dtype: auto` it is the dtype in which the trainer computes. vLLM's own `auto`
    turns a float32 checkpoint into bfloat16, which costs 0.04 nats per token on average.
    """
    return training_dtype(args) if args.adora_vllm_dtype == "auto" else args.adora_vllm_dtype


def engine_settings(args: AdoraGRPOConfig, revision: str | None) -> EngineSettings:
    """Return the settings of the engine for this config; `revision` is that of the model."""
    folder = args.adora_weight_transfer if args.vllm_mode == "server" else "nccl"
    files = {"nccl": None, "file": str(Path(args.output_dir, ".weights"))}
    return EngineSettings(
        dtype=engine_dtype(args),
        revision=revision,
        enforce_eager=args.adora_vllm_enforce_eager,
        max_num_batched_tokens=args.adora_vllm_max_num_batched_tokens,
        keeps_images=not args.uses("cache_images"),
        weight_folder=files.get(folder, folder),
        # The other half remains to ask another server, while the other ranks wait.
        answer_s=args.ddp_timeout / 2,
        output_dir=args.output_dir,
    )


def engine_scores_raw(
    temperature: float, repetition_penalty: float, generation_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the engine can return log-probabilities before filters, as the trainer computes them.

    It cannot where a temperature or a penalty has changed the distribution that it samples from:
    vLLM returns either raw log-probabilities, or those after every change and filter.
    """
    unchanged = (temperature, repetition_penalty) == (1.0, 1.0)
    return unchanged and not _SHIFTS & {*generation_kwargs}


def engine_runs_on_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build, whatever the trainer runs on."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def machine_options(longest: int | None, budget: int, eager: bool | None = None) -> dict[str, Any]:
    """Return the arguments of `LLM` that depend on the machine.

    `longest`: the most tokens of a sequence. `budget`: the most tokens that are processed at once.
    `eager`: whether torch.compile and CUDA graphs are off; None: only on a CPU.

    On a CPU vLLM 0.31 compiles anew at every start ("Compiling model again due to a load failure"),
    which takes longer than it saves. And a prompt with a seed that is processed in two parts
    rewinds a random generator, which only CUDA's can do ("CPU Generator does not use offset"). So
    prompts are processed whole there.
    """
    on_cpu = engine_runs_on_cpu()
    options: dict[str, Any] = {
        "enforce_eager": on_cpu if eager is None else eager,
        "max_num_batched_tokens": budget,
    }
    if on_cpu:
        options |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(budget, longest or 0),
        }
    return options


def disable_tf32_of_float32_engine(dtype: str) -> None:
    """Let the kernels of a float32 engine multiply in float32.

    By default Triton rounds the factors to TF32 on a card, which keeps 10 of 23 bits, so that
    engine and trainer would differ by more than their own rounding. It reads its environment when
    a kernel is compiled. What the user has set stays as it is. `dtype`: of the engine.
    """
    if dtype.removeprefix("torch.") == "float32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def refuse_taken_card(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` where less of the card is free than the engine's share of it.

    vLLM says so as well, but only once the weights are loaded.
    """
    colocated = config.use_vllm and config.vllm_mode == "colocate"
    if not colocated or config.use_cpu or not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info(config.device)
    share = config.vllm_gpu_memory_utilization
    if free >= share * total:
        return
    raise UserError(
        f"vllm_gpu_memory_utilization: {share:g} is {share * total / GIB:.3g} of "
        f"{total / GIB:.3g} GiB, and {free / GIB:.3g} GiB of this card are free; end what has the "
        "rest (nvidia-smi names it, and a trainer before this one in Python has close()), or "
        "choose another card with CUDA_VISIBLE_DEVICES"
    )


def refuse_on_cpu(config: PreTrainedConfig, sleep_mode: bool) -> None:
    """Raise `UserError` for a model or a mode that vLLM on a CPU cannot keep in sync."""
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
