r"""The closed forms that geometry answers are written in, evaluated without any symbolic algebra.

Reads integers, decimals, fractions, mixed numbers, roots, `\pi`, sums, products, small powers and the sine, cosine and
tangent of plain angles in degrees. Rational results are exact `Fraction`s, the others floats. Nothing here can hang:
the length, the nesting, the digits of a literal and the size of a power are capped before anything is computed.

Ambiguous spellings are not read, so that nothing is right by accident: `1/2\pi`, `2^34`, `\sqrt{3}2`, `3\frac{5}{2}`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARS = 500
MAX_NESTING = 16
MAX_DIGITS = 40  # of one literal
MAX_EXPONENT = 64
MAX_BITS = 1000  # of a numerator or denominator: anything below still converts to a float

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[A-Za-z]+|[-+*/^(){}\[\]]")
_TIMES = frozenset({r"\cdot", r"\times", "*"})
_OVER = frozenset({"/", r"\div"})
_TRIG = {r"\sin": math.sin, r"\cos": math.cos, r"\tan": math.tan}
_ANGLE_EPS = 1e-12  # cos(90 degrees) is 6e-17 in floats, not 0

Reason = Literal["not_read", "too_large", "undefined"]


class NotReadError(ValueError):
    """`reason`: `not_read` (not one of the forms above), `too_large` (over a cap) or `undefined` (such as 1/0)."""

    def __init__(self, reason: Reason = "not_read") -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Number:
    """A closed form that was read.

    `unevaluated`: the expression is arithmetic still to be done, such as `180-40` or `(180-40)/2`: it has no root, pi
    or sine in it, and a sum, difference or product of bare integers and decimals somewhere.
    """

    value: Fraction | float
    unevaluated: bool


def evaluate(text: str) -> Number | None:
    r"""The number that `text` (in canonical form) writes, or None for anything that is not one of the forms above."""
    try:
        return read_number(text)
    except NotReadError:
        return None


def read_number(text: str) -> Number:
    """As `evaluate`, but raises `NotReadError`, whose reason tells a cap and an undefined value from other text."""
    if len(text) > MAX_CHARS:
        raise NotReadError("too_large")
    nesting = deepest = 0
    for char in text:
        nesting += (char in "({[") - (char in ")}]")
        deepest = max(deepest, nesting)
    if deepest > MAX_NESTING:
        raise NotReadError("too_large")
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise NotReadError
    parser = _Parser(tokens)
    part = parser.sum()
    if parser.peek():
        raise NotReadError
    return Number(part.value, parser.bare_operation and not parser.closed_form)


@dataclass(frozen=True)
class _Part:
    """A value, and whether only bare integers and decimals and + - x ^ went into it."""

    value: Fraction | float
    bare: bool = False


class _Parser:
    """Recursive descent over the tokens; its depth is bounded by `MAX_NESTING`. Raises `NotReadError`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self.bare_operation = False
        self.closed_form = False

    def peek(self) -> str:
        """The next token, or an empty string at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        symbol = self.peek()
        if not symbol or (expected and symbol != expected):
            raise NotReadError
        self._next += 1
        return symbol

    def sum(self) -> _Part:
        """`[sign] term (+|- term)*`"""
        negative = self.peek() in {"+", "-"} and self._take() == "-"
        first = self._product()
        total = _Part(-first.value, first.bare) if negative else first
        while self.peek() in {"+", "-"}:
            sign = -1 if self._take() == "-" else 1
            term = self._product()
            total = self._joined(total, term, total.value + sign * term.value)
        return total

    def _product(self) -> _Part:
        """`factor (operator factor | factor)*`, where juxtaposition multiplies."""
        result = self._power()
        divided = False
        while (symbol := self.peek()) and symbol not in {"+", "-", ")", "}", "]"}:
            if symbol in _OVER:
                self._take()
                divisor = self._power()
                if divisor.value == 0:
                    raise NotReadError("undefined")
                result = _Part(_sized(result.value / divisor.value))
                divided = True
                continue
            if symbol in _TIMES:
                self._take()
                divided = False
            elif divided or symbol == "{" or symbol[0] in ".0123456789":
                raise NotReadError  # `1/2\pi` can be meant in two ways; `1{2}` and `\sqrt{3}2` look like something else
            factor = self._power()
            result = self._joined(result, factor, result.value * factor.value)
        return result

    def _joined(self, left: _Part, right: _Part, value: Fraction | float) -> _Part:
        bare = left.bare and right.bare
        self.bare_operation |= bare
        return _Part(_sized(value), bare)

    def _power(self) -> _Part:
        """`primary [^ digit | ^ {sum}]`"""
        symbol = self.peek()
        base = self._primary()
        if self.peek() != "^":
            return base
        if symbol in _TRIG:
            raise NotReadError  # `\sin30^2` can be meant in two ways
        self._take()
        if self.peek() == "{":
            exponent = self._group("{", "}")
        elif len(self.peek()) == 1 and self.peek().isdigit():
            exponent = _Part(self._literal(), bare=True)
        else:
            raise NotReadError  # `2^34` is 2^3 beside a 4 in TeX
        if self.peek() == "^":
            raise NotReadError
        return _Part(_raised(base.value, exponent.value), base.bare and exponent.bare)

    def _primary(self) -> _Part:
        symbol = self.peek()
        if symbol in {"(", "{"}:
            return self._group(symbol, ")" if symbol == "(" else "}")
        if symbol == r"\frac":
            return self._fraction()
        if symbol == r"\sqrt":
            return self._root()
        if symbol in _TRIG:
            return self._sine()
        if symbol == r"\pi":
            self._take()
            self.closed_form = True
            return _Part(math.pi)
        literal = self._literal()
        return self._mixed(literal) if self.peek() == r"\frac" else _Part(literal, bare=True)

    def _group(self, opening: str, closing: str) -> _Part:
        self._take(opening)
        part = self.sum()
        self._take(closing)
        return part

    def _literal(self) -> Fraction:
        symbol = self._take()
        if symbol[0] not in ".0123456789":
            raise NotReadError
        if len(symbol) > MAX_DIGITS:
            raise NotReadError("too_large")
        return Fraction(symbol)

    def _fraction(self) -> _Part:
        self._take(r"\frac")
        above = self._group("{", "}")
        below = self._group("{", "}")
        if below.value == 0:
            raise NotReadError("undefined")
        return _Part(_sized(above.value / below.value))

    def _mixed(self, whole: Fraction) -> _Part:
        r"""`7\frac{1}{2}` is 7.5, but `7\frac{\sqrt{3}}{2}` a product; `3\frac{5}{2}` may be either and is not read."""
        start = self._next
        window = self._tokens[start : start + 7]
        if len(window) < 7 or not (window[2] + window[5]).isdigit() or window[3:5] != ["}", "{"] or window[6] != "}":
            return _Part(whole, bare=True)  # the fraction is the next factor of the product
        part = self._fraction()
        if whole.denominator != 1 or not 0 < part.value < 1 or self.peek() == "^":
            raise NotReadError
        return _Part(_sized(whole + part.value))

    def _root(self) -> _Part:
        self._take(r"\sqrt")
        degree = 2
        if self.peek() == "[":
            self._take()
            symbol = self._take()
            if not (len(symbol) == 1 and symbol.isdigit() and int(symbol) >= 2):
                raise NotReadError
            degree = int(symbol)
            self._take("]")
        radicand = self._group("(", ")") if self.peek() == "(" else self._group("{", "}")
        self.closed_form = True
        return _Part(_rooted(radicand.value, degree))

    def _sine(self) -> _Part:
        """The sine, cosine or tangent of a plain angle in degrees, with or without brackets around it."""
        name = self._take()
        bracket = self.peek()
        closing = {"(": ")", "{": "}"}.get(bracket)
        if closing:
            self._take()
        degrees = self._literal()
        if closing:
            self._take(closing)
        elif self.peek() in {r"\pi", r"\sqrt", r"\frac", "("}:
            raise NotReadError  # `\sin30\sqrt{3}`: where the angle ends is anybody's guess
        angle = math.radians(float(degrees))
        if name == r"\tan" and abs(math.cos(angle)) < _ANGLE_EPS:
            raise NotReadError("undefined")
        self.closed_form = True
        return _Part(_TRIG[name](angle))


def _sized(value: Fraction | float) -> Fraction | float:
    """`value`, or `NotReadError("too_large")` where it is over the cap on size."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise NotReadError("too_large")
    elif not math.isfinite(value):
        raise NotReadError("too_large")
    return value


def _raised(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    """`base ** exponent` for a small rational exponent; the size of the result is bounded before it is computed."""
    if not isinstance(exponent, Fraction):
        raise NotReadError
    if abs(exponent) > MAX_EXPONENT:
        raise NotReadError("too_large")
    if base == 0 and exponent <= 0:
        raise NotReadError("undefined")
    if base < 0 and exponent.denominator != 1:
        raise NotReadError("undefined")
    if isinstance(base, Fraction) and exponent.denominator == 1:
        if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > MAX_BITS:
            raise NotReadError("too_large")
        return Fraction(base ** int(exponent))
    try:
        return _sized(math.pow(float(base), float(exponent)))
    except OverflowError:
        raise NotReadError("too_large") from None


def _rooted(radicand: Fraction | float, degree: int) -> Fraction | float:
    """The real root, exact where the radicand is a perfect power."""
    negative = radicand < 0
    if negative and degree % 2 == 0:
        raise NotReadError("undefined")
    size = -radicand if negative else radicand
    root = math.pow(float(size), 1 / degree)
    if isinstance(size, Fraction):
        exact = Fraction(round(float(size.numerator) ** (1 / degree)), round(float(size.denominator) ** (1 / degree)))
        if exact**degree == size:
            return -exact if negative else exact
    return -root if negative else root
