"""Extracts the number, or the list of numbers, that a response gives as its answer."""

import re
from bisect import bisect_left
from typing import NamedTuple

from adora_vl.evals.records import Extraction
from adora_vl.evals.scoring.response_text import (
    MAX_RESPONSE_CHARS,
    cut_before_next_question,
    find_answer_in_json,
    is_refusal,
    split_sentences,
    without_labels,
    without_markup,
)
from adora_vl.rewards.answer import parse_value, without_currency
from adora_vl.rewards.completion import last_boxed
from adora_vl.rewards.numerals import DIGITS_BY_NUMBER_WORD

# A heading that says no more than that the answer follows.
_ANSWER_HEADING_PATTERN = re.compile(
    r"\W*(?:(?:final|correct)\s+)?(?:answer|result|答案)\s*[:：]?\W*", re.IGNORECASE
)
# The beginning of a heading such as `### Step 2:`, whose number is that of the step.
_STEP_HEADING_PATTERN = re.compile(r"^#+\s*(?:step|part)?\s*\d+\s*[:.)]?\s*|^#+\s*", re.IGNORECASE)
# Words that begin an explanation of the number before them.
_EXPLANATION_WORDS_PATTERN = re.compile(
    r",?\s+(?:since|because|given that|rounded from)\b|,\s*(?:which|where|whereas|while)\b",
    re.IGNORECASE,
)
_BRACKETS_PATTERN = re.compile(r"\([^()]*\)")
# A number that stands alone: not the 2 of `cm^2`, nor the 1 of `x_1` or `A1`.
_NUMBER_PATTERN = re.compile(
    r"(?<![A-Za-z0-9_.^])(?<!\^\{)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\w))?"
)
_FORMULA_SIGN_PATTERN = re.compile(r"\\(?:sqrt|pi)(?![A-Za-z])|[√π]")
_SLASH_FRACTION_PATTERN = re.compile(r"(?<![\w./])(\d+)/(\d+)(?![\w/]|\.\d)")
_LATEX_FRACTION_PATTERN = re.compile(
    r"(-?)\\frac\s*\{\s*(\d+(?:\.\d+)?)\s*\}\s*\{\s*(\d+(?:\.\d+)?)\s*\}"
)
_POWER_OF_TEN_PATTERN = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+)?) ?(?:\\times|\\cdot|[×x*]) ?10 ?\^ ?\{? ?(-?\d+) ?\}?"
)
_BRACKETED_LIST_PATTERN = re.compile(r"\[[^\[\]]*\]")
# Words after which a sentence says its answer.
_ANSWER_WORDS_PATTERN = re.compile(
    r"(?:\b(?:answer|final value|result)\b[^.\n]{0,60}?(?:\bis\b|\bare\b|\bwould "
    r"be\b|[:：=])|答案[是为:：]*)[\s:：]*",
    re.IGNORECASE,
)
_BOLD_PATTERN = re.compile(r"\*\*([^*\n]+)\*\*")
# Words that begin a conclusion.
_CONCLUSION_WORDS_PATTERN = re.compile(
    r"\b(?:so|therefore|thus|hence|consequently)\b|因此|所以", re.IGNORECASE
)
# Verbs and signs after which a sentence gives its number.
_VERB_PATTERN = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|gives?|get|left "
    r"with|have|has|had|approximately|about|around|total of)\b"
    r"|[=≈]|\\approx|:(?!\d))",
    re.IGNORECASE,
)
# The words of the numbers from zero to twenty.
_NUMBER_WORDS = [word for word, digits in DIGITS_BY_NUMBER_WORD.items() if int(digits) <= 20]
# Words that do not tell what a question is about.
_FUNCTION_WORDS = {
    *("the", "and", "with", "from", "for", "not", "its", "can", "all", "how", "many", "much"),
    *("what", "which", "that", "this", "there"),
    *("are", "was", "were", "has", "have", "had", "does", "did"),
}
_NUMBER_WORD_PATTERN = re.compile(rf"\b({'|'.join(_NUMBER_WORDS)})\b", re.IGNORECASE)


class _NumberMatch(NamedTuple):
    """A number in a sentence."""

    position: int
    """The index of its first character in the sentence."""
    text: str
    """The number in digits, as `float` reads it."""


class _CandidatePart(NamedTuple):
    """A part of a response that probably has its answer."""

    rule: str
    """The name of the rule that chose the part."""
    text: str
    """The part, without markup."""


def extract_number(response: str, question: str = "") -> Extraction:
    r"""Extract the number that a response gives as its answer, with the name of the rule.

    The text is a number as `float` reads it, and empty if there is none. The rules are tried in
    this order:

    1. `exact`: the whole response is a number.
    2. `box`: the last box has a number. `\boxed{5\sqrt{3}}` gives 8.66...
    3. The rules of `_find_candidate_parts`: `The answer is 5` gives 5 by the rule `stated`.
    4. `refusal`: the response says that there is no answer.
    5. `last_sentence`: the last sentence with a number.

    Args:
        response: The response of the model, without a block of thinking.
        question: The question. Its numbers count only if a sentence has no other number.
    """
    response = response[-MAX_RESPONSE_CHARS:].strip()
    response = find_answer_in_json(response) or response
    if not response:
        return Extraction("", "empty")
    answer_part = without_labels(cut_before_next_question(response))
    text = without_markup(answer_part).strip()
    text_without_units = re.sub(r"^\$\s*|\s*%?\s*\.?$", "", text)
    lone_number = _NUMBER_PATTERN.fullmatch(text_without_units)
    if lone_number:
        return Extraction(_without_commas(lone_number), "exact")
    boxed_number = _find_number_in_last_box(response)
    if boxed_number:
        return Extraction(boxed_number, "box")
    question_numbers = set(_find_numbers(without_markup(question)))
    sentences = split_sentences(text)
    for rule, part in _find_candidate_parts(answer_part, sentences, question):
        number: str | None = None
        # A stated formula such as `5\sqrt{3}` has a value. Its single numbers say little.
        if rule == "stated" and _FORMULA_SIGN_PATTERN.search(part):
            number = _evaluate_as_number(part.strip(" .:"))
        number = number or _find_answer_number(part, question_numbers)
        if number:
            return Extraction(number, rule)
    if is_refusal(text):
        return Extraction("", "refusal")
    for sentence in reversed(sentences):
        number = _find_answer_number(sentence, question_numbers)
        if number:
            return Extraction(number, "last_sentence")
    return Extraction("", "no_number")


def _find_number_in_last_box(response: str) -> str:
    r"""Return the value of the last `\boxed{...}` of a response, or else the last number in it.

    It is empty if there is no box, or no number in it.
    """
    box = last_boxed(response)
    if box is None:
        return ""
    value = _evaluate_as_number(box)
    if value:
        return value
    numbers = _find_numbers(without_markup(box))
    return numbers[-1] if numbers else ""


def _without_commas(match: re.Match[str]) -> str:
    """Return a number that `_NUMBER_PATTERN` has matched without its thousands separators."""
    return match[0].replace(",", "")


def _evaluate_as_number(text: str) -> str:
    r"""Evaluate an answer as the rewards of a training do, to a number that `float` can read.

    `5\sqrt{3}` gives `8.660254037844387`, and `15 \text{ cm}^2` gives `15`. An answer without a
    real value gives an empty text.
    """
    answer = without_currency(parse_value(text))
    if answer.number is None or not answer.number.is_real:
        return ""
    if _NUMBER_PATTERN.fullmatch(answer.text):
        return answer.text
    value = answer.number.value
    if answer.number.is_exact and value.denominator == 1:
        return str(int(value))
    return repr(float(value))


def concluding_number(text: str) -> str | None:
    """Return the number of the last conclusion, or else of the last sentence that has a number.

    A conclusion is a sentence with a word such as `therefore`. Returns None without a number.
    """
    sentences = split_sentences(text)[::-1]
    conclusions = [sentence for sentence in sentences if _CONCLUSION_WORDS_PATTERN.search(sentence)]
    for sentence in [*conclusions, *sentences]:
        number = _find_answer_number(sentence, question_numbers=set())
        if number:
            return number
    return None


def _find_candidate_parts(
    response: str, sentences: list[str], question: str
) -> list[_CandidatePart]:
    """Choose the parts of a response that probably have its answer, the surest first.

    Each of these rules adds a part, if it finds one:

    1. `stated`: the last statement such as `the answer is ...`
    2. `first_line`: the first sentence, if it is a number
    3. `bold`: a bold text with one number, if all such texts have the same number
    4. `conclusion`: the last sentence with a word such as `therefore`
    5. `restated`: the sentence that repeats the words of the question

    Args:
        response: The response with its markup, since one rule needs bold text.
        sentences: Its sentences without markup.
        question: The text of the question.
    """
    candidates: list[_CandidatePart] = []
    statements = _find_statements(sentences)
    if statements:
        candidates.append(_CandidatePart("stated", statements[-1]))
    if sentences and _NUMBER_PATTERN.fullmatch(sentences[0].rstrip(".")):
        candidates.append(_CandidatePart("first_line", sentences[0]))
    bold_texts = [without_markup(bold) for bold in _BOLD_PATTERN.findall(response)]
    numbers_of_bold_texts = [_find_numbers(bold_text) for bold_text in bold_texts]
    bold_numbers = [numbers for numbers in numbers_of_bold_texts if len(numbers) == 1]
    # Bold numbers count only if all are the same.
    if bold_numbers and all(numbers == bold_numbers[0] for numbers in bold_numbers):
        first_index = numbers_of_bold_texts.index(bold_numbers[0])
        candidates.append(_CandidatePart("bold", bold_texts[first_index]))
    conclusions = [
        sentence
        for sentence in sentences
        if _CONCLUSION_WORDS_PATTERN.search(sentence) and not is_refusal(sentence)
    ]
    if conclusions:
        candidates.append(_CandidatePart("conclusion", conclusions[-1]))
    restatement = _find_restatement(sentences, question)
    if restatement:
        candidates.append(_CandidatePart("restated", restatement))
    return candidates


def _find_statements(sentences: list[str]) -> list[str]:
    """Return the texts after words such as `the answer is`, and after a heading `Answer`.

    A text is the rest of the sentence, or the next sentence if the rest is empty: the sentences
    `The answer is 5`, `Answer` and `6 cm` give `5` and `6 cm`.
    """
    statements: list[str] = []
    for index, sentence in enumerate(sentences):
        is_last = index == len(sentences) - 1
        next_sentence = "" if is_last else sentences[index + 1]
        for match in _ANSWER_WORDS_PATTERN.finditer(sentence):
            rest_of_sentence = sentence[match.end() :]
            statements.append(rest_of_sentence if rest_of_sentence.strip() else next_sentence)
        if _ANSWER_HEADING_PATTERN.fullmatch(sentence):
            statements.append(next_sentence)
    return statements


def _find_restatement(sentences: list[str], question: str) -> str | None:
    """Return the sentence that repeats the most words of the question, the first of several.

    For the question `What is the total volume?` it is `The total volume is 5`. Only the last
    sentence of the question counts. Returns None if no sentence repeats at least half of its words,
    or if the sentence is a refusal.
    """
    last_sentence_of_question = (split_sentences(question) or [""])[-1]
    question_words = _content_words(last_sentence_of_question)
    repeated_counts = [len(question_words & _content_words(sentence)) for sentence in sentences]
    most_repeated = max(repeated_counts, default=0)
    if not most_repeated or 2 * most_repeated < len(question_words):
        return None
    sentence = sentences[repeated_counts.index(most_repeated)]
    return None if is_refusal(sentence) else sentence


def _content_words(text: str) -> set[str]:
    """Return the words of a text in lower case, without words such as `the` and `what`."""
    words = re.findall(r"[a-z]{3,}", text.lower())
    return set(words) - _FUNCTION_WORDS


def _find_answer_number(sentence: str, question_numbers: set[str]) -> str | None:
    """Return the number that a sentence gives as an answer, None if it has no number.

    Which numbers count:

    - numbers in digits that are not in the question
    - if there are none, number words such as `three`
    - if there are none either, the numbers of the question

    Among these it is the first one after the last verb or `=` with a number after it: 7 in
    `So 3 + 4 = 7 cm`. If no verb has a number after it, it is the last number.
    """
    sentence = _write_as_decimals(_STEP_HEADING_PATTERN.sub("", sentence))
    sentence = _without_explanation(sentence)
    in_digits = [
        _NumberMatch(match.start(), _without_commas(match))
        for match in _NUMBER_PATTERN.finditer(sentence)
    ]
    numbers = [number for number in in_digits if number.text not in question_numbers]
    if not numbers:
        numbers = _find_number_words(sentence) or in_digits
    positions = [number.position for number in numbers]
    for verb in reversed(list(_VERB_PATTERN.finditer(sentence))):
        index_after_verb = bisect_left(positions, verb.end())
        if index_after_verb < len(numbers):
            return numbers[index_after_verb].text
    return numbers[-1].text if numbers else None


def _find_number_words(text: str) -> list[_NumberMatch]:
    """Return the numbers that a text has as words, such as `three`, in digits."""
    numbers: list[_NumberMatch] = []
    for match in _NUMBER_WORD_PATTERN.finditer(text):
        digits = DIGITS_BY_NUMBER_WORD[match[1].lower()]
        numbers.append(_NumberMatch(match.start(), digits))
    return numbers


def _without_explanation(sentence: str) -> str:
    """Remove the explanation of a sentence's number, and words in brackets.

    Both may have other numbers: `x is 60, which is a third of 180` becomes `x is 60`. If no number
    would be left, only one of both is removed, or else the whole sentence is returned.
    """
    before_explanation = _EXPLANATION_WORDS_PATTERN.split(sentence, maxsplit=1)[0]
    for shorter_sentence in (
        _BRACKETS_PATTERN.sub(" ", before_explanation),
        before_explanation,
        _BRACKETS_PATTERN.sub(" ", sentence),
    ):
        if _NUMBER_PATTERN.search(shorter_sentence):
            return shorter_sentence
    return sentence


def _find_numbers(text: str) -> list[str]:
    """Return the numbers of a text in order; number words count only where there are no digits."""
    in_digits = [
        _without_commas(match) for match in _NUMBER_PATTERN.finditer(_write_as_decimals(text))
    ]
    return in_digits or [number.text for number in _find_number_words(text)]


def _write_as_decimals(text: str) -> str:
    r"""Write the fractions and powers of ten of a text as decimals.

    `\frac{3}{4}` and `3/4` become `0.75`, and `2 \times 10^{3}` becomes `2e3`.
    """

    def divide_latex_fraction(match: re.Match[str]) -> str:
        r"""Return a `\frac` as a decimal; if the denominator is 0, only the sign is left."""
        sign = match[1]
        numerator = float(match[2])
        denominator = float(match[3])
        decimal = numerator / denominator if denominator else ""
        return f" {sign}{decimal} "

    def divide_slash_fraction(match: re.Match[str]) -> str:
        """Return `3/4` as a decimal, and a quotient with the denominator 0 as it is."""
        numerator = int(match[1])
        denominator = int(match[2])
        return str(numerator / denominator) if denominator else match[0]

    text = _LATEX_FRACTION_PATTERN.sub(divide_latex_fraction, text)
    text = _SLASH_FRACTION_PATTERN.sub(divide_slash_fraction, text)
    return _POWER_OF_TEN_PATTERN.sub(r"\1e\2", text)


def extract_list(response: str) -> Extraction:
    """Extract the last list in brackets of a response, with the spaces that Python prints.

    `so [1,2] then [3, 4]` gives `[3, 4]`. The last box is searched first, then the answer in JSON,
    then the whole response.
    """
    response = response[-MAX_RESPONSE_CHARS:]
    lists = (
        _find_lists(last_boxed(response) or "")
        or _find_lists(find_answer_in_json(response) or "")
        or _find_lists(cut_before_next_question(response))
    )
    if not lists:
        return Extraction("", "no_list")
    items = [item.strip() for item in lists[-1][1:-1].split(",")]
    return Extraction(f"[{', '.join(items)}]", "list")


def _find_lists(text: str) -> list[str]:
    """Return all lists with a digit in them, such as `[1, 2]`, as they stand in the text."""
    lists = _BRACKETED_LIST_PATTERN.findall(without_markup(text))
    return [list_text for list_text in lists if re.search(r"\d", list_text)]
