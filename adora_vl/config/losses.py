"""The keys of TRL's losses with which a loss would not be the one that its name says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# The losses that clip the ratio of new to old policy on both sides, as PPO does.
CLIPPED_LOSSES = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})
# Losses that sum over tokens: with one ratio for a whole answer, a long answer would weigh more.
_LOSSES_SUMMED_OVER_TOKENS = frozenset({"bnpo", "dr_grpo", "dapo", "cispo"})
_USUAL_RATIO_CAP = 5.0  # CISPO's cap in ScaleRL (arXiv 2510.13786)


def check_loss(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys with which the loss would not be what `loss_type` promises."""
    _check_ratio_bounds(config)
    _check_engine_ratio_bounds(config)
    _check_sampling_level(config)
    _check_entropy(config)


def _check_ratio_bounds(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for wrong bounds of the ratio of new to old policy.

    TRL takes `epsilon_high` itself as CISPO's cap, and not 1 + `epsilon_high`. The default of 0.2
    would therefore cap every ratio, and the gradient would be a fifth of what it should be.
    """
    # as in TRL: `epsilon_high` is `epsilon` where it is not set
    takes_epsilon = config.epsilon_high is None
    epsilon_high = float(config.epsilon if takes_epsilon else config.epsilon_high)
    if config.loss_type == "cispo" and epsilon_high <= 1:
        value = f"{epsilon_high:g}"
        if takes_epsilon:
            value = f"null, so epsilon: {config.epsilon:g},"
        raise UserError(
            f"epsilon_high: {value} is the cap of the ratio itself with loss_type: cispo, "
            f"and caps also the ratio of an unchanged policy, which is 1; set one above 1, such as "
            f"epsilon_high: {_USUAL_RATIO_CAP}"
        )
    if config.loss_type not in CLIPPED_LOSSES or config.delta is None:
        return
    upper_clip = 1 + epsilon_high
    if config.delta <= upper_clip:
        raise UserError(
            f"delta: {config.delta:g} is the second bound of the ratio, beyond the clip at "
            f"{upper_clip:g} (1 + epsilon_high); set a larger one, such as {2 + epsilon_high:g}, or "
            "leave it out"
        )


def _check_engine_ratio_bounds(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for bounds of the ratio of policy to engine that leave out the ratio 1.

    It is 1 where policy and engine agree. Such bounds would scale every gradient, or mask nearly
    every token, and nothing in the log would say so.
    """
    if not config.use_vllm or not config.vllm_importance_sampling_correction:
        return
    highest = config.vllm_importance_sampling_clip_max
    if highest is not None and highest < 1:
        raise UserError(
            f"vllm_importance_sampling_clip_max: {highest:g} is below 1, the ratio of a policy and "
            "an engine that agree, so every token would be cut; set one above 1, such as 3.0"
        )
    lowest = config.vllm_importance_sampling_clip_min
    if lowest is not None and lowest > 1:
        raise UserError(
            f"vllm_importance_sampling_clip_min: {lowest:g} is above 1, the ratio of a policy and "
            "an engine that agree, so every token would be cut; set one below 1, such as 0.5"
        )


def _check_sampling_level(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for a loss that does not fit `importance_sampling_level`.

    The level says whether there is one importance ratio for each token, or one for a whole answer.
    """
    loss = config.loss_type
    level = config.importance_sampling_level
    if loss == "luspo" and level != "sequence":
        raise UserError(
            f"importance_sampling_level: {level} with loss_type: luspo, which scales the ratio of "
            "a whole answer by its length; set it to sequence"
        )
    if level == "sequence" and loss in _LOSSES_SUMMED_OVER_TOKENS:
        raise UserError(
            f"importance_sampling_level: sequence with loss_type: {loss} weighs an answer by its "
            "length; set loss_type: grpo, which is GSPO, or luspo"
        )
    if level == "sequence" and loss == "vespo":
        raise UserError(
            "importance_sampling_level: sequence with loss_type: vespo, which makes the ratio of "
            "a whole answer itself; set it to token"
        )


def _check_entropy(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for a first `entropy_coef` outside of the bounds for adapting it."""
    lowest = config.entropy_coef_min
    highest = config.entropy_coef_max
    if config.use_adaptive_entropy and not lowest <= config.entropy_coef <= highest:
        raise UserError(
            f"entropy_coef: {config.entropy_coef:g} is not between entropy_coef_min: {lowest:g} and "
            f"entropy_coef_max: {highest:g}, where use_adaptive_entropy keeps it; set one that is"
        )


def has_entropy_bonus(config: AdoraGRPOConfig) -> bool:
    """Return whether the loss has an entropy bonus.

    An adaptive coefficient counts even if it is 0 at first.
    """
    return bool(config.entropy_coef != 0.0 or config.use_adaptive_entropy)
