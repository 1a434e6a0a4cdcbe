"""Takes the answer out of a reference that is a solution or a sentence: `so B is right. Answer: B`.

The answer is what stands behind the last `Answer:`, `The answer is` or `答案`. A sentence without
such words is no reference answer, since hardly any model would repeat it.
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
    """Return what stands behind the last words that announce an answer.

    None is returned without such words, or where more than an answer follows them.
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
    """Return whether a reference answer is a sentence, which says more than an answer does.

    It is one where an item of its list has over `MAX_WORDS` words, where there is a verb among so
    many words, or where it is two sentences.
    """
    plain = _FORMULA.sub(" ", text)
    words = _WORD.findall(plain)
    pieces = [len(_WORD.findall(piece)) for piece in re.split("[,;，；]", plain)]
    if max(pieces) > MAX_WORDS or (len(words) > MAX_WORDS and _VERB.search(plain)):
        return True
    return bool(_SENTENCE_END.search(plain) or _MANY_CHINESE.search(plain))
