"""Draws the diagram of a Geometry3K problem anew from its logic form.

It serves machines without the original pictures. Values stand beside their segment, in their angle
or at their arc; a fact for which a drawing has no mark is written below it. Points are complex
numbers, in shares of the picture, y downwards.
"""

from __future__ import annotations

import math
import re
from cmath import phase, rect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageFont

from adora_vl.geometry.logic_form import LogicForm, Point, Term, points_in_term
from adora_vl.synthetic.drawing import OVERSAMPLING, Box, Canvas
from data_prep.logic_forms import describe_term

# The longer side of a picture, and the height of a label, in pixels.
_PICTURE_PIXELS = 480
_LABEL_PIXELS = 19
# The range in which the points lie, and the white around everything, in shares of the picture.
_DIAGRAM_RANGE = (0.14, 0.86)
_WHITE_MARGIN = 0.02
# The side of a right angle's square, the radius of an angle's arc, and half a tick.
_RIGHT_ANGLE_SIDE = 0.03
_ANGLE_RADIUS = 0.055
_HALF_TICK_LENGTH = 0.014
# The distances between the strokes on a segment and between the arcs in an angle that mark
# equality.
_STROKE_GAP = 0.011
_ARC_GAP = 0.014
# How far from its point a name may stand, the nearest first.
_NAME_DISTANCES = (0.032, 0.045, 0.06, 0.08, 0.1)
# How far apart the sentences below the figure are, and how low the last of them may stand.
_SENTENCE_HEIGHT = 0.045
_LOWEST_SENTENCE = 0.985
_INK_POINT_DISTANCE = 0.006  # of the points that are remembered of a line; a letter is wider
# What a label has to keep clear of: the edge of the picture, and a circle that it stands beside.
_LABEL_MARGIN = 0.005
_GAP_AT_ARC = 0.03
# How bad it is if a label leaves the picture, or lies on another one. A hidden point of ink costs
# 1.
_COST_OUTSIDE = 1000
_COST_OF_OVERLAP = 200
_PLAIN_TEXT_BY_LATEX = (
    (r"\\sqrt\{([^{}]*)\}", r"√\1"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}(?=[a-z])", r"(\1/\2)"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2"),
    (r"\^\{?2\}?", "²"),
    (r"\\pi", "π"),
)


def can_be_drawn(form: LogicForm) -> bool:
    """Return whether all points of a diagram's lines, circles and facts have coordinates.

    `form` is the logic form of the diagram: its lines, circles and facts, and the coordinates of
    its points by their names.
    """
    needed_points: set[str] = set()
    for points_on_line in form.lines_with_points:
        needed_points.update(points_on_line)
    for term in form.terms:
        if term:
            needed_points |= points_in_term(term)
    for centre, _ in form.points_by_circle:
        needed_points.add(centre)
    return bool(form.points) and needed_points <= form.points.keys()


def points_in_picture(coordinates: Mapping[str, Point]) -> dict[str, Point]:
    """Return the points of a figure, where y points up, as a picture has them, with y downwards."""
    return {name: (x, -y) for name, (x, y) in coordinates.items()}


def draw_form(form: LogicForm) -> Image.Image:
    """Return the diagram of a logic form as a picture, black on white.

    All its points have to have coordinates, which `can_be_drawn` checks.
    """
    return _DiagramDrawing(form).draw()


def draw_if_legible(form: LogicForm) -> Image.Image | None:
    """Return the diagram of a logic form; None where a label hides another one or a point.

    All points of the form have to have coordinates, which `can_be_drawn` checks.
    """
    diagram = _DiagramDrawing(form)
    picture = diagram.draw()
    return picture if diagram.is_legible() else None


class _EqualParts(NamedTuple):
    """The parts of a diagram that are marked as equal or parallel."""

    terms: list[Term]  # the facts that say so, such as AB = CD
    # Each part by the names of its points: [[("A", "B"), ("C", "D")]]. The parts of a group are
    # sorted, so that equal forms give equal pictures.
    groups: list[list[tuple[str, ...]]]


class _AngleInPicture(NamedTuple):
    """How an angle lies in a picture."""

    corner: complex
    first_direction: float  # of its first side, in radians
    turn: float  # from its first to its second side, in radians, at most half a turn either way


def _points_to_draw(form: LogicForm) -> dict[str, complex]:
    """Return the points on a logic form's lines and circles by their names, sorted.

    A form without lines and circles gives all its points. A point without coordinates is left out.
    The coordinates are in pixels of the original picture.
    """
    names = form.drawn_points or form.points.keys()
    return {name: complex(*form.points[name]) for name in sorted(names & form.points.keys())}


Circle = tuple[str, str]  # a circle by the names of its centre and of its radius, as in a form


def _radii_of_circles(form: LogicForm, points: dict[str, complex]) -> dict[Circle, float]:
    """Return the radius of each circle of a logic form on which a point lies.

    It is the mean distance of the circle's points from the centre, since in a diagram that was
    drawn by hand they are not all equally far from it. `points` has the coordinates by name.
    """
    radii = {}
    for circle, points_on_circle in form.points_by_circle.items():
        known_points = [points[name] for name in points_on_circle if name in points]
        if known_points:
            centre_name, _ = circle
            distances = [abs(point - points[centre_name]) for point in known_points]
            radii[circle] = sum(distances) / len(distances)
    return radii


class _DiagramDrawing:
    """The drawing of one logic form, and what its labels must not hide.

    Points are complex numbers, in shares of the picture, with y downwards. `ink_points` are many
    points on all lines that have been drawn, and `label_boxes` the boxes of all labels so far.
    """

    def __init__(self, form: LogicForm) -> None:
        """Scale the points of a logic form into the picture, and make an empty canvas.

        `form` has the lines, circles and facts of the diagram, and the coordinates of its points.
        """
        import matplotlib as mpl  # not for every command of this package

        self.form = form
        original_points = _points_to_draw(form)
        original_radii = _radii_of_circles(form, original_points)
        extreme_points = list(original_points.values())  # all of them fit into the picture
        for (centre, _), radius in original_radii.items():
            # Two opposite corners of the square around the circle.
            extreme_points.append(original_points[centre] + radius * (1 + 1j))
            extreme_points.append(original_points[centre] - radius * (1 + 1j))
        xs = [point.real for point in extreme_points]
        ys = [point.imag for point in extreme_points]
        # The longer side fills the range, and both coordinates have one scale.
        size = max(max(xs) - min(xs), max(ys) - min(ys)) or 1  # 1 where all points are one
        first, last = _DIAGRAM_RANGE
        scale = (last - first) / size
        origin = complex(min(xs), min(ys))
        self.point_by_name = {
            name: scale * (point - origin) + first * (1 + 1j)
            for name, point in original_points.items()
        }
        self.middle_of_points = sum(self.point_by_name.values()) / len(self.point_by_name)
        self.radius_by_circle = {
            circle: scale * radius for circle, radius in original_radii.items()
        }
        file = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"  # has a root and a π
        self.font = ImageFont.truetype(str(file), OVERSAMPLING * _LABEL_PIXELS)
        self.canvas = Canvas(_PICTURE_PIXELS, font=self.font)
        self.ink_points: list[complex] = []
        self.label_boxes: list[Box] = []

    def draw(self) -> Image.Image:
        """Draw the figure, its marks, values and names, and return it without what stays white.

        Facts without a mark stand below the figure. A label takes the best place that the labels
        before it have left. So values are written first, then the names of points, and the
        sentences below come last.
        """
        for names_on_line in self.form.lines_with_points:
            self._draw_line(*self._points_named(names_on_line))
        for (centre_name, _), radius in self.radius_by_circle.items():
            centre = self.point_by_name[centre_name]
            self.canvas.circle((centre.real, centre.imag), radius)
            self.canvas.dot((centre.real, centre.imag))
            step_count = round(60 * math.tau)  # 60 points a radian, once around
            self.ink_points += [centre + rect(radius, step / 60) for step in range(step_count)]
        marked_terms = self._draw_marks()
        sentences = []  # on the facts that the figure cannot show
        for term in self.form.terms:
            if term is None or term in marked_terms:
                continue
            is_shown = self._write_value(term)
            if not is_shown:
                sentences.append(describe_term(term))
        for name, point in self.point_by_name.items():
            candidates = []  # on circles around the point, the nearest first
            for distance in _NAME_DISTANCES:
                for sixteenth in range(16):
                    candidates.append(point + rect(distance, sixteenth * math.pi / 8))
            self._write_label(name, candidates)
        self._write_below(sentences)
        return self._cropped_picture()

    def _write_below(self, sentences: Sequence[str | None]) -> None:
        """Write sentences below the figure, each once, one a line; None is left out."""
        bottoms = [point.imag for point in self.ink_points]
        bottoms += [box.max_y for box in self.label_boxes]
        bottom = max(bottoms)
        distinct_sentences = dict.fromkeys(sentence for sentence in sentences if sentence)
        for number, sentence in enumerate(distinct_sentences, start=1):
            y = min(_LOWEST_SENTENCE, bottom + _SENTENCE_HEIGHT * number)
            text = latex_as_plain_text(sentence, keep_spaces=True)
            self._write_label(text, [complex(0.5, y)])  # in the middle

    def _cropped_picture(self) -> Image.Image:
        """Return the part of the canvas that has something on it, with a white margin."""
        boxes = list(self.label_boxes)
        for point in self.ink_points:
            boxes.append(Box.around(point, half_width=0, half_height=0))
        edges = (
            min(box.min_x for box in boxes) - _WHITE_MARGIN,
            min(box.min_y for box in boxes) - _WHITE_MARGIN,
            max(box.max_x for box in boxes) + _WHITE_MARGIN,
            max(box.max_y for box in boxes) + _WHITE_MARGIN,
        )
        left, top, right, bottom = [round(_PICTURE_PIXELS * min(1, max(0, edge))) for edge in edges]
        return self.canvas.picture().crop((left, top, right, bottom))

    def is_legible(self) -> bool:
        """Return whether each label is in the picture, and on no point and no other label."""
        for number, box in enumerate(self.label_boxes):
            if min(box) < 0 or max(box) > 1:
                return False
            if any(map(box.contains, self.point_by_name.values())):
                return False
            if any(map(box.overlaps, self.label_boxes[:number])):
                return False
        return True

    def _draw_line(self, *points: complex) -> None:
        """Draw a line through points, and remember where it runs, so that labels avoid it."""
        self.canvas.line(*((point.real, point.imag) for point in points))
        for start, end in pairwise(points):
            steps = max(2, int(abs(end - start) / _INK_POINT_DISTANCE))
            self.ink_points += [start + (end - start) * step / steps for step in range(steps + 1)]

    def _write_value(self, term: Term) -> bool:
        """Write the value of a fact, such as AB = 5, beside its segment, angle or arc.

        `term` is the fact, `Equals(LengthOf(Line(A, B)), 5)`: its head is `Equals`, and its
        arguments are the two sides.

        Returns whether the picture now shows the fact. It shows each fact with such a value, and
        each fact that says that a point lies on a line. The caller writes other facts below it.
        """
        if term.head.startswith("PointLies"):
            return True
        # Only an equation with a measure on its left side gives a value that can stand in a
        # picture.
        if not term.is_equation or not term.arguments[0].arguments:
            return False
        # `Equals(MeasureOf(Angle(A, B, C)), 40)`: the measure is of a part, an angle.
        measure, right_side = term.arguments
        part = measure.arguments[0]
        if not set(part.names) <= self.point_by_name.keys():
            return False
        value = right_side
        if right_side.head in ("LengthOf", "MeasureOf") and right_side.arguments:
            value = right_side.arguments[0]
        # The other side may be `angle 1`, which the picture shows by its number.
        numbered_angle = re.fullmatch(r"[Aa]ngle (\w+)", describe_term(value) or "")
        if value.arguments and not numbered_angle:  # no single number or name
            return False
        text = numbered_angle[1] if numbered_angle else latex_as_plain_text(value.head)
        is_one_word = re.fullmatch(r"[\w.]+", text) is not None
        degrees = f"{text}°" if is_one_word else f"({text})°"  # `(3x+5)°`
        match measure.head, part.head, len(part.names):
            case "LengthOf", "Line", 2:
                start, end = self._points_named(part.names)
                self._write_beside_segment(start, end, text)
                return True
            case "MeasureOf", "Angle", 3:
                if numbered_angle:
                    self._write_in_angle(part.names, text, arcs=0, nearest=0.045)
                else:
                    self._write_in_angle(part.names, degrees, arcs=1, nearest=0.08)
                return True
            case "MeasureOf", "Arc", _:
                return self._write_at_arc(part.names, degrees)
        return False

    def _write_in_angle(self, names: Sequence[str], text: str, arcs: int, nearest: float) -> None:
        """Draw arcs in the angle ABC, and write a text between its sides.

        Args:
            names: the names of A, of B at the corner, and of C.
            text: the text.
            arcs: how many arcs are drawn.
            nearest: the least distance of the text from the corner, as a share of the picture.
        """
        angle = self._angle_at(names)
        self._draw_arcs(names, arcs)
        # Closer to the corner than this the text would not fit between the sides: at the distance d
        # on the bisector each side is d sin(turn / 2) away. In a sharp angle it fits nowhere near
        # the corner, and then 0.16 has to do.
        half_width = 0.5 * (self._text_width(text) + 0.02)
        fitting_distance = half_width / max(0.1, abs(math.sin(angle.turn / 2)))
        min_distance = max(nearest, min(0.16, fitting_distance))
        shorter_side = min(
            abs(self.point_by_name[name] - angle.corner) for name in (names[0], names[2])
        )
        # The first candidates are the best ones: outwards along the bisector, and beside it.
        candidates = []
        for step in (*range(9), -1, -2, -3):
            distance = min(0.8 * shorter_side, min_distance + 0.012 * step)
            for share in (0.5, 0.4, 0.6):
                direction = angle.first_direction + share * angle.turn
                candidates.append(angle.corner + rect(distance, direction))
        self._write_label(text, candidates)

    def _write_at_arc(self, names: Sequence[str], text: str) -> bool:
        """Write a text outside of an arc, which is named by its ends, or by three of its points.

        Returns False, and writes nothing, where no circle of the diagram has the ends of the arc.
        """
        ends = {names[0], names[-1]}
        circles_with_ends = [
            circle
            for circle in self.radius_by_circle
            if ends <= set(self.form.points_by_circle[circle])
        ]
        if not circles_with_ends:
            return False
        circle = circles_with_ends[0]
        centre_name, _ = circle
        centre = self.point_by_name[centre_name]
        if len(names) == 2:  # the smaller of the two arcs
            angle = self._angle_at((names[0], centre_name, names[-1]))
            direction = angle.first_direction + angle.turn / 2
        else:  # the point between the ends says which of the two arcs it is
            direction = phase(self.point_by_name[names[1]] - centre)
        # The text is wider than high, so most of its half width counts.
        distance = self.radius_by_circle[circle] + _GAP_AT_ARC + 0.4 * self._text_width(text)
        # Beside its middle the arc has more room, if a label or a line is there.
        turns = (0, 0.15, -0.15, 0.3)
        self._write_label(text, [centre + rect(distance, direction + turn) for turn in turns])
        return True

    def _write_beside_segment(self, start: complex, end: complex, text: str) -> None:
        """Write a text beside a segment, if possible on the outer side.

        That is the side away from the middle of the diagram.
        """
        normal = rect(1, phase(end - start) + math.pi / 2)  # at a right angle to the segment
        # The real part of a * conj(b) is the scalar product of two vectors.
        outward = (((start + end) / 2 - self.middle_of_points) * normal.conjugate()).real
        if outward < 0:
            normal = -normal
        # Half the text's size in the direction of the normal: half its width beside an upright
        # segment, half its height beside a level one.
        width = self._text_width(text)
        # Computed in this order, on which the last bit of a label's place depends.
        half_height = abs(normal.imag) * _LABEL_PIXELS / _PICTURE_PIXELS / 2
        half_size = abs(normal.real) * width / 2 + half_height
        # The nearest to the segment come first, among these the nearest to its middle, and of two
        # that are equal the outer one. The gaps are shares of the picture.
        candidates = []
        for gap in (0.008, 0.014, 0.022):
            for share in (0.5, 0.4, 0.6, 0.3, 0.7):
                point_on_segment = start + (end - start) * share
                offset = (half_size + gap) * normal
                candidates.append(point_on_segment + offset)
                candidates.append(point_on_segment - offset)
        self._write_label(text, candidates)

    def _angle_at(self, names: Sequence[str]) -> _AngleInPicture:
        """Return the corner and directions of the angle ABC; `names` are A, B at its corner, C."""
        first, corner, second = self._points_named(names)
        first_direction = phase(first - corner)
        # The difference of the directions, brought to at most half a turn either way.
        difference = phase(second - corner) - first_direction
        turn = (difference + math.pi) % (2 * math.pi) - math.pi
        return _AngleInPicture(corner, first_direction=first_direction, turn=turn)

    def _draw_arcs(self, names: Sequence[str], count: int) -> None:
        """Draw `count` arcs in the angle ABC with its corner at B, one outside of another."""
        angle = self._angle_at(names)
        for number in range(count):
            radius = _ANGLE_RADIUS + _ARC_GAP * number
            # An arc is a line of twelve short pieces.
            directions = [angle.first_direction + angle.turn * step / 12 for step in range(13)]
            self._draw_line(*(angle.corner + rect(radius, direction) for direction in directions))

    def _draw_strokes(
        self, segments: Sequence[Sequence[str]], *, count: int, wing_angle: float, position: float
    ) -> None:
        """Draw ticks (equal lengths) or arrow heads (parallels) on several segments.

        Args:
            segments: each segment by the names of its two ends. All arrow heads point the way of
                the first segment.
            count: how many strokes a segment has, side by side.
            wing_angle: the angle between a segment and each half of a stroke, in radians.
            position: where on a segment the strokes are, from 0 at its start to 1 at its end.
        """
        first_start, first_end = self._points_named(segments[0])
        for names in segments:
            start, end = self._points_named(names)
            scalar_product = ((end - start) * (first_end - first_start).conjugate()).real
            if scalar_product < 0:  # the segment points the other way
                start, end = end, start
            direction = phase(end - start)
            middle = start + position * (end - start)
            for number in range(count):
                # The strokes lie symmetrically about the middle.
                offset = _STROKE_GAP * (number - (count - 1) / 2)
                tip = middle + rect(offset, direction)
                self._draw_line(
                    tip + rect(_HALF_TICK_LENGTH, direction + wing_angle),
                    tip,
                    tip + rect(_HALF_TICK_LENGTH, direction - wing_angle),
                )

    def _draw_marks(self) -> list[Term]:
        """Draw the marks of right angles, parallels, equal lengths and equal angles.

        These are squares, arrows, ticks and arcs. Parts that are equal or parallel have the same
        number of marks: with AB = CD and EF = GH, AB and CD have one tick, EF and GH two.

        Returns the facts that have such a mark.
        """
        right_angle_terms = self._draw_right_angles()
        parallels = self._find_equal_parts("Parallel", side_head="Line", point_count=2)
        for number, lines in enumerate(parallels.groups, start=1):
            # The wings of an arrow head point back, and it stands a little before the middle.
            self._draw_strokes(lines, count=number, wing_angle=0.75 * math.pi, position=0.42)
        equal_lengths = self._find_equal_parts("Equals", side_head="LengthOf", point_count=2)
        for number, segments in enumerate(equal_lengths.groups, start=1):
            # A tick stands across the segment, in its middle.
            self._draw_strokes(segments, count=number, wing_angle=math.pi / 2, position=0.5)
        equal_angles = self._find_equal_parts("Equals", side_head="MeasureOf", point_count=3)
        for number, angles in enumerate(equal_angles.groups, start=1):
            for names in angles:
                self._draw_arcs(names, count=number + 1)  # one arc alone belongs to a value
        return [
            *right_angle_terms,
            *parallels.terms,
            *equal_lengths.terms,
            *equal_angles.terms,
        ]

    def _draw_right_angles(self) -> list[Term]:
        """Draw a square at each right angle, and return the facts that say that it is one."""
        marked_terms = []
        corners: set[tuple[int, int]] = set()
        for term in self.form.facts_with_head("Perpendicular"):
            corner = self._intersection(term)
            if corner is None:
                continue
            marked_terms.append(term)
            # Corners whose coordinates round to the same fiftieths of the picture count as one.
            rounded_corner = (round(50 * corner.real), round(50 * corner.imag))
            if rounded_corner in corners:  # two facts on one corner are one square
                continue
            corners.add(rounded_corner)
            sides = []  # of the square, along the two lines
            for line in term.arguments:
                # The end of the line that is farther from the corner.
                far_end = max(self._points_named(line.names), key=lambda end: abs(end - corner))
                sides.append(rect(_RIGHT_ANGLE_SIDE, phase(far_end - corner)))
            first_side, second_side = sides
            self._draw_line(
                corner + first_side, corner + first_side + second_side, corner + second_side
            )
        return marked_terms

    def _find_equal_parts(self, head: str, side_head: str, point_count: int) -> _EqualParts:
        """Return the parts of the diagram that facts say to be equal or parallel, in groups.

        Parts that several facts connect are one group: AB = CD and CD = EF give {AB, CD, EF}.

        Args:
            head: the head of these facts, `Equals` or `Parallel`.
            side_head: the head of their two sides: `LengthOf` for
                `Equals(LengthOf(Line(A, B)), LengthOf(Line(C, D)))`, and `Line` for
                `Parallel(Line(A, B), Line(C, D))`.
            point_count: how many points name a part, such as 2 for AB.
        """
        terms = []
        groups: list[set[tuple[str, ...]]] = []
        for term in self.form.facts_with_head(head):
            parts = set()
            for argument in term.arguments:
                if argument.head == side_head:
                    part = argument if side_head == "Line" else argument.arguments[0]
                    parts.add(tuple(part.names))
            are_in_picture = all(
                len(names) == point_count and set(names) <= self.point_by_name.keys()
                for names in parts
            )
            if len(term.arguments) == len(parts) == 2 and are_in_picture:
                terms.append(term)
                # Groups that this fact connects become one.
                connected_groups = [group for group in groups if group & parts]
                groups = [group for group in groups if group not in connected_groups]
                groups.append(parts.union(*connected_groups))
        return _EqualParts(terms, groups=[sorted(group) for group in groups])

    def _intersection(self, term: Term) -> complex | None:
        """Return where the two lines of a fact meet: in a common point, or where they cross.

        The fact is `Perpendicular(Line(A, B), Line(C, D))`, say. Returns None where its lines do
        not meet, or where one of their points has no coordinates.
        """
        lines = [line.names for line in term.arguments]
        if len(lines) != 2:
            return None
        for names in lines:
            if len(names) != 2 or not set(names) <= self.point_by_name.keys():
                return None
        common_names = set(lines[0]) & set(lines[1])
        if common_names:
            return self.point_by_name[common_names.pop()] if len(common_names) == 1 else None
        a, b = self._points_named(lines[0])
        c, d = self._points_named(lines[1])
        # The imaginary part of conj(u) * v is the cross product of two vectors, 0 for parallels.
        cross_product = ((b - a).conjugate() * (d - c)).imag
        if abs(cross_product) <= 1e-9:
            return None
        # The lines cross at a + share * (b - a), the point for which c, d and it lie on one line:
        # the cross product of (a + share * (b - a) - c) and (d - c) is 0.
        share = ((c - a).conjugate() * (d - c)).imag / cross_product
        # Lines that are drawn by hand may end a little before they meet.
        return a + share * (b - a) if -0.05 <= share <= 1.05 else None

    def _points_named(self, names: Sequence[str]) -> list[complex]:
        """Return the coordinates of points, in the order of their names."""
        return [self.point_by_name[name] for name in names]

    def _text_width(self, text: str) -> float:
        """Return the width of a text, as a share of the picture."""
        return float(self.font.getlength(text)) / (OVERSAMPLING * _PICTURE_PIXELS)

    def _write_label(self, text: str, candidates: Sequence[complex]) -> None:
        """Write a text around the point at which it hides least, out of the candidates.

        Of equally good candidates the first one is taken.
        """
        half_width = self._text_width(text) / 2 + 0.004  # a little white on both sides
        half_height = _LABEL_PIXELS / _PICTURE_PIXELS / 2

        def cost(point: complex) -> int:
            """Return how bad a place is: outside of the picture, on labels, or on ink."""
            box = Box.around(point, half_width, half_height)
            left, top, right, bottom = box
            overlap_count = sum(map(box.overlaps, self.label_boxes))
            # `Box.contains` would be slow for the thousands of ink points of a figure.
            hidden_ink_count = sum(
                left < ink.real < right and top < ink.imag < bottom for ink in self.ink_points
            )
            is_outside = min(box) < _LABEL_MARGIN or max(box) > 1 - _LABEL_MARGIN
            cost_outside = _COST_OUTSIDE if is_outside else 0
            return cost_outside + _COST_OF_OVERLAP * overlap_count + hidden_ink_count

        best_point = min(candidates, key=cost)
        self.label_boxes.append(Box.around(best_point, half_width, half_height))
        self.canvas.label(text, (best_point.real, best_point.imag))


def latex_as_plain_text(value: str, *, keep_spaces: bool = False) -> str:
    r"""Return a value in LaTeX as a picture shows it, such as `2√3` for `2\sqrt{3}`.

    Further examples are `1/2` for `\frac{1}{2}` and `x²+1` for `x^{2} + 1`. With `keep_spaces` the
    spaces between words stay.
    """
    for pattern, replacement in _PLAIN_TEXT_BY_LATEX:
        value = re.sub(pattern, replacement, value)
    return value if keep_spaces else "".join(value.split())
