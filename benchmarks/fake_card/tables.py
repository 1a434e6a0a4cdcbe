"""The tables of docs/hardware.md and docs/speed.md: memory beside its prediction, and our FLOPs
beside stock's.

`python -m benchmarks.fake_card --table memory CONFIG ...` and `--table flops CONFIG`; both take
minutes for each row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.fake_card.run import CardRun, Ran
from benchmarks.step import answer_lengths

LAYERS = (2, 4, None)  # None: all
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
    case = replace(
        like, config=configs[0], text_tokens=1, groups=1, updates=1, words=(*like.words, *room)
    )
    for image, kind in CASES:
        row = replace(case, image_tokens=image, lengths=ANSWERS[kind])
        yield [replace(row, way="stock"), replace(row, way="ours")]


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
    stock, ours = (learning(ran) for ran in row_runs)
    lengths = list(row_runs[0].asked.lengths)
    prompt = row_runs[1].prompt
    lengths_text = f"{min(lengths):,} to {max(lengths):,}, median {median(lengths):.0f}"
    tokens = (prompt + sum(lengths)) / len(lengths) / (prompt + max(lengths))
    once = row_runs[1].card.flops["check"] / TERA
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
