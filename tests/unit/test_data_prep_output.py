"""An output folder is complete or absent, never a stranger's, and what it holds can be read and counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from adora_vl.errors import UserError
from data_prep.cli import main
from data_prep.images import UnreadableImageError, clean_image, png_bytes
from data_prep.inspection import answer_form, survey
from data_prep.output import complete_or_absent
from data_prep.prepare import prepare_synthetic
from data_prep.schema import Row
from data_prep.storage import file_hashes, load_split, read_manifest, split_files, write_split
from data_prep.synthetic.generate import generate


def _prepare(output: Path, rows: int = 3, *more: str) -> int:
    return main(["synthetic", "--output", str(output), "--rows", str(rows), "--test-rows", "2", *more])


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _fail_at_row(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    def failing_generate(rows: int, **options: Any) -> Iterator[Row]:
        for index, row in enumerate(generate(rows, **options)):
            if index == failing:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr("data_prep.prepare.generate", failing_generate)


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_at_row(monkeypatch, 70)  # a batch of 64 rows is on the disk by then
    assert _prepare(tmp_path / "out", 100) == 130
    assert not list(tmp_path.iterdir())


def test_an_interrupted_preparation_leaves_the_old_dataset_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _prepare(tmp_path / "out") == 0
    before = _bytes(tmp_path / "out")
    _fail_at_row(monkeypatch, 2)
    assert _prepare(tmp_path / "out", 5, "--overwrite") == 130
    assert _bytes(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_dataset_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path / "out") == 0
    before = _bytes(tmp_path / "out")
    rename = Path.rename
    monkeypatch.setattr("data_prep.output._exchanged", lambda one, other: False)

    def failing_rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    assert _prepare(tmp_path / "out", 5, "--overwrite") == 2
    assert "disk gone" in capsys.readouterr().err
    assert _bytes(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_dataset_stands_until_the_new_one_is_complete(tmp_path: Path) -> None:
    assert _prepare(tmp_path / "out") == 0
    with complete_or_absent(tmp_path / "out") as folder:
        assert load_split(tmp_path / "out", "train").num_rows == 3
        (folder / "manifest.json").write_text("{}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]


def test_an_empty_folder_is_filled_and_the_same_dataset_made_again(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert _prepare(tmp_path / "out") == 0
    before = _bytes(tmp_path / "out")
    assert _prepare(tmp_path / "out") == 0
    assert _bytes(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_dataset_is_replaced_only_where_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path / "out") == 0
    before = _bytes(tmp_path / "out")
    others = {
        "rows 3, this one 5": ["synthetic", "--rows", "5", "--test-rows", "2"],
        "seed 0, this one 1": ["synthetic", "--rows", "3", "--test-rows", "2", "--seed", "1"],
        "size 56, this one 112": ["synthetic", "--rows", "3", "--test-rows", "2", "--level", "2", "--size", "112"],
        "source 'synthetic', this one 'knights'": ["knights", "--rows", "3", "--test-rows", "2"],
    }
    for difference, words in others.items():
        capsys.readouterr()
        assert main([*words, "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert difference in error and "--overwrite" in error and error.count("\n") == 1
        assert _bytes(tmp_path / "out") == before
    assert _prepare(tmp_path / "out", 5, "--overwrite") == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest["counts"] == {"train": 5, "test": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"made_by": "somebody else"}'])
def test_a_folder_that_is_not_ours_is_refused_and_kept(
    manifest: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    if manifest is not None:
        (output / "manifest.json").write_text(manifest)
    before = _bytes(output)
    assert _prepare(output) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: output: ") and error.count("\n") == 1 and str(output) in error
    assert _bytes(output) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_strangers_file_in_a_prepared_folder_is_not_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path / "out") == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert _prepare(tmp_path / "out") == 2
    assert "'notes.txt'" in capsys.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_an_output_below_or_on_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "out"):
        assert _prepare(output) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_manifest_says_what_is_in_the_folder_and_nothing_of_the_clock(tmp_path: Path) -> None:
    manifest = prepare_synthetic(tmp_path / "out", rows=3, test_rows=2, seed=4)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["files"] == file_hashes(tmp_path / "out") and len(manifest["files"]) == 2
    assert manifest["arguments"] == {"rows": 3, "test_rows": 2, "seed": 4, "size": 56, "families": []}
    assert set(manifest) == {
        "arguments",
        "counts",
        "files",
        "input",
        "leaks",
        "made_by",
        "quarantined",
        "revision",
        "source",
        "versions",
    }


def test_rows_are_written_in_batches(tmp_path: Path) -> None:
    assert write_split(generate(100), tmp_path, "train") == 100
    (path,) = split_files(tmp_path)["train"]
    assert pq.ParquetFile(path).num_row_groups == 2
    assert load_split(tmp_path, "train")["id"] == [f"synthetic/0/train/{index}" for index in range(100)]


def test_loading_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        load_split(tmp_path / "none", "train")
    write_split(generate(1), tmp_path, "train")
    with pytest.raises(UserError, match=r"has no split 'test'.*it has train"):
        load_split(tmp_path, "test")
    pq.write_table(pa.table({"id": ["1"], "problem": ["p"], "answer": ["1"]}), tmp_path / "data" / "test-0.parquet")
    with pytest.raises(UserError, match="lacks the column 'images'"):
        load_split(tmp_path, "test")
    (train,) = split_files(tmp_path)["train"]
    pq.write_table(pq.read_table(train).slice(0, 0), tmp_path / "data" / "test-0.parquet")
    with pytest.raises(UserError, match="has no rows in the split 'test'"):
        load_split(tmp_path, "test")
    train.unlink()
    with pytest.raises(UserError, match="^dataset: .* has no rows; prepare it again"):
        survey(tmp_path)


def test_inspect_counts_every_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "synthetic",
        "--output",
        str(tmp_path / "out"),
        "--rows",
        "5",
        "--test-rows",
        "3",
        "--families",
        "polygon",
    ]
    assert main(command) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (
        ["train", "test"],
        ["rows", "5", "3"],
        ["synthetic", "5", "3"],
        ["Angle", "5", "3"],
        ["integer", "5", "3"],
        ["up", "to", "56", "px", "5", "3"],
    ):
        assert line in table


def test_inspect_of_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["inspect", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: dataset: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("-12", "integer"),
        ("13.5", "decimal"),
        ("\\frac{39}{4}", "fraction"),
        ("5\\sqrt{3}", "radical"),
        ("14\\pi", "multiple of pi"),
        ("C", "letter"),
        ("3x+1", "expression"),
        ("-\\frac{3\\sqrt{2}}{2}", "radical"),
        ("3+2\\sqrt{5}", "expression"),
        ("16-4\\pi", "expression"),
        ("\\frac{9\\sqrt{3}\\pi}{4}", "multiple of pi"),
        ("1\\frac{1}{2}", "fraction"),
        ("2/3", "fraction"),
        ("rhombus", "text"),
    ],
)
def test_answer_forms(answer: str, form: str) -> None:
    assert answer_form(answer) == form


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_any_kind_of_picture_becomes_the_same_rgb(mode: str, tmp_path: Path) -> None:
    grey = np.full((4, 6), 102, dtype=np.uint16)
    grey[3, 5] = 255  # a picture of one colour alone is refused
    picture = Image.fromarray(grey * 257) if mode == "I;16" else Image.fromarray(grey.astype(np.uint8)).convert(mode)
    path = tmp_path / ("picture.tiff" if mode == "CMYK" else "picture.png")
    picture.save(path)
    cleaned = clean_image(path.read_bytes())
    expected = picture.convert("RGB").getpixel((0, 0)) if mode == "1" else (102, 102, 102)
    assert (cleaned.mode, cleaned.size, cleaned.getpixel((0, 0))) == ("RGB", (6, 4), expected)
    assert cleaned.getpixel((5, 3)) == (255, 255, 255)


def _gradient(width: int, height: int) -> bytes:
    return png_bytes(Image.linear_gradient("L").resize((width, height)).convert("RGB"))


@pytest.mark.parametrize("size", [(900, 40), (40, 900), (33, 57), (640, 480), (5, 5)])
@pytest.mark.parametrize("limits", [(784, 1000), (3136, 100_000), (50_000, 60_000)])
@pytest.mark.parametrize("unit", [28, 32])
def test_pictures_outside_of_the_limits_get_the_size_that_the_model_would_choose(
    size: tuple[int, int], limits: tuple[int, int], unit: int
) -> None:
    """So that the processor with the same limits leaves them as they are; the others keep their size."""
    rounded = round(size[0] / unit) * round(size[1] / unit) * unit * unit
    by_rule = smart_resize(size[1], size[0], unit, *limits)[::-1]
    if not limits[0] <= by_rule[0] * by_rule[1] <= limits[1]:
        with pytest.raises(UnreadableImageError, match="no size of its shape is within"):
            clean_image(_gradient(*size), *limits, unit)
        return
    stored = clean_image(_gradient(*size), *limits, unit).size
    if limits[0] <= rounded <= limits[1]:
        assert stored == size
    else:
        assert stored == by_rule == smart_resize(stored[1], stored[0], unit, *limits)[::-1]


def test_without_limits_pictures_keep_their_size() -> None:
    for size in ((5, 5), (2000, 1500), (1990, 10)):
        assert clean_image(_gradient(*size)).size == size


def test_an_unreadable_picture_says_so() -> None:
    for encoded in (b"", b"GIF89a", png_bytes(Image.new("RGB", (90, 90)))[:60]):
        with pytest.raises(UnreadableImageError):
            clean_image(encoded)


def test_the_module_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_prep", "inspect", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
