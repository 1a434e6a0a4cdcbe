"""The benchmarks measure what they say: their data, arithmetic and tables."""

import copy
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from adora_vl.advantage import Adora, AdvantagePipeline, Groups
from adora_vl.config.advantage import check_method
from adora_vl.config.checks import check_extensions
from adora_vl.data.dataset import load_split
from adora_vl.evals.records import Graded, RowGrade
from adora_vl.evals.scoring.score import aggregate, verdict
from adora_vl.evals.scoring.statistics import half_width
from adora_vl.models.shape import config_for_planning, describe
from adora_vl.rewards.grade import grade
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from benchmarks import methods, scanned
from benchmarks.attenuation import report, task
from benchmarks.attenuation.__main__ import RUNS
from benchmarks.attenuation.__main__ import main as attenuation
from benchmarks.attenuation.report import end
from benchmarks.attenuation.run import YOKED_TO, SignalWeights, run_job
from benchmarks.attenuation.start import build_arithmetic, build_start, fingerprint
from benchmarks.attenuation.task import draw
from benchmarks.grpo_vs_adora import accuracy_table, attenuated
from benchmarks.kill_and_resume import PHASES, compare, place_of
from benchmarks.methods import (
    CURVES,
    METHODS,
    PARTS,
    RECIPE,
    Job,
    Variant,
    at_equal_seconds,
    draw_curves,
    figures,
    grpo,
    in_generations,
    mean_curve,
    outliers,
    reached,
    table,
)
from benchmarks.slice import (
    PUBLISHED,
    build_model,
    by_quarters,
    draw_rows,
    slice_config,
    write_data,
)
from benchmarks.step import answer_lengths, mrope

PLANS = sorted(task.SETTINGS.parent.glob("*.yaml"))


def test_a_chain_is_what_its_form_asks_for():
    for problem in task.problems(200, task.Regime(5), "x"):
        text, digit = task.chain_text(*task.read_form(problem.prompt), [False] * 5)
        assert (text, digit) == (problem.chain, problem.answer)
        assert task.is_right(problem.chain, problem)


def test_families_differ_in_the_answer_alone():
    """In front of the last operand the prompts of both families are drawn from one distribution."""
    drawn = {family: task.problems(4000, task.Regime(2), family, family) for family in "AB"}
    assert {p.answer for p in drawn["A"]} == set(task.OPTIONS)
    assert set(Counter(p.answer for p in drawn["B"])) == set(range(10))
    for place in (5, 6, 7, 12, 13):  # every sign and operand, the last one too
        seen = {family: Counter(p.prompt[place] for p in drawn[family]) for family in "AB"}
        for character in seen["A"] | seen["B"]:
            assert abs(seen["A"][character] - seen["B"][character]) / 4000 < 0.05, (
                place,
                character,
            )


def test_a_label_tells_the_family_where_the_regime_says_so():
    for problem in task.problems(50, task.Regime(3, labelled=True), "x"):
        assert problem.prompt.startswith({"A": "two: ", "B": "ten: "}[problem.family])
    assert all(p.prompt.startswith("any: ") for p in task.problems(50, task.Regime(3), "x"))


def test_the_teacher_guesses_half_of_the_time_and_slips_as_often_as_it_should():
    rng = random.Random(0)
    regime = task.Regime(5)
    told = [(problem := draw(rng, regime), task.teacher(rng, problem)) for _ in range(6000)]
    chains = [(problem, text) for problem, text in told if task.is_chain(text)]
    right: dict[bool, list[tuple[str, bool]]] = {True: [], False: []}
    for problem, text in told:
        right[task.is_chain(text)].append((problem.family, task.is_right(text, problem)))
    assert len(chains) / 6000 == pytest.approx(0.5, abs=0.03)
    assert statistics.fmean(ok for _, ok in right[True]) == pytest.approx(
        (1 - task.SLIP) ** 5, abs=0.02
    )
    assert statistics.fmean(ok for family, ok in right[False] if family == "A") == pytest.approx(
        0.5, abs=0.04
    )
    assert statistics.fmean(ok for family, ok in right[False] if family == "B") == pytest.approx(
        0.1, abs=0.04
    )


def test_where_short_is_right_chains_cannot_be_relied_on():
    hidden = task.problems(2000, task.Regime(5, first_option=0.8, hidden_slips=True), "x", "A")
    assert statistics.fmean(p.answer == task.OPTIONS[0] for p in hidden) == pytest.approx(
        0.8, abs=0.03
    )
    honest = [task.chain_text(*task.read_form(p.prompt), [False] * 5)[0] == p.chain for p in hidden]
    assert statistics.fmean(honest) == pytest.approx((1 - task.SLIP) ** 5, abs=0.03)


def test_a_chain_that_ends_right_after_a_wrong_step_is_wrong():
    problem = task.problems(1, task.Regime(2), "x")[0]
    broken = problem.chain.replace("=", "=0", 1)
    assert not task.is_right(broken, problem) and task.is_right(broken, problem, "digit")
    other = problem.chain[:-1] + str((problem.answer + 1) % 10)
    for reward in task.REWARDS:
        assert not task.is_right(other, problem, reward)
        assert task.is_right(f"guess: {problem.answer}", problem, reward)
        assert not task.is_right(f"guess: {problem.answer} ", problem, reward)


def run(arm, seed, accuracy, engine=False):
    steps = zip((0, 10, 20), accuracy, strict=True)
    held_out = [{"step": step, "accuracy": a, "accuracy_B": a, "chains": 0.5} for step, a in steps]
    figures = {"tds_share": 0.3, "weight_mean": 0.7, "chains": 0.5}
    place = {
        "regime": "R2",
        "recipe": "grpo",
        "arm": arm,
        "seed": seed,
        "engine": engine,
        "model": 0,
    }
    facts = {
        "reward": "steps",
        "plan": "settings",
        "commit": "abc",
        "arithmetic": "1f",
        "processor_seconds": 60.0,
    }
    return {**place, **facts, "held_out": held_out, "steps": [{"step": 5, **figures}]}


def test_the_tables_pair_runs_by_their_seed():
    runs = [run("grpo", seed, (0.2, 0.3 + seed / 10, 0.4 + seed / 10)) for seed in (0, 1, 2)]
    runs += [run("adora", seed, (0.2, 0.3, 0.5 + seed / 10)) for seed in (2, 1, 0)]
    assert end("accuracy")(runs[1]) == 0.5 and report.area("accuracy")(runs[0]) == pytest.approx(
        0.3
    )
    row = next(
        line
        for line in report.comparisons(runs, "R2", "grpo")
        if line.startswith("| ADORA 0.1 - GRPO ")
    )
    assert row.startswith("| ADORA 0.1 - GRPO | 3 | **+10.0 [+10.0, +10.0]** |"), (
        "seeds differ, pairs do not"
    )
    assert row.endswith(" | 0.250 |"), (
        "of the eight ways to give three differences a sign, two are as far from 0"
    )
    assert any(
        line.startswith("| GRPO | 3 | 50.0 |")
        for line in report.levels(runs, "R2", "grpo", report.HELD_OUT)
    )
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert report.interval([1.0, -1.0]).startswith("+0.0 [") and report.interval([1.0]) == "-"


def test_one_file_of_all_runs_prints_every_table(tmp_path, capsys, monkeypatch):
    """Also the mean over the steps, which differs from the end: the area under the curve."""
    made = [run("grpo", seed, (0.2, 0.3, 0.5)) for seed in (0, 1)] + [
        run("adora", seed, (0.2, 0.4, 0.4)) for seed in (0, 1)
    ]
    for one in made:
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / f"{one['arm']}-{one['seed']}.json").write_text(json.dumps(one))
    report.write_report(tmp_path)
    written = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["attenuation", "--tables", str(tmp_path / "runs.jsonl")])
    assert attenuation() == 0
    assert capsys.readouterr().out == written
    rows = [line for line in written.splitlines() if line.startswith("| R2, `grpo` |")]
    assert rows == [
        "| R2, `grpo` | 50.0 (2) | 40.0 (2) | **-10.0 [-10.0, -10.0]** | 0.500 |",
        "| R2, `grpo` | 32.5 (2) | 35.0 (2) | **+2.5 [+2.5, +2.5]** | 0.500 |",
    ]
    monkeypatch.setattr(sys, "argv", ["attenuation", "--tables", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match="--tables: .*none.json is no runs.jsonl"):
        attenuation()


def test_runs_are_added_once_and_never_to_the_seed_of_another_machine(
    tmp_path, capsys, monkeypatch
):
    """The same seed has another start there: it would count twice, and the start would look like
    the arm.
    """
    kept = tmp_path / "kept.jsonl"
    (tmp_path / "runs").mkdir()
    theirs = run("grpo", 0, (0.2, 0.3, 0.4)) | {"arithmetic": "2e"}
    kept.write_text(json.dumps(theirs) + "\n")
    for seed in (0, 1):
        for arm, last in (("grpo", 0.6), ("adora", 0.7)):
            (tmp_path / "runs" / f"{arm}-{seed}.json").write_text(
                json.dumps(run(arm, seed, (0.2, 0.3, last)))
            )
    for added in (2, 0):
        command = ["attenuation", "--output", str(tmp_path), "--add", str(kept)]
        monkeypatch.setattr(sys, "argv", command)
        attenuation()
        assert f"{added} runs added" in capsys.readouterr().out
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert lines[0] == theirs and [(line["arm"], line["seed"]) for line in lines[1:]] == [
        ("adora", 1),
        ("grpo", 1),
    ]
    row = next(
        line
        for line in report.summary(lines, "accuracy", end("accuracy"))
        if line.startswith("| R2")
    )
    assert row.startswith("| R2, `grpo` | 50.0 (2) | 70.0 (1) |"), row
    assert report.paired(lines, "R2", "grpo", "adora", "grpo", end("accuracy")) == pytest.approx(
        [10.0]
    )


def test_a_thinned_run_keeps_the_means_of_five_steps():
    steps = [
        {"chains": step / 10, **({"chain_accuracy": 0.5} if step == 7 else {})} for step in range(7)
    ]
    steps.append({"chains": 0.9, "chain_accuracy": 0.5, "loss": 3.0})
    kept = report.thinned({"seed": 1, "seconds": 3.0, "held_out": [{"step": 0}], "steps": steps})
    blocks = [{"step": 5, "chains": 0.2}, {"step": 8, "chains": 0.6667, "chain_accuracy": 0.5}]
    assert kept == {"seed": 1, "held_out": [{"step": 0}], "steps": blocks}


def test_a_yoked_run_has_the_mean_weights_of_another_on_groups_of_its_own():
    """Of 200 groups, 100 carry signal.

    What they weigh on average is the recorded figure; the others weigh 1.
    """
    rewards_PG = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).repeat(100, 1)
    lengths_PG = torch.full((200, 2), 9.0)
    signal_P = torch.tensor([True, False]).repeat(100)
    record = [0.1, 0.55, 1.0, None]
    for assign in ("random", "rate"):
        methods = AdvantagePipeline({"adora": Adora(assign=assign)})
        weights = SignalWeights(methods, record)
        steps = [
            0,
            0,
            1,
            2,
            2,
            3,
        ]  # a batch is weighed when it is graded, and again when it is final
        found = {
            step: methods.weigh(Groups(rewards_PG, lengths_PG, lengths_PG < 0, step=step))
            for step in steps
        }
        assert list(weights.means.values()) == pytest.approx([0.1, 0.55, 1.0, 1.0])
        for one, mean in zip(found.values(), weights.means.values(), strict=True):
            assert one.rate == pytest.approx(mean if assign == "rate" else 1.0)
            assert bool((one.weights_P[~signal_P] == 1).all())
    free = AdvantagePipeline({"adora": Adora(ties="attenuate")})
    weights = SignalWeights(free, None)
    free.weigh(Groups(rewards_PG, lengths_PG, lengths_PG < 0))
    assert weights.means == {0: pytest.approx(0.1)}, "a free run is left as it is"


def test_every_run_of_the_page_stands_in_a_plan_and_counts_once():
    runs = [json.loads(line) for line in RUNS.read_text().splitlines()]
    keys = ("regime", "recipe", "seed", "arm", "engine", "model", "reward")
    names = [(one["plan"], task.Trial(**{key: one[key] for key in keys}).name) for one in runs]
    planned = {(plan.stem, job.name) for plan in PLANS for job in task.read_settings(plan).jobs()}
    assert len(set(names)) == len(names) and set(names) <= planned
    starts = {
        (one["plan"], *(one[key] for key in keys if key != "arm"), one["arithmetic"])
        for one in runs
    }
    assert len({start[:-1] for start in starts}) == len(starts), (
        "all arms of a seed share one start"
    )


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_the_settings_name_what_there_is(plan):
    settings = task.read_settings(plan)
    jobs = list(settings.jobs())
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.regime for job in jobs} <= set(settings.regimes)
    assert {job.arm for job in jobs} <= set(settings.arms) and {job.recipe for job in jobs} <= set(
        settings.recipes
    )
    names = [job.name for job in jobs]
    for job in jobs:
        other = settings.arms[job.arm].get(YOKED_TO)
        assert not other or names.index(replace(job, arm=other).name) < names.index(job.name), (
            "its record is there"
        )


PLAN = task.Teaching(
    arithmetic_steps=3,
    steps=3,
    batch_size=2,
    learning_rate=1e-3,
    operations=(3,),
    layers=1,
    width=16,
)


@pytest.mark.slow
def test_a_run_of_the_experiment_ends_with_a_figure_for_each_step(tmp_path):
    settings = replace(
        task.read_settings(task.SETTINGS),
        start=PLAN,
        steps=2,
        prompts=2,
        generations=2,
        eval_problems=4,
        eval_every=2,
    )
    build_arithmetic(tmp_path / "arithmetic", PLAN)
    build_start(tmp_path / "start", tmp_path / "arithmetic", PLAN, 0)
    job = next(settings.jobs())
    found = run_job(settings, job, tmp_path / "start", {"plan": "settings"})
    assert [point["step"] for point in found["held_out"]] == [0, 2] and len(found["steps"]) == 2
    assert {**found, **asdict(job)} == found and all("chains" in step for step in found["steps"])


def test_every_start_is_made_of_the_model_that_can_compute(tmp_path):
    plan = PLAN
    arithmetic = tmp_path / "arithmetic"
    starts = [tmp_path / str(seed) for seed in (0, 1)]
    build_arithmetic(arithmetic, plan)
    for seed, folder in enumerate(starts):
        build_start(folder, arithmetic, replace(plan, learning_rate=0.0) if seed else plan, seed)
    base, taught, untaught = (
        load_file(folder / "model.safetensors") for folder in (arithmetic, *starts)
    )
    assert all(torch.equal(base[name], untaught[name]) for name in base)
    assert any(not torch.equal(base[name], taught[name]) for name in base)
    before = (arithmetic / "model.safetensors").stat().st_mtime_ns
    build_arithmetic(tmp_path / "another", plan, 1)
    assert fingerprint(tmp_path / "another") != fingerprint(arithmetic)
    build_arithmetic(arithmetic, plan)
    build_start(starts[0], tmp_path / "nowhere", plan, 0)
    assert (arithmetic / "model.safetensors").stat().st_mtime_ns == before, "what is there stays"
    build_start(starts[0], arithmetic, replace(plan, steps=4), 0)
    longer = load_file(starts[0] / "model.safetensors")
    assert any(not torch.equal(longer[name], taught[name]) for name in taught), (
        "of another plan it is made anew"
    )


KINDS = {"0": "crossing, vertical", "1": "crossing, vertical", "2": "circle, diameter"}


def score(right: str):
    graded = [
        Graded(pid, RowGrade(verdict(hit == "1"), None, "r", {"kind": [KINDS[pid]]}))
        for pid, hit in zip(KINDS, right, strict=True)
    ]
    items = [
        {"pid": item.pid, "verdict": item.grade.verdict, "extracted": "5", "reason": "r"}
        for item in graded
    ]
    return {**aggregate(graded), "benchmark": "geometry3k", "rules": {}, "items": items}


def test_only_mixed_groups_count_and_each_once(tmp_path):
    """Of groups with right and wrong rollouts; each has two rollouts here, in two files."""
    groups = [
        (1, 0, "0", True, (1.0, 0.1)),
        (1, 1, "1", False, (1.0, 0.0)),
        (1, 2, "2", True, (1.0, 1.0)),  # all right: no gradient, whatever its weight
        (2, 0, "2", False, (0.1, 0.0)),  # all wrong
        (2, 1, "0", True, (0.1, 1.0)),
    ]
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        rows = [
            {"step": at, "group": group, "id": row, "tds": tds, "reward": reward}
            for at, group, row, tds, rewards in groups
            if at == step
            for reward in rewards
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts" / f"step-{step}.parquet")
    assert attenuated(tmp_path, KINDS) == {"crossing, vertical": (2, 3)}


def test_accuracy_is_the_mean_over_seeds_with_its_range():
    lines = accuracy_table(
        score("000"), {"grpo": [score("110"), score("111")], "adora": [score("011")]}
    )
    rows = {line[:28].strip(): " ".join(line[28:].split()) for line in lines[1:]}
    assert rows["all"] == "3 0.0 83.3 (66.7 to 100.0) 66.7 (66.7 to 66.7)"
    assert rows["crossing, vertical"] == "2 0.0 100.0 (100.0 to 100.0) 50.0 (50.0 to 50.0)"
    assert rows["circle, diameter"] == "1 0.0 50.0 (0.0 to 100.0) 100.0 (100.0 to 100.0)"


STEPS = {1: {"loss": 0.5, "reward": 0.1}, 2: {"loss": 0.4}}
FACTS = {"steps": STEPS, "rollouts": {"completions_00001": "ab"}, "weights": "w"}


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda f: f["steps"][1].update(loss=0.5000001),
        "step 1: loss is 0.5 and 0.5000001 (1 figures differ)",
    ),
    (lambda f: f["steps"].pop(2), "step 2: loss is 0.4 and None (1 figures differ)"),
    (lambda f: f["rollouts"].update(completions_00001="xy"), "rollouts of completions_00001"),
    (lambda f: f.update(weights="v"), "the final weights"),
]


def test_a_killed_run_is_compared_figure_by_figure():
    assert compare(FACTS, copy.deepcopy(FACTS)) == []
    found = []
    for change, _ in CHANGES:
        other: dict[str, Any] = copy.deepcopy(FACTS)
        change(other)
        found.append(compare(FACTS, other))
    assert found == [[line] for _, line in CHANGES]
    for _, owner, name in map(place_of, PHASES):
        assert callable(getattr(owner, name)), "every phase has a place to be killed in"


def result(name, seed, end, reached_at=20):
    held_out = [[0, 0.3, 0.2, 0.4], [reached_at, end, end - 0.05, end + 0.05]]
    last = {
        "length_right": 20.0,
        "length_wrong": None,
        "entropy": 0.1,
        "tds_share": 0.5,
        "kl": 0.01,
    }
    curves = {key: [[1, 0.5], [2, 0.6]] for key in CURVES}
    return {
        "name": name,
        "seed": seed,
        "held_out": held_out,
        "last_fifth": last,
        "curves": curves,
        "generation_seconds": 2.0,
        "outliers": {"kl": 1, "loss": 0},
    }


def test_outliers_are_counted_against_their_surroundings():
    steady = [1.0 + 0.01 * (-1) ** step for step in range(40)]
    assert outliers(steady) == 0
    assert outliers([*steady[:20], 9.0, *steady[21:]]) == 1
    assert outliers([0.5 * step for step in range(40)]) <= 10  # the ends of a slope, not its middle
    assert outliers([]) == outliers([1.0] * 9) == 0


def test_figures_of_a_log():
    weight = "adora/daro/weight_1_of_4"
    accuracy = "eval_geometry3k_accuracy"
    history = [
        {"step": 1, "reward": 0.2, "loss": 0.1, "adora/length_correct": 4.0, weight: 1.0},
        {"step": 1, accuracy: 0.5, f"{accuracy}_low": 0.4, f"{accuracy}_high": 0.6},
        {"step": 2, "reward": 0.4, "loss": 0.1, "adora/length_correct": 6.0, weight: 1.1},
        {"step": 2, "train_runtime": 12.5},
    ]
    found = figures(history)
    assert found["held_out"] == [[1, 0.5, 0.4, 0.6]]
    assert (
        found["curves"]["reward"] == [[1, 0.2], [2, 0.4]]
        and found["last_fifth"]["length_right"] == 6.0
    )
    assert found["curves"]["daro/weight_1_of_4"] == [[1, 1.0], [2, 1.1]]


def test_four_updates_per_generation_are_counted_as_one_generation():
    run = result("grpo_x4", 0, 0.9, 80)
    seconds = [
        9.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        9.0,
    ]  # a generation of four steps takes 12, whichever is the long one
    run["curves"]["step_time"] = [[step, second] for step, second in enumerate(seconds, 1)]
    found = in_generations(run, METHODS["grpo_x4"].updates)
    assert found["held_out"][-1][:2] == [20, 0.9] and found["curves"]["kl"][0] == [0.25, 0.5]
    assert found["generation_seconds"] == 12
    assert in_generations(run, METHODS["grpo"].updates)["generation_seconds"] == 1


def test_at_equal_seconds_a_slower_method_has_learned_for_fewer_generations():
    base = result("grpo", 0, 0.8)
    slow = {**result("vppo", 0, 0.9), "generation_seconds": 3.0}
    slow["held_out"].insert(1, [13, 0.7, 0.6, 0.8])
    assert at_equal_seconds(slow, base) == 0.7, "20 generations of 2 s are 13 of 3 s"
    assert at_equal_seconds(base, base) == 0.8


def test_the_table_says_when_the_baselines_end_is_reached():
    results = [
        result("grpo", 0, 0.8),
        result("grpo", 1, 0.9),
        result("adora", 0, 0.85, 10),
        result("adora", 1, 0.7),
    ]
    lines = table(results, ["grpo", "adora", "daro"])
    assert len(lines) == 3  # daro has no run
    assert (
        reached(results[2]["held_out"], 0.85) == 10
        and reached(results[3]["held_out"], 0.85) is None
    )
    assert " 1/2" in lines[2] and "77.5 [" in lines[2]
    assert half_width([0.5, 0.5, 0.5]) == 0
    # adora is 5 points ahead with one seed and 20 behind with the other: 12.706 x 17.68 / sqrt(2)
    assert "-7.5 +-158.8" in lines[2] and " - " in lines[1]
    (row,) = table([result("tau_0.5", 0, 0.8)], ["tau_0.5"])[1:]
    assert row.split()[5:8] == ["-"] * 3, "a part without GRPO has nothing to be ahead of"


def test_the_curves_are_means_over_the_seeds(tmp_path):
    results = [result("grpo", 0, 0.8), result("grpo", 1, 0.9), result("daro", 0, 0.9)]
    results[2]["curves"]["daro/weight_1_of_4"] = [[1, 1.0], [2, 1.1]]
    steps, values = zip(*mean_curve(results[:2], "held_out"), strict=True)
    assert steps == (0, 20) and values == pytest.approx((0.3, 0.85))
    draw_curves(results, ["grpo", "daro"], tmp_path / "methods.png")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def job():
    """Makes a job whose training is a stub."""
    return lambda *arguments: Job("grpo", 0, Variant(()), arguments)


@pytest.fixture
def out(tmp_path):
    """A folder whose data are there already."""
    (tmp_path / "data-4096").mkdir()
    (tmp_path / "data-4096" / "manifest.json").write_text("{}")
    return tmp_path


def finish(out):
    """What a training run leaves."""
    entries = [{"step": 1, "reward": 0.1, "loss": 0.0, "step_time": 2.5}]
    (out / "grpo-0" / "trainer_state.json").write_text(json.dumps({"log_history": entries}))


def test_a_finished_run_is_kept_and_one_of_other_options_is_not(out, job, monkeypatch):
    trained = []

    def command(words, log=None, threads=None):
        trained.append(words)
        finish(out)

    monkeypatch.setattr(methods, "command", command)
    for steps in ("40", "40", "60"):
        (found,) = methods.train_all(out, [job("--max_steps", steps)], 1)
        assert found["arguments"] == ["--max_steps", steps] and found["generation_seconds"] == 2.5
    assert len(trained) == 2
    assert methods.read_result(out, job())["name"] == "grpo"
    assert methods.read_result(out, Job("adora", 0, Variant(()), ())) is None


def test_a_run_that_fails_is_left_out_and_the_others_go_on(out, monkeypatch, capsys):
    def train(out, job, threads):
        if job.name == "adora":
            raise methods.FailedError("error: no room")
        return {"name": job.name}

    monkeypatch.setattr(methods, "train", train)
    jobs = [Job(name, 0, METHODS[name], ()) for name in ("adora", "grpo")]
    assert methods.train_all(out, jobs, 1) == [{"name": "grpo"}]
    assert "adora-0 failed" in capsys.readouterr().err


def test_runs_side_by_side_share_the_cores_unless_told_otherwise(out, job, monkeypatch):
    """The launcher would give all cores to each of them."""
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = methods.command

    def command(words, log=None, threads=None):
        plain(
            [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"], log, threads
        )
        finish(out)

    monkeypatch.setattr(methods, "command", command)
    methods.train_all(out, [job()], 2)
    assert (out / "grpo-0.log").read_text().strip() == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    methods.train_all(out, [job("--seed", "1")], 2)
    assert (out / "grpo-0.log").read_text().strip() == "2"


def test_a_command_that_fails_says_what_it_said(tmp_path):
    with pytest.raises(methods.FailedError, match="no such thing"):
        methods.command(
            [sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log"
        )
    assert "no such thing" in (tmp_path / "log").read_text()


def test_every_method_gets_the_same_rollouts():
    """128 per generation, and as many generations whether they are learned from in one update or in
    four.
    """
    from adora_vl.config.schema import parse

    assert grpo(updates=4) == METHODS["grpo_x4"]
    for name, variant in METHODS.items():
        run = parse([*RECIPE, *variant.arguments(40, 5)])[1]
        updates = run.steps_per_generation // run.gradient_accumulation_steps
        rollouts = run.per_device_train_batch_size * run.steps_per_generation
        assert run.max_steps / updates == 40 and run.eval_steps / updates == 5, name
        assert rollouts // run.num_generations == 16 and rollouts in (128, 144), (
            name
        )  # mc_grpo samples one more each


def test_every_compared_run_has_options_that_a_run_accepts():
    from adora_vl.config.schema import parse

    for name, variant in {
        name: variant for part in PARTS.values() for name, variant in part.items()
    }.items():
        config = parse([*RECIPE, *variant.arguments(60, 10)])[1]
        check_method(config)
        check_extensions(config)
        assert config.beta == (0 if name == "noisy" else 0.001), name


NARROW = {
    "hidden_size": 28,
    "intermediate_size": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 0, 0]},
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_heads": 2,
        "out_hidden_size": 28,
    },
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    rows = draw_rows(4)
    write_data(folder / "data", rows)
    build_model(folder / "model", slice_config(1, 2, **NARROW), rows)
    return folder


def test_all_but_the_number_of_layers_is_published():
    whole = describe(config_for_planning(f"Qwen/{PUBLISHED}")[0])
    part = describe(slice_config(2, 9), dtype="bfloat16")
    for name in ("width", "heads", "kv_heads", "head_size", "mlp_width"):
        for tower in ("text", "vision"):
            assert getattr(getattr(part, tower), name) == getattr(getattr(whole, tower), name)
    assert (part.text.layers, part.vision.layers, part.vocabulary, part.tied) == (
        2,
        9,
        152_064,
        False,
    )
    assert slice_config(1, 9).vision_config.fullatt_block_indexes == [7, 8], (
        "a window everywhere but as published"
    )
    assert (
        slice_config(1, 4).get_text_config().rope_parameters["mrope_section"]
        == [16, 24, 24]
        == mrope(128)
    )
    assert [sum(mrope(head)) for head in (16, 32, 64)] == [8, 16, 32], "half a head"


def test_the_tokenizer_has_the_special_tokens_where_the_config_says(built):
    processor = AutoProcessor.from_pretrained(built / "model")
    config = AutoModelForImageTextToText.from_pretrained(built / "model").config
    ids = processor.tokenizer.convert_tokens_to_ids
    assert ids("<|image_pad|>") == processor.image_token_id == config.image_token_id == 151655
    assert (
        ids("<|im_end|>")
        == config.get_text_config().eos_token_id
        == processor.tokenizer.eos_token_id
        == 151645
    )
    assert never_sampled_ids(processor.tokenizer) == [151655, 151656, 151652, 151653, 151654]


@pytest.mark.slow
def test_chance_solves_some_of_the_problems_and_any_token_can_be_decoded(built):
    tokenizer = AutoProcessor.from_pretrained(built / "model").tokenizer
    data = load_split(built / "data", "train")
    draw = torch.Generator().manual_seed(0)
    answers = torch.randint(0, 152_064, (len(data) * 8, 512), generator=draw)
    verdicts = [
        grade(
            tokenizer.decode(ids, skip_special_tokens=True), data[number % len(data)]["answer"]
        ).verdict
        for number, ids in enumerate(answers.tolist())
    ]
    assert {"correct", "wrong"} <= set(verdicts)


@pytest.mark.slow
def test_the_images_are_as_large_as_those_that_people_train_on(built):
    processor = AutoProcessor.from_pretrained(built / "model")
    data = load_split(built / "data", "train")
    grids = processor.image_processor(
        images=[row["images"][0] for row in data], return_tensors="pt"
    )["image_grid_thw"]
    assert (grids.prod(dim=-1) // 4).tolist() == [324, 961, 324, 961]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bfloat16_weights(built, tmp_path):
    build_model(tmp_path / "model", slice_config(1, 2, **NARROW), draw_rows(4))
    one, two = (
        AutoModelForImageTextToText.from_pretrained(f / "model", dtype="auto")
        for f in (built, tmp_path)
    )
    for (name, first), (_, second) in zip(
        one.named_parameters(), two.named_parameters(), strict=True
    ):
        assert first.dtype == torch.bfloat16, name
        assert torch.equal(first, second), name


def test_differences_are_told_by_quarters_of_the_answers():
    places = [[0.0], [0.0], [1.0, 3.0], [], [4.0], [4.0], [], []]
    assert by_quarters(places) == [(0, 1, 0.0, 0.0), (2, 3, 2.0, 3.0), (4, 5, 4.0, 4.0)]


def test_answers_have_the_median_and_some_are_at_the_limit():
    lengths = answer_lengths(400, 1024, 8, equal=False)
    assert lengths == sorted(lengths) and lengths[-1] == 1024 and len(lengths) == 8
    assert statistics.median(lengths) == pytest.approx(400, rel=0.02)
    assert answer_lengths(400, 1024, 8, equal=True) == [400] * 8


def scanned_run(place, accuracy):
    held_out = [
        {"step": step, "accuracy": a, "usual": a, "any": a}
        for step, a in ((0, 0.4), (40, accuracy))
    ]
    facts = {"commit": "abc", "processor_seconds": 30.0, "held_out": held_out}
    steps = [{"step": 40, "worked": 0.5, "every_step": 0.5, "tokens": 20.0}]
    return {
        **dict(zip(("case", "start", "seed", "arm"), place, strict=True)),
        **facts,
        "steps": steps,
    }


def test_a_seed_of_the_scanned_digits_counts_if_it_is_whole():
    """Seeds are the unit: what two starts differ in is no spread of a seed."""
    plan = yaml.safe_load(scanned.PLAN.read_text())
    order = scanned.places(plan, pilot=False)
    assert [place[2] for place in order] == sorted(place[2] for place in order), (
        "a seed after the other"
    )
    assert not {place[2] for place in scanned.places(plan, pilot=True)} & set(plan["seeds"])
    two = [place for place in order if place[2] < 2]
    made = [scanned_run(p, 0.4 + p[2] / 10 + p[1] / 100 + 0.1 * (p[3] == "adora")) for p in two]
    said = scanned.tables(plan, [*made, scanned_run(order[len(two)], 0.0)])
    assert (
        said.startswith(f"{len(two)} runs of commit abc; ")
        and "\nlong is better: 2 of 5 seeds are whole" in said
    )
    assert "| `grpo`, GRPO | 4 | 46.5 (41.5 to 51.5) | 46.0 / 47.0 |" in said
    assert (
        "| `grpo`, ADORA 0.1 - `grpo`, GRPO | 2 | +0.0 [+0.0, +0.0] | **+10.0 [+10.0, +10.0]** |"
        in said
    )


def test_no_scanned_picture_is_in_both_splits(monkeypatch):
    loaded = SimpleNamespace(
        images=torch.arange(640).view(10, 8, 8).numpy() % 17, target=[n // 5 + 3 for n in range(10)]
    )
    monkeypatch.setitem(
        sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=lambda: loaded)
    )
    train, test = (
        {d: {p.tobytes() for p in ps} for d, ps in scanned.scanned_digits(split, 8).items()}
        for split in ("train", "test")
    )
    assert {digit: (len(train[digit]), len(test[digit])) for digit in train} == {
        "3": (4, 1),
        "4": (4, 1),
    }
    assert not any(train[digit] & test[digit] for digit in train)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        scanned.scanned_digits("train", 8)
