"""Prompt lengths and image tokens over a dataset, without decoding an image or loading a weight."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from adora_vl.commands import amount
from adora_vl.families import family_of
from adora_vl.prompt_template import Template
from adora_vl.prompts import conversation_with_images
from adora_vl.training_data import mixed_rows
from data_prep.pixels import DEFAULT_FAMILY, VISIONS, model_size
from data_prep.storage import row_count, stored_rows

TEXT_TOKENS = 300  # assumed for a prompt that is not known: Geometry3K's have 60 to 250 with the system prompt
CHARACTERS_A_TOKEN = 2.5  # assumed where the tokenizer is not at hand; English mathematics has 3 to 4
_TEMPLATE_TOKENS = 30  # roles and markers of Qwen's chat template around two messages

TextTokens = Callable[[str, int], int]  # a problem and its number of images -> tokens, each image one of them


@dataclass(frozen=True)
class Limits:
    """Pixels of an image, and the side of an image token."""

    low: int
    high: int
    unit: int


@dataclass(frozen=True)
class Lengths:
    """One entry per row: tokens of the whole prompt, and those of its images."""

    prompt: list[int]
    image: list[int]
    notes: list[str]  # what was assumed
    rows: int | None  # of the whole split; None where the dataset is not here

    @property
    def longest(self) -> tuple[int, int]:
        """The longest prompt and the most image tokens, which need not be one row's."""
        return max(self.prompt), max(self.image)


def quantile(values: Sequence[int], share: float) -> int:
    """The nearest-rank quantile of at least one value."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def limits_of(processor: Any, model: Any, min_pixels: int | None, max_pixels: int | None) -> Limits:
    """The pixel limits that images will be resized to: the config's, else the processor's own, else the published.

    `model`: its Transformers config, whose family says what was published.
    """
    family = family_of(model)
    published = (family.vision if family is not None else None) or VISIONS[DEFAULT_FAMILY]
    image_processor = getattr(processor, "image_processor", None)
    size = dict(image_processor.size) if image_processor is not None else {}
    low = size.get("shortest_edge", published.min_pixels) if min_pixels is None else min_pixels
    high = size.get("longest_edge", published.max_pixels) if max_pixels is None else max_pixels
    seen = getattr(model, "vision_config", None)
    unit = seen.patch_size * seen.spatial_merge_size if family is not None and seen is not None else published.unit
    return Limits(low, high, unit)


def measure(
    folder: Path,
    split: str,
    text_tokens: TextTokens,
    limits: Limits,
    most: int | None = None,
    made: Template | None = None,
) -> Lengths:
    """Every row's lengths, or those of the first `most` rows. Raises `UserError` where there is no such split.

    `made`: the template of the problems (`adora_prompt`).
    """
    total = row_count(folder, split)
    count = min(total, most or total)
    prompts, images = [], []
    rows = islice(stored_rows(folder, split), count)
    for row in tqdm(rows, total=count, desc="prompt lengths", unit="row", disable=None):
        sizes = [_size(image) for image in row["images"] or []]
        tokens = sum(_image_tokens(size, limits) for size in sizes)
        if made is not None:
            made.check_columns(row, f"{str(folder)!r} split {split!r}")
        problem = row["problem"] if made is None else made(row)
        prompts.append(text_tokens(problem, len(sizes)) - len(sizes) + tokens)
        images.append(tokens)
    notes = [] if count == total else [f"measured on the first {count} of {total} rows (--rows)"]
    return Lengths(prompts, images, notes, total)


def joined(sets: Sequence[Lengths], names: Sequence[str], shares: Sequence[float] | None, seed: int) -> Lengths:
    """The lengths of several data sets as those of the run that mixes them, with a note that names each."""
    if len(sets) == 1:
        return sets[0]
    sizes = [one.rows or 0 for one in sets]
    rows = sum(sizes) if shares is None else len(mixed_rows(sizes, shares, seed))
    parts = [f"{name} {amount(size, 'row')}" for name, size in zip(names, sizes, strict=True)]
    if shares is not None:
        parts = [f"{part} at {share:.0%}" for part, share in zip(parts, shares, strict=True)]
    notes = [note for one in sets for note in one.notes]
    return Lengths(
        [length for one in sets for length in one.prompt],
        [length for one in sets for length in one.image],
        [*notes, f"{len(sets)} data sets are mixed into {rows} rows per epoch: {', '.join(parts)}"],
        rows,
    )


def _size(image: dict[str, Any]) -> tuple[int, int]:
    """Width and height from the header."""
    source: Any = io.BytesIO(image["bytes"]) if image["bytes"] else image["path"]
    with Image.open(source) as opened:
        return opened.size


def _image_tokens(size: tuple[int, int], limits: Limits) -> int:
    """The number of image tokens, by the processor's own rule."""
    width, height = model_size(*size, limits.unit, limits.low, limits.high)
    return width // limits.unit * (height // limits.unit)


def tokenizer_counter(processor: Any, system_prompt: str | None) -> TextTokens:
    """Counts by the trainer's own template and tokenizer; an image is one token, its run is added by the caller."""
    tokenizer = getattr(processor, "tokenizer", processor)

    def count(problem: str, images: int) -> int:
        text = processor.apply_chat_template(
            conversation_with_images(problem, images, system_prompt), add_generation_prompt=True, tokenize=False
        )
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def character_counter(system_prompt: str | None) -> TextTokens:
    """An estimate where the tokenizer cannot be reached."""

    def count(problem: str, images: int) -> int:
        characters = len(problem) + len(system_prompt or "")
        return math.ceil(characters / CHARACTERS_A_TOKEN) + _TEMPLATE_TOKENS + images

    return count


def assumed(limits: Limits, why: str, *, sees: bool) -> Lengths:
    """One row of the worst kind, where the dataset is not here: an image of `max_pixels` where the policy sees any."""
    if not sees:
        return Lengths([TEXT_TOKENS], [0], [f"{why}; assumed: {TEXT_TOKENS} tokens in every prompt"], None)
    tokens = limits.high // limits.unit**2
    note = f"{why}; assumed: one image of {tokens} tokens and {TEXT_TOKENS} tokens of text in every prompt"
    return Lengths([tokens + TEXT_TOKENS], [tokens], [note], None)
