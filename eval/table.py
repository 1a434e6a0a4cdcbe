"""Formats a score for the screen."""

from __future__ import annotations

from typing import Any

from adora_vl.commands import amount
from adora_vl.comparability import missing_answers

Score = dict[str, Any]
_MANY = 12  # values of a group; the longest are for the file


def table(score: Score) -> str:
    """The overall line, the groups, the benchmark's own figures, lengths, and everything that qualifies the result."""
    lines = [made_with(score), ""]
    rows, hidden = [("all", "", score)], list[str]()
    for key, group in score["groups"].items():
        shown = list(group.items())[:_MANY]
        rows += [(key if i == 0 else "", value, cell) for i, (value, cell) in enumerate(shown)]
        hidden += [f"{key} ({len(group) - _MANY} more)"] if len(group) > _MANY else []
    for name in ("ID", "OOD"):
        if score.get("id_ood", {}).get(name):
            rows.append(("id_ood" if name == "ID" else "", name, score["id_ood"][name]))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines += [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {_cell(cell)}" for key, value, cell in rows]
    if hidden:
        lines.append(f"in the score file only: {', '.join(hidden)}")
    lines += ["", *_samples(score), *_leakage(score), *_answers(score), *_warnings(score)]
    return "\n".join(lines)


def made_with(score: Score) -> str:
    """One line: benchmark, model, engine, sampling, and by which rules the answers became right or wrong."""
    rules = score["rules"]
    if "rounding" in rules:
        by = "rounded decimals accepted" if rules["rounding"] else "exact answers"
        by += ", in <answer> tags too" if rules.get("answer_tags") else ""
    else:
        by = f"rules {rules['rules']}" + (f", extraction {rules['extraction']}" if "extraction" in rules else "")
    fields = (score["fingerprint"] or {}).get("fields")
    if not fields:
        return f"{score['benchmark']}: {by} (no fingerprint beside the predictions)"
    sampling = f"temperature {fields['temperature']}" if fields.get("temperature") else "greedy"
    blind = ", without images" if fields.get("no_image") else ""
    return f"{score['benchmark']} {fields['split']}: {fields['model']}, {fields['engine']}, {sampling}{blind}, {by}"


def _cell(cell: Score) -> str:
    """A count, a share and its interval, such as `520/850   61.2 %  (95 %: 57.9 to 64.4)`."""
    low, high = cell["wilson_95"]
    count = f"{cell['correct']}/{cell['total']}"
    return f"{count:>11}  {100 * cell['accuracy']:5.1f} %  (95 %: {100 * low:.1f} to {100 * high:.1f})"


def _samples(score: Score) -> list[str]:
    """A line for each avg@k and pass@k."""
    figures = {name: figure for name, figure in score.get("samples", {}).items() if "@" in name}
    return [f"{name}: {_percent(figure['value'], figure['interval_95'])}" for name, figure in figures.items()]


def _leakage(score: Score) -> list[str]:
    """Lines on MMStar's multi-modal gain and leakage, as far as they are known."""
    leakage = score.get("leakage") or {}
    lines = []
    if "MG" in leakage:
        shown = _percent(leakage["MG"], leakage["MG_bootstrap_95"])
        lines.append(f"multi-modal gain MG: {shown}, S_v {leakage['S_v']:.3f}, S_wv {leakage['S_wv']:.3f}")
    if "ML" in leakage:
        lines.append(f"leakage ML: {_percent(leakage['ML'], leakage['ML_bootstrap_95'])}, S_t {leakage['S_t']:.3f}")
    return lines


def _percent(value: float, interval: list[float]) -> str:
    """A share with its interval in percent, such as `61.2 % (95 %: 57.9 to 64.4)`."""
    return f"{100 * value:.1f} % (95 %: {100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def _answers(score: Score) -> list[str]:
    lines = ["verdicts: " + ", ".join(f"{name} {count}" for name, count in score["verdicts"].items())]
    if score.get("extraction_mix"):
        lines.append("extraction: " + ", ".join(f"{how} {count}" for how, count in score["extraction_mix"].items()))
    tokens = [
        f"{kind} {known['mean']:.1f} (median {known['median']:g}, max {known['max']})"
        for kind, known in score["tokens"].items()
        if known
    ]
    if tokens:
        lines.append("tokens of an answer: " + ", ".join(tokens))
    reflection = score["reflective_words"]
    if reflection:
        lines.append(f"reflective words: in {100 * reflection['share']:.1f} % of the answers")
    return lines


def _warnings(score: Score) -> list[str]:
    lines = []
    part, coverage = missing_answers(score), score.get("coverage") or {}
    if part:
        lines.append(f"warning: {part}")
    if (coverage.get("asked") or 0) < (coverage.get("in_data") or 0):
        lines.append(f"note: {coverage['asked']} of the {coverage['in_data']} answers to all the data (--limit)")
    if score["image_failed"]:
        failed = amount(score["image_failed"], "problem")
        lines.append(f"warning: {failed} not asked (unreadable images), counted as wrong")
    if score.get("extraction_failed"):
        failed = amount(score["extraction_failed"], "answer")
        lines.append(f"warning: the judge failed on {failed}, counted as wrong")
    if score.get("unusable_golds"):
        golds = amount(score["unusable_golds"], "gold")
        lines.append(f"warning: {golds} cannot be graded against; see the items with a gold_ reason")
    if (score.get("samples") or {}).get("incomplete"):
        lacking = amount(score["samples"]["incomplete"], "problem")
        lines.append(f"warning: {lacking} without all answers, left out of avg@k and pass@k")
    if score["empty_responses"]:
        lines.append(f"note: {amount(score['empty_responses'], 'empty answer')}")
    if score["truncated"] and score["truncated"]["count"]:
        lines.append(f"note: {amount(score['truncated']['count'], 'answer')} cut off at the token limit")
    return lines
