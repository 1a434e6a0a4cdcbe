"""The forms in which a response may name one of the choices of a question.

A choice is named by its letter, by its text, or by a value that equals it. The rules of `choice.py`
say in which order these are tried.
"""

import re
from collections.abc import Sequence

from adora_vl.data.prompts import without_letters
from adora_vl.evals.scoring.letter_patterns import letter_patterns
from adora_vl.evals.scoring.response_text import without_markup
from adora_vl.rewards import grade

# Words before or after a letter that call it wrong. ` | ` stands in the place of the letter.
_CALLED_WRONG_PATTERN = re.compile(
    r"\b(?:incorrect|wrong|false|other|neither|nor)\s+(?:option\s+|choice\s+)?[(（]?\|"
    r"| \| *[)）\]]?[^.,;()（）]{0,12}\b(?:is|are|was)(?:n't| not|) *(?:also "
    r")?(?:incorrect|wrong|false|not)\b",
    re.IGNORECASE,
)
# A text that ends in words such as `not` or `rather than the` denies the choice after it.
_DENIAL_PATTERN = re.compile(
    r"(?:\bnot|\bneither|\bnor|n['’]t(?: be)?|\brather than|\binstead of)\s+(?:(?:an?|the)\s+)?$"
)
# Words after a letter that only suppose it to be right: `answer B would be right if ...`.
_SUPPOSITION_PATTERN = re.compile(r"[)）\]]?\s*(?:would|could|might)\b", re.IGNORECASE)
# An article before a word: `a + b` and `a b` begin with an unknown.
_ARTICLE_PATTERN = re.compile(r"^(?:an?|the) (?=[a-z]{2})")
# A text with more characters is a sentence and no value. Comparing values takes long.
_MAX_VALUE_CHARS = 100
# How many characters before or after a letter (or a choice) are searched for a list that it is
# part of, for a denial, and for words that call it wrong. The bounds keep the search fast.
_LIST_AFTER_CHARS = 60
_LIST_BEFORE_CHARS = 30
_DENIAL_CHARS = 20
_WRONG_BEFORE_CHARS = 15
_WRONG_AFTER_CHARS = 40
# What every match of `LetterPatterns.beginning_of_list` ends with. It is tried first, since that
# pattern is slow.
_END_OF_LIST_PATTERN = re.compile(
    r"(?:(?:\bor|\band|[/,，、;；&+或和与及])\s*(?:(?:option|choice)\s+)?[(（]?|[)）]\s*[(（])$",
    re.IGNORECASE,
)


class ChoiceMatcher:
    """Finds the choices of one question in a text, by letter, by text or by value.

    Methods return the index of a choice, from 0 on; None stands for no choice. `patterns` find the
    letters of the choices in a text, and `normalised_choices` are the texts in one spelling.
    """

    def __init__(self, choices: Sequence[str]) -> None:
        """Take the texts of the choices, whose letters go from A on."""
        self.choices = without_letters(choices)
        self.letters = "".join(chr(ord("A") + i) for i in range(len(self.choices)))
        # The texts of the choices in one spelling, for which responses are searched. It is empty
        # for a choice that is itself a letter, because a lone `B` always means option B.
        self.normalised_choices: list[str] = []
        for choice in self.choices:
            text = normalise_choice_text(choice)
            is_letter = len(text) == 1 and text.upper() in self.letters
            self.normalised_choices.append("" if is_letter else text)
        self._choices_without_article = [
            _ARTICLE_PATTERN.sub("", choice) for choice in self.normalised_choices
        ]
        self.patterns = letter_patterns(self.letters[-1])
        # The list of all options, which a response may repeat from its question.
        self._repeated_options_pattern = _build_options_pattern(self.choices, self.letters)

    def index_of_letter(self, match: re.Match[str]) -> int:
        """Return the index of the choice whose letter a pattern has matched.

        The letter is in the first group that has matched.
        """
        letter = next(group for group in match.groups() if group)
        return self.letters.index(letter.upper())

    def index_of_last_letter(
        self, pattern: re.Pattern[str], text: str, start: int = 0
    ) -> int | None:
        """Return the index of the last letter that a pattern of letters matches after `start`.

        A letter that the text calls wrong does not count, nor does one of several, as in `A or C`.
        Returns None if no letter counts.
        """
        indices = [
            self.index_of_letter(match)
            for match in pattern.finditer(text, start)
            if not is_called_wrong(text, match) and not self.is_in_letter_list(text, match)
        ]
        return indices[-1] if indices else None

    def is_in_letter_list(self, text: str, match: re.Match[str]) -> bool:
        """Return whether a letter stands in a list of letters, as in `A or C` and `(A) (B) (C)`.

        `match` is a match of one of `self.patterns` in `text`, with the letter as a group.
        """
        # Each spelling of a letter has its own group in the pattern, and only one of them is set.
        group_number = next(number for number, group in enumerate(match.groups(), 1) if group)
        start, end = match.span(group_number)
        if self.patterns.rest_of_list.match(text, end, end + _LIST_AFTER_CHARS) is not None:
            return True
        text_before = text[max(0, start - _LIST_BEFORE_CHARS) : start]
        if _END_OF_LIST_PATTERN.search(text_before) is None:
            return False
        return self.patterns.beginning_of_list.search(text_before) is not None

    def states_several_letters(self, text: str) -> bool:
        """Return whether a text begins with several letters, or states several as its answer."""
        matches = [
            self.patterns.leading_letter.match(text),
            self.patterns.bracketed_letter.match(text),
            *self.patterns.stated_letter.finditer(text),
        ]
        return any(match is not None and self.is_in_letter_list(text, match) for match in matches)

    def without_options(self, text: str) -> str:
        """Remove the list of all options, if the text repeats it as the question shows it."""
        if self._repeated_options_pattern is None:
            return text
        return self._repeated_options_pattern.sub(" ", text)

    def index_by_short_text(self, text: str) -> int | None:
        """Return the index of the choice that a short text, such as the content of a box, means.

        The steps in the order of the code:

        1. The text is the text of a choice.
        2. The text is a letter, or begins or ends with one.
        3. The value of the text equals the value of one choice.
        4. The text mentions a choice.
        5. The number of the text, without a unit, is the number of one choice.

        Returns None if a step finds several choices, or if no step finds any.
        """
        plain_text = without_markup(text)
        normalised_text = normalise_choice_text(plain_text)
        index_of_same_text = self.index_by_same_text(normalised_text)
        if index_of_same_text is not None:
            return index_of_same_text
        letter_match = self._match_letter_of_short_text(plain_text)
        if letter_match:
            is_one_of_several = self.is_in_letter_list(plain_text, letter_match)
            return None if is_one_of_several else self.index_of_letter(letter_match)
        index_of_equal_value = self.index_by_value(text)
        if index_of_equal_value is not None:
            return index_of_equal_value
        mentioned_indices = self.mentioned_indices(text)
        if mentioned_indices:
            return mentioned_indices[0] if len(set(mentioned_indices)) == 1 else None
        number = _without_unit(normalised_text)
        if not number:
            return None
        indices = [
            index
            for index, choice in enumerate(self.normalised_choices)
            if _without_unit(choice) == number
        ]
        return indices[0] if len(indices) == 1 else None

    def index_by_same_text(self, normalised_text: str) -> int | None:
        """Return the index of the first choice with this text, with or without an article.

        `kite` and `the kite` are the choice `a kite`. Returns None if no choice has this text.
        """
        if not normalised_text:
            return None
        if normalised_text in self.normalised_choices:
            return self.normalised_choices.index(normalised_text)
        bare_text = _ARTICLE_PATTERN.sub("", normalised_text)
        if bare_text not in self._choices_without_article:
            return None
        return self._choices_without_article.index(bare_text)

    def _match_letter_of_short_text(self, text: str) -> re.Match[str] | None:
        """Match the letter of a choice in a short text: alone, in front, or at the end in brackets.

        For example, it finds B in `option B`, in `B. a dam` and in `a dam (B)`. Returns None for
        any other text.
        """
        letters = self.letters
        lone_letter = re.fullmatch(
            rf"\W*(?:option|choice)?\W*([{letters}{letters.lower()}])\W*", text
        )
        if lone_letter:
            return lone_letter
        return self.patterns.leading_letter.match(text) or re.search(
            rf"(?<!\w)[(（]([{letters}])[)）]\W*$", text
        )

    def index_by_value(self, text: str) -> int | None:
        r"""Return the index of the only choice whose value equals that of a short text.

        The grader of the training compares the values: `0.5` is the choice `\frac{1}{2}` or `1:2`.
        Returns None if no choice, or several choices, have the value.
        """
        if len(text) > _MAX_VALUE_CHARS or not has_digit_or_pi(text):
            return None
        # The grader knows a ratio as a fraction.
        boxed_text = rf"\boxed{{{text.replace(':', '/')}}}"
        indices = []
        for index, choice in enumerate(self.choices):
            # It is empty for a choice that is a letter, and so no value.
            if not self.normalised_choices[index]:
                continue
            result = grade(boxed_text, choice.replace(":", "/"))
            if result.verdict == "correct":
                indices.append(index)
        return indices[0] if len(indices) == 1 else None

    def index_after_article(self, text: str) -> int | None:
        """Return the index of the choice with whose text `text` begins, where `A` is an article.

        In `A circle is right` it is the choice `circle` or `a circle`. If several choices fit, the
        longest is meant: `circle` also fits `A circle sector`.
        """
        if not text.startswith("A "):
            return None
        first_line = normalise_choice_text(text.split("\n")[0], keep_end=True)
        indices = [
            index
            for index, choice in enumerate(self.normalised_choices)
            if choice and re.match(rf"(?:a )?{re.escape(choice)}(?!\w)", first_line)
        ]
        return max(indices, key=lambda index: len(self.normalised_choices[index]), default=None)

    def mentioned_indices(self, text: str, *, count_denied: bool = True) -> list[int]:
        """Return the indices of the choices whose text is in `text`, in the order of the mentions.

        For the choices `a circle`, `a square` and `a circle sector`, `not a circle but a square`
        gives 0 and 1, or only 1 without the denied choices. `a circle sector` gives only 2, since
        the circle is a part of the longer choice. A choice is returned once for each mention.

        A choice is denied only by a word right before it, or before its article: `not circle` and
        `not a circle` deny `circle`, and `not a large circle` does not.

        Args:
            text: The text to search.
            count_denied: Whether a choice after a word such as `not` counts.
        """
        text = normalise_choice_text(without_markup(text), keep_end=True)
        mentions: list[tuple[int, int]] = []  # the position of each, and the index of its choice
        # A longer choice is taken out of the text before a shorter one is looked for.
        longest_first = sorted(
            range(len(self.normalised_choices)),
            key=lambda index: -len(self.normalised_choices[index]),
        )
        for index in longest_first:
            choice = self.normalised_choices[index]
            is_same_as_earlier = choice in self.normalised_choices[:index]
            if not choice or is_same_as_earlier:
                continue
            pattern = rf"(?<![\w.\\^/]){re.escape(choice)}(?![\w^/]|\.\d|\\)"
            for match in re.finditer(pattern, text):
                start = match.start()
                text_before = text[max(0, start - _DENIAL_CHARS) : start]
                is_denied = _DENIAL_PATTERN.search(text_before) is not None
                if count_denied or not is_denied:
                    mentions.append((start, index))
            # The mentions are overwritten with as many null characters, so positions stay the same.
            text = re.sub(pattern, "\0" * len(choice), text)
        return [index for _, index in sorted(mentions)]


def is_called_wrong(text: str, match: re.Match[str]) -> bool:
    """Return whether the text calls a letter wrong, or only supposes it to be right.

    It is called wrong in `the incorrect answer is A` and `option (D) is incorrect`, and only
    supposed in `B would be right if ...`.
    """
    text_before = text[max(0, match.start() - _WRONG_BEFORE_CHARS) : match.start()]
    text_after = text[match.end() : match.end() + _WRONG_AFTER_CHARS]
    if _SUPPOSITION_PATTERN.match(text_after):
        return True
    rest_of_line = text_after.split("\n")[0]
    # The mark stands in the place of the letter, so that one pattern sees both sides of it.
    return _CALLED_WRONG_PATTERN.search(f"{text_before} | {rest_of_line}") is not None


def _build_options_pattern(choices: Sequence[str], letters: str) -> re.Pattern[str] | None:
    """Build the pattern of the list of all options with their letters, as a question shows them.

    It matches `A. a park B. a dam`, for example. Returns None if there is only one option, or if an
    option has no text.
    """
    if len(choices) < 2 or not all(choice.strip() for choice in choices):
        return None
    options: list[str] = []
    for letter, choice in zip(letters, choices, strict=True):
        words = [re.escape(word) for word in without_markup(choice).split()]
        option_text = r"\s*".join(words)
        options.append(rf"[(（]?{letter}[)）]?\s*[.:：、)]?\s*{option_text}")
    return re.compile(r"(?<![A-Za-z0-9])" + r"[\s,;.，；。]*".join(options))


def normalise_choice_text(text: str, *, keep_end: bool = False) -> str:
    """Write a text in one spelling, by which choices are compared.

    Case, repeated spaces, thousands separators, `.0`, degree words and markup do not count:
    `**5.0** degrees` becomes `5`.

    Args:
        text: A choice, or a text that may mention one.
        keep_end: Whether to keep full stops at the end, as a text of several sentences needs them.
    """
    text = without_markup(text).lower().replace("\\sqrt", "√").replace("\\pi", "π")
    text = re.sub(r" *([{}]) *", r"\1", text)  # `{ 3 }`
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)  # `\frac{1}{2}`
    text = re.sub(r"√\{(\w+)\}", r"√\1", text)  # `√{3}`
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # `1,000`
    text = re.sub(r"(?<=\d)\.0+(?!\d)", "", text)  # `5.0`
    text = re.sub(r"(?<=\d)\s*degrees?\b", "", text)  # `40 degrees`
    text = re.sub(r"\s+", " ", text).strip()
    return text if keep_end else text.rstrip(" .。")


def has_digit_or_pi(text: str) -> bool:
    """Return whether a text has a digit or a π, so that it may be a value such as `5 cm`."""
    return re.search(r"\d|\\pi|π", text) is not None


def _without_unit(normalised_text: str) -> str:
    """Strip a normalised text to its number, without a name before it and a unit after it.

    `x= 5 cm` gives `5`. A text without a digit gives "".
    """
    number = re.sub(r"^[a-z∠ ]+= *", "", normalised_text)  # `x= `
    number = re.sub(r"(?<=[\d)}π]) *[a-z%]+[23²³]?$", "", number)  # ` cm2`
    return number if re.search(r"\d", number) else ""
