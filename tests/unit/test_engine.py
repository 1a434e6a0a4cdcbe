"""What the engine is asked for, without starting one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import EngineSettings
from adora_vl.rollout.environment import prepare_engine_environment

prepare_engine_environment()

from vllm import LLM, SamplingParams  # noqa: E402

from adora_vl.rollout.llm import GroupingLLM  # noqa: E402

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


def test_the_doctor_samples_with_settings_of_its_own_and_the_run_gets_its_own_back():
    engine = object.__new__(AdoraVLLMGeneration)
    settings = {
        "position": (1, "train/0"),
        "max_completion_length": 64,
        "temperature": 0.7,
        "generation_kwargs": {"a": 1},
    }
    engine.__dict__.update(settings)
    with pytest.raises(RuntimeError), engine.sampling(temperature=0.0, allowed_token_ids=[3]):
        with engine.sampling(position=(2, "check"), max_tokens=1):
            inside = {name: getattr(engine, name) for name in settings}
        assert engine.max_completion_length == 64 and engine.temperature == 0.0
        raise RuntimeError
    further = {"a": 1, "allowed_token_ids": [3]}
    assert list(inside.values()) == [(2, "check"), 1, 0.0, further]
    assert {name: getattr(engine, name) for name in settings} == settings


def test_the_engine_asks_once_per_prompt_only_while_it_is_told_to(monkeypatch):
    asked: list[tuple[object, object]] = []

    def generate(self, prompts, sampling_params, **kwargs):
        asked.append((prompts, sampling_params))
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(index=i, seed=p.seed) for i in range(p.n)]) for p in params]

    monkeypatch.setattr(LLM, "generate", generate)
    llm = object.__new__(GroupingLLM)
    rows, params = [{"prompt_token_ids": [1]}] * 4, SamplingParams()
    with pytest.raises(RuntimeError), llm.asking([0, 0, 1, 1], [5, 6, 8, 9], together=True):
        outputs = llm.generate(rows, sampling_params=params, use_tqdm=False)
        raise RuntimeError
    assert len(outputs) == 4 and [(p.n, p.seed) for p in asked[0][1]] == [(2, 5), (2, 8)]
    assert len(llm.generate(rows, sampling_params=params)) == 4 and asked[1] == (rows, params), "as vLLM's own"
