"""Geometry3K rows made for the tests, in the authors' layout and in the hub's."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from adora_vl.data.dataset import Row, stored_rows
from data_prep.cli import main
from tests.support.pictures import draw_figure, encode_picture

# The columns of `hiyouga/geometry3k` on the hub.
HUB_FEATURES = Features(
    {"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")}
)
# The `data.json` of a problem that nothing is wrong with.
GOOD_PROBLEM = {
    "problem_text": "Find m \\widehat A B.",
    "choices": ["5", "5 \\sqrt { 3 }"],
    "answer": "B",
    "problem_type_graph": ["Circle", "Triangle"],
    "problem_type_goal": ["Angle"],
}


def write_problem_folder(
    root: Path, split: str = "train", number: int = 7, image: bytes | None = None, **overrides: Any
) -> Path:
    """Write one problem in the authors' layout, and return its folder.

    Args:
        root: the folder of the data set.
        split: the folder in it.
        number: the problem's number, which also draws its picture.
        image: the bytes of the picture, if it is to be another one.
        overrides: fields of `data.json` that differ; one whose value is None is left out.
    """
    folder = root / split / str(number)
    folder.mkdir(parents=True)
    data = {key: value for key, value in {**GOOD_PROBLEM, **overrides}.items() if value is not None}
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "img_diagram.png").write_bytes(image or encode_picture(draw_figure(number)))
    return folder


def write_hub_table(
    folder: Path,
    rows: list[dict[str, Any]],
    split: str = "train",
    features: Features = HUB_FEATURES,
) -> None:
    """Write rows as a split of the hub's data set `hiyouga/geometry3k`, a Parquet file."""
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=features).to_parquet(
        folder / f"{split}-00000-of-00001.parquet"
    )


def run_prepare_geometry3k(source: str, location: Path | str, output: Path, *options: str) -> int:
    """Run the command `data_prep geometry3k`, and return its exit code: 0, or 2 for a refusal.

    Args:
        source: the layout: "intergps" (the authors'), "hub", or "parquet".
        location: the folder or file.
        output: the prepared folder.
        options: further options of the command.
    """
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
    """Return the rows that were left out of a prepared folder, each with its id and the reason."""
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def stderr_of_refusal(code: int, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Check that a command has refused its input, and return what it printed on stderr.

    That is: its exit code is 2, it printed lines that begin with "error: " (one, unless rows were
    refused), and it left no output.

    Args:
        code: the exit code.
        output: the folder that the command was to write.
        capsys: pytest's fixture, which has captured stderr.
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
    """Return the row of a prepared folder's split, which has to be the only one."""
    (row,) = stored_rows(output, split)
    return row


def open_stored_image(row: Row) -> Image.Image:
    """Return the first image of a prepared row."""
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))
