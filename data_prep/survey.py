"""`python -m data_prep inspect`: what a prepared data set holds, counted and as text."""

from __future__ import annotations

import heapq
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from adora_vl.conversion.quarantine import QUARANTINE_NAME, first_detail_per_reason, warning_lines
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
from adora_vl.data.images import (
    DEFAULT_FAMILY,
    VISION_BY_FAMILY,
    PixelLimits,
    image_size,
    image_tokens,
)
from adora_vl.data.prompts import (
    DEFAULT_PROMPT,
    conversation_with_images,
    lines_for_terminal,
    messages_as_text,
    read_template,
)
from adora_vl.data.rows import fault_in_prompt, fault_in_row
from adora_vl.evals.prepared import answer_form
from adora_vl.models.families import FAMILIES
from adora_vl.utils.cli import pluralize, printable, quantile
from adora_vl.utils.errors import UserError, describe_error

COUNTED_PROPERTIES = ("source", "goal", "shape", "answer form", "image size")
MAX_GALLERY_ROWS = 48  # of all splits together, on the page
LONGEST_PROBLEMS_KEPT = 5
UNKNOWN_VALUE = "unknown"  # the value of a property that a row does not have
_MAX_IMAGE_SIZES_KEPT = 5000  # image sizes for the scatter plot; the counts know all of them
_SIDES_OF_SIZE_CLASSES = (56, 112, 224, 448, 896)
TextLength = Callable[[str], int]  # counts the characters of a text, or the tokens of a model


class LongProblem(NamedTuple):
    """One of the longest problems. The order of the fields makes longer ones the larger tuples."""

    length: int  # in characters, or in the tokens of a model
    row_id: str
    problem: str


@dataclass
class SplitSurvey:
    """What was counted and measured over the rows of one split."""

    row_count: int = 0
    # How often each value of a property occurs, by the names of `COUNTED_PROPERTIES`: {"shape":
    # {"Circle": 12, ...}, ...}.
    value_counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in COUNTED_PROPERTIES}
    )
    # Arrays, since a list of a million numbers takes eight times the memory.
    image_tokens: array[int] = field(default_factory=lambda: array("l"))  # of each row
    characters: array[int] = field(default_factory=lambda: array("l"))  # of each problem
    # Width and height of the first images, in pixels.
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    longest_problems: list[LongProblem] = field(default_factory=list)  # the longest first
    repeated_ids: list[str] = field(default_factory=list)  # of rows whose id an earlier one has
    gallery: list[Row] = field(default_factory=list)  # rows that the page shows as a whole


@dataclass(frozen=True)
class Survey:
    """What a prepared data set holds."""

    folder: Path
    manifest: dict[str, Any]  # empty for a folder that `data_prep` did not make
    splits: dict[str, SplitSurvey]
    model: str | None  # the model whose tokenizer measures texts; None measures characters
    family: str = DEFAULT_FAMILY  # the model_type that counts image tokens
    example: Row | None = None  # the row whose whole prompt is printed


def survey_dataset(
    folder: Path, *, gallery_size: int = 0, model: str | None = None, family: str = DEFAULT_FAMILY
) -> Survey:
    """Read every row of a prepared data set once, and count and measure what it holds.

    Args:
        folder: the data set.
        gallery_size: how many whole rows to keep for a page, spread evenly over all rows.
        model: a folder or hub id whose tokenizer measures the problems; None measures characters.
        family: the model_type that counts image tokens.

    Raises:
        UserError: the folder has no rows, or a row that no training could use.
    """
    files = split_files(folder)
    if not files:
        raise UserError(
            f"dataset: {str(folder)!r} has no data/*.parquet; make a dataset with `python -m "
            "data_prep`"
        )
    text_length = len if model is None else _load_token_counter(model)
    row_counts = {split: row_count(folder, split) for split in files}
    if not any(row_counts.values()):
        raise UserError(f"dataset: {str(folder)!r} has no rows; prepare it again, or name another")
    # The share of all rows that the page shows.
    gallery_share = min(1.0, gallery_size / sum(row_counts.values()))
    splits = {}
    for split, count in row_counts.items():
        shown_count = 0
        if gallery_size:
            shown_count = max(1, round(count * gallery_share))  # also of a small split
            shown_count = min(count, shown_count)  # an empty split has none
        # The shown rows are spread evenly: 3 of 10 are the rows 0, 3 and 6.
        gallery_indices = {index * count // shown_count for index in range(shown_count)}
        splits[split] = _survey_split(
            folder,
            split=split,
            gallery_indices=gallery_indices,
            text_length=text_length,
            family=family,
        )
    return Survey(
        folder=folder,
        manifest=read_manifest(folder) or {},
        splits=splits,
        model=model,
        family=family,
        example=example_row(folder, files),
    )


def _survey_split(
    folder: Path, split: str, gallery_indices: set[int], text_length: TextLength, family: str
) -> SplitSurvey:
    """Read every row of a split once, and count and measure its properties.

    Args:
        folder: the data set.
        split: the split.
        gallery_indices: the indices of the rows that are kept whole, for the page.
        text_length: returns the length of a text, in characters or tokens.
        family: the model family whose image tokens are counted.

    Raises:
        UserError: a row that no training could use.
    """
    split_survey = SplitSurvey()
    seen_ids: set[str] = set()
    for index, row in enumerate(stored_rows(folder, split)):
        row_in_words = f"dataset: split {split!r}, row {row['id'] or f'number {index}'}"
        fault = fault_in_row(row)
        if fault:
            raise UserError(f"{row_in_words}: {fault}")
        split_survey.row_count += 1
        if row["id"] in seen_ids:
            split_survey.repeated_ids.append(row["id"])
        seen_ids.add(row["id"])
        _count_properties(split_survey.value_counts, row)
        sizes = _image_sizes(row, row_in_words)
        split_survey.value_counts["image size"].update(map(_size_class, sizes))
        split_survey.image_tokens.append(_image_tokens_of_row(row, sizes=sizes, family=family))
        split_survey.characters.append(len(row["problem"]))
        if len(split_survey.image_sizes) < _MAX_IMAGE_SIZES_KEPT:
            split_survey.image_sizes.extend(sizes)
        problem = LongProblem(text_length(row["problem"]), row["id"], row["problem"])
        # The heap has the longest problems so far, and the shortest of these is at its top. A new
        # problem goes in, and the shortest goes out.
        if len(split_survey.longest_problems) < LONGEST_PROBLEMS_KEPT:
            heapq.heappush(split_survey.longest_problems, problem)
        else:
            heapq.heappushpop(split_survey.longest_problems, problem)
        if index in gallery_indices:
            split_survey.gallery.append(row)
    split_survey.longest_problems.sort(reverse=True)
    return split_survey


def _image_sizes(row: Row, row_in_words: str) -> list[tuple[int, int]]:
    """Return the width and height of each image of a row, in pixels.

    Raises `UserError` for an image that cannot be read; it names the row by `row_in_words`.
    """
    sizes: list[tuple[int, int]] = []
    try:
        for image in row["images"]:
            sizes.append(image_size(image["bytes"]))
    except Exception as error:  # Pillow raises nearly anything on broken bytes
        raise UserError(
            f"{row_in_words}: image {len(sizes)} is not a stored picture "
            f"({describe_error(error)}); prepare the dataset again"
        ) from error
    return sizes


def _image_tokens_of_row(row: Row, sizes: Sequence[tuple[int, int]], family: str) -> int:
    """Return how many tokens the images of a row take in a prompt.

    `sizes` has the width and height of each image, in pixels. `family` is the model_type whose
    tokens are counted.
    """
    vision = VISION_BY_FAMILY[family]
    limits = PixelLimits(vision.min_pixels, vision.max_pixels, vision.token_side)
    return sum(image_tokens(size, limits, row["id"]) for size in sizes)


class RowMeta(NamedTuple):
    """What the column `meta` says of a row, as texts; empty where it says nothing."""

    goal: str
    shapes: list[str]
    family: str


def read_meta(row: Row) -> RowMeta:
    """Return what a row's column `meta` says; a folder that is not ours may have anything there."""
    meta = row.get("meta")
    if not isinstance(meta, dict):
        meta = {}
    shapes = meta.get("shapes")
    if not isinstance(shapes, list):
        shapes = []
    return RowMeta(
        goal=str(meta.get("goal") or ""),
        shapes=[str(shape) for shape in shapes],
        family=str(meta.get("family") or ""),
    )


def _count_properties(value_counts: Mapping[str, Counter[str]], row: Row) -> None:
    """Add one to the counts of the values that the properties of a row have.

    `value_counts` has the counts of the values by the names of `COUNTED_PROPERTIES`. The size of
    the images is no column of the row, and is counted elsewhere.
    """
    meta = read_meta(row)
    value_counts["source"][str(row.get("source") or UNKNOWN_VALUE)] += 1
    goal = meta.goal or UNKNOWN_VALUE
    value_counts["goal"][goal] += 1
    value_counts["shape"].update(meta.shapes or [UNKNOWN_VALUE])
    value_counts["answer form"][answer_form(row["answer"], row.get("choices"))] += 1


def _size_class(size: tuple[int, int]) -> str:
    """Return the class of a picture by its longer side: 300 x 500 pixels are `up to 896 px`."""
    for side in _SIDES_OF_SIZE_CLASSES:
        if max(size) <= side:
            return f"up to {side} px"
    return f"over {_SIDES_OF_SIZE_CLASSES[-1]} px"


def _load_token_counter(model: str) -> TextLength:
    """Return a function that counts the tokens of a text, with the tokenizer of a model.

    Raises `UserError` where the model has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer  # its import takes seconds

    from adora_vl.utils.hub import uses_local_files_only

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, local_files_only=uses_local_files_only(model), trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        remedy = "give a model folder or leave --model out"
        raise UserError(
            f"model: {model!r} has no tokenizer that can be loaded ({error}); {remedy}"
        ) from error
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


_MAX_CHARACTERS_SHOWN = 100  # of a long problem
_MAX_VALUES_SHOWN = 20  # of a property


def survey_text(survey: Survey) -> str:
    """Return the counts of each split, what was left out, and one whole prompt, as text."""
    lines = [counts_text(survey)]
    if survey.example is not None:
        lines += ["", *whole_prompt_lines(survey.example)]
    return "\n".join(lines)


def counts_text(survey: Survey) -> str:
    """Return the text of a survey: where the data is from, a table of counts, what is wrong."""
    manifest = survey.manifest
    origin = " (no manifest of ours)"  # a folder that somebody else made can be surveyed too
    if manifest:
        origin = f" ({manifest['source']}, input {manifest['input'] or 'drawn'})"
    lines = [
        printable(f"{survey.folder}{origin}"),
        "",
        *_count_table_lines(survey),
        "",
        *map(printable, _longest_problem_lines(survey)),
    ]
    # Each of these blocks is left out where it is empty.
    for block in (map(printable, _fault_lines(survey)), left_out_lines(survey.manifest)):
        block_lines = list(block)
        if block_lines:
            lines += ["", *block_lines]
    return "\n".join(lines)


def _fault_lines(survey: Survey) -> list[str]:
    """Return a line for each fault of a data set whose rows are all usable.

    A fault is another number of rows than the manifest counts, ids that are not unique, or a split
    whose file is missing.
    """
    lines = []
    manifest_counts = survey.manifest.get("counts") or {}
    for split, split_survey in survey.splits.items():
        # A split that the manifest does not count has no expected number of rows.
        expected_count = manifest_counts.get(split, split_survey.row_count)
        if expected_count != split_survey.row_count:
            lines.append(
                f"wrong: the manifest counts {pluralize(expected_count, 'row')} of {split}, and "
                f"there are {split_survey.row_count}; prepare the dataset again"
            )
        if split_survey.repeated_ids:
            lines.append(
                f"wrong: {pluralize(len(split_survey.repeated_ids), 'row')} of {split} with the id "
                f"of an earlier row, such as {split_survey.repeated_ids[0]!r}, which a training "
                "refuses; give each row its own id"
            )
    for split in manifest_counts.keys() - survey.splits.keys():
        lines.append(f"wrong: the manifest has a split {split!r}, and there is no file of it")
    return lines


def _longest_problem_lines(survey: Survey) -> list[str]:
    """Return a title and lines such as `  train    412  geo/17: Find the area of ...`.

    There are three lines for each split, with its longest problems. A limit on the length of
    prompts would refuse these first.
    """
    unit = "characters" if survey.model is None else f"tokens of {survey.model}"
    lines = [f"longest problems ({unit}, without system prompt and image)"]
    for split, split_survey in survey.splits.items():
        for problem in split_survey.longest_problems[:3]:
            text = problem.problem
            if len(text) > _MAX_CHARACTERS_SHOWN:
                text = text[:_MAX_CHARACTERS_SHOWN] + "..."
            lines.append(f"  {split}  {problem.length:>5}  {problem.row_id}: {text}")
    return lines


def whole_prompt_lines(row: Row) -> list[str]:
    """Return the lines of the prompt that a training with the default keys would make of a row."""
    problem = read_template(DEFAULT_PROMPT)(row)
    image_count = len(row["images"] or [])
    fault = fault_in_prompt(problem, image_count)
    if fault:
        return [printable(f"the prompt of {row['id']} cannot be made: {fault}")]
    lines = lines_for_terminal(messages_as_text(conversation_with_images(problem, image_count)))
    title = f"one whole prompt, of {row['id']}, as a training with the default keys asks it:"
    return [printable(title), *(f"  {line}" for line in lines)]


def left_out_lines(manifest: Manifest) -> list[str]:
    """Return what a manifest says of rows that were dropped, and its warnings on the others.

    Dropped rows are leaks (training rows that a test split has too) and quarantined rows (those
    that are unusable). The list is empty where there is nothing to say.
    """
    quarantined = manifest.get("quarantined") or {}
    leaks = manifest.get("leaks") or {}
    lines = []
    if leaks.get("found"):
        lines.append(
            f"leaks: {pluralize(leaks['found'], 'row')} with the diagram and question of a row in "
            f"another split; {leaks['dropped']} dropped from train"
        )
    lines += warning_lines(manifest)
    if quarantined.get("rows"):
        reasons = ", ".join(f"{reason} {count}" for reason, count in quarantined["reasons"].items())
        lines.append(
            f"quarantined: {pluralize(quarantined['rows'], 'row')} ({reasons}); see "
            f"{QUARANTINE_NAME}"
        )
    return lines


# The lines of a table on one property. {"Circle": ["12", "3"]} has a label and a cell a split.
_TableBlock = dict[str, list[str]]


def _count_table_lines(survey: Survey) -> list[str]:
    """Return the lines of a table with a column for each split and a block for each property.

    The most frequent value of a property comes first. A property that no row has gets no block.
    """
    splits = survey.splits
    row_counts = [str(split_survey.row_count) for split_survey in splits.values()]
    block_by_title: dict[str, _TableBlock] = {"": {"rows": row_counts}}
    for name in COUNTED_PROPERTIES:
        total_counts = total_value_counts(name, splits)
        if set(total_counts) <= {UNKNOWN_VALUE}:
            continue
        title = "image size (longest side)" if name == "image size" else name
        block_by_title[title] = _property_cells(name, total_counts, splits)
    image_tokens_by_split = [split_survey.image_tokens for split_survey in splits.values()]
    has_images = any(any(image_tokens) for image_tokens in image_tokens_by_split)
    if has_images:
        title = f"image tokens per row ({FAMILIES[survey.family].name}'s own limits)"
        block_by_title[title] = _token_cells(image_tokens_by_split)
    return _format_table(block_by_title, splits=list(splits))


def total_value_counts(name: str, splits: Mapping[str, SplitSurvey]) -> Counter[str]:
    """Return how often each value of a property occurs in all splits together.

    `name` is one of `COUNTED_PROPERTIES`.
    """
    total: Counter[str] = Counter()
    for split_survey in splits.values():
        total += split_survey.value_counts[name]
    return total


def most_frequent_first(value_counts: Counter[str]) -> list[str]:
    """Return the counted values, the most frequent first; equal counts by the alphabet."""
    return sorted(value_counts, key=lambda value: (-value_counts[value], value))


def _format_table(block_by_title: Mapping[str, _TableBlock], splits: Sequence[str]) -> list[str]:
    """Return the lines of a table, with its blocks one below the other and the splits above.

    For example, where the block `rows` has an empty title, which is not written:

                     train    test
        rows             8       2
        goal
          Angle          5       1
          Length         3       1
    """
    labels = chain.from_iterable(block_by_title.values())
    label_width = max(len(label) for label in labels) + 4
    cell_width = max(8, *(len(split) + 2 for split in splits))
    lines = [" " * label_width + "".join(f"{split:>{cell_width}}" for split in splits)]
    for title, block in block_by_title.items():
        indent = ""
        if title:
            lines.append(title)
            indent = "  "
        for label, cells in block.items():
            row = "".join(f"{cell:>{cell_width}}" for cell in cells)
            lines.append(f"{indent + label:<{label_width}}{row}")
    return lines


def _property_cells(
    name: str, total_counts: Counter[str], splits: Mapping[str, SplitSurvey]
) -> _TableBlock:
    """Return the block of a table on a property, with a line for each of its frequent values.

    For example, {"Circle": ["12", "3"]} for a shape that 12 rows of the first split have, and 3 of
    the second. `name` is one of `COUNTED_PROPERTIES`, and `total_counts` has its counts over all
    splits.
    """
    values = most_frequent_first(total_counts)
    cells_by_value = {}
    for value in values[:_MAX_VALUES_SHOWN]:
        cells = [str(split_survey.value_counts[name][value]) for split_survey in splits.values()]
        cells_by_value[printable(value)[:40]] = cells
    if len(values) > _MAX_VALUES_SHOWN:
        cells_by_value[f"... {len(values) - _MAX_VALUES_SHOWN} more"] = ["" for _ in splits]
    return cells_by_value


def _token_cells(image_tokens_by_split: Sequence[array[int]]) -> _TableBlock:
    """Return the block of a table with statistics of the image tokens of a row.

    For example, {"min": ["4", "4"], "median": ["120", "96"], ...} with a cell for each split.
    """
    statistics: dict[str, Callable[[array[int]], object]] = {
        "min": min,
        "median": lambda image_tokens: f"{median(image_tokens):g}",
        "p95": partial(quantile, share=0.95),
        "max": max,
    }
    cells_by_label = {}
    for label, statistic in statistics.items():
        cells_by_label[label] = [
            str(statistic(image_tokens)) if image_tokens else "-"  # a split may be empty
            for image_tokens in image_tokens_by_split
        ]
    return cells_by_label


def print_prompt(output: Path, manifest: Manifest) -> None:
    """Print one whole prompt of a prepared data set, unless it has no row."""
    row = example_row(output, [split for split in SPLITS if split in manifest["counts"]])
    if row is not None:
        print("\n".join(whole_prompt_lines(row)))


def print_counts(output: Path, manifest: Manifest) -> None:
    """Print how many rows a preparation has stored, what it left out, and why."""
    row_counts = manifest["counts"]
    rows = ", ".join(
        f"{split} {pluralize(row_counts[split], 'row')}" for split in SPLITS if split in row_counts
    )
    print(
        f"{output}: {rows}; look at it with `python -m data_prep inspect "
        f"{shlex.quote(str(output))}`"
    )
    lines = left_out_lines(manifest)
    if manifest["quarantined"]["rows"]:
        lines += [f"  {detail}" for detail in first_detail_per_reason(output)]
    for line in lines:
        print(printable(line))
