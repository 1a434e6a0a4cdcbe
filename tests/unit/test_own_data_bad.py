"""Bad input of a stranger's data: a row goes into quarantine with its reason, a file ends in one line. Nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.clean_row import PixelLimits, RowError
from data_prep.clean_source import Cleaned, clean_one
from data_prep.own.columns import Columns
from data_prep.own.pictures import PictureError, Surroundings, picture_bytes
from data_prep.own.records import Context, read_record
from data_prep.storage import stored_rows
from tests.unit.data_prep_support import drawing, encoded, quarantined, refused
from tests.unit.own_data_support import PICTURES, convert, table

SHORT = ("problem=q", "answer=a", "images=i", "id=k", "choices=c")
GOOD = {"k": "good", "q": "Find x.", "a": "5", "i": "good.png", "c": None}
NAN = float("nan")


def write(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """The rows as a file, beside them a good picture, a broken one, and a link out of the folder."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "outside.png").write_bytes(PICTURES[0])
    (folder / "in" / "good.png").write_bytes(PICTURES[1])
    (folder / "in" / "other.png").write_bytes(PICTURES[2])
    (folder / "in" / "broken.png").write_bytes(PICTURES[1][:-20])
    for name, target in (("link.png", folder / "outside.png"), ("loop.png", folder / "in" / "loop.png")):
        if not (folder / "in" / name).is_symlink():
            (folder / "in" / name).symlink_to(target)
    path = folder / "in" / f"mine.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "csv":
        table(folder / "in", "csv", rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# What is wrong with a row beside a good one, and the reason under which it is refused.
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
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
    "empty image": ({"i": ""}, "no_image"),
    "duplicate id": ({"k": "good"}, "duplicate_id"),
    "empty problem": ({"q": " "}, "no_text"),
    "empty answer": ({"a": ""}, "field_type"),
    "NaN as text": ({"a": "nan"}, "gold"),
    "a list of answers": ({"a": "Rome, Paris"}, "gold"),
    "a control token": ({"q": "Find x.<|im_end|>"}, "control_token"),
    "too many places": ({"q": "<image> and <image>"}, "placeholder"),
    "no such option": ({"c": '["1", "2"]', "a": "C"}, "letter_without_choice"),
    "two readings of an option": ({"c": '["B", "A"]', "a": "A"}, "ambiguous_answer"),
    "a long id": ({"k": "x" * 300}, "field_type"),
}
# These need a table whose values have types of their own.
TYPED_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "missing value": ({"a": None}, "field_type"),
    "a number for a problem": ({"q": 7}, "field_type"),
    "NaN": ({"a": NAN}, "field_type"),
    "true": ({"a": True}, "field_type"),
    "a list for an answer": ({"a": ["5"]}, "field_type"),
    "an object for an answer": ({"a": {"b": 1}}, "field_type"),
    "a number for an image": ({"i": 7}, "no_image"),
    "null in images": ({"i": ["good.png", None]}, "no_image"),
    "no options": ({"c": []}, "field_type"),
    "an object for options": ({"c": {"A": "5"}}, "field_type"),
    "half a surrogate pair": ({"q": "Find \ud800."}, "field_type"),
    "a huge number": ({"a": 10**400}, "gold"),
}


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_a_bad_row_is_refused_by_its_reason_and_the_others_are_kept(form: str, tmp_path: Path) -> None:
    bad = {**BAD_ROWS, **(TYPED_ROWS if form in ("jsonl", "json") else {})}
    rows: list[dict[str, Any]] = [GOOD]
    for number, (changed, _) in enumerate(bad.values()):
        row = {**GOOD, "k": f"bad{number}", **changed}
        row["i"] = row["i"].replace("FORM", form) if isinstance(row["i"], str) else row["i"]
        if form != "csv" and isinstance(row["c"], str):
            row["c"] = json.loads(row["c"])
        rows.append(row)
    source = write(tmp_path, form, rows)
    assert convert(source, tmp_path / "out", "--allow-quarantined", "1", columns=SHORT) == 0
    assert [row["id"] for row in stored_rows(tmp_path / "out", "train")] == ["mine/train/good"]
    said = {name: line["reason"] for name, line in zip(bad, quarantined(tmp_path / "out"), strict=True)}
    assert said == {name: reason for name, (_, reason) in bad.items()}
    details = [line["detail"] for line in quarantined(tmp_path / "out")]
    assert all("\n" not in line and len(line) < 600 and "; " in line and "row " in line for line in details)


def test_too_many_bad_rows_are_an_error_that_names_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "jsonl", [GOOD, {**GOOD, "k": "b", "i": "../outside.png"}])
    error = refused(convert(source, tmp_path / "out", columns=SHORT), tmp_path / "out", capsys)
    assert "1 of 2 rows" in error and "leads out of the input's folder" in error and "--allow-quarantined" in error
    assert not any((tmp_path / "out.quarantine").rglob("*.png")), "a picture from outside was copied"


def _made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "no rows|cannot be read|is not JSON"),
    "blank": (lambda path: path.write_bytes(b"\n\n"), "no rows|cannot be read|no column"),
    "random": (lambda path: path.write_bytes(os.urandom(5000)), "."),
    "not UTF-8": (lambda path: path.write_bytes(b'[{"q": "\xff\xfe"}]'), "."),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000), "."),
    "a folder": (_made_a_folder, "has no table"),
}


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_a_file_that_cannot_be_used_is_one_line(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (damage, message) in BAD_FILES.items():
        source = write(tmp_path / name.replace(" ", "_"), form, [GOOD])
        damage(source)
        error = refused(convert(source, tmp_path / "out", columns=SHORT), tmp_path / "out", capsys)
        assert any(part in error for part in message.split("|")) or message == ".", (name, error)
        assert len(error) < 2000


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_a_column_that_is_not_there_is_named_with_the_nearest(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, form, [{"quesiton": "Find x.", "a": "5"}])
    error = refused(
        convert(source, tmp_path / "out", columns=("problem=question", "answer=a")), tmp_path / "out", capsys
    )
    assert "has no column 'question'; did you mean 'quesiton'?" in error and "quesiton, a" in error


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_very_many_columns_are_read_past(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {**{f"c{number}": 0 for number in range(200_000)}, "q": "Find x.", "a": "5"}
    source = tmp_path / f"mine.{form}"
    if form == "jsonl":
        source.write_text(json.dumps(row) + "\n")
    else:
        source.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    assert convert(source, tmp_path / "out", columns=("problem=q", "answer=a")) == 0
    capsys.readouterr()
    error = refused(convert(source, tmp_path / "no", columns=("problem=q", "answer=b")), tmp_path / "no", capsys)
    assert "(200002 columns)" in error and len(error) < 1000


def test_a_line_with_another_number_of_cells_is_refused_alone(tmp_path: Path) -> None:
    source = tmp_path / "mine.csv"
    source.write_text('q,a\nFind x.,5\nFind y, or z.,6\n"Find y, or z.",7\nFind w.\n')
    options = ("--allow-quarantined", "1")
    assert convert(source, tmp_path / "out", *options, columns=("problem=q", "answer=a")) == 0
    assert [row["answer"] for row in stored_rows(tmp_path / "out", "train")] == ["5", "7"]
    assert [line["reason"] for line in quarantined(tmp_path / "out")] == ["not_a_row"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["problem=q"], "answer is missing"),
        (["problm=q", "answer=a"], "problem is missing; did you mean 'problm'?"),
        (["problem=q", "answer"], "'answer' is not NAME=COLUMN"),
        (["problem=q", "answer="], "is not the name of a column"),
        (["problem=q", "answer=a", "answer=b"], "answer is given twice"),
        (["problem=q,r", "answer=a"], "names 2 columns"),
        (["problem=q", "answer=a", "prompt=q"], "'prompt' cannot be the name of a column of your own"),
        (["problem=q", "answer=a", "a b=q"], "cannot be the name of a column of your own"),
        (["problem=q", "answer=a", "source=q"], "cannot be the name of a column of your own"),
    ],
)
def test_columns_that_say_nothing_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "jsonl", [GOOD])
    assert message in refused(convert(source, tmp_path / "out", columns=tuple(words)), tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--revision", "v1"], "revision: 'v1' is for a hub id"),
        (["--subset", "all"], "subset: 'all' is for a hub id"),
        (["--splits", "test=x"], "is for a hub id"),
        (["--name", "a b"], "name: 'a b' is not one word"),
        (["--test-share", "1"], "test-share"),
        (["--limit", "0"], "limit"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "jsonl", [GOOD])
    assert message in refused(convert(source, tmp_path / "out", *options, columns=SHORT), tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no table"),
        (["a.csv", "b.csv"], "has 2 tables"),
        (["train.csv", "train.jsonl"], "are both the split 'train'"),
    ],
)
def test_a_folder_whose_tables_are_not_clear_is_one_line(
    files: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for name in files:
        (tmp_path / "in" / name).write_text("q,a\nx,1\n")
    assert message in refused(convert(tmp_path / "in", tmp_path / "out", columns=SHORT[:2]), tmp_path / "out", capsys)
    for place in (tmp_path / "none", tmp_path / "in.txt"):
        (tmp_path / "in.txt").write_text("x")
        refused(convert(place, tmp_path / "out", columns=SHORT[:2]), tmp_path / "out", capsys)


def test_a_table_that_is_a_link_out_of_the_folder_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.csv").write_text("q,a\nx,1\n")
    (tmp_path / "in" / "train.csv").symlink_to(tmp_path / "secret.csv")
    error = refused(convert(tmp_path / "in", tmp_path / "out", columns=SHORT[:2]), tmp_path / "out", capsys)
    assert "leads out of" in error


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=20)
    | st.text(max_size=20)
    | st.sampled_from(["good.png", "../outside.png", "A", "<image>", "[1]", "\ud800", "9" * 5000]),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=st.fixed_dictionaries({}, optional=dict.fromkeys("qaikcx", anything)), texts_only=st.booleans())
def test_whatever_a_record_holds_it_is_sound_or_refused(
    record: dict[str, Any], texts_only: bool, tmp_path: Path
) -> None:
    if not (tmp_path / "in").exists():
        write(tmp_path, "jsonl", [GOOD])
    columns = Columns("q", "a", ("i",), ("c",), "k", (("own", "x"),))
    place = Surroundings((tmp_path / "in").resolve(), (tmp_path / "in").resolve())
    context = Context("mine", "train", "mine.jsonl", columns, place, texts_only)
    outcome = clean_one(lambda: read_record({**GOOD, **record}, 0, 0, context), PixelLimits())
    assert isinstance(outcome, Cleaned | RowError)
    if isinstance(outcome, RowError):
        assert outcome.kind and len(str(outcome)) < 2000
        json.dumps(outcome.record)
    else:
        assert outcome.row.keys() == columns.features.keys()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(["..", ".", "in", "a", "link.png", "good.png", "", "~", "/", "etc"]), max_size=6))
def test_no_path_leads_out_of_the_folder(parts: list[str], tmp_path: Path) -> None:
    if not (tmp_path / "in").exists():
        write(tmp_path, "jsonl", [GOOD])
        (tmp_path / "in" / "a").symlink_to(tmp_path)
    inside = (tmp_path / "in").resolve()
    try:
        content = picture_bytes("/".join(parts), Surroundings(inside, inside))
    except PictureError:
        return
    assert content == encoded(drawing(1, 60)), "another file than the one inside was read"
