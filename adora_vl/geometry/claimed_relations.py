"""Relations that a response claims in words or signs, such as "AB is parallel to CD".

A sentence has subjects (`triangles ABC and DEF`), a predicate (`are similar`) and perhaps an object
(`AB bisects angle ABC`). What the grammar does not know is no relation; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, product

from adora_vl.geometry.forms import Term
from adora_vl.geometry.primitives import relations_of
from adora_vl.geometry.quantities import (
    Constant,
    Equal,
    LineDistance,
    Perpendicular,
    Relation,
    plus,
    points_in,
)
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.shapes import Circle, UnreadError, sides_of
from adora_vl.geometry.sides import NoSideError, SideReader, equation
from adora_vl.geometry.signature import without_means

Ways = tuple[tuple[Relation, ...], ...]
_NOUNS = {
    **{"triangle": "Triangle", "triangles": "Triangle", "angle": "Angle", "angles": "Angle"},
    **{"segment": "Line", "segments": "Line", "line": "Line", "lines": "Line", "side": "Line"},
    **{"sides": "Line", "chord": "Line", "chords": "Line", "radius": "Line", "diameter": "Line"},
    **{"diagonal": "Line", "altitude": "Line", "height": "Line", "ray": "Line", "point": "Point"},
    **{"quadrilateral": "Polygon", "arc": "Arc", "arcs": "Arc", "polygon": "Polygon"},
    **{"segments": "Line", "bases": "Line", "legs": "Line", "tangent": "Line", "median": "Line"},
    **{"points": "Point", "parallelogram": "Polygon", "trapezoid": "Polygon"},
}
_ADVERBS = {
    "also",
    "both",
    "therefore",
    "thus",
    "then",
    "a",
    "an",
    "the",
    "all",
    "each",
    "always",
    "so",
    "must",
    "be",
    "now",
    "indeed",
    "hence",
    "exactly",
    "clearly",
    "respectively",
}
_POSITIONS = {
    "vertical",
    "corresponding",
    "alternate",
    "interior",
    "exterior",
    "opposite",
    "adjacent",
    "base",
    "inscribed",
    "angles",
    "angle",
    "sides",
    "same-side",
    "consecutive",
    "arcs",
}
_FOUR_CORNERS = {"parallelogram", "rectangle", "rhombus", "square", "kite", "trapezoid"}


class RelationReader:
    """Reads relations that are no equations: "AB ∥ CD", "D is the midpoint of AC"."""

    def __init__(self, sides: SideReader, reading: Reading) -> None:
        self.sides = sides
        self.reading = reading
        self.subjects: list[Term] = []  # of the relation before, for "and bisects AC"

    def read(self, number: int) -> tuple[Ways, int] | None:
        """The relation that begins at a place, with the place behind it; None for none."""
        is_second = self.sides.word(number) == "and" and bool(self.subjects)
        if is_second:
            subjects = self.subjects
            cursor = number + 1
        else:
            nouns = self._nouns(number)
            if nouns is None:
                return None
            subjects, cursor = nouns
        try:
            result = self._predicate(subjects, cursor)
        except (UnreadError, NoSideError, IndexError, ValueError):
            result = None
        if result is None:
            if not is_second:
                self.subjects = []
            return None
        ways, behind = result
        if not ways or any(not way for way in ways):
            return None
        for way in ways:
            for relation in way:
                if not set(points_in(relation)) <= set(self.reading.drawing.points):
                    return None
        self.subjects = subjects
        return ways, behind

    # Subjects

    def _nouns(self, number: int) -> tuple[list[Term], int] | None:
        """Things that are named: "triangles ABC and DEF", "AB", "angles 1 and 2"."""
        cursor = number
        head = _NOUNS.get(self.sides.word(cursor))
        if head is not None:
            cursor += 1
            if self.sides.word(cursor) == "angle" and head == "Angle":
                cursor += 1
        elif self.sides.at(cursor).kind != "points":
            return None
        first = self._noun(head, cursor)
        if first is None:
            return None
        term, cursor = first
        terms = [term]
        while True:
            joint = cursor
            if self.sides.at(joint).text == ",":
                joint += 1
            if self.sides.word(joint) == "and":
                joint += 1
            if joint == cursor:
                return terms, cursor
            next_head = _NOUNS.get(self.sides.word(joint))
            following = self._noun(next_head or term.head, joint + (1 if next_head else 0))
            if following is None or following[0].head != term.head:
                return terms, cursor
            terms.append(following[0])
            cursor = following[1]

    def _noun(self, head: str | None, number: int) -> tuple[Term, int] | None:
        """One thing at a place, of this kind or of the one that its letters show."""
        sign = self.sides.at(number)
        if head == "Angle" and sign.kind == "number":
            if f"angle {sign.text}" not in self.sides.unknowns:
                return None
            return Term(head="Angle", arguments=(Term(sign.text),)), number + 1
        if sign.kind != "points":
            return None
        try:
            names, cursor = self.sides.names_at(number)
        except NoSideError:
            return None
        head = head or {1: "Point", 2: "Line", 3: "Triangle"}.get(len(names), "Polygon")
        if len(set(names)) != len(names):
            return None
        counts = {"Line": (2,), "Triangle": (3,), "Angle": (1, 3), "Point": (1,), "Arc": (2, 3)}
        if len(names) not in counts.get(head, (len(names),)):
            return None
        return Term(head=head, arguments=tuple(Term(name) for name in names)), cursor

    # Predicates

    def _predicate(self, subjects: list[Term], number: int) -> tuple[Ways, int] | None:
        """What is said of the subjects."""
        head = subjects[0].head
        text = self.sides.at(number).text
        if text in ("∥", "⊥") and head == "Line":
            return self._with_object(subjects, number + 1, self._directions(text))
        if text in ("~", "≅") and head in ("Triangle", "Polygon"):
            fact = "Similar" if text == "~" else "Congruent"
            return self._with_object(subjects, number + 1, fact)
        if self.sides.word(number) in ("bisects", "bisect"):
            return self._bisects(subjects[0], number + 1)
        if self.sides.word(number) in ("intersects", "meets"):
            return None
        cursor = number
        while self.sides.word(cursor) in ("also", "must", "which", "then", "therefore"):
            cursor += 1
        if self.sides.word(cursor) not in ("is", "are", "be", "have", "form"):
            return None
        cursor += 1
        cursor = self._past_position(self._past_words(cursor, _ADVERBS))
        return self._said(subjects, cursor)

    def _past_words(self, number: int, words: set[str]) -> int:
        """The place behind these words."""
        while self.sides.word(number) in words:
            number += 1
        return number

    def _past_position(self, number: int) -> int:
        """The place behind "vertical angles and are": where angles lie is said in passing."""
        if self.sides.word(number) not in _POSITIONS:
            return number
        cursor = self._past_words(number, _POSITIONS)
        joint = cursor + 1 if self.sides.at(cursor).text == "," else cursor
        behind = self._past_words(joint, {"and", "so", "which", "that", "they"})
        if behind == joint or self.sides.word(behind) not in ("are", "is"):
            return number
        return self._past_words(behind + 1, _ADVERBS)

    def _directions(self, sign: str) -> str:
        """The fact that a sign between two lines says."""
        return "Parallel" if sign == "∥" else "Perpendicular"

    def _said(self, subjects: list[Term], number: int) -> tuple[Ways, int] | None:
        """What stands behind `is` or `are`."""
        head = subjects[0].head
        if head == "Line":
            return self._of_lines(subjects, number)
        if head in ("Angle", "Arc"):
            return self._angles(subjects, number)
        word = self.sides.word(number)
        following = self.sides.word(number + 1)
        if word in ("similar", "congruent") and head in ("Triangle", "Polygon"):
            return self._with_object(subjects, self._behind_to(number + 1), word.capitalize())
        if head == "Triangle" and word in ("isosceles", "equilateral", "right", "equiangular"):
            behind = number + 1 if following not in ("triangle", "triangles") else number + 2
            is_other_noun = self.sides.word(behind) in ("trapezoid", "angle", "angles")
            if self.sides.at(number + 1).text == "-" or is_other_noun or len(subjects) > 3:
                return None
            ways = [tuple(self._triangle(subject, word)) for subject in subjects]
            return tuple(tuple(chain(*choice)) for choice in product(*ways)), behind
        if head == "Point" and word == "midpoint" and following == "of":
            line = self._object(self._past_the(number + 2))
            if line is None or line[0].head != "Line":
                return None
            return (self._relations("IsMidpointOf", subjects[0], line[0]),), line[1]
        if head == "Polygon" and word in _FOUR_CORNERS and len(subjects[0].names) == 4:
            term = Term(head=word.capitalize(), arguments=subjects[0].arguments)
            return (tuple(relations_of(self.reading.measures, term)),), number + 1
        return None

    def _of_lines(self, subjects: list[Term], number: int) -> tuple[Ways, int] | None:
        """What stands behind `is` or `are` where the subjects are segments."""
        word = self.sides.word(number)
        if word in ("parallel", "perpendicular"):
            if self.sides.word(number + 1) == "bisector":
                return self._bisector(subjects[0], number + 1)
            return self._with_object(subjects, self._behind_to(number + 1), word.capitalize())
        if word in ("bisector", "angle"):
            return self._bisector(subjects[0], number if word == "bisector" else number + 1)
        if word in ("diameter", "radius", "tangent", "tangents", "diameters", "radii"):
            return self._round(subjects, word, number + 1)
        if word in ("equal", "congruent") and len(subjects) > 1:
            return (self._all_same(subjects),), self._behind_equal(number)
        return None

    def _behind_to(self, number: int) -> int:
        """The place behind "to", "with" or "to each other"."""
        while self.sides.word(number) in ("to", "with", "each", "other", "one", "another"):
            number += 1
        return number

    def _behind_equal(self, number: int) -> int:
        """The place behind "congruent", "equal in length" and the like."""
        number += 1
        if self.sides.word(number) == "in":
            return number + 2
        return number

    def _past_the(self, number: int) -> int:
        """The place behind words that stand before a name, as in "the side AB"."""
        while self.sides.word(number) in ("the", "side", "segment", "both", "line", "chord"):
            number += 1
        return number

    def _relations(self, head: str, *arguments: Term) -> tuple[Relation, ...]:
        """What a fact of this kind says."""
        term = Term(head=head, arguments=arguments)
        return tuple(without_means(relations_of(self.reading.measures, term)))

    def _with_object(self, subjects: list[Term], number: int, fact: str) -> tuple[Ways, int] | None:
        """A fact of two things: both are subjects, or the second stands behind the verb."""
        if len(subjects) > 1:
            relations: list[Relation] = []
            for second in subjects[1:]:
                relations += self._relations(fact, subjects[0], second)
            return (tuple(relations),), number
        nouns = self._object(number)
        if nouns is None or nouns[0].head != subjects[0].head:
            return None
        target, behind = nouns
        if fact in ("Similar", "Congruent") and len(target.names) != len(subjects[0].names):
            return None
        return (self._relations(fact, subjects[0], target),), behind

    def _object(self, number: int) -> tuple[Term, int] | None:
        """The one thing that is named behind a verb."""
        head = _NOUNS.get(self.sides.word(number))
        if head is not None:
            number += 1
            if self.sides.word(number) == "angle" and head == "Angle":
                number += 1
        return self._noun(head, number)

    def _triangle(self, subject: Term, word: str) -> Iterator[tuple[Relation, ...]]:
        """The ways in which a triangle can be isosceles, equilateral or right."""
        names = subject.names
        lengths = [self.reading.measures.distance(*side) for side in sides_of(names)]
        if word in ("equilateral", "equiangular"):
            yield (
                Equal(left=lengths[0], right=lengths[1], unit="length"),
                Equal(left=lengths[1], right=lengths[2], unit="length"),
            )
            return
        for number in range(3):
            if word == "isosceles":
                yield (Equal(left=lengths[number - 1], right=lengths[number], unit="length"),)
                continue
            corner = names[number]
            yield (Perpendicular(a=corner, b=names[number - 1], c=corner, d=names[number - 2]),)

    def _bisects(self, line: Term, number: int) -> tuple[Ways, int] | None:
        """A line halves a segment or an angle."""
        nouns = self._object(self._past_the(number))
        if nouns is None or line.head != "Line" or nouns[0].head not in ("Angle", "Line"):
            return None
        target, behind = nouns
        return (self._relations("BisectsAngle", line, target),), behind

    def _bisector(self, line: Term, number: int) -> tuple[Ways, int] | None:
        """`bisector of` an angle or a segment, with "perpendicular" before it or not."""
        if self.sides.word(number) != "bisector" or self.sides.word(number + 1) != "of":
            return None
        result = self._bisects(line, number + 2)
        if result is None or self.sides.word(number - 1) != "perpendicular":
            return result
        target = self._object(self._past_the(number + 2))
        if target is None or target[0].head != "Line":
            return None
        upright = self._relations("Perpendicular", line, target[0])
        return (result[0][0] + upright,), result[1]

    def _round(self, subjects: list[Term], word: str, number: int) -> tuple[Ways, int] | None:
        """A line is a radius, a diameter or a tangent of the circle."""
        circles = self.reading.drawing.circles
        cursor = number
        while self.sides.word(cursor) in ("of", "to", "the", "circle"):
            cursor += 1
        if self.sides.at(cursor).kind == "points" and cursor > number:
            names, behind = self.sides.names_at(cursor)
            circles = [circle for circle in circles if [circle.centre] == names]
            number = behind
        elif cursor > number and self.sides.word(cursor - 1) == "circle":
            number = cursor
        if len(circles) != 1:
            return None
        ways = [self._round_line(line, word, circles[0]) for line in subjects]
        if any(not way for way in ways):
            return None
        return (tuple(chain(*ways)),), number

    def _round_line(self, line: Term, word: str, circle: Circle) -> tuple[Relation, ...]:
        """A segment is a radius, a diameter or a tangent of a circle; nothing where unclear."""
        target = Term(head="Circle", arguments=(Term(circle.centre),))
        start, end = line.names
        on_circle = [name for name in (start, end) if name in circle.points]
        if word.startswith("radi"):
            if circle.centre not in (start, end) and len(on_circle) == 2:
                # A chord is none: neither end is the centre.
                distance = self.reading.measures.distance(start, circle.centre)
                return (Equal(left=distance, right=Constant(0.0), unit="length"),)
            return self._relations("IsRadiusOf", line, target) if on_circle else ()
        if word.startswith("diam"):
            return self._relations("IsDiameterOf", line, target) if len(on_circle) == 2 else ()
        if len(on_circle) == 2:
            reach = LineDistance(point=circle.centre, start=start, end=end)
            radius = self.reading.measures.radius(circle)
            return (Equal(left=reach, right=radius, unit="length"),)
        return self._relations("Tangent", line, target) if on_circle else ()

    def _angles(self, subjects: list[Term], number: int) -> tuple[Ways, int] | None:
        """Angles are right, equal, supplementary or complementary."""
        word = self.sides.word(number)
        values = [self.reading.measures.value(term) for term in subjects]
        if word == "right":
            if self.sides.word(number + 1) in ("angle", "angles"):
                number += 1
            rights = [Equal(left=value, right=Constant(90.0), unit="degrees") for value in values]
            return (tuple(rights),), number + 1
        totals = {"supplementary": 180.0, "complementary": 90.0}
        if word in totals:
            behind = number + 2 if self.sides.word(number + 1) in ("angles", "arcs") else number + 1
            if len(values) == 1:
                behind = self._behind_to(number + 1)
                target = self._object(behind)
                if target is None or target[0].head != subjects[0].head:
                    return None
                values.append(self.reading.measures.value(target[0]))
                behind = target[1]
            if len(values) != 2:
                return None
            total = Equal(left=plus(*values), right=Constant(totals[word]), unit="degrees")
            return ((total,),), behind
        if word in ("congruent", "equal") and len(values) > 1:
            return (self._all_same(subjects),), self._behind_equal(number)
        return None

    def _all_same(self, subjects: list[Term]) -> tuple[Relation, ...]:
        """Lengths, angles or arcs are all equal."""
        values = [self.reading.measures.value(term) for term in subjects]
        return tuple(equation(first, second) for first, second in pairwise(values))
