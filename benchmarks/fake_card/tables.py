"""The tables of docs/hardware.md and docs/speed.md: memory beside its prediction, and our FLOPs
beside stock's.

`python -m benchmarks.fake_card --table memory CONFIG ...` and `--table flops CONFIG`; both take
minutes for each row. All layers make the same operations, so those of a whole model follow from two
runs with few layers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import yaml

from adora_vl.models.shape import SHAPES
from benchmarks.fake_card.run import CardRun, Ran
from benchmarks.step import answer_lengths

LAYERS = (2, 4, None)  # None: all
SLOPE_LAYERS = (2, 4)  # the two runs from which the operations of all layers follow
# Image tokens and the lengths of the answers of docs/speed.md's rows, whose prompts have about 50
# tokens of text
ANSWERS = {
    "long-tailed": answer_lengths(400, limit=1024, rollouts=8, equal=False),
    "long": [1024] * 8,
    "alike": [400] * 8,
}
CASES = [(image, "long-tailed") for image in (1000, 650, 300, 36)] + [(650, "long"), (36, "alike")]
GIB = 2**30
TERA = 1e12


def runs(table: str | None, configs: Sequence[str], like: CardRun) -> Iterator[list[CardRun]]:
    """The runs of each row. `like`: what they have in common."""
    if table != "flops":
        layers = LAYERS if table else (like.layers,)
        yield from (
            [replace(like, config=config, layers=number)] for config in configs for number in layers
        )
        return
    room = ("--max_pixels", "1003520")  # for the largest image
    updates = updates_per_generation(configs[0])
    case = replace(
        like,
        config=configs[0],
        text_tokens=1,
        groups=1,
        updates=updates,
        updates_per_generation=updates,
        words=(*like.words, *room),
    )
    for image, kind in CASES:
        row = replace(case, image_tokens=image, lengths=ANSWERS[kind])
        row_runs: list[CardRun] = []
        for way in ("stock", "ours"):
            row_runs += [replace(row, way=way, layers=layers) for layers in SLOPE_LAYERS]
        yield row_runs


def updates_per_generation(config: str) -> int:
    """Return how many optimizer steps a recipe makes with one generation."""
    keys = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    accumulated = keys.get("gradient_accumulation_steps", 1)
    return max(1, (keys.get("steps_per_generation") or accumulated) // accumulated)


def layers_of(config: str) -> int:
    """Return how many decoder layers the model of a recipe has."""
    keys = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    name = keys["model_name_or_path"].split("/")[-1]
    shape = json.loads((SHAPES / name / "config.json").read_text(encoding="utf-8"))
    return int(shape.get("text_config", shape)["num_hidden_layers"])


def of_all_layers(at_low: float, at_high: float, layers: int) -> float:
    """Return what a whole model needs, from what it needs with `SLOPE_LAYERS`."""
    low, high = SLOPE_LAYERS
    return at_low + (at_high - at_low) / (high - low) * (layers - low)


def row_of(row_runs: Sequence[Ran]) -> list[str]:
    """The cells of a row."""
    if len(row_runs) == 1:
        (ran,) = row_runs
        run_cells = (
            Path(ran.asked.config).stem,
            str(ran.asked.layers or "all"),
            f"{ran.parameters / 1e9:.2f}",
        )
        both = (
            (f"{peak / GIB:.2f}", f"{predicted / GIB:.2f}", f"{predicted / peak:.3f}")
            for peak, predicted in ran.first_and_later
        )
        return [*run_cells, f"{ran.prompt:,}", *(cell for cells in both for cell in cells)]
    stock_few, stock_more, ours_few, ours_more = row_runs
    layers = layers_of(ours_few.asked.config)
    stock = of_all_layers(learning(stock_few), learning(stock_more), layers)
    ours = of_all_layers(learning(ours_few), learning(ours_more), layers)
    check_few = ours_few.card.flops["check"] / TERA
    check_more = ours_more.card.flops["check"] / TERA
    once = of_all_layers(check_few, check_more, layers)
    lengths = list(ours_few.asked.lengths)
    prompt = ours_few.prompt
    lengths_text = f"{min(lengths):,} to {max(lengths):,}, median {median(lengths):.0f}"
    tokens = (prompt + sum(lengths)) / len(lengths) / (prompt + max(lengths))
    figures = (
        f"{stock:.0f}",
        f"{ours:.0f}",
        f"**{ours / stock:.2f}**",
        f"{tokens:.2f}",
        f"{once:.0f}",
    )
    return [
        f"{prompt:,}",
        lengths_text if len(set(lengths)) > 1 else f"all {lengths[0]:,}",
        *figures,
    ]


def learning(ran: Ran) -> float:
    """TFLOP of an update, without the one-time check of the packed pass."""
    return sum(ran.card.flops[phase] for phase in ("generation", "forward", "backward")) / TERA


HEADS = {
    "memory": (
        "recipe, on a pretended card",
        "layers",
        "billion parameters",
        "prompt",
        "first micro-batch, GiB",
        "predicted",
        "ratio",
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
    """The first two lines."""
    return [f"| {' | '.join(HEADS[table])} |", f"|{'---|' * len(HEADS[table])}"]
