"""Geometry3K rows made for the tests, in the authors' layout and in the hub's."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw

from adora_vl.data.dataset import Row, stored_rows
from data_prep.cli import main

HUB_FEATURES = Features(
    {"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")}
)
GOOD = {
    "problem_text": "Find m \\widehat A B.",
    "choices": ["5", "5 \\sqrt { 3 }"],
    "answer": "B",
    "problem_type_graph": ["Circle", "Triangle"],
    "problem_type_goal": ["Angle"],
}


def picture(size: tuple[int, int] = (30, 20)) -> Image.Image:
    """Transparent, with a black left half: on white paper its right half is white."""
    made = Image.new("RGBA", size, (0, 0, 0, 0))
    made.paste((0, 0, 0, 255), (0, 0, size[0] // 2, size[1]))
    return made


def drawing(seed: int, size: int = 200) -> Image.Image:
    """A figure of straight lines, another one for each seed."""
    made = Image.new("RGB", (size, size), "white")
    points = np.random.default_rng(seed).uniform(0.05 * size, 0.95 * size, (6, 2))
    ImageDraw.Draw(made).line(
        [tuple(point) for point in points], fill="black", width=max(1, size // 60)
    )
    return made


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def problem_folder(
    root: Path, split: str = "train", number: int = 7, image: bytes | None = None, **changed: Any
) -> Path:
    """One problem in the authors' layout, with a drawing of its own; a key with the value None is
    left out.
    """
    folder = root / split / str(number)
    folder.mkdir(parents=True)
    data = {key: value for key, value in {**GOOD, **changed}.items() if value is not None}
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "img_diagram.png").write_bytes(image or encoded(drawing(number)))
    return folder


def write_table(
    folder: Path,
    rows: list[dict[str, Any]],
    split: str = "train",
    features: Features = HUB_FEATURES,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=features).to_parquet(
        folder / f"{split}-00000-of-00001.parquet"
    )


def prepare(source: str, location: Path | str, output: Path, *options: str) -> int:
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


def quarantined(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def refused(code: int, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error, after checking that it is one line (more where rows were refused), that the exit
    code is 2, and that there is no output.
    """
    error = capsys.readouterr().err
    assert code == 2
    lines = error.splitlines()
    assert all(line.startswith("error: ") for line in lines), error
    assert len(lines) == 1 or "all of them are in" in lines[-1], error
    assert not output.exists() and not list(output.parent.glob(f".{output.name}*"))
    return error


def only_row(output: Path, split: str = "train") -> Row:
    (row,) = stored_rows(output, split)
    return row


def stored_image(row: Row) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


Damage = Callable[[Path], object]
