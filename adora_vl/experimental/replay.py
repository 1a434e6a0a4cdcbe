"""Selective sample replay over steps: earlier groups take the places of groups that teach nothing.

Source: SSR of VL-Rethinker (arXiv 2504.08837) and its repository (TIGER-AI-Lab/VL-Rethinker,
`openrlhf/trainer/ppo_utils/replay_buffer.py`). Groups without signal give their places to groups of earlier
generations, which are drawn with a chance that grows with their advantages. Those keep the log-probabilities of the
policy that sampled them, so the loss corrects for the updates since. They are weighed anew, with those beside them.

The repository keeps single rollouts, and as many as half a generation. Ours keeps whole groups, whose rollouts share
one pass over their prompt and image. The repository also draws the rollouts of the present generation anew with chances
like their |advantages|, adds up to a tenth of rollouts that are right throughout their group, and halves the batch;
ours does none of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from adora_vl.checkpoint.store import load_of_rank, save_of_rank
from adora_vl.dedup.images import DistinctImages
from adora_vl.training import batch_rows
from adora_vl.training.generation import Extension, Generation
from adora_vl.training.micro_batches import live_units
from adora_vl.training.policies import replayed
from adora_vl.types import Batch, StepContext
from adora_vl.utils.errors import UserError

FILES = "replay"  # in a checkpoint, one of each rank


@dataclass(frozen=True)
class Kept:
    """A group of an earlier generation."""

    packed: batch_rows.PackedRows
    columns: tuple[str, ...]  # of the batch that it is from
    size: float  # the sum of |advantages|
    step: int  # optimizer steps that had been made when it was sampled


class SampleReplay(Extension):
    """Keeps groups with signal, and replaces those without. All ranks call every method together."""

    needs_old_logps = True

    def __init__(self, context: StepContext, images: DistinctImages) -> None:
        """Raises `UserError` where every rollout would keep its own image."""
        config = context.config
        if images.shown and images.cache is None:
            raise UserError(
                f"adora_rollouts.replay: {config.adora_rollouts.replay} needs an image processor whose output can be "
                "kept, and that of this model is of another kind; set it to 0"
            )
        self.accelerator, self.log, self.config = context.accelerator, context.log, config
        self.policy_logps, self.pad_id, self.banks = context.policy_logps, context.pad_id, images.banks
        self.generations, self.capacity = config.num_generations, config.adora_rollouts.replay
        self.kept: list[Kept] = []  # of this rank, the oldest first
        self._fresh: dict[int, Kept] = {}  # the present generation's, by the place of the group

    def on_exploded_ratio(self) -> None:
        """Keep nothing: the policy has moved too far from the one that sampled these groups."""
        self.kept = []

    def before_weighing(self, generation: Generation) -> None:
        """Replace groups without signal as far as there are earlier ones. Where the run stands seeds the choice, so
        that a resumed run draws the same groups.
        """
        batch, step, place = generation.batch, generation.step, f"{self.config.seed}/{generation.key}"
        if "old_per_token_logps" not in batch:
            batch = {**batch, "old_per_token_logps": self.policy_logps(batch)}
        live = live_units(batch["signal"], self.generations)
        self._fresh = self._packed(batch, live, step)
        alike = [one for one in self.kept if one.columns == tuple(sorted(batch))]
        place = f"{place}/{self.accelerator.process_index}"
        alpha = self.config.adora_rollouts.replay_alpha
        numbers = replayed([one.size for one in alike], alpha, live.count(False), place)
        taken = [alike[number] for number in numbers]
        generation.batch = self._refilled(batch, live, taken)
        self._log(len(live), [step - one.step for one in taken])

    def after_weighing(self, generation: Generation) -> None:
        """Keep this generation's own groups for later, as far as they are learned from."""
        for group, advantages in enumerate(torch.split(generation.batch["advantages"].abs(), self.generations)):
            size = float((advantages if advantages.dim() == 1 else advantages.amax(dim=1)).sum())
            if group in self._fresh and size:
                self.kept.append(replace(self._fresh[group], size=size))
        self.kept, self._fresh = self.kept[-self.capacity :], {}

    def _packed(self, batch: Batch, live: list[bool], step: int) -> dict[int, Kept]:
        split, size, found = batch_rows.split_images(batch), self.generations, {}
        for group in [number for number, alive in enumerate(live) if alive][-self.capacity :]:
            rows = range(group * size, (group + 1) * size)
            packed = batch_rows.pack_rows(batch_rows.without_padding(batch_rows.take_rows(split, rows)), self.banks)
            packed["rollout_number"].fill_(-1)  # the record of a later step has none
            found[group] = Kept(packed, tuple(sorted(batch)), 0.0, step)
        return found

    def _refilled(self, batch: Batch, live: list[bool], taken: list[Kept]) -> Batch:
        if not taken:
            return batch
        device = batch["prompt_ids"].device
        parts = [batch_rows.unpack_rows(one.packed, self.banks, device) for one in taken]
        further = reduce(lambda one, other: batch_rows.concat_rows(one, other, self.pad_id), parts)
        dead = [group for group, alive in enumerate(live) if not alive]
        pairs = list(zip(dead, range(len(taken)), strict=False))
        return batch_rows.replace_groups(batch, further, pairs, self.generations, self.pad_id)

    def _log(self, groups: int, ages: list[int]) -> None:
        """Also tells every rank whether any has new images: all must take part in the same vision passes."""
        own = torch.tensor([[len(ages), sum(ages), groups]], device=self.accelerator.device)
        replayed, age, all_groups = self.accelerator.gather(own).sum(dim=0).tolist()
        if replayed:
            self.banks.more()
            self.log("adora/replay_age", age / replayed)
        self.log("adora/replayed_groups", replayed / all_groups)

    def save(self, folder: Path) -> None:
        """Write the kept groups of this rank into a checkpoint."""
        if self.kept:
            save_of_rank(folder, FILES, self.accelerator.process_index, [dict(vars(one)) for one in self.kept])

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote; nothing where it wrote nothing, as for a rank that the earlier run did not have."""
        own: list[dict[str, Any]] = load_of_rank(checkpoint, FILES, self.accelerator.process_index) or []
        renamed = [{"packed" if key == "parcel" else key: one[key] for key in one} for one in own]  # as it was called
        self.kept = [Kept(**one) for one in renamed][-self.capacity :]
