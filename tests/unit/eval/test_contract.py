"""Every listed benchmark keeps the promises of `adora_vl.evals.benchmark.Benchmark`.

A new one needs nothing else.
"""

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import IntervalStrategy, Trainer

from adora_vl import evaluation
from adora_vl.config.keys import AdoraKeys
from adora_vl.data.dataset import MANIFEST_NAME, PREPARED_BY
from adora_vl.evals.benchmark import (
    BENCHMARK_NAMES,
    benchmark_name_for,
    find_benchmark,
    load_checked_problems,
)
from adora_vl.evals.inference.requests import AnswerRequest
from adora_vl.evals.inference.views import apply_view
from adora_vl.evals.options import DataOptions, ScoreOptions
from adora_vl.evals.records import (
    AccuracyMetric,
    Benchmark,
    BenchmarkSummary,
    LoadedProblems,
    Problem,
)
from adora_vl.evals.scoring.files import metrics_in_training
from adora_vl.evals.scoring.score import accuracy_metric, score_predictions
from adora_vl.utils import own_files
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from eval import __main__ as evaluate
from eval.command import parse_command
from eval.compare import main as compare
from tests.support import benchmark_data as support
from tests.support.benchmark_data import WRITER_BY_BENCHMARK
from tests.support.paths import REPOSITORY
from tests.support.stand_ins import FakeAccelerator, trainer_state, training_config

# How a benchmark wants the answer to be written, where it is not boxed.
ANSWER_TEMPLATES = {
    "mmmu_pro": "Answer: {}",
    "dynamath": '{{"short answer": "{}"}}',
}


def load_problems_twice(benchmark: Benchmark, data: Path) -> list[Problem]:
    """Load the problems of a folder twice, and check that its hash stays the same."""
    arguments = ["infer", "--model", "m", "--data", str(data), "--output", "o"]
    first_load = benchmark.load(parse_command(arguments, benchmark).ask_options.data)
    second_load = benchmark.load(parse_command(arguments, benchmark).ask_options.data)
    assert first_load.data_hash == second_load.data_hash
    return first_load.problems


@pytest.mark.parametrize("name", BENCHMARK_NAMES)
def test_a_benchmark_keeps_the_promises_of_the_seam(name, tmp_path, capsys):
    """A benchmark's problems can be asked, its own answers are right, and its score is printed.

    `eval.compare` takes the score too.
    """
    benchmark = find_benchmark(name)
    assert benchmark.name == name
    problems = load_problems_twice(benchmark, WRITER_BY_BENCHMARK[name](tmp_path))
    count = 10 if name == "dynamath" else 4  # what the writers of test data write
    assert len({problem.pid for problem in problems}) == len(problems) == count
    check_images(problems)
    rows = answer_with_references(problems, ANSWER_TEMPLATES.get(name, r"\boxed{{{}}}"))
    # A problem that was not asked is wrong, whatever its response.
    rows[3] |= {"finish_reason": "image_failed", "response": rows[0]["response"]}
    if benchmark.check:
        for row in rows:
            assert benchmark.check(row) is None
    result = score_predictions(benchmark, rows, benchmark.score_options()).score
    assert result["benchmark"] == name
    assert result["total"] == count
    assert result["rules"]
    assert result["items"][3]["verdict"] != "correct"
    assert result["image_failed"] == 1
    assert result["correct"] >= 2, "a boxed reference answer is right"
    assert evaluate.main([name, *support.score_arguments(tmp_path, rows)]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["items"] == result["items"]
    # These two benchmarks score any data set, here one of drawn problems, and show its name.
    is_of_any_data = name in ("geometry3k", "problems")
    title = "synthetic" if is_of_any_data else name
    assert f"{title}: " in capsys.readouterr().out
    assert compare([str(tmp_path / "s.json")]) == 0
    # What is published of Geometry3K stands beside its own test split alone.
    is_quoted = benchmark.published is not None and not is_of_any_data
    assert ("(quoted)" in capsys.readouterr().out) is is_quoted


def check_images(problems: list[Problem]) -> None:
    """Check that each problem has a prompt and its images, and that the view `blank` greys them."""
    has_images = problems[0].n_images > 0
    blank_problems = apply_view(problems, "blank") if has_images else problems
    for problem, blank_problem in zip(problems, blank_problems, strict=True):
        assert problem.prompt
        images = problem.images()
        grey_images = blank_problem.images()
        assert len(images) == len(grey_images) == problem.n_images
        for image, grey_image in zip(images, grey_images, strict=True):
            assert grey_image.size == image.size
            n_pixels = image.width * image.height
            assert grey_image.getcolors() == [(n_pixels, (128, 128, 128))]


def answer_with_references(problems: list[Problem], template: str) -> list[dict[str, Any]]:
    """Return the predictions of a model that gives each reference answer, as a file stores them."""
    rows = []
    for problem in problems:
        response = template.format(problem.fields["answer"])
        row = {**problem.fields, "response": response, "finish_reason": "stop"}
        rows.append(json.loads(json.dumps(row)))
    return rows


@pytest.mark.parametrize(
    ("name", "changed_fields", "expected"),
    [
        ("wemath", {"key": "2steps_3"}, "has key = '2steps_3', expected such as 2steps_1"),
        ("wemath", {"answer": "H2"}, "has answer = 'H2', expected a letter"),
        ("mmstar", {"answer": "dam"}, "has answer = 'dam', expected a letter"),
        ("mmstar", {"answer": "E"}, "has answer = 'E', expected a letter from A to D"),
        (
            "mathvista",
            {"answer": "6", "question_type": "multi_choice", "choices": ["4", "5"]},
            "has answer = '6', expected the text of one of its choices",
        ),
        (
            "mathvision",
            {"answer": "F", "options": list("abcde")},
            "has answer = 'F', expected one of A, B, C, D, E",
        ),
        (
            "mathverse",
            {"problem_version": "Vision"},
            "has problem_version = 'Vision', expected one of Text Dominant",
        ),
        ("mmmu_pro", {"options": "['1'"}, "has options = \"['1'\", expected a list"),
        ("mmmu_pro", {"answer": "D"}, "expected a letter from A to C"),
        ("logicvista", {"skill": "spatial"}, "has skill = 'spatial', expected a list"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_before_the_model_is_asked(
    name, changed_fields, expected, tmp_path
):
    """`check` returns what is wrong with a row of a benchmark, and None if it can be scored."""
    benchmark = find_benchmark(name)
    problem = load_problems_twice(benchmark, WRITER_BY_BENCHMARK[name](tmp_path))[0]
    row = {**problem.fields, "response": "B"}
    assert benchmark.check is not None
    assert benchmark.check(row) is None
    message_of_check = benchmark.check({**row, **changed_fields})
    assert message_of_check is not None
    assert expected in message_of_check
    changed_field = next(iter(changed_fields))
    del row[changed_field]
    message_of_check = benchmark.check(row)
    assert message_of_check is not None
    assert f"lacks the field {changed_field!r}" in message_of_check


def test_the_list_stands_once(capsys):
    """`BENCHMARK_NAMES` has every benchmark in `eval/`, for the help and for suggestions."""
    files = (REPOSITORY / "eval").glob("*.py")
    modules = {path.stem for path in files if "\nBENCHMARK = " in path.read_text()}
    assert modules == set(BENCHMARK_NAMES)
    assert WRITER_BY_BENCHMARK.keys() == set(BENCHMARK_NAMES)
    assert evaluate.main(["--help"]) == 0
    assert ",".join(BENCHMARK_NAMES) in capsys.readouterr().out
    assert evaluate.main(["mathvist"]) == 2
    assert "did you mean 'mathvista'?" in capsys.readouterr().err


def test_a_data_set_says_which_benchmark_scores_it(tmp_path):
    """The source in the manifest of a data set decides; without a manifest it is `problems`."""
    assert benchmark_name_for(tmp_path) == "problems", "rows of the user's own"
    name_by_source = {
        "knights": "knights",
        "geometry3k/hub": "geometry3k",
        "own/csv": "problems",
        "synthetic": "problems",
    }
    for source, name in name_by_source.items():
        manifest = {"made_by": PREPARED_BY, "source": source}
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
        assert benchmark_name_for(tmp_path) == name


def test_every_benchmark_stands_in_the_help_of_a_training_and_on_the_pages():
    """Each benchmark is named in the help of `adora_eval` and on two pages of the documentation."""
    help_by_key = {field.name: field.metadata.get("help", "") for field in fields(AdoraKeys)}
    words_of_help = re.findall(r"\w+", help_by_key["adora_eval"])
    configuration_page = (REPOSITORY / "docs" / "configuration.md").read_text()
    evaluation_page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    for name in BENCHMARK_NAMES:
        assert name in words_of_help, f"the help of adora_eval lacks {name}"
        assert f"{name}=DIR" in configuration_page, name
        assert f"eval.{name}" in evaluation_page, name


class WholePartEngine:
    """An engine that answers `Side 1.5` with the whole part of the length, `1`."""

    batch_size = 2

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        replies = []
        for request in requests:
            question = request.messages[-1]["content"][-1]["text"]
            length = question.removeprefix("Side ")
            whole_length = length.split(".")[0]
            reply = Reply(
                rf"\boxed{{{whole_length}}}", n_tokens=3, finish_reason="stop", n_prompt_tokens=9
            )
            replies.append(reply)
        return replies


@pytest.fixture
def rows_of_documented_benchmark(tmp_path, monkeypatch) -> list[dict[str, Any]]:
    """The rows of the benchmark on the page, which lies with its file in the working directory."""
    page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    (code,) = re.findall(r"```python\n(# lengths.py\n.*?)```", page, re.DOTALL)
    questions = ("Side 7", "Side 1.5", "Side 2.5", "")  # the last one stands in its picture
    rows = []
    for number, question in enumerate(questions):
        row = {"id": number, "question": question}
        rows.append({**row, "answer": "7", "unit": "cm", "image": "side.png"})
    rows[0]["unit"] = "mm"  # `unit` is a group, and one of a single value is left out of the table
    monkeypatch.chdir(tmp_path)
    Path("lengths.py").write_text(code)
    Path("test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Image.new("RGB", (56, 28)).save("side.png")
    return rows


WORDS_OF_A_RUN = ["run", "--model", "a/b", "--data", "test.jsonl", "--output", "out"]


@pytest.fixture
def output_of_documented_run(rows_of_documented_benchmark, monkeypatch, capsys) -> str:
    """What a run with the benchmark of the page prints; its output folder is `out`."""
    monkeypatch.setattr("adora_vl.evals.asking.build_engine", lambda settings: WholePartEngine())
    assert evaluate.main(["lengths.py:LENGTHS", *WORDS_OF_A_RUN]) == 0
    output: str = capsys.readouterr().out
    return output


def test_the_benchmark_of_the_page_runs_from_its_file(output_of_documented_run, capsys):
    """The benchmark is the example of docs/evaluation.md: one of its four answers is right."""
    assert "lengths test: a/b" in output_of_documented_run
    assert "rules exact lengths" in output_of_documented_run
    assert "unit" in output_of_documented_run
    result = json.loads(Path("out/score.json").read_text())
    assert result["correct"] == 1
    assert result["total"] == 4
    assert result["groups"]["image_size"]["to 128x128"]["total"] == 4
    file_hash = result["rules"]["file"]
    assert len(file_hash) >= 16
    assert result["fingerprint"]["fields"]["benchmark_file"] == file_hash
    assert compare(["out"]) == 0
    assert "lengths: accuracy" in capsys.readouterr().out


def test_another_file_of_a_benchmark_is_another_run(output_of_documented_run, capsys):
    """A changed file of a benchmark is refused in the folder of answers by the first one.

    The hash of the file is in the fingerprint. `out` has the answers by `lengths.py`.
    """
    code = Path("lengths.py").read_text()
    Path("other.py").write_text(code.replace("exact", "rounded"))
    assert evaluate.main(["other.py:LENGTHS", *WORDS_OF_A_RUN]) == 2
    assert "benchmark_file: the predictions in 'out' were made with" in capsys.readouterr().err
    assert evaluate.main(["lengths.py:LENGTH", *WORDS_OF_A_RUN]) == 2
    expected = "no benchmark 'LENGTH' there; it has LENGTHS; did you mean 'LENGTHS'?"
    assert expected in capsys.readouterr().err


def test_a_training_evaluates_with_a_benchmark_beside_its_config(
    rows_of_documented_benchmark, monkeypatch
):
    """An entry of `adora_eval` names a file in the config's folder, its benchmark and its data."""
    folder = Path("beside").resolve()  # where the config of the training lies
    folder.mkdir()
    (folder / "mine.py").write_text(Path("lengths.py").read_text())
    monkeypatch.setattr(own_files, "_config_folders", [folder])
    config = training_config(
        eval_strategy=IntervalStrategy.STEPS,
        adora_eval=["mine.py:LENGTHS=test.jsonl"],
        adora_eval_limit=2,
        eval_steps=1,
    )
    (task,) = evaluation.load_evaluation_plan(config, []).tasks
    assert task.benchmark.name == "lengths"
    assert [problem.prompt for problem in task.problems] == ["Side 7", "Side 1.5"]
    later = find_benchmark("mine.py:LENGTHS")
    assert later.name == "lengths", "what is named next is beside the config too"


@pytest.mark.parametrize(
    (
        "second_problem",
        "expected",
    ),  # the id and the prompt of the second problem, and the error
    [
        (("a", "Side 1"), "the id 'a' occurs twice"),
        (("b", "Side <|image_pad|>"), r"'b' .*<\|image_pad\|>; remove it"),
    ],
)
def test_problems_that_ones_own_benchmark_makes_are_checked(
    rows_of_documented_benchmark, second_problem, expected
):
    """Problems of a user's benchmark with the same id, or an image token in a text, are refused."""
    problems = [
        Problem({"pid": pid}, prompt=prompt, n_images=0, images=list)
        for pid, prompt in (("a", "Side 7"), second_problem)
    ]
    loaded = LoadedProblems(problems, "hash")
    benchmark = replace(find_benchmark("lengths.py:LENGTHS"), load=lambda options: loaded)
    with pytest.raises(UserError, match=expected):
        load_checked_problems(benchmark, DataOptions(data="lengths", split="test"))


def summary_with_halves(
    rows: Sequence[Any], graded: Sequence[Any], options: ScoreOptions
) -> BenchmarkSummary:
    """Return the figures of a benchmark's own: of every kind that they may have."""
    halves: dict[str, AccuracyMetric | float | str | None] = {
        "first": accuracy_metric(graded[:2]),
        "mean": 0.25,
        "empty": None,
        "definition": "two halves",
    }
    return BenchmarkSummary(
        metrics={"halves": halves},
        extra_keys={"count": len(rows)},
        lines=["a line of its own"],
        warnings=["a warning of its own"],
    )


def test_figures_of_a_new_benchmark_are_printed_compared_and_logged(
    rows_of_documented_benchmark, capsys
):
    """The cells and numbers of a summary are rows of the table, columns and figures of the log.

    Its texts stand in the score file alone. The benchmark `new` has the summary of
    `summary_with_halves`; the first of its four answers is wrong.
    """
    lengths = find_benchmark("lengths.py:LENGTHS")
    benchmark = replace(lengths, name="new", summary=summary_with_halves)
    rows = []
    for row in rows_of_documented_benchmark:
        is_first = row["id"] == 0
        response = r"\boxed{8}" if is_first else r"\boxed{7}"
        rows.append({**row, "pid": str(row["id"]), "response": response})
    stored = support.score_predictions(benchmark, Path(), rows)
    table = capsys.readouterr().out.splitlines()
    first_words_of_lines = [line.split()[:3] for line in table]
    assert ["halves", "first", "1/2"] in first_words_of_lines
    assert ["mean", "25.0"] in first_words_of_lines
    assert "a line of its own" in table
    assert "warning: a warning of its own" in table
    assert stored["halves"]["definition"] == "two halves"
    assert stored["count"] == 4
    assert compare(["s.json"]) == 0
    _, head, line = capsys.readouterr().out.splitlines()[:3]
    assert head.split() == ["all", "first", "mean"]
    assert line.split()[-1] == "25.0"
    logged_metrics = metrics_in_training(benchmark, rows)
    assert logged_metrics["new_accuracy"] == 0.75
    assert logged_metrics["new_accuracy_first"] == 0.5
    assert logged_metrics["new_accuracy_mean"] == 0.25


def test_the_log_of_an_evaluation_is_not_taken_for_that_of_the_step(monkeypatch):
    """`log_evaluation` leaves `should_log` set, so that the step itself is still logged.

    Every log of Transformers clears it.
    """
    from adora_vl.trainer import AdoraGRPOTrainer

    logged_metrics: list[dict[str, float]] = []

    def log(trainer: Any, metrics_in_training: dict[str, float]) -> None:
        logged_metrics.append(metrics_in_training)
        trainer.control.should_log = False  # as Transformers does after every log

    monkeypatch.setattr(Trainer, "log", log)
    trainer: Any = Namespace(control=Namespace(should_log=True))
    AdoraGRPOTrainer.log_evaluation(trainer, {"eval_accuracy": 0.5})
    assert logged_metrics == [{"eval_accuracy": 0.5}]
    assert trainer.control.should_log, "the log of the step itself would be left out"


def test_an_evaluation_during_training_scores_the_answers_of_all_ranks(monkeypatch, capsys):
    """Four of nine problems are asked at steps 2 and 4, and three of the four answers are right.

    This rank answers the first and the third problem, and gathers the rows of the other rank.
    """
    rows = [
        {
            "pid": str(index),
            "answer": "5",
            "response": r"\boxed{5}" if index else r"\boxed{6}",
        }
        for index in range(4)
    ]
    problems = [Problem({"pid": row["pid"]}, "", 0, list) for row in rows]
    logged_metrics: list[dict[str, float]] = []
    chat_arguments: list[dict[str, Any]] = []
    # This process is the first of two ranks; the second has the rows 1 and 3.
    monkeypatch.setattr(evaluation, "gather_object", lambda local: [*local, *rows[1::2]])

    def build_chat(*_: object, **kwargs: object) -> Namespace:
        chat_arguments.append(kwargs)
        return Namespace(decode=str, context_length=64)

    monkeypatch.setattr(evaluation, "ChatProcessor", build_chat)
    row_by_pid = {row["pid"]: row for row in rows}
    monkeypatch.setattr(
        evaluation,
        "answer_batch",
        lambda _, samples, **kwargs: [row_by_pid[sample.problem.pid] for sample in samples],
    )
    # Stand-ins with no more than an evaluation uses; `answer_batch` above asks no model.
    groups = Namespace(tool_loop=None, any_rank_continues=bool, server_context=None)
    policy_and_engine: Any = Namespace(
        accelerator=FakeAccelerator(num_processes=2),
        config=training_config(max_completion_length=8, chat_template_kwargs={"a": 1}),
        policy=Namespace(name_or_path="x"),
        sampler=Namespace(reads_prompts=False, awake=nullcontext, sample=lambda *_, **__: []),
        engine=Namespace(greedy_settings={}),
        processor="p",
    )
    generation_sampler: Any = Namespace(
        group_sampler=groups, guard=Namespace(ending_run_if_no_server_is_left=nullcontext)
    )
    plan = evaluation.EvaluationPlan(
        [evaluation.EvaluationTask(find_benchmark("geometry3k"), problems, problems_in_data=9)],
        every=2,
        at_start=False,
        prompt_template=None,
    )
    evaluate_on_the_way = partial(
        evaluation.EvaluationCallback,
        engine_and_policy=policy_and_engine,
        generation_sampler=generation_sampler,
        end_tokens=[1],
        log_evaluation=logged_metrics.append,
        timed_evaluation=nullcontext,
    )
    callback = evaluate_on_the_way(plan=plan)
    for step in range(1, 5):
        callback.on_step_end(None, trainer_state(step), None)
    assert [values["eval_geometry3k_accuracy"] for values in logged_metrics] == [0.75, 0.75]
    assert len(chat_arguments) == 2
    for kwargs in chat_arguments:
        assert kwargs["chat_template_kwargs"] == {"a": 1}, "the prompt of the training"
        assert kwargs["processor"] == "p"
    late_callback = evaluate_on_the_way(plan=replace(plan, delay=3))
    for step in range(1, 5):
        late_callback.on_step_end(None, trainer_state(step), None)
    assert len(logged_metrics) == 3, "eval_delay: 3 leaves step 2 out"
    output = capsys.readouterr().out
    assert "step 2: geometry3k 75.0 %" in output
    assert "right, 4 of 9 problems asked" in output
