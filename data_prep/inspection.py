"""Surveys a prepared dataset in one pass over its rows: counts, image tokens, the longest problems, a gallery."""

from __future__ import annotations

import heapq
import io
import re
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from adora_vl.errors import UserError, in_one_line
from adora_vl.rows import problem_with_row
from data_prep.pixels import DEFAULT_FAMILY, VISIONS, image_tokens
from data_prep.schema import Row
from data_prep.storage import read_manifest, row_count, split_files, stored_rows

PROPERTIES = ("source", "goal", "shape", "answer form", "image size")
GALLERY_ROWS = 48  # of all splits together, on the page
LONGEST_SHOWN = 5
_SIZES_KEPT = 5000  # image sizes for the scatter plot; the counts know all of them
_LONGEST_SIDES = (56, 112, 224, 448, 896)
_ANSWER_FORMS = (  # of a canonical gold; the first that fits
    ("integer", re.compile(r"[+-]?\d+")),
    ("decimal", re.compile(r"[+-]?\d*\.\d+")),
    ("letter", re.compile(r"[A-Z]")),
    ("multiple of pi", re.compile(r"[+-]?[^+-]*\\pi[^+-]*")),
    ("radical", re.compile(r"[+-]?[^+-]*\\sqrt[^+-]*")),
    ("fraction", re.compile(r"[+-]?\d*(?:\\frac\{[+-]?\d+(?:\.\d+)?\}\{\d+(?:\.\d+)?\}|\d+/\d+)")),
    ("text", re.compile(r"[A-Za-z][A-Za-z ]+")),
)

TextTokens = Callable[[str], int]


@dataclass
class SplitFacts:
    """The facts of one split: how often each value of each property occurs, and numbers for every row.

    `tokens`: image tokens of each row. `characters`: of each problem. `sizes`: (width, height) of the first images.
    `longest`: (measure, row id, problem) of the longest problems, the longest first. `gallery`: whole rows.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in ("rows", *PROPERTIES)})
    tokens: array[int] = field(default_factory=lambda: array("l"))
    characters: array[int] = field(default_factory=lambda: array("l"))
    sizes: list[tuple[int, int]] = field(default_factory=list)
    longest: list[tuple[int, str, str]] = field(default_factory=list)
    gallery: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Survey:
    """A dataset folder, its manifest if it is one of ours, and the facts of each split. `model`: whose tokens of text;
    `family`: whose image tokens.
    """

    folder: Path
    manifest: dict[str, Any]
    splits: dict[str, SplitFacts]
    model: str | None
    family: str = DEFAULT_FAMILY


def survey(folder: Path, *, gallery: int = 0, model: str | None = None, family: str = DEFAULT_FAMILY) -> Survey:
    """Look at every row once, a batch in memory at a time.

    `gallery`: how many whole rows to keep, spread evenly over all of them. `model`: a folder or hub id whose tokenizer
    measures the problems; None measures characters. `family`: the model_type that counts image tokens.

    Raises `UserError` where there is no dataset, no row or no tokenizer.
    """
    files = split_files(folder)
    if not files:
        raise UserError(f"dataset: {str(folder)!r} has no data/*.parquet; make a dataset with `python -m data_prep`")
    measure = len if model is None else _tokenizer(model)
    sizes = {split: row_count(folder, split) for split in files}
    if not any(sizes.values()):
        raise UserError(f"dataset: {str(folder)!r} has no rows; prepare it again, or name another")
    share = min(1.0, gallery / max(1, sum(sizes.values())))
    splits = {}
    for split, size in sizes.items():
        wanted = min(size, max(1, round(size * share))) if gallery else 0
        picked = {index * size // wanted for index in range(wanted)}
        splits[split] = _facts(folder, split, picked, measure, family)
    return Survey(folder, read_manifest(folder) or {}, splits, model, family)


def answer_form(answer: str) -> str:
    """The kind of a canonical gold: one of the names of `_ANSWER_FORMS`, or `expression`."""
    return next((form for form, pattern in _ANSWER_FORMS if pattern.fullmatch(answer)), "expression")


def percentile(values: array[int], share: float) -> int:
    """The smallest value that at least this share of `values` does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0


def _facts(folder: Path, split: str, picked: set[int], measure: TextTokens, family: str) -> SplitFacts:
    facts = SplitFacts()
    for index, row in enumerate(stored_rows(folder, split)):
        where = f"dataset: split {split!r}, row {row['id'] or f'number {index}'}"
        fault = problem_with_row(row)
        if fault:
            raise UserError(f"{where}: {fault}")
        meta, counts = row.get("meta"), facts.counts
        meta = meta if isinstance(meta, dict) else {}
        shapes = meta.get("shapes")
        counts["rows"]["rows"] += 1
        counts["source"][str(row.get("source") or "unknown")] += 1
        counts["goal"][str(meta.get("goal") or "unknown")] += 1
        counts["shape"].update([str(shape) for shape in shapes] if shapes and isinstance(shapes, list) else ["unknown"])
        counts["answer form"][answer_form(row["answer"])] += 1
        sizes = [_size(image, f"{where}: image {number}") for number, image in enumerate(row["images"])]
        counts["image size"].update(_size_class(max(size)) for size in sizes)
        facts.tokens.append(sum(_tokens(row, size, family) for size in sizes))
        facts.characters.append(len(row["problem"]))
        if len(facts.sizes) < _SIZES_KEPT:
            facts.sizes.extend(sizes)
        entry = (measure(row["problem"]), row["id"], row["problem"])
        if len(facts.longest) < LONGEST_SHOWN:
            heapq.heappush(facts.longest, entry)
        else:
            heapq.heappushpop(facts.longest, entry)
        if index in picked:
            facts.gallery.append(row)
    facts.longest.sort(reverse=True)
    return facts


def _size(image: Any, where: str) -> tuple[int, int]:
    """Width and height of a stored picture, by its header."""
    try:
        with Image.open(io.BytesIO(image["bytes"])) as opened:
            return opened.size
    except Exception as error:  # Pillow raises nearly anything on broken bytes
        raise UserError(f"{where} is not a stored picture ({in_one_line(error)}); prepare the dataset again") from error


def _tokens(row: Row, size: tuple[int, int], family: str) -> int:
    try:
        return image_tokens(*size, VISIONS[family])
    except ValueError as error:
        raise UserError(
            f"{row['id']}: an image of {size[0]} x {size[1]} pixels is refused by the model ({error}); remove the row"
        ) from error


def _size_class(longest: int) -> str:
    return next((f"up to {side} px" for side in _LONGEST_SIDES if longest <= side), f"over {_LONGEST_SIDES[-1]} px")


def _tokenizer(model: str) -> TextTokens:
    """How many tokens the tokenizer of this model makes of a text."""
    from transformers import AutoTokenizer  # seconds, so only where it is asked for

    from adora_vl.hub import only_here

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=only_here(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model: {model!r} has no tokenizer that can be loaded ({error}); give a model folder or leave --model out"
        ) from error
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
