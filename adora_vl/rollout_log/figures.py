"""The figures `adora/*` of a generation."""

from __future__ import annotations

import torch
from torch import Tensor

from adora_vl.advantage import AdoraWeighting
from adora_vl.weighing import Scores, Weighed


def _mean_where(values: Tensor, chosen: Tensor) -> float:
    """The mean of the chosen values. It is NaN if none is chosen; TRL's log leaves such figures out."""
    return values[chosen].mean().item() if bool(chosen.any()) else float("nan")


def adora_metrics(weighting: AdoraWeighting) -> dict[str, float]:
    """Shares of prompts are between 0 and 1. Lengths are in tokens, as means over rollouts."""
    facts = weighting.facts
    wrong_all_truncated_P = facts.wrong_PG.any(dim=1) & ~facts.any_finished_wrong_P
    all_correct_P = facts.any_correct_P & ~facts.wrong_PG.any(dim=1)
    return {
        "tds_share": weighting.tds_P.float().mean().item(),
        "weight_mean": weighting.weights_P.mean().item(),
        "no_correct_share": (~facts.any_correct_P).float().mean().item(),
        "all_correct_share": all_correct_P.float().mean().item(),
        "wrong_all_truncated_share": wrong_all_truncated_P.float().mean().item(),
        "length_correct": _mean_where(facts.lengths_PG, facts.correct_PG),
        "length_wrong": _mean_where(facts.lengths_PG, facts.wrong_PG),
        "pass_rate": torch.mean(facts.pass_rate_P).item(),
    }


def weighed_figures(weighed: Weighed, scores: Scores) -> dict[str, float]:
    """The figures of ADORA, of the run's methods and of the texts, by their names in the log."""
    figures = {**adora_metrics(weighed.weighting), **weighed.figures}
    figures["reflective_per_1000_tokens"] = scores.reflective_per_1000_tokens
    return {f"adora/{name}": value for name, value in figures.items()}
