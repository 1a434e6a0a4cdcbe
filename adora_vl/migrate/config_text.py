"""The YAML file that a config of another trainer becomes."""

from __future__ import annotations

import json

from adora_vl.migrate.migration import Migration
from adora_vl.utils.cli import printable, yaml_line

_COMMENT_COLUMN = 50  # characters of a line before its comment


def yaml_text(migration: Migration, trainer: str, name: str, *, everything: bool) -> str:
    """Return the converted config as YAML, with where each value came from and what to look at.

    A line is for example `beta: 0.04   # kl_coef (default)`. Text of the other trainer stands in
    comments alone, in one line each, so that nothing of it can become a key.

    Args:
        migration: the converted config.
        trainer: the other trainer.
        name: the name of what was read, for the first line.
        everything: whether to list also those keys without a counterpart that have their defaults.
    """
    head = f"From {name} of {trainer}, by `python -m adora_vl.migrate {trainer}`. Look it through."
    lines = [_comment(head)]
    for key, converted in migration.keys.items():
        entry = f"{key}: {_to_yaml(converted.value)}"
        if converted.source:
            entry = f"{entry:<{_COMMENT_COLUMN}} {_comment(converted.source)}"
        lines.append(entry)
    unmatched_lines = format_unmatched(migration, everything=everything)
    if unmatched_lines:
        lines += ["", "# Without a counterpart:"]
        lines += [_comment(line) for line in unmatched_lines]
    if migration.remarks:
        lines += ["", "# Look at these:"]
        lines += [_comment(remark) for remark in migration.remarks]
    return "\n".join(lines) + "\n"


def format_unmatched(migration: Migration, *, everything: bool) -> list[str]:
    """Return a line for each key of the other trainer without a counterpart, with what that means.

    `everything`: whether keys that have the other trainer's default are listed too.
    """
    return [
        printable(f"  {name}: {meaning}")
        for name, meaning in sorted(migration.unmatched.items())
        if everything or not migration.is_default(name)
    ]


def _comment(text: str) -> str:
    """Return a text as a YAML comment of one line, whatever characters are in it."""
    return f"# {printable(text)}".rstrip()


def _to_yaml(value: object) -> str:
    """Return a value as YAML in one line."""
    # JSON writes line breaks as \n, and YAML reads its quoted texts
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return yaml_line(value)
