"""What answers claim of their figures, where the problems have solved ones: true, false, and luck.

The claims are those that the reward `steps` counts (`adora_vl.rewards.steps`); nothing is solved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from adora_vl.evals.records import Graded, Prediction
from adora_vl.evals.scoring.statistics import bootstrap, wilson
from adora_vl.rewards.steps import ResponseWork, measured_work


def step_figures(rows: Sequence[Prediction], graded: Sequence[Graded]) -> dict[str, Any] | None:
    """Return the figures over the answers to problems with figures; None where there is none.

    `true` and `false`: new claims and errors in an answer, as a mean over problems with its
    bootstrap interval. `lucky`: of the right answers those that err or say nothing new, with its
    Wilson interval; None without a right answer.
    """
    works = [(row, item, _work(row)) for row, item in zip(rows, graded, strict=True)]
    answers = [(item, work) for _, item, work in works if work is not None]
    if not answers:
        return None
    lucky = [work.is_luck for item, work in answers if item.correct]
    figures: dict[str, Any] = {
        "answers": len(answers),
        "true": _mean(answers, "new"),
        "false": _mean(answers, "false"),
        "lucky": None,
    }
    if lucky:
        count = sum(lucky)
        figures["lucky"] = {
            "count": count,
            "total": len(lucky),
            "value": count / len(lucky),
            "interval_95": list(wilson(count, len(lucky))),
        }
    return figures


def _work(row: Prediction) -> ResponseWork | None:
    """The claims of an answer; None where its problem has no figure that leaves room for work."""
    return measured_work(row["response"], row.get("figure"))


def _mean(answers: Sequence[tuple[Graded, ResponseWork]], name: str) -> dict[str, Any]:
    """The mean over problems of a number of claims; several answers to one count as their mean."""
    by_problem: dict[str, list[float]] = defaultdict(list)
    for item, work in answers:
        by_problem[item.pid].append(float(getattr(work, name)))
    means = [sum(values) / len(values) for values in by_problem.values()]
    return {"value": sum(means) / len(means), "interval_95": list(bootstrap(means))}


def step_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of these figures for the screen."""
    lines = [
        f"true claims of an answer: {_number(figures['true'])}",
        f"false claims of an answer: {_number(figures['false'])}",
    ]
    lucky = figures["lucky"]
    if lucky is None:
        return [*lines, "right by luck: no answer is right"]
    low, high = lucky["interval_95"]
    lines.append(
        f"right by luck: {100 * lucky['value']:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f}) "
        f"of {lucky['total']} right answers have a false claim, or none that is new"
    )
    return lines


def _number(figure: Mapping[str, Any]) -> str:
    low, high = figure["interval_95"]
    return f"{figure['value']:.2f} (95 %: {low:.2f} to {high:.2f})"
