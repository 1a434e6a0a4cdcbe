"""Takes the answer out of a reference that is a solution or a sentence: `so B is right. Answer: B`.

The answer is what stands behind the last `Answer:`, `The answer is` or `答案`. A sentence without
such words is no reference answer, since hardly any model would repeat it.
"""

import re

_ANSWER_PHRASE_PATTERN = re.compile(
    r"(?:\b(?:(?:final|correct|right)\s+)?(?:answer|option|choice)\s*(?:\bis\b|\bare\b|[:：=])"
    r"|答案\s*[是为:：]|故\s*(?:选|答案[是为])|应选|^\s*(?:option|choice)(?=\s*[(（]?[A-H]\b))"
    r"[\s*]*[:：]?[\s*]*(?:(?:option|choice|选项|选)\s*)?",
    re.IGNORECASE,
)
_LONGEST_ANSWER = 80  # characters of an answer behind such words
MAX_WORDS = 4  # of a text that a model may answer with, without --text-answers
_WORD_PATTERN = re.compile(r"[A-Za-z]{2,}")
_FORMULA_PATTERN = re.compile(r"\$[^$]*\$|\\[A-Za-z]+")
_VERB_OR_CONJUNCTION_PATTERN = re.compile(
    r"\b(?:is|are|was|were|has|have|because|since|so|therefore|thus|hence|we|there)\b",
    re.IGNORECASE,
)
_SENTENCE_END_PATTERN = re.compile(r"[A-Za-z)°]{2,}[.!?]\s+\S|。.")
_TWELVE_CHINESE_CHARACTERS_PATTERN = re.compile("[\u4e00-\u9fff]{12,}")


def extract_final_answer(text: str) -> str | None:
    """Return the answer behind the last `Answer:` or `The answer is`; B for `So AB. Answer: B`.

    Returns None without such words, and where more than an answer follows them.
    """
    matches = list(_ANSWER_PHRASE_PATTERN.finditer(text))
    if not matches:
        return None
    answer = text[matches[-1].end() :].strip().strip("*").strip()
    answer = answer.removesuffix("。").removesuffix(".").strip()
    if not answer or "\n" in answer or len(answer) > _LONGEST_ANSWER or is_sentence(answer):
        return None
    return answer


def is_sentence(text: str) -> bool:
    """Return whether a reference answer is a sentence, which says more than an answer does.

    It is one if any of these is true:

    - An item of its list has over `MAX_WORDS` words. `3 cm, 4 cm` has two items.
    - It has over `MAX_WORDS` words, and one of them is a verb or the like: `so AB is 3 cm long`.
    - It is two sentences.
    - It has twelve Chinese characters in a row.
    """
    text_without_formulas = _FORMULA_PATTERN.sub(" ", text)
    word_count = len(_WORD_PATTERN.findall(text_without_formulas))
    items = re.split("[,;，；]", text_without_formulas)
    words_in_longest_item = max(len(_WORD_PATTERN.findall(item)) for item in items)
    has_verb_or_conjunction = _VERB_OR_CONJUNCTION_PATTERN.search(text_without_formulas) is not None
    if words_in_longest_item > MAX_WORDS or (word_count > MAX_WORDS and has_verb_or_conjunction):
        return True
    has_second_sentence = _SENTENCE_END_PATTERN.search(text_without_formulas) is not None
    is_long_chinese = _TWELVE_CHINESE_CHARACTERS_PATTERN.search(text_without_formulas) is not None
    return has_second_sentence or is_long_chinese
