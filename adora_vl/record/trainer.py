"""TRL's trainer with a clock on its phases and a record of what it does."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from adora_vl.checkpoint.trainer import CheckpointedGRPOTrainer
from adora_vl.record.metrics_file import MetricsFile
from adora_vl.record.phases import PhaseClock
from adora_vl.record.progress import ProgressLine


class StepClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """A step is the policy's time but for what lies in another phase; each step's seconds go into the log.

    What lies between two steps (loading data, saving, evaluating) is `other` of the later one.
    """

    def __init__(self, trainer: RecordedGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.enter("policy")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.leave()
        for phase, seconds in self.trainer.clock.take().items():
            self.trainer.log_figure(f"seconds/{phase}", seconds)


class RecordedGRPOTrainer(CheckpointedGRPOTrainer):
    """As `trl.GRPOTrainer`; it says what it does on screen, in `metrics.jsonl` and in the record of the rollouts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing but the arguments of `trl.GRPOTrainer`."""
        self.clock = PhaseClock()
        super().__init__(*args, **kwargs)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self._timed("sync", self.vllm_generation.sync_weights)
        for noisy in (ProgressCallback, PrinterCallback):
            self.remove_callback(noisy)
        for callback in (StepClock(self), ProgressLine(), MetricsFile()):
            self.add_callback(callback)

    def log_figure(self, name: str, value: float) -> None:
        """One value of this step for the next log, which averages; the same on every rank."""
        self._metrics["train"][name].append(value)

    def _timed(self, phase: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(phase):
                return call(*args, **kwargs)

        return timed

    def _generate(self, prompts: list[Any]) -> Any:
        """Stock TRL processes the images, samples and decodes here, and times it for wandb alone; ours for the log."""
        with self.clock.phase("rollout"):
            return super()._generate(prompts)

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Stock TRL calls the reward functions here, and times them for wandb alone; ours for the log."""
        with self.clock.phase("grading"):
            rewards_BF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return rewards_BF
