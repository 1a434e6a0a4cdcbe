"""What trackers get: TRL's table of completions, from all ranks and with the groups' weights."""

import json
import math
import os
from collections.abc import Mapping, MutableSequence, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from trl.trainer.utils import strip_images_from_messages

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.prompts import as_text
from adora_vl.training.generation import BuiltGroups, ScoredGroups
from adora_vl.utils.errors import UserError


def gather_texts(values: list[Any]) -> list[Any]:
    """Gather texts and conversations from all ranks; collective, as accelerate's `gather_object`.

    Images in conversations are replaced by `{"type": "image"}`.
    """
    without_images = [
        strip_images_from_messages(value) if is_conversation(value) else value for value in values
    ]
    gathered: list[Any] = gather_object(without_images)
    return gathered


def is_conversation(value: object) -> bool:
    """Return whether the value is a list of messages, each with a role."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


# Packages of the trackers that have another name than their tracker; any of them is enough.
# Kubeflow's comes with its cluster.
_PACKAGES = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "kubeflow": (),
}


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise `UserError` for a tracker that is not installed.

    Transformers refuses it too, but only after the weights are loaded.
    """
    for name in report_to:
        packages = _PACKAGES.get(name, (name,))
        if packages and not any(find_spec(package) for package in packages):
            remedy = f"pip install {packages[0]}, or leave it out (metrics.jsonl is always written)"
            raise UserError(f"report_to: '{name}' is not installed; {remedy}")


def prepare_trackers(report_to: Sequence[str], output_dir: str) -> None:
    """Let wandb write into `output_dir` without a network, unless WANDB_MODE is set.

    Tensorboard and trackio are local by themselves (trackio_space_id sends trackio's elsewhere).
    """
    if "wandb" in report_to:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_DIR", output_dir)
        # what wandb stores to send it later, such as the images of tables; by default it stands in
        # the home folder
        os.environ.setdefault("WANDB_DATA_DIR", str(Path(output_dir, "wandb").absolute()))


# Keys of TRL's `_logs` that have one deque each
_COLUMNS = ("prompt", "completion", "advantages")
# Keys that have a deque per reward function, and per column that reward functions add
_GROUPS = ("rewards", "extra")


def add_rows(
    table: Mapping[str, Any],
    built: BuiltGroups,
    scored: ScoredGroups,
    images: list[Any],
    functions: Sequence[str],
    *,
    learned: bool,
    texts: bool = False,
) -> None:
    """Put rollouts that were scored into TRL's table of completions.

    The table keeps as many rows as a generation has. In a training the column of advantages is 0
    until `set_weighed` fills in the final ones; `advantage_raw` is what TRL computes. Collective:
    texts and images are gathered.

    Args:
        table: the trainer's `_logs`.
        built: the prompts and completions of this rank.
        scored: the groups of all ranks, and what is known of them.
        images: the images of this rank; empty where no tracker shows them.
        functions: the names of the reward functions.
        learned: whether the policy learns from them, as it does in a training.
        texts: whether prompts become plain texts, as wandb refuses messages that mix text and
            images.
    """
    facts = scored.facts
    assessment = scored.assessment
    group_size = assessment.trl_advantages_PG.shape[1]
    table["prompt"].extend(gather_texts(built.prompts.messages))
    table["completion"].extend(gather_object(built.completions))
    table["images"].extend(gather_object(images))
    in_one_form(table["prompt"])
    for name, rewards_N in zip(functions, facts.rewards_NF.unbind(dim=1), strict=True):
        table["rewards"][name].extend(rewards_N.tolist())
    advantages: list[float] = assessment.trl_advantages_PG.flatten().tolist()
    if learned:
        advantages = [0.0] * len(advantages)
    table["advantages"].extend(advantages)
    columns = {
        "advantage_raw": assessment.trl_advantages_PG.flatten(),
        "adora_weight": assessment.weighting.weights_P.repeat_interleave(group_size),
        "adora_tds": assessment.weighting.tds_P.repeat_interleave(group_size),
        "adora_length": assessment.groups.lengths_PG.flatten(),
    }
    for name, values in facts.extra_columns.items():
        table["extra"][name].extend(values)
    for name, values_N in columns.items():
        table["extra"][name].extend(values_N.tolist())
    if texts:
        plain = [
            prompt if isinstance(prompt, str) else as_text(prompt) for prompt in table["prompt"]
        ]
        table["prompt"].clear()
        table["prompt"].extend(plain)


def set_weighed(table: Mapping[str, Any], name: str, values: Sequence[float]) -> None:
    """Put the final values of a column of the record into the newest rows of `table`.

    A rollout whose value is NaN keeps what it has. A column that the table lacks is left out.
    """
    columns = {
        **table["extra"],
        "advantage": table["advantages"],
        "weight": table["extra"]["adora_weight"],
    }
    column = columns.get(name, ())
    for index in range(-min(len(column), len(values)), 0):
        if not math.isnan(values[index]):
            column[index] = values[index]


def in_one_form(prompts: MutableSequence[Any]) -> None:
    """Give the texts of all prompts one form, in place, since a column of a table has one type.

    TRL splits them into parts on a rank whose batch has an image, and on no other rank.
    """
    messages = [message for prompt in prompts if is_conversation(prompt) for message in prompt]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return
    for number, prompt in enumerate(list(prompts)):
        if is_conversation(prompt):
            prompts[number] = [_with_parts(message) for message in prompt]


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts.

    One that has such a list stays as it is.
    """
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def to_json(logs: Mapping[str, Any]) -> str:
    """Return the rows of the newest generation in TRL's `_logs`, without images, as JSON.

    A value that JSON does not know becomes its text, or a number where it is a scalar of an array.
    """
    rows: dict[str, Any] = {name: list(logs[name]) for name in _COLUMNS}
    for group in _GROUPS:
        rows[group] = {name: list(values) for name, values in logs[group].items()}
    return json.dumps(rows, default=_as_json_value)


def _as_json_value(value: object) -> Any:
    """Return a number of NumPy or torch as Python's, and any other value as text."""
    return value.item() if hasattr(value, "item") else str(value)


def from_json(text: str, logs: Mapping[str, Any]) -> None:
    """Put the rows of `to_json` into `logs`, TRL's `_logs`, in place of the rows there.

    An empty text changes nothing: no rows were saved.
    """
    if not text:
        return
    saved = json.loads(text)
    pairs = [(logs[name], saved[name]) for name in _COLUMNS]
    pairs += [
        (logs[group][name], values) for group in _GROUPS for name, values in saved[group].items()
    ]
    for column, values in pairs:
        column.clear()
        column.extend(values)


def empty(logs: Mapping[str, Any]) -> None:
    """Drop all rows of TRL's `_logs`.

    TRL keeps as many as a full generation has, so older rows would stand beside those of a smaller
    one.
    """
    for column in logs.values():
        if isinstance(column, dict):
            for rows in column.values():
                rows.clear()
        else:
            column.clear()


def logs_tables(args: AdoraGRPOConfig) -> bool:
    """Return whether a tracker gets TRL's table of completions; tensorboard has no tables."""
    return bool(args.log_completions and {"wandb", "trackio"} & set(args.report_to))


def logs_images(args: AdoraGRPOConfig) -> bool:
    """Return whether a tracker gets the images of the table of completions.

    TRL's key for that is `log_multimodal`. Without a tracker that has tables they are not gathered,
    while stock TRL gathers all images on every rank anyway.
    """
    return bool(args.log_multimodal and logs_tables(args))
