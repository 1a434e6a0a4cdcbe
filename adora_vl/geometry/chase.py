"""Angles alone: the relations of a figure as linear equations of directions.

Some textbooks give lengths that do not fit the angles beside them, and many leave lengths out where
angles suffice. Here each line has an unknown direction, and an angle is the difference of two
directions. This difference is known up to half turns, which the picture counts. Where the equations
determine the goal, the answer is right whatever the lengths are.
"""

from __future__ import annotations

import math
from cmath import phase
from contextlib import suppress
from itertools import combinations

import numpy as np

from adora_vl.geometry.linear import LinearSum, NotLinearError, linear_sum
from adora_vl.geometry.quantities import (
    Angle,
    Distance,
    Equal,
    Parallel,
    Perpendicular,
    Quantity,
    Relation,
    Sweep,
    Unknown,
)
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.vectors import dot

_MAX_ERROR_OF_GOAL = 1e-7  # largest error of a goal that the equations determine
_MAX_ERROR_OF_EQUATIONS = 1e-6  # largest error of equations that do not contradict each other
_MIN_LENGTH = 1e-9  # two points that are nearer have no direction between them

# A sum of directions and letters in degrees, such as `line AC - line AB + 180`.
_DirectionSum = LinearSum[str]


class AngleChase:
    """Linear equations between directions of lines, which may fix an angle whatever the lengths.

    Relations about other quantities are skipped, apart from equal lengths, which make triangles
    isosceles. `value` solves the equations for the goal.

    `equations` has sums that are 0. Their unknowns are letters, such as `x`, and directions, such
    as `line AC`. `_line_by_points` has the name of the line through two points.
    `_direction_by_line` has a vector along each line in the picture, which decides which way the
    line's direction goes.
    """

    def __init__(self, reading: Reading) -> None:
        self.places = reading.drawing.places
        self.goal = reading.goal
        self.equations: list[_DirectionSum] = []
        self._points_of_lines = [set(line) for line in reading.drawing.drawn_lines]
        self._line_by_points = _line_name_by_points(reading.drawing.drawn_lines)
        self._direction_by_line: dict[str, complex] = {}
        equal_lengths: dict[Quantity, list[Distance]] = {}
        for relation in reading.relations:
            self._add_relation(relation)
            if not isinstance(relation, Equal):
                continue
            if isinstance(relation.left, Distance):
                equal_lengths.setdefault(relation.right, []).append(relation.left)
            if isinstance(relation.right, Distance):
                equal_lengths.setdefault(relation.left, []).append(relation.right)
        # This needs all relations, since two facts may make two sides equal to a third one.
        for length, sides in equal_lengths.items():
            equal_sides = [*sides, length] if isinstance(length, Distance) else sides
            for first, second in combinations(equal_sides, 2):
                self._add_isosceles(first, second)

    def value(self) -> float | None:
        """Return the goal where the angles determine it without a contradiction; else None.

        The equations are M x = r, and the goal is t x + c. The goal is determined if its row t is a
        sum of multiples of rows of M, even if some of x stays open. The equations contradict each
        other if no x fulfils all of them. Least squares answer both questions, since M rarely has
        full rank. For example, x1 + x2 = 90 determines 2 x1 + 2 x2, which is 180, and leaves x1
        open.
        """
        if self.goal is None:
            return None
        try:
            goal = self._as_sum(self.goal)
        except NotLinearError:
            return None
        names = sorted({name for equation in (*self.equations, goal) for name in equation.factors})
        if not self.equations or not goal.factors:
            return None
        column_by_name = {name: number for number, name in enumerate(names)}
        matrix = np.zeros((len(self.equations), len(names)))
        right_side = np.zeros(len(self.equations))
        for row, equation in enumerate(self.equations):
            for name, factor in equation.factors.items():
                matrix[row, column_by_name[name]] = factor
            right_side[row] = -equation.constant
        target = np.zeros(len(names))
        for name, factor in goal.factors.items():
            target[column_by_name[name]] = factor
        try:
            solution, *_ = np.linalg.lstsq(matrix, right_side, rcond=1e-9)
            weights, *_ = np.linalg.lstsq(matrix.T, target, rcond=1e-9)
        except np.linalg.LinAlgError:
            return None
        is_fixed = np.abs(matrix.T @ weights - target).max() < _MAX_ERROR_OF_GOAL
        is_fulfilled = np.abs(matrix @ solution - right_side).max() < _MAX_ERROR_OF_EQUATIONS
        if not is_fixed or not is_fulfilled:
            return None
        return float(target @ solution + goal.constant)

    # Directions and angles

    def _direction(self, start: str, end: str) -> _DirectionSum:
        """Return the direction from one point to another: `line AB`, or `line AB + 180` backwards.

        Raises `NotLinearError` where a point has no place, or where both have the same one.
        """
        if start not in self.places or end not in self.places:
            raise NotLinearError
        vector = self.places[end] - self.places[start]
        if abs(vector) < _MIN_LENGTH:
            raise NotLinearError
        # Two points that no drawn line joins have a line of their own.
        points = frozenset((start, end))
        line = self._line_by_points.setdefault(points, " ".join(sorted(points)))
        # The first vector that is seen along a line is its direction. The opposite one is half a
        # turn from it.
        direction_of_line = self._direction_by_line.setdefault(line, vector)
        is_along = dot(direction_of_line, vector) >= 0
        constant = 0.0 if is_along else 180.0
        return LinearSum(constant=constant, factors={f"line {line}": 1.0})

    def _value_in_picture(self, directions: _DirectionSum) -> float:
        """Return how many degrees a sum of directions comes to in the picture."""
        return directions.constant + sum(
            factor * math.degrees(phase(self._direction_by_line[name.removeprefix("line ")]))
            for name, factor in directions.factors.items()
        )

    def _turn_between(self, first: str, corner: str, last: str) -> tuple[_DirectionSum, float]:
        """Return the turn at a corner from the ray to `first` to the ray to `last`.

        It is the difference of two directions, correct up to full turns. The second value is its
        size in the picture, in degrees from -180 to 180.
        """
        turn = self._direction(corner, last).minus(self._direction(corner, first))
        start = math.degrees(phase(self.places[first] - self.places[corner]))
        end = math.degrees(phase(self.places[last] - self.places[corner]))
        drawn_degrees = (end - start + 180) % 360 - 180
        return turn, drawn_degrees

    def _add_full_turns(self, turn: _DirectionSum, drawn_degrees: float) -> _DirectionSum:
        """Add full turns to a turn, so that it is `drawn_degrees` in the picture.

        For example, `line AC - line AB` may come to -295 degrees in the picture where the angle has
        65 degrees there. Then the result is `line AC - line AB + 360`.
        """
        missing = 360.0 * round((drawn_degrees - self._value_in_picture(turn)) / 360)
        return turn.plus(LinearSum(constant=missing))

    def _angle_as_sum(self, angle: Angle | Sweep) -> _DirectionSum:
        """Return an angle as a sum of directions, which is as large as the angle in the picture.

        For example, the angle BAC becomes `line AC - line AB` where it turns anticlockwise from B
        to C, and `line AB - line AC` where it turns clockwise; 180 or 360 degrees may be added.
        Raises `NotLinearError` where one of its points has no place.
        """
        turn, drawn_degrees = self._turn_between(angle.first, angle.corner, angle.last)
        if isinstance(angle, Sweep):
            swept = (angle.turn * drawn_degrees) % 360
            return self._add_full_turns(turn.times(angle.turn), swept)
        sign = 1.0 if drawn_degrees >= 0 else -1.0
        return self._add_full_turns(turn.times(sign), abs(drawn_degrees))

    def _as_sum(self, quantity: Quantity) -> _DirectionSum:
        """Return a quantity as a sum of directions and letters.

        Raises `NotLinearError` for a length, and for a product of two unknowns.
        """
        return linear_sum(quantity, self._atom_as_sum)

    def _atom_as_sum(self, atom: Quantity) -> _DirectionSum:
        """Return a letter or an angle as a sum. Raises `NotLinearError` for a length."""
        if isinstance(atom, Unknown):
            return LinearSum(factors={atom.name: 1.0})
        if isinstance(atom, Angle | Sweep):
            return self._angle_as_sum(atom)
        raise NotLinearError

    # Equations

    def _add_relation(self, relation: Relation) -> None:
        """Add the equation of a relation between angles or directions; skip any other relation."""
        with suppress(NotLinearError):
            if isinstance(relation, Equal):
                left_side = self._as_sum(relation.left)
                self.equations.append(left_side.minus(self._as_sum(relation.right)))
            elif isinstance(relation, Parallel | Perpendicular):
                second_direction = self._direction(relation.c, relation.d)
                first_direction = self._direction(relation.a, relation.b)
                difference = second_direction.minus(first_direction)
                drawn_degrees = self._value_in_picture(difference)
                degrees_apart = 90.0 if isinstance(relation, Perpendicular) else 0.0
                # The relation holds up to half turns. The picture says how many there are.
                degrees_apart += 180.0 * round((drawn_degrees - degrees_apart) / 180)
                self.equations.append(difference.plus(LinearSum(constant=-degrees_apart)))

    def _add_isosceles(self, first: Distance, second: Distance) -> None:
        """Add that a triangle with two equal sides has equal angles: for AB = AC those at B and C.

        Nothing is added where the sides have no common end, or lie on one line.
        """
        shared_ends = {first.start, first.end} & {second.start, second.end}
        if len(shared_ends) != 1:
            return
        (apex,) = shared_ends
        ends = (first.start, first.end, second.start, second.end)
        base_corners = [name for name in ends if name != apex]
        if len(base_corners) != 2:
            return
        if any({apex, *base_corners} <= points for points in self._points_of_lines):
            return
        b, c = base_corners
        with suppress(NotLinearError):
            angle_at_b = self._angle_as_sum(Angle(first=apex, corner=b, last=c))
            angle_at_c = self._angle_as_sum(Angle(first=apex, corner=c, last=b))
            self.equations.append(angle_at_b.minus(angle_at_c))


def _line_name_by_points(lines: list[list[str]]) -> dict[frozenset[str], str]:
    """Return the name of the line for each pair of points on it.

    `lines` has the points of each drawn line. Two drawn lines with two common points are one line
    with one name. For example, ABC, BCD and AE give the name `BCD` to each pair out of ABC and out
    of BCD, and the name `AE` to the pair AE.
    """
    name_by_points: dict[frozenset[str], str] = {}
    new_name_by_old: dict[str, str] = {}

    def final_name(name: str) -> str:
        """Return the name that a line has after all renamings."""
        while name in new_name_by_old:
            name = new_name_by_old[name]
        return name

    for line in lines:
        name = "".join(line)
        for pair in map(frozenset, combinations(line, 2)):
            earlier_name = final_name(name_by_points.get(pair, name))
            if earlier_name != final_name(name):
                new_name_by_old[earlier_name] = final_name(name)
            name_by_points[pair] = name
    return {pair: final_name(name) for pair, name in name_by_points.items()}
