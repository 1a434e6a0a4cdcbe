"""What is left of a generation to learn from: into a checkpoint and out of it, each rank's part in its own file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device

from adora_vl.batch import Batch
from adora_vl.batching.batcher import Shape
from adora_vl.checkpoint.store import facts_of
from adora_vl.dedup.image_bank import Banks
from adora_vl.errors import UserError

_FACTS = "unfinished_generation"  # in the manifest of such a checkpoint
# TRL's keys that have to stay as they are for the micro-batches to mean the same, by their names in `Shape`
_KEYS = {
    "rows": "per_device_train_batch_size",
    "accumulated": "gradient_accumulation_steps",
    "steps": "steps_per_generation",
    "iterations": "num_iterations",
}


def file_of(folder: Path, rank: int) -> Path:
    """A rank's part in the checkpoint `folder`."""
    return folder / f"generation-{rank:05}.pt"


class UnfinishedGeneration:
    """Stock TRL's checkpoints have neither the rollouts that are left to learn from nor where the run stands in them,
    so a run that goes on within a generation samples anew, out of phase.
    """

    def __init__(self, accelerator: Accelerator, banks: Banks, shape: Shape) -> None:
        self.accelerator, self.banks, self.shape = accelerator, banks, shape

    def save(self, folder: Path, micro_step: int, micro_batches: list[Batch] | None) -> dict[str, Any]:
        """Write the micro-batches that are left, and the images that they refer to; nothing between two generations.

        `micro_step`: how many micro-batches the run has gone through. The whole bank of images is kept, so that what is
        computed for all of them at once is computed from the same ones again. Returns what the manifest says of it.
        """
        within = micro_step % self.shape.cycle
        if not within or micro_batches is None:
            return {}
        left = micro_batches
        if self.shape.iterations == 1:
            left = [{} if number < within else micro for number, micro in enumerate(left)]
        own: dict[str, Any] = {"micro_batches": recursively_apply(_apart, left), "first": 0, "images": []}
        bank = self.banks.of_training()
        if bank is not None:
            own["first"] = bank.first
            own["images"] = [recursively_apply(_apart, bank.image(start)) for start in bank.starts]
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(own, file_of(folder, self.accelerator.process_index))
        return {_FACTS: {"micro_step": micro_step, **self._sizes()}}

    def load(self, checkpoint: Path) -> tuple[int, list[Batch]] | None:
        """The step within the run and the micro-batches that `save` wrote; None where it wrote none.

        Raises `UserError` where the micro-batches have other sizes now.
        """
        facts = facts_of(checkpoint).get(_FACTS)
        if facts is None:
            return None
        for name, now in self._sizes().items():
            if facts[name] != now:
                raise UserError(
                    f"resume_from_checkpoint: {str(checkpoint)!r} lies within a generation, of which rollouts are "
                    f"still to be learned from, and was written with {name}: {facts[name]}, now {now}; set it as "
                    "before, or name a checkpoint between two generations"
                )
        file, device = file_of(checkpoint, self.accelerator.process_index), self.accelerator.device
        own = torch.load(file, map_location="cpu", weights_only=True)
        bank = self.banks.new("train")
        for key, patches, grid in own["images"]:
            bank.hold(key, patches.to(device), grid)
        micro_batches: list[Batch] = send_to_device(own["micro_batches"], device)
        for micro in micro_batches:
            references = micro.get("pixel_values")
            if references is not None and not references.is_floating_point():
                micro["pixel_values"] = references + (bank.first - own["first"])
        return facts["micro_step"], micro_batches

    def _sizes(self) -> dict[str, int]:
        shape = asdict(self.shape)
        return {"processes": self.accelerator.num_processes, **{key: shape[name] for name, key in _KEYS.items()}}


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, without the rest of the storage that it is cut from."""
    return tensor.detach().cpu().clone()
