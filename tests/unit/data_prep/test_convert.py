"""`python -m data_prep convert`: equal problems from every format; bad input ends in quarantine or
in one line.
"""

import base64
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adora_vl.conversion.columns import Columns
from adora_vl.conversion.pictures import ImageSource, PictureError, picture_bytes
from adora_vl.conversion.pipeline import CleanedRow, read_and_clean
from adora_vl.conversion.problem import RowError
from adora_vl.conversion.records import TableContext, read_record
from adora_vl.conversion.tables import is_test_question
from adora_vl.data.dataset import read_manifest, stored_rows
from adora_vl.data.images import PixelLimits
from adora_vl.data.prompts import conversation_with_images, conversations
from adora_vl.data.rows import fault_in_row
from data_prep.cli import main
from tests.support.cases import CaseFolder
from tests.support.geometry3k import open_stored_image, read_quarantined_rows, stderr_of_refusal
from tests.support.pictures import draw_figure, encode_picture
from tests.support.user_tables import (
    COLUMN_OPTIONS,
    EXPECTED_FIELDS_BY_ID,
    PNG_FILES,
    WRITER_BY_FORMAT,
    read_fields_by_id,
    rows_with_images,
    run_convert,
    write_user_csv,
    write_user_jsonl,
)


def test_every_format_gives_the_same_problems(case_folder: CaseFolder) -> None:
    """A table in any format gives the same rows, with the same pictures."""
    for form in WRITER_BY_FORMAT:
        with case_folder(form) as folder:
            source = WRITER_BY_FORMAT[form](folder / "in")
            assert run_convert(source, folder / "out") == 0
            assert read_fields_by_id(folder / "out") == EXPECTED_FIELDS_BY_ID
            rows = list(stored_rows(folder / "out", "train"))
            pictures = [open_stored_image(row).tobytes() for row in rows]
            # those of the first, the second and the fourth row; the third has none
            assert pictures == [draw_figure(n, size=60).tobytes() for n in (0, 1, 3)]
            assert all(fault_in_row(row) is None for row in rows)
            manifest = read_manifest(folder / "out")
            assert manifest is not None
            assert manifest["counts"] == {"train": 3}
            assert manifest["source"].startswith("own/")
            assert manifest["arguments"]["columns"]["problem"] == "question"


def test_files_named_after_splits_are_these_splits_and_a_leak_between_them_is_dropped(
    tmp_path: Path,
) -> None:
    """Tables named after splits are these splits; a training row that is a test row too is dropped.

    The tables are in a folder `data`, and the pictures beside it.
    """
    folder = tmp_path / "in"
    rows = rows_with_images([f"../pics/{n}.png" for n in range(4)])
    new_row = {**rows[0], "key": None, "question": "New?"}
    for name, part in (
        ("train-0", rows),
        ("train-1", [new_row]),
        ("test", rows[:1]),
    ):
        write_user_jsonl(folder / "tables", part).rename(folder / "tables" / f"{name}.jsonl")
    (folder / "tables" / "pics").rename(folder / "pics")
    (folder / "tables").rename(folder / "data")
    assert run_convert(folder, tmp_path / "out", "--name", "mine") == 0
    assert read_fields_by_id(tmp_path / "out", "test").keys() == {"mine/test/a"}
    assert read_fields_by_id(tmp_path / "out").keys() == {
        "mine/train/b",
        "mine/train/c",
        "mine/train/3",
    }
    assert [line["reason"] for line in read_quarantined_rows(tmp_path / "out")] == ["leak"]


def test_a_test_share_is_one_row_of_each_block(subtests: pytest.Subtests) -> None:
    """Test rows are spread evenly over a table, in the share asked for, and follow the seed."""
    for share in [0.1, 0.2, 0.29, 0.33, 0.5, 0.58, 0.7]:
        with subtests.test(f"{share}"):
            test_rows = [index for index in range(1000) if is_test_question(index, share, 3)]
            assert len(test_rows) == pytest.approx(1000 * share, abs=1)
            gaps = [after - before for before, after in pairwise(test_rows)]
            assert max(gaps) <= 2 / share
            other_seed_rows = [index for index in range(1000) if is_test_question(index, share, 4)]
            assert test_rows != other_seed_rows


def test_texts_numbers_and_options_are_golds(case_folder: CaseFolder) -> None:
    """An answer in any usual spelling becomes a gold (reference answer) that the grader can meet.

    Each case: the answer, the choices of the row, and the gold.
    """
    cases = [
        ("(B)", ["red", "blue"], "blue"),
        ("blue", ["red", "blue"], "blue"),
        (7, [5, 7.0], "7"),
        ("B", ["Rome, Italy", "Oslo, Norway"], "Oslo,Norway"),
        ("B", ["1, 2, ...", "2, 4, ..."], "B"),  # an open list is no gold, so the letter is
        ("B", ["P", "D", "Q", "R"], "B"),  # D would be read as a letter, that of R
        ("C", ["P", "Q", r"\text{O}"], "C"),
        ("12", [], "12"),  # no choices
        (r"12 \text{ cm}^2", None, "12 cm^2"),  # an answer in another unit is wrong
        (r"30^\circ", None, r"30^\circ"),
        (3.0, None, "3"),
        (-0.25, None, "-0.25"),
        (10**30, None, str(10**30)),
        ("Paris", None, "Paris"),
        (r"$\boxed{\frac{16}{7}}$", None, r"\frac{16}{7}"),  # a box is opened
        (r"$$ \boxed {12} $$.", None, "12"),
        (r"\boxed{B}", ["red", "blue"], "blue"),
    ]
    for answer, choices, gold in cases:  # choices: None where the row has no such column
        with case_folder(f"{answer} {choices!r:.80} {gold}") as folder:
            source = write_user_jsonl(folder / "in", [{"q": "What?", "a": answer, "c": choices}])
            columns = ("problem=q", "answer=a", "choices=c")
            code = run_convert(source, folder / "out", columns=columns)
            assert code == 0
            (row,) = stored_rows(folder / "out", "train")
            assert row["answer"] == gold


def test_options_and_images_may_have_a_column_each(tmp_path: Path) -> None:
    """Choices and images may have a column each; a row has those whose columns are not empty."""
    rows = [
        {
            "q": "1?",
            "a": "B",
            "A": "x y",
            "B": "z",
            "C": None,
            "i1": "pics/0.png",
            "i2": "pics/1.png",
        },
        {"q": "2?", "a": "A", "A": "u", "B": "v", "C": "w", "i1": "pics/2.png", "i2": None},
    ]
    source = write_user_jsonl(tmp_path / "in", rows)
    code = run_convert(
        source,
        tmp_path / "out",
        columns=("problem=q", "answer=a", "choices=A,B,C", "images=i1,i2"),
    )
    assert code == 0
    first, second = stored_rows(tmp_path / "out", "train")
    assert first["choices"] == ["x y", "z"]
    assert len(first["images"]) == 2
    assert second["choices"] == ["u", "v", "w"]
    assert len(second["images"]) == 1


def test_the_place_of_each_image_is_where_the_problem_has_it() -> None:
    """An image stands where its mark `<image>` is, and before the text if there is no mark."""
    content = conversation_with_images("Add <image> to <image>.", 2)[-1]["content"]

    def text(words):
        return {"type": "text", "text": words}

    image = {"type": "image"}
    assert content == [text("Add "), image, text(" to "), image, text(".")]
    assert conversation_with_images("Add.", 2)[-1]["content"] == [image, image, text("Add.")]
    # Without any mark the contents are texts, before which the processor puts the images.
    without_marks = conversations(["a", "b"], [1, 0], "s")
    with_a_mark = conversations(["a", "<image>b"], [1, 1], "s")
    assert [messages[-1]["content"] for messages in without_marks] == ["a", "b"]
    assert [messages[-1]["content"] for messages in with_a_mark] == [
        [image, text("a")],
        [image, text("b")],
    ]
    sound = {"id": "1", "answer": "1", "images": [b"p"], "problem": "See <image>?", "choices": None}
    assert fault_in_row(sound) is None
    assert "2 <image> with 1 image" in str(fault_in_row({**sound, "problem": "<image><image>"}))


def test_the_same_command_again_takes_what_is_in_the_file_now(tmp_path: Path) -> None:
    """The same command again replaces the earlier rows; one with other columns is refused."""
    source = write_user_jsonl(tmp_path / "in")
    assert run_convert(source, tmp_path / "out") == 0
    fields_before = read_fields_by_id(tmp_path / "out")
    write_user_jsonl(tmp_path / "in", rows_with_images([f"pics/{n}.png" for n in range(4)])[:2])
    assert run_convert(source, tmp_path / "out") == 0
    assert len(read_fields_by_id(tmp_path / "out")) == 2
    assert read_fields_by_id(tmp_path / "out") != fields_before
    # Other columns are another data set, which only --overwrite replaces.
    code = run_convert(source, tmp_path / "out", columns=COLUMN_OPTIONS[:3])
    assert code == 2


def test_a_picture_may_be_bytes_or_base64_without_a_head(tmp_path: Path) -> None:
    """A cell may have a picture itself, as bytes or Base64; it needs no file.

    A text of more than 1,024 characters is never taken for a path.
    """
    large_picture = encode_picture(draw_figure(7, size=400))
    assert len(base64.b64encode(large_picture)) > 1024
    rows = [
        {"q": "?a", "a": "1", "i": [PNG_FILES[0], PNG_FILES[1]]},
        {"q": "?b", "a": "2", "i": [large_picture]},
    ]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "b.parquet")
    columns = ("problem=q", "answer=a", "images=i")
    assert run_convert(tmp_path / "in" / "b.parquet", tmp_path / "out", columns=columns) == 0
    in_base64 = base64.b64encode(large_picture).decode()
    source = write_user_jsonl(tmp_path / "in", [{"q": "?", "a": "1", "i": in_base64}])
    assert run_convert(source, tmp_path / "out2", columns=columns) == 0
    assert [len(row["images"]) for row in stored_rows(tmp_path / "out", "train")] == [2, 1]


def test_a_column_of_the_users_own_is_still_there_after_a_filter(tmp_path: Path) -> None:
    """A filter by pass rate keeps the user's own column of the rows that it keeps.

    The stored answers are right for the rows that have a `hint`, so these are kept.
    """
    assert run_convert(write_user_jsonl(tmp_path / "in"), tmp_path / "all") == 0
    rows = list(stored_rows(tmp_path / "all", "train"))
    responses = [rf"\boxed{{{row['answer']}}}" if row["hint"] else r"\boxed{0}" for row in rows]
    lines = [
        {
            "pid": row["id"],
            "question": row["problem"],
            "answer": row["answer"],
            "choices": row["choices"],
            "metadata": {},
            "response": response,
        }
        for row, response in zip(rows, responses, strict=True)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--predictions", str(tmp_path / "answers.jsonl"), "--keep", "0.5:1"]
    code = main(
        ["filter", "--input", str(tmp_path / "all"), "--output", str(tmp_path / "some"), *arguments]
    )
    assert code == 0
    assert read_fields_by_id(tmp_path / "some") == {
        name: row for name, row in EXPECTED_FIELDS_BY_ID.items() if row[3]
    }


def test_a_prepared_folder_that_is_converted_again_keeps_its_ids(tmp_path: Path) -> None:
    """A prepared folder that is converted again keeps its ids, without a second prefix."""
    assert run_convert(write_user_jsonl(tmp_path / "in"), tmp_path / "once", "--name", "mine") == 0
    columns = tuple(
        f"{name}={name}" for name in ("problem", "answer", "images", "choices", "id", "hint")
    )
    assert (
        run_convert(tmp_path / "once", tmp_path / "twice", "--name", "mine", columns=columns) == 0
    )
    assert read_fields_by_id(tmp_path / "twice") == read_fields_by_id(tmp_path / "once")


# The columns of the table have names of one letter: q question, a answer, i image, k key, c
# choices.
COLUMN_ARGUMENTS = ("problem=q", "answer=a", "images=i", "id=k", "choices=c")
GOOD_ROW = {"k": "good", "q": "Find x.", "a": "5", "i": "good.png", "c": None}
NOT_A_NUMBER = float("nan")


def write_table_with_pictures(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows as `mine.FORM` into `folder/in`, with the pictures that they may name.

    These are two good ones, a broken one, and links to a picture outside and to itself. Another
    picture is outside of the folder.
    """
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "outside.png").write_bytes(PNG_FILES[0])
    (folder / "in" / "good.png").write_bytes(PNG_FILES[1])
    (folder / "in" / "other.png").write_bytes(PNG_FILES[2])
    (folder / "in" / "broken.png").write_bytes(PNG_FILES[1][:-20])
    for name, target in (
        ("link.png", folder / "outside.png"),
        ("loop.png", folder / "in" / "loop.png"),
    ):
        if not (folder / "in" / name).is_symlink():
            (folder / "in" / name).symlink_to(target)
    path = folder / "in" / f"mine.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "csv":
        write_user_csv(folder / "in", "csv", rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# What is wrong with a row beside a good one, and the reason under which it is refused.
CHANGES_AND_KIND_BY_FAULT: dict[str, tuple[dict[str, Any], str]] = {
    "path outside": ({"i": "../outside.png"}, "path_outside"),
    "absolute path": ({"i": "/etc/hostname"}, "path_outside"),
    "link outside": ({"i": "link.png"}, "path_outside"),
    "loop of links": ({"i": "loop.png"}, "file_missing"),
    "no such file": ({"i": "nowhere.png"}, "file_missing"),
    "a folder": ({"i": "."}, "file_missing"),
    "broken image": ({"i": "broken.png"}, "image_truncated"),
    "no image but a table": ({"i": "mine.FORM"}, "image_undecodable"),
    "a web address": ({"i": "https://example.org/a.png"}, "not_a_file"),
    "broken Base64": ({"i": "data:image/png;base64,@@@"}, "not_base64"),
    "a data URL of text": ({"i": "data:text/plain,hello"}, "not_base64"),
    "duplicate id": ({"k": "good"}, "duplicate_id"),
    "empty problem": ({"q": " "}, "no_text"),
    "empty answer": ({"a": ""}, "field_type"),
    "NaN as text": ({"a": "nan"}, "gold"),
    "an open list": ({"a": "2, 4, ..., 20"}, "gold"),
    "a control token": ({"q": "Find x.<|im_end|>"}, "control_token"),
    "too many places": ({"q": "<image> and <image>"}, "placeholder"),
    "no such option": ({"c": '["1", "2"]', "a": "C"}, "letter_without_choice"),
    "two readings of an option": ({"c": '["B", "A"]', "a": "A"}, "ambiguous_answer"),
    "a long id": ({"k": "x" * 300}, "field_type"),
}
# These need a table whose values have types of their own.
CHANGES_AND_KIND_BY_TYPE_FAULT: dict[str, tuple[dict[str, Any], str]] = {
    "missing value": ({"a": None}, "field_type"),
    "a number for a problem": ({"q": 7}, "field_type"),
    "NaN": ({"a": NOT_A_NUMBER}, "field_type"),
    "true": ({"a": True}, "field_type"),
    "a list for an answer": ({"a": ["5"]}, "field_type"),
    "an object for an answer": ({"a": {"b": 1}}, "field_type"),
    "a number for an image": ({"i": 7}, "no_image"),
    "null in images": ({"i": ["good.png", None]}, "no_image"),
    "an object for options": ({"c": {"A": "5"}}, "field_type"),
    "half a surrogate pair": ({"q": "Find \ud800."}, "field_type"),
    "a huge number": ({"a": 10**400}, "gold"),
}


def test_a_bad_row_is_refused_by_its_reason_and_the_others_are_kept(
    case_folder: CaseFolder,
) -> None:
    """Each faulty row of a table is refused under its reason, and the good row is kept.

    Faults of a value's type are tried in JSON alone, where values have types of their own.
    """
    for form in ["jsonl", "json", "csv", "parquet"]:
        with case_folder(form) as folder:
            changes_and_kind_by_fault = dict(CHANGES_AND_KIND_BY_FAULT)
            if form in ("jsonl", "json"):
                changes_and_kind_by_fault |= CHANGES_AND_KIND_BY_TYPE_FAULT
            rows: list[dict[str, Any]] = [GOOD_ROW]
            for number, (changed_fields, _) in enumerate(changes_and_kind_by_fault.values()):
                row = {**GOOD_ROW, "k": f"bad{number}", **changed_fields}
                if isinstance(row["i"], str):
                    row["i"] = row["i"].replace("FORM", form)
                if form != "csv" and isinstance(row["c"], str):
                    row["c"] = json.loads(row["c"])
                rows.append(row)
            source = write_table_with_pictures(folder, form, rows)
            options = ("--allow-quarantined", "1")

            code = run_convert(source, folder / "out", *options, columns=COLUMN_ARGUMENTS)

            assert code == 0
            kept_ids = [row["id"] for row in stored_rows(folder / "out", "train")]
            assert kept_ids == ["mine/train/good"]
            refused = read_quarantined_rows(folder / "out")
            reasons = {
                name: line["reason"]
                for name, line in zip(changes_and_kind_by_fault, refused, strict=True)
            }
            assert reasons == {
                name: reason for name, (_, reason) in changes_and_kind_by_fault.items()
            }
            for line in refused:
                assert "\n" not in line["detail"]
                assert len(line["detail"]) < 600
                assert "; " in line["detail"], "what is wrong, and the remedy"


def test_too_many_bad_rows_are_an_error_that_names_the_first(tmp_path, capsys):
    """Too many bad rows end the command with their number and the first one.

    A picture outside of the folder is not copied into the report.
    """
    source = write_table_with_pictures(
        tmp_path, "jsonl", [GOOD_ROW, {**GOOD_ROW, "k": "b", "i": "../outside.png"}]
    )
    error = stderr_of_refusal(
        run_convert(source, tmp_path / "out", columns=COLUMN_ARGUMENTS), tmp_path / "out", capsys
    )
    assert "1 of 2 rows" in error
    assert "leads out of the input's folder" in error
    assert "--allow-quarantined" in error
    assert not any((tmp_path / "out.quarantine").rglob("*.png")), (
        "a picture from outside was copied"
    )


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_row_that_gives_a_key_twice_is_refused_with_its_place(tmp_path: Path, form: str) -> None:
    """A JSON row with a key given twice is refused with its place.

    The key may be twice in the row, in a value of it, or in JSON that is a text.
    """
    inside = '[{"role": "user", "content": "What is 2?", "content": "What is 3?"}]'
    twice = ['{"q": "What is 9?", "a": "9", "a": "8"}', f'{{"q": {inside}, "a": "2"}}']
    cell = json.dumps({"q": inside, "a": "2"})  # a cell of a table of texts
    good_rows = [f'{{"q": "What is {n}?", "a": "{n}"}}' for n in range(3)]
    rows = [*good_rows, *twice, cell]
    source = tmp_path / f"t.{form}"
    source.write_text("\n".join(rows) if form == "jsonl" else f"[{', '.join(rows)}]")
    columns = ("problem=q", "answer=a")
    assert run_convert(source, tmp_path / "out", "--allow-quarantined", "1", columns=columns) == 0
    lines = read_quarantined_rows(tmp_path / "out")
    assert [line["reason"] for line in lines] == ["given_twice", "given_twice", "field_type"]
    position_word = "line" if form == "jsonl" else "item"
    for number, line in zip((4, 5, 6), lines, strict=True):
        assert f"{position_word} {number} of t.{form}" in line["detail"]
        assert "twice" in line["detail"]
    assert len(list(stored_rows(tmp_path / "out", "train"))) == 3


def _make_folder_of_rows(path: Path) -> None:
    """Put a folder in the place of the file."""
    path.unlink()
    path.mkdir()


# how a file is damaged, and parts of the error of which one has to be there; "." is any error
BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "no rows|cannot be read|is not JSON"),
    "blank": (lambda path: path.write_bytes(b"\n\n"), "no rows|cannot be read|no column"),
    "random": (lambda path: path.write_bytes(os.urandom(5000)), "."),
    "not UTF-8": (lambda path: path.write_bytes(b'[{"q": "\xff\xfe"}]'), "."),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000), "."),
    "a folder": (_make_folder_of_rows, "has no table"),
}


def test_a_file_that_cannot_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A table in any format with any damage of `BAD_FILES` is refused with what is wrong."""
    for form in ["jsonl", "json", "csv", "parquet"]:
        with case_folder(form) as folder:
            for name, (damage, message) in BAD_FILES.items():
                source = write_table_with_pictures(
                    folder / name.replace(" ", "_"), form, [GOOD_ROW]
                )
                damage(source)
                error = stderr_of_refusal(
                    run_convert(source, folder / "out", columns=COLUMN_ARGUMENTS),
                    folder / "out",
                    capsys,
                )
                assert any(part in error for part in message.split("|")) or message == ".", (
                    name,
                    error,
                )
                assert len(error) < 2000


def test_a_file_of_another_form_says_which_form_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no table in UTF-8 is refused with the form that it needs.

    Each case: the name of a file, its content, and a part of the error.
    """
    for name, content, message in [
        (
            "other.csv",
            b"q,a\nFind \x81.,5\n",
            "is not UTF-8 text; save it as UTF-8 (in Excel: as CSV UTF-8)",
        ),
        ("book.xls", b"\xd0\xcf\x11\xe0", "is none of the known tables"),
        (
            "pointer.csv",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "fetch it with git lfs pull",
        ),
        ("page.jsonl", b"<!DOCTYPE html><p>404</p>", "a saved web page (HTML)"),
        (
            "object.json",
            json.dumps(
                {"left": [{"q": "?", "a": "5"}], "right": [{"q": "!", "a": "6"}]}, indent=1
            ).encode(),
            "write its rows as a list, [{",
        ),
        (
            "utf16.json",
            '[{"q": "?", "a": "5"}]'.encode("utf-16"),
            "JSON in UTF-16; save it as UTF-8",
        ),
    ]:
        (tmp_path / name).write_bytes(content)
        code = run_convert(tmp_path / name, tmp_path / "out", columns=("problem=q", "answer=a"))
        assert message in stderr_of_refusal(code, tmp_path / "out", capsys), name


def test_a_column_that_is_not_there_is_named_with_the_nearest(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A missing column is refused with the nearest name and all columns of the table.

    The table has the column `quesiton`, and the command names `question`.
    """
    for form in ["jsonl", "json", "csv", "parquet"]:
        with case_folder(form) as folder:
            source = write_table_with_pictures(folder, form, [{"quesiton": "Find x.", "a": "5"}])
            error = stderr_of_refusal(
                run_convert(source, folder / "out", columns=("problem=question", "answer=a")),
                folder / "out",
                capsys,
            )
            assert "has no column 'question'; did you mean 'quesiton'?" in error
            assert "quesiton, a" in error


def test_very_many_columns_are_read_past(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A table of 200,002 columns is read, and an error about it does not list them all."""
    for form in ["jsonl", "csv"]:
        with case_folder(form) as folder:
            row = {**{f"c{column}": 0 for column in range(200_000)}, "q": "Find x.", "a": "5"}
            source = folder / f"mine.{form}"
            if form == "jsonl":
                source.write_text(json.dumps(row) + "\n")
            else:
                source.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
            assert run_convert(source, folder / "out", columns=("problem=q", "answer=a")) == 0
            capsys.readouterr()
            error = stderr_of_refusal(
                run_convert(source, folder / "no", columns=("problem=q", "answer=b")),
                folder / "no",
                capsys,
            )
            assert "(200002 columns)" in error
            assert len(error) < 1000


def test_a_line_with_another_number_of_cells_is_refused_alone(tmp_path: Path) -> None:
    """A CSV line with too many or too few cells is refused, and costs no other line."""
    source = tmp_path / "mine.csv"
    source.write_text('q,a\nFind x.,5\nFind y, or z.,6\n"Find y, or z.",7\nFind w.\n')
    options = ("--allow-quarantined", "1")
    assert run_convert(source, tmp_path / "out", *options, columns=("problem=q", "answer=a")) == 0
    assert [row["answer"] for row in stored_rows(tmp_path / "out", "train")] == ["5", "7"]
    assert [line["reason"] for line in read_quarantined_rows(tmp_path / "out")] == ["not_a_row"] * 2


def test_a_folder_whose_tables_are_not_clear_is_one_line(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A folder is refused if it has no table, or two that could be meant; so is a missing folder.

    Each case: the tables in the folder, and a part of the error.
    """
    for files, message in [
        ([], "has no table"),
        (["a.csv", "b.csv"], "has 2 tables"),
        (["train.csv", "train.jsonl"], "are both the split 'train'"),
    ]:
        with case_folder(f"{files!r:.80}") as folder:
            (folder / "in").mkdir()
            for name in files:
                (folder / "in" / name).write_text("q,a\nx,1\n")
            assert message in stderr_of_refusal(
                run_convert(folder / "in", folder / "out", columns=COLUMN_ARGUMENTS[:2]),
                folder / "out",
                capsys,
            )
            for path in (folder / "none", folder / "in.txt"):
                (folder / "in.txt").write_text("x")
                stderr_of_refusal(
                    run_convert(path, folder / "out", columns=COLUMN_ARGUMENTS[:2]),
                    folder / "out",
                    capsys,
                )


def test_a_table_that_is_a_link_out_of_the_folder_is_not_read(tmp_path, capsys):
    """A table that is a link out of its folder is refused.

    Otherwise a stranger's data set could have files read beside its folder.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.csv").write_text("q,a\nx,1\n")
    (tmp_path / "in" / "train.csv").symlink_to(tmp_path / "secret.csv")
    error = stderr_of_refusal(
        run_convert(tmp_path / "in", tmp_path / "out", columns=COLUMN_ARGUMENTS[:2]),
        tmp_path / "out",
        capsys,
    )
    assert "leads out of" in error


# a busy machine is no failure
SUPPRESSED_HEALTH_CHECKS = [
    HealthCheck.function_scoped_fixture,
    HealthCheck.too_slow,
]
any_json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=20)
    | st.sampled_from(["good.png", "../outside.png", "A", "<image>", "[1]", "\ud800", "9" * 5000]),
    lambda inside: (
        st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=5), inside, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, suppress_health_check=SUPPRESSED_HEALTH_CHECKS)
@given(
    record=st.fixed_dictionaries({}, optional=dict.fromkeys("qaikcx", any_json_value)),
    texts_only=st.booleans(),
)
def test_whatever_a_record_holds_it_is_sound_or_refused(record, texts_only, tmp_path):
    """Any value in any column gives a row in the format of prepared data, or a reason to refuse it.

    Nothing is raised, since one strange row of a million must not end a preparation. The columns of
    `Columns` are those of `GOOD_ROW`, and x is one of the user's own.
    """
    if not (tmp_path / "in").exists():
        write_table_with_pictures(tmp_path, "jsonl", [GOOD_ROW])
    columns = Columns("q", "a", ("i",), ("c",), "k", (("own", "x"),))
    files = ImageSource((tmp_path / "in").resolve(), (tmp_path / "in").resolve())
    context = TableContext("mine", "train", "mine.jsonl", columns, files, texts_only)
    outcome = read_and_clean(
        lambda: read_record({**GOOD_ROW, **record}, position="line 1", index=0, context=context),
        PixelLimits(),
    )
    assert isinstance(outcome, CleanedRow | RowError)
    if isinstance(outcome, RowError):
        assert outcome.reason
        assert len(str(outcome)) < 2000
        json.dumps(outcome.record)
    else:
        assert outcome.row.keys() == columns.features.keys()


@settings(max_examples=150, suppress_health_check=SUPPRESSED_HEALTH_CHECKS)
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "in", "a", "link.png", "good.png", "", "~", "/", "etc"]),
        max_size=6,
    )
)
def test_no_path_leads_out_of_the_folder(parts: list[str], tmp_path: Path) -> None:
    """Any path of these parts is refused, or is the good picture inside the folder.

    The folder has a link `a` to the folder around it.
    """
    if not (tmp_path / "in").exists():
        write_table_with_pictures(tmp_path, "jsonl", [GOOD_ROW])
        (tmp_path / "in" / "a").symlink_to(tmp_path)
    inside = (tmp_path / "in").resolve()
    try:
        content = picture_bytes("/".join(parts), ImageSource(inside, inside))
    except PictureError:
        return
    assert content == encode_picture(draw_figure(1, size=60)), (
        "another file than the one inside was read"
    )


def test_columns_and_options_that_do_not_fit_are_one_line(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """Columns and options that do not fit are refused in one line, before anything is written.

    Each case: what `--columns` names, other options, and a part of the error.
    """
    cases: list[tuple[list[str], list[str], str]] = [
        (["problem=q"], [], "answer is missing"),
        (["problm=q", "answer=a"], [], "problem is missing; did you mean 'problm'?"),
        (["problem=q", "answer"], [], "'answer' is not NAME=COLUMN"),
        (["problem=q", "answer="], [], "is not the name of a column"),
        (["problem=q", "answer=a", "answer=b"], [], "answer is given twice"),
        (["problem=q,r", "answer=a"], [], "names 2 columns"),
        (
            ["problem=q", "answer=a", "prompt=q"],
            [],
            "'prompt' cannot be the name of a column of your own",
        ),
        (["problem=q", "answer=a", "a b=q"], [], "cannot be the name of a column of your own"),
        (["problem=q", "answer=a", "source=q"], [], "cannot be the name of a column of your own"),
        (
            [*COLUMN_ARGUMENTS],
            ["--preset", "geometry3k"],
            "columns: give --columns, such as problem=question",
        ),
        ([*COLUMN_ARGUMENTS], ["--revision", "v1"], "revision: 'v1' is for a hub id"),
        ([*COLUMN_ARGUMENTS], ["--subset", "all"], "subset: 'all' is for a hub id"),
        ([*COLUMN_ARGUMENTS], ["--splits", "test=x"], "is for a hub id"),
        ([*COLUMN_ARGUMENTS], ["--name", "a b"], "name: 'a b' is not one word"),
        ([*COLUMN_ARGUMENTS], ["--test-share", "1"], "test-share"),
        ([*COLUMN_ARGUMENTS], ["--limit", "0"], "limit"),
    ]
    for columns, options, message in cases:
        with case_folder((columns, options)) as folder:
            source = write_table_with_pictures(folder, "jsonl", [GOOD_ROW])
            code = run_convert(source, folder / "out", *options, columns=tuple(columns))
            assert message in stderr_of_refusal(code, folder / "out", capsys)
