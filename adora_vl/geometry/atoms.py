"""Values and exact derivatives of atoms: the quantities of a figure that no arithmetic combines.

An atom is a distance, an angle, an area, or an unknown with a name. Derivatives are by the unknowns
of `UnknownsLayout`. Lengths count in the problem's own unit, angles in degrees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adora_vl.geometry.layout import PointNumbers, UnknownsLayout, Vector, add_point_slopes
from adora_vl.geometry.quantities import (
    Angle,
    Area,
    Distance,
    LineDistance,
    Quantity,
    Sweep,
    Unknown,
)

# Keeps the direction from a point to another in the same place finite. The square root of it is
# still far below the rounding of any coordinate.
TINY_SQUARE = 1e-150


class Atoms:
    """All atoms of a figure (distances, angles, areas, letters), numbered to be evaluated together.

    `row_by_atom` has the number of each atom, which is its row in the arrays. Atoms of a kind stand
    together, in the order distances, angles, distances from lines and areas, named unknowns.
    `_turn_signs` has the `turn` of each angle, 0 where the picture does not show it.

    Args:
        atoms: The atoms, each once.
        layout: The unknowns that the derivatives are by.
        figure_size: The length of the figure's larger side, in the problem's unit. Coordinates in a
            state are shares of it.
    """

    def __init__(
        self, atoms: Sequence[Quantity], layout: UnknownsLayout, figure_size: float
    ) -> None:
        self.layout = layout
        self.figure_size = figure_size
        self.distances = [atom for atom in atoms if isinstance(atom, Distance)]
        self.angles = [atom for atom in atoms if isinstance(atom, Angle | Sweep)]
        self.line_distances_and_areas = [
            atom for atom in atoms if isinstance(atom, LineDistance | Area)
        ]
        ordered: list[Quantity] = [
            *self.distances,
            *self.angles,
            *self.line_distances_and_areas,
            *(Unknown(name) for name in layout.unknowns),
        ]
        self.row_by_atom = {atom: number for number, atom in enumerate(ordered)}
        self._distance_starts = self._point_numbers([atom.start for atom in self.distances])
        self._distance_ends = self._point_numbers([atom.end for atom in self.distances])
        self._angle_firsts = self._point_numbers([atom.first for atom in self.angles])
        self._angle_corners = self._point_numbers([atom.corner for atom in self.angles])
        self._angle_lasts = self._point_numbers([atom.last for atom in self.angles])
        self._turn_signs = np.array([atom.turn for atom in self.angles], dtype=float)
        self._is_sweep = np.array([isinstance(atom, Sweep) for atom in self.angles], dtype=bool)

    def _point_numbers(self, names: Sequence[str]) -> PointNumbers:
        """Return the numbers of points in the layout, one for each name."""
        return np.array([self.layout.index_by_point[name] for name in names], dtype=int)

    def evaluate(self, state: Vector, *, slopes: bool) -> tuple[Vector, Vector | None]:
        """Return the values of all atoms at `state`, and with `slopes` their derivatives.

        `state` has the values of all unknowns: the coordinates of points, then letters and radii.
        Shapes: (atoms,) and (atoms, unknowns). Without `slopes` the derivatives are None.
        """
        values = np.empty(len(self.row_by_atom))
        gradient = np.zeros((len(self.row_by_atom), self.layout.count)) if slopes else None
        places = self.layout.places(state)
        first_angle = len(self.distances)
        first_line_distance = first_angle + len(self.angles)
        if self.distances:
            derivatives = None if gradient is None else gradient[:first_angle]
            values[:first_angle] = self._distance_values(places, derivatives)
        if self.angles:
            angle_rows = slice(first_angle, first_line_distance)
            derivatives = None if gradient is None else gradient[angle_rows]
            values[angle_rows] = self._angle_values(places, derivatives)
        for number, atom in enumerate(self.line_distances_and_areas, start=first_line_distance):
            if isinstance(atom, Area):
                value, slope = self._area(atom, places)
            else:
                value, slope = self._line_distance(atom, places)
            values[number] = value
            if gradient is not None:
                gradient[number] = slope
        unknown_count = len(self.layout.unknowns)
        if unknown_count:
            first_unknown = self.layout.first_unknown
            values[-unknown_count:] = state[first_unknown:]
            if gradient is not None:
                gradient[-unknown_count:, first_unknown:] = np.eye(unknown_count)
        return values, gradient

    def mirrored_corners(self, state: Vector) -> int:
        """Return how many of the angles lie on the other side than in the picture.

        `state` has the values of all unknowns of the figure.
        """
        angles = self._angle_values(self.layout.places(state), derivatives=None)
        # Angles whose side the picture does not show are never negative.
        is_mirrored = (angles < -1e-6) & (self._turn_signs != 0)
        return int(is_mirrored.sum())

    def _distance_values(self, places: Vector, derivatives: Vector | None) -> Vector:
        """Return all distances, and add their derivatives to `derivatives` unless it is None.

        `places` are the coordinates of all points, shape (points, 2). `derivatives` has one row for
        each distance, shape (distances, unknowns), and is changed in place.
        """
        difference = places[self._distance_ends] - places[self._distance_starts]
        length = np.sqrt(np.einsum("ij,ij->i", difference, difference) + TINY_SQUARE)
        if derivatives is not None:
            slope_end = self.figure_size * difference / length[:, None]
            add_point_slopes(derivatives, self._distance_ends, slope_end)
            add_point_slopes(derivatives, self._distance_starts, -slope_end)
        distances: Vector = self.figure_size * length
        return distances

    def _angle_values(self, places: Vector, derivatives: Vector | None) -> Vector:
        """Return all angles in degrees, and add their derivatives to `derivatives`, if it is given.

        With u and w from the corner to the first and last point, an angle is atan2(±u × w, u · w).
        The sign is that of the turn in the picture. So an angle whose side the picture shows is
        negative in a mirrored figure. A sweep, the angle of an arc that may go the longer way
        round, is from 0 to 360. `places` are the coordinates of all points, shape (points, 2).
        """
        u = places[self._angle_firsts] - places[self._angle_corners]
        w = places[self._angle_lasts] - places[self._angle_corners]
        # The sum makes 0 of -0, of which the arctangent would make -180 degrees.
        cross = u[:, 0] * w[:, 1] - u[:, 1] * w[:, 0] + 0.0
        dot = np.einsum("ij,ij->i", u, w)
        # Where the picture does not show the side, the angle counts as positive on either side.
        seen_sign = np.where(cross < 0, -1.0, 1.0)
        sign = np.where(self._turn_signs == 0, seen_sign, self._turn_signs)
        if derivatives is not None:
            slope_u, slope_w = angle_slopes(u, w, np.degrees(sign))
            add_point_slopes(derivatives, self._angle_firsts, slope_u)
            add_point_slopes(derivatives, self._angle_lasts, slope_w)
            add_point_slopes(derivatives, self._angle_corners, -slope_u - slope_w)
        angle = np.degrees(np.arctan2(sign * cross, dot))
        return np.where(self._is_sweep, angle % 360.0, angle)

    def _area(self, area: Area, places: Vector) -> tuple[float, Vector]:
        """Return the area of a polygon and its derivatives by all unknowns, shape (unknowns,).

        The shoelace formula gives twice the area as the sum of x[k-1] y[k] - x[k] y[k-1] over the
        corners k, negative where they go clockwise. Its derivatives by x[k] and y[k] are
        y[k+1] - y[k-1] and x[k-1] - x[k+1]. `places` are the coordinates of all points, shape
        (points, 2).
        """
        corners = [self.layout.index_by_point[name] for name in area.corners]
        x = places[corners, 0]
        y = places[corners, 1]
        doubled = float(np.dot(np.roll(x, 1), y) - np.dot(x, np.roll(y, 1)))
        # With the sign of the sum, so that the area itself is never negative.
        factor = math.copysign(0.5 * self.figure_size**2, doubled)
        slope = np.zeros(self.layout.count)
        for number, corner in enumerate(corners):
            previous = number - 1
            following = (number + 1) % len(corners)
            slope[2 * corner] += factor * (y[following] - y[previous])
            slope[2 * corner + 1] += factor * (x[previous] - x[following])
        return factor * doubled, slope

    def _line_distance(self, atom: LineDistance, places: Vector) -> tuple[float, Vector]:
        """Return how far a point is from a line, and the derivatives by all unknowns.

        With v along the line and q from its start to the point, the signed distance is
        h = (v × q) / |v|, where v × q = v_x q_y - v_y q_x. Its derivatives are (-v_y, v_x) / |v| by
        q, and (q_y, -q_x) / |v| - h v / |v|² by v. The start is in both, so its derivative is minus
        their sum. `places` are the coordinates of all points, shape (points, 2).
        """
        point = self.layout.index_by_point[atom.point]
        start = self.layout.index_by_point[atom.start]
        end = self.layout.index_by_point[atom.end]
        along_line = places[end] - places[start]
        to_point = places[point] - places[start]
        length = math.sqrt(float(along_line @ along_line) + TINY_SQUARE)
        cross = float(along_line[0] * to_point[1] - along_line[1] * to_point[0])
        signed_distance = cross / length
        sign = math.copysign(self.figure_size, signed_distance)
        slope_point = np.array([-along_line[1], along_line[0]]) / length
        slope_line = (
            np.array([to_point[1], -to_point[0]]) / length
            - signed_distance * along_line / length**2
        )
        slope = np.zeros(self.layout.count)
        slope[2 * point : 2 * point + 2] += sign * slope_point
        slope[2 * end : 2 * end + 2] += sign * slope_line
        slope[2 * start : 2 * start + 2] -= sign * (slope_point + slope_line)
        return sign * signed_distance, slope


def angle_slopes(u: Vector, w: Vector, factor: Vector) -> tuple[Vector, Vector]:
    """Return the derivatives of the angle from `u` to `w`, in radians, by each of them.

    They are (u_y, -u_x) / |u|² by u, and (-w_y, w_x) / |w|² by w. For example, u = (2, 0) gives
    (0, -0.5): if u moves up by 0.1, the angle gets smaller by 0.05.

    Args:
        u: The directions at which the angles begin, shape (rows, 2).
        w: The directions at which they end, shape (rows, 2).
        factor: What each row's derivatives are multiplied by, shape (rows,).

    Returns:
        The derivatives by `u` and by `w`, of shape (rows, 2) each.
    """
    square_u = np.einsum("ij,ij->i", u, u) + TINY_SQUARE
    square_w = np.einsum("ij,ij->i", w, w) + TINY_SQUARE
    slope_u = np.stack([u[:, 1], -u[:, 0]], axis=1) * (factor / square_u)[:, None]
    slope_w = np.stack([-w[:, 1], w[:, 0]], axis=1) * (factor / square_w)[:, None]
    return slope_u, slope_w
