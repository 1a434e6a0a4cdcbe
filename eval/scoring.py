"""Turns graded answers into a score: counts overall and by group with intervals, and statistics of the answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.predictions import IMAGE_FAILED, Prediction
from eval.responses import lengths, reflection, truncation
from eval.statistics import bootstrap, pass_at, wilson

Score = dict[str, Any]
FAILED = "failed"  # not asked, or the extraction failed; counts as not correct
# By total pixels of the first image: the upper ends of the groups.
_SIZES = (
    (128 * 128, "to 128x128"),
    (256 * 256, "to 256x256"),
    (512 * 512, "to 512x512"),
    (1024 * 1024, "to 1024x1024"),
)


@dataclass(frozen=True)
class Graded:
    """One graded answer. `groups` gives, for each kind of group, the groups in which the answer is counted.

    `extracted` is the answer that was compared. `reason` says how it was found, or why it got its verdict.
    """

    pid: str
    verdict: str
    extracted: str | None
    reason: str
    n_tokens: int | None = None
    groups: dict[str, list[str]] = field(default_factory=dict)
    sample: int = 0

    @property
    def correct(self) -> bool:
        return self.verdict == "correct"


def failed_image(row: Prediction, groups: dict[str, list[str]]) -> Graded | None:
    """The verdict on a problem whose image could not be read, whatever its response is. None for any other problem."""
    if row.get("finish_reason") != IMAGE_FAILED:
        return None
    return Graded(
        row["pid"], FAILED, None, row.get("error") or IMAGE_FAILED, groups=groups, sample=row.get("sample", 0)
    )


def common_groups(row: Prediction) -> dict[str, list[str]]:
    """The groups that every benchmark has: why the answer ended, and how large the image is."""
    groups = {}
    if row.get("finish_reason"):
        groups["finish_reason"] = [str(row["finish_reason"])]
    size = row.get("image_size")
    if size:
        pixels = size[0] * size[1]
        groups["image_size"] = [next((name for limit, name in _SIZES if pixels <= limit), "over 1024x1024")]
    return groups


def aggregate(graded: Sequence[Graded]) -> Score:
    """Counts over all answers (at least one) and by group. Problems with a broken image are counted too."""
    members: dict[str, dict[str, list[Graded]]] = defaultdict(lambda: defaultdict(list))
    for item in graded:
        for key, values in item.groups.items():
            for value in values:
                members[key][value].append(item)
    score: Score = {
        **cell(graded),
        "groups": {key: {value: cell(members[key][value]) for value in sorted(members[key])} for key in members},
        "verdicts": dict(Counter(item.verdict for item in graded).most_common()),
        "image_failed": sum(item.groups.get("finish_reason") == [IMAGE_FAILED] for item in graded),
    }
    samples = _samples(graded)
    return score | ({"samples": samples} if samples else {})


def answers(rows: Sequence[Prediction], graded: Sequence[Graded]) -> Score:
    """Lengths of right and wrong answers, share cut off, and reflective words, over the problems that were asked."""
    asked = [(row, item) for row, item in zip(rows, graded, strict=True) if row.get("finish_reason") != IMAGE_FAILED]
    return {
        "tokens": {
            "correct": lengths([item.n_tokens for _, item in asked if item.correct and item.n_tokens is not None]),
            "wrong": lengths([item.n_tokens for _, item in asked if not item.correct and item.n_tokens is not None]),
        },
        "truncated": truncation([row["finish_reason"] for row, _ in asked if row.get("finish_reason")]),
        "reflective_words": reflection([row["response"] for row, _ in asked]),
        "empty_responses": sum(not row["response"].strip() for row, _ in asked),
    }


def cell(items: Sequence[Graded]) -> Score:
    """Number of correct answers, their total, and the Wilson interval of the accuracy.

    Answers to the same problem are not independent, so more answers per problem must not narrow the interval. It is
    therefore computed as if there were only as many answers as problems. It is never too narrow, and wider than
    necessary if the answers to a problem differ.
    """
    correct, total = sum(item.correct for item in items), len(items)
    problems = len({item.pid for item in items})
    interval = list(wilson(correct / total * problems if problems < total else correct, problems))
    return {"correct": correct, "total": total, "accuracy": correct / total, "wilson_95": interval}


def counted(correct: int, total: int, answers: int = 1) -> Score | None:
    """Like `cell`, but from counts, with `answers` answers per problem. None if there is nothing to count."""
    if total <= 0 or not 0 <= correct <= total:
        return None
    interval = list(wilson(correct / answers, max(1, total // answers)))
    return {"correct": correct, "total": total, "accuracy": correct / total, "wilson_95": interval}


def by_problem(items: Iterable[Graded]) -> dict[str, list[bool]]:
    """For each problem, whether each of its answers is right. Problems are in the order of their first answers."""
    verdicts: dict[str, list[bool]] = {}
    for item in items:
        verdicts.setdefault(item.pid, []).append(item.correct)
    return verdicts


def _samples(graded: Sequence[Graded]) -> Score | None:
    """avg@k, and pass@j for j in 1, 2, 4 ... k, with intervals over problems. None if each problem has one answer."""
    problems = list(by_problem(graded).values())
    k = max(len(answers) for answers in problems)
    if k == 1:
        return None
    full = [answers for answers in problems if len(answers) == k]
    sizes = sorted({1 << power for power in range(k.bit_length()) if 1 << power <= k} | {k})
    average = [sum(answers) / k for answers in full]
    result: Score = {"k": k, "problems": len(full), "incomplete": len(problems) - len(full)}
    result[f"avg@{k}"] = _mean_with_interval(average)
    for j in sizes:
        result[f"pass@{j}"] = _mean_with_interval([pass_at(j, k, sum(answers)) for answers in full])
    return result


def _mean_with_interval(values: Sequence[float]) -> Score:
    """The mean over problems and its interval. If all values are 0 or 1 it is a Wilson interval, because the bootstrap
    of few or similar values is too narrow. Otherwise it is a bootstrap interval.
    """
    mean, by_wilson = sum(values) / len(values), set(values) <= {0.0, 1.0}
    interval = wilson(sum(values), len(values)) if by_wilson else bootstrap(values)
    return {"value": mean, "interval_95": list(interval), "interval": "wilson" if by_wilson else "bootstrap"}
