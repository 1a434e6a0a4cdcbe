"""The memory section of the dry run's report.

It says what each part takes in each phase, whether the run fits, and what would make it fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from adora_vl.planning.engine_memory import cache_bytes_per_token
from adora_vl.planning.memory import SharedComputation, predict_memory
from adora_vl.planning.what_fits import (
    best_vllm_utilization,
    largest_batch,
    largest_image_tokens,
)
from adora_vl.utils.cli import report_section
from adora_vl.utils.files import GIB

if TYPE_CHECKING:
    from adora_vl.planning.memory import MemorySetup
    from adora_vl.planning.plan import DryRunPlan

# Share of the GPU below which the report does not list what takes how much (--json has it).
_SHORT_REPORT_SHARE = 0.25


def _size_in_words(size_bytes: int) -> str:
    """Return a size for the table: in GiB without the unit, or in MiB if it is small."""
    if size_bytes >= GIB / 100:
        return f"{size_bytes / GIB:.2f}"
    return f"{size_bytes / 2**20:.2f} MiB"


def _parameter_count(count: int) -> str:
    """Return a number of parameters in words, such as `3.75 billion`."""
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"


def memory_lines(plan: DryRunPlan) -> list[str]:
    """Return the report's section on memory: by component and phase, and whether the run fits."""
    setup = plan.setup
    prediction = plan.prediction
    title = f"Memory, predicted, on {plan.gpu_name}"
    lines = [
        f"{_parameter_count(setup.shape.total_parameters)} parameters, "
        f"{_parameter_count(setup.shape.trained_parameters)} trained; {setup.sharding.describe()}.",
        f"Micro-batch: {setup.batch.sequences} x ({setup.batch.prompt_tokens} + "
        f"{setup.batch.completion_tokens}) tokens, {setup.batch.image_tokens} of each an image.",
        *recomputed_lines(plan),
    ]
    # A run that fits easily has a short report.
    if prediction.peak_bytes < _SHORT_REPORT_SHARE * plan.gpu_bytes:
        return report_section(title, [*lines, *verdict_lines(plan)])
    lines += ["", *_memory_table(prediction.phases)]
    host_optimizer_bytes = (
        prediction.model_states.host_optimizer_bytes * setup.sharding.local_processes
    )
    if host_optimizer_bytes > 0:
        processes = "the processes of one machine"
        if setup.sharding.machines == 1:
            processes = "all processes on one host"
        lines.append(
            f"Host memory beside it: {host_optimizer_bytes / GIB:.3g} GiB for the optimizer of "
            f"{processes}."
        )
    if setup.swaps_base:
        base_gib = setup.shape.base_bytes(setup.shape.bytes_per_weight) / GIB
        lines.append(
            f"The base, {base_gib:.3g} GiB, is on the card once: the trainer's leaves while the "
            f"engine is awake. Both take {2 * base_gib:.3g} GiB of pinned host memory."
        )
    accuracy_note = _GPU_ACCURACY_NOTE if setup.on_gpu else _CPU_ACCURACY_NOTE
    lines += ["", *sharing_lines(plan), *engine_lines(plan), *verdict_lines(plan), accuracy_note]
    return report_section(title, lines)


def _memory_table(phases: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the lines of a table of memory: a row for each component, a column for each phase.

    `phases`: bytes by component, for each phase. A dash stands for a component that a phase lacks.
    """
    lines = [_table_line("GiB per card", list(phases))]
    components = dict.fromkeys(name for sizes in phases.values() for name in sizes)
    for component in components:
        cells: list[str] = []
        for sizes in phases.values():
            cells.append(_size_in_words(sizes[component]) if component in sizes else "-")
        lines.append(_table_line(component, cells))
    sums = [_size_in_words(sum(sizes.values())) for sizes in phases.values()]
    lines.append(_table_line("together", sums))
    return lines


def recomputed_lines(plan: DryRunPlan) -> list[str]:
    """Return a line on how many layers of the language model the backward pass recomputes.

    It is about the longest micro-batch; a shorter one may need fewer. There is no line without
    gradient checkpointing.
    """
    setup = plan.setup
    if not setup.checkpointing:
        return []
    if setup.recompute != "auto":
        reason = "so set"
    elif setup.on_gpu:
        reason = "as few as leave a tenth of the card free"
    else:
        reason = "auto needs a GPU"
    return [
        f"Layers recomputed in its backward pass: {plan.prediction.recomputed_layers} of {setup.shape.text.layers} "
        f"(adora_recompute: {setup.recompute}; {reason})."
    ]


def _table_line(title: str, cells: Sequence[str]) -> str:
    """Return a line of the table of memory, with a cell for each phase."""
    return f"{title:24}" + "".join(f"{cell:>24}" for cell in cells)


def sharing_lines(plan: DryRunPlan) -> list[str]:
    """Return lines on what a micro-batch computes only once for all rollouts of a group.

    They say how much memory that saves, and whether a larger micro-batch would share more.
    """
    sharing = plan.setup.sharing
    if not sharing.keeps_groups or not (sharing.vision or sharing.prompts):
        return []
    # `auto` recomputes as few layers as the GPU has room for. Both runs would then fill the GPU,
    # and their difference would not show.
    setup = replace(plan.setup, recompute="all")
    # The same run with image and prompt computed for each rollout, as TRL does.
    setup_of_trl = replace(setup, sharing=SharedComputation())
    phase = "forward and backward"
    phases = predict_memory(setup, plan.gpu_bytes).phases
    phases_of_trl = predict_memory(setup_of_trl, plan.gpu_bytes).phases
    sharing_gib = sum(phases[phase].values()) / GIB
    trl_gib = sum(phases_of_trl[phase].values()) / GIB
    batch = setup.batch
    rows_per_subgroup = setup.rows_per_subgroup
    shared_inputs: list[str] = []
    if sharing.vision and batch.image_tokens > 0 and rows_per_subgroup > 1:
        shared_inputs.append("the image")
    if setup.pass_size.is_packed:  # then a prompt stands once before the rollouts of its group
        shared_inputs.append("the prompt")
    lines: list[str] = []
    if shared_inputs:
        recompute_note = ", all layers recomputed" if plan.setup.checkpointing else ""
        lines.append(
            f"Computed once for {rows_per_subgroup} rollouts of a micro-batch: "
            f"{' and '.join(shared_inputs)}. "
            f"With one for each {phase} would take {trl_gib:.3g} GiB instead of "
            f"{sharing_gib:.3g}{recompute_note}."
        )
    # A micro-batch with a part of a group computes image and prompt for this part alone.
    group_size = setup.group_size
    if rows_per_subgroup < group_size:
        lines.append(
            f"per_device_train_batch_size: {batch.sequences} splits a group into "
            f"{group_size // rows_per_subgroup} parts, and each computes image and prompt anew; a "
            f"multiple of num_generations: {group_size} does not."
        )
    return lines


_CPU_ACCURACY_NOTE = "Formulas, within 10 % of torch's own accounting on a CPU: docs/hardware.md."
_GPU_ACCURACY_NOTE = (
    "A prediction, checked on a simulated card, and on a GPU in parts. CUDA's context, fragmentation "
    "and the engine's workspace are assumptions: docs/hardware.md."
)


def engine_lines(plan: DryRunPlan) -> list[str]:
    """Return lines on how many rollouts the engine samples at once.

    There are none without an engine that shares the GPU with the trainer.
    """
    memory = plan.prediction.engine
    engine = plan.setup.engine
    if memory is None or engine is None or not plan.setup.on_gpu:
        return []
    bytes_per_token = cache_bytes_per_token(
        plan.setup.shape, dtype_bytes=engine.dtype_bytes, tensor_parallel=engine.tensor_parallel
    )
    return [
        f"Engine: {bytes_per_token / 1024:.0f} KiB per token for keys and values; of "
        f"{engine.max_sequences} rollouts {memory.concurrent_rollouts} run at once if all reach "
        f"{engine.max_length} tokens, more if they end earlier.",
        *utilization_lines(plan, memory.concurrent_rollouts),
    ]


def utilization_lines(plan: DryRunPlan, concurrent_rollouts: int) -> list[str]:
    """Return a line that proposes another `vllm_gpu_memory_utilization`, if one is better.

    With it the run fits, or samples more rollouts at once. `concurrent_rollouts`: how many rollouts
    of full length are sampled at once with the present value.
    """
    engine = plan.setup.engine
    # None where no value leaves enough of the GPU's memory free
    utilization = best_vllm_utilization(plan.setup, plan.gpu_bytes)
    if engine is None or utilization is None:
        return []
    proposed_setup = replace(plan.setup, engine=replace(engine, utilization=utilization))
    prediction = predict_memory(proposed_setup, plan.gpu_bytes)
    proposed_rollouts = prediction.engine.concurrent_rollouts if prediction.engine else 0
    if proposed_rollouts <= concurrent_rollouts and plan.fits:
        return []
    free_share = 1 - prediction.peak_bytes / plan.gpu_bytes
    return [
        f"vllm_gpu_memory_utilization: {utilization:g} instead of {engine.utilization:g} lets "
        f"{proposed_rollouts} run at once, and leaves {free_share:.0%} of the card free."
    ]


def verdict_lines(plan: DryRunPlan) -> list[str]:
    """Return lines on whether the run fits into its GPUs, and on the largest batch and image."""
    setup = plan.setup
    lines = [_verdict_line(plan)]
    largest_size = largest_batch(setup, plan.gpu_bytes)
    if largest_size == 0:
        lines.append("No per_device_train_batch_size fits.")
    else:
        is_generation = largest_size == setup.sequences_per_generation
        size_text = f"{largest_size}, a whole generation" if is_generation else str(largest_size)
        lines.append(
            f"Largest per_device_train_batch_size that fits: {size_text}. It divides groups of "
            f"{setup.group_size} evenly; keep its product with gradient_accumulation_steps and "
            "processes."
        )
    if setup.shape.vision is not None:
        lines.append(largest_image_line(plan))
    return lines


def _verdict_line(plan: DryRunPlan) -> str:
    """Return a line on whether the run fits into its GPUs, or what to change if it does not."""
    prediction = plan.prediction
    peak_gib = prediction.peak_bytes / GIB
    gpu_gib = plan.gpu_bytes / GIB
    if plan.fits:
        used_share = prediction.peak_bytes / plan.gpu_bytes
        return (
            f"It fits: {peak_gib:.3g} GiB at most ({prediction.peak_phase}), {used_share:.0%} of "
            f"{gpu_gib:.3g} GiB."
        )
    if prediction.peak_bytes > plan.gpu_bytes:
        component_bytes = prediction.phases[prediction.peak_phase]
        largest = max(component_bytes, key=lambda name: component_bytes[name])
        return (
            f"It does NOT fit: {prediction.peak_phase} would take {peak_gib:.3g} GiB of "
            f"{gpu_gib:.3g}; the largest part is {largest} "
            f"({component_bytes[largest] / GIB:.3g} GiB). {memory_remedy(plan)}"
        )
    # The GPU has room, but the engine's share of it has not.
    return (
        "It does NOT fit: the engine's share has no room for one rollout of full length; raise "
        "vllm_gpu_memory_utilization, or lower vllm_max_model_length."
    )


def largest_image_line(plan: DryRunPlan) -> str:
    """Return a line with the largest `max_pixels` that fits, or why no image does."""
    if plan.limit is not None and plan.max_image_tokens < 1:
        return (
            "No max_pixels leaves room for a whole answer: text of up to "
            f"{plan.lengths.longest_text} tokens and max_completion_length: "
            f"{plan.limit.completion_tokens} together exceed {plan.limit.name}."
        )
    tokens = largest_image_tokens(plan.setup, plan.gpu_bytes, plan.max_image_tokens)
    if tokens == 0:
        return "No max_pixels fits."
    pixels = tokens * plan.setup.shape.image_token_pixels
    return f"Largest max_pixels that fits: {pixels} ({tokens} image tokens)."


def memory_remedy(plan: DryRunPlan) -> str:
    """Return what to change if a run does not fit into its GPUs, the best change first.

    Only changes that the run's settings leave open are named.
    """
    setup = plan.setup
    utilization = best_vllm_utilization(plan.setup, plan.gpu_bytes)
    changes: list[str] = []
    if utilization is not None:
        # With this value the run fits.
        changes.append(f"vllm_gpu_memory_utilization: {utilization:g}")
    if setup.engine is not None and not setup.engine.sleeps and setup.on_gpu:
        changes.append("vllm_enable_sleep_mode: true")
    if not setup.checkpointing:
        changes.append("gradient_checkpointing: true")
    changes += _changes_for_smaller_weights(setup)
    # A lower share makes the engine's cache smaller, and nothing else. Without a cache it frees
    # nothing.
    has_cache = plan.prediction.phases.get("rollouts", {}).get("KV cache", 0) > 0
    if has_cache and utilization is None:
        changes.append("a lower vllm_gpu_memory_utilization")
    if setup.sharding.zero_stage == 3:
        changes.append("more machines (--machines N; docs/hardware.md)")
    if plan.prediction.peak_phase == "forward and backward":
        changes.append("a smaller per_device_train_batch_size or max_pixels")
    if not changes:
        return "Choose a smaller model or a larger card."
    return f"Try, in this order: {'; '.join(changes)}."


def _changes_for_smaller_weights(setup: MemorySetup) -> list[str]:
    """Return the changes with which weights and optimizer take less of a card."""
    sharding = setup.sharding
    trains_all_weights = not setup.shape.has_adapters
    changes: list[str] = []
    if sharding.processes > 1 and sharding.zero_stage != 3:
        changes.append("ZeRO-3 (configs/accelerate/zero3.yaml)")
    if sharding.zero_stage == 3 and not sharding.offload_optimizer:
        changes.append("the optimizer in host memory (configs/accelerate/zero3_offload.yaml)")
    if setup.has_reference and trains_all_weights:
        changes.append("beta: 0.0 (no reference model)")
    if trains_all_weights and sharding.zero_stage is None:
        changes.append("use_peft: true")
        if sharding.processes == 1 and setup.on_gpu:
            changes.append(
                "several GPUs (--accelerate-config configs/accelerate/zero3.yaml --processes N)"
            )
    in_16_bits = setup.shape.has_adapters and not setup.shape.four_bit_parameters
    if in_16_bits and sharding.zero_stage is None and setup.on_gpu:
        changes.append("load_in_4bit: true, as in configs/train/adora_3b_12gb.yaml")
    return changes
