"""Writes the checkpoints of a run, and puts an older run aside until there is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint import store
from adora_vl.checkpoint.run_files import (
    OLD_RUN_FOLDER,
    WRITTEN_FILES_RECORD,
    has_complete_checkpoint,
    list_run_entries,
    refuse_users_files,
)
from adora_vl.checkpoint.store import STAGING_FOLDER
from adora_vl.utils.errors import DiskFullError, RunError, lost_contact_message
from adora_vl.utils.files import disk_is_full

if TYPE_CHECKING:
    from accelerate import Accelerator

_CHECKPOINT_PREFIX = "checkpoint"  # Transformers' PREFIX_CHECKPOINT_DIR, whose import takes seconds
# TRL makes this folder when the trainer is built, before the old run is moved, and never again.
_TRL_COMPLETIONS_FOLDER = "completions"


def move_old_run_aside(output_dir: Path) -> str | None:
    """Move the old run in a folder into a hidden subfolder, so that a new run can begin.

    No start resumes from there, even if the new run ends before its first checkpoint. In that case
    the next call deletes what the new run has left, and keeps the old run. One process calls this.

    Returns the hidden folder, or None if there was no old run. Raises `UserError` for files of the
    user's that have come since the folder was checked.
    """
    refuse_users_files(output_dir, overwrite=True)
    aside = output_dir / OLD_RUN_FOLDER
    if has_complete_checkpoint(output_dir):
        # The run in the folder is the one to keep. An even older one was left by a crash.
        shutil.rmtree(aside, ignore_errors=True)
    keeps_older_run = aside.is_dir()
    target = output_dir / STAGING_FOLDER / "dropped" if keeps_older_run else aside
    # `written.json` says which files are a run's. It is copied before anything moves: if this
    # process is killed halfway, both folders have it.
    if (output_dir / WRITTEN_FILES_RECORD).is_file():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(output_dir / WRITTEN_FILES_RECORD, target)
    for path in list_run_entries(output_dir):
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
        if path.name == _TRL_COMPLETIONS_FOLDER:
            # TRL has made it for the new run when its trainer was built, and expects it there.
            path.mkdir()
    if keeps_older_run:
        shutil.rmtree(target, ignore_errors=True)
    return str(aside) if aside.is_dir() else None


def delete_old_run(output_dir: Path) -> None:
    """Delete the old run that was moved aside, once the new one has a checkpoint."""
    shutil.rmtree(output_dir / OLD_RUN_FOLDER, ignore_errors=True)


# Writes the files of a checkpoint into a folder, and returns the metadata for its manifest.
WriteCheckpointFiles = Callable[[Path], dict[str, Any]]


class CheckpointWriter:
    """Writes the checkpoints of one run, so that each is either complete or absent.

    Every method but `describe_resume_point` is collective: all ranks call it together.
    """

    def __init__(
        self, output_dir: Path, max_checkpoints: int | None, accelerator: Accelerator
    ) -> None:
        """Create the writer; nothing is written yet.

        `max_checkpoints`: how many to keep, TRL's `save_total_limit`; None: all.
        """
        self.output_dir = output_dir
        self.max_checkpoints = max_checkpoints
        self.accelerator = accelerator
        # The optimizer step of the newest checkpoint that this process has written; None before it.
        self.last_saved_step: int | None = None
        # The checkpoint that this process resumed from, which the trainer sets; else None.
        self.resumed_from: str | None = None
        # The folder that TRL writes `checkpoint-N` into, during `write`; else None.
        self.staging: Path | None = None

    def write(self, step: int, write_files: WriteCheckpointFiles) -> None:
        """Write a checkpoint, and delete older ones beyond the limit.

        The files are written into a hidden folder, which becomes `checkpoint-N` when it is
        complete.

        `step`: the optimizer step N. `write_files`: writes the files of this rank, and returns
        metadata for the manifest. Raises `RunError` if a file cannot be written; older checkpoints
        are then as they were.
        """
        from accelerate.utils import gather_object

        name = f"{_CHECKPOINT_PREFIX}-{step}"
        self.staging = self.output_dir / STAGING_FOLDER
        staged_checkpoint = self.staging / name
        try:
            metadata = write_files(staged_checkpoint)
            # Each rank gives a file its final name when the file is complete. So all names are
            # final once all ranks are here.
            self.accelerator.wait_for_everyone()
            names_of_all_ranks = set(gather_object(store.file_names_below(staged_checkpoint)))
            if self.accelerator.is_main_process:
                store.publish_checkpoint(
                    staged_checkpoint,
                    final=self.output_dir / name,
                    metadata={**metadata, "step": step},
                    written_files=names_of_all_ranks,
                )
                delete_old_run(self.output_dir)
                store.delete_old_checkpoints(self.output_dir, self.max_checkpoints)
        except Exception as error:
            shutil.rmtree(staged_checkpoint, ignore_errors=True)
            if disk_is_full(error):
                raise DiskFullError(
                    f"{name} could not be written (no space left on the disk of "
                    f"{str(self.output_dir)!r}); older checkpoints are as they were; make room "
                    f"there, and {self.describe_resume_point()}"
                ) from None
            reason = lost_contact_message(error) or error
            raise RunError(
                f"{name} could not be written ({reason}); older checkpoints are as they were"
            ) from error
        finally:
            self.staging = None
        # No rank goes on before the checkpoint is complete.
        self.accelerator.wait_for_everyone()
        self.last_saved_step = step

    def ensure_checkpoint(self, step: int, save: Callable[[], None]) -> Path:
        """Return the checkpoint of the current step, which `save` writes unless it exists already.

        It is for a run that ends with an error.
        """
        if self.last_saved_step != step:
            save()
        # The first rank that raises an error ends the others, so all of them must have finished
        # writing.
        self.accelerator.wait_for_everyone()
        return self.output_dir / f"{_CHECKPOINT_PREFIX}-{step}"

    def describe_resume_point(self) -> str:
        """Return the end of an error: where the same command begins when it is started again."""
        newest = self.resumed_from
        if self.last_saved_step is not None:
            newest = f"{_CHECKPOINT_PREFIX}-{self.last_saved_step}"
        if newest is None:
            return "the same command starts at the first step, as there is no checkpoint yet"
        return f"the same command goes on from {newest}"
