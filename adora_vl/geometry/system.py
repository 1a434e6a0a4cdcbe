"""The equations of a figure: residuals of all relations, with their exact derivatives.

A residual is how far a relation is from holding. Lengths count in shares of the figure's size and
angles in radians, so that residuals of all kinds are alike in size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.atoms import TINY_SQUARE, Atoms, angle_slopes
from adora_vl.geometry.derivatives import Differentiated, apply_function
from adora_vl.geometry.layout import PointNumbers, UnknownsLayout, Vector, add_point_slopes
from adora_vl.geometry.linear import LinearSum, NotLinearError, linear_sum
from adora_vl.geometry.quantities import (
    Angle,
    Arithmetic,
    Between,
    Equal,
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
    sides_of_equation,
)

_END_MARGIN = 0.001  # share of a segment; a point this near to an end does not lie between the ends
# Angles that differ by more degrees than this are compared the other way round the circle.
_MAX_PLAIN_DIFFERENCE = 300.0
_TURN_TOLERANCE = 1e-3  # degrees that a measure of an angle may be below 0, or above 360


class _Residuals(NamedTuple):
    """Residuals of some relations, shape (rows,), and their derivatives, (rows, unknowns).

    The derivatives are None where nobody asks for them.
    """

    values: Vector
    slopes: Vector | None


class System(UnknownsLayout):
    """All equations of a figure, compiled so that residuals and derivatives are quickly evaluated.

    The named unknowns are all letters, radii and numbered angles of the relations and of the goal,
    in the order of their names. `residual_relations` has the relation of each residual.

    Args:
        points: The names of the figure's points.
        relations: What has to hold.
        goal: The quantity that is asked for; None where the system only has to be fulfilled.
        figure_size: The length of the figure's larger side, in the problem's unit. Coordinates in a
            state are shares of it.
    """

    def __init__(
        self,
        points: Sequence[str],
        relations: Sequence[Relation],
        goal: Quantity | None,
        figure_size: float,
    ) -> None:
        quantities = [
            quantity for relation in relations for quantity in sides_of_equation(relation)
        ]
        if goal is not None:
            quantities.append(goal)
        atoms = list(dict.fromkeys(atom for quantity in quantities for atom in atoms_of(quantity)))
        unknowns = sorted({atom.name for atom in atoms if isinstance(atom, Unknown)})
        super().__init__(points, unknowns)
        self.figure_size = figure_size
        self.goal = goal
        self.relations = list(relations)
        self.atoms = Atoms(atoms, layout=self, figure_size=figure_size)
        self._compile_relations()

    def _compile_relations(self) -> None:
        """Sort the relations by how they are evaluated, and prepare each sort.

        The residuals stand in this order: directions, orders, means, linear equations, others.
        """
        directions = [
            relation
            for relation in self.relations
            if isinstance(relation, Parallel | Perpendicular)
        ]
        orders = [relation for relation in self.relations if isinstance(relation, Between)]
        means = [relation for relation in self.relations if isinstance(relation, Mean)]
        equations = [relation for relation in self.relations if isinstance(relation, Equal)]
        self._direction_points = self._point_numbers(directions, ("a", "b", "c", "d"))
        self._is_perpendicular = np.array(
            [isinstance(relation, Perpendicular) for relation in directions], dtype=bool
        )
        self._order_points = self._point_numbers(orders, ("point", "start", "end"))
        self._mean_factors = self._factors_of_means(means)
        # A mean has one residual for each of its two coordinates.
        means_of_axes = [mean for mean in means for _ in (0, 1)]
        self.residual_relations: list[Relation] = [
            *directions,
            *orders,
            *means_of_axes,
            *self._compile_equations(equations),
        ]

    def _point_numbers(
        self, relations: Sequence[Relation], fields: Sequence[str]
    ) -> list[PointNumbers]:
        """Return one array for each field: the numbers of the points that the relations have there.

        For example, points A, B and M have the numbers 0, 1 and 2. The relation
        `Between(point="M", start="A", end="B")` and these three fields give [2], [0] and [1].
        """
        return [
            np.array(
                [self.index_by_point[getattr(relation, field)] for relation in relations], dtype=int
            )
            for field in fields
        ]

    def _factors_of_means(self, means: Sequence[Mean]) -> Vector:
        """Return the factors of all unknowns in the residuals of means.

        The shape is (2 * means, unknowns), with a row for x and one for y of each mean. A residual
        is the coordinate of the middle point, minus the mean coordinate of the others. If M is the
        mean of A and B, and the unknowns are x and y of A, B and M, the rows are

            -0.5   0    -0.5   0    1   0
             0    -0.5   0    -0.5  0   1
        """
        factors = np.zeros((2 * len(means), self.count))
        for number, mean in enumerate(means):
            for axis in (0, 1):
                row = factors[2 * number + axis]
                row[2 * self.index_by_point[mean.point] + axis] += 1.0
                for name in mean.points:
                    row[2 * self.index_by_point[name] + axis] -= 1.0 / len(mean.points)
        return factors

    def _compile_equations(self, equations: Sequence[Equal]) -> list[Relation]:
        """Prepare the linear equations as one matrix, and all others as trees of arithmetic.

        An equation is linear if the difference of its sides is a sum of multiples of atoms
        (distances, angles, letters) and a constant. `AB = 2 AM + 3` is linear: its factors are 1
        for AB and -2 for AM, its constant is -3. `AB * AM = 6` is not. Returns the equations in the
        order of their residuals, the linear ones first.
        """
        linear: list[Equal] = []
        differences: list[LinearSum[Quantity]] = []
        self._nonlinear_equations: list[Equal] = []
        for equation in equations:
            difference = Arithmetic(function="-", parts=(equation.left, equation.right))
            try:
                differences.append(linear_sum(difference, _sum_of_atom))
                linear.append(equation)
            except NotLinearError:
                self._nonlinear_equations.append(equation)
        self._linear_factors = np.zeros((len(linear), len(self.atoms.row_by_atom)))
        for row, difference_of_row in enumerate(differences):
            for atom, factor in difference_of_row.factors.items():
                self._linear_factors[row, self.atoms.row_by_atom[atom]] = factor
        self._linear_constants = np.array([total.constant for total in differences])
        self._linear_weights = np.array([self._weight(equation.unit) for equation in linear])
        self._linear_is_angle = np.array(
            [equation.unit == "degrees" for equation in linear], dtype=bool
        )
        self._stated_angles = self._find_stated_angles()
        return [*linear, *self._nonlinear_equations]

    def _find_stated_angles(self) -> list[tuple[int, int]]:
        """Return the row of each linear equation of one angle and letters, and the angle's column.

        `angle ABC = 14y - 8` is such an equation. An equation of several angles is not, since their
        sum may have whole turns.
        """
        atoms = list(self.atoms.row_by_atom)
        stated_angles: list[tuple[int, int]] = []
        for row in np.flatnonzero(self._linear_is_angle):
            columns = [int(column) for column in np.flatnonzero(self._linear_factors[row])]
            angles = [column for column in columns if isinstance(atoms[column], Angle | Sweep)]
            letters = [column for column in columns if isinstance(atoms[column], Unknown)]
            # Anything else, such as a distance, may have any value.
            if len(angles) == 1 and letters and len(letters) + 1 == len(columns):
                stated_angles.append((int(row), angles[0]))
        return stated_angles

    def _weight(self, unit: Unit) -> float:
        """Return the factor that turns a difference in a unit into a residual.

        A residual is a share of the figure's size, or an angle in radians.
        """
        weights: Mapping[Unit, float] = {
            "length": 1 / self.figure_size,
            "area": 1 / self.figure_size**2,
            "degrees": math.pi / 180,
            "plain": 1.0,
        }
        return weights[unit]

    def residuals(self, state: Vector, *, slopes: bool = True) -> tuple[Vector, Vector]:
        """Return the residuals of all relations at `state`, and their derivatives by the unknowns.

        `state` has the values of all unknowns. Shapes: (rows,) and (rows, unknowns), in the order
        of `residual_relations`. Without `slopes` the derivatives have no rows. A residual is not
        finite where its expression has no value, for example because it divides by zero.
        """
        values, gradient = self.atoms.evaluate(state, slopes=slopes)
        groups: list[_Residuals] = []
        # This is the order of `residual_relations`.
        if len(self._is_perpendicular):
            groups.append(self._directions(state, slopes=slopes))
        if len(self._order_points[0]):
            groups.append(self._orders(state, slopes=slopes))
        if len(self._mean_factors):
            means = self._mean_factors @ state
            groups.append(_Residuals(values=means, slopes=self._mean_factors))
        if len(self._linear_factors):
            groups.append(self._linear_equations(values, gradient))
        groups += [
            self._nonlinear_equation(equation, values, gradient)
            for equation in self._nonlinear_equations
        ]
        if not groups:
            return np.zeros(0), np.zeros((0, self.count))
        residuals = np.concatenate([group.values for group in groups])
        if not slopes:
            return residuals, np.zeros((0, self.count))
        return residuals, np.concatenate([group.slopes for group in groups])

    def _directions(self, state: Vector, *, slopes: bool) -> _Residuals:
        """Return the residuals of all parallel and perpendicular lines.

        For lines with the directions u and w, the residual of parallel lines is the sine of the
        angle between them, (u × w) / (|u| |w|). That of perpendicular lines is the cosine,
        (u · w) / (|u| |w|). `state` has the values of all unknowns.
        """
        places = self.places(state)
        a, b, c, d = self._direction_points
        u = places[b] - places[a]
        w = places[d] - places[c]
        lengths = np.sqrt(np.einsum("ij,ij->i", u, u) * np.einsum("ij,ij->i", w, w) + TINY_SQUARE)
        sine = (u[:, 0] * w[:, 1] - u[:, 1] * w[:, 0]) / lengths
        cosine = np.einsum("ij,ij->i", u, w) / lengths
        values = np.where(self._is_perpendicular, cosine, sine)
        if not slopes:
            return _Residuals(values=values, slopes=None)
        rows = np.zeros((len(a), self.count))
        # By the chain rule: the derivative of the residual by the angle (cosine for sine, -sine for
        # cosine), times the derivatives of the angle by u and w, which `angle_slopes` computes.
        by_angle = np.where(self._is_perpendicular, -sine, cosine)
        slope_u, slope_w = angle_slopes(u, w, by_angle)
        add_point_slopes(rows, b, slope_u)
        add_point_slopes(rows, a, -slope_u)
        add_point_slopes(rows, d, slope_w)
        add_point_slopes(rows, c, -slope_w)
        return _Residuals(values=values, slopes=rows)

    def _orders(self, state: Vector, *, slopes: bool) -> _Residuals:
        """Return for each point that has to lie between two others how far it is outside.

        The distance is measured along the segment, as a share of its length. It is 0 for a point
        between the ends, negative before the start and positive behind the end. For example, a
        point behind the end by 0.2 of the length has 0.201, with `_END_MARGIN`. `state` has the
        values of all unknowns.
        """
        places = self.places(state)
        point, start, end = self._order_points
        u = places[point] - places[start]
        w = places[end] - places[start]
        square = np.einsum("ij,ij->i", w, w) + TINY_SQUARE
        # 0 at the start and 1 at the end: s = (u · w) / |w|².
        share = np.einsum("ij,ij->i", u, w) / square
        before_start = np.minimum(share - _END_MARGIN, 0)
        behind_end = np.maximum(share - 1 + _END_MARGIN, 0)
        values = before_start + behind_end
        if not slopes:
            return _Residuals(values=values, slopes=None)
        # The derivatives of s by u and by w are w / |w|² and (u - 2 s w) / |w|². Between the ends
        # the residual is 0, and so are its derivatives.
        is_outside = (share < _END_MARGIN) | (share > 1 - _END_MARGIN)
        factor = np.where(is_outside, 1 / square, 0.0)[:, None]
        slope_u = factor * w
        slope_w = factor * (u - 2 * share[:, None] * w)
        rows = np.zeros((len(point), self.count))
        add_point_slopes(rows, point, slope_u)
        add_point_slopes(rows, end, slope_w)
        add_point_slopes(rows, start, -slope_u - slope_w)
        return _Residuals(values=values, slopes=rows)

    def _linear_equations(self, values: Vector, gradient: Vector | None) -> _Residuals:
        """Return the residuals of all linear equations at once.

        `values` has the value of each atom, shape (atoms,). `gradient` has their derivatives, shape
        (atoms, unknowns); None where they are not needed.
        """
        difference = self._linear_factors @ values + self._linear_constants
        # A sweep of 359 degrees and one of 1 differ by 2, not by 358.
        is_wrapped = self._linear_is_angle & (np.abs(difference) > _MAX_PLAIN_DIFFERENCE)
        difference = np.where(is_wrapped, (difference + 180) % 360 - 180, difference)
        residuals = difference * self._linear_weights
        if gradient is None:
            return _Residuals(values=residuals, slopes=None)
        slopes = (self._linear_factors @ gradient) * self._linear_weights[:, None]
        return _Residuals(values=residuals, slopes=slopes)

    def impossible_angles(self, state: Vector) -> int:
        """Count the angles that are equal to an expression only after whole turns.

        The residual of an angle leaves out whole turns. So `14y - 8` fits an angle of 127 degrees
        with y = 9.64, and with y = 35.36, where it is 487. No measure of an angle is below 0 or
        above 360. `state` has the values of all unknowns.
        """
        values, _ = self.atoms.evaluate(state, slopes=False)
        count = 0
        for row, column in self._stated_angles:
            factors = self._linear_factors[row]
            difference = float(factors @ values) + float(self._linear_constants[row])
            # The difference is 0, up to whole turns, so this is what the angle is said to be.
            stated = float(values[column]) - difference / float(factors[column])
            if not -_TURN_TOLERANCE < stated < 360 + _TURN_TOLERANCE:
                count += 1
        return count

    def _nonlinear_equation(
        self, equation: Equal, values: Vector, gradient: Vector | None
    ) -> _Residuals:
        """Return the residual of one equation that is not linear.

        `values` has the value of each atom, shape (atoms,). `gradient` has their derivatives, shape
        (atoms, unknowns); None where they are not needed.
        """
        left_side = self.evaluate(equation.left, values, gradient)
        right_side = self.evaluate(equation.right, values, gradient)
        difference = left_side.value - right_side.value
        is_angle = equation.unit == "degrees"
        if is_angle and abs(difference) > _MAX_PLAIN_DIFFERENCE and math.isfinite(difference):
            difference = (difference + 180) % 360 - 180
        weight = self._weight(equation.unit)
        residuals = np.array([weight * difference])
        if gradient is None:
            return _Residuals(values=residuals, slopes=None)
        slope = left_side.slope - right_side.slope
        return _Residuals(values=residuals, slopes=weight * slope[None, :])

    def evaluate(
        self, quantity: Quantity, values: Vector, gradient: Vector | None
    ) -> Differentiated:
        """Return the value of a quantity and its derivatives by all unknowns.

        The value is NaN where the quantity has none, for example because it divides by zero. The
        derivatives mean nothing then.

        Args:
            quantity: What is computed.
            values: The values of all atoms, shape (atoms,).
            gradient: Their derivatives, shape (atoms, unknowns); None where none are needed.
        """
        zeros = np.zeros(self.count)
        constant = constant_of(quantity)
        if constant is not None:
            return Differentiated(value=constant, slope=zeros)
        if not isinstance(quantity, Arithmetic):
            row = self.atoms.row_by_atom[quantity]
            slope = zeros if gradient is None else gradient[row]
            return Differentiated(value=float(values[row]), slope=slope)
        parts = [self.evaluate(part, values, gradient) for part in quantity.parts]
        try:
            return apply_function(quantity, parts)
        except (ZeroDivisionError, OverflowError, ValueError):
            return Differentiated(value=math.nan, slope=zeros)

    def goal_at(self, state: Vector) -> Differentiated:
        """Return the value of the goal at `state`, and its derivatives by all unknowns.

        `state` has the values of all unknowns of the figure.
        """
        assert self.goal is not None, "a system without a goal has no value"
        values, gradient = self.atoms.evaluate(state, slopes=True)
        return self.evaluate(self.goal, values, gradient)


def _sum_of_atom(atom: Quantity) -> LinearSum[Quantity]:
    """Return an atom as a sum of one term, with the factor 1."""
    return LinearSum(factors={atom: 1.0})
