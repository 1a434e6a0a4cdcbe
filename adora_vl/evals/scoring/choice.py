"""Extracts the choice that a response means, by a letter or by the text of a choice.

Rules are tried from the surest sign to the weakest, and the first that finds a choice decides. Each
rule gets a `ChoiceMatcher` and the text of the response, and returns the index of a choice or None.
"""

import re
from collections.abc import Callable, Sequence

from adora_vl.evals.records import Extraction
from adora_vl.evals.scoring.choice_matcher import (
    ChoiceMatcher,
    has_digit_or_pi,
    is_called_wrong,
    normalise_choice_text,
)
from adora_vl.evals.scoring.number import concluding_number
from adora_vl.evals.scoring.response_text import (
    MAX_RESPONSE_CHARS,
    find_answer_in_json,
    is_refusal,
    split_sentences,
    without_markup,
)
from adora_vl.rewards.completion import answer_block, last_boxed

# Words after which a sentence says its answer, such as `the answer to this is`.
_ANSWER_WORDS_PATTERN = re.compile(
    r"(?:\banswers?\b(?: to [^.\n]{0,80}?)?(?: \w+)? (?:is|are|would be|should be|must "
    r"be)\b|\banswer\s*[:：]"
    r"|答案[是为:：]|选)\s*[:：]?",
    re.IGNORECASE,
)
# Words before a letter in brackets that rule it out: `not a square (B)`.
_RULING_OUT_PATTERN = re.compile(
    r"(?:\bnot\b|\brather than\b|\binstead of\b)"
    r"(?:(?!\b(?:so|but|thus|therefore|hence|is|it)\b)[^.,;()（）\n]){0,40}$",
    re.IGNORECASE,
)
# A remark in brackets, which may name choices that are not the answer.
_REMARK_PATTERN = re.compile(r"[(（]\s*(?:note|n\.b\.|remark|注)[^()（）]*[)）]", re.IGNORECASE)
_ORDINAL_WORDS = ("first", "second", "third", "fourth", "fifth", "sixth")
_CHINESE_ORDINALS = "一二三四五六"
_ORDINAL_PATTERN = re.compile(
    rf"\b({'|'.join(_ORDINAL_WORDS)}|last)\s+(?:option|choice|answer|one)\b|第([{_CHINESE_ORDINALS}])(?:个)?选?项",
    re.IGNORECASE,
)
# The longest response that counts as a letter alone (`Option B`), and as a position alone (`The
# third option.`). A longer one may be a sentence.
_MAX_LETTER_ANSWER_CHARS = 39
_MAX_ORDINAL_ANSWER_CHARS = 59
# Words such as `not` within this many characters before a letter in brackets may rule it out.
_RULING_OUT_CHARS = 60
# Clauses and equations, to find the result of a calculation. `x <= 5` and `x != 5` give none.
_CLAUSE_END_PATTERN = re.compile(r"[,;]\s|\b(?:and|or|but)\b", re.IGNORECASE)
_EQUALS_SIGN_PATTERN = re.compile(r"(?<![<>!=])=(?!=)")
# Words that begin the reason of a statement. A reason may name other choices.
_REASON_WORDS_PATTERN = re.compile(r",?\s+(?:since|because|given that)\b", re.IGNORECASE)
# A word of four letters or more. A choice with one is not only a value. A LaTeX command is no word.
_WORD_OF_CHOICE_PATTERN = re.compile(r"(?<![\\a-z])[a-z]{4}")
# Words that begin a conclusion.
_CONCLUSION_WORDS_PATTERN = re.compile(
    r"\b(?:so|therefore|thus|hence|conclusion|consequently|which means|因此|所以)\b", re.IGNORECASE
)
# Words that negate a sentence.
_NEGATION_PATTERN = re.compile(
    r"\b(?:not?|n't|never|cannot|none|neither|nor|isn't|aren't|doesn't|don't)\b|n't\b",
    re.IGNORECASE,
)


def lettered_options(text: str, mark: re.Pattern[str]) -> list[str]:
    """Split a text into its options, in the order of their letters.

    `A: a park, B: a dam` gives `a park` and `a dam`. A text without options gives [].

    Args:
        text: The text that lists the options.
        mark: Matches the mark before each option, such as `A: `, with the letter as its group. The
            marks have to come in the order A, B, C, ...; any other match is part of an option.
    """
    marks: list[re.Match[str]] = []
    for match in mark.finditer(text):
        expected_letter = chr(ord("A") + len(marks))
        if match[1] == expected_letter:
            marks.append(match)
    # An option ends where the next one is marked.
    ends = [match.start() for match in marks[1:]] + [len(text)]
    options = [text[match.end() : end] for match, end in zip(marks, ends, strict=False)]
    return [option.strip().rstrip(",;").strip() for option in options]


def extract_choice(response: str, choices: Sequence[str]) -> Extraction:
    """Extract the letter of the choice that a response means, with the name of the rule.

    For the choices `a park` and `a dam`, `The answer is (B)` gives `B` by the rule `stated_letter`,
    and `the answer is a dam` gives `B` by the rule `stated_text`.

    If no rule finds a choice, the text of the extraction is:

    - empty for a response that states several letters, or that is a refusal
    - else the last number or sentence, under the rule `nearest`. A benchmark may take the choice
      that is nearest to it.

    No response raises an error.

    Args:
        response: The response of the model, without a block of thinking.
        choices: The texts of 1 to 26 choices, empty where only their number is known.
    """
    # If there is an `<answer>` block or a JSON object with an `answer`, only that is read.
    response = (answer_block(response) or response)[-MAX_RESPONSE_CHARS:].strip()
    response = find_answer_in_json(response) or response
    if not response:
        return Extraction("", "empty")
    matcher = ChoiceMatcher(choices)
    text = matcher.without_options(_REMARK_PATTERN.sub(" ", without_markup(response))).strip()
    if not text:
        return Extraction("", "no_answer")
    unmatched_value = _boxed_value_of_no_choice(matcher, response)
    # If the box has a value that is no choice, only the rules that read a statement are tried. The
    # weaker rules would take a choice that the response mentions on its way to the value.
    named_rules = _STATEMENT_RULES if unmatched_value else _ALL_RULES
    for name, find_index in named_rules:
        # A box is looked for before markup is removed.
        index = find_index(matcher, response if name == "box" else text)
        if index is not None:
            return Extraction(matcher.letters[index], name)
    if unmatched_value:
        return Extraction(unmatched_value, "nearest")
    box = without_markup(last_boxed(response) or "")
    if matcher.states_several_letters(text) or matcher.states_several_letters(box):
        return Extraction("", "several_letters")
    if is_refusal(text):
        return Extraction("", "refusal")
    # The text that `nearest` compares with the choices: a number only if the choices are numbers.
    number = None
    choices_are_numbers = all(re.match(r"-?[\d.]", choice) for choice in matcher.normalised_choices)
    if choices_are_numbers:
        number = concluding_number(text)
    last_sentence = (split_sentences(text) or [text])[-1]
    return Extraction(number or last_sentence, "nearest")


def _boxed_value_of_no_choice(matcher: ChoiceMatcher, response: str) -> str:
    r"""Return the value in the last `\boxed{...}` of a response if it is none of the choices.

    A value is a text with a number. Returns an empty text if the value is that of a choice, if the
    box has no value, or if the choices are not all values.
    """
    box = last_boxed(response) or ""
    if not has_digit_or_pi(box):
        return ""
    choices_are_values = all(
        has_digit_or_pi(choice) and not _WORD_OF_CHOICE_PATTERN.search(choice)
        for choice in matcher.normalised_choices
    )
    if not choices_are_values or matcher.index_by_short_text(box) is not None:
        return ""
    return without_markup(box).strip()


def _index_by_whole_text(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice whose text or letter is the whole text; None for any other."""
    index_of_same_text = matcher.index_by_same_text(normalise_choice_text(text))
    if index_of_same_text is not None:
        return index_of_same_text
    if len(text) > _MAX_LETTER_ANSWER_CHARS:
        return None
    letter = matcher.patterns.letter_alone.fullmatch(text)
    return matcher.index_of_letter(letter) if letter else None


def _index_by_last_box(matcher: ChoiceMatcher, response: str) -> int | None:
    """Return the index of the choice that the content of the last box means."""
    box = last_boxed(response)
    return None if box is None else matcher.index_by_short_text(box)


def _index_by_whole_statement(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice whose text is all that is stated as the answer.

    The text of a choice may have several sentences or lines, or begin with a letter as `A -> B`
    does. Returns None if something else is stated, or nothing.
    """
    statements = list(_ANSWER_WORDS_PATTERN.finditer(text))
    if not statements:
        return None
    statement = normalise_choice_text(text[statements[-1].end() :])
    if not statement or statement not in matcher.normalised_choices:
        return None
    return matcher.normalised_choices.index(statement)


def _index_by_stated_letter(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the letter that is stated last as the answer, as in `the answer is (B)`.

    A correction after it, such as `wait, C`, replaces it. In `The answer is A circle` the `A` is
    an article if one of the choices is `circle`, and then that is the choice. Returns None without
    a statement.
    """
    matches = [
        match
        for match in matcher.patterns.stated_letter.finditer(text)
        if not is_called_wrong(text, match) and not matcher.is_in_letter_list(text, match)
    ]
    if not matches:
        return None
    last_match = matches[-1]
    corrected_index = matcher.index_of_last_letter(
        matcher.patterns.correcting_letter, text, last_match.end()
    )
    if corrected_index is not None:
        return corrected_index
    from_letter_on = text[last_match.end() - 1 :]
    index_of_text = matcher.index_after_article(from_letter_on)
    return matcher.index_of_letter(last_match) if index_of_text is None else index_of_text


def _index_by_stated_text(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice whose text or value is stated, as in `the answer is a kite`.

    Sentences are searched from the last to the first. The first one with a statement that names
    exactly one choice decides. Returns None without one.
    """
    for sentence in reversed(split_sentences(text)):
        statements = list(_ANSWER_WORDS_PATTERN.finditer(sentence))
        if not statements:
            continue
        statement = sentence[statements[-1].end() :]
        index_of_equal_value = matcher.index_by_value(statement.strip(" .:"))
        if index_of_equal_value is not None:
            return index_of_equal_value
        # `not a circle but a kite` mentions two choices. Without the denied one, one is left.
        for count_denied in (True, False):
            indices = set(matcher.mentioned_indices(statement, count_denied=count_denied))
            if len(indices) == 1:
                return indices.pop()
    return None


def _index_called_right(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the one choice that a text calls right while it goes through them.

    In `A: no. B: yes. C: no.` it is that of B. Returns None if the text judges fewer than two
    choices, or calls several right.
    """
    is_right_by_index: dict[int, bool] = {}
    for match in matcher.patterns.letter_with_verdict.finditer(text):
        is_right_by_index[matcher.index_of_letter(match)] = match["yes"] is not None
    right_indices = [index for index, is_right in is_right_by_index.items() if is_right]
    if len(is_right_by_index) < 2 or len(right_indices) != 1:
        return None
    return right_indices[0]


def _index_by_concluding_letter(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the last letter that ends a conclusion, as in `therefore it is B`."""
    return matcher.index_of_last_letter(matcher.patterns.concluding_letter, text)


def _index_by_leading_letter(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the letter with which the text begins, as in `B. a dam`."""
    match = matcher.patterns.leading_letter.match(text)
    if match is None or matcher.is_in_letter_list(text, match):
        return None
    return matcher.index_of_letter(match)


def _index_by_bracketed_letter(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the last letter in brackets that is not ruled out.

    In `a triangle (C), not a square (B)` it is that of C.
    """
    indices: list[int] = []
    for match in matcher.patterns.bracketed_letter.finditer(text):
        text_before = text[max(0, match.start() - _RULING_OUT_CHARS) : match.start()]
        is_ruled_out = (
            is_called_wrong(text, match) or _RULING_OUT_PATTERN.search(text_before) is not None
        )
        if not is_ruled_out and not matcher.is_in_letter_list(text, match):
            indices.append(matcher.index_of_letter(match))
    return indices[-1] if indices else None


def _index_by_fitting_letter(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the last letter that is said to fit, as in `B matches`."""
    return matcher.index_of_last_letter(matcher.patterns.fitting_letter, text)


def _index_by_position(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice that a short text names by position: `the third option`.

    Returns None for a text that names several positions, or none.
    """
    ordinals = _ORDINAL_PATTERN.findall(text)
    if len(ordinals) != 1 or len(text) > _MAX_ORDINAL_ANSWER_CHARS:
        return None
    english, chinese = ordinals[0]
    if english.lower() == "last":
        return len(matcher.choices) - 1
    index = _ORDINAL_WORDS.index(english.lower()) if english else _CHINESE_ORDINALS.index(chinese)
    return index if index < len(matcher.choices) else None


def _index_by_named_letter(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the last letter that is named as an option, as in `option B`."""
    return matcher.index_of_last_letter(matcher.patterns.named_letter, text)


def _index_by_yes_or_no(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice `yes` or `no`, where the text begins with that word."""
    match = re.match(r"\W*(yes|no)\b", text, re.IGNORECASE)
    if match is None or match[1].lower() not in matcher.normalised_choices:
        return None
    return matcher.normalised_choices.index(match[1].lower())


def _index_by_mention(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice that the last sentence with exactly one choice mentions.

    Conclusions are searched before all other sentences. Each sentence is searched four times:

    1. as a whole
    2. without the choices that it denies: `not a circle but a kite`
    3. up to the words that begin a reason: `a square, since a circle has no sides`
    4. behind the last equals sign: `180 - 30 - 90 = 60`, but not in `x = 30 or x = 45`
    """
    for sentence in _sentences_conclusions_first(text):
        text_before_reason = _REASON_WORDS_PATTERN.split(sentence, maxsplit=1)[0]
        result_of_equation = _result_of_equation(matcher, sentence)
        searches = (
            (sentence, True),
            (sentence, False),
            (text_before_reason, True),
            (result_of_equation, True),
        )
        for searched_text, count_denied in searches:
            indices = set(matcher.mentioned_indices(searched_text, count_denied=count_denied))
            if len(indices) == 1:
                return indices.pop()
    return None


def _result_of_equation(matcher: ChoiceMatcher, sentence: str) -> str:
    """Return what stands behind the last equals sign of a sentence.

    Returns an empty text for a sentence without an equals sign, and where an earlier clause
    mentions a choice too, as in `x = 30 or x = 45`.
    """
    earlier_clauses = ""
    last_clause = sentence
    clause_ends = list(_CLAUSE_END_PATTERN.finditer(sentence))
    if clause_ends:
        earlier_clauses = sentence[: clause_ends[-1].start()]
        last_clause = sentence[clause_ends[-1].end() :]
    sides = _EQUALS_SIGN_PATTERN.split(last_clause)
    if len(sides) == 1 or matcher.mentioned_indices(earlier_clauses):
        return ""
    return sides[-1]


def _sentences_conclusions_first(text: str) -> list[str]:
    """Return the conclusions of a text, last first, and then all its sentences, last first.

    A conclusion is a sentence with a word such as `therefore`.
    """
    sentences = split_sentences(text)[::-1]
    conclusions = [sentence for sentence in sentences if _CONCLUSION_WORDS_PATTERN.search(sentence)]
    return [*conclusions, *sentences]


def _index_by_all_words(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice all of whose words are in one sentence, in any order.

    Sentences are searched from the last to the first. The first one with all words of exactly one
    choice decides. Only choices of several words are looked for.
    """
    for sentence in reversed(split_sentences(text)):
        words = set(re.findall(r"\w+", sentence.lower()))
        indices: list[int] = []
        for index, choice in enumerate(matcher.normalised_choices):
            words_of_choice = set(re.findall(r"\w+", choice))
            if " " in choice and words_of_choice <= words:
                indices.append(index)
        if len(indices) == 1:
            return indices[0]
    return None


def _index_by_negation(matcher: ChoiceMatcher, text: str) -> int | None:
    """Return the index of the choice `no` for a text with a negation, and `yes` for any other text.

    The last conclusion decides, or the first sentence if there is no conclusion. Returns None if
    the choices are not `yes` and `no`.
    """
    if set(matcher.normalised_choices) != {"yes", "no"} or is_refusal(text):
        return None
    text_sentences = split_sentences(text) or [text]
    conclusions = [
        sentence for sentence in text_sentences if _CONCLUSION_WORDS_PATTERN.search(sentence)
    ]
    decisive_sentence = conclusions[-1] if conclusions else text_sentences[0]
    is_negated = _NEGATION_PATTERN.search(decisive_sentence) is not None
    return matcher.normalised_choices.index("no" if is_negated else "yes")


# The rules with the names that an extraction gives them, the surest first.
_NamedRules = tuple[tuple[str, Callable[[ChoiceMatcher, str], int | None]], ...]
_STATEMENT_RULES: _NamedRules = (
    ("exact", _index_by_whole_text),
    ("box", _index_by_last_box),
    ("stated_text", _index_by_whole_statement),
    ("stated_letter", _index_by_stated_letter),
    ("stated_text", _index_by_stated_text),
)
_ALL_RULES: _NamedRules = (
    *_STATEMENT_RULES,
    ("judged", _index_called_right),
    ("concluded_letter", _index_by_concluding_letter),
    ("leading_letter", _index_by_leading_letter),
    ("letter_in_brackets", _index_by_bracketed_letter),
    ("letter_that_fits", _index_by_fitting_letter),
    ("ordinal", _index_by_position),
    ("named_option", _index_by_named_letter),
    ("yes_no", _index_by_yes_or_no),
    ("mentioned", _index_by_mention),
    ("all_words", _index_by_all_words),
    ("negation", _index_by_negation),
)
