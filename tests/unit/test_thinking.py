"""The rewards for answers that think first."""

from __future__ import annotations

import pytest

from adora_vl.prompts import RESPONSE_FORMATS
from adora_vl.rewards import grade, reward_functions

BOX = "\\boxed{5}"
CASES = [  # the text, right as `think`, right as `think_answer`
    (f"<think>2 + 3</think>{BOX}", True, False),
    (f"<think>2 + 3</think>\n<answer>{BOX}</answer>\n", False, True),
    (f"  <think>a\nb</think> so {BOX}", True, False),
    (f"Hm. <think>a</think>{BOX}", False, False),
    (f"<think></think>{BOX}", False, False),
    ("<think>a</think>", False, False),
    (f"<think>a{BOX}", False, False),
    (f"<think>a</think></think>{BOX}", False, False),
    (f"<think>a<think>b</think>{BOX}", False, False),
    (f"<think>a</think><answer>{BOX}</answer> so", False, False),
    (f"<think>a</think> so <answer>{BOX}</answer>", False, False),
    ("<think>a</think><answer> </answer>", False, False),
    (f"<think>a</think><answer>{BOX}</answer><answer>{BOX}</answer>", False, False),
    (f"<answer>{BOX}</answer><think>a</think>", False, False),
    ("", False, False),
    ("<think>" * 100_000, False, False),
]


@pytest.mark.parametrize(("text", "think", "think_answer"), CASES)
def test_only_the_whole_form_is_rewarded(text, think, think_answer):
    functions = reward_functions(["think_format", "think_answer_format"])
    assert [function.__name__ for function in functions] == ["think_format_reward", "think_answer_format_reward"]
    for completions in ([text], [[{"role": "assistant", "content": text}]]):
        assert [f(prompts=["p"], completions=completions, answer=["5"]) for f in functions] == [[think], [think_answer]]


@pytest.mark.parametrize(("text", "think", "think_answer"), CASES[:3])
def test_the_grader_reads_the_answer_of_every_format(text, think, think_answer):
    assert grade(text, "5").verdict == "correct"
    assert set(RESPONSE_FORMATS) == {"boxed", "think", "think_answer"}
    assert all("\\boxed{" in prompt for prompt in RESPONSE_FORMATS.values())
