"""DARO bins prompts by pass rate and learns the weight of each bin together with the policy.

Source: arXiv 2510.09001. With L_mu the policy loss of a bin, divided by the number of tokens in
that bin, the loss is

    L = sum over mu in {1/G, ..., (G-1)/G} of  w_mu L_mu - ln w_mu.

The optimum of the weights is w_mu = 1 / L_mu, at which every difficulty contributes equally. Where
the paper leaves something open, we read it as follows:

- On freshly sampled rollouts the ratios are 1, and the surrogate loss of a bin has the value
  -sum A_i tokens_i / tokens of the bin. This is often negative, and then the objective has no
  minimum. The scale of a bin is therefore the magnitude of its terms,
  `sum |A_i| tokens_i / tokens of the bin` (`bin_loss="magnitude"`). With `bin_loss="surrogate"` it
  is the absolute value of the surrogate loss.
- w_mu = exp(v_mu) keeps the weights positive. A bin that does not occur in a batch keeps its weight
  and the moments of its optimizer.

Everything is computed from tensors that are gathered across ranks, in float64 on the CPU, so that
every rank has the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from adora_vl.advantage.groups import Groups
from adora_vl.advantage.method import Method, RunKeys, TrlKeys, option

if TYPE_CHECKING:
    from adora_vl.advantage.methods import AdvantagePipeline

# In place of the index of a bin, for prompts whose rollouts are all right or all wrong.
OUTSIDE_ALL_BINS = -1


def assign_bins(pass_rates: Tensor, group_size: int) -> Tensor:
    """Return the index of the bin of each of P prompts, by its pass rate: int64, (P,), 0 to G - 2.

    The index is the number of right rollouts minus one. Prompts without a right rollout, and
    prompts with only right ones, belong to no bin and get `OUTSIDE_ALL_BINS`. For example, with
    groups of 4, the pass rates 0, 0.25, 0.75, 1 get -1, 0, 2, -1. If some rollouts are unscored,
    the pass rate may lie between those of two bins. Then the prompt gets the nearer bin.
    """
    right_P = (pass_rates * group_size).round().long().clamp(1, group_size - 1)
    is_mixed_P = (pass_rates > 0) & (pass_rates < 1)
    return torch.where(is_mixed_P, right_P - 1, OUTSIDE_ALL_BINS)


def sum_by_bin(values_PG: Tensor, bins_P: Tensor, bin_count: int) -> Tensor:
    """Return the sum of the values in each of M bins of prompts: float64, (M,).

    For example, prompts with the values (1, 2), (3, 4), (5, 6) in the bins 0, 0, 2 give 10, 0, 11.

    Args:
        values_PG: a value for each of the G rollouts of P prompts.
        bins_P: the index of each prompt's bin. Values of prompts with `OUTSIDE_ALL_BINS` are left
            out.
        bin_count: M.
    """
    is_inside_P = bins_P != OUTSIDE_ALL_BINS
    prompt_sums_P = values_PG.to(torch.float64).sum(dim=1)
    zeros_M = torch.zeros(bin_count, dtype=torch.float64, device=values_PG.device)
    return zeros_M.index_add(0, bins_P[is_inside_P], prompt_sums_P[is_inside_P])


def losses_by_bin(
    advantages_PG: Tensor, tokens_PG: Tensor, bins_P: Tensor, bin_count: int, bin_loss: str
) -> Tensor:
    """Return the loss L_mu of each of M bins of prompts, 0 for an empty bin: float64, (M,).

    It is the sum of advantage times tokens over the rollouts of the bin, divided by their tokens.
    There are P prompts with G rollouts each. For example, a bin with the advantages 1, -1 and 30,
    10 tokens has 40 / 40 = 1 with `magnitude`, and 20 / 40 = 0.5 with `surrogate`.

    Args:
        advantages_PG: the advantages, normalised by group.
        tokens_PG: the number of tokens that the loss counts.
        bins_P: the index of each prompt's bin, from `assign_bins`.
        bin_count: the number of bins.
        bin_loss: DARO's option. `magnitude` sums the absolute advantages; `surrogate` sums the
            signed ones and takes the absolute value of the result.
    """
    summands_PG = advantages_PG.abs() if bin_loss == "magnitude" else advantages_PG
    sums_M = sum_by_bin(summands_PG.to(torch.float64) * tokens_PG, bins_P, bin_count)
    tokens_M = sum_by_bin(tokens_PG, bins_P, bin_count).clamp(min=1)  # an empty bin divides 0 by 1
    return sums_M.abs() / tokens_M


class DaroWeights:
    """The learnable weights w_mu of the bins of prompts, and their optimizer (Adam)."""

    def __init__(self, bin_count: int, learning_rate: float, min_loss: float = 1e-2) -> None:
        """Create the weights, all 1, and Adam for their logarithms.

        Args:
            bin_count: the number of bins.
            learning_rate: that of Adam.
            min_loss: a smaller loss of a bin counts as this one, so that no weight grows beyond
                1 / min_loss.
        """
        self.min_loss = min_loss
        # One parameter for each bin, so that Adam can skip those that a batch does not have.
        self.log_weights = [
            torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(bin_count)
        ]
        self.optimizer = torch.optim.Adam(self.log_weights, lr=learning_rate)

    @property
    def weights_M(self) -> Tensor:
        """The weights: positive, float64, (bin_count,)."""
        return torch.stack([log_weight.detach().exp() for log_weight in self.log_weights])

    def update(self, losses_M: Tensor, is_present_M: Tensor) -> None:
        """Update the weights by one optimizer step on `sum w_mu L_mu - ln w_mu`.

        Args:
            losses_M: the loss L_mu of each of the M bins.
            is_present_M: which bins occur in the batch, bool. The sum is over these bins alone, and
                the weights of the others stay as they are.
        """
        for log_weight, loss, is_present in zip(
            self.log_weights, losses_M.tolist(), is_present_M.tolist(), strict=True
        ):
            # Adam changes neither a parameter without a gradient nor its moments.
            log_weight.grad = None
            if is_present:
                # With v = ln w, exp(v) L - v has the derivative exp(v) L - 1 by v. At a loss near 0
                # the weight would grow without end, so a smaller loss than `min_loss` counts as it.
                log_weight.grad = log_weight.detach().exp() * max(loss, self.min_loss) - 1
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the weights and Adam's state as plain numbers, for the JSON of a checkpoint.

        `load` restores it exactly.
        """
        adam_states = []
        for log_weight in self.log_weights:
            # Adam has no state of a parameter before its first gradient.
            tensors = self.optimizer.state.get(log_weight, {})
            adam_states.append({name: float(tensor) for name, tensor in tensors.items()})
        return {
            "log_weights": [log_weight.item() for log_weight in self.log_weights],
            "adam": adam_states,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises `ValueError` if it has another number of bins."""
        if len(state["log_weights"]) != len(self.log_weights):
            raise ValueError(
                f"DARO: {len(state['log_weights'])} saved weights, but {len(self.log_weights)} bins"
            )
        with torch.no_grad():
            for log_weight, saved_log_weight, saved_adam_state in zip(
                self.log_weights, state["log_weights"], state["adam"], strict=True
            ):
                log_weight.fill_(saved_log_weight)
                tensors = {}
                for name, number in saved_adam_state.items():
                    # Adam keeps its count of steps in float32, its moments as the parameter.
                    dtype = torch.float32 if name == "step" else torch.float64
                    tensors[name] = torch.tensor(number, dtype=dtype)
                self.optimizer.state[log_weight] = tensors


@dataclass(frozen=True)
class Daro(Method):
    """DARO as a method with its options. The pipeline holds its learnable weights.

    P prompts with G rollouts each are put into M bins by their pass rate. Each bin has a weight,
    which is learned so that all bins contribute equally to the loss.
    """

    settings: ClassVar[TrlKeys] = {"loss_type": "dapo"}
    source = "arXiv 2510.09001"

    learning_rate: float = option(0.05, "Of the weights, which Adam updates once per generation.")
    bin_loss: Literal["magnitude", "surrogate"] = option(
        "magnitude",
        "A bin's loss: the magnitude of its terms, or surrogate, the absolute value of their "
        "signed sum.",
    )
    by_bin_tokens: bool = option(True, "Divide by the tokens of the bin instead of by all tokens.")
    drop_outside: bool = option(
        True, "Give 0 to prompts without a right rollout and to those with only right ones."
    )
    floor: float = option(
        1e-2, "The smallest loss of a bin that counts; no weight can grow beyond 1 / floor."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate < 0 or self.floor <= 0:
            raise ValueError(
                f"learning_rate: {self.learning_rate} must be at least 0 and floor: {self.floor} "
                "above 0"
            )

    def weigh_advantages(
        self,
        advantages_PG: Tensor,
        tokens_PG: Tensor,
        bins_P: Tensor,
        weights_M: Tensor,
        has_reward_PG: Tensor,
    ) -> Tensor:
        """Return the advantages with which TRL's token-mean loss becomes `sum w_mu L_mu`: (P, G).

        There are P prompts with G rollouts each, and M bins. TRL's loss (`loss_type: dapo`) divides
        the sum over all tokens by their number T. L_mu, the loss of the bin mu, is divided by T_mu,
        the number of tokens of the scored rollouts in the bin. So the advantages of a bin are
        multiplied by `w_mu T / T_mu`. With weights of 1 and the options `by_bin_tokens` and
        `drop_outside` off this is GRPO.

        For example, let a prompt with (10, 20) tokens be alone in a bin of weight 2, and a prompt
        with (30, 30) tokens lie outside of all bins. Advantages (1, -1) of the first become (6,
        -6), as 2 * 90 / 30 = 6. Those of the second become 0.

        Args:
            advantages_PG: normalised by group. With rewards of 0 and 1 the weights absorb any scale
                per group.
            tokens_PG: the number of tokens that the loss counts.
            bins_P: the index of each prompt's bin, or `OUTSIDE_ALL_BINS` for a prompt without a
                right rollout or with only right ones.
            weights_M: the weight w_mu of each bin.
            has_reward_PG: which rollouts have a reward, bool.
        """
        factors_M = weights_M
        if self.by_bin_tokens:
            scored_tokens_PG = torch.where(has_reward_PG, tokens_PG, 0.0)
            tokens_M = sum_by_bin(scored_tokens_PG, bins_P, bin_count=len(weights_M))
            all_tokens = tokens_PG.to(torch.float64).sum()
            factors_M = weights_M * all_tokens / tokens_M.clamp(min=1)
        # Outside of all bins advantages are not 0 if rewards differ among wrong answers: 0.0 and
        # 0.1.
        outside_factor = 0.0 if self.drop_outside else 1.0
        is_outside_P = bins_P == OUTSIDE_ALL_BINS
        # An index has to be 0 or more. Outside prompts read the factor of bin 0, which is not used.
        factors_P = torch.where(is_outside_P, outside_factor, factors_M[bins_P.clamp(min=0)])
        return advantages_PG * factors_P.to(advantages_PG.dtype)[:, None]

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """Weigh the advantages by the present weights, then update the weights on the same loss.

        All of this runs on the CPU, because all ranks must have the same weights to the bit. A GPU
        adds numbers in an order that changes from call to call.
        """
        group_size = advantages_PG.shape[1]
        # A bin for each number of right rollouts from 1 to G - 1.
        bin_count = max(1, group_size - 1)
        unweighted_PG = advantages_PG.cpu()
        tokens_PG = groups.loss_tokens_PG.cpu()
        has_reward_PG = groups.has_reward_PG.cpu()
        bins_P = assign_bins(groups.pass_rate_P.cpu(), group_size)
        daro_weights = run.daro_weights(bin_count, options=self)
        weights_M = daro_weights.weights_M
        weighted_PG = self.weigh_advantages(
            unweighted_PG,
            tokens_PG=tokens_PG,
            bins_P=bins_P,
            weights_M=weights_M,
            has_reward_PG=has_reward_PG,
        )
        losses_M = losses_by_bin(
            unweighted_PG,
            tokens_PG=torch.where(has_reward_PG, tokens_PG, 0.0),
            bins_P=bins_P,
            bin_count=bin_count,
            bin_loss=self.bin_loss,
        )
        is_present_M = sum_by_bin(torch.ones_like(tokens_PG), bins_P, bin_count) > 0
        for index in range(bin_count):
            # The groups of this bin have `index + 1` right rollouts.
            bin_name = f"{index + 1}_of_{group_size}"
            run.metrics[f"daro/weight_{bin_name}"] = weights_M[index].item()
            if is_present_M[index]:  # an empty bin has no loss
                run.metrics[f"daro/loss_{bin_name}"] = losses_M[index].item()
        daro_weights.update(losses_M, is_present_M)
        return weighted_PG.to(advantages_PG.device)

    def groups_with_signal(
        self, groups: Groups, has_signal_P: Tensor, run: AdvantagePipeline
    ) -> Tensor:
        if not self.drop_outside:
            return has_signal_P
        bins_P = assign_bins(groups.pass_rate_P, groups.rewards_PG.shape[1])
        return has_signal_P & (bins_P != OUTSIDE_ALL_BINS)

    def check(self, keys: RunKeys) -> None:
        if self.by_bin_tokens and keys.loss_type != "dapo":
            raise ValueError(
                f"loss_type: {keys.loss_type} with adora_method: daro, whose normalisation by bin "
                "needs loss_type: dapo"
            )

    def costs(self, keys: RunKeys) -> str:
        return f"{keys.num_generations - 1} learned weights, saved in every checkpoint"
