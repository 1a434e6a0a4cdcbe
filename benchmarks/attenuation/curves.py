"""The curves: one row of panels per regime, one line per arm, means over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attenuation.tables import ARMS, Run, select

# title, figure, whether it is of the held-out problems
PANELS = (
    ("accuracy", "accuracy", True),
    ("accuracy on B", "accuracy_B", True),
    ("share of chains", "chains", True),
    ("right chains of all chains", "chain_accuracy", True),
    ("TDS share of the groups", "tds_share", False),
)


def mean_curve(runs: Sequence[Run], key: str, held_out: bool) -> list[tuple[int, float]]:
    """Step and mean over runs, where every run has the figure; training figures are means of five steps."""
    curves = []
    for run in runs:
        points = [{"step": number, **step} for number, step in enumerate(run["steps"], 1)]
        found = {p["step"]: p[key] for p in (run["held_out"] if held_out else points) if key in p}
        if not held_out:
            found = {s: statistics.fmean(found[t] for t in range(max(1, s - 4), s + 1) if t in found) for s in found}
        curves.append(found)
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in shared]


def draw_curves(runs: Sequence[Run], settings: Sequence[tuple[str, str]], path: Path) -> None:
    """`settings`: regime and loss_type of each row of panels. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (3.1 * len(PANELS), 2.6 * len(settings))
    fig, axes = pyplot.subplots(len(settings), len(PANELS), figsize=size, constrained_layout=True, squeeze=False)
    for row, (regime, loss) in zip(axes, settings, strict=True):
        for (title, key, held_out), axis in zip(PANELS, row, strict=True):
            for arm, name in ARMS.items():
                points = mean_curve(list(select(runs, regime, loss, arm).values()), key, held_out)
                if points:
                    axis.plot(*zip(*points, strict=True), label=name, linewidth=1.3, linestyle=_STYLES.get(arm, "-"))
            axis.set_title(f"{regime}, loss_type {loss}: {title}", fontsize=8)
            axis.set_ylim(-0.02, 1.02)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=8)
    axes[0][0].legend(fontsize=7)
    fig.savefig(path, dpi=80)
    pyplot.close(fig)


_STYLES = {"grpo": "--", "rate": ":", "adora_then_grpo": "-."}
