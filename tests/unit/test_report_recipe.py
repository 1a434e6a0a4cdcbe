"""A run's recipe in one phrase: every method by its own name, and whatever makes it another experiment."""

from __future__ import annotations

import pytest

from adora_vl.advantage import METHODS
from adora_vl.report.recipe import NAMES, recipe_of

ADORA = {"adora_mode": "attenuation", "adora_factor": 0.1}
NEUTRAL = {
    "adora_noisy_rollouts": 0.0, "adora_replay_groups": 0, "adora_visual_tokens": 1.0, "adora_visual_scale_min": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "ADORA attenuation, factor 0.1"),
        ({"adora_method": "adora", "adora_mode": "off"}, "GRPO"),
        ({"adora_method": "grpo"}, "GRPO"),
        ({"adora_method": "dapo + adora"}, "DAPO + ADORA attenuation, factor 0.1"),
        ({"adora_method": "dapo+adora", "adora_mode": "off", "loss_type": "dapo"}, "DAPO"),
        ({"adora_method_options": {"mode": "off"}}, "GRPO"),
        ({"adora_method_options": '{"factor": 0.5}'}, "ADORA attenuation, factor 0.5"),
        ({"adora_method_options": {"assign": "random"}}, "ADORA attenuation, factor 0.1, assign random"),
        ({"adora_method_options": {"steps": [0, 30]}}, "ADORA attenuation, factor 0.1, steps [0, 30]"),
        ({"adora_method": "grpo", "loss_type": "sapo"}, "GRPO, SAPO loss"),
        ({"adora_method": "grpo", "adora_noisy_rollouts": 0.5}, "GRPO, noisy rollouts 0.5"),
        ({"adora_method": "grpo", "adora_replay_groups": 64}, "GRPO, replay of 64 groups"),
        (
            {"adora_method": "rrb", "adora_visual_tokens": 0.4, "adora_visual_scale_min": 0.9},
            "RRB, visual tokens 0.4, visual scale from 0.9",
        ),
    ],
)
def test_a_recipe_names_what_was_done(config, expected):
    assert recipe_of({**ADORA, **NEUTRAL, **config}) == expected
    assert recipe_of({**ADORA, **config}) == expected  # of a run before these keys were there


def test_every_method_has_a_name():
    assert NAMES.keys() == METHODS.keys() - {"adora"}
