"""Takes the options out of the text of a problem: `Choices: A:40 B:50`."""

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
    """Return the problem without the options at its end, and the options; None where it has none.

    There have to be at least two options, each on one line, whose letters follow one another from
    A. Nothing but an instruction on how to answer may stand behind them.
    """
    marks = _last_row(problem)
    if len(marks) < 2:
        return None
    spans = [(mark.end(), next_mark.start()) for mark, next_mark in pairwise(marks)]
    last, line_end, behind = problem[marks[-1].end() :].partition("\n")
    if behind.strip() and not _HOW_TO_ANSWER.search(behind):
        return None
    options = [problem[begin:end] for begin, end in spans] + [last]
    options = [option.strip().rstrip(",;，；").strip() for option in options]
    fit = all(option and "\n" not in option and len(option) <= _LONGEST for option in options)
    before = _HEADING.sub("", problem[: marks[0].start()]).rstrip()
    if not fit or not before or any(in_words(option) != option for option in options):
        return None
    instruction = f"{line_end}{behind}".rstrip() if behind.strip() else ""
    return before + instruction, options


def _last_row(problem: str) -> list[re.Match[str]]:
    """Return the last run of at least two marks whose letters follow one another from A."""
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
