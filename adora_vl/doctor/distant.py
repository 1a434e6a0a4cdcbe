"""Prompts moved far back: the error of a rounded rotary angle grows with the distance, and the first tokens of an
answer to a short prompt never see it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from adora_vl.doctor.probe import Prompts
from adora_vl.rollout.tokens import never_sampled_ids

POSITION = 2000  # about where an answer begins
ROWS = 2  # prompts, of each rank


def far_prompts(trainer: Any, prompts: Prompts, tokens: int) -> Prompts | None:
    """Some of `prompts`, so far back that `tokens` can still be sampled; the same distance on all ranks. None where
    there is no room.
    """
    near = head(prompts, ROWS)
    by = min(gather_object([room(trainer, near, tokens)]))
    return moved_back(trainer, near, by) if by > 0 else None


def head(prompts: Prompts, rows: int) -> Prompts:
    """The first prompts alone, with the fields of their own images."""
    ids = prompts.ids[:rows]
    if prompts.num_images is None or prompts.images is None:
        return replace(prompts, names=prompts.names[:rows], ids=ids)
    counts = prompts.num_images[:rows]
    grid = prompts.fields["image_grid_thw"][: sum(counts)]
    fields = {
        "image_grid_thw": grid,
        "pixel_values": prompts.fields["pixel_values"][: int(grid.prod(dim=-1).sum())],
        "mm_token_type_ids": prompts.fields["mm_token_type_ids"][:rows, -max(map(len, ids)) :],
    }
    return Prompts(prompts.names[:rows], ids, prompts.images[:rows], fields, counts)


def room(trainer: Any, prompts: Prompts, tokens: int) -> int:
    """How many tokens fit before each prompt, with `tokens` to be sampled after it; up to `POSITION` in all."""
    model = trainer.model.config.get_text_config().max_position_embeddings
    engine = trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    return int(min(POSITION, min(model, engine) - tokens) - max(map(len, prompts.ids)))


def moved_back(trainer: Any, prompts: Prompts, by: int) -> Prompts:
    """Each prompt after `by` tokens of its own text in random order, the same for the same seed."""
    special = {*trainer._tokenizer.all_special_ids, *never_sampled_ids(trainer._tokenizer)}
    draw = random.Random(trainer.args.seed)  # one of its own: the run's random state stays
    ids = [[*draw.choices([token for token in row if token not in special], k=by), *row] for row in prompts.ids]
    fields = dict(prompts.fields)
    if "mm_token_type_ids" in fields:
        kinds = fields["mm_token_type_ids"]
        fields["mm_token_type_ids"] = torch.cat([kinds.new_zeros(len(ids), by), kinds], dim=1)
    return replace(prompts, ids=ids, fields=fields)
