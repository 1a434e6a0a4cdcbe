"""The survey of a dataset as text for a terminal."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from statistics import median

from adora_vl.commands import amount
from adora_vl.families import FAMILIES
from data_prep.inspection import PROPERTIES, SplitFacts, Survey, percentile
from data_prep.quarantine import QUARANTINE_NAME
from data_prep.storage import SPLITS, Manifest

_SHOWN_CHARACTERS = 100  # of a long problem
_SHOWN_VALUES = 20  # of a property


def describe(found: Survey) -> str:
    """Counts of each split, image tokens, the longest prompts, and what was left out."""
    manifest = found.manifest
    made = f" ({manifest['source']}, input {manifest['input'] or 'drawn'})" if manifest else " (no manifest of ours)"
    lines = [printable(f"{found.folder}{made}"), "", *_table(found), "", *_longest(found)]
    return "\n".join([*lines, *(["", *left_out] if (left_out := what_was_left_out(found)) else [])])


def token_statistics(facts: SplitFacts) -> dict[str, str]:
    """Image tokens of the rows of a split, for people."""
    tokens = facts.tokens
    if not tokens:
        return dict.fromkeys(("min", "median", "p95", "max"), "-")
    return {
        "min": str(min(tokens)),
        "median": f"{median(tokens):g}",
        "p95": str(percentile(tokens, 0.95)),
        "max": str(max(tokens)),
    }


def what_was_left_out(found: Survey) -> list[str]:
    """Lines on quarantined rows and leaks, from the manifest; none where there are none."""
    quarantined, leaks = found.manifest.get("quarantined") or {}, found.manifest.get("leaks") or {}
    lines = []
    if quarantined.get("rows"):
        reasons = ", ".join(f"{kind} {count}" for kind, count in quarantined["reasons"].items())
        lines.append(f"quarantined: {amount(quarantined['rows'], 'row')} ({reasons}), see quarantine.jsonl")
    if leaks.get("found"):
        lines.append(f"also in another split: {amount(leaks['found'], 'row')}, {leaks['dropped']} dropped from train")
    return lines


def printable(text: str) -> str:
    """One line without control characters: a row must not command the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _table(found: Survey) -> list[str]:
    """Lines: a column for each split, a block for each property, its most frequent value first."""
    splits = found.splits
    blocks = {"rows": {"rows": [str(facts.counts["rows"]["rows"]) for facts in splits.values()]}}
    for name in PROPERTIES:
        total: Counter[str] = sum((facts.counts[name] for facts in splits.values()), Counter())
        values = sorted(total, key=lambda value: (-total[value], value))
        title = "image size (longest side)" if name == "image size" else name
        blocks[title] = {
            printable(value)[:40]: [str(facts.counts[name][value]) for facts in splits.values()]
            for value in values[:_SHOWN_VALUES]
        }
        if len(values) > _SHOWN_VALUES:
            blocks[title][f"... {len(values) - _SHOWN_VALUES} more"] = ["" for _ in splits]
    statistics = [token_statistics(facts) for facts in splits.values()]
    blocks[f"image tokens per row ({FAMILIES[found.family].name}'s own limits)"] = {
        name: [column[name] for column in statistics] for name in statistics[0]
    }
    label = max(len(value) for values in blocks.values() for value in values) + 4
    width = max(8, *(len(split) + 2 for split in splits))
    lines = [" " * label + "".join(f"{split:>{width}}" for split in splits)]
    for title, cells in blocks.items():
        indent = "" if title == "rows" else "  "
        lines += [title] if indent else []
        for value, row in cells.items():
            lines.append(f"{indent + value:<{label}}" + "".join(f"{cell:>{width}}" for cell in row))
    return lines


def _longest(found: Survey) -> list[str]:
    unit = "characters" if found.model is None else f"tokens of {found.model}"
    lines = [printable(f"longest problems ({unit}, without system prompt and image)")]
    for split, facts in found.splits.items():
        for measure, row_id, problem in facts.longest[:3]:
            shown = problem if len(problem) <= _SHOWN_CHARACTERS else problem[:_SHOWN_CHARACTERS] + "..."
            lines.append(printable(f"  {split}  {measure:>5}  {row_id}: {shown}"))
    return lines


def print_counts(output: Path, manifest: Manifest) -> None:
    """Say what was written to `output`, and what was left out."""
    counts = ", ".join(
        f"{split} {amount(manifest['counts'][split], 'row')}" for split in SPLITS if split in manifest["counts"]
    )
    print(f"{output}: {counts}; look at it with `python -m data_prep inspect {shlex.quote(str(output))}`")
    leaks, quarantined = manifest["leaks"], manifest["quarantined"]
    if leaks["found"]:
        print(
            f"leaks: {amount(leaks['found'], 'row')} with the diagram and question of a row in another split; "
            f"{leaks['dropped']} dropped from train"
        )
    if quarantined["rows"]:
        reasons = ", ".join(f"{kind} {count}" for kind, count in quarantined["reasons"].items())
        print(f"quarantined: {amount(quarantined['rows'], 'row')} ({reasons}); see {output / QUARANTINE_NAME}")
