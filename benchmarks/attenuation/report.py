"""From the finished runs to `results.json`, the tables and the curves."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attenuation.curves import draw_curves
from benchmarks.attenuation.tables import Run, comparisons, engines, levels


def read_runs(folder: Path) -> list[Run]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def conditions(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Regime and loss_type of what was run, in the order of their names."""
    return sorted({(run["regime"], run["loss"]) for run in runs if not run["engine"]})


def tables(runs: Sequence[Run]) -> str:
    """All tables as Markdown."""
    parts = []
    for regime, loss in conditions(runs):
        parts += [f"## {regime}, `loss_type: {loss}`", "", *levels(runs, regime, loss), ""]
        parts += [*comparisons(runs, regime, loss), ""]
    parts += [*engines(runs), ""]
    seconds = sum(run["processor_seconds"] for run in runs)
    commits = ", ".join(sorted({run["commit"] for run in runs}))
    mean = statistics.fmean(run["processor_seconds"] for run in runs)
    parts.append(f"{len(runs)} runs of commit {commits}; {seconds / 60:.0f} processor minutes, {mean:.0f} s a run.")
    return "\n".join(parts) + "\n"


def write_report(output: Path) -> None:
    """`results.json` (all runs in one file), `tables.md` and `curves.png`, beside the runs. Nothing without a run."""
    runs = read_runs(output / "runs")
    if not conditions(runs):
        return
    (output / "results.json").write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    (output / "tables.md").write_text(tables(runs))
    draw_curves(runs, conditions(runs), output / "curves.png")
    print((output / "tables.md").read_text())
