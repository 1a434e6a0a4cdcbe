"""Options that stand in the text of a problem, `Choices: A:40 B:50`, as a list of options."""

import re
from itertools import pairwise

from adora_vl.conversion.placeholders import in_words

# A letter before an option: `A:40`, `A. 40`, `(A) 40`, `(a) 40`, `A、40`.
_MARK = re.compile(
    r"(?<![A-Za-z0-9\\∠△])(?:[(（\[]\s*([A-Ha-h])\s*[)）\]]|([A-H])\s*[).:：、．])\s*(?=\S)"
)
_HEADING = re.compile(r"\s*(?:(?:answer\s+)?(?:choices|options)|选项)\s*[:：]?\s*\Z", re.IGNORECASE)
_HOW_TO_ANSWER = re.compile(r"answer|choose|select|option|letter|boxed|选", re.IGNORECASE)
_LONGEST = 200  # characters of an option


def options_in_text(problem: str) -> tuple[str, list[str]] | None:
    """The problem without the options at its end, and these; None where it has none.

    At least two options whose letters follow one another from A, each on one line. Behind them may
    only stand how to answer.
    """
    marks = _last_row(problem)
    if len(marks) < 2:
        return None
    ends = [(left.end(), right.start()) for left, right in pairwise(marks)]
    last, line_end, behind = problem[marks[-1].end() :].partition("\n")
    if behind.strip() and not _HOW_TO_ANSWER.search(behind):
        return None
    options = [problem[begin:end] for begin, end in ends] + [last]
    options = [option.strip().rstrip(",;，；").strip() for option in options]
    fit = all(option and "\n" not in option and len(option) <= _LONGEST for option in options)
    before = _HEADING.sub("", problem[: marks[0].start()]).rstrip()
    if not fit or not before or any(in_words(option) != option for option in options):
        return None
    return before + (f"{line_end}{behind}".rstrip() if behind.strip() else ""), options


def _last_row(problem: str) -> list[re.Match[str]]:
    """The last marks in a row whose letters follow one another from A."""
    row: list[re.Match[str]] = []
    rows: list[list[re.Match[str]]] = []
    for mark in _MARK.finditer(problem):
        letter = (mark[1] or mark[2]).upper()
        if letter == "A":
            row = [mark]
            rows.append(row)
        elif row and letter == chr(ord("A") + len(row)):
            row.append(mark)
    return next((row for row in reversed(rows) if len(row) > 1), [])
