"""`python -m data_prep variants`: problems of a prepared folder with other numbers, to scale.

A variant is decided by the seed, the id of its original and its own number alone: neither
`--workers` nor `--limit` changes one. Kept are those that the facts determine, with a figure of the
same kind and a picture that can be read.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from cmath import phase
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from adora_vl.conversion.pipeline import (
    MAX_WORKERS,
    Cleaning,
    SplitRows,
    ordered_map,
    prepare,
    recorded_options,
    usable_cores,
)
from adora_vl.conversion.problem import RawProblem
from adora_vl.data.dataset import VARIANTS, read_manifest, stored_rows
from adora_vl.data.images import png_bytes
from adora_vl.geometry.choose import outcome
from adora_vl.geometry.descent import Budget
from adora_vl.geometry.figure import Figure, Verdict, figure_from, figure_of, written
from adora_vl.geometry.forms import Form, Term
from adora_vl.geometry.measures import unit_of
from adora_vl.geometry.reading import read
from adora_vl.geometry.shapes import UnreadError, terms_of
from adora_vl.geometry.solve import FigureProblem
from adora_vl.geometry.vectors import extent_of
from adora_vl.geometry.verdict import EVALUATIONS, answer_of
from adora_vl.utils.cli import MAX_SEED, Commands, optional, path, whole
from adora_vl.utils.errors import UserError
from data_prep.logic_forms import facts_in_words
from data_prep.question_words import question_in_words
from data_prep.redraw import can_be_drawn, draw_if_legible
from data_prep.solved_rows import features_with_figure, shows_what_is_asked, with_rounding
from data_prep.survey import print_counts

FAMILY = "variant"
MAX_PER = 1000
TRIES = 6  # for each variant
_PIXELS = 400.0  # of the longer side of the places that a variant begins from
# Other values of these angles would be another kind of figure, such as no right triangle.
_UNCHANGED_ANGLES = (30.0, 45.0, 60.0, 90.0, 120.0, 180.0)
# The ranges of the factors by which all lengths, each length and an angle change.
_SCALE_RANGE = (0.7, 1.4)
_LENGTH_RANGE = (0.8, 1.25)
_ANGLE_RANGE = (0.8, 1.25)
_CONSTANT_STEPS = (-3, -2, -1, 1, 2, 3)  # of the constant beside a letter
# The least distance of two points and the least width, as shares of the figure's size, and the
# least angle that is marked, in degrees. What is smaller cannot be told apart in a picture.
_LEAST_APART = 0.05
_LEAST_WIDTH = 0.12
_LEAST_ANGLE = 12.0
# The least distance of a point from a line that it does not lie on, as a share of the figure's size.
_LEAST_BESIDE = 0.03
_LEVEL_DEGREES = 4.0  # degrees from level or upright that count as such
_DIGITS = 9  # decimals of a stored place; floats of two machines differ in later ones
# `3x + 5`, a letter with a constant.
_LINEAR = re.compile(r"(\d*[a-z]) ?([+-]) ?(\d+)")


@dataclass(frozen=True)
class Variation(Cleaning):
    """How many variants of each row are made, by which seed, and whether of the test split."""

    per: int = 8
    seed: int = 0
    for_evaluation: bool = False


def prepare_variants(
    folder: Path, output: Path, options: Variation, *, workers: int = 1, overwrite: bool = False
) -> dict[str, Any]:
    """Write the variants of a prepared folder's rows that have a figure. Returns the manifest.

    Raises `UserError` where the folder has no such rows.
    """
    split = "test" if options.for_evaluation else "train"
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"folder: {str(folder)!r} is no prepared dataset; make one with --source facts"
        )
    if not manifest["counts"].get(split):
        raise UserError(
            f"folder: {str(folder)!r} has no split {split!r}; variants are of train, or of test "
            "with --for-evaluation"
        )

    def begin() -> tuple[dict[str, Any], dict[str, SplitRows]]:
        """Return what the manifest says of the run, and the rows of the split."""
        arguments = recorded_options(asdict(options))
        description = {
            "source": VARIANTS,
            "input": str(folder),
            "revision": None,
            "arguments": arguments,
        }
        return description, {
            split: SplitRows(partial(_problems, folder, split, options, workers), None)
        }

    return prepare(
        output, options, begin, features_with_figure(), workers=workers, overwrite=overwrite
    )


def _problems(folder: Path, split: str, options: Variation, workers: int) -> Iterator[Any]:
    """Yield one call for each variant, in the order of the originals."""
    originals = (
        (row["id"], row["figure"]) for row in stored_rows(folder, split) if row.get("figure")
    )
    number = 0
    is_empty = True
    with ordered_map(workers) as mapped:
        for variants in mapped(
            partial(variants_of, per=options.per, seed=options.seed, split=split), originals
        ):
            is_empty = False
            for variant in variants:
                if options.limit is not None and number >= options.limit:
                    return
                number += 1
                yield partial(_return_finished, variant)
    if is_empty:
        raise UserError(
            f"folder: no row of {str(folder)!r} has a figure; make the folder with --source facts"
        )


def _return_finished(raw: RawProblem) -> RawProblem:
    """Return a problem that was made already, in the form of a call that reads it."""
    return raw


def variants_of(original: tuple[str, str], *, per: int, seed: int, split: str) -> list[RawProblem]:
    """Return the variants of one original, by its id and its stored figure.

    Fewer than `per` where tries fail.
    """
    row_id, text = original
    try:
        figure = figure_from(text)
    except ValueError as error:
        raise UserError(
            f"folder: the figure of {row_id} cannot be read ({error}); prepare the folder again"
        ) from error
    variants = []
    for number in range(1, per + 1):
        for attempt in range(TRIES):
            rng = random.Random(f"{seed}/{row_id}/{number}/{attempt}")
            variant = _variant(
                row_id, figure=figure, row_id=f"{row_id}~{number}", split=split, rng=rng
            )
            if variant is not None:
                variants.append(variant)
                break
    return variants


def _variant(
    original: str, figure: Figure, row_id: str, split: str, rng: random.Random
) -> RawProblem | None:
    """Return one try; None where the numbers do not fit, or the picture could not be read."""
    form = form_with_other_numbers(figure, rng)
    if form is None:
        return None
    problem = question_in_words(form)
    solved = solve_variant(form)
    if problem is None or solved is None or not shows_what_is_asked(form):
        return None
    result, at = solved
    turn = _upright_rotation(figure, at)
    turned = {name: turn * complex(x, y) for name, (x, y) in at.items()}
    drawn_form = replace(
        form, points={name: (location.real, -location.imag) for name, location in turned.items()}
    )
    if not can_be_drawn(drawn_form) or not _is_clear(drawn_form):
        return None
    picture = draw_if_legible(drawn_form)
    if picture is None:
        return None
    problem, answer = with_rounding(problem, result)
    assert result.figure is not None, "it is solved by its facts"
    places = {
        name: (round(location.real, _DIGITS), round(location.imag, _DIGITS))
        for name, location in turned.items()
    }
    stored = replace(result.figure, at=places, form=drawn_form)
    return RawProblem(
        id=row_id,
        split=split,
        source=VARIANTS,
        origin=row_id,
        images=(png_bytes(picture),),
        problem=problem,
        answer=answer,
        family=FAMILY,
        kind=original,
        extras={"facts": facts_in_words(drawn_form, problem), "figure": written(stored)},
    )


def form_with_other_numbers(figure: Figure, rng: random.Random) -> Form | None:
    """Return the form of a figure with other numbers, its points where the figure has them.

    None where no number can change.

    Equal numbers of one kind stay equal, and a whole number stays whole.
    """
    scale = rng.uniform(*_SCALE_RANGE)
    chosen: dict[tuple[str, str], str] = {}

    def changed(text: str) -> str:
        """Return an equation with another value; any other fact as it is."""
        terms = list(terms_of([text]))
        if len(terms) != 1 or not terms[0].is_equation:
            return text
        left, right = terms[0].arguments
        if right.arguments or not left.arguments:
            return text
        key = (unit_of(left), right.head.strip())
        if key not in chosen:
            chosen[key] = _other_value(key[0], text=key[1], scale=scale, rng=rng)
        return str(Term(head="Equals", arguments=(left, Term(head=chosen[key]))))

    form = figure.form
    facts = tuple(changed(fact) for fact in form.facts)
    question = tuple(changed(part) for part in form.question)
    if all(old == new for (_, old), new in chosen.items()):
        return None
    xs = [x for x, _ in figure.at.values()]
    ys = [y for _, y in figure.at.values()]
    factor = _PIXELS / max(max(xs) - min(xs), max(ys) - min(ys), 1e-9)
    points = {name: (factor * x, -factor * y) for name, (x, y) in figure.at.items()}
    return replace(form, facts=facts, question=question, points=points)


def _other_value(unit: str, text: str, scale: float, rng: random.Random) -> str:
    """Return another value for a number in a fact, as a text; what is no number stays.

    `unit` is `length`, `area` or `degrees`; any other value stays. `scale` is the factor of all
    lengths of the figure.
    """
    linear = _LINEAR.fullmatch(text)
    if linear:
        return f"{linear[1]}{linear[2]}{max(1, int(linear[3]) + rng.choice(_CONSTANT_STEPS))}"
    if not re.fullmatch(r"\d+(?:\.\d+)?", text):
        return text
    value = float(text)
    if unit == "degrees":
        if value in _UNCHANGED_ANGLES:
            return text
        new = value * rng.uniform(*_ANGLE_RANGE)
    elif unit in ("length", "area"):
        unit_scale = scale if unit == "length" else scale**2
        new = value * rng.uniform(*_LENGTH_RANGE) * unit_scale
    else:
        return text
    if value == int(value):
        return str(max(1, round(new)))
    return f"{max(0.1, round(new, 1)):g}"


def solve_variant(form: Form) -> tuple[Verdict, Mapping[str, tuple[float, float]]] | None:
    """Return the answer of a variant and its places.

    None where the facts do not determine a figure of the same kind.
    """
    try:
        reading = read(form)
    except (UnreadError, ValueError, IndexError):
        return None
    if reading.goal is None or reading.assumed or reading.unread:
        return None
    problem = FigureProblem(reading)
    result = outcome(problem, Budget(EVALUATIONS), starts=4)
    if result.status != "answered" or result.solution is None or result.value is None:
        return None
    if result.doubled or result.solution.faults or result.value <= 0:
        return None
    figure = figure_of(problem, result.solution, form)
    value = float(f"{result.value:.10g}")
    answer = answer_of(result.value, reading)
    solved = Verdict(status="answered", value=value, answer=answer, how="facts", figure=figure)
    return solved, figure.at


def _upright_rotation(original: Figure, at: Mapping[str, tuple[float, float]]) -> complex:
    """Return the rotation that lays a line as level or upright as the original's picture has it.

    It is a complex number of length 1.

    Of several, the longest. A picture that is not to scale lies otherwise than its figure does.
    """
    longest = 0.0
    rotation = 1 + 0j
    picture = {name: complex(x, y) for name, (x, y) in original.at.items()}
    picture |= {name: complex(x, -y) for name, (x, y) in original.form.points.items()}
    for row in original.form.rows:
        start = row[0]
        end = row[-1]
        if not {start, end} <= at.keys() & picture.keys():
            continue
        original_way = picture[end] - picture[start]
        way = complex(*at[end]) - complex(*at[start])
        for axis in (1, 1j, -1, -1j):
            lean = abs(math.degrees(phase(original_way / axis))) if original_way else 180.0
            if lean < _LEVEL_DEGREES and way and abs(way) > longest:
                longest = abs(way)
                rotation = axis * abs(way) / way
    return rotation


def _is_clear(form: Form) -> bool:
    """Return whether points and marked angles of a figure are far enough from each other to be seen."""
    used = {name for line in form.lines for name in line}
    places = {name: complex(*form.points[name]) for name in sorted(used) if name in form.points}
    if len(places) < 2:
        return False
    wide, high = extent_of(places.values())
    size = max(wide, high)
    if min(wide, high) < _LEAST_WIDTH * size:
        return False
    distances = [abs(start - end) for start, end in combinations(places.values(), 2)]
    if min(distances) < _LEAST_APART * size:
        return False
    if any(
        _has_point_near_line(places, size, row) for row in form.rows if set(row) <= places.keys()
    ):
        return False
    return all(degrees >= _LEAST_ANGLE for degrees in _marked_angles(form))


def _has_point_near_line(places: Mapping[str, complex], size: float, row: list[str]) -> bool:
    """Return whether a point that is not on a line lies so near it that it seems to be."""
    start = places[row[0]]
    way = places[row[-1]] - start
    if not way:
        return True
    for name, location in places.items():
        # The real part goes along the line, from 0 at its start to 1 at its end.
        relative = (location - start) / way
        is_between_ends = -0.02 < relative.real < 1.02
        distance = abs(relative.imag * way)
        if name not in row and is_between_ends and distance < _LEAST_BESIDE * size:
            return True
    return False


def _marked_angles(form: Form) -> Iterator[float]:
    """Yield the angles in degrees, as drawn, of the corners that a fact marks."""
    for term in terms_of(form.facts):
        if term.head != "Equals" or term.arguments[0].head != "MeasureOf":
            continue
        names = term.arguments[0].arguments[0].names
        if len(names) == 3 and set(names) <= form.points.keys():
            first, corner, last = [complex(*form.points[name]) for name in names]
            if first != corner and last != corner:
                yield abs(math.degrees(phase((first - corner).conjugate() * (last - corner))))


def add_variants(commands: Commands) -> None:
    """Add the command to the parser of `python -m data_prep`."""
    command = commands.add_parser(
        "variants", help="the solved problems of a prepared folder with other numbers, to scale"
    )
    add = command.add_argument
    add("folder", type=path, metavar="DIR", help="a folder that `geometry3k --source facts` made")
    add("--output", type=path, required=True, metavar="DIR")
    add("--overwrite", action="store_true", help="replace another prepared dataset there")
    add(
        "--per",
        type=whole(1, MAX_PER),
        default=8,
        metavar="K",
        help="variants of each problem, default: %(default)s",
    )
    add("--seed", type=whole(0, MAX_SEED), default=0, metavar="S", help="default: %(default)s")
    add("--limit", type=optional(whole(1)), metavar="N", help="only the first N variants")
    add("--for-evaluation", action="store_true", help="of the test split, for measuring alone")
    workers_help = "processes, default: the cores, here %(default)s"
    add(
        "--workers",
        type=whole(1, MAX_WORKERS),
        default=usable_cores(),
        metavar="N",
        help=workers_help,
    )
    command.set_defaults(run=_variants)


def _variants(arguments: argparse.Namespace) -> None:
    """Run `variants`: make the variants, and print how many there are."""
    names = ("per", "seed", "limit", "for_evaluation")
    options = Variation(**{name: getattr(arguments, name) for name in names})
    run_options = {name: getattr(arguments, name) for name in ("workers", "overwrite")}
    manifest = prepare_variants(
        arguments.folder, output=arguments.output, options=options, **run_options
    )
    print_counts(arguments.output, manifest)
