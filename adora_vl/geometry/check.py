"""Claims on a figure: which are true, and which of these say something new.

A figure has many truths that cost nothing: `AB = AB`, a fact in other words, arithmetic on what is
given. A claim is told from these by its gradient, how the difference of its sides changes with every
place and letter of the figure. In the span of the gradients of given values and of earlier new
claims it says nothing new. So no text has more new claims than its figure has free unknowns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from adora_vl.geometry.claims import (
    Claim,
    claims_in,
    relation_signature,
    signature,
    without_means,
)
from adora_vl.geometry.figure import Figure, figure_from
from adora_vl.geometry.quantities import (
    Angle,
    Combined,
    Constant,
    Distance,
    Equal,
    LineDistance,
    Parallel,
    Perpendicular,
    Quantity,
    Relation,
    Unknown,
    atoms_of,
    constant_of,
    plus,
)
from adora_vl.geometry.reading import read
from adora_vl.geometry.sides import number_of_quantity
from adora_vl.geometry.solve import FigureProblem
from adora_vl.geometry.system import System, Vector

ClaimVerdict = Literal["new", "given", "nothing", "again", "false", "follows", "open", "unread"]
TRUE: tuple[ClaimVerdict, ...] = ("new", "given", "nothing", "again")
_RANK = 1e-6  # singular values below this share of the largest count as none
_FREE = 1e-4  # share of a claim's gradient along which the facts may let it move
_FLAT = 1e-9  # length of a gradient, after scaling, that counts as none
_IN_SPAN = 1e-5  # share of a gradient that may lie outside of a span
_EXACT = 1e-3  # share by which a value may be off that has no decimals
_ROUNDED = 0.006  # share by which one may be off that has some, which were rounded on the way
# How far the figure may be from one in which a claim holds, along the claim's gradient, and along
# what of it is new; in the scaled unknowns, of which a figure's size is about 1. Of claims that
# people marked as true the rounded ones are up to 0.003 off. Without these bounds a large number on
# both sides, or a small factor, would make any claim true.
_FAR = 0.01
_FAR_NEW = 0.02
_DIRECTION = 2e-3  # sine by which lines may be off
_WORLD_STEPS = 12  # of Newton's method, for a figure in which false claims hold
_IN_WORLD = 1e-6


@dataclass(frozen=True)
class Checked:
    """A claim with what the figure says of it.

    `verdict`: of true ones `new`; `given`, a fact as it stands; `nothing`, an identity or arithmetic
    on what is known; `again`, said before. `false`; `follows`, false as well, and right if an
    earlier false claim were true, so that one error counts once. `open`: the facts do not say.
    `unread`: not understood. `is_answer`: it says what is asked for, as a number.
    """

    claim: Claim
    verdict: ClaimVerdict
    is_answer: bool = False

    @property
    def is_true(self) -> bool:
        """Whether it holds in the figure."""
        return self.verdict in TRUE

    @property
    def is_step(self) -> bool:
        """Whether it is a step of a working: true, new, and not the answer itself."""
        return self.verdict == "new" and not self.is_answer


def checked(claims: Sequence[Claim], figure: Figure) -> list[Checked]:
    """The claims with their verdicts, in their order."""
    return CheckedFigure(figure).judge(claims)


@lru_cache(maxsize=256)
def figure_at(text: str) -> CheckedFigure:
    """The figure that a row stores, made ready for checks. Raises `ValueError` where it is none."""
    return CheckedFigure(figure_from(text))


class CheckedFigure:
    """A stored figure with the gradients of its facts, for the claims of many texts."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.reading = read(figure.form, without_words=figure.left_out)
        problem = FigureProblem(self.reading)
        self.system = problem.system
        self.v = problem.start(0)
        for name, (x, y) in figure.at.items():
            position = self.system.position.get(name)
            if position is not None:
                self.v[2 * position] = x / problem.size
                self.v[2 * position + 1] = y / problem.size
        for number, name in enumerate(self.system.unknowns, start=self.system.first_unknown):
            self.v[number] = figure.values.get(name, self.v[number])
        _, jacobian = self.system.residuals(self.v)
        lengths = np.sqrt(np.einsum("ij,ij->j", jacobian, jacobian))
        self.scales = 1 / np.maximum(lengths, 1e-9)
        self.free = self._free_movements(jacobian * self.scales)
        facts = [*self.reading.relations, *without_means(self.reading.relations)]
        self.facts = {relation_signature(relation) for relation in facts}
        # What the facts give, as numbers and as expressions of letters.
        self.known = [
            relation
            for relation in self.reading.relations
            if _gives_value(relation) or _gives_expression(relation)
        ]
        self.plain_equations = [
            relation
            for relation in self.reading.relations
            if isinstance(relation, Equal) and (_gives_value(relation) or _joins_names(relation))
        ]
        self.measured_names = self._measured_names()
        self.goals = self._goal_names()

    def _free_movements(self, jacobian: Vector) -> Vector:
        """The movements that all facts allow, as rows; shape (movements, unknowns)."""
        if not len(jacobian):
            return np.eye(self.system.count)
        _, sizes, directions = np.linalg.svd(np.nan_to_num(jacobian), full_matrices=True)
        rank = int((sizes > _RANK * max(float(sizes[0]), 1e-9)).sum())
        return np.asarray(directions[rank:])

    def _goal_names(self) -> set[str]:
        """What is asked for, also under the other name that a fact gives it."""
        goal = self.reading.goal
        if goal is None:
            return set()
        names = {signature(goal)}
        for relation in self.reading.relations:
            if isinstance(relation, Equal) and not _gives_value(relation):
                sides = {signature(relation.left), signature(relation.right)}
                if names & sides:
                    names |= sides
        return names

    def _measured_names(self) -> set[str]:
        """The names whose numbers the facts give."""
        sides = [
            side
            for relation in self.known
            if isinstance(relation, Equal) and _gives_value(relation)
            for side in (relation.left, relation.right)
        ]
        return {signature(side) for side in sides if number_of_quantity(side) is None}

    @cached_property
    def room(self) -> int:
        """How many new claims there can be: the unknowns that the given values do not settle.

        Where three given values settle a triangle, all that can be said of it is arithmetic on
        them, and this is 0.
        """
        with np.errstate(all="ignore"):
            known_rows = _Judgement(self, []).known_rows
        movable = self.system.count - len(self.free)
        rank = int(np.linalg.matrix_rank(np.stack(known_rows), tol=_IN_SPAN)) if known_rows else 0
        return max(0, movable - rank)

    def claims(self, text: str) -> list[Checked]:
        """The claims of a text with their verdicts."""
        return self.judge(claims_in(text, self.reading))

    def judge(self, claims: Sequence[Claim]) -> list[Checked]:
        """The claims with their verdicts, in their order."""
        with np.errstate(all="ignore"):
            return _Judgement(self, claims).results()

    def says_answer(self, claim: Claim) -> bool:
        """Whether a claim says by its form what is asked for.

        It has the goal alone on one side and a number on the other (`x = 35`), or arithmetic on
        the goal and given names and a plain number (`2x = 70`, `x + AB = 48` where AB is given).
        `4x - 2 = 3x + 1` is a step, and no answer.
        """
        for way in claim.ways:
            for relation in way:
                if isinstance(relation, Equal) and self._is_goal_with_number(relation):
                    return True
        return False

    def _is_goal_with_number(self, relation: Equal) -> bool:
        sides = (relation.left, relation.right)
        for side, partner in (sides, sides[::-1]):
            if number_of_quantity(partner) is None:
                continue
            if signature(side) in self.goals:
                return True
            names = {signature(atom) for atom in atoms_of(side) if constant_of(atom) is None}
            has_goal = bool(names & self.goals)
            is_plain = isinstance(partner, Constant)
            if is_plain and has_goal and names <= self.goals | self.measured_names:
                return True
        return False


def _gives_value(relation: Relation) -> bool:
    """Whether a fact says of one name which number it is."""
    if not isinstance(relation, Equal):
        return False
    sides = (relation.left, relation.right)
    has_number = any(number_of_quantity(side) is not None for side in sides)
    return has_number and any(not isinstance(side, Combined) for side in sides)


def _joins_names(relation: Equal) -> bool:
    """Whether a fact says that two names are equal: `AB = BC`, `angle 1 = angle ABC`."""
    return not isinstance(relation.left, Combined) and not isinstance(relation.right, Combined)


def _gives_expression(relation: Relation) -> bool:
    """Whether a fact says of one name which expression of letters it is: `AB = 2x + 1`.

    What a letter's value makes of it is arithmetic on what is known.
    """
    if not isinstance(relation, Equal):
        return False
    sides = (relation.left, relation.right)
    return any(
        not isinstance(side, Combined | Unknown) and _has_letters_alone(partner)
        for side, partner in (sides, sides[::-1])
    )


def _has_letters_alone(quantity: Quantity) -> bool:
    """Whether a quantity is made of letters and numbers, with a letter among them."""
    atoms = list(atoms_of(quantity))
    has_letter = any(isinstance(atom, Unknown) for atom in atoms)
    return has_letter and all(isinstance(atom, Unknown | Constant) for atom in atoms)


def _is_collinear(relation: Relation) -> bool:
    """Whether a fact says that three points lie on one line."""
    return isinstance(relation, Parallel) and bool(
        {relation.a, relation.b} & {relation.c, relation.d}
    )


def _names_angle(relation: Relation) -> bool:
    """Whether a fact only says which angle a number in the picture stands for."""
    if not isinstance(relation, Equal):
        return False
    sides = (relation.left, relation.right)
    numbers = [side for side in sides if isinstance(side, Unknown)]
    is_numbered = any(side.name.startswith("angle ") for side in numbers)
    return is_numbered and any(isinstance(side, Angle) for side in sides)


def _is_radial(relation: Relation) -> bool:
    """Whether a fact says that a point lies on a circle."""
    if not isinstance(relation, Equal):
        return False
    sides = (relation.left, relation.right)
    return any(_is_radius(side) for side in sides) and any(
        isinstance(side, Distance) for side in sides
    )


def _is_radius(quantity: Quantity) -> bool:
    """Whether a quantity is the radius of a circle."""
    return isinstance(quantity, Unknown) and quantity.name.startswith("radius ")


class _Judgement:
    """Judges the claims of one text in their order."""

    def __init__(self, figure: CheckedFigure, claims: Sequence[Claim]) -> None:
        self.figure = figure
        self.claims = claims
        relations = [relation for claim in claims for way in claim.ways for relation in way]
        self.directions = [
            relation
            for relation in figure.reading.relations
            if isinstance(relation, Parallel | Perpendicular)
        ]
        relations += [*figure.known, *figure.plain_equations, *self.directions]
        base = figure.system
        names = [Unknown(name) for name in base.unknowns]
        self.system = System(
            points=base.points,
            relations=list(dict.fromkeys(relations)),
            goal=plus(*names) if names else None,
            size=base.size,
        )
        assert self.system.count == base.count, "claims have no unknowns of their own"
        self.measured = self._measured(figure.v)
        self.atom_values, _ = self.system.atoms(figure.v, slopes=False)
        self.direction_rows = [row for fact in self.directions for row in self.rows(fact)]
        # Angles at a straight line, also by the numbers that stand for them.
        lines = [fact for fact in self.directions if _is_collinear(fact)]
        names_of_angles = [fact for fact in figure.known if _names_angle(fact)]
        self.line_rows = [row for fact in [*lines, *names_of_angles] for row in self.rows(fact)]
        self.said_rows: list[Vector] = []  # of new claims that lines are parallel or perpendicular
        radial = [fact for fact in figure.known if _is_radial(fact)]
        self.radial_rows = [row for fact in radial for row in self.rows(fact)]
        self.known_rows = [
            row for fact in figure.known if fact not in radial for row in self.rows(fact)
        ]
        self.true_rows = list(self.known_rows)
        names_of_atoms = dict.fromkeys(signature(atom) for atom in self.system.row)
        self.columns = {name: number for number, name in enumerate(names_of_atoms)}
        self.arithmetic_rows = [self._partials(fact) for fact in figure.plain_equations]
        self.false_rows: list[Vector] = []
        self.true_relations: list[Relation] = list(figure.known)
        self.false_ways: list[Sequence[Relation]] = []
        self.worlds: list[Vector] | None = None  # found where they are needed
        self.said: set[str] = set()

    def results(self) -> list[Checked]:
        """All claims with their verdicts."""
        return [self._result(claim) for claim in self.claims]

    # Measures

    def _measured(self, v: Vector) -> dict[Relation, list[tuple[float, Vector]]]:
        """Map each relation to its residuals at `v`, each with its gradient."""
        residuals, jacobian = self.system.residuals(v)
        rows: dict[Relation, list[tuple[float, Vector]]] = {}
        for number, relation in enumerate(self.system.residual_relations):
            rows.setdefault(relation, []).append((float(residuals[number]), jacobian[number]))
        return rows

    def rows(self, relation: Relation) -> list[Vector]:
        """The gradients of a relation, each scaled like the unknowns and of length 1 or 0."""
        return [self._unit_row(gradient) for _, gradient in self.measured[relation]]

    def _unit_row(self, gradient: Vector) -> Vector:
        """A gradient, scaled like the unknowns and of length 1, or 0 where it is flat."""
        scaled = np.nan_to_num(gradient) * self.figure.scales
        length = float(np.linalg.norm(scaled))
        return scaled / length if length > _FLAT else np.zeros_like(scaled)

    def _is_determined(self, rows: Iterable[Vector]) -> bool:
        """Whether the facts say whether the claim holds, and do not leave it free."""
        return all(
            not len(self.figure.free) or float(np.linalg.norm(self.figure.free @ row)) <= _FREE
            for row in rows
        )

    def _holds(self, relation: Relation, decimals: int | None, v: Vector) -> bool:
        """Whether a relation holds in the figure at `v`, up to rounding."""
        is_world = v is not self.figure.v
        if not isinstance(relation, Equal):
            measured = self._measured(v) if is_world else self.measured
            return all(abs(residual) <= _DIRECTION for residual, _ in measured[relation])
        values = self.system.atoms(v, slopes=False)[0] if is_world else self.atom_values
        left_value, _ = self.system.evaluated(relation.left, values, None)
        right_value, _ = self.system.evaluated(relation.right, values, None)
        return is_equal(left_value, right_value, decimals)

    def _distance(self, relation: Relation) -> float:
        """How far the figure is from one in which a relation holds, along its gradient."""
        distances = [0.0]
        for residual, gradient in self.measured[relation]:
            length = float(np.linalg.norm(np.nan_to_num(gradient) * self.figure.scales))
            if length > _FLAT:
                distances.append(abs(residual) / length)
        return max(distances)

    # Verdicts

    def _result(self, claim: Claim) -> Checked:
        if not claim.ways:
            return Checked(claim=claim, verdict="unread")
        ways = [way for way in claim.ways if way]
        states = [self._state(way, claim.decimals) for way in ways]
        if "true" in states:
            way = ways[states.index("true")]
            verdict = self._of_true(way)
        elif "open" in states:
            verdict = "open"
        else:
            verdict = self._of_false(claim, ways[0])
        return Checked(claim=claim, verdict=verdict, is_answer=self.figure.says_answer(claim))

    def _state(self, way: Sequence[Relation], decimals: int | None) -> str:
        """Whether relations are true, false or open."""
        holds = True
        for relation in way:
            if not self._is_determined(self.rows(relation)):
                return "open"
            is_near = self._distance(relation) <= _FAR
            holds = holds and is_near and self._holds(relation, decimals, self.figure.v)
        return "true" if holds else "false"

    def _of_true(self, way: Sequence[Relation]) -> ClaimVerdict:
        """What kind of truth a claim is; a new one is known from then on."""
        names = _names_of(way)
        if all(relation_signature(relation) in self.figure.facts for relation in way):
            return "given"
        rows = [row for relation in way for row in self.rows(relation)]
        is_direction = all(_is_direction(relation) for relation in way)
        if is_direction and _are_in_span(rows, self.direction_rows):
            return "given"  # the same lines by other names, or a right angle that is marked
        if _are_in_span(rows, self.line_rows):
            return "nothing"  # angles at a straight line, which nobody has to find out
        if names in self.said:
            return "again"
        if is_direction and _are_in_span(rows, [*self.direction_rows, *self.said_rows]):
            return "again"
        radial_rows = self.radial_rows if self._is_of_lengths(way) else []
        if _are_in_span(rows, [*self.known_rows, *radial_rows]) or self._is_arithmetic(way):
            return "nothing"
        if all(_is_parallel_to_any(row, self.true_rows) for row in rows if row.any()):
            return "again"
        span = [*self.true_rows, *radial_rows]
        if _are_in_span(rows, span):
            return "nothing"
        novelty = max(_outside(row, span) for row in rows)
        if max(self._distance(relation) for relation in way) > _FAR_NEW * novelty:
            return "nothing"  # what is new in it is smaller than its rounding
        self.said.add(names)
        if is_direction:
            self.said_rows += rows
        self.true_rows += [row for row in rows if row.any()]
        self.true_relations += way
        self.arithmetic_rows += [
            self._partials(relation) for relation in way if isinstance(relation, Equal)
        ]
        self.worlds = None
        return "new"

    def _is_of_lengths(self, way: Sequence[Relation]) -> bool:
        """Whether a claim is about lengths alone, apart from what is known.

        That points lie on a circle makes distances from its centre known. That a quadrilateral's
        angles are supplementary follows from it too, but has to be found out. A name that cancels
        out (`OA + x = 5 + x`) or that is known does not count.
        """
        return all(
            isinstance(atom, Distance | LineDistance) or _is_radius(atom)
            for relation in way
            if isinstance(relation, Equal)
            for atom in self._moving_atoms(relation)
        )

    def _moving_atoms(self, relation: Equal) -> Iterator[Quantity]:
        """The names in an equation that matter for it, and that are not known themselves."""
        _, gradient = self.system.atoms(self.figure.v, slopes=True)
        assert gradient is not None, "slopes were asked for"
        partials = self._partials(relation)
        for atom, number in self.system.row.items():
            if abs(partials[self.columns[signature(atom)]]) > _FLAT:
                row = self._unit_row(gradient[number])
                if not _is_in_span(row, self.known_rows):
                    yield atom

    def _partials(self, relation: Equal) -> Vector:
        """How the difference of the sides changes with each name, of length 1 or 0; (names,).

        The names count as independent of each other here, as in arithmetic that knows nothing of
        the figure. `AB` and `BA` are one name.
        """
        partials = np.zeros(len(self.columns))
        slopes = np.zeros((len(self.system.row), self.system.count))
        for side, sign in ((relation.left, 1.0), (relation.right, -1.0)):
            for atom in dict.fromkeys(atoms_of(side)):
                if constant_of(atom) is not None:
                    continue
                number = self.system.row[atom]
                slopes[number, 0] = 1.0
                _, change = self.system.evaluated(side, self.atom_values, slopes)
                slope = float(np.nan_to_num(change[0]))
                slopes[number, 0] = 0.0
                partials[self.columns[signature(atom)]] += sign * slope
        length = float(np.linalg.norm(partials))
        return partials / length if length > _FLAT else np.zeros_like(partials)

    def _is_arithmetic(self, way: Sequence[Relation]) -> bool:
        """Whether a claim follows by arithmetic from given values, equal names and earlier claims.

        `BC = 13` does where `AB = BC` and `AB = 13` are given.
        """
        return all(
            isinstance(relation, Equal)
            and _is_in_span(self._partials(relation), self.arithmetic_rows)
            for relation in way
        )

    def _of_false(self, claim: Claim, way: Sequence[Relation]) -> ClaimVerdict:
        """Whether a false claim is an error of its own, or follows from an earlier one."""
        names = _names_of(way)
        if names in self.said:
            return "follows"
        self.said.add(names)
        rows = [row for relation in way for row in self.rows(relation) if row.any()]
        if self.false_rows and rows and self._follows(claim, way, rows):
            return "follows"
        self.false_rows += rows
        self.false_ways.append(way)
        self.worlds = None
        return "false"

    def _follows(self, claim: Claim, way: Sequence[Relation], rows: Sequence[Vector]) -> bool:
        """Whether false relations hold where the earlier false claims of the text do.

        They have to be bound by these and by what is true. Other values for the same name, guessed
        one by one, hold in no figure in which the first of them does.
        """
        span = [*self.true_rows, *self.false_rows]
        if not all(_is_in_span(row, span) for row in rows):
            return False
        if self.worlds is None:
            self.worlds = list(self._worlds())
        return any(
            all(self._holds(relation, claim.decimals, world) for relation in way)
            for world in self.worlds
        )

    def _worlds(self) -> Iterator[Vector]:
        """Figures near by in which false claims hold, where Newton's method finds them.

        In the first one hold all of them beside what is true; a false claim may contradict that, so
        that in the second hold all of them alone, and in the third the last one alone.
        """
        errors = [relation for way in self.false_ways for relation in way]
        for relations in ([*self.true_relations, *errors], errors, list(self.false_ways[-1])):
            world = self._moved_to(relations)
            if world is not None:
                yield world

    def _moved_to(self, relations: Sequence[Relation]) -> Vector | None:
        """The figure, moved as little as it takes for the relations to hold; None for none."""
        v = self.figure.v.copy()
        for _ in range(_WORLD_STEPS):
            measured = self._measured(v)
            pairs = [pair for relation in relations for pair in measured[relation]]
            residuals = np.array([residual for residual, _ in pairs])
            jacobian = np.array([gradient for _, gradient in pairs]) * self.figure.scales
            if not np.isfinite(residuals).all() or not np.isfinite(jacobian).all():
                return None
            if float(np.abs(residuals).max()) < _IN_WORLD:
                return v
            step, *_ = np.linalg.lstsq(jacobian, residuals, rcond=1e-7)
            v = v - step * self.figure.scales
        return None


def _is_direction(relation: Relation) -> bool:
    """Whether it says that lines are parallel or perpendicular, also as an angle of 90 or 180."""
    if not isinstance(relation, Equal):
        return isinstance(relation, Parallel | Perpendicular)
    sides = (relation.left, relation.right)
    has_angle = any(isinstance(side, Angle) for side in sides)
    return has_angle and any(number_of_quantity(side) in (90.0, 180.0) for side in sides)


def is_equal(left_value: float, right_value: float, decimals: int | None) -> bool:
    """Whether two values are equal up to rounding.

    Half a unit of the last digit as written, or 0.6 % where decimals are written, since values are
    rounded on the way; 0.1 % else.
    """
    if not math.isfinite(left_value) or not math.isfinite(right_value):
        return False
    size = max(abs(left_value), abs(right_value))
    tolerance = _EXACT * size
    if decimals is not None:
        tolerance = max(0.55 * 10.0**-decimals, _ROUNDED * size)
    return abs(left_value - right_value) <= max(tolerance, 1e-6)


def _is_parallel_to_any(row: Vector, rows: Sequence[Vector]) -> bool:
    """Whether one of the rows, all of length 1, has the same direction."""
    return any(abs(float(row @ candidate)) > 1 - _IN_SPAN**2 for candidate in rows)


def _names_of(way: Sequence[Relation]) -> str:
    """A text that is the same for claims that are the same by their form."""
    return " and ".join(sorted(relation_signature(relation) for relation in way))


def _are_in_span(rows: Sequence[Vector], span: Sequence[Vector]) -> bool:
    """Whether each row, of length 1 or 0, is a sum of multiples of the known ones."""
    return all(_is_in_span(row, span) for row in rows)


def _is_in_span(row: Vector, rows: Sequence[Vector]) -> bool:
    """Whether a row of length 1 or 0 is a sum of multiples of the rows."""
    return not row.any() or _outside(row, rows) < _IN_SPAN


def _outside(row: Vector, rows: Sequence[Vector]) -> float:
    """The length of the part of a row that is no sum of multiples of the rows."""
    if not rows:
        return float(np.linalg.norm(row))
    matrix = np.stack(rows, axis=1)
    shares, *_ = np.linalg.lstsq(matrix, row, rcond=1e-9)
    return float(np.linalg.norm(matrix @ shares - row))
