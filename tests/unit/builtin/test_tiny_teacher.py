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
from typing import Any, NamedTuple

import pytest
import torch

from adora_vl.advantage import Groups, weigh_groups
from adora_vl.builtin.processor import END_OF_TURN
from adora_vl.builtin.tiny_vl import SLIP_SHARE_BY_FAMILY
from adora_vl.data.dataset import Row
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.rewards import grade
from adora_vl.synthetic.generate import generate

ROW_COUNT = 600  # drawn problems, over all families
GROUP_SIZE = 8  # the demo's rollouts per prompt
# The families of problems, divided by kind where a family has several.
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
    """The lengths of a subtype's answers in tokens, and which of its groups would be attenuated.

    A group of answers to one problem is mixed if some are right and others wrong. ADORA gives an
    attenuated group, called TDS, a weight of 0.1 in place of 1.
    """

    right_lengths: list[int] = field(default_factory=list)
    wrong_lengths: list[int] = field(default_factory=list)
    is_attenuated_by_group: list[bool] = field(default_factory=list)  # mixed groups alone

    @property
    def attenuated_share(self) -> float:
        return fmean(self.is_attenuated_by_group)


class TeacherAnswers(NamedTuple):
    """The two answers that the tiny model's teacher has to a problem: a right and a wrong one."""

    subtype: SubtypeFigures
    wrong_share: float  # how often the teacher gives the wrong answer
    right_reward: float
    wrong_reward: float


def measure_subtypes(tokenizer: Any, rows: list[Row]) -> dict[str, SubtypeFigures]:
    """Measure which groups of each subtype the demo's criterion, the length of answers, attenuates.

    A group has `GROUP_SIZE` answers by the teacher, whose lengths are drawn from those of all
    answers to its subtype. `SLIP_SHARE_BY_FAMILY` says how often the teacher answers wrong in each
    family.
    """
    subtypes: dict[str, SubtypeFigures] = defaultdict(SubtypeFigures)
    answers_by_problem: list[TeacherAnswers] = []
    for row in rows:
        meta = row["meta"]
        subtype = subtypes[", ".join(filter(None, (meta["family"], meta["kind"])))]
        right_solution = meta["solution"]
        wrong_solution = meta["slip"]
        subtype.right_lengths.append(len(tokenizer(right_solution + END_OF_TURN)["input_ids"]))
        subtype.wrong_lengths.append(len(tokenizer(wrong_solution + END_OF_TURN)["input_ids"]))
        answers_by_problem.append(
            TeacherAnswers(
                subtype=subtype,
                wrong_share=SLIP_SHARE_BY_FAMILY[meta["family"]],
                right_reward=reward_in_demo(right_solution, row["answer"]),
                wrong_reward=reward_in_demo(wrong_solution, row["answer"]),
            )
        )
    rng = random.Random(0)
    for answers in answers_by_problem:
        subtype = answers.subtype
        is_wrong = [rng.random() < answers.wrong_share for _ in range(GROUP_SIZE)]
        lengths = []
        rewards = []
        for wrong in is_wrong:
            lengths.append(rng.choice(subtype.wrong_lengths if wrong else subtype.right_lengths))
            rewards.append(answers.wrong_reward if wrong else answers.right_reward)
        lengths_PG = torch.tensor([lengths])
        group = Groups(
            rewards_PG=torch.tensor([rewards]),
            lengths_PG=lengths_PG,
            truncated_PG=torch.zeros_like(lengths_PG, dtype=torch.bool),
        )
        is_mixed = len(set(rewards)) > 1
        if is_mixed:
            subtype.is_attenuated_by_group.append(bool(weigh_groups(group).tds_P.item()))
    return subtypes


def reward_in_demo(solution: str, gold: str) -> float:
    """Return the reward that the demo gives a boxed answer: 1 if it is right, else 0.1."""
    return 1.0 if grade(solution, gold).verdict == "correct" else 0.1


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_processor(str(PRETRAINED_FOLDER)).tokenizer


@pytest.fixture(scope="module")
def drawn_rows() -> list[Row]:
    return list(generate(ROW_COUNT, seed=1000))


def test_the_criterion_marks_no_subtype_at_the_start(tokenizer: Any, drawn_rows: list[Row]) -> None:
    subtypes = measure_subtypes(tokenizer, drawn_rows)
    assert subtypes.keys() == EXPECTED_SUBTYPES
    for name, subtype in subtypes.items():
        # With fewer mixed groups than these the share would mean nothing.
        assert len(subtype.is_attenuated_by_group) >= 20, name
        assert subtype.attenuated_share <= MOST_ATTENUATED_SHARE, name
        # Two answers differ by a token at least. More than one apart in the mean is no accident of
        # the digits.
        assert fmean(subtype.right_lengths) > fmean(subtype.wrong_lengths) + 1, name
    vertical_angles = subtypes["crossing, vertical"]
    assert fmean(vertical_angles.right_lengths) > fmean(vertical_angles.wrong_lengths) > 17


def test_the_slip_of_crossing_lines_is_the_answer_of_the_other_case(drawn_rows: list[Row]) -> None:
    """The picture decides: the teacher works out both cases alike, with the same numbers."""
    crossing = [row for row in drawn_rows if row["meta"]["family"] == "crossing"]
    assert {row["meta"]["kind"] for row in crossing} == {"vertical", "supplementary"}
    for row in crossing:
        assert grade(row["meta"]["slip"], str(180 - int(row["answer"]))).verdict == "correct", row[
            "id"
        ]
