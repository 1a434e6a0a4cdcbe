"""Relations that a response claims in words or signs, such as "AB is parallel to CD".

A sentence has subjects (`triangles ABC and DEF`), a predicate (`are similar`) and perhaps an object
(`AB bisects angle ABC`). What the grammar does not know is no relation; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, product
from typing import NamedTuple

from adora_vl.geometry.logic_form import Term
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

# What a claim may mean: it is true where all relations of one of the alternatives hold.
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
_FACT_BY_SIGN_OF_LINES = {"∥": "Parallel", "⊥": "Perpendicular"}
_FACT_BY_SIGN_OF_SHAPES = {"~": "Similar", "≅": "Congruent"}
_QUADRILATERALS = {"parallelogram", "rectangle", "rhombus", "square", "kite", "trapezoid"}


class ReadThing(NamedTuple):
    """A thing that a sentence names, such as a segment, and the position behind its name."""

    term: Term
    end: int


class ReadRelation(NamedTuple):
    """A relation that a sentence says, and the position behind it."""

    alternatives: Alternatives
    end: int


class RelationReader:
    """Reads relations that are no equations: "AB ∥ CD", "D is the midpoint of AC".

    A response is a row of words and signs, the tokens of `sides`. A method that reads gets the
    position of the first token. It returns what it has read with the position behind the last one,
    or None where nothing stands there that the method reads.

    `subjects` are the things that the last relation was about, for "and bisects AC" behind it.
    """

    def __init__(self, sides: SideReader, reading: Reading) -> None:
        self.sides = sides
        self.reading = reading
        self.subjects: list[Term] = []

    def read(self, start: int) -> ReadRelation | None:
        """Read the relation that begins at a position; None where none does.

        A word may mean several things: "isosceles" does not say which sides are equal. Then the
        result has an alternative for each meaning. The result is None also where the relation names
        a point that is not in the figure.
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
            relation_read = self._read_predicate(subjects, verb)
        except (UnreadError, NoSideError, IndexError, ValueError):
            relation_read = None
        if relation_read is None:
            if not repeats_subjects:
                self.subjects = []
            return None
        alternatives = relation_read.alternatives
        if not alternatives or any(not alternative for alternative in alternatives):
            return None
        known_points = set(self.reading.drawing.points)
        for relation in chain(*alternatives):
            if not set(points_in(relation)) <= known_points:
                return None
        self.subjects = subjects
        return relation_read

    # Subjects

    def _read_subjects(self, start: int) -> tuple[list[Term], int] | None:
        """Read the subjects of a sentence: "triangles ABC and DEF", "AB", "angles 1 and 2".

        All subjects are of the same kind; reading ends before a thing of another kind. Returns
        them with the position behind them.
        """
        cursor = start
        kind = _KIND_BY_NOUN.get(self.sides.word_at(cursor))
        if kind is not None:
            cursor += 1
            # The noun "angle" is followed by the sign of an angle, which is a word as well.
            if self.sides.word_at(cursor) == "angle" and kind == "Angle":
                cursor += 1
        elif self.sides.token_at(cursor).kind != "points":
            return None
        first_subject = self._read_thing(kind, cursor)
        if first_subject is None:
            return None
        subject_kind = first_subject.term.head
        subjects = [first_subject.term]
        cursor = first_subject.end
        while True:
            next_start = cursor
            if self.sides.token_at(next_start).text == ",":
                next_start += 1
            if self.sides.word_at(next_start) == "and":
                next_start += 1
            # Without a comma or "and" no further subject follows.
            if next_start == cursor:
                return subjects, cursor
            next_kind = _KIND_BY_NOUN.get(self.sides.word_at(next_start))
            if next_kind is not None:
                next_start += 1
            next_subject = self._read_thing(next_kind or subject_kind, next_start)
            if next_subject is None or next_subject.term.head != subject_kind:
                return subjects, cursor
            subjects.append(next_subject.term)
            cursor = next_subject.end

    def _read_thing(self, kind: str | None, start: int) -> ReadThing | None:
        """Read one thing of a kind such as `Line`, by its letters or, for an angle, its number.

        Without a kind, the number of letters says it: A is a point, AB a line, ABC a triangle, and
        ABCD a polygon.
        """
        token = self.sides.token_at(start)
        if kind == "Angle" and token.kind == "number":
            if f"angle {token.text}" not in self.sides.unknowns:
                return None
            numbered_angle = Term(head="Angle", arguments=(Term(token.text),))
            return ReadThing(term=numbered_angle, end=start + 1)
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
        term = Term(head=kind, arguments=tuple(Term(name) for name in names))
        return ReadThing(term=term, end=end)

    # Predicates

    def _read_predicate(self, subjects: list[Term], start: int) -> ReadRelation | None:
        """Read what is said of the subjects, from the verb or the sign behind them on."""
        kind = subjects[0].head
        text = self.sides.token_at(start).text
        if text in _FACT_BY_SIGN_OF_LINES and kind == "Line":
            return self._read_pair(subjects, start + 1, _FACT_BY_SIGN_OF_LINES[text])
        if text in _FACT_BY_SIGN_OF_SHAPES and kind in ("Triangle", "Polygon"):
            return self._read_pair(subjects, start + 1, _FACT_BY_SIGN_OF_SHAPES[text])
        if self.sides.word_at(start) in ("bisects", "bisect"):
            return self._read_bisected(subjects[0], start + 1)
        # Where lines meet is no claim that could be judged.
        if self.sides.word_at(start) in ("intersects", "meets"):
            return None
        cursor = self.sides.skip_words(start, {"also", "must", "which", "then", "therefore"})
        if self.sides.word_at(cursor) not in ("is", "are", "be", "have", "form"):
            return None
        cursor = self.sides.skip_words(cursor + 1, _ADVERBS)
        return self._read_complement(subjects, self._skip_position_words(cursor))

    def _skip_position_words(self, start: int) -> int:
        """Return the position behind words such as "vertical angles and are".

        In "angles 1 and 2 are vertical angles and are equal" the claim is "equal", and "vertical
        angles and are" is skipped. In "angles 1 and 2 are vertical angles" no second "are" follows.
        There these words are all that the sentence says, and nothing is skipped.
        """
        if self.sides.word_at(start) not in _POSITION_WORDS:
            return start
        cursor = self.sides.skip_words(start, _POSITION_WORDS)
        after_comma = cursor + 1 if self.sides.token_at(cursor).text == "," else cursor
        joint_words = {"and", "so", "which", "that", "they"}
        after_joint = self.sides.skip_words(after_comma, joint_words)
        if after_joint == after_comma or self.sides.word_at(after_joint) not in ("are", "is"):
            return start
        return self.sides.skip_words(after_joint + 1, _ADVERBS)

    def _read_complement(self, subjects: list[Term], start: int) -> ReadRelation | None:
        """Read what stands behind "is" or "are", such as "similar" or "the midpoint of AB"."""
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
            return self._read_triangle_complement(subjects, start)
        if kind == "Point" and word == "midpoint" and next_word == "of":
            line = self._read_object(self._skip_article(start + 2))
            if line is None or line.term.head != "Line":
                return None
            relations = self._relations_of_fact("IsMidpointOf", subjects[0], line.term)
            return ReadRelation(alternatives=(relations,), end=line.end)
        if kind == "Polygon" and word in _QUADRILATERALS and len(subjects[0].names) == 4:
            fact = Term(head=word.capitalize(), arguments=subjects[0].arguments)
            relations = tuple(relations_of(self.reading.term_reader, fact))
            return ReadRelation(alternatives=(relations,), end=start + 1)
        return None

    def _read_triangle_complement(self, subjects: list[Term], start: int) -> ReadRelation | None:
        """Read that triangles are isosceles, equilateral or right.

        Each triangle has alternatives of its own, and all combinations of them are returned. Their
        number grows quickly, so that more than three triangles are not read.
        """
        has_noun = self.sides.word_at(start + 1) in ("triangle", "triangles")
        end = start + 2 if has_noun else start + 1
        # "right angle" and "right-angled" say something else.
        is_other_noun = self.sides.word_at(end) in ("trapezoid", "angle", "angles")
        if self.sides.token_at(start + 1).text == "-" or is_other_noun or len(subjects) > 3:
            return None
        word = self.sides.word_at(start)
        alternatives_by_triangle = [
            tuple(self._triangle_alternatives(subject, word)) for subject in subjects
        ]
        combinations = product(*alternatives_by_triangle)
        alternatives = tuple(tuple(chain(*combination)) for combination in combinations)
        return ReadRelation(alternatives=alternatives, end=end)

    def _read_line_complement(self, subjects: list[Term], start: int) -> ReadRelation | None:
        """Read what stands behind "is" or "are" where the subjects are segments."""
        word = self.sides.word_at(start)
        if word in ("parallel", "perpendicular"):
            if self.sides.word_at(start + 1) == "bisector":
                return self._read_bisector(subjects[0], start + 1)
            return self._read_pair(subjects, self._skip_to_words(start + 1), word.capitalize())
        if word == "bisector":
            return self._read_bisector(subjects[0], start)
        if word == "angle":  # "angle bisector"
            return self._read_bisector(subjects[0], start + 1)
        if word in ("diameter", "radius", "tangent", "tangents", "diameters", "radii"):
            return self._read_circle_complement(subjects, word, start + 1)
        if word in ("equal", "congruent") and len(subjects) > 1:
            equations = self._equate_subjects(subjects)
            return ReadRelation(alternatives=(equations,), end=self._skip_equal_words(start))
        return None

    def _skip_to_words(self, position: int) -> int:
        """Return the position behind "to", "with" or "to each other"."""
        to_words = {"to", "with", "each", "other", "one", "another"}
        return self.sides.skip_words(position, to_words)

    def _skip_equal_words(self, position: int) -> int:
        """Return the position behind "congruent", "equal in length" and the like."""
        position += 1
        if self.sides.word_at(position) == "in":
            return position + 2
        return position

    def _skip_article(self, position: int) -> int:
        """Return the position behind words that stand before a name, as in "the side AB"."""
        words_before_name = {"the", "side", "segment", "both", "line", "chord"}
        return self.sides.skip_words(position, words_before_name)

    def _relations_of_fact(self, head: str, *arguments: Term) -> tuple[Relation, ...]:
        """Return the relations that a fact says, such as `Parallel(Line(A, B), Line(C, D))`.

        `head` is the kind of the fact, here `Parallel`.
        """
        fact = Term(head=head, arguments=arguments)
        return tuple(split_midpoints(relations_of(self.reading.term_reader, fact)))

    def _read_pair(self, subjects: list[Term], start: int, fact_kind: str) -> ReadRelation | None:
        """Read a fact of two things: both are subjects, or the second stands behind the verb.

        In "AB and CD are parallel" both are subjects, in "AB is parallel to CD" only the first.
        """
        first_thing = subjects[0]
        if len(subjects) > 1:
            relations: list[Relation] = []
            for next_subject in subjects[1:]:
                relations += self._relations_of_fact(fact_kind, first_thing, next_subject)
            return ReadRelation(alternatives=(tuple(relations),), end=start)
        second_thing = self._read_object(start)
        if second_thing is None or second_thing.term.head != first_thing.head:
            return None
        has_as_many_corners = len(second_thing.term.names) == len(first_thing.names)
        if fact_kind in ("Similar", "Congruent") and not has_as_many_corners:
            return None
        pair_relations = self._relations_of_fact(fact_kind, first_thing, second_thing.term)
        return ReadRelation(alternatives=(pair_relations,), end=second_thing.end)

    def _read_object(self, start: int) -> ReadThing | None:
        """Read the one thing that is named behind a verb, with its noun or without."""
        kind = _KIND_BY_NOUN.get(self.sides.word_at(start))
        if kind is not None:
            start += 1
            if self.sides.word_at(start) == "angle" and kind == "Angle":
                start += 1
        return self._read_thing(kind, start)

    def _triangle_alternatives(self, triangle: Term, word: str) -> Iterator[tuple[Relation, ...]]:
        """Yield the ways in which a triangle can be isosceles, equilateral or right.

        The word does not say which sides are equal or which corner is right, so that there is an
        alternative for each side or corner.
        """
        corners = triangle.names
        lengths = [self.reading.term_reader.distance(*side) for side in sides_of_polygon(corners)]
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

    def _read_bisected(self, line: Term, start: int) -> ReadRelation | None:
        """Read what a line halves: a segment or an angle that is named behind "bisects"."""
        target = self._read_object(self._skip_article(start))
        if target is None or line.head != "Line" or target.term.head not in ("Angle", "Line"):
            return None
        relations = self._relations_of_fact("BisectsAngle", line, target.term)
        return ReadRelation(alternatives=(relations,), end=target.end)

    def _read_bisector(self, line: Term, start: int) -> ReadRelation | None:
        """Read "bisector of angle ABC", "bisector of AB" or "perpendicular bisector of AB".

        `start` is the position of "bisector". The word before it decides whether the line is also
        perpendicular to the segment.
        """
        if self.sides.word_at(start) != "bisector" or self.sides.word_at(start + 1) != "of":
            return None
        bisected = self._read_bisected(line, start + 2)
        if bisected is None or self.sides.word_at(start - 1) != "perpendicular":
            return bisected
        segment = self._read_object(self._skip_article(start + 2))
        if segment is None or segment.term.head != "Line":
            return None
        (halves,) = bisected.alternatives
        perpendicular = self._relations_of_fact("Perpendicular", line, segment.term)
        return ReadRelation(alternatives=(halves + perpendicular,), end=bisected.end)

    def _read_circle_complement(
        self, subjects: list[Term], word: str, start: int
    ) -> ReadRelation | None:
        """Read that lines are radii, diameters or tangents of a circle.

        For example, "a radius of circle O". Where the circle is not named, the only circle of the
        figure is meant. `word` is "radius" or the like, and `start` is the position behind it.
        """
        circles = self.reading.drawing.circles
        end = start
        cursor = self.sides.skip_words(start, {"of", "to", "the", "circle"})
        if self.sides.token_at(cursor).kind == "points" and cursor > start:
            centre, end = self.sides.names_at(cursor)
            circles = [circle for circle in circles if [circle.centre] == centre]
        elif cursor > start and self.sides.word_at(cursor - 1) == "circle":
            end = cursor
        if len(circles) != 1:
            return None
        relations_by_line = [
            self._relations_of_circle_line(line, word, circles[0]) for line in subjects
        ]
        if any(not relations for relations in relations_by_line):
            return None
        return ReadRelation(alternatives=(tuple(chain(*relations_by_line)),), end=end)

    def _relations_of_circle_line(
        self, line: Term, word: str, circle: Circle
    ) -> tuple[Relation, ...]:
        """Return the relations by which a segment is a radius, a diameter or a tangent.

        The result is empty where the figure does not show what is meant. For example, a radius has
        no end on the circle.
        """
        target = Term(head="Circle", arguments=(Term(circle.centre),))
        start, end = line.names
        on_circle = [name for name in (start, end) if name in circle.points]
        if word.startswith("radi"):
            if circle.centre not in (start, end) and len(on_circle) == 2:
                # A chord is called a radius, which is wrong. The claim becomes an equation that
                # is false: the distance of its end from the centre is 0.
                distance = self.reading.term_reader.distance(start, circle.centre)
                return (Equal(left=distance, right=Constant(0.0), unit="length"),)
            return self._relations_of_fact("IsRadiusOf", line, target) if on_circle else ()
        if word.startswith("diam"):
            if len(on_circle) < 2:
                return ()
            return self._relations_of_fact("IsDiameterOf", line, target)
        if len(on_circle) == 2:
            # A line through two points of the circle is called a tangent, which is wrong. The claim
            # becomes an equation that is false: its distance from the centre is the radius.
            distance_to_line = LineDistance(point=circle.centre, start=start, end=end)
            radius = self.reading.term_reader.radius(circle)
            return (Equal(left=distance_to_line, right=radius, unit="length"),)
        return self._relations_of_fact("Tangent", line, target) if on_circle else ()

    def _read_angle_complement(self, subjects: list[Term], start: int) -> ReadRelation | None:
        """Read that angles or arcs are right, equal, supplementary or complementary.

        Two supplementary angles add up to 180 degrees, and complementary ones to 90. The second may
        stand behind the word: "angle 1 is supplementary to angle 2".
        """
        word = self.sides.word_at(start)
        values = [self.reading.term_reader.quantity(term) for term in subjects]
        if word == "right":
            if self.sides.word_at(start + 1) in ("angle", "angles"):
                start += 1
            right_angles = [
                Equal(left=value, right=Constant(90.0), unit="degrees") for value in values
            ]
            return ReadRelation(alternatives=(tuple(right_angles),), end=start + 1)
        total_by_word = {"supplementary": 180.0, "complementary": 90.0}
        if word in total_by_word:
            end = start + 2 if self.sides.word_at(start + 1) in ("angles", "arcs") else start + 1
            if len(values) == 1:
                # "Angle 1 is supplementary to angle 2": the second angle stands behind the word.
                second_angle = self._read_object(self._skip_to_words(start + 1))
                if second_angle is None or second_angle.term.head != subjects[0].head:
                    return None
                values.append(self.reading.term_reader.quantity(second_angle.term))
                end = second_angle.end
            if len(values) != 2:
                return None
            total = Equal(left=plus(*values), right=Constant(total_by_word[word]), unit="degrees")
            return ReadRelation(alternatives=((total,),), end=end)
        if word in ("congruent", "equal") and len(values) > 1:
            equations = self._equate_subjects(subjects)
            return ReadRelation(alternatives=(equations,), end=self._skip_equal_words(start))
        return None

    def _equate_subjects(self, subjects: list[Term]) -> tuple[Relation, ...]:
        """Return the equations that make the lengths, angles or arcs of the subjects equal."""
        values = [self.reading.term_reader.quantity(term) for term in subjects]
        return tuple(equation(first, second) for first, second in pairwise(values))
