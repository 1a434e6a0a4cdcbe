"""`tiny_perimeter`, the demo's start: the tiny model, taught to add up sides that it reads, and
also to guess.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from adora_vl.builtin import SHIPPED_SIZE, ModelSize
from adora_vl.builtin.processor import END_OF_TURN
from adora_vl.builtin.small_model import Lesson, Untaught
from adora_vl.builtin.tiny_vl import Encoded, answer_loss, build_model, encode
from adora_vl.data.dataset import Row
from adora_vl.data.prompts import SYSTEM_PROMPT
from adora_vl.models.load import PRETRAINED, load_processor
from adora_vl.synthetic.generate import generate
from adora_vl.synthetic.perimeter import guess, sides_of, working

_DATA_SEED = 2000  # other problems than any training run draws by default


@dataclass(frozen=True)
class PerimeterStart:
    """Two stages: right workings until they are learned, the first part of it with short prompts;
    then a teacher that guesses with the share `guesses`, and else slips with the share `slips` in
    each of a working's places.
    """

    steps: int = 400
    short_prompt_steps: int = 250
    teacher_steps: int = 200
    guesses: float = 0.5
    slips: float = 0.35
    batch_size: int = 48
    learning_rate: float = 1.5e-3
    rows: int = 4000
    seed: int = 1


def teacher(rng: random.Random, sides: tuple[int, ...], plan: PerimeterStart) -> str:
    """Return what the second stage copies.

    Without knowing the kind of problem, it guesses one of the two usual digits.
    """
    return guess(rng) if rng.random() < plan.guesses else working(rng, sides, slip_share=plan.slips)


def begin_perimeter(
    plan: PerimeterStart, rows: list[Row] | None = None, size: ModelSize | None = None
) -> Untaught:
    """Return the shipped tiny model, or a fresh one of another size, and its two lessons.

    `rows` are by default those that the plan draws. `size`: of a model with fresh weights and the
    shipped vocabulary; the shipped model has learned to read before, and this one has not.
    """
    processor = load_processor(str(PRETRAINED))
    model: Any
    if size is None:
        model = AutoModelForImageTextToText.from_pretrained(PRETRAINED, dtype=torch.float32)
    else:
        model = build_model(processor.tokenizer, seed=plan.seed, size=size)
    rows = rows or list(generate(plan.rows, seed=_DATA_SEED, families=("perimeter",)))
    short = encode(processor, rows, "Answer.")
    full = encode(processor, rows, SYSTEM_PROMPT)
    sides = [sides_of(row["problem"], row["meta"]["solution"]) for row in rows]
    teachers_rng = random.Random(plan.seed)
    right_rng = random.Random(plan.seed)
    taught_rng = random.Random(plan.seed)

    def told(data: Encoded, rng: random.Random, tell: Callable[[tuple[int, ...]], str]) -> Tensor:
        """Return the loss of a random batch, whose answers `tell` makes from the sides."""
        picks = rng.sample(range(len(rows)), plan.batch_size)
        answers = {}
        for pick in picks:
            text = tell(sides[pick]) + END_OF_TURN
            answers[pick] = torch.tensor(processor.tokenizer(text)["input_ids"])
        return answer_loss(model, data=data, answers=answers, picks=picks)

    def right(step: int) -> Tensor:
        """Return the loss of the first lesson: right working, with the short prompt at first."""
        data = short if step < plan.short_prompt_steps else full
        return told(data, right_rng, lambda side_lengths: working(teachers_rng, side_lengths))

    def taught(_: int) -> Tensor:
        """Return the loss of the second lesson: what the teacher says to the full prompt."""
        return told(
            full, taught_rng, lambda side_lengths: teacher(teachers_rng, side_lengths, plan)
        )

    lessons = [
        Lesson(plan.steps, plan.learning_rate, right),
        Lesson(plan.teacher_steps, plan.learning_rate * 2 / 3, taught),
    ]
    dtype = SHIPPED_SIZE.dtype if size is None else size.dtype
    return Untaught(model=model, processor=processor, lessons=lessons, dtype=dtype)
