"""The arithmetic of batches and groups: checked by the same code for a run and for every shipped config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adora_vl.commands import amount
from adora_vl.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Sequences unless the name says otherwise."""

    global_batch: int  # one micro-batch over all ranks
    optimizer_batch: int  # one optimizer step
    generation_batch: int  # sampled together
    prompts_per_generation: int
    cycle_micro_batches: int  # micro-batches from one generation to the next
    gradient_accumulation_steps: int

    @property
    def updates_per_generation(self) -> float:
        """Optimizer steps that learn from one generation."""
        return self.cycle_micro_batches / self.gradient_accumulation_steps

    def describe(self) -> str:
        return (
            f"{amount(self.prompts_per_generation, 'prompt')} per generation ({self.generation_batch} rollouts), "
            f"{self.optimizer_batch} sequences an optimizer step in micro-batches of {self.global_batch} over all "
            f"ranks, {self.updates_per_generation:g} optimizer step{'' if self.updates_per_generation == 1 else 's'} a "
            "generation"
        )


def unit_size(rows: int, generations: int) -> int:
    """How many rows stay together: a whole group, or the largest part of it that divides `rows` per micro-batch."""
    return math.gcd(rows, generations)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}: {value} must be at least 1")


def plan_batches(
    *,
    per_device_train_batch_size: int,
    num_processes: int,
    num_generations: int,
    gradient_accumulation_steps: int = 1,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
    num_iterations: int = 1,
) -> BatchPlan:
    """How a run divides its sequences, by TRL's rules (`GRPOConfig.__post_init__`).

    Raises `UserError` where batches do not divide into whole micro-batches or whole groups, with a size that would.
    """
    _positive(
        per_device_train_batch_size=per_device_train_batch_size,
        num_processes=num_processes,
        gradient_accumulation_steps=gradient_accumulation_steps,
        num_iterations=num_iterations,
    )
    if num_generations < 2:
        raise UserError(f"num_generations: {num_generations} must be at least 2, an advantage compares rollouts")
    if generation_batch_size is not None and steps_per_generation is not None:
        raise UserError("generation_batch_size and steps_per_generation are both set; set one of them")
    global_batch = per_device_train_batch_size * num_processes
    if generation_batch_size is None:
        generation_batch_size = global_batch * (steps_per_generation or gradient_accumulation_steps)
    if generation_batch_size % global_batch:
        raise UserError(
            f"generation_batch_size: {generation_batch_size} is not a multiple of per_device_train_batch_size x "
            f"processes = {per_device_train_batch_size} x {num_processes} = {global_batch}"
        )
    if generation_batch_size % num_generations:
        raise UserError(
            f"generation batch of {generation_batch_size} sequences does not divide into groups of num_generations: "
            f"{num_generations}; make per_device_train_batch_size x processes x steps_per_generation a multiple of it"
        )
    return BatchPlan(
        global_batch=global_batch,
        optimizer_batch=global_batch * gradient_accumulation_steps,
        generation_batch=generation_batch_size,
        prompts_per_generation=generation_batch_size // num_generations,
        cycle_micro_batches=generation_batch_size // global_batch * num_iterations,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )


def check_rows(plan: BatchPlan, rows: int) -> None:
    """Raise `UserError` where the dataset does not fill one generation: TRL would train zero steps in silence."""
    if rows < plan.prompts_per_generation:
        raise UserError(
            f"dataset: {amount(rows, 'row')} cannot fill one generation of {plan.prompts_per_generation} prompts; "
            "lower per_device_train_batch_size or steps_per_generation, or raise num_generations"
        )
