"""How much polygons of a picture look like their kind, or like each other."""

from __future__ import annotations

import math
from cmath import phase
from collections.abc import Sequence
from itertools import combinations

from adora_vl.geometry.forms import inner_names
from adora_vl.geometry.regions import Regions
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.vectors import cosine, sine

# Shapes that differ by more are not meant to be similar: 45 degrees in all, or ratios of sides that
# spread by a half in their logarithms.
_TOO_UNLIKE = 1.5
_UNLIKE = 0.15  # step in which a polygon's likeness to its kind is counted


class Likeness(Regions):
    """The polygons of a picture, ranked by what they look like."""

    def _likest(self, head: str, count: int) -> list[str] | None:
        """Return the drawn polygon with so many corners that looks most like its kind.

        The largest comes first among equals.
        """
        ranked = [
            (round(self._unlikeness(head, names) / _UNLIKE), -abs(self.signed_area(names)), names)
            for names in self.polygons
            if len(names) == count
        ]
        return min(ranked)[2] if ranked else None

    def _unlikeness(self, head: str, names: Sequence[str]) -> float:
        """Return how far a drawn polygon is from its kind; 0 where it has none."""
        if len(names) != 4:
            return 0.0
        a, b, c, d = [self.places[name] for name in names]
        sides = [b - a, c - b, d - c, a - d]
        lengths = [abs(side) for side in sides]
        askew = [abs(sine(sides[0], sides[2])), abs(sine(sides[1], sides[3]))]
        unlike = 0.0
        if head in ("Parallelogram", "Rectangle", "Rhombus", "Square"):
            unlike += sum(askew)
        if head in ("Rectangle", "Square"):
            unlike += abs(cosine(sides[0], sides[1]))
        if head in ("Rhombus", "Square"):
            unlike += abs(math.log(lengths[0] / lengths[1]))
        if head == "Trapezoid":
            unlike += min(askew)
        if head == "Kite":
            ratios = [abs(math.log(lengths[i] / lengths[(i + 1) % 4])) for i in range(4)]
            unlike += min(ratios[0] + ratios[2], ratios[1] + ratios[3])
        return unlike

    def similar_pair(self) -> tuple[list[str], list[str]]:
        """Return two drawn shapes that are meant to be similar, corner by corner.

        Raises `UnreadError`.
        """
        if self.copied is not None:
            return list(self.copied[0]), list(self.copied[1])
        marked = self._marked_pair()
        if marked is not None:
            return marked
        shapes = list(
            {tuple(sorted(names)): names for names in self.polygons if len(names) > 2}.values()
        )
        drawn = {name for name in self.neighbours if name in self.places}
        best: tuple[float, list[str], list[str]] | None = None
        for first, second in combinations(shapes[:80], 2):
            if len(first) == len(second) and {*first, *second} >= drawn:
                distance, order = self._matched(first, second)
                if best is None or distance < best[0]:
                    best = (distance, first, order)
        if best is None or best[0] >= _TOO_UNLIKE:
            raise UnreadError("the picture does not show which shapes are similar")
        return best[1], best[2]

    def _marked_pair(self) -> tuple[list[str], list[str]] | None:
        """Return two polygons whose corners facts make equal one by one; None without such.

        The picture has not the places of both.
        """
        partners: dict[str, str] = {}
        for fact in self.facts:
            if fact.is_equation:
                first = inner_names(fact.arguments[0], "MeasureOf")
                second = inner_names(fact.arguments[1], "MeasureOf")
                if len(first) == 3 and len(second) == 3:
                    partners[first[1]] = second[1]
        if len(partners) < 3 or self.neighbours.keys() <= self.places.keys():
            return None
        path = [min(partners)]
        while True:
            onward = [
                name
                for name in sorted(self.neighbours[path[-1]])
                if name in partners and name not in path
            ]
            if not onward:
                break
            path.append(onward[0])
        if len(path) < len(partners) or path[0] not in self.neighbours[path[-1]]:
            return None
        return path, [partners[name] for name in path]

    def _matched(self, first: list[str], second: list[str]) -> tuple[float, list[str]]:
        """Return how unlike two polygons are at best, and the second one's corners then."""
        wanted_angles, wanted_lengths = self._measures(first)
        best: tuple[float, list[str]] | None = None
        for way in (second, second[::-1]):
            for start in range(len(way)):
                order = way[start:] + way[:start]
                angles, lengths = self._measures(order)
                ratios = [math.log(x / y) for x, y in zip(wanted_lengths, lengths, strict=True)]
                mean = sum(ratios) / len(ratios)
                spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
                turned = sum(abs(x - y) for x, y in zip(wanted_angles, angles, strict=True)) / 30
                if best is None or turned + 3 * spread < best[0] - 1e-6:
                    best = (turned + 3 * spread, order)
        assert best is not None
        return best

    def _measures(self, names: Sequence[str]) -> tuple[list[float], list[float]]:
        """Return the drawn angles of a polygon in degrees, and the lengths of its sides."""
        places = [self.places[name] for name in names]
        angles = []
        for i, location in enumerate(places):
            turn = phase(
                (places[i - 1] - location) * (places[(i + 1) % len(places)] - location).conjugate()
            )
            angles.append(abs(math.degrees(turn)))
        return angles, [max(abs(places[i] - places[i - 1]), 1e-9) for i in range(len(places))]
