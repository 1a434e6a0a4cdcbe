"""All that is known about a run before it starts, on this machine or for another one: the road, and its memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trl import ModelConfig

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.batch_plan import regroup_obstacle
from adora_vl.config.reading import Given
from adora_vl.config.where import DryRunOptions, Sharding
from adora_vl.data.dataset import row_count
from adora_vl.data.prompt_lengths import ContextLimit, LengthCheck, Measured
from adora_vl.models.families import family_of, sees_images
from adora_vl.models.shape import ModelShape
from adora_vl.planning.activations import MicroBatch
from adora_vl.planning.memory import MOST_IMAGE_TOKENS, Engine, Setup, Sharing
from adora_vl.prepare import prepare_on_paper
from adora_vl.rollout.engine_settings import engine_dtype
from adora_vl.start.checked import Checked
from adora_vl.utils.cli import amount
from adora_vl.utils.files import GIB

ASSUMED_CARD_GIB = 80.0
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plan:
    """A run on paper. `card` is bytes of one GPU, or of this machine for a run on its CPU."""

    run: Checked
    script: AdoraScriptArguments
    lengths: Measured
    rows: int | None  # that the run trains on; None where the data are not here
    setup: Setup
    card: int
    card_name: str
    notes: list[str]

    @property
    def limit(self) -> ContextLimit | None:
        """None where it is not known, or image tokens cannot be counted."""
        return self.run.overlong.limit

    @property
    def checks(self) -> list[LengthCheck]:
        """The prompts of training and evaluations, before any are left out; [] where not known."""
        return self.run.overlong.checks if self.rows is not None else []

    @property
    def image_room(self) -> int:
        """The image tokens for which the limit has room beside the longest text and a whole answer; below 1: none."""
        if self.limit is None:
            return MOST_IMAGE_TOKENS
        return self.limit.tokens - self.limit.needed(self.lengths.longest_text)


def make_plan(given: Given, options: DryRunOptions) -> Plan:
    """Everything that a run checks before it loads weights, and its lengths and memory. Raises `UserError`."""
    run = prepare_on_paper(given, options)
    script, lengths, sharding = run.script, run.lengths, run.where.sharding
    assert script is not None and lengths is not None, "a dry run has the keys of a command, and measures"
    notes = [*run.notes, *_mixture(run)]
    if family_of(run.model_config) is None and sees_images(run.model_config):
        notes.append(
            f"the images of model_type {run.model_config.model_type} are counted as those of Qwen2.5-VL, and what its "
            "vision tower keeps for the backward pass is not in the prediction"
        )
    setup = make_setup(run.config, run.model, run.shape, sharding, lengths)
    rows = len(run.dataset) if run.dataset is not None else None
    return Plan(run, script, lengths, rows, setup, *_card(options, run.config, sharding.local_processes), notes)


def _mixture(run: Checked) -> list[str]:
    """How several data sets are mixed."""
    if run.dataset is None or run.script is None or len(run.data) == 1:
        return []
    split, shares = run.script.dataset_train_split, run.script.adora_mixture
    parts = [f"{Path(folder).name} {amount(row_count(Path(folder), split), 'row')}" for folder in run.data]
    if shares is not None:
        parts = [f"{part} at {share:.0%}" for part, share in zip(parts, shares, strict=True)]
    return [f"{len(parts)} data sets are mixed into {len(run.dataset)} rows per epoch: {', '.join(parts)}"]


def _card(options: DryRunOptions, config: AdoraGRPOConfig, processes: int) -> tuple[int, str]:
    if options.card_gib is not None:
        return int(options.card_gib * GIB), f"a card of {options.card_gib:g} GiB"
    import torch

    if config.use_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
        return memory, f"a process's share of this machine's memory, {memory / GIB:.0f} GiB"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return int(properties.total_memory), f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    assumed_card = f"a card of {ASSUMED_CARD_GIB:g} GiB (no GPU is visible here; --card-gib says another size)"
    return int(ASSUMED_CARD_GIB * GIB), assumed_card


def make_setup(
    config: AdoraGRPOConfig, model: ModelConfig, shape: ModelShape, sharding: Sharding, lengths: Measured
) -> Setup:
    """What memory depends on. Prompts are taken to be as long as the longest, completions as the limit allows."""
    prompt, image = lengths.longest
    mixed = bool(config.bf16 or config.fp16)
    sequences = config.per_device_train_batch_size
    generation = sequences * config.steps_per_generation
    engine, dtype = None, engine_dtype(config)
    if config.use_vllm and config.vllm_mode == "colocate":
        engine = Engine(
            utilization=config.vllm_gpu_memory_utilization,
            dtype_bytes=_BYTES[dtype] if dtype else shape.weight_bytes,
            max_length=config.vllm_max_model_length or prompt + config.max_completion_length,
            max_sequences=generation * config.vllm_tensor_parallel_size,
            tensor_parallel=config.vllm_tensor_parallel_size,
            sleep=config.vllm_enable_sleep_mode,
            cpu_cache=int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB) if config.use_cpu else None,
        )
    cached = config.own("cache_images")
    shares = cached and not regroup_obstacle(config)  # else the rollouts of a group lie in any micro-batch
    sharing = Sharing(cached, shares and config.own("share_vision"), shares and config.own("share_prompt"))
    return Setup(
        shape=shape,
        sharding=sharding,
        batch=MicroBatch(sequences, prompt, config.max_completion_length, image if shape.vision else 0),
        generation=generation,
        generations=config.num_generations,
        sharing=sharing,
        compute_bytes=2 if mixed else shape.weight_bytes,
        mixed=mixed,
        checkpointing=config.gradient_checkpointing,
        micro_batches=config.gradient_accumulation_steps,
        masked="flash" not in str(model.attn_implementation or ""),
        reference=config.beta != 0.0,
        engine=engine,
        accelerator=not config.use_cpu,
    )
