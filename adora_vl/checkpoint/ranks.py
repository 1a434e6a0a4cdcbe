"""Before the first step of several processes: do all of them see one output_dir, and were they all given the same run?

A checkpoint is one folder into which every rank writes its part. Machines whose disks are not shared would each keep
the parts of their own ranks, and none of them could be resumed from.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import gather_object

from adora_vl.checkpoint.fingerprint import Fingerprint, differences
from adora_vl.errors import UserError
from adora_vl.files import NFS_DELAY_S, appears

_PREFIX = ".seen-by-all-"


@dataclass(frozen=True)
class Seen:
    """What one rank has found: its machine, whether output_dir is the first rank's, and what it was given otherwise."""

    machine: str
    shares: bool
    differs: list[str]


def leave_token(output_dir: Path) -> str:
    """Leave a file that the other ranks look for, and return its name. The first rank calls this. Raises `OSError`."""
    for forgotten in output_dir.glob(f"{_PREFIX}*"):
        forgotten.unlink(missing_ok=True)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    (output_dir / name).touch()
    return name


def check_ranks(
    output_dir: Path, token: str, first: Fingerprint, mine: Fingerprint, *, patience_s: float = NFS_DELAY_S
) -> None:
    """Raise `UserError` on all ranks where one of them does not see the `token` of the first rank in `output_dir`, or
    has another fingerprint than the `first` rank. All ranks call this together.
    """
    seen = Seen(socket.gethostname(), appears(output_dir / token, patience_s), differences(first, mine))
    everyone: list[Seen] = gather_object([seen])
    with contextlib.suppress(OSError):
        (output_dir / token).unlink(missing_ok=True)
    problem = problem_among(everyone, output_dir)
    if problem is not None:
        raise UserError(problem)


def problem_among(everyone: Sequence[Seen], output_dir: Path) -> str | None:
    """What is wrong with what the ranks have found, listed in their order; None if nothing is."""
    for rank, seen in enumerate(everyone):
        where = f"on {seen.machine} (rank {rank})"
        if not seen.shares:
            return (
                f"output_dir: {str(output_dir)!r} {where} is not the folder that rank 0 has on {everyone[0].machine}; "
                "all machines write into one checkpoint, so name a folder on a disk that they share, by the same path"
            )
        if seen.differs:
            more = f" (and {len(seen.differs) - 1} more)" if len(seen.differs) > 1 else ""
            return (
                f"{where} the run is not the one of rank 0: {seen.differs[0]}{more}; start every machine with the same "
                "arguments, data and model"
            )
    return None
