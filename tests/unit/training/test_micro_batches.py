"""A generation becomes micro-batches: which rows each has, what a row takes with it, and what moves
between ranks.
"""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.config.batch_plan import BatchLayout, unit_size
from adora_vl.packing.image_store import ImageBanks, ProcessedImage
from adora_vl.training import batch_rows
from adora_vl.training.micro_batch_room import MicroBatchRoom
from adora_vl.training.micro_batches import (
    MicroBatcher,
    Move,
    by_length,
    choose_units,
    cut_by_count,
    plan_micro_batches,
    plan_moves,
    rebalanced,
    split_evenly,
    tokens_of_units,
)
from adora_vl.training.schedule import admitted
from adora_vl.types import Batch
from benchmarks.lockstep import (
    CASES,
    lockstep_ratio,
    move_groups,
    order_by_length,
    shuffle_each_rank,
    simulate,
)
from tests.support.micro_batch_room import room
from tests.support.step_context import step_context

CPU = torch.device("cpu")


def test_how_many_micro_batches_are_merged_and_whether_the_policy_is_still_the_one_that_sampled():
    """By steps_per_generation, num_iterations and gradient_accumulation_steps.

    Where these do not divide each other, a generation's are spread over optimizer steps unevenly,
    and each stays as it is: six are one and a half of four, so the second generation is learned
    from in two steps and needs the old log-probabilities.
    """
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
    for (steps, iterations, accumulated), expected in cases.items():
        shape = BatchLayout(
            micro_batch_rows=4,
            num_generations=4,
            steps_per_generation=steps,
            num_iterations=iterations,
            gradient_accumulation_steps=accumulated,
        )
        assert (shape.micro_batches_per_update, shape.has_one_step) == expected, (
            steps,
            iterations,
            accumulated,
        )


def image(key: str) -> ProcessedImage:
    return ProcessedImage(
        key, torch.full((4, 3), ord(key), dtype=torch.uint8), torch.tensor([1, 2, 2])
    )


def rank_batch(banks: ImageBanks, images: str, completion: int, first: int) -> Batch:
    """A rollout an image, prompts of two tokens."""
    rows = len(images)
    bank = banks.new("train")
    numbers = torch.arange(first, first + rows)
    return {
        "prompt_ids": torch.stack([numbers, numbers], dim=1),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": numbers[:, None].expand(rows, completion).clone(),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "sampling_per_token_logps": -numbers[:, None].expand(rows, completion).float(),
        "advantages": numbers.float(),
        "rollout_number": numbers,
        "pixel_values": torch.cat([bank.references(image(key), CPU) for key in images]),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * rows),
        "num_images": [1] * rows,
        "num_items_in_batch": torch.tensor(100.0),
    }


@pytest.mark.parametrize(
    ("rows", "generations", "unit"), [(128, 8, 8), (8, 8, 8), (4, 8, 4), (12, 8, 4), (6, 4, 2)]
)
def test_a_unit_is_what_fits_a_micro_batch_of_a_group(rows, generations, unit):
    assert unit_size(rows, generations) == unit


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 80))
def test_every_optimizer_step_ends_with_work_and_no_micro_batch_is_too_large(
    optimizer_steps, micro_batches, max_units, extra_units
):
    slots = optimizer_steps * micro_batches
    units = list(range(min(optimizer_steps + extra_units, slots * max_units)))
    cut = partial(cut_by_count, micro_batches=micro_batches, max_units=max_units)
    plan = plan_micro_batches(units, optimizer_steps, micro_batches, cut)
    assert len(plan) == slots
    assert sorted(unit for part in plan for unit in part) == units
    assert all(plan[micro_batches - 1 :: micro_batches])
    assert max(map(len, plan)) <= max_units


def test_a_unit_counts_the_tokens_of_the_policy_s_pass():
    """Prompts of two and three tokens; four rollouts of 1, 4, 2 and 2 tokens."""
    prompts = torch.tensor([2, 2, 3, 3])
    answers = torch.tensor([1, 4, 2, 2])
    assert tokens_of_units(prompts, answers, 2, shares_prompt=True) == [2 + 5, 3 + 4]
    assert tokens_of_units(prompts, answers, 2, shares_prompt=False) == [4 + 5, 6 + 4]


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_ranks_find_units_of_the_same_place_by_length_in_each_micro_batch(chunks, each, rng):
    """Whatever their lengths.

    A step gets units of all lengths, and others at another place in the run.
    """
    count = chunks * each
    orders = []
    for _ in range(3):
        tokens = rng.sample(range(1000), count)
        longest_first = sorted(range(count), key=lambda number: -tokens[number])
        units = by_length(range(count), tokens, chunks, "seed/12")
        assert sorted(units) == list(range(count))
        orders.append([longest_first.index(number) for number in units])
    assert orders[0] == orders[1] == orders[2]
    assert all(part == sorted(part) for part in split_evenly(orders[0], chunks)), (
        "the longest of a step first"
    )


def test_the_steps_on_a_generation_see_units_of_all_lengths():
    found = {tuple(by_length(range(8), range(8), 4, f"0/{step}")) for step in range(20)}
    assert len(found) > 10 and {order[0] for order in found} > {6, 7}


def batch():
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


def test_rows_are_taken_with_all_that_belongs_to_them_and_padding_is_cut_on_both_sides():
    cut = batch_rows.without_padding(
        {**batch_rows.RowReader(batch()).take([1, 0]), "pixel_values": batch()["pixel_values"]}
    )
    assert cut["prompt_ids"].tolist() == [[5, 6, 7], [0, 7, 8]]
    assert cut["completion_ids"].tolist() == [[1, 0], [1, 2]]
    assert cut["mm_token_type_ids"].tolist() == [[9, 10, 11, 12, 13], [1, 2, 3, 4, 5]]
    assert cut["sampling_per_token_logps"].shape == (2, 2)
    assert (
        cut["advantages"].tolist() == [-1, 1]
        and cut["num_images"] == [1, 1]
        and cut["num_items_in_batch"] == 7
    )
    assert len(cut["pixel_values"]) == 8
    whole = batch()
    assert batch_rows.without_padding(whole)["completion_ids"].shape == (3, 4)


def test_a_batch_of_empty_completions_keeps_a_column():
    empty = batch()
    empty["completion_mask"] = torch.zeros_like(empty["completion_mask"])
    assert batch_rows.without_padding(empty)["completion_ids"].shape == (3, 1)


def test_dead_groups_are_replaced_by_live_ones_of_a_further_batch():
    assert admitted([True, False, False], [False, True, False], 3) == [0, 4, 2]
    assert admitted([True, False], [False, True, True, False], 4) == [0, 1, 3, 4], (
        "free places come first"
    )
    assert admitted([False], [True, True], 2) == [2, 1] and admitted([True], [False], 2) == [0, 1]
    own, further = batch(), batch()
    grids = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 2]])
    own |= {"image_grid_thw": grids, "pixel_values": torch.arange(8)[:, None]}
    further |= {"image_grid_thw": grids, "pixel_values": torch.arange(100, 108)[:, None]}
    further["completion_ids"] = torch.tensor([[3], [4], [5]])
    further["completion_mask"] = torch.ones(3, 1, dtype=torch.long)
    further["sampling_per_token_logps"] = torch.tensor([[-3.0], [-4], [-5]])
    further["mm_token_type_ids"] = torch.arange(15).view(3, 5)
    whole = batch_rows.chosen_groups(own, further, [0, 1, 4], 1, pad_id=77)
    assert whole["prompt_ids"].tolist() == [[0, 0, 7, 8], [0, 5, 6, 7], [0, 5, 6, 7]]
    assert whole["completion_ids"].tolist()[2] == [4, 77, 77, 77]
    assert whole["completion_mask"].tolist()[2] == [1, 0, 0, 0]
    assert whole["sampling_per_token_logps"].tolist()[2] == [-4, 0, 0, 0]
    assert whole["mm_token_type_ids"].tolist()[2] == [5, 6, 7, 8, 9, 0, 0, 0]
    assert whole["pixel_values"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 102, 103, 104, 105]
    assert whole["image_grid_thw"].tolist() == [[1, 1, 2], [1, 2, 2], [1, 2, 2]]
    assert whole["advantages"].tolist() == [1, -1, -1]


RATIOS_JOINED = [([[2.0, 3]], [[4.0]], [[2, 3], [4, 1]]), ([[2.0]], [[4.0]], [[2], [4]])]


@pytest.mark.parametrize(("own", "further", "expected"), RATIOS_JOINED)
def test_a_ratio_is_padded_with_what_changes_nothing(own, further, expected):
    """TRL's VESPO takes its logarithm without a mask. A ratio of whole rollouts has one column."""

    def part(ratio, length):
        rows = {
            name: value[:1]
            for name, value in batch().items()
            if name in ("prompt_ids", "prompt_mask")
        }
        rows |= {name: batch()[name][:1, :length] for name in ("completion_ids", "completion_mask")}
        return rows | {"importance_sampling_ratio": torch.tensor(ratio)}

    assert (
        batch_rows.concat_rows(part(own, 2), part(further, 1), 77)[
            "importance_sampling_ratio"
        ].tolist()
        == expected
    )


def batcher(
    *,
    banks: ImageBanks,
    log: dict[str, float] | None = None,
    every_row_counts: bool = False,
    room: MicroBatchRoom | None = None,
    **keys: Any,
):
    """Of a run of one process with groups of two; four rollouts in a micro-batch, four
    micro-batches in a step. Micro-batches are filled by `room`, if there is one.
    """
    own = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    context = step_context(log, **{**own, "steps_per_generation": 4, **keys})
    return MicroBatcher(context, banks, every_row_counts=every_row_counts, room=room)


def sixteen(banks: ImageBanks, live: str) -> Batch:
    """Eight groups of two rollouts; those of the letters in `live` have signal.

    Each rollout is one token longer.
    """
    rows = rank_batch(banks, "".join(2 * letter for letter in "abcdefgh"), 16, 0)
    rows["completion_mask"] = (torch.arange(16) <= torch.arange(16)[:, None]).long()
    signs = torch.tensor([[1.0, -1.0] if letter in live else [0.0, 0.0] for letter in "abcdefgh"])
    rows["advantages"] = signs.flatten() * torch.arange(1, 17)
    return rows


def rows_of(micro_batches: list[Batch]) -> list[list[int]]:
    return [micro["rollout_number"].tolist() if micro else [] for micro in micro_batches]


def test_only_groups_with_signal_are_in_micro_batches_the_longest_first_with_all_that_is_theirs():
    banks = ImageBanks()
    log = dict[str, float]()
    micro_batches = batcher(banks=banks, log=log).split(sixteen(banks, "bdeg"), "0/0")
    assert rows_of(micro_batches) == [[], [], [12, 13, 8, 9], [6, 7, 2, 3]]
    assert log == {"adora/skipped_groups": 0.5, "adora/micro_batches": 2.0}
    for micro in micro_batches[2:]:
        numbers = micro["rollout_number"]
        assert micro["advantages"].tolist() == [(n + 1) * (-1) ** n for n in numbers.tolist()]
        assert micro["completion_mask"].sum(dim=1).tolist() == (numbers + 1).tolist()
        assert micro["completion_ids"].size(1) == int(numbers.max()) + 1, (
            "padding of the whole generation is cut"
        )
        assert torch.equal(micro["completion_ids"][:, 0], numbers) and torch.equal(
            micro["prompt_ids"][:, 0], numbers
        )
        starts = micro["pixel_values"].view(4, -1)[:, 0].tolist()
        letters = [chr(int(banks.of(start).pixels([start])[0][0, 0])) for start in starts]
        assert letters == ["abcdefgh"[number // 2] for number in numbers.tolist()]


def test_a_rank_makes_as_many_micro_batches_with_work_as_the_one_with_the_most_signal(monkeypatch):
    """Else it would wait for ever in a pass that gathers weights.

    Without signal of its own, it takes the shortest.
    """
    monkeypatch.setattr("adora_vl.training.micro_batches.gather_object", lambda own: [*own, 5])
    two = SimpleNamespace(num_processes=2, device=CPU, process_index=0)
    banks = ImageBanks()
    one = batcher(banks=banks, accelerator=two, adora_stock_step=["spread_signal"])
    found = rows_of(one.split(sixteen(banks, "h"), "0/0"))
    assert sorted(row for rows in found for row in rows) == [*range(8), 14, 15]
    assert [len(rows) for rows in found] == [0, 4, 4, 2]


@pytest.mark.parametrize(
    ("live", "rows", "sizes", "losses"),
    [("abc", 16, [4, 2], [3.0, 1.5]), ("abcdef", 12, [4, 4, 4], [4.0] * 3)],
)
def test_a_row_weighs_as_much_in_a_small_micro_batch_as_in_a_full_one(live, rows, sizes, losses):
    """TRL takes a mean over the rows of a micro-batch; the share puts back how many there are.

    Places without rollouts, as with unfinished ones, do not count: the mean of twelve is that of a
    run without other places.
    """
    banks = ImageBanks()
    loss = torch.tensor(3.0)
    own = batch_rows.RowReader(sixteen(banks, live)).take(range(rows))
    one = batcher(banks=banks, loss_type="grpo")
    work = [micro for micro in one.split(own, "0/0") if micro]
    assert [len(numbers) for numbers in rows_of(work)] == sizes
    assert [float(one.scaled(loss, micro)) for micro in work] == pytest.approx(losses)
    assert float(batcher(banks=banks, loss_type="dapo").scaled(loss, work[-1])) == 3.0, (
        "DAPO divides by tokens"
    )


def test_which_groups_are_learned_from_and_where(subtests):
    """All where the loss has another term or the key says so; the shortest where none has signal,
    for each step.
    """
    cases: list[tuple[str, dict[str, Any], list[int], int]] = [
        ("a", {"every_row_counts": True}, [4, 4, 4, 4], 16),
        ("a", {"adora_stock_step": ["skip_zero_signal"]}, [4, 4, 4, 4], 16),
        ("", {}, [0, 0, 0, 2], 2),
        ("abcd", {"gradient_accumulation_steps": 2}, [0, 4, 0, 4], 8),
    ]
    for live, keys, sizes, first in cases:
        with subtests.test(f"{live} {keys}"):
            banks = ImageBanks()
            found = rows_of(batcher(banks=banks, **keys).split(sixteen(banks, live), "0/0"))
            assert [len(rows) for rows in found] == sizes
            assert sorted(row for rows in found for row in rows) == list(range(first))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_a_generation_s_rows_weigh_the_same_however_they_are_cut(loss_type):
    """A row's weight in the step's loss does not depend on which rows share its micro-batch.

    TRL takes a mean over the rows of a micro-batch, or divides by the tokens of the generation.
    """
    weights = []
    counts = []
    for fill in (None, room(longest=64)):
        banks = ImageBanks()
        micro_batches = batcher(banks=banks, room=fill, loss_type=loss_type).split(
            sixteen(banks, "abcdefgh"), "0/0"
        )
        weight_of: dict[int, float] = {}
        scaling = batcher(banks=banks, loss_type=loss_type)
        for micro in filter(None, micro_batches):
            rows = len(micro["advantages"])
            mean = torch.tensor(1.0 if loss_type == "dapo" else 1 / rows, dtype=torch.float64)
            for number in micro["rollout_number"].tolist():
                weight_of[number] = float(scaling.scaled(mean, micro))
        weights.append(weight_of)
        counts.append(sum(map(bool, micro_batches)))
    separate, filled = weights
    assert counts == [4, 1]
    assert filled.keys() == separate.keys()
    for number, weight in separate.items():
        assert filled[number] == pytest.approx(weight, rel=1e-12)


def test_empty_micro_batches_come_first_in_each_step():
    """The last one of a step triggers the reduction of gradients."""
    banks = ImageBanks()
    steps_of_two: dict[str, Any] = {"gradient_accumulation_steps": 2}
    log = dict[str, float]()
    micro_batches = batcher(banks=banks, room=room(longest=64), log=log, **steps_of_two).split(
        sixteen(banks, "abcdefgh"), "0/0"
    )
    assert [len(rows) for rows in rows_of(micro_batches)] == [0, 8, 0, 8]
    assert log["adora/micro_batches"] == 1


def test_the_key_cuts_by_the_number_of_rows():
    banks = ImageBanks()
    stock = batcher(banks=banks, room=room(longest=64), adora_stock_step=["fill_micro_batches"])
    micro_batches = stock.split(sixteen(banks, "abcdefgh"), "0/0")
    assert [len(rows) for rows in rows_of(micro_batches)] == [4, 4, 4, 4]


def alike(*counts):
    """Units of equal length, so many on each rank."""
    return [dict.fromkeys(range(count), 10) for count in counts]


def pairs(moves):
    return [(source, target) for source, _, target in moves]


def test_moves_by_hand():
    assert pairs(plan_moves(alike(0, 4))) == [(1, 0), (1, 0)]
    assert plan_moves(alike(1, 2, 2)) == [], "no rank takes longer for it"
    assert sorted(pairs(plan_moves(alike(3, 0, 0)))) == [(0, 1), (0, 2)]
    assert pairs(plan_moves(alike(4, 3, 3, 0))) == [(0, 3)], "no more than is needed"
    assert (
        len(plan_moves(alike(0, 6), min_units=4)) == 2
        and plan_moves(alike(0, 4), min_units=4) == []
    )
    assert plan_moves(alike(0, 0)) == []


def test_a_long_unit_moves_to_where_it_meets_another_long_one():
    assert plan_moves([{0: 90, 1: 100}, {0: 10, 1: 11}]) == [Move(0, 0, 1), Move(1, 0, 0)]
    assert plan_moves([{0: 90, 1: 10}, {0: 100, 1: 11}]) == [], (
        "in order of length they meet as they are"
    )
    assert plan_moves([{3: 100, 5: 30}, {1: 90, 4: 25}]) == [], "about as long is enough"


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_lockstep_hardly_wait_for_each_other(case):
    """8 ranks, 16 groups of 8 on each, and where groups cannot move."""
    assert simulate(case, move_groups, trials=20) <= 1.16
    assert simulate(case, order_by_length, trials=20) <= 1.36
    assert simulate(case, shuffle_each_rank, trials=20) >= 1.45
    assert lockstep_ratio([[4, 2], [3, 3]]) == pytest.approx(7 / 6), "by hand"


@given(
    st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=6), st.integers(1, 6)
)
def test_no_rank_learns_from_more_units_than_it_must_and_none_is_lost(ranks, least):
    own = [dict(enumerate(tokens)) for tokens in ranks]
    moves = plan_moves(own, least)
    after = [
        {(rank, number): count for number, count in units.items()} for rank, units in enumerate(own)
    ]
    for source, number, target in moves:
        after[target][source, number] = after[source].pop((source, number))
        assert source != target
    assert sum(map(len, after)) == sum(map(len, own))
    assert max(map(len, after)) <= max(least, -(-sum(map(len, own)) // len(own)))
    if len({len(units) for units in own}) == 1 and len(own[0]) >= least:
        assert len({len(units) for units in after}) == 1, (
            "so that no group counts twice where all groups count"
        )


def test_a_rank_that_gets_nothing_looks_at_its_images_again_with_the_others():
    """The passes of a frozen tower gather weights, so all ranks make them."""
    banks = ImageBanks()
    batch = rank_batch(banks, "abab", 2, 0)
    banks.of_training().features_due = False
    rebalanced(
        batch, [True, True], 2, [Move(1, 0, 2)], 0, banks, 99, lambda plan, sending, rank: []
    )
    assert banks.of_training().features_due


@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=5),
    st.sampled_from([1, 2, 3, 6]),
)
def test_every_unit_with_signal_is_learned_from_once_on_one_rank(ranks, least):
    """The plan, what is sent, and the choice of units together, for whatever has signal."""
    lengths = [
        {number: 10 + number for number, alive in enumerate(live) if alive} for live in ranks
    ]
    plan = plan_moves(lengths, least)
    banks = [ImageBanks() for _ in ranks]
    packed_rows: list[Any] = []
    batches = [rank_batch(bank, "abcdef", 1, 100 * (rank + 1)) for rank, bank in enumerate(banks)]
    for batch, live in zip(batches, ranks, strict=True):
        batch["advantages"] = batch["advantages"] * torch.tensor(live)

    def keep(plan, sending, rank):
        targets = [move.target for move in plan if move.source == rank]
        packed_rows.extend(zip(targets, sending, strict=True))
        return []

    for rank, own in enumerate(ranks):  # what each sends, since a rank may both give and take
        rebalanced(batches[rank], own, 1, plan, rank, copy.deepcopy(banks[rank]), 99, keep)

    def carry(plan, sending, rank):
        return [packed for target, packed in packed_rows if target == rank]

    after = {
        r: rebalanced(batches[r], ranks[r], 1, plan, r, banks[r], 99, carry)
        for r in range(len(ranks))
    }
    wanted = max(least, *(sum(live) for _, live in after.values()))
    learned = []
    for batch, live in after.values():
        chosen = choose_units(live, wanted, [1] * len(live))
        assert len(chosen) == wanted
        learned += [value for value in batch["advantages"][chosen].tolist() if value]
    assert sorted(learned) == sorted(
        value for batch in batches for value in batch["advantages"].tolist() if value
    )


def test_all_that_is_a_row_s_goes_with_it_and_no_image_is_held_twice():
    """Rank 0 has nothing alive, rank 1 two units of two rollouts."""
    banks = [ImageBanks(), ImageBanks()]
    batches = [rank_batch(banks[0], "abab", 2, 0), rank_batch(banks[1], "ccad", 3, 10)]
    packed_rows: list = []

    def carry(plan, sending, rank):
        packed_rows.extend(copy.deepcopy(sending))
        return packed_rows if rank == 0 else []

    plan = plan_moves(alike(0, 2))
    rebalanced(batches[1], [True, True], 2, plan, 1, banks[1], 99, carry)
    batch, live = rebalanced(batches[0], [False, False], 2, plan, 0, banks[0], 99, carry)
    assert live == [False, False, True]
    assert batch["prompt_ids"][:, 0].tolist() == [0, 1, 2, 3, 12, 13]
    assert (
        batch["completion_ids"][0].tolist() == [0, 0, 99]
        and batch["completion_ids"][4].tolist() == [12] * 3
    )
    assert batch["completion_mask"].sum(dim=1).tolist() == [2, 2, 2, 2, 3, 3]
    assert batch["advantages"].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["rollout_number"].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["num_images"] == [1] * 6 and len(batch["image_grid_thw"]) == 6
    assert batch["num_items_in_batch"] == 100
    bank = banks[0].of(0)
    assert len(bank) == 3, "a, b and the new d"
    starts = batch["pixel_values"][::4, 0].tolist()
    seen = [chr(int(bank.pixels([start])[0][0, 0])) for start in starts]
    assert seen == ["a", "b", "a", "b", "a", "d"]
