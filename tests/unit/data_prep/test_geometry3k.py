"""Geometry3K from its authors' folders and zip files, and from tables: rows as promised, mistakes
named.
"""

import json
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value
from PIL import Image

from adora_vl.data.dataset import load_split, schema, stored_rows
from adora_vl.geometry.logic_form import read_form_from_record
from data_prep.cli import main
from data_prep.geometry3k_folders import rows_of_folders
from data_prep.logic_forms import facts_in_words
from data_prep.problem_text import mend_latex
from data_prep.redraw import can_be_drawn, draw_form
from tests.support.cases import CaseFolder
from tests.support.geometry3k import (
    HUB_FEATURES,
    open_stored_image,
    read_only_row,
    read_quarantined_rows,
    run_prepare_geometry3k,
    stderr_of_refusal,
    write_hub_table,
    write_problem_folder,
)
from tests.support.pictures import draw_figure, encode_picture, half_black_picture


def write_half_transparent_problem(
    root: Path, split: str = "train", number: int = 7, **changed: Any
) -> Path:
    """Write the folder of one problem, whose picture is half transparent."""
    return write_problem_folder(
        root, split, number, encode_picture(half_black_picture()), **changed
    )


def test_the_real_problems_are_read_whole(geometry3k_raw: Path, tmp_path: Path) -> None:
    """Six real problems of the authors' training split are read with all that a folder has."""
    assert run_prepare_geometry3k("intergps", geometry3k_raw, tmp_path / "out") == 0
    dataset = load_split(tmp_path / "out", "train")
    columns = {"facts": Value("string"), "figure": Value("string")}
    assert dataset.features == {**schema(), **columns}
    facts = dataset["facts"]
    assert facts[3].endswith("BI is perpendicular to BD.")
    assert "Drawn segments: EB, DC." in facts[5]
    assert dataset["id"] == [f"geometry3k/train/{number}" for number in range(11, 17)]
    assert dataset["answer"] == ["80", "13", "9", "48", "5\\sqrt{3}", "10"]
    assert dataset["answer_raw"] == ["D", "B", "A", "B", "C", "B"]
    assert (
        dataset[0]["problem"]
        == "In \\odot X, A B = 30, C D = 30, and m \\widehat{C Z} = 40. Find m \\widehat{A B}."
    )
    assert dataset[4]["choices"] == ["5", "5 \\sqrt { 2 }", "5 \\sqrt { 3 }", "10"]
    assert dataset[5]["meta"]["goal"] == "Length"
    assert dataset[5]["meta"]["shapes"] == [
        "Line",
        "Triangle",
    ]
    for row in dataset:
        image = row["images"][0]
        assert image.mode == "RGB"
        assert image.getextrema() != ((0, 0),) * 3, f"{row['id']} is black on black"
        assert max(image.getpixel((0, image.height - 1))) > 200, f"{row['id']} has no white corner"


FORM_FACTS = [
    r"Equals(LengthOf(Line(A, B)), 5\sqrt{2})",
    "Equals(LengthOf(Line(A, D)), LengthOf(Line(D, B)))",
    "Equals(MeasureOf(Angle(B, A, C)), 2x+1)",
    "Equals(MeasureOf(Angle(A, C, B)), MeasureOf(angle 1))",
    "Equals(MeasureOf(Angle(C, A, D)), MeasureOf(Angle(D, B, C)))",
    "Equals(MeasureOf(Arc(A, B)), 90)",
    "Equals(AreaOf(Triangle(A, B, C)), 12)",
    "Perpendicular(Line(C, D), Line(A, B))",
    "Parallel(Line(A, C), Line(E, B))",
    "PointLiesOnLine(D, Line(A, B))",
    *(f"PointLiesOnCircle({point}, Circle(O, radius_0_0))" for point in "AB"),
]
FORM_POINTS = {
    "A": [0, 200],
    "B": [200, 200],
    "C": [100, 20],
    "D": [100, 200],
    "E": [290, 40],
    "O": [100, 200],
}
FORM_RECORD: dict[str, Any] = {
    "lines": ["AB", "BC", "CA", "CD", "EB"],
    "circles": ["O"],
    "points": FORM_POINTS,
    "facts": FORM_FACTS,
    "question": ["Find(x)"],
}


def test_every_fact_has_words_and_a_mark_in_the_redrawn_picture() -> None:
    """Each fact of a logic form has its words in the text and its mark in the redrawn picture.

    So a form without it has another text and another picture.
    """
    words = facts_in_words(read_form_from_record(FORM_RECORD), "Find x.")
    full_drawing = draw_form(read_form_from_record(FORM_RECORD))
    assert words is not None
    assert "A, D and B lie on one line" in words.replace("B, D and A", "A, D and B")
    assert "Angle BAC = 2x+1 degrees. Angle ACB = angle 1. " in words
    assert words.endswith("AC is parallel to EB.")
    for fact in FORM_FACTS:
        other_facts = [kept_fact for kept_fact in FORM_FACTS if kept_fact != fact]
        form_without_fact = read_form_from_record({**FORM_RECORD, "facts": other_facts})
        # A point on a line or a circle is drawn where the form places it, and needs no mark.
        has_no_mark = fact.startswith("PointLies")
        assert draw_form(form_without_fact).tobytes() != full_drawing.tobytes() or has_no_mark, fact
        assert facts_in_words(form_without_fact, "Find x.") != words, fact


def test_a_form_whose_question_or_facts_have_no_words_has_none() -> None:
    """A logic form with a question or fact that has no words gets no text at all.

    Examples are a shaded area, a name that no fact has, and what cannot be parsed.
    """
    questions = (
        "Find(AreaOf(Shaded(Shape($))))",
        "Find(z)",
        "Find(LengthOf(Line(A, Q)))",
        "Find(MeasureOf(Angle(2)))",
        "Find(",
    )
    for question, text in [
        (["Find(x)"], "Find the shaded area."),
        *(([question_form], "Find it.") for question_form in questions),
    ]:
        form = read_form_from_record({**FORM_RECORD, "question": question})
        assert facts_in_words(form, text) is None
    with_broken_fact = read_form_from_record(
        {**FORM_RECORD, "facts": ["Equals(LengthOf(Line(A, B"]}
    )
    assert facts_in_words(with_broken_fact, "Find x.") is None


def test_a_form_with_a_point_outside_of_the_picture_cannot_be_drawn() -> None:
    points = {**FORM_POINTS, "E": [-1, -1]}
    assert can_be_drawn(read_form_from_record(FORM_RECORD))
    assert not can_be_drawn(read_form_from_record({**FORM_RECORD, "points": points}))


def test_problems_are_redrawn_from_logic_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Problems are made of logic forms, with redrawn pictures, and of the texts with their numbers.

    One file has the forms by number, another the texts. The second form has no points, so it cannot
    be drawn, and is left out.
    """
    forms = tmp_path / "forms.json"
    texts = tmp_path / "test.jsonl"
    forms.write_text(
        json.dumps({"2401": FORM_RECORD, "2402": {**FORM_RECORD, "points": {}}, "7": FORM_RECORD})
    )
    rows = [
        {
            "images": [f"x/{at}/i.png"],
            "messages": [{"role": "user", "content": f"<image>\nIn {at} find x."}],
            "solution": "5",
        }
        for at in ("test/2401", "test/2402", "train/7")
    ]
    texts.write_text("\n".join(map(json.dumps, rows)))
    assert (
        run_prepare_geometry3k("logic-forms", forms, tmp_path / "out", "--texts", str(texts)) == 0
    )
    assert "1 problem of" in capsys.readouterr().out
    for split, number in (("test", 2401), ("train", 7)):
        row = read_only_row(tmp_path / "out", split)
        assert row["id"] == f"geometry3k/{split}/{number}"
        assert row["source"] == "geometry3k, redrawn"
        assert row["answer"] == "5"
        assert "AB = 5\\sqrt{2}." in row["facts"]
        assert 300 < max(open_stored_image(row).size) <= 480
    output = tmp_path / "no"
    with_texts = ("--texts", str(texts))
    for location, words, message in (
        (forms, (), "texts: missing"),
        (forms, ("--texts", str(forms)), "has no column 'messages'"),
        (forms, (*with_texts, "--diagram", "plain"), "diagram: "),
        (texts, with_texts, "has no logic forms"),
    ):
        assert message in stderr_of_refusal(
            run_prepare_geometry3k("logic-forms", location, output, *words), output, capsys
        )


def test_the_gold_is_the_value_of_the_letter_and_transparency_is_white(tmp_path: Path) -> None:
    """The gold of letter B is the value of its choice, unless a choice is itself a letter.

    A transparent picture gets a white background.
    """
    write_half_transparent_problem(tmp_path / "raw", "val", number=2101)
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out") == 0
    row = read_only_row(tmp_path / "out", "validation")
    assert row["id"] == "geometry3k/validation/2101"
    assert row["split"] == "validation"
    assert row["answer"] == "5\\sqrt{3}"
    assert row["answer_raw"] == "B"
    assert row["choices"] == ["5", "5 \\sqrt { 3 }"]
    assert row["meta"]["shapes"] == ["Circle", "Triangle"]
    # `D` would be read as the letter of a choice
    write_half_transparent_problem(tmp_path / "points", choices=["C", "D"])
    assert run_prepare_geometry3k("intergps", tmp_path / "points", tmp_path / "out2") == 0
    assert read_only_row(tmp_path / "out2")["answer"] == "B"
    assert open_stored_image(row).getpixel((2, 2)) == (0, 0, 0)
    assert open_stored_image(row).getpixel((28, 2)) == (255, 255, 255)


def test_problems_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Sorted by name, 10 would come before 9, and so would 100."""
    for number in (10, 9, 100):
        write_half_transparent_problem(tmp_path / "raw", number=number)
    (tmp_path / "raw" / "train" / ".DS_Store").touch()
    assert (
        run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out", "--limit", "2") == 0
    )
    assert [row["id"][-2:] for row in stored_rows(tmp_path / "out", "train")] == ["/9", "10"]


def test_pictures_are_upright_and_within_the_pixel_budget(tmp_path: Path) -> None:
    """A picture that is stored turned is shown upright, in the size that the model will see."""
    folder = write_half_transparent_problem(tmp_path / "raw")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the stored 400 x 200 is to be shown as 200 x 400
    draw_figure(1, size=400).resize((400, 200)).save(folder / "img_diagram.png", exif=exif)
    arguments = ("--max-pixels", "20000")
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "out", *arguments) == 0
    # multiples of 28 with at most 20,000 pixels: what the model's processor would choose
    assert open_stored_image(read_only_row(tmp_path / "out")).size == (84, 196)


def test_accents_cover_all_their_letters(subtests: pytest.Subtests) -> None:
    """`mend_latex` puts braces around the letters that an accent is meant for, and corrects spaces.

    The authors' texts have an accent before several letters, without braces around them.
    """
    cases = [
        ("Find m \\widehat A B.", "Find m \\widehat{A B}."),
        ("m \\widehat A B C = 40", "m \\widehat{A B C} = 40"),
        ("\\overline A B \\perp \\overline CD", "\\overline{A B} \\perp \\overline{C D}"),
        ("If \\overline A B Find x", "If \\overline{A B} Find x"),
        (
            "\\widehat { A B } and \\angle A B C, A B = 3",
            "\\widehat{A B} and \\angle A B C, A B = 3",
        ),
        (
            "\\overline A' B' \\cong \\overrightarrow C_1 D_1",
            "\\overline{A' B'} \\cong \\overrightarrow{C_1 D_1}",
        ),
        ("m \\arc A B = 2 m \\widehat B C D", "m \\widehat{A B} = 2 m \\widehat{B C D}"),
        ("\\overline A B C D is a segment of A B", "\\overline{A B} C D is a segment of A B"),
        ("\\parallelogram A B C D", "parallelogram A B C D"),
        ("x = 5 \\sqrt { 3 } , y = \\frac { 1 } { 2 } .", "x = 5 \\sqrt{3}, y = \\frac{1}{2}."),
        ("m \\angle 1 = 30 ^ { \\circ } and x ^ { 2 }", "m \\angle 1 = 30^\\circ and x^{2}"),
        ("  Find\u00a0 x\n. ", "Find x."),
        ("Find $m\\widehat{A B}$ if $\\triangle A B C \\sim \\triangle D E F$.",) * 2,
        ("In \\odot X, find A B to the nearest tenth.",) * 2,
    ]
    for text, expected in cases:
        with subtests.test(f"{text!r:.80}"):
            assert mend_latex(text) == expected


def two_hub_rows() -> list[dict[str, Any]]:
    """Return two rows as the data set of the hub has them: with one image, and with two."""
    two = {
        "images": [half_black_picture((8, 8)), half_black_picture()],
        "problem": "<image> <image>\nFind $m \\angle 1$.",
        "answer": "1,000",
    }
    return [
        {
            "images": [half_black_picture()],
            "problem": "<image>Find x.",
            "answer": "\\frac { 39 } { 4 }",
        },
        two,
    ]


def test_parquet_files_in_the_hubs_format(tmp_path: Path) -> None:
    """Parquet files in the hub's format give rows whose ids are positions in the split.

    The answers become golds of the grader, and marks before the text are dropped.
    """
    write_hub_table(tmp_path / "table" / "data", two_hub_rows())
    write_hub_table(
        tmp_path / "table" / "data", [{**two_hub_rows()[0], "problem": "Find y."}], "validation"
    )
    assert run_prepare_geometry3k("parquet", tmp_path / "table", tmp_path / "out") == 0
    first, second = stored_rows(tmp_path / "out", "train")
    assert first["id"] == "geometry3k/train/0"
    assert second["id"] == "geometry3k/train/1"
    assert first["problem"] == "Find x."
    assert second["problem"] == "Find $m \\angle 1$."
    assert first["answer"] == "\\frac{39}{4}"
    assert first["answer_raw"] == "\\frac { 39 } { 4 }"
    assert second["answer"] == "1000"
    assert len(second["images"]) == 2
    assert second["choices"] is None
    assert open_stored_image(first).mode == "RGB"
    assert open_stored_image(first).getpixel((28, 2)) == (
        255,
        255,
        255,
    )
    assert read_only_row(tmp_path / "out", "validation")["split"] == "validation"
    assert not list(Path(f"{tmp_path}-cache").glob("**/*.arrow")), (
        "a second copy of the data stays in the cache"
    )


def test_a_table_that_is_not_in_the_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that is not in the hub's format is refused with what is wrong.

    One after the other: no file, no Parquet, no images, no picture, another format.
    """
    table = tmp_path / "table"
    output = tmp_path / "out"
    assert "there is no file or folder" in stderr_of_refusal(
        run_prepare_geometry3k("parquet", table, output), output, capsys
    )
    table.mkdir()
    (table / "train.parquet").write_text("not Parquet")
    assert "cannot be read" in stderr_of_refusal(
        run_prepare_geometry3k("parquet", table, output), output, capsys
    )
    Dataset.from_list([{"image": "x", "problem": "p", "answer": "1"}]).to_parquet(
        table / "train.parquet"
    )
    error = stderr_of_refusal(run_prepare_geometry3k("parquet", table, output), output, capsys)
    assert "has no column 'images'; did you mean 'image'?" in error
    Dataset.from_list([{"images": ["x"], "problem": "p", "answer": "1"}]).to_parquet(
        table / "train.parquet"
    )
    assert "where there is no file" in stderr_of_refusal(
        run_prepare_geometry3k("parquet", table, output), output, capsys
    )
    (table / "train.parquet").unlink()
    (table / "mine.csv").write_text("images,problem,answer\nx,p,1\n")
    assert "is no Parquet but csv" in stderr_of_refusal(
        run_prepare_geometry3k("parquet", table, output), output, capsys
    )


def test_the_preset_of_convert_gives_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`convert --preset geometry3k` gives the rows of `geometry3k --source parquet`."""
    write_hub_table(tmp_path / "table" / "data", two_hub_rows())
    code = run_prepare_geometry3k(
        "parquet",
        tmp_path / "table",
        tmp_path / "one",
        "--family",
        "qwen3_vl",
        "--max-pixels",
        "2048",
    )
    assert code == 0
    arguments = [
        "convert",
        "--preset",
        "geometry3k",
        "--input",
        str(tmp_path / "table"),
        "--output",
        str(tmp_path / "two"),
    ]
    assert main([*arguments, "--family", "qwen3_vl", "--max-pixels", "2048"]) == 0
    assert list(stored_rows(tmp_path / "one", "train")) == list(
        stored_rows(tmp_path / "two", "train")
    )
    assert main([*arguments, "--columns", "problem=problem", "answer=answer"]) == 2
    assert (
        main(["convert", "--columns", "problem=p", "answer=a", "--output", str(tmp_path / "three")])
        == 2
    )
    assert "input: missing" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_the_authors_zip_files_give_the_rows_of_the_folders(tmp_path: Path) -> None:
    """The authors' zip files give the rows of their folders, with or without the split's folder.

    A damaged member is a refused row.
    """
    for number in range(60):
        write_problem_folder(tmp_path / "raw", number=number)
    write_problem_folder(tmp_path / "raw", "val", number=100)
    (tmp_path / "zips").mkdir()
    with zipfile.ZipFile(tmp_path / "zips" / "train.zip", "w") as archive:
        for path in sorted((tmp_path / "raw" / "train").rglob("*.*")):
            archive.write(path, path.relative_to(tmp_path / "raw"))
        archive.writestr("__MACOSX/train/3/._data.json", b"junk")
        archive.writestr("train/readme.txt", b"junk")
    with zipfile.ZipFile(tmp_path / "zips" / "val.zip", "w") as archive:
        for path in (tmp_path / "raw" / "val").rglob("*.*"):
            archive.write(path, path.relative_to(tmp_path / "raw" / "val"))
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "folders") == 0
    assert (
        run_prepare_geometry3k("intergps", tmp_path / "zips", tmp_path / "zipped", "--workers", "2")
        == 0
    )
    for split in ("train", "validation"):
        assert list(stored_rows(tmp_path / "folders", split)) == list(
            stored_rows(tmp_path / "zipped", split)
        )

    damaged = bytearray((tmp_path / "zips" / "train.zip").read_bytes())
    with zipfile.ZipFile(tmp_path / "zips" / "train.zip") as archive:
        offset = archive.getinfo("train/5/img_diagram.png").header_offset
    damaged[offset + 200] ^= 0xFF  # a byte of the picture, behind its header
    (tmp_path / "train.zip").write_bytes(damaged)
    assert run_prepare_geometry3k("intergps", tmp_path / "train.zip", tmp_path / "out") == 0
    (line,) = read_quarantined_rows(tmp_path / "out")
    assert line["id"] == "geometry3k/train/5"
    assert line["reason"] == "file_missing"
    assert "CRC" in line["detail"]


def test_the_diagram_with_lettered_points(geometry3k_raw: Path, tmp_path: Path) -> None:
    """`--diagram point` takes the picture of a problem that has letters at its points.

    Each problem has that one and a plain one.
    """
    for diagram, name in (
        ("plain", "img_diagram.png"),
        ("point", "img_diagram_point.png"),
    ):
        assert (
            run_prepare_geometry3k(
                "intergps", geometry3k_raw, tmp_path / diagram, "--diagram", diagram
            )
            == 0
        )
        for row, folder in zip(
            stored_rows(tmp_path / diagram, "train"),
            sorted(geometry3k_raw.glob("train/*")),
            strict=True,
        ):
            assert open_stored_image(row).size == Image.open(folder / name).size
    assert [row["images"] for row in stored_rows(tmp_path / "plain", "train")] != [
        row["images"] for row in stored_rows(tmp_path / "point", "train")
    ]


def test_limit_takes_the_first_rows_and_with_a_seed_a_sample(tmp_path: Path) -> None:
    """`--limit 5` takes the first five of 30 rows; with `--seed` a sample that only it decides."""
    for number in range(30):
        write_problem_folder(tmp_path / "raw", number=number)

    def numbers_of_five(name: str, source: str, location: Path, *options: str) -> list[int]:
        """Prepare five rows into the folder `name`, and return the numbers of their problems."""
        output = tmp_path / name
        assert run_prepare_geometry3k(source, location, output, "--limit", "5", *options) == 0
        return [int(row["id"].rsplit("/")[-1]) for row in stored_rows(output, "train")]

    raw = tmp_path / "raw"
    first = numbers_of_five("first", "intergps", raw)
    sample = numbers_of_five("sample", "intergps", raw, "--seed", "1")
    sample_again = numbers_of_five("again", "intergps", raw, "--seed", "1")
    other_sample = numbers_of_five("other", "intergps", raw, "--seed", "2")
    assert run_prepare_geometry3k("intergps", raw, tmp_path / "all") == 0
    sample_of_table = numbers_of_five("table", "parquet", tmp_path / "all", "--seed", "1")

    assert first == [0, 1, 2, 3, 4]
    assert sample == sample_again == sample_of_table == sorted(sample)
    assert len(set(sample)) == 5
    assert first != sample != other_sample != first


def test_wrong_options_are_one_line(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """Options that do not fit are refused in one line, before anything is written.

    Each case: options of the command, and a part of the error.
    """
    cases = [
        (("--seed", "3"), "seed: 3 has nothing to choose without --limit"),
        (("--max-pixels", "100"), "--max-pixels: '100' is not a whole number from 784 to"),
        (
            ("--min-pixels", "9000", "--max-pixels", "800"),
            "min_pixels: 9000 is over max_pixels, 800",
        ),
        (("--revision", "main"), "revision: 'main' is for --source hub alone"),
    ]
    for options, expected in cases:
        with case_folder(f"{options!r:.80}") as folder:
            write_problem_folder(folder / "raw")
            code = run_prepare_geometry3k("intergps", folder / "raw", folder / "out", *options)
            assert expected in stderr_of_refusal(code, folder / "out", capsys)


def test_a_table_may_have_choices_and_ids_of_its_own(tmp_path: Path) -> None:
    """A table keeps its own ids and choices, as a prepared folder does that is prepared again.

    With choices a letter as the answer becomes the value of its choice.
    """
    write_problem_folder(tmp_path / "raw", number=12)
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", tmp_path / "first") == 0
    assert run_prepare_geometry3k("parquet", tmp_path / "first", tmp_path / "second") == 0
    first = read_only_row(tmp_path / "first")
    second = read_only_row(tmp_path / "second")
    for name in ("id", "choices", "problem", "answer", "images"):
        assert first[name] == second[name]
    features = Features({**HUB_FEATURES, "choices": [Value("string")]})
    row = {
        "images": [draw_figure(1)],
        "problem": "Find x.",
        "answer": "B",
        "choices": ["1", "2 \\sqrt { 2 }"],
    }
    write_hub_table(tmp_path / "table", [row], features=features)
    assert run_prepare_geometry3k("parquet", tmp_path / "table", tmp_path / "third") == 0
    third = read_only_row(tmp_path / "third")
    assert third["answer"] == "2\\sqrt{2}"


def write_zip(path: Path, folders: list[str], tmp_path: Path) -> None:
    """Write an archive with one problem in each of these folders."""
    problem = write_problem_folder(
        tmp_path / "one", number=len(list((tmp_path / "one" / "train").glob("*"))) + 1
    )
    with zipfile.ZipFile(path, "w") as archive:
        for folder in folders:
            for file in problem.iterdir():
                archive.write(file, f"{folder}/{file.name}")


def row_count_by_split(root: Path) -> dict[str, int | None]:
    """Return the number of problems in each split of a folder or an archive."""
    return {split: rows.row_count for split, rows in rows_of_folders(root).items()}


def test_the_splits_of_a_zip_are_those_of_its_folders(case_folder: CaseFolder) -> None:
    """The splits of a zip file are its folders, whatever its name and the folders above them."""
    for name, above, has_all_splits in product(
        ["geometry3k.zip", "train.zip", "val.zip", "anything at all.zip"],
        ["", "geometry3k/", "data/geometry3k/"],
        [True, False],
    ):
        with case_folder(f"{name} {above!r:.80} {has_all_splits}") as folder:
            root = folder / "raw"
            root.mkdir()
            write_zip(
                root / name,
                [f"{above}train/1", f"{above}train/2", f"{above}val/3", f"{above}test/4"],
                folder,
            )
            assert row_count_by_split(root if has_all_splits else root / name) == {
                "train": 2,
                "validation": 1,
                "test": 1,
            }


def test_a_zip_is_named_after_its_split_only_where_nothing_inside_says_one(tmp_path, capsys):
    """A zip without a split's folder inside has the split of its name, as `val.zip` has.

    An unknown name, a file that is no zip, and one without problems are refused.
    """
    write_zip(tmp_path / "val.zip", ["5"], tmp_path)
    assert row_count_by_split(tmp_path / "val.zip") == {"validation": 1}
    write_zip(tmp_path / "some.zip", ["5"], tmp_path)
    code = run_prepare_geometry3k("intergps", tmp_path / "some.zip", tmp_path / "out")
    assert "are in no folder train, val, test" in stderr_of_refusal(code, tmp_path / "out", capsys)
    (tmp_path / "train.zip").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "raw" / "train").mkdir(parents=True)
    for name, words in {
        "missing.zip": "there is no file or folder",
        "train.zip": "is not a readable zip file",
        "raw": "has no problem folder",
    }.items():
        code = run_prepare_geometry3k("intergps", tmp_path / name, tmp_path / "out")
        assert words in stderr_of_refusal(code, tmp_path / "out", capsys)
