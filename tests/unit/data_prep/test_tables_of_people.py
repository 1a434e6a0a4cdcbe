"""Tables as people have them: from Excel in any language, from phones, from other trainers."""

import base64
import csv
import io
import json
import subprocess
import sys
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image

from adora_vl.conversion import json_tables
from adora_vl.conversion.convert import ensure_converted
from data_prep.cli import main
from tests.support.cases import CaseFolder
from tests.support.geometry3k import open_stored_image, read_quarantined_rows, stderr_of_refusal
from tests.support.pictures import draw_figure, encode_picture
from tests.support.user_tables import PNG_FILES, read_prepared_rows, run_convert, write_user_jsonl

COLUMN_ARGUMENTS = ("problem=Frage", "answer=Lösung", "images=Bild")
GERMAN_HEADER = ["Frage", "Lösung", "Bild"]
GERMAN_ROWS = [
    ["Wie groß ist der Winkel?", "48,5°", "['pics/0.png']"],
    ["Fläche in cm²?", "1.234,5", "pics/1.png, pics/2.png"],
]
# The card of a data set whose column `a` has numbers of these classes.
CARD_WITH_CLASSES = """---
dataset_info:
  features:
  - name: a
    dtype:
      class_label:
        names:
          '0': '3'
          '1': '1'
          '2': 'x'
---
"""


def make_pictures(folder: Path) -> Path:
    """Write the pictures that tables name into a folder, and return it."""
    write_user_jsonl(folder).unlink()
    return folder


def write_german_csv(folder: Path, encoding: str, delimiter: str = ";", first: str = "") -> Path:
    """Write a CSV table as a German Excel saves it; `first` stands before the header."""
    with (make_pictures(folder) / "t.csv").open("w", encoding=encoding, newline="") as file:
        file.write(first)
        csv.writer(file, delimiter=delimiter).writerows([GERMAN_HEADER, *GERMAN_ROWS])
    return folder / "t.csv"


def write_workbook(folder: Path, rows: list[list[Any]]) -> Path:
    """Write a workbook whose second sheet has the header and these rows, and return its path."""
    book = openpyxl.Workbook()
    book.active.append(["Notes"])
    sheet = book.create_sheet("Aufgaben")
    for row in [GERMAN_HEADER, *rows]:
        sheet.append(row)
    book.save(make_pictures(folder) / "t.xlsx")
    return folder / "t.xlsx"


def test_a_table_of_german_excel_is_read_as_it_was_saved(
    case_folder: CaseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that a German Excel saved is read, and its encoding, delimiter or sheet printed."""
    # The words that the note on the table has to have, and what writes it.
    write_table_by_note: dict[str, Any] = {
        "with semicolons": lambda folder: write_german_csv(folder, "utf-8-sig"),
        "in the encoding of Windows (cp1252)": lambda folder: write_german_csv(folder, "cp1252"),
        "in UTF-16": lambda folder: write_german_csv(folder, "utf-16", "\t"),
        "with semicolons ": lambda folder: write_german_csv(folder, "utf-8", first="sep=;\n"),
        "the sheet 'Aufgaben' of 2": lambda folder: write_workbook(folder, GERMAN_ROWS),
    }
    for encoding_name, write_table in write_table_by_note.items():
        with case_folder(encoding_name) as folder:
            source = write_table(folder / "in")
            code = run_convert(source, folder / "out", "--decimal-comma", columns=COLUMN_ARGUMENTS)
            assert code == 0
            rows = read_prepared_rows(folder / "out")
            contents = [(row["problem"], row["answer"], len(row["images"])) for row in rows]
            assert contents == [
                ("Wie groß ist der Winkel?", r"48.5^\circ", 1),
                ("Fläche in cm²?", "1234.5", 2),
            ]
            assert encoding_name.strip() in capsys.readouterr().out
            columns = {
                "problem": "Frage",
                "answer": "Lösung",
                "images": "Bild",
                "decimal_comma": True,
            }
            stored = read_prepared_rows(ensure_converted(str(source), columns, folder / "cache"))
            assert [row["answer"] for row in stored] == [row["answer"] for row in rows]


def test_a_cell_of_excel_has_the_value_that_is_shown(tmp_path: Path) -> None:
    """A cell of a workbook has the value that Excel shows: 0.3 for 0.1 + 0.2, and 50 % for 0.5."""
    answers = [0.1 + 0.2, 7, 0.5, "3/4"]
    rows = [[f"q{number}?", answer, None] for number, answer in enumerate(answers)]
    source = write_workbook(tmp_path, rows)
    book = openpyxl.load_workbook(source)
    book["Aufgaben"]["B4"].number_format = "0%"
    book.save(source)
    assert run_convert(source, tmp_path / "out", columns=COLUMN_ARGUMENTS) == 0
    raw_answers = [row["answer_raw"] for row in read_prepared_rows(tmp_path / "out")]
    assert raw_answers == ["0.3", "7", "50%", "3/4"]


def test_decimal_commas_are_read_only_where_they_are_meant(case_folder: CaseFolder) -> None:
    """With `--decimal-comma` a comma between digits is a decimal one, but not within a pair.

    Each case: an answer, and the gold without spaces (None: it is refused, as 1.234 may be 1234).
    """
    for answer, gold in [
        ("52,5", "52.5"),
        ("52{,}5 cm", "52.5cm"),
        ("3,5; 4,5", "3.5,4.5"),
        ("(2,5; 3)", "(2.5,3)"),
        ("(2,3)", "(2,3)"),
        (r"\frac{1,5}{2}", r"\frac{1.5}{2}"),
        ("1.234.567", "1234567"),
        ("0.5", "0.5"),
        ("1.234", None),
        (52.5, "52.5"),
    ]:
        with case_folder(answer) as folder:
            source = write_user_jsonl(
                folder / "in", [{"q": "?", "a": answer}, {"q": "1 + 1?", "a": 2}]
            )
            arguments = ("--decimal-comma", "--allow-quarantined", "0.5")
            columns = ("problem=q", "answer=a")
            assert run_convert(source, folder / "out", *arguments, columns=columns) == 0
            answers = [row["answer"].replace(" ", "") for row in read_prepared_rows(folder / "out")]
            assert answers == ([gold, "2"] if gold else ["2"])


def test_a_class_becomes_its_name(case_folder: CaseFolder) -> None:
    """An answer that is a `ClassLabel` of `datasets` becomes the name of the class, not its number.

    It is stored as a number, and its names are in the table or in the card of the data set.
    """
    features = Features({"q": Value("string"), "a": ClassLabel(names=["3", "1", "x"])})
    rows = [{"q": f"{n}?", "a": n} for n in range(3)]
    data = Dataset.from_list(rows, features=features)
    for form in ("parquet", "save_to_disk", "card"):
        with case_folder(form) as folder:
            source = folder / "in"
            if form == "save_to_disk":
                DatasetDict({"train": data, "validation": data.select([0])}).save_to_disk(source)
            elif form == "parquet":
                data.to_parquet(source / "train.parquet")
            else:
                source.mkdir()
                (source / "README.md").write_text(CARD_WITH_CLASSES)
                (source / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            columns = ("problem=q", "answer=a")
            assert run_convert(source, folder / "out", "--keep-leaks", columns=columns) == 0
            assert [row["answer"] for row in read_prepared_rows(folder / "out")] == ["3", "1", "x"]


def test_a_bare_number_beside_choices_needs_a_meaning(case_folder: CaseFolder) -> None:
    """A bare number beside choices is refused until `--answer-is` says what it means.

    0, 1 and 2 with the choices 3, 1, 2, 0 are values, or count the choices from 0 or from 1.
    """
    rows = [{"q": f"{n}?", "a": n, "c": ["3", "1", "2", "0"]} for n in range(3)]
    for meaning, golds in {
        "": [],
        "value": ["0", "1", "2"],
        "index": ["3", "1", "2"],
        "index-from-1": ["3", "1"],
    }.items():
        with case_folder(f"answer is {meaning}") as folder:
            arguments = ["--answer-is", meaning] if meaning else []
            source = write_user_jsonl(
                folder / "in", [*rows, {"q": "Which?", "a": "A", "c": ["A. x", "B. y"]}]
            )
            columns = ("problem=q", "answer=a", "choices=c")
            options = ("--allow-quarantined", "1", *arguments)
            assert run_convert(source, folder / "out", *options, columns=columns) == 0
            assert [row["answer"] for row in read_prepared_rows(folder / "out")] == [*golds, "x"]
            if not meaning:
                refused = read_quarantined_rows(folder / "out")
                assert len(refused) == len(rows)
                for line in refused:
                    assert "--answer-is value, index" in line["detail"]


def test_a_reference_answer_is_read_or_refused_but_never_a_text_of_signs(tmp_path: Path) -> None:
    """An answer with TeX or foreign signs becomes a clean gold, or its row is refused."""
    # the gold of each answer; None where it is refused
    golds: dict[str, str | None] = {
        r"5$\sqrt{2}$": r"5\sqrt{2}",
        r"45${}^\circ$": r"45^\circ",
        r"$$\number{36}$$": "36",
        r"$$72\mathrm \pi$$": r"72\pi",
        "20º": r"20^\circ",
        "We add.\n#### 7": "7",
        r"$$3$$ $$8$$": None,
        r"4 \sqrt": None,
        "#N/A": None,
        "約12": None,
        "Würfel": "Würfel",
        "AB∥CD": r"AB\parallel CD",
        "$5": None,
    }
    source = write_user_jsonl(
        tmp_path / "in", [{"q": f"{n}?", "a": gold} for n, gold in enumerate(golds)]
    )
    code = run_convert(
        source, tmp_path / "out", "--allow-quarantined", "1", columns=("problem=q", "answer=a")
    )
    assert code == 0
    assert [row["answer"] for row in read_prepared_rows(tmp_path / "out")] == [
        gold for gold in golds.values() if gold
    ]
    reasons = [line["reason"] for line in read_quarantined_rows(tmp_path / "out")]
    assert reasons == ["gold_signs"] * 4 + ["gold_currency"]


def test_rows_of_one_json_text_are_found(
    case_folder: CaseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a JSON file may be a list, stand under a key, or be values by key.

    A broken file of each form is refused.
    """
    monkeypatch.setattr(json_tables, "_PIECE_CHARACTERS", 5)  # pieces of a list then end anywhere
    rows = [{"q": f"{n}?", "a": n, "more": ["]", {"é": []}]} for n in range(3)]
    for content in (
        rows,
        {"data": rows, "version": 1},
        {str(n): row for n, row in enumerate(rows)},
    ):
        for indent in (None, 1):
            with case_folder(f"{content} {indent}") as folder:
                text = json.dumps(content, indent=indent, ensure_ascii=False)
                (folder / "t.json").write_text(text)
                assert (
                    run_convert(
                        folder / "t.json", folder / "out", columns=("problem=q", "answer=a")
                    )
                    == 0
                )
                assert [row["answer"] for row in read_prepared_rows(folder / "out")] == [
                    "0",
                    "1",
                    "2",
                ]
                for broken_text in (text[:-1], text[:-9], f"{text}]", text.replace(",", ";")):
                    (folder / "t.json").write_text(broken_text)
                    code = run_convert(
                        folder / "t.json", folder / "bad", columns=("problem=q", "answer=a")
                    )
                    assert code == 2
                    assert not (folder / "bad").exists()


def test_a_picture_is_found_under_another_spelling_of_its_path_and_never_outside(
    case_folder: CaseFolder,
) -> None:
    """A picture is found under another spelling of its path, but never outside of the folder.

    The path may have backslashes, other capitals, percent signs, or ä as one character. The file
    has ä as two characters, as macOS writes it.
    """
    name = unicodedata.normalize("NFD", "Dreieck ä.png")
    for path in (
        "Fotos\\Dreieck ä.png",
        "fotos/DREIECK Ä.PNG",
        "Fotos/Dreieck%20a%CC%88.png",
        "./Fotos/Dreieck ä.png",
    ):
        with case_folder(path) as folder:
            (folder / "in" / "Fotos").mkdir(parents=True)
            (folder / "in" / "Fotos" / name).write_bytes(PNG_FILES[0])
            (folder / "secret.png").write_bytes(PNG_FILES[1])
            pairs = (
                ("?", path),
                ("!", "..\\SECRET.png"),
                (".", name),
            )
            rows = [{"q": question, "a": 1, "i": image} for question, image in pairs]
            source = write_user_jsonl(folder / "in", rows)
            columns = ("problem=q", "answer=a", "images=i")
            options = ("--allow-quarantined", "1")
            assert run_convert(source, folder / "out", *options, columns=columns) == 0
            (row,) = read_prepared_rows(folder / "out")
            assert row["images"][0]["bytes"] == PNG_FILES[0]
            outside, missing = read_quarantined_rows(folder / "out")
            assert outside["reason"] == "file_missing"
            assert f"--image-dir {folder / 'in' / 'Fotos'}" in missing["detail"]
            arguments = ("--image-dir", str(folder / "in" / "Fotos"), "--allow-quarantined", "1")
            code = run_convert(
                source, folder / "dir", *arguments, columns=("problem=q", "answer=a", "images=i")
            )
            assert code == 0
            assert [row["problem"] for row in read_prepared_rows(folder / "dir")] == ["."]


def test_what_stands_in_the_place_of_a_picture_is_named(tmp_path: Path) -> None:
    """A picture that is a web page, a pointer of Git LFS or a torn HEIC is refused by what it is.

    A whole HEIC and a short Base64 text are pictures.
    """
    heic = tmp_path / "in" / "a.heic"
    pytest.importorskip("pillow_heif").from_pillow(draw_figure(5, size=64)).save(
        make_pictures(tmp_path / "in") / "a.heic", quality=90
    )
    small_picture = base64.b64encode(encode_picture(draw_figure(1, size=24))).decode()
    assert len(small_picture) < 1024
    broken_pictures = {
        "lfs_pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "html": b"\n<!doctype html><p>404",
        "heic": heic.read_bytes()[:60],
    }
    for word, content in broken_pictures.items():
        (tmp_path / "in" / f"{word}.png").write_bytes(content)
    images = ["a.heic", small_picture, *(f"{word}.png" for word in broken_pictures)]
    source = write_user_jsonl(
        tmp_path / "in", [{"q": f"{n}?", "a": n, "i": image} for n, image in enumerate(images)]
    )
    arguments = ("--allow-quarantined", "1")
    assert (
        run_convert(
            source, tmp_path / "out", *arguments, columns=("problem=q", "answer=a", "images=i")
        )
        == 0
    )
    assert [open_stored_image(row).size for row in read_prepared_rows(tmp_path / "out")] == [
        (64, 64),
        (24, 24),
    ]
    assert [line["reason"] for line in read_quarantined_rows(tmp_path / "out")] == [
        f"image_{word}" for word in broken_pictures
    ]


def test_all_faults_of_a_table_are_said_in_one_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error about a table has all kinds of faults of its rows, and all its missing columns.

    Three rows have no picture and a decimal comma, and one has no answer.
    """
    rows = [{"q": f"{n}?", "a": "3,5", "i": f"{n}.png"} for n in range(3)] + [
        {"q": "4?", "a": None, "i": "pics/0.png"}
    ]
    source = write_user_jsonl(tmp_path / "in", rows)
    message = stderr_of_refusal(
        run_convert(source, tmp_path / "out", columns=("problem=q", "answer=a", "images=i")),
        tmp_path / "out",
        capsys,
    )
    for kind in (
        "file_missing: 3 rows, the first is mine/train/0",
        "gold_decimal_comma: 3 rows",
        "field_type: 1 row",
    ):
        assert f"error: {kind}" in message
    assert "--decimal-comma" in message
    code = run_convert(source, tmp_path / "out", columns=("problem=p", "answer=b"))
    assert "no column 'p', and none 'b'; it has" in stderr_of_refusal(
        code, tmp_path / "out", capsys
    )


@pytest.mark.slow
def test_photographs_excel_and_a_conversation_each_train_after_one_convert(tmp_path: Path) -> None:
    """A phone's photographs are converted with a workbook or with conversations, and trained on.

    The JPEG files keep their format, so that they stay small. The training takes the workbook.
    """
    photos = make_pictures(tmp_path / "in")
    names = [f"IMG_{n}.jpg" for n in range(30)]
    for n, name in enumerate(names):
        tags = Image.Exif()
        tags[271] = "Phone"
        (photos / name).write_bytes(encode_picture(draw_figure(n, size=64), "JPEG", exif=tags))
    write_workbook(
        photos, [[f"Wie lang ist Seite {n}?", f"{n},5", name] for n, name in enumerate(names)]
    )
    answer = {"from": "gpt", "value": r"So it is \boxed{5}."}
    question = {"from": "human", "value": "<image>How long is the side?"}
    write_user_jsonl(
        photos, [{"conversations": [question, answer], "images": [name]} for name in names]
    )
    excel = ["--input", str(photos / "t.xlsx"), "--columns", *COLUMN_ARGUMENTS, "--decimal-comma"]
    talk = ["--input", str(photos / "mine.jsonl"), "--preset", "llamafactory"]
    for name, arguments in {"excel": excel, "talk": talk}.items():
        assert main(["convert", *arguments, "--output", str(tmp_path / name)]) == 0
        assert {row["images"][0]["bytes"][:2] for row in read_prepared_rows(tmp_path / name)} == {
            b"\xff\xd8"
        }, "as small as before"
    keys = {
        "config": "configs/train/smoke_cpu.yaml",
        "dataset_name": tmp_path / "excel",
        "output_dir": tmp_path / "run",
        "use_vllm": "false",
        "max_steps": "1",
        "per_device_train_batch_size": "4",
        "num_generations": "4",
        "max_completion_length": "8",
        "eval_strategy": "no",
        "report_to": "none",
    }
    arguments = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    process = subprocess.run(
        [sys.executable, "-m", "adora_vl.train", *arguments], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]


def test_a_shard_of_webdataset_is_a_table(tmp_path: Path) -> None:
    """A tar file of webdataset is a table, in which the files of one name are a row.

    The fourth row is broken JSON. Files of other kinds, such as mp3, are passed over.
    """
    shard = tmp_path / "shard-000.tar"
    with tarfile.open(shard, "w") as tar:
        for number, gold in enumerate(("50", "65", "72")):
            row = json.dumps({"question": f"Angle {number}?", "answer": gold}).encode()
            for ending, content in (
                ("png", PNG_FILES[number]),
                ("json", row),
                ("mp3", b"?"),
            ):
                member = tarfile.TarInfo(f"train/{number:03}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        member = tarfile.TarInfo("train/003.json")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"{"))
    columns = ("problem=json.question", "answer=json.answer", "images=png", "id=__key__")
    options = ("--allow-quarantined", "0.5")
    assert run_convert(shard, tmp_path / "out", *options, columns=columns) == 0
    rows = read_prepared_rows(tmp_path / "out")
    assert [row["answer"] for row in rows] == ["50", "65", "72"]
    assert [row["id"].rpartition("train/")[2] for row in rows] == ["000", "001", "002"]
    assert [line["reason"] for line in read_quarantined_rows(tmp_path / "out")] == ["not_json"]


def test_a_path_of_another_machine_leads_to_the_longest_end_that_is_there(
    case_folder: CaseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--image-dir` a path of another machine leads to the longest end of it that is there.

    The end `images/0.png` of `/mnt/data/geo/images/0.png` is in that folder.
    """
    for beginning in ("/mnt/data/geo/", "D:\\data\\geo\\", "file:///mnt/geo/"):
        with case_folder(beginning) as folder:
            rows = [{"q": f"{n}?", "a": n, "i": f"{beginning}images/{n}.png"} for n in range(2)]
            source = write_user_jsonl(folder / "in", rows)
            columns = ("problem=q", "answer=a", "images=i")
            assert run_convert(source, folder / "told", columns=columns) != 0
            assert "--image-dir" in capsys.readouterr().err
            for number in range(2):  # the shorter end is there too, and holds another picture
                (folder / "there" / "images").mkdir(parents=True, exist_ok=True)
                (folder / "there" / f"{number}.png").write_bytes(PNG_FILES[3])
                path = folder / "there" / "images" / f"{number}.png"
                path.write_bytes(PNG_FILES[number])
            options = ("--image-dir", str(folder / "there"))
            assert run_convert(source, folder / "out", *options, columns=columns) == 0
            contents = [row["images"][0]["bytes"] for row in read_prepared_rows(folder / "out")]
            assert contents == PNG_FILES[:2]


def test_a_sentence_is_no_reference_answer_unless_texts_are_meant(tmp_path: Path) -> None:
    """A sentence as the answer is refused, unless `--text-answers` is given.

    Hardly any model's answer repeats a sentence.
    """
    golds = ["The two lines are parallel to each other", "isosceles right triangle", "Yes"]
    source = write_user_jsonl(
        tmp_path / "in", [{"q": f"{n}?", "a": gold} for n, gold in enumerate(golds)]
    )
    columns = ("problem=q", "answer=a")
    assert run_convert(source, tmp_path / "o", "--allow-quarantined", "0.5", columns=columns) == 0
    assert [row["answer"] for row in read_prepared_rows(tmp_path / "o")] == golds[1:]
    assert [line["reason"] for line in read_quarantined_rows(tmp_path / "o")] == ["gold_sentence"]
    assert run_convert(source, tmp_path / "texts", "--text-answers", columns=columns) == 0
    assert [row["answer"] for row in read_prepared_rows(tmp_path / "texts")] == golds


def test_options_stay_in_the_text_where_that_is_asked_for(tmp_path: Path) -> None:
    """Choices in the text of a problem are taken out, unless `--keep-options-in-text` is set."""
    source = write_user_jsonl(tmp_path / "in", [{"q": "Which?\nChoices:\nA: 4\nB: 5", "a": "B"}])
    columns = ("problem=q", "answer=a")
    assert run_convert(source, tmp_path / "out", columns=columns) == 0
    assert run_convert(source, tmp_path / "left", "--keep-options-in-text", columns=columns) == 0
    stored = [read_prepared_rows(tmp_path / name)[0] for name in ("out", "left")]
    assert [(row["problem"], row["choices"]) for row in stored] == [
        ("Which?", ["4", "5"]),
        ("Which?\nChoices:\nA: 4\nB: 5", None),
    ]


def test_a_draft_is_no_answer_and_boxes_in_a_row_are_several(tmp_path: Path) -> None:
    """A reference answer with boxes is that in the last one, or a list if the last ones are joined.

    They are joined by "and" here. A box in a draft in `<think>` does not count.
    """
    # the gold of each answer
    golds = {
        r"<think>\boxed{4}?</think> so \boxed{5}": "5",
        r"\boxed{4}, no: \boxed{5}": "5",
        r"\boxed{4} and \boxed{5}": "4, 5",
    }
    source = write_user_jsonl(
        tmp_path / "in", [{"q": f"{n}?", "a": gold} for n, gold in enumerate(golds)]
    )
    assert run_convert(source, tmp_path / "out", columns=("problem=q", "answer=a")) == 0
    assert [row["answer"] for row in read_prepared_rows(tmp_path / "out")] == list(golds.values())
