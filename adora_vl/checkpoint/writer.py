"""Writes the checkpoints of a run, and knows which files of its folder a run wrote.

Those files alone may be deleted with `--overwrite_output_dir`. An older run is put aside until the
new one has a checkpoint of its own. What tells that a run wrote a file:

checkpoint-N     by its manifest, which names its files the record       by its content:
metrics.jsonl, manifest.json, stopped.json, rollouts/, completions/ a final model    by
written.json: the hash of each saved file; during a save, the names of files that are not the run's
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from adora_vl.checkpoint import store
from adora_vl.checkpoint.store import (
    CHECKPOINT,
    MANIFEST,
    MARK,
    STAGING,
    checkpoints,
    facts_of,
    hashes,
    step_of,
)
from adora_vl.utils.errors import DiskFullError, RunError, UserError, lost_contact
from adora_vl.utils.files import disk_is_full, is_partial, read_object, replace_file, written_to

if TYPE_CHECKING:
    from accelerate import Accelerator

WRITTEN = "written.json"
_MADE_BY = {"made_by": "adora_vl.train"}
_STOPPED_KEYS = {"exit_code", "step", "checkpoint"}  # the keys of stopped.json
_MODEL_PATTERNS = (
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
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "training_args.bin",
    "trainer_state.json",
)
_MAX_SHOWN_NAMES = 5


def run_entries(folder: Path) -> list[Path]:
    """Return the entries of the folder whose names a run uses: checkpoints first, in order.

    Anything else there is the user's, and stays.
    """
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    checkpoint_folders = [path for path in entries if CHECKPOINT.fullmatch(path.name)]
    paths = sorted(checkpoint_folders, key=step_of)
    for pattern in (*_MODEL_PATTERNS, *_RECORD_NAMES, WRITTEN):
        paths += [path for path in entries if fnmatchcase(path.name, pattern)]
    return list(dict.fromkeys(paths))  # a name may fit several patterns


def model_entries(folder: Path) -> list[Path]:
    """Return the entries of a final model, and `written.json`."""
    patterns = (*_MODEL_PATTERNS, WRITTEN)
    paths = []
    for path in run_entries(folder):
        if any(fnmatchcase(path.name, pattern) for pattern in patterns):
            paths.append(path)
    return paths


def list_users_files(folder: Path, paths: Iterable[Path] | None = None) -> list[str]:
    """Return the files below `paths` that no run is known to have written.

    They are named as in the folder. `paths`: by default `run_entries`. Links are among them, because a
    run makes none. A folder `checkpoint-N` without a checkpoint's manifest is named as a whole.
    Raises `OSError` where a folder cannot be listed.
    """
    notes = _read_notes(folder)
    unknown: list[Path] = []
    if paths is None:
        paths = run_entries(folder)
    for path in paths:
        if CHECKPOINT.fullmatch(path.name):
            unknown += _users_files_of_checkpoint(path)
        else:
            for file in _files_below(path):
                name = file.relative_to(folder).as_posix()
                if not _is_written_by_run(file, name, notes):
                    unknown.append(file)
    return [path.relative_to(folder).as_posix() for path in unknown]


def first_names(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:_MAX_SHOWN_NAMES])
    more = len(names) - _MAX_SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


@contextmanager
def recording_saved_files(output_dir: Path, writes: bool) -> Iterator[None]:
    """Note in `written.json` what the block saves of a model into `output_dir`.

    `writes`: this process saves it. If the run is killed inside, whatever was not there before
    counts as the run's, so that it can resume. Raises `OSError`.
    """
    if not writes:
        yield
        return
    before = _model_files(output_dir)
    noted_files = _read_notes(output_dir).get("files", {})
    _write_notes(output_dir, others=[name for name in before if name not in noted_files])
    try:
        yield
    finally:
        after = _model_files(output_dir)
        changed = [
            output_dir / name
            for name, file_state in after.items()
            if before.get(name) != file_state
        ]
        remaining = {name: entry for name, entry in noted_files.items() if name in after}
        _write_notes(output_dir, files={**remaining, **hashes(output_dir, changed)})


def _write_notes(output_dir: Path, **notes: Any) -> None:
    """Write the notes on the files of the final model, in place of those of before."""
    replace_file(
        output_dir / WRITTEN, json.dumps({**_MADE_BY, **notes}, indent=2, sort_keys=True) + "\n"
    )


def _model_files(output_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return what changes when a file is written, for each file of a final model by its name.

    It is the file's inode, time of change and size.
    """
    state_by_name: dict[str, tuple[int, ...]] = {}
    for entry in model_entries(output_dir):
        if entry.name == WRITTEN:
            continue
        for path in _files_below(entry):
            if not path.is_symlink():
                stat = path.lstat()
                name = path.relative_to(output_dir).as_posix()
                state_by_name[name] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return state_by_name


def _files_below(path: Path) -> Iterator[Path]:
    """Yield the files in a folder and in its folders, or the file itself.

    A link is a file, wherever it leads.
    """
    if path.is_symlink() or not path.is_dir():
        yield path
    else:
        for inside in sorted(path.iterdir()):
            yield from _files_below(inside)


def _users_files_of_checkpoint(checkpoint: Path) -> list[Path]:
    """Return the files in a `checkpoint-N` that no run wrote.

    A damaged checkpoint is a run's too: its mark is not read.
    """
    files = list(_files_below(checkpoint))
    try:
        facts = facts_of(checkpoint)
        sealed_files: set[Path] = set()
        if "step" in facts:
            sealed_files = {checkpoint / name for name in (*facts["files"], MANIFEST, MARK)}
    except (OSError, ValueError, KeyError, TypeError):  # no manifest, or not one of ours
        sealed_files = set()
    if checkpoint.is_symlink() or not sealed_files:
        return [checkpoint] if files else []
    return [path for path in files if path.is_symlink() or path not in sealed_files]


def _is_written_by_run(path: Path, name: str, notes: dict[str, Any]) -> bool:
    """Return whether a run wrote this file as it is. `name` is its name in the run's folder."""
    if path.is_symlink() or not path.is_file():
        return False
    top, _, inside = name.partition("/")
    try:
        if top in _RECORD_NAMES:
            return _is_record_file(path, top, inside)
        if name == WRITTEN:
            return bool(notes)
        if "others" in notes:  # the run was killed while it saved
            return name not in notes["others"]
        entry = notes["files"].get(name)
        if entry is None or entry["bytes"] != path.stat().st_size:
            return False
        # read only where the size is the same, since a model is large
        return bool(hashes(path.parent, [path])[path.name] == entry)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False


def _read_notes(folder: Path) -> dict[str, Any]:
    """Return what `written.json` says; nothing where a run did not write it."""
    notes = read_object(folder / WRITTEN)
    return notes if notes.items() >= _MADE_BY.items() else {}


def is_manifest(path: Path) -> bool:
    """Return whether this is the `manifest.json` of a run, which is there from its beginning."""
    return read_object(path).items() >= _MADE_BY.items()


_RECORD_NAMES = ("metrics.jsonl", "manifest.json", "stopped.json", "rollouts", "completions")


def _is_record_file(path: Path, top: str, inside: str) -> bool:
    """Return whether a file of the record is a run's.

    `inside` is its name in the folder `top`, empty for a file.
    """
    if top == "rollouts":
        if re.fullmatch(r"rollouts-\d+-\d+\.parquet", inside):
            # a part has the run's settings in its metadata
            return b"adora_vl" in (pq.read_schema(path).metadata or {})
        # a diagram is named by its hash
        return is_partial(path) or re.fullmatch(r"_images/[0-9a-f]{16}\.png", inside) is not None
    if top == "completions":
        if not re.fullmatch(r"completions_\d{5,}\.parquet", inside):
            return False
        # TRL's tables have these columns
        return {"step", "prompt", "completion", "advantage"} <= set(pq.read_schema(path).names)
    if inside:
        return False
    if top == "metrics.jsonl":
        # a crash may have cut off a last line after others
        *lines, cut_line = path.read_bytes().split(b"\n")
        has_keys = all(json.loads(line).keys() >= {"step", "kind", "time"} for line in lines)
        return has_keys and (bool(lines) or not cut_line)
    if top == "manifest.json":
        return is_manifest(path)
    return read_object(path).keys() == _STOPPED_KEYS


_CHECKPOINT_PREFIX = "checkpoint"  # Transformers' PREFIX_CHECKPOINT_DIR, whose import takes seconds
ASIDE = ".replaced"
_FOLDER_OF_TRL = "completions"  # once, when the trainer is built: before the old run is put aside


def holds_a_run(output_dir: Path) -> bool:
    """Return whether the folder has a checkpoint or a model that a new run would replace."""
    return bool(checkpoints(output_dir)) or (output_dir / "trainer_state.json").is_file()


def has_begun(output_dir: Path) -> bool:
    """Return whether a training command has begun here, even if it came to no checkpoint."""
    return is_manifest(output_dir / "manifest.json") or any(
        (checkpoint / MARK).is_file() for checkpoint in checkpoints(output_dir)
    )


def refuse_users_files(output_dir: Path, overwrite: bool) -> None:
    """Raise `UserError` for files of the user's that this run would write over or delete.

    They are files that no run is known to have written. A run that resumes writes over the final
    model alone: it takes the rest of the folder as it is, except for the place of what is put
    aside.
    """
    with written_to("output_dir", output_dir):
        resumes = holds_a_run(output_dir) and has_begun(output_dir) and not overwrite
        replaced = model_entries(output_dir) if resumes else None
        users_files = [*list_users_files(output_dir, replaced), *_users_hidden_files(output_dir)]
    unknown = "which no run is known to have written and this one would write over or delete"
    remedy = "choose another output_dir, or move what is yours away"
    if users_files:
        raise UserError(
            f"output_dir: {str(output_dir)!r} holds {first_names(users_files)}, {unknown}; {remedy}"
        )


def _users_hidden_files(output_dir: Path) -> list[str]:
    """Return the user's own files in the hidden folders that a run clears."""
    aside = output_dir / ASIDE
    staging = output_dir / STAGING
    if aside.is_symlink():
        return [ASIDE]
    put_aside = sorted(aside.iterdir()) if aside.is_dir() else []
    users_files = [f"{ASIDE}/{name}" for name in list_users_files(aside, put_aside)]
    is_filled = staging.is_dir() and any(staging.iterdir())
    is_of_a_run = has_begun(output_dir) or has_begun(aside)
    if is_filled and not is_of_a_run:
        users_files.append(STAGING)
    return users_files


def set_aside(output_dir: Path) -> str | None:
    """Move the old run out of the way by renaming.

    Returns where it is now, or None if there was none. No start resumes from it, even if the new
    run ends before its first checkpoint; what such a run has left is deleted by the next call, the
    old one kept. One process calls this. Raises `UserError` for files of the user's that have come
    since.
    """
    refuse_users_files(output_dir, overwrite=True)
    aside = output_dir / ASIDE
    if any((checkpoint / MARK).is_file() for checkpoint in checkpoints(output_dir)):
        shutil.rmtree(aside, ignore_errors=True)  # an earlier run, which a crash has left here
    keep_older = aside.is_dir()
    target = output_dir / STAGING / "dropped" if keep_older else aside
    # a copy first: if this process is killed, both halves can be judged
    if (output_dir / WRITTEN).is_file():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(output_dir / WRITTEN, target)
    for path in run_entries(output_dir):
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
        if path.name == _FOLDER_OF_TRL:
            path.mkdir()
    if keep_older:
        shutil.rmtree(target, ignore_errors=True)
    return str(aside) if aside.is_dir() else None


def delete_aside(output_dir: Path) -> None:
    """Delete the old run. Called when the new one has a checkpoint to resume from."""
    shutil.rmtree(output_dir / ASIDE, ignore_errors=True)


# writes into this folder, and returns what the manifest says of it
Save = Callable[[Path], dict[str, Any]]


class CheckpointWriter:
    """Writes the checkpoints of one run.

    Every method but `where_to_go_on` is called by all ranks together.
    """

    def __init__(self, output_dir: Path, keep: int | None, accelerator: Accelerator) -> None:
        """Create the writer; nothing is written yet.

        `keep`: TRL's `save_total_limit`.
        """
        self.output_dir = output_dir
        self.keep = keep
        self.accelerator = accelerator
        self.saved_at: int | None = None  # the step of this run's newest checkpoint
        self.began_at: str | None = None  # the checkpoint that this process started from
        self.staging: Path | None = None  # where TRL writes `checkpoint-N`, while it does

    def write(self, step: int, save: Save) -> None:
        """Write a checkpoint.

        `save` writes its files; when all are there it appears, and older ones are deleted. Raises
        `RunError` if a file cannot be written; older checkpoints are then as they were.
        """
        from accelerate.utils import gather_object

        name = f"{_CHECKPOINT_PREFIX}-{step}"
        self.staging = self.output_dir / STAGING
        staged_checkpoint = self.staging / name
        try:
            facts = save(staged_checkpoint)
            # nobody has a file on the way to its name any more
            self.accelerator.wait_for_everyone()
            written_names = set(gather_object(store.names_in(staged_checkpoint)))
            if self.accelerator.is_main_process:
                store.publish(
                    staged_checkpoint,
                    final=self.output_dir / name,
                    facts={**facts, "step": step},
                    written=written_names,
                )
                delete_aside(self.output_dir)
                store.rotate(self.output_dir, self.keep)
        except Exception as error:
            shutil.rmtree(staged_checkpoint, ignore_errors=True)
            full = f"no space left on the disk of {str(self.output_dir)!r}"
            older = "older checkpoints are as they were"
            if disk_is_full(error):
                remedy = f"make room there, and {self.where_to_go_on()}"
                raise DiskFullError(
                    f"{name} could not be written ({full}); {older}; {remedy}"
                ) from None
            why = lost_contact(error) or error
            raise RunError(f"{name} could not be written ({why}); {older}") from error
        finally:
            self.staging = None
        self.accelerator.wait_for_everyone()
        self.saved_at = step

    def at(self, step: int, save: Callable[[], None]) -> Path:
        """Return the checkpoint of the current step. `save` is called unless it exists already."""
        if self.saved_at != step:
            save()
        # The first rank to raise ends the others, and one of them may still be writing.
        self.accelerator.wait_for_everyone()
        return self.output_dir / f"{_CHECKPOINT_PREFIX}-{step}"

    def where_to_go_on(self) -> str:
        """Return the end of a message: where a new start of the same command begins."""
        newest = self.began_at
        if self.saved_at is not None:
            newest = f"{_CHECKPOINT_PREFIX}-{self.saved_at}"
        if newest is None:
            return "there is no checkpoint yet: the same command starts at the first step"
        return f"the same command goes on from {newest}"
