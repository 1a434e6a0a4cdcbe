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

from adora_vl.data.dataset import TYPE_BY_META_FIELD, Row
from adora_vl.data.images import PixelLimits, UnreadableImageError, clean_image
from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.data.rows import fault_in_row
from adora_vl.rewards import canonical_gold, verify_gold
from adora_vl.rewards.structured import parse_reference
from adora_vl.utils.errors import UserError

# Stands in a remedy for the place of the row, `write it in {ROW_LOCATION}`, where the code does not
# know it. The error of the row has the place itself instead: `write it in line 14 of train.csv`.
ROW_LOCATION = "\0location\0"


class RowError(UserError):
    """A row cannot be used, and goes into the quarantine, the file of such rows.

    The message is `ROW_ID: WHAT IS WRONG, WITH THE VALUE; WHAT TO DO`.

    Attributes:
        row_id: the id of the row.
        sentence: the message without the id.
        reason: the broken rule in one word, such as `image_truncated`.
        original_files: the bytes of the row's files in its source, for the quarantine.
        record: its texts by their columns, for the quarantine.
        further_faults: the errors of other faults of the same row.
    """

    def __init__(
        self,
        row_id: str,
        reason: str,
        wrong: str,
        remedy: str,
        *,
        original_files: Sequence[bytes] = (),
        record: dict[str, Any] | None = None,
    ) -> None:
        """Describe the fault: `wrong` says what is wrong, and `remedy` what to do."""
        super().__init__(row_id, reason, wrong, remedy)  # pickling needs the arguments
        self.row_id = row_id
        self.sentence = f"{wrong}; {remedy}"
        self.reason = reason
        self.original_files = tuple(original_files)
        self.record = record or {}
        self.further_faults: tuple[RowError, ...] = ()

    def __str__(self) -> str:
        return f"{self.row_id}: {self.sentence}"


@contextmanager
def collect_row_errors() -> Iterator[Callable[..., Any]]:
    """Collect every `RowError` of a row, so that a user sees all its faults at once.

    The `with` block gets a function that calls another one, and returns None where that raises
    `RowError`. At the end of the block the first of these errors is raised, with the others as its
    `further_faults`:

        with collect_row_errors() as try_call:
            images = try_call(read_images, row)
            answer = try_call(read_answer, row)  # also called if the images have a fault
    """
    errors: list[RowError] = []

    def try_call(function: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
        """Return what a function returns; None where it raises `RowError`, which is remembered."""
        try:
            return function(*arguments, **keywords)
        except RowError as error:
            errors.append(error)
            return None

    yield try_call
    if errors:
        first_error = errors[0]
        first_error.further_faults = tuple(errors[1:])
        raise first_error


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
    # With `choices` it is the letter of one of them; its text if `answer_is_text`.
    answer: str
    choices: tuple[str, ...] | None = None
    goal: str = ""
    shapes: tuple[str, ...] = ()
    solution: str = ""
    family: str = ""
    kind: str = ""
    answer_is_text: bool = False
    text_only: bool = False  # it needs no image
    extras: Mapping[str, str | None] = field(default_factory=dict)  # more columns, as texts
    # What the user should know of the row, which is used all the same: keys of `WARNING_TEXTS` with
    # the words for this row as an example, such as {"percent": "geo/train/17 (40%)"}.
    warnings: Mapping[str, str] = field(default_factory=dict)
    # Files of the row in its source that are no images, for the quarantine.
    further_files: tuple[bytes, ...] = ()

    @property
    def original_files(self) -> tuple[bytes, ...]:
        """The bytes of all files that the source has of the row."""
        return (*self.further_files, *self.images)

    def row_error(self, reason: str, wrong: str, remedy: str) -> RowError:
        """Return the error for a fault of this row, with everything that the source has of it.

        Args:
            reason: the broken rule in one word, such as `no_text`.
            wrong: what is wrong.
            remedy: what to do, where `ROW_LOCATION` stands for the place of the row.
        """
        record = {
            "problem": self.problem,
            "answer": self.answer,
            "choices": self.choices and list(self.choices),
        }
        return RowError(
            row_id=self.id,
            reason=reason,
            wrong=wrong,
            remedy=remedy.replace(ROW_LOCATION, self.origin),
            original_files=self.original_files,
            record=record,
        )


# A function for each row, which reads it. It can be pickled, so that another process can call it.
RowReaders = Iterator[Callable[[], RawProblem]]


def to_row(raw: RawProblem, limits: PixelLimits) -> Row:
    """Return a problem as a row of a data set, with its pictures decoded and its answer checked.

    The pictures become Pillow images, resized so that their pixels are inside `limits`.

    Raises `RowError` for a problem without text or pictures, for a picture that cannot be used, for
    a reference answer that no answer can equal, and for control tokens in the text.
    """
    if not raw.problem.strip():
        raise raw.row_error(
            "no_text", f"the problem text {raw.problem!r} is empty", f"write it in {ROW_LOCATION}"
        )
    if not raw.images and not raw.text_only:
        raise raw.row_error("no_image", "images [] is empty", f"add the diagram in {ROW_LOCATION}")
    # `try_call` returns None for a function that raises `RowError`. The errors are raised together
    # at the end of the block, so that a user sees all faults of a row at once.
    with collect_row_errors() as try_call:
        images = try_call(_clean_images, raw, limits)
        gold = try_call(_gold, raw)
    meta = {
        **dict.fromkeys(TYPE_BY_META_FIELD, ""),  # all keys of the schema, in its order
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
    fault = fault_in_row(row)  # `WHAT IS WRONG; WHAT TO DO`, or None
    if fault:
        wrong, _, remedy = fault.partition("; ")
        reason = "placeholder" if IMAGE_PLACEHOLDER in raw.problem else "control_token"
        raise raw.row_error(reason, wrong, f"{remedy}, in {ROW_LOCATION}")
    return row


def _clean_images(raw: RawProblem, limits: PixelLimits) -> list[Image.Image]:
    """Decode the pictures of a problem, and resize those that are out of the limits.

    Raises `RowError` for one that is broken, or cannot be brought into the limits.
    """
    images = []
    for number, encoded in enumerate(raw.images):
        try:
            image = clean_image(encoded, limits)
        except UnreadableImageError as error:
            wrong = f"image {number} ({len(encoded)} bytes) is not usable ({error})"
            raise raw.row_error(error.reason, wrong, f"replace it in {ROW_LOCATION}") from error
        images.append(image)
    return images


def can_encode_utf8(text: str) -> bool:
    """Return whether a text can be stored as UTF-8.

    JSON can spell half of a surrogate pair, which is no character.
    """
    return re.search("[\ud800-\udfff]", text) is None


def looks_like_option_letter(text: str) -> bool:
    """Return whether the text of a choice, such as `D` or `(D)`, looks like the letter of one.

    It may be the name of a point. As a reference answer it would be taken for choice D.
    """
    return re.fullmatch(r"[A-Z]|\([A-Z]\)", canonical_gold(text)) is not None


def _gold(raw: RawProblem) -> str:
    """Return the reference answer of a problem in the grader's canonical form.

    Where the answer is the letter of a choice, the reference answer is the choice's text: B of the
    choices 3 and 4 gives 4. It stays the letter where the text would itself be taken for a letter.

    Raises `RowError` for a reference answer to which no answer would be graded as equal.
    """
    if raw.choices is None:
        return check_gold(raw.answer, raw.row_error)
    gold = raw.answer
    if not raw.answer_is_text:  # the answer is a letter
        choice = _choice_of_letter(raw, raw.choices)
        if not looks_like_option_letter(choice):
            gold = choice
    ungradable_reason = verify_gold(gold, raw.choices)
    if ungradable_reason:
        raise _ungradable_error(gold, ungradable_reason, raw.row_error)
    return canonical_gold(gold)


# Makes the error for a fault of a row from the broken rule, what is wrong, and what to do, as
# `RawProblem.row_error` does.
MakeRowError = Callable[[str, str, str], RowError]


def check_gold(gold: str, row_error: MakeRowError) -> str:
    """Return the reference answer of an open question in the grader's canonical form.

    For example, `3, -4` gives `3,-4`.

    Raises `RowError`, which `row_error` makes, in two cases:

    - The grader finds no answer equal to it. `3,5` may be a decimal or two answers.
    - It has digits or mathematical signs that cannot be read, as `x#$`. Then only an answer with
      the same signs would be right.
    """
    # The grader says what an answer is (`type`, such as `number` or `text`), and for a text also
    # why it is nothing else (`reason`). Empty braces mean nothing to it: without them
    # `45${}^\circ$` is read as 45 degrees.
    if parse_reference(gold).reason == "not_read":
        without_braces = re.sub(r"\{\s*\}", " ", gold).strip()
        if parse_reference(without_braces).type in ("number", "expression", "percentage"):
            gold = without_braces
    ungradable_reason = verify_gold(gold)
    if ungradable_reason:
        raise _ungradable_error(gold, ungradable_reason, row_error)
    is_unread = parse_reference(gold).reason == "not_read"
    has_mathematics = re.search(r"[0-9$^#]|\\(?:sqrt|frac)", gold) is not None
    if is_unread and has_mathematics:
        wrong = (
            f"the right answer {gold!r:.200} can be read as a text of signs alone, which hardly "
            "any answer meets"
        )
        raise row_error(
            "gold_signs", wrong, f"{_GOLD_REMEDY}, without other signs or words, in {ROW_LOCATION}"
        )
    return canonical_gold(gold)


_GOLD_REMEDY = r"write one answer such as 12, 5\sqrt{3}, (3, -4) or x < 5, and several as 4; -4"


def _ungradable_error(gold: str, grader_reason: str, row_error: MakeRowError) -> RowError:
    """Return the error of a reference answer to which no answer would be graded as equal.

    `grader_reason` is what `verify_gold` says: the grader's rule, and after a colon the remedy that
    it proposes, as `decimal_comma: write 3.5`. `row_error` makes the error.
    """
    rule, _, remedy = grader_reason.partition(": ")
    if rule == "decimal_comma":
        remedy += "; --decimal-comma reads all as decimals"
    has_letter_before_value = re.match(r"\s*[(（]?[A-H][)）]?\s*[.:：、)]\s*\S", gold)  # `A. 3`
    if has_letter_before_value:
        remedy = (
            "name the options, choices=COLUMN, so that the letter is one, or write the value alone"
        )
    reason = f"gold_{rule}" if remedy else "gold"
    wrong = f"with the right answer {gold!r:.200} no answer would be graded as right ({rule})"
    return row_error(reason, wrong, f"{remedy or _GOLD_REMEDY}, in {ROW_LOCATION}")


def _choice_of_letter(raw: RawProblem, choices: Sequence[str]) -> str:
    """Return the text of the choice whose letter is the answer of a problem: B of 3 and 4 gives 4.

    Raises `RowError` where there is no such choice, or it is empty.
    """
    letters = ascii_uppercase[: len(choices)]
    if not choices:
        raise raw.row_error(
            "no_choices", "choices [] is empty", f"list the choices in {ROW_LOCATION}"
        )
    if len(raw.answer) != 1 or raw.answer not in letters:
        wrong = (
            f"the answer {raw.answer!r:.200} is not the letter of one of its {len(choices)} choices"
        )
        raise raw.row_error(
            "letter_without_choice", wrong, f"write one of {', '.join(letters)} in {ROW_LOCATION}"
        )
    choice = choices[letters.index(raw.answer)]
    if not choice.strip():
        wrong = f"choice {raw.answer}, the right one, is {choice!r}"
        raise raw.row_error("letter_without_choice", wrong, f"write its value in {ROW_LOCATION}")
    return choice
