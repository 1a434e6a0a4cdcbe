"""TRL's table of completions (`log_completions`): how ADORA weighed each rollout is added, and a checkpoint keeps it,
so that a resumed run writes the tables that it would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from adora_vl.rollout_log.texts import is_conversation
from adora_vl.weighing import Weighed

_COLUMNS = ("prompt", "completion", "advantages")  # one deque each in TRL's `_logs`
_GROUPS = ("rewards", "extra")  # a deque per reward function, per column of the user's


def add_weighed(table: Mapping[str, Any], weighed: Weighed, *, texts: bool = False) -> None:
    """Put the advantages as the loss gets them into `table`, which is the trainer's `_logs`. `texts`: and make texts of
    its prompts, for trackers. wandb gives a column one type, and refuses messages with a text and an image in them.

    TRL has filled in its own advantages, which become the column `advantage_raw`. The table keeps the rollouts of the
    newest generation batch alone, so it may have fewer rows than this generation.
    """
    advantages_B, generations = weighed.advantages_PG.flatten(), weighed.raw_PG.shape[1]
    in_one_form(table["prompt"])
    shown, extra = table["advantages"], table["extra"]
    count = min(len(advantages_B), len(shown))
    extra["advantage_raw"].extend([shown.pop() for _ in range(count)][::-1])
    shown.extend(advantages_B[-count:].tolist())
    weights_B = weighed.weighting.weights_P.repeat_interleave(generations)
    tds_B = weighed.weighting.tds_P.repeat_interleave(generations)
    columns = {"adora_weight": weights_B, "adora_tds": tds_B, "adora_length": weighed.groups.lengths_PG.flatten()}
    for name, column_B in columns.items():
        extra[name].extend(column_B[-count:].tolist())
    if texts:
        prompts = [conversation_text(prompt) for prompt in table["prompt"]]
        table["prompt"].clear()
        table["prompt"].extend(prompts)


def conversation_text(messages: Any) -> str:
    """A prompt as one text, with the role before each message and `<image>` for an image; a text stays as it is."""
    if isinstance(messages, str):
        return messages
    return "\n\n".join(f"{message['role']}: {_content(message.get('content'))}" for message in messages)


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return "".join("<image>" if part.get("type") == "image" else part.get("text") or "" for part in content)


def in_one_form(prompts: Any) -> None:
    """Write the texts of all prompts as parts where those of some are: a column of a table has one type.

    TRL takes a prompt's texts apart where a row of the same rank and batch has an image, and else leaves them alone.
    """
    conversations = [prompt for prompt in prompts if is_conversation(prompt)]
    if not any(isinstance(message.get("content"), list) for prompt in conversations for message in prompt):
        return
    alike = [[_with_parts(message) for message in prompt] if is_conversation(prompt) else prompt for prompt in prompts]
    prompts.clear()
    prompts.extend(alike)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


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
