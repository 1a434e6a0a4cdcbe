"""Writes the checkpoints of a run, and puts an older run aside until the new one has a checkpoint of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.store import MARK, STAGING, checkpoints, names_in, publish, rotate
from adora_vl.checkpoint.written import WRITTEN, is_manifest, model_of_a_run, of_a_run, own_files, some
from adora_vl.utils.errors import DiskFullError, RunError, lost_contact, refuse
from adora_vl.utils.files import disk_is_full, written_to

if TYPE_CHECKING:
    from accelerate import Accelerator


_PREFIX = "checkpoint"  # Transformers' PREFIX_CHECKPOINT_DIR, whose import takes seconds
ASIDE = ".replaced"
_MADE_BY_TRL = "completions"  # once, when the trainer is built: before the old run is put aside


def holds_a_run(output_dir: Path) -> bool:
    """Whether the folder holds work that a new run would replace: a checkpoint or a finished model."""
    return bool(checkpoints(output_dir)) or (output_dir / "trainer_state.json").is_file()


def begun(output_dir: Path) -> bool:
    """Whether a training command has begun here, even if it came to no checkpoint."""
    return is_manifest(output_dir / "manifest.json") or any((one / MARK).is_file() for one in checkpoints(output_dir))


def refuse_own_files(output_dir: Path, overwrite: bool) -> None:
    """Raise `UserError` for what no run is known to have written, where this one would write over it or delete it.

    A run that resumes writes over the final model alone: it takes the rest of the folder as it is, except for the
    place of what is put aside.
    """
    with written_to("output_dir", output_dir):
        resumes = holds_a_run(output_dir) and begun(output_dir) and not overwrite
        replaced = model_of_a_run(output_dir) if resumes else None
        own = [*own_files(output_dir, replaced), *_own_hidden(output_dir)]
    unknown = "which no run is known to have written and this one would write over or delete"
    remedy = "choose another output_dir, or move what is yours away"
    refuse((own, f"output_dir: {str(output_dir)!r} holds {some(own)}, {unknown}; {remedy}"))


def _own_hidden(output_dir: Path) -> list[str]:
    """The user's own files in the hidden folders that a run clears."""
    aside, staging = output_dir / ASIDE, output_dir / STAGING
    if aside.is_symlink():
        return [ASIDE]
    put_aside = sorted(aside.iterdir()) if aside.is_dir() else []
    own = [f"{ASIDE}/{name}" for name in own_files(aside, put_aside)]
    unknown = staging.is_dir() and any(staging.iterdir()) and not (begun(output_dir) or begun(aside))
    return [*own, STAGING] if unknown else own


def set_aside(output_dir: Path) -> str | None:
    """Move the old run out of the way by renaming. Returns where it is now, or None if there was no run.

    No start resumes from the run that was put aside, even if the new run ends before its first checkpoint. What such an
    unfinished run has left is deleted by the next call; the old run is kept. One process calls this. Raises `UserError`
    for files of the user's that have come since the start.
    """
    refuse_own_files(output_dir, overwrite=True)
    aside = output_dir / ASIDE
    if any((checkpoint / MARK).is_file() for checkpoint in checkpoints(output_dir)):
        shutil.rmtree(aside, ignore_errors=True)  # an earlier run, which a crash has left here
    keep_older = aside.is_dir()
    target = output_dir / STAGING / "dropped" if keep_older else aside
    if (output_dir / WRITTEN).is_file():  # a copy first: if this process is killed, both halves can be judged
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(output_dir / WRITTEN, target)
    for path in of_a_run(output_dir):
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
        if path.name == _MADE_BY_TRL:
            path.mkdir()
    if keep_older:
        shutil.rmtree(target, ignore_errors=True)
    return str(aside) if aside.is_dir() else None


def delete_aside(output_dir: Path) -> None:
    """Delete the old run. Called when the new one has a checkpoint to resume from."""
    shutil.rmtree(output_dir / ASIDE, ignore_errors=True)


Save = Callable[[Path], dict[str, Any]]  # writes into this folder, and returns what the manifest says of it


class CheckpointWriter:
    """Writes the checkpoints of one run. Every method but `where_to_go_on` is called by all ranks together."""

    def __init__(self, output_dir: Path, keep: int | None, accelerator: Accelerator) -> None:
        """`keep`: TRL's `save_total_limit`."""
        self.output_dir, self.keep = output_dir, keep
        self.accelerator = accelerator
        self.saved_at: int | None = None  # the step of this run's newest checkpoint
        self.began_at: str | None = None  # the checkpoint that this process started from
        self.staging: Path | None = None  # where TRL writes `checkpoint-N`, while it does

    def write(self, step: int, save: Save) -> None:
        """Write a checkpoint. `save` writes its files; when all are there it appears, and older ones are deleted.

        Raises `RunError` if a file cannot be written. Older checkpoints are then as they were.
        """
        from accelerate.utils import gather_object

        name = f"{_PREFIX}-{step}"
        self.staging = staging = self.output_dir / STAGING
        try:
            facts = save(staging / name)
            self.accelerator.wait_for_everyone()  # nobody has a file on the way to its name any more
            written = set(gather_object(names_in(staging / name)))
            if self.accelerator.is_main_process:
                publish(staging / name, self.output_dir / name, {**facts, "step": step}, written)
                delete_aside(self.output_dir)
                rotate(self.output_dir, self.keep)
        except Exception as error:
            shutil.rmtree(staging / name, ignore_errors=True)
            full, older = f"no space left on the disk of {str(self.output_dir)!r}", "older checkpoints are as they were"
            if disk_is_full(error):
                remedy = f"make room there, and {self.where_to_go_on()}"
                raise DiskFullError(f"{name} could not be written ({full}); {older}; {remedy}") from None
            why = lost_contact(error) or error
            raise RunError(f"{name} could not be written ({why}); {older}") from error
        finally:
            self.staging = None
        self.accelerator.wait_for_everyone()
        self.saved_at = step

    def at(self, step: int, save: Callable[[], None]) -> Path:
        """The checkpoint of the current step. `save` is called unless it exists already."""
        if self.saved_at != step:
            save()
        # The first rank to raise ends the others, and one of them may still be writing.
        self.accelerator.wait_for_everyone()
        return self.output_dir / f"{_PREFIX}-{step}"

    def where_to_go_on(self) -> str:
        """The end of a message: where a new start of the same command begins."""
        at = self.began_at if self.saved_at is None else f"{_PREFIX}-{self.saved_at}"
        none = "there is no checkpoint yet: the same command starts at the first step"
        return none if at is None else f"the same command goes on from {at}"
