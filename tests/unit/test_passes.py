"""What the training step computes once: pure functions on rows, groups and log-probabilities."""

from __future__ import annotations

import math

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
    unit_size,
    without_padding,
)
from adora_vl.dedup.flat import end_to_end, flat_pays
from adora_vl.dedup.image_bank import Banks
from adora_vl.dedup.prefix import groups_of
from adora_vl.dedup.processor import distinct_rows
from adora_vl.dedup.shared_prompt import ALIKE, Group, pack
from adora_vl.rollout.image_cache import ProcessedImage
from adora_vl.rollout.importance import importance_ratio


def test_distinct_rows_keep_their_order():
    assert distinct_rows(["b", "a", "b", "c", "a"]) == ([0, 1, 3], [0, 1, 0, 2, 1])


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


RATIOS = {
    "token_truncate": [[2.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "token_mask": [[0.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "sequence_truncate": [[2.0], [0.25]],
    "sequence_mask": [[0.0], [0.25]],
}


@pytest.mark.parametrize("mode", RATIOS)
def test_the_importance_ratio_by_hand(mode):
    """Row 0 is 8, 0.5, (masked): its product is 4. Row 1 is (no score), 0.25, 1."""
    log = torch.log(torch.tensor([[8.0, 0.5, 9.0], [5.0, 0.25, 1.0]]))
    sampling = torch.tensor([[0.0, 0, 0], [math.nan, 0, 0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ratio = importance_ratio(log, sampling, mask, mode=mode, clip_min=None, clip_max=2.0)
    assert torch.allclose(ratio, torch.tensor(RATIOS[mode]))


def test_neighbours_with_the_same_prompt_and_images_are_a_group():
    ids = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 3], [1, 2]])
    assert groups_of(ids, torch.ones_like(ids), ["a", "a", "b", "b", "a"]) == [[0, 1], [2], [3], [4]]


def test_groups_as_one_sequence_by_hand():
    """Prompt `5 6 7` with `3` and `1 2 4`, prompt `8` with `9 1`; the first has positions as after an image.

    7 predicts the first token of both its rollouts, and a rollout's last token is left out.
    """
    ids = torch.tensor([[0, 5, 6, 7, 3, 0, 0], [0, 5, 6, 7, 1, 2, 4], [0, 0, 0, 8, 9, 1, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0]])
    positions = torch.tensor([[[0, 0, 4, 5], [0, 0, 0, 0]]] * 3)
    packed = pack(ids, mask, 3, [[0, 1], [2]], positions)
    assert packed.ids_NS.tolist() == [[5, 6, 7, 1, 2, 8, 9]]
    assert packed.positions.shape == (3, 1, 7) and packed.positions[2, 0].tolist() == [0, 4, 5, 6, 7, 0, 1]
    assert packed.shared.groups == (Group(3, (2,)), Group(1, (1,)))
    assert packed.shared.predicting_K.tolist() == [2, 3, 4, 2, 5, 6]
    assert packed.labels.tolist() == [[1, 2, 4, 3, 9, 1]]
    unpacked = packed.unpacked(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]))
    assert torch.allclose(unpacked, torch.tensor([[0.4, 0, 0], [0.1, 0.2, 0.3], [0.5, 0.6, 0]]))


def test_a_truncated_rollout_that_is_masked_out_takes_no_place():
    ids = torch.tensor([[5, 6, 1, 1], [5, 6, 2, 2]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    packed = pack(ids, mask, 2, [[0, 1]], torch.arange(2).expand(1, 2))
    assert packed.ids_NS.tolist() == [[5, 6, 2]] and packed.labels.tolist() == [[2, 2]]
    assert packed.unpacked(torch.tensor([[0.1, 0.2]])).tolist()[0] == [0.0, 0.0]


def test_a_batch_in_which_nothing_is_scored_keeps_a_position_for_the_head():
    ids = torch.tensor([[5, 6, 1], [5, 6, 1]])
    packed = pack(ids, torch.tensor([[1, 1, 0]] * 2), 1, [[0, 1]], torch.arange(2)[None])
    assert packed.labels.tolist() == [[-100]] and packed.shared.groups == (Group(2, ()),)
    assert packed.unpacked(torch.tensor([[9.0]])).tolist() == [[0.0], [0.0]]


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_rollouts_that_share_a_call_are_of_like_length(lengths):
    group = Group(1, tuple(sorted(lengths, reverse=True)))
    assert [length for part in group.batches for length in part] == list(group.rollouts)
    padded = sum(len(part) * part[0] for part in group.batches)
    assert padded * ALIKE <= sum(lengths)


def test_rows_end_to_end_by_hand():
    """Prompts `5 6` and `7`, left-padded, with `1 2`, nothing and `3`; positions as after an image in the first."""
    ids = torch.tensor([[5, 6, 1, 2], [5, 6, 0, 0], [0, 7, 3, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
    positions = torch.tensor([[[0, 4], [0, 4], [0, 0]]] * 3)
    flat = end_to_end(ids, mask, 2, positions)
    assert flat.ids_NS.tolist() == [[5, 6, 1, 5, 6, 7]]
    assert flat.labels.tolist() == [[-100, 1, 2, -100, -100, 3]]
    assert flat.positions[0].tolist() == [[0, 1, 2, 0, 1, 0]], "the text's own, which tell the rows apart"
    assert flat.positions[1].tolist() == flat.positions[3].tolist() == [[0, 4, 5, 0, 4, 0]]
    values = flat.unpacked(torch.tensor([[9.0, 0.1, 0.2, 9, 9, 0.3]]))
    assert torch.allclose(values, torch.tensor([[0.1, 0.2], [0, 0], [0.3, 0]]))
    text_only = end_to_end(ids, mask, 2, positions[0])
    assert text_only.positions.tolist() == [[0, 4, 5, 0, 4, 0]]


def test_rows_end_to_end_pay_where_any_would_be_padded():
    assert flat_pays([5, 5], [3, 2]) and flat_pays([5, 4], [3, 3])
    assert not flat_pays([5, 5], [3, 3])


def test_no_two_banks_share_a_number_and_the_evaluation_does_not_take_the_trainings_place():
    def image(key: str) -> ProcessedImage:
        return ProcessedImage(key, torch.zeros(4, 3, dtype=torch.uint8), torch.tensor([1, 2, 2]))

    banks, cpu = Banks(), torch.device("cpu")
    train = banks.new("train")
    first = train.references(image("a"), torch.Tensor.float, cpu)
    assert first.tolist() == [[0], [1], [2], [3]]
    assert train.references(image("a"), torch.Tensor.float, cpu).tolist() == first.tolist() and len(train) == 1
    evaluation = banks.new("eval")
    assert evaluation.references(image("b"), torch.Tensor.float, cpu)[0].item() == 4
    assert banks.of(2) is train and banks.of(5) is evaluation
    again = banks.new("train")
    assert again.references(image("c"), torch.Tensor.float, cpu)[0].item() == 8
    with pytest.raises(AssertionError, match="no bank"):
        banks.of(2)


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
