r"""What an answer says, and how an answer of a single value is read.

`structured.parse_reference` reads answers of all types. The types, with examples:

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

from adora_vl.rewards.canonical import (
    MONEY_PATTERN,
    canonical_value_and_unit,
    canonical_with_names,
)
from adora_vl.rewards.grammar import MAX_CHARS, ExpressionTree, ParseError, parse_tree
from adora_vl.rewards.number_with_error import NumberWithError
from adora_vl.rewards.numeric import evaluate_closed_form
from adora_vl.rewards.solutions import Solution
from adora_vl.rewards.units import RADIANS, Unit, parse_unit

# The first four are single values.
AnswerType = Literal[
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

    type: AnswerType
    text: str
    """The canonical form."""
    reason: str = ""
    """The rule by which the answer is wrong where a number is expected; empty for a number."""
    raw: str = ""
    """The text that was read."""
    name: str = ""
    """The name of the value: `AB` in `AB = 4`."""
    number: NumberWithError | None = None
    """The number, or the number before a per cent sign."""
    tree: ExpressionTree | None = None
    """The tree of a number or expression, as `grammar` reads it."""
    parts: tuple[Answer, ...] = ()
    """The values of a list, set, point or interval."""
    brackets: str = ""
    """The brackets of an ordered answer, such as `[)`."""
    is_plus_minus: bool = False
    """Whether the answer comes from a plus-minus sign."""
    relations: tuple[tuple[str, ExpressionTree], ...] = ()
    """Each relation as its sign and the tree that it compares with 0."""
    solution: Solution | None = None
    """The solution of inequalities in one unknown and of intervals."""
    refusal_reason: str = ""
    """Why the answer cannot be parsed at all, so that it can be no reference answer."""
    unit: Unit | None = None
    """The unit behind the value, which is not in `text`."""

    @cached_property
    def ratio(self) -> tuple[NumberWithError, ...]:
        r"""The terms of a ratio of numbers, such as `3:4`, `1:\sqrt{3}` and `3 to 4`, else ()."""
        return _ratio_terms(self.text)

    @cached_property
    def text_with_names(self) -> str:
        """The canonical text with all its names and brackets, which `structured` reads."""
        return canonical_with_names(self.raw) if self.raw else self.text

    @property
    def plain_number(self) -> NumberWithError | None:
        """The number of an answer that is a number, else None, also for a percentage."""
        return self.number if self.type == "number" else None

    @property
    def is_value(self) -> bool:
        """Whether it is a single value that was read."""
        return self.type in {"number", "percentage", "expression", "text"}

    @property
    def is_structured(self) -> bool:
        """Whether it has several values, a relation or an interval, or one value with a name."""
        return self.name != "" or not (self.is_value or self.type == "unreadable")


# Each entry is a reason and a pattern. The first pattern that is found in a text gives the reason
# why the text is no single value. All run on canonical text, which is short and has no line breaks.
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
    # A per cent sign in a text that `_parse_percentage` could not read.
    ("percentage", re.compile(r"%|\bpercent|(?<=[0-9])percent|(?<![A-Za-z])pct")),
)
NO_VALUE_REASONS = frozenset(reason for reason, _ in _NO_VALUE_PATTERNS)
# An answer with one of these reasons is `unparseable`: it could not be read, so it may be right.
UNREAD_REASONS = frozenset({"too_long", "hidden_characters", "not_read", "too_large", "undefined"})
# A value and one per cent sign. With a second sign the text does not match, so reading the value
# does not come back here.
_PERCENTAGE_PATTERN = re.compile(r"((?:(?!%|percent|pct).)+?) ?(?:\\?%|percent(?:age)?|pct)")
# Text that may be an answer although it is no number: words, unknowns, simple algebra and ratios. A
# text with double underscores or other commands does not match.
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
_CLOCK_TIME_PATTERN = re.compile(r"[0-2]?[0-9]:[0-5][0-9]")
# The number of an angle: `\angle 2`, and `angles 2`, which is the first piece of `angles 2, 3 and
# 6`.
_NUMBERED_ANGLE_PATTERN = re.compile(r"(?:\\angle|angles?) ?([0-9]{1,2})")
MAX_RATIO_TERMS = 6


def parse_value(raw: str) -> Answer:
    """Parse an answer as a single value; the type is `unreadable` where it is no such value.

    It never raises, and costs about a millisecond at most.
    """
    if len(raw) > MAX_CHARS:
        return Answer(type="unreadable", text="", reason="too_long")
    return _parse_value_cached(raw)


def parse_value_or_raise(text: str) -> Answer:
    r"""Parse a part of an answer, which has to be a single value.

    `\angle 2` is read as 2, the number of the angle. Raises `ParseError` for a text that is no
    single value.
    """
    angle = _NUMBERED_ANGLE_PATTERN.fullmatch(text)
    value = parse_value(angle[1] if angle else text)
    if not value.is_value:
        raise ParseError(value.reason)
    # Only the whole answer keeps its names, in `raw`. A part has its value alone.
    return replace(value, raw="")


@lru_cache(maxsize=256)
def _parse_value_cached(raw: str) -> Answer:
    """Parse an answer as `parse_value` does, with a cache.

    The rollouts of a group share their reference answer, and often their answer.
    """
    try:
        text, unit = canonical_value_and_unit(raw)
    except ParseError as error:
        return Answer(type="unreadable", text="", reason=error.reason)
    answer = _parse_canonical(text, raw)
    return replace(answer, unit=parse_unit(unit)) if unit else answer


def _parse_canonical(text: str, raw: str) -> Answer:
    """Return the answer in a canonical text without a unit.

    The types: `5%` is a percentage, `1,2` unreadable, `5` a number, `3x+1` an expression, and
    `right triangle` a text. `raw` is the text as it was written.
    """
    answer = _parse_percentage(text, raw) or _parse_non_number(text, raw)
    if answer is not None:
        return answer
    tree: ExpressionTree | None = None
    try:
        tree = parse_tree(text)
        return Answer(
            type="number", text=text, raw=raw, number=evaluate_closed_form(tree), tree=tree
        )
    except ParseError as error:
        # The text is in the grammar, but it has unknowns and therefore no number as its value.
        if error.reason == "has_unknown":
            return Answer(type="expression", text=text, reason="not_a_number", raw=raw, tree=tree)
        # The text is not in the grammar, but it may be plain words, such as `right triangle`.
        if error.reason == "not_read" and _is_readable_text(text):
            return Answer(type="text", text=text, reason="not_a_number", raw=raw)
        return Answer(type="unreadable", text=text, reason=error.reason, raw=raw)


def _is_readable_text(text: str) -> bool:
    """Return whether a text that is no closed form can be an answer as text: words, time, ratio."""
    if _CLOCK_TIME_PATTERN.fullmatch(text) or _ratio_terms(text):
        return True
    has_letter = _LETTER_PATTERN.search(_LATEX_COMMAND_PATTERN.sub("", text)) is not None
    return has_letter and _READABLE_TEXT_PATTERN.fullmatch(text) is not None


def _parse_percentage(text: str, raw: str) -> Answer | None:
    """Return the percentage in a text such as `5%`; None for any other text."""
    percentage = _PERCENTAGE_PATTERN.fullmatch(text)
    quantity = parse_value(percentage[1]) if percentage else None
    if quantity is None or not quantity.tree:  # neither a number nor an expression
        return None
    return Answer(
        type="percentage",
        text=f"{quantity.text}%",
        reason="percentage",
        raw=raw,
        number=quantity.number,
    )


def _parse_non_number(text: str, raw: str) -> Answer | None:
    """Return the answer in a text that is surely no number: a relation, several values or a date.

    None for any other text.
    """
    for reason, pattern in _NO_VALUE_PATTERNS:
        if pattern.search(text):
            return Answer(type="unreadable", text=text, reason=reason, raw=raw)
    if _DATE_PATTERN.fullmatch(text):
        # `2022-10-12` is not the difference 2000
        return Answer(type="text", text=text, reason="not_a_number", raw=raw)
    return None


def _ratio_terms(text: str) -> tuple[NumberWithError, ...]:
    """Return the terms of a ratio: 3 and 4 for `3:4` and `3 to 4`. Any other text gives ().

    All terms must be numbers other than 0, without arithmetic left to do. `3:45` gives () too,
    since it is a time of day: a ratio would be written without the common factor, as `1:15`. `3:47`
    has no common factor, so it counts as a ratio.
    """
    terms = _RATIO_WORD_PATTERN.sub(":", text).split(":")
    if not 1 < len(terms) <= MAX_RATIO_TERMS:
        return ()
    try:
        numbers = tuple(evaluate_closed_form(parse_tree(term)) for term in terms)
    except ParseError:
        return ()
    # The terms of a time of day are whole numbers, so that `int` reads them.
    if _CLOCK_TIME_PATTERN.fullmatch(text) and math.gcd(*map(int, terms)) > 1:
        return ()
    for number in numbers:
        # `least_magnitude` is 0 or less if the term can be 0 within its error.
        if number.least_magnitude <= 0 or number.is_unevaluated:
            return ()
    return numbers


def without_currency(answer: Answer) -> Answer:
    """Return the amount of money in an answer: 5 in `5 dollars`.

    An answer without a currency is returned as it is.
    """
    money = MONEY_PATTERN.fullmatch(answer.text)
    if not money:
        return answer
    # One of three spellings has matched: `5 dollars`, `5.00$` or `-$5.00`.
    if money["before_word"] or money["before_sign"]:
        return parse_value(money["before_word"] or money["before_sign"])
    return parse_value(money["minus"] + money["after_sign"])


def convert_angle(answer: Answer, dimension: str) -> Answer:
    r"""Return an angle converted to `dimension`, which is `radians` or `angle` (degrees).

    `\frac{\pi}{3}` radians become 60 degrees. The answer has to be in radians if `dimension` is
    `angle`, and in degrees if it is `radians`.
    """
    if answer.tree is None:
        return answer
    # The factors of a product tree: radians times 180 divided by pi are degrees.
    factors = (("*", ("num", "180")), ("/", ("pi",)))
    if dimension == RADIANS:
        factors = (("/", ("num", "180")), ("*", ("pi",)))
    tree = ("product", ("*", answer.tree), *factors)
    if answer.number is None:  # an expression with unknowns
        return replace(answer, tree=tree)
    return replace(answer, tree=tree, number=evaluate_closed_form(tree))


def convert_to_unit(answer: Answer, unit: Unit) -> Answer:
    """Return the same quantity in another unit of its dimension: 3 for `300 cm` in metres.

    The `factor` of a unit is its size in the base unit of its dimension, or None for a unit of no
    definite size. An answer without a tree (a text), and one whose unit or target unit has no
    factor, is returned as it is.
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
    # The tree has a product now, but the answer itself leaves no more arithmetic undone than
    # before.
    number = replace(evaluate_closed_form(tree), is_unevaluated=answer.number.is_unevaluated)
    return replace(answer, tree=tree, number=number)
