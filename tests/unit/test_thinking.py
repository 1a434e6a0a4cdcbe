"""The rewards for answers that think first."""

from __future__ import annotations

import pytest

from adora_vl.prepare import prepare
from adora_vl.prompts import RESPONSE_FORMATS, SYSTEM_PROMPT, asks_for_answer_tags
from adora_vl.rewards import grade, grade_batch, reward_functions
from adora_vl.rewards.boxed import last_boxed
from adora_vl.rewards.explain import main as explain
from tests.grading_corpus import cases
from tests.tiny_run import arguments

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


TAGGED = [  # the response; against 12 where the prompt asks for <answer>; where it does not
    ("<think>3 * 4</think><answer>12</answer>", "correct", "unparseable"),
    ("<answer>\n $12$ cm. \n</answer>", "correct", "unparseable"),
    ("<answer>\\frac{24}{2}</answer> Done.", "correct", "unparseable"),
    ("<answer>\\boxed{12}</answer>", "correct", "correct"),
    ("<answer>It is \\boxed{12}.</answer>", "correct", "correct"),  # a box in the block is what it gives
    ("\\boxed{12}", "correct", "correct"),  # no block: the box counts as ever
    ("<think>\\boxed{13}? no</think><answer>12</answer>", "correct", "wrong"),
    ("<think>\\boxed{12}</think><answer>13</answer>", "wrong", "correct"),
    ("<answer>12</answer>, no: \\boxed{13}", "wrong", "wrong"),  # the last word counts
    ("<answer>13</answer><answer>12</answer>", "correct", "unparseable"),
    ("<answer>12</answer><answer>13</answer>", "wrong", "unparseable"),
    ("<answer>12</answer><answer>13", "correct", "unparseable"),  # a block that was cut off is none
    ("<answer>12</answer></answer>", "correct", "unparseable"),
    ("<answer>12", "unparseable", "unparseable"),
    ("12</answer>", "unparseable", "unparseable"),
    ("</answer><answer>12", "unparseable", "unparseable"),
    ("12", "unparseable", "unparseable"),
    ("<answer></answer>", "wrong", "unparseable"),
    ("<answer>12, 13</answer>", "wrong", "unparseable"),
    ("<answer>12 or 13</answer>", "wrong", "unparseable"),
    ("<answer>12 apples and 3 pears</answer>", "wrong", "unparseable"),
    ("<answer>12</answer>" * 100_000, "correct", "unparseable"),
    ("<answer>" * 100_000, "unparseable", "unparseable"),
]


@pytest.mark.parametrize(("text", "asked", "plain"), TAGGED, ids=range(len(TAGGED)))
def test_an_answer_in_its_tags_counts_where_the_prompt_asks_for_them(text, asked, plain):
    assert grade(text, "12", answer_tags=True).verdict == asked
    assert grade(text, "12").verdict == plain


def test_the_tags_are_graded_as_a_box_is():
    """All of the labelled corpus: in tags each answer has the verdict and the reason that it has in a box."""
    boxes = [(case, last_boxed(case.response)) for case in cases() if case.kind != "attacks" and not case.rounding]
    pairs = [(case, box) for case, box in boxes if box is not None and "\\boxed" not in box]
    assert len(pairs) > 600
    golds, choices = [case.gold for case, _ in pairs], [case.choices for case, _ in pairs]
    plain = [rf"\boxed{{{box}}}" for _, box in pairs]
    boxed = grade_batch(plain, golds, choices=choices, deadline_s=60)  # a busy machine is not the matter here
    tagged = [f"<think>so</think><answer>{box}</answer>" for _, box in pairs]
    assert grade_batch(tagged, golds, choices=choices, answer_tags=True, deadline_s=60) == boxed
    assert {one.reason for one in grade_batch(tagged, golds, choices=choices)} == {"no_box"}


@pytest.mark.parametrize("preset", ["adora", "easyr1", "accuracy", "format"])
def test_the_presets_take_tags_for_a_box_where_they_are_asked_for(preset):
    def scores(answer_tags):
        (function,) = reward_functions([preset], answer_tags=answer_tags)
        texts = ["<answer>12</answer>", "<answer>13</answer>", "12"]
        return function(completions=texts, answer=["12"] * 3)

    assert scores(True) == reward_functions([preset])[0](
        completions=[r"\boxed{12}", r"\boxed{13}", "12"], answer=["12"] * 3
    )
    assert scores(False) == [0.0] * 3


def test_the_prompts_say_whether_the_tags_are_asked_for():
    assert [name for name, prompt in RESPONSE_FORMATS.items() if asks_for_answer_tags(prompt)] == ["think_answer"]
    assert asks_for_answer_tags(None, "{problem} Write <answer>5</answer>.") and not asks_for_answer_tags(None, None)
    assert not asks_for_answer_tags(SYSTEM_PROMPT, "{problem}")


def test_explain_grades_them_too(capsys):
    words = ["--gold", "12", "--response", "<answer>12</answer>"]
    assert explain([*words, "--answer-tags"]) == 0 and "verdict    correct" in capsys.readouterr().out
    assert explain(words) == 0 and "verdict    unparseable" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("form", "expected"), [("think_answer", [1.0]), ("think", [0.0])])
def test_a_run_grades_the_tags_where_its_format_has_them(form, expected, tmp_path):
    words = arguments(tmp_path / "run", adora_response_format=form, adora_reward="accuracy")
    (function,) = prepare(words, to_train=False).rewards.functions
    assert function(completions=["<think>3 * 4</think><answer>12</answer>"], answer=["12"]) == expected
