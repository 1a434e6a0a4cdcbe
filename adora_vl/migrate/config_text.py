"""The YAML file that a config of another trainer becomes."""

from __future__ import annotations

import json

from adora_vl.migrate.migration import Migration
from adora_vl.utils.cli import printable, yaml_line

_COLUMN = 50  # where the comments begin


def yaml_text(migration: Migration, trainer: str, name: str, *, everything: bool = False) -> str:
    """Return the YAML file with our keys, where each value came from, and what to look at.

    `name`: of what was read. `everything`: list also the values that are defaults there. Foreign
    text stands in comments alone, in one line each, so that nothing of it can become a key.
    """
    head = f"From {name} of {trainer}, by `python -m adora_vl.migrate {trainer}`. Look it through."
    lines = [_comment(head)]
    for key, (value, source) in migration.keys.items():
        entry = f"{key}: {_value_text(value)}"
        lines.append(f"{entry:<{_COLUMN}} {_comment(source)}" if source else entry)
    listed = without_counterpart(migration, everything=everything)
    if listed:
        lines += ["", "# Without a counterpart:", *map(_comment, listed)]
    if migration.remarks:
        lines += ["", "# Look at these:", *map(_comment, migration.remarks)]
    return "\n".join(lines) + "\n"


def without_counterpart(migration: Migration, *, everything: bool) -> list[str]:
    """Return a line for each name of theirs that became nothing, with what that means.

    `everything`: also those whose value is the default there.
    """
    return [
        printable(f"  {name}: {meaning}")
        for name, meaning in sorted(migration.unmatched.items())
        if everything or not migration.is_default(name)
    ]


def _comment(text: str) -> str:
    """Return a comment of one line, whatever stands in the text."""
    return f"# {printable(text)}".rstrip()


def _value_text(value: object) -> str:
    """Return a value in one line; a text with line breaks in the quotes of JSON, which YAML reads."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return yaml_line(value)
