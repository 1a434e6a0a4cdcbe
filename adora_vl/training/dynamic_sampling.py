"""DAPO's dynamic sampling: groups without signal are replaced by groups with signal, from further problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

from adora_vl.training.batch_rows import replace_groups
from adora_vl.training.micro_batches import live_units
from adora_vl.training.policies import exchanges, further_rows
from adora_vl.types import Batch, Row, StepContext


class Rows(Protocol):
    """A dataset that can read several rows at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> list[Any]: ...  # each is a `Row`


class DynamicSampling:
    """Replaces groups without signal. All ranks sample further batches as long as any rank needs one."""

    def __init__(self, context: StepContext) -> None:
        self.accelerator, self.log, self.pad_id = context.accelerator, context.log, context.pad_id
        self.config = context.config

    def __call__(self, batch: Batch, collect: Callable[[list[Row], int], Batch], rows: Rows, place: str) -> Batch:
        """Return `batch`, with groups without signal replaced as far as further problems had groups with signal.

        `collect(rows, attempt)` samples and grades, and weighs nothing. `place` says where the run is; it seeds the
        choice of problems, so that a resumed run draws the same ones.
        """
        tries = self.config.adora_rollouts.refill
        if not tries:
            return batch
        size, device = self.config.num_generations, self.accelerator.device
        count = len(batch["prompt_ids"]) // size
        live, replaced_groups = live_units(batch["signal"], size), 0
        seed = f"{self.config.seed}/{place}"
        for attempt in range(1, tries + 1):
            dead = self.accelerator.gather(torch.tensor([live.count(False)], device=device))
            if not dead.any():
                break
            drawn = further_rows(len(rows), count, f"{seed}/{attempt}/{self.accelerator.process_index}")
            further = collect(rows.__getitems__([row for row in drawn for _ in range(size)]), attempt)
            self.log("adora/further_batches", 1.0)
            if not all(gather_object([further.keys() == batch.keys()])):
                continue  # only one of the two batches has images, so their rows have different columns
            pairs = exchanges(live, live_units(further["signal"], size))
            batch = replace_groups(batch, further, pairs, size, self.pad_id)
            live = live_units(batch["signal"], size)
            replaced_groups += len(pairs)
        self.log("adora/refilled_groups", replaced_groups / len(live))
        return batch
