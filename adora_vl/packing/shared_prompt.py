"""Groups as one sequence: each prompt once, and after it its rollouts, without padding.

    p1 p2 p3 a1 a2 c1 | q1 q2 d1 d2 d3 | ...      rollouts `a1 a2 a3`, `b1` and `c1 c2` of p, `d1 d2
        d3 d4` of q

The prompt's last position predicts the first token of every rollout. A rollout's last token
predicts nothing and is left out. So G rollouts of C tokens after a prompt of P cost P + G (C - 1)
tokens instead of G (P + C). Positions (M-RoPE's three) are those of the rollout alone, and
`adora_vl.packing.split_attention` lets each rollout see its prompt and itself. The longest rollout
comes first: with its prompt it is one causal sequence, which every kernel knows. So a row that
shares its prompt with no other is an ordinary sequence here, only without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from adora_vl.types import HostRows

# Rollouts share one attention call while none is shorter than this share of the longest, up to
# which they are padded. Padding costs attention alone, and calls cost time too.
ALIKE = 0.75
# Sharing is worth it up to this share of the tokens of padded separate rows. With 0.88 and 0.95 of
# the tokens a pass took 0.92 and 0.97 of the time (benchmarks/README.md, prompts of 64 tokens,
# answers of 400 and 1,024). Above, there is next to nothing to save, and rows that share nothing
# are better off in one batch.
WORTH = 0.97


def groups_of(prompt_ids: Tensor, prompt_mask: Tensor, images: list[Any]) -> list[list[int]]:
    """Neighbouring rows with the same prompt, on the host.

    `images`: what tells a row's images apart.
    """
    tokens = [[row.tobytes() for row in part.numpy()] for part in (prompt_ids, prompt_mask)]
    content = [*zip(*tokens, images, strict=True)]
    return [list(group) for _, group in groupby(range(len(content)), key=content.__getitem__)]


def longest_first(group: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The rows of a group as they stand in the sequence."""
    return sorted(group, key=lambda row: -lengths[row])


def sharing_pays(prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> bool:
    """Whether sharing prompts is less work than separate rows, which are padded to the longest.

    `prompts`: number of tokens of each group's prompt. `completions`: those of each of its
    rollouts.
    """
    rows = sum(len(group) for group in completions)
    longest = max(prompts) + max(max(group) for group in completions)
    shared = sum(prompts) + sum(max(length - 1, 0) for group in completions for length in group)
    return shared <= WORTH * rows * longest


@dataclass(frozen=True)
class Group:
    """How many positions a prompt and each of its rollouts take in the sequence, the longest
    rollout first.
    """

    prompt: int
    rollouts: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of positions of the first span, which is the prompt with its longest rollout."""
        return self.prompt + sum(self.rollouts[:1])

    @property
    def others(self) -> tuple[int, ...]:
        """The spans of the other rollouts."""
        return self.rollouts[1:]

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """The other rollouts, divided into batches of similar lengths."""
        batches: list[list[int]] = []
        for length in self.others:
            if not batches or length < ALIKE * batches[-1][0]:
                batches.append([])
            batches[-1].append(length)
        return [tuple(batch) for batch in batches]


@dataclass(frozen=True)
class SharedPrompts:
    """What attention and the LM head have to know of a sequence of groups: an argument of the
    model's forward.
    """

    groups: tuple[Group, ...]
    predicting_K: Tensor  # the position that predicts the token, for each token that is scored

    @cached_property
    def spans(self) -> list[int]:
        """The number of positions of each span, in the order of the sequence."""
        return [length for group in self.groups for length in (group.first, *group.others)]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """For a kernel of variable lengths: the bounds of the spans among the queries, and among
        the keys, both (spans + 1,) int32; then the most queries and the most keys of a span.

        The keys of every rollout but the first are the prompt's and its own.
        """
        keys = [
            length
            for group in self.groups
            for length in (group.first, *(group.prompt + n for n in group.others))
        ]
        device = self.predicting_K.device
        ends_Q, ends_K = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
            for lengths in (self.spans, keys)
        )
        return ends_Q, ends_K, max(self.spans), max(keys)


@dataclass(frozen=True)
class Packed:
    """A sequence (N = 1) of S positions for B rollouts of at most C tokens."""

    ids_NS: Tensor
    positions: Tensor  # (3, N, S) for a vision-language model, (N, S) for a language model
    labels: Tensor  # (1, K), the token that each scored position predicts; -100 where there is none
    source_BC: Tensor  # where in `labels`, flattened, a completion token stands
    mask_BC: Tensor  # completion tokens that are scored
    shared: SharedPrompts

    def unpacked(self, values: Tensor) -> Tensor:
        """(B, C), from what the model gives for each label; 0 where there is no token."""
        return values.flatten()[self.source_BC] * self.mask_BC


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    completion: int,
    groups: Sequence[Sequence[int]],
    positions: Tensor,
    host: HostRows | None = None,
    behind: Tensor | None = None,
) -> Packed:
    """Lay out left-padded prompts and right-padded completions, on the host, and copy the layout
    without waiting.

    `input_ids`, `attention_mask`: (B, P + C). `completion`: C. `groups`: rows with the same prompt,
    each row in one group. `positions`: of the prompt tokens of each group's first row, (3, N, P) or
    (N, P). `behind`: of the completions, (3, B, C), where they do not count on one by one. These
    and `host`, what the host knows of the rows, are on the CPU; without `host` it is copied from
    the rows. Tokens that the policy has not sampled are not scored.
    """
    width = input_ids.size(1)
    prompt = width - completion
    host = host or HostRows.of(
        input_ids[:, :prompt], attention_mask[:, :prompt], attention_mask[:, prompt:], {}
    )
    lengths = host.lengths
    starts = host.prompt_mask[[group[0] for group in groups]].int().argmax(dim=1).tolist()
    source_BC = torch.zeros(len(input_ids), completion, dtype=torch.long)
    # `from_ids`, `labels`: places in `input_ids`
    from_ids, place, labels, predicting, spans = (
        [],
        [],
        [],
        [],
        [],
    )
    at = scored = 0
    for number, (group, start) in enumerate(zip(groups, starts, strict=True)):
        own = positions[..., number, start:prompt]
        from_ids.append(torch.arange(group[0] * width + start, group[0] * width + prompt))
        place.append(own)
        at += prompt - start
        last = at - 1
        following = own.amax() + 1
        rows = longest_first(group, lengths)
        for row in rows:
            length = lengths[row]
            begin = row * width + prompt
            tokens = max(length - 1, 0)
            from_ids.append(torch.arange(begin, begin + tokens))
            counted = (following + torch.arange(tokens)).expand(*own.shape[:-1], -1)
            place.append(counted if behind is None else behind[..., row, :tokens])
            sampled = (
                torch.arange(length)
                if host.policy_mask is None
                else host.policy_mask[row, :length].nonzero()[:, 0]
            )
            labels.append(begin + sampled)
            predicting += torch.tensor([last, *range(at, at + tokens)])[sampled].tolist()
            source_BC[row, sampled] = torch.arange(scored, scored + len(sampled))
            at = at + tokens
            scored = scored + len(sampled)
        spans.append(
            Group(prompt - start, tuple(lengths[row] - 1 for row in rows if lengths[row] > 1))
        )
    layout = [torch.cat(from_ids), torch.cat(labels), torch.cat(place, dim=-1), source_BC]
    layout.append(torch.tensor(predicting or [0]))  # a head needs at least one position
    ids, labelled, places, source, scores = (
        part.to(input_ids.device, non_blocking=True) for part in layout
    )
    flat = input_ids.flatten()
    mask_BC = attention_mask[:, prompt:]
    if host.policy_mask is not None:
        mask_BC = mask_BC * host.policy_mask[:, :completion].to(mask_BC.device, non_blocking=True)
    return Packed(
        ids_NS=flat[ids][None],
        positions=places[..., None, :],
        labels=flat[labelled][None] if scored else input_ids.new_full((1, 1), -100),
        source_BC=source,
        mask_BC=mask_BC,
        shared=SharedPrompts(tuple(spans), scores),
    )
