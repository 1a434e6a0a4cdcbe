"""What the extractors of choices and numbers share: removing markup, splitting sentences, detecting refusals."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

MAX_CHARS = 50_000  # of the end of a response

# A model that runs on after its answer writes the next exercise by itself, with the words of the prompt.
_RUNS_ON = re.compile(r"\n[^\S\n]*(?:Hint: Please answer|Question:|Human:|User:|###)")
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|boldsymbol|bf|rm)\b\s*(?:\{([^{}]*)\})?")
_NOISE = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\\?\$|\\[()\[\]]|\*+|`+|\^?\{?\\circ\}?|°|~")
_END = re.compile(r"(?<=[.!?。！？])\s+|[。！？]|\n+")
_REFUSAL = re.compile(
    r"\b(?:sorry|unfortunately|as an ai|unable to|(?:can(?:no|')t|can not|cannot|could not|couldn't) "
    r"(?:be |directly |accurately |help|answer|process|provide|determine|see|view|give|find|identif|tell|calculate|do)|"
    r"(?:not|im|n't) (?:possible|provided?|given|clear|enough|specif|sufficient|have (?:enough|any|the|access))|"
    r"no (?:information|image|data|way)|(?:need|provide|without) (?:more|further|additional|any|the|me) )",
    re.IGNORECASE,
)


class Extraction(NamedTuple):
    """The answer in a response, empty if there is none, and the rule that found it.

    `text` is a string, except for a stored extraction, which is whatever the file has.
    """

    text: Any
    how: str


def own_part(response: str) -> str:
    """The response up to where the model starts to ask itself questions, or all of it if it begins with one."""
    cut = _RUNS_ON.search(response)
    return response[: cut.start()] if cut and response[: cut.start()].strip() else response


def plain(text: str) -> str:
    """The text without bold, dollar and degree signs and LaTeX wrappers, one kind of minus and fraction.

    Runs of spaces become one, and of line ends too, so that no pattern behind this takes long over them.
    """
    text = re.sub(r" ?\n[ \n]*", "\n", re.sub(r"[^\S\n]+", " ", text))
    text = _WRAPPERS.sub(r"\1", text.replace("’", "'").replace("−", "-").replace("–", "-"))
    return _NOISE.sub("", re.sub(r"\\[dt]frac", r"\\frac", text)).replace("\\%", "%").replace("{,}", ",")


def sentences(text: str) -> list[str]:
    """The non-empty sentences and lines. A decimal point does not end a sentence."""
    return [part.strip() for part in _END.split(text) if part.strip()]


def refuses(text: str) -> bool:
    """Whether the text says that there is no answer."""
    return bool(_REFUSAL.search(text.replace("’", "'")))
