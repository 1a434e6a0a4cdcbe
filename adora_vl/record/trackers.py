"""What trackers get: TRL's table of completions, from all ranks and with the groups' weights."""

import json
import math
import os
from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from trl.trainer.utils import strip_images_from_messages

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.prompts import messages_as_text
from adora_vl.training.generation import ScoredGroups, UnscoredGroups
from adora_vl.utils.errors import UserError


def gather_prompts(prompts: list[Any]) -> list[Any]:
    """Gather prompts, which are texts or conversations, from all ranks. Collective.

    Images in conversations are replaced by `{"type": "image"}`, so that none is sent.
    """
    without_images = [
        strip_images_from_messages(prompt) if is_conversation(prompt) else prompt
        for prompt in prompts
    ]
    all_prompts: list[Any] = gather_object(without_images)
    return all_prompts


def is_conversation(value: object) -> bool:
    """Return whether the value is a list of messages, each with a role."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


# Packages of the trackers that have another name than their tracker; any of them is enough.
# Kubeflow's comes with its cluster.
_PACKAGES_BY_TRACKER: dict[str, tuple[str, ...]] = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "kubeflow": (),
}


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise `UserError` for a tracker that is not installed.

    Transformers refuses it too, but only after the weights are loaded.
    """
    # Transformers reads these two words only where they stand alone.
    for word in ("none", "all"):
        if word in report_to:
            raise UserError(
                f"report_to: {', '.join(report_to)}: {word} stands alone; leave it out, or the others"
            )
    for name in report_to:
        # most trackers are a package of the same name; an empty tuple means nothing to look for
        packages = _PACKAGES_BY_TRACKER.get(name, (name,))
        is_installed = any(find_spec(package) is not None for package in packages)
        if packages and not is_installed:
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


# Keys of TRL's `_logs` that have one column each, a deque
_KEYS_OF_COLUMNS = ("prompt", "completion", "advantages")
# Keys that have a dict of columns: one per reward function, and one per column that they add
_KEYS_OF_COLUMN_DICTS = ("rewards", "extra")


def add_rows(
    table: Mapping[str, Any],
    unscored_groups: UnscoredGroups,
    scored_groups: ScoredGroups,
    images: list[Any],
    function_names: Sequence[str],
    *,
    is_training: bool,
    as_plain_text: bool = False,
) -> None:
    """Add rollouts that were scored to TRL's table of completions.

    The table keeps as many rows as a generation has. In a training the column `advantages` is 0
    until `set_final_values` fills in the final ones; `advantage_raw` is what TRL computes.
    `adora_weight` is ADORA's weight of the rollout's group, and `adora_tds` says whether this group
    is temporarily disadvantageous to learn from. Collective: texts and images are gathered.

    Args:
        table: the trainer's `_logs`.
        unscored_groups: the prompts and completions of this rank.
        scored_groups: rewards, lengths and advantages of the rollouts of all ranks. The suffixes
            are N for the rollouts, which are P groups of G, and F for the reward functions.
        images: the images of this rank, one entry a row; empty where no tracker shows them.
        function_names: the names of the reward functions.
        is_training: whether the policy learns from the rollouts; False in an evaluation, whose
            advantages are final at once.
        as_plain_text: whether prompts become plain texts, as wandb refuses messages that mix text
            and images.
    """
    facts = scored_groups.facts
    assessment = scored_groups.assessment
    group_size = assessment.trl_advantages_PG.shape[1]
    table["prompt"].extend(gather_prompts(unscored_groups.prompts.messages))
    table["completion"].extend(gather_object(unscored_groups.completions))
    table["images"].extend(gather_object(images))
    unify_message_contents(table["prompt"])
    for name, rewards_N in zip(function_names, facts.rewards_NF.unbind(dim=1), strict=True):
        table["rewards"][name].extend(rewards_N.tolist())
    advantages: list[float] = assessment.trl_advantages_PG.flatten().tolist()
    if is_training:
        advantages = [0.0] * len(advantages)
    table["advantages"].extend(advantages)
    adora_columns = {
        "advantage_raw": assessment.trl_advantages_PG.flatten(),
        "adora_weight": assessment.weighting.weights_P.repeat_interleave(group_size),
        "adora_tds": assessment.weighting.tds_P.repeat_interleave(group_size),
        "adora_length": assessment.groups.lengths_PG.flatten(),
    }
    for name, values in facts.extra_columns.items():
        table["extra"][name].extend(values)
    for name, values_N in adora_columns.items():
        table["extra"][name].extend(values_N.tolist())
    if as_plain_text:
        plain_prompts = [
            prompt if isinstance(prompt, str) else messages_as_text(prompt)
            for prompt in table["prompt"]
        ]
        table["prompt"].clear()
        table["prompt"].extend(plain_prompts)


def set_final_values(table: Mapping[str, Any], name: str, values: Sequence[float | None]) -> None:
    """Overwrite a column of the newest rows of TRL's table once its final values are known.

    Args:
        table: the trainer's `_logs`.
        name: the column's name in the record of rollouts. Two columns have another name in the
            table. A column that the table lacks is ignored.
        values: for the newest rows, in their order; None or NaN for a row that keeps what it has.
    """
    columns_by_record_name = {
        **table["extra"],
        "advantage": table["advantages"],
        "weight": table["extra"]["adora_weight"],
    }
    column = columns_by_record_name.get(name, ())
    # Rows are counted from the end, since a deque of limited length drops its first rows.
    row_count = min(len(column), len(values))
    for index in range(-row_count, 0):
        value = values[index]
        if value is not None and not math.isnan(value):
            column[index] = value


def unify_message_contents(prompts: MutableSequence[Any]) -> None:
    """Make the contents of all messages lists of parts, in place, if any of them is a list.

    For example, the content `"Find x."` becomes `[{"type": "text", "text": "Find x."}]`. A column
    of a tracker's table has one type, but TRL leaves texts and lists in it: it turns texts into
    lists of parts only on a rank whose batch has an image.
    """
    messages = [message for prompt in prompts if is_conversation(prompt) for message in prompt]
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    if not has_parts:
        return
    for number, prompt in enumerate(list(prompts)):
        if is_conversation(prompt):
            prompts[number] = [_with_content_parts(message) for message in prompt]


def _with_content_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text content is a list of one part, `{"type": "text", ...}`.

    A message whose content is such a list already is returned as it is.
    """
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def table_to_json(table: Mapping[str, Any]) -> str:
    """Return TRL's table of completions, without images, as JSON for a checkpoint.

    `table` is the trainer's `_logs`. A value that JSON does not know becomes its text, or a number
    where it is a scalar of NumPy or torch.
    """
    rows_by_key: dict[str, Any] = {key: list(table[key]) for key in _KEYS_OF_COLUMNS}
    for key in _KEYS_OF_COLUMN_DICTS:
        rows_by_key[key] = {name: list(values) for name, values in table[key].items()}
    return json.dumps(rows_by_key, default=_as_json_value)


def _as_json_value(value: object) -> Any:
    """Return a number of NumPy or torch as Python's, and any other value as text."""
    return value.item() if hasattr(value, "item") else str(value)


def restore_table(text: str, table: Mapping[str, Any]) -> None:
    """Replace the rows of TRL's table by those that `table_to_json` has saved in a checkpoint.

    An empty text changes nothing: the checkpoint has no rows. `table` is the trainer's `_logs`. A
    key of it has a column, or a dict of columns by their names.
    """
    if not text:
        return
    rows_by_key = json.loads(text)
    for key in _KEYS_OF_COLUMNS:
        _replace_rows(table[key], rows_by_key[key])
    for key in _KEYS_OF_COLUMN_DICTS:
        for name, values in rows_by_key[key].items():
            _replace_rows(table[key][name], values)


def _replace_rows(column: deque[Any], values: Sequence[Any]) -> None:
    """Make these values the only rows of a column, whose limit of length stays."""
    column.clear()
    column.extend(values)


def empty_table(table: Mapping[str, Any]) -> None:
    """Drop all rows of TRL's `_logs`, the table of completions, before a new generation.

    TRL keeps as many rows as a full generation has. Without this, rows of an older generation would
    stand beside those of a smaller one.
    """
    for value in table.values():
        # `rewards` and `extra` are dicts of columns, all other keys have a column each
        columns = value.values() if isinstance(value, dict) else [value]
        for column in columns:
            column.clear()


def logs_tables(args: AdoraGRPOConfig) -> bool:
    """Return whether a tracker gets TRL's table of completions; tensorboard has no tables."""
    has_table_tracker = "wandb" in args.report_to or "trackio" in args.report_to
    return bool(args.log_completions) and has_table_tracker


def logs_images(args: AdoraGRPOConfig) -> bool:
    """Return whether a tracker gets the images of the table of completions.

    TRL's key for that is `log_multimodal`. Without a tracker that has tables they are not gathered,
    while stock TRL gathers all images on every rank anyway.
    """
    return bool(args.log_multimodal and logs_tables(args))
