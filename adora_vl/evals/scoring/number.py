"""The number that a response states, and the text helpers of extraction."""

import re
from bisect import bisect_left

from adora_vl.evals.records import Extraction
from adora_vl.rewards.answer import amount_of_money, read_value
from adora_vl.rewards.completion import last_boxed
from adora_vl.rewards.thinking import final_part

MAX_CHARS = 50_000  # of the end of a response
# A model that runs on after its answer writes the next exercise by itself, with the words of the
# prompt. A heading of Markdown, such as `### Final Answer`, is none of them.
_RUNS_ON = re.compile(
    r"\n[^\S\n]*(?:Hint: Please answer|(?:###\s*)?(?:Question|Human|User|Instruction|Input)\b\s*:?\s*"
    r"(?:(?<=:)|(?<=:\s)|(?=\n)|$)|###\s*$)"
)
# A heading that says no more than that the answer follows, and one whose number is that of a step.
_ANSWER_HEADING = re.compile(
    r"\W*(?:(?:final|correct)\s+)?(?:answer|result|答案)\s*[:：]?\W*", re.IGNORECASE
)
_STEP = re.compile(r"^#+\s*(?:step|part)?\s*\d+\s*[:.)]?\s*|^#+\s*", re.IGNORECASE)
# What only explains the number before it.
_EXPLAINS = re.compile(
    r",?\s+(?:since|because|given that|rounded from)\b|,\s*(?:which|where|whereas|while)\b",
    re.IGNORECASE,
)
_IN_BRACKETS = re.compile(r"\([^()]*\)")
_WRAPPERS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|bf|rm|emph|underline)\b\s*(?:\{([^{}]*)\})?"
)
_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|[,;:! ])|\\?\$|\\[()\[\]]|\*+|`+|\^?\{?\\circ\}?|°|~"
)
_END = re.compile(r"(?<=[.!?。！？])\s+|[。！？]|\n+")
_REFUSAL = re.compile(
    r"\b(?:sorry|unfortunately|as an ai|unable to|(?:can(?:no|')t|can not|cannot|could "
    r"not|couldn't) "
    r"(?:be |directly |accurately "
    r"|help|answer|process|provide|determine|see|view|give|find|identif|tell|calculate|do)|"
    r"(?:not|im|n't) (?:possible|provided?|given|clear|enough|specif|sufficient|have "
    r"(?:enough|any|the|access))|"
    r"no (?:information|image|data|way)|need (?:more|further|additional) |(?:provide|without) "
    r"(?:more|further|additional|any|the|me) )",
    re.IGNORECASE,
)


_JSON_ANSWER = re.compile(
    r"[\"'](?:final[ _-]?|correct[ _-]?)?(?:answer|choice|option|result)[\"']\s*:\s*"
    r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^,}\]\s]+)",
    re.IGNORECASE,
)


def json_answer(response: str) -> str | None:
    """Return the answer in a response that is, or ends in, an object of JSON; None in any other."""
    answers = _JSON_ANSWER.findall(response) if "{" in response and "}" in response else []
    return answers[-1].strip("\"'").strip() if answers else None


def own_part(response: str) -> str:
    """Return the response up to where the model starts to ask itself questions.

    It is all of the response if that begins with one.
    """
    cut = _RUNS_ON.search(response)
    if cut and response[: cut.start()].strip():
        return response[: cut.start()]
    return response


def plain(text: str) -> str:
    """Return the text without bold, dollar and degree signs and LaTeX wrappers.

    Signs of minus and fractions become one kind. A run of spaces becomes one space, and one of line
    ends one line end, so that no pattern behind this takes long over them.
    """
    text = re.sub(r" ?\n[ \n]*", "\n", re.sub(r"[^\S\n]+", " ", text))
    text = _WRAPPERS.sub(r"\1", text.replace("’", "'").replace("−", "-").replace("–", "-"))
    return (
        _NOISE.sub("", re.sub(r"\\[dt]frac", r"\\frac", text))
        .replace("\\%", "%")
        .replace("{,}", ",")
    )


def sentences(text: str) -> list[str]:
    """Return the non-empty sentences and lines. A decimal point does not end a sentence."""
    return [part.strip() for part in _END.split(text) if part.strip()]


def refuses(text: str) -> bool:
    """Return whether the text says that there is no answer."""
    return bool(_REFUSAL.search(text.replace("’", "'")))


_NUMBER = re.compile(  # no exponent, as that of `cm^2`
    r"(?<![A-Za-z0-9_.^])(?<!\^\{)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\w))?"
)
_FORMULA = re.compile(r"\\(?:sqrt|pi)(?![A-Za-z])|[√π]")
_SLASH = re.compile(r"(?<![\w./])(\d+)/(\d+)(?![\w/]|\.\d)")
_FRACTION = re.compile(r"(-?)\\frac\s*\{\s*(\d+(?:\.\d+)?)\s*\}\s*\{\s*(\d+(?:\.\d+)?)\s*\}")
_SCIENTIFIC = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+)?) ?(?:\\times|\\cdot|[×x*]) ?10 ?\^ ?\{? ?(-?\d+) ?\}?"
)
_LIST = re.compile(r"\[[^\[\]]*\]")
_SAYS = re.compile(
    r"(?:\b(?:answer|final value|result)\b[^.\n]{0,60}?(?:\bis\b|\bare\b|\bwould "
    r"be\b|[:：=])|答案[是为:：]*)[\s:：]*",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_CONCLUDES = re.compile(r"\b(?:so|therefore|thus|hence|consequently)\b|因此|所以", re.IGNORECASE)
_VERB = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|gives?|get|left "
    r"with|have|has|had|approximately|about|around|total of)\b"
    r"|[=≈]|\\approx|:(?!\d))",
    re.IGNORECASE,
)
_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
_FUNCTION_WORDS = {
    "the",
    "and",
    "are",
    "was",
    "were",
    "has",
    "have",
    "had",
    "how",
    "many",
    "much",
    "what",
    "which",
    "that",
    "this",
    "there",
    "with",
    "from",
    "for",
    "does",
    "did",
    "not",
    "its",
    "can",
    "all",
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)


def extract_number(response: str, question: str = "") -> Extraction:
    """Return the number that a response gives as its answer, and the rule that found it.

    The text is as `float` reads it, and empty where there is no number. Numbers that stand in the
    question too come last. A block of thinking is set aside (`final_part`).
    """
    response = final_part(response)[-MAX_CHARS:].strip()
    response = json_answer(response) or response
    if not response:
        return Extraction("", "empty")
    text = plain(own_part(response)).strip()
    lone_number = _NUMBER.fullmatch(re.sub(r"^\$\s*|\s*%?\s*\.?$", "", text))
    if lone_number:
        return Extraction(lone_number[0].replace(",", ""), "exact")
    box = last_boxed(response)
    if box is not None:
        boxed_value = _value(box)
        if boxed_value:
            return Extraction(boxed_value, "box")
        in_box = _numbers(plain(box))
        if in_box:
            return Extraction(in_box[-1], "box")
    of_question = set(_numbers(plain(question)))
    for rule, part in _candidates(own_part(response), sentences(text), question):
        formula = _value(part.strip(" .:")) if rule == "stated" and _FORMULA.search(part) else ""
        value = formula or _from_sentence(part, of_question)
        if value:
            return Extraction(value, rule)
    if refuses(text):
        return Extraction("", "refusal")
    for part in reversed(sentences(text)):
        value = _from_sentence(part, of_question)
        if value:
            return Extraction(value, "last_sentence")
    return Extraction("", "no_number")


def _value(box: str) -> str:
    r"""Return the number in a box by the grammar and units of the rewards, as `float` reads it.

    It is `8.660254037844386` for `5\sqrt{3}`, 15 for `15 \text{ cm}^2`, and empty where the box has
    no number.
    """
    answer = amount_of_money(read_value(box))
    if answer.real is None or not answer.real.real:
        return ""
    if _NUMBER.fullmatch(answer.text):
        return answer.text
    value = answer.real.value
    if answer.real.exact and value.denominator == 1:
        return str(int(value))
    return repr(float(value))


def concluding_number(text: str) -> str | None:
    """Return the number of the sentence that concludes, else of the last one that has a number."""
    parts = sentences(text)
    concluding = [part for part in parts if _CONCLUDES.search(part)]
    for part in [*reversed(concluding), *reversed(parts)]:
        number = _from_sentence(part, set())
        if number:
            return number
    return None


def _candidates(marked_up: str, plain_sentences: list[str], question: str) -> list[tuple[str, str]]:
    """Return the parts of a response where the answer should stand, each behind its rule's name.

    The surest comes first.

    Args:
        marked_up: The response with its markup.
        plain_sentences: Its sentences without markup.
        question: The text of the question.
    """
    candidates: list[tuple[str, str]] = []
    stated = _stated(plain_sentences)
    if stated:
        candidates.append(("stated", stated[-1]))
    if plain_sentences and _NUMBER.fullmatch(plain_sentences[0].rstrip(".")):
        candidates.append(("first_line", plain_sentences[0]))
    bold = [span for span in _BOLD.findall(marked_up) if len(_numbers(plain(span))) == 1]
    # Bold numbers count only where all are the same.
    if bold and len({_numbers(plain(span))[0] for span in bold}) == 1:
        candidates.append(("bold", plain(bold[0])))
    concluding = [
        sentence
        for sentence in plain_sentences
        if _CONCLUDES.search(sentence) and not refuses(sentence)
    ]
    if concluding:
        candidates.append(("conclusion", concluding[-1]))
    restated = _restating(plain_sentences, question)
    if restated:
        candidates.append(("restated", restated))
    return candidates


def _stated(plain_sentences: list[str]) -> list[str]:
    """Return what stands behind words such as `the answer is`, or behind a heading.

    It is the rest of the sentence, or the next sentence where nothing follows.
    """
    stated = []
    for number, sentence in enumerate(plain_sentences):
        next_sentence = "".join(plain_sentences[number + 1 : number + 2])
        for match in [*_SAYS.finditer(sentence), *_heading(sentence)]:
            rest = sentence[match.end() :]
            stated.append(rest if rest.strip() else next_sentence)
    return stated


def _restating(parts: list[str], question: str) -> str | None:
    """Return the first of the sentences that repeat the most words of what is asked.

    None where that is less than half of the words, or the sentence is a refusal.
    """
    question_words = _content_words((sentences(question) or [""])[-1])
    shares = [len(question_words & _content_words(part)) for part in parts]
    best = max(shares, default=0)
    if not best or best * 2 < len(question_words):
        return None
    part = parts[shares.index(best)]
    return None if refuses(part) else part


def _content_words(text: str) -> set[str]:
    """Return the words of a text that carry its meaning, in lower case."""
    return {word for word in re.findall(r"[a-z]{3,}", text.lower()) if word not in _FUNCTION_WORDS}


def _from_sentence(sentence: str, of_question: set[str]) -> str | None:
    """Return the number that a sentence gives: the first after its last verb or `=`, else the last.

    Numbers of the question, `of_question`, count only where there is no other, and words only where
    there are no other digits.
    """
    sentence = _without_explanation(_evaluated(_STEP.sub("", sentence)))
    # (position, number) of each number in digits
    in_digits = [(match.start(), match[0].replace(",", "")) for match in _NUMBER.finditer(sentence)]
    numbers = [(position, number) for position, number in in_digits if number not in of_question]
    if not numbers:
        in_words = []
        for match in _WORD.finditer(sentence):
            in_words.append((match.start(), str(_WORDS.index(match[1].lower()))))
        numbers = in_words or in_digits
    positions = [position for position, _ in numbers]
    for verb in reversed(list(_VERB.finditer(sentence))):
        following = bisect_left(positions, verb.end())
        if following < len(numbers):
            return numbers[following][1]
    return numbers[-1][1] if numbers else None


def _heading(part: str) -> list[re.Match[str]]:
    """Return the match of a line that is no more than the heading of the answer behind it."""
    match = _ANSWER_HEADING.fullmatch(part)
    return [match] if match else []


def _without_explanation(sentence: str) -> str:
    """Return a sentence without what explains its number, such as `which is a third of 180`.

    It is the whole sentence where no number would be left.
    """
    head = _EXPLAINS.split(sentence, maxsplit=1)[0]
    for shorter in (_IN_BRACKETS.sub(" ", head), head, _IN_BRACKETS.sub(" ", sentence)):
        if _NUMBER.search(shorter):
            return shorter
    return sentence


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text in order; a number word counts only where there is no digit."""
    digits = [match[0].replace(",", "") for match in _NUMBER.finditer(_evaluated(text))]
    return digits or [str(_WORDS.index(match[1].lower())) for match in _WORD.finditer(text)]


def _evaluated(text: str) -> str:
    r"""Return the text with `\frac{3}{4}` as 0.75 and `2 \times 10^{3}` as 2e3."""

    def quotient(match: re.Match[str]) -> str:
        r"""Return a `\frac` as a decimal; of one with the denominator 0 only the sign stays."""
        return f" {match[1]}{float(match[2]) / float(match[3]) if float(match[3]) else ''} "

    def slashed(match: re.Match[str]) -> str:
        """Return a `3/4` as a decimal, and as it stands where its denominator is 0."""
        return str(int(match[1]) / int(match[2])) if int(match[2]) else match[0]

    text = _SLASH.sub(slashed, _FRACTION.sub(quotient, text))
    return _SCIENTIFIC.sub(r"\1e\2", text)


def extract_list(response: str) -> Extraction:
    """Return the last bracketed list of a response, spaced as Python prints one.

    A block of thinking is set aside.
    """
    response = final_part(response)[-MAX_CHARS:]
    from_json = json_answer(response) or ""
    lists = _lists(last_boxed(response) or "") or _lists(from_json) or _lists(own_part(response))
    if not lists:
        return Extraction("", "no_list")
    return Extraction(
        "[" + ", ".join(part.strip() for part in lists[-1][1:-1].split(",")) + "]", "list"
    )


def _lists(text: str) -> list[str]:
    """Return all lists with a digit in them, such as `[1, 2]`, as they stand in the text."""
    return [listed for listed in _LIST.findall(plain(text)) if re.search(r"\d", listed)]
