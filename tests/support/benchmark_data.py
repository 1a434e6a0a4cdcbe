"""Synthetic problems in each benchmark's published format, and the command that scores predictions.

For each benchmark NAME, `NAME_rows` returns rows with the columns of its published data set, and
`write_NAME` writes them as the files that a user downloads.
"""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, List, Value

from adora_vl.data.dataset import write_split
from adora_vl.data.images import png_bytes
from adora_vl.evals.records import Benchmark
from adora_vl.synthetic.generate import generate
from eval.command import main
from eval.mathverse import PROBLEM_VERSIONS, TEXT_ONLY
from eval.mathvista import build_query


def _string_columns(*names: str) -> dict[str, Value]:
    """Return columns of texts with these names, for the features of a data set."""
    return {name: Value("string") for name in names}


# The columns of AI4Math/MathVista.
MATHVISTA_FEATURES = Features(
    {
        **_string_columns("pid", "question", "image"),
        "decoded_image": Image(),
        "choices": List(Value("string")),
        "unit": Value("string"),
        "precision": Value("float64"),
        **_string_columns("answer", "question_type", "answer_type"),
        "metadata": {
            **_string_columns("category", "context", "grade"),
            "img_height": Value("int64"),
            "img_width": Value("int64"),
            "language": Value("string"),
            "skills": List(Value("string")),
            **_string_columns("source", "split", "task"),
        },
        "query": Value("string"),
    }
)
# Those of MathLLMs/MathVision.
MATHVISION_FEATURES = Features(
    {
        **_string_columns("id", "question"),
        "options": List(Value("string")),
        "image": Value("string"),
        "decoded_image": Image(),
        **_string_columns("answer", "solution"),
        "level": Value("int64"),
        "subject": Value("string"),
    }
)
# Those of Lin-Chen/MMStar; the image is plain bytes there.
MMSTAR_FEATURES = Features(
    {
        "index": Value("int64"),
        "question": Value("string"),
        "image": Value("binary"),
        **_string_columns("answer", "category", "l2_category"),
        "meta_info": _string_columns("source", "split", "image_path"),
    }
)
# Those of We-Math/We-Math.
WEMATH_FEATURES = Features(
    {
        **_string_columns("ID", "split", "knowledge concept", "question", "option", "answer"),
        "image_path": Image(),
        "key": Value("string"),
        "question number": Value("int64"),
        "knowledge concept description": Value("string"),
    }
)
# Those of AI4Math/MathVerse, testmini; the version without images has a text for its image, which
# is empty.
MATHVERSE_FEATURES = Features(
    {
        **_string_columns("sample_index", "problem_index", "problem_version", "question"),
        "image": Image(),
        **_string_columns("answer", "question_type"),
        "metadata": _string_columns("split", "source", "subject", "subfield"),
        **_string_columns("query_wo", "query_cot", "question_for_eval"),
    }
)
PICTURE_SIZE = 56  # of every picture, in pixels


def _draw_problems(count: int) -> list[dict[str, Any]]:
    """Return drawn problems: `question`, `answer`, the picture as `png`, the number `index`."""
    return [
        {
            "question": row["problem"],
            "answer": row["answer"],
            "png": png_bytes(row["images"][0]),
            "index": index,
        }
        for index, row in enumerate(generate(count, split="test", seed=3, size=PICTURE_SIZE))
    ]


def mathvista_rows(count: int = 6) -> list[dict[str, Any]]:
    """Return rows of MathVista, in turn multiple choice, integer, float (precision 1.0), list."""
    kinds = ("text", "integer", "float", "list")
    return [
        _mathvista_row(problem, kinds[problem["index"] % 4]) for problem in _draw_problems(count)
    ]


def _mathvista_row(problem: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a row of MathVista of this answer type: "text", "integer", "float" or "list"."""
    value = problem["answer"]
    answers = {
        "text": f"{value}°",
        "integer": value,
        "float": f"{value}.0",
        "list": f"[{value}, 1]",
    }
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
            "img_height": PICTURE_SIZE,
            "img_width": PICTURE_SIZE,
            "language": "english",
            "skills": ["geometry reasoning", "algebraic reasoning"],
            "source": "synthetic",
            "split": "testmini",
            "task": "geometry problem solving",
        },
    }
    return row | {"query": build_query(row)}


def _write_images(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the picture of each row where its column `image` says."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / row["image"]).write_bytes(row["decoded_image"]["bytes"])


def write_mathvista(folder: Path, rows: list[dict[str, Any]], form: str = "parquet") -> Path:
    """Write rows of MathVista into `folder`, which is returned.

    `form`: "parquet", as on the hub, or "json": the repository's object of rows by `pid` beside a
    folder of images.
    """
    if form == "parquet":
        (folder / "data").mkdir(parents=True, exist_ok=True)
        path = folder / "data" / "testmini-00000-of-00001.parquet"
        Dataset.from_list(rows, features=MATHVISTA_FEATURES).to_parquet(str(path))
        return folder
    _write_images(folder, rows)
    stored = {
        row["pid"]: {k: v for k, v in row.items() if k not in ("decoded_image", "query")}
        for row in rows
    }
    (folder / "testmini.json").write_text(json.dumps(stored))
    return folder


def mathvision_rows(count: int = 6) -> list[dict[str, Any]]:
    """Return rows of MathVision, of four kinds in turn.

    They are free form, with five options, with options that are drawn in the picture, and with a
    question on two parts of a picture.
    """
    return [_mathvision_row(problem) for problem in _draw_problems(count)]


def _mathvision_row(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the row of MathVision of a problem, whose number decides its kind."""
    number = problem["index"] + 1
    kind = problem["index"] % 4
    five_options = [problem["answer"], "200", "300", "400", "500"]
    options_by_kind: tuple[list[str], ...] = ([], five_options, list("ABCDE"), [])
    options = options_by_kind[kind]
    return {
        "id": str(number),
        "question": f"{problem['question']}\n<image1>" + (" or <image2>?" if kind == 3 else ""),
        "options": options,
        "image": f"images/{number}.jpg",
        "decoded_image": {"bytes": problem["png"], "path": None},
        "answer": "A" if options else problem["answer"],
        "solution": None,
        "level": 1 + kind,
        "subject": ("algebra", "metric geometry - angle")[number % 2],
    }


def write_mathvision(folder: Path, rows: list[dict[str, Any]], form: str = "parquet") -> Path:
    """Write rows of MathVision into `folder`, which is returned.

    `form`: "parquet", as on the hub, or "json": the repository's lines beside a folder of images.
    """
    if form == "parquet":
        (folder / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows, features=MATHVISION_FEATURES).to_parquet(
            str(folder / "data" / "test-00000-of-00001.parquet")
        )
        return folder
    _write_images(folder, rows)
    lines = [{key: value for key, value in row.items() if key != "decoded_image"} for row in rows]
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def mmstar_rows(count: int = 6) -> list[dict[str, Any]]:
    """Return rows of MMStar, in turn of two categories; the options stand in the question."""
    return [
        {
            "index": problem["index"],
            "question": f"{problem['question']}\nOptions: A: 1, B: {problem['answer']}, C: 3, D: 4",
            "image": problem["png"],
            "answer": "B",
            "category": ("math", "logical reasoning")[problem["index"] % 2],
            "l2_category": ("geometry", "diagram reasoning")[problem["index"] % 2],
            "meta_info": {
                "source": "synthetic",
                "split": "val",
                "image_path": f"images/{problem['index']}.png",
            },
        }
        for problem in _draw_problems(count)
    ]


def write_mmstar(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows of MMStar as `mmstar.parquet` into `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=MMSTAR_FEATURES).to_parquet(str(folder / "mmstar.parquet"))
    return folder


def wemath_rows(count: int = 7) -> list[dict[str, Any]]:
    """Return rows of We-Math, in turn for problems of two and of three steps.

    A problem has a row for each of its steps, then one for the whole.
    """
    # The id of each row's problem, and the step that the row asks for.
    ids_and_keys = [
        (f"{steps}steps_{number}", f"{steps}steps_{step}")
        for number in range(1, 1 + count)
        for steps in (2, 3)
        for step in [*range(1, 1 + steps), "multi"]
    ]
    return [
        {
            "ID": problem_id,
            "split": "testmini",
            "knowledge concept": f"Angles {problem['index']}",
            "question": problem["question"],
            "option": f"A. 1;B. {problem['answer']}; C. 3;D. 4; E. No correct answer",
            "answer": "B",
            "image_path": {"bytes": problem["png"], "path": None},
            "key": key,
            "question number": problem["index"] + 1,
            "knowledge concept description": "Angles of a triangle add up to 180 degrees.",
        }
        for problem, (problem_id, key) in zip(_draw_problems(count), ids_and_keys, strict=False)
    ]


def write_wemath(folder: Path, rows: list[dict[str, Any]], form: str = "parquet") -> Path:
    """Write rows of We-Math into `folder`, which is returned.

    `form`: "parquet", as on the hub, or "json": the repository's list of rows beside folders of
    images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        Dataset.from_list(rows, features=WEMATH_FEATURES).to_parquet(
            str(folder / "testmini-00000-of-00001-ab.parquet")
        )
        return folder
    (folder / "2steps" / "image").mkdir(parents=True)
    # Each row names the file of its picture, in the place of the picture itself.
    rows_with_paths = []
    for row in rows:
        path = f"2steps/image/{row['question number']}.png"
        (folder / path).write_bytes(row["image_path"]["bytes"])
        rows_with_paths.append({**row, "image_path": path})
    (folder / "testmini.json").write_text(json.dumps(rows_with_paths))
    return folder


def mathverse_rows(
    count: int = 5, versions: Sequence[str] = PROBLEM_VERSIONS[:5]
) -> list[dict[str, Any]]:
    """Return rows of MathVerse, in turn multiple choice and free form.

    `versions`: how much of a problem stands in its text and how much in its picture ("Text
    Dominant" to "Vision Only"); the rows have them in turn.
    """
    rows = []
    for problem in _draw_problems(count):
        index = problem["index"]
        is_multiple_choice = index % 2 == 0
        version = versions[index % len(versions)]
        full_question = problem["question"] + (
            f"\nChoices:\nA:1\nB:{problem['answer']}\nC:3\nD:4" if is_multiple_choice else ""
        )
        question = "" if version == "Vision Only" else full_question
        rows.append(
            {
                "sample_index": str(index + 1),
                "problem_index": str(index // len(versions) + 1),
                "problem_version": version,
                "question": question,
                "image": {"bytes": problem["png"], "path": None},
                "answer": "B"
                if is_multiple_choice
                else f"Area $={problem['answer']} \\mathrm{{~cm}}^{{2}}$",
                "question_type": "multi-choice" if is_multiple_choice else "free-form",
                "metadata": {
                    "split": "testmini",
                    "source": "x",
                    "subject": "Plane Geometry",
                    "subfield": "Angle",
                },
                "query_wo": f"Please directly answer the question.\nQuestion: {question}",
                "query_cot": "Please first conduct reasoning, and then answer the question.\n"
                f"Question: {question}",
                "question_for_eval": full_question,
            }
        )
    return rows


def write_mathverse(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows of MathVerse into `folder`, which is returned.

    As on the hub, rows with and without images are two Parquet files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with_image = [row for row in rows if row["problem_version"] != TEXT_ONLY]
    without_image = [{**row, "image": ""} for row in rows if row["problem_version"] == TEXT_ONLY]
    if with_image:
        Dataset.from_list(with_image, features=MATHVERSE_FEATURES).to_parquet(
            str(folder / "testmini.parquet")
        )
    if without_image:
        features = Features({**MATHVERSE_FEATURES, "image": Value("string")})
        Dataset.from_list(without_image, features=features).to_parquet(
            str(folder / "testmini_text_only.parquet")
        )
    return folder


def write_texts(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows as the JSON file `name` into `folder`, which is returned.

    Each row gets an `id`, and a picture as Base64 in `image`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [base64.b64encode(problem["png"]).decode() for problem in _draw_problems(len(rows))]
    texts = [{**row, "image": picture} for row, picture in zip(rows, pictures, strict=True)]
    (folder / name).write_text(
        json.dumps([{"id": str(number), **row} for number, row in enumerate(texts)])
    )
    return folder


MMMU_PRO_ROW = {"options": "['1', '40', 'three']", "answer": "B", "subject": "Math"}
LOGICVISTA_ROW = {"question": "Which (A-D)?", "answer": "A, C", "skill": ["inductive", "spatial"]}
DYNAMATH_ROW = {  # as on the hub
    "question": "How long? ",
    "ground_truth": "5.125",
    "answer_type": "float",
    "subject": "algebra",
    "knowledge_level": "high school",
}


RowsOrFile = Sequence[dict[str, Any]] | Path  # rows of predictions, or their file


def write_jsonl_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines, and return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score_arguments(folder: Path, rows: RowsOrFile, *argv: str) -> list[str]:
    """Return the arguments with which a benchmark's command scores predictions.

    Args:
        folder: gets the scores as `s.json`, and the predictions if they are rows.
        rows: the predictions, or their file.
        argv: further arguments.
    """
    file = rows if isinstance(rows, Path) else write_jsonl_rows(folder / "p.jsonl", rows)
    return ["score", "--predictions", str(file), "--output", str(folder / "s.json"), *argv]


def score_predictions(
    benchmark: Benchmark, folder: Path, rows: RowsOrFile, *argv: str
) -> dict[str, Any]:
    """Return the scores of predictions, as the benchmark's command writes them."""
    assert main(benchmark, score_arguments(folder, rows, *argv)) == 0
    result: dict[str, Any] = json.loads((folder / "s.json").read_text())
    return result


def write_geometry3k(folder: Path, count: int = 6) -> Path:
    """Write a prepared data set with a test split into `folder`, which is returned."""
    write_split(generate(count, split="test", seed=3, size=PICTURE_SIZE), folder, "test")
    return folder


WRITER_BY_BENCHMARK: dict[str, Callable[[Path], Path]] = {
    "geometry3k": lambda folder: write_geometry3k(folder / "geometry3k", 4),
    "mathvista": lambda folder: write_mathvista(folder / "mathvista", mathvista_rows(4)),
    "mathvision": lambda folder: write_mathvision(folder / "mathvision", mathvision_rows(4)),
    "mmstar": lambda folder: write_mmstar(folder / "mmstar", mmstar_rows(4)),
    "wemath": lambda folder: write_wemath(folder / "wemath", wemath_rows(4)),
    "mathverse": lambda folder: write_mathverse(folder / "mathverse", mathverse_rows(4)),
    "mmmu_pro": lambda folder: write_texts(folder / "mmmu", "test.json", [MMMU_PRO_ROW] * 4),
    "logicvista": lambda folder: write_texts(folder / "logic", "test.json", [LOGICVISTA_ROW] * 4),
    "dynamath": lambda folder: write_dynamath(folder / "dynamath"),
    "knights": lambda folder: write_knights(folder / "knights"),
    "problems": lambda folder: write_geometry3k(folder / "problems", 4),
}


def write_dynamath(folder: Path) -> Path:
    """Write one problem of DynaMath in its ten variants into `folder`, which is returned."""
    for number in range(1, 11):
        write_texts(folder, f"sample_variant{number}.json", [DYNAMATH_ROW])
    return folder


def write_knights(folder: Path) -> Path:
    """Write a prepared data set of knights-and-knaves puzzles into `folder`, which is returned."""
    from data_prep.cli import main as data_prep

    assert data_prep(["knights", "--output", str(folder), "--rows", "2", "--test-rows", "4"]) == 0
    return folder
