"""The tiny model's teacher: at the start of the demo, ADORA's length criterion must not be the
label of one subtype.

It once was. Vertical angles were copied in 13 tokens, and their slip took 18, so every mixed group
of this one subtype was attenuated and no other: GRPO with ADORA ended eight points below GRPO, for
a reason that lay in the drawings.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pytest
import torch

from adora_vl.advantage import Groups, weigh_groups
from adora_vl.builtin.processor import END_OF_TURN
from adora_vl.builtin.tiny_vl import SLIPS
from adora_vl.data.dataset import Row
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.rewards import grade
from adora_vl.synthetic.generate import generate

# the demo's rollouts per prompt
NUM_ROWS = 600
GROUP_SIZE = 8
EXPECTED_SUBTYPES = {
    "isosceles",
    "polygon",
    "right_triangle",
    "crossing, vertical",
    "crossing, supplementary",
    "circle, diameter",
    "circle, circumference",
}
# The mean weight of a subtype's mixed groups is 1 - 0.9 * share, so up to this share the first
# updates count every subtype at 0.91 to 1 of any other. A criterion that is a subtype's label has a
# share of 1 there.
MOST_ATTENUATED_SHARE = 0.1


@dataclass
class SubtypeFigures:
    """Tokens of the right workings and of the slips, and whether each mixed group is attenuated."""

    right: list[int] = field(default_factory=list)
    slip: list[int] = field(default_factory=list)
    attenuated: list[bool] = field(default_factory=list)

    @property
    def tds_share(self) -> float:
        return fmean(self.attenuated)


def measure_subtypes(tokenizer: Any, rows: list[Row]) -> dict[str, SubtypeFigures]:
    """Measure how groups of each subtype look to the demo's criterion.

    A group has `GROUP` answers by the teacher, whose wordings are drawn from all workings of its
    subtype.
    """
    subtypes: dict[str, SubtypeFigures] = defaultdict(SubtypeFigures)
    judged: list[tuple[SubtypeFigures, float, tuple[float, float]]] = []
    for row in rows:
        meta = row["meta"]
        subtype = subtypes[", ".join(filter(None, (meta["family"], meta["kind"])))]
        right = meta["solution"]
        slip = meta["slip"]
        subtype.right.append(len(tokenizer(right + END_OF_TURN)["input_ids"]))
        subtype.slip.append(len(tokenizer(slip + END_OF_TURN)["input_ids"]))
        rewards = [
            1.0 if grade(text, row["answer"]).verdict == "correct" else 0.1
            for text in (right, slip)
        ]
        judged.append((subtype, SLIPS[meta["family"]], (rewards[0], rewards[1])))
    rng = random.Random(0)
    for subtype, share, rewards_of in judged:
        slips = [rng.random() < share for _ in range(GROUP_SIZE)]
        lengths_PG = torch.tensor(
            [[rng.choice(subtype.slip if slip else subtype.right) for slip in slips]]
        )
        rewards_PG = torch.tensor([[rewards_of[slip] for slip in slips]])
        group = weigh_groups(
            Groups(rewards_PG, lengths_PG, torch.zeros_like(lengths_PG, dtype=torch.bool))
        )
        if len(set(rewards_PG[0].tolist())) > 1:  # mixed
            subtype.attenuated.append(bool(group.tds_P.item()))
    return subtypes


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_processor(str(PRETRAINED_FOLDER)).tokenizer


@pytest.fixture(scope="module")
def drawn_rows() -> list[Row]:
    return list(generate(NUM_ROWS, seed=1000))


def test_the_criterion_marks_no_subtype_at_the_start(tokenizer: Any, drawn_rows: list[Row]) -> None:
    subtypes = measure_subtypes(tokenizer, drawn_rows)
    assert subtypes.keys() == EXPECTED_SUBTYPES
    for name, subtype in subtypes.items():
        assert len(subtype.attenuated) >= 20, name  # mixed groups: the share means something
        assert subtype.tds_share <= MOST_ATTENUATED_SHARE, name
        # Two answers differ by a token at least. More than one apart in the mean is no accident of
        # the digits.
        assert fmean(subtype.right) > fmean(subtype.slip) + 1, name
    assert (
        fmean(subtypes["crossing, vertical"].right)
        > fmean(subtypes["crossing, vertical"].slip)
        > 17
    )


def test_the_slip_of_crossing_lines_is_the_answer_of_the_other_case(drawn_rows: list[Row]) -> None:
    """The picture decides: the teacher works out both cases alike, with the same numbers."""
    crossing = [row for row in drawn_rows if row["meta"]["family"] == "crossing"]
    assert {row["meta"]["kind"] for row in crossing} == {"vertical", "supplementary"}
    for row in crossing:
        assert grade(row["meta"]["slip"], str(180 - int(row["answer"]))).verdict == "correct", row[
            "id"
        ]
