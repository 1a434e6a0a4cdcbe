"""We-Math: the diagnosis by hand, both rules, and the data as hub and repository have it."""

from functools import partial
from itertools import product
from typing import Any

import pytest

from eval.command import parse_command
from eval.wemath import BENCHMARK, diagnose, official_letter
from tests.support import benchmark_data
from tests.support.benchmark_data import wemath_rows, write_wemath

score_as_command = partial(benchmark_data.score_predictions, BENCHMARK)
OPTIONS_TEXT = "A. 300, 400;B．②;C. 3000; D. Cannot be determined; E. No correct answer"


def prediction(number: int, ID: str, key: str, response: str, **fields: Any) -> dict[str, Any]:
    """Return a row of predictions on a question of WeMath, whose right option is B."""
    row_fields = {
        "question number": number,
        "ID": ID,
        "key": key,
        "knowledge concept": "Angles",
        "question": "Which?",
    }
    return {**row_fields, "option": OPTIONS_TEXT, "answer": "B", "response": response, **fields}


def composite_problem(ID: str, pattern: str, first_number: int) -> list[dict[str, Any]]:
    """The rows of one problem: a letter per step and for the whole, `1` right and `0` wrong."""
    steps = len(pattern) - 1
    keys = [f"{steps}steps_{step}" for step in range(1, steps + 1)]
    keys.append(f"{steps}steps_multi")
    rows = []
    for number, (key, letter) in enumerate(zip(keys, pattern, strict=True), first_number):
        response = r"\boxed{B}" if letter == "1" else r"\boxed{A}"
        rows.append(prediction(number, ID, key, response))
    return rows


def right_and_total(cells: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the right answers and all answers of each cell of a score."""
    return {name: (cell["correct"], cell["total"]) for name, cell in cells.items()}


def diagnose_both(steps: list[bool], is_whole_right: bool) -> tuple[str, str]:
    """Return the strict and the loose diagnosis of a problem with right and wrong steps."""
    strict = diagnose(steps, is_whole_right, strict=True)
    loose = diagnose(steps, is_whole_right, strict=False)
    return strict, loose


def test_every_pattern_of_steps_has_its_place():
    """We-Math diagnoses a problem by which of its steps are right, and whether the whole is.

    The diagnosis is complete mastery (CM), rote memorization (RM), inadequate generalization (IG)
    or insufficient knowledge (IK). The loose diagnosis counts a right whole as mastery if any step
    is right, and the strict one only if all steps are.
    """
    # By pattern: 1 for right, for each of two steps and the whole. (strict, loose) diagnosis
    expected = {
        "111": ("CM", "CM"),
        "101": ("RM", "CM"),
        "011": ("RM", "CM"),
        "001": ("RM", "RM"),
        "110": ("IG", "IG"),
        "100": ("IK", "IK"),
        "010": ("IK", "IK"),
        "000": ("IK", "IK"),
    }
    results = {}
    for first_right, second_right, whole_right in product((True, False), repeat=3):
        bits = [int(first_right), int(second_right), int(whole_right)]
        pattern = "".join(map(str, bits))
        results[pattern] = diagnose_both([first_right, second_right], whole_right)
    assert results == expected
    # three steps
    assert diagnose_both([True, False, False], is_whole_right=True) == ("RM", "CM")
    assert diagnose([False] * 3, True, strict=False) == "RM"
    assert diagnose([True] * 3, False, strict=True) == "IG"


def test_the_scores_of_wemath_are_those_computed_by_hand(tmp_path, capsys):
    """Ten problems have the diagnoses and the scores that are computed by hand.

    Five are of two steps, and five of three. Each is a pattern with a digit for each step and a
    last one for the whole; 1 is right.
    """
    patterns = ["111", "101", "001", "110", "100", "1111", "1001", "0001", "1110", "0000"]
    rows = []
    for index, pattern in enumerate(patterns):
        rows += composite_problem(f"p{index}", pattern, 10 * index)
    result = score_as_command(tmp_path, rows)
    assert right_and_total(result["diagnosis"]) == {
        "IK": (2, 10),
        "IG": (2, 10),
        "CM_strict": (2, 10),
        "RM_strict": (4, 6),
        "CM_loose": (4, 10),
        "RM_loose": (2, 6),
    }
    # CM counts 1 and IG a half
    assert result["score"]["strict"]["accuracy"] == pytest.approx((2 + 0.5 * 2) / 10)
    assert result["score"]["loose"]["accuracy"] == pytest.approx((4 + 0.5 * 2) / 10)
    assert right_and_total(result["groups"]["steps"]) == {
        "one step": (13, 25),
        "two steps": (3, 5),
        "three steps": (3, 5),
    }
    low, high = result["score"]["strict"]["interval_95"]
    assert low < 0.3 < high
    output = capsys.readouterr().out
    assert f" 30.0 [{100 * low:.1f}, {100 * high:.1f}]" in output
    assert "We-Math's score, strict: 30.0 % (95 %: " in output
    assert "loose: 50.0 %" in output


def test_a_score_without_a_right_answer_has_an_interval(tmp_path, capsys):
    """A score of 0 % for two problems has Wilson's interval, which goes up to 65.8 %."""
    score_as_command(
        tmp_path,
        composite_problem("p0", pattern="000", first_number=0)
        + composite_problem("p1", pattern="0000", first_number=10),
    )
    assert "We-Math's score, strict: 0.0 % (95 %: 0.0 to 65.8)" in capsys.readouterr().out


def test_equal_samples_of_a_problem_make_no_interval_narrower(tmp_path, capsys):
    """Four equal answers to each of three problems have the interval of one answer each."""
    rows = (
        composite_problem("p0", pattern="111", first_number=0)
        + composite_problem("p1", pattern="000", first_number=10)
        + composite_problem("p2", pattern="110", first_number=20)
    )
    printed_lines = []
    for samples in (1, 4):
        repeated = [{**row, "sample": sample} for sample in range(samples) for row in rows]
        score_as_command(tmp_path, repeated)
        output_lines = capsys.readouterr().out.splitlines()
        printed_lines.append([line for line in output_lines if line.startswith("We-Math's score")])
    assert printed_lines[0] == printed_lines[1]


def test_the_interval_of_a_diagnosis_has_its_share_in_it(tmp_path):
    """An interval of rote memorization (RM) ends at 100 % where its only sample counts as such.

    RM is a share of the samples whose whole is right, here one of five samples of a problem.
    """
    rows = []
    for sample, pattern in enumerate(("001", "110", "000", "110", "000")):
        rows += [
            {**row, "sample": sample}
            for row in composite_problem("p0", pattern=pattern, first_number=0)
        ]
    cell = score_as_command(tmp_path, rows)["diagnosis"]["RM_strict"]
    assert (cell["correct"], cell["total"]) == (1, 1)
    low, high = cell["interval_95"]
    assert 0 < low < high == 1


def test_a_problem_that_lacks_a_step_is_left_out_of_the_diagnosis_and_said(tmp_path, capsys):
    """A problem without an answer to a step is left out of the diagnosis, and a warning says so.

    The second problem has three of its four rows, as where a run was limited.
    """
    rows = (
        composite_problem("p0", pattern="111", first_number=0)
        + composite_problem("p1", pattern="0000", first_number=10)[:3]
    )
    result = score_as_command(tmp_path, rows)
    assert result["diagnosis"]["IK"]["total"] == 1
    assert result["score"]["strict"]["accuracy"] == 1
    assert (
        "warning: 1 problem without an answer to every step and the whole, left out"
        in capsys.readouterr().out
    )
    result = score_as_command(tmp_path, rows[:2])
    assert result["score"]["strict"] is None
    assert "diagnosis" not in result


def test_both_rules_read_the_official_form_and_only_ours_reads_a_box(tmp_path):
    """Both rules read We-Math's own form of an answer, and only ours reads a box; B is right."""
    cases = {  # response: right by the official rules, and by ours
        "<Thought process>: <<A is 3 < 5>> <Answer>: <<B>>": (True, True),
        "<Answer>: <B. ②>": (True, True),
        "<Thought process>: <<AB is\nthe longer>> <Answer>: <<B. AB > CD>>": (True, True),
        "<Thought process>: <<by eye <Answer>: <<B. <>>": (True, True),
        "Answer: B": (True, True),
        r"The side is 3, so \boxed{B}": (False, True),
        "B": (True, True),
        "<Thought process>: <<B>> <Answer>: <<C>>": (False, False),
        "": (False, False),
    }
    rows = [
        prediction(number, f"p{number}", "2steps_1", response)
        for number, response in enumerate(cases)
    ]
    for position, rules in enumerate(("official", "letter")):
        items = score_as_command(tmp_path, rows, "--rules", rules)["items"]
        are_right = [item["verdict"] == "correct" for item in items]
        expected = [right_by_rules[position] for right_by_rules in cases.values()]
        assert are_right == expected, rules
    assert official_letter("By the Answer key: I say so") is None, (
        "its first character is no letter from A to H"
    )


def test_the_data_of_the_hub_and_of_the_repository_are_asked_alike(tmp_path):
    """We-Math asks the same from Parquet, as on the hub, and from the repository's JSON."""
    rows = wemath_rows(7)
    for form in ("parquet", "json"):
        folder = write_wemath(tmp_path / form, rows, form)
        arguments = ["infer", "--model", "m", "--data", str(folder), "--output", "o"]
        problems = BENCHMARK.load(parse_command(arguments, BENCHMARK).ask_options.data).problems
        assert [problem.pid for problem in problems] == ["1", "2", "3", "4", "5", "6", "7"]
        keys = [problem.fields["key"] for problem in problems]
        assert keys[2:5] == ["2steps_multi", "3steps_1", "3steps_2"]
        question = rows[0]["question"]
        option = rows[0]["option"]
        assert f"Question: {question}\nOption: {option}\n" in problems[0].prompt
        assert problems[6].images()[0].size == (56, 56)
