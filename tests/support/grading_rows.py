"""The labelled answers that the grader's tests share, one JSON object a line."""

import json
from typing import Any

from tests.support.paths import REPOSITORY

GRADING_CASES_FOLDER = REPOSITORY / "tests" / "unit" / "rewards" / "cases"


def boxed(answer: str) -> str:
    """Return a response that ends with this answer in a box."""
    return rf"So the answer is \boxed{{{answer}}}."


def expand_repeats(text: Any) -> str:
    """Return a text of a row, which long ones give as pieces: [["ab", 2], ["c", 1]] is "ababc"."""
    return text if isinstance(text, str) else "".join(piece * count for piece, count in text)


def read_grading_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a file, each as (`answers.jsonl:12`, the row)."""
    lines = (GRADING_CASES_FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [(f"{name}:{number}", json.loads(line)) for number, line in enumerate(lines, 1)]


ANSWER_ROWS = read_grading_rows("answers.jsonl")
