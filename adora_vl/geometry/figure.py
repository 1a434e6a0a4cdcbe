"""A solved figure, as it is stored beside a problem, and what was found of a form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from adora_vl.geometry.choose import Status
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.logic_form import LogicForm, Point, form_as_record, read_form_from_record
from adora_vl.geometry.reading import read_facts
from adora_vl.geometry.solve import FigureProblem, Solution

AnswerBasis = Literal["facts", "angles", "looks", "without a fact", "rounded", ""]
_DIGITS_OF_PLACES = 9  # digits of a stored place that is as large as the figure
_MAX_RESIDUAL = 1e-6  # largest residual of a stored figure
_MAX_RIVALS = 3  # rivals of a figure that are stored beside one
# Share by which distances and values of one figure may differ from another's.
_MAX_RELATIVE_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Figure:
    """A figure that fulfils the facts of a form.

    `coordinates`: places to scale, y upwards. `values`: letters, radii (`radius O`) and numbered
    angles (`angle 1`). `assumed`: what only the picture shows, in words. `rivals`: figures that
    fulfil the facts as well and have the same answer, where no picture chooses one of them.
    """

    coordinates: Mapping[str, Point]
    values: Mapping[str, float]
    form: LogicForm
    assumed: tuple[str, ...] = ()
    rivals: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a form says.

    `status`: `answered` where the facts determine the goal; `open` where they do not; `ambiguous`
    where several figures fit and the picture does not choose one; `conflict` where no figure fits;
    `collapsed` where it does so only with points that fall together; `unread` where the form or
    its question cannot be read.

    `value` is also there for other statuses where something is known: with the `basis` `looks` it
    needs what is `assumed` by the picture, with `without a fact` that `left_out` does not hold,
    with `rounded` that a book has rounded its facts. `answer`: the value in LaTeX; None where it
    has no short form. `unread`: facts that could not be read, each with its place and the reason.
    `why`: one line for a person.
    """

    status: Status
    value: float | None = None
    answer: str | None = None
    basis: AnswerBasis = ""
    figure: Figure | None = None
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    why: str = ""


def figure_of_solution(
    problem: FigureProblem,
    solution: Solution,
    form: LogicForm,
    assumed: tuple[str, ...] = (),
) -> Figure:
    """Return the figure that a search has found, turned as the picture lies.

    Its places are rounded to `_DIGITS_OF_PLACES` digits of its size.
    """
    state = solution.state
    names = problem.system.points
    places = {name: problem.system.location(state, name) for name in names}
    turn = _turn_to_picture(problem, places)
    # Digits behind the point: 8 for a size of 15, 7 for a size of 150.
    digits = _DIGITS_OF_PLACES - math.floor(math.log10(max(problem.size, 1e-9)))
    coordinates = {}
    for name, location in places.items():
        turned = location * turn * problem.size
        coordinates[name] = (round(turned.real, digits), round(turned.imag, digits))
    first = problem.system.first_unknown
    values = {
        name: float(state[first + number]) for number, name in enumerate(problem.system.unknowns)
    }
    rounded = {name: float(f"{value:.12g}") for name, value in values.items()}
    return Figure(coordinates=coordinates, values=rounded, form=form, assumed=assumed)


def with_rivals(figure: Figure, candidates: Iterable[Figure]) -> Figure:
    """Return a figure with those candidates beside it that are not the same as it, or mirrored."""
    rivals: list[Figure] = []
    for candidate in candidates:
        is_new = not any(_are_same(candidate, known) for known in (figure, *rivals))
        if is_new and len(rivals) < _MAX_RIVALS:
            rivals.append(candidate)
    return replace(figure, rivals=tuple(rivals))


def _are_same(first: Figure, second: Figure) -> bool:
    """Tell whether all distances of points, and all values, are the same in two figures."""
    first_distances = _distances_by_points(first)
    second_distances = _distances_by_points(second)
    tolerance = _MAX_RELATIVE_DIFFERENCE * max(first_distances.values(), default=0.0)
    for points, distance in first_distances.items():
        if abs(distance - second_distances[points]) > tolerance:
            return False
    return all(
        math.isclose(
            value,
            second.values[name],
            rel_tol=_MAX_RELATIVE_DIFFERENCE,
            abs_tol=_MAX_RELATIVE_DIFFERENCE,
        )
        for name, value in first.values.items()
    )


def _distances_by_points(figure: Figure) -> dict[tuple[str, str], float]:
    """Return the distance of each two points of a figure, by their names in alphabetical order."""
    pairs = combinations(sorted(figure.coordinates), 2)
    places = figure.coordinates
    return {(start, end): math.dist(places[start], places[end]) for start, end in pairs}


def _turn_to_picture(problem: FigureProblem, places: Mapping[str, complex]) -> complex:
    """Return the turn that lays the figure as the picture lies, as a complex number of length 1.

    After that turn the points are nearest to the points of the picture. Let p be the place of a
    point in the figure and q its place in the picture, each from the middle of all points. The
    argument of conj(p) q is the angle from p to q, so the turn has the direction of the sum of
    conj(p) q over all points.
    """
    names = [name for name in problem.places if name in places]
    if len(names) < 2:
        return 1 + 0j
    middle = sum(places[name] for name in names) / len(names)
    middle_seen = sum(problem.places[name] for name in names) / len(names)
    direction = sum(
        (places[name] - middle).conjugate() * (problem.places[name] - middle_seen) for name in names
    )
    return direction / abs(direction) if abs(direction) > 1e-12 else 1 + 0j


def figure_as_json(figure: Figure) -> str:
    """Return the figure as one line of JSON, for a table. `figure_from_json` reads it back."""
    record = {
        **_measures_as_record(figure),
        "form": form_as_record(figure.form),
        "assumed": list(figure.assumed),
    }
    if figure.rivals:
        record["rivals"] = [_measures_as_record(rival) for rival in figure.rivals]
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _measures_as_record(figure: Figure) -> dict[str, object]:
    """Return the places and values of a figure as plain lists and numbers."""
    return {
        "at": {name: list(location) for name, location in figure.coordinates.items()},
        "values": dict(figure.values),
    }


def figure_from_json(text: str) -> Figure:
    """Read a figure that `figure_as_json` has written.

    Raises `ValueError` where the text is no figure, or where its places do not fulfil its facts.
    """
    try:
        record = json.loads(text)
        form = read_form_from_record(record["form"])
        assumed = tuple(map(str, record["assumed"]))
        figure = _figure_from_record(record, form, assumed)
        rivals = [_figure_from_record(rival, form, assumed) for rival in record.get("rivals", ())]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a figure lacks something ({type(error).__name__}: {error})") from error
    largest = max(map(largest_residual_of, (figure, *rivals)))
    if largest > _MAX_RESIDUAL:
        raise ValueError(
            f"a figure does not fulfil its facts: they are off by {largest:.2g} of its size"
        )
    return replace(figure, rivals=tuple(rivals))


def _figure_from_record(
    record: Mapping[str, Any], form: LogicForm, assumed: tuple[str, ...]
) -> Figure:
    """Return the figure with the places and values of a record, of a form that is read already."""
    return Figure(
        coordinates={str(name): (float(x), float(y)) for name, (x, y) in record["at"].items()},
        values={str(name): float(value) for name, value in record["values"].items()},
        form=form,
        assumed=assumed,
    )


def largest_residual_of(figure: Figure) -> float:
    """Return how far a figure is from fulfilling its facts: the largest residual at its places.

    Lengths are in shares of the figure's size, angles in radians.
    """
    reading = read_facts(figure.form)
    problem = FigureProblem(reading)
    state = state_of_figure(figure, problem)
    residuals, _ = problem.system.residuals(state, slopes=False)
    return float(abs(residuals).max()) if len(residuals) else 0.0


def state_of_figure(figure: Figure, problem: FigureProblem) -> Vector:
    """Return the places and values of a stored figure as the unknowns of its problem.

    An unknown that the figure does not have keeps the value at which a search begins. Shape
    (unknowns,).
    """
    system = problem.system
    state = problem.starts.near_picture(start_number=0)
    for name, (x, y) in figure.coordinates.items():
        point_index = system.index_by_point.get(name)
        if point_index is not None:
            # Places are stored to scale, and stand in the state as shares of the figure's size.
            state[2 * point_index] = x / problem.size
            state[2 * point_index + 1] = y / problem.size
    for i, name in enumerate(system.unknowns, start=system.first_unknown):
        if name in figure.values:
            state[i] = figure.values[name]
    return state
