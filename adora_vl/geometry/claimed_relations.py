"""Relations that a response claims in words or signs, such as "AB is parallel to CD".

A sentence has subjects (`triangles ABC and DEF`), a predicate (`are similar`) and perhaps an object
(`AB bisects angle ABC`). What the grammar does not know is no relation; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import chain, pairwise, product

from adora_vl.geometry.forms import Term
from adora_vl.geometry.names import NoSideError
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
from adora_vl.geometry.shapes import Circle, UnreadError, sides_of_polygon
from adora_vl.geometry.sides import SideReader, equation
from adora_vl.geometry.signature import split_midpoints

Alternatives = tuple[tuple[Relation, ...], ...]
# What kind of thing each noun names; several nouns are the same kind.
_NOUNS_BY_KIND = {
    "Line": (
        "segment segments line lines side sides chord chords radius diameter diagonal altitude "
        "height ray bases legs tangent median"
    ),
    "Angle": "angle angles",
    "Arc": "arc arcs",
    "Point": "point points",
    "Polygon": "polygon quadrilateral parallelogram trapezoid",
    "Triangle": "triangle triangles",
}
_KIND_BY_NOUN = {noun: kind for kind, nouns in _NOUNS_BY_KIND.items() for noun in nouns.split()}
# How many letters name one thing of a kind; a polygon may have any number.
_LETTER_COUNTS_BY_KIND = {
    "Line": (2,),
    "Triangle": (3,),
    "Angle": (1, 3),
    "Point": (1,),
    "Arc": (2, 3),
}
# The kind of a thing that has letters and no noun, by their number.
_KIND_BY_LETTER_COUNT = {1: "Point", 2: "Line", 3: "Triangle"}
# Words between a verb and what it says, which add nothing.
_ADVERB_TEXT = (
    "also both therefore thus then a an the all each always so must be now indeed hence exactly "
    "clearly respectively"
)
_ADVERBS = frozenset(_ADVERB_TEXT.split())
# Words that say where angles and sides lie.
_POSITION_TEXT = (
    "vertical corresponding alternate interior exterior opposite adjacent base inscribed angles "
    "angle sides same-side consecutive arcs"
)
_POSITION_WORDS = frozenset(_POSITION_TEXT.split())
_QUADRILATERALS = {"parallelogram", "rectangle", "rhombus", "square", "kite", "trapezoid"}


class RelationReader:
    """Reads relations that are no equations: "AB ∥ CD", "D is the midpoint of AC"."""

    def __init__(self, sides: SideReader, reading: Reading) -> None:
        self.sides = sides
        self.reading = reading
        self.subjects: list[Term] = []  # of the relation before, for "and bisects AC"

    def read(self, start: int) -> tuple[Alternatives, int] | None:
        """Return the relation that begins at a sign, with the place behind it; None for none.

        A relation that can mean several things comes in several ways, each a tuple of relations.
        """
        repeats_subjects = self.sides.word_at(start) == "and" and bool(self.subjects)
        if repeats_subjects:
            subjects = self.subjects
            verb = start + 1
        else:
            subjects_and_end = self._read_subjects(start)
            if subjects_and_end is None:
                return None
            subjects, verb = subjects_and_end
        try:
            result = self._read_predicate(subjects, verb)
        except (UnreadError, NoSideError, IndexError, ValueError):
            result = None
        if result is None:
            if not repeats_subjects:
                self.subjects = []
            return None
        alternatives, end = result
        if not alternatives or any(not alternative for alternative in alternatives):
            return None
        for alternative in alternatives:
            for relation in alternative:
                if not set(points_in(relation)) <= set(self.reading.drawing.points):
                    return None
        self.subjects = subjects
        return alternatives, end

    # Subjects

    def _read_subjects(self, start: int) -> tuple[list[Term], int] | None:
        """Read the subjects of a sentence: "triangles ABC and DEF", "AB", "angles 1 and 2".

        All are of one kind. Returns them with the place behind them.
        """
        cursor = start
        kind = _KIND_BY_NOUN.get(self.sides.word_at(cursor))
        if kind is not None:
            cursor += 1
            if self.sides.word_at(cursor) == "angle" and kind == "Angle":
                cursor += 1
        elif self.sides.token_at(cursor).kind != "points":
            return None
        first_noun = self._read_thing(kind, cursor)
        if first_noun is None:
            return None
        term, cursor = first_noun
        terms = [term]
        while True:
            next_start = cursor
            if self.sides.token_at(next_start).text == ",":
                next_start += 1
            if self.sides.word_at(next_start) == "and":
                next_start += 1
            if next_start == cursor:
                return terms, cursor
            next_kind = _KIND_BY_NOUN.get(self.sides.word_at(next_start))
            next_noun = self._read_thing(
                next_kind or term.head, next_start + (1 if next_kind else 0)
            )
            if next_noun is None or next_noun[0].head != term.head:
                return terms, cursor
            terms.append(next_noun[0])
            cursor = next_noun[1]

    def _read_thing(self, kind: str | None, start: int) -> tuple[Term, int] | None:
        """Read one thing, of this kind or of the one that its letters show."""
        token = self.sides.token_at(start)
        if kind == "Angle" and token.kind == "number":
            if f"angle {token.text}" not in self.sides.unknowns:
                return None
            return Term(head="Angle", arguments=(Term(token.text),)), start + 1
        if token.kind != "points":
            return None
        try:
            names, end = self.sides.names_at(start)
        except NoSideError:
            return None
        kind = kind or _KIND_BY_LETTER_COUNT.get(len(names), "Polygon")
        if len(set(names)) != len(names):
            return None
        if len(names) not in _LETTER_COUNTS_BY_KIND.get(kind, (len(names),)):
            return None
        return Term(head=kind, arguments=tuple(Term(name) for name in names)), end

    # Predicates

    def _read_predicate(self, subjects: list[Term], start: int) -> tuple[Alternatives, int] | None:
        """Read what is said of the subjects, from the verb or the sign behind them on."""
        kind = subjects[0].head
        text = self.sides.token_at(start).text
        if text in ("∥", "⊥") and kind == "Line":
            return self._read_pair(subjects, start + 1, self._fact_of_sign(text))
        if text in ("~", "≅") and kind in ("Triangle", "Polygon"):
            fact = "Similar" if text == "~" else "Congruent"
            return self._read_pair(subjects, start + 1, fact)
        if self.sides.word_at(start) in ("bisects", "bisect"):
            return self._read_bisected(subjects[0], start + 1)
        if self.sides.word_at(start) in ("intersects", "meets"):
            return None
        cursor = start
        while self.sides.word_at(cursor) in ("also", "must", "which", "then", "therefore"):
            cursor += 1
        if self.sides.word_at(cursor) not in ("is", "are", "be", "have", "form"):
            return None
        cursor += 1
        cursor = self._skip_position_words(self._skip_words(cursor, _ADVERBS))
        return self._read_complement(subjects, cursor)

    def _skip_words(self, position: int, words: Set[str]) -> int:
        """Return the place behind these words."""
        while self.sides.word_at(position) in words:
            position += 1
        return position

    def _skip_position_words(self, start: int) -> int:
        """Return the place behind "vertical angles and are".

        Where angles lie is said in passing, and is no claim.
        """
        if self.sides.word_at(start) not in _POSITION_WORDS:
            return start
        cursor = self._skip_words(start, _POSITION_WORDS)
        after_comma = cursor + 1 if self.sides.token_at(cursor).text == "," else cursor
        after_joint = self._skip_words(after_comma, {"and", "so", "which", "that", "they"})
        if after_joint == after_comma or self.sides.word_at(after_joint) not in ("are", "is"):
            return start
        return self._skip_words(after_joint + 1, _ADVERBS)

    def _fact_of_sign(self, sign: str) -> str:
        """Return the kind of fact that a sign between two lines says."""
        return "Parallel" if sign == "∥" else "Perpendicular"

    def _read_complement(self, subjects: list[Term], start: int) -> tuple[Alternatives, int] | None:
        """Read what stands behind `is` or `are`."""
        kind = subjects[0].head
        if kind == "Line":
            return self._read_line_complement(subjects, start)
        if kind in ("Angle", "Arc"):
            return self._read_angle_complement(subjects, start)
        word = self.sides.word_at(start)
        next_word = self.sides.word_at(start + 1)
        if word in ("similar", "congruent") and kind in ("Triangle", "Polygon"):
            return self._read_pair(subjects, self._skip_to_words(start + 1), word.capitalize())
        if kind == "Triangle" and word in ("isosceles", "equilateral", "right", "equiangular"):
            end = start + 1 if next_word not in ("triangle", "triangles") else start + 2
            is_other_noun = self.sides.word_at(end) in ("trapezoid", "angle", "angles")
            if self.sides.token_at(start + 1).text == "-" or is_other_noun or len(subjects) > 3:
                return None
            alternatives = [
                tuple(self._triangle_alternatives(subject, word)) for subject in subjects
            ]
            return tuple(tuple(chain(*choice)) for choice in product(*alternatives)), end
        if kind == "Point" and word == "midpoint" and next_word == "of":
            line = self._read_object(self._skip_article(start + 2))
            if line is None or line[0].head != "Line":
                return None
            return (self._relations_of_fact("IsMidpointOf", subjects[0], line[0]),), line[1]
        if kind == "Polygon" and word in _QUADRILATERALS and len(subjects[0].names) == 4:
            term = Term(head=word.capitalize(), arguments=subjects[0].arguments)
            return (tuple(relations_of(self.reading.measures, term)),), start + 1
        return None

    def _read_line_complement(
        self, subjects: list[Term], start: int
    ) -> tuple[Alternatives, int] | None:
        """Read what stands behind `is` or `are` where the subjects are segments."""
        word = self.sides.word_at(start)
        if word in ("parallel", "perpendicular"):
            if self.sides.word_at(start + 1) == "bisector":
                return self._read_bisector(subjects[0], start + 1)
            return self._read_pair(subjects, self._skip_to_words(start + 1), word.capitalize())
        if word in ("bisector", "angle"):
            return self._read_bisector(subjects[0], start if word == "bisector" else start + 1)
        if word in ("diameter", "radius", "tangent", "tangents", "diameters", "radii"):
            return self._read_circle_complement(subjects, word, start + 1)
        if word in ("equal", "congruent") and len(subjects) > 1:
            return (self._all_equal(subjects),), self._skip_equal_words(start)
        return None

    def _skip_to_words(self, position: int) -> int:
        """Return the place behind "to", "with" or "to each other"."""
        while self.sides.word_at(position) in ("to", "with", "each", "other", "one", "another"):
            position += 1
        return position

    def _skip_equal_words(self, position: int) -> int:
        """Return the place behind "congruent", "equal in length" and the like."""
        position += 1
        if self.sides.word_at(position) == "in":
            return position + 2
        return position

    def _skip_article(self, position: int) -> int:
        """Return the place behind words that stand before a name, as in "the side AB"."""
        while self.sides.word_at(position) in ("the", "side", "segment", "both", "line", "chord"):
            position += 1
        return position

    def _relations_of_fact(self, head: str, *arguments: Term) -> tuple[Relation, ...]:
        """Return the relations that a fact of this kind says."""
        term = Term(head=head, arguments=arguments)
        return tuple(split_midpoints(relations_of(self.reading.measures, term)))

    def _read_pair(
        self, subjects: list[Term], start: int, fact_kind: str
    ) -> tuple[Alternatives, int] | None:
        """Read a fact of two things: both are subjects, or the second stands behind the verb."""
        if len(subjects) > 1:
            relations: list[Relation] = []
            for other_subject in subjects[1:]:
                relations += self._relations_of_fact(fact_kind, subjects[0], other_subject)
            return (tuple(relations),), start
        second_and_end = self._read_object(start)
        if second_and_end is None or second_and_end[0].head != subjects[0].head:
            return None
        second_thing, end = second_and_end
        if fact_kind in ("Similar", "Congruent") and len(second_thing.names) != len(
            subjects[0].names
        ):
            return None
        return (self._relations_of_fact(fact_kind, subjects[0], second_thing),), end

    def _read_object(self, start: int) -> tuple[Term, int] | None:
        """Read the one thing that is named behind a verb."""
        kind = _KIND_BY_NOUN.get(self.sides.word_at(start))
        if kind is not None:
            start += 1
            if self.sides.word_at(start) == "angle" and kind == "Angle":
                start += 1
        return self._read_thing(kind, start)

    def _triangle_alternatives(self, subject: Term, word: str) -> Iterator[tuple[Relation, ...]]:
        """Return the ways in which a triangle can be isosceles, equilateral or right.

        The word does not say which sides are equal or which corner is right, so each is a way.
        """
        corners = subject.names
        lengths = [self.reading.measures.distance(*side) for side in sides_of_polygon(corners)]
        if word in ("equilateral", "equiangular"):
            yield (
                Equal(left=lengths[0], right=lengths[1], unit="length"),
                Equal(left=lengths[1], right=lengths[2], unit="length"),
            )
            return
        for index in range(3):
            if word == "isosceles":
                yield (Equal(left=lengths[index - 1], right=lengths[index], unit="length"),)
                continue
            corner = corners[index]
            yield (Perpendicular(a=corner, b=corners[index - 1], c=corner, d=corners[index - 2]),)

    def _read_bisected(self, line: Term, start: int) -> tuple[Alternatives, int] | None:
        """Read what a line halves: a segment or an angle."""
        target_and_end = self._read_object(self._skip_article(start))
        if (
            target_and_end is None
            or line.head != "Line"
            or target_and_end[0].head not in ("Angle", "Line")
        ):
            return None
        target, end = target_and_end
        return (self._relations_of_fact("BisectsAngle", line, target),), end

    def _read_bisector(self, line: Term, start: int) -> tuple[Alternatives, int] | None:
        """Read `bisector of` an angle or a segment, with "perpendicular" before it or not."""
        if self.sides.word_at(start) != "bisector" or self.sides.word_at(start + 1) != "of":
            return None
        halved = self._read_bisected(line, start + 2)
        if halved is None or self.sides.word_at(start - 1) != "perpendicular":
            return halved
        segment = self._read_object(self._skip_article(start + 2))
        if segment is None or segment[0].head != "Line":
            return None
        perpendicular = self._relations_of_fact("Perpendicular", line, segment[0])
        return (halved[0][0] + perpendicular,), halved[1]

    def _read_circle_complement(
        self, subjects: list[Term], word: str, start: int
    ) -> tuple[Alternatives, int] | None:
        """Read that lines are radii, diameters or tangents of the circle.

        A circle that is not named is the only one of the figure.
        """
        circles = self.reading.drawing.circles
        cursor = start
        while self.sides.word_at(cursor) in ("of", "to", "the", "circle"):
            cursor += 1
        if self.sides.token_at(cursor).kind == "points" and cursor > start:
            centre, end = self.sides.names_at(cursor)
            circles = [circle for circle in circles if [circle.centre] == centre]
            start = end
        elif cursor > start and self.sides.word_at(cursor - 1) == "circle":
            start = cursor
        if len(circles) != 1:
            return None
        alternatives = [self._relations_of_circle_line(line, word, circles[0]) for line in subjects]
        if any(not alternative for alternative in alternatives):
            return None
        return (tuple(chain(*alternatives)),), start

    def _relations_of_circle_line(
        self, line: Term, word: str, circle: Circle
    ) -> tuple[Relation, ...]:
        """Return that a segment is a radius, a diameter or a tangent; nothing where unclear."""
        target = Term(head="Circle", arguments=(Term(circle.centre),))
        start, end = line.names
        on_circle = [name for name in (start, end) if name in circle.points]
        if word.startswith("radi"):
            if circle.centre not in (start, end) and len(on_circle) == 2:
                # A chord is none: neither end is the centre.
                distance = self.reading.measures.distance(start, circle.centre)
                return (Equal(left=distance, right=Constant(0.0), unit="length"),)
            return self._relations_of_fact("IsRadiusOf", line, target) if on_circle else ()
        if word.startswith("diam"):
            return (
                self._relations_of_fact("IsDiameterOf", line, target) if len(on_circle) == 2 else ()
            )
        if len(on_circle) == 2:
            reach = LineDistance(point=circle.centre, start=start, end=end)
            radius = self.reading.measures.radius(circle)
            return (Equal(left=reach, right=radius, unit="length"),)
        return self._relations_of_fact("Tangent", line, target) if on_circle else ()

    def _read_angle_complement(
        self, subjects: list[Term], start: int
    ) -> tuple[Alternatives, int] | None:
        """Read that angles or arcs are right, equal, supplementary or complementary."""
        word = self.sides.word_at(start)
        values = [self.reading.measures.quantity(term) for term in subjects]
        if word == "right":
            if self.sides.word_at(start + 1) in ("angle", "angles"):
                start += 1
            right_angles = [
                Equal(left=value, right=Constant(90.0), unit="degrees") for value in values
            ]
            return (tuple(right_angles),), start + 1
        total_of_kind = {"supplementary": 180.0, "complementary": 90.0}
        if word in total_of_kind:
            end = start + 2 if self.sides.word_at(start + 1) in ("angles", "arcs") else start + 1
            if len(values) == 1:
                end = self._skip_to_words(start + 1)
                second_and_end = self._read_object(end)
                if second_and_end is None or second_and_end[0].head != subjects[0].head:
                    return None
                values.append(self.reading.measures.quantity(second_and_end[0]))
                end = second_and_end[1]
            if len(values) != 2:
                return None
            total = Equal(left=plus(*values), right=Constant(total_of_kind[word]), unit="degrees")
            return ((total,),), end
        if word in ("congruent", "equal") and len(values) > 1:
            return (self._all_equal(subjects),), self._skip_equal_words(start)
        return None

    def _all_equal(self, subjects: list[Term]) -> tuple[Relation, ...]:
        """Return that the lengths, angles or arcs of the subjects are all equal."""
        values = [self.reading.measures.quantity(term) for term in subjects]
        return tuple(equation(first, second) for first, second in pairwise(values))
