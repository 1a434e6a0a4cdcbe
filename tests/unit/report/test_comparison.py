"""Did it help? Training runs against each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals.records import CORRECT, WRONG, GradedAnswer, RowGrade
from adora_vl.evals.scoring.score import summarise_grades
from adora_vl.evals.scoring.statistics import (
    paired_t_interval,
    t_quantile,
    welch_interval,
)
from adora_vl.record.shown_metrics import PASS_RATE_KEY
from adora_vl.report.__main__ import main
from adora_vl.report.compare_runs import difference_over_seeds, value_at_budget
from adora_vl.report.compared_runs import read_compared_run, rollouts_per_step

RUN_CONFIG = {
    "seed": 0,
    "adora_method": {"grpo": {}},
    "generation_batch_size": 32,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "learning_rate": 1e-4,
    "output_dir": "x",
}
ADORA_METHOD = {"adora": {"mode": "attenuation", "factor": 0.1}}


def write_run(
    folder: Path,
    rates: list[float],
    right: int | None = None,
    *,
    seconds: float = 1.0,
    **config: Any,
) -> str:
    """Write the folder of a finished run, and return its path.

    `rates`: the pass rate of each step. `right`: how many of 20 held-out problems its model solves;
    None: it was not evaluated. `seconds`: of each step. `config`: changed keys.
    """
    folder.mkdir(parents=True)
    manifest = {
        "made_by": "adora_vl.train",
        "config": RUN_CONFIG | config,
        "data": {"folder": "d", "rows": 9, "fingerprint": "f"},
        "model": {"name": "m", "fingerprint": "g"},
        "batches": "",
        "device": "cpu",
        "commit": None,
        "versions": {},
        "starts": [{"time": "now"}],
        "status": "finished",
        "steps": len(rates),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    figures = {"kind": "train", "seconds/rollout": seconds}
    lines = [
        {"step": step, "adora/pass_rate": rate, **figures} for step, rate in enumerate(rates, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if right is not None:
        graded = [
            GradedAnswer(
                str(i), RowGrade(CORRECT if i < right else WRONG, extracted=None, reason="r")
            )
            for i in range(20)
        ]
        items = [{"pid": item.pid, "verdict": item.grade.verdict} for item in graded]
        score = summarise_grades(graded) | {
            "benchmark": "geometry3k",
            "rules": {},
            "items": items,
        }
        (folder / "eval").mkdir()
        (folder / "eval" / "score.json").write_text(json.dumps(score))
    return str(folder)


def lines_of_comparison(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Runs the command of the report with these words, and returns the lines that it prints."""
    assert main(list(arguments)) == 0
    printed = capsys.readouterr().out
    return printed.splitlines()


def test_intervals_of_differences_are_those_computed_by_hand():
    """The factors are Student's t for 95 %: 4.303 for 2 degrees of freedom and 2.776 for 4."""
    # differences 1, 2, 3: mean 2, standard deviation 1, so 2 +- 4.303 / sqrt(3)
    assert paired_t_interval([1, 2, 3]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-3)
    # equal variances of 1 with 3 values each: df = 4, so 3 +- 2.776 * sqrt(2 / 3)
    assert welch_interval([1, 2, 3], [4, 5, 6]) == pytest.approx((3 - 2.2666, 3 + 2.2666), abs=1e-3)
    # without a spread there is no interval; one of width 0 would say that nothing is uncertain
    assert welch_interval([1, 1], [2, 2]) is None
    assert paired_t_interval([0.3 - 0.1, 0.2]) is None
    assert [t_quantile(df) for df in (1, 2.9, 30, 1000)] == [12.706, 4.303, 2.042, 2.042]


def test_seeds_are_paired_where_they_are_the_same():
    """Each side has a value by seed: {0: 0.1, 1: 0.5}."""
    paired = difference_over_seeds({0: 0.1, 1: 0.5}, {1: 0.7, 0: 0.2})
    assert paired.value == pytest.approx(0.15)
    assert paired.over == "2 pairs of seeds"
    # The pairs differ by 0.1 and 0.2: 0.15 +- 12.706 * 0.05.
    assert paired.low == pytest.approx(0.15 - 0.6353)
    assert paired.high == pytest.approx(0.15 + 0.6353)
    # Both pairs differ by 0.1, from which no interval can be computed.
    agreeing = difference_over_seeds({0: 0.1, 1: 0.5}, {1: 0.6, 0: 0.2})
    assert agreeing.value == pytest.approx(0.1)
    assert agreeing.low is None
    assert agreeing.over == "2 pairs of seeds that agree: no interval"
    unpaired = difference_over_seeds({0: 0.1, 1: 0.5}, {2: 0.6, 3: 0.2})
    assert unpaired.low is not None
    assert unpaired.low < -0.5
    assert unpaired.over == "2 and 2 seeds"
    assert difference_over_seeds({0: 0.1}, {0: 0.2}).low is None


def test_a_figure_at_a_budget_is_the_mean_of_its_last_tenth():
    """Twenty points (budget, value): (10, 1), (20, 2) up to (200, 20)."""
    points = [(10.0 * i, float(i)) for i in range(1, 21)]
    assert value_at_budget(points, 100, window=0.1) == 10  # the points behind 90
    assert value_at_budget(points, 200, window=0.1) == (19 + 20) / 2  # those behind 180
    assert value_at_budget(points, 105, window=0.0) == 10
    assert value_at_budget(points, 9, window=0.1) is None


def test_the_rollouts_of_a_step_follow_from_the_sizes_of_its_batches():
    """A step learns from its part of a generation; two iterations learn from each part twice."""
    # generation_batch_size, steps_per_generation, gradient_accumulation_steps, num_iterations
    cases = [
        (32, 1, 1, 1, 32),
        (4096, 8, 1, 1, 4096 / 8),
        (64, 4, 4, 1, 64),
        (64, 1, 1, 2, 64 / 2),
    ]
    for batch_size, micro_batches, accumulated, iterations, expected in cases:
        config = {
            "generation_batch_size": batch_size,
            "steps_per_generation": micro_batches,
            "gradient_accumulation_steps": accumulated,
            "num_iterations": iterations,
        }
        assert rollouts_per_step(config) == expected, config


def test_a_config_without_the_newer_sizes_has_rollouts_of_a_step():
    """A size that the manifest of an older run lacks counts as 1."""
    without_iterations = {
        "generation_batch_size": 64,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 4,
    }
    without_accumulation = {
        "generation_batch_size": 64,
        "steps_per_generation": 1,
        "num_iterations": 2,
    }
    assert rollouts_per_step(without_iterations) == 64
    assert rollouts_per_step(without_accumulation) == 32


def test_a_line_of_several_steps_stands_for_the_seconds_of_all_of_them(tmp_path):
    """With `logging_steps: 5` a line counts for the rollouts and seconds of five steps.

    The seconds in it are means over these steps.
    """
    folder = Path(write_run(tmp_path / "a", [0.1]))
    lines = [
        {
            "step": step,
            "kind": "train",
            PASS_RATE_KEY: 0.5,
            "seconds/rollout": 2.0,
            "seconds/policy": 1.0,
        }
        for step in (5, 10)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = read_compared_run(folder).curves[PASS_RATE_KEY]
    # the 16 rollouts and the 2 + 1 seconds of a step, five times for each line
    assert (first.rollouts, first.seconds) == (5 * 16, 5 * 3)
    assert (second.rollouts, second.seconds) == (10 * 16, 10 * 3)


def test_seconds_of_an_evaluation_are_those_of_the_steps_before_it(tmp_path):
    """An evaluation stands at the training seconds up to its step, and its own do not count.

    It is logged before the line of its own step.
    """
    folder = Path(write_run(tmp_path / "a", [0.1]))
    lines = [
        {"step": 0, "kind": "eval", "eval_drawn_accuracy": 0.1},
        {"step": 4, "kind": "eval", "eval_drawn_accuracy": 0.2},
        {"step": 5, "kind": "train", "seconds/rollout": 2.0, "seconds/evaluation": 30.0},
        {"step": 8, "kind": "eval", "eval_drawn_accuracy": 0.3},
        {"step": 8, "kind": "end", "seconds/rollout": 4.0, "seconds/evaluation": 30.0},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    points = read_compared_run(folder).curves["drawn"]
    assert [point.seconds for point in points] == [0, 4 * 2, 5 * 2 + 3 * 4]


def test_two_runs_with_one_seed_are_judged_over_the_problems(tmp_path, capsys):
    """B solves 16 of the 20 held-out problems and A 5, which is 55 points more.

    A step is 16 rollouts. A takes ten seconds for its ten steps, and B twenty.
    """
    a = write_run(tmp_path / "a", [0.1] * 10, 5)
    b = write_run(
        tmp_path / "b",
        [0.1, 0.3] + [0.5] * 8,
        16,
        seconds=2.0,
        adora_method=ADORA_METHOD,
    )
    lines = lines_of_comparison(capsys, a, b, "--compare")
    text = lines[0]
    assert text.startswith(
        "B (ADORA attenuation, factor 0.1, 1 seed) is better than A (GRPO, 1 seed): +55.0 points on"
    )
    assert "over 20 problems" in text
    assert "The configs differ in adora_method." in text
    assert "With one seed on a side" in text
    assert "At equal rollouts (160 rollouts) it is +40.0 in pass rate in training." in text
    # A step of B takes 2 s, so its fifth step falls into the last tenth of 10 s.
    assert "At equal seconds (10 s) it is +40.0 in pass rate in training." in text
    assert 'differs: adora_method: "grpo" -> "adora"' in lines
    assert sum(line.startswith("geometry3k, held out, the end") for line in lines) == 1


def test_equal_seconds_are_not_equal_rollouts(tmp_path, capsys):
    """A step of B takes twice as long as one of A.

    After all ten steps (160 rollouts) B has 1.0 and A 0.2. After the ten seconds of A, B has done
    five steps, and has 0.5.
    """
    a = write_run(tmp_path / "a", [0.2] * 10, 5)
    b = write_run(
        tmp_path / "b", [0.1 * step for step in range(1, 11)], 5, seconds=2.0, learning_rate=1e-3
    )
    lines = lines_of_comparison(capsys, a, b, "--compare")
    assert any("160 rollouts" in line and "+80.0" in line for line in lines)
    assert any("training, 10 s" in line and "+30.0" in line for line in lines)
    legend_start = next(
        number for number, line in enumerate(lines) if line.startswith("N rollouts, N s: ")
    )
    explanation = lines[legend_start + 1]
    assert explanation.startswith("pass rate in training: ")
    assert "the last tenth before that point" in explanation
    assert "cannot be told from" in lines[0]


def test_an_evaluation_on_the_way_is_taken_as_it_is(tmp_path, capsys):
    """Runs are compared by the last evaluation alone, but by the last tenth of the pass rate.

    An evaluation covers many problems already; a step has few.
    """
    for name, offset in (("a", 0.0), ("b", 0.4)):
        folder = Path(write_run(tmp_path / name, [0.1], adora_method={name: {}}))
        shares = {95: 0.5, 100: 0.5 + offset}
        evaluated = {
            step: {"step": step, "kind": "eval", "eval_drawn_accuracy": share}
            for step, share in shares.items()
        }
        trained = (
            {
                "step": step,
                "kind": "train",
                PASS_RATE_KEY: share,
                "seconds/rollout": 1.0,
            }
            for step, share in shares.items()
        )
        (folder / "metrics.jsonl").write_text(
            "\n".join(map(json.dumps, [*trained, *evaluated.values()]))
        )
    lines = lines_of_comparison(capsys, str(tmp_path / "a"), str(tmp_path / "b"), "--compare")
    [evaluation] = [line for line in lines if line.startswith("drawn on the way, 1,600 rollouts")]
    [training] = [
        line for line in lines if line.startswith("pass rate in training, 1,600 rollouts")
    ]
    assert "+40.0" in evaluation  # 0.9 and 0.5 at the last step
    assert "+20.0" in training  # of the last tenth (steps 95 and 100) 0.7 and 0.5


def test_several_seeds_are_sorted_by_config_and_judged_over_the_seeds(tmp_path, capsys):
    """Runs may be named in any order: those with the config of the first one are side A.

    Of 20 problems A solves 5, 6 and 7, and B 11, 13 and 15: 7 more on average.
    """
    seeds = range(3)
    a = [write_run(tmp_path / f"a{s}", [0.5], 5 + s, seed=s) for s in seeds]
    b = [
        write_run(tmp_path / f"b{s}", [0.5], 11 + 2 * s, seed=s, adora_method=ADORA_METHOD)
        for s in seeds
    ]
    mixed = lines_of_comparison(capsys, a[0], b[0], b[1], a[1], a[2], b[2], "--compare")
    assert mixed == lines_of_comparison(capsys, *a, "--compare", *b)
    assert "A (GRPO, 3 seeds): +35.0 points" in mixed[0]
    assert "over 3 pairs of seeds" in mixed[0]
    held_out = [line for line in mixed if line.startswith("geometry3k, held out, the end")]
    assert len(held_out) == 2, "over seeds, and over problems"


def test_seeds_that_all_agree_leave_the_decision_to_the_problems(tmp_path, capsys):
    """Runs whose pairs of seeds all differ by the same are judged over the problems.

    Equal differences have no spread, so an interval over seeds would be a point.
    """
    a = [write_run(tmp_path / f"a{s}", [0.5], 5, seed=s) for s in range(2)]
    b = [
        write_run(tmp_path / f"b{s}", [0.5], 12, seed=s, adora_method=ADORA_METHOD)
        for s in range(2)
    ]
    lines = lines_of_comparison(capsys, *a, *b, "--compare")
    assert "over 20 problems)" in lines[0]
    rows = [line for line in lines if line.startswith("geometry3k, held out, the end")]
    assert rows[0].endswith("(20 problems)")
    assert rows[1].endswith("2 pairs of seeds that agree: no interval")


def test_a_reward_by_its_other_name_is_no_difference(tmp_path):
    first = write_run(tmp_path / "a", [0.5], adora_reward=["adora"])
    second = write_run(tmp_path / "b", [0.5], adora_reward=["boxed_accuracy"])
    settings = [read_compared_run(Path(run)).settings for run in (first, second)]
    assert settings[0]["adora_reward"] == settings[1]["adora_reward"] == ["boxed_accuracy"]


def test_keys_that_do_not_change_a_training_are_no_difference(tmp_path):
    """`beta` and a guard that skips steps are settings of a run.

    How often it logs, the engine's share of the GPU, and the seed are not.
    """
    keys: dict[str, Any] = {"logging_steps": 5, "vllm_gpu_memory_utilization": 0.3, "seed": 2}
    run = write_run(tmp_path / "a", [0.5], beta=0.1, adora_max_ratio=10.0, **keys)
    settings = read_compared_run(Path(run)).settings
    assert settings.keys() & {*keys, "beta", "adora_max_ratio"} == {"beta", "adora_max_ratio"}


def test_worse_is_called_worse(tmp_path, capsys):
    """B solves 5 of the 20 held-out problems, and A 16."""
    a = write_run(tmp_path / "a", [0.5], 16)
    b = write_run(tmp_path / "b", [0.5], 5, adora_correct_above=0.3)
    assert "is worse than A" in lines_of_comparison(capsys, a, b, "--compare")[0]


def test_without_held_out_scores_nothing_is_claimed(tmp_path, capsys):
    """B was not evaluated, so only the pass rates of 0.9 and 0.1 can be compared."""
    lines = lines_of_comparison(
        capsys, write_run(tmp_path / "a", [0.1], 3), write_run(tmp_path / "b", [0.9]), "--compare"
    )
    assert "is not known" in lines[0]
    assert "eval.problems run" in lines[0]
    assert any("pass rate in training" in line and "+80.0" in line for line in lines)


def test_the_score_of_the_model_before_the_training_is_not_that_of_the_run(tmp_path, capsys):
    runs = [write_run(tmp_path / "a", [0.5], right=20), write_run(tmp_path / "b", [0.5], right=20)]
    for run in runs:
        (Path(run) / "eval").rename(Path(run) / "before")
    paragraph, *_ = lines_of_comparison(capsys, *runs, "--compare")
    assert "is not known: not every run was scored" in paragraph


def test_both_names_of_a_benchmark_are_compared(tmp_path, capsys):
    """`eval.problems` and `eval.geometry3k` score the same problems alike."""
    runs = [write_run(tmp_path / "a", [0.5], right=4), write_run(tmp_path / "b", [0.5], right=16)]
    for run, benchmark in zip(runs, ("problems", "geometry3k"), strict=True):
        file = Path(run) / "eval" / "score.json"
        score = json.loads(file.read_text())
        items = [{**item, "pid": f"mine/test/{item['pid']}"} for item in score["items"]]
        file.write_text(json.dumps({**score, "benchmark": benchmark, "items": items}))
    paragraph, *_ = lines_of_comparison(capsys, *runs, "--compare")
    assert "+60.0 points on mine, held out" in paragraph


def test_seeds_are_compared_on_the_problems_of_all_runs(tmp_path, capsys):
    """A run that was evaluated on a part of the problems, the easy ones, gains nothing."""
    runs = []
    for side in ("a", "b"):
        for seed, right_count in enumerate((8, 10)):
            runs.append(write_run(tmp_path / f"{side}{seed}", [0.5], right_count, seed=seed))
    file = Path(runs[-1]) / "eval" / "score.json"
    score = json.loads(file.read_text())
    file.write_text(json.dumps({**score, "items": score["items"][:10], "accuracy": 1.0}))
    lines = lines_of_comparison(capsys, *runs[:2], "--compare", *runs[2:])
    rows = [line for line in lines if line.startswith("geometry3k, held out")]
    assert len(rows) == 2, "over the problems and over the seeds"
    assert all(row.split("the end")[1].split()[:3] == ["90.0", "90.0", "+0.0"] for row in rows)
    assert any("do not have the same problems of geometry3k" in line for line in lines)


def test_warnings_name_a_run_that_is_not_finished_and_unlike_seeds(tmp_path, capsys):
    """A comparison warns of a run that failed, of unlike seeds, and of a budget of tokens.

    With a budget a generation may have fewer rollouts than its size.
    """
    a = write_run(tmp_path / "a", [0.5], 5)
    b = write_run(tmp_path / "b", [0.5], 5, seed=1)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest | {"status": "failed"}))
    lines = lines_of_comparison(capsys, a, b, "--compare")
    assert f"warning: {b}: the run is failed" in lines
    assert any("different seeds" in line for line in lines)
    assert "The configs are the same but for the seed." in lines[0]
    c = write_run(tmp_path / "c", [0.5], 5, adora_rollouts={"budget": 9})
    warning = (
        f"warning: {c}: some generations of adora_rollouts.budget have fewer rollouts than are "
        "counted"
    )
    assert warning in lines_of_comparison(capsys, a, c, "--compare")


def test_what_makes_no_two_sides_is_one_line(tmp_path, capsys):
    """Each case: the words of the command, and a part of the line on standard error."""
    runs = [write_run(tmp_path / f"r{n}", [0.5], learning_rate=n) for n in range(3)]
    twice = [write_run(tmp_path / f"t{n}", [0.5]) for n in range(2)]
    for arguments, message in [
        ([runs[0], "--compare"], "--compare: one run is named"),
        ([*runs, "--compare"], "the 3 runs have 3 different configs"),
        ([*twice, "--compare", runs[0]], "one side has the same seed twice"),
        ([str(tmp_path), runs[0], "--compare"], "has no manifest.json; name the output_dir"),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
