"""Which segment of a drawing is meant by a height."""

from __future__ import annotations

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.logic_form import Term


def drawn_height(drawing: Drawing) -> tuple[str, str] | None:
    """Return the ends of a segment that is drawn as a height; None without one.

    It is perpendicular to another line and ends at its foot, a point inside that line. For example,
    with D between A and B, `Perpendicular(Line(C, D), Line(A, D))` gives CD. A line that goes on
    behind its foot is no height.
    """
    for fact in drawing.fact_terms:
        if fact.head != "Perpendicular" or len(fact.arguments) != 2:
            continue
        if not all(len(line.names) == 2 for line in fact.arguments):
            continue
        shared = set(fact.arguments[0].names) & set(fact.arguments[1].names)
        if len(shared) != 1:
            continue
        foot = next(iter(shared))
        for base, upright in (fact.arguments, fact.arguments[::-1]):
            if _lies_within(drawing, foot, base) and not _lies_within(drawing, foot, upright):
                return drawing.ends_of_line(upright)
    return None


def _lies_within(drawing: Drawing, point: str, line: Term) -> bool:
    """Tell whether a point lies on a line of the drawing and is none of its ends."""
    return any(
        point in drawn_line[1:-1] and set(line.names) <= set(drawn_line)
        for drawn_line in drawing.all_lines
    )


def called_height(drawing: Drawing) -> tuple[str, str] | None:
    """Return the segment that a fact calls the height of a shape; None without one."""
    for term in drawing.terms:
        if not term.is_equation:
            continue
        for line, height in (term.arguments, term.arguments[::-1]):
            is_height = height.head in ("AltitudeOf", "HeightOf")
            if is_height and line.head == "Line" and len(line.names) == 2:
                return drawing.ends_of_line(line)
    return None
