"""Plots of a surveyed dataset, as SVG text that is the same for the same data."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adora_vl.families import FAMILIES
from data_prep.inspection import SplitFacts, Survey

_COLOURS = ("#2f6fb0", "#e08b2d", "#4f9d69", "#9467bd")
_SHOWN_VALUES = 12
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "data_prep",  # else the ids in the file are random
    "svg.fonttype": "path",  # a reader's fonts do not change the picture
    "text.parse_math": False,  # a `$` of a row is a dollar, not TeX
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


def plots(found: Survey) -> dict[str, str]:
    """SVG of each plot, by its title. A plot without anything to show is left out."""
    drawn = {}
    with matplotlib.rc_context(_STYLE):
        for name, title in (("answer form", "Answer forms"), ("goal", "Goals"), ("shape", "Shapes")):
            drawn[title] = _svg(partial(_bars, splits=found.splits, name=name))
        unit = f"tokens of {FAMILIES[found.family].name}"
        drawn["Image tokens per row"] = _svg(
            lambda axes: _histogram(axes, {s: list(f.tokens) for s, f in found.splits.items()}, unit)
        )
        drawn["Length of the problems"] = _svg(
            lambda axes: _histogram(axes, {s: list(f.characters) for s, f in found.splits.items()}, "characters")
        )
        drawn["Image sizes"] = _svg(lambda axes: _scatter(axes, found.splits))
    return drawn


def _svg(draw: Callable[[Axes], None]) -> str:
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=4)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _bars(axes: Axes, splits: dict[str, SplitFacts], name: str) -> None:
    """Share of the rows of each split, the most frequent value on top."""
    total: Counter[str] = sum((facts.counts[name] for facts in splits.values()), Counter())
    values = sorted(total, key=lambda value: (-total[value], value))[:_SHOWN_VALUES]
    height = 0.8 / len(splits)
    for index, (split, facts) in enumerate(splits.items()):
        rows = max(1, facts.counts["rows"]["rows"])
        places = [-(place + index * height) for place in range(len(values))]
        shares = [100 * facts.counts[name][value] / rows for value in values]
        axes.barh(places, shares, height, label=split, color=_COLOURS[index % len(_COLOURS)])
    middle = height * (len(splits) - 1) / 2
    labels = [value if len(value) <= 24 else value[:23] + "…" for value in values]
    axes.set_yticks([-(place + middle) for place in range(len(values))], labels)
    axes.set_xlabel("% of the rows")
    axes.grid(axis="x", alpha=0.3)


def _histogram(axes: Axes, values: dict[str, list[int]], unit: str) -> None:
    present = {split: numbers for split, numbers in values.items() if numbers}
    different = {number for numbers in present.values() for number in numbers}
    low, high = min(different, default=0), max(different, default=0)
    room = max(0, 10 - (high - low) // 2)  # around a few values that are nearly the same
    axes.hist(
        list(present.values()),
        bins=30,
        range=(low - room, high + room),
        label=list(present),
        color=[_COLOURS[index % len(_COLOURS)] for index in range(len(present))],
        weights=[[100 / len(numbers)] * len(numbers) for numbers in present.values()],
    )
    axes.set_xlabel(unit)
    axes.set_ylabel("% of the rows")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", alpha=0.3)


def _scatter(axes: Axes, splits: dict[str, SplitFacts]) -> None:
    for index, (split, facts) in enumerate(splits.items()):
        different = sorted(set(facts.sizes))
        axes.scatter(
            [width for width, _ in different],
            [height for _, height in different],
            s=9,
            alpha=0.6,
            label=split,
            color=_COLOURS[index % len(_COLOURS)],
        )
    axes.set_xlabel("width, pixels")
    axes.set_ylabel("height, pixels")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
