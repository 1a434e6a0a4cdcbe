"""What the engine is asked for, without starting one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from adora_vl.rollout import sync
from adora_vl.rollout.distinct_rows import kept
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import EngineSettings
from adora_vl.rollout.environment import prepare_engine_environment

prepare_engine_environment()

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.multimodal.hasher import MultiModalHasher  # noqa: E402
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids  # noqa: E402
from vllm.multimodal.processing.inputs import ProcessorInputs  # noqa: E402

from adora_vl.rollout import llm as llm_module  # noqa: E402
from adora_vl.rollout.llm import GroupingLLM, with_known_images  # noqa: E402

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


@pytest.mark.parametrize(
    ("wanted", "on_cpu", "eager"), [(None, True, True), (None, False, False), (False, True, False), (True, False, True)]
)
def test_by_default_the_engine_compiles_on_a_card_alone(wanted, on_cpu, eager, monkeypatch):
    monkeypatch.setattr(sync, "engine_runs_on_cpu", lambda: on_cpu)
    monkeypatch.setattr(llm_module, "GroupingLLM", lambda **arguments: arguments)
    engine = object.__new__(AdoraVLLMGeneration)
    model = SimpleNamespace(dtype=torch.float32)
    engine.__dict__.update(NEUTRAL, model=model, image_token_id=None, _bans_only=True)
    engine.settings = EngineSettings(enforce_eager=wanted)
    assert engine._build_llm(max_model_len=64)["enforce_eager"] is eager


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


def test_vllm_takes_an_image_that_is_kept_without_copying_or_hashing_it(monkeypatch):
    def parsed(prompt):
        items = MultiModalDataParser().parse_mm_data(prompt["multi_modal_data"])
        uuids = parse_mm_uuids(prompt.get("multi_modal_uuids"))
        return items["image"].get(0), ProcessorInputs([1], items, uuids).get_mm_hashes("model", "blake3")

    image = kept(Image.new("RGB", (8, 6), (1, 2, 3)))
    row = {"prompt_token_ids": [1], "multi_modal_data": {"image": image}}
    assert parsed(row)[0] is not image, "vLLM still copies: without this there is nothing to save"
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", None)
    taken, hashes = parsed(with_known_images(row))
    assert taken is image and hashes == {"image": [image.digest]}
    two = {"prompt_token_ids": [1], "multi_modal_data": {"image": [image, image]}}
    assert parsed(with_known_images(two))[1] == {"image": [image.digest] * 2}


def test_images_that_may_be_drawn_on_go_to_vllm_as_they_are():
    plain = Image.new("RGB", (8, 6))
    rows: list[dict[str, Any]] = [
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": [1], "multi_modal_data": {"image": plain}},
    ]
    rows.append({"prompt_token_ids": [1], "multi_modal_data": {"image": [kept(Image.new("RGB", (8, 6))), plain]}})
    assert [with_known_images(row) for row in rows] == rows


def test_other_pixels_another_mode_or_another_size_is_another_image():
    images = [Image.new("RGB", (8, 6)), Image.new("RGB", (6, 8)), Image.new("L", (8, 18)), Image.new("RGB", (8, 6), 1)]
    assert len({kept(image).digest for image in images}) == 4
    assert kept(Image.new("RGB", (8, 6))).digest == kept(Image.new("RGB", (8, 6))).digest


def test_the_ranks_of_a_divided_engine_ask_for_the_same_with_the_seeds_that_whole_engines_get():
    """Ranks 2 and 3 of four, with two groups of four rollouts on each."""

    def asked(rank: int, ranks: int) -> tuple[list[int], list[int]]:
        seen: list[tuple[list[int], list[int]]] = []

        def asking(groups: list[int], seeds: list[int], together: bool) -> Any:
            seen.append((groups, seeds))
            return nullcontext()

        engine: Any = object.__new__(AdoraVLLMGeneration)
        engine.tensor_parallel_size, engine.accelerator = ranks, SimpleNamespace(process_index=rank)
        engine.position, engine.group_requests = (0, "train/3"), True
        engine.llm = SimpleNamespace(asking=asking)
        with engine._asking_once(8, 4):
            return seen[0]

    whole = [asked(rank, 1) for rank in (2, 3)]
    assert asked(2, 2) == asked(3, 2) == tuple(one + other for one, other in zip(*whole, strict=True))
