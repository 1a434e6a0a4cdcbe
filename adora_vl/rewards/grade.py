r"""One function decides every training reward and the Geometry3K evaluation: `grade`, and `grade_batch` for many.

Nearly everything is decided in process by code whose cost is bounded by caps on length, nesting, digits and exponents
(`canonical`, `grammar`, `numbers`). What is left needs sympy and goes to a worker process (`pool`) that is killed at
the deadline: expressions with an unknown, functions and exponents that `numbers` does not evaluate, and closed forms
in which cancellation leaves floats too few digits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from adora_vl.rewards.boxed import last_answer, last_boxed
from adora_vl.rewards.canonical import canonical_gold
from adora_vl.rewards.decide import Decision, Outcome, Pending, Verdict, decide
from adora_vl.rewards.forms import read
from adora_vl.rewards.pool import Answer, shared_pool

VERDICTS: tuple[Verdict, ...] = ("correct", "wrong", "unparseable", "timeout")
DEADLINE_S = 1.0
_SHOWN_CHARS = 200  # of an extracted answer; a 1 MB box must not go into every log


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    `extracted`: what stands in the last complete box, or with `answer_tags` in an `<answer>` block (cut to 200
    characters), None when there is neither.
    `reason`: the rule that decided, a short stable string such as `same_number`, `enumeration` or `no_box`.
    `symbolic`, `ms`: whether sympy was asked, and what it all took; they take no part in comparisons.
    """

    verdict: Verdict
    extracted: str | None
    reason: str
    symbolic: bool = field(default=False, compare=False)
    ms: float = field(default=0.0, compare=False)


def grade(
    response: str,
    gold: str,
    *,
    choices: Sequence[str] | None = None,
    rounding: bool = False,
    answer_tags: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Grade:
    r"""Whether the last complete `\boxed{}` of `response` holds the gold. Never raises, for any two strings.

    `gold`: a number, a closed form, a text, or with `choices` also a letter. `choices`: the values of A, B, C, ...
    `rounding`: also accept a decimal with at least one decimal place that is the gold (a value, not a letter) rounded
    to that many places. `answer_tags`: for a prompt that asks for `<answer> </answer>`; what stands there counts as
    what stands in a box, and `last_answer` says which of several does. `deadline_s`: after so many seconds the verdict
    is `timeout`; the first start of a worker process, half a second, is not counted. A gold that cannot be used is
    `wrong` with a reason that starts with `gold_`; `verify_gold` finds such golds beforehand. Safe in any thread.
    Source: the grading policy.
    """
    began = time.perf_counter()
    decision, extracted = _decided(response, gold, choices, rounding, answer_tags)
    if not isinstance(decision, Pending):
        return _grade(decision, extracted, began)
    left = deadline_s - (time.perf_counter() - began)
    found = shared_pool().ask(decision.answer, decision.gold, max(0.0, left))
    return _grade(_outcome(decision, found), extracted, began, symbolic=True)


def grade_batch(
    responses: Sequence[str],
    golds: Sequence[str],
    *,
    choices: Sequence[Sequence[str] | None] | None = None,
    rounding: bool = False,
    answer_tags: bool = False,
    deadline_s: float = DEADLINE_S,
) -> list[Grade]:
    """As `grade` for each response with its gold and its choices; what needs sympy is spread over the workers.

    Each response has its own `deadline_s`, which runs while a worker has it and not while it waits for one behind the
    others. `ms` then has the time of the symbolic comparison, with that wait. Raises `ValueError` for unequal lengths.
    """
    options = choices if choices is not None else [None] * len(responses)
    grades: list[Grade] = []
    pending: list[tuple[int, Pending]] = []
    for row, (response, gold, row_choices) in enumerate(zip(responses, golds, options, strict=True)):
        began = time.perf_counter()
        decision, extracted = _decided(response, gold, row_choices, rounding, answer_tags)
        if isinstance(decision, Pending):
            pending.append((row, decision))
            decision = decision.different
        grades.append(_grade(decision, extracted, began))
    if pending:
        jobs = [(decision.answer, decision.gold) for _, decision in pending]
        for (row, decision), (found, seconds) in zip(pending, shared_pool().ask_all(jobs, deadline_s), strict=True):
            verdict, reason = _outcome(decision, found)
            ms = grades[row].ms + 1000 * seconds
            grades[row] = replace(grades[row], verdict=verdict, reason=reason, symbolic=True, ms=ms)
    return grades


def verify_gold(gold: str, choices: Sequence[str] | None = None) -> str | None:
    """None if the gold, boxed, is graded as correct against itself, as it is and in canonical form; else the reason."""
    stored = canonical_gold(gold)
    for answer, against in ((gold, gold), (gold, stored), (stored, stored)):
        verdict = grade(rf"\boxed{{{answer}}}", against, choices=choices)
        if verdict.verdict != "correct":
            return verdict.reason.removeprefix("gold_")
    return None if canonical_gold(stored) == stored else "unstable"


def _decided(
    response: str, gold: str, choices: Sequence[str] | None, rounding: bool, answer_tags: bool
) -> tuple[Decision, str | None]:
    """The decision and the answer that the response gives."""
    given = last_answer(response) if answer_tags else last_boxed(response)
    if given is None:
        return ("unparseable", "no_box"), None
    return decide(read(given), read(gold), choices or (), rounding), given


def _grade(outcome: Outcome, extracted: str | None, began: float, *, symbolic: bool = False) -> Grade:
    if extracted is not None and len(extracted) > _SHOWN_CHARS:
        extracted = extracted[:_SHOWN_CHARS] + "…"
    verdict, reason = outcome
    return Grade(verdict, extracted, reason, symbolic, 1000 * (time.perf_counter() - began))


def _outcome(pending: Pending, found: Answer) -> Outcome:
    """What follows from sympy's answer; where none came, the reason says why."""
    if found == "equal":
        return pending.equal
    if found == "different":
        return pending.different
    if found == "undefined":
        return pending.undefined
    return ("unparseable" if found == "undecided" else "timeout"), found
