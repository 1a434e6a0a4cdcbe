"""Did B help against A? One paragraph and one table, from the folders of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adora_vl.comparability import cautions
from adora_vl.errors import UserError
from adora_vl.report.difference import WINDOW, Axis, Difference, at_budget, between_problems, between_seeds
from adora_vl.report.sides import PASS_RATE, ComparedRun, Side, config_differences, make_sides, read_compared

_SHOWN = 60
_WIDTH = 34
_UNITS: dict[Axis, str] = {"rollouts": "rollouts", "seconds": "s"}


class ComparedFigure(NamedTuple):
    """One line of the table: a figure, and the budget at which it was taken, where that is not the end."""

    figure: str
    difference: Difference
    axis: Axis | None = None
    budget: float = 0.0

    @property
    def at(self) -> str:
        return f"{self.budget:,.0f} {_UNITS[self.axis]}" if self.axis else "the end"

    @property
    def title(self) -> str:
        return f"{self.figure}, {self.at}"


def comparison_lines(first: Sequence[Path], second: Sequence[Path]) -> list[str]:
    """The comparison's lines. Raises `UserError`."""
    a, b = make_sides([read_compared(run) for run in first], [read_compared(run) for run in second])
    held_out, rest = held_out_rows(a, b), budget_rows(a, b)
    lines = [paragraph(a, b, held_out, rest), "", *table(a, b, [*held_out, *rest]), ""]
    lines += differing_lines(a, b)
    return [*lines, *notes(a, b, bool(held_out))]


def held_out_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """The difference at the end of training on each benchmark that all runs were scored on."""
    rows: list[ComparedFigure] = []
    for benchmark in a.runs[0].scores:
        if any(benchmark not in run.scores for run in (*a.runs, *b.runs)):
            continue
        sides = [[run.scores[benchmark] for run in side.runs] for side in (a, b)]
        try:
            problems = between_problems(sides[0], sides[1])
        except ValueError:
            raise UserError(
                f"RUN: the scores of {benchmark} have no problem in common; evaluate on the same data"
            ) from None
        by_seed = [
            side.by_seed([score.score["accuracy"] for score in scores])
            for side, scores in zip((a, b), sides, strict=True)
        ]
        seeds = between_seeds(by_seed[0], by_seed[1])
        if seeds.low is not None:  # first, because what another seed would give is the wider question
            rows.append(ComparedFigure(f"{benchmark}, held out", seeds))
        rows.append(ComparedFigure(f"{benchmark}, held out", problems))
    return rows


def budget_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """The evaluations on the way and the pass rate in training, where both sides had spent the same."""
    rows: list[ComparedFigure] = []
    shared = [name for name in a.runs[0].curves if all(run.curves.get(name) for run in (*a.runs, *b.runs))]
    for name in sorted(shared, key=lambda name: name == PASS_RATE):  # what was held out first
        title = "pass rate in training" if name == PASS_RATE else f"{name} on the way"
        axes: tuple[Axis, ...] = ("rollouts", "seconds")
        for axis in axes:
            budget = min(getattr(run.curves[name][-1], axis) for run in (*a.runs, *b.runs))
            if not budget:
                continue
            sides = [_at(side, name, axis, budget) for side in (a, b)]
            if sides[0] and sides[1]:
                rows.append(ComparedFigure(title, between_seeds(sides[0], sides[1]), axis, budget))
    return rows


def _at(side: Side, name: str, axis: Axis, budget: float) -> dict[int, float]:
    window = WINDOW if name == PASS_RATE else 0.0  # an evaluation is taken as it is
    values = [
        at_budget([(getattr(point, axis), point.value) for point in run.curves[name]], budget, window)
        for run in side.runs
    ]
    return side.by_seed([value for value in values if value is not None]) if None not in values else {}


def paragraph(a: Side, b: Side, held_out: list[ComparedFigure], rest: list[ComparedFigure]) -> str:
    """The answer first, then what it rests on."""
    if not held_out:
        return (
            f"Whether {b.title} is better than {a.title} is not known: not every run was scored on held-out problems. "
            "Evaluate each with `python -m eval.geometry3k run --model RUN --data DATA --output RUN/eval`."
        )
    main = held_out[0].difference
    verdict = "is better than" if _sign(main) > 0 else "is worse than" if _sign(main) < 0 else "cannot be told from"
    text = (
        f"{b.title} {verdict} {a.title}: {100 * main.value:+.1f} points on {held_out[0].figure} "
        f"(95 %: {_interval(main)}, over {main.over})."
    )
    for axis in ("rollouts", "seconds"):
        same = next((line for line in rest if line.axis == axis), None)
        if same is not None:
            text += f" At equal {axis} ({same.at}) it is {100 * same.difference.value:+.1f} in {same.figure}."
    keys = list(config_differences(a, b))
    differ = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
    text += f" The configs differ in {differ}." if keys else " The configs are the same but for the seed."
    if len(a.runs) == 1 or len(b.runs) == 1:
        text += " With one seed on a side, another seed may well decide otherwise: the interval is over problems alone."
    return text


def _sign(difference: Difference) -> int:
    """1 where the interval is above 0, -1 where it is below, else 0."""
    if difference.low is None or difference.high is None:
        return 0
    return int(difference.low > 0) - int(difference.high < 0)


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return "-"
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


def table(a: Side, b: Side, rows: list[ComparedFigure]) -> list[str]:
    """Means in percent, the difference in points."""
    width = max([_WIDTH, *(len(line.title) for line in rows)])
    lines = [f"{side.letter} = {side.recipe}: {_names(side)}" for side in (a, b)]
    lines += ["", f"{'in %':<{width}}{'A':>8}{'B':>8}{'B - A':>8}  95 % interval"]
    for line in rows:
        row = line.difference
        interval = f"{_interval(row)} ({row.over})" if row.low is not None else row.over
        means = f"{100 * row.first:8.1f}{100 * row.second:8.1f}{100 * row.value:+8.1f}"
        lines.append(f"{line.title:<{width}}{means}  {interval}")
    return lines


def _names(side: Side) -> str:
    return ", ".join(f"{run.name} (seed {run.seed})" for run in side.runs)


def differing_lines(a: Side, b: Side) -> list[str]:
    """`differs: key: value of A -> value of B`."""
    found = config_differences(a, b)
    return [f"differs: {key}: {_cut(before)} -> {_cut(after)}" for key, (before, after) in found.items()]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"


def notes(a: Side, b: Side, scored: bool) -> list[str]:
    """What a reader has to know before believing the table."""
    runs: list[ComparedRun] = [*a.runs, *b.runs]
    lines = [f"warning: {note}" for run in runs for note in run.notes]
    if scored:
        for benchmark in runs[0].scores:
            if all(benchmark in run.scores for run in runs):
                lines += cautions([(run.scores[benchmark].name, run.scores[benchmark].score) for run in runs])
    if {run.seed for run in a.runs} != {run.seed for run in b.runs}:
        lines.append("note: the sides have different seeds, so their runs are not compared in pairs")
    return lines
