"""The text of a completion or of a prompt."""

from __future__ import annotations

from typing import Any


def completion_text(completion: Any) -> str:
    """The text of a completion, or of a prompt's last message, in either of TRL's forms: a string, or messages whose
    content is a string or parts.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or [])
