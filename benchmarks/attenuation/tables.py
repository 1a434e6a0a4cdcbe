"""Tables with paired 95 % intervals, from the finished runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

ARMS = {
    "grpo": "GRPO",
    "adora": "ADORA 0.1",
    "random": "random groups",
    "reversed": "reversed",
    "rate": "GRPO, scaled rate",
    "adora_then_grpo": "ADORA, then GRPO",
}
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20, 15: 2.13}
Run = dict[str, Any]


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t; at least two values."""
    freedom = len(values) - 1
    quantile = _T.get(freedom) or _T[max(known for known in _T if known <= freedom)]
    return quantile * statistics.stdev(values) / len(values) ** 0.5


def end(key: str) -> Callable[[Run], float | None]:
    """A held-out figure at the last step."""
    return lambda run: run["held_out"][-1].get(key)


def area(key: str) -> Callable[[Run], float | None]:
    """The mean of a held-out figure over the steps, by trapezoids: the area under its curve per step."""

    def value(run: Run) -> float | None:
        points = [(p["step"], p[key]) for p in run["held_out"] if key in p]
        pieces = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)]
        return sum(pieces) / (points[-1][0] - points[0][0]) if len(points) > 1 else None

    return value


def over_steps(key: str) -> Callable[[Run], float | None]:
    """The mean of a figure of the training rollouts over all steps."""

    def value(run: Run) -> float | None:
        values = [step[key] for step in run["steps"] if key in step]
        return statistics.fmean(values) if values else None

    return value


# title, value of a run, factor
COLUMNS: tuple[tuple[str, Callable[[Run], float | None], float], ...] = (
    ("accuracy, end", end("accuracy"), 100),
    ("accuracy, mean over steps", area("accuracy"), 100),
    ("A, end", end("accuracy_A"), 100),
    ("B, end", end("accuracy_B"), 100),
    ("chains, end", end("chains"), 100),
    ("right chains of all chains, end", end("chain_accuracy"), 100),
    ("tokens, end", end("tokens"), 1),
    ("TDS share", over_steps("tds_share"), 100),
    ("mean weight", over_steps("weight_mean"), 1),
    ("entropy", over_steps("entropy"), 1),
)


def select(runs: Sequence[Run], regime: str, loss: str, arm: str, *, engine: bool = False) -> dict[int, Run]:
    """The runs of an arm by their seed: those that Transformers sampled, or those of the engine."""
    wanted = (regime, loss, arm, engine)
    return {run["seed"]: run for run in runs if (run["regime"], run["loss"], run["arm"], run["engine"]) == wanted}


def levels(runs: Sequence[Run], regime: str, loss: str) -> list[str]:
    """A Markdown table with the mean over seeds of every figure, one row per arm."""
    lines = [
        "| arm | seeds | " + " | ".join(title for title, _, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for arm, title in ARMS.items():
        chosen = select(runs, regime, loss, arm)
        if not chosen:
            continue
        cells = []
        for _, value, factor in COLUMNS:
            known = [v for v in map(value, chosen.values()) if v is not None]
            mean = factor * statistics.fmean(known) if known else float("nan")
            cells.append(f"{mean:.1f}" if factor == 100 or mean > 5 else f"{mean:.2f}")
        lines.append(f"| {title} | {len(chosen)} | " + " | ".join(cells) + " |")
    return lines


def paired(
    runs: Sequence[Run], regime: str, loss: str, one: str, other: str, value: Callable[[Run], float | None]
) -> list[float]:
    """The differences `one` minus `other` in points, seed by seed."""
    first, second = select(runs, regime, loss, one), select(runs, regime, loss, other)
    pairs = [(value(first[seed]), value(second[seed])) for seed in sorted(first.keys() & second.keys())]
    return [100 * (a - b) for a, b in pairs if a is not None and b is not None]


def interval(differences: Sequence[float]) -> str:
    """`+4.1 [+1.0, +7.2]`; in bold where 0 lies outside."""
    if len(differences) < 2:
        return "-"
    mean, half = statistics.fmean(differences), half_width(differences)
    text = f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"
    return f"**{text}**" if abs(mean) > half else text


DIFFERENCES = (
    ("accuracy, end", end("accuracy")),
    ("accuracy, mean over steps", area("accuracy")),
    ("A, end", end("accuracy_A")),
    ("B, end", end("accuracy_B")),
    ("chains, end", end("chains")),
)


def comparisons(runs: Sequence[Run], regime: str, loss: str) -> list[str]:
    """A Markdown table of paired differences: ADORA and its staged form against each control, controls against GRPO."""
    pairs = [("adora", other) for other in ("grpo", "random", "rate", "reversed")]
    pairs += [(arm, "grpo") for arm in ("random", "rate", "reversed", "adora_then_grpo")]
    lines = [
        "| difference in points [95 %] | seeds | " + " | ".join(title for title, _ in DIFFERENCES) + " |",
        "|---" * (len(DIFFERENCES) + 2) + "|",
    ]
    for one, other in pairs:
        count = len(paired(runs, regime, loss, one, other, end("accuracy")))
        if count < 2:
            continue
        cells = [interval(paired(runs, regime, loss, one, other, value)) for _, value in DIFFERENCES]
        lines.append(f"| {ARMS[one]} - {ARMS[other]} | {count} | " + " | ".join(cells) + " |")
    return lines


def engines(runs: Sequence[Run]) -> list[str]:
    """A Markdown table of the runs that were made both ways, with their accuracy and chains at the end in percent."""
    lines = ["| run | accuracy: Transformers | vLLM | chains: Transformers | vLLM |", "|---|---|---|---|---|"]
    for run in (run for run in runs if run["engine"]):
        other = select(runs, run["regime"], run["loss"], run["arm"]).get(run["seed"])
        if other is None:
            continue
        cells = [f"{100 * one['held_out'][-1][key]:.1f}" for key in ("accuracy", "chains") for one in (other, run)]
        lines.append(
            f"| {run['regime']}, {run['loss']}, {ARMS[run['arm']]}, seed {run['seed']} | {' | '.join(cells)} |"
        )
    return lines if len(lines) > 2 else []
