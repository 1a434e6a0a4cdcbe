"""Decides whether a single value is the same as that of a reference answer.

There are rules for numbers, ratios, expressions, formulas and texts. Each gives a verdict and the
name of the rule that decided, which `explain.RULE_IN_WORDS` puts in words.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from adora_vl.rewards.answer import (
    UNREAD_REASONS,
    Answer,
    convert_angle,
    convert_to_unit,
    without_currency,
)
from adora_vl.rewards.figures import unify_figure_names
from adora_vl.rewards.grammar import (
    ExpressionTree,
    ParseError,
    is_angle_in_radians,
    parse_formula,
    unknown_names,
)
from adora_vl.rewards.number_with_error import NumberWithError, Value
from adora_vl.rewards.numeric import same_function, same_number
from adora_vl.rewards.units import RADIANS

Verdict = Literal["correct", "wrong", "unparseable"]
_DECIMAL_PATTERN = re.compile(r"[+-]?[0-9]*(?:\.([0-9]+))?")
_TWO_OR_THREE_LETTERS_PATTERN = re.compile("[a-z]{2,3}")
_RIGHT_ANGLED_PATTERN = re.compile(r"(?<![A-Za-z])right[- ]?angled(?= ?triangle)")
_OVERLINED_NAME_PATTERN = re.compile(r"\\overline\{([A-Z](?: ?[A-Z])*)\}")
_CAPITALISED_WORD_PATTERN = re.compile(r"(?<![A-Za-z\\])[A-Z][a-z]+(?![A-Za-z])")
_SPACE_BETWEEN_LETTERS_PATTERN = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")


@dataclass(frozen=True)
class ComparedPart:
    """How one part of an answer was compared with its part of the reference answer.

    `answer` and `reference` are canonical texts, with `-` for a missing part. `reason` names the
    rule that decided.
    """

    answer: str
    reference: str
    reason: str


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison.

    `reason` names the rule that decided. `pairs` has the parts of an answer with several values, up
    to the first wrong one.
    """

    verdict: Verdict
    reason: str
    pairs: tuple[ComparedPart, ...] = ()


def correct_result(reason: str, *pairs: ComparedPart) -> ComparisonResult:
    """Return the result for a right answer, with the rule that decided."""
    return ComparisonResult(verdict="correct", reason=reason, pairs=pairs)


def wrong_result(reason: str, *pairs: ComparedPart) -> ComparisonResult:
    """Return the result for a wrong answer, with the rule that decided."""
    return ComparisonResult(verdict="wrong", reason=reason, pairs=pairs)


def result_without_value(answer: Answer) -> ComparisonResult:
    """Return the result for an answer that could not be parsed as a value.

    It is `unparseable` if the text itself could not be read (`UNREAD_REASONS`), since it may be
    right. For any other reason, such as `enumeration`, it is wrong.
    """
    verdict: Verdict = "unparseable" if answer.reason in UNREAD_REASONS else "wrong"
    return ComparisonResult(verdict=verdict, reason=answer.refusal_reason or answer.reason)


def compare_values(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
    """Return the verdict on an answer of a single value.

    The answer is a number, quantity, percentage, expression or text. The rules are tried in the
    order of the code, and the first one that applies decides.

    Args:
        answer: from `parse_value`.
        reference: the reference answer, from `parse_value` too.
        rounding: whether a decimal may be the reference answer rounded.
    """
    answer_in_unit = _in_unit_of_reference(answer, reference)
    if answer_in_unit is None:
        return wrong_result("different_unit")
    answer = answer_in_unit
    # The same text is right, even if it cannot be read as a value.
    is_compared_by_text = (
        answer.type in {"text", "expression", "percentage"} or answer.reason == "not_read"
    )
    if is_compared_by_text and _have_same_text(answer, reference):
        return correct_result("same_text")
    # `ratio` has the terms of a text such as `3:4`, and is empty for any other answer.
    if reference.number is None and reference.ratio:
        return _compare_ratios(answer, reference)
    answer = without_currency(answer)
    reference = without_currency(reference)
    if not answer.is_value:
        return result_without_value(answer)
    # `50%` is wrong for 0.5, and 0.5 is wrong for `50%`.
    if (answer.type == "percentage") != (reference.type == "percentage"):
        reason = "percentage" if answer.type == "percentage" else "different_text"
        return wrong_result(reason)
    has_answer_undone = answer.number and answer.number.is_unevaluated
    has_reference_undone = reference.number and reference.number.is_unevaluated
    if has_answer_undone and not has_reference_undone:
        return wrong_result("unevaluated")  # `2 + 3` where 5 is asked for
    if answer.number and reference.number:
        return _compare_numbers(
            answer.number, reference.number, answer_text=answer.text, rounding=rounding
        )
    return _compare_expressions(answer, reference)


def _in_unit_of_reference(answer: Answer, reference: Answer) -> Answer | None:
    """Return the answer converted to the unit of the reference answer.

    - No unit in the answer: it is returned as it is.
    - A unit in the answer alone: it is returned as it is too. Radians have to be plausible, so
      `30 radians` for 30 gives None.
    - Degrees on one side, and radians on the other: the angle is converted.
    - Units of one dimension: `300 cm` becomes 3 for a reference answer in metres.
    - Units of different dimensions: None.
    """
    unit = answer.unit
    if unit is None:
        return answer
    if reference.unit is None:
        is_other_angle = unit.dimension == RADIANS and not _may_be_radians(answer)
        return None if is_other_angle else answer
    if {unit.dimension, reference.unit.dimension} == {"angle", RADIANS}:
        return convert_angle(answer, reference.unit.dimension)
    if unit.dimension == reference.unit.dimension:
        return convert_to_unit(answer, reference.unit)
    return None


def _compare_numbers(
    answer: NumberWithError, reference: NumberWithError, *, answer_text: str, rounding: bool
) -> ComparisonResult:
    """Return the verdict on a number.

    With `rounding` the answer may also be the reference answer rounded to the decimal places of the
    answer: 0.33 for 1/3.
    """
    # None where the errors of both values are too large to tell.
    is_same = same_number(answer, reference)
    if is_same:
        return correct_result("same_number")
    may_be_rounded = rounding and "." in answer_text
    if may_be_rounded and is_rounding_of(answer_text, reference.value):
        return correct_result("rounded")
    if is_same is None:
        return ComparisonResult(verdict="unparseable", reason="undecided")
    return wrong_result("different_number")


def _compare_expressions(answer: Answer, reference: Answer) -> ComparisonResult:
    """Return the verdict where at least one side is no number: an expression, formula or text."""
    answer_unknowns = unknown_names(answer.tree)
    reference_unknowns = unknown_names(reference.tree)
    # A number or an expression has a tree, and a text has none.
    have_trees = bool(answer.tree and reference.tree)
    are_alike = have_trees and answer_unknowns == reference_unknowns
    # Expressions with the same unknowns are compared as they are. Otherwise the reference answer
    # may be a formula such as `2ab`, in which each letter is a quantity.
    reference_formula = _parse_reference_formula(reference, answer)
    if reference_formula and not are_alike:
        return _compare_formulas(answer, reference_formula)
    if not answer.tree or not reference.tree:
        return wrong_result(answer.reason or "different_text")
    if answer_unknowns != reference_unknowns:
        reason = "different_expression" if reference_unknowns else "not_a_number"
        return wrong_result(reason)
    return _compare_functions(answer.tree, reference.tree)


def _compare_functions(answer: ExpressionTree, reference: ExpressionTree) -> ComparisonResult:
    """Return the verdict on two trees with the same unknowns, by their values at several points."""
    outcome = same_function(answer, reference)
    if outcome == "equal":
        return correct_result("same_value")
    if outcome == "different":
        return wrong_result("different_expression")
    return ComparisonResult(verdict="unparseable", reason=outcome)


def _compare_ratios(answer: Answer, reference: Answer) -> ComparisonResult:
    r"""Return the verdict where the reference answer is a ratio of numbers.

    The terms of the answer may have a common factor: `6:8` is right for `3:4`. For a ratio of two
    terms the quotient is right too: `\frac{3}{4}` for `3:4`.
    """
    terms = answer.ratio
    expected_terms = reference.ratio
    if answer.type == "number" and answer.number and len(expected_terms) == 2:
        expected_quotient = expected_terms[0] / expected_terms[1]
        is_same = not answer.number.is_unevaluated and same_number(answer.number, expected_quotient)
        return correct_result("same_ratio") if is_same else wrong_result("different_number")
    if len(terms) != len(expected_terms):
        return wrong_result(answer.reason or "different_text")
    try:
        # a:b:c and d:e:f are the same ratio if a/b = d/e and a/c = d/f.
        for term, expected_term in zip(terms[1:], expected_terms[1:], strict=True):
            if not same_number(terms[0] / term, expected_terms[0] / expected_term):
                return wrong_result("different_number")
    except ParseError:  # a quotient too large to compute
        return wrong_result("different_number")
    return correct_result("same_ratio")


def _parse_reference_formula(reference: Answer, answer: Answer) -> ExpressionTree | None:
    r"""Return the tree of a reference answer that is a formula of quantities, else None.

    `2ab` is a formula. Letters alone, such as `ab`, may be a word or the name of a figure, so they
    are a formula only if the answer multiplies, as `a \cdot b` does.
    """
    if reference.type not in {"text", "expression"}:
        return None
    text = reference.text
    if _TWO_OR_THREE_LETTERS_PATTERN.fullmatch(text) and r"\cdot" in answer.text:
        text = f"1{text}"  # `1ab` is read as a formula, while `ab` may be a name
    tree = parse_formula(text)
    return tree if unknown_names(tree) else None


def _compare_formulas(answer: Answer, reference: ExpressionTree) -> ComparisonResult:
    r"""Return the verdict where the reference answer is a formula of quantities, given as a tree.

    In both sides letters side by side are multiplied: `ab` is `a \cdot b`.
    """
    tree = answer.tree
    if answer.type in {"text", "expression"}:
        tree = parse_formula(answer.text) or answer.tree
    if tree is None or unknown_names(tree) != unknown_names(reference):
        return wrong_result("different_expression" if tree else answer.reason)
    return _compare_functions(tree, reference)


def _may_be_radians(answer: Answer) -> bool:
    """Return whether an answer in radians can mean the unitless angle of a reference answer.

    It can if it is written with pi, such as `\\pi/6`, or if it is less than a whole turn (about
    6.28). `30 radians` is more than four turns: most likely 30 degrees are meant, and the unit is
    wrong.
    """
    if answer.tree is None:
        return False
    if is_angle_in_radians(answer.tree):
        return True
    return answer.number is not None and answer.number.magnitude < 2 * math.pi


def _have_same_text(answer: Answer, reference: Answer) -> bool:
    """Return whether two answers have the same text.

    Spaces between letters, capital letters of words, and the order of letters in the name of a
    figure do not count.
    """
    answer_text, reference_text = [
        join_letters(_RIGHT_ANGLED_PATTERN.sub("right", unify_figure_names(side.text)))
        for side in (answer, reference)
    ]
    return answer_text == reference_text


def join_letters(text: str) -> str:
    r"""Return `text` without spaces between letters.

    `A B` and `\overline{AB}` are the side `AB`. Spaces between digits stay, since they tell numbers
    apart. A word counts the same with a capital letter: `True` becomes `true`, while the side `AB`
    does not become `ab`.
    """
    text = _OVERLINED_NAME_PATTERN.sub(r"\1", text)
    text = _CAPITALISED_WORD_PATTERN.sub(lambda word: word[0].lower(), text)
    return _SPACE_BETWEEN_LETTERS_PATTERN.sub("", text)


def is_rounding_of(text: str, reference: Value) -> bool:
    """Return whether a decimal is the reference value rounded to its number of decimal places.

    Halves are rounded away from 0: `0.5` is a rounding of 0.45, and `0.4` is not. `reference` is a
    fraction or a number of mpmath. A text that is no decimal gives False.
    """
    match = _DECIMAL_PATTERN.fullmatch(text)
    if not match or text in {"", "+", "-"}:
        return False
    scale = 10 ** len(match[1] or "")
    # Integer arithmetic rounds half up: (int(2 v) + 1) // 2. A value of 4.5 gives (9 + 1) // 2 = 5.
    rounded_reference = (int(abs(reference) * scale * 2) + 1) // 2
    if reference < 0:
        rounded_reference = -rounded_reference
    return bool(Fraction(text) * scale == rounded_reference)
