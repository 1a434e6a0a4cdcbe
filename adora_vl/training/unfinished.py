"""Saves and restores the part of a generation that is still to be learned from.

Each rank has a file of its own.
"""

from pathlib import Path
from typing import Any, cast

from accelerate.utils import send_to_device

from adora_vl.checkpoint.store import facts_of, load_of_rank, save_of_rank
from adora_vl.config.batch_plan import BatchLayout
from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import to_cpu
from adora_vl.types import Batch, StepContext
from adora_vl.utils.errors import UserError

FILES = "generation"  # in a checkpoint, one of each rank
_FACTS = "unfinished_generation"  # the key in the manifest of such a checkpoint


class UnfinishedGeneration:
    """Lets a run resume within a generation.

    Stock TRL saves neither the rollouts that are left nor its position within them, so such a run
    would sample a new generation, and its steps would be out of phase.
    """

    def __init__(self, context: StepContext, banks: ImageBanks) -> None:
        self.accelerator = context.accelerator
        self.banks = banks
        self.shape = BatchLayout.of(context.config)
        self.state = context.state
        # Where the first generation of an optimizer step began: TRL's `_step`, the tokens seen by
        # then, and the facts.
        self._before: tuple[int, int, dict[str, Any]] | None = None

    def begins(self, micro_step: int, facts: dict[str, Any]) -> None:
        """Note what is known where the first generation of an optimizer step begins."""
        self._before = micro_step, self.state().num_input_tokens_seen, facts

    def facts(self, step_began: int, now: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint is to say of the run: `now`, or what was known before the generations
        of the present step where nothing was learned from them, since a run that goes on there
        makes them again. The tokens seen go back with it. `step_began`: the `micro_step` where the
        present step began.
        """
        if self._before is None or self._before[0] != step_began:
            return now
        _, self.state().num_input_tokens_seen, facts = self._before
        return facts

    def save(
        self, folder: Path, micro_step: int, micro_batches: list[Batch] | None, table: str
    ) -> dict[str, Any]:
        """Write the micro-batches that are left and the images that they refer to; between two
        generations nothing.

        `micro_step`: micro-batches that the run has processed. `table`: the generation's, for the
        log. The whole image bank is saved: some things are computed for all of its images at once.
        Returns the manifest's entry.
        """
        within = micro_step % self.shape.cycle
        if not within or micro_batches is None:
            return {}
        left = [
            cast("Batch", {k: v for k, v in micro.items() if k != "host"})
            for micro in micro_batches
        ]
        if self.shape.iterations == 1:
            left = [{} if number < within else micro for number, micro in enumerate(left)]
        own: dict[str, Any] = {
            "micro_batches": to_cpu(left),
            "first": 0,
            "images": [],
            "table": table,
        }
        bank = self.banks.of_training()
        if bank is not None:
            own["first"] = bank.first
            own["images"] = [to_cpu(bank.image(start)) for start in bank.starts]
        save_of_rank(folder, kind=FILES, rank=self.accelerator.process_index, content=own)
        return {_FACTS: {"micro_step": micro_step, **self._sizes()}}

    def load(self, checkpoint: Path) -> tuple[int, list[Batch], str] | None:
        """The `micro_step`, the micro-batches and the table that `save` wrote, or None if it wrote
        none.

        Raises `UserError` if the sizes of the run have changed since.
        """
        facts = facts_of(checkpoint).get(_FACTS)
        if facts is None:
            return None
        for name, now in self._sizes().items():
            if facts[name] != now:
                raise UserError(
                    f"resume_from_checkpoint: {str(checkpoint)!r} was saved in the middle of a "
                    f"generation with {name}: {facts[name]}, now {now}; set it as before, or name "
                    "a checkpoint between two generations"
                )
        device = self.accelerator.device
        own = load_of_rank(checkpoint, FILES, self.accelerator.process_index)
        bank = self.banks.new("train")
        for key, patches, grid in own["images"]:
            bank.hold(key, patches.to(device), grid)
        micro_batches: list[Batch] = send_to_device(own["micro_batches"], device)
        for micro in micro_batches:
            references = micro.get("pixel_values")
            if references is not None and not references.is_floating_point():
                micro["pixel_values"] = references + (bank.first - own["first"])
        return facts["micro_step"], micro_batches, own["table"]

    def _sizes(self) -> dict[str, int]:
        """On which the division into micro-batches depends, by TRL's keys."""
        shape = self.shape
        return {
            "processes": self.accelerator.num_processes,
            "per_device_train_batch_size": shape.rows,
            "gradient_accumulation_steps": shape.accumulated,
            "steps_per_generation": shape.steps,
            "num_iterations": shape.iterations,
        }
