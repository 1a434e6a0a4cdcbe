"""Words by which a model takes a step back, counted in what it writes."""

from __future__ import annotations

import re

# ADORA's authors watch such words grow more frequent (arXiv 2602.10019); the list is ours, and fixed, so that two runs
# can be compared. Behind each word is what counts as it, beside an ending such as `-ing`.
REFLECTIVE = {
    "wait": "wait",
    "verify": "verify",
    "check": "(?<!-)(?<!double )check",  # not the end of `re-check` and `double-check`, which count as themselves
    "recheck": "re-?check",
    "double-check": "double[- ]?check",
    "reconsider": "reconsider",
    "rethink": "rethink",
    "alternatively": "alternatively",
    "however": "however",
    "mistake": "mistake",
    "let me see": "let me see",
    "hold on": "hold on",
}
_PATTERNS = {
    word: re.compile(rf"(?<!\w){counts_as}(?:s|ed|ing)?(?!\w)", re.IGNORECASE) for word, counts_as in REFLECTIVE.items()
}


def reflective_words(text: str) -> dict[str, int]:
    """How often each of the words occurs, without those that do not."""
    counts = {word: len(pattern.findall(text)) for word, pattern in _PATTERNS.items()}
    return {word: count for word, count in counts.items() if count}
