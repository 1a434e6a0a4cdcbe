"""Draws the diagram of a Geometry3K problem anew from its logic form.

It serves machines without the original pictures. Values stand beside their segment, in their angle or at
their arc; a fact for which a drawing has no mark is written below it. Points are complex numbers,
in shares of the picture, y downwards.
"""

import math
import re
from cmath import phase, rect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageFont

from adora_vl.geometry.forms import Form, Term, points_of
from adora_vl.synthetic.drawing import OVERSAMPLING, Canvas
from data_prep.logic_forms import in_words

# The longer side of a picture, and the height of a label, in pixels.
_PICTURE_PIXELS = 480
_FONT_PIXELS = 19
# The range in which the points lie, and the white around everything, in shares of the picture.
_DIAGRAM_RANGE = (0.14, 0.86)
_MARGIN = 0.02
# The side of a right angle's square, the radius of an angle's arc, and half a tick.
_RIGHT_ANGLE_SIDE = 0.03
_ANGLE_RADIUS = 0.055
_HALF_TICK = 0.014
_LATEX = (
    (r"\\sqrt\{([^{}]*)\}", r"√\1"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}(?=[a-z])", r"(\1/\2)"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2"),
    (r"\^\{?2\}?", "²"),
    (r"\\pi", "π"),
    (r"\s+", ""),
)


def can_be_drawn(form: Form) -> bool:
    """Return whether all points of a form's lines, circles and facts have coordinates."""
    needed = {name for row in form.rows for name in row}
    for term in form.terms:
        if term:
            needed |= points_of(term)
    needed |= {centre for centre, _ in form.rounds}
    return bool(form.points) and needed <= form.points.keys()


def draw_form(form: Form) -> Image.Image:
    """Draw the diagram of a form, black on white; `can_be_drawn` has to hold."""
    return _Diagram(form).picture()


def draw_if_legible(form: Form) -> Image.Image | None:
    """Draw the diagram of a form; `can_be_drawn` has to hold.

    None is returned where a label hides another one or a point.
    """
    diagram = _Diagram(form)
    picture = diagram.picture()
    return picture if diagram.is_legible() else None


# The box of a label: left, top, right, bottom, in shares of the picture.
_Box = tuple[float, float, float, float]


def _points_to_draw(form: Form) -> list[str]:
    """Return the points of a form's lines and circles, or all if it has none, sorted.

    A point without coordinates is left out.
    """
    names = {name for row in form.rows for name in row}
    for (centre, _), points_on in form.rounds.items():
        names |= {centre, *points_on}
    return sorted((names or set(form.points)) & form.points.keys())


def _is_inside(point: complex, box: _Box) -> bool:
    """Return whether a point lies in a box."""
    left, top, right, bottom = box
    return left < point.real < right and top < point.imag < bottom


def _overlap(box: _Box, label: _Box) -> bool:
    """Return whether two boxes overlap."""
    beside = box[0] < label[2] and label[0] < box[2]
    return beside and box[1] < label[3] and label[1] < box[3]


class _Diagram:
    """The drawing of one form, and what its labels have to keep clear of."""

    def __init__(self, form: Form) -> None:
        """Place the points of a form in the picture, and begin an empty canvas."""
        import matplotlib as mpl  # not for every command of this package

        self.form = form
        # The places in the form, in pixels of its original.
        sources = {name: complex(*form.points[name]) for name in _points_to_draw(form)}
        source_radii = {}
        for circle, points_on in form.rounds.items():
            distances = [
                abs(sources[name] - sources[circle[0]]) for name in points_on if name in sources
            ]
            if distances:
                source_radii[circle] = sum(distances) / len(distances)
        extent = list(sources.values())
        for (centre, _), radius in source_radii.items():
            extent += [sources[centre] + radius * corner for corner in (1 + 1j, -1 - 1j)]
        xs = [point.real for point in extent]
        ys = [point.imag for point in extent]
        size = max(max(xs) - min(xs), max(ys) - min(ys)) or 1
        scale = (_DIAGRAM_RANGE[1] - _DIAGRAM_RANGE[0]) / size
        origin = complex(min(xs), min(ys))
        self.at = {
            name: scale * (point - origin) + _DIAGRAM_RANGE[0] * (1 + 1j)
            for name, point in sources.items()
        }
        self.middle = sum(self.at.values()) / len(self.at)
        self.radii = {circle: scale * radius for circle, radius in source_radii.items()}
        file = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"  # has a root and a π
        self.font = ImageFont.truetype(str(file), OVERSAMPLING * _FONT_PIXELS)
        self.canvas = Canvas(_PICTURE_PIXELS, font=self.font)
        self.ink: list[complex] = []  # points on what is drawn
        self.boxes: list[_Box] = []  # of all labels so far

    def picture(self) -> Image.Image:
        """Draw the figure, its marks, values and names, and cut off what stays white.

        Facts without a mark stand below the figure. The order decides which label gives way: values
        come before the names of points, and what stands below comes last.
        """
        for row in self.form.rows:
            self._draw_line(*(self.at[name] for name in row))
        for (centre, _), radius in self.radii.items():
            point = self.at[centre]
            self.canvas.circle((point.real, point.imag), radius)
            self.canvas.dot((point.real, point.imag))
            self.ink += [point + rect(radius, step / 60) for step in range(377)]
        marked_terms = self._draw_marks()
        sentences = []
        for term in self.form.terms:
            if term and term not in marked_terms and not self._write_value(term):
                sentences.append(in_words(term))
        for name, point in self.at.items():
            places = []
            for distance in (0.032, 0.045, 0.06, 0.08, 0.1):
                for sixteenth in range(16):
                    places.append(point + rect(distance, sixteenth * math.pi / 8))
            self._write_label(name, places)
        self._write_below(sentences)
        return self._cropped_picture()

    def _write_below(self, sentences: Sequence[str | None]) -> None:
        """Write sentences below the figure, each once, one a line."""
        bottom = max([point.imag for point in self.ink] + [box[3] for box in self.boxes])
        for number, text in enumerate(dict.fromkeys(filter(None, sentences)), start=1):
            y = min(0.985, bottom + 0.045 * number)
            self._write_label(plain(text, words=True), [complex(0.5, y)])

    def _cropped_picture(self) -> Image.Image:
        """Return the part of the canvas that has something on it, with a white edge."""
        boxes = list(self.boxes)
        for point in self.ink:
            boxes.append((point.real, point.imag, point.real, point.imag))
        edges = (
            min(box[0] for box in boxes) - _MARGIN,
            min(box[1] for box in boxes) - _MARGIN,
            max(box[2] for box in boxes) + _MARGIN,
            max(box[3] for box in boxes) + _MARGIN,
        )
        left, top, right, bottom = [round(_PICTURE_PIXELS * min(1, max(0, edge))) for edge in edges]
        return self.canvas.picture().crop((left, top, right, bottom))

    def is_legible(self) -> bool:
        """Return whether no label of the picture lies on another one, on a point, or outside."""
        for number, box in enumerate(self.boxes):
            left, top, right, bottom = box
            if min(left, top) < 0 or max(right, bottom) > 1:
                return False
            if any(_is_inside(point, box) for point in self.at.values()):
                return False
            if any(_overlap(box, earlier) for earlier in self.boxes[:number]):
                return False
        return True

    def _draw_line(self, *points: complex) -> None:
        """Draw a line through points, and note the ink on it."""
        self.canvas.line(*((point.real, point.imag) for point in points))
        for start, end in pairwise(points):
            steps = max(2, int(abs(end - start) / 0.006))
            self.ink += [start + (end - start) * step / steps for step in range(steps + 1)]

    def _write_value(self, term: Term) -> bool:
        """Write the value of a length, an angle or an arc into the picture, if a term has one.

        Returns whether it has, or needs no words, as that a point lies on a line.
        """
        if term.head.startswith("PointLies"):
            return True
        if term.head != "Equals" or len(term.arguments) != 2 or not term.arguments[0].arguments:
            return False
        (measure, right_side) = term.arguments
        subject = measure.arguments[0]
        value = right_side
        if right_side.head in ("LengthOf", "MeasureOf") and right_side.arguments:
            value = right_side.arguments[0]
        # An angle that is equal to `angle 1` gets the number 1 for its value.
        number = re.fullmatch(r"[Aa]ngle (\w+)", in_words(value) or "")
        if not set(subject.names) <= self.at.keys() or (value.arguments and not number):
            return False
        text = number[1] if number else plain(value.head)
        degrees = f"{text}°" if re.fullmatch(r"[\w.]+", text) else f"({text})°"
        if (measure.head, subject.head, len(subject.names)) == ("LengthOf", "Line", 2):
            self._write_beside(self.at[subject.names[0]], self.at[subject.names[1]], text)
            return True
        if (measure.head, subject.head, len(subject.names)) == ("MeasureOf", "Angle", 3):
            if number:
                self._write_in_angle(subject.names, text, arcs=0, nearest=0.045)
            else:
                self._write_in_angle(subject.names, degrees, arcs=1, nearest=0.08)
            return True
        if measure.head == "MeasureOf" and subject.head == "Arc":
            return self._write_at_arc(subject.names, degrees)
        return False

    def _write_in_angle(self, names: Sequence[str], text: str, arcs: int, nearest: float) -> None:
        """Draw arcs in an angle, and write a text between its sides, `nearest` or further out."""
        corner, start, turn = self._corner_and_turn(names)
        self._draw_arcs(names, arcs)
        # Closer to the corner than this the text would not fit between the sides.
        between_sides = 0.5 * (self._text_width(text) + 0.02) / max(0.1, abs(math.sin(turn / 2)))
        min_distance = max(nearest, min(0.16, between_sides))
        shorter_side = min(abs(self.at[name] - corner) for name in (names[0], names[2]))
        places = []
        for step in (*range(9), -1, -2, -3):
            distance = min(0.8 * shorter_side, min_distance + 0.012 * step)
            for share in (0.5, 0.4, 0.6):
                places.append(corner + rect(distance, start + share * turn))
        self._write_label(text, places)

    def _write_at_arc(self, names: Sequence[str], text: str) -> bool:
        """Write a text outside of an arc, and return whether a circle has its ends."""
        ends = {names[0], names[-1]}
        # The first circle that both ends lie on.
        for circle in self.radii:
            if ends <= set(self.form.rounds[circle]):
                break
        else:
            return False
        centre = self.at[circle[0]]
        if len(names) == 2:  # the smaller of the two arcs
            _, start, turn = self._corner_and_turn((names[0], circle[0], names[-1]))
            direction = start + turn / 2
        else:  # the point between the ends says which of the two arcs it is
            direction = phase(self.at[names[1]] - centre)
        # 0.03 of the canvas keep the text clear of the circle. It is wider than high, so most of
        # its half width counts.
        distance = self.radii[circle] + 0.03 + 0.4 * self._text_width(text)
        self._write_label(
            text, [centre + rect(distance, direction + turned) for turned in (0, 0.15, -0.15, 0.3)]
        )
        return True

    def _write_beside(self, start: complex, end: complex, text: str) -> None:
        """Write a text beside a segment, rather on the side away from the figure's middle."""
        normal = rect(1, phase(end - start) + math.pi / 2)
        outward = ((start + end) / 2 - self.middle) * normal.conjugate()
        normal *= 1 if outward.real >= 0 else -1
        # Half the text's size in the direction of the normal.
        half_size = (
            abs(normal.real) * self._text_width(text) / 2
            + abs(normal.imag) * _FONT_PIXELS / _PICTURE_PIXELS / 2
        )
        # The nearest places come first, then those nearest to the middle of the segment.
        places = []
        for gap in (0.008, 0.014, 0.022):
            for share in (0.5, 0.4, 0.6, 0.3, 0.7):
                for side in (1, -1):
                    places.append(start + (end - start) * share + side * (half_size + gap) * normal)
        self._write_label(text, places)

    def _corner_and_turn(self, names: Sequence[str]) -> tuple[complex, float, float]:
        """Return the corner of an angle, the direction of its first side, and the turn to the second.

        Both are in radians, and the turn is at most half a turn either way.
        """
        first, corner, second = self._places(names)
        start = phase(first - corner)
        turn = (phase(second - corner) - start + math.pi) % (2 * math.pi) - math.pi
        return corner, start, turn

    def _draw_arcs(self, names: Sequence[str], count: int) -> None:
        """Draw `count` arcs in an angle, one outside of another."""
        corner, start, turn = self._corner_and_turn(names)
        for number in range(count):
            radius = _ANGLE_RADIUS + 0.014 * number
            self._draw_line(
                *(corner + rect(radius, start + turn * step / 12) for step in range(13))
            )

    def _draw_strokes(
        self, names: Sequence[str], towards: complex, count: int, wing: float, part: float
    ) -> None:
        """Draw ticks or arrow heads on a segment: strokes with two wings.

        `wing` is the turn of the wings from the segment's direction, in radians, and `part` where
        on the segment the strokes stand.
        """
        start, end = self._places(names)
        if ((end - start) * towards.conjugate()).real < 0:
            start, end = end, start
        along = phase(end - start)
        for number in range(count):
            tip = start + part * (end - start) + rect(0.011 * (number - (count - 1) / 2), along)
            self._draw_line(
                tip + rect(_HALF_TICK, along + wing), tip, tip + rect(_HALF_TICK, along - wing)
            )

    def _draw_marks(self) -> list[Term]:
        """Draw right angles, arrows of parallels, ticks of equal lengths, arcs of equal angles.

        Returns the facts that have such a mark.
        """
        marked_terms = self._draw_right_angles()
        for head, measure, points in (
            ("Parallel", "Line", 2),
            ("Equals", "LengthOf", 2),
            ("Equals", "MeasureOf", 3),
        ):
            terms, groups = self._equal_parts(head, measure, points)
            marked_terms += terms
            for number, group in enumerate(map(sorted, groups), start=1):
                for names in group:
                    if measure == "MeasureOf":
                        self._draw_arcs(names, number + 1)  # one arc belongs to a value
                        continue
                    towards = self.at[group[0][1]] - self.at[group[0][0]]
                    is_arrow = measure == "Line"
                    self._draw_strokes(
                        names,
                        towards=towards,
                        count=number,
                        wing=0.75 * math.pi if is_arrow else math.pi / 2,
                        part=0.42 if is_arrow else 0.5,
                    )
        return marked_terms

    def _draw_right_angles(self) -> list[Term]:
        """Draw a square at each right angle, and return the facts that have one."""
        marked_terms = []
        corners: set[tuple[int, int]] = set()
        for term in self.form.found("Perpendicular"):
            corner = self._crossing(term)
            if corner is None:
                continue
            marked_terms.append(term)
            key = (round(50 * corner.real), round(50 * corner.imag))
            if key in corners:  # two facts on one corner are one square
                continue
            corners.add(key)
            sides = []
            for line in term.arguments:
                far_end = max((self.at[name] - corner for name in line.names), key=abs)
                sides.append(rect(_RIGHT_ANGLE_SIDE, phase(far_end)))
            first_side, second_side = sides
            self._draw_line(
                corner + first_side, corner + first_side + second_side, corner + second_side
            )
        return marked_terms

    def _equal_parts(
        self, head: str, measure: str, points: int
    ) -> tuple[list[Term], list[set[tuple[str, ...]]]]:
        """Return the facts that two parts are equal or parallel, and the parts in groups.

        `head` is that of the facts, `measure` that of their sides, and a part is named by `points`
        points. Parts that several facts connect are one group, which gets one mark.
        """
        terms = []
        groups: list[set[tuple[str, ...]]] = []
        for term in self.form.found(head):
            sides = set()
            for argument in term.arguments:
                if argument.head == measure:
                    part = argument if measure == "Line" else argument.arguments[0]
                    sides.add(tuple(part.names))
            can_be_marked = all(len(side) == points and {*side} <= {*self.at} for side in sides)
            if len(term.arguments) == 2 == len(sides) and can_be_marked:
                terms.append(term)
                # Groups that this fact connects become one.
                touching = [group for group in groups if group & sides]
                groups = [group for group in groups if group not in touching]
                groups.append(sides.union(*touching))
        return terms, groups

    def _crossing(self, term: Term) -> complex | None:
        """Return the point that two lines share, or where they cross; None where they do neither."""
        lines = [line.names for line in term.arguments]
        if len(lines) != 2:
            return None
        for names in lines:
            if len(names) != 2 or not set(names) <= self.at.keys():
                return None
        common = set(lines[0]) & set(lines[1])
        if common:
            return self.at[common.pop()] if len(common) == 1 else None
        a, b = self._places(lines[0])
        c, d = self._places(lines[1])
        cross = ((b - a).conjugate() * (d - c)).imag
        if abs(cross) <= 1e-9:  # they are parallel
            return None
        share = ((c - a).conjugate() * (d - c)).imag / cross
        # Lines that are drawn by hand may end a little before they meet.
        return a + share * (b - a) if -0.05 <= share <= 1.05 else None

    def _places(self, names: Sequence[str]) -> list[complex]:
        """Return the places of points by their names."""
        return [self.at[name] for name in names]

    def _text_width(self, text: str) -> float:
        """Return the width of a text, as a share of the picture."""
        return float(self.font.getlength(text)) / (OVERSAMPLING * _PICTURE_PIXELS)

    def _write_label(self, text: str, points: Sequence[complex]) -> None:
        """Write a text at the first of the places at which it hides least."""
        half_width = self._text_width(text) / 2 + 0.004
        half_height = _FONT_PIXELS / _PICTURE_PIXELS / 2

        def box_at(point: complex) -> _Box:
            """Return the box of the text around a point."""
            return (
                point.real - half_width,
                point.imag - half_height,
                point.real + half_width,
                point.imag + half_height,
            )

        def cost(point: complex) -> int:
            """Return how bad a place is: outside of the picture, on labels, or on ink."""
            box = box_at(point)
            left, top, right, bottom = box
            overlaps = sum(_overlap(box, label) for label in self.boxes)
            # inline, since a figure has thousands of such points
            hidden_ink = sum(
                left < ink.real < right and top < ink.imag < bottom for ink in self.ink
            )
            is_outside = min(left, top) < 0.005 or max(right, bottom) > 0.995
            return (1000 if is_outside else 0) + 200 * overlaps + hidden_ink

        best = min(points, key=cost)
        self.boxes.append(box_at(best))
        self.canvas.label(text, (best.real, best.imag))


def plain(value: str, *, words: bool = False) -> str:
    r"""Write a value as a picture has it: `2√3` for `2\sqrt{3}`. Spaces stay if `words`."""
    replacements = _LATEX[:-1] if words else _LATEX  # the last one removes spaces
    for pattern, replacement in replacements:
        value = re.sub(pattern, replacement, value)
    return value
