r"""Reads an answer of one value or of several: points, intervals, lists, sets, equations and
inequalities.

The reference answer alone decides whether several values are expected; an answer of another form is
wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from adora_vl.rewards.answer import NO_VALUE_REASONS, Answer, parse_value, parse_value_or_raise
from adora_vl.rewards.brackets import MAX_PARTS, bracket_depths, split_outside_brackets
from adora_vl.rewards.grammar import MAX_CHARS, ParseError
from adora_vl.rewards.numeric import same_number
from adora_vl.rewards.relations import (
    RELATION_SIGN_BY_SPELLING,
    RELATION_SIGN_PATTERN,
    join_conditions,
    parse_chain,
    parse_equation,
    parse_inequality,
)
from adora_vl.rewards.solutions import interval_solution
from adora_vl.rewards.value_names import (
    FIGURE_NAME_PATTERN,
    SIMPLE_NAME,
    VALUE_NAME_PATTERN,
)

MAX_LIST_DEPTH = 4  # of lists, sets and tuples in each other

_COMMA_OR_WORD_PATTERN = re.compile(
    r",(?:\s*(?:and|or)(?![a-z]))?|(?<![A-Za-z\\])(?:and|or)(?![a-z])"
)
_OR_PATTERN = re.compile(r",?(?<![A-Za-z\\])or(?![a-z])")
_SEMICOLON_PATTERN = re.compile(r";")
_UNION_SIGN_PATTERN = re.compile(r"\\cup(?![A-Za-z])|∪")
_PLUS_MINUS_PATTERN = re.compile(r"\\pm(?![A-Za-z])\s*|±")
_MINUS_PLUS_PATTERN = re.compile(r"\\mp(?![A-Za-z])\s*|∓")
_MEMBERSHIP_SIGN_PATTERN = re.compile(r"\\in(?![A-Za-z])|∈")

# `x \mid x > 4` and `x \in \mathbb{R} : x > 4`, between the braces of a set.
_SET_WITH_CONDITION_PATTERN = re.compile(
    r"([a-z])(?:(?:\\in(?![A-Za-z])|∈)(?:\\mathbb\{?R\}?|\\R|ℝ|R))?(?:\||:)(.*)", re.DOTALL
)
_TUPLE_OF_NAMES_PATTERN = re.compile(rf"\({SIMPLE_NAME}(?:[,;]\s?{SIMPLE_NAME})+\)")
_NAMED_POINT_PATTERN = re.compile(r"([A-Z]'?(?:_(?:\d|\{\d{1,2}\}))?)(\(.*\))", re.DOTALL)
# A piece of a list that may be part of another number: `000` in `1, 000`, and `0,5` in `0,5; 0,7`.
_AMBIGUOUS_PIECE_PATTERN = re.compile(r"00[0-9]|[+-]?[0-9]+,[0-9]+")
# The ends of an interval that are not finite.
_INFINITY_BY_SPELLING = {
    sign + name: Answer(
        type="text", text="-infinity" if sign == "-" else "infinity", reason="not_finite"
    )
    for name in (r"\infty", "∞")
    for sign in ("", "+", "-")
}
_SEVERAL_LINES_PATTERN = re.compile(r"\\begin|\\end|&|\\\\")
_OPEN_LIST_PATTERN = re.compile(r"…|\.\.|\\[lc]?dots")
_MATRIX_PATTERN = re.compile(
    r"[(\[]?\\begin\{(p|b|small|)(?:matrix|array)\}(?:\{[clr|]+\})?((?:(?!\\begin).)+)\\end\{\1(?:matrix|array)\}[)\]]?"
)
# Reasons for which a text cannot be read as several values. They say more than the reason why it is
# no single value (`parse_structured`).
REFUSAL_REASONS = frozenset(
    {"decimal_comma", "matrix", "open_list", "chain_differs", "always_true", "labels", "too_large"}
)


def parse_reference(raw: str) -> Answer:
    """Parse a reference answer of one value or of several. It never raises.

    For example, `1,000` is the number 1000, `y = 2x + 1` an equation with the name `y`, and
    `1, 2 and 3` a list of three numbers.
    """
    return _parse_reference_cached(raw) if len(raw) <= MAX_CHARS else parse_value(raw)


@lru_cache(maxsize=256)
def _parse_reference_cached(raw: str) -> Answer:
    """Parse as `parse_reference` does, with a cache: rollouts of a group share the reference."""
    value = parse_value(raw)
    # `y = 2x + 1` has been read as the expression `2x + 1`, and may be an equation.
    may_be_structured = value.type == "expression" and "=" in raw
    if value.type == "unreadable":
        # A relation, list or interval is no single value, but may be read as a structured answer.
        may_be_structured = value.reason in NO_VALUE_REASONS
    if not may_be_structured:
        return value
    # A structured answer has several values, a relation, an interval, or one value with its name.
    answer = parse_structured(value)
    if answer.is_value and not answer.name:
        # `parse_structured` gives one value without a name for braces alone: a set of one.
        answer = Answer(type="unordered", text=value.text, parts=(answer,))
    # An expression can be read, so it has no reason for an answer that cannot.
    is_refused_equation = answer.type == "unreadable" and value.type == "expression"
    reason = "equation" if is_refused_equation else value.reason
    return replace(answer, text=value.text, reason=reason, raw=raw)


def canonical_gold(text: str) -> str:
    """Return the spelling of a reference answer that data preparation stores: `1000` for `1,000`.

    It never raises: a reference answer without a canonical form is returned as it is, and
    `verify_gold` says why it cannot be used.
    """
    answer = parse_reference(text)
    if answer.reason in {"too_long", "hidden_characters"}:
        return text
    # The names and brackets of a relation or list are part of the answer, so they are kept, also
    # where it cannot be parsed: the reasons are kinds of text such as `enumeration` or `equation`.
    is_no_single_value = answer.type == "unreadable" and answer.reason in NO_VALUE_REASONS
    if answer.is_structured or is_no_single_value:
        return answer.text_with_names
    unit = answer.unit.text if answer.unit else ""
    space = " " if unit[:1].isalpha() else ""
    return f"{answer.text}{space}{unit}"


def parse_structured(answer: Answer) -> Answer:
    """Parse an answer anew as a structured answer: several values, or a value with a name.

    `parse_value` takes the name off `x = 5`, and reads `1000,99` as one number. Here `x = 5` keeps
    its name, and `1000,99` may be two values.

    It raises nothing. A text that cannot be read becomes an answer of the type `unreadable`. Its
    `reason` says why the text is no single value, and its `refusal_reason` why it is not several
    values either. `refusal_reason` is empty if it would say less than `reason`.
    """
    try:
        return _parse_structured(answer.text_with_names)
    except ParseError as error:
        says_more = error.reason in REFUSAL_REASONS or not answer.reason
        refusal_reason = error.reason if says_more else ""
        return replace(answer, type="unreadable", refusal_reason=refusal_reason)


@lru_cache(maxsize=256)
def _parse_structured(text: str) -> Answer:
    """Parse a canonical text with all its names and brackets as a structured answer.

    Raises `ParseError` for a text that cannot be read, and for one with too many parts.
    """
    if _SEVERAL_LINES_PATTERN.search(text) and not _MATRIX_PATTERN.search(text):
        raise ParseError("matrix")
    if _OPEN_LIST_PATTERN.search(text):
        raise ParseError("open_list")
    text = (
        text.replace(r"\langle", "(")
        .replace(r"\rangle", ")")
        .replace(r"\lbrace", r"\{")
        .replace(r"\rbrace", r"\}")
    )
    answer = _parse_by_separators(text, depth=0)
    if _count_answers(answer) > 3 * MAX_PARTS:
        raise ParseError("too_large")
    return answer


def _count_answers(answer: Answer) -> int:
    """Return the number of answers in an answer, itself included: 7 for `(1, 2), (3, 4)`."""
    return 1 + sum(map(_count_answers, answer.parts))


def _parse_by_separators(text: str, depth: int) -> Answer:
    r"""Parse a text by splitting it at its weakest separator; the pieces are parsed the same way.

    The forms are tried in this order, each with an example:

    1. a matrix
    2. alternatives that are lists: `p = 5, q = 2 or p = 7, q = 2`
    3. a list: `1, 2 and 3`
    4. a membership: `x \in [0, 1)`
    5. a union: `\{-1\} \cup [0, 7)`
    6. a relation: `y = 2x + 1`, `1 < x \le 3`
    7. brackets: `(3, -4)`, `[0, 1)`, `\{1, 2\}`
    8. a plus-minus: `1 \pm \sqrt{2}`
    9. a single value

    `depth`: how many lists, sets and tuples stand around the text. Raises `ParseError`, also for a
    text that stands too deep.
    """
    text = text.strip()
    if depth > MAX_LIST_DEPTH:
        raise ParseError("too_large")
    if not text:
        raise ParseError("empty_box")
    if matrix := _MATRIX_PATTERN.fullmatch(text):
        return _parse_matrix(text, matrix[2])
    alternatives, _ = split_outside_brackets(text, _OR_PATTERN)
    # The alternatives may be lists themselves, as in `p = 5, q = 2 or p = 7, q = 2`.
    are_lists = all("," in piece and ";" not in piece for piece in alternatives)
    if len(alternatives) > 1 and are_lists:
        return _parse_list(text, pieces=alternatives, separators=["or"], depth=depth)
    for pattern in (_SEMICOLON_PATTERN, _COMMA_OR_WORD_PATTERN):
        pieces, matches = split_outside_brackets(text, pattern)
        if len(pieces) > 1:
            return _parse_list(text, pieces=pieces, separators=matches, depth=depth)
    sides, matches = split_outside_brackets(text, _MEMBERSHIP_SIGN_PATTERN)
    if matches:
        if len(sides) != 2 or not VALUE_NAME_PATTERN.fullmatch(sides[0]):
            raise ParseError("relation")
        name, set_text = sides
        values = _parse_by_separators(set_text, depth + 1)
        # The right side has to be an interval, which has a `solution`, or a set.
        if not values.solution and values.type != "unordered":
            raise ParseError("relation")
        return replace(values, name=name, text=text)
    pieces, _ = split_outside_brackets(text, _UNION_SIGN_PATTERN)
    if len(pieces) > 1:
        intervals = [_parse_by_separators(piece, depth + 1) for piece in pieces]
        return join_conditions(text, word="or", parts=intervals)
    sides, signs = split_outside_brackets(text, RELATION_SIGN_PATTERN)
    if signs:
        return _parse_relation(
            text,
            sides=sides,
            signs=[RELATION_SIGN_BY_SPELLING[sign] for sign in signs],
            depth=depth,
        )
    return _parse_bracketed(text, depth) or _parse_plus_minus(text) or parse_value_or_raise(text)


def _parse_list(text: str, pieces: list[str], separators: list[str], depth: int) -> Answer:
    """Parse a list of several values, or one inequality where all pieces are inequalities.

    Args:
        text: the whole text.
        pieces: its pieces, each of which is read by itself.
        separators: the separators between the pieces: a comma, a semicolon, `and` or `or`.
        depth: how many lists, sets and tuples stand around the text.

    Raises `ParseError` for a piece that cannot be read, for a mixture of `and` and `or` between
    inequalities, and where only some values have names, or two values have the same name.
    """
    parts: list[Answer] = []
    for piece in pieces:
        # `0,5` may be one number or two, and `000` may be the end of `1, 000`.
        if _AMBIGUOUS_PIECE_PATTERN.fullmatch(piece):
            raise ParseError("decimal_comma" if "," in piece else "enumeration")
        part = _parse_by_separators(piece, depth + 1)
        # In a list `1 \pm 2` counts as two values.
        parts += part.parts if part.is_plus_minus else [part]
    if _are_conditions(parts):
        is_or = ["or" in separator for separator in separators]
        if any(is_or) and not all(is_or):
            raise ParseError("relation")  # `and` and `or` side by side
        return join_conditions(text, word="or" if is_or[0] else "and", parts=parts)
    name = _common_name(parts)
    if name:
        parts = [replace(part, name="") for part in parts]
    if len(parts) > MAX_PARTS:
        raise ParseError("too_large")
    return Answer(type="unordered", text=text, name=name, parts=tuple(parts))


def _are_conditions(parts: Sequence[Answer]) -> bool:
    """Return whether the parts of a list form one condition, as in `x < 1 or x = 5`.

    They do if each part is an inequality or a value with a name, and at least one is an inequality.
    """
    has_inequality = False
    for part in parts:
        if part.type == "inequality":
            has_inequality = True
        elif not part.name or not part.is_value:
            return False
    return has_inequality


def _common_name(parts: Sequence[Answer]) -> str:
    """Return the name that all values of a list share, or an empty text.

    - `a = 4, -8`: `a`, since only the first value has a name.
    - `x = 5 or x = 6`: `x`, since all have the same name.
    - `4, -8` and `a = 4, b = 5`: empty, since there is no name, or each value has its own.

    Raises `ParseError` for any other combination, such as `a = 4, a = 5, b = 3`.
    """
    names = [part.name for part in parts]
    if not any(names):
        return ""
    only_first_has_name = names[0] != "" and not any(names[1:])
    all_have_one_name = names[0] != "" and len(set(names)) == 1
    if only_first_has_name or all_have_one_name:
        return names[0]
    has_repeated_name = len(set(names)) < len(names)
    if not all(names) or has_repeated_name:
        raise ParseError("labels")
    return ""


def _parse_bracketed(text: str, depth: int) -> Answer | None:
    r"""Parse a text in brackets: a point, tuple, interval or set, such as `(3, 4)` and `\{1, 2\}`.

    A point may have a name, as in `A(3, 4)`. `depth`: how many lists, sets and tuples stand around
    the text. Returns None if no pair of brackets encloses the whole
    text. Raises `ParseError` if the pieces between the brackets cannot be read.
    """
    point = _NAMED_POINT_PATTERN.fullmatch(text)
    if point and "," in point[2]:  # A(3, 4)
        name, coordinates = point.groups()
        coordinates_answer = _parse_bracketed(coordinates, depth)
        return coordinates_answer and replace(coordinates_answer, name=name, text=text)
    if text.startswith(r"\{"):
        opening = r"\{"
        closing = r"\}"
    else:
        opening = text[0]
        closing = text[-1]
    text_inside = text[len(opening) : -len(closing)]
    # The first and the last bracket are a pair if nothing between them has the depth 0. In
    # `(1, 2) + (3, 4)` the plus has.
    depths_inside = bracket_depths(text)[len(opening) : -1]
    if not text.endswith(closing) or 0 in depths_inside:
        return None
    if opening == r"\{" or (opening == "{" and closing == "}"):
        has_backslash = opening == r"\{"
        return _parse_braces(text, text_inside, has_backslash=has_backslash, depth=depth)
    if opening not in {"(", "["}:
        return None
    return _parse_tuple(text, text_inside, brackets=opening + closing, depth=depth)


def _parse_tuple(text: str, text_inside: str, brackets: str, depth: int) -> Answer | None:
    """Parse a point, tuple or interval in round or square brackets: `(3, -4)`, `[2, 5)`.

    Returns None for a single value in brackets, and for brackets that do not match.

    Args:
        text: the whole text.
        text_inside: the text between its brackets.
        brackets: the first and the last character of the text, such as `[)`.
        depth: how many lists, sets and tuples stand around the text.

    Raises `ParseError` for a piece that cannot be read.
    """
    pieces, semicolons = split_outside_brackets(text_inside, _SEMICOLON_PATTERN)
    if not semicolons:
        pieces, _ = split_outside_brackets(text_inside, re.compile(","))
    # Two parts may have unlike brackets, as the interval `[2, 5)`. More than two may not.
    are_brackets_unlike = brackets not in {"()", "[]"}
    is_closed = brackets[-1] in ")]"
    if len(pieces) < 2 or not is_closed or (len(pieces) > 2 and are_brackets_unlike):
        return None
    parts = []
    for piece in pieces:
        if piece in _INFINITY_BY_SPELLING:
            parts.append(_INFINITY_BY_SPELLING[piece])
        else:
            parts.append(_parse_by_separators(piece, depth + 1))
    if any(part.type == "unordered" and not part.is_plus_minus for part in parts):
        raise ParseError("enumeration")  # (3,5; 4)
    interval = None
    if len(parts) == 2:
        low, high = [part.plain_number or part.text for part in parts]
        # None if the two parts cannot be the ends of an interval, as in `(3, -4)`.
        interval = interval_solution(low=low, high=high, brackets=brackets)
    return Answer(
        type="ordered", text=text, parts=tuple(parts), brackets=brackets, solution=interval
    )


def _parse_braces(text: str, text_inside: str, *, has_backslash: bool, depth: int) -> Answer:
    r"""Parse a set in `\{\}`, or in plain braces, for which `has_backslash` is false.

    `\{5\}` is a set of one value, while `{5}` is the value 5, and `{1, 2}` is a set again. A set
    of all numbers with a condition, `\{x \mid x > 4\}`, is that condition, `x > 4`.

    Args:
        text: the whole text, with its braces.
        text_inside: the text between them.
        has_backslash: whether the braces are `\{\}`.
        depth: how many lists, sets and tuples stand around the text.

    Raises `ParseError` for a set of sets, and for a set of anything but values and points.
    """
    condition = _SET_WITH_CONDITION_PATTERN.fullmatch(text_inside)
    if condition and has_backslash:
        return _parse_set_condition(condition[1], condition[2], depth)
    inner_answer = _parse_by_separators(text_inside, depth + 1)
    # Plain braces make a set only around a list, whose type is `unordered`.
    is_set_inside = inner_answer.text.startswith(r"\{")
    if not has_backslash and (is_set_inside or inner_answer.type != "unordered"):
        return inner_answer
    is_list = inner_answer.type == "unordered" and not inner_answer.name
    parts = inner_answer.parts if is_list else (inner_answer,)
    if is_set_inside or not all(part.is_value or part.type == "ordered" for part in parts):
        raise ParseError("enumeration")
    return Answer(type="unordered", text=text, parts=parts)


def _parse_set_condition(name: str, condition: str, depth: int) -> Answer:
    r"""Return the inequality that all numbers of a set fulfil: `x > 4` for `\{x \mid x > 4\}`.

    Args:
        name: the letter for a number of the set.
        condition: the text of the condition.
        depth: how many lists, sets and tuples stand around the text.

    Raises `ParseError` for a condition that is no inequality in this letter alone.
    """
    answer = _parse_by_separators(condition, depth + 1)
    if answer.type != "inequality" or answer.solution is None or answer.name != name:
        raise ParseError("relation")
    return replace(answer, name="")  # any other letter would name the same numbers


def _parse_matrix(text: str, inside: str) -> Answer:
    r"""Return a matrix as a tuple of its rows, or a matrix of one column as a tuple of its entries.

    `inside` is the text between `\begin` and `\end`: `1&2\\3&4` gives the rows (1, 2) and (3, 4),
    and `1\\2` gives the tuple (1, 2). Raises `ParseError` for rows of unequal length, for entries
    that are neither numbers nor expressions, and for more than `MAX_PARTS` entries.
    """
    rows = []
    for line in inside.split(r"\\"):
        if line.strip():
            rows.append([parse_value_or_raise(entry.strip()) for entry in line.split("&")])
    has_equal_rows = len({len(row) for row in rows}) == 1  # false without any row, too
    if not has_equal_rows or len(rows) * len(rows[0]) > MAX_PARTS:
        raise ParseError("matrix")
    # A number or an expression has a tree. A text or a percentage has none.
    if any(not entry.tree for row in rows for entry in row):
        raise ParseError("matrix")
    # A column is a vector, which may be written as a tuple too.
    if len(rows) > 1 and len(rows[0]) == 1:
        return Answer(type="ordered", text=text, parts=tuple(row[0] for row in rows), brackets="()")
    # `brackets` says of these ordered answers that they are rows and a matrix, and no tuples.
    row_answers = []
    for row in rows:
        row_text = ", ".join(entry.text for entry in row)
        row_answers.append(Answer(type="ordered", text=row_text, parts=tuple(row), brackets="row"))
    return Answer(type="ordered", text=text, parts=tuple(row_answers), brackets="rows")


def _parse_plus_minus(text: str) -> Answer | None:
    r"""Parse a plus-minus as a list of two values: `1 \pm 2` is `1+2` and `1-2`.

    Returns None for a text without such a sign. Raises `ParseError` for two plus-minus signs, and
    for two equal values, as in `12 \pm 0`.
    """
    if not _PLUS_MINUS_PATTERN.search(text) and not _MINUS_PLUS_PATTERN.search(text):
        return None
    if len(_PLUS_MINUS_PATTERN.findall(text)) > 1:
        raise ParseError("enumeration")  # two values, or four?
    values = []
    for plus, minus in ("+-", "-+"):
        value = parse_value(_MINUS_PLUS_PATTERN.sub(minus, _PLUS_MINUS_PATTERN.sub(plus, text)))
        if not value.tree:  # this text is no expression
            raise ParseError("enumeration")
        # The answer `12 + 1` leaves arithmetic to be done, but `12 \pm 1` does not. The two values
        # have no text in the answer, so `raw` is empty.
        number = value.number and replace(value.number, is_unevaluated=False)
        values.append(replace(value, number=number, raw=""))
    first, second = [value.plain_number for value in values]
    if first and second and same_number(first, second):
        raise ParseError("enumeration")  # 12 \pm 0
    return Answer(type="unordered", text=text, parts=tuple(values), is_plus_minus=True)


def _parse_named_tuple(text: str, names_text: str, values_text: str, depth: int) -> Answer:
    """Parse a tuple whose parts have names: `(x, y) = (3, 4)` has the parts `x = 3` and `y = 4`.

    Args:
        text: the whole equation.
        names_text: its left side, `(x, y)`.
        values_text: its right side, `(3, 4)`.
        depth: how many lists, sets and tuples stand around the text.

    Raises `ParseError` if the right side is no tuple with as many parts as there are names.
    """
    values = _parse_bracketed(values_text, depth)
    names = re.split(r"[,;]\s?", names_text[1:-1])
    if not values or values.type != "ordered" or len(names) != len(values.parts):
        raise ParseError("equation")
    parts = []
    for name, part in zip(names, values.parts, strict=True):
        parts.append(replace(part, name=name))
    return replace(values, text=text, parts=tuple(parts))


def _parse_relation(text: str, sides: list[str], signs: list[str], depth: int) -> Answer:
    r"""Return the answer in a text with relation signs.

    The cases in the order of the code:

    - any of `<`, `<=`, `>`, `>=` and `!=`: an inequality
    - more than two sides: a chain, `AB = 3 + 4 = 7`
    - `x \approx 5`: a value with its name
    - `AB = CD`: an equation of two figures
    - `x = 5` and `5 = x`: a value with its name
    - `2x + 4y = 3`: an equation
    - `y = 2x + 1`: an equation with the name `y`, whose only part is the right side

    Args:
        text: the whole text.
        sides: the texts between the signs.
        signs: the signs, with `~` for approximately.
        depth: how many lists, sets and tuples stand around the text.

    Raises `ParseError` for a text that cannot be read.
    """
    # No side may be empty, and an approximation has to be the last sign.
    if not all(sides) or "~" in signs[:-1]:
        raise ParseError("relation")
    if set(signs) - {"=", "~"}:  # one of `<`, `<=`, `>`, `>=` and `!=`
        return parse_inequality(text, sides, signs)
    if len(sides) > 2:
        return parse_chain(sides)
    first, second = sides
    if signs == ["~"]:
        if not _is_value_name(first) and not _TUPLE_OF_NAMES_PATTERN.fullmatch(first):
            raise ParseError("equation")
        return _parse_named_value(text, name=first, value_text=second, depth=depth)
    if all(FIGURE_NAME_PATTERN.fullmatch(side) for side in sides):
        return parse_equation(text, sides)  # AB = CD
    if _is_value_name(second) and not _is_value_name(first):  # 5 = x
        answer = _parse_named_value(text, name=second, value_text=first, depth=depth)
    elif _is_value_name(first) or _TUPLE_OF_NAMES_PATTERN.fullmatch(first):
        answer = _parse_named_value(text, name=first, value_text=second, depth=depth)
    else:
        return parse_equation(text, sides)  # 2x + 4y = 3
    name_tree = parse_value(answer.name).tree
    if answer.type == "expression" and name_tree is not None and name_tree[0] == "unknown":
        equation = parse_equation(text, sides)  # y = 2x + 1
        return replace(equation, parts=(replace(answer, name=""),), name=answer.name)
    return answer


def _is_value_name(text: str) -> bool:
    """Return whether a text can be the name of a value, as `x`, `AB` and `f(2)` can."""
    return VALUE_NAME_PATTERN.fullmatch(text) is not None


def _parse_named_value(text: str, name: str, value_text: str, depth: int) -> Answer:
    """Parse the value in an equation such as `x = 5`, and return it with its name.

    `text` is the whole equation, `value_text` the side with the value, and `depth` the number of
    lists, sets and tuples around the equation. `name` is a single name such as `x`, or a tuple of
    names such as `(x, y)`. Only a single value, a point, a list or a set can have a name. Raises
    `ParseError` for anything else.
    """
    if _TUPLE_OF_NAMES_PATTERN.fullmatch(name):
        return _parse_named_tuple(text, names_text=name, values_text=value_text, depth=depth)
    value = _parse_by_separators(value_text, depth + 1)
    if value.is_value:
        return replace(value, name=name)
    if value.type not in {"ordered", "unordered"}:
        raise ParseError("equation")
    return replace(value, text=text, name=name)
