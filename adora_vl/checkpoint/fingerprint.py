"""The fingerprint of a run, compared with a checkpoint's and between ranks: equal ones take the
same steps.
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
# these matter only if there is a budget
_BUDGET_KEYS = {
    "adora_rollouts.budget",
    "adora_rollouts.staleness",
}
# of a run with none, before there were any
_TOOL_KEYS = {
    "tools",
    "max_tool_calling_iterations",
    "adora_tool_options",
}
# these matter only if the learning rate or an extension depends on the last step
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
    own: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
) -> Fingerprint:
    """Every key that influences the steps, with its value as text.

    `settings`: the run's dataclasses. `data`: the folders of its data sets in their order. `model`:
    a folder or hub id. `sharding`: from `sharding_of`. `own`: the hash of each file of the user's
    code, by what it is for. `left_out`: the ids of rows that are not trained on.
    """
    values: dict[str, Any] = {}
    for each in settings:
        for field in dataclasses.fields(each):
            values |= dotted(field.name, masked(plain(getattr(each, field.name))))
    rewards = values.get("adora_reward")
    if isinstance(rewards, list):
        values["adora_reward"] = [without_address(entry) for entry in rewards]
    constant = spelled(values.get("lr_scheduler_type")) == "constant"
    extended = any(key.startswith("adora_extensions.") for key in values)
    free = _FREE_KEYS | (_LENGTH_KEYS if constant and not extended else set())
    free |= {"adora_rollouts.ahead"} if not values.get("adora_rollouts.ahead") else set()
    free |= {"environment_factory"} if not values.get("environment_factory") else set()
    tooled = values.get("tools") or any(name.startswith("tool ") for name in own or ())
    free |= set() if tooled else _TOOL_KEYS
    free |= _BUDGET_KEYS if values.get("adora_rollouts.budget") is None else set()
    kept = {
        key: json.dumps(value, default=str, sort_keys=True)
        for key, value in values.items()
        if not {key, key.partition(".")[0]} & free and not key.startswith(_FREE_PREFIXES)
    }
    without = (
        f"{len(left_out)} ({hashlib.sha256(json.dumps(list(left_out)).encode()).hexdigest()[:16]})"
    )
    return {
        **kept,
        **(own or {}),
        **({"rows left out": without} if left_out else {}),
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


def sharding_of(config: Any) -> str:
    """How `config`, a `TrainingArguments`, shards the model over processes: `zero1` to `zero3`, or
    `none`.
    """
    plugin = getattr(config, "deepspeed_plugin", None)
    return f"zero{plugin.zero_stage}" if plugin is not None and plugin.zero_stage else "none"


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """`key: before -> now` for every key that differs. Keys that the user sets come first."""
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    changed.sort(key=lambda key: (not key.startswith("adora_"), key))
    return [f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}" for key in changed]


_PREFIX = ".seen-by-all-"


@dataclass(frozen=True)
class Seen:
    """What one rank found: its machine, whether its output_dir is the first rank's, and which
    settings differ.
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
    """Raise `UserError` on all ranks where one of them does not see the `token` of the first rank
    in `output_dir`, or has another fingerprint than the `first` rank. All ranks call this together.
    """
    seen = Seen(
        socket.gethostname(), appears(output_dir / token, patience_s), differences(first, mine)
    )
    everyone: list[Seen] = gather_object([seen])
    with contextlib.suppress(OSError):
        (output_dir / token).unlink(missing_ok=True)
    problem = problem_among(everyone, output_dir)
    if problem is not None:
        raise UserError(problem)


def problem_among(everyone: Sequence[Seen], output_dir: Path) -> str | None:
    """What is wrong with what the ranks have found, listed in their order; None if nothing is."""
    remedy = (
        "all machines write into one checkpoint, so name a folder on a disk that they share, by "
        "the same path"
    )
    for rank, seen in enumerate(everyone):
        where = f"on {seen.machine} (rank {rank})"
        first = f"the folder that rank 0 has on {everyone[0].machine}"
        if not seen.shares:
            return f"output_dir: {str(output_dir)!r} {where} is not {first}; {remedy}"
        if seen.differs:
            more = f" (and {len(seen.differs) - 1} more)" if len(seen.differs) > 1 else ""
            same = "start every machine with the same arguments, data and model"
            return f"{where} the run is not the one of rank 0: {seen.differs[0]}{more}; {same}"
    return None
