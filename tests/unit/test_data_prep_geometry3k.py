"""Geometry3K from its authors' folders and from tables in the hub's format: rows as promised, mistakes named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, List, Value, disable_progress_bars
from datasets import Image as ImageFeature
from PIL import Image

from data_prep.cli import main
from data_prep.schema import FEATURES, Row
from data_prep.sources.intergps import readable
from data_prep.storage import load_split, read_manifest, stored_rows

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "geometry3k_raw"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real Geometry3K problems at {SHARED}")

HUB_FEATURES = Features({"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")})


def _picture(size: tuple[int, int] = (30, 20)) -> Image.Image:
    """Transparent, with a black left half: on white paper its right half is white."""
    picture = Image.new("RGBA", size, (0, 0, 0, 0))
    picture.paste((0, 0, 0, 255), (0, 0, size[0] // 2, size[1]))
    return picture


def _problem_folder(root: Path, split: str = "train", number: int = 7, **changed: Any) -> Path:
    """One problem in the authors' layout; a key with the value None is left out."""
    folder = root / split / str(number)
    folder.mkdir(parents=True)
    data = {
        "problem_text": "Find m \\widehat A B.",
        "choices": ["5", "5 \\sqrt { 3 }"],
        "answer": "B",
        "problem_type_graph": ["Circle", "Triangle"],
        "problem_type_goal": ["Angle"],
        **changed,
    }
    (folder / "data.json").write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    _picture().save(folder / "img_diagram.png")
    return folder


def _write_table(folder: Path, rows: list[dict[str, Any]], split: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=HUB_FEATURES).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def _prepare(source: str, location: Path | str, output: Path, *options: str) -> int:
    return main(["geometry3k", "--source", source, "--input", str(location), "--output", str(output), *options])


def _only_row(output: Path, split: str = "train") -> Row:
    (row,) = stored_rows(output, split)
    return row


def _image(row: Row) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


def _refused(code: int, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error line, after checking that it is one, that the exit code is 2, and that nothing was left behind."""
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not output.exists() and not list(output.parent.glob(f".{output.name}*"))
    return error


@pytest.fixture(autouse=True)
def _quiet_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    disable_progress_bars()  # writing a table shows one, on the stderr that the tests read


@needs_shared
def test_the_real_problems(tmp_path: Path) -> None:
    assert _prepare("intergps", SHARED, tmp_path / "out") == 0
    dataset = load_split(tmp_path / "out", "train")
    assert dataset.features == FEATURES
    assert dataset["id"] == [f"geometry3k/train/{number}" for number in range(11, 17)]
    assert dataset["answer"] == ["80", "13", "9", "48", "5\\sqrt{3}", "10"]
    assert dataset["answer_raw"] == ["D", "B", "A", "B", "C", "B"]
    assert dataset[0]["problem"] == "In \\odot X, A B = 30, C D = 30, and m \\widehat{C Z} = 40. Find m \\widehat{A B}."
    assert dataset[4]["choices"] == ["5", "5 \\sqrt { 2 }", "5 \\sqrt { 3 }", "10"]
    assert dataset[5]["meta"]["goal"] == "Length" and dataset[5]["meta"]["shapes"] == ["Line", "Triangle"]
    for row in dataset:
        image = row["images"][0]
        assert image.mode == "RGB"
        assert image.getextrema() != ((0, 0),) * 3, f"{row['id']} is black on black"
        assert max(image.getpixel((0, image.height - 1))) > 200, f"{row['id']} has no white corner"


def test_the_gold_is_the_value_of_the_letter_and_transparency_is_white(tmp_path: Path) -> None:
    _problem_folder(tmp_path / "raw", "val", 2101)
    assert _prepare("intergps", tmp_path / "raw", tmp_path / "out") == 0
    row = _only_row(tmp_path / "out", "validation")
    assert row["id"] == "geometry3k/validation/2101" and row["split"] == "validation"
    assert (row["answer"], row["answer_raw"], row["choices"]) == ("5\\sqrt{3}", "B", ["5", "5 \\sqrt { 3 }"])
    assert row["meta"]["shapes"] == ["Circle", "Triangle"]
    assert _image(row).getpixel((2, 2)) == (0, 0, 0) and _image(row).getpixel((28, 2)) == (255, 255, 255)


def test_problems_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 100):
        _problem_folder(tmp_path / "raw", number=number)
    (tmp_path / "raw" / "train" / ".DS_Store").touch()
    assert _prepare("intergps", tmp_path / "raw", tmp_path / "out", "--limit", "2") == 0
    assert [row["id"][-2:] for row in stored_rows(tmp_path / "out", "train")] == ["/9", "10"]


def test_pictures_are_upright_and_within_the_pixel_budget(tmp_path: Path) -> None:
    folder = _problem_folder(tmp_path / "raw")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the stored 400 x 200 is to be shown as 200 x 400
    _picture((400, 200)).convert("RGB").save(folder / "img_diagram.png", exif=exif)
    assert _prepare("intergps", tmp_path / "raw", tmp_path / "out", "--max-pixels", "20000") == 0
    assert _image(_only_row(tmp_path / "out")).size == (100, 200)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Find m \\widehat A B.", "Find m \\widehat{A B}."),
        ("m \\widehat A B C = 40", "m \\widehat{A B C} = 40"),
        ("\\overline A B \\perp \\overline CD", "\\overline{A B} \\perp \\overline{CD}"),
        ("If \\overline A B Find x", "If \\overline{A B} Find x"),
        ("\\widehat { A B } and \\angle A B C, A B = 3", "\\widehat { A B } and \\angle A B C, A B = 3"),
    ],
)
def test_accents_cover_all_their_letters(text: str, expected: str) -> None:
    assert readable(text) == expected


def _no_picture(folder: Path) -> None:
    (folder / "img_diagram.png").unlink()


def _broken_picture(folder: Path) -> None:
    encoded = (folder / "img_diagram.png").read_bytes()
    (folder / "img_diagram.png").write_bytes(encoded[: len(encoded) // 2])


def _broken_json(folder: Path) -> None:
    (folder / "data.json").write_text("{")


@pytest.mark.parametrize(
    ("changed", "damage", "expected"),
    [
        ({"answer": "E"}, None, "the answer 'E' is not the letter of one of its 2 choices; write one of A, B in"),
        ({"answer": ""}, None, "the answer '' is not the letter"),
        ({"answer": 2}, None, "'answer' is 2; make it a text in"),
        ({"choices": None}, None, "'choices' is missing; make it a list of texts in"),
        ({"choices": []}, None, "choices [] is empty"),
        ({"choices": ["5", " "]}, None, "choice B, the right one, is ' '"),
        ({"choices": ["5", "12 or 13"]}, None, "the gold answer '12 or 13' cannot be graded against itself"),
        ({"problem_text": " "}, None, "the problem text '' is empty"),
        ({}, _no_picture, "img_diagram.png cannot be read"),
        ({}, _broken_picture, "is not readable"),
        ({}, _broken_json, "is not JSON"),
    ],
)
def test_a_bad_problem_is_named_with_its_value_and_remedy(
    changed: dict[str, Any],
    damage: Callable[[Path], None] | None,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _problem_folder(tmp_path / "raw", number=6)
    folder = _problem_folder(tmp_path / "raw", **changed)
    if damage:
        damage(folder)
    error = _refused(_prepare("intergps", tmp_path / "raw", tmp_path / "out"), tmp_path / "out", capsys)
    assert error.startswith("error: geometry3k/train/7: ") and expected in error and ";" in error


def test_a_folder_without_problems_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw" / "train").mkdir(parents=True)
    error = _refused(_prepare("intergps", tmp_path / "raw", tmp_path / "out"), tmp_path / "out", capsys)
    assert "has no problem folder" in error


def _hub_rows() -> list[dict[str, Any]]:
    return [
        {"images": [_picture()], "problem": "<image>Find x.", "answer": "\\frac { 39 } { 4 }"},
        {
            "images": [_picture((8, 8)), _picture()],
            "problem": "<image> <image>\nFind $m \\angle 1$.",
            "answer": "1,000",
        },
    ]


def _check_hub_rows(output: Path) -> None:
    first, second = stored_rows(output, "train")
    assert (first["id"], second["id"]) == ("geometry3k/train/0", "geometry3k/train/1")
    assert (first["problem"], second["problem"]) == ("Find x.", "Find $m \\angle 1$.")
    assert (first["answer"], first["answer_raw"]) == ("\\frac{39}{4}", "\\frac { 39 } { 4 }")
    assert (second["answer"], len(second["images"]), second["choices"]) == ("1000", 2, None)
    assert _image(first).mode == "RGB" and _image(first).getpixel((28, 2)) == (255, 255, 255)
    assert _only_row(output, "validation")["split"] == "validation"


def test_parquet_files_in_the_hubs_format(tmp_path: Path) -> None:
    _write_table(tmp_path / "table" / "data", _hub_rows())
    _write_table(tmp_path / "table" / "data", _hub_rows()[:1], "validation")
    assert _prepare("parquet", tmp_path / "table", tmp_path / "out") == 0
    _check_hub_rows(tmp_path / "out")
    assert not list(tmp_path.glob("cache/**/*.arrow")), "a second copy of the data stays in the cache"


def test_the_hub_goes_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load_dataset(dataset_id: str) -> DatasetDict:
        asked.append(dataset_id)
        tables = {"train": _hub_rows(), "val": _hub_rows()[:1]}
        return DatasetDict({split: Dataset.from_list(rows, features=HUB_FEATURES) for split, rows in tables.items()})

    monkeypatch.setattr("data_prep.sources.tabular.load_dataset", load_dataset)
    assert _prepare("hub", "hiyouga/geometry3k", tmp_path / "out") == 0
    assert asked == ["hiyouga/geometry3k"]
    _check_hub_rows(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest["source"], manifest["input"]) == ("geometry3k/hub", "hiyouga/geometry3k")
    assert manifest["counts"] == {"train": 2, "validation": 1}


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_dataset(dataset_id: str) -> DatasetDict:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("data_prep.sources.tabular.load_dataset", load_dataset)
    error = _refused(_prepare("hub", "hiyouga/geometry3k", tmp_path / "out"), tmp_path / "out", capsys)
    assert "'hiyouga/geometry3k' cannot be loaded" in error


def test_a_prepared_folder_can_be_prepared_again(tmp_path: Path) -> None:
    """The output is itself a table in the hub's format, so the round trip must keep golds and pixels."""
    _problem_folder(tmp_path / "raw")
    assert _prepare("intergps", tmp_path / "raw", tmp_path / "first") == 0
    assert _prepare("parquet", tmp_path / "first", tmp_path / "second") == 0
    first, second = _only_row(tmp_path / "first"), _only_row(tmp_path / "second")
    assert (first["problem"], first["answer"], first["images"]) == (
        second["problem"],
        second["answer"],
        second["images"],
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"answer": None}, "'answer' is None"),
        ({"answer": "12 or 13"}, "the gold answer '12 or 13' cannot be graded"),
        ({"images": []}, "images [] is empty"),
        ({"images": [{"bytes": b"not a picture", "path": None}]}, "image 0 (13 bytes) is not readable"),
        ({"images": [{"bytes": None, "path": "/etc/hostname"}]}, "image 0 has no bytes"),
        ({"problem": "Find <image> x."}, "<image> in the middle"),
    ],
)
def test_a_bad_row_of_a_table_is_named(
    changed: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = _hub_rows()[0]
    _write_table(tmp_path / "table", [good, {**good, **changed}])
    error = _refused(_prepare("parquet", tmp_path / "table", tmp_path / "out"), tmp_path / "out", capsys)
    assert error.startswith("error: geometry3k/train/1: ") and expected in error
    assert "row 1 of split train of" in error


def test_a_table_that_is_not_in_the_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, output = tmp_path / "table", tmp_path / "out"
    assert "has no Parquet file" in _refused(_prepare("parquet", table, output), output, capsys)
    table.mkdir()
    (table / "train.parquet").write_text("not Parquet")
    assert "is not a readable Parquet file" in _refused(_prepare("parquet", table, output), output, capsys)
    Dataset.from_list([{"image": "x", "problem": "p", "answer": "1"}]).to_parquet(table / "train.parquet")
    error = _refused(_prepare("parquet", table, output), output, capsys)
    assert "lacks the column 'images'; did you mean 'image'?" in error
    Dataset.from_list([{"images": ["x"], "problem": "p", "answer": "1"}]).to_parquet(table / "train.parquet")
    assert "it has to be a list of images" in _refused(_prepare("parquet", table, output), output, capsys)
    (table / "train.parquet").rename(table / "testmini.parquet")
    assert "has a split 'testmini'" in _refused(_prepare("parquet", table, output), output, capsys)
