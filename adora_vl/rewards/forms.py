r"""Answers that are not one number: points, intervals, lists, sets, equations and inequalities.

`parse` reads the canonical text of an answer (`canonical.whole`), and `compare` compares two that were read.
Numbers are compared by the rule of numbers. Everything else is compared by values at points; nothing is simplified.

    value       5, 3x+1, rhombus, and what a name or a chain says: |AB| = 1, z = 1 + 1 = 2
    ordered     (3, -4), A(3, -4), (p, q) = (3, 2), [0, 1), (-\infty, 3]
    unordered   1, 2 and 3; \{1, 2\}; 1 \pm \sqrt{2}; AB = 4, CD = 5
    equation    2x + 4y = 3
    inequality  1 < x \le 3, a + b < c, and unions of intervals

The reference answer alone decides that several values are asked for: an answer of another form is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from adora_vl.rewards.canonical import FIGURE, NAME, NAME_OF_VALUE, Form, read
from adora_vl.rewards.grammar import Tree, unknowns
from adora_vl.rewards.numeric import Number, factor_between, is_constant, same_number, zero_of
from adora_vl.rewards.solutions import REVERSED, Solution, between, decides, of_absolute, same_solutions

MAX_PARTS = 24  # numbers in one answer; comparing lists takes the square of it
MAX_SIDES = 5  # of a chain of inequalities
MAX_DEPTH = 4  # lists in lists

Outcome = tuple[Literal["correct", "wrong", "unparseable"], str]
Same = Callable[[Form, Form], Outcome]  # the rule for two plain answers

_COMMA = re.compile(r",(?:\s*(?:and|or)(?![a-z]))?|(?<![A-Za-z\\])(?:and|or)(?![a-z])")
_OR = re.compile(r",?(?<![A-Za-z\\])or(?![a-z])")
_SEMICOLON = re.compile(r";")
_UNION = re.compile(r"\\cup(?![A-Za-z])|∪")
_PLUS_MINUS, _MINUS_PLUS = re.compile(r"\\pm(?![A-Za-z])\s*|±"), re.compile(r"\\mp(?![A-Za-z])\s*|∓")
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
_SIGN = re.compile("|".join(re.escape(sign) + ("(?![A-Za-z])" if sign[0] == "\\" else "") for sign in _SIGNS))

_FUNCTION = re.compile(r"[f-hp-wA-Z]\([a-z0-9]{1,3}\)")
_NAMES = re.compile(rf"\({NAME}(?:[,;]\s?{NAME})+\)")
_POINT = re.compile(r"([A-Z]'?(?:_(?:\d|\{\d{1,2}\}))?)(\(.*\))", re.DOTALL)
# A piece of a list that is no value by itself: `000` of `1, 000`, and `0,5` of `0,5; 0,7`.
_AMBIGUOUS = re.compile(r"00[0-9]|[+-]?[0-9]+,[0-9]+")
_ANGLE = re.compile(r"(?:\\angle|angles?) ?([0-9]{1,2})")  # also the first one of `angles 2, 3 and 6`
_INFINITE = re.compile(r"([+-]?)(?:\\infty|∞)")
_REFUSED = (
    ("matrix", re.compile(r"\\begin|\\end|&|\\\\")),
    ("open_list", re.compile(r"…|\.\.|\\[lc]?dots")),
)
REFUSALS = frozenset({"decimal_comma", "matrix", "open_list", "chain_differs", "always_true", "labels", "too_large"})


class NoShapeError(ValueError):
    """The text has none of the forms. `reason` says why: a rule of `canonical` or `grammar`, or one of its own."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class AnswerShape:
    """An answer with its parts.

    `label`: what it is the value of, `AB` in `AB = 4`. `brackets`: of an ordered one, such as `[)`. `value`: of a
    value. `relations`: of equations and inequalities, each a sign and the tree that it compares with 0. `solution`: of
    inequalities in one unknown and of intervals. `both_signs`: whether it comes from a plus-minus.
    """

    kind: Literal["value", "ordered", "unordered", "equation", "inequality"]
    text: str
    parts: tuple[AnswerShape, ...] = ()
    label: str = ""
    brackets: str = ""
    value: Form | None = None
    relations: tuple[tuple[str, Tree], ...] = ()
    solution: Solution | None = None
    both_signs: bool = False


@dataclass(frozen=True)
class Pair:
    """How one part of an answer was compared with its part of the reference answer; `-` where there is none."""

    answer: str
    reference: str
    reason: str


@dataclass(frozen=True)
class Compared:
    """The verdict on two shapes, the rule that decided, and the parts."""

    verdict: Literal["correct", "wrong", "unparseable"]
    reason: str
    pairs: tuple[Pair, ...] = ()


def parse(text: str) -> AnswerShape:
    """The shape of a text from `canonical.whole`. Raises `NoShapeError`."""
    for reason, pattern in _REFUSED:
        if pattern.search(text):
            raise NoShapeError(reason)
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    shape = _parse(text, 0)
    if _size(shape) > 3 * MAX_PARTS:
        raise NoShapeError("too_large")
    return shape


def has_several(text: str) -> bool:
    """Whether a text is a list or set by itself."""
    try:
        return parse(text).kind == "unordered"
    except NoShapeError:
        return False


def _size(shape: AnswerShape) -> int:
    return 1 + sum(map(_size, shape.parts))


def _depths(text: str) -> list[int]:
    """How many brackets each character stands in; a bracket does not stand in itself. Raises `NoShapeError`."""
    depth, depths = 0, []
    for char in text:
        depth -= char in ")]}"
        depths.append(depth)
        depth += char in "([{"
    if depth or min(depths, default=0) < 0:
        raise NoShapeError("not_read")
    return depths


def _split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The pieces of `text` between the matches that stand in no brackets, and the matches."""
    depths = _depths(text)
    pieces, found, begin = [], [], 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            pieces.append(text[begin : match.start()].strip())
            found.append(match.group())
            begin = match.end()
            if len(found) > MAX_PARTS:
                raise NoShapeError("too_large")
    return [*pieces, text[begin:].strip()], found


def _parse(text: str, depth: int) -> AnswerShape:
    text = text.strip()
    if depth > MAX_DEPTH:
        raise NoShapeError("too_large")
    if not text:
        raise NoShapeError("empty_box")
    ways, _ = _split(text, _OR)
    if len(ways) > 1 and all("," in way for way in ways) and not any(";" in way for way in ways):
        return _several(text, ways, ["or"], depth)  # p = 5, q = 2 or p = 7, q = 2
    for pattern in (_SEMICOLON, _COMMA):
        pieces, found = _split(text, pattern)
        if len(pieces) > 1:
            return _several(text, pieces, found, depth)
    members, found = _split(text, _MEMBER)
    if found:
        if len(members) != 2 or not NAME_OF_VALUE.fullmatch(members[0]):
            raise NoShapeError("relation")
        inner = _parse(members[1], depth + 1)
        if not inner.solution and inner.kind != "unordered":
            raise NoShapeError("relation")
        return replace(inner, label=members[0], text=text)
    pieces, found = _split(text, _UNION)
    if len(pieces) > 1:
        return _joined(text, "or", [_parse(piece, depth + 1) for piece in pieces])
    sides, signs = _split(text, _SIGN)
    if signs:
        return _related(text, sides, [_SIGNS[sign] for sign in signs], depth)
    return _bracketed(text, depth) or _both_signs(text) or _leaf(text)


def _number(shape: AnswerShape) -> Number | None:
    """The number that a shape is; a percentage is none."""
    return shape.value.number if shape.value and shape.value.kind == "number" else None


def _leaf(text: str) -> AnswerShape:
    angle = _ANGLE.fullmatch(text)
    form = read(angle[1] if angle else text)
    if form.kind not in {"number", "expression", "percentage", "text"}:
        raise NoShapeError(form.reason)
    return AnswerShape("value", form.text, value=form)


def _several(text: str, pieces: list[str], found: list[str], depth: int) -> AnswerShape:
    """Pieces with commas between them: an unordered shape, or one inequality where all of them are inequalities."""
    parts: list[AnswerShape] = []
    for piece in pieces:
        if _AMBIGUOUS.fullmatch(piece):
            raise NoShapeError("decimal_comma" if "," in piece else "enumeration")
        part = _parse(piece, depth + 1)
        parts += part.parts if part.both_signs else [part]
    solved = [part for part in parts if part.kind == "inequality"]
    if solved and all(part in solved or (part.label and part.kind == "value") for part in parts):
        ways = ["or" in one for one in found]
        if any(ways) != all(ways):
            raise NoShapeError("relation")
        return _joined(text, "or" if ways[0] else "and", parts)
    labels = [part.label for part in parts]
    label = ""
    if labels[0] and (not any(labels[1:]) or len(set(labels)) == 1):  # a = 4, -8 and x = 5 or x = 6
        label, parts = labels[0], [replace(part, label="") for part in parts]
    elif any(labels) and (not all(labels) or len(set(labels)) < len(labels)):
        raise NoShapeError("labels")
    if len(parts) > MAX_PARTS:
        raise NoShapeError("too_large")
    return AnswerShape("unordered", text, tuple(parts), label)


def _bracketed(text: str, depth: int) -> AnswerShape | None:
    r"""A point, tuple or interval, or a set in `\{\}` or `{}`; None for text that no pair of brackets encloses."""
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
        if of_set or any(part.kind not in {"value", "ordered"} for part in parts):
            raise NoShapeError("enumeration")
        return AnswerShape("unordered", text, parts)
    pieces, _ = _split(inside, _SEMICOLON if _split(inside, _SEMICOLON)[1] else re.compile(","))
    if len(pieces) < 2 or closing not in {")", "]"} or (len(pieces) > 2 and opening + closing not in {"()", "[]"}):
        return None
    parts = tuple(_end(piece, depth + 1) for piece in pieces)
    if any(part.kind == "unordered" and not part.both_signs for part in parts):
        raise NoShapeError("enumeration")  # (3,5; 4)
    ends = [_number(part) or part.text for part in parts]
    interval = between(ends[0], ends[1], opening + closing) if len(ends) == 2 else None
    return AnswerShape("ordered", text, parts, brackets=opening + closing, solution=interval)


def _end(text: str, depth: int) -> AnswerShape:
    """A part in brackets, which may be an infinite end."""
    if not _INFINITE.fullmatch(text):
        return _parse(text, depth)
    name = "-infinity" if text.startswith("-") else "infinity"
    return AnswerShape("value", name, value=Form(name, "text", "not_finite"))


def _both_signs(text: str) -> AnswerShape | None:
    r"""`1 \pm \sqrt{2}` as its two values."""
    if not _PLUS_MINUS.search(text) and not _MINUS_PLUS.search(text):
        return None
    if len(_PLUS_MINUS.findall(text)) > 1:
        raise NoShapeError("enumeration")  # two values, or four?
    values = []
    for plus, minus in ("+-", "-+"):
        form = read(_MINUS_PLUS.sub(minus, _PLUS_MINUS.sub(plus, text)))
        if not form.tree:
            raise NoShapeError("enumeration")
        number = form.number and replace(form.number, unevaluated=False)  # 12 + 1 is a way to write 13 here
        values.append(replace(form, number=number))
    one, other = (form.number for form in values)
    if one and other and same_number(one, other):
        raise NoShapeError("enumeration")  # 12 \pm 0
    parts = tuple(AnswerShape("value", form.text, value=form) for form in values)
    return AnswerShape("unordered", text, parts, both_signs=True)


def _related(text: str, sides: list[str], signs: list[str], depth: int) -> AnswerShape:
    """What signs stand between: an inequality, a value with its name, a chain, or an equation."""
    if not all(sides) or "~" in signs[:-1]:
        raise NoShapeError("relation")
    if set(signs) - {"=", "~"}:
        return _inequality(text, sides, signs)
    if len(sides) > 2:
        return _chain(text, sides)
    left, right = sides
    if signs == ["="] and all(map(FIGURE.fullmatch, sides)):
        return _equation(text, sides)
    if signs == ["="] and NAME_OF_VALUE.fullmatch(right) and not NAME_OF_VALUE.fullmatch(left):
        left, right = right, left  # 5 = x
    if _NAMES.fullmatch(left):
        inner, names = _bracketed(right, depth), re.split(r"[,;]\s?", left[1:-1])
        if not inner or inner.kind != "ordered" or len(names) != len(inner.parts):
            raise NoShapeError("equation")
        parts = (replace(part, label=name) for part, name in zip(inner.parts, names, strict=True))
        return replace(inner, text=text, parts=tuple(parts))
    if not NAME_OF_VALUE.fullmatch(left):
        if signs != ["="]:
            raise NoShapeError("equation")
        return _equation(text, sides)
    inner = _parse(right, depth + 1)
    tree = read(left).tree
    if signs == ["="] and inner.value and inner.value.kind == "expression" and tree and tree[0] == "unknown":
        return replace(_equation(text, sides), parts=(inner,), label=left)  # y = 2x + 1
    if inner.kind not in {"value", "ordered", "unordered"}:
        raise NoShapeError("equation")
    return replace(inner, text=text, label=left)


def _chain(text: str, sides: Sequence[str]) -> AnswerShape:
    """A name and several numbers, which have to be equal: the last one is the value."""
    values = [_leaf(side) for side in sides[1:]] if NAME_OF_VALUE.fullmatch(sides[0]) else []
    numbers = [number for number in map(_number, values) if number]
    if not values or len(numbers) < len(values):
        raise NoShapeError("equation")
    if not all(same_number(number, numbers[-1]) for number in numbers):
        raise NoShapeError("chain_differs")
    return replace(values[-1], text=text, label=sides[0])


def _side(text: str) -> Tree:
    """The tree of one side. A name such as `AB` or `f(2)` counts as an unknown there."""
    form = read(text)
    if _FUNCTION.fullmatch(text) or (form.tree is None and NAME_OF_VALUE.fullmatch(text)):
        return ("unknown", _bare(text))
    if form.tree is None or form.kind not in {"number", "expression"}:
        raise NoShapeError("relation")
    return form.tree


def _difference(left: Tree, right: Tree) -> Tree:
    """Left minus right. Raises `NoShapeError` where that is the same number everywhere, as in `x < x + 1`."""
    tree: Tree = ("sum", (1, left), (-1, right))
    if not unknowns(tree) or is_constant(tree):
        raise NoShapeError("always_true")
    return tree


def _equation(text: str, sides: Sequence[str]) -> AnswerShape:
    tree = _difference(_side(sides[0]), _side(sides[1]))
    return AnswerShape("equation", text, relations=(("=", tree),))


def _inequality(text: str, sides: Sequence[str], signs: Sequence[str]) -> AnswerShape:
    if len(sides) > MAX_SIDES:
        raise NoShapeError("too_large")
    trees = [_side(side) for side in sides]
    relations, atoms = [], []
    for left, sign, right in zip(trees, signs, trees[1:], strict=False):
        if sign not in REVERSED:
            raise NoShapeError("relation")
        if sign in {">", ">="}:
            left, sign, right = right, REVERSED[sign], left
        tree = _difference(left, right)
        relations.append((sign, tree))
    (name, *others) = frozenset[str]().union(*(unknowns(tree) for _, tree in relations))
    for sign, tree in relations:
        zero = None if others else zero_of(tree)
        if zero is None:
            return AnswerShape("inequality", text, relations=tuple(relations))
        at, slope = zero
        atom: Solution = ("is", sign if slope > 0 else REVERSED[sign], at)
        absolute = of_absolute(atom) if name[0] == "|" else atom
        if absolute is None:
            raise NoShapeError("relation")
        atoms.append(absolute)
    solution: Solution = ("and", *atoms)
    if not decides(solution):
        raise NoShapeError("always_true")
    return AnswerShape("inequality", text, label=name.strip("|"), solution=solution)


def _solution(shape: AnswerShape) -> Solution:
    r"""What solves an inequality, an interval, a number with its name or a set of numbers: `\{-1\} \cup [0, 7)`."""
    if shape.solution:
        return shape.solution
    numbers = [_number(part) for part in shape.parts or (shape,)]
    if shape.kind not in {"value", "unordered"} or not all(numbers):
        raise NoShapeError("relation")
    return ("or", *(("is", "=", number) for number in numbers))


def _joined(text: str, word: str, parts: Sequence[AnswerShape]) -> AnswerShape:
    """Several inequalities in one unknown, or intervals, of which all hold (`and`) or at least one (`or`)."""
    labels = {part.label for part in parts}
    if len(labels) > 1 or not any(part.solution for part in parts):
        raise NoShapeError("relation")
    solution = (word, *map(_solution, parts))
    if not decides(solution):
        raise NoShapeError("always_true")
    return AnswerShape("inequality", text, label=labels.pop(), solution=solution)


def compare(answer: AnswerShape, reference: AnswerShape, same: Same) -> Compared:
    """Whether two shapes are the same answer; `same` decides on two plain ones."""
    both_equations = answer.kind == reference.kind == "equation"
    if reference.label and answer.label and not both_equations and not _same_label(answer, reference):
        return Compared("wrong", "different_label", (Pair(answer.label, reference.label, "different_label"),))
    if answer.solution and reference.solution and (answer.kind, reference.kind) != ("ordered", "ordered"):
        if same_solutions(answer.solution, reference.solution):
            return Compared("correct", "same_solutions")
        return Compared("wrong", "different_solutions")
    if reference.kind == "equation" and answer.kind == "value" and reference.parts and not answer.label:
        return compare(answer, replace(reference.parts[0], label=""), same)
    if reference.kind == "unordered" and answer.brackets == "()" and any(part.label for part in reference.parts):
        by_name = all(part.label for part in answer.parts)
        return (_in_any_order if by_name else _in_order)(answer, reference, same)
    if reference.kind == "unordered" and answer.kind == "value" and len(reference.parts) == 1:
        return compare(answer, reference.parts[0], same)
    if answer.kind != reference.kind:
        return Compared("wrong", "different_form")
    if reference.kind in {"equation", "inequality"}:
        return _same_relations(answer, reference)
    if reference.kind == "value":
        assert answer.value and reference.value
        verdict, reason = same(answer.value, reference.value)
        return Compared(verdict, reason, (Pair(answer.text, reference.text, reason),))
    if reference.kind == "ordered":
        if len(reference.parts) == 2 and answer.brackets != reference.brackets:
            return Compared("wrong", "different_brackets")
        return _in_order(answer, reference, same)
    labels = [part.label for part in reference.parts]
    if all(labels) and not any(part.label for part in answer.parts):
        if answer.label:  # AB = 4, 5 for AB = 4, CD = 5
            return Compared("wrong", "different_label")
        return _in_order(answer, reference, same)
    return _in_any_order(answer, reference, same)


def _same_label(answer: AnswerShape, reference: AnswerShape) -> bool:
    """Names of functions may differ, as in `W(n) = 1` and `W(x) = 1`; that of one value is a decoration."""
    if reference.kind == "value" or ("(" in reference.label and "(" in answer.label):
        return True
    return _bare(answer.label) == _bare(reference.label)


def _bare(label: str) -> str:
    r"""A name in one spelling: `x1` for `x_{1}`, `AB` for `\overline{AB}`, and `A` for `m\angle A`."""
    return re.sub(r"^m(?=\\)|\\(?:overline|angle)(?![a-z])|[\s{}_]", "", label)


def _in_order(answer: AnswerShape, reference: AnswerShape, same: Same) -> Compared:
    if len(answer.parts) != len(reference.parts):
        return Compared("wrong", "different_length")
    pairs = []
    if _other_names(answer, reference):
        return Compared("wrong", "different_label")
    for given, wanted in zip(answer.parts, reference.parts, strict=True):
        found = compare(given, wanted, same)
        pairs.append(Pair(given.text, wanted.text, found.reason))
        if found.verdict != "correct":
            return Compared(found.verdict, "different_part", tuple(pairs))
    return Compared("correct", "same_parts", tuple(pairs))


def _other_names(answer: AnswerShape, reference: AnswerShape) -> bool:
    """Whether parts are named in another order, or all by the name of one. Where nothing has a name, x is before y."""
    names, wanted = ([_bare(part.label) for part in shape.parts] for shape in (answer, reference))
    order = wanted if any(wanted) else list("xyz")
    places = [order.index(name) for name in names if name and name in order]
    return places != sorted(places) or (answer.label != "" and _bare(answer.label) in wanted)


def _in_any_order(answer: AnswerShape, reference: AnswerShape, same: Same) -> Compared:
    """Each part of the answer with one of the reference answer, by name where both have names."""
    if len(answer.parts) != len(reference.parts):
        return Compared("wrong", "different_length")
    by_label = all(part.label for part in reference.parts)
    left = list(reference.parts)
    pairs: list[Pair] = []
    for given in answer.parts:
        found = next((one for one in left if _matches(given, one, by_label, same)), None)
        if found is None:
            return Compared("wrong", "different_part", (*pairs, Pair(given.text, "-", "different_part")))
        left.remove(found)
        pairs.append(Pair(given.text, found.text, "same_part"))
    return Compared("correct", "same_parts", tuple(pairs))


def _matches(given: AnswerShape, wanted: AnswerShape, by_label: bool, same: Same) -> bool:
    named = not by_label or _bare(given.label) == _bare(wanted.label)
    return named and compare(given, wanted, same).verdict == "correct"


def _same_relations(answer: AnswerShape, reference: AnswerShape) -> Compared:
    """Each relation of the answer is one of the reference answer, but for a factor, which keeps the sign of `<`."""
    if len(answer.relations) != len(reference.relations):
        return Compared("wrong", "different_form")
    left = list(reference.relations)
    for sign, tree in answer.relations:
        for one in left:
            same_names = unknowns(tree) == unknowns(one[1])
            factor = factor_between(tree, one[1]) if sign == one[0] and same_names else 0
            if factor > 0 or (factor and sign in {"=", "!="}):
                left.remove(one)
                break
        else:
            return Compared("wrong", f"different_{reference.kind}")
    return Compared("correct", f"same_{reference.kind}")
