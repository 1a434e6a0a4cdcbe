"""Divides a generation into micro-batches. Groups stay together, those without signal are left out, padding is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.batch import Batch, LogFigure
from adora_vl.batching.micro_batches import (
    MEAN_OVER_ROWS,
    by_length,
    chosen_units,
    live_units,
    planned,
    take_rows,
    without_padding,
)
from adora_vl.batching.rebalance import Carrier, movable, moves, rebalanced
from adora_vl.config.arithmetic import unit_size
from adora_vl.config.speed import SpeedOptions
from adora_vl.dedup.image_bank import ImageBanks


@dataclass(frozen=True)
class Shape:
    """The sizes of a generation. Rows are the rollouts of one process."""

    rows: int  # per micro-batch: per_device_train_batch_size
    generations: int  # rollouts per prompt (G): num_generations
    steps: int  # micro-batches per generation: steps_per_generation
    iterations: int  # passes over each generation: num_iterations
    accumulated: int  # micro-batches per optimizer step: gradient_accumulation_steps

    @property
    def unit(self) -> int:
        """How many rows stay together."""
        return unit_size(self.rows, self.generations)

    @property
    def cycle(self) -> int:
        """How many micro-batches learn from one generation."""
        return self.steps * self.iterations

    @property
    def chunk(self) -> int:
        """How many micro-batches of one generation belong to one optimizer step. All but the last may be empty."""
        steps, accumulated = self.steps, self.accumulated
        return min(steps, accumulated) if steps % accumulated == 0 or accumulated % steps == 0 else 1

    @property
    def has_one_step(self) -> bool:
        """Whether one optimizer step learns from the whole generation."""
        return self.accumulated % self.cycle == 0


class Batcher:
    """All ranks call every method together, and each gets the same number of micro-batches with work."""

    def __init__(
        self,
        accelerator: Accelerator,
        banks: ImageBanks,
        log: LogFigure,
        shape: Shape,
        switches: SpeedOptions,
        *,
        pad_id: int,
        loss_type: str,
        every_row_counts: bool,
    ) -> None:
        """`every_row_counts`: whether a row adds to the loss even if its advantage is 0."""
        self.accelerator, self.banks, self.log = accelerator, banks, log
        self.shape, self.switches, self.pad_id = shape, switches, pad_id
        self._loss_type, self._every_row_counts = loss_type, every_row_counts
        self._carrier = Carrier()
        self._moved = False

    def split(self, batch: Batch) -> list[Batch]:
        """Divide the generation into `steps_per_generation` micro-batches of whole units. An empty one has no work."""
        shape, unit = self.shape, self.shape.unit
        live = live_units(batch["advantages"], unit)
        count = len(live)
        if self._every_row_counts or not self.switches.adora_skip_zero_signal:
            live = [True] * count
        elif self.switches.adora_spread_signal and self.accelerator.num_processes > 1:
            batch, live = self._rebalance(batch, live)
        wanted = self.accelerator.gather(torch.tensor([sum(live)], device=self.accelerator.device)).max().item()
        units = chosen_units(live, max(int(wanted), shape.steps // shape.chunk))
        self.log("adora/skipped_groups", 1 - len(units) / count)
        if shape.has_one_step:
            lengths_B = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
            units = by_length(units, lengths_B, unit)
        else:  # each optimizer step should see groups of all kinds
            units = [units[place] for place in torch.randperm(len(units)).tolist()]
        split = split_pixel_values_by_grid(dict(batch))
        plan = planned(units, shape.steps // shape.chunk, shape.chunk, shape.rows // unit)
        return [self._micro_batch(split, part) for part in plan]

    def _micro_batch(self, split: dict[str, Any], units: list[int]) -> Batch:
        if not units:
            return {}
        unit = self.shape.unit
        micro = unsplit_pixel_values_by_grid(take_rows(split, [unit * n + row for n in units for row in range(unit)]))
        micro = without_padding(micro)
        return cast("Batch", {**micro, "share_of_rows": len(units) * unit / self.shape.rows})

    def scaled(self, loss: Tensor, micro: Batch) -> Tensor:
        """The loss, weighed by the number of rows. Stock TRL takes a mean over the rows of a micro-batch, so without
        this the rows of a smaller micro-batch would weigh more.
        """
        share = micro.get("share_of_rows", 1.0)
        return loss * share if share != 1.0 and self._loss_type in MEAN_OVER_ROWS else loss

    def take_moved(self) -> bool:
        """Whether rollouts of this step moved to another rank. Call it once per step, because it resets the answer."""
        taken, self._moved = self._moved, False
        return taken

    def _rebalance(self, batch: Batch, live: list[bool]) -> tuple[Batch, list[bool]]:
        """Move units with signal between ranks, if the rank with the most of them would otherwise take longer."""
        counts, names = zip(*gather_object([(sum(live), movable(batch))]), strict=True)
        alike = names[0] and all(own == names[0] for own in names)  # a rank without images lacks their columns
        plan = moves(counts, self.shape.steps // self.shape.chunk) if alike else []
        self.log("adora/moved_groups", len(plan) / max(sum(counts), 1))
        if not plan:
            return batch, live
        self._moved = True
        moved, live = rebalanced(
            dict(batch),
            live,
            self.shape.unit,
            plan,
            self.accelerator.process_index,
            self.banks,
            self.pad_id,
            self._carrier.carry,
        )
        return cast("Batch", moved), live
