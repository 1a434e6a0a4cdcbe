"""Scores of one benchmark side by side, with tests of their differences.

A and B are score files or the output folders of `run`. Every run is tested against the first, on
their common items. The comparison of training runs (`adora_vl.report`) has the warnings of this
module too.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adora_vl.evals.benchmark import NAMES, find_benchmark
from adora_vl.evals.compare_views import (
    FIELDS_OF_A_VIEW,
    FIELDS_OF_TOOLS,
    differ_in_tools,
    gain_and_harm,
    sees_or_reasons,
    views_of,
)
from adora_vl.evals.records import Published
from adora_vl.evals.score_differences import between_problems, common_problems, paired_test
from adora_vl.evals.score_files import ScoreFile, check_one_benchmark, fingerprint_part
from adora_vl.evals.scoring.coverage import partial_notes, share_of_the_data
from adora_vl.evals.scoring.steps import step_lines
from adora_vl.evals.scoring.table import name_of_data
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

# The fields of a fingerprint in which compared runs may differ.
_MODEL_FIELDS = (
    "model",
    "model_hash",
    "revision",
    "seed",
)
_MOST_VALUE_CHARACTERS = 60


def cautions(runs: Sequence[ScoreFile], subject: Sequence[str] = ()) -> list[str]:
    """Return warnings about everything, beside the model, in which these scores differ.

    They are read from a score's `rules`, `coverage` and `fingerprint`, whose `fields` are as given,
    whose `resolved` are as used, and whose `versions` are of the software. `subject` names further
    fields that may differ, because the comparison is about them.
    """
    lines = []
    for run in runs:
        lines += _named_partial_notes(run)
    without = [run.name for run in runs if not fingerprint_part(run.score, "fields")]
    with_fingerprint = [run for run in runs if run.name not in without]
    if without:
        unknown = "it is not known whether the prompt, the sampling and the data were the same"
        lines.append(f"warning: {', '.join(without)}: no fingerprint, so {unknown}")
    may_differ = (*_MODEL_FIELDS, *subject)
    if views_of(runs):
        may_differ = (*may_differ, *FIELDS_OF_A_VIEW)
    fields = _differing(with_fingerprint, "fields", may_differ)
    # `auto` and a limit that is not given are the model's own, which only the engine knows.
    with_resolved = [run for run in with_fingerprint if fingerprint_part(run.score, "resolved")]
    resolved = _differing(with_resolved, "resolved", tuple(fields))
    for key, values in (fields | resolved).items():
        lines.append(f"warning: the runs differ in {key}: {values}")
    rules = {json.dumps(run.score.get("rules") or {}, sort_keys=True) for run in runs}
    if len(rules) > 1:
        lines.append(
            "warning: the runs were scored by different rules: " + " | ".join(sorted(rules))
        )
    for key, values in _differing(with_fingerprint, "versions", ()).items():
        lines.append(f"note: the runs differ in the version of {key}: {values}")
    return lines


def _named_partial_notes(run: ScoreFile) -> list[str]:
    """Return the notes of a score over a part of the problems, with the run's name."""
    notes = [line.partition(": ") for line in partial_notes(run.score)]
    return [f"{kind}: {run.name}: {text}" for kind, _, text in notes]


def _differing(runs: Sequence[ScoreFile], part: str, without: Sequence[str]) -> dict[str, str]:
    """Return the keys of a part of the fingerprints in which the scores differ.

    Each has the value of each run. The keys in `without` are not compared.
    """
    sections = [(run.name, fingerprint_part(run.score, part)) for run in runs]
    keys = dict.fromkeys(key for _, section in sections for key in section)
    differing: dict[str, str] = {}
    for key in keys:
        if key in without:
            continue
        values = {json.dumps(section.get(key), sort_keys=True) for _, section in sections}
        if len(values) > 1:
            differing[key] = ", ".join(
                f"{name} {shortened(json.dumps(section.get(key)))}" for name, section in sections
            )
    return differing


def shortened(value: str) -> str:
    """Return a text with its middle left out where it is longer than a line of a table allows."""
    if len(value) <= _MOST_VALUE_CHARACTERS:
        return value
    half = _MOST_VALUE_CHARACTERS // 2
    return f"{value[:half]}...{value[-half:]}"


def comparison(runs: Sequence[ScoreFile], by: Sequence[str], *, published: bool) -> list[str]:
    """Return the lines of the table, the tests, and the notes.

    Args:
        runs: The runs; every run is tested against the first.
        by: The groups whose values get a table of their own.
        published: Whether figures that others have published are quoted.

    Raises `UserError` if the runs are of different benchmarks.
    """
    check_one_benchmark(runs)
    quoted = _published(runs) if published else None
    quoted_rows = quoted.rows if quoted else {}
    row_names = [run.name for run in runs] + [f"{name} (quoted)" for name in quoted_rows]
    width = max(map(len, row_names))
    columns = list(dict.fromkeys(name for run in runs for name in run.cells))
    lines = [
        f"{name_of_data(runs[0].score)}: accuracy in %, [95 % interval], problems",
        _table_line("", width, columns),
    ]
    for run in runs:
        lines.append(_table_line(run.name, width, [_cell(run.cells.get(name)) for name in columns]))
    for name, figures in quoted_rows.items():
        cells = [f"{figures[column]:5.1f}" if column in figures else "-" for column in columns]
        lines.append(_table_line(f"{name} (quoted)", width, cells))
    if quoted:
        lines.append(f"quoted: {quoted.source}; not measured here")
    for run in runs:
        if run.score.get("steps"):
            lines += [f"{run.name}: {line}" for line in step_lines(run.score["steps"])]
    view_groups = views_of(runs)
    # MathVerse has its versions of each problem beside our views.
    if not by and view_groups and runs[0].score["benchmark"] == "mathverse":
        by = ["version"]
    for key in by:
        lines += ["", *_group_lines(runs, key, width)]
    if len(runs) > 1:
        lines.append("")
        for run in runs[1:]:
            lines += _test_lines(runs[0], run)
        for views in view_groups:
            lines += sees_or_reasons(views)
    return lines + _note_lines(runs, quoted)


def _published(runs: Sequence[ScoreFile]) -> Published | None:
    """Return the published rows to show beside these scores, if there are any.

    There are none beside other problems than they are of, or beside a part of them.
    """
    names = {str(run.score["benchmark"]) for run in runs}
    benchmark = names.pop()
    if names or benchmark not in NAMES:
        return None
    published = find_benchmark(benchmark).published
    if published is None or any(share_of_the_data(run.score) for run in runs):
        return None
    applies = published.applies
    if applies is not None and not all(applies(run.score) for run in runs):
        return None
    return published


def _table_line(name: str, width: int, cells: Sequence[str]) -> str:
    """Return a row of the table: a name of `width` characters, then the cells in columns."""
    return " ".join([f"{name:<{width}}", *(f"{cell:<28}" for cell in cells)]).rstrip()


def _cell(cell: Mapping[str, Any] | None) -> str:
    """Return an accuracy with its interval and number of items, such as `61.2 [57.9, 64.4] of 850`.

    It is `-` if there is no such figure.
    """
    if cell is None:
        return "-"
    if "wilson_95" not in cell:
        return f"{100 * cell['accuracy']:5.1f}"
    low, high = cell["wilson_95"]
    # A whole score knows how many problems there are; a cell of one does not.
    count = share_of_the_data(cell) or str(cell["total"])
    return f"{100 * cell['accuracy']:5.1f} [{100 * low:.1f}, {100 * high:.1f}] of {count}"


def _group_lines(runs: Sequence[ScoreFile], key: str, width: int) -> list[str]:
    """Return the lines of the group `key`: for each of its values a heading and a line per run.

    Raises `UserError` if no run has that group.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.score["groups"]))
    if key not in names:
        raise UserError(f"by: no run has the group {key!r}; they have {', '.join(names)}")
    groups = [(run.name, run.score["groups"].get(key, {})) for run in runs]
    lines = []
    for value in dict.fromkeys(value for _, group in groups for value in group):
        lines.append(f"{key} = {value}")
        lines += [
            _table_line(f"  {name}", width + 2, [_cell(group.get(value))]) for name, group in groups
        ]
    return lines


def _test_lines(first: ScoreFile, second: ScoreFile) -> list[str]:
    """Return the lines of a test of two runs on their common items.

    They give the difference with its paired bootstrap interval, and for single answers McNemar's
    test.
    """
    difference = between_problems([first], [second])
    if difference is None:
        raise UserError(f"run: {second.name!r} and {first.name!r} have no problem in common")
    common = common_problems([first, second])
    text = (
        f"{second.name} - {first.name}: {difference.points} (paired bootstrap, "
        f"{amount(len(common), 'common problem')})"
    )
    if differ_in_tools(first, second):
        return [text, *gain_and_harm(first, second)]
    before = [first.shares[pid] for pid in common]
    after = [second.shares[pid] for pid in common]
    test = paired_test(before, after)
    if test.p is None:
        return [text + "; several answers a problem, so no McNemar test"]
    counts = f"{test.gained} gained, {test.lost} lost"
    return [text + f"; McNemar p = {test.p:.3g} ({counts})"]


def _note_lines(runs: Sequence[ScoreFile], quoted: Published | None) -> list[str]:
    """Return the notes for a reader: settings and problems that differ, and partial scores."""
    if len(runs) > 1:
        is_about_tools = all(differ_in_tools(runs[0], run) for run in runs[1:])
        notes = cautions(runs, FIELDS_OF_TOOLS if is_about_tools else ())
    else:
        notes = partial_notes(runs[0].score)
    if any(run.shares.keys() != runs[0].shares.keys() for run in runs):
        notes.append(
            "warning: the runs do not have the same problems; the tests use the common ones, the "
            "table all"
        )
    caution = quoted.caution if quoted else None
    messages = [caution(run.score) for run in runs] if caution else []
    return notes + [f"note: {line}" for line in dict.fromkeys(messages) if line]
