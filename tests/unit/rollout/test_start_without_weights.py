"""An engine with sleep mode starts with dummy weights, and its first sync brings the real ones.

A CPU engine cannot sleep, and it repacks its layers after loading. So the sync happens here while
the engine loads, before that repacking, and streams tensors as on a GPU.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from adora_vl.builtin.processor import build_processor
from adora_vl.builtin.tiny_vl import build_model
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.weight_sync import push_weights
from adora_vl.utils.errors import RolloutError
from adora_vl.utils.launch import prepare_engine_environment
from tests.support.stand_ins import settings_of_engine

prepare_engine_environment()

from vllm import SamplingParams  # noqa: E402

from adora_vl.rollout import llm as llm_module  # noqa: E402
from adora_vl.rollout.llm import LOAD_WITH_FIRST_SYNC, FirstSyncLoader, PolicyLLM  # noqa: E402

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 4096,
    "enable_chunked_prefill": False,
    "limit_mm_per_prompt": {"video": 0},
    "gpu_memory_utilization": 0.1,
}


def llm_with_model(model: Any) -> Any:
    """Return a fake LLM around a model; its runner says that it is on a GPU."""
    runner = SimpleNamespace(device=torch.device("cuda"), model=model)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


def model_tensors(llm: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of an engine's model by name."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return {
        **{name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)},
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def greedy_answer(llm: Any) -> list[Any]:
    """Return the tokens and log-probabilities of a greedy answer about an image."""
    image = {"image": Image.new("RGB", (56, 84), (200, 30, 90))}
    prompt = {
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>Find x.",
        "multi_modal_data": image,
    }
    greedy = SamplingParams(
        temperature=0,
        max_tokens=8,
        logprobs=0,
        ignore_eos=True,
    )
    (output,) = llm.generate([prompt], sampling_params=greedy, use_tqdm=False)
    return [
        [(token, candidate.logprob) for token, candidate in candidates.items()]
        for candidates in output.outputs[0].logprobs
    ]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("tied", [False, True])
def test_after_the_first_sync_an_engine_equals_one_that_read_the_checkpoint(
    tied, tmp_path, monkeypatch
):
    """An engine that starts without weights gets them by its first sync, to the last tensor.

    A first sync in which any tensor is missing is refused.
    """
    processor = build_processor(["Find x."])
    policy = build_model(processor.tokenizer)
    if tied:
        policy.config.tie_word_embeddings = policy.config.text_config.tie_word_embeddings = True
        policy.tie_weights()
    policy.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    engine_with_checkpoint = PolicyLLM(model=str(tmp_path), **OPTIONS)

    load_dummy_values = FirstSyncLoader.load_weights
    policy_tensors = [(name, parameter.data) for name, parameter in policy.named_parameters()]

    def fill_and_sync(self: Any, model: Any, config: Any) -> None:
        """Load dummy values, try three syncs that lack a tensor, and then make a whole one."""
        load_dummy_values(self, model, config)
        for number in (0, len(policy_tensors) // 2, len(policy_tensors) - 1):
            incomplete = [*policy_tensors[:number], *policy_tensors[number + 1 :]]
            with pytest.raises(RolloutError, match="got no value in a sync of the whole model"):
                push_weights(llm_with_model(model), iter(incomplete), is_whole_model=True)
        load_dummy_values(self, model, config)
        push_weights(llm_with_model(model), iter(policy_tensors), is_whole_model=True)

    monkeypatch.setattr(FirstSyncLoader, "load_weights", fill_and_sync)
    engine_with_sync = PolicyLLM(model=str(tmp_path), load_format=LOAD_WITH_FIRST_SYNC, **OPTIONS)
    expected_tensors = model_tensors(engine_with_checkpoint)
    synced_tensors = model_tensors(engine_with_sync)
    assert "visual.input_norm.weight" in expected_tensors
    assert expected_tensors.keys() == synced_tensors.keys()
    assert [
        name
        for name in expected_tensors
        if not torch.equal(expected_tensors[name], synced_tensors[name])
    ] == []
    assert greedy_answer(engine_with_checkpoint) == greedy_answer(engine_with_sync)


def test_only_an_engine_that_sleeps_and_can_do_without_starts_without_weights(
    tmp_path, monkeypatch
):
    """An engine with sleep mode is built without weights, unless its checkpoint copies a tied head.

    Such an engine gets all weights at each sync, so it need not read the checkpoint. Where that has
    a copy of the tied head, vLLM has to read both before it ties them.
    """
    monkeypatch.setattr(llm_module, "PolicyLLM", lambda **arguments: arguments)
    weight = torch.zeros(2, 2)
    for name, checkpoint_tensors in (
        ("plain", {"embed.weight": weight}),
        ("copied", {"lm_head.weight": weight}),
    ):
        (tmp_path / name).mkdir()
        save_file(checkpoint_tensors, tmp_path / name / "model.safetensors")
    for sleeps, tied, checkpoint in product((True, False), (True, False), ("plain", "copied")):
        engine: Any = object.__new__(AdoraVLLMGeneration)
        config = SimpleNamespace(tie_word_embeddings=tied)
        model = SimpleNamespace(
            dtype=torch.float32, config=config, name_or_path=str(tmp_path / checkpoint)
        )
        engine.__dict__.update(model=model, enable_sleep_mode=sleeps)
        # What the engine is built with besides, at its usual values.
        engine.__dict__.update(
            image_token_id=None,
            _config_generation_kwargs={},
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=None,
            repetition_penalty=1.0,
            settings=settings_of_engine(),
            tensor_parallel_size=1,
        )
        vllm_arguments = engine._build_llm(max_model_len=64)
        starts_without_weights = sleeps and not (tied and checkpoint == "copied")
        expected_format = LOAD_WITH_FIRST_SYNC if starts_without_weights else None
        assert vllm_arguments.get("load_format") == expected_format
