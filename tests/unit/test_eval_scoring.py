"""The score of a predictions file: counts, groups, intervals, and what is said about a file that is wrong."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from adora_vl.errors import UserError
from eval.command import score_file
from eval.geometry3k.benchmark import BENCHMARK
from eval.geometry3k.scoring import answer_form, grade_row
from eval.predictions import IMAGE_FAILED, read_predictions
from eval.scoring import Graded, aggregate
from eval.statistics import wilson
from eval.table import table


def prediction(pid: str, response: str, answer: str = "5", **fields: Any) -> dict[str, Any]:
    row = {"pid": pid, "question": "Find x.", "answer": answer, "choices": None, "metadata": {"goal": "Length"}}
    return row | {"response": response, "finish_reason": "stop", "n_tokens": 10} | fields


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (Wilson without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_has_the_published_values(correct: int, total: int, low: float, high: float) -> None:
    assert wilson(correct, total) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_exact_at_the_ends_and_symmetric() -> None:
    assert wilson(0, 7)[0] == 0.0
    assert wilson(7, 7)[1] == 1.0
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize("where", ["system_prompt", "prompt"])
def test_an_answer_in_tags_counts_where_the_prompts_asked_for_them(where: str, tmp_path: Path) -> None:
    file = write(tmp_path / "predictions.jsonl", [prediction("1", "<answer>5</answer>"), prediction("2", r"\boxed{5}")])
    score = score_file(BENCHMARK, file, Namespace(rounding=False))
    assert score["correct"] == 1 and score["rules"] == {"rounding": False}
    fields = {"split": "test", "model": "m", "engine": "vllm", where: "{problem} Put it in <answer> </answer>."}
    (tmp_path / "fingerprint.json").write_text(json.dumps({"fields": fields}))
    score = score_file(BENCHMARK, file, Namespace(rounding=False))
    assert score["correct"] == 2 and score["rules"]["answer_tags"] and "in <answer> tags too" in table(score)


def test_aggregation_counted_by_hand() -> None:
    graded = [
        Graded("a", "correct", "5", "same_number", 10, {"goal": ["Angle"], "family": ["circle"]}),
        Graded("b", "correct", "6", "same_number", 20, {"goal": ["Length"]}),
        Graded("c", "wrong", "7", "different_number", 40, {"goal": ["Angle"]}),
        Graded("d", "unparseable", None, "no_box", 50, {"goal": ["Angle"]}),
        Graded("e", "failed", None, "broken", None, {"goal": ["Angle"]}),
        Graded("f", "wrong", "1", "gold_not_read", None, {}),
    ]
    score = aggregate(graded)
    assert (score["correct"], score["total"], score["accuracy"]) == (2, 6, pytest.approx(1 / 3))
    assert score["wilson_95"] == list(wilson(2, 6))
    assert {value: (cell["correct"], cell["total"]) for value, cell in score["groups"]["goal"].items()} == {
        "Angle": (1, 4),
        "Length": (1, 1),
    }
    assert score["groups"]["family"] == {
        "circle": {"correct": 1, "total": 1, "accuracy": 1.0, "wilson_95": list(wilson(1, 1))}
    }
    assert score["verdicts"] == {"correct": 2, "wrong": 2, "unparseable": 1, "failed": 1}


def test_a_file_is_graded_with_choices_groups_and_failures(tmp_path: Path) -> None:
    rows = [
        prediction("1", r"so \boxed{5}", metadata={"goal": "Angle", "family": "circle"}),
        prediction("2", r"\boxed{C}", choices=["3", "4", "5", "6"], finish_reason="length", n_tokens=30),
        prediction("3", r"\boxed{8.7}", answer=r"5 \sqrt { 3 }"),
        prediction("4", "", finish_reason=IMAGE_FAILED, n_tokens=0, error="UnidentifiedImageError: x"),
    ]
    path = write(tmp_path / "p.jsonl", rows)
    score = score_file(BENCHMARK, path, Namespace(rounding=False))
    assert [item["verdict"] for item in score["items"]] == ["correct", "correct", "wrong", "failed"]
    assert (score["correct"], score["total"]) == (2, 4)
    assert {value: cell["total"] for value, cell in score["groups"]["finish_reason"].items()} == {
        "stop": 2,
        "length": 1,
        IMAGE_FAILED: 1,
    }
    assert score["groups"]["answer_form"]["radical"]["total"] == 1
    assert score["fingerprint"] is None
    assert score["image_failed"] == 1
    assert score["tokens"]["correct"] == {"mean": 20.0, "median": 20.0, "p90": 30, "max": 30}
    assert score["tokens"]["wrong"]["mean"] == 10.0  # the problem that was never asked has no length
    assert (score["truncated"]["count"], score["truncated"]["total"]) == (1, 3)
    assert score_file(BENCHMARK, path, Namespace(rounding=True))["correct"] == 3
    shown = table(score)
    assert "2/4" in shown
    assert "1 problem not asked" in shown
    assert "1 answer cut off" in shown


def test_a_failed_image_is_never_graded() -> None:
    # Even if something that looks right stands in the response.
    assert grade_row(prediction("1", r"\boxed{5}", finish_reason=IMAGE_FAILED)).verdict == "failed"


@pytest.mark.parametrize(
    ("answer", "choices", "form"),
    [
        ("70", None, "integer"),
        ("-3", None, "integer"),
        ("8.66", None, "decimal"),
        (r"\frac { 39 } { 4 }", None, "fraction"),
        ("39/4", None, "fraction"),
        (r"2 \sqrt { 221 }", None, "radical"),
        (r"\frac{5\sqrt{3}}{2}", None, "radical"),
        (r"14 \pi", None, "pi"),
        ("C", ["1", "2", "3"], "letter"),
        ("C", None, "other"),
        ("3x+1", None, "other"),
    ],
)
def test_answer_form(answer: str, choices: list[str] | None, form: str) -> None:
    assert answer_form(answer, choices) == form


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"pid": "2", "answer": "5"}, "row 2 lacks the field 'response'; it has pid, answer"),
        ({"pid": "2", "answer": 5, "response": ""}, "row 2 has answer = 5, expected a string"),
        ({"pid": "2", "answer": "5", "response": "", "choices": "AB"}, "row 2 has choices = 'AB'"),
        ({"pid": "2", "answer": "5", "response": "", "metadata": [1]}, r"row 2 has metadata = \[1\]"),
        ({"pid": "1", "answer": "5", "response": ""}, "row 2 has the pid '1' of row 1"),
        ([1], "row 2 is a JSON list, expected an object"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, second: Any, message: str) -> None:
    path = write(tmp_path / "p.jsonl", [prediction("1", ""), second])
    with pytest.raises(UserError, match=message):
        read_predictions(path)


def test_missing_empty_and_broken_files_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        read_predictions(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text("")
    with pytest.raises(UserError, match="has no rows"):
        read_predictions(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text(json.dumps(prediction("1", "")) + '\n{"pid": "2", "ans\n')
    with pytest.raises(UserError, match="row 2 is not JSON"):
        read_predictions(tmp_path / "p.jsonl")


def test_a_line_separator_inside_a_response_does_not_split_its_row(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd"
    (tmp_path / "p.jsonl").write_text(json.dumps(prediction("1", text), ensure_ascii=False) + "\n")
    assert [row["response"] for row in read_predictions(tmp_path / "p.jsonl")] == [text]
