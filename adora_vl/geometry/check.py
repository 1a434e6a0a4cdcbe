"""Claims on a figure: which are true, and which of these say something new.

A figure has many truths that cost nothing: `AB = AB`, a fact in other words, arithmetic on what is
given. A claim is told from these by its gradient, how the difference of its sides changes with
every place and letter of the figure. In the span of the gradients of given values and of earlier
new claims it says nothing new. So no text has more new claims than its figure has free unknowns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from adora_vl.geometry.checked import CheckedClaim
from adora_vl.geometry.claims import Claim, read_claims
from adora_vl.geometry.fact_kinds import gives_expression, gives_value, joins_names
from adora_vl.geometry.figure import Figure, figure_from_json, state_of_figure
from adora_vl.geometry.judgement import Judgement
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.quantities import (
    Constant,
    Equal,
    atoms_of,
    constant_of,
    number_of_quantity,
)
from adora_vl.geometry.reading import read_facts
from adora_vl.geometry.signature import relation_signature, signature, split_midpoints
from adora_vl.geometry.solve import FigureProblem
from adora_vl.geometry.spans import MAX_SHARE_OUTSIDE_SPAN

_RANK_TOLERANCE = 1e-6  # singular values below this share of the largest count as none


@lru_cache(maxsize=256)
def checked_figure_of(text: str) -> CheckedFigure:
    """Return the figure that a row stores as JSON, made ready for checks.

    Raises `ValueError` where the text is no figure.
    """
    return CheckedFigure(figure_from_json(text))


class CheckedFigure:
    """A solved figure on which claims of responses such as "AB = 5" are checked.

    Nothing is solved here: the places and values of the stored figure are put into the equations of
    its facts, and what these allow to move is computed from their derivatives.

    Attributes:
        state: The places and values of the figure as one vector, shape (unknowns,).
        rival_states: The same of other figures that fulfil the facts, where no picture chooses one.
            Where a claim holds in some of them alone, the facts do not say whether it holds.
        scales: What a small change of each unknown is worth, shape (unknowns,).
        free_movements: The movements that the facts allow, shape (movements, unknowns). Where a
            claim changes along one of them, the facts do not say whether it holds.
        fact_signatures: The signatures of all facts.
        given_relations: The facts that give values or expressions.
        plain_equations: The facts that give values or join two names.
        measured_signatures: The signatures of what the facts give a number.
        goal_signatures: The signatures of what is asked for.
    """

    def __init__(self, figure: Figure) -> None:
        """Put the stored places into the equations of the facts.

        Raises `ValueError` where the figure's form cannot be read.
        """
        self.figure = figure
        self.reading = read_facts(figure.form)
        problem = FigureProblem(self.reading)
        self.system = problem.system
        self.state = state_of_figure(figure, problem)
        self.rival_states = [state_of_figure(rival, problem) for rival in figure.rivals]
        _, jacobian = self.system.residuals(self.state)
        # An unknown that moves many facts is scaled down, so that rows of lengths, angles and
        # letters can be compared.
        lengths = np.sqrt(np.einsum("ij,ij->j", jacobian, jacobian))
        self.scales = 1 / np.maximum(lengths, 1e-9)
        self.free_movements = self._free_movements(jacobian * self.scales)
        # A claim may name a midpoint, or the two equal lengths that it makes.
        relations = [*self.reading.relations, *split_midpoints(self.reading.relations)]
        self.fact_signatures = {relation_signature(relation) for relation in relations}
        # What the facts give, as numbers and as expressions of letters.
        self.given_relations = [
            relation
            for relation in self.reading.relations
            if gives_value(relation) or gives_expression(relation)
        ]
        self.plain_equations = [
            relation
            for relation in self.reading.relations
            if isinstance(relation, Equal) and (gives_value(relation) or joins_names(relation))
        ]
        self.measured_signatures = self._measured_signatures()
        self.goal_signatures = self._goal_signatures()

    def _free_movements(self, jacobian: Vector) -> Vector:
        """Return the movements of the unknowns that all facts allow; shape (movements, unknowns).

        They are the directions along which no residual changes: the singular vectors of `jacobian`
        whose singular values are 0. Each has length 1, and all are perpendicular to each other.
        """
        if not len(jacobian):
            return np.eye(self.system.count)
        _, sizes, directions = np.linalg.svd(np.nan_to_num(jacobian), full_matrices=True)
        rank = int((sizes > _RANK_TOLERANCE * max(float(sizes[0]), 1e-9)).sum())
        return np.asarray(directions[rank:])

    def _goal_signatures(self) -> set[str]:
        """Return the signatures of what is asked for, also under other names that facts give it."""
        goal = self.reading.goal
        if goal is None:
            return set()
        signatures = {signature(goal)}
        for relation in self.reading.relations:
            if isinstance(relation, Equal) and not gives_value(relation):
                sides = {signature(relation.left), signature(relation.right)}
                if signatures & sides:
                    signatures |= sides
        return signatures

    def _measured_signatures(self) -> set[str]:
        """Return the signatures of what the facts give a number: that of AB for `AB = 5`."""
        sides = [
            side
            for relation in self.given_relations
            if isinstance(relation, Equal) and gives_value(relation)
            for side in (relation.left, relation.right)
        ]
        return {signature(side) for side in sides if number_of_quantity(side) is None}

    @cached_property
    def max_new_claims(self) -> int:
        """How many new claims there can be: the unknowns that the given values do not settle.

        Where three given values settle a triangle, all that can be said of it is arithmetic on
        them, and this is 0.
        """
        with np.errstate(all="ignore"):
            known_rows = Judgement(self, []).known_rows
        # What the facts hold fast, given values among them, less what these values say.
        fixed_count = self.system.count - len(self.free_movements)
        settled_count = 0
        if known_rows:
            rows = np.stack(known_rows)
            settled_count = int(np.linalg.matrix_rank(rows, tol=MAX_SHARE_OUTSIDE_SPAN))
        return max(0, fixed_count - settled_count)

    def claims(self, text: str) -> list[CheckedClaim]:
        """Return the claims of a response with their verdicts, in their order."""
        return self.judge(read_claims(text, self.reading))

    def judge(self, claims: Sequence[Claim]) -> list[CheckedClaim]:
        """Return claims with their verdicts, in their order; a claim is new only once."""
        with np.errstate(all="ignore"):
            return Judgement(self, claims).results()

    def says_answer(self, claim: Claim) -> bool:
        """Tell whether a claim says by its form what is asked for.

        It has the goal alone on one side and a number on the other (`x = 35`), or arithmetic on
        the goal and given names and a plain number (`2x = 70`, `x + AB = 48` where AB is given).
        `4x - 2 = 3x + 1` is a step, and no answer.
        """
        for alternative in claim.alternatives:
            for relation in alternative:
                if isinstance(relation, Equal) and self._is_goal_with_number(relation):
                    return True
        return False

    def _is_goal_with_number(self, relation: Equal) -> bool:
        """Tell whether an equation has the goal on one side, and a number on the other."""
        sides = (relation.left, relation.right)
        for side, partner in (sides, sides[::-1]):
            if number_of_quantity(partner) is None:
                continue
            if signature(side) in self.goal_signatures:
                return True
            signatures = {signature(atom) for atom in atoms_of(side) if constant_of(atom) is None}
            has_goal = bool(signatures & self.goal_signatures)
            is_plain = isinstance(partner, Constant)
            known_signatures = self.goal_signatures | self.measured_signatures
            if is_plain and has_goal and signatures <= known_signatures:
                return True
        return False
