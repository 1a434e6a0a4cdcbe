"""A plan in words, for a person."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from adora_vl.commands import amount
from adora_vl.dry_run.lengths import Lengths, quantile
from adora_vl.dry_run.memory_text import memory_lines, section
from adora_vl.dry_run.planning import Plan
from adora_vl.dry_run.schedule import learning_rate_line
from adora_vl.memory import GIB
from adora_vl.memory.disk import checkpoint_bytes, replay_bytes, run_bytes


def default_of(field: Field[Any]) -> Any:
    """The default of a dataclass field."""
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def changed_keys(plan: Plan, given: Collection[str]) -> dict[str, Any]:
    """What the user set to something else than the default, in the order of the dataclasses."""
    changed = {}
    for dataclass in (plan.script, plan.config, plan.model):
        for field in fields(dataclass):
            value = getattr(dataclass, field.name)
            if field.name in given and value != default_of(field):
                changed[field.name] = getattr(value, "value", value)
    return changed


def config_lines(plan: Plan, given: Collection[str]) -> list[str]:
    """`key: value` of what differs from the defaults."""
    changed = changed_keys(plan, given)
    width = max(map(len, changed), default=0) + 2
    lines = [f"{key + ':':{width}} {value}" for key, value in changed.items()]
    return section("Config, where it differs from the defaults (--write-config FILE: all of it)", lines)


def steps_of(plan: Plan) -> tuple[int | None, int | None]:
    """Optimizer steps of an epoch and of the run; None where the number of rows is not known."""
    batches, config = plan.batches, plan.config
    fixed = config.max_steps if config.max_steps > 0 else None
    if plan.lengths.rows is None:
        return None, fixed
    generations = plan.lengths.rows // batches.prompts_per_generation
    epoch = max(1, generations * batches.cycle_micro_batches // batches.gradient_accumulation_steps)
    return epoch, fixed or math.ceil(config.num_train_epochs * epoch)


def batch_lines(plan: Plan) -> list[str]:
    """Prompts, groups, micro-batches, optimizer steps and epochs."""
    batches, config, processes = plan.batches, plan.config, plan.setup.sharding.processes
    local, prompts = config.per_device_train_batch_size, batches.prompts_per_generation
    lines = [
        f"{amount(prompts, 'prompt')} {'is' if prompts == 1 else 'are'} sampled together, {config.num_generations} "
        f"rollouts of each: {batches.generation_batch} rollouts per generation.",
        f"They are learned from in micro-batches of {local} sequences on each of {processes} "
        f"process{'' if processes == 1 else 'es'} ({batches.global_batch} over all).",
        f"Micro-batches an optimizer step: {config.gradient_accumulation_steps}, which are {batches.optimizer_batch} "
        f"sequences. Optimizer steps a generation: {batches.updates_per_generation:g}.",
        other_processes_line(plan),
    ]
    epoch, total = steps_of(plan)
    rows = plan.lengths.rows
    if epoch is None:
        known = f"max_steps says {total}." if total else "The length of the run is not known."
        lines.append(f"The number of rows is not known, nor is the length of an epoch. {known}")
    else:
        left = (rows or 0) % batches.prompts_per_generation
        dropped = f"; {left} rows wait for another epoch's order" if left else ""
        make = "makes" if rows == 1 else "make"
        lines.append(f"{amount(rows or 0, 'row')} {make} {amount(epoch, 'optimizer step')} an epoch{dropped}.")
        lines.append(f"The run takes {amount(total or 0, 'optimizer step')}, {(total or 0) / epoch:.3g} epochs.")
    lines.append(learning_rate_line(config, total))
    if config.save_strategy == "steps":
        lines.append(f"A checkpoint is saved every {amount(int(config.save_steps), 'optimizer step')}.")
    return section("Batches", lines)


def other_processes_line(plan: Plan) -> str:
    """What the same keys make of the batches on another number of processes."""
    batches, own = plan.batches, plan.setup.sharding.processes
    sizes = [
        f"{count}: {batches.generation_batch * count // own} rollouts and {batches.optimizer_batch * count // own}"
        for count in (1, 2, 4, 8)
        if count != own
    ]
    return f"With another --num_processes a generation and an optimizer step would have {'; '.join(sizes)}."


def _spread(name: str, values: Sequence[int]) -> str:
    figures = (min(values), quantile(values, 0.5), quantile(values, 0.95), max(values))
    return f"{name:14}" + "".join(f"{figure:>9}" for figure in figures)


def length_lines(plan: Plan) -> list[str]:
    """The spread of prompt lengths, and how many rows meet a limit."""
    lengths, config = plan.lengths, plan.config
    lines = [f"{'tokens':14}{'min':>9}{'median':>9}{'95 %':>9}{'max':>9}"]
    lines += [_spread("prompt", lengths.prompt), _spread("image", lengths.image), *limit_lines(lengths, config)]
    return section(f"Prompts ({amount(len(lengths.prompt), 'row')})" if lengths.rows else "Prompts (assumed)", lines)


def limit_lines(lengths: Lengths, config: Any) -> list[str]:
    """How many rows are too long for the engine, or leave it too little room for a completion."""
    limit = config.vllm_max_model_length
    if not config.use_vllm or limit is None:
        return ["No length limit of the engine is set (vllm_max_model_length)."]
    total = len(lengths.prompt)
    refused = sum(length >= limit for length in lengths.prompt)
    short = sum(length + config.max_completion_length > limit for length in lengths.prompt) - refused
    lines = [
        f"{refused} of {total} prompts exceed vllm_max_model_length: {limit}"
        + ("; the engine refuses them. Raise it, lower max_pixels, or clean the data." if refused else "."),
        f"{short} of {total} leave less than max_completion_length: {config.max_completion_length} for the completion"
        + ("; those are cut short." if short else "."),
    ]
    budget = config.adora_vllm_max_num_batched_tokens
    above = sum(length > budget for length in lengths.prompt)
    if above:
        lines.append(
            f"{above} prompts exceed adora_vllm_max_num_batched_tokens: {budget}; raise it to {max(lengths.prompt)}."
        )
    return lines


def disk_lines(plan: Plan) -> list[str]:
    """What the checkpoints will take."""
    setup, config = plan.setup, plan.config
    one = checkpoint_bytes(setup.shape, setup.sharding, mixed=setup.mixed)
    one += replay_bytes(config.adora_replay_groups, setup.sharding.processes, setup.batch.image_tokens, setup.shape)
    kept = config.save_total_limit
    _, total = steps_of(plan)
    if config.save_strategy != "steps":
        lines = ["No checkpoints on the way (save_strategy)."]
    elif kept is None and total is None:
        lines = [f"{one / GIB:.3g} GiB per checkpoint, without a limit to their number (save_total_limit)."]
    else:
        number = kept if kept is not None else math.ceil((total or 0) / int(config.save_steps))
        folder = run_bytes(one, setup.shape.total * setup.shape.weight_bytes, number)
        lines = [f"{one / GIB:.3g} GiB per checkpoint, {folder / GIB:.3g} GiB for the run's folder at most."]
    return section("Disk", lines)


def machine_lines(plan: Plan) -> list[str]:
    """What several machines need to start."""
    sharding = plan.setup.sharding
    if sharding.machines == 1:
        return []
    lines = [
        f"{sharding.machines} machines with {sharding.local_processes} processes each, started by "
        "setup/slurm/train.sbatch or setup/ssh/train.sh (docs/machines.md).",
        "output_dir must be on a disk that all of them share; the run does not start without one.",
    ]
    return section("Machines", lines)


def report(plan: Plan, given: Collection[str]) -> str:
    """The report of the whole dry run."""
    notes = section("Not known here", [f"- {note}" for note in plan.notes]) if plan.notes else []
    sections = (
        config_lines(plan, given), machine_lines(plan), batch_lines(plan), length_lines(plan), memory_lines(plan),
        disk_lines(plan),
    )  # fmt: skip
    return "\n".join([line for section in sections for line in section] + notes)
