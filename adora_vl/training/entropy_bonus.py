"""The entropy bonus, in which a token weighs the same whichever rows share its micro-batch."""

from torch import Tensor

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.losses import has_entropy_bonus
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.types import Batch, loss_mask


class EntropyBonus:
    """What TRL's bonus lacks to be the mean entropy over the tokens of an optimizer step.

    TRL takes the mean over the tokens of each micro-batch, and then the mean of those. A token of a
    short answer that fills a micro-batch alone would weigh many times as much as one of a long
    answer, and with half of a generation the micro-batches that are left out would count as 0.
    """

    def __init__(self, config: AdoraGRPOConfig, batcher: MicroBatcher) -> None:
        self.is_on = has_entropy_bonus(config)
        self.chosen_BC: Tensor | None = None  # the tokens of the last pass that the bonus acts on
        self._batcher = batcher
        self._share = config.top_entropy_quantile  # of the tokens, those with the highest entropy

    def missing(
        self, micro: Batch, entropies_BC: Tensor, coefficient: float, micro_batches_per_step: int
    ) -> Tensor:
        """What is to be added to the loss of a micro-batch, scaled already, (), with gradients.

        `coefficient`: TRL's, in this step. `micro_batches_per_step`: micro-batches of the optimizer step, by
        which TRL divides.
        """
        mask_BC = loss_mask(micro)
        if self.chosen_BC is not None:
            mask_BC = mask_BC * self.chosen_BC
        token_count = mask_BC.sum()
        mean_entropy = (entropies_BC * mask_BC).sum() / token_count.clamp(min=1)
        deserved_weight = self._batcher.share_of_tokens(micro, token_count) / self._share
        missing_weight = deserved_weight - self._batcher.weight(micro)
        missing_bonus: Tensor = (
            -coefficient / micro_batches_per_step * missing_weight * mean_entropy
        )
        return missing_bonus
