"""`tiny_perimeter`, the demo's start: the tiny model, taught to add up sides that it reads, and
also to guess.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from adora_vl.builtin.processor import END_OF_TURN
from adora_vl.builtin.small_model import check_place, fit, save_built
from adora_vl.builtin.tiny_vl import Encoded, answer_loss, encode
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
    """What the second stage copies.

    Without knowing the kind of problem, it guesses one of the two usual digits.
    """
    return guess(rng) if rng.random() < plan.guesses else working(rng, sides, slip_share=plan.slips)


def build_perimeter_model(
    folder: Path, plan: PerimeterStart | None = None, rows: list[Row] | None = None
) -> dict[str, object]:
    """As `build_tiny_model`, going on from the shipped tiny model."""
    check_place(folder)
    plan = plan or PerimeterStart()
    processor = load_processor(str(PRETRAINED))
    model: Any = AutoModelForImageTextToText.from_pretrained(PRETRAINED, dtype=torch.float32)
    rows = rows or list(generate(plan.rows, seed=_DATA_SEED, families=("perimeter",)))
    short, full = (encode(processor, rows, prompt) for prompt in ("Answer.", SYSTEM_PROMPT))
    sides = [sides_of(row["problem"], row["meta"]["solution"]) for row in rows]
    rng, first, second = (random.Random(plan.seed) for _ in range(3))

    def told(data: Encoded, drawn: random.Random, tell: Callable[[tuple[int, ...]], str]) -> Tensor:
        picks = drawn.sample(range(len(rows)), plan.batch_size)
        answers = {
            i: torch.tensor(processor.tokenizer(tell(sides[i]) + END_OF_TURN)["input_ids"])
            for i in picks
        }
        return answer_loss(model, data, answers, picks)

    def right(step: int) -> Tensor:
        return told(
            short if step < plan.short_prompt_steps else full, first, lambda one: working(rng, one)
        )

    def taught(_: int) -> Tensor:
        return told(full, second, lambda one: teacher(rng, one, plan))

    losses = [
        fit(model, right, plan.steps, plan.learning_rate),
        fit(model, taught, plan.teacher_steps, plan.learning_rate * 2 / 3),
    ]
    return save_built(
        folder, model, processor, plan, final_losses=[round(loss, 4) for loss in losses]
    )
