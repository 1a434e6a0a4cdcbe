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

from adora_vl.data.dataset import data_hash
from adora_vl.models.load import model_hash
from adora_vl.rewards.entries import normalize_reward_entries
from adora_vl.utils.cli import enum_value, to_json_types, with_dotted_keys
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import wait_until_visible
from adora_vl.utils.secrets import without_secrets

# These keys may differ between a run and its continuation: where it writes, what it shows, how long
# it goes on.
IGNORED_KEYS = {
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
_IGNORED_PREFIXES = (
    "hub_",
    "push_to_hub",
    "eval_",
    "adora_eval",
    "adora_record_",
    "vllm_server_",
    "trackio_",
)
# Arguments of `from_pretrained` that a key of their own says too, or that say only how the weights
# are read or tokens are sampled. Any other entry of `model_init_kwargs` changes the model.
_LOADING_ARGUMENTS = {
    "dtype",
    "attn_implementation",
    "revision",
    "quantization_config",
    "token",
    "cache_dir",
    "device_map",
    "force_download",
    "local_files_only",
    "low_cpu_mem_usage",
    "max_memory",
    "proxies",
    "trust_remote_code",
    "use_cache",
    "use_safetensors",
}
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


def compute_fingerprint(
    *settings: Any,
    data: Sequence[Path | str],
    model: Path | str,
    revision: str | None,
    processes: int,
    sharding: str = "none",
    code_hashes: Mapping[str, str] | None = None,
    left_out_ids: Sequence[str] = (),
    has_tools: bool = False,
) -> Fingerprint:
    """Return everything that influences the steps of a run, as text by name.

    Two runs with equal fingerprints take the same steps.

    Args:
        settings: The dataclasses with the run's config keys.
        data: The folders of the run's data sets in order, or other texts that identify the data.
        model: The folder or hub id of the model.
        revision: The model's revision on the hub.
        processes: The number of processes.
        sharding: How the model is divided over them, `zero1` to `zero3`, or `none`.
        code_hashes: A hash of each file of the user's code, by a name that begins with what the
            code is for, such as `tool my_tools.py`.
        left_out_ids: The ids of rows that are not trained on.
        has_tools: Whether Python code has passed tools beside those of the config keys.
    """
    values = _values_by_dotted_key(settings)
    has_user_tools = any(name.startswith("tool ") for name in code_hashes or ())
    ignored_keys = _keys_without_influence(values, has_further_tools=has_tools or has_user_tools)
    text_by_name: dict[str, str] = {}
    for key, value in values.items():
        top_key = key.partition(".")[0]
        is_ignored = key in ignored_keys or top_key in ignored_keys
        if not is_ignored and not key.startswith(_IGNORED_PREFIXES):
            text_by_name[key] = json.dumps(value, default=str, sort_keys=True)
    text_by_name.update(code_hashes or {})
    if left_out_ids:
        digest = hashlib.sha256(json.dumps(list(left_out_ids)).encode()).hexdigest()
        text_by_name["rows left out"] = f"{len(left_out_ids)} ({digest[:16]})"
    text_by_name["processes"] = str(processes)
    text_by_name["sharding"] = sharding
    data_texts: list[str] = []
    for folder_or_text in data:
        # `Path.is_dir` raises for a text that is too long for a path, such as a stream's columns.
        is_folder = os.path.isdir(folder_or_text)  # noqa: PTH112
        data_texts.append(data_hash(Path(folder_or_text)) if is_folder else str(folder_or_text))
    text_by_name["dataset"] = "+".join(data_texts)
    # The hash is None where neither the model's files nor its commit are known.
    text_by_name["model"] = model_hash(str(model), revision) or f"{model}@{revision}"
    return text_by_name


def _values_by_dotted_key(settings: Sequence[Any]) -> dict[str, Any]:
    """Return the values of config dataclasses by key.

    The values in a mapping get dotted names, such as `adora_rollouts.budget`. Secrets are masked.
    The address of a judge is removed from the rewards, since it may change in the middle of a run.
    """
    values: dict[str, Any] = {}
    for section in settings:
        for field in dataclasses.fields(section):
            value = without_secrets(to_json_types(getattr(section, field.name)))
            values |= with_dotted_keys(field.name, value)
    # Arguments that do not change the model are left out, and so is the key itself where it is null
    # or empty. Then a run with `{use_cache: false}` is the same run as one without the key.
    for name in list(values):
        key, _, argument = name.partition(".")
        is_for_loading = not argument or argument.partition(".")[0] in _LOADING_ARGUMENTS
        if key == "model_init_kwargs" and is_for_loading:
            del values[name]
    rewards = values.get("adora_reward")
    if isinstance(rewards, list):
        values["adora_reward"] = normalize_reward_entries(rewards)
    return values


def _keys_without_influence(values: Mapping[str, Any], *, has_further_tools: bool) -> set[str]:
    """Return the keys that do not influence the steps of a run with these values.

    `has_further_tools`: whether the run has tools that the key `tools` does not name: methods of an
    environment, or tools that Python code has passed.
    """
    ignored = set(IGNORED_KEYS)
    # The length of a run matters if something depends on its last step, such as a learning rate
    # that falls to 0 there, or an extension, of which nothing is known.
    rate_is_constant = enum_value(values.get("lr_scheduler_type")) == "constant"
    has_extensions = any(key.startswith("adora_extensions.") for key in values)
    if rate_is_constant and not has_extensions:
        ignored |= _LENGTH_KEYS
    # Keys of features that the run does not use.
    if not values.get("adora_rollouts.ahead"):
        ignored.add("adora_rollouts.ahead")
    if not values.get("environment_factory"):
        ignored.add("environment_factory")
    if not values.get("tools") and not has_further_tools:
        ignored |= _TOOL_KEYS
    if values.get("adora_rollouts.budget") is None:
        ignored |= _BUDGET_KEYS
    return ignored


def fingerprint_differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return a line `key: before -> now` for every key that differs between two fingerprints.

    For example: `beta: 0.0 -> 0.1`. The keys of this project come first, since the user has more
    likely set one of them.
    """
    all_keys = before.keys() | now.keys()
    different_keys = [key for key in all_keys if before.get(key) != now.get(key)]
    # False comes before True, so the keys of this project come first.
    different_keys.sort(key=lambda key: (not key.startswith("adora_"), key))
    lines: list[str] = []
    for key in different_keys:
        lines.append(f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}")
    return lines


# The beginning of the name of an empty file by which the ranks recognise a shared folder.
_SHARED_FILE_PREFIX = ".seen-by-all-"


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What one rank sees of a distributed run."""

    machine: str
    """The name of its host."""
    shares_folder: bool
    """Whether its `output_dir` is the folder of the first rank."""
    differences: list[str]
    """Lines about the settings that differ from those of the first rank."""


def create_token_file(output_dir: Path) -> str:
    """Make an empty file with a random name in `output_dir`, and return the name.

    The first rank calls this. Ranks that see the file have the same folder, on a shared disk.
    Raises `OSError`.
    """
    for old_token in output_dir.glob(f"{_SHARED_FILE_PREFIX}*"):
        # A start that was killed has left this file.
        old_token.unlink(missing_ok=True)
    name = f"{_SHARED_FILE_PREFIX}{secrets.token_hex(8)}"
    (output_dir / name).touch()
    return name


def check_ranks(
    output_dir: Path,
    token: str,
    rank0_fingerprint: Fingerprint,
    rank_fingerprint: Fingerprint,
) -> None:
    """Raise `UserError` on all ranks if they do not share a folder, or do not have the same run.

    Collective: all ranks call this together.

    Args:
        output_dir: The run's folder, as this rank sees it.
        token: The name of a file that the first rank has made in the folder (`create_token_file`).
        rank0_fingerprint: The fingerprint of the first rank, its settings that influence the steps.
        rank_fingerprint: The fingerprint of this rank.
    """
    view = RankView(
        machine=socket.gethostname(),
        shares_folder=wait_until_visible(output_dir / token),
        differences=fingerprint_differences(rank0_fingerprint, rank_fingerprint),
    )
    views: list[RankView] = gather_object([view])
    # Every rank has looked for the file before it gathered, so the file can go. The first rank to
    # come here deletes it.
    with contextlib.suppress(OSError):
        (output_dir / token).unlink(missing_ok=True)
    problem = describe_rank_mismatch(views, output_dir)
    if problem is not None:
        raise UserError(problem)


def describe_rank_mismatch(views: Sequence[RankView], output_dir: Path) -> str | None:
    """Return an error line for the first rank that cannot take part in a run; None if all can.

    A rank cannot take part if it has another folder or other settings than rank 0. `views`: what
    the ranks see, by rank. `output_dir`: the run's folder, for the line.
    """
    remedy = (
        "all machines write into one checkpoint, so name a folder on a disk that they share, by "
        "the same path"
    )
    for rank, view in enumerate(views):
        rank_in_words = f"on {view.machine} (rank {rank})"
        if not view.shares_folder:
            folder_of_first = f"the folder that rank 0 has on {views[0].machine}"
            return f"output_dir: {str(output_dir)!r} {rank_in_words} is not {folder_of_first}; {remedy}"
        if view.differences:
            further_count = len(view.differences) - 1
            remaining = f" (and {further_count} more)" if further_count > 0 else ""
            return (
                f"{rank_in_words} the run is not the one of rank 0: {view.differences[0]}{remaining}; start "
                "every machine with the same arguments, data and model"
            )
    return None
