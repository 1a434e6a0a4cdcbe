"""Evaluation on a borrowed engine gives the figures that the command gives on the same answers."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from adora_vl.endpoint import Answer
from eval import command
from eval.engines import AnswerRequest
from eval.geometry3k.benchmark import BENCHMARK as GEOMETRY3K
from eval.in_training import answer_all, figures
from eval.mathvista.benchmark import BENCHMARK as MATHVISTA
from eval.predictions import read_predictions
from tests.benchmark_data import mathvista_rows, write_geometry3k, write_mathvista


class Guess:
    """Says 5 or what the question is, by the seed, and is cut off now and then."""

    batch_size = 4

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        return [
            Answer(
                rf"wait, \boxed{{{request.seed % 90}}}",
                7 + request.seed % 5,
                "length" if request.seed % 3 else "stop",
                9,
            )
            for request in requests
        ]


def test_figures_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_geometry3k(tmp_path / "data", 9)
    monkeypatch.setattr(command, "build_engine", lambda _: Guess())
    output = tmp_path / "out"
    words = ["run", "--model", "a/b", "--data", str(data), "--output", str(output), "--temperature", "1"]
    assert command.main(GEOMETRY3K, [*words, "--samples", "2"]) == 0
    score = json.loads((output / "score.json").read_text())

    problems, _ = GEOMETRY3K.load(Namespace(data=str(data), split="test"))
    calls: list[int] = []

    def generate(requests: Sequence[AnswerRequest]) -> list[Answer]:
        calls.append(len(requests))
        return Guess().generate(requests)

    rows = answer_all(problems, generate, samples=2, batch_size=4)
    assert calls == [4, 4, 4, 4, 2]
    assert rows == read_predictions(output / "predictions.jsonl")
    logged = figures(GEOMETRY3K, rows)
    assert logged["geometry3k_accuracy"] == score["accuracy"]
    assert logged["geometry3k_avg@2"] == score["samples"]["avg@2"]["value"]
    assert logged["geometry3k_truncated"] == score["truncated"]["share"]
    assert logged["geometry3k_reflective"] == 1.0
    assert all(isinstance(value, float | int) for value in logged.values())
    tagged = [{**row, "response": f"<answer>{row['answer']}</answer>"} for row in rows]
    both = [figures(GEOMETRY3K, tagged, answer_tags=asked)["geometry3k_accuracy"] for asked in (True, False)]
    assert both == [1.0, 0.0]


def test_slices_of_several_processes_score_as_one(tmp_path: Path) -> None:
    data = write_mathvista(tmp_path, mathvista_rows(7))
    problems, _ = MATHVISTA.load(Namespace(data=str(data), split="testmini", data_revision=None))
    generate = Guess().generate
    slices = [row for rank in range(2) for row in answer_all(problems[rank::2], generate)]
    assert figures(MATHVISTA, slices) == figures(MATHVISTA, answer_all(problems, generate))
    assert "mathvista_accuracy_ID" in figures(MATHVISTA, slices)
