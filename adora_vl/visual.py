"""Advantages per token, by how much each depends on the image. The mathematics is in `adora_vl.advantage.visual`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.advantage.visual import most_dependent, rollout_scale, visual_dependency
from adora_vl.batch import Batch, LogFigure, loss_mask
from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.log_probabilities import Pass, of_generation


class VisualDependency:
    """Weighs the tokens of a generation. All ranks call every method together."""

    def __init__(
        self,
        accelerator: Accelerator,
        images: DistinctImages,
        log: LogFigure,
        *,
        share: float,
        smallest: float,
        rows: int,
        has_dropout: bool = False,
    ) -> None:
        """`share`: of each rollout's tokens that are learned from. `smallest`: the smallest factor of an advantage.
        With both at 1 nothing is weighed. `rows`: rollouts per pass. `has_dropout`: whether the pass for the old
        log-probabilities has, so that it cannot be compared with another one.
        """
        self.accelerator, self.images, self.log = accelerator, images, log
        self.share, self.smallest, self.rows, self.has_dropout = share, smallest, rows, has_dropout
        self.active = share < 1 or smallest < 1

    def weigh(self, batch: Batch, live_B: Tensor, policy: Pass, place: str) -> None:
        """Put `token_weights` into a generation whose advantages are final.

        Args:
            batch: the generation.
            live_B: which rollouts are of groups with signal. Only these are compared with one another.
            policy: makes a pass of the policy, without dropout.
            place: where the run is, so that a resumed run blackens the same patches.
        """
        if not self.active:
            return
        mask_BC = loss_mask(batch)
        seen_BC = None if self.has_dropout else batch.get("old_per_token_logps")
        seen_BC = of_generation(batch, policy, self.rows) if seen_BC is None else seen_BC
        with self.images.half_black(batch, place) as pixels:
            blind_BC = of_generation(batch, policy, self.rows, pixels)
        dependency_BC = visual_dependency(seen_BC, blind_BC, mask_BC)
        tokens_B, shown_B = mask_BC.sum(dim=1), self._shown(batch)
        own_B = torch.where(shown_B & (tokens_B > 0), dependency_BC.sum(dim=1) / tokens_B, torch.nan)
        learned_BC = most_dependent(dependency_BC, mask_BC, self.share) | ~shown_B[:, None]
        compared_B = own_B.masked_fill(~live_B, torch.nan)
        scale_B = rollout_scale(compared_B, self.accelerator.gather(compared_B), self.smallest)
        batch["token_weights"] = learned_BC * mask_BC * scale_B[:, None]
        batch["visual_dependency"], batch["visual_scale"] = own_B, scale_B
        self._log(own_B, (learned_BC * mask_BC).sum(dim=1), tokens_B)

    @staticmethod
    def applied(micro: Batch) -> Batch:
        """The micro-batch with an advantage for each token, (B, C), if its tokens were weighed."""
        if "token_weights" not in micro:
            return micro
        return {**micro, "advantages": micro["advantages"][:, None] * micro["token_weights"]}

    def _shown(self, batch: Batch) -> Tensor:
        """Which rollouts have an image, bool, (B,)."""
        count = len(batch["prompt_ids"])
        images = batch.get("num_images") or [int("pixel_values" in batch)] * count
        return torch.tensor([number > 0 for number in images], device=batch["prompt_ids"].device)

    def _log(self, own_B: Tensor, learned_B: Tensor, tokens_B: Tensor) -> None:
        sums_B4 = torch.stack([torch.nan_to_num(own_B), (~own_B.isnan()).float(), learned_B, tokens_B], dim=1)
        dependency, known, learned, tokens = self.accelerator.gather(sums_B4).sum(dim=0).tolist()
        self.log("adora/visual_dependency", dependency / max(known, 1))
        self.log("adora/visual_tokens", learned / max(tokens, 1))
