r"""Brings the names of figures to one spelling.

The angle `ABC` is the angle `CBA`, the segment `AB` is `BA`, and `CD \parallel AB` says the same as
`AB \parallel CD`. Rays and vectors keep their direction, and a congruence of triangles keeps which
corner lies on which.
"""

import re
from collections.abc import Sequence

_BARRED_SEGMENT_PATTERN = re.compile(r"\\(?:overline|overleftrightarrow)\{([A-Z](?: ?[A-Z])*)\}")
_ANGLE_NAME_PATTERN = re.compile(r"\\angle ?\{?([A-Z]) ?([A-Z]) ?([A-Z])\}?(?![A-Za-z'])")
_TRIANGLE_NAME_PATTERN = re.compile(r"\\triangle ?\{?([A-Z]) ?([A-Z]) ?([A-Z])\}?(?![A-Za-z'])")
_ARC_NAME_PATTERN = re.compile(r"\\widehat\{([A-Z]) ?([A-Z])\}")
_SEGMENT_NAME_PATTERN = re.compile(r"[A-Z] ?[A-Z]")
_SYMMETRIC_RELATION_PATTERN = re.compile(r"(\\(?:parallel|perp|cong|sim)(?![A-Za-z])|=)")


def unify_figure_names(text: str) -> str:
    r"""Return a canonical text with its figures' names in one spelling, to be compared as text.

    `\overline{BA}` becomes `AB`. A relation of two figures has its sides in alphabetical order. A
    text with several relations stays as it is.
    """
    if not _SEGMENT_NAME_PATTERN.search(text):  # names no figure
        return text
    text_without_bars = _BARRED_SEGMENT_PATTERN.sub(r" \1", text).strip()
    sides_and_signs = _SYMMETRIC_RELATION_PATTERN.split(text_without_bars)
    if len(sides_and_signs) == 1:
        return _sort_figure_name(text_without_bars)
    if len(sides_and_signs) > 3:
        return text
    left_side, sign, right_side = [piece.strip() for piece in sides_and_signs]
    left_triangle = _TRIANGLE_NAME_PATTERN.fullmatch(left_side)
    right_triangle = _TRIANGLE_NAME_PATTERN.fullmatch(right_side)
    if left_triangle and right_triangle:
        pairs = _sorted_corners(left_triangle.groups(), right_triangle.groups())
        left_name = "".join(left_corner for left_corner, _ in pairs)
        right_name = "".join(right_corner for _, right_corner in pairs)
        return rf"\triangle {left_name}{sign}\triangle {right_name}"
    return sign.join(sorted((_sort_figure_name(left_side), _sort_figure_name(right_side))))


def _sorted_corners(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of corresponding corners of two triangles, alike for either order of the two.

    For example, "ABC" and "DEF" give [("A", "D"), ("B", "E"), ("C", "F")], and so do "DEF" and
    "ABC".
    """
    return min(
        sorted(zip(first, second, strict=True)),
        sorted(zip(second, first, strict=True)),
    )


def _sort_figure_name(text: str) -> str:
    """Return the name of one figure with its corners in alphabetical order.

    A text that is no name is returned as it is.
    """
    if _SEGMENT_NAME_PATTERN.fullmatch(text):
        return "".join(sorted(text.replace(" ", "")))
    triangle = _TRIANGLE_NAME_PATTERN.fullmatch(text)
    if triangle:
        return rf"\triangle {''.join(sorted(triangle.groups()))}"
    arc = _ARC_NAME_PATTERN.fullmatch(text)
    if arc:
        return rf"\widehat{{{''.join(sorted(arc.groups()))}}}"
    return _ANGLE_NAME_PATTERN.sub(_sort_arms_of_angle, text)


def _sort_arms_of_angle(angle: re.Match[str]) -> str:
    """Return the angle with its arms in alphabetical order; the vertex stays in the middle."""
    name = "".join(angle.groups())
    return rf"\angle {min(name, name[::-1])}"
