"""Counts the true and the false claims of answers on their figures, and right answers by luck.

The claims are those that the reward `steps` counts (`adora_vl.rewards.steps`), such as `angle ABC =
40`. They are checked on the solved figures that prepared problems may have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from adora_vl.evals.records import GradedAnswer, Prediction
from adora_vl.evals.scoring.statistics import mean_interval, wilson_over_problems
from adora_vl.rewards.steps import ClaimCheck, check_claims_if_possible


def step_metrics(
    rows: Sequence[Prediction], graded: Sequence[GradedAnswer]
) -> dict[str, Any] | None:
    """Compute the metrics on the claims of answers.

    The metrics are:

    - `answers`: the number of answers to problems with solved figures.
    - `true` and `false`: the number of new true claims and of false claims in an answer, as a mean
      over problems with its bootstrap interval. A claim is new if the problem does not say it.
    - `lucky`: the share of right answers with a false claim or without a new one, with its Wilson
      interval; None if no answer is right.

    Returns None if no problem has a solved figure.
    """
    answers: list[tuple[GradedAnswer, ClaimCheck]] = []
    for row, item in zip(rows, graded, strict=True):
        check = check_claims_if_possible(row["response"], row.get("figure"))
        if check is not None:
            answers.append((item, check))
    if not answers:
        return None
    right_answers = [(item.problem, check.is_luck) for item, check in answers if item.correct]
    metrics: dict[str, Any] = {
        "answers": len(answers),
        "true": _mean_over_problems(answers, "new_count"),
        "false": _mean_over_problems(answers, "false_count"),
        "lucky": None,
    }
    if right_answers:
        are_luck = [is_luck for _, is_luck in right_answers]
        count = sum(are_luck)
        total = len(right_answers)
        metrics["lucky"] = {
            "count": count,
            "total": total,
            "value": count / total,
            "interval_95": list(
                wilson_over_problems(are_luck, [problem for problem, _ in right_answers])
            ),
        }
    return metrics


def _mean_over_problems(
    answers: Sequence[tuple[GradedAnswer, ClaimCheck]], field: str
) -> dict[str, Any]:
    """Compute the mean number of claims in an answer, with its bootstrap interval over problems.

    Args:
        answers: The answers, each with its claims. Several answers to a problem count as their
            mean.
        field: The field of the claims that is counted: `new_count` or `false_count`.
    """
    counts_by_problem: dict[str, list[float]] = defaultdict(list)
    for item, check in answers:
        counts_by_problem[item.problem].append(float(getattr(check, field)))
    means = [sum(counts) / len(counts) for counts in counts_by_problem.values()]
    # The bounds matter only if all means are the same: other problems could then have no claims, or
    # one more.
    interval = mean_interval(means, list(counts_by_problem), lowest=0.0, highest=max(means) + 1.0)
    return {"value": sum(means) / len(means), "interval_95": list(interval)}
