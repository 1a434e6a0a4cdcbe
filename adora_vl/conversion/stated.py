"""Reference answers as solutions and sentences give them: `so B is right. Answer: B`.

What stands behind the last `Answer:`, `The answer is` or `答案` is the answer. A sentence that has no
such words is none that a model could meet.
"""

import re

_STATED = re.compile(
    r"(?:\b(?:(?:final|correct|right)\s+)?(?:answer|option|choice)\s*(?:\bis\b|\bare\b|[:：=])"
    r"|答案\s*[是为:：]|故\s*(?:选|答案[是为])|应选|^\s*(?:option|choice)(?=\s*[(（]?[A-H]\b))"
    r"[\s*]*[:：]?[\s*]*(?:(?:option|choice|选项|选)\s*)?",
    re.IGNORECASE,
)
_LONGEST_STATED = 80  # characters of an answer behind such words
MAX_WORDS = 4  # of a text that a model may answer with, without --text-answers
_WORD = re.compile(r"[A-Za-z]{2,}")
_FORMULA = re.compile(r"\$[^$]*\$|\\[A-Za-z]+")
_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|because|since|so|therefore|thus|hence|we|there)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[A-Za-z)°]{2,}[.!?]\s+\S|。.")
_MANY_CHINESE = re.compile("[\u4e00-\u9fff]{12,}")


def stated_answer(text: str) -> str | None:
    """What stands behind the last words that announce an answer; None without such words, or where
    more than an answer follows.
    """
    matches = list(_STATED.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].strip().strip("*").strip()
    rest = rest.removesuffix("。").removesuffix(".").strip()
    if not rest or "\n" in rest or len(rest) > _LONGEST_STATED or is_sentence(rest):
        return None
    return rest


def is_sentence(text: str) -> bool:
    """Whether a reference answer says more than an answer does: over `MAX_WORDS` words in a piece
    of a list, a verb among as many, or two sentences.
    """
    plain = _FORMULA.sub(" ", text)
    words = _WORD.findall(plain)
    pieces = [len(_WORD.findall(piece)) for piece in re.split("[,;，；]", plain)]
    if max(pieces) > MAX_WORDS or (len(words) > MAX_WORDS and _VERB.search(plain)):
        return True
    return bool(_SENTENCE_END.search(plain) or _MANY_CHINESE.search(plain))
