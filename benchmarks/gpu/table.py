"""Lines of figure, bound and verdict, which checks say, and the table of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckResult(StrEnum):
    """The verdict of a line."""

    OK = "ok"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckLine:
    """One figure with its bound and verdict.

    `note` says where the bound comes from, why the figure was skipped, or how it failed.
    """

    what: str  # the title of the figure
    figure: str
    bound: str
    verdict: CheckResult
    note: str
    check: str = ""


def at_most_line(title: str, value: float, bound: float, unit: str, source: str) -> CheckLine:
    """Return a line that is ok where `value` is at most `bound`; NaN fails.

    `source` says where the bound comes from.
    """
    suffix = f" {unit}" if unit else ""
    return verdict_line(
        title, f"{value:.3g}{suffix}", f"<= {bound:.3g}{suffix}", value <= bound, source
    )


def at_least_line(title: str, value: float, bound: float, unit: str, source: str) -> CheckLine:
    """Return a line that is ok where `value` is at least `bound`; NaN fails."""
    suffix = f" {unit}" if unit else ""
    return verdict_line(
        title, f"{value:.3g}{suffix}", f">= {bound:.3g}{suffix}", value >= bound, source
    )


def verdict_line(title: str, figure: str, bound: str, ok: bool, source: str) -> CheckLine:
    """Return a line with a figure in words, which the caller has judged already (`ok`)."""
    return CheckLine(
        what=title,
        figure=figure,
        bound=bound,
        verdict=CheckResult.OK if ok else CheckResult.FAIL,
        note=source,
    )


def skipped_line(title: str, reason: str, figure: str = "-") -> CheckLine:
    """Return a line that is not judged. `figure` is what was measured all the same."""
    return CheckLine(what=title, figure=figure, bound="-", verdict=CheckResult.SKIPPED, note=reason)


def failed_line(title: str, reason: str) -> CheckLine:
    """Return the line of a figure that is missing because something broke."""
    return CheckLine(what=title, figure="-", bound="-", verdict=CheckResult.FAIL, note=reason)


def one_line(error: BaseException) -> str:
    """Return an exception as the note of a line, in 300 characters at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


_HEADER = ("check", "what", "figure", "bound", "verdict")


def table(lines: Sequence[CheckLine]) -> str:
    """Return the table for a person, with the counts at its end.

    Notes stand below what failed and beside what was skipped.
    """
    rows = []
    for line in lines:
        rows.append((line.check, line.what, line.figure, line.bound, str(line.verdict)))
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    printed = [_row(_HEADER, widths)]
    for line, row in zip(lines, rows, strict=True):
        note = f" ({line.note})" if line.verdict is CheckResult.SKIPPED else ""
        printed.append(_row(row, widths) + note)
        if line.verdict is CheckResult.FAIL:
            printed.append(f"    -> {line.note}")
    return "\n".join([*printed, "", counts(lines)])


def counts(lines: Sequence[CheckLine]) -> str:
    """Return how many lines have each verdict, in words."""
    return ", ".join(
        f"{sum(line.verdict is verdict for line in lines)} {verdict}" for verdict in CheckResult
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def as_json(lines: Sequence[CheckLine]) -> list[dict[str, Any]]:
    """Return the lines as objects of JSON, every one with its note."""
    return [asdict(line) for line in lines]


def exit_code(lines: Sequence[CheckLine]) -> int:
    """Return 1 where a line fails or nothing was looked at, else 0."""
    return int(not lines or any(line.verdict is CheckResult.FAIL for line in lines))
