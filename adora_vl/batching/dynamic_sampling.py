"""DAPO's dynamic sampling: groups without signal are replaced by groups with signal, from further problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.batch import Batch, LogFigure, Row, loss_mask
from adora_vl.batching.micro_batches import live_units, take_rows
from adora_vl.config.speed import SpeedOptions
from adora_vl.seeds import generator_at


class Rows(Protocol):
    """A dataset that can read several rows at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> list[Row]: ...


class DynamicSampling:
    """Replaces groups without signal. All ranks sample further batches as long as any rank needs one."""

    def __init__(
        self,
        accelerator: Accelerator,
        log: LogFigure,
        switches: SpeedOptions,
        *,
        generations: int,
        seed: int,
        pad_id: int,
    ) -> None:
        self.accelerator, self.log, self.switches = accelerator, log, switches
        self.generations, self.seed, self.pad_id = generations, seed, pad_id

    def __call__(self, batch: Batch, collect: Callable[[list[Row], int], Batch], rows: Rows, place: str) -> Batch:
        """Return `batch`, with groups without signal replaced as far as further problems had groups with signal.

        `collect(rows, attempt)` samples and grades. `place` says where the run is; it seeds the choice of problems, so
        that a resumed run draws the same ones.
        """
        tries = self.switches.adora_dynamic_sampling
        if not tries:
            return batch
        size, device = self.generations, self.accelerator.device
        count = len(batch["prompt_ids"]) // size
        live, replaced_groups = live_units(batch["advantages"], size), 0
        for attempt in range(1, tries + 1):
            dead = self.accelerator.gather(torch.tensor([live.count(False)], device=device))
            if not dead.any():
                break
            drawn = further_rows(len(rows), count, f"{self.seed}/{place}/{attempt}/{self.accelerator.process_index}")
            further = collect(rows.__getitems__([row for row in drawn for _ in range(size)]), attempt)
            self.log("adora/further_batches", 1.0)
            if not all(gather_object([further.keys() == batch.keys()])):
                continue  # only one of the two batches has images, so their rows have different columns
            pairs = exchanges(live, live_units(further["advantages"], size))
            batch = cast("Batch", refilled(dict(batch), dict(further), pairs, size, self.pad_id))
            live = live_units(batch["advantages"], size)
            replaced_groups += len(pairs)
        batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()
        self.log("adora/refilled_groups", replaced_groups / len(live))
        return batch


def further_rows(rows: int, groups: int, place: str) -> list[int]:
    """Row numbers of `groups` further problems, drawn with `place` as the seed, so a resumed run draws the same."""
    drawn: list[int] = torch.randperm(rows, generator=generator_at(place))[:groups].tolist()
    return [drawn[number % len(drawn)] for number in range(groups)]


def exchanges(live: list[bool], further_live: list[bool]) -> list[tuple[int, int]]:
    """Pairs (group without signal, group of the further batch that replaces it), until either kind runs out."""
    dead = [group for group, alive in enumerate(live) if not alive]
    found = [group for group, alive in enumerate(further_live) if alive]
    return list(zip(dead, found, strict=False))


def joined(batch: dict[str, Any], further: dict[str, Any], pad_id: int) -> dict[str, Any]:
    """The rows of both batches, padded to the wider of the two. Values without rows are taken from `batch`."""
    prompt = max(part["prompt_ids"].size(1) for part in (batch, further))
    completion = max(part["completion_ids"].size(1) for part in (batch, further))
    both_sequence = all(_sequence_ratio(part) for part in (batch, further))
    wide = (_widened(part, prompt, completion, pad_id, both_sequence) for part in (batch, further))
    own, other = map(split_pixel_values_by_grid, wide)
    both: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            both[name] = torch.cat([value, other[name]])
        else:
            both[name] = value + other[name] if isinstance(value, list) else value
    whole: dict[str, Any] = unsplit_pixel_values_by_grid(both)
    return whole


def refilled(
    batch: dict[str, Any], further: dict[str, Any], pairs: list[tuple[int, int]], size: int, pad_id: int
) -> dict[str, Any]:
    """`batch` with some groups of `size` rows replaced by groups of `further`, padded to the wider of the two.

    `num_items_in_batch` is left unchanged, because it is a sum over all ranks.
    """
    source = list(range(len(batch["prompt_ids"])))
    for dead, found in pairs:
        for member in range(size):
            source[dead * size + member] = len(source) + found * size + member
    both = split_pixel_values_by_grid(joined(batch, further, pad_id))
    whole: dict[str, Any] = unsplit_pixel_values_by_grid(take_rows(both, source))
    return whole


def _sequence_ratio(batch: dict[str, Any]) -> bool:
    """Whether the importance ratio to the engine is one number per rollout."""
    ratio = batch.get("importance_sampling_ratio")
    return ratio is None or ratio.size(1) == 1


def _widened(batch: dict[str, Any], prompt: int, completion: int, pad_id: int, sequence_ratio: bool) -> dict[str, Any]:
    """Pad prompts on the left, completions on the right, and tensors that span both on both sides."""
    left, right = prompt - batch["prompt_ids"].size(1), completion - batch["completion_ids"].size(1)
    wide: dict[str, Any] = {}
    for name, value in batch.items():
        fill = pad_id if name.endswith("_ids") and name != "mm_token_type_ids" else 0
        if name == "importance_sampling_ratio":  # TRL's VESPO takes its logarithm without a mask
            wide[name] = value if sequence_ratio else pad(value, (0, right), value=1)
        elif not isinstance(value, Tensor) or value.dim() < 2 or name in ("pixel_values", "image_grid_thw"):
            wide[name] = value
        elif name in ("prompt_ids", "prompt_mask"):
            wide[name] = pad(value, (left, 0), value=fill)
        elif value.size(1) == batch["prompt_ids"].size(1) + batch["completion_ids"].size(1):
            wide[name] = pad(value, (left, right), value=fill)
        elif value.size(1) == batch["completion_ids"].size(1):
            wide[name] = pad(value, (0, right), value=fill)
        else:
            wide[name] = value
    return wide
