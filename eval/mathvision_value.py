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
# Bounds of a power in bits, and of an argument of a factorial. The official score has none and
# would be busy for hours.
_MOST_BITS = 100_000
_MOST_FACTORIAL = 5_000


class _NoValueError(Exception):
    """The text has no value, for which the official score raises too."""


def _exp(exponent: Number) -> Number:
    """Return a power of e. Raises `_NoValueError` for e itself."""
    if exponent == 1:  # printed as `E`, which `math` does not know
        raise _NoValueError
    return math.exp(exponent)


_TRIGONOMETRIC = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
_CALLED: dict[str, Callable[[float], Number]] = {
    **{rf"\{name}": getattr(math, name) for name in _TRIGONOMETRIC},
    **{rf"\arc{name}": getattr(math, f"a{name}") for name in _TRIGONOMETRIC},
    **{rf"\ar{name}": getattr(math, f"a{name}") for name in _TRIGONOMETRIC[3:]},
    r"\log": lambda value: math.log(value, 10),
    r"\exp": _exp,
}
_FUNCTIONS = {*_CALLED, r"\ln", r"\sqrt", r"\lfloor"}
_CONSTANTS = {r"\pi": math.pi, r"\tau": math.tau}
_CLOSING = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\{": r"\}",
    r"\lbrace": r"\rbrace",
    r"\lfloor": r"\rfloor",
}
_TIMES = ("*", r"\times", r"\cdot")
_DIVIDED = ("/", ":", r"\div")
_SIDES = re.compile(r"\\(?:left|right)(?=\s*(?:[()\[\]|]|\\[{}]))")
_ASSIGNS = re.compile(r"(?:\s*[a-z]\s*=)+")  # `x=5` is 5
_NUMBER = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:\\%)?"
# Names of functions that the grammar has without a backslash: `3 rows` and `3 triangles` are 3, `3
# lines` is nothing.
_NAMES = (
    "arc?(?:sin|cos|tan)h|[bpv]?matrix|ceil|cols|diag|eig|eye|floor|gcd|lcm|norm|nullspace|ones|orth|[hv]stack|rank|"
    "rows|rref|svd|tr|zeros"
)
_STOPS = re.compile(rf"[)\]}}.&_]|\\(?:}}|right|rbrace|rfloor).*|\\\\|{_NAMES}|")
# A command is the longest known one that the text starts with: in `\pix` it is `\pi`.
_KNOWN = {
    r"\frac",
    r"\binom",
    *_FUNCTIONS,
    *_CONSTANTS,
    *_CLOSING,
    *_CLOSING.values(),
    *_TIMES,
    *_DIVIDED,
}
_COMMANDS = "|".join(map(re.escape, sorted(_KNOWN, key=len, reverse=True)))
_TOKEN = re.compile(
    r"(?:[\s$'~]|\\,|\\q?quad|\\displaystyle(?![a-z]))+"  # skipped
    rf"|({_NUMBER}|{_COMMANDS}|\\[a-z]+|\\\\|{_NAMES}|.)"
)


def latex_value(text: str) -> Number | None:
    """Return the value of a text in lower case, or None if it has none.

    It is an `int` where Python would print one.
    """
    try:
        reader = _Reader(text)
        value = reader.sum()
        return value if _STOPS.fullmatch(reader.tokens[0]) and math.isfinite(value) else None
    except (_NoValueError, ArithmeticError, ValueError, RecursionError):
        return None


class _Reader:
    """Evaluates an expression while it reads its tokens, one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        """Begin before the first token."""
        text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
        text = _SIDES.sub("", _ASSIGNS.sub("", text, count=1) if _ASSIGNS.match(text) else text)
        self.tokens = deque([*filter(None, _TOKEN.findall(text)), ""])

    def sum(self) -> Number:
        """Return the value of products with signs of plus and minus between them."""
        value = self._product()
        while sign := self._taken("+", "-"):
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self, *, functions: bool = True) -> Number:
        r"""Return the value of factors with signs of times or division between them.

        `functions`: whether one like `\sin` may follow a factor without a sign.
        """
        value = self._signed(functions)
        while sign := self._taken(*_TIMES, *_DIVIDED):
            factor = self._signed(functions)
            value = value * factor if sign in _TIMES else value / factor
        return value

    def _signed(self, functions: bool) -> Number:
        """Return the value of factors without signs between them, after any number of signs."""
        if sign := self._taken("+", "-"):
            return self._signed(functions) if sign == "+" else -self._signed(functions)
        value = self._raised()
        while self._starts(functions):
            value *= self._raised()
        return value

    def _starts(self, functions: bool) -> bool:
        """Return whether another factor follows without a sign.

        A letter and an unknown command do too, and have no value.
        """
        word = self.tokens[0]
        if _STOPS.fullmatch(word) or word in (*_TIMES, *_DIVIDED):
            return False
        if word in _FUNCTIONS:
            return functions
        return word[-1].isalnum() or word in (*_CLOSING, "|") or word.endswith(r"\%")

    def _raised(self) -> Number:
        """Read one factor with its exponents, `2^3^2` from the left, and factorials."""
        value = self._base()
        while self._taken("^"):
            value = _power(value, self._exponent())
        while self._taken("!"):
            if not isinstance(value, int) or not 0 <= value <= _MOST_FACTORIAL:
                raise _NoValueError
            value = math.factorial(value)
        return value

    def _exponent(self) -> Number:
        """Return the value of what stands behind `^`: braces, a number or a constant."""
        return self._group("{") if self.tokens[0] == "{" else self._atom()

    def _base(self) -> Number:
        """Read brackets, a power of e, a fraction, a binomial, a function or an atom."""
        word = self.tokens[0]
        if word in _CLOSING:
            value = self._group(word)
            return math.floor(value) if word == r"\lfloor" else value
        if self._taken("e"):
            self._expect("^")
            return _exp(self._exponent())
        if self._taken(r"\frac"):
            numerator = self._group("{")
            denominator = self._group("{")
            return numerator / denominator
        if self._taken(r"\binom"):
            n = self._group("{")
            k = self._group("{")
            return _binomial(n, k)
        return self._function(word) if self._taken(*_FUNCTIONS) else self._atom()

    def _function(self, name: str) -> Number:
        """Return the value of a function, whose name was read."""
        if name == r"\sqrt":
            root = self._group("[") if self.tokens[0] == "[" else None
            value = self._group("{")
            return math.sqrt(value) if root is None else _power(value, 1 / root)
        if name == r"\log" and self._taken("_"):  # the base stands below it: `\log_2 8`
            base = self._exponent()
            return math.log(self._argument(), base)
        # `\sin^2 x` is the square of the sine, while `\sin^{-1} x` is its inverse function.
        exponent = self._exponent() if self._taken("^") else None
        value = self._argument()
        if name == r"\ln":
            raise _NoValueError
        if exponent == -1 and name[1:] in _TRIGONOMETRIC:
            return _CALLED[rf"\arc{name[1:]}"](value)
        value = _CALLED[name](value)
        return value if exponent is None else _power(value, exponent)

    def _argument(self) -> Number:
        """Read an argument: brackets, or the factors up to the next function or sum."""
        return self._group("(") if self.tokens[0] == "(" else self._product(functions=False)

    def _atom(self) -> Number:
        """Return the value of a number or a constant."""
        word = self.tokens.popleft()
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if not re.fullmatch(_NUMBER, word):
            raise _NoValueError
        exact = Fraction(word.rstrip(r"\%").replace(",", ""))
        if word[-1] == "%":
            exact /= 100
        if exact.denominator == 1:
            return exact.numerator
        return exact.numerator / exact.denominator

    def _group(self, opening: str) -> Number:
        """Return the value of an expression in brackets.

        Raises `_NoValueError` if they do not close.
        """
        self._expect(opening)
        value = self.sum()
        self._expect(_CLOSING[opening])
        return value

    def _taken(self, *tokens: str) -> str:
        """Return the next token, removed, where it is one of these; else an empty text."""
        return self.tokens.popleft() if self.tokens[0] in tokens else ""

    def _expect(self, token: str) -> None:
        """Remove the next token. Raises `_NoValueError` if it is another one."""
        if not self._taken(token):
            raise _NoValueError


def _power(base: Number, exponent: Number) -> Number:
    """Return the value of a power.

    Raises `_NoValueError` for one too large to print, or complex.
    """
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * exponent > _MOST_BITS
    ):
        raise _NoValueError
    value = base**exponent
    if isinstance(value, complex):
        raise _NoValueError
    real: Number = value
    return real


def _binomial(above: Number, below: Number) -> Number:
    """Return the value of a binomial of integers within bounds.

    Raises `_NoValueError` for any other.
    """
    if not (
        isinstance(above, int)
        and isinstance(below, int)
        and 0 <= above <= _MOST_FACTORIAL
        and below >= 0
    ):
        raise _NoValueError
    return math.comb(above, below)
