"""What `score` does: a file of predictions becomes a score file; and the same score as numbers for a
log.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.evals.inference.predictions import (
    columns_of,
    read_predictions,
    score_path,
)
from adora_vl.evals.inference.provenance import FILE_NAME, read, versions, write_json
from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.records import Benchmark, Prediction, Scored
from adora_vl.evals.scoring.score import own_cells, score
from adora_vl.evals.scoring.table import table
from adora_vl.utils.files import check_json, make_folder, written_to


def write_score(benchmark: Benchmark, predictions: Path, options: ScoreOptions) -> None:
    """Score a file of predictions, write the score file, and print its table.

    `options.output` says where the score file is to stand.
    """
    assert options.output is not None
    output = score_path(options.output)
    check_json(
        "output",
        path=output,
        kind="a score file",
        is_ours=lambda score: {"benchmark", "items"} <= score.keys(),
    )
    make_folder("output", output.parent)
    scored = score_file(benchmark, predictions, options)
    with written_to("output", output):
        write_json(output, scored.score)
    print(table(scored))
    print(f"-> {output}", file=sys.stderr)


def score_file(benchmark: Benchmark, predictions: Path, options: ScoreOptions) -> Scored:
    """The score of a predictions file, with the fingerprint that lies beside it, or null if there
    is none.
    """
    columns = columns_of(options.columns)
    rows = read_predictions(predictions, benchmark.check, benchmark.id_column, columns)
    path = predictions.parent / FILE_NAME
    fingerprint = read(path) if path.is_file() else None
    asked = (fingerprint or {}).get("asked") or {}
    fields = (fingerprint or {}).get("fields") or {}
    tags = asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))
    figures, own = score(benchmark, rows, options, answer_tags=tags)
    coverage = {
        "answers": len(rows),
        "asked": asked.get("answers"),
        "in_data": asked.get("in_data"),
    }
    items = figures.pop("items")  # last in the file, because they are long
    made = {
        **figures,
        "coverage": coverage,
        "versions": versions(),
        "fingerprint": fingerprint,
        "items": items,
    }
    return Scored(made, own)


def figures_in_training(
    benchmark: Benchmark,
    rows: Sequence[Prediction],
    options: ScoreOptions | None = None,
    *,
    answer_tags: bool = False,
) -> dict[str, float]:
    """The score of at least one row as flat numbers for a log: `mathvista_accuracy`, its interval,
    and all that it has.

    `options`: of the benchmark's `score` verb; None: its defaults. `answer_tags`: the prompts asked
    for `<answer>`.
    """
    made, _ = score(benchmark, rows, options or benchmark.score_options(), answer_tags=answer_tags)
    low, high = made["wilson_95"]
    flat = {"accuracy": made["accuracy"], "accuracy_low": low, "accuracy_high": high}
    flat |= {f"tokens_{kind}": known["mean"] for kind, known in made["tokens"].items() if known}
    for key, name in (("truncated", "truncated"), ("reflective_words", "reflective")):
        flat |= {name: made[key]["share"]} if made[key] else {}
    for cells in own_cells(made).values():
        flat |= {f"accuracy_{name}": cell["accuracy"] for name, cell in cells.items()}
    for name, cell in made["groups"].get("kind", {}).items():  # of drawn problems
        flat[f"{re.sub(r'[^0-9A-Za-z]+', '_', name)}_accuracy"] = cell["accuracy"]
    flat |= {
        name: figure["value"] for name, figure in made.get("samples", {}).items() if "@" in name
    }
    return {f"{benchmark.name}_{name}": value for name, value in flat.items()}
