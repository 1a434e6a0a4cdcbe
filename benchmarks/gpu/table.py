"""What a check says: lines of figure, bound and verdict; and the table of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckResult(StrEnum):
    OK = "ok"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Line:
    """One figure. `note`: where the bound comes from, why it was skipped, or how it failed."""

    what: str
    figure: str
    bound: str
    verdict: CheckResult
    note: str
    check: str = ""


def at_most(what: str, value: float, bound: float, unit: str, source: str) -> Line:
    """ok where `value` is at most `bound`; a value that is no number fails."""
    suffix = f" {unit}" if unit else ""
    return holds(what, f"{value:.3g}{suffix}", f"<= {bound:.3g}{suffix}", value <= bound, source)


def at_least(what: str, value: float, bound: float, unit: str, source: str) -> Line:
    """ok where `value` is at least `bound`."""
    suffix = f" {unit}" if unit else ""
    return holds(what, f"{value:.3g}{suffix}", f">= {bound:.3g}{suffix}", value >= bound, source)


def holds(what: str, figure: str, bound: str, ok: bool, source: str) -> Line:
    """ok where the caller found so."""
    return Line(
        what=what,
        figure=figure,
        bound=bound,
        verdict=CheckResult.OK if ok else CheckResult.FAIL,
        note=source,
    )


def skipped(what: str, reason: str, figure: str = "-") -> Line:
    """Not judged. `figure`: what was seen all the same."""
    return Line(what=what, figure=figure, bound="-", verdict=CheckResult.SKIPPED, note=reason)


def failed(what: str, reason: str) -> Line:
    """There is no figure because something broke."""
    return Line(what=what, figure="-", bound="-", verdict=CheckResult.FAIL, note=reason)


def one_line(error: BaseException) -> str:
    """An exception as a table's note."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


_HEADER = ("check", "what", "figure", "bound", "verdict")


def table(lines: Sequence[Line]) -> str:
    """The table for a person: notes below what failed and beside what was skipped, and the counts
    at the end.
    """
    rows = [(line.check, line.what, line.figure, line.bound, str(line.verdict)) for line in lines]
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    printed = [_row(_HEADER, widths)]
    for line, row in zip(lines, rows, strict=True):
        behind = f" ({line.note})" if line.verdict is CheckResult.SKIPPED else ""
        printed.append(_row(row, widths) + behind)
        if line.verdict is CheckResult.FAIL:
            printed.append(f"    -> {line.note}")
    return "\n".join([*printed, "", counts(lines)])


def counts(lines: Sequence[Line]) -> str:
    """The number of lines of each verdict."""
    return ", ".join(
        f"{sum(line.verdict is verdict for line in lines)} {verdict}" for verdict in CheckResult
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For a program: every line with its note."""
    return [asdict(line) for line in lines]


def exit_code(lines: Sequence[Line]) -> int:
    """1 where a line fails or nothing was looked at, else 0."""
    return int(not lines or any(line.verdict is CheckResult.FAIL for line in lines))
