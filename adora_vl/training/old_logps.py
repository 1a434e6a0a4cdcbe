"""Says which rollouts of a generation need a pass for their old log-probabilities.

These are of the policy that has sampled. The loss compares the policy with them, and the engine is
compared with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adora_vl.config.batch_plan import BatchLayout, regroup_obstacle, regroups
from adora_vl.types import Batch, StepContext


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
        self.config = config
        self.layout = BatchLayout.of(config)
        self.has_dropout = has_dropout
        self.are_engines = config.adora_rollouts.old_logps == "engine"
        self.corrects_engine = config.use_vllm and config.vllm_importance_sampling_correction
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

    def due(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Return those of a generation's micro-batches that need a pass before they are learned from.

        They are equally many on all ranks, since a micro-batch is empty on all ranks alike.
        """
        if self.are_engines or self.needs_pass_over_generation:
            return []
        first = self.layout.micro_batches_before_update
        # The policy's own pass has the noise of dropout, which is to be neither in the ratio to the
        # engine nor in what further passes over the generation are compared with.
        if self.has_dropout and (self.corrects_engine or self.layout.num_iterations > 1):
            first = 0
        return [micro for micro in micro_batches[first:] if micro]

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
