"""The arithmetic of batches and groups, checked by the same code for a run and for every shipped config; and whether
micro-batches keep groups together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from adora_vl.config.blocks import RolloutOptions
from adora_vl.config.keys import StepPart
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

# Losses whose sum over a generation does not depend on which rows share a micro-batch. bnpo is not among them, because
# it divides each micro-batch by its own number of tokens.
REGROUPABLE = frozenset({"grpo", "dr_grpo", "dapo", "sapo", "cispo", "luspo", "vespo"})


class BatchKeys(Protocol):
    """The keys that say how a run divides its generations."""

    per_device_train_batch_size: int
    num_generations: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    loss_type: str
    top_entropy_quantile: float
    adora_rollouts: RolloutOptions

    def own(self, part: StepPart) -> bool: ...


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


@dataclass(frozen=True)
class Shape:
    """The sizes of a generation. Rows are the rollouts of one process."""

    rows: int  # per micro-batch: per_device_train_batch_size
    generations: int  # rollouts per prompt (G): num_generations
    steps: int  # micro-batches per generation: steps_per_generation
    iterations: int  # passes over each generation: num_iterations
    accumulated: int  # micro-batches per optimizer step: gradient_accumulation_steps

    @classmethod
    def of(cls, config: BatchKeys) -> Shape:
        """As the run's keys say."""
        return cls(
            rows=config.per_device_train_batch_size,
            generations=config.num_generations,
            steps=config.steps_per_generation,
            iterations=config.num_iterations,
            accumulated=config.gradient_accumulation_steps,
        )

    @property
    def unit(self) -> int:
        """How many rows stay together."""
        return unit_size(self.rows, self.generations)

    @property
    def cycle(self) -> int:
        """How many micro-batches learn from one generation."""
        return self.steps * self.iterations

    @property
    def updates(self) -> int:
        """How many optimizer steps learn from one generation; 1 where a step takes several generations."""
        return max(1, self.cycle // self.accumulated)

    @property
    def chunk(self) -> int:
        """How many micro-batches of one generation belong to one optimizer step. All but the last may be empty."""
        steps, accumulated = self.steps, self.accumulated
        return min(steps, accumulated) if steps % accumulated == 0 or accumulated % steps == 0 else 1

    @property
    def has_one_step(self) -> bool:
        """Whether one optimizer step learns from the whole generation."""
        return self.accumulated % self.cycle == 0


def unit_size(rows: int, generations: int) -> int:
    """How many rows stay together: a whole group, or its largest part that fits evenly into micro-batches of `rows`."""
    return math.gcd(rows, generations)


def batch_plan(config: BatchKeys, num_processes: int) -> BatchPlan:
    """How a run divides its sequences, by TRL's rules. `GRPOConfig` has by then filled in `steps_per_generation`.

    Raises `UserError` where a generation does not divide into whole groups.
    """
    global_batch = config.per_device_train_batch_size * num_processes
    generation_batch = global_batch * config.steps_per_generation
    if generation_batch % config.num_generations:
        raise UserError(
            f"generation batch of {generation_batch} sequences does not divide into groups of num_generations: "
            f"{config.num_generations}; make per_device_train_batch_size x processes x steps_per_generation a multiple "
            "of it"
        )
    return BatchPlan(
        global_batch=global_batch,
        optimizer_batch=global_batch * config.gradient_accumulation_steps,
        generation_batch=generation_batch,
        prompts_per_generation=generation_batch // config.num_generations,
        cycle_micro_batches=config.steps_per_generation * config.num_iterations,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )


def check_rows(plan: BatchPlan, rows: int) -> None:
    """Raise `UserError` where the dataset does not fill one generation: TRL would train zero steps in silence."""
    if rows < plan.prompts_per_generation:
        raise UserError(
            f"dataset: {amount(rows, 'row')} cannot fill one generation of {plan.prompts_per_generation} prompts; "
            "lower per_device_train_batch_size or steps_per_generation, or raise num_generations"
        )


def regroups(config: BatchKeys) -> bool:
    """Whether any key wants micro-batches of whole groups instead of TRL's shuffled rows."""
    shares = config.own("share_vision") or config.own("share_prompt") or config.own("skip_zero_signal")
    return shares or config.adora_rollouts.refill > 0 or config.adora_rollouts.replay > 0


def regroup_obstacle(config: BatchKeys) -> str:
    """The setting, if any, that makes the loss depend on which rows share a micro-batch; otherwise empty."""
    if config.loss_type not in REGROUPABLE:
        return f"loss_type: {config.loss_type}"
    if config.top_entropy_quantile < 1:  # of each micro-batch's tokens
        return f"top_entropy_quantile: {config.top_entropy_quantile}"
    return ""
