"""The memory section of the dry run's report.

It says what each part takes in each phase, whether the run fits, and what would make it fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from adora_vl.config.batch_plan import unit_size
from adora_vl.models.check import LOST_UPDATES
from adora_vl.planning.memory import Sharing, cache_bytes_per_token, predict
from adora_vl.planning.what_fits import (
    fits,
    largest_batch,
    largest_image_tokens,
    proposed_utilization,
)
from adora_vl.utils.cli import section
from adora_vl.utils.files import GIB

if TYPE_CHECKING:
    from adora_vl.planning.plan import Plan

_ROOMY = 0.25  # of the card: below it the parts of the memory are not listed (--json has them)


def _gib(size: int) -> str:
    """Return a size in GiB, or in MiB where it is small."""
    return f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def _number(count: int) -> str:
    """Return a number of parameters in words."""
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"


def memory_lines(plan: Plan) -> list[str]:
    """Return the predicted memory by component and phase, and the verdict, as lines."""
    setup = plan.setup
    card = plan.card
    prediction = predict(setup, card)
    phases = prediction.phases
    title = f"Memory, predicted, on {plan.card_name}"
    lines = [
        f"{_number(setup.shape.total_parameters)} parameters, {_number(setup.shape.trained_parameters)} trained; "
        f"{setup.sharding.describe()}.",
        f"Micro-batch: {setup.batch.sequences} x ({setup.batch.prompt_tokens} + "
        f"{setup.batch.completion_tokens}) tokens, {setup.batch.image_tokens} of each an image.",
        *recomputed_lines(plan),
    ]
    if prediction.peak < _ROOMY * card:  # nobody asks which component takes how much
        return section(title, [*lines, *verdict_lines(plan)])
    lines += ["", _table_line("GiB per card", list(phases))]
    # A phase lacks the components that it does not hold.
    for component in dict.fromkeys(name for sizes in phases.values() for name in sizes):
        cells = []
        for sizes in phases.values():
            cells.append(_gib(sizes[component]) if component in sizes else "-")
        lines.append(_table_line(component, cells))
    lines.append(_table_line("together", [_gib(sum(sizes.values())) for sizes in phases.values()]))
    if prediction.states.host_optimizer:
        host = prediction.states.host_optimizer * setup.sharding.local_processes
        processes = "the processes of one machine"
        if setup.sharding.machines == 1:
            processes = "all processes on one host"
        lines.append(
            f"Host memory beside it: {host / GIB:.3g} GiB for the optimizer of {processes}."
        )
    if setup.swaps:
        base = setup.shape.base_bytes(setup.shape.weight_bytes) / GIB
        lines.append(
            f"The base, {base:.3g} GiB, is on the card once: the trainer's leaves while the "
            f"engine is awake. Both take {2 * base:.3g} GiB of pinned host memory."
        )
    honesty = _ON_A_GPU if setup.accelerator else _ON_A_CPU
    lines += ["", *sharing_lines(plan), *engine_lines(plan), *verdict_lines(plan), honesty]
    return section(title, lines)


def recomputed_lines(plan: Plan) -> list[str]:
    """Say how many layers of the language model the backward pass computes again.

    They are those of the longest micro-batch, which `plan.setup` has; a shorter one may need fewer.
    Without gradient checkpointing there is nothing to say.
    """
    setup = plan.setup
    if not setup.checkpointing:
        return []
    number = predict(setup, plan.card).recomputed
    reason = "as few as leave a tenth of the card free" if setup.recompute == "auto" else "so set"
    if setup.recompute == "auto" and not setup.accelerator:
        reason = "auto needs a GPU"
    return [
        f"Layers recomputed in its backward pass: {number} of {setup.shape.text.layers} "
        f"(adora_recompute: {setup.recompute}; {reason})."
    ]


def _table_line(title: str, cells: Sequence[str]) -> str:
    """Return a line of the table of memory, with a cell for each phase."""
    return f"{title:24}" + "".join(f"{cell:>24}" for cell in cells)


def sharing_lines(plan: Plan) -> list[str]:
    """Say what the rollouts of a group share in a micro-batch, and how much memory that saves."""
    setup = plan.setup
    phase = "forward and backward"
    batch = setup.micro_batch
    group = setup.generations
    if not (setup.sharing.vision or setup.sharing.prompts):
        return []
    # With layers that fill the card both would take as much.
    setup = replace(setup, recompute="all")
    # The same run with image and prompt computed for each rollout, as TRL does.
    unshared = replace(setup, sharing=Sharing())
    ours = sum(predict(setup, plan.card).phases[phase].values())
    alone = sum(predict(unshared, plan.card).phases[phase].values())
    has_shared_image = batch.image_tokens > 0 and batch.sequences_per_problem > 1
    shared = ["the image"] if has_shared_image and setup.sharing.images else []
    shared += ["the prompt"] if batch.packed else []
    lines = []
    if shared:
        lines = [
            f"Computed once for {batch.sequences_per_problem} rollouts of a micro-batch: "
            f"{' and '.join(shared)}. "
            f"With one for each {phase} would take {alone / GIB:.3g} GiB instead of "
            f"{ours / GIB:.3g}{', all layers recomputed' if setup.checkpointing else ''}."
        ]
    # A micro-batch that holds part of a group computes image and prompt for each part.
    unit = unit_size(batch.sequences, group)
    if unit < group:
        lines.append(
            f"per_device_train_batch_size: {batch.sequences} splits a group into {group // unit} "
            "parts, and each computes image and prompt anew; a multiple of num_generations: "
            f"{group} does not."
        )
    return lines


_ON_A_CPU = "Formulas, within 10 % of torch's own accounting on a CPU: docs/hardware.md."
_ON_A_GPU = (
    "Formulas, checked on a pretended card (python -m benchmarks.fake_card CONFIG) and by no GPU "
    "yet. CUDA's context, fragmentation and the engine's workspace are assumptions: "
    "docs/hardware.md."
)


def engine_lines(plan: Plan) -> list[str]:
    """Return how many rollouts the engine has room for, as lines."""
    engine = predict(plan.setup, plan.card).engine
    setup = plan.setup
    if engine is None or setup.engine is None or not setup.accelerator:
        return []
    per_token = cache_bytes_per_token(
        setup.shape, setup.engine.dtype_bytes, setup.engine.tensor_parallel
    )
    return [
        f"Engine: {per_token / 1024:.0f} KiB per token for keys and values; of "
        f"{setup.engine.max_sequences} rollouts {engine.concurrent} run at once if all reach "
        f"{setup.engine.max_length} tokens, more if they end earlier.",
        *share_lines(plan, engine.concurrent),
    ]


def share_lines(plan: Plan, concurrent: int) -> list[str]:
    """Propose a share of the GPU with which the run would fit, or more rollouts would run at once.

    `concurrent`: rollouts of full length that run at once with the present share.
    """
    engine = plan.setup.engine
    share = proposed_utilization(plan.setup, plan.card)
    if engine is None or share is None:
        return []
    proposed = predict(replace(plan.setup, engine=replace(engine, utilization=share)), plan.card)
    proposed_concurrent = proposed.engine.concurrent if proposed.engine else 0
    if proposed_concurrent <= concurrent and fits(plan.setup, plan.card):
        return []
    return [
        f"vllm_gpu_memory_utilization: {share:g} instead of {engine.utilization:g} lets "
        f"{proposed_concurrent} "
        f"run at once, and leaves {1 - proposed.peak / plan.card:.0%} of the card free."
    ]


def verdict_lines(plan: Plan) -> list[str]:
    """Return whether the run fits on its cards, and what would, as lines."""
    setup = plan.setup
    card = plan.card
    prediction = predict(setup, card)
    good = fits(setup, card)
    peak = prediction.peak / GIB
    share = prediction.peak / card
    usage = f"{peak:.3g} GiB at most ({prediction.peak_phase}), {share:.0%} of {card / GIB:.3g} GiB"
    if good:
        lines = [f"It fits: {usage}."]
    elif prediction.peak > card:
        parts = prediction.phases[prediction.peak_phase]
        largest = max(parts, key=lambda name: parts[name])
        lines = [
            f"It does NOT fit: {prediction.peak_phase} would take {peak:.3g} GiB of "
            f"{card / GIB:.3g}; the largest part is {largest} ({parts[largest] / GIB:.3g} GiB). "
            f"{remedy(plan)}"
        ]
    else:  # the card has room, but the engine's share of it has not
        lines = [
            "It does NOT fit: the engine's share has no room for one rollout of full length; raise "
            "vllm_gpu_memory_utilization, or lower vllm_max_model_length."
        ]
    # Without DeepSpeed nothing keeps a float32 copy of weights in 16 bits.
    if (
        setup.sharding.stage is None
        and not setup.shape.has_adapters
        and setup.shape.weight_bytes == 2
    ):
        lines.append(LOST_UPDATES)
    batch = largest_batch(setup, card)
    batch_text = str(batch or "none")
    if batch == setup.generation:
        batch_text = f"{batch}, a whole generation"
    lines.append(
        "Largest per_device_train_batch_size that fits, of those that keep groups of "
        f"{setup.generations} whole or split them evenly: {batch_text} (keep its product with "
        "gradient_accumulation_steps and processes)."
    )
    return [*lines, largest_image_line(plan)] if setup.shape.vision is not None else lines


def largest_image_line(plan: Plan) -> str:
    """Say the largest `max_pixels` that fits, or what leaves no room for any image."""
    if plan.limit is not None and plan.image_room < 1:
        return (
            "No max_pixels leaves room for a whole answer: text of up to "
            f"{plan.lengths.longest_text} tokens and max_completion_length: "
            f"{plan.limit.completion} together exceed {plan.limit.name}."
        )
    tokens = largest_image_tokens(plan.setup, plan.card, plan.image_room)
    pixels = tokens * plan.setup.shape.image_token_pixels
    return (
        f"Largest max_pixels that fits: {pixels} ({tokens} image tokens)."
        if tokens
        else "No max_pixels fits."
    )


def remedy(plan: Plan) -> str:
    """Return what to change first if the run does not fit, for the settings at hand."""
    setup = plan.setup
    share = proposed_utilization(plan.setup, plan.card)
    sharding = setup.sharding
    adapters = setup.shape.has_adapters
    learning = "forward and backward"
    wishes = (
        # with which it fits; how many rollouts run at once then, `share_lines` says
        (share is not None, f"vllm_gpu_memory_utilization: {share or 0:g}"),
        (
            setup.engine and not setup.engine.sleep and setup.accelerator,
            "vllm_enable_sleep_mode: true",
        ),
        (not setup.checkpointing, "gradient_checkpointing: true"),
        (sharding.processes > 1 and sharding.stage != 3, "ZeRO-3 (configs/accelerate/zero3.yaml)"),
        (
            sharding.stage == 3 and not sharding.offload_optimizer,
            "the optimizer in host memory (configs/accelerate/zero3_offload.yaml)",
        ),
        (setup.reference and not adapters, "beta: 0.0 (no reference model)"),
        (not adapters and sharding.stage is None, "use_peft: true"),
        (setup.engine and share is None, "a lower vllm_gpu_memory_utilization"),
        (sharding.stage == 3, "more machines (--machines N; docs/hardware.md)"),
        (
            predict(setup, plan.card).peak_phase == learning,
            "a smaller per_device_train_batch_size or max_pixels",
        ),
    )
    return f"Try, in this order: {'; '.join(wish for holds, wish in wishes if holds)}."
