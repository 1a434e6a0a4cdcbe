"""The kinds of shapes that facts name, and the terms that name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adora_vl.geometry.logic_form import Term, parse_term

CORNER_COUNT_BY_SHAPE = {
    "Triangle": 3,
    "Parallelogram": 4,
    "Rectangle": 4,
    "Rhombus": 4,
    "Square": 4,
    "Kite": 4,
    "Trapezoid": 4,
    "Quadrilateral": 4,
    "Pentagon": 5,
    "Hexagon": 6,
    "Heptagon": 7,
    "Octagon": 8,
}

COLOUR_HEADS = ("Shaded", "Blue", "Green", "Red")

CIRCLE_HEADS = ("Circle", "Cirle")  # so misspelt in some annotations
# Heads around a shape that say something of it, as in `Regular(Polygon($))`.
WRAPPER_HEADS = (*COLOUR_HEADS, "Regular", "Right", "Isosceles", "Equilateral")


class UnreadError(ValueError):
    """A fact speaks of something that the form does not have, or in a way that is not known."""


@dataclass(frozen=True)
class Circle:
    """A circle: its centre, the name of its radius, and the points on it."""

    centre: str
    radius: str
    points: tuple[str, ...]


class PointInPolygon(NamedTuple):
    """A point that lies inside a polygon, such as the centre of its incircle."""

    point: str
    corners: tuple[str, ...]


class SeparateArcs(NamedTuple):
    """Two arcs of one circle that have no point in common, each by its two ends."""

    centre: str
    first: tuple[str, str]
    second: tuple[str, str]


def sides_of_polygon(corners: Sequence[str]) -> list[tuple[str, str]]:
    """Return the sides of a polygon by their ends; the side that closes it comes first."""
    return [(corners[i - 1], corners[i]) for i in range(len(corners))]


def unwrap_shape(term: Term) -> Term:
    """Return the shape inside `Shaded(...)`, `Regular(...)` and the like."""
    while term.head in WRAPPER_HEADS and term.arguments:
        term = term.arguments[0]
    return term


def parse_terms(texts: Iterable[str]) -> Iterator[Term]:
    """Yield the terms of facts, each once.

    Two in one text, with a point or semicolon between, are two.
    """
    for text in dict.fromkeys(texts):
        for part in re.split(r"(?<=\))\s*[.;]\s*(?=[A-Z])", text):
            term = parse_term(part)
            if term is not None:
                yield term
