"""Says how many groups fit into a micro-batch together, by the memory that they need.

Memory is planned for `per_device_train_batch_size` completions of `max_completion_length` tokens.
Most completions are far shorter. So a micro-batch takes more subgroups (groups of rollouts, or
equal parts of them), as long as they fit into the planned memory by the formulas of the dry run.
That saves launches and, with ZeRO-3, gathers of the weights. All ranks split their subgroups at the
same positions, so that they go through equally many micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from adora_vl.models.activations import PassSize
from adora_vl.models.peak_memory import ActivationMemory
from adora_vl.packing.shared_prompt import MAX_PACKED_TOKEN_SHARE
from adora_vl.types import RowsOnCpu


@dataclass(frozen=True)
class SubgroupSize:
    """The size of a subgroup, from which the memory and the weight of its micro-batch are computed.

    A subgroup is a group of rollouts with one prompt, or an equal part of a group. A row is a
    rollout. For example, a prompt of 10 tokens with completions of 5 and 3 tokens has `rows` 2,
    `prompt_tokens` 10, `longest_completion` 5 and `completion_tokens` 8. Its `predicting_tokens`
    are 4 + 2 = 6.
    """

    rows: int
    prompt_tokens: int
    """Tokens of the one prompt that all rows have."""
    longest_completion: int
    """Tokens of the longest completion."""
    completion_tokens: int
    """Tokens of all completions together."""
    image_patches: int = 0
    """Patches of its images that pass the vision tower."""
    loss_tokens: int = 0
    """Completion tokens that the loss counts: those that the policy has sampled."""

    @property
    def predicting_tokens(self) -> int:
        """Completion tokens that predict a next token: all but the last one of each completion."""
        return max(self.completion_tokens - self.rows, 0)

    def tokens(self, *, shares_prompt: bool) -> int:
        """Return how many tokens of prompts and completions the policy's pass computes.

        The last token of a completion is counted too, although a packed pass leaves it out.
        For example, a prompt of 10 tokens with completions of 3 and 5 tokens has 18 if the prompt
        is computed once for all rows, and 28 if it is computed for each row.
        """
        prompts = 1 if shares_prompt else self.rows
        return prompts * self.prompt_tokens + self.completion_tokens


class PassBytes(NamedTuple):
    """The peak memory of a pass in bytes, for the two extremes of gradient checkpointing."""

    all_recomputed: int  # the backward pass computes all layers again
    none_recomputed: int  # the backward pass computes no layer again: most activations are kept

    def fit_into(self, planned: "PassBytes") -> bool:
        """Return whether a pass needs no more memory than is planned.

        It is not known yet how many layers gradient checkpointing recomputes. Memory is linear in
        this number, so it is enough to compare both extremes: all layers recomputed, and none.

        `planned`: the peak memory that is planned for a pass.
        """
        return (
            self.all_recomputed <= planned.all_recomputed
            and self.none_recomputed <= planned.none_recomputed
        )


def subgroup_sizes(
    rows_on_cpu: RowsOnCpu, rows_per_subgroup: int, *, shares_vision: bool
) -> list[SubgroupSize]:
    """Return the sizes of all subgroups of a batch.

    Args:
        rows_on_cpu: the copy of the batch on the CPU.
        rows_per_subgroup: rows of a subgroup, which are neighbours and have the same prompt.
        shares_vision: whether an image passes the vision tower once for all rows of a subgroup, and
            not once for each row.
    """
    prompt_lengths = rows_on_cpu.prompt_mask.sum(dim=1).tolist()
    sizes = []
    for first_row in range(0, len(prompt_lengths), rows_per_subgroup):
        rows = range(first_row, first_row + rows_per_subgroup)
        completion_lengths = [rows_on_cpu.completion_lengths[row] for row in rows]
        patches_by_row = [_patch_count(rows_on_cpu, row) for row in rows]
        sizes.append(
            SubgroupSize(
                rows=rows_per_subgroup,
                prompt_tokens=prompt_lengths[first_row],
                longest_completion=max(completion_lengths),
                completion_tokens=sum(completion_lengths),
                image_patches=max(patches_by_row) if shares_vision else sum(patches_by_row),
                loss_tokens=sum(rows_on_cpu.loss_tokens(row) for row in rows),
            )
        )
    return sizes


def _patch_count(rows_on_cpu: RowsOnCpu, row: int) -> int:
    """Return the number of patches of a row's images."""
    row_images = rows_on_cpu.images[row]
    return 0 if row_images is None else len(row_images.pixels)


def size_of_pass(
    subgroups: Sequence[SubgroupSize], *, shares_prompts: bool, masks_padding: bool
) -> PassSize:
    """Return the size of the policy's pass over these subgroups, which are groups or parts of them.

    A packed pass has all subgroups in one row without padding, and the prompt of each subgroup
    once. It is chosen where it has fewer tokens. Otherwise all rows are padded to the longest
    prompt and the longest completion. For example, a subgroup with a prompt of 10 tokens and
    completions of 5 and 3 (the last token of a completion predicts nothing, and a packed pass
    leaves it out):

        packed:  1 row of 10 + 4 + 2 = 16 tokens
        padded:  2 rows of 10 + 5 = 15 tokens

    Args:
        subgroups: the sizes of the subgroups.
        shares_prompts: whether a packed pass is possible.
        masks_padding: whether attention takes a padding mask in a padded pass.
    """
    rows = sum(subgroup.rows for subgroup in subgroups)
    longest_completion = max(subgroup.longest_completion for subgroup in subgroups)
    padded_length = max(subgroup.prompt_tokens for subgroup in subgroups) + longest_completion
    image_patches = sum(subgroup.image_patches for subgroup in subgroups)
    packed_length = sum(
        subgroup.prompt_tokens + subgroup.predicting_tokens for subgroup in subgroups
    )
    tokens_of_padded_pass = rows * padded_length
    if shares_prompts and packed_length <= MAX_PACKED_TOKEN_SHARE * tokens_of_padded_pass:
        # The pass computes a prompt once. But attention copies the prompt's keys for each rollout:
        # a rollout attends to the prompt's keys and its own.
        repeated_keys = sum(
            subgroup.rows * subgroup.prompt_tokens + subgroup.predicting_tokens
            for subgroup in subgroups
        )
        return PassSize(
            rows=1,
            row_length=packed_length,
            scored_tokens=sum(subgroup.completion_tokens for subgroup in subgroups),
            repeated_keys=repeated_keys,
            image_patches=image_patches,
        )
    return PassSize(
        rows=rows,
        row_length=padded_length,
        scored_tokens=rows * longest_completion,
        image_patches=image_patches,
        has_padding_mask=masks_padding,
    )


def full_subgroup(subgroups: Sequence[SubgroupSize], longest_completion: int) -> SubgroupSize:
    """Return the size of the largest subgroup that could be made of these subgroups' prompts.

    A subgroup is a group of rollouts, or an equal part of one. The result has the longest prompt
    and the most patches of these subgroups, and each of its rows has a completion of
    `longest_completion` tokens. For example, subgroups with prompts of 10 and 14 tokens and two
    rows, and a longest completion of 100, give a prompt of 14 and 200 completion tokens. Memory is
    planned for such subgroups. The dry run plans for the longest prompt of all data, so it plans
    for at least as much.
    """
    rows = max(subgroup.rows for subgroup in subgroups)
    return SubgroupSize(
        rows=rows,
        prompt_tokens=max(subgroup.prompt_tokens for subgroup in subgroups),
        longest_completion=longest_completion,
        completion_tokens=rows * longest_completion,
        image_patches=max(subgroup.image_patches for subgroup in subgroups),
    )


@dataclass(frozen=True)
class MicroBatchMemory:
    """The memory that is planned for a micro-batch, and how many subgroups fit into it.

    A subgroup is a group of rollouts, or an equal part of one.
    """

    make_activation_memory: Callable[[], ActivationMemory]
    """Returns the object that predicts the memory of a pass. It is called once."""
    longest_completion: int
    """Tokens of the longest completion that can be sampled."""
    shares_prompts: Callable[[], bool]
    """Returns whether passes compute a prompt once per group where that is less work. It may change
    when packed passes are checked, in the first step."""
    masks_padding: bool
    """Whether attention takes a padding mask where rows have padding."""

    @cached_property
    def _activation_memory(self) -> ActivationMemory:
        return self.make_activation_memory()

    def split(
        self,
        sizes_by_rank: Sequence[Sequence[SubgroupSize]],
        positions: Sequence[int],
        max_subgroups: int,
    ) -> list[range]:
        """Split consecutive subgroups into micro-batches, at the same positions on all ranks.

        Memory is planned for `max_subgroups` subgroups of the greatest possible length. So any
        `max_subgroups` subgroups fit, and shorter ones leave memory for more: a micro-batch is
        filled up as long as its subgroups fit into the planned memory on every rank. The last one
        may have fewer. For example, the positions 0 to 4 with `max_subgroups` 1 become [0, 1] and
        [2, 3, 4], if three subgroups fit on every rank from position 2 on, but only two from
        position 0 on.

        Args:
            sizes_by_rank: for each rank the sizes of its subgroups in the training order,
                equally many on each.
            positions: the consecutive positions in this order that are split.
            max_subgroups: how many subgroups of the greatest possible length memory is planned for.

        Returns:
            The positions of the subgroups of each micro-batch.
        """
        all_sizes = [size for sizes in sizes_by_rank for size in sizes]
        longest_subgroup = full_subgroup(all_sizes, self.longest_completion)
        planned = self._pass_bytes([longest_subgroup] * max_subgroups)
        micro_batches: list[range] = []
        first = positions[0]  # the first position of the micro-batch that is being filled
        for position in positions:
            # Up to `max_subgroups` subgroups always fit, since as many of the longest ones are
            # planned for.
            if position + 1 - first <= max_subgroups:
                continue
            fits_on_ranks = (
                self._pass_bytes(sizes[first : position + 1]).fit_into(planned)
                for sizes in sizes_by_rank
            )
            if not all(fits_on_ranks):
                # The subgroup at this position begins the next micro-batch.
                micro_batches.append(range(first, position))
                first = position
        micro_batches.append(range(first, positions[-1] + 1))
        return micro_batches

    def _pass_bytes(self, subgroups: Sequence[SubgroupSize]) -> PassBytes:
        """Return the peak memory of a pass over these subgroups, with all or no layers recomputed.

        Without gradient checkpointing no layer is ever recomputed, and both numbers are the same.
        """
        memory = self._activation_memory
        pass_size = size_of_pass(
            subgroups, shares_prompts=self.shares_prompts(), masks_padding=self.masks_padding
        )
        most_recomputed_layers = memory.shape.text.layers if memory.checkpointing else 0
        return PassBytes(
            all_recomputed=memory.peak_bytes(pass_size, recomputed_count=most_recomputed_layers),
            none_recomputed=memory.peak_bytes(pass_size, recomputed_count=0),
        )
