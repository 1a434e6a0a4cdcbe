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
from adora_vl.evals.scoring.table import name_of_data, percent
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

_NEEDED = ("benchmark", "accuracy", "total", "wilson_95", "groups", "items", "rules")
# fields of a fingerprint in which compared runs may differ
_FREE = (
    "model",
    "model_hash",
    "revision",
    "seed",
)
_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class ScoreFile:
    name: str  # in the table
    score: Score
    shares: dict[str, float]  # of right answers to each problem

    @classmethod
    def of(cls, name: str, score: Score) -> ScoreFile:
        """The content of a score file with what its items say."""
        verdicts: dict[str, list[bool]] = {}
        for item in score["items"]:
            verdicts.setdefault(item["pid"], []).append(item["verdict"] == "correct")
        return cls(name, score, {pid: sum(right) / len(right) for pid, right in verdicts.items()})

    @property
    def cells(self) -> dict[str, Any]:
        """The figures that get a column: of all answers, and the benchmark's own."""
        own = {
            name: cell for cells in own_cells(self.score).values() for name, cell in cells.items()
        }
        samples = self.score.get("samples") or {}
        of_k = [
            name
            for name in (f"avg@{samples.get('k')}", f"pass@{samples.get('k')}")
            if name in samples
        ]
        return (
            {"all": self.score}
            | own
            | {name: {"accuracy": samples[name]["value"]} for name in of_k}
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
    first = runs[0]
    name = runs[0].score["benchmark"]
    other = next((run for run in runs if _grader(run) != _grader(first)), None)
    if other is not None:
        of = f"is of {other.score['benchmark']} and {first.name!r} of {name}"
        raise UserError(f"run: {other.name!r} {of}; compare runs of one benchmark")


def _grader(run: ScoreFile) -> str:
    """Whose rules a score is by: `geometry3k` and `problems` are two names of one benchmark."""
    name = str(run.score["benchmark"])
    return "geometry3k" if name == "problems" else name


@dataclass(frozen=True)
class Difference:
    """B - A: the means of both, and the 95 % interval of the difference, where there is one, with
    what it is over.
    """

    first: float
    second: float
    low: float | None = None
    high: float | None = None
    over: str = "one seed per side: no interval"

    @property
    def value(self) -> float:
        return self.second - self.first

    @property
    def points(self) -> str:
        """Of shares, in percentage points with their interval: `+35.0 points, 95 % [+1.2, +68.0]`."""
        assert self.low is not None and self.high is not None
        return (
            f"{100 * self.value:+.1f} points, 95 % [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )


def common_problems(runs: Sequence[ScoreFile]) -> list[str]:
    return [pid for pid in runs[0].shares if all(pid in run.shares for run in runs)]


def between_problems(first: Sequence[ScoreFile], second: Sequence[ScoreFile]) -> Difference | None:
    """The difference of two sides on the problems that all their runs answered, or None if there is
    none. Its interval is a paired bootstrap over the problems, as if other ones had been drawn.
    """
    common = common_problems([*first, *second])
    if not common:
        return None
    sides = [[fmean(run.shares[pid] for run in side) for pid in common] for side in (first, second)]
    return replace(_gain(*sides), over=amount(len(common), "problem"))


def cautions(runs: Sequence[ScoreFile], subject: Sequence[str] = ()) -> list[str]:
    """Warnings about everything but the model, and the fields that are the subject, in which these
    scores differ.

    Read from a score's `rules`, `coverage` and `fingerprint`: `fields` as given, `resolved` as
    used, and `versions`.
    """
    lines = [line for run in runs for line in _partial(run)]
    without = [run.name for run in runs if not _part(run.score, "fields")]
    if without:
        unknown = "it is not known whether the prompt, the sampling and the data were the same"
        lines.append(f"warning: {', '.join(without)}: no fingerprint, so {unknown}")
    known = [run for run in runs if run.name not in without]
    free = (*_FREE, *subject, *(_OF_A_VIEW if views_of(runs) else ()))
    fields = _differing(known, "fields", free)
    # `auto` and a limit that is not given are the model's own, which only the engine knows.
    resolved = _differing(
        [run for run in known if _part(run.score, "resolved")], "resolved", tuple(fields)
    )
    lines += [
        f"warning: the runs differ in {key}: {values}"
        for key, values in (fields | resolved).items()
    ]
    rules = {json.dumps(run.score.get("rules") or {}, sort_keys=True) for run in runs}
    if len(rules) > 1:
        lines.append(
            "warning: the runs were scored by different rules: " + " | ".join(sorted(rules))
        )
    versions = _differing(known, "versions", ())
    return lines + [
        f"note: the runs differ in the version of {key}: {values}"
        for key, values in versions.items()
    ]


def _partial(run: ScoreFile) -> list[str]:
    """The notes of a score over a part of the problems, with the run's name."""
    notes = [line.partition(": ") for line in partial_notes(run.score)]
    return [f"{kind}: {run.name}: {text}" for kind, _, text in notes]


def views_of(runs: Sequence[ScoreFile]) -> list[dict[str, ScoreFile]]:
    """The runs that differ in nothing but what the model was shown (`--view`), by that; of each
    view the first run.
    """
    alike: dict[str, dict[str, ScoreFile]] = {}
    for run in runs:
        if fields := _part(run.score, "fields"):
            same = json.dumps({**fields, **dict.fromkeys(_OF_A_VIEW)}, sort_keys=True)
            alike.setdefault(same, {}).setdefault(fields.get("view", "image"), run)
    return [
        {view: found[view] for view in VIEWS if view in found}
        for found in alike.values()
        if len(found) > 1
    ]


_OF_A_VIEW = ("view", "left_out", "seed")


def sees_or_reasons(found: Mapping[str, ScoreFile]) -> list[str]:
    """The views of one model side by side, on the problems that it answered in all of them, and
    what they say of it.
    """
    common = common_problems(list(found.values()))
    if not common:
        return []
    right = {view: [run.shares[pid] for pid in common] for view, run in found.items()}
    means = {view: mean_with_interval(values) for view, values in right.items()}
    lines = ["", f"what it was shown, {amount(len(common), 'common problem')}:"]
    for view, mean in means.items():
        lines.append(f"  {view:<6} {percent(mean['value'], mean['interval_95'])}  {VIEWS[view]}")
    if {"text", "image"} <= right.keys():
        from_words = [t * i for t, i in zip(right["text"], right["image"], strict=True)]
        lines.append(
            f"of what it solves from words, it solves {_share(from_words, right['text'])} from "
            "the picture"
        )
    if {"text", "both"} <= right.keys():
        lines.append(f"the picture adds {_gain(right['text'], right['both']).points} to the words")
    if {"image", "blank"} <= right.keys():
        remains = _share(right["blank"], right["image"])
        lines.append(f"without looking {remains} of the accuracy with the picture remains")
    return [*lines, _verdict(right)] if {"text", "image", "blank"} <= right.keys() else lines


_OF_TOOLS = ("tools", "max_tool_calling_iterations", "tool_options", "tool_files")


def _tools(run: ScoreFile) -> str:
    return ", ".join(_part(run.score, "fields").get("tools", ()))


def differ_in_tools(first: ScoreFile, other: ScoreFile) -> bool:
    """Whether one of two runs of the same model and view had tools, and the other none."""
    one, two = (_part(run.score, "fields") for run in (first, other))
    same = all(one.get(key) == two.get(key) for key in ("model_hash", "view"))
    return same and bool(_tools(first)) != bool(_tools(other))


def gain_and_harm(first: ScoreFile, other: ScoreFile) -> list[str]:
    """Of two runs that `differ_in_tools`: what is solved only with tools and only without, and
    whether they help.
    """
    common = common_problems([first, other])
    (without, having) = sorted([first, other], key=_tools)
    before, after = ([run.shares[pid] for pid in common] for run in (without, having))
    gained, lost, p = _paired_test(before, after)
    how, test = ("more often", "") if p is None else ("only", f", McNemar p = {p:.3g}")
    said = (
        "helps"
        if _solves_more(before, after)
        else "harms"
        if _solves_more(after, before)
        else "shows no effect"
    )
    return [
        f"  gain {gained} (solved {how} with {_tools(having)}), harm {lost} ({how} without){test}",
        f"  having {_tools(having)} {said}: {100 * fmean(after):.1f} % right, "
        f"{100 * fmean(before):.1f} % without",
    ]


def _share(part: Sequence[float], whole: Sequence[float]) -> str:
    """The sum of paired values as a share of that of others."""
    return (
        percent(sum(part) / sum(whole), list(bootstrap_ratio(part, whole)))
        if sum(whole)
        else "nothing of nothing,"
    )


def _gain(before: Sequence[float], after: Sequence[float]) -> Difference:
    """The difference of paired values, with its bootstrap interval."""
    low, high = bootstrap([second - first for first, second in zip(before, after, strict=True)])
    return Difference(first=fmean(before), second=fmean(after), low=low, high=high)


def _verdict(right: Mapping[str, Sequence[float]]) -> str:
    """Whether words and picture each let the model solve more than a grey picture, and by what it
    loses more.
    """
    reasons, sees = (_solves_more(right["blank"], right[view]) for view in ("text", "image"))
    if reasons and sees:
        seeing = 100 * fmean(
            t * (1 - i) for t, i in zip(right["text"], right["image"], strict=True)
        )
        reasoning = 100 * (1 - fmean(right["text"]))
        more = (
            f" more by {'seeing' if seeing > reasoning else 'reasoning'}"
            if seeing != reasoning
            else ""
        )
        return (
            f"it sees and it reasons, and loses{more}: of 100 problems {seeing:.0f} by seeing "
            f"(solved from words, not from the picture) and {reasoning:.0f} by reasoning (not "
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
    """By McNemar's test at 5 %; of several answers to a problem, by the interval of the difference."""
    gained, lost, p = _paired_test(before, after)
    return (_gain(before, after).low or 0) > 0 if p is None else gained > lost and p < 0.05


def _paired_test(before: Sequence[float], after: Sequence[float]) -> tuple[int, int, float | None]:
    """How many values are larger after, how many before, and McNemar's p; None if they are not all
    0 or 1.
    """
    gained, lost = (
        sum(sign * (b - a) > 0 for a, b in zip(before, after, strict=True)) for sign in (1, -1)
    )
    return gained, lost, mcnemar(lost, gained) if {*before, *after} <= {0.0, 1.0} else None


def _part(score: Score, name: str) -> dict[str, Any]:
    found = (score.get("fingerprint") or {}).get(name)
    return found if isinstance(found, dict) else {}


def _differing(runs: Sequence[ScoreFile], part: str, without: Sequence[str]) -> dict[str, str]:
    """The keys of a part of the fingerprints in which the scores are not alike, with everybody's
    value.
    """
    parts = [(run.name, _part(run.score, part)) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for _, found in parts for key in found)
        if key not in without
    ]
    return {
        key: ", ".join(f"{name} {shortened(json.dumps(found.get(key)))}" for name, found in parts)
        for key in keys
        if len({json.dumps(found.get(key), sort_keys=True) for _, found in parts}) > 1
    }


def shortened(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[: _SHOWN // 2]}...{value[-_SHOWN // 2 :]}"


def comparison(runs: Sequence[ScoreFile], by: Sequence[str], *, published: bool) -> list[str]:
    """The lines of the table, the tests, and the notes.

    Raises `UserError` if the runs are of different benchmarks.
    """
    check_one_benchmark(runs)
    benchmark = runs[0].score["benchmark"]
    quoted = _published(runs) if published else None
    rows = quoted.rows if quoted else {}
    width = max(map(len, [*(run.name for run in runs), *(f"{name} (quoted)" for name in rows)]))
    columns = list(dict.fromkeys(name for run in runs for name in run.cells))
    lines = [
        f"{name_of_data(runs[0].score)}: accuracy in %, [95 % interval], problems",
        _line("", width, columns),
    ]
    lines += [
        _line(run.name, width, [_cell(run.cells.get(name)) for name in columns]) for run in runs
    ]
    for name, figures in rows.items():
        shown = [f"{figures[column]:5.1f}" if column in figures else "-" for column in columns]
        lines.append(_line(f"{name} (quoted)", width, shown))
    lines += [f"quoted: {quoted.source}; not measured here"] if quoted else []
    found = views_of(runs)
    # MathVerse has its versions of each problem beside our views.
    for key in by or ["version"] * bool(found and benchmark == "mathverse"):
        lines += ["", *_by_group(runs, key, width)]
    if len(runs) > 1:
        lines += ["", *(line for other in runs[1:] for line in _test(runs[0], other))]
        lines += [line for views in found for line in sees_or_reasons(views)]
    return lines + _notes(runs, quoted)


def _published(runs: Sequence[ScoreFile]) -> Published | None:
    """The published rows to show beside these scores: none beside other problems than they are of,
    or beside a part of them.
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
    """A row of the table: a name of `width` characters, then the cells in columns."""
    return " ".join([f"{name:<{width}}", *(f"{cell:<28}" for cell in cells)]).rstrip()


def _cell(cell: Mapping[str, Any] | None) -> str:
    """An accuracy with its interval and number of items, such as `61.2 [57.9, 64.4] of 850`; `-` if
    there is none.
    """
    if cell is None:
        return "-"
    if "wilson_95" not in cell:
        return f"{100 * cell['accuracy']:5.1f}"
    low, high = cell["wilson_95"]
    # A whole score knows how many problems there are; a cell of one does not.
    of = share_of_the_data(cell) or str(cell["total"])
    return f"{100 * cell['accuracy']:5.1f} [{100 * low:.1f}, {100 * high:.1f}] of {of}"


def _by_group(runs: Sequence[ScoreFile], key: str, width: int) -> list[str]:
    """For each value of the group `key` a heading and a line per run.

    Raises `UserError` if no run has that group.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.score["groups"]))
    if key not in known:
        raise UserError(f"by: no run has the group {key!r}; they have {', '.join(known)}")
    groups = [(run.name, run.score["groups"].get(key, {})) for run in runs]
    lines = []
    for value in dict.fromkeys(value for _, group in groups for value in group):
        lines.append(f"{key} = {value}")
        lines += [
            _line(f"  {name}", width + 2, [_cell(group.get(value))]) for name, group in groups
        ]
    return lines


def _test(first: ScoreFile, other: ScoreFile) -> list[str]:
    """The difference on common items with its paired bootstrap interval, and for single answers
    McNemar's test.
    """
    found = between_problems([first], [other])
    if found is None:
        raise UserError(f"run: {other.name!r} and {first.name!r} have no problem in common")
    common = common_problems([first, other])
    text = (
        f"{other.name} - {first.name}: {found.points} (paired bootstrap, "
        f"{amount(len(common), 'common problem')})"
    )
    if differ_in_tools(first, other):
        return [text, *gain_and_harm(first, other)]
    gained, lost, p = _paired_test(*([run.shares[pid] for pid in common] for run in (first, other)))
    if p is None:
        return [text + "; several answers a problem, so no McNemar test"]
    return [text + f"; McNemar p = {p:.3g} ({gained} gained, {lost} lost)"]


def _notes(runs: Sequence[ScoreFile], quoted: Published | None) -> list[str]:
    """What a reader has to know before comparing: settings and problems that differ, and partial
    scores.
    """
    if len(runs) > 1:
        notes = cautions(
            runs, _OF_TOOLS if all(differ_in_tools(runs[0], other) for other in runs[1:]) else ()
        )
    else:
        notes = partial_notes(runs[0].score)
    if any(run.shares.keys() != runs[0].shares.keys() for run in runs):
        notes.append(
            "warning: the runs do not have the same problems; the tests use the common ones, the "
            "table all"
        )
    caution = quoted.caution if quoted else None
    found = [caution(run.score) for run in runs] if caution else []
    return notes + [f"note: {line}" for line in dict.fromkeys(found) if line]
