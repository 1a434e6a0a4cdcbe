"""From a problem as its source has it to a row of the schema: what every source has to satisfy is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from adora_vl.errors import UserError
from adora_vl.rewards import canonical_gold, verify_gold
from data_prep.images import UnreadableImageError, clean_image
from data_prep.schema import FEATURES, Row


class RowError(UserError):
    """One row cannot be used: `{row id}: {what is wrong, with the value}; {what to do}`."""

    def __init__(self, row_id: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{row_id}: {wrong}; {remedy}")
        self.row_id = row_id


@dataclass(frozen=True)
class RawProblem:
    """One problem as its source has it, nothing checked but the types.

    `origin`: where a person finds the row to correct it. `images`: encoded. `problem`: without image placeholder.
    `answer`: one of the letters of `choices` where there are choices, else the value.
    """

    id: str
    split: str
    source: str
    origin: str
    images: tuple[bytes, ...]
    problem: str
    answer: str
    choices: tuple[str, ...] | None = None
    goal: str = ""
    shapes: tuple[str, ...] = ()
    solution: str = ""


def to_row(raw: RawProblem, max_pixels: int | None = None) -> Row:
    """The row of the schema, images as Pillow images. Raises `RowError`."""
    if not raw.problem:
        raise RowError(raw.id, "the problem text '' is empty", f"write it in {raw.origin}")
    if not raw.images:
        raise RowError(raw.id, "images [] is empty", f"add the diagram in {raw.origin}")
    images = []
    for index, encoded in enumerate(raw.images):
        try:
            images.append(clean_image(encoded, max_pixels))
        except UnreadableImageError as error:
            wrong = f"image {index} ({len(encoded)} bytes) is not readable ({error})"
            raise RowError(raw.id, wrong, f"replace it in {raw.origin}") from error
    gold = raw.answer if raw.choices is None else _chosen(raw, raw.choices)
    return {
        "id": raw.id,
        "images": images,
        "problem": raw.problem,
        "answer": checked_gold(gold, raw.choices, row_id=raw.id, origin=raw.origin),
        "answer_raw": raw.answer,
        "choices": None if raw.choices is None else list(raw.choices),
        "split": raw.split,
        "source": raw.source,
        "meta": {
            **dict.fromkeys(FEATURES["meta"], ""),
            "goal": raw.goal,
            "shapes": list(raw.shapes),
            "solution": raw.solution,
        },
    }


def checked_gold(gold: str, choices: Sequence[str] | None, *, row_id: str, origin: str) -> str:
    """The gold in canonical form. Raises `RowError` if it would not be graded as right against itself."""
    reason = verify_gold(gold, choices)
    if reason:
        raise RowError(
            row_id,
            f"the gold answer {gold!r} cannot be graded against itself ({reason})",
            f"write one number or closed form, such as 12 or 5\\sqrt{{3}}, in {origin}",
        )
    return canonical_gold(gold)


def _chosen(raw: RawProblem, choices: Sequence[str]) -> str:
    """The value of the choice that the answer letter names."""
    letters = ascii_uppercase[: len(choices)]
    if not choices:
        raise RowError(raw.id, "choices [] is empty", f"list the choices in {raw.origin}")
    if len(raw.answer) != 1 or raw.answer not in letters:
        wrong = f"the answer {raw.answer!r} is not the letter of one of its {len(choices)} choices"
        raise RowError(raw.id, wrong, f"write one of {', '.join(letters)} in {raw.origin}")
    value = choices[letters.index(raw.answer)]
    if not value.strip():
        raise RowError(raw.id, f"choice {raw.answer}, the right one, is {value!r}", f"write its value in {raw.origin}")
    return value
