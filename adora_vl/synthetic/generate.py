"""Draws problems: families in turn, each diagram at most once, answers to choose from where asked."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from string import ascii_uppercase
from typing import TypedDict, Unpack

from PIL import Image

from adora_vl.data.dataset import META, Row
from adora_vl.data.images import diagram_hash
from adora_vl.geometry.figure import written
from adora_vl.geometry.text import form_of_text
from adora_vl.geometry.verdict import verdict
from adora_vl.rewards import grade
from adora_vl.rewards.completion import last_boxed
from adora_vl.synthetic.corners import corner_number
from adora_vl.synthetic.drawing import STYLES
from adora_vl.synthetic.families import FAMILIES, SyntheticProblem
from adora_vl.synthetic.lettered import LETTERED, MIN_SIZE
from adora_vl.synthetic.perimeter import perimeter_digit
from adora_vl.utils.errors import UserError, did_you_mean

_NUMBER = re.compile(r"\d+")


def with_distractors(
    answer: str, slip: str, count: int, rng: random.Random
) -> tuple[list[str], str]:
    """Draw `count` different choices, and return them with the letter of the right one.

    `slip` is a wrong worked answer, which is always among them.
    """
    wrong: list[str] = []
    candidates = [last_boxed(slip) or "", *_variants(answer, rng)]
    for candidate in candidates:
        if len(wrong) == count - 1:
            break
        completion = f"\\boxed{{{candidate}}}"
        if candidate and all(
            grade(completion, choice).verdict != "correct" for choice in (answer, *wrong)
        ):
            wrong.append(candidate)
    assert len(wrong) == count - 1, f"{answer!r} has too few variants"
    index = rng.randrange(count)
    wrong.insert(index, answer)
    return wrong, ascii_uppercase[index]


def _variants(answer: str, rng: random.Random) -> list[str]:
    """Return the answer with its first number doubled, halved, supplemented or moved.

    The near ones come first, in random order.
    """
    match = _NUMBER.search(answer)
    assert match, f"{answer!r} has no number"
    number = int(match.group())
    near = [2 * number, 180 - number, number + 1, number + 2, number - 2, number + 10, number - 10]
    if number % 2 == 0:
        near.append(number // 2)
    rng.shuffle(near)
    # Further numbers follow, since a near one may be 0 or negative.
    values = [value for value in (*near, *range(number + 3, number + 12)) if value > 0]
    return [answer[: match.start()] + str(value) + answer[match.end() :] for value in values]


LEVELS = (1, 2, 3)
DEFAULT_SPLIT = "train"
FIGURE_COLUMNS = ("facts", "figure")  # of rows with figures, behind those of the schema
KNOWN = {**FAMILIES, **LETTERED, "perimeter": perimeter_digit, "corners": corner_number}
# pixels: three digits in a corner of a triangle, or the corners of a polygon with twelve
_LEVELS_FROM = 112
MAX_CHOICES = 8
# of one row; at least one diagram in five is new for as long as the family has many
_MAX_REDRAWS = 5000
# of all diagrams; the rows of a split are drawn until it is full, so this only costs redraws
_TEST_SHARE = 0.25


def split_of(image: Image.Image) -> str:
    """Return the split that this diagram belongs to, in every dataset that is ever generated."""
    return "test" if int(diagram_hash(image)[:8], 16) < _TEST_SHARE * 2**32 else "train"


def facts_and_figure(problem: SyntheticProblem) -> dict[str, str | None]:
    """Return the text form of a problem, and the figure that is solved from it, as columns.

    Both are null where a text form cannot say the problem, the figure also where it has none.
    """
    if not problem.sentences:
        return dict.fromkeys(FIGURE_COLUMNS)
    text = "\n".join(problem.sentences)
    result = verdict(form_of_text(text), looks=False, repair=False)
    figure = None
    if result.status == "answered" and result.figure is not None:
        figure = written(result.figure)
    return {"facts": text, "figure": figure}


def row_of(problem: SyntheticProblem, split: str, index: int, seed: int, n_choices: int) -> Row:
    """Return a problem as a row, with `n_choices` choices if that is above 0.

    Its choices are drawn by the row's own id.
    """
    row_id = f"synthetic/{seed}/{split}/{index}"
    choices = None
    letter = problem.answer
    if n_choices:
        rng = random.Random(f"{row_id}/choices")
        choices, letter = with_distractors(
            problem.answer, slip=problem.slip, count=n_choices, rng=rng
        )
    meta = {name: getattr(problem, name) for name in META} | {"shapes": list(problem.shapes)}
    return {
        "id": row_id,
        "images": [problem.image],
        "problem": problem.question,
        "answer": problem.answer,
        "answer_raw": letter,
        "choices": choices,
        "split": split,
        "source": "synthetic",
        "meta": meta,
    }


class DrawOptions(TypedDict, total=False):
    """The options of `draw_problems`, for functions that hand them on."""

    split: str
    seed: int
    size: int
    families: tuple[str, ...]
    level: int
    styles: tuple[str, ...]


def generate(rows: int, *, choices: int = 0, **options: Unpack[DrawOptions]) -> Iterator[Row]:
    """Yield `rows` rows of a split. Equal arguments give the same rows, byte for byte.

    `choices` is how many answers there are to choose from, 0 for open questions. The `options` are
    those of `draw_problems`, which says what is raised.
    """
    split = options.get("split", DEFAULT_SPLIT)
    seed = options.get("seed", 0)
    for index, problem in enumerate(draw_problems(rows, **options)):
        yield row_of(problem, split=split, index=index, seed=seed, n_choices=choices)


def draw_problems(
    count: int,
    *,
    split: str = DEFAULT_SPLIT,
    seed: int = 0,
    size: int = 56,
    families: tuple[str, ...] = (),
    level: int = 1,
    styles: tuple[str, ...] = ("plain",),
) -> Iterator[SyntheticProblem]:
    """Yield `count` problems of a split, families in turn, each diagram at most once.

    Args:
        count: problems that are drawn.
        split: `train` or `test`; no diagram is in both.
        seed: of the random numbers.
        size: side of a picture in pixels.
        families: keys of `KNOWN`, by default the plain ones.
        level: difficulty, one of `LEVELS`.
        styles: keys of `STYLES`, which are taken in turn.

    Raises:
        UserError: unknown names, a size that is too small, or more problems than there are
            different diagrams.
    """
    names = families or tuple(FAMILIES)
    _check(names, size, level, styles)
    rng = random.Random(f"{seed}/{split}/{size}")
    known_hashes: set[bytes] = set()
    for index in range(count):
        name = names[index % len(names)]
        style = STYLES[styles[index // len(names) % len(styles)]]
        candidates = (KNOWN[name](rng, size, level, style) for _ in range(_MAX_REDRAWS))
        new_problems = (
            candidate
            for candidate in candidates
            if split_of(candidate.image) == split
            and _short_hash(candidate.image) not in known_hashes
        )
        problem = next(new_problems, None)
        if problem is None:
            raise UserError(
                f"rows: {count} of split {split!r} are more than the {index} that there are "
                "different diagrams for; ask for fewer, or for more families, styles or pixels"
            )
        known_hashes.add(_short_hash(problem.image))
        yield replace(problem, family=name)


def _short_hash(image: Image.Image) -> bytes:
    """Return what is remembered of a diagram; 100,000 of them take a few megabytes."""
    return bytes.fromhex(diagram_hash(image)[:32])


def _check(names: tuple[str, ...], size: int, level: int, styles: tuple[str, ...]) -> None:
    """Raise `UserError` for unknown families or styles, and for a size that is too small."""
    for name in names:
        if name not in KNOWN:
            raise UserError(
                f"families: unknown family {name!r}{did_you_mean(name, KNOWN)}; known: "
                f"{', '.join(KNOWN)}"
            )
        if name in LETTERED and size < MIN_SIZE:
            raise UserError(
                f"size: {size} is too small for the letters of {name!r}; give at least {MIN_SIZE}"
            )
    for style in styles or ("",):
        if style not in STYLES:
            raise UserError(
                f"styles: unknown style {style!r}{did_you_mean(style, STYLES)}; known: "
                f"{', '.join(STYLES)}"
            )
    if level > 1 and size < _LEVELS_FROM:
        raise UserError(
            f"size: {size} is too small for the numbers of level {level}; give at least "
            f"{_LEVELS_FROM}"
        )
