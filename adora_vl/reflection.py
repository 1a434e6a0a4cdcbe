"""Words by which a model takes a step back, counted in what it writes."""

from __future__ import annotations

import re

# ADORA's authors watch such words grow more frequent (arXiv 2602.10019); the list is ours, and fixed, so that two runs
# can be compared.
REFLECTIVE = (
    "wait",
    "verify",
    "check",
    "recheck",
    "double-check",
    "reconsider",
    "rethink",
    "alternatively",
    "however",
    "mistake",
    "let me see",
    "hold on",
)
PATTERNS = {
    word: re.compile(rf"(?<!\w){re.escape(word).replace(chr(92) + '-', '[- ]?')}(?:s|ed|ing)?(?!\w)", re.IGNORECASE)
    for word in REFLECTIVE
}
PATTERNS["recheck"] = re.compile(r"(?<!\w)re-?check(?:s|ed|ing)?(?!\w)", re.IGNORECASE)
# Not the end of `re-check` and `double-check`, which count as themselves.
PATTERNS["check"] = re.compile(r"(?<![\w-])(?<!double )check(?:s|ed|ing)?(?!\w)", re.IGNORECASE)


def reflective_words(text: str) -> dict[str, int]:
    """How often each of the words occurs, without those that do not."""
    counts = {word: len(pattern.findall(text)) for word, pattern in PATTERNS.items()}
    return {word: count for word, count in counts.items() if count}
