"""Before step 1 of every training: the cheap part of the examination, on the engine that is there anyway."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import TrainerCallback

from adora_vl.doctor.engine import COLD, DISTANT, Examination
from adora_vl.doctor.probe import read_prompts
from adora_vl.doctor.result import Check, Status
from adora_vl.errors import RolloutError
from adora_vl.unreadable_images import unreadable_rows

ROWS, TOKENS = 2, 8  # of each rank, and of each rollout


class SelfCheck(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Refuses to train where engine and trainer disagree. Changes nothing of the run: no random state, no figure.

    Colocated vLLM only: rollouts of `transformers` are the policy's own, and the drift of step 1 guards a server.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is wrapped and a checkpoint is loaded by now; raises `RolloutError` on all ranks alike."""
        trainer = self.trainer
        if not trainer.use_vllm or trainer.vllm_mode != "colocate":
            return
        data, first = trainer.train_dataset, trainer.accelerator.process_index * ROWS
        rows = [data[(first + number) % len(data)] for number in range(ROWS)]
        if gather_object(unreadable_rows(rows)):  # the step that draws the row says so, on all ranks
            return
        checks = Examination(trainer, read_prompts(trainer, rows), tokens=TOKENS).cold_on_all_ranks()
        if trainer.accelerator.is_main_process:
            for agreement in checks:
                if agreement.name in (COLD, DISTANT) and agreement.status is Status.PASSED:
                    tqdm.write(f"Self-check: engine and trainer differ by {agreement.detail}")  # above the progress bar
        problems = [check for check in checks if check.status is Status.FAILED]
        if problems:
            raise RolloutError(refusal(problems))


def refusal(problems: list[Check]) -> str:
    """Why the run does not start, and how it would all the same."""
    lines = [f"{check.name}: {check.detail}. {check.remedy[0].upper()}{check.remedy[1:]}." for check in problems]
    return (
        f"before the first step: {' '.join(lines)} Nothing would be learned from such rollouts. "
        "`python -m adora_vl.doctor` with the same arguments looks closer; --adora_self_check false trains all the "
        "same."
    )
