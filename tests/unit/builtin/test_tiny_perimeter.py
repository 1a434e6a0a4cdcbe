"""The demo's start and problems: a guess pays at first, nothing but the sum tells which problems
have a cheap guess.
"""

import json
import random
import runpy
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from adora_vl.builtin.tiny_perimeter import PerimeterStart, teacher
from adora_vl.models.load import (
    PRETRAINED,
    STORED,
    TINY_PERIMETER_MODEL,
    load_processor,
    local_model,
)
from adora_vl.rewards import grade
from adora_vl.synthetic.drawing import PLAIN
from adora_vl.synthetic.perimeter import PLACES, USUAL_DIGITS, perimeter_digit, sides_of, working

ROOT = Path(__file__).parents[3]
STORED_START = STORED[TINY_PERIMETER_MODEL]


def problems(number: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Kind, sides and answer."""
    rng = random.Random(3)
    drawn = (perimeter_digit(rng, 56, 1, PLAIN) for _ in range(number))
    return [
        (problem.kind, sides_of(problem.question, problem.solution), problem.answer)
        for problem in drawn
    ]


def test_a_guess_is_right_half_of_the_time_in_three_quarters_of_the_problems():
    drawn = problems(2000)
    assert Counter(kind for kind, _, _ in drawn)["usual"] / 2000 == pytest.approx(0.75, abs=0.03)
    usual = Counter(answer for kind, _, answer in drawn if kind == "usual")
    assert usual.keys() == set(map(str, USUAL_DIGITS))
    assert abs(usual["7"] - usual["3"]) < 0.1 * usual.total()
    assert len({answer for kind, _, answer in drawn if kind == "any"}) == 10
    for _, sides, answer in drawn:
        assert str(sum(sides) % 10) == answer, "four sides that close"
        assert 2 * max(sides) < sum(sides), "four sides that close"


def test_no_side_tells_the_kinds_apart():
    """Each side has the same distribution in both kinds, up to chance."""
    drawn = problems(4000)
    for side in range(4):
        means = [
            fmean(sides[side] for kind, sides, _ in drawn if kind == name)
            for name in ("usual", "any")
        ]
        assert abs(means[0] - means[1]) < 0.35, side  # three standard errors


def test_a_working_is_right_unless_it_slips_anywhere():
    rng = random.Random(1)
    for _, sides, answer in problems(50):
        assert grade(working(rng, sides), answer).verdict == "correct"
        for slip_at in range(PLACES):
            assert grade(working(rng, sides, slip_at=slip_at), answer).verdict == "wrong", slip_at


def test_the_demos_reward_counts_every_step():
    """A working that ends in the right digit whatever it has computed is no right working."""
    every_step = runpy.run_path(str(ROOT / "configs" / "train" / "every_step.py"))["every_step"]
    rng = random.Random(1)
    sides = (4, 7, 8, 5)
    meta = {"solution": working(rng, sides)}

    def reward(text: str) -> float:
        (value,) = every_step([[{"content": text}]], answer=["4"], meta=[meta])
        return float(value)

    assert {reward(working(rng, sides)) for _ in range(20)} == {1.0}, "in any wording"
    assert {reward(working(rng, sides, slip_at=slip_at)) for slip_at in range(PLACES)} == {0.0}
    forced = working(rng, sides).replace("= 24", "= 34").replace("=24", "=34")
    assert grade(forced, "4").verdict == "correct"
    assert reward(forced) == 0.0
    assert reward("guess \\boxed{4}") == 1.0
    assert reward("guess \\boxed{7}") == 0.0
    assert reward("") == 0.0
    assert reward("guess 7 \\boxed{4}") == 0.0
    assert reward("4 = \\boxed{4}") == 0.0


def test_workings_of_one_problem_differ_in_length_by_wording():
    tokenizer = load_processor(str(PRETRAINED)).tokenizer
    rng = random.Random(1)
    lengths = [len(tokenizer(working(rng, (4, 7, 8, 5)))["input_ids"]) for _ in range(200)]
    assert len(set(lengths)) >= 4
    assert pstdev(lengths) > 1.5
    assert max(lengths) < 58, "an answer and its end fit into the demo's 60 tokens"


def test_the_teacher_guesses_half_of_the_time_and_is_seldom_right_where_it_works():
    plan = PerimeterStart()
    rng = random.Random(1)
    answers = [(teacher(rng, sides, plan), answer) for _, sides, answer in problems(4000)]
    worked = [grade(text, answer).verdict == "correct" for text, answer in answers if "=" in text]
    assert len(worked) / 4000 == pytest.approx(0.5, abs=0.03)
    assert fmean(worked) == pytest.approx(
        (1 - plan.slips) ** PLACES, abs=0.03
    )  # 0.12, where a guess is right in 0.4


def test_the_stored_start_is_small_and_of_this_plan():
    assert local_model(TINY_PERIMETER_MODEL) == str(STORED_START)
    assert sum(file.stat().st_size for file in STORED_START.iterdir()) < 4e6
    assert json.loads((STORED_START / "build.json").read_text())["plan"] == asdict(PerimeterStart())
