"""Draws the diagram of a Geometry3K problem anew from its logic form: lines, circles, letters,
values and marks.

For a machine without the original pictures. Values stand beside their segment, in their angle or at
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

# pixels of the longer side, and of a label's height
_SIZE = 480
_FONT = 19
# where the points lie; white around everything
_FRAME = (0.14, 0.86)
_PAD = 0.02
# side of a right angle's square, radius of an angle's arc, half a tick
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
    """Whether all points of its lines, circles and facts have a place."""
    needed = {name for row in form.rows for name in row}.union(
        *(points_of(term) for term in form.terms if term)
    )
    return (
        bool(form.points) and needed | {centre for centre, _ in form.rounds} <= form.points.keys()
    )


def drawn(form: Form) -> Image.Image:
    """The diagram, black on white. `can_be_drawn` has to hold."""
    return _Diagram(form).picture()


def drawn_legibly(form: Form) -> Image.Image | None:
    """The diagram; None where a label hides another one or a point. `can_be_drawn` has to hold."""
    diagram = _Diagram(form)
    picture = diagram.picture()
    return picture if diagram.is_legible() else None


class _Diagram:
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
        xs, ys = zip(*((place.real, place.imag) for place in (*at.values(), *ends)), strict=True)
        scale = (_FRAME[1] - _FRAME[0]) / (max(max(xs) - min(xs), max(ys) - min(ys)) or 1)
        corner = complex(min(xs), min(ys))
        self.at = {
            name: scale * (place - corner) + _FRAME[0] * (1 + 1j) for name, place in at.items()
        }
        self.middle = sum(self.at.values()) / len(self.at)
        self.radii = {circle: scale * r for circle, r in radii.items()}
        import matplotlib as mpl  # not for every command of this package

        file = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"  # has a root and a π
        self.font = ImageFont.truetype(str(file), OVERSAMPLING * _FONT)
        self.canvas = Canvas(_SIZE, font=self.font)
        self.ink: list[complex] = []  # points on what is drawn
        self.boxes: list[
            tuple[float, float, float, float]
        ] = []  # of the labels: left, top, right, bottom

    def picture(self) -> Image.Image:
        for row in self.form.rows:
            self._line(*(self.at[name] for name in row))
        for (centre, _), r in self.radii.items():
            place = self.at[centre]
            self.canvas.circle((place.real, place.imag), r)
            self.canvas.dot((place.real, place.imag))
            self.ink += [place + rect(r, step / 60) for step in range(377)]
        marked = self._marks()
        below = [
            in_words(term)
            for term in self.form.terms
            if term and term not in marked and not self._value(term)
        ]
        for name, place in self.at.items():
            around = product((0.032, 0.045, 0.06, 0.08, 0.1), range(16))
            self._label(name, [place + rect(reach, turn * math.pi / 8) for reach, turn in around])
        bottom = max([place.imag for place in self.ink] + [box[3] for box in self.boxes])
        for number, text in enumerate(dict.fromkeys(filter(None, below)), start=1):
            self._label(
                plain(text, words=True), [complex(0.5, min(0.985, bottom + 0.045 * number))]
            )
        boxes = [*self.boxes, *((place.real, place.imag) * 2 for place in self.ink)]
        edges = [min(box[i] for box in boxes) - _PAD for i in (0, 1)]
        edges += [max(box[i] for box in boxes) + _PAD for i in (2, 3)]
        left, top, right, end = (round(_SIZE * min(1, max(0, edge))) for edge in edges)
        return self.canvas.picture().crop((left, top, right, end))

    def is_legible(self) -> bool:
        """Whether no label of the picture lies on another one, on a point, or outside."""
        for number, box in enumerate(self.boxes):
            left, top, right, bottom = box
            if min(left, top) < 0 or max(right, bottom) > 1:
                return False
            if any(
                left < place.real < right and top < place.imag < bottom
                for place in self.at.values()
            ):
                return False
            for other in self.boxes[:number]:
                if left < other[2] and other[0] < right and top < other[3] and other[1] < bottom:
                    return False
        return True

    def _line(self, *points: complex) -> None:
        self.canvas.line(*((place.real, place.imag) for place in points))
        for start, end in pairwise(points):
            steps = max(2, int(abs(end - start) / 0.006))
            self.ink += [start + (end - start) * step / steps for step in range(steps + 1)]

    def _value(self, term: Term) -> bool:
        """Write the value of a length, an angle or an arc at its place. Whether there is one."""
        if term.head.startswith("PointLies"):
            return True
        if term.head != "Equals" or len(term.arguments) != 2 or not term.arguments[0].arguments:
            return False
        (kind, other) = term.arguments
        of = term.arguments[0].arguments[0]
        value = (
            other.arguments[0]
            if other.head in ("LengthOf", "MeasureOf") and other.arguments
            else other
        )
        number = re.fullmatch(r"[Aa]ngle (\w+)", in_words(value) or "")
        if not set(of.names) <= self.at.keys() or (value.arguments and not number):
            return False
        text = number[1] if number else plain(value.head)
        degrees = f"{text}°" if re.fullmatch(r"[\w.]+", text) else f"({text})°"
        if (kind.head, of.head, len(of.names)) == ("LengthOf", "Line", 2):
            self._beside(self.at[of.names[0]], self.at[of.names[1]], text)
        elif (kind.head, of.head, len(of.names)) == ("MeasureOf", "Angle", 3):
            corner, start, turn = self._angle(of.names)
            self._arcs(of.names, 0 if number else 1)
            text = text if number else degrees
            least = min(0.16, 0.5 * (self._width(text) + 0.02) / max(0.1, abs(math.sin(turn / 2))))
            inside = 0.8 * min(abs(self.at[name] - corner) for name in (of.names[0], of.names[2]))
            nearest = max(0.045 if number else 0.08, least)
            reaches = [
                min(inside, nearest + 0.012 * further) for further in (*range(9), -1, -2, -3)
            ]
            self._label(
                text,
                [
                    corner + rect(r, start + part * turn)
                    for r in reaches
                    for part in (0.5, 0.4, 0.6)
                ],
            )
        elif kind.head == "MeasureOf" and of.head == "Arc":
            ends = {of.names[0], of.names[-1]}
            circle = next(
                (circle for circle in self.radii if ends <= set(self.form.rounds[circle])), None
            )
            if circle is None:
                return False
            _, start, turn = self._angle((of.names[0], circle[0], of.names[-1]))
            middle = (
                start + turn / 2
                if len(of.names) == 2
                else phase(self.at[of.names[1]] - self.at[circle[0]])
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
        """Beside a segment, rather on the side that is away from the middle of the figure."""
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
        """The corner of an angle, where its first side points to, and the turn to the other, at
        most half a one.
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
        """Ticks or arrow heads on a segment: strokes with two wings, turned by so much from its
        direction.
        """
        start, end = (self.at[name] for name in names)
        if ((end - start) * towards.conjugate()).real < 0:
            start, end = end, start
        along = phase(end - start)
        for number in range(count):
            tip = start + part * (end - start) + rect(0.011 * (number - (count - 1) / 2), along)
            self._line(tip + rect(_STROKE, along + wing), tip, tip + rect(_STROKE, along - wing))

    def _marks(self) -> list[Term]:
        """Right angles, arrows of parallels, ticks of equal lengths, arcs of equal angles.

        The facts that have one.
        """
        marked = []
        corners: set[tuple[int, int]] = set()
        for term in self.form.found("Perpendicular"):
            corner = self._crossing(term)
            if corner is None:
                continue
            marked.append(term)
            if (key := (round(50 * corner.real), round(50 * corner.imag))) not in corners:
                corners.add(key)
                far = (
                    max((self.at[name] - corner for name in line.names), key=abs)
                    for line in term.arguments
                )
                one, other = (rect(_RIGHT, phase(way)) for way in far)
                self._line(corner + one, corner + one + other, corner + other)
        for head, of, size in (
            ("Parallel", "Line", 2),
            ("Equals", "LengthOf", 2),
            ("Equals", "MeasureOf", 3),
        ):
            groups: list[set[tuple[str, ...]]] = []
            for term in self.form.found(head):
                found = [each for each in term.arguments if each.head == of]
                sides = {
                    tuple((each if of == "Line" else each.arguments[0]).names) for each in found
                }
                if len(term.arguments) == 2 == len(sides) and all(
                    len(s) == size and {*s} <= {*self.at} for s in sides
                ):
                    marked.append(term)
                    touching = [group for group in groups if group & sides]
                    groups = [group for group in groups if group not in touching] + [
                        sides.union(*touching)
                    ]
            wing, part = (0.75 * math.pi, 0.42) if of == "Line" else (math.pi / 2, 0.5)
            for number, group in enumerate(map(sorted, groups), start=1):
                for names in group:
                    if of == "MeasureOf":
                        self._arcs(names, number + 1)  # one arc belongs to a value
                    else:
                        towards = self.at[group[0][1]] - self.at[group[0][0]]
                        self._strokes(names, towards=towards, count=number, wing=wing, part=part)
        return marked

    def _crossing(self, term: Term) -> complex | None:
        """Where two lines meet: the point that they share, or where they cross."""
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

    def _label(self, text: str, places: Sequence[complex]) -> None:
        """Write a text at the place where it hides least; of equal ones, at the first."""
        wide = self._width(text) / 2 + 0.004
        high = _FONT / _SIZE / 2

        def box(place: complex) -> tuple[float, float, float, float]:
            return place.real - wide, place.imag - high, place.real + wide, place.imag + high

        def hidden(place: complex) -> int:
            left, top, right, end = box(place)
            others = sum(
                left < o[2] and o[0] < right and top < o[3] and o[1] < end for o in self.boxes
            )
            outside = min(left, top) < 0.005 or max(right, end) > 0.995
            return (
                1000 * outside
                + 200 * others
                + sum(left < p.real < right and top < p.imag < end for p in self.ink)
            )

        best = min(places, key=hidden)
        self.boxes.append(box(best))
        self.canvas.label(text, (best.real, best.imag))


def plain(value: str, *, words: bool = False) -> str:
    r"""A value as it is written in a picture: `2√3` for `2\sqrt{3}`. `words`: spaces stay."""
    for pattern, written in _LATEX[: -1 if words else None]:
        value = re.sub(pattern, written, value)
    return value
