"""The policy's forward pass over a micro-batch, in which a group's prompt is computed once.

The log-probabilities of the packed pass are compared with those of separate rows once per run. If
they differ by more than rounding, the run goes on with separate rows and says why.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.config.keys import AdoraKeys
from adora_vl.models.activations import PassSize
from adora_vl.models.families import shares_prompts
from adora_vl.packing.image_store import first_patches
from adora_vl.packing.images import with_image_columns
from adora_vl.packing.shared_prompt import Packed, groups_of, longest_first, pack, sharing_pays
from adora_vl.packing.split_attention import ARGUMENT, configured_attention, empty_mask, install
from adora_vl.packing.vision import vision_model
from adora_vl.types import Batch, HostRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# log-probabilities (B, C), entropies (B, C) or None, auxiliary loss or None
Result = tuple[Tensor, Tensor | None, Tensor | None]
# takes the detached log-probabilities (B, C) and the entropies of a pass
PassObserver = Callable[[Tensor, Tensor | None], None]
# a block for the forward pass of this size, which will learn
AroundPass = Callable[[PassSize], AbstractContextManager[None]]
Pass = Callable[..., Result]  # TRL's `_get_per_token_logps_and_entropies`, bound to a model
# The columns that TRL's `_compute_loss` hands to a pass besides the tokens. `tool_mask` is not one
# of the model's inputs: it tells which tokens the policy has sampled.
_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
    "tool_mask",
)


def bound_of(dtype: torch.dtype) -> float:
    """Return the largest mean difference, in nats, that rounding between passes explains."""
    return 1e-5 if torch.finfo(dtype).bits >= 32 else 0.05


def unchanged(size: PassSize) -> AbstractContextManager[None]:
    """Return a block that changes nothing, for a pass of any size."""
    return nullcontext()


def packable(config: PreTrainedConfig) -> bool:
    """Return whether every layer has full attention, by an implementation that we support."""
    attention = configured_attention(config)
    flash = is_flash_attention_requested(requested_attention_implementation=attention)
    return shares_prompts(config) and (flash or attention in ("sdpa", "eager"))


class PackedForward:
    """Computes the log-probabilities of a batch with each prompt once and without padding.

    `refused` says why prompts are not shared, once that is known. `passes` counts packed passes.
    """

    def __init__(self, accelerator: Accelerator, around: AroundPass = unchanged) -> None:
        self._accelerator = accelerator
        self._around = around
        self.refused = ""
        self.passes = 0
        self.is_checked = False  # whether packed and separate rows have been compared

    def __call__(
        self,
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        batch_size: int | None,
        compute_entropy: bool,
        inputs: dict[str, Any],
        separate: Callable[..., Result],
        host: HostRows | None = None,
        only_checks: bool = False,
    ) -> Result | None:
        """Compute what TRL's `_get_per_token_logps_and_entropies` does, from a packed sequence.

        Args:
            model: the policy or the reference model, in whatever wrapper.
            input_ids: (B, P + C), prompts padded on the left, completions on the right.
            attention_mask: (B, P + C), 0 at padding.
            completion: C, the width of the completions.
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
        if not packable(config):
            self.refused = f"attention {configured_attention(config)} of {config.model_type}"
            return None
        if host is None:
            prompt_mask = attention_mask[:, :-completion]
            completion_mask = attention_mask[:, -completion:]
            host = HostRows.of(input_ids[:, :-completion], prompt_mask, completion_mask, inputs)
        rows_per_chunk = batch_size or len(input_ids)
        groups_by_chunk = _groups_by_chunk(
            _chunks(len(input_ids), rows_per_chunk), host, inputs.get("pixel_values")
        )
        pays = only_checks or all(_pays(groups, host) for groups in groups_by_chunk)

        def packed(chunks: int | None = None) -> Result:
            """Compute the first `chunks` chunks, by default all, from packed sequences."""
            logps = []
            entropies = []
            for groups in groups_by_chunk[:chunks]:
                chunk_logps, chunk_entropies = self._pass(
                    model=model,
                    groups=groups,
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    completion=completion,
                    compute_entropy=compute_entropy,
                    host=host,
                )
                logps.append(chunk_logps)
                if chunk_entropies is not None:
                    entropies.append(chunk_entropies)
            return torch.cat(logps), torch.cat(entropies) if entropies else None, None

        if not self.is_checked:
            first_inputs = _inputs_of_first_rows(rows_per_chunk, inputs, host)
            separate_chunk = partial(separate, rows_per_chunk, first_inputs)
            # A rank on which sharing does not pay takes part with separate rows on both sides.
            packed_chunk = partial(packed, 1) if pays else separate_chunk
            mask_BC = attention_mask[:rows_per_chunk, -completion:]
            if host.policy_mask is not None:
                policy_mask_BC = host.policy_mask[:rows_per_chunk, :completion]
                mask_BC = mask_BC * policy_mask_BC.to(mask_BC.device)
            self._check(
                model, packed=packed_chunk, separate=separate_chunk, mask_BC=mask_BC, pays=pays
            )
        if only_checks or not pays or self.refused:
            return None
        self.passes += 1
        return packed()

    def _check(
        self,
        model: "PreTrainedModel",
        packed: Callable[[], Result],
        separate: Callable[[], Result],
        mask_BC: Tensor,
        pays: bool,
    ) -> None:
        """Compare both passes over one chunk. All ranks call it together.

        If they disagree on any rank, every rank goes on with separate rows and says so.
        """
        gather = self._accelerator.gather
        # Both passes gather sharded weights, so all ranks compare as soon as one can share prompts.
        if not gather(torch.tensor([int(pays)], device=mask_BC.device)).any():
            return
        self.is_checked = True
        # Without evaluation mode each pass would draw dropout anew, and no two would agree.
        with torch.no_grad(), evaluating(model):
            gap = (packed()[0] - separate()[0]).abs() * mask_BC
        mean = gap.sum() / mask_BC.sum().clamp(min=1)
        worst = float(gather(mean.reshape(1)).max())
        bound = bound_of(computing_dtype(self._accelerator, model))
        if not worst <= bound:  # NaN is refused too
            self.refused = (
                f"packed and separate log-probabilities differ by {worst:.2g} nats, more than "
                f"{bound:.2g}"
            )
            warnings.warn(
                f"share_prompt: no shared prompts from here on: {self.refused}", stacklevel=2
            )

    def _pass(
        self,
        model: "PreTrainedModel",
        groups: list[list[int]],
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        compute_entropy: bool,
        host: HostRows,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one packed pass over the rows of `groups`, which are neighbours.

        Returns log-probabilities and entropies, both (rows, C). The arguments are those of `__call__`.
        """
        plain = self._accelerator.unwrap_model(model)
        rows = [row for group in groups for row in group]
        chunk = slice(rows[0], rows[-1] + 1)
        rows_in_chunk = [[row - rows[0] for row in group] for group in groups]
        first_rows = [group[0] for group in groups]
        images = []
        for row in first_rows:
            pair = prompt_images(host, row)
            if pair is not None:
                images.append(pair)
        grids = torch.cat([grid for _, grid in images]) if images else None
        token_types = host.token_types[first_rows] if host.token_types is not None else None
        positions = prompt_positions(
            plain,
            prompt_ids=host.prompt_ids[first_rows],
            prompt_mask=host.prompt_mask[first_rows],
            token_types=token_types,
            grids=grids,
        )
        install(plain)
        completion_positions = answer_positions(plain, host, rows)
        packed = pack(
            input_ids[chunk],
            attention_mask=attention_mask[chunk],
            completion=completion,
            groups=rows_in_chunk,
            positions=positions,
            host=host.taken(rows),
            completion_positions=completion_positions,
        )
        if completion_positions is not None:  # completions have images too
            images = _images_in_order(host, groups)
            grids = torch.cat([grid for _, grid in images])
        kwargs: dict[str, Any] = {
            "input_ids": packed.ids_NS,
            "attention_mask": empty_mask(input_ids.device),
            "position_ids": packed.positions,
            ARGUMENT: packed.shared,
        }
        if grids is not None:
            kwargs["pixel_values"] = torch.cat([references for references, _ in images])
            kwargs["image_grid_thw"] = grids
        learns = torch.is_grad_enabled()
        size = packed_size(packed, kwargs.get("pixel_values"))
        with self._around(size) if learns else nullcontext(), self._accelerator.autocast():
            outputs = model(**kwargs, shift_labels=packed.labels, fused_lm_head=True)
        logps_BC = packed.unpacked(outputs.log_probs)
        if not compute_entropy:  # the reference model's head computes none
            return logps_BC, None
        return logps_BC, packed.unpacked(outputs.entropy)


def packed_size(packed: Packed, pixels: Tensor | None) -> PassSize:
    """Return the size of a packed pass.

    A rollout other than its group's first has the prompt's keys once more, and its own.

    Args:
        packed: the sequence, of which all positions are computed.
        pixels: of its images, or references to them.
    """
    keys = 0
    for group in packed.shared.groups:
        keys += group.first + sum(group.prompt + length for length in group.others)
    rows, length = packed.ids_NS.shape
    return PassSize(
        rows=rows,
        length=length,
        scored=packed.labels.numel(),
        repeated=keys,
        patches=0 if pixels is None else len(pixels),
    )


def separate_size(input_ids: Tensor, completion: int, pixels: Tensor | None) -> PassSize:
    """Return the size of a pass over padded rows.

    Args:
        input_ids: (B, P + C).
        completion: C, the width of the completions.
        pixels: of the rows' images, or references to them; those of an image may be there twice.
    """
    rows, length = input_ids.shape
    return PassSize(
        rows=rows,
        length=length,
        scored=rows * completion,
        patches=0 if pixels is None else len(pixels),
        masked=True,
    )


def _images_in_order(host: HostRows, groups: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Return references and grids of all images, in the order of the packed sequence.

    A prompt's images come first, then those of each of its rollouts, the longest rollout first.
    """
    images = []
    for group in groups:
        images.append(prompt_images(host, group[0]))
        for row in longest_first(group, host.lengths):
            images.append(answer_images(host, row))
    return [pair for pair in images if pair is not None]


def computing_dtype(accelerator: Accelerator, model: "PreTrainedModel") -> torch.dtype:
    """Return the dtype that the model's passes compute in: autocast's, else that of the weights."""
    device = accelerator.device.type
    with accelerator.autocast():
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _inputs_of_first_rows(rows: int, inputs: dict[str, Any], host: HostRows) -> dict[str, Any]:
    """Return the inputs of the first `rows` rows.

    `pixel_values` has an entry per patch and `image_grid_thw` one per image, not one per row.
    """
    images = [pair for pair in host.images[:rows] if pair is not None]
    entries = {
        "pixel_values": sum(len(patches) for patches, _ in images),
        "image_grid_thw": sum(len(grid) for _, grid in images),
    }
    first_inputs = {}
    for name, values in inputs.items():
        first_inputs[name] = None if values is None else values[: entries.get(name, rows)]
    return first_inputs


def _chunks(rows: int, rows_per_chunk: int) -> list[range]:
    """Divide row numbers into ranges of `rows_per_chunk`; the last one may be shorter."""
    starts = range(0, rows, rows_per_chunk)
    return [range(start, min(start + rows_per_chunk, rows)) for start in starts]


def _groups_by_chunk(
    chunks: list[range], host: HostRows, pixels: Tensor | None
) -> list[list[list[int]]]:
    """Return the groups of rows of each chunk; every row is alone where `pixels` are no references.

    Integers are references into an image bank. Pixels do not tell which images are the same.
    """
    if pixels is None or not pixels.is_floating_point():
        return [_grouped(chunk, host) for chunk in chunks]
    return [[[row] for row in chunk] for chunk in chunks]


def _grouped(chunk: range, host: HostRows) -> list[list[int]]:
    """Return the rows of a chunk, grouped by their prompt and its images."""
    rows = list(chunk)
    image_keys: list[list[int]] = []
    for row in rows:
        images = prompt_images(host, row)
        image_keys.append([] if images is None else first_patches(*images))
    groups = groups_of(host.prompt_ids[rows], host.prompt_mask[rows], image_keys)
    return [[rows[index] for index in group] for group in groups]


def prompt_images(host: HostRows, row: int) -> tuple[Tensor, Tensor] | None:
    """Return references (or pixels) and grids of the images in a row's prompt.

    None where it has none.
    """
    images = host.images[row]
    if images is None or host.answer_types is None:
        return images
    pixels, grids = images
    grids = grids[: host.images_of_prompt(row)]
    return pixels[: int(grids.prod(dim=-1).sum())], grids


def answer_images(host: HostRows, row: int) -> tuple[Tensor, Tensor] | None:
    """Return references and grids of the images in a row's completion.

    None where it has no tokens.
    """
    images = host.images[row]
    in_prompt = prompt_images(host, row)
    if images is None or in_prompt is None or not host.lengths[row]:
        return None
    pixels, grids = images
    prompt_pixels, prompt_grids = in_prompt
    return pixels[len(prompt_pixels) :], grids[len(prompt_grids) :]


def answer_positions(model: "PreTrainedModel", host: HostRows, rows: list[int]) -> Tensor | None:
    """Return M-RoPE positions of the completions of these rows, (3, rows, C), if one has an image.

    The token after an image is as far away as the image is high or wide. None where no completion
    has an image, so that positions simply count on by one.
    """
    if host.answer_types is None or not host.answer_types[rows].any():
        return None
    assert host.token_types is not None
    prompt_mask = host.prompt_mask[rows]
    token_types = torch.cat([host.token_types[rows], host.answer_types[rows]], dim=1)
    lengths = torch.tensor([host.lengths[row] for row in rows])
    completion_mask = torch.arange(host.answer_types.size(1)) < lengths[:, None]
    mask = torch.cat([prompt_mask, completion_mask.to(prompt_mask.dtype)], dim=1)
    images = [host.images[row] for row in rows]
    grids = torch.cat([pair[1] for pair in images if pair is not None])
    positions = prompt_positions(
        model,
        # The model reads the types of tokens and not their ids.
        prompt_ids=torch.zeros_like(token_types, dtype=torch.long),
        prompt_mask=mask,
        token_types=token_types,
        grids=grids,
    )
    return positions[..., prompt_mask.size(1) :]


def _pays(groups: list[list[int]], host: HostRows) -> bool:
    """Return whether packing these groups is less work than separate rows."""
    first_rows = [group[0] for group in groups]
    prompt_lengths = host.prompt_mask[first_rows].sum(dim=1).tolist()
    completion_lengths = [[host.lengths[row] for row in group] for group in groups]
    return sharing_pays(prompt_lengths, completion_lengths)


def prompt_positions(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    token_types: Tensor | None,
    grids: Tensor | None,
) -> Tensor:
    """Return the positions of left-padded prompts as the model itself counts them.

    They are (3, N, P) for a vision-language model, whose M-RoPE has three axes, else (N, P).
    """
    inner = vision_model(model)
    if inner is not None and token_types is not None and grids is not None:
        positions: Tensor = inner.get_rope_index(
            prompt_ids,
            mm_token_type_ids=token_types,
            image_grid_thw=grids,
            attention_mask=prompt_mask,
        )[0]
        return positions
    # Without an image all three axes count the tokens.
    token_index = (prompt_mask.cumsum(dim=-1) - 1).clamp(min=0)
    return token_index.expand(3, *token_index.shape) if inner is not None else token_index


def has_dropout(model: nn.Module) -> bool:
    """Return whether the model has dropout, so that two passes over the same tokens differ."""
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None else None
    # attention dropout is an argument of the kernel and no module
    if getattr(text_config, "attention_dropout", 0.0):
        return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block, so that it has no dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def generation_logps(batch: Batch, policy: Pass, rows: int, pixels: Tensor | None = None) -> Tensor:
    """Return log-probabilities of a generation's completions, (B, C), without gradients.

    `rows`: rows of one forward pass. `pixels`: used in place of the batch's pixels.
    """
    inputs = {name: batch[name] for name in _INPUTS if name in batch}  # type: ignore[literal-required]
    if pixels is not None:
        inputs["pixel_values"] = pixels
    with torch.no_grad():
        return policy(
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=rows,
            **inputs,
        )[0]


class PolicyPass:
    """TRL's `_get_per_token_logps_and_entropies`, with shared prompts where they save work.

    It serves the policy, the old policy and the reference model.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: AdoraKeys,
        *,
        images: bool = False,
        around: AroundPass = unchanged,
    ) -> None:
        """Create the pass.

        `config`: whether prompts are shared. `images`: whether any pass may have images; rows
        without any then get empty columns. `around`: the block in which a model computes a pass
        that learns.
        """
        self._config = config
        self._images = images
        self._around = around
        self.packed = PackedForward(accelerator, around)
        self._observer: PassObserver | None = None
        self._micro = Batch()
        self._only_checks = False

    @property
    def shares_prompts(self) -> bool:
        """Whether passes share prompts where that is less work, which is known after `check`."""
        is_sure = self.packed.is_checked and not self.packed.refused
        return self._config.uses("share_prompt") and is_sure

    @property
    def check_is_due(self) -> bool:
        """Whether packed rows are still to be compared with separate ones."""
        is_known = self.packed.is_checked or bool(self.packed.refused)
        return self._config.uses("share_prompt") and not is_known

    def check(self, batch: Batch, policy: Pass) -> None:
        """Compare packed rows of a batch with separate ones. Collective.

        If they disagree on any rank, every rank goes on with separate rows. `policy`: the pass of
        the model that learns, which comes back to `__call__`.
        """
        self._only_checks = True
        try:
            generation_logps(batch, policy, len(batch["completion_ids"]))
        finally:
            self._only_checks = False

    @contextmanager
    def watched(self, observer: PassObserver | None, micro: Batch) -> Iterator[None]:
        """Call `observer` once inside the block, with the results of the first pass.

        Args:
            observer: takes the results; None where nobody does.
            micro: the micro-batch whose rows all passes inside the block read.
        """
        self._observer = observer
        self._micro = micro
        try:
            yield
        finally:
            self._observer = None
            self._micro = Batch()

    def __call__(
        self,
        separate_rows: Callable[..., Result],
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> Result:
        """Compute log-probabilities (B, C), entropies or None, and the auxiliary loss or None.

        The arguments are those of TRL's method, which is `separate_rows`. Tokens that the policy
        has not sampled (`tool_mask`) get a log-probability of 0, so that no two passes differ where
        the loss does not look.

        A pass without gradients scores tokens for a comparison, with an engine, an older policy or
        a reference. None of these has dropout, so the pass has none either; TRL's pass has.
        """
        learns = torch.is_grad_enabled()
        with nullcontext() if learns else evaluating(model):
            result = self._compute(
                separate_rows,
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                inputs,
            )
        if self._observer is not None:
            observer = self._observer
            self._observer = None
            observer(result[0].detach(), result[1])
        return result

    def _compute(
        self,
        separate_rows: Callable[..., Result],
        model: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        compute_aux_loss: bool,
        inputs: dict[str, Any],
    ) -> Result:
        """Compute a pass, packed where that is less work; the arguments are those of `__call__`."""
        # 0 at tokens that tools wrote, which the policy did not choose.
        policy_mask_BC = inputs.get("tool_mask", self._micro.get("tool_mask"))
        if policy_mask_BC is not None:
            inputs = {**inputs, "tool_mask": policy_mask_BC}
        if self._images:
            inputs = with_image_columns(inputs, input_ids)

        def separate(rows: int | None = None, inputs: dict[str, Any] = inputs) -> Result:
            """Compute the first `rows` rows, by default all, as TRL does."""
            model_inputs = {name: value for name, value in inputs.items() if name != "tool_mask"}
            return separate_rows(
                model,
                input_ids[:rows],
                attention_mask[:rows],
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **model_inputs,
            )

        result: Result | None = None
        if self._config.uses("share_prompt") and not compute_aux_loss and not self.packed.refused:
            result = self.packed(
                model=model,
                input_ids=input_ids,
                attention_mask=attention_mask,
                completion=logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                inputs=inputs,
                separate=separate,
                host=self._micro.get("host"),
                only_checks=self._only_checks,
            )
        if self._only_checks:  # nobody reads the result
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        if result is None:  # packing is off, refused, or would not save work here
            around: AbstractContextManager[None] = nullcontext()
            if torch.is_grad_enabled():
                pixels = inputs.get("pixel_values")
                around = self._around(separate_size(input_ids, logits_to_keep, pixels))
            with around:
                result = separate()
        if policy_mask_BC is not None:
            logps, entropies, auxiliary = result
            result = torch.where(policy_mask_BC.bool(), logps, 0.0), entropies, auxiliary
        return result
