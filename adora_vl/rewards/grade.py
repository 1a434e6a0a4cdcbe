r"""One function decides every training reward and the Geometry3K evaluation: `grade`.

Everything is decided here, in process, by code whose cost is bounded by caps on length, nesting, digits and exponents
(`canonical`, `numbers`), so nothing can hang, off the main thread or on it, and the verdict `timeout` never occurs yet.

Not there yet: a pool of killed-and-replaced worker processes with a symbolic algebra system, for closed forms that
`numbers` does not read (an unknown in the gold, nested functions). Until it is, such an answer is right only if its
canonical text equals the gold's. The place for the pool is `_compared`, where it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from adora_vl.rewards.boxed import last_boxed
from adora_vl.rewards.canonical import canonical_gold
from adora_vl.rewards.forms import Form, read

Verdict = Literal["correct", "wrong", "unparseable", "timeout"]

VERDICTS: tuple[Verdict, ...] = ("correct", "wrong", "unparseable", "timeout")
RELATIVE_TOLERANCE = 1e-6  # the grading policy, point 3
_ABSOLUTE_TOLERANCE = 1e-12  # for golds such as 0, where nothing but float noise is relative
_SHOWN_CHARS = 200  # of an extracted answer; a 1 MB box must not go into every log

_LETTER = re.compile(r"([A-Z])|\(([A-Z])\)")
_DECIMAL = re.compile(r"[+-]?[0-9]*\.([0-9]+)")


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    `extracted`: what stands in the last complete box (cut to 200 characters), None when there is no complete box.
    `reason`: the rule that decided, a short stable string such as `same_number`, `enumeration` or `no_box`.
    """

    verdict: Verdict
    extracted: str | None
    reason: str


def grade(
    response: str,
    gold: str,
    *,
    choices: Sequence[str] | None = None,
    rounding: bool = False,
    deadline_s: float = 1.0,
) -> Grade:
    r"""Whether the last complete `\boxed{}` of `response` holds the gold. Never raises, for any two strings.

    `gold`: a number, a closed form, a text, or with `choices` also a letter. `choices`: the values of A, B, C, ...
    `rounding`: also accept a decimal with at least one decimal place that is the gold (a value, not a letter) rounded
    to that many places. `deadline_s`: the most seconds this may take; the caps keep every input far below it, so no
    clock is read. A gold that cannot be used is `wrong` with a reason that starts with `gold_`; `verify_gold` finds
    such golds beforehand. Source: the grading policy.
    """
    boxed = last_boxed(response)
    if boxed is None:
        return Grade("unparseable", None, "no_box")
    verdict, reason = _judged(read(boxed), read(gold), choices or (), rounding)
    return Grade(verdict, boxed if len(boxed) <= _SHOWN_CHARS else boxed[:_SHOWN_CHARS] + "…", reason)


def verify_gold(gold: str, choices: Sequence[str] | None = None) -> str | None:
    """None if the gold, boxed, is graded as correct against itself, as it is and in canonical form; else the reason."""
    stored = canonical_gold(gold)
    for answer, against in ((gold, gold), (gold, stored), (stored, stored)):
        verdict = grade(rf"\boxed{{{answer}}}", against, choices=choices)
        if verdict.verdict != "correct":
            return verdict.reason.removeprefix("gold_")
    return None if canonical_gold(stored) == stored else "unstable"


def _judged(answer: Form, gold: Form, choices: Sequence[str], rounding: bool) -> tuple[Verdict, str]:
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
        verdict, _ = _compared(value, gold, rounding=False)
        return ("correct", "letter") if verdict == "correct" else ("wrong", "different_letter")
    return _compared(answer, gold, rounding)


def _compared(answer: Form, gold: Form, rounding: bool) -> tuple[Verdict, str]:
    """The verdict on two values."""
    if gold.kind in {"unreadable", "never_right"} and not _same_text_only(gold):
        return "wrong", f"gold_{gold.reason}"
    if _same_text_only(answer) and answer.text == gold.text:
        return "correct", "same_text"
    if answer.kind == "never_right":
        return "wrong", answer.reason
    if answer.number and gold.number:
        if answer.number.unevaluated and not gold.number.unevaluated:
            return "wrong", "unevaluated"
        if _same_number(answer.number.value, gold.number.value):
            return "correct", "same_number"
        if rounding and _is_rounded(answer.text, gold.number.value):
            return "correct", "rounded"
        return "wrong", "different_number"
    # The worker pool's place: one side is not a number that `numbers` reads, and the texts differ.
    return ("unparseable" if answer.kind == "unreadable" else "wrong"), answer.reason or "different_text"


def _same_text_only(form: Form) -> bool:
    """Whether the form is not a number, but can still be equal to the same text: `rhombus`, `3x+1`, `12%`, `3:4`."""
    return form.kind == "text" or form.reason in {"percentage", "not_read"}


def _letter(form: Form) -> str | None:
    """The letter of `C` and `(C)`; a full stop and a text wrapper are gone in the canonical form already."""
    match = _LETTER.fullmatch(form.text)
    return match[1] or match[2] if match else None


def _choice(letter: str, choices: Sequence[str]) -> Form | None:
    """The value of the choice with this letter, None when there are not that many choices."""
    index = ord(letter) - ord("A")
    return read(choices[index]) if index < len(choices) else None


def _same_number(answer: Fraction | float, gold: Fraction | float) -> bool:
    """Equal, or within 1e-6 relative unless both are integers: 1000001 is not 1000000."""
    if isinstance(answer, Fraction) and isinstance(gold, Fraction) and answer.denominator == gold.denominator == 1:
        return answer == gold
    expected = float(gold)
    return abs(float(answer) - expected) <= max(RELATIVE_TOLERANCE * abs(expected), _ABSOLUTE_TOLERANCE)


def _is_rounded(text: str, gold: Fraction | float) -> bool:
    """Whether `text` is a decimal with at least one place that equals the gold rounded half up to that many places."""
    match = _DECIMAL.fullmatch(text)
    if not match:
        return False
    scale = 10 ** len(match[1])
    exact = Fraction(gold)
    rounded = math.floor(abs(exact) * scale + Fraction(1, 2)) * (1 if exact >= 0 else -1)
    return bool(Fraction(text) * scale == rounded)
