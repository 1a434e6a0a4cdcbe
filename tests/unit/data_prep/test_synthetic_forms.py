"""Each family of drawn problems has the answer that its picture and question determine.

What is drawn is noted on its way to the picture, written down in the text form, and solved. The
families of reading (numbers at corners, knights) have nothing that a text form can say.
"""

import itertools
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from adora_vl.geometry.text import form_of_text
from adora_vl.geometry.verdict import verdict
from adora_vl.rewards.grade import grade
from adora_vl.synthetic.drawing import PLAIN, Canvas, Point, Sketch, Style
from adora_vl.synthetic.families import FAMILIES, LETTERED, SyntheticProblem
from adora_vl.synthetic.perimeter import perimeter_digit

SIZE = 224  # pixels; large enough for all labels of a lettered figure
LEVELS = (1, 2, 3)
SEEDS = (3, 4, 5)


@dataclass
class Drawing:
    """What was drawn: facts in words, labels with their places, and the number of dots."""

    facts: list[str] = field(default_factory=list)
    labels: list[tuple[str, Point]] = field(default_factory=list)
    dots: int = 0

    @property
    def texts(self) -> list[str]:
        """The labels without their places."""
        return [text for text, _ in self.labels]

    def note_shape(
        self,
        sketch: Sketch,
        rng: random.Random,
        size: int,
        style: Style,
        places: dict[str, Point],
        *lines: str,
        circle: str = "",
        letters: str = "",
    ) -> None:
        """Note the outline; a problem whose labels would touch is drawn again from here."""
        self.facts.clear()
        outline = lines[0].removesuffix(lines[0][0])
        if circle:
            self.facts.append(f"circle O: {', '.join('ABC')}")
        elif len(outline) == 3:
            self.facts.append(f"triangle {outline}")
        if outline == "ACD":
            self.facts += ["B on AC", "E on AD"]

    def note_sides(self, sketch: Sketch, **values: object) -> None:
        """Note what is written at sides."""
        self.facts += [f"{names} = {value}" for names, value in values.items()]

    def note_angles(self, sketch: Sketch, *reach: float, **texts: str) -> None:
        """Note what is written into angles."""
        self.facts += [f"angle {path} = {text.rstrip('°')}" for path, text in texts.items()]

    def note_right_angle(self, sketch: Sketch, path: str) -> None:
        """Note a small square."""
        self.facts.append(f"right angle {path}")

    def note_places(self, sketch: Sketch) -> None:
        """Note where the points lie, in thousandths of the picture."""
        for name, place in sketch._at.items():
            if len(name) == 1:
                self.facts.append(f"{name} at {1000 * place.real:.1f}, {1000 * place.imag:.1f}")

    def note_label(self, canvas: Canvas, text: str, centre: Point) -> None:
        """Note any text of the picture."""
        self.labels.append((text, centre))

    def note_dot(self, canvas: Canvas, centre: Point) -> None:
        """Count a dot."""
        self.dots += 1


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Drawing:
    """Note what a family draws from now on."""
    notes = Drawing()

    def note_before(owner: type, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def noted(self: object, *words: object, **texts: object) -> object:
            note(self, *words, **texts)
            return original(self, *words, **texts)

        monkeypatch.setattr(owner, name, noted)

    note_before(Sketch, "__init__", notes.note_shape)
    note_before(Sketch, "sides", notes.note_sides)
    note_before(Sketch, "angles", notes.note_angles)
    note_before(Sketch, "right_angle", notes.note_right_angle)
    note_before(Sketch, "picture", notes.note_places)
    note_before(Canvas, "label", notes.note_label)
    note_before(Canvas, "dot", notes.note_dot)
    return notes


def solved(facts: list[str]) -> str:
    """The answer of facts in words, in its short form."""
    result = verdict(form_of_text("\n".join(facts)))
    assert result.status == "answered", (facts, result.why)
    return result.answer or str(result.value)


def assert_answer(problem: SyntheticProblem, facts: list[str]) -> None:
    """Assert that the facts determine the problem's answer."""
    answer = solved(facts)
    result = grade(f"\\boxed{{{answer}}}", problem.answer)
    assert result.verdict == "correct", (facts, answer, problem.answer)


def facts_of(question: str) -> list[str]:
    """What the question of a lettered family says, in the text form."""
    text = question.replace("so that the quadrilateral is a parallelogram", "")
    for command, words in (
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"m \\widehat\{(.*?)\}", r"arc \1"),
        (r"m \\angle", "angle"),
        (r"\\parallel", "parallel"),
        (r"In \\odot O, find", "find"),
        (r"(?<=[A-Z]) (?=[A-Z])", ""),
        (r"^If ", ""),
    ):
        text = re.sub(command, words, text)
    facts = [part.strip(" .") for part in re.split(r",| and (?=A)", text)]
    if "quadrilateral" in question:
        facts.append("ABCD parallelogram")
    return [fact.replace("Find", "find").removeprefix("and ") for fact in facts if fact]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LETTERED)
def test_a_lettered_picture_and_its_question_determine_the_answer(
    drawing: Drawing, name: str, level: int
) -> None:
    for seed in SEEDS:
        problem = LETTERED[name](random.Random(seed), SIZE, level, PLAIN)
        assert_answer(problem, [*drawing.facts, *facts_of(problem.question)])


def isosceles(drawing: Drawing, problem: SyntheticProblem) -> list[str]:
    """Two equal sides meet at the angle that is written."""
    (apex,) = drawing.texts
    return ["triangle ABC", "AB = AC", f"angle BAC = {apex}", "find angle ABC"]


def polygon(drawing: Drawing, problem: SyntheticProblem) -> list[str]:
    """Dots stand at the corners, and show how many there are."""
    return [f"regular polygon {string.ascii_uppercase[: drawing.dots]}", "find angle ABC"]


def right_triangle(drawing: Drawing, problem: SyntheticProblem) -> list[str]:
    """Both legs have a label."""
    down, across = drawing.texts
    return ["triangle ABC", "right angle ABC", f"AB = {down}", f"BC = {across}", "find AC"]


def crossing(drawing: Drawing, problem: SyntheticProblem) -> list[str]:
    """The angle above is written, and x stands below or at the right."""
    above, unknown = drawing.labels
    sector = "CEB" if unknown[1][1] > 0.7 else "DEB"
    corners = ["A at 0, 0", "B at 100, 90", "C at 0, 90", "D at 100, 0", "AB and CD meet at E"]
    return [*corners, f"angle AED = {above[0]}", f"find angle {sector}"]


def circle(drawing: Drawing, problem: SyntheticProblem) -> list[str]:
    """The radius is drawn with its length."""
    (radius,) = drawing.texts
    measure = "circumference" if "circumference" in problem.question else "diameter"
    return ["circle O: A", f"radius O = {radius}", f"find {measure} O"]


PLAIN_FORMS = {
    "isosceles": isosceles,
    "polygon": polygon,
    "right_triangle": right_triangle,
    "crossing": crossing,
    "circle": circle,
}


def test_each_plain_family_has_a_form() -> None:
    assert set(PLAIN_FORMS) == set(FAMILIES)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLAIN_FORMS)
def test_a_plain_picture_and_its_question_determine_the_answer(
    drawing: Drawing, name: str, level: int
) -> None:
    kinds = set()
    for seed in itertools.chain(SEEDS, range(10, 16)):
        drawing.labels.clear()
        drawing.dots = 0
        problem = FAMILIES[name](random.Random(seed), SIZE, level, PLAIN)
        if seed in SEEDS or problem.kind not in kinds:
            assert_answer(problem, PLAIN_FORMS[name](drawing, problem))
        kinds.add(problem.kind)


@pytest.mark.parametrize("level", LEVELS)
def test_the_last_digit_of_a_perimeter_is_that_of_the_figure(drawing: Drawing, level: int) -> None:
    problem = perimeter_digit(random.Random(level), SIZE, level)
    sides = [*drawing.texts, *re.findall(r"\d+", problem.question)]
    names = ("AB", "BC", "CD", "DA")
    lengths = [f"{name} = {side}" for name, side in zip(names, sides, strict=True)]
    perimeter = solved(["ABCD quadrilateral", *lengths, "find perimeter ABCD"])
    assert problem.answer == perimeter[-1]
