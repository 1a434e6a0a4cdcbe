"""Which files in a run's folder a run wrote, and which are the user's.

Those of a run alone may be deleted with `--overwrite_output_dir`. How they are recognised:

- A checkpoint-N folder by its manifest, which names its files.
- The record (metrics.jsonl, manifest.json, stopped.json, rollouts/, completions/) by its content.
- A final model by `written.json`, which has a hash of each file. While a model is being saved,
  `written.json` has the names of the files that are not the run's instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from adora_vl.checkpoint.store import (
    CHECKPOINT_NAME_PATTERN,
    COMPLETE_FILE,
    MANIFEST_FILE,
    STAGING_FOLDER,
    checkpoint_step,
    hash_files,
    list_checkpoints,
    read_checkpoint_manifest,
)
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import (
    is_partial,
    naming_write_errors,
    read_json_object,
    replace_file,
)

WRITTEN_FILES_RECORD = "written.json"  # the list of the files that a run has written
OLD_RUN_FOLDER = ".replaced"  # the hidden folder in output_dir that an old run is moved into
MADE_BY = {"made_by": "adora_vl.train"}  # in manifest.json and written.json of a run
_STOPPED_KEYS = {"exit_code", "step", "checkpoint"}  # the keys of stopped.json
_MODEL_NAME_PATTERNS = (
    "merged",
    "ref",
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_*",
    "config.json",
    "generation_config.json",
    "README.md",
    "*processor_config.json",
    "tokenizer*",
    "chat_template*",
    "additional_chat_templates",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "training_args.bin",
    "trainer_state.json",
)
# what a run records of itself
_RECORD_NAMES = ("metrics.jsonl", "manifest.json", "stopped.json", "rollouts", "completions")
_MAX_SHOWN_NAMES = 5


def list_run_entries(folder: Path) -> list[Path]:
    """Return the files and folders in a run's folder that have names which runs use.

    Checkpoints come first, by their steps. Anything else in the folder is the user's, and stays.
    """
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    checkpoint_folders = [path for path in entries if CHECKPOINT_NAME_PATTERN.fullmatch(path.name)]
    paths = sorted(checkpoint_folders, key=checkpoint_step)
    for pattern in (*_MODEL_NAME_PATTERNS, *_RECORD_NAMES, WRITTEN_FILES_RECORD):
        paths += [path for path in entries if fnmatchcase(path.name, pattern)]
    # A name may fit several patterns.
    return list(dict.fromkeys(paths))


def list_model_entries(folder: Path) -> list[Path]:
    """Return the files and folders of a final model in a run's folder, and `written.json`."""
    patterns = (*_MODEL_NAME_PATTERNS, WRITTEN_FILES_RECORD)
    paths: list[Path] = []
    for path in list_run_entries(folder):
        if any(fnmatchcase(path.name, pattern) for pattern in patterns):
            paths.append(path)
    return paths


def list_users_files(folder: Path, entries: Iterable[Path] | None = None) -> list[str]:
    """Return the files in a run's folder that no run is known to have written.

    These are the user's, and must not be deleted. Links are among them, because a run makes none.
    A folder `checkpoint-N` without a checkpoint's manifest counts as one file.

    Args:
        folder: The run's folder.
        entries: The files and folders to look through. By default these are all entries of the
            folder with names that runs use.

    Returns the names relative to the folder. Raises `OSError` if a folder cannot be listed.
    """
    written_record = _read_written_record(folder)
    users_files: list[Path] = []
    if entries is None:
        entries = list_run_entries(folder)
    for entry in entries:
        if CHECKPOINT_NAME_PATTERN.fullmatch(entry.name):
            users_files += _users_files_of_checkpoint(entry)
            continue
        for file in _files_below(entry):
            name = file.relative_to(folder).as_posix()
            if not _is_written_by_run(file, name, written_record):
                users_files.append(file)
    return [path.relative_to(folder).as_posix() for path in users_files]


def list_first_names(names: Sequence[str]) -> str:
    """Return the first few names as text for an error, and how many more there are."""
    text = ", ".join(repr(name) for name in names[:_MAX_SHOWN_NAMES])
    further_count = len(names) - _MAX_SHOWN_NAMES
    if further_count > 0:
        return f"{text} and {further_count} more"
    return text


@contextmanager
def recording_saved_files(output_dir: Path, saves_model: bool) -> Iterator[None]:
    """Record in `written.json` which files the `with` block saves of a model into `output_dir`.

    From `written.json` a later run can tell the files of the model from the user's own. If the
    process is killed inside of the block, every file that was not there before counts as the run's,
    so that the run can be resumed. If a second process is killed too, the files of both processes
    count as the run's.

    `saves_model`: whether this process saves the model. If not, nothing happens. Raises `OSError`.
    """
    if not saves_model:
        yield
        return
    versions_before = _model_file_versions(output_dir)
    written_record = _read_written_record(output_dir)
    recorded_files = written_record.get("files", {})
    unknown_names = _names_not_written_by_run(written_record, versions_before)
    _write_written_record(output_dir, others=unknown_names)
    try:
        yield
    finally:
        versions_after = _model_file_versions(output_dir)
        # A killed process may have left files that this process has not saved again. They are not
        # among the known names, so they are recorded too.
        known_names = {*unknown_names, *recorded_files}
        saved_files: list[Path] = []
        for name, version in versions_after.items():
            if name not in known_names or versions_before.get(name) != version:
                saved_files.append(output_dir / name)
        # Files of an earlier save that this save has left as they were.
        older_files = {
            name: entry for name, entry in recorded_files.items() if name in versions_after
        }
        _write_written_record(
            output_dir, files={**older_files, **hash_files(output_dir, saved_files)}
        )


def _names_not_written_by_run(written_record: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names of files in a run's folder that no run is known to have written.

    Args:
        written_record: The content of `written.json` before a save; empty if a run did not write
            it.
        names: The names of the files of a model that are in the folder.
    """
    if "others" in written_record:
        # The process before this one was killed while it saved. The files that it has left are the
        # run's. Only the files that it has found (`others`) are not.
        return list(written_record["others"])
    recorded_files = written_record.get("files", {})
    return [name for name in names if name not in recorded_files]


def _write_written_record(output_dir: Path, **entries: Any) -> None:
    """Write `written.json`, which records which files of a final model are the run's.

    `entries`: either `files`, a hash of each file of the run, or `others`, the names of files that
    are not the run's.
    """
    content = json.dumps({**MADE_BY, **entries}, indent=2, sort_keys=True)
    replace_file(output_dir / WRITTEN_FILES_RECORD, content + "\n")


class _FileVersion(NamedTuple):
    """What changes when a file is written."""

    inode: int
    """The number by which the file system knows it."""
    changed_ns: int
    """The time of its last change."""
    size: int
    """Its bytes."""


def _model_file_versions(output_dir: Path) -> dict[str, _FileVersion]:
    """Return the version of each file of a final model, by its name in the run's folder.

    Two versions of a file are equal unless the file was written in between.
    """
    versions: dict[str, _FileVersion] = {}
    for entry in list_model_entries(output_dir):
        if entry.name == WRITTEN_FILES_RECORD:
            continue
        for path in _files_below(entry):
            if path.is_symlink():
                continue
            stat = path.lstat()
            name = path.relative_to(output_dir).as_posix()
            versions[name] = _FileVersion(
                inode=stat.st_ino, changed_ns=stat.st_mtime_ns, size=stat.st_size
            )
    return versions


def _files_below(path: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders; for a file, the file itself.

    A link counts as a file, and is not followed.
    """
    if path.is_symlink() or not path.is_dir():
        yield path
        return
    for entry in sorted(path.iterdir()):
        yield from _files_below(entry)


def _users_files_of_checkpoint(checkpoint: Path) -> list[Path]:
    """Return the files in a `checkpoint-N` folder that are not named by a checkpoint's manifest.

    If the folder has no such manifest, the folder itself is returned, unless it is empty. The files
    of a damaged checkpoint are a run's too.
    """
    files = list(_files_below(checkpoint))
    run_files: set[Path] = set()
    try:
        manifest = read_checkpoint_manifest(checkpoint)
        if "step" in manifest:
            run_files = {
                checkpoint / name for name in (*manifest["files"], MANIFEST_FILE, COMPLETE_FILE)
            }
    except (OSError, ValueError, KeyError, TypeError):
        # There is no manifest, or it is not a checkpoint's.
        pass
    if checkpoint.is_symlink() or not run_files:
        return [checkpoint] if files else []
    return [path for path in files if path.is_symlink() or path not in run_files]


def _is_written_by_run(path: Path, name: str, written_record: Mapping[str, Any]) -> bool:
    """Return whether a run wrote a file, and nobody has changed it since.

    Args:
        path: The file.
        name: Its name relative to the run's folder.
        written_record: The content of `written.json`: a hash of each file that a run has saved
            (`files`), or the names of files that are not the run's (`others`).
    """
    if path.is_symlink() or not path.is_file():
        return False
    top_name, _, name_inside = name.partition("/")
    try:
        if top_name in _RECORD_NAMES:
            return _is_record_file(path, top_name, name_inside)
        if name == WRITTEN_FILES_RECORD:
            # The record is empty if no run wrote this file.
            return bool(written_record)
        if "others" in written_record:
            # The run was killed while it saved the model.
            return name not in written_record["others"]
        recorded_file = written_record["files"].get(name)
        if recorded_file is None or recorded_file["bytes"] != path.stat().st_size:
            return False
        # The file is hashed last, and only if its size is the same, because a model is large.
        return bool(hash_files(path.parent, [path])[path.name] == recorded_file)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        # The file cannot be read, or the record is not as a run writes them.
        return False


def _read_written_record(folder: Path) -> dict[str, Any]:
    """Return the content of `written.json`; empty if a run did not write it."""
    written_record = read_json_object(folder / WRITTEN_FILES_RECORD)
    return written_record if written_record.items() >= MADE_BY.items() else {}


def read_run_manifest(folder: Path) -> dict[str, Any]:
    """Return the `manifest.json` that a run wrote into its folder when it began.

    It is empty where there is none, or where another program wrote the file.
    """
    manifest = read_json_object(folder / MANIFEST_FILE)
    return manifest if manifest.items() >= MADE_BY.items() else {}


def _is_record_file(path: Path, top_name: str, name_inside: str) -> bool:
    """Return whether a file with the name of a run's record has the content that a run writes.

    Args:
        path: The file.
        top_name: One of `_RECORD_NAMES`: the file's name, or that of the folder that it is in.
        name_inside: The file's name in this folder; empty without a folder.
    """
    if top_name == "rollouts":
        return _is_rollout_file(path, name_inside)
    if top_name == "completions":
        if not re.fullmatch(r"completions_\d{5,}\.parquet", name_inside):
            return False
        columns_of_trl = {"step", "prompt", "completion", "advantage"}
        return columns_of_trl <= set(pq.read_schema(path).names)
    if name_inside:
        # The other names of the record are names of files, so a folder of that name is no run's.
        return False
    if top_name == "metrics.jsonl":
        # The last part is empty, unless a crash has cut off a line.
        *lines, last_part = path.read_bytes().split(b"\n")
        all_are_metrics = all(json.loads(line).keys() >= {"step", "kind", "time"} for line in lines)
        return all_are_metrics and (bool(lines) or not last_part)
    if top_name == "manifest.json":
        return bool(read_run_manifest(path.parent))
    # stopped.json
    return read_json_object(path).keys() == _STOPPED_KEYS


def _is_rollout_file(path: Path, name: str) -> bool:
    """Return whether a file in `rollouts/` is a run's: a table of rollouts, or an image of one.

    `name`: the file's name relative to `rollouts/`, such as `rollouts-00000001-00000004.parquet`.
    """
    if re.fullmatch(r"rollouts-\d+-\d+\.parquet", name):
        # A run writes its settings into the metadata of the table.
        return b"adora_vl" in (pq.read_schema(path).metadata or {})
    # An image is named by its hash.
    is_image = re.fullmatch(r"_images/[0-9a-f]{16}\.png", name) is not None
    return is_partial(path) or is_image


def has_run_to_replace(output_dir: Path) -> bool:
    """Return whether the folder has a checkpoint or a model that a new run would replace."""
    return bool(list_checkpoints(output_dir)) or (output_dir / "trainer_state.json").is_file()


def run_has_begun(output_dir: Path) -> bool:
    """Return whether a training command has begun here, even if it came to no checkpoint.

    It has if the folder has a run's `manifest.json`, or a checkpoint that is marked as complete.
    """
    return bool(read_run_manifest(output_dir)) or has_complete_checkpoint(output_dir)


def has_complete_checkpoint(output_dir: Path) -> bool:
    """Return whether a checkpoint has the file that marks it as complete; no hash is compared."""
    return any(
        (checkpoint / COMPLETE_FILE).is_file() for checkpoint in list_checkpoints(output_dir)
    )


def refuse_users_files(output_dir: Path, overwrite: bool) -> None:
    """Raise `UserError` for files of the user's that this run would write over or delete.

    These files have names that runs use, but no run is known to have written them. A run that
    resumes writes over the final model alone, so only the files of a final model are looked
    through.

    `overwrite`: whether the run replaces the one in the folder.
    """
    with naming_write_errors("output_dir", output_dir):
        resumes = has_run_to_replace(output_dir) and run_has_begun(output_dir) and not overwrite
        if resumes:
            users_files = list_users_files(output_dir, list_model_entries(output_dir))
        else:
            users_files = list_users_files(output_dir)
        users_files += _users_hidden_files(output_dir)
    if users_files:
        raise UserError(
            f"output_dir: {str(output_dir)!r} holds {list_first_names(users_files)}, which no "
            "run is "
            "known to have written and this one would write over or delete; choose another "
            "output_dir, or move what is yours away"
        )


def _users_hidden_files(output_dir: Path) -> list[str]:
    """Return the user's own files in the two hidden folders that a run deletes.

    `OLD_RUN_FOLDER` has an old run that was moved aside. `STAGING_FOLDER` has files that are
    being written, and counts as the user's if no run has begun here.
    """
    old_run = output_dir / OLD_RUN_FOLDER
    staging = output_dir / STAGING_FOLDER
    if old_run.is_symlink():
        return [OLD_RUN_FOLDER]
    old_entries = sorted(old_run.iterdir()) if old_run.is_dir() else []
    users_files = [f"{OLD_RUN_FOLDER}/{name}" for name in list_users_files(old_run, old_entries)]
    has_staged_files = staging.is_dir() and any(staging.iterdir())
    is_folder_of_run = run_has_begun(output_dir) or run_has_begun(old_run)
    if has_staged_files and not is_folder_of_run:
        users_files.append(STAGING_FOLDER)
    return users_files
