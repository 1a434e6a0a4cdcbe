"""What trackers get: texts from all ranks, and the table of completions with the groups' weights."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from trl.trainer.utils import strip_images_from_messages

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.prompts import as_text
from adora_vl.training.advantages import Advantages
from adora_vl.training.scoring import Scores
from adora_vl.utils.errors import UserError


def gather_texts(values: list[Any]) -> list[Any]:
    """Like accelerate's `gather_object`, but images in conversations are replaced by `{"type":
    "image"}`.
    """
    gathered: list[Any] = gather_object(
        [strip_images_from_messages(v) if is_conversation(v) else v for v in values]
    )
    return gathered


def is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


# The packages of trackers that are not called like them; kubeflow's comes with its cluster
_PACKAGES = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "kubeflow": (),
}


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise `UserError` for a tracker that is not installed, which Transformers does after the
    weights are loaded.
    """
    for name in report_to:
        packages = _PACKAGES.get(name, (name,))
        if packages and not any(find_spec(package) for package in packages):
            remedy = f"pip install {packages[0]}, or leave it out (metrics.jsonl is always written)"
            raise UserError(f"report_to: '{name}' is not installed; {remedy}")


def prepare_trackers(report_to: Sequence[str], output_dir: str) -> None:
    """wandb writes into `output_dir` without a network, unless WANDB_MODE is set; tensorboard and
    trackio are local by themselves (trackio_space_id sends it elsewhere).
    """
    if "wandb" in report_to:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_DIR", output_dir)
        # what it keeps to be sent later, such as the images of tables; in the home folder by
        # default
        os.environ.setdefault("WANDB_DATA_DIR", str(Path(output_dir, "wandb").absolute()))


_COLUMNS = ("prompt", "completion", "advantages")  # one deque each in TRL's `_logs`
_GROUPS = ("rewards", "extra")  # a deque per reward function, per column of the user's


def add_rows(
    table: Mapping[str, Any],
    prompts: list[Any],
    answers: list[Any],
    images: list[Any],
    scores: Scores,
    judged: Advantages,
    functions: Sequence[str],
    *,
    texts: bool = False,
) -> None:
    """Put rollouts that were graded into `table`, the trainer's `_logs`, which keeps as many as a
    generation has. `prompts`, `answers` and `images` (empty where no tracker shows them) are of
    this rank, the rest of all. The advantages are in a training 0 until `set_weighed` has the final
    ones; `advantage_raw` is TRL's. `functions`: the names of the rewards. `texts`: prompts become
    plain texts, as wandb refuses messages that mix text and images.
    """
    generations = judged.raw_PG.shape[1]
    table["prompt"].extend(gather_texts(prompts))
    table["completion"].extend(gather_object(answers))
    table["images"].extend(gather_object(images))
    in_one_form(table["prompt"])
    for name, said_B in zip(functions, scores.rewards.all_BF.unbind(dim=1), strict=True):
        table["rewards"][name].extend(said_B.tolist())
    table["advantages"].extend(judged.advantages_PG.flatten().tolist())
    columns = {
        "advantage_raw": judged.raw_PG.flatten(),
        "adora_weight": judged.weighting.weights_P.repeat_interleave(generations),
        "adora_tds": judged.weighting.tds_P.repeat_interleave(generations),
        "adora_length": judged.groups.lengths_PG.flatten(),
    }
    for name, values in [
        *scores.extra.items(),
        *((name, own.tolist()) for name, own in columns.items()),
    ]:
        table["extra"][name].extend(values)
    if texts:
        plain = [
            prompt if isinstance(prompt, str) else as_text(prompt) for prompt in table["prompt"]
        ]
        table["prompt"].clear()
        table["prompt"].extend(plain)


def set_weighed(table: Mapping[str, Any], name: str, values: Sequence[float]) -> None:
    """Put the final values of a column of the record into the newest rows of `table`.

    NaN: the rollout has none.
    """
    columns = {
        **table["extra"],
        "advantage": table["advantages"],
        "weight": table["extra"]["adora_weight"],
    }
    column = columns.get(name, ())
    for place in range(-min(len(column), len(values)), 0):
        if not math.isnan(values[place]):
            column[place] = values[place]


def in_one_form(prompts: Any) -> None:
    """Give all prompts one form, as a column has one type: TRL splits texts into parts on ranks
    with an image alone.
    """
    conversations = [prompt for prompt in prompts if is_conversation(prompt)]
    if not any(
        isinstance(message.get("content"), list) for prompt in conversations for message in prompt
    ):
        return
    alike = [
        [_with_parts(message) for message in prompt] if is_conversation(prompt) else prompt
        for prompt in prompts
    ]
    prompts.clear()
    prompts.extend(alike)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def to_json(logs: Mapping[str, Any]) -> str:
    """The rows of the newest generation.

    Images are left out; what JSON does not know becomes its text.
    """
    kept: dict[str, Any] = {name: list(logs[name]) for name in _COLUMNS}
    kept |= {
        group: {name: list(values) for name, values in logs[group].items()} for group in _GROUPS
    }
    return json.dumps(
        kept, default=lambda value: value.item() if hasattr(value, "item") else str(value)
    )


def from_json(text: str, logs: Mapping[str, Any]) -> None:
    """Put the rows of `to_json` into `logs`, TRL's `_logs`, in place of what is there.

    Empty text: nothing was kept.
    """
    if not text:
        return
    kept = json.loads(text)
    pairs = [(logs[name], kept[name]) for name in _COLUMNS]
    pairs += [
        (logs[group][name], values) for group in _GROUPS for name, values in kept[group].items()
    ]
    for column, values in pairs:
        column.clear()
        column.extend(values)


def empty(logs: Mapping[str, Any]) -> None:
    """Drop all rows.

    TRL keeps as many as a full generation has, so behind a smaller one older rows would stand.
    """
    for column in logs.values():
        for rows in column.values() if isinstance(column, dict) else [column]:
            rows.clear()


def logs_tables(args: AdoraGRPOConfig) -> bool:
    """Whether a tracker gets TRL's table of completions; tensorboard has no tables."""
    return bool(args.log_completions and {"wandb", "trackio"} & set(args.report_to))


def logs_images(args: AdoraGRPOConfig) -> bool:
    """TRL's `log_multimodal`, where a tracker has a table for it: stock TRL gathers all images on
    every rank anyway.
    """
    return bool(args.log_multimodal and logs_tables(args))
