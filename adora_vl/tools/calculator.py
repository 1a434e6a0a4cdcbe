"""Reads an expression as a pocket calculator does, for the tool `calculate`.

The trees are those of `rewards/grammar.py` and are valued by `rewards/numeric.py`, so nothing is
evaluated by Python and nothing can hang. The grammar is wider than that of answers, where a
spelling that two people could mean differently is nobody's answer: here `2^3^2` is 512, `5*-2` is
-10, and `2e3` is 2000. What even calculators do not agree on is refused: `1/2pi`, `sin30^2`.
"""

import re

from adora_vl.rewards.grammar import (
    FUNCTION_NAMES,
    MAX_CHARS,
    MAX_COSTLY_TOKENS,
    MAX_LITERAL_DIGITS,
    MAX_NESTING,
    ParseError,
    Tree,
)
from adora_vl.rewards.number_with_error import NumberWithError
from adora_vl.rewards.numeric import evaluate_closed_form

_ASCII_BY_SYMBOL = {
    "**": "^",
    "−": "-",
    "×": "*",
    "·": "*",
    "⋅": "*",
    "÷": "/",
    "√": "sqrt",
    "π": "pi",
    "[": "(",
    "]": ")",
}
_NUMBER_REGEX = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9.]))?"
# `log2` and `log10` are names, so they come before the letters, which end at a digit.
_TOKEN_PATTERN = re.compile(
    rf"\s*({_NUMBER_REGEX}|log_?(?:2|10)(?![0-9.])|[A-Za-z]+|\*\*|[-+*/^()\[\]|!,°−×·⋅÷√π])"
)
_LARGEST_POWER_OF_TEN = 300  # of a number such as 2e3; numeric.MAX_BITS holds 10^301
_INVERSE_BY_SHORT_NAME = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_INVERSE_BY_FUNCTION = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}  # sin^-1
_BASE_BY_LOGARITHM = {"log": "10", "log2": "2", "log_2": "2", "log10": "10", "log_10": "10"}
_FUNCTION_NAMES = frozenset(
    {*FUNCTION_NAMES, *_INVERSE_BY_SHORT_NAME, *_BASE_BY_LOGARITHM, "sqrt", "cbrt", "exp", "abs"}
)
_EULER_NUMBER: Tree = (
    "num",
    "2.718281828459045235360287471352662497757247093699959574966967627724",
)
_PI_TREE: Tree = ("pi",)
_MINUS_ONE_TREE: Tree = ("sum", (-1, ("num", "1")))


def evaluate_expression(expression: str) -> NumberWithError:
    """Return the value of an expression, with a bound on its error.

    Raises `ParseError`: `not_read` for what is no expression of numbers, `too_large`,
    `undefined`.
    """
    return evaluate_closed_form(_read_expression(expression))


def _read_expression(expression: str) -> Tree:
    """Return the tree of an expression. Raises `ParseError`."""
    if len(expression) > MAX_CHARS:
        raise ParseError("too_large")
    tokens = list[str]()
    position = 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN_PATTERN.match(text, position)
        if match is None:
            raise ParseError
        tokens.append(_ASCII_BY_SYMBOL.get(match[1], match[1]))
        position = match.end()
    # Powers, factorials and functions take far longer than the four operations.
    costly_tokens = [token for token in tokens if token in _FUNCTION_NAMES or token in {"^", "!"}]
    if len(costly_tokens) > MAX_COSTLY_TOKENS:
        raise ParseError("too_large")
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.next:  # tokens are left behind the expression
        raise ParseError
    return tree


class _Reader:
    """A recursive-descent parser with one method for each rule of the grammar.

    Each method reads its rule from the next token on and returns its tree. It raises `ParseError`
    where the tokens do not fit.
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self._nesting = 0

    @property
    def next(self) -> str:
        """The next token, empty at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        """Return the next token, and go past it.

        Raises `ParseError` where it is not `expected`.
        """
        token = self.next
        if not token or (expected and token != expected):
            raise ParseError
        self._position += 1
        return token

    def sum(self) -> Tree:
        """Read the rule `product (+|- product)*`, and return its tree.

        It is `("sum", (1, product), (-1, product), ...)`, or one product as it is.
        """
        terms = [(1, self._product())]
        while self.next in {"+", "-"}:
            sign = -1 if self._take() == "-" else 1
            terms.append((sign, self._product()))
        return terms[0][1] if len(terms) == 1 else ("sum", *terms)

    def _product(self) -> Tree:
        """Read the rule `signed (operator signed | power)*`, and return its tree.

        Factors side by side are multiplied. The tree is `("product", ("*", factor), ("/", factor),
        ...)`, or one factor as it is.
        """
        factors = [("*", self._signed())]
        is_behind_divisor = False
        while self.next and self.next not in {"+", "-", ")", "|", ","}:
            if self.next in {"*", "/"}:
                operator = self._take()
                is_behind_divisor = operator == "/"
                factors.append((operator, self._signed()))
                continue
            # What can be meant in several ways is refused: `1/2pi`, `(2)3`, `1 2`.
            if is_behind_divisor or _is_number(self.next):
                raise ParseError
            factors.append(("*", self._power()))
        return factors[0][1] if len(factors) == 1 else ("product", *factors)

    def _signed(self) -> Tree:
        """Read the rule `(+|-)* power`, and return its tree.

        A power binds closer than its sign, so -2^2 is -4.
        """
        sign = 1
        while self.next in {"+", "-"}:
            if self._take() == "-":
                sign = -sign
        power = self._power()
        return power if sign == 1 else ("sum", (-1, power))

    def _power(self) -> Tree:
        """Read the rule `primary [!] [^ signed]`, a number with factorial and exponent.

        Returns its tree. The exponent may have an exponent itself, so 2^3^2 is 2^9. Raises
        `ParseError` for two factorials.
        """
        base = self._primary()
        while self.next == "°":  # angles are in degrees with and without their sign
            self._take()
        if self.next == "!":
            self._take()
            base = ("factorial", base)
            if self.next == "!":
                raise ParseError  # a double factorial, or one of a factorial
        if self.next != "^":
            return base
        self._take()
        return ("power", base, self._signed())

    def _primary(self) -> Tree:
        """Read what an operator can stand before, and return its tree.

        It is a number, a constant, a sum in brackets or between bars, or a function.
        """
        symbol = self.next
        if _is_number(symbol):
            return self._number()
        if symbol == "(":
            return self._group()
        if symbol == "|":
            self._take()
            tree = self._sum_in_brackets()
            self._take("|")
            return _absolute(tree)
        self._take()
        if symbol == "pi":
            return _PI_TREE
        if symbol == "e":
            return _EULER_NUMBER
        if symbol not in _FUNCTION_NAMES:
            raise ParseError
        return self._function(symbol)

    def _number(self) -> Tree:
        """Return a literal, also with an exponent as in `2e3`."""
        token = self._take()
        digits, _, power_of_ten = token.lower().partition("e")
        if len(digits) > MAX_LITERAL_DIGITS or abs(int(power_of_ten or 0)) > _LARGEST_POWER_OF_TEN:
            raise ParseError("too_large")
        return ("num", token)

    def _group(self) -> Tree:
        """Return a sum in round brackets."""
        self._take("(")
        tree = self._sum_in_brackets()
        self._take(")")
        return tree

    def _sum_in_brackets(self) -> Tree:
        """Return a sum that stands between brackets, which the caller takes.

        The nesting is bounded, since each level costs Python calls.
        """
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise ParseError("too_large")
        tree = self.sum()
        self._nesting -= 1
        return tree

    def _function(self, name: str) -> Tree:
        """Read the rest of the rule `name [^ exponent] argument`, and return its tree.

        `sin^2(30)` is the square of the sine, `sin^-1` the inverse function.
        """
        exponent = None
        if self.next == "^":
            self._take()
            exponent = self._exponent()
        if exponent == _MINUS_ONE_TREE and name in _INVERSE_BY_FUNCTION:
            name = _INVERSE_BY_FUNCTION[name]
            exponent = None
        # `log(8, 2)` has its base as a second argument.
        may_have_base = name == "log" and self.next == "("
        tree = self._logarithm() if may_have_base else _call_function(name, self._argument())
        return tree if exponent is None else ("power", tree, exponent)

    def _exponent(self) -> Tree:
        """Return the exponent of a function's name: a number with its sign, or a group."""
        is_negative = self.next == "-"
        if is_negative:
            self._take()
        tree = self._group() if self.next == "(" else self._require_number()
        return ("sum", (-1, tree)) if is_negative else tree

    def _require_number(self) -> Tree:
        """Return a literal. Raises `ParseError` for any other token."""
        if not _is_number(self.next):
            raise ParseError
        return self._number()

    def _logarithm(self) -> Tree:
        """Read `log(x)` to the base 10, and `log(x, base)`."""
        self._take("(")
        argument = self._sum_in_brackets()
        base: Tree = ("num", "10")
        if self.next == ",":
            self._take()
            base = self._sum_in_brackets()
        self._take(")")
        return ("log", base, argument)

    def _argument(self) -> Tree:
        """Read the argument of a function, and return its tree.

        It is a sum in brackets, or a number or pi without brackets. Raises `ParseError` where the
        argument without brackets may go on, as in `sin 2pi`.
        """
        if self.next == "(":
            return self._group()
        if self.next == "pi":
            self._take()
            argument = _PI_TREE
        else:
            argument = self._require_number()
        if self.next == "°":
            self._take()
        if self.next not in {"", "+", "-", "*", "/", ")", "|", ","}:
            raise ParseError  # `sin30^2`, `sin 2pi`: where the angle ends is anybody's guess
        return argument


def _is_number(token: str) -> bool:
    """Return whether a token is a literal."""
    return token[:1].isdigit() or token[:1] == "."


def _call_function(name: str, argument: Tree) -> Tree:
    """Return the tree of a function of one argument, such as `sqrt` or `asin`."""
    if name in _BASE_BY_LOGARITHM:
        return ("log", ("num", _BASE_BY_LOGARITHM[name]), argument)
    if name == "sqrt":
        return ("root", 2, argument)
    if name == "cbrt":
        return ("root", 3, argument)
    if name == "exp":
        return ("power", _EULER_NUMBER, argument)
    if name == "abs":
        return _absolute(argument)
    return ("call", _INVERSE_BY_SHORT_NAME.get(name, name), argument)


def _absolute(tree: Tree) -> Tree:
    """Return the tree, or its negative where its value is below 0.

    The grammar has no absolute value.
    """
    return ("sum", (-1, tree)) if evaluate_closed_form(tree).value < 0 else tree
