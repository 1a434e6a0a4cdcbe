r"""Where the answer is: the last complete `\boxed{...}` or `\fbox{...}` of a response, or its `<answer>` block."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_CHARS = 1_100_000  # of the end of a response; one character is a few tenths of a microsecond

# `\{`, `\}` and `\\` are skipped as pairs so that a set `\{1,2\}` does not count as braces. A `\\` before `boxed{` is
# not a pair: models that escape twice write `\\boxed{5}`.
_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\\\(?!(?:boxed|fbox)\s*\{)|\\[{}]|(?P<open>\{)|(?P<close>\})")

ANSWER_TAGS = ("<answer>", "</answer>")


class _Box(NamedTuple):
    r"""One complete box, as positions in the response: of the `\` of its command, and of the start and the end of its
    content. In `so \boxed{5}` they are 3, 10 and 11.
    """

    start: int
    content: int
    end: int


def last_boxed(response: str) -> str | None:
    r"""The content of the last complete box, without outer spaces, or None if there is no complete box.

    `\boxed{4}, no: \boxed{ 5 }` gives `5`. Of nested boxes the outermost complete one counts, because what stands
    beside an inner box is part of the answer: `\boxed{x = \boxed{5}}` gives `x = \boxed{5}`. A box that holds nothing
    but another box is peeled: `\boxed{\boxed{5}}` gives `5`.

    The response is read once with a stack, so the time is linear in its length, however deep or many the boxes are. Of
    a response over `MAX_CHARS` only the end is read. Source: the grading policy, point 1.
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


def last_answer(response: str) -> str | None:
    r"""As `last_boxed`, where the prompt asked for `<answer> </answer>`: the last complete block or box counts.

    `<answer>5</answer>` gives `5`, and so does `<answer>\boxed{5}</answer>`: a box in the block, or behind it, is what
    the model gives as its answer. A box before the block, as in `<think>\boxed{4}? no</think><answer>5</answer>`, is
    not.
    """
    response = response[-MAX_CHARS:]
    opening, closing = ANSWER_TAGS
    begin = response.rfind(opening, 0, max(0, response.rfind(closing)))
    if begin < 0:
        return last_boxed(response)
    block = response[begin + len(opening) :]
    boxed = last_boxed(block)
    return boxed if boxed is not None else block[: block.find(closing)].strip()


def _peel(response: str, complete: list[_Box]) -> _Box:
    """Start with the last box, and go inwards as long as a box holds nothing but one other box. Returns the innermost.

    `complete` is in the order in which the boxes close, so a directly nested box comes just before the one around it.
    """
    box = complete[-1]
    for inner in reversed(complete[:-1]):
        around = ((box.content, inner.start), (inner.end + 1, box.end))
        if inner.start < box.content or any(response[start:stop].strip() for start, stop in around):
            break
        box = inner
    return box
