"""`python -m data_prep variants`: problems of a prepared folder with other numbers, to scale.

A variant depends on the seed, on the id of its original and on its own number alone, so that
`--workers` and `--limit` change none. A variant is kept if its facts determine the answer, its
figure is of the same kind as before, and its picture can be read.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from cmath import phase
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.conversion.pipeline import CleaningOptions, OpenedSource, SplitRows, prepare
from adora_vl.conversion.problem import RawProblem
from adora_vl.conversion.workers import MAX_WORKERS, ordered_map, usable_cores
from adora_vl.data.dataset import VARIANTS_SOURCE, read_manifest, stored_rows
from adora_vl.data.images import png_bytes
from adora_vl.evals.options import options_from
from adora_vl.geometry.choose import choose_outcome
from adora_vl.geometry.descent import Budget
from adora_vl.geometry.figure import (
    Figure,
    Verdict,
    figure_as_json,
    figure_from_json,
    figure_of_solution,
)
from adora_vl.geometry.logic_form import LogicForm, Point, Term
from adora_vl.geometry.reading import read_facts
from adora_vl.geometry.shapes import UnreadError, parse_terms
from adora_vl.geometry.solve import FigureProblem
from adora_vl.geometry.solve_form import EVALUATIONS, short_answer
from adora_vl.geometry.term_reader import unit_of_term
from adora_vl.geometry.vectors import extent_of
from adora_vl.utils.cli import MAX_SEED, Commands, integer_between, none_or, path_option, pluralize
from adora_vl.utils.errors import UserError
from data_prep.logic_forms import facts_in_words
from data_prep.options import add_output
from data_prep.question_words import question_in_words
from data_prep.redraw import can_be_drawn, draw_if_legible, points_in_picture
from data_prep.solved_rows import (
    draws_every_asked_point,
    features_with_figure,
    with_rounding_request,
)
from data_prep.survey import print_counts

_FAMILY_OF_VARIANTS = "variant"
MAX_VARIANTS_PER_PROBLEM = 1000
MAX_TRIES_PER_VARIANT = 6  # attempts at each variant, each with other numbers
_START_DIAGRAM_PIXELS = 400.0  # the longer side of the diagram that the solver begins from
# Angles that keep their values, since a right triangle, say, has to stay one.
_UNCHANGED_ANGLES = (30.0, 45.0, 60.0, 90.0, 120.0, 180.0)
# The ranges of the factors by which all lengths, each length and an angle change.
_SCALE_RANGE = (0.7, 1.4)
_LENGTH_RANGE = (0.8, 1.25)
_ANGLE_RANGE = (0.8, 1.25)
_CONSTANT_STEPS = (-3, -2, -1, 1, 2, 3)  # what is added to the 5 of `3x + 5`
# The least distance of two points and the least shorter side, as shares of the figure's longer
# side, and the least angle that is marked, in degrees. What is smaller cannot be told apart in a
# picture.
_MIN_POINT_DISTANCE = 0.05
_MIN_SHORTER_SIDE = 0.12
_MIN_MARKED_DEGREES = 12.0
# The least distance of a point from a line that it does not lie on, as a share of the figure's
# size.
_MIN_DISTANCE_FROM_LINE = 0.03
_MAX_DEGREES_OFF_AXIS = 4.0  # degrees from level or upright that count as such
_STORED_DECIMALS = 9  # decimals of a stored place; floats of two machines differ in later ones
# `3x + 5`, a letter with a constant.
_LINEAR_PATTERN = re.compile(r"(\d*[a-z]) ?([+-]) ?(\d+)")


@dataclass(frozen=True)
class VariantOptions(CleaningOptions):
    """How many variants of each problem are made, from which seed, and of which split."""

    per: int = 8  # variants of each problem
    seed: int = 0
    for_evaluation: bool = False  # of the test split instead of the training split


class OriginalProblem(NamedTuple):
    """A stored problem that variants are made of."""

    row_id: str
    # The text of its column `figure`: the facts of its diagram, and the coordinates of the points.
    figure_json: str


def prepare_variants(
    folder: Path,
    output: Path,
    options: VariantOptions,
    *,
    workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a data set of variants, geometry problems with other numbers; return its manifest.

    The data set has one split, the one that the problems are read from.

    Args:
        folder: the data set of the problems. Only rows with a solved figure have variants, as
            `geometry3k --source facts` makes them.
        output: the folder that is written.
        options: how many variants there are, and of which split.
        workers: how many processes make them.
        overwrite: whether another data set in `output` is replaced.

    Raises:
        UserError: the folder has no such rows.
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

    def open_variants() -> OpenedSource:
        """Return the rows of the data set, before a variant is made, and what the manifest says."""
        description = {
            "source": VARIANTS_SOURCE,
            "input": str(folder),
            "revision": None,  # a folder has no commit, as a data set of the hub has
            "arguments": asdict(options),
        }
        begin_making = partial(
            _variant_readers, folder, split=split, options=options, workers=workers
        )
        # How many there will be is unknown, since some problems get fewer than `per` variants.
        rows = SplitRows(begin_reading=begin_making, row_count=None)
        return OpenedSource(description, {split: rows})

    return prepare(
        output,
        options,
        open_source=open_variants,
        features=features_with_figure(),
        workers=workers,
        overwrite=overwrite,
    )


def _variant_readers(
    folder: Path, *, split: str, options: VariantOptions, workers: int
) -> Iterator[Callable[[], RawProblem]]:
    """Yield for each variant of a split a function that returns it.

    Variants are made in `workers` processes, in the order of the stored problems of `folder`. They
    are yielded as functions, since `prepare` reads every row by a call. Each is a `partial`, which
    can be sent to the processes of `prepare`, as a lambda cannot.

    Prints how many problems have no variant, or fewer than the options say.
    """
    originals = (
        OriginalProblem(row_id=row["id"], figure_json=row["figure"])
        for row in stored_rows(folder, split)
        if row.get("figure")
    )
    make_variants_of_original = partial(
        make_variants, per=options.per, seed=options.seed, split=split
    )
    yielded_count = 0
    variant_counts: list[int] = []  # how many variants each problem has
    with ordered_map(workers) as map_originals:
        for variants in map_originals(make_variants_of_original, originals):
            variant_counts.append(len(variants))
            for variant in variants:
                if options.limit is not None and yielded_count >= options.limit:
                    return
                yielded_count += 1
                yield partial(_return_variant, variant)
    if not variant_counts:
        raise UserError(
            f"folder: no row of {str(folder)!r} has a figure; make the folder with --source facts"
        )
    count_without = variant_counts.count(0)
    count_with_fewer = sum(0 < count < options.per for count in variant_counts)
    if count_without or count_with_fewer:
        print(
            f"of {pluralize(len(variant_counts), 'problem')} {count_without} have no variant "
            f"and {count_with_fewer} fewer than {options.per}: other numbers fit no diagram that "
            "can be read"
        )


def _return_variant(variant: RawProblem) -> RawProblem:
    """Return the argument; a `partial` of this function can be pickled, which a lambda cannot."""
    return variant


def make_variants(
    original: OriginalProblem, *, per: int, seed: int, split: str
) -> list[RawProblem]:
    """Return up to `per` variants of a stored problem.

    A variant whose numbers fit no diagram is tried again, `MAX_TRIES_PER_VARIANT` times at most;
    after that it is left out. The result depends on `seed` and on the id of the problem. `split` is
    the split of the variants.

    Raises `UserError` where the stored figure cannot be read.
    """
    row_id = original.row_id
    try:
        figure = figure_from_json(original.figure_json)
    except ValueError as error:
        raise UserError(
            f"folder: the figure of {row_id} cannot be read ({error}); prepare the folder again"
        ) from error
    variants = []
    for number in range(1, per + 1):
        for attempt in range(MAX_TRIES_PER_VARIANT):
            # A generator for each attempt makes a variant independent of all others.
            rng = random.Random(f"{seed}/{row_id}/{number}/{attempt}")
            variant = _try_variant(
                row_id, figure=figure, variant_id=f"{row_id}~{number}", split=split, rng=rng
            )
            if variant is not None:
                variants.append(variant)
                break
    return variants


def _try_variant(
    original_id: str, *, figure: Figure, variant_id: str, split: str, rng: random.Random
) -> RawProblem | None:
    """Return a geometry problem with other numbers: change its facts, solve them, draw the diagram.

    Returns None where the new numbers fit no diagram, or one in which parts cannot be told apart.

    Args:
        original_id: the id of the stored problem.
        figure: the facts of this problem, and the coordinates of the points in its diagram.
        variant_id: the id of the new problem.
        split: its split.
        rng: draws the numbers.
    """
    form = form_with_other_numbers(figure, rng)
    if form is None:
        return None
    question = question_in_words(form)
    verdict = _solve_variant(form)
    # The question has no words, the new numbers have no single answer, or the question asks about a
    # point that the diagram would not show.
    if question is None or verdict is None or not draws_every_asked_point(form):
        return None
    assert verdict.figure is not None, "an answered problem has a figure"
    coordinates = _rotate_like_original(figure, verdict.figure.coordinates)
    drawn_form = replace(form, points=points_in_picture(coordinates))
    if not can_be_drawn(drawn_form) or not _has_distinguishable_parts(drawn_form):
        return None
    picture = draw_if_legible(drawn_form)
    if picture is None:
        return None
    question, answer = with_rounding_request(question, verdict)
    stored_coordinates = {
        name: (round(x, _STORED_DECIMALS), round(y, _STORED_DECIMALS))
        for name, (x, y) in coordinates.items()
    }
    stored_figure = replace(verdict.figure, coordinates=stored_coordinates, form=drawn_form)
    return RawProblem(
        id=variant_id,
        split=split,
        source=VARIANTS_SOURCE,
        origin=variant_id,
        images=(png_bytes(picture),),
        problem=question,
        answer=answer,
        family=_FAMILY_OF_VARIANTS,
        # Comparisons with the original need its id, for which the schema has no column.
        kind=original_id,
        extras={
            "facts": facts_in_words(drawn_form, question),
            "figure": figure_as_json(stored_figure),
        },
    )


def form_with_other_numbers(figure: Figure, rng: random.Random) -> LogicForm | None:
    """Return the facts and the question of a geometry problem with other numbers in them.

    For example, AB = 12, CD = 12 may become AB = 14, CD = 14: equal lengths or angles stay equal,
    and a whole number stays whole. The returned form still has the points of the old diagram: the
    solver begins with them, and moves them to the new numbers.

    Returns None where no number has changed. `figure` is the solved problem, and `rng` draws.
    """
    scale = rng.uniform(*_SCALE_RANGE)
    new_numbers: dict[_OldNumber, str] = {}  # as they are written, such as `14`

    def replace_number(fact: str) -> str:
        """Return `Equals(measure, number)` with another number; any other fact as it is."""
        terms = list(parse_terms([fact]))
        if len(terms) != 1 or not terms[0].is_equation:
            return fact
        measure, right_side = terms[0].arguments
        # A term with arguments is itself a measure, so neither `AB = CD` nor `x = 3` is changed.
        if right_side.arguments or not measure.arguments:
            return fact
        old_number = _OldNumber(unit=unit_of_term(measure), text=right_side.head.strip())
        if old_number not in new_numbers:
            new_numbers[old_number] = _draw_new_number(old_number, scale=scale, rng=rng)
        new_right_side = Term(head=new_numbers[old_number])
        return str(Term(head="Equals", arguments=(measure, new_right_side)))

    form = figure.form
    facts = tuple(replace_number(fact) for fact in form.facts)
    question = tuple(replace_number(part) for part in form.question)
    if all(old_number.text == new_number for old_number, new_number in new_numbers.items()):
        return None
    extent = extent_of([complex(x, y) for x, y in figure.coordinates.values()])
    pixels_per_unit = _START_DIAGRAM_PIXELS / max(*extent, 1e-9)  # never by 0
    points = {
        name: (pixels_per_unit * x, pixels_per_unit * y)
        for name, (x, y) in points_in_picture(figure.coordinates).items()
    }
    return replace(form, facts=facts, question=question, points=points)


class _OldNumber(NamedTuple):
    """A number of the original's facts: two of them that are equal get one new number."""

    unit: str  # `length`, `area`, `degrees` or another
    text: str  # as it is written, such as `12`, `4.5` or `3x + 5`


def _draw_new_number(old_number: _OldNumber, *, scale: float, rng: random.Random) -> str:
    """Return a random number, as text, that replaces one in the facts of a geometry problem.

    - In `3x + 5` the 5 changes by 1 to 3, but never below 1.
    - Any other text that is no number stays as it is.
    - An angle is multiplied by a random factor. Special angles, such as 90 degrees, stay.
    - A length is multiplied by `scale`, which all lengths share, and by a random factor. An area is
      multiplied by the square of `scale` and by a random factor.
    - A number of any other unit stays.
    """
    linear = _LINEAR_PATTERN.fullmatch(old_number.text)
    if linear:
        letter_part, sign, constant = linear.groups()
        new_constant = max(1, int(constant) + rng.choice(_CONSTANT_STEPS))
        return f"{letter_part}{sign}{new_constant}"
    if not re.fullmatch(r"\d+(?:\.\d+)?", old_number.text):
        return old_number.text
    old_value = float(old_number.text)
    if old_number.unit == "degrees":
        if old_value in _UNCHANGED_ANGLES:
            return old_number.text
        new_value = old_value * rng.uniform(*_ANGLE_RANGE)
    elif old_number.unit in ("length", "area"):
        unit_scale = scale if old_number.unit == "length" else scale**2
        new_value = old_value * rng.uniform(*_LENGTH_RANGE) * unit_scale
    else:
        return old_number.text
    # A whole number stays whole; any other gets one decimal place.
    if old_value == int(old_value):
        return str(max(1, round(new_value)))
    return f"{max(0.1, round(new_value, 1)):g}"


def _solve_variant(form: LogicForm) -> Verdict | None:
    """Return the answer to the question of a variant with its figure, as the solver finds them.

    Returns None where the facts do not determine one answer, or determine it only by what the
    picture suggests. `form` has the facts, the question, and the points to begin with.
    """
    try:
        reading = read_facts(form)
    except (UnreadError, ValueError, IndexError):
        return None
    if reading.goal is None:  # there is nothing to find
        return None
    if reading.assumed:  # the answer would rest on an assumption
        return None
    if reading.unread:  # some facts were not understood
        return None
    problem = FigureProblem(reading)
    # Four starts are enough to see whether a second figure fits as well.
    outcome = choose_outcome(problem, Budget(evaluations=EVALUATIONS), starts=4)
    if outcome.status != "answered" or outcome.solution is None or outcome.value is None:
        return None
    # Where two solutions fall together, the answer is known to four digits only.
    if outcome.at_double_root:
        return None
    # A fault is a difference in kind from the old diagram, such as a point that has moved to the
    # other side of a line.
    if outcome.solution.faults:
        return None
    # No length, angle or area is 0 or negative.
    if outcome.value <= 0:
        return None
    return Verdict(
        status="answered",
        value=float(f"{outcome.value:.10g}"),
        answer=short_answer(outcome.value, reading),
        basis="facts",
        figure=figure_of_solution(problem, outcome.solution, form),
    )


def _rotate_like_original(original: Figure, coordinates: Mapping[str, Point]) -> dict[str, Point]:
    """Return the points of a variant, rotated so that it lies on the page as its original does.

    `coordinates` are the points by name, and `original` is the solved figure of the original.
    """
    rotation = _upright_rotation(original, coordinates)
    rotated_coordinates = {}
    for name, (x, y) in coordinates.items():
        # Points are complex numbers here: a product with one of length 1 is a rotation.
        point = rotation * complex(x, y)
        rotated_coordinates[name] = (point.real, point.imag)
    return rotated_coordinates


def _upright_rotation(original: Figure, coordinates: Mapping[str, Point]) -> complex:
    """Return the rotation that makes a line of a variant level or upright, as in its original.

    A variant is solved in any orientation. This looks for lines that are level or upright in the
    original's picture, takes the one that is longest in the variant, and rotates by the angle
    between the two. `coordinates` are the variant's points by name.

    Returns a complex number of length 1, to multiply points with; 1 where there is no such line.
    """
    longest_length = 0.0
    rotation = 1 + 0j
    # Points are complex numbers. Where the picture has a point, its coordinates there replace those
    # of the solved figure, since the picture shows which lines are level. In a picture y points
    # down.
    original_points = {name: complex(x, y) for name, (x, y) in original.coordinates.items()}
    original_points |= {name: complex(x, -y) for name, (x, y) in original.form.points.items()}
    for points_on_line in original.form.lines_with_points:
        start = points_on_line[0]
        end = points_on_line[-1]
        if not {start, end} <= coordinates.keys() & original_points.keys():
            continue
        original_direction = original_points[end] - original_points[start]
        direction = complex(*coordinates[end]) - complex(*coordinates[start])
        length = abs(direction)
        if not original_direction or not length:  # two points at one place have no direction
            continue
        for axis in (1, 1j, -1, -1j):  # right, up, left, down
            degrees_off_axis = abs(math.degrees(phase(original_direction / axis)))
            is_on_axis = degrees_off_axis < _MAX_DEGREES_OFF_AXIS
            if is_on_axis and length > longest_length:
                longest_length = length
                rotation = axis * length / direction
    return rotation


def _has_distinguishable_parts(form: LogicForm) -> bool:
    """Return whether the points, lines and marked angles of a diagram can be told apart.

    `form.points` are where the points are drawn. The diagram must not be too flat, no two points
    too close, no point so near to a line that it seems to lie on it, and no marked angle too sharp.
    """
    names_on_lines = {name for line in form.lines for name in line}
    points = {}  # as complex numbers, whose differences have a length
    for name in sorted(names_on_lines):
        if name in form.points:
            points[name] = complex(*form.points[name])
    if len(points) < 2:
        return False
    width, height = extent_of(points.values())
    size = max(width, height)
    if min(width, height) < _MIN_SHORTER_SIDE * size:
        return False
    distances = [abs(start - end) for start, end in combinations(points.values(), 2)]
    if min(distances) < _MIN_POINT_DISTANCE * size:
        return False
    for names_on_line in form.lines_with_points:
        is_drawn = set(names_on_line) <= points.keys()
        if is_drawn and _has_point_near_line(points, size, names_on_line):
            return False
    return all(degrees >= _MIN_MARKED_DEGREES for degrees in _marked_angles(form))


def _has_point_near_line(
    points: Mapping[str, complex], size: float, names_on_line: Sequence[str]
) -> bool:
    """Return whether a point lies beside a line, but so near that it seems to lie on it.

    Args:
        points: all points of the diagram by name.
        size: the longer side of the diagram; a point is near within 3 % of it.
        names_on_line: the names of the points on the line, from one end to the other.
    """
    start = points[names_on_line[0]]
    direction = points[names_on_line[-1]] - start
    if not direction:  # its ends fall together, so that nobody can see the line
        return True
    for name, point in points.items():
        # A quotient of complex numbers: its real part runs along the line, from 0 at the start to
        # 1 at the end, and its imaginary part across it.
        relative = (point - start) / direction
        is_between_ends = -0.02 < relative.real < 1.02
        distance = abs(relative.imag * direction)
        is_near = is_between_ends and distance < _MIN_DISTANCE_FROM_LINE * size
        if is_near and name not in names_on_line:
            return True
    return False


def _marked_angles(form: LogicForm) -> Iterator[float]:
    """Yield, in degrees, how large each angle is drawn whose measure a fact gives.

    Such a fact is `Equals(MeasureOf(Angle(A, B, C)), 40)`, with B at the corner.
    """
    for term in parse_terms(form.facts):
        if term.head != "Equals" or term.arguments[0].head != "MeasureOf":
            continue
        names = term.arguments[0].arguments[0].names
        if len(names) == 3 and set(names) <= form.points.keys():
            first, corner, last = [complex(*form.points[name]) for name in names]
            if first != corner and last != corner:
                # The argument of conj(u) * v is the angle from u to v.
                angle = phase((first - corner).conjugate() * (last - corner))
                yield abs(math.degrees(angle))


def add_variants(commands: Commands) -> None:
    """Add the command `variants` to the parser of `python -m data_prep`."""
    command = commands.add_parser(
        "variants", help="the solved problems of a prepared folder with other numbers, to scale"
    )
    add = command.add_argument
    add(
        "folder",
        type=path_option,
        metavar="DIR",
        help="a folder that `geometry3k --source facts` made",
    )
    add_output(command)
    add(
        "--per",
        type=integer_between(1, MAX_VARIANTS_PER_PROBLEM),
        default=8,
        metavar="K",
        help="variants of each problem, default: %(default)s",
    )
    add(
        "--seed",
        type=integer_between(0, MAX_SEED),
        default=0,
        metavar="S",
        help="default: %(default)s",
    )
    add("--limit", type=none_or(integer_between(1)), metavar="N", help="only the first N variants")
    add("--for-evaluation", action="store_true", help="of the test split, for measuring alone")
    add(
        "--workers",
        type=integer_between(1, MAX_WORKERS),
        default=usable_cores(),
        metavar="N",
        help="processes, default: the cores, here %(default)s",
    )
    command.set_defaults(run=_run_variants)


def _run_variants(arguments: argparse.Namespace) -> None:
    """Run `variants`: write the data set of variants, and print how many there are."""
    manifest = prepare_variants(
        arguments.folder,
        output=arguments.output,
        options=options_from(VariantOptions, arguments),
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)
