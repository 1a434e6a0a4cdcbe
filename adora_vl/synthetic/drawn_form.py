"""A figure in the text form, drawn as it is said.

    form = DrawnForm(rng, size, style, positions, "triangle ABC")
    form.add_and_draw("right angle ACB", "AC = 5", "BC = 12")
    form.add("find AB")
    form.picture()

The sentences are those that `adora_vl.geometry` reads and solves (docs/geometry.md). Each is drawn
as a book draws it: a shape by its sides, a right angle by its small square, a size by a label
beside its side or in its angle. So a family of problems is a text form with places, and has no
drawing code.
"""

import random
from collections.abc import Iterable, Sequence

from PIL import Image

from adora_vl.geometry.draft import LogicFormDraft
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.sentences import read_sentence
from adora_vl.geometry.shapes import CORNER_COUNT_BY_SHAPE
from adora_vl.synthetic.drawing import Point, Style
from adora_vl.synthetic.sketch import Sketch

# How far from its corner the label of an angle stands, as a share of the picture.
_LABEL_DISTANCE = 0.15
# For an angle at the centre of a circle: clear of the arc.
_LABEL_DISTANCE_AT_CENTRE = 0.12
# For an angle on a circle: clear of the circle near it, and of the letter of its corner.
_LABEL_DISTANCE_ON_CIRCLE = 0.22


class DrawnForm:
    """A problem as sentences, and the picture that is drawn from them, sentence by sentence.

    `add_and_draw` adds sentences and draws them; `add` adds sentences that are not drawn. The
    sentences are those that `adora_vl.geometry` reads, such as `triangle ABC`, `AB = 5` or `find
    angle ABC`.
    """

    def __init__(
        self,
        rng: random.Random,
        size: int,
        style: Style,
        positions: dict[str, Point],
        *outline: str,
    ) -> None:
        """Turn the points by a random angle, draw the outline, and write the points' letters.

        Args:
            rng: draws by how much the figure is turned, and whether it is mirrored.
            size: side of the picture in pixels.
            style: of the lines and labels.
            positions: x and y of each point by its name, in any unit. A name of more than one
                character is not written; such a point only widens what the picture shows.
            outline: the sentences that say what is drawn before any label.

        Raises:
            ClutteredError: two labels would overlap, here or in `add_and_draw`.
        """
        self.sentences: list[str] = []
        self._draft = LogicFormDraft()
        self._sketch = Sketch(rng, size, style, positions)
        self.add_and_draw(*outline)
        points_by_centre = self._draft.circles
        letters = sorted(
            name for name in positions if len(name) == 1 and name not in points_by_centre
        )
        self._sketch.letters("".join(letters))
        for centre, points in points_by_centre.items():
            # Beside the line to the second point, where no side of the angle is drawn.
            self._sketch.centre_letter(centre, points[1])

    def add_and_draw(self, *sentences: str) -> None:
        """Add sentences, and draw what they say."""
        for sentence in sentences:
            facts_before = len(self._draft.facts)
            lines_before = set(self._draft.lines)
            circles_before = set(self._draft.circles)
            self.add(sentence)
            new_facts = self._draft.facts[facts_before:]
            new_lines = [line for line in self._draft.lines if line not in lines_before]
            for centre, points in self._draft.circles.items():
                if centre not in circles_before:
                    self._sketch.circle(centre, points[0])
            self._draw_lines(new_facts, new_lines)
            # The label is what stands behind the `=` in the sentence, as it is written there.
            text = sentence.rpartition("=")[2].strip()
            for fact in new_facts:
                self._draw_mark(fact, text)

    def add(self, *sentences: str) -> None:
        """Add sentences that the problem says in words, and that the picture does not show."""
        for sentence in sentences:
            self.sentences.append(sentence)
            read_sentence(self._draft, sentence)

    def text(self) -> tuple[str, ...]:
        """Return the sentences of the problem, after sentences with the points' pixels.

        Without these a sentence may fit two figures, since a corner could be on either arc of a
        circle.
        """
        return (*self._sketch.position_sentences(), *self.sentences)

    def picture(self) -> Image.Image:
        """Return the picture as it was drawn so far."""
        return self._sketch.picture()

    def _draw_lines(self, facts: Sequence[Term], lines: Sequence[tuple[str, str]]) -> None:
        """Draw the sides of the shapes that a sentence names, or else its lines.

        `facts`: what the sentence says. `lines`: those that it adds, each by its two points.
        """
        corners_of_shapes = []
        for fact in facts:
            # a fact such as `Triangle(A, B, C)` names as many points as its shape has corners
            if len(fact.names) == CORNER_COUNT_BY_SHAPE.get(fact.head):
                corners_of_shapes.append(fact.names)
        for corners in corners_of_shapes:
            self._sketch.line("".join([*corners, corners[0]]))
        # A point on a line that is already drawn divides this line, so nothing new is to be drawn.
        divides_line = any(fact.head == "PointLiesOnLine" for fact in facts)
        if not corners_of_shapes and not divides_line:
            for path in _join_lines(lines):
                self._sketch.line(path)

    def _draw_mark(self, fact: Term, text: str) -> None:
        """Draw what marks a fact: the square of a right angle, or the label of a side or an angle.

        For example, `Equals(LengthOf(Line(A, B)), 5)` with the text `5` writes 5 beside AB.
        """
        if fact.head == "Perpendicular":
            first_line, second_line = fact.arguments
            corner, first = first_line.names
            self._sketch.right_angle(f"{first}{corner}{second_line.names[1]}")
        if fact.head == "Equals":
            measure = fact.arguments[0]
            names = measure.arguments[0].names
            if measure.head == "LengthOf":
                self._sketch.side("".join(names), text)
            if measure.head == "MeasureOf":
                # `40` is written as `40°`. An expression such as `3x + 10` gets no sign of degrees.
                label = f"{text}°" if text.isdigit() else text
                self._sketch.angle("".join(names), label, self._label_distance(names[1]))

    def _label_distance(self, corner: str) -> float:
        """Return how far from a corner its angle's label stands, as a fraction of the picture."""
        if corner in self._draft.circles:
            return _LABEL_DISTANCE_AT_CENTRE
        is_on_circle = any(corner in points for points in self._draft.circles.values())
        return _LABEL_DISTANCE_ON_CIRCLE if is_on_circle else _LABEL_DISTANCE


def _join_lines(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Join lines that follow each other: AB, BC and DE become the paths ABC and DE."""
    paths: list[str] = []
    for start, end in lines:
        if paths and paths[-1][-1] == start:
            paths[-1] += end
        else:
            paths.append(start + end)
    return paths
