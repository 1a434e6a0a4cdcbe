"""What a trainer writes into a checkpoint, and restores from one, beside TRL's own state."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel

from adora_vl.checkpoint.run_files import recording_saved_files
from adora_vl.checkpoint.store import manifest_of
from adora_vl.checkpoint.trl_state import LossSums, SavedLossSums
from adora_vl.models.adapter import without_reference_adapter
from adora_vl.models.load import restore_weights
from adora_vl.parts import TrainerParts
from adora_vl.record import trackers
from adora_vl.record.card import write_card
from adora_vl.training.generation import PresentGeneration
from adora_vl.types import Batch
from adora_vl.utils.files import give_usual_modes


class CheckpointedTrainer(TrainerParts):
    """A trainer whose checkpoints are complete: a run that resumes goes on as if uninterrupted.

    `AdoraGRPOTrainer` adds the training step.
    """

    # What the manifest of every checkpoint says of the run, such as its fingerprint.
    run_facts: dict[str, Any]
    # The manifest of the run, from the beginning of `train` on.
    manifest: dict[str, Any]

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        """Write the checkpoint of the present step.

        Stock TRL writes into `checkpoint-N` itself and deletes older checkpoints on the way, so a
        crash can leave an incomplete checkpoint, or none. Ours lets it write into another folder,
        adds what a resumed run needs, renames the folder, and then deletes older checkpoints.
        """
        trl_save_checkpoint = super()._save_checkpoint
        facts = self.unfinished_generation.facts_to_save(self._step_began, self._facts())

        def write_parts(folder: Path) -> dict[str, Any]:
            """Write all parts into the folder, and return the facts for its manifest."""
            trl_save_checkpoint(model, trial)
            self.moving_reference.save(folder)
            completions_table = trackers.table_to_json(self._logs)
            self.pool.save(folder)
            # TRL's buffer, unless this package cuts generations into micro-batches itself.
            micro_batches: list[Batch] | None = self._buffered_inputs
            if self._cuts_generations:
                generation = self._present_generation
                micro_batches = None if generation is None else generation.micro_batches
            unfinished_facts = self.unfinished_generation.save(
                folder,
                micro_step=self._step_began,
                micro_batches=micro_batches,
                table=completions_table,
            )
            return {**LossSums.with_all_ranks(facts), **unfinished_facts}

        self.checkpoint_writer.write(self.state.global_step, write_parts)

    def save_here(self) -> Path:
        """Return the checkpoint of the present step, and write it unless it is there already.

        All ranks call this together.
        """
        return self.checkpoint_writer.at(
            self.state.global_step, lambda: self._save_checkpoint(self.model, trial=None)
        )

    def _get_output_dir(self, trial: object) -> str:
        """Return the folder that Transformers writes into.

        Stock TRL returns `output_dir`. Ours returns another folder while a checkpoint is written,
        which is renamed when it is complete.
        """
        staging = self.checkpoint_writer.staging
        return str(staging) if staging is not None else str(super()._get_output_dir(trial))

    def _facts(self) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of the run at this moment.

        These are the run's settings, the state of the advantage methods, and the metrics and sums
        of losses since the last log.
        """
        loss_sums = self._loss_sums()
        return {
            **self.run_facts,
            **({} if loss_sums is None else loss_sums.facts()),
            "methods": self.advantage_methods.state(),
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
        }

    def _loss_sums(self) -> LossSums | None:
        """Return Transformers' sums of losses on this rank; None before the training begins."""
        if not hasattr(self, "_tr_loss"):
            return None
        # A tensor until it is written: its value as a number would have to wait for the device.
        unlogged_sum = self._tr_loss.detach().clone()
        return LossSums(
            logged_sum=self._total_loss_scalar,
            last_log_step=self._globalstep_last_logged,
            unlogged_sum=unlogged_sum,
        )

    def _put_loss_sums(self, sums: SavedLossSums) -> None:
        """Let Transformers go on from the sums of losses of a checkpoint."""
        rank = self.accelerator.process_index
        self._tr_loss += sums.unlogged_sum_of(rank, ranks=self.accelerator.num_processes)
        self._total_loss_scalar = sums.logged_sum
        self._globalstep_last_logged = sums.last_log_step

    @property
    def _step_began(self) -> int:
        """TRL's `_step`, its count of micro-batches, where the present optimizer step began.

        A run that resumes begins an optimizer step at its first micro-batch again.
        """
        return int(self._step - self._step % self.args.gradient_accumulation_steps)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        """Load the weights of a checkpoint.

        Stock TRL leaves this to Transformers 5.17, which loads weights by their names in the
        file. Qwen2.5-VL's modules have other names, so a resumed run would only print a warning and
        start from the untrained weights. Of several adapters it reads those in folders alone, and
        not the one that is trained.
        """
        model = self.model if model is None else model
        folder = Path(resume_from_checkpoint)
        has_whole_weights = any(folder.glob("*.safetensors"))
        if has_whole_weights:
            restore_weights(model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the optimizer and the scheduler from a checkpoint, if there is one.

        Stock TRL restores these and the coefficient of the entropy. Ours also restores a reference
        model that moves towards the policy, and the sums of the loss.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.moving_reference.load(Path(checkpoint))
            self.loss_sums.load(Path(checkpoint))

    def restore(self, checkpoint: str) -> None:
        """Restore what a checkpoint has beside weights and optimizer, which `train` restores.

        That is the state of the advantage methods, the rollouts that are still to be learned from,
        and the metrics since the last log.
        """
        folder = Path(checkpoint)
        facts = manifest_of(folder)
        self.checkpoint_writer.began_at = checkpoint
        self.advantage_methods.load(facts.get("methods", {}))
        self.pool.load(folder)
        unfinished = self.unfinished_generation.load(folder)
        if unfinished is not None:
            self._step = unfinished.micro_step
            self._buffered_inputs = unfinished.micro_batches
            self._present_generation = PresentGeneration(
                first_micro_step=self._first_micro_step, micro_batches=unfinished.micro_batches
            )
            trackers.restore_table(unfinished.table, self._logs)
        for name, values in facts.get("metrics", {}).items():
            self._metrics["train"][name] = list(values)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights, processor and model card.

        Stock TRL saves weights and processor. Ours also writes the card, in checkpoints too, and
        gives the files the permissions that the umask allows.
        """
        folder = Path(output_dir or self.args.output_dir)
        is_final_model = folder == Path(self.args.output_dir)
        # The weights that ZeRO-3 gathers lack the reference adapter, which PEFT would save too.
        lacks_reference = self._dist.is_zero3 and is_peft_model(self.model)
        notes_files: AbstractContextManager[None] = nullcontext()
        if is_final_model:
            notes_files = recording_saved_files(folder, self.args.should_save)
        with notes_files:
            with without_reference_adapter(self.model) if lacks_reference else nullcontext():
                super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                give_usual_modes(folder)
                write_card(self.manifest, folder, self.state)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model of a checkpoint to the hub.

        Stock TRL copies the model into `output_dir` to push it. Ours also notes that this run wrote
        these files.
        """
        with recording_saved_files(Path(self.args.output_dir), self.accelerator.is_main_process):
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write nothing.

        Stock TRL writes a card at every save, which would replace ours.
        """
