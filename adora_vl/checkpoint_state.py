"""Saves and restores what TRL's own checkpoints lack, so that a resumed run goes on exactly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.advantage.methods import AdvantagePipeline
from adora_vl.checkpoint.fingerprint import Fingerprint
from adora_vl.checkpoint.store import read_checkpoint_manifest
from adora_vl.checkpoint.trl_state import LossSums, SyncedReferenceModel
from adora_vl.record import trackers
from adora_vl.training.optimizer_steps import SkipBadSteps
from adora_vl.training.pool import Pool
from adora_vl.training.unfinished import RestoredGeneration, UnfinishedGeneration
from adora_vl.types import Batch


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """Writes the state that TRL does not save into a checkpoint, and restores it. Collective."""

    pipeline: AdvantagePipeline
    """What the methods of the run remember."""
    pool: Pool
    """Groups that are still to be learned from."""
    unfinished_generation: UnfinishedGeneration
    """What is left of the present generation."""
    moving_reference: SyncedReferenceModel
    """A reference model that TRL moves."""
    loss_sums: LossSums
    """Transformers' sums of losses."""
    skip_bad_steps: SkipBadSteps
    """Counts the bad steps in a row, after which a run stops."""
    metrics: dict[str, list[float]]
    """TRL's metrics of the training since the last log, by name."""
    table: dict[str, Any]
    """TRL's table of completions."""

    def metadata(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of the run at this moment.

        `fingerprint`: everything that influences the steps of the run.
        """
        return {
            "fingerprint": fingerprint,
            **self.loss_sums.metadata(),
            "methods": self.pipeline.state(),
            "metrics": {name: list(values) for name, values in self.metrics.items()},
            "bad_steps_in_a_row": self.skip_bad_steps.bad_steps_to_save(),
        }

    def save(
        self,
        folder: Path,
        metadata: dict[str, Any],
        micro_step: int,
        micro_batches: list[Batch] | None,
    ) -> dict[str, Any]:
        """Write this rank's files of a checkpoint, and return the metadata for its manifest.

        Args:
            folder: the folder of the checkpoint.
            metadata: what `metadata` returned on this rank. The result has the sums of losses of
                all ranks in place of this rank's.
            micro_step: TRL's `_step`, its count of micro-batches, at the last optimizer step.
            micro_batches: the micro-batches of the present generation; None without a generation.
        """
        self.moving_reference.save(folder)
        table = trackers.table_to_json(self.table)
        self.pool.save(folder)
        unfinished_facts = self.unfinished_generation.save(
            folder, micro_step=micro_step, micro_batches=micro_batches, table=table
        )
        return {**LossSums.with_all_ranks(metadata), **unfinished_facts}

    def restore(self, checkpoint: Path) -> RestoredGeneration | None:
        """Restore what `save` wrote.

        Returns the generation that the run was still learning from; None if there was none.
        """
        manifest = read_checkpoint_manifest(checkpoint)
        self.pipeline.load(manifest.get("methods", {}))
        self.pool.load(checkpoint)
        self.moving_reference.load(checkpoint)
        self.loss_sums.load(checkpoint)
        self.skip_bad_steps.bad_steps_in_a_row = manifest.get("bad_steps_in_a_row", 0)
        unfinished = self.unfinished_generation.load(checkpoint)
        if unfinished is not None:
            trackers.restore_table(unfinished.table, self.table)
        for name, values in manifest.get("metrics", {}).items():
            self.metrics[name] = list(values)
        return unfinished
