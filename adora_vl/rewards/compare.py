"""Decides whether an answer is the same as a reference answer.

The kind of the reference answer selects the rule: there are rules for numbers, ratios, expressions,
formulas, texts, lists, points and relations. Each rule gives a verdict and the name of the rule
that decided, which `explain.RULES` puts in words.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from adora_vl.rewards.answer import (
    NO_VALUE,
    UNREAD,
    Answer,
    amount_of_money,
    in_radians_or_degrees,
    in_unit,
    read_value,
)
from adora_vl.rewards.ball import Value
from adora_vl.rewards.canonical import NAMED_VALUE
from adora_vl.rewards.figures import in_one_spelling
from adora_vl.rewards.forms import bare_name, chain_of_numbers, read_structured
from adora_vl.rewards.grammar import NotReadError, Tree, in_radians, read_formula, unknowns
from adora_vl.rewards.numeric import factor_between, same_function, same_number
from adora_vl.rewards.solutions import same_solutions
from adora_vl.rewards.units import RADIANS

Verdict = Literal["correct", "wrong", "unparseable"]
_DECIMAL = re.compile(r"[+-]?[0-9]*(?:\.([0-9]+))?")
_DECIMAL_COMMA = re.compile(r"[^,;0-9]*[0-9]+,(?![0-9]{3}(?![0-9]))[0-9]+[^,;]*")
_THOUSANDS_TOO = re.compile(r"[+-]?[0-9]{1,3}(?:[. ][0-9]{3})+,[0-9]+")  # `1.234,5`
_NEARLY = re.compile(r"(?:\\approx(?![A-Za-z])|≈)([^=<>≈]+)")
_FEW_LETTERS = re.compile("[a-z]{2,3}")
_RIGHT_ANGLED = re.compile(r"(?<![A-Za-z])right[- ]?angled(?= ?triangle)")
_OVERLINED = re.compile(r"\\overline\{([A-Z](?: ?[A-Z])*)\}")
_CAPITALISED = re.compile(r"(?<![A-Za-z\\])[A-Z][a-z]+(?![A-Za-z])")
_BETWEEN_LETTERS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
# A reference answer that is rounded itself, as 0.5 need not be.
_ROUNDED = re.compile(r"-?(?=(?:\.?[0-9]){3,})[0-9]+\.[0-9]+")
_IN_DIGITS = re.compile(r"[+-]?[0-9]*\.?[0-9]+")
_UNIT_LETTER = re.compile(r"([+-]?[0-9.]*[0-9]) ?([hgLl])")  # beside a quantity, no unknown


@dataclass(frozen=True)
class Pair:
    """How one part of an answer was compared with its part of the reference answer.

    `answer` and `reference` are canonical texts, with `-` for a missing part. `reason` names the
    rule that decided.
    """

    answer: str
    reference: str
    reason: str


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    `reason` names the rule that decided. `pairs` has the parts of an answer with several values, up
    to the first wrong one.
    """

    verdict: Verdict
    reason: str
    pairs: tuple[Pair, ...] = ()


def compare(answer: Answer, reference: Answer, rounding: bool = False) -> Compared:
    """Compare an answer with a reference answer.

    Args:
        answer: from `read_value`. Where the reference answer is a form, the answer is read as one too.
        reference: from `read`.
        rounding: whether a decimal may be the reference answer rounded.
    """
    if reference.is_structured:
        return _compare_structured(read_structured(answer), read_structured(reference), rounding)
    if reference.kind == "unreadable" and reference.reason != "not_read":
        return Compared("wrong", f"gold_{reference.refusal or reference.reason}")
    if reference.kind == "number" and answer.reason in {"equation", "relation"}:
        chain = chain_of_numbers(answer.text_with_names)
        if len(chain) > 1 or (chain and chain[0][0] == "="):
            return _compare_chain(chain, reference)
    return _compare_values(
        _read_named_value(answer, reference), _read_unit_letter(reference, answer), rounding
    )


def _compare_chain(chain: Sequence[tuple[str, Answer]], reference: Answer) -> Compared:
    r"""Return the verdict on a chain such as `AB = 1.8 \cdot 9 / 1.5 \approx 10.8`.

    It is correct if all its numbers are the reference answer, and at least one exactly so. An
    approximation has to agree to its own digits. A number before an approximation has to agree to
    the digits of a reference answer that is a decimal, as in `20\sqrt{3} \approx 34.64`.

    Args:
        chain: the sign before each number (`=`, or `~` for an approximation) and the number.
        reference: a number.
    """
    rounded = "." in reference.text and any(sign == "~" for sign, _ in chain)
    sure = False
    for sign, value in chain:
        worked_out = replace(
            value, number=value.number and replace(value.number, has_undone_arithmetic=False)
        )
        compared = _compare_values(worked_out, reference, False)
        sure = sure or compared.verdict == "correct"
        near = sign == "~" and reference.number and _is_rounded(value.text, reference.number.value)
        near = near or (
            rounded
            and sign != "~"
            and value.number
            and _is_rounded(reference.text, value.number.value)
        )
        if compared.verdict != "correct" and (not near or compared.reason == "different_unit"):
            if compared.reason == "different_number":
                return Compared("wrong", "chain_differs")
            return compared
    return Compared("correct", "same_number") if sure else Compared("wrong", "chain_differs")


def _read_named_value(answer: Answer, reference: Answer) -> Answer:
    r"""Return the value that an answer gives with a name before it.

    Without a name the answer itself. It is `2x + 1` in `y = 2x + 1` and 5 in `|AB| = 5`. An
    approximation such as `x \approx 5` counts for a reference answer in digits. For a numeric
    reference answer a decimal comma is read as a point.
    """
    value = answer
    label = answer.text_with_names.partition("=")[0] if "=" in answer.raw else ""
    if answer.reason == "enumeration" and reference.number:
        grouped = _THOUSANDS_TOO.fullmatch(answer.text)
        if grouped or _DECIMAL_COMMA.fullmatch(answer.text):
            text = re.sub("[. ]", "", answer.text) if grouped else answer.text
            return replace(read_value(text.replace(",", ".")), unit=answer.unit)
    answer = value = _read_unit_letter(answer, reference)
    if answer.reason in NO_VALUE and answer.kind != "percentage":
        match = NAMED_VALUE.fullmatch(answer.text_with_names)
        nearly = _NEARLY.fullmatch(answer.text_with_names)
        in_digits = _IN_DIGITS.fullmatch(reference.text)
        if nearly and in_digits and _ROUNDED.fullmatch(reference.text):
            return read_value(nearly[1])
        if not match or (match[2] != "=" and not in_digits):
            return answer
        label = match[1]
        value = read_value(match[3])
    names_itself = value.kind == "expression" and (
        label == value.text or label in unknowns(value.tree or ())
    )
    return Answer("unreadable", answer.text, "equation") if names_itself else value  # f(x) = f(x)


def _read_unit_letter(answer: Answer, opposite: Answer) -> Answer:
    """Return `5 L` as litres where the opposite side has a unit, else the answer itself.

    Without a unit on the other side the letter stays an unknown.
    """
    if answer.unit or not opposite.unit:
        return answer
    letter = _UNIT_LETTER.fullmatch(answer.text_with_names)
    return read_value(rf"{letter[1]}\text{{{letter[2]}}}") if letter else answer


def _compare_values(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """Return the verdict on a single value: a quantity, text, percentage, number or expression."""
    unit = answer.unit
    if unit and reference.unit:
        dimension = reference.unit.dimension
        if {unit.dimension, dimension} == {"angle", RADIANS}:
            answer = in_radians_or_degrees(answer, dimension)
        elif unit.dimension == dimension:
            answer = in_unit(answer, reference.unit)
        else:
            return Compared("wrong", "different_unit")
    elif unit and unit.dimension == RADIANS and not _may_be_radians(answer):
        return Compared("wrong", "different_unit")
    # The same text is right, whether or not it can be read as a value.
    by_text = answer.kind in {"text", "expression", "percentage"} or answer.reason == "not_read"
    if by_text and _is_same_text(answer.text, reference.text):
        return Compared("correct", "same_text")
    if reference.number is None and reference.ratio:
        return _compare_ratios(answer, reference)
    answer = amount_of_money(answer)
    reference = amount_of_money(reference)
    if not answer.is_value:
        return Compared("unparseable" if answer.reason in UNREAD else "wrong", answer.reason)
    if (answer.kind == "percentage") != (reference.kind == "percentage"):
        return Compared("wrong", "percentage" if answer.kind == "percentage" else "different_text")
    number = answer.number
    expected = reference.number
    # `2 + 3` is no answer to what is 5, unless the reference answer is left unevaluated too.
    if (
        number
        and number.has_undone_arithmetic
        and not (expected and expected.has_undone_arithmetic)
    ):
        return Compared("wrong", "unevaluated")
    if number and expected:
        # None where the errors of both values are too large to tell.
        same = same_number(number, expected)
        if (
            not same
            and rounding
            and "." in answer.text
            and _is_rounded(answer.text, expected.value)
        ):
            return Compared("correct", "rounded")
        if same is None:
            return Compared("unparseable", "undecided")
        return Compared("correct", "same_number") if same else Compared("wrong", "different_number")
    formula = _formula_of(reference, answer)
    if formula and not (answer.tree and reference.tree and _have_same_unknowns(answer, reference)):
        return _compare_formulas(answer, formula)
    if not answer.tree or not reference.tree:
        return Compared("wrong", answer.reason or "different_text")
    # From here on both are expressions with unknowns.
    if unknowns(answer.tree) != unknowns(reference.tree):
        return Compared(
            "wrong", "different_expression" if unknowns(reference.tree) else "not_a_number"
        )
    outcome = same_function(answer.tree, reference.tree)
    if outcome == "equal":
        return Compared("correct", "same_value")
    if outcome == "different":
        return Compared("wrong", "different_expression")
    return Compared("unparseable", outcome)


def _compare_ratios(answer: Answer, reference: Answer) -> Compared:
    r"""Return the verdict where the reference answer is a ratio of numbers.

    The terms of the answer may have a common factor. For a ratio of two terms the quotient counts
    too: `\frac{3}{4}` for `3:4`.
    """
    terms = answer.ratio
    expected = reference.ratio
    if answer.kind == "number" and answer.number and len(expected) == 2:
        same = not answer.number.has_undone_arithmetic and same_number(
            answer.number, expected[0] / expected[1]
        )
        return Compared("correct", "same_ratio") if same else Compared("wrong", "different_number")
    if len(terms) != len(expected):
        return Compared("wrong", answer.reason or "different_text")
    try:
        pairs = zip(terms[1:], expected[1:], strict=True)
        same = all(
            same_number(terms[0] / term, expected[0] / expected_term)
            for term, expected_term in pairs
        )
    except NotReadError:
        return Compared("wrong", "different_number")
    return Compared("correct", "same_ratio") if same else Compared("wrong", "different_number")


def _formula_of(reference: Answer, answer: Answer) -> Tree | None:
    r"""Return the tree of a reference answer that is a formula of quantities, else None.

    Letters alone, such as `ab`, count as a formula only where the answer multiplies, as in
    `a \cdot b`; else they may be a word or the name of a figure.
    """
    if reference.kind not in {"text", "expression"}:
        return None
    text = reference.text
    if _FEW_LETTERS.fullmatch(text) and r"\cdot" in answer.text:
        text = f"1{text}"
    tree = read_formula(text)
    return tree if tree is not None and unknowns(tree) else None


def _have_same_unknowns(answer: Answer, reference: Answer) -> bool:
    """Return whether both sides have the same unknowns."""
    return unknowns(answer.tree or ()) == unknowns(reference.tree or ())


def _compare_formulas(answer: Answer, reference: Tree) -> Compared:
    r"""Return the verdict where the reference answer is a formula.

    Letters side by side are multiplied in both sides, so that `ab` is `a \cdot b`.
    """
    tree = answer.tree
    if answer.kind in {"text", "expression"}:
        tree = read_formula(answer.text) or answer.tree
    if tree is None or unknowns(tree) != unknowns(reference):
        return Compared("wrong", "different_expression" if tree else answer.reason)
    outcome = same_function(tree, reference)
    if outcome == "equal":
        return Compared("correct", "same_value")
    if outcome == "different":
        return Compared("wrong", "different_expression")
    return Compared("unparseable", outcome)


def _may_be_radians(answer: Answer) -> bool:
    """Return whether an answer in radians can mean the unitless angle of a reference answer.

    It can if pi stands in it, or if it is less than a whole turn: `30 radians` is not 30 degrees.
    """
    if answer.tree is None:
        return False
    return in_radians(answer.tree) or (
        answer.number is not None and answer.number.magnitude < 2 * math.pi
    )


def _is_same_text(answer: str, reference: str) -> bool:
    """Return whether two canonical texts are the same.

    Spaces between letters, capital letters of words, and the order of letters in the name of a
    figure do not count.
    """
    if answer == reference:
        return True
    return _text_in_one_spelling(answer) == _text_in_one_spelling(reference)


def _text_in_one_spelling(text: str) -> str:
    """Return a text in the spelling in which texts are compared."""
    text = in_one_spelling(text)
    if "angled" in text:
        text = _RIGHT_ANGLED.sub("right", text)
    return unspaced(text)


def unspaced(text: str) -> str:
    r"""Return `text` without spaces between letters.

    `A B` and `\overline{AB}` are the side `AB`. Spaces between digits stay, since they tell numbers
    apart. A word counts the same with a capital letter: `True` becomes `true`, while the side `AB`
    does not become `ab`.
    """
    if "\\" in text:
        text = _OVERLINED.sub(r"\1", text)
    text = _CAPITALISED.sub(lambda word: word[0].lower(), text)
    return _BETWEEN_LETTERS.sub("", text) if " " in text else text


def _is_rounded(text: str, reference: Value) -> bool:
    """Return whether a decimal equals the reference value rounded half up to its places.

    `reference` is the value of a `Ball`: a fraction, or a number of mpmath.
    """
    match = _DECIMAL.fullmatch(text)
    if not match or text in {"", "+", "-"}:
        return False
    scale = 10 ** len(match[1] or "")
    rounded = (int(abs(reference) * scale * 2) + 1) // 2
    return bool(Fraction(text) * scale == (rounded if reference >= 0 else -rounded))


def _compare_structured(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """Return the verdict where several values may be asked for: both sides are from `read_structured`.

    It calls itself for the parts of lists, points and tuples.
    """
    if answer.kind == "unreadable":
        verdict: Verdict = "unparseable" if answer.reason in UNREAD else "wrong"
        return Compared(verdict, answer.refusal or answer.reason)
    if "(" in answer.label or "(" in reference.label:  # W(n) = 1
        answer_function = _adapt_function_label(answer, reference)
        reference = _adapt_function_label(reference, answer)
        answer = answer_function
    kinds = (answer.kind, reference.kind)
    if _have_different_names(answer, reference):
        pair = Pair(answer.label, reference.label, "different_label")
        return Compared("wrong", "different_label", (pair,))
    if reference.kind == "ordered" and reference.brackets == "()" and not reference.label:
        # A point may be answered by its coordinates, or as a sum of unit vectors.
        answer = _read_coordinates(answer, len(reference.parts)) or answer
        if answer.kind == "expression" and answer.tree:
            return _compare_vectors(answer, reference)
    if reference.kind == "unordered" and answer.kind == "text" and not answer.label:
        answer = _read_letters(answer, reference)
    if answer.solution and reference.solution and kinds != ("ordered", "ordered"):
        if same_solutions(answer.solution, reference.solution):
            return Compared("correct", "same_solutions")
        return Compared("wrong", "different_solutions")
    if reference.kind == "equation" and answer.is_value and reference.parts and not answer.label:
        # The right side alone answers `y = 2x + 1`.
        return _compare_structured(answer, reference.parts[0], rounding)
    if reference.kind == "unordered":
        return _compare_lists(answer, reference, rounding)
    if answer.is_value and reference.is_value:
        compared = _compare_values(answer, reference, rounding)
        pair = Pair(_labelled_text(answer), _labelled_text(reference), compared.reason)
        return Compared(compared.verdict, compared.reason, (pair,))
    if answer.kind != reference.kind:
        return Compared("wrong", "different_form")
    if reference.kind in {"equation", "inequality"}:
        return _compare_relations(answer, reference)
    # Two numbers are an interval, whose brackets say which ends belong to it.
    if len(reference.parts) == 2 and answer.brackets != reference.brackets:
        return Compared("wrong", "different_brackets")
    return _compare_in_order(answer, reference, rounding)


def _have_different_names(answer: Answer, reference: Answer) -> bool:
    """Return whether both sides have a name, and not the same one.

    Values, two functions (`W(n) = 1` and `W(x) = 1`) and two equations may have other names.
    """
    if not reference.label or not answer.label:
        return False
    are_functions = "(" in reference.label and "(" in answer.label
    are_equations = answer.kind == reference.kind == "equation"
    if reference.is_value or are_functions or are_equations:
        return False
    return bare_name(answer.label) != bare_name(reference.label)


_OF_X = re.compile(r"[A-Za-z]\(([a-z])\)")


def _adapt_function_label(answer: Answer, opposite: Answer) -> Answer:
    """Return the answer with its label adapted, where one side defines `y` and the other `f(x)`.

    `y = 2x + 1` then becomes the value of `f(x)`, and `f(x) = 2x + 1` a value without a label,
    which is compared with that of `y`. Any other answer is returned as it is.
    """
    function = _OF_X.fullmatch(bare_name(answer.label))
    opposite_function = _OF_X.fullmatch(bare_name(opposite.label))
    if function and function[1] not in unknowns(answer.tree or ()):
        return answer
    if function and bare_name(opposite.label) == "y" and opposite.kind == "equation":
        return replace(answer, label="")
    if (
        opposite_function
        and bare_name(answer.label) == "y"
        and answer.kind == "equation"
        and answer.parts
    ):
        if opposite_function[1] not in unknowns(answer.parts[0].tree or ()):
            return answer
        return replace(answer.parts[0], label=opposite.label)
    return answer


def _read_coordinates(answer: Answer, dimensions: int) -> Answer | None:
    """Return `x = 3, y = -4` as the point `(3, -4)`, with that many dimensions.

    None for anything else.
    """
    if answer.kind != "unordered" or answer.label:
        return None
    names = [bare_name(part.label) for part in answer.parts]
    axes = list("xyz")[:dimensions]
    if sorted(names) != axes:
        return None
    parts = [answer.parts[names.index(axis)] for axis in axes]
    if not all(part.is_value for part in parts):
        return None
    return replace(
        answer,
        kind="ordered",
        parts=tuple(replace(part, label="") for part in parts),
        brackets="()",
        solution=None,
    )


def _compare_vectors(answer: Answer, reference: Answer) -> Compared:
    r"""Return the verdict on a sum of unit vectors, `3\mathbf{i} + 4\mathbf{j}` for `(3, 4)`."""
    axes = "ijk"[: len(reference.parts)]
    coordinates = [part.tree for part in reference.parts if part.number]
    if len(coordinates) != len(axes) or not unknowns(answer.tree or ()) <= set(axes):
        return Compared("wrong", "different_form")
    # The tuple as the sum that the answer should be: (3, 4) is 3 i + 4 j. Each term has its sign, 1.
    terms = []
    for coordinate, axis in zip(coordinates, axes, strict=True):
        terms.append((1, ("product", ("*", coordinate), ("*", ("unknown", axis)))))
    if same_function(answer.tree or (), ("sum", *terms)) == "equal":
        return Compared("correct", "same_value")
    return Compared("wrong", "different_expression")


def _read_letters(answer: Answer, reference: Answer) -> Answer:
    """Return `AC` as the two letters of a list such as `A, C`, or the answer itself."""
    letters = answer.text.replace(" ", "")
    alone = all(re.fullmatch("[A-Z]", part.text) and not part.label for part in reference.parts)
    if not alone or not re.fullmatch("[A-Z]{2,}", letters) or len(set(letters)) < len(letters):
        return answer
    return replace(answer, kind="unordered", parts=tuple(read_value(letter) for letter in letters))


def _labelled_text(answer: Answer) -> str:
    """Return the text of an answer, with its name where it is a single value: `x=5`."""
    return f"{answer.label}={answer.text}" if answer.label and answer.is_value else answer.text


def _compare_lists(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """Return the verdict where the reference answer is a list or set.

    Parts are compared in any order, unless names decide the order: where the answer is a tuple and
    the parts of the reference answer have names, or where only the reference answer has names.
    """
    labels = [part.label for part in reference.parts]
    if answer.brackets == "()" and any(labels):
        if all(part.label for part in answer.parts):
            return _compare_in_any_order(answer, reference, rounding)
        return _compare_in_order(answer, reference, rounding)
    if answer.is_value and len(reference.parts) == 1:
        return _compare_structured(answer, reference.parts[0], rounding)
    if answer.kind != "unordered":
        return Compared("wrong", "different_form")
    if not all(labels) or any(part.label for part in answer.parts):
        return _compare_in_any_order(answer, reference, rounding)
    if answer.label:  # AB = 4, 5 for AB = 4, CD = 5
        return Compared("wrong", "different_label")
    return _compare_in_order(answer, reference, rounding)


def _compare_in_order(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """Compare the parts by position, up to the first wrong one."""
    if len(answer.parts) != len(reference.parts):
        return Compared("wrong", "different_length")
    pairs = []
    if _names_contradict_order(answer, reference):
        return Compared("wrong", "different_label")
    for part, expected in zip(answer.parts, reference.parts, strict=True):
        compared = _compare_structured(part, expected, rounding)
        pairs.append(Pair(_labelled_text(part), _labelled_text(expected), compared.reason))
        if compared.verdict != "correct":
            return Compared(compared.verdict, "different_part", tuple(pairs))
    return Compared("correct", "same_parts", tuple(pairs))


def _names_contradict_order(answer: Answer, reference: Answer) -> bool:
    """Return whether the names of the answer contradict comparing its parts by position.

    They do if they are in another order than those of the reference answer, or if the answer as a
    whole has the name of one part. A reference answer without names has the order x, y, z.
    """
    names = [bare_name(part.label) for part in answer.parts]
    expected = [bare_name(part.label) for part in reference.parts]
    order = expected if any(expected) else list("xyz")
    positions = [order.index(name) for name in names if name and name in order]
    return positions != sorted(positions) or (
        answer.label != "" and bare_name(answer.label) in expected
    )


def _compare_in_any_order(answer: Answer, reference: Answer, rounding: bool) -> Compared:
    """Match each part of the answer with a part of the reference answer that is not matched yet.

    Parts with different names do not match where all parts of the reference answer have one.
    """
    if len(answer.parts) != len(reference.parts):
        return Compared("wrong", "different_length")
    by_label = all(part.label for part in reference.parts)
    remaining = list(reference.parts)
    pairs: list[Pair] = []
    for part in answer.parts:
        label = bare_name(part.label)
        partner = None
        for candidate in remaining:
            if by_label and label != bare_name(candidate.label):
                continue
            if _compare_structured(part, candidate, rounding).verdict == "correct":
                partner = candidate
                break
        if partner is None:
            pairs.append(Pair(_labelled_text(part), "-", "different_part"))
            return Compared("wrong", "different_part", tuple(pairs))
        remaining.remove(partner)
        pairs.append(Pair(_labelled_text(part), _labelled_text(partner), "same_part"))
    return Compared("correct", "same_parts", tuple(pairs))


def _compare_relations(answer: Answer, reference: Answer) -> Compared:
    """Return the verdict on equations or inequalities, which may be in any order.

    Each relation compares a tree with 0. Two are the same if their trees differ by a factor that is
    not 0, which for `<` and `<=` has to be positive.
    """
    if len(answer.relations) != len(reference.relations):
        return Compared("wrong", "different_form")
    remaining = list(reference.relations)
    for sign, tree in answer.relations:
        for relation in remaining:
            expected_sign, expected_tree = relation
            if sign != expected_sign or unknowns(tree) != unknowns(expected_tree):
                continue
            factor = factor_between(tree, expected_tree)
            if factor > 0 or (factor and sign in {"=", "!="}):
                remaining.remove(relation)
                break
        else:
            return Compared("wrong", f"different_{reference.kind}")
    return Compared("correct", f"same_{reference.kind}")
