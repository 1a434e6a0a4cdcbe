"""A generation becomes micro-batches: which rows each has, and which rows move to other ranks.

A subgroup is what is put into a micro-batch as a whole: a group of rollouts, or a part of one where
a micro-batch is smaller than a group.
"""

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.config.batch_plan import BatchLayout, subgroup_size
from adora_vl.packing.image_store import ImageBanks, ProcessedImage
from adora_vl.training import batch_rows
from adora_vl.training.micro_batch_memory import MicroBatchMemory
from adora_vl.training.micro_batches import (
    MicroBatcher,
    choose_subgroups,
    plan_micro_batches,
    split_by_count,
    split_evenly,
    training_order,
)
from adora_vl.training.rank_balance import SubgroupMove, carry_out_moves, plan_moves
from adora_vl.training.schedule import fill_slots
from adora_vl.types import Batch
from benchmarks.lockstep import (
    DRAWN_CASES,
    lockstep_ratio,
    move_groups,
    order_by_length,
    shuffle_each_rank,
    simulate,
)
from tests.support.micro_batch_memory import micro_batch_memory_of_3b
from tests.support.step_context import FIRST_GENERATION, step_context

CPU = torch.device("cpu")
GROUP_LETTERS = "abcdefgh"  # of the images of eight groups


def test_how_many_micro_batches_are_merged_and_whether_the_policy_is_still_the_one_that_sampled():
    """Rows may move between the micro-batches that one generation has in one optimizer step.

    With four micro-batches a generation and six a step, for example, steps and generations do not
    divide each other, so no rows may move. The second generation is then learned from in two steps,
    so the policy of the second step is no longer the one that sampled.
    """
    # (steps_per_generation, num_iterations, gradient_accumulation_steps): (micro-batches among
    # which rows may move, whether a generation has one optimizer step)
    cases = {
        (4, 1, 4): (4, True),
        (8, 1, 4): (4, False),
        (1, 1, 1): (1, True),
        (2, 1, 4): (2, True),
        (1, 1, 8): (1, True),
        (4, 1, 6): (1, False),
        (2, 2, 4): (2, True),
        (4, 2, 4): (4, False),
    }
    for keys, (merged, has_one_step) in cases.items():
        steps, iterations, accumulated = keys
        layout = BatchLayout(
            micro_batch_rows=4,
            num_generations=4,
            steps_per_generation=steps,
            num_iterations=iterations,
            gradient_accumulation_steps=accumulated,
            processes=1,
        )
        assert layout.micro_batches_per_update == merged, keys
        assert layout.generation_has_one_step == has_one_step, keys


def processed_image(key: str) -> ProcessedImage:
    """Return an image of four patches. All their bytes are the code of the letter `key`."""
    patches = torch.full((4, 3), ord(key), dtype=torch.uint8)
    grid = torch.tensor([1, 2, 2])
    return ProcessedImage(key, patches, grid)


def rank_batch(banks: ImageBanks, images: str, completion: int, first: int) -> Batch:
    """Return a batch with a rollout for each image. All values of a rollout are its number.

    With images "ab", completions of 3 tokens and `first` 10, for example, the prompts are [10, 10]
    and [11, 11], the completions [10, 10, 10] and [11, 11, 11], and the advantages 10 and 11.

    Args:
        banks: a bank of theirs gets the images, and the batch has its patch numbers.
        images: a letter for each image.
        completion: tokens of each completion.
        first: the number of the first rollout.
    """
    rows = len(images)
    bank = banks.new("train")
    numbers = torch.arange(first, first + rows)
    numbers_BC = numbers[:, None].expand(rows, completion)
    return {
        "prompt_ids": torch.stack([numbers, numbers], dim=1),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": numbers_BC.clone(),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "sampling_per_token_logps": -numbers_BC.float(),
        "advantages": numbers.float(),
        "rollout_number": numbers,
        "pixel_values": torch.cat(
            [bank.patch_numbers(processed_image(key), CPU) for key in images]
        ),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * rows),
        "num_images": [1] * rows,
        "num_items_in_batch": torch.tensor(100.0),
    }


# (rows of a micro-batch, rollouts of a group, rows of a subgroup)
UNIT_SIZES = [
    (128, 8, 8),
    (8, 8, 8),
    (4, 8, 4),
    (12, 8, 4),
    (6, 4, 2),
]


@pytest.mark.parametrize(("rows", "generations", "subgroup"), UNIT_SIZES)
def test_a_subgroup_is_what_fits_a_micro_batch_of_a_group(rows, generations, subgroup):
    """The rows of a subgroup are the greatest common divisor of those of micro-batch and group.

    A micro-batch then holds whole subgroups, and a group consists of whole subgroups.
    """
    assert subgroup_size(rows, generations) == subgroup


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 80))
def test_every_optimizer_step_ends_with_work_and_no_micro_batch_is_too_large(
    optimizer_steps, micro_batches, max_subgroups, extra_subgroups
):
    """All subgroups are planned in order, and the last micro-batch of each step has some.

    A subgroup is a group of rollouts, or a part of one. Where there are too few of them, the empty
    micro-batches come first in a step. `max_subgroups`: the most subgroups of a micro-batch.
    `extra_subgroups`: subgroups beyond one for each step.
    """
    micro_batch_count = optimizer_steps * micro_batches
    # At least one subgroup a step, and no more than fit.
    subgroup_count = min(optimizer_steps + extra_subgroups, micro_batch_count * max_subgroups)
    cut = partial(split_by_count, max_micro_batches=micro_batches, max_subgroups=max_subgroups)
    plan = plan_micro_batches(subgroup_count, optimizer_steps, micro_batches, cut)

    assert len(plan) == micro_batch_count
    planned_subgroups = [
        subgroup for subgroups_of_micro_batch in plan for subgroup in subgroups_of_micro_batch
    ]
    assert planned_subgroups == list(range(subgroup_count))
    last_of_each_step = plan[micro_batches - 1 :: micro_batches]
    assert all(last_of_each_step)
    assert max(map(len, plan)) <= max_subgroups


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_ranks_find_subgroups_of_the_same_place_by_length_in_each_micro_batch(
    steps, subgroups_per_step, rng
):
    """Ranks learn from their longest subgroups at the same time, then from the second longest.

    All ranks draw the order with the same seed. It is not the number of a subgroup that decides
    when it comes, but its position when the rank's subgroups are ordered by length: 0 is the
    longest.
    """
    count = steps * subgroups_per_step
    length_positions_by_rank = []
    for _ in range(3):  # ranks, whose subgroups have other lengths
        tokens = rng.sample(range(1000), count)
        longest_first = sorted(range(count), key=lambda subgroup: -tokens[subgroup])
        subgroups = training_order(range(count), tokens, optimizer_steps=steps, seed="seed/12")
        assert sorted(subgroups) == list(range(count))
        length_positions_by_rank.append([longest_first.index(subgroup) for subgroup in subgroups])
    first_rank, *other_ranks = length_positions_by_rank
    assert all(length_positions == first_rank for length_positions in other_ranks)
    for positions_of_step in split_evenly(first_rank, steps):
        assert positions_of_step == sorted(positions_of_step), "the longest of a step first"


def test_the_steps_on_a_generation_see_subgroups_of_all_lengths():
    """Each of four steps on a generation learns from two of eight subgroups, drawn by the seed.

    Subgroup 0 has 0 tokens, and subgroup 7 has 7. If the first step got the longest subgroups, it
    would always begin with subgroup 7.
    """
    tokens_by_subgroup = range(8)
    orders = set()
    for step in range(20):
        order = training_order(range(8), tokens_by_subgroup, optimizer_steps=4, seed=f"0/{step}")
        orders.add(tuple(order))
    assert len(orders) > 10
    first_subgroups = {order[0] for order in orders}
    assert first_subgroups > {6, 7}, "the first step begins with other subgroups too"


def batch_of_three_rollouts() -> Any:
    """Return a batch of three rollouts, whose prompts are padded on the left.

    Their images have two, four and two patches, which are numbered from 0 to 7.
    """
    prompt = torch.tensor([[0, 0, 7, 8], [0, 5, 6, 7], [0, 0, 0, 9]])
    completion = torch.tensor([[1, 2, 0, 0], [1, 0, 0, 0], [1, 2, 3, 4]])
    return {
        "prompt_ids": prompt,
        "prompt_mask": (prompt > 0).long(),
        "completion_ids": completion,
        "completion_mask": (completion > 0).long(),
        "mm_token_type_ids": torch.arange(24).view(3, 8),
        "sampling_per_token_logps": -completion.float(),
        "advantages": torch.tensor([1.0, -1, 0]),
        "pixel_values": torch.arange(8)[:, None],
        "num_images": [1, 1, 1],
        "num_items_in_batch": torch.tensor(7),
    }


def without_padding_columns(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch without the token columns that are padding in every row."""
    completion_lengths = batch["completion_mask"].sum(dim=1).tolist()
    used_columns = batch_rows.used_columns(batch["prompt_mask"], completion_lengths)
    return batch_rows.without_padding(batch, used_columns)


def test_rows_are_taken_with_all_that_belongs_to_them_and_padding_is_cut_on_both_sides():
    """Rows 1 and 0 are taken from a batch in this order, with every column, and padding is cut.

    Their longest prompt has three of four tokens, and their longest completion two of four.

    `mm_token_type_ids` has a column for each of the four prompt and four completion tokens. So its
    first column and its last two are cut.
    """
    rows: Any = batch_rows.RowReader(batch_of_three_rollouts()).take([1, 0])
    cut = without_padding_columns(
        {**rows, "pixel_values": batch_of_three_rollouts()["pixel_values"]}
    )
    assert cut["prompt_ids"].tolist() == [[5, 6, 7], [0, 7, 8]]
    assert cut["completion_ids"].tolist() == [[1, 0], [1, 2]]
    assert cut["mm_token_type_ids"].tolist() == [[9, 10, 11, 12, 13], [1, 2, 3, 4, 5]]
    assert cut["sampling_per_token_logps"].shape == (2, 2)
    assert cut["advantages"].tolist() == [-1, 1]
    assert cut["num_images"] == [1, 1]
    assert cut["num_items_in_batch"] == 7
    assert len(cut["pixel_values"]) == 8
    uncut = without_padding_columns(batch_of_three_rollouts())
    assert uncut["completion_ids"].shape == (3, 4), "the longest completion has no padding"


def test_a_batch_of_empty_completions_keeps_two_columns():
    """Where all completions are empty, two of their columns of padding are kept.

    TRL would take a single column for values of whole answers, and count answers without a token.
    """
    batch = batch_of_three_rollouts()
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    assert without_padding_columns(batch)["completion_ids"].shape == (3, 2)


# (for each group of the batch whether it has signal, the same for each further group, slots, the
# number of the group in each slot). Further groups are numbered after those of the batch: with
# three in the batch, for example, the second further group is number 4.
SLOT_CASES = [
    ([True, False, False], [False, True, False], 3, [0, 4, 2]),
    ([True, False], [False, True, True, False], 4, [0, 1, 3, 4]),  # free slots come first
    ([False], [True, True], 2, [2, 1]),
    ([True], [False], 2, [0, 1]),
]


@pytest.mark.parametrize(("has_signal", "refill_has_signal", "slots", "groups"), SLOT_CASES)
def test_groups_without_signal_give_their_slots_to_further_ones_with_it(
    has_signal, refill_has_signal, slots, groups
):
    """A further group with signal takes the slot of one without; free slots are filled first.

    A generation has `slots` places for groups.
    """
    assert fill_slots(has_signal, refill_has_signal, slots) == groups


def test_rows_of_two_batches_are_padded_to_the_wider():
    """A batch and a further one become one batch, of which the rows 0, 1 and 4 are taken.

    Rows 0 and 1 are the first batch's, which has three. So 4 is the second one of the further
    batch. Its completion has one token, and is padded to the four of the first batch.
    """
    batch = batch_of_three_rollouts()
    further = batch_of_three_rollouts()
    grids = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 2]])
    batch["image_grid_thw"] = grids
    batch["pixel_values"] = torch.arange(8)[:, None]
    further["image_grid_thw"] = grids
    further["pixel_values"] = torch.arange(100, 108)[:, None]
    further["completion_ids"] = torch.tensor([[3], [4], [5]])
    further["completion_mask"] = torch.ones(3, 1, dtype=torch.long)
    further["sampling_per_token_logps"] = torch.tensor([[-3.0], [-4], [-5]])
    further["mm_token_type_ids"] = torch.arange(15).view(3, 5)
    joined = batch_rows.concat_rows(batch, further, pad_id=77)
    chosen = batch_rows.RowReader(joined).take([0, 1, 4])

    assert chosen["prompt_ids"].tolist() == [[0, 0, 7, 8], [0, 5, 6, 7], [0, 5, 6, 7]]
    assert chosen["completion_ids"].tolist()[2] == [4, 77, 77, 77]
    assert chosen["completion_mask"].tolist()[2] == [1, 0, 0, 0]
    assert chosen["sampling_per_token_logps"].tolist()[2] == [-4, 0, 0, 0]
    assert chosen["mm_token_type_ids"].tolist()[2] == [5, 6, 7, 8, 9, 0, 0, 0]
    assert chosen["pixel_values"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 102, 103, 104, 105]
    assert chosen["image_grid_thw"].tolist() == [[1, 1, 2], [1, 2, 2], [1, 2, 2]]
    assert chosen["advantages"].tolist() == [1, -1, -1]


# (ratios of the first batch, of the second one, of both together): one for each token, then one for
# each rollout
JOINED_RATIO_CASES = [
    ([[2.0, 3]], [[4.0]], [[2, 3], [4, 1]]),
    ([[2.0]], [[4.0]], [[2], [4]]),
]


@pytest.mark.parametrize(("first_ratio", "second_ratio", "expected"), JOINED_RATIO_CASES)
def test_a_ratio_is_padded_with_what_changes_nothing(first_ratio, second_ratio, expected):
    """Where two batches are joined, the importance ratio of the shorter one is padded with 1.

    TRL's VESPO takes the logarithm without a mask, and that of 1 is 0. The ratio of a whole rollout
    has one column, which needs no padding.
    """

    def first_row(ratio, length):
        """Return the first rollout with `length` tokens and this ratio."""
        columns = batch_of_three_rollouts()
        return {
            "prompt_ids": columns["prompt_ids"][:1],
            "prompt_mask": columns["prompt_mask"][:1],
            "completion_ids": columns["completion_ids"][:1, :length],
            "completion_mask": columns["completion_mask"][:1, :length],
            "importance_sampling_ratio": torch.tensor(ratio),
        }

    joined = batch_rows.concat_rows(
        first_row(first_ratio, length=2), first_row(second_ratio, length=1), pad_id=77
    )
    assert joined["importance_sampling_ratio"].tolist() == expected


def micro_batcher(
    *,
    banks: ImageBanks,
    log: dict[str, float] | None = None,
    every_row_counts: bool = False,
    room: MicroBatchMemory | None = None,
    **keys: Any,
):
    """Return the batcher of a run of one process with groups of two rollouts.

    A micro-batch has four rollouts, and an optimizer step four micro-batches.

    Args:
        banks: have the images of the batches.
        log: gets the logged metrics.
        every_row_counts: whether the loss has a term for which groups without signal count too.
        room: if there is one, a micro-batch has as many rollouts as fit into memory.
        keys: the keys of the config that differ.
    """
    sizes = {
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
    }
    context = step_context(log, **{**sizes, **keys})
    return MicroBatcher(context, banks, every_row_counts=every_row_counts, micro_batch_memory=room)


def batch_of_eight_groups(banks: ImageBanks, letters_with_signal: str) -> Batch:
    """Return eight groups of two rollouts, of which those in `letters_with_signal` have signal.

    Group "a" has the rollouts 0 and 1 and the image "a", and so on. Rollout n has n + 1 tokens. In
    a group with signal its advantage is n + 1 too, with a minus sign for the second rollout.
    """
    images = "".join(2 * letter for letter in GROUP_LETTERS)
    rows = rank_batch(banks, images, completion=16, first=0)
    numbers = torch.arange(16)
    rows["completion_mask"] = (numbers <= numbers[:, None]).long()
    signs_PG = torch.zeros(8, 2)
    for group, letter in enumerate(GROUP_LETTERS):
        if letter in letters_with_signal:
            signs_PG[group] = torch.tensor([1.0, -1.0])
    rows["advantages"] = signs_PG.flatten() * (numbers + 1)
    return rows


def rollout_numbers(micro_batches: list[Batch]) -> list[list[int]]:
    """Return the numbers of each micro-batch's rollouts; an empty list for one without work."""
    return [
        micro_batch["rollout_number"].tolist() if micro_batch else []
        for micro_batch in micro_batches
    ]


def test_only_groups_with_signal_are_in_micro_batches_the_longest_first_with_all_that_is_theirs():
    """Groups with signal fill the last micro-batches, the longest first; no other group has a row.

    Four of eight groups have advantages other than 0: b, d, e and g, whose rollouts get longer in
    this order. They fill two of four micro-batches. Each row has its own advantage, tokens and
    image.
    """
    banks = ImageBanks()
    log = dict[str, float]()
    generation = batch_of_eight_groups(banks, letters_with_signal="bdeg")
    micro_batches = micro_batcher(banks=banks, log=log).split(generation, FIRST_GENERATION)

    # The groups g and e, then d and b.
    assert rollout_numbers(micro_batches) == [[], [], [12, 13, 8, 9], [6, 7, 2, 3]]
    assert log == {"adora/skipped_groups": 0.5, "adora/micro_batches": 2.0}
    for micro_batch in micro_batches[2:]:
        numbers = micro_batch["rollout_number"]
        signs = 1 - 2 * (numbers % 2)  # minus for the second rollout of a group
        assert micro_batch["advantages"].tolist() == (signs * (numbers + 1)).tolist()
        assert micro_batch["completion_mask"].sum(dim=1).tolist() == (numbers + 1).tolist()
        width = micro_batch["completion_ids"].size(1)
        assert width == int(numbers.max()) + 1, "padding of the whole generation is cut"
        assert torch.equal(micro_batch["completion_ids"][:, 0], numbers)
        assert torch.equal(micro_batch["prompt_ids"][:, 0], numbers)
        starts = micro_batch["pixel_values"].view(4, -1)[:, 0].tolist()
        letters = [image_letter(banks, start) for start in starts]
        assert letters == [GROUP_LETTERS[number // 2] for number in numbers.tolist()]


def image_letter(banks: ImageBanks, start: int) -> str:
    """Return the letter of the image whose first patch has this number."""
    patches = banks.of(start).pixels([start])[0]
    return chr(int(patches[0, 0]))


def test_a_rank_makes_as_many_micro_batches_with_work_as_the_one_with_the_most_signal(monkeypatch):
    """A rank with fewer groups with signal than another also learns from some without signal.

    With fewer micro-batches it would leave the other rank waiting in a pass that gathers weights.
    Here one group has signal (h, the rollouts 14 and 15), and five have on the other rank. So the
    four shortest groups without signal (rollouts 0 to 7) are learned from too.
    """

    def gather_with_five(on_this_rank: list[object]) -> list[object]:
        """Stand in for both gathers: of numbers of groups with signal, and of subgroups' sizes.

        The other rank has five groups with signal, and subgroups of the same sizes as this one.
        """
        (value,) = on_this_rank
        return [value, value if isinstance(value, list) else 5]

    monkeypatch.setattr("adora_vl.training.micro_batches.gather_object", gather_with_five)
    two_ranks = SimpleNamespace(num_processes=2, device=CPU, process_index=0)
    banks = ImageBanks()
    ours = micro_batcher(banks=banks, accelerator=two_ranks, adora_stock_step=["spread_signal"])
    micro_batches = ours.split(batch_of_eight_groups(banks, "h"), FIRST_GENERATION)
    rows = rollout_numbers(micro_batches)
    learned = [row for rows_of_micro_batch in rows for row in rows_of_micro_batch]
    assert sorted(learned) == [*range(8), 14, 15]
    assert [len(rows_of_micro_batch) for rows_of_micro_batch in rows] == [0, 4, 4, 2]
    for micro_batch in filter(None, micro_batches):
        assert micro_batch["loss_tokens"] == 2 * micro_batch["completion_mask"].sum(), (
            "those of both ranks"
        )


@pytest.mark.parametrize(
    ("letters_with_signal", "rows", "sizes", "losses"),
    [("abc", 16, [4, 2], [3.0, 1.5]), ("abcdef", 12, [4, 4, 4], [4.0] * 3)],
)
def test_a_row_weighs_as_much_in_a_small_micro_batch_as_in_a_full_one(
    letters_with_signal, rows, sizes, losses
):
    """With fewer rows than the others, a micro-batch has a loss that counts proportionally less.

    TRL takes a mean over the rows of a micro-batch, so here a mean of 3 is multiplied by the share
    of its rows: `losses` are the products. A micro-batch of two rows in place of four, for example,
    counts half. Places that unfinished rollouts leave free do not count: with 12 rollouts of 16
    there are three micro-batches, and the step's loss is still divided by four, so each of them
    counts 4/3 as much.
    """
    banks = ImageBanks()
    loss = torch.tensor(3.0)
    generation = batch_rows.RowReader(batch_of_eight_groups(banks, letters_with_signal)).take(
        range(rows)
    )
    grpo = micro_batcher(banks=banks, loss_type="grpo")
    with_work = [
        micro_batch for micro_batch in grpo.split(generation, FIRST_GENERATION) if micro_batch
    ]

    assert [len(numbers) for numbers in rollout_numbers(with_work)] == sizes
    scaled = [float(loss * grpo.loss_weight(micro_batch)) for micro_batch in with_work]
    assert scaled == pytest.approx(losses)
    dapo = micro_batcher(banks=banks, loss_type="dapo")
    assert float(loss * dapo.loss_weight(with_work[-1])) == 3.0, "DAPO divides by tokens"


def test_which_groups_are_learned_from_and_in_which_micro_batches(subtests):
    """Only groups with signal are learned from, unless the loss has another term or a key asks so.

    Signal is an advantage other than 0. Where no group has it, each step learns from the shortest,
    which is the first one here.
    """
    # (letters of the groups with signal, keys, rows of each micro-batch, how many rollouts, counted
    # from the first one, are learned from)
    cases: list[tuple[str, dict[str, Any], list[int], int]] = [
        ("a", {"every_row_counts": True}, [4, 4, 4, 4], 16),
        ("a", {"adora_stock_step": ["skip_zero_signal"]}, [4, 4, 4, 4], 16),
        ("", {}, [0, 0, 0, 2], 2),
        ("abcd", {"gradient_accumulation_steps": 2}, [0, 4, 0, 4], 8),
    ]
    for letters_with_signal, keys, sizes, learned_rows in cases:
        with subtests.test(f"{letters_with_signal} {keys}"):
            banks = ImageBanks()
            micro_batches = micro_batcher(banks=banks, **keys).split(
                batch_of_eight_groups(banks, letters_with_signal), FIRST_GENERATION
            )
            rows = rollout_numbers(micro_batches)
            assert [len(rows_of_micro_batch) for rows_of_micro_batch in rows] == sizes
            learned = [row for rows_of_micro_batch in rows for row in rows_of_micro_batch]
            assert sorted(learned) == list(range(learned_rows))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_a_generation_s_rows_weigh_the_same_however_they_are_cut(loss_type):
    """A row's weight in the step's loss does not depend on which rows share its micro-batch.

    The 16 rows are cut into four micro-batches, or all are in one where memory allows it.
    """

    def weights_of_rows(room: MicroBatchMemory | None, expected_count: int) -> dict[int, float]:
        """Return the weight of each rollout in the step's loss, by its number."""
        banks = ImageBanks()
        cutting_batcher = micro_batcher(banks=banks, room=room, loss_type=loss_type)
        micro_batches = cutting_batcher.split(
            batch_of_eight_groups(banks, GROUP_LETTERS), FIRST_GENERATION
        )
        with_work = [micro_batch for micro_batch in micro_batches if micro_batch]
        assert len(with_work) == expected_count
        weights: dict[int, float] = {}
        for micro_batch in with_work:
            rows = len(micro_batch["advantages"])
            # DAPO divides by the tokens of the generation, the others by the rows of the
            # micro-batch.
            weight_in_mean = 1.0 if loss_type == "dapo" else 1 / rows
            for number in micro_batch["rollout_number"].tolist():
                weights[number] = weight_in_mean * float(cutting_batcher.loss_weight(micro_batch))
        return weights

    separate = weights_of_rows(None, expected_count=4)
    # Memory is planned for answers of 64 tokens; those here have 16 at most, so all fit into one.
    filled = weights_of_rows(micro_batch_memory_of_3b(longest=64), expected_count=1)
    assert filled.keys() == separate.keys()
    for number, weight in separate.items():
        assert filled[number] == pytest.approx(weight, rel=1e-12)


def test_empty_micro_batches_come_first_in_each_step():
    """The last micro-batch of a step triggers the reduction of gradients, so it has to have rows.

    Each of two steps has two micro-batches, and its eight rollouts fit into one of them.
    """
    banks = ImageBanks()
    log = dict[str, float]()
    two_a_step: dict[str, Any] = {"gradient_accumulation_steps": 2}
    filling_batcher = micro_batcher(
        banks=banks, room=micro_batch_memory_of_3b(longest=64), log=log, **two_a_step
    )
    micro_batches = filling_batcher.split(
        batch_of_eight_groups(banks, GROUP_LETTERS), FIRST_GENERATION
    )
    assert [len(rows) for rows in rollout_numbers(micro_batches)] == [0, 8, 0, 8]
    assert log["adora/micro_batches"] == 1


def test_the_key_cuts_by_the_number_of_rows():
    """With `adora_stock_step: [fill_micro_batches]` memory does not decide how many rows fit."""
    banks = ImageBanks()
    stock = micro_batcher(
        banks=banks,
        room=micro_batch_memory_of_3b(longest=64),
        adora_stock_step=["fill_micro_batches"],
    )
    micro_batches = stock.split(batch_of_eight_groups(banks, GROUP_LETTERS), FIRST_GENERATION)
    assert [len(rows) for rows in rollout_numbers(micro_batches)] == [4, 4, 4, 4]


def subgroups_of_equal_length(*counts: int) -> list[dict[int, int]]:
    """Return the tokens of each subgroup by its number, for each rank.

    `counts`: how many subgroups each rank has. For example, 0 and 2 give {} and {0: 10, 1: 10}.
    """
    return [dict.fromkeys(range(count), 10) for count in counts]


def sources_and_targets(moves: list[SubgroupMove]) -> list[tuple[int, int]]:
    """Return for each subgroup that moves the rank that gives it and the one that gets it."""
    return [(move.source, move.target) for move in moves]


def test_moves_by_hand():
    """Subgroups move from ranks with many to ranks with few, until no rank would end earlier by it.

    Rank 1 with four subgroups gives two of them to rank 0 with none, for example. `min_subgroups`:
    so many subgroups a rank may have before any of them moves.
    """
    assert sources_and_targets(plan_moves(subgroups_of_equal_length(0, 4))) == [(1, 0), (1, 0)]
    assert plan_moves(subgroups_of_equal_length(1, 2, 2)) == [], "no rank takes longer for it"
    assert sorted(sources_and_targets(plan_moves(subgroups_of_equal_length(3, 0, 0)))) == [
        (0, 1),
        (0, 2),
    ]
    assert sources_and_targets(plan_moves(subgroups_of_equal_length(4, 3, 3, 0))) == [(0, 3)], (
        "no more than is needed"
    )
    assert len(plan_moves(subgroups_of_equal_length(0, 6), min_subgroups=4)) == 2
    assert plan_moves(subgroups_of_equal_length(0, 4), min_subgroups=4) == []
    assert plan_moves(subgroups_of_equal_length(0, 0)) == []


def test_a_long_subgroup_moves_to_where_it_meets_another_long_one():
    """Subgroups move such that the ranks learn from equally long ones at the same time.

    Otherwise a rank with a short one waits for a rank with a long one. No subgroup moves where
    those that come together are about equally long already.
    """
    # For each rank the tokens of its subgroups, by their numbers.
    long_ones_on_one_rank = [{0: 90, 1: 100}, {0: 10, 1: 11}]
    assert plan_moves(long_ones_on_one_rank) == [
        SubgroupMove(source=0, subgroup=0, target=1),
        SubgroupMove(source=1, subgroup=0, target=0),
    ]
    in_order_of_length_they_meet = [{0: 90, 1: 10}, {0: 100, 1: 11}]
    assert plan_moves(in_order_of_length_they_meet) == []
    about_as_long = [{3: 100, 5: 30}, {1: 90, 4: 25}]
    assert plan_moves(about_as_long) == []


def test_beside_the_longest_subgroup_goes_the_longest_that_is_left_on_any_rank():
    """Beside the longest subgroup the other rank learns from the second longest, whoever has it.

    Here rank 0 has subgroups of 100, 60 and 60 tokens, and gives one of 60 away. Then the ranks
    learn from 100 and 60 tokens in the first round, from 60 and 30 in the second, and from 30 and
    30 in the third. Without a move the rounds would take 100, 60 and 60 tokens.
    """
    one_rank_has_the_long_ones = [{0: 100, 1: 60, 2: 60}, {0: 30, 1: 30, 2: 30}]
    assert plan_moves(one_rank_has_the_long_ones) == [
        SubgroupMove(source=0, subgroup=1, target=1),
        SubgroupMove(source=1, subgroup=2, target=0),
    ]


@pytest.mark.parametrize("case", DRAWN_CASES)
def test_ranks_in_lockstep_hardly_wait_for_each_other(case):
    """Ranks that wait for each other at each group wait least where groups move between them.

    `simulate` gives the time of 8 ranks with 16 groups of 8 rollouts, relative to ranks that never
    wait. It is nearest to 1 where groups move between ranks, larger where each rank only orders its
    groups by length, and largest where it shuffles them. The bounds are what it gives, rounded.
    """
    assert simulate(case, move_groups, trials=20) <= 1.16
    assert simulate(case, order_by_length, trials=20) <= 1.36
    assert simulate(case, shuffle_each_rank, trials=20) >= 1.45
    # Two ranks learn from 4 and 3, then from 2 and 3: that takes 4 + 3, and each has 6 of its own.
    assert lockstep_ratio([[4, 2], [3, 3]]) == pytest.approx(7 / 6)


# For each rank the tokens of its subgroups.
TOKENS_OF_RANKS = st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=6)


@given(TOKENS_OF_RANKS, st.integers(1, 6))
def test_no_rank_learns_from_more_subgroups_than_it_must_and_none_is_lost(ranks, min_subgroups):
    """After the moves a rank has at most an even share of all subgroups, or `min_subgroups`."""
    tokens_by_rank = [dict(enumerate(tokens)) for tokens in ranks]
    counts_before = [len(subgroups) for subgroups in tokens_by_rank]
    # The subgroups of each rank after the moves, by the rank and the number that they had before.
    subgroups_after = [
        {(rank, number) for number in subgroups} for rank, subgroups in enumerate(tokens_by_rank)
    ]
    for move in plan_moves(tokens_by_rank, min_subgroups):
        assert move.source != move.target
        subgroup = (move.source, move.subgroup)
        subgroups_after[move.source].remove(subgroup)
        subgroups_after[move.target].add(subgroup)
    counts_after = [len(subgroups) for subgroups in subgroups_after]
    assert sum(counts_after) == sum(counts_before)
    even_share = math.ceil(sum(counts_before) / len(ranks))
    assert max(counts_after) <= max(min_subgroups, even_share)
    had_equally_many = len(set(counts_before)) == 1
    if had_equally_many and counts_before[0] >= min_subgroups:
        assert len(set(counts_after)) == 1


def receive_nothing(plan: object, packed_subgroups: object, rank: int) -> list[Any]:
    """Stand in for an exchange between ranks in which nothing arrives at this one."""
    return []


def test_a_rank_that_gets_nothing_looks_at_its_images_again_with_the_others():
    """If rollouts move between other ranks, this one runs its frozen vision tower again, too.

    The tower's passes gather weights, so all ranks make them together. `may_have_new_images` asks
    for the pass.
    """
    banks = ImageBanks()
    batch = rank_batch(banks, images="abab", completion=2, first=0)
    banks.of_training().may_have_new_images = False
    moves_between_others = [SubgroupMove(source=1, subgroup=0, target=2)]
    carry_out_moves(
        batch,
        [True, True],
        rows_per_subgroup=2,
        moves=moves_between_others,
        rank=0,
        image_banks=banks,
        pad_id=99,
        exchange=receive_nothing,
    )
    assert banks.of_training().may_have_new_images


# For each rank whether its six subgroups have signal.
SIGNAL_OF_RANKS = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=5)


@given(SIGNAL_OF_RANKS, st.sampled_from([1, 2, 3, 6]))
def test_every_subgroup_with_signal_is_learned_from_once_on_one_rank(ranks, min_subgroups):
    """Each rollout with signal is learned from once, on the rank to which it moves or on its own.

    The plan of moves, the exchange and the choice of subgroups are tested together. A subgroup is
    one rollout here. Rank 0 has the rollouts 100 to 105, rank 1 has 200 to 205, and so on.
    """
    tokens_by_rank = []
    for has_signal in ranks:
        with_signal = [number for number, signal in enumerate(has_signal) if signal]
        tokens_by_rank.append({number: 10 + number for number in with_signal})
    moves = plan_moves(tokens_by_rank, min_subgroups)
    banks = [ImageBanks() for _ in ranks]
    batches = []
    for rank, has_signal in enumerate(ranks):
        first = 100 * (rank + 1)
        batch = rank_batch(banks[rank], images="abcdef", completion=1, first=first)
        batch["advantages"] = batch["advantages"] * torch.tensor(has_signal)
        batches.append(batch)
    sent: list[tuple[int, Any]] = []  # the target and the packed subgroup of every move

    def record_sent(plan, packed_subgroups, rank):
        """Record what a rank sends; nothing arrives yet."""
        targets = [move.target for move in plan if move.source == rank]
        sent.extend(zip(targets, packed_subgroups, strict=True))
        return []

    def deliver(plan, packed_subgroups, rank):
        """Return what all ranks have sent to this one."""
        return [packed_subgroup for target, packed_subgroup in sent if target == rank]

    def rebalance_rank(rank, banks_of_rank, exchange):
        return carry_out_moves(
            batches[rank],
            ranks[rank],
            rows_per_subgroup=1,
            moves=moves,
            rank=rank,
            image_banks=banks_of_rank,
            pad_id=99,
            exchange=exchange,
        )

    # First all ranks send, since a rank may both give and get subgroups. They do so with copies of
    # their banks, which are then as before.
    for rank in range(len(ranks)):
        rebalance_rank(rank, copy.deepcopy(banks[rank]), record_sent)
    results = [rebalance_rank(rank, banks[rank], deliver) for rank in range(len(ranks))]
    subgroups_per_rank = max(min_subgroups, *(has_signal.count(True) for _, has_signal in results))
    # An advantage other than 0 is the number of its rollout, so it names the subgroup.
    learned_advantages = []
    for batch, has_signal in results:
        chosen = choose_subgroups(has_signal, subgroups_per_rank, [1] * len(has_signal))
        assert len(chosen) == subgroups_per_rank
        learned_advantages += [value for value in batch["advantages"][chosen].tolist() if value]
    all_advantages = torch.cat([batch["advantages"] for batch in batches]).tolist()
    assert sorted(learned_advantages) == sorted(value for value in all_advantages if value)


def test_all_columns_of_a_row_move_with_it_and_no_image_is_stored_twice():
    """A subgroup that moves takes along all columns of its rows, and images that the rank lacks.

    Rank 0 has rollouts 0 to 3 and no subgroup with signal; rank 1 has 10 to 13, two subgroups. The
    second one, the rollouts 12 and 13 with the images "a" and "d", goes to rank 0, which has "a"
    already. Its completions of three tokens make those of rank 0 wider by one.
    """
    banks = [ImageBanks(), ImageBanks()]
    batches = [
        rank_batch(banks[0], images="abab", completion=2, first=0),
        rank_batch(banks[1], images="ccad", completion=3, first=10),
    ]
    sent: list[Any] = []

    def send_to_rank_0(plan, packed_subgroups, rank):
        """Keep what is sent, and return it to rank 0."""
        sent.extend(copy.deepcopy(packed_subgroups))
        return sent if rank == 0 else []

    moves = plan_moves(subgroups_of_equal_length(0, 2))
    settings: dict[str, Any] = {
        "rows_per_subgroup": 2,
        "moves": moves,
        "pad_id": 99,
        "exchange": send_to_rank_0,
    }
    carry_out_moves(
        batches[1],
        [True, True],
        rank=1,
        image_banks=banks[1],
        **settings,
    )
    batch, has_signal = carry_out_moves(
        batches[0],
        [False, False],
        rank=0,
        image_banks=banks[0],
        **settings,
    )
    assert has_signal == [False, False, True]
    assert batch["prompt_ids"][:, 0].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["completion_ids"][0].tolist() == [0, 0, 99]
    assert batch["completion_ids"][4].tolist() == [12, 12, 12]
    assert batch["completion_mask"].sum(dim=1).tolist() == [2, 2, 2, 2, 3, 3]
    assert batch["advantages"].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["rollout_number"].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["num_images"] == [1] * 6
    assert len(batch["image_grid_thw"]) == 6
    assert batch["num_items_in_batch"] == 100
    bank = banks[0].of(0)
    assert len(bank) == 3, "a, b and the new d"
    first_patches = batch["pixel_values"][::4, 0].tolist()
    letters = [image_letter(banks[0], first_patch) for first_patch in first_patches]
    assert letters == ["a", "b", "a", "b", "a", "d"]
