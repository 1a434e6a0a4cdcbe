"""What the rollouts of a group have in common is found, computed once and put back: pure functions on rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.dedup.flat import end_to_end, flat_pays
from adora_vl.dedup.image_bank import Banks
from adora_vl.dedup.prefix import groups_of
from adora_vl.dedup.processor import distinct_rows
from adora_vl.dedup.shared_prompt import ALIKE, Group, pack
from adora_vl.rollout.image_cache import ProcessedImage


def test_distinct_rows_keep_their_order():
    assert distinct_rows(["b", "a", "b", "c", "a"]) == ([0, 1, 3], [0, 1, 0, 2, 1])


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
