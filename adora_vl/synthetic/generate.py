"""Draws problems: families in turn, each diagram at most once, answers to choose from if asked."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from string import ascii_uppercase
from typing import NamedTuple, TypedDict, Unpack

from PIL import Image

from adora_vl.data.dataset import TYPE_BY_META_FIELD, Row
from adora_vl.data.images import pixel_hash
from adora_vl.geometry.solve_form import solved_figure
from adora_vl.geometry.text import read_form_from_text
from adora_vl.rewards import grade
from adora_vl.rewards.completion import last_boxed
from adora_vl.synthetic.corners import corner_number
from adora_vl.synthetic.drawing import STYLES
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME, SyntheticProblem
from adora_vl.synthetic.lettered import LETTERED_FAMILY_BY_NAME, MIN_LETTERED_SIZE
from adora_vl.synthetic.perimeter import perimeter_digit
from adora_vl.utils.errors import UserError, did_you_mean

_NUMBER_PATTERN = re.compile(r"\d+")


class Choices(NamedTuple):
    """The choices of a problem, and which of them is right."""

    texts: list[str]
    right_letter: str  # `A` for the first choice


def with_distractors(answer: str, wrong_solution: str, count: int, rng: random.Random) -> Choices:
    r"""Draw `count` different choices for a problem: its answer among wrong ones.

    `wrong_solution` is a worked solution with a typical mistake. Its answer, in a box, is always
    among the choices, unless it means the same as the right one. The answer `70` with the wrong
    solution `180 - 40 = \boxed{140}` and a count of 4 may give the choices 140, 72, 60 and 70, of
    which `D` is right.
    """
    distractors: list[str] = []
    candidates = [last_boxed(wrong_solution) or "", *_similar_answers(answer, rng)]
    for candidate in candidates:
        if len(distractors) == count - 1:
            break
        if not candidate:
            continue
        # No choice may mean the same as another one: `\frac{1}{2}` and `0.5` do.
        verdicts = {
            grade(f"\\boxed{{{candidate}}}", choice).verdict for choice in (answer, *distractors)
        }
        if "correct" not in verdicts:
            distractors.append(candidate)
    assert len(distractors) == count - 1, f"{answer!r} has too few variants"
    right_index = rng.randrange(count)
    texts = [*distractors[:right_index], answer, *distractors[right_index:]]
    return Choices(texts=texts, right_letter=ascii_uppercase[right_index])


def _similar_answers(answer: str, rng: random.Random) -> list[str]:
    """Return wrong answers that look like the right one, with another number in place of its first.

    The first ones, in random order, have typical mistakes: the number doubled, halved, subtracted
    from 180, or a little larger or smaller. For `40` they are 80, 20, 140, 41, 42, 38, 50 and 30.
    Then come the numbers from 43 to 51.
    """
    match = _NUMBER_PATTERN.search(answer)
    assert match, f"{answer!r} has no number"
    number = int(match.group())
    typical_mistakes = [
        2 * number,
        180 - number,
        number + 1,
        number + 2,
        number - 2,
        number + 10,
        number - 10,
    ]
    if number % 2 == 0:
        typical_mistakes.append(number // 2)
    rng.shuffle(typical_mistakes)
    # Further numbers follow, since some of these may be 0 or negative.
    numbers = (*typical_mistakes, *range(number + 3, number + 12))
    before = answer[: match.start()]
    after = answer[match.end() :]
    return [f"{before}{wrong_number}{after}" for wrong_number in numbers if wrong_number > 0]


LEVELS = (1, 2, 3)
DEFAULT_SPLIT = "train"
FIGURE_COLUMNS = ("facts", "figure")  # of rows with figures, behind those of the schema
# The function that draws a problem, by the name of the family of problems.
FAMILY_BY_NAME = {
    **PLAIN_FAMILY_BY_NAME,
    **LETTERED_FAMILY_BY_NAME,
    "perimeter": perimeter_digit,
    "corners": corner_number,
}
# The least side of a picture in pixels for levels 2 and 3. Their problems have three digits in the
# corner of a triangle, and polygons with twelve corners.
_MIN_SIZE_OF_HIGHER_LEVELS = 112
MAX_CHOICES = 8
# How often a row is drawn again until its diagram is new. While a family has many diagrams left, at
# least one in five is new.
_MAX_REDRAWS = 5000
# The share of all diagrams that are of the test split. It does not limit the rows of a split, which
# are drawn until there are enough.
_TEST_SHARE = 0.25


def split_of(image: Image.Image) -> str:
    """Return the split of a diagram, `train` or `test`, which its hash decides.

    So a diagram is in the same split in every data set that is generated.
    """
    share_of_hash = int(pixel_hash(image)[:8], 16) / 2**32  # from 0 to 1
    return "test" if share_of_hash < _TEST_SHARE else "train"


def facts_and_figure(problem: SyntheticProblem) -> dict[str, str | None]:
    """Return the columns `facts` and `figure`, with which a reward can check an answer's steps.

    `facts` has the facts of the diagram as sentences, one a line, such as `AB = 5`. `figure` has
    the coordinates that are solved from them, as JSON. Both are None for a problem without
    sentences; `figure` is None also where the facts do not determine one.
    """
    if not problem.sentences:
        return dict.fromkeys(FIGURE_COLUMNS)
    facts = "\n".join(problem.sentences)
    return {"facts": facts, "figure": solved_figure(read_form_from_text(facts))}


def _row_of(
    problem: SyntheticProblem, *, split: str, index: int, seed: int, choice_count: int
) -> Row:
    """Return the dataset row of a drawn problem, the one with the number `index` in its split.

    `choice_count`: how many choices it has; 0 for an open question. The random numbers for the
    choices come from the id of the row, so that they do not depend on other rows.
    """
    row_id = f"synthetic/{seed}/{split}/{index}"
    choices = None
    raw_answer = problem.answer
    if choice_count:
        # The answer as a source writes it is then a letter, such as `D`.
        choices, raw_answer = with_distractors(
            problem.answer,
            wrong_solution=problem.slip,
            count=choice_count,
            rng=random.Random(f"{row_id}/choices"),
        )
    # The fields of `meta` in a data set are fields of `SyntheticProblem` too, such as `slip`.
    meta = {name: getattr(problem, name) for name in TYPE_BY_META_FIELD} | {
        "shapes": list(problem.shapes)
    }
    return {
        "id": row_id,
        "images": [problem.image],
        "problem": problem.question,
        "answer": problem.answer,
        "answer_raw": raw_answer,
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


def generate(
    rows: int, *, choices: int = 0, figures: bool = False, **options: Unpack[DrawOptions]
) -> Iterator[Row]:
    """Draw `rows` problems, and yield them as rows of a data set.

    Equal arguments give the same rows, byte for byte.

    Args:
        rows: how many there are.
        choices: how many answers each problem has to choose from, 0 for open questions.
        figures: give each row the columns of `FIGURE_COLUMNS`, for rewards that check steps.
        options: those of `draw_problems`, which also says what is raised.
    """
    split = options.get("split", DEFAULT_SPLIT)
    seed = options.get("seed", 0)
    for index, problem in enumerate(draw_problems(rows, **options)):
        row = _row_of(problem, split=split, index=index, seed=seed, choice_count=choices)
        if figures:
            row |= facts_and_figure(problem)
        yield row


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
    """Draw `count` problems of a split, of one family after the other, and no diagram twice.

    Args:
        count: how many problems to draw.
        split: `train` or `test`; no diagram is in both.
        seed: of the random numbers.
        size: side of a picture in pixels.
        families: keys of `FAMILY_BY_NAME`, by default the plain ones.
        level: difficulty, one of `LEVELS`.
        styles: keys of `STYLES`, which are taken in turn.

    Raises:
        UserError: unknown names, a size that is too small, or more problems than there are
            different diagrams.
    """
    names = families or tuple(PLAIN_FAMILY_BY_NAME)
    _check_draw_options(names, size=size, level=level, styles=styles)
    rng = random.Random(f"{seed}/{split}/{size}")
    known_hashes: set[bytes] = set()
    for index in range(count):
        name = names[index % len(names)]
        # The style changes after a turn of all families, so that each family has all styles.
        style = STYLES[styles[index // len(names) % len(styles)]]
        # Draw until the diagram is of this split and new.
        for _ in range(_MAX_REDRAWS):
            problem = FAMILY_BY_NAME[name](rng, size, level, style)
            is_in_split = split_of(problem.image) == split
            if is_in_split and _short_hash(problem.image) not in known_hashes:
                break
        else:
            raise UserError(
                f"rows: {count} of split {split!r} are more than the {index} that there are "
                "different diagrams for; ask for fewer, or for more families, styles or pixels"
            )
        known_hashes.add(_short_hash(problem.image))
        yield replace(problem, family=name)


def _short_hash(image: Image.Image) -> bytes:
    """Return the first half of a diagram's hash, in bytes, to know the diagram again."""
    return bytes.fromhex(pixel_hash(image)[:32])


def _check_draw_options(
    names: tuple[str, ...], size: int, level: int, styles: tuple[str, ...]
) -> None:
    """Raise `UserError` for unknown families or styles, and for a size that is too small."""
    for name in names:
        if name not in FAMILY_BY_NAME:
            raise UserError(
                f"families: unknown family {name!r}{did_you_mean(name, FAMILY_BY_NAME)}; known: "
                f"{', '.join(FAMILY_BY_NAME)}"
            )
        if name in LETTERED_FAMILY_BY_NAME and size < MIN_LETTERED_SIZE:
            raise UserError(
                f"size: {size} is too small for the letters of {name!r}; give at least {MIN_LETTERED_SIZE}"
            )
    for style in styles or ("",):
        if style not in STYLES:
            raise UserError(
                f"styles: unknown style {style!r}{did_you_mean(style, STYLES)}; known: "
                f"{', '.join(STYLES)}"
            )
    if level > 1 and size < _MIN_SIZE_OF_HIGHER_LEVELS:
        raise UserError(
            f"size: {size} is too small for the numbers of level {level}; give at least "
            f"{_MIN_SIZE_OF_HIGHER_LEVELS}"
        )
