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

_ASSIGNMENT_PATTERN = re.compile(r"[A-Za-z_]\w*=")
# `$NAME`, `${NAME}`, `${NAME:-default}`, `${1:-default}`; a default may have a variable in braces
_DEFAULT_REGEX = r"(?::?-(?P<default>(?:[^{}]|\{[^{}]*\})*))?"
_VARIABLE_PATTERN = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>\w+)" + _DEFAULT_REGEX + r"\})"
)
# Words after which another command begins, or the output of this one is sent somewhere.
_END_OF_COMMAND_PATTERN = re.compile(r"^(\||\|\||&|&&|;|\d?>.*|<.*)$")
# `NAME=(` begins an array, whose words may stand in many lines, and `${NAME[@]}` is all of them.
_ARRAY_PATTERN = re.compile(r"(?P<name>[A-Za-z_]\w*)=\((?P<first>.*)", re.DOTALL)
_ARRAY_WORDS_PATTERN = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_ALL_ARGUMENTS = ("$@", "$*")


@dataclass
class Script:
    """The variables, arrays and commands of a shell script, as far as it was read."""

    variables: dict[str, str] = field(default_factory=dict)
    """The values of its variables by name."""
    arrays: dict[str, list[str]] = field(default_factory=dict)
    """The words of its arrays by name."""
    open_array: str | None = None
    """The name of an array whose end has not been read yet; None between arrays."""
    commands: list[list[str]] = field(default_factory=list)
    """Its commands as lists of words."""


def read_script(text: str, name: str) -> Script:
    """Read the variables and commands of a shell script, without running it.

    Args:
        text: the content of the script.
        name: the name of the file, for a message.

    Raises:
        UserError: a quote is never closed.
    """
    script = Script()
    # only the user's folder is taken from this machine, since other values may be secrets
    script.variables["HOME"] = str(Path.home())
    # the lines of a command that goes on in the next line
    pending_text = ""
    in_quote = False
    # an empty line more, which ends a command whose last line has a backslash
    for line in [*text.splitlines(), ""]:
        # a backslash at the end of a comment does not continue it
        if line.lstrip().startswith("#") and not in_quote:
            continue
        continues = line.endswith("\\")
        if continues:
            pending_text += line.removesuffix("\\") + " "
            continue
        pending_text += line + "\n"
        try:
            words = shlex.split(pending_text, comments=True)
        # a quote that is open at the end of the line goes on in the next one
        except ValueError:
            in_quote = True
            continue
        in_quote = False
        pending_text = ""
        _read_line(script, words)
    if pending_text.strip() and in_quote:
        start = " ".join(pending_text.split())
        raise UserError(f"CONFIG: {name}: a quote is never closed, from {start[:60]!r} on")
    return script


def _read_line(script: Script, words: list[str]) -> None:
    """Read a whole line: set its variables, and add its command to those of the script.

    If a line has several commands, only the first is read. Commands after `|`, `&&` or `;` usually
    log or clean up. For example, `LR=1e-6 python train.py --lr $LR | tee log` sets LR, and adds the
    command `python train.py --lr 1e-6`.

    Args:
        script: what was read so far; it is changed.
        words: the words of the line, without quotes.
    """
    # words of an array go into it, and are none of the command's
    words = [word for word in words if not _read_array_word(script, word)]
    if words[:1] == ["export"]:
        words = words[1:]
    while words and _ASSIGNMENT_PATTERN.match(words[0]):
        variable, _, value = words[0].partition("=")
        script.variables[variable] = expand(value.removesuffix(";"), script.variables)
        words = words[1:]
    command: list[str] = []
    for word in words:
        if _END_OF_COMMAND_PATTERN.match(word):
            break
        # a semicolon ends the command, and stands at the end of its last word
        is_last = word.endswith(";")
        word = word.removesuffix(";")
        array = _ARRAY_WORDS_PATTERN.fullmatch(word)
        if array is not None:
            command += script.arrays.get(array[1], [])
        elif word not in _ALL_ARGUMENTS:
            command.append(expand(word, script.variables))
        if is_last:
            break
    if command:
        script.commands.append(command)


def _read_array_word(script: Script, word: str) -> bool:
    """Add a word to an array of the script, and return whether it belongs to one.

    For example, the words `ARGS=(`, `lr=1`, `n=8)` are the array ARGS of `lr=1` and `n=8`; the
    array ends with a word that ends with `)`. The words of a script have to come in order, since
    `script.open_array` says whether an array has begun.
    """
    beginning = _ARRAY_PATTERN.fullmatch(word) if script.open_array is None else None
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
    """Expand the variables in a text, written as `$NAME` or `${NAME:-default}`, as a shell does.

    For example, where A is x and B is not known:

        $A/y      x/y
        ${B:-7}   7      the default
        ${B:-$A}  x      the default has a variable itself
        $B        $B     stays as it is
    """

    def replace_variable(match: re.Match[str]) -> str:
        """Return the variable's value, or its default in the script, or the match as it is."""
        name = match["plain"] or match["name"]
        if name in variables:
            return variables[name]
        default = match["default"]
        # a default may have variables in it too
        return match[0] if default is None else expand(default, variables)

    return _VARIABLE_PATTERN.sub(replace_variable, text)
