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
    token in a short micro-batch weighs more than a token in a long one: of two micro-batches with 10
    and 90 tokens each counts one half, where the first should count 0.1 and the second 0.9.
    Micro-batches that are left out would count as 0.
    """

    def __init__(self, config: AdoraGRPOConfig, batcher: MicroBatcher) -> None:
        self.is_on = has_entropy_bonus(config)
        # 1 at the tokens of the last pass that the bonus acts on; None for all tokens. The trainer
        # sets it when TRL chooses the tokens of the highest entropy.
        self.chosen_BC: Tensor | None = None
        self._batcher = batcher
        self._is_adaptive = config.use_adaptive_entropy
        self._entropy_target = config.entropy_target
        self._chosen_share = config.top_entropy_quantile  # the share of tokens that TRL chooses

    def of_trl(
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

    def missing_bonus(self, micro: Batch, entropies_BC: Tensor, bonus: TRLBonus) -> Tensor:
        """Return what the loss of a micro-batch lacks of the entropy bonus, (), with gradients.

        TRL has added its bonus, the mean entropy over the tokens of the micro-batch, and it was
        weighed like the micro-batch's loss. It should be weighed by the number of these tokens, so
        that all micro-batches together give the mean over the tokens of the optimizer step.

        Args:
            micro: the micro-batch.
            entropies_BC: the entropy of each token.
            bonus: TRL's, in this step.
        """
        mask_BC = loss_mask(micro)
        # TRL's bonus may act on the tokens of the highest entropy alone.
        if self.chosen_BC is not None:
            mask_BC = mask_BC * self.chosen_BC
        token_count = mask_BC.sum()
        mean_entropy = (entropies_BC * mask_BC).sum() / token_count.clamp(min=1)
        # The tokens of this micro-batch divided by the mean tokens of a micro-batch. That mean counts
        # all tokens. If TRL chooses some of them, dividing by their share makes both numbers count
        # chosen tokens.
        weight_by_tokens = self._batcher.share_of_tokens(micro, token_count) / self._chosen_share
        missing_weight = weight_by_tokens - self._batcher.loss_weight(micro)
        missing_bonus: Tensor = (
            -bonus.coefficient / bonus.micro_batches_per_step * missing_weight * mean_entropy
        )
        return missing_bonus

    def policy_loss_sums(
        self, micro: Batch, loss: Tensor, entropies_BC: Tensor, bonus: TRLBonus
    ) -> Tensor:
        """Return TRL's policy loss of a micro-batch times its tokens, and its tokens, (2,).

        TRL logs the mean of the ranks' policy losses. Where each is a mean over the tokens of its
        rank, ranks with few tokens would weigh as much as the others. TRL has also divided it by
        the micro-batches of the step, over which the log takes the mean once more.

        Args:
            micro: the micro-batch.
            loss: TRL's loss, which has its bonus and is not weighed among the micro-batches yet.
            entropies_BC: the entropy of each token.
            bonus: TRL's, in this step.
        """
        mask_BC = loss_mask(micro)
        token_count = mask_BC.sum()
        mean_entropy = (entropies_BC * mask_BC).sum() / token_count.clamp(min=1)
        # TRL has subtracted its bonus, and divided the loss by the micro-batches of the step. Both
        # are undone, which leaves the loss of the policy.
        policy_loss = loss * bonus.micro_batches_per_step + bonus.coefficient * mean_entropy
        return torch.stack([policy_loss * token_count, token_count.to(loss.dtype)]).detach()
