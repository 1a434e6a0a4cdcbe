r"""The canonical form of an answer: what both sides are stripped of before they are compared.

Source: the grading policy, point 2. Every substitution puts a space where it takes something out, and a space between
two digits stays, so that no decoration can glue `1` and `2` into `12`.
"""

from __future__ import annotations

import re
import unicodedata

_DIGITS = "0123456789."
MAX_CHARS = 500  # an honest answer has under 60; every regular expression below runs on at most this much


class UncanonicalError(ValueError):
    """The text has no canonical form. `reason` names the rule that refused it: `too_long` or `hidden_characters`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "√": r"\surd ",
        "π": r"\pi ",
        "°": r"^\circ ",
        "\u00d7": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "²": "^2",
        "³": "^3",
    }
)
# What may stand between groups of three digits: `1,234`, `1{,}234`, `1\,234`, and thin spaces of Unicode.
_THIN = r"(?:,\\!|,|\{,\}|\\,|\\!|[\u2009\u202f])"
_THOUSANDS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_THIN}\d{{3}})+(?!\d|{_THIN})", re.ASCII)
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|~|\\(?:quad|qquad|thinspace|left|right|displaystyle)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
# `12^\circ^2` is left unread: taking the sign out would make a square of it.
_DEGREE = re.compile(r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z]))(?!\s*\^)")
_DEGREE_WORD = re.compile(r"(?<=[\d})$\s])degrees?$")
# A name before an equals sign, as in `x = 5`, `AB = 5`, `m \angle A = 5`, `\angle 3 = 5` and `r_{1} = 5`.
_NAME = re.compile(
    r"(?:m\s*)?(?:\\(?:angle|overline|widehat|overarc|triangle)\s*)?"
    r"(?:[A-Z](?:\s+[A-Z])+|[A-Za-z]{1,16}|\{\s*[A-Z](?:\s*[A-Z])*\s*\}"
    r"|\\(?:theta|alpha|beta|gamma|phi)|(?<=angle)\s*\d{1,2}|(?<=angle )\d{1,2})"
    r"(?:_(?:\d|\{\d{1,2}\}))?'?\s*=(?!=)"
)
_LENGTH = (
    r"(?:[cmk]?m|(?:centi|milli|kilo)?met(?:er|re)s?|in|inch(?:es)?|ft|foot|feet|yd|yards?|mi|miles?|units?)"
    r"\.?\s*(?:\^\s*(?:[23]|\{\s*[23]\s*\})|squared|cubed)?"
)
_AREA = rf"(?:sq|cu)\.?\s*{_LENGTH}|(?:square|cubic)\s+{_LENGTH}|sq|square"
# A value and its unit: `12 cm`, `12 cm^2`, `12 square feet`, `5\pi in.`
_UNIT = re.compile(rf"(.*(?:[\d}})$]|\\pi))\s*(?:{_LENGTH}|{_AREA})", re.DOTALL)


def canonical(text: str) -> str:
    r"""The canonical form of an answer, for example `2\sqrt{221}` for `$2 \sqrt { 221 }\text{ cm}^2$.`.

    Raises `UncanonicalError` for text over `MAX_CHARS` and for control, bidirectional and zero-width characters, which
    can make an answer look like another one.
    """
    if len(text) > MAX_CHARS:
        raise UncanonicalError("too_long")
    if any(unicodedata.category(char) in {"Cc", "Cf", "Cn", "Co", "Cs"} and char not in "\t\n\r" for char in text):
        raise UncanonicalError("hidden_characters")
    text = _THOUSANDS.sub(_grouped, text.translate(_SYMBOLS))
    text = _undecorated(_plain_commands(_unwrapped(_SPACING.sub(" ", text))))
    name = _NAME.match(text)
    if name:
        text = _undecorated(text[name.end() :])
    text = _DEGREE_WORD.sub(" ", _DEGREE.sub(" ", text)).strip()
    unit = _UNIT.fullmatch(text)
    if unit:
        text = unit.group(1)
    return _compact(_undecorated(text))


def canonical_gold(text: str) -> str:
    r"""The canonical form that data preparation stores as `answer`, for example `1000` for `1,000`.

    Never raises: a gold that has no canonical form comes back as it is, and `verify_gold` says why it cannot be used.
    """
    try:
        return canonical(text)
    except UncanonicalError:
        return text


def _grouped(number: re.Match[str]) -> str:
    r"""`1,234` becomes `1234`. Right after a bracket, as in `(1,234)` or `\{1,234\}`, the comma separates two entries,
    and the text stays as it is.
    """
    if number.string[: number.start()].rstrip().endswith(("(", "[", r"\{")):
        return number.group()
    return re.sub(r"\D", "", number.group())


def _unwrapped(text: str) -> str:
    r"""Replace `\text{...}` and `\mathrm{...}` by their content: `5\text{ cm}` becomes `5  cm `.

    The innermost ones are replaced first. Each round makes the text shorter, so the loop ends.
    """
    count = 1
    while count:
        text, count = _TEXT.subn(r" \1 ", text)
    return text


def _undecorated(text: str) -> str:
    """Remove outer spaces, surrounding dollar signs, and a full stop at the end: `$5$.` becomes `5`.

    Two full stops stay, because `1..` is not the number 1.
    """
    text = text.strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def _plain_commands(text: str) -> str:
    r"""Bring fractions, roots and pi to one spelling.

    `\dfrac12` becomes `\frac{1}{2}`, `sqrt3` and `√3` become `\sqrt{3}`, and `\sin^2 30` becomes `\sin^{2} 30`. An
    argument without braces has to be one digit, one letter or `\pi`. TeX sets `\sqrt12` as a root of 1 beside a 2,
    which nobody means, so such text is left alone and not read later. After the Unicode sign all digits belong to the
    root.
    """
    one = r"(\d|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z]))"
    last = rf"{one}(?!\d|\.\d)"
    text = re.sub(r"(?<![A-Za-z\\])(sqrt|pi)(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    # The argument after `\log_2 8` and `\sin^2 30` would else stand beside a digit, like one of two numbers.
    text = re.sub(r"(\\log\s*_|\\(?:sin|cos|tan|sec|csc|cot)\s*\^)\s*(\d)(?!\d|\.\d)", r"\1{\2}", text)
    text = re.sub(r"\\surd\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text).replace(r"\surd", r"\sqrt")
    text = re.sub(rf"\\sqrt\s*(\[[^\[\]]*\])?\s*{last}", r"\\sqrt\1{\2}", text)
    text = re.sub(rf"\\frac\s*{one}\s*{last}", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"\\frac\s*{one}\s*\{{", r"\\frac{\1}{", text)
    return re.sub(rf"\\frac\s*(\{{[^{{}}]*\}})\s*{last}", r"\\frac\1{\2}", text)


def _compact(text: str) -> str:
    r"""Remove the spaces that separate nothing: `2 \sqrt { 3 }` becomes `2\sqrt{3}`.

    A space stays between two letters (`right triangle`), between two digits (`1 2`), and between a comma and a digit:
    `12, 130` must not become `12,130`, which would be a number with a thousands separator.
    """
    text = re.sub(r"\s+", " ", text.strip())

    def kept(space: re.Match[str]) -> str:
        left, right = text[space.start() - 1], text[space.end()]
        letters = left.isalpha() and right.isalpha()
        digits = left in _DIGITS + "," and right in _DIGITS
        return " " if letters or digits else ""

    return re.sub(" ", kept, text)
