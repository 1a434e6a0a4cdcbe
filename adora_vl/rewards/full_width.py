r"""Replaces the signs of Chinese texts in an answer by those of ASCII and LaTeX.

These are full-width forms, stops and commas, words between values, units in one character, and the
circled numbers of statements.
"""

import re
import unicodedata

# The full-width forms of ASCII, and the stops and commas of Chinese texts. A full-width comma never
# separates thousands, and full-width braces hold a set.
_ASCII_BY_FULL_WIDTH_SIGN = str.maketrans(
    {
        **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},
        **dict.fromkeys("，、", ", "),
        **dict.fromkeys("。｡", ". "),
        "｛": r"\{",
        "｝": r"\}",
        "＄": r"\$",
        "～": r"\sim ",
    }
)
_CHINESE_LETTERS = "\u4e00-\u9fff"
_RATIO_WORD_PATTERN = re.compile(r"(?<=[\d)}])\s*比\s*(?=[\d(\\])")
# Words between two values. Between two Chinese words they are a part of a text.
_AND_OR_WORD_PATTERN = re.compile(r"(?<!^)(或者?|[和与及且])(?!$)")
# Squares and cubes of units in one character, such as `㎡`, other units, and numerals of Rome.
_ONE_CHARACTER_UNIT_PATTERN = re.compile("[㎀-㏟℃℉Ⅰ-Ⅿ]")
_CIRCLED_NUMBERS_PATTERN = re.compile(r"[①-⑳](?:\s*,?\s*[①-⑳])+")
_SUBSCRIPT_DIGITS_PATTERN = re.compile("[₀-₉]+")


def spell_in_ascii(text: str) -> str:
    r"""Return `text` with ASCII for full-width signs, and with English words for Chinese ones.

    `（2，3）` becomes `(2, 3)`, and `3比4` becomes `3:4`. Between two values `or` and `and` replace
    the Chinese words.
    """
    text = text.translate(_ASCII_BY_FULL_WIDTH_SIGN)
    text = _CIRCLED_NUMBERS_PATTERN.sub(
        lambda numbers: ", ".join(re.findall("[①-⑳]", numbers[0])), text
    )
    text = _ONE_CHARACTER_UNIT_PATTERN.sub(_spell_out_character, text)
    text = _SUBSCRIPT_DIGITS_PATTERN.sub(
        lambda digits: f"_{{{unicodedata.normalize('NFKC', digits[0])}}}", text
    )
    text = _RATIO_WORD_PATTERN.sub(":", text)
    return _AND_OR_WORD_PATTERN.sub(_translate_and_or, text)


def _spell_out_character(match: re.Match[str]) -> str:
    r"""Return a sign spelled in several characters.

    It is `cm^2` for `㎠`, `^\circ C` for `℃`, and `IV` for `Ⅳ`.
    """
    text = unicodedata.normalize("NFKC", match[0])
    if text.startswith("°"):
        return rf"^\circ {text[1:]}"
    return re.sub(r"(?<=m)([23])$", r"^\1", text)


def _translate_and_or(match: re.Match[str]) -> str:
    """Return the English word for a Chinese one; between two Chinese words it stays Chinese."""
    text = match.string
    neighbours = (text[match.start() - 1], text[match.end()])
    if all(re.match(f"[{_CHINESE_LETTERS}]", neighbour) for neighbour in neighbours):
        return match[0]
    return " or " if match[1].startswith("或") else " and "
