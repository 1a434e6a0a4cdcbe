"""Turns a problem from any source into a row of the schema, and checks what every row must satisfy."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from adora_vl.data.dataset import META, Row
from adora_vl.data.images import UNIT, UnreadableImageError, clean_image
from adora_vl.data.prompts import PLACEHOLDER
from adora_vl.data.rows import problem_with_row
from adora_vl.rewards import canonical_gold, verify_gold
from adora_vl.rewards.forms import read
from adora_vl.utils.errors import UserError


class RowError(UserError):
    """One row cannot be used: `{row id}: {what is wrong, with the value}; {what to do}`.

    `kind`: the broken rule, as `image_truncated`. `originals`: the row's bytes in its source, and
    `record` its texts.
    """

    def __init__(
        self,
        row_id: str,
        kind: str,
        wrong: str,
        remedy: str,
        *,
        originals: Sequence[bytes] = (),
        record: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(row_id, kind, wrong, remedy)  # so that it can be pickled
        self.row_id = row_id
        self.sentence = f"{wrong}; {remedy}"
        self.kind = kind
        self.originals = tuple(originals)
        self.record = record or {}
        self.more: tuple[RowError, ...] = ()  # what else is wrong with the row

    def __str__(self) -> str:
        return f"{self.row_id}: {self.sentence}"


@contextmanager
def several_faults() -> Iterator[Callable[..., Any]]:
    """Calls parts of the reading of a row, which give None where they raise `RowError`; at the end
    the first is raised, with the others as `more`, so that all that is wrong with a row is found in
    one pass.
    """
    faults: list[RowError] = []

    def tried(part: Callable[..., Any], *given: Any) -> Any:
        try:
            return part(*given)
        except RowError as error:
            faults.append(error)
            return None

    yield tried
    if faults:
        faults[0].more = tuple(faults[1:])
        raise faults[0]


MAX_FILE_BYTES = 64 * 1024**2  # of one file of a source: a small zip file can unpack to terabytes


@dataclass(frozen=True)
class RawProblem:
    """One problem as it is in its source. Only the types are checked."""

    id: str
    split: str
    source: str
    origin: str  # where a person finds and corrects the row
    images: tuple[bytes, ...]  # encoded
    problem: str  # without image placeholder, or with one for each image
    # the letter of one of the choices, where there are any and it is no `value_answer`; else a
    # value
    answer: str
    choices: tuple[str, ...] | None = None
    goal: str = ""
    shapes: tuple[str, ...] = ()
    solution: str = ""
    family: str = ""
    kind: str = ""
    value_answer: bool = False
    text_only: bool = False  # it needs no image
    extras: Mapping[str, str | None] = field(default_factory=dict)  # more columns, as texts
    # what is counted of such rows, by the names of `NOTES`
    notes: Mapping[str, str] = field(default_factory=dict)
    other_files: tuple[bytes, ...] = ()  # that the source has of the row, for the quarantine

    @property
    def originals(self) -> tuple[bytes, ...]:
        return (*self.other_files, *self.images)

    def refuse(self, kind: str, wrong: str, remedy: str) -> RowError:
        """The error for this row, with everything that the source has of it."""
        record = {
            "problem": self.problem,
            "answer": self.answer,
            "choices": self.choices and list(self.choices),
        }
        return RowError(
            row_id=self.id,
            kind=kind,
            wrong=wrong,
            remedy=f"{remedy} {self.origin}",
            originals=self.originals,
            record=record,
        )


# calls that can be pickled, so that other processes can make them
Reads = Iterator[Callable[[], RawProblem]]


@dataclass(frozen=True)
class PixelLimits:
    low: int | None = None  # pixels of an image; None means no limit
    high: int | None = None
    unit: int = UNIT  # the side of a token


def to_row(raw: RawProblem, limits: PixelLimits | None = None) -> Row:
    """The row of the schema, with Pillow images. Raises `RowError`."""
    limits = limits or PixelLimits()
    if not raw.problem.strip():
        raise raw.refuse("no_text", f"the problem text {raw.problem!r} is empty", "write it in")
    if not raw.images and not raw.text_only:
        raise raw.refuse("no_image", "images [] is empty", "add the diagram in")
    with several_faults() as tried:
        images = tried(
            lambda: [_clean_image(raw, number, limits) for number in range(len(raw.images))]
        )
        gold = tried(_gold, raw)
    meta = {
        **dict.fromkeys(META, ""),
        "goal": raw.goal,
        "shapes": list(raw.shapes),
        "solution": raw.solution,
    }
    meta |= {"family": raw.family, "kind": raw.kind}
    row: Row = {
        "id": raw.id,
        "images": images,
        "problem": raw.problem,
        "answer": gold,
        "answer_raw": raw.answer,
        "choices": list(raw.choices) if raw.choices else None,
        "split": raw.split,
        "source": raw.source,
        "meta": meta,
        **raw.extras,
    }
    wrong, _, remedy = (problem_with_row(row) or "").partition("; ")
    if wrong:
        kind = "placeholder" if PLACEHOLDER in raw.problem else "control_token"
        raise raw.refuse(kind, wrong, f"{remedy}, in")
    return row


def _clean_image(raw: RawProblem, number: int, limits: PixelLimits) -> Any:
    encoded = raw.images[number]
    try:
        return clean_image(encoded, low=limits.low, high=limits.high, unit=limits.unit)
    except UnreadableImageError as error:
        wrong = f"image {number} ({len(encoded)} bytes) is not usable ({error})"
        raise raw.refuse(error.kind, wrong, "replace it in") from error


def storable(value: str) -> bool:
    """Whether a text can be stored.

    JSON can spell half of a surrogate pair, which is no character.
    """
    return re.search("[\ud800-\udfff]", value) is None


def reads_as_letter(text: str) -> bool:
    """Whether a choice such as `D`, the name of a point, would be taken for the letter of a choice."""
    return re.fullmatch(r"[A-Z]|\([A-Z]\)", canonical_gold(text)) is not None


def _gold(raw: RawProblem) -> str:
    chosen = raw.answer if raw.choices is None or raw.value_answer else _chosen(raw, raw.choices)
    if chosen != raw.answer and reads_as_letter(chosen):
        chosen = raw.answer
    if raw.choices is None:
        return check_gold(chosen, raw.refuse)
    reason = verify_gold(chosen, raw.choices)
    if reason:
        raise raw.refuse(*_ungradable(chosen, reason))
    return canonical_gold(chosen)


def check_gold(gold: str, refuse: Callable[[str, str, str], RowError]) -> str:
    """The canonical form of an open question's answer.

    Raises `RowError` where nobody could meet it: it is right against nothing, or a number among
    signs that are not read, so that only the same signs would be right.
    """
    # empty braces say nothing, and stand inside an answer such as `45${}^\circ$`
    if read(gold).reason == "not_read":
        made = re.sub(r"\{\s*\}", " ", gold).strip()
        gold = made if read(made).kind in ("number", "expression", "percentage") else gold
    reason = verify_gold(gold)
    if reason:
        raise refuse(*_ungradable(gold, reason))
    if read(gold).reason == "not_read" and re.search(r"[0-9$^#]|\\(?:sqrt|frac)", gold):
        wrong = (
            f"the gold answer {gold!r:.200} can be read as a text of signs alone, which hardly "
            "any answer meets"
        )
        raise refuse("gold_signs", wrong, f"{_A_GOLD}, without other signs or words, in")
    return canonical_gold(gold)


_A_GOLD = r"write one answer such as 12, 5\sqrt{3}, (3, -4) or x < 5"


def _ungradable(gold: str, reason: str) -> tuple[str, str, str]:
    """The kind of the fault, what is wrong, and what to do."""
    rule, _, spelling = reason.partition(": ")
    if rule == "decimal_comma":
        spelling += "; --decimal-comma reads all as decimals"
    if re.match(r"\s*[(（]?[A-H][)）]?\s*[.:：、)]\s*\S", gold):
        spelling = (
            "name the options, choices=COLUMN, so that the letter is one, or write the value alone"
        )
    wrong = f"the gold answer {gold!r:.200} cannot be met by any answer ({rule})"
    return f"gold_{rule}" if spelling else "gold", wrong, f"{spelling or _A_GOLD}, in"


def _chosen(raw: RawProblem, choices: Sequence[str]) -> str:
    """The value of the choice that the answer letter names."""
    letters = ascii_uppercase[: len(choices)]
    if not choices:
        raise raw.refuse("no_choices", "choices [] is empty", "list the choices in")
    if len(raw.answer) != 1 or raw.answer not in letters:
        wrong = (
            f"the answer {raw.answer!r:.200} is not the letter of one of its {len(choices)} choices"
        )
        raise raw.refuse("letter_without_choice", wrong, f"write one of {', '.join(letters)} in")
    value = choices[letters.index(raw.answer)]
    if not value.strip():
        wrong = f"choice {raw.answer}, the right one, is {value!r}"
        raise raw.refuse("letter_without_choice", wrong, "write its value in")
    return value
