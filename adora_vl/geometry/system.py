"""The equations of a figure: residuals of all relations, with their exact derivatives.

The unknowns stand in one vector: two places for each point, in shares of the figure's size, then
letters, radii and numbered angles. Lengths count in shares of the size, angles in radians, so that
residuals are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adora_vl.geometry.quantities import (
    Angle,
    Area,
    Between,
    Combined,
    Distance,
    Equal,
    LineDistance,
    Mean,
    Parallel,
    Perpendicular,
    Quantity,
    Relation,
    Sweep,
    Unit,
    Unknown,
    atoms_of,
    constant_of,
    quantities_of,
)

Vector = NDArray[np.float64]
_TINY = 1e-150  # keeps the direction of two points that fall together finite
_LEAST_SHARE = 0.001  # of a segment; a point nearer to an end than this does not lie between
_WRAPPED = 300.0  # degrees; angles that differ by more are compared the other way round


class _LinearEquation(NamedTuple):
    """Factors of all atoms, and a constant, whose sum is zero.

    `weight` scales the residual; one that `wraps` is an angle, equal up to full turns.
    """

    row: Vector
    constant: float
    weight: float
    wraps: bool


class System:
    """Relations on a figure of so many points, compiled for quick evaluation.

    `size` is the length of one unit of the points' places. `unknowns` are all letters, radii and
    numbered angles of the relations and of `goal`, in the order of their places behind the points.
    """

    def __init__(
        self,
        points: Sequence[str],
        relations: Sequence[Relation],
        goal: Quantity | None,
        size: float,
    ) -> None:
        self.points = list(points)
        self.position = {name: number for number, name in enumerate(self.points)}
        self.size = size
        self.goal = goal
        self.relations = list(relations)
        quantities = [quantity for relation in relations for quantity in quantities_of(relation)]
        if goal is not None:
            quantities.append(goal)
        atoms = list(dict.fromkeys(atom for quantity in quantities for atom in atoms_of(quantity)))
        self.unknowns = sorted({atom.name for atom in atoms if isinstance(atom, Unknown)})
        self.first_unknown = 2 * len(self.points)
        self.count = self.first_unknown + len(self.unknowns)
        self.distances = [atom for atom in atoms if isinstance(atom, Distance)]
        self.turns = [atom for atom in atoms if isinstance(atom, Angle | Sweep)]
        self.reaches_and_areas = [atom for atom in atoms if isinstance(atom, LineDistance | Area)]
        ordered: list[Quantity] = [*self.distances, *self.turns, *self.reaches_and_areas]
        ordered += [Unknown(name) for name in self.unknowns]
        self.row = {atom: number for number, atom in enumerate(ordered)}
        self._compile_atoms()
        self._compile_relations()

    def _compile_atoms(self) -> None:
        """Note the rows of points that distances and angles are of."""
        position = self.position
        self._distance_ends = (
            np.array([position[atom.start] for atom in self.distances], dtype=int),
            np.array([position[atom.end] for atom in self.distances], dtype=int),
        )
        self._turn_points = tuple(
            np.array([position[getattr(atom, name)] for atom in self.turns], dtype=int)
            for name in ("first", "corner", "last")
        )
        self._turn_signs = np.array([atom.turn for atom in self.turns], dtype=float)
        self._is_sweep = np.array([isinstance(atom, Sweep) for atom in self.turns], dtype=bool)

    def _compile_relations(self) -> None:
        """Sort the relations into directions, orders, means, linear equations and all others.

        The rows of residuals stand in this order.
        """
        directions = [
            relation
            for relation in self.relations
            if isinstance(relation, Parallel | Perpendicular)
        ]
        orders = [relation for relation in self.relations if isinstance(relation, Between)]
        means = [relation for relation in self.relations if isinstance(relation, Mean)]
        equations = [relation for relation in self.relations if isinstance(relation, Equal)]
        self._direction_points = self._numbers_of(directions, ("a", "b", "c", "d"))
        self._is_perpendicular = np.array(
            [isinstance(relation, Perpendicular) for relation in directions], dtype=bool
        )
        self._order_points = self._numbers_of(orders, ("point", "start", "end"))
        self._compile_means(means)
        # A mean has one residual for each of its two coordinates.
        means_of_axes = [mean for mean in means for _ in (0, 1)]
        self.residual_relations: list[Relation] = [
            *directions,
            *orders,
            *means_of_axes,
            *self._compile_equations(equations),
        ]

    def _numbers_of(
        self, relations: Sequence[Relation], names: Sequence[str]
    ) -> tuple[NDArray[np.int64], ...]:
        """Return the numbers of the points that relations have by these names, one array a name."""
        return tuple(
            np.array([self.position[getattr(relation, name)] for relation in relations], dtype=int)
            for name in names
        )

    def _compile_means(self, means: Sequence[Mean]) -> None:
        """Note the factors of all places in each coordinate of each mean."""
        self._means = np.zeros((2 * len(means), self.count))
        for number, mean in enumerate(means):
            for axis in (0, 1):
                row = self._means[2 * number + axis]
                row[2 * self.position[mean.point] + axis] += 1.0
                for name in mean.points:
                    row[2 * self.position[name] + axis] -= 1.0 / len(mean.points)

    def _compile_equations(self, equations: Sequence[Equal]) -> list[Relation]:
        """Note the factors of linear equations, and the trees of all others.

        The equations in the order of their residuals, linear ones first.
        """
        linear: list[_LinearEquation] = []
        linear_relations: list[Relation] = []
        curved_relations: list[Relation] = []
        self._curved: list[tuple[Combined, float, bool]] = []
        for equation in equations:
            weight = self._weight(equation.unit)
            wraps = equation.unit == "degrees"
            difference = Combined(function="-", parts=(equation.left, equation.right))
            row = np.zeros(len(self.row))
            constant = self._linear(difference, 1.0, row)
            if constant is None:
                self._curved.append((difference, weight, wraps))
                curved_relations.append(equation)
            else:
                linear.append(
                    _LinearEquation(row=row, constant=constant, weight=weight, wraps=wraps)
                )
                linear_relations.append(equation)
        self._linear_rows = np.array([equation.row for equation in linear]).reshape(
            len(linear), len(self.row)
        )
        self._linear_constants = np.array([equation.constant for equation in linear])
        self._linear_weights = np.array([equation.weight for equation in linear])
        self._linear_wraps = np.array([equation.wraps for equation in linear], dtype=bool)
        return [*linear_relations, *curved_relations]

    def _weight(self, unit: Unit) -> float:
        """Return what scales a difference of this unit to shares of the size or radians."""
        weights: Mapping[Unit, float] = {
            "length": 1 / self.size,
            "area": 1 / self.size**2,
            "degrees": math.pi / 180,
            "plain": 1.0,
        }
        return weights[unit]

    def _linear(self, quantity: Quantity, factor: float, row: Vector) -> float | None:
        """Add a quantity times a factor to a row over all atoms.

        The constant beside it; None where not linear.
        """
        constant = constant_of(quantity)
        if constant is not None:
            return factor * constant
        if not isinstance(quantity, Combined):
            row[self.row[quantity]] += factor
            return 0.0
        if quantity.function in ("+", "-"):
            total = 0.0
            for number, part in enumerate(quantity.parts):
                sign = -1.0 if quantity.function == "-" and number == 1 else 1.0
                constant = self._linear(part, sign * factor, row)
                if constant is None:
                    return None
                total += constant
            return total
        if quantity.function == "*":
            constants = [constant_of(part) for part in quantity.parts]
            numbers = [number for number in constants if number is not None]
            variable = [
                part
                for part, number in zip(quantity.parts, constants, strict=True)
                if number is None
            ]
            if len(variable) == 1:
                return self._linear(variable[0], factor * math.prod(numbers), row)
        if quantity.function == "/":
            divisor = constant_of(quantity.parts[1])
            if divisor:
                return self._linear(quantity.parts[0], factor / divisor, row)
        return None

    def location(self, v: Vector, point: str) -> complex:
        """Return a point's place at `v`, in shares of the figure's size."""
        i = 2 * self.position[point]
        return complex(v[i], v[i + 1])

    # Evaluation

    def atoms(self, v: Vector, *, slopes: bool) -> tuple[Vector, Vector | None]:
        """Return the values of all atoms at `v`, and with `slopes` their derivatives.

        Shapes: (atoms,) and (atoms, unknowns).
        """
        values = np.empty(len(self.row))
        gradient = np.zeros((len(self.row), self.count)) if slopes else None
        places = v[: self.first_unknown].reshape(-1, 2)
        count = len(self.distances)
        if count:
            start, end = self._distance_ends
            way = places[end] - places[start]
            length = np.sqrt(np.einsum("ij,ij->i", way, way) + _TINY)
            values[:count] = self.size * length
            if gradient is not None:
                unit = self.size * way / length[:, None]
                _scatter(gradient[:count], end, unit)
                _scatter(gradient[:count], start, -unit)
        turns = len(self.turns)
        if turns:
            self._turn_values(
                places,
                values[count : count + turns],
                None if gradient is None else gradient[count:],
            )
        for number, atom in enumerate(self.reaches_and_areas, start=count + turns):
            value, slope = self._other(atom, places)
            values[number] = value
            if gradient is not None:
                gradient[number] = slope
        if self.unknowns:
            values[-len(self.unknowns) :] = v[self.first_unknown :]
            if gradient is not None:
                gradient[-len(self.unknowns) :, self.first_unknown :] = np.eye(len(self.unknowns))
        return values, gradient

    def _turn_values(self, places: Vector, values: Vector, gradient: Vector | None) -> None:
        """Fill in the angles in degrees, and their derivatives where these are asked for.

        An angle with a turn is negative in a mirrored figure; a sweep goes from 0 to 360.
        """
        first, corner, last = self._turn_points
        u = places[first] - places[corner]
        w = places[last] - places[corner]
        # The sum makes 0 of -0, of which the arctangent would make -180 degrees.
        across = u[:, 0] * w[:, 1] - u[:, 1] * w[:, 0] + 0.0
        along = np.einsum("ij,ij->i", u, w)
        sign = np.where(self._turn_signs == 0, np.where(across < 0, -1.0, 1.0), self._turn_signs)
        angle = np.degrees(np.arctan2(sign * across, along))
        values[:] = np.where(self._is_sweep, angle % 360.0, angle)
        if gradient is not None:
            rows = gradient[: len(self.turns)]
            slope_u, slope_w = _angle_slopes(u, w, np.degrees(sign))
            _scatter(rows, first, slope_u)
            _scatter(rows, last, slope_w)
            _scatter(rows, corner, -slope_u - slope_w)

    def _other(self, atom: LineDistance | Area, places: Vector) -> tuple[float, Vector]:
        """Return the value and the derivatives of an area or of the distance from a line."""
        slope = np.zeros(self.count)
        if isinstance(atom, Area):
            corners = [self.position[name] for name in atom.corners]
            x = places[corners, 0]
            y = places[corners, 1]
            doubled = float(np.dot(np.roll(x, 1), y) - np.dot(x, np.roll(y, 1)))
            factor = math.copysign(0.5 * self.size**2, doubled)
            for number, corner in enumerate(corners):
                before = number - 1
                behind = (number + 1) % len(corners)
                slope[2 * corner] += factor * (y[behind] - y[before])
                slope[2 * corner + 1] += factor * (x[before] - x[behind])
            return factor * doubled, slope
        point = self.position[atom.point]
        start = self.position[atom.start]
        end = self.position[atom.end]
        way = places[end] - places[start]
        to_point = places[point] - places[start]
        length = math.sqrt(float(way @ way) + _TINY)
        across = float(way[0] * to_point[1] - way[1] * to_point[0])
        reach = across / length
        sign = math.copysign(self.size, reach)
        slope_point = np.array([-way[1], way[0]]) / length
        slope_way = np.array([to_point[1], -to_point[0]]) / length - reach * way / length**2
        slope[2 * point : 2 * point + 2] += sign * slope_point
        slope[2 * end : 2 * end + 2] += sign * slope_way
        slope[2 * start : 2 * start + 2] -= sign * (slope_point + slope_way)
        return sign * reach, slope

    def mirrored_corners(self, v: Vector) -> int:
        """Return how many of the angles lie on the other side than in the picture."""
        values, _ = self.atoms(v, slopes=False)
        angles = values[len(self.distances) : len(self.distances) + len(self.turns)]
        return int(((angles < -1e-6) & (self._turn_signs != 0)).sum())

    def residuals(self, v: Vector, *, slopes: bool = True) -> tuple[Vector, Vector]:
        """Return the residuals of all relations at `v` and their derivatives by the unknowns.

        Shapes: (rows,) and (rows, unknowns). Without `slopes` the derivatives are empty.

        Where an expression has no value, as behind a division by zero, its residual is not finite.
        """
        values, gradient = self.atoms(v, slopes=slopes)
        parts: list[Vector] = []
        derivatives: list[Vector] = []
        # In the order of `residual_relations`, which says whose each row is.
        if len(self._is_perpendicular):
            self._directions(v, parts=parts, derivatives=derivatives, slopes=slopes)
        if len(self._order_points[0]):
            self._orders(v, parts=parts, derivatives=derivatives, slopes=slopes)
        if len(self._means):
            parts.append(self._means @ v)
            derivatives.append(self._means)
        if len(self._linear_rows):
            difference = self._linear_rows @ values + self._linear_constants
            # A sweep of 359 degrees and one of 1 differ by 2, not by 358.
            far = self._linear_wraps & (np.abs(difference) > _WRAPPED)
            difference = np.where(far, (difference + 180) % 360 - 180, difference)
            parts.append(difference * self._linear_weights)
            if gradient is not None:
                derivatives.append((self._linear_rows @ gradient) * self._linear_weights[:, None])
        for quantity, weight, wraps in self._curved:
            value, slope = self.evaluated(quantity, values, gradient)
            if wraps and abs(value) > _WRAPPED and math.isfinite(value):
                value = (value + 180) % 360 - 180
            parts.append(np.array([weight * value]))
            if gradient is not None:
                derivatives.append(weight * slope[None, :])
        if not parts:
            return np.zeros(0), np.zeros((0, self.count))
        jacobian = np.concatenate(derivatives) if slopes else np.zeros((0, self.count))
        return np.concatenate(parts), jacobian

    def _directions(
        self, v: Vector, parts: list[Vector], derivatives: list[Vector], *, slopes: bool
    ) -> None:
        """Add how far lines are from parallel or perpendicular: the sine or cosine between them."""
        places = v[: self.first_unknown].reshape(-1, 2)
        a, b, c, d = self._direction_points
        u = places[b] - places[a]
        w = places[d] - places[c]
        lengths = np.sqrt(np.einsum("ij,ij->i", u, u) * np.einsum("ij,ij->i", w, w) + _TINY)
        sine = (u[:, 0] * w[:, 1] - u[:, 1] * w[:, 0]) / lengths
        cosine = np.einsum("ij,ij->i", u, w) / lengths
        parts.append(np.where(self._is_perpendicular, cosine, sine))
        if slopes:
            rows = np.zeros((len(a), self.count))
            slope_u, slope_w = _angle_slopes(u, w, np.where(self._is_perpendicular, -sine, cosine))
            _scatter(rows, b, slope_u)
            _scatter(rows, a, -slope_u)
            _scatter(rows, d, slope_w)
            _scatter(rows, c, -slope_w)
            derivatives.append(rows)

    def _orders(
        self, v: Vector, parts: list[Vector], derivatives: list[Vector], *, slopes: bool
    ) -> None:
        """Add how far each point is from lying between: 0 wherever it does.

        It counts in shares of the segment, along it.
        """
        places = v[: self.first_unknown].reshape(-1, 2)
        point, start, end = self._order_points
        u = places[point] - places[start]
        w = places[end] - places[start]
        square = np.einsum("ij,ij->i", w, w) + _TINY
        share = np.einsum("ij,ij->i", u, w) / square
        parts.append(np.minimum(share - _LEAST_SHARE, 0) + np.maximum(share - 1 + _LEAST_SHARE, 0))
        if slopes:
            is_outside = (share < _LEAST_SHARE) | (share > 1 - _LEAST_SHARE)
            slope_u = np.where(is_outside, 1 / square, 0.0)[:, None] * w
            slope_w = np.where(is_outside, 1 / square, 0.0)[:, None] * (u - 2 * share[:, None] * w)
            rows = np.zeros((len(point), self.count))
            _scatter(rows, point, slope_u)
            _scatter(rows, end, slope_w)
            _scatter(rows, start, -slope_u - slope_w)
            derivatives.append(rows)

    def evaluated(
        self, quantity: Quantity, values: Vector, gradient: Vector | None
    ) -> tuple[float, Vector]:
        """Return the value of a quantity and its derivatives by all unknowns.

        The value is NaN where there is none; the derivatives are of no use then.
        """
        nothing = np.zeros(self.count)
        constant = constant_of(quantity)
        if constant is not None:
            return constant, nothing
        if not isinstance(quantity, Combined):
            row = self.row[quantity]
            return float(values[row]), nothing if gradient is None else gradient[row]
        parts = [self.evaluated(part, values, gradient) for part in quantity.parts]
        try:
            return _combined(quantity, parts)
        except (ZeroDivisionError, OverflowError, ValueError):
            return math.nan, nothing

    def goal_at(self, v: Vector) -> tuple[float, Vector]:
        """Return the value of the goal at `v` and its derivatives."""
        assert self.goal is not None, "a system without a goal has no value"
        values, gradient = self.atoms(v, slopes=True)
        return self.evaluated(self.goal, values, gradient)


def _combined(quantity: Combined, parts: Sequence[tuple[float, Vector]]) -> tuple[float, Vector]:
    """Return arithmetic on values with their derivatives.

    Raises what Python's arithmetic raises.
    """
    function = quantity.function
    x, dx = parts[0]
    if function in ("sin", "cos", "tan"):
        radians = math.radians(x)
        if function == "sin":
            return math.sin(radians), math.radians(math.cos(radians)) * dx
        if function == "cos":
            return math.cos(radians), -math.radians(math.sin(radians)) * dx
        return math.tan(radians), math.radians(1 / math.cos(radians) ** 2) * dx
    if function == "log":
        return math.log(abs(x)), dx / x
    if function == "+":
        return sum(value for value, _ in parts), np.sum([slope for _, slope in parts], axis=0)
    if function == "*":
        product = 1.0
        slope = np.zeros_like(dx)
        for value, own_slope in parts:
            slope = slope * value + product * own_slope
            product *= value
        return product, slope
    y, dy = parts[1]
    if function == "-":
        return x - y, dx - dy
    if function == "/":
        return x / y, dx / y - (x / y**2) * dy
    base = abs(x)
    power = base**y
    slope_base = y * base ** (y - 1) * math.copysign(1.0, x) if base else 0.0
    slope_exponent = power * math.log(base) if base else 0.0
    return float(power), slope_base * dx + slope_exponent * dy


def _angle_slopes(u: Vector, w: Vector, factor: Vector) -> tuple[Vector, Vector]:
    """Return how the angle from `u` to `w` changes with each, times a factor a row."""
    length_u = np.einsum("ij,ij->i", u, u) + _TINY
    length_w = np.einsum("ij,ij->i", w, w) + _TINY
    slope_u = np.stack([u[:, 1], -u[:, 0]], axis=1) * (factor / length_u)[:, None]
    slope_w = np.stack([-w[:, 1], w[:, 0]], axis=1) * (factor / length_w)[:, None]
    return slope_u, slope_w


def _scatter(rows: Vector, points: NDArray[np.int64], slopes: Vector) -> None:
    """Add the derivatives by one point a row to the columns of its two places."""
    numbers = np.arange(len(points))
    rows[numbers, 2 * points] += slopes[:, 0]
    rows[numbers, 2 * points + 1] += slopes[:, 1]
