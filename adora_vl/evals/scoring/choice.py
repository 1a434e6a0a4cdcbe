"""The choice that a response means, by a letter or by the text of a choice.

Rules are tried from the surest sign to the weakest, and the first that finds a choice decides.
"""

import re
from collections.abc import Callable, Sequence

from adora_vl.data.prompts import without_letters
from adora_vl.evals.records import Extraction
from adora_vl.evals.scoring.number import (
    MAX_CHARS,
    concluding_number,
    json_answer,
    plain,
    refuses,
    sentences,
)
from adora_vl.rewards import grade
from adora_vl.rewards.completion import answer_block, last_boxed
from adora_vl.rewards.thinking import final_part

# Words that say that the next letter is the answer. `option B` alone does not: it may be called
# wrong.
_STATED = (
    r"(?:\b(?:answers?|(?:correct|right|best) (?:option|choice)(?: letter)?|letter)"
    r"(?: to (?:the|this) (?:question|problem))?(?: \w+)? (?:is|are|would be|should be|must be)\b"
    r"|\b(?:answer|(?:correct|right|best) (?:option|choice)(?: letter)?)\s*(?=[:：=(（–—-]|[A-Z]\b)"
    r"|\bfinal(?: (?:answer|choice|option))?\s*(?=[:：=])"
    r"|\b(?:choose|select|pick|opt for|settle on|go(?:ing)? with)\b"
    r"|\bit (?:must|should|has to) be\b"
    r"|\b(?:respuesta|r[ée]ponse|antwort|resposta|risposta|ответ)\b(?: correct[ae])?(?: "
    r"(?:es|est|ist|é|è)\b)?"
    r"|答案|选项|故选|应选|选择|选|答えは)"
    r"\s*[:：=为是–—-]*\s*(?:(?:option|choice|letter|the|therefore|thus|most likely)\b\s*)*[:：]?\s*"
    r"(?:not\s+[(（]?[A-Z][)）]?,?\s+but\s+(?:rather\s+)?)?"
)
_SAYS_ANSWER = re.compile(
    r"(?:\banswers?\b(?: to [^.\n]{0,80}?)?(?: \w+)? (?:is|are|would be|should be|must "
    r"be)\b|\banswer\s*[:：]"
    r"|答案[是为:：]|选)\s*[:：]?",
    re.IGNORECASE,
)
# What calls a letter wrong, before or behind its place, for which ` | ` stands.
_WRONG = re.compile(
    r"\b(?:incorrect|wrong|false|other)\s+\|"
    r"| \| *[)）\]]?[^.,;()（）]{0,12}\b(?:is|are|was)(?:n't| not|) *(?:also "
    r")?(?:incorrect|wrong|false|not)\b",
    re.IGNORECASE,
)
# Words behind which a letter is the answer, where it ends its clause: `therefore I think it is B`,
# `Therefore: B`.
_CONCLUDED = (
    r"(?:\b(?:it|that|this|one|option|choice)(?: is|['’]s)\b|\bmust be\b|\bleaves\b"
    r"|\b(?:so|therefore|thus|hence|conclusion|finally)\b\s*[,:：]?|因此|所以)"
    r"\s*[:：]?\s*(?:(?:option|choice|letter)\s+)?"
)
_CORRECTED = r"\b(?:wait|actually|correction|i mean|sorry|no)\b[\s,:：–—-]*"
_DENIED = re.compile(r"(?:\bnot|\bneither|\bnor|n['’]t(?: be)?|\brather than|\binstead of)\s+$")
# A letter behind such words is ruled out: `not a square (B)`.
_RULED_OUT = re.compile(
    r"(?:\bnot\b|\brather than\b|\binstead of\b)"
    r"(?:(?!\b(?:so|but|thus|therefore|hence|is|it)\b)[^.,;()（）\n]){0,40}$",
    re.IGNORECASE,
)
# A letter before such words is the answer of another problem: `answer B would be right if ...`.
_SUPPOSED = re.compile(r"[)）\]]?\s*(?:would|could|might)\b", re.IGNORECASE)
_ASIDE = re.compile(r"[(（]\s*(?:note|n\.b\.|remark|注)[^()（）]*[)）]", re.IGNORECASE)
# What joins a letter to the next one, so that neither is the answer: `A or C`, `(A) (B)`, `A, B`.
_OR = r"\s*(?:/|,?\s*\b(?:or|and/or)\b|或)\s*"
_AND = r"\s*(?:[,，、;；&+]|,?\s*\band\b|和|与|及|(?<=[)）])(?=\s*[(（]))\s*(?:\b(?:and|or)\b\s*)?"
# What ends a list of letters, and not `A and B are wrong`.
_LIST_ENDS = (
    r"\s*(?:[.。!?)）}\]\"']|\n|$|\b(?:are|is) (?:all |both )?(?:correct|right|true|possible))"
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_ORDINAL = re.compile(
    rf"\b({'|'.join(_ORDINALS)}|last)\s+(?:option|choice|answer|one)\b|第([一二三四五六])(?:个)?选?项",
    re.IGNORECASE,
)
_LONGEST_ORDINAL = 60  # characters of a response that says no more than `The third option.`
_REASON = re.compile(r",?\s+(?:since|because|given that)\b", re.IGNORECASE)
_YES = r"(?:yes|correct|right|true|✓|✔|✅|√|正确)"
_NOT_SO = r"(?:no|incorrect|wrong|false|not (?:correct|right|true)|✗|✘|❌|×|错误)"
_LONGEST_VALUE = 100  # characters
_WORD = re.compile(r"(?<![\\a-z])[a-z]{4}")
_CONCLUDES = re.compile(
    r"\b(?:so|therefore|thus|hence|conclusion|consequently|which means|因此|所以)\b", re.IGNORECASE
)
_NO = re.compile(
    r"\b(?:not?|n't|never|cannot|none|neither|nor|isn't|aren't|doesn't|don't)\b|n't\b",
    re.IGNORECASE,
)


def lettered_options(text: str, mark: re.Pattern[str]) -> list[str]:
    """Return the options in a text such as `A: a park, B: a dam`, in the order of their letters.

    The list is empty where the text has none. `mark` matches what stands before an option, with its
    letter as a group. Only letters that follow one another from A count, so that an `A: ` inside an
    option does no harm.
    """
    spots: list[re.Match[str]] = []
    for match in mark.finditer(text):
        if match[1] == chr(ord("A") + len(spots)):
            spots.append(match)
    ends = [match.start() for match in spots[1:]] + [len(text)]
    return [
        text[match.end() : end].strip().rstrip(",;").strip()
        for match, end in zip(spots, ends, strict=False)
    ]


# A quick look, before the longer pattern `joined_before` is tried.
_OR_BEFORE = re.compile(
    r"(?:(?:\bor|\band|[/,，、;；&+或和与及])\s*(?:(?:option|choice)\s+)?[(（]?|[)）]\s*[(（])$",
    re.IGNORECASE,
)


class _Reader:
    """The choices of one item in the forms in which a response may name them."""

    def __init__(self, choices: Sequence[str]) -> None:
        """Build the patterns for these choices, whose letters go from A on."""
        self.choices = choices = without_letters(choices)
        self.letters = "".join(chr(ord("A") + i) for i in range(len(choices)))
        # A choice that is itself a letter of the options has no text to go by: a lone `B` is option
        # B.
        keys = [_key(choice) for choice in choices]
        self.keys = ["" if len(key) == 1 and key.upper() in self.letters else key for key in keys]
        last = self.letters[-1]
        capital = f"[A-{last}]"
        either = f"[A-{last}a-{last.lower()}]"
        # A lone capital needs an end behind it, or it is the article in `A circle`; in brackets any
        # case will do.
        self.letter = (
            rf"(?:[(（\[]\s*({either})\s*[)）\]]|({capital})(?=\s*(?:[.,:;)）、。，：で]|\n"
            rf"|$))|({capital})(?![A-Za-z0-9_'’])"
            rf"|({either})(?=[.!]?\s*$))"
        )
        self.stated = re.compile(rf"(?i:{_STATED})[\"'“‘]?{self.letter}")
        ends = (
            r"(?=\s*(?:[.,:;!)）、。，：で]|\n|$)|\s+(?:is (?:the "
            r")?(?:correct|right|answer)|because|since)\b)"
        )
        at_end = rf"(?:[(（\[]\s*({either})\s*[)）\]]|({capital}){ends})"
        self.concluded = re.compile(f"(?i:{_CONCLUDED}){at_end}")
        self.corrected = re.compile(f"(?i:{_CORRECTED}){at_end}")
        self.short = re.compile(
            rf"\W*(?:(?:ans(?:wer)?|opt(?:ion)?|choice|letter)\b)?\W*({either})\W*", re.IGNORECASE
        )
        self.leading = re.compile(
            rf"\W*(?:[(（\[]\s*({either})\s*[)）\]]|({capital})\s*(?:[.,:：;)）、。]|\n|$))"
        )
        self.in_brackets = re.compile(rf"[(（]\s*({either})\s*[)）]")
        self.named = re.compile(rf"\b(?i:option|choice)\s+[\"'(]?({capital})\b")
        named = rf"(?:(?i:option|choice|answer)\s+)?[(（]?{capital}(?![A-Za-z0-9_'’])[)）]?"
        self.joined_behind = re.compile(
            rf"[)）]?(?:(?:{_AND}{named})*{_OR}{named}|(?:{_AND}{named})+{_LIST_ENDS})"
        )
        self.joined_before = re.compile(
            rf"(?<![A-Za-z0-9_]){named}(?:{_OR}|{_AND})(?:(?i:option|choice)\s+)?[(（]?$"
        )
        self.fits = re.compile(
            rf"(?<![A-Za-z0-9_])[(（]?({capital})[)）]?\s+(?:fits|works|matches|(?:is|must be)"
            r"(?: the)? (?:correct|right|answer|best|only one)\b)"
        )
        self.judged = re.compile(
            rf"(?:^|[\s.;,])(?:(?i:option|choice)\s+)?[(（]?({capital})[)）]?\s*(?:[:.)）、–—-]|is\b)"
            rf"[^.;\n]{{0,60}}?(?:^|[\s:,–—-])(?:({_YES})|({_NOT_SO}))(?![A-Za-z])",
            re.IGNORECASE,
        )
        self.repeated = _options_as_they_stand(choices, self.letters)

    def index(self, match: re.Match[str]) -> int:
        """Return the choice whose letter a pattern has matched, in whichever of its groups."""
        letter = next(group for group in match.groups() if group)
        return self.letters.index(letter.upper())

    def last(self, pattern: re.Pattern[str], text: str, start: int = 0) -> int | None:
        """Return the choice of the last letter behind `start` that a pattern finds.

        Letters that the text calls wrong, and letters that are one of several, do not count.
        """
        indices = [
            self.index(match)
            for match in pattern.finditer(text, start)
            if not _dismissed(text, match) and not self.joined(text, match)
        ]
        return indices[-1] if indices else None

    def joined(self, text: str, match: re.Match[str]) -> bool:
        """Return whether a letter is one of several, as in `A or C` and `(A) (B) (C) (D)`."""
        # Each way to write a letter has a group of its own.
        group = next(number for number, letter in enumerate(match.groups(), 1) if letter)
        start, end = match.span(group)
        if self.joined_behind.match(text, end, end + 60) is not None:
            return True
        text_before = text[max(0, start - 30) : start]
        if _OR_BEFORE.search(text_before) is None:
            return False
        return self.joined_before.search(text_before) is not None

    def several(self, text: str) -> bool:
        """Return whether a text states several letters as its answer, or begins with them."""
        openings = [self.leading.match(text), self.in_brackets.match(text)]
        return any(
            match is not None and self.joined(text, match)
            for match in (*openings, *self.stated.finditer(text))
        )

    def without_options(self, text: str) -> str:
        """Return a text without the options, where it repeats all of them with their letters."""
        return self.repeated.sub(" ", text) if self.repeated else text

    def resolve(self, text: str) -> int | None:
        """Return the choice that a short text, such as a box, means.

        It is found by the choice's text, by a letter, by its value, or because the text mentions
        it; None where nothing or more than one choice is found.
        """
        key = _key(plain(text))
        if key and key in self.keys:
            return self.keys.index(key)
        stripped = plain(text)
        letters = self.letters
        letter = re.fullmatch(
            rf"\W*(?:option|choice)?\W*([{letters}{letters.lower()}])\W*", stripped
        )
        letter = (
            letter
            or self.leading.match(stripped)
            or re.search(rf"(?<!\w)[(（]([{letters}])[)）]\W*$", stripped)
        )
        if letter and self.joined(stripped, letter):
            return None
        if letter:
            return self.index(letter)
        equal = self.equal(text)
        if equal is not None:
            return equal
        mentioned = self.mentioned(text)
        if mentioned:
            return mentioned[0] if len(set(mentioned)) == 1 else None
        bare = _without_unit(key)
        same = [i for i, choice in enumerate(self.keys) if bare and _without_unit(choice) == bare]
        return same[0] if len(same) == 1 else None

    def equal(self, text: str) -> int | None:
        r"""Return the only choice with the value of a short text.

        `2\pi` has the value of `2 \pi`, and `0.5` that of `\frac{1}{2}` and `1:2`.
        """
        if len(text) > _LONGEST_VALUE or not _has_value(text):
            return None
        boxed = rf"\boxed{{{text.replace(':', '/')}}}"
        worded = [
            (index, choice.replace(":", "/"))
            for index, choice in enumerate(self.choices)
            if self.keys[index]
        ]
        indices = [index for index, choice in worded if grade(boxed, choice).verdict == "correct"]
        return indices[0] if len(indices) == 1 else None

    def described(self, text: str) -> int | None:
        """Return the choice with which a text begins whose first word `A` is an article.

        The choice may have the article too. Where several fit, the longest is meant.
        """
        if not text.startswith("A "):
            return None
        text = _key(text.split("\n")[0], keep_end=True)
        matching = [
            i
            for i, key in enumerate(self.keys)
            if key and re.match(rf"(?:a )?{re.escape(key)}(?!\w)", text)
        ]
        return max(matching, key=lambda index: len(self.keys[index]), default=None)

    def mentioned(self, text: str, *, denied: bool = True) -> list[int]:
        """Return the choices whose text stands in `text`, in order, as often as they do.

        A choice within a longer one does not count. `denied`: also count a choice that is denied, as
        the circle in `not a circle but a kite`.
        """
        text = _key(plain(text), keep_end=True)
        mentions: list[tuple[int, int]] = []  # (position, number of the choice)
        # A longer choice is taken out of the text before a shorter one is looked for.
        longest_first = sorted(range(len(self.keys)), key=lambda index: -len(self.keys[index]))
        for index in longest_first:
            key = self.keys[index]
            if not key or key in self.keys[:index]:
                continue  # it is empty, or the same as an earlier choice
            pattern = rf"(?<![\w.\\^/]){re.escape(key)}(?![\w^/]|\.\d|\\)"
            for match in re.finditer(pattern, text):
                start = match.start()
                if denied or not _DENIED.search(text[max(0, start - 20) : start]):
                    mentions.append((start, index))
            text = re.sub(pattern, "\0" * len(key), text)
        return [index for _, index in sorted(mentions)]


def _options_as_they_stand(choices: Sequence[str], letters: str) -> re.Pattern[str] | None:
    """Return all options with their letters, in a row, as the problem shows them."""
    if len(choices) < 2 or not all(map(str.strip, choices)):
        return None
    rows = []
    for letter, choice in zip(letters, choices, strict=True):
        text = r"\s*".join(map(re.escape, plain(choice).split()))
        rows.append(rf"[(（]?{letter}[)）]?\s*[.:：、)]?\s*{text}")
    return re.compile(r"(?<![A-Za-z0-9])" + r"[\s,;.，；。]*".join(rows))


def _key(text: str, *, keep_end: bool = False) -> str:
    """Return a choice's text in one spelling, by which texts are compared.

    Case, spaces, thousands separators, `.0`, degree words and decorations do not count. `keep_end`:
    keep full stops at the end.
    """
    text = plain(text).lower().replace("\\sqrt", "√").replace("\\pi", "π")
    text = re.sub(r" *([{}]) *", r"\1", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"√\{(\w+)\}", r"√\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\d)\.0+(?!\d)", "", text)
    text = re.sub(r"(?<=\d)\s*degrees?\b", "", text)
    text = re.sub(r"\s+", " ", text).strip()
    return text if keep_end else text.rstrip(" .。")


def _has_value(text: str) -> bool:
    """Return whether a text has a digit or a π, so that it may be a value."""
    return re.search(r"\d|\\pi|π", text) is not None


def _without_unit(key: str) -> str:
    """Return a value's key without a unit behind it or a name before it.

    It is empty where the value has no digit.
    """
    bare = re.sub(r"^[a-z∠ ]+= *", "", key)
    bare = re.sub(r"(?<=[\d)}π]) *[a-z%]+[23²³]?$", "", bare)
    return bare if re.search(r"\d", bare) else ""


def extract_choice(response: str, choices: Sequence[str]) -> Extraction:
    """Return the letter of the choice that a response means, and the rule that found it.

    Where it means none, the text is its last number or sentence, for rules that take the nearest
    choice, or it is empty for a refusal or several letters. A block of thinking is set aside
    (`final_part`). Whatever the response is, nothing is raised. `choices` has 1 to 26 texts.
    """
    response = final_part(response)
    response = (answer_block(response) or response)[-MAX_CHARS:].strip()
    response = json_answer(response) or response
    if not response:
        return Extraction("", "empty")
    reader = _Reader(choices)
    text = reader.without_options(_ASIDE.sub(" ", plain(response))).strip()
    if not text:
        return Extraction("", "no_answer")
    # The value in a box where all choices are values and none is this one.
    box = last_boxed(response) or ""
    valued = _has_value(box) and all(
        _has_value(key) and not _WORD.search(key) for key in reader.keys
    )
    unlisted = plain(box).strip() if valued and reader.resolve(box) is None else ""
    rules = _STATED_RULES if unlisted else _RULES
    for name, rule in rules:
        index = rule(reader, response if name == "box" else text)
        if index is not None:
            return Extraction(reader.letters[index], name)
    if unlisted:
        return Extraction(unlisted, "nearest")
    if reader.several(text) or reader.several(plain(box)):
        return Extraction("", "several_letters")
    if refuses(text):
        return Extraction("", "refusal")
    value = None
    if all(re.match(r"-?[\d.]", key) for key in reader.keys):
        value = concluding_number(text)
    return Extraction(value or (sentences(text) or [text])[-1], "nearest")


def _exact(reader: _Reader, text: str) -> int | None:
    """Return the choice that the whole text is, or its letter."""
    key = _key(text)
    letter = reader.short.fullmatch(text) if len(text) < 40 else None
    if letter and key not in reader.keys:
        return reader.index(letter)
    return reader.keys.index(key) if key and key in reader.keys else None


def _stated_letter(reader: _Reader, text: str) -> int | None:
    """Return the choice of the last letter that is stated as the answer, as in `the answer is (B)`.

    A letter behind it that corrects it comes first. `The answer is A circle` states the choice `a
    circle` or `circle`.
    """
    matches = [
        match
        for match in reader.stated.finditer(text)
        if not _dismissed(text, match) and not reader.joined(text, match)
    ]
    if not matches:
        return None
    corrected = reader.last(reader.corrected, text, matches[-1].end())
    if corrected is not None:
        return corrected
    described = reader.described(text[matches[-1].end() - 1 :])
    return reader.index(matches[-1]) if described is None else described


def _dismissed(text: str, match: re.Match[str]) -> bool:
    """Return whether the text calls a letter wrong, as in `the incorrect answer is A`.

    A letter in `option (D) is incorrect` is called wrong, and one that is only supposed, too.
    """
    before = text[max(0, match.start() - 15) : match.start()]
    behind = text[match.end() : match.end() + 40]
    if _SUPPOSED.match(behind):
        return True
    return bool(_WRONG.search(before + " | " + behind.split("\n")[0]))


def _stated_text(reader: _Reader, text: str) -> int | None:
    """Return the only choice whose text the last sentence about the answer mentions."""
    for sentence in reversed(sentences(text)):
        statements = list(_SAYS_ANSWER.finditer(sentence))
        if statements:
            rest = sentence[statements[-1].end() :]
            equal = reader.equal(rest.strip(" .:"))
            if equal is not None:
                return equal
            for denied in (True, False):
                mentioned = reader.mentioned(rest, denied=denied)
                if len(set(mentioned)) == 1:
                    return mentioned[0]
    return None


def _judged(reader: _Reader, text: str) -> int | None:
    """Return the option that is called right where all others that are judged are called wrong."""
    verdicts = {reader.index(match): match[2] is not None for match in reader.judged.finditer(text)}
    right = [index for index, holds in verdicts.items() if holds]
    return right[0] if len(verdicts) > 1 and len(right) == 1 else None


def _ordinal(reader: _Reader, text: str) -> int | None:
    """Return the option in `The third option.`, where that is all that is said."""
    ordinals = _ORDINAL.findall(text) if len(text) < _LONGEST_ORDINAL else []
    if len(ordinals) != 1:
        return None
    english, chinese = ordinals[0]
    if english.lower() == "last":
        return len(reader.choices) - 1
    index = _ORDINALS.index(english.lower()) if english else "一二三四五六".index(chinese)
    return index if index < len(reader.choices) else None


def _in_brackets(reader: _Reader, text: str) -> int | None:
    """Return the choice of the last letter in brackets that is not ruled out.

    It is C in `a triangle (C), not a square (B)`.
    """
    indices = [
        reader.index(match)
        for match in reader.in_brackets.finditer(text)
        if not _dismissed(text, match)
        and not reader.joined(text, match)
        and not _RULED_OUT.search(text[max(0, match.start() - 60) : match.start()])
    ]
    return indices[-1] if indices else None


def _leading_letter(reader: _Reader, text: str) -> int | None:
    """Return the choice of the letter with which the text begins."""
    match = reader.leading.match(text)
    return None if match is None or reader.joined(text, match) else reader.index(match)


def _yes_no(reader: _Reader, text: str) -> int | None:
    """Return the choice `yes` or `no`, where the text begins with that word."""
    match = re.match(r"\W*(yes|no)\b", text, re.IGNORECASE)
    if match is None or match[1].lower() not in reader.keys:
        return None
    return reader.keys.index(match[1].lower())


def _mentioned(reader: _Reader, text: str) -> int | None:
    """Return the choice of the last sentence that mentions exactly one.

    Sentences that conclude come before all others.
    """
    parts = sentences(text)
    concluding = [part for part in parts if _CONCLUDES.search(part)]
    for part in [*reversed(concluding), *reversed(parts)]:
        head = _REASON.split(part, maxsplit=1)[0]  # a square, since a circle has no sides
        for text_part, denied in ((part, True), (part, False), (head, True)):
            indices = set(reader.mentioned(text_part, denied=denied))
            if len(indices) == 1:
                return indices.pop()
    return None


def _all_words(reader: _Reader, text: str) -> int | None:
    """Return the choice of the last sentence that has all the words of exactly one."""
    for part in reversed(sentences(text)):
        words = set(re.findall(r"\w+", part.lower()))
        indices = {
            i
            for i, key in enumerate(reader.keys)
            if " " in key and set(re.findall(r"\w+", key)) <= words
        }
        if len(indices) == 1:
            return indices.pop()
    return None


def _negated(reader: _Reader, text: str) -> int | None:
    """Return the choice `yes` or `no`, by whether a sentence that says neither has a negation."""
    if set(reader.keys) != {"yes", "no"} or refuses(text):
        return None
    parts = sentences(text)
    concluding = [part for part in parts if _CONCLUDES.search(part)]
    if concluding:
        part = concluding[-1]
    elif parts:
        part = parts[0]
    else:
        part = text
    return reader.keys.index("no" if _NO.search(part) else "yes")


def _boxed(reader: _Reader, response: str) -> int | None:
    """Return the choice that the last box means."""
    box = last_boxed(response)
    return None if box is None else reader.resolve(box)


def _concluded_letter(reader: _Reader, text: str) -> int | None:
    """Return the choice whose letter ends a conclusion last, as in `therefore it is B`."""
    return reader.last(reader.concluded, text)


def _letter_that_fits(reader: _Reader, text: str) -> int | None:
    """Return the choice of the last letter that is said to fit, as in `B matches`."""
    return reader.last(reader.fits, text)


def _named_option(reader: _Reader, text: str) -> int | None:
    """Return the choice of the last letter that is named as an option, as in `option B`."""
    return reader.last(reader.named, text)


# Rules by the name that an extraction gives of them, the surest first.
_Rules = tuple[tuple[str, Callable[[_Reader, str], int | None]], ...]
_STATED_RULES: _Rules = (
    ("exact", _exact),
    ("box", _boxed),
    ("stated_letter", _stated_letter),
    ("stated_text", _stated_text),
)
_RULES: _Rules = (
    *_STATED_RULES,
    ("judged", _judged),
    ("concluded_letter", _concluded_letter),
    ("leading_letter", _leading_letter),
    ("letter_in_brackets", _in_brackets),
    ("letter_that_fits", _letter_that_fits),
    ("ordinal", _ordinal),
    ("named_option", _named_option),
    ("yes_no", _yes_no),
    ("mentioned", _mentioned),
    ("all_words", _all_words),
    ("negation", _negated),
)
