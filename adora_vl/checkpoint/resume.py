"""Which checkpoint a run resumes from, or why it does not start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from filelock import FileLock, Timeout

from adora_vl.checkpoint.fingerprint import Fingerprint, differences
from adora_vl.checkpoint.set_aside import ASIDE, foreign, holds_a_run, of_a_run
from adora_vl.checkpoint.store import STAGING, clear_staging, facts_of, newest_valid, problem_of
from adora_vl.checkpoint.universal import shards_of
from adora_vl.errors import UserError

_ANEW = "--overwrite_output_dir true starts anew (its checkpoints go when the first new one is whole)"


def hold(output_dir: Path) -> FileLock:
    """A lock on `output_dir` for as long as this process lives: two runs in one folder would delete each other's work.

    Raises `UserError` if another process holds it, or if the folder cannot be made.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output_dir / ".lock", is_singleton=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UserError(
            f"output_dir: another run is writing to {str(output_dir)!r}; wait for it, end it, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(
            f"output_dir: {str(output_dir)!r} cannot be made or written to ({error.strerror}); choose another folder"
        ) from error
    return lock


def refuse_foreign(output_dir: Path) -> None:
    """Raise `UserError` for a folder that holds no run but what a run would write over."""
    stranger = foreign(output_dir)
    if stranger is not None:
        raise UserError(
            f"output_dir: {str(output_dir)!r} holds {stranger.name!r}, which no run wrote and this one would write "
            "over; choose another folder, or move it away"
        )


@dataclass(frozen=True)
class Start:
    """Where the run begins (a checkpoint, or None for the first step), and what to tell the user about it."""

    checkpoint: str | None
    notes: list[str]
    replaces: bool = False  # whether an old run in `output_dir` is put aside when this one begins


def choose_start(
    output_dir: Path, wanted: object, overwrite: bool, now: Fingerprint, inputs: Sequence[tuple[str, str]] = ()
) -> Start:
    """`wanted` is `resume_from_checkpoint`: a folder, `true`, `false`, or `auto` (None is that too). `inputs`: keys
    and the folders that they name, which the run reads.

    `auto` resumes if `output_dir` holds a run with the same fingerprint, and starts at the first step if it holds none.
    Raises `UserError` for another run, and for a checkpoint that is not whole. One process calls this.
    """
    word = str(wanted).lower()
    named = None if wanted is None or word in ("auto", "true", "false") else Path(str(wanted))
    for own in (output_dir / ASIDE, output_dir / STAGING):
        if named is not None and own.resolve() in named.resolve().parents:
            raise UserError(
                f"resume_from_checkpoint: {str(named)!r} is in {str(own)!r}, which a run clears; move it out of there"
            )
    clear_staging(output_dir)
    if overwrite:
        _refuse_to_replace(inputs, output_dir)
        return _start_over(output_dir, named, word, now)
    if named is not None:
        return _start_at(named, now)
    found = newest_valid(output_dir)
    skipped = [f"skipped {path}: {reason}" for path, reason in found.skipped]
    if found.checkpoint is None:
        if skipped:
            raise UserError(f"output_dir: no checkpoint in {str(output_dir)!r} is whole; {skipped[0]}; {_ANEW}")
        if word == "true":
            raise UserError(f"resume_from_checkpoint: true, but {str(output_dir)!r} holds no checkpoint-N folder")
        if holds_a_run(output_dir):
            raise UserError(f"output_dir: {str(output_dir)!r} holds a finished run; choose another, or {_ANEW}")
        return Start(None, [])
    if word == "false":
        raise UserError(
            f"resume_from_checkpoint: false, but {str(output_dir)!r} holds {found.checkpoint.name}; {_ANEW}"
        )
    before: Fingerprint = facts_of(found.checkpoint).get("fingerprint", {})
    changed = differences(before, now)
    if changed:
        _refuse_another_world(found.checkpoint, before, now)
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"output_dir: {str(output_dir)!r} holds {found.checkpoint.name} of another run: {changed[0]}{more}; choose "
            f"another output_dir, or {_ANEW}"
        )
    return Start(str(found.checkpoint), [*skipped, f"going on from {found.checkpoint}"])


def _refuse_to_replace(inputs: Sequence[tuple[str, str]], output_dir: Path) -> None:
    """Raise `UserError` for a folder that the run reads and `overwrite_output_dir` would delete."""
    doomed = {output_dir.resolve(), *(path.resolve() for path in of_a_run(output_dir))}
    for key, name in inputs:
        place = Path(name).resolve()
        inside = [path for path in (place, *place.parents) if output_dir.resolve() in path.parents]
        if doomed & {place, *inside}:
            raise UserError(
                f"{key}: {name!r} is in {str(output_dir)!r}, whose run overwrite_output_dir: true replaces; copy it to "
                "another place, or choose another output_dir"
            )


def _start_over(output_dir: Path, named: Path | None, word: str, now: Fingerprint) -> Start:
    """The start with `overwrite_output_dir`. A checkpoint that the user named is used or refused, but never deleted."""
    if word == "true" or (named is not None and output_dir.resolve() in named.resolve().parents):
        raise UserError(
            f"resume_from_checkpoint: {word if named is None else str(named)!r} is of the run that "
            "overwrite_output_dir: true replaces; leave out one of the two, or choose another output_dir"
        )
    start = Start(None, []) if named is None else _start_at(named, now)
    if not holds_a_run(output_dir):
        return start
    note = f"the run in {output_dir} is put aside, into {output_dir / ASIDE}, until this one has its first checkpoint"
    return Start(start.checkpoint, [*start.notes, note], replaces=True)


def _start_at(checkpoint: Path, now: Fingerprint) -> Start:
    """The start from a checkpoint that the user named. It must be whole; settings that differ are reported."""
    if not (checkpoint / "trainer_state.json").is_file():
        raise UserError(f"resume_from_checkpoint: {str(checkpoint)!r} is no checkpoint folder (no trainer_state.json)")
    problem = problem_of(checkpoint)
    if problem:
        raise UserError(f"resume_from_checkpoint: {str(checkpoint)!r} is not whole: {problem}; name another one")
    before: Fingerprint = facts_of(checkpoint).get("fingerprint", {})
    _refuse_another_world(checkpoint, before, now)
    changed = differences(before, now)
    return Start(str(checkpoint), [f"going on from {checkpoint}", *(f"changed since then: {line}" for line in changed)])


def _refuse_another_world(checkpoint: Path, before: Fingerprint, now: Fingerprint) -> None:
    """Raise `UserError` if the shards were written by another number of processes or in another ZeRO stage."""
    was, is_now = ({key: each.get(key) for key in ("processes", "sharding")} for each in (before, now))
    where = f"resume_from_checkpoint: {str(checkpoint)!r} was written"
    if was["sharding"] not in (None, is_now["sharding"]):
        raise UserError(
            f"{where} with sharding {was['sharding']} and this run has {is_now['sharding']}; launch it as before, or "
            f"begin anew from its weights: python -m adora_vl.export {quote(str(checkpoint))} OUT, then "
            "--model_name_or_path OUT"
        )
    if shards_of(checkpoint) is not None and was["processes"] not in (None, is_now["processes"]):
        raise UserError(
            f"{where} by {was['processes']} processes and this run has {is_now['processes']}; convert it: python -m "
            f"adora_vl.export {quote(str(checkpoint))} OUT --universal, then --resume_from_checkpoint OUT"
        )
