"""Packs groups into one sequence: each prompt once, then its rollouts, without padding.

    p1 p2 p3 a1 a2 c1 | q1 q2 d1 d2 d3 | ...

Here the prompt p has the rollouts `a1 a2 a3`, `b1` and `c1 c2`, and q has `d1 d2 d3 d4`.

The prompt's last position predicts the first token of every rollout. A rollout's last token
predicts nothing and is left out. So G rollouts of C tokens after a prompt of P cost P + G (C - 1)
tokens instead of G (P + C). Positions (M-RoPE's three) are those of the rollout alone, and
`adora_vl.packing.split_attention` lets each rollout see its prompt and itself. The longest rollout
comes first: with its prompt it is one causal sequence, which every kernel supports. So a row that
shares its prompt with no other row is an ordinary sequence here, only without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from adora_vl.types import HostRows

# Rollouts share one attention call, padded to the longest of them, while none is shorter than this
# share of the longest. Padding costs time in attention alone, but each call costs time too.
ALIKE = 0.75
# Sharing is worth it up to this share of the tokens of padded separate rows. With 0.88 and 0.95 of
# the tokens a pass took 0.92 and 0.97 of the time (benchmarks/README.md, prompts of 64 tokens,
# answers of 400 and 1,024). Above, there is next to nothing to save, and rows that share nothing
# are better off in one batch.
WORTH = 0.97


def groups_of(prompt_ids: Tensor, prompt_mask: Tensor, images: list[Any]) -> list[list[int]]:
    """Group neighbouring rows that have the same prompt.

    `prompt_ids`, `prompt_mask`: (B, P), on the CPU. `images`: for each row a value that is equal
    where the images are.
    """
    ids = [row.tobytes() for row in prompt_ids.numpy()]
    mask = [row.tobytes() for row in prompt_mask.numpy()]
    prompts = list(zip(ids, mask, images, strict=True))
    return [list(group) for _, group in groupby(range(len(prompts)), key=prompts.__getitem__)]


def longest_first(group: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the rows of a group in the order of the sequence: by length, the longest first."""
    return sorted(group, key=lambda row: -lengths[row])


def sharing_pays(prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> bool:
    """Return whether sharing prompts is less work than separate rows, padded to the longest.

    `prompts`: the length of each group's prompt. `completions`: for each group the lengths of its
    rollouts. All lengths are numbers of tokens.
    """
    rows = sum(len(group) for group in completions)
    longest_row = max(prompts) + max(max(group) for group in completions)
    # A rollout's last token predicts nothing and is left out of the packed sequence.
    packed_tokens = sum(prompts)
    for group in completions:
        packed_tokens += sum(max(length - 1, 0) for length in group)
    return packed_tokens <= WORTH * rows * longest_row


@dataclass(frozen=True)
class Group:
    """The numbers of positions that a prompt and each of its rollouts take in the sequence."""

    prompt: int
    rollouts: tuple[int, ...]  # the longest first

    @property
    def first(self) -> int:
        """Positions of the first span, which is the prompt with its longest rollout."""
        return self.prompt + sum(self.rollouts[:1])

    @property
    def others(self) -> tuple[int, ...]:
        """Positions of each further span, which is one of the other rollouts."""
        return self.rollouts[1:]

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """The other rollouts, divided into batches of similar lengths (see `ALIKE`)."""
        batches: list[list[int]] = []
        for length in self.others:
            if not batches or length < ALIKE * batches[-1][0]:
                batches.append([])
            batches[-1].append(length)
        return [tuple(batch) for batch in batches]


@dataclass(frozen=True)
class SharedPrompts:
    """The layout of a packed sequence, as attention and the LM head read it.

    It is passed as an argument of the model's forward.
    """

    groups: tuple[Group, ...]
    predicting_K: Tensor  # the position that predicts the token, for each token that is scored

    @cached_property
    def spans(self) -> list[int]:
        """Positions of each span, in the order of the sequence."""
        return [length for group in self.groups for length in (group.first, *group.others)]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """What an attention kernel of variable lengths reads, computed once for all layers.

        Returns the bounds of the spans among the queries and among the keys, both (spans + 1,)
        int32, then the largest number of queries and of keys of any span. A rollout other than a
        group's first has the prompt's keys and its own.
        """
        keys: list[int] = []
        for group in self.groups:
            keys.append(group.first)
            keys += [group.prompt + length for length in group.others]
        device = self.predicting_K.device

        def cumulative(lengths: list[int]) -> Tensor:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            return ends.to(device, non_blocking=True)

        return cumulative(self.spans), cumulative(keys), max(self.spans), max(keys)

    @cached_property
    def key_positions(self) -> Tensor:
        """The position in the sequence of each key, span by span, (K,), for all layers at once."""
        parts: list[Tensor] = []
        start = 0
        for group in self.groups:
            prompt = torch.arange(start, start + group.prompt)
            parts.append(torch.arange(start, start + group.first))
            start += group.first
            for length in group.others:
                rollout = torch.arange(start, start + length)
                parts.append(prompt)
                parts.append(rollout)
                start += length
        positions_K = torch.cat(parts)
        return positions_K.to(self.predicting_K.device, non_blocking=True)


@dataclass(frozen=True)
class Packed:
    """A sequence (N = 1) of S positions for B rollouts of at most C tokens."""

    ids_NS: Tensor
    positions: Tensor  # (3, N, S) for a vision-language model, (N, S) for a language model
    labels: Tensor  # (1, K), the token that each scored position predicts; -100 where there is none
    source_BC: Tensor  # index of each completion token in the flattened `labels`
    mask_BC: Tensor  # 1 at completion tokens that are scored
    shared: SharedPrompts

    def unpacked(self, values: Tensor) -> Tensor:
        """Spread values of the labels, (1, K), over the rows, (B, C); 0 where none is scored."""
        return values.flatten()[self.source_BC] * self.mask_BC


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    completion: int,
    groups: Sequence[Sequence[int]],
    positions: Tensor,
    host: HostRows | None = None,
    completion_positions: Tensor | None = None,
) -> Packed:
    """Lay out left-padded prompts and right-padded completions as one sequence.

    The layout is computed on the host and copied to the device without waiting. Tokens that the
    policy has not sampled are not scored.

    Args:
        input_ids: (B, P + C), on any device.
        attention_mask: (B, P + C), 0 at padding.
        completion: C, the width of the completions.
        groups: rows with the same prompt; each row is in one group.
        positions: positions of the prompt of each group's first row, (3, N, P) or (N, P), on the
            CPU.
        host: copies of the rows on the CPU; without it they are copied here.
        completion_positions: (3, B, C), on the CPU, where the completions' positions do not simply
            count on by one.
    """
    width = input_ids.size(1)
    prompt = width - completion
    host = host or HostRows.of(
        input_ids[:, :prompt], attention_mask[:, :prompt], attention_mask[:, prompt:], {}
    )
    lengths = host.lengths
    starts = host.prompt_mask[[group[0] for group in groups]].int().argmax(dim=1).tolist()
    source_BC = torch.zeros(len(input_ids), completion, dtype=torch.long)
    id_parts: list[Tensor] = []  # indices into the flattened `input_ids`, in sequence order
    position_parts: list[Tensor] = []
    label_parts: list[Tensor] = []  # indices of the scored tokens in the flattened `input_ids`
    predicting: list[int] = []  # the sequence index that predicts each scored token
    spans: list[Group] = []
    at = 0  # sequence index of the next token
    scored = 0
    for number, (group, start) in enumerate(zip(groups, starts, strict=True)):
        prompt_positions = positions[..., number, start:prompt]
        id_parts.append(torch.arange(group[0] * width + start, group[0] * width + prompt))
        position_parts.append(prompt_positions)
        at += prompt - start
        last = at - 1
        following = prompt_positions.amax() + 1  # M-RoPE: the axes differ inside of an image
        rows = longest_first(group, lengths)
        for row in rows:
            length = lengths[row]
            begin = row * width + prompt
            tokens = max(length - 1, 0)
            id_parts.append(torch.arange(begin, begin + tokens))
            if completion_positions is None:
                counted = following + torch.arange(tokens)
                position_parts.append(counted.expand(*prompt_positions.shape[:-1], -1))
            else:
                position_parts.append(completion_positions[..., row, :tokens])
            sampled = torch.arange(length)
            if host.policy_mask is not None:
                sampled = host.policy_mask[row, :length].nonzero()[:, 0]
            label_parts.append(begin + sampled)
            predicting += torch.tensor([last, *range(at, at + tokens)])[sampled].tolist()
            source_BC[row, sampled] = torch.arange(scored, scored + len(sampled))
            at += tokens
            scored += len(sampled)
        rollout_lengths = tuple(lengths[row] - 1 for row in rows if lengths[row] > 1)
        spans.append(Group(prompt=prompt - start, rollouts=rollout_lengths))

    def on_device(part: Tensor) -> Tensor:
        return part.to(input_ids.device, non_blocking=True)

    id_index = on_device(torch.cat(id_parts))
    label_index = on_device(torch.cat(label_parts))
    sequence_positions = on_device(torch.cat(position_parts, dim=-1))
    source_BC = on_device(source_BC)
    predicting_K = on_device(torch.tensor(predicting or [0]))  # a head needs one position at least
    flat = input_ids.flatten()
    mask_BC = attention_mask[:, prompt:]
    if host.policy_mask is not None:
        mask_BC = mask_BC * host.policy_mask[:, :completion].to(mask_BC.device, non_blocking=True)
    return Packed(
        ids_NS=flat[id_index][None],
        positions=sequence_positions[..., None, :],
        labels=flat[label_index][None] if scored else input_ids.new_full((1, 1), -100),
        source_BC=source_BC,
        mask_BC=mask_BC,
        shared=SharedPrompts(groups=tuple(spans), predicting_K=predicting_K),
    )
