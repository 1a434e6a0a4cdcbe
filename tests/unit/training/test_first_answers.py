"""The warning about a first generation in which no rollout is right."""

from typing import Any

import pytest
import torch

from adora_vl.training.first_answers import FirstAnswers
from adora_vl.training.rollout_facts import RolloutFacts
from tests.support.facts import rollout_facts

ROWS: list[Any] = [{"answer": "so B is right.Answer:B"}] * 2 + [{"answer": "50"}] * 2
ALL_WRONG_VERDICTS = ["wrong"] * 4


def facts_of_verdicts(verdicts: list[str]) -> RolloutFacts:
    """Return facts of four rollouts with these verdicts of the grader, and why it gave them.

    `verdicts`: one for each rollout; empty as for a reward that gives none.
    """
    extra = {
        "verdict": verdicts,
        "extracted": ["B", "A", None, "49"],
        "reason": ["letter_without_choice", "not_a_number", "no_box", "different_number"],
    }
    return rollout_facts(torch.zeros(4, 1), extra_columns=extra)


def test_reference_answers_stand_beside_what_was_read_where_nothing_is_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If all rollouts of the first generation are wrong, the user sees why for each problem."""
    FirstAnswers().warn_if_none_is_right(ROWS, facts_of_verdicts(ALL_WRONG_VERDICTS))
    printed = capsys.readouterr().err.splitlines()
    # A headline, then one line for each of the two problems.
    assert "none of the first 4 rollouts is right" in printed[0]
    assert "so B is right.Answer:B" in printed[1]
    assert "letter_without_choice" in printed[1]
    assert "50" in printed[2]
    assert "no answer (no_box)" in printed[2]
    assert len(printed) == 3, "each reference answer is shown once"


def test_nothing_is_said_of_a_right_rollout_of_later_generations_or_without_a_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no warning if one rollout is right, in a later generation, or without verdicts."""
    one_is_right = facts_of_verdicts(["wrong", "wrong", "wrong", "correct"])
    FirstAnswers().warn_if_none_is_right(ROWS, one_is_right)
    second_generation_wrong = FirstAnswers()
    second_generation_wrong.warn_if_none_is_right(ROWS, one_is_right)
    second_generation_wrong.warn_if_none_is_right(ROWS, facts_of_verdicts(ALL_WRONG_VERDICTS))
    FirstAnswers().warn_if_none_is_right(ROWS, facts_of_verdicts([]))
    assert capsys.readouterr().err == ""
