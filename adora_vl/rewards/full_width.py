r"""The signs of Chinese texts in an answer: full-width forms, stops and commas, words between values,
units in one character, and statements by their circled numbers.
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


def narrow(text: str) -> str:
    r"""`text` with the signs of ASCII for full-width ones, and with `or`, `and` and a colon for the
    words of Chinese between two values: `(2, 3)` for `（2，3）`, `3:4` for `3比4`.
    """
    text = text.translate(_FULL_WIDTH)
    text = _CIRCLED.sub(lambda row: ", ".join(re.findall("[①-⑳]", row[0])), text)
    text = _COMPATIBLE.sub(_compatible, text)
    text = _LOWERED.sub(lambda digits: f"_{{{unicodedata.normalize('NFKC', digits[0])}}}", text)
    text = _COMPARED.sub(":", text)
    return _JOINED.sub(_joint, text)


def _compatible(found: re.Match[str]) -> str:
    r"""` cm^2` for `㎠`, `^\circ C` for `℃`, and `IV` for `Ⅳ`."""
    text = unicodedata.normalize("NFKC", found[0])
    if text.startswith("°"):
        return rf"^\circ {text[1:]}"
    return re.sub(r"(?<=m)([23])$", r"^\1", text)


def _joint(found: re.Match[str]) -> str:
    """The English word for a Chinese one, which stays between two Chinese words."""
    text = found.string
    sides = text[found.start() - 1], text[found.end()]
    if all(re.match(f"[{_CHINESE}]", side) for side in sides):
        return found[0]
    return " or " if found[1].startswith("或") else " and "
