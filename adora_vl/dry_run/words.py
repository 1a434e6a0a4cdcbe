"""A plan in words, for a person."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from adora_vl.commands import amount
from adora_vl.config.arithmetic import unit_size
from adora_vl.dry_run.lengths import Lengths, quantile
from adora_vl.dry_run.planning import Plan
from adora_vl.dry_run.schedule import learning_rate_line
from adora_vl.memory import GIB
from adora_vl.memory.disk import checkpoint_bytes, run_bytes
from adora_vl.memory.engine import cache_bytes_per_token
from adora_vl.memory.predict import Sharing, fits, largest_batch, largest_image_tokens, predict


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


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, "-" * len(title), *lines]


def config_lines(plan: Plan, given: Collection[str]) -> list[str]:
    """`key: value` of what differs from the defaults."""
    changed = changed_keys(plan, given)
    width = max(map(len, changed), default=0) + 2
    lines = [f"{key + ':':{width}} {value}" for key, value in changed.items()]
    return _section("Config, where it differs from the defaults (--write-config FILE: all of it)", lines)


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
    return _section("Batches", lines)


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
    return _section(f"Prompts ({amount(len(lengths.prompt), 'row')})" if lengths.rows else "Prompts (assumed)", lines)


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


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def _number(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"


def memory_lines(plan: Plan) -> list[str]:
    """Predicted memory by component and phase, and the verdict."""
    setup, card = plan.setup, plan.card
    prediction = predict(setup, card)
    names = list(prediction.phases)
    parts = list(dict.fromkeys(part for phase in prediction.phases.values() for part in phase))
    lines = [
        f"{_number(setup.shape.total)} parameters, {_number(setup.shape.trained)} trained; "
        f"{setup.sharding.describe()}.",
        f"Micro-batch: {setup.batch.sequences} x ({setup.batch.prompt_tokens} + {setup.batch.completion_tokens}) "
        f"tokens, {setup.batch.image_tokens} of each an image.",
        "",
        f"{'GiB per card':24}" + "".join(f"{name:>24}" for name in names),
    ]
    for part in parts:
        cells = [_gib(prediction.phases[name][part]) if part in prediction.phases[name] else "-" for name in names]
        lines.append(f"{part:24}" + "".join(f"{cell:>24}" for cell in cells))
    sums = [_gib(sum(prediction.phases[name].values())) for name in names]
    lines.append(f"{'together':24}" + "".join(f"{cell:>24}" for cell in sums))
    if prediction.states.host_optimizer:
        host = prediction.states.host_optimizer * setup.sharding.local_processes
        whose = "all processes on one host" if setup.sharding.machines == 1 else "the processes of one machine"
        lines.append(f"Host memory beside it: {host / GIB:.3g} GiB for the optimizer of {whose}.")
    lines += ["", *sharing_lines(plan), *engine_lines(plan), *verdict_lines(plan), _honesty(setup.accelerator)]
    return _section(f"Memory, predicted, on {plan.card_name}", lines)


def sharing_lines(plan: Plan) -> list[str]:
    """What the rollouts of a group have in common in a micro-batch, and what that saves."""
    setup, phase = plan.setup, "forward and backward"
    batch, group = setup.micro_batch, setup.generations
    if not (setup.sharing.vision or setup.sharing.prompts):
        return []
    ours, alone = (
        sum(predict(one, plan.card).phases[phase].values()) for one in (setup, replace(setup, sharing=Sharing()))
    )
    shared = ["the image"] if batch.image_tokens and setup.sharing.images and batch.unit > 1 else []
    shared += ["the prompt"] if batch.packed else []
    lines = []
    if shared:
        lines = [
            f"Computed once for {batch.unit} rollouts of a micro-batch: {' and '.join(shared)}. With one for each "
            f"{phase} would take {alone / GIB:.3g} GiB instead of {ours / GIB:.3g}."
        ]
    unit = unit_size(batch.sequences, group)
    if unit < group:
        lines.append(
            f"per_device_train_batch_size: {batch.sequences} splits a group into {group // unit} parts, and each "
            f"computes image and prompt anew; a multiple of num_generations: {group} does not."
        )
    return lines


def _honesty(accelerator: bool) -> str:
    if accelerator:
        return (
            "These are formulas, checked against torch's accounting on a CPU; no GPU has confirmed them yet. CUDA's "
            "context, fragmentation and the engine's workspace are assumptions: docs/hardware.md."
        )
    return "Formulas, within 10 % of torch's own accounting on a CPU: docs/hardware.md."


def engine_lines(plan: Plan) -> list[str]:
    """How many rollouts the engine has room for."""
    engine, setup = predict(plan.setup, plan.card).engine, plan.setup
    if engine is None or setup.engine is None or not setup.accelerator:
        return []
    per_token = cache_bytes_per_token(setup.shape, setup.engine.dtype_bytes, setup.engine.tensor_parallel)
    return [
        f"Engine: {per_token / 1024:.0f} KiB per token for keys and values; of {setup.engine.max_sequences} rollouts "
        f"{engine.concurrent} run at once if all reach {setup.engine.max_length} tokens, more if they end earlier."
    ]


def verdict_lines(plan: Plan) -> list[str]:
    """Whether it fits, and what would."""
    setup, card = plan.setup, plan.card
    prediction = predict(setup, card)
    good = fits(setup, card)
    peak, share = prediction.peak / GIB, prediction.peak / card
    if good:
        lines = [f"It fits: {peak:.3g} GiB at most ({prediction.peak_phase}), {share:.0%} of {card / GIB:.3g} GiB."]
    elif prediction.peak > card:
        parts = prediction.phases[prediction.peak_phase]
        largest = max(parts, key=lambda name: parts[name])
        lines = [
            f"It does NOT fit: {prediction.peak_phase} would take {peak:.3g} GiB of {card / GIB:.3g}; the largest part "
            f"is {largest} ({parts[largest] / GIB:.3g} GiB). {remedy(plan)}"
        ]
    else:
        lines = [
            "It does NOT fit: the engine's share has no room for one rollout of full length; raise "
            "vllm_gpu_memory_utilization, or lower vllm_max_model_length."
        ]
    batch, tokens = largest_batch(setup, card), largest_image_tokens(setup, card)
    most = f"{batch}, a whole generation" if batch == setup.generation else batch or "none"
    lines.append(
        f"Largest per_device_train_batch_size that fits, of those that keep groups of {setup.generations} whole or "
        f"split them evenly: {most} (keep its product with gradient_accumulation_steps and processes)."
    )
    if setup.shape.vision is not None:
        pixels = tokens * setup.shape.image_token_pixels
        lines.append(f"Largest max_pixels that fits: {pixels or 'none'} ({tokens} image tokens).")
    return lines


def remedy(plan: Plan) -> str:
    """What to change first, for the settings at hand."""
    setup = plan.setup
    wishes = []
    if setup.engine and not setup.engine.sleep and setup.accelerator:
        wishes.append("vllm_enable_sleep_mode: true")
    if not setup.checkpointing:
        wishes.append("gradient_checkpointing: true")
    if setup.sharding.processes > 1 and setup.sharding.stage != 3:
        wishes.append("ZeRO-3 (configs/accelerate/zero3.yaml)")
    elif setup.sharding.stage == 3 and not setup.sharding.offload_optimizer:
        wishes.append("the optimizer in host memory (configs/accelerate/zero3_offload.yaml)")
    if setup.reference and not setup.shape.adapters:
        wishes.append("beta: 0.0 (no reference model)")
    if not setup.shape.adapters and setup.sharding.stage is None:
        wishes.append("use_peft: true")
    if setup.engine:
        wishes.append("a lower vllm_gpu_memory_utilization")
    if setup.sharding.stage == 3:
        wishes.append("more machines (--machines N; docs/machines.md)")
    if predict(setup, plan.card).peak_phase == "forward and backward":
        wishes.append("a smaller per_device_train_batch_size or max_pixels")
    return f"Try, in this order: {'; '.join(wishes)}."


def disk_lines(plan: Plan) -> list[str]:
    """What the checkpoints will take."""
    setup, config = plan.setup, plan.config
    one = checkpoint_bytes(setup.shape, setup.sharding, mixed=setup.mixed)
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
    return _section("Disk", lines)


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
    return _section("Machines", lines)


def report(plan: Plan, given: Collection[str]) -> str:
    """The report of the whole dry run."""
    notes = _section("Not known here", [f"- {note}" for note in plan.notes]) if plan.notes else []
    sections = (
        config_lines(plan, given), machine_lines(plan), batch_lines(plan), length_lines(plan), memory_lines(plan),
        disk_lines(plan),
    )  # fmt: skip
    return "\n".join([line for section in sections for line in section] + notes)
