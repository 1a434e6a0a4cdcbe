"""The sides of an equation in a response: sums, products, powers and roots of what a figure has.

`SideReader` reads sides such as `2x + 5`, `AB * BC / 2`, `sin 54` and `half of arc AB`. A side with
a name that the figure does not have is not read; nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from adora_vl.geometry.expressions import MAX_EXPONENT, MAX_NESTING, MAX_NUMBER
from adora_vl.geometry.names import SEGMENT_NOUNS, NameReader, NoSideError
from adora_vl.geometry.quantities import (
    Angle,
    Arithmetic,
    Constant,
    Equal,
    Function,
    Quantity,
    Relation,
    Unknown,
    atoms_of,
    has_no_real_power,
    minus,
    number_of_quantity,
    over,
    plus,
    times,
    unit_of_quantity,
)
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.tokens import ResponseToken

MAX_TERMS = 60  # numbers and names of one side
# These words may stand behind a number, and are skipped: units, and "long".
_UNIT_WORDS_TEXT = (
    "cm mm km m in inch inches ft feet foot unit units yd degree degrees deg degs meter "
    "meters metre metres yards miles centimeters centimetres millimeters square sq long"
)
_UNIT_WORDS = frozenset(_UNIT_WORDS_TEXT.split())
_FUNCTION_BY_WORD: dict[str, Function] = {"sin": "sin", "cos": "cos", "tan": "tan"}
# The inverse functions: `arcsin`, and `sin` before an exponent of -1.
_INVERSE_BY_WORD = {
    "arcsin": math.asin,
    "arccos": math.acos,
    "arctan": math.atan,
    "sin": math.asin,
    "cos": math.acos,
    "tan": math.atan,
}
_VALUE_KINDS = ("number", "points")  # kinds of tokens that can stand on either side of a ratio
EQUALS_SIGNS = ("=", "≈", "≅")  # signs between the two sides of an equation
# A side does not end before one of these signs.
_SIGNS_INSIDE_SIDES = {"^", "*", "/", "%", "±", "_", "|", "\\", "+", "-"}
_CLOSING_BY_OPENING = {"(": ")", "{": "}", "[": "]"}
_FUNCTION_WORDS = {"sqrt", "frac", "pi", "sin", "cos", "tan"}
_WORDS_BEFORE_FACTOR = {"the", "of", "length", "measure", "side", "a"}  # "half of the length AB"
# Factors in words: "three times", "a third of", "twice".
_NUMBER_BY_WORD = {"two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0, "six": 6.0}
_FRACTION_BY_WORD = {"half": 0.5, "third": 1 / 3, "quarter": 0.25, "fourth": 0.25}
_MULTIPLE_BY_WORD = {"half": 0.5, "one-half": 0.5, "twice": 2.0, "double": 2.0, "thrice": 3.0}


@dataclass(frozen=True)
class EquationSide:
    """One side of an equation.

    `decimals` is the largest count of digits behind the point in its numbers: 2 for `2.75 + 1.5`.
    It is None where no number has a point.
    """

    quantity: Quantity
    decimals: int | None = None

    @property
    def is_number(self) -> bool:
        """Whether it has no name of the figure in it."""
        return all(isinstance(atom, Constant) for atom in atoms_of(self.quantity))


@dataclass(frozen=True)
class _WordedFactor:
    """A factor in words, such as "twice", and the position behind these words."""

    factor: float
    end: int


class SideReader(NameReader):
    """Reads sides of equations, such as `2x + AB`, from the tokens (words and signs) of a response.

    Each method that reads gets the position of the first token. It returns the quantity, and the
    position behind its last token. It raises `NoSideError` for what it cannot read. For example,
    the tokens of `2x + AB` are `2`, `x`, `+` and `AB`; `side(0)` returns the sum with the position
    4, and `product(0)` returns `2x` with the position 2.

    The attributes describe the side that is being read. `decimals` is as in `EquationSide`, `depth`
    is how deep brackets are nested, and `terms` counts its numbers and names.
    """

    def __init__(self, tokens: Sequence[ResponseToken], reading: Reading) -> None:
        super().__init__(tokens, reading)
        self.decimals: int | None = None
        self.depth = 0
        self.terms = 0

    def side(self, start: int, closing: str = "") -> tuple[EquationSide, int]:
        """Read the side that begins at a position, and return it with the position behind it.

        `closing` is a sign that may follow the side, such as the `|` behind a cell of a table.
        Raises `NoSideError` where no side begins here, or where it goes on with something that
        cannot be read.
        """
        self.decimals = None
        self.depth = 0
        self.terms = 0
        try:
            quantity, end = self.sum(start)
        except (UnreadError, ValueError, OverflowError, ZeroDivisionError) as error:
            raise NoSideError(str(error)) from error
        if not closing or self.token_at(end).text != closing:
            self._check_end(end)
        return EquationSide(quantity=quantity, decimals=self.decimals), end

    def _check_end(self, position: int) -> None:
        """Raise `NoSideError` where the token behind a side belongs to it and was not read.

        Otherwise the beginning would count as the whole side, such as `AB` for `AB_1`.
        """
        token = self.token_at(position)
        if token.kind in ("word", "points", "number") and not token.is_apart:
            raise NoSideError(f"{token.text} stands behind it")
        if token.text in _SIGNS_INSIDE_SIDES:
            raise NoSideError(f"{token.text} stands behind it")
        if token.text == ":" and self.is_ratio(position):
            raise NoSideError("a ratio")
        if token.text in ("(", "{") and not token.is_apart:
            raise NoSideError("a bracket stands behind it")

    def is_ratio(self, position: int) -> bool:
        """Tell whether a colon divides, as in `AB:CD = 1 : 2`, or else ends a clause."""
        token_before = self.token_at(position - 1)
        colon = self.token_at(position)
        token_behind = self.token_at(position + 1)
        has_values = token_before.kind in _VALUE_KINDS and token_behind.kind in _VALUE_KINDS
        # The colon of "triangle $ABC$: $BC = 5$" stands between two formulas.
        is_in_one_formula = token_before.is_math == colon.is_math == token_behind.is_math
        return has_values and is_in_one_formula and token_behind.is_apart == colon.is_apart

    # Sums and products

    def sum(self, start: int) -> tuple[Quantity, int]:
        """Read a sum or difference of products: `2x + AB`, `AB minus 3`."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise NoSideError("brackets are nested too deep")
        quantity, cursor = self.product(start)
        while True:
            token = self.token_at(cursor)
            is_plus = token.text == "+" or self.word_at(cursor) == "plus"
            if not is_plus and token.text != "-" and self.word_at(cursor) != "minus":
                break
            part, cursor = self.product(cursor + 1)
            quantity = plus(quantity, part) if is_plus else minus(quantity, part)
        self.depth -= 1
        return quantity, cursor

    def product(self, start: int) -> tuple[Quantity, int]:
        """Read a product or quotient: `2 * AB`, `2x`, `AB / 3`, `-x`, "twice AB".

        Without a sign between two factors, a second factor behind a space is doubtful. It is left
        where it cannot be read, or where another equation begins with it: `AB = 5 CD = 3`.
        """
        if self.token_at(start).text == "-":
            quantity, cursor = self.product(start + 1)
            return minus(Constant(0.0), quantity), cursor
        worded_factor = self._read_worded_factor(start)
        if worded_factor is not None:
            quantity, cursor = self.product(
                self.skip_words(worded_factor.end, _WORDS_BEFORE_FACTOR)
            )
            return times(Constant(worded_factor.factor), quantity), cursor
        quantity, cursor = self.power(start)
        while True:
            token = self.token_at(cursor)
            if token.text == "*" or self.word_at(cursor) == "times":
                factor, cursor = self.power(self.skip_words(cursor + 1, _WORDS_BEFORE_FACTOR))
                quantity = times(quantity, factor)
            elif token.text == "/":
                factor, cursor = self.power(cursor + 1)
                quantity = over(quantity, factor)
            elif self._begins_factor(cursor):
                # There is no sign between the factors, as in `2x`.
                try:
                    factor, end = self.power(cursor)
                except (NoSideError, UnreadError):
                    # Behind a space it may be no factor, but the beginning of something else.
                    if token.is_apart:
                        return quantity, cursor
                    raise
                is_apart = token.is_apart and not token.is_math
                is_function = token.text in _FUNCTION_BY_WORD
                is_left_side = self.token_at(end).text in EQUALS_SIGNS
                if is_apart and not is_function and is_left_side:
                    return quantity, cursor  # a new equation begins here: `AB = 5 CD = 3`
                quantity = times(quantity, factor)
                cursor = end
            else:
                return quantity, cursor

    def _read_worded_factor(self, start: int) -> _WordedFactor | None:
        """Read a factor in words: "twice", "three times", "one-third of"; None without one."""
        word = self.word_at(start)
        next_word = self.word_at(start + 1)
        if word in _MULTIPLE_BY_WORD:
            return _WordedFactor(factor=_MULTIPLE_BY_WORD[word], end=start + 1)
        if word in _NUMBER_BY_WORD and next_word == "times":
            return _WordedFactor(factor=_NUMBER_BY_WORD[word], end=start + 2)
        if word not in ("one", "a"):
            return None
        end = start + 2 if self.token_at(start + 1).text == "-" else start + 1
        fraction_word = self.word_at(end)
        if fraction_word in _FRACTION_BY_WORD and self.word_at(end + 1) == "of":
            return _WordedFactor(factor=_FRACTION_BY_WORD[fraction_word], end=end + 1)
        return None

    def _begins_factor(self, position: int) -> bool:
        """Tell whether a factor without a sign before it begins here, such as the x of `2x`.

        Usually there has to be no space before it. Behind a number, points, angles and functions
        may also stand behind a space, as in `3 AB`.
        """
        token = self.token_at(position)
        follows_number = self.token_at(position - 1).kind == "number"
        is_near = not token.is_apart or token.is_math
        if token.kind == "points":
            return is_near or follows_number
        if token.text in ("(", "["):
            # `(1)` at the end of a line is the number of an equation.
            is_label = (
                self.token_at(position + 1).kind == "number"
                and self.token_at(position + 2).text == ")"
            )
            token_behind = self.token_at(position + 3)
            ends = token_behind.kind in ("line", "end") or token_behind.text == "."
            return is_near and not (token.is_apart and is_label and ends)
        if token.text == "{":
            return False
        if token.kind != "word":
            return False
        if token.text in _FUNCTION_BY_WORD and self.token_at(position - 1).kind == "points":
            return True  # `AB sin C`
        if token.text in ("angle", "arc") or token.text in _FUNCTION_WORDS:
            return is_near or follows_number
        if self.is_product_of_letters(position):
            return True
        is_letter = re.fullmatch("[a-z]", token.text) is not None
        return is_letter and is_near and (token.text in self.unknowns or token.text == "r")

    def power(self, start: int) -> tuple[Quantity, int]:
        """Read a base with its exponents, and the unit behind it."""
        quantity, cursor = self.atom(start)
        while self.token_at(cursor).text == "^":
            exponent, cursor = self.group(cursor + 1)
            if isinstance(exponent, Constant) and abs(exponent.value) > MAX_EXPONENT:
                raise NoSideError("the exponent is too large")
            quantity = _raised(quantity, exponent)
        return quantity, self.past_unit(cursor)

    def past_unit(self, position: int) -> int:
        """Return the position behind the unit of a number."""
        while True:
            token = self.token_at(position)
            if token.text == "°":
                position += 1
            elif self.word_at(position) in _UNIT_WORDS and not self._is_no_unit(position):
                position += 1
                if (
                    self.token_at(position).text == "^"
                    and self.token_at(position + 1).kind == "number"
                ):
                    position += 2
            else:
                return position

    def _is_no_unit(self, position: int) -> bool:
        """Tell whether a unit's word is no unit here: a letter of the problem, or "in a figure"."""
        token = self.token_at(position)
        is_letter = token.text in self.unknowns and len(token.text) == 1
        return is_letter or (
            token.text == "in" and self.word_at(position + 1) in ("the", "this", "a")
        )

    def group(self, start: int) -> tuple[Quantity, int]:
        """Read a sum in brackets, or one atom without them: `(x + 1)` or the 4 of `sqrt 4 + 5`."""
        closing = _CLOSING_BY_OPENING.get(self.token_at(start).text)
        if closing is None:
            if self.token_at(start).text == "-":
                quantity, cursor = self.atom(start + 1)
                return minus(Constant(0.0), quantity), cursor
            return self.atom(start)
        quantity, cursor = self.sum(start + 1)
        if self.token_at(cursor).text != closing:
            raise NoSideError("a bracket does not close")
        return quantity, cursor + 1

    # Atoms

    def atom(self, start: int) -> tuple[Quantity, int]:
        """Read a number, a name, a function or a bracket.

        Raises `NoSideError` for anything else, and for a side that has too many of them.
        """
        self.terms += 1
        if self.terms > MAX_TERMS:
            raise NoSideError("the side is too long")
        token = self.token_at(start)
        if token.text in ("|", "["):
            enclosed = self.enclosed(start)
            if enclosed is not None:
                return enclosed
        if token.text in _CLOSING_BY_OPENING:
            return self.group(start)
        if token.kind == "number":
            return self._number(start)
        if token.kind == "points":
            return self.length(start)
        if token.kind == "word":
            return self._worded(start)
        raise NoSideError(f"{token.text} is no side")

    def _number(self, start: int) -> tuple[Quantity, int]:
        """Read a number. A whole one before a proper fraction is mixed: 5.5 for `5\\frac{1}{2}`."""
        text = self.token_at(start).text
        value = float(text.replace(",", ""))
        if value > MAX_NUMBER:
            raise NoSideError("the number is too large")
        if "." in text:
            digits_behind_point = len(text.partition(".")[2])
            self.decimals = max(self.decimals or 0, digits_behind_point)
        if self.token_at(start + 1).text == "frac":
            fraction = self._proper_fraction(start + 1)
            if fraction is not None and "." not in text:
                # Eight tokens: the number, `frac`, and the six that `_proper_fraction` reads.
                return Constant(value + fraction), start + 8
        return Constant(value), start + 1

    def _proper_fraction(self, start: int) -> float | None:
        """Return the value of the `\\frac{1}{2}` that begins here; None unless it is below 1."""
        # Six tokens follow the command: `{`, the numerator, `}`, `{`, the denominator, `}`.
        tokens = [self.token_at(start + step) for step in range(1, 7)]
        numerator_token = tokens[1]
        denominator_token = tokens[4]
        braces = [tokens[i].text for i in (0, 2, 3, 5)]
        if numerator_token.kind != "number" or denominator_token.kind != "number":
            return None
        if braces != ["{", "}", "{", "}"]:
            return None
        numerator = float(numerator_token.text.replace(",", ""))
        denominator = float(denominator_token.text.replace(",", ""))
        return numerator / denominator if numerator < denominator else None

    def _worded(self, start: int) -> tuple[Quantity, int]:
        """Read what begins with a word: an angle, arc, function, area, radius or letter."""
        token = self.token_at(start)
        word = token.text.lower()
        if word in ("angle", "angles"):
            return self.angle(start + 1)
        if word == "arc":
            return self.arc(start + 1)
        if word in ("minor", "major") and self.word_at(start + 1) == "arc":
            quantity, cursor = self.arc(start + 2)
            if word == "major":
                quantity = minus(Constant(360.0), quantity)
            return quantity, cursor
        if word in ("sqrt", "frac", "pi") or word in _INVERSE_BY_WORD:
            return self._function(start)
        if word in ("area", "perimeter"):
            return self.area_or_perimeter(start)
        if word in SEGMENT_NOUNS and self.token_at(start + 1).kind == "points":
            return self.length(start + 1)
        if word in ("radius", "diameter"):
            return self.radius_or_diameter(start)
        if re.fullmatch("[a-z]", token.text):
            return self.letter(start)
        if self.is_product_of_letters(start):
            letters = [Unknown(letter) for letter in token.text]
            return times(*letters), start + 1
        raise NoSideError(f"{token.text} is no side")

    def _function(self, start: int) -> tuple[Quantity, int]:
        """Read a root, a fraction, a sine or the like, or pi."""
        word = self.word_at(start)
        if word == "pi":
            return Constant(math.pi), start + 1
        if word == "sqrt":
            return self._root(start + 1)
        if word == "frac":
            numerator, cursor = self.group(start + 1)
            denominator, cursor = self.group(cursor)
            return over(numerator, denominator), cursor
        return self._trigonometric(start)

    def _root(self, start: int) -> tuple[Quantity, int]:
        """Read what stands behind `sqrt`: the degree, if any, and the radicand, as in `[3]{8}`.

        The degree is 2 without square brackets.
        """
        degree = 2.0
        if self.token_at(start).text == "[":
            quantity, start = self.group(start)
            if not isinstance(quantity, Constant) or not 1 < quantity.value < 10:
                raise NoSideError("no root that is known")
            degree = quantity.value
        quantity, cursor = self.group(start)
        return _raised(quantity, Constant(1 / degree)), cursor

    def _trigonometric(self, start: int) -> tuple[Quantity, int]:
        """Read a sine, cosine or tangent (`sin A`), or the angle that has it (`arcsin 0.5`).

        An inverse function can be read of a number alone: its value is computed at once, since
        quantities have no inverse functions. `arcsin 0.5` and `sin^{-1} 0.5` are both 30 degrees.
        """
        word = self.word_at(start)
        cursor = start + 1
        # The inverse is spelt `arcsin` or `sin^{-1}`.
        behind_inverse = cursor if word.startswith("arc") else self._behind_minus_one(cursor)
        if behind_inverse is not None:
            quantity, cursor = self.group(behind_inverse)
            value = number_of_quantity(quantity)
            if value is None:
                raise NoSideError("the angle of a sine that is no number")
            return Constant(math.degrees(_INVERSE_BY_WORD[word](value))), cursor
        exponent: Quantity | None = None
        if self.token_at(cursor).text == "^":
            exponent, cursor = self.group(cursor + 1)
        quantity, cursor = self._argument(cursor)
        result: Quantity = Arithmetic(function=_FUNCTION_BY_WORD[word], parts=(quantity,))
        if exponent is not None:
            result = Arithmetic(function="^", parts=(result, exponent))
        return result, cursor

    def _argument(self, start: int) -> tuple[Quantity, int]:
        """Read the argument of a sine, cosine or tangent, with its unit.

        One point means the angle there: the A of `sin A` and of `sin(A)`. Anything else is read as
        elsewhere in a side.
        """
        is_bracket = self.token_at(start).text in _CLOSING_BY_OPENING
        corner = start + 1 if is_bracket else start
        token = self.token_at(corner)
        if token.kind == "points" and len(re.findall("[A-Z]'?", token.text)) == 1:
            quantity, cursor = self.angle(corner)
            if not is_bracket:
                return quantity, cursor
            if self.token_at(cursor).text == _CLOSING_BY_OPENING[self.token_at(start).text]:
                return quantity, cursor + 1
        quantity, cursor = self.group(start)
        return quantity, self.past_unit(cursor)

    def _behind_minus_one(self, position: int) -> int | None:
        """Return the position behind the exponent of -1 that stands here; None without one."""
        texts = [self.token_at(position + step).text for step in range(5)]
        if texts[:2] == ["^", "-1"]:
            return position + 2
        if texts[:3] == ["^", "-", "1"]:
            return position + 3
        if texts == ["^", "{", "-", "1", "}"]:
            return position + 5
        return None


def _raised(base: Quantity, exponent: Quantity) -> Quantity:
    """Return a power. Raises `NoSideError` for a root of a negative number."""
    if has_no_real_power(base, exponent):
        raise NoSideError("a root of a negative number")
    return Arithmetic(function="^", parts=(base, exponent))


def equation(left_side: Quantity, right_side: Quantity) -> Relation:
    """Return the relation that two sides of an equation are equal.

    An arc of two letters is usually the shorter way round. With a number over 180, as in
    `arc AB = 250`, it is the longer one.
    """
    first = _other_way_round(left_side, right_side)
    second = _other_way_round(right_side, left_side)
    unit = unit_of_quantity(left_side)
    if unit == "plain":
        unit = unit_of_quantity(right_side)
    return Equal(left=first, right=second, unit=unit)


def _other_way_round(quantity: Quantity, size: Quantity) -> Quantity:
    """Return 360 degrees minus an angle if `size` is between 180 and 360; else `quantity`."""
    is_longer_way = isinstance(size, Constant) and 180 < size.value < 360
    if isinstance(quantity, Angle) and is_longer_way:
        return minus(Constant(360.0), quantity)
    return quantity
