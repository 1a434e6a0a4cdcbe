r"""Reads an answer of one value or of several: points, intervals, lists, sets, equations and
inequalities.

The reference answer alone decides whether several values are expected; an answer of another form is
wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from adora_vl.rewards.answer import NO_VALUE, Answer, read_value
from adora_vl.rewards.ball import Ball
from adora_vl.rewards.canonical import FIGURE, MAX_CHARS, NAME, NAME_OF_VALUE
from adora_vl.rewards.grammar import NotReadError, Tree, unknowns
from adora_vl.rewards.numeric import is_constant, same_number, zero_of
from adora_vl.rewards.solutions import (
    REVERSED,
    Solution,
    interval_solution,
    is_solved_by_some,
    solution_without_absolute,
)

MAX_PARTS = 24  # numbers in one answer; comparing lists takes the square of it
MAX_SIDES = 5  # of a chain of inequalities
MAX_DEPTH = 4  # lists in lists

_COMMA = re.compile(r",(?:\s*(?:and|or)(?![a-z]))?|(?<![A-Za-z\\])(?:and|or)(?![a-z])")
_OR = re.compile(r",?(?<![A-Za-z\\])or(?![a-z])")
_SEMICOLON = re.compile(r";")
_UNION = re.compile(r"\\cup(?![A-Za-z])|∪")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*|±")
_MINUS_PLUS = re.compile(r"\\mp(?![A-Za-z])\s*|∓")
_MEMBER = re.compile(r"\\in(?![A-Za-z])|∈")
_SIGNS = {
    **dict.fromkeys(("<=", "≤", r"\leqslant", r"\leq", r"\le"), "<="),
    **dict.fromkeys((">=", "≥", r"\geqslant", r"\geq", r"\ge"), ">="),
    **dict.fromkeys(("!=", "≠", r"\neq", r"\ne"), "!="),
    **dict.fromkeys((r"\approx", "≈"), "~"),
    **dict.fromkeys(("<", r"\lt"), "<"),
    **dict.fromkeys((">", r"\gt"), ">"),
    "=": "=",
}
_SIGN = re.compile(
    "|".join(re.escape(sign) + ("(?![A-Za-z])" if sign[0] == "\\" else "") for sign in _SIGNS)
)

_FUNCTION = re.compile(r"[f-hp-wA-Z]\([a-z0-9]{1,3}\)")
_NAMES = re.compile(rf"\({NAME}(?:[,;]\s?{NAME})+\)")
_POINT = re.compile(r"([A-Z]'?(?:_(?:\d|\{\d{1,2}\}))?)(\(.*\))", re.DOTALL)
# A piece of a list that is no value alone: `000` of `1, 000`, and `0,5` of `0,5; 0,7`.
_AMBIGUOUS = re.compile(r"00[0-9]|[+-]?[0-9]+,[0-9]+")
# also the first one of `angles 2, 3 and 6`
_ANGLE = re.compile(r"(?:\\angle|angles?) ?([0-9]{1,2})")
# `bh` and `lwh` are products in a formula
_WORDED = re.compile(r"(?<![\\a-z])(?:[a-z]{4,}|is|no|not)(?![a-z])")
_INFINITE = {  # the ends of intervals
    sign + name: Answer("text", "-infinity" if sign == "-" else "infinity", "not_finite")
    for name in (r"\infty", "∞")
    for sign in ("", "+", "-")
}
_REFUSED = (
    ("matrix", re.compile(r"\\begin|\\end|&|\\\\")),
    ("open_list", re.compile(r"…|\.\.|\\[lc]?dots")),
)
_MATRIX = re.compile(
    r"[(\[]?\\begin\{(p|b|small|)(?:matrix|array)\}(?:\{[clr|]+\})?((?:(?!\\begin).)+)\\end\{\1(?:matrix|array)\}[)\]]?"
)
REFUSALS = frozenset(
    {"decimal_comma", "matrix", "open_list", "chain_differs", "always_true", "labels", "too_large"}
)


def read_reference(raw: str) -> Answer:
    """Read a reference answer of one value or of several. It never raises."""
    return _read_reference_cached(raw) if len(raw) <= MAX_CHARS else read_value(raw)


@lru_cache(maxsize=256)
def _read_reference_cached(raw: str) -> Answer:
    """Return `read_reference` with a cache, since the rollouts of a group share their reference answer."""
    value = read_value(raw)
    several = value.kind == "expression" and "=" in raw
    if value.kind == "unreadable":
        several = value.reason in NO_VALUE
    if not several:
        return value
    form = read_structured(value)
    if form.is_value and not form.label:  # in braces
        form = Answer("unordered", value.text, parts=(form,))
    reason = "equation" if form.kind == "unreadable" and value.tree else value.reason
    return replace(form, text=value.text, reason=reason, raw=raw)


def canonical_gold(text: str) -> str:
    """Return the canonical form that data preparation stores as `answer`: `1000` for `1,000`.

    It never raises: a reference answer without a canonical form is returned as it is, and
    `verify_gold` says why it cannot be used.
    """
    answer = read_reference(text)
    if answer.reason in {"too_long", "hidden_characters"}:
        return text
    several = answer.kind == "unreadable" and answer.reason in NO_VALUE
    if answer.is_structured or several:
        return answer.text_with_names
    unit = answer.unit.text if answer.unit else ""
    space = " " if unit[:1].isalpha() else ""
    return f"{answer.text}{space}{unit}"


def read_structured(answer: Answer) -> Answer:
    """Return the same answer, read where several values may be expected.

    `x = 5` then keeps its name, and `1000,99` may be two values. An answer that is no form becomes
    unreadable; it never raises.
    """
    try:
        return _parse_structured(answer.text_with_names)
    except NotReadError as error:
        refusal = error.reason if error.reason in REFUSALS or not answer.reason else ""
        return replace(answer, kind="unreadable", refusal=refusal)


@lru_cache(maxsize=256)
def _parse_structured(text: str) -> Answer:
    """Return the answer in a canonical text with all its names and brackets (`canonical.text_with_names`).

    Raises `NotReadError`.
    """
    for reason, pattern in _REFUSED:
        if pattern.search(text) and not (reason == "matrix" and _MATRIX.search(text)):
            raise NotReadError(reason)
    text = (
        text.replace(r"\langle", "(")
        .replace(r"\rangle", ")")
        .replace(r"\lbrace", r"\{")
        .replace(r"\rbrace", r"\}")
    )
    answer = _parse(text, 0)
    if _count_answers(answer) > 3 * MAX_PARTS:
        raise NotReadError("too_large")
    return answer


def _count_answers(answer: Answer) -> int:
    """Return the number of answers in an answer, itself included."""
    return 1 + sum(map(_count_answers, answer.parts))


@lru_cache(maxsize=256)
def _bracket_depths(text: str) -> tuple[int, ...]:
    """Return the depth of each character in brackets; a bracket does not count for itself.

    Raises `NotReadError` where brackets do not match in number.
    """
    depth = 0
    depths = []
    for char in text:
        if char in ")]}":
            depth -= 1
        depths.append(depth)
        if char in "([{":
            depth += 1
    if depth or min(depths, default=0) < 0:
        raise NotReadError("not_read")
    return tuple(depths)


def _split_outside_brackets(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the pieces of `text` between matches outside of brackets, and the matches.

    Raises `NotReadError` for more than `MAX_PARTS` matches.
    """
    depths = _bracket_depths(text)
    pieces = []
    matches = []
    begin = 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            pieces.append(text[begin : match.start()].strip())
            matches.append(match.group())
            begin = match.end()
            if len(matches) > MAX_PARTS:
                raise NotReadError("too_large")
    return [*pieces, text[begin:].strip()], matches


def _parse(text: str, depth: int) -> Answer:
    """Return the answer in a text, read from the weakest separator to the strongest.

    The order is: a matrix, alternatives with `or`, a list, a membership, a union, a relation, and
    at last brackets, a plus-minus or a single value. `depth` counts the nesting. Raises
    `NotReadError`.
    """
    text = text.strip()
    if depth > MAX_DEPTH:
        raise NotReadError("too_large")
    if not text:
        raise NotReadError("empty_box")
    if matrix := _MATRIX.fullmatch(text):
        return _read_matrix(text, matrix[2])
    ways, _ = _split_outside_brackets(text, _OR)
    if len(ways) > 1 and all("," in way for way in ways) and not any(";" in way for way in ways):
        # p = 5, q = 2 or p = 7, q = 2
        return _read_list(text, pieces=ways, separators=["or"], depth=depth)
    for pattern in (_SEMICOLON, _COMMA):
        pieces, matches = _split_outside_brackets(text, pattern)
        if len(pieces) > 1:
            return _read_list(text, pieces=pieces, separators=matches, depth=depth)
    members, matches = _split_outside_brackets(text, _MEMBER)
    if matches:
        if len(members) != 2 or not NAME_OF_VALUE.fullmatch(members[0]):
            raise NotReadError("relation")
        inner = _parse(members[1], depth + 1)
        if not inner.solution and inner.kind != "unordered":
            raise NotReadError("relation")
        return replace(inner, label=members[0], text=text)
    pieces, _ = _split_outside_brackets(text, _UNION)
    if len(pieces) > 1:
        return _join_conditions(text, "or", [_parse(piece, depth + 1) for piece in pieces])
    sides, signs = _split_outside_brackets(text, _SIGN)
    if signs:
        return _read_relation(
            text, sides=sides, signs=[_SIGNS[sign] for sign in signs], depth=depth
        )
    return _read_bracketed(text, depth) or _read_plus_minus(text) or _read_single_value(text)


def _number_of(answer: Answer) -> Ball | None:
    """Return the number of an answer, None for anything else; a percentage is no number."""
    return answer.number if answer.kind == "number" else None


def _read_single_value(text: str) -> Answer:
    """Return a single value. Raises `NotReadError` for anything else."""
    angle = _ANGLE.fullmatch(text)
    value = read_value(angle[1] if angle else text)
    if not value.is_value:
        raise NotReadError(value.reason)
    return replace(value, raw="")


def _read_list(text: str, pieces: list[str], separators: list[str], depth: int) -> Answer:
    """Read a list of several values, or one inequality where all pieces are inequalities.

    Args:
        text: the whole text.
        pieces: its pieces, each of which is read by itself.
        separators: what stands between them, a comma, a semicolon, `and` or `or`.
        depth: the nesting.

    Raises `NotReadError`, also where only some of the values have names, or names repeat.
    """
    parts: list[Answer] = []
    for piece in pieces:
        if _AMBIGUOUS.fullmatch(piece):
            raise NotReadError("decimal_comma" if "," in piece else "enumeration")
        part = _parse(piece, depth + 1)
        # `1 \pm 2` in a list is two of its values.
        parts += part.parts if part.is_plus_minus else [part]
    inequalities = [part for part in parts if part.kind == "inequality"]
    # `x < 1 or x = 5` is one condition: every piece is an inequality or a named value.
    if inequalities and all(
        part in inequalities or (part.label and part.is_value) for part in parts
    ):
        is_or = ["or" in separator for separator in separators]
        if any(is_or) != all(is_or):
            raise NotReadError("relation")  # `and` and `or` side by side
        return _join_conditions(text, "or" if is_or[0] else "and", parts)
    labels = [part.label for part in parts]
    label = ""
    is_first_alone = not any(labels[1:])
    if labels[0] and (is_first_alone or len(set(labels)) == 1):
        # One name for all values: a = 4, -8 and x = 5 or x = 6
        label = labels[0]
        parts = [replace(part, label="") for part in parts]
    elif any(labels) and (not all(labels) or len(set(labels)) < len(labels)):
        raise NotReadError("labels")
    if len(parts) > MAX_PARTS:
        raise NotReadError("too_large")
    return Answer(kind="unordered", text=text, label=label, parts=tuple(parts))


def _read_bracketed(text: str, depth: int) -> Answer | None:
    r"""Read a point, tuple or interval, or a set in `\{\}` or `{}`.

    None for a text that no pair of brackets encloses. Raises `NotReadError`.
    """
    point = _POINT.fullmatch(text)
    if point and "," in point[2]:  # A(3, 4)
        inner = _read_bracketed(point[2], depth)
        return inner and replace(inner, label=point[1], text=text)
    opening, closing = (r"\{", r"\}") if text.startswith(r"\{") else (text[0], text[-1])
    inside = text[len(opening) : -len(closing)]
    # Depth 0 in between is outside of the first bracket: `(1, 2) + (3, 4)`.
    encloses = text.endswith(closing) and 0 not in _bracket_depths(text)[len(opening) : -1]
    if opening not in {"(", "[", "{", r"\{"} or not encloses:
        return None
    if opening in {"{", r"\{"}:
        return _read_braces(text, opening, closing, inside, depth)
    pieces, separators = _split_outside_brackets(inside, _SEMICOLON)
    if not separators:
        pieces, _ = _split_outside_brackets(inside, re.compile(","))
    brackets = opening + closing
    # `[2, 5)` is an interval, while more than two parts need brackets that match.
    is_mixed = len(pieces) > 2 and brackets not in {"()", "[]"}
    if len(pieces) < 2 or closing not in {")", "]"} or is_mixed:
        return None
    parts = []
    for piece in pieces:
        parts.append(_INFINITE[piece] if piece in _INFINITE else _parse(piece, depth + 1))
    if any(part.kind == "unordered" and not part.is_plus_minus for part in parts):
        raise NotReadError("enumeration")  # (3,5; 4)
    interval = None
    if len(parts) == 2:
        first, second = [_number_of(part) or part.text for part in parts]
        interval = interval_solution(first, second, brackets)
    return Answer(
        kind="ordered", text=text, parts=tuple(parts), brackets=brackets, solution=interval
    )


def _read_braces(text: str, opening: str, closing: str, inside: str, depth: int) -> Answer | None:
    r"""Read a set in `\{\}` or `{}`; None where one brace has a backslash and the other has none.

    Plain braces around one value are no set: `{5}` is 5. Raises `NotReadError` for a set of sets.
    """
    if (opening == "{") != (closing == "}"):
        return None
    inner = _parse(inside, depth + 1)
    has_set = inner.text.startswith(r"\{")
    if opening == "{" and (has_set or inner.kind != "unordered"):
        return inner
    is_list = inner.kind == "unordered" and not inner.label
    parts = inner.parts if is_list else (inner,)
    if has_set or not all(part.is_value or part.kind == "ordered" for part in parts):
        raise NotReadError("enumeration")
    return Answer("unordered", text, parts=parts)


def _read_matrix(text: str, inside: str) -> Answer:
    """Return a matrix of numbers as a tuple of its rows; a column as a tuple of its numbers.

    `inside` is what stands between `\\begin` and `\\end`. Raises `NotReadError` for rows of unequal
    length, for entries that are no numbers or expressions, and for more than `MAX_PARTS` entries.
    """
    lines = filter(str.strip, inside.split(r"\\"))
    rows = [[_read_single_value(entry.strip()) for entry in line.split("&")] for line in lines]
    has_equal_rows = len({len(row) for row in rows}) == 1
    if not has_equal_rows or len(rows) * len(rows[0]) > MAX_PARTS:
        raise NotReadError("matrix")
    if any(not entry.tree for row in rows for entry in row):
        raise NotReadError("matrix")
    # A column is a vector, which may be written as a tuple too.
    if len(rows[0]) == 1 < len(rows):
        return Answer(kind="ordered", text=text, parts=tuple(row[0] for row in rows), brackets="()")
    row_answers = []
    for row in rows:
        row_text = ", ".join(entry.text for entry in row)
        row_answers.append(Answer(kind="ordered", text=row_text, parts=tuple(row), brackets="row"))
    return Answer(kind="ordered", text=text, parts=tuple(row_answers), brackets="rows")


def _read_plus_minus(text: str) -> Answer | None:
    r"""Return `1 \pm \sqrt{2}` as its two values; None for a text without such a sign.

    Raises `NotReadError` for two plus-minus signs, and where both values are the same.
    """
    if not _PLUS_MINUS.search(text) and not _MINUS_PLUS.search(text):
        return None
    if len(_PLUS_MINUS.findall(text)) > 1:
        raise NotReadError("enumeration")  # two values, or four?
    values = []
    for plus, minus in ("+-", "-+"):
        value = read_value(_MINUS_PLUS.sub(minus, _PLUS_MINUS.sub(plus, text)))
        if not value.tree:
            raise NotReadError("enumeration")
        # 12 + 1 is a way to write 13 here
        real = value.number and replace(value.number, has_undone_arithmetic=False)
        values.append(replace(value, number=real, raw=""))
    first, second = map(_number_of, values)
    if first and second and same_number(first, second):
        raise NotReadError("enumeration")  # 12 \pm 0
    return Answer(kind="unordered", text=text, parts=tuple(values), is_plus_minus=True)


def _read_relation(text: str, sides: list[str], signs: list[str], depth: int) -> Answer:
    """Return a relation: an inequality, a value with its name, a chain, or an equation.

    `sides` are the texts between the `signs`, which are in the spelling of the values of `_SIGNS`.
    """
    if not all(sides) or "~" in signs[:-1]:
        raise NotReadError("relation")
    if set(signs) - {"=", "~"}:
        return _read_inequality(text, sides, signs)
    if len(sides) > 2:
        return _read_chain(sides)
    left_side, right_side = sides
    if signs == ["="] and all(map(FIGURE.fullmatch, sides)):
        return _read_equation(text, sides)
    if (
        signs == ["="]
        and NAME_OF_VALUE.fullmatch(right_side)
        and not NAME_OF_VALUE.fullmatch(left_side)
    ):
        left_side, right_side = right_side, left_side  # 5 = x
    if _NAMES.fullmatch(left_side):
        inner = _read_bracketed(right_side, depth)
        names = re.split(r"[,;]\s?", left_side[1:-1])
        if not inner or inner.kind != "ordered" or len(names) != len(inner.parts):
            raise NotReadError("equation")
        parts = (replace(part, label=name) for part, name in zip(inner.parts, names, strict=True))
        return replace(inner, text=text, parts=tuple(parts))
    if not NAME_OF_VALUE.fullmatch(left_side):
        if signs != ["="]:
            raise NotReadError("equation")
        return _read_equation(text, sides)
    inner = _parse(right_side, depth + 1)
    tree = read_value(left_side).tree
    if signs == ["="] and inner.kind == "expression" and tree and tree[0] == "unknown":
        return replace(_read_equation(text, sides), parts=(inner,), label=left_side)  # y = 2x + 1
    if not (inner.is_value or inner.kind in {"ordered", "unordered"}):
        raise NotReadError("equation")
    return replace(inner, text=inner.text if inner.is_value else text, label=left_side)


def _read_chain(sides: Sequence[str]) -> Answer:
    """Return a name and several numbers, which have to be equal; the last number is the value.

    Raises `NotReadError` for anything else.
    """
    if not NAME_OF_VALUE.fullmatch(sides[0]):
        raise NotReadError("equation")
    values = [_read_single_value(side) for side in sides[1:]]
    numbers = [number for number in map(_number_of, values) if number]
    if not values or len(numbers) < len(values):
        raise NotReadError("equation")
    if not all(same_number(number, numbers[-1]) for number in numbers):
        raise NotReadError("chain_differs")
    return replace(values[-1], label=sides[0])


def chain_of_numbers(text: str) -> list[tuple[str, Answer]]:
    r"""Return the numbers in a chain such as `AB = 1.8 \cdot 9 / 1.5 \approx 10.8`.

    Each number comes with the sign before it, `=` or `~`. A chain begins with a name or number,
    ends with a number, and says more than `9 = 9`; formulas may stand inside. Any other text gives
    [].
    """
    try:
        sides, signs = _split_outside_brackets(text, _SIGN)
    except NotReadError:
        return []
    if len(sides) < 2 or not all(sides) or {_SIGNS[sign] for sign in signs} - {"=", "~"}:
        return []
    values = [read_value(side) for side in sides]
    numbers = []
    for sign, value in zip(["=", *signs], values, strict=True):
        if value.kind == "number":
            numbers.append((_SIGNS[sign], value))
    # |x| is no name here, since it stands for two values.
    is_name = [
        bool(NAME_OF_VALUE.fullmatch(side)) and not re.fullmatch(r"\|[a-z]\|", side)
        for side in sides
    ]
    for name, value in zip(is_name, values, strict=True):
        if not name and (value.kind == "unreadable" or _WORDED.search(value.text)):
            return []
    begins_well = values[0].kind == "number" or is_name[0]
    says_more = len(numbers) < len(sides) or not all(
        re.fullmatch(r"[+-]?[0-9.]+", value.text) for _, value in numbers
    )
    last = values[-1]
    is_result = last.number is not None and not last.number.has_undone_arithmetic
    return numbers if begins_well and says_more and is_result and last.kind == "number" else []


def _read_side(text: str) -> Tree:
    """Return the tree of one side of a relation.

    A name such as `AB` or `f(2)` is an unknown in it.
    """
    tree = read_value(text).tree
    if _FUNCTION.fullmatch(text) or (tree is None and NAME_OF_VALUE.fullmatch(text)):
        return ("unknown", bare_name(text))
    if tree is None:
        raise NotReadError("relation")
    return tree


def _difference(left_side: Tree, right_side: Tree) -> Tree:
    """Return the tree of the left side minus the right side.

    Raises `NotReadError` where it is the same number everywhere, as in `x < x + 1`.
    """
    tree: Tree = ("sum", (1, left_side), (-1, right_side))
    if not unknowns(tree) or is_constant(tree):
        raise NotReadError("always_true")
    return tree


def _read_equation(text: str, sides: Sequence[str]) -> Answer:
    """Return an equation as the tree that it compares with 0."""
    tree = _difference(_read_side(sides[0]), _read_side(sides[1]))
    return Answer("equation", text, relations=(("=", tree),))


def _read_inequality(text: str, sides: Sequence[str], signs: Sequence[str]) -> Answer:
    """Return an inequality, or a chain such as `1 < x < 3`.

    In one unknown, and linear in it, it gets its solution. Any other keeps its relations alone,
    each as `<`, `<=` or `!=` and the tree that it compares with 0. Raises `NotReadError`.
    """
    if len(sides) > MAX_SIDES:
        raise NotReadError("too_large")
    trees = [_read_side(side) for side in sides]
    relations = []
    atoms = []
    for left_side, sign, right_side in zip(trees, signs, trees[1:], strict=False):
        if sign not in REVERSED:
            raise NotReadError("relation")
        if sign in {">", ">="}:
            left_side, right_side = right_side, left_side
            sign = REVERSED[sign]
        tree = _difference(left_side, right_side)
        relations.append((sign, tree))
    (name, *other_names) = frozenset[str]().union(*(unknowns(tree) for _, tree in relations))
    for sign, tree in relations:
        zero = None if other_names else zero_of(tree)
        if zero is None:
            return Answer("inequality", text, relations=tuple(relations))
        at, slope = zero
        atom: Solution = ("is", sign if slope > 0 else REVERSED[sign], at)
        absolute = solution_without_absolute(atom) if name[0] == "|" else atom
        if absolute is None:
            raise NotReadError("relation")
        atoms.append(absolute)
    solution: Solution = ("and", *atoms)
    if not is_solved_by_some(solution):
        raise NotReadError("always_true")
    return Answer(kind="inequality", text=text, label=name.strip("|"), solution=solution)


def _solution_of(answer: Answer) -> Solution:
    r"""Return the solution of an inequality, interval, named number or set of numbers.

    It reads the parts of unions such as `\{-1\} \cup [0, 7)`. Raises `NotReadError`.
    """
    if answer.solution:
        return answer.solution
    numbers = [_number_of(part) for part in answer.parts or (answer,)]
    if answer.kind == "ordered" or not all(numbers):
        raise NotReadError("relation")
    return ("or", *(("is", "=", number) for number in numbers))


def _join_conditions(text: str, word: str, parts: Sequence[Answer]) -> Answer:
    """Return several inequalities in one unknown, or intervals, as one.

    `word` says whether all of them hold (`and`) or at least one (`or`). Raises `NotReadError`, also
    where the result holds everywhere or nowhere.
    """
    labels = {part.label for part in parts}
    if len(labels) > 1 or not any(part.solution for part in parts):
        raise NotReadError("relation")
    solution = (word, *map(_solution_of, parts))
    if not is_solved_by_some(solution):
        raise NotReadError("always_true")
    return Answer(kind="inequality", text=text, label=labels.pop(), solution=solution)


_OF_A_NAME = re.compile(r"^m(?=\\)|\\(?:overline|angle)(?![a-z])|[\s{}_]")


def bare_name(label: str) -> str:
    r"""Return a name in one spelling.

    `x1` stands for `x_{1}`, `AB` for `\overline{AB}`, and `A` for `m\angle A`.
    """
    return label if label.isalnum() else _OF_A_NAME.sub("", label)
