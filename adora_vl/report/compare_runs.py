"""Says whether one way of training is better than another: runs against each other, with intervals.

`python -m adora_vl.report A B --compare` answers from the folders of runs, in one paragraph and one
table.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from adora_vl.evals.compare import comparability_warnings, shorten_middle
from adora_vl.evals.score_differences import (
    Difference,
    accuracy_difference,
    find_common_version_ids,
)
from adora_vl.evals.scoring.statistics import paired_t_interval, welch_interval
from adora_vl.record.shown_metrics import PASS_RATE_KEY
from adora_vl.report.compared_runs import (
    BudgetUnit,
    RunSet,
    make_run_sets,
    read_compared_run,
)
from adora_vl.utils.errors import UserError

_TEXT_BY_BUDGET_UNIT: dict[BudgetUnit, str] = {"rollouts": "rollouts", "seconds": "s"}
# The title of the metric `adora/pass_rate`
PASS_RATE_TITLE = "pass rate in training"  # noqa: S105  # no password
# The pass rate of a single step is noise. So it is averaged over this last share of the budget.
PASS_RATE_WINDOW = 0.1
# Least number of characters of the first column in the table of metrics
_TITLE_WIDTH = 34


class DifferingSetting(NamedTuple):
    """A setting in which the run sets A and B differ, with its values as JSON."""

    key: str
    value_of_a: str
    value_of_b: str


def differing_settings(set_a: RunSet, set_b: RunSet) -> list[DifferingSetting]:
    """Return the settings in which two sets of runs differ, in alphabetical order.

    The seed is left out. Options of a method that only some of the runs use are left out too, since
    `adora_method` already shows that the methods differ.
    """
    runs = (*set_a.runs, *set_b.runs)
    all_keys = {key for run in runs for key in run.settings}
    differences = []
    for key in sorted(all_keys):
        is_in_all_runs = all(key in run.settings for run in runs)
        if key.startswith("adora_method.") and not is_in_all_runs:
            continue
        value_of_a = set_a.setting(key)
        value_of_b = set_b.setting(key)
        if value_of_a != value_of_b:
            differences.append(DifferingSetting(key, value_of_a, value_of_b))
    return differences


def difference_over_seeds(
    a_by_seed: Mapping[int, float], b_by_seed: Mapping[int, float]
) -> Difference:
    """Return the difference of the means of two sets of runs, with a 95 % interval over seeds.

    The interval is that of a paired t-test where both sets have the same seeds, and Welch's
    otherwise. There is none where a set has one seed, or where all seeds agree.

    Args:
        a_by_seed: the values of the runs of set A by their seeds, such as accuracies.
        b_by_seed: the values of the runs of set B. The difference is B's mean minus A's.
    """
    mean_of_a = fmean(a_by_seed.values())
    mean_of_b = fmean(b_by_seed.values())
    count_of_a = len(a_by_seed)
    count_of_b = len(b_by_seed)
    if count_of_a == 1 and count_of_b == 1:
        return Difference(first=mean_of_a, second=mean_of_b)
    if count_of_a == 1 or count_of_b == 1:
        return Difference(first=mean_of_a, second=mean_of_b, over="one seed on a side: no interval")
    if a_by_seed.keys() == b_by_seed.keys():
        interval = paired_t_interval([b_by_seed[seed] - a_by_seed[seed] for seed in a_by_seed])
        over = f"{count_of_a} pairs of seeds"
    else:
        interval = welch_interval(list(a_by_seed.values()), list(b_by_seed.values()))
        over = f"{count_of_a} and {count_of_b} seeds"
    if interval is None:
        return Difference(first=mean_of_a, second=mean_of_b, over=f"{over} that agree: no interval")
    low, high = interval
    return Difference(first=mean_of_a, second=mean_of_b, low=low, high=high, over=over)


def value_at_budget(
    points: Sequence[tuple[float, float]], budget: float, window: float
) -> float | None:
    """Return the value of a metric once a run has used up a budget, such as a number of rollouts.

    It is the mean over the last part of the budget, the window, to average out noise. If the window
    has no value, the newest value before it is returned. For example, the points (80, 1), (95, 2),
    (100, 4) and (110, 9) with a budget of 100 and a window of 0.1 give 3, the mean of 2 and 4.

    Args:
        points: pairs of what the run had used up and the metric's value then, in their order.
        budget: how much may be used up.
        window: the length of the last part, as a share of the budget.

    Returns:
        the value; None where the run has no value within the budget.
    """
    # The tolerance is for rounding: a point at the budget itself counts.
    points_within = [(used, value) for used, value in points if used <= budget * (1 + 1e-9)]
    if not points_within:
        return None
    recent_values = [value for used, value in points_within if used > budget * (1 - window)]
    if recent_values:
        return fmean(recent_values)
    _, newest_value = points_within[-1]
    return newest_value


class ComparedMetric(NamedTuple):
    """One line of the table: the difference of the two sets of runs in a metric."""

    metric: str
    difference: Difference
    unit: BudgetUnit | None = None
    """What the budget is counted in; None for a metric at the end of the training."""
    budget: float = 0.0
    """How much every run had used up when the metric was taken, where there is a unit."""

    @property
    def budget_text(self) -> str:
        """Return the budget in words: `1,200 rollouts`, or `the end`."""
        if self.unit is None:
            return "the end"
        return f"{self.budget:,.0f} {_TEXT_BY_BUDGET_UNIT[self.unit]}"

    @property
    def title(self) -> str:
        """Return the title of the line: the metric and the budget."""
        return f"{self.metric}, {self.budget_text}"


def held_out_rows(set_a: RunSet, set_b: RunSet) -> list[ComparedMetric]:
    """Return how the trained models differ on held-out problems, for each benchmark of all runs.

    Only the problems that all runs have answered are compared.

    A benchmark has a row whose interval is over problems. If each set has several seeds, it also
    has a row whose interval is over seeds. That row comes first, but last where it has no interval,
    because all seeds agree.

    Raises:
        UserError: the runs have no problem of a benchmark in common.
    """
    rows: list[ComparedMetric] = []
    for benchmark in _shared_benchmarks(set_a, set_b):
        over_problems = accuracy_difference(
            [run.scores[benchmark] for run in set_a.runs],
            [run.scores[benchmark] for run in set_b.runs],
        )
        if over_problems is None:
            raise UserError(
                f"RUN: the scores of {benchmark} have no problem in common; evaluate on the same "
                "data"
            )
        common_version_ids = find_common_version_ids(
            [run.scores[benchmark] for run in (*set_a.runs, *set_b.runs)]
        )
        over_seeds = difference_over_seeds(
            _accuracy_by_seed(set_a, benchmark, common_version_ids),
            _accuracy_by_seed(set_b, benchmark, common_version_ids),
        )
        metric = f"{benchmark}, held out"
        # The row over seeds comes first: what another seed would give is the wider question.
        if over_seeds.low is not None:
            rows.append(ComparedMetric(metric, over_seeds))
        rows.append(ComparedMetric(metric, over_problems))
        # Without an interval the row over seeds decides nothing, and is only shown in the table.
        both_have_several_runs = min(len(set_a.runs), len(set_b.runs)) > 1
        if over_seeds.low is None and both_have_several_runs:
            rows.append(ComparedMetric(metric, over_seeds))
    return rows


def _accuracy_by_seed(
    run_set: RunSet, benchmark: str, common_version_ids: Sequence[str]
) -> dict[int, float]:
    """Return the accuracy of each run of a set on some problems of a benchmark, by its seed."""
    accuracies = [
        fmean(run.scores[benchmark].accuracies_of(common_version_ids)) for run in run_set.runs
    ]
    return run_set.by_seed(accuracies)


def _shared_benchmarks(set_a: RunSet, set_b: RunSet) -> list[str]:
    """Return the names of the benchmarks that all runs were scored on."""
    all_runs = (*set_a.runs, *set_b.runs)
    names = set_a.runs[0].scores
    return [name for name in names if all(name in run.scores for run in all_runs)]


def budget_rows(set_a: RunSet, set_b: RunSet) -> list[ComparedMetric]:
    """Return how the sets differ during the training, after equal numbers of rollouts or seconds.

    The metrics are the evaluations during the training and the pass rate in training. Each gets a
    row at a number of rollouts, and a row at a number of seconds of training steps. That number is
    the total of the shortest run, so every run has a value there.
    """
    all_runs = (*set_a.runs, *set_b.runs)
    rows: list[ComparedMetric] = []
    shared_curves = [
        name for name in set_a.runs[0].curves if all(run.curves.get(name) for run in all_runs)
    ]
    # Evaluations come first, since they are on held-out problems: False sorts before True.
    for curve_name in sorted(shared_curves, key=lambda name: name == PASS_RATE_KEY):
        metric = f"{curve_name} on the way"
        if curve_name == PASS_RATE_KEY:
            metric = PASS_RATE_TITLE
        for unit in _TEXT_BY_BUDGET_UNIT:
            # The last point of a curve has all the rollouts, or seconds, of its run.
            budget = min(run.curves[curve_name][-1].amount_used(unit) for run in all_runs)
            a_by_seed = _values_by_seed_at_budget(set_a, curve_name, unit=unit, budget=budget)
            b_by_seed = _values_by_seed_at_budget(set_b, curve_name, unit=unit, budget=budget)
            # A budget of 0 has nothing to compare, nor has a run without a value within it.
            if budget == 0 or not a_by_seed or not b_by_seed:
                continue
            rows.append(
                ComparedMetric(
                    metric=metric,
                    difference=difference_over_seeds(a_by_seed, b_by_seed),
                    unit=unit,
                    budget=budget,
                )
            )
    return rows


def _values_by_seed_at_budget(
    run_set: RunSet, curve_name: str, *, unit: BudgetUnit, budget: float
) -> dict[int, float]:
    """Return the value of a metric in each run of a set once it has used up a budget, by its seed.

    Args:
        run_set: the runs.
        curve_name: the metric, a key of `ComparedRun.curves`.
        unit: what the budget is counted in, rollouts or seconds.
        budget: how much every run may have used up.

    Returns:
        the values; empty where a run has no value within the budget.
    """
    # An evaluation is taken as it is.
    window = PASS_RATE_WINDOW if curve_name == PASS_RATE_KEY else 0.0
    values = []
    for run in run_set.runs:
        points = [(point.amount_used(unit), point.value) for point in run.curves[curve_name]]
        value = value_at_budget(points, budget, window)
        if value is None:
            return {}
        values.append(value)
    return run_set.by_seed(values)


def comparison_lines(first: Sequence[Path], second: Sequence[Path]) -> list[str]:
    """Return the lines of a comparison of runs: the answer, the table, what differs, and cautions.

    Args:
        first: the folders of the runs of set A, or of all runs.
        second: the folders of set B. If there are none, the runs in `first` are divided by config.

    Raises:
        UserError: a folder is no run, or the runs cannot be compared.
    """
    set_a, set_b = make_run_sets(
        [read_compared_run(run) for run in first], [read_compared_run(run) for run in second]
    )
    held_out = held_out_rows(set_a, set_b)
    at_budgets = budget_rows(set_a, set_b)
    differences = differing_settings(set_a, set_b)
    keys = [difference.key for difference in differences]
    lines = [
        _answer_paragraph(set_a, set_b=set_b, held_out=held_out, at_budgets=at_budgets, keys=keys),
        "",
        *_table_lines(set_a, set_b, [*held_out, *at_budgets]),
        "",
    ]
    for difference in differences:
        value_of_a = shorten_middle(difference.value_of_a)
        value_of_b = shorten_middle(difference.value_of_b)
        lines.append(f"differs: {difference.key}: {value_of_a} -> {value_of_b}")
    return [*lines, *_caution_lines(set_a, set_b)]


ComparedMetrics = Sequence[ComparedMetric]


def _answer_paragraph(
    set_a: RunSet,
    set_b: RunSet,
    held_out: ComparedMetrics,
    at_budgets: ComparedMetrics,
    keys: Sequence[str],
) -> str:
    """Say whether run set B is better than A, and by which metrics.

    Args:
        set_a: the runs that are compared with.
        set_b: the runs of which the paragraph speaks.
        held_out: the differences on held-out problems, from `held_out_rows`; the first one decides.
        at_budgets: the differences during the training at equal budgets, from `budget_rows`.
        keys: the settings in which the sets differ.
    """
    if not held_out:
        return (
            f"Whether {set_b.title} is better than {set_a.title} is not known: not every run was scored "
            "on held-out problems. Evaluate each with `python -m eval.problems run --model RUN "
            "--data DATA --output RUN/eval`."
        )
    decisive = held_out[0].difference
    gain = f"{100 * decisive.value:+.1f} points on {held_out[0].metric}"
    interval = f"95 %: {_interval_in_points(decisive)}, over {decisive.over}"
    text = f"{set_b.title} {_verdict_words(decisive)} {set_a.title}: {gain} ({interval})."
    for unit in _TEXT_BY_BUDGET_UNIT:
        rows = [row for row in at_budgets if row.unit == unit]
        if rows:
            row = rows[0]
            points = f"{100 * row.difference.value:+.1f}"
            text += f" At equal {unit} ({row.budget_text}) it is {points} in {row.metric}."
    if keys:
        text += f" The configs differ in {', '.join(keys[:4])}"
        text += f" and {len(keys) - 4} more." if len(keys) > 4 else "."
    else:
        text += " The configs are the same but for the seed."
    if len(set_a.runs) == 1 or len(set_b.runs) == 1:
        text += (
            " With one seed on a side, another seed may well decide otherwise: the interval is "
            "over problems alone."
        )
    return text


def _verdict_words(difference: Difference) -> str:
    """Return the words that say whether run set B is better or worse than A.

    B is better if the whole 95 % interval of B - A lies above 0, and worse if it lies below 0.
    Otherwise they cannot be told apart.
    """
    assert difference.low is not None
    assert difference.high is not None
    if difference.low > 0:
        return "is better than"
    if difference.high < 0:
        return "is worse than"
    return "cannot be told from"


def _interval_in_points(difference: Difference) -> str:
    """Return the 95 % interval of a difference of shares, in percentage points: `-1.2 to +3.4`."""
    assert difference.low is not None
    assert difference.high is not None
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


def _table_lines(set_a: RunSet, set_b: RunSet, rows: ComparedMetrics) -> list[str]:
    """Return the table of metrics, below a line for each set that names its runs.

    A row has the means of both sets in percent, their difference in points, and its interval.
    """
    title_lengths = [len(row.title) for row in rows]
    width = max([_TITLE_WIDTH, *title_lengths])
    lines = []
    for run_set in (set_a, set_b):
        names = ", ".join(f"{run.name} (seed {run.seed})" for run in run_set.runs)
        lines.append(f"{run_set.letter} = {run_set.recipe}: {names}")
    lines += ["", f"{'in %':<{width}}{'A':>8}{'B':>8}{'B - A':>8}  95 % interval"]
    for row in rows:
        difference = row.difference
        interval = difference.over
        if difference.low is not None:
            interval = f"{_interval_in_points(difference)} ({difference.over})"
        first_percent = 100 * difference.first
        second_percent = 100 * difference.second
        gain = 100 * difference.value
        columns = f"{first_percent:8.1f}{second_percent:8.1f}{gain:+8.1f}"
        lines.append(f"{row.title:<{width}}{columns}  {interval}")
    return [*lines, *_legend_lines(rows)]


def _legend_lines(rows: Sequence[ComparedMetric]) -> list[str]:
    """Explain the titles of the rows at equal budgets; nothing where the table has no such rows."""
    metrics = [row.metric for row in rows if row.unit is not None]
    if not metrics:
        return []
    lines = [
        "",
        "N rollouts, N s: all runs after the rollouts, or seconds of training steps, that the "
        "shortest one had.",
    ]
    if any(metric != PASS_RATE_TITLE for metric in metrics):
        lines.append("on the way: the newest evaluation before that point.")
    if PASS_RATE_TITLE in metrics:
        lines.append(
            "pass rate in training: right answers to training problems, as the mean over the last "
            "tenth before that point."
        )
    return lines


def _caution_lines(set_a: RunSet, set_b: RunSet) -> list[str]:
    """Return warnings that a reader has to know before believing the table.

    They are notes on the runs, unequal seeds, and differences of the evaluations.
    """
    runs = (*set_a.runs, *set_b.runs)
    lines = [f"warning: {note}" for run in runs for note in run.notes]
    for benchmark in _shared_benchmarks(set_a, set_b):
        scores = [run.scores[benchmark] for run in runs]
        lines += comparability_warnings(scores)
        scored_problems = [score.accuracy_by_version_id.keys() for score in scores]
        if any(problems != scored_problems[0] for problems in scored_problems):
            lines.append(
                f"warning: the runs do not have the same problems of {benchmark}; the common ones "
                "are compared"
            )
    seeds_of_a = {run.seed for run in set_a.runs}
    seeds_of_b = {run.seed for run in set_b.runs}
    if seeds_of_a != seeds_of_b:
        lines.append(
            "note: the sides have different seeds, so their runs are not compared in pairs"
        )
    return lines
