r"""The rules that compare an answer with a gold. All but one decide at once; that one leaves the decision to sympy.

Source: the grading policy, points 3, 5 and 6.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from adora_vl.rewards.forms import Form, read
from adora_vl.rewards.grammar import Tree, unknowns
from adora_vl.rewards.numbers import Number
from adora_vl.rewards.tolerance import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE

Verdict = Literal["correct", "wrong", "unparseable", "timeout"]
Outcome = tuple[Verdict, str]  # the verdict and the rule that decided

_LETTER = re.compile(r"([A-Z])|\(([A-Z])\)")
_DECIMAL = re.compile(r"[+-]?[0-9]*\.([0-9]+)")


@dataclass(frozen=True)
class Pending:
    """A question to sympy: do two trees have the same value? With the verdict that follows from either answer."""

    answer: Tree
    gold: Tree
    equal: Outcome
    different: Outcome
    undefined: Outcome = ("unparseable", "undefined")


Decision = Outcome | Pending


def decide(answer: Form, gold: Form, choices: Sequence[str], rounding: bool) -> Decision:
    """The verdict and its reason, with the letters of a multiple-choice item resolved."""
    letter, gold_letter = _letter(answer), _letter(gold)
    if letter and gold_letter:
        if choices and _choice(gold_letter, choices) is None:
            return "wrong", "gold_letter_without_choice"
        return ("correct", "letter") if letter == gold_letter else ("wrong", "different_letter")
    if gold_letter and choices:
        value = _choice(gold_letter, choices)
        if value is None:
            return "wrong", "gold_letter_without_choice"
        return _compared(answer, value, rounding=False)  # the policy asks for exactly that choice's value
    if letter:
        value = _choice(letter, choices)
        if value is None:
            return "wrong", "letter_without_choice"
        decision = _compared(value, gold, rounding=False)
        other: Outcome = ("wrong", "different_letter")
        if isinstance(decision, Pending):
            return replace(decision, equal=("correct", "letter"), different=other, undefined=other)
        return ("correct", "letter") if decision[0] == "correct" else other
    return _compared(answer, gold, rounding)


def _compared(answer: Form, gold: Form, rounding: bool) -> Decision:
    """The verdict on two values."""
    if gold.kind in {"unreadable", "never_right"} and not _same_text_only(gold):
        return "wrong", f"gold_{gold.reason}"
    if _same_text_only(answer) and _unspaced(answer.text) == _unspaced(gold.text):
        return "correct", "same_text"
    if answer.kind == "never_right":
        return "wrong", answer.reason
    if (answer.kind == "percentage") != (gold.kind == "percentage") and answer.kind != "unreadable":
        return "wrong", "percentage" if answer.kind == "percentage" else "different_text"
    if answer.number and answer.number.unevaluated and not (gold.number and gold.number.unevaluated):
        return "wrong", "unevaluated"
    if answer.number and gold.number:
        same = _same_number(answer.number, gold.number)
        if same:
            return "correct", "same_number"
        if rounding and _is_rounded(answer.text, gold.number.value):
            return "correct", "rounded"
        if same is False:
            return "wrong", "different_number"
    if answer.tree and gold.tree:
        return _left_to_sympy(answer.tree, gold.tree)
    return ("unparseable" if answer.kind == "unreadable" else "wrong"), answer.reason or "different_text"


def _left_to_sympy(answer: Tree, gold: Tree) -> Decision:
    """The cases for sympy. An expression with unknowns is never a number, nor a function of other unknowns."""
    names, gold_names = unknowns(answer), unknowns(gold)
    if names == gold_names:
        different = "different_expression" if names else "different_number"
        return Pending(answer, gold, ("correct", "same_value"), ("wrong", different))
    return "wrong", "different_expression" if gold_names else "not_a_number"


def _same_text_only(form: Form) -> bool:
    """Whether the form can be equal to the same text though it is no number: `rhombus`, `3x+1`, `12%`, `3:4`."""
    return form.kind in {"text", "expression", "percentage"} or form.reason == "not_read"


def _unspaced(text: str) -> str:
    """`text` without the spaces between letters: `A B` is the side `AB`. Those between digits tell numbers apart."""
    return re.sub(r"(?<=[A-Za-z]) (?=[A-Za-z])", "", text)


def _letter(form: Form) -> str | None:
    """The letter of `C` and `(C)`; a full stop and a text wrapper are gone in the canonical form already."""
    match = _LETTER.fullmatch(form.text)
    return match[1] or match[2] if match else None


def _choice(letter: str, choices: Sequence[str]) -> Form | None:
    """The value of the choice with this letter, None when there are not that many choices."""
    index = ord(letter) - ord("A")
    return read(choices[index]) if index < len(choices) else None


def _same_number(answer: Number, gold: Number) -> bool | None:
    """Equal, or within 1e-6 relative unless both are integers: 1000001 is not 1000000.

    None where the errors of the floats leave it open: in `10^{16}+\\pi-10^{16}` cancellation has left no digit of pi.
    """
    left, right = answer.value, gold.value
    if isinstance(left, Fraction) and isinstance(right, Fraction) and left.denominator == right.denominator == 1:
        return left == right
    expected = float(right)
    margin = max(RELATIVE_TOLERANCE * abs(expected), ABSOLUTE_TOLERANCE) - abs(float(left) - expected)
    if abs(margin) < answer.error + gold.error:
        return None
    return margin >= 0


def _is_rounded(text: str, gold: Fraction | float) -> bool:
    """Whether `text` is a decimal with at least one place that equals the gold rounded half up to that many places."""
    match = _DECIMAL.fullmatch(text)
    if not match:
        return False
    scale = 10 ** len(match[1])
    exact = Fraction(gold)
    rounded = math.floor(abs(exact) * scale + Fraction(1, 2)) * (1 if exact >= 0 else -1)
    return bool(Fraction(text) * scale == rounded)
