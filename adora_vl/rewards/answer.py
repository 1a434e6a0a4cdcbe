r"""What an answer says, and how an answer of a single value is read; `forms.read_reference` reads all kinds.

number      5, 5\sqrt{3}           ordered     (3, -4), A(3, -4), (p, q) = (3, 2), [0, 1)
percentage  5%                     unordered   1, 2 and 3; \{1, 2\}; 1 \pm \sqrt{2}; AB = 4, CD = 5
expression  3x+1                   equation    2x + 4y = 3
text        rhombus, 3:4           inequality  1 < x \le 3, a + b < c, and unions of intervals
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from adora_vl.rewards.ball import Ball
from adora_vl.rewards.canonical import (
    MONEY_PATTERN,
    canonical_value_and_unit,
    canonical_with_names,
)
from adora_vl.rewards.grammar import MAX_CHARS, NotReadError, Tree, read_tree
from adora_vl.rewards.numeric import evaluate_closed_form
from adora_vl.rewards.solutions import Solution
from adora_vl.rewards.units import RADIANS, Unit, parse_unit

# The first four are single values.
Kind = Literal[
    "number",
    "percentage",
    "expression",
    "text",
    "ordered",
    "unordered",
    "equation",
    "inequality",
    "unreadable",
]


@dataclass(frozen=True)
class Answer:
    """One side of a comparison, or a part of one side. Immutable."""

    kind: Kind
    text: str
    """The canonical form."""
    reason: str = ""
    """The rule by which the answer is wrong where a number is expected; empty for a number."""
    raw: str = ""
    """The text that was read."""
    label: str = ""
    """The name of the value: `AB` in `AB = 4`."""
    number: Ball | None = None
    """The number, or the number before a per cent sign."""
    tree: Tree | None = None
    """The tree of a number or expression, as `grammar` reads it."""
    parts: tuple[Answer, ...] = ()
    """The values of a list, set, point or interval."""
    brackets: str = ""
    """The brackets of an ordered answer, such as `[)`."""
    is_plus_minus: bool = False
    """Whether the answer comes from a plus-minus sign."""
    relations: tuple[tuple[str, Tree], ...] = ()
    """Each relation as its sign and the tree that it compares with 0."""
    solution: Solution | None = None
    """The solution of inequalities in one unknown and of intervals."""
    refusal: str = ""
    """Why the answer cannot be read as a form, so that it can be no reference answer."""
    unit: Unit | None = None
    """The unit behind the value, which is not in `text`."""

    @cached_property
    def ratio(self) -> tuple[Ball, ...]:
        r"""The terms of a ratio of numbers, such as `3:4`, `1:\sqrt{3}` and `3 to 4`, else ()."""
        return _ratio_terms(self.text)

    @cached_property
    def text_with_names(self) -> str:
        """The canonical text with all its names and brackets, which `forms` reads."""
        return canonical_with_names(self.raw) if self.raw else self.text

    @property
    def lone_number(self) -> Ball | None:
        """The number of an answer that is a number, else None; a percentage is none."""
        return self.number if self.kind == "number" else None

    @property
    def is_value(self) -> bool:
        """Whether it is a single value that was read."""
        return self.kind in {"number", "percentage", "expression", "text"}

    @property
    def is_structured(self) -> bool:
        """Whether it is more than a single value; a value with a name is a form too."""
        return self.label != "" or not (self.is_value or self.kind == "unreadable")


# The first that matches says why a text is no single value. All run on canonical text: short,
# without line breaks.
_NO_VALUE_PATTERNS = (
    ("empty_box", re.compile(r"^[{}() ]*$")),
    ("not_finite", re.compile(r"(?i)\bnan\b|\binf(?:inity|ty)?\b|\\infty|∞")),
    (
        "relation",
        re.compile(
            r"[<>≤≥≠≈∈]|\\(?:[lg]eq?|[lg]eqslant|[lg]t|neq?|approx|in)(?![A-Za-z])"
            r"|\\sim(?![A-Za-z])(?! ?\\triangle)"
        ),
    ),
    ("interval", re.compile(r"^[(\[].*,.*[)\]]$|^\[.*\]$")),
    (
        "enumeration",
        re.compile(r"[,;&±∓…]|\.\.|\\(?:pm|mp|cup|cap|[lc]?dots)(?![A-Za-z])|\\\{|\\\\"),
    ),
    ("enumeration", re.compile(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|[0-9.] [0-9.]")),
    ("equation", re.compile(r"=|≡|\\equiv")),
    (
        "percentage",
        re.compile(r"%|\bpercent|(?<=[0-9])percent|(?<![A-Za-z])pct"),
    ),  # more than one in per cent
)
NO_VALUE_REASONS = frozenset(reason for reason, _ in _NO_VALUE_PATTERNS)
# Reasons for which nothing can be said of an answer.
UNREAD_REASONS = frozenset({"too_long", "hidden_characters", "not_read", "too_large", "undefined"})
# One sign, so that reading goes one level deep.
_PERCENTAGE_PATTERN = re.compile(r"((?:(?!%|percent|pct).)+?) ?(?:\\?%|percent(?:age)?|pct)")
# Words, unknowns, simple algebra and ratios: readable, though not a number. Double underscores and
# unknown commands are not.
_READABLE_TEXT_PATTERN = re.compile(
    r"(?:[0-9A-Za-z "
    r".:?'+*/^(){}-]|_(?!_)|\\(?:frac|sqrt|pi|cdot|times|div|sin|cos|tan|circ|angle|triangle|overline"
    r"|widehat|theta|alpha|beta|gamma|phi|parallel|perp|cong|sim)(?![A-Za-z]))*"
)

_LATEX_COMMAND_PATTERN = re.compile(r"\\[A-Za-z]+")
_LETTER_PATTERN = re.compile("[A-Za-z]")
_DAY = "(?:0?[1-9]|[12][0-9]|3[01])"
_MONTH = "(?:0?[1-9]|1[0-2])"
_YEAR = "(?:1[0-9]|20)[0-9]{2}"
_DATE_ORDERS = ((_YEAR, _MONTH, _DAY), (_DAY, _MONTH, _YEAR), (_MONTH, _DAY, _YEAR))
_DATE_PATTERN = re.compile("|".join(sign.join(parts) for sign in "-/" for parts in _DATE_ORDERS))
_RATIO_WORD_PATTERN = re.compile(r"(?<=[0-9)}]) ?to ?(?=[0-9(\\])")
_CLOCK_TIME_PATTERN = re.compile(
    r"[0-2]?[0-9]:[0-5][0-9]"
)  # a ratio is reduced where it may be a time
# also the first one of `angles 2, 3 and 6`
_NUMBERED_ANGLE_PATTERN = re.compile(r"(?:\\angle|angles?) ?([0-9]{1,2})")
MAX_RATIO_TERMS = 6


def read_value(raw: str) -> Answer:
    """Read an answer as a single value; the kind is `unreadable` where it is none.

    It never raises, and costs about a millisecond at most.
    """
    if len(raw) > MAX_CHARS:
        return Answer(kind="unreadable", text="", reason="too_long")
    return _read_value_cached(raw)


def read_single_value(text: str) -> Answer:
    r"""Read a part of an answer, which has to be a single value.

    `\angle 2` is read as the number of the angle, 2. Raises `NotReadError` for anything but a
    single value.
    """
    angle = _NUMBERED_ANGLE_PATTERN.fullmatch(text)
    value = read_value(angle[1] if angle else text)
    if not value.is_value:
        raise NotReadError(value.reason)
    # Without `raw` the part is known by its value alone; the whole answer keeps the names.
    return replace(value, raw="")


@lru_cache(maxsize=256)
def _read_value_cached(raw: str) -> Answer:
    """Return `read_value` with a cache.

    The rollouts of a group share their reference answer, and often their answer.
    """
    try:
        text, unit = canonical_value_and_unit(raw)
    except NotReadError as error:
        return Answer(kind="unreadable", text="", reason=error.reason)
    answer = _read_canonical(text, raw)
    return replace(answer, unit=parse_unit(unit)) if unit else answer


def _read_canonical(text: str, raw: str) -> Answer:
    """Return the answer in a canonical text without a unit.

    It is a number, expression, text or percentage, and `unreadable` for any other text.
    """
    answer = _read_percentage(text, raw) or _read_other_than_number(text, raw)
    if answer is not None:
        return answer
    tree: Tree | None = None
    try:
        tree = read_tree(text)
        return Answer(
            kind="number", text=text, raw=raw, number=evaluate_closed_form(tree), tree=tree
        )
    except NotReadError as error:
        # The text is in the grammar but has letters in it, so that it has no number as its value.
        if error.reason == "has_unknown":
            return Answer(kind="expression", text=text, reason="not_a_number", raw=raw, tree=tree)
        # It is not in the grammar, yet plain words, as in `right triangle`.
        if error.reason == "not_read" and _is_readable_text(text):
            return Answer(kind="text", text=text, reason="not_a_number", raw=raw)
        return Answer(kind="unreadable", text=text, reason=error.reason, raw=raw)


def _is_readable_text(text: str) -> bool:
    """Return whether a text that is no closed form can be an answer as text: words, time, ratio."""
    if _CLOCK_TIME_PATTERN.fullmatch(text) or _ratio_terms(text):
        return True
    has_letter = _LETTER_PATTERN.search(_LATEX_COMMAND_PATTERN.sub("", text)) is not None
    return has_letter and _READABLE_TEXT_PATTERN.fullmatch(text) is not None


def _read_percentage(text: str, raw: str) -> Answer | None:
    """Return the percentage in a text, None if the text is none."""
    percentage = _PERCENTAGE_PATTERN.fullmatch(text)
    quantity = read_value(percentage[1]) if percentage else None
    if quantity is None or not quantity.tree:  # neither a number nor an expression
        return None
    return Answer(
        kind="percentage",
        text=f"{quantity.text}%",
        reason="percentage",
        raw=raw,
        number=quantity.number,
    )


def _read_other_than_number(text: str, raw: str) -> Answer | None:
    """Return the answer in a text that is surely no number: a relation, several values or a date.

    None for any other text.
    """
    for reason, pattern in _NO_VALUE_PATTERNS:
        if pattern.search(text):
            return Answer(kind="unreadable", text=text, reason=reason, raw=raw)
    if _DATE_PATTERN.fullmatch(text):
        # `2022-10-12` is not the difference 2000
        return Answer(kind="text", text=text, reason="not_a_number", raw=raw)
    return None


def _ratio_terms(text: str) -> tuple[Ball, ...]:
    """Return the terms of a ratio, () for any other text.

    All terms must be numbers other than 0, without arithmetic left to do. A text that may be a time of
    day, such as `3:45`, counts as a ratio only if its terms have no common factor.
    """
    terms = _RATIO_WORD_PATTERN.sub(":", text).split(":")
    if not 1 < len(terms) <= MAX_RATIO_TERMS:
        return ()
    try:
        numbers = tuple(evaluate_closed_form(read_tree(term)) for term in terms)
    except NotReadError:
        return ()
    # `3:45` has the common factor 3, so that it is read as a time; `3:47` is a ratio.
    if _CLOCK_TIME_PATTERN.fullmatch(text) and math.gcd(*map(int, terms)) > 1:
        return ()
    for number in numbers:
        # `least_magnitude` is 0 where the term can be 0 within its error.
        if number.least_magnitude <= 0 or number.has_undone_arithmetic:
            return ()
    return numbers


def amount_of_money(answer: Answer) -> Answer:
    """Return the amount of money in an answer: 5 in `5 dollars`.

    An answer without a currency is returned as it is.
    """
    money = MONEY_PATTERN.fullmatch(answer.text)
    if not money:
        return answer
    # One of three spellings has matched: `5 dollars`, `5.00$` or `-$5.00`.
    if money["before_word"] or money["before_sign"]:
        return read_value(money["before_word"] or money["before_sign"])
    return read_value(money["minus"] + money["after_sign"])


def convert_angle(answer: Answer, dimension: str) -> Answer:
    r"""Return an angle converted to `dimension`, which is `radians` or `angle` (degrees).

    An answer of `\frac{\pi}{3}` radians becomes 60 degrees, to be compared with a reference answer
    in degrees. The answer must be in the opposite unit.
    """
    if answer.tree is None:
        return answer
    # The factors are pieces of a product tree, each with its sign: `* 180 / pi` gives degrees.
    factors = (("*", ("num", "180")), ("/", ("pi",)))
    if dimension == RADIANS:
        factors = (("/", ("num", "180")), ("*", ("pi",)))
    tree = ("product", ("*", answer.tree), *factors)
    if answer.number is None:  # an expression with unknowns
        return replace(answer, tree=tree)
    return replace(answer, tree=tree, number=evaluate_closed_form(tree))


def convert_to_unit(answer: Answer, unit: Unit) -> Answer:
    """Return the same quantity in another unit of its dimension: 3 for `300 cm` in metres.

    An answer that is no expression, and so has no tree, is returned as it is. So is one in a unit
    of no definite size, whose `factor` is None. Any other `factor` is the size of the unit, in the
    base unit of its dimension.
    """
    if not answer.tree or not answer.unit or not answer.unit.factor or not unit.factor:
        return answer
    if answer.unit.factor == unit.factor:
        return answer
    numerator, denominator = (answer.unit.factor / unit.factor).as_integer_ratio()
    tree = (
        "product",
        ("*", answer.tree),
        ("*", ("num", str(numerator))),
        ("/", ("num", str(denominator))),
    )
    if answer.number is None:
        return replace(answer, tree=tree)
    # The product of the conversion is no arithmetic that the answer leaves to be done.
    number = replace(
        evaluate_closed_form(tree), has_undone_arithmetic=answer.number.has_undone_arithmetic
    )
    return replace(answer, tree=tree, number=number)
