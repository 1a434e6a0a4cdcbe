r"""What kind of thing an answer is: a number, a percentage, a text, a form that is never right, or unreadable.

Source: the grading policy, points 6 and 7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from adora_vl.rewards.canonical import UncanonicalError, canonical
from adora_vl.rewards.grammar import NotReadError, Tree, read_tree
from adora_vl.rewards.numbers import Number, number_of

# An expression has a tree, but no number that `numbers` can find: an unknown, a logarithm, a sine of a sum.
Kind = Literal["number", "percentage", "expression", "text", "never_right", "unreadable"]

# The first that matches names the answer. All run on canonical text, which is short and has no line breaks.
_NEVER_RIGHT = (
    ("empty_box", re.compile(r"^[{}() ]*$")),
    ("not_finite", re.compile(r"(?i)\bnan\b|\binf(?:inity|ty)?\b|\\infty|∞")),
    ("relation", re.compile(r"[<>≤≥≠≈∈]|\\(?:[lg]eq?|[lg]eqslant|[lg]t|neq?|approx|sim|in)(?![A-Za-z])")),
    ("interval", re.compile(r"^[(\[].*,.*[)\]]$|^\[.*\]$")),
    ("enumeration", re.compile(r"[,;&±∓…]|\.\.|\\(?:pm|mp|cup|cap|[lc]?dots)(?![A-Za-z])|\\\{|\\\\")),
    ("enumeration", re.compile(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|[0-9.] [0-9.]")),
    ("equation", re.compile(r"=|≡|\\equiv")),
    ("percentage", re.compile(r"%|\bpercent|(?<=[0-9])percent")),  # except for one quantity in per cent
)
_PER_CENT = re.compile(r"(.+?) ?(?:\\?%|percent)")
# Words, unknowns, simple algebra and ratios: readable, though not a number. Double underscores and unknown commands are
# not.
_READABLE = re.compile(
    r"(?:[0-9A-Za-z .:?'+*/^(){}-]|_(?!_)|\\(?:frac|sqrt|pi|cdot|times|div|sin|cos|tan|circ|angle|triangle|overline"
    r"|widehat|theta|alpha|beta|gamma|phi)(?![A-Za-z]))*"
)

_RATIO = re.compile(r"[0-9.]+(?::[0-9.]+)+")


@dataclass(frozen=True)
class Form:
    """One side of a comparison: its canonical text, its kind, and its number, or the rule that named it.

    `tree`: numbers and expressions, as `grammar` reads them. A percentage has the number before its sign, and is right
    for no plain number: only for the same percentage.
    """

    text: str
    kind: Kind
    reason: str = ""
    number: Number | None = None
    tree: Tree | None = None


def read(raw: str) -> Form:
    """The form of an answer or a gold as it was written. Never raises, and costs about a millisecond at most."""
    try:
        text = canonical(raw)
    except UncanonicalError as error:
        return Form("", "unreadable", error.reason)
    per_cent = _PER_CENT.fullmatch(text)
    of = read(per_cent[1]) if per_cent else None
    if of is not None and of.kind in {"number", "expression"}:
        return Form(f"{of.text}%", "percentage", "percentage", number=of.number)
    for reason, pattern in _NEVER_RIGHT:
        if pattern.search(text):
            return Form(text, "never_right", reason)
    tree: Tree | None = None
    try:
        tree = read_tree(text)
        return Form(text, "number", number=number_of(tree), tree=tree)
    except NotReadError as error:
        if error.reason == "beyond":
            return Form(text, "expression", "not_a_number", tree=tree)
        if error.reason != "not_read":
            return Form(text, "unreadable", error.reason)
    worded = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) and _READABLE.fullmatch(text)
    if worded or _RATIO.fullmatch(text):
        return Form(text, "text", "not_a_number")
    return Form(text, "unreadable", "not_read")
