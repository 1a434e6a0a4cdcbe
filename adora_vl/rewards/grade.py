r"""Grades a response: `grade` decides every training reward and the Geometry3K evaluation.

`grade_batch` grades many responses. Everything is decided in this process, by code whose cost is
bounded by caps on length, nesting, digits, exponents and values (`canonical`, `grammar`,
`tree_value`, `numeric`).
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from adora_vl.data.prompts import without_letters
from adora_vl.rewards.answer import Answer, parse_value
from adora_vl.rewards.compare import compare
from adora_vl.rewards.compare_values import (
    ComparedPart,
    ComparisonResult,
    Verdict,
    correct_result,
    join_letters,
    wrong_result,
)
from adora_vl.rewards.completion import last_adjacent_boxes, last_answer, last_boxed
from adora_vl.rewards.grammar import unknown_names
from adora_vl.rewards.structured import canonical_gold, parse_reference, parse_structured
from adora_vl.rewards.thinking import is_blank, text_after_thinking

VERDICTS: tuple[Verdict, ...] = ("correct", "wrong", "unparseable")
_MAX_EXTRACTED_CHARS = 200  # of an extracted answer; a 1 MB box must not go into every log

_CAPITAL_LETTER_PATTERN = re.compile(r"([A-Z])|\(([A-Z])\)")
# These two patterns are used only if the choices are known. They match a letter alone, such as
# `C)`, `c` and `Option C`, and a letter before its value: `(C) 12`, `C. 12`, `C (12)` and `C, 12`.
_LETTER_BEFORE_VALUE_PATTERN = re.compile(
    r"(?:(?:[Tt]he )?(?:(?:[Cc]orrect|[Ff]inal) )?(?:[Aa]nswer|[Oo]ption|[Cc]hoice)(?: is(?: |(?=\()))"
    r"|(?:[Oo]ption|[Cc]hoice)(?: |(?=\()))?"
    r"(?:\(([A-Za-z])\)[.:]?|([A-Za-z])[).:]|([A-Za-z])$|\[([A-Z])\]|([A-Z])(?:, ?(?=[\d\\.])|(?=\())) ?(.*)",
    re.ASCII,
)
# The letter behind its value: `60 (C)` and `60, option C`.
_LETTER_BEHIND_VALUE_PATTERN = re.compile(
    r"(.+?)[,;]? ?(?:(?:[Oo]ption|[Cc]hoice) ?(?:\(([A-Za-z])\)|([A-Za-z]))|\(([A-Z])\))", re.ASCII
)
_VALUE_IN_BRACKETS_PATTERN = re.compile(r"\(([^(),]*)\)")  # but no point, such as `(3, 4)`
# Reference answers that no honest answer can match: a reason, a pattern for the canonical text, and
# what to write instead.
_DECIMAL_COMMA_REMEDY = "a decimal comma, or two answers? write 3.5, or 3, 5 with a space"
_UNMEETABLE_SPELLINGS = (
    ("decimal_comma", re.compile(r"[+-]?[0-9.]*[0-9],[0-9]+"), _DECIMAL_COMMA_REMEDY),
    (
        "currency",
        re.compile(r"-?\\?[$€£¥]-?[0-9.]+|-?[0-9.]+\\?[$€£¥]"),
        "write the amount alone, 5 for $5",
    ),
    (
        "prime",
        re.compile(r"[0-9.]+(?:['\"′″]|\^\{?\\prime).*"),
        "feet, or minutes? write the number alone, 5 for 5'",
    ),
)
REMEDY_BY_REASON = {reason: remedy for reason, _, remedy in _UNMEETABLE_SPELLINGS}
REMEDY_BY_REASON["other_digits"] = "write the digits 0 to 9, 1/2 for ½, and ^4 for ⁴"


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    `extracted` is the content of the last complete box, or with `answer_tags` of an `<answer>`
    block, cut to 200 characters. It is None if there is neither, or if it is empty. `reason` is a
    short stable name of the rule that decided, such as `same_number`, `enumeration` or `no_box`.
    `pairs` has each part of an answer of several values with its part of the reference answer, up
    to the first wrong one. `ms` are the milliseconds that grading took. Neither counts when two
    grades are compared.
    """

    verdict: Verdict
    extracted: str | None
    reason: str
    pairs: tuple[ComparedPart, ...] = field(default=(), compare=False)
    ms: float = field(default=0.0, compare=False)


Choices = Sequence[str] | None  # the values of A, B, C, ...


def grade(
    response: str,
    gold: str,
    *,
    choices: Choices = None,
    rounding: bool = False,
    answer_tags: bool = False,
    thinking_opened: bool = False,
) -> Grade:
    r"""Return whether the last complete `\boxed{}` of `response` holds the reference answer.

    A box inside a block of thinking does not count (`text_after_thinking`). The function never
    raises and is safe in any thread. Source: the grading policy.

    Args:
        response: the whole completion.
        gold: the reference answer: a number, a closed form, a text, a form of several values, or
            with `choices` also a letter. An unusable one gives `wrong`, with a reason that starts
            with `gold_`; `verify_gold` finds such reference answers beforehand.
        choices: the values of A, B, C, ...
        rounding: also accept the reference answer rounded to the decimal places of the answer, at
            least one: 0.33 for 1/3. A reference answer that is a letter is not rounded.
        answer_tags: the prompt asks for `<answer> </answer>`, so an answer in such tags counts too
            (`last_answer`).
        thinking_opened: the prompt ended in `<think>`, so the response begins inside the block.
    """
    start_time = time.perf_counter()
    response = text_after_thinking(response, thinking_opened)
    content = last_answer(response) if answer_tags else last_boxed(response)
    result = ComparisonResult(verdict="unparseable", reason="no_box")
    if content is not None:
        reference = parse_reference(gold)
        answer = parse_answer_for(
            reference, response=response, content=content, answer_tags=answer_tags
        )
        result = _decide_verdict(
            answer, reference=reference, choices=without_letters(choices or ()), rounding=rounding
        )
        if not reference.is_structured:
            result = replace(result, pairs=())
        if result.reason == "empty_box" or is_blank(content):
            content = None  # an empty box counts as none, also for rewards for the form
        elif len(content) > _MAX_EXTRACTED_CHARS:
            content = content[:_MAX_EXTRACTED_CHARS] + "…"
    return Grade(
        verdict=result.verdict,
        extracted=content,
        reason=result.reason,
        pairs=result.pairs,
        ms=1000 * (time.perf_counter() - start_time),
    )


def grade_batch(
    responses: Sequence[str],
    golds: Sequence[str],
    *,
    choices: Sequence[Choices] | None = None,
    **accepted: bool,
) -> list[Grade]:
    """Grade each response against the reference answer and the choices at the same index.

    `accepted` are the keyword arguments `rounding`, `answer_tags` and `thinking_opened` of `grade`.
    Raises `ValueError` for sequences of unequal lengths.
    """
    if choices is None:
        choices = [None] * len(responses)
    grades = []
    for response, gold, row_choices in zip(responses, golds, choices, strict=True):
        grades.append(grade(response, gold, choices=row_choices, **accepted))
    return grades


def verify_gold(gold: str, choices: Sequence[str] | None = None) -> str | None:
    """Return why a reference answer cannot be used, or None if it can.

    It can be used if it is graded as correct against itself, both as it is written and in canonical
    form. For example, `5` gives None, `1/0` gives `undefined`, and `$5` gives
    `currency: write the amount alone, 5 for $5`.
    """
    canonical = canonical_gold(gold)
    answers_and_references = ((gold, gold), (gold, canonical), (canonical, canonical))
    for answer, reference in answers_and_references:
        result = grade(rf"\boxed{{{answer}}}", reference, choices=choices)
        if result.verdict != "correct":
            reason = result.reason.removeprefix("gold_")
            return f"{reason}: {REMEDY_BY_REASON[reason]}" if reason in REMEDY_BY_REASON else reason
    # The canonical form of the canonical form has to be the same, since data preparation may run
    # twice.
    return None if canonical_gold(canonical) == canonical else "unstable"


def _why_no_answer_matches(text: str) -> str | None:
    """Return why no honest answer can match a reference answer as it is spelled, else None.

    The reason is a key of `REMEDY_BY_REASON`, whose values say what to write instead.
    """
    for char in text:
        # Decimal digits of other scripts, and raised digits or fractions in one character
        if not char.isascii() and unicodedata.category(char) in {"Nd", "No"}:
            return "other_digits"
    for reason, pattern, _ in _UNMEETABLE_SPELLINGS:
        if pattern.fullmatch(text):
            return reason
    return None


def _decide_verdict(
    answer: Answer, reference: Answer, choices: Sequence[str], rounding: bool
) -> ComparisonResult:
    """Return the verdict on an answer, where both sides may be the letter of a choice.

    A letter stands for the value of its choice. `choices` has the values of A, B, C and so on, and
    is empty for a problem that is no multiple-choice question. Source: the grading policy, points
    3, 5 and 6.
    """
    answer_choice = _parse_named_choice(answer, choices)
    reference_choice = _parse_named_choice(reference, choices)
    if not choices:
        return _decide_without_choices(
            answer,
            answer_choice=answer_choice,
            reference=reference,
            reference_choice=reference_choice,
            rounding=rounding,
        )
    correct_value = reference
    if reference_choice:
        value_of_choice = _value_of_letter(reference_choice.letter, choices)
        if value_of_choice is None:
            return wrong_result("gold_letter_without_choice")
        if not _agrees_with_text_beside(reference_choice, value_of_choice):
            return wrong_result("gold_letter_with_another_value")
        correct_value = value_of_choice
    value_result = _grade_by_value(
        answer,
        reference=correct_value,
        reference_choice=reference_choice,
        choices=choices,
        # A letter stands for the exact value of its choice.
        rounding=rounding and not reference_choice,
    )
    if answer_choice is None:
        return value_result
    letter_result = _grade_by_letter(
        answer_choice, reference_choice=reference_choice, reference=correct_value, choices=choices
    )
    # A wrong letter is final if it is a capital one of a choice: `B` or `(B)`. Any other spelling,
    # such as `c` or `(c)5`, may be meant as a value, which then decides.
    is_capital_letter = _CAPITAL_LETTER_PATTERN.fullmatch(answer.text) is not None
    is_final = is_capital_letter and _value_of_letter(answer_choice.letter, choices) is not None
    may_be_value = not is_final and value_result.verdict == "correct"
    if letter_result.verdict != "correct" and may_be_value:
        return value_result
    return letter_result


def _decide_without_choices(
    answer: Answer,
    answer_choice: _NamedChoice | None,
    reference: Answer,
    reference_choice: _NamedChoice | None,
    rounding: bool,
) -> ComparisonResult:
    """Return the verdict on a problem without choices, where both sides may still be a letter.

    `answer_choice` and `reference_choice` are the letters that both sides name, None for a side
    that is a value. `C` is right for `C`, and wrong for a value.
    """
    if answer_choice and reference_choice:
        if answer_choice.letter == reference_choice.letter:
            return correct_result("letter")
        return wrong_result("different_letter")
    if answer_choice:
        return wrong_result("letter_without_choice")
    reason = _why_no_answer_matches(reference.text)
    if reason is not None:
        return wrong_result(f"gold_{reason}")
    return compare(answer, reference, rounding)


def _grade_by_value(
    answer: Answer,
    reference: Answer,
    reference_choice: _NamedChoice | None,
    choices: Sequence[str],
    rounding: bool,
) -> ComparisonResult:
    """Return the verdict on an answer that gives the value of a choice instead of its letter.

    Two special cases:

    - Another choice has the same value as the right one: the lists `2, 1` and `1, 2` are equal in
      any order. Then the answer must have the same text as the right choice.
    - The reference answer is a letter (`reference_choice`). Then the same text as its choice is
      enough, even if it cannot be read as a value.
    """
    result = compare(answer, reference, rounding)
    answer_text = join_letters(answer.text_with_names.replace(", ", ","))
    reference_text = join_letters(reference.text_with_names.replace(", ", ","))
    # Spaces between letters and behind commas do not count. An unreadable answer may have no text.
    has_same_text = answer.text != "" and answer_text == reference_text
    if result.verdict != "correct":
        if has_same_text and reference_choice:
            return correct_result("same_text")
        return result
    if has_same_text:
        return result
    # The value is right but has another text, so no other choice may have the same value.
    for choice in choices:
        choice_value = parse_value(choice)
        is_another_text = choice_value.text != reference.text
        if is_another_text and compare(choice_value, reference).verdict == "correct":
            return wrong_result("another_choice")
    return result


def _grade_by_letter(
    answer_choice: _NamedChoice,
    reference_choice: _NamedChoice | None,
    reference: Answer,
    choices: Sequence[str],
) -> ComparisonResult:
    """Return the verdict on an answer that names a choice.

    `reference_choice` is the choice that the reference answer names, None where it is a value.
    """
    value = _value_of_letter(answer_choice.letter, choices)
    if value is None:
        reason = "different_letter" if reference_choice else "letter_without_choice"
        return wrong_result(reason)
    if not _agrees_with_text_beside(answer_choice, value):
        return wrong_result("letter_with_another_value")
    if reference_choice:
        is_same = answer_choice.letter == reference_choice.letter
    else:
        # `value` is read as a reference answer. As the answer here, the choice is read anew.
        is_same = compare(parse_value(value.raw), reference).verdict == "correct"
    if not is_same:
        return wrong_result("different_letter")
    return correct_result("letter")


def parse_answer_for(reference: Answer, response: str, content: str, answer_tags: bool) -> Answer:
    r"""Return the answer that a response gives, read for this reference answer.

    If the reference answer has several values, the last boxes in a row count as one answer:
    `\boxed{1} and \boxed{2}` is read as `1, 2`.

    Args:
        reference: the reference answer, from `parse_reference`.
        response: the response without its thinking.
        content: the content of its last box or `<answer>` block.
        answer_tags: as in `grade`.
    """
    answer = parse_value(content)
    if reference.type != "unordered":
        return answer
    has_names = any(part.name for part in reference.parts)
    boxes = last_adjacent_boxes(response, answer_tags, has_names)
    # A last box that has several values itself is the whole answer.
    if len(boxes) < 2 or parse_structured(answer).type == "unordered":
        return answer
    return parse_value(", ".join(boxes))


class _NamedChoice(NamedTuple):
    """The choice that an answer names.

    `(C) 12` has the canonical `text` `(C) 12`, the `letter` `C`, always in upper case, and the
    `text_beside` the letter `12`.
    """

    text: str
    letter: str
    text_beside: str = ""


def _parse_named_choice(answer: Answer, choices: Sequence[str]) -> _NamedChoice | None:
    """Return the choice that an answer names, None if it names none.

    - `C` and `(C)` always name one.
    - `c`, `C)`, `Option C`, `(C) 12` and `60 (C)` name one if `choices` has one with that letter. A
      small letter names none if it is an unknown in a choice, such as `2c`.
    """
    letter_alone = _CAPITAL_LETTER_PATTERN.fullmatch(answer.text)
    if letter_alone:
        return _NamedChoice(text=answer.text, letter=letter_alone[1] or letter_alone[2])
    if not choices:
        return None
    letter_before = _LETTER_BEFORE_VALUE_PATTERN.fullmatch(answer.text)
    letter_behind = _LETTER_BEHIND_VALUE_PATTERN.fullmatch(answer.text)
    # In both patterns each spelling of the letter, such as `(C)` and `C.`, has its own group, and
    # one of these groups is set. The value is the last group of the first pattern, and the first
    # group of the second pattern.
    if letter_before:
        *letter_groups, text_beside = letter_before.groups()
    elif letter_behind:
        text_beside, *letter_groups = letter_behind.groups()
    else:
        return None
    letter = next(group for group in letter_groups if group)
    if _value_of_letter(letter.upper(), choices) is None:
        return None
    if letter.islower():
        # `c` is a value where a choice such as `2c` has it as an unknown.
        trees = [parse_value(choice).tree for choice in choices]
        if any(letter in unknown_names(tree) for tree in trees):
            return None
    return _NamedChoice(text=answer.text, letter=letter.upper(), text_beside=text_beside)


def _agrees_with_text_beside(choice: _NamedChoice, value: Answer) -> bool:
    """Return whether the text beside the letter of a choice agrees with the value of that choice.

    In `(C) 5` that text is `5`. A letter that stands alone agrees with any value.
    """
    # The value of a choice may itself look like a letter with a value.
    if not choice.text_beside or choice.text == value.text:
        return True
    in_brackets = _VALUE_IN_BRACKETS_PATTERN.fullmatch(choice.text_beside)
    text_beside = in_brackets[1] if in_brackets else choice.text_beside
    return compare(parse_value(text_beside), value).verdict == "correct"


def _value_of_letter(letter: str, choices: Sequence[str]) -> Answer | None:
    """Return the value of the choice with this letter, None if there are fewer choices."""
    index = ord(letter) - ord("A")
    return parse_reference(choices[index]) if index < len(choices) else None
