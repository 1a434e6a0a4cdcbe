"""Rows end to end in one sequence, without padding: attention kernels for variable lengths keep them apart.

    p1 p2 p3 a1 | q1 q2 b1 b2 b3 | ...

Transformers hands a kernel the rows' bounds where the text positions start anew (its documented form for a
vision-language model: four rows of positions, the text's first and then M-RoPE's three) and no mask is given. A row's
last token predicts nothing and is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adora_vl.dedup.shared_prompt import Packed


def flat_pays(prompts: list[int], completions: list[int]) -> bool:
    """Whether any row would be padded. Tokens of each row's prompt and completion."""
    longest = max(prompts) + max(completions)
    return sum(prompts) + sum(completions) < longest * len(prompts)


def end_to_end(input_ids: Tensor, attention_mask: Tensor, completion: int, positions: Tensor) -> Packed:
    """Lay left-padded prompts with right-padded completions one after the other.

    `input_ids`, `attention_mask`: (B, P + C). `completion`: C. `positions`: of the prompt tokens, (3, B, P) with
    M-RoPE, else (B, P). Of a row without a completion the prompt stays: its image has to have a place.
    """
    device, prompt = input_ids.device, input_ids.size(1) - completion
    lengths = attention_mask[:, prompt:].sum(dim=1).tolist()
    starts = attention_mask[:, :prompt].int().argmax(dim=1).tolist()
    source = input_ids.new_zeros(len(input_ids), completion)
    ids, labels, text, place, at = [], [], [], [], 0
    for row in range(len(input_ids)):
        start, length = int(starts[row]), int(lengths[row])
        width = prompt - start + max(length - 1, 0)
        first = at + prompt - start - 1  # predicts the completion's first token
        ids.append(input_ids[row, start : start + width])
        labels.append(input_ids.new_full((width,), -100))
        labels[-1][width - length :] = input_ids[row, prompt : prompt + length]
        text.append(torch.arange(width, device=device))
        own = positions[..., row, start:prompt]
        following = own.amax() + 1 + torch.arange(max(length - 1, 0), device=device)
        place.append(torch.cat([own, following.expand(*own.shape[:-1], -1)], dim=-1))
        source[row, :length] = torch.arange(first, first + length, device=device)
        at += width
    placed = torch.cat(place, dim=-1)
    if placed.dim() == 2:  # M-RoPE
        placed = torch.cat([torch.cat(text)[None], placed])
    return Packed(
        torch.cat(ids)[None], placed[..., None, :], torch.cat(labels)[None], source, attention_mask[:, prompt:]
    )
