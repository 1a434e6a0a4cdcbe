"""The twelve large sets of geometry problems, by the commands of the data page.

Each command runs on a small input in the form in which the set is published.
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


def commands_of_page() -> dict[str, list[str]]:
    """Return the options of `convert` in the table of the page, by the name of the set."""
    table = DATA_FORMATS_PAGE.read_text(encoding="utf-8").partition(
        "## Published sets of geometry\n"
    )[2]
    rows = re.findall(r"^\| ([^|]+?) \| `([^`|]+)` \|", table, re.MULTILINE)
    return {name: shlex.split(command) for name, command in rows}


def write_pictures(folder: Path, *names: str) -> None:
    """Write three pictures under these names."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PNG_FILES[number])


def write_json(path: Path, content: Any) -> None:
    """Write content as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def four_choices(angle: str) -> list[str]:
    """Four choices of which the right one, `angle`, is B."""
    return [str(int(angle) + difference) for difference in (-10, 0, 10, 20)]


def write_llava_file(folder: Path, name: str, images: str, question: str, answer: str) -> None:
    """Write rows of the three `RIGHT_ANSWERS` in the form of LLaVA, a conversation for each.

    In `question` and `answer` `{0}` is the right angle and `{1}` to `{4}` are the choices.
    """
    rows = []
    for number, angle in enumerate(RIGHT_ANSWERS):
        filled = [angle, *four_choices(angle)]
        turns = [
            {"from": "human", "value": "<image>\n" + question.format(*filled)},
            {"from": "gpt", "value": answer.format(*filled)},
        ]
        rows.append({"id": f"q{number}", "image": f"{images}/{number}.png", "conversations": turns})
    write_json(folder / name, rows)


def write_geo170k(folder: Path) -> None:
    """Geo170K: conversations of LLaVA, whose choices stand in the question."""
    question = (
        "Reason first.\nQuestion: What is the angle?\nChoices:\nA: {1}°\nB: {2}°\nC: {3}°\nD: {4}°"
    )
    answer = "Since the lines are parallel, the angle is {0}°, so B is right.\nAnswer:B"
    write_llava_file(folder, "qa_tuning.json", "geo3k/train", question, answer)
    write_pictures(folder / "images" / "geo3k" / "train", "0.png", "1.png", "2.png")


def write_geoqa_plus(folder: Path) -> None:
    """GeoQA+: the index of the right choice, and questions in Chinese."""
    rows = [
        {
            "id": n,
            "subject": "如图，求角。",
            "choices": four_choices(angle),
            "label": 1,
            "image": f"{n}.png",
        }
        for n, angle in enumerate(RIGHT_ANSWERS)
    ]
    write_json(folder / "train.json", rows)
    write_pictures(folder / "images", "0.png", "1.png", "2.png")


def write_mathv360k(folder: Path) -> None:
    """MathV360K: conversations of LLaVA, with a hint before the question."""
    question = "Hint: Give the letter.\nQuestion: What is it?\nChoices:\n(A) {1}\n(B) {2}\n(C) {3}"
    name = "train_samples_all_tuning.json"
    write_llava_file(folder, name, "GeoQA+/images", question, "The answer is B")
    write_pictures(folder / "data_images" / "GeoQA+" / "images", "0.png", "1.png", "2.png")


def write_mavis(folder: Path) -> None:
    """MAVIS: choices in the question, and the right one as its value."""
    rows = []
    for number, angle in enumerate(RIGHT_ANSWERS):
        options = "\n".join(
            f"{letter}:{choice}" for letter, choice in zip("ABCD", four_choices(angle), strict=True)
        )
        question = f"What is the perimeter of figure {number}?\nChoices:\n{options}"
        image = f"Rule_geo/images/{number}.png"
        rows.append(
            {"id": number, "image": image, "question": question, "CoT": "", "answer": angle}
        )
    write_json(folder / "mavis.json", rows)
    write_pictures(folder / "Rule_geo" / "images", "0.png", "1.png", "2.png")


def write_mm_math(folder: Path) -> None:
    """MM-Math: the answer is the box in the solution."""
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
    write_json_lines(folder / "MM_Math.jsonl", rows)
    write_pictures(folder / "MM_Math", "0.png", "1.png", "2.png")


def write_mmk12(folder: Path) -> None:
    """MMK12: Parquet with pictures in the rows, and questions in Chinese."""
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


def write_virl39k(folder: Path) -> None:
    """ViRL39K: Parquet with paths of pictures, and boxed answers."""
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
    write_pictures(folder / "images", "0.png", "1.png", "2.png")


def write_vision_r1(folder: Path) -> None:
    """Vision-R1: a list of rows with paths of pictures."""
    rows = [
        {"problem": f"<image>Angle {n}?", "answer": angle, "images": [f"images/{n}.png"]}
        for n, angle in enumerate(RIGHT_ANSWERS)
    ]
    write_json(folder / "vision_r1_rl.json", rows)
    write_pictures(folder / "images", "0.png", "1.png", "2.png")


def write_pgps9k(folder: Path) -> None:
    """PGPS9K: one object with the rows by their key, and three decimals."""
    rows = {
        f"prob_{number}": {
            "diagram": f"img_{number}.png",
            "text": f"Find angle {number}.",
            "choices": [f"{choice}.000" for choice in four_choices(angle)],
            "answer": f"{angle}.000",
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    }
    write_json(folder / "train.json", rows)
    write_pictures(folder / "Diagram_Visual", "img_0.png", "img_1.png", "img_2.png")


def write_geomverse(folder: Path) -> None:
    """GeomVerse: answers with two decimals."""
    rows = [
        {
            "question": f"Find side {number}. Round to 2 decimals.",
            "rationale": f"Therefore the final answer is {angle}.37.",
            "answer": float(f"{angle}.37"),
            "image_path": f"images/{number}.jpeg",
        }
        for number, angle in enumerate(RIGHT_ANSWERS)
    ]
    write_json_lines(folder / "data.jsonl", rows)
    write_pictures(folder / "images", "0.jpeg", "1.jpeg", "2.jpeg")


def write_we_math_2(folder: Path) -> None:
    """We-Math 2.0: choices in the question, and the letter as the answer."""
    rows = [
        {
            "question": f"What is angle {n}?\nA. {a}\nB. {b}\nC. {c}\nD. {d}",
            "answer": "B",
            "image": {"bytes": PNG_FILES[n], "path": None},
        }
        for n, (a, b, c, d) in enumerate(map(four_choices, RIGHT_ANSWERS))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def write_multimath(folder: Path) -> None:
    """MultiMath: conversations of LLaVA with a worked answer."""
    answer = "By the exterior angle, it is {0}.\nThe answer is ${0}^\\circ$."
    write_llava_file(folder, "multimath.json", "images", "What is the angle?", answer)
    write_pictures(folder / "images", "0.png", "1.png", "2.png")


# what writes a small set, whether it has choices, and what stands behind an answer of it
WRITER_AND_ENDING_BY_DATASET: dict[str, tuple[WriteDataset, bool, str]] = {
    "Geo170K": (write_geo170k, True, ""),
    "GeoQA+": (write_geoqa_plus, True, ""),
    "MathV360K": (write_mathv360k, True, ""),
    "MAVIS": (write_mavis, True, ""),
    "MM-Math": (write_mm_math, False, ""),
    "MMK12": (write_mmk12, False, ""),
    "ViRL39K": (write_virl39k, False, ""),
    "Vision-R1": (write_vision_r1, False, ""),
    "PGPS9K": (write_pgps9k, True, ""),
    "GeomVerse": (write_geomverse, False, ".37"),
    "We-Math 2.0": (write_we_math_2, True, ""),
    "MultiMath": (write_multimath, False, ""),
}


def test_the_page_has_a_command_for_each_set() -> None:
    assert list(commands_of_page()) == list(WRITER_AND_ENDING_BY_DATASET)


@pytest.mark.parametrize("name", WRITER_AND_ENDING_BY_DATASET)
def test_the_command_of_a_set_makes_rows_that_an_answer_can_meet(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented command of a public data set makes rows that are graded as they should be.

    The right value is correct, and so is the letter B if there are choices; 7 is wrong.
    """
    write_dataset, with_choices, answer_end = WRITER_AND_ENDING_BY_DATASET[name]
    write_dataset(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = [*commands_of_page()[name], "--output", "out", "--workers", "1"]
    assert main(["convert", *arguments]) == 0
    rows = read_prepared_rows(tmp_path / "out")
    assert len(rows) == len(RIGHT_ANSWERS)
    for row, angle in zip(rows, RIGHT_ANSWERS, strict=True):
        answers = [f"{angle}{answer_end}", *("B" for _ in range(with_choices))]
        for answer in answers:
            verdict = grade(rf"\boxed{{{answer}}}", row["answer"], choices=row["choices"])
            assert verdict.verdict == "correct", (answer, row["answer"], row["choices"], verdict)
        wrong_grade = grade(r"\boxed{7}", row["answer"], choices=row["choices"])
        assert wrong_grade.verdict == "wrong"
        assert (row["choices"] is not None) == with_choices
        assert "Choices" not in row["problem"], "options are shown once, by the prompt"
        assert len(row["images"]) == 1
