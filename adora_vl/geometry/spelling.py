"""One spelling for what a teacher writes: signs, LaTeX, units and turns of speech.

The grammar of sentences then has to know few words. What is dropped here says nothing that a figure
could show.
"""

from __future__ import annotations

import re

from adora_vl.geometry.draft import ADJECTIVE_PATTERN, POINT_PATTERN, SHAPE_PATTERN
from adora_vl.geometry.expressions import UNIT_PATTERN

_SEGMENT_PATTERN = rf"{POINT_PATTERN}{POINT_PATTERN}(?!{POINT_PATTERN})"
# What begins a value, so that "is" before it means "equals": a number, a root or a single letter.
_START_OF_VALUE = r"(?:-?\s*\d|\.\d|√|\\(?:frac|sqrt|pi)\b|[b-z](?![a-z])|a\s*$|\()"
# Pairs of a pattern and what it becomes, in this order: the later ones count on the earlier.
_SPELLING_BY_PATTERN: tuple[tuple[str, str], ...] = (
    # Signs and LaTeX
    (r"\$|\\left|\\right(?!arrow)|\\[,;!]|\\(?:overline|overleftrightarrow|text|mathrm)\b", " "),
    (r"[{]\s*((?:[A-Z]'?)+)\s*[}]", r" \1 "),
    (r"\\?°|\\circ\b|\^\s*\{?\s*\\circ\s*\}?|\bdegrees?\b|\\degree\b", ""),
    (r"\bm\s*(?=[∠∡]|\\angle\b)|\bm\s+(?=angle\b)", ""),
    (r"[∠∡]|\\m?angle\b", " angle "),
    (r"\\?⌒|\\widehat\b", " arc "),
    (r"\|\||[∥]|\\parallel\b", " parallel "),
    (r"[⊥]|\\perp\b", " perpendicular "),
    (r"[≅]|\\cong\b", " congruent "),
    (r"[~∼]|\\sim\b", " similar "),
    (r"[△]|\\triangle\b", " triangle "),
    (r"[⊙]|\\odot\b", " circle "),
    (r"[·×]|\\cdot\b|\\times\b", "*"),
    (r"−", "-"),
    # Units behind numbers, and what follows them
    (UNIT_PATTERN, ""),
    (r"(?<=[\d)}])\s*(?:long|wide|high|tall)\b", ""),
    # What a sentence begins with
    (
        r"^(?:and|if|given|suppose|assume|let|then|also|so|now|with|where|such)(?::|\s)\s*"
        r"(?:that\s+)?",
        "",
    ),
    (rf"^[Ff]rom (?:the )?(?:point )?{POINT_PATTERN}$", ""),
    (r"^in\s+(?:the|this)\s+(?:figure|diagram|drawing|picture)\s*", ""),
    (
        rf"^in (?:a |an |the )?(?=(?:(?:{ADJECTIVE_PATTERN}) )*(?:{SHAPE_PATTERN}|circle|polygon)\b)",
        "",
    ),
    # Questions
    (
        r"^(?:what(?:'s| is| are)|how (?:long|large|big|wide) is|calculate|determine|compute"
        r"|evaluate|solve for|work out)\s+",
        "find ",
    ),
    (
        r"\b(?:(?:has|have|with)\s+(?:a\s+)?|of\s+)(?:measure|length)\s+(?:of\s+)?"
        rf"(?={_START_OF_VALUE})",
        "= ",
    ),
    (r"\b(?:the )?(?:measures?|values?) of ", ""),
    (r"\bfind measure ", "find "),
    (r"\b(?:the )?lengths? of (?=(?:the )?(?:(?:minor|major) )?arc)", "length "),
    (r"\b(?:the )?lengths? (?:of )?(?!(?:of )?(?:the )?(?:(?:minor|major) )?arc)", ""),
    # Sums, shares and ratios
    (r"\b(?:the )?sum of (.+?) and (.+?) (?:is|equals|=)", r"\1 + \2 ="),
    (r"\b(?:the )?ratio of (.+?) to (.+?) (?:is|equals|=)", r"\1 : \2 ="),
    (r"\bfind (?:the )?ratio of (.+?) to (.+)", r"find (\1) / (\2)"),
    (r"\bis (\S+) (?:more|greater|larger|longer) than (.+)", r"= \2 + \1"),
    (r"\bis (\S+) (?:less|smaller|shorter) than (.+)", r"= \2 - \1"),
    (r"\b(?:is|are|=)\s+(?=(?:exactly )?(?:twice|double|thrice|triple|half|three times))", "= "),
    (r"(\d)\s+times(?: as (?:long|large|big) as)?\b", r"\1*"),
    (r"\b(?:twice|double)(?: as (?:long|large|big) as)?\b", " 2*"),
    (r"\b(?:thrice|triple|three times)(?: as (?:long|large|big) as)?\b", " 3*"),
    (r"\bhalf (?:as (?:long|large|big) as|of)?\b", " 1/2*"),
    # "equals"
    (r"\b(?:is|are)\s+equal\s+to\b|\bis\s+the\s+same\s+as\b|\bequals?\s+", "= "),
    (rf"\b(?:is|measures)\s+(?={_START_OF_VALUE})", "= "),
    (r"\bof (?=(?:side|radius|diameter)\b)", "with "),
    (r"\bforms? (?:a )?linear pair\b", "supplementary"),
    (r"\bvertical angles\b", "equal"),
    # Functions of angles, and the centre
    (r"\bsine\b(?: of)?", "sin"),
    (r"\bcosine\b(?: of)?", "cos"),
    (r"\btangent (?:of )?(?=angle\b)", "tan "),
    (r"\bcent(?:re|er)\b", "center"),
    # Words that no fact needs
    (r"\b(?:two|both) (?=(?:chord|tangent|secant|radi|line|segment|parallel)[a-z]*\b)", ""),
    (r",? ?\brespectively\b|\b(?:inside|outside|within) (?:the |a )?circle$", ""),
    (r"\b(?:a|any) point (?=on\b)|\b(?:a )?transversal\b", ""),
    # Names of things and of what they do
    (r"\bmid-?point\b", "midpoint"),
    (r"\bmid-?segment\b|\bmid-?line\b", "midsegment"),
    (r"\bmidpoints\b", "midpoint"),
    (r"\bangles\b", "angle"),
    (r"\b(triangle|quadrilateral|circle|chord|radii|arc)s\b", r"\1"),
    (r"\btouches\b|\btouch\b|\btangents\b", "tangent"),
    (r"\b(?:meets?|cross(?:es)?|intersects?|cuts?)\b", "meet"),
    (r"\bmeet in\b", "meet at"),
    (r"\bright-angled\b|\bright angled\b", "right"),
    (r"\bcircumscribed (?:about|around|to)\b|\bcircumscribes\b", "around"),
    (
        r"\b(?:is|are|the|to|of|its|it|that|be|lies?|segments?|lines?|rays?|points?|drawn)\b",
        " ",
    ),
    (r"\b(?:a|an)\s+(?=[a-z]{3})", " "),
    (rf"\b(?:sides?|diagonals?)\s+(?={_SEGMENT_PATTERN}|{POINT_PATTERN}(?:,|\s+and)\s*)", " "),
    (r"\s+", " "),
)


def plain_sentence(sentence: str) -> str:
    """Return the sentence in the one spelling that the grammar reads."""
    # A point is one capital letter, so a longer word with a capital begins a sentence; "A circle"
    # begins with an article, and "A midpoint of BC" with a point.
    plain = re.sub(r"\b[A-Z][a-z]{2,}", lambda word: word[0].lower(), sentence)
    plain = re.sub(r"^(In|If|An|So)\b", lambda word: word[0].lower(), plain.strip())
    plain = re.sub(
        rf"^A (?=(?:(?:{ADJECTIVE_PATTERN}) )*(?:{SHAPE_PATTERN}|circle|polygon)\b"
        r"|(?:secant|tangent|chord|diameter|radius|line|segment|transversal) [A-Z])",
        "",
        plain,
    )
    for pattern, spelled in _SPELLING_BY_PATTERN:
        plain = re.sub(pattern, spelled, plain)
    return plain.strip()
