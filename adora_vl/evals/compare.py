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
from adora_vl.evals.records import AccuracyMetric, PublishedResults
from adora_vl.evals.score_differences import (
    accuracy_difference,
    find_common_version_ids,
    paired_test,
    problem_count_text,
)
from adora_vl.evals.score_files import ScoreFile, check_one_benchmark, fingerprint_part
from adora_vl.evals.scoring.coverage import (
    count_noun,
    describe_scored_part,
    partial_score_notes,
)
from adora_vl.evals.scoring.table import (
    accuracy_text,
    align_columns,
    scored_dataset_name,
    step_lines,
)
from adora_vl.utils.errors import UserError

# The fields of a fingerprint in which compared runs may differ. All runs are of one benchmark, so
# two names of it mean the same.
_FIELDS_THAT_MAY_DIFFER = (
    "benchmark",
    "model",
    "model_hash",
    "revision",
    "seed",
)
_MAX_VALUE_CHARS = 60


def comparability_warnings(
    runs: Sequence[ScoreFile], compared_fields: Sequence[str] = ()
) -> list[str]:
    """Warn about everything, apart from the model, in which the scores of these runs differ.

    A score says in its `rules`, its `coverage` and its `fingerprint` how it was made. A fingerprint
    has three parts: `fields` has the options as given, `resolved` the settings that the model
    decided, and `versions` the versions of the software.

    Args:
        runs: The runs that are compared.
        compared_fields: Fields that differ on purpose, such as `tools`. They cause no warning.

    Returns lines that begin with `warning: ` or `note: `.
    """
    lines: list[str] = []
    for run in runs:
        lines += _partial_score_notes_with_name(run)
    names_without_fingerprint = [
        run.name for run in runs if not fingerprint_part(run.score, "fields")
    ]
    with_fingerprint = [run for run in runs if run.name not in names_without_fingerprint]
    if names_without_fingerprint:
        lines.append(
            f"warning: {', '.join(names_without_fingerprint)}: no fingerprint, so it is not known "
            "whether the prompt, the sampling and the data were the same"
        )
    ignored_fields = (*_FIELDS_THAT_MAY_DIFFER, *compared_fields)
    if group_runs_by_view(runs):  # the comparison is about what the model was shown
        ignored_fields = (*ignored_fields, *VIEW_FIELDS)
    for key, values in _differing_settings(with_fingerprint, ignored_fields).items():
        lines.append(f"warning: the runs differ in {key}: {values}")
    distinct_rules = {json.dumps(run.score.get("rules") or {}, sort_keys=True) for run in runs}
    if len(distinct_rules) > 1:
        rules_text = " | ".join(sorted(distinct_rules))
        lines.append(f"warning: the runs were scored by different rules: {rules_text}")
    for key, values in _differing_values(with_fingerprint, "versions").items():
        lines.append(f"note: the runs differ in the version of {key}: {values}")
    return lines


def _partial_score_notes_with_name(run: ScoreFile) -> list[str]:
    """Return the notes on a score over a part of the problems, each with the name of its run.

    `note: 60 of the 512 answers ...` becomes `note: runs/mine: 60 of the 512 answers ...`.
    """
    lines: list[str] = []
    for note in partial_score_notes(run.score):
        kind, _, text = note.partition(": ")  # `note` or `warning`
        lines.append(f"{kind}: {run.name}: {text}")
    return lines


def _differing_settings(runs: Sequence[ScoreFile], ignored: Sequence[str]) -> dict[str, str]:
    """Return the settings in which runs differ, each with a text of the values.

    Both the options as given (`fields`) and the settings that the engine made of them (`resolved`)
    are compared: two runs with `dtype: auto` differ if their models have different dtypes.
    `ignored` are the options that are not compared.
    """
    differing_fields = _differing_values(runs, "fields", ignored=ignored)
    with_resolved = [run for run in runs if fingerprint_part(run.score, "resolved")]
    differing_resolved = _differing_values(
        with_resolved,
        "resolved",
        # The address of a server says nothing of its answers. An option that differs is listed
        # once, with the values that the user gave.
        ignored=("base_url", *differing_fields),
        # Engines resolve different settings, and a busy server may not say what program it is.
        common_only=True,
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

    Returns a text with the values by key: `{"dtype": 'base "float32", tuned "bfloat16"'}`.
    """
    parts = [fingerprint_part(run.score, part) for run in runs]
    keys = dict.fromkeys(key for settings in parts for key in settings)
    values_text_by_key: dict[str, str] = {}
    for key in keys:
        is_common = all(key in settings for settings in parts)
        if key in ignored or (common_only and not is_common):
            continue
        distinct_values = {json.dumps(settings.get(key), sort_keys=True) for settings in parts}
        if len(distinct_values) > 1:
            texts: list[str] = []
            for run, settings in zip(runs, parts, strict=True):
                value_text = shorten_middle(json.dumps(settings.get(key)))
                texts.append(f"{run.name} {value_text}")
            values_text_by_key[key] = ", ".join(texts)
    return values_text_by_key


def shorten_middle(value: str) -> str:
    """Leave out the middle of a text that is too long for a line."""
    if len(value) <= _MAX_VALUE_CHARS:
        return value
    half = _MAX_VALUE_CHARS // 2
    return f"{value[:half]}...{value[-half:]}"


def compare_runs(
    runs: Sequence[ScoreFile], group_kinds: Sequence[str], *, quote_published: bool
) -> list[str]:
    """Compare runs of one benchmark: a table of their accuracies, tests, and notes, in lines.

    Args:
        runs: The runs; each is tested against the first, and has its gain over it in points.
        group_kinds: The kinds of groups, such as `image_size`, that get rows of their own.
        quote_published: Whether to quote accuracies that others have published.

    Raises `UserError` if the runs are of different benchmarks, or have no such groups.
    """
    check_one_benchmark(runs)
    published = _find_published_results(runs) if quote_published else None
    view_groups = group_runs_by_view(runs)
    # Beside views of ours, MathVerse's own versions of each problem are of interest too.
    if not group_kinds and view_groups and runs[0].benchmark == "mathverse":
        group_kinds = ["version"]
    noun = count_noun([run.score for run in runs])  # `problems` or `answers`
    caption = f"{scored_dataset_name(runs[0].score)}: accuracy in %, [95 % interval], {noun}"
    if len(runs) > 1:
        caption += f"; gain in points over {runs[0].name}"
    lines = [caption, *align_columns(_table_rows(runs, published))]
    if published:
        lines.append(f"quoted: {published.source}; not measured here")
    for run in runs:
        if run.score.get("steps"):
            lines += [f"{run.name}: {line}" for line in step_lines(run.score["steps"])]
    for kind in group_kinds:
        lines += align_columns(_group_rows(runs, kind))
    if len(runs) > 1:
        lines.append("")
        for run in runs[1:]:
            lines += _test_lines(runs[0], run)
        for run_by_view in view_groups:
            lines += view_lines(run_by_view)
    return lines + _note_lines(runs, published)


def _find_published_results(runs: Sequence[ScoreFile]) -> PublishedResults | None:
    """Return the published accuracies to quote beside these scores; None where none belong there.

    They are quoted where all of these hold:

    - the benchmark is one of ours, and has published accuracies
    - each score is over all the data of its benchmark
    - each score is of the problems that they are of, as far as the benchmark can tell
    """
    benchmark = runs[0].benchmark
    if benchmark not in BENCHMARK_NAMES:
        return None
    published = find_benchmark(benchmark).published
    # `describe_scored_part` says which part of the data a score is over; None for all of it.
    if published is None or any(describe_scored_part(run.score) for run in runs):
        return None
    is_same_data = published.is_same_data
    if is_same_data is not None and not all(is_same_data(run.score) for run in runs):
        return None
    return published


def _table_rows(runs: Sequence[ScoreFile], published: PublishedResults | None) -> list[list[str]]:
    """Build the rows of the table: its head, the runs, and the published accuracies.

    Each metric of a benchmark, such as `all`, has a column. Where there are several runs, the next
    column has the gain of each over the first:

                all                       gain
        base    61.2 [57.9, 64.4] of 850
        tuned   63.5 [60.2, 66.7] of 850  +2.3
    """
    metric_names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    head = [""]
    for metric_name in metric_names:
        head.append(metric_name)
        if len(runs) > 1:
            head.append("gain")
    columns = [[run.metrics.get(metric_name) for run in runs] for metric_name in metric_names]
    rows = [head, *_run_rows(runs, columns)]
    if published is not None:
        for model, accuracies in published.rows.items():
            row = [f"{model} (quoted)"]
            for metric_name in metric_names:
                is_published = metric_name in accuracies
                row.append(f"{accuracies[metric_name]:5.1f}" if is_published else "-")
                if len(runs) > 1:
                    row.append("")
            rows.append(row)
    return rows


def _run_rows(
    runs: Sequence[ScoreFile],
    columns: Sequence[Sequence[AccuracyMetric | None]],
    *,
    indent: str = "",
) -> list[list[str]]:
    """Build the row of each run: its name, and for each column its accuracy and its gain.

    Args:
        runs: The runs.
        columns: For each column the metric of each run; None where a run has none.
        indent: What stands before the names.
    """
    rows: list[list[str]] = []
    for run_index, run in enumerate(runs):
        row = [f"{indent}{run.name}"]
        for metrics in columns:
            first_metric = metrics[0]
            metric = metrics[run_index]
            row.append(_accuracy_with_count(metric))
            # The first run has no gain over itself, and a run without the metric has none either.
            if run_index > 0 and first_metric is not None and metric is not None:
                row.append(f"{100 * (metric['accuracy'] - first_metric['accuracy']):+6.1f}")
            elif len(runs) > 1:
                row.append("")
        rows.append(row)
    return rows


def _accuracy_with_count(metric: AccuracyMetric | None) -> str:
    """Format an accuracy, its interval and its number of answers: `61.2 [57.9, 64.4] of 850`.

    A metric that is no count has no number. A missing metric, None, is `-`.
    """
    if metric is None or "total" not in metric:
        return accuracy_text(metric)
    # The metric `all` is the score itself, which knows if it is over a part of the data.
    count = describe_scored_part(metric) or str(metric["total"])
    return f"{accuracy_text(metric)} of {count}"


def _group_rows(runs: Sequence[ScoreFile], kind: str) -> list[list[str]]:
    """Build the rows of one kind of group, such as `image_size`.

    Each group has an empty row, a heading such as `image_size = to 256x256`, and a row for each
    run. Raises `UserError` if no run has that kind of group.
    """
    kinds = list(dict.fromkeys(name for run in runs for name in run.score["groups"]))
    if kind not in kinds:
        raise UserError(f"by: no run has the group {kind!r}; they have {', '.join(kinds)}")
    # For each run the accuracy by the name of the group.
    metric_by_group_of_runs = [run.score["groups"].get(kind, {}) for run in runs]
    group_names = dict.fromkeys(
        name for metric_by_group in metric_by_group_of_runs for name in metric_by_group
    )
    rows: list[list[str]] = []
    for name in group_names:
        metrics = [metric_by_group.get(name) for metric_by_group in metric_by_group_of_runs]
        rows += [[""], [f"{kind} = {name}"], *_run_rows(runs, [metrics], indent="  ")]
    return rows


def _test_lines(baseline: ScoreFile, run: ScoreFile) -> list[str]:
    """Test the difference of a run to a baseline on their common problems, in lines.

    The first line has the difference with its paired interval over the problems. If only one of the
    runs had tools, further lines say what tools change. Otherwise McNemar's test is added to the
    line, if each run has one answer to each problem.
    """
    difference = accuracy_difference([baseline], [run])
    if difference is None:
        raise UserError(f"run: {run.name!r} and {baseline.name!r} have no problem in common")
    # A benchmark may ask a problem in several versions, each with an id of its own.
    common_version_ids = find_common_version_ids([baseline, run])
    problem_ids = baseline.problem_ids_of(common_version_ids)
    text = (
        f"{run.name} - {baseline.name}: {difference.text_in_points} (paired, "
        f"{problem_count_text(problem_ids, 'common problem')})"
    )
    if differ_in_tools(baseline, run):
        return [text, *tool_lines(baseline, run)]
    baseline_accuracies = baseline.accuracies_of(common_version_ids)
    run_accuracies = run.accuracies_of(common_version_ids)
    test = paired_test(baseline_accuracies, run_accuracies, problem_ids)
    if test.p is None:  # McNemar's test is for single answers, each right or wrong
        return [text + "; several answers a problem, so no McNemar test"]
    counts = f"{test.gained} gained, {test.lost} lost"
    return [text + f"; McNemar p = {test.p:.3g} ({counts})"]


def _note_lines(runs: Sequence[ScoreFile], published: PublishedResults | None) -> list[str]:
    """Return lines on what limits a comparison: settings and problems that differ, partial scores.

    `published` are the published accuracies that are quoted, which may be by other rules.
    """
    if len(runs) > 1:
        # Where only some runs had tools, the tools are what is compared.
        is_about_tools = all(differ_in_tools(runs[0], run) for run in runs[1:])
        compared_fields = TOOL_FIELDS if is_about_tools else ()
        notes = comparability_warnings(runs, compared_fields)
    else:
        notes = partial_score_notes(runs[0].score)
    first_version_ids = runs[0].accuracy_by_version_id.keys()
    have_same_problems = all(run.accuracy_by_version_id.keys() == first_version_ids for run in runs)
    if not have_same_problems:
        notes.append(
            "warning: the runs do not have the same problems; the tests use the common ones, the "
            "table all"
        )
    if published is not None:
        reasons = dict.fromkeys(_why_not_comparable(run, published) for run in runs)
        notes += [f"note: {reason}" for reason in reasons if reason]
    return notes


def _why_not_comparable(run: ScoreFile, published: PublishedResults) -> str | None:
    """Say why a score cannot be compared with the published accuracies; None where it can."""
    rules = published.rules
    if rules is not None and run.score["rules"].get("rules") != rules:
        return f"the quoted rows are by the rules `{rules}`; score with --rules {rules} to compare"
    if published.why_not_comparable is None:
        return None
    return published.why_not_comparable(run.score)
