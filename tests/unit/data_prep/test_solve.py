"""`data_prep solve`, rows of solved problems and variants: what is printed, written and refused."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import data_prep.variants
from adora_vl.config import AdoraScriptArguments
from adora_vl.conversion.problem import RawProblem
from adora_vl.data.dataset import (
    load_split,
    refuse_test_variants,
    stored_rows,
    write_manifest,
    write_split,
)
from adora_vl.data.loading import load_rows
from adora_vl.data.prompts import DEFAULT_PROMPT
from adora_vl.evals.inference.views import DESCRIPTION_BY_VIEW, apply_view
from adora_vl.evals.options import DataOptions
from adora_vl.evals.prepared import load
from adora_vl.geometry.figure import figure_as_json, figure_from_json, largest_residual_of
from adora_vl.geometry.solve_form import solve_form
from adora_vl.synthetic.generate import generate
from adora_vl.utils.errors import UserError
from data_prep.cli import main
from data_prep.question_words import question_in_words
from data_prep.solved_rows import features_with_figure, rows_of_solvable_forms
from data_prep.variants import OriginalProblem, make_variants
from tests.support.geometry_forms import logic_form
from tests.support.paths import REPOSITORY
from tests.support.pictures import encode_picture

# The drawn lines of a triangle, and the places of its points in pixels.
SIDES = ["AB", "BC", "CA"]
POINTS = {
    "A": [0.0, 200.0],
    "B": [300.0, 200.0],
    "C": [0.0, 10.0],
}


def form_record(facts: list[str], *question: str, **changed: object) -> dict[str, object]:
    """A logic form of the triangle ABC as its file has it: facts, a question, and changed keys."""
    record = {
        "points": POINTS,
        "lines": SIDES,
        "circles": [],
        "facts": facts,
        "question": list(question),
    }
    return record | changed


RIGHT_TRIANGLE_FACTS = [
    "Equals(LengthOf(Line(A, B)), 12)",
    "Equals(LengthOf(Line(A, C)), 5)",
    "Perpendicular(Line(A, B), Line(A, C))",
]
FORMS = {  # by number: two with an answer, an open one, one that contradicts itself, a rounded one
    "1": form_record(RIGHT_TRIANGLE_FACTS, "Find(LengthOf(Line(B, C)))"),
    "2": form_record(RIGHT_TRIANGLE_FACTS, "Find(AreaOf(Triangle($)))"),
    "3": form_record(RIGHT_TRIANGLE_FACTS[:1], "Find(LengthOf(Line(B, C)))"),
    "4": form_record(
        [*RIGHT_TRIANGLE_FACTS, "Equals(LengthOf(Line(B, C)), 20)"], "Find(LengthOf(Line(B, C)))"
    ),
    "2500": form_record(
        [*RIGHT_TRIANGLE_FACTS[1:], "Equals(MeasureOf(Angle(A, B, C)), 23)"],
        "Find(LengthOf(Line(A, B)))",
    ),
}


def write_forms(folder: Path, forms: Mapping[str, Any] = FORMS) -> Path:
    """Write logic forms by number into a file, and return its path."""
    path = folder / "forms.json"
    path.write_text(json.dumps(forms))
    return path


def test_labels_that_the_facts_contradict_are_listed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`solve` lists labels that a problem's facts contradict, and writes each problem's result.

    12 and 5 are the legs of a right triangle, so the third side is 13 and the area 30. Problem 2
    has the label 31; 3 has too few facts, 4 contradicts itself, and 2500 has no exact value.
    """
    golds = {"1": "13", "2": "31", "3": "9", "4": "13", "2500": "11.8"}
    table = tmp_path / "golds.jsonl"
    table.write_text(
        "".join(json.dumps({"id": f"some/test/{n}", "answer": a}) + "\n" for n, a in golds.items())
    )
    output = tmp_path / "faults.jsonl"
    arguments = [
        "solve",
        str(write_forms(tmp_path)),
        "--golds",
        str(table),
        "--output",
        str(output),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "answered: 3 of 5 (60.0%)" in printed
    assert printed.index("another answer than the label: 1") < printed.index(
        "facts that exclude each other: 1"
    )
    assert "2: label 31, value 30, determined by the facts" in printed
    rows = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    fields = [
        "id",
        "status",
        "value",
        "answer",
        "how",
        "assumed",
        "left_out",
        "gold",
        "agrees",
        "why",
    ]
    assert list(rows["1"]) == fields
    assert rows["1"]["answer"] == "13"
    assert rows["1"]["agrees"] is True
    assert rows["2"]["agrees"] is False
    assert rows["3"]["status"] == "open"
    assert rows["4"]["status"] == "conflict"
    assert rows["2500"]["answer"] is None
    assert rows["2500"]["agrees"] is True


def test_what_the_picture_shows_counts_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A problem whose right angle only the picture shows is answered with `--looks` alone.

    Its facts are two sides.
    """
    forms = {"1": form_record(RIGHT_TRIANGLE_FACTS[:2], "Find(LengthOf(Line(B, C)))")}
    for options, answered in (([], 0), (["--looks"], 1)):
        assert main(["solve", str(write_forms(tmp_path, forms)), *options]) == 0
        assert f"answered: {answered} of 1" in capsys.readouterr().out


def test_a_text_is_answered_with_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`solve` takes facts in sentences too, and draws the figure beside their file."""
    facts = tmp_path / "facts.txt"
    facts.write_text("triangle ABC\nAB = 3, BC = 4, right angle ABC\nfind AC\n")
    assert main(["solve", str(facts)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("AC = 5   determined by the facts")
    assert (tmp_path / "facts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("facts.txt", "AB paralel CD, find AB", "did you mean 'parallel'?"),
        ("forms.json", "{", "is not JSON"),
        ("forms.json", "[]", "has no logic forms"),
        ("forms.json", json.dumps({"7": {**FORMS["1"], "lines": 3}}), "problem '7'"),
        ("forms.json", json.dumps({"7": {"points": {}}}), "'lines' is missing"),
        ("forms.json", json.dumps({"7": {**FORMS["1"], "points": {"A": [1]}}}), "not two numbers"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    """A file that cannot be read is named, and no output is begun."""
    (tmp_path / name).write_text(content)
    assert main(["solve", str(tmp_path / name), "--output", str(tmp_path / "out.jsonl")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_a_damaged_archive_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """An archive that is cut off, is none, or has other bytes inside cannot be read."""
    archive = gzip.compress(json.dumps(FORMS).encode())
    damaged_archives = {
        "cut off": archive[:-12],
        "none": b"{}",
        "other bytes": archive[:15] + b"x" * 13,
    }
    for name, content in damaged_archives.items():
        with subtests.test(name):
            file = tmp_path / "forms.json.gz"
            file.write_bytes(content)
            assert main(["solve", str(file)]) == 2
            error = capsys.readouterr().err
            assert f"input: '{file}' cannot be read (" in error
            assert error.count("\n") == 1


def test_solved_problems_become_rows_with_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logic forms with an answer become rows with that answer and the solved figure.

    Three of the five forms of `FORMS` have one. They stand in the splits of the authors.
    """
    output = tmp_path / "geo"
    arguments = [
        "geometry3k",
        "--source",
        "facts",
        "--input",
        str(write_forms(tmp_path)),
        "--output",
        str(output),
    ]
    assert main([*arguments, "--workers", "1", "--keep-leaks"]) == 0
    assert "1 problem left out: they are open" in capsys.readouterr().out
    rows = {row["id"]: row for split in ("train", "test") for row in stored_rows(output, split)}
    assert set(rows) == {"geometry3k/train/1", "geometry3k/train/2", "geometry3k/test/2500"}
    assert rows["geometry3k/train/1"]["problem"] == "Find BC."
    assert rows["geometry3k/train/1"]["answer"] == "13"
    rounded = rows["geometry3k/test/2500"]
    assert rounded["problem"] == "Find AB. Round to the nearest hundredth."
    assert rounded["answer"] == "11.78"
    for row in rows.values():
        assert largest_residual_of(figure_from_json(row["figure"])) < 1e-6
        assert row["figure"] not in row["problem"]
        assert "figure" not in row["problem"]


def test_forms_without_questions_are_in_the_splits_of_the_authors(tmp_path: Path) -> None:
    """Logic forms are put into the authors' splits by their numbers.

    Those of Geometry3K are training up to 2100, validation from 2101 and test from 2401.
    """
    points = {"A": 0j, "B": 300 + 0j, "C": 190j}
    number_by_split = {"train": "2100", "validation": "2101", "test": "2401"}
    right_triangle = logic_form(points, SIDES, RIGHT_TRIANGLE_FACTS, "Find(LengthOf(Line(B, C)))")
    splits = rows_of_solvable_forms(
        dict.fromkeys(number_by_split.values(), right_triangle), questions=None
    )
    ids = {split: [read().id for read in rows.begin_reading()] for split, rows in splits.items()}
    assert ids == {
        split: [f"geometry3k/{split}/{number}"] for split, number in number_by_split.items()
    }


def test_a_stored_figure_that_misses_its_facts_is_refused() -> None:
    """A solved figure is read back as it was stored; with a moved point it is refused."""
    solved = solve_form(
        logic_form(
            {"A": 0j, "B": 300 + 0j, "C": 190j},
            SIDES,
            RIGHT_TRIANGLE_FACTS,
            "Find(LengthOf(Line(B, C)))",
        )
    )
    assert solved.figure is not None
    assert figure_from_json(figure_as_json(solved.figure)) == solved.figure
    moved_figure = replace(
        solved.figure, coordinates={**solved.figure.coordinates, "C": (9.0, 9.0)}
    )
    with pytest.raises(ValueError, match="does not fulfil its facts"):
        figure_from_json(figure_as_json(moved_figure))


def test_variants_are_decided_by_seed_and_number_and_solved_by_their_own_facts(
    tmp_path: Path,
) -> None:
    """Variants of a problem depend on seed and number alone, and their facts give their answers.

    Up to four are made of each problem, with the same kinds of facts and other numbers, whatever
    the limit and the number of workers. `15~3` is the third variant of `15`.
    """
    folder = tmp_path / "geo"
    source = [
        "geometry3k",
        "--source",
        "facts",
        "--input",
        str(write_forms(tmp_path)),
        "--output",
        str(folder),
    ]
    assert main([*source, "--workers", "1", "--keep-leaks"]) == 0
    rows = {}
    for name, options in (
        ("all", ["--workers", "1"]),
        ("some", ["--workers", "1", "--limit", "3"]),
        ("two", ["--workers", "2"]),
    ):
        output = tmp_path / name
        arguments = ["variants", str(folder), "--output", str(output), "--per", "4", "--seed", "5"]
        assert main([*arguments, *options]) == 0
        rows[name] = list(stored_rows(output, "train"))
    assert rows["all"] == rows["two"]
    assert rows["all"][:3] == rows["some"]
    assert len(rows["all"]) >= 6
    for row in rows["all"]:
        original, _, number = row["id"].partition("~")
        assert row["meta"]["family"] == "variant"
        assert row["meta"]["kind"] == original
        assert number.isdecimal()
        figure = figure_from_json(row["figure"])
        solved_again = solve_form(figure.form, try_looks=False)
        assert solved_again.status == "answered"
        assert float(solved_again.value) == pytest.approx(float(solve_form(figure.form).value))
        if solved_again.answer is not None:
            assert row["answer"] == solved_again.answer
        assert figure.form.facts != tuple(RIGHT_TRIANGLE_FACTS)
    code = main(
        [
            "variants",
            str(folder),
            "--output",
            str(tmp_path / "x"),
            "--per",
            "1",
            "--for-evaluation",
        ]
    )
    assert code == 0
    assert_refused_in_training(tmp_path / "x")


def test_problems_without_enough_variants_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints how many problems got fewer variants than were asked for.

    `make_variants` is replaced: it makes none of problem 0, one of 1 and two of 2.
    """
    folder = tmp_path / "geo"
    write_split(
        [{**row, "facts": None, "figure": row["id"]} for row in generate(3, size=112)],
        folder,
        "train",
        features=features_with_figure(),
    )
    description = {"source": "synthetic", "input": None, "revision": None, "arguments": {}}
    write_manifest(folder, description, {"train": 3})

    def make_variants(
        original: OriginalProblem, *, per: int, seed: int, split: str
    ) -> list[RawProblem]:
        """Make no variant of the problem 0, one of 1, and two of 2."""
        number = int(original.row_id[-1])
        return [raw_variant(f"{original.row_id}~{index}") for index in range(number)]

    monkeypatch.setattr(data_prep.variants, "make_variants", make_variants)
    arguments = ["variants", str(folder), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main([*arguments, "--per", "2"]) == 0
    output = capsys.readouterr().out
    assert "of 3 problems 1 have no variant and 1 fewer than 2: " in output
    assert "train 3 rows" in output


def raw_variant(variant_id: str) -> RawProblem:
    """Return a variant of a problem with this id, and a picture of a black square."""
    picture = Image.new("RGB", (60, 60), "white")
    picture.paste("black", (10, 10, 30, 30))
    return RawProblem(
        id=variant_id,
        split="train",
        source="variants",
        origin=variant_id,
        images=(encode_picture(picture),),
        problem=f"Find x in {variant_id}.",
        answer="5",
        extras={"facts": None, "figure": None},
    )


def assert_refused_in_training(folder: Path) -> None:
    """Assert that neither the folder nor its rows, from wherever they come, can be trained on."""
    script = AdoraScriptArguments(dataset_name=[str(folder)], dataset_train_split="test")
    with pytest.raises(UserError, match="written with --for-evaluation") as refusal:
        load_rows(script, folders=[str(folder)], seed=0)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    rows = load_split(folder, "test")
    with pytest.raises(UserError, match="train_dataset: has variants of a test split"):
        refuse_test_variants(rows, where="train_dataset:")


def test_no_prompt_and_no_view_shows_a_figure(tmp_path: Path) -> None:
    """No prompt of a shipped config shows the column `figure`, which has the solved coordinates.

    It does so in no view either: a view shows the model the picture, its facts in words, both, or a
    grey picture. `--keep-leaks` keeps problems that both splits have, since the forms are few.
    """
    folder = tmp_path / "geo"
    source = ["geometry3k", "--source", "facts", "--input", str(write_forms(tmp_path))]
    assert main([*source, "--output", str(folder), "--workers", "1", "--keep-leaks"]) == 0
    figures = [row["figure"] for row in stored_rows(folder, "train")]
    assert all(figures)
    prompts = [None, DEFAULT_PROMPT]
    for config in (REPOSITORY / "configs").rglob("*.yaml"):
        # The template of the prompts, such as `{problem}`.
        prompt = (yaml.safe_load(config.read_text()) or {}).get("adora_prompt")
        if isinstance(prompt, str):
            prompts.append(prompt)
    problem_count = 0
    for prompt in dict.fromkeys(prompts):
        options = DataOptions(data=str(folder), split="train")
        try:
            problems = load(options, prompt).problems
        except UserError:
            continue  # a template with columns that these rows lack
        for view in DESCRIPTION_BY_VIEW:
            for problem in apply_view(problems, view):
                problem_count += 1
                assert not any(figure in problem.prompt for figure in figures)
                # The key under which a stored figure has its coordinates.
                assert '"at"' not in problem.prompt
    # At least two problems were looked at in each view.
    assert problem_count >= 2 * len(DESCRIPTION_BY_VIEW)


def test_a_variant_lies_as_the_picture_of_its_original() -> None:
    """A variant has a level base if the picture of its original has, even if the solved one slants.

    The original is drawn as a square, but its angles make it a parallelogram.
    """
    # Drawn as a square with a level base, and by its angles a slanting parallelogram.
    points = {"A": 0j, "B": 200 + 0j, "C": 200 + 200j, "D": 200j}
    facts = [
        "Parallelogram(A,B,C,D)",
        "Equals(LengthOf(Line(A, B)), 9)",
        "Equals(LengthOf(Line(A, D)), 7)",
        "Equals(MeasureOf(Angle(D, A, B)), 52)",
    ]
    form = logic_form(points, ["AB", "BC", "CD", "DA", "AC"], facts, "Find(LengthOf(Line(A, C)))")
    solved = solve_form(form).figure
    assert solved is not None
    assert abs(solved.coordinates["A"][1] - solved.coordinates["B"][1]) > 0.1
    variants = make_variants(
        OriginalProblem("a", figure_as_json(solved)), per=3, seed=1, split="train"
    )
    assert variants
    for variant in variants:
        coordinates = figure_from_json(variant.extras["figure"]).coordinates
        assert coordinates["A"][1] == pytest.approx(coordinates["B"][1], abs=1e-6)
        assert coordinates["C"][1] > coordinates["A"][1]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("Find(AreaOf(Shaded(Sector($))))",), "Find the area of the shaded sector."),
        (("Circle(R)", "Find(MeasureOf(Arc(A,B)))"), "Find the measure of arc AB."),
        (("Equals(a,4)", "Find(TanOf(Angle(A)))"), "a = 4. Find tan A."),
        (
            ("Tangent(Line($),Circle($))", "Find(x)"),
            "Segments that appear to be tangent are tangent. Find x.",
        ),
        (("Isosceles(Triangle(A,B,C))", "Find(y)"), "Triangle ABC is isosceles. Find y."),
        (("Equals(MeasureOf(Angle(A,B,C)),40)", "Find(x)"), "Angle ABC = 40 degrees. Find x."),
        (("Beauty(A,B)", "Find(x)"), None),
        (("Circle(R)",), None),
    ],
)
def test_a_question_is_written_in_words_or_not_at_all(
    question: tuple[str, ...], words: str | None
) -> None:
    assert question_in_words(logic_form({"A": 0j}, [], [], question)) == words
