"""Mends the LaTeX in the problem texts of Geometry3K."""

import re

_POINT = r"[A-Z](?:'+|_\{?\w\}?)?(?![A-Za-z'])"
_SEGMENT = re.compile(  # over two points, however many letters follow
    rf"\\(overline|overrightarrow|overleftarrow|overleftrightarrow|vec|bar)(?:\s+|(?=[A-Z]))({_POINT}|[A-Z]'?)\s*({_POINT})"
)
_ARC = re.compile(
    rf"\\(?:widehat|overarc|arc|wideparen)(?:\s+|(?=[A-Z]))((?:[A-Z]'?\s*){{1,3}}{_POINT})"
)
# The texts write these words as commands, which LaTeX does not have.
_SHAPE = re.compile(
    r"\\(parallelogram|rectangle|rhombus|trapezoid|quadrilateral|pentagon|hexagon|octagon|kite|circle)(?![A-Za-z])"
)
_TIDY = (
    (re.compile(r"[\s\u00a0]+"), " "),
    (re.compile(r"\{ | (?=\})"), lambda m: m.group().strip()),  # `{ 3 }`
    (
        re.compile(
            r"(\\(?:frac|sqrt|widehat|overline|overrightarrow|overleftrightarrow|text)) (?=[{\[])"
        ),
        r"\1",
    ),
    (re.compile(r"(?<=\}) (?=\{)"), ""),  # `\frac{1} {2}`
    (re.compile(r" ?([\^_]) ?"), r"\1"),
    (re.compile(r"\^\{?\\circ(?![A-Za-z])\}?"), r"^\\circ"),
    (re.compile(r" (?=[.,;:?!](?:\s|$))"), ""),
)


def readable(text: str) -> str:
    r"""Write the text of a problem in LaTeX that can be read.

    `m \widehat A B` becomes `m \widehat{A B}`, `\sqrt { 3 }` becomes `\sqrt{3}`, and
    `\parallelogram` becomes `parallelogram`.
    """
    text = _SEGMENT.sub(r"\\\1{\2 \3}", text)
    text = _ARC.sub(lambda match: rf"\widehat{{{match[1]}}}", text)
    text = _SHAPE.sub(r"\1", text)
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text.strip()
