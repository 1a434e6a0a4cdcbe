"""`python -m adora_vl.report.gain BEFORE.json AFTER.json`: two score files of the same problems, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adora_vl.commands import exit_code_of
from adora_vl.comparability import cautions, missing_answers
from adora_vl.errors import UserError

Score = dict[str, Any]
_NAMES = ("before", "after")


def _read(path: str) -> Score:
    try:
        score = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable score file ({error})") from error
    if not isinstance(score, dict) or not {"accuracy", "total", "wilson_95", "groups"} <= score.keys():
        raise UserError(f"{path}: not a score file; make one with `python -m eval.geometry3k score`")
    return score


def _row(name: str, before: Score, after: Score) -> str:
    cells = [
        f"{100 * s['accuracy']:6.1f} % [{100 * s['wilson_95'][0]:.1f}, {100 * s['wilson_95'][1]:.1f}]"
        for s in (before, after)
    ]
    gain = 100 * (after["accuracy"] - before["accuracy"])
    return f"{name:<18}{before['total']:>6}  {cells[0]:<24}{cells[1]:<24}{gain:+7.1f}"


def gain_lines(before: Score, after: Score) -> list[str]:
    """The table, overall and by family, with 95 % Wilson intervals. The gain is in percentage points."""
    if before.get("benchmark") != after.get("benchmark"):
        raise UserError(f"before is of {before.get('benchmark')} and after of {after.get('benchmark')}; compare one")
    if before["total"] != after["total"]:
        parts = [
            f"{name}: {line}" for name, line in zip(_NAMES, map(missing_answers, (before, after)), strict=True) if line
        ]
        remedy = "; ".join(parts) or "compare scores of the same problems"
        raise UserError(f"before has {before['total']} answers and after {after['total']}; {remedy}")
    lines = [f"{'held-out accuracy':<18}{'N':>6}  {'before [95 %]':<24}{'after [95 %]':<24}{'gain':>7}"]
    lines.append(_row("all", before, after))
    families = before["groups"].get("family", {})
    others = after["groups"].get("family", {})
    lines += [_row(f"  {name}", cell, others[name]) for name, cell in families.items() if name in others]
    apart = before["wilson_95"][1] < after["wilson_95"][0] or after["wilson_95"][1] < before["wilson_95"][0]
    lines.append(f"The two intervals {'do not overlap' if apart else 'overlap'}.")
    if _problems(before) != _problems(after):
        lines.append("warning: before and after do not have the same problems")
    return lines + cautions(list(zip(_NAMES, (before, after), strict=True)))


def _problems(score: Score) -> set[str]:
    return {str(item.get("pid")) for item in score.get("items") or []}


def main(arguments: Sequence[str] | None = None) -> int:
    paths = list(sys.argv[1:] if arguments is None else arguments)

    def command() -> None:
        if len(paths) != 2:
            raise UserError("expected two score files: BEFORE.json AFTER.json")
        print("\n".join(gain_lines(_read(paths[0]), _read(paths[1]))))

    return exit_code_of(command, "nothing was compared")


if __name__ == "__main__":
    sys.exit(main())
