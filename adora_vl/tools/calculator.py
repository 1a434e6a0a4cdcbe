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
    ExpressionTree,
    ParseError,
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
_EULER_NUMBER: ExpressionTree = (
    "num",
    "2.718281828459045235360287471352662497757247093699959574966967627724",
)
_PI_TREE: ExpressionTree = ("pi",)
_MINUS_ONE_TREE: ExpressionTree = ("sum", (-1, ("num", "1")))


def evaluate_expression(expression: str) -> NumberWithError:
    """Return the value of an expression, with a bound on its error.

    Raises `ParseError`: `not_read` for what is no expression of numbers, `too_large`,
    `undefined`.
    """
    return evaluate_closed_form(_parse_expression(expression))


def _parse_expression(expression: str) -> ExpressionTree:
    """Return the syntax tree of an expression. Raises `ParseError`.

    For example, `2+pi` gives `("sum", (1, ("num", "2")), (1, ("pi",)))`.
    """
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
    parser = _Parser(tokens)
    tree = parser.parse_sum()
    if parser.next_symbol:  # tokens are left behind the expression
        raise ParseError
    return tree


class _Parser:
    """A recursive-descent parser with one method for each rule of the grammar.

    Each method parses its rule from the next token on and returns its tree. It raises `ParseError`
    if the tokens do not fit the rule. A tree is a nested tuple whose first item is the type of the
    node. For example, `-2^3` gives `("sum", (-1, ("power", ("num", "2"), ("num", "3"))))`: a sum of
    one term with the sign -1. Angles are in degrees.
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self._nesting = 0

    @property
    def next_symbol(self) -> str:
        """The text of the next token, empty at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _pop_token(self, expected: str = "") -> str:
        """Return the next token, and move on to the one after it.

        Raises `ParseError` if there is none, or if it is not the `expected` one. An empty
        `expected` stands for any token.
        """
        token = self.next_symbol
        if not token or (expected and token != expected):
            raise ParseError
        self._position += 1
        return token

    def parse_sum(self) -> ExpressionTree:
        """Read the rule `product (+|- product)*`, and return its tree.

        It is `("sum", (1, product), (-1, product), ...)`, or one product as it is.
        """
        terms = [(1, self._product())]
        while self.next_symbol in {"+", "-"}:
            sign = -1 if self._pop_token() == "-" else 1
            terms.append((sign, self._product()))
        return terms[0][1] if len(terms) == 1 else ("sum", *terms)

    def _product(self) -> ExpressionTree:
        """Read the rule `signed (operator signed | power)*`, and return its tree.

        The operator is `*` or `/`. Factors side by side are multiplied, as in `2pi`. The tree is
        `("product", ("*", factor), ("/", factor), ...)`, or one factor as it is.
        """
        factors = [("*", self._signed())]
        is_behind_divisor = False
        while self.next_symbol and self.next_symbol not in {"+", "-", ")", "|", ","}:
            if self.next_symbol in {"*", "/"}:
                operator = self._pop_token()
                is_behind_divisor = operator == "/"
                factors.append((operator, self._signed()))
                continue
            # What can be meant in several ways is refused: `1/2pi`, `(2)3`, `1 2`.
            if is_behind_divisor or _is_number(self.next_symbol):
                raise ParseError
            factors.append(("*", self._power()))
        return factors[0][1] if len(factors) == 1 else ("product", *factors)

    def _signed(self) -> ExpressionTree:
        """Read the rule `(+|-)* power`, and return its tree.

        A power binds closer than its sign, so -2^2 is -4.
        """
        sign = 1
        while self.next_symbol in {"+", "-"}:
            if self._pop_token() == "-":
                sign = -sign
        power = self._power()
        return power if sign == 1 else ("sum", (-1, power))

    def _power(self) -> ExpressionTree:
        """Read the rule `primary [°] [!] [^ signed]`, and return its tree.

        The exponent may have an exponent itself, so 2^3^2 is 2^9. Raises `ParseError` for two
        factorials.
        """
        base = self._primary()
        while self.next_symbol == "°":  # angles are in degrees with and without their sign
            self._pop_token()
        if self.next_symbol == "!":
            self._pop_token()
            base = ("factorial", base)
            if self.next_symbol == "!":
                raise ParseError  # a double factorial, or one of a factorial
        if self.next_symbol != "^":
            return base
        self._pop_token()
        return ("power", base, self._signed())

    def _primary(self) -> ExpressionTree:
        """Read a number, a constant, a sum in brackets or bars, or a function; return its tree."""
        symbol = self.next_symbol
        if _is_number(symbol):
            return self._number()
        if symbol == "(":
            return self._parenthesized_sum()
        if symbol == "|":
            self._pop_token()
            tree = self._sum_in_brackets()
            self._pop_token("|")
            return _absolute(tree)
        self._pop_token()
        if symbol == "pi":
            return _PI_TREE
        if symbol == "e":
            return _EULER_NUMBER
        if symbol not in _FUNCTION_NAMES:
            raise ParseError
        return self._function(symbol)

    def _number(self) -> ExpressionTree:
        """Read a number, such as `12.5` or `2e3`, and return its tree `("num", token)`."""
        token = self._pop_token()
        digits, _, power_of_ten = token.lower().partition("e")
        has_too_many_digits = len(digits) > MAX_LITERAL_DIGITS
        if has_too_many_digits or abs(int(power_of_ten or 0)) > _LARGEST_POWER_OF_TEN:
            raise ParseError("too_large")
        return ("num", token)

    def _parenthesized_sum(self) -> ExpressionTree:
        """Read a sum in round brackets, and return its tree."""
        self._pop_token("(")
        tree = self._sum_in_brackets()
        self._pop_token(")")
        return tree

    def _sum_in_brackets(self) -> ExpressionTree:
        """Read a sum between brackets or bars, which the caller reads, and return its tree.

        The nesting is bounded, since each level costs Python calls.
        """
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise ParseError("too_large")
        tree = self.parse_sum()
        self._nesting -= 1
        return tree

    def _function(self, name: str) -> ExpressionTree:
        """Read the rest of the rule `name [^ exponent] argument`, and return its tree.

        `sin^2(30)` is the square of the sine, `sin^-1` the inverse function.
        """
        exponent = None
        if self.next_symbol == "^":
            self._pop_token()
            exponent = self._exponent()
        if exponent == _MINUS_ONE_TREE and name in _INVERSE_BY_FUNCTION:
            name = _INVERSE_BY_FUNCTION[name]
            exponent = None
        # `log(8, 2)` has its base as a second argument.
        may_have_base = name == "log" and self.next_symbol == "("
        tree = self._logarithm() if may_have_base else _call_function(name, self._argument())
        return tree if exponent is None else ("power", tree, exponent)

    def _exponent(self) -> ExpressionTree:
        """Read the exponent of a function's name, and return its tree.

        It is a number or a sum in brackets, with or without a minus: the `-1` of `sin^-1(0.5)`.
        """
        is_negative = self.next_symbol == "-"
        if is_negative:
            self._pop_token()
        tree = self._parenthesized_sum() if self.next_symbol == "(" else self._require_number()
        return ("sum", (-1, tree)) if is_negative else tree

    def _require_number(self) -> ExpressionTree:
        """Read a number, and return its tree. Raises `ParseError` for any other token."""
        if not _is_number(self.next_symbol):
            raise ParseError
        return self._number()

    def _logarithm(self) -> ExpressionTree:
        """Read the brackets of `log(x)`, to the base 10, or of `log(x, base)`; return the tree."""
        self._pop_token("(")
        argument = self._sum_in_brackets()
        base: ExpressionTree = ("num", "10")
        if self.next_symbol == ",":
            self._pop_token()
            base = self._sum_in_brackets()
        self._pop_token(")")
        return ("log", base, argument)

    def _argument(self) -> ExpressionTree:
        """Read the argument of a function, and return its tree.

        It is a sum in brackets, or a number or pi without brackets, as in `sin 30`. Raises
        `ParseError` if it is unclear where the argument without brackets ends, as in `sin 2pi`.
        """
        if self.next_symbol == "(":
            return self._parenthesized_sum()
        if self.next_symbol == "pi":
            self._pop_token()
            argument = _PI_TREE
        else:
            argument = self._require_number()
        if self.next_symbol == "°":
            self._pop_token()
        if self.next_symbol not in {"", "+", "-", "*", "/", ")", "|", ","}:
            raise ParseError  # `sin30^2` could be the square of sin30, or the sine of 900
        return argument


def _is_number(token: str) -> bool:
    """Return whether a token is a number, such as `2` or `.5`."""
    return token[:1].isdigit() or token[:1] == "."


def _call_function(name: str, argument: ExpressionTree) -> ExpressionTree:
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


def _absolute(tree: ExpressionTree) -> ExpressionTree:
    """Return the tree of the absolute value: the tree itself, or its negative if that is positive.

    The trees have no absolute value of their own, so the tree is evaluated here.
    """
    return ("sum", (-1, tree)) if evaluate_closed_form(tree).value < 0 else tree
