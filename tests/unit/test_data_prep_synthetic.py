"""Synthetic datasets: the same bytes for the same arguments, no diagram in two splits, golds that verify."""

from __future__ import annotations

import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.errors import UserError
from adora_vl.rewards import canonical_gold, grade, verify_gold
from data_prep.cli import main
from data_prep.images import diagram_hash
from data_prep.prepare import ensure_synthetic, prepare_synthetic
from data_prep.schema import Row
from data_prep.storage import read_manifest, stored_rows
from data_prep.synthetic.canvas import STYLES
from data_prep.synthetic.families import FAMILIES
from data_prep.synthetic.generate import KNOWN, LEVELS, generate, split_of
from data_prep.synthetic.lettered import LETTERED

ROWS, TEST_ROWS = 100, 40


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("synthetic") / "data"
    prepare_synthetic(output, rows=ROWS, test_rows=TEST_ROWS)
    return output


def _rows(folder: Path) -> list[Row]:
    return [*stored_rows(folder, "train"), *stored_rows(folder, "test")]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _diagrams(folder: Path, split: str) -> set[str]:
    images = (row["images"][0]["bytes"] for row in stored_rows(folder, split))
    return {diagram_hash(Image.open(io.BytesIO(encoded))) for encoded in images}


def test_the_same_arguments_give_the_same_bytes(prepared: Path, tmp_path: Path) -> None:
    prepare_synthetic(tmp_path / "again", rows=ROWS, test_rows=TEST_ROWS)
    assert _bytes(prepared) == _bytes(tmp_path / "again")


def test_another_seed_gives_other_diagrams(prepared: Path, tmp_path: Path) -> None:
    prepare_synthetic(tmp_path / "other", rows=ROWS, test_rows=0, seed=1)
    assert _diagrams(prepared, "train").isdisjoint(_diagrams(tmp_path / "other", "train"))
    assert not list(tmp_path.glob("other/data/test-*"))


def test_no_diagram_stands_in_both_splits_even_across_seeds_and_arguments(prepared: Path, tmp_path: Path) -> None:
    train, held_out = _diagrams(prepared, "train"), _diagrams(prepared, "test")
    for seed in (1, 2):
        output = tmp_path / str(seed)
        prepare_synthetic(output, rows=ROWS, test_rows=TEST_ROWS + seed, seed=seed)
        train |= _diagrams(output, "train")
        held_out |= _diagrams(output, "test")
    assert len(train) == 3 * ROWS
    assert train.isdisjoint(held_out)


def test_the_stored_pixels_alone_decide_the_split(prepared: Path) -> None:
    """So that no seed or size can ever put a held-out diagram into training; samples alone cannot show that."""
    for row in _rows(prepared):
        assert split_of(Image.open(io.BytesIO(row["images"][0]["bytes"]))) == row["split"], row["id"]


def test_every_gold_is_canonical_and_verifies_against_itself(prepared: Path) -> None:
    for row in _rows(prepared):
        assert verify_gold(row["answer"]) is None, row["id"]
        assert row["answer"] == canonical_gold(row["answer_raw"]), row["id"]


def test_every_worked_solution_is_right(prepared: Path) -> None:
    for row in _rows(prepared):
        assert grade(row["meta"]["solution"], row["answer"]).verdict == "correct", row["id"]


def test_rows_have_unique_ids_small_rgb_images_and_all_families(prepared: Path) -> None:
    rows = _rows(prepared)
    assert len({row["id"] for row in rows}) == ROWS + TEST_ROWS
    assert {row["meta"]["family"] for row in rows} == set(FAMILIES)
    for row in rows:
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        assert (image.mode, image.size) == ("RGB", (56, 56))
        assert "<image>" not in row["problem"]


def test_only_the_families_that_are_asked_for(tmp_path: Path) -> None:
    command = ["synthetic", "--output", str(tmp_path / "out"), "--rows", "6", "--test-rows", "2"]
    assert main([*command, "--families", "circle, polygon", "--size", "84", "--seed", "3"]) == 0
    rows = _rows(tmp_path / "out")
    assert [row["meta"]["family"] for row in rows[:3]] == ["circle", "polygon", "circle"]
    assert Image.open(io.BytesIO(rows[0]["images"][0]["bytes"])).size == (84, 84)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"--families": "circel"}, "did you mean 'circle'?"),
        ({"--size": "0"}, "--size: '0' is not a whole number from 28 to 1024"),
        ({"--rows": "0"}, "--rows: '0' is not a whole number from 1 to"),
        ({"--families": "triangle_angle"}, "size: 56 is too small for the letters of 'triangle_angle'"),
        ({"--level": "2"}, "size: 56 is too small for the numbers of level 2"),
        ({"--level": "4"}, "--level: '4' is not a whole number from 1 to 3"),
        ({"--styles": "blod"}, "unknown style 'blod'; did you mean 'bold'?"),
        ({"--choices": "1"}, "--choices: '1' is not a whole number from 2 to 8"),
        ({"--rows": "many"}, "--rows: 'many' is not a whole number from 1 to"),
    ],
)
def test_wrong_arguments_end_with_code_2_one_line_and_no_output(
    changed: dict[str, str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--output": str(tmp_path / "out"), "--rows": "4", **changed}
    assert main(["synthetic", *[word for option in options.items() for word in option]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and expected in error
    assert not list(tmp_path.iterdir())


def _made_at(folder: Path) -> int:
    return (folder / "manifest.json").stat().st_mtime_ns


def test_ensure_synthetic_makes_the_folder_once_and_again_only_for_other_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "data"
    assert ensure_synthetic(folder, rows=4, test_rows=2, seed=0, size=56) == folder
    first = _made_at(folder)
    ensure_synthetic(folder, rows=4, test_rows=2, seed=0, size=56)
    assert _made_at(folder) == first
    ensure_synthetic(folder, rows=5, test_rows=2, seed=0, size=56)
    manifest = read_manifest(folder)
    assert manifest is not None and manifest["counts"] == {"train": 5, "test": 2}


def test_ensure_synthetic_completes_a_folder_that_lost_a_file(tmp_path: Path) -> None:
    ensure_synthetic(tmp_path / "data", rows=4, test_rows=2, seed=0, size=56)
    (lost,) = tmp_path.glob("data/data/test-*")
    lost.unlink()
    ensure_synthetic(tmp_path / "data", rows=4, test_rows=2, seed=0, size=56)
    assert lost.is_file()


def test_ensure_synthetic_makes_data_of_older_drawing_code_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_synthetic(tmp_path / "data", rows=4, test_rows=2, seed=0, size=56)
    first = _made_at(tmp_path / "data")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "families.py").write_text("# drawn otherwise")
    monkeypatch.setattr("data_prep.synthetic.__path__", [str(tmp_path / "code")])
    ensure_synthetic(tmp_path / "data", rows=4, test_rows=2, seed=0, size=56)
    assert _made_at(tmp_path / "data") != first


def test_ensure_synthetic_never_replaces_another_dataset(tmp_path: Path) -> None:
    prepare_synthetic(tmp_path / "data", rows=2, test_rows=0)
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"source": "synthetic"', '"source": "geometry3k/hub"'))
    with pytest.raises(UserError, match="holds 'geometry3k/hub', not synthetic data"):
        ensure_synthetic(tmp_path / "data", rows=2, test_rows=0, seed=0, size=56)


def _fingerprint(**arguments: Any) -> str:
    digest = hashlib.sha256()
    for row in generate(10, **arguments):
        digest.update(diagram_hash(row["images"][0]).encode())
        digest.update(json.dumps({**row, "images": None}, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def test_the_plain_rows_never_change() -> None:
    """The shipped tiny model learned from exactly these; a change here means `make tiny-model`."""
    assert [diagram_hash(row["images"][0])[:16] for row in generate(5)] == [
        "e23702e9ef16deae",
        "70cc90a0db9c4372",
        "507505805ea5f0af",
        "f521ea3b42cd31a4",
        "7a3755580e7db287",
    ]
    assert _fingerprint() == "47fd2c8b5124b0bd"
    assert _fingerprint(split="test") == "ace16f30e091c41c"
    assert _fingerprint(seed=1000) == "4b1c5430b3118873"  # what it was trained on
    assert _fingerprint(size=112, seed=3) == "b4f3245b5ba0bb5b"
    assert _fingerprint(families=("circle", "crossing"), seed=7) == "c47ad3d14fb84584"


@pytest.mark.parametrize("level", LEVELS)
def test_lettered_problems_have_golds_that_verify_and_choices_of_which_one_is_right(level: int) -> None:
    rows = list(generate(25, size=168, families=tuple(LETTERED), level=level, choices=4, styles=tuple(STYLES)))
    letters = set()
    for row in rows:
        assert verify_gold(row["answer"], row["choices"]) is None, row
        assert grade(row["meta"]["solution"], row["answer"]).verdict == "correct", row
        assert len(row["choices"]) == 4
        boxes = [f"\\boxed{{{choice}}}" for choice in row["choices"]]
        right = [grade(box, row["answer"]).verdict == "correct" for box in boxes]
        assert right.count(True) == 1 and right.index(True) == "ABCD".index(row["answer_raw"])
        letters.add(row["answer_raw"])
        assert split_of(row["images"][0]) == "train"
    assert letters == set("ABCD")
    assert {row["meta"]["family"] for row in rows} == set(LETTERED)


def test_styles_change_the_picture_and_nothing_else() -> None:
    pictures = {}
    for style in STYLES:
        problem = KNOWN["triangle_angle"](random.Random(1), 168, 2, STYLES[style])
        pictures[diagram_hash(problem.image)] = (problem.question, problem.answer)
    assert len(pictures) == len(STYLES) and len(set(pictures.values())) == 1


def test_levels_styles_and_choices_from_the_command_line(tmp_path: Path) -> None:
    command = ["synthetic", "--output", str(tmp_path / "out"), "--rows", "4", "--test-rows", "2", "--size", "224"]
    command += ["--families", "triangle_angle,circle", "--level", "3", "--styles", "board,pencil", "--choices", "4"]
    assert main(command) == 0
    rows = _rows(tmp_path / "out")
    assert all(len(row["choices"]) == 4 and row["answer_raw"] in "ABCD" for row in rows)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest["arguments"]["level"] == 3
    assert manifest["arguments"]["styles"] == ["board", "pencil"]
