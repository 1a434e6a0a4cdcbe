"""A generation becomes micro-batches, and groups without signal are replaced: pure functions on rows and groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.batching.dynamic_sampling import exchanges, further_rows, joined, refilled
from adora_vl.batching.micro_batches import (
    by_length,
    chosen_units,
    dealt,
    live_units,
    planned,
    take_rows,
    without_padding,
)
from adora_vl.config.arithmetic import unit_size


@pytest.mark.parametrize(("rows", "generations", "unit"), [(128, 8, 8), (8, 8, 8), (4, 8, 4), (12, 8, 4), (6, 4, 2)])
def test_a_unit_is_what_fits_a_micro_batch_of_a_group(rows, generations, unit):
    assert unit_size(rows, generations) == unit


def test_units_without_any_advantage_are_dead():
    assert live_units(torch.tensor([0.0, 0, 1, -1, 0, 0]), 2) == [False, True, False]
    assert live_units(torch.tensor([[0.0, 0], [0, 2]]), 1) == [False, True]


def test_dead_units_fill_up_what_other_ranks_have_alive():
    live = [True, False, False, True, False]
    assert chosen_units(live, 0) == [0, 3]
    assert chosen_units(live, 4) == [0, 1, 2, 3]
    assert chosen_units([False] * 3, 1) == [0]


@given(st.integers(1, 8), st.integers(0, 30))
def test_units_are_dealt_evenly_and_none_is_lost(micro_batches, more):
    units = list(range(micro_batches + more))
    parts = dealt(units, micro_batches)
    assert [unit for part in parts for unit in part] == units
    sizes = {len(part) for part in parts}
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_micro_batches_are_full_and_the_empty_ones_come_first():
    assert planned(range(5), 1, 4, 2) == [[], [0, 1], [2, 3], [4]]
    assert planned(range(8), 1, 4, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert planned(range(3), 2, 2, 2) == [[], [0, 1], [], [2]], "a chunk is an optimizer step here"
    assert planned([7], 1, 3, 1) == [[], [], [7]]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 80))
def test_every_chunk_ends_with_work_and_no_micro_batch_is_too_large(chunks, chunk, full, more):
    units = list(range(min(chunks + more, chunks * chunk * full)))
    plan = planned(units, chunks, chunk, full)
    assert len(plan) == chunks * chunk and sorted(unit for part in plan for unit in part) == units
    assert all(plan[chunk - 1 :: chunk]) and max(map(len, plan)) <= full


def test_units_go_by_their_longest_row():
    assert by_length([0, 1, 2], torch.tensor([1, 9, 5, 5, 2, 2]), 2) == [0, 1, 2]
    assert by_length([0, 2], torch.tensor([1, 1, 5, 5, 2, 2]), 2) == [2, 0]


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
    cut = without_padding({**take_rows(batch(), [1, 0]), "pixel_values": torch.arange(8)[:, None]})
    assert cut["prompt_ids"].tolist() == [[5, 6, 7], [0, 7, 8]]
    assert cut["completion_ids"].tolist() == [[1, 0], [1, 2]]
    assert cut["mm_token_type_ids"].tolist() == [[9, 10, 11, 12, 13], [1, 2, 3, 4, 5]]
    assert cut["sampling_per_token_logps"].shape == (2, 2)
    assert cut["advantages"].tolist() == [-1, 1] and cut["num_images"] == [1, 1] and cut["num_items_in_batch"] == 7
    assert len(cut["pixel_values"]) == 8
    whole = batch()
    assert without_padding(whole)["completion_ids"].shape == (3, 4)


def test_a_batch_of_empty_completions_keeps_a_column():
    empty = batch()
    empty["completion_mask"] = torch.zeros_like(empty["completion_mask"])
    assert without_padding(empty)["completion_ids"].shape == (3, 1)


def test_dead_groups_are_replaced_by_live_ones_of_a_further_batch():
    assert exchanges([True, False, False], [False, True, False]) == [(1, 1)]
    own, further = batch(), batch()
    grids = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 2]])
    own |= {"image_grid_thw": grids, "pixel_values": torch.arange(8)[:, None]}
    further |= {"image_grid_thw": grids, "pixel_values": torch.arange(100, 108)[:, None]}
    further["completion_ids"] = torch.tensor([[3], [4], [5]])
    further["completion_mask"] = torch.ones(3, 1, dtype=torch.long)
    further["sampling_per_token_logps"] = torch.tensor([[-3.0], [-4], [-5]])
    further["mm_token_type_ids"] = torch.arange(15).view(3, 5)
    whole = refilled(own, further, [(2, 1)], 1, pad_id=77)
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
        rows = {name: value[:1] for name, value in batch().items() if name in ("prompt_ids", "prompt_mask")}
        rows |= {name: batch()[name][:1, :length] for name in ("completion_ids", "completion_mask")}
        return rows | {"importance_sampling_ratio": torch.tensor(ratio)}

    assert joined(part(own, 2), part(further, 1), 77)["importance_sampling_ratio"].tolist() == expected


def test_further_problems_are_the_same_ones_after_a_resume_and_others_elsewhere():
    assert further_rows(100, 4, "0/7/1/0") == further_rows(100, 4, "0/7/1/0")
    assert further_rows(100, 4, "0/7/1/0") != further_rows(100, 4, "0/7/1/1")
    assert sorted(further_rows(2, 3, "a")) in ([0, 0, 1], [0, 1, 1])
