"""TRL's table of completions in a form that wandb takes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from adora_vl import compat


def wandb_tables(report_to: Sequence[str]) -> AbstractContextManager[None]:
    """Inside, a table that is made of a data frame for wandb is made of `shown` of it."""
    if "wandb" not in report_to:
        return nullcontext()
    import wandb

    stock = wandb.Table
    return compat.WANDB_TABLE.replaced_by(lambda dataframe: stock(dataframe=shown(dataframe)), on=wandb)


def shown(frame: Any) -> Any:
    """The data frame with texts in place of messages, and with each image of a row in a column of its own."""
    frame = frame.copy(deep=False)
    for name in ("prompt", "completion"):
        frame[name] = [conversation_text(one) for one in frame[name]]
    if "image" in frame:
        rows = list(frame.pop("image"))
        for number in range(max(map(len, rows), default=0)):
            column = "image" if number == 0 else f"image_{number + 1}"
            frame[column] = [images[number] if number < len(images) else None for images in rows]
    return frame


def conversation_text(messages: Any) -> str:
    """A prompt or completion as one text, with `<image>` for an image, and the role before each of several messages."""
    if isinstance(messages, str):
        return messages
    texts = [_content(message.get("content")) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return "".join("<image>" if part.get("type") == "image" else part.get("text") or "" for part in content)
