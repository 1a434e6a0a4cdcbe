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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adora_vl.types import HostRows

# Rollouts share one attention call, padded to the longest of them, while none is shorter than this
# share of the longest. Padding costs time in attention alone, but each call costs time too.
SIMILAR_LENGTH_RATIO = 0.75
# Sharing is worth it up to this share of the tokens of padded separate rows. With 0.88 and 0.95 of
# the tokens a pass took 0.92 and 0.97 of the time (benchmarks/README.md, prompts of 64 tokens,
# answers of 400 and 1,024). Above, there is next to nothing to save, and rows that share nothing
# are better off in one batch.
MAX_TOKEN_RATIO = 0.97


def group_rows_by_prompt(
    prompt_ids: Tensor, prompt_mask: Tensor, image_keys: list[Any]
) -> list[list[int]]:
    """Group neighbouring rows that have the same prompt.

    Only neighbours are compared, since the rollouts of a group stand next to each other in a batch.

    Args:
        prompt_ids: (B, P), on the CPU.
        prompt_mask: (B, P), on the CPU, 0 at padding.
        image_keys: for each row a value that is equal where the prompts' images are.

    Returns:
        the row numbers of each group, in the order of the rows.
    """
    id_bytes = [row.tobytes() for row in prompt_ids.numpy()]
    mask_bytes = [row.tobytes() for row in prompt_mask.numpy()]
    prompt_keys = list(zip(id_bytes, mask_bytes, image_keys, strict=True))
    groups = groupby(range(len(prompt_keys)), key=prompt_keys.__getitem__)
    return [list(group_rows) for _, group_rows in groups]


def rows_longest_first(group_rows: Sequence[int], completion_lengths: Sequence[int]) -> list[int]:
    """Return the rows of a group in the order of the sequence: by length, the longest first.

    `completion_lengths`: of all rows of the batch. Rows of one length keep their order.
    """
    return sorted(group_rows, key=lambda row: -completion_lengths[row])


def sharing_pays(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]]
) -> bool:
    """Return whether sharing prompts is less work than separate rows, padded to the longest.

    Args:
        prompt_lengths: tokens of each group's prompt.
        completion_lengths: for each group the tokens of its rollouts.
    """
    rows = sum(len(group_lengths) for group_lengths in completion_lengths)
    longest_completion = max(max(group_lengths) for group_lengths in completion_lengths)
    longest_row = max(prompt_lengths) + longest_completion
    # A rollout's last token predicts nothing and is left out of the packed sequence.
    packed_tokens = sum(prompt_lengths)
    for group_lengths in completion_lengths:
        packed_tokens += sum(max(length - 1, 0) for length in group_lengths)
    return packed_tokens <= MAX_TOKEN_RATIO * rows * longest_row


@dataclass(frozen=True)
class GroupLayout:
    """The numbers of positions that a prompt and each of its rollouts take in the sequence.

    A rollout of C tokens takes C - 1 positions, and one of a single token takes none.
    """

    prompt_length: int
    rollout_lengths: tuple[int, ...]  # the longest first

    @property
    def first_span_length(self) -> int:
        """Positions of the first span, which is the prompt with its longest rollout, if any."""
        return self.prompt_length + sum(self.rollout_lengths[:1])

    @property
    def later_rollout_lengths(self) -> tuple[int, ...]:
        """Positions of each further span, which is a rollout after the longest one."""
        return self.rollout_lengths[1:]

    @property
    def rollout_batches(self) -> list[tuple[int, ...]]:
        """Lengths of the later rollouts, in batches of similar length for one attention call each.

        A batch begins with its longest rollout (see `SIMILAR_LENGTH_RATIO`).
        """
        batches: list[list[int]] = []
        for length in self.later_rollout_lengths:
            if not batches or length < SIMILAR_LENGTH_RATIO * batches[-1][0]:
                batches.append([])
            batches[-1].append(length)
        return [tuple(batch) for batch in batches]


class SpanBounds(NamedTuple):
    """Where the spans begin and end, as an attention kernel for variable lengths reads it."""

    query_bounds: Tensor  # (spans + 1,), int32, cumulative numbers of queries, from 0
    key_bounds: Tensor  # (spans + 1,), int32, likewise of keys
    most_queries: int  # of any span
    most_keys: int


@dataclass(frozen=True)
class SharedPrompts:
    """The layout of a packed sequence, as attention and the LM head read it.

    It is passed as an argument of the model's forward.
    """

    groups: tuple[GroupLayout, ...]
    predicting_K: Tensor  # the position that predicts the token, for each token that is scored

    @cached_property
    def span_lengths(self) -> list[int]:
        """Positions of each span, in the order of the sequence."""
        lengths: list[int] = []
        for group in self.groups:
            lengths.append(group.first_span_length)
            lengths += group.later_rollout_lengths
        return lengths

    @cached_property
    def span_bounds(self) -> SpanBounds:
        """The bounds of the spans among queries and keys, computed once for all layers.

        A rollout other than a group's first has the prompt's keys and its own.
        """
        key_counts: list[int] = []
        for group in self.groups:
            key_counts.append(group.first_span_length)
            key_counts += [group.prompt_length + length for length in group.later_rollout_lengths]
        device = self.predicting_K.device

        def cumulative_on_device(lengths: list[int]) -> Tensor:
            """Return the sums of the first 0, 1, 2, ... lengths, as int32 on the device."""
            bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            return bounds.to(device, non_blocking=True)

        return SpanBounds(
            query_bounds=cumulative_on_device(self.span_lengths),
            key_bounds=cumulative_on_device(key_counts),
            most_queries=max(self.span_lengths),
            most_keys=max(key_counts),
        )

    @cached_property
    def key_positions(self) -> Tensor:
        """The position in the sequence of each key, span by span, (K,), for all layers at once.

        A prompt's positions come again before each of its later rollouts.
        """
        position_parts: list[Tensor] = []
        start = 0
        for group in self.groups:
            prompt_positions = torch.arange(start, start + group.prompt_length)
            position_parts.append(torch.arange(start, start + group.first_span_length))
            start += group.first_span_length
            for length in group.later_rollout_lengths:
                position_parts.append(prompt_positions)
                position_parts.append(torch.arange(start, start + length))
                start += length
        positions_K = torch.cat(position_parts)
        return positions_K.to(self.predicting_K.device, non_blocking=True)


@dataclass(frozen=True)
class PackedSequence:
    """A sequence (N = 1) of S positions for B rollouts of at most C tokens."""

    ids_NS: Tensor
    positions: Tensor  # (3, N, S) for a vision-language model, (N, S) for a language model
    labels: Tensor  # (1, K), the token that each scored position predicts; -100 where there is none
    label_index_BC: Tensor  # index of each completion token in the flattened `labels`
    scored_mask_BC: Tensor  # 1 at completion tokens that are scored
    shared: SharedPrompts

    def spread_over_rows(self, label_values: Tensor) -> Tensor:
        """Spread values of the labels, (1, K), over the rows, (B, C); 0 where none is scored."""
        return label_values.flatten()[self.label_index_BC] * self.scored_mask_BC


class _SequenceBuilder:
    """Lays out prompts and rollouts one after the other, as indices on the host."""

    def __init__(self, host: HostRows, row_width: int, completion_width: int) -> None:
        """Begin an empty sequence.

        Args:
            host: copies of the B rows on the CPU.
            row_width: P + C, with padding.
            completion_width: C.
        """
        self._host = host
        self._row_width = row_width
        self._prompt_width = row_width - completion_width
        # Indices into the flattened `input_ids`: of the sequence's tokens, and of the scored ones.
        self.token_index_parts: list[Tensor] = []
        self.label_index_parts: list[Tensor] = []
        self.position_parts: list[Tensor] = []  # (3, tokens) or (tokens,)
        self.predicting: list[int] = []  # the sequence index that predicts each scored token
        self.label_index_BC = torch.zeros(len(host.lengths), completion_width, dtype=torch.long)
        self._length = 0  # tokens of the sequence so far

    def add_prompt(self, row: int, start: int, positions: Tensor) -> None:
        """Append the prompt of a row, which begins at column `start` after its padding.

        `positions`: of its tokens, (3, tokens) or (tokens,).
        """
        row_start = row * self._row_width
        prompt_end = row_start + self._prompt_width
        self.token_index_parts.append(torch.arange(row_start + start, prompt_end))
        self.position_parts.append(positions)
        self._length += self._prompt_width - start

    def add_rollout(self, row: int, prompt_end: int, positions: Tensor) -> None:
        """Append the completion of a row, less its last token, which predicts nothing.

        `prompt_end`: the sequence index of the prompt's last token, which predicts the completion's
        first. `positions`: of the appended tokens, (3, tokens) or (tokens,).
        """
        length = self._host.lengths[row]
        appended = max(length - 1, 0)
        completion_start = row * self._row_width + self._prompt_width
        self.token_index_parts.append(torch.arange(completion_start, completion_start + appended))
        self.position_parts.append(positions)
        # Tokens that a tool wrote are read but not scored.
        sampled = torch.arange(length)
        if self._host.policy_mask is not None:
            sampled = self._host.policy_mask[row, :length].nonzero()[:, 0]
        self.label_index_parts.append(completion_start + sampled)
        labels_before = len(self.predicting)
        appended_indices = range(self._length, self._length + appended)
        predicting = torch.tensor([prompt_end, *appended_indices])
        self.predicting += predicting[sampled].tolist()
        self.label_index_BC[row, sampled] = torch.arange(labels_before, len(self.predicting))
        self._length += appended

    @property
    def last_index(self) -> int:
        """The sequence index of the last token so far."""
        return self._length - 1


def _rollout_positions(
    prompt_positions: Tensor, tokens: int, completion_positions: Tensor | None
) -> Tensor:
    """Return the positions of the first `tokens` tokens of a completion, (3, tokens) or (tokens,).

    Args:
        prompt_positions: (3, prompt tokens) or (prompt tokens,).
        tokens: how many positions are asked for.
        completion_positions: those of the whole completion, (3, C); None where they count on.
    """
    if completion_positions is not None:
        return completion_positions[..., :tokens]
    # M-RoPE: the axes differ inside of an image, and text goes on after the largest of them.
    next_position = prompt_positions.amax() + 1
    counted = next_position + torch.arange(tokens)
    return counted.expand(*prompt_positions.shape[:-1], -1)


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_width: int,
    groups: Sequence[Sequence[int]],
    positions: Tensor,
    host: HostRows | None = None,
    completion_positions: Tensor | None = None,
) -> PackedSequence:
    """Lay out left-padded prompts and right-padded completions as one sequence.

    The layout is computed on the host and copied to the device without waiting. Tokens that the
    policy has not sampled are not scored.

    Args:
        input_ids: (B, P + C), on any device.
        attention_mask: (B, P + C), 0 at padding.
        completion_width: C, the width of the completions.
        groups: rows with the same prompt; each row is in one group.
        positions: positions of the prompt of each group's first row, (3, N, P) or (N, P), on the
            CPU.
        host: copies of the rows on the CPU; without it they are copied here.
        completion_positions: (3, B, C), on the CPU, where the completions' positions do not simply
            count on by one.
    """
    row_width = input_ids.size(1)
    prompt_width = row_width - completion_width
    if host is None:
        host = HostRows.of(
            input_ids[:, :prompt_width],
            attention_mask[:, :prompt_width],
            attention_mask[:, prompt_width:],
            {},
        )
    first_rows = [group_rows[0] for group_rows in groups]
    # Prompts are padded on the left, so the first 1 of the mask is where the prompt begins.
    prompt_starts = host.prompt_mask[first_rows].int().argmax(dim=1).tolist()
    builder = _SequenceBuilder(host, row_width=row_width, completion_width=completion_width)
    layouts: list[GroupLayout] = []
    for number, (group_rows, start) in enumerate(zip(groups, prompt_starts, strict=True)):
        prompt_positions = positions[..., number, start:prompt_width]
        builder.add_prompt(group_rows[0], start=start, positions=prompt_positions)
        prompt_end = builder.last_index
        rollout_lengths = []
        for row in rows_longest_first(group_rows, host.lengths):
            appended = max(host.lengths[row] - 1, 0)
            row_positions = None
            if completion_positions is not None:
                row_positions = completion_positions[..., row, :]
            rollout_positions = _rollout_positions(prompt_positions, appended, row_positions)
            builder.add_rollout(row, prompt_end=prompt_end, positions=rollout_positions)
            if appended:
                rollout_lengths.append(appended)
        layouts.append(
            GroupLayout(
                prompt_length=prompt_width - start,
                rollout_lengths=tuple(rollout_lengths),
            )
        )

    def on_device(tensor: Tensor) -> Tensor:
        """Copy a tensor to the device of `input_ids`, without waiting."""
        return tensor.to(input_ids.device, non_blocking=True)

    token_index = on_device(torch.cat(builder.token_index_parts))
    label_index = on_device(torch.cat(builder.label_index_parts))
    sequence_positions = on_device(torch.cat(builder.position_parts, dim=-1))
    flat_ids = input_ids.flatten()
    labels = flat_ids[label_index][None]
    predicting = builder.predicting
    if not predicting:  # a head needs one position at least
        labels = input_ids.new_full((1, 1), -100)
        predicting = [0]
    scored_mask_BC = attention_mask[:, prompt_width:]
    if host.policy_mask is not None:
        scored_mask_BC = scored_mask_BC * on_device(host.policy_mask[:, :completion_width])
    return PackedSequence(
        ids_NS=flat_ids[token_index][None],
        positions=sequence_positions[..., None, :],
        labels=labels,
        label_index_BC=on_device(builder.label_index_BC),
        scored_mask_BC=scored_mask_BC,
        shared=SharedPrompts(
            groups=tuple(layouts), predicting_K=on_device(torch.tensor(predicting))
        ),
    )
