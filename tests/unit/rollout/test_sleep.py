"""When an engine inside the training process sleeps, and when it is sent weights.

An engine that sleeps has freed its memory for the policy. No engine on a CPU can sleep, so vLLM's
methods are replaced by fakes that record their names, and the tests compare the recorded calls.
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
from adora_vl.record import phases as phases_module
from adora_vl.record.phases import PhaseClock
from adora_vl.rollout import engine as engine_module
from adora_vl.rollout import engine_weights
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.rollout.samplers import VLLMSampler
from adora_vl.rollout.weight_sync import runner_version, zero_discarded_buffers
from adora_vl.training.generation_logps import GenerationLogps
from adora_vl.training.generation_sampler import GenerationSampler
from adora_vl.training.old_logps import OldLogps
from adora_vl.utils.launch import prepare_engine_environment
from tests.support.stand_ins import settings_of_engine
from tests.support.step_context import step_context

prepare_engine_environment()

from vllm import LLM  # noqa: E402
from vllm.model_executor.models.qwen3_vl import (  # noqa: E402
    Qwen3VLForConditionalGeneration as Qwen3VL,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu.mm.rope import RopeState  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2  # noqa: E402
from vllm.v1.worker.gpu.model_states.default import DefaultModelState  # noqa: E402

from adora_vl.rollout.llm import PolicyLLM  # noqa: E402

# The two rollouts of one group, which become one request of vLLM.
REQUESTS = [SamplingRequest(prompt_ids=[1], images=[], merge_key=0)] * 2
# What the engine reads of a run beside its sleep. No test here looks at these.
SAMPLING_ATTRIBUTES: dict[str, Any] = {
    "image_token_id": None,
    "tensor_parallel_size": 1,
    "logprobs": 0,
    "generation_kwargs": {},
    "structured_outputs_regex": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_completion_length": 4,
}


class FakeVLLMCalls:
    """Fakes of vLLM's methods; each call adds its name to `names`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def generate(
        self, prompts: list[Any], sampling_params: object, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        """Answer each request with two rollouts of one token."""
        self.names.append("generate")
        rollouts = [
            SimpleNamespace(token_ids=[7], logprobs=None, index=number, finish_reason="stop")
            for number in (0, 1)
        ]
        return [SimpleNamespace(prompt_token_ids=[1], outputs=rollouts) for _ in prompts]

    def sleep(self, level: int) -> None:
        """Record that the engine goes to sleep."""
        self.names.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        """Record which memory comes back: that of the weights, or of the caches."""
        self.names.append(f"wake {tags[0]}")

    def push_weights(self, *_: object, **__: object) -> None:
        """Record that the engine gets weights."""
        self.names.append("sync")

    def zero_discarded_buffers(self, llm: object) -> None:
        """Record that buffers which sleep has discarded are filled with zeros."""
        self.names.append("zero buffers")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a colocated engine in sleep mode, asleep; `engine.calls` has the calls of vLLM."""
    calls = FakeVLLMCalls()
    monkeypatch.setattr(LLM, "generate", staticmethod(calls.generate))
    monkeypatch.setattr(LLM, "sleep", staticmethod(calls.sleep))
    monkeypatch.setattr(LLM, "wake_up", staticmethod(calls.wake_up))
    monkeypatch.setattr(engine_weights, "push_weights", calls.push_weights)
    monkeypatch.setattr(engine_weights, "zero_discarded_buffers", calls.zero_discarded_buffers)
    monkeypatch.setattr(engine_weights, "reset_caches", lambda llm: None)
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    engine: Any = object.__new__(AdoraVLLMGeneration)
    # The constructors of both need a model and a GPU.
    engine.__dict__.update(
        SAMPLING_ATTRIBUTES,
        mode="colocate",
        enable_sleep_mode=True,
        _llm_weights_sleeping=True,
        _engine_has_all_parameters=False,
        _count_seconds=nullcontext,
        model=nn.Linear(1, 1),
        accelerator=SimpleNamespace(process_index=0),
        calls=calls,
        llm=object.__new__(PolicyLLM),
    )
    engine.llm.model_config = SimpleNamespace(max_model_len=9)
    return engine


def sampling_generation(
    engine: Any, *, refill: int = 2, has_old_pass: bool = False, beta: float = 0.0
) -> AbstractContextManager[None]:
    """Return the context in which the trainer samples all batches of a generation.

    By these arguments it decides whether the engine stays awake between the batches.

    Args:
        engine: the engine.
        refill: how many further batches dynamic sampling may need.
        has_old_pass: whether the policy makes a pass over each batch for its old log-probabilities.
        beta: the coefficient of the KL term, for which the reference makes such a pass.
    """
    context = step_context(
        adora_rollouts=RolloutOptions(refill=refill),
        adora_stock_step=["skip_old_pass"] if has_old_pass else False,
        steps_per_generation=2,
        beta=beta,
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
    """While three batches of a generation are sampled the engine stays awake; then it sleeps."""
    with sampling_generation(engine):
        for _ in range(3):
            engine.sample(REQUESTS)
    calls = engine.calls.names
    assert calls.count("sync") == 1
    assert calls.count("generate") == 3
    assert calls[-1] == "sleep"
    assert calls.count("sleep") == 1
    calls.clear()
    engine.sample(REQUESTS)  # outside of the context, as in a later step
    assert calls == [
        "wake weights",
        "zero buffers",
        "sync",
        "wake kv_cache",
        "generate",
        "sleep",
    ]


# What each phase has after two batches without dynamic sampling, and after three with it. A batch
# for which the engine wakes takes 1 s of sampling, 2 s of sync (zeros and weights), 2 s of waking
# (weights and caches) and 1 s of going to sleep. With dynamic sampling it wakes and sleeps once,
# but TRL asks for the memory of the caches before every batch.
SECONDS_BY_SAMPLING = {
    "each batch": (0, 2, {"rollout": 2, "sync": 4, "wake": 4, "sleep": 2}),
    "dynamic sampling": (3, 3, {"rollout": 3, "sync": 2, "wake": 4, "sleep": 1}),
}


@pytest.mark.parametrize("sampling", SECONDS_BY_SAMPLING)
def test_the_clock_says_what_waking_syncing_and_sleeping_took(engine, sampling, monkeypatch):
    """Each of vLLM's calls takes one second: the clock's time is the number of calls so far."""
    refill, batches, seconds_by_phase = SECONDS_BY_SAMPLING[sampling]
    monkeypatch.setattr(phases_module, "perf_counter", lambda: float(len(engine.calls.names)))
    clock = PhaseClock(print, sleep_mode=True, evaluates=False, memory=None)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    monkeypatch.setattr(engine_module, "refuse_on_cpu", lambda config, sleep_mode: None)
    engine._count_seconds = clock.phase
    engine.model.config = None
    engine.settings = settings_of_engine()
    engine._init_vllm()
    clock.enter_phase("policy")
    with sampling_generation(engine, refill=refill):
        for _ in range(batches):
            with clock.phase("rollout"):
                engine.sample(REQUESTS)
    clock.leave_phase()
    other_phases = {"grading": 0, "policy": 0, "other": 0}
    assert clock.pop_seconds() == {**other_phases, **seconds_by_phase}


def test_the_engine_sleeps_also_where_the_batches_end_in_an_error(engine):
    """An error while a generation is sampled puts the engine to sleep before it is raised.

    The policy needs the engine's memory when the run saves its last checkpoint, for example.
    """
    with pytest.raises(RuntimeError), sampling_generation(engine):
        engine.sample(REQUESTS)
        raise RuntimeError
    assert engine.calls.names[-1] == "sleep"
    assert engine._llm_weights_sleeping


def test_the_engine_sleeps_after_each_batch_where_the_policy_makes_a_pass_between(engine, subtests):
    """The policy's pass needs the memory of the engine, so the engine sleeps between two batches.

    Without refill a generation has one batch, so nothing keeps the engine awake after it.
    """
    cases: list[dict[str, Any]] = [{"has_old_pass": True}, {"beta": 0.01}, {"refill": 0}]
    for arguments in cases:
        with subtests.test(str(arguments)):
            engine.calls.names.clear()
            with sampling_generation(engine, **arguments):
                for _ in range(2):
                    engine.sample(REQUESTS)
            assert engine.calls.names.count("sync") == 2
            assert engine.calls.names.count("sleep") == 2


def test_the_weights_of_a_step_are_synced_once(engine):
    """A second request for a sync in the same step sends nothing.

    Several parts of a step may ask for it, as sampling ahead and the drift check do.
    """
    state = TrainerState()
    images = cast("Any", SimpleNamespace(cache=None))
    sampler = VLLMSampler(step_context(state=state), images, engine)
    for step in (3, 3, 4, 4):
        state.global_step = step
        sampler.sync_weights()
    assert engine.calls.names.count("sync") == 2


def test_without_sleep_mode_nothing_sleeps(engine):
    """Without sleep mode the engine is neither woken nor put to sleep: it only samples."""
    engine.enable_sleep_mode = False
    engine._llm_weights_sleeping = False
    with sampling_generation(engine):
        engine.sample(REQUESTS)
    assert engine.calls.names == ["generate"]


def llm_with_runner(runner: object) -> Any:
    """Return vLLM's engine with this model runner, where our code looks for it."""
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


def test_the_positions_of_model_runner_v2_are_zero_again_after_sleep():
    """A wake-up zeroes the positions that model runner V2 zeroes only when it is built.

    Sleep has discarded their memory, so anything may be in it. The objects are of vLLM's own
    classes, made without their constructors, which need a GPU.
    """
    runner = object.__new__(RunnerV2)
    state = object.__new__(DefaultModelState)
    rope = object.__new__(RopeState)
    runner.model_state = state
    state.rope_state = rope
    rope.positions = torch.full((3, 9), 2**40)  # whatever the memory has had before
    zero_discarded_buffers(llm_with_runner(runner))
    assert not rope.positions.any()
    # There is nothing to fill in a model that reads text only, nor in the other runner.
    state.rope_state = None
    zero_discarded_buffers(llm_with_runner(runner))
    zero_discarded_buffers(llm_with_runner(object.__new__(CPUModelRunner)))


def test_what_qwen3_vl_adds_to_its_layers_is_zero_again_after_sleep():
    """A wake-up zeroes the buffers from which Qwen3-VL's first layers add features of images.

    They have room for nine tokens here. A step without an image adds what it finds there to every
    token, and NaN would spoil all.
    """
    runner = object.__new__(CPUModelRunner)
    model = object.__new__(Qwen3VL)
    nn.Module.__init__(model)
    model.deepstack_input_embeds = [torch.full((9, 4), float("nan")) for _ in range(3)]
    model.deepstack_num_level = len(model.deepstack_input_embeds)
    runner.model = model
    zero_discarded_buffers(llm_with_runner(runner))
    assert not any(added.any() for added in model._get_deepstack_input_embeds(9).tensors.values())
    assert not dict(model.named_buffers()), "else sleep keeps them, and this is superfluous"


def test_the_model_runner_is_told_by_its_class():
    """The version of vLLM's model runner, V1 or V2, is read from its class.

    The command `doctor` prints it; for V2 it also says which environment variable chooses V1.
    """
    assert runner_version(llm_with_runner(object.__new__(RunnerV2))) == "V2"
    assert runner_version(llm_with_runner(object.__new__(CPUModelRunner))) == "V1"
    for version, hint in [
        ("V2", "V2, VLLM_USE_V2_MODEL_RUNNER=0 chooses V1"),
        ("V1", "V1"),
    ]:
        pair = SimpleNamespace(engine=SimpleNamespace(model_runner=version))
        assert check_runner(cast("Any", pair)).detail == hint
