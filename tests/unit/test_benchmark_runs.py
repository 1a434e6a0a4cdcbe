"""The comparisons' arithmetic: outliers, tables, and that a finished run is not trained again."""

from __future__ import annotations

import json
import sys

import pytest

from adora_vl.config.advantage import check_method
from adora_vl.config.noise import check_noise
from benchmarks import runs
from benchmarks.advantages import METHODS, at_equal_seconds, in_generations, numbers, reached, t_interval, table
from benchmarks.plots import mean_curve, write_page
from benchmarks.sweep import variants


def result(name, seed, end, reached_at=20):
    held_out = [[0, 0.3, 0.2, 0.4], [reached_at, end, end - 0.05, end + 0.05]]
    last = {"length_right": 20.0, "length_wrong": None, "entropy": 0.1, "tds_share": 0.5, "kl": 0.01}
    curves = {key: [[1, 0.5], [2, 0.6]] for key in runs.CURVES}
    return {"name": name, "seed": seed, "held_out": held_out, "last_fifth": last, "curves": curves, "seconds": 60.0,
            "generation_seconds": 2.0, "outliers": {"kl": 1, "loss": 0}}  # fmt: skip


def test_outliers_are_counted_against_their_surroundings():
    steady = [1.0 + 0.01 * (-1) ** step for step in range(40)]
    assert runs.outliers(steady) == 0
    assert runs.outliers([*steady[:20], 9.0, *steady[21:]]) == 1
    assert runs.outliers([0.5 * step for step in range(40)]) <= 10  # the ends of a slope, not its middle
    assert runs.outliers([]) == runs.outliers([1.0] * 9) == 0


def test_figures_of_a_log():
    weight, accuracy = "adora/daro/weight_1_of_4", "eval_geometry3k_accuracy"
    history = [
        {"step": 1, "reward": 0.2, "loss": 0.1, "adora/length_correct": 4.0, weight: 1.0},
        {"step": 1, accuracy: 0.5, f"{accuracy}_low": 0.4, f"{accuracy}_high": 0.6},
        {"step": 2, "reward": 0.4, "loss": 0.1, "adora/length_correct": 6.0, weight: 1.1},
        {"step": 2, "train_runtime": 12.5},
    ]
    found = runs.figures(history)
    assert found["held_out"] == [[1, 0.5, 0.4, 0.6]]
    assert found["curves"]["reward"] == [[1, 0.2], [2, 0.4]] and found["last_fifth"]["length_right"] == 6.0
    assert found["curves"]["daro/weight_1_of_4"] == [[1, 1.0], [2, 1.1]] and found["seconds"] == 12.5


def test_four_updates_per_generation_are_counted_as_one_generation():
    run = result("grpo_x4", 0, 0.9, 80)
    run["curves"]["step_time"] = [[step, 3.0 if step % 4 == 1 else 0.5] for step in range(1, 81)]
    found = in_generations(run)
    assert found["held_out"][-1][:2] == [20, 0.9] and found["curves"]["kl"][0] == [0.25, 0.5]
    assert found["generation_seconds"] == 4.5, "the first step of four has the rollouts"
    assert in_generations({**run, "name": "grpo"})["generation_seconds"] == 0.5


def test_at_equal_seconds_a_slower_method_has_learned_for_fewer_generations():
    base, slow = result("grpo", 0, 0.8), {**result("vppo", 0, 0.9), "generation_seconds": 3.0}
    slow["held_out"].insert(1, [13, 0.7, 0.6, 0.8])
    assert at_equal_seconds(slow, base) == 0.7, "20 generations of 2 s are 13 of 3 s"
    assert at_equal_seconds(base, base) == 0.8


def test_the_table_says_when_the_baselines_end_is_reached():
    results = [result("grpo", 0, 0.8), result("grpo", 1, 0.9), result("adora", 0, 0.85, 10), result("adora", 1, 0.7)]
    lines = table(results, ["grpo", "adora", "daro"])
    assert len(lines) == 3  # daro has no run
    assert reached(results[2]["held_out"], 0.85) == 10 and reached(results[3]["held_out"], 0.85) is None
    assert " 1/2" in lines[2] and "77.5 [" in lines[2]
    assert t_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)
    # adora is 5 points ahead with one seed and 20 behind with the other: 12.71 x 17.68 / sqrt(2)
    assert "-7.5 +-158.9" in lines[2] and " - " in lines[1]


def test_the_page_holds_the_table_and_the_curves(tmp_path):
    results = [result("grpo", 0, 0.8), result("grpo", 1, 0.9)]
    steps, values = zip(*mean_curve(results, "held_out"), strict=True)
    assert steps == (0, 20) and values == pytest.approx((0.3, 0.85))
    text = write_page(tmp_path / "out", results, ["grpo"], ["a < b"], "legend").read_text()
    assert "a &lt; b" in text and "data:image/png;base64," in text


def test_a_finished_run_is_kept_and_one_of_other_options_is_not(tmp_path, monkeypatch):
    trained = []

    def command(words, log=None, threads=None):
        trained.append(words)
        folder = tmp_path / "grpo-0"
        entries = [{"step": 1, "reward": 0.1, "loss": 0.0}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": entries}))

    monkeypatch.setattr(runs, "command", command)
    for steps in ("40", "40", "60"):
        (found,) = runs.train_all(tmp_path, [runs.Job("grpo", 0, ("--max_steps", steps))], tmp_path / "data", 1)
        assert found["arguments"] == ["--max_steps", steps]
    assert len(trained) == 2
    assert runs.finished(tmp_path, [runs.Job("grpo", 0, ()), runs.Job("adora", 0, ())])[0]["name"] == "grpo"


def test_a_result_from_before_a_figure_was_added_gets_it_from_the_log(tmp_path):
    folder = tmp_path / "grpo-0"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"name": "grpo", "curves": {}}))
    log = [{"step": 1, "reward": 0.1, "step_time": 2.5}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (found,) = runs.finished(tmp_path, [runs.Job("grpo", 0, ())])
    assert in_generations(found)["generation_seconds"] == 2.5


def test_a_run_that_fails_is_left_out_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def train(out, job, data, prefix, threads):
        if job.name == "adora":
            raise runs.FailedError("error: no room")
        return {"name": job.name}

    monkeypatch.setattr(runs, "train", train)
    jobs = [runs.Job(name, 0, ()) for name in ("adora", "grpo")]
    assert runs.train_all(tmp_path, jobs, tmp_path / "data", 1) == [{"name": "grpo"}]
    assert "adora-0 failed" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "expected"), [(None, "3"), ("2", "2")])
def test_runs_side_by_side_share_the_cores_unless_told_otherwise(tmp_path, monkeypatch, given, expected):
    """The launcher would give all cores to each of them."""
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    plain = runs.command

    def command(words, log=None, threads=None):
        plain([sys.executable, "-c", code], log, threads)
        folder = tmp_path / "grpo-0"
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.1}]}))

    monkeypatch.setattr(runs, "command", command)
    runs.train_all(tmp_path, [runs.Job("grpo", 0, ())], tmp_path / "data", 2)
    assert (tmp_path / "grpo-0.log").read_text().strip() == expected


def test_a_command_that_fails_says_what_it_said(tmp_path):
    with pytest.raises(runs.FailedError, match="no such thing"):
        runs.command([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log")
    assert "no such thing" in (tmp_path / "log").read_text()


def test_every_method_gets_the_same_rollouts():
    """128 per generation, and as many generations whether they are learned from in one update or in four."""
    from adora_vl.config.command_line import parse

    path = "configs/train/smoke_cpu.yaml"
    for name, options in METHODS.items():
        run = parse(["--config", path, *numbers(name, 40, 5), *options])[1]
        updates = run.steps_per_generation // run.gradient_accumulation_steps
        rollouts = run.per_device_train_batch_size * run.steps_per_generation
        assert run.max_steps / updates == 40 and run.eval_steps / updates == 5, name
        assert rollouts // run.num_generations == 16 and rollouts in (128, 144), name  # mc_grpo samples one more each


@pytest.mark.parametrize("name", [*METHODS, *(name for part in variants().values() for name in part)])
def test_every_compared_run_has_options_that_a_run_accepts(name):
    from adora_vl.config.command_line import parse

    options = {**METHODS, **{key: value for part in variants().values() for key, value in part.items()}}[name]
    recipe = ["--config", "configs/train/smoke_cpu.yaml", "--beta", "0.001", "--eval_strategy", "steps"]
    config = parse([*recipe, *options])[1]
    check_method(config)
    check_noise(config)
    assert config.beta == (0 if name == "noisy" else 0.001)
