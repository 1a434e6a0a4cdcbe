"""The packed forward pass over a micro-batch, in which a group's prompt is computed once.

The log-probabilities of the packed pass are compared with those of padded rows once per run. If
they differ by more than rounding, the run goes on with padded rows and says why.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.models.activations import PassSize
from adora_vl.models.families import shares_prompts
from adora_vl.packing.image_store import first_patches
from adora_vl.packing.pass_differences import computing_dtype, evaluation_mode, rounding_bound
from adora_vl.packing.row_positions import (
    completion_images,
    completion_position_ids,
    prompt_images,
    prompt_position_ids,
)
from adora_vl.packing.shared_prompt import (
    PackedSequence,
    group_rows_by_prompt,
    pack_rows,
    packing_pays,
    rows_longest_first,
)
from adora_vl.packing.split_attention import (
    LAYOUT_ARGUMENT,
    configured_attention,
    empty_mask,
    install_packed_attention,
)
from adora_vl.types import RowImages, RowsOnCpu, image_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# log-probabilities (B, C), entropies (B, C) or None, auxiliary loss or None
PassResult = tuple[Tensor, Tensor | None, Tensor | None]
# Takes the size of a training pass and returns the context to run it in, which chooses the layers
# that gradient checkpointing recomputes.
CheckpointingContext = Callable[[PassSize], AbstractContextManager[None]]
RowGroups = list[list[int]]  # the numbers of the rows that share a prompt, group by group


def can_share_prompts(config: PreTrainedConfig) -> bool:
    """Return whether a packed pass can compute this model's attention.

    The model has to be of a known family with full attention in every layer (`shares_prompts`), and
    has to compute it by one of the implementations that we support.
    """
    attention = configured_attention(config)
    is_flash = is_flash_attention_requested(requested_attention_implementation=attention)
    return shares_prompts(config) and (is_flash or attention in ("sdpa", "eager"))


@dataclass(frozen=True)
class PassInputs:
    """The arguments of TRL's `_get_per_token_logps_and_entropies`, for B rows.

    A row has P prompt and C completion tokens. `rows_on_cpu` is a copy of masks, lengths and images
    that can be read without waiting for the GPU.
    """

    model: "PreTrainedModel"  # the policy or the reference model, with or without a wrapper
    input_ids: Tensor  # (B, P + C), prompts padded on the left, completions on the right
    attention_mask: Tensor  # (B, P + C), 0 at padding
    completion_width: int  # C
    batch_size: int | None  # rows of one forward pass; None for all B at once
    compute_entropy: bool
    batch_columns: dict[str, Any]  # the columns of images and tools, by their name in the batch
    known_rows_on_cpu: RowsOnCpu | None = None  # copies of the rows that are on the CPU already

    @property
    def rows_per_chunk(self) -> int:
        """The rows of one forward pass; the last pass may have fewer."""
        return self.batch_size or len(self.input_ids)

    @cached_property
    def rows_on_cpu(self) -> RowsOnCpu:
        """Copies of the rows on the CPU."""
        if self.known_rows_on_cpu is not None:
            return self.known_rows_on_cpu
        return RowsOnCpu.of(
            prompt_ids=self.input_ids[:, : -self.completion_width],
            prompt_mask=self.attention_mask[:, : -self.completion_width],
            completion_mask=self.attention_mask[:, -self.completion_width :],
            columns=self.batch_columns,
        )


class PackedForward:
    """Computes the log-probabilities of a batch with each prompt once and without padding.

    Rows with the same prompt are packed: the prompt once, then all of its completions. The first
    pass of a run is compared with padded rows. If they differ, packing is disabled. A chunk is the
    rows of one forward pass, grouped by prompt: [[0, 1], [2]] are three rows, of which the first
    two share a prompt. There are B rows, whose completions are padded to C tokens.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        checkpointing_context: CheckpointingContext,
    ) -> None:
        """Create the pass.

        `checkpointing_context`: returns the context in which a pass with gradients is run.
        """
        self._accelerator = accelerator
        self._checkpointing_context = checkpointing_context
        # why prompts are not shared; empty as long as nothing is against it
        self.disabled_reason = ""
        self.pass_count = 0  # packed passes so far
        self.is_checked = False  # whether packed and padded rows have been compared

    def __call__(
        self, inputs: PassInputs, compute_padded: Callable[[int, dict[str, Any]], PassResult]
    ) -> PassResult | None:
        """Compute log-probabilities and entropies of packed rows if that is less work than padded.

        The first call of a run also compares packed and padded rows (`_check`).

        Args:
            inputs: the arguments of TRL's `_get_per_token_logps_and_entropies`.
            compute_padded: computes the same pass as TRL does, for the first rows. Its arguments
                are the number of these rows, and their columns.

        Returns:
            The result of the pass; None where padded rows are less work, or the only way.
        """
        if not self._can_pack(inputs.model):
            return None
        groups_by_chunk = _groups_by_chunk(inputs)
        packs_rows = all(
            _is_worth_packing(groups, inputs.rows_on_cpu) for groups in groups_by_chunk
        )
        if not self.is_checked:
            self._check(
                inputs,
                groups=groups_by_chunk[0],
                compute_padded=compute_padded,
                packs_rows=packs_rows,
            )
        # `_check` sets `disabled_reason` if packed and padded rows differ.
        if not packs_rows or self.disabled_reason:
            return None
        self.pass_count += 1
        return self._compute_chunks(inputs, groups_by_chunk)

    def compare(
        self, inputs: PassInputs, compute_padded: Callable[[int, dict[str, Any]], PassResult]
    ) -> None:
        """Compare packed with padded rows, even if packing these rows is more work. Collective.

        The arguments are those of `__call__`.
        """
        if self._can_pack(inputs.model):
            self._check(
                inputs,
                groups=_groups_by_chunk(inputs)[0],
                compute_padded=compute_padded,
                packs_rows=True,
            )

    def _can_pack(self, model: "PreTrainedModel") -> bool:
        """Return whether the model's rows can be packed; otherwise set `disabled_reason`."""
        config = self._accelerator.unwrap_model(model).config
        if can_share_prompts(config):
            return True
        self.disabled_reason = f"attention {configured_attention(config)} of {config.model_type}"
        return False

    def _check(
        self,
        inputs: PassInputs,
        groups: RowGroups,
        compute_padded: Callable[[int, dict[str, Any]], PassResult],
        packs_rows: bool,
    ) -> None:
        """Compare packed with padded log-probabilities of the first chunk. Collective.

        A chunk is the rows of one forward pass. If the two differ by more than rounding on any
        rank, `disabled_reason` is set on every rank, and the run goes on with padded rows.

        Args:
            inputs: the arguments of the pass.
            groups: the rows of the first chunk, grouped by prompt, such as [[0, 1], [2]].
            compute_padded: computes the first rows as TRL does, see `__call__`.
            packs_rows: whether this rank packs its rows, since that is less work.
        """
        gather = self._accelerator.gather
        device = inputs.input_ids.device
        any_rank_packs = gather(torch.tensor([int(packs_rows)], device=device)).any()
        # If no rank packs, there is nothing to compare yet. If any rank packs, all ranks make two
        # passes, since a forward pass gathers sharded weights.
        if not any_rank_packs:
            return
        self.is_checked = True
        row_count = inputs.rows_per_chunk
        columns = _columns_of_first_rows(row_count, inputs)
        # Without evaluation mode each pass would draw dropout anew, and no two would agree.
        with torch.no_grad(), evaluation_mode(inputs.model):
            if packs_rows:
                packed_logps_BC, _ = self._compute_chunk(inputs, groups)
            else:  # this rank only makes as many passes as the others
                packed_logps_BC, _, _ = compute_padded(row_count, columns)
            padded_logps_BC, _, _ = compute_padded(row_count, columns)
            mask_BC = _sampled_tokens(row_count, inputs)
            gap_BC = (packed_logps_BC - padded_logps_BC).abs() * mask_BC
        mean_gap = gap_BC.sum() / mask_BC.sum().clamp(min=1)
        worst_gap = float(gather(mean_gap.reshape(1)).max())  # the largest mean of any rank
        bound = rounding_bound(computing_dtype(self._accelerator, inputs.model))
        if not worst_gap <= bound:  # NaN is refused too
            self.disabled_reason = (
                f"packed and separate log-probabilities differ by {worst_gap:.2g} nats, more than "
                f"{bound:.2g}"
            )
            warnings.warn(
                f"share_prompt: no shared prompts from here on: {self.disabled_reason}",
                stacklevel=2,
            )

    def _compute_chunks(self, inputs: PassInputs, groups_by_chunk: list[RowGroups]) -> PassResult:
        """Compute one packed pass for each chunk of rows, and join their results.

        Args:
            inputs: the arguments of the pass over all rows.
            groups_by_chunk: for each chunk its rows, grouped by prompt. For example, [[[0, 1]],
                [[2], [3]]] are two chunks of two rows, and only those of the first share a prompt.
        """
        logps = []
        entropies = []
        for groups in groups_by_chunk:
            chunk_logps_BC, chunk_entropies_BC = self._compute_chunk(inputs, groups)
            logps.append(chunk_logps_BC)
            if chunk_entropies_BC is not None:
                entropies.append(chunk_entropies_BC)
        entropies_BC = torch.cat(entropies) if entropies else None
        auxiliary_loss = None  # a packed pass computes none
        return torch.cat(logps), entropies_BC, auxiliary_loss

    def _compute_chunk(self, inputs: PassInputs, groups: RowGroups) -> tuple[Tensor, Tensor | None]:
        """Run one packed pass over the rows of `groups`.

        Returns log-probabilities and entropies, both (rows, C). Without `compute_entropy` the
        entropies are None.

        Args:
            inputs: the arguments of the pass over all rows.
            groups: neighbouring rows, grouped by prompt, such as [[4, 5], [6]].
        """
        plain_model = self._accelerator.unwrap_model(inputs.model)
        install_packed_attention(plain_model)
        packed = _pack_chunk(plain_model, inputs, groups)
        model_inputs: dict[str, Any] = {
            "input_ids": packed.ids_NS,
            "attention_mask": empty_mask(inputs.input_ids.device),
            "position_ids": packed.position_ids,
            LAYOUT_ARGUMENT: packed.layout,
        }
        images = _images_in_order(inputs.rows_on_cpu, groups)
        if images:
            model_inputs |= image_fields(images)
        checkpointing: AbstractContextManager[None] = nullcontext()
        if torch.is_grad_enabled():  # other passes keep no activations
            size = packed_size(packed, model_inputs.get("pixel_values"))
            checkpointing = self._checkpointing_context(size)
        # With TRL's `fused_lm_head` the model returns log-probabilities of the labels and entropies
        # in place of logits.
        with checkpointing, self._accelerator.autocast():
            outputs = inputs.model(**model_inputs, shift_labels=packed.labels, fused_lm_head=True)
        logps_BC = packed.spread_over_rows(outputs.log_probs)
        # The head of the reference model returns no entropies; only the policy's are asked for.
        if not inputs.compute_entropy:
            return logps_BC, None
        return logps_BC, packed.spread_over_rows(outputs.entropy)


def packed_size(packed: PackedSequence, pixels: Tensor | None) -> PassSize:
    """Return the size of a packed pass, from which its memory is computed.

    For example, a prompt of 3 tokens with the rollouts `a1 a2 a3` and `c1 c2` is one row of the 6
    tokens `p1 p2 p3 a1 a2 c1`. It has 5 scored tokens. Its 9 repeated keys are p1 p2 p3 a1 a2 and
    p1 p2 p3 c1.

    `pixels`: the patches of the sequence's images, or the numbers of patches: one entry per patch.
    """
    rows, row_length = packed.ids_NS.shape  # N = 1, and S positions
    return PassSize(
        rows=rows,
        row_length=row_length,
        scored_tokens=packed.labels.numel(),
        # Attention copies the keys of each span. So it copies a prompt's keys for every rollout.
        repeated_keys=sum(packed.layout.key_counts),
        image_patches=0 if pixels is None else len(pixels),
    )


def _pack_chunk(
    plain_model: "PreTrainedModel", inputs: PassInputs, groups: RowGroups
) -> PackedSequence:
    """Return the rows of `groups`, which are neighbours, laid out as one packed sequence.

    For example, the groups [[4, 5], [6]] are the rows 4 to 6 of the batch, which are packed as the
    groups [[0, 1], [2]] of a chunk of three rows.

    Args:
        plain_model: the model without a wrapper; it computes the positions of image tokens.
        inputs: the arguments of the pass over all rows.
        groups: the rows of the chunk, grouped by prompt.
    """
    rows_on_cpu = inputs.rows_on_cpu
    rows = [row for group_rows in groups for row in group_rows]
    first_row = rows[0]
    chunk = slice(first_row, rows[-1] + 1)
    # Inside of the chunk rows are counted from its first one.
    groups_in_chunk = [[row - first_row for row in group_rows] for group_rows in groups]
    # Each prompt is read from the first row that has it.
    prompt_rows = [group_rows[0] for group_rows in groups]
    token_types = None
    if rows_on_cpu.prompt_token_types is not None:
        token_types = rows_on_cpu.prompt_token_types[prompt_rows]
    positions = prompt_position_ids(
        plain_model,
        prompt_ids=rows_on_cpu.prompt_ids[prompt_rows],
        prompt_mask=rows_on_cpu.prompt_mask[prompt_rows],
        token_types=token_types,
        grids=_grids_of_prompts(rows_on_cpu, prompt_rows),
    )
    return pack_rows(
        inputs.input_ids[chunk],
        attention_mask=inputs.attention_mask[chunk],
        completion_width=inputs.completion_width,
        groups=groups_in_chunk,
        prompt_position_ids=positions,
        rows_on_cpu=rows_on_cpu.select(rows),
        completion_position_ids=completion_position_ids(plain_model, rows_on_cpu, rows),
    )


def _grids_of_prompts(rows_on_cpu: RowsOnCpu, rows: list[int]) -> Tensor | None:
    """Return the grids of the images in the prompts of these rows, (images, 3).

    None where no row has images.
    """
    grids = []
    for row in rows:
        row_images = prompt_images(rows_on_cpu, row)
        if row_images is not None:
            grids.append(row_images.grids)
    return torch.cat(grids) if grids else None


def _images_in_order(rows_on_cpu: RowsOnCpu, groups: RowGroups) -> list[RowImages]:
    """Return the images of prompts and completions, in the order of the packed sequence.

    First come the images of a prompt, then the images of each of its rollouts, the longest rollout
    first. For example, rows 0 and 1 of one prompt, with completions of 3 and 5 tokens, give the
    images of the prompt, of completion 1, and of completion 0.

    Args:
        rows_on_cpu: the copy of the batch on the CPU.
        groups: the rows of a chunk, grouped by prompt, such as [[0, 1], [2]].
    """
    images: list[RowImages | None] = []
    for group_rows in groups:
        images.append(prompt_images(rows_on_cpu, group_rows[0]))
        if rows_on_cpu.completion_token_types is not None:  # completions have images too
            for row in rows_longest_first(group_rows, rows_on_cpu.completion_lengths):
                images.append(completion_images(rows_on_cpu, row))
    return [row_images for row_images in images if row_images is not None]


def _columns_of_first_rows(row_count: int, inputs: PassInputs) -> dict[str, Any]:
    """Return the columns of images and tools of the first `row_count` rows, by name.

    `pixel_values` has an entry per patch, and `image_grid_thw` one per image. All other columns
    have one per row. For example, let the first two rows have one image of 4 and one of 6 patches.
    With `row_count` 2 the first 10 entries of `pixel_values` and 2 of `image_grid_thw` are
    returned.
    """
    images_by_row = inputs.rows_on_cpu.images[:row_count]  # None for a row without images
    images_of_first_rows = [row_images for row_images in images_by_row if row_images is not None]
    entry_count_by_name = {
        "pixel_values": sum(len(row_images.pixels) for row_images in images_of_first_rows),
        "image_grid_thw": sum(len(row_images.grids) for row_images in images_of_first_rows),
    }
    first_columns: dict[str, Any] = {}
    for name, values in inputs.batch_columns.items():
        if values is None:
            first_columns[name] = None
            continue
        entry_count = entry_count_by_name.get(name, row_count)
        first_columns[name] = values[:entry_count]
    return first_columns


def _sampled_tokens(row_count: int, inputs: PassInputs) -> Tensor:
    """Return which tokens of the first `row_count` completions the policy has sampled, (B, C).

    The mask is 1 at these tokens, and 0 at padding and at tokens that a tool wrote. There are B
    completions, padded to C tokens.
    """
    mask_BC = inputs.attention_mask[:row_count, -inputs.completion_width :]
    policy_mask = inputs.rows_on_cpu.policy_mask
    if policy_mask is not None:
        policy_mask_BC = policy_mask[:row_count, : inputs.completion_width]
        mask_BC = mask_BC * policy_mask_BC.to(mask_BC.device)
    return mask_BC


def _groups_by_chunk(inputs: PassInputs) -> list[RowGroups]:
    """Split the rows into a chunk for each forward pass, and group those of a chunk by prompt.

    For example, with 4 rows per chunk, six rows with the prompts p p q q q q are split into
    [[0, 1], [2, 3]] and [[4, 5]].

    `pixel_values` may be patch numbers, which are integers, or pixels. Patch numbers tell which
    rows have equal images. Pixels do not, so every row with pixels is a group of its own.
    """
    rows = range(len(inputs.input_ids))
    rows_per_chunk = inputs.rows_per_chunk
    starts = range(0, len(rows), rows_per_chunk)
    chunks = [rows[start : start + rows_per_chunk] for start in starts]
    pixels = inputs.batch_columns.get("pixel_values")
    if pixels is not None and pixels.is_floating_point():
        return [[[row] for row in chunk] for chunk in chunks]
    return [_groups_of_chunk(chunk, inputs.rows_on_cpu) for chunk in chunks]


def _groups_of_chunk(chunk: range, rows_on_cpu: RowsOnCpu) -> RowGroups:
    """Return the rows of a chunk, grouped by their prompt and its images.

    For example, the rows 4 to 6, of which the first two have the same prompt, give [[4, 5], [6]].
    """
    rows = list(chunk)
    image_keys: list[list[int]] = []
    for row in rows:
        images = prompt_images(rows_on_cpu, row)
        # The number of an image's first patch in the image bank identifies the image.
        image_keys.append([] if images is None else first_patches(images.pixels, images.grids))
    groups = group_rows_by_prompt(
        rows_on_cpu.prompt_ids[rows], rows_on_cpu.prompt_mask[rows], image_keys
    )
    # The groups have indices into `rows`, which become numbers of rows of the batch.
    return [[rows[index] for index in group_indices] for group_indices in groups]


def _is_worth_packing(groups: RowGroups, rows_on_cpu: RowsOnCpu) -> bool:
    """Return whether packing these rows is less work than padding each row.

    Args:
        groups: rows grouped by prompt, such as [[0, 1], [2]].
        rows_on_cpu: the copy of the batch on the CPU.
    """
    prompt_rows = [group_rows[0] for group_rows in groups]
    prompt_lengths = rows_on_cpu.prompt_mask[prompt_rows].sum(dim=1).tolist()
    completion_lengths = [
        [rows_on_cpu.completion_lengths[row] for row in group_rows] for group_rows in groups
    ]
    return packing_pays(prompt_lengths, completion_lengths)
