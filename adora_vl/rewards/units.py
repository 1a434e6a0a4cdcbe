r"""Units of measurement: which unit stands behind a value, and of what dimension and size it is.

A dimension is its base quantities with their powers, `length2` or `length/time`. A unit without a
factor, as in `12 square units`, compares with any unit of its dimension.
"""

import re
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of measurement.

    `text` is its stored spelling, `cm^2`. `factor` is its size in base units of the dimension, None
    for a unit of no definite size.
    """

    text: str
    dimension: str
    factor: Fraction | None


RADIANS = "radians"  # a dimension
# The units of each dimension: a pattern of their spellings, and their size in base units. A size of
# 0 means no definite size.
_UNITS_BY_DIMENSION = {
    "length": """m|met(?:er|re)s?|米 1, mm|millimet(?:er|re)s?|毫米 0.001, cm|centimet(?:er|re)s?|厘米 0.01,
        dm|decimet(?:er|re)s?|分米 0.1,
        km|kilomet(?:er|re)s?|千米|公里 1000, in|inch(?:es)? 0.0254, ft|foot|feet 0.3048,
        yd|yards? 0.9144, mi|miles? 1609.344, units?|单位 0, nm|nanomet(?:er|re)s?|纳米 0.000000001,
        [uμµ]m|micromet(?:er|re)s?|微米 0.000001""",
    "length2": "hectares?|公顷 10000, acres?|英亩 4046.8564224",
    "length3": """ml|mL|millilit(?:er|re)s?|毫升 0.000001, lit(?:er|re)s?|升 0.001,
        gallons? 0.003785411784, cc 0.000001""",
    "length/time": "mph 0.44704, kph|kmh|kmph 5/18, knots? 463/900",
    "time": "secs?|seconds?|秒 1, mins?|minutes?|分钟 60, hrs?|hours?|小时 3600, days?|天 86400, weeks?|周 "
    "604800",
    "months": "months?|个月 1, years?|yrs?|年 12",
    "mass": """grams?|克 1, mg|milligrams? 0.001, kg|kilograms?|千克|公斤 1000, lbs? 453.59237,
        oz|ounces? 28.349523125""",
    "force": "newtons?|牛顿?|(?<=[\\s~])N 1, kN|kilonewtons? 1000",
    "power": "watts?|瓦 1, kW|kilowatts? 1000",
    "pressure": "pascals?|Pa 1, kPa|kilopascals? 1000",
    "frequency": "hertz|Hz 1, kHz 1000",
    RADIANS: "rad|radians?|弧度 1",
    "temperature": "°C 1, °F 1",
    "count": """people|persons?|students?|times|ways|sides|faces|edges|vertices|diagonals|triangles|squares
        |rectangles|angles|lines|points|个|人|条|种|次|名|只 1""",
    "energy": "joules?|(?<=[\\s~])J 1, kJ|kilojoules? 1000, cal|calories? 4.184, kcal|kilocalories? 4184, kWh "
    "3600000",
    "angle": "deg(?:rees?)?|度 1",
    "dollars": "dollars?|USD 1, cents? 0.01",
    "euros": "euros?|EUR 1",
    "yuan": "yuan|元 1",
}
_DIMENSION_AND_SIZE_BY_PATTERN = {
    re.sub(r"\s", "", pattern): (dimension, Fraction(size) or None)
    for dimension, units in _UNITS_BY_DIMENSION.items()
    for pattern, size in (entry.rsplit(None, 1) for entry in units.split(","))
}
DEGREE_SIGN = r"^\circ"
_ANY_UNIT = "|".join(f"(?:{name})" for name in _DIMENSION_AND_SIZE_BY_PATTERN)
# Also `cm2`, as it is written without LaTeX; `m2` alone, without a space before it, is a product.
_PLAIN_UNIT_POWER = r"(?:(?<=[cdkm]m)|(?<=\sm))[23]"
_UNIT_POWER = rf"(?:\s*(?:\^\s*(?:[23]|\{{\s*[23]\s*\}})|squared|cubed)|{_PLAIN_UNIT_POWER})"
_UNIT_WITH_POWER = (
    rf"(?:(?:(?:sq|cu)\.?\s*|(?:square|cubic)\s+|平方|立方)?(?:{_ANY_UNIT})\.?(?:{_UNIT_POWER})?"
    r"|sq|square)"
)
_NEGATIVE_EXPONENT = r"\^\s*\{?\s*-\s*([123])\s*\}?"
# A value and its unit: `12 cm`, `12 cm^2`, `12 square feet`, `5\pi in.`, `60 km/h`, `5 m s^{-1}`.
MEASURED_VALUE_PATTERN = re.compile(
    rf"(.*(?:[\d}})$!]|\\pi))\s*({_UNIT_WITH_POWER}(?:\s*(?:/|per\s)\s*(?:{_UNIT_WITH_POWER}|[hs](?:{_UNIT_POWER})?)"
    rf"|\s*(?:\\cdot\s*)?(?:{_ANY_UNIT}|[hs])\s*\^\s*\{{?\s*-\s*[123]\s*\}}?)?)",
    re.DOTALL,
)
# A temperature, and what scale it is on.
TEMPERATURE_PATTERN = re.compile(
    r"(.*\d)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))\s*(?:\{\s*)?([CF])(?:\s*\})?", re.DOTALL
)
# Upright letters, which would be unknowns if they were not.
_UPRIGHT_LETTER_PATTERN = re.compile(r"\\(?:text|mathrm)\s*\{\s*([shgLlNJW])\s*\}\s*(?=[.$]*\s*$)")
_POWER_OF_UNIT_PATTERN = re.compile(
    r"^(?:(?:sq|cu)\b\.? ?|(?:square|cubic) |平方|立方)|\.?(?:\^[23]| ?squared| ?cubed)?\.?$"
)
_UNIT_BY_LETTER = {
    "s": "sec",
    "h": "hr",
    "g": "gram",
    "L": "liter",
    "l": "liter",
    "N": "newton",
    "J": "joule",
    "W": "watt",
}


def mark_upright_units(text: str) -> str:
    r"""Return `5\text{ s}` as `5 sec`: a letter that is set upright behind a value is a unit."""
    return _UPRIGHT_LETTER_PATTERN.sub(lambda match: f" {_UNIT_BY_LETTER[match[1]]}", text)


def parse_unit(text: str) -> Unit:
    """Return the unit in a text that `MEASURED_VALUE_PATTERN` has matched, or in `DEGREE_SIGN`.

    - `cm^2` has the dimension `length2` and the factor 1/10000, its size in square metres
    - `km/h` has the dimension `length/time` and the factor 5/18, its size in metres per second
    - `square units` has the dimension `length2` and the factor None
    - `sq`, as in `12 sq`, names no unit. It counts as `square units` does
    """
    if text == DEGREE_SIGN:
        return Unit(text=text, dimension="angle", factor=Fraction(1))
    text = _normalise_unit(text)
    factor: Fraction | None = Fraction(1)
    dimensions = []
    numerator_and_denominator = re.split(r" ?(?:/|\bper ) ?", text)
    # The exponent of the numerator counts as positive, the one of the denominator as negative. Most
    # units have no denominator, so the two sequences may differ in length.
    for sign, unit_text in zip((1, -1), numerator_and_denominator, strict=False):
        exponent = _exponent_of_unit(unit_text)
        name = _POWER_OF_UNIT_PATTERN.sub("", unit_text)
        dimension, size = _dimension_and_size(_UNIT_BY_LETTER.get(name, name))
        # One part without a definite size leaves the whole unit without one.
        if factor is not None:
            factor = None if size is None else factor * size ** (sign * exponent)
        power = str(exponent) if exponent > 1 else ""
        dimensions.append(f"{dimension}{power}")
    return Unit(text=text, dimension="/".join(dimensions), factor=factor)


def _normalise_unit(text: str) -> str:
    """Return a unit in one spelling: `m/s` for `m s^{-1}`, and `cm^2` for `cm ^ {2}`."""
    text = re.sub(rf"\s*(?:\\cdot\s*)?(\w+)\s*{_NEGATIVE_EXPONENT}", r"/\1^\2", text)
    text = text.replace("^1", "")
    text = re.sub(r"\s*\^\s*\{?\s*([23])\s*\}?", r"^\1", text)
    text = re.sub(r"(?<=m)([23])\b", r"^\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _dimension_and_size(name: str) -> tuple[str, Fraction | None]:
    """Return the dimension of a unit without its power, and its size in base units.

    The size is None where it is not definite. An unknown name counts as a length of no definite
    size.
    """
    for pattern, dimension_and_size in _DIMENSION_AND_SIZE_BY_PATTERN.items():
        if re.fullmatch(pattern, name):
            return dimension_and_size
    return "length", None


def _exponent_of_unit(unit_text: str) -> int:
    """Return the power of a unit: 2 for `cm^2` and `sq cm`, 3 for `cubic metres`, else 1."""
    if re.search(r"\^3|cubed|\bcu|立方", unit_text):
        return 3
    if re.search(r"\^2|squared|\bsq|平方", unit_text):
        return 2
    return 1
