"""Values as people write them: `2x + 5`, `\\frac{3}{4}`, `6\\sqrt{2}`, `18\\pi`.

One reader for the values of facts, for expected answers and for the numbers of the text form.
Nothing is evaluated by Python itself; numbers, exponents and nesting have bounds, so that no text
takes long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Operator = Literal["+", "-", "*", "/", "^"]

# Bounds on what a stranger writes: beyond these no text is a value of a diagram, and numbers overflow
# or a reader takes long.
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
_FIRST_SIGNS_OF_FACTOR = ("(", "{", "\\frac", "\\sqrt", "\\pi", "π")


class ExpressionError(ValueError):
    """A text is no value that can be read."""


@dataclass(frozen=True)
class Number:
    """A number as written, or pi."""

    value: float


@dataclass(frozen=True)
class Letter:
    """A letter of the problem, whose value the expression leaves open."""

    name: str


@dataclass(frozen=True)
class Operation:
    """One operation on two expressions; a root is a power with a fraction as exponent."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Number | Letter | Operation


def parse_expression(text: str) -> Expression:
    r"""Read a value such as `\frac{3}{4}x` as a tree of numbers, letters and operations.

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


def letters_in(expression: Expression) -> set[str]:
    """Return the letters that an expression has."""
    if isinstance(expression, Letter):
        return {expression.name}
    if isinstance(expression, Operation):
        return letters_in(expression.left) | letters_in(expression.right)
    return set()


def evaluate_expression(
    expression: Expression, letters: Mapping[str, float] | None = None
) -> float:
    """Return the value of an expression with these values of its letters.

    Raises `ExpressionError` for a letter without a value, and where the value is not a finite real
    number.
    """
    if isinstance(expression, Number):
        return expression.value
    if isinstance(expression, Letter):
        if letters is None or expression.name not in letters:
            raise ExpressionError(f"{expression.name} has no value")
        return letters[expression.name]
    x = evaluate_expression(expression.left, letters)
    y = evaluate_expression(expression.right, letters)
    try:
        value = _compute(expression.operator, x, y)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise ExpressionError(f"{x:g} {expression.operator} {y:g} has no value") from error
    if not math.isfinite(value):
        raise ExpressionError(f"{x:g} {expression.operator} {y:g} has no finite value")
    return value


def _compute(operator: Operator, x: float, y: float) -> float:
    """Return what arithmetic gives for two numbers. Raises what Python raises."""
    if operator == "+":
        return x + y
    if operator == "-":
        return x - y
    if operator == "*":
        return x * y
    if operator == "/":
        return x / y
    return math.pow(x, y)


def number_in_text(text: str) -> float | None:
    """Return the number that a text writes, such as `5\\sqrt{2}`; None where it writes none."""
    try:
        return evaluate_expression(parse_expression(text))
    except ExpressionError:
        return None


class _ExpressionReader:
    """Reads a value such as `2x + 5` from left to right: sums of products of powers.

    `signs` are the numbers, letters, operators and brackets of the text. `next` is the number of
    the sign that is read next, and `depth` how deep the brackets are nested.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.signs: list[str] = []
        self.next = 0
        self.depth = 0
        position = 0
        while position < len(text):
            match = _TOKEN_PATTERN.match(text, position)
            if match is None:
                raise self.error()
            self.signs.append(match[1])
            position = match.end()

    def error(self) -> ExpressionError:
        """Return the error that says that the text is no value."""
        return ExpressionError(f"{self.text!r:.60} is not a value")

    def peek(self) -> str | None:
        """Return the next sign, which stays; None at the end."""
        return self.signs[self.next] if self.next < len(self.signs) else None

    def take(self) -> str:
        """Return the next sign, and go past it. Raises `ExpressionError` at the end."""
        sign = self.peek()
        if sign is None:
            raise self.error()
        self.next += 1
        return sign

    def whole(self) -> Expression:
        """Return the expression of the whole text. Raises `ExpressionError` where signs remain."""
        expression = self.sum()
        if self.peek() is not None:
            raise self.error()
        return expression

    def sum(self) -> Expression:
        """Read products with plus and minus between them.

        Raises `ExpressionError` where brackets are nested over `MAX_NESTING` deep.
        """
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ExpressionError(f"a value has brackets over {MAX_NESTING} deep")
        expression = self.product()
        while self.peek() in ("+", "-"):
            operator: Operator = "+" if self.take() == "+" else "-"
            expression = Operation(operator=operator, left=expression, right=self.product())
        self.depth -= 1
        return expression

    def product(self) -> Expression:
        r"""Read factors with a sign between them or none, as in `2x` and `3\sqrt{2}`."""
        expression = self.signed()
        while True:
            sign = self.peek()
            if sign in _TIMES_SIGNS:
                self.take()
                expression = Operation(operator="*", left=expression, right=self.signed())
            elif sign == "/":
                self.take()
                expression = Operation(operator="/", left=expression, right=self.signed())
            elif sign is not None and self._begins_factor(sign):
                expression = Operation(operator="*", left=expression, right=self.power())
            else:
                return expression

    def _begins_factor(self, sign: str) -> bool:
        """Tell whether a factor without a sign before it may begin with this one."""
        is_letter_or_number = re.fullmatch(r"[a-z]|[\d.,]+", sign) is not None
        return sign in _FIRST_SIGNS_OF_FACTOR or is_letter_or_number

    def signed(self) -> Expression:
        """Read a power with any number of plus and minus signs before it."""
        negative = False
        while self.peek() in ("-", "+"):
            if self.take() == "-":
                negative = not negative
        power = self.power()
        if negative:
            return Operation(operator="-", left=Number(0.0), right=power)
        return power

    def power(self) -> Expression:
        """Read a base with its exponents. Raises `ExpressionError` for one over `MAX_EXPONENT`."""
        base = self.atom()
        while self.peek() == "^":
            self.take()
            exponent = self.group()
            if isinstance(exponent, Number) and abs(exponent.value) > MAX_EXPONENT:
                raise ExpressionError(f"the exponent {exponent.value:g} is over {MAX_EXPONENT:g}")
            base = Operation(operator="^", left=base, right=exponent)
        return base

    def group(self) -> Expression:
        r"""Read what stands in a pair of brackets, or one atom, as behind `\frac` and `^`."""
        if self.peek() not in ("{", "("):
            if self.peek() == "-":
                self.take()
                return Operation(operator="-", left=Number(0.0), right=self.atom())
            return self.atom()
        closing = {"{": "}", "(": ")"}[self.take()]
        expression = self.sum()
        if self.take() != closing:
            raise self.error()
        return expression

    def atom(self) -> Expression:
        """Read a bracket, a fraction, a root, pi, a number or a letter.

        Raises `ExpressionError` for any other sign, and for a number over `MAX_NUMBER`.
        """
        sign = self.peek()
        if sign in ("{", "("):
            return self.group()
        sign = self.take()
        if sign == "\\frac":
            numerator = self.group()
            return Operation(operator="/", left=numerator, right=self.group())
        if sign == "\\sqrt":
            return self.root()
        if sign in ("\\pi", "π"):
            return Number(math.pi)
        if re.fullmatch(r"[\d.,]+", sign):
            value = float(sign.replace(",", ""))
            if value > MAX_NUMBER:
                raise ExpressionError(f"the number {sign:.30} is over {MAX_NUMBER:g}")
            return Number(value)
        if re.fullmatch("[a-z]", sign):
            return Letter(sign)
        raise self.error()

    def root(self) -> Expression:
        """Read a root as a power; its degree stands in square brackets, and is 2 without these."""
        degree: Expression = Number(2.0)
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            if self.take() != "]":
                raise self.error()
        exponent = Operation(operator="/", left=Number(1.0), right=degree)
        return Operation(operator="^", left=self.group(), right=exponent)
