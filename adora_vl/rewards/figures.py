r"""Names of figures in one spelling: the angle `ABC` is the angle `CBA`, the segment `AB` is `BA`, and
`CD \parallel AB` says what `AB \parallel CD` says.

Rays and vectors keep their direction, and a congruence keeps which corner lies on which.
"""

import re

_BARRED = re.compile(r"\\(?:overline|overleftrightarrow)\{([A-Z](?: ?[A-Z])*)\}")
_ANGLE = re.compile(r"\\angle ?\{?([A-Z]) ?([A-Z]) ?([A-Z])\}?(?![A-Za-z'])")
_TRIANGLE = re.compile(r"\\triangle ?\{?([A-Z]) ?([A-Z]) ?([A-Z])\}?(?![A-Za-z'])")
_ARC = re.compile(r"\\widehat\{([A-Z]) ?([A-Z])\}")
_SEGMENT = re.compile(r"[A-Z] ?[A-Z]")
_TWO_CAPITALS = re.compile(r"[A-Z] ?[A-Z]")
_SYMMETRIC = re.compile(r"(\\(?:parallel|perp|cong|sim)(?![A-Za-z])|=)")


def in_one_spelling(text: str) -> str:
    """A canonical text with the names of its figures in one spelling."""
    if not _TWO_CAPITALS.search(text):
        return text
    sides = _SYMMETRIC.split(_BARRED.sub(r" \1", text).strip())
    if len(sides) != 3:
        return _name(sides[0]) if len(sides) == 1 else text
    left, sign, right = (side.strip() for side in sides)
    corners = [_TRIANGLE.fullmatch(side) for side in (left, right)]
    if corners[0] and corners[1]:
        first, second = ("".join(side) for side in zip(*_turned(corners), strict=True))
        return rf"\triangle {first}{sign}\triangle {second}"
    return sign.join(sorted((_name(left), _name(right))))


def _turned(corners: list[re.Match[str] | None]) -> list[tuple[str, str]]:
    """The pairs of corners of two triangles, in order, those of the earlier name first."""
    names = [match.groups() for match in corners if match]
    return min(sorted(zip(first, second, strict=True)) for first, second in (names, names[::-1]))


def _name(text: str) -> str:
    """The name of one figure in one spelling; any other text is as it was."""
    if _SEGMENT.fullmatch(text):
        return "".join(sorted(text.replace(" ", "")))
    if corners := _TRIANGLE.fullmatch(text):
        return rf"\triangle {''.join(sorted(corners.groups()))}"
    if ends := _ARC.fullmatch(text):
        return rf"\widehat{{{''.join(sorted(ends.groups()))}}}"
    return _ANGLE.sub(_angle, text)


def _angle(found: re.Match[str]) -> str:
    name = found[1] + found[2] + found[3]
    return rf"\angle {min(name, name[::-1])}"
