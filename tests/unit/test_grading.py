r"""The grader against answers that people and models really write, near misses, and attacks.

A row of a table is (what stands in the box, the gold, the reason that must decide). Source: the grading policy.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from adora_vl.rewards import Grade, canonical_gold, grade, verify_gold
from adora_vl.rewards.boxed import last_boxed
from adora_vl.rewards.numbers import evaluate

RAW_GOLDS = [  # as Geometry3K spells them
    "30",
    "13.5",
    "-4",
    r"5 \sqrt { 2 }",
    r"2 \sqrt { 221 }",
    r"\frac { 39 } { 4 }",
    r"100 \pi",
    r"6 + 3 \sqrt { 2 }",
    r"\frac { 8 } { 3 \sqrt { 3 } }",
    r"\frac { 1 } { 2 } \sqrt { 3 }",
    r"4 \sqrt [ 3 ] { 2 }",
    r"12 \pi - 9",
    r"\sqrt { 3 } / 2",
    "1,000",
    r"12 \text{ cm}^2",
    r"30^\circ",
    "x = 5",
    "rhombus",
    "3 : 4",
    "x + 3",
]

CORRECT = [
    # the number itself, in the decorations of policy point 2
    ("30", "30", "same_number"),
    (" 30 ", "30", "same_number"),
    ("$30$", "30", "same_number"),
    ("$$30$$", "30", "same_number"),
    ("30.", "30", "same_number"),
    ("$30.$", "30", "same_number"),
    ("$30$.", "30", "same_number"),
    ("30.0", "30", "same_number"),
    ("+30", "30", "same_number"),
    ("(30)", "30", "same_number"),
    ("{30}", "30", "same_number"),
    (r"\text{30}", "30", "same_number"),
    (r"\mathrm{30}", "30", "same_number"),
    (r"\displaystyle 30", "30", "same_number"),
    (r"\left(30\right)", "30", "same_number"),
    (r"\;30\,", "30", "same_number"),
    ("\u221230", "-30", "same_number"),
    ("- 30", "-30", "same_number"),
    # degrees
    (r"30^\circ", "30", "same_number"),
    (r"30^{\circ}", "30", "same_number"),
    (r"30 ^ { \circ }", "30", "same_number"),
    ("30°", "30", "same_number"),
    ("30 degrees", "30", "same_number"),
    (r"30\text{ degrees}", "30", "same_number"),
    (r"30\text{°}", "30", "same_number"),
    # units
    ("12 cm", "12", "same_number"),
    ("12cm", "12", "same_number"),
    (r"12 \text{ cm}", "12", "same_number"),
    (r"12~\mathrm{cm}^2", "12", "same_number"),
    (r"12\text{ cm}^{2}", "12", "same_number"),
    (r"12 \text{ cm}^3", "12", "same_number"),
    ("12 m²", "12", "same_number"),
    ("12 mm", "12", "same_number"),
    ("12 km", "12", "same_number"),
    ("12 in.", "12", "same_number"),
    ("12 inches", "12", "same_number"),
    ("12 ft", "12", "same_number"),
    ("12 feet", "12", "same_number"),
    ("12 units", "12", "same_number"),
    (r"12\text{ units}^2", "12", "same_number"),
    ("12 square units", "12", "same_number"),
    ("12 sq. ft", "12", "same_number"),
    ("12 sq ft.", "12", "same_number"),
    (r"$12$ cm", "12", "same_number"),
    (r"100\pi\text{ m}^2", r"100 \pi", "same_number"),
    (r"5\sqrt{3}\text{ in}", r"5 \sqrt { 3 }", "same_number"),
    # a leading name
    ("x = 5", "5", "same_number"),
    ("x=5", "5", "same_number"),
    ("x_1 = 5", "5", "same_number"),
    ("AB = 7", "7", "same_number"),
    ("A B = 7", "7", "same_number"),
    (r"m\angle A = 30^\circ", "30", "same_number"),
    (r"m \angle ABC = 30^{\circ}", "30", "same_number"),
    (r"\angle 1 = 30", "30", "same_number"),
    (r"\overline{AB} = 7", "7", "same_number"),
    (r"m\widehat{AB} = 40", "40", "same_number"),
    (r"\theta = 45^\circ", "45", "same_number"),
    (r"\text{Area} = 12 \text{ cm}^2", "12", "same_number"),
    ("x = $5$", "5", "same_number"),
    # thousands
    ("1,000", "1000", "same_number"),
    ("1{,}000", "1000", "same_number"),
    (r"1,\!000", "1000", "same_number"),
    (r"1\,000", "1000", "same_number"),
    ("1000", "1,000", "same_number"),
    ("1,234,567.5", "1234567.5", "same_number"),
    # fractions
    (r"\frac{10}{2}", "5", "same_number"),
    ("10/2", "5", "same_number"),
    (r"\frac{39}{4}", r"\frac { 39 } { 4 }", "same_number"),
    (r"\dfrac{39}{4}", r"\frac { 39 } { 4 }", "same_number"),
    (r"\tfrac{39}{4}", r"\frac { 39 } { 4 }", "same_number"),
    ("9.75", r"\frac { 39 } { 4 }", "same_number"),
    (r"9\frac{3}{4}", r"\frac { 39 } { 4 }", "same_number"),
    (r"-9\frac34", r"-\frac { 39 } { 4 }", "same_number"),
    (r"\frac12", "0.5", "same_number"),
    (r"\frac 1 2", "0.5", "same_number"),
    (r"\frac1{2}", "0.5", "same_number"),
    (r"\frac{1}2", "0.5", "same_number"),
    (".5", "0.5", "same_number"),
    ("0.3333333", r"\frac{1}{3}", "same_number"),
    (r"3+\frac{1}{2}", "3.5", "same_number"),
    # radicals
    (r"2\sqrt{221}", r"2 \sqrt { 221 }", "same_number"),
    ("2√221", r"2 \sqrt { 221 }", "same_number"),
    (r"2 \cdot \sqrt{221}", r"2 \sqrt { 221 }", "same_number"),
    (r"2 \times \sqrt{221}", r"2 \sqrt { 221 }", "same_number"),
    ("2*sqrt(221)", r"2 \sqrt { 221 }", "same_number"),
    (r"\sqrt{884}", r"2 \sqrt { 221 }", "same_number"),
    (r"5\sqrt{3}", r"\sqrt{75}", "same_number"),
    (r"5\sqrt3", r"5 \sqrt { 3 }", "same_number"),
    (r"5 \sqrt 3", r"5 \sqrt { 3 }", "same_number"),
    ("5√3", r"5 \sqrt { 3 }", "same_number"),
    (r"5\cdot3^{1/2}", r"5 \sqrt { 3 }", "same_number"),
    (r"\frac{15}{\sqrt{3}}", r"5 \sqrt { 3 }", "same_number"),
    (r"\frac{5\sqrt{3}}{2}", r"\frac { 5 } { 2 } \sqrt { 3 }", "same_number"),
    (r"\frac{\sqrt3}{2}", r"\sqrt { 3 } / 2", "same_number"),
    (r"2.5\sqrt{3}", r"\frac { 5 \sqrt { 3 } } { 2 }", "same_number"),
    (r"3\sqrt{2}+6", r"6 + 3 \sqrt { 2 }", "same_number"),
    (r"3(2+\sqrt{2})", r"6 + 3 \sqrt { 2 }", "same_number"),
    (r"\sqrt{16}", "4", "same_number"),
    (r"\sqrt{36+64}", "10", "same_number"),
    (r"2 \cdot 5\sqrt{3}", r"10 \sqrt { 3 }", "same_number"),
    (r"\sqrt[3]{16}", r"2 \sqrt [ 3 ] { 2 }", "same_number"),
    (r"\sqrt[3]{-8}", "-2", "same_number"),
    ("8.660254", r"5 \sqrt { 3 }", "same_number"),
    # pi
    ("100π", r"100 \pi", "same_number"),
    (r"\pi \cdot 100", r"100 \pi", "same_number"),
    ("100pi", r"100 \pi", "same_number"),
    (r"\frac{\pi}{2}", r"0.5 \pi", "same_number"),
    (r"\frac\pi2", r"0.5 \pi", "same_number"),
    (r"-9+12\pi", r"12 \pi - 9", "same_number"),
    ("314.159265", r"100 \pi", "same_number"),
    # powers and trigonometry
    ("2^{10}", "1024", "same_number"),
    ("2^3", "8", "same_number"),
    ("2^{-1}", "0.5", "same_number"),
    ("-2^2", "-4", "same_number"),
    (r"\sin 30^\circ", "0.5", "same_number"),
    (r"\cos(60)", "0.5", "same_number"),
    (r"10\tan 45^{\circ}", "10", "same_number"),
    (r"\frac{8}{\sin 30}", "16", "same_number"),
    # texts: only the same text
    ("rhombus", "rhombus", "same_text"),
    (r"\text{rhombus}", "rhombus", "same_text"),
    ("3:4", "3 : 4", "same_text"),
    ("x+3", "x + 3", "same_text"),
    (r"12\%", r"12 \%", "same_text"),
    ("180 - 40", "180-40", "same_number"),
    ("140", "180-40", "same_number"),
]

WRONG = [
    # near misses
    ("31", "30", "different_number"),
    ("-30", "30", "different_number"),
    ("300", "30", "different_number"),
    ("30.1", "30", "different_number"),
    ("1000001", "1000000", "different_number"),
    ("8.660", r"5 \sqrt { 3 }", "different_number"),
    ("8.66", r"5 \sqrt { 3 }", "different_number"),
    ("221", r"2 \sqrt { 221 }", "different_number"),
    ("4", r"\frac { 39 } { 4 }", "different_number"),
    ("100", r"100 \pi", "different_number"),
    ("314", r"100 \pi", "different_number"),
    (r"5\sqrt{2}", r"5 \sqrt { 3 }", "different_number"),
    (r"\sqrt{15}", r"5 \sqrt { 3 }", "different_number"),
    (r"2\frac{1}{2}", "1", "different_number"),
    ("0.333", r"\frac{1}{3}", "different_number"),
    ("12^2", "12", "different_number"),
    ("0", "0.001", "different_number"),
    # never right: enumerations
    ("12, 13", "12", "enumeration"),
    ("12, 13", "13", "enumeration"),
    ("12,13", "1213", "enumeration"),
    ("12, 130", "12130", "enumeration"),
    ("12 13", "1213", "enumeration"),
    ("12 or 13", "12", "enumeration"),
    (r"12 \text{ or } 13", "12", "enumeration"),
    ("12 and 13", "13", "enumeration"),
    (r"\{12,13\}", "12", "enumeration"),
    (r"\{12\}", "12", "enumeration"),
    (r"\left\{12,13\right\}", "12", "enumeration"),
    (r"12 \pm 1", "12", "enumeration"),
    ("12 ± 1", "12", "enumeration"),
    (r"\pm 12", "12", "enumeration"),
    ("12; 13", "12", "enumeration"),
    (r"12 \\ 13", "13", "enumeration"),
    ("1, 2, ..., 20", "12", "enumeration"),
    (r"10, 11, \ldots, 20", "12", "enumeration"),
    ("x = 5 or x = 6", "5", "enumeration"),
    ("12 apples and 3 pears", "12", "enumeration"),
    # intervals, inequalities, percentages, equations
    ("[12,12]", "12", "interval"),
    ("(12,13)", "12", "interval"),
    ("[12, 13)", "12", "interval"),
    ("(1,234)", "1234", "interval"),
    (r"\left( 1,234 \right)", "1234", "interval"),
    ("[12]", "12", "interval"),
    ("x > 12", "12", "relation"),
    (r"x \geq 12", "12", "relation"),
    (r"\le 12", "12", "relation"),
    (r"\approx 12", "12", "relation"),
    (r"x \approx 8.660254", r"5 \sqrt { 3 }", "relation"),
    (r"x \in \{12\}", "12", "relation"),
    (r"12\%", "12", "percentage"),
    (r"1200\%", "12", "percentage"),
    ("12%", "12", "percentage"),
    ("12 percent", "12", "percentage"),
    ("12", r"12 \%", "different_text"),
    ("2x = 10", "5", "equation"),
    ("x + 1 = 6", "5", "equation"),
    ("x^2 = 25", "5", "equation"),
    ("5 = x", "5", "equation"),
    ("x = y = 5", "5", "equation"),
    ("x = 10 - 5 = 5", "5", "equation"),
    # never right: arithmetic still to be done
    ("180-40", "140", "unevaluated"),
    ("x = 180 - 40", "140", "unevaluated"),
    (r"7 \times 5", "35", "unevaluated"),
    ("7(5)", "35", "unevaluated"),
    ("6^2 + 8^2", "100", "unevaluated"),
    ("(180-40)/2", "70", "unevaluated"),
    (r"\frac{180-40}{2}", "70", "unevaluated"),
    ("0.5 + 0.5", "1", "unevaluated"),
    ("+".join(["1"] * 12), "12", "unevaluated"),
    # never right: nothing, or more than the gold
    ("", "5", "empty_box"),
    ("   ", "5", "empty_box"),
    ("$$", "5", "empty_box"),
    (r"\text{}", "5", "empty_box"),
    ("{}", "5", "empty_box"),
    ("x =", "5", "empty_box"),
    (".", "5", "empty_box"),
    ("12 apples", "12", "not_a_number"),
    ("about 12", "12", "not_a_number"),
    ("12x", "12", "not_a_number"),
    ("12 cm per second", "12", "not_a_number"),
    ("the answer is 12", "12", "not_a_number"),
    (r"30^\circ\text{C}", "30", "not_a_number"),
    ("NaN", "5", "not_finite"),
    ("Infinity", "5", "not_finite"),
    ("-inf", "5", "not_finite"),
    (r"\infty", "5", "not_finite"),
    ("square", "rhombus", "not_a_number"),
    ("C", "12", "letter_without_choice"),
]

UNPARSEABLE = [
    ("9^{9^{9^{9}}}", "9", "too_large"),
    ("2^{10^{10}}", "1024", "too_large"),
    ("2^{100}", "1", "too_large"),
    ("12345678!", "12345678", "not_read"),
    (r"\frac{1}{0}", "0", "undefined"),
    ("1/0", "0", "undefined"),
    (r"\sqrt{-4}", "2", "undefined"),
    (r"\tan 90", "1", "undefined"),
    ("0^0", "1", "undefined"),
    ("0^{-1}", "0", "undefined"),
    ("1" * 41, "1", "too_large"),
    ("9" * 100_000, "9", "too_long"),
    (f"{'+'.join(['1'] * 10_000)}", "10000", "too_long"),
    ("5" + " + 0" * 400, "5", "too_long"),
    ("(" * 200 + "5" + ")" * 200, "5", "too_large"),
    ("{" * 20 + "5" + "}" * 20, "5", "too_large"),
    (r"\sqrt{" * 60 + "1" + "}" * 60, "1", "too_large"),
    ("1\x002", "12", "hidden_characters"),
    ("5\x00", "5", "hidden_characters"),
    ("\u202e21\u202c", "12", "hidden_characters"),
    ("1\u200b2", "12", "hidden_characters"),
    ("5\u200d", "5", "hidden_characters"),
    ("\ufeff5", "5", "hidden_characters"),
    ("\ud8005", "5", "hidden_characters"),
    (r"\input{/etc/passwd}", "5", "not_read"),
    ("__import__('os')", "5", "not_read"),
    (r"\write18{rm -rf /}", "5", "not_read"),
    (r"\def\x{\x\x}\x", "5", "not_read"),
    ("\uff15", "5", "not_read"),  # a full-width 5
    ("\u0665", "5", "not_read"),  # an Arabic 5
    ("((5", "5", "not_read"),
    ("5+", "5", "not_read"),
    ("1.2.3", "1.23", "not_read"),
    # spellings that can be meant in two ways are not guessed at
    ("1{2}", "12", "not_read"),
    (r"\sqrt12", r"2\sqrt{3}", "not_read"),
    (r"\frac123", r"\frac{3}{2}", "not_read"),
    ("2^34", "32", "not_read"),
    (r"1/2\pi", r"\frac{1}{2}\pi", "not_read"),
    (r"3\frac{5}{2}", "7.5", "not_read"),
    (r"\sqrt{3}2", r"2\sqrt{3}", "not_read"),
    (r"\sin 30 \pi", r"0.5\pi", "not_read"),
    (r"12^\circ^2", "144", "not_read"),
    (r"1 \boxed{5}", "5", "not_read"),
]


def boxed(answer: str) -> str:
    return rf"So the answer is \boxed{{{answer}}}."


@pytest.mark.parametrize(("answer", "gold", "reason"), CORRECT)
def test_another_spelling_of_the_gold_is_correct(answer: str, gold: str, reason: str) -> None:
    found = grade(boxed(answer), gold)
    assert (found.verdict, found.reason) == ("correct", reason)


@pytest.mark.parametrize(("answer", "gold", "reason"), WRONG)
def test_a_readable_answer_that_is_not_the_gold_is_wrong(answer: str, gold: str, reason: str) -> None:
    found = grade(boxed(answer), gold, rounding=False)
    assert (found.verdict, found.reason) == ("wrong", reason)


@pytest.mark.parametrize(("answer", "gold", "reason"), UNPARSEABLE, ids=[row[0][:24] + row[2] for row in UNPARSEABLE])
def test_a_box_that_cannot_be_read_is_unparseable(answer: str, gold: str, reason: str) -> None:
    found = grade(boxed(answer), gold)
    assert (found.verdict, found.reason) == ("unparseable", reason)
    assert found.extracted is not None  # there is a box, which the reward presets count


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{4}, no: \boxed{5}", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{5 \boxed{6}", "6"),
        (r"\boxed{\boxed{ 5 }}", "5"),
        (r"\boxed{1 \boxed{5}}", r"1 \boxed{5}"),
        (r"\boxed{\boxed{1}\boxed{5}}", r"\boxed{1}\boxed{5}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"a } stray { brace, \boxed{5}", "5"),
        (r"x &= 5 \\ \boxed{5} \\\boxed{6}", "6"),
        ("\\\\boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        (r"\boxedx{5}", None),
        (r"boxed{5}", None),
        (r"\boxed{5\}", None),
        (r"\boxed{5}" + " " * 2_000_000, None),  # only the end of so long a response is looked at
        ("The answer is 5.", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(response: str, content: str | None) -> None:
    assert last_boxed(response) == content


def test_no_complete_box_is_unparseable_and_extracts_nothing() -> None:
    assert grade(r"The answer is 5, \boxed{5", "5") == Grade("unparseable", None, "no_box")


def test_of_several_boxes_only_the_last_counts() -> None:
    assert grade(r"\boxed{12} \boxed{13}", "12").verdict == "wrong"
    assert grade(r"\boxed{12} \boxed{13}", "13").verdict == "correct"


CHOICES = ["5", r"5 \sqrt { 2 }", r"5 \sqrt { 3 }", "10"]


@pytest.mark.parametrize(
    ("answer", "gold", "verdict", "reason"),
    [
        ("C", "C", "correct", "letter"),
        ("(C)", "C", "correct", "letter"),
        ("C.", "C", "correct", "letter"),
        (r"\text{C}", "C", "correct", "letter"),
        (r"\text{(C)}", "C", "correct", "letter"),
        (r"\mathrm{C}", "C", "correct", "letter"),
        (r"5\sqrt{3}", "C", "correct", "same_number"),
        (r"\sqrt{75}", "C", "correct", "same_number"),
        ("B", "C", "wrong", "different_letter"),
        ("E", "C", "wrong", "different_letter"),
        ("c", "C", "wrong", "not_a_number"),
        ("CC", "C", "wrong", "not_a_number"),
        ("B or C", "C", "wrong", "enumeration"),
        ("B, C", "C", "wrong", "enumeration"),
        ("10", "C", "wrong", "different_number"),
        ("8.66", "C", "wrong", "different_number"),
        ("C", r"5 \sqrt { 3 }", "correct", "letter"),
        ("(C)", r"\sqrt{75}", "correct", "letter"),
        ("D", r"5 \sqrt { 3 }", "wrong", "different_letter"),
        ("E", r"5 \sqrt { 3 }", "wrong", "letter_without_choice"),
        (r"5\sqrt{3}", r"5 \sqrt { 3 }", "correct", "same_number"),
    ],
)
def test_multiple_choice(answer: str, gold: str, verdict: str, reason: str) -> None:
    found = grade(boxed(answer), gold, choices=CHOICES)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_a_letter_counts_for_a_value_only_when_the_choices_are_known() -> None:
    assert grade(r"\boxed{C}", r"5\sqrt{3}", choices=CHOICES).verdict == "correct"
    assert grade(r"\boxed{C}", r"5\sqrt{3}").verdict == "wrong"
    assert grade(r"\boxed{C}", "C").verdict == "correct"
    assert grade(rf"\boxed{{{CHOICES[2]}}}", "C").verdict == "wrong"


@pytest.mark.parametrize(
    ("answer", "gold", "accepted"),
    [
        ("8.660", r"5\sqrt{3}", True),
        ("8.66", r"5\sqrt{3}", True),
        ("8.7", r"5\sqrt{3}", True),
        ("8.7 cm", r"5\sqrt{3}", True),
        ("-8.7", r"-5\sqrt{3}", True),
        ("9", r"5\sqrt{3}", False),
        ("9.0", r"5\sqrt{3}", False),
        ("8.67", r"5\sqrt{3}", False),
        ("8.6", r"5\sqrt{3}", False),
        ("-8.7", r"5\sqrt{3}", False),
        ("0.13", r"\frac{1}{8}", True),
        ("0.12", r"\frac{1}{8}", False),
        ("314.2", r"100\pi", True),
        (r"\frac{87}{10}", r"5\sqrt{3}", False),
    ],
)
def test_rounding_accepts_the_rounded_gold_and_nothing_else(answer: str, gold: str, accepted: bool) -> None:
    assert (grade(boxed(answer), gold, rounding=True).reason == "rounded") is accepted
    assert grade(boxed(answer), gold).verdict == "wrong"


@pytest.mark.parametrize("gold", RAW_GOLDS)
def test_golds_verify_and_their_canonical_form_is_stable(gold: str) -> None:
    stored = canonical_gold(gold)
    assert verify_gold(gold) is None
    assert verify_gold(stored) is None
    assert canonical_gold(stored) == stored
    assert grade(boxed(gold), stored).verdict == "correct"


@pytest.mark.parametrize(
    ("gold", "stored"),
    [
        (r"2 \sqrt { 221 }", r"2\sqrt{221}"),
        (r"\dfrac { 1 } { 2 }", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        ("√3", r"\sqrt{3}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("5 π", r"5\pi"),
        ("\u22125", "-5"),
        ("1,000", "1000"),
        (r"m\angle A = 30^\circ", "30"),
        (r"\text{12 cm}^2", "12"),
        ("12, 130", "12, 130"),
        ("isosceles  right triangle", "isosceles right triangle"),
    ],
)
def test_the_canonical_form_of_a_gold(gold: str, stored: str) -> None:
    assert canonical_gold(gold) == stored


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("", "empty_box"),
        ("12, 13", "enumeration"),
        ("12 or 13", "enumeration"),
        (r"12 \pm 1", "enumeration"),
        ("x > 5", "relation"),
        ("2x = 10", "equation"),
        ("(1, 2)", "interval"),
        ("nan", "not_finite"),
        (r"\frac{1}{0}", "undefined"),
        ("9^{9^9}", "too_large"),
        ("7" * 600, "too_long"),
        ("1\u200b2", "hidden_characters"),
        ("{5", "no_box"),
    ],
)
def test_a_gold_that_cannot_be_graded_against_is_reported(gold: str, reason: str) -> None:
    assert verify_gold(gold) == reason
    assert grade(boxed("5"), gold).verdict != "correct"


def test_a_letter_gold_needs_its_choice() -> None:
    assert verify_gold("C", CHOICES) is None
    assert verify_gold("E", CHOICES) == "letter_without_choice"
    assert verify_gold("C", ["rhombus", "square", "12, 13"]) is None


@pytest.mark.parametrize(
    "text", ["", "x", "x+3", "12, 13", "[1,2]", "12%", "x=5", "5 cm", r"\alpha", "1e3", "--5", r"\sqrt[1]{2}", "5)"]
)
def test_the_evaluator_returns_none_for_what_it_does_not_read(text: str) -> None:
    assert evaluate(text) is None


ATTACKS = {
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
    "sums of unlike fractions": r"\boxed{" + "+".join(rf"\frac{{1}}{{{n}}}" for n in range(1, 40)) + "}",
    "roots of roots": r"\boxed{" + r"\sqrt{" * 15 + "2" + "}" * 15 + "}",
    "nested text": r"\boxed{" + r"\text{" * 60 + "4" + "}" * 60 + "}",
    "spaces at the cap": r"\boxed{1" + " ." * 240 + "}",
    "letters at the cap": r"\boxed{" + "A " * 240 + "}",
    "dollar signs at the cap": r"\boxed{" + "$" * 490 + "}",
    "commas at the cap": r"\boxed{" + "1,000" * 95 + "}",
    "minus signs at the cap": r"\boxed{" + "-" * 490 + "}",
    "brackets at the cap": r"\boxed{" + "(" * 245 + ")" * 245 + "}",
    **{f"box of {row[0][:20]!r}": boxed(row[0]) for row in UNPARSEABLE},
}


def within(seconds: float, work: Callable[[], list[Grade]]) -> list[Grade]:
    """The result of `work`, run off the main thread (where signals cannot interrupt it), or a failure when it hangs."""
    done: queue.Queue[list[Grade]] = queue.Queue()
    threading.Thread(target=lambda: done.put(work()), daemon=True).start()
    try:
        return done.get(timeout=seconds)
    except queue.Empty:
        pytest.fail(f"the grader did not come back within {seconds} s")


def test_no_attack_hangs_is_correct_or_fills_the_log() -> None:
    grades = within(10, lambda: [grade(text, "12") for text in ATTACKS.values()])
    assert [name for name, one in zip(ATTACKS, grades, strict=True) if one.verdict == "correct"] == []
    assert all(len(one.extracted or "") <= 201 for one in grades)


def test_hostile_golds_and_choices_do_not_hang_either() -> None:
    attacks = [text.removeprefix(r"\boxed{").removesuffix("}") for text in ATTACKS.values()]
    grades = within(10, lambda: [grade(r"\boxed{5}", text, choices=[text]) for text in attacks])
    grades += within(10, lambda: [grade(r"\boxed{A}", "5", choices=[text]) for text in attacks])
    assert {one.verdict for one in grades} <= {"correct", "wrong"}


def test_deep_boxes_that_hold_the_gold_still_count() -> None:
    assert grade(r"\boxed{" * 10_000 + "5" + "}" * 10_000, "5").verdict == "correct"


def test_the_package_needs_nothing_heavy() -> None:
    heavy = "{'torch', 'sympy', 'math_verify', 'mpmath', 'numpy', 'trl'}"
    code = f"import sys, adora_vl.rewards; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
