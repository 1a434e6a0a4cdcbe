"""The logic form of a diagram: what is drawn, where, which facts hold, and what is asked.

The notation is that of Geometry3K's annotation (InterGPS, Lu et al. 2021): `Equals(LengthOf(Line(A,
B)), 10)` says that AB is 10 long. A form is what every other part of this package starts from,
whether people annotated it or `adora_vl.geometry.text` read it from sentences.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

Point = tuple[float, float]
POINT_NAME = r"(?:point_\d+|[A-Za-z]'?)"
MAX_DEPTH = 20  # brackets in brackets; the deepest of Geometry3K has 6
_HEAD_PATTERN = re.compile("[A-Z][A-Za-z]+")
_UNKNOWN_PLACE = (-1, -1)  # how the annotation writes that a point was not found in the picture
_INTERGPS_QUESTION_KEY = "dissolved_text_logic_form"
# The names of the fields in InterGPS' own `logic_form.json`, by ours.
_INTERGPS_KEY_BY_FIELD = {
    "lines": "line_instances",
    "circles": "circle_instances",
    "points": "point_positions",
    "facts": "diagram_logic_form",
    "question": _INTERGPS_QUESTION_KEY,
}


@dataclass(frozen=True)
class Term:
    """A fact or a part of one: `Line(A, B)` has the head `Line` and the arguments `A` and `B`.

    A text without brackets, such as `A` or `10`, is a head without arguments.
    """

    head: str
    arguments: tuple[Term, ...] = ()

    @property
    def names(self) -> list[str]:
        """The heads of the arguments: mostly points, or a number."""
        return [argument.head for argument in self.arguments]

    @property
    def is_equation(self) -> bool:
        """Whether it is `Equals` with two sides."""
        return self.head == "Equals" and len(self.arguments) == 2

    def walk(self) -> Iterator[Term]:
        """Yield this term and all terms inside it, outer ones first."""
        yield self
        for argument in self.arguments:
            yield from argument.walk()

    def __str__(self) -> str:
        if not self.arguments:
            return self.head
        return f"{self.head}({', '.join(map(str, self.arguments))})"


def parse_term(text: str, depth: int = 0) -> Term | None:
    """Read a term; None where its brackets do not close, or nest deeper than `MAX_DEPTH`.

    `depth` is how many brackets stand around it.
    """
    text = text.strip()
    head, bracket, rest = text.partition("(")
    if not bracket or not _HEAD_PATTERN.fullmatch(head):
        if not text or text.count("(") != text.count(")"):
            return None
        return Term(head=text)
    parts = _split_arguments(rest)
    if parts is None or depth >= MAX_DEPTH:
        return None
    arguments: list[Term] = []
    for part in parts:
        argument = parse_term(part, depth + 1)
        if argument is None:
            return None
        arguments.append(argument)
    return Term(head=head, arguments=tuple(arguments))


def _split_arguments(rest: str) -> list[str] | None:
    """Split what stands behind an opening bracket at its commas; None unless it closes at the end.

    Commas inside of further brackets split nothing: `A, Line(B, C))` gives `A` and ` Line(B, C)`.
    """
    parts = [""]
    depth = 1
    for position, sign in enumerate(rest):
        if sign == "(":
            depth += 1
        if sign == ")":
            depth -= 1
        if depth == 0:
            return None if rest[position + 1 :].strip() else parts
        if sign == "," and depth == 1:
            parts.append("")
        else:
            parts[-1] += sign
    return None


@dataclass(frozen=True)
class LogicForm:
    """The facts of a diagram and its question, in the notation of Geometry3K's annotation.

    Attributes:
        lines: The drawn segments, by their two ends.
        circles: The centres of the drawn circles.
        points: The places in the picture, in pixels with y downwards. A point whose place nobody
            knows is not in it.
        facts: Texts such as `Equals(LengthOf(Line(A, B)), 10)`.
        question: Texts such as `Find(LengthOf(Line(A, C)))`, and facts that only the question has.
    """

    lines: tuple[tuple[str, str], ...]
    circles: tuple[str, ...]
    points: Mapping[str, Point]
    facts: tuple[str, ...]
    question: tuple[str, ...]

    @cached_property
    def terms(self) -> list[Term | None]:
        """The facts, each once; None for one that cannot be read."""
        return [parse_term(fact) for fact in dict.fromkeys(self.facts) if fact.strip()]

    def facts_with_head(self, head: str) -> list[Term]:
        """Return the facts whose terms have this head, such as `Perpendicular`."""
        return [term for term in self.terms if term and term.head == head]

    @cached_property
    def lines_with_points(self) -> list[list[str]]:
        """The straight lines, each with all points on it.

        They stand in their order where their places are known.
        """
        points_by_ends: dict[frozenset[str], set[str]] = {
            frozenset(line): set(line) for line in self.lines
        }
        for term in self.facts_with_head("PointLiesOnLine"):
            if len(term.arguments) != 2 or len(term.arguments[1].names) != 2:
                continue
            ends = term.arguments[1].names
            points_by_ends.setdefault(frozenset(ends), set(ends)).add(term.arguments[0].head)
        longest_first = sorted(
            points_by_ends.values(), key=lambda points: (-len(points), sorted(points))
        )
        # A line whose points all lie on a longer line is left out.
        return [
            self._ordered(points)
            for position, points in enumerate(longest_first)
            if not any(points <= longer for longer in longest_first[:position])
        ]

    def _ordered(self, points: set[str]) -> list[str]:
        """Return the points of a line from one end to the other.

        They are in the order of their names where one of them has no place.
        """
        names = sorted(points)
        if not all(name in self.points for name in names):
            return names
        first = self.points[names[0]]
        end = max(names, key=lambda name: math.dist(self.points[name], first))
        return sorted(names, key=lambda name: math.dist(self.points[name], self.points[end]))

    @cached_property
    def points_by_circle(self) -> dict[tuple[str, str], list[str]]:
        """The circles, by centre and by the name of the radius, with the points on each."""
        points_by_circle: dict[tuple[str, str], list[str]] = defaultdict(list)
        for term in self.facts_with_head("PointLiesOnCircle"):
            if len(term.arguments) != 2 or not term.arguments[1].names:
                continue
            point, circle = term.arguments
            centre = circle.names[0]
            radius = circle.names[1] if len(circle.names) > 1 else ""
            points_by_circle[centre, radius].append(point.head)
        # A circle of which no fact has a point is listed by its centre alone.
        known_centres = {centre for centre, _ in points_by_circle}
        for centre in self.circles:
            if centre and centre not in known_centres:
                points_by_circle[centre, ""] = []
        return dict(points_by_circle)

    @cached_property
    def drawn_points(self) -> frozenset[str]:
        """The points on lines and circles, and the centres of the circles."""
        points = set(chain.from_iterable(self.lines_with_points))
        for (centre, _), points_on_circle in self.points_by_circle.items():
            points |= {centre, *points_on_circle}
        return frozenset(points)


def read_form_from_record(record: Mapping[str, object]) -> LogicForm:
    """Return the form of InterGPS' `logic_form.json`, or of an object with the names of our fields.

    Raises `KeyError` where a field is missing, and `TypeError` or `ValueError` where one is of
    another kind.
    """
    keys = {name: name for name in _INTERGPS_KEY_BY_FIELD}
    if "line_instances" in record:
        keys = _INTERGPS_KEY_BY_FIELD
    more_points = _require_mapping(record.get("more_points") or {})
    points = more_points | _require_mapping(record[keys["points"]])
    places: dict[str, Point] = {}
    for name, location in points.items():
        x, y = _require_coordinates(location)
        if (x, y) != _UNKNOWN_PLACE:
            places[str(name)] = (x, y)
    lines: list[tuple[str, str]] = []
    for line in _require_texts(record[keys["lines"]]):
        match = re.fullmatch(f"({POINT_NAME})({POINT_NAME})", line)
        if match:
            lines.append((match[1], match[2]))
    return LogicForm(
        lines=tuple(lines),
        circles=_require_texts(record[keys["circles"]]),
        points=places,
        facts=_require_texts(record[keys["facts"]]),
        question=_require_texts(record[keys["question"]]),
    )


def form_as_record(form: LogicForm) -> dict[str, object]:
    """Return the form as plain lists and texts for JSON; `read_form_from_record` reads it back."""
    return {
        "lines": ["".join(line) for line in form.lines],
        "circles": list(form.circles),
        "points": {name: list(location) for name, location in form.points.items()},
        "facts": list(form.facts),
        "question": list(form.question),
    }


def _require_mapping(value: object) -> dict[str, object]:
    """Return the places of points by their names. Raises `TypeError` for anything but an object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"points is {value!r:.40}, not an object with a place for each name")
    return dict(value)


def _require_coordinates(value: object) -> Point:
    """Return a place as two finite numbers.

    Raises `TypeError` or `ValueError` for anything else.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"a place is {value!r:.40}, not two numbers")
    x = float(value[0])
    y = float(value[1])
    if not math.isfinite(x) or not math.isfinite(y):
        raise ValueError(f"a place is {value!r:.40}, not two finite numbers")
    return x, y


def _require_texts(value: object) -> tuple[str, ...]:
    """Return a list of texts. Raises `TypeError` for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"a list of texts is {value!r:.40}")
    texts = tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a text is {text!r:.40}")
    return texts


def points_in_term(term: Term) -> set[str]:
    """Return the points that a term names by a capital letter."""
    return {
        part.head
        for part in term.walk()
        if not part.arguments and re.fullmatch("[A-Z]'?", part.head)
    }


def inner_names(term: Term, head: str) -> list[str]:
    """Return A and B for `Line(A, B)`, and with the head `LengthOf` for `LengthOf(Line(A, B))`."""
    return term.arguments[0].names if term.head == head and term.arguments else term.names
