"""Knights and knaves: every puzzle has one solution, splits do not meet, and the reward reads answers without mercy."""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import product
from typing import Any

import pytest

from adora_vl.errors import UserError
from adora_vl.rewards import reward_function
from adora_vl.rewards.knights import knights_verdict
from data_prep.cli import main
from data_prep.knights import NAMES, STATEMENTS, generate, is_true, solutions
from data_prep.storage import load_split
from eval.knights.benchmark import BENCHMARK

GOLD = "Ada is a knight, Ben is a knave, Cleo is a knight"


def _reading(problem: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The people and who says what, from the words alone."""
    people = re.search(r"You meet (.*?)\. ", problem).group(1).replace(" and ", ", ").split(", ")
    return people, re.findall(r"(\w+) says: (.*?)\.", problem)


def _holds(words: str, knight: dict[str, bool]) -> bool:
    """What a sentence means, written from English and not from the generator's tables."""
    names = re.findall(r"[A-Z]\w+", words)
    first, last = knight[names[0]], knight[names[-1]]
    if words.endswith("are both knights"):
        return first and last
    if words.endswith("are both knaves"):
        return not first and not last
    if words.endswith("are of the same kind"):
        return first == last
    if words.startswith("exactly one of"):
        return first != last
    if words.startswith("if "):
        return not first or not last
    if " or " in words:
        return first or not last
    return first if words.endswith("knight") else not first


@pytest.mark.parametrize("people", range(2, 9))
def test_a_puzzle_read_as_english_has_exactly_the_golds_solution(people):
    for row in generate(12, people=(people, people), seed=people):
        names, said = _reading(row["problem"])
        assert len(names) == len(said) == people and set(names) <= set(NAMES)
        fitting = []
        for kinds in product((True, False), repeat=people):
            knight = dict(zip(names, kinds, strict=True))
            if all(_holds(words, knight) == knight[speaker] for speaker, words in said):
                fitting.append(", ".join(f"{n} is a {'knight' if knight[n] else 'knave'}" for n in names))
        assert fitting == [row["answer"]]
        assert knights_verdict(row["meta"]["solution"], row["answer"])[0] == "correct"
        assert knights_verdict(row["meta"]["slip"], row["answer"])[0] == "wrong"


def test_a_puzzle_with_several_readings_is_no_puzzle():
    knight = STATEMENTS[0]
    assert solutions(2, ((0, knight, (1,)), (1, knight, (0,)))) == [0, 3]  # each vouches for the other
    assert is_true((0, knight, (1,)), 0b10) and not is_true((0, knight, (1,)), 0b01)


def test_equal_arguments_give_equal_rows_and_splits_share_no_puzzle():
    assert list(generate(30, seed=4)) == list(generate(30, seed=4))
    train, test = ({row["problem"] for row in generate(200, split=split, people=(3, 4))} for split in ("train", "test"))
    assert len(train) == len(test) == 200 and not train & test
    assert {row["meta"]["family"] for row in generate(14)} == {f"{n} people" for n in range(2, 9)}


def test_the_command_writes_a_dataset(tmp_path, capsys):
    assert main(["knights", "--output", str(tmp_path / "d"), "--rows", "6", "--test-rows", "2", "--people", "3-4"]) == 0
    rows = load_split(str(tmp_path / "d"), "train")
    assert len(rows) == 6 and rows[0]["images"] == []
    assert main(["knights", "--output", str(tmp_path / "e"), "--rows", "6", "--people", "1-9"]) == 2
    assert "argument --people: '1' is not a whole number from 2 to 8" in capsys.readouterr().err


ANSWERS = {
    "as the gold": (rf"So \boxed{{{GOLD}}}", 1.0),
    "in another order": (r"\boxed{Cleo is a knight, Ada is a knight, Ben is a knave}", 1.0),
    "without articles, capitals": (r"\boxed{Ada is Knight; Ben is a KNAVE; Cleo is a knight}", 1.0),
    "one kind wrong": (r"\boxed{Ada is a knight, Ben is a knight, Cleo is a knight}", 0.1),
    "the last box counts": (rf"\boxed{{{GOLD}}} no, \boxed{{Ada is a knave, Ben is a knave, Cleo is a knave}}", 0.1),
    "someone left out": (r"\boxed{Ada is a knight, Ben is a knave}", 0.0),
    "someone else too": (rf"\boxed{{{GOLD}, Dan is a knight}}", 0.0),
    "both kinds for one": (rf"\boxed{{{GOLD}, Ada is a knave}}", 0.0),
    "no box": (GOLD, 0.0),
    "an unclosed box": (rf"\boxed{{{GOLD}", 0.0),
    "nothing": ("", 0.0),
    "the reference's form": ("<answer> (1) Ada is a knight\n(2) Ben is a knave\n(3) Cleo is a knight </answer>", 1.0),
    "a box goes before a block": (rf"<answer>Ada is a knight</answer> \boxed{{{GOLD}}}", 1.0),
    "but not one that was only thought": (
        rf"<think>\boxed{{{GOLD.replace('Ben is a knave', 'Ben is a knight')}}}? No.</think><answer>{GOLD}</answer>",
        1.0,
    ),
    "the last block counts": (f"<answer>{GOLD}</answer> no <answer>{GOLD.replace('knight', 'knave')}</answer>", 0.1),
    "an unclosed block": (f"<answer>{GOLD}", 0.0),
    "the question's example": (r"\boxed{Ada is a knight, Ben is a knave, ...}", 0.0),
}


@pytest.mark.parametrize("case", ANSWERS, ids=str)
def test_the_reward(case):
    text, expected = ANSWERS[case]
    columns: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    reward = reward_function("knights")
    for completion in (text, [{"role": "assistant", "content": text}]):
        given = reward(
            completions=[completion], answer=[GOLD], log_extra=columns.__setitem__, log_metric=metrics.__setitem__
        )
        assert given == [expected]
    assert columns["verdict"] == [{1.0: "correct", 0.1: "wrong", 0.0: "unparseable"}[expected]]
    assert sum(metrics.values()) == 1.0


THOUGHT = "<think>If Ada lies ...</think>"
LOGIC_RL_REWARDS = {  # `verl/utils/reward_score/kk.py` there: 1 or -1 for the form; 2, -1.5 or -2 for the answer
    "right": (f"{THOUGHT}<answer>{GOLD}</answer>", 3.0),
    "wrong": (f"{THOUGHT}<answer>{GOLD.replace('Ben is a knave', 'Ben is a knight')}</answer>", -0.5),
    "someone left out": (f"{THOUGHT}<answer>Ada is a knight</answer>", -1.0),
    "words around the blocks": (f"So: {THOUGHT} hence <answer>{GOLD}</answer> !", 3.0),
    "a box in the thinking": (rf"<think>\boxed{{{GOLD}}}?</think><answer>Ada is a knight</answer>", -1.0),
    "no thinking": (f"<answer>{GOLD}</answer>", -3.0),
    "thinking twice": (f"{THOUGHT}{THOUGHT}<answer>{GOLD}</answer>", -3.0),
    "the other order": (f"<answer>{GOLD}</answer>{THOUGHT}", -3.0),
    "nothing": ("", -3.0),
}


@pytest.mark.parametrize("case", LOGIC_RL_REWARDS, ids=str)
def test_the_references_reward(case):
    text, expected = LOGIC_RL_REWARDS[case]
    assert reward_function("knights_logic_rl")(completions=[text], answer=[GOLD]) == [expected]


def test_the_benchmark_scores_by_number_of_people(tmp_path):
    main(["knights", "--output", str(tmp_path / "d"), "--rows", "2", "--test-rows", "4", "--people", "3-4"])
    problems, _ = BENCHMARK.load(Namespace(data=str(tmp_path / "d"), split="test"))
    assert len(problems) == 4
    gold = [problem.fields["answer"] for problem in problems]
    said = [rf"\boxed{{{gold[0]}}}", "?", rf"\boxed{{{gold[2]}}}", rf"\boxed{{{gold[3]}}}"]
    rows = [{**problem.fields, "response": text} for problem, text in zip(problems, said, strict=True)]
    score = BENCHMARK.score(rows, Namespace())
    assert (score["correct"], score["total"]) == (3, 4)
    assert score["groups"]["people"]["4 people"]["accuracy"] == 0.5
    assert score["groups"]["half"]["2 to 5 people (ID)"]["total"] == 4
    assert [item["verdict"] for item in score["items"]] == ["correct", "unparseable", "correct", "correct"]


def test_a_gold_that_is_no_assignment_is_refused():
    with pytest.raises(UserError, match="answer '70' names nobody"):
        reward_function("knights")(completions=["x"], answer=["70"])
