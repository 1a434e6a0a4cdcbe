r"""Numbers in special spellings: recurring decimals, degrees and minutes, and English words."""

import re
from fractions import Fraction

_PERIOD_DIGITS = r"[0-9]{1,12}"
# `0.1\overline{6}`, `0.1\dot{6}`, `0.\dot{1}4285\dot{7}` and `0.1(6)`.
_MARKED_PERIOD_PATTERN = re.compile(
    rf"(?<![0-9.])([0-9]{{1,12}})\.([0-9]{{0,12}})"
    rf"(?:\\(?:overline|bar)\s*\{{\s*({_PERIOD_DIGITS})\s*\}}"
    rf"|((?:\\dot\s*(?:\{{\s*[0-9]\s*\}}|\s[0-9]))[0-9]{{0,10}}(?:\\dot\s*(?:\{{\s*[0-9]\s*\}}|\s[0-9]))?)"
    rf"|\(({_PERIOD_DIGITS})\))(?![0-9.])"
)
# `0.333\ldots`, with a period that is written three times, or twice if it has two digits or more.
_REPEATED_PERIOD_PATTERN = re.compile(
    r"(?<![0-9.])([0-9]{1,12})\.([0-9]{0,12}?)(?:([0-9])\3{2,}|([0-9]{2,6})\4+)"
    r"(?:\.\.\.|…|\\(?:[lc]?dots)(?![A-Za-z]))\s*$"
)
_MINUTE_SIGN = r"(?:minutes?\b|分|'|\u2019|′|\^\s*(?:\\prime(?![A-Za-z])|\{\s*\\prime\s*\}))"
_SECOND_SIGN = r"(?:seconds?\b|秒|''|\"|″|\u2019\u2019|\u201d|\^\s*\{\s*\\prime\s*\\prime\s*\})"
_DEGREE_SIGN = r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|degrees?\b|度)"
_DEGREES_AND_MINUTES_PATTERN = re.compile(
    rf"(?<![0-9.])([0-9]{{1,4}})\s*{_DEGREE_SIGN}\s*([0-9]{{1,2}}(?:\.[0-9]{{1,4}})?)\s*{_MINUTE_SIGN}"
    rf"(?:\s*([0-9]{{1,2}}(?:\.[0-9]{{1,4}})?)\s*{_SECOND_SIGN})?(?!\s*[0-9'\u2019′\"])"
)
# fmt: off
_WORDS_BELOW_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
_WORDS_OF_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DIGITS_BY_NUMBER_WORD = {
    **{word: str(number) for number, word in enumerate(_WORDS_BELOW_TWENTY)},
    **{word: str(10 * number) for number, word in enumerate(_WORDS_OF_TENS, 2)},
    **{
        f"{tens}{joint}{ones}": str(10 * ten + unit)
        for ten, tens in enumerate(_WORDS_OF_TENS, 2)
        for unit, ones in enumerate(_WORDS_BELOW_TWENTY[1:10], 1)
        for joint in "- "
    },
    "hundred": "100",
    "one hundred": "100",
}


def replace_recurring_decimals(text: str) -> str:
    r"""Return `text` with fractions for recurring decimals.

    `0.\overline{3}` and `0.333\ldots` become `\frac{1}{3}`.
    """
    text = _MARKED_PERIOD_PATTERN.sub(_recurring_decimal_as_fraction, text)
    return _REPEATED_PERIOD_PATTERN.sub(_recurring_decimal_as_fraction, text)


def _recurring_decimal_as_fraction(decimal: re.Match[str]) -> str:
    r"""Return the fraction for a match of one of the two patterns of recurring decimals.

    The first two groups are the digits before the point and those behind it that do not recur. One
    of the further groups is the period, perhaps with commands in it, as `\dot{1}4285\dot{7}`.
    """
    integer, places, *periods = decimal.groups()
    period = next(period for period in periods if period)
    return _fraction_of_recurring(integer, places, re.sub(r"[^0-9]", "", period))


def _fraction_of_recurring(integer: str, places: str, period: str) -> str:
    r"""Return a recurring decimal as a fraction of LaTeX, or as an integer.

    For example, 0.1666... has the integer `0`, the places `1` and the period `6`. It is
    1/10 + 6/90, so that the result is `\frac{1}{6}`.

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


def minutes_to_degrees(text: str) -> str:
    r"""Return `text` with angles in degrees alone: `67\frac{1}{2}^\circ` for `67^\circ 30'`."""
    return _DEGREES_AND_MINUTES_PATTERN.sub(_angle_in_degrees_alone, text)


def _angle_in_degrees_alone(match: re.Match[str]) -> str:
    """Return an angle in degrees alone; one with 60 minutes or seconds or more stays as it is.

    The groups of the match are the degrees, the minutes, and the seconds or None.
    """
    minutes = Fraction(match[2])
    seconds = Fraction(match[3] or 0)
    if minutes >= 60 or seconds >= 60:
        return match[0]
    part_of_degree = (minutes + seconds / 60) / 60
    fraction = ""
    if part_of_degree:
        fraction = rf"\frac{{{part_of_degree.numerator}}}{{{part_of_degree.denominator}}}"
    return rf"{match[1]}{fraction}^\circ "
