"""Geometry3K's logic forms: what people annotated of its diagrams (InterGPS, Lu et al. 2021), and
their facts in words.

`Equals(LengthOf(Line(A, B)), 10)` is `AB = 10`. The words are for a model that is asked without the
picture; where they do not suffice to solve the problem, as for a shaded region, there are none.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError

Point = tuple[float, float]
NAME = r"(?:point_\d+|[A-Za-z]'?)"
_FOUR = ("Quadrilateral", "Parallelogram", "Rectangle", "Rhombus", "Square", "Trapezoid", "Kite")
_CORNERS = {"Triangle": 3, **dict.fromkeys(_FOUR, 4), "Pentagon": 5, "Hexagon": 6}
# How many points each is named by. `Cirle` is so spelt in some.
_POINTS = {"Line": (2,), "Angle": (1, 3), "Arc": (2, 3), "Circle": (1,), "Cirle": (1,)} | {
    name: (corners,) for name, corners in _CORNERS.items()
}
_WORDS = {
    **{
        f"{name}Of": f"the {name.lower()} of {{}}"
        for name in ("Area", "Perimeter", "Height", "Diameter")
    },
    **{
        name: f"{{}} is {name.lower()} to {{}}" for name in ("Perpendicular", "Parallel", "Tangent")
    },
    **{name: f"{name.lower()} {{}}" for name in ("Minor", "Major")},
    "MeasureOf": "{}",
}


@dataclass(frozen=True)
class Term:
    """`Line(A, B)`: a head and what stands in its brackets; a text without brackets has no
    arguments.
    """

    head: str
    arguments: tuple[Term, ...] = ()

    @property
    def names(self) -> list[str]:
        """The points or the number that it is of."""
        return [each.head for each in self.arguments]


def term_of(text: str) -> Term | None:
    """Read a logic form; None where its brackets do not close."""
    text = text.strip()
    head, bracket, rest = text.partition("(")
    if not bracket or not re.fullmatch("[A-Z][A-Za-z]+", head):
        return Term(text) if text and text.count("(") == text.count(")") else None
    parts = [""]
    depth = 1
    for at, sign in enumerate(rest):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            arguments = [term_of(part) for part in parts]
            if rest[at + 1 :].strip() or None in arguments:
                return None
            return Term(head, tuple(each for each in arguments if each))
        if sign == "," and depth == 1:
            parts.append("")
        else:
            parts[-1] += sign
    return None


@dataclass(frozen=True)
class Form:
    lines: tuple[tuple[str, str], ...]
    circles: tuple[str, ...]
    points: Mapping[str, Point]  # where they lie in the picture, in pixels, y downwards
    facts: tuple[str, ...]
    question: tuple[str, ...]

    @cached_property
    def terms(self) -> list[Term | None]:
        """The facts, each once; None for one that cannot be read."""
        return [term_of(fact) for fact in dict.fromkeys(self.facts) if fact.strip()]

    def found(self, head: str) -> list[Term]:
        return [term for term in self.terms if term and term.head == head]

    @cached_property
    def rows(self) -> list[list[str]]:
        """The straight lines, each with all points on it, in their order where their places are
        known.
        """
        on: dict[frozenset[str], set[str]] = {frozenset(line): set(line) for line in self.lines}
        for term in self.found("PointLiesOnLine"):
            if len(term.arguments) == 2 and len(ends := term.arguments[1].names) == 2:
                on.setdefault(frozenset(ends), set(ends)).add(term.arguments[0].head)
        held = sorted(on.values(), key=lambda points: (-len(points), sorted(points)))
        whole = [
            points
            for at, points in enumerate(held)
            if not any(points <= other for other in held[:at])
        ]
        return [self._ordered(points) for points in whole]

    def _ordered(self, points: set[str]) -> list[str]:
        names = sorted(points)
        if not all(name in self.points for name in names):
            return names
        first = self.points[names[0]]
        end = max(names, key=lambda name: math.dist(self.points[name], first))
        return sorted(names, key=lambda name: math.dist(self.points[name], self.points[end]))

    @cached_property
    def rounds(self) -> dict[tuple[str, str], list[str]]:
        """The circles, by centre and by the name of the radius, with the points on each."""
        on: dict[tuple[str, str], list[str]] = defaultdict(list)
        for term in self.found("PointLiesOnCircle"):
            if len(term.arguments) == 2 and (circle := term.arguments[1].names):
                on[circle[0], circle[1] if len(circle) > 1 else ""].append(term.arguments[0].head)
        return dict(on) | {
            (name, ""): [] for name in self.circles if name and name not in {at for at, _ in on}
        }


_DISSOLVED = "dissolved_text_logic_form"


def form_of(held: Mapping[str, Any]) -> Form:
    """The form of InterGPS' `logic_form.json`, or of the same under shorter names.

    Raises `KeyError`, `TypeError`.
    """
    keys = ("lines", "circles", "points", "facts", "question")
    if "line_instances" in held:
        theirs = (
            "line_instances",
            "circle_instances",
            "point_positions",
            "diagram_logic_form",
            _DISSOLVED,
        )
        held = dict(zip(keys, (held[key] for key in theirs), strict=True))
    points = {**(held.get("more_points") or {}), **held["points"]}
    found = (re.fullmatch(f"({NAME})({NAME})", line) for line in held["lines"])
    lines = tuple((line[1], line[2]) for line in found if line)
    places = {name: (float(x), float(y)) for name, (x, y) in points.items() if (x, y) != (-1, -1)}
    return Form(
        lines, tuple(held["circles"]), places, tuple(held["facts"]), tuple(held["question"])
    )


def read_forms(path: Path) -> dict[int, Form]:
    """The forms of a JSON file (also .gz) with an object by the number of the problem.

    Raises `UserError`.
    """
    try:
        content = path.read_bytes()
        held = read_json(gzip.decompress(content) if path.suffix == ".gz" else content)
        return {int(number): form_of(form) for number, form in held.items()}
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"input: {str(path)!r} has no logic forms ({type(error).__name__}: {error}); give a "
            "JSON file (.gz) with points, lines, circles, facts and question for the number of "
            "each problem"
        ) from error


def facts_in_words(form: Form, problem: str) -> str | None:
    """The facts of the diagram as sentences; None where they do not suffice in words.

    They do not where one of them cannot be read, where the problem is about a shaded or coloured
    region, or a shape that the annotation does not name, and where it speaks of a point, an unknown
    or an angle that they do not have.
    """
    said = [
        in_words(term)
        for term in form.terms
        if term is None or not term.head.startswith("PointLies")
    ]
    if None in said or re.search(r"\b(?:shaded|blue|green|red|yellow)\b", problem, re.IGNORECASE):
        return None
    several = [(_list(row), set(row) <= form.points.keys()) for row in form.rows if len(row) > 2]
    rows = [
        f"{points} lie on one line{', in this order' if known else ''}" for points, known in several
    ]
    segments = [_joined(row) for row in form.rows if len(row) == 2]
    drawn = [f"drawn segments: {', '.join(segments)}"] if segments else []
    circles = [
        f"{_list(on)} lie{'s' if len(on) == 1 else ''} on the circle with centre {centre}"
        if on
        else f"{centre} is the centre of a circle"
        for (centre, _), on in form.rounds.items()
    ]
    sentences = [*rows, *drawn, *circles, *(each for each in said if each)]
    text = ". ".join(f"{each[0].upper()}{each[1:]}" for each in dict.fromkeys(sentences))
    return f"{text}." if text and _suffices(text, form) else None


def _suffices(text: str, form: Form) -> bool:
    """Whether what the question speaks of stands in words.

    `$` is a shape without a name, clear where it is alone.
    """
    asked = [term_of(each) for each in form.question if each.strip()]
    on_lines = {name for row in form.rows for name in row}
    known = on_lines.union(*form.rounds.values()) | {centre for centre, _ in form.rounds}
    given = [text, *(str(in_words(term)) for term in asked if term and term.head != "Find")]
    for term in _all(each for each in asked if each):
        head = term.head
        names = term.names
        clear = len(form.rounds) == 1 if head == "Circle" else len(on_lines) == _CORNERS.get(head)
        unknown = names[0] if head == "Find" and re.fullmatch("[a-z]", names[0]) else None
        number = names[0] if head == "Angle" and len(names) == 1 and names[0].isdigit() else None
        if (
            ("$" in "".join(names) and not clear)
            or (not names and re.fullmatch("[A-Z]'?", head) and head not in known)
            or (unknown and not re.search(rf"(?<![a-z\\]){unknown}(?![a-z])", " ".join(given)))
            or (number and not re.search(rf"\bangle {number}\b", text, re.IGNORECASE))
        ):
            return False
    return None not in asked


def _all(terms: Iterable[Term]) -> Iterable[Term]:
    for term in terms:
        yield term
        yield from _all(term.arguments)


def in_words(term: Term | None) -> str | None:
    """A term in words; None for one that has none."""
    if term is None or not term.arguments:
        return None if term is None or "$" in term.head else term.head
    head = term.head
    names = term.names
    parts = [in_words(each) for each in term.arguments]
    if len(names) in _POINTS.get(head, ()) and all(
        re.fullmatch(rf"{NAME}|\d+", name) for name in names
    ):
        return f"{head.lower().replace('cirle', 'circle')} {_joined(names)}".removeprefix("line ")
    if None in parts:
        return None
    if head == "LengthOf":
        return f"the length of {parts[0]}" if names[0] == "Arc" else parts[0]
    if head == "Equals" and len(parts) == 2:
        measured = names[0] == "MeasureOf" and not term.arguments[1].arguments
        return f"{parts[0]} = {parts[1]}{' degrees' if measured else ''}"
    words = _WORDS.get(head, "")
    return words.format(*parts) if words and words.count("{}") == len(parts) else None


def points_of(term: Term) -> set[str]:
    return {
        each.head
        for each in _all([term])
        if not each.arguments and re.fullmatch("[A-Z]'?", each.head)
    }


def _joined(names: Sequence[str]) -> str:
    """`ABC`; `A point_26` where a name is a word."""
    return (" " if any("_" in name for name in names) else "").join(names)


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
