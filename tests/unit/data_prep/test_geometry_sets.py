"""The twelve large sets of geometry problems: each command of the data page, run on a small input in
the form in which the set is published.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.rewards import grade
from data_prep.cli import main
from tests.support.user_tables import PNG_FILES, read_prepared_rows

DATA_FORMATS_PAGE = Path(__file__).parents[3] / "docs" / "data_formats.md"
RIGHT_ANSWERS = ("50", "65", "72")  # the right answers, of which each stands at B
WriteDataset = Callable[[Path], None]


def commands() -> dict[str, list[str]]:
    """The options of `convert` in the table of the page, by the name of the set."""
    table = DATA_FORMATS_PAGE.read_text(encoding="utf-8").partition(
        "## Published sets of geometry\n"
    )[2]
    rows = re.findall(r"^\| ([^|]+?) \| `([^`|]+)` \|", table, re.MULTILINE)
    return {name: shlex.split(command) for name, command in rows}


def pictures(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PNG_FILES[number])


def dumped(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def four(angle: str) -> list[str]:
    """Four options, the right one at B."""
    return [str(int(angle) + difference) for difference in (-10, 0, 10, 20)]


def conversations(folder: Path, name: str, images: str, question: str, answer: str) -> None:
    """A file in the form of LLaVA; `{0}` is the right angle and `{1}` to `{4}` are the options."""
    rows = []
    for number, angle in enumerate(RIGHT_ANSWERS):
        filled = [angle, *four(angle)]
        turns = [
            {"from": "human", "value": "<image>\n" + question.format(*filled)},
            {"from": "gpt", "value": answer.format(*filled)},
        ]
        rows.append({"id": f"q{number}", "image": f"{images}/{number}.png", "conversations": turns})
    dumped(folder / name, rows)


def geo170k(folder: Path) -> None:
    question = (
        "Reason first.\nQuestion: What is the angle?\nChoices:\nA: {1}°\nB: {2}°\nC: {3}°\nD: {4}°"
    )
    answer = "Since the lines are parallel, the angle is {0}°, so B is right.\nAnswer:B"
    conversations(folder, "qa_tuning.json", "geo3k/train", question, answer)
    pictures(folder / "images" / "geo3k" / "train", "0.png", "1.png", "2.png")


def geoqa_plus(folder: Path) -> None:
    rows = [
        {
            "id": n,
            "subject": "如图，求角。",
            "choices": four(angle),
            "label": 1,
            "image": f"{n}.png",
        }
        for n, angle in enumerate(RIGHT_ANSWERS)
    ]
    dumped(folder / "train.json", rows)
    pictures(folder / "images", "0.png", "1.png", "2.png")


def mathv360k(folder: Path) -> None:
    question = "Hint: Give the letter.\nQuestion: What is it?\nChoices:\n(A) {1}\n(B) {2}\n(C) {3}"
    name = "train_samples_all_tuning.json"
    conversations(folder, name, "GeoQA+/images", question, "The answer is B")
    pictures(folder / "data_images" / "GeoQA+" / "images", "0.png", "1.png", "2.png")


def mavis(folder: Path) -> None:
    rows = []
    for number, angle in enumerate(RIGHT_ANSWERS):
        options = "\n".join(
            f"{letter}:{choice}" for letter, choice in zip("ABCD", four(angle), strict=True)
        )
        question = f"What is the perimeter of figure {number}?\nChoices:\n{options}"
        image = f"Rule_geo/images/{number}.png"
        rows.append(
            {"id": number, "image": image, "question": question, "CoT": "", "answer": angle}
        )
    dumped(folder / "mavis.json", rows)
    pictures(folder / "Rule_geo" / "images", "0.png", "1.png", "2.png")


def mm_math(folder: Path) -> None:
    rows = [
        {
            "question": f"Find angle {number}.",
            "file_name": f"{number}.png",
            "solution": f"We add, so $\\angle A=\\boxed{{{angle}^\\circ}}$.",
            "year": "nine",
            "unique_id": str(number),
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    ]
    lines(folder / "MM_Math.jsonl", rows)
    pictures(folder / "MM_Math", "0.png", "1.png", "2.png")


def mmk12(folder: Path) -> None:
    rows = [
        {
            "id": f"m{number}",
            "question": f"如图{number}，∠A＝?",
            "answer": f"∠A＝{angle}°",
            "image": {"bytes": PNG_FILES[number], "path": None},
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def virl39k(folder: Path) -> None:
    rows = [
        {
            "qid": f"v{number}",
            "question": f"<image>Find angle {number}.",
            "answer": f"\\boxed{{{angle}}}",
            "image": [f"images/{number}.png"],
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "39Krelease.parquet")
    pictures(folder / "images", "0.png", "1.png", "2.png")


def vision_r1(folder: Path) -> None:
    rows = [
        {"problem": f"<image>Angle {n}?", "answer": angle, "images": [f"images/{n}.png"]}
        for n, angle in enumerate(RIGHT_ANSWERS)
    ]
    dumped(folder / "vision_r1_rl.json", rows)
    pictures(folder / "images", "0.png", "1.png", "2.png")


def pgps9k(folder: Path) -> None:
    rows = {
        f"prob_{number}": {
            "diagram": f"img_{number}.png",
            "text": f"Find angle {number}.",
            "choices": [f"{choice}.000" for choice in four(angle)],
            "answer": f"{angle}.000",
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    }
    dumped(folder / "train.json", rows)
    pictures(folder / "Diagram_Visual", "img_0.png", "img_1.png", "img_2.png")


def geomverse(folder: Path) -> None:
    rows = [
        {
            "question": f"Find side {number}. Round to 2 decimals.",
            "rationale": f"Therefore the final answer is {angle}.37.",
            "answer": float(f"{angle}.37"),
            "image_path": f"images/{number}.jpeg",
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    ]
    lines(folder / "data.jsonl", rows)
    pictures(folder / "images", "0.jpeg", "1.jpeg", "2.jpeg")


def we_math_2(folder: Path) -> None:
    rows = [
        {
            "question": f"What is angle {n}?\nA. {a}\nB. {b}\nC. {c}\nD. {d}",
            "answer": "B",
            "image": {"bytes": PNG_FILES[n], "path": None},
        }
        for n, (a, b, c, d) in enumerate(map(four, RIGHT_ANSWERS))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def multimath(folder: Path) -> None:
    answer = "By the exterior angle, it is {0}.\nThe answer is ${0}^\\circ$."
    conversations(folder, "multimath.json", "images", "What is the angle?", answer)
    pictures(folder / "images", "0.png", "1.png", "2.png")


WRITER_AND_ENDING_BY_DATASET: dict[
    str, tuple[WriteDataset, bool, str]
] = {  # with choices or without, and the end of an answer
    "Geo170K": (geo170k, True, ""),
    "GeoQA+": (geoqa_plus, True, ""),
    "MathV360K": (mathv360k, True, ""),
    "MAVIS": (mavis, True, ""),
    "MM-Math": (mm_math, False, ""),
    "MMK12": (mmk12, False, ""),
    "ViRL39K": (virl39k, False, ""),
    "Vision-R1": (vision_r1, False, ""),
    "PGPS9K": (pgps9k, True, ""),
    "GeomVerse": (geomverse, False, ".37"),
    "We-Math 2.0": (we_math_2, True, ""),
    "MultiMath": (multimath, False, ""),
}


def test_the_page_has_a_command_for_each_set() -> None:
    assert list(commands()) == list(WRITER_AND_ENDING_BY_DATASET)


@pytest.mark.parametrize("name", WRITER_AND_ENDING_BY_DATASET)
def test_the_command_of_a_set_makes_rows_that_an_answer_can_meet(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, with_choices, end = WRITER_AND_ENDING_BY_DATASET[name]
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [*commands()[name], "--output", "out", "--workers", "1"]
    assert main(["convert", *words]) == 0
    rows = read_prepared_rows(tmp_path / "out")
    assert len(rows) == len(RIGHT_ANSWERS)
    for row, angle in zip(rows, RIGHT_ANSWERS, strict=True):
        answers = [f"{angle}{end}", *("B" for _ in range(with_choices))]
        for answer in answers:
            verdict = grade(rf"\boxed{{{answer}}}", row["answer"], choices=row["choices"])
            assert verdict.verdict == "correct", (answer, row["answer"], row["choices"], verdict)
        wrong = grade(r"\boxed{7}", row["answer"], choices=row["choices"])
        assert wrong.verdict == "wrong"
        assert (row["choices"] is not None) == with_choices
        assert "Choices" not in row["problem"], "options are shown once, by the prompt"
        assert len(row["images"]) == 1
