"""Drawn problems: equal bytes for equal arguments, no diagram in two splits, answers that the
picture determines.
"""

import hashlib
import io
import json
import math
import random
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.data.dataset import Row, read_manifest, stored_rows
from adora_vl.data.images import diagram_hash
from adora_vl.rewards import canonical_gold, grade, verify_gold
from adora_vl.rewards.answer import parse_value
from adora_vl.synthetic import generated as prepare
from adora_vl.synthetic import knights
from adora_vl.synthetic.drawing import STYLES, Canvas, Point
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME
from adora_vl.synthetic.generate import FAMILY_BY_NAME, LEVELS, generate, split_of
from adora_vl.synthetic.generated import describe_synthetic, ensure_drawn, prepare_drawn
from adora_vl.synthetic.lettered import LETTERED_FAMILY_BY_NAME
from adora_vl.utils.errors import UserError
from data_prep.cli import main
from tests.support.cases import CaseFolder
from tests.support.disk import file_contents

ROWS = 100
TEST_ROWS = 40


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("synthetic") / "data"
    prepare_drawn(output, describe_synthetic(rows=ROWS, test_rows=TEST_ROWS))
    return output


def _rows(folder: Path) -> list[Row]:
    return [*stored_rows(folder, "train"), *stored_rows(folder, "test")]


def _diagrams(folder: Path, split: str) -> set[str]:
    images = (row["images"][0]["bytes"] for row in stored_rows(folder, split))
    return {diagram_hash(Image.open(io.BytesIO(encoded))) for encoded in images}


def test_the_same_arguments_give_the_samefiles(prepared: Path, tmp_path: Path) -> None:
    prepare_drawn(tmp_path / "again", describe_synthetic(rows=ROWS, test_rows=TEST_ROWS))
    assert file_contents(prepared) == file_contents(tmp_path / "again")


def test_no_diagram_stands_in_both_splits_even_across_seeds_and_arguments(
    prepared: Path, tmp_path: Path
) -> None:
    train = _diagrams(prepared, "train")
    held_out = _diagrams(prepared, "test")
    for seed in (1, 2):
        output = tmp_path / str(seed)
        prepare_drawn(output, describe_synthetic(rows=ROWS, test_rows=TEST_ROWS + seed, seed=seed))
        train |= _diagrams(output, "train")
        held_out |= _diagrams(output, "test")
    assert len(train) == 3 * ROWS, "another seed gives other diagrams"
    assert train.isdisjoint(held_out)


def test_every_row_is_sound(prepared: Path) -> None:
    rows = _rows(prepared)
    assert len({row["id"] for row in rows}) == ROWS + TEST_ROWS
    assert {row["meta"]["family"] for row in rows} == set(PLAIN_FAMILY_BY_NAME)
    for row in rows:
        assert verify_gold(row["answer"]) is None, row["id"]
        assert row["answer"] == canonical_gold(row["answer_raw"]), row["id"]
        assert grade(row["meta"]["solution"], row["answer"]).verdict == "correct", row["id"]
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        assert image.mode == "RGB"
        assert image.size == (56, 56)
        assert "<image>" not in row["problem"]
        assert split_of(image) == row["split"], (
            "no seed or size can put a held-out diagram into training"
        )


def test_workings_of_one_answer_differ_in_length_by_wording() -> None:
    """Else the length of an answer counts its digits, and ADORA's criterion attenuates by that."""
    words: dict[tuple[str, str, str], set[int]] = {}
    for row in generate(600):
        meta = row["meta"]
        for name in ("solution", "slip"):
            digits_alike = re.sub(r"\d+", "0", meta[name])
            words.setdefault((meta["family"], meta["kind"], name), set()).add(
                len(digits_alike.split())
            )
    assert len(words) == 14, words
    assert all(len(lengths) >= 2 for lengths in words.values()), words


def test_a_polygon_stands_on_a_side_with_a_dot_at_each_corner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of the tiny one's size can count the sides of such a polygon."""
    pictures = _watched(monkeypatch)
    dots = list[Point]()
    monkeypatch.setattr(Canvas, "dot", lambda self, centre: dots.append(centre))
    for number in range(20):
        dots.clear()
        FAMILY_BY_NAME["polygon"](random.Random(number), 56, 1, STYLES["plain"])
        (corners,) = pictures[-1].lines
        assert list(corners) == dots
        (x, y), (u, v) = sorted(corners, key=lambda corner: -corner[1])[:2]
        assert abs(v - y) <= math.tan(math.radians(4.01)) * abs(u - x)


def test_wrong_arguments_end_with_code_2_one_line_and_no_output(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    cases = [
        ({"--families": "circel"}, "did you mean 'circle'?"),
        (
            {"--families": "triangle_angle"},
            "size: 56 is too small for the letters of 'triangle_angle'",
        ),
        ({"--level": "2"}, "size: 56 is too small for the numbers of level 2"),
        ({"--level": "4"}, "--level: '4' is not a whole number from 1 to 3"),
        ({"--styles": "blod"}, "unknown style 'blod'; did you mean 'bold'?"),
        ({"--choices": "1"}, "--choices: '1' is not a whole number from 2 to 8"),
    ]
    for changed, expected in cases:
        with case_folder(f"{changed!r:.80}") as folder:
            options = {"--output": str(folder / "out"), "--rows": "4", **changed}
            assert (
                main(["synthetic", *[word for option in options.items() for word in option]]) == 2
            )
            error = capsys.readouterr().err
            assert error.startswith("error: ")
            assert error.count("\n") == 1
            assert expected in error
            assert not list(folder.iterdir())


def test_what_is_drawn_is_made_only_where_something_is_missing_or_another(tmp_path, monkeypatch):
    folder = tmp_path / "parent" / "data"

    def ensured(rows: int = 4) -> int:
        """When the folder was made."""
        assert ensure_drawn(folder, describe_synthetic(rows=rows, test_rows=2)) == folder
        return (folder / "manifest.json").stat().st_mtime_ns

    first = ensured()
    assert ensured() == first
    (lost,) = folder.glob("data/test-*")
    lost.unlink()
    assert ensured() != first
    assert lost.is_file()
    ensured(rows=5)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["counts"] == {"train": 5, "test": 2}
    older = ensured(rows=5)
    monkeypatch.setattr("adora_vl.synthetic.generated.SYNTHETIC_REVISION", "another")
    assert ensured(rows=5) != older, "of older drawing code"


# What the revisions stand for. Where this test fails, equal arguments give other rows than before.
# If so intended, the revision in adora_vl/synthetic/generated.py has to change too, so that no run
# resumes on data that changed under it.
_ROWS_OF = {
    prepare.SYNTHETIC_REVISION: "02b6374e669f8045b791dbca52d34f0204cd0a220b642bc1436b3c7495f32235",
    prepare.KNIGHTS_REVISION: "9577b2e7929d3d0b5131ddfa636eaa6dd0d44b594e340ac1a3bda7828f089798",
}


def test_a_revision_stands_for_the_same_rows() -> None:
    drawn = [
        *generate(200, split="train", seed=1, size=56),
        *generate(50, split="test", size=112, level=2, choices=4),
    ]
    digests = {
        prepare.SYNTHETIC_REVISION: _digest(drawn),
        prepare.KNIGHTS_REVISION: _digest(knights.generate(100, split="test", seed=1)),
    }
    assert digests == _ROWS_OF


def _digest(rows: Iterable[Any]) -> str:
    """Hash texts and pixels.

    Pillow draws alike on every processor; another Pillow may not, so the pins decide.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            repr([row[key] for key in ("id", "problem", "answer", "choices", "meta")]).encode()
        )
        for image in row["images"]:
            digest.update(image.tobytes())
    return digest.hexdigest()


# A digest for each family and level, of the code that drew each family by itself.
_DRAWN_PROBLEMS = json.loads(Path(__file__).with_name("drawn_problems.json").read_text())
_PINNED_TEXTS = ("question", "answer", "solution", "slip", "goal", "shapes", "kind")


def _digest_of_problems(family: str, level: int) -> str:
    """Hash texts and pixels of a family's problems, and how far they moved the generator."""
    digest = hashlib.sha256()
    for seed, style in enumerate(("plain", "plain", "board")):
        rng = random.Random(seed)
        problem = FAMILY_BY_NAME[family](rng, 224, level, STYLES[style])
        texts = [getattr(problem, name) for name in _PINNED_TEXTS]
        digest.update(repr(texts).encode())
        digest.update(problem.image.tobytes())
        # One draw more or less would change each row that follows.
        digest.update(repr(rng.random()).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("family", FAMILY_BY_NAME)
def test_every_family_draws_the_same_problems_as_ever(family: str) -> None:
    """Where this fails on purpose, `SYNTHETIC_REVISION` has to change with the digests."""
    digests = {str(level): _digest_of_problems(family, level) for level in LEVELS}
    assert digests == _DRAWN_PROBLEMS[family]


def test_what_is_drawn_never_replaces_another_dataset(tmp_path: Path) -> None:
    prepare_drawn(tmp_path / "data", describe_synthetic(rows=2, test_rows=0))
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"source": "synthetic"', '"source": "geometry3k/hub"')
    )
    with pytest.raises(UserError, match="holds 'geometry3k/hub', not synthetic data"):
        ensure_drawn(tmp_path / "data", describe_synthetic(rows=2, test_rows=0))


def test_the_rows_that_the_shipped_tiny_model_learned_from_never_change() -> None:
    """A change here means `make tiny-model`."""
    assert (
        _digest(generate(10, seed=1000))
        == "7aa6d9d3d9289cc165e85378fc043423056cb59e5cae9faee469e7848b2fbad7"
    )


def test_lettered_problems_have_golds_that_verify_and_choices_of_which_one_is_right(
    subtests: pytest.Subtests,
) -> None:
    for level in LEVELS:
        with subtests.test(f"{level}"):
            rows = list(
                generate(
                    25,
                    size=168,
                    families=tuple(LETTERED_FAMILY_BY_NAME),
                    level=level,
                    choices=4,
                    styles=tuple(STYLES),
                )
            )
            letters = set()
            for row in rows:
                assert verify_gold(row["answer"], row["choices"]) is None, row
                assert grade(row["meta"]["solution"], row["answer"]).verdict == "correct", row
                assert len(row["choices"]) == 4
                boxes = [f"\\boxed{{{choice}}}" for choice in row["choices"]]
                right = [grade(box, row["answer"]).verdict == "correct" for box in boxes]
                assert right.count(True) == 1
                assert right.index(True) == "ABCD".index(row["answer_raw"])
                letters.add(row["answer_raw"])
                assert split_of(row["images"][0]) == "train", "no diagram of the test split"
            assert letters == set("ABCD")
            assert {row["meta"]["family"] for row in rows} == set(LETTERED_FAMILY_BY_NAME)


def test_styles_change_the_picture_and_nothing_else() -> None:
    pictures = {}
    for style in STYLES:
        problem = FAMILY_BY_NAME["triangle_angle"](random.Random(1), 168, 2, STYLES[style])
        pictures[diagram_hash(problem.image)] = (problem.question, problem.answer)
    assert len(pictures) == len(STYLES)
    assert len(set(pictures.values())) == 1


def test_families_levels_styles_and_choices_from_the_command_line(tmp_path: Path) -> None:
    command = [
        "synthetic",
        "--output",
        str(tmp_path / "out"),
        "--rows",
        "4",
        "--test-rows",
        "2",
        "--size",
        "224",
    ]
    command += [
        "--families",
        "triangle_angle, circle",
        "--level",
        "3",
        "--styles",
        "board,pencil",
        "--choices",
        "4",
    ]
    assert main([*command, "--seed", "3"]) == 0
    rows = _rows(tmp_path / "out")
    assert [row["meta"]["family"] for row in rows[:3]] == [
        "triangle_angle",
        "circle",
        "triangle_angle",
    ]
    assert Image.open(io.BytesIO(rows[0]["images"][0]["bytes"])).size == (224, 224)
    assert all(len(row["choices"]) == 4 and row["answer_raw"] in "ABCD" for row in rows)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest["arguments"]["level"] == 3
    assert manifest["arguments"]["styles"] == ["board", "pencil"]


class _Drawn:
    """One picture as the drawing calls tell it: labels with their places, and right angles."""

    def __init__(self) -> None:
        self.labels: list[tuple[str, Point]] = []
        self.lines: list[tuple[Point, ...]] = []

    def points(self) -> dict[str, Point]:
        """Return where each capital letter stands."""
        return {text: at for text, at in self.labels if re.fullmatch("[A-Z]", text)}

    def numbers(self) -> list[int]:
        return [int(text.rstrip("°")) for text, _ in self.labels if re.fullmatch(r"\d+°?", text)]

    def values(self) -> list[str]:
        return [text for text, _ in self.labels if not re.fullmatch("[A-Z]", text)]

    def at_side(self, ends: str) -> str:
        """The value that stands nearest to the middle between two letters."""
        points = self.points()
        x, y = points[ends[0]]
        u, v = points[ends[1]]
        middle = ((x + u) / 2, (y + v) / 2)
        return min(self._others(), key=lambda label: math.dist(label[1], middle))[0]

    def at_corner(self, letter: str) -> str:
        """The value that stands nearest to a letter."""
        return min(self._others(), key=lambda label: math.dist(label[1], self.points()[letter]))[0]

    def _others(self) -> list[tuple[str, Point]]:
        return [label for label in self.labels if not re.fullmatch("[A-Z]", label[0])]


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[_Drawn]:
    """The pictures from now on, in the order in which they are begun."""
    pictures: list[_Drawn] = []
    start = Canvas.__init__
    label = Canvas.label
    line = Canvas.line

    def begun(self: Canvas, *arguments: Any) -> None:
        self.drawn = _Drawn()  # type: ignore[attr-defined]
        pictures.append(self.drawn)  # type: ignore[attr-defined]
        start(self, *arguments)

    def labelled(self: Canvas, text: str, centre: Point) -> None:
        before = self.picture()
        label(self, text, centre)
        assert self.picture() != before, f"{text} cannot be seen"
        self.drawn.labels.append((text, centre))  # type: ignore[attr-defined]

    def lined(self: Canvas, *points: Point, closed: bool = False) -> None:
        self.drawn.lines.append(points)  # type: ignore[attr-defined]
        line(self, *points, closed=closed)

    monkeypatch.setattr(Canvas, "__init__", begun)
    monkeypatch.setattr(Canvas, "label", labelled)
    monkeypatch.setattr(Canvas, "line", lined)
    return pictures


def _solved_for_x(text: str, value: float) -> float:
    """x in `3x + 10 = value`."""
    match = re.fullmatch(r"(\d*)x(?: ([+-]) (\d+))?", text)
    assert match, text
    added = int(match[3] or 0) * (-1 if match[2] == "-" else 1)
    return (value - added) / int(match[1] or 1)


def _recomputed(family: str, question: str, drawn: _Drawn) -> float:
    """The answer from the question and what is drawn alone, by other formulas where there are any."""
    numbers = drawn.numbers()
    asked_x = "x" in question
    if family == "isosceles":
        return 90 - numbers[0] / 2
    if family == "polygon":
        return 180 - 360 / len(drawn.lines[0])
    if family == "right_triangle":
        return math.hypot(*numbers)
    if family == "crossing":
        (_, first_place), (_, second_place) = drawn.labels
        return numbers[0] if abs(first_place[0] - second_place[0]) < 0.2 else 180 - numbers[0]
    if family == "perimeter":
        return (sum(numbers) + sum(map(int, re.findall(r"\d+", question)))) % 10
    if family == "circle":
        return 2 * numbers[0] * (math.pi if "circumference" in question else 1)
    if family == "right_triangle_side":
        if asked_x:  # x at A C is opposite of the angle at B, the right angle is at C
            angle = math.radians(int(drawn.at_corner("B").rstrip("°")))
            return int(drawn.at_side("AB")) * (
                math.sin(angle) if drawn.at_side("AC") == "x" else math.cos(angle)
            )
        if question == "Find A B.":
            return math.hypot(int(drawn.at_side("AC")), int(drawn.at_side("BC")))
        return math.sqrt(int(drawn.at_side("AB")) ** 2 - int(drawn.at_side("AC")) ** 2)
    if family == "triangle_angle":
        if not asked_x:
            return 180 - sum(numbers)
        first_text, second_text = [text for text in drawn.values() if "x" in text]
        at_0 = [-_solved_for_x(text, 0) * _factor(text) for text in (first_text, second_text)]
        return (180 - numbers[0] - sum(at_0)) / (_factor(first_text) + _factor(second_text))
    if family == "inscribed_arc":
        if asked_x:
            (text,) = [text for text in drawn.values() if "x" in text]
            return _solved_for_x(text, numbers[0] / 2)
        return numbers[0] / 2 if "angle" in question else 2 * numbers[0]
    if family == "parallel_segment":
        if sides := re.search(r"A D = (\d+), A B = (\d+), and A E = (\d+)", question):
            ad, ab, ae = map(int, sides.groups())
            return ab * ad / ae - ab
        ab = int(drawn.at_side("AB"))
        ae = int(drawn.at_side("AE"))
        ed = int(drawn.at_side("ED"))
        bc = ab / ae * ed
        return _solved_for_x(drawn.at_side("BC"), bc) if asked_x else bc
    assert family == "parallelogram_side"
    left_text = drawn.at_side("AB")
    right = drawn.at_side("CD")
    if right.isdigit():
        return _solved_for_x(left_text, int(right))
    at_0 = [-_solved_for_x(text, 0) * _factor(text) for text in (left_text, right)]
    return (at_0[1] - at_0[0]) / (_factor(left_text) - _factor(right))


def _factor(text: str) -> int:
    match = re.match(r"(\d*)x", text)
    assert match, text
    return int(match[1] or 1)


def test_the_picture_with_the_question_determines_the_answer(monkeypatch, subtests):
    """Every number that is needed is drawn, or stands in the question, apart from the others and
    inside.
    """
    pictures = _watched(monkeypatch)
    for family, level in product(
        FAMILY_BY_NAME.keys() - {"corners"}, LEVELS
    ):  # that one is no figure
        with subtests.test(f"{family}, level {level}"):
            answers: dict[tuple[str, str], str] = {}
            for number in range(8):
                problem = FAMILY_BY_NAME[family](
                    random.Random(f"{family}{level}{number}"), 224, level, STYLES["plain"]
                )
                written = parse_value(problem.answer).number
                assert written is not None
                recomputed = _recomputed(family, problem.question, pictures[-1])
                assert math.isclose(float(written.value), recomputed, rel_tol=1e-9), (
                    problem.question,
                    pictures[-1].labels,
                )
                key = (diagram_hash(problem.image), problem.question)
                assert answers.setdefault(key, problem.answer) == problem.answer
                places = [label_place for _, label_place in pictures[-1].labels]
                assert all(0.01 < x < 0.99 and 0.01 < y < 0.99 for x, y in places)
                assert all(
                    math.dist(label, earlier_label) > 0.05
                    for n, label in enumerate(places)
                    for earlier_label in places[:n]
                )
