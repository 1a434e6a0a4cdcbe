"""A diagram with its question stands in one split alone; other questions and figures are not taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from data_prep.images import clean_image
from data_prep.leakage import LeakIndex, difference_hash, fingerprint
from data_prep.storage import read_manifest, stored_rows
from tests.unit.data_prep_support import drawing, encoded, prepare, problem_folder, quarantined


def _ids(output: Path, split: str) -> list[str]:
    return [row["id"].removeprefix("geometry3k/") for row in stored_rows(output, split)]


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    raw = tmp_path / "raw"
    figure = drawing(1, 300)
    problem_folder(raw, "test", 900, encoded(figure), problem_text="Find m \\widehat A B .")
    problem_folder(raw, "val", 800, encoded(drawing(2)))
    problem_folder(raw, "train", 1, encoded(figure), problem_text="find  m \\widehat A B")  # the very pixels
    problem_folder(raw, "train", 2, encoded(figure.resize((190, 190)), "JPEG", quality=60))  # seen again by a camera
    problem_folder(raw, "train", 3, encoded(figure), problem_text="Find the radius.")  # another question
    problem_folder(raw, "train", 4, encoded(figure.resize((190, 190))), answer="A")  # the same figure, another number
    problem_folder(raw, "train", 5, encoded(drawing(3)))  # another figure
    problem_folder(raw, "train", 6, encoded(drawing(3)))  # twice in one split is no leak
    return raw


def test_leaks_are_dropped_from_train_and_reported(
    leaky: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("intergps", leaky, tmp_path / "out") == 0
    assert _ids(tmp_path / "out", "train") == ["train/3", "train/4", "train/5", "train/6"]
    assert _ids(tmp_path / "out", "test") == ["test/900"] and _ids(tmp_path / "out", "validation") == ["validation/800"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    also = {"also": "geometry3k/test/900"}
    assert manifest["leaks"] == {
        "found": 2,
        "dropped": 2,
        "rows": [
            {"id": "geometry3k/train/1", **also, "by": "exact"},
            {"id": "geometry3k/train/2", **also, "by": "near"},
        ],
    }
    assert "leaks: 2 rows" in capsys.readouterr().out
    lines = quarantined(tmp_path / "out")
    assert [(line["id"][-1], line["reason"]) for line in lines] == [("1", "leak"), ("2", "leak")]
    assert encoded(drawing(1, 300)) in {(tmp_path / "out" / name).read_bytes() for name in lines[0]["files"]}


def test_leaks_can_be_kept_and_are_reported_all_the_same(leaky: Path, tmp_path: Path) -> None:
    assert prepare("intergps", leaky, tmp_path / "out", "--keep-leaks") == 0
    assert len(_ids(tmp_path / "out", "train")) == 6
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and (manifest["leaks"]["found"], manifest["leaks"]["dropped"]) == (2, 0)
    assert manifest["quarantined"]["rows"] == 0


def test_a_leak_between_two_held_out_splits_is_reported_and_kept(tmp_path: Path) -> None:
    problem_folder(tmp_path / "raw", "val", 1, encoded(drawing(1)))
    problem_folder(tmp_path / "raw", "test", 2, encoded(drawing(1)))
    assert prepare("intergps", tmp_path / "raw", tmp_path / "out") == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest["counts"] == {"validation": 1, "test": 1}
    assert (manifest["leaks"]["found"], manifest["leaks"]["dropped"]) == (1, 0)


def test_the_pixels_alone_count_where_the_golds_differ(tmp_path: Path) -> None:
    """One of the two golds is wrong: no reason to train on the test question."""
    problem_folder(tmp_path / "raw", "test", 1, encoded(drawing(1)))
    problem_folder(tmp_path / "raw", "train", 2, encoded(drawing(1)), answer="A")
    problem_folder(tmp_path / "raw", "train", 3)
    assert prepare("intergps", tmp_path / "raw", tmp_path / "out") == 0
    assert _ids(tmp_path / "out", "train") == ["train/3"]


def _distance(one: Image.Image, other: Image.Image) -> int:
    return (difference_hash(one) ^ difference_hash(other)).bit_count()


def test_copies_of_the_real_diagrams_are_near_and_others_far(geometry3k_raw: Path) -> None:
    real = [clean_image(path.read_bytes()) for path in sorted(geometry3k_raw.glob("train/*/img_diagram.png"))]
    index = LeakIndex()
    for number, image in enumerate(real):
        index.add("test", str(number), fingerprint("Find x.", "5", [image]))
    for number, image in enumerate(real):
        half = (image.width // 2, image.height // 2)
        margin = Image.new("RGB", (image.width + 40, image.height + 10), "white")
        margin.paste(image, (30, 5))
        for copy in (image.resize(half), image.convert("P", palette=Image.Palette.ADAPTIVE, colors=16), margin):
            assert index.find("train", fingerprint("find x", "5", [copy])) == (str(number), "near")
    distances = [_distance(a, b) for n, a in enumerate(real) for b in real[:n]]
    assert min(distances) > 50


def test_one_image_is_not_two() -> None:
    index = LeakIndex()
    index.add("test", "a", fingerprint("Find x.", "5", [drawing(1), drawing(2)]))
    assert index.find("train", fingerprint("Find x.", "5", [drawing(1)])) is None
    assert index.find("test", fingerprint("Find x.", "5", [drawing(1), drawing(2)])) is None
