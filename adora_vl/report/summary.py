"""The end of a run on screen: what was learned, and where to look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adora_vl.config import AdoraGRPOConfig

# Title, key of the log history, format
FIGURES = (
    ("reward", "reward", "{:.3f}"),
    ("pass rate", "adora/pass_rate", "{:.3f}"),
    ("TDS share", "adora/tds_share", "{:.3f}"),
    ("grading time-outs", "grading/timeout", "{:.3f}"),
    ("mean weight", "adora/weight_mean", "{:.3f}"),
    ("length, correct", "adora/length_correct", "{:.1f}"),
    ("length, wrong", "adora/length_wrong", "{:.1f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("engine drift, nats", "adora/drift", "{:.2g}"),
    ("seconds a step", "step_time", "{:.2f}"),
)


def _mean(entries: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [entry[key] for entry in entries if entry.get(key) is not None]
    return sum(values) / len(values) if values else None


def summary_lines(history: Sequence[dict[str, Any]], config: AdoraGRPOConfig, model: Path, seconds: float) -> list[str]:
    """The lines of the summary; the table compares the first and the last fifth of the logged steps.

    `model` is the folder that transformers and vLLM can load.
    """
    entries = [entry for entry in history if "reward" in entry]
    lines = ["", f"Trained {entries[-1]['step'] if entries else 0} steps in {seconds / 60:.1f} min."]
    if entries:
        fifth = max(1, len(entries) // 5)
        lines += ["", f"{'':20}{'first fifth':>12}{'last fifth':>12}"]
        for title, key, form in FIGURES:
            first, last = _mean(entries[:fifth], key), _mean(entries[-fifth:], key)
            if first is not None and last is not None:
                lines.append(f"{title:20}{form.format(first):>12}{form.format(last):>12}")
    folder = Path(config.output_dir)
    lines += ["", f"Model:        {model}", f"Log:          {folder / 'trainer_state.json'}"]
    if config.log_completions:
        lines.append(
            f"Rollouts:     {folder / 'completions'} (Parquet; advantage, advantage_raw, adora_weight, verdict)"
        )
    lines.append(f"Evaluate it:  python -m eval.geometry3k run --model {model} --data DATA --output {folder / 'eval'}")
    return lines


def print_summary(history: Sequence[dict[str, Any]], config: AdoraGRPOConfig, model: Path, seconds: float) -> None:
    print("\n".join(summary_lines(history, config, model, seconds)), flush=True)
