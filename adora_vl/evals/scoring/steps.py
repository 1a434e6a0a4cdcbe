"""Counts the true and the false claims of answers on their figures, and right answers by luck.

The claims are those that the reward `steps` counts (`adora_vl.rewards.steps`), such as `angle ABC =
40`. They are checked on the solved figures that prepared problems may have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from adora_vl.evals.records import GradedAnswer, Prediction
from adora_vl.evals.scoring.statistics import bootstrap_mean_interval, share_metric
from adora_vl.rewards.steps import ClaimCheck, check_claims_if_possible


class _CheckedAnswer(NamedTuple):
    """A graded answer, and the claims in it, checked on the solved figure of its problem."""

    graded: GradedAnswer
    claims: ClaimCheck


def step_metrics(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer]
) -> dict[str, Any] | None:
    """Compute how many claims of the answers, such as `angle ABC = 40`, are true on the figure.

    The metrics are:

    - `answers`: the number of answers to problems with solved figures.
    - `true` and `false`: the number of new true claims and of false claims in an answer, as a mean
      over problems with its bootstrap interval. A claim is new if the problem does not say it.
    - `lucky`: the share of right answers with a false claim or without a new one, with its Wilson
      interval; None if no answer is right.

    Returns None if no problem has a solved figure.
    """
    checked_answers: list[_CheckedAnswer] = []
    for row, graded in zip(rows, graded_answers, strict=True):
        claims = check_claims_if_possible(row["response"], row.get("figure"))
        if claims is not None:
            checked_answers.append(_CheckedAnswer(graded, claims))
    if not checked_answers:
        return None
    problem_ids = [answer.graded.problem_id for answer in checked_answers]
    new_counts = [answer.claims.new_count for answer in checked_answers]
    false_counts = [answer.claims.false_count for answer in checked_answers]
    metrics: dict[str, Any] = {
        "answers": len(checked_answers),
        "true": _mean_over_problems(new_counts, problem_ids),
        "false": _mean_over_problems(false_counts, problem_ids),
        "lucky": None,
    }
    right_answers = [answer for answer in checked_answers if answer.graded.correct]
    if right_answers:
        are_lucky = [answer.claims.is_right_by_luck for answer in right_answers]
        ids_of_right_answers = [answer.graded.problem_id for answer in right_answers]
        metrics["lucky"] = share_metric(are_lucky, ids_of_right_answers)
    return metrics


def _mean_over_problems(claim_counts: Sequence[int], problem_ids: Sequence[str]) -> dict[str, Any]:
    """Compute the mean number of claims in an answer, with its bootstrap interval over problems.

    Args:
        claim_counts: The number of claims in each answer, such as its false ones. Several answers
            to a problem count as their mean.
        problem_ids: The problem of each answer.
    """
    counts_by_problem: dict[str, list[int]] = defaultdict(list)
    for count, problem_id in zip(claim_counts, problem_ids, strict=True):
        counts_by_problem[problem_id].append(count)
    means = [sum(counts) / len(counts) for counts in counts_by_problem.values()]
    # The bounds matter only if all means are the same: other problems could then have no claims, or
    # one more.
    interval = bootstrap_mean_interval(
        means, list(counts_by_problem), lowest=0.0, highest=max(means) + 1.0
    )
    return {"value": sum(means) / len(means), "interval_95": list(interval)}
