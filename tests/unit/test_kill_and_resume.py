"""The comparison of a killed run with a whole one sees every kind of difference."""

from __future__ import annotations

import copy

import pytest

from benchmarks.kill_and_resume import PHASES, compare, place_of

FACTS = {
    "steps": {1: {"loss": 0.5, "reward": 0.1}, 2: {"loss": 0.4}},
    "rollouts": {"completions_00001": "ab"},
    "weights": "w",
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f: f["steps"][1].update(loss=0.5000001), "step 1: loss is 0.5 and 0.5000001 (1 figures differ)"),
        (lambda f: f["steps"].pop(2), "step 2: loss is 0.4 and None (1 figures differ)"),
        (lambda f: f["rollouts"].update(completions_00001="xy"), "rollouts of completions_00001"),
        (lambda f: f.update(weights="v"), "the final weights"),
    ],
)
def test_a_difference_is_named(change, line):
    other = copy.deepcopy(FACTS)
    assert compare(FACTS, other) == []
    change(other)
    assert compare(FACTS, other) == [line]


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_a_place_to_be_killed_in(phase):
    _, owner, name = place_of(phase)
    assert callable(getattr(owner, name))
