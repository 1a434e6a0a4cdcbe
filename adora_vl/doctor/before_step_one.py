"""The moment at which everything of a training is there, the sharded model included, and nothing has been learned."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from adora_vl.doctor.engine import Examination, examine
from adora_vl.doctor.probe import read_prompts
from adora_vl.doctor.result import Check


class Examined(Exception):  # noqa: N818  # no error: it ends a training that was never meant to begin
    """Raised when the examination is over."""


class ExamineBeforeStepOne(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Examines, keeps the lines in `checks`, and leaves `trainer.train()` by raising `Examined`."""

    def __init__(self, trainer: Any, rows: int) -> None:
        self.trainer, self.rows = trainer, rows
        self.checks: list[Check] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        data, first = trainer.train_dataset, trainer.accelerator.process_index * self.rows
        rows = [data[(first + number) % len(data)] for number in range(self.rows)]
        merge = getattr(getattr(trainer.processing_class, "image_processor", None), "merge_size", 1)
        self.checks = examine(Examination(trainer, read_prompts(trainer, rows)), merge)
        raise Examined
