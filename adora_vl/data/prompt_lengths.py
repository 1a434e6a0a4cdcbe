"""Lengths of a run's prompts, in tokens.

They are known before a weight is loaded. A prompt's text is counted by the model's own tokenizer.
Its image tokens follow from the sizes of its images, which their headers say, so that nothing is
decoded: 3,000 rows take about a second.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # pyarrow ships no types
from tqdm import tqdm

from adora_vl.data.images import (
    DEFAULT_FAMILY,
    VISION_BY_FAMILY,
    PixelLimits,
    image_tokens,
    open_picture,
)
from adora_vl.data.token_counters import TokenCounter
from adora_vl.models.families import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

_BAR_DELAY_S = 2.0  # after which a progress bar is shown
_BATCH_TEXTS = 1000  # texts in one call of a tokenizer, which works on them in parallel

# assumed for a prompt that is not known: Geometry3K's have 60 to 250 with the system prompt
ASSUMED_TEXT_TOKENS = 300
Size = tuple[int, int]  # of an image: width and height in pixels
# For each row its id, its text, and the sizes of its images; None for an image of unknown size.
Rows = Iterable[tuple[str, Any, Sequence[Size | None]]]


@dataclass(frozen=True)
class PromptLengths:
    """The lengths of prompts in tokens, with an entry for each row."""

    ids: list[str]
    prompt_tokens: list[int]  # with those of images
    image_tokens: list[int]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, with its images."""
        return max(self.prompt_tokens)

    @property
    def most_image_tokens(self) -> int:
        """The most image tokens of a prompt, which need not be the longest one."""
        return max(self.image_tokens)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest prompt without its images."""
        lengths = zip(self.prompt_tokens, self.image_tokens, strict=True)
        return max(prompt_tokens - image_tokens for prompt_tokens, image_tokens in lengths)

    def select_rows(self, indices: Sequence[int]) -> PromptLengths:
        """Return the lengths of the rows with these indices."""
        return PromptLengths(
            ids=[self.ids[index] for index in indices],
            prompt_tokens=[self.prompt_tokens[index] for index in indices],
            image_tokens=[self.image_tokens[index] for index in indices],
        )


def pixel_limits_of(
    processor: ProcessorMixin,
    model: PretrainedConfig,
    min_pixels: int | None,
    max_pixels: int | None,
) -> PixelLimits:
    """Return the pixel limits between which images will be resized.

    They are the run's, else the processor's own, else those published for the model's family.

    Args:
        processor: the model's processor.
        model: the model's config.
        min_pixels: the run's lower limit; None where it has none.
        max_pixels: the run's upper limit.
    """
    family = family_of(model)
    published = VISION_BY_FAMILY[DEFAULT_FAMILY]
    if family is not None and family.vision is not None:
        published = family.vision
    # An image processor calls its limits the shortest and the longest edge, and counts pixels.
    processor_limits = dict(getattr(getattr(processor, "image_processor", None), "size", {}))
    if min_pixels is None:
        min_pixels = processor_limits.get("shortest_edge", published.min_pixels)
    if max_pixels is None:
        max_pixels = processor_limits.get("longest_edge", published.max_pixels)
    token_side = published.token_side
    vision_config = getattr(model, "vision_config", None)
    if family is not None and vision_config is not None:
        token_side = vision_config.patch_size * vision_config.spatial_merge_size
    return PixelLimits(min_pixels=min_pixels, max_pixels=max_pixels, token_side=token_side)


def assume_lengths(limits: PixelLimits, *, sees_images: bool) -> tuple[PromptLengths, str]:
    """Return assumed lengths for data that are not at hand, and words that say what is assumed.

    The lengths are those of a single row with the largest image. `limits` say how large it may be,
    and `sees_images` whether the model reads images.
    """
    if not sees_images:
        lengths = PromptLengths(ids=["?"], prompt_tokens=[ASSUMED_TEXT_TOKENS], image_tokens=[0])
        return lengths, f"assumed: {ASSUMED_TEXT_TOKENS} tokens in every prompt"
    tokens = limits.max_pixels // limits.token_side**2
    lengths = PromptLengths(
        ids=["?"], prompt_tokens=[tokens + ASSUMED_TEXT_TOKENS], image_tokens=[tokens]
    )
    words = f"one image of {tokens} tokens and {ASSUMED_TEXT_TOKENS} tokens of text in every prompt"
    return lengths, f"assumed: {words}"


def measure_prompts(
    rows: Rows,
    counter: TokenCounter,
    limits: PixelLimits,
    total: int,
    *,
    show_progress: bool = True,
) -> PromptLengths:
    """Return the lengths of the prompts of rows, in tokens.

    Args:
        rows: for each row its id, its text, and the sizes of its images. An image of unknown size
            (None) counts nothing.
        counter: counts the tokens of texts.
        limits: the limits between which images are resized.
        total: the number of rows.
        show_progress: whether to show a progress bar, on a terminal and where it takes longer.

    Raises:
        UserError: the model's processor refuses an image.
    """
    lengths = PromptLengths(ids=[], prompt_tokens=[], image_tokens=[])
    # With None tqdm disables the bar unless it writes to a terminal.
    disable = None if show_progress else True
    bar = tqdm(rows, "prompt lengths", total, unit="row", delay=_BAR_DELAY_S, disable=disable)
    row_iterator = iter(bar)
    while batch := list(islice(row_iterator, _BATCH_TEXTS)):
        texts = [text for _, text, _ in batch]
        image_counts = [len(sizes) for _, _, sizes in batch]
        token_counts = counter(texts, image_counts)
        for index, (row_id, _, sizes) in enumerate(batch):
            row_image_tokens = 0
            for size in sizes:
                if size is not None:
                    row_image_tokens += image_tokens(size, limits, row_id)
            # The counter takes each image for one token.
            text_tokens = token_counts[index] - image_counts[index]
            lengths.ids.append(row_id)
            lengths.prompt_tokens.append(text_tokens + row_image_tokens)
            lengths.image_tokens.append(row_image_tokens)
    return lengths


def stored_image_sizes(table: pa.Table) -> Iterator[list[Size | None]]:
    """Yield for each row of a table the sizes of its images, without copying their bytes.

    The table has our schema. A size is None where the image cannot be read.
    """
    for chunk in table["images"].chunks:
        values = iter(chunk.flatten())
        for count in chunk.value_lengths().to_pylist():
            image_count = count or 0  # None for a row whose list is null
            yield [_size_of_stored_image(stored) for stored in islice(values, image_count)]


def _size_of_stored_image(stored: pa.StructScalar) -> Size | None:
    """Return the width and height of a stored image; None where it cannot be read."""
    try:
        content = stored["bytes"]
        source = io.BytesIO(content.as_buffer()) if content.is_valid else stored["path"].as_py()
        with open_picture(source) as opened:
            return opened.size
    # Pillow raises what its formats raise, and a null in place of an image has no fields.
    except Exception:
        return None
