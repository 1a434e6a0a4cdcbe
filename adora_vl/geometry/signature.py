"""Names of quantities and relations that are the same however a text writes them.

With them it is found out whether a claim stands in the facts, or has been said before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from adora_vl.geometry.quantities import (
    Angle,
    Arithmetic,
    Between,
    Constant,
    Distance,
    Equal,
    Mean,
    Parallel,
    Perpendicular,
    Quantity,
    Relation,
    Unknown,
    number_of_quantity,
    over,
)


def split_midpoints(relations: Iterable[Relation]) -> Iterator[Relation]:
    """Yield the relations, and replace each midpoint by two equal lengths.

    For example, that M is the midpoint of AB becomes `AM = AB / 2` and `BM = AB / 2`. The residual
    of a `Mean` is a vector, which turns with the figure. So the gradient of a false claim would
    have a part that only comes from turning the figure.
    """
    for relation in relations:
        if not isinstance(relation, Mean) or len(relation.points) != 2:
            yield relation
            continue
        start, end = relation.points
        half = over(Distance(start=start, end=end), Constant(2.0))
        for name in (start, end):
            part = Distance(start=relation.point, end=name)
            yield Equal(left=part, right=half, unit="length")


def signature(quantity: Quantity) -> str:
    """Return a text that is equal for quantities of equal form.

    `AB` and `BA` are equal, and so are the angles ABC and CBA, and sums and products in any order.
    """
    value = number_of_quantity(quantity)
    if value is not None:
        return f"{value:.9g}"
    if isinstance(quantity, Unknown):
        return quantity.name
    if isinstance(quantity, Distance):
        return "".join(["|", *sorted((quantity.start, quantity.end)), "|"])
    if isinstance(quantity, Angle):
        first, last = sorted((quantity.first, quantity.last))
        return f"<{first}{quantity.corner}{last}"
    if isinstance(quantity, Arithmetic):
        parts = [signature(part) for part in quantity.parts]
        if quantity.function in ("+", "*"):
            parts.sort()
        return f"({f' {quantity.function} '.join(parts)}:{quantity.function})"
    return repr(quantity)


def relation_signature(relation: Relation) -> str:
    """Return a text that is equal for relations of equal form, such as `AB = 5` and `5 = BA`."""
    if isinstance(relation, Equal):
        return " = ".join(sorted((signature(relation.left), signature(relation.right))))
    if isinstance(relation, Parallel | Perpendicular):
        first_line = "".join(sorted((relation.a, relation.b)))
        second_line = "".join(sorted((relation.c, relation.d)))
        lines = sorted((first_line, second_line))
        return f"{type(relation).__name__} {' '.join(lines)}"
    if isinstance(relation, Between):
        ends = sorted((relation.start, relation.end))
        return f"{relation.point} between {' '.join(ends)}"
    return f"{relation.point} mean of {' '.join(sorted(relation.points))}"
