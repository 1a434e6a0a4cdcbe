"""The reference answer of a record and its options, as people write them: a letter, an index, a
text, a number.
"""

import ast
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

from adora_vl.conversion.chat import answer_of_chat
from adora_vl.conversion.columns import ANSWER_IS, Columns
from adora_vl.conversion.placeholders import in_words
from adora_vl.conversion.problem import RowError, reads_as_letter, storable
from adora_vl.conversion.stated import stated_answer
from adora_vl.rewards import canonical_gold, verify_gold
from adora_vl.rewards.completion import boxes_in_a_row
from adora_vl.rewards.thinking import final_part
from adora_vl.utils.cli import GivenTwiceError, read_json, shown

_LETTER = re.compile(r"\(?([A-Z])[).]?")
_SMALL_LETTER = re.compile(r"\(?([a-h])[).]?")
# before an option: `A. 3`, `(A) 3`
_LETTERED = re.compile(r"\(?([A-Z])(?:[).:、]|\s[-–])\s*(?=\S)")
_ANSWER_BLOCK = re.compile(
    r"(?:\s*<think>.*</think>)?\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL
)
_AFTER_SOLUTION = re.compile(r"(?:.*\n\s*)?####\s*(\S.*)", re.DOTALL)  # as GSM8K has them
_INDEX = re.compile(r"[0-9]{1,2}")
Record = Mapping[str, Any]
Refuse = Callable[[str, str, str], RowError]


MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()


def answer_of(
    record: Record, columns: Columns, refuse: Refuse, truths: bool = False
) -> tuple[str, bool]:
    """The reference answer: also that of a whole solution, or of a conversation's last turn; and
    whether it was taken from behind words such as `The answer is`.

    `truths`: the column has truth values. Raises `RowError`.
    """
    column = columns.answer
    value = record.get(column, MISSING)
    value = listed(value, isinstance(value, str) and value.lstrip().startswith("[{"))
    found = number_or_text(answer_of_chat(value) if isinstance(value, list) else value, truths)
    if found is None or not found.strip():
        remedy = "make it a text or a finite number in"
        if isinstance(value, date | time):
            remedy = (
                "Excel has made a date of it: give the column the format Text, and write it "
                "again, in"
            )
        raise refuse("field_type", f"{column!r} is {shown(value)}", remedy)
    block = _ANSWER_BLOCK.fullmatch(found)
    found = block[1] if block else found
    found = final_part(found) or found  # a draft in a block of thinking is no answer
    boxes = boxes_in_a_row(found, answer_tags=False)
    after = _AFTER_SOLUTION.fullmatch(found)
    stated = None
    if boxes and all(boxes):
        found = ", ".join(boxes)
    elif after:
        found = after[1].strip()
    elif not columns.text_answers:
        stated = stated_answer(found)
        found = (stated or found).strip()
    if columns.decimal_comma and isinstance(value, str):
        found = with_points(found, refuse)
    return found, stated is not None


_COMMA = re.compile(r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+|\d+)(?:,|\{,\})(\d+)(?![\d,.])")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:\.\d{3}){2,}(?![\d,.])")
_EITHER = re.compile(r"(?<![\d,.])[1-9]\d{0,2}\.\d{3}(?![\d,.])")
_BRACKETS = re.compile(r"[(\[][^()\[\]]*[)\]]|\\\{[^{}]*\\\}")


def with_points(text: str, refuse: Refuse) -> str:
    """An answer with decimal commas as one with points: `1.234,5` is 1234.5, and `(2,5; 3)` is
    (2.5, 3).

    In brackets without a `;` or `|` commas stand between entries: `(2,3)`. Raises `RowError` for
    `1.234`, which may be either.
    """
    either = _EITHER.search(text)
    if either:
        remedy = f"write {either[0].replace('.', '')} or {either[0].replace('.', ',')} in"
        raise refuse(
            "ambiguous_answer",
            f"with decimal commas the number {shown(either[0])} may be two",
            remedy,
        )
    kept: list[str] = []

    def put_by(match: re.Match[str]) -> str:
        if re.search(r"(?<!\\);|\|", match[0]):
            return match[0]
        kept.append(match[0])
        return "\0"

    made = _BRACKETS.sub(put_by, text.replace("\0", " "))
    made = _COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", made)
    made = _GROUPED.sub(lambda match: match[0].replace(".", ""), made)
    made = re.sub(r"\s*(?<!\\);\s*|(?<=\d)\s*\|\s*(?=[-\d])", ", ", made)
    return re.sub("\0", lambda _: kept.pop(0), made)


def number_or_text(value: Any, truths: bool = False) -> str | None:
    """A text or a finite number as people write it, with `truths` also a truth value; None for
    anything else.
    """
    if isinstance(value, str):
        return value if storable(value) else None
    if isinstance(value, bool):
        return str(value) if truths else None
    if not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # a table with one null makes floats of all its whole numbers
    return format(Decimal(_shortest(value)) if isinstance(value, float) else value, "f")


def _shortest(value: float) -> str:
    """The digits of a float: 0.1 also for 0.10000000149011612, which a column of float32 has for it."""
    digits = repr(value)
    if len(digits) < _DIGITS_OF_A_DOUBLE or abs(value) > _LARGEST_SINGLE or _single(value) != value:
        return digits
    return next(
        text for places in range(1, 18) if _single(float(text := f"{value:.{places}g}")) == value
    )


def _single(value: float) -> float:
    """The nearest float of 32 bits."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


_DIGITS_OF_A_DOUBLE = 14  # characters that a number of single precision has by accident alone
_LARGEST_SINGLE = 3e38
_LONGEST_LIST = 100_000  # characters of a list in Python's spelling


def listed(value: Any, texts_only: bool) -> Any:
    """A cell of a text table that is a list in JSON, or as Python spells one, as that list; else
    the cell as it is.
    """
    if texts_only and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = read_json(value)
        except GivenTwiceError as error:
            return [error]  # what no list may hold, so the row is refused with these words
        except (ValueError, RecursionError):
            try:  # pandas writes a list so
                found = ast.literal_eval(value.strip()) if len(value) < _LONGEST_LIST else value
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return value
        return found if isinstance(found, list) else value
    return value


def choices_of(
    record: Record, columns: Columns, texts_only: bool, refuse: Refuse
) -> tuple[list[str] | None, bool]:
    """The options without letters, None for an open question; and whether one names an image.

    Raises `RowError`.
    """
    names = columns.choices
    if len(names) > 1:  # one option a column; the last ones may be empty
        values = [record.get(name) for name in names]
        while values and values[-1] in (None, ""):
            values.pop()
        value: Any = values or None
    else:
        value = listed(record.get(names[0]), texts_only) if names else None
    if value is None or value in ([], ()) or (isinstance(value, str) and not value.strip()):
        return None, False
    name = ", ".join(names)
    found = [number_or_text(item) for item in value] if isinstance(value, list | tuple) else [None]
    if any(item is None or not item.strip() for item in found):
        raise refuse(
            "field_type",
            f"{name!r} is {shown(value)}",
            "make it a list of texts or numbers, or null, in",
        )
    options = [item.strip() for item in found if item is not None]
    letters = [_LETTERED.match(option) for option in options]
    if all(
        match and match[1] == letter
        for match, letter in zip(letters, ascii_uppercase, strict=False)
    ):
        options = [
            option[match.end() :] for option, match in zip(options, letters, strict=True) if match
        ]
    if columns.decimal_comma:
        texts = [isinstance(given, str) for given in value]
        options = [
            with_points(item, refuse) if text else item
            for item, text in zip(options, texts, strict=True)
        ]
    worded = [in_words(item) for item in options]
    if None in worded:
        remedy = "number its images as the problem does, in"
        raise refuse(
            "placeholder",
            f"{name!r} is {shown(value)}, an option with the mark of an image",
            remedy,
        )
    return [item for item in worded if item is not None], worded != options


def letter_of(answer: str, choices: Sequence[str], answer_is: str, refuse: Refuse) -> str:
    """The letter of the right option, named by letter, text or index.

    Raises `RowError`, also where it may be two.
    """
    letters = ascii_uppercase[: len(choices)]
    if len(choices) > len(ascii_uppercase):
        raise refuse(
            "field_type",
            f"there are {len(choices)} options",
            f"leave at most {len(ascii_uppercase)} in",
        )
    index = int(answer) if _INDEX.fullmatch(answer) else None
    if index is not None and answer_is.startswith("index"):
        index -= answer_is != "index"
        if 0 <= index < len(choices):
            return letters[index]
        wrong = f"the answer {answer} is the index of none of {len(choices)} options"
        raise refuse("letter_without_choice", wrong, "correct it in")
    small = _SMALL_LETTER.fullmatch(answer)
    if small and answer not in choices:
        answer = small[1].upper()
    match = _LETTER.fullmatch(answer)
    by_letter = match[1] if match and match[1] in letters else None
    by_text = [letter for letter, choice in zip(letters, choices, strict=True) if choice == answer]
    # a prepared folder has the canonical form of the right option
    if not by_text and not by_letter:
        by_text = [
            letters[i]
            for i, choice in enumerate(choices)
            if canonical_gold(choice) == canonical_gold(answer)
        ]
    labelled = _LETTERED.match(answer)  # `B. 4`
    if labelled and labelled[1] in letters:
        own = choices[letters.index(labelled[1])]
        beside = answer[labelled.end() :].strip()
        if own == beside or canonical_gold(own) == canonical_gold(beside):
            by_letter = labelled[1]
    found = {*by_text, *([by_letter] if by_letter else [])}
    indexed = (
        []
        if index is None or answer_is
        else [letters[at] for at in (index, index - 1) if 0 <= at < len(choices)]
    )
    if by_text and not found.issuperset(indexed):
        wrong = (
            f"the answer {answer} is the option {by_text[0]} and may be the index of "
            f"{' or '.join(indexed)}"
        )
        raise refuse("ambiguous_answer", wrong, f"say --answer-is {', '.join(ANSWER_IS)}, for")
    if len(found) == 1:
        return found.pop()
    if found:
        wrong = (
            f"the answer {shown(answer)} may be {' or '.join(sorted(found))} of "
            f"{shown(list(choices))}"
        )
        raise refuse("ambiguous_answer", wrong, "make the options differ in")
    wrong = (
        f"the answer {shown(answer)} is neither a letter of {shown(list(choices))} nor one of them"
    )
    if indexed:
        raise refuse(
            "letter_without_choice",
            wrong,
            "if it is an index say --answer-is index, or index-from-1, for",
        )
    raise refuse("letter_without_choice", wrong, f"write one of {', '.join(letters)} in")


def gold_of(letter: str, choices: Sequence[str]) -> str:
    """The option's text where it can be graded, since a model may answer with it; else its letter."""
    text = choices[ascii_uppercase.index(letter)]
    return letter if verify_gold(text, choices) is not None or reads_as_letter(text) else text
