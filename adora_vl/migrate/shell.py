"""Shell scripts of other trainers: their variables, and the words of the command that trains.

Nothing is run. Variables that the script sets are filled in, and what a shell would have to
compute stays as it is written, with its `$`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adora_vl.utils.errors import UserError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# `$NAME`, `${NAME}`, `${NAME:-default}`, `${1:-default}`; a default may have a variable in braces
_DEFAULT = r"(?::?-(?P<default>(?:[^{}]|\{[^{}]*\})*))?"
_VARIABLE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>\w+)" + _DEFAULT + r"\})")
# Words behind which another command begins, or the output of this one is sent somewhere.
_END_OF_COMMAND = re.compile(r"^(\||\|\||&|&&|;|\d?>.*|<.*)$")
# `NAME=(` begins an array, whose words may stand in many lines, and `${NAME[@]}` is all of them.
_ARRAY = re.compile(r"(?P<name>[A-Za-z_]\w*)=\((?P<first>.*)", re.DOTALL)
_ARRAY_WORDS = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_ALL_ARGUMENTS = ("$@", "$*")


@dataclass
class Script:
    """A shell script: its variables and arrays, and its commands as lists of words.

    `open_array`: the name of an array whose end has not been read yet.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    open_array: str | None = None
    commands: list[list[str]] = field(default_factory=list)


def read_script(text: str, name: str) -> Script:
    """Read a shell script. Raises `UserError` for a quote that is never closed.

    `name`: the file, for the message.
    """
    script = Script()
    # only the user's folder is taken from this machine, since other values may be secrets
    script.variables["HOME"] = str(Path.home())
    pending = ""
    in_quote = False
    # an empty line more, which ends a command whose last line has a backslash
    for line in [*text.splitlines(), ""]:
        # a backslash at the end of a comment does not continue it
        if line.lstrip().startswith("#") and not in_quote:
            continue
        pending += line.removesuffix("\\") + (" " if line.endswith("\\") else "\n")
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            in_quote = True
            continue
        in_quote = False
        pending = ""
        _read_line(script, words)
    if pending.strip() and in_quote:
        start = " ".join(pending.split())
        raise UserError(f"CONFIG: {name}: a quote is never closed, from {start[:60]!r} on")
    return script


def _read_line(script: Script, words: list[str]) -> None:
    """Set the variables of a line, and add its command to the script's, if it has one.

    Of a line with several commands the first is read: behind `|`, `&&` or `;` stand those that log
    or clean up.
    """
    words = [word for word in words if not _read_array_word(script, word)]
    if words[:1] == ["export"]:
        words = words[1:]
    while words and _ASSIGNMENT.match(words[0]):
        variable, _, value = words[0].partition("=")
        script.variables[variable] = expand(value.removesuffix(";"), script.variables)
        words = words[1:]
    command: list[str] = []
    for word in words:
        if _END_OF_COMMAND.match(word):
            break
        is_last = word.endswith(";")
        word = word.removesuffix(";")
        array = _ARRAY_WORDS.fullmatch(word)
        if array is not None:
            command += script.arrays.get(array[1], [])
        elif word not in _ALL_ARGUMENTS:
            command.append(expand(word, script.variables))
        if is_last:
            break
    if command:
        script.commands.append(command)


def _read_array_word(script: Script, word: str) -> bool:
    """Add a word to the array that it begins, belongs to or ends; return whether it does.

    The word that ends an array closes it, so the words of a line have to come in order.
    """
    beginning = _ARRAY.fullmatch(word) if script.open_array is None else None
    if beginning is not None:
        script.open_array = beginning["name"]
        script.arrays[beginning["name"]] = []
        word = beginning["first"]
    if script.open_array is None:
        return False
    text = word.removesuffix(")")
    if text:
        script.arrays[script.open_array].append(expand(text, script.variables))
    if word.endswith(")"):
        script.open_array = None
    return True


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Fill in the variables of a text; one that is not known stays as it is written."""

    def value_of(match: re.Match[str]) -> str:
        """Return the variable's value, or its default in the script, or the match as it is."""
        name = match["plain"] or match["name"]
        if name in variables:
            return variables[name]
        return match[0] if match["default"] is None else expand(match["default"], variables)

    return _VARIABLE.sub(value_of, text)
