"""One HTML file with the curves of compared runs, its images inside."""

from __future__ import annotations

import base64
import html
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("held_out", "held-out accuracy"),
    ("reward", "training reward"),
    ("length_right", "tokens of right rollouts"),
    ("length_wrong", "tokens of wrong rollouts"),
    ("entropy", "entropy, nats per token"),
    ("tds_share", "share of TDS prompts"),
    ("kl", "KL to the start, nats per token"),
    ("loss", "loss"),
    ("pass_rate", "pass rate of the rollouts"),
)


def smoothed(points: Sequence[tuple[float, float]], window: int = 5) -> list[tuple[float, float]]:
    """Means over a window that ends at each point."""
    values = [value for _, value in points]
    return [(step, statistics.fmean(values[max(0, i - window + 1) : i + 1])) for i, (step, _) in enumerate(points)]


def mean_curve(runs: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """The mean over runs at each step that all of them have."""
    curves = [
        {p[0]: p[1] for p in (run["held_out"] if name == "held_out" else run["curves"].get(name, []))} for run in runs
    ]
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in shared]


def figure(results: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """One panel per quantity with one line per method, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(5, 2, figsize=(13, 21), constrained_layout=True)
    colours = pyplot.get_cmap("tab20")
    for (name, title), axis in zip(PANELS, axes.flat, strict=False):
        for number, method in enumerate(names):
            points = mean_curve([run for run in results if run["name"] == method], name)
            points = points if name == "held_out" else smoothed(points)
            if points:
                style = "-" if number < 10 else "--"
                axis.plot(*zip(*points, strict=True), style, label=method, color=colours(number % 20), linewidth=1.4)
        axis.set_title(title)
        axis.set_xlabel("generation")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8, ncols=2)
    _daro_weights([run for run in results if run["name"].startswith("daro")], axes.flat[len(PANELS)])
    buffer = io.BytesIO()
    fig.savefig(buffer, dpi=90)
    pyplot.close(fig)
    return buffer.getvalue()


def _daro_weights(runs: Sequence[dict[str, Any]], axis: Any) -> None:
    """The learned weight of each bin; no panel without such runs."""
    axis.set_visible(bool(runs))
    axis.set_title("DARO's weights by right rollouts")
    for name in sorted({name for run in runs for name in run["curves"] if name.startswith("daro/weight_")}):
        points = mean_curve(runs, name)
        axis.plot(*zip(*points, strict=True), label=name.removeprefix("daro/weight_").replace("_", " "), linewidth=1.4)
    if runs:
        axis.legend(fontsize=8, ncols=2)
        axis.set_xlabel("generation")
        axis.grid(alpha=0.3)


def write_page(
    out: Path, results: Sequence[dict[str, Any]], names: Sequence[str], lines: Sequence[str], legend: str
) -> Path:
    """`out/index.html`: the table, its legend, and the curves (means over seeds; all but the first over five steps)."""
    picture = base64.b64encode(figure(results, names)).decode()
    text = html.escape("\n".join([*lines, "", legend]))
    page = out / "index.html"
    out.mkdir(parents=True, exist_ok=True)
    page.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Advantages compared</title>"
        "<style>body{font:15px/1.5 sans-serif;margin:2em auto;max-width:1200px}pre{overflow-x:auto}</style>"
        "<h1>Advantages compared</h1><p>Curves are means over the seeds; all but the held-out accuracy are means over "
        f"five steps.</p><pre>{text}</pre><img alt='Curves of the table above, one panel per quantity' "
        f"src='data:image/png;base64,{picture}' style='max-width:100%'></html>"
    )
    return page
