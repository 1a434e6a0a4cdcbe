"""A group as one sequence: the prompt once, and after it the rollouts, each of which sees the prompt and itself.

    p1 p2 p3 | p4 a1 a2 | p4 b1 | p4 c1 c2 c3 | padding

Each rollout's part starts with a copy of the prompt's last token, which predicts the rollout's first one; its last
token predicts nothing and is left out. So G rollouts of C tokens after a prompt of P cost P - 1 + G C tokens instead of
G (P + C). Positions (M-RoPE's three) and the attention mask are those of the rollout alone, so the numbers are those of
separate sequences up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adora_vl.dedup.shared_vision import vision_model


@dataclass(frozen=True)
class Packed:
    """N sequences of S tokens for B rollouts of at most C tokens."""

    ids_NS: Tensor
    positions: Tensor  # (3 or 4, N, S) for a vision-language model, (N, S) for a language model
    mask_N1SS: Tensor | None  # True where the row may attend to the column; None where the positions say it
    labels_NS: Tensor  # the token that each position predicts, -100 where none
    source_BC: Tensor  # where in (N, S), flattened, the log-probability of a completion token stands
    mask_BC: Tensor  # completion tokens that exist

    def unpacked(self, values_NS: Tensor) -> Tensor:
        """(B, C); 0 where there is no token."""
        return values_NS.flatten()[self.source_BC] * self.mask_BC


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


def work(tokens: int, attended: int, hidden: int, intermediate: int) -> float:
    """Multiplications a layer: the linear ones of `tokens` tokens, and attention over `attended` pairs."""
    return float(tokens * (4 * hidden**2 + 3 * hidden * intermediate) + 2 * attended * hidden)


def packing_pays(prompts: list[int], completions: list[list[int]], hidden: int, intermediate: int) -> bool:
    """Whether a pass over packed groups is less work than one over padded rows.

    A dense mask costs attention over whole sequences: S^2 a group, against (P + C)^2 a rollout. For long completions
    of many rollouts that outweighs the prompt.
    """
    longest = max(prompts) + max(max(group) for group in completions)
    rows = sum(len(group) for group in completions)
    width = max(prompt - 1 + sum(group) for prompt, group in zip(prompts, completions, strict=True))
    packed = work(len(prompts) * width, len(prompts) * width**2, hidden, intermediate)
    return packed < work(rows * longest, rows * longest**2, hidden, intermediate)


def pack(
    input_ids: Tensor, attention_mask: Tensor, completion: int, groups: list[list[int]], positions: Tensor
) -> Packed:
    """Pack left-padded prompts and right-padded completions.

    `input_ids`, `attention_mask`: (B, P + C). `completion`: C. `positions`: of the prompt tokens of each group's first
    row, (3, N, P) or (N, P).
    """
    device, prompt = input_ids.device, input_ids.size(1) - completion
    lengths = attention_mask[:, prompt:].sum(dim=1).tolist()
    starts = [int(attention_mask[group[0], :prompt].int().argmax()) for group in groups]
    widths = [prompt - s - 1 + sum(int(lengths[r]) for r in g) for s, g in zip(starts, groups, strict=True)]
    n, width = len(groups), max(max(widths), 1)
    ids = input_ids.new_zeros(n, width)
    labels = input_ids.new_full((n, width), -100)
    segment = input_ids.new_full((n, width), -1)
    place = positions.new_zeros(*positions.shape[:-1], width)
    source = input_ids.new_zeros(len(input_ids), completion)
    for number, (group, start) in enumerate(zip(groups, starts, strict=True)):
        shared = prompt - 1 - start
        ids[number, :shared] = input_ids[group[0], start : prompt - 1]
        segment[number, :shared] = 0
        place[..., number, :shared] = positions[..., number, start : prompt - 1]
        following = positions[..., number, start:prompt].amax() + 1
        at = shared
        for order, row in enumerate(group, start=1):
            length = int(lengths[row])
            if not length:
                continue
            span = slice(at, at + length)
            ids[number, span] = input_ids[row, prompt - 1 : prompt - 1 + length]
            labels[number, span] = input_ids[row, prompt : prompt + length]
            segment[number, span] = order
            place[..., number, at] = positions[..., number, prompt - 1]
            place[..., number, at + 1 : at + length] = following + torch.arange(length - 1, device=device)
            source[row, :length] = number * width + torch.arange(at, at + length, device=device)
            at += length
    return Packed(ids, place, _mask(segment), labels, source, attention_mask[:, prompt:])


def _mask(segment_NS: Tensor) -> Tensor:
    """Causal, within the shared prompt and the own part. Padding sees itself too, so that no row is empty."""
    query, key = segment_NS[:, :, None], segment_NS[:, None, :]
    width = segment_NS.size(1)
    causal = torch.ones(width, width, dtype=torch.bool, device=segment_NS.device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=segment_NS.device)
    allowed = causal & (key >= 0) & ((key == 0) | (key == query))
    return (allowed | itself)[:, None]


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
