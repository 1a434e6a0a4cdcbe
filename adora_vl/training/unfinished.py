"""Saves and restores the part of a generation that is still to be learned from.

Each rank has a file of its own in the checkpoint.
"""

from pathlib import Path
from typing import Any, NamedTuple, cast

from accelerate.utils import send_to_device

from adora_vl.checkpoint.store import facts_of, load_of_rank, save_of_rank
from adora_vl.config.batch_plan import BatchLayout
from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import to_cpu
from adora_vl.types import Batch, StepContext
from adora_vl.utils.errors import UserError

FILES = "generation"  # in a checkpoint, one of each rank
_MANIFEST_KEY = "unfinished_generation"  # the key in the manifest of such a checkpoint


class StepBegin(NamedTuple):
    """The state of a run where the first generation of an optimizer step begins."""

    micro_step: int  # TRL's `_step`
    tokens_seen: int  # TRL's `num_input_tokens_seen`
    facts: dict[str, Any]  # for a checkpoint's manifest


class UnfinishedGeneration:
    """Lets a run resume within a generation.

    Stock TRL saves neither the rollouts that are left nor its position within them, so such a run
    would sample a new generation, and its steps would be out of phase.
    """

    def __init__(self, context: StepContext, banks: ImageBanks) -> None:
        self.accelerator = context.accelerator
        self.banks = banks
        self.layout = BatchLayout.of(context.config)
        self.state = context.state
        self._before: StepBegin | None = None  # of the present optimizer step

    def begins(self, micro_step: int, facts: dict[str, Any]) -> None:
        """Note what is known where the first generation of an optimizer step begins."""
        tokens_seen = self.state().num_input_tokens_seen
        self._before = StepBegin(micro_step=micro_step, tokens_seen=tokens_seen, facts=facts)

    def rewind(self, step_began: int, now: dict[str, Any]) -> dict[str, Any]:
        """The facts of the run to save, from where a resumed run goes on.

        Before any optimizer step used the present generations, those are the facts from before
        them, since a resumed run samples them again. Then this also resets TRL's count of tokens.

        Args:
            step_began: TRL's `_step` where the present optimizer step began.
            now: the present facts.
        """
        if self._before is None or self._before.micro_step != step_began:
            return now
        self.state().num_input_tokens_seen = self._before.tokens_seen
        return self._before.facts

    def save(
        self, folder: Path, micro_step: int, micro_batches: list[Batch] | None, table: str
    ) -> dict[str, Any]:
        """Write the micro-batches that remain and the images that they refer to.

        Between two generations nothing is written. The whole image bank is saved, since some things
        are computed for all of its images at once.

        Args:
            folder: of the checkpoint.
            micro_step: micro-batches that the run has processed.
            micro_batches: of the generation.
            table: of the generation, for the log.

        Returns:
            The entry of the checkpoint's manifest.
        """
        # micro-batches of this generation that were learned from already
        done = micro_step % self.layout.micro_batches_per_generation
        if not done or micro_batches is None:
            return {}
        remaining = [
            cast("Batch", {name: column for name, column in micro.items() if name != "host_rows"})
            for micro in micro_batches
        ]
        # With several passes over a generation, those that are done will be learned from again.
        if self.layout.num_iterations == 1:
            remaining = [{} if number < done else micro for number, micro in enumerate(remaining)]
        content: dict[str, Any] = {
            "micro_batches": to_cpu(remaining),
            "first": 0,
            "images": [],
            "table": table,
        }
        bank = self.banks.of_training()
        if bank is not None:
            content["first"] = bank.first
            content["images"] = [to_cpu(bank.image(start)) for start in bank.starts]
        save_of_rank(folder, kind=FILES, rank=self.accelerator.process_index, content=content)
        return {_MANIFEST_KEY: {"micro_step": micro_step, **self._sizes()}}

    def load(self, checkpoint: Path) -> tuple[int, list[Batch], str] | None:
        """Read the `micro_step`, the micro-batches and the table that `save` wrote.

        Returns None if it wrote none. Raises `UserError` if the sizes of the run have changed
        since.
        """
        facts = facts_of(checkpoint).get(_MANIFEST_KEY)
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
        content = load_of_rank(checkpoint, FILES, self.accelerator.process_index)
        bank = self.banks.new("train")
        for key, patches, grid in content["images"]:
            bank.store(key, patches.to(device), grid)
        micro_batches: list[Batch] = send_to_device(content["micro_batches"], device)
        for micro in micro_batches:
            references = micro.get("pixel_values")
            if references is not None and not references.is_floating_point():
                micro["pixel_values"] = references + (bank.first - content["first"])
        return facts["micro_step"], micro_batches, content["table"]

    def _sizes(self) -> dict[str, int]:
        """The sizes that the division into micro-batches depends on, by TRL's keys."""
        layout = self.layout
        return {
            "processes": self.accelerator.num_processes,
            "per_device_train_batch_size": layout.micro_batch_rows,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "steps_per_generation": layout.steps_per_generation,
            "num_iterations": layout.num_iterations,
        }
