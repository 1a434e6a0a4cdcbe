r"""The grammar of closed forms and expressions: it turns canonical text into a small tree.

Nothing is computed here.

A tree is a nested tuple of one of these forms. No text reaches Python's parser or another one.

    ("num", "12.5")                  the digits as they are written
    ("mixed", "7", "1", "2")         7 1/2
    ("pi",)
    ("unknown", "x")
    ("sum", (1, tree), (-1, tree), ...)          each term with its sign
    ("product", ("*", tree), ("/", tree), ...)   each factor with its operator
    ("frac", numerator, denominator)
    ("power", base, exponent)
    ("root", degree, tree)
    ("call", name, tree)             a function, such as sin
    ("log", base, tree)
    ("factorial", tree)
    ("binomial", tree, tree)

For example `2\sqrt{3}-x` is this tree:

    ("sum",
        (1, ("product", ("*", ("num", "2")), ("*", ("root", 2, ("num", "3"))))),
        (-1, ("unknown", "x")))

The nesting, the length, the digits of a literal and the number of functions are capped, so that
neither reading a tree nor computing its value can hang. Ambiguous spellings are not read, so that
nothing is right by accident: `1/2\pi`, `2^34`, `\sqrt{3}2`, `3\frac{5}{2}`, `\sin30^2`.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

ExpressionTree = tuple[Any, ...]

# The longest text that is read as an answer. An honest answer has under 60 characters, and the
# limit bounds the time of the regular expressions.
MAX_CHARS = 500
MAX_NESTING = 16  # of brackets
MAX_LITERAL_DIGITS = 40  # of one literal
MAX_COSTLY_TOKENS = 16  # roots, powers, logarithms and angles, which cost most to compute

# An unknown is one lower-case letter on its own: `rhombus` is a word and `AB` a side, not products
# of letters.
_TOKEN_PATTERN = re.compile(
    r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[A-Za-z]+|(?<![A-Za-z])[a-z](?![A-Za-z])|(?<=[A-Za-z]) "
    r"(?=[A-Za-z])"
    r"|[-+*/^(){}\[\]_!]"
)
# In a formula the letters are quantities: `ab` is a product, `R_1` and the side `AB` are one each.
_FORMULA_TOKEN_PATTERN = re.compile(
    r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[A-Za-z]+|[A-Z]{2,4}(?![A-Za-z])"
    r"|[A-Za-z](?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]{1,4}\}))?|(?<=[A-Za-z]) (?=[A-Za-z])"
    r"|[-+*/^(){}\[\]_!]"
)
_ROOT_DEGREE_PATTERN = re.compile("[2-9]|[1-9][0-9]")
_LONG_WORD_PATTERN = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{4,}")
_MULTIPLICATION_SIGNS = frozenset({r"\cdot", r"\times", "*"})
_DIVISION_SIGNS = frozenset({"/", r"\div"})
_GREEK_LETTERS = frozenset({r"\theta", r"\alpha", r"\beta", r"\gamma", r"\phi"})
FUNCTION_NAMES = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "arcsin", "arccos", "arctan", "ln"}
)
_FUNCTION_COMMANDS = frozenset({f"\\{name}" for name in FUNCTION_NAMES} | {r"\log"})
_COSTLY_TOKENS = _FUNCTION_COMMANDS | {"^", r"\sqrt", "!", r"\binom", r"\exp"}
_INVERSE_BY_COMMAND = {r"\sin": "arcsin", r"\cos": "arccos", r"\tan": "arctan"}
_MINUS_ONE = ("sum", (-1, ("num", "1")))  # the tree of `-1`


class ParseError(ValueError):
    """A text cannot be read, or an expression tree has no value.

    `reason` names the rule:

    - `not_read`: it is not in the grammar.
    - `too_large`: it is over one of the caps.
    - `undefined`: it has no value, such as 1/0.
    - `has_unknown`: it was read, but has no value without its unknowns, such as `x+3`.

    `canonical`, `answer` and `structured` have further reasons.
    """

    def __init__(self, reason: str = "not_read") -> None:
        super().__init__(reason)
        self.reason = reason


def parse_tree(text: str, *, is_formula: bool = False) -> ExpressionTree:
    """Parse a text in canonical form into an expression tree.

    For example, `2x` is `("product", ("*", ("num", "2")), ("*", ("unknown", "x")))`. In a formula
    the letters are quantities, so that `ab` is a product and `R` an unknown.

    Raises `ParseError` with the reason `not_read` for anything that is not in the grammar, and
    `too_large` for a text over one of the limits above.
    """
    if len(text) > MAX_CHARS:
        raise ParseError("too_large")
    if _deepest_nesting(text) > MAX_NESTING:
        raise ParseError("too_large")
    pattern = _FORMULA_TOKEN_PATTERN if is_formula else _TOKEN_PATTERN
    tokens = pattern.findall(text)
    if "".join(tokens) != text:
        raise ParseError  # `findall` has skipped a character that no token has
    if sum(symbol in _COSTLY_TOKENS for symbol in tokens) > MAX_COSTLY_TOKENS:
        raise ParseError("too_large")
    symbols = [symbol for symbol in tokens if symbol != " "]
    if is_formula:
        symbols = [_unify_name(symbol) for symbol in symbols]
    parser = _Parser(symbols)
    tree = parser.sum()
    if parser.peek():
        raise ParseError  # tokens are left after the sum, such as a closing bracket
    return tree


def _deepest_nesting(text: str) -> int:
    """Return how deep the brackets of a text are nested: 2 for `(a+(b))`, 0 without brackets."""
    nesting = 0
    deepest = 0
    for char in text:
        if char in "({[":
            nesting += 1
            deepest = max(deepest, nesting)
        elif char in ")}]":
            nesting -= 1
    return deepest


def unknown_names(tree: ExpressionTree | None) -> frozenset[str]:
    """Return the names of the unknowns in an expression tree; None, for no tree, has none."""
    if tree is None:
        return frozenset()
    return frozenset(node[1] for node in subtrees(tree) if node[0] == "unknown")


def is_angle_in_radians(angle: ExpressionTree) -> bool:
    r"""Return whether an angle is in radians: `\frac{\pi}{6}` is, since pi occurs in it.

    A pi inside an inverse function such as `\sin^{-1}` does not count, because the value of that
    function is in degrees.
    """
    if angle[0] == "call" and angle[1].startswith("arc"):
        return False
    return angle[0] == "pi" or any(map(is_angle_in_radians, direct_subtrees(angle)))


def subtrees(tree: ExpressionTree) -> Iterator[ExpressionTree]:
    """Yield the tree itself and all trees inside it, parents first: `2x`, `2` and `x` for `2x`."""
    yield tree
    for child in direct_subtrees(tree):
        yield from subtrees(child)


def replace_node(tree: ExpressionTree, old: ExpressionTree, new: ExpressionTree) -> ExpressionTree:
    """Return the tree with `new` in every place of `old`: `5+1` for `x+1`, with 5 for x."""
    if tree == old:
        return new
    return tuple(
        replace_node(child, old, new) if isinstance(child, tuple) else child for child in tree
    )


def direct_subtrees(tree: ExpressionTree) -> Iterator[ExpressionTree]:
    """Yield the trees directly inside an expression tree, without their signs and operators.

    For example, `("sum", (1, a), (-1, b))` has the trees `a` and `b`, and so has
    `("power", a, b)`. `("root", 3, a)` has only `a`.
    """
    for child in tree[1:]:
        if not isinstance(child, tuple):
            continue  # a name, a degree, or digits
        # The term of a sum is a pair of sign and tree. The factor of a product is a pair of
        # operator and tree.
        is_pair = child[0] in (1, -1, "*", "/")
        yield child[1] if is_pair else child


def _is_unknown(symbol: str) -> bool:
    r"""Return whether a token can name an unknown.

    That is a letter, a Greek letter such as `\theta`, and in a formula also `R_1` and `AB`.
    """
    return symbol in _GREEK_LETTERS or symbol[:1].isalpha()


def _unify_name(symbol: str) -> str:
    """Return a token of a formula in one spelling: `AB` for `BA`, and `R_1` for `R_{1}`.

    A token that is no name is returned as it is.
    """
    if len(symbol) > 1 and symbol.isalpha():
        return "".join(sorted(symbol))
    return symbol.replace("{", "").replace("}", "") if symbol[:1].isalpha() else symbol


@lru_cache(maxsize=256)
def parse_formula(text: str) -> ExpressionTree | None:
    r"""Return the tree of a formula whose letters are quantities: `2ab` is 2 times a times b.

    Returns None for a text that is no formula: letters alone, such as `ab`, a text with a word of
    four letters or more, and a text that is not in the grammar.
    """
    # A formula has at least one digit, operator or command. Prose has not.
    has_sign_of_formula = re.search(r"[0-9+*/^-]|\\", text)
    if text.isalpha() or not has_sign_of_formula or _LONG_WORD_PATTERN.search(text):
        return None
    try:
        return parse_tree(text, is_formula=True)
    except ParseError:
        return None


class _Parser:
    """A recursive-descent parser with one method for each rule of the grammar.

    Each method reads its rule from the next token on, returns its tree, and raises `ParseError`
    where the tokens do not fit. `MAX_NESTING` bounds the depth of the recursion.
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next_index = 0  # of the token that is read next

    def peek(self) -> str:
        """Return the next token, or an empty string at the end."""
        return self._tokens[self._next_index] if self._next_index < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        """Consume the next token and return it. Raises `ParseError` if it is not `expected`.

        An empty `expected` allows any token.
        """
        symbol = self.peek()
        if not symbol or (expected and symbol != expected):
            raise ParseError
        self._next_index += 1
        return symbol

    def sum(self) -> ExpressionTree:
        """Parse a sum: `[sign] term (+|- term)*`.

        `-x+6` gives `("sum", (-1, x), (1, 6))`. A single term without a minus sign, such as `x`, is
        returned alone, without a `sum` around it.
        """
        sign = self._sign() if self.peek() in {"+", "-"} else 1
        terms = [(sign, self._product())]
        while self.peek() in {"+", "-"}:
            sign = self._sign()
            if self.peek() == "-":  # 14 + -1
                sign *= self._sign()
            terms.append((sign, self._product()))
        first_sign, first_term = terms[0]
        if len(terms) == 1 and first_sign == 1:
            return first_term
        return ("sum", *terms)

    def _sign(self) -> int:
        """Consume a sign and return it as 1 or -1."""
        return -1 if self._take() == "-" else 1

    def _product(self) -> ExpressionTree:
        """Parse a product: `factor (operator factor | factor)*`.

        Factors side by side are multiplied. The factors of `2x/3` are `("*", 2)`, `("*", x)` and
        `("/", 3)`. A single factor is returned alone, without a `product` around it.
        """
        factors = [("*", self._power())]
        is_behind_divisor = False
        while self.peek() not in {"", "+", "-", ")", "}", "]"}:
            symbol = self.peek()
            if symbol in _DIVISION_SIGNS:
                self._take()
                factors.append(("/", self._power()))
                is_behind_divisor = True
                continue
            if symbol in _MULTIPLICATION_SIGNS:
                self._take()
                is_behind_divisor = False
            elif is_behind_divisor or symbol == "{" or symbol[0] in ".0123456789":
                # `1/2\pi` can be (1/2)pi or 1/(2pi). `1{2}` and `\sqrt{3}2` may be misprints of
                # something else.
                raise ParseError
            factors.append(("*", self._power()))
        return factors[0][1] if len(factors) == 1 else ("product", *factors)

    def _power(self) -> ExpressionTree:
        """Parse a power: `primary [!] [^ digit | ^ letter | ^ {sum}]`, such as `x^2` or `2^{n+1}`.

        `x^2` gives `("power", x, 2)`. A base without an exponent is returned alone.
        """
        first_symbol = self.peek()
        base = self._primary()
        if self.peek() == "!":
            base = self._factorial(base)
        if self.peek() != "^":
            return base
        if first_symbol in _FUNCTION_COMMANDS:
            raise ParseError  # `\sin30^2` can be sin(30^2) or (sin 30)^2
        exponent = self._exponent()
        if self.peek() == "^":
            raise ParseError  # `2^3^4` has no meaning in TeX
        return ("power", base, exponent)

    def _factorial(self, base: ExpressionTree) -> ExpressionTree:
        """Return the factorial of `base`, whose tokens are read up to the `!`.

        The base has to be a number, an unknown or a group in brackets: `5!`, `n!` or `(n+1)!`.
        `5!!` and `5!^2` are not read.
        """
        is_group = self._tokens[self._next_index - 1] in {")", "}"}
        is_number_or_unknown = base[0] in {"num", "unknown"}
        if not is_group and not is_number_or_unknown:
            raise ParseError
        self._take("!")
        if self.peek() in {"!", "^"}:
            raise ParseError
        return ("factorial", base)

    def _exponent(self) -> ExpressionTree:
        """Parse a `^` and the exponent after it: a sum in braces, one digit, or one letter."""
        self._take("^")
        symbol = self.peek()
        if len(symbol) == 1 and symbol.isdigit():
            return self._literal()
        if symbol != "{" and not _is_unknown(symbol):
            raise ParseError  # TeX prints `2^34` as 2^3 with a 4 beside it
        return self._primary()  # the group in braces, or the letter

    def _primary(self) -> ExpressionTree:
        """Parse an operand: a group, a number, a fraction, a root, a function, pi or an unknown."""
        symbol = self.peek()
        if symbol in {"(", "{"}:
            return self._group(symbol)
        if symbol[:1] in set(".0123456789"):
            literal = self._literal()
            # A fraction right behind a number makes it a mixed number: `1\frac{1}{2}`.
            return self._mixed(literal) if self.peek() == r"\frac" else literal
        self._take()
        if symbol in {r"\frac", r"\binom"}:
            return ("frac" if symbol == r"\frac" else "binomial", self._group(), self._group())
        if symbol == r"\exp":
            return ("power", ("unknown", "e"), self._argument())
        if symbol == r"\sqrt":
            return self._root()
        if symbol in _FUNCTION_COMMANDS:
            return self._call(symbol)
        if symbol == r"\pi":
            return ("pi",)
        if _is_unknown(symbol):
            return ("unknown", symbol)
        raise ParseError

    def _group(self, opening: str = "{") -> ExpressionTree:
        """Return a sum in brackets, round ones or braces."""
        self._take(opening)
        tree = self.sum()
        self._take(")" if opening == "(" else "}")
        return tree

    def _literal(self) -> ExpressionTree:
        """Return a number in digits, such as `12` or `0.5`."""
        symbol = self._take()
        if symbol[0] not in ".0123456789":
            raise ParseError
        if len(symbol) > MAX_LITERAL_DIGITS:
            raise ParseError("too_large")
        return ("num", symbol)

    def _mixed(self, integer: ExpressionTree) -> ExpressionTree:
        r"""Return the mixed number of `integer` and the fraction that follows, if they are one.

        - `7\frac{1}{2}`: the mixed number 7.5, returned as `("mixed", "7", "1", "2")`.
        - `7\frac{\sqrt{3}}{2}`: a product, since the fraction is not of integers. `integer` is
          returned, and the fraction stays to be read as the next factor.
        - `3\frac{5}{2}`: refused, since it may be meant as a mixed number or as a product.
        """
        # `\frac{1}{2}` is seven tokens: the command and two integers in braces.
        fraction_tokens = self._tokens[self._next_index : self._next_index + 7]
        if len(fraction_tokens) < 7:
            return integer
        numerator = fraction_tokens[2]
        denominator = fraction_tokens[5]
        braces = [fraction_tokens[index] for index in (3, 4, 6)]
        if braces != ["}", "{", "}"] or not (numerator + denominator).isdigit():
            return integer  # the fraction stays as the next factor of the product
        self._primary()  # takes the tokens of the fraction
        if int(denominator) == 0:
            raise ParseError("undefined")
        is_proper = 0 < int(numerator) < int(denominator)
        if "." in integer[1] or not is_proper or self.peek() == "^":
            raise ParseError
        return ("mixed", integer[1], numerator, denominator)

    def _root(self) -> ExpressionTree:
        r"""Parse what follows `\sqrt`: `{sum}` or `(sum)`, with a degree of 2 to 99 as `[3]{sum}`.

        `\sqrt[3]{8}` gives `("root", 3, 8)`. Without a degree it is 2.
        """
        degree = "2"
        if self.peek() == "[":
            self._take()
            degree = self._take()
            if not _ROOT_DEGREE_PATTERN.fullmatch(degree):
                raise ParseError
            self._take("]")
        opening = "(" if self.peek() == "(" else "{"
        return ("root", int(degree), self._group(opening))

    def _call(self, name: str) -> ExpressionTree:
        r"""Parse the exponent, base and argument that follow the command `name` of a function.

        - `\sin30` gives `("call", "sin", 30)`; so do `\sin(30)` and `\sin{30}`.
        - `\tan^{-1}(1)` is the arctangent: `("call", "arctan", 1)`.
        - `\sin^2x` is the square of the sine: `("power", ("call", "sin", x), 2)`.
        - `\log_{2}(8)` gives `("log", 2, 8)`, and `\log100` has the base 10.
        """
        if name == r"\log":
            base: ExpressionTree = ("num", "10")
            if self.peek() == "_":
                self._take()
                base = self._group() if self.peek() == "{" else self._literal()
            return ("log", base, self._argument())
        exponent = self._exponent() if self.peek() == "^" else None
        if exponent == _MINUS_ONE:  # the inverse function, not one divided by the function
            if name not in _INVERSE_BY_COMMAND:
                raise ParseError
            return ("call", _INVERSE_BY_COMMAND[name], self._argument())
        # Only the exponents 2 and 3 are read, not `\sin^nx`.
        if exponent not in (None, ("num", "2"), ("num", "3")):
            raise ParseError
        call = ("call", name[1:], self._argument())
        return call if exponent is None else ("power", call, exponent)

    def _argument(self) -> ExpressionTree:
        """Parse the argument of a function, with or without brackets around it.

        Without brackets it is a single number, unknown, fraction or root.
        """
        first = self.peek()
        if first in {"(", "{"}:
            return self._group(first)
        is_primary = first in {r"\frac", r"\sqrt"} or _is_unknown(first)
        argument = self._primary() if is_primary else self._literal()
        next_symbol = self.peek()
        if next_symbol in {r"\pi", r"\sqrt", r"\frac", "("} or _is_unknown(next_symbol):
            raise ParseError  # `\sin30\sqrt{3}` does not show where the angle ends
        return argument
