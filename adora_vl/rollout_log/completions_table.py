"""TRL's table of completions, kept with a checkpoint, so that a resumed run writes the tables that it would have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_COLUMNS = ("prompt", "completion", "advantages")  # one deque each in TRL's `_logs`
_GROUPS = ("rewards", "extra")  # a deque per reward function, per column of the user's


def to_json(logs: Mapping[str, Any]) -> str:
    """The rows of the newest generation. Images are left out; what JSON does not know becomes its text."""
    kept: dict[str, Any] = {name: list(logs[name]) for name in _COLUMNS}
    kept |= {group: {name: list(values) for name, values in logs[group].items()} for group in _GROUPS}
    return json.dumps(kept, default=_plain)


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's, anything else as its text."""
    return value.item() if hasattr(value, "item") else str(value)


def from_json(text: str, logs: Mapping[str, Any]) -> None:
    """Put the rows of `to_json` into `logs`, TRL's `_logs`, in place of what is there. Empty text: nothing was kept."""
    if not text:
        return
    kept = json.loads(text)
    pairs = [(logs[name], kept[name]) for name in _COLUMNS]
    pairs += [(logs[group][name], values) for group in _GROUPS for name, values in kept[group].items()]
    for column, values in pairs:
        column.clear()
        column.extend(values)
