r"""What an answer says, and how one of a single value is read. `forms.read` reads any of them.

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

from adora_vl.rewards.canonical import CURRENCY, MAX_CHARS, canonical, whole
from adora_vl.rewards.grammar import NotReadError, Tree, read_tree
from adora_vl.rewards.numeric import Ball, number_of
from adora_vl.rewards.solutions import Solution
from adora_vl.rewards.units import RADIANS, Unit, unit_of

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
    """One side of a comparison, or a part of one.

    `text`: in canonical form. `reason`: the rule by which it is wrong where a value is asked for
    that it is not. `raw`: what was read. `label`: what a form is the value of, `AB` in `AB = 4`.
    `real`: a number, or that before a per cent sign. `tree`: of numbers and expressions, as
    `grammar` reads them. `brackets`: of an ordered one, such as `[)`. `both_signs`: whether it
    comes from a plus-minus. `relations`: each a sign and the tree that it compares with 0.
    `solution`: of inequalities in one unknown and of intervals. `refusal`: why it can be no
    reference answer. `unit`: the one behind the value, which is not in `text`.
    """

    kind: Kind
    text: str
    reason: str = ""
    raw: str = ""
    label: str = ""
    real: Ball | None = None
    tree: Tree | None = None
    parts: tuple[Answer, ...] = ()
    brackets: str = ""
    both_signs: bool = False
    relations: tuple[tuple[str, Tree], ...] = ()
    solution: Solution | None = None
    refusal: str = ""
    unit: Unit | None = None

    @cached_property
    def ratio(self) -> tuple[Ball, ...]:
        r"""The terms of a ratio of numbers, such as `3:4`, `1:\sqrt{3}` and `3 to 4`; else ()."""
        return _ratio(self.text)

    @cached_property
    def whole(self) -> str:
        """The canonical text with all its names and brackets, which `forms` reads."""
        return whole(self.raw) if self.raw else self.text

    @property
    def is_value(self) -> bool:
        return self.kind in {"number", "percentage", "expression", "text"}

    @property
    def is_form(self) -> bool:
        """Whether it is more than a single value: a value with its name is a form, too."""
        return self.label != "" or not (self.is_value or self.kind == "unreadable")


# The first that matches says why a text is no single value. All run on canonical text: short,
# without line breaks.
_NO_VALUE = (
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
NO_VALUE = frozenset(reason for reason, _ in _NO_VALUE)
# nothing can be said of it
UNREAD = frozenset({"too_long", "hidden_characters", "not_read", "too_large", "undefined"})
# One sign, so that reading goes one level deep.
_PER_CENT = re.compile(r"((?:(?!%|percent|pct).)+?) ?(?:\\?%|percent(?:age)?|pct)")
# Words, unknowns, simple algebra and ratios: readable, though not a number. Double underscores and
# unknown commands are not.
_READABLE = re.compile(
    r"(?:[0-9A-Za-z "
    r".:?'+*/^(){}-]|_(?!_)|\\(?:frac|sqrt|pi|cdot|times|div|sin|cos|tan|circ|angle|triangle|overline"
    r"|widehat|theta|alpha|beta|gamma|phi|parallel|perp|cong|sim)(?![A-Za-z]))*"
)
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile("[A-Za-z]")
_DAY = "(?:0?[1-9]|[12][0-9]|3[01])"
_MONTH = "(?:0?[1-9]|1[0-2])"
_YEAR = "(?:1[0-9]|20)[0-9]{2}"
_ORDERS = ((_YEAR, _MONTH, _DAY), (_DAY, _MONTH, _YEAR), (_MONTH, _DAY, _YEAR))
_DATE = re.compile("|".join(sign.join(parts) for sign in "-/" for parts in _ORDERS))
_RATIO_IN_WORDS = re.compile(r"(?<=[0-9)}]) ?to ?(?=[0-9(\\])")
_CLOCK = re.compile(r"[0-2]?[0-9]:[0-5][0-9]")  # a ratio is reduced where it may be a time
MAX_TERMS = 6  # of a ratio


def plain(raw: str) -> Answer:
    """An answer as a single value, or as unreadable.

    Never raises, and costs about a millisecond at most.
    """
    return _plain(raw) if len(raw) <= MAX_CHARS else Answer("unreadable", "", "too_long")


@lru_cache(maxsize=256)
def _plain(raw: str) -> Answer:
    """The rollouts of a group share their reference answer, and often their answer."""
    try:
        text, unit = canonical(raw)
    except NotReadError as error:
        return Answer("unreadable", "", error.reason)
    found = _valued(text, raw)
    return replace(found, unit=unit_of(unit)) if unit else found


def _valued(text: str, raw: str) -> Answer:
    if not _PLAIN_NUMBER.fullmatch(text):  # most answers are one, and nothing below applies to it
        found = _percentage(text, raw) or _no_value(text, raw)
        if found is not None:
            return found
    tree: Tree | None = None
    try:
        tree = read_tree(text)
        return Answer(kind="number", text=text, raw=raw, real=number_of(tree), tree=tree)
    except NotReadError as error:
        if error.reason == "beyond":
            return Answer(kind="expression", text=text, reason="not_a_number", raw=raw, tree=tree)
        readable = _LETTER.search(_COMMAND.sub("", text)) and _READABLE.fullmatch(text)
        if error.reason == "not_read" and (readable or _CLOCK.fullmatch(text) or _ratio(text)):
            return Answer(kind="text", text=text, reason="not_a_number", raw=raw)
        return Answer(kind="unreadable", text=text, reason=error.reason, raw=raw)


def _percentage(text: str, raw: str) -> Answer | None:
    per_cent = _PER_CENT.fullmatch(text)
    of = plain(per_cent[1]) if per_cent else None
    if of is None or not of.tree:
        return None
    return Answer(kind="percentage", text=f"{of.text}%", reason="percentage", raw=raw, real=of.real)


def _no_value(text: str, raw: str) -> Answer | None:
    """What says at once that a text is no number: a relation, several values, a date."""
    for reason, pattern in _NO_VALUE:
        if pattern.search(text):
            return Answer(kind="unreadable", text=text, reason=reason, raw=raw)
    if _DATE.fullmatch(text):
        return Answer(
            kind="text", text=text, reason="not_a_number", raw=raw
        )  # not the difference 2022
    return None


@lru_cache(maxsize=256)
def _ratio(text: str) -> tuple[Ball, ...]:
    terms = _RATIO_IN_WORDS.sub(":", text).split(":")
    if not 1 < len(terms) <= MAX_TERMS:
        return ()
    try:
        numbers = tuple(number_of(read_tree(term)) for term in terms)
    except NotReadError:
        return ()
    if _CLOCK.fullmatch(text) and math.gcd(*map(int, terms)) > 1:
        return ()
    return numbers if all(number.least > 0 and not number.unevaluated for number in numbers) else ()


def amount(answer: Answer) -> Answer:
    r"""The amount of money in an answer, 5 in `\$5` and `5 dollars`; without one the answer itself."""
    match = CURRENCY.fullmatch(answer.text)
    return (
        plain(match["named"] or match["before"] or match["sign"] + match["cents"])
        if match
        else answer
    )


def in_radians_or_degrees(answer: Answer, dimension: str) -> Answer:
    r"""An angle in the other of the two dimensions: 60 for `\frac{\pi}{3}` radians in degrees."""
    if answer.tree is None:
        return answer
    half_turns = (("*", ("num", "180")), ("/", ("pi",)))
    if dimension == RADIANS:
        half_turns = (("/", ("num", "180")), ("*", ("pi",)))
    tree = ("product", ("*", answer.tree), *half_turns)
    return replace(answer, tree=tree, real=answer.real and number_of(tree))


def in_unit(answer: Answer, unit: Unit) -> Answer:
    """The same quantity in another unit of its dimension: 3 for `300 cm` in metres."""
    if not (
        answer.tree
        and answer.unit
        and answer.unit.factor
        and unit.factor
        and answer.unit.factor != unit.factor
    ):
        return answer
    above, below = (answer.unit.factor / unit.factor).as_integer_ratio()
    tree = ("product", ("*", answer.tree), ("*", ("num", str(above))), ("/", ("num", str(below))))
    real = answer.real and replace(number_of(tree), unevaluated=answer.real.unevaluated)
    return replace(answer, tree=tree, real=real)
