r"""The value of a LaTeX expression, read as MathVision's official score reads it.

That score parses a text with the package `latex2sympy2` and evaluates what it prints with the
functions of Python's `math`. The package does not fit beside the one that the grader needs, so its
grammar stands here as far as a number can come of it, with its habits:

- What follows a whole expression is ignored if it starts with a closing bracket, a full stop, `_`,
  `&` or `\\`.
- `12\frac{1}{2}` is a product, `1/2\pi` has the product below the line, and `3:4` is a quotient.
- Letters are unknowns, also `e` without an exponent; `\ln` and `|x|` have no value either.
"""

import math
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction

Number = int | float
# The official score has no such bounds, and would compute for hours.
_MAX_POWER_BITS = 100_000  # of a power
_MAX_FACTORIAL_ARGUMENT = 5_000  # the largest argument of a factorial


class _NoValueError(Exception):
    """The text has no value, for which the official score raises too."""


def _exp(exponent: Number) -> Number:
    """Return a power of e.

    Raises `_NoValueError` for e itself, which the official code prints as `E` and cannot evaluate.
    """
    if exponent == 1:
        raise _NoValueError
    return math.exp(exponent)


_TRIGONOMETRIC_NAMES = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
# The function of each command. `_parse_function` has the commands with more than one argument.
_FUNCTION_BY_COMMAND: dict[str, Callable[[float], Number]] = {
    **{rf"\{name}": getattr(math, name) for name in _TRIGONOMETRIC_NAMES},
    **{rf"\arc{name}": getattr(math, f"a{name}") for name in _TRIGONOMETRIC_NAMES},
    **{rf"\ar{name}": getattr(math, f"a{name}") for name in _TRIGONOMETRIC_NAMES[3:]},
    r"\log": lambda value: math.log(value, 10),
    r"\exp": _exp,
}
_FUNCTION_COMMANDS = {*_FUNCTION_BY_COMMAND, r"\ln", r"\sqrt", r"\lfloor"}
_CONSTANT_BY_COMMAND = {r"\pi": math.pi, r"\tau": math.tau}
# The closing bracket of each opening one.
_CLOSING_BRACKET_BY_OPENING = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\{": r"\}",
    r"\lbrace": r"\rbrace",
    r"\lfloor": r"\rfloor",
}
_MULTIPLICATION_SIGNS = ("*", r"\times", r"\cdot")
_DIVISION_SIGNS = ("/", ":", r"\div")
_LEFT_OR_RIGHT_PATTERN = re.compile(r"\\(?:left|right)(?=\s*(?:[()\[\]|]|\\[{}]))")
_ASSIGNMENT_PATTERN = re.compile(r"(?:\s*[a-z]\s*=)+")  # `x=5` is 5
# Only the digits 0 to 9: others, such as `５`, have no value in the official grammar.
_NUMBER_REGEX = r"(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:\\%)?"
# Names of functions that the grammar has without a backslash: `3 rows` and `3 triangles` are 3, `3
# lines` is nothing.
_FUNCTION_NAMES_REGEX = (
    "arc?(?:sin|cos|tan)h|[bpv]?matrix|ceil|cols|diag|eig|eye|floor|gcd|lcm|norm|nullspace|ones|orth|[hv]stack|rank|"
    "rows|rref|svd|tr|zeros"
)
# Tokens that may follow a whole expression; the official grammar ignores them and the rest. The
# last token of a text is the empty one, which the pattern matches too.
_MAY_FOLLOW_EXPRESSION_PATTERN = re.compile(
    rf"[)\]}}.&_]|\\(?:}}|right|rbrace|rfloor).*|\\\\|{_FUNCTION_NAMES_REGEX}|"
)
# A command is the longest known one that the text starts with: in `\pix` it is `\pi`.
_KNOWN_COMMANDS = {
    r"\frac",
    r"\binom",
    *_FUNCTION_COMMANDS,
    *_CONSTANT_BY_COMMAND,
    *_CLOSING_BRACKET_BY_OPENING,
    *_CLOSING_BRACKET_BY_OPENING.values(),
    *_MULTIPLICATION_SIGNS,
    *_DIVISION_SIGNS,
}
_COMMANDS_REGEX = "|".join(map(re.escape, sorted(_KNOWN_COMMANDS, key=len, reverse=True)))
_TOKEN_PATTERN = re.compile(
    r"(?:[\s$'~]|\\,|\\q?quad|\\displaystyle(?![a-z]))+"  # skipped
    rf"|({_NUMBER_REGEX}|{_COMMANDS_REGEX}|\\[a-z]+|\\\\|{_FUNCTION_NAMES_REGEX}|.)"
)


def evaluate_latex(text: str) -> Number | None:
    r"""Evaluate a LaTeX expression in lower case; None if it has no value.

    `\frac{1}{2}` gives 0.5, `2^3` gives the `int` 8, and `x` gives None.
    """
    try:
        parser = _Parser(text)
        value = parser.parse_sum()
        next_token = parser.tokens[0]
        # The text after the expression is ignored if it begins with one of certain tokens.
        ends_well = _MAY_FOLLOW_EXPRESSION_PATTERN.fullmatch(next_token) is not None
        # `isfinite` raises for an integer that is too large for a float.
        return value if ends_well and math.isfinite(value) else None
    except (_NoValueError, ArithmeticError, ValueError, RecursionError):
        return None


class _Parser:
    """Evaluates an expression by recursive descent, with one method for each rule of the grammar.

    Each method removes its tokens from the front of `tokens`, and returns their value. The last
    token is an empty text, so that there is always a next token.
    """

    def __init__(self, text: str) -> None:
        r"""Split the expression into tokens.

        Names of fractions become one, `\left` and `\right` are left out, and so is an assignment
        such as `x=` at the beginning.
        """
        text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
        if _ASSIGNMENT_PATTERN.match(text):
            text = _ASSIGNMENT_PATTERN.sub("", text, count=1)
        text = _LEFT_OR_RIGHT_PATTERN.sub("", text)
        # Spaces match too, but with an empty group, and are left out.
        tokens = [symbol for symbol in _TOKEN_PATTERN.findall(text) if symbol]
        self.tokens = deque([*tokens, ""])

    def parse_sum(self) -> Number:
        """Evaluate products with plus and minus signs between them."""
        value = self._parse_product()
        while sign := self._take("+", "-"):
            term = self._parse_product()
            value = value + term if sign == "+" else value - term
        return value

    def _parse_product(self, *, allow_functions: bool = True) -> Number:
        r"""Evaluate factors with signs of multiplication or division between them.

        `allow_functions`: whether a function such as `\sin` may follow a factor without a sign.
        """
        value = self._parse_signed_factors(allow_functions=allow_functions)
        while sign := self._take(*_MULTIPLICATION_SIGNS, *_DIVISION_SIGNS):
            factor = self._parse_signed_factors(allow_functions=allow_functions)
            value = value * factor if sign in _MULTIPLICATION_SIGNS else value / factor
        return value

    def _parse_signed_factors(self, *, allow_functions: bool) -> Number:
        """Evaluate any number of plus and minus signs, and the factors after them.

        The factors have no signs between them, as in `2x` and `3(4)`.
        """
        sign = self._take("+", "-")
        if sign:
            value = self._parse_signed_factors(allow_functions=allow_functions)
            return value if sign == "+" else -value
        value = self._parse_factor()
        while self._is_at_factor(allow_functions=allow_functions):
            value *= self._parse_factor()
        return value

    def _is_at_factor(self, *, allow_functions: bool) -> bool:
        """Return whether the next token begins another factor, without a sign before it.

        That is so for the `(` in `3(4)`. A letter and an unknown command begin a factor too: they
        have no value, and then the whole expression has none.
        """
        symbol = self.tokens[0]
        is_sign = symbol in (*_MULTIPLICATION_SIGNS, *_DIVISION_SIGNS)
        if is_sign or _MAY_FOLLOW_EXPRESSION_PATTERN.fullmatch(symbol):
            return False
        if symbol in _FUNCTION_COMMANDS:
            return allow_functions
        is_word_or_number = symbol[-1].isalnum() or symbol.endswith(r"\%")
        is_opening_bracket = symbol in (*_CLOSING_BRACKET_BY_OPENING, "|")
        return is_word_or_number or is_opening_bracket

    def _parse_factor(self) -> Number:
        """Evaluate one factor with its exponents and factorials.

        `2^3^2` is `(2^3)^2`, as in the official grammar.
        """
        value = self._parse_base()
        while self._take("^"):
            value = _power(value, self._parse_exponent())
        while self._take("!"):
            if not isinstance(value, int) or not 0 <= value <= _MAX_FACTORIAL_ARGUMENT:
                raise _NoValueError
            value = math.factorial(value)
        return value

    def _parse_exponent(self) -> Number:
        """Evaluate the exponent after `^`: an expression in braces, a number or a constant."""
        if self.tokens[0] == "{":
            return self._parse_group("{")
        return self._parse_atom()

    def _parse_base(self) -> Number:
        """Evaluate a factor without its exponents, by the kind of its first token.

        It is an expression in brackets, a power of e, a fraction, a binomial coefficient, a
        function, or an atom: a number or a constant.
        """
        symbol = self.tokens[0]
        if symbol in _CLOSING_BRACKET_BY_OPENING:
            value = self._parse_group(symbol)
            return math.floor(value) if symbol == r"\lfloor" else value
        if self._take("e"):
            self._expect("^")  # e itself has no value in the official code
            return _exp(self._parse_exponent())
        if self._take(r"\frac"):
            numerator = self._parse_group("{")
            denominator = self._parse_group("{")
            return numerator / denominator
        if self._take(r"\binom"):
            n = self._parse_group("{")
            k = self._parse_group("{")
            return _binomial(n, k)
        if self._take(*_FUNCTION_COMMANDS):
            return self._parse_function(symbol)
        return self._parse_atom()

    def _parse_function(self, name: str) -> Number:
        r"""Evaluate a function whose name, such as `\sin`, has just been taken."""
        if name == r"\sqrt":
            degree = self._parse_group("[") if self.tokens[0] == "[" else None
            radicand = self._parse_group("{")
            return math.sqrt(radicand) if degree is None else _power(radicand, 1 / degree)
        if name == r"\log" and self._take("_"):  # `\log_2 8` has the base 2
            base = self._parse_exponent()
            return math.log(self._parse_argument(), base)
        # `\sin^2 x` is the square of the sine, while `\sin^{-1} x` is its inverse function.
        exponent = self._parse_exponent() if self._take("^") else None
        argument = self._parse_argument()
        if name == r"\ln":  # the official code has no value for it
            raise _NoValueError
        name_without_backslash = name[1:]
        if exponent == -1 and name_without_backslash in _TRIGONOMETRIC_NAMES:
            inverse_function = _FUNCTION_BY_COMMAND[rf"\arc{name_without_backslash}"]
            return inverse_function(argument)
        value = _FUNCTION_BY_COMMAND[name](argument)
        return value if exponent is None else _power(value, exponent)

    def _parse_argument(self) -> Number:
        """Evaluate the argument of a function.

        It is an expression in round brackets. Without brackets it ends before the next plus, minus
        or function.
        """
        if self.tokens[0] == "(":
            return self._parse_group("(")
        return self._parse_product(allow_functions=False)

    def _parse_atom(self) -> Number:
        """Evaluate a number, which may be in percent, or a constant such as pi."""
        symbol = self.tokens.popleft()
        if symbol in _CONSTANT_BY_COMMAND:
            return _CONSTANT_BY_COMMAND[symbol]
        if not re.fullmatch(_NUMBER_REGEX, symbol):
            raise _NoValueError
        exact_value = Fraction(symbol.rstrip(r"\%").replace(",", ""))
        if symbol[-1] == "%":
            exact_value /= 100
        if exact_value.denominator == 1:
            return exact_value.numerator
        return exact_value.numerator / exact_value.denominator

    def _parse_group(self, opening: str) -> Number:
        """Evaluate the expression between an opening bracket and its closing one.

        Raises `_NoValueError` if either is missing.
        """
        self._expect(opening)
        value = self.parse_sum()
        self._expect(_CLOSING_BRACKET_BY_OPENING[opening])
        return value

    def _take(self, *tokens: str) -> str:
        """Remove and return the next token if it is one of `tokens`, else return an empty text."""
        return self.tokens.popleft() if self.tokens[0] in tokens else ""

    def _expect(self, symbol: str) -> None:
        """Remove the next token, which has to be `symbol`. Raises `_NoValueError` for another."""
        if not self._take(symbol):
            raise _NoValueError


def _power(base: Number, exponent: Number) -> Number:
    """Return `base ** exponent`.

    Raises `_NoValueError` for a power that is too large to compute or complex, because the official
    score has no value for it.
    """
    if isinstance(base, int) and isinstance(exponent, int):
        n_bits = base.bit_length() * exponent
        if n_bits > _MAX_POWER_BITS:
            raise _NoValueError
    power = base**exponent
    # A root of a negative number, such as (-8)^(1/3).
    if isinstance(power, complex):
        raise _NoValueError
    real_power: Number = power
    return real_power


def _binomial(n: Number, k: Number) -> Number:
    """Return the number of ways to choose `k` of `n` things.

    Raises `_NoValueError` for numbers that are negative, not whole, or too large to compute with.
    """
    if not isinstance(n, int) or not isinstance(k, int):
        raise _NoValueError
    if n < 0 or k < 0 or n > _MAX_FACTORIAL_ARGUMENT:
        raise _NoValueError
    return math.comb(n, k)
