r"""Reads chains of numbers, equations and inequalities, for `structured`.

An equation or inequality keeps the tree that it compares with 0: `2x - 1 - y` for `2x - 1 = y`. An
inequality in one unknown also gets its solution.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Literal, NamedTuple

from adora_vl.rewards.answer import Answer, parse_value, parse_value_or_raise
from adora_vl.rewards.brackets import split_outside_brackets
from adora_vl.rewards.grammar import ExpressionTree, ParseError, replace_node, unknown_names
from adora_vl.rewards.numeric import is_constant, same_number, solve_linear
from adora_vl.rewards.solutions import (
    REVERSED_SIGN,
    JoinedConditions,
    SingleCondition,
    Solution,
    excludes_some_but_not_all,
)
from adora_vl.rewards.value_names import FIGURE_NAME_PATTERN, VALUE_NAME_PATTERN

MAX_CHAIN_SIDES = 5  # a chain of inequalities such as `1 < x < 3` has three sides
# Each spelling of a sign, and the sign that it stands for.
RELATION_SIGN_BY_SPELLING = {
    **dict.fromkeys(("<=", "≤", r"\leqslant", r"\leq", r"\le"), "<="),
    **dict.fromkeys((">=", "≥", r"\geqslant", r"\geq", r"\ge"), ">="),
    **dict.fromkeys(("!=", "≠", r"\neq", r"\ne"), "!="),
    **dict.fromkeys((r"\approx", "≈"), "~"),
    **dict.fromkeys(("<", r"\lt"), "<"),
    **dict.fromkeys((">", r"\gt"), ">"),
    "=": "=",
}
RELATION_SIGN_PATTERN = re.compile(
    "|".join(
        re.escape(sign) + ("(?![A-Za-z])" if sign[0] == "\\" else "")
        for sign in RELATION_SIGN_BY_SPELLING
    )
)
_FUNCTION_VALUE_PATTERN = re.compile(r"[f-hp-wA-Z]\([a-z0-9]{1,3}\)")
# A word has at least four letters, or is `is`, `no` or `not`: `bh` and `lwh` are products in a
# formula.
_WORD_PATTERN = re.compile(r"(?<![\\a-z])(?:[a-z]{4,}|is|no|not)(?![a-z])")
_ABSOLUTE_VALUE_PATTERN = re.compile(r"\|([^|]+)\|")
_NAME_DECORATION_PATTERN = re.compile(
    r"^(?i:length|measure) ?of |^m(?=\\)|\\(?:overline|angle)(?![a-z])|[\s{}_]"
)


class ChainedNumber(NamedTuple):
    """A number in a chain of equal numbers, and the sign before it.

    The sign is `=`, or `~` for approximately equal. The first number has `=`.
    """

    sign: str
    answer: Answer


def parse_chain(sides: Sequence[str]) -> Answer:
    """Parse a chain of a name and equal numbers: `AB = 3 + 4 = 7` is the value 7 named `AB`.

    `sides` are the texts between the equals signs, here `AB`, `3 + 4` and `7`. Raises
    `ParseError`: `chain_differs` for numbers that are not equal, `equation` for any other chain.
    """
    if not VALUE_NAME_PATTERN.fullmatch(sides[0]):
        raise ParseError("equation")
    values = [parse_value_or_raise(side) for side in sides[1:]]
    numbers = [value.plain_number for value in values if value.plain_number]
    if len(numbers) < len(values):
        raise ParseError("equation")
    if not all(same_number(number, numbers[-1]) for number in numbers):
        raise ParseError("chain_differs")
    return replace(values[-1], name=sides[0])


def chain_of_numbers(text: str) -> list[ChainedNumber]:
    r"""Return the numbers in a chain of equal numbers, in order.

    `AB = 1.8 \cdot 9 / 1.5 \approx 10.8` gives `1.8\cdot9/1.5` with the sign `=`, and `10.8` with
    the sign `~`. A chain begins with a name or a number and ends with a number. Between them there
    may be formulas, which are left out. Any other text gives [], and so does `9 = 9`, which shows
    no working.
    """
    try:
        sides, spelled_signs = split_outside_brackets(text, RELATION_SIGN_PATTERN)
    except ParseError:
        return []
    signs = [RELATION_SIGN_BY_SPELLING[sign] for sign in spelled_signs]
    # A chain has at least one sign, no empty side, and no sign of an inequality.
    if len(sides) < 2 or not all(sides) or set(signs) - {"=", "~"}:
        return []
    values = [parse_value(side) for side in sides]
    for side, value in zip(sides, values, strict=True):
        has_words = value.type == "unreadable" or _WORD_PATTERN.search(value.text)
        # Words cannot be checked, so a side in words is refused, unless it is a name.
        if has_words and not _is_name_of_one_value(side):
            return []
    if values[0].type != "number" and not _is_name_of_one_value(sides[0]):
        return []
    result = values[-1].plain_number
    # The chain has to end in a number that is worked out, unlike `AB = 3 + 4`.
    if result is None or result.is_unevaluated:
        return []
    numbers = []
    # The first side has no sign before it, and counts as one behind an equals sign.
    for sign, value in zip(["=", *signs], values, strict=True):
        if value.type == "number":
            numbers.append(ChainedNumber(sign=sign, answer=value))
    all_in_digits = all(re.fullmatch(r"[+-]?[0-9.]+", link.answer.text) for link in numbers)
    is_without_working = len(numbers) == len(sides) and all_in_digits  # `9 = 9`
    return [] if is_without_working else numbers


def _is_name_of_one_value(text: str) -> bool:
    """Return whether a text can be the name of one value.

    `x`, `AB`, `AB:CD`, `sin A` and `\\angle ABC` can, which are what `VALUE_NAME_PATTERN` takes for
    names. `|x|`, which it takes too, cannot, since `|x| = 5` has two solutions.
    """
    is_name = VALUE_NAME_PATTERN.fullmatch(text) is not None
    is_absolute_value = re.fullmatch(r"\|[a-z]\|", text) is not None
    return is_name and not is_absolute_value


def _parse_side(text: str) -> ExpressionTree:
    """Return the tree of one side of an equation or inequality.

    A name such as `AB` or `f(2)` becomes an unknown: `("unknown", "AB")`. Raises `ParseError` for
    a side that is neither a name nor in the grammar.
    """
    tree = parse_value(text).tree
    # `f(2)` could also be read as the product of f and 2.
    is_function_value = _FUNCTION_VALUE_PATTERN.fullmatch(text) is not None
    is_name = tree is None and VALUE_NAME_PATTERN.fullmatch(text) is not None
    if is_function_value or is_name:
        return ("unknown", undecorated_name(text))
    if tree is None:
        raise ParseError("relation")
    return tree


def _subtract_sides(left_side: ExpressionTree, right_side: ExpressionTree) -> ExpressionTree:
    """Return the tree of the left side minus the right side.

    Raises `ParseError` if the difference has the same value for all values of the unknowns: then
    the relation holds always, as `x < x + 1`, or never.
    """
    tree: ExpressionTree = ("sum", (1, left_side), (-1, right_side))
    if not unknown_names(tree) or is_constant(tree):
        raise ParseError("always_true")
    return tree


def parse_equation(text: str, sides: Sequence[str]) -> Answer:
    """Return an equation as the tree that it compares with 0: `2x = 6` as `2x - 6`."""
    tree = _subtract_sides(_parse_side(sides[0]), _parse_side(sides[1]))
    return Answer(type="equation", text=text, relations=(("=", tree),))


def parse_inequality(text: str, sides: Sequence[str], signs: Sequence[str]) -> Answer:
    """Return an inequality, or a chain of them such as `1 < x < 3`.

    The answer is one of these:

    - One unknown, and linear in it or in one absolute value such as `|2x-1|`: the answer has a
      `solution`, the numbers that solve it. For `1 < x <= 3` it says x > 1 and x <= 3.
    - Any other: the answer has `relations`. Each is `<`, `<=` or `!=` with the tree that it
      compares with 0. `a + b > c` gives `("<", c - (a + b))`.

    Raises `ParseError` for a text that cannot be read, and if no number or every number solves
    the inequality.
    """
    relations = _compare_with_zero(sides, signs)
    unsolved_answer = Answer(type="inequality", text=text, relations=tuple(relations))
    names = frozenset[str]().union(*(unknown_names(tree) for _, tree in relations))
    for name in names:
        # Among several unknowns `|x|` may be one, as in `|x| < a`. `|x-y|` may not: as `|y-x|` it
        # would be another unknown.
        is_absolute = name.startswith("|")
        if len(names) > 1 and is_absolute and not VALUE_NAME_PATTERN.fullmatch(name):
            raise ParseError("relation")
    if len(names) > 1:
        return unsolved_answer
    (name,) = names
    if name.startswith("|"):
        return _solve_absolute_inequality(text, relations, name)
    conditions = []
    for sign, tree in relations:
        condition = _solve_condition(sign, tree)
        if condition is None:  # not linear
            return unsolved_answer
        conditions.append(condition)
    return _inequality_with_solution(text, name, conditions)


def _compare_with_zero(
    sides: Sequence[str], signs: Sequence[str]
) -> list[tuple[str, ExpressionTree]]:
    """Return the relations of a chain, each as `<`, `<=` or `!=` and the tree compared with 0.

    `1 < x <= 3` gives `("<", 1 - x)` and `("<=", x - 3)`. The sides of `>` and `>=` are exchanged:
    `x > 1` gives `("<", 1 - x)` too. Raises `ParseError` for any other sign, and for a side that
    cannot be read.
    """
    if len(sides) > MAX_CHAIN_SIDES:
        raise ParseError("too_large")
    trees = [_parse_side_of_inequality(side) for side in sides]
    relations = []
    for left_tree, sign, right_tree in zip(trees, signs, trees[1:], strict=False):
        if sign not in REVERSED_SIGN:
            raise ParseError("relation")
        if sign in {">", ">="}:
            relations.append((REVERSED_SIGN[sign], _subtract_sides(right_tree, left_tree)))
        else:
            relations.append((sign, _subtract_sides(left_tree, right_tree)))
    return relations


def _inequality_with_solution(text: str, name: str, conditions: Sequence[Solution]) -> Answer:
    """Return the answer for an inequality: all `conditions` hold for the unknown `name`.

    Raises `ParseError` where no number or every number solves it. The reason is `always_true` in
    both cases, since neither says anything of the unknown.
    """
    solution = JoinedConditions(word="and", parts=tuple(conditions))
    if not excludes_some_but_not_all(solution):
        raise ParseError("always_true")
    return Answer(type="inequality", text=text, name=name, solution=solution)


def _solve_condition(sign: str, tree: ExpressionTree) -> SingleCondition | None:
    """Solve a relation of an expression tree to 0 for the only unknown of the tree.

    `2 - x < 0` gives the condition `> 2`. Returns None if the tree is not linear in the unknown.
    """
    zero_and_slope_sign = solve_linear(tree)
    if zero_and_slope_sign is None:
        return None
    zero, slope_sign = zero_and_slope_sign
    # A negative slope, as `2 - x` has it, reverses the sign.
    sign_of_unknown = sign if slope_sign > 0 else REVERSED_SIGN[sign]
    return SingleCondition(sign=sign_of_unknown, number=zero)


def _parse_side_of_inequality(text: str) -> ExpressionTree:
    """Return the tree of one side of an inequality, in which an absolute value is an unknown.

    `2|x-1|+3` has the unknown `|x-1|`. A length loses its bars: `|AB|` is the unknown `AB`. Raises
    `ParseError` for a side that cannot be read.
    """
    absolute = _ABSOLUTE_VALUE_PATTERN.search(text)
    if absolute is None:
        return _parse_side(text)
    # The grammar has no bars, so an unused letter stands for the absolute value while it is read.
    unused_letters = [letter for letter in ascii_lowercase if letter not in text]
    if not unused_letters:
        raise ParseError("relation")
    letter = unused_letters[0]
    tree = _parse_side(f"{text[: absolute.start()]}({letter}){text[absolute.end() :]}")
    # `f|x|` has become `f(a)`, which is read as a name in which `a` is no unknown.
    if letter not in unknown_names(tree):
        raise ParseError("relation")
    is_length = FIGURE_NAME_PATTERN.fullmatch(absolute[1]) is not None
    name = absolute[1] if is_length else absolute[0]
    unknown = ("unknown", undecorated_name(name))
    return replace_node(tree, ("unknown", letter), unknown)


def _solve_absolute_inequality(
    text: str, relations: Sequence[tuple[str, ExpressionTree]], absolute: str
) -> Answer:
    """Return an inequality in one absolute value, solved for the unknown between its bars.

    `|2x-1| < 3` means `2x-1 < 3` and `-(2x-1) < 3`, so that x is between -1 and 2. `|2x-1| > 3`
    means `2x-1 > 3` or `-(2x-1) > 3`.

    Args:
        text: the inequality.
        relations: its relations to 0, with the absolute value as their only unknown.
        absolute: the name of that unknown, `|2x-1|`.

    Raises `ParseError` for a tree that is not linear, for the sign `!=`, and for an upper bound
    of 0 or less.
    """
    inside = _parse_side(absolute.strip("|"))
    names = unknown_names(inside)
    if len(names) != 1:
        raise ParseError("relation")
    (name,) = names
    conditions: list[Solution] = []
    for sign, tree in relations:
        bound = _solve_condition(sign, tree)
        if bound is None or bound.sign == "!=":
            raise ParseError("relation")
        is_upper_bound = bound.sign in {"<", "<="}
        # `|x| < 0` has no solution, and `|x| <= 0` only x = 0.
        if is_upper_bound and float(bound.number.value) <= 0:
            raise ParseError("relation")
        # The absolute value `|2x-1|` is either `2x-1` or `-(2x-1)`.
        branches = []
        for inside_or_negative in (inside, ("sum", (-1, inside))):
            branch_tree = replace_node(tree, ("unknown", absolute), inside_or_negative)
            branch = _solve_condition(sign, branch_tree)
            if branch is None:
                raise ParseError("relation")
            branches.append(branch)
        word: Literal["and", "or"] = "and" if is_upper_bound else "or"
        conditions.append(JoinedConditions(word=word, parts=tuple(branches)))
    return _inequality_with_solution(text, name, conditions)


def _solution_of_part(answer: Answer) -> Solution:
    r"""Return the solution of one part of a union such as `\{-1\} \cup [0, 7)`.

    The solution of an inequality or interval is already in the answer. That of the number or set
    `\{-1, 2\}` is x = -1 or x = 2. Raises `ParseError` for any other answer.
    """
    if answer.solution:
        return answer.solution
    numbers = [part.plain_number for part in answer.parts or (answer,)]
    if answer.type == "ordered" or not all(numbers):
        raise ParseError("relation")
    conditions = [SingleCondition(sign="=", number=number) for number in numbers if number]
    return JoinedConditions(word="or", parts=tuple(conditions))


def join_conditions(text: str, word: Literal["and", "or"], parts: Sequence[Answer]) -> Answer:
    """Return several inequalities in one unknown, or several intervals, as one answer.

    `word` is `and` if all of them have to hold, `or` if at least one has to. Raises `ParseError`
    if the parts have different unknowns, if none is an inequality or interval, or if the result
    holds for every number or for none.
    """
    # All parts are about one unknown, and at least one is an inequality or interval.
    names = {part.name for part in parts}
    if len(names) > 1 or not any(part.solution for part in parts):
        raise ParseError("relation")
    solution = JoinedConditions(word=word, parts=tuple(_solution_of_part(part) for part in parts))
    if not excludes_some_but_not_all(solution):
        raise ParseError("always_true")
    return Answer(type="inequality", text=text, name=names.pop(), solution=solution)


def undecorated_name(name: str) -> str:
    r"""Return a name in one spelling.

    `x1` stands for `x_{1}`, `AB` for `\overline{AB}`, and `A` for `m\angle A`.
    """
    return name if name.isalnum() else _NAME_DECORATION_PATTERN.sub("", name)
