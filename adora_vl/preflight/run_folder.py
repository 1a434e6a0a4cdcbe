"""Who writes into a run's `output_dir`, and from which checkpoint the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.utils import broadcast_object_list
from filelock import FileLock

from adora_vl.checkpoint.fingerprint import Fingerprint, check_ranks, leave_token
from adora_vl.checkpoint.resume import LOCK, StartPoint, choose_start, lock_output_dir
from adora_vl.checkpoint.stop import STOPPED_FILE
from adora_vl.checkpoint.store import checkpoints
from adora_vl.checkpoint.writer import begun, holds_a_run, refuse_own_files
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder, written_to

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig

_Found = TypeVar("_Found")


class RunFolder:
    """`output_dir` of one run.

    Every method is called by all ranks together: the first one decides, and all hear it.
    """

    def __init__(
        self,
        config: AdoraGRPOConfig,
        now: Fingerprint | Callable[[], Fingerprint],
        inputs: Sequence[tuple[str, str]],
    ) -> None:
        """`now`: of the run; a function where it may not be asked for, since it reads all weights.

        `inputs`: keys and the folders that they name, which the run reads.
        """
        self.path = Path(config.output_dir)
        self.overwrite = config.overwrite_output_dir
        self._first = config.process_index == 0
        self._ranks = config.world_size
        self._now = now
        self._inputs = inputs
        self._locks: list[FileLock] = []

    @cached_property
    def now(self) -> Fingerprint:
        return self._now() if callable(self._now) else self._now

    def look(self, wanted: object, *, data_known: bool = True) -> StartPoint:
        """Where a run would start, with nothing held or written.

        `wanted` as for `choose_start`. `data_known`: else it is not known whether this is the same
        run. Raises `UserError` as `take` does.
        """

        def choose() -> StartPoint:
            check_folder("output_dir", self.path)
            refuse_own_files(self.path, self.overwrite)
            if (self.path / LOCK).is_file():
                lock_output_dir(self.path).release()
            if not data_known:
                return StartPoint(None, [])
            compared = checkpoints(self.path) or str(wanted).lower() not in (
                "none",
                "auto",
                "true",
                "false",
            )
            now = self.now if compared else {}
            return choose_start(
                self.path,
                wanted=wanted,
                overwrite=self.overwrite,
                now=now,
                inputs=self._inputs,
                clear=False,
            )

        return self._all_hear(choose)

    def take(self, wanted: object, *, from_python: bool = False) -> StartPoint:
        """Hold the folder until `release`.

        Returns where the run starts. `from_python`: None and false mean a new run, as in
        Transformers. Raises `UserError`, also where the ranks do not share the folder or have not
        the same run.
        """

        def choose() -> tuple[StartPoint, Fingerprint, str]:
            with written_to("output_dir", self.path):
                ours = begun(self.path)
            if ours:  # else no lock is put into somebody's folder before it was looked at
                self._locks.append(lock_output_dir(self.path))
            refuse_own_files(self.path, self.overwrite)
            if self.path.is_dir():  # a lock that this process holds already is the same one
                self._locks.append(lock_output_dir(self.path))
            if from_python and not wanted and not self.overwrite and holds_a_run(self.path):
                found = next(iter(checkpoints(self.path)), None)
                goes_on = "train(resume_from_checkpoint=True) goes on, " if found else ""
                holds = (
                    f"{str(self.path)!r} holds "
                    f"{f'{found.name} of a run' if found else 'a finished run'}"
                )
                remedy = (
                    f"{goes_on}overwrite_output_dir=True replaces it, or choose another output_dir"
                )
                raise UserError(f"output_dir: {holds}; {remedy}")
            start = choose_start(
                self.path,
                wanted=wanted,
                overwrite=self.overwrite,
                now=self.now,
                inputs=self._inputs,
            )
            self._locks.append(lock_output_dir(self.path))
            (self.path / STOPPED_FILE).unlink(missing_ok=True)
            return start, self.now, leave_token(self.path) if self._ranks > 1 else ""

        try:
            start, first, token = self._all_hear(choose)
            if self._ranks > 1:
                check_ranks(self.path, token=token, first=first, mine=self.now)
        except UserError:
            self.release()
            raise
        return start

    def release(self) -> None:
        """Let others have the folder. Twice is the same as once."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def _all_hear(self, choose: Callable[[], _Found]) -> _Found:
        told: list[Any] = [None, ""]
        try:
            told[0] = choose() if self._first else None
        except UserError as error:
            told[1] = str(error)
        if self._ranks > 1:
            broadcast_object_list(told)
        if told[1]:
            raise UserError(told[1])
        heard: _Found = told[0]
        return heard
