"""Says whether one way of training is better than another: runs against each other, with intervals.

`python -m adora_vl.report A B --compare` answers from the folders of runs, in one paragraph and one
table.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from adora_vl.evals.compare import caution_lines, shortened
from adora_vl.evals.score_differences import Difference, difference_between
from adora_vl.evals.scoring.statistics import paired_t, welch
from adora_vl.report.comparison_sides import PASS_RATE, Side, make_sides, read_compared
from adora_vl.utils.errors import UserError

Axis = Literal["rollouts", "seconds"]
_UNITS: dict[Axis, str] = {"rollouts": "rollouts", "seconds": "s"}
# The title of that figure
TRAINING = "pass rate in training"
# A noisy figure is averaged over the last tenth of its budget
WINDOW = 0.1
# Characters of the first column in the table of runs
_WIDTH = 34


def config_differences(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """Return the keys in which the sides differ beside the seed, each with its value on A and on B.

    Options of a method that a run does not have are left out.
    """
    runs = (*a.runs, *b.runs)
    all_keys = {key for run in runs for key in run.settings}
    differences = {}
    for key in sorted(all_keys):
        in_all_runs = all(key in run.settings for run in runs)
        if key.startswith("adora_method.") and not in_all_runs:
            continue
        first = a.setting(key)
        second = b.setting(key)
        if first != second:
            differences[key] = (first, second)
    return differences


def between_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """Return the difference of the means of one value per seed, with a 95 % interval over seeds.

    The interval is that of a paired t-test where both sides have the same seeds, else Welch's. There
    is none where a side has one seed.

    Args:
        first: the values of side A by seed.
        second: the values of side B by seed.
    """
    first_mean = fmean(first.values())
    second_mean = fmean(second.values())
    if len(first) < 2 or len(second) < 2:
        over = Difference.over
        if max(len(first), len(second)) > 1:
            over = "one seed on a side: no interval"
        return Difference(first_mean, second_mean, over=over)
    if first.keys() == second.keys():
        low, high = paired_t([second[seed] - first[seed] for seed in first])
        over = f"{len(first)} pairs of seeds"
    else:
        low, high = welch(list(first.values()), list(second.values()))
        over = f"{len(first)} and {len(second)} seeds"
    return Difference(first=first_mean, second=second_mean, low=low, high=high, over=over)


def at_budget(
    points: Sequence[tuple[float, float]], budget: float, window: float = WINDOW
) -> float | None:
    """Return a figure at a budget: its mean within the last part of it, else the newest before.

    Args:
        points: pairs of what was spent and the figure's value, in the order of the run.
        budget: how much may be spent.
        window: the last part of the budget, as a share of it.

    Returns:
        the figure, None where there is no value within the budget.
    """
    # The tolerance is for rounding: a point at the budget itself counts.
    before = [(spent, value) for spent, value in points if spent <= budget * (1 + 1e-9)]
    if not before:
        return None
    recent = [value for spent, value in before if spent > budget * (1 - window)]
    return fmean(recent) if recent else before[-1][1]


class ComparedFigure(NamedTuple):
    """One line of the table: a figure, and the budget at which it was taken.

    Without an axis it was taken at the end of the training.
    """

    figure: str
    difference: Difference
    axis: Axis | None = None
    budget: float = 0.0

    @property
    def at(self) -> str:
        """Return the budget in words: `1,200 rollouts`, or `the end`."""
        return f"{self.budget:,.0f} {_UNITS[self.axis]}" if self.axis else "the end"

    @property
    def title(self) -> str:
        """Return the title of the line: the figure and the budget."""
        return f"{self.figure}, {self.at}"


def held_out_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """Return the difference at the end of training on each benchmark that all runs have.

    A benchmark has a row over seeds, if each side has several, and a row over problems.
    """
    rows: list[ComparedFigure] = []
    for benchmark in _shared_benchmarks(a, b):
        problems = difference_between(
            [run.scores[benchmark] for run in a.runs],
            [run.scores[benchmark] for run in b.runs],
        )
        if problems is None:
            raise UserError(
                f"RUN: the scores of {benchmark} have no problem in common; evaluate on the same "
                "data"
            )
        seeds = between_seeds(_accuracies(a, benchmark), _accuracies(b, benchmark))
        # It comes first, because what another seed would give is the wider question.
        if seeds.low is not None:
            rows.append(ComparedFigure(f"{benchmark}, held out", seeds))
        rows.append(ComparedFigure(f"{benchmark}, held out", problems))
    return rows


def _accuracies(side: Side, benchmark: str) -> dict[int, float]:
    """Return the accuracy of each run of a side on a benchmark, by seed."""
    return side.by_seed([run.scores[benchmark].score["accuracy"] for run in side.runs])


def _shared_benchmarks(a: Side, b: Side) -> list[str]:
    """Return the names of the benchmarks that all runs were scored on."""
    all_runs = (*a.runs, *b.runs)
    names = a.runs[0].scores
    return [name for name in names if all(name in run.scores for run in all_runs)]


def budget_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """Return the evaluations on the way and the pass rate in training, at equal budgets.

    The budget is that of the shortest run, in rollouts and in seconds, so that all runs had it.
    """
    all_runs = (*a.runs, *b.runs)
    rows: list[ComparedFigure] = []
    names = a.runs[0].curves
    shared_names = [name for name in names if all(run.curves.get(name) for run in all_runs)]
    # What was held out comes first.
    for name in sorted(shared_names, key=lambda name: name == PASS_RATE):
        title = TRAINING if name == PASS_RATE else f"{name} on the way"
        for axis in _UNITS:
            budget = min(getattr(run.curves[name][-1], axis) for run in all_runs)
            first = _values_at_budget(a, name, axis, budget)
            second = _values_at_budget(b, name, axis, budget)
            # A budget of 0 has nothing to compare, nor has a run without a value within it.
            if budget and first and second:
                rows.append(
                    ComparedFigure(
                        figure=title,
                        difference=between_seeds(first, second),
                        axis=axis,
                        budget=budget,
                    )
                )
    return rows


def _values_at_budget(side: Side, name: str, axis: Axis, budget: float) -> dict[int, float]:
    """Return a curve's value at a budget for each run, by seed; empty where a run has none."""
    # An evaluation is taken as it is; the pass rate of a single step is noise.
    window = WINDOW if name == PASS_RATE else 0.0
    values = []
    for run in side.runs:
        points = [(getattr(point, axis), point.value) for point in run.curves[name]]
        value = at_budget(points, budget, window)
        if value is None:
            return {}
        values.append(value)
    return side.by_seed(values)


def comparison_lines(first: Sequence[Path], second: Sequence[Path]) -> list[str]:
    """Return the lines of a comparison of runs: the answer, the table, what differs, and cautions.

    `first` and `second` are the folders of the runs of each side, as `make_sides` takes them.
    `UserError` is raised where they cannot be compared.
    """
    a, b = make_sides([read_compared(run) for run in first], [read_compared(run) for run in second])
    held_out = held_out_rows(a, b)
    at_budgets = budget_rows(a, b)
    differing = config_differences(a, b)
    lines = [
        _paragraph(a, b=b, held_out=held_out, at_budgets=at_budgets, keys=list(differing)),
        "",
        *_table_lines(a, b, [*held_out, *at_budgets]),
        "",
    ]
    lines += [
        f"differs: {key}: {shortened(of_a)} -> {shortened(of_b)}"
        for key, (of_a, of_b) in differing.items()
    ]
    return [*lines, *_caution_lines(a, b)]


Figures = Sequence[ComparedFigure]


def _paragraph(
    a: Side, b: Side, held_out: Figures, at_budgets: Figures, keys: Sequence[str]
) -> str:
    """Return the answer in one sentence, then what it rests on.

    Args:
        a: The side that is compared with.
        b: The side of which the paragraph speaks.
        held_out: The rows of `held_out_rows`; the first one decides.
        at_budgets: The rows of `budget_rows`.
        keys: The settings in which the sides differ.
    """
    if not held_out:
        return (
            f"Whether {b.title} is better than {a.title} is not known: not every run was scored "
            "on held-out problems. Evaluate each with `python -m eval.problems run --model RUN "
            "--data DATA --output RUN/eval`."
        )
    main = held_out[0].difference
    gain = f"{100 * main.value:+.1f} points on {held_out[0].figure}"
    interval = f"95 %: {_interval_in_points(main)}, over {main.over}"
    text = f"{b.title} {_verdict(main)} {a.title}: {gain} ({interval})."
    for axis in _UNITS:
        row = next((row for row in at_budgets if row.axis == axis), None)
        if row is not None:
            points = f"{100 * row.difference.value:+.1f}"
            text += f" At equal {axis} ({row.at}) it is {points} in {row.figure}."
    if keys:
        text += f" The configs differ in {', '.join(keys[:4])}"
        text += f" and {len(keys) - 4} more." if len(keys) > 4 else "."
    else:
        text += " The configs are the same but for the seed."
    if len(a.runs) == 1 or len(b.runs) == 1:
        text += (
            " With one seed on a side, another seed may well decide otherwise: the interval is "
            "over problems alone."
        )
    return text


def _verdict(difference: Difference) -> str:
    """Return what the interval says of B beside A: it is surely on one side of 0, or not."""
    assert difference.low is not None
    assert difference.high is not None
    if difference.low > 0:
        return "is better than"
    if difference.high < 0:
        return "is worse than"
    return "cannot be told from"


def _interval_in_points(difference: Difference) -> str:
    """Return the interval in points: `-1.2 to +3.4`."""
    assert difference.low is not None
    assert difference.high is not None
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


def _table_lines(a: Side, b: Side, rows: Figures) -> list[str]:
    """Return the table of figures: means in percent, the difference in points."""
    width = max([_WIDTH, *(len(row.title) for row in rows)])
    lines = []
    for side in (a, b):
        names = ", ".join(f"{run.name} (seed {run.seed})" for run in side.runs)
        lines.append(f"{side.letter} = {side.recipe}: {names}")
    lines += ["", f"{'in %':<{width}}{'A':>8}{'B':>8}{'B - A':>8}  95 % interval"]
    for row in rows:
        change = row.difference
        interval = change.over
        if change.low is not None:
            interval = f"{_interval_in_points(change)} ({change.over})"
        means = f"{100 * change.first:8.1f}{100 * change.second:8.1f}{100 * change.value:+8.1f}"
        lines.append(f"{row.title:<{width}}{means}  {interval}")
    return [*lines, *_legend_lines(rows)]


def _legend_lines(rows: Sequence[ComparedFigure]) -> list[str]:
    """Return what the titles of rows at a budget mean; nothing where there are no such rows."""
    figures = [row.figure for row in rows if row.axis]
    if not figures:
        return []
    lines = [
        "",
        "N rollouts, N s: all runs after the rollouts, or seconds of training steps, that the "
        "shortest one had.",
    ]
    if any(figure != TRAINING for figure in figures):
        lines.append("on the way: the newest evaluation before that point.")
    if TRAINING in figures:
        lines.append(
            "pass rate in training: right answers to training problems, as the mean over the last "
            "tenth before that point."
        )
    return lines


def _caution_lines(a: Side, b: Side) -> list[str]:
    """Return what a reader has to know before believing the table."""
    runs = (*a.runs, *b.runs)
    lines = [f"warning: {note}" for run in runs for note in run.notes]
    for benchmark in _shared_benchmarks(a, b):
        lines += caution_lines([run.scores[benchmark] for run in runs])
    if {run.seed for run in a.runs} != {run.seed for run in b.runs}:
        lines.append(
            "note: the sides have different seeds, so their runs are not compared in pairs"
        )
    return lines
