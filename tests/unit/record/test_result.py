"""What came of a run, in the line with which the page begins and the run ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.config import AdoraGRPOConfig
from adora_vl.evals.records import CORRECT, WRONG, GradedAnswer, RowGrade
from adora_vl.evals.scoring.score import summarise_grades
from adora_vl.evals.scoring.statistics import welch_interval
from adora_vl.record.metrics import read_metrics
from adora_vl.record.result import (
    SCORE_FILE_AFTER,
    SCORE_FILE_BEFORE,
    describe_result,
    is_noise,
    training_change,
)
from adora_vl.record.rollouts import RolloutStore
from adora_vl.record.shown_metrics import PASS_RATE_KEY
from adora_vl.record.summary import summary_lines
from adora_vl.report.run_view import load_run
from tests.support.recorded_runs import ADORA_SETTINGS

RatesByStep = list[list[float]]


def recorded_row(step: int, pass_rate: float) -> dict[str, Any]:
    """Return a rollout as the record has it, in a group with this pass rate and mean reward."""
    return {
        "step": step,
        "id": "p",
        "problem": "Find x.",
        "choices": None,
        "answer": "7",
        "images": [],
        "verdict": "correct",
        "extracted": "7",
        "completion": "7",
        "reason": "same_number",
        "reward": pass_rate,
        "advantage_raw": 0.0,
        "advantage": 0.0,
        "weight": 1.0,
        "tds": False,
        "pass_rate": pass_rate,
        "longest_right": None,
        "mean_wrong": None,
        "length": 10,
        "truncated": False,
        "drift": 0.0,
    }


def write_run(folder: Path, rates: RatesByStep) -> Path:
    """Write the folder of a run, with groups of two rollouts, and return the folder.

    `rates`: for each step the pass rates of its groups, which are their mean rewards too.
    """
    record = RolloutStore(folder, limit_gb=1, settings=ADORA_SETTINGS)
    record.start(0)
    metrics_text = ""
    for step, pass_rates in enumerate(rates, 1):
        columns: dict[str, list[Any]] = {}
        for pass_rate in pass_rates:
            for name, value in recorded_row(step, pass_rate).items():
                columns.setdefault(name, []).extend([value, value])
        record.add(columns, group_size=2)
        record.flush(step)
        mean = sum(pass_rates) / len(pass_rates)
        line = {"step": step, "kind": "train", PASS_RATE_KEY: mean, "reward": mean}
        metrics_text += json.dumps(line) + "\n"
    (folder / "metrics.jsonl").write_text(metrics_text)
    return folder


def write_score(file: Path, digits: str, **fields: Any) -> None:
    """Write a score file with an answer per digit, which is right where the digit is 1."""
    graded: list[GradedAnswer] = []
    for number, digit in enumerate(digits):
        is_right = digit == "1"
        grade = RowGrade(CORRECT if is_right else WRONG, extracted=None, reason="r")
        graded.append(GradedAnswer(f"mine/{number}", grade))
    items = [{"pid": item.pid, "verdict": item.grade.verdict} for item in graded]
    score = {
        **summarise_grades(graded),
        "benchmark": "problems",
        "rules": {},
        "items": items,
        **fields,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(score))


# Ten steps of four groups: the pass rates of the first and last one say what the run shows.
RATES_BETWEEN: RatesByStep = [[0.5, 0.5, 0.5, 0.5]] * 8
RATES_WITH_NOISE: RatesByStep = [[1.0, 0.0, 0.5, 1.0], *RATES_BETWEEN, [0.0, 0.5, 1.0, 0.0]]
RATES_WITH_GAIN: RatesByStep = [[0.0, 0.25, 0.0, 0.25], *RATES_BETWEEN, [1.0, 0.75, 1.0, 0.75]]


@pytest.mark.parametrize(
    ("rates", "expects_noise"), [(RATES_WITH_NOISE, True), (RATES_WITH_GAIN, False)]
)
def test_a_change_in_training_has_an_interval_over_groups(
    tmp_path: Path, rates: RatesByStep, expects_noise: bool
) -> None:
    """The change from the first to the last fifth of the steps has Welch's interval over groups.

    The page and the end of the run say the same, also whether the change is within noise.
    """
    run = write_run(tmp_path / "run", rates)
    log = read_metrics(run / "metrics.jsonl")
    change = training_change(run, log, PASS_RATE_KEY)
    # two of the ten steps, with four groups each
    first_fifth = rates[0] + rates[1]
    last_fifth = rates[-2] + rates[-1]
    interval = welch_interval(first_fifth, last_fifth)
    assert interval is not None
    low, high = interval
    assert change is not None
    assert change.over == "8 and 8 groups"
    assert change.low == pytest.approx(low)
    assert change.high == pytest.approx(high)
    assert is_noise(change) is expects_noise

    result = describe_result(run, log)
    assert result is not None
    assert ("within noise" in result) is expects_noise
    assert result.startswith("pass rate in training ")
    assert "95 % [" in result

    page = load_run(run, 100)
    assert page.result == result

    config = AdoraGRPOConfig(output_dir=str(run), use_cpu=True, bf16=False)
    lines = summary_lines(log, config, run, seconds=1)
    assert result in lines
    row = next(line for line in lines if line.startswith("pass rate"))
    assert " points, 95 % [" in row
    assert ("within noise" in row) is expects_noise


def test_a_run_without_a_record_has_an_interval_over_its_steps(tmp_path: Path) -> None:
    """Without a record the interval of a change is over the logged steps, here four of 20.

    Their pass rates are in turn 0 and 1/2. A change of single steps has no interval.
    """
    log = [{"step": step, PASS_RATE_KEY: step % 2 / 2, "reward": 0.5} for step in range(20)]
    change = training_change(tmp_path, log, PASS_RATE_KEY)
    assert change is not None
    assert change.over == "4 and 4 logged steps"
    assert is_noise(change)
    short = training_change(tmp_path, log[:2], PASS_RATE_KEY)
    assert short is not None
    assert short.low is None
    assert describe_result(tmp_path, log[:1]) == "pass rate in training 0 % (one logged step)"
    assert describe_result(tmp_path, []) is None


def test_a_pass_rate_changes_by_at_most_a_hundred_points(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[1.0, 0.5], *RATES_BETWEEN[:3], [0.0, 0.5]])
    change = training_change(run, read_metrics(run / "metrics.jsonl"), PASS_RATE_KEY)
    assert change is not None
    assert change.low == -1.0
    assert change.high is not None
    assert 0 < change.high <= 1.0


def test_equal_values_before_and_after_have_no_interval(tmp_path: Path) -> None:
    """A change between groups that are all alike is reported without an interval.

    An interval of width 0 would say that no other group could give anything else.
    """
    run = write_run(tmp_path / "run", [[0.0, 0.0]] * 5 + [[1.0, 1.0]] * 5)
    log = read_metrics(run / "metrics.jsonl")
    change = training_change(run, log, PASS_RATE_KEY)
    assert change is not None
    assert change.value == 1.0
    assert change.low is None
    assert describe_result(run, log) == (
        "pass rate in training 0 % → 100 % (first and last fifth of the steps)"
    )


def test_the_last_fifth_begins_with_the_first_step_of_its_first_line(tmp_path):
    """A fifth has the groups of all steps since the line before, if a line stands for ten steps.

    Of 50 steps that are 10 at the start and 10 at the end, with two groups each.
    """
    early_steps = [[0.0, 1.0]] * 10
    later_steps = [[1.0, 1.0]] * 40
    run = write_run(tmp_path, early_steps + later_steps)
    log = [{"step": step, PASS_RATE_KEY: 0.5 if step == 10 else 1.0} for step in range(10, 51, 10)]
    change = training_change(run, log, PASS_RATE_KEY)
    assert change is not None
    assert change.over == "20 and 20 groups"


def test_a_record_that_has_lost_its_beginning_does_not_speak_for_it(tmp_path: Path) -> None:
    """Where the record lacks the first steps, the change is over the logged steps instead.

    The oldest files of a record are deleted when it is full.
    """
    run = write_run(tmp_path / "run", RATES_WITH_NOISE)
    log = read_metrics(run / "metrics.jsonl")
    parts = sorted((run / "rollouts").glob("*.parquet"))
    for oldest_part in parts[:5]:
        oldest_part.unlink()
    change = training_change(run, log, PASS_RATE_KEY)
    assert change is not None
    assert change.over == "2 and 2 logged steps"


def test_the_score_in_the_runs_folder_comes_first(tmp_path: Path) -> None:
    """A score file after the training says more than evaluations on the way and the pass rate.

    With one from before the training, the two are compared answer by answer. Each has 40 answers,
    as digits: 1 is right, 0 wrong.
    """
    run = write_run(tmp_path / "run", RATES_WITH_NOISE)
    evaluation = {"step": 9, "eval_problems_accuracy": 0.5}
    log = [*read_metrics(run / "metrics.jsonl"), evaluation]
    coverage = {"answers": 40, "asked": 40, "in_data": 512}
    write_score(run / SCORE_FILE_AFTER, "01" * 20, coverage=coverage)
    result = describe_result(run, log)
    assert result is not None
    assert result.startswith("held-out accuracy, mine 50.0 % (95 %: 35.2 to 64.8) of 40 of 512 ")

    write_score(run / SCORE_FILE_AFTER, "01" * 20, samples={"k": 4})
    result = describe_result(run, log)
    assert result is not None
    assert " of 40 answers (" in result

    write_score(run / SCORE_FILE_AFTER, "01" * 20, coverage=coverage)
    write_score(run / SCORE_FILE_BEFORE, "01" * 19 + "00")
    result = describe_result(run, log)
    assert result is not None
    # Bonett and Price's interval for one answer of 40 that became right
    assert "48 % → 50 %: +2.5 points, 95 % [-5.7, +10.4], within noise" in result
    write_score(run / SCORE_FILE_BEFORE, "01" * 19 + "00", benchmark="geometry3k")
    assert describe_result(run, log) == result, "it is another name of the same benchmark"

    write_score(run / SCORE_FILE_BEFORE, "0" * 40)
    result = describe_result(run, log)
    assert result is not None
    assert "0 % → 50 %: +50.0 points" in result
    assert "within noise" not in result
    assert load_run(run, 100).result == result

    (run / SCORE_FILE_AFTER).write_text("{")  # damaged, so the evaluation on the way is shown
    result = describe_result(run, log)
    assert result is not None
    assert result.startswith("held-out accuracy, problems 50 %")


def test_evaluations_on_the_way_have_an_interval_where_the_log_has_theirs(tmp_path: Path) -> None:
    """Evaluations of different problems are compared by the intervals of both."""
    key = "eval_problems_accuracy"

    def evaluation(step: int, value: float, half_width: float) -> dict[str, Any]:
        interval = {f"{key}_low": value - half_width, f"{key}_high": value + half_width}
        return {"step": step, "kind": "eval", key: value, **interval}

    result = describe_result(
        tmp_path,
        [
            evaluation(step=0, value=0.4, half_width=0.03),
            evaluation(step=9, value=0.5, half_width=0.04),
        ],
    )
    # Newcombe: the root of the sum of squares, 0.05 on both sides.
    assert result == (
        "held-out accuracy, problems 40 % → 50 %: +10.0 points, 95 % [+5.0, +15.0]"
        " (first and last evaluation)"
    )
    result = describe_result(
        tmp_path,
        [
            evaluation(step=0, value=0.4, half_width=0.06),
            evaluation(step=9, value=0.45, half_width=0.08),
        ],
    )
    assert result is not None
    assert "[-5.0, +15.0], within noise" in result
    result = describe_result(tmp_path, [{"step": 0, key: 0.1}, {"step": 9, key: 0.4}])
    assert result == "held-out accuracy, problems 10 % → 40 % (first and last evaluation)"
