"""TRL's trainer with checkpoints that are whole or do not count, and a place in the data that a resumed run finds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from adora_vl.checkpoint.sampler import EpochRepeatSampler
from adora_vl.checkpoint.set_aside import delete_aside
from adora_vl.checkpoint.store import STAGING, facts_of, publish, rotate
from adora_vl.errors import RunError
from adora_vl.models.load import restore_weights
from adora_vl.replaced import replaced


class CheckpointedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """As `trl.GRPOTrainer`; what it saves is sealed, and what it resumes from goes on exactly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing but the arguments of `trl.GRPOTrainer`."""
        self.run_facts: dict[str, Any] = {}  # into the manifest of every checkpoint
        self._saved_at: int | None = None  # the step of this run's newest checkpoint
        self._began_at: str | None = None  # the checkpoint that this process started from
        super().__init__(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Stock TRL writes into `checkpoint-N` itself and deletes older ones on the way, so a crash can leave a half
        one, or none; ours lets it write beside, seals the result, renames it, and then deletes.
        """
        output_dir, step = Path(self.args.output_dir), self.state.global_step
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        try:
            with replaced(self, "_get_output_dir", lambda trial=None: str(output_dir / STAGING)):
                super()._save_checkpoint(model, trial)
            own = self.save_unfinished(output_dir / STAGING / name)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                facts = {**self.run_facts, **own, "step": step, "metrics": self._metrics["train"]}
                publish(output_dir / STAGING / name, output_dir / name, facts)
                delete_aside(output_dir)
                rotate(output_dir, self.args.save_total_limit)
        except Exception as error:  # torch and safetensors have their own for a full disk
            shutil.rmtree(output_dir / STAGING / name, ignore_errors=True)
            raise RunError(f"{name} could not be written ({error}); older checkpoints are as they were") from error
        self.accelerator.wait_for_everyone()
        self._saved_at = step

    def save_unfinished(self, folder: Path) -> dict[str, Any]:
        """Put into the checkpoint what is under way; all ranks call this. Returns what the manifest says of it."""
        return {}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Stock TRL leaves this to Transformers 5.17, which loads by the names in the file. Qwen2.5-VL's modules have
        other ones, and after a mere warning a resumed run would start from the weights of before the training.
        """
        folder = Path(resume_from_checkpoint)
        model = self.model if model is None else model
        if is_peft_model(model) or self._dist.is_fsdp or not list(folder.glob("*.safetensors")):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            restore_weights(model, folder)

    def begin_at(self, checkpoint: str) -> None:
        """Take the figures between the last log and this checkpoint, so that the next log averages what it would have.
        Weights and optimizer are up to `train`.
        """
        self._began_at = checkpoint
        for name, values in facts_of(Path(checkpoint)).get("metrics", {}).items():
            self._metrics["train"][name] = list(values)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Stock TRL's sampler draws the epochs' orders one after the other; ours draws each from its number."""
        sampler = super()._get_train_sampler(dataset)
        return EpochRepeatSampler(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
