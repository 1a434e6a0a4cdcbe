"""Each family of drawn problems has the answer that its picture and question determine.

A problem has its text form, which the engine solves. Lettered families are drawn from it; of the
plain ones what stands in the picture is compared with it. The families of reading (numbers at
corners, knights) have nothing that a text form can say.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adora_vl.data.dataset import stored_rows
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.rewards.grade import grade
from adora_vl.rewards.steps import check_claims_if_possible
from adora_vl.synthetic.drawing import PLAIN_STYLE, Canvas, Point
from adora_vl.synthetic.drawn_form import DrawnForm
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME, SyntheticProblem
from adora_vl.synthetic.generated import describe_synthetic, prepare_drawn
from adora_vl.synthetic.lettered import LETTERED_FAMILY_BY_NAME
from adora_vl.synthetic.perimeter import perimeter_digit
from adora_vl.synthetic.sketch import ClutteredError

SIZE = 224  # pixels; large enough for all labels of a lettered figure
LEVELS = (1, 2, 3)
SEEDS = (3, 4, 5)


@dataclass
class Drawing:
    """What stands in a picture: texts with their places, lines by their corners, circles, dots."""

    labels: list[tuple[str, Point]] = field(default_factory=list)
    lines: list[list[Point]] = field(default_factory=list)
    circles: int = 0
    dots: int = 0

    @property
    def texts(self) -> list[str]:
        """The labels without their places."""
        return [text for text, _ in self.labels]

    def clear(self) -> None:
        """Forget everything."""
        self.labels.clear()
        self.lines.clear()
        self.circles = 0
        self.dots = 0


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Drawing:
    """Note what is drawn on any canvas from now on: labels, lines, circles and dots."""
    notes = Drawing()

    def note_before(name: str, note: Callable[..., None]) -> None:
        """Replace a method of `Canvas` by one that notes its arguments first."""
        original = getattr(Canvas, name)

        def note_and_draw(canvas: Canvas, *arguments: object, **options: object) -> object:
            note(*arguments)
            return original(canvas, *arguments, **options)

        monkeypatch.setattr(Canvas, name, note_and_draw)

    def note_circle(centre: Point, radius: float) -> None:
        notes.circles += 1

    def note_dot(centre: Point) -> None:
        notes.dots += 1

    note_before("label", lambda text, centre: notes.labels.append((text, centre)))
    note_before("line", lambda *points: notes.lines.append(list(points)))
    note_before("circle", note_circle)
    note_before("dot", note_dot)
    return notes


def solve_sentences(sentences: tuple[str, ...]) -> str:
    """Solve a problem in the text form, and return its answer in its short form."""
    result = solve_form(read_form_from_text("\n".join(sentences)))
    assert result.status == "answered", (sentences, result.why)
    return result.answer or str(result.value)


def assert_solved(problem: SyntheticProblem) -> None:
    """Assert that the text form of a problem determines its answer."""
    answer = solve_sentences(problem.sentences)
    result = grade(f"\\boxed{{{answer}}}", problem.answer)
    assert result.verdict == "correct", (problem.sentences, answer, problem.answer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LETTERED_FAMILY_BY_NAME)
def test_a_lettered_problem_is_solved_from_the_sentences_it_is_drawn_from(
    name: str, level: int
) -> None:
    """A problem's answer follows from the sentences it is drawn from.

    Its question asks for the same letters as the sentence `find ...`.
    """
    for seed in SEEDS:
        problem = LETTERED_FAMILY_BY_NAME[name](random.Random(seed), SIZE, level, PLAIN_STYLE)
        assert_solved(problem)
        (question_sentence,) = [text for text in problem.sentences if text.startswith("find ")]
        letters_of_question = re.sub(r"\\[a-z]+", "", problem.question).replace(" ", "")
        goal = question_sentence.split()[-1]
        assert goal in letters_of_question, (goal, problem.question)


# What the picture of a plain family says of its text form.


def sentences_of_isosceles(drawing: Drawing) -> list[str]:
    """Return the sentence of the apex angle, which is written."""
    (apex,) = drawing.texts
    return [f"angle BAC = {apex}"]


def sentences_of_polygon(drawing: Drawing) -> list[str]:
    """Return the sentence of the corners, at which dots show how many there are."""
    return [f"regular polygon {'ABCDEFGHIJKL'[: drawing.dots]}"]


def sentences_of_right_triangle(drawing: Drawing) -> list[str]:
    """Return the sentences of the legs, which both have a label."""
    down, across = drawing.texts
    return ["right angle ABC", f"AB = {down}", f"BC = {across}"]


def sentences_of_crossing(drawing: Drawing) -> list[str]:
    """Return the sentences of the angle above, which is written, and of x, below or right."""
    above, unknown = drawing.labels
    is_below = unknown[1][1] > 0.7
    return [f"angle AED = {above[0]}", "find angle CEB" if is_below else "find angle DEB"]


def sentences_of_circle(drawing: Drawing) -> list[str]:
    """Return the sentences of the radius, which is drawn with its length."""
    (radius,) = drawing.texts
    return ["circle O: A", f"radius O = {radius}"]


SENTENCES_SEEN_BY_FAMILY = {
    "isosceles": sentences_of_isosceles,
    "polygon": sentences_of_polygon,
    "right_triangle": sentences_of_right_triangle,
    "crossing": sentences_of_crossing,
    "circle": sentences_of_circle,
}


def test_each_plain_family_is_compared_with_its_picture() -> None:
    """No plain family is missing in the table above."""
    assert set(SENTENCES_SEEN_BY_FAMILY) == set(PLAIN_FAMILY_BY_NAME)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SENTENCES_SEEN_BY_FAMILY)
def test_a_plain_problem_is_solved_from_what_its_picture_shows(
    drawing: Drawing, name: str, level: int
) -> None:
    """A problem's sentences have all that its picture shows, and its answer follows from them.

    Not all seeds are solved, but each kind of problem is.
    """
    solved_kinds = set()
    for seed in (*SEEDS, *range(10, 16)):
        drawing.clear()
        problem = PLAIN_FAMILY_BY_NAME[name](random.Random(seed), SIZE, level, PLAIN_STYLE)
        assert set(SENTENCES_SEEN_BY_FAMILY[name](drawing)) <= set(problem.sentences)
        if seed in SEEDS or problem.kind not in solved_kinds:
            assert_solved(problem)
        solved_kinds.add(problem.kind)


@pytest.mark.parametrize("level", LEVELS)
def test_the_last_digit_of_a_perimeter_is_that_of_the_figure(drawing: Drawing, level: int) -> None:
    """The sides in picture and question are those of the text form, whose answer has the digit."""
    problem = perimeter_digit(random.Random(level), SIZE, level)
    sides = [*drawing.texts, *re.findall(r"\d+", problem.question)]
    names = ("AB", "BC", "CD", "DA")
    shown_sentences = {f"{name} = {side}" for name, side in zip(names, sides, strict=True)}
    assert shown_sentences <= set(problem.sentences)
    assert problem.answer == solve_sentences(problem.sentences)[-1]


KITE = {
    "A": (0.0, 1.0),
    "B": (0.6, 0.0),
    "C": (0.0, -1.2),
    "D": (-0.6, 0.0),
}


def test_a_form_that_no_family_has_is_drawn_as_it_is_said(drawing: Drawing) -> None:
    """A new family is sentences and places, and needs no drawing code."""
    form = DrawnForm(random.Random(1), SIZE, PLAIN_STYLE, KITE, "ABCD kite")
    assert [len(path) for path in drawing.lines] == [5]
    assert drawing.texts == ["A", "B", "C", "D"]
    drawing.clear()
    form.add_and_draw("AB = 2x + 1", "angle DAB = 80", "angle ABC = 5y")
    assert drawing.texts == ["2x + 1", "80°", "5y"]
    assert not drawing.lines
    assert form.sentences == ["ABCD kite", "AB = 2x + 1", "angle DAB = 80", "angle ABC = 5y"]


def test_a_line_that_a_sentence_names_first_is_drawn(drawing: Drawing) -> None:
    """The diagonal AC is no side, and is drawn when its length is said."""
    form = DrawnForm(random.Random(1), SIZE, PLAIN_STYLE, KITE, "ABCD kite")
    drawing.clear()
    form.add_and_draw("AC = 9")
    assert [len(path) for path in drawing.lines] == [2]


def test_what_is_only_noted_is_not_drawn(drawing: Drawing) -> None:
    """`note` adds sentences, and leaves the picture as it is."""
    form = DrawnForm(random.Random(1), SIZE, PLAIN_STYLE, KITE, "ABCD kite")
    drawing.clear()
    form.add("AB = 7", "find AC")
    assert not drawing.labels
    assert not drawing.lines
    assert form.sentences[-2:] == ["AB = 7", "find AC"]


def test_labels_that_would_touch_are_refused() -> None:
    """A second label of the side AB has no room."""
    form = DrawnForm(random.Random(1), SIZE, PLAIN_STYLE, KITE, "ABCD kite")
    form.add_and_draw("AB = 9")
    with pytest.raises(ClutteredError):
        form.add_and_draw("AB = 3x")  # in the same place


def test_rows_with_figures_can_be_paid_for_true_steps(tmp_path: Path) -> None:
    """Rows drawn with `figures` let the reward `steps` tell a true step from a false one.

    Their other columns are those of rows without it.
    """
    families = ("inscribed_arc", "corners")
    for name, options in {"plain": {}, "figures": {"figures": True}}.items():
        dataset_description = describe_synthetic(
            rows=4, test_rows=1, size=SIZE, families=families, **options
        )
        prepare_drawn(tmp_path / name, dataset_description)
    plain_rows = list(stored_rows(tmp_path / "plain", "train"))
    rows = list(stored_rows(tmp_path / "figures", "train"))
    for plain_row, row in zip(plain_rows, rows, strict=True):
        assert {name: row[name] for name in plain_row} == plain_row
        assert set(row) - set(plain_row) == {"facts", "figure"}
    arcs = [row for row in rows if row["meta"]["family"] == "inscribed_arc"]
    assert len(arcs) == 2
    for row in arcs:
        answer = int(row["answer"])
        assert row["facts"].splitlines()[-1] == "find arc AC"
        true_step = check_claims_if_possible(
            f"angle AOC = {answer}. \\boxed{{{answer}}}", row["figure"]
        )
        false_step = check_claims_if_possible(
            f"angle AOC = {answer + 1}. \\boxed{{5}}", row["figure"]
        )
        assert true_step is not None
        assert false_step is not None
        assert true_step.false_count == 0
        assert false_step.false_count == 1
    (corners, *_) = [row for row in rows if row["meta"]["family"] == "corners"]
    assert corners["facts"] is None, "a text form has no words for numbers that are only read"
    assert corners["figure"] is None
