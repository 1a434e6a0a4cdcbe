"""The fingerprint of a run, by which it is compared with a checkpoint and between ranks.

Runs with equal fingerprints take the same steps.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainingArguments

from adora_vl.data.dataset import data_hash
from adora_vl.models.load import model_hash
from adora_vl.rewards.judge import without_address
from adora_vl.utils.cli import dotted, plain, spelled
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import NFS_DELAY_S, appears
from adora_vl.utils.secrets import masked

# These keys may differ between a run and its continuation: where it writes, what it shows, how long
# it goes on.
_FREE_KEYS = {
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "run_name",
    "project",
    "trackio_space_id",
    "report_to",
    "disable_tqdm",
    "logging_dir",
    "logging_steps",
    "logging_strategy",
    "logging_first_step",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "log_completions",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "vllm_gpu_memory_utilization",
    "adora_max_drift",
    "adora_self_check",
    "dataset_name",
    "model_name_or_path",
    "model_init_kwargs",
    "ddp_timeout",
    "adora_columns",  # what was read is compared
    "adora_overlong_prompts",  # the rows that it leaves out are compared
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_pin_memory",
    "adora_max_ratio",
    "adora_recompute",  # a layer that is computed again has the same values
    "adora_weight_transfer",
    "adora_reward_timeout",
    "num_generations_eval",
    "per_device_eval_batch_size",
}
_FREE_PREFIXES = (
    "hub_",
    "push_to_hub",
    "eval_",
    "adora_eval",
    "adora_record_",
    "vllm_server_",
    "trackio_",
)
# Keys that influence the steps only if there is a budget.
_BUDGET_KEYS = {
    "adora_rollouts.budget",
    "adora_rollouts.staleness",
}
# Keys that influence the steps only if there are tools.
_TOOL_KEYS = {
    "tools",
    "max_tool_calling_iterations",
    "adora_tool_options",
}
# Keys that influence the steps only if the learning rate or an extension depends on the last step.
_LENGTH_KEYS = {
    "max_steps",
    "num_train_epochs",
}
Fingerprint = dict[str, str]


def fingerprint(
    *settings: Any,
    data: Sequence[Path | str],
    model: Path | str,
    revision: str | None,
    processes: int,
    sharding: str = "none",
    code_hashes: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
) -> Fingerprint:
    """Return every key that influences the steps, with its value as text.

    `settings`: the run's dataclasses. `data`: the folders of its data sets in their order. `model`:
    a folder or hub id. `sharding`: from `sharding_of`. `code_hashes`: the hash of each file of the
    user's code, by what it is for. `left_out`: the ids of rows that are not trained on.
    """
    values: dict[str, Any] = {}
    for section in settings:
        for field in dataclasses.fields(section):
            values |= dotted(field.name, masked(plain(getattr(section, field.name))))
    rewards = values.get("adora_reward")
    if isinstance(rewards, list):
        values["adora_reward"] = [without_address(entry) for entry in rewards]
    constant = spelled(values.get("lr_scheduler_type")) == "constant"
    extended = any(key.startswith("adora_extensions.") for key in values)
    has_tools = values.get("tools") or any(name.startswith("tool ") for name in code_hashes or ())
    free = set(_FREE_KEYS)
    if constant and not extended:
        free |= _LENGTH_KEYS
    if not values.get("adora_rollouts.ahead"):
        free.add("adora_rollouts.ahead")
    if not values.get("environment_factory"):
        free.add("environment_factory")
    if not has_tools:
        free |= _TOOL_KEYS
    if values.get("adora_rollouts.budget") is None:
        free |= _BUDGET_KEYS
    compared = {
        key: json.dumps(value, default=str, sort_keys=True)
        for key, value in values.items()
        if not {key, key.partition(".")[0]} & free and not key.startswith(_FREE_PREFIXES)
    }
    rows_left_out: dict[str, str] = {}
    if left_out:
        digest = hashlib.sha256(json.dumps(list(left_out)).encode()).hexdigest()
        rows_left_out["rows left out"] = f"{len(left_out)} ({digest[:16]})"
    return {
        **compared,
        **(code_hashes or {}),
        **rows_left_out,
        "processes": str(processes),
        "sharding": sharding,
        # `Path.is_dir` raises for a text that is too long for a path, such as the columns of a
        # stream.
        "dataset": "+".join(
            data_hash(Path(text)) if os.path.isdir(text) else str(text)  # noqa: PTH112
            for text in data
        ),
        "model": model_hash(str(model), revision) or f"{model}@{revision}",
    }


def sharding_of(config: TrainingArguments) -> str:
    """Return how a config shards the model over processes: `zero1` to `zero3`, or `none`."""
    plugin = getattr(config, "deepspeed_plugin", None)
    return f"zero{plugin.zero_stage}" if plugin is not None and plugin.zero_stage else "none"


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return `key: before -> now` for every key that differs.

    Keys that the user sets come first.
    """
    changed = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    changed.sort(key=lambda key: (not key.startswith("adora_"), key))
    lines = []
    for key in changed:
        lines.append(f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}")
    return lines


_PREFIX = ".seen-by-all-"


@dataclass(frozen=True)
class Seen:
    """What one rank sees of a run.

    `machine`: its host name. `shares`: whether its `output_dir` is that of the first rank.
    `differs`: the settings that differ from those of the first rank.
    """

    machine: str
    shares: bool
    differs: list[str]


def leave_token(output_dir: Path) -> str:
    """Leave a file that the other ranks look for, and return its name.

    The first rank calls this. Raises `OSError`.
    """
    for forgotten in output_dir.glob(f"{_PREFIX}*"):
        forgotten.unlink(missing_ok=True)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    (output_dir / name).touch()
    return name


def check_ranks(
    output_dir: Path,
    token: str,
    first: Fingerprint,
    mine: Fingerprint,
    *,
    patience_s: float = NFS_DELAY_S,
) -> None:
    """Raise `UserError` on all ranks if they do not share a folder, or do not have the same run.

    `token`: a file that the first rank has left in `output_dir`. `first`, `mine`: the fingerprints
    of the first rank and of this one. `patience_s`: seconds to wait for the file. Collective: all
    ranks call this together.
    """
    view = Seen(
        machine=socket.gethostname(),
        shares=appears(output_dir / token, patience_s),
        differs=differences(first, mine),
    )
    views: list[Seen] = gather_object([view])
    with contextlib.suppress(OSError):
        (output_dir / token).unlink(missing_ok=True)
    problem = problem_among(views, output_dir)
    if problem is not None:
        raise UserError(problem)


def problem_among(views: Sequence[Seen], output_dir: Path) -> str | None:
    """Return the first problem in what the ranks see, listed in their order.

    None if there is none.
    """
    remedy = (
        "all machines write into one checkpoint, so name a folder on a disk that they share, by "
        "the same path"
    )
    for rank, view in enumerate(views):
        where = f"on {view.machine} (rank {rank})"
        first = f"the folder that rank 0 has on {views[0].machine}"
        if not view.shares:
            return f"output_dir: {str(output_dir)!r} {where} is not {first}; {remedy}"
        if view.differs:
            remaining = f" (and {len(view.differs) - 1} more)" if len(view.differs) > 1 else ""
            return (
                f"{where} the run is not the one of rank 0: {view.differs[0]}{remaining}; start "
                "every machine with the same arguments, data and model"
            )
    return None
