"""Decides where the old log-probabilities of rollouts come from.

The policy that has sampled the rollouts is the old policy. TRL's clipped loss takes the ratio of
the new policy's probabilities to the old ones. The engine's log-probabilities are compared with the
old ones too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from adora_vl.config.batch_plan import regroups_micro_batches
from adora_vl.training.batch_rows import RowReader, rows_of_groups
from adora_vl.training.micro_batches import signal_of_subgroups
from adora_vl.types import Batch, StepContext


@dataclass(frozen=True, kw_only=True)
class OldPass:
    """A pass without gradients over some rows of a micro-batch, for their old log-probabilities."""

    micro_batch: Batch
    """The micro-batch, of B rows, from which the policy learns later."""
    rows: list[int]
    """The numbers of the rows that need the pass, in ascending order."""

    def rows_as_batch(self) -> Batch:
        """Return a batch of the rows that need the pass; the micro-batch itself if all do."""
        if len(self.rows) == len(self.micro_batch["completion_ids"]):
            return self.micro_batch
        batch = RowReader(self.micro_batch).take(self.rows)
        if "rows_on_cpu" in self.micro_batch:
            batch["rows_on_cpu"] = self.micro_batch["rows_on_cpu"].select(self.rows)
        return batch

    def store(self, computed: Batch) -> None:
        """Copy what the pass has computed into the rows of the micro-batch.

        For example, a pass over the rows 2 and 3 of a micro-batch of 4 replaces these two rows of
        its columns.

        `computed`: the result of `rows_as_batch`, to which the old log-probabilities were added,
        and also the importance ratios to the engine if they correct the loss.
        """
        if computed is self.micro_batch:
            return  # all rows needed the pass, so its columns are those of the micro-batch
        for name in ("old_per_token_logps", "importance_sampling_ratio"):
            if name in computed:
                values = cast("Tensor", computed.get(name))
                column = cast("Tensor", self.micro_batch.get(name)).to(values.dtype)
                column[self.rows] = values
                self.micro_batch[name] = column


class OldLogps:
    """Decides where the old log-probabilities of each micro-batch come from.

    The training pass is the forward pass whose loss is backpropagated. Before the first optimizer
    step on a generation the weights are still those that have sampled it, so the training pass also
    gives the old log-probabilities. Micro-batches of later optimizer steps need a pass of their own
    before the weights change. Stock TRL makes this pass over the whole generation whenever vLLM
    samples. With `adora_rollouts.old_logps: engine` the engine's log-probabilities are used and
    there is no pass. `corrects_engine` says whether the loss is corrected by the ratio of policy
    to engine. A micro-batch has B rollouts of C tokens.
    """

    def __init__(self, context: StepContext, *, has_dropout: bool) -> None:
        """Build the object.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            has_dropout: whether the training pass has dropout. Old log-probabilities
                must be without.
        """
        config = context.config
        self.accelerator = context.accelerator
        self.config = config
        self.layout = context.layout
        self.has_dropout = has_dropout
        # Whether the engine's log-probabilities are taken for the old ones.
        self.uses_engine_logps = config.adora_rollouts.old_logps == "engine"
        # Whether the loss is corrected by the importance ratio of the policy to the engine.
        self.corrects_engine = config.use_vllm and config.vllm_importance_sampling_correction
        # With an advantage of 0 the clipped loss and its gradient are 0, whatever the ratio of the
        # new policy to the old one. So the old log-probabilities are not needed there, unless TRL's
        # corrected KL term multiplies by that ratio too.
        corrects_kl = config.beta != 0.0 and config.use_bias_correction_kl
        self._skips_groups_without_signal = config.uses("skip_zero_signal") and not corrects_kl

    @property
    def loss_needs_old_logps(self) -> bool:
        """Whether the loss needs old log-probabilities in stock TRL.

        It needs them if the ratio to the engine corrects it, or if the weights change while a
        generation is learned from.
        """
        return self.corrects_engine or not self.layout.generation_has_one_step

    @property
    def needs_pass_over_generation(self) -> bool:
        """Whether a pass over the whole generation is made, before its rollouts are graded."""
        if self.uses_engine_logps or not self.loss_needs_old_logps:
            return False
        # Without this optimisation everything is as in stock TRL.
        if not self.config.uses("skip_old_pass"):
            return True
        # `passes_to_make` has passes over micro-batches instead, where they are this package's and
        # not TRL's.
        if regroups_micro_batches(self.config):
            return False
        # With one optimizer step the training pass gives them, unless it has dropout.
        return not self.layout.generation_has_one_step or self.has_dropout

    def passes_to_make(self, micro_batches: Sequence[Batch]) -> list[OldPass]:
        """Return the passes to make over a generation before its first optimizer step. Collective.

        They compute the old log-probabilities of its later micro-batches. Those of the first
        optimizer step need none: their training pass gives the old log-probabilities. For example,
        of 4 micro-batches in two optimizer steps, the last two need a pass. All ranks make equally
        many.

        Args:
            micro_batches: the micro-batches of the generation in the training order. Some are
                empty, on all ranks alike.
        """
        if self.uses_engine_logps or self.needs_pass_over_generation:
            return []
        first_with_pass = self.layout.micro_batches_before_update
        # With dropout the training pass is noisy, and its log-probabilities cannot be compared with
        # the engine's or with those of later iterations. Then all micro-batches get a pass without
        # dropout.
        compares_logps = self.corrects_engine or self.layout.num_iterations > 1
        if self.has_dropout and compares_logps:
            first_with_pass = 0
        micro_batches_with_pass = [
            micro_batch for micro_batch in micro_batches[first_with_pass:] if micro_batch
        ]
        if self._skips_groups_without_signal:
            return self._passes_over_signal(micro_batches_with_pass)
        return [
            OldPass(micro_batch=micro_batch, rows=list(range(len(micro_batch["completion_ids"]))))
            for micro_batch in micro_batches_with_pass
        ]

    def _passes_over_signal(self, micro_batches: Sequence[Batch]) -> list[OldPass]:
        """Return passes over the subgroups with signal, whose advantages are not all 0. Collective.

        A subgroup is a group of rollouts, or the part of a group that one micro-batch has. If a
        micro-batch has a subgroup with signal on any rank, it gets a pass on all ranks. The old
        log-probabilities of all rows become NaN here, and the passes later fill in those of the
        subgroups with signal. For example, with two rows per subgroup, a micro-batch of 3
        subgroups, of which only subgroup 1 has signal, gets a pass over the rows 2 and 3.
        """
        if not micro_batches:
            return []
        rows_per_subgroup = self.layout.rows_per_subgroup
        # For each of the M micro-batches, which of its U subgroups have signal.
        has_signal_by_micro_batch = [
            signal_of_subgroups(micro_batch["advantages"], rows_per_subgroup)
            for micro_batch in micro_batches
        ]
        has_signal_M = torch.stack(
            [has_signal_U.any() for has_signal_U in has_signal_by_micro_batch]
        )
        # With sharded weights every pass is collective, so all ranks make one or none does.
        needs_pass_M = self.accelerator.gather(has_signal_M[None]).any(dim=0).tolist()
        # One copy for all micro-batches, so that the CPU waits for the GPU once.
        subgroup_counts = [len(has_signal_U) for has_signal_U in has_signal_by_micro_batch]
        copies_on_cpu = torch.split(torch.cat(has_signal_by_micro_batch).cpu(), subgroup_counts)
        passes = []
        for micro_batch, has_signal_U, needs_pass in zip(
            micro_batches, copies_on_cpu, needs_pass_M, strict=True
        ):
            self._mark_as_missing(micro_batch)
            if not needs_pass:
                continue
            subgroups_with_signal = has_signal_U.nonzero().flatten().tolist()
            # A rank without signal takes part with its first subgroup.
            subgroups = subgroups_with_signal or [0]
            rows = rows_of_groups(subgroups, rows_per_subgroup)
            passes.append(OldPass(micro_batch=micro_batch, rows=rows))
        return passes

    def come_from_training_pass(self, micro_step: int) -> bool:
        """Return whether the training pass of a micro-batch gives its old log-probabilities.

        It does before the first optimizer step on the generation, when the new policy is still the
        old one. The ratio of the two is then exactly 1, even where the pass has dropout.

        `micro_step`: how many micro-batches of the generation were learned from before this one.
        """
        is_before_update = micro_step < self.layout.micro_batches_before_update
        if self.uses_engine_logps or not is_before_update:
            return False
        # Without `skip_old_pass` stock TRL makes a pass over the generation, and its results are
        # used. That pass has no dropout. If the training pass has, the two would differ, and their
        # ratio would not be 1. So the training pass then gives its own.
        return self.has_dropout or self.config.uses("skip_old_pass")

    def compares_engine(self, micro_step: int) -> bool:
        """Return whether the pass over this micro-batch is compared with the engine.

        Where the engine's log-probabilities are used as the old ones, it is compared only before
        the first optimizer step on the generation. Later the policy has learned, and differs
        from the engine for that reason.

        `micro_step`: how many micro-batches of the generation were learned from before this one.
        """
        if self.corrects_engine:
            return True  # the loss needs the ratio to the engine
        is_before_update = micro_step < self.layout.micro_batches_before_update
        return self.uses_engine_logps and is_before_update

    def set_or_remove_column(self, micro_batch: Batch, micro_step: int) -> None:
        """Give a micro-batch the column `old_per_token_logps` that its loss takes, or none.

        The cases, in the order of the code:

        - `adora_rollouts.old_logps: engine`: the column has the engine's log-probabilities.
        - Before the first update: the column is removed. TRL then takes those of the pass itself.
        - Else the column stays as an earlier pass has filled it.

        Args:
            micro_batch: a copy of the micro-batch, for this one loss.
            micro_step: how many micro-batches of the generation were learned from before this one.
        """
        if self.uses_engine_logps:
            logps_BC = micro_batch["sampling_per_token_logps"]
            # NaN stands at the tokens of tools, which the engine has not sampled. The loss masks
            # these tokens, but NaN times a mask of 0 is still NaN.
            micro_batch["old_per_token_logps"] = torch.where(logps_BC.isnan(), 0.0, logps_BC)
        elif self.come_from_training_pass(micro_step):
            micro_batch.pop("old_per_token_logps", None)

    def _mark_as_missing(self, micro_batch: Batch) -> None:
        """Mark the old log-probabilities of all rows as missing, until a pass computes some.

        They are set to NaN, which `fill_missing` replaces before the loss. The ratio to the engine
        is set to 1, so that no later pass computes it: by then the weights have changed.
        """
        mask_BC = micro_batch["completion_mask"]
        micro_batch["old_per_token_logps"] = torch.full(
            mask_BC.shape, torch.nan, dtype=torch.float32, device=mask_BC.device
        )
        if self.corrects_engine:
            is_per_token = self.config.vllm_importance_sampling_mode.startswith("token")
            # One ratio for each token, or one for each sequence.
            ratios_per_rollout = mask_BC.size(1) if is_per_token else 1
            micro_batch["importance_sampling_ratio"] = torch.ones(
                len(mask_BC), ratios_per_rollout, device=mask_BC.device
            )

    def fill_missing(self, micro_batch: Batch, logps_BC: Tensor) -> None:
        """Replace old log-probabilities that no pass has computed, NaN, by the present ones.

        These rows have advantages of 0, so it does not matter that the ratio of the new policy to
        the old one becomes 1. For example, [-0.5, NaN] with present values [-0.4, -0.2] becomes
        [-0.5, -0.2].

        Args:
            micro_batch: a copy of the micro-batch, for this one loss.
            logps_BC: the policy's log-probabilities in the pass of this loss, detached.
        """
        old_logps_BC = micro_batch.get("old_per_token_logps")
        if old_logps_BC is not None:
            micro_batch["old_per_token_logps"] = torch.where(
                old_logps_BC.isnan(), logps_BC, old_logps_BC
            )

    def keep_for_next_iteration(
        self, stored_micro_batch: Batch, loss_micro_batch: Batch, logps_BC: Tensor, micro_step: int
    ) -> None:
        """Store the log-probabilities of the first pass over a micro-batch as its old ones.

        With `num_iterations` above 1 the same micro-batch is learned from again, after the weights
        have changed. Nothing is stored with one iteration, nor in a later pass, nor where the old
        log-probabilities are the engine's.

        Args:
            stored_micro_batch: the micro-batch of the generation, which the next iteration reads.
            loss_micro_batch: the copy of the micro-batch for this loss alone. It has the importance
                ratio to the engine, if the loss is corrected by it.
            logps_BC: the policy's log-probabilities in the pass of this loss, detached.
            micro_step: how many micro-batches of the generation were learned from before this one.
        """
        if self.layout.num_iterations == 1 or not self.come_from_training_pass(micro_step):
            return
        # With dropout an earlier pass without dropout may have stored log-probabilities. Later
        # iterations use those, so `setdefault` keeps them.
        stored_micro_batch.setdefault("old_per_token_logps", logps_BC)
        ratio = loss_micro_batch.get("importance_sampling_ratio")
        if ratio is not None:
            stored_micro_batch.setdefault("importance_sampling_ratio", ratio)
