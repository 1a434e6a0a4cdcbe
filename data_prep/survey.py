"""`python -m data_prep inspect`: what a prepared data set holds, counted and as text."""

from __future__ import annotations

import heapq
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from adora_vl.conversion.quarantine import QUARANTINE_NAME, first_details, note_lines
from adora_vl.data.dataset import (
    SPLITS,
    Manifest,
    Row,
    example_row,
    read_manifest,
    row_count,
    split_files,
    stored_rows,
)
from adora_vl.data.images import DEFAULT_FAMILY, VISIONS, image_size, image_tokens
from adora_vl.data.prompts import (
    DEFAULT_PROMPT,
    as_text,
    conversation_with_images,
    shown_lines,
    template,
)
from adora_vl.data.rows import problem_with_prompt, problem_with_row
from adora_vl.evals.prepared import answer_form
from adora_vl.models.families import FAMILIES
from adora_vl.utils.cli import amount, printable, quantile
from adora_vl.utils.errors import UserError, in_one_line

PROPERTIES = ("source", "goal", "shape", "answer form", "image size")
GALLERY_ROWS = 48  # of all splits together, on the page
LONGEST_SHOWN = 5
UNKNOWN = "unknown"  # the value of a property that a row does not have
_SIZES_KEPT = 5000  # image sizes for the scatter plot; the counts know all of them
_LONGEST_SIDES = (56, 112, 224, 448, 896)
TextTokens = Callable[[str], int]


@dataclass
class SplitFacts:
    """The facts of one split: how often each value of a property occurs, and figures of each row."""

    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in ("rows", *PROPERTIES)}
    )
    tokens: array[int] = field(default_factory=lambda: array("l"))  # image tokens of each row
    characters: array[int] = field(default_factory=lambda: array("l"))  # of each problem
    # Width and height of the first images, in pixels.
    sizes: list[tuple[int, int]] = field(default_factory=list)
    # Length, row id and text of the longest problems, the longest first.
    longest: list[tuple[int, str, str]] = field(default_factory=list)
    gallery: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Survey:
    """What a prepared data set holds."""

    folder: Path
    manifest: dict[str, Any]  # empty for a folder that `data_prep` did not make
    splits: dict[str, SplitFacts]
    model: str | None  # the model whose tokenizer measures texts
    family: str = DEFAULT_FAMILY  # the model_type that counts image tokens
    example: Row | None = None  # the row whose whole prompt is printed


def survey(
    folder: Path, *, gallery: int = 0, model: str | None = None, family: str = DEFAULT_FAMILY
) -> Survey:
    """Look at every row once, a batch in memory at a time.

    Raises `UserError`.

    `gallery`: how many whole rows to keep, spread evenly over all of them. `model`: a folder or hub
    id whose tokenizer measures the problems; None measures characters. `family`: the model_type
    that counts image tokens.
    """
    files = split_files(folder)
    if not files:
        raise UserError(
            f"dataset: {str(folder)!r} has no data/*.parquet; make a dataset with `python -m "
            "data_prep`"
        )
    measure = len if model is None else _tokenizer(model)
    sizes = {split: row_count(folder, split) for split in files}
    if not any(sizes.values()):
        raise UserError(f"dataset: {str(folder)!r} has no rows; prepare it again, or name another")
    share = min(1.0, gallery / max(1, sum(sizes.values())))
    splits = {}
    for split, size in sizes.items():
        gallery_rows = min(size, max(1, round(size * share))) if gallery else 0
        picked = {index * size // gallery_rows for index in range(gallery_rows)}
        splits[split] = _facts(folder, split=split, picked=picked, measure=measure, family=family)
    return Survey(
        folder=folder,
        manifest=read_manifest(folder) or {},
        splits=splits,
        model=model,
        family=family,
        example=example_row(folder, files),
    )


def _facts(
    folder: Path, split: str, picked: set[int], measure: TextTokens, family: str
) -> SplitFacts:
    """Read every row of a split once; the rows with the indices `picked` go into the gallery.

    `measure` counts the tokens of a problem, and `family` is the model family whose image tokens
    are counted.

    Raises `UserError` for a row that no training could use.
    """
    facts = SplitFacts()
    vision = VISIONS[family]
    limits = (vision.unit, vision.min_pixels, vision.max_pixels)
    for index, row in enumerate(stored_rows(folder, split)):
        where = f"dataset: split {split!r}, row {row['id'] or f'number {index}'}"
        fault = problem_with_row(row)
        if fault:
            raise UserError(f"{where}: {fault}")
        _count_properties(facts.counts, row)
        sizes: list[tuple[int, int]] = []
        try:
            for image in row["images"]:
                sizes.append(image_size(image["bytes"]))
        except Exception as error:  # Pillow raises nearly anything on broken bytes
            raise UserError(
                f"{where}: image {len(sizes)} is not a stored picture ({in_one_line(error)}); "
                "prepare the dataset again"
            ) from error
        facts.counts["image size"].update(map(_size_class, sizes))
        facts.tokens.append(sum(image_tokens(size, *limits, row["id"]) for size in sizes))
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


def _count_properties(counts: Mapping[str, Counter[str]], row: Row) -> None:
    """Count the properties of a row that its columns say."""
    meta = row.get("meta")
    if not isinstance(meta, dict):
        meta = {}
    shapes = meta.get("shapes")
    if not shapes or not isinstance(shapes, list):
        shapes = [UNKNOWN]
    counts["rows"]["rows"] += 1
    counts["source"][str(row.get("source") or UNKNOWN)] += 1
    counts["goal"][str(meta.get("goal") or UNKNOWN)] += 1
    counts["shape"].update(str(shape) for shape in shapes)
    counts["answer form"][answer_form(row["answer"], row.get("choices"))] += 1


def _size_class(size: tuple[int, int]) -> str:
    """Return the class of a picture by its longest side: `up to 512 px`."""
    for side in _LONGEST_SIDES:
        if max(size) <= side:
            return f"up to {side} px"
    return f"over {_LONGEST_SIDES[-1]} px"


def _tokenizer(model: str) -> TextTokens:
    """Return what counts the tokens that the tokenizer of a model makes of a text.

    Raises `UserError` where the model has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer  # its import takes seconds

    from adora_vl.utils.hub import only_here

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, local_files_only=only_here(model), trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        remedy = "give a model folder or leave --model out"
        raise UserError(
            f"model: {model!r} has no tokenizer that can be loaded ({error}); {remedy}"
        ) from error
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


_SHOWN_CHARACTERS = 100  # of a long problem
_SHOWN_VALUES = 20  # of a property


def describe(overview: Survey) -> str:
    """Return the counts of each split, what was left out, and one whole prompt, as text."""
    lines = [counts(overview)]
    if overview.example is not None:
        lines += ["", *whole_prompt(overview.example)]
    return "\n".join(lines)


def counts(overview: Survey) -> str:
    """Return what `describe` does, without the prompt."""
    manifest = overview.manifest
    # A folder that somebody else made can be surveyed too.
    origin = " (no manifest of ours)"
    if manifest:
        origin = f" ({manifest['source']}, input {manifest['input'] or 'drawn'})"
    unit = "characters" if overview.model is None else f"tokens of {overview.model}"
    # The longest problems are those that a limit on the prompt would refuse first.
    longest = [f"longest problems ({unit}, without system prompt and image)"]
    for split, facts in overview.splits.items():
        for measure, row_id, problem in facts.longest[:3]:
            text = problem
            if len(problem) > _SHOWN_CHARACTERS:
                text = problem[:_SHOWN_CHARACTERS] + "..."
            longest.append(f"  {split}  {measure:>5}  {row_id}: {text}")
    lines = [
        printable(f"{overview.folder}{origin}"),
        "",
        *_table(overview),
        "",
        *map(printable, longest),
    ]
    left_out = what_was_left_out(overview.manifest)
    if left_out:
        lines += ["", *left_out]
    return "\n".join(lines)


def whole_prompt(row: Row) -> list[str]:
    """Return the lines of the whole prompt of a row, by the default keys of a training."""
    problem = template(DEFAULT_PROMPT)(row)
    images = len(row["images"] or [])
    fault = problem_with_prompt(problem, images)
    if fault:
        return [printable(f"the prompt of {row['id']} cannot be made: {fault}")]
    lines = shown_lines(as_text(conversation_with_images(problem, images)))
    title = f"one whole prompt, of {row['id']}, as a training with the default keys asks it:"
    return [printable(title), *(f"  {line}" for line in lines)]


def what_was_left_out(manifest: Manifest) -> list[str]:
    """Return lines on leaks, notes on rows, and quarantined rows; none where there are none."""
    quarantined = manifest.get("quarantined") or {}
    leaks = manifest.get("leaks") or {}
    lines = note_lines(manifest)
    if leaks.get("found"):
        also = (
            f"{amount(leaks['found'], 'row')} with the diagram and question of a row in another "
            "split"
        )
        lines.insert(0, f"leaks: {also}; {leaks['dropped']} dropped from train")
    if quarantined.get("rows"):
        reasons = ", ".join(f"{kind} {count}" for kind, count in quarantined["reasons"].items())
        lines.append(
            f"quarantined: {amount(quarantined['rows'], 'row')} ({reasons}); see {QUARANTINE_NAME}"
        )
    return lines


def _table(overview: Survey) -> list[str]:
    """Return the lines of a table with a column for each split and a block for each property.

    The most frequent value of a property comes first.
    """
    splits = overview.splits
    row_counts = [str(facts.counts["rows"]["rows"]) for facts in splits.values()]
    blocks: dict[str, dict[str, list[str]]] = {"rows": {"rows": row_counts}}
    for name in PROPERTIES:
        total: Counter[str] = sum((facts.counts[name] for facts in splits.values()), Counter())
        # A property that no row has gets no block.
        if set(total) <= {UNKNOWN}:
            continue
        title = "image size (longest side)" if name == "image size" else name
        blocks[title] = _property_block(name, total, splits)
    # Tables of texts alone have no image tokens.
    tokens = [facts.tokens for facts in splits.values()]
    if any(map(any, tokens)):
        title = f"image tokens per row ({FAMILIES[overview.family].name}'s own limits)"
        blocks[title] = _token_block(tokens)
    label_width = max(len(label) for block in blocks.values() for label in block) + 4
    cell_width = max(8, *(len(split) + 2 for split in splits))
    lines = [" " * label_width + "".join(f"{split:>{cell_width}}" for split in splits)]
    for title, block in blocks.items():
        indent = ""
        if title != "rows":
            lines.append(title)
            indent = "  "
        for label, cells in block.items():
            row = "".join(f"{cell:>{cell_width}}" for cell in cells)
            lines.append(f"{indent + label:<{label_width}}{row}")
    return lines


def _property_block(
    name: str, total: Counter[str], splits: Mapping[str, SplitFacts]
) -> dict[str, list[str]]:
    """Return the counts of a property's most frequent values, a cell for each split."""
    values = sorted(total, key=lambda value: (-total[value], value))
    block = {}
    for value in values[:_SHOWN_VALUES]:
        block[printable(value)[:40]] = [str(facts.counts[name][value]) for facts in splits.values()]
    if len(values) > _SHOWN_VALUES:
        block[f"... {len(values) - _SHOWN_VALUES} more"] = ["" for _ in splits]
    return block


def _token_block(tokens: Sequence[array[int]]) -> dict[str, list[str]]:
    """Return figures of the image tokens of a row, a cell for each split."""
    figures: dict[str, Callable[[array[int]], object]] = {
        "min": min,
        "median": lambda numbers: f"{median(numbers):g}",
        "p95": partial(quantile, share=0.95),
        "max": max,
    }
    block = {}
    for name, figure in figures.items():
        block[name] = [str(figure(numbers)) if numbers else "-" for numbers in tokens]
    return block


def print_prompt(output: Path, manifest: Manifest) -> None:
    """Print one whole prompt of a prepared data set, unless it has no row."""
    row = example_row(output, [split for split in SPLITS if split in manifest["counts"]])
    if row is not None:
        print("\n".join(whole_prompt(row)))


def print_counts(output: Path, manifest: Manifest) -> None:
    """Print how many rows a preparation has stored, what it left out, and why."""
    counts = manifest["counts"]
    rows = ", ".join(
        f"{split} {amount(counts[split], 'row')}" for split in SPLITS if split in counts
    )
    print(
        f"{output}: {rows}; look at it with `python -m data_prep inspect "
        f"{shlex.quote(str(output))}`"
    )
    details = (
        [f"  {detail}" for detail in first_details(output)]
        if manifest["quarantined"]["rows"]
        else []
    )
    for line in (*what_was_left_out(manifest), *details):
        print(printable(line))
