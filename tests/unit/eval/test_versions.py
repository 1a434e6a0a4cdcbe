"""Benchmarks that ask several versions of one problem have intervals over the problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals.records import Benchmark
from eval.compare import main as compare
from eval.dynamath import BENCHMARK as DYNAMATH
from eval.mathverse import BENCHMARK as MATHVERSE
from eval.mathverse import PROBLEM_VERSIONS
from eval.problems import BENCHMARK as PROBLEMS
from eval.wemath import BENCHMARK as WEMATH
from tests.support.benchmark_data import score_predictions

N_PROBLEMS = 12


def is_solved(problem: int) -> bool:
    """Return whether all versions of a problem are solved in these predictions, or none is."""
    return problem % 3 == 0


def mathverse_rows() -> list[dict[str, Any]]:
    """Five versions with a picture of each problem."""
    fields = {"question": "?", "answer": "9", "question_type": "free-form", "metadata": {}}
    rows: list[dict[str, Any]] = []
    for problem in range(N_PROBLEMS):
        response = r"\boxed{9}" if is_solved(problem) else r"\boxed{8}"
        for version in PROBLEM_VERSIONS[:5]:
            ids = {"sample_index": len(rows), "problem_index": str(problem)}
            rows.append({**fields, **ids, "problem_version": version, "response": response})
    return rows


def dynamath_rows() -> list[dict[str, Any]]:
    """Five variants of each problem."""
    fields = {"question": "?", "answer": "5", "answer_type": "float", "subject": "a", "level": "b"}
    rows = []
    for problem in range(N_PROBLEMS):
        response = json.dumps({"short answer": "5" if is_solved(problem) else "6"})
        for variant in range(1, 6):
            pid = f"sample_variant{variant}/{problem}"
            rows.append({**fields, "pid": pid, "response": response})
    return rows


def wemath_rows() -> list[dict[str, Any]]:
    """Return two steps and the whole of each problem."""
    fields = {"knowledge concept": "Angles", "question": "?", "option": "A. 1; B. 2", "answer": "B"}
    rows: list[dict[str, Any]] = []
    for problem in range(N_PROBLEMS):
        response = r"\boxed{B}" if is_solved(problem) else r"\boxed{A}"
        for key in ("2steps_1", "2steps_2", "2steps_multi"):
            ids = {"question number": len(rows), "ID": f"2steps_{problem}", "key": key}
            rows.append({**fields, **ids, "response": response})
    return rows


def variant_rows() -> list[dict[str, Any]]:
    """Each problem of a prepared data set and two variants of it."""
    rows = []
    for problem in range(N_PROBLEMS):
        response = r"\boxed{5}" if is_solved(problem) else r"\boxed{6}"
        for ending in ("", "~1", "~2"):
            pid = f"mine/test/{problem}{ending}"
            rows.append({"pid": pid, "question": "?", "answer": "5", "response": response})
    return rows


def checklist_rows() -> list[dict[str, Any]]:
    """Three questions on the marks in each picture."""
    rows = []
    for row in variant_rows():
        pid, _, ending = row["pid"].partition("~")
        fields = {"pid": f"{pid}#{ending or 3}", "metadata": {"family": "checklist"}}
        rows.append(row | fields)
    return rows


CASES = {  # a benchmark, its predictions, and how many versions of a problem they have
    "mathverse": (MATHVERSE, mathverse_rows, 5),
    "dynamath": (DYNAMATH, dynamath_rows, 5),
    "wemath": (WEMATH, wemath_rows, 3),
    "variants": (PROBLEMS, variant_rows, 3),
    "checklist": (PROBLEMS, checklist_rows, 3),
}


def score_in(
    folder: Path, benchmark: Benchmark, rows: list[dict[str, Any]], name: str
) -> dict[str, Any]:
    """Score rows, and keep the score file as `NAME.json`."""
    score = score_predictions(benchmark, folder, rows)
    (folder / f"{name}.json").write_text(json.dumps(score))
    return score


@pytest.mark.parametrize("name", CASES)
def test_versions_that_are_right_together_are_worth_one_answer(name, tmp_path) -> None:
    """The interval over all versions is as wide as that over one version of each problem."""
    benchmark, make_rows, n_versions = CASES[name]
    rows = make_rows()
    score = score_in(tmp_path, benchmark, rows, "all")
    # The first version of each problem alone.
    first_score = score_in(tmp_path, benchmark, rows[::n_versions], "first")
    assert score["total"] == n_versions * N_PROBLEMS
    assert score["accuracy"] == first_score["accuracy"] == pytest.approx(1 / 3)
    assert score["interval_95"] == pytest.approx(first_score["interval_95"])
    problems = {item["problem"] for item in score["items"]}
    assert len(problems) == N_PROBLEMS


@pytest.mark.parametrize("name", CASES)
def test_runs_are_compared_over_the_problems_and_not_their_versions(name, tmp_path, capsys) -> None:
    """A comparison counts problems, and has no McNemar test, for which versions are no pairs."""
    benchmark, make_rows, n_versions = CASES[name]
    rows = make_rows()
    score_in(tmp_path, benchmark, rows, "before")
    # Two problems more are solved in all their versions.
    right_response = rows[0]["response"]
    items_after = [
        {**row, "response": right_response} if n_versions <= number < 3 * n_versions else row
        for number, row in enumerate(rows)
    ]
    score_in(tmp_path, benchmark, items_after, "after")
    capsys.readouterr()
    assert compare([str(tmp_path / "before.json"), str(tmp_path / "after.json")]) == 0
    text = capsys.readouterr().out
    n_rows = n_versions * N_PROBLEMS
    assert f"12 common problems in {n_rows} versions" in text
    # 2 of the 12 problems
    assert "+16.7 points, 95 % [+0.0, " in text, "as independent pairs they would exclude 0"
    assert "so no McNemar test" in text
