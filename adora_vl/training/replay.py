"""Selective sample replay over steps: earlier groups take the places of groups that teach nothing.

Source: SSR of VL-Rethinker (arXiv 2504.08837) and its repository (TIGER-AI-Lab/VL-Rethinker,
`openrlhf/trainer/ppo_utils/replay_buffer.py`). Groups without signal give their places to groups of
earlier generations, which are drawn with a chance that grows with their advantages. Those keep the
log-probabilities of the policy that sampled them, so the loss corrects for the updates since. They
are weighed anew, with those beside them.

The repository keeps single rollouts, as many as half a generation; ours keeps whole groups, whose
rollouts share one pass over their prompt and image. The repository also draws the rollouts of the
present generation anew by their |advantages|, adds up to a tenth that are right throughout their
group, and halves the batch; ours does none of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.training.batch_rows import chosen_groups, concat_rows, to_cpu, without_padding
from adora_vl.training.micro_batches import live_units
from adora_vl.training.policies import exchanges, replayed
from adora_vl.training.pool_state import KeptGroup
from adora_vl.types import Batch, Row, StepContext

# The columns of rollouts, without what was made of them since.
Columns = Callable[[Sequence[RolloutGroup]], Batch]


class Replay:
    """Which groups are kept, and how they come again. All ranks call every method together."""

    def __init__(
        self, context: StepContext, columns: Columns, more_images: Callable[[], object]
    ) -> None:
        """`columns`: of groups with their rows.

        `more_images`: told that some rank is about to add some.
        """
        config = context.config
        self.accelerator = context.accelerator
        self.log = context.log
        self.pad_id = context.pad_id
        self.columns = columns
        self.more_images = more_images
        self.capacity = config.adora_rollouts.replay
        self.alpha = config.adora_rollouts.replay_alpha
        self.generations = config.num_generations
        self.seed = config.seed

    def fresh(
        self, batch: Batch, groups: Sequence[RolloutGroup], step: int
    ) -> dict[int, KeptGroup]:
        """Those with signal, by their places."""
        live = live_units(batch["signal"], self.generations)
        size = self.generations
        width = batch["completion_ids"].size(1)
        found = {}
        for place in [number for number, alive in enumerate(live) if alive][-self.capacity :]:
            rows = slice(place * size, (place + 1) * size)
            length = max(1, *(len(rollout.tokens) for rollout in groups[place].rollouts))
            own = {
                name: value[rows]
                for name, value in dict[str, Any](batch).items()
                if _is_made(name, value)
            }
            own = {
                name: value[:, :length] if _is_wide(name, value, width) else value
                for name, value in own.items()
            }
            own["rollout_number"] = torch.full_like(
                own["rollout_number"], -1
            )  # the record of a later step has none
            found[place] = KeptGroup(replace(groups[place], row=Row()), to_cpu(own), 0.0, step)
        return found

    def again(
        self,
        batch: Batch,
        kept: Sequence[KeptGroup],
        rows: Callable[[list[int]], list[Any]],
        step: int,
        key: str,
    ) -> Batch:
        """The batch with groups without signal replaced as far as there are earlier ones.

        `rows`: of the data set, by their numbers. Where the run stands (`key`) seeds the choice, so
        that a resumed run draws the same groups.
        """
        live = live_units(batch["signal"], self.generations)
        place = f"{self.seed}/{key}/{self.accelerator.process_index}"
        names = {name for name, value in batch.items() if _is_made(name, value)}
        kept = [one for one in kept if {*one.columns} == names]
        numbers = replayed([one.size for one in kept], self.alpha, live.count(False), place)
        taken = [kept[number] for number in numbers]
        found = rows([one.group.problem.number for one in taken])
        parts = [self._restored(one, row, batch) for one, row in zip(taken, found, strict=True)]
        if parts:
            further = reduce(lambda one, other: concat_rows(one, other, self.pad_id), parts)
            chosen = list(range(len(live)))
            for dead, earlier in exchanges(live, [True] * len(parts)):
                chosen[dead] = len(live) + earlier
            batch = chosen_groups(batch, further, chosen, self.generations, self.pad_id)
        self._log(len(live), [step - one.step for one in taken])
        return batch

    def kept(
        self, kept: Sequence[KeptGroup], fresh: dict[int, KeptGroup], advantages: Tensor
    ) -> tuple[KeptGroup, ...]:
        """With this generation's own groups, as far as they are learned from.

        `advantages`: (B,) or (B, C).
        """
        sized = []
        for place, own in enumerate(torch.split(advantages.abs(), self.generations)):
            size = float((own if own.dim() == 1 else own.amax(dim=1)).sum())
            if place in fresh and size:
                sized.append(replace(fresh[place], size=size))
        return (*kept, *sized)[-self.capacity :]

    def _restored(self, one: KeptGroup, row: Any, batch: Batch) -> Batch:
        columns = without_padding(dict(self.columns([replace(one.group, row=row)])))
        return cast("Batch", {**columns, **send_to_device(one.columns, batch["prompt_ids"].device)})

    def _log(self, groups: int, ages: list[int]) -> None:
        """Also tells every rank whether any has new images: all must take part in the same vision
        passes.
        """
        own = torch.tensor([[len(ages), sum(ages), groups]], device=self.accelerator.device)
        replayed_, age, all_groups = self.accelerator.gather(own).sum(dim=0).tolist()
        if replayed_:
            self.more_images()
            self.log("adora/replay_age", age / replayed_)
        self.log("adora/replayed_groups", replayed_ / all_groups)


_REMADE = (
    "pixel_values",
    "image_grid_thw",
    "mm_token_type_ids",
    "token_type_ids",
    "sampling_per_token_logps",
)


def _is_made(name: str, value: Any) -> bool:
    """Whether a column is kept: what is known from the problem and the tokens is made again."""
    remade = name in _REMADE or name.startswith(("prompt_", "completion_"))
    return isinstance(value, Tensor) and value.dim() > 0 and not remade


def _is_wide(name: str, value: Tensor, width: int) -> bool:
    return name != "grades" and value.shape[1:] == (width,)
