"""The reward of knights and knaves reads answers without mercy, as the reference's does."""

from typing import Any

import pytest

from adora_vl.rewards import reward_function
from adora_vl.utils.errors import UserError

GOLD = "Ada is a knight, Ben is a knave, Cleo is a knight"


ANSWERS = {
    "as the gold": (rf"So \boxed{{{GOLD}}}", 1.0),
    "in another order": (r"\boxed{Cleo is a knight, Ada is a knight, Ben is a knave}", 1.0),
    "without articles, capitals": (r"\boxed{Ada is Knight; Ben is a KNAVE; Cleo is a knight}", 1.0),
    "one kind wrong": (r"\boxed{Ada is a knight, Ben is a knight, Cleo is a knight}", 0.1),
    "the last box counts": (
        rf"\boxed{{{GOLD}}} no, \boxed{{Ada is a knave, Ben is a knave, Cleo is a knave}}",
        0.1,
    ),
    "someone left out": (r"\boxed{Ada is a knight, Ben is a knave}", 0.0),
    "someone else too": (rf"\boxed{{{GOLD}, Dan is a knight}}", 0.0),
    "both kinds for one": (rf"\boxed{{{GOLD}, Ada is a knave}}", 0.0),
    "no box": (GOLD, 0.0),
    "an unclosed box": (rf"\boxed{{{GOLD}", 0.0),
    "nothing": ("", 0.0),
    "the reference's form": (
        "<answer> (1) Ada is a knight\n(2) Ben is a knave\n(3) Cleo is a knight </answer>",
        1.0,
    ),
    "a box goes before a block": (rf"<answer>Ada is a knight</answer> \boxed{{{GOLD}}}", 1.0),
    "but not one that was only thought": (
        rf"<think>\boxed{{{GOLD.replace('Ben is a knave', 'Ben is a knight')}}}? "
        rf"No.</think><answer>{GOLD}</answer>",
        1.0,
    ),
    "the last block counts": (
        f"<answer>{GOLD}</answer> no <answer>{GOLD.replace('knight', 'knave')}</answer>",
        0.1,
    ),
    "an unclosed block": (f"<answer>{GOLD}", 0.0),
    "the question's example": (r"\boxed{Ada is a knight, Ben is a knave, ...}", 0.0),
}


def test_an_answer_earns_by_its_verdict_as_a_text_or_as_a_message(subtests):
    for case in ANSWERS:
        with subtests.test(case):
            text, expected = ANSWERS[case]
            columns: dict[str, Any] = {}
            metrics: dict[str, Any] = {}
            reward = reward_function("knights")
            for completion in (text, [{"role": "assistant", "content": text}]):
                logs = {"log_extra": columns.__setitem__, "log_metric": metrics.__setitem__}
                assert reward(completions=[completion], answer=[GOLD], **logs) == [expected]
            assert columns["verdict"] == [
                {1.0: "correct", 0.1: "wrong", 0.0: "unparseable"}[expected]
            ]
            assert sum(metrics.values()) == 1.0


THOUGHT = "<think>If Ada lies ...</think>"


# `verl/utils/reward_score/kk.py` there: 1 or -1 for the form; 2, -1.5 or -2 for the answer
LOGIC_RL_REWARDS = {
    "right": (f"{THOUGHT}<answer>{GOLD}</answer>", 3.0),
    "wrong": (
        f"{THOUGHT}<answer>{GOLD.replace('Ben is a knave', 'Ben is a knight')}</answer>",
        -0.5,
    ),
    "someone left out": (f"{THOUGHT}<answer>Ada is a knight</answer>", -1.0),
    "words around the blocks": (f"So: {THOUGHT} hence <answer>{GOLD}</answer> !", 3.0),
    "a box in the thinking": (
        rf"<think>\boxed{{{GOLD}}}?</think><answer>Ada is a knight</answer>",
        -1.0,
    ),
    "no thinking": (f"<answer>{GOLD}</answer>", -3.0),
    "thinking twice": (f"{THOUGHT}{THOUGHT}<answer>{GOLD}</answer>", -3.0),
    "the other order": (f"<answer>{GOLD}</answer>{THOUGHT}", -3.0),
    "nothing": ("", -3.0),
    # what `knights` reads in another way
    "without an article": (
        f"{THOUGHT}<answer>{GOLD.replace('Ada is a knight', 'Ada is knight')}</answer>",
        -1.0,
    ),
    "in capitals": (f"{THOUGHT}<answer>{GOLD.upper()}</answer>", 3.0),
    "a knight too many": (f"{THOUGHT}<answer>{GOLD}, since knights are honest</answer>", -1.0),
    "someone twice": (f"{THOUGHT}<answer>{GOLD}. Ada is a knight</answer>", -1.0),
    "a box behind the block": (rf"{THOUGHT}<answer>{GOLD}</answer> \boxed{{Ada is a knave}}", 3.0),
    "a box in the block": (rf"{THOUGHT}<answer>Ada is a knave, \boxed{{{GOLD}}}</answer>", -1.0),
}


def test_the_reward_is_that_of_the_reference_implementation(subtests):
    for case in LOGIC_RL_REWARDS:
        with subtests.test(case):
            text, expected = LOGIC_RL_REWARDS[case]
            assert reward_function("knights_logic_rl")(completions=[text], answer=[GOLD]) == [
                expected
            ]


def test_a_gold_that_is_no_assignment_is_refused():
    with pytest.raises(UserError, match="answer '70' names no knight"):
        reward_function("knights")(completions=["x"], answer=["70"])
