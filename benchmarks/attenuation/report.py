"""From the finished runs to `runs.jsonl`, the tables with paired 95 % intervals and sign-flip
tests, and the curves.
"""

import json
import math
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from adora_vl.evals.scoring.statistics import half_width
from adora_vl.utils.files import replace_file
from benchmarks.attenuation.task import REWARDS

ARMS = {
    "grpo": "GRPO",
    "adora": "ADORA 0.1",
    "random": "random groups",
    "reversed": "reversed",
    "rate": "GRPO, scaled rate",
    "adora_then_grpo": "ADORA, then GRPO",
    "yoked": "random groups, yoked",
    "yoked_rate": "scaled rate, yoked",
}
Run = dict[str, Any]


def sign_flips(differences: Sequence[float]) -> float:
    """The exact two-sided p of the sign-flip test: the share of all 2^n ways to give the n paired
    differences a sign whose sum is as far from 0 as that of the signs they have.
    """
    size = abs(sum(differences)) * (1 - 1e-12)  # what differs by rounding counts as equal
    flips = product(*((one, -one) for one in differences))
    far = [abs(sum(flipped)) >= size for flipped in flips]
    return sum(far) / len(far)


def end(key: str) -> Callable[[Run], float | None]:
    """A held-out figure at the last step."""
    return lambda run: run["held_out"][-1].get(key)


def area(key: str) -> Callable[[Run], float | None]:
    """The mean of a held-out figure over the steps, by trapezoids: the area under its curve per
    step.
    """

    def value(run: Run) -> float | None:
        points = [(p["step"], p[key]) for p in run["held_out"] if key in p]
        pieces = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)]
        return sum(pieces) / (points[-1][0] - points[0][0]) if len(points) > 1 else None

    return value


BLOCK = 5  # steps whose mean is kept
KEPT = ("chains", "chain_accuracy", "tds_share", "weight_mean", "signal_weight")


def thinned(run: Run) -> Run:
    """What tables and curves need of a run: its held-out points, and the training figures as means
    of five steps.
    """
    blocks = []
    for first in range(0, len(run["steps"]), BLOCK):
        steps = run["steps"][first : first + BLOCK]
        known = {key: [step[key] for step in steps if key in step] for key in KEPT}
        means = {key: round(statistics.fmean(values), 4) for key, values in known.items() if values}
        blocks.append({"step": first + len(steps), **means})
    return {**{key: value for key, value in run.items() if key != "seconds"}, "steps": blocks}


def over_steps(key: str, after: int = 0, up_to: float = math.inf) -> Callable[[Run], float | None]:
    """The mean of a figure of the training rollouts over the blocks that end after one step and up
    to another.
    """

    def value(run: Run) -> float | None:
        values = [
            block[key] for block in run["steps"] if key in block and after < block["step"] <= up_to
        ]
        return statistics.fmean(values) if values else None

    return value


def mostly_chains(run: Run) -> float:
    """1 if most held-out answers at the end are chains, else 0."""
    return float(run["held_out"][-1]["chains"] > 0.5)


Columns = Sequence[
    tuple[str, Callable[[Run], float | None], float]
]  # title, value of a run, factor
HELD_OUT: Columns = (
    ("accuracy, end", end("accuracy"), 100),
    ("mean over steps", area("accuracy"), 100),
    ("A, end", end("accuracy_A"), 100),
    ("B, end", end("accuracy_B"), 100),
    ("chains, end", end("chains"), 100),
    ("runs that end with chains", mostly_chains, 100),
)
TRAINING: Columns = (
    ("chains, steps 1 to 5", over_steps("chains", 0, 5), 100),
    ("right of them", over_steps("chain_accuracy", 0, 5), 100),
    ("chains, 6 to 10", over_steps("chains", 5, 10), 100),
    ("right of them", over_steps("chain_accuracy", 5, 10), 100),
    ("TDS share", over_steps("tds_share"), 100),
    ("mean weight of all groups", over_steps("weight_mean"), 1),
    ("of those with signal", over_steps("signal_weight"), 1),
)


Pair = tuple[int, int]


def pair_of(run: Run) -> Pair:
    """Runs that agree in this have the same problems and the same plan of a start: the seed of the
    arithmetic model that it is made of, and their own. Another machine teaches other weights by
    that plan. So a condition has a seed's runs of one machine alone, and the seed counts once.
    """
    return run["model"], run["seed"]


LASTING: Columns = (
    ("accuracy, end", end("accuracy"), 100),
    ("B, end", end("accuracy_B"), 100),
    ("chains, steps 1 to 5", over_steps("chains", 0, 5), 100),
    ("6 to 10", over_steps("chains", 5, 10), 100),
    ("56 to 60", over_steps("chains", 55, 60), 100),
    ("end", end("chains"), 100),
    ("runs that end with chains", mostly_chains, 100),
)


def select(
    runs: Sequence[Run], regime: str, recipe: str, arm: str, *, engine: bool = False
) -> dict[Pair, Run]:
    """The runs of an arm by their pair: those that Transformers sampled, or those of the engine."""
    wanted = (regime, recipe, arm, engine)
    return {
        pair_of(run): run
        for run in runs
        if (run["regime"], run["recipe"], run["arm"], run["engine"]) == wanted
    }


def levels(runs: Sequence[Run], regime: str, recipe: str, columns: Columns) -> list[str]:
    """A Markdown table with the mean over seeds of every figure, one row per arm."""
    lines = [
        "| arm | seeds | " + " | ".join(title for title, _, _ in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for arm, title in ARMS.items():
        lines += _level(title, select(runs, regime, recipe, arm), columns)
    return lines


def _level(title: str, chosen: dict[Pair, Run], columns: Columns) -> list[str]:
    """A row of means over runs, or none without a run."""
    cells = []
    for _, value, factor in columns:
        known = [v for v in map(value, chosen.values()) if v is not None]
        mean = factor * statistics.fmean(known) if known else float("nan")
        cells.append(f"{mean:.1f}" if factor == 100 else f"{mean:.2f}")
    return [f"| {title} | {len(chosen)} | {' | '.join(cells)} |"] if chosen else []


def by_recipe(runs: Sequence[Run], regime: str) -> list[str]:
    """A Markdown table of a regime's recipes, each with GRPO and ADORA: how long the chains last."""
    recipes = [recipe for one, recipe in conditions(runs) if one == regime]
    if len(recipes) < 2:
        return []
    lines = [
        f"| {regime}, recipe and arm | seeds | "
        + " | ".join(title for title, _, _ in LASTING)
        + " |",
        "|---" * (len(LASTING) + 2) + "|",
    ]
    for recipe in recipes:
        for arm in ("grpo", "adora"):
            lines += _level(f"`{recipe}`, {ARMS[arm]}", select(runs, regime, recipe, arm), LASTING)
    return lines


def by_model(runs: Sequence[Run], regime: str, recipe: str) -> list[str]:
    """A Markdown table of ADORA against GRPO for each arithmetic model, if starts are made of
    several.
    """
    models = sorted({(run["model"], run["arithmetic"]) for run in runs})
    lines = [
        f"| {regime}, `{recipe}`: starts of | seeds | GRPO | ADORA 0.1 | ADORA - GRPO [95 %] | "
        "smallest |",
        "|---|---|---|---|---|---|",
    ]
    for model, weights in models:
        own = [run for run in runs if (run["model"], run["arithmetic"]) == (model, weights)]
        ahead = paired(own, regime, recipe, "adora", "grpo", end("accuracy"))
        if not ahead:
            continue
        means = [
            statistics.fmean(
                100 * run["held_out"][-1]["accuracy"]
                for run in select(own, regime, recipe, arm).values()
            )
            for arm in ("grpo", "adora")
        ]
        cells = (
            f"{len(ahead)} | {means[0]:.1f} | {means[1]:.1f} | {interval(ahead)} | "
            f"{min(ahead):+.1f}"
        )
        lines.append(f"| arithmetic model {model}, `{weights}` | {cells} |")
    return lines if len(lines) > 3 else []


def paired(
    runs: Sequence[Run],
    regime: str,
    recipe: str,
    one: str,
    other: str,
    value: Callable[[Run], float | None],
) -> list[float]:
    """The differences `one` minus `other` in points, pair by pair."""
    first = select(runs, regime, recipe, one)
    second = select(runs, regime, recipe, other)
    pairs = [
        (value(first[pair]), value(second[pair])) for pair in sorted(first.keys() & second.keys())
    ]
    return [100 * (a - b) for a, b in pairs if a is not None and b is not None]


def interval(differences: Sequence[float]) -> str:
    """`+4.1 [+1.0, +7.2]`; in bold where 0 lies outside."""
    if len(differences) < 2:
        return "-"
    mean = statistics.fmean(differences)
    half = half_width(differences)
    text = f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"
    return f"**{text}**" if abs(mean) > half else text


DIFFERENCES = (
    ("accuracy, end", end("accuracy")),
    ("accuracy, mean over steps", area("accuracy")),
    ("A, end", end("accuracy_A")),
    ("B, end", end("accuracy_B")),
    ("chains, end", end("chains")),
)


def comparisons(runs: Sequence[Run], regime: str, recipe: str) -> list[str]:
    """A Markdown table of paired differences: ADORA and its staged form against each control,
    controls against GRPO.

    `p` is the exact sign-flip test of the accuracy at the end. With four seeds it cannot be below
    0.125, with eight not below 0.008.
    """
    controls = ("random", "rate", "reversed", "yoked", "yoked_rate")
    pairs = [("adora", other) for other in ("grpo", *controls)]
    pairs += [(arm, "grpo") for arm in (*controls, "adora_then_grpo")]
    lines = [
        "| difference in points [95 %] | seeds | "
        + " | ".join(title for title, _ in DIFFERENCES)
        + " | p |",
        "|---" * (len(DIFFERENCES) + 3) + "|",
    ]
    for one, other in pairs:
        ends = paired(runs, regime, recipe, one, other, end("accuracy"))
        if len(ends) < 2:
            continue
        cells = [
            interval(paired(runs, regime, recipe, one, other, value)) for _, value in DIFFERENCES
        ]
        lines.append(
            f"| {ARMS[one]} - {ARMS[other]} | {len(ends)} | {' | '.join(cells)} | "
            f"{sign_flips(ends):.3f} |"
        )
    return lines if len(lines) > 2 else []


def summary(runs: Sequence[Run], title: str, value: Callable[[Run], float | None]) -> list[str]:
    """A Markdown table of one figure in percent, with the number of seeds: a row per regime and
    recipe, a column per arm, and what ADORA is ahead of GRPO, with the exact sign-flip test of it.
    """
    arms = [arm for arm in ARMS if any(run["arm"] == arm for run in runs)]
    lines = [
        f"| {title} (seeds) | "
        + " | ".join(ARMS[arm] for arm in arms)
        + " | ADORA - GRPO [95 %] | p |",
        "|---" * (len(arms) + 3) + "|",
    ]
    for regime, recipe in conditions(runs):
        cells = []
        for arm in arms:
            known = [
                v for v in map(value, select(runs, regime, recipe, arm).values()) if v is not None
            ]
            cells.append(f"{100 * statistics.fmean(known):.1f} ({len(known)})" if known else "-")
        ahead = paired(runs, regime, recipe, "adora", "grpo", value)
        test = f"{sign_flips(ahead):.3f}" if len(ahead) > 1 else "-"
        lines.append(f"| {regime}, `{recipe}` | {' | '.join(cells)} | {interval(ahead)} | {test} |")
    return lines


def engines(runs: Sequence[Run]) -> list[str]:
    """A Markdown table of the runs that were made both ways, with their accuracy and chains at the
    end in percent.
    """
    lines = [
        "| run | accuracy: Transformers | vLLM | chains: Transformers | vLLM |",
        "|---|---|---|---|---|",
    ]
    for run in (run for run in runs if run["engine"]):
        other = select(runs, run["regime"], run["recipe"], run["arm"]).get(pair_of(run))
        if other is None:
            continue
        cells = [
            f"{100 * one['held_out'][-1][key]:.1f}"
            for key in ("accuracy", "chains")
            for one in (other, run)
        ]
        lines.append(
            f"| {run['regime']}, {run['recipe']}, {ARMS[run['arm']]}, seed {run['seed']} | "
            f"{' | '.join(cells)} |"
        )
    return lines if len(lines) > 2 else []


# title, figure, whether it is of the held-out problems
PANELS = (
    ("accuracy", "accuracy", True),
    ("accuracy on B", "accuracy_B", True),
    ("share of chains", "chains", True),
    ("right chains of all chains", "chain_accuracy", True),
    ("TDS share of the groups", "tds_share", False),
)
_STYLES = {"grpo": "--", "rate": ":", "adora_then_grpo": "-."}


def mean_curve(runs: Sequence[Run], key: str, held_out: bool) -> list[tuple[int, float]]:
    """Step and mean over runs, where every run has the figure."""
    curves = [
        {p["step"]: p[key] for p in run["held_out" if held_out else "steps"] if key in p}
        for run in runs
    ]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in shared]


def draw_curves(runs: Sequence[Run], settings: Sequence[tuple[str, str]], path: Path) -> None:
    """`settings`: regime and recipe of each row of panels. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (3.1 * len(PANELS), 2.6 * len(settings))
    fig, axes = pyplot.subplots(
        len(settings), len(PANELS), figsize=size, constrained_layout=True, squeeze=False
    )
    for row, (regime, recipe) in zip(axes, settings, strict=True):
        for (title, key, held_out), axis in zip(PANELS, row, strict=True):
            for number, (arm, name) in enumerate(ARMS.items()):
                points = mean_curve(list(select(runs, regime, recipe, arm).values()), key, held_out)
                if points:
                    look = {
                        "color": f"C{number}",
                        "linestyle": _STYLES.get(arm, "-"),
                        "linewidth": 1.3,
                    }
                    axis.plot(*zip(*points, strict=True), label=name, **look)
            axis.set_title(f"{regime}, {recipe}: {title}", fontsize=8)
            axis.set_ylim(-0.02, 1.02)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=8)
    most = max(axes, key=lambda row: len(row[0].lines))[0]  # where most arms were run
    fig.legend(
        *most.get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=len(ARMS)
    )
    fig.savefig(path, dpi=80)
    pyplot.close(fig)


def read_runs(folder: Path) -> list[Run]:
    """The finished runs of an output folder, one file each, thinned."""
    return [thinned(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def add_runs(output: Path, file: Path) -> int:
    """Append the finished runs of an output folder to a file of runs.

    Returns how many. What is there stays as it is, and runs of a seed of which the file has runs
    from another machine's start stay out.
    """

    def seed(run: Run) -> tuple[Any, ...]:
        return (
            *pair_of(run),
            *(run[key] for key in ("plan", "regime", "recipe", "engine", "reward")),
        )

    kept = [json.loads(line) for line in file.read_text().splitlines()]
    there = {(*seed(run), run["arm"]) for run in kept}
    starts = {seed(run): run["arithmetic"] for run in kept}
    new = [
        run
        for run in read_runs(output / "runs")
        if (*seed(run), run["arm"]) not in there
        and starts.get(seed(run), run["arithmetic"]) == run["arithmetic"]
    ]
    replace_file(file, "".join(json.dumps(run) + "\n" for run in [*kept, *new]))
    return len(new)


def unknown_commits(runs: Sequence[Run]) -> list[str]:
    """The commits of runs that are not in the history of this repository; none where there is no
    history.
    """
    names = sorted({run["commit"].rstrip("+") for run in runs})
    ancestor = ("git", "-C", str(Path(__file__).parent), "merge-base", "--is-ancestor")
    lost = [
        name
        for name in names
        if subprocess.run([*ancestor, name, "HEAD"], capture_output=True).returncode
    ]
    return lost if lost != names else []


def conditions(runs: Sequence[Run], arms: int = 1) -> list[tuple[str, str]]:
    """Regime and recipe of what was run with so many arms, in the order of their names."""
    known = sorted({(run["regime"], run["recipe"]) for run in runs if not run["engine"]})
    return [one for one in known if sum(bool(select(runs, *one, arm)) for arm in ARMS) >= arms]


CROSSED = "crossed"  # the plan whose unit is the arithmetic model
# Of a reward: one recipe and arm against another.
_AGAINST = (
    (("grpo", "adora"), ("grpo", "grpo")),
    (("grpo", "adora"), ("grpo", "random")),
    (("grpo", "adora"), ("dr_grpo", "grpo")),
    (("grpo", "random"), ("grpo", "grpo")),
    (("grpo", "adora_then_grpo"), ("grpo", "adora")),
    (("dapo", "adora"), ("dapo", "grpo")),
    (("dapo", "adora"), ("dapo", "random")),
    (("dapo", "adora"), ("dapo", "rate")),
    (("dapo", "adora"), ("dr_grpo", "grpo")),
    (("dapo", "random"), ("dapo", "grpo")),
    (("dapo", "adora_then_grpo"), ("dapo", "adora")),
)


def of_models(
    runs: Sequence[Run], reward: str, recipe: str, arm: str, value: Callable[[Run], float | None]
) -> dict[int, float]:
    """A figure of each arithmetic model in percent: the mean over its starts."""
    wanted = (reward, recipe, arm)
    chosen = [run for run in runs if (run["reward"], run["recipe"], run["arm"]) == wanted]
    found = {
        model: [value(run) for run in chosen if run["model"] == model]
        for model in {r["model"] for r in chosen}
    }
    return {
        model: 100 * statistics.fmean(v for v in found[model] if v is not None)
        for model in sorted(found)
    }


def crossed(runs: Sequence[Run]) -> list[list[str]]:
    """Two Markdown tables with the arithmetic model as the unit: the means of every arm, and
    differences.
    """
    wholes = sorted(
        {(run["reward"], run["recipe"], run["arm"]) for run in runs}, key=_crossed_order
    )
    levels = [
        "| reward | loss, arm | runs | accuracy, end | by model | B, end | chains, end | runs "
        "that end with chains |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for reward, recipe, arm in wholes:
        own = [
            run
            for run in runs
            if (run["reward"], run["recipe"], run["arm"]) == (reward, recipe, arm)
        ]
        figures = [
            of_models(runs, reward, recipe, arm, end(key))
            for key in ("accuracy", "accuracy_B", "chains")
        ]
        means = [f"{statistics.fmean(figure.values()):.1f}" for figure in figures]
        each = " / ".join(f"{value:.1f}" for value in figures[0].values())
        with_chains = f"{sum(map(mostly_chains, own)):.0f} of {len(own)}"
        cells = [
            reward,
            f"`{recipe}`, {ARMS[arm]}",
            str(len(own)),
            means[0],
            each,
            *means[1:],
            with_chains,
        ]
        levels.append(f"| {' | '.join(cells)} |")
    differences = [
        "| reward | difference in points [95 %] | models | accuracy, end | mean over steps | "
        "chains, end | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for reward in dict.fromkeys(reward for reward, _, _ in wholes):
        for one, other in _AGAINST:
            cells = []
            for value in (end("accuracy"), area("accuracy"), end("chains")):
                first, second = (of_models(runs, reward, *which, value) for which in (one, other))
                cells.append(
                    [first[model] - second[model] for model in first.keys() & second.keys()]
                )
            if len(cells[0]) > 1:
                title = " - ".join(f"`{recipe}`, {ARMS[arm]}" for recipe, arm in (one, other))
                texts = " | ".join(map(interval, cells))
                differences.append(
                    f"| {reward} | {title} | {len(cells[0])} | {texts} | "
                    f"{sign_flips(cells[0]):.3f} |"
                )
    return [levels, differences]


def _crossed_order(place: tuple[str, str, str]) -> tuple[int, int, int]:
    reward, recipe, arm = place
    return REWARDS.index(reward), ("grpo", "dr_grpo", "dapo").index(recipe), list(ARMS).index(arm)


def all_tables(runs: Sequence[Run], unknown: Sequence[str] = ()) -> str:
    """All tables as Markdown. `unknown`: commits that are not in the history of this repository."""
    every = runs
    runs = [run for run in runs if run["plan"] != CROSSED]
    own = [run for run in every if run["plan"] == CROSSED]
    tables = _tables(runs) if runs else []
    tables += [["## Crossed"], *crossed(own)] if own else []
    parts = ["\n".join(table) + "\n" for table in tables if table]
    seconds = [run["processor_seconds"] for run in every]
    commits = ", ".join(sorted({run["commit"] for run in every}))
    ends = f"{sum(seconds) / 60:.0f} processor minutes, {statistics.fmean(seconds):.0f} s a run."
    parts.append(f"{len(every)} runs of commit {commits}; {ends}")
    lost = Counter(run["commit"] for run in every if run["commit"] in unknown)
    parts += [
        f"{number} of them name commit {name}, which is not in this repository."
        for name, number in lost.items()
    ]
    return "\n".join(parts) + "\n"


def _tables(runs: Sequence[Run]) -> list[list[str]]:
    """Those whose unit is the seed."""
    known = conditions(runs)
    tables = [
        summary(runs, "accuracy, end", end("accuracy")),
        summary(runs, "accuracy, mean over steps", area("accuracy")),
    ]
    tables += [by_recipe(runs, regime) for regime in sorted({regime for regime, _ in known})]
    tables += [by_model(runs, *condition) for condition in known]
    for regime, recipe in known:
        tables += [[f"## {regime}, `{recipe}`"], levels(runs, regime, recipe, HELD_OUT)]
        tables += [levels(runs, regime, recipe, TRAINING), comparisons(runs, regime, recipe)]
    return [*tables, engines(runs)]


def write_report(output: Path) -> None:
    """`runs.jsonl` (a line per run), `tables.md` and `curves.png`, beside the runs.

    Nothing without a run.
    """
    runs = read_runs(output / "runs")
    if not conditions(runs):
        return
    (output / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    (output / "tables.md").write_text(all_tables(runs, unknown_commits(runs)))
    draw_curves(runs, conditions(runs), output / "curves.png")
    print((output / "tables.md").read_text())
