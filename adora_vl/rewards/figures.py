r"""Brings the names of figures to one spelling.

The angle `ABC` is the angle `CBA`, the segment `AB` is `BA`, and `CD \parallel AB` says the same as
`AB \parallel CD`. Rays and vectors keep their direction, and a congruence of triangles keeps which
corner lies on which.
"""

import re
from collections.abc import Sequence

_BARRED = re.compile(r"\\(?:overline|overleftrightarrow)\{([A-Z](?: ?[A-Z])*)\}")
_ANGLE = re.compile(r"\\angle ?\{?([A-Z]) ?([A-Z]) ?([A-Z])\}?(?![A-Za-z'])")
_TRIANGLE = re.compile(r"\\triangle ?\{?([A-Z]) ?([A-Z]) ?([A-Z])\}?(?![A-Za-z'])")
_ARC = re.compile(r"\\widehat\{([A-Z]) ?([A-Z])\}")
_SEGMENT = re.compile(r"[A-Z] ?[A-Z]")
_TWO_CAPITALS = re.compile(r"[A-Z] ?[A-Z]")
_SYMMETRIC = re.compile(r"(\\(?:parallel|perp|cong|sim)(?![A-Za-z])|=)")


def in_one_spelling(text: str) -> str:
    """Return a canonical text with the names of its figures in one spelling.

    A relation of two figures has its sides in alphabetical order. A text with several relations
    stays as it is.
    """
    if not _TWO_CAPITALS.search(text):
        return text
    sides = _SYMMETRIC.split(_BARRED.sub(r" \1", text).strip())
    if len(sides) != 3:
        return _spell_figure_name(sides[0]) if len(sides) == 1 else text
    first_side = sides[0].strip()
    sign = sides[1].strip()
    second_side = sides[2].strip()
    first = _TRIANGLE.fullmatch(first_side)
    second = _TRIANGLE.fullmatch(second_side)
    if first and second:
        pairs = _sorted_corners(first.groups(), second.groups())
        first_name = "".join(pair[0] for pair in pairs)
        second_name = "".join(pair[1] for pair in pairs)
        return rf"\triangle {first_name}{sign}\triangle {second_name}"
    return sign.join(sorted((_spell_figure_name(first_side), _spell_figure_name(second_side))))


def _sorted_corners(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of corresponding corners of two triangles, in alphabetical order.

    The triangles change places where that comes earlier in the alphabet.
    """
    return min(
        sorted(zip(first, second, strict=True)),
        sorted(zip(second, first, strict=True)),
    )


def _spell_figure_name(text: str) -> str:
    """Return the name of one figure in one spelling.

    A text that is no name is returned as it is.
    """
    if _SEGMENT.fullmatch(text):
        return "".join(sorted(text.replace(" ", "")))
    if corners := _TRIANGLE.fullmatch(text):
        return rf"\triangle {''.join(sorted(corners.groups()))}"
    if ends := _ARC.fullmatch(text):
        return rf"\widehat{{{''.join(sorted(ends.groups()))}}}"
    return _ANGLE.sub(_sort_arms, text)


def _sort_arms(match: re.Match[str]) -> str:
    """Return the angle with its arms in alphabetical order; the vertex stays in the middle."""
    name = match[1] + match[2] + match[3]
    return rf"\angle {min(name, name[::-1])}"
