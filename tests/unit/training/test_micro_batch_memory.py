"""Micro-batches are filled up to the memory that is planned for them, and all ranks cut alike.

Memory is planned for a micro-batch of groups with the longest prompt and answers of full length.
Real answers are shorter, so more groups fit. `MicroBatchMemory.split` says which groups go
together: it takes the sizes of each rank's groups, in order, and returns ranges of their positions.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.config.sharding import Sharding
from adora_vl.planning.memory import MemorySetup, PlannedMicroBatch, SharedComputation
from adora_vl.training.micro_batch_memory import (
    SubgroupSize,
    full_subgroup,
    size_of_pass,
    subgroup_sizes,
)
from adora_vl.types import RowImages, RowsOnCpu
from benchmarks.lockstep import MEASURED_CASES, simulate_filled
from tests.support.micro_batch_memory import (
    ACTIVATION_MEMORY_BY_CASE,
    LONGEST_ANSWER,
    SHAPE_OF_3B,
    micro_batch_memory_of_3b,
)

# The answers of a group of 8 rollouts, as on the speed page: 468 tokens on average.
ANSWER_LENGTHS = (1024, 760, 520, 430, 380, 300, 210, 117)


def subgroup_of_lengths(prompt: int, completions: Sequence[int], patches: int = 0) -> SubgroupSize:
    """Return the size of a group with these lengths of prompt and completions, in tokens."""
    return SubgroupSize(
        rows=len(completions),
        prompt_tokens=prompt,
        longest_completion=max(completions),
        completion_tokens=sum(completions),
        image_patches=patches,
        loss_tokens=sum(completions),
    )


UNIT_SIZES = st.builds(
    subgroup_of_lengths,
    prompt=st.integers(1, 2000),
    completions=st.lists(st.integers(0, LONGEST_ANSWER), min_size=4, max_size=4),
    patches=st.integers(0, 4000),
)


def sizes_on_ranks(count: int) -> st.SearchStrategy[list[list[SubgroupSize]]]:
    """Draw the sizes of `count` subgroups on each of one to three ranks."""
    subgroups_of_rank = st.lists(UNIT_SIZES, min_size=count, max_size=count)
    return st.lists(subgroups_of_rank, min_size=1, max_size=3)


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 12).flatmap(sizes_on_ranks),
    max_subgroups=st.integers(1, 2),
    activation_memory=st.sampled_from(sorted(ACTIVATION_MEMORY_BY_CASE)),
    shares_prompts=st.booleans(),
)
def test_a_filled_micro_batch_takes_no_more_memory_than_is_planned(
    ranks, max_subgroups, activation_memory, shares_prompts
):
    """A micro-batch with more than `max_subgroups` subgroups needs at most the planned memory.

    Memory is planned for `max_subgroups` subgroups with the longest prompt, and with answers as
    long as they may be. It suffices on every rank, whatever the lengths and however many layers are
    recomputed. A micro-batch has at least `max_subgroups`, but the last one may have fewer.
    """
    count = len(ranks[0])
    micro_batches = micro_batch_memory_of_3b(
        activation_memory, shares_prompts=shares_prompts
    ).split(ranks, range(count), max_subgroups)
    assert list(chain.from_iterable(micro_batches)) == list(range(count))
    assert all(len(positions) >= max_subgroups for positions in micro_batches[:-1])
    size_of = partial(size_of_pass, shares_prompts=shares_prompts, masks_padding=True)
    all_subgroups = [subgroup for subgroups in ranks for subgroup in subgroups]
    planned_size = size_of([full_subgroup(all_subgroups, LONGEST_ANSWER)] * max_subgroups)
    memory = ACTIVATION_MEMORY_BY_CASE[activation_memory]
    recomputed_counts = (0, 7, SHAPE_OF_3B.text.layers) if memory.checkpointing else (0,)
    filled = [positions for positions in micro_batches if len(positions) > max_subgroups]
    for positions, subgroups, recomputed in product(filled, ranks, recomputed_counts):
        size = size_of(subgroups[positions.start : positions.stop])
        planned_bytes = memory.peak_bytes(planned_size, recomputed)
        assert memory.peak_bytes(size, recomputed) <= planned_bytes


def test_groups_of_real_lengths_need_a_third_of_the_micro_batches():
    """Three groups of real lengths fit into a micro-batch that is planned for one.

    Memory is planned for one group whose answers are as long as they may be.
    """
    groups = [subgroup_of_lengths(prompt=1079, completions=ANSWER_LENGTHS)] * 12
    assert [len(part) for part in micro_batch_memory_of_3b().split([groups], range(12), 1)] == [
        3,
        3,
        3,
        3,
    ]
    full = [subgroup_of_lengths(prompt=1079, completions=[LONGEST_ANSWER] * 8)] * 12
    assert len(micro_batch_memory_of_3b().split([full], range(12), 1)) == 12, (
        "nothing is filled up at full length"
    )


def test_ranks_cut_at_the_same_positions():
    """A rank with short groups takes no more of them than the one whose groups are long."""
    short_groups = [subgroup_of_lengths(prompt=100, completions=[50] * 8)] * 6
    long_groups = [subgroup_of_lengths(prompt=1079, completions=ANSWER_LENGTHS)] * 6
    split = partial(micro_batch_memory_of_3b().split, positions=range(6), max_subgroups=1)
    assert split([short_groups, long_groups]) == split([long_groups])
    assert len(split([short_groups])) == 1


def test_ranks_in_lockstep_gather_weights_a_third_as_often_and_wait_little():
    """Groups of measured lengths fill fewer micro-batches, and ranks wait at most a tenth longer.

    Each micro-batch gathers the sharded weights once. The figures are relative: to the number of
    micro-batches without filling, and to the time of ranks that never wait.
    """
    # The bound on the share of micro-batches by `max_completion_length`, that of the 3B recipe and
    # that of the 7B recipe.
    bounds = {2048: 0.4, 4096: 0.2}
    for case in MEASURED_CASES:
        generation = simulate_filled(case, trials=5)
        assert generation.micro_batches <= bounds[case.longest]
        assert generation.lockstep_ratio <= 1.1


def test_rows_that_share_nothing_are_as_long_as_the_longest():
    """Without shared prompts each row is padded to the longest of its micro-batch.

    So a short group beside the long one takes as much memory as a long one. In packed rows it does
    not.
    """
    subgroups = [
        subgroup_of_lengths(prompt=1000, completions=[2000] * 8),
        *[subgroup_of_lengths(prompt=1000, completions=[100] * 8)] * 5,
    ]
    padded = micro_batch_memory_of_3b(shares_prompts=False).split(
        [subgroups], range(6), max_subgroups=1
    )
    # The long group alone, then the short ones two by two.
    assert [len(positions) for positions in padded] == [1, 2, 2, 1]
    packed = micro_batch_memory_of_3b().split([subgroups], range(6), max_subgroups=1)
    assert [len(positions) for positions in packed] == [1, 5]


def test_the_planned_pass_is_that_of_the_dry_run():
    """Filling plans with the longest prompt, most patches and full answers, as the dry run does.

    Both predict memory by the same numbers.
    """
    planned = MemorySetup(
        shape=SHAPE_OF_3B,
        sharding=Sharding(),
        batch=PlannedMicroBatch(
            sequences=8,
            prompt_tokens=1079,
            completion_tokens=LONGEST_ANSWER,
            image_tokens=256,
        ),
        sequences_per_generation=8,
        group_size=8,
        sharing=SharedComputation(images=True, vision=True, prompts=True),
    )
    longest_group = full_subgroup(
        [
            subgroup_of_lengths(prompt=1079, completions=ANSWER_LENGTHS, patches=1024),
            subgroup_of_lengths(prompt=80, completions=ANSWER_LENGTHS),
        ],
        LONGEST_ANSWER,
    )
    size = size_of_pass([longest_group], shares_prompts=True, masks_padding=True)
    assert size == planned.pass_size
    # A rollout's last token predicts nothing, so it is no key.
    assert size.repeated_keys == 8 * (1079 + LONGEST_ANSWER - 1)


def test_a_subgroup_counts_the_tokens_of_the_policy_s_pass() -> None:
    """A subgroup counts its prompt once where the pass shares it, else once for each rollout."""
    group = subgroup_of_lengths(prompt=3, completions=(1, 4))
    assert group.tokens(shares_prompt=True) == 3 + 5
    assert group.tokens(shares_prompt=False) == 6 + 5


def test_sizes_of_subgroups_by_hand():
    """The size of a subgroup is read from the masks, completion lengths and images of its rows.

    The first subgroup has a prompt of two tokens and an image, the second one of three and none.
    Where vision is not shared, the image of eight patches counts once for each of its two rows.
    """
    rows_on_cpu = RowsOnCpu(
        prompt_ids=torch.zeros(4, 3, dtype=torch.long),
        prompt_mask=torch.tensor([[0, 1, 1]] * 2 + [[1, 1, 1]] * 2),
        prompt_token_types=None,
        completion_lengths=[4, 1, 0, 2],
        images=[RowImages(pixels=torch.zeros(8, 1), grids=torch.ones(1, 3))] * 2 + [None] * 2,
    )
    assert subgroup_sizes(rows_on_cpu, rows_per_subgroup=2, shares_vision=True) == [
        subgroup_of_lengths(prompt=2, completions=[4, 1], patches=8),
        subgroup_of_lengths(prompt=3, completions=[0, 2]),
    ]
    assert subgroup_sizes(rows_on_cpu, 2, shares_vision=False)[0].image_patches == 16
