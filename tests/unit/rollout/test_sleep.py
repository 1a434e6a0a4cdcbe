"""When the engine sleeps and is sent weights.

No CPU engine can sleep, so vLLM's own calls are counted in its place.
"""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import TrainerState
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from adora_vl.config.blocks import RolloutOptions
from adora_vl.doctor.engine import check_runner
from adora_vl.record.phases import PhaseClock
from adora_vl.rollout import engine as engine_module
from adora_vl.rollout import engine_weights
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import EngineSettings
from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.rollout.samplers import VLLMSampler
from adora_vl.rollout.weight_sync import runner_version, zero_discarded_buffers
from adora_vl.training.generation_logps import GenerationLogps
from adora_vl.training.generation_sampler import GenerationSampler
from adora_vl.training.old_logps import OldLogps
from adora_vl.utils.launch import prepare_engine_environment
from tests.support.step_context import step_context

prepare_engine_environment()

from vllm import LLM  # noqa: E402
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Qwen3VL  # noqa: E402
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu.mm.rope import RopeState  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2  # noqa: E402
from vllm.v1.worker.gpu.model_states.default import DefaultModelState  # noqa: E402

from adora_vl.rollout.llm import PolicyLLM  # noqa: E402

ASKS = [SamplingRequest(prompt_ids=[1], images=[], group=0)] * 2


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A colocated engine in sleep mode that sleeps; `did` notes what is asked of vLLM, in order."""
    did: list[str] = []
    answers = [
        SimpleNamespace(token_ids=[7], logprobs=None, index=number, finish_reason="stop")
        for number in (0, 1)
    ]

    def generate(self: Any, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        did.append("generate")
        return [SimpleNamespace(prompt_token_ids=[1], outputs=answers) for _ in prompts]

    monkeypatch.setattr(LLM, "generate", generate)
    monkeypatch.setattr(LLM, "sleep", lambda self, level: did.append("sleep"))
    monkeypatch.setattr(LLM, "wake_up", lambda self, tags: did.append(f"wake {tags[0]}"))
    monkeypatch.setattr(
        engine_weights, "push_weights", lambda *_, **__: len(did.__iadd__(["sync"]))
    )
    monkeypatch.setattr(
        engine_weights, "zero_discarded_buffers", lambda llm: did.append("zero scratch")
    )
    monkeypatch.setattr(engine_weights, "reset_caches", lambda llm: None)
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    engine: Any = object.__new__(AdoraVLLMGeneration)
    engine.__dict__.update(
        mode="colocate",
        enable_sleep_mode=True,
        _engine_has_all_parameters=False,
        _llm_weights_sleeping=True,
        model=nn.Linear(1, 1),
        _timed=nullcontext,
        image_token_id=None,
        tensor_parallel_size=1,
        logprobs=0,
        generation_kwargs={},
        structured_outputs_regex=None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=4,
        accelerator=SimpleNamespace(process_index=0),
        did=did,
        llm=object.__new__(PolicyLLM),
    )
    engine.llm.model_config = SimpleNamespace(max_model_len=9)
    return engine


def sampling_generation(engine: Any, **changed: Any) -> AbstractContextManager[None]:
    """Return the context in which a generation with dynamic sampling is sampled.

    `changed`: replaces some of `facts`, from which the trainer decides whether the engine may stay
    awake between the batches of a generation.
    """
    facts: dict[str, Any] = {"tries": 2, "old_pass": False, "beta": 0.0}
    facts |= changed
    context = step_context(
        adora_rollouts=RolloutOptions(refill=facts["tries"]),
        adora_stock_step=["skip_old_pass"] if facts["old_pass"] else False,
        steps_per_generation=2,
        beta=facts["beta"],
    )
    logps: Any = object.__new__(GenerationLogps)
    logps.__dict__.update(context=context, old_logps=OldLogps(context, has_dropout=False))
    generation_sampler: Any = object.__new__(GenerationSampler)
    generation_sampler.context = context
    sampler = SimpleNamespace(awake=engine.staying_awake)
    generation_sampler.group_sampler = SimpleNamespace(sampler=sampler)
    awake: AbstractContextManager[None] = generation_sampler.keeping_engine_awake(
        logps.makes_passes
    )
    return awake


def test_the_batches_of_dynamic_sampling_need_one_sync(engine):
    with sampling_generation(engine):
        for _ in range(3):
            engine.sample(ASKS)
    assert engine.did.count("sync") == 1
    assert engine.did.count("generate") == 3
    assert engine.did[-1] == "sleep"
    assert engine.did.count("sleep") == 1
    engine.did.clear()
    engine.sample(ASKS)  # of the next step, outside of the context
    assert engine.did == [
        "wake weights",
        "zero scratch",
        "sync",
        "wake kv_cache",
        "generate",
        "sleep",
    ]


@pytest.mark.parametrize("batches", [0, 3], ids=["each step", "dynamic sampling"])
def test_the_clock_says_what_waking_syncing_and_sleeping_took(engine, batches, monkeypatch):
    """Each of vLLM's calls takes one second here: the clock reads how many were made."""
    clock = PhaseClock(print, lambda: float(len(engine.did)), wait=lambda: None, sleep_mode=True)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    monkeypatch.setattr(engine_module, "refuse_on_cpu", lambda config, sleep_mode: None)
    engine._timed = clock.phase
    engine.model.config = None
    engine.settings = EngineSettings()
    engine._init_vllm()
    clock.enter_phase("policy")
    with sampling_generation(engine, tries=batches):
        for _ in range(batches or 2):
            with clock.phase("rollout"):
                engine.sample(ASKS)
    clock.leave_phase()
    syncs = 1 if batches else 2  # each writes zeros into positions too
    seconds_by_phase = {
        "rollout": batches or 2,
        "sync": 2 * syncs,
        "wake": 2 * syncs,
        "sleep": syncs,
    }
    if batches:
        seconds_by_phase["wake"] += (
            batches - 1
        )  # TRL asks for the memory of the caches again, which are there
    assert clock.take_seconds() == {
        **dict.fromkeys(("grading", "policy", "other"), 0),
        **seconds_by_phase,
    }


def test_it_sleeps_as_well_where_the_batches_end_in_an_error(engine):
    with pytest.raises(RuntimeError), sampling_generation(engine):
        engine.sample(ASKS)
        raise RuntimeError
    assert engine.did[-1] == "sleep"
    assert engine._llm_weights_sleeping


def test_it_sleeps_after_each_where_the_policy_makes_a_pass_between(engine, subtests):
    """The policy's pass needs the memory of the engine, so the engine sleeps between two batches."""
    for changed in ({"old_pass": True}, {"beta": 0.01}, {"tries": 0}):
        with subtests.test(str(changed)):
            engine.did.clear()
            with sampling_generation(engine, **changed):
                for _ in range(2):
                    engine.sample(ASKS)
            assert engine.did.count("sync") == 2
            assert engine.did.count("sleep") == 2


def test_the_weights_of_a_step_are_synced_once(engine):
    """Several parts of a step may ask for it, as sampling ahead and the measure of drift do."""
    state = TrainerState()
    images = cast("Any", SimpleNamespace(cache=None))
    sampler = VLLMSampler(step_context(state=state), images, engine)
    for state.global_step in (3, 3, 4, 4):
        sampler.sync_weights()
    assert engine.did.count("sync") == 2


def test_without_sleep_mode_nothing_sleeps(engine):
    engine.enable_sleep_mode = engine._llm_weights_sleeping = False
    with sampling_generation(engine):
        engine.sample(ASKS)
    assert engine.did == ["generate"]


def around(runner: Any) -> Any:
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


def test_the_positions_of_model_runner_v2_are_zero_again_after_sleep():
    """The objects are of vLLM's own classes, made without their constructors, which need a GPU."""
    runner = object.__new__(RunnerV2)
    state = object.__new__(DefaultModelState)
    rope = object.__new__(RopeState)
    runner.model_state = state
    state.rope_state = rope
    rope.positions = torch.full((3, 9), 2**40)
    zero_discarded_buffers(around(runner))
    assert not rope.positions.any()
    state.rope_state = None  # a model that reads text only
    zero_discarded_buffers(around(runner))
    zero_discarded_buffers(around(object.__new__(CPUModelRunner)))


def test_what_qwen3_vl_adds_to_its_layers_is_zero_again_after_sleep():
    """A step without an image adds what it finds there to every token."""
    runner = object.__new__(CPUModelRunner)
    model = object.__new__(Qwen3VL)
    nn.Module.__init__(model)
    model.deepstack_input_embeds = [torch.full((9, 4), float("nan")) for _ in range(3)]
    model.deepstack_num_level = len(model.deepstack_input_embeds)
    runner.model = model
    zero_discarded_buffers(around(runner))
    assert not any(added.any() for added in model._get_deepstack_input_embeds(9).tensors.values())
    assert not dict(model.named_buffers()), "else sleep keeps them, and this is superfluous"


def test_the_model_runner_is_told_by_its_class():
    assert runner_version(around(object.__new__(RunnerV2))) == "V2"
    assert runner_version(around(object.__new__(CPUModelRunner))) == "V1"
    for version, hint in [
        ("V2", "V2, VLLM_USE_V2_MODEL_RUNNER=0 chooses V1"),
        ("V1", "V1"),
    ]:
        pair = SimpleNamespace(engine=SimpleNamespace(model_runner=version))
        assert check_runner(cast("Any", pair)).detail == hint
