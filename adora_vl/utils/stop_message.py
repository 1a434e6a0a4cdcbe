"""The line of a run that stops: in which step, why, and how it goes on."""

from pathlib import Path


def stop_message_with_checkpoint(
    step: int, reason: str, *, checkpoint: Path | str | None, remedy: str = ""
) -> str:
    """Return the message of a run that stops before a step has changed anything.

    It says in which step, why, and how to go on. The caller saves the checkpoint, on all ranks
    together: saving is collective, so no branch that one rank alone takes may ask for this line.

    Args:
        step: optimizer steps that have been made; the line names the next one.
        reason: what has happened. If there is no `remedy`, the reason has to end with what to do.
        checkpoint: the folder to go on from; None where no training has begun.
        remedy: what to do first, as a sentence without its full stop.
    """
    line = f"step {step + 1}: {reason}"
    if remedy:
        line += f". Nothing of this step was applied. {remedy}"
    if checkpoint is None:
        return line
    return f"{line}, and go on with --resume_from_checkpoint {checkpoint}"


def stop_message(step: int, reason: str, resume_point: str) -> str:
    """Return the message of a run that stops within a step, which may have changed something.

    Args:
        step: optimizer steps that have been made; the line names the next one.
        reason: what has happened.
        resume_point: where a new start of the same command begins, in the words of
            `CheckpointWriter`.
    """
    return f"step {step + 1}: {reason}; {resume_point}"
