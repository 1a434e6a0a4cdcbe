"""Which segment of a drawing is meant by a height."""

from __future__ import annotations

from collections.abc import Sequence

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.forms import Term


def drawn_height(drawing: Drawing) -> tuple[str, str] | None:
    """Return a segment that stands perpendicular on the inside of a line; None without one.

    No line goes on behind its top.
    """
    for fact in drawing.facts:
        if fact.head != "Perpendicular" or len(fact.arguments) != 2:
            continue
        if not all(len(line.names) == 2 for line in fact.arguments):
            continue
        shared = set(fact.arguments[0].names) & set(fact.arguments[1].names)
        if len(shared) != 1:
            continue
        foot = next(iter(shared))
        for base, upright in (fact.arguments, fact.arguments[::-1]):
            if _is_inside(drawing, foot, base) and not _is_inside(drawing, foot, upright):
                return drawing.segment(upright)
    return None


def _is_inside(drawing: Drawing, point: str, line: Term) -> bool:
    """Tell whether a point lies on a line of the drawing and is none of its ends."""
    return any(point in row[1:-1] and set(line.names) <= set(row) for row in drawing.lines)


def called_height(drawing: Drawing, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the segment that a fact calls the height of a shape.

    It is called so by its name, by a perpendicular from a corner, or by the letter h.
    """
    for term in drawing.terms:
        if term.is_equation:
            for line, height in (term.arguments, term.arguments[::-1]):
                if (
                    height.head in ("AltitudeOf", "HeightOf")
                    and line.head == "Line"
                    and len(line.names) == 2
                ):
                    return drawing.segment(line)
    for fact in drawing.facts:
        if fact.head == "Perpendicular" and all(len(line.names) == 2 for line in fact.arguments):
            for line in fact.arguments:
                tops = [name for name in line.names if name in names]
                if len(tops) == 1 and len(set(line.names)) == 2:
                    return drawing.segment(line)
    for fact in drawing.facts:
        is_h = fact.is_equation and fact.arguments[1].head == "h"
        if is_h and fact.arguments[0].arguments and len(fact.arguments[0].arguments[0].names) == 2:
            return drawing.segment(fact.arguments[0].arguments[0])
    return None
