"""What the picture shows and no fact says: tangents, diameters, right angles, parallels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.quantities import (
    Parallel,
    Perpendicular,
    Relation,
)
from adora_vl.geometry.relations import (
    collinear,
    right_angle_at,
)
from adora_vl.geometry.shapes import Circle
from adora_vl.geometry.term_reader import TermReader
from adora_vl.geometry.vectors import cosine, cross

# How many degrees a tangent may be off the right angle with the radius. Where the question says
# that lines "appear to be tangent", most lines at a circle are meant. Otherwise a tangent has to
# look exact.
MAX_DEGREES_OF_STATED_TANGENT = 22.0
MAX_DEGREES_OF_SEEN_TANGENT = 9.0
# Degrees that a right angle and two parallels may be off and still be drawn so on purpose. A
# picture that is not to scale is off by more.
_MAX_DEGREES_FROM_RIGHT = 2.5
_MAX_DEGREES_FROM_PARALLEL = 2.0
_MAX_OFFSET_FROM_CHORD = 0.03  # share of a chord's length that the centre may lie beside it


def relations_seen(term_reader: TermReader, *, everything: bool) -> Iterator[tuple[Relation, str]]:
    """Yield what the picture shows and no fact says, with words for it.

    These are tangents, and with `everything` also diameters, right angles and parallels.
    """
    yield from tangents_seen(term_reader, MAX_DEGREES_OF_SEEN_TANGENT)
    if everything:
        yield from _seen_diameters(term_reader)
        yield from _seen_right_angles(term_reader)
        yield from _seen_parallels(term_reader)


def tangents_seen(term_reader: TermReader, max_degrees: float) -> Iterator[tuple[Relation, str]]:
    """Yield lines that meet a circle in one point and look perpendicular to the radius there.

    They may be `max_degrees` from perpendicular.
    """
    drawing = term_reader.drawing
    for circle in drawing.circles:
        for point in circle.points:
            if circle.centre in drawing.places and point in drawing.places:
                for end in _ends_of_tangents_seen(drawing, circle, point, max_degrees):
                    relation = Perpendicular(a=circle.centre, b=point, c=point, d=end)
                    yield relation, f"{point}{end} is tangent at {point}"


def _ends_of_tangents_seen(
    drawing: Drawing, circle: Circle, point: str, max_degrees: float
) -> Iterator[str]:
    """Yield the far ends of lines that look like tangents at a point of a circle, each once.

    They may be `max_degrees` from perpendicular to the radius. A line with a second point of the
    circle, or with its centre, is no tangent.
    """
    places = drawing.places
    radius = places[point] - places[circle.centre]
    segments = [[*line] for line in drawing.form.lines if set(line) <= places.keys()]
    ends: set[str] = set()
    for line in [*drawing.drawn_lines, *segments]:
        points_on_circle = set(line) & set(circle.points)
        if points_on_circle != {point} or circle.centre in line:
            continue
        far_end = max(line, key=lambda name: abs(places[name] - places[point]))
        # The sine of the lean is the cosine of the angle to the radius. Rounding may pass 1.
        sine_of_lean = min(1.0, abs(cosine(radius, places[far_end] - places[point])))
        lean = abs(math.degrees(math.asin(sine_of_lean)))
        if far_end != point and lean < max_degrees and far_end not in ends:
            ends.add(far_end)
            yield far_end


def _seen_diameters(term_reader: TermReader) -> Iterator[tuple[Relation, str]]:
    """Yield chords that seem to go through the centre."""
    drawing = term_reader.drawing
    places = drawing.places
    for circle in drawing.circles:
        for start, end in drawing.form.lines:
            if (
                not {start, end} <= set(circle.points)
                or not {start, end, circle.centre} <= places.keys()
            ):
                continue
            chord = places[end] - places[start]
            # The centre's distance from the chord, times the chord's length.
            offset = abs(cross(chord, places[circle.centre] - places[start]))
            is_known = drawing.are_on_one_line((start, end, circle.centre))
            if offset < _MAX_OFFSET_FROM_CHORD * abs(chord) ** 2 and not is_known:
                relation = collinear(circle.centre, start, end)
                yield relation, f"{circle.centre} lies on {start}{end}"


def _seen_right_angles(term_reader: TermReader) -> Iterator[tuple[Relation, str]]:
    """Yield angles between drawn lines that look right."""
    drawing = term_reader.drawing
    places = drawing.places
    for corner in sorted(drawing.neighbours):
        if corner not in places:
            continue
        ends = set()
        for line in drawing.drawn_lines:
            if corner in line:
                ends |= {line[0], line[-1]}
        # An end at the place of the corner has no direction from it.
        rays = sorted(end for end in ends if end != corner and places[end] != places[corner])
        for first, last in combinations(rays, 2):
            to_first = places[first] - places[corner]
            to_last = places[last] - places[corner]
            # The cosine of an angle that is d degrees off a right angle is sin(d).
            lean = abs(cosine(to_first, to_last))
            if lean < math.sin(math.radians(_MAX_DEGREES_FROM_RIGHT)):
                relation = right_angle_at(corner, first, last)
                yield relation, f"angle {first}{corner}{last} is a right angle"


def _seen_parallels(term_reader: TermReader) -> Iterator[tuple[Relation, str]]:
    """Yield drawn lines without a common point that look parallel."""
    drawing = term_reader.drawing
    for first, second in combinations(drawing.drawn_lines, 2):
        have_common_point = bool(set(first) & set(second))
        degrees_apart = drawing.degrees_apart(first, second)
        if not have_common_point and degrees_apart < _MAX_DEGREES_FROM_PARALLEL:
            relation = Parallel(a=first[0], b=first[-1], c=second[0], d=second[-1])
            yield relation, f"{first[0]}{first[-1]} is parallel to {second[0]}{second[-1]}"
