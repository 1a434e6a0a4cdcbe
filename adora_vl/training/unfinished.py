"""Saves and restores the part of a generation that is still to be learned from.

Each rank has a file of its own in the checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from accelerate.utils import send_to_device

from adora_vl.checkpoint.store import load_for_rank, read_checkpoint_manifest, save_for_rank
from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import to_cpu
from adora_vl.types import Batch, StepContext
from adora_vl.utils.errors import UserError

GENERATION_FILE_KIND = "generation"  # in a checkpoint, one of each rank
_MANIFEST_KEY = "unfinished_generation"  # the key in the manifest of such a checkpoint


class StepStart(NamedTuple):
    """What is known where the first generation of an optimizer step begins."""

    micro_step: int  # TRL's `_step`
    tokens_seen: int  # TRL's `num_input_tokens_seen`
    metadata: dict[str, Any]  # what a checkpoint's manifest says of the run


class RestoredGeneration(NamedTuple):
    """The generation in whose middle a checkpoint was saved."""

    micro_step: int  # TRL's `_step`
    micro_batches: list[Batch]  # those that were learned from are empty
    table: str  # TRL's table of completions, as JSON


class UnfinishedGeneration:
    """Lets a run resume within a generation.

    A generation is split into micro-batches, and a checkpoint may be written when only some of them
    were learned from. Stock TRL saves neither the rollouts that are left nor its position within
    them, so such a run would sample a new generation, and its steps would be out of phase.
    """

    def __init__(self, context: StepContext, image_banks: ImageBanks) -> None:
        self.accelerator = context.accelerator
        self.image_banks = image_banks
        self.layout = context.layout
        self.state = context.state
        self._step_start: StepStart | None = None  # of the present optimizer step

    def remember_step_start(self, micro_step: int, metadata: dict[str, Any]) -> None:
        """Remember the state of the run where the first generation of an optimizer step begins.

        Args:
            micro_step: TRL's `_step`, its count of micro-batches.
            metadata: what the manifest of a checkpoint says of the run now.
        """
        tokens_seen = self.state().num_input_tokens_seen
        self._step_start = StepStart(
            micro_step=micro_step, tokens_seen=tokens_seen, metadata=metadata
        )

    def metadata_to_save(
        self, first_micro_step: int, present_metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of the run, such as the state of methods.

        If the present optimizer step has sampled its generations and not learned from them, a
        resumed run samples them again. Then the result is from before they were sampled, and TRL's
        count of tokens, which Transformers saves, is set back to what it was then.

        Args:
            first_micro_step: TRL's `_step`, its count of micro-batches, where the present optimizer
                step began.
            present_metadata: what the manifest would say of the run now.
        """
        step_start = self._step_start
        if step_start is None or step_start.micro_step != first_micro_step:
            return present_metadata
        self.state().num_input_tokens_seen = step_start.tokens_seen
        return step_start.metadata

    def save(
        self, folder: Path, micro_step: int, micro_batches: list[Batch] | None, table: str
    ) -> dict[str, Any]:
        """Write the micro-batches that are left of a generation, and the images that they refer to.

        Between two generations nothing is written. The images are those of the whole image bank,
        since features are computed for all of its images at once.

        Args:
            folder: the folder of the checkpoint.
            micro_step: TRL's `_step`, its count of micro-batches, at the last optimizer step.
            micro_batches: those of the present generation; None without one.
            table: TRL's table of the generation's completions, as JSON, for the next log.

        Returns:
            The entry for the checkpoint's manifest; {} where nothing was written.
        """
        learned_count = micro_step % self.layout.micro_batches_per_generation
        if learned_count == 0 or micro_batches is None:
            return {}
        content: dict[str, Any] = {
            "micro_batches": to_cpu(self._remaining(micro_batches, learned_count)),
            "first": 0,  # the number of the image bank's first patch
            "images": [],
            "table": table,
        }
        bank = self.image_banks.of_training()
        if bank is not None:
            content["first"] = bank.first_patch
            # Plain tuples: `torch.load` reads no class of ours from a checkpoint.
            content["images"] = [tuple(to_cpu(bank.image(image_id))) for image_id in bank.image_ids]
        save_for_rank(
            folder, name=GENERATION_FILE_KIND, rank=self.accelerator.process_index, content=content
        )
        return {_MANIFEST_KEY: {"micro_step": micro_step, **self._sizes()}}

    def _remaining(self, micro_batches: Sequence[Batch], learned_count: int) -> list[Batch]:
        """Return the micro-batches, with `{}` in place of each that is not learned from again.

        With one iteration over a generation (`num_iterations`) those that were learned from become
        empty, and the others keep their places: of a b c d, with two learned from, {} {} c d is
        returned. With several iterations all micro-batches are learned from again, and none is
        emptied. The column `rows_on_cpu`, a copy on the CPU, is left out.

        Args:
            micro_batches: the micro-batches of the present generation.
            learned_count: how many of them were learned from.
        """
        remaining = [
            cast(
                "Batch",
                {name: column for name, column in micro_batch.items() if name != "rows_on_cpu"},
            )
            for micro_batch in micro_batches
        ]
        if self.layout.num_iterations == 1:
            for number in range(learned_count):
                remaining[number] = {}
        return remaining

    def load(self, checkpoint: Path) -> RestoredGeneration | None:
        """Read what `save` wrote into a checkpoint; None if it wrote nothing.

        The images go into a new image bank, and the micro-batches refer to them there. Raises
        `UserError` if the sizes of the run have changed since.
        """
        entry = read_checkpoint_manifest(checkpoint).get(_MANIFEST_KEY)
        if entry is None:
            return None
        for name, size in self._sizes().items():
            if entry[name] != size:
                raise UserError(
                    f"resume_from_checkpoint: {str(checkpoint)!r} was saved in the middle of a "
                    f"generation with {name}: {entry[name]}, now {size}; set it as before, or name "
                    "a checkpoint between two generations"
                )
        device = self.accelerator.device
        content = load_for_rank(checkpoint, GENERATION_FILE_KIND, self.accelerator.process_index)
        bank = self.image_banks.new("train")
        for key, patches, grid in content["images"]:
            bank.store(key, patches.to(device), grid)
        micro_batches: list[Batch] = send_to_device(content["micro_batches"], device)
        for micro_batch in micro_batches:
            patch_numbers = micro_batch.get("pixel_values")
            if patch_numbers is not None and not patch_numbers.is_floating_point():
                # Patches are numbered through all banks of a run, so the new bank begins at another
                # number than the one that was saved.
                micro_batch["pixel_values"] = patch_numbers + (bank.first_patch - content["first"])
        return RestoredGeneration(
            micro_step=entry["micro_step"], micro_batches=micro_batches, table=content["table"]
        )

    def _sizes(self) -> dict[str, int]:
        """Return the sizes on which the split into micro-batches depends, by the config's keys.

        They are written into the manifest, and have to be the same in a run that resumes.
        """
        layout = self.layout
        return {
            "processes": self.accelerator.num_processes,
            "per_device_train_batch_size": layout.micro_batch_rows,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "steps_per_generation": layout.steps_per_generation,
            "num_iterations": layout.num_iterations,
        }
