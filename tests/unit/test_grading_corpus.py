r"""The labelled corpus: our grader is right on all of it. `benchmarks/grading_corpus.py` runs other graders on it."""

from __future__ import annotations

from collections import Counter

import pytest

from adora_vl.rewards import grade, grade_batch
from tests.grading_corpus import LABELS, Case, cases

CASES = cases()
KINDS = sorted({case.kind for case in CASES})


def _as_labelled(case: Case, verdict: str) -> bool:
    return verdict != "correct" if case.label == "rejected" else verdict == case.label


@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_the_label(kind: str) -> None:
    found = {
        case.name: grade(case.response, case.gold, choices=case.choices, rounding=case.rounding)
        for case in CASES
        if case.kind == kind
    }
    differing = [
        f"{case.name}: {case.label}, not {found[case.name].verdict} ({found[case.name].reason})"
        for case in CASES
        if case.kind == kind and not _as_labelled(case, found[case.name].verdict)
    ]
    assert differing == []


def test_a_batch_gives_the_same_grades() -> None:
    quick = [case for case in CASES if case.kind != "attacks" and not case.rounding]
    grades = grade_batch([c.response for c in quick], [c.gold for c in quick], choices=[c.choices for c in quick])
    assert grades == [grade(case.response, case.gold, choices=case.choices) for case in quick]
    assert any(one.symbolic for one in grades)


def test_the_corpus_is_large_and_has_both_sides() -> None:
    labels = Counter(case.label for case in CASES)
    assert len(CASES) >= 400
    assert min(labels[label] for label in LABELS) > 10
    assert labels["correct"] > 300 and labels["wrong"] > 300
    assert len({case.name for case in CASES}) == len({(c.name, c.response, c.gold) for c in CASES}) == len(CASES)
