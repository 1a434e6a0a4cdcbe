"""A prepared dataset in one table of counts, as text."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from adora_vl.errors import UserError
from data_prep.schema import Row
from data_prep.storage import read_manifest, split_files, stored_rows

Counts = dict[str, Counter[str]]  # of each property, how often each value

_PROPERTIES = ("source", "goal", "answer form", "image size")
_ANSWER_FORMS = {
    "integer": re.compile(r"[+-]?\d+"),
    "decimal": re.compile(r"[+-]?\d*\.\d+"),
    "letter": re.compile(r"[A-Z]"),
    "with \\pi": re.compile(r".*\\pi.*"),
    "with a root": re.compile(r".*\\sqrt.*"),
    "fraction": re.compile(r".*(?:\\frac|/).*"),
}
_LONGEST_SIDES = (56, 112, 224, 448, 896)


def describe(folder: Path) -> str:
    """Counts of each split by source, goal, answer form and image size. Raises `UserError` where there is none."""
    files = split_files(folder)
    if not files:
        raise UserError(f"dataset: {str(folder)!r} has no data/*.parquet; make a dataset with `python -m data_prep`")
    counts = {split: _counted(folder, split) for split in files}
    manifest = read_manifest(folder) or {}
    made = f" ({manifest['source']}, input {manifest['input'] or 'drawn'})" if manifest else " (no manifest of ours)"
    return "\n".join([f"{folder}{made}", "", *_table(counts)])


def answer_form(answer: str) -> str:
    """The kind of a canonical gold: one of the names of `_ANSWER_FORMS`, or `other`."""
    return next((form for form, pattern in _ANSWER_FORMS.items() if pattern.fullmatch(answer)), "other")


def _counted(folder: Path, split: str) -> Counts:
    counts: Counts = {name: Counter() for name in ("rows", *_PROPERTIES)}
    for row in stored_rows(folder, split):
        counts["rows"]["rows"] += 1
        counts["source"][row.get("source") or "unknown"] += 1
        counts["goal"][(row.get("meta") or {}).get("goal") or "unknown"] += 1
        counts["answer form"][answer_form(row["answer"])] += 1
        counts["image size"].update(_sizes(row))
    return counts


def _sizes(row: Row) -> list[str]:
    """For each image of the row, the class of its longest side."""
    longest = [max(Image.open(io.BytesIO(image["bytes"])).size) for image in row["images"]]
    return [
        next((f"up to {side} px" for side in _LONGEST_SIDES if pixels <= side), f"over {_LONGEST_SIDES[-1]} px")
        for pixels in longest
    ]


def _table(counts: Mapping[str, Counts]) -> list[str]:
    """Lines: a column for each split, a block for each property, its most frequent value first."""
    blocks: list[tuple[str, list[str]]] = [("rows", ["rows"])]
    for name in _PROPERTIES:
        total: Counter[str] = sum((split[name] for split in counts.values()), Counter())
        blocks.append((name, [value for value, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))]))
    label = max(len(value) for _, values in blocks for value in values) + 4
    width = max(8, *(len(split) + 2 for split in counts))
    lines = [" " * label + "".join(f"{split:>{width}}" for split in counts)]
    for name, values in blocks:
        indent = "" if name == "rows" else "  "
        if indent:
            lines.append(f"{name} (longest side)" if name == "image size" else name)
        for value in values:
            lines.append(
                f"{indent + value:<{label}}" + "".join(f"{split[name][value]:>{width}}" for split in counts.values())
            )
    return lines
