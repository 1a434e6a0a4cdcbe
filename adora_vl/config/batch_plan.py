"""The arithmetic of batches and groups, for runs and shipped configs; and whether micro-batches
keep groups whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# Losses whose sum over a generation does not depend on which rows share a micro-batch. bnpo is not
# among them, because it divides each micro-batch by its own number of tokens.
REGROUPABLE = frozenset({"grpo", "dr_grpo", "dapo", "sapo", "cispo", "luspo", "vespo"})


@dataclass(frozen=True)
class BatchLayout:
    """The sizes of a generation.

    Rows are the rollouts of one process; batches are sequences over all of them.
    """

    rows: int  # per micro-batch: per_device_train_batch_size
    generations: int  # rollouts per prompt (G): num_generations
    steps: int  # micro-batches per generation: steps_per_generation
    iterations: int  # passes over each generation: num_iterations
    accumulated: int  # micro-batches per optimizer step: gradient_accumulation_steps
    processes: int = 1

    @classmethod
    def of(cls, config: AdoraGRPOConfig, processes: int = 1) -> BatchLayout:
        """As the run's keys say. `GRPOConfig` has by then filled in `steps_per_generation`."""
        return cls(
            config.per_device_train_batch_size,
            config.num_generations,
            config.steps_per_generation,
            config.num_iterations,
            config.gradient_accumulation_steps,
            processes,
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
        """How many optimizer steps learn from one generation; 1 where a step takes several
        generations.
        """
        return max(1, self.cycle // self.accumulated)

    @property
    def chunk(self) -> int:
        """How many micro-batches of one generation belong to one optimizer step.

        All but the last may be empty.
        """
        steps = self.steps
        accumulated = self.accumulated
        return (
            min(steps, accumulated) if steps % accumulated == 0 or accumulated % steps == 0 else 1
        )

    @property
    def has_one_step(self) -> bool:
        """Whether one optimizer step learns from the whole generation."""
        return self.accumulated % self.cycle == 0

    @property
    def global_batch(self) -> int:
        """One micro-batch over all ranks."""
        return self.rows * self.processes

    @property
    def optimizer_batch(self) -> int:
        return self.global_batch * self.accumulated

    @property
    def generation_batch(self) -> int:
        return self.global_batch * self.steps

    @property
    def prompts_per_generation(self) -> int:
        return self.generation_batch // self.generations

    @property
    def updates_per_generation(self) -> float:
        """As `updates`, also below 1."""
        return self.cycle / self.accumulated

    def describe(self) -> str:
        return (
            f"{amount(self.prompts_per_generation, 'prompt')} per generation "
            f"({self.generation_batch} rollouts), {self.optimizer_batch} sequences an optimizer "
            f"step in micro-batches of {self.global_batch} over all ranks, "
            f"{self.updates_per_generation:g} optimizer "
            f"step{'' if self.updates_per_generation == 1 else 's'} a generation"
        )


def unit_size(rows: int, generations: int) -> int:
    """How many rows stay together: a whole group, or its largest part that fits evenly into
    micro-batches of `rows`.
    """
    return math.gcd(rows, generations)


def batch_plan(config: AdoraGRPOConfig, processes: int) -> BatchLayout:
    """How a run divides its sequences, by TRL's rules.

    Raises `UserError` where a generation has no whole groups, and where an optimizer step would
    pass over one several times.
    """
    plan = BatchLayout.of(config, processes)
    of_groups = f"does not divide into groups of num_generations: {plan.generations}"
    remedy = "make per_device_train_batch_size x processes x steps_per_generation a multiple of it"
    whole = plan.generation_batch % plan.generations == 0
    passes = plan.iterations
    above = (
        f"num_iterations: {passes} with gradient_accumulation_steps: {plan.accumulated} above "
        f"steps_per_generation: {plan.steps}"
    )
    again = "computes the gradient of the same rollouts again before the weights have changed"
    fewer = f"set steps_per_generation: {plan.accumulated}, or num_iterations: 1"
    if not whole:
        raise UserError(
            f"generation batch of {plan.generation_batch} sequences {of_groups}; {remedy}"
        )
    if passes > 1 and plan.accumulated > plan.steps:
        raise UserError(f"{above} {again}; {fewer}")
    return plan


def check_rows(plan: BatchLayout, rows: int) -> None:
    """Raise `UserError` where the dataset does not fill one generation: TRL would train zero steps
    in silence.
    """
    needed = plan.prompts_per_generation
    remedy = "lower per_device_train_batch_size or steps_per_generation"
    few = f"dataset: {amount(rows, 'row')} cannot fill one generation of {needed} prompts"
    if rows < needed:
        raise UserError(f"{few}; {remedy}, or raise num_generations")


def regroups(config: AdoraGRPOConfig) -> bool:
    """Whether any key wants micro-batches of whole groups instead of TRL's shuffled rows."""
    shares = (
        config.own("share_vision") or config.own("share_prompt") or config.own("skip_zero_signal")
    )
    return shares or config.adora_rollouts.refill > 0


def regroup_obstacle(config: AdoraGRPOConfig) -> str:
    """The setting, if any, that makes the loss depend on which rows share a micro-batch; otherwise
    empty.
    """
    if config.loss_type not in REGROUPABLE:
        return f"loss_type: {config.loss_type}"
    if config.top_entropy_quantile < 1:  # of each micro-batch's tokens
        return f"top_entropy_quantile: {config.top_entropy_quantile}"
    return ""
