"""The packed forward pass over a micro-batch, in which a group's prompt is computed once.

The log-probabilities of the packed pass are compared with those of separate rows once per run. If
they differ by more than rounding, the run goes on with separate rows and says why.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    completion_positions,
    prompt_images,
    prompt_positions,
)
from adora_vl.packing.shared_prompt import (
    PackedSequence,
    group_rows_by_prompt,
    pack,
    rows_longest_first,
    sharing_pays,
)
from adora_vl.packing.split_attention import (
    LAYOUT_ARGUMENT,
    configured_attention,
    empty_mask,
    install_split_attention,
)
from adora_vl.types import HostRows, RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# log-probabilities (B, C), entropies (B, C) or None, auxiliary loss or None
PassResult = tuple[Tensor, Tensor | None, Tensor | None]
# a block for the forward pass of this size, which will learn
LearningBlock = Callable[[PassSize], AbstractContextManager[None]]
RowGroups = list[list[int]]  # the numbers of the rows that share a prompt, group by group


def no_learning_block(size: PassSize) -> AbstractContextManager[None]:
    """Return a block that changes nothing, for a pass of any size."""
    return nullcontext()


def can_share_prompts(config: PreTrainedConfig) -> bool:
    """Return whether every layer has full attention, by an implementation that we support."""
    attention = configured_attention(config)
    flash = is_flash_attention_requested(requested_attention_implementation=attention)
    return shares_prompts(config) and (flash or attention in ("sdpa", "eager"))


class PackedForward:
    """Computes the log-probabilities of a batch with each prompt once and without padding.

    `refusal` says why prompts are not shared, once that is known. `passes` counts packed passes.
    """

    def __init__(
        self, accelerator: Accelerator, learning_block: LearningBlock = no_learning_block
    ) -> None:
        """Create the pass. `learning_block`: what a model computes a pass in that learns."""
        self._accelerator = accelerator
        self._learning_block = learning_block
        self.refusal = ""
        self.passes = 0
        self.is_checked = False  # whether packed and separate rows have been compared

    def __call__(
        self,
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        completion_width: int,
        batch_size: int | None,
        compute_entropy: bool,
        inputs: dict[str, Any],
        separate: Callable[..., PassResult],
        host: HostRows | None = None,
        only_checks: bool = False,
    ) -> PassResult | None:
        """Compute what TRL's `_get_per_token_logps_and_entropies` does, from a packed sequence.

        Args:
            model: the policy or the reference model, in whatever wrapper.
            input_ids: (B, P + C), prompts padded on the left, completions on the right.
            attention_mask: (B, P + C), 0 at padding.
            completion_width: C, the width of the completions.
            batch_size: rows of one forward pass; None for all B at once.
            compute_entropy: whether entropies are returned too.
            inputs: further columns of the batch, by name.
            separate: the same pass over separate rows; its arguments are the number of first rows
                and their inputs.
            host: copies of the rows that are on the host already; None copies them here.
            only_checks: compare packed rows with separate ones, whatever is less work, and compute
                nothing else.

        Returns:
            None where separate rows are less work, or the only way.
        """
        config = self._accelerator.unwrap_model(model).config
        if not can_share_prompts(config):
            self.refusal = f"attention {configured_attention(config)} of {config.model_type}"
            return None
        if host is None:
            prompt_mask = attention_mask[:, :-completion_width]
            completion_mask = attention_mask[:, -completion_width:]
            prompt_ids = input_ids[:, :-completion_width]
            host = HostRows.of(prompt_ids, prompt_mask, completion_mask, inputs)
        rows_per_chunk = batch_size or len(input_ids)
        chunks = _chunks(len(input_ids), rows_per_chunk)
        groups_by_chunk = _groups_by_chunk(chunks, host, inputs.get("pixel_values"))
        pays = only_checks or all(_packing_pays(groups, host) for groups in groups_by_chunk)
        compute_packed = partial(
            self._compute_chunks,
            model=model,
            input_ids=input_ids,
            attention_mask=attention_mask,
            completion_width=completion_width,
            compute_entropy=compute_entropy,
            host=host,
        )
        if not self.is_checked:
            first_inputs = _inputs_of_first_rows(rows_per_chunk, inputs, host)
            separate_chunk = partial(separate, rows_per_chunk, first_inputs)
            # A rank on which sharing does not pay takes part with separate rows on both sides.
            packed_chunk = partial(compute_packed, groups_by_chunk[:1]) if pays else separate_chunk
            mask_BC = attention_mask[:rows_per_chunk, -completion_width:]
            if host.policy_mask is not None:
                policy_mask_BC = host.policy_mask[:rows_per_chunk, :completion_width]
                mask_BC = mask_BC * policy_mask_BC.to(mask_BC.device)
            self._check(
                model, packed=packed_chunk, separate=separate_chunk, mask_BC=mask_BC, pays=pays
            )
        if only_checks or not pays or self.refusal:
            return None
        self.passes += 1
        return compute_packed(groups_by_chunk)

    def _check(
        self,
        model: "PreTrainedModel",
        packed: Callable[[], PassResult],
        separate: Callable[[], PassResult],
        mask_BC: Tensor,
        pays: bool,
    ) -> None:
        """Compare both passes over one chunk. All ranks call it together.

        If they disagree on any rank, every rank goes on with separate rows and says so.

        Args:
            model: the one that both passes compute with.
            packed: the packed pass.
            separate: the pass over separate rows.
            mask_BC: 1 at the tokens whose log-probabilities are compared.
            pays: whether sharing prompts is less work on this rank.
        """
        gather = self._accelerator.gather
        # Both passes gather sharded weights, so all ranks compare as soon as one can share prompts.
        if not gather(torch.tensor([int(pays)], device=mask_BC.device)).any():
            return
        self.is_checked = True
        # Without evaluation mode each pass would draw dropout anew, and no two would agree.
        with torch.no_grad(), evaluation_mode(model):
            packed_logps = packed()[0]
            separate_logps = separate()[0]
            gap_BC = (packed_logps - separate_logps).abs() * mask_BC
        mean_gap = gap_BC.sum() / mask_BC.sum().clamp(min=1)
        worst_gap = float(gather(mean_gap.reshape(1)).max())
        bound = rounding_bound(computing_dtype(self._accelerator, model))
        if not worst_gap <= bound:  # NaN is refused too
            self.refusal = (
                f"packed and separate log-probabilities differ by {worst_gap:.2g} nats, more than "
                f"{bound:.2g}"
            )
            warnings.warn(
                f"share_prompt: no shared prompts from here on: {self.refusal}", stacklevel=2
            )

    def _compute_chunks(
        self,
        groups_by_chunk: list[RowGroups],
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        completion_width: int,
        compute_entropy: bool,
        host: HostRows,
    ) -> PassResult:
        """Compute chunks of neighbouring rows, a packed pass each.

        The results are those of the chunks' rows, in order. The other arguments are those of
        `__call__`.
        """
        logps = []
        entropies = []
        for groups in groups_by_chunk:
            chunk_logps, chunk_entropies = self._compute_chunk(
                model=model,
                groups=groups,
                input_ids=input_ids,
                attention_mask=attention_mask,
                completion_width=completion_width,
                compute_entropy=compute_entropy,
                host=host,
            )
            logps.append(chunk_logps)
            if chunk_entropies is not None:
                entropies.append(chunk_entropies)
        return torch.cat(logps), torch.cat(entropies) if entropies else None, None

    def _compute_chunk(
        self,
        model: "PreTrainedModel",
        groups: RowGroups,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion_width: int,
        compute_entropy: bool,
        host: HostRows,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one packed pass over the rows of `groups`, which are neighbours.

        Returns log-probabilities and entropies, both (rows, C). The arguments are those of
        `__call__`.
        """
        plain_model = self._accelerator.unwrap_model(model)
        rows = [row for group_rows in groups for row in group_rows]
        chunk = slice(rows[0], rows[-1] + 1)
        groups_in_chunk = [[row - rows[0] for row in group_rows] for group_rows in groups]
        first_rows = [group_rows[0] for group_rows in groups]
        images = _images_of_prompts(host, first_rows)
        token_types = host.token_types[first_rows] if host.token_types is not None else None
        positions = prompt_positions(
            plain_model,
            prompt_ids=host.prompt_ids[first_rows],
            prompt_mask=host.prompt_mask[first_rows],
            token_types=token_types,
            grids=_joined_grids(images),
        )
        install_split_attention(plain_model)
        row_positions = completion_positions(plain_model, host, rows)
        if row_positions is not None:  # completions have images too
            images = _images_in_order(host, groups)
        packed = pack(
            input_ids[chunk],
            attention_mask=attention_mask[chunk],
            completion_width=completion_width,
            groups=groups_in_chunk,
            positions=positions,
            host=host.taken(rows),
            completion_positions=row_positions,
        )
        model_inputs: dict[str, Any] = {
            "input_ids": packed.ids_NS,
            "attention_mask": empty_mask(input_ids.device),
            "position_ids": packed.positions,
            LAYOUT_ARGUMENT: packed.shared,
        }
        if images:
            model_inputs["pixel_values"] = torch.cat([row_images.pixels for row_images in images])
            model_inputs["image_grid_thw"] = _joined_grids(images)
        block: AbstractContextManager[None] = nullcontext()
        if torch.is_grad_enabled():  # only a pass that learns keeps activations
            block = self._learning_block(packed_size(packed, model_inputs.get("pixel_values")))
        with block, self._accelerator.autocast():
            outputs = model(**model_inputs, shift_labels=packed.labels, fused_lm_head=True)
        logps_BC = packed.spread_over_rows(outputs.log_probs)
        if not compute_entropy:  # the reference model's head computes none
            return logps_BC, None
        return logps_BC, packed.spread_over_rows(outputs.entropy)


def packed_size(packed: PackedSequence, pixels: Tensor | None) -> PassSize:
    """Return the size of a packed pass.

    A rollout other than its group's first has the prompt's keys once more, and its own.

    Args:
        packed: the sequence, of which all positions are computed.
        pixels: of its images, or references to them.
    """
    key_count = 0
    for group in packed.shared.groups:
        key_count += group.first_span_length
        key_count += sum(group.prompt_length + length for length in group.later_rollout_lengths)
    rows, length = packed.ids_NS.shape
    return PassSize(
        rows=rows,
        row_length=length,
        scored_tokens=packed.labels.numel(),
        repeated_keys=key_count,
        patches=0 if pixels is None else len(pixels),
    )


def _images_of_prompts(host: HostRows, rows: list[int]) -> list[RowImages]:
    """Return the images of the prompts of these rows; a row without any has no entry."""
    images = []
    for row in rows:
        row_images = prompt_images(host, row)
        if row_images is not None:
            images.append(row_images)
    return images


def _joined_grids(images: list[RowImages]) -> Tensor | None:
    """Return the grids of all images, (images, 3); None where there are none."""
    if not images:
        return None
    return torch.cat([row_images.grids for row_images in images])


def _images_in_order(host: HostRows, groups: RowGroups) -> list[RowImages]:
    """Return the images of prompts and completions, in the order of the packed sequence.

    A prompt's images come first, then those of each of its rollouts, the longest rollout first.
    """
    images: list[RowImages | None] = []
    for group_rows in groups:
        images.append(prompt_images(host, group_rows[0]))
        for row in rows_longest_first(group_rows, host.lengths):
            images.append(completion_images(host, row))
    return [row_images for row_images in images if row_images is not None]


def _inputs_of_first_rows(rows: int, inputs: dict[str, Any], host: HostRows) -> dict[str, Any]:
    """Return the model's inputs of the first `rows` rows alone.

    `pixel_values` has an entry per patch and `image_grid_thw` one per image, not one per row.

    Args:
        rows: how many rows are kept.
        inputs: the model's keyword arguments for all rows, some of which may be None.
        host: says which images each row has.
    """
    images = [row_images for row_images in host.images[:rows] if row_images is not None]
    entry_counts = {
        "pixel_values": sum(len(row_images.pixels) for row_images in images),
        "image_grid_thw": sum(len(row_images.grids) for row_images in images),
    }
    first_inputs: dict[str, Any] = {}
    for name, values in inputs.items():
        first_inputs[name] = None
        if values is not None:
            entries = entry_counts.get(name, rows)
            first_inputs[name] = values[:entries]
    return first_inputs


def _chunks(rows: int, rows_per_chunk: int) -> list[range]:
    """Divide row numbers into ranges of `rows_per_chunk`; the last one may be shorter."""
    starts = range(0, rows, rows_per_chunk)
    return [range(start, min(start + rows_per_chunk, rows)) for start in starts]


def _groups_by_chunk(chunks: list[range], host: HostRows, pixels: Tensor | None) -> list[RowGroups]:
    """Return the groups of rows of each chunk; every row is alone where `pixels` are no references.

    Integers are references into an image bank. Pixels do not tell which images are the same.
    """
    if pixels is None or not pixels.is_floating_point():
        return [_groups_of_chunk(chunk, host) for chunk in chunks]
    return [[[row] for row in chunk] for chunk in chunks]


def _groups_of_chunk(chunk: range, host: HostRows) -> RowGroups:
    """Return the rows of a chunk, grouped by their prompt and its images."""
    rows = list(chunk)
    image_keys: list[list[int]] = []
    for row in rows:
        images = prompt_images(host, row)
        image_keys.append([] if images is None else first_patches(*images))
    groups = group_rows_by_prompt(host.prompt_ids[rows], host.prompt_mask[rows], image_keys)
    return [[rows[index] for index in group_indices] for group_indices in groups]


def _packing_pays(groups: RowGroups, host: HostRows) -> bool:
    """Return whether packing these groups is less work than separate rows."""
    first_rows = [group_rows[0] for group_rows in groups]
    prompt_lengths = host.prompt_mask[first_rows].sum(dim=1).tolist()
    completion_lengths = [[host.lengths[row] for row in group_rows] for group_rows in groups]
    return sharing_pays(prompt_lengths, completion_lengths)
