"""Makes a score file of a file of predictions, as the subcommand `score` does.

The same score as flat numbers goes into the log of a training.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.evals.inference.predictions import (
    parse_columns,
    read_predictions,
    score_path,
)
from adora_vl.evals.inference.provenance import (
    FINGERPRINT_FILE,
    read_fingerprint,
    software_versions,
    write_json,
)
from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.records import Benchmark, Prediction, ScoredBenchmark
from adora_vl.evals.scoring.score import find_benchmark_metrics, score_predictions
from adora_vl.evals.scoring.table import format_score
from adora_vl.utils.files import check_json_output, make_output_folder, naming_write_errors


def write_score(benchmark: Benchmark, predictions: Path, options: ScoreOptions) -> None:
    """Score a file of predictions, write the score file, and print its table.

    `options.output` says where the score file goes. A file there that is no score is not
    overwritten.
    """
    assert options.output is not None  # the command line needs one
    output = score_path(options.output)
    check_json_output(
        "output",
        path=output,
        kind="a score file",
        is_ours=lambda score: {"benchmark", "items"} <= score.keys(),
    )
    make_output_folder(output.parent)
    scored = score_predictions_file(benchmark, predictions, options)
    with naming_write_errors("output", output):
        write_json(output, scored.score)
    print(format_score(scored))
    print(f"-> {output}", file=sys.stderr)


def score_predictions_file(
    benchmark: Benchmark, predictions: Path, options: ScoreOptions
) -> ScoredBenchmark:
    """Score a file of predictions, and add what the fingerprint beside it says of their making.

    The fingerprint is None (null in the score file) where there is none. Raises `UserError` for a
    file with faults.
    """
    rows = read_predictions(
        predictions,
        check=benchmark.check,
        id_column=benchmark.id_column,
        columns=parse_columns(options.columns),
    )
    path = predictions.parent / FINGERPRINT_FILE
    fingerprint = read_fingerprint(path) if path.is_file() else None
    answer_counts = (fingerprint or {}).get("asked") or {}
    fields = (fingerprint or {}).get("fields") or {}
    answer_tags = asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))
    score, summary = score_predictions(benchmark, rows, options, answer_tags=answer_tags)
    items = score.pop("items")  # last in the file, because they are long
    content = {
        **score,
        "coverage": {
            "answers": len(rows),
            "asked": answer_counts.get("answers"),
            "in_data": answer_counts.get("in_data"),
        },
        "versions": software_versions(),
        "fingerprint": fingerprint,
        "items": items,
    }
    return ScoredBenchmark(content, summary)


def metrics_in_training(
    benchmark: Benchmark,
    rows: Sequence[Prediction],
    *,
    answer_tags: bool = False,
) -> dict[str, float]:
    """Score rows during a training, as flat numbers for its log, such as `mathvista_accuracy`.

    The options are the defaults of the benchmark's subcommand `score`.

    Args:
        benchmark: The benchmark, whose name is the prefix of each number.
        rows: The predictions, at least one.
        answer_tags: Whether the prompts asked for `<answer> </answer>`.
    """
    scored = score_predictions(benchmark, rows, benchmark.score_options(), answer_tags=answer_tags)
    score = scored.score
    low, high = score["interval_95"]
    metrics: dict[str, float] = {
        "accuracy": score["accuracy"],
        "accuracy_low": low,
        "accuracy_high": high,
    }
    for name, length in score["tokens"].items():  # of right and of wrong answers
        if length:
            metrics[f"tokens_{name}"] = length["mean"]
    for key, name in (("truncated", "truncated"), ("reflective_words", "reflective")):
        if score[key]:
            metrics[name] = score[key]["share"]
    for benchmark_metrics in find_benchmark_metrics(score).values():
        for name, metric in benchmark_metrics.items():
            metrics[f"accuracy_{name}"] = metric["accuracy"]
    # The kinds of drawn problems are a kind of group, such as `crossing, vertical`.
    for kind, metric in score["groups"].get("kind", {}).items():
        kind_in_key = re.sub(r"[^0-9A-Za-z]+", "_", kind)
        metrics[f"{kind_in_key}_accuracy"] = metric["accuracy"]
    for name, sample_metric in score.get("samples", {}).items():
        if "@" in name:  # such as pass@2; the others are counts
            metrics[name] = sample_metric["value"]
    return {f"{benchmark.name}_{name}": value for name, value in metrics.items()}
