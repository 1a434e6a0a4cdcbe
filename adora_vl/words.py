"""What people write for nothing, for yes and no, and for a list: the same in a file and on every command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

_NULL = ("null", "~")  # as YAML reads them, in any case
_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
_PLAIN_LIST = re.compile(r"[\w./:+=-]+(,[\w./:+=-]+)+")  # a lone regular expression, as PEFT takes, is no list


def is_null(text: object) -> bool:
    """Whether `text` is None or the word null. The word `none` is a value of some keys, so it is not."""
    return text is None or (isinstance(text, str) and text.strip().lower() in _NULL)


def truth(value: object) -> bool | None:
    """`value` as true or false; None where it is neither."""
    word = str(value).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def split_list(words: Sequence[Any]) -> list[Any]:
    """The entries of a list given as `a b`, `a,b`, `[a,b]` or `[a, b]`. Raises `ValueError` for an open bracket."""
    texts = [str(word) for word in words]
    if texts and texts[0].startswith("[") and texts[-1].endswith("]"):
        try:
            entries = yaml.safe_load(" ".join(texts))
        except yaml.YAMLError:
            entries = None
        if isinstance(entries, list):
            return entries
    if texts and texts[0].startswith("[") and "]" not in "".join(texts):
        raise ValueError("has an opening bracket only")
    return [entry for word in words for entry in (word.split(",") if _is_plain_list(word) else [word])]


def _is_plain_list(word: Any) -> bool:
    return isinstance(word, str) and _PLAIN_LIST.fullmatch(word) is not None
