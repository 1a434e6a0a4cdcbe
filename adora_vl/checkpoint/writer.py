"""Writes checkpoints that are either whole or ignored: in another place first, then sealed, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from adora_vl.checkpoint.set_aside import delete_aside
from adora_vl.checkpoint.store import STAGING, names_in, publish, rotate
from adora_vl.errors import RunError, lost_contact

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
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        self.staging = staging = self.output_dir / STAGING
        try:
            facts = save(staging / name)
            self.accelerator.wait_for_everyone()  # nobody has a file on the way to its name any more
            written = set(gather_object(names_in(staging / name)))
            if self.accelerator.is_main_process:
                publish(staging / name, self.output_dir / name, {**facts, "step": step}, written)
                delete_aside(self.output_dir)
                rotate(self.output_dir, self.keep)
        except Exception as error:  # torch and safetensors raise errors of their own for a full disk
            shutil.rmtree(staging / name, ignore_errors=True)
            why = lost_contact(error) or error
            raise RunError(f"{name} could not be written ({why}); older checkpoints are as they were") from error
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
        return self.output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def where_to_go_on(self) -> str:
        """The end of a message: where a new start of the same command begins."""
        if self.saved_at is not None:
            return f"the same command goes on from {PREFIX_CHECKPOINT_DIR}-{self.saved_at}"
        if self.began_at is not None:
            return f"the same command goes on from {self.began_at}"
        return "there is no checkpoint yet: the same command starts at the first step"
