"""What the rollouts of a group have in common is found, computed once and put back: pure functions on rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.dedup.image_bank import ImageBanks
from adora_vl.dedup.processor import distinct_rows
from adora_vl.dedup.prompt_groups import groups_of
from adora_vl.dedup.shared_prompt import ALIKE, Group, SharedPrompts, pack
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
    assert [length for part in group.batches for length in part] == list(group.others)
    padded = sum(len(part) * part[0] for part in group.batches)
    assert padded * ALIKE <= sum(group.others)


def test_the_longest_rollout_is_one_span_with_its_prompt():
    """Of the others each has a span; among keys they come after the prompt once more."""
    alone, three = Group(4, (2,)), Group(3, (5, 2, 1))
    shared = SharedPrompts((alone, three, Group(2, ())), torch.zeros(1, dtype=torch.long))
    assert shared.spans == [6, 8, 2, 1, 2]
    queries, keys, most_queries, most_keys = shared.bounds
    assert queries.tolist() == [0, 6, 14, 16, 17, 19] and keys.tolist() == [0, 6, 14, 19, 23, 25]
    assert (most_queries, most_keys) == (8, 8)


def test_no_two_banks_share_a_number_and_the_evaluation_does_not_take_the_trainings_place():
    def image(key: str) -> ProcessedImage:
        return ProcessedImage(key, torch.zeros(4, 3, dtype=torch.uint8), torch.tensor([1, 2, 2]))

    banks, cpu = ImageBanks(), torch.device("cpu")
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
