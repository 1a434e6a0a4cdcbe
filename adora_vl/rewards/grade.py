r"""One function decides every training reward and the Geometry3K evaluation: `grade`, and `grade_batch` for many.

Everything is decided in this process, by code whose cost is bounded by caps on length, nesting, digits, exponents and
values (`canonical`, `grammar`, `numeric`).
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

from adora_vl.rewards import forms
from adora_vl.rewards.canonical import Form, amount, canonical_gold, named_value, read
from adora_vl.rewards.completion import boxes_in_a_row, last_answer, last_boxed
from adora_vl.rewards.grammar import Tree, unknowns
from adora_vl.rewards.numeric import Value, same_function, same_number

Verdict = Literal["correct", "wrong", "unparseable"]
VERDICTS: tuple[Verdict, ...] = ("correct", "wrong", "unparseable")
_Outcome = tuple[Verdict, str]  # the verdict and the rule that decided
_SHOWN_CHARS = 200  # of an extracted answer; a 1 MB box must not go into every log

_LETTER = re.compile(r"([A-Z])|\(([A-Z])\)")
# Where the choices are known: also `C)`, `c`, `Option C`, and the letter before its value, as in `(C) 12` and `C. 12`.
_LABEL = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice)(?: |(?=\()))?(?:\(([A-Za-z])\)[.:]?|([A-Za-z])[).:]|([A-Za-z])$) ?(.*)", re.ASCII
)
# Reference answers that no honest answer can meet, and what to write in their place. They run on canonical text.
_UNMEETABLE = (
    (
        "decimal_comma",
        re.compile(r"[+-]?[0-9.]*[0-9],[0-9]+"),
        "a decimal comma, or two answers? write 3.5, or 3, 5 with a space",
    ),
    ("currency", re.compile(r"-?\\?[$€£¥]-?[0-9.]+|-?[0-9.]+\\?[$€£¥]"), "write the amount alone, 5 for $5"),
    ("prime", re.compile(r"[0-9.]+(?:['\"′″]|\^\{?\\prime).*"), "feet, or minutes? write the number alone, 5 for 5'"),
)
REMEDIES = {
    "other_digits": "write the digits 0 to 9, 1/2 for ½, and ^4 for ⁴",
    **{reason: remedy for reason, _, remedy in _UNMEETABLE},
}
_DECIMAL = re.compile(r"[+-]?[0-9]*\.([0-9]+)")


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    `extracted`: what stands in the last complete box, or with `answer_tags` in an `<answer>` block (cut to 200
    characters), None when there is neither.
    `reason`: the rule that decided, a short stable string such as `same_number`, `enumeration` or `no_box`.
    `ms`: the milliseconds that grading took; two grades that differ in them alone are equal.
    """

    verdict: Verdict
    extracted: str | None
    reason: str
    ms: float = field(default=0.0, compare=False)


def grade(
    response: str,
    gold: str,
    *,
    choices: Sequence[str] | None = None,
    rounding: bool = False,
    answer_tags: bool = False,
) -> Grade:
    r"""Whether the last complete `\boxed{}` of `response` holds the reference answer. Never raises.

    Args:
        response: the whole completion.
        gold: the reference answer: a number, a closed form, a text, or with `choices` also a letter.
        choices: the values of A, B, C, ...
        rounding: also accept a decimal with at least one decimal place that is the reference answer (a value, not a
            letter) rounded to that many places.
        answer_tags: the prompt asks for `<answer> </answer>`. What stands there then counts as a box does;
            `last_answer` says which of several is the answer.

    Returns:
        The verdict. For a reference answer that cannot be used it is `wrong`, with a reason that starts with `gold_`;
        `verify_gold` finds such reference answers beforehand. Safe in any thread. Source: the grading policy.
    """
    began = time.perf_counter()
    given = last_answer(response) if answer_tags else last_boxed(response)
    outcome: _Outcome = ("unparseable", "no_box")
    if given is not None:
        reference = read(gold)
        outcome = _decided(answer_to(reference, response, given, answer_tags), reference, choices or (), rounding)
        if len(given) > _SHOWN_CHARS:
            given = given[:_SHOWN_CHARS] + "…"
    verdict, reason = outcome
    return Grade(verdict, given, reason, 1000 * (time.perf_counter() - began))


def grade_batch(
    responses: Sequence[str],
    golds: Sequence[str],
    *,
    choices: Sequence[Sequence[str] | None] | None = None,
    rounding: bool = False,
    answer_tags: bool = False,
) -> list[Grade]:
    """As `grade`, for each response with its reference answer and choices. Raises `ValueError` for unequal lengths."""
    options = choices if choices is not None else [None] * len(responses)
    return [
        grade(response, gold, choices=row_choices, rounding=rounding, answer_tags=answer_tags)
        for response, gold, row_choices in zip(responses, golds, options, strict=True)
    ]


def verify_gold(gold: str, choices: Sequence[str] | None = None) -> str | None:
    """None if the reference answer, boxed, is correct against itself, as it is and in canonical form; else the reason.

    For a spelling that no honest answer can meet, such as `$5`, the reason says what to write: `currency: write ...`.
    """
    stored = canonical_gold(gold)
    for answer, against in ((gold, gold), (gold, stored), (stored, stored)):
        verdict = grade(rf"\boxed{{{answer}}}", against, choices=choices)
        if verdict.verdict != "correct":
            reason = verdict.reason.removeprefix("gold_")
            return f"{reason}: {REMEDIES[reason]}" if reason in REMEDIES else reason
    return None if canonical_gold(stored) == stored else "unstable"


def _decided(answer: Form, reference: Form, choices: Sequence[str], rounding: bool) -> _Outcome:
    """The verdict and its reason, with the letters of a multiple-choice item resolved. Source: points 3, 5 and 6."""
    named, right = _named(answer, choices), _named(reference, choices)
    if not choices:
        if named and right:
            return ("correct", "letter") if named.letter == right.letter else ("wrong", "different_letter")
        if named:
            return "wrong", "letter_without_choice"
        unmeetable = _unmeetable(reference.text)
        return ("wrong", f"gold_{unmeetable}") if unmeetable else _compared(answer, reference, rounding)
    if right:
        value = _choice(right.letter, choices)
        if value is None:
            return "wrong", "gold_letter_without_choice"
        if not _is_beside(right, value):
            return "wrong", "gold_letter_with_another_value"
        reference, rounding = value, False  # the policy asks for exactly that choice's value
    if named is None:
        return _by_value(answer, reference, right, choices, rounding)
    found = _by_letter(named, right, reference, choices)
    sure = _LETTER.fullmatch(answer.text) and _choice(named.letter, choices)  # `c` may also be a value, as may `(c)5`
    if found[0] != "correct" and not sure:
        as_value = _by_value(answer, reference, right, choices, rounding)
        found = as_value if as_value[0] == "correct" else found
    return found


def _by_value(answer: Form, reference: Form, right: _Named | None, choices: Sequence[str], rounding: bool) -> _Outcome:
    """The verdict on a value. Where a further choice has that of the right one, as `2, 1` has that of `1, 2`, the
    answer has to have the text of the right one. With a letter as the reference answer (`right`), that text is enough.
    """
    found = _compared(answer, reference, rounding)
    if answer.text and _unspaced(answer.whole.replace(", ", ",")) == _unspaced(reference.whole.replace(", ", ",")):
        return ("correct", "same_text") if right and found[0] != "correct" else found
    rivals = map(read, choices) if found[0] == "correct" else ()
    for rival in rivals:
        if rival.text != reference.text and _compared(rival, reference, rounding=False)[0] == "correct":
            return "wrong", "another_choice"
    return found


def _by_letter(named: _Named, right: _Named | None, reference: Form, choices: Sequence[str]) -> _Outcome:
    """The verdict on an answer that names a choice. `right`: the choice that the reference answer names, if it does."""
    value = _choice(named.letter, choices)
    if value is None:
        return "wrong", "different_letter" if right else "letter_without_choice"
    if not _is_beside(named, value):
        return "wrong", "letter_with_another_value"
    same = named.letter == right.letter if right else _compared(value, reference, rounding=False)[0] == "correct"
    return ("correct", "letter") if same else ("wrong", "different_letter")


def _compared(answer: Form, reference: Form, rounding: bool) -> _Outcome:
    """The verdict on two values."""
    if has_form(reference):
        found = by_form(answer, reference, rounding)
        return found.verdict, found.reason
    if reference.kind in {"unreadable", "never_right"} and not _same_text_only(reference):
        return "wrong", f"gold_{reference.reason}"
    if answer.kind == "never_right":
        answer = named_value(answer, reference) or answer
    if answer.tree and "=" in answer.raw:
        name = answer.whole.partition("=")[0]
        if name == answer.text or name in unknowns(answer.tree):
            return "wrong", "equation"  # f(x) = f(x), x = x, and x = x + 3
    if _same_text_only(answer) and _unspaced(answer.text) == _unspaced(reference.text):
        return "correct", "same_text"
    answer, reference = amount(answer) or answer, amount(reference) or reference
    if answer.kind == "never_right":
        return "wrong", answer.reason
    if (answer.kind == "percentage") != (reference.kind == "percentage") and answer.kind != "unreadable":
        return "wrong", "percentage" if answer.kind == "percentage" else "different_text"
    if answer.number and answer.number.unevaluated and not (reference.number and reference.number.unevaluated):
        return "wrong", "unevaluated"
    if answer.number and reference.number:
        same = same_number(answer.number, reference.number)
        if same:
            return "correct", "same_number"
        if rounding and _is_rounded(answer.text, reference.number.value):
            return "correct", "rounded"
        return ("unparseable", "undecided") if same is None else ("wrong", "different_number")
    if answer.tree and reference.tree:
        return _same_expression(answer.tree, reference.tree)
    return ("unparseable" if answer.kind == "unreadable" else "wrong"), answer.reason or "different_text"


def has_form(reference: Form) -> bool:
    """Whether a reference answer is compared by its form: it is no plain answer, or an expression with its name."""
    return reference.kind == "never_right" or (reference.kind == "expression" and "=" in reference.raw)


def answer_to(reference: Form, response: str, given: str, answer_tags: bool) -> Form:
    r"""The form of an answer. Where the reference answer has several values, boxes in a row are one answer:
    `\boxed{1} and \boxed{2}`.
    """
    answer = read(given)
    row = boxes_in_a_row(response, answer_tags) if reference.kind == "never_right" else []
    return read(", ".join(row)) if len(row) > 1 and not forms.has_several(answer.whole) else answer


def by_form(answer: Form, reference: Form, rounding: bool) -> forms.Compared:
    """The verdict on an answer to a reference answer that `has_form`, with the parts that were compared."""
    try:
        wanted = _shape(reference.whole)
    except forms.NoShapeError as error:
        reason = error.reason if error.reason in forms.REFUSALS else reference.reason
        return forms.Compared("wrong", f"gold_{reason}")
    try:
        given = _shape(answer.whole)
    except forms.NoShapeError as error:
        refused = error.reason if error.reason in forms.REFUSALS or not answer.reason else answer.reason
        return forms.Compared("unparseable" if answer.kind == "unreadable" else "wrong", refused)
    return forms.compare(given, wanted, lambda one, other: _compared(one, other, rounding))


@lru_cache(maxsize=256)
def _shape(text: str) -> forms.AnswerShape:
    """The shape of a text. The rollouts of a group share their reference answer, and often their answer."""
    return forms.parse(text)


def comparison(response: str, gold: str, *, rounding: bool = False, answer_tags: bool = False) -> forms.Compared | None:
    """How the answer of a response was compared with a reference answer that has a form, part by part; else None."""
    given = last_answer(response) if answer_tags else last_boxed(response)
    reference = read(gold)
    if given is None or not has_form(reference):
        return None
    return by_form(answer_to(reference, response, given, answer_tags), reference, rounding)


def _same_expression(answer: Tree, reference: Tree) -> _Outcome:
    """The verdict on two expressions. With other unknowns than the reference answer has, an answer is wrong."""
    names, reference_names = unknowns(answer), unknowns(reference)
    if names != reference_names:
        return "wrong", "different_expression" if reference_names else "not_a_number"
    found = same_function(answer, reference)
    if found == "equal":
        return "correct", "same_value"
    return ("wrong", "different_expression") if found == "different" else ("unparseable", found)


def _same_text_only(form: Form) -> bool:
    """Whether a form that is not a number is right if it is the same text: `rhombus`, `3x+1`, `12%`, `3:4`."""
    return form.kind in {"text", "expression", "percentage"} or form.reason == "not_read"


def _unspaced(text: str) -> str:
    r"""`text` without the spaces between letters: `A B` and `\overline{AB}` are the side `AB`. Those between digits
    tell numbers apart.

    A word counts the same with a capital letter: `True` is `true`, while the side `AB` is not `ab`.
    """
    text = re.sub(r"\\overline\{([A-Z](?: ?[A-Z])*)\}", r"\1", text)
    text = re.sub(r"(?<![A-Za-z\\])[A-Z][a-z]+(?![A-Za-z])", lambda word: word[0].lower(), text)
    return re.sub(r"(?<=[A-Za-z]) (?=[A-Za-z])", "", text)


class _Named(NamedTuple):
    """The choice that an answer names: its letter in upper case, and what stands beside it, `12` in `(C) 12`."""

    text: str
    letter: str
    beside: str = ""


def _named(form: Form, choices: Sequence[str]) -> _Named | None:
    """The choice that a form names. Text wrappers and a full stop are gone in the canonical form already.

    Without choices only `C` and `(C)` can be a letter. A small letter is none where a choice has it as an unknown.
    """
    match = _LETTER.fullmatch(form.text)
    if match:
        return _Named(form.text, match[1] or match[2])
    match = _LABEL.fullmatch(form.text) if choices else None
    if match is None:
        return None
    letter = match[1] or match[2] or match[3]
    if _choice(letter.upper(), choices) is None:
        return None
    if letter.islower():
        trees = [read(choice).tree for choice in choices]
        if any(tree is not None and letter in unknowns(tree) for tree in trees):
            return None
    return _Named(form.text, letter.upper(), match[4])


def _is_beside(named: _Named, value: Form) -> bool:
    """Whether nothing stands beside the letter but the value of its choice, which may have the letter in it too."""
    if not named.beside or named.text == value.text:
        return True
    return _compared(read(named.beside), value, rounding=False)[0] == "correct"


def _unmeetable(text: str) -> str | None:
    """Why no honest answer can meet a reference answer of this text, None where one can."""
    if any(not char.isascii() and unicodedata.category(char) in {"Nd", "No"} for char in text):
        return "other_digits"
    return next((reason for reason, pattern, _ in _UNMEETABLE if pattern.fullmatch(text)), None)


def _choice(letter: str, choices: Sequence[str]) -> Form | None:
    """The value of the choice with this letter, None when there are not that many choices."""
    index = ord(letter) - ord("A")
    return read(choices[index]) if index < len(choices) else None


def _is_rounded(text: str, reference: Value) -> bool:
    """Whether `text` is a decimal with places, and equals the reference rounded half up to as many of them."""
    match = _DECIMAL.fullmatch(text)
    if not match:
        return False
    scale = 10 ** len(match[1])
    rounded = (int(abs(reference) * scale * 2) + 1) // 2
    return bool(Fraction(text) * scale == (rounded if reference >= 0 else -rounded))
