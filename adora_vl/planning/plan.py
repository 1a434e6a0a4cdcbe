"""From the arguments to all that is known about a run before it starts, on this machine or for another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl import ModelConfig, get_peft_config

from adora_vl.builtin.assets import data_folders, resolve_model
from adora_vl.checkpoint.writer import refuse_own_files
from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.batch_plan import BatchPlan, check_rows, regroup_obstacle
from adora_vl.config.checks import check_machines, check_run, rewards_of
from adora_vl.config.command_line import parse
from adora_vl.config.schema import NoGPUError
from adora_vl.data.loading import require_rows
from adora_vl.data.prompt_lengths import (
    ContextLimit,
    LengthCheck,
    Limits,
    OverlongPrompts,
    TextTokens,
    context_limit,
    limits_of,
    tokenizer_counter,
    uncountable,
)
from adora_vl.data.prompts import template
from adora_vl.models.check import check_family
from adora_vl.models.families import family_of, sees_images
from adora_vl.models.load import limit_pixels, load_processor
from adora_vl.models.shape import ModelShape, config_for_planning, describe
from adora_vl.planning.activations import MicroBatch
from adora_vl.planning.lengths import Lengths, assumed, character_counter, held_against, joined, measure, only
from adora_vl.planning.memory import MOST_IMAGE_TOKENS, Engine, Setup, Sharing
from adora_vl.planning.options import DryRunOptions
from adora_vl.planning.sharding import Sharding, from_environment, from_file, spread_over
from adora_vl.rollout.engine_settings import engine_dtype, refuse_on_cpu
from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.files import GIB, check_folder

ASSUMED_CARD_GIB = 80.0
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plan:
    """A run on paper. `card` is bytes of one GPU, or of this machine for a run on its CPU."""

    script: AdoraScriptArguments
    config: AdoraGRPOConfig
    model: ModelConfig
    batches: BatchPlan
    lengths: Lengths
    limits: Limits
    setup: Setup
    card: int
    card_name: str
    notes: list[str]
    limit: ContextLimit | None  # None where it is not known, or image tokens cannot be counted
    checks: list[LengthCheck]  # the prompts of training and evaluations, before any are left out; [] where not known

    @property
    def image_room(self) -> int:
        """The image tokens for which the limit has room beside the longest text and a whole answer; below 1: none."""
        if self.limit is None:
            return MOST_IMAGE_TOKENS
        return self.limit.tokens - self.limit.needed(self.lengths.longest_text)

    @property
    def refusing(self) -> bool:
        """Whether the run would not start for a prompt that is too long."""
        return self.script.adora_overlong_prompts != "drop" and any(check.refused for check in self.checks)


def make_plan(arguments: Sequence[str], options: DryRunOptions) -> Plan:
    """Everything that a run checks before it loads weights, and its lengths and memory. Raises `UserError`."""
    (script, config, model), elsewhere = _parse_for_any_machine(arguments)
    sharding = _sharding(options)
    check_machines(config, sharding.processes, sharding.machines)
    if not model.model_name_or_path:
        raise UserError("model_name_or_path: not set; name a model folder, a hub id, or 'tiny'")
    rewards_of(arguments, script, config)
    if not elsewhere:
        _check_output_dir(Path(config.output_dir), config.overwrite_output_dir)
    name = resolve_model(model.model_name_or_path)
    model_config, note = config_for_planning(name, model.model_revision)
    notes = [*([note] if note else []), *check_family(model, config, model_config)]
    if family_of(model_config) is None and sees_images(model_config):
        notes.append(
            f"the images of model_type {model_config.model_type} are counted as those of Qwen2.5-VL, and what its "
            "vision tower keeps for the backward pass is not in the prediction"
        )
    processor = _processor(name, model.model_revision, notes)
    if processor is not None:
        limit_pixels(processor, config.min_pixels, config.max_pixels)
    limits = limits_of(processor, model_config, config.min_pixels, config.max_pixels)
    if not elsewhere and config.use_vllm and config.vllm_mode == "colocate":
        refuse_on_cpu(model_config, config.vllm_enable_sleep_mode)
    batches = check_run(config, model, model_config, sharding.processes, for_this_machine=not elsewhere)
    limit = None if uncountable(model_config) else context_limit(config, model_config)
    counter = (
        tokenizer_counter(processor, script.adora_system_prompt, config.chat_template_kwargs)
        if processor is not None
        else character_counter(script.adora_system_prompt)
    )
    overlong = OverlongPrompts(limit, counter, limits, script.adora_overlong_prompts, speaks=False)
    lengths, checks = _lengths(script, config, counter, limits, limit, options, sees=sees_images(model_config))
    if lengths.rows is not None:
        check_rows(batches, lengths.rows)
        checks += _evaluations(script, config, overlong, notes)
    shape = describe(
        model_config, dtype=model.dtype, frozen=config.frozen_components, peft_config=get_peft_config(model)
    )
    card, card_name = _card(options, config, sharding.local_processes)
    setup = make_setup(config, model, shape, sharding, lengths)
    return Plan(
        script, config, model, batches, lengths, limits, setup, card, card_name, [*notes, *lengths.notes], limit, checks
    )


def _check_output_dir(folder: Path, overwrite: bool) -> None:
    """Raise `UserError` where the run could not write, or would write over what no run wrote."""
    check_folder("output_dir", folder)
    refuse_own_files(folder, overwrite)


def _parse_for_any_machine(arguments: Sequence[str]) -> tuple[Any, bool]:
    """The three dataclasses, and whether they are for another machine: a GPU's config is read on a laptop too.

    bf16 and fp16 are refused where there is no GPU; they are put back after the check.
    """
    try:
        return parse(arguments), False
    except NoGPUError as error:
        key = error.key
    parsed = parse([*arguments, "--use_cpu", "true", "--bf16", "false", "--fp16", "false"])
    parsed[1].use_cpu = False
    setattr(parsed[1], key, True)
    return parsed, True


def _sharding(options: DryRunOptions) -> Sharding:
    if options.accelerate_config is not None:
        return from_file(options.accelerate_config, options.processes, options.machines)
    found = from_environment()
    machines = options.machines or found.machines
    processes = options.processes or found.local_processes * machines
    spread_over(processes, machines)
    return replace(found, processes=processes, machines=machines)


def _processor(name: str, revision: str, notes: list[str]) -> Any:
    """The trainer's processor, or None with a note where it is not there, or cannot be read."""
    try:
        return load_processor(name, revision)
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, UserError) else in_one_line(error)
        why = f"read ({reason})" if Path(name).is_dir() else "reached"
        notes.append(
            f"the processor of {name} cannot be {why}: text is estimated at 2.5 characters per token, images follow "
            "the published rule"
        )
        return None


def _lengths(
    script: AdoraScriptArguments,
    config: AdoraGRPOConfig,
    counter: TextTokens,
    limits: Limits,
    limit: ContextLimit | None,
    options: DryRunOptions,
    *,
    sees: bool,
) -> tuple[Lengths, list[LengthCheck]]:
    """The lengths of the prompts that are trained on, and those of all prompts held against the limit."""
    folders = [Path(folder) for folder in data_folders(script)]
    for name, folder in zip(script.dataset_name, folders, strict=True):
        if not folder.is_dir():  # a dry run does not need the data
            why = f"the dataset {name!r} is not here, so rows and prompts are not known"
            return assumed(limits, why, sees=sees), []
    made = template(script.adora_prompt) if script.adora_prompt else None
    sets = [measure(folder, script.dataset_train_split, counter, limits, options.rows, made) for folder in folders]
    checks = [held_against(sets, limit)] if limit is not None else []
    if checks and script.adora_overlong_prompts == "drop":
        sets = only(sets, checks[0].kept("drop"))
        if script.adora_mixture is not None:
            require_rows([one.rows or 0 for one in sets], list(map(str, folders)))
    return joined(sets, [folder.name for folder in folders], script.adora_mixture, config.seed), checks


def _evaluations(
    script: AdoraScriptArguments, config: AdoraGRPOConfig, overlong: OverlongPrompts, notes: list[str]
) -> list[LengthCheck]:
    """The prompts of the evaluations on the way; a note where their data are not here. Raises `UserError` where none of
    them would be left.
    """
    from adora_vl.evaluation import evaluation_lengths, take_evaluations

    try:
        plan = take_evaluations(copy(config), data_folders(script), script.adora_prompt)
    except UserError as error:
        notes.append(f"the problems of the evaluations are not known: {error}")
        return []
    checks = evaluation_lengths(plan, overlong) if plan is not None else []
    if script.adora_overlong_prompts == "drop":
        for check in checks:
            check.kept("drop")  # refuses what the run would
    return checks


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
    config: AdoraGRPOConfig, model: ModelConfig, shape: ModelShape, sharding: Sharding, lengths: Lengths
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
    flash = "flash" in str(model.attn_implementation or "")
    regrouped = not regroup_obstacle(config)  # else the rollouts of a group lie in any micro-batch
    sharing = Sharing(
        images=config.adora_cache_images,
        vision=config.adora_cache_images and config.adora_share_vision and regrouped,
        prompts=config.adora_cache_images and config.adora_share_prompt and regrouped,
    )
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
        masked=not flash,
        reference=config.beta != 0.0,
        engine=engine,
        accelerator=not config.use_cpu,
    )
