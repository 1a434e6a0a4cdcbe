"""The verdicts on the claims of one text, in their order: a claim is new only once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from adora_vl.geometry.checked import CheckedClaim, ClaimVerdict
from adora_vl.geometry.claims import Claim
from adora_vl.geometry.fact_kinds import (
    is_collinear,
    is_direction,
    is_radial,
    is_radius,
    names_angle,
)
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.quantities import (
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
    number_of_quantity,
    plus,
)
from adora_vl.geometry.signature import relation_signature, signature
from adora_vl.geometry.spans import are_in_span, is_in_span, is_parallel_to_any, length_outside
from adora_vl.geometry.system import System

if TYPE_CHECKING:
    from adora_vl.geometry.check import CheckedFigure

# A claim's gradient has length 1. Its part along free movements may be this long at most.
_MAX_FREE_SHARE = 1e-4
_MIN_GRADIENT_LENGTH = 1e-9  # a shorter gradient, after scaling, counts as 0
_TOLERANCE_WITHOUT_DECIMALS = 1e-3  # relative error of a value without decimals
# Relative error of a value with decimals, whose parts may have been rounded before.
_TOLERANCE_WITH_DECIMALS = 0.006
# How far the figure may be from one in which a claim holds, along the claim's gradient. It counts
# in the scaled unknowns, in which a figure's size is about 1. Rounded claims that people marked as
# true are up to 0.003 off. Without this bound a large number on both sides of a claim, or a small
# factor, would make any claim true.
_MAX_DISTANCE = 0.01
# A correctly rounded number is true at any distance, if it is at least ten units of its last digit.
# A smaller one, as in AB / 1000 = 0.01, says nothing that could be wrong.
_MIN_UNITS_OF_ROUNDED = 10
# The same distance of a new claim, divided by the length of what is new in its gradient.
_MAX_DISTANCE_PER_NOVELTY = 0.02
_MAX_DIRECTION_RESIDUAL = 2e-3  # sine of the angle by which two directions may be off
_NEWTON_STEPS = 12  # steps of Newton's method towards a figure in which false claims hold
_NEWTON_RESIDUAL = 1e-6  # largest residual of such a figure


class _MeasuredFigure(NamedTuple):
    """The values of all names, and the residuals of all claims and facts, in one figure.

    `values` has the value of each atom (a distance, an angle, a letter), shape (atoms,).
    `residuals` has pairs of a residual and its gradient for each relation. A residual is how far
    the relation is from holding.
    """

    values: Vector
    residuals: dict[Relation, list[tuple[float, Vector]]]


class Judgement:
    """The claims of one response on a figure, judged one after the other by their gradients.

    A claim has a row for each of its equations. A row is the gradient of the equation by all
    unknowns of the figure: it says how the equation changes when the figure moves. Rows are scaled
    like the unknowns, and have length 1, or 0 for an identity such as `AB = AB`.

    What is known so far is a list of rows. A true claim says nothing new if its rows lie in their
    span: no small movement of the figure changes the claim without changing what is known.

    A claim may have several alternatives. Each is a list of relations that all have to hold.

    Attributes:
        measured: The values and residuals in the figure itself.
        known_rows: The rows of given values and expressions.
        true_rows: `known_rows`, and the rows of the new claims so far.
        false_rows: The rows of the errors so far.
        direction_rows: The rows of facts that lines are parallel or perpendicular.
        new_direction_rows: The rows of new claims that lines are parallel or perpendicular.
        line_rows: The rows of facts that points lie on a line, and of numbers that name angles.
        radial_rows: The rows of facts that points lie on a circle.
        arithmetic_rows: Rows of another kind, over names such as AB in place of unknowns. See
            `_arithmetic_row`.
        stated_signatures: The signatures of the new and the false claims so far.
        error_figures: Figures in which the errors so far hold; None until they are needed.
    """

    def __init__(self, figure: CheckedFigure, claims: Sequence[Claim]) -> None:
        """Compile the claims together with the facts, and measure both in the figure once."""
        self.figure = figure
        self.claims = claims
        # Facts that lines are parallel or perpendicular are kept apart from the given values. They
        # make only claims of their own kind known: the theorem of Pythagoras follows from a right
        # angle, and counts as a step all the same.
        self.directions = [
            relation
            for relation in figure.reading.relations
            if isinstance(relation, Parallel | Perpendicular)
        ]
        self.system = self._compile_system()
        self.measured = self._measure(figure.state)
        self.rival_figures = [self._measure(state) for state in figure.rival_states]
        self.direction_rows = [row for fact in self.directions for row in self.rows(fact)]
        # These rows say which angles add up at a straight line, also for angles named by a number.
        line_facts = [
            *(fact for fact in self.directions if is_collinear(fact)),
            *(fact for fact in figure.given_relations if names_angle(fact)),
        ]
        self.line_rows = [row for fact in line_facts for row in self.rows(fact)]
        self.new_direction_rows: list[Vector] = []
        # Facts that points lie on a circle are kept apart too. They make only claims about lengths
        # known (`_is_about_lengths`).
        circle_facts = [fact for fact in figure.given_relations if is_radial(fact)]
        value_facts = [fact for fact in figure.given_relations if fact not in circle_facts]
        self.radial_rows = [row for fact in circle_facts for row in self.rows(fact)]
        self.known_rows = [row for fact in value_facts for row in self.rows(fact)]
        self.true_rows = list(self.known_rows)
        names_of_atoms = dict.fromkeys(signature(atom) for atom in self.system.atoms.row_by_atom)
        self.column_by_name = {name: number for number, name in enumerate(names_of_atoms)}
        self.arithmetic_rows = [self._arithmetic_row(fact) for fact in figure.plain_equations]
        self.false_rows: list[Vector] = []
        self.true_relations: list[Relation] = list(figure.given_relations)
        self.false_alternatives: list[Sequence[Relation]] = []
        self.error_figures: list[_MeasuredFigure] | None = None  # found where they are needed
        self.stated_signatures: set[str] = set()

    def results(self) -> list[CheckedClaim]:
        """Judge all claims, and return them with their verdicts in their order."""
        return [self._judge(claim) for claim in self.claims]

    # Measures

    def _compile_system(self) -> System:
        """Return the equations of the claims and of the facts as one system."""
        relations = [
            relation
            for claim in self.claims
            for alternative in claim.alternatives
            for relation in alternative
        ]
        relations += [
            *self.figure.given_relations,
            *self.figure.plain_equations,
            *self.directions,
        ]
        base = self.figure.system
        # A sum of all letters as the goal gives the new system the same letters as the figure's.
        letters = [Unknown(name) for name in base.unknowns]
        sum_of_letters = plus(*letters) if letters else None
        system = System(
            points=base.points,
            relations=list(dict.fromkeys(relations)),
            goal=sum_of_letters,
            figure_size=base.figure_size,
        )
        assert system.count == base.count, "claims have no unknowns of their own"
        return system

    def _residuals_and_gradients(self, state: Vector) -> dict[Relation, list[tuple[float, Vector]]]:
        """Map each relation to pairs of a residual and its gradient at `state`.

        `state` has the values of all unknowns. A residual is how far the relation is from holding.
        Most relations have one, and that a point is the mean of others has one for x and one for y.
        """
        residuals, jacobian = self.system.residuals(state)
        rows: dict[Relation, list[tuple[float, Vector]]] = {}
        for number, relation in enumerate(self.system.residual_relations):
            rows.setdefault(relation, []).append((float(residuals[number]), jacobian[number]))
        return rows

    def _measure(self, state: Vector) -> _MeasuredFigure:
        """Return values and residuals in the figure whose unknowns have the values `state`."""
        values, _ = self.system.atoms.evaluate(state, slopes=False)
        return _MeasuredFigure(values=values, residuals=self._residuals_and_gradients(state))

    def rows(self, relation: Relation) -> list[Vector]:
        """Return the gradients of a relation, scaled like the unknowns, each of length 1 or 0."""
        return [self._unit_row(gradient) for _, gradient in self.measured.residuals[relation]]

    def _unit_row(self, gradient: Vector) -> Vector:
        """Return a gradient, scaled like the unknowns and of length 1, or 0 where it is flat."""
        scaled = np.nan_to_num(gradient) * self.figure.scales
        length = float(np.linalg.norm(scaled))
        return scaled / length if length > _MIN_GRADIENT_LENGTH else np.zeros_like(scaled)

    def _is_determined(self, rows: Iterable[Vector]) -> bool:
        """Tell whether the facts determine a claim with these rows.

        They do not where a movement of the figure that all facts allow changes the claim. The
        product of these movements and a row is the part of the claim's gradient along them.
        """
        return all(
            not len(self.figure.free_movements)
            or float(np.linalg.norm(self.figure.free_movements @ row)) <= _MAX_FREE_SHARE
            for row in rows
        )

    def _holds(self, relation: Relation, decimals: int | None, figure: _MeasuredFigure) -> bool:
        """Tell whether a relation holds in a figure, up to rounding.

        `decimals` is the claim's count of digits behind the point; None where it has no point.
        """
        if not isinstance(relation, Equal):
            return all(
                abs(residual) <= _MAX_DIRECTION_RESIDUAL
                for residual, _ in figure.residuals[relation]
            )
        left_side = self.system.evaluate(relation.left, figure.values, gradient=None)
        right_side = self.system.evaluate(relation.right, figure.values, gradient=None)
        return are_equal_when_rounded(left_side.value, right_side.value, decimals)

    def _is_rounded_value(self, relation: Relation, decimals: int | None) -> bool:
        """Tell whether a relation gives a value correctly rounded: `sin A = 0.87` for 0.8742.

        Such a claim may be far from the figures in which it holds: a sine near 90 degrees hardly
        changes with the angle, so its last digit stands for many degrees.
        """
        if not isinstance(relation, Equal) or decimals is None:
            return False
        unit = 10.0**-decimals
        sides = (relation.left, relation.right)
        for side, partner in (sides, sides[::-1]):
            number = number_of_quantity(partner)
            if number is not None and abs(number) >= _MIN_UNITS_OF_ROUNDED * unit:
                value = self.system.evaluate(side, self.measured.values, gradient=None).value
                return abs(value - number) <= 0.5 * unit + 1e-9
        return False

    def _distance_to_truth(self, relation: Relation) -> float:
        """Return how far the figure is from one in which a relation holds, along its gradient.

        It is the residual over the length of the gradient, as one step of Newton's method has it. A
        residual without a gradient, such as that of 3 = 4, counts as 0: no movement changes it.
        """
        distances = [0.0]
        for residual, gradient in self.measured.residuals[relation]:
            length = float(np.linalg.norm(np.nan_to_num(gradient) * self.figure.scales))
            if length > _MIN_GRADIENT_LENGTH:
                distances.append(abs(residual) / length)
        return max(distances)

    # Verdicts

    def _judge(self, claim: Claim) -> CheckedClaim:
        """Return a claim with its verdict.

        A claim is true if one of its alternatives is true. Otherwise it is open if one of them is
        open, and false if all are false.
        """
        if not claim.alternatives:
            return CheckedClaim(claim=claim, verdict="unread")
        alternatives = [alternative for alternative in claim.alternatives if alternative]
        truths = [self._truth_of(alternative, claim.decimals) for alternative in alternatives]
        if "true" in truths:
            alternative = alternatives[truths.index("true")]
            verdict = self._kind_of_truth(alternative)
        elif "open" in truths:
            verdict = "open"
        else:
            verdict = self._kind_of_error(claim, alternatives[0])
        return CheckedClaim(claim=claim, verdict=verdict, is_answer=self.figure.says_answer(claim))

    def _truth_of(self, alternative: Sequence[Relation], decimals: int | None) -> str:
        """Return "true", "false" or "open" for all relations of an alternative together."""
        holds = True
        for relation in alternative:
            if not self._is_determined(self.rows(relation)):
                return "open"
            holds_here = self._holds(relation, decimals, self.measured)
            # Other figures that fit the facts have to agree, or the facts leave the claim open.
            for rival in self.rival_figures:
                if self._holds(relation, decimals, rival) != holds_here:
                    return "open"
            is_near = self._distance_to_truth(relation) <= _MAX_DISTANCE
            if not is_near and not self._is_rounded_value(relation, decimals):
                holds = False
            holds = holds and holds_here
        return "true" if holds else "false"

    def _kind_of_truth(self, alternative: Sequence[Relation]) -> ClaimVerdict:
        """Return what kind of truth a claim is, and remember it if it is new.

        `alternative` has the relations that are true. The verdicts are:

        - `given`: the facts say it.
        - `again`: the text has said it before, maybe in another form.
        - `nothing`: it follows at once from what is known.
        - `new`: anything else.

        The order of the checks matters. A fact that the text repeats stays `given`, and a claim
        that the text repeats is `again` although it follows from itself.
        """
        relation_signatures = {relation_signature(relation) for relation in alternative}
        if self.figure.fact_signatures.issuperset(relation_signatures):
            return "given"
        rows = [row for relation in alternative for row in self.rows(relation)]
        says_direction = all(is_direction(relation) for relation in alternative)
        if says_direction and are_in_span(rows, self.direction_rows):
            return "given"  # the same lines by other names, or a right angle that is marked
        if are_in_span(rows, self.line_rows):
            return "nothing"  # angles that add up at a straight line are seen at once
        if _signature_of_alternative(alternative) in self.stated_signatures:
            return "again"
        if says_direction and are_in_span(rows, [*self.direction_rows, *self.new_direction_rows]):
            return "again"
        radial_rows = self.radial_rows if self._is_about_lengths(alternative) else []
        if are_in_span(rows, [*self.known_rows, *radial_rows]) or self._is_arithmetic(alternative):
            return "nothing"
        if all(is_parallel_to_any(row, self.true_rows) for row in rows if row.any()):
            return "again"
        span = [*self.true_rows, *radial_rows]
        if are_in_span(rows, span):
            return "nothing"
        novelty = max(length_outside(row, span) for row in rows)
        distance = max(self._distance_to_truth(relation) for relation in alternative)
        if distance > min(_MAX_DISTANCE, _MAX_DISTANCE_PER_NOVELTY * novelty):
            return "nothing"  # its new part is smaller than its rounding error
        self._add_new_truth(alternative, rows)
        return "new"

    def _add_new_truth(self, alternative: Sequence[Relation], rows: Sequence[Vector]) -> None:
        """Add the relations of a new true claim, and their rows, to what is known."""
        self.stated_signatures.add(_signature_of_alternative(alternative))
        if all(is_direction(relation) for relation in alternative):
            self.new_direction_rows += rows
        self.true_rows += [row for row in rows if row.any()]
        self.true_relations += alternative
        self.arithmetic_rows += [
            self._arithmetic_row(relation)
            for relation in alternative
            if isinstance(relation, Equal)
        ]
        self.error_figures = None  # found anew, since this truth has to hold in them too

    def _is_about_lengths(self, alternative: Sequence[Relation]) -> bool:
        """Tell whether all names in a claim are lengths.

        That points lie on a circle makes claims about lengths known, such as `OA = OB`. It does not
        make claims about angles known: that opposite angles of ABCD add up to 180 has to be found
        out. Two kinds of names do not count: those that cancel out, as x in `OA + x = 5 + x`, and
        those whose value is known.
        """
        return all(
            isinstance(atom, Distance | LineDistance) or is_radius(atom)
            for relation in alternative
            if isinstance(relation, Equal)
            for atom in self._moving_atoms(relation)
        )

    def _moving_atoms(self, relation: Equal) -> Iterator[Quantity]:
        """Yield the names on which an equation depends, but for those whose value is known."""
        _, gradient = self.system.atoms.evaluate(self.figure.state, slopes=True)
        assert gradient is not None, "slopes were asked for"
        changes_by_name = self._arithmetic_row(relation)
        for atom, number in self.system.atoms.row_by_atom.items():
            column = self.column_by_name[signature(atom)]
            # A name that cancels out, as x in `OA + x = 5 + x`, changes nothing.
            if abs(changes_by_name[column]) <= _MIN_GRADIENT_LENGTH:
                continue
            row = self._unit_row(gradient[number])
            if not is_in_span(row, self.known_rows):
                yield atom

    def _arithmetic_row(self, relation: Equal) -> Vector:
        """Return how the difference of an equation's sides changes with each name, shape (names,).

        The names count as independent of each other here, as in arithmetic that knows nothing of
        the figure. `AB` and `BA` are one name. The result has length 1, or 0 where the difference
        does not change. For example, `AB = 2x` gives 1 for AB and -2 for x, both divided by √5.
        """
        partials = np.zeros(len(self.column_by_name))
        slopes = np.zeros((len(self.system.atoms.row_by_atom), self.system.count))
        for side, sign in ((relation.left, 1.0), (relation.right, -1.0)):
            for atom in dict.fromkeys(atoms_of(side)):
                if constant_of(atom) is not None:
                    continue
                # The name takes the place of the only unknown, so the derivative by it comes out.
                number = self.system.atoms.row_by_atom[atom]
                slopes[number, 0] = 1.0
                change = self.system.evaluate(side, self.measured.values, slopes)
                slope = float(np.nan_to_num(change.slope[0]))
                slopes[number, 0] = 0.0
                partials[self.column_by_name[signature(atom)]] += sign * slope
        length = float(np.linalg.norm(partials))
        return partials / length if length > _MIN_GRADIENT_LENGTH else np.zeros_like(partials)

    def _is_arithmetic(self, alternative: Sequence[Relation]) -> bool:
        """Tell whether a claim follows by arithmetic alone.

        It may follow from given values, equal names and earlier new claims. For example, `BC = 13`
        follows where `AB = BC` and `AB = 13` are given.
        """
        return all(
            isinstance(relation, Equal)
            and is_in_span(self._arithmetic_row(relation), self.arithmetic_rows)
            for relation in alternative
        )

    def _kind_of_error(self, claim: Claim, alternative: Sequence[Relation]) -> ClaimVerdict:
        """Return `false` for an error of its own, and `follows` for one that an earlier one causes.

        A slip at the beginning of a solution makes every later number wrong. All of this counts as
        one error, and a series of guesses counts as many.
        """
        claim_signature = _signature_of_alternative(alternative)
        if claim_signature in self.stated_signatures:
            return "follows"
        self.stated_signatures.add(claim_signature)
        rows = [row for relation in alternative for row in self.rows(relation) if row.any()]
        if self.false_rows and rows and self._follows(claim, alternative, rows):
            return "follows"
        self.false_rows += rows
        self.false_alternatives.append(alternative)
        self.error_figures = None
        return "false"

    def _follows(
        self, claim: Claim, alternative: Sequence[Relation], rows: Sequence[Vector]
    ) -> bool:
        """Tell whether a false claim follows from the earlier false claims of the text.

        It has to hold in a figure in which these hold. So a second guess at the same name does not
        follow: `AB = 7` holds in no figure with `AB = 6`.
        """
        # A claim outside the span is not determined by what the text has said so far.
        span = [*self.true_rows, *self.false_rows]
        if not all(is_in_span(row, span) for row in rows):
            return False
        if self.error_figures is None:
            self.error_figures = list(self._find_error_figures())
        return any(
            all(self._holds(relation, claim.decimals, error_figure) for relation in alternative)
            for error_figure in self.error_figures
        )

    def _find_error_figures(self) -> Iterator[_MeasuredFigure]:
        """Yield figures near by in which false claims of the text hold, at most three.

        A false claim may contradict what is true, or another false claim. So there is one figure
        for each of these, unless none is found:

        1. All true and all false claims hold.
        2. All false claims hold.
        3. The last false claim holds.
        """
        errors = [relation for alternative in self.false_alternatives for relation in alternative]
        for relations in (
            [*self.true_relations, *errors],
            errors,
            list(self.false_alternatives[-1]),
        ):
            state = self._moved_to(relations)
            if state is not None:
                yield self._measure(state)

    def _moved_to(self, relations: Sequence[Relation]) -> Vector | None:
        """Move the figure a little by Newton's method, until the relations hold.

        Each step is the shortest one that makes the residuals 0 as far as their derivatives tell.
        It is taken in the scaled unknowns, so that places and letters count alike. Returns the
        values of the unknowns then, or None where no such figure is near.
        """
        state = self.figure.state.copy()
        for _ in range(_NEWTON_STEPS):
            residuals_by_relation = self._residuals_and_gradients(state)
            pairs = [pair for relation in relations for pair in residuals_by_relation[relation]]
            residuals = np.array([residual for residual, _ in pairs])
            jacobian = np.array([gradient for _, gradient in pairs]) * self.figure.scales
            if not np.isfinite(residuals).all() or not np.isfinite(jacobian).all():
                return None
            if float(np.abs(residuals).max()) < _NEWTON_RESIDUAL:
                return state
            step, *_ = np.linalg.lstsq(jacobian, residuals, rcond=1e-7)
            state = state - step * self.figure.scales
        return None


def are_equal_when_rounded(left_value: float, right_value: float, decimals: int | None) -> bool:
    """Tell whether two values are equal up to rounding.

    A value with decimals may be off by half a unit of its last digit, or by 0.6 %, since its parts
    may have been rounded before. A value without decimals (None) may be off by 0.1 %. For example,
    7.1 with one decimal equals 7.07 but not 7.03, and 5 without decimals equals 5.004 but not
    5.006.
    """
    if not math.isfinite(left_value) or not math.isfinite(right_value):
        return False
    size = max(abs(left_value), abs(right_value))
    tolerance = _TOLERANCE_WITHOUT_DECIMALS * size
    if decimals is not None:
        # Half a unit of the last digit, and a tenth more of it.
        tolerance = max(0.55 * 10.0**-decimals, _TOLERANCE_WITH_DECIMALS * size)
    return abs(left_value - right_value) <= max(tolerance, 1e-6)


def _signature_of_alternative(alternative: Sequence[Relation]) -> str:
    """Return a text that is equal for claims of equal form, such as `AB = 5` and `5 = BA`."""
    return " and ".join(sorted(relation_signature(relation) for relation in alternative))
