r"""Where the answer is: the last complete `\boxed{...}` or `\fbox{...}` of a response."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_CHARS = 1_100_000  # of the end of a response; one character is a few tenths of a microsecond

# `\{`, `\}` and `\\` are skipped as pairs so that a set `\{1,2\}` does not count as braces. A `\\` before `boxed{` is
# not a pair: models that escape twice write `\\boxed{5}`.
_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\\\(?!(?:boxed|fbox)\s*\{)|\\[{}]|(?P<open>\{)|(?P<close>\})")


class _Box(NamedTuple):
    """One complete box: where its command starts, and the bounds of its content."""

    start: int
    content: int
    end: int


def last_boxed(response: str) -> str | None:
    r"""Content of the last complete box (stripped of outer spaces), or None when there is none.

    One pass and a stack, so linear in `len(response)` however deep or many the boxes are. Of nested boxes the
    outermost complete one counts, because what stands beside an inner box is part of the answer; only a box that
    holds nothing but another box is peeled. Of a response over `MAX_CHARS` only the end is looked at. Source: the
    grading policy, point 1.
    """
    complete: list[_Box] = []
    response = response[-MAX_CHARS:]
    pending: list[tuple[int, int, int]] = []  # depth, start and content of the boxes still open
    depth = 0
    for token in _TOKEN.finditer(response):
        kind = token.lastgroup
        if kind == "box":
            depth += 1
            pending.append((depth, token.start(), token.end()))
        elif kind == "open":
            depth += 1
        elif kind == "close":
            if pending and pending[-1][0] == depth:
                _, start, content = pending.pop()
                complete.append(_Box(start, content, token.start()))
            depth -= 1  # below 0 after a stray `}` in the prose, which is harmless: only equality matters
    if not complete:
        return None
    box = _peel(response, complete)
    return response[box.content : box.end].strip()


def _peel(response: str, complete: list[_Box]) -> _Box:
    """The innermost of the boxes that are the whole content of one another, from the last one inwards.

    `complete` is in the order of closing, so a directly nested box stands just before the one around it.
    """
    box = complete[-1]
    for inner in reversed(complete[:-1]):
        around = ((box.content, inner.start), (inner.end + 1, box.end))
        if inner.start < box.content or any(response[start:stop].strip() for start, stop in around):
            break
        box = inner
    return box
