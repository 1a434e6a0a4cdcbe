"""The reward of knights and knaves reads answers without mercy, as the reference's does."""

from typing import Any

import pytest

from adora_vl.rewards import reward_function
from adora_vl.utils.errors import UserError

REFERENCE_ROLES = "Ada is a knight, Ben is a knave, Cleo is a knight"


RESPONSE_AND_REWARD_BY_CASE = {
    "as the gold": (rf"So \boxed{{{REFERENCE_ROLES}}}", 1.0),
    "in another order": (r"\boxed{Cleo is a knight, Ada is a knight, Ben is a knave}", 1.0),
    "without articles, capitals": (r"\boxed{Ada is Knight; Ben is a KNAVE; Cleo is a knight}", 1.0),
    "one kind wrong": (r"\boxed{Ada is a knight, Ben is a knight, Cleo is a knight}", 0.1),
    "the last box counts": (
        rf"\boxed{{{REFERENCE_ROLES}}} no, \boxed{{Ada is a knave, Ben is a knave, Cleo is a knave}}",
        0.1,
    ),
    "someone left out": (r"\boxed{Ada is a knight, Ben is a knave}", 0.0),
    "someone else too": (rf"\boxed{{{REFERENCE_ROLES}, Dan is a knight}}", 0.0),
    "both kinds for one": (rf"\boxed{{{REFERENCE_ROLES}, Ada is a knave}}", 0.0),
    "no box": (REFERENCE_ROLES, 0.0),
    "an unclosed box": (rf"\boxed{{{REFERENCE_ROLES}", 0.0),
    "nothing": ("", 0.0),
    "the reference's form": (
        "<answer> (1) Ada is a knight\n(2) Ben is a knave\n(3) Cleo is a knight </answer>",
        1.0,
    ),
    "a box goes before a block": (
        rf"<answer>Ada is a knight</answer> \boxed{{{REFERENCE_ROLES}}}",
        1.0,
    ),
    "but not one that was only thought": (
        rf"<think>\boxed{{{REFERENCE_ROLES.replace('Ben is a knave', 'Ben is a knight')}}}? "
        rf"No.</think><answer>{REFERENCE_ROLES}</answer>",
        1.0,
    ),
    "the last block counts": (
        f"<answer>{REFERENCE_ROLES}</answer> no <answer>{REFERENCE_ROLES.replace('knight', 'knave')}</answer>",
        0.1,
    ),
    "an unclosed block": (f"<answer>{REFERENCE_ROLES}", 0.0),
    "the question's example": (r"\boxed{Ada is a knight, Ben is a knave, ...}", 0.0),
}


def test_an_answer_earns_by_its_verdict_as_a_text_or_as_a_message(subtests):
    """`knights` gives 1.0 for right roles, 0.1 for wrong ones and 0.0 where they cannot be read."""
    for case in RESPONSE_AND_REWARD_BY_CASE:
        with subtests.test(case):
            text, expected = RESPONSE_AND_REWARD_BY_CASE[case]
            columns: dict[str, Any] = {}  # logged for each completion
            metrics: dict[str, Any] = {}
            reward = reward_function("knights")
            for completion in (text, [{"role": "assistant", "content": text}]):
                logs = {"log_extra": columns.__setitem__, "log_metric": metrics.__setitem__}
                assert reward(completions=[completion], answer=[REFERENCE_ROLES], **logs) == [
                    expected
                ]
            assert columns["verdict"] == [
                {1.0: "correct", 0.1: "wrong", 0.0: "unparseable"}[expected]
            ]
            assert sum(metrics.values()) == 1.0


THINKING_BLOCK = "<think>If Ada lies ...</think>"


# In Logic-RL: 1 or -1 for the form, and 2, -1.5 or -2 for a right, wrong or unreadable answer.
LOGIC_RL_RESPONSE_AND_REWARD_BY_CASE = {
    "right": (f"{THINKING_BLOCK}<answer>{REFERENCE_ROLES}</answer>", 3.0),
    "wrong": (
        f"{THINKING_BLOCK}<answer>{REFERENCE_ROLES.replace('Ben is a knave', 'Ben is a knight')}</answer>",
        -0.5,
    ),
    "someone left out": (f"{THINKING_BLOCK}<answer>Ada is a knight</answer>", -1.0),
    "words around the blocks": (
        f"So: {THINKING_BLOCK} hence <answer>{REFERENCE_ROLES}</answer> !",
        3.0,
    ),
    "a box in the thinking": (
        rf"<think>\boxed{{{REFERENCE_ROLES}}}?</think><answer>Ada is a knight</answer>",
        -1.0,
    ),
    "no thinking": (f"<answer>{REFERENCE_ROLES}</answer>", -3.0),
    "thinking twice": (f"{THINKING_BLOCK}{THINKING_BLOCK}<answer>{REFERENCE_ROLES}</answer>", -3.0),
    "the other order": (f"<answer>{REFERENCE_ROLES}</answer>{THINKING_BLOCK}", -3.0),
    "nothing": ("", -3.0),
    # what `knights` reads in another way
    "without an article": (
        f"{THINKING_BLOCK}<answer>{REFERENCE_ROLES.replace('Ada is a knight', 'Ada is knight')}</answer>",
        -1.0,
    ),
    "in capitals": (f"{THINKING_BLOCK}<answer>{REFERENCE_ROLES.upper()}</answer>", 3.0),
    "a knight too many": (
        f"{THINKING_BLOCK}<answer>{REFERENCE_ROLES}, since knights are honest</answer>",
        -1.0,
    ),
    "someone twice": (f"{THINKING_BLOCK}<answer>{REFERENCE_ROLES}. Ada is a knight</answer>", -1.0),
    "a box behind the block": (
        rf"{THINKING_BLOCK}<answer>{REFERENCE_ROLES}</answer> \boxed{{Ada is a knave}}",
        3.0,
    ),
    "a box in the block": (
        rf"{THINKING_BLOCK}<answer>Ada is a knave, \boxed{{{REFERENCE_ROLES}}}</answer>",
        -1.0,
    ),
}


def test_the_reward_is_that_of_the_reference_implementation(subtests):
    """`knights_logic_rl` gives what `verl/utils/reward_score/kk.py` of Logic-RL gives."""
    for case in LOGIC_RL_RESPONSE_AND_REWARD_BY_CASE:
        with subtests.test(case):
            text, expected = LOGIC_RL_RESPONSE_AND_REWARD_BY_CASE[case]
            assert reward_function("knights_logic_rl")(
                completions=[text], answer=[REFERENCE_ROLES]
            ) == [expected]


def test_a_gold_that_is_no_assignment_is_refused():
    with pytest.raises(UserError, match="answer '70' names no knight"):
        reward_function("knights")(completions=["x"], answer=["70"])
