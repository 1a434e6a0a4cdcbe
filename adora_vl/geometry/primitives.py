"""One table: what each fact of a diagram says in primitives.

Each kind of fact is understood in one place, the function that the table names for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from adora_vl.geometry.circle_facts import (
    chord,
    circumscribed,
    diameter,
    inscribed,
    on_circle,
    secant,
    tangent,
)
from adora_vl.geometry.equation_facts import angle_sum, equals
from adora_vl.geometry.line_facts import (
    bisects,
    intersect,
    midpoint,
    on_line,
    parallel,
    perpendicular,
    perpendicular_bisector,
    right_angle,
)
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.polygon_facts import (
    diagonal,
    isosceles,
    kite,
    parallelogram,
    regular,
    right,
    similar,
    trapezoid,
)
from adora_vl.geometry.quantities import (
    Relation,
)
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.term_reader import TermReader
from adora_vl.geometry.triangle_facts import (
    centroid,
    hypotenuse,
    incenter,
    median,
    midsegment,
    orthocenter,
)
from adora_vl.utils.errors import did_you_mean

# What a fact says: relations, and terms inside it that say more by themselves, as the rhombus of
# "inscribed in rhombus ABCD".
_Rule = Callable[[TermReader, Term], Iterator[Relation | Term]]
RULE_BY_FACT: dict[str, _Rule] = {
    "Equals": equals,
    "PointLiesOnLine": on_line,
    "PointLiesOnCircle": on_circle,
    "Perpendicular": perpendicular,
    "Parallel": parallel,
    "IntersectAt": intersect,
    "IsMidpointOf": midpoint,
    "RightAngle": right_angle,
    "BisectsAngle": bisects,
    "IsPerpendicularBisectorOf": perpendicular_bisector,
    "Tangent": tangent,
    "IsDiameterOf": diameter,
    "IsChordOf": chord,
    "IsRadiusOf": chord,
    "Secant": secant,
    "Supplementary": angle_sum,
    "Complementary": angle_sum,
    "InscribedIn": inscribed,
    "CircumscribedTo": circumscribed,
    "Parallelogram": parallelogram,
    "Rectangle": parallelogram,
    "Rhombus": parallelogram,
    "Square": parallelogram,
    "Kite": kite,
    "Trapezoid": trapezoid,
    "Isosceles": isosceles,
    "Right": right,
    "Equilateral": regular,
    "Regular": regular,
    "Similar": similar,
    "Congruent": similar,
    "IsMedianOf": median,
    "IsAltitudeOf": median,
    "IsMidsegmentOf": midsegment,
    "IsCentroidOf": centroid,
    "IsIncenterOf": incenter,
    "IsOrthocenterOf": orthocenter,
    "IsHypotenuseOf": hypotenuse,
    "IsDiagonalOf": diagonal,
}
# Heads that name something and say nothing of it.
_HEADS_WITHOUT_RELATIONS = (
    *("Point", "Line", "Angle", "Arc", "Circle", "Minor", "Major", "Shape", "Polygon", "Shaded"),
    *("Triangle", "Quadrilateral", "Pentagon", "Hexagon", "Heptagon", "Octagon"),
    *("LengthOf", "MeasureOf", "AreaOf", "PerimeterOf", "Find", "UseTheorem"),
)


def relations_of(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Yield what a fact says as relations: equal quantities, parallel lines and the like.

    `term` is the fact, and `term_reader` makes its quantities. Raises `UnreadError` for a fact that
    is not known.
    """
    if term.head in _HEADS_WITHOUT_RELATIONS:
        return
    rule = RULE_BY_FACT.get(term.head)
    if rule is None:
        raise UnreadError(
            f"{term.head} is no fact that is known{did_you_mean(term.head, RULE_BY_FACT)}"
        )
    for part in rule(term_reader, term):
        if isinstance(part, Term):
            yield from _inner_relations(term_reader, part)
        else:
            yield part


def _inner_relations(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Yield what a shape inside another fact says by itself; nothing where that cannot be read."""
    if term.head in RULE_BY_FACT:
        relations: list[Relation] = []
        with suppress(UnreadError):
            relations.extend(relations_of(term_reader, term))
        yield from relations
