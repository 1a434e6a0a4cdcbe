r"""Numbers in special spellings: recurring decimals, degrees and minutes, and English words."""

import re
from fractions import Fraction

_MAY_RECUR = re.compile(r"\.[0-9]*(?:\\overline|\\bar|\\dot|\(|\.\.|…|\\[lc]?dots)")
_PERIOD = r"[0-9]{1,12}"
# `0.1\overline{6}`, `0.1\dot{6}`, `0.\dot{1}4285\dot{7}` and `0.1(6)`.
_RECURRING = re.compile(
    rf"(?<![0-9.])([0-9]{{1,12}})\.([0-9]{{0,12}})"
    rf"(?:\\(?:overline|bar)\s*\{{\s*({_PERIOD})\s*\}}"
    rf"|((?:\\dot\s*(?:\{{\s*[0-9]\s*\}}|\s[0-9]))[0-9]{{0,10}}(?:\\dot\s*(?:\{{\s*[0-9]\s*\}}|\s[0-9]))?)"
    rf"|\(({_PERIOD})\))(?![0-9.])"
)
# `0.333\ldots`, with a period that is written three times, or twice if it has two digits or more.
_GOES_ON = re.compile(
    r"(?<![0-9.])([0-9]{1,12})\.([0-9]{0,12}?)(?:([0-9])\3{2,}|([0-9]{2,6})\4+)"
    r"(?:\.\.\.|…|\\(?:[lc]?dots)(?![A-Za-z]))\s*$"
)
_PRIME = r"(?:minutes?\b|分|'|\u2019|′|\^\s*(?:\\prime(?![A-Za-z])|\{\s*\\prime\s*\}))"
_SECOND = r"(?:seconds?\b|秒|''|\"|″|\u2019\u2019|\u201d|\^\s*\{\s*\\prime\s*\\prime\s*\})"
_SIGN = r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|degrees?\b|度)"
_MINUTES = re.compile(
    rf"(?<![0-9.])([0-9]{{1,4}})\s*{_SIGN}\s*([0-9]{{1,2}}(?:\.[0-9]{{1,4}})?)\s*{_PRIME}"
    rf"(?:\s*([0-9]{{1,2}}(?:\.[0-9]{{1,4}})?)\s*{_SECOND})?(?!\s*[0-9'\u2019′\"])"
)

_MAY_HAVE_MINUTES = re.compile("['\u2019′]|prime|minute|度")
# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBER_WORDS = {
    **{word: str(number) for number, word in enumerate(_ONES)},
    **{word: str(10 * number) for number, word in enumerate(_TENS, 2)},
    **{
        f"{tens}{joint}{ones}": str(10 * ten + unit)
        for ten, tens in enumerate(_TENS, 2)
        for unit, ones in enumerate(_ONES[1:10], 1)
        for joint in "- "
    },
    "hundred": "100",
    "one hundred": "100",
}


def replace_recurring_decimals(text: str) -> str:
    r"""Return `text` with fractions for recurring decimals.

    `0.\overline{3}` and `0.333\ldots` become `\frac{1}{3}`.
    """
    if not _MAY_RECUR.search(text):
        return text

    def fraction(match: re.Match[str]) -> str:
        period = match[3] or match[4] or match[5] or ""
        return _fraction_of_recurring(match[1], match[2], re.sub(r"[^0-9]", "", period))

    text = _RECURRING.sub(fraction, text)
    return _GOES_ON.sub(
        lambda match: _fraction_of_recurring(match[1], match[2], match[3] or match[4]), text
    )


def _fraction_of_recurring(integer: str, places: str, period: str) -> str:
    """Return a recurring decimal as a fraction of LaTeX, or as an integer.

    Args:
        integer: the digits before the point.
        places: the digits behind the point that do not recur.
        period: the digits that recur.
    """
    scale = 10 ** len(places)
    recurring_part = Fraction(int(period), scale * (10 ** len(period) - 1))
    value = recurring_part + Fraction(int(integer + places), scale)
    if value.denominator == 1:
        return str(value)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def in_degrees(text: str) -> str:
    r"""Return `text` with angles in degrees alone: `67\frac{1}{2}^\circ` for `67^\circ 30'`."""
    return _MINUTES.sub(_in_degrees_alone, text) if _MAY_HAVE_MINUTES.search(text) else text


def _in_degrees_alone(match: re.Match[str]) -> str:
    """Return an angle in degrees alone; one with 60 minutes or seconds or more stays as it is."""
    minutes = Fraction(match[2])
    seconds = Fraction(match[3] or 0)
    if minutes >= 60 or seconds >= 60:
        return match[0]
    part = (minutes + seconds / 60) / 60
    fraction = rf"\frac{{{part.numerator}}}{{{part.denominator}}}" if part else ""
    return rf"{match[1]}{fraction}^\circ "
