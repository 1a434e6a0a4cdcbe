"""`adora_prompt`: the text of a problem's message from columns of its row, such as `{problem}\\nChoices: {choices}`.

A template has plain names in braces and nothing else: no attributes, indices, conversions or formats, so whatever is
written there, it can read the columns of the row and no more.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from adora_vl.errors import UserError, nearest

_HIDDEN = ("answer", "answer_raw", "meta")  # the gold, and what tells it
_SHOWN = 60


@dataclass(frozen=True)
class Template:
    """A template, read and checked. `lines`: of each the pieces, which are (text, name of a column or None)."""

    source: str
    lines: tuple[tuple[tuple[str, str | None], ...], ...]

    @property
    def names(self) -> list[str]:
        """The columns that it needs, each once."""
        return list(dict.fromkeys(name for line in self.lines for _, name in line if name is not None))

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise `UserError` for a column that the data set `where` lacks."""
        known = [name for name in columns if name not in (*_HIDDEN, "images", "prompt")]
        for name in self.names:
            if name not in known:
                raise UserError(
                    f"adora_prompt: {name!r} is no column of {where}{nearest(name, known)}; it has {', '.join(known)}"
                )

    def __call__(self, row: Mapping[str, Any]) -> str:
        """The text for a row. A line is left out where the columns that it names are all null."""
        made = []
        for line in self.lines:
            names = [name for _, name in line if name is not None]
            if names and all(row[name] is None for name in names):
                continue
            made.append("".join(text + (value_text(row[name]) if name is not None else "") for text, name in line))
        return "\n".join(made)


def template(source: str) -> Template:
    """Read a template. Raises `UserError` for anything but text and `{column}`; `{{` and `}}` are braces."""
    if not isinstance(source, str) or not source.strip():
        raise UserError(
            f"adora_prompt: {source!r} is not a text such as '{{problem}}'; write one, or leave the key out"
        )
    lines: list[list[tuple[str, str | None]]] = [[]]
    try:
        pieces = list(string.Formatter().parse(source))
    except ValueError as error:
        raise _wrong(source, f"cannot be read ({error})") from None
    for text, name, form, conversion in pieces:
        first, *rest = text.split("\n")
        lines[-1].append((first, None))
        lines += [[(part, None)] for part in rest]
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            whole = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise _wrong(source, f"has {whole!r:.60} in braces, which is not the plain name of a column")
        if name in _HIDDEN:
            raise _wrong(source, f"has {{{name}}}, which would tell the model the answer")
        lines[-1].append(("", name))
    found = Template(source, tuple(map(tuple, lines)))
    if not found.names:
        raise _wrong(source, "names no column, so every prompt would be the same")
    return found


def value_text(value: Any) -> str:
    """A column's value in a prompt: a list as `(A) 12 (B) 13`, null as nothing."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(f"({letter}) {item}" for letter, item in zip(_letters(len(value)), value, strict=True))
    return str(value)


def _letters(count: int) -> list[str]:
    return [ascii_uppercase[index] if index < len(ascii_uppercase) else str(index + 1) for index in range(count)]


def _wrong(source: str, why: str) -> UserError:
    shown = repr(source if len(source) <= _SHOWN else source[:_SHOWN] + "...")
    return UserError(f"adora_prompt: {shown} {why}; write {{column}} for a value, and {{{{ or }}}} for a brace")
