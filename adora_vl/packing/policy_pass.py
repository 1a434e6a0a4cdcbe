"""The policy's pass over a micro-batch, in which the prompt of a group is computed once.

Its log-probabilities are compared with those of separate rows once per run.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.config.keys import AdoraKeys
from adora_vl.models.families import shares_prompts
from adora_vl.packing.image_store import first_patches
from adora_vl.packing.images import with_image_columns
from adora_vl.packing.shared_prompt import groups_of, longest_first, pack, sharing_pays
from adora_vl.packing.split_attention import ARGUMENT, install, own_attention, prepared_mask
from adora_vl.packing.vision import vision_model
from adora_vl.types import Batch, HostRows

# log-probabilities (B, C), entropies, auxiliary loss
Result = tuple[Tensor, Tensor | None, Tensor | None]
Seen = Callable[[Tensor, Tensor | None], None]  # log-probabilities without gradients, entropies
Pass = Callable[..., Result]  # TRL's `_get_per_token_logps_and_entropies`, of a model
# What TRL hands on to a pass besides tokens, as in its `_compute_loss`, and which of them are not
# the policy's
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
    """How far packed and separate log-probabilities may differ by rounding in this dtype, on
    average, in nats.
    """
    return 1e-5 if torch.finfo(dtype).bits >= 32 else 0.05


def packable(config: Any) -> bool:
    """Whether the model's attention can use the layout, and every layer has full attention."""
    attention = own_attention(config)
    flash = is_flash_attention_requested(requested_attention_implementation=attention)
    return shares_prompts(config) and (flash or attention in ("sdpa", "eager"))


class PackedForward:
    """Log-probabilities of a batch with each prompt once and without padding."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.refused = ""  # why prompts are not shared, once that is known
        self.passes = 0
        self._checked = False

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        batch_size: int | None,
        compute_entropy: bool,
        inputs: dict[str, Any],
        separate: Callable[..., Result],
        host: HostRows | None = None,
    ) -> Result | None:
        """As TRL's `_get_per_token_logps_and_entropies`.

        None if separate rows are less work or the only way.

        `separate`: of the first rows, given their number and inputs. `host`: what the host knows of
        these rows already.
        """
        config = self._accelerator.unwrap_model(model).config
        if not packable(config):
            self.refused = f"attention {own_attention(config)} of {config.model_type}"
            return None
        if host is None:
            prompts = attention_mask[:, :-completion]
            answers = attention_mask[:, -completion:]
            host = HostRows.of(input_ids[:, :-completion], prompts, answers, inputs)
        step = batch_size or len(input_ids)
        chunks = [
            range(start, min(start + step, len(input_ids)))
            for start in range(0, len(input_ids), step)
        ]
        pixels = inputs.get("pixel_values")
        # else nothing tells whether two images are the same
        known = pixels is None or not pixels.is_floating_point()
        groups = [_grouped(chunk, host) if known else [[row] for row in chunk] for chunk in chunks]
        pays = all(_pays(part, host) for part in groups)

        def packed(chunks: int | None = None) -> Result:
            tokens = (input_ids, attention_mask, completion)
            parts = [
                self._pass(model, part, *tokens, compute_entropy, host) for part in groups[:chunks]
            ]
            entropies = [entropy for _, entropy in parts if entropy is not None]
            return (
                torch.cat([logps for logps, _ in parts]),
                torch.cat(entropies) if entropies else None,
                None,
            )

        if not self._checked:
            alone = partial(separate, step, _of_first(step, inputs, host))
            mask = attention_mask[:step, -completion:]
            if host.policy_mask is not None:
                mask = mask * host.policy_mask[:step, :completion].to(mask.device)
            self._check(model, partial(packed, 1) if pays else alone, alone, mask, pays)
        if not pays or self.refused:
            return None
        self.passes += 1
        return packed()

    def _check(
        self,
        model: Any,
        packed: Callable[[], Result],
        separate: Callable[[], Result],
        mask_BC: Tensor,
        pays: bool,
    ) -> None:
        """Compare both passes over one chunk, on every rank.

        If they disagree, go on with separate rows and say so.
        """
        gather = self._accelerator.gather
        if not gather(torch.tensor([int(pays)], device=mask_BC.device)).any():
            return  # nowhere to be used yet
        self._checked = True
        with torch.no_grad(), evaluating(model):  # else each pass would have a dropout of its own
            gap = (packed()[0] - separate()[0]).abs() * mask_BC
        mean = gap.sum() / mask_BC.sum().clamp(min=1)
        worst = float(gather(mean.reshape(1)).max())
        bound = bound_of(computing_dtype(self._accelerator, model))
        if not worst <= bound:
            self.refused = (
                f"packed and separate log-probabilities differ by {worst:.2g} nats, more than "
                f"{bound:.2g}"
            )
            warnings.warn(
                f"share_prompt: no shared prompts from here on: {self.refused}", stacklevel=2
            )

    def _pass(
        self,
        model: Any,
        groups: list[list[int]],
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        compute_entropy: bool,
        host: HostRows,
    ) -> tuple[Tensor, Tensor | None]:
        plain = self._accelerator.unwrap_model(model)
        rows = [row for group in groups for row in group]
        first = [group[0] for group in groups]
        images = [pair for row in first if (pair := prompt_images(host, row)) is not None]
        grids = torch.cat([grid for _, grid in images]) if images else None
        types = host.token_types[first] if host.token_types is not None else None
        positions = prompt_positions(
            plain,
            prompt_ids=host.prompt_ids[first],
            prompt_mask=host.prompt_mask[first],
            token_types=types,
            grids=grids,
        )
        install(plain)
        own = [[row - rows[0] for row in group] for group in groups]
        part = slice(rows[0], rows[-1] + 1)  # groups are neighbours
        behind = answer_positions(plain, host, rows)
        packed = pack(
            input_ids[part],
            attention_mask=attention_mask[part],
            completion=completion,
            groups=own,
            positions=positions,
            host=host.taken(rows),
            behind=behind,
        )
        if behind is not None:
            images = _in_order(host, groups)
            grids = torch.cat([grid for _, grid in images])
        given: dict[str, Any] = {
            "attention_mask": prepared_mask(input_ids.device),
            ARGUMENT: packed.shared,
        }
        given |= {"input_ids": packed.ids_NS, "position_ids": packed.positions}
        if grids is not None:
            given["pixel_values"] = torch.cat([references for references, _ in images])
            given["image_grid_thw"] = grids
        with self._accelerator.autocast():
            outputs = model(**given, shift_labels=packed.labels, fused_lm_head=True)
        # the reference model's head computes no entropy
        return packed.unpacked(outputs.log_probs), packed.unpacked(
            outputs.entropy
        ) if compute_entropy else None


def _in_order(host: HostRows, groups: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """The images of a sequence of groups: those of a prompt, then those of each of its rollouts,
    the longest first.
    """
    found = []
    for group in groups:
        rollouts = longest_first(group, host.lengths)
        found += [prompt_images(host, group[0]), *(answer_images(host, row) for row in rollouts)]
    return [pair for pair in found if pair is not None]


def computing_dtype(accelerator: Accelerator, model: Any) -> torch.dtype:
    """The dtype that passes of the model compute in: that of autocast, or of the weights."""
    device = accelerator.device.type
    with accelerator.autocast():
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _of_first(rows: int, inputs: dict[str, Any], host: HostRows) -> dict[str, Any]:
    """The inputs of the first rows.

    Images have as many places in their columns as they have patches.
    """
    images = [pair for pair in host.images[:rows] if pair is not None]
    places = {
        "pixel_values": sum(len(p) for p, _ in images),
        "image_grid_thw": sum(len(grid) for _, grid in images),
    }
    return {
        name: value if value is None else value[: places.get(name, rows)]
        for name, value in inputs.items()
    }


def _grouped(chunk: range, host: HostRows) -> list[list[int]]:
    """The rows of a chunk, grouped by their prompt."""
    rows = list(chunk)
    shown = [
        first_patches(*held) if (held := prompt_images(host, row)) is not None else []
        for row in rows
    ]
    groups = groups_of(host.prompt_ids[rows], host.prompt_mask[rows], shown)
    return [[rows[row] for row in group] for group in groups]


def prompt_images(host: HostRows, row: int) -> tuple[Tensor, Tensor] | None:
    """References or pixels, and grids, of the images that the prompt of a row has; None where it
    has none.
    """
    held = host.images[row]
    if held is None or host.answer_types is None:
        return held
    pixels, grids = held
    grids = grids[: host.images_of_prompt(row)]
    return pixels[: int(grids.prod(dim=-1).sum())], grids


def answer_images(host: HostRows, row: int) -> tuple[Tensor, Tensor] | None:
    """The same of those that its completion has."""
    held = host.images[row]
    first = prompt_images(host, row)
    if held is None or first is None or not host.lengths[row]:
        return None
    return held[0][len(first[0]) :], held[1][len(first[1]) :]


def answer_positions(model: Any, host: HostRows, rows: list[int]) -> Tensor | None:
    """Positions of the completions of these rows, (3, rows, C), where one has an image: behind it
    the next token stands as far away as the image is high or wide. None where each token stands one
    behind the other.
    """
    if host.answer_types is None or not host.answer_types[rows].any():
        return None
    assert host.token_types is not None
    prompts = host.prompt_mask[rows]
    types = torch.cat([host.token_types[rows], host.answer_types[rows]], dim=1)
    lengths = torch.tensor([host.lengths[row] for row in rows])
    filled = torch.arange(host.answer_types.size(1)) < lengths[:, None]
    mask = torch.cat([prompts, filled.to(prompts.dtype)], dim=1)
    grids = torch.cat([held[1] for row in rows if (held := host.images[row]) is not None])
    positions = prompt_positions(
        model,
        prompt_ids=torch.zeros_like(types, dtype=torch.long),
        prompt_mask=mask,
        token_types=types,
        grids=grids,
    )
    return positions[..., prompts.size(1) :]


def _pays(groups: list[list[int]], host: HostRows) -> bool:
    prompts = host.prompt_mask[[group[0] for group in groups]].sum(dim=1).tolist()
    return sharing_pays(prompts, [[host.lengths[row] for row in group] for group in groups])


def prompt_positions(
    model: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    token_types: Tensor | None,
    grids: Tensor | None,
) -> Tensor:
    """Positions of left-padded prompts as the model itself counts them: (3, N, P) with M-RoPE, else
    (N, P).
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
    counted = (prompt_mask.cumsum(dim=-1) - 1).clamp(min=0)
    return counted.expand(3, *counted.shape) if inner is not None else counted


def has_dropout(model: nn.Module) -> bool:
    """Whether the model has active dropout, so that two passes over the same tokens differ."""
    config = getattr(model, "config", None)
    attention = getattr(
        config.get_text_config() if config is not None else None, "attention_dropout", 0.0
    )
    return bool(attention) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Inside the block the model has no dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def generation_logps(batch: Batch, policy: Pass, rows: int, pixels: Tensor | None = None) -> Tensor:
    """Log-probabilities of a generation's completions, (B, C), without gradients.

    `pixels`: in place of the batch's.
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
    """What TRL's `_get_per_token_logps_and_entropies` computes, for the policy, the old policy and
    the reference.
    """

    def __init__(
        self, accelerator: Accelerator, config: AdoraKeys, *, images: bool = False
    ) -> None:
        """`images`: whether rows of other passes have images, so that rows without any get the same
        columns.
        """
        self._config = config
        self._images = images
        self.packed = PackedForward(accelerator)
        self._seen: Seen | None = None
        self._micro = Batch()

    @contextmanager
    def watched(self, seen: Seen, micro: Batch) -> Iterator[None]:
        """Inside, `seen` gets the first pass once: the detached log-probabilities, and the entropies.

        `micro`: the rows of all.
        """
        self._seen = seen
        self._micro = micro
        try:
            yield
        finally:
            self._seen = None
            self._micro = Batch()

    def __call__(
        self,
        separate_rows: Callable[..., Result],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> Result:
        """Same arguments and result as TRL's method, which is `separate_rows`.

        The result is log-probabilities (B, C), entropies or None, and the auxiliary loss or None.
        Of tokens that the policy has not sampled (`tool_mask`) they are 0, so that no two passes
        differ where the loss looks at nothing.

        A pass without gradients scores tokens for a comparison, with an engine, an older policy or
        a reference. None of them has dropout, so the pass has none either; TRL's has.
        """
        learns = torch.is_grad_enabled()
        with nullcontext() if learns else evaluating(model):
            result = self._computed(
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
        if self._seen is not None:
            seen = self._seen
            self._seen = None
            seen(result[0].detach(), result[1])
        return result

    def _computed(
        self,
        separate_rows: Callable[..., Result],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        compute_aux_loss: bool,
        inputs: dict[str, Any],
    ) -> Result:
        """The result of the pass, packed where that is less work."""
        own = inputs.get("tool_mask", self._micro.get("tool_mask"))
        inputs = inputs if own is None else {**inputs, "tool_mask": own}
        inputs = with_image_columns(inputs, input_ids) if self._images else inputs
        tokens = (input_ids, attention_mask, logits_to_keep, batch_size)

        def separate(first: int | None = None, inputs: dict[str, Any] = inputs) -> Result:
            rows = (input_ids[:first], attention_mask[:first], logits_to_keep, batch_size)
            given = {name: value for name, value in inputs.items() if name != "tool_mask"}
            return separate_rows(model, *rows, compute_entropy, compute_aux_loss, **given)

        result: Result | None = None
        if self._config.own("share_prompt") and not compute_aux_loss and not self.packed.refused:
            host = self._micro.get("host")
            result = self.packed(model, *tokens, compute_entropy, inputs, separate, host)
        result = result if result is not None else separate()
        if own is not None:
            logps, entropies, auxiliary = result
            result = torch.where(own.bool(), logps, 0.0), entropies, auxiliary
        return result
