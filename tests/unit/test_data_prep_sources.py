"""Zip files, samples, options, tables with columns of their own, and the counts of the real data set."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from datasets import Features, Value, disable_progress_bars
from PIL import Image

from data_prep.sources.intergps import InterGPS
from data_prep.storage import read_manifest, stored_rows
from tests.unit.data_prep_support import (
    HUB_FEATURES,
    drawing,
    only_row,
    prepare,
    problem_folder,
    quarantined,
    refused,
    stored_image,
    write_table,
)


@pytest.fixture(autouse=True)
def _quiet_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    disable_progress_bars()  # writing a table shows one, on the stderr that the tests read


def test_the_authors_zip_files(tmp_path: Path) -> None:
    """With the split's folder inside or without; the same rows as from the folders; damaged members are rows."""
    for number in range(60):
        problem_folder(tmp_path / "raw", number=number)
    problem_folder(tmp_path / "raw", "val", 100)
    (tmp_path / "zips").mkdir()
    with zipfile.ZipFile(tmp_path / "zips" / "train.zip", "w") as archive:
        for path in sorted((tmp_path / "raw" / "train").rglob("*.*")):
            archive.write(path, path.relative_to(tmp_path / "raw"))
        archive.writestr("__MACOSX/train/3/._data.json", b"junk")
        archive.writestr("train/readme.txt", b"junk")
    with zipfile.ZipFile(tmp_path / "zips" / "val.zip", "w") as archive:
        for path in (tmp_path / "raw" / "val").rglob("*.*"):
            archive.write(path, path.relative_to(tmp_path / "raw" / "val"))
    assert prepare("intergps", tmp_path / "raw", tmp_path / "folders") == 0
    assert prepare("intergps", tmp_path / "zips", tmp_path / "zipped", "--workers", "2") == 0
    for split in ("train", "validation"):
        assert list(stored_rows(tmp_path / "folders", split)) == list(stored_rows(tmp_path / "zipped", split))

    damaged = bytearray((tmp_path / "zips" / "train.zip").read_bytes())
    with zipfile.ZipFile(tmp_path / "zips" / "train.zip") as archive:
        place = archive.getinfo("train/5/img_diagram.png").header_offset
    damaged[place + 200] ^= 0xFF
    (tmp_path / "train.zip").write_bytes(damaged)
    assert prepare("intergps", tmp_path / "train.zip", tmp_path / "out") == 0
    (line,) = quarantined(tmp_path / "out")
    assert (line["id"], line["reason"]) == ("geometry3k/train/5", "file_missing") and "CRC" in line["detail"]


def test_a_broken_zip_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.zip").write_bytes(b"PK\x03\x04 and no more")
    error = refused(prepare("intergps", tmp_path / "train.zip", tmp_path / "out"), tmp_path / "out", capsys)
    assert "is not a readable zip file" in error


def test_the_diagram_with_lettered_points(geometry3k_raw: Path, tmp_path: Path) -> None:
    for diagram, name in (("plain", "img_diagram.png"), ("point", "img_diagram_point.png")):
        assert prepare("intergps", geometry3k_raw, tmp_path / diagram, "--diagram", diagram) == 0
        for row, folder in zip(
            stored_rows(tmp_path / diagram, "train"), sorted(geometry3k_raw.glob("train/*")), strict=True
        ):
            assert stored_image(row).size == Image.open(folder / name).size
    assert [row["images"] for row in stored_rows(tmp_path / "plain", "train")] != [
        row["images"] for row in stored_rows(tmp_path / "point", "train")
    ]


def test_limit_takes_the_first_rows_and_with_a_seed_a_sample(tmp_path: Path) -> None:
    for number in range(30):
        problem_folder(tmp_path / "raw", number=number)
    taken = {}
    for name, options in {"first": (), "a": ("--seed", "1"), "again": ("--seed", "1"), "b": ("--seed", "2")}.items():
        assert prepare("intergps", tmp_path / "raw", tmp_path / name, "--limit", "5", *options) == 0
        taken[name] = [int(row["id"].rsplit("/")[-1]) for row in stored_rows(tmp_path / name, "train")]
    assert taken["first"] == [0, 1, 2, 3, 4] and taken["a"] == taken["again"] == sorted(taken["a"])
    assert len({tuple(numbers) for numbers in taken.values()}) == 3 and len(set(taken["a"])) == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--seed", "3"), "seed: 3 has nothing to choose without --limit"),
        (("--limit", "0"), "--limit: '0' is not a whole number from 1 on"),
        (("--max-pixels", "100"), "--max-pixels: '100' is not a whole number from 784 to"),
        (("--min-pixels", "9000", "--max-pixels", "800"), "min_pixels: 9000 is over max_pixels, 800"),
        (("--workers", "0"), "--workers: '0' is not a whole number from 1 to 64"),
        (("--allow-quarantined", "2"), "--allow-quarantined: '2' is not a number from 0 to 1"),
        (("--revision", "main"), "revision: 'main' is for --source hub alone"),
    ],
)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem_folder(tmp_path / "raw")
    code = prepare("intergps", tmp_path / "raw", tmp_path / "out", *options)
    assert expected in refused(code, tmp_path / "out", capsys)


def test_a_table_may_have_choices_and_ids_of_its_own(tmp_path: Path) -> None:
    """So a prepared folder keeps both when it is prepared again."""
    problem_folder(tmp_path / "raw", number=12)
    assert prepare("intergps", tmp_path / "raw", tmp_path / "first") == 0
    assert prepare("parquet", tmp_path / "first", tmp_path / "second") == 0
    first, second = only_row(tmp_path / "first"), only_row(tmp_path / "second")
    assert [first[name] for name in ("id", "choices", "answer")] == [
        second[name] for name in ("id", "choices", "answer")
    ]
    features = Features({**HUB_FEATURES, "choices": [Value("string")]})
    row = {"images": [drawing(1)], "problem": "Find x.", "answer": "B", "choices": ["1", "2 \\sqrt { 2 }"]}
    write_table(tmp_path / "table", [row], features=features)
    assert prepare("parquet", tmp_path / "table", tmp_path / "third") == 0
    third = only_row(tmp_path / "third")
    assert (third["answer"], third["answer_raw"]) == ("2\\sqrt{2}", "B")


@pytest.mark.parametrize("source", ["parquet", "intergps"])
def test_the_real_data_set_has_the_rows_that_it_is_known_for(source: str, tmp_path: Path) -> None:
    """Set GEOMETRY3K_PARQUET or GEOMETRY3K_INTERGPS to the folder of the downloaded data."""
    name = f"GEOMETRY3K_{source.upper()}"
    if name not in os.environ:
        pytest.skip(f"the whole Geometry3K is not here: {name} does not name its folder")
    assert prepare(source, os.environ[name], tmp_path / "out", "--keep-leaks") == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    broken: dict[str, int] = dict.fromkeys(("train", "validation", "test"), 0)
    for line in quarantined(tmp_path / "out") if manifest["quarantined"]["rows"] else []:
        broken[line["split"]] += 1
    read = {split: manifest["counts"][split] + broken[split] for split in broken}
    assert read == {"train": 2101, "validation": 300, "test": 601}


def _zip(path: Path, folders: list[str], tmp_path: Path) -> None:
    problem = problem_folder(tmp_path / "one", number=len(list((tmp_path / "one" / "train").glob("*"))) + 1)
    with zipfile.ZipFile(path, "w") as archive:
        for folder in folders:
            for file in problem.iterdir():
                archive.write(file, f"{folder}/{file.name}")


@pytest.mark.parametrize("name", ["geometry3k.zip", "train.zip", "val.zip", "anything at all.zip"])
@pytest.mark.parametrize("above", ["", "geometry3k/", "data/geometry3k/"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_splits_of_a_zip_are_those_of_its_folders(name: str, above: str, whole: bool, tmp_path: Path) -> None:
    root = tmp_path / "raw"
    root.mkdir()
    _zip(root / name, [f"{above}train/1", f"{above}train/2", f"{above}val/3", f"{above}test/4"], tmp_path)
    opened = InterGPS(root if whole else root / name)
    assert opened.sizes == {"train": 2, "validation": 1, "test": 1}


def test_a_zip_is_named_after_its_split_only_where_nothing_inside_says_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _zip(tmp_path / "val.zip", ["5"], tmp_path)
    assert InterGPS(tmp_path / "val.zip").sizes == {"validation": 1}
    _zip(tmp_path / "some.zip", ["5"], tmp_path)
    code = prepare("intergps", tmp_path / "some.zip", tmp_path / "out")
    assert "are in no folder train, val, test" in refused(code, tmp_path / "out", capsys)
    code = prepare("intergps", tmp_path / "missing.zip", tmp_path / "out")
    assert "there is no file or folder" in refused(code, tmp_path / "out", capsys)
