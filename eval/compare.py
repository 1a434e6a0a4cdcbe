"""`python -m eval.compare A B ...`: scores of one benchmark side by side, with tests of their differences.

A and B are score files or the output folders of `run`. Every run is tested against the first, on their common items.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.commands import Parser, exit_code_of, text
from adora_vl.comparability import cautions, missing_answers
from adora_vl.errors import UserError
from eval.predictions import SCORE as SCORE  # read from here by adora_vl.report
from eval.published import PUBLISHED
from eval.statistics import bootstrap, mcnemar

_NEEDED = ("benchmark", "accuracy", "total", "wilson_95", "groups", "items", "rules")


@dataclass(frozen=True)
class ScoreFile:
    """A score file: its name in the table, its content, and the share of right answers to each problem."""

    name: str
    score: dict[str, Any]
    shares: dict[str, float]
    answers: int  # a problem, at most

    @classmethod
    def of(cls, name: str, score: dict[str, Any]) -> ScoreFile:
        """The content of a score file with what its items say; a score without items has no shares."""
        verdicts: dict[str, list[bool]] = {}
        for item in score.get("items") or []:
            verdicts.setdefault(item.get("pid"), []).append(item.get("verdict") == "correct")
        shares = {pid: sum(right) / len(right) for pid, right in verdicts.items()}
        return cls(name, score, shares, max(map(len, verdicts.values()), default=0))

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The figures that get a row of their own: all, ID and OOD."""
        id_ood = self.score.get("id_ood") or {}
        return {"all": self.score} | {name: id_ood[name] for name in ("ID", "OOD") if id_ood.get(name)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C."""
    parser = build_parser()

    def command() -> None:
        options = parser.parse_args(argv)
        runs = [read_run(path) for path in options.runs]
        print("\n".join(comparison(runs, options.by, published=not options.no_published)))

    return exit_code_of(command, "nothing was written")


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(prog="python -m eval.compare", description="Scores side by side, with tests.")
    add = parser.add_argument
    add("runs", nargs="+", type=text, metavar="RUN", help="a score file, or the folder of a `run`")
    add("--by", action="append", type=text, default=[], metavar="GROUP", help="also by group; may be repeated")
    add("--no-published", action="store_true", help="leave the published rows out")
    return parser


def read_run(path: str) -> ScoreFile:
    """Read a score file. Raises `UserError` if it is not one."""
    file = Path(path) / SCORE if Path(path).is_dir() else Path(path)
    try:
        score = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"run: {str(file)!r} is not a readable score file ({error})") from None
    missing = [key for key in _NEEDED if not isinstance(score, dict) or key not in score]
    if missing:
        raise UserError(f"run: {str(file)!r} has no {missing[0]!r}; make it with the `score` verb of a benchmark")
    items = score["items"]
    if not (
        isinstance(items, list) and items and all(isinstance(i, dict) and {"pid", "verdict"} <= i.keys() for i in items)
    ):
        raise UserError(f"run: {str(file)!r} has no list of items with pid and verdict; score the predictions again")
    return ScoreFile.of(path, score)


def comparison(runs: Sequence[ScoreFile], by: Sequence[str], *, published: bool) -> list[str]:
    """The lines of the table, the tests, and the notes. Raises `UserError` if the runs are of different benchmarks."""
    first = runs[0]
    for run in runs:
        if run.score["benchmark"] != first.score["benchmark"]:
            raise UserError(
                f"run: {run.name!r} is of {run.score['benchmark']} and {first.name!r} of {first.score['benchmark']}; "
                "compare runs of one benchmark"
            )
    quoted = PUBLISHED.get(first.score["benchmark"], ()) if published else ()
    width = max(len(name) for name in [*(run.name for run in runs), *(f"{row.name} (quoted)" for row in quoted)])
    columns = [name for name in ("all", "ID", "OOD") if any(name in run.cells for run in runs)]
    lines = [f"{first.score['benchmark']}: accuracy in %, [95 % interval], problems"]
    lines.append(" ".join([f"{'':<{width}}", *(f"{name:<28}" for name in columns)]).rstrip())
    for run in runs:
        lines.append(_line(run.name, width, [_cell(run.cells.get(name)) for name in columns]))
    for row in quoted:
        figures = [row.figures.get(name) for name in columns]
        shown = ["-" if figure is None else f"{figure:5.1f}" for figure in figures]
        lines.append(_line(f"{row.name} (quoted)", width, shown))
    lines += [f"quoted: {source}; not measured here" for source in dict.fromkeys(row.source for row in quoted)]
    for key in by:
        lines += ["", *_by_group(runs, key, width)]
    if len(runs) > 1:
        lines += ["", *(_test(first, other) for other in runs[1:])]
    return lines + _notes(runs, bool(quoted))


def _line(name: str, width: int, cells: Sequence[str]) -> str:
    """A row of the table: a name of `width` characters, then the cells in columns."""
    return " ".join([f"{name:<{width}}", *(f"{cell:<28}" for cell in cells)]).rstrip()


def _cell(cell: dict[str, Any] | None) -> str:
    """An accuracy with its interval and number of items, such as `61.2 [57.9, 64.4] of 850`; `-` if there is none."""
    if cell is None:
        return "-"
    low, high = cell["wilson_95"]
    return f"{100 * cell['accuracy']:5.1f} [{100 * low:.1f}, {100 * high:.1f}] of {cell['total']}"


def _by_group(runs: Sequence[ScoreFile], key: str, width: int) -> list[str]:
    """For each value of the group `key` a heading and a line per run. Raises `UserError` if no run has that group."""
    known = list(dict.fromkeys(name for run in runs for name in run.score["groups"]))
    if key not in known:
        raise UserError(f"by: no run has the group {key!r}; they have {', '.join(known)}")
    values = list(dict.fromkeys(value for run in runs for value in run.score["groups"].get(key, {})))
    lines = []
    for value in values:
        lines.append(f"{key} = {value}")
        lines += [
            _line("  " + run.name, width + 2, [_cell(run.score["groups"].get(key, {}).get(value))]) for run in runs
        ]
    return lines


def _test(first: ScoreFile, other: ScoreFile) -> str:
    """The difference on common items with its paired bootstrap interval, and for single answers McNemar's test."""
    common = [pid for pid in first.shares if pid in other.shares]
    if not common:
        raise UserError(f"run: {other.name!r} and {first.name!r} have no problem in common")
    differences = [other.shares[pid] - first.shares[pid] for pid in common]
    mean = sum(differences) / len(common)
    low, high = bootstrap(differences)
    text = (
        f"{other.name} - {first.name}: {100 * mean:+.1f} points, 95 % [{100 * low:+.1f}, {100 * high:+.1f}] "
        f"(paired bootstrap, {len(common)} common problems)"
    )
    if max(first.answers, other.answers) > 1:
        return text + "; several answers a problem, so no McNemar test"
    gained, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return text + f"; McNemar p = {mcnemar(lost, gained):.3g} ({gained} gained, {lost} lost)"


def _notes(runs: Sequence[ScoreFile], quoted: bool) -> list[str]:
    """What a reader has to know before comparing: settings and problems that differ, and partial scores."""
    if len(runs) > 1:
        notes = cautions([(run.name, run.score) for run in runs])
    else:
        notes = [f"warning: {line}" for line in [missing_answers(runs[0].score)] if line]
    if any(run.shares.keys() != runs[0].shares.keys() for run in runs):
        notes.append("warning: the runs do not have the same problems; the tests use the common ones, the table all")
    is_mathvista = runs[0].score["benchmark"] == "mathvista"
    if quoted and is_mathvista and any(run.score["rules"].get("rules") != "vlmevalkit" for run in runs):
        notes.append("note: the quoted rows are by the rules `vlmevalkit`; score with --rules vlmevalkit to compare")
    return notes


if __name__ == "__main__":
    sys.exit(main())
