"""Synthetic problems in each benchmark's exact published format, for whole runs of the evaluators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, List, Value

from data_prep.images import png_bytes
from data_prep.storage import write_split
from data_prep.synthetic.generate import generate
from eval.mathvista.prompt import build_query

# The columns of AI4Math/MathVista.
MATHVISTA = Features(
    {
        "pid": Value("string"),
        "question": Value("string"),
        "image": Value("string"),
        "decoded_image": Image(),
        "choices": List(Value("string")),
        "unit": Value("string"),
        "precision": Value("float64"),
        "answer": Value("string"),
        "question_type": Value("string"),
        "answer_type": Value("string"),
        "metadata": {
            "category": Value("string"),
            "context": Value("string"),
            "grade": Value("string"),
            "img_height": Value("int64"),
            "img_width": Value("int64"),
            "language": Value("string"),
            "skills": List(Value("string")),
            "source": Value("string"),
            "split": Value("string"),
            "task": Value("string"),
        },
        "query": Value("string"),
    }
)
# Those of Lin-Chen/MMStar; the image is plain bytes there.
MMSTAR = Features(
    {
        "index": Value("int64"),
        "question": Value("string"),
        "image": Value("binary"),
        "answer": Value("string"),
        "category": Value("string"),
        "l2_category": Value("string"),
        "meta_info": {"source": Value("string"), "split": Value("string"), "image_path": Value("string")},
    }
)


def _problems(count: int, size: int) -> list[dict[str, Any]]:
    return [
        {"question": row["problem"], "answer": row["answer"], "png": png_bytes(row["images"][0]), "index": index}
        for index, row in enumerate(generate(count, split="test", seed=3, size=size))
    ]


def mathvista_rows(count: int = 6, size: int = 56) -> list[dict[str, Any]]:
    """Rows of every kind in turn: multiple choice, integer, float (precision 1.0), list."""
    kinds = ("text", "integer", "float", "list")
    return [_mathvista_row(problem, kinds[problem["index"] % 4], size) for problem in _problems(count, size)]


def _mathvista_row(problem: dict[str, Any], kind: str, size: int) -> dict[str, Any]:
    value = problem["answer"]
    answers = {"text": f"{value}°", "integer": value, "float": f"{value}.0", "list": f"[{value}, 1]"}
    row: dict[str, Any] = {
        "pid": str(problem["index"] + 1),
        "question": problem["question"],
        "image": f"images/{problem['index'] + 1}.jpg",
        "decoded_image": {"bytes": problem["png"], "path": None},
        "choices": ["1°", f"{value}°", "3°"] if kind == "text" else None,
        "unit": "cm" if kind == "integer" else None,
        "precision": 1.0 if kind == "float" else None,
        "answer": answers[kind],
        "question_type": "multi_choice" if kind == "text" else "free_form",
        "answer_type": kind,
        "metadata": {
            "category": "math-targeted-vqa",
            "context": "geometry diagram",
            "grade": "high school",
            "img_height": size,
            "img_width": size,
            "language": "english",
            "skills": ["geometry reasoning", "algebraic reasoning"],
            "source": "synthetic",
            "split": "testmini",
            "task": "geometry problem solving",
        },
    }
    return row | {"query": build_query(row)}


def write_mathvista(folder: Path, rows: list[dict[str, Any]], form: str = "parquet") -> Path:
    """`parquet`: as on the hub. `json`: the repository's object of rows by pid beside a folder of images."""
    if form == "parquet":
        (folder / "data").mkdir(parents=True, exist_ok=True)
        path = folder / "data" / "testmini-00000-of-00001.parquet"
        Dataset.from_list(rows, features=MATHVISTA).to_parquet(str(path))
        return folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / row["image"]).write_bytes(row["decoded_image"]["bytes"])
    kept = {row["pid"]: {k: v for k, v in row.items() if k not in ("decoded_image", "query")} for row in rows}
    (folder / "testmini.json").write_text(json.dumps(kept))
    return folder


def mmstar_rows(count: int = 6, size: int = 56) -> list[dict[str, Any]]:
    """Rows whose options stand in the question, two categories of two sub-axes in turn."""
    return [
        {
            "index": problem["index"],
            "question": f"{problem['question']}\nOptions: A: 1, B: {problem['answer']}, C: 3, D: 4",
            "image": problem["png"],
            "answer": "B",
            "category": ("math", "logical reasoning")[problem["index"] % 2],
            "l2_category": ("geometry", "diagram reasoning")[problem["index"] % 2],
            "meta_info": {"source": "synthetic", "split": "val", "image_path": f"images/{problem['index']}.png"},
        }
        for problem in _problems(count, size)
    ]


def write_mmstar(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """One Parquet file named after the benchmark, as on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=MMSTAR).to_parquet(str(folder / "mmstar.parquet"))
    return folder


def write_geometry3k(folder: Path, count: int = 6, size: int = 56) -> Path:
    """A prepared dataset with a test split."""
    write_split(generate(count, split="test", seed=3, size=size), folder, "test")
    return folder
