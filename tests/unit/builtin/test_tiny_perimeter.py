"""The demo's first model and its problems: a guess pays at first, and only the sum of the sides
tells which problems can be guessed.
"""

import json
import random
import runpy
from collections import Counter
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import NamedTuple

import pytest

from adora_vl.builtin.tiny_perimeter import PerimeterStart, teacher
from adora_vl.models.load import (
    FOLDER_BY_TINY_MODEL,
    PRETRAINED_FOLDER,
    TINY_PERIMETER_MODEL,
    load_processor,
    resolve_model_name,
)
from adora_vl.rewards import grade
from adora_vl.synthetic.drawing import PLAIN_STYLE
from adora_vl.synthetic.perimeter import (
    USUAL_DIGITS,
    WORKING_STEPS,
    perimeter_digit,
    sides_in_problem,
    write_working,
)
from tests.support.paths import REPOSITORY

STORED_START = FOLDER_BY_TINY_MODEL[TINY_PERIMETER_MODEL]


class PerimeterProblem(NamedTuple):
    """A problem that asks for the last digit of a perimeter."""

    kind: str  # "usual": the answer is one of two digits; "any": it is any digit
    sides: tuple[int, ...]
    answer: str


def draw_problems(count: int) -> list[PerimeterProblem]:
    """Draw problems, the same in every call."""
    rng = random.Random(3)
    problems = []
    for _ in range(count):
        problem = perimeter_digit(rng, 56, 1, PLAIN_STYLE)
        sides = sides_in_problem(problem.question, problem.solution)
        problems.append(PerimeterProblem(problem.kind, sides, problem.answer))
    return problems


def test_a_guess_is_right_half_of_the_time_in_three_quarters_of_the_problems():
    problems = draw_problems(2000)
    usual_answers = Counter(problem.answer for problem in problems if problem.kind == "usual")
    other_answers = {problem.answer for problem in problems if problem.kind == "any"}
    assert usual_answers.total() / len(problems) == pytest.approx(0.75, abs=0.03)
    assert usual_answers.keys() == set(map(str, USUAL_DIGITS))
    assert abs(usual_answers["7"] - usual_answers["3"]) < 0.1 * usual_answers.total()
    assert len(other_answers) == 10
    for problem in problems:
        perimeter = sum(problem.sides)
        assert str(perimeter % 10) == problem.answer
        assert 2 * max(problem.sides) < perimeter, "the sides close to a figure"


@pytest.mark.slow
def test_no_side_tells_the_kinds_apart():
    """Each side has the same distribution in both kinds, up to chance."""
    problems = draw_problems(4000)
    for side in range(4):
        usual_mean = fmean(problem.sides[side] for problem in problems if problem.kind == "usual")
        other_mean = fmean(problem.sides[side] for problem in problems if problem.kind == "any")
        assert abs(usual_mean - other_mean) < 0.35, side  # three standard errors


def test_a_working_is_right_unless_it_slips_anywhere():
    rng = random.Random(1)
    for _, sides, answer in draw_problems(50):
        assert grade(write_working(rng, sides), answer).verdict == "correct"
        for slip_at in range(WORKING_STEPS):
            wrong_working = write_working(rng, sides, slip_at=slip_at)
            assert grade(wrong_working, answer).verdict == "wrong", slip_at


def test_the_demos_reward_counts_every_step():
    """A working with a wrong step gets no reward, though it ends in the right digit."""
    reward_file = REPOSITORY / "configs" / "train" / "every_step.py"
    every_step = runpy.run_path(str(reward_file))["every_step"]
    rng = random.Random(1)
    sides = (4, 7, 8, 5)
    meta = {"solution": write_working(rng, sides)}

    def reward(text: str) -> float:
        """Return the demo's reward for a response to the problem with these sides."""
        (value,) = every_step([[{"content": text}]], answer=["4"], meta=[meta])
        return float(value)

    for _ in range(20):
        assert reward(write_working(rng, sides)) == 1.0, "in any wording"
    for slip_at in range(WORKING_STEPS):
        assert reward(write_working(rng, sides, slip_at=slip_at)) == 0.0
    # The sum is wrong, but its last digit is right.
    wrong_sum = write_working(rng, sides).replace("= 24", "= 34").replace("=24", "=34")
    assert grade(wrong_sum, "4").verdict == "correct"
    assert reward(wrong_sum) == 0.0
    assert reward("guess \\boxed{4}") == 1.0
    assert reward("guess \\boxed{7}") == 0.0
    assert reward("") == 0.0
    assert reward("guess 7 \\boxed{4}") == 0.0
    assert reward("4 = \\boxed{4}") == 0.0


def test_workings_of_one_problem_differ_in_length_by_wording():
    tokenizer = load_processor(str(PRETRAINED_FOLDER)).tokenizer
    rng = random.Random(1)
    lengths = [len(tokenizer(write_working(rng, (4, 7, 8, 5)))["input_ids"]) for _ in range(200)]
    assert len(set(lengths)) >= 4
    assert pstdev(lengths) > 1.5
    assert max(lengths) < 58, "an answer and its end fit into the demo's 60 tokens"


@pytest.mark.slow
def test_the_teacher_guesses_half_of_the_time_and_is_seldom_right_where_it_works():
    plan = PerimeterStart()
    rng = random.Random(1)
    is_right_by_working = []  # of the teacher's workings, which have an equation
    for _, sides, answer in draw_problems(4000):
        text = teacher(rng, sides, plan)
        if "=" in text:
            is_right_by_working.append(grade(text, answer).verdict == "correct")
    assert len(is_right_by_working) / 4000 == pytest.approx(0.5, abs=0.03)
    expected_share = (1 - plan.slips) ** WORKING_STEPS  # 0.12, where a guess is right in 0.4
    assert fmean(is_right_by_working) == pytest.approx(expected_share, abs=0.03)


def test_the_stored_start_is_small_and_of_this_plan():
    assert resolve_model_name(TINY_PERIMETER_MODEL) == str(STORED_START)
    assert sum(file.stat().st_size for file in STORED_START.iterdir()) < 4e6
    assert json.loads((STORED_START / "build.json").read_text())["plan"] == asdict(PerimeterStart())
