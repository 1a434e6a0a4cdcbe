"""Which rows share a prompt, and the positions of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adora_vl.dedup.shared_vision import vision_model


def groups_of(prompt_ids: Tensor, prompt_mask: Tensor, images: list[Any]) -> list[list[int]]:
    """Neighbouring rows with the same prompt. `images`: what tells a row's images apart."""
    groups: list[list[int]] = []
    for row in range(len(prompt_ids)):
        last = groups[-1][0] if groups else None
        same = (
            last is not None
            and images[last] == images[row]
            and torch.equal(prompt_ids[last], prompt_ids[row])
            and torch.equal(prompt_mask[last], prompt_mask[row])
        )
        groups[-1].append(row) if same else groups.append([row])
    return groups


def prompt_positions(
    model: Any, prompt_ids: Tensor, prompt_mask: Tensor, token_types: Tensor | None, grids: Tensor | None
) -> Tensor:
    """Positions of left-padded prompts as the model itself counts them: (3, N, P) with M-RoPE, else (N, P)."""
    inner = vision_model(model)
    if inner is not None and token_types is not None and grids is not None:
        positions: Tensor = inner.get_rope_index(
            prompt_ids, mm_token_type_ids=token_types, image_grid_thw=grids, attention_mask=prompt_mask
        )[0]
        return positions
    counted = (prompt_mask.cumsum(dim=-1) - 1).clamp(min=0)
    return counted.expand(3, *counted.shape) if inner is not None else counted
