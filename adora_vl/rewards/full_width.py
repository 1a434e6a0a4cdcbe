r"""Replaces the signs of Chinese texts in an answer by those of ASCII and LaTeX.

These are full-width forms, stops and commas, words between values, units in one character, and the
circled numbers of statements.
"""

import re
import unicodedata

# The full-width forms of ASCII, and the stops and commas of Chinese texts. A full-width comma never
# separates thousands, and full-width braces hold a set.
_FULL_WIDTH = str.maketrans(
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
_CHINESE = "\u4e00-\u9fff"
_COMPARED = re.compile(r"(?<=[\d)}])\s*比\s*(?=[\d(\\])")
# Words between two values. Between two Chinese words they are a part of a text.
_JOINED = re.compile(r"(?<!^)(或者?|[和与及且])(?!$)")
# Squares and cubes of units in one character, such as `㎡`, other units, and numerals of Rome.
_COMPATIBLE = re.compile("[㎀-㏟℃℉Ⅰ-Ⅿ]")
_CIRCLED = re.compile(r"[①-⑳](?:\s*,?\s*[①-⑳])+")
_LOWERED = re.compile("[₀-₉]+")


def in_ascii(text: str) -> str:
    r"""Return `text` with ASCII for full-width signs, and with English words for Chinese ones.

    `（2，3）` becomes `(2, 3)`, and `3比4` becomes `3:4`. Between two values `or` and `and` replace the
    Chinese words.
    """
    text = text.translate(_FULL_WIDTH)
    text = _CIRCLED.sub(lambda row: ", ".join(re.findall("[①-⑳]", row[0])), text)
    text = _COMPATIBLE.sub(_spell_compatibly, text)
    text = _LOWERED.sub(lambda digits: f"_{{{unicodedata.normalize('NFKC', digits[0])}}}", text)
    text = _COMPARED.sub(":", text)
    return _JOINED.sub(_translate_word, text)


def _spell_compatibly(match: re.Match[str]) -> str:
    r"""Return a sign spelled in several characters.

    It is `cm^2` for `㎠`, `^\circ C` for `℃`, and `IV` for `Ⅳ`.
    """
    text = unicodedata.normalize("NFKC", match[0])
    if text.startswith("°"):
        return rf"^\circ {text[1:]}"
    return re.sub(r"(?<=m)([23])$", r"^\1", text)


def _translate_word(match: re.Match[str]) -> str:
    """Return the English word for a Chinese one; between two Chinese words it stays Chinese."""
    text = match.string
    sides = text[match.start() - 1], text[match.end()]
    if all(re.match(f"[{_CHINESE}]", side) for side in sides):
        return match[0]
    return " or " if match[1].startswith("或") else " and "
