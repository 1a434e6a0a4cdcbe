"""A score as a person reads it on the screen."""

from __future__ import annotations

from typing import Any


def table(score: dict[str, Any]) -> str:
    """The overall line, the group lines, verdicts and lengths, and whatever makes the number less than it seems."""
    lines = [_made_with(score), ""]
    rows = [("all", "", score)]
    for key, group in score["groups"].items():
        rows += [(key if i == 0 else "", value, cell) for i, (value, cell) in enumerate(group.items())]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines += [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {_cell(cell)}" for key, value, cell in rows]
    lines += ["", "verdicts: " + ", ".join(f"{name} {count}" for name, count in score["verdicts"].items())]
    lengths = ", ".join(f"{kind} {mean:.1f}" for kind, mean in score["mean_tokens"].items() if mean is not None)
    if lengths:
        lines.append(f"mean tokens: {lengths}")
    if score["image_failed"]:
        lines.append(f"warning: {score['image_failed']} problems were not asked (unreadable images) and count as wrong")
    if score["unusable_golds"]:
        lines.append(
            f"warning: {score['unusable_golds']} golds cannot be graded against; see the items with a gold_ reason"
        )
    cut = score["groups"].get("finish_reason", {}).get("length")
    if cut:
        lines.append(f"note: {cut['total']} answers were cut off at the token limit")
    return "\n".join(lines)


def _made_with(score: dict[str, Any]) -> str:
    rounding = "rounded decimals accepted" if score["rules"]["rounding"] else "exact answers"
    fields = (score["fingerprint"] or {}).get("fields")
    if not fields:
        return f"{score['benchmark']}: {rounding} (no fingerprint beside the predictions)"
    sampling = f"temperature {fields['temperature']}" if fields.get("temperature") else "greedy"
    return f"{score['benchmark']} {fields['split']}: {fields['model']}, {fields['engine']}, {sampling}, {rounding}"


def _cell(cell: dict[str, Any]) -> str:
    low, high = cell["wilson_95"]
    count = f"{cell['correct']}/{cell['total']}"
    return f"{count:>11}  {100 * cell['accuracy']:5.1f} %  (95 %: {100 * low:.1f} to {100 * high:.1f})"
