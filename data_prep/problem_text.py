"""Mends the LaTeX in the problem texts of Geometry3K."""

import re

_POINT_PATTERN = r"[A-Z](?:'+|_\{?\w\}?)?(?![A-Za-z'])"
_SEGMENT_PATTERN = re.compile(  # over two points, however many letters follow
    rf"\\(overline|overrightarrow|overleftarrow|overleftrightarrow|vec|bar)(?:\s+|(?=[A-Z]))({_POINT_PATTERN}|[A-Z]'?)\s*({_POINT_PATTERN})"
)
_ARC_PATTERN = re.compile(
    rf"\\(?:widehat|overarc|arc|wideparen)(?:\s+|(?=[A-Z]))((?:[A-Z]'?\s*){{1,3}}{_POINT_PATTERN})"
)
# The texts write these words as commands, which LaTeX does not have.
_SHAPE_COMMAND_PATTERN = re.compile(
    r"\\(parallelogram|rectangle|rhombus|trapezoid|quadrilateral|pentagon|hexagon|octagon|kite|circle)(?![A-Za-z])"
)
_TIDYING_REPLACEMENTS = (
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


def mend_latex(text: str) -> str:
    r"""Write the text of a problem in LaTeX that can be read.

    `m \widehat A B` becomes `m \widehat{A B}`, `\sqrt { 3 }` becomes `\sqrt{3}`, and
    `\parallelogram` becomes `parallelogram`.
    """
    text = _SEGMENT_PATTERN.sub(r"\\\1{\2 \3}", text)
    text = _ARC_PATTERN.sub(lambda match: rf"\widehat{{{match[1]}}}", text)
    text = _SHAPE_COMMAND_PATTERN.sub(r"\1", text)
    for pattern, replacement in _TIDYING_REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text.strip()
