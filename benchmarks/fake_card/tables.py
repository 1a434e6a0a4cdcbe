"""The tables of benchmarks/README.md and docs/speed.md.

They show memory beside its prediction, and our FLOPs beside those of stock TRL.
`python -m benchmarks.fake_card --table memory CONFIG ...` and `--table flops CONFIG`. The first
takes minutes for each row. The second counts at two depths of the language model, and what a layer
adds is multiplied, as all layers make the same operations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from adora_vl.models.shape import SHAPES_FOLDER
from benchmarks.step import answer_lengths

if TYPE_CHECKING:
    from benchmarks.fake_card.run import CardRun

LAYER_COUNTS = (2, 4, None)  # None: all
SHALLOW_LAYERS = 2  # layers of the runs that the table of FLOPs is computed from
DEEP_LAYERS = 4
# What `--table flops --json` wrote: the figures that docs/speed.md has.
FLOPS_RESULT_FILE = Path(__file__).with_name("flops.json")
Figures = Mapping[str, Any]  # of a run, as `--json` writes them
# Image tokens and the lengths of the answers of docs/speed.md's rows, whose prompts have about 50
# tokens of text
ANSWER_LENGTHS_BY_NAME = {
    "long-tailed": answer_lengths(400, limit=1024, rollouts=8, equal=False),
    "alike": [400] * 8,
    "full": [1024] * 8,
}
IMAGE_AND_ANSWERS_CASES = [
    (1000, "long-tailed"),
    (300, "long-tailed"),
    (36, "long-tailed"),
    (36, "alike"),
    (649, "full"),
]
GIB = 2**30
TERA = 1e12


def runs(table: str | None, configs: Sequence[str], options: CardRun) -> Iterator[list[CardRun]]:
    """Yield the runs of each row of a table, or one run for each config where there is no table.

    `options`: what the runs have in common.
    """
    if table == "flops":
        yield from _flops_runs(replace(options, config=configs[0]))
        return
    layer_counts: Sequence[int | None] = LAYER_COUNTS if table == "memory" else (options.layers,)
    for config in configs:
        for layers in layer_counts:
            yield [replace(options, config=config, layers=layers)]


def _flops_runs(options: CardRun) -> Iterator[list[CardRun]]:
    """Yield the four runs of each row of the table of FLOPs, in the order that `flops_of` takes."""
    words = (*options.words, "--max_pixels", "1003520")  # room for the largest image
    for image_tokens, answers in IMAGE_AND_ANSWERS_CASES:
        case = replace(
            options,
            text_tokens=1,
            groups=1,
            words=words,
            image_tokens=image_tokens,
            lengths=ANSWER_LENGTHS_BY_NAME[answers],
        )
        yield [
            replace(case, way="stock", layers=SHALLOW_LAYERS),
            replace(case, way="stock", layers=DEEP_LAYERS),
            replace(case, way="ours", layers=SHALLOW_LAYERS),
            replace(case, way="ours", layers=DEEP_LAYERS),
        ]


def line_of(table: str, row: Sequence[Figures]) -> str:
    """Return a row of the table, from the figures of its runs."""
    cells = flops_cells(flops_of(row)) if table == "flops" else _memory_cells(*row)
    return f"| {' | '.join(cells)} |"


def _memory_cells(figures: Figures) -> list[str]:
    """Return the cells of a run in the table of memory: what was measured beside its prediction.

    The prediction has all gradients, so its ratio is to the larger of both peaks.
    """
    cells = [
        Path(figures["config"]).stem,
        str(figures["layers"] or "all"),
        f"{figures['parameters'] / 1e9:.2f}",
        f"{figures['prompt']:,}",
    ]
    peaks = figures["first_and_later"]
    cells += [f"{peak / GIB:.2f}" for peak in peaks]
    predicted = figures["predicted"]
    return [*cells, f"{predicted / GIB:.2f}", f"{predicted / max(peaks):.3f}"]


def flops_of(row: Sequence[Figures]) -> dict[str, Any]:
    """Return what a row of the table of FLOPs shows: TFLOP per group with all layers.

    `row`: the figures of its four runs, from `_flops_runs`. Each way runs with few layers and with
    two more; from both it is computed what all layers take.
    """
    stock_shallow, stock_deep, ours_shallow, ours_deep = row
    layers = layers_of(ours_shallow["config"])
    check_shallow = ours_shallow["flops"]["check"] / TERA
    check_deep = ours_deep["flops"]["check"] / TERA
    return {
        "config": ours_deep["config"],
        "updates_per_generation": ours_deep["updates_per_generation"],
        "image_tokens": ours_deep["image_tokens"],
        "prompt": ours_deep["prompt"],
        "lengths": list(ours_deep["lengths"]),
        "stock": _with_all_layers(
            learning_tflop(stock_shallow), learning_tflop(stock_deep), layers
        ),
        "ours": _with_all_layers(learning_tflop(ours_shallow), learning_tflop(ours_deep), layers),
        "check": _with_all_layers(check_shallow, check_deep, layers),
    }


def flops_cells(figures: Figures) -> list[str]:
    """Return the cells of a row of the table of FLOPs, from `flops_of`."""
    prompt = figures["prompt"]
    lengths = figures["lengths"]
    lengths_text = f"{min(lengths):,} to {max(lengths):,}, median {median(lengths):.0f}"
    if len(set(lengths)) == 1:
        lengths_text = f"all {lengths[0]:,}"
    # The tokens of one packed group, divided by those of rows that are padded to the longest.
    token_share = (prompt + sum(lengths)) / len(lengths) / (prompt + max(lengths))
    return [
        f"{prompt:,}",
        lengths_text,
        f"{figures['stock']:.0f}",
        f"{figures['ours']:.0f}",
        f"**{figures['ours'] / figures['stock']:.2f}**",
        f"{token_share:.2f}",
        f"{figures['check']:.0f}",
    ]


def layers_of(config: str) -> int:
    """Return how many layers the language model of a recipe has."""
    keys = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    published = SHAPES_FOLDER / keys["model_name_or_path"].split("/")[-1] / "config.json"
    shape = json.loads(published.read_text(encoding="utf-8"))
    return int(shape.get("text_config", shape)["num_hidden_layers"])


def _with_all_layers(shallow: float, deep: float, layers: int) -> float:
    """Return the figure of a model with `layers` layers, from those of two shallow ones.

    Every layer adds the same. For example, 10 with 2 layers and 16 with 4 layers are 3 for each
    layer, so 36 layers have 112.
    """
    per_layer = (deep - shallow) / (DEEP_LAYERS - SHALLOW_LAYERS)
    return shallow + per_layer * (layers - SHALLOW_LAYERS)


def learning_tflop(figures: Figures) -> float:
    """Return the TFLOP of a group, without the one-time check of the packed pass."""
    phases = ("generation", "forward", "backward")
    total = sum(figures["flops"].get(phase, 0.0) for phase in phases)
    return total / TERA / (figures["updates"] * figures["groups"])


COLUMNS_BY_TABLE = {
    "memory": (
        "recipe, on a simulated card",
        "layers",
        "billion parameters",
        "prompt",
        "first micro-batch, GiB",
        "later ones, GiB",
        "predicted",
        "ratio",
    ),
    "flops": (
        "prompt",
        "answers, tokens",
        "stock, TFLOP",
        "ours, TFLOP",
        "ratio",
        "of the tokens",
        "check, once",
    ),
}


def head_of(table: str) -> list[str]:
    """Return the first two lines of a table in Markdown."""
    return [
        f"| {' | '.join(COLUMNS_BY_TABLE[table])} |",
        f"|{'---|' * len(COLUMNS_BY_TABLE[table])}",
    ]
