"""The lock on a run's `output_dir`, and the checkpoint from which the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from accelerate.utils import broadcast_object_list
from filelock import FileLock

from adora_vl.checkpoint.fingerprint import Fingerprint, check_ranks, create_token_file
from adora_vl.checkpoint.resume import (
    LOCK_FILE,
    InputFolder,
    StartPoint,
    choose_start_point,
    lock_output_dir,
)
from adora_vl.checkpoint.run_files import (
    has_run_to_replace,
    refuse_users_files,
    run_has_begun,
)
from adora_vl.checkpoint.stop import STOPPED_FILE
from adora_vl.checkpoint.store import list_checkpoints
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder, naming_write_errors

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig

_Decision = TypeVar("_Decision")
# The values of resume_from_checkpoint that name no checkpoint, as words.
_WORDS_FOR_NO_FOLDER = ("none", "auto", "true", "false")


class _LockedStart(NamedTuple):
    """What rank 0 broadcasts when it has locked `output_dir`.

    `token`: the name of a file in the folder by which other ranks recognise it; empty with one
    rank.
    """

    start_point: StartPoint
    fingerprint: Fingerprint
    token: str


class RunFolder:
    """The `output_dir` of one run.

    Collective: every rank calls every method. Rank 0 decides, and broadcasts its decision or its
    error.
    """

    def __init__(
        self,
        config: AdoraGRPOConfig,
        fingerprint: Fingerprint | Callable[[], Fingerprint],
        input_folders: Sequence[InputFolder],
    ) -> None:
        """Describe the folder; nothing is locked or written yet.

        Args:
            config: The run's config, which names the folder.
            fingerprint: The run's fingerprint, by which a checkpoint is recognised as its own. It
                may be a function, which is called only if the fingerprint is needed: computing it
                reads all weights.
            input_folders: Folders that the run reads, which it must not replace.
        """
        self.path = Path(config.output_dir)
        self.overwrite = config.overwrite_output_dir
        self._is_main_process = config.process_index == 0
        self._rank_count = config.world_size
        self._fingerprint = fingerprint
        self._input_folders = input_folders
        self._locks: list[FileLock] = []

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the run, computed at its first use."""
        if callable(self._fingerprint):
            return self._fingerprint()
        return self._fingerprint

    def inspect(self, resume_from_checkpoint: object, *, has_data: bool) -> StartPoint:
        """Return where a run would start, for a dry run; nothing is locked or written.

        `resume_from_checkpoint`: the value of the key: a checkpoint, or whether to resume from the
        newest one. `has_data`: whether the run's data set is here. If not, the run cannot be
        compared with a checkpoint, and the first step is returned.

        Raises `UserError` if a run could not start here, and if another one is running here.
        """

        def choose_start_without_lock() -> StartPoint:
            check_folder("output_dir", self.path)
            refuse_users_files(self.path, self.overwrite)
            if (self.path / LOCK_FILE).is_file():
                # Fails if another run has locked the folder.
                lock_output_dir(self.path).release()
            if not has_data:
                return StartPoint(checkpoint=None)
            # Values such as true or auto name no checkpoint.
            names_a_folder = str(resume_from_checkpoint).lower() not in _WORDS_FOR_NO_FOLDER
            # Computing the fingerprint takes a while. Without a checkpoint it is not compared.
            fingerprint: Fingerprint = {}
            if names_a_folder or list_checkpoints(self.path):
                fingerprint = self.fingerprint
            return choose_start_point(
                self.path,
                resume_from_checkpoint=resume_from_checkpoint,
                overwrite=self.overwrite,
                run_fingerprint=fingerprint,
                input_folders=self._input_folders,
                clears_staging=False,
            )

        return self._decide_on_rank_zero(choose_start_without_lock)

    def lock(self, resume_from_checkpoint: object, *, from_python: bool = False) -> StartPoint:
        """Lock the folder until `release`, and return where the run starts.

        `resume_from_checkpoint`: a checkpoint, or whether to resume from the newest one of the
        folder. `from_python`: whether Python's `train` calls this, where None and false mean a new
        run, as in Transformers.

        Raises `UserError`, also if the ranks do not share the folder or do not have the same run.
        """

        def lock_and_choose_start() -> _LockedStart:
            with naming_write_errors("output_dir", self.path):
                is_folder_of_run = run_has_begun(self.path)
            # A run's folder is locked before the check, which reads the run's files.
            if is_folder_of_run:
                self._locks.append(lock_output_dir(self.path))
            refuse_users_files(self.path, self.overwrite)
            # Any other folder may be the user's. It is locked only after the check, since locking
            # makes a file. For a run's folder this is a second lock, which is harmless.
            if self.path.is_dir():
                self._locks.append(lock_output_dir(self.path))
            # A new run of Python code must not write over an earlier one, unless it says so.
            if from_python and not resume_from_checkpoint and not self.overwrite:
                self._refuse_earlier_run()
            start_point = choose_start_point(
                self.path,
                resume_from_checkpoint=resume_from_checkpoint,
                overwrite=self.overwrite,
                run_fingerprint=self.fingerprint,
                input_folders=self._input_folders,
            )
            # This creates the folder if it does not exist, once nothing speaks against the run.
            self._locks.append(lock_output_dir(self.path))
            (self.path / STOPPED_FILE).unlink(missing_ok=True)
            # Each rank looks for the token's file, which shows that all see the same disk.
            token = create_token_file(self.path) if self._rank_count > 1 else ""
            return _LockedStart(start_point=start_point, fingerprint=self.fingerprint, token=token)

        try:
            locked_start = self._decide_on_rank_zero(lock_and_choose_start)
            if self._rank_count > 1:
                check_ranks(
                    self.path,
                    token=locked_start.token,
                    rank0_fingerprint=locked_start.fingerprint,
                    rank_fingerprint=self.fingerprint,
                )
        except UserError:
            self.release()
            raise
        return locked_start.start_point

    def _refuse_earlier_run(self) -> None:
        """Raise `UserError` if the folder has a run that a new one would write over."""
        if not has_run_to_replace(self.path):
            return
        newest = next(iter(list_checkpoints(self.path)), None)
        if newest is not None:
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

    def _decide_on_rank_zero(self, decide: Callable[[], _Decision]) -> _Decision:
        """Call `decide` on rank 0, and return its result on every rank.

        Collective. A `UserError` of `decide` is raised on every rank too. If it were raised on rank
        0 alone, the other ranks would wait forever.
        """
        decision: Any = None
        error_text = ""
        try:
            if self._is_main_process:
                decision = decide()
        except UserError as error:
            error_text = str(error)
        # `broadcast_object_list` replaces the entries on the other ranks.
        decision_and_error = [decision, error_text]
        if self._rank_count > 1:
            broadcast_object_list(decision_and_error)
        decision_of_rank_0: _Decision = decision_and_error[0]
        error_of_rank_0 = decision_and_error[1]
        if error_of_rank_0:
            raise UserError(error_of_rank_0)
        return decision_of_rank_0
