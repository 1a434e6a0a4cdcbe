"""Prepares the text of a response for the rules that extract an answer from it."""

import re

MAX_RESPONSE_CHARS = 50_000  # of the end of a response; a longer one is a loop
# The beginning of a question that a model asks itself after its answer, in the words of the
# prompt. A heading of Markdown, such as `### Final Answer`, is none.
_NEXT_QUESTION_PATTERN = re.compile(
    r"\n[^\S\n]*(?:Hint: Please answer|(?:###\s*)?(?:Question|Human|User|Instruction|Input)\b\s*:?\s*"
    r"(?:(?<=:)|(?<=:\s)|(?=\n)|$)|###\s*$)"
)
# `Step 1:` and `**Question 2:**` at the beginning of a line: their numbers count. Headings such as
# `### Step 2` keep theirs, since a heading alone is no answer.
_LABEL_PATTERN = re.compile(
    r"^[^\S\n]*(\**)[^\S\n]*(?:step|part|question|problem|case|phase)\s*\d{1,2}\b"
    r"\s*(?:[.:)–—-]|(?=[*\n]|$))",
    re.IGNORECASE | re.MULTILINE,
)
# The number of an item of a list: `2. ` and `**2)** `, before a word.
_ITEM_NUMBER_PATTERN = re.compile(r"^([^\S\n]*\**)(\d{1,2})[.)]\**[^\S\n]+(?=\S)", re.MULTILINE)
# LaTeX commands that only change the look of their argument.
_WRAPPER_COMMAND_PATTERN = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|bf|rm|emph|underline)\b\s*(?:\{([^{}]*)\})?"
)
# Markup that has no meaning for an answer.
_MARKUP_PATTERN = re.compile(
    r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|\\?\$|\\[()\[\]]|\*+|`+"
    r"|\^?\{?\\circ(?![A-Za-z])\}?|°|~"
)
_SENTENCE_END_PATTERN = re.compile(r"(?<=[.!?。！？])\s+|[。！？]|\n+")
# Words that say that there is no answer.
_REFUSAL_PATTERN = re.compile(
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
# The value of a key such as `answer` in an object of JSON or of Python.
_JSON_ANSWER_PATTERN = re.compile(
    r"[\"'](?:final[ _-]?|correct[ _-]?)?(?:answer|choice|option|result)[\"']\s*:\s*"
    r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^,}\]\s]+)",
    re.IGNORECASE,
)


def find_answer_in_json(response: str) -> str | None:
    """Return the answer in a response that has an object of JSON, such as `{"answer": "B"}`.

    If there are several answers, the last one is returned: `B` here. Returns None if there is none.
    """
    if "{" not in response or "}" not in response:
        return None
    answers: list[str] = _JSON_ANSWER_PATTERN.findall(response)
    return answers[-1].strip("\"'").strip() if answers else None


def cut_before_next_question(response: str) -> str:
    """Cut a response off where the model begins to ask itself another question.

    A response that begins with such a question is returned whole.
    """
    next_question = _NEXT_QUESTION_PATTERN.search(response)
    if next_question is None:
        return response
    text_before = response[: next_question.start()]
    return text_before if text_before.strip() else response


def without_labels(text: str) -> str:
    """Remove the numbers of steps, questions and list items at the beginning of lines.

    `Step 1: Count 18` becomes `Count 18`. Items have to be numbered 1, 2 and so on: `15. I counted
    them` is no item of a list, and stays. `Step 3` alone stays, since it may be what was asked for.
    """
    is_label_alone = re.search(r"\d", _LABEL_PATTERN.sub("", text)) is None and "\n" not in text
    if is_label_alone:
        return text
    text = _LABEL_PATTERN.sub(r"\1", text)
    item_numbers = [int(item[2]) for item in _ITEM_NUMBER_PATTERN.finditer(text)]
    if item_numbers[:2] != [1, 2]:
        return text
    return _ITEM_NUMBER_PATTERN.sub(r"\1", text)


def without_markup(text: str) -> str:
    r"""Remove bold, dollar and degree signs and LaTeX wrappers from a text.

    `**5** $\text{cm}$` becomes `5 cm`. All kinds of minus signs become `-`, and `\dfrac` becomes
    `\frac`. Several spaces become one, and so do several line ends, so that later patterns are
    fast.
    """
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n[ \n]*", "\n", text)
    text = text.replace("’", "'").replace("−", "-").replace("–", "-")
    text = _WRAPPER_COMMAND_PATTERN.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = _MARKUP_PATTERN.sub("", text)
    return text.replace("\\%", "%").replace("{,}", ",")


def split_sentences(text: str) -> list[str]:
    """Split a text into its sentences and lines, without empty ones.

    A decimal point does not end a sentence: `It is 1.5. So` gives `It is 1.5.` and `So`.
    """
    sentences = [sentence.strip() for sentence in _SENTENCE_END_PATTERN.split(text)]
    return [sentence for sentence in sentences if sentence]


def is_refusal(text: str) -> bool:
    """Return whether a text says that there is no answer, as in `I cannot determine`."""
    return _REFUSAL_PATTERN.search(text.replace("’", "'")) is not None
