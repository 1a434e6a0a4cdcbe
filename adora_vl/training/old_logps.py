"""Says which rollouts of a generation need a pass for their old log-probabilities.

These are of the policy that has sampled. The loss compares the policy with them, and the engine is
compared with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from adora_vl.config.batch_plan import BatchLayout, regroup_obstacle, regroups
from adora_vl.training.batch_rows import RowReader
from adora_vl.training.micro_batches import signal_of_units
from adora_vl.types import Batch, StepContext


@dataclass(frozen=True, kw_only=True)
class OldPass:
    """A pass that gives some rows of a micro-batch their old log-probabilities."""

    micro: Batch  # of B rows, from which the policy learns later
    rows: list[int]  # those that are scored, in ascending order

    def part(self) -> Batch:
        """Return the rows that are scored as a batch of their own, or the whole micro-batch."""
        if len(self.rows) == len(self.micro["completion_ids"]):
            return self.micro
        part = RowReader(self.micro).take(self.rows)
        if "host_rows" in self.micro:
            part["host_rows"] = self.micro["host_rows"].select(self.rows)
        return part

    def store(self, part: Batch) -> None:
        """Put what the pass found out about `part` into the micro-batch."""
        if part is self.micro:
            return
        for name in ("old_per_token_logps", "importance_sampling_ratio"):
            if name in part:
                scored = cast("Tensor", part.get(name))
                column = cast("Tensor", self.micro.get(name)).to(scored.dtype)
                column[self.rows] = scored
                self.micro[name] = column


class OldLogps:
    """Decides where the old log-probabilities of each micro-batch come from.

    Until the first update after sampling, the policy's own pass has them, and TRL takes them from
    there. Later micro-batches need a pass of their own, before that update changes the weights.
    Stock TRL makes this pass over the whole generation whenever vLLM samples. With
    `adora_rollouts.old_logps: engine` the engine's are taken for them and there is no pass.
    """

    def __init__(self, context: StepContext, *, has_dropout: bool) -> None:
        """Build the object.

        `has_dropout`: whether the policy's own pass has dropout, which the old log-probabilities
        have not.
        """
        config = context.config
        self.accelerator = context.accelerator
        self.config = config
        self.layout = BatchLayout.of(config)
        self.has_dropout = has_dropout
        self.are_engines = config.adora_rollouts.old_logps == "engine"
        self.corrects_engine = config.use_vllm and config.vllm_importance_sampling_correction
        # With an advantage of 0 the clipped loss is 0 whatever the ratio of new to old policy, and
        # so is its gradient. Only TRL's corrected KL term multiplies by that ratio too.
        corrects_kl = config.beta != 0.0 and config.use_bias_correction_kl
        self._scores_signal_alone = config.uses("skip_zero_signal") and not corrects_kl
        self._is_cut_here = regroups(config) and not regroup_obstacle(config)

    @property
    def needs_pass_over_generation(self) -> bool:
        """Whether a pass over the whole generation is made before anything is graded.

        That is stock TRL's way. It is also ours where TRL cuts the generation into micro-batches,
        since a pass for some of them alone could not be made then.
        """
        if self.are_engines:
            return False
        if not self.config.uses("skip_old_pass"):
            return True
        if self._is_cut_here:
            return False
        # With one optimizer step the pass that learns has them, but for the noise of dropout.
        return self.has_dropout or not self.layout.has_one_step

    def due(self, micro_batches: Sequence[Batch]) -> list[OldPass]:
        """Return the passes that a generation's micro-batches need before they are learned from.

        They are equally many on all ranks. Collective.
        """
        if self.are_engines or self.needs_pass_over_generation:
            return []
        first = self.layout.micro_batches_before_update
        # The policy's own pass has the noise of dropout, which is to be neither in the ratio to the
        # engine nor in what further passes over the generation are compared with.
        if self.has_dropout and (self.corrects_engine or self.layout.num_iterations > 1):
            first = 0
        # A micro-batch is empty on all ranks alike.
        later = [micro for micro in micro_batches[first:] if micro]
        if not self._scores_signal_alone:
            return [OldPass(micro=micro, rows=_all_rows(micro)) for micro in later]
        return self._passes_over_signal(later)

    def _passes_over_signal(self, micro_batches: Sequence[Batch]) -> list[OldPass]:
        """Return passes over the groups with signal, where any rank has one. Collective."""
        rows_per_unit = self.layout.rows_per_unit
        if not micro_batches:
            return []
        has_signal = [
            signal_of_units(micro["advantages"], rows_per_unit) for micro in micro_batches
        ]
        # With sharded weights every pass is collective, so all ranks make one or none does.
        here_M = torch.stack([units_U.any() for units_U in has_signal])
        is_due = self.accelerator.gather(here_M[None]).any(dim=0).tolist()
        # All micro-batches together, for which the host waits once.
        on_host = torch.cat(has_signal).cpu()
        host_parts = torch.split(on_host, [len(units_U) for units_U in has_signal])
        passes = []
        for micro, units_U, pass_is_due in zip(micro_batches, host_parts, is_due, strict=True):
            self._leave_out(micro)
            if not pass_is_due:
                continue
            # A rank without signal takes part with its first unit.
            chosen_units = units_U.nonzero().flatten().tolist() or [0]
            rows = [
                number * rows_per_unit + row
                for number in chosen_units
                for row in range(rows_per_unit)
            ]
            passes.append(OldPass(micro=micro, rows=rows))
        return passes

    def are_of_this_pass(self, micro_step: int) -> bool:
        """Whether the loss takes the old log-probabilities from the pass that it learns from.

        The weights have not changed since sampling then, so the ratio of new to old policy is 1.
        With dropout it would not be 1 to a pass without.

        `micro_step`: micro-batches of the generation that were learned from before this one.
        """
        if self.are_engines or micro_step >= self.layout.micro_batches_before_update:
            return False
        return self.has_dropout or self.config.uses("skip_old_pass")

    def compares_engine(self, micro_step: int) -> bool:
        """Whether the pass that learns from a micro-batch measures how far the engine is from it.

        Later weights than those that have sampled would be as far as they have learned.

        `micro_step`: as in `are_of_this_pass`.
        """
        has_sampled = micro_step < self.layout.micro_batches_before_update
        return self.corrects_engine or (self.are_engines and has_sampled)

    def for_loss(self, micro: Batch, micro_step: int) -> None:
        """Put the old log-probabilities into a micro-batch, or take them out for those of the pass.

        `micro`: a copy of the micro-batch, for this one loss.
        """
        if self.are_engines:
            logps_BC = micro["sampling_per_token_logps"]
            # The engine was not asked for the tokens of tools, from which nothing is learned.
            micro["old_per_token_logps"] = torch.where(logps_BC.isnan(), 0.0, logps_BC)
        elif self.are_of_this_pass(micro_step):
            micro.pop("old_per_token_logps", None)

    def _leave_out(self, micro: Batch) -> None:
        """Say of all rows of a micro-batch that no pass scores them, until one has.

        Their old log-probabilities are NaN, which `fill` replaces before the loss. The ratio to the
        engine is 1, so that nobody computes it from weights that have not sampled the rows.
        """
        mask_BC = micro["completion_mask"]
        micro["old_per_token_logps"] = torch.full(
            mask_BC.shape, torch.nan, dtype=torch.float32, device=mask_BC.device
        )
        if self.corrects_engine:
            is_per_token = self.config.vllm_importance_sampling_mode.startswith("token")
            tokens = mask_BC.size(1) if is_per_token else 1
            micro["importance_sampling_ratio"] = torch.ones(
                len(mask_BC), tokens, device=mask_BC.device
            )

    def fill(self, micro: Batch, logps_BC: Tensor) -> None:
        """Give rows without old log-probabilities those of the pass that they are learned from.

        Their ratio of new to old policy is 1 then. Their advantage is 0, so it does not matter.

        Args:
            micro: a copy of the micro-batch, for this one loss.
            logps_BC: the policy's log-probabilities, detached.
        """
        old_BC = micro.get("old_per_token_logps")
        if old_BC is not None:
            micro["old_per_token_logps"] = torch.where(old_BC.isnan(), logps_BC, old_BC)

    def keep(self, micro_batch: Batch, micro: Batch, logps_BC: Tensor, micro_step: int) -> None:
        """Keep what a pass before the first update gives, for later passes over its generation.

        Args:
            micro_batch: it is learned from again.
            micro: its copy for this loss, with the ratio to the engine.
            logps_BC: the policy's log-probabilities, detached.
            micro_step: as in `are_of_this_pass`.
        """
        if self.layout.num_iterations == 1 or not self.are_of_this_pass(micro_step):
            return
        # With dropout they are there already, from a pass without.
        micro_batch.setdefault("old_per_token_logps", logps_BC)
        if "importance_sampling_ratio" in micro:
            micro_batch.setdefault("importance_sampling_ratio", micro["importance_sampling_ratio"])


def _all_rows(micro: Batch) -> list[int]:
    """Return the numbers of all rows of a micro-batch."""
    return list(range(len(micro["completion_ids"])))
