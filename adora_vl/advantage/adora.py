"""ADORA's weight of each prompt, from its criteria: attenuation for weak policies, amplification for strong ones.

The weight is one positive scalar per group, so the sign and the ranking of advantages inside a group never change.

Source: arXiv 2602.10019 and the reference code (ShadeCloak/ADORA). Its VLM half has `weight_func`, in
`ADORA_VL/openrlhf/trainer/ppo_utils/experience_maker_vl.py`. Its LLM half has `compute_grpo_outcome_advantage_ADORA`,
in `ADORA/verl/trainer/ppo/core_algos.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adora_vl.advantage.criteria import GroupFacts, difficulty_advantage, group_facts, length_advantage

MODES = ("attenuation", "amplification", "off")
CRITERIA = ("length", "difficulty")
COMBINATIONS = ("any", "all")
EMPTY_WRONG = ("attenuate", "keep")
NO_CORRECT = ("keep", "attenuate")


@dataclass(frozen=True)
class AdoraWeighting:
    """The judgement of one batch: `weights_P` is float32, `tds_P` and `tas_P` are bool, and `facts` are the reasons.

    A group without a correct rollout can be neither TDS nor TAS. `rate` multiplies the learning rate of this batch.
    """

    weights_P: Tensor
    tds_P: Tensor
    tas_P: Tensor
    facts: GroupFacts
    rate: float = 1.0


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")


def _check_arguments(rewards: Tensor, lengths: Tensor, mode: str, factor: float, criteria: Sequence[str]) -> None:
    if rewards.ndim != 2 or rewards.shape != lengths.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and lengths {tuple(lengths.shape)} must both be (P, G)")
    _check("mode", mode, MODES)
    if not criteria or isinstance(criteria, str):
        raise ValueError(f"criteria: expected one or both of {', '.join(CRITERIA)}, got {criteria!r}")
    for name in criteria:
        _check("criteria", name, CRITERIA)
    if mode == "attenuation" and not 0 < factor <= 1:
        raise ValueError(f"factor: attenuation needs 0 < factor <= 1, got {factor}")
    if mode == "amplification" and not factor >= 1:
        raise ValueError(f"factor: amplification needs factor >= 1, got {factor}")


def weigh_groups(
    rewards: Tensor,
    lengths: Tensor,
    *,
    mode: str = "attenuation",
    factor: float = 0.1,
    criteria: Sequence[str] = ("length",),
    combine: str = "any",
    tau: float = 0.5,
    correct_above: float = 0.5,
    truncated_at: float | None = None,
    empty_wrong: str = "attenuate",
    no_correct: str = "keep",
    difficulty_needs_correct: bool = False,
    truncated: Tensor | None = None,
) -> AdoraWeighting:
    """Like `adora_weights`, but with the reasons. A rollout also counts as truncated where `truncated` (bool, (P, G))
    says so.
    """
    _check_arguments(rewards, lengths, mode, factor, criteria)
    _check("combine", combine, COMBINATIONS)
    _check("empty_wrong", empty_wrong, EMPTY_WRONG)
    _check("no_correct", no_correct, NO_CORRECT)
    truncated_PG = torch.zeros_like(rewards, dtype=torch.bool)
    if truncated_at is not None:
        truncated_PG = truncated_PG | (lengths >= truncated_at)
    if truncated is not None:
        truncated_PG = truncated_PG | truncated
    facts = group_facts(rewards, lengths, correct_above, truncated_PG)
    verdicts = {
        "length": lambda: length_advantage(facts, empty_wrong),
        "difficulty": lambda: difficulty_advantage(facts, tau, difficulty_needs_correct),
    }
    votes = torch.stack([verdicts[name]() for name in criteria])
    tas_P = votes.any(dim=0) if combine == "any" else votes.all(dim=0)
    tds_P = ~tas_P if no_correct == "attenuate" else ~tas_P & facts.any_correct_P
    marked_P = tds_P if mode == "attenuation" else tas_P
    ones_P = torch.ones(len(rewards), dtype=torch.float32, device=rewards.device)
    weights_P = ones_P if mode == "off" else torch.where(marked_P, factor, ones_P)
    return AdoraWeighting(weights_P, tds_P, tas_P, facts)


def adora_weights(
    rewards: Tensor,
    lengths: Tensor,
    *,
    mode: str = "attenuation",
    factor: float = 0.1,
    criteria: Sequence[str] = ("length",),
    combine: str = "any",
    tau: float = 0.5,
    correct_above: float = 0.5,
    truncated_at: float | None = None,
    empty_wrong: str = "attenuate",
    no_correct: str = "keep",
    difficulty_needs_correct: bool = False,
) -> Tensor:
    """The weight that multiplies the group-normalised advantages of each prompt.

    Args:
        rewards: (P, G). NaN marks a rollout that was not scored.
        lengths: (P, G), number of completion tokens.
        mode: `"attenuation"` gives `factor` to TDS groups, `"amplification"` gives it to TAS groups, `"off"` to none.
        factor: the weight; the reference uses 0.1 for attenuation.
        criteria: `"length"`, `"difficulty"`, or both.
        combine: whether a group is TAS if `"any"` criterion holds, or only if `"all"` hold.
        tau: the highest pass rate at which the difficulty criterion holds; 0 is included (paper, Eq. 6).
        correct_above: a rollout is correct if its reward is above this.
        truncated_at: number of tokens from which on a rollout counts as truncated. With None no length does.
        empty_wrong: what the length criterion says of a group without an untruncated wrong rollout. `"attenuate"`: the
            group is TDS, as in the VLM reference. `"keep"`: it is TAS.
        no_correct: what happens to a group without a correct rollout that no criterion makes TAS; its rewards can
            still differ (0.0 and 0.1). `"keep"`: it is not TDS, as in the VLM reference. `"attenuate"`: it is TDS, as
            in the LLM reference.
        difficulty_needs_correct: True makes the difficulty criterion fail at a pass rate of 0.

    Returns:
        (P,), float32.

    Raises:
        ValueError: an unknown name, shapes that differ, or a factor on the wrong side of 1.
    """
    return weigh_groups(
        rewards,
        lengths,
        mode=mode,
        factor=factor,
        criteria=criteria,
        combine=combine,
        tau=tau,
        correct_above=correct_above,
        truncated_at=truncated_at,
        empty_wrong=empty_wrong,
        no_correct=no_correct,
        difficulty_needs_correct=difficulty_needs_correct,
    ).weights_P
