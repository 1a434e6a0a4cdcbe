"""Says whether it helped: training runs against each other, and scores before and after one.

`python -m adora_vl.report A B --compare` answers from the folders of runs, in one paragraph and one
table. `python -m adora_vl.report.compare BEFORE.json AFTER.json [--beside GRPO=GRPO.json]` shows
scores of `eval` on the same problems, and beside them those of another way of training.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from adora_vl.evals.compare import (
    Difference,
    ScoreFile,
    between_problems,
    cautions,
    check_one_benchmark,
    read_run,
    shortened,
)
from adora_vl.evals.inference.predictions import SCORE
from adora_vl.evals.scoring.score import missing_answers
from adora_vl.evals.scoring.statistics import paired_t, welch
from adora_vl.rewards.judge import without_address
from adora_vl.utils.cli import Parser, amount, dotted, exit_code_of, text
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import leads_out, refuse_links_out

Axis = Literal["rollouts", "seconds"]
_UNITS: dict[Axis, str] = {"rollouts": "rollouts", "seconds": "s"}
PASS_RATE = "adora/pass_rate"  # noqa: S105  # no password
# The title of that figure
TRAINING = "pass rate in training"
# A noisy figure is averaged over the last tenth of its budget
WINDOW = 0.1
# Keys that say where a run writes, what it shows and how it resumes are not compared.
_NOT_COMPARED = {
    "output_dir",
    "run_name",
    "logging_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "report_to",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "disable_tqdm",
    "seed",
    "data_seed",
    "project",
    "trackio_space_id",
    "dataset_name",
    "model_name_or_path",  # their fingerprints say more than where they lie
}
# Characters of the first column in the table of runs
_WIDTH = 34
# Characters of a cell in the table of scores
_CELL = 23


class Point(NamedTuple):
    """The value of a figure, and what the run had spent by then."""

    rollouts: float
    seconds: float
    value: float


@dataclass(frozen=True)
class ComparedRun:
    """One run: its settings, its curves, and its scores on held-out problems by benchmark."""

    name: str
    seed: int
    settings: dict[str, Any]
    recipe: str
    # the pass rate in training, and evaluations on the way
    curves: dict[str, list[Point]] = field(repr=False)
    scores: dict[str, ScoreFile] = field(repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side of a comparison: runs of one config with different seeds."""

    letter: str
    runs: tuple[ComparedRun, ...]

    @property
    def recipe(self) -> str:
        """The recipe and the number of seeds: `GRPO, 3 seeds`."""
        return f"{self.runs[0].recipe}, {amount(len(self.runs), 'seed')}"

    @property
    def title(self) -> str:
        """The letter and the recipe: `A (GRPO, 3 seeds)`."""
        return f"{self.letter} ({self.recipe})"

    def by_seed(self, values: Sequence[float]) -> dict[int, float]:
        """One value per run, by the seed of the run."""
        return {run.seed: value for run, value in zip(self.runs, values, strict=True)}

    def setting(self, key: str) -> str:
        """The value of a key as JSON, or the different values, where the runs of the side differ."""
        texts = (
            json.dumps(run.settings.get(key), sort_keys=True, default=str) for run in self.runs
        )
        return " or ".join(dict.fromkeys(texts))


def read_compared(folder: Path) -> ComparedRun:
    """Read what a comparison needs of a run; `UserError` is raised for a folder that is no run."""
    # Imported here, because they bring torch and Transformers along, which scores alone do not
    # need.
    from adora_vl.record.manifest import MANIFEST, facts_of_run, read_manifest
    from adora_vl.record.metrics import METRICS, read_metrics

    refuse_links_out("RUN", folder, folder / METRICS, folder / MANIFEST)
    manifest = read_manifest(folder)
    lines = read_metrics(folder / METRICS)
    if not manifest or not lines:
        missing = METRICS if manifest else "manifest.json"
        raise UserError(
            f"RUN: {str(folder)!r} has no {missing}; name the output_dir of a training run"
        )
    config = dict(manifest["config"])
    scores, score_notes = _scores(folder)
    return ComparedRun(
        name=str(folder),
        seed=int(config.get("seed") or 0),
        settings=_compared_settings(manifest),
        recipe=facts_of_run(manifest)["recipe"],
        curves=_curves(lines, rollouts_per_step(config)),
        scores=scores,
        notes=(*_run_notes(folder, manifest), *score_notes),
    )


def _compared_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared of a run: its config by dotted keys, its data, model, code and versions."""
    from adora_vl.record.manifest import methods_of

    config = dict(manifest["config"])
    if isinstance(config.get("adora_reward"), list):
        config["adora_reward"] = [without_address(entry) for entry in config["adora_reward"]]
    settings: dict[str, Any] = {}
    for key in config.keys() - _NOT_COMPARED:
        settings |= dotted(key, config[key])
    settings |= {
        "adora_method": "+".join(methods_of(config)),
        "data": manifest["data"].get("fingerprint"),
        "model": manifest["model"].get("fingerprint") or manifest["model"].get("name"),
        "own": manifest.get("own") or {},
        **{key: manifest.get(key) for key in ("commit", "device", "versions")},
    }
    return settings


def _run_notes(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """What a reader has to know of a run: that it is not finished, or how rollouts are counted."""
    notes = []
    if manifest.get("status") != "finished":
        notes.append(f"{folder}: the run is {manifest.get('status')}")
    rollout_options = manifest["config"].get("adora_rollouts") or {}
    if rollout_options.get("refill"):
        notes.append(
            f"{folder}: the further batches of adora_rollouts.refill are not counted as rollouts"
        )
    if rollout_options.get("budget") is not None:
        notes.append(
            f"{folder}: some generations of adora_rollouts.budget have fewer rollouts than are "
            "counted"
        )
    return notes


def rollouts_per_step(config: Mapping[str, Any]) -> float:
    """Rollouts that one optimizer step samples, on average.

    A generation serves several of TRL's steps, and each of them several times.
    """

    def value_of(key: str) -> float:
        return float(config.get(key) or 1)

    sampled = value_of("generation_batch_size") * value_of("gradient_accumulation_steps")
    return sampled / (value_of("steps_per_generation") * value_of("num_iterations"))


def _curves(lines: Sequence[dict[str, Any]], per_step: float) -> dict[str, list[Point]]:
    """The curves of a run by name: the pass rate in training, and the evaluations on the way.

    Seconds are those of training steps, so that an evaluation adds nothing to them.

    Args:
        lines: the lines of the run's metrics.
        per_step: rollouts that one optimizer step samples.
    """
    from adora_vl.record.phases import PHASES

    curves: dict[str, list[Point]] = {PASS_RATE: []}
    last_step = 0
    seconds = 0.0
    for line in lines:
        step = line["step"]
        if line["kind"] == "train":
            # The figures of a line are means per step since the line before it.
            step_seconds = sum(line.get(f"seconds/{phase}") or 0.0 for phase in PHASES)
            seconds += (step - last_step) * step_seconds
            last_step = step
            if line.get(PASS_RATE) is not None:
                curves[PASS_RATE].append(Point(step * per_step, seconds, line[PASS_RATE]))
        for key, value in line.items():
            if key.startswith("eval_") and key.endswith("_accuracy") and value is not None:
                name = key.removeprefix("eval_").removesuffix("_accuracy")
                curves.setdefault(name, []).append(Point(step * per_step, seconds, value))
    return curves


def _scores(folder: Path) -> tuple[dict[str, ScoreFile], list[str]]:
    """The newest score of each benchmark in the run folder, and a note where there are several."""
    newest: dict[str, ScoreFile] = {}
    notes = []
    files = [path for pattern in (SCORE, f"*/{SCORE}") for path in folder.glob(pattern)]
    outside = [path for path in files if leads_out(folder, path)]
    notes += [f"{path} is a link out of the run's folder, and is not read" for path in outside]
    inside = [path for path in files if path not in outside]
    for path in sorted(inside, key=lambda path: path.stat().st_mtime):
        score = read_run(str(path))
        benchmark = score.score["benchmark"]
        if benchmark in newest:
            notes.append(
                f"{folder}: several scores of {benchmark}; the newest is taken, "
                f"{path.relative_to(folder)}"
            )
        newest[benchmark] = score
    return newest, notes


def make_sides(first: Sequence[ComparedRun], second: Sequence[ComparedRun]) -> tuple[Side, Side]:
    """The sides A and B of a comparison.

    Without runs for a second side, two runs are a side each, and more runs are sorted by their
    config. `UserError` is raised where that gives no two sides, or a side with a seed twice.
    """
    if not second:
        first, second = _sorted_out(first)
    for runs in (first, second):
        if len({run.seed for run in runs}) < len(runs):
            names = ", ".join(run.name for run in runs)
            raise UserError(
                f"RUN: one side has the same seed twice ({names}); leave one of the runs out"
            )
    return Side("A", tuple(first)), Side("B", tuple(second))


def _sorted_out(runs: Sequence[ComparedRun]) -> tuple[Sequence[ComparedRun], Sequence[ComparedRun]]:
    """The runs of the first side and those of the second: a side has the runs of one config."""
    if len(runs) == 2:
        return runs[:1], runs[1:]
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        settings = {
            key: value
            for key, value in run.settings.items()
            if key not in ("device", "versions", "commit")
        }
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    if len(groups) != 2:
        raise UserError(
            f"RUN: the {len(runs)} runs have {len(groups)} different configs, and a comparison "
            "needs two sides; name them as `A1 A2 --compare B1 B2`"
        )
    first, second = groups.values()
    return first, second


def config_differences(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """The keys in which the sides differ beside the seed, each with its value on A and on B.

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
    """The difference of the means of one value per seed, with a 95 % interval over seeds.

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
    """A figure at a budget: its mean within the last part of the budget, else the newest before.

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
        """The budget in words: `1,200 rollouts`, or `the end`."""
        return f"{self.budget:,.0f} {_UNITS[self.axis]}" if self.axis else "the end"

    @property
    def title(self) -> str:
        """The title of the line: the figure and the budget."""
        return f"{self.figure}, {self.at}"


def held_out_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """The difference at the end of training on each benchmark that all runs were scored on.

    A benchmark has a row over seeds, if each side has several, and a row over problems.
    """
    rows: list[ComparedFigure] = []
    for benchmark in _scored(a, b):
        problems = between_problems(
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
    """The accuracy of each run of a side on a benchmark, by seed."""
    return side.by_seed([run.scores[benchmark].score["accuracy"] for run in side.runs])


def _scored(a: Side, b: Side) -> list[str]:
    """The benchmarks that all runs were scored on."""
    return [
        name for name in a.runs[0].scores if all(name in run.scores for run in (*a.runs, *b.runs))
    ]


def budget_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """The evaluations on the way and the pass rate in training, at a budget that all runs had.

    The budget is that of the shortest run, in rollouts and in seconds.
    """
    all_runs = (*a.runs, *b.runs)
    rows: list[ComparedFigure] = []
    shared = [name for name in a.runs[0].curves if all(run.curves.get(name) for run in all_runs)]
    # What was held out comes first.
    for name in sorted(shared, key=lambda name: name == PASS_RATE):
        title = TRAINING if name == PASS_RATE else f"{name} on the way"
        for axis in _UNITS:
            budget = min(getattr(run.curves[name][-1], axis) for run in all_runs)
            first = _at(a, name, axis, budget)
            second = _at(b, name, axis, budget)
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


def _at(side: Side, name: str, axis: Axis, budget: float) -> dict[int, float]:
    """A curve's value at a budget for each run of a side, by seed; empty where a run has none."""
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
    """The lines of a comparison of runs: the answer, the table, what differs, and cautions.

    `first` and `second` are the folders of the runs of each side, as `make_sides` takes them.
    `UserError` is raised where they cannot be compared.
    """
    a, b = make_sides([read_compared(run) for run in first], [read_compared(run) for run in second])
    held_out = held_out_rows(a, b)
    rest = budget_rows(a, b)
    differing = config_differences(a, b)
    lines = [
        _paragraph(a, b=b, held_out=held_out, rest=rest, keys=list(differing)),
        "",
        *_table(a, b, [*held_out, *rest]),
        "",
    ]
    lines += [
        f"differs: {key}: {shortened(of_a)} -> {shortened(of_b)}"
        for key, (of_a, of_b) in differing.items()
    ]
    return [*lines, *_notes(a, b)]


Figures = Sequence[ComparedFigure]


def _paragraph(a: Side, b: Side, held_out: Figures, rest: Figures, keys: Sequence[str]) -> str:
    """The answer in one sentence, then what it rests on; `keys` are those that differ."""
    if not held_out:
        return (
            f"Whether {b.title} is better than {a.title} is not known: not every run was scored "
            "on held-out problems. Evaluate each with `python -m eval.problems run --model RUN "
            "--data DATA --output RUN/eval`."
        )
    main = held_out[0].difference
    gain = f"{100 * main.value:+.1f} points on {held_out[0].figure}"
    interval = f"95 %: {_interval(main)}, over {main.over}"
    text = f"{b.title} {_verdict(main)} {a.title}: {gain} ({interval})."
    for axis in _UNITS:
        same = next((line for line in rest if line.axis == axis), None)
        if same is not None:
            text += (
                f" At equal {axis} ({same.at}) it is {100 * same.difference.value:+.1f} in "
                f"{same.figure}."
            )
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
    """What the interval says of B beside A."""
    assert difference.low is not None
    assert difference.high is not None
    if difference.low > 0:
        return "is better than"
    if difference.high < 0:
        return "is worse than"
    return "cannot be told from"


def _interval(difference: Difference) -> str:
    """The interval in points: `-1.2 to +3.4`."""
    assert difference.low is not None
    assert difference.high is not None
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


def _table(a: Side, b: Side, rows: Figures) -> list[str]:
    """The table of figures: means in percent, the difference in points."""
    width = max([_WIDTH, *(len(line.title) for line in rows)])
    lines = []
    for side in (a, b):
        names = ", ".join(f"{run.name} (seed {run.seed})" for run in side.runs)
        lines.append(f"{side.letter} = {side.recipe}: {names}")
    lines += ["", f"{'in %':<{width}}{'A':>8}{'B':>8}{'B - A':>8}  95 % interval"]
    for line in rows:
        change = line.difference
        interval = change.over
        if change.low is not None:
            interval = f"{_interval(change)} ({change.over})"
        means = f"{100 * change.first:8.1f}{100 * change.second:8.1f}{100 * change.value:+8.1f}"
        lines.append(f"{line.title:<{width}}{means}  {interval}")
    return [*lines, *_legend(rows)]


def _legend(rows: Sequence[ComparedFigure]) -> list[str]:
    """What the titles of rows at a budget mean; nothing where there are no such rows."""
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


def _notes(a: Side, b: Side) -> list[str]:
    """What a reader has to know before believing the table."""
    runs = (*a.runs, *b.runs)
    lines = [f"warning: {note}" for run in runs for note in run.notes]
    for benchmark in _scored(a, b):
        lines += cautions([run.scores[benchmark] for run in runs])
    if {run.seed for run in a.runs} != {run.seed for run in b.runs}:
        lines.append(
            "note: the sides have different seeds, so their runs are not compared in pairs"
        )
    return lines


def gain_lines(before: ScoreFile, after: ScoreFile, beside: ScoreFile | None = None) -> list[str]:
    """The table of scores before and after a training: overall, by family and by kind of problem.

    Accuracies have 95 % Wilson intervals; the gain is in percentage points. `UserError` is raised
    for scores of different benchmarks, or of different numbers of answers.

    Args:
        before: the score of the model before the training.
        after: the score of the model after it.
        beside: another score of the same problems, which gets a column and a paired difference.
    """
    runs = [before, after, *([beside] if beside else [])]
    check_one_benchmark(runs)
    for run in runs[1:]:
        _check_same_number(before, run)
    head = (
        f"{'held-out accuracy':<18}{'N':>6}  {'before [95 %]':<{_CELL}} "
        f"{'after [95 %]':<{_CELL}} {'gain':>7}"
    )
    lines = ["  ".join([head, *(f"{run.name} [95 %]" for run in runs[2:])])]
    lines += [_gain_row("all", [run.score for run in runs]), *_group_rows(runs)]
    before_low, before_high = before.score["wilson_95"]
    after_low, after_high = after.score["wilson_95"]
    apart = before_high < after_low or after_high < before_low
    lines.append(f"The two intervals {'do not overlap' if apart else 'overlap'}.")
    difference = between_problems([beside], [after]) if beside else None
    if beside and difference:
        lines.append(
            f"after - {beside.name}: {difference.points} (paired bootstrap over {difference.over}; "
            "what another seed would change is not in it)."
        )
    for run in runs[1:]:
        if run.shares.keys() != before.shares.keys():
            lines.append(f"warning: before and {run.name} do not have the same problems")
    return lines + cautions(runs)


def _check_same_number(before: ScoreFile, run: ScoreFile) -> None:
    """Raise `UserError` where the scores have different numbers of answers."""
    if before.score["total"] == run.score["total"]:
        return
    missing = []
    for file in (before, run):
        line = missing_answers(file.score)
        if line:
            missing.append(f"{file.name}: {line}")
    raise UserError(
        f"{before.name} has {before.score['total']} answers and {run.name} {run.score['total']}; "
        f"{'; '.join(missing) or 'compare scores of the same problems'}"
    )


def _group_rows(runs: Sequence[ScoreFile]) -> list[str]:
    """A row for each family of problems, and below it a row for each kind (`crossing, vertical`)."""
    groups = runs[0].score["groups"]
    rows = []
    for family in groups.get("family", {}):
        kinds = [
            ("kind", name) for name in groups.get("kind", {}) if name.startswith(f"{family}, ")
        ]
        for key, name in (("family", family), *kinds):
            cells = [run.score["groups"].get(key, {}).get(name) for run in runs]
            if cells[1] is not None:
                title = (
                    f"  {name}" if key == "family" else f"    {name.removeprefix(f'{family}, ')}"
                )
                rows.append(_gain_row(title, cells))
    return rows


def _gain_row(title: str, cells: Sequence[dict[str, Any] | None]) -> str:
    """A row of the table; `cells` are the scores before, after, and beside, where there is one."""
    before, after = cells[:2]
    assert before is not None
    assert after is not None
    gain = 100 * (after["accuracy"] - before["accuracy"])
    line = f"{title:<18}{before['total']:>6}  {_gain_cell(before)} {_gain_cell(after)} {gain:+7.1f}"
    return "  ".join([line, *map(_gain_cell, cells[2:])]).rstrip()


def _gain_cell(cell: dict[str, Any] | None) -> str:
    """An accuracy in percent with its interval; a dash where the score has no such problems."""
    if cell is None:
        return f"{'-':<{_CELL}}"
    low, high = cell["wilson_95"]
    return f"{100 * cell['accuracy']:6.1f} % [{100 * low:.1f}, {100 * high:.1f}]".ljust(_CELL)


def _named(value: str) -> tuple[str, str]:
    """The name and the file in `NAME=FILE`, for argparse."""
    name, _, path = text(value).partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{value!r:.60} is not NAME=FILE, such as GRPO=score.json")
    return name, path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of scores.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """
    parser = Parser(
        prog="python -m adora_vl.report.compare",
        description="What training changed on held-out problems.",
    )
    parser.add_argument(
        "before", type=text, metavar="BEFORE.json", help="the score of the model before training"
    )
    parser.add_argument("after", type=text, metavar="AFTER.json", help="and after it")
    parser.add_argument(
        "--beside", type=_named, metavar="NAME=FILE", help="the score of another way of training"
    )

    def command() -> None:
        options = parser.parse_args(arguments)
        before = read_run(options.before, "before")
        after = read_run(options.after, "after")
        beside = read_run(options.beside[1], options.beside[0]) if options.beside else None
        print("\n".join(gain_lines(before, after, beside)))

    return exit_code_of(command, "nothing was compared")


if __name__ == "__main__":
    sys.exit(main())
