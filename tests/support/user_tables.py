"""A user's data set of three problems, in each of the formats that `data_prep convert` reads."""

import base64
import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature

from adora_vl.data.dataset import Row, stored_rows
from data_prep.cli import main
from tests.support.pictures import draw_figure, encode_picture

PNG_FILES = [encode_picture(draw_figure(number, size=60)) for number in range(4)]
# Which column of the user's table is what, as `--columns` takes it: OURS=THEIRS.
COLUMN_OPTIONS = (
    "problem=question",
    "answer=label",
    "images=image",
    "choices=options",
    "id=key",
    "hint=tip",
)
# The first row has its image before the text and a word as its answer; the second has two images
# within the text and a number; the third names no image in its text, and its answer is an option.
ROWS_OF_A_USER: list[dict[str, Any]] = [
    {
        "key": "a",
        "question": "<image>Which shape?",
        "label": "rhombus",
        "image": [0],
        "options": None,
        "tip": "look",
    },
    {
        "key": "b",
        "question": "Add <image> to <image>, é.",
        "label": 12.5,
        "image": [1, 2],
        "options": None,
        "tip": None,
    },
    {
        "key": "c",
        "question": "How long?",
        "label": "B",
        "image": [3],
        "options": ["3", "4", "5"],
        "tip": "<b>&",
    },
]
# What the rows become, by id: problem, answer, choices, hint, number of images.
EXPECTED_FIELDS_BY_ID = {
    "mine/train/a": ("Which shape?", "rhombus", None, "look", 1),
    "mine/train/b": ("Add <image> to <image>, é.", "12.5", None, None, 2),
    "mine/train/c": ("How long?", "4", ["3", "4", "5"], "<b>&", 1),
}


def _write_pictures(folder: Path) -> list[str]:
    """Write the pictures of the user's rows into `pics`, and return their paths in `folder`."""
    (folder / "pics").mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(PNG_FILES):
        (folder / "pics" / f"{number}.png").write_bytes(content)
    return [f"pics/{number}.png" for number in range(len(PNG_FILES))]


def rows_with_images(values: list[Any], alone: bool = False) -> list[dict[str, Any]]:
    """Return the user's rows with images, where `ROWS_OF_A_USER` has the numbers of pictures.

    Args:
        values: the picture of each number, as the format has it: a path, a URL or bytes.
        alone: whether a row with one picture has it without a list.
    """
    rows = []
    for row in ROWS_OF_A_USER:
        images = [values[number] for number in row["image"]]
        rows.append({**row, "image": images[0] if alone and len(images) == 1 else images})
    return rows


def write_user_jsonl(folder: Path, rows: list[Any] | None = None) -> Path:
    """Write rows, by default the user's three, as `mine.jsonl`; return the file."""
    names = _write_pictures(folder)
    lines = [json.dumps(row) for row in rows or rows_with_images(names, alone=True)]
    (folder / "mine.jsonl").write_text("\n\n".join(lines) + "\n")
    return folder / "mine.jsonl"


def write_json_list(folder: Path) -> Path:
    """Write the user's rows as one JSON list, with pictures as data URLs; return the file."""
    urls = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in PNG_FILES]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.json").write_text(json.dumps(rows_with_images(urls)))
    return folder / "mine.json"


def write_user_csv(folder: Path, ending: str, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write rows, by default the user's three, as a table that Excel has saved; return the file.

    Excel puts a byte order mark before the first column's name. `ending`: "csv", or "tsv" for tabs.
    """
    path = folder / f"mine.{ending}"
    rows = rows or rows_with_images(_write_pictures(folder), alone=True)
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter="," if ending == "csv" else "\t")
        writer.writerow(list(rows[0]))
        for row in rows:
            cells = [
                json.dumps(value) if isinstance(value, list) else value for value in row.values()
            ]
            writer.writerow(cells)
    return path


def write_parquet_with_paths(folder: Path) -> Path:
    """Write the user's rows as a Parquet file with pictures beside it; return the file."""
    rows = [
        {**row, "label": str(row["label"])} for row in rows_with_images(_write_pictures(folder))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "mine.parquet")
    return folder / "mine.parquet"


def write_hub_parquet(folder: Path) -> Path:
    """Write the user's rows as a data set of the hub, with an image feature; return its folder."""
    texts = {name: Value("string") for name in ("key", "question", "label", "tip")}
    features = Features({**texts, "image": List(ImageFeature()), "options": List(Value("string"))})
    images = [{"bytes": content, "path": None} for content in PNG_FILES]
    rows = [{**row, "label": str(row["label"])} for row in rows_with_images(images)]
    (folder / "mine" / "data").mkdir(parents=True)
    Dataset.from_list(rows, features=features).to_parquet(
        folder / "mine" / "data" / "train-00000-of-00001.parquet"
    )
    return folder / "mine"


def write_image_folder(folder: Path) -> Path:
    """Write the user's rows as the hub's ImageFolder, pictures beside `metadata.csv`; return it."""
    write_user_csv(folder / "mine", "csv").rename(folder / "mine" / "metadata.csv")
    return folder / "mine"


WRITER_BY_FORMAT = {
    "jsonl": write_user_jsonl,
    "json with data URLs": write_json_list,
    "csv": lambda folder: write_user_csv(folder, "csv"),
    "tsv": lambda folder: write_user_csv(folder, "tsv"),
    "parquet with paths": write_parquet_with_paths,
    "parquet of the hub": write_hub_parquet,
    "a folder of images with a table": write_image_folder,
}


def run_convert(
    source: Path | str, output: Path, *options: str, columns: tuple[str, ...] = COLUMN_OPTIONS
) -> int:
    """Run the command `data_prep convert`, and return its exit code: 0, or 2 for a refusal.

    `columns`: which column of the table is what, such as "problem=question".
    """
    return main(
        [
            "convert",
            "--input",
            str(source),
            "--output",
            str(output),
            "--columns",
            *columns,
            *options,
        ]
    )


def read_prepared_rows(output: Path, split: str = "train") -> list[Row]:
    """Return the rows of a prepared folder's split."""
    return list(stored_rows(output, split))


def read_fields_by_id(output: Path, split: str = "train") -> dict[str, tuple[Any, ...]]:
    """Return the rows of a prepared folder, as in `EXPECTED_FIELDS_BY_ID`.

    By the id of each row: problem, answer, choices, hint and the number of images.
    """
    return {
        row["id"]: (
            row["problem"],
            row["answer"],
            row["choices"],
            row["hint"] or None,
            len(row["images"]),
        )
        for row in stored_rows(output, split)
    }


def truncate_image(split: Path, row: int) -> None:
    """Keep only the first 60 bytes of a row's image in a split's Parquet file."""
    table = pq.read_table(split)
    rows = table.to_pylist()
    rows[row]["images"][0]["bytes"] = rows[row]["images"][0]["bytes"][:60]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), split)
