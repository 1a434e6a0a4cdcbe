"""The reference answer of a record and its options, in the spellings that tables have.

An answer may be a letter, an index, a text or a number, a whole solution, or a conversation.
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
# A letter before an option: `A. 3`, `(A) 3`.
_LETTERED = re.compile(r"\(?([A-Z])(?:[).:、]|\s[-–])\s*(?=\S)")
_ANSWER_BLOCK = re.compile(
    r"(?:\s*<think>.*</think>)?\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL
)
_AFTER_SOLUTION = re.compile(r"(?:.*\n\s*)?####\s*(\S.*)", re.DOTALL)  # solutions of GSM8K end so
_INDEX = re.compile(r"[0-9]{1,2}")
Record = Mapping[str, Any]
# Makes the error that refuses a row, out of its kind, what is wrong, and what to do.
Refuse = Callable[[str, str, str], RowError]


MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()


def read_answer(
    record: Record, columns: Columns, refuse: Refuse, has_truth_values: bool = False
) -> tuple[str, bool]:
    """Return the reference answer, and whether words such as `The answer is` stood before it.

    The value may be the answer alone, a whole solution (`<answer>`, `\\boxed{}`, `####`), or a
    conversation whose last turn has it. `has_truth_values` says that the column has truth values.

    Raises `RowError` where the value is no text and no finite number.
    """
    column = columns.answer
    value = record.get(column, MISSING)
    value = list_in_cell(value, isinstance(value, str) and value.lstrip().startswith("[{"))
    text = number_or_text(
        answer_of_chat(value) if isinstance(value, list) else value, has_truth_values
    )
    if text is None or not text.strip():
        remedy = "make it a text or a finite number in"
        if isinstance(value, date | time):
            remedy = (
                "Excel has made a date of it: give the column the format Text, and write it "
                "again, in"
            )
        raise refuse("field_type", f"{column!r} is {shown(value)}", remedy)
    block = _ANSWER_BLOCK.fullmatch(text)
    text = block[1] if block else text
    text = final_part(text) or text  # a draft inside a block of thinking is no answer
    boxes = boxes_in_a_row(text, answer_tags=False)
    after = _AFTER_SOLUTION.fullmatch(text)
    stated = None
    if boxes and all(boxes):
        text = ", ".join(boxes)
    elif after:
        text = after[1].strip()
    elif not columns.text_answers:
        stated = stated_answer(text)
        text = (stated or text).strip()
    if columns.decimal_comma and isinstance(value, str):
        text = with_decimal_points(text, refuse)
    return text, stated is not None


_DECIMAL_COMMA = re.compile(r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+|\d+)(?:,|\{,\})(\d+)(?![\d,.])")
_GROUPED_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:\.\d{3}){2,}(?![\d,.])")
_AMBIGUOUS_NUMBER = re.compile(r"(?<![\d,.])[1-9]\d{0,2}\.\d{3}(?![\d,.])")
_BRACKETS = re.compile(r"[(\[][^()\[\]]*[)\]]|\\\{[^{}]*\\\}")


def with_decimal_points(text: str, refuse: Refuse) -> str:
    """Write an answer with decimal commas in points: `1.234,5` is 1234.5, `(2,5; 3)` is (2.5, 3).

    Commas in brackets without a `;` or `|` stand between entries, as in `(2,3)`, and stay.

    Raises `RowError` for `1.234`, which may be 1234 or 1.234.
    """
    either = _AMBIGUOUS_NUMBER.search(text)
    if either:
        remedy = f"write {either[0].replace('.', '')} or {either[0].replace('.', ',')} in"
        raise refuse(
            "ambiguous_answer",
            f"with decimal commas the number {shown(either[0])} may be two",
            remedy,
        )
    # Brackets whose commas stay are replaced by a NUL while the rest is rewritten.
    brackets: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        if re.search(r"(?<!\\);|\|", match[0]):
            return match[0]
        brackets.append(match[0])
        return "\0"

    pointed = _BRACKETS.sub(put_aside, text.replace("\0", " "))
    pointed = _DECIMAL_COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", pointed)
    pointed = _GROUPED_THOUSANDS.sub(lambda match: match[0].replace(".", ""), pointed)
    pointed = re.sub(r"\s*(?<!\\);\s*|(?<=\d)\s*\|\s*(?=[-\d])", ", ", pointed)
    return re.sub("\0", lambda _: brackets.pop(0), pointed)


def number_or_text(value: object, has_truth_values: bool = False) -> str | None:
    """Return a text, or a finite number in the usual spelling; None for anything else.

    A truth value is returned as `True` or `False` if `has_truth_values`, else as None.
    """
    if isinstance(value, str):
        return value if storable(value) else None
    if isinstance(value, bool):
        return str(value) if has_truth_values else None
    if not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # a table with one null makes floats of all its whole numbers
    return format(Decimal(_shortest_digits(value)) if isinstance(value, float) else value, "f")


def _shortest_digits(value: float) -> str:
    """Return the fewest digits that give a float back.

    A column of float32 holds 0.1 as 0.10000000149011612. A number of many digits that is exactly a
    single-precision float is therefore taken for one, and 0.1 is returned.
    """
    digits = repr(value)
    if (
        len(digits) < _DIGITS_OF_A_DOUBLE
        or abs(value) > _LARGEST_SINGLE
        or _nearest_float32(value) != value
    ):
        return digits
    spellings = (f"{value:.{precision}g}" for precision in range(1, 18))
    return next(spelling for spelling in spellings if _nearest_float32(float(spelling)) == value)


def _nearest_float32(value: float) -> float:
    """Round to the nearest float of 32 bits."""
    nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    return nearest


# A decimal number of at least so many characters is a single-precision float only by accident.
_DIGITS_OF_A_DOUBLE = 14
_LARGEST_SINGLE = 3e38
_LONGEST_LIST = 100_000  # characters of a list in Python's spelling


def list_in_cell(value: object, texts_only: bool) -> Any:
    """Return the list that a cell of a text table spells, else the cell as it is.

    A list may be written in JSON, or in Python's spelling, as pandas writes one. Only if
    `texts_only` can a text be a list at all.
    """
    if not texts_only or not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        items = read_json(value)
    except GivenTwiceError as error:
        return [error]  # what no list may hold, so the row is refused with these words
    except (ValueError, RecursionError):
        if len(value) >= _LONGEST_LIST:
            return value
        try:
            items = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return items if isinstance(items, list) else value


def read_choices(
    record: Record, columns: Columns, texts_only: bool, refuse: Refuse
) -> tuple[list[str] | None, bool]:
    """Return the options without letters, and whether one of them names an image.

    The options are None for an open question. `texts_only` says that the table has texts alone, so
    that a list is spelt out in its cell.

    Raises `RowError` for a value that is no list of texts and numbers, and for an option with the
    mark of an image that has no number.
    """
    names = columns.choices
    if len(names) > 1:  # one option a column; the last ones may be empty
        values = [record.get(name) for name in names]
        while values and values[-1] in (None, ""):
            values.pop()
        value: Any = values or None
    else:
        value = list_in_cell(record.get(names[0]), texts_only) if names else None
    if value is None or value in ([], ()) or (isinstance(value, str) and not value.strip()):
        return None, False
    spelled_names = ", ".join(names)
    items = value if isinstance(value, list | tuple) else []
    texts = []
    for item in items:
        text = number_or_text(item)
        if text is not None and text.strip():
            texts.append(text.strip())
    if not items or len(texts) < len(items):
        raise refuse(
            "field_type",
            f"{spelled_names!r} is {shown(value)}",
            "make it a list of texts or numbers, or null, in",
        )
    options = _without_letters(texts)
    if columns.decimal_comma:
        for index, item in enumerate(items):
            if isinstance(item, str):  # a number has no comma
                options[index] = with_decimal_points(options[index], refuse)
    options_in_words = []
    for option in options:
        words = in_words(option)
        if words is None:
            raise refuse(
                "placeholder",
                f"{spelled_names!r} is {shown(value)}, an option with the mark of an image",
                "number its images as the problem does, in",
            )
        options_in_words.append(words)
    return options_in_words, options_in_words != options


def _without_letters(options: list[str]) -> list[str]:
    """Take the letters off the options where they are A, B, C, ... in order; else leave all."""
    matches = [_LETTERED.match(option) for option in options]
    in_order = all(
        match and match[1] == letter
        for match, letter in zip(matches, ascii_uppercase, strict=False)
    )
    if not in_order:
        return options
    return [option[match.end() :] for option, match in zip(options, matches, strict=True) if match]


def option_letter(answer: str, choices: Sequence[str], answer_is: str, refuse: Refuse) -> str:
    """Return the letter of the right option, which an answer names by letter, text or index.

    `answer_is` is a value of `ANSWER_IS`, or empty where the user did not say what a whole number
    is. A number that is an option's text and could be another option's index is then refused.

    Raises `RowError` for an answer that names no option, or that may name two.
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
        if answer_is != "index":  # `index-from-1`
            index -= 1
        if 0 <= index < len(choices):
            return letters[index]
        wrong = f"the answer {answer} is the index of none of {len(choices)} options"
        raise refuse("letter_without_choice", wrong, "correct it in")
    answer = _in_capital_letter(answer, choices)
    by_text, candidates = _named_letters(answer, choices, letters)
    # The letters that a whole number may mean as an index, from 0 and from 1.
    indexed = []
    if index is not None and not answer_is:
        indexed = [letters[at] for at in (index, index - 1) if 0 <= at < len(choices)]
    if by_text and not candidates.issuperset(indexed):
        wrong = (
            f"the answer {answer} is the option {by_text[0]} and may be the index of "
            f"{' or '.join(indexed)}"
        )
        raise refuse("ambiguous_answer", wrong, f"say --answer-is {', '.join(ANSWER_IS)}, for")
    if len(candidates) == 1:
        return candidates.pop()
    if candidates:
        wrong = (
            f"the answer {shown(answer)} may be {' or '.join(sorted(candidates))} of "
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


def _in_capital_letter(answer: str, choices: Sequence[str]) -> str:
    """Write an answer such as `b` or `(b)` as the letter `B`, unless it is itself an option."""
    small = _SMALL_LETTER.fullmatch(answer)
    if small and answer not in choices:
        return small[1].upper()
    return answer


def _named_letters(answer: str, choices: Sequence[str], letters: str) -> tuple[list[str], set[str]]:
    """Return the letters of the options whose text an answer is, and all letters that it names.

    An answer names an option by its text, by its letter, or by both as in `B. 4`.
    """
    match = _LETTER.fullmatch(answer)
    by_letter = match[1] if match and match[1] in letters else None
    by_text = [letter for letter, choice in zip(letters, choices, strict=True) if choice == answer]
    # A prepared folder has the canonical form of the right option, which may be spelt otherwise.
    if not by_text and not by_letter:
        by_text = [
            letter
            for letter, choice in zip(letters, choices, strict=True)
            if canonical_gold(choice) == canonical_gold(answer)
        ]
    labelled = _LETTERED.match(answer)  # `B. 4`
    if labelled and labelled[1] in letters:
        choice = choices[letters.index(labelled[1])]
        text = answer[labelled.end() :].strip()
        if choice == text or canonical_gold(choice) == canonical_gold(text):
            by_letter = labelled[1]
    candidates = set(by_text)
    if by_letter:
        candidates.add(by_letter)
    return by_text, candidates


def gold_of_option(letter: str, choices: Sequence[str]) -> str:
    """Return the gold answer for the option of this letter.

    It is the option's text where that can be graded, since a model may answer with it; else the
    letter.
    """
    text = choices[ascii_uppercase.index(letter)]
    return letter if verify_gold(text, choices) is not None or reads_as_letter(text) else text
