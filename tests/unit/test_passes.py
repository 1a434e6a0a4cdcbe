"""What the training step computes once: pure functions on rows, groups and log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from adora_vl.dedup.packed import _in_form
from adora_vl.dedup.prefix import groups_of, pack, packing_pays
from adora_vl.dedup.processor import distinct_rows
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


def test_a_packed_group_by_hand():
    """Prompt 5 6 7 (left-padded), rollouts `1 2` and `3`; the copies of 7 predict the first tokens."""
    ids = torch.tensor([[0, 5, 6, 7, 1, 2], [0, 5, 6, 7, 3, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
    positions = torch.tensor([[[0, 0, 4, 5]]] * 3)  # as after an image
    packed = pack(ids, mask, 2, [[0, 1]], positions)
    assert packed.ids_NS.tolist() == [[5, 6, 7, 1, 7]]
    assert packed.labels_NS.tolist() == [[-100, -100, 1, 2, 3]]
    assert packed.positions[0].tolist() == [[0, 4, 5, 6, 5]]
    assert packed.mask_N1SS[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert packed.unpacked(torch.tensor([[9.0, 9, 0.1, 0.2, 0.3]])).tolist() == pytest.approx(
        [pytest.approx([0.1, 0.2]), pytest.approx([0.3, 0.0])]
    )


def test_padding_of_a_packed_batch_is_seen_by_no_one_else():
    ids = torch.tensor([[5, 6, 1], [5, 6, 2], [4, 6, 1]])
    packed = pack(ids, torch.ones_like(ids), 1, [[0, 1], [2]], torch.arange(2).expand(2, 2))
    assert packed.ids_NS.tolist() == [[5, 6, 6], [4, 6, 0]]
    assert packed.mask_N1SS[1, 0, 2, 2], "a row of the mask that allows nothing is NaN"
    assert not packed.mask_N1SS[1, 0, :2, 2].any()


class _Devices(TorchDispatchMode):
    """The devices on which anything is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {tensor.device.type for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)}
        return result


def test_eager_attention_gets_its_mask_on_the_device_of_the_batch():
    """CUDA refuses to mix devices here, so a run with `attn_implementation: eager` would stop at its first step."""
    text = SimpleNamespace(_attn_implementation="eager")
    model = SimpleNamespace(dtype=torch.bfloat16, config=SimpleNamespace(get_text_config=lambda: text))
    packed = pack(torch.arange(8).view(2, 4), torch.ones(2, 4, dtype=torch.long), 2, [[0, 1]], torch.zeros(1, 2))
    away = replace(packed, mask_N1SS=packed.mask_N1SS.to("meta"))
    with _Devices() as devices:
        mask = _in_form(away, model)
    assert devices.seen == {"meta"} and mask.shape == packed.mask_N1SS.shape and mask.dtype == torch.bfloat16
    here = _in_form(packed, model)
    assert torch.equal(here == 0, packed.mask_N1SS) and here[~packed.mask_N1SS].max() < -1e38


def test_a_truncated_rollout_that_is_masked_out_takes_no_place():
    ids = torch.tensor([[5, 6, 1, 1], [5, 6, 2, 2]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    packed = pack(ids, mask, 2, [[0, 1]], torch.arange(2).expand(1, 2))
    assert packed.ids_NS.tolist() == [[5, 6, 2]]
    assert packed.unpacked(torch.tensor([[9.0, 0.1, 0.2]])).tolist()[0] == [0.0, 0.0]


def test_rows_end_to_end_by_hand():
    """Prompts `5 6` and `7`, left-padded, with `1 2`, nothing and `3`; positions as after an image in the first."""
    ids = torch.tensor([[5, 6, 1, 2], [5, 6, 0, 0], [0, 7, 3, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
    positions = torch.tensor([[[0, 4], [0, 4], [0, 0]]] * 3)
    flat = end_to_end(ids, mask, 2, positions)
    assert flat.ids_NS.tolist() == [[5, 6, 1, 5, 6, 7]]
    assert flat.labels_NS.tolist() == [[-100, 1, 2, -100, -100, 3]]
    assert flat.positions[0].tolist() == [[0, 1, 2, 0, 1, 0]], "the text's own, which tell the rows apart"
    assert flat.positions[1].tolist() == flat.positions[3].tolist() == [[0, 4, 5, 0, 4, 0]]
    assert flat.mask_N1SS is None
    values = flat.unpacked(torch.tensor([[9.0, 0.1, 0.2, 9, 9, 0.3]]))
    assert torch.allclose(values, torch.tensor([[0.1, 0.2], [0, 0], [0.3, 0]]))
    text_only = end_to_end(ids, mask, 2, positions[0])
    assert text_only.positions.tolist() == [[0, 4, 5, 0, 4, 0]]


def test_rows_end_to_end_pay_where_any_would_be_padded():
    assert flat_pays([5, 5], [3, 2]) and flat_pays([5, 4], [3, 3])
    assert not flat_pays([5, 5], [3, 3])


def test_packing_pays_for_long_prompts_and_not_for_many_long_rollouts():
    assert packing_pays([400], [[23] * 8], 2048, 11008)
    assert packing_pays([500], [[512] * 8], 2048, 11008)
    assert not packing_pays([20], [[4000] * 16], 2048, 11008)


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
