"""Originals against variants: how much of a score may be memory."""

from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals import variants
from adora_vl.evals.options import DataOptions
from adora_vl.evals.records import GradedAnswer, LoadedProblems, RowGrade
from adora_vl.evals.variants import add_variants, parse_variant_id, variant_lines
from adora_vl.utils.errors import UserError


class ProblemWithId:
    """A problem of which only the id counts."""

    def __init__(self, pid: str) -> None:
        self.pid = pid


def graded_answer(pid: str, right: int) -> GradedAnswer:
    """Return a right or a wrong answer."""
    return GradedAnswer(pid, RowGrade("correct" if right else "wrong", extracted=None, reason=""))


def loaded_problems(*pids: str) -> LoadedProblems:
    """Problems of these ids."""
    problems: list[Any] = [ProblemWithId(pid) for pid in pids]
    return LoadedProblems(problems, "hash")


def test_the_id_of_a_variant_has_its_original_and_its_number() -> None:
    assert parse_variant_id("geometry3k/test/15~3") == ("geometry3k/test/15", 3)
    assert parse_variant_id("geometry3k/test/15") is None
    assert parse_variant_id("a~b") is None


def test_the_first_variants_of_the_problems_are_asked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The problems are followed by the first variants of each, two at most, and by no others.

    `a~2` is the second variant of `a`. Variants are prepared data in the folder beside the data's,
    here `geo-variants`.
    """
    options = DataOptions(data=str(tmp_path / "geo"), split="test")
    with pytest.raises(UserError, match=r"there is no folder .*geo-variants'; make it with"):
        add_variants(loaded_problems("a", "b"), options, prompt=None, n_per_problem=2)
    (tmp_path / "geo-variants").mkdir()
    prepared_variants = loaded_problems("a~1", "a~2", "a~3", "b~1", "c~1", "d")
    monkeypatch.setattr(variants, "load_prepared", lambda options, prompt: prepared_variants)
    with_variants = add_variants(loaded_problems("a", "b"), options, prompt=None, n_per_problem=2)
    assert [problem.pid for problem in with_variants.problems] == ["a", "b", "a~1", "a~2", "b~1"]
    assert (
        with_variants.data_hash
        != add_variants(loaded_problems("a", "b"), options, prompt=None, n_per_problem=1).data_hash
    )
    with pytest.raises(UserError, match="has no variant of these problems"):
        add_variants(loaded_problems("x"), options, prompt=None, n_per_problem=2)


def test_originals_and_variants_are_compared_problem_by_problem() -> None:
    """The lines compare the originals that have variants with these; other problems do not count.

    Two of the originals `a`, `b` and `c` are right, and three of their six variants.
    """
    right_by_pid = {"a": 1, "b": 1, "c": 0, "alone": 0}
    right_by_pid |= {"a~1": 1, "a~2": 1, "b~1": 0, "b~2": 1, "c~1": 0, "c~2": 0}
    answers = [graded_answer(pid, is_right) for pid, is_right in right_by_pid.items()]

    lines = variant_lines(answers)

    assert lines[0] == "originals with variants: 66.7 % right, 3 problems"
    assert lines[1] == (
        "variants: 50.0 % right on average, 6 variants; all of a problem's in 33.3 %"
    )
    assert lines[2].startswith("originals - variants: +16.7 points, 95 % [+0.0, +50.0] (paired")
    assert variant_lines([graded_answer("a", right=1)]) == []
