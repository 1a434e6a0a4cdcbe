r"""Reads an answer, of one value or of several: points, intervals, lists, sets, equations and
inequalities.

Whether several values are asked for, the reference answer alone decides: an answer of another form
is wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from adora_vl.rewards.answer import NO_VALUE, Answer, plain
from adora_vl.rewards.canonical import FIGURE, MAX_CHARS, NAME, NAME_OF_VALUE
from adora_vl.rewards.grammar import NotReadError, Tree, unknowns
from adora_vl.rewards.numeric import Ball, is_constant, same_number, zero_of
from adora_vl.rewards.solutions import REVERSED, Solution, between, decides, of_absolute

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
# A piece of a list that is no value by itself: `000` of `1, 000`, and `0,5` of `0,5; 0,7`.
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


def read(raw: str) -> Answer:
    """What a reference answer says, of one value or of several. Never raises."""
    return _read(raw) if len(raw) <= MAX_CHARS else plain(raw)


@lru_cache(maxsize=256)
def _read(raw: str) -> Answer:
    """The rollouts of a group share their reference answer."""
    value = plain(raw)
    several = (
        value.reason in NO_VALUE
        if value.kind == "unreadable"
        else value.kind == "expression" and "=" in raw
    )
    if not several:
        return value
    form = as_form(value)
    if form.is_value and not form.label:  # in braces
        form = Answer("unordered", value.text, parts=(form,))
    reason = "equation" if form.kind == "unreadable" and value.tree else value.reason
    return replace(form, text=value.text, reason=reason, raw=raw)


def canonical_gold(text: str) -> str:
    r"""The canonical form that data preparation stores as `answer`, for example `1000` for `1,000`.

    Never raises: a reference answer without a canonical form comes back as it is, and `verify_gold`
    says why it cannot be used.
    """
    answer = read(text)
    if answer.reason in {"too_long", "hidden_characters"}:
        return text
    several = answer.kind == "unreadable" and answer.reason in NO_VALUE
    if answer.is_form or several:
        return answer.whole
    unit = answer.unit.text if answer.unit else ""
    return f"{answer.text}{' ' * unit[:1].isalpha()}{unit}"


def as_form(answer: Answer) -> Answer:
    """The same answer where a form is asked for: `x = 5` then has its name, and `1000,99` may be
    two values.
    """
    try:
        return _parsed(answer.whole)
    except NotReadError as error:
        refusal = error.reason if error.reason in REFUSALS or not answer.reason else ""
        return replace(answer, kind="unreadable", refusal=refusal)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Answer:
    """The answer in a text with all its names and brackets (`canonical.whole`).

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
    if _size(answer) > 3 * MAX_PARTS:
        raise NotReadError("too_large")
    return answer


def _size(answer: Answer) -> int:
    return 1 + sum(map(_size, answer.parts))


@lru_cache(maxsize=256)
def _depths(text: str) -> tuple[int, ...]:
    """How many brackets each character stands in; a bracket does not stand in itself.

    Raises `NotReadError`.
    """
    depth = 0
    depths = []
    for char in text:
        depth -= char in ")]}"
        depths.append(depth)
        depth += char in "([{"
    if depth or min(depths, default=0) < 0:
        raise NotReadError("not_read")
    return tuple(depths)


def _split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The pieces of `text` between the matches that stand in no brackets, and the matches."""
    depths = _depths(text)
    pieces = []
    found = []
    begin = 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            pieces.append(text[begin : match.start()].strip())
            found.append(match.group())
            begin = match.end()
            if len(found) > MAX_PARTS:
                raise NotReadError("too_large")
    return [*pieces, text[begin:].strip()], found


def _parse(text: str, depth: int) -> Answer:
    text = text.strip()
    if depth > MAX_DEPTH:
        raise NotReadError("too_large")
    if not text:
        raise NotReadError("empty_box")
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(text, matrix[2])
    ways, _ = _split(text, _OR)
    if len(ways) > 1 and all("," in way for way in ways) and not any(";" in way for way in ways):
        return _several(
            text, pieces=ways, found=["or"], depth=depth
        )  # p = 5, q = 2 or p = 7, q = 2
    for pattern in (_SEMICOLON, _COMMA):
        pieces, found = _split(text, pattern)
        if len(pieces) > 1:
            return _several(text, pieces=pieces, found=found, depth=depth)
    members, found = _split(text, _MEMBER)
    if found:
        if len(members) != 2 or not NAME_OF_VALUE.fullmatch(members[0]):
            raise NotReadError("relation")
        inner = _parse(members[1], depth + 1)
        if not inner.solution and inner.kind != "unordered":
            raise NotReadError("relation")
        return replace(inner, label=members[0], text=text)
    pieces, _ = _split(text, _UNION)
    if len(pieces) > 1:
        return _joined(text, "or", [_parse(piece, depth + 1) for piece in pieces])
    sides, signs = _split(text, _SIGN)
    if signs:
        return _related(text, sides=sides, signs=[_SIGNS[sign] for sign in signs], depth=depth)
    return _bracketed(text, depth) or _both_signs(text) or _leaf(text)


def _real(answer: Answer) -> Ball | None:
    """The number that an answer is; a percentage is none."""
    return answer.real if answer.kind == "number" else None


def _leaf(text: str) -> Answer:
    angle = _ANGLE.fullmatch(text)
    value = plain(angle[1] if angle else text)
    if not value.is_value:
        raise NotReadError(value.reason)
    return replace(value, raw="")


def _several(text: str, pieces: list[str], found: list[str], depth: int) -> Answer:
    """Pieces with commas between them: a list, or one inequality where all of them are
    inequalities.
    """
    parts: list[Answer] = []
    for piece in pieces:
        if _AMBIGUOUS.fullmatch(piece):
            raise NotReadError("decimal_comma" if "," in piece else "enumeration")
        part = _parse(piece, depth + 1)
        parts += part.parts if part.both_signs else [part]
    solved = [part for part in parts if part.kind == "inequality"]
    if solved and all(part in solved or (part.label and part.is_value) for part in parts):
        ways = ["or" in one for one in found]
        if any(ways) != all(ways):
            raise NotReadError("relation")
        return _joined(text, "or" if ways[0] else "and", parts)
    labels = [part.label for part in parts]
    label = ""
    if labels[0] and (not any(labels[1:]) or len(set(labels)) == 1):  # a = 4, -8 and x = 5 or x = 6
        label = labels[0]
        parts = [replace(part, label="") for part in parts]
    elif any(labels) and (not all(labels) or len(set(labels)) < len(labels)):
        raise NotReadError("labels")
    if len(parts) > MAX_PARTS:
        raise NotReadError("too_large")
    return Answer(kind="unordered", text=text, label=label, parts=tuple(parts))


def _bracketed(text: str, depth: int) -> Answer | None:
    r"""A point, tuple or interval, or a set in `\{\}` or `{}`; None for text that no pair of
    brackets encloses.
    """
    point = _POINT.fullmatch(text)
    if point and "," in point[2]:
        inner = _bracketed(point[2], depth)
        return inner and replace(inner, label=point[1], text=text)
    opening, closing = (r"\{", r"\}") if text.startswith(r"\{") else (text[0], text[-1])
    inside = text[len(opening) : -len(closing)]
    encloses = text.endswith(closing) and 0 not in _depths(text)[len(opening) : -1]
    if opening not in {"(", "[", "{", r"\{"} or not encloses:
        return None
    if opening in {"{", r"\{"}:
        if (opening == "{") != (closing == "}"):
            return None
        inner = _parse(inside, depth + 1)
        of_set = inner.text.startswith(r"\{")
        if opening == "{" and (of_set or inner.kind != "unordered"):
            return inner
        parts = inner.parts if inner.kind == "unordered" and not inner.label else (inner,)
        if of_set or not all(part.is_value or part.kind == "ordered" for part in parts):
            raise NotReadError("enumeration")
        return Answer("unordered", text, parts=parts)
    pieces, found = _split(inside, _SEMICOLON)
    if not found:
        pieces, _ = _split(inside, re.compile(","))
    if (
        len(pieces) < 2
        or closing not in {")", "]"}
        or (len(pieces) > 2 and opening + closing not in {"()", "[]"})
    ):
        return None
    parts = tuple(
        _parse(piece, depth + 1) if piece not in _INFINITE else _INFINITE[piece] for piece in pieces
    )
    if any(part.kind == "unordered" and not part.both_signs for part in parts):
        raise NotReadError("enumeration")  # (3,5; 4)
    ends = [_real(part) or part.text for part in parts]
    interval = between(ends[0], ends[1], opening + closing) if len(ends) == 2 else None
    return Answer(
        kind="ordered", text=text, parts=parts, brackets=opening + closing, solution=interval
    )


def _matrix(text: str, inside: str) -> Answer:
    """A matrix of numbers as a tuple of its rows, which are tuples; a column as a tuple of its
    numbers.
    """
    lines = filter(str.strip, inside.split(r"\\"))
    rows = [[_leaf(entry.strip()) for entry in line.split("&")] for line in lines]
    even = len({len(row) for row in rows}) == 1 and len(rows) * len(rows[0]) <= MAX_PARTS
    if not even or any(not entry.tree for row in rows for entry in row):
        raise NotReadError("matrix")
    if len(rows[0]) == 1 < len(rows):
        return Answer(kind="ordered", text=text, parts=tuple(row[0] for row in rows), brackets="()")
    parts = (
        Answer(
            kind="ordered",
            text=", ".join(one.text for one in row),
            parts=tuple(row),
            brackets="row",
        )
        for row in rows
    )
    return Answer(kind="ordered", text=text, parts=tuple(parts), brackets="rows")


def _both_signs(text: str) -> Answer | None:
    r"""`1 \pm \sqrt{2}` as its two values."""
    if not _PLUS_MINUS.search(text) and not _MINUS_PLUS.search(text):
        return None
    if len(_PLUS_MINUS.findall(text)) > 1:
        raise NotReadError("enumeration")  # two values, or four?
    values = []
    for plus, minus in ("+-", "-+"):
        value = plain(_MINUS_PLUS.sub(minus, _PLUS_MINUS.sub(plus, text)))
        if not value.tree:
            raise NotReadError("enumeration")
        # 12 + 1 is a way to write 13 here
        real = value.real and replace(value.real, unevaluated=False)
        values.append(replace(value, real=real, raw=""))
    one, other = map(_real, values)
    if one and other and same_number(one, other):
        raise NotReadError("enumeration")  # 12 \pm 0
    return Answer(kind="unordered", text=text, parts=tuple(values), both_signs=True)


def _related(text: str, sides: list[str], signs: list[str], depth: int) -> Answer:
    """What signs stand between: an inequality, a value with its name, a chain, or an equation."""
    if not all(sides) or "~" in signs[:-1]:
        raise NotReadError("relation")
    if set(signs) - {"=", "~"}:
        return _inequality(text, sides, signs)
    if len(sides) > 2:
        return _chain(sides)
    left, right = sides
    if signs == ["="] and all(map(FIGURE.fullmatch, sides)):
        return _equation(text, sides)
    if signs == ["="] and NAME_OF_VALUE.fullmatch(right) and not NAME_OF_VALUE.fullmatch(left):
        left, right = right, left  # 5 = x
    if _NAMES.fullmatch(left):
        inner = _bracketed(right, depth)
        names = re.split(r"[,;]\s?", left[1:-1])
        if not inner or inner.kind != "ordered" or len(names) != len(inner.parts):
            raise NotReadError("equation")
        parts = (replace(part, label=name) for part, name in zip(inner.parts, names, strict=True))
        return replace(inner, text=text, parts=tuple(parts))
    if not NAME_OF_VALUE.fullmatch(left):
        if signs != ["="]:
            raise NotReadError("equation")
        return _equation(text, sides)
    inner = _parse(right, depth + 1)
    tree = plain(left).tree
    if signs == ["="] and inner.kind == "expression" and tree and tree[0] == "unknown":
        return replace(_equation(text, sides), parts=(inner,), label=left)  # y = 2x + 1
    if not (inner.is_value or inner.kind in {"ordered", "unordered"}):
        raise NotReadError("equation")
    return replace(inner, text=inner.text if inner.is_value else text, label=left)


def _chain(sides: Sequence[str]) -> Answer:
    """A name and several numbers, which have to be equal: the last one is the value."""
    values = [_leaf(side) for side in sides[1:]] if NAME_OF_VALUE.fullmatch(sides[0]) else []
    numbers = [number for number in map(_real, values) if number]
    if not values or len(numbers) < len(values):
        raise NotReadError("equation")
    if not all(same_number(number, numbers[-1]) for number in numbers):
        raise NotReadError("chain_differs")
    return replace(values[-1], label=sides[0])


def working(text: str) -> list[tuple[str, Answer]]:
    r"""The numbers in a chain such as `AB = 1.8 \cdot 9 / 1.5 \approx 10.8`, each with the sign
    before it; [] where it is none: it begins with a name or number, ends with a number, and says
    more than `9 = 9`. Formulas may stand inside.
    """
    try:
        sides, signs = _split(text, _SIGN)
    except NotReadError:
        return []
    if len(sides) < 2 or not all(sides) or {_SIGNS[sign] for sign in signs} - {"=", "~"}:
        return []
    values = [plain(side) for side in sides]
    found = [
        (_SIGNS[sign], value)
        for sign, value in zip(["=", *signs], values, strict=True)
        if value.kind == "number"
    ]
    # |x| has two
    names = [
        NAME_OF_VALUE.fullmatch(side) and not re.fullmatch(r"\|[a-z]\|", side) for side in sides
    ]
    begins = values[0].kind == "number" or names[0]
    for name, value in zip(names, values, strict=True):
        if not name and (value.kind == "unreadable" or _WORDED.search(value.text)):
            return []
    worked = len(found) < len(sides) or not all(
        re.fullmatch(r"[+-]?[0-9.]+", value.text) for _, value in found
    )
    ends = values[-1].real is not None and not values[-1].real.unevaluated
    return found if begins and worked and ends and values[-1].kind == "number" else []


def _side(text: str) -> Tree:
    """The tree of one side. A name such as `AB` or `f(2)` counts as an unknown there."""
    tree = plain(text).tree
    if _FUNCTION.fullmatch(text) or (tree is None and NAME_OF_VALUE.fullmatch(text)):
        return ("unknown", bare(text))
    if tree is None:
        raise NotReadError("relation")
    return tree


def _difference(left: Tree, right: Tree) -> Tree:
    """Left minus right.

    Raises `NotReadError` where that is the same number everywhere, as in `x < x + 1`.
    """
    tree: Tree = ("sum", (1, left), (-1, right))
    if not unknowns(tree) or is_constant(tree):
        raise NotReadError("always_true")
    return tree


def _equation(text: str, sides: Sequence[str]) -> Answer:
    tree = _difference(_side(sides[0]), _side(sides[1]))
    return Answer("equation", text, relations=(("=", tree),))


def _inequality(text: str, sides: Sequence[str], signs: Sequence[str]) -> Answer:
    if len(sides) > MAX_SIDES:
        raise NotReadError("too_large")
    trees = [_side(side) for side in sides]
    relations, atoms = [], []
    for left, sign, right in zip(trees, signs, trees[1:], strict=False):
        if sign not in REVERSED:
            raise NotReadError("relation")
        if sign in {">", ">="}:
            left, sign, right = right, REVERSED[sign], left
        tree = _difference(left, right)
        relations.append((sign, tree))
    (name, *others) = frozenset[str]().union(*(unknowns(tree) for _, tree in relations))
    for sign, tree in relations:
        zero = None if others else zero_of(tree)
        if zero is None:
            return Answer("inequality", text, relations=tuple(relations))
        at, slope = zero
        atom: Solution = ("is", sign if slope > 0 else REVERSED[sign], at)
        absolute = of_absolute(atom) if name[0] == "|" else atom
        if absolute is None:
            raise NotReadError("relation")
        atoms.append(absolute)
    solution: Solution = ("and", *atoms)
    if not decides(solution):
        raise NotReadError("always_true")
    return Answer(kind="inequality", text=text, label=name.strip("|"), solution=solution)


def _solution(answer: Answer) -> Solution:
    r"""What solves an inequality, an interval, a number with its name or a set of numbers: `\{-1\}
    \cup [0, 7)`.
    """
    if answer.solution:
        return answer.solution
    numbers = [_real(part) for part in answer.parts or (answer,)]
    if answer.kind == "ordered" or not all(numbers):
        raise NotReadError("relation")
    return ("or", *(("is", "=", number) for number in numbers))


def _joined(text: str, word: str, parts: Sequence[Answer]) -> Answer:
    """Several inequalities in one unknown, or intervals, of which all hold (`and`) or at least one
    (`or`).
    """
    labels = {part.label for part in parts}
    if len(labels) > 1 or not any(part.solution for part in parts):
        raise NotReadError("relation")
    solution = (word, *map(_solution, parts))
    if not decides(solution):
        raise NotReadError("always_true")
    return Answer(kind="inequality", text=text, label=labels.pop(), solution=solution)


_OF_A_NAME = re.compile(r"^m(?=\\)|\\(?:overline|angle)(?![a-z])|[\s{}_]")


def bare(label: str) -> str:
    r"""A name in one spelling: `x1` for `x_{1}`, `AB` for `\overline{AB}`, and `A` for `m\angle A`."""
    return label if label.isalnum() else _OF_A_NAME.sub("", label)
