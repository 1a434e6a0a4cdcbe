"""Which checkpoint a run resumes from, or why it does not start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from filelock import FileLock, Timeout

from adora_vl.checkpoint.fingerprint import Fingerprint, fingerprint_differences
from adora_vl.checkpoint.run_files import (
    OLD_RUN_FOLDER,
    has_run_to_replace,
    list_first_names,
    list_run_entries,
    list_users_files,
)
from adora_vl.checkpoint.store import (
    STAGING_FOLDER,
    clear_staging,
    describe_checkpoint_damage,
    find_newest_valid_checkpoint,
    read_checkpoint_manifest,
)
from adora_vl.checkpoint.universal import shard_folder_of
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors, refuse_dangling

LOCK_FILE = ".lock"  # in output_dir


def lock_output_dir(output_dir: Path) -> FileLock:
    """Lock `output_dir` against other runs until the lock is released or this process ends.

    The folder is made if it does not exist. Raises `UserError` if another process has locked it,
    or if it cannot be made.
    """
    refuse_dangling("output_dir", output_dir)
    name = repr(str(output_dir))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        # A singleton: locking the folder again in this process returns the same lock.
        lock = FileLock(output_dir / LOCK_FILE, is_singleton=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        remedy = "wait for it, end it, or choose another folder"
        raise UserError(f"output_dir: another run is writing to {name}; {remedy}") from error
    except OSError as error:
        raise UserError(
            f"output_dir: {name} cannot be made or written to ({error.strerror}); choose another "
            "folder"
        ) from error
    return lock


@dataclass(frozen=True)
class StartPoint:
    """Where a run begins."""

    checkpoint: str | None = None
    """The folder of the checkpoint that it resumes from; None: it begins at the first step."""
    notes: Sequence[str] = ()
    """Lines about this for the user."""
    replaces_old_run: bool = False
    """Whether an old run in `output_dir` is moved aside when this one begins."""


class InputFolder(NamedTuple):
    """A folder that a run reads."""

    key: str
    """The config key that names it."""
    name: str
    """Its path or hub id."""


def choose_start_point(
    output_dir: Path,
    resume_from_checkpoint: object,
    overwrite: bool,
    run_fingerprint: Fingerprint,
    input_folders: Sequence[InputFolder],
    *,
    clears_staging: bool = True,
) -> StartPoint:
    """Choose where a run starts: at the first step or from a checkpoint. Nothing is started yet.

    In a distributed run one process alone calls this.

    Args:
        output_dir: The folder that the run writes to.
        resume_from_checkpoint: The folder of a checkpoint, or one of the words `true`, `false` and
            `auto`. None is `auto`: the run resumes if `output_dir` has checkpoints of the same
            run, and starts at the first step if it has none.
        overwrite: Whether the run replaces an older one in `output_dir`.
        run_fingerprint: The run's fingerprint: every setting that influences its steps. A
            checkpoint with another fingerprint is of another run.
        input_folders: Folders that the run reads, which it must not delete.
        clears_staging: Whether to delete the half-written files of a run that was killed.

    Raises `UserError` if `output_dir` has another run, or a checkpoint is damaged.
    """
    user_checkpoint = _parse_checkpoint_path(resume_from_checkpoint)
    if user_checkpoint is not None:
        _refuse_cleared_folder(user_checkpoint, output_dir)
    if clears_staging:
        clear_staging(output_dir)
    resume_word = str(resume_from_checkpoint).lower()
    if overwrite:
        _refuse_deleting_inputs(input_folders, output_dir)
        return _start_replacing_old_run(
            output_dir, user_checkpoint, resume_word=resume_word, run_fingerprint=run_fingerprint
        )
    if user_checkpoint is not None:
        return _start_from_named_checkpoint(user_checkpoint, run_fingerprint)
    return _start_from_newest(output_dir, resume_word=resume_word, run_fingerprint=run_fingerprint)


def _parse_checkpoint_path(resume_from_checkpoint: object) -> Path | None:
    """Return the folder that `resume_from_checkpoint` names, or None if it names none.

    The words `auto`, `true` and `false`, and None, leave it to the run to find a checkpoint.
    """
    resume_word = str(resume_from_checkpoint).lower()
    if resume_from_checkpoint is None or resume_word in ("auto", "true", "false"):
        return None
    if not str(resume_from_checkpoint).strip():
        # A path of it would be the current folder.
        raise UserError(
            "resume_from_checkpoint: '' names no checkpoint; name its folder, or write auto"
        )
    return Path(str(resume_from_checkpoint))


def _refuse_cleared_folder(checkpoint: Path, output_dir: Path) -> None:
    """Raise `UserError` for a checkpoint in one of the hidden folders that a run deletes."""
    for cleared_folder in (output_dir / OLD_RUN_FOLDER, output_dir / STAGING_FOLDER):
        if cleared_folder.resolve() in checkpoint.resolve().parents:
            raise UserError(
                f"resume_from_checkpoint: {str(checkpoint)!r} is in {str(cleared_folder)!r}, which "
                "a run clears; move it out of there"
            )


def _start_from_newest(
    output_dir: Path, *, resume_word: str, run_fingerprint: Fingerprint
) -> StartPoint:
    """Return the start of a run that resumes from the newest checkpoint in its folder, if any.

    Args:
        output_dir: The run's folder.
        resume_word: `true`: there has to be a checkpoint. `false`: there must be none. Anything
            else allows both.
        run_fingerprint: The run's fingerprint, its settings that influence the steps.

    Raises `UserError` if these do not fit, or the folder has another run.
    """
    name = repr(str(output_dir))
    newest, damaged_checkpoints = find_newest_valid_checkpoint(output_dir)
    skipped = [f"skipped {damaged.path}: {damaged.problem}" for damaged in damaged_checkpoints]
    if newest is None:
        if skipped:
            raise UserError(
                f"output_dir: no checkpoint in {name} is whole; {skipped[0]}; "
                f"{_remedy_for_old_run(output_dir)}"
            )
        if resume_word == "true":
            raise UserError(
                f"resume_from_checkpoint: true, but {name} holds no checkpoint-N folder"
            )
        if has_run_to_replace(output_dir):
            raise UserError(
                f"output_dir: {name} holds a finished run; {_remedy_for_old_run(output_dir)}"
            )
        return StartPoint(checkpoint=None)
    contents = f"{name} holds {newest.name}"
    if resume_word == "false":
        raise UserError(
            f"resume_from_checkpoint: false, but {contents}; {_remedy_for_old_run(output_dir)}"
        )
    checkpoint_fingerprint: Fingerprint = read_checkpoint_manifest(newest).get("fingerprint", {})
    changed_keys = fingerprint_differences(checkpoint_fingerprint, run_fingerprint)
    if changed_keys:
        # Another number of processes has an error of its own, with the command that converts.
        _refuse_incompatible_shards(newest, checkpoint_fingerprint, run_fingerprint)
        remaining = f" (and {len(changed_keys) - 1} more)" if len(changed_keys) > 1 else ""
        raise UserError(
            f"output_dir: {contents} of another run: {changed_keys[0]}{remaining}; set it back, "
            f"{_remedy_for_old_run(output_dir)}"
        )
    return StartPoint(checkpoint=str(newest), notes=[*skipped, f"going on from {newest}"])


def _remedy_for_old_run(output_dir: Path) -> str:
    """Return the end of an error about a folder that has a run: what the user can do about it.

    That is to choose another folder, or to replace the run. The text names what would be deleted
    then, and the user's own files in the folder, which have to be moved away first.
    """
    with naming_write_errors("output_dir", output_dir):
        users_files = list_users_files(output_dir)
        deleted = [
            path.name for path in list_run_entries(output_dir) if path.name not in users_files
        ]
    move_away = ""
    if users_files:
        names = list_first_names(users_files)
        move_away = f"move away {names}, which no run is known to have written, and "
    deletes = ""
    if deleted:
        names = list_first_names(deleted)
        deletes = f", which deletes {names} once the new run has a whole checkpoint"
    return (
        f"choose another output_dir, or {move_away}start anew with --overwrite_output_dir "
        f"true{deletes}"
    )


def _refuse_deleting_inputs(input_folders: Sequence[InputFolder], output_dir: Path) -> None:
    """Raise `UserError` for a folder that the run reads and `overwrite_output_dir` would delete.

    `input_folders`: folders that the run reads, such as a model that an earlier run has left here.
    """
    resolved_dir = output_dir.resolve()
    deleted_paths = {path.resolve() for path in list_run_entries(output_dir)}
    for key, name in input_folders:
        folder = Path(name).resolve()
        # A parent outside of output_dir is the target of a link. Deleting the run would delete the
        # link alone.
        parents_inside = [parent for parent in folder.parents if resolved_dir in parent.parents]
        is_below_deleted = any(parent in deleted_paths for parent in parents_inside)
        if folder == resolved_dir or folder in deleted_paths or is_below_deleted:
            raise UserError(
                f"{key}: {name!r} is in {str(output_dir)!r}, whose run overwrite_output_dir: true "
                "replaces; copy it to another place, or choose another output_dir"
            )


def _start_replacing_old_run(
    output_dir: Path,
    user_checkpoint: Path | None,
    *,
    resume_word: str,
    run_fingerprint: Fingerprint,
) -> StartPoint:
    """Return the start of a run that replaces the one in its folder (`overwrite_output_dir`).

    Args:
        output_dir: The run's folder.
        user_checkpoint: The checkpoint that the user named; None: start at the first step.
        resume_word: `resume_from_checkpoint` as a word.
        run_fingerprint: The run's fingerprint, its settings that influence the steps.

    Raises `UserError` for a checkpoint of the run that would be replaced. Otherwise the checkpoint
    that the user named would be deleted.
    """
    user_value = resume_word
    is_of_old_run = resume_word == "true"  # `true` means a checkpoint of the run in the folder
    if user_checkpoint is not None:
        user_value = str(user_checkpoint)
        is_of_old_run = output_dir.resolve() in user_checkpoint.resolve().parents
    if is_of_old_run:
        raise UserError(
            f"resume_from_checkpoint: {user_value!r} is of the run that overwrite_output_dir: true "
            "replaces; leave out one of the two, or choose another output_dir"
        )
    start = StartPoint(checkpoint=None)
    if user_checkpoint is not None:
        start = _start_from_named_checkpoint(user_checkpoint, run_fingerprint)
    if not has_run_to_replace(output_dir):
        return start
    old_names = list_first_names([path.name for path in list_run_entries(output_dir)])
    note = (
        f"the run in {output_dir} ({old_names}) is put aside, into "
        f"{output_dir / OLD_RUN_FOLDER}, and "
        "deleted when this one has its first checkpoint"
    )
    return replace(start, notes=[*start.notes, note], replaces_old_run=True)


def _start_from_named_checkpoint(checkpoint: Path, run_fingerprint: Fingerprint) -> StartPoint:
    """Return the start from a checkpoint that the user named.

    Settings that differ from the checkpoint's are only reported, since the user asked for it.
    `run_fingerprint`: the run's fingerprint. Raises `UserError` for a checkpoint that is damaged,
    or was written by another number of processes.
    """
    error_prefix = f"resume_from_checkpoint: {str(checkpoint)!r}"
    if not (checkpoint / "trainer_state.json").is_file():
        raise UserError(
            f"{error_prefix} is no checkpoint folder (no trainer_state.json); name one, such as "
            "runs/first/checkpoint-50, or write auto"
        )
    problem = describe_checkpoint_damage(checkpoint)
    if problem:
        raise UserError(f"{error_prefix} is not whole: {problem}; name another one")
    checkpoint_fingerprint: Fingerprint = read_checkpoint_manifest(checkpoint).get(
        "fingerprint", {}
    )
    _refuse_incompatible_shards(checkpoint, checkpoint_fingerprint, run_fingerprint)
    changed = [
        f"changed since then: {line}"
        for line in fingerprint_differences(checkpoint_fingerprint, run_fingerprint)
    ]
    return StartPoint(checkpoint=str(checkpoint), notes=[f"going on from {checkpoint}", *changed])


def _refuse_incompatible_shards(
    checkpoint: Path, checkpoint_fingerprint: Fingerprint, run_fingerprint: Fingerprint
) -> None:
    """Raise `UserError` if DeepSpeed could not load a checkpoint's shards in this run.

    It cannot load them with another ZeRO stage or another number of processes.
    `checkpoint_fingerprint`, `run_fingerprint`: the fingerprints of the checkpoint and of this run.
    """
    saved_processes = checkpoint_fingerprint.get("processes")
    saved_sharding = checkpoint_fingerprint.get("sharding")
    processes = run_fingerprint.get("processes")
    sharding = run_fingerprint.get("sharding")
    error_prefix = f"resume_from_checkpoint: {str(checkpoint)!r} was written"
    export = f"python -m adora_vl.export {quote(str(checkpoint))} OUT"
    # A value of None is missing in the checkpoint's fingerprint, and is not compared.
    if saved_sharding not in (None, sharding):
        raise UserError(
            f"{error_prefix} with sharding {saved_sharding} and this run has {sharding}; "
            f"launch it as before, or begin anew from its weights: {export}, then "
            "--model_name_or_path OUT"
        )
    if shard_folder_of(checkpoint) is not None and saved_processes not in (None, processes):
        raise UserError(
            f"{error_prefix} by {saved_processes} processes and this run has {processes}; "
            f"convert it: {export} --universal, then --resume_from_checkpoint OUT"
        )
