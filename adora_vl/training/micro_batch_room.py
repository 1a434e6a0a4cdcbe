"""Says which units fit into a micro-batch together.

Memory is planned for `per_device_train_batch_size` answers of `max_completion_length` tokens, and
most are far shorter. So a micro-batch takes as many units as together need no more memory than the
planned ones, by the formulas of the dry run. That saves launches and, with ZeRO-3, gathers of the
weights. All ranks cut their units at the same places, so that they go through equally many
micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from adora_vl.models.activations import ActivationMemory, PassSize
from adora_vl.packing.shared_prompt import MAX_TOKEN_RATIO
from adora_vl.types import HostRows


@dataclass(frozen=True)
class UnitSize:
    """The numbers of a unit that the memory of its pass depends on. All lengths are in tokens."""

    rows: int
    prompt: int  # which its rows have in common
    longest: int  # of its answers
    answers: int  # all of them together
    patches: int = 0  # of its images

    @property
    def predicting(self) -> int:
        """The number of tokens of its answers that predict one: the last of each does not."""
        return max(self.answers - self.rows, 0)


def unit_sizes(host: HostRows, rows_per_unit: int, *, shares_vision: bool) -> list[UnitSize]:
    """Return the sizes of all units of a batch, of `rows_per_unit` rows each.

    `shares_vision`: whether an image of several rows is looked at once.
    """
    prompts = host.prompt_mask.sum(dim=1).tolist()
    sizes = []
    for first_row in range(0, len(prompts), rows_per_unit):
        rows = range(first_row, first_row + rows_per_unit)
        answer_lengths = [host.completion_lengths[row] for row in rows]
        patches = [_patches(host, row) for row in rows]
        sizes.append(
            UnitSize(
                rows=rows_per_unit,
                prompt=prompts[first_row],
                longest=max(answer_lengths),
                answers=sum(answer_lengths),
                patches=max(patches) if shares_vision else sum(patches),
            )
        )
    return sizes


def _patches(host: HostRows, row: int) -> int:
    """Return the number of patches of a row's images."""
    row_images = host.images[row]
    return 0 if row_images is None else len(row_images.pixels)


def size_of_pass(units: Sequence[UnitSize], *, shares_prompts: bool, masked: bool) -> PassSize:
    """Return the size of the policy's pass over these units.

    With shared prompts it is one row without padding, where that is less work. Else its rows are as
    long as the longest prompt with the longest answer.

    `masked`: whether attention takes a padding mask where rows have padding.
    """
    rows = sum(unit.rows for unit in units)
    longest_answer = max(unit.longest for unit in units)
    row_length = max(unit.prompt for unit in units) + longest_answer
    patch_count = sum(unit.patches for unit in units)
    packed_tokens = sum(unit.prompt + unit.predicting for unit in units)
    if shares_prompts and packed_tokens <= MAX_TOKEN_RATIO * rows * row_length:
        return PassSize(
            rows=1,
            row_length=packed_tokens,
            scored_tokens=sum(unit.answers for unit in units),
            repeated_keys=sum(unit.rows * unit.prompt + unit.predicting for unit in units),
            patches=patch_count,
        )
    return PassSize(
        rows=rows,
        row_length=row_length,
        scored_tokens=rows * longest_answer,
        patches=patch_count,
        has_padding_mask=masked,
    )


def full_unit(units: Sequence[UnitSize], longest_answer: int) -> UnitSize:
    """Return the unit for which memory is planned.

    It has the longest prompt of these units, and answers of `longest_answer` tokens. The dry run
    takes the longest prompt of the data, which is no shorter.
    """
    rows = max(unit.rows for unit in units)
    return UnitSize(
        rows=rows,
        prompt=max(unit.prompt for unit in units),
        longest=longest_answer,
        answers=rows * longest_answer,
        patches=max(unit.patches for unit in units),
    )


class MicroBatchRoom:
    """The memory of a micro-batch, and what fits into it."""

    def __init__(
        self,
        activation_memory: Callable[[], ActivationMemory],
        longest_answer: int,
        shares_prompts: Callable[[], bool],
        *,
        masked: bool,
    ) -> None:
        """Build the object.

        Args:
            activation_memory: returns what predicts the memory of a pass.
            longest_answer: tokens of the longest answer that can be, `max_completion_length`.
            shares_prompts: returns whether passes share prompts where that is less work.
            masked: whether attention takes a padding mask where rows have padding.
        """
        self._make_activation_memory = activation_memory
        self._longest_answer = longest_answer
        self._shares_prompts = shares_prompts
        self._masked = masked

    @cached_property
    def _activation_memory(self) -> ActivationMemory:
        return self._make_activation_memory()

    def cut(
        self, sizes_by_rank: Sequence[Sequence[UnitSize]], positions: Sequence[int], max_units: int
    ) -> list[range]:
        """Return which of these places share a micro-batch, on all ranks alike.

        A micro-batch has `max_units` units, for which memory is planned, and more as long as those
        of every rank fit. The last one may have fewer.

        Args:
            sizes_by_rank: for each rank the sizes of its units, in the order in which they are learned from;
                equally many on each.
            positions: neighbours in this order.
            max_units: full units for which memory is planned.
        """
        all_units = [unit for units in sizes_by_rank for unit in units]
        planned_bytes = self._needed([full_unit(all_units, self._longest_answer)] * max_units)
        micro_batches: list[range] = []
        first_position = positions[0]
        for position in positions:
            micro_batch = range(first_position, position + 1)
            if len(micro_batch) > max_units and not self._fits(
                sizes_by_rank, micro_batch, planned_bytes
            ):
                micro_batches.append(range(first_position, position))
                first_position = position
        micro_batches.append(range(first_position, positions[-1] + 1))
        return micro_batches

    def _fits(
        self,
        sizes_by_rank: Sequence[Sequence[UnitSize]],
        positions: range,
        planned_bytes: list[int],
    ) -> bool:
        """Return whether the units at these places fit on every rank."""
        for units in sizes_by_rank:
            needed_bytes = self._needed(units[positions.start : positions.stop])
            pairs = zip(needed_bytes, planned_bytes, strict=True)
            if any(needed > planned for needed, planned in pairs):
                return False
        return True

    def _needed(self, units: Sequence[UnitSize]) -> list[int]:
        """Return the bytes of a pass over these units, with all layers recomputed and with none.

        With any number between them it takes no more where both are no more.
        """
        pass_size = size_of_pass(units, shares_prompts=self._shares_prompts(), masked=self._masked)
        layers = self._activation_memory.shape.text.layers
        recomputed_layers = [layers, 0] if self._activation_memory.checkpointing else [0]
        return [
            self._activation_memory.peak_bytes(pass_size, recomputed)
            for recomputed in recomputed_layers
        ]
