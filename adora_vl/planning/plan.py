"""A run on paper: what it is made of, measured and predicted before a weight is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from trl import ModelConfig

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.batch_plan import regroup_obstacle
from adora_vl.config.command import CliArgs
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.sharding import Sharding
from adora_vl.data.dataset import row_count
from adora_vl.data.prompt_lengths import ContextLimit, LengthCheck, PromptLengths, sizes_in
from adora_vl.models.activations import MicroBatch
from adora_vl.models.families import family_of, sees_images
from adora_vl.models.shape import ModelShape
from adora_vl.planning.memory import MOST_IMAGE_TOKENS, Engine, Setup, Sharing
from adora_vl.preflight.facts import ResolvedRun
from adora_vl.prepare import prepare_on_paper
from adora_vl.rollout.engine_settings import engine_dtype
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB

# the size of an H100 or A100, for a dry run on a machine without a GPU
ASSUMED_CARD_GIB = 80.0
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plan:
    """A run on paper: what was checked, measured and predicted before a weight is loaded."""

    run: ResolvedRun
    script: AdoraScriptArguments
    lengths: PromptLengths
    rows: int | None
    """Rows that the run trains on; None where the dataset is not on this machine."""
    setup: Setup
    card: int
    """Bytes of memory of one GPU, or one process's share of this machine for a run on its CPU."""
    card_name: str
    notes: list[str]

    @property
    def limit(self) -> ContextLimit | None:
        """What bounds prompt and answer together; None where it is unknown or images have no count."""
        return self.run.prompts.lengths.limit

    @property
    def checks(self) -> list[LengthCheck]:
        """The length checks of training and evaluation prompts, before any prompt is left out."""
        return self.run.prompts.lengths.checks if self.rows is not None else []

    @property
    def image_room(self) -> int:
        """Image tokens that fit beside the longest text and a whole answer.

        Below 1 there is no room for any image.
        """
        if self.limit is None:
            return MOST_IMAGE_TOKENS
        return self.limit.tokens - self.limit.needed(self.lengths.longest_text)


def make_plan(command: CliArgs, options: DryRunOptions, *, with_few_rows: bool = False) -> Plan:
    """Make every check that a run makes before it loads weights, and predict lengths and memory.

    `with_few_rows`: plan also for rows that do not fill a generation. Raises `UserError` with the
    line that a run would stop with.
    """
    run = prepare_on_paper(command, options)
    if run.messages.refusals and not with_few_rows:
        raise UserError(run.messages.refusals[0])
    script = run.script
    lengths = run.data.measured
    sharding = run.context.sharding
    assert script is not None, "a dry run has the keys of a command"
    assert lengths is not None, "a dry run measures"
    notes = [*run.messages.notes, *_mixture_notes(run), *_zoom_notes(run)]
    if family_of(run.model.config) is None and sees_images(run.model.config):
        notes.append(
            f"the images of model_type {run.model.config.model_type} are counted as those of "
            "Qwen2.5-VL, and what its vision tower keeps for the backward pass is not in the "
            "prediction"
        )
    setup = make_setup(
        run.config,
        model=run.request.model.keys,
        shape=run.shape,
        sharding=sharding,
        lengths=lengths,
    )
    card_bytes, card_name = _card(options, run.config, sharding.local_processes)
    return Plan(
        run=run,
        script=script,
        lengths=lengths,
        rows=run.data.rows,
        setup=setup,
        card=card_bytes,
        card_name=card_name,
        notes=notes,
    )


def _mixture_notes(run: ResolvedRun) -> list[str]:
    """Return a note on how several data sets are mixed; none where there is one data set."""
    if run.data.train is None or run.script is None or len(run.data.folders) == 1:
        return []
    split = run.script.dataset_train_split
    mixture_shares = run.script.adora_mixture
    dataset_texts = []
    for number, folder in enumerate(run.data.folders):
        rows = row_count(Path(folder), split)
        text = f"{Path(folder).name} {amount(rows, 'row')}"
        if mixture_shares is not None:
            text += f" at {mixture_shares[number]:.0%}"
        dataset_texts.append(text)
    return [
        f"{len(dataset_texts)} data sets are mixed into {len(run.data.train)} rows per epoch: "
        f"{', '.join(dataset_texts)}"
    ]


def _zoom_notes(run: ResolvedRun) -> list[str]:
    """Return a note on how many pictures zoom shows more of than the model sees at first.

    None where the run has no zoom, or its data set is not on this machine.
    """
    if run.data.train is None or "zoom" not in run.tools.functions:
        return []
    picture_sizes = []
    for row_sizes in sizes_in(run.data.train.data.table):
        picture_sizes += [size for size in row_sizes if size is not None]
    max_pixels = run.prompts.lengths.pixels.high
    larger_count = sum(width * height > max_pixels for width, height in picture_sizes)
    consequence = ""
    if not larger_count:
        consequence = ", so zoom shows nothing new; prepare the data with a larger --max-pixels"
    total = amount(len(picture_sizes), "picture")
    return [f"{larger_count} of {total} are larger than the model sees them{consequence}"]


def _card(options: DryRunOptions, config: AdoraGRPOConfig, processes: int) -> tuple[int, str]:
    """Return the memory of a card in bytes, and the card in words.

    It is what the user says, else this machine's, else an assumed one. For a run on the CPU it is
    the share of the machine's memory that each of its `processes` has.
    """
    if options.card_gib is not None:
        return int(options.card_gib * GIB), f"a card of {options.card_gib:g} GiB"
    if config.use_cpu:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = machine_bytes // processes
        return share, f"a process's share of this machine's memory, {share / GIB:.0f} GiB"
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        card_bytes = int(properties.total_memory)
        return card_bytes, f"{properties.name}, {card_bytes / GIB:.0f} GiB"
    assumed_card = (
        f"a card of {ASSUMED_CARD_GIB:g} GiB (no GPU is visible here; --card-gib says another size)"
    )
    return int(ASSUMED_CARD_GIB * GIB), assumed_card


def make_setup(
    config: AdoraGRPOConfig,
    model: ModelConfig,
    shape: ModelShape,
    sharding: Sharding,
    lengths: PromptLengths,
) -> Setup:
    """Collect everything that the memory prediction depends on.

    Every prompt is taken to be as long as the longest one, and every completion as long as
    `max_completion_length`: the worst micro-batch that the run can meet.
    """
    longest_prompt, image_tokens = lengths.longest
    sequences = config.per_device_train_batch_size
    generation = sequences * config.steps_per_generation
    caches_images = config.uses("cache_images")
    # Where rows are not regrouped, the rollouts of a group may lie in any micro-batch.
    keeps_groups_together = caches_images and not regroup_obstacle(config)
    sharing = Sharing(
        images=caches_images,
        vision=keeps_groups_together and config.uses("share_vision"),
        prompts=keeps_groups_together and config.uses("share_prompt"),
    )
    return Setup(
        shape=shape,
        sharding=sharding,
        batch=MicroBatch(
            sequences=sequences,
            prompt_tokens=longest_prompt,
            completion_tokens=config.max_completion_length,
            image_tokens=image_tokens if shape.vision else 0,
        ),
        generation=generation,
        generations=config.num_generations,
        sharing=sharing,
        mixed=bool(config.bf16 or config.fp16),
        checkpointing=config.gradient_checkpointing,
        recompute=config.adora_recompute,
        micro_batches=config.gradient_accumulation_steps,
        masked="flash" not in str(model.attn_implementation or ""),
        reference=config.beta != 0.0,
        engine=_engine_settings(
            config, shape=shape, longest_prompt=longest_prompt, generation=generation
        ),
        accelerator=not config.use_cpu,
    )


def _engine_settings(
    config: AdoraGRPOConfig, shape: ModelShape, longest_prompt: int, generation: int
) -> Engine | None:
    """Return what the memory of a colocated engine depends on; None where a run has none.

    Args:
        config: the run's settings.
        shape: the model's.
        longest_prompt: tokens of the longest prompt.
        generation: sequences of one rank in one generation.
    """
    if not config.use_vllm or config.vllm_mode != "colocate":
        return None
    dtype = engine_dtype(config)
    cpu_cache = None
    if config.use_cpu:
        # vLLM's own variable, in GiB
        cpu_cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
    # No rollout is longer than the longest prompt with a whole completion.
    max_length = config.vllm_max_model_length or longest_prompt + config.max_completion_length
    return Engine(
        utilization=config.vllm_gpu_memory_utilization,
        dtype_bytes=_DTYPE_BYTES[dtype] if dtype else shape.weight_bytes,
        max_length=max_length,
        # the engines of a tensor-parallel group sample the prompts of all its ranks
        max_sequences=generation * config.vllm_tensor_parallel_size,
        tensor_parallel=config.vllm_tensor_parallel_size,
        sleep=config.vllm_enable_sleep_mode,
        cpu_cache=cpu_cache,
    )
