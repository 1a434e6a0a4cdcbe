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
from adora_vl.evals.inference.predictions import IMAGE_FAILED, parse_columns, read_predictions
from adora_vl.evals.inference.requests import AnswerRequest
from adora_vl.evals.inference.runner import AnswerSample, answer_batch
from adora_vl.evals.options import HubDataOptions
from adora_vl.evals.prepared import GraderOptions, answer_form
from adora_vl.evals.records import CORRECT, WRONG, GradedAnswer, RowGrade
from adora_vl.evals.scoring.files import metrics_in_training, score_predictions_file
from adora_vl.evals.scoring.score import (
    answer_metrics,
    grade_row,
    length_statistics,
    summarise_grades,
)
from adora_vl.evals.scoring.statistics import (
    bootstrap_mean_interval,
    mcnemar_p,
    pass_at_k,
    wilson_interval,
)
from adora_vl.evals.scoring.table import format_score
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from benchmarks.scanned import sign_flips
from data_prep.cli import main as data_prep
from eval import command
from eval.geometry3k import BENCHMARK
from eval.geometry3k import BENCHMARK as GEOMETRY3K
from eval.mathvista import BENCHMARK as MATHVISTA
from eval.problems import PreparedDataOptions
from tests.support.benchmark_data import (
    mathvista_rows,
    write_geometry3k,
    write_jsonl_rows,
    write_mathvista,
)
from tests.support.cases import CaseFolder


def prediction(pid: str, response: str, answer: str = "5", **fields: Any) -> dict[str, Any]:
    """Return a row of `predictions.jsonl` about Geometry3K, with a response of ten tokens."""
    row = {
        "pid": pid,
        "question": "Find x.",
        "answer": answer,
        "choices": None,
        "metadata": {"goal": "Length"},
        "response": response,
        "finish_reason": "stop",
        "n_tokens": 10,
    }
    return row | fields


def right_and_total(cells: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the right answers and all answers of each cell of a score."""
    return {name: (cell["correct"], cell["total"]) for name, cell in cells.items()}


def test_a_score_says_what_its_problems_are_of(tmp_path: Path) -> None:
    """A score names the sources and the splits of its rows.

    By them published figures are shown beside it or not.
    """
    metadata = {"source": "geometry3k", "split": "test"}
    published_row = prediction("1", r"\boxed{5}", metadata=metadata)
    user_row = prediction("2", "5", metadata={"source": "mine"})
    path = tmp_path / "p.jsonl"
    options = GEOMETRY3K.score_options()
    write_jsonl_rows(path, [published_row])
    score = score_predictions_file(GEOMETRY3K, path, options).score
    assert score["data_set"] == {"sources": ["geometry3k"], "splits": ["test"], "problems": 1}
    write_jsonl_rows(path, [published_row, user_row])
    score = score_predictions_file(GEOMETRY3K, path, options).score
    assert score["data_set"]["sources"] == ["geometry3k", "mine"]


def test_wilson_interval_has_the_published_values(subtests: pytest.Subtests) -> None:
    """The interval of 95 % for a share is that of a published table, and is exact at the ends."""
    cases = [  # right answers, all answers, the lower and the upper end
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (Wilson without continuity
        # correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]
    for correct, total, low, high in cases:
        with subtests.test(f"{correct}"):
            assert wilson_interval(correct, total) == pytest.approx((low, high), abs=5e-5)
    # exact at the ends
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0
    # three right answers of ten are as certain as three wrong ones
    low, high = wilson_interval(3, 10)
    assert wilson_interval(7, 10) == pytest.approx((1 - high, 1 - low))


def test_the_tests_of_a_difference_are_those_of_the_textbook() -> None:
    """McNemar's test, the test by sign flips and pass@k, each by hand."""
    # McNemar's test is the exact binomial one.
    assert mcnemar_p(5, 5) == mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(0, 10) == pytest.approx(2 / 1024)
    # 2 x (1 + 9) of the 2^9 ways in which nine answers may fall: none or one on one side
    assert mcnemar_p(1, 8) == mcnemar_p(8, 1) == pytest.approx(20 / 512)
    assert sign_flips([0.0, 0.0]) == sign_flips([1.0, -1.0]) == 1.0
    assert sign_flips([0.1, 0.2, 0.3]) == 2 / 8, "all plus and all minus"
    assert sign_flips([0.1, 0.2, -0.3]) == 1.0  # their sum is 0, and none is nearer to 0
    assert sign_flips([1.0, 2.0, -1.0]) == 6 / 8
    assert 0 < mcnemar_p(2000, 2400) < 1e-8
    # pass@k is the unbiased estimate; the arguments are all right answers, all answers and k.
    assert pass_at_k(1, 4, 1) == pytest.approx(0.25)
    assert pass_at_k(2, 4, 1) == pytest.approx(0.5)
    assert pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(2, 4, 3) == 1.0
    assert pass_at_k(3, 4, 0) == 0.0
    # The bootstrap repeats; the normal approximation gives 0.3 -+ 0.09.
    values = [0.0] * 70 + [1.0] * 30
    problems = [str(number) for number in range(len(values))]
    intervals = [
        bootstrap_mean_interval(values, problems, lowest=0.0, highest=1.0) for _ in range(2)
    ]
    assert intervals[0] == intervals[1] == pytest.approx((0.21, 0.39), abs=0.02)


def test_avg_and_pass_at_k_by_hand_with_intervals_over_problems() -> None:
    """`avg@k` and `pass@k` are means over the problems, with intervals over the problems.

    Problem `a` has two right answers of four, `b` none and `c` four.
    """
    digits_by_pid = {"a": "1100", "b": "0000", "c": "1111"}  # 1 is a right answer
    graded = []
    for pid, digits in digits_by_pid.items():
        for sample, digit in enumerate(digits):
            grade = RowGrade(verdict=CORRECT if digit == "1" else WRONG, extracted=None, reason="r")
            graded.append(GradedAnswer(pid, grade, sample=sample))
    score = summarise_grades(graded)
    assert score["correct"] == 6
    assert score["total"] == 12
    samples = score["samples"]
    assert samples["k"] == 4
    assert samples["problems"] == 3
    assert samples["incomplete"] == 0
    assert samples["avg@4"]["value"] == samples["pass@1"]["value"]
    assert samples["avg@4"]["value"] == pytest.approx(0.5)
    # of the 6 pairs of answers to `a` one has none that is right
    assert samples["pass@2"]["value"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert samples["pass@4"]["value"] == pytest.approx(2 / 3)
    assert samples["avg@4"]["interval"] == "bootstrap"
    assert samples["avg@4"]["interval_95"] == [0.0, 1.0]
    # Solved or not: 2 of 3 problems, for which a bootstrap of three values has nothing to say.
    assert samples["pass@4"]["interval"] == "wilson"
    assert samples["pass@4"]["interval_95"] == list(wilson_interval(2, 3))
    # Twelve answers to three problems are as sure as three answers, not as twelve.
    low, high = score["interval_95"]
    assert high - low > 0.7  # about 0.5 with twelve problems


def test_an_answer_in_tags_counts_where_the_prompts_asked_for_them(case_folder: CaseFolder) -> None:
    """An answer in `<answer>` tags is right only if a prompt in the fingerprint asks for them.

    The fingerprint stands beside the predictions. One of two right answers is in tags, the other
    one in a box.
    """
    for prompt_key in ["system_prompt", "prompt"]:
        with case_folder(prompt_key) as folder:
            tagged_row = prediction("1", "<answer>5</answer>")
            boxed_row = prediction("2", r"\boxed{5}")
            file = write_jsonl_rows(folder / "predictions.jsonl", [tagged_row, boxed_row])
            score, _ = score_predictions_file(BENCHMARK, file, GraderOptions())
            assert score["correct"] == 1
            assert score["rules"] == {"rounding": False}
            fields = {
                "split": "test",
                "model": "m",
                "engine": "vllm",
                prompt_key: "{problem} Put it in <answer> </answer>.",
            }
            (folder / "fingerprint.json").write_text(json.dumps({"fields": fields}))
            scored = score_predictions_file(BENCHMARK, file, GraderOptions())
            assert scored.score["correct"] == 2
            assert scored.score["rules"]["answer_tags"]
            assert "in <answer> tags too" in format_score(scored)


def test_the_aggregated_figures_are_those_counted_by_hand() -> None:
    """Two of six answers are right; each counts in the groups that its grade names.

    A grade has a verdict, the answer, a reason and groups, here by `goal` and `family`.
    """
    angle = {"goal": ["Angle"]}
    length = {"goal": ["Length"]}
    circle_angle = {"goal": ["Angle"], "family": ["circle"]}
    graded = [
        GradedAnswer(
            "a",
            RowGrade("correct", extracted="5", reason="same_number", groups=circle_angle),
            n_tokens=10,
        ),
        GradedAnswer(
            "b",
            RowGrade("correct", extracted="6", reason="same_number", groups=length),
            n_tokens=20,
        ),
        GradedAnswer(
            "c",
            RowGrade("wrong", extracted="7", reason="different_number", groups=angle),
            n_tokens=40,
        ),
        GradedAnswer(
            "d", RowGrade("unparseable", extracted=None, reason="no_box", groups=angle), n_tokens=50
        ),
        GradedAnswer("e", RowGrade("failed", extracted=None, reason="broken", groups=angle)),
        GradedAnswer("f", RowGrade("wrong", extracted="1", reason="gold_not_read")),
    ]
    score = summarise_grades(graded)
    assert score["correct"] == 2
    assert score["total"] == 6
    assert score["accuracy"] == pytest.approx(1 / 3)
    assert score["interval_95"] == list(wilson_interval(2, 6))
    assert right_and_total(score["groups"]["goal"]) == {"Angle": (1, 4), "Length": (1, 1)}
    assert score["groups"]["family"] == {
        "circle": {
            "correct": 1,
            "total": 1,
            "accuracy": 1.0,
            "interval_95": list(wilson_interval(1, 1)),
        }
    }
    assert score["verdicts"] == {"correct": 2, "wrong": 2, "unparseable": 1, "failed": 1}


def test_nine_of_ten_lengths_are_not_above_the_90th_percentile() -> None:
    lengths = length_statistics([70, 10, 50, 100, 90, 30, 20, 80, 60, 40])
    assert lengths == {"mean": 55.0, "median": 55.0, "p90": 90, "max": 100}


def test_equal_samples_make_no_interval_of_answers_narrower() -> None:
    """Three samples of each answer that are all equal say no more than one of them."""
    rows = []
    graded = []
    for pid, response, reason in (("a", "wait, 1", "length"), ("b", "1", "stop")):
        rows.append(prediction(pid, response) | {"finish_reason": reason})
        graded.append(GradedAnswer(pid, RowGrade("correct", extracted=None, reason="")))
    metrics_of_once = answer_metrics(rows, graded)
    metrics_of_thrice = answer_metrics(rows * 3, graded * 3)
    for name in ("truncated", "reflective_words"):
        assert metrics_of_thrice[name]["interval_95"] == pytest.approx(
            metrics_of_once[name]["interval_95"]
        ), name


def test_a_file_is_graded_with_choices_groups_and_failures(tmp_path: Path) -> None:
    """A score counts verdicts, groups, lengths, cut-off answers and failed images of a file.

    Its rows: a right number, a right letter that was cut off, a rounded value, a failed image.
    """
    rows = [
        prediction("1", r"so \boxed{5}", metadata={"goal": "Angle", "family": "circle"}),
        prediction(
            "2",
            r"\boxed{C}",
            choices=["3", "4", "5", "6"],
            finish_reason="length",
            n_tokens=30,
        ),
        prediction("3", r"\boxed{8.7}", answer=r"5 \sqrt { 3 }"),
        prediction(
            "4",
            "",
            finish_reason=IMAGE_FAILED,
            n_tokens=0,
            error="UnidentifiedImageError: x",
        ),
    ]
    path = write_jsonl_rows(tmp_path / "p.jsonl", rows)

    scored = score_predictions_file(BENCHMARK, path, GraderOptions())

    score: Any = scored.score
    verdicts = [item["verdict"] for item in score["items"]]
    assert verdicts == ["correct", "correct", "wrong", "failed"]
    assert score["correct"] == 2
    assert score["total"] == 4
    reason_cells = score["groups"]["finish_reason"]
    assert reason_cells["stop"]["total"] == 2
    assert reason_cells["length"]["total"] == 1
    assert reason_cells[IMAGE_FAILED]["total"] == 1
    assert len(reason_cells) == 3
    assert score["groups"]["answer_form"]["radical"]["total"] == 1
    assert score["fingerprint"] is None
    assert score["image_failed"] == 1
    assert score["tokens"]["correct"] == {"mean": 20.0, "median": 20.0, "p90": 30, "max": 30}
    # The rounded value has 10 tokens; the problem that was never asked has no length.
    assert score["tokens"]["wrong"]["mean"] == 10.0
    assert score["truncated"]["count"] == 1
    assert score["truncated"]["total"] == 3

    # with `rounding` 8.7 is right for 5√3 = 8.66
    rounded_score = score_predictions_file(BENCHMARK, path, GraderOptions(rounding=True))
    assert rounded_score.score["correct"] == 3

    printed_table = format_score(scored)
    assert "2/4" in printed_table
    assert "1 problem not asked" in printed_table
    assert "1 answer cut off" in printed_table
    assert printed_table.startswith("geometry3k: ")
    assert "finish_reason" in printed_table


def test_a_table_is_titled_by_its_ids_and_has_no_groups_of_one_value(tmp_path: Path) -> None:
    """The title is the first part of the ids, where they have several."""
    file = write_jsonl_rows(tmp_path / "own.jsonl", [prediction("photos/test/1", r"\boxed{5}")])
    printed_table = format_score(score_predictions_file(BENCHMARK, file, GraderOptions()))
    assert printed_table.startswith("photos: ")
    assert "finish_reason" not in printed_table


def test_a_failed_image_is_never_graded() -> None:
    """It has no grade even if something that looks right stands in the response."""
    failed_prediction = prediction("1", r"\boxed{5}", finish_reason=IMAGE_FAILED)
    assert grade_row(BENCHMARK, failed_prediction, GraderOptions()).grade.verdict == "failed"


def test_the_form_of_a_reference_answer_is_known(subtests: pytest.Subtests) -> None:
    """A gold is an integer, decimal, fraction, radical, multiple of π, letter or other."""
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


def test_a_wrong_row_is_named(case_folder: CaseFolder) -> None:
    """A row with a missing, wrong or repeated field is named, with its number and the field.

    Each case: the second row of a file, and what the error says of it.
    """
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
        with case_folder(second) as folder:
            path = write_jsonl_rows(folder / "p.jsonl", [prediction("1", ""), second])
            with pytest.raises(UserError, match=message):
                read_predictions(path)


def test_published_forms_of_predictions_are_read(tmp_path: Path) -> None:
    """Predictions are read from one object by id, as MathVista has them, and from a list.

    Rows with fields of other names, or inside others, are read with `--columns`.
    """
    rows = [prediction(str(number), f"{number}") for number in range(3)]
    row_by_pid = {}
    for row in rows:
        fields = dict(row)
        row_by_pid[fields.pop("pid")] = fields
    content_by_form = {
        "by_id": json.dumps(row_by_pid, indent=1),
        "by_id_in_a_line": json.dumps(row_by_pid),
        "list": json.dumps(rows),
    }
    for form, content in content_by_form.items():
        path = tmp_path / form
        path.write_text(content)
        assert read_predictions(path) == rows, form
    documents = [
        {"index": number, "prediction": [f"{number}"], "doc": {"answer": "5", "choices": None}}
        for number in range(3)
    ]
    path = write_jsonl_rows(tmp_path / "other.jsonl", documents)
    with pytest.raises(UserError, match="say --columns pid=NAME"):
        read_predictions(path)
    columns = {
        "pid": "index",
        "response": "prediction.0",
        "answer": "doc.answer",
        "choices": "doc.choices",
    }
    predictions = read_predictions(path, columns=columns)
    assert [row["pid"] for row in predictions] == ["0", "1", "2"]
    assert [row["response"] for row in predictions] == ["0", "1", "2"]
    assert [row["choices"] for row in predictions] == [None, None, None]


def test_fields_change_their_names_in_any_order_and_a_wrong_name_is_refused(
    tmp_path: Path,
) -> None:
    """Fields are renamed in any order, also to the name of another field; a wrong name is refused.

    The columns `gold` and `answer` are read as answer and response.
    """
    rows = [{"pid": "1", "answer": "said", "gold": "right"}]
    path = write_jsonl_rows(tmp_path / "other.jsonl", rows)
    for words in (["answer=gold", "response=answer"], ["response=answer", "answer=gold"]):
        (row,) = read_predictions(path, columns=parse_columns(words))
        assert (row["answer"], row["response"]) == ("right", "said"), words
    with pytest.raises(UserError, match="row 1 has no 'golt', which --columns names for 'answer'"):
        read_predictions(path, columns=parse_columns(["answer=golt", "response=answer"]))
    with pytest.raises(UserError, match="no row of .* has the field 'n'; correct the name"):
        columns = parse_columns(["answer=gold", "response=answer", "n_tokens=n"])
        read_predictions(path, columns=columns)


def test_missing_empty_and_broken_files_are_the_users_mistake(tmp_path: Path) -> None:
    """A file that is missing, empty or broken is a `UserError`, which names a broken row."""
    path = tmp_path / "p.jsonl"
    first_line = json.dumps(prediction("1", ""))
    with pytest.raises(UserError, match="no file"):
        read_predictions(path)
    path.write_text("")
    with pytest.raises(UserError, match="has no rows"):
        read_predictions(path)
    path.write_text(first_line + '\n{"pid": "2", "ans\n')
    with pytest.raises(UserError, match="row 2 is not JSON"):
        read_predictions(path)
    path.write_text(first_line + '\n{"pid": "2", "pid": "3"}\n')
    with pytest.raises(UserError, match=r"row 2 is not JSON \('pid' is given twice"):
        read_predictions(path)


def test_a_row_of_another_runner_may_have_a_number_for_its_id_and_null_for_no_answer(
    tmp_path: Path,
) -> None:
    """An id that is a number becomes a text, and a response that is null an empty one."""
    path = write_jsonl_rows(
        tmp_path / "p.jsonl", [{"question_id": 7, "answer": "5", "response": None}]
    )
    (row,) = read_predictions(path, id_column="question_id")
    assert row["pid"] == "7"
    assert row["response"] == ""


def test_a_line_separator_inside_a_response_does_not_split_its_row(tmp_path: Path) -> None:
    """A response with line separators of Unicode is read as one row.

    Python's `splitlines` would cut at each of the three in `text`.
    """
    text = "a\u2028b\x85c\x0bd"
    path = tmp_path / "p.jsonl"
    line = json.dumps(prediction("1", text), ensure_ascii=False)
    path.write_text(line + "\n")
    [row] = read_predictions(path)
    assert row["response"] == text


class GuessingEngine:
    """An engine that answers with a number from its seed, and is cut off now and then."""

    batch_size = 4

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        return [self._reply(request.seed) for request in requests]

    @staticmethod
    def _reply(seed: int) -> Reply:
        response = rf"wait, \boxed{{{seed % 90}}}"
        finish_reason = "length" if seed % 3 else "stop"
        return Reply(
            response, n_tokens=7 + seed % 5, finish_reason=finish_reason, n_prompt_tokens=9
        )


def test_a_run_with_grey_pictures_says_so_and_is_no_other_run(tmp_path, monkeypatch, capsys):
    """A run with `--view blank` shows grey pictures, and its folder takes no other view.

    A folder of the usual view does not take `blank` either.
    """

    class ColorEngine(GuessingEngine):
        """Answers with 1 to a grey picture, and with `seen` to any other."""

        def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
            replies = []
            for request in requests:
                colors = request.images[0].getcolors()  # None where there are very many
                is_one_color = colors is not None and len(colors) == 1
                response = r"\boxed{1}" if is_one_color else "seen"
                replies.append(Reply(response, n_tokens=1, finish_reason="stop", n_prompt_tokens=9))
            return replies

    data = write_geometry3k(tmp_path / "data", 3)
    monkeypatch.setattr(asking, "build_engine", lambda _: ColorEngine())
    arguments = ["run", "--model", "a/b", "--data", str(data), "--output"]
    assert command.main(GEOMETRY3K, [*arguments, str(tmp_path / "seen")]) == 0
    assert command.main(GEOMETRY3K, [*arguments, str(tmp_path / "grey"), "--view", "blank"]) == 0
    assert "a grey picture of the same size" in capsys.readouterr().out
    seen_rows = read_predictions(tmp_path / "seen" / "predictions.jsonl")
    grey_rows = read_predictions(tmp_path / "grey" / "predictions.jsonl")
    assert {row["response"] for row in seen_rows} == {"seen"}
    assert {row["response"] for row in grey_rows} == {r"\boxed{1}"}
    seen_sizes = [row["image_size"] for row in seen_rows]
    grey_sizes = [row["image_size"] for row in grey_rows]
    assert seen_sizes == grey_sizes
    for folder, options in (("seen", ["--view", "blank"]), ("grey", [])):
        assert command.main(GEOMETRY3K, [*arguments, str(tmp_path / folder), *options]) == 2
        assert "view: the predictions in" in capsys.readouterr().err


VIEWS = ("image", "text", "both", "blank")


def prepare_with_facts(geometry3k_raw: Path, folder: Path) -> str:
    """Prepare the six problems of the raw data, of which one loses its facts; return the folder."""
    raw = shutil.copytree(geometry3k_raw, folder / "raw")
    (raw / "train").rename(raw / "test")
    (raw / "test" / "12" / "logic_form.json").unlink()  # the facts of the problem 12
    prepared = str(folder / "d")
    arguments = ["geometry3k", "--source", "intergps", "--input", str(raw), "--output", prepared]
    assert data_prep(arguments) == 0
    return prepared


def test_facts_in_words_stand_for_the_picture_where_they_suffice(
    tmp_path, monkeypatch, capsys, geometry3k_raw
):
    """The view `text` has a diagram's facts in words, and `both` the picture too.

    One of the six problems has no facts, so these two views leave it out.
    """
    image_counts_by_view: dict[str, list[int]] = {}
    texts_by_view: dict[str, list[str]] = {}

    class RecordingEngine(GuessingEngine):
        """Remembers the images and texts that it is shown, by the `view` of the loop below."""

        def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
            image_counts = image_counts_by_view.setdefault(view, [])
            texts = texts_by_view.setdefault(view, [])
            for request in requests:
                image_counts.append(len(request.images))
                texts.append(str(request.messages[-1]["content"]))
            return [
                Reply("12", n_tokens=1, finish_reason="stop", n_prompt_tokens=9) for _ in requests
            ]

    prepared = prepare_with_facts(geometry3k_raw, tmp_path)
    output = capsys.readouterr().out
    assert "noted: 1 of the rows have no facts in words, such as geometry3k/test/12" in output
    monkeypatch.setattr(asking, "build_engine", lambda _: RecordingEngine())
    arguments = ["run", "--model", "a/b", "--data", prepared]
    for view in VIEWS:
        output_words = ["--view", view, "--output", str(tmp_path / view)]
        assert command.main(GEOMETRY3K, [*arguments, *output_words]) == 0
        output = capsys.readouterr().out
        is_left_out = "without 1 problem whose facts do not suffice" in output
        assert is_left_out is (view in ("text", "both"))
    assert image_counts_by_view == {
        "image": [1] * 6,
        "text": [0] * 5,
        "both": [1] * 5,
        "blank": [1] * 6,
    }
    # in the words of the view, the facts of one of the six problems
    fact = "Angle ABC = 60 degrees. BC = x. AC is perpendicular to BC."
    texts_with_fact = {
        view: [text for text in texts if fact in text] for view, texts in texts_by_view.items()
    }
    assert len(texts_with_fact["image"]) == 0
    assert len(texts_with_fact["text"]) == 1
    assert len(texts_with_fact["both"]) == 1
    assert len(texts_with_fact["blank"]) == 0


def test_a_training_asks_the_same_problems_in_all_views(tmp_path, geometry3k_raw):
    """These are the first three problems that have facts; the second of the data has none."""
    prepared = prepare_with_facts(geometry3k_raw, tmp_path)
    config: Any = Namespace(
        eval_strategy="steps",
        adora_eval=[f"geometry3k={prepared}:views"],
        adora_eval_limit=3,
        eval_steps=1,
        eval_on_start=False,
        eval_delay=0,
    )
    tasks = evaluation.load_evaluation_plan(config, []).tasks
    names = [task.benchmark.name for task in tasks]
    assert names == [f"geometry3k_{view}" for view in VIEWS]
    shared_pids = ["geometry3k/test/11", "geometry3k/test/13", "geometry3k/test/14"]
    for task in tasks:
        pids = [problem.pid for problem in task.problems]
        assert pids == shared_pids
    assert [task.problems[0].n_images for task in tasks] == [1, 0, 1, 1]


def test_a_view_with_facts_is_refused_for_data_without_any(tmp_path, capsys):
    plain = write_geometry3k(tmp_path / "plain", 3)
    arguments = ["run", "--model", "a/b", "--data", str(plain)]
    output_words = ["--view", "both", "--output", str(tmp_path / "none")]
    assert command.main(GEOMETRY3K, [*arguments, *output_words]) == 2
    assert "view: both, and no row of the data has facts in words" in capsys.readouterr().err


def test_figures_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation during a training logs the figures that the command writes."""
    data = write_geometry3k(tmp_path / "data", 9)
    monkeypatch.setattr(asking, "build_engine", lambda _: GuessingEngine())
    output = tmp_path / "out"
    arguments = ["run", "--model", "a/b", "--data", str(data), "--output", str(output)]
    sampling_words = ["--temperature", "1", "--samples", "2"]
    assert command.main(GEOMETRY3K, [*arguments, *sampling_words]) == 0
    score = json.loads((output / "score.json").read_text())

    options = PreparedDataOptions(data=str(data), split="test", prompt=None)
    problems = GEOMETRY3K.load(options).problems
    samples = [AnswerSample(problem, number) for problem in problems for number in range(2)]
    rows = answer_batch(GuessingEngine(), samples, seed=0, system_prompt=None)
    assert rows == read_predictions(output / "predictions.jsonl")
    logged_metrics = metrics_in_training(GEOMETRY3K, rows)
    assert logged_metrics["geometry3k_accuracy"] == score["accuracy"]
    assert logged_metrics["geometry3k_avg@2"] == score["samples"]["avg@2"]["value"]
    assert logged_metrics["geometry3k_truncated"] == score["truncated"]["share"]
    assert logged_metrics["geometry3k_reflective"] == 1.0  # each response begins with "wait"
    for value in logged_metrics.values():
        assert isinstance(value, float | int)
    tagged = [{**row, "response": f"<answer>{row['answer']}</answer>"} for row in rows]
    with_tags = metrics_in_training(GEOMETRY3K, tagged, answer_tags=True)
    without_tags = metrics_in_training(GEOMETRY3K, tagged, answer_tags=False)
    assert with_tags["geometry3k_accuracy"] == 1.0
    assert without_tags["geometry3k_accuracy"] == 0.0
    # Problems of drawn figures have a figure of the log for each family and kind.
    drawn_figures = []
    for row in rows:
        metadata = {**row["metadata"], "family": "crossing", "kind": "vertical"}
        drawn_figures.append({**row, "metadata": metadata})
    metrics_of_drawn = metrics_in_training(GEOMETRY3K, drawn_figures)
    assert metrics_of_drawn["geometry3k_crossing_vertical_accuracy"] == score["accuracy"]


def test_slices_of_several_processes_score_as_one(tmp_path: Path) -> None:
    """Answers that two processes sample in turn give the figures of one process.

    Each answer has a seed of its own, so it does not matter which process samples it.
    """
    data = write_mathvista(tmp_path, mathvista_rows(7))
    options = HubDataOptions(data=str(data), split="testmini")
    problems = MATHVISTA.load(options).problems
    samples = [AnswerSample(problem, number=0) for problem in problems]
    rows_of_two = []
    for rank in range(2):
        rows_of_two += answer_batch(GuessingEngine(), samples[rank::2], seed=0, system_prompt=None)
    rows_of_one = answer_batch(GuessingEngine(), samples, seed=0, system_prompt=None)
    assert metrics_in_training(MATHVISTA, rows_of_two) == metrics_in_training(
        MATHVISTA, rows_of_one
    )
    assert "mathvista_accuracy_ID" in metrics_in_training(MATHVISTA, rows_of_two)
