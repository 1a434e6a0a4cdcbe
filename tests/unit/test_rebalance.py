"""Units with signal move between processes: who gives to whom, and that all that is a row's goes with it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.batching.micro_batches import chosen_units
from adora_vl.batching.rebalance import movable, moves, rebalanced
from adora_vl.dedup.image_bank import ImageBanks
from adora_vl.rollout.image_cache import ProcessedImage
from adora_vl.rollout_log.rollout_numbers import RolloutNumbers

CPU = torch.device("cpu")


def test_moves_by_hand():
    assert moves([0, 4]) == [(1, 0), (1, 0)]
    assert moves([1, 2, 2]) == [], "no rank takes longer for it"
    assert moves([3, 0, 0]) == [(0, 1), (0, 2)]
    assert moves([4, 3, 3, 0]) == [(0, 3)], "no more than is needed"
    assert moves([0, 6], least=4) == [(1, 0), (1, 0)] and moves([0, 4], least=4) == []
    assert moves([0, 0]) == []


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 6))
def test_no_rank_takes_longer_than_it_must_and_none_gives_and_takes(counts, least):
    after = list(counts)
    for source, target in moves(counts, least):
        after[source] -= 1
        after[target] += 1
    assert max(after) <= max(least, -(-sum(counts) // len(counts))) and sum(after) == sum(counts)
    assert not {source for source, _ in moves(counts, least)} & {target for _, target in moves(counts, least)}


def image(key: str) -> ProcessedImage:
    return ProcessedImage(key, torch.full((4, 3), ord(key), dtype=torch.uint8), torch.tensor([1, 2, 2]))


def rank_batch(banks: ImageBanks, images: str, completion: int, first: int) -> dict:
    """A rollout an image, prompts of two tokens."""
    rows, bank = len(images), banks.new("train")
    numbers = torch.arange(first, first + rows)
    return {
        "prompt_ids": torch.stack([numbers, numbers], dim=1),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": numbers[:, None].expand(rows, completion).clone(),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "sampling_per_token_logps": -numbers[:, None].expand(rows, completion).float(),
        "advantages": numbers.float(),
        "rollout_number": numbers,
        "pixel_values": torch.cat([bank.references(image(key), torch.Tensor.float, CPU) for key in images]),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * rows),
        "num_images": [1] * rows,
        "num_items_in_batch": torch.tensor(100.0),
    }


@pytest.fixture
def two_ranks():
    """Rank 0 has nothing alive, rank 1 two units of two rollouts."""
    banks = [ImageBanks(), ImageBanks()]
    batches = [rank_batch(banks[0], "abab", 2, 0), rank_batch(banks[1], "ccad", 3, 10)]
    parcels: list = []

    def carry(plan, sending, rank):
        parcels.extend(copy.deepcopy(sending))
        return parcels if rank == 0 else []

    plan = moves([0, 2])
    giver = rebalanced(batches[1], [True, True], 2, plan, 1, banks[1], 99, carry)
    taker = rebalanced(batches[0], [False, False], 2, plan, 0, banks[0], 99, carry)
    return giver, taker, banks


def test_the_giver_learns_nothing_from_what_it_gave(two_ranks):
    (batch, live), _, _ = two_ranks
    assert live == [True, False] and batch["advantages"].tolist() == [10, 11, 0, 0]


@settings(deadline=None)  # a machine under load may be slow
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=5), st.sampled_from([1, 2, 3, 6]))
def test_every_unit_with_signal_is_learned_from_once_on_one_rank(ranks, least):
    """The plan, what is sent, and the choice of units together, for whatever has signal."""
    plan, banks = moves([sum(live) for live in ranks], least), [ImageBanks() for _ in ranks]
    parcels: list[Any] = []
    batches = [rank_batch(bank, "abcdef", 1, 100 * (rank + 1)) for rank, bank in enumerate(banks)]
    for batch, live in zip(batches, ranks, strict=True):
        batch["advantages"] = batch["advantages"] * torch.tensor(live)

    def carry(plan, sending, rank):
        if rank not in {target for _, target in plan}:
            parcels.extend(zip([target for source, target in plan if source == rank], sending, strict=True))
        return [parcel for target, parcel in parcels if target == rank]

    order = sorted(range(len(ranks)), key=lambda rank: rank in {target for _, target in plan})  # givers first
    after = {r: rebalanced(batches[r], ranks[r], 1, plan, r, banks[r], 99, carry) for r in order}
    wanted = max(least, *(sum(live) for _, live in after.values()))
    learned = []
    for batch, live in after.values():
        chosen = chosen_units(live, wanted)
        assert len(chosen) == wanted
        learned += [value for value in batch["advantages"][chosen].tolist() if value]
    assert sorted(learned) == sorted(value for batch in batches for value in batch["advantages"].tolist() if value)


def test_all_that_is_a_row_s_goes_with_it(two_ranks):
    _, (batch, live), _ = two_ranks
    assert live == [False, False, True]
    assert batch["prompt_ids"][:, 0].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["completion_ids"][0].tolist() == [0, 0, 99] and batch["completion_ids"][4].tolist() == [12] * 3
    assert batch["completion_mask"].sum(dim=1).tolist() == [2, 2, 2, 2, 3, 3]
    assert batch["advantages"].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["rollout_number"].tolist() == [0, 1, 2, 3, 12, 13]
    assert batch["num_images"] == [1] * 6 and len(batch["image_grid_thw"]) == 6
    assert batch["num_items_in_batch"] == 100


def test_an_image_that_is_there_is_not_held_twice_and_a_new_one_is(two_ranks):
    _, (batch, _), banks = two_ranks
    bank = banks[0].of(0)
    assert len(bank) == 3, "a, b and the new d"
    starts = batch["pixel_values"][::4, 0].tolist()
    seen = [chr(int(bank.pixels([start])[0][0, 0])) for start in starts]
    assert seen == ["a", "b", "a", "b", "a", "d"]


def test_drift_measured_elsewhere_comes_home():
    home, other = RolloutNumbers(0, 2), RolloutNumbers(1, 2)
    own, foreign = home.numbers(2, CPU), other.numbers(2, CPU)
    assert not set(own.tolist()) & set(foreign.tolist())
    other.measured(torch.stack([foreign[1], own[0]]), torch.tensor([0.5, 0.25]))
    found = [*home.take_of_others(), *other.take_of_others()]
    home.heard(found)
    other.heard(found)
    assert home.take()[0] == 0.25 and math.isnan(other.take()[0])
    assert home.take() == [] and other.take_of_others() == []


def test_pixels_that_are_not_referred_to_stay_where_they_are():
    assert movable({"prompt_ids": 0, "advantages": 0}) == ("advantages", "prompt_ids")
    assert movable({"pixel_values": torch.zeros(1, 1, dtype=torch.long)}) == ("pixel_values",)
    assert movable({"pixel_values": torch.zeros(1, 3)}) == ()
