"""What ranks send one another about their rollouts: texts, but no pixels."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object
from trl.trainer.utils import strip_images_from_messages


def gather_texts(values: list[Any]) -> list[Any]:
    """Like accelerate's `gather_object`, but images in conversations are replaced by `{"type": "image"}`."""
    gathered: list[Any] = gather_object([strip_images_from_messages(v) if is_conversation(v) else v for v in values])
    return gathered


def is_conversation(value: Any) -> bool:
    """Whether this is a list of messages."""
    return isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value)
