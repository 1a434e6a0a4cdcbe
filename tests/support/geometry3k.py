"""Geometry3K rows made for the tests, in the authors' layout and in the hub's."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from adora_vl.data.dataset import Row, stored_rows
from data_prep.cli import main
from tests.support.pictures import draw_figure, encode_picture

HUB_FEATURES = Features(
    {"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")}
)
GOOD_PROBLEM = {
    "problem_text": "Find m \\widehat A B.",
    "choices": ["5", "5 \\sqrt { 3 }"],
    "answer": "B",
    "problem_type_graph": ["Circle", "Triangle"],
    "problem_type_goal": ["Angle"],
}


def write_problem_folder(
    root: Path, split: str = "train", number: int = 7, image: bytes | None = None, **changed: Any
) -> Path:
    """One problem in the authors' layout, with a drawing of its own; a key with the value None is
    left out.
    """
    folder = root / split / str(number)
    folder.mkdir(parents=True)
    data = {key: value for key, value in {**GOOD_PROBLEM, **changed}.items() if value is not None}
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "img_diagram.png").write_bytes(image or encode_picture(draw_figure(number)))
    return folder


def write_hub_table(
    folder: Path,
    rows: list[dict[str, Any]],
    split: str = "train",
    features: Features = HUB_FEATURES,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=features).to_parquet(
        folder / f"{split}-00000-of-00001.parquet"
    )


def run_prepare_geometry3k(source: str, location: Path | str, output: Path, *options: str) -> int:
    return main(
        [
            "geometry3k",
            "--source",
            source,
            "--input",
            str(location),
            "--output",
            str(output),
            *options,
        ]
    )


def read_quarantined_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def stderr_of_refusal(code: int, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error, after checking that it is one line (more where rows were refused), that the exit
    code is 2, and that there is no output.
    """
    error = capsys.readouterr().err
    assert code == 2
    lines = error.splitlines()
    assert all(line.startswith("error: ") for line in lines), error
    assert len(lines) == 1 or "all of them are in" in lines[-1], error
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}*"))
    return error


def read_only_row(output: Path, split: str = "train") -> Row:
    (row,) = stored_rows(output, split)
    return row


def open_stored_image(row: Row) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


Damage = Callable[[Path], object]
