"""What the engine is asked for, without starting one."""

from __future__ import annotations

import pytest

from adora_vl.rollout.engine import AdoraVLLMGeneration

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({}, "raw_logprobs"),
        ({"top_k": -1, "min_p": 0.0}, "raw_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9}, "processed_logprobs"),
        ({"top_k": 20}, "processed_logprobs"),
        ({"min_p": 0.1}, "processed_logprobs"),
        ({"repetition_penalty": 1.05}, "processed_logprobs"),
        ({"_bans_only": False}, "processed_logprobs"),
    ],
    ids=str,
)
def test_log_probabilities_are_the_trainers_own_where_nothing_but_the_bans_changes_the_sampling(sampling, mode):
    engine = object.__new__(AdoraVLLMGeneration)
    engine.__dict__.update({**NEUTRAL, "_bans_only": True, **sampling})
    assert engine._logprobs_mode() == mode
