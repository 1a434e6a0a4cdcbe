"""Says which part of the answers to a benchmark a score is over.

The `coverage` of a score file has the numbers of answers that are scored, that the run asked for,
and that there would be to all the data.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def describe_missing_answers(score: Mapping[str, Any]) -> str | None:
    """Say how many answers a score has if its run asked for more.

    In the `coverage` of a score, `answers` is the number of answers that are scored, and `asked`
    the number that the run asked for. Returns None if they are equal, or if one is not known.
    """
    coverage = score.get("coverage") or {}
    n_answers = coverage.get("answers")
    n_requested = coverage.get("asked")
    if not n_answers or not n_requested or n_answers >= n_requested:
        return None
    return (
        f"the score of a part: {n_answers} of {n_requested} answers are there; run `infer` again "
        "for the others"
    )


def partial_score_notes(score: Mapping[str, Any]) -> list[str]:
    """Return lines that say why a score may be over a part of the problems; [] if it is not.

    There are three reasons: answers are missing, the run asked for a part of the problems alone
    (`--limit`), or nobody knows what the run asked for, since no fingerprint lies beside the
    answers.
    """
    coverage = score.get("coverage") or {}
    if coverage and coverage.get("asked") is None:
        return [
            "note: it is not known of how many problems these are; no run lies beside the answers"
        ]
    lines: list[str] = []
    missing_answers = describe_missing_answers(score)
    if missing_answers:
        lines.append(f"warning: {missing_answers}")
    n_requested = coverage.get("asked") or 0
    n_in_data = coverage.get("in_data") or 0
    if n_requested < n_in_data:
        lines.append(f"note: {n_requested} of the {n_in_data} answers to all the data (--limit)")
    return lines


def describe_scored_part(score: Mapping[str, Any]) -> str | None:
    """Return a text such as `60 of 512` if a score is over a part of the data's answers.

    In the `coverage` of a score, `answers` is the number of answers that are scored, `asked` the
    number that the run asked for, and `in_data` the number for all the data. Returns None for a
    score over all the data, or if that is not known.
    """
    coverage = score.get("coverage") or {}
    n_answers = coverage.get("answers")
    # One of the two may be missing.
    n_wanted = max(coverage.get("asked") or 0, coverage.get("in_data") or 0)
    if not n_answers or n_answers >= n_wanted:
        return None
    return f"{n_answers} of {n_wanted}"


def count_noun(scores: Sequence[Mapping[str, Any]]) -> str:
    """Return what the counts of score files are counts of: `problems` or `answers`.

    It is `answers` if one of the scores has several answers to a problem.
    """
    has_samples = any(score.get("samples") for score in scores)
    return "answers" if has_samples else "problems"
