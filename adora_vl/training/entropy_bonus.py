"""The entropy bonus, in which a token weighs the same whichever rows share its micro-batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.losses import has_entropy_bonus
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.types import Batch, loss_mask


class TRLBonus(NamedTuple):
    """The entropy bonus that TRL adds to the loss of a micro-batch: a mean over its tokens."""

    coefficient: float
    micro_batches_per_step: int  # by which TRL divides the bonus and the loss


class EntropyBonus:
    """Adds what TRL's bonus lacks to be the mean entropy over the tokens of an optimizer step.

    TRL takes the mean over the tokens of each micro-batch, and then the mean of these means. So a
    token in a short micro-batch weighs more than a token in a long one: of two micro-batches with
    10 and 90 tokens each counts one half, where the first should count 0.1 and the second 0.9.
    Micro-batches that are left out would count as 0. There are B rollouts of C tokens.
    """

    def __init__(self, config: AdoraGRPOConfig, batcher: MicroBatcher) -> None:
        self.is_on = has_entropy_bonus(config)
        # 1 at the tokens of the last pass that the bonus acts on; None for all tokens. The trainer
        # sets it where TRL learns from the tokens of the highest entropy alone.
        self.high_entropy_mask_BC: Tensor | None = None
        self._batcher = batcher
        self._is_adaptive = config.use_adaptive_entropy
        self._entropy_target = config.entropy_target
        # The share of the tokens that TRL learns from: those of the highest entropy; 1 for all.
        self._high_entropy_share = config.top_entropy_quantile

    def trl_bonus(
        self, coefficient: float, last_entropy: float, micro_batches_per_step: int
    ) -> TRLBonus:
        """Return the bonus that TRL adds to each loss of the present optimizer step.

        An adaptive bonus is 0 while the entropy is above its target.

        Args:
            coefficient: TRL's `entropy_coef`, which it changes at the end of a step.
            last_entropy: the entropy of the last step, over all ranks.
            micro_batches_per_step: micro-batches of the optimizer step, by which TRL divides.
        """
        is_above_target = last_entropy > self._entropy_target
        if self._is_adaptive and is_above_target:
            coefficient = 0.0
        return TRLBonus(float(coefficient), micro_batches_per_step)

    def missing_bonus(self, micro_batch: Batch, entropies_BC: Tensor, bonus: TRLBonus) -> Tensor:
        """Return what to add to the loss of a micro-batch to complete its entropy bonus, ().

        TRL's bonus is the mean entropy over the tokens of the micro-batch, weighed like the
        micro-batch's loss. It should be weighed by the number of these tokens, so that all
        micro-batches together give the mean over the tokens of the optimizer step. For example, if
        the micro-batch has the weight 1 and should have 1.5, the result is half of TRL's bonus. It
        has gradients.

        Args:
            micro_batch: the micro-batch.
            entropies_BC: the entropy of each token.
            bonus: the bonus that TRL has added in this step.
        """
        mask_BC = loss_mask(micro_batch)
        # TRL's bonus may act on the tokens of the highest entropy alone.
        if self.high_entropy_mask_BC is not None:
            mask_BC = mask_BC * self.high_entropy_mask_BC
        token_count = mask_BC.sum()
        mean_entropy = (entropies_BC * mask_BC).sum() / token_count.clamp(min=1)
        # The tokens of this micro-batch divided by the mean tokens of a micro-batch. That mean
        # counts all tokens. If TRL chooses some of them, dividing by their share makes both numbers
        # count chosen tokens.
        right_weight = (
            self._batcher.share_of_tokens(micro_batch, token_count) / self._high_entropy_share
        )
        # TRL's bonus is a part of the loss, which the trainer multiplies by `loss_weight`.
        missing_weight = right_weight - self._batcher.loss_weight(micro_batch)
        missing_bonus: Tensor = (
            -bonus.coefficient / bonus.micro_batches_per_step * missing_weight * mean_entropy
        )
        return missing_bonus

    def policy_loss_sums(
        self, micro_batch: Batch, loss: Tensor, entropies_BC: Tensor, bonus: TRLBonus
    ) -> Tensor:
        """Return the policy loss of a micro-batch times its tokens, and its tokens, (2,).

        Summed over the ranks, they give the policy loss per token for the log. TRL itself logs the
        mean of the ranks' losses, in which a rank with few tokens weighs as much as the others. For
        example, a policy loss of 0.5 over 10 tokens gives (5, 10).

        Args:
            micro_batch: the micro-batch.
            loss: TRL's loss, which has its bonus and is not weighed among the micro-batches yet.
            entropies_BC: the entropy of each token.
            bonus: the bonus that TRL has added in this step.
        """
        mask_BC = loss_mask(micro_batch)
        token_count = mask_BC.sum()
        mean_entropy = (entropies_BC * mask_BC).sum() / token_count.clamp(min=1)
        # TRL has subtracted its bonus, and divided the loss by the micro-batches of the step. Both
        # are undone, which leaves the loss of the policy.
        policy_loss = loss * bonus.micro_batches_per_step + bonus.coefficient * mean_entropy
        return torch.stack([policy_loss * token_count, token_count.to(loss.dtype)]).detach()
