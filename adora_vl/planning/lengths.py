"""Prompt lengths and image tokens over a dataset, without decoding an image or loading a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from adora_vl.data.dataset import row_count, stored_rows
from adora_vl.data.loading import mixed_rows
from adora_vl.data.prompt_lengths import (
    ContextLimit,
    LengthCheck,
    Limits,
    Measured,
    Size,
    TextTokens,
    measured,
    size_of,
)
from adora_vl.data.prompts import Template
from adora_vl.data.rows import require_sound_prompt
from adora_vl.utils.cli import amount

TEXT_TOKENS = 300  # assumed for a prompt that is not known: Geometry3K's have 60 to 250 with the system prompt
CHARACTERS_A_TOKEN = 2.5  # assumed where the tokenizer is not at hand; English mathematics has 3 to 4
_TEMPLATE_TOKENS = 30  # roles and markers of Qwen's chat template around two messages


@dataclass(frozen=True)
class Lengths:
    """One entry per row: tokens of the whole prompt, and those of its images."""

    prompt: list[int]
    image: list[int]
    notes: list[str]  # what was assumed
    rows: int | None  # that the run trains on; None where the dataset is not here
    ids: list[str] = field(default_factory=list)  # empty where the dataset is not here

    @property
    def longest(self) -> tuple[int, int]:
        """The longest prompt and the most image tokens, which need not be one row's."""
        return max(self.prompt), max(self.image)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest prompt without its images."""
        return max(prompt - image for prompt, image in zip(self.prompt, self.image, strict=True))


def measure(
    folder: Path,
    split: str,
    text_tokens: TextTokens,
    limits: Limits,
    most: int | None = None,
    made: Template | None = None,
) -> Lengths:
    """Every row's lengths, or those of the first `most` rows. Raises `UserError` where there is no such split, and for
    a prompt that a run would refuse.

    `made`: the template of the problems (`adora_prompt`).
    """
    total = row_count(folder, split)
    count = min(total, most or total)
    where = f"{str(folder)!r} split {split!r}"

    def rows() -> Iterator[tuple[str, str, list[Size | None]]]:
        for row in islice(stored_rows(folder, split), count):
            sizes = [size_of(image) for image in row["images"] or []]
            problem = row["problem"]
            if made is not None:
                made.check_columns(row, where)
                problem = made(row)
                require_sound_prompt(row["id"], problem, len(sizes), where)
            yield row["id"], problem, sizes

    found = measured(rows(), text_tokens, limits, count)
    notes = [] if count == total else [f"measured on the first {count} of {total} rows (--rows)"]
    return Lengths(found.prompt, found.image, notes, total, found.ids)


def held_against(sets: Sequence[Lengths], limit: ContextLimit) -> LengthCheck:
    """The prompts of all data sets together, held against the run's limit."""
    return LengthCheck(
        limit,
        Measured(
            [name for one in sets for name in one.ids],
            [length for one in sets for length in one.prompt],
            [length for one in sets for length in one.image],
        ),
    )


def only(sets: Sequence[Lengths], kept: Sequence[int]) -> list[Lengths]:
    """The data sets with the rows of these numbers only; the numbers count through all sets."""
    first, left = 0, []
    for one in sets:
        end = first + len(one.prompt)
        numbers = [number - first for number in kept if first <= number < end]
        first = end
        left.append(
            replace(
                one,
                prompt=[one.prompt[number] for number in numbers],
                image=[one.image[number] for number in numbers],
                ids=[one.ids[number] for number in numbers],
                rows=(one.rows or 0) - len(one.prompt) + len(numbers),
            )
        )
    return left


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
        [name for one in sets for name in one.ids],
    )


def character_counter(system_prompt: str | None) -> TextTokens:
    """An estimate where the tokenizer cannot be reached."""

    def count(problem: str, images: int) -> int:
        characters = len(problem) + len(system_prompt or "")
        return math.ceil(characters / CHARACTERS_A_TOKEN) + _TEMPLATE_TOKENS + images

    return count


def assumed(limits: Limits, why: str, *, sees: bool) -> Lengths:
    """One row of the worst kind, where the dataset is not here: an image of `max_pixels`, if the policy sees images."""
    if not sees:
        return Lengths([TEXT_TOKENS], [0], [f"{why}; assumed: {TEXT_TOKENS} tokens in every prompt"], None)
    tokens = limits.high // limits.unit**2
    note = f"{why}; assumed: one image of {tokens} tokens and {TEXT_TOKENS} tokens of text in every prompt"
    return Lengths([tokens + TEXT_TOKENS], [tokens], [note], None)
