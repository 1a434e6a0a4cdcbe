"""The figures of an evaluation on the way of a training: no file is written."""

import re
from argparse import Namespace
from collections.abc import Sequence

from eval.command import score_defaults
from eval.records import Benchmark, Prediction, Score
from eval.scoring.score import own_cells, score


def figures(
    benchmark: Benchmark, rows: Sequence[Prediction], options: Namespace | None = None, *, answer_tags: bool = False
) -> dict[str, float]:
    """The score of rows as flat numbers for a log: `mathvista_accuracy`, its interval, and all other figures.

    `options` are those of the benchmark's `score` verb; its defaults where not given. `answer_tags`: the prompts asked
    for `<answer> </answer>`. At least one row.
    """
    made, _ = score(benchmark, rows, options or score_defaults(benchmark), answer_tags=answer_tags)
    return {f"{benchmark.name}_{name}": value for name, value in _flat(made).items()}


def _flat(score: Score) -> dict[str, float]:
    """The figures of a score as one level of names and numbers, without those that it does not have."""
    low, high = score["wilson_95"]
    flat = {"accuracy": score["accuracy"], "accuracy_low": low, "accuracy_high": high}
    for kind, known in score["tokens"].items():
        if known:
            flat[f"tokens_{kind}"] = known["mean"]
    if score["truncated"]:
        flat["truncated"] = score["truncated"]["share"]
    if score["reflective_words"]:
        flat["reflective"] = score["reflective_words"]["share"]
    for cells in own_cells(score).values():
        flat |= {f"accuracy_{name}": cell["accuracy"] for name, cell in cells.items()}
    for name, cell in score["groups"].get("kind", {}).items():  # of drawn problems
        flat[f"{re.sub(r'[^0-9A-Za-z]+', '_', name)}_accuracy"] = cell["accuracy"]
    samples = score.get("samples", {})
    return flat | {name: figure["value"] for name, figure in samples.items() if "@" in name}
