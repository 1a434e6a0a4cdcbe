"""A run on paper: what it is made of, measured and predicted before a weight is loaded."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from trl import ModelConfig

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.batch_plan import setting_against_regrouping, total_optimizer_steps
from adora_vl.config.command import CliArgs
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.sharding import Sharding
from adora_vl.data.context_limit import ContextLimit
from adora_vl.data.dataset import row_count
from adora_vl.data.overlong_prompts import LengthCheck
from adora_vl.data.prompt_lengths import PromptLengths, stored_image_sizes
from adora_vl.models.families import family_of, sees_images
from adora_vl.models.shape import ModelShape
from adora_vl.planning.engine_memory import EngineMemorySettings
from adora_vl.planning.memory import (
    MAX_IMAGE_TOKENS,
    MemoryPrediction,
    MemorySetup,
    PlannedMicroBatch,
    SharedComputation,
    predict_memory,
)
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.prepare import prepare_on_paper
from adora_vl.rollout.engine_settings import engine_dtype
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB

# the size of an H100 or A100, for a dry run on a machine without a GPU
ASSUMED_GPU_GIB = 80.0
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DryRunPlan:
    """A run on paper: what was checked, measured and predicted before a weight is loaded."""

    run: ResolvedRun
    script_args: AdoraScriptArguments
    lengths: PromptLengths
    row_count: int | None
    """How many rows the run trains on; None where the dataset is not on this machine."""
    setup: MemorySetup
    """What the memory of the run depends on."""
    gpu_bytes: int
    """Bytes of memory of one GPU, or one process's share of this machine for a run on its CPU."""
    gpu_name: str
    """The GPU, or this machine's memory, in words."""
    notes: list[str]
    """Lines about the run for the user."""

    @property
    def command(self) -> CliArgs:
        """The command that is planned."""
        cli_args = self.run.request.cli_args
        assert cli_args is not None, "a dry run is of a command"
        return cli_args

    @cached_property
    def prediction(self) -> MemoryPrediction:
        """What the GPU holds in each phase of a training step."""
        return predict_memory(self.setup, self.gpu_bytes)

    @property
    def fits(self) -> bool:
        """Whether the run fits into its GPUs."""
        return self.prediction.fits_into(self.gpu_bytes)

    @property
    def steps_per_epoch(self) -> int | None:
        """The optimizer steps of an epoch; None where the data set is not on this machine."""
        if self.row_count is None:
            return None
        return self.run.layout.optimizer_steps_per_epoch(self.row_count)

    @property
    def total_steps(self) -> int | None:
        """The optimizer steps of the run; None where only the missing data set says it."""
        return total_optimizer_steps(self.run.config, self.run.layout, self.row_count)

    @property
    def limit(self) -> ContextLimit | None:
        """The limit on the tokens of a prompt with its answer.

        None if it is not known, or if the tokens of images cannot be counted for this model.
        """
        return self.run.prompts.length_filter.limit

    @property
    def checks(self) -> list[LengthCheck]:
        """The length checks of training and evaluation prompts; none without a data set."""
        return self.run.prompts.length_filter.checks if self.row_count is not None else []

    @property
    def max_image_tokens(self) -> int:
        """The number of image tokens that fit beside the longest text and a whole answer.

        Below 1 there is no room for any image.
        """
        # None where neither a key nor the model limits the tokens of a prompt with its answer
        if self.limit is None:
            return MAX_IMAGE_TOKENS
        return self.limit.tokens - self.limit.tokens_for(self.lengths.longest_text)


def make_plan(
    command: CliArgs, options: DryRunOptions, *, with_few_rows: bool = False
) -> DryRunPlan:
    """Check a run without starting it, and predict its prompt lengths and memory.

    All checks are made that a run makes before it loads weights. `with_few_rows`: plan also for a
    data set with too few rows for a generation. Raises `UserError` with the line that a run would
    stop with.
    """
    run = prepare_on_paper(command, options)
    # A dry run goes on after this one fault, and reports it as a refusal.
    if run.messages.refusals and not with_few_rows:
        raise UserError(run.messages.refusals[0])
    script_args = run.script_args
    lengths = run.data.prompt_lengths
    sharding = run.context.sharding
    assert script_args is not None, "a dry run has the keys of a command"
    assert lengths is not None, "a dry run measures"
    notes = [*run.messages.notes, *_mixture_notes(run), *_zoom_notes(run)]
    if family_of(run.model.config) is None and sees_images(run.model.config):
        notes.append(
            f"the images of model_type {run.model.config.model_type} are counted as those of "
            "Qwen2.5-VL, and what its vision tower keeps for the backward pass is not in the "
            "prediction"
        )
    setup = build_memory_setup(
        run.config,
        model=run.request.model.model_args,
        shape=run.shape,
        sharding=sharding,
        lengths=lengths,
    )
    gpu = _planned_gpu(options, run.config, sharding.local_processes)
    return DryRunPlan(
        run=run,
        script_args=script_args,
        lengths=lengths,
        row_count=run.data.row_count,
        setup=setup,
        gpu_bytes=gpu.bytes,
        gpu_name=gpu.name,
        notes=notes,
    )


def _mixture_notes(run: ResolvedRun) -> list[str]:
    """Return a note on how several data sets are mixed; none if there is only one."""
    if run.data.train_dataset is None or run.script_args is None or len(run.data.folders) == 1:
        return []
    split = run.script_args.dataset_train_split
    mixture_shares = run.script_args.adora_mixture
    dataset_texts: list[str] = []
    for number, folder in enumerate(run.data.folders):
        rows = row_count(Path(folder), split)
        text = f"{Path(folder).name} {pluralize(rows, 'row')}"
        if mixture_shares is not None:
            text += f" at {mixture_shares[number]:.0%}"
        dataset_texts.append(text)
    return [
        f"{len(dataset_texts)} data sets are mixed into {len(run.data.train_dataset)} rows per epoch: "
        f"{', '.join(dataset_texts)}"
    ]


def _zoom_notes(run: ResolvedRun) -> list[str]:
    """Return a note on how many images the tool zoom can show in more detail; none without zoom.

    These are the images that are shrunk for the model. There is no note for a data set that is not
    on this machine.
    """
    if run.data.train_dataset is None or "zoom" not in run.tools.functions:
        return []
    image_sizes = []
    for sizes_of_row in stored_image_sizes(run.data.train_dataset.data.table):
        image_sizes += [size for size in sizes_of_row if size is not None]
    # Larger images are shrunk to this number of pixels.
    max_pixels = run.prompts.length_filter.pixels.max_pixels
    larger_sizes = [(width, height) for width, height in image_sizes if width * height > max_pixels]
    consequence = ""
    if not larger_sizes:
        consequence = ", so zoom shows nothing new; prepare the data with a larger --max-pixels"
    total = pluralize(len(image_sizes), "picture")
    return [f"{len(larger_sizes)} of {total} are larger than the model sees them{consequence}"]


class _PlannedGpu(NamedTuple):
    """The memory that one process of a run has, in bytes, and what it is in words."""

    bytes: int
    name: str


def _planned_gpu(
    options: DryRunOptions, config: AdoraGRPOConfig, local_processes: int
) -> _PlannedGpu:
    """Return the memory of the GPU that a dry run plans for.

    The sources in their order:

        1. `--card-gib`
        2. for a run on the CPU, this machine's memory divided by its number of processes
        3. the GPU of this machine
        4. an assumed size
    """
    if options.card_gib is not None:
        return _PlannedGpu(
            bytes=int(options.card_gib * GIB), name=f"a card of {options.card_gib:g} GiB"
        )
    if config.use_cpu:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = machine_bytes // local_processes
        return _PlannedGpu(
            bytes=share,
            name=f"a process's share of this machine's memory, {share / GIB:.0f} GiB",
        )
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu_bytes = int(properties.total_memory)
        return _PlannedGpu(bytes=gpu_bytes, name=f"{properties.name}, {gpu_bytes / GIB:.0f} GiB")
    return _PlannedGpu(
        bytes=int(ASSUMED_GPU_GIB * GIB),
        name=(
            f"a card of {ASSUMED_GPU_GIB:g} GiB (no GPU is visible here; --card-gib says another "
            "size)"
        ),
    )


def build_memory_setup(
    config: AdoraGRPOConfig,
    model: ModelConfig,
    shape: ModelShape,
    sharding: Sharding,
    lengths: PromptLengths,
) -> MemorySetup:
    """Collect everything that the memory of a run depends on.

    All prompts are assumed to be as long as the longest one, and all completions as long as
    `max_completion_length`, which is the largest micro-batch that the run can meet.

    Args:
        config: The training keys.
        model: The keys of the model. Only the attention kernel is read.
        shape: The model's numbers of parameters and layers.
        sharding: How the run is spread over processes.
        lengths: The lengths of the prompts.
    """
    longest_prompt = lengths.longest_prompt
    sequences = config.per_device_train_batch_size
    sequences_per_generation = sequences * config.steps_per_generation
    return MemorySetup(
        shape=shape,
        sharding=sharding,
        batch=PlannedMicroBatch(
            sequences=sequences,
            prompt_tokens=longest_prompt,
            completion_tokens=config.max_completion_length,
            image_tokens=lengths.most_image_tokens if shape.vision else 0,
        ),
        sequences_per_generation=sequences_per_generation,
        group_size=config.num_generations,
        sharing=_sharing(config),
        mixed_precision=bool(config.bf16 or config.fp16),
        checkpointing=config.gradient_checkpointing,
        recompute=config.adora_recompute,
        has_padding_mask="flash" not in str(model.attn_implementation or ""),
        has_reference=config.beta != 0.0,
        engine=_engine_settings(
            config,
            shape=shape,
            longest_prompt=longest_prompt,
            sequences_per_generation=sequences_per_generation,
        ),
        on_gpu=not config.use_cpu,
    )


def _sharing(config: AdoraGRPOConfig) -> SharedComputation:
    """Return what the steps of a run compute only once for all rollouts of a group."""
    stores_images_once = config.uses("cache_images")
    return SharedComputation(
        images=stores_images_once,
        vision=config.shares_vision,
        prompts=stores_images_once and config.uses("share_prompt"),
        keeps_groups=not setting_against_regrouping(config),
    )


def _engine_settings(
    config: AdoraGRPOConfig,
    shape: ModelShape,
    longest_prompt: int,
    sequences_per_generation: int,
) -> EngineMemorySettings | None:
    """Return what the memory of a run's vLLM engine depends on.

    None without an engine that shares the GPU with the trainer.

    Args:
        config: The training keys.
        shape: The model's numbers of parameters and layers.
        longest_prompt: Tokens of the longest prompt.
        sequences_per_generation: Rollouts that one rank asks for at once.
    """
    if not config.has_colocated_engine:
        return None
    # The dtype is None where the engine takes that of the weights.
    dtype = engine_dtype(config)
    cpu_cache_bytes = None
    if config.use_cpu:
        # vLLM's own variable, in GiB
        cpu_cache_bytes = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
    # Without the key, no rollout is longer than the longest prompt with a whole completion.
    max_length = config.vllm_max_model_length or longest_prompt + config.max_completion_length
    return EngineMemorySettings(
        utilization=config.vllm_gpu_memory_utilization,
        dtype_bytes=_DTYPE_BYTES[dtype] if dtype else shape.bytes_per_weight,
        max_length=max_length,
        # An engine that is divided over several ranks samples for all of them.
        max_sequences=sequences_per_generation * config.vllm_tensor_parallel_size,
        tensor_parallel=config.vllm_tensor_parallel_size,
        sleeps=config.vllm_enable_sleep_mode,
        cpu_cache_bytes=cpu_cache_bytes,
    )
