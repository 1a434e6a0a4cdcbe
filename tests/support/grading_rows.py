"""The rows of JSONL that the grader's tests share."""

import json
from typing import Any

from tests.support.paths import REPOSITORY

GRADING_CASES_FOLDER = REPOSITORY / "tests" / "unit" / "rewards" / "cases"


def boxed(answer: str) -> str:
    return rf"So the answer is \boxed{{{answer}}}."


def expand_repeats(text: Any) -> str:
    """A text of a row, which may be given as pairs of a piece and how often it is repeated."""
    return text if isinstance(text, str) else "".join(piece * count for piece, count in text)


def read_grading_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Each row with its place, as `answers.jsonl:12`."""
    lines = (GRADING_CASES_FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [(f"{name}:{number}", json.loads(line)) for number, line in enumerate(lines, 1)]


ANSWER_ROWS = read_grading_rows("answers.jsonl")
