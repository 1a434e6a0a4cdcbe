"""Splits a text at separators that stand outside of all brackets."""

import re

from adora_vl.rewards.grammar import ParseError

MAX_PARTS = 24  # numbers in one answer; comparing lists takes the square of it


def bracket_depths(text: str) -> tuple[int, ...]:
    """Return for each character of a text how many brackets it stands in.

    A bracket does not count for itself.

    Raises `ParseError` where brackets do not match in number.
    """
    depth = 0
    depths = []
    for char in text:
        if char in ")]}":
            depth -= 1
        depths.append(depth)
        if char in "([{":
            depth += 1
    # Brackets stay open, or one closes before any has opened.
    if depth != 0 or min(depths, default=0) < 0:
        raise ParseError("not_read")
    return tuple(depths)


def split_outside_brackets(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the pieces of `text` between matches outside of brackets, and the matches.

    Raises `ParseError` for more than `MAX_PARTS` matches.
    """
    depths = bracket_depths(text)
    pieces = []
    matches = []
    piece_start = 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            pieces.append(text[piece_start : match.start()].strip())
            matches.append(match.group())
            piece_start = match.end()
            if len(matches) > MAX_PARTS:
                raise ParseError("too_large")
    return [*pieces, text[piece_start:].strip()], matches
