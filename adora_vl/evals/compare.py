"""Scores of one benchmark side by side, with tests of their differences.

A and B are score files or the output folders of `run`. Every run is tested against the first, on
their common items. The comparison of training runs (`adora_vl.report`) has the warnings of this
module too.
"""

import json
from collections.abc import Sequence

from adora_vl.evals.benchmark import BENCHMARK_NAMES, find_benchmark
from adora_vl.evals.compare_views import (
    TOOL_FIELDS,
    VIEW_FIELDS,
    differ_in_tools,
    group_runs_by_view,
    tool_lines,
    view_lines,
)
from adora_vl.evals.records import AccuracyCell, PublishedFigures
from adora_vl.evals.score_differences import (
    common_problems,
    difference_between,
    paired_test,
    problem_amount,
)
from adora_vl.evals.score_files import ScoreFile, check_one_benchmark, fingerprint_part
from adora_vl.evals.scoring.coverage import (
    describe_scored_part,
    noun_of_counts,
    partial_score_notes,
)
from adora_vl.evals.scoring.table import (
    accuracy_text,
    align_columns,
    name_of_data,
    step_lines,
)
from adora_vl.utils.errors import UserError

# The fields of a fingerprint in which compared runs may differ. The runs are of one benchmark, so
# different names of it are aliases.
_FREE_FIELDS = (
    "benchmark",
    "model",
    "model_hash",
    "revision",
    "seed",
)
_MAX_VALUE_CHARS = 60
# The benchmarks of ours that always ask several versions of each problem.
_BENCHMARKS_WITH_VERSIONS = ("mathverse", "dynamath", "wemath")


def caution_lines(runs: Sequence[ScoreFile], subject: Sequence[str] = ()) -> list[str]:
    """Warn about everything, apart from the model, in which the scores of these runs differ.

    A score says it in its `rules`, its `coverage`, and the parts of its `fingerprint`: `fields` are
    the options as given, `resolved` those that the model decided, and `versions` are of the
    software.

    Args:
        runs: The runs that are compared.
        subject: Further fields that may differ, because the comparison is about them.
    """
    lines: list[str] = []
    for run in runs:
        lines += _named_partial_notes(run)
        lines += _unknown_versions_notes(run)
    without_fingerprint = [run.name for run in runs if not fingerprint_part(run.score, "fields")]
    with_fingerprint = [run for run in runs if run.name not in without_fingerprint]
    if without_fingerprint:
        unknown = "it is not known whether the prompt, the sampling and the data were the same"
        names = ", ".join(without_fingerprint)
        lines.append(f"warning: {names}: no fingerprint, so {unknown}")
    may_differ = (*_FREE_FIELDS, *subject)
    if group_runs_by_view(runs):  # the comparison is about what the model was shown
        may_differ = (*may_differ, *VIEW_FIELDS)
    for key, values in _differing_settings(with_fingerprint, may_differ).items():
        lines.append(f"warning: the runs differ in {key}: {values}")
    rules = {json.dumps(run.score.get("rules") or {}, sort_keys=True) for run in runs}
    if len(rules) > 1:
        lines.append(
            "warning: the runs were scored by different rules: " + " | ".join(sorted(rules))
        )
    for key, values in _differing_values(with_fingerprint, "versions").items():
        lines.append(f"note: the runs differ in the version of {key}: {values}")
    return lines


def _unknown_versions_notes(run: ScoreFile) -> list[str]:
    """Warn of a score that does not say which answers are to versions of one problem.

    An earlier version of this package wrote it. The versions would count as problems.
    """
    has_versions = run.benchmark in _BENCHMARKS_WITH_VERSIONS
    if not has_versions or any("problem" in item for item in run.score["items"]):
        return []
    return [
        f"warning: {run.name}: it does not say which answers are versions of one problem, so the "
        "intervals are too narrow; score the predictions again"
    ]


def _named_partial_notes(run: ScoreFile) -> list[str]:
    """Return the notes on a score over a part of the problems, with the name of its run in each."""
    lines: list[str] = []
    for note in partial_score_notes(run.score):
        kind, _, text = note.partition(": ")  # `note` or `warning`
        lines.append(f"{kind}: {run.name}: {text}")
    return lines


def _differing_settings(runs: Sequence[ScoreFile], may_differ: Sequence[str]) -> dict[str, str]:
    """Return the settings in which runs differ, each with a text of the values.

    Both the options as given and the settings that the engine made of them are compared. An option
    such as `auto`, or a limit that is not given, leaves the setting to the model, so that two runs
    with equal options may differ in it. `may_differ` are the options that are not compared.
    """
    differing_fields = _differing_values(runs, "fields", ignored=may_differ)
    with_resolved = [run for run in runs if fingerprint_part(run.score, "resolved")]
    # The address of a server says nothing of its answers. An earlier version of this package wrote
    # down fewer settings, so only those that all runs have are compared.
    differing_resolved = _differing_values(
        with_resolved, "resolved", ignored=("base_url", *differing_fields), common_only=True
    )
    return differing_fields | differing_resolved


def _differing_values(
    runs: Sequence[ScoreFile], part: str, *, ignored: Sequence[str] = (), common_only: bool = False
) -> dict[str, str]:
    """Return the keys in one part of the fingerprints whose values differ between runs.

    Args:
        runs: The runs, all with that part.
        part: `fields`, `resolved` or `versions`.
        ignored: Keys that are not compared.
        common_only: Whether a key is compared only if all runs have it.

    Each key has a text with the value of each run: `base "float32", tuned "bfloat16"` for `dtype`.
    """
    parts_of_runs = [(run.name, fingerprint_part(run.score, part)) for run in runs]
    keys = dict.fromkeys(key for _, values in parts_of_runs for key in values)
    values_text_by_key: dict[str, str] = {}
    for key in keys:
        is_common = all(key in values for _, values in parts_of_runs)
        if key in ignored or (common_only and not is_common):
            continue
        distinct_values = {
            json.dumps(values.get(key), sort_keys=True) for _, values in parts_of_runs
        }
        if len(distinct_values) > 1:
            texts = [
                f"{name} {shorten_middle(json.dumps(values.get(key)))}"
                for name, values in parts_of_runs
            ]
            values_text_by_key[key] = ", ".join(texts)
    return values_text_by_key


def shorten_middle(value: str) -> str:
    """Leave out the middle of a text that is too long for a line."""
    if len(value) <= _MAX_VALUE_CHARS:
        return value
    half = _MAX_VALUE_CHARS // 2
    return f"{value[:half]}...{value[-half:]}"


def compare_runs(runs: Sequence[ScoreFile], by: Sequence[str], *, published: bool) -> list[str]:
    """Compare runs of one benchmark: a table of their accuracies, tests, and notes, in lines.

    Args:
        runs: The runs; each is tested against the first, and has its gain over it in points.
        by: The kinds of groups, such as `image_size`, that get rows of their own.
        published: Whether to quote figures that others have published.

    Raises `UserError` if the runs are of different benchmarks, or have no such groups.
    """
    check_one_benchmark(runs)
    quoted_figures = _published_figures(runs) if published else None
    view_groups = group_runs_by_view(runs)
    # Beside views of ours, MathVerse's own versions of each problem are of interest too.
    if not by and view_groups and runs[0].benchmark == "mathverse":
        by = ["version"]
    counted = noun_of_counts([run.score for run in runs])
    caption = f"{name_of_data(runs[0].score)}: accuracy in %, [95 % interval], {counted}"
    if len(runs) > 1:
        caption += f"; gain in points over {runs[0].name}"
    lines = [caption, *align_columns(_table_rows(runs, quoted_figures))]
    if quoted_figures:
        lines.append(f"quoted: {quoted_figures.source}; not measured here")
    for run in runs:
        if run.score.get("steps"):
            lines += [f"{run.name}: {line}" for line in step_lines(run.score["steps"])]
    for kind in by:
        lines += align_columns(_group_rows(runs, kind))
    if len(runs) > 1:
        lines.append("")
        for run in runs[1:]:
            lines += _test_lines(runs[0], run)
        for run_by_view in view_groups:
            lines += view_lines(run_by_view)
    return lines + _note_lines(runs, quoted_figures)


def _published_figures(runs: Sequence[ScoreFile]) -> PublishedFigures | None:
    """Return the published figures to show beside these scores; None where none belong there.

    They are shown where all of these hold:

    - the benchmark is one of ours, and has published figures
    - each score is over all the data of its benchmark
    - each score is of the problems of the figures, as far as the benchmark can tell (`applies`)
    """
    benchmark = runs[0].benchmark
    if benchmark not in BENCHMARK_NAMES:
        return None
    published = find_benchmark(benchmark).published
    # `describe_scored_part` says which part of the data a score is over; None for all of it.
    if published is None or any(describe_scored_part(run.score) for run in runs):
        return None
    applies = published.applies
    if applies is not None and not all(applies(run.score) for run in runs):
        return None
    return published


def _table_rows(
    runs: Sequence[ScoreFile], quoted_figures: PublishedFigures | None
) -> list[list[str]]:
    """Build the rows of the table: its head, the runs, and the quoted figures.

    Each figure of a benchmark, such as `all`, has a column. Where there are several runs, the next
    column has the gain of each over the first:

                all                       gain
        base    61.2 [57.9, 64.4] of 850
        tuned   63.5 [60.2, 66.7] of 850  +2.3
    """
    columns = list(dict.fromkeys(name for run in runs for name in run.cells))
    head = [""]
    for column in columns:
        head.append(column)
        if len(runs) > 1:
            head.append("gain")
    rows = [head]
    cells_by_column = [[run.cells.get(column) for run in runs] for column in columns]
    rows += _run_rows(runs, cells_by_column)
    if quoted_figures is not None:
        for name, figures in quoted_figures.rows.items():
            row = [f"{name} (quoted)"]
            for column in columns:
                row.append(f"{figures[column]:5.1f}" if column in figures else "-")
                if len(runs) > 1:
                    row.append("")
            rows.append(row)
    return rows


def _run_rows(
    runs: Sequence[ScoreFile],
    cells_by_column: Sequence[Sequence[AccuracyCell | None]],
    *,
    indent: str = "",
) -> list[list[str]]:
    """Build the row of each run: its name, and for each column its accuracy and its gain.

    Args:
        runs: The runs.
        cells_by_column: For each column the accuracy of each run; None where a run has none.
        indent: What stands before the names.
    """
    rows: list[list[str]] = []
    for number, run in enumerate(runs):
        row = [f"{indent}{run.name}"]
        for cells in cells_by_column:
            first_cell = cells[0]
            cell = cells[number]
            row.append(_cell_text(cell))
            # The first run has no gain over itself, and a run without the figure has none either.
            if number > 0 and first_cell is not None and cell is not None:
                row.append(f"{100 * (cell['accuracy'] - first_cell['accuracy']):+6.1f}")
            elif len(runs) > 1:
                row.append("")
        rows.append(row)
    return rows


def _cell_text(cell: AccuracyCell | None) -> str:
    """Format an accuracy, its interval and its number of answers: `61.2 [57.9, 64.4] of 850`.

    A figure that is no count has no number. A missing figure, None, is `-`.
    """
    if cell is None or "total" not in cell:
        return accuracy_text(cell)
    # The cell over all answers is the score itself, which knows if it is over a part of the data.
    count = describe_scored_part(cell) or str(cell["total"])
    return f"{accuracy_text(cell)} of {count}"


def _group_rows(runs: Sequence[ScoreFile], kind: str) -> list[list[str]]:
    """Build the rows of one kind of group: for each group a heading and a row per run.

    Raises `UserError` if no run has that kind of group.
    """
    kinds = list(dict.fromkeys(name for run in runs for name in run.score["groups"]))
    if kind not in kinds:
        raise UserError(f"by: no run has the group {kind!r}; they have {', '.join(kinds)}")
    groups_of_runs = [run.score["groups"].get(kind, {}) for run in runs]
    names = dict.fromkeys(name for cell_by_group in groups_of_runs for name in cell_by_group)
    rows: list[list[str]] = []
    for name in names:
        cells = [cell_by_group.get(name) for cell_by_group in groups_of_runs]
        rows += [[""], [f"{kind} = {name}"], *_run_rows(runs, [cells], indent="  ")]
    return rows


def _test_lines(first: ScoreFile, second: ScoreFile) -> list[str]:
    """Test the difference of two runs on their common problems, in lines.

    The first line has the difference with its paired interval over the problems. If only one of the
    runs had tools, further lines say what tools change. Otherwise McNemar's test is added to the
    line, if each run has one answer to each problem.
    """
    difference = difference_between([first], [second])
    if difference is None:
        raise UserError(f"run: {second.name!r} and {first.name!r} have no problem in common")
    common_pids = common_problems([first, second])
    problems = first.problems_of(common_pids)
    text = (
        f"{second.name} - {first.name}: {difference.points} (paired, "
        f"{problem_amount(problems, 'common problem')})"
    )
    if differ_in_tools(first, second):
        return [text, *tool_lines(first, second)]
    first_shares = [first.shares[pid] for pid in common_pids]
    second_shares = [second.shares[pid] for pid in common_pids]
    test = paired_test(first_shares, second_shares, problems)
    if test.p is None:  # McNemar's test is for single answers, each right or wrong
        return [text + "; several answers a problem, so no McNemar test"]
    counts = f"{test.gained} gained, {test.lost} lost"
    return [text + f"; McNemar p = {test.p:.3g} ({counts})"]


def _note_lines(runs: Sequence[ScoreFile], quoted_figures: PublishedFigures | None) -> list[str]:
    """Return what limits a comparison: settings and problems that differ, and partial scores.

    `quoted_figures` are the published figures that are shown, which may be by other rules.
    """
    if len(runs) > 1:
        # Then the settings of tools may differ without a warning, since they are what is compared.
        is_about_tools = all(differ_in_tools(runs[0], run) for run in runs[1:])
        notes = caution_lines(runs, subject=TOOL_FIELDS if is_about_tools else ())
    else:
        notes = partial_score_notes(runs[0].score)
    if any(run.shares.keys() != runs[0].shares.keys() for run in runs):
        notes.append(
            "warning: the runs do not have the same problems; the tests use the common ones, the "
            "table all"
        )
    if quoted_figures is not None:
        cautions = [_why_not_comparable(run, quoted_figures) for run in runs]
        notes += [f"note: {caution}" for caution in dict.fromkeys(cautions) if caution]
    return notes


def _why_not_comparable(run: ScoreFile, quoted_figures: PublishedFigures) -> str | None:
    """Say why a score cannot be compared with the published figures; None where it can."""
    rules = quoted_figures.rules
    if rules is not None and run.score["rules"].get("rules") != rules:
        return f"the quoted rows are by the rules `{rules}`; score with --rules {rules} to compare"
    return quoted_figures.caution(run.score) if quoted_figures.caution is not None else None
