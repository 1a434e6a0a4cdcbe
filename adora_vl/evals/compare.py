"""Scores of one benchmark side by side, with tests of their differences.

A and B are score files or the output folders of `run`. Every run is tested against the first, on
their common items. The comparison of training runs (`adora_vl.report`) uses the score files,
differences and warnings of this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from adora_vl.evals.benchmark import NAMES, named
from adora_vl.evals.inference.predictions import SCORE
from adora_vl.evals.inference.views import VIEWS
from adora_vl.evals.records import Published, Score
from adora_vl.evals.scoring.score import (
    mean_with_interval,
    own_cells,
    partial_notes,
    share_of_the_data,
)
from adora_vl.evals.scoring.statistics import bootstrap, bootstrap_ratio, mcnemar
from adora_vl.evals.scoring.steps import step_lines
from adora_vl.evals.scoring.table import name_of_data, percent
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

# The keys that a score file has to have.
_NEEDED = ("benchmark", "accuracy", "total", "wilson_95", "groups", "items", "rules")
# The fields of a fingerprint in which compared runs may differ.
_FREE = (
    "model",
    "model_hash",
    "revision",
    "seed",
)
_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class ScoreFile:
    """The content of a score file, and how often each problem was answered right."""

    name: str
    """The name in tables: the path, or what the caller calls the run."""
    score: Score
    """The content of the file."""
    shares: dict[str, float]
    """The share of right answers to each problem, from 0 to 1, by its id."""

    @classmethod
    def of(cls, name: str, score: Score) -> ScoreFile:
        """Return the content of a score file, with the shares that its items give."""
        verdicts: dict[str, list[bool]] = {}
        for item in score["items"]:
            verdicts.setdefault(item["pid"], []).append(item["verdict"] == "correct")
        shares = {pid: sum(right) / len(right) for pid, right in verdicts.items()}
        return cls(name=name, score=score, shares=shares)

    @property
    def cells(self) -> dict[str, Any]:
        """The figures that get a column: all answers, the benchmark's own, and avg@k and pass@k."""
        benchmark_cells = {
            name: cell for cells in own_cells(self.score).values() for name, cell in cells.items()
        }
        samples = self.score.get("samples") or {}
        sampled_figures = [
            name
            for name in (f"avg@{samples.get('k')}", f"pass@{samples.get('k')}")
            if name in samples
        ]
        return (
            {"all": self.score}
            | benchmark_cells
            | {name: {"accuracy": samples[name]["value"]} for name in sampled_figures}
        )


def read_run(path: str, name: str | None = None) -> ScoreFile:
    """Read a score file.

    `name`: in tables, instead of the path. Raises `UserError` if it is not one.
    """
    file = Path(path) / SCORE if Path(path).is_dir() else Path(path)
    try:
        score = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"run: {str(file)!r} is not a readable score file ({error})") from None
    missing = [key for key in _NEEDED if not isinstance(score, dict) or key not in score]
    if missing:
        raise UserError(
            f"run: {str(file)!r} has no {missing[0]!r}; make it with the `score` verb of a "
            "benchmark"
        )
    items = score["items"] if isinstance(score["items"], list) else []
    if not items or not all(
        isinstance(item, dict) and {"pid", "verdict"} <= item.keys() for item in items
    ):
        raise UserError(
            f"run: {str(file)!r} has no list of items with pid and verdict; score the predictions "
            "again"
        )
    return ScoreFile.of(name or path, score)


def check_one_benchmark(runs: Sequence[ScoreFile]) -> None:
    """Raise `UserError` if the runs are of different benchmarks."""
    first = runs[0]
    for run in runs:
        if _grader(run) != _grader(first):
            raise UserError(
                f"run: {run.name!r} is of {run.score['benchmark']} and {first.name!r} of "
                f"{first.score['benchmark']}; compare runs of one benchmark"
            )


def _grader(run: ScoreFile) -> str:
    """Return whose rules a score is by: `geometry3k` and `problems` are one benchmark."""
    name = str(run.score["benchmark"])
    return "geometry3k" if name == "problems" else name


@dataclass(frozen=True)
class Difference:
    """The difference of the means of two sides, with its 95 % interval where there is one."""

    first: float
    """The mean of the side that is subtracted."""
    second: float
    """The mean of the other side."""
    low: float | None = None
    """The lower end of the 95 % interval of the difference."""
    high: float | None = None
    """The upper end of it."""
    over: str = "one seed per side: no interval"
    """What the interval is over, in words."""

    @property
    def value(self) -> float:
        """The difference, second - first."""
        return self.second - self.first

    @property
    def points(self) -> str:
        """A difference of shares in percentage points, `+35.0 points, 95 % [+1.2, +68.0]`."""
        assert self.low is not None
        assert self.high is not None
        return (
            f"{100 * self.value:+.1f} points, 95 % [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )


def common_problems(runs: Sequence[ScoreFile]) -> list[str]:
    """Return the ids of the problems that all runs answered, in the order of the first run."""
    return [pid for pid in runs[0].shares if all(pid in run.shares for run in runs)]


def between_problems(first: Sequence[ScoreFile], second: Sequence[ScoreFile]) -> Difference | None:
    """Return the difference of two sides on the problems that all their runs answered.

    None if none is. A side is one run, or several runs whose shares are averaged. The interval is a
    paired bootstrap over the problems: how the difference would vary if other problems had been
    drawn.
    """
    common = common_problems([*first, *second])
    if not common:
        return None
    first_shares = [fmean(run.shares[pid] for run in first) for pid in common]
    second_shares = [fmean(run.shares[pid] for run in second) for pid in common]
    difference = _gain(first_shares, second_shares)
    return replace(difference, over=amount(len(common), "problem"))


def cautions(runs: Sequence[ScoreFile], subject: Sequence[str] = ()) -> list[str]:
    """Return warnings about everything, beside the model, in which these scores differ.

    They are read from a score's `rules`, `coverage` and `fingerprint`, whose `fields` are as given,
    whose `resolved` are as used, and whose `versions` are of the software. `subject` names further
    fields that may differ, because the comparison is about them.
    """
    lines = []
    for run in runs:
        lines += _partial(run)
    without = [run.name for run in runs if not _part(run.score, "fields")]
    with_fingerprint = [run for run in runs if run.name not in without]
    if without:
        unknown = "it is not known whether the prompt, the sampling and the data were the same"
        lines.append(f"warning: {', '.join(without)}: no fingerprint, so {unknown}")
    may_differ = (*_FREE, *subject)
    if views_of(runs):
        may_differ = (*may_differ, *_OF_A_VIEW)
    fields = _differing(with_fingerprint, "fields", may_differ)
    # `auto` and a limit that is not given are the model's own, which only the engine knows.
    with_resolved = [run for run in with_fingerprint if _part(run.score, "resolved")]
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


def _partial(run: ScoreFile) -> list[str]:
    """Return the notes of a score over a part of the problems, with the run's name."""
    notes = [line.partition(": ") for line in partial_notes(run.score)]
    return [f"{kind}: {run.name}: {text}" for kind, _, text in notes]


def views_of(runs: Sequence[ScoreFile]) -> list[dict[str, ScoreFile]]:
    """Return the groups of runs that differ in nothing but what the model was shown (`--view`).

    Each group maps a view to its run, the first one where several have that view, in the order of
    `VIEWS`. A group has at least two views.
    """
    runs_by_setting: dict[str, dict[str, ScoreFile]] = {}
    for run in runs:
        fields = _part(run.score, "fields")
        if fields:
            without_view = {**fields, **dict.fromkeys(_OF_A_VIEW)}
            run_of_view = runs_by_setting.setdefault(json.dumps(without_view, sort_keys=True), {})
            run_of_view.setdefault(fields.get("view", "image"), run)
    groups = []
    for run_of_view in runs_by_setting.values():
        if len(run_of_view) > 1:
            groups.append({view: run_of_view[view] for view in VIEWS if view in run_of_view})
    return groups


_OF_A_VIEW = ("view", "left_out", "seed")


def sees_or_reasons(run_of_view: Mapping[str, ScoreFile]) -> list[str]:
    """Return the views of one model side by side, and whether it sees or reasons.

    `run_of_view` is a group of `views_of`. The lines are over the problems that the model answered
    in all views; there are none where it has none in common.
    """
    common = common_problems(list(run_of_view.values()))
    if not common:
        return []
    # The share of right answers to each problem, by view.
    shares = {view: [run.shares[pid] for pid in common] for view, run in run_of_view.items()}
    lines = ["", f"what it was shown, {amount(len(common), 'common problem')}:"]
    for view, values in shares.items():
        figure = mean_with_interval(values)
        accuracy = percent(figure["value"], figure["interval_95"])
        lines.append(f"  {view:<6} {accuracy}  {VIEWS[view]}")
    if {"text", "image"} <= shares.keys():
        in_both = [
            text * image for text, image in zip(shares["text"], shares["image"], strict=True)
        ]
        lines.append(
            f"of what it solves from words, it solves {_share(in_both, shares['text'])} from the "
            "picture"
        )
    if {"text", "both"} <= shares.keys():
        gain = _gain(shares["text"], shares["both"]).points
        lines.append(f"the picture adds {gain} to the words")
    if {"image", "blank"} <= shares.keys():
        blank_share = _share(shares["blank"], shares["image"])
        lines.append(f"without looking {blank_share} of the accuracy with the picture remains")
    if {"text", "image", "blank"} <= shares.keys():
        lines.append(_verdict(shares))
    return lines


_OF_TOOLS = ("tools", "max_tool_calling_iterations", "tool_options", "tool_files")


def _tools(run: ScoreFile) -> str:
    """Return the tools of a run in words; empty without any."""
    return ", ".join(_part(run.score, "fields").get("tools", ()))


def differ_in_tools(first: ScoreFile, second: ScoreFile) -> bool:
    """Return whether one of two runs of the same model and view had tools, and the other none."""
    first_fields = _part(first.score, "fields")
    second_fields = _part(second.score, "fields")
    for key in ("model_hash", "view"):
        if first_fields.get(key) != second_fields.get(key):
            return False
    return bool(_tools(first)) != bool(_tools(second))


def gain_and_harm(first: ScoreFile, second: ScoreFile) -> list[str]:
    """Return what is solved only with tools and only without, and whether tools help.

    The two runs, in any order, are such that `differ_in_tools` holds.
    """
    common = common_problems([first, second])
    # A run without tools has the empty text, which sorts first.
    without, having = sorted([first, second], key=_tools)
    tools = _tools(having)
    before = [without.shares[pid] for pid in common]
    after = [having.shares[pid] for pid in common]
    gained, lost, p = _paired_test(before, after)
    if p is None:
        often = "more often"
        test = ""
    else:
        often = "only"
        test = f", McNemar p = {p:.3g}"
    if _solves_more(before, after):
        effect = "helps"
    elif _solves_more(after, before):
        effect = "harms"
    else:
        effect = "shows no effect"
    return [
        f"  gain {gained} (solved {often} with {tools}), harm {lost} ({often} without){test}",
        f"  having {tools} {effect}: {100 * fmean(after):.1f} % right, "
        f"{100 * fmean(before):.1f} % without",
    ]


def _share(part: Sequence[float], total: Sequence[float]) -> str:
    """Return the sum of `part` as a share of that of `total`, with its interval.

    The values are paired.
    """
    if not sum(total):
        return "nothing of nothing,"
    return percent(sum(part) / sum(total), list(bootstrap_ratio(part, total)))


def _gain(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Return the difference of paired values, with its bootstrap interval."""
    low, high = bootstrap([second - first for first, second in zip(before, after, strict=True)])
    return Difference(first=fmean(before), second=fmean(after), low=low, high=high)


def _verdict(right: Mapping[str, Sequence[float]]) -> str:
    """Return whether words, and the picture, let the model solve more than a grey picture does.

    `right` has the shares of right answers of the views `text`, `image` and `blank`, paired by
    problem. Where both hold, the line says by which of the two the model loses more.
    """
    reasons = _solves_more(right["blank"], right["text"])
    sees = _solves_more(right["blank"], right["image"])
    if reasons and sees:
        seeing = 100 * fmean(
            t * (1 - i) for t, i in zip(right["text"], right["image"], strict=True)
        )
        reasoning = 100 * (1 - fmean(right["text"]))
        greater_loss = ""
        if seeing > reasoning:
            greater_loss = " more by seeing"
        elif seeing != reasoning:
            greater_loss = " more by reasoning"
        return (
            f"it sees and it reasons, and loses{greater_loss}: of 100 problems {seeing:.0f} by "
            f"seeing (solved from words, not from the picture) and {reasoning:.0f} by reasoning (not "
            "solved from words)"
        )
    if reasons:
        return (
            "it reasons and does not see: the words let it solve more than a grey picture does, "
            "and the picture not"
        )
    if sees:
        return (
            "it sees and does not reason from words: what it solves beyond guessing it takes "
            "from the picture alone"
        )
    return (
        "it does not reason: neither words nor picture let it solve more than a grey picture does"
    )


def _solves_more(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether more is solved after than before, and not by chance.

    McNemar's test at 5 % says it for single answers. With several answers to a problem it does not
    apply, and the interval of the difference has to lie over 0.
    """
    gained, lost, p = _paired_test(before, after)
    if p is None:
        return (_gain(before, after).low or 0) > 0
    return gained > lost and p < 0.05


def _paired_test(before: Sequence[float], after: Sequence[float]) -> tuple[int, int, float | None]:
    """Return how many paired values are larger after, how many are larger before, and McNemar's p.

    The p is None where a value is neither 0 nor 1, since the test is for single answers.
    """
    gained = 0
    lost = 0
    for first, second in zip(before, after, strict=True):
        if second > first:
            gained += 1
        elif second < first:
            lost += 1
    if {*before, *after} <= {0.0, 1.0}:
        return gained, lost, mcnemar(lost, gained)
    return gained, lost, None


def _part(score: Score, name: str) -> dict[str, Any]:
    """Return a part of the fingerprint of a score; empty where it has none."""
    section = (score.get("fingerprint") or {}).get(name)
    return section if isinstance(section, dict) else {}


def _differing(runs: Sequence[ScoreFile], part: str, without: Sequence[str]) -> dict[str, str]:
    """Return the keys of a part of the fingerprints in which the scores differ.

    Each has the value of each run. The keys in `without` are not compared.
    """
    sections = [(run.name, _part(run.score, part)) for run in runs]
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
    """Return a text with its middle left out where it is longer than `_SHOWN` characters."""
    return value if len(value) <= _SHOWN else f"{value[: _SHOWN // 2]}...{value[-_SHOWN // 2 :]}"


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
        _line("", width, columns),
    ]
    for run in runs:
        lines.append(_line(run.name, width, [_cell(run.cells.get(name)) for name in columns]))
    for name, figures in quoted_rows.items():
        cells = [f"{figures[column]:5.1f}" if column in figures else "-" for column in columns]
        lines.append(_line(f"{name} (quoted)", width, cells))
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
        lines += ["", *_by_group(runs, key, width)]
    if len(runs) > 1:
        lines.append("")
        for run in runs[1:]:
            lines += _test(runs[0], run)
        for views in view_groups:
            lines += sees_or_reasons(views)
    return lines + _notes(runs, quoted)


def _published(runs: Sequence[ScoreFile]) -> Published | None:
    """Return the published rows to show beside these scores, if there are any.

    There are none beside other problems than they are of, or beside a part of them.
    """
    names = {str(run.score["benchmark"]) for run in runs}
    benchmark = names.pop()
    if names or benchmark not in NAMES:
        return None
    published = named(benchmark).published
    if published is None or any(share_of_the_data(run.score) for run in runs):
        return None
    applies = published.applies
    if applies is not None and not all(applies(run.score) for run in runs):
        return None
    return published


def _line(name: str, width: int, cells: Sequence[str]) -> str:
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


def _by_group(runs: Sequence[ScoreFile], key: str, width: int) -> list[str]:
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
            _line(f"  {name}", width + 2, [_cell(group.get(value))]) for name, group in groups
        ]
    return lines


def _test(first: ScoreFile, second: ScoreFile) -> list[str]:
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
    gained, lost, p = _paired_test(before, after)
    if p is None:
        return [text + "; several answers a problem, so no McNemar test"]
    return [text + f"; McNemar p = {p:.3g} ({gained} gained, {lost} lost)"]


def _notes(runs: Sequence[ScoreFile], quoted: Published | None) -> list[str]:
    """Return the notes for a reader: settings and problems that differ, and partial scores."""
    if len(runs) > 1:
        is_about_tools = all(differ_in_tools(runs[0], run) for run in runs[1:])
        notes = cautions(runs, _OF_TOOLS if is_about_tools else ())
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
