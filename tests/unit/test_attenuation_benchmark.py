"""The experiment on attenuation: its task is what the page says, and its tables compute what they claim."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.attenuation.settings import Teaching, read_settings
from benchmarks.attenuation.start import build_arithmetic, build_start
from benchmarks.attenuation.tables import area, comparisons, end, engines, half_width, interval, levels
from benchmarks.attenuation.task import (
    OPTIONS,
    SLIP,
    Regime,
    chain_text,
    draw,
    is_chain,
    is_right,
    problems,
    read_form,
    teacher,
)


def test_a_chain_is_what_its_form_asks_for():
    for problem in problems(200, Regime(5, 0.0), "x"):
        text, digit = chain_text(*read_form(problem.prompt), [False] * 5)
        assert (text, digit) == (problem.chain, problem.answer)
        assert is_right(problem.chain, problem.chain, problem.answer)


def test_families_differ_in_the_answer_alone():
    """In front of the last operand the prompts of both families are drawn from one distribution."""
    drawn = {family: problems(4000, Regime(2, 0.0), family, family) for family in "AB"}
    assert {p.answer for p in drawn["A"]} == set(OPTIONS)
    assert set(Counter(p.answer for p in drawn["B"])) == set(range(10))
    for place in (5, 6, 7, 12, 13):  # every sign and operand, the last one too
        seen = {family: Counter(p.prompt[place] for p in drawn[family]) for family in "AB"}
        for character in seen["A"] | seen["B"]:
            assert abs(seen["A"][character] - seen["B"][character]) / 4000 < 0.05, (place, character)


def test_a_label_tells_the_family_where_the_regime_says_so():
    for problem in problems(50, Regime(3, 0.0, labelled=True), "x"):
        assert problem.prompt.startswith({"A": "two: ", "B": "ten: "}[problem.family])
    assert all(p.prompt.startswith("any: ") for p in problems(50, Regime(3, 0.0), "x"))


def test_the_teacher_guesses_half_of_the_time_and_slips_as_often_as_it_should():
    rng, regime = random.Random(0), Regime(5, 0.0)
    told = [(problem := draw(rng, regime), teacher(rng, problem)) for _ in range(6000)]
    chains = [(problem, text) for problem, text in told if is_chain(text)]
    right: dict[bool, list[tuple[str, bool]]] = {True: [], False: []}
    for problem, text in told:
        right[is_chain(text)].append((problem.family, is_right(text, problem.chain, problem.answer)))
    assert len(chains) / 6000 == pytest.approx(0.5, abs=0.03)
    assert statistics.fmean(ok for _, ok in right[True]) == pytest.approx((1 - SLIP) ** 5, abs=0.02)
    assert statistics.fmean(ok for family, ok in right[False] if family == "A") == pytest.approx(0.5, abs=0.04)
    assert statistics.fmean(ok for family, ok in right[False] if family == "B") == pytest.approx(0.1, abs=0.04)


def test_where_short_is_right_chains_cannot_be_relied_on():
    hidden = problems(2000, Regime(5, 0.0, first_option=0.8, hidden_slips=True), "x", "A")
    assert statistics.fmean(p.answer == OPTIONS[0] for p in hidden) == pytest.approx(0.8, abs=0.03)
    honest = [chain_text(*read_form(p.prompt), [False] * 5)[0] == p.chain for p in hidden]
    assert statistics.fmean(honest) == pytest.approx((1 - SLIP) ** 5, abs=0.03)


def test_a_chain_that_ends_right_after_a_wrong_step_is_wrong():
    problem = problems(1, Regime(2, 0.0), "x")[0]
    broken = problem.chain.replace("=", "=0", 1)
    assert not is_right(broken, problem.chain, problem.answer)
    assert is_right(f"guess: {problem.answer}", problem.chain, problem.answer)
    assert not is_right(f"guess: {problem.answer} ", problem.chain, problem.answer)


def run(arm, seed, accuracy, engine=False):
    held_out = [{"step": step, "accuracy": a, "chains": 0.5} for step, a in zip((0, 10, 20), accuracy, strict=True)]
    figures = {"tds_share": 0.3, "weight_mean": 0.7, "entropy": 0.5}
    place = {"regime": "R2", "loss": "grpo", "arm": arm, "seed": seed, "engine": engine}
    return {**place, "held_out": held_out, "steps": [figures]}


def test_the_tables_pair_runs_by_their_seed():
    runs = [run("grpo", seed, (0.2, 0.3 + seed / 10, 0.4 + seed / 10)) for seed in (0, 1, 2)]
    runs += [run("adora", seed, (0.2, 0.3, 0.5 + seed / 10)) for seed in (2, 1, 0)]
    assert end("accuracy")(runs[1]) == 0.5 and area("accuracy")(runs[0]) == pytest.approx(0.3)
    row = next(line for line in comparisons(runs, "R2", "grpo") if line.startswith("| ADORA 0.1 - GRPO "))
    assert row.startswith("| ADORA 0.1 - GRPO | 3 | **+10.0 [+10.0, +10.0]** |"), "seeds differ, pairs do not"
    assert any(line.startswith("| GRPO | 3 | 50.0 |") for line in levels(runs, "R2", "grpo"))
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert interval([1.0, -1.0]).startswith("+0.0 [") and interval([1.0]) == "-"


def test_a_run_of_the_engine_is_compared_and_not_counted():
    runs = [run("grpo", 0, (0.2, 0.3, 0.4)), run("grpo", 0, (0.2, 0.3, 0.9), engine=True)]
    assert any(line.startswith("| GRPO | 1 | 40.0 |") for line in levels(runs, "R2", "grpo"))
    assert engines(runs)[2:] == ["| R2, grpo, GRPO, seed 0 | 40.0 | 90.0 | 50.0 | 50.0 |"]
    assert engines(runs[:1]) == []


def test_the_settings_name_what_there_is():
    settings = read_settings()
    jobs = list(settings.jobs())
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.regime for job in jobs} <= set(settings.regimes)
    assert {job.arm for job in jobs} <= set(settings.arms)


def test_every_start_is_made_of_the_model_that_can_compute(tmp_path):
    plan = Teaching(arithmetic_steps=3, steps=3, batch_size=2, learning_rate=1e-3, operations=(3,), layers=1, width=16)
    arithmetic, starts = tmp_path / "arithmetic", [tmp_path / str(seed) for seed in (0, 1)]
    build_arithmetic(arithmetic, plan)
    for seed, folder in enumerate(starts):
        build_start(folder, arithmetic, replace(plan, learning_rate=0.0) if seed else plan, seed)
    base, taught, untaught = (load_file(folder / "model.safetensors") for folder in (arithmetic, *starts))
    assert all(torch.equal(base[name], untaught[name]) for name in base)
    assert any(not torch.equal(base[name], taught[name]) for name in base)
    before = (arithmetic / "model.safetensors").stat().st_mtime_ns
    build_arithmetic(arithmetic, plan)
    build_start(starts[0], tmp_path / "nowhere", plan, 0)
    assert (arithmetic / "model.safetensors").stat().st_mtime_ns == before, "what is there stays"
