"""What ends a run in order: an image that cannot be read, a ratio that explodes. Saved first, on all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from adora_vl.checkpoint.trainer import CheckpointedGRPOTrainer
from adora_vl.errors import RunError
from adora_vl.readable import unreadable_rows
from adora_vl.replaced import replaced


def largest_ratio(log_ratios_BC: Tensor, mask_BC: Tensor, level: str = "token") -> Tensor:
    """The largest importance ratio of a batch, (), float32; NaN where one is NaN. Never below 1, for a batch of none.

    `level`: `token`, or `sequence` for the ratio of a sequence's mean, as TRL's `importance_sampling_level`.
    """
    counted_BC = torch.where(mask_BC.bool(), log_ratios_BC.float(), 0.0)  # a padded place may hold anything
    if level == "sequence":
        counted_BC = counted_BC.sum(dim=1, keepdim=True) / mask_BC.sum(dim=1, keepdim=True).clamp(min=1)
    return counted_BC.max().clamp(min=0.0).exp()


class GuardedGRPOTrainer(CheckpointedGRPOTrainer):
    """As `CheckpointedGRPOTrainer`; faults of data and of ratios are seen on all ranks before they do harm."""

    exploded_ratio: float | None = None  # above `adora_max_ratio`, in this optimizer step

    def save_here(self) -> Path:
        """The checkpoint of the present step, written unless it is there already. All ranks call this together."""
        step = self.state.global_step
        if self._saved_at != step:
            self._save_checkpoint(self.model, None)
        # The first rank to raise ends the others, and one of them may still be writing.
        self.accelerator.wait_for_everyone()
        return Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def where_to_go_on(self) -> str:
        """For the end of a message: what a new start of the same command begins with."""
        if self._saved_at is not None:
            return f"the same command goes on from {PREFIX_CHECKPOINT_DIR}-{self._saved_at}"
        if self._began_at is not None:
            return f"the same command goes on from {self._began_at}"
        return "there is no checkpoint yet: the same command starts at the first step"

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Stock TRL meets an image that cannot be read in the data loader of one rank, and never says which row it
        was; ours finds it here, where a generation begins and so a checkpoint is exact, and all ranks stop together.
        """
        found = gather_object(unreadable_rows(inputs))
        if found:
            checkpoint = self.save_here()
            (row, reason), more = found[0], len({name for name, _ in found}) - 1
            raise RunError(
                f"step {self.state.global_step + 1}: row {row}: an image cannot be read: {reason}"
                f"{f' (and {more} more rows)' if more else ''}. Nothing of this step was applied. Repair or remove the "
                f"row, and go on with --resume_from_checkpoint {checkpoint}"
            )
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Stock TRL clips the ratio of new to old policy on one side only: with a negative advantage it multiplies the
        loss without limit. Ours logs the largest, and makes a loss with one above `adora_max_ratio` NaN: then every
        backend finds gradients that are not finite, on all ranks, and the step is skipped and counted as such a step.
        """
        old_BC, bound = inputs.get("old_per_token_logps"), self.args.adora_max_ratio
        if old_BC is None or not model.training:  # nothing was learned since sampling: every ratio is 1
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        seen: list[Tensor] = []
        original = self._get_per_token_logps_and_entropies

        def recording(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen.append(result[0].detach())
            return result

        with replaced(self, "_get_per_token_logps_and_entropies", recording):
            loss = super()._compute_loss(model, inputs)
        largest = largest_ratio(seen[0] - old_BC, inputs["completion_mask"], self.importance_sampling_level)
        everyone = self.accelerator.gather(largest[None])
        worst = everyone.max().item()  # NaN where one is NaN
        self.log_figure("adora/ratio_max", worst)
        if bound is None or worst <= bound:
            return loss
        self.exploded_ratio = worst
        return loss * torch.nan

    def log_figure(self, name: str, value: float) -> None:
        """One value of this step for the next log, which averages; the same on every rank."""
        self._metrics["train"][name].append(value)
