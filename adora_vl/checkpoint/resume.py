"""Which checkpoint a run resumes from, or why it does not start."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from filelock import FileLock, Timeout

from adora_vl.checkpoint.fingerprint import Fingerprint, differences
from adora_vl.checkpoint.store import STAGING, clear_staging, facts_of, newest_valid, problem_of
from adora_vl.checkpoint.universal import shards_of
from adora_vl.checkpoint.writer import (
    ASIDE,
    first_names,
    holds_a_run,
    list_users_files,
    run_entries,
)
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import refuse_dangling, written_to

LOCK = ".lock"  # in output_dir


def lock_output_dir(output_dir: Path) -> FileLock:
    """Lock `output_dir` while this process lives.

    Raises `UserError` if another process has locked it, or if it cannot be made.
    """
    refuse_dangling("output_dir", output_dir)
    name = repr(str(output_dir))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output_dir / LOCK, is_singleton=True)
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
    """Where a run begins.

    `checkpoint`: its folder; None for the first step. `notes`: lines about it for the user.
    `replaces`: whether an old run in `output_dir` is put aside when this one begins.
    """

    checkpoint: str | None
    notes: list[str]
    replaces: bool = False


def choose_start(
    output_dir: Path,
    resume_from_checkpoint: object,
    overwrite: bool,
    current: Fingerprint,
    inputs: Sequence[tuple[str, str]] = (),
    *,
    clear: bool = True,
) -> StartPoint:
    """Choose where a run starts.

    `resume_from_checkpoint`: a folder, `true`, `false`, or `auto` (None too). `auto` resumes if
    `output_dir` holds a run with the same fingerprint, and starts at the first step if it holds
    none. `current`: the fingerprint of this run. `inputs`: keys, each with a folder that it names and
    the run reads. `clear`: delete what a killed run has left half written. Raises `UserError` for
    another run, and for a checkpoint that is not whole. One process calls this.
    """
    word = str(resume_from_checkpoint).lower()
    named = _named_checkpoint(resume_from_checkpoint)
    for cleared_folder in (output_dir / ASIDE, output_dir / STAGING):
        if named is not None and cleared_folder.resolve() in named.resolve().parents:
            raise UserError(
                f"resume_from_checkpoint: {str(named)!r} is in {str(cleared_folder)!r}, which a "
                "run clears; move it out of there"
            )
    if clear:
        clear_staging(output_dir)
    if overwrite:
        _refuse_to_replace(inputs, output_dir)
        return _start_over(output_dir, named=named, word=word, current=current)
    if named is not None:
        return _start_at(named, current)
    newest, damaged = newest_valid(output_dir)
    name = repr(str(output_dir))
    skipped = [f"skipped {path}: {reason}" for path, reason in damaged]
    if newest is None:
        if skipped:
            raise UserError(
                f"output_dir: no checkpoint in {name} is whole; {skipped[0]}; "
                f"{_remedies_for_old_run(output_dir)}"
            )
        if word == "true":
            raise UserError(
                f"resume_from_checkpoint: true, but {name} holds no checkpoint-N folder"
            )
        if holds_a_run(output_dir):
            raise UserError(
                f"output_dir: {name} holds a finished run; {_remedies_for_old_run(output_dir)}"
            )
        return StartPoint(None, [])
    holds = f"{name} holds {newest.name}"
    if word == "false":
        raise UserError(
            f"resume_from_checkpoint: false, but {holds}; {_remedies_for_old_run(output_dir)}"
        )
    saved: Fingerprint = facts_of(newest).get("fingerprint", {})
    changed_keys = differences(saved, current)
    if changed_keys:
        _refuse_other_shards(newest, saved, current)
        remaining = f" (and {len(changed_keys) - 1} more)" if len(changed_keys) > 1 else ""
        raise UserError(
            f"output_dir: {holds} of another run: {changed_keys[0]}{remaining}; set it back, "
            f"{_remedies_for_old_run(output_dir)}"
        )
    return StartPoint(str(newest), [*skipped, f"going on from {newest}"])


def _named_checkpoint(resume_from_checkpoint: object) -> Path | None:
    """Return the folder that the key names; None for `auto`, `true`, `false` and None."""
    word = str(resume_from_checkpoint).lower()
    if resume_from_checkpoint is None or word in ("auto", "true", "false"):
        return None
    return Path(str(resume_from_checkpoint))


def _remedies_for_old_run(output_dir: Path) -> str:
    """Return the remedies for a folder that holds a run, which are another folder or a new start.

    They name what a new start would delete, and which files of the user's it would refuse.
    """
    with written_to("output_dir", output_dir):
        users_files = list_users_files(output_dir)
        deleted = [path.name for path in run_entries(output_dir) if path.name not in users_files]
    first = ""
    if users_files:
        first = f"move away {first_names(users_files)}, which no run is known to have written, and "
    deletes = ""
    if deleted:
        deletes = f", which deletes {first_names(deleted)} once the new run has a whole checkpoint"
    return (
        f"choose another output_dir, or {first}start anew with --overwrite_output_dir true{deletes}"
    )


def _refuse_to_replace(inputs: Sequence[tuple[str, str]], output_dir: Path) -> None:
    """Raise `UserError` for a folder that the run reads and `overwrite_output_dir` would delete."""
    doomed = {output_dir.resolve(), *(path.resolve() for path in run_entries(output_dir))}
    for key, name in inputs:
        folder = Path(name).resolve()
        inside = [
            path for path in (folder, *folder.parents) if output_dir.resolve() in path.parents
        ]
        if doomed & {folder, *inside}:
            raise UserError(
                f"{key}: {name!r} is in {str(output_dir)!r}, whose run overwrite_output_dir: true "
                "replaces; copy it to another place, or choose another output_dir"
            )


def _start_over(
    output_dir: Path, named: Path | None, word: str, current: Fingerprint
) -> StartPoint:
    """Return the start with `overwrite_output_dir`.

    A checkpoint that the user named is used or refused, but never deleted.
    """
    is_replaced = word == "true" or (
        named is not None and output_dir.resolve() in named.resolve().parents
    )
    if is_replaced:
        raise UserError(
            f"resume_from_checkpoint: {word if named is None else str(named)!r} is of the run that "
            "overwrite_output_dir: true replaces; leave out one of "
            "the two, or choose another output_dir"
        )
    start = StartPoint(None, []) if named is None else _start_at(named, current)
    if not holds_a_run(output_dir):
        return start
    old = (
        f"the run in {output_dir} ({first_names([path.name for path in run_entries(output_dir)])})"
    )
    note = (
        f"{old} is put aside, into {output_dir / ASIDE}, and deleted when this one has its first "
        "checkpoint"
    )
    return StartPoint(start.checkpoint, [*start.notes, note], replaces=True)


def _start_at(checkpoint: Path, current: Fingerprint) -> StartPoint:
    """Return the start from a checkpoint that the user named.

    It must be whole; settings that differ are reported.
    """
    where = f"resume_from_checkpoint: {str(checkpoint)!r}"
    if not (checkpoint / "trainer_state.json").is_file():
        raise UserError(f"{where} is no checkpoint folder (no trainer_state.json)")
    problem = problem_of(checkpoint)
    if problem:
        raise UserError(f"{where} is not whole: {problem}; name another one")
    saved: Fingerprint = facts_of(checkpoint).get("fingerprint", {})
    _refuse_other_shards(checkpoint, saved, current)
    changed = [f"changed since then: {line}" for line in differences(saved, current)]
    return StartPoint(str(checkpoint), [f"going on from {checkpoint}", *changed])


def _refuse_other_shards(checkpoint: Path, saved: Fingerprint, current: Fingerprint) -> None:
    """Raise `UserError` for shards of another number of processes, or of another ZeRO stage."""
    saved_processes = saved.get("processes")
    saved_sharding = saved.get("sharding")
    processes = current.get("processes")
    sharding = current.get("sharding")
    where = f"resume_from_checkpoint: {str(checkpoint)!r} was written"
    export = f"python -m adora_vl.export {quote(str(checkpoint))} OUT"
    if saved_sharding not in (None, sharding):
        raise UserError(
            f"{where} with sharding {saved_sharding} and this run has {sharding}; "
            f"launch it as before, or begin anew from its weights: {export}, then "
            "--model_name_or_path OUT"
        )
    if shards_of(checkpoint) is not None and saved_processes not in (None, processes):
        raise UserError(
            f"{where} by {saved_processes} processes and this run has {processes}; "
            f"convert it: {export} --universal, then --resume_from_checkpoint OUT"
        )
