"""Makes the trainer's collaborators from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from adora_vl.advantage.run import MethodRun
from adora_vl.batch import LogFigure
from adora_vl.batching.batcher import Batcher, Shape
from adora_vl.batching.dynamic_sampling import DynamicSampling
from adora_vl.batching.replay import SampleReplay
from adora_vl.checkpoint.sampler import EpochRepeatSampler
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.noise import noise_settings
from adora_vl.config.visual import weighs_visually
from adora_vl.dedup.image_bank import ImageBanks
from adora_vl.dedup.images import DistinctImages
from adora_vl.errors import UserError
from adora_vl.learning_rate import ScaledRate
from adora_vl.rollout.distinct_rows import DistinctRows
from adora_vl.rollout.engine_settings import EngineSettings
from adora_vl.rollout.importance import ImportanceRatio, RatioSettings
from adora_vl.rollout.noise import NoisyRollouts
from adora_vl.rollout.prefetch import ImagePrefetch, NoPrefetch
from adora_vl.rollout_log.metrics_file import MetricsFile
from adora_vl.rollout_log.phases import PhaseClock, StepClock
from adora_vl.rollout_log.progress import ProgressLine
from adora_vl.rollout_log.recorder import KeepRecord, Recorder
from adora_vl.rollout_log.rollouts import Record
from adora_vl.unreadable_images import only_decodes
from adora_vl.visual import VisualDependency
from adora_vl.weighing import Truncation, Weigher

_RECORDED_SETTINGS = ("num_generations", "scale_rewards", "loss_type", "reward_weights")  # beside our own keys


def engine_dtype(args: AdoraGRPOConfig) -> str | None:
    """The engine's dtype. With `adora_vllm_dtype: auto` it is that of the trainer; None is the policy's own dtype.

    vLLM's own `auto` turns a float32 checkpoint into bfloat16, which costs 0.04 nats per token on average.
    """
    if args.adora_vllm_dtype != "auto":
        return args.adora_vllm_dtype
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else None


def engine_settings(args: AdoraGRPOConfig, revision: str | None) -> EngineSettings:
    """What the engine is built with."""
    return EngineSettings(
        dtype=engine_dtype(args),
        revision=revision,
        enforce_eager=args.adora_vllm_enforce_eager,
        max_num_batched_tokens=args.adora_vllm_max_num_batched_tokens,
        keeps_images=not args.adora_cache_images,
    )


def batch_shape(args: AdoraGRPOConfig, iterations: int) -> Shape:
    """How a generation is cut up. `iterations`: TRL's `num_iterations`."""
    return Shape(
        rows=args.per_device_train_batch_size,
        generations=args.num_generations,
        steps=args.steps_per_generation,
        iterations=iterations,
        accumulated=args.gradient_accumulation_steps,
    )


def batcher(
    args: AdoraGRPOConfig,
    accelerator: Accelerator,
    log: LogFigure,
    shape: Shape,
    banks: ImageBanks,
    pad_id: int,
    every_row_counts: bool,
) -> Batcher:
    """What cuts a generation into micro-batches. `every_row_counts`: whether rows with an advantage of 0 add to the
    loss.
    """
    return Batcher(
        accelerator,
        banks,
        log,
        shape,
        args,
        pad_id=pad_id,
        loss_type=args.loss_type,
        every_row_counts=every_row_counts,
    )


def prefetch(
    args: AdoraGRPOConfig, images: DistinctImages, rows: DistinctRows, order: EpochRepeatSampler, dataset: Any
) -> NoPrefetch:
    """What reads and processes the next generation's images. `dataset`: what `rows` reads from.

    Nothing, where a worker of the loader reads ahead, or where reading a row may draw a random number.
    """
    wanted = args.adora_prefetch_images
    if wanted is None:
        wanted = args.device.type != "cpu"  # there the policy needs the processor itself
    if not wanted or images.cache is None or not images.shown:
        return NoPrefetch()
    if args.dataloader_num_workers or not only_decodes(dataset):
        return NoPrefetch()
    return ImagePrefetch(rows, order, images.process, images.cache.limit_bytes)


def dynamic_sampling(args: AdoraGRPOConfig, accelerator: Accelerator, log: LogFigure, pad_id: int) -> DynamicSampling:
    """What replaces groups without signal, where `adora_dynamic_sampling` says so."""
    return DynamicSampling(accelerator, log, args, generations=args.num_generations, seed=args.seed, pad_id=pad_id)


def sample_replay(
    args: AdoraGRPOConfig, accelerator: Accelerator, log: LogFigure, images: DistinctImages, pad_id: int
) -> SampleReplay:
    """What replaces groups without signal by earlier ones, where `adora_replay_groups` says so.

    Raises `UserError` where every rollout would keep an image of its own.
    """
    if args.adora_replay_groups and images.shown and images.cache is None:
        raise UserError(
            f"adora_replay_groups: {args.adora_replay_groups} needs an image processor whose output can be kept "
            "(adora_cache_images), and that of this model is of another kind; set it to 0"
        )
    return SampleReplay(
        accelerator,
        images.banks,
        log,
        capacity=args.adora_replay_groups,
        alpha=args.adora_replay_alpha,
        generations=args.num_generations,
        rows=args.per_device_train_batch_size,
        pad_id=pad_id,
    )


def logs_tables(args: AdoraGRPOConfig) -> bool:
    """Whether a tracker gets TRL's table of completions; tensorboard has no tables."""
    return bool(args.log_completions and {"wandb", "trackio"} & set(args.report_to))


def logs_images(args: AdoraGRPOConfig) -> bool:
    """TRL's `log_multimodal`, where a tracker has a table for the images: stock TRL gathers all images of a generation
    on every rank even where there is none.
    """
    return bool(args.log_multimodal and logs_tables(args))


def weigher(args: AdoraGRPOConfig, accelerator: Accelerator, methods: MethodRun, reward_weights_F: Tensor) -> Weigher:
    """Rewards to advantages, as the keys of ADORA and of the method say."""
    return Weigher(
        methods,
        accelerator,
        reward_weights_F=reward_weights_F,
        truncation=Truncation(
            at=args.truncated_at if args.adora_truncation == "length" else None,
            masked=args.mask_truncated_completions,
        ),
        correct_above=args.adora_correct_above,
    )


def importance_ratio(args: AdoraGRPOConfig, accelerator: Accelerator, log: LogFigure) -> ImportanceRatio:
    """The ratio of policy to engine, as TRL's `vllm_importance_sampling_*` say."""
    settings = RatioSettings(
        mode=args.vllm_importance_sampling_mode,
        clip_min=args.vllm_importance_sampling_clip_min,
        clip_max=args.vllm_importance_sampling_clip_max,
    )
    return ImportanceRatio(settings, accelerator, log)


def noisy_rollouts(
    args: AdoraGRPOConfig, accelerator: Accelerator, log: LogFigure, state: Callable[[], TrainerState]
) -> NoisyRollouts:
    """The rollouts that see a distorted image. `state`: the trainer's, which is made anew when the training begins."""

    def progress() -> float:
        return float(state().global_step / max(state().max_steps, 1))

    return NoisyRollouts(noise_settings(args), accelerator, log, progress)


def visual_dependency(
    args: AdoraGRPOConfig, accelerator: Accelerator, images: DistinctImages, log: LogFigure, *, dropout: bool
) -> VisualDependency:
    """What weighs tokens by how much they depend on the image. Raises `UserError` where no patch can be blackened."""
    if weighs_visually(args) and images.shown and not images.knows_patches:
        raise UserError(
            "adora_visual_tokens: the image processor of this model cuts images in a way that is not known here; set "
            "adora_visual_tokens and adora_visual_scale_min to 1"
        )
    return VisualDependency(
        accelerator,
        images,
        log,
        share=args.adora_visual_tokens,
        smallest=args.adora_visual_scale_min,
        rows=args.per_device_train_batch_size,
        has_dropout=dropout,
    )


def recorder(args: AdoraGRPOConfig, accelerator: Accelerator, shape: Shape) -> Recorder:
    """The record in `output_dir/rollouts`, with the settings that its readers need."""
    own = [each.name for each in fields(args) if each.name.startswith("adora_")]
    settings = {name: getattr(args, name) for name in (*own, *_RECORDED_SETTINGS)}
    settings["truncated_at"] = args.truncated_at
    record = Record(Path(args.output_dir), args.adora_record_gb, settings, accelerator.num_processes)
    return Recorder(
        record, accelerator, every=args.adora_record_every, cycle_steps=shape.cycle // args.gradient_accumulation_steps
    )


def callbacks(
    clock: PhaseClock, recorder: Recorder, batcher: Batcher, log: Callable[[str, float], None], methods: MethodRun
) -> list[TrainerCallback]:
    """What scales the learning rate and writes log, record and progress line, in the order in which they are called."""
    keeps = [StepClock(clock, log), KeepRecord(recorder, batcher.take_moved), ProgressLine(), MetricsFile()]
    return [ScaledRate(lambda: methods.rate), *keeps]
