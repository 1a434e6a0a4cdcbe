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
TRAINING = "pass rate in training"  # its title
WINDOW = 0.1  # a noisy figure is averaged over the last tenth of its budget
# Where a run writes, what it shows and how it may go on are no part of what is compared.
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
# of the first column in the table of runs, and of a cell in that of scores
_WIDTH = 34
_CELL = 23


class Point(NamedTuple):
    """What a run had done, and what a figure was then."""

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
    """Runs of one config, each with a seed of its own."""

    letter: str
    runs: tuple[ComparedRun, ...]

    @property
    def recipe(self) -> str:
        """`GRPO, 3 seeds`."""
        return f"{self.runs[0].recipe}, {amount(len(self.runs), 'seed')}"

    @property
    def title(self) -> str:
        """`A (GRPO, 3 seeds)`."""
        return f"{self.letter} ({self.recipe})"

    def by_seed(self, values: Sequence[float]) -> dict[int, float]:
        return {run.seed: value for run, value in zip(self.runs, values, strict=True)}

    def setting(self, key: str) -> str:
        """The value of a key, or the values where its runs differ."""
        texts = (
            json.dumps(run.settings.get(key), sort_keys=True, default=str) for run in self.runs
        )
        return " or ".join(dict.fromkeys(texts))


def read_compared(folder: Path) -> ComparedRun:
    """Read what a comparison needs. Raises `UserError` for a folder that is no run."""
    # Imported here, because they bring torch and Transformers along, which scores alone do not
    # need.
    from adora_vl.record.manifest import MANIFEST, facts_of_run, methods_of, read_manifest
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
    notes = (
        []
        if manifest.get("status") == "finished"
        else [f"{folder}: the run is {manifest.get('status')}"]
    )
    filled = config.get("adora_rollouts") or {}
    if filled.get("refill"):
        notes.append(
            f"{folder}: the further batches of adora_rollouts.refill are not counted as rollouts"
        )
    if filled.get("budget") is not None:
        notes.append(
            f"{folder}: some generations of adora_rollouts.budget have fewer rollouts than are "
            "counted"
        )
    recipe = facts_of_run(manifest)["recipe"]
    scores, more = _scores(folder)
    curves = _curves(lines, rollouts_per_step(config))
    return ComparedRun(
        name=str(folder),
        seed=int(config.get("seed") or 0),
        settings=settings,
        recipe=recipe,
        curves=curves,
        scores=scores,
        notes=(*notes, *more),
    )


def rollouts_per_step(config: Mapping[str, Any]) -> float:
    """Rollouts that one optimizer step samples, on average: a generation serves several steps of
    TRL's.
    """
    batch, accumulated, steps, iterations = (
        float(config.get(key) or 1)
        for key in (
            "generation_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "num_iterations",
        )
    )
    return batch * accumulated / (steps * iterations)


def _curves(lines: Sequence[dict[str, Any]], per_step: float) -> dict[str, list[Point]]:
    """The figures by what had been sampled and how long the steps had taken, evaluations' own time
    left out.
    """
    from adora_vl.record.metrics import PHASES

    curves: dict[str, list[Point]] = {PASS_RATE: []}
    before = 0
    seconds = 0.0
    for line in lines:
        step = line["step"]
        if line["kind"] == "train":
            seconds += (step - before) * sum(
                line.get(f"seconds/{phase}") or 0.0 for phase in PHASES
            )
            before = step
            if line.get(PASS_RATE) is not None:
                curves[PASS_RATE].append(Point(step * per_step, seconds, line[PASS_RATE]))
        for key, value in line.items():
            if key.startswith("eval_") and key.endswith("_accuracy") and value is not None:
                name = key.removeprefix("eval_").removesuffix("_accuracy")
                curves.setdefault(name, []).append(Point(step * per_step, seconds, value))
    return curves


def _scores(folder: Path) -> tuple[dict[str, ScoreFile], list[str]]:
    """The newest score of each benchmark in the run folder, and a note where there are several."""
    found: dict[str, ScoreFile] = {}
    notes = []
    files = [path for pattern in (SCORE, f"*/{SCORE}") for path in folder.glob(pattern)]
    outside = [path for path in files if leads_out(folder, path)]
    notes += [f"{path} is a link out of the run's folder, and is not read" for path in outside]
    inside = [path for path in files if path not in outside]
    for path in sorted(inside, key=lambda path: path.stat().st_mtime):
        score = read_run(str(path))
        benchmark = score.score["benchmark"]
        if benchmark in found:
            notes.append(
                f"{folder}: several scores of {benchmark}; the newest is taken, "
                f"{path.relative_to(folder)}"
            )
        found[benchmark] = score
    return found, notes


def make_sides(first: Sequence[ComparedRun], second: Sequence[ComparedRun]) -> tuple[Side, Side]:
    """The sides as they were named; without a second one, two runs are two sides, and more are
    sorted by their config. Raises `UserError` where that gives no two sides, or a side with a seed
    twice.
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
    if len(runs) == 2:
        return runs[:1], runs[1:]
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        kept = {
            key: value
            for key, value in run.settings.items()
            if key not in ("device", "versions", "commit")
        }
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    if len(groups) != 2:
        different = (
            f"the {len(runs)} runs have {len(groups)} different configs, and a comparison needs "
            "two sides"
        )
        raise UserError(f"RUN: {different}; name them as `A1 A2 --compare B1 B2`")
    one, other = groups.values()
    return one, other


def config_differences(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """What differs beside the seed, with the values of both sides; not the options of a method that
    one has not.
    """
    runs = (*a.runs, *b.runs)
    keys = sorted(
        {
            key
            for run in runs
            for key in run.settings
            if not key.startswith("adora_method.") or all(key in one.settings for one in runs)
        }
    )
    return {
        key: (a.setting(key), b.setting(key)) for key in keys if a.setting(key) != b.setting(key)
    }


def between_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """The difference of one value per seed. Paired where both sides have the same seeds."""
    means = fmean(first.values()), fmean(second.values())
    if len(first) < 2 or len(second) < 2:
        few = (
            "one seed on a side: no interval"
            if max(len(first), len(second)) > 1
            else Difference.over
        )
        return Difference(*means, over=few)
    if first.keys() == second.keys():
        low, high = paired_t([second[seed] - first[seed] for seed in first])
        return Difference(*means, low, high, f"{len(first)} pairs of seeds")
    low, high = welch(list(first.values()), list(second.values()))
    return Difference(*means, low, high, f"{len(first)} and {len(second)} seeds")


def at_budget(
    points: Sequence[tuple[float, float]], budget: float, window: float = WINDOW
) -> float | None:
    """The mean within the last `window` of the budget, else the newest value before it.

    `points`: (spent, value).
    """
    before = [(spent, value) for spent, value in points if spent <= budget * (1 + 1e-9)]
    if not before:
        return None
    recent = [value for spent, value in before if spent > budget * (1 - window)]
    return fmean(recent) if recent else before[-1][1]


class ComparedFigure(NamedTuple):
    """One line of the table: a figure, and the budget at which it was taken, where that is not the
    end.
    """

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


def held_out_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """The difference at the end of training on each benchmark that all runs were scored on."""
    rows: list[ComparedFigure] = []
    for benchmark in _scored(a, b):
        first, second = ([run.scores[benchmark] for run in side.runs] for side in (a, b))
        problems = between_problems(first, second)
        if problems is None:
            raise UserError(
                f"RUN: the scores of {benchmark} have no problem in common; evaluate on the same "
                "data"
            )
        accuracies = (
            side.by_seed([run.scores[benchmark].score["accuracy"] for run in side.runs])
            for side in (a, b)
        )
        seeds = between_seeds(*accuracies)
        # first, because what another seed would give is the wider question
        if seeds.low is not None:
            rows.append(ComparedFigure(f"{benchmark}, held out", seeds))
        rows.append(ComparedFigure(f"{benchmark}, held out", problems))
    return rows


def _scored(a: Side, b: Side) -> list[str]:
    """The benchmarks that all runs were scored on."""
    return [
        name for name in a.runs[0].scores if all(name in run.scores for run in (*a.runs, *b.runs))
    ]


def budget_rows(a: Side, b: Side) -> list[ComparedFigure]:
    """The evaluations on the way and the pass rate in training, where both sides had spent the
    same.
    """
    rows: list[ComparedFigure] = []
    shared = [
        name for name in a.runs[0].curves if all(run.curves.get(name) for run in (*a.runs, *b.runs))
    ]
    for name in sorted(shared, key=lambda name: name == PASS_RATE):  # what was held out first
        title = TRAINING if name == PASS_RATE else f"{name} on the way"
        for axis in _UNITS:
            budget = min(getattr(run.curves[name][-1], axis) for run in (*a.runs, *b.runs))
            first, second = (_at(side, name, axis, budget) for side in (a, b))
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
    window = WINDOW if name == PASS_RATE else 0.0  # an evaluation is taken as it is
    curves = [
        [(getattr(point, axis), point.value) for point in run.curves[name]] for run in side.runs
    ]
    values = [value for curve in curves if (value := at_budget(curve, budget, window)) is not None]
    return side.by_seed(values) if len(values) == len(curves) else {}


def comparison_lines(first: Sequence[Path], second: Sequence[Path]) -> list[str]:
    """The comparison's lines. Raises `UserError`."""
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
        f"differs: {key}: {shortened(one)} -> {shortened(other)}"
        for key, (one, other) in differing.items()
    ]
    return [*lines, *_notes(a, b)]


Figures = Sequence[ComparedFigure]


def _paragraph(a: Side, b: Side, held_out: Figures, rest: Figures, keys: Sequence[str]) -> str:
    """The answer first, then what it rests on. `keys`: those in which the configs differ."""
    if not held_out:
        return (
            f"Whether {b.title} is better than {a.title} is not known: not every run was scored "
            "on held-out problems. Evaluate each with `python -m eval.problems run --model RUN "
            "--data DATA --output RUN/eval`."
        )
    main = held_out[0].difference
    assert main.low is not None and main.high is not None
    verdict = (
        "is better than"
        if main.low > 0
        else "is worse than"
        if main.high < 0
        else "cannot be told from"
    )
    gain = f"{100 * main.value:+.1f} points on {held_out[0].figure}"
    text = f"{b.title} {verdict} {a.title}: {gain} (95 %: {_interval(main)}, over {main.over})."
    for axis in _UNITS:
        same = next((line for line in rest if line.axis == axis), None)
        if same is not None:
            text += (
                f" At equal {axis} ({same.at}) it is {100 * same.difference.value:+.1f} in "
                f"{same.figure}."
            )
    differ = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
    text += (
        f" The configs differ in {differ}."
        if keys
        else " The configs are the same but for the seed."
    )
    if len(a.runs) == 1 or len(b.runs) == 1:
        text += (
            " With one seed on a side, another seed may well decide otherwise: the interval is "
            "over problems alone."
        )
    return text


def _interval(difference: Difference) -> str:
    assert difference.low is not None and difference.high is not None
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


def _table(a: Side, b: Side, rows: Figures) -> list[str]:
    """Means in percent, the difference in points."""
    width = max([_WIDTH, *(len(line.title) for line in rows)])
    lines = []
    for side in (a, b):
        names = ", ".join(f"{run.name} (seed {run.seed})" for run in side.runs)
        lines.append(f"{side.letter} = {side.recipe}: {names}")
    lines += ["", f"{'in %':<{width}}{'A':>8}{'B':>8}{'B - A':>8}  95 % interval"]
    for line in rows:
        found = line.difference
        interval = f"{_interval(found)} ({found.over})" if found.low is not None else found.over
        means = f"{100 * found.first:8.1f}{100 * found.second:8.1f}{100 * found.value:+8.1f}"
        lines.append(f"{line.title:<{width}}{means}  {interval}")
    return [*lines, *_legend(rows)]


def _legend(rows: Sequence[ComparedFigure]) -> list[str]:
    """What the titles of rows at a budget mean; nothing where there are none."""
    budgets = [row for row in rows if row.axis]
    lines = {
        "N rollouts, N s: all runs after the rollouts, or seconds of training steps, that the "
        "shortest one had.": True,
        "on the way: the newest evaluation before that point.": any(
            row.figure != TRAINING for row in budgets
        ),
        "pass rate in training: right answers to training problems, as the mean over the last "
        "tenth before that point.": any(row.figure == TRAINING for row in budgets),
    }
    return ["", *(line for line, present in lines.items() if present)] if budgets else []


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
    """The table, overall, by family and by kind, with 95 % Wilson intervals, and the gain in
    percentage points. `beside`: another score of the same problems, with a column and a paired
    difference. Raises `UserError` for scores of different benchmarks, or of different numbers of
    answers.
    """
    runs = [before, after, *([beside] if beside else [])]
    check_one_benchmark(runs)
    for run in runs[1:]:
        if before.score["total"] != run.score["total"]:
            missing = [
                f"{one.name}: {line}"
                for one in (before, run)
                if (line := missing_answers(one.score))
            ]
            numbers = (
                f"{before.name} has {before.score['total']} answers and {run.name} "
                f"{run.score['total']}"
            )
            raise UserError(
                f"{numbers}; {'; '.join(missing) or 'compare scores of the same problems'}"
            )
    head = (
        f"{'held-out accuracy':<18}{'N':>6}  {'before [95 %]':<{_CELL}} "
        f"{'after [95 %]':<{_CELL}} {'gain':>7}"
    )
    lines = ["  ".join([head, *(f"{run.name} [95 %]" for run in runs[2:])])]
    lines += [_gain_row("all", [run.score for run in runs]), *_group_rows(runs)]
    (low, high) = before.score["wilson_95"]
    (least, most) = after.score["wilson_95"]
    lines.append(
        f"The two intervals {'do not overlap' if high < least or most < low else 'overlap'}."
    )
    if beside and (found := between_problems([beside], [after])):
        said = f"(paired bootstrap over {found.over}; what another seed would change is not in it)"
        lines.append(f"after - {beside.name}: {found.points} {said}.")
    others = [run.name for run in runs[1:] if run.shares.keys() != before.shares.keys()]
    lines += [f"warning: before and {name} do not have the same problems" for name in others]
    return lines + cautions(runs)


def _group_rows(runs: Sequence[ScoreFile]) -> list[str]:
    """A row for each family of problems, and below it one for each kind of it (`crossing,
    vertical`).
    """
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
    """`cells`: before, after, beside."""
    before, after = cells[:2]
    assert before is not None and after is not None
    gain = 100 * (after["accuracy"] - before["accuracy"])
    line = f"{title:<18}{before['total']:>6}  {_gain_cell(before)} {_gain_cell(after)} {gain:+7.1f}"
    return "  ".join([line, *map(_gain_cell, cells[2:])]).rstrip()


def _gain_cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return f"{'-':<{_CELL}}"
    low, high = cell["wilson_95"]
    return f"{100 * cell['accuracy']:6.1f} % [{100 * low:.1f}, {100 * high:.1f}]".ljust(_CELL)


def _named(value: str) -> tuple[str, str]:
    """`NAME=FILE`."""
    name, _, path = text(value).partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{value!r:.60} is not NAME=FILE, such as GRPO=score.json")
    return name, path


def main(arguments: Sequence[str] | None = None) -> int:
    """The table of scores.

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
