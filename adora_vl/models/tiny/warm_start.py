"""The tiny model's supervised warm start: it learns to see, and it learns to answer from an unreliable teacher.

The teacher's notebook holds right worked answers and a pupil's typical slips (forgetting to halve, adding the legs of a
right triangle). The model copies both, so it solves a part of the problems, and a reward has something to sort out:
the situation that GRPO meets in a real pretrained model, at a size where it can be watched in minutes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adora_vl.models.tiny.fit import fit
from adora_vl.models.tiny.processor import END_OF_TURN
from adora_vl.prompts import SYSTEM_PROMPT, conversation_with_images
from data_prep.schema import Row

# Share of slips in the teacher's answers, by family: where it is above one half, greedy decoding is wrong at first.
SLIPS = {"isosceles": 0.7, "polygon": 0.35, "right_triangle": 0.7, "crossing": 0.35, "circle": 0.7}


@dataclass(frozen=True)
class WarmStart:
    """Steps of `batch_size` examples. The short prompts of the first part let the eye learn several times faster."""

    steps: int = 1800
    short_prompt_steps: int = 800
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    rows: int = 8000
    seed: int = 1


@dataclass(frozen=True)
class _Encoded:
    """`rows` as tensors: prompts (list of (T,) int64), pixels (rows, patches, values) half, grids (rows, 3)."""

    prompts: list[Tensor]
    pixels: Tensor
    grids: Tensor


def _encode(processor: Any, rows: list[Row], system_prompt: str) -> _Encoded:
    texts = [
        processor.apply_chat_template(
            conversation_with_images(row["problem"], 1, system_prompt), add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    batch = processor(text=texts, images=[row["images"] for row in rows], padding=True, return_tensors="pt")
    prompts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    pixels = batch["pixel_values"].view(len(rows), -1, batch["pixel_values"].shape[-1])
    return _Encoded(prompts, pixels.half(), batch["image_grid_thw"])


def _answers(processor: Any, rows: list[Row], rng: random.Random) -> list[Tensor]:
    """The notebook: for each row its solution, or its slip as often as `SLIPS` says."""
    answers = []
    for row in rows:
        meta = row["meta"]
        text = meta["slip"] if rng.random() < SLIPS[meta["family"]] else meta["solution"]
        answers.append(torch.tensor(processor.tokenizer(text + END_OF_TURN)["input_ids"]))
    return answers


def _loss(model: Any, data: _Encoded, answers: list[Tensor], picks: list[int]) -> Tensor:
    pad = model.config.get_text_config().pad_token_id
    sequences = [torch.cat([data.prompts[i], answers[i]]) for i in picks]
    labels = [torch.cat([torch.full_like(data.prompts[i], -100), answers[i]]) for i in picks]
    ids_BT = pad_sequence(sequences, batch_first=True, padding_value=pad)
    output = model(
        input_ids=ids_BT,
        attention_mask=pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True),
        labels=pad_sequence(labels, batch_first=True, padding_value=-100),
        mm_token_type_ids=(ids_BT == model.config.image_token_id).int(),
        pixel_values=data.pixels[picks].flatten(0, 1).float(),
        image_grid_thw=data.grids[picks],
    )
    loss: Tensor = output.loss
    return loss


def warm_start(model: Any, processor: Any, rows: list[Row], plan: WarmStart) -> float:
    """Train `model` in place on `rows` (synthetic, one image each). Returns the mean loss of the last 50 steps."""
    rng = random.Random(plan.seed)
    short = _encode(processor, rows, "Answer.")
    full = _encode(processor, rows, SYSTEM_PROMPT)
    answers = _answers(processor, rows, rng)

    def loss_of(step: int) -> Tensor:
        data = short if step < plan.short_prompt_steps else full
        return _loss(model, data, answers, rng.sample(range(len(rows)), plan.batch_size))

    return fit(model, loss_of, plan.steps, plan.learning_rate)
