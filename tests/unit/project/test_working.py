"""The experiment about work in place of length: its task, its rule, and its stored runs."""

import random
from itertools import islice

import pytest
import yaml
from transformers import AutoTokenizer, Qwen2Config

from adora_vl.rewards.steps import check_claims
from benchmarks import working
from benchmarks.angles import (
    FIGURE_KINDS,
    AngleProblem,
    draw_angle_problem,
    guessed_response,
    prompt_text,
    right_working,
    slipped_working,
    solved_row,
    task_tokenizer,
)

WORKING_PLAN = yaml.safe_load(working.PLAN.read_text())


def draw_problems_of_kind(kind_name, *, for_testing=False):
    """Yield problems of one kind of figure, without end."""
    rng = random.Random(kind_name)
    while True:
        problem = draw_angle_problem(rng, for_testing=for_testing)
        if problem.kind.name == kind_name:
            yield problem


@pytest.mark.parametrize("kind_name", [kind.name for kind in FIGURE_KINDS])
def test_the_solver_agrees_with_the_task_and_tells_work_from_luck(kind_name):
    """The figure of each row comes from the solver, and the teacher's numbers do not."""
    rng = random.Random(0)
    for problem in islice(draw_problems_of_kind(kind_name), 3):
        figure = solved_row(problem, "angles/0", "train")["figure"]
        right_claims = check_claims(right_working(rng, problem), figure)
        assert right_claims.new_count >= 1
        assert (right_claims.false_count, right_claims.unread_count) == (0, 0)
        assert right_claims.reward == 1
        guess_claims = check_claims(guessed_response(rng, problem), figure)
        assert (guess_claims.new_count, guess_claims.unread_count) == (0, 0)
        slipped_claims = check_claims(slipped_working(rng, problem), figure)
        assert slipped_claims.false_count >= 1
        assert slipped_claims.is_right_by_luck


def test_no_numbers_of_the_held_out_problems_are_taught():
    """4,000 problems of each split have no text in common."""
    rng = random.Random(1)
    taught_texts = {draw_angle_problem(rng, for_testing=False).text for _ in range(4000)}
    held_out_texts = {draw_angle_problem(rng, for_testing=True).text for _ in range(4000)}
    assert taught_texts
    assert held_out_texts
    assert not taught_texts & held_out_texts


def test_a_response_says_nothing_of_its_work_by_its_length():
    """Workings, slips and guesses have the same mean length, within 0.3 tokens.

    They have as many sentences, in the same wordings, as often.
    """
    rng = random.Random(2)
    tokenizer = task_tokenizer()
    lengths = {}
    for respond in (right_working, slipped_working, guessed_response):
        texts = [respond(rng, draw_angle_problem(rng, for_testing=False)) for _ in range(1500)]
        counts = [len(tokenizer(text)["input_ids"]) for text in texts]
        lengths[respond.__name__] = sum(counts) / len(counts)
        assert len(set(counts)) > 3
    assert max(lengths.values()) - min(lengths.values()) < 0.3


def test_a_run_reads_the_words_and_numbers_of_the_task_as_they_were_taught(tmp_path):
    """A run loads the tokenizer from the folder of its start, in its family's own class."""
    rng = random.Random(3)
    tokenizer = task_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(200):
        problem = draw_angle_problem(rng, for_testing=rng.random() < 0.5)
        text = prompt_text(tokenizer, problem.text) + slipped_working(rng, problem)
        ids = tokenizer(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


def test_a_slip_that_goes_on_reaches_the_answer():
    """An error of 10 degrees in one value changes those that are computed from it."""
    kind = next(kind for kind in FIGURE_KINDS if kind.name == "isosceles")
    problem = AngleProblem(kind=kind, labels={"ABC": 50, "BAD": 30})
    assert problem.values() == {"ACB": 50, "BAC": 80, "CAD": 50}
    assert problem.values(slip=0, error=10) == {"ACB": 60, "BAC": 70, "CAD": 40}
    assert problem.values(slip=2, error=-10) == {"ACB": 50, "BAC": 80, "CAD": 40}


def finished_run(seed, arm, accuracy):
    """Return a run as it is stored, with 30 % before training and `accuracy` at its end."""
    point = dict.fromkeys(("lucky", "new", "false", *(kind.name for kind in FIGURE_KINDS)), 0.5)
    point |= {"step": 60, "accuracy": accuracy, "tokens": 20.0}
    start = {**point, "step": 0, "accuracy": 0.3}
    held_out = [start, point] if arm == "grpo" else [point]
    run_facts = {
        "commit": "abc",
        "processor_seconds": 60.0,
        "steps": [{"step": 60, "weight_mean": 0.9}],
    }
    return {"seed": seed, "arm": arm, "held_out": held_out, **run_facts}


def finished_runs(accuracy_gain, seeds, *, over=()):
    """Return runs of all arms and these seeds, with `working` about `accuracy_gain` ahead.

    `over`: further arms that are as far ahead.
    """
    runs = []
    for seed in seeds:
        for arm in WORKING_PLAN["arms"]:
            is_ahead = arm == "working" or arm in over
            accuracy = 0.5 + seed / 100 + (accuracy_gain + seed / 1000 if is_ahead else 0)
            runs.append(finished_run(seed, arm, accuracy))
    return runs


FIRST_SEEDS = WORKING_PLAN["seeds"][0]


def test_working_wins_only_against_length_and_its_random_control():
    """A gain is above both controls, beyond the interval and in more than one seed."""
    assert working.verdict_of_rule(finished_runs(0.1, FIRST_SEEDS)) == "gain"
    assert working.verdict_of_rule(finished_runs(0.1, FIRST_SEEDS, over=("random",))) == "no gain"
    assert working.verdict_of_rule(finished_runs(0.1, FIRST_SEEDS, over=("length",))) == "no gain"
    assert working.verdict_of_rule(finished_runs(0.0005, FIRST_SEEDS)) == "no gain", (
        "within the interval"
    )
    assert working.verdict_of_rule(finished_runs(0.1, FIRST_SEEDS[:1])) == "no gain", (
        "one seed shows nothing"
    )


def test_a_seed_of_a_block_counts_if_it_is_whole():
    """Only the arm "steps alone" of the third seed is a whole block."""
    runs = finished_runs(0.1, FIRST_SEEDS[:2])
    (seed,) = FIRST_SEEDS[2:]
    runs_of_incomplete_seed = [
        finished_run(seed, arm, 0.0) for arm in ("grpo", "length", "steps alone", "gate")
    ]
    counted_runs = working.runs_of_whole_blocks(WORKING_PLAN, [*runs, *runs_of_incomplete_seed])
    assert [run["arm"] for run in counted_runs if run["seed"] == seed] == ["steps alone"]
    tables = working.tables(WORKING_PLAN, [*runs, *runs_of_incomplete_seed])
    assert tables.startswith(f"{2 * len(WORKING_PLAN['arms']) + 1} runs of commit abc; ")
    assert " 30.0 % before training, 50.0 % of these lucky." in tables
    assert "| ADORA, `working` | 2 | 60.5 (60.0 to 61.1) |" in tables
    assert "| GRPO, `steps` alone, 100 steps | 3 |" in tables


def test_every_run_has_its_place_once():
    """Each seed and arm come once, and the pilot's seeds are others."""
    order = working.runs_in_order(WORKING_PLAN)
    seeds = [seed for group in WORKING_PLAN["seeds"] for seed in group]
    assert len(order) == len(set(order)) == len(seeds) * len(WORKING_PLAN["arms"])
    assert {arm for _, arm in order} == WORKING_PLAN["arms"].keys()
    assert not {seed for seed, _ in working.runs_in_order(WORKING_PLAN, pilot=True)} & set(seeds)


def test_the_arms_are_one_key_apart():
    """Each arm of the plan differs from GRPO's in one key at most.

    Arms that name what is rewarded have two, as the plan says.
    """
    for arm, keys in WORKING_PLAN["arms"].items():
        changed_keys = {
            key
            for key in keys
            if keys[key] != {**WORKING_PLAN["train"], **WORKING_PLAN["arms"]["grpo"]}.get(key)
        }
        assert len(changed_keys) <= (2 if arm in ("gate", "steps alone") else 1), arm
