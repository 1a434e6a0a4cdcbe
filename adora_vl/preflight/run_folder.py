"""The lock on a run's `output_dir`, and the checkpoint from which the run goes on."""

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
from adora_vl.checkpoint.writer import has_begun, holds_a_run, refuse_users_files
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder, written_to

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig

_Choice = TypeVar("_Choice")
# values of resume_from_checkpoint that do not name a checkpoint
_NO_FOLDERS = ("none", "auto", "true", "false")


class RunFolder:
    """The `output_dir` of one run.

    Collective: every rank calls every method. Rank 0 decides, and broadcasts its decision or its
    error.
    """

    def __init__(
        self,
        config: AdoraGRPOConfig,
        now: Fingerprint | Callable[[], Fingerprint],
        inputs: Sequence[tuple[str, str]],
    ) -> None:
        """Describe the folder; nothing is locked or written yet.

        `now`: the fingerprint of the run. It is a function where it may not be needed, because it
        reads all weights. `inputs`: keys, each with a folder that it names and the run reads.
        """
        self.path = Path(config.output_dir)
        self.overwrite = config.overwrite_output_dir
        self._is_main_process = config.process_index == 0
        self._ranks = config.world_size
        self._now = now
        self._inputs = inputs
        self._locks: list[FileLock] = []

    @cached_property
    def now(self) -> Fingerprint:
        """The fingerprint of the run, computed at its first use."""
        return self._now() if callable(self._now) else self._now

    def look(self, resume_from_checkpoint: object, *, data_known: bool = True) -> StartPoint:
        """Return where a run would start; nothing is locked or written.

        `resume_from_checkpoint`: as for `choose_start`. `data_known`: where it is false, nobody
        can say whether the folder holds the same run. Raises `UserError` as `take` does.
        """

        def choose() -> StartPoint:
            check_folder("output_dir", self.path)
            refuse_users_files(self.path, self.overwrite)
            if (self.path / LOCK).is_file():
                lock_output_dir(self.path).release()
            if not data_known:
                return StartPoint(None, [])
            names_a_folder = str(resume_from_checkpoint).lower() not in _NO_FOLDERS
            # the fingerprint takes a while, so it is computed only where it is compared
            now = self.now if checkpoints(self.path) or names_a_folder else {}
            return choose_start(
                self.path,
                resume_from_checkpoint=resume_from_checkpoint,
                overwrite=self.overwrite,
                current=now,
                inputs=self._inputs,
                clear=False,
            )

        return self._decide_together(choose)

    def take(self, resume_from_checkpoint: object, *, from_python: bool = False) -> StartPoint:
        """Lock the folder until `release`, and return where the run starts.

        `from_python`: None and false mean a new run, as in Transformers. Raises `UserError`, also
        where the ranks do not share the folder or do not have the same run.
        """

        def choose() -> tuple[StartPoint, Fingerprint, str]:
            with written_to("output_dir", self.path):
                run_has_begun = has_begun(self.path)
            # A folder that may be somebody else's gets no lock file before it was checked.
            if run_has_begun:
                self._locks.append(lock_output_dir(self.path))
            refuse_users_files(self.path, self.overwrite)
            # Locking twice is harmless: a process that has a lock gets the same one again.
            if self.path.is_dir():
                self._locks.append(lock_output_dir(self.path))
            if from_python and not resume_from_checkpoint and not self.overwrite:
                self._refuse_earlier_run()
            start = choose_start(
                self.path,
                resume_from_checkpoint=resume_from_checkpoint,
                overwrite=self.overwrite,
                current=self.now,
                inputs=self._inputs,
            )
            self._locks.append(lock_output_dir(self.path))
            (self.path / STOPPED_FILE).unlink(missing_ok=True)
            # Each rank looks for the token, which shows that all see the same disk.
            token = leave_token(self.path) if self._ranks > 1 else ""
            return start, self.now, token

        try:
            start, fingerprint_of_first, token = self._decide_together(choose)
            if self._ranks > 1:
                check_ranks(self.path, token=token, first=fingerprint_of_first, mine=self.now)
        except UserError:
            self.release()
            raise
        return start

    def _refuse_earlier_run(self) -> None:
        """Raise `UserError` if the folder holds a run that a new one would write over."""
        if not holds_a_run(self.path):
            return
        newest = next(iter(checkpoints(self.path)), None)
        if newest:
            content = f"{newest.name} of a run"
            goes_on = "train(resume_from_checkpoint=True) goes on, "
        else:
            content = "a finished run"
            goes_on = ""
        remedy = f"{goes_on}overwrite_output_dir=True replaces it, or choose another output_dir"
        raise UserError(f"output_dir: {str(self.path)!r} holds {content}; {remedy}")

    def release(self) -> None:
        """Unlock the folder. A second call does nothing."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def _decide_together(self, choose: Callable[[], _Choice]) -> _Choice:
        """Return what `choose` returns on rank 0, on every rank; its `UserError` too.

        Collective. An error is broadcast rather than raised on rank 0 alone, where the other
        ranks would wait for it forever.
        """
        choice: _Choice | None = None
        message = ""
        try:
            if self._is_main_process:
                choice = choose()
        except UserError as error:
            message = str(error)
        decision: list[Any] = [choice, message]
        if self._ranks > 1:
            broadcast_object_list(decision)
        message = decision[1]
        if message:
            raise UserError(message)
        agreed: _Choice = decision[0]
        return agreed
