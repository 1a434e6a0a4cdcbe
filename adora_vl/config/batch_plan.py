"""The sizes of batches and groups, and whether micro-batches keep groups whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# Losses whose sum over a generation does not depend on which rows share a micro-batch. bnpo is not
# among them, because it divides each micro-batch by its own number of tokens.
REGROUPABLE_LOSSES = frozenset({"grpo", "dr_grpo", "dapo", "sapo", "cispo", "luspo", "vespo"})


@dataclass(frozen=True)
class BatchLayout:
    """The sizes of a generation: the rollouts that are sampled at once and then learned from.

    `micro_batch_rows`: rollouts in a micro-batch of one process, `per_device_train_batch_size`.
    `num_generations`: rollouts per prompt, the size of a group. `steps_per_generation`:
    micro-batches into which a generation is cut. `num_iterations`: passes over each generation.
    `gradient_accumulation_steps`: micro-batches per optimizer step. `processes`: their number on
    all machines together.
    """

    micro_batch_rows: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    gradient_accumulation_steps: int
    processes: int

    @classmethod
    def of(cls, config: AdoraGRPOConfig, *, processes: int) -> BatchLayout:
        """Return the sizes that a config asks for, in a run with `processes` processes.

        `config` has to be constructed already, because `GRPOConfig` fills in
        `steps_per_generation`.
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
    def rows_per_subgroup(self) -> int:
        """The number of rollouts of one subgroup, which always go into the same micro-batch.

        A subgroup is a group of rollouts to one prompt, or a part of a group (`subgroup_size`).
        """
        return subgroup_size(
            micro_batch_rows=self.micro_batch_rows, group_size=self.num_generations
        )

    @property
    def micro_batches_per_generation(self) -> int:
        """The number of micro-batches that learn from one generation."""
        return self.steps_per_generation * self.num_iterations

    def micro_steps_of_generation(self, micro_step: int) -> range:
        """Return the numbers of all micro-batches that learn from the same generation as one.

        Micro-batches are numbered through the whole run, as TRL's `_step` does. For example, with 4
        micro-batches per generation, number 6 belongs to the generation of 4, 5, 6 and 7.

        `micro_step`: the number of any micro-batch of the generation.
        """
        first_micro_step = micro_step - micro_step % self.micro_batches_per_generation
        return range(first_micro_step, first_micro_step + self.micro_batches_per_generation)

    def micro_step_correction(self, micro_step: int) -> int:
        """Return by how much to raise TRL's count of micro-batches after an optimizer step.

        The last optimizer step of an epoch may have fewer micro-batches than the others. TRL's
        count then stands in the middle of a step, but the next epoch begins with a new step and a
        new generation. So the count is raised to the next number at which a step and a generation
        begin. A run that resumes there counts from the same number. After any other step the result
        is 0.

        For example, let a step have 4 micro-batches and a generation 6. Both begin at every
        twelfth number. After an epoch that ends at 10 the result is 2, and the next epoch begins
        at 12.

        `micro_step`: TRL's count, `_step`, right after an optimizer step.
        """
        if micro_step % self.gradient_accumulation_steps == 0:
            return 0
        # Both begin at the multiples of this number.
        common_multiple = math.lcm(
            self.gradient_accumulation_steps, self.micro_batches_per_generation
        )
        return -micro_step % common_multiple  # the distance to the next multiple

    @property
    def optimizer_steps_per_generation(self) -> int:
        """The number of whole optimizer steps that learn from one generation, at least 1.

        It is 1 also where one optimizer step accumulates over several generations. The fraction of
        a step that one generation then makes is `updates_per_generation`.
        """
        whole_steps = self.micro_batches_per_generation // self.gradient_accumulation_steps
        return max(1, whole_steps)

    @property
    def micro_batches_per_update(self) -> int:
        """The number of micro-batches of one generation that belong to one optimizer step.

        Rows may be moved between these micro-batches, since their gradients are summed. Examples:

            generation   step     result
            8            4        4: a generation makes two steps
            4            8        4: a step takes two generations
            6            4        1: no row may be moved

        In the last case neither number is a multiple of the other, so the steps end at different
        micro-batches in each generation.
        """
        batches_per_generation = self.steps_per_generation
        batches_per_step = self.gradient_accumulation_steps
        smaller_count = min(batches_per_generation, batches_per_step)
        larger_count = max(batches_per_generation, batches_per_step)
        return smaller_count if larger_count % smaller_count == 0 else 1

    @property
    def optimizer_steps_per_pass(self) -> int:
        """The number of optimizer steps among which one pass over a generation is divided.

        Where a step may end in the middle of a generation, every micro-batch counts as one.
        """
        return self.steps_per_generation // self.micro_batches_per_update

    @property
    def generation_has_one_step(self) -> bool:
        """Whether all micro-batches of a generation belong to the same optimizer step."""
        return self.gradient_accumulation_steps % self.micro_batches_per_generation == 0

    @property
    def generation_has_whole_steps(self) -> bool:
        """Whether an optimizer step ends with each generation, and one begins with each."""
        return self.micro_batches_per_generation % self.gradient_accumulation_steps == 0

    @property
    def micro_batches_before_update(self) -> int:
        """The number of a generation's micro-batches before the first optimizer step.

        In these the policy still has the weights that sampled the generation.
        """
        if self.generation_has_one_step:
            return self.micro_batches_per_generation
        if self.generation_has_whole_steps:
            return self.gradient_accumulation_steps
        # The steps end at different micro-batches in each generation. Only the first micro-batch
        # is certain to come before an update.
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
    def rows_per_process(self) -> int:
        """The number of sequences in one generation on each rank."""
        return self.micro_batch_rows * self.steps_per_generation

    @property
    def generation_batch(self) -> int:
        """The number of sequences in one generation over all ranks."""
        return self.rows_per_process * self.processes

    @property
    def prompts_per_generation(self) -> int:
        """The number of prompts, and so of groups, in one generation."""
        return self.generation_batch // self.num_generations

    def optimizer_steps_per_epoch(self, rows: int) -> int:
        """Return the number of optimizer steps of an epoch over `rows` rows of the data set.

        Rows at the end that fill no generation are left out. The last step of an epoch may have
        fewer micro-batches than the others. It is counted too, as Transformers does.

        For example, 10 rows make 2 generations of 4 prompts. With 3 micro-batches each and 4
        micro-batches per step, these are 2 steps, of which the last has 2 micro-batches.
        """
        generations = rows // self.prompts_per_generation
        micro_batches = generations * self.micro_batches_per_generation
        return max(1, math.ceil(micro_batches / self.gradient_accumulation_steps))

    @property
    def updates_per_generation(self) -> float:
        """The number of optimizer steps per generation; below 1 if a step takes several of them."""
        return self.micro_batches_per_generation / self.gradient_accumulation_steps

    def describe(self) -> str:
        """Return the sizes in words, for the first lines of a run."""
        optimizer_steps = self.updates_per_generation
        plural = "" if optimizer_steps == 1 else "s"
        return (
            f"{pluralize(self.prompts_per_generation, 'prompt')} per generation "
            f"({self.generation_batch} rollouts), {self.optimizer_batch} sequences an optimizer "
            f"step in micro-batches of {self.global_batch} over all ranks, "
            f"{optimizer_steps:g} optimizer step{plural} a generation"
        )


def subgroup_size(micro_batch_rows: int, group_size: int) -> int:
    """Return the number of rows of one subgroup: rows of one group that share a micro-batch.

    It is the largest number that divides both the group and the micro-batch. For example, a group
    of 8 in micro-batches of 16 is one subgroup of 8 rows, and in micro-batches of 4 two subgroups
    of 4.
    """
    return math.gcd(micro_batch_rows, group_size)


def build_batch_layout(config: AdoraGRPOConfig, processes: int) -> BatchLayout:
    """Return the sizes of a run's batches by TRL's rules, and check that they fit together.

    Raises `UserError` where a generation does not consist of whole groups, and where one optimizer
    step would pass over the same generation several times.
    """
    layout = BatchLayout.of(config, processes=processes)
    if layout.generation_batch % layout.num_generations != 0:
        raise UserError(
            f"generation batch of {layout.generation_batch} sequences does not divide into groups "
            f"of num_generations: {layout.num_generations}; make per_device_train_batch_size x "
            "processes x steps_per_generation a multiple of it"
        )
    accumulation_steps = layout.gradient_accumulation_steps
    if layout.num_iterations > 1 and accumulation_steps > layout.steps_per_generation:
        raise UserError(
            f"num_iterations: {layout.num_iterations} with gradient_accumulation_steps: "
            f"{accumulation_steps} above steps_per_generation: {layout.steps_per_generation} computes the "
            "gradient of the same rollouts again before the weights have changed; set "
            f"steps_per_generation: {accumulation_steps}, or num_iterations: 1"
        )
    return layout


def total_optimizer_steps(
    config: AdoraGRPOConfig, layout: BatchLayout, rows: int | None
) -> int | None:
    """Return the number of optimizer steps of a whole run, as Transformers counts them.

    `rows`: the number of rows to train on; None for a stream, or where it is not known. Without
    `max_steps` the number of steps is then not known either, and None is returned.
    """
    # `max_steps` is -1 where the number of epochs decides.
    if config.max_steps > 0:
        return int(config.max_steps)
    if rows is None:
        return None
    epochs = float(config.num_train_epochs)
    return math.ceil(epochs * layout.optimizer_steps_per_epoch(rows))


def check_row_count(layout: BatchLayout, rows: int) -> None:
    """Raise `UserError` if a data set of `rows` rows does not fill one generation.

    TRL would train zero steps on it, and say nothing.
    """
    needed_rows = layout.prompts_per_generation
    if rows < needed_rows:
        raise UserError(
            f"dataset: {pluralize(rows, 'row')} cannot fill one generation of {needed_rows} "
            "prompts; lower per_device_train_batch_size or steps_per_generation, or raise "
            "num_generations"
        )


def regroups_micro_batches(config: AdoraGRPOConfig) -> bool:
    """Return whether this package cuts a generation into micro-batches, in place of TRL."""
    return asks_for_regrouping(config) and not setting_against_regrouping(config)


def asks_for_regrouping(config: AdoraGRPOConfig) -> bool:
    """Return whether a config asks for micro-batches that keep the rows of a group together.

    TRL shuffles the rows instead. Several of this project's accelerations need the groups, and so
    does refilling a generation with further groups.
    """
    if (
        config.uses("share_vision")
        or config.uses("share_prompt")
        or config.uses("skip_zero_signal")
        or config.uses("fill_micro_batches")
    ):
        return True
    return config.adora_rollouts.refill > 0


def setting_against_regrouping(config: AdoraGRPOConfig) -> str:
    """Return the setting that forbids moving rows between micro-batches, as `key: value`.

    With such a setting the loss depends on which rows share a micro-batch, so moving them would
    change the training. The text is empty if no setting forbids it.
    """
    if config.loss_type not in REGROUPABLE_LOSSES:
        return f"loss_type: {config.loss_type}"
    # The quantile is taken over the tokens of each micro-batch.
    if config.top_entropy_quantile < 1:
        return f"top_entropy_quantile: {config.top_entropy_quantile}"
    return ""
