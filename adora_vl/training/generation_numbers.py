"""Numbers the generations of a training, and says at which optimizer step each is sampled."""

import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any, NamedTuple

from adora_vl.data.dataloader import ROW_NUMBER_COLUMN
from adora_vl.rollout.rollouts import StepKey
from adora_vl.training.generation import Generation
from adora_vl.types import Row, StepContext
from adora_vl.utils.errors import UserError


class GenerationPosition(NamedTuple):
    """Where in a training a generation is sampled."""

    step: int  # optimizer steps before its own
    index_in_step: int  # generations of its own step that come before it


class GenerationPlan(NamedTuple):
    """How many generations an optimizer step and an epoch have, where a step takes several.

    The last step of an epoch has fewer, where the epoch's generations do not divide evenly.
    """

    per_step: int
    per_epoch: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.per_epoch / self.per_step)

    def count_before_step(self, step: int) -> int:
        """Return how many generations the optimizer steps before `step` have."""
        whole_epochs, steps_of_epoch = divmod(step, self.steps_per_epoch)
        generations_of_epoch = min(steps_of_epoch * self.per_step, self.per_epoch)
        return whole_epochs * self.per_epoch + generations_of_epoch

    def position_of(self, generation: int) -> GenerationPosition:
        """Return the optimizer step to which a generation belongs, and its index in that step."""
        whole_epochs, index_in_epoch = divmod(generation, self.per_epoch)
        steps_of_epoch, index_in_step = divmod(index_in_epoch, self.per_step)
        return GenerationPosition(
            step=whole_epochs * self.steps_per_epoch + steps_of_epoch, index_in_step=index_in_step
        )


class GenerationNumbers:
    """Numbers the generations of a training in the order in which they are learned from.

    A generation is all rollouts that are sampled before the policy learns again. Either a
    generation is learned from in several optimizer steps, or an optimizer step learns from one or
    several whole generations (`layout.generation_has_one_step`). In the second case the last step
    of an epoch may have fewer, and `_plan` counts them.
    """

    def __init__(self, context: StepContext, rows: Sized, *, is_numbered: bool) -> None:
        """Build the object.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            rows: the rows of the data set. A streamed one has no length, which is asked for only
                where steps take several generations.
            is_numbered: whether rollouts may be older than the generation that learns from them, so
                that their ages are counted. Otherwise every generation has the number 0.
        """
        self._layout = context.layout
        self._state = context.state
        self._rows = rows
        self._is_numbered = is_numbered

    def generation_at(self, key: StepKey, group_size: int, rows: Sequence[Row]) -> Generation:
        """Return the generation that is sampled at this position of the run.

        It has a number of its own if rollouts may be older than the generation that learns from
        them, so that their ages can be counted. Otherwise, and in an evaluation, its number is 0.

        Args:
            key: the optimizer step, and the micro-batch in it.
            group_size: rollouts of a group.
            rows: the rows that the data loader has drawn for it.

        Raises:
            UserError: the generation is numbered, so a problem may wait for a later one, where its
                row is read again by the row's number. But the rows have no numbers.
        """
        if key.mode != "train" or not self._is_numbered:
            return Generation(key=key, group_size=group_size)
        row_numbers = [dict[str, Any](row).get(ROW_NUMBER_COLUMN, -1) for row in rows]
        # A negative number marks a row that does not come from the data set, or has no number.
        if min(row_numbers) < 0:
            raise UserError(
                "adora_rollouts: these rows do not say their numbers, by which problems that "
                "wait are read again (a streamed data set, or a loader of your own); load the "
                "data set whole, or set budget and ahead off"
            )
        number = self._count_before(key.step, key.micro)
        return Generation(key=key, group_size=group_size, number=number)

    def generation_after(self, generation: Generation, distance: int) -> Generation | None:
        """Return the generation `distance` after this one; None after the last of the training."""
        if distance >= self.count_remaining(generation):
            return None
        layout = self._layout
        number = self._count_before(generation.key.step, generation.key.micro) + distance
        if layout.generation_has_one_step:
            # An optimizer step learns from one or several whole generations.
            position = self._plan.position_of(number)
            step = position.step
            micro = position.index_in_step * layout.micro_batches_per_generation
        else:
            # A generation is learned from in several optimizer steps.
            micro_batches_before = number * layout.micro_batches_per_generation
            step, micro = divmod(micro_batches_before, layout.gradient_accumulation_steps)
        key = StepKey(mode="train", step=step, micro=micro)
        return replace(generation, key=key, number=number)

    def count_remaining(self, generation: Generation) -> int:
        """Return the number of generations until the end of the training, including this one."""
        total_count = self._count_before(int(self._state().max_steps))
        return total_count - self._count_before(generation.key.step, generation.key.micro)

    def _count_before(self, step: int, micro: int = 0) -> int:
        """Return how many generations begin before a position of the run.

        That is the number of the generation that begins there.

        Args:
            step: the optimizer step, from 0.
            micro: the micro-batch in it, from 0.
        """
        layout = self._layout
        if layout.generation_has_one_step:
            earlier_in_step = micro // layout.micro_batches_per_generation
            return self._plan.count_before_step(step) + earlier_in_step
        micro_batches_before = step * layout.gradient_accumulation_steps + micro
        # A generation that these micro-batches have begun counts whole.
        return math.ceil(micro_batches_before / layout.micro_batches_per_generation)

    @property
    def _plan(self) -> GenerationPlan:
        """How many generations a step and an epoch have, where a step learns from whole ones."""
        layout = self._layout
        rollouts_per_epoch = len(self._rows) * layout.num_generations
        return GenerationPlan(
            per_step=layout.gradient_accumulation_steps // layout.micro_batches_per_generation,
            per_epoch=rollouts_per_epoch // layout.generation_batch,
        )
