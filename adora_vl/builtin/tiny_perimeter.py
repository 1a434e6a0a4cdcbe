"""`tiny_perimeter`, the demo's start: the tiny model, taught to add up sides that it reads, and
also to guess.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase

from adora_vl.builtin import SHIPPED_SIZE, ModelSize
from adora_vl.builtin.processor import END_OF_TURN
from adora_vl.builtin.small_model import TrainingStage, UntrainedModel
from adora_vl.builtin.tiny_vl import EncodedPrompts, answer_loss, build_model, encode
from adora_vl.data.dataset import Row
from adora_vl.data.prompts import SYSTEM_PROMPT
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.synthetic.generate import generate
from adora_vl.synthetic.perimeter import sides_in_problem, write_guess, write_working

_DATA_SEED = 2000  # other problems than any training run draws by default


@dataclass(frozen=True)
class PerimeterStart:
    """The numbers of a training in two stages: on right workings, then on a teacher's answers."""

    steps: int = 400  # of the first stage
    short_prompt_steps: int = 250  # how many of these, at the start, have a short prompt
    teacher_steps: int = 200  # of the second stage
    guesses: float = 0.5  # share of the teacher's answers that are guesses
    slips: float = 0.35  # share of mistakes at each step of its other answers
    batch_size: int = 48
    learning_rate: float = 1.5e-3
    rows: int = 4000
    seed: int = 1


def teacher(rng: random.Random, sides: tuple[int, ...], plan: PerimeterStart) -> str:
    """Return an answer that the model is to learn: a guess, or a worked solution with mistakes.

    A guess is one of the two usual digits, which are right in half of the problems. `sides`: the
    lengths of the figure's four sides. `plan` has the share of guesses and of mistakes.
    """
    if rng.random() < plan.guesses:
        return write_guess(rng)
    return write_working(rng, sides, slip_share=plan.slips)


def _model_to_train(tokenizer: PreTrainedTokenizerBase, seed: int, size: ModelSize | None) -> Any:
    """Return the shipped tiny model; with a `size` a model of this size with random weights."""
    if size is not None:
        return build_model(tokenizer, seed=seed, size=size)
    return AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER, dtype=torch.float32)


def prepare_perimeter(
    plan: PerimeterStart, rows: list[Row] | None = None, size: ModelSize | None = None
) -> UntrainedModel:
    """Return a small model, and the two stages of its training: on right answers, then a teacher's.

    Args:
        plan: the numbers of the training.
        rows: problems of the family `perimeter`; None draws them.
        size: of a model with random weights and the shipped vocabulary; None for the shipped tiny
            model, which has learned to read before.
    """
    processor = load_processor(str(PRETRAINED_FOLDER))
    model = _model_to_train(processor.tokenizer, seed=plan.seed, size=size)
    rows = rows or list(generate(plan.rows, seed=_DATA_SEED, families=("perimeter",)))
    with_short_prompt = encode(processor, rows, "Answer.")
    with_full_prompt = encode(processor, rows, SYSTEM_PROMPT)
    sides_by_row = [sides_in_problem(row["problem"], row["meta"]["solution"]) for row in rows]
    answer_rng = random.Random(plan.seed)
    first_stage_rng = random.Random(plan.seed)
    second_stage_rng = random.Random(plan.seed)

    def batch_loss(
        encoded_prompts: EncodedPrompts,
        rng: random.Random,
        answer_for: Callable[[tuple[int, ...]], str],
    ) -> Tensor:
        """Return the loss of a random batch; `answer_for` makes answers from the sides' lengths."""
        row_numbers = rng.sample(range(len(rows)), plan.batch_size)
        answers = {}
        for number in row_numbers:
            text = answer_for(sides_by_row[number]) + END_OF_TURN
            answers[number] = torch.tensor(processor.tokenizer(text)["input_ids"])
        return answer_loss(
            model, encoded_prompts=encoded_prompts, answers=answers, row_numbers=row_numbers
        )

    def first_stage_loss(step: int) -> Tensor:
        """Return the loss of right workings, with the short prompt in the first steps."""
        is_early = step < plan.short_prompt_steps
        prompts = with_short_prompt if is_early else with_full_prompt
        return batch_loss(prompts, first_stage_rng, partial(write_working, answer_rng))

    def second_stage_loss(_: int) -> Tensor:
        """Return the loss of the teacher's answers to the full prompt, whatever the step."""
        return batch_loss(
            with_full_prompt, second_stage_rng, partial(teacher, answer_rng, plan=plan)
        )

    stages = [
        TrainingStage(steps=plan.steps, learning_rate=plan.learning_rate, loss_of=first_stage_loss),
        TrainingStage(
            steps=plan.teacher_steps,
            learning_rate=plan.learning_rate * 2 / 3,
            loss_of=second_stage_loss,
        ),
    ]
    dtype = SHIPPED_SIZE.dtype if size is None else size.dtype
    return UntrainedModel(model=model, processor=processor, stages=stages, dtype=dtype)
