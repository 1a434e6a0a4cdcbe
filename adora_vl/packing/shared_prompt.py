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
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adora_vl.types import RowsOnCpu

# A packed pass is worth it if it has at most this share of the tokens of padded rows. With 0.88 and
# 0.95 of the tokens a pass took 0.92 and 0.97 of the time (benchmarks/README.md, prompts of 64
# tokens, answers of 400 and 1,024). Above, there is next to nothing to save, and rows that share
# nothing are better off in one batch.
MAX_PACKED_TOKEN_SHARE = 0.97


def group_rows_by_prompt(
    prompt_ids: Tensor, prompt_mask: Tensor, image_keys: list[Any]
) -> list[list[int]]:
    """Group neighbouring rows that have the same prompt and images.

    Only neighbours are compared, since the rollouts of a group are consecutive rows of a batch.
    For example, rows with the prompts p p q p become the groups [[0, 1], [2], [3]].

    Args:
        prompt_ids: (B, P), B rows of prompts that are padded to P tokens, on the CPU.
        prompt_mask: (B, P), on the CPU, 0 at padding.
        image_keys: (B,), equal for two rows if the images of their prompts are equal.

    Returns:
        the row numbers of each group, in the order of the rows.
    """
    id_bytes = [row.tobytes() for row in prompt_ids.numpy()]
    mask_bytes = [row.tobytes() for row in prompt_mask.numpy()]
    prompt_keys = list(zip(id_bytes, mask_bytes, image_keys, strict=True))
    groups: list[list[int]] = []
    for row, prompt_key in enumerate(prompt_keys):
        if row > 0 and prompt_key == prompt_keys[row - 1]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def rows_longest_first(group_rows: Sequence[int], completion_lengths: Sequence[int]) -> list[int]:
    """Sort the rows of a group by the length of their completions, the longest first.

    A packed sequence has the rollouts in this order. Rows of equal length keep their order. For
    example, the group of rows 2, 3, 4 with the lengths 5, 9, 5 becomes 3, 2, 4.

    `completion_lengths`: the lengths of all B rows of the batch, by row number.
    """
    return sorted(group_rows, key=lambda row: -completion_lengths[row])


def packing_pays(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]]
) -> bool:
    """Return whether a packed sequence has enough fewer tokens than padded rows to be faster.

    For example, a prompt of 10 tokens with completions of 5 and 3 tokens takes 2 padded rows of 15
    tokens, which are 30. Packed it takes 10 + 4 + 2 = 16 tokens, so packing pays.

    Args:
        prompt_lengths: tokens of each group's prompt.
        completion_lengths: for each group the tokens of its rollouts.
    """
    rows = sum(len(group_lengths) for group_lengths in completion_lengths)
    longest_completion = max(max(group_lengths) for group_lengths in completion_lengths)
    padded_row_tokens = max(prompt_lengths) + longest_completion
    # A rollout's last token predicts nothing and is left out of the packed sequence.
    packed_tokens = sum(prompt_lengths)
    for group_lengths in completion_lengths:
        packed_tokens += sum(max(length - 1, 0) for length in group_lengths)
    # With a larger share of the padded rows' tokens a packed pass was measured to save no time.
    return packed_tokens <= MAX_PACKED_TOKEN_SHARE * rows * padded_row_tokens


@dataclass(frozen=True)
class GroupLayout:
    """How many positions a prompt and each of its rollouts take in the packed sequence.

    A rollout of C tokens takes C - 1 positions, since its last token predicts nothing. A rollout of
    a single token takes no position, and has no entry here.

    Attention is computed span by span. The first span is the prompt with its longest rollout. Each
    other rollout is a span of its own.

    For example, a prompt of 3 tokens with rollouts of 3, 1 and 2 tokens takes the positions
    `p1 p2 p3 a1 a2 c1`. Its `prompt_length` is 3, and its `rollout_lengths` are (2, 1). Its spans
    are `p1 p2 p3 a1 a2` and `c1`.
    """

    prompt_length: int
    rollout_lengths: tuple[int, ...]  # the longest first

    @property
    def first_span_length(self) -> int:
        """Positions of the first span: the prompt and its longest rollout, if there is one."""
        return self.prompt_length + sum(self.rollout_lengths[:1])

    @property
    def later_rollout_lengths(self) -> tuple[int, ...]:
        """Positions of each rollout after the longest one."""
        return self.rollout_lengths[1:]


class SpanBounds(NamedTuple):
    """Where the spans begin and end, in the form that attention kernels for variable lengths read.

    For example, two spans with 5 and 1 queries and with 5 and 4 keys have the `query_bounds`
    0, 5, 6 and the `key_bounds` 0, 5, 9.
    """

    query_bounds: Tensor  # (spans + 1,), int32, cumulative numbers of queries, from 0
    key_bounds: Tensor  # (spans + 1,), int32, cumulative numbers of keys, from 0
    max_queries: int  # the most queries that a span has
    max_keys: int  # the most keys that a span has


@dataclass(frozen=True)
class PackedLayout:
    """Where prompts and rollouts are in a packed sequence.

    Attention and the LM head read it. It is passed as an argument of the model's forward.

    The sequence is divided into spans (see `GroupLayout`). A prompt with its longest rollout is one
    span, whose queries see the keys of this span. Each other rollout is a span, whose queries see
    the prompt's keys and its own keys.

    For example, `p1 p2 p3 a1 a2 c1` has a prompt of 3 tokens, and the rollouts `a1 a2 a3` and
    `c1 c2` without their last tokens. Its spans are:

        queries          keys              positions of the keys
        p1 p2 p3 a1 a2   p1 p2 p3 a1 a2    0 1 2 3 4
        c1               p1 p2 p3 c1       0 1 2 5

    Position 2 (p3) predicts a1 and c1, so the predicting positions are 2 3 4 for a, and 2 5 for c.
    """

    groups: tuple[GroupLayout, ...]
    # (labels,), for each label, a token that is scored: the position whose output predicts it
    predicting_positions: Tensor

    @cached_property
    def span_lengths(self) -> list[int]:
        """The number of positions of each span, in the order of the sequence.

        They are 5, 1 in the example above.
        """
        lengths: list[int] = []
        for group in self.groups:
            lengths.append(group.first_span_length)
            lengths += group.later_rollout_lengths
        return lengths

    @cached_property
    def key_counts(self) -> list[int]:
        """The number of keys that each span sees, in the order of the sequence.

        They are 5, 4 in the example above: the rollout `c1` sees three keys of the prompt and its
        own one.
        """
        counts: list[int] = []
        for group in self.groups:
            counts.append(group.first_span_length)
            counts += [group.prompt_length + length for length in group.later_rollout_lengths]
        return counts

    @cached_property
    def span_bounds(self) -> SpanBounds:
        """The bounds of the spans, computed once for all layers.

        In the example above the bounds of queries are 0, 5, 6, and those of keys are 0, 5, 9.
        """
        device = self.predicting_positions.device

        def cumulative_on_device(lengths: list[int]) -> Tensor:
            """Return the sums of the first 0, 1, 2, ... lengths: 5, 1 becomes 0, 5, 6."""
            bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            return bounds.to(device, non_blocking=True)

        return SpanBounds(
            query_bounds=cumulative_on_device(self.span_lengths),
            key_bounds=cumulative_on_device(self.key_counts),
            max_queries=max(self.span_lengths),
            max_keys=max(self.key_counts),
        )

    @cached_property
    def key_positions_K(self) -> Tensor:
        """The positions in the sequence of the K keys of all spans, computed once for all layers.

        The prompt's positions come once with the longest rollout, and once more before each other
        rollout. They are 0 1 2 3 4 and 0 1 2 5 in the example above.
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
        return positions_K.to(self.predicting_positions.device, non_blocking=True)


@dataclass(frozen=True)
class PackedSequence:
    """N = 1 packed sequence of S positions, for B rollouts of at most C tokens.

    For example, the rollouts `a1 a2` and `b1 b2 b3` of one prompt p are packed as `p b1 b2 a1`,
    the longest first. The labels are `b1 b2 b3 a1 a2`. They are the tokens that are scored.
    """

    ids_NS: Tensor
    position_ids: Tensor  # (3, N, S) for a vision-language model, (N, S) for a language model
    labels: Tensor  # (1, labels), the tokens that are scored; -100 alone where no token is
    # For each completion token its index in the flattened `labels`; 0 where it is not scored. In
    # the example: [[3, 4, 0], [0, 1, 2]].
    label_index_BC: Tensor
    scored_mask_BC: Tensor  # 1 at completion tokens that are scored
    layout: PackedLayout

    def spread_over_rows(self, label_values: Tensor) -> Tensor:
        """Spread one value per label, (1, labels), over the rows, (B, C); other places get 0.

        In the example above the values 10 20 30 40 50 become [[40, 50, 0], [10, 20, 30]].
        """
        return label_values.flatten()[self.label_index_BC] * self.scored_mask_BC


class _SequenceBuilder:
    """Lays out prompts and rollouts one after the other, as indices on the CPU.

    B rows are padded: a prompt on its left, a completion on its right. With P = 3 and C = 3, row 0
    is `_ p1 p2 a1 a2 a3` and row 1 is `_ p1 p2 b1 b2 _`. The flattened `input_ids` are both rows,
    one after the other, so p1 has the index 1 and b1 the index 9. This group is laid out as

        sequence:         p1 p2 a1 a2 b1
        token index:       1  2  3  4  9
        labels:           a1 a2 a3 b1 b2
        label index:       3  4  5  9 10
        predicted by:      1  2  3  1  4    (positions of the sequence)
    """

    def __init__(self, rows_on_cpu: RowsOnCpu, row_width: int, completion_width: int) -> None:
        """Create an empty sequence.

        Args:
            rows_on_cpu: copies of the B rows on the CPU.
            row_width: P + C, with padding.
            completion_width: C.
        """
        self._rows_on_cpu = rows_on_cpu
        self._row_width = row_width
        self._prompt_width = row_width - completion_width
        # For each position of the sequence: the index of its token in the flattened `input_ids`.
        self._token_index_parts: list[Tensor] = []
        self._position_id_parts: list[Tensor] = []  # (3, tokens) or (tokens,)
        # For each token that is scored: its index in the flattened `input_ids`, and the position of
        # the sequence that predicts it.
        self._label_index_parts: list[Tensor] = []
        self._predicting_positions: list[int] = []
        rows = len(rows_on_cpu.completion_lengths)
        self._label_index_BC = torch.zeros(rows, completion_width, dtype=torch.long)
        self._groups: list[GroupLayout] = []
        self._length = 0  # positions of the sequence so far

    def add_group(
        self,
        group_rows: Sequence[int],
        prompt_position_ids: Tensor,
        completion_position_ids: Tensor | None,
    ) -> None:
        """Append a prompt and then its rollouts, the longest first.

        Args:
            group_rows: the rows that have this prompt.
            prompt_position_ids: those of the prompt's tokens, (3, tokens) or (tokens,).
            completion_position_ids: those of all completions, (3, B, C). None where completions
                have no images: their position ids then go on from the prompt, one by one.
        """
        prompt_length = prompt_position_ids.size(-1)
        self._add_prompt(group_rows[0], prompt_position_ids)
        last_prompt_position = self._length - 1
        rollout_lengths = []
        completion_lengths = self._rows_on_cpu.completion_lengths
        for row in rows_longest_first(group_rows, completion_lengths):
            rollout_length = max(completion_lengths[row] - 1, 0)  # without the last token
            if completion_position_ids is not None:
                rollout_position_ids = completion_position_ids[..., row, :rollout_length]
            else:
                rollout_position_ids = _text_position_ids_after_prompt(
                    prompt_position_ids, rollout_length
                )
            self._add_rollout(
                row, last_prompt_position=last_prompt_position, position_ids=rollout_position_ids
            )
            if rollout_length > 0:
                rollout_lengths.append(rollout_length)
        self._groups.append(
            GroupLayout(prompt_length=prompt_length, rollout_lengths=tuple(rollout_lengths))
        )

    def _add_prompt(self, row: int, position_ids: Tensor) -> None:
        """Append the tokens of a row's prompt, without its padding.

        `position_ids`: those of these tokens, (3, tokens) or (tokens,).
        """
        prompt_length = position_ids.size(-1)
        # The prompt is padded on the left, so its tokens are its last columns.
        prompt_end = row * self._row_width + self._prompt_width
        self._token_index_parts.append(torch.arange(prompt_end - prompt_length, prompt_end))
        self._position_id_parts.append(position_ids)
        self._length += prompt_length

    def _add_rollout(self, row: int, last_prompt_position: int, position_ids: Tensor) -> None:
        """Append the completion of a row, without its last token, which predicts nothing.

        All of its tokens become labels, also the last one. For example, after `p1 p2`, at the
        positions 0 and 1, the completion `a1 a2 a3` is appended as a1 and a2, at the positions 2
        and 3. Its labels a1, a2, a3 are predicted by the positions 1, 2, 3.

        Args:
            row: the number of the row.
            last_prompt_position: where the prompt's last token is in the sequence. It predicts the
                first token of the completion.
            position_ids: those of the appended tokens, (3, tokens) or (tokens,).
        """
        completion_length = self._rows_on_cpu.completion_lengths[row]
        appended_length = position_ids.size(-1)  # completion_length - 1, or 0
        # The index of the completion's first token in the flattened `input_ids`.
        first_index = row * self._row_width + self._prompt_width
        self._token_index_parts.append(torch.arange(first_index, first_index + appended_length))
        self._position_id_parts.append(position_ids)
        # The columns of the completion whose tokens are scored: 0 1 2 for `a1 a2 a3`. If a tool
        # wrote a2, it is in the sequence but is not scored, and the columns are 0 2.
        scored_columns = torch.arange(completion_length)
        if self._rows_on_cpu.policy_mask is not None:
            scored_columns = self._rows_on_cpu.policy_mask[row, :completion_length].nonzero()[:, 0]
        self._label_index_parts.append(first_index + scored_columns)
        # The last token of the prompt predicts the first token of the completion. Every other token
        # is predicted by the token before it.
        appended_positions = range(self._length, self._length + appended_length)
        predicting_by_column = torch.tensor([last_prompt_position, *appended_positions])
        # A scored column of the row is found again among the labels by this index.
        labels_before = len(self._predicting_positions)
        self._predicting_positions += predicting_by_column[scored_columns].tolist()
        labels_after = len(self._predicting_positions)
        self._label_index_BC[row, scored_columns] = torch.arange(labels_before, labels_after)
        self._length += appended_length

    def build(self, input_ids: Tensor, attention_mask: Tensor) -> PackedSequence:
        """Return the sequence, with its tokens gathered on the device of `input_ids`.

        All copies to the device are made without waiting for it. In a run with tools the policy
        mask is 1 at tokens that the policy sampled, which are scored, and 0 at those of tools.

        Args:
            input_ids: (B, P + C), the tokens of the rows.
            attention_mask: (B, P + C), 0 at padding.
        """

        def on_device(tensor: Tensor) -> Tensor:
            """Copy a tensor to the device of `input_ids`, without waiting."""
            return tensor.to(input_ids.device, non_blocking=True)

        flat_ids = input_ids.flatten()
        token_index = on_device(torch.cat(self._token_index_parts))
        label_index = on_device(torch.cat(self._label_index_parts))
        position_ids = on_device(torch.cat(self._position_id_parts, dim=-1))
        labels = flat_ids[label_index][None]
        predicting_positions = self._predicting_positions
        # The LM head needs at least one position. It gets the first one, with the label -100, which
        # means that there is nothing to score.
        if not predicting_positions:
            labels = input_ids.new_full((1, 1), -100)
            predicting_positions = [0]
        scored_mask_BC = attention_mask[:, self._prompt_width :]
        policy_mask = self._rows_on_cpu.policy_mask
        if policy_mask is not None:
            # It is as wide as the longest completion of the generation. These rows may have been
            # cut to the longest of their micro-batch.
            completion_width = self._row_width - self._prompt_width
            scored_mask_BC = scored_mask_BC * on_device(policy_mask[:, :completion_width])
        return PackedSequence(
            ids_NS=flat_ids[token_index][None],
            position_ids=position_ids[..., None, :],  # None: N = 1, before the positions
            labels=labels,
            label_index_BC=on_device(self._label_index_BC),
            scored_mask_BC=scored_mask_BC,
            layout=PackedLayout(
                groups=tuple(self._groups),
                predicting_positions=on_device(torch.tensor(predicting_positions)),
            ),
        )


def _text_position_ids_after_prompt(prompt_position_ids: Tensor, token_count: int) -> Tensor:
    """Return the position ids of text tokens after a prompt, (3, tokens) or (tokens,).

    For example, after a prompt with the positions 0 1 2, two tokens get 3 4.

    `prompt_position_ids`: (3, prompt tokens) or (prompt tokens,).
    """
    # M-RoPE's three axes differ inside of an image. Text after it goes on from the largest of them.
    next_position = prompt_position_ids.amax() + 1
    text_positions = next_position + torch.arange(token_count)
    return text_positions.expand(*prompt_position_ids.shape[:-1], -1)


def pack_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_width: int,
    groups: Sequence[Sequence[int]],
    prompt_position_ids: Tensor,
    rows_on_cpu: RowsOnCpu,
    completion_position_ids: Tensor | None = None,
) -> PackedSequence:
    """Lay out left-padded prompts and right-padded completions as one sequence without padding.

    Each prompt comes once, before all rollouts of its group. For example, the rows
    `_ p1 p2 a1 a2 a3` and `_ p1 p2 b1 b2 _` (P = C = 3) become the sequence `p1 p2 a1 a2 b1`. The
    last tokens a3 and b2 are labels alone, since they predict nothing.

    The layout is computed on the CPU and copied to the device without waiting. Tokens that the
    policy has not sampled are not scored.

    Args:
        input_ids: (B, P + C), the B rows, on any device.
        attention_mask: (B, P + C), 0 at padding.
        completion_width: C, the width of the completions.
        groups: for each of N groups the rows that have its prompt; each row is in one group.
        prompt_position_ids: those of the prompt of each group's first row, (3, N, P) or (N, P), on
            the CPU.
        rows_on_cpu: copies of the rows on the CPU.
        completion_position_ids: those of the completions, (3, B, C), on the CPU. None where
            completions have no images: their position ids then go on from the prompt, one by one.
    """
    row_width = input_ids.size(1)
    prompt_width = row_width - completion_width
    first_rows = [group_rows[0] for group_rows in groups]
    # Prompts are padded on the left, so a prompt begins at the first 1 of its mask.
    prompt_starts = rows_on_cpu.prompt_mask[first_rows].int().argmax(dim=1).tolist()
    builder = _SequenceBuilder(rows_on_cpu, row_width=row_width, completion_width=completion_width)
    for group_index, (group_rows, prompt_start) in enumerate(
        zip(groups, prompt_starts, strict=True)
    ):
        builder.add_group(
            group_rows,
            prompt_position_ids=prompt_position_ids[..., group_index, prompt_start:prompt_width],
            completion_position_ids=completion_position_ids,
        )
    return builder.build(input_ids, attention_mask)
