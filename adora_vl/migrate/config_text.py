"""The YAML file that a config of another trainer becomes."""

from __future__ import annotations

import json

from adora_vl.migrate.migration import Migration
from adora_vl.utils.cli import printable, yaml_line

_COLUMN = 50  # where the comments begin


def yaml_text(move: Migration, trainer: str, name: str, *, everything: bool = False) -> str:
    """The YAML file with our keys, where each value came from, and what to look at.

    `name`: of what was read. `everything`: list also the values that are defaults there. Foreign
    text stands in comments alone, in one line each, so that nothing of it can become a key.
    """
    head = f"From {name} of {trainer}, by `python -m adora_vl.migrate {trainer}`. Look it through."
    lines = [_comment(head)]
    for key, (value, source) in move.keys.items():
        entry = f"{key}: {_value_text(value)}"
        lines.append(f"{entry:<{_COLUMN}} {_comment(source)}" if source else entry)
    listed = without_counterpart(move, everything=everything)
    if listed:
        lines += ["", "# Without a counterpart:", *map(_comment, listed)]
    if move.remarks:
        lines += ["", "# Look at these:", *map(_comment, move.remarks)]
    return "\n".join(lines) + "\n"


def without_counterpart(move: Migration, *, everything: bool) -> list[str]:
    """A line for each name of theirs that became nothing, and what that means.

    `everything`: also those whose value is the default there.
    """
    return [
        printable(f"  {name}: {meaning}")
        for name, meaning in sorted(move.unmatched.items())
        if everything or not move.is_default(name)
    ]


def _comment(text: str) -> str:
    """A comment of one line, whatever stands in the text."""
    return f"# {printable(text)}".rstrip()


def _value_text(value: object) -> str:
    """A value in one line; a text with line breaks in the quotes of JSON, which YAML reads."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return yaml_line(value)
