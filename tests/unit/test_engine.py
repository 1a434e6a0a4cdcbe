"""What the engine is asked for, without starting one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from adora_vl.rollout.engine import AdoraVLLMGeneration, EngineSettings
from adora_vl.rollout.environment import prepare_engine_environment

prepare_engine_environment()

from vllm import SamplingParams  # noqa: E402

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


@pytest.mark.parametrize(
    ("mode", "asked", "detokenize"),
    [
        ("colocate", None, False),
        ("colocate", {"top_k": 3}, False),
        ("colocate", {"stop": ["</answer>"]}, None),  # looked for in the text
        ("colocate", {"detokenize": True}, True),
        ("server", None, None),
    ],
    ids=str,
)
def test_rollouts_are_not_turned_into_text_by_the_engine_unless_it_stops_at_a_string(
    mode, asked, detokenize, monkeypatch
):
    monkeypatch.setattr(AdoraVLLMGeneration, "_init_vllm", lambda self: None)
    tokenizer = SimpleNamespace(get_vocab=lambda: {})
    given = {"model": None, "accelerator": Accelerator(cpu=True), "processing_class": tokenizer}
    engine = AdoraVLLMGeneration(**given, mode=mode, generation_kwargs=asked, settings=EngineSettings())
    assert engine.generation_kwargs.get("detokenize") is detokenize
    SamplingParams(**engine.generation_kwargs)  # vLLM refuses strings to stop at without a text
