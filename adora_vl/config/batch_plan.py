"""The sizes of batches and groups, and whether micro-batches keep groups whole."""

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

    Rows are rollouts of one process; batches are counted in sequences over all processes.
    """

    # rollouts per micro-batch and process: per_device_train_batch_size
    micro_batch_rows: int
    # rollouts per prompt, the size of a group: num_generations
    num_generations: int
    # micro-batches per generation: steps_per_generation
    steps_per_generation: int
    # passes over each generation: num_iterations
    num_iterations: int
    # micro-batches per optimizer step: gradient_accumulation_steps
    gradient_accumulation_steps: int
    # processes on all machines together
    processes: int = 1

    @classmethod
    def of(cls, config: AdoraGRPOConfig, processes: int = 1) -> BatchLayout:
        """Return the sizes that the keys of a run say.

        `config` has to be constructed already: `GRPOConfig` fills in `steps_per_generation`.
        """
        return cls(
            micro_batch_rows=config.per_device_train_batch_size,
            num_generations=config.num_generations,
            steps_per_generation=config.steps_per_generation,
            num_iterations=config.num_iterations,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            processes=processes,
        )

    @property
    def rows_per_unit(self) -> int:
        """The number of rows that stay together: see `unit_size`."""
        return unit_size(self.micro_batch_rows, self.num_generations)

    @property
    def micro_batches_per_generation(self) -> int:
        """The number of micro-batches that learn from one generation."""
        return self.steps_per_generation * self.num_iterations

    @property
    def optimizer_steps_per_generation(self) -> int:
        """The number of optimizer steps that learn from one generation, at least 1.

        It is 1, too, where one step takes several generations.
        """
        return max(1, self.micro_batches_per_generation // self.gradient_accumulation_steps)

    @property
    def micro_batches_per_update(self) -> int:
        """The number of micro-batches of one generation that belong to one optimizer step.

        All but the last of them may be empty. It is 1 where the steps and the generations end at
        different micro-batches.
        """
        steps = self.steps_per_generation
        accumulated = self.gradient_accumulation_steps
        divides = steps % accumulated == 0 or accumulated % steps == 0
        return min(steps, accumulated) if divides else 1

    @property
    def has_one_step(self) -> bool:
        """Whether one optimizer step learns from the whole generation."""
        return self.gradient_accumulation_steps % self.micro_batches_per_generation == 0

    @property
    def micro_batches_before_update(self) -> int:
        """The number of micro-batches from a generation's first to the first optimizer step.

        They are learned from by the weights that have sampled the generation. Where the steps and
        the generations end at different micro-batches, only the first one is known to be.
        """
        if self.has_one_step:
            return self.micro_batches_per_generation
        if self.micro_batches_per_generation % self.gradient_accumulation_steps == 0:
            return self.gradient_accumulation_steps
        return 1

    @property
    def global_batch(self) -> int:
        """The number of sequences in one micro-batch over all ranks."""
        return self.micro_batch_rows * self.processes

    @property
    def optimizer_batch(self) -> int:
        """The number of sequences in one optimizer step over all ranks."""
        return self.global_batch * self.gradient_accumulation_steps

    @property
    def generation_batch(self) -> int:
        """The number of sequences in one generation over all ranks."""
        return self.global_batch * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """The number of prompts, and so of groups, in one generation."""
        return self.generation_batch // self.num_generations

    @property
    def updates_per_generation(self) -> float:
        """The number of optimizer steps that learn from one generation; it may be below 1."""
        return self.micro_batches_per_generation / self.gradient_accumulation_steps

    def describe(self) -> str:
        """Return the sizes in words, for the first lines of a run."""
        return (
            f"{amount(self.prompts_per_generation, 'prompt')} per generation "
            f"({self.generation_batch} rollouts), {self.optimizer_batch} sequences an optimizer "
            f"step in micro-batches of {self.global_batch} over all ranks, "
            f"{self.updates_per_generation:g} optimizer "
            f"step{'' if self.updates_per_generation == 1 else 's'} a generation"
        )


def unit_size(rows: int, generations: int) -> int:
    """Return the number of rows that stay together in micro-batches of `rows`.

    It is a whole group, or the largest part of one that divides both the group and the micro-batch.
    """
    return math.gcd(rows, generations)


def batch_plan(config: AdoraGRPOConfig, processes: int) -> BatchLayout:
    """Work out how a run divides its sequences, by TRL's rules.

    Raises `UserError` where a generation does not have whole groups, and where one optimizer step
    would pass over the same generation several times.
    """
    plan = BatchLayout.of(config, processes)
    if plan.generation_batch % plan.num_generations != 0:
        raise UserError(
            f"generation batch of {plan.generation_batch} sequences does not divide into groups of "
            f"num_generations: {plan.num_generations}; make per_device_train_batch_size x processes x "
            "steps_per_generation a multiple of it"
        )
    accumulated = plan.gradient_accumulation_steps
    if plan.num_iterations > 1 and accumulated > plan.steps_per_generation:
        raise UserError(
            f"num_iterations: {plan.num_iterations} with gradient_accumulation_steps: "
            f"{accumulated} above steps_per_generation: {plan.steps_per_generation} computes the "
            "gradient of the same rollouts again before the weights have changed; set "
            f"steps_per_generation: {accumulated}, or num_iterations: 1"
        )
    return plan


def check_row_count(plan: BatchLayout, rows: int) -> None:
    """Raise `UserError` for a data set of so many rows that does not fill one generation.

    TRL would train zero steps on it, and say nothing.
    """
    needed = plan.prompts_per_generation
    if rows < needed:
        raise UserError(
            f"dataset: {amount(rows, 'row')} cannot fill one generation of {needed} prompts; lower "
            "per_device_train_batch_size or steps_per_generation, or raise num_generations"
        )


def regroups(config: AdoraGRPOConfig) -> bool:
    """Return whether any key needs micro-batches of whole groups instead of TRL's shuffled rows."""
    if (
        config.uses("share_vision")
        or config.uses("share_prompt")
        or config.uses("skip_zero_signal")
        or config.uses("fill_micro_batches")
    ):
        return True
    return config.adora_rollouts.refill > 0


def regroup_obstacle(config: AdoraGRPOConfig) -> str:
    """Return the setting that makes the loss depend on which rows share a micro-batch; or empty."""
    if config.loss_type not in REGROUPABLE:
        return f"loss_type: {config.loss_type}"
    # the quantile is taken over the tokens of each micro-batch
    if config.top_entropy_quantile < 1:
        return f"top_entropy_quantile: {config.top_entropy_quantile}"
    return ""
