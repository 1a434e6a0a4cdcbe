"""The patterns by which a response names a choice by its letter, for any number of choices."""

import re
from functools import cache
from typing import NamedTuple

# Words that say that the next letter is the answer. `option B` alone does not say so, since it may
# be called wrong.
_ANSWER_WORDS_REGEX = (
    r"(?:\b(?:answers?|(?:correct|right|best|selected|chosen) (?:option|choice)(?: letter)?|letter)"
    r"(?: to (?:the|this) (?:question|problem))?(?: \w+)? (?:is|are|would be|should be|must be)\b"
    r"|\b(?:answer|(?:correct|right|best|selected|chosen) (?:option|choice)(?: letter)?)\s*(?=[:：=(（–—-]|[A-Z]\b)"
    r"|\bfinal(?: (?:answer|choice|option))?\s*(?=[:：=])"
    r"|\b(?:choose|select|pick|opt for|settle on|go(?:ing)? with)\b"
    r"|\bit (?:must|should|has to) be\b"
    r"|\b(?:respuesta|r[ée]ponse|antwort|resposta|risposta|ответ)\b(?: correct[ae])?(?: "
    r"(?:es|est|ist|é|è)\b)?"
    r"|答案|选项|故选|应选|选择|选|答えは)"
    r"\s*[:：=为是–—-]*\s*(?:(?:option|choice|letter|the|therefore|thus|most likely)\b\s*)*[:：]?\s*"
    r"(?:not\s+[(（]?[A-Z][)）]?,?\s+but\s+(?:rather\s+)?)?"
)
# Words after which a letter is the answer if it ends its clause: `therefore I think it is B`,
# `Therefore: B`.
_CONCLUSION_WORDS_REGEX = (
    r"(?:\b(?:it|that|this|one|option|choice)(?: is|['’]s)\b|\bmust be\b|\bleav(?:es|ing)\b"
    r"|\b(?:so|therefore|thus|hence|conclusion|finally)\b\s*[,:：]?|因此|所以)"
    r"\s*[:：]?\s*(?:(?:option|choice|letter)\s+)?"
)
_CORRECTION_WORDS_REGEX = r"\b(?:wait|actually|correction|i mean|sorry|no)\b[\s,:：–—-]*"
# Words and signs that join two letters to a list, so that neither is the answer: `A or C`, `(A)
# (B)`, `A, B`.
_OR_REGEX = r"\s*(?:/|,?\s*\b(?:or|and/or)\b|或)\s*"
_AND_REGEX = (
    r"\s*(?:[,，、;；&+]|,?\s*\band\b|和|与|及|(?<=[)）])(?=\s*[(（]))\s*(?:\b(?:and|or)\b\s*)?"
)
# The end of a list of letters that is given as the answer, unlike the end of `A and B are wrong`.
_LIST_END_REGEX = (
    r"\s*(?:[.。!?)）}\]\"']|\n|$|\b(?:are|is) (?:all |both )?(?:correct|right|true|possible))"
)
_RIGHT_WORDS_REGEX = r"(?:yes|correct|right|true|✓|✔|✅|√|正确)"
_WRONG_WORDS_REGEX = r"(?:no|incorrect|wrong|false|not (?:correct|right|true)|✗|✘|❌|×|错误)"


class LetterPatterns(NamedTuple):
    """The patterns of a letter that names a choice, each with an example of what it matches.

    Most have several groups for the letter, one for each way to write it, such as `(B)` and `B.`
    In a match one of these groups is set.
    """

    stated_letter: re.Pattern[str]
    """`The answer is (B)`."""
    concluding_letter: re.Pattern[str]
    """`Therefore it is B.`"""
    correcting_letter: re.Pattern[str]
    """`Wait, B.`"""
    letter_alone: re.Pattern[str]
    """`Option B` as a whole text."""
    leading_letter: re.Pattern[str]
    """`B. a dam` at the beginning of a text."""
    bracketed_letter: re.Pattern[str]
    """`(B)` anywhere."""
    named_letter: re.Pattern[str]
    """`Option B` anywhere."""
    fitting_letter: re.Pattern[str]
    """`B matches` and `B is correct`."""
    letter_with_verdict: re.Pattern[str]
    """`A: no` and `B is true`, with the group `yes` where the letter is called right."""
    rest_of_list: re.Pattern[str]
    """The rest of a list after a letter: ` or C` in `A or C`."""
    beginning_of_list: re.Pattern[str]
    """The beginning of a list before a letter: `A or ` in `A or C`."""


@cache
def letter_patterns(last_letter: str) -> LetterPatterns:
    """Build the patterns for the letters from A to `last_letter`."""
    capital = f"[A-{last_letter}]"
    any_case = f"[A-{last_letter}a-{last_letter.lower()}]"
    bracketed = rf"[(（\[]\s*({any_case})\s*[)）\]]"
    # In brackets, and at the end of the text, a letter may have any case. Elsewhere it is a capital
    # that begins no word.
    letter = rf"(?:{bracketed}|({capital})(?![A-Za-z0-9_'’])|({any_case})(?=[.!]?\s*$))"
    clause_end = (
        r"(?=\s*(?:[.,:;)!）、。，：で]|\n|$)|\s+(?:is (?:the "
        r")?(?:correct|right|answer)|because|since)\b)"
    )
    # Here a lone capital needs the end of its clause after it: in `A circle` it is an article.
    letter_at_end = rf"(?:{bracketed}|({capital}){clause_end})"
    listed_letter = rf"(?:(?i:option|choice|answer)\s+)?[(（]?{capital}(?![A-Za-z0-9_'’])[)）]?"
    return LetterPatterns(
        stated_letter=re.compile(rf"(?i:{_ANSWER_WORDS_REGEX})[\"'“‘]?{letter}"),
        concluding_letter=re.compile(f"(?i:{_CONCLUSION_WORDS_REGEX}){letter_at_end}"),
        correcting_letter=re.compile(f"(?i:{_CORRECTION_WORDS_REGEX}){letter_at_end}"),
        letter_alone=re.compile(
            rf"\W*(?:(?:ans(?:wer)?|opt(?:ion)?|choice|letter)\b)?\W*({any_case})\W*",
            re.IGNORECASE,
        ),
        leading_letter=re.compile(rf"\W*(?:{bracketed}|({capital})\s*(?:[.,:：;)）、。]|\n|$))"),
        bracketed_letter=re.compile(rf"[(（]\s*({any_case})\s*[)）]"),
        named_letter=re.compile(rf"\b(?i:option|choice)\s+[\"'(]?({capital})\b"),
        fitting_letter=re.compile(
            rf"(?<![A-Za-z0-9_])(?<!(?i:point|angle) )(?<!(?i:line) )[(（]?({capital})[)）]?\s+"
            r"(?:(?:fits|works|matches|satisfies|holds)(?! (?:no|none|neither|nothing)\b)"
            r"|(?:is|must be)(?: the)? (?:correct|right|answer|best|only one)\b)"
        ),
        letter_with_verdict=re.compile(
            rf"(?:^|[\s.;,])(?:(?i:option|choice)\s+)?[(（]?({capital})[)）]?\s*(?:[:.)）、–—-]|is\b)"
            rf"[^.;\n]{{0,60}}?(?:^|[\s:,–—-])(?:(?P<yes>{_RIGHT_WORDS_REGEX})|({_WRONG_WORDS_REGEX}))(?![A-Za-z])",
            re.IGNORECASE,
        ),
        rest_of_list=re.compile(
            rf"[)）]?(?:(?:{_AND_REGEX}{listed_letter})*{_OR_REGEX}{listed_letter}|(?:{_AND_REGEX}{listed_letter})+{_LIST_END_REGEX})"
        ),
        beginning_of_list=re.compile(
            rf"(?<![A-Za-z0-9_]){listed_letter}(?:{_OR_REGEX}|{_AND_REGEX})(?:(?i:option|choice)\s+)?[(（]?$"
        ),
    )
