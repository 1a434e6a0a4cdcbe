"""The score: counts, groups and intervals by hand, figures of a training's log, and what is said of
a wrong file.
"""

import json
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adora_vl import evaluation
from adora_vl.evals import asking
from adora_vl.evals.inference.predictions import IMAGE_FAILED, read_predictions
from adora_vl.evals.inference.requests import AnswerRequest
from adora_vl.evals.inference.runner import Ask, answer
from adora_vl.evals.options import HubDataOptions
from adora_vl.evals.prepared import GraderOptions, answer_form
from adora_vl.evals.prepared_benchmark import PreparedDataOptions
from adora_vl.evals.records import Graded, RowGrade
from adora_vl.evals.scoring.files import figures_in_training as figures
from adora_vl.evals.scoring.files import score_file
from adora_vl.evals.scoring.score import aggregate, grade_row, verdict
from adora_vl.evals.scoring.statistics import bootstrap, mcnemar, pass_at, wilson
from adora_vl.evals.scoring.table import table
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from benchmarks.scanned import sign_flips
from data_prep.cli import main as data_prep
from eval import command
from eval.geometry3k import BENCHMARK
from eval.geometry3k import BENCHMARK as GEOMETRY3K
from eval.mathvista import BENCHMARK as MATHVISTA
from tests.support.benchmark_data import (
    mathvista_rows,
    write_geometry3k,
    write_lines,
    write_mathvista,
)
from tests.support.cases import Case


def prediction(pid: str, response: str, answer: str = "5", **fields: Any) -> dict[str, Any]:
    row = {
        "pid": pid,
        "question": "Find x.",
        "answer": answer,
        "choices": None,
        "metadata": {"goal": "Length"},
    }
    return row | {"response": response, "finish_reason": "stop", "n_tokens": 10} | fields


def test_a_score_says_what_its_problems_are_of(tmp_path: Path) -> None:
    of_the_set = {"source": "geometry3k", "split": "test"}
    rows = [prediction("1", r"\boxed{5}", metadata=of_the_set)]
    write_lines(tmp_path / "p.jsonl", rows)
    options = GEOMETRY3K.score_options()
    score = score_file(GEOMETRY3K, tmp_path / "p.jsonl", options).score
    assert score["data_set"] == {"sources": ["geometry3k"], "splits": ["test"], "problems": 1}
    write_lines(tmp_path / "p.jsonl", [*rows, prediction("2", "5", metadata={"source": "mine"})])
    score = score_file(GEOMETRY3K, tmp_path / "p.jsonl", options).score
    assert score["data_set"]["sources"] == ["geometry3k", "mine"]


def test_wilson_interval_has_the_published_values(subtests: pytest.Subtests) -> None:
    cases = [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (Wilson without continuity
        # correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]
    for correct, total, low, high in cases:
        with subtests.test(f"{correct}"):
            assert wilson(correct, total) == pytest.approx((low, high), abs=5e-5)
    # exact at the ends
    assert wilson(0, 7)[0] == 0.0
    assert wilson(7, 7)[1] == 1.0
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low))


def test_the_tests_of_a_difference_are_those_of_the_textbook() -> None:
    # McNemar's test is the exact binomial one.
    assert mcnemar(5, 5) == mcnemar(0, 0) == 1.0
    assert mcnemar(0, 10) == pytest.approx(2 / 1024)
    assert mcnemar(1, 8) == mcnemar(8, 1) == pytest.approx(20 / 512)
    assert sign_flips([0.0, 0.0]) == sign_flips([1.0, -1.0]) == 1.0
    assert sign_flips([0.1, 0.2, 0.3]) == 2 / 8, "all plus and all minus"
    assert sign_flips([0.1, 0.2, -0.3]) == 1.0
    assert sign_flips([1.0, 2.0, -1.0]) == 6 / 8
    assert 0 < mcnemar(2000, 2400) < 1e-8
    # pass@k is the unbiased estimate.
    assert pass_at(1, 4, 1) == pytest.approx(0.25)
    assert pass_at(2, 4, 1) == pytest.approx(0.5)
    assert pass_at(4, 4, 1) == 1.0
    assert pass_at(2, 4, 3) == 1.0
    assert pass_at(3, 4, 0) == 0.0
    # The bootstrap repeats; the normal approximation gives 0.3 -+ 0.09.
    values = [0.0] * 70 + [1.0] * 30
    assert bootstrap(values) == bootstrap(values) == pytest.approx((0.21, 0.39), abs=0.02)


def test_avg_and_pass_at_k_by_hand_with_intervals_over_problems() -> None:
    right = {"a": "1100", "b": "0000", "c": "1111"}
    answers = [
        (pid, hit == "1", sample) for pid, hits in right.items() for sample, hit in enumerate(hits)
    ]
    score = aggregate(
        [Graded(pid, RowGrade(verdict(hit), None, "r"), sample=at) for pid, hit, at in answers]
    )
    assert score["correct"] == 6
    assert score["total"] == 12
    samples = score["samples"]
    assert samples["k"] == 4
    assert samples["problems"] == 3
    assert samples["incomplete"] == 0
    assert samples["avg@4"]["value"] == samples["pass@1"]["value"] == pytest.approx(0.5)
    assert samples["pass@2"]["value"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert samples["pass@4"]["value"] == pytest.approx(2 / 3)
    assert samples["avg@4"]["interval"] == "bootstrap"
    assert samples["avg@4"]["interval_95"] == [0.0, 1.0]
    # Solved or not: 2 of 3 problems, for which a bootstrap of three values has nothing to say.
    assert samples["pass@4"]["interval"] == "wilson"
    assert samples["pass@4"]["interval_95"] == list(wilson(2, 3))
    # Twelve answers to three problems are as sure as three answers, not as twelve.
    low, high = score["wilson_95"]
    assert high - low > 0.7


def test_an_answer_in_tags_counts_where_the_prompts_asked_for_them(case: Case) -> None:
    for where in ["system_prompt", "prompt"]:
        with case(where) as folder:
            file = write_lines(
                folder / "predictions.jsonl",
                [prediction("1", "<answer>5</answer>"), prediction("2", r"\boxed{5}")],
            )
            score, _ = score_file(BENCHMARK, file, GraderOptions())
            assert score["correct"] == 1
            assert score["rules"] == {"rounding": False}
            fields = {
                "split": "test",
                "model": "m",
                "engine": "vllm",
                where: "{problem} Put it in <answer> </answer>.",
            }
            (folder / "fingerprint.json").write_text(json.dumps({"fields": fields}))
            scored = score_file(BENCHMARK, file, GraderOptions())
            assert scored.score["correct"] == 2
            assert scored.score["rules"]["answer_tags"]
            assert "in <answer> tags too" in table(scored)


def test_the_aggregated_figures_are_those_counted_by_hand() -> None:
    graded = [
        Graded(
            "a",
            RowGrade("correct", "5", "same_number", {"goal": ["Angle"], "family": ["circle"]}),
            10,
        ),
        Graded("b", RowGrade("correct", "6", "same_number", {"goal": ["Length"]}), 20),
        Graded("c", RowGrade("wrong", "7", "different_number", {"goal": ["Angle"]}), 40),
        Graded("d", RowGrade("unparseable", None, "no_box", {"goal": ["Angle"]}), 50),
        Graded("e", RowGrade("failed", None, "broken", {"goal": ["Angle"]})),
        Graded("f", RowGrade("wrong", "1", "gold_not_read")),
    ]
    score = aggregate(graded)
    assert score["correct"] == 2
    assert score["total"] == 6
    assert score["accuracy"] == pytest.approx(1 / 3)
    assert score["wilson_95"] == list(wilson(2, 6))
    assert {
        value: (cell["correct"], cell["total"]) for value, cell in score["groups"]["goal"].items()
    } == {
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
        prediction(
            "2", r"\boxed{C}", choices=["3", "4", "5", "6"], finish_reason="length", n_tokens=30
        ),
        prediction("3", r"\boxed{8.7}", answer=r"5 \sqrt { 3 }"),
        prediction(
            "4", "", finish_reason=IMAGE_FAILED, n_tokens=0, error="UnidentifiedImageError: x"
        ),
    ]
    path = write_lines(tmp_path / "p.jsonl", rows)
    scored = score_file(BENCHMARK, path, GraderOptions())
    score: Any = scored.score
    assert [item["verdict"] for item in score["items"]] == ["correct", "correct", "wrong", "failed"]
    assert score["correct"] == 2
    assert score["total"] == 4
    reasons = {value: cell["total"] for value, cell in score["groups"]["finish_reason"].items()}
    assert reasons == {"stop": 2, "length": 1, IMAGE_FAILED: 1}
    assert score["groups"]["answer_form"]["radical"]["total"] == 1
    assert score["fingerprint"] is None
    assert score["image_failed"] == 1
    assert score["tokens"]["correct"] == {"mean": 20.0, "median": 20.0, "p90": 30, "max": 30}
    assert (
        score["tokens"]["wrong"]["mean"] == 10.0
    )  # the problem that was never asked has no length
    assert score["truncated"]["count"] == 1
    assert score["truncated"]["total"] == 3
    assert score_file(BENCHMARK, path, GraderOptions(rounding=True)).score["correct"] == 3
    printed_table = table(scored)
    assert "2/4" in printed_table
    assert "1 problem not asked" in printed_table
    assert "1 answer cut off" in printed_table
    assert printed_table.startswith("geometry3k: ")
    photos = write_lines(tmp_path / "own.jsonl", [prediction("photos/test/1", r"\boxed{5}")])
    own_table = table(score_file(BENCHMARK, photos, GraderOptions()))
    assert own_table.startswith("photos: ")
    assert "finish_reason" in printed_table, "one value says nothing"
    assert "finish_reason" not in own_table, "one value says nothing"
    # A failed image is never graded, even if something that looks right stands in the response.
    failed = prediction("1", r"\boxed{5}", finish_reason=IMAGE_FAILED)
    assert grade_row(BENCHMARK, failed, GraderOptions()).grade.verdict == "failed"


def test_the_form_of_a_reference_answer_is_known(subtests: pytest.Subtests) -> None:
    cases = [
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
    ]
    for text, choices, form in cases:
        with subtests.test(f"{text} {choices!r:.80} {form}"):
            assert answer_form(text, choices) == form


def test_a_wrong_row_is_named(case: Case) -> None:
    cases: list[Any] = [
        ({"pid": "2", "answer": "5"}, "row 2 lacks the field 'response'; it has pid, answer"),
        ({"pid": "2", "answer": 5, "response": ""}, "row 2 has answer = 5, expected a string"),
        ({"pid": "2", "answer": "5", "response": "", "choices": "AB"}, "row 2 has choices = 'AB'"),
        (
            {"pid": "2", "answer": "5", "response": "", "metadata": [1]},
            r"row 2 has metadata = \[1\]",
        ),
        ({"pid": "1", "answer": "5", "response": ""}, "row 2 has the pid '1' of row 1"),
        ([1], "row 2 is a JSON list, expected an object"),
    ]
    for second, message in cases:
        with case(second) as folder:
            path = write_lines(folder / "p.jsonl", [prediction("1", ""), second])
            with pytest.raises(UserError, match=message):
                read_predictions(path)


def test_published_forms_of_predictions_are_read(tmp_path: Path) -> None:
    """MathVista's one object by id, a list, and rows with fields of other names and inside others."""
    rows = [prediction(str(number), f"{number}") for number in range(3)]
    by_id = {row["pid"]: {key: row[key] for key in row if key != "pid"} for row in rows}
    files = {
        "by_id": json.dumps(by_id, indent=1),
        "by_id_in_a_line": json.dumps(by_id),
        "list": json.dumps(rows),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read_predictions(tmp_path / name) == [{"pid": row["pid"], **row} for row in rows], (
            name
        )
    documents = [
        {"index": number, "prediction": [f"{number}"], "doc": {"answer": "5", "choices": None}}
        for number in range(3)
    ]
    path = write_lines(tmp_path / "other.jsonl", documents)
    with pytest.raises(UserError, match="say --columns pid=NAME"):
        read_predictions(path)
    columns = {"pid": "index", "response": "prediction.0", "answer": "doc.answer"}
    predictions = read_predictions(path, columns={**columns, "choices": "doc.choices"})
    assert [(row["pid"], row["response"], row["choices"]) for row in predictions] == [
        ("0", "0", None),
        ("1", "1", None),
        ("2", "2", None),
    ]


def test_missing_empty_and_broken_files_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        read_predictions(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text("")
    with pytest.raises(UserError, match="has no rows"):
        read_predictions(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text(json.dumps(prediction("1", "")) + '\n{"pid": "2", "ans\n')
    with pytest.raises(UserError, match="row 2 is not JSON"):
        read_predictions(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text(
        json.dumps(prediction("1", "")) + '\n{"pid": "2", "pid": "3"}\n'
    )
    with pytest.raises(UserError, match=r"row 2 is not JSON \('pid' is given twice"):
        read_predictions(tmp_path / "p.jsonl")


def test_a_row_of_another_runner_may_have_a_number_for_its_id_and_null_for_no_answer(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"question_id": 7, "answer": "5", "response": None}])
    (row,) = read_predictions(path, id_column="question_id")
    assert row["pid"] == "7"
    assert row["response"] == ""


def test_a_line_separator_inside_a_response_does_not_split_its_row(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd"
    (tmp_path / "p.jsonl").write_text(json.dumps(prediction("1", text), ensure_ascii=False) + "\n")
    assert [row["response"] for row in read_predictions(tmp_path / "p.jsonl")] == [text]


class Guess:
    """Says 5 or what the question is, by the seed, and is cut off now and then."""

    batch_size = 4

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        def said(seed: int) -> Reply:
            return Reply(
                rf"wait, \boxed{{{seed % 90}}}", 7 + seed % 5, "length" if seed % 3 else "stop", 9
            )

        return [said(request.seed) for request in requests]


def test_a_run_with_grey_pictures_says_so_and_is_no_other_run(tmp_path, monkeypatch, capsys):
    class Looks(Guess):
        def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
            colours = [request.images[0].getcolors() for request in requests]
            return [
                Reply(r"\boxed{1}" if c and len(c) == 1 else "seen", 1, "stop", 9) for c in colours
            ]

    data = write_geometry3k(tmp_path / "data", 3)
    monkeypatch.setattr(asking, "build_engine", lambda _: Looks())
    words = ["run", "--model", "a/b", "--data", str(data), "--output"]
    assert command.main(GEOMETRY3K, [*words, str(tmp_path / "seen")]) == 0
    assert command.main(GEOMETRY3K, [*words, str(tmp_path / "grey"), "--view", "blank"]) == 0
    assert "a grey picture of the same size" in capsys.readouterr().out
    answers = {
        name: read_predictions(tmp_path / name / "predictions.jsonl") for name in ("seen", "grey")
    }
    assert {row["response"] for row in answers["seen"]} == {"seen"}
    assert {row["response"] for row in answers["grey"]} == {r"\boxed{1}"}
    assert [row["image_size"] for row in answers["seen"]] == [
        row["image_size"] for row in answers["grey"]
    ]
    for folder, options in (("seen", ["--view", "blank"]), ("grey", [])):
        assert command.main(GEOMETRY3K, [*words, str(tmp_path / folder), *options]) == 2
        assert "view: the predictions in" in capsys.readouterr().err


def test_facts_in_words_stand_for_the_picture_where_they_suffice(
    tmp_path, monkeypatch, capsys, geometry3k_raw
):
    asked_by_view: dict[str, list[tuple[int, str]]] = {}

    class Reads(Guess):
        def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
            texts = [str(request.messages[-1]["content"]) for request in requests]
            pairs = zip(requests, texts, strict=True)
            asked_by_view.setdefault(view, []).extend(
                (len(request.images), text) for request, text in pairs
            )
            return [Reply("12", 1, "stop", 9) for _ in requests]

    raw = shutil.copytree(geometry3k_raw, tmp_path / "raw")
    (raw / "train").rename(raw / "test")
    (raw / "test" / "12" / "logic_form.json").unlink()
    code = data_prep(
        [
            "geometry3k",
            "--source",
            "intergps",
            "--input",
            str(raw),
            "--output",
            str(tmp_path / "d"),
        ]
    )
    assert code == 0
    assert (
        "noted: 1 of the rows have no facts in words, such as geometry3k/test/12"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(asking, "build_engine", lambda _: Reads())
    words = ["run", "--model", "a/b", "--data", str(tmp_path / "d")]
    for view in ("image", "text", "both", "blank"):
        assert (
            command.main(GEOMETRY3K, [*words, "--view", view, "--output", str(tmp_path / view)])
            == 0
        )
        assert ("without 1 problem whose facts do not suffice" in capsys.readouterr().out) is (
            view in ("text", "both")
        )
    assert {
        view: {images for images, _ in requests_of_view}
        for view, requests_of_view in asked_by_view.items()
    } == {
        "image": {1},
        "text": {0},
        "both": {1},
        "blank": {1},
    }
    assert [len(requests_of_view) for requests_of_view in asked_by_view.values()] == [6, 5, 5, 6]
    fact = "Angle ABC = 60 degrees. BC = x. AC is perpendicular to BC."
    assert [
        sum(fact in text for _, text in requests_of_view)
        for requests_of_view in asked_by_view.values()
    ] == [0, 1, 1, 0]
    config: Any = Namespace(
        eval_strategy="steps",
        adora_eval=[f"geometry3k={tmp_path / 'd'}:views"],
        adora_eval_limit=3,
        eval_steps=1,
        eval_on_start=False,
        eval_delay=0,
    )
    tasks = evaluation.take_evaluations(config, []).tasks
    assert [task.benchmark.name for task in tasks] == [
        f"geometry3k_{view}" for view in asked_by_view
    ]
    pids = [[problem.pid for problem in task.problems] for task in tasks]
    assert pids == [[f"geometry3k/test/{number}" for number in (11, 13, 14)]] * 4, (
        "the same problems in all views"
    )
    assert [task.problems[0].n_images for task in tasks] == [1, 0, 1, 1]
    plain = write_geometry3k(tmp_path / "plain", 3)
    without = [
        "run",
        "--model",
        "a/b",
        "--data",
        str(plain),
        "--view",
        "both",
        "--output",
        str(tmp_path / "none"),
    ]
    assert command.main(GEOMETRY3K, without) == 2
    assert "view: both, and no row of the data has facts in words" in capsys.readouterr().err


def test_figures_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_geometry3k(tmp_path / "data", 9)
    monkeypatch.setattr(asking, "build_engine", lambda _: Guess())
    output = tmp_path / "out"
    words = [
        "run",
        "--model",
        "a/b",
        "--data",
        str(data),
        "--output",
        str(output),
        "--temperature",
        "1",
    ]
    assert command.main(GEOMETRY3K, [*words, "--samples", "2"]) == 0
    score = json.loads((output / "score.json").read_text())

    options = PreparedDataOptions(data=str(data), split="test", prompt=None)
    problems = GEOMETRY3K.load(options).problems
    asks = [Ask(problem, sample) for problem in problems for sample in range(2)]
    rows = answer(Guess(), asks, seed=0, system_prompt=None)
    assert rows == read_predictions(output / "predictions.jsonl")
    logged = figures(GEOMETRY3K, rows)
    assert logged["geometry3k_accuracy"] == score["accuracy"]
    assert logged["geometry3k_avg@2"] == score["samples"]["avg@2"]["value"]
    assert logged["geometry3k_truncated"] == score["truncated"]["share"]
    assert logged["geometry3k_reflective"] == 1.0
    assert all(isinstance(value, float | int) for value in logged.values())
    tagged = [{**row, "response": f"<answer>{row['answer']}</answer>"} for row in rows]
    both = [
        figures(GEOMETRY3K, tagged, answer_tags=with_choices)["geometry3k_accuracy"]
        for with_choices in (True, False)
    ]
    assert both == [1.0, 0.0]
    drawn = [
        {**row, "metadata": {**row["metadata"], "family": "crossing", "kind": "vertical"}}
        for row in rows
    ]
    assert figures(GEOMETRY3K, drawn)["geometry3k_crossing_vertical_accuracy"] == score["accuracy"]


def test_slices_of_several_processes_score_as_one(tmp_path: Path) -> None:
    data = write_mathvista(tmp_path, mathvista_rows(7))
    options = HubDataOptions(data=str(data), split="testmini")
    problems = MATHVISTA.load(options).problems
    asks = [Ask(problem, 0) for problem in problems]
    slices = [
        row
        for rank in range(2)
        for row in answer(Guess(), asks[rank::2], seed=0, system_prompt=None)
    ]
    answers = answer(Guess(), asks, seed=0, system_prompt=None)
    assert figures(MATHVISTA, slices) == figures(MATHVISTA, answers)
    assert "mathvista_accuracy_ID" in figures(MATHVISTA, slices)
