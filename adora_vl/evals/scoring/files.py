"""Makes a score file of a file of predictions, as the verb `score` does.

The same score as flat numbers goes into the log of a training.
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
from adora_vl.evals.inference.provenance import (
    FINGERPRINT_FILE,
    read_fingerprint,
    versions,
    write_json,
)
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
    """Return the score of a predictions file, with the fingerprint that lies beside it.

    The fingerprint is None, null in the file, where there is none. Raises `UserError` for a file
    with faults.
    """
    columns = columns_of(options.columns)
    rows = read_predictions(predictions, benchmark.check, benchmark.id_column, columns)
    path = predictions.parent / FINGERPRINT_FILE
    fingerprint = read_fingerprint(path) if path.is_file() else None
    answer_counts = (fingerprint or {}).get("asked") or {}
    fields = (fingerprint or {}).get("fields") or {}
    tags = asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))
    figures, summary = score(benchmark, rows, options, answer_tags=tags)
    coverage = {
        "answers": len(rows),
        "asked": answer_counts.get("answers"),
        "in_data": answer_counts.get("in_data"),
    }
    items = figures.pop("items")  # last in the file, because they are long
    content = {
        **figures,
        "coverage": coverage,
        "versions": versions(),
        "fingerprint": fingerprint,
        "items": items,
    }
    return Scored(content, summary)


def figures_in_training(
    benchmark: Benchmark,
    rows: Sequence[Prediction],
    options: ScoreOptions | None = None,
    *,
    answer_tags: bool = False,
) -> dict[str, float]:
    """Return the score of rows as flat numbers for a log, such as `mathvista_accuracy`.

    Args:
        benchmark: The benchmark, whose name is the prefix of each number.
        rows: The answers, at least one.
        options: Those of the benchmark's verb `score`; None: its defaults.
        answer_tags: Whether the prompts asked for `<answer> </answer>`.
    """
    content, _ = score(
        benchmark, rows, options or benchmark.score_options(), answer_tags=answer_tags
    )
    low, high = content["wilson_95"]
    flat = {"accuracy": content["accuracy"], "accuracy_low": low, "accuracy_high": high}
    flat |= {
        f"tokens_{kind}": length["mean"] for kind, length in content["tokens"].items() if length
    }
    for key, name in (("truncated", "truncated"), ("reflective_words", "reflective")):
        if content[key]:
            flat[name] = content[key]["share"]
    for cells in own_cells(content).values():
        flat |= {f"accuracy_{name}": cell["accuracy"] for name, cell in cells.items()}
    for name, cell in content["groups"].get("kind", {}).items():  # of drawn problems
        flat[f"{re.sub(r'[^0-9A-Za-z]+', '_', name)}_accuracy"] = cell["accuracy"]
    flat |= {
        name: figure["value"] for name, figure in content.get("samples", {}).items() if "@" in name
    }
    return {f"{benchmark.name}_{name}": value for name, value in flat.items()}
