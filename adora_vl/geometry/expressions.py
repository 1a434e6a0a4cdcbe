"""Values as people write them: `2x + 5`, `\\frac{3}{4}`, `6\\sqrt{2}`, `18\\pi`.

One reader for the values of facts, for expected answers and for the numbers of the text form.
Nothing is evaluated by Python itself; numbers, exponents and nesting have bounds, so that no text
takes long.
"""

from __future__ import annotations

import math
import re

from adora_vl.geometry.quantities import (
    Arithmetic,
    Constant,
    Function,
    Quantity,
    Unknown,
    has_no_real_power,
    minus,
    number_of_quantity,
    over,
    times,
)

# Bounds on what a stranger writes: beyond these no text is a value of a diagram, and numbers
# overflow or a reader takes long.
MAX_NUMBER = 1e9
MAX_EXPONENT = 12.0
MAX_NESTING = 20
MAX_CHARACTERS = 400

_TOKEN_PATTERN = re.compile(
    r"\s*(\\frac|\\sqrt|\\pi|π|\\cdot|\\times|×|\d+(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\.\d+|\d+|[a-z]|[-+*/^(){}\[\]])"
)
# A unit behind a number, also squared. A metre is told from the letter m by the space before it and
# the end behind it.
UNIT_PATTERN = (
    r"(?<=[\d)}])\s*(?:(?:square|sq\.?)\s*)?"
    r"(?:\\(?:text|mathrm|rm)\s*\{?\s*)?"
    r"(?:(?:[cmk]m|in(?:ch(?:es)?)?(?!\s+[a-z]{3})|f(?:ee|oo)?t|yd|yards?|mi(?:les?)?|units?"
    r"|(?:centi|milli|kilo)?met(?:er|re)s?)\b|(?<=\s)m(?=\s*$|\s*\^|²))"
    r"(?:\s*\})?(?:\s*\^\s*\{?2\}?|²)?"
)
# What says nothing about a value: LaTeX's spacing and dollar signs, and the word or sign for
# degrees.
_NOISE_PATTERN = re.compile(
    r"\\(?:left|right|,|;|!)|\\?\$|\\text\{[^}]*\}|\bdegrees?\b|\^\s*\{?\s*\\circ\s*\}?|\\degree|\\circ|°"
)
_TIMES_SIGNS = ("*", "\\cdot", "\\times", "×")
_FIRST_TOKENS_OF_FACTOR = ("(", "{", "\\frac", "\\sqrt", "\\pi", "π")


class ExpressionError(ValueError):
    """A text is no value that can be read."""


def parse_expression(text: str) -> Quantity:
    r"""Read a value such as `\frac{3}{4}x` as arithmetic on numbers and letters.

    Units, dollar signs and spacing of LaTeX say nothing, and are dropped. Raises `ExpressionError`
    where the text is no value.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"a value has {len(text)} characters, over {MAX_CHARACTERS}")
    plain = text.replace("√", "\\sqrt ").strip()
    plain = re.sub(UNIT_PATTERN, "", plain)
    plain = _NOISE_PATTERN.sub("", plain).strip()
    # Commands of LaTeX may be written without a backslash: `pi`, `sqrt(3)`.
    plain = re.sub(r"(?<![a-z\\])pi(?![a-z])", r"\\pi", plain)
    plain = re.sub(r"(?<![a-z\\])(sqrt|frac)", r"\\\1", plain)
    return _ExpressionReader(plain).whole()


def number_in_text(text: str) -> float | None:
    """Return the number that a text writes, such as `5\\sqrt{2}`; None where it writes none."""
    try:
        value = number_of_quantity(parse_expression(text))
    except ExpressionError:
        return None
    return value if value is not None and math.isfinite(value) else None


class _ExpressionReader:
    """Reads a value such as `2x + 5` from left to right: sums of products of powers.

    `tokens` are the numbers, letters, operators and brackets of the text. `next_index`
    is the index of the token that is read next, and `depth` how deep the brackets are nested.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        self.next_index = 0
        self.depth = 0
        position = 0
        while position < len(text):
            match = _TOKEN_PATTERN.match(text, position)
            if match is None:
                raise self.error()
            self.tokens.append(match[1])
            position = match.end()

    def error(self) -> ExpressionError:
        """Return the error that says that the text is no value."""
        return ExpressionError(f"{self.text!r:.60} is not a value")

    def peek(self) -> str | None:
        """Return the next token, which stays; None at the end."""
        return self.tokens[self.next_index] if self.next_index < len(self.tokens) else None

    def take(self) -> str:
        """Return the next token, and go past it. Raises `ExpressionError` at the end."""
        symbol = self.peek()
        if symbol is None:
            raise self.error()
        self.next_index += 1
        return symbol

    def whole(self) -> Quantity:
        """Return the expression of the whole text. Raises `ExpressionError` where tokens remain."""
        expression = self.sum()
        if self.peek() is not None:
            raise self.error()
        return expression

    def sum(self) -> Quantity:
        """Read products with plus and minus between them.

        Raises `ExpressionError` where brackets are nested over `MAX_NESTING` deep.
        """
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ExpressionError(f"a value has brackets over {MAX_NESTING} deep")
        expression = self.product()
        while self.peek() in ("+", "-"):
            function: Function = "+" if self.take() == "+" else "-"
            expression = Arithmetic(function=function, parts=(expression, self.product()))
        self.depth -= 1
        return expression

    def product(self) -> Quantity:
        r"""Read factors with a sign between them or none, as in `2x` and `3\sqrt{2}`."""
        expression = self.signed()
        while True:
            symbol = self.peek()
            if symbol in _TIMES_SIGNS:
                self.take()
                expression = times(expression, self.signed())
            elif symbol == "/":
                self.take()
                expression = over(expression, self.signed())
            elif symbol is not None and self._begins_factor(symbol):
                expression = times(expression, self.power())
            else:
                return expression

    def _begins_factor(self, symbol: str) -> bool:
        """Tell whether a factor without a sign before it may begin with `symbol`: the x of `2x`."""
        is_letter_or_number = re.fullmatch(r"[a-z]|[\d.,]+", symbol) is not None
        return symbol in _FIRST_TOKENS_OF_FACTOR or is_letter_or_number

    def signed(self) -> Quantity:
        """Read a power with any number of plus and minus signs before it."""
        negative = False
        while self.peek() in ("-", "+"):
            if self.take() == "-":
                negative = not negative
        power = self.power()
        if negative:
            return minus(Constant(0.0), power)
        return power

    def power(self) -> Quantity:
        """Read a base with its exponents. Raises `ExpressionError` for one over `MAX_EXPONENT`."""
        base = self.atom()
        while self.peek() == "^":
            self.take()
            exponent = self.group()
            if isinstance(exponent, Constant) and abs(exponent.value) > MAX_EXPONENT:
                raise ExpressionError(f"the exponent {exponent.value:g} is over {MAX_EXPONENT:g}")
            base = self.raised(base, exponent)
        return base

    def raised(self, base: Quantity, exponent: Quantity) -> Quantity:
        """Return a power. Raises `ExpressionError` for a root of a negative number."""
        if has_no_real_power(base, exponent):
            raise ExpressionError(f"{self.text!r:.60} has a root of a negative number")
        return Arithmetic(function="^", parts=(base, exponent))

    def group(self) -> Quantity:
        r"""Read what stands in a pair of brackets, or one atom, as behind `\frac` and `^`."""
        if self.peek() not in ("{", "("):
            if self.peek() == "-":
                self.take()
                return minus(Constant(0.0), self.atom())
            return self.atom()
        closing = {"{": "}", "(": ")"}[self.take()]
        expression = self.sum()
        if self.take() != closing:
            raise self.error()
        return expression

    def atom(self) -> Quantity:
        """Read a bracket, a fraction, a root, pi, a number or a letter.

        Raises `ExpressionError` for any other token, and for a number over `MAX_NUMBER`.
        """
        symbol = self.peek()
        if symbol in ("{", "("):
            return self.group()
        symbol = self.take()
        if symbol == "\\frac":
            numerator = self.group()
            return over(numerator, self.group())
        if symbol == "\\sqrt":
            return self.root()
        if symbol in ("\\pi", "π"):
            return Constant(math.pi)
        if re.fullmatch(r"[\d.,]+", symbol):
            value = float(symbol.replace(",", ""))
            if value > MAX_NUMBER:
                raise ExpressionError(f"the number {symbol:.30} is over {MAX_NUMBER:g}")
            return Constant(value)
        if re.fullmatch("[a-z]", symbol):
            return Unknown(symbol)
        raise self.error()

    def root(self) -> Quantity:
        """Read a root as a power; its degree stands in square brackets, and is 2 without these."""
        degree: Quantity = Constant(2.0)
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            if self.take() != "]":
                raise self.error()
        exponent = over(Constant(1.0), degree)
        return self.raised(self.group(), exponent)
