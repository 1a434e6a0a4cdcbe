"""What is left of a generation to learn from: into a checkpoint and out of it, each rank's part in its own file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply, send_to_device

from adora_vl.checkpoint.store import facts_of
from adora_vl.errors import UserError

if TYPE_CHECKING:
    from adora_vl.passes.trainer import OnceGRPOTrainer

_FACTS = "unfinished_generation"  # in the manifest of such a checkpoint
# What has to stay as it is for the micro-batches to mean the same
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"generation-{rank:05}.pt"


def save(folder: Path, trainer: OnceGRPOTrainer) -> dict[str, Any]:
    """Write the micro-batches that are left, and the images that they refer to; nothing between two generations.

    The whole bank of images is kept, so that what is computed for all of them at once is computed from the same ones
    again. Returns what the manifest says of it: where the run stands in its micro-batches, and their sizes.
    """
    within = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations)
    left = trainer._buffered_inputs
    if not within or left is None:
        return {}
    if trainer.num_iterations == 1:
        left = [{} if number < within else micro for number, micro in enumerate(left)]
    own: dict[str, Any] = {"micro_batches": recursively_apply(_apart, left), "first": 0, "images": []}
    bank = trainer.banks.of_training()
    if bank is not None:
        own["first"] = bank.first
        own["images"] = [recursively_apply(_apart, bank.image(start)) for start in bank.starts]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(own, file_of(folder, trainer.accelerator.process_index))
    return {_FACTS: {"micro_step": trainer._step, **_sizes(trainer)}}


def go_on(checkpoint: Path, trainer: OnceGRPOTrainer) -> None:
    """Take back what `save` wrote, if it did. Raises `UserError` where the micro-batches have other sizes now."""
    facts = facts_of(checkpoint).get(_FACTS)
    if facts is None:
        return
    for name, now in _sizes(trainer).items():
        if facts[name] != now:
            raise UserError(
                f"resume_from_checkpoint: {str(checkpoint)!r} lies within a generation, of which rollouts are still to "
                f"be learned from, and was written with {name}: {facts[name]}, now {now}; set it as before, or name a "
                "checkpoint between two generations"
            )
    file, device = file_of(checkpoint, trainer.accelerator.process_index), trainer.accelerator.device
    own = torch.load(file, map_location="cpu", weights_only=True)
    bank = trainer.banks.new("train")
    for key, patches, grid in own["images"]:
        bank.hold(key, patches.to(device), grid)
    micro_batches: list[dict[str, Any]] = send_to_device(own["micro_batches"], device)
    for micro in micro_batches:
        references = micro.get("pixel_values")
        if references is not None and not references.is_floating_point():
            micro["pixel_values"] = references + (bank.first - own["first"])
    trainer._step, trainer._buffered_inputs = facts["micro_step"], micro_batches


def _sizes(trainer: OnceGRPOTrainer) -> dict[str, int]:
    return {"processes": trainer.accelerator.num_processes, **{name: getattr(trainer.args, name) for name in _SIZES}}


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, without the rest of the storage that it is cut from."""
    return tensor.detach().cpu().clone()
