"""The benchmarks measure what they say: their data, arithmetic and tables."""

import copy
import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from adora_vl.evals.scoring.statistics import t_half_width
from adora_vl.record.record_files import ROLLOUTS_FOLDER, write_record_file
from adora_vl.record.rollouts import make_table
from benchmarks import scanned
from benchmarks.attenuation import task
from benchmarks.attenuation.__main__ import result_lines, train_or_read
from benchmarks.attenuation.start import build_arithmetic, build_start, hash_of_weights
from benchmarks.attenuation.task import draw_chain_problem
from benchmarks.kill_and_resume import (
    KILL_PHASES,
    describe_differences,
    hash_recorded_rollouts,
    judge_by_noise,
    patched_place_of_phase,
)
from benchmarks.step import answer_lengths
from tests.support.paths import REPOSITORY


def test_a_chain_is_what_its_form_asks_for():
    """Without slips, the computed chain is the problem's own, and is graded as right."""
    no_slips = [False] * 5
    for problem in task.draw_chain_problems(200, task.Regime(operations=5), seed="x"):
        form = task.read_chain_form(problem.prompt)
        text, digit = task.chain_text(*form, no_slips)
        assert text == problem.chain
        assert digit == problem.answer
        assert task.is_right(problem.chain, problem)


def test_families_differ_in_the_answer_alone():
    """Answers of family A are those of its list and answers of B any digit; prompts are alike.

    Each place of a prompt has its signs and operands equally often in both, within 5 %.
    """
    count = 4000
    problems_of_a = task.draw_chain_problems(count, task.Regime(operations=2), seed="A", family="A")
    problems_of_b = task.draw_chain_problems(count, task.Regime(operations=2), seed="B", family="B")
    assert {problem.answer for problem in problems_of_a} == set(task.ANSWERS_OF_FAMILY_A)
    assert {problem.answer for problem in problems_of_b} == set(range(10))
    # places of every sign and operand in a prompt, the last one too
    for position in (5, 6, 7, 12, 13):
        counts_a = Counter(problem.prompt[position] for problem in problems_of_a)
        counts_b = Counter(problem.prompt[position] for problem in problems_of_b)
        for character in counts_a | counts_b:
            difference = abs(counts_a[character] - counts_b[character])
            assert difference / count < 0.05, (position, character)


def test_a_label_tells_the_family_where_the_regime_says_so():
    """Labelled prompts begin with "two" or "ten", and others with "any"."""
    labels = {"A": "two: ", "B": "ten: "}
    for problem in task.draw_chain_problems(50, task.Regime(operations=3, labelled=True), seed="x"):
        label = labels[problem.family]
        assert problem.prompt.startswith(label)
    for problem in task.draw_chain_problems(50, task.Regime(operations=3), seed="x"):
        assert problem.prompt.startswith("any: ")


def test_the_teacher_guesses_half_of_the_time_and_slips_as_often_as_it_should():
    """Guesses are right as often as 1 of 2 answers or of 10 is; a chain has five steps."""
    rng = random.Random(0)
    regime = task.Regime(operations=5)
    count = 6000
    chain_outcomes = []
    guess_outcomes_by_family: dict[str, list[bool]] = {"A": [], "B": []}
    for _ in range(count):
        problem = draw_chain_problem(rng, regime)
        text = task.teacher_answer(rng, problem)
        is_right = task.is_right(text, problem)
        if task.is_chain(text):
            chain_outcomes.append(is_right)
        else:
            guess_outcomes_by_family[problem.family].append(is_right)
    no_slip_in_five = (1 - task.SLIP_RATE) ** 5
    assert len(chain_outcomes) / count == pytest.approx(0.5, abs=0.03)
    assert statistics.fmean(chain_outcomes) == pytest.approx(no_slip_in_five, abs=0.02)
    assert statistics.fmean(guess_outcomes_by_family["A"]) == pytest.approx(0.5, abs=0.04)
    assert statistics.fmean(guess_outcomes_by_family["B"]) == pytest.approx(0.1, abs=0.04)


def test_with_hidden_slips_most_honest_chains_are_graded_wrong():
    """The regime R3 of the experiment is made so that a guess pays more than a chain.

    With `hidden_slips` the chain that counts as right has drawn mistakes in it, of `SLIP_RATE` a
    step. A chain that is computed without a mistake is right only where none was drawn. With
    `first_option` the guess 7 is right in 80 % of the problems.
    """
    regime = task.Regime(operations=5, first_option=0.8, hidden_slips=True)
    problems = task.draw_chain_problems(2000, regime, seed="x", family="A")
    has_first_option = [problem.answer == task.ANSWERS_OF_FAMILY_A[0] for problem in problems]
    assert statistics.fmean(has_first_option) == pytest.approx(0.8, abs=0.03)
    no_slips = [False] * 5
    is_honest = []
    for problem in problems:
        form = task.read_chain_form(problem.prompt)
        text, _ = task.chain_text(*form, no_slips)
        is_honest.append(text == problem.chain)
    assert statistics.fmean(is_honest) == pytest.approx((1 - task.SLIP_RATE) ** 5, abs=0.03)


def test_a_chain_that_ends_right_after_a_wrong_step_is_wrong():
    """The reward `digit` looks at the end alone; a wrong end is wrong for each reward."""
    problem = task.draw_chain_problems(1, task.Regime(operations=2), seed="x")[0]
    chain_with_wrong_step = problem.chain.replace("=", "=0", 1)
    assert not task.is_right(chain_with_wrong_step, problem)
    assert task.is_right(chain_with_wrong_step, problem, reward="digit")
    wrong_digit = (problem.answer + 1) % 10
    wrong_end = problem.chain[:-1] + str(wrong_digit)
    for reward in task.REWARD_NAMES:
        assert not task.is_right(wrong_end, problem, reward=reward)
        assert task.is_right(f"guess: {problem.answer}", problem, reward)
        assert not task.is_right(f"guess: {problem.answer} ", problem, reward)


def test_the_tests_of_a_difference_know_its_unit():
    """4.303 is Student's t for three values; one value has no interval."""
    assert t_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert scanned.mean_and_interval([1.0, -1.0]).startswith("+0.0 [")
    assert scanned.mean_and_interval([1.0]) == "-"


def first_trial(settings: task.ExperimentSettings, arm: str = "adora") -> task.Trial:
    """Return the trial of the first recipe with seed 0."""
    return task.Trial("R2", next(iter(settings.recipes)), 0, arm, engine=False)


# How the model of the experiment learns to compute before the runs begin: here hardly at all.
TINY_TEACHING_PLAN = task.TeachingPlan(
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
    """Two steps are trained, evaluated before and after, and stored for the next call."""
    settings = replace(
        task.read_settings(),
        start=TINY_TEACHING_PLAN,
        steps=2,
        prompts=2,
        generations=2,
        eval_problems=4,
        eval_every=2,
    )
    trial = first_trial(settings)
    result = train_or_read(settings, trial, tmp_path)
    assert [point["step"] for point in result["held_out"]] == [0, 2]
    assert len(result["steps"]) == 2
    # The result has the fields of the trial: its regime, recipe, seed and arm.
    assert asdict(trial).items() <= result.items()
    # The share of answers that are worked out step by step, in place of a guess.
    assert all("chains" in step for step in result["steps"])
    first, *points = result_lines(result)
    assert first == "adora:"
    assert len(points) == 2
    assert points[1].startswith("  step 2: accuracy ")
    assert train_or_read(replace(settings, steps=9), trial, tmp_path) == result, (
        "what is there stays"
    )


def are_equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Tell whether two models have the same weights."""
    return all(torch.equal(first[name], second[name]) for name in first)


def test_every_start_is_made_of_the_model_that_can_compute(tmp_path):
    """A start without learning is the arithmetic model; one is made anew only for another plan."""
    plan = TINY_TEACHING_PLAN
    arithmetic_folder = tmp_path / "arithmetic"
    start_folders = [tmp_path / str(seed) for seed in (0, 1)]
    build_arithmetic(arithmetic_folder, plan)
    without_learning = replace(plan, learning_rate=0.0)
    build_start(start_folders[0], arithmetic_folder, plan, 0)
    build_start(start_folders[1], arithmetic_folder, without_learning, 1)
    base_weights = load_file(arithmetic_folder / "model.safetensors")
    taught_weights = load_file(start_folders[0] / "model.safetensors")
    untaught_weights = load_file(start_folders[1] / "model.safetensors")
    assert are_equal_weights(base_weights, untaught_weights)
    assert not are_equal_weights(base_weights, taught_weights)
    mtime_before = (arithmetic_folder / "model.safetensors").stat().st_mtime_ns
    build_arithmetic(tmp_path / "another", plan, 1)
    assert hash_of_weights(tmp_path / "another") != hash_of_weights(arithmetic_folder)
    build_arithmetic(arithmetic_folder, plan)
    build_start(start_folders[0], tmp_path / "nowhere", plan, 0)
    assert (arithmetic_folder / "model.safetensors").stat().st_mtime_ns == mtime_before, (
        "what is there stays"
    )
    build_start(start_folders[0], arithmetic_folder, replace(plan, steps=4), 0)
    longer_taught_weights = load_file(start_folders[0] / "model.safetensors")
    assert not are_equal_weights(longer_taught_weights, taught_weights), (
        "of another plan it is made anew"
    )


# What a run has left, as the benchmark of kills compares it: the log of each step, digests of the
# rollouts and of the tables.
LOG_OF_TWO_STEPS = {1: {"loss": 0.5, "reward": 0.1}, 2: {"loss": 0.4}}
RESULTS_OF_RUN = {
    "steps": LOG_OF_TWO_STEPS,
    "rollouts": {"step 1": "ab"},
    "tables": {"completions_00001": "ab"},
    "weights": "w",
}

CHANGE_AND_DIFFERENCE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda f: f["steps"][1].update(loss=0.5000001),
        "step 1: loss is 0.5 and 0.5000001 (1 figures differ)",
    ),
    (lambda f: f["steps"].pop(2), "step 2: loss is 0.4 and None (1 figures differ)"),
    (lambda f: f["rollouts"].update({"step 1": "xy"}), "rollouts of step 1"),
    (lambda f: f["rollouts"].update({"step 2": "xy"}), "rollouts of step 2"),
    (lambda f: f["tables"].update(completions_00001="xy"), "the table completions_00001"),
    (lambda f: f.update(weights="v"), "the final weights"),
]


def test_a_killed_run_with_tools_is_compared_by_what_is_recorded_of_its_rollouts(tmp_path):
    """Runs with tools are compared by digests of their recorded rollouts.

    TRL writes no table of them. The digest leaves out the seconds of a tool, and two runs without
    records count as different, since nothing would be compared.
    """

    def rollouts_digest(seconds: float, text: str) -> dict[str, str]:
        """Record one turn of a tool, and return the digests of what is recorded."""
        turn = {
            "by": "tool",
            "text": text,
            "tokens": 3,
            "images": [],
            "seconds": seconds,
        }
        columns: dict[str, list[Any]] = {
            "step": [1, 1],
            "completion": ["a", "b"],
            "turns": [None, [turn]],
        }
        write_record_file(
            tmp_path / ROLLOUTS_FOLDER, make_table(columns, {}), first_step=1, last_step=1
        )
        return hash_recorded_rollouts(tmp_path)

    assert hash_recorded_rollouts(tmp_path) == {}
    (tmp_path / ROLLOUTS_FOLDER).mkdir()
    first_digest = rollouts_digest(seconds=0.5, text="7")
    assert list(first_digest) == ["step 1"]
    assert rollouts_digest(seconds=0.6, text="7") == first_digest, (
        "how long a tool takes depends on the machine"
    )
    assert rollouts_digest(seconds=0.5, text="8") != first_digest
    results_without_rollouts = {**RESULTS_OF_RUN, "rollouts": {}}
    assert describe_differences(results_without_rollouts, results_without_rollouts)[0].startswith(
        "no rollouts, because none were recorded"
    )


def test_a_killed_run_is_compared_figure_by_figure():
    """Each change of equal results is named in one line."""
    assert describe_differences(RESULTS_OF_RUN, copy.deepcopy(RESULTS_OF_RUN)) == []
    differences = []
    for change_results, _ in CHANGE_AND_DIFFERENCE:
        changed_results: dict[str, Any] = copy.deepcopy(RESULTS_OF_RUN)
        change_results(changed_results)
        differences.append(describe_differences(RESULTS_OF_RUN, changed_results))
    assert differences == [[line] for _, line in CHANGE_AND_DIFFERENCE]
    for _, owner, name in map(patched_place_of_phase, KILL_PHASES):
        # `getattr` would find a method of `type` itself in any class.
        assert callable(vars(owner).get(name)), "every phase has a place to be killed in"


def test_answers_have_the_median_and_some_are_at_the_limit():
    """Eight lengths with the median 400 and the limit 1024, or all 400."""
    lengths = answer_lengths(400, 1024, 8, equal=False)
    assert lengths == sorted(lengths)
    assert lengths[-1] == 1024
    assert len(lengths) == 8
    assert statistics.median(lengths) == pytest.approx(400, rel=0.02)
    assert answer_lengths(400, 1024, 8, equal=True) == [400] * 8


def scanned_run(trial_place, accuracy):
    """Return a run as it is stored: at a place of the plan, 40 % right first, `accuracy` later."""
    case, start, seed, arm = trial_place
    held_out = []
    for step, share in ((0, 0.4), (40, accuracy)):
        held_out.append({"step": step, "accuracy": share, "usual": share, "any": share})
    return {
        "case": case,
        "start": start,
        "seed": seed,
        "arm": arm,
        "commit": "abc",
        "processor_seconds": 30.0,
        "held_out": held_out,
        "steps": [{"step": 40, "worked": 0.5, "every_step": 0.5, "tokens": 20.0}],
    }


def test_a_seed_of_the_scanned_digits_counts_if_it_is_whole():
    """The table has the seeds whose runs are all there, each as the mean over its starts.

    Two starts of a seed share it, so what they differ in is not counted as a spread over seeds.
    """
    plan = yaml.safe_load(scanned.PLAN.read_text())
    order = scanned.runs_in_order(plan, pilot=False)
    seeds = [seed for _, _, seed, _ in order]
    assert seeds == sorted(seeds), "a seed after the other"
    pilot_seeds = {seed for _, _, seed, _ in scanned.runs_in_order(plan, pilot=True)}
    assert pilot_seeds.isdisjoint(plan["seeds"])
    runs = []
    for case, start, seed, method in order:
        if seed < 2:
            adora_gain = 0.1 if method == "adora" else 0.0
            accuracy = 0.4 + seed / 10 + start / 100 + adora_gain
            runs.append(scanned_run((case, start, seed, method), accuracy))
    whole_runs = len(runs)
    run_of_incomplete_seed = scanned_run(order[whole_runs], accuracy=0.0)
    tables = scanned.tables(plan, [*runs, run_of_incomplete_seed])
    assert tables.startswith(f"{whole_runs} runs of commit abc; ")
    assert "\nlong is better: 2 of 5 seeds are whole" in tables
    assert "| `grpo`, GRPO | 4 | 46.5 (41.5 to 51.5) | 46.0 / 47.0 |" in tables
    # Equal differences of two seeds have no interval.
    difference = "| `grpo`, ADORA 0.1 - `grpo`, GRPO | 2 | +0.0 | +10.0 |"
    assert difference in tables


def test_no_scanned_picture_is_in_both_splits(monkeypatch):
    """Each of two digits has five pictures: four to train on and one to test.

    Without scikit-learn, the error says how to install it.
    """
    images = torch.arange(640).view(10, 8, 8).numpy() % 17
    digits = SimpleNamespace(images=images, target=[3] * 5 + [4] * 5)
    datasets = SimpleNamespace(load_digits=lambda: digits)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", datasets)

    def pictures_by_digit(split: str) -> dict[str, set[bytes]]:
        """Return the different pictures of each digit."""
        pictures = scanned.scanned_digits(split, 8)
        return {digit: {picture.tobytes() for picture in pictures[digit]} for digit in pictures}

    train = pictures_by_digit("train")
    test = pictures_by_digit("test")
    assert train.keys() == test.keys() == {"3", "4"}
    for digit in train:
        assert len(train[digit]) == 4
        assert len(test[digit]) == 1
        assert train[digit].isdisjoint(test[digit])
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        scanned.scanned_digits("train", 8)


def test_a_killed_run_is_judged_by_the_distance_of_two_others(tmp_path, capsys):
    """Twice the distance of two equal runs is noise, and ten times is not."""
    weights = {"first": 1.0, "second": 1.001, "near": 1.002, "far": 1.01}
    folders = {name: tmp_path / name for name in weights}
    for name, value in weights.items():
        folders[name].mkdir()
        tensors = {"weight": torch.full((4,), value)}
        save_file(tensors, folders[name] / "model.safetensors")
    references = [folders["first"], folders["second"]]
    assert judge_by_noise(folders["near"], references)
    assert "are 1.00e-03 apart, the killed run 2.00e-03: within 3 times" in capsys.readouterr().out
    assert not judge_by_noise(folders["far"], references)
    assert "the killed run 1.00e-02: more than 3 times the noise" in capsys.readouterr().out


@pytest.mark.slow
def test_the_step_of_stock_trl_and_ours_are_measured_on_the_same_gradients(tmp_path):
    """Both ways learn from the same rollouts in float32, so that their gradient norms are equal."""
    case = "P 700, C 400 long-tailed"
    command = [sys.executable, "-m", "benchmarks.step", "--tiny", "--turns", "1"]
    command += ["--cases", case, "--dtype", "float32", "--output", str(tmp_path)]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    measured = json.loads((tmp_path / "step.json").read_text())[case]
    norms = [measured["turns"][step_way][0]["grad_norm"] for step_way in ("stock", "ours")]
    # Both ways learn from the same rollouts in float32; a gradient that differs is not of rounding.
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] > 0
