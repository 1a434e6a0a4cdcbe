"""DARO: prompts are binned by pass rate, and the weight of each bin is learned beside the policy.

Source: arXiv 2510.09001. With L_mu the bin's policy loss by the bin's own number of tokens,

    L = sum over mu in {1/G, ..., (G-1)/G} of  w_mu L_mu - ln w_mu,

so that at the optimum of the weights w_mu = 1 / L_mu and every difficulty contributes alike. What is our reading:

- On freshly sampled rollouts the ratios are 1 and the surrogate's value is -sum A_i tokens_i / tokens of the bin,
  which is often negative, where the objective has no minimum. The scale of a bin is therefore measured by the
  magnitude of its terms, `sum |A_i| tokens_i / tokens of the bin` (`measure="magnitude"`). `"surrogate"` takes the
  absolute surrogate value.
- w_mu = exp(v_mu) keeps the weights positive; a bin that is not in a batch keeps its weight and its optimizer's
  moments.

Everything follows from tensors that are gathered over the ranks, in float64 on the CPU, so every rank has the same
weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MEASURES = ("magnitude", "surrogate")
OUTSIDE = -1  # the bin of prompts that are right or wrong throughout


def bins_of(pass_rates: Tensor, generations: int) -> Tensor:
    """The number of right rollouts minus one, 0 to G - 2, for each prompt; `OUTSIDE` for none and for all. int64, (P,).

    With unscored rollouts a pass rate lies between two bins and goes to the nearer one.
    """
    right_P = (pass_rates * generations).round().long().clamp(1, generations - 1)
    return torch.where((pass_rates > 0) & (pass_rates < 1), right_P - 1, OUTSIDE)


def bin_sums(values_PG: Tensor, bins_P: Tensor, bins: int) -> Tensor:
    """Sum of the rows' values by bin, float64, (bins,)."""
    inside_P = bins_P != OUTSIDE
    zero = torch.zeros(bins, dtype=torch.float64, device=values_PG.device)
    return zero.index_add(0, bins_P[inside_P], values_PG.to(torch.float64).sum(dim=1)[inside_P])


def bin_losses(advantages_PG: Tensor, tokens_PG: Tensor, bins_P: Tensor, bins: int, measure: str) -> Tensor:
    """L_mu of each bin, float64, (bins,); 0 where no prompt fell into it. See the module for `measure`."""
    terms_PG = advantages_PG.abs() if measure == "magnitude" else advantages_PG
    terms_M = bin_sums(terms_PG.to(torch.float64) * tokens_PG, bins_P, bins)
    return terms_M.abs() / bin_sums(tokens_PG, bins_P, bins).clamp(min=1)


class DaroWeights:
    """The learnable weights of the bins with their optimizer (Adam)."""

    def __init__(self, bins: int, learning_rate: float, floor: float = 1e-2) -> None:
        """`floor`: a smaller bin loss counts as this, so no weight goes beyond 1 / floor."""
        self.floor = floor
        self.logs = [torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(bins)]
        self.optimizer = torch.optim.Adam(self.logs, lr=learning_rate)

    @property
    def weights_M(self) -> Tensor:
        """Positive, float64, (bins,)."""
        return torch.stack([log.detach().exp() for log in self.logs])

    def update(self, losses_M: Tensor, present_M: Tensor) -> None:
        """One optimizer step on `sum w_mu L_mu - ln w_mu` of the bins that are present (bool, (bins,))."""
        for log, loss, present in zip(self.logs, losses_M.tolist(), present_M.tolist(), strict=True):
            # the derivative by v of exp(v) L - v; without a gradient Adam leaves a bin and its moments alone
            log.grad = (log.detach().exp() * max(loss, self.floor) - 1) if present else None
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Numbers only, for a checkpoint's JSON; `load` restores them exactly."""
        moments = [self.optimizer.state.get(log, {}) for log in self.logs]
        return {
            "log_weights": [log.item() for log in self.logs],
            "adam": [{name: float(value) for name, value in moment.items()} for moment in moments],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Raises `ValueError` where the state has another number of bins."""
        if len(state["log_weights"]) != len(self.logs):
            raise ValueError(f"DARO: {len(state['log_weights'])} saved weights, but {len(self.logs)} bins")
        with torch.no_grad():
            for log, value, moment in zip(self.logs, state["log_weights"], state["adam"], strict=True):
                log.fill_(value)
                dtypes = {"step": torch.float32}  # as Adam keeps it
                self.optimizer.state[log] = {
                    name: torch.tensor(number, dtype=dtypes.get(name, torch.float64)) for name, number in moment.items()
                }


def daro(
    advantages: Tensor,
    tokens: Tensor,
    pass_rates: Tensor,
    weights_M: Tensor,
    *,
    by_bin_tokens: bool = True,
    drop_outside: bool = True,
) -> Tensor:
    """Advantages with which TRL's token-mean loss (`loss_type: dapo`) is `sum w_mu L_mu`.

    That loss divides the sum over all tokens by their number T; with A multiplied by `w_mu T / T_mu` a bin's part is
    divided by its own T_mu. Weights of 1 with both options off are GRPO.

    Args:
        advantages: (P, G), the group-normalised ones. With 0/1 rewards any scale by group is absorbed by the weights.
        tokens: (P, G), counted by the loss.
        pass_rates: (P,).
        weights_M: (G - 1,).
        by_bin_tokens: normalise by the bin's tokens.
        drop_outside: prompts with no right and with only right rollouts get 0; with rewards of 0.0, 0.1 and 1.0 the
            former would have a signal.

    Returns:
        (P, G).
    """
    bins_P = bins_of(pass_rates, advantages.shape[1])
    factors_M = weights_M
    if by_bin_tokens:
        tokens_M = bin_sums(tokens, bins_P, len(weights_M))
        factors_M = weights_M * tokens.to(torch.float64).sum() / tokens_M.clamp(min=1)
    outside = 0.0 if drop_outside else 1.0
    factors_P = torch.where(bins_P == OUTSIDE, outside, factors_M[bins_P.clamp(min=0)])
    return advantages * factors_P.to(advantages.dtype)[:, None]
