"""Predictions of other programs as tables: they score as the same rows do line by line."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from adora_vl.evals.inference.predictions import read_predictions
from adora_vl.utils.errors import UserError
from eval.mathvista import BENCHMARK
from tests.support import benchmark_data

# In the form of VLMEvalKit's MathVista_MINI: the groups are columns, and lists are printed.
TABLE_ROWS: list[dict[str, Any]] = [
    {
        "index": "7",
        "question": "How long is AB?",
        "question_type": "free_form",
        "answer_type": "float",
        "precision": "1.0",
        "choices": "",
        "answer": "1.2",
        "task": "geometry problem solving",
        "skills": "['geometry reasoning', 'algebraic reasoning']",
        "prediction": "AB is 1.2",
    },
    {
        "index": "8",
        "question": "Which triangle is larger?",
        "question_type": "multi_choice",
        "answer_type": "text",
        "precision": "",
        "choices": "['ABC', 'DEF']",
        "answer": "DEF",
        "task": "geometry problem solving",
        "skills": "['geometry reasoning']",
        "prediction": "(B)",
    },
    {
        "index": "9",
        "question": "How many sides?",
        "question_type": "free_form",
        "answer_type": "integer",
        "precision": "",
        "choices": "",
        "answer": "5",
        "task": "geometry problem solving",
        "skills": "['geometry reasoning']",
        "prediction": "",
    },
]
COLUMN_WORDS = ["--columns", "pid=index", "response=prediction"]


def write_as_json_lines(path: Path) -> None:
    """Write the same rows line by line, with lists and objects as JSON has them."""
    lines = []
    for row in TABLE_ROWS:
        skills = json.loads(row["skills"].replace("'", '"'))
        choices = json.loads(row["choices"].replace("'", '"')) if row["choices"] else None
        precision = float(row["precision"]) if row["precision"] else None
        metadata = {"task": row["task"], "skills": skills}
        fields = {"choices": choices, "precision": precision, "metadata": metadata}
        lines.append(json.dumps({**row, **fields}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def score_figures(path: Path, folder: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the hits, the problems and the groups by task and skill of a predictions file."""
    score = benchmark_data.score_predictions(BENCHMARK, folder, path, *COLUMN_WORDS)
    groups = {name: score["groups"][name] for name in ("task", "skills")}
    return score["correct"], score["total"], groups


@pytest.mark.parametrize("suffix", [".xlsx", ".tsv", ".csv"])
def test_a_table_scores_as_the_same_rows_line_by_line(tmp_path: Path, suffix: str) -> None:
    """A workbook or a table with tabs or commas has three rows, of which two answers are right."""
    table_file = tmp_path / f"Model_MathVista_MINI{suffix}"
    frame = pd.DataFrame(TABLE_ROWS)
    if suffix == ".xlsx":
        frame.to_excel(table_file, index=False)
    else:
        frame.to_csv(table_file, index=False, sep="\t" if suffix == ".tsv" else ",")
    json_lines_file = tmp_path / "lines.jsonl"
    write_as_json_lines(json_lines_file)
    figures_of_table = score_figures(table_file, tmp_path / "table")
    correct, total, groups = figures_of_table
    assert figures_of_table == score_figures(json_lines_file, tmp_path / "lines")
    assert (correct, total) == (2, 3)
    assert set(groups["skills"]) == {"geometry reasoning", "algebraic reasoning"}


def test_an_answer_in_the_form_of_a_list_or_an_object_stays_a_text(tmp_path: Path) -> None:
    """A list, JSON or `nan` in the column of answers or responses is read as a text.

    MathVista has references that are lists.
    """
    table_file = tmp_path / "Model_MathVista_MINI.tsv"
    first, second, third = TABLE_ROWS
    rows = [
        {**first, "answer_type": "list", "answer": "[1, 2]", "prediction": "[1, 2]"},
        {**third, "prediction": '{"answer": 5}'},
        {**second, "prediction": "nan"},
    ]
    pd.DataFrame(rows).to_csv(table_file, index=False, sep="\t")
    score = benchmark_data.score_predictions(BENCHMARK, tmp_path, table_file, *COLUMN_WORDS)
    assert [item["extraction"] for item in score["items"]] == ["[1, 2]", "5", "nan"]
    assert score["correct"] == 2
    assert score["empty_responses"] == 0


def test_a_workbook_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "predictions.xlsx"
    path.write_bytes(b"not a workbook")
    with pytest.raises(UserError, match=r"predictions\.xlsx' cannot be read as a table"):
        read_predictions(path)
