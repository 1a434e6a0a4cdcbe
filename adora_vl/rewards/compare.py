"""Decides whether an answer is the same as a reference answer.

The type of the reference answer selects the rule: here are those for points, lists, equations and
other answers of several values, and `compare_values` has those for single values. Each gives a
verdict and the name of the rule that decided, which `explain.RULE_IN_WORDS` puts in words.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from adora_vl.rewards.answer import NO_VALUE_REASONS, Answer, parse_value
from adora_vl.rewards.compare_values import (
    ComparedPart,
    ComparisonResult,
    compare_values,
    correct_result,
    is_rounding_of,
    result_without_value,
    wrong_result,
)
from adora_vl.rewards.grammar import unknown_names
from adora_vl.rewards.numeric import same_function, sign_of_factor_between
from adora_vl.rewards.relations import ChainedNumber, chain_of_numbers, undecorated_name
from adora_vl.rewards.solutions import same_solutions
from adora_vl.rewards.structured import parse_structured
from adora_vl.rewards.value_names import NAMED_VALUE_PATTERN

_DECIMAL_COMMA_PATTERN = re.compile(r"[^,;0-9]*[0-9]+,(?![0-9]{3}(?![0-9]))[0-9]+[^,;]*")
# `1.234,5`
_THOUSANDS_AND_DECIMAL_COMMA_PATTERN = re.compile(r"[+-]?[0-9]{1,3}(?:[. ][0-9]{3})+,[0-9]+")
_APPROXIMATION_PATTERN = re.compile(r"(?:\\approx(?![A-Za-z])|≈)([^=<>≈]+)")
# A decimal of at least three digits, such as 3.14, which is probably rounded. 0.5 may be exact.
_ROUNDED_DECIMAL_PATTERN = re.compile(r"-?(?=(?:\.?[0-9]){3,})[0-9]+\.[0-9]+")
_NUMBER_IN_DIGITS_PATTERN = re.compile(r"[+-]?[0-9]*\.?[0-9]+")
# Hours, grams or litres, if the other side of the comparison has a unit.
_LETTER_BEHIND_NUMBER_PATTERN = re.compile(r"([+-]?[0-9.]*[0-9]) ?([hgLl])")
_FUNCTION_NAME_PATTERN = re.compile(r"[A-Za-z]\(([a-z])\)")


def compare(answer: Answer, reference: Answer, rounding: bool = False) -> ComparisonResult:
    """Compare an answer with a reference answer.

    Args:
        answer: from `parse_value`. If the reference answer has several values or a name, the answer
            is parsed again by `parse_structured`.
        reference: from `parse_reference`.
        rounding: whether a decimal may be the reference answer rounded.
    """
    if reference.is_structured:
        return _compare_structured(
            parse_structured(answer), parse_structured(reference), rounding=rounding
        )
    # No answer can equal a reference answer that cannot be read. If it is merely not in the grammar
    # (`not_read`), the answer may still have the same text, which `compare_values` finds out.
    if reference.type == "unreadable" and reference.reason != "not_read":
        return wrong_result(f"gold_{reference.refusal_reason or reference.reason}")
    # The answer may show its working: `3 + 4 = 7`, where each number of the chain is compared.
    if reference.type == "number" and answer.reason in {"equation", "relation"}:
        chain = chain_of_numbers(answer.text_with_names)
        # `x \approx 5` is a value with a name, which `_without_name` reads below.
        is_single_approximation = len(chain) == 1 and chain[0].sign == "~"
        if chain and not is_single_approximation:
            return _compare_chain(chain, reference)
    # `3,5` is 3.5 for a number, and `x = 5` is 5.
    value = _parse_decimal_comma(answer) if reference.number else None
    if value is None:
        value = _without_name(answer, reference)
    return compare_values(
        value, _with_letter_as_unit(reference, opposite=answer), rounding=rounding
    )


def _compare_chain(chain: Sequence[ChainedNumber], reference: Answer) -> ComparisonResult:
    r"""Return the verdict on a chain such as `AB = 1.8 \cdot 9 / 1.5 \approx 10.8`.

    It is correct if every number agrees with the reference answer, and at least one is equal to it.
    A number agrees in one of three ways:

    - It is equal to the reference answer.
    - It stands behind `\approx` and is the reference answer rounded to its own digits.
    - The chain has an `\approx`, the reference answer is a decimal, and rounding the number to the
      digits of that decimal gives it: `20\sqrt{3}` in `20\sqrt{3} \approx 34.64`, for 34.64.

    Args:
        chain: from `chain_of_numbers`.
        reference: a number.
    """
    has_approximation = any(link.sign == "~" for link in chain)
    reference_may_be_rounded = "." in reference.text and has_approximation
    any_is_exact = False
    for sign, answer in chain:
        # `3 + 4` may have arithmetic to be done here, since the next number of the chain does it.
        number = answer.number and replace(answer.number, is_unevaluated=False)
        result = compare_values(replace(answer, number=number), reference, rounding=False)
        if result.verdict == "correct":
            any_is_exact = True
            continue
        if sign == "~":
            agrees_to_digits = reference.number and is_rounding_of(
                answer.text, reference.number.value
            )
        else:
            agrees_to_digits = (
                reference_may_be_rounded
                and answer.number
                and is_rounding_of(reference.text, answer.number.value)
            )
        # A number that does not agree makes the chain wrong. If the unit differs, or the number
        # cannot be compared, the result says that instead.
        if result.reason == "different_number" and not agrees_to_digits:
            return wrong_result("chain_differs")
        if result.reason == "different_unit" or not agrees_to_digits:
            return result
    if not any_is_exact:
        return wrong_result("chain_differs")
    return correct_result("same_number")


def _parse_decimal_comma(answer: Answer) -> Answer | None:
    """Return an answer such as `3,5` or `1.234,5` with its comma read as a decimal point.

    Returns None for any other answer. It is called only for a reference answer that is a number:
    then `3,5` cannot be meant as two values.
    """
    if answer.reason != "enumeration":
        return None
    text = answer.text
    if _THOUSANDS_AND_DECIMAL_COMMA_PATTERN.fullmatch(text):
        text = re.sub("[. ]", "", text)
    elif not _DECIMAL_COMMA_PATTERN.fullmatch(text):
        return None
    return replace(parse_value(text.replace(",", ".")), unit=answer.unit)


def _without_name(answer: Answer, reference: Answer) -> Answer:
    r"""Return the value of an answer with a name before it: `2x + 1` for `y = 2x + 1`.

    An answer without a name is returned itself. `x \approx 5` is 5 if the reference answer is a
    number in digits.
    """
    if answer.reason not in NO_VALUE_REASONS or answer.type == "percentage":
        value = _with_letter_as_unit(answer, opposite=reference)
        # The answer is a value already. The canonical form may have taken a name off, which
        # `text_with_names` still has.
        name = answer.text_with_names.partition("=")[0] if "=" in answer.raw else ""
    else:
        name_and_value = _split_name(answer.text_with_names, reference)
        if name_and_value is None:
            return answer
        name, value_text = name_and_value
        value = parse_value(value_text)
    # `f(x) = f(x)` and `x = x + 1` name no value, since the name occurs in the value itself.
    has_name_inside = name == value.text or name in unknown_names(value.tree)
    if value.type == "expression" and has_name_inside:
        return Answer(type="unreadable", text=answer.text, reason="equation")
    return value


def _split_name(text: str, reference: Answer) -> tuple[str, str] | None:
    r"""Split a text such as `y=2x+1` into its name `y` and the text of its value, `2x+1`.

    Approximations are read only for some reference answers:

    - `\approx 3.14` has an empty name. The reference answer has to be a decimal of three digits or
      more, which is probably rounded itself.
    - `x \approx 5` has the name `x`. The reference answer has to be a number in digits.

    Returns None for any other text.
    """
    approximation = _APPROXIMATION_PATTERN.fullmatch(text)
    if approximation and _ROUNDED_DECIMAL_PATTERN.fullmatch(reference.text):
        return "", approximation[1]
    named_value = NAMED_VALUE_PATTERN.fullmatch(text)
    if named_value is None:
        return None
    name, sign, value_text = named_value.groups()
    if sign != "=" and not _NUMBER_IN_DIGITS_PATTERN.fullmatch(reference.text):
        return None
    return name, value_text


def _with_letter_as_unit(answer: Answer, opposite: Answer) -> Answer:
    """Return one side of a comparison with its last letter read as a unit: litres in `5 L`.

    The letter is a unit only if the opposite side has a unit. Otherwise it stays an unknown, and
    the side is returned as it is.
    """
    if answer.unit or not opposite.unit:
        return answer
    letter = _LETTER_BEHIND_NUMBER_PATTERN.fullmatch(answer.text_with_names)
    return parse_value(rf"{letter[1]}\text{{{letter[2]}}}") if letter else answer


def _compare_structured(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
    """Return the verdict where the reference answer is a list, point, relation or named value.

    Both sides are from `parse_structured`. The parts of lists, points and tuples are compared by
    the same function.
    """
    if answer.type == "unreadable":
        return result_without_value(answer)
    named_answer = _adapt_function_name(answer, opposite=reference)
    named_reference = _adapt_function_name(reference, opposite=answer)
    if _have_different_names(named_answer, named_reference):
        names = ComparedPart(
            answer=named_answer.name, reference=named_reference.name, reason="different_label"
        )
        return wrong_result("different_label", names)
    # A point may be answered as a sum of unit vectors.
    if _is_point(named_reference) and named_answer.type == "expression" and named_answer.tree:
        return _compare_vectors(named_answer, named_reference)
    converted_answer = _convert_to_type_of(named_reference, named_answer)
    return _compare_by_type(converted_answer, named_reference, rounding=rounding)


def _is_point(answer: Answer) -> bool:
    """Return whether an answer is a point or tuple without a name: `(3, -4)`, not `A(3, -4)`."""
    return answer.type == "ordered" and answer.brackets == "()" and not answer.name


def _convert_to_type_of(reference: Answer, answer: Answer) -> Answer:
    """Return the answer with the `type` of the reference answer, where it only spells it otherwise.

    - `x = 3, y = -4` becomes the point (3, -4) if the reference answer is a point.
    - `AC` becomes the list `A, C` if the reference answer is a list of letters.

    Any other answer is returned as it is.
    """
    if _is_point(reference):
        return _convert_to_point(answer, len(reference.parts)) or answer
    if reference.type == "unordered" and answer.type == "text" and not answer.name:
        return _convert_to_list_of_letters(answer, reference)
    return answer


def _compare_by_type(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
    """Return the verdict on an answer by the rule for the `type` of its reference answer.

    The types are single values, `ordered` (points, tuples, intervals), `unordered` (lists, sets),
    `equation` and `inequality`. An answer of another type than the reference answer is wrong, with
    the exceptions below.
    """
    # Both `(1, 2)` and `(1, 3)` may be points or intervals. Two such pairs are compared part by
    # part.
    are_ordered = answer.type == reference.type == "ordered"
    # A solution is the set of numbers that an inequality or interval allows.
    if answer.solution and reference.solution and not are_ordered:
        if same_solutions(answer.solution, reference.solution):
            return correct_result("same_solutions")
        return wrong_result("different_solutions")
    if reference.type == "equation" and answer.is_value and reference.parts and not answer.name:
        # `2x + 1` is right for `y = 2x + 1`: the right side, its only part, is enough.
        return _compare_structured(answer, reference.parts[0], rounding=rounding)
    if reference.type == "unordered":
        return _compare_lists(answer, reference, rounding=rounding)
    if answer.is_value and reference.is_value:
        result = compare_values(answer, reference, rounding=rounding)
        return replace(result, pairs=(_compared_part(answer, reference, result.reason),))
    if answer.type != reference.type:
        return wrong_result("different_form")
    if reference.type in {"equation", "inequality"}:
        return _compare_relations(answer, reference)
    # With two parts it may be an interval, whose brackets say whether its ends belong to it.
    if len(reference.parts) == 2 and answer.brackets != reference.brackets:
        return wrong_result("different_brackets")
    return _compare_in_order(answer, reference, rounding=rounding)


def _have_different_names(answer: Answer, reference: Answer) -> bool:
    """Return whether both sides have names, and the difference of the names makes the answer wrong.

    `P(3, 4)` is wrong for `Q(3, 4)`. The names may differ if the reference answer is a single value
    (`AB = 5`), if both sides are functions (`W(n) = 1` and `W(x) = 1`), or if both are equations.
    """
    if not reference.name or not answer.name:
        return False
    are_functions = "(" in reference.name and "(" in answer.name
    are_equations = answer.type == reference.type == "equation"
    if reference.is_value or are_functions or are_equations:
        return False
    return undecorated_name(answer.name) != undecorated_name(reference.name)


def _adapt_function_name(answer: Answer, opposite: Answer) -> Answer:
    """Adapt the name of one side, if one side defines `y` and the other a function `f(x)`.

    `y = 2x + 1` defines the value named `y`. Two cases make the sides comparable:

    - `f(x) = 2x + 1` opposite to `y = ...` becomes the value `2x + 1` without a name.
    - `y = 2x + 1` opposite to `f(x) = ...` becomes the value `2x + 1` with the name `f(x)`.

    In both cases the argument `x` has to occur in the value. Any other side is returned as it is.
    """
    name = undecorated_name(answer.name)
    opposite_name = undecorated_name(opposite.name)
    function_name = _FUNCTION_NAME_PATTERN.fullmatch(name)
    if function_name:
        argument = function_name[1]
        depends_on_argument = argument in unknown_names(answer.tree)
        is_y_opposite = opposite_name == "y" and opposite.type == "equation"
        return replace(answer, name="") if depends_on_argument and is_y_opposite else answer
    opposite_function_name = _FUNCTION_NAME_PATTERN.fullmatch(opposite_name)
    if opposite_function_name and name == "y" and answer.type == "equation" and answer.parts:
        right_side = answer.parts[0]  # the only part of an equation
        argument = opposite_function_name[1]
        if argument in unknown_names(right_side.tree):
            return replace(right_side, name=opposite.name)
    return answer


def _convert_to_point(answer: Answer, dimensions: int) -> Answer | None:
    """Return the list `x = 3, y = -4` as the point `(3, -4)`, in any order of its names.

    The names have to be x and y, or x, y and z, as many as `dimensions` says. Returns None for
    anything else, such as `x = 3, -4`.
    """
    if answer.type != "unordered" or answer.name:
        return None
    names = [undecorated_name(part.name) for part in answer.parts]
    axes = ["x", "y", "z"][:dimensions]
    if sorted(names) != axes:
        return None
    parts = [answer.parts[names.index(axis)] for axis in axes]
    if not all(part.is_value for part in parts):
        return None
    return replace(
        answer,
        type="ordered",
        parts=tuple(replace(part, name="") for part in parts),
        brackets="()",
        solution=None,
    )


def _compare_vectors(answer: Answer, reference: Answer) -> ComparisonResult:
    r"""Return the verdict on a sum of unit vectors, `3\mathbf{i} + 4\mathbf{j}` for `(3, 4)`.

    The reference answer is a tuple of numbers with at most three parts.
    """
    assert answer.tree is not None, "an expression has a tree"
    axes = "ijk"[: len(reference.parts)]
    has_axis_for_each_part = len(axes) == len(reference.parts)
    are_numbers = all(part.plain_number for part in reference.parts)
    has_other_unknowns = not unknown_names(answer.tree) <= set(axes)
    if not has_axis_for_each_part or not are_numbers or has_other_unknowns:
        return wrong_result("different_form")
    # The tuple as the sum that the answer should be: (3, 4) is 3 i + 4 j.
    terms = []
    for part, axis in zip(reference.parts, axes, strict=True):
        product = ("product", ("*", part.tree), ("*", ("unknown", axis)))
        terms.append((1, product))  # a term of a sum is its sign and a tree
    if same_function(answer.tree, ("sum", *terms)) == "equal":
        return correct_result("same_value")
    return wrong_result("different_expression")


def _convert_to_list_of_letters(answer: Answer, reference: Answer) -> Answer:
    """Return `AC` as the list `A, C`, if the reference answer is a list of letters.

    Any other answer is returned as it is, and so is one that repeats a letter, such as `AA`.
    """
    letters = answer.text.replace(" ", "")
    is_list_of_letters = all(
        re.fullmatch("[A-Z]", part.text) and not part.name for part in reference.parts
    )
    repeats_a_letter = len(set(letters)) < len(letters)
    if not is_list_of_letters or not re.fullmatch("[A-Z]{2,}", letters) or repeats_a_letter:
        return answer
    return replace(answer, type="unordered", parts=tuple(parse_value(letter) for letter in letters))


def _compared_part(part: Answer, reference_part: Answer | None, reason: str) -> ComparedPart:
    """Return how a part was compared; `reference_part` is None where no part is its partner."""
    reference_text = "-" if reference_part is None else _text_with_name(reference_part)
    return ComparedPart(answer=_text_with_name(part), reference=reference_text, reason=reason)


def _text_with_name(answer: Answer) -> str:
    """Return the text of an answer; for a single value with its name: `x=5`."""
    return f"{answer.name}={answer.text}" if answer.name and answer.is_value else answer.text


def _compare_lists(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
    """Return the verdict where the reference answer is a list or set.

    The parts of the answer may be in any order, with one exception: if the reference answer is
    `AB = 4, CD = 5` and the answer has no names, it has to be in the same order, as `4, 5` or
    `(4, 5)`.
    """
    reference_names = [part.name for part in reference.parts]
    answer_names = [part.name for part in answer.parts]
    # The answer is a tuple, such as (4, 5), and the reference answer has names.
    if answer.brackets == "()" and any(reference_names):
        if all(answer_names):
            return _compare_in_any_order(answer, reference, rounding=rounding)
        return _compare_in_order(answer, reference, rounding=rounding)
    if answer.is_value and len(reference.parts) == 1:
        return _compare_structured(answer, reference.parts[0], rounding=rounding)
    if answer.type != "unordered":
        return wrong_result("different_form")
    if not all(reference_names) or any(answer_names):
        return _compare_in_any_order(answer, reference, rounding=rounding)
    # Here the parts of the reference answer have names, and those of the answer have none.
    if answer.name:  # AB = 4, 5: one name for both values
        return wrong_result("different_label")
    return _compare_in_order(answer, reference, rounding=rounding)


def _compare_in_order(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
    """Compare each part of the answer with the part of the reference at the same position.

    The comparison ends at the first wrong part.
    """
    if len(answer.parts) != len(reference.parts):
        return wrong_result("different_length")
    if _names_contradict_order(answer, reference):
        return wrong_result("different_label")
    pairs = []
    for part, reference_part in zip(answer.parts, reference.parts, strict=True):
        result = _compare_structured(part, reference_part, rounding=rounding)
        pairs.append(_compared_part(part, reference_part, result.reason))
        if result.verdict != "correct":
            return replace(result, reason="different_part", pairs=tuple(pairs))
    return correct_result("same_parts", *pairs)


def _names_contradict_order(answer: Answer, reference: Answer) -> bool:
    """Return whether the names of the answer contradict comparing its parts by position.

    They do in two cases:

    - They are in another order than the names of the reference answer: `(y = -4, x = 3)` for
      `(x, y) = (3, -4)`. A reference answer without names has the order x, y, z.
    - The whole answer has the name of one part of the reference answer.
    """
    answer_names = [undecorated_name(part.name) for part in answer.parts]
    reference_names = [undecorated_name(part.name) for part in reference.parts]
    order = reference_names if any(reference_names) else ["x", "y", "z"]
    # The position of each name of the answer in that order. Parts without a name fit anywhere.
    positions = [order.index(name) for name in answer_names if name and name in order]
    if positions != sorted(positions):
        return True
    return answer.name != "" and undecorated_name(answer.name) in reference_names


def _compare_in_any_order(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
    """Match each part of the answer with a part of the reference answer that is not matched yet.

    If all parts of the reference answer have names, only parts with the same name match: `AB = 4`
    does not match `CD = 4`.
    """
    if len(answer.parts) != len(reference.parts):
        return wrong_result("different_length")
    must_have_same_name = all(part.name for part in reference.parts)
    remaining = list(reference.parts)
    pairs: list[ComparedPart] = []
    for part in answer.parts:
        name = undecorated_name(part.name)
        partner = None
        for candidate in remaining:
            if must_have_same_name and name != undecorated_name(candidate.name):
                continue
            result = _compare_structured(part, candidate, rounding=rounding)
            if result.verdict == "correct":
                partner = candidate
                break
        if partner is None:
            pairs.append(_compared_part(part, reference_part=None, reason="different_part"))
            return wrong_result("different_part", *pairs)
        remaining.remove(partner)
        pairs.append(_compared_part(part, partner, "same_part"))
    return correct_result("same_parts", *pairs)


def _compare_relations(answer: Answer, reference: Answer) -> ComparisonResult:
    """Return the verdict on equations or inequalities, which may be in any order.

    Each relation is a sign and the tree that it compares with 0. Two relations are the same if one
    tree is a constant multiple of the other: `4x + 8y = 6` is `2x + 4y = 3`. The factor must not be
    0, and for `<` and `<=` it has to be positive.
    """
    if len(answer.relations) != len(reference.relations):
        return wrong_result("different_form")
    remaining = list(reference.relations)
    for sign, tree in answer.relations:
        for relation in remaining:
            reference_sign, reference_tree = relation
            if sign != reference_sign or unknown_names(tree) != unknown_names(reference_tree):
                continue
            factor_sign = sign_of_factor_between(tree, reference_tree)  # 0 without such a factor
            may_be_negative = sign in {"=", "!="}
            if factor_sign == 1 or (factor_sign == -1 and may_be_negative):
                remaining.remove(relation)
                break
        else:
            return wrong_result(f"different_{reference.type}")
    return correct_result(f"same_{reference.type}")
