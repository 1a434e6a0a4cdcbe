"""Where each unknown of a figure stands in the vector that the solver changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
PointNumbers = NDArray[np.int64]


class UnknownsLayout:
    """The order of all unknowns of a figure in one vector, the `state` that the solver changes.

    First come the points, with two places each (x and y, in shares of the figure's size), then the
    named unknowns: letters, radii and numbered angles. `index_by_point` numbers the points from 0,
    and `first_unknown` is the index of the first named unknown in the state.

    Args:
        points: The names of all points, in the order of their places.
        unknowns: The names of all other unknowns, in the order of their places.
    """

    def __init__(self, points: Sequence[str], unknowns: Sequence[str]) -> None:
        self.points = list(points)
        self.unknowns = list(unknowns)
        self.index_by_point = {name: number for number, name in enumerate(self.points)}
        self.first_unknown = 2 * len(self.points)
        self.count = self.first_unknown + len(self.unknowns)

    def places(self, state: Vector) -> Vector:
        """Return the points' coordinates in `state`, shape (points, 2); a view, not a copy."""
        return state[: self.first_unknown].reshape(-1, 2)

    def location(self, state: Vector, point: str) -> complex:
        """Return a point's place in `state` as x + iy, in shares of the figure's size."""
        i = 2 * self.index_by_point[point]
        return complex(state[i], state[i + 1])


def add_point_slopes(rows: Vector, points: PointNumbers, slopes: Vector) -> None:
    """Add derivatives by one point in each row to the two columns of that point.

    Args:
        rows: Derivatives by all unknowns, shape (rows, unknowns). Changed in place.
        points: The number of the point of each row, shape (rows,).
        slopes: The derivatives by that point's x and y, shape (rows, 2).
    """
    row_numbers = np.arange(len(points))
    rows[row_numbers, 2 * points] += slopes[:, 0]
    rows[row_numbers, 2 * points + 1] += slopes[:, 1]
