"""Whether one side of a comparison helped: the interval, equal budgets, what differs, by hand-made run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.report.__main__ import main
from adora_vl.report.difference import at_budget, between_seeds
from adora_vl.report.sides import rollouts_per_step
from eval.scoring import Graded, aggregate
from eval.statistics import paired_t, student_95, welch

CONFIG = {
    "seed": 0, "adora_mode": "off", "adora_factor": 0.1, "generation_batch_size": 32, "steps_per_generation": 2,
    "gradient_accumulation_steps": 1, "num_iterations": 1, "learning_rate": 1e-4, "output_dir": "x",
}  # fmt: skip


def run(folder: Path, rates: list[float], right: int | None = None, *, seconds: float = 1.0, **config: Any) -> str:
    """A run of one step per pass rate, each of so many seconds, with `right` of 20 held-out problems right."""
    folder.mkdir(parents=True)
    manifest = {
        "made_by": "adora_vl.train", "config": CONFIG | config, "data": {"folder": "d", "rows": 9, "fingerprint": "f"},
        "model": {"name": "m", "fingerprint": "g"}, "batches": "", "device": "cpu", "commit": None, "versions": {},
        "starts": [{"time": "now"}], "status": "finished", "steps": len(rates),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [
        {"step": step, "kind": "train", "adora/pass_rate": rate, "seconds/rollout": seconds}
        for step, rate in enumerate(rates, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if right is not None:
        graded = [Graded(str(i), "correct" if i < right else "wrong", None, "r") for i in range(20)]
        items = [{"pid": item.pid, "verdict": item.verdict} for item in graded]
        score = aggregate(graded) | {"benchmark": "geometry3k", "rules": {}, "items": items}
        (folder / "eval").mkdir()
        (folder / "eval" / "score.json").write_text(json.dumps(score))
    return str(folder)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def test_the_statistics_by_hand():
    # differences 1, 2, 3: mean 2, standard deviation 1, so 2 +- 4.303 / sqrt(3)
    assert paired_t([1, 2, 3]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-3)
    # equal variances of 1 with 3 values each: df = 4, so 3 +- 2.776 * sqrt(2 / 3)
    assert welch([1, 2, 3], [4, 5, 6]) == pytest.approx((3 - 2.2666, 3 + 2.2666), abs=1e-3)
    assert welch([1, 1], [2, 2]) == (1, 1)
    assert [student_95(df) for df in (1, 2.9, 30, 1000)] == [12.706, 4.303, 2.042, 2.042]


def test_seeds_are_paired_where_they_are_the_same():
    paired = between_seeds({0: 0.1, 1: 0.5}, {1: 0.6, 0: 0.2})
    assert paired.value == pytest.approx(0.1) and paired.over == "2 pairs of seeds"
    assert paired.low == pytest.approx(0.1) and paired.high == pytest.approx(0.1)  # both pairs differ by 0.1
    apart = between_seeds({0: 0.1, 1: 0.5}, {2: 0.6, 3: 0.2})
    assert apart.low is not None and apart.low < -0.5 and apart.over == "2 and 2 seeds"
    assert between_seeds({0: 0.1}, {0: 0.2}).low is None


def test_a_figure_at_a_budget_is_the_mean_of_its_last_tenth():
    points = [(10.0 * i, float(i)) for i in range(1, 21)]
    assert at_budget(points, 100) == 10 and at_budget(points, 200) == 19.5
    assert at_budget(points, 105, window=0.0) == 10 and at_budget(points, 9) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"generation_batch_size": 32, "steps_per_generation": 1, "gradient_accumulation_steps": 1}, 32),
        ({"generation_batch_size": 4096, "steps_per_generation": 8, "gradient_accumulation_steps": 1}, 512),
        ({"generation_batch_size": 64, "steps_per_generation": 4, "gradient_accumulation_steps": 4}, 64),
        ({"generation_batch_size": 64, "steps_per_generation": 1, "num_iterations": 2}, 32),
    ],
)
def test_rollouts_of_a_step(config, expected):
    assert rollouts_per_step(config) == expected


def test_two_runs_with_one_seed_are_judged_over_the_problems(tmp_path, capsys):
    a = run(tmp_path / "a", [0.1] * 10, 5)
    b = run(tmp_path / "b", [0.1, 0.3] + [0.5] * 8, 16, seconds=2.0, adora_mode="attenuation")
    lines = said(capsys, a, b, "--compare")
    text = lines[0]
    assert text.startswith("B (ADORA attenuation, factor 0.1, 1 seed) is better than A (GRPO, 1 seed): +55.0 points on")
    assert (
        "over 20 problems" in text and "The configs differ in adora_mode." in text and "With one seed on a side" in text
    )
    assert "At equal rollouts (160 rollouts) it is +40.0 in pass rate in training." in text
    # within 10 s B, whose steps take two, has made five, and the last tenth of 10 s has the fifth
    assert "At equal seconds (10 s) it is +40.0 in pass rate in training." in text
    assert 'differs: adora_mode: "off" -> "attenuation"' in lines
    assert sum(line.startswith("geometry3k, held out, the end") for line in lines) == 1


def test_equal_seconds_are_not_equal_rollouts(tmp_path, capsys):
    a = run(tmp_path / "a", [0.2] * 10, 5)
    b = run(tmp_path / "b", [0.1 * step for step in range(1, 11)], 5, seconds=2.0, learning_rate=1e-3)
    lines = said(capsys, a, b, "--compare")
    assert any("160 rollouts" in line and "+80.0" in line for line in lines)
    assert any("training, 10 s" in line and "+30.0" in line for line in lines)
    assert "cannot be told from" in lines[0]


def test_several_seeds_are_sorted_by_config_and_judged_over_the_seeds(tmp_path, capsys):
    seeds = range(3)
    a = [run(tmp_path / f"a{s}", [0.5], 5 + s, seed=s) for s in seeds]
    b = [run(tmp_path / f"b{s}", [0.5], 12 + s, seed=s, adora_mode="attenuation") for s in seeds]
    mixed = said(capsys, a[0], b[0], b[1], a[1], a[2], b[2], "--compare")
    assert mixed == said(capsys, *a, "--compare", *b)
    assert "A (GRPO, 3 seeds): +35.0 points" in mixed[0] and "over 3 pairs of seeds" in mixed[0]
    assert sum(line.startswith("geometry3k, held out, the end") for line in mixed) == 2  # over seeds, over problems


def test_worse_is_called_worse(tmp_path, capsys):
    a, b = run(tmp_path / "a", [0.5], 16), run(tmp_path / "b", [0.5], 5, adora_factor=0.3)
    assert "is worse than A" in said(capsys, a, b, "--compare")[0]


def test_without_held_out_scores_nothing_is_claimed(tmp_path, capsys):
    lines = said(capsys, run(tmp_path / "a", [0.1], 3), run(tmp_path / "b", [0.9]), "--compare")
    assert "is not known" in lines[0] and "eval.geometry3k run" in lines[0]
    assert any("pass rate in training" in line and "+80.0" in line for line in lines)


def test_warnings_name_a_run_that_is_not_finished_and_unlike_seeds(tmp_path, capsys):
    a, b = run(tmp_path / "a", [0.5], 5), run(tmp_path / "b", [0.5], 5, seed=1)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest | {"status": "failed"}))
    lines = said(capsys, a, b, "--compare")
    assert f"warning: {b}: the run is failed" in lines and any("different seeds" in line for line in lines)
    assert "The configs are the same but for the seed." in lines[0]


def test_what_makes_no_two_sides_is_one_line(tmp_path, capsys):
    runs = [run(tmp_path / f"r{n}", [0.5], learning_rate=n) for n in range(3)]
    twice = [run(tmp_path / f"t{n}", [0.5]) for n in range(2)]
    for words, message in [
        ([runs[0], "--compare"], "--compare: one run is named"),
        ([*runs, "--compare"], "the 3 runs have 3 different configs"),
        ([*twice, "--compare", runs[0]], "one side has the same seed twice"),
        ([str(tmp_path), runs[0], "--compare"], "has no manifest.json; name the output_dir"),
    ]:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
