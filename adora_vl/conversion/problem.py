"""Turns a problem from any source into a row of the schema, and checks what every row must satisfy.

A source reads each problem as a `RawProblem`. `to_row` cleans its pictures, brings its gold answer
into the canonical form, and refuses with `RowError` what no training could use.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from PIL import Image

from adora_vl.data.dataset import KIND_BY_META_FIELD, Row
from adora_vl.data.images import SMALLEST_TOKEN_SIDE, UnreadableImageError, clean_image
from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.data.rows import problem_with_row
from adora_vl.rewards import canonical_gold, verify_gold
from adora_vl.rewards.forms import parse_reference
from adora_vl.utils.errors import UserError


class RowError(UserError):
    """A row cannot be used; the message is `ROW_ID: WHAT IS WRONG, WITH THE VALUE; WHAT TO DO`.

    `kind` is the broken rule, such as `image_truncated`. `originals` are the row's bytes in its
    source, and `record` its texts, both for the quarantine.
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
        """Begin an error of the row `row_id`. `wrong`: what is wrong; `remedy`: what to do."""
        super().__init__(row_id, kind, wrong, remedy)  # pickling needs the arguments
        self.row_id = row_id
        self.sentence = f"{wrong}; {remedy}"
        self.kind = kind
        self.originals = tuple(originals)
        self.record = record or {}
        self.further_faults: tuple[RowError, ...] = ()

    def __str__(self) -> str:
        return f"{self.row_id}: {self.sentence}"


@contextmanager
def several_faults() -> Iterator[Callable[..., Any]]:
    """Collect the faults of a row, so that a user sees all of them in one pass.

    The `with` block gets a function that calls another one, and returns None where that raises
    `RowError`. At the end of the block the first of these errors is raised, with the others as its
    `further_faults`.
    """
    faults: list[RowError] = []

    def call(function: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
        """Return what a function returns; None where it raises `RowError`, which is remembered."""
        try:
            return function(*arguments, **keywords)
        except RowError as error:
            faults.append(error)
            return None

    yield call
    if faults:
        faults[0].further_faults = tuple(faults[1:])
        raise faults[0]


# The largest file of a source that is read, since a small zip file can unpack to terabytes.
MAX_FILE_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class RawProblem:
    """One problem as it is in its source, of which only the types were checked."""

    id: str
    split: str
    source: str
    origin: str  # where a person finds and corrects the row
    images: tuple[bytes, ...]  # encoded
    problem: str  # without image placeholder, or with one for each image
    # The letter of a choice where there are choices, unless `value_answer` says that it is a value.
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
    # What is noted of the row, by the names of `NOTES`, with the row as an example.
    notes: Mapping[str, str] = field(default_factory=dict)
    other_files: tuple[
        bytes, ...
    ] = ()  # further files of the row in its source, for the quarantine

    @property
    def originals(self) -> tuple[bytes, ...]:
        """All bytes that the source has of the row."""
        return (*self.other_files, *self.images)

    def refuse(self, kind: str, wrong: str, remedy: str) -> RowError:
        """Make the error that refuses this row, with everything that the source has of it."""
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


# Each call reads one row. It can be pickled, so that another process can make it.
RowReaders = Iterator[Callable[[], RawProblem]]


@dataclass(frozen=True)
class PixelLimits:
    """The limits in which the pixels of an image have to be; None means no limit."""

    low: int | None = None
    high: int | None = None
    unit: int = SMALLEST_TOKEN_SIDE  # the side of an image token in pixels


def to_row(raw: RawProblem, limits: PixelLimits | None = None) -> Row:
    """Make the row of a data set out of a problem: decode its pictures, and check its answer.

    The pictures become Pillow images, resized so that their pixels are inside `limits`.

    Raises `RowError` for a problem without text or pictures, for a picture that cannot be used, for
    a reference answer that no answer can equal, and for control tokens in the text.
    """
    limits = limits or PixelLimits()
    if not raw.problem.strip():
        raise raw.refuse("no_text", f"the problem text {raw.problem!r} is empty", "write it in")
    if not raw.images and not raw.text_only:
        raise raw.refuse("no_image", "images [] is empty", "add the diagram in")
    # `read_part` calls a function, and returns None where that raises `RowError`. The errors are
    # raised together at the end of the block, so that a user sees all faults of a row at once.
    with several_faults() as read_part:
        images = read_part(
            lambda: [_clean_image(raw, number, limits) for number in range(len(raw.images))]
        )
        gold = read_part(_gold, raw)
    meta = {
        **dict.fromkeys(KIND_BY_META_FIELD, ""),  # all keys of the schema, in its order
        "goal": raw.goal,
        "shapes": list(raw.shapes),
        "solution": raw.solution,
        "family": raw.family,
        "kind": raw.kind,
    }
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
    # A sentence such as `WHAT IS WRONG; WHAT TO DO`, or None.
    fault = problem_with_row(row)
    if fault:
        wrong, _, remedy = fault.partition("; ")
        kind = "placeholder" if IMAGE_PLACEHOLDER in raw.problem else "control_token"
        raise raw.refuse(kind, wrong, f"{remedy}, in")
    return row


def _clean_image(raw: RawProblem, number: int, limits: PixelLimits) -> Image.Image:
    """Decode and resize one picture of a problem.

    Raises `RowError` for one that is broken or out of the limits.
    """
    encoded = raw.images[number]
    try:
        return clean_image(encoded, low=limits.low, high=limits.high, unit=limits.unit)
    except UnreadableImageError as error:
        wrong = f"image {number} ({len(encoded)} bytes) is not usable ({error})"
        raise raw.refuse(error.kind, wrong, "replace it in") from error


def storable(value: str) -> bool:
    """Return whether a text can be stored as UTF-8.

    JSON can spell half of a surrogate pair, which is no character.
    """
    return re.search("[\ud800-\udfff]", value) is None


def reads_as_letter(text: str) -> bool:
    """Return whether a choice would be taken for the letter of a choice.

    For example, the choice `D`, which is the name of a point.
    """
    return re.fullmatch(r"[A-Z]|\([A-Z]\)", canonical_gold(text)) is not None


def _gold(raw: RawProblem) -> str:
    """Return the canonical gold answer of a problem.

    Where the answer is the letter of a choice, the gold is the choice's value: B of the choices 3
    and 4 gives 4. It stays the letter where the value would itself be taken for a letter.

    Raises `RowError` where no answer could meet it.
    """
    if raw.choices is None:
        return check_gold(raw.answer, raw.refuse)
    gold = raw.answer
    if not raw.value_answer:  # the answer is a letter
        value = _chosen(raw, raw.choices)
        if not reads_as_letter(value):
            gold = value
    reason = verify_gold(gold, raw.choices)
    if reason:
        raise raw.refuse(*_ungradable(gold, reason))
    return canonical_gold(gold)


def check_gold(gold: str, refuse: Callable[[str, str, str], RowError]) -> str:
    """Return the canonical form of an open question's answer.

    For example, `3, -4` gives `3,-4`.

    Raises `RowError`, which `refuse` makes, in two cases:

    - The grader finds no answer equal to it. `3,5` may be a decimal or two answers.
    - It has digits or mathematical signs that cannot be read, as `x#$`. Then only an answer with
      the same signs would be right.
    """
    # Empty braces mean nothing. Without them `45${}^\circ$` is read as 45 degrees.
    if parse_reference(gold).reason == "not_read":
        without_braces = re.sub(r"\{\s*\}", " ", gold).strip()
        if parse_reference(without_braces).kind in ("number", "expression", "percentage"):
            gold = without_braces
    reason = verify_gold(gold)
    if reason:
        raise refuse(*_ungradable(gold, reason))
    if parse_reference(gold).reason == "not_read" and re.search(r"[0-9$^#]|\\(?:sqrt|frac)", gold):
        wrong = (
            f"the right answer {gold!r:.200} can be read as a text of signs alone, which hardly "
            "any answer meets"
        )
        raise refuse("gold_signs", wrong, f"{_A_GOLD}, without other signs or words, in")
    return canonical_gold(gold)


_A_GOLD = r"write one answer such as 12, 5\sqrt{3}, (3, -4) or x < 5, and several as 4; -4"


def _ungradable(gold: str, reason: str) -> tuple[str, str, str]:
    """Return the arguments of `RawProblem.refuse` for a reference answer that cannot be graded.

    These are the kind of the fault, what is wrong, and what to do. `reason` comes from the grader:
    its rule, and after a colon the remedy that it proposes, as `decimal_comma: write 3.5`.
    """
    rule, _, remedy = reason.partition(": ")
    if rule == "decimal_comma":
        remedy += "; --decimal-comma reads all as decimals"
    has_letter_before_value = re.match(r"\s*[(（]?[A-H][)）]?\s*[.:：、)]\s*\S", gold)  # `A. 3`
    if has_letter_before_value:
        remedy = (
            "name the options, choices=COLUMN, so that the letter is one, or write the value alone"
        )
    kind = f"gold_{rule}" if remedy else "gold"
    wrong = f"with the right answer {gold!r:.200} no answer would be graded as right ({rule})"
    return kind, wrong, f"{remedy or _A_GOLD}, in"


def _chosen(raw: RawProblem, choices: Sequence[str]) -> str:
    """Return the value of the choice that the answer letter names.

    Raises `RowError` where there is no such choice, or it is empty.
    """
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
