"""The reference answer of a record and its options, in the spellings that tables have.

An answer may be a letter, an index, a text or a number, a whole solution, or a conversation.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np

from adora_vl.conversion.chat import answer_of_chat
from adora_vl.conversion.columns import ANSWER_IS, Columns
from adora_vl.conversion.final_answer import extract_final_answer
from adora_vl.conversion.placeholders import image_marks_as_words
from adora_vl.conversion.problem import (
    ROW_LOCATION,
    MakeRowError,
    can_encode_utf8,
    looks_like_option_letter,
)
from adora_vl.rewards import canonical_gold, verify_gold
from adora_vl.rewards.completion import last_adjacent_boxes
from adora_vl.rewards.thinking import text_after_thinking
from adora_vl.utils.cli import DuplicateKeyError, read_json, short_repr

_OPTION_LETTER_PATTERN = re.compile(r"\(?([A-Z])[).]?")
_SMALL_OPTION_LETTER_PATTERN = re.compile(r"\(?([a-h])[).]?")
# A letter before an option: `A. 3`, `(A) 3`.
_LETTER_BEFORE_OPTION_PATTERN = re.compile(r"\(?([A-Z])(?:[).:、]|\s[-–])\s*(?=\S)")
_ANSWER_BLOCK_PATTERN = re.compile(
    r"(?:\s*<think>.*</think>)?\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL
)
# a solution of GSM8K ends in a line `#### 4`
_GSM8K_ANSWER_PATTERN = re.compile(r"(?:.*\n\s*)?####\s*(\S.*)", re.DOTALL)
_INDEX_PATTERN = re.compile(r"[0-9]{1,2}")
Record = Mapping[str, Any]  # a row of a user's table by its columns, as `pick_columns` returns it


# Stands for a value that a record lacks; messages show it as the word `missing`.
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()


class TableAnswer(NamedTuple):
    """The reference answer of a record."""

    text: str
    was_extracted: bool  # words such as `The answer is` stood before it


def read_answer(
    record: Record, columns: Columns, row_error: MakeRowError, *, has_truth_values: bool
) -> TableAnswer:
    """Return the reference answer of a record, however its table spells it.

    The value may be the answer alone, a whole solution (with `<answer>`, `\\boxed{}` or `####`), or
    a conversation whose last turn has the answer. With `has_truth_values` the column may also have
    True and False. `row_error` makes the error of a value that cannot be used.

    Raises `RowError` where the value gives neither a text nor a finite number.
    """
    column = columns.answer
    value = record.get(column, MISSING)
    looks_like_chat = isinstance(value, str) and value.lstrip().startswith("[{")
    value = parse_list_cell(value, texts_only=looks_like_chat)
    answer_cell = answer_of_chat(value) if isinstance(value, list) else value
    text = number_or_text(answer_cell, has_truth_values)
    if text is None or not text.strip():
        remedy = f"make it a text or a finite number in {ROW_LOCATION}"
        if isinstance(value, date | time):
            remedy = (
                "Excel has made a date of it: give the column the format Text, and write it "
                f"again, in {ROW_LOCATION}"
            )
        raise row_error("field_type", f"{column!r} is {short_repr(value)}", remedy)
    answer = _answer_in_solution(text, keeps_sentences=columns.text_answers)
    if columns.decimal_comma and isinstance(value, str):
        return answer._replace(text=with_decimal_points(answer.text, row_error))
    return answer


def _answer_in_solution(text: str, *, keeps_sentences: bool) -> TableAnswer:
    """Return the answer out of a text that may be a whole solution, or the answer alone.

    The first rule that fits decides:

    1. `So \\boxed{4}` gives 4, and several boxes give their contents with commas between them
    2. a last line `#### 4`, as in GSM8K, gives 4
    3. `The answer is 4` gives 4, which alone counts as extracted; with `keeps_sentences` the whole
       sentence is the answer
    4. any other text is the answer itself

    Before that, the tags of a text that is a single `<answer>` block are removed, and so is all
    text up to the last `</think>`.
    """
    answer_block = _ANSWER_BLOCK_PATTERN.fullmatch(text)
    if answer_block:
        text = answer_block[1]
    text = text_after_thinking(text) or text  # a draft inside a block of thinking is no answer
    boxes = last_adjacent_boxes(text, answer_tags=False)
    if boxes and all(boxes):
        return TableAnswer(text=", ".join(boxes), was_extracted=False)
    gsm8k_answer = _GSM8K_ANSWER_PATTERN.fullmatch(text)
    if gsm8k_answer:
        return TableAnswer(text=gsm8k_answer[1].strip(), was_extracted=False)
    if keeps_sentences:
        return TableAnswer(text=text, was_extracted=False)
    extracted_answer = extract_final_answer(text)  # None without words such as `The answer is`
    return TableAnswer(
        text=(extracted_answer or text).strip(), was_extracted=extracted_answer is not None
    )


_DECIMAL_COMMA_PATTERN = re.compile(
    r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+|\d+)(?:,|\{,\})(\d+)(?![\d,.])"
)
_GROUPED_THOUSANDS_PATTERN = re.compile(r"(?<![\d,.])\d{1,3}(?:\.\d{3}){2,}(?![\d,.])")
_AMBIGUOUS_NUMBER_PATTERN = re.compile(r"(?<![\d,.])[1-9]\d{0,2}\.\d{3}(?![\d,.])")
_TEXT_IN_BRACKETS_PATTERN = re.compile(r"[(\[][^()\[\]]*[)\]]|\\\{[^{}]*\\\}")


def with_decimal_points(text: str, row_error: MakeRowError) -> str:
    """Return an answer, as a table with decimal commas has it, with decimal points.

        1.234,5     1234.5
        1.234.567   1234567
        2,5; 3      2.5, 3
        (2,5; 3)    (2.5, 3)
        (2,3)       (2,3)       without `;` or `|` the comma separates two entries, and stays

    Raises `RowError`, which `row_error` makes, for `1.234`, which may be 1234 or 1.234.
    """
    ambiguous = _AMBIGUOUS_NUMBER_PATTERN.search(text)
    if ambiguous:
        number = ambiguous[0]
        raise row_error(
            "ambiguous_answer",
            f"with decimal commas the number {short_repr(number)} may be two",
            f"write {number.replace('.', '')} or {number.replace('.', ',')} in {ROW_LOCATION}",
        )
    # Brackets whose commas stay are replaced by a NUL while the rest is rewritten.
    brackets: list[str] = []

    def protect_brackets(match: re.Match[str]) -> str:
        """Return brackets with a `;` or `|` as they are; keep others in a list, and return NUL."""
        if re.search(r"(?<!\\);|\|", match[0]):
            return match[0]
        brackets.append(match[0])
        return "\0"

    def with_decimal_point(match: re.Match[str]) -> str:
        """Return `1234.5` for a match of `1.234,5`."""
        whole_part, decimals = match.groups()
        return f"{whole_part.replace('.', '')}.{decimals}"

    text = _TEXT_IN_BRACKETS_PATTERN.sub(protect_brackets, text.replace("\0", " "))
    text = _DECIMAL_COMMA_PATTERN.sub(with_decimal_point, text)
    text = _GROUPED_THOUSANDS_PATTERN.sub(lambda match: match[0].replace(".", ""), text)
    # A `;`, or a `|` between two numbers, separates the entries of a list.
    text = re.sub(r"\s*(?<!\\);\s*|(?<=\d)\s*\|\s*(?=[-\d])", ", ", text)
    # Each NUL becomes the brackets again that it stands for.
    return re.sub("\0", lambda _: brackets.pop(0), text)


def number_or_text(value: object, has_truth_values: bool = False) -> str | None:
    """Return the text of a cell that holds a text or a finite number; None for anything else.

    For example, 3.0 gives `3`, 1e-07 gives `0.0000001`, and NaN gives None. A truth value gives
    `True` or `False` with `has_truth_values`, and None without.
    """
    if isinstance(value, str):
        return value if can_encode_utf8(value) else None
    if isinstance(value, bool):
        return str(value) if has_truth_values else None
    if not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        # A table with one null makes floats of all its whole numbers. From 2**53 on a float no
        # longer tells two neighbouring whole numbers apart.
        return str(int(value))
    number = Decimal(_shortest_digits(value)) if isinstance(value, float) else value
    return format(number, "f")  # without an exponent


def _shortest_digits(value: float) -> str:
    """Return a float with the fewest digits that give it back, as its table would show it.

    A column of float32 holds 0.1 as 0.10000000149011612. So a number of many digits that is exactly
    a float32 is taken for one, and written with the fewest digits of a float32: 0.1.
    """
    digits = repr(value)
    if len(digits) < _MIN_CHARACTERS_OF_FLOAT32 or abs(value) > _LARGEST_FLOAT32:
        return digits
    nearest_float32 = np.float32(value)
    if float(nearest_float32) != value:
        return digits
    return np.format_float_positional(nearest_float32, trim="-")


# A shorter number was written by a person, and is a float32 by accident: 0.5 is one.
_MIN_CHARACTERS_OF_FLOAT32 = 14
_LARGEST_FLOAT32 = 3e38
_LONGEST_LIST = 100_000  # characters of a list in Python's spelling


def parse_list_cell(value: object, texts_only: bool) -> Any:
    """Return ["3", "4"] for a cell with the text `["3", "4"]`; any other cell as it is.

    The text may be JSON, or a list as Python writes it, `['3', '4']`. Texts are parsed only with
    `texts_only`, which says that all cells of the table are texts, as in CSV.
    """
    if not texts_only or not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        items = read_json(value)
    except DuplicateKeyError as error:
        # An object in the list has a key twice. No reader accepts a list with an error in it, so
        # the row is refused, and the message shows the words of the error.
        return [error]
    except (ValueError, RecursionError):
        if len(value) >= _LONGEST_LIST:
            return value
        try:
            items = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return items if isinstance(items, list) else value


class TableOptions(NamedTuple):
    """The options of a multiple-choice record, without the letters before them."""

    texts: list[str] | None  # None for an open question
    name_images: bool  # an option had the mark of an image, which is now words such as `image 2`


def read_choices(
    record: Record, columns: Columns, texts_only: bool, row_error: MakeRowError
) -> TableOptions:
    """Return the options of a record, from one column with a list or from a column for each option.

    For example, the list ["A. 3", "B. 4"] gives the options 3 and 4.

    With `texts_only` all cells of the table are texts, so that a list is spelt out in its cell.
    `row_error` makes the error of a value that cannot be used.

    Raises `RowError` for a value that is no list of texts and numbers, and for an option with a
    mark such as `<image>`, which does not say which image it means.
    """
    column_names = ", ".join(columns.choices)
    value = _choices_cell(record, columns.choices, texts_only=texts_only)
    is_blank = isinstance(value, str) and not value.strip()
    if value is None or value in ([], ()) or is_blank:
        return TableOptions(texts=None, name_images=False)
    items = value if isinstance(value, list | tuple) else []
    texts = []
    for item in items:
        text = number_or_text(item)
        if text is not None and text.strip():
            texts.append(text.strip())
    if not items or len(texts) < len(items):
        raise row_error(
            "field_type",
            f"{column_names!r} is {short_repr(value)}",
            f"make it a list of texts or numbers, or null, in {ROW_LOCATION}",
        )
    options = _strip_option_letters(texts)
    if columns.decimal_comma:
        for index, item in enumerate(items):
            if isinstance(item, str):  # a number has no comma
                options[index] = with_decimal_points(options[index], row_error)
    worded_options = []  # with the words `image 2` in place of the mark `<image2>`
    for option in options:
        worded_option = image_marks_as_words(option)
        if worded_option is None:  # the mark has no number
            raise row_error(
                "placeholder",
                f"{column_names!r} is {short_repr(value)}, an option with the mark of an image",
                f"number its images as the problem does, in {ROW_LOCATION}",
            )
        worded_options.append(worded_option)
    return TableOptions(texts=worded_options, name_images=worded_options != options)


def _choices_cell(record: Record, names: Sequence[str], *, texts_only: bool) -> Any:
    """Return what a record has in its columns for options, whose names are `names`.

    It is a list of options if the record is as it should be, and None where there is no option. A
    single column holds the whole list. Several columns hold one option each, and the last ones may
    be empty: columns A to D with 3, 4, null, null give ["3", "4"].
    """
    if not names:
        return None
    if len(names) == 1:
        return parse_list_cell(record.get(names[0]), texts_only)
    values = [record.get(name) for name in names]
    while values and values[-1] in (None, ""):
        values.pop()
    return values or None


def _strip_option_letters(options: list[str]) -> list[str]:
    """Return options without the letters before them, if these are A, B, C, ... without a gap.

    `A. 3` and `B. 4` give 3 and 4. `A. 3` and `C. 4` stay as they are.
    """
    matches = [_LETTER_BEFORE_OPTION_PATTERN.match(option) for option in options]
    for match, letter in zip(matches, ascii_uppercase, strict=False):
        if match is None or match[1] != letter:
            return options
    return [option[match.end() :] for option, match in zip(options, matches, strict=True) if match]


def option_letter(
    answer: str, choices: Sequence[str], answer_is: str, row_error: MakeRowError
) -> str:
    """Return the letter of the right option, which an answer names by letter, text or index.

    `answer_is` says what a whole number is: `value` (the text of an option), `index` or
    `index-from-1`. It is empty where the user did not say. For example:

        answer   options   answer_is      result
        B, (b)   3, 4                     B
        4        3, 4                     B
        B. 4     3, 4                     B
        1        3, 4      index          B
        1        3, 4      index-from-1   A
        1        1, 2      value          A
        1        1, 2                     refused: option A, or the index of B (from 0)

    Raises `RowError` for an answer that names no option, or that may name two.
    """
    letters = ascii_uppercase[: len(choices)]  # `A` for the first option
    if len(choices) > len(ascii_uppercase):
        raise row_error(
            "field_type",
            f"there are {len(choices)} options",
            f"leave at most {len(ascii_uppercase)} in {ROW_LOCATION}",
        )
    index = int(answer) if _INDEX_PATTERN.fullmatch(answer) else None
    if index is not None and answer_is in ("index", "index-from-1"):
        position = index if answer_is == "index" else index - 1
        if 0 <= position < len(choices):
            return letters[position]
        wrong = f"the answer {answer} is the index of none of {len(choices)} options"
        raise row_error("letter_without_choice", wrong, f"correct it in {ROW_LOCATION}")
    answer = _capitalize_letter(answer, choices)
    matches = _matching_letters(answer, choices, letters)
    letters_of_index: list[str] = []
    if index is not None and not answer_is:
        letters_of_index = _letters_of_index(index, letters)
    # The number is the text of one option, and may be the index of another one.
    if matches.by_text and not matches.all_letters.issuperset(letters_of_index):
        wrong = (
            f"the answer {answer} is the option {matches.by_text[0]} and may be the index of "
            f"{' or '.join(letters_of_index)}"
        )
        remedy = f"say --answer-is {', '.join(ANSWER_IS)}, for {ROW_LOCATION}"
        raise row_error("ambiguous_answer", wrong, remedy)
    if len(matches.all_letters) == 1:
        return matches.all_letters.pop()
    if matches.all_letters:
        wrong = (
            f"the answer {short_repr(answer)} may be {' or '.join(sorted(matches.all_letters))} of "
            f"{short_repr(list(choices))}"
        )
        raise row_error("ambiguous_answer", wrong, f"make the options differ in {ROW_LOCATION}")
    wrong = f"the answer {short_repr(answer)} is neither a letter of {short_repr(list(choices))} nor one of them"
    remedy = f"write one of {', '.join(letters)} in {ROW_LOCATION}"
    if letters_of_index:
        remedy = f"if it is an index say --answer-is index, or index-from-1, for {ROW_LOCATION}"
    raise row_error("letter_without_choice", wrong, remedy)


def _letters_of_index(index: int, letters: str) -> list[str]:
    """Return the letters that an index may mean, counted from 0 or from 1: C and B for 2."""
    return [letters[position] for position in (index, index - 1) if 0 <= position < len(letters)]


def _capitalize_letter(answer: str, choices: Sequence[str]) -> str:
    """Return `B` for an answer `b` or `(b)` that is no option itself; any other answer as it is."""
    small = _SMALL_OPTION_LETTER_PATTERN.fullmatch(answer)
    if small and answer not in choices:
        return small[1].upper()
    return answer


class _MatchingLetters(NamedTuple):
    """The letters of the options that an answer may mean."""

    by_text: list[str]  # of options whose text is the answer
    all_letters: set[str]  # also of an option that the answer names by its letter


def _matching_letters(answer: str, choices: Sequence[str], letters: str) -> _MatchingLetters:
    """Return the letters of the options that an answer names by text, by letter, or as `B. 4`.

    For example, with the options 3 and 4 the answers `4`, `B` and `B. 4` all give B.

    Args:
        answer: the reference answer of a record.
        choices: the texts of the options.
        letters: their letters, such as `AB` for two options.
    """
    match = _OPTION_LETTER_PATTERN.fullmatch(answer)
    by_letter = match[1] if match and match[1] in letters else None
    choice_by_letter = dict(zip(letters, choices, strict=True))
    by_text = [letter for letter, choice in choice_by_letter.items() if choice == answer]
    # The answer in a prepared folder is the canonical form of the right option, whose own spelling
    # may differ. So where no text is equal, canonical forms are compared.
    if not by_text and not by_letter:
        canonical_answer = canonical_gold(answer)
        for letter, choice in choice_by_letter.items():
            if canonical_gold(choice) == canonical_answer:
                by_text.append(letter)
    # `B. 4`: the letter counts if 4 is the text of option B.
    letter_before_text = _LETTER_BEFORE_OPTION_PATTERN.match(answer)
    if letter_before_text and letter_before_text[1] in letters:
        choice = choice_by_letter[letter_before_text[1]]
        text = answer[letter_before_text.end() :].strip()
        if choice == text or canonical_gold(choice) == canonical_gold(text):
            by_letter = letter_before_text[1]
    all_letters = set(by_text)
    if by_letter:
        all_letters.add(by_letter)
    return _MatchingLetters(by_text=by_text, all_letters=all_letters)


def gold_of_option(letter: str, choices: Sequence[str]) -> str:
    """Return the reference answer of a question whose right option has this letter.

    It is the text of the option, since a model may answer with that. It is the letter where the
    text cannot be graded, or would itself be taken for a letter. For example, option A of 3 and 4
    gives 3, and option A of D and E (names of points) gives A.
    """
    text = choices[ascii_uppercase.index(letter)]
    cannot_be_graded = verify_gold(text, choices) is not None
    return letter if cannot_be_graded or looks_like_option_letter(text) else text
