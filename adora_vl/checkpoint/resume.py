"""Which checkpoint a run resumes from, or why it does not start."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from filelock import FileLock, Timeout

from adora_vl.checkpoint.fingerprint import Fingerprint, differences
from adora_vl.checkpoint.store import STAGING, clear_staging, facts_of, newest_valid, problem_of
from adora_vl.checkpoint.universal import shards_of
from adora_vl.checkpoint.writer import ASIDE, holds_a_run, of_a_run, own_files, some
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import refuse_dangling, written_to

LOCK = ".lock"  # in output_dir


def lock_output_dir(output_dir: Path) -> FileLock:
    """A lock on `output_dir` while this process lives.

    Raises `UserError` if another has it, or it cannot be made.
    """
    refuse_dangling("output_dir", output_dir)
    here = repr(str(output_dir))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output_dir / LOCK, is_singleton=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        remedy = "wait for it, end it, or choose another folder"
        raise UserError(f"output_dir: another run is writing to {here}; {remedy}") from error
    except OSError as error:
        why = f"cannot be made or written to ({error.strerror})"
        raise UserError(f"output_dir: {here} {why}; choose another folder") from error
    return lock


@dataclass(frozen=True)
class StartPoint:
    """Where the run begins (a checkpoint, or None for the first step), and what to tell the user
    about it.
    """

    checkpoint: str | None
    notes: list[str]
    replaces: bool = False  # whether an old run in `output_dir` is put aside when this one begins


def choose_start(
    output_dir: Path,
    wanted: object,
    overwrite: bool,
    now: Fingerprint,
    inputs: Sequence[tuple[str, str]] = (),
    *,
    clear: bool = True,
) -> StartPoint:
    """`wanted` is `resume_from_checkpoint`: a folder, `true`, `false`, or `auto` (None too), which
    resumes if `output_dir` holds a run with the same fingerprint, and starts at the first step if
    it holds none. `inputs`: keys and the folders that they name, which the run reads. `clear`: what
    a killed run has left half written. Raises `UserError` for another run, and for a checkpoint
    that is not whole. One process calls this.
    """
    word = str(wanted).lower()
    named = None if wanted is None or word in ("auto", "true", "false") else Path(str(wanted))
    for own in (output_dir / ASIDE, output_dir / STAGING):
        if named is not None and own.resolve() in named.resolve().parents:
            where = f"{str(named)!r} is in {str(own)!r}"
            raise UserError(
                f"resume_from_checkpoint: {where}, which a run clears; move it out of there"
            )
    if clear:
        clear_staging(output_dir)
    if overwrite:
        _refuse_to_replace(inputs, output_dir)
        return _start_over(output_dir, named=named, word=word, now=now)
    if named is not None:
        return _start_at(named, now)
    (found, damaged) = newest_valid(output_dir)
    here = repr(str(output_dir))
    skipped = [f"skipped {path}: {reason}" for path, reason in damaged]
    if found is None:
        if skipped:
            raise UserError(
                f"output_dir: no checkpoint in {here} is whole; {skipped[0]}; "
                f"{_or_anew(output_dir)}"
            )
        if word == "true":
            raise UserError(
                f"resume_from_checkpoint: true, but {here} holds no checkpoint-N folder"
            )
        if holds_a_run(output_dir):
            raise UserError(f"output_dir: {here} holds a finished run; {_or_anew(output_dir)}")
        return StartPoint(None, [])
    holds = f"{here} holds {found.name}"
    if word == "false":
        raise UserError(f"resume_from_checkpoint: false, but {holds}; {_or_anew(output_dir)}")
    before: Fingerprint = facts_of(found).get("fingerprint", {})
    changed = differences(before, now)
    if changed:
        _refuse_another_world(found, before, now)
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"output_dir: {holds} of another run: {changed[0]}{more}; set it back, "
            f"{_or_anew(output_dir)}"
        )
    return StartPoint(str(found), [*skipped, f"going on from {found}"])


def _or_anew(output_dir: Path) -> str:
    """The remedies for a folder that holds a run: another folder, or a new start, with what that
    deletes or refuses.
    """
    with written_to("output_dir", output_dir):
        own = own_files(output_dir)
        goes = [path.name for path in of_a_run(output_dir) if path.name not in own]
    first = f"move away {some(own)}, which no run is known to have written, and " if own else ""
    deletes = (
        f", which deletes {some(goes)} once the new run has a whole checkpoint" if goes else ""
    )
    return (
        f"choose another output_dir, or {first}start anew with --overwrite_output_dir true{deletes}"
    )


def _refuse_to_replace(inputs: Sequence[tuple[str, str]], output_dir: Path) -> None:
    """Raise `UserError` for a folder that the run reads and `overwrite_output_dir` would delete."""
    doomed = {output_dir.resolve(), *(path.resolve() for path in of_a_run(output_dir))}
    for key, name in inputs:
        place = Path(name).resolve()
        inside = [path for path in (place, *place.parents) if output_dir.resolve() in path.parents]
        where = (
            f"{key}: {name!r} is in {str(output_dir)!r}, whose run overwrite_output_dir: true "
            "replaces"
        )
        if doomed & {place, *inside}:
            raise UserError(f"{where}; copy it to another place, or choose another output_dir")


def _start_over(output_dir: Path, named: Path | None, word: str, now: Fingerprint) -> StartPoint:
    """The start with `overwrite_output_dir`.

    A checkpoint that the user named is used or refused, but never deleted.
    """
    inside = word == "true" or (
        named is not None and output_dir.resolve() in named.resolve().parents
    )
    asked = f"resume_from_checkpoint: {word if named is None else str(named)!r}"
    if inside:
        raise UserError(
            f"{asked} is of the run that overwrite_output_dir: true replaces; leave out one of "
            "the two, or choose another output_dir"
        )
    start = StartPoint(None, []) if named is None else _start_at(named, now)
    if not holds_a_run(output_dir):
        return start
    old = f"the run in {output_dir} ({some([path.name for path in of_a_run(output_dir)])})"
    note = (
        f"{old} is put aside, into {output_dir / ASIDE}, and deleted when this one has its first "
        "checkpoint"
    )
    return StartPoint(start.checkpoint, [*start.notes, note], replaces=True)


def _start_at(checkpoint: Path, now: Fingerprint) -> StartPoint:
    """The start from a checkpoint that the user named.

    It must be whole; settings that differ are reported.
    """
    where = f"resume_from_checkpoint: {str(checkpoint)!r}"
    if not (checkpoint / "trainer_state.json").is_file():
        raise UserError(f"{where} is no checkpoint folder (no trainer_state.json)")
    problem = problem_of(checkpoint)
    if problem:
        raise UserError(f"{where} is not whole: {problem}; name another one")
    before: Fingerprint = facts_of(checkpoint).get("fingerprint", {})
    _refuse_another_world(checkpoint, before, now)
    changed = [f"changed since then: {line}" for line in differences(before, now)]
    return StartPoint(str(checkpoint), [f"going on from {checkpoint}", *changed])


def _refuse_another_world(checkpoint: Path, before: Fingerprint, now: Fingerprint) -> None:
    """Raise `UserError` if the shards were written by another number of processes or in another
    ZeRO stage.
    """
    was, is_now = (
        {key: each.get(key) for key in ("processes", "sharding")} for each in (before, now)
    )
    where = f"resume_from_checkpoint: {str(checkpoint)!r} was written"
    export = f"python -m adora_vl.export {quote(str(checkpoint))} OUT"
    if was["sharding"] not in (None, is_now["sharding"]):
        raise UserError(
            f"{where} with sharding {was['sharding']} and this run has {is_now['sharding']}; "
            f"launch it as before, or begin anew from its weights: {export}, then "
            "--model_name_or_path OUT"
        )
    if shards_of(checkpoint) is not None and was["processes"] not in (None, is_now["processes"]):
        raise UserError(
            f"{where} by {was['processes']} processes and this run has {is_now['processes']}; "
            f"convert it: {export} --universal, then --resume_from_checkpoint OUT"
        )
