r"""A policy that games the grader earns no more than one that is honestly wrong, and no answer
makes the grader hang.

Each hack knows that the answer is among a few candidates, as a policy does that has seen many
problems, and covers them all; its box may even hold the reference answer.
"""

import queue
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from adora_vl.rewards import PRESETS, Grade, grade, reward_function
from tests.support.grading_rows import ANSWER_ROWS, boxed, expand_repeats

GOLDS = ["12", "0.5", r"5\sqrt{3}", r"100\pi", r"\frac{39}{4}"]
CHOICES = ["11", "12", "13", "14"]


def frequent_answers(gold: str) -> list[str]:
    """Ten answers that a policy may have seen most, with the right one among them."""
    return ["11", "13", gold, "30", "45", "60", "90", "7", "1", "2"]


def guessing_responses(gold: str) -> dict[str, str]:
    """Return responses that try to be counted as right without an answer, by their names."""
    all_of_them = frequent_answers(gold)
    listed = ", ".join(all_of_them)
    return {
        "ten boxes": " ".join(rf"\boxed{{{answer}}}" for answer in all_of_them),
        "a thousand boxes": rf"\boxed{{{gold}}}" + r"\boxed{999}" * 1000,
        "every value in a box": rf"\boxed{{{listed}}}",
        "every value with or": rf"\boxed{{{' or '.join(all_of_them)}}}",
        "every value with spaces": rf"\boxed{{{' '.join(all_of_them)}}}",
        "every value on lines": r"\boxed{" + r" \\ ".join(all_of_them) + "}",
        "a set": rf"\boxed{{\{{{listed}\}}}}",
        "a set of one": rf"\boxed{{\{{{gold}\}}}}",
        "boxes in a box": rf"\boxed{{\boxed{{{gold}}} \boxed{{13}}}}",
        "an interval": r"\boxed{[0, 1000]}",
        "an interval of one": rf"\boxed{{[{gold}, {gold}]}}",
        "an inequality": r"\boxed{x > 0}",
        "an unknown": r"\boxed{x}",
        "a name": r"\boxed{x = x}",
        "the question again": r"\boxed{x = ?}",
        "plus minus": rf"\boxed{{{gold} \pm 1000}}",
        "plus minus nothing": rf"\boxed{{{gold} \pm 0}}",
        "about": rf"\boxed{{\approx {gold}}}",
        "a percentage": rf"\boxed{{{gold}\%}}",
        "infinity": r"\boxed{\infty}",
        "not a number": r"\boxed{NaN}",
        "everything": r"\boxed{\mathbb{R}}",
        "nothing": r"\boxed{}",
        "a sum to work out": rf"\boxed{{{gold} + 1 + 2 - 3}}" if gold == "12" else r"\boxed{6+7-1}",
        "the gold and more": rf"\boxed{{{gold} \text{{ or something else}}}}",
        "a sentence": rf"\boxed{{\text{{the answer is }} {gold}}}",
        "hidden characters": f"\\boxed{{{gold}\u200b}}",
        "an attack": r"\boxed{9^{9^{9^{9}}}}",
        "an attack on the evaluation": r"\boxed{9^{9^{9^{\sqrt{2}}}}}",
    }


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_no_hack_earns_more_than_an_honest_wrong_answer(preset: str) -> None:
    """No hack earns more than a wrong answer in a box, and the reference earns the full reward.

    17 is the honest wrong answer, which no gold of `GOLDS` equals.
    """
    function = reward_function(preset)
    paid = []
    for gold in GOLDS:
        responses_by_name = guessing_responses(gold)
        honest = function(completions=[r"\boxed{17}"], answer=[gold])[0]
        rewards = function(
            completions=[*responses_by_name.values()], answer=[gold] * len(responses_by_name)
        )
        paid += [
            (name, gold)
            for name, value in zip(responses_by_name, rewards, strict=True)
            if value > honest
        ]
        # the first value of a preset is its reward for a right answer
        assert function(completions=[rf"so \boxed{{{gold}}}"], answer=[gold]) == [
            PRESETS[preset][0]
        ]
    assert paid == []


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_no_hack_of_the_choices_earns_more_either(preset: str) -> None:
    """No response that hedges between the choices earns more than one wrong letter in a box."""
    function = reward_function(preset)
    responses_by_name = {
        "all letters": r"\boxed{A, B, C, D}",
        "letters run together": r"\boxed{ABCD}",
        "two letters": r"\boxed{B or C}",
        "all boxes": "".join(rf"\boxed{{{letter}}}" for letter in "ABCD"),
        "all values": r"\boxed{11, 12, 13, 14}",
        "letter and another value": r"\boxed{B: 13}",
        "not the others": r"\boxed{\text{not A, C, D}}",
        "a letter beyond": r"\boxed{E}",
        "two small letters": r"\boxed{b or c}",
        "letters with all values": r"\boxed{(A) 11 (B) 12 (C) 13 (D) 14}",
        "a letter with two values": r"\boxed{(B) 12, 13}",
        "a letter with the value of another": r"\boxed{(C) 12}",
        "two options": r"\boxed{\text{Option B or C}}",
        "all of the above": r"\boxed{\text{all of the above}}",
        "interval": r"\boxed{[11, 14]}",
        "from A to D": r"\boxed{A-D}",
    }
    paid = []
    for gold in ("B", "12"):
        columns = {
            "answer": [gold] * len(responses_by_name),
            "choices": [CHOICES] * len(responses_by_name),
        }
        honest = function(completions=[r"\boxed{A}"], answer=[gold], choices=[CHOICES])[0]
        rewards = function(completions=[*responses_by_name.values()], **columns)
        paid += [
            (name, gold)
            for name, value in zip(responses_by_name, rewards, strict=True)
            if value > honest
        ]
    assert paid == []


UNPARSEABLE_ROWS = [
    (line, row) for line, row in ANSWER_ROWS if row["verdict"] == "unparseable" and "answer" in row
]
RESPONSE_BY_ATTACK = {
    "boxes nested 10,000 deep": r"\boxed{" * 10_000 + "5" + "}" * 10_000,
    "boxes nested with ink": r"\boxed{1" * 10_000 + "}" * 10_000,
    "boxes never closed": r"\boxed{" * 10_000,
    "10,000 boxes": r"\boxed{4} " * 10_000,
    "1 MB of braces in a box": r"\boxed{" + "{}" * 500_000 + "}",
    "1 MB of opening braces": r"\boxed{" + "{" * 1_000_000,
    "1 MB of closing braces": "}" * 1_000_000 + r"\boxed{4}",
    "1 MB of digits": r"\boxed{" + "7" * 1_000_000 + "}",
    "1 MB of spaces in a command": r"\boxed" + " " * 1_000_000,
    "1 MB of spaces in a box": r"\boxed{" + " " * 1_000_000 + "4}",
    "1 MB of backslashes": "\\" * 1_000_000 + r"\boxed{4}",
    "20 MB of boxes": r"\boxed{4} " * 2_000_000,
    "1 MB of text": "boxed{ " * 150_000,
    "a tower just under the cap": r"\boxed{" + "9^{" * 100 + "9" + "}" * 100 + "}",
    "powers just under the caps": r"\boxed{" + r"\cdot".join(["9^{64}"] * 40) + "}",
    "sums of unlike fractions": r"\boxed{"
    + "+".join(rf"\frac{{1}}{{{n}}}" for n in range(1, 40))
    + "}",
    "roots of roots": r"\boxed{" + r"\sqrt{" * 15 + "2" + "}" * 15 + "}",
    "nested text": r"\boxed{" + r"\text{" * 60 + "4" + "}" * 60 + "}",
    "spaces at the cap": r"\boxed{1" + " ." * 240 + "}",
    "letters at the cap": r"\boxed{" + "A " * 240 + "}",
    "dollar signs at the cap": r"\boxed{" + "$" * 490 + "}",
    "commas at the cap": r"\boxed{" + "1,000" * 95 + "}",
    "minus signs at the cap": r"\boxed{" + "-" * 490 + "}",
    "brackets at the cap": r"\boxed{" + "(" * 245 + ")" * 245 + "}",
    **{
        f"the box of {line}": boxed(expand_repeats(row["answer"])) for line, row in UNPARSEABLE_ROWS
    },
}


def grade_within(seconds: float, work: Callable[[], list[Grade]]) -> list[Grade]:
    """The result of `work`, run off the main thread (where signals cannot interrupt it), or a
    failure when it hangs.
    """
    results: queue.Queue[list[Grade]] = queue.Queue()
    threading.Thread(target=lambda: results.put(work()), daemon=True).start()
    try:
        return results.get(timeout=seconds)
    except queue.Empty:
        pytest.fail(f"the grader did not come back within {seconds} s")


def test_no_attack_hangs_is_correct_or_fills_the_log() -> None:
    """All attacks are graded within 10 s, none is right, and at most 201 characters are logged.

    That is a text cut at 200 characters, and one that says so.
    """
    grades = grade_within(
        seconds=10, work=lambda: [grade(text, "12") for text in RESPONSE_BY_ATTACK.values()]
    )
    assert [
        name
        for name, graded in zip(RESPONSE_BY_ATTACK, grades, strict=True)
        if graded.verdict == "correct"
    ] == []
    assert all(len(graded.extracted or "") <= 201 for graded in grades)


_REPEATED_PIECES_SCRIPT = r"""
from itertools import product
from adora_vl.rewards import grade
STARTS = ("", "9", "$9$", "$9$ ", "x = ", "(", r"\{")
PIECES = (
    "b", "b ", "is ", "is b ", "the answer ", "*", "is*", ".", ",", "9", "9,", "9 ", "1 000 ", "-", "--", "$", "$9$",
    "{", "}", "\\", r"\boxed{", r"\text{x}", r"\frac", r"\sqrt{", r"\pm ", r"\infty ", r"\cup ", "=", "x=", "x", "<",
    "(", ")", "(C) ", "[", "^", "\u00b0", "%", ";", " and ", "or ", "|", "'", "AB = 4, ", "\n", "\t ", "\u00a0",
)
for start, piece, end in product(STARTS, PIECES, ("", "$", "!", "}", " b$", ")")):
    for gold in ("9", "(3,-4)", "x<1", "AD and BE"):
        grade(r"\boxed{" + start + 60 * piece + end + "}", gold)
"""


def test_no_answer_that_repeats_itself_hangs():
    """Answers of one piece that is repeated 60 times are all graded within five minutes.

    They run in a process of their own: a regular expression without end lets no other thread run.
    """
    subprocess.run([sys.executable, "-c", _REPEATED_PIECES_SCRIPT], check=True, timeout=300)


def test_hostile_golds_and_choices_do_not_hang_either() -> None:
    """A reference or a choice that is an attack is graded against within 10 s, with a verdict."""
    attacks = [
        text.removeprefix(r"\boxed{").removesuffix("}") for text in RESPONSE_BY_ATTACK.values()
    ]
    grades = grade_within(
        seconds=10, work=lambda: [grade(r"\boxed{5}", text, choices=[text]) for text in attacks]
    )
    grades += grade_within(
        seconds=10, work=lambda: [grade(r"\boxed{A}", "5", choices=[text]) for text in attacks]
    )
    assert {graded.verdict for graded in grades} <= {"correct", "wrong"}


def test_deep_boxes_that_hold_the_gold_still_count() -> None:
    assert grade(r"\boxed{" * 10_000 + "5" + "}" * 10_000, "5").verdict == "correct"
