"""Draws the diagram of a Geometry3K problem anew from its logic form.

It serves machines without the original pictures. Values stand beside their segment, in their angle or at
their arc; a fact for which a drawing has no mark is written below it. Points are complex numbers,
in shares of the picture, y downwards.
"""

import math
import re
from cmath import phase, rect
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

from PIL import Image, ImageFont

from adora_vl.geometry.forms import Form, Term, points_of
from adora_vl.synthetic.drawing import OVERSAMPLING, Canvas
from data_prep.logic_forms import in_words

# The longer side of a picture, and the height of a label, in pixels.
_SIZE = 480
_FONT = 19
# The range in which the points lie, and the white around everything, in shares of the picture.
_FRAME = (0.14, 0.86)
_PAD = 0.02
# The side of a right angle's square, the radius of an angle's arc, and half a tick.
_RIGHT = 0.03
_ARC = 0.055
_STROKE = 0.014
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
    needed = {name for row in form.rows for name in row}.union(
        *(points_of(term) for term in form.terms if term)
    )
    return (
        bool(form.points) and needed | {centre for centre, _ in form.rounds} <= form.points.keys()
    )


def drawn(form: Form) -> Image.Image:
    """Draw the diagram of a form, black on white; `can_be_drawn` has to hold."""
    return _Diagram(form).picture()


def drawn_legibly(form: Form) -> Image.Image | None:
    """Draw the diagram of a form; `can_be_drawn` has to hold.

    None is returned where a label hides another one or a point.
    """
    diagram = _Diagram(form)
    picture = diagram.picture()
    return picture if diagram.is_legible() else None


class _Diagram:
    """The drawing of one form, and what its labels have to keep clear of."""

    def __init__(self, form: Form) -> None:
        self.form = form
        on_lines = {name for row in form.rows for name in row}
        used = on_lines.union(*form.rounds.values(), (centre for centre, _ in form.rounds)) or set(
            form.points
        )
        at = {name: complex(*form.points[name]) for name in sorted(used & form.points.keys())}
        radii = {}
        for circle, on in form.rounds.items():
            if reaches := [abs(at[name] - at[circle[0]]) for name in on if name in at]:
                radii[circle] = sum(reaches) / len(reaches)
        ends = [
            at[centre] + r * way for (centre, _), r in radii.items() for way in (1 + 1j, -1 - 1j)
        ]
        xs, ys = zip(*((point.real, point.imag) for point in (*at.values(), *ends)), strict=True)
        scale = (_FRAME[1] - _FRAME[0]) / (max(max(xs) - min(xs), max(ys) - min(ys)) or 1)
        corner = complex(min(xs), min(ys))
        self.at = {
            name: scale * (point - corner) + _FRAME[0] * (1 + 1j) for name, point in at.items()
        }
        self.middle = sum(self.at.values()) / len(self.at)
        self.radii = {circle: scale * r for circle, r in radii.items()}
        import matplotlib as mpl  # not for every command of this package

        file = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"  # has a root and a π
        self.font = ImageFont.truetype(str(file), OVERSAMPLING * _FONT)
        self.canvas = Canvas(_SIZE, font=self.font)
        self.ink: list[complex] = []  # points on what is drawn
        # The box of each label: left, top, right, bottom.
        self.boxes: list[tuple[float, float, float, float]] = []

    def picture(self) -> Image.Image:
        for row in self.form.rows:
            self._line(*(self.at[name] for name in row))
        for (centre, _), r in self.radii.items():
            point = self.at[centre]
            self.canvas.circle((point.real, point.imag), r)
            self.canvas.dot((point.real, point.imag))
            self.ink += [point + rect(r, step / 60) for step in range(377)]
        marked = self._marks()
        below = [
            in_words(term)
            for term in self.form.terms
            if term and term not in marked and not self._value(term)
        ]
        for name, point in self.at.items():
            around = product((0.032, 0.045, 0.06, 0.08, 0.1), range(16))
            self._label(name, [point + rect(reach, turn * math.pi / 8) for reach, turn in around])
        bottom = max([point.imag for point in self.ink] + [box[3] for box in self.boxes])
        for number, text in enumerate(dict.fromkeys(filter(None, below)), start=1):
            self._label(
                plain(text, words=True), [complex(0.5, min(0.985, bottom + 0.045 * number))]
            )
        boxes = [*self.boxes, *((point.real, point.imag) * 2 for point in self.ink)]
        pixels = [
            round(_SIZE * min(1, max(0, edge)))
            for edge in (
                min(box[0] for box in boxes) - _PAD,
                min(box[1] for box in boxes) - _PAD,
                max(box[2] for box in boxes) + _PAD,
                max(box[3] for box in boxes) + _PAD,
            )
        ]
        left, top, right, bottom = pixels
        return self.canvas.picture().crop((left, top, right, bottom))

    def is_legible(self) -> bool:
        """Return whether no label of the picture lies on another one, on a point, or outside."""
        for number, box in enumerate(self.boxes):
            left, top, right, bottom = box
            if min(left, top) < 0 or max(right, bottom) > 1:
                return False
            if any(
                left < point.real < right and top < point.imag < bottom
                for point in self.at.values()
            ):
                return False
            for earlier in self.boxes[:number]:
                beside = left < earlier[2] and earlier[0] < right
                if beside and top < earlier[3] and earlier[1] < bottom:
                    return False
        return True

    def _line(self, *points: complex) -> None:
        self.canvas.line(*((place.real, place.imag) for place in points))
        for start, end in pairwise(points):
            steps = max(2, int(abs(end - start) / 0.006))
            self.ink += [start + (end - start) * step / steps for step in range(steps + 1)]

    def _value(self, term: Term) -> bool:
        """Write the value of a length, an angle or an arc into the picture, if a term has one.

        Returns whether it has.
        """
        if term.head.startswith("PointLies"):
            return True
        if term.head != "Equals" or len(term.arguments) != 2 or not term.arguments[0].arguments:
            return False
        (kind, right_side) = term.arguments
        subject = term.arguments[0].arguments[0]
        value = (
            right_side.arguments[0]
            if right_side.head in ("LengthOf", "MeasureOf") and right_side.arguments
            else right_side
        )
        number = re.fullmatch(r"[Aa]ngle (\w+)", in_words(value) or "")
        if not set(subject.names) <= self.at.keys() or (value.arguments and not number):
            return False
        text = number[1] if number else plain(value.head)
        degrees = f"{text}°" if re.fullmatch(r"[\w.]+", text) else f"({text})°"
        if (kind.head, subject.head, len(subject.names)) == ("LengthOf", "Line", 2):
            self._beside(self.at[subject.names[0]], self.at[subject.names[1]], text)
        elif (kind.head, subject.head, len(subject.names)) == ("MeasureOf", "Angle", 3):
            corner, start, turn = self._angle(subject.names)
            self._arcs(subject.names, 0 if number else 1)
            text = text if number else degrees
            min_reach = min(
                0.16, 0.5 * (self._width(text) + 0.02) / max(0.1, abs(math.sin(turn / 2)))
            )
            inside = 0.8 * min(
                abs(self.at[name] - corner) for name in (subject.names[0], subject.names[2])
            )
            nearest = max(0.045 if number else 0.08, min_reach)
            reaches = [min(inside, nearest + 0.012 * step) for step in (*range(9), -1, -2, -3)]
            self._label(
                text,
                [
                    corner + rect(r, start + part * turn)
                    for r in reaches
                    for part in (0.5, 0.4, 0.6)
                ],
            )
        elif kind.head == "MeasureOf" and subject.head == "Arc":
            ends = {subject.names[0], subject.names[-1]}
            circle = next(
                (circle for circle in self.radii if ends <= set(self.form.rounds[circle])), None
            )
            if circle is None:
                return False
            _, start, turn = self._angle((subject.names[0], circle[0], subject.names[-1]))
            middle = (
                start + turn / 2
                if len(subject.names) == 2
                else phase(self.at[subject.names[1]] - self.at[circle[0]])
            )
            reach = self.radii[circle] + 0.03 + 0.4 * self._width(degrees)
            self._label(
                degrees,
                [self.at[circle[0]] + rect(reach, middle + off) for off in (0, 0.15, -0.15, 0.3)],
            )
        else:
            return False
        return True

    def _beside(self, start: complex, end: complex, text: str) -> None:
        """Write a text beside a segment, rather on the side away from the figure's middle."""
        normal = rect(1, phase(end - start) + math.pi / 2)
        outward = ((start + end) / 2 - self.middle) * normal.conjugate()
        normal *= 1 if outward.real >= 0 else -1
        half = abs(normal.real) * self._width(text) / 2 + abs(normal.imag) * _FONT / _SIZE / 2
        spots = product((0.008, 0.014, 0.022), (0.5, 0.4, 0.6, 0.3, 0.7), (1, -1))
        self._label(
            text,
            [
                start + (end - start) * part + side * (half + far) * normal
                for far, part, side in spots
            ],
        )

    def _angle(self, names: Sequence[str]) -> tuple[complex, float, float]:
        """Return the corner of an angle, the direction of its first side, and the turn to the second.

        Both are in radians, and the turn is at most half a turn either way.
        """
        first, corner, last = (self.at[name] for name in names)
        start = phase(first - corner)
        return corner, start, (phase(last - corner) - start + math.pi) % (2 * math.pi) - math.pi

    def _arcs(self, names: Sequence[str], count: int) -> None:
        corner, start, turn = self._angle(names)
        for radius in (_ARC + 0.014 * number for number in range(count)):
            self._line(*(corner + rect(radius, start + turn * step / 12) for step in range(13)))

    def _strokes(
        self, names: Sequence[str], towards: complex, count: int, wing: float, part: float
    ) -> None:
        """Draw ticks or arrow heads on a segment: strokes with two wings.

        `wing` is the turn of the wings from the segment's direction, in radians, and `part` where
        on the segment the strokes stand.
        """
        start, end = (self.at[name] for name in names)
        if ((end - start) * towards.conjugate()).real < 0:
            start, end = end, start
        along = phase(end - start)
        for number in range(count):
            tip = start + part * (end - start) + rect(0.011 * (number - (count - 1) / 2), along)
            self._line(tip + rect(_STROKE, along + wing), tip, tip + rect(_STROKE, along - wing))

    def _marks(self) -> list[Term]:
        """Draw right angles, arrows of parallels, ticks of equal lengths, arcs of equal angles.

        Returns the facts that have such a mark.
        """
        marked = []
        corners: set[tuple[int, int]] = set()
        for term in self.form.found("Perpendicular"):
            corner = self._crossing(term)
            if corner is None:
                continue
            marked.append(term)
            key = (round(50 * corner.real), round(50 * corner.imag))
            if key not in corners:  # two facts on one corner are one square
                corners.add(key)
                square_sides = []
                for line in term.arguments:
                    far_end = max((self.at[name] - corner for name in line.names), key=abs)
                    square_sides.append(rect(_RIGHT, phase(far_end)))
                first_side, second_side = square_sides
                self._line(
                    corner + first_side, corner + first_side + second_side, corner + second_side
                )
        for head, measure, size in (
            ("Parallel", "Line", 2),
            ("Equals", "LengthOf", 2),
            ("Equals", "MeasureOf", 3),
        ):
            groups: list[set[tuple[str, ...]]] = []
            for term in self.form.found(head):
                measured = [argument for argument in term.arguments if argument.head == measure]
                sides = {
                    tuple((argument if measure == "Line" else argument.arguments[0]).names)
                    for argument in measured
                }
                if len(term.arguments) == 2 == len(sides) and all(
                    len(s) == size and {*s} <= {*self.at} for s in sides
                ):
                    marked.append(term)
                    touching = [group for group in groups if group & sides]
                    groups = [group for group in groups if group not in touching] + [
                        sides.union(*touching)
                    ]
            wing, part = (0.75 * math.pi, 0.42) if measure == "Line" else (math.pi / 2, 0.5)
            for number, group in enumerate(map(sorted, groups), start=1):
                for names in group:
                    if measure == "MeasureOf":
                        self._arcs(names, number + 1)  # one arc belongs to a value
                    else:
                        towards = self.at[group[0][1]] - self.at[group[0][0]]
                        self._strokes(names, towards=towards, count=number, wing=wing, part=part)
        return marked

    def _crossing(self, term: Term) -> complex | None:
        """Return the point that two lines share, or where they cross; None where they do neither."""
        lines = [line.names for line in term.arguments]
        if len(lines) != 2 or not all(
            len(names) == 2 and set(names) <= self.at.keys() for names in lines
        ):
            return None
        if common := set(lines[0]) & set(lines[1]):
            return self.at[common.pop()] if len(common) == 1 else None
        (a, b), (c, d) = ([self.at[name] for name in names] for names in lines)
        cross = ((b - a).conjugate() * (d - c)).imag
        part = ((c - a).conjugate() * (d - c)).imag / cross if abs(cross) > 1e-9 else 9
        return a + part * (b - a) if -0.05 <= part <= 1.05 else None

    def _width(self, text: str) -> float:
        return float(self.font.getlength(text)) / (OVERSAMPLING * _SIZE)

    def _label(self, text: str, points: Sequence[complex]) -> None:
        """Write a text at the first of the places at which it hides least."""
        wide = self._width(text) / 2 + 0.004
        high = _FONT / _SIZE / 2

        def box(point: complex) -> tuple[float, float, float, float]:
            return point.real - wide, point.imag - high, point.real + wide, point.imag + high

        def hidden(point: complex) -> int:
            left, top, right, end = box(point)
            overlaps = sum(
                left < label[2] and label[0] < right and top < label[3] and label[1] < end
                for label in self.boxes
            )
            outside = min(left, top) < 0.005 or max(right, end) > 0.995
            return (
                1000 * outside
                + 200 * overlaps
                + sum(left < p.real < right and top < p.imag < end for p in self.ink)
            )

        best = min(points, key=hidden)
        self.boxes.append(box(best))
        self.canvas.label(text, (best.real, best.imag))


def plain(value: str, *, words: bool = False) -> str:
    r"""Write a value as a picture has it: `2√3` for `2\sqrt{3}`. Spaces stay if `words`."""
    for pattern, written in _LATEX[: -1 if words else None]:
        value = re.sub(pattern, written, value)
    return value
