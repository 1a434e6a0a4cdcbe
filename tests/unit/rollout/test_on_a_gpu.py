"""What a colocated engine needs of a GPU, as far as a machine without one can test it."""

import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adora_vl.record.gpu_memory import GpuMemoryCallback
from adora_vl.record.phases import PhaseClock
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import disable_tf32_of_float32_engine, refuse_taken_card
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB
from adora_vl.utils.launch import prepare_engine_environment


def test_flashinfer_is_not_asked_for_a_sampler_that_no_rollout_uses(monkeypatch):
    """An environment variable switches off FlashInfer's sampler, unless the user has set it."""
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    prepare_engine_environment()
    from vllm import envs

    assert envs.environment_variables["VLLM_USE_FLASHINFER_SAMPLER"]() is False
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    prepare_engine_environment()
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1", "what the user has set stays"


def test_a_float32_engine_multiplies_in_float32(monkeypatch):
    """A float32 engine sets the environment variable that keeps Triton from multiplying in TF32.

    TF32 is less exact. For other dtypes, and where the user has set it, the variable stays.
    """
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for dtype in ("bfloat16", "torch.float16"):
        disable_tf32_of_float32_engine(dtype)
        assert "TRITON_F32_DEFAULT" not in os.environ
    disable_tf32_of_float32_engine("torch.float32")
    assert knobs.language.fp32_default == "ieee"
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    disable_tf32_of_float32_engine("float32")
    assert os.environ["TRITON_F32_DEFAULT"] == "tf32", "what the user has set stays"


class FakeEngine:
    """An engine that records its calls. Parts of it refer back to it, as vLLM's do."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.frozen_base = SimpleNamespace(move_to_device=lambda: calls.append("base"))
        self.llm_engine = SimpleNamespace(engine_core=self, engine=self)

    def wake_up(self) -> None:
        """Record that the memory came back."""
        self.calls.append("wake")

    def shutdown(self) -> None:
        """Record the end."""
        self.calls.append("shutdown")


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_is_woken_before_it_ends_and_leaves_nothing_behind(sleeps):
    """An engine that sleeps is woken first; afterwards nothing refers to the engine any more."""
    calls: list[str] = []
    generation: Any = object.__new__(AdoraVLLMGeneration)
    generation.enable_sleep_mode = sleeps
    generation.llm = FakeEngine(calls)
    engine = weakref.ref(generation.llm)
    generation.shut_down()
    assert calls == [*(["wake"] if sleeps else []), "shutdown", "base"]
    assert generation.llm is None, "a second training finds its memory"
    assert engine() is None, "a second training finds its memory"


def test_a_gpu_without_free_memory_is_refused_before_weights_are_loaded(monkeypatch):
    """A card with less free memory than the colocated engine takes is refused in one line.

    The engine takes 0.65 of 80 GiB, 52 GiB. Free are 60 GiB, which is enough, and then 40.
    """
    config: Any = SimpleNamespace(
        has_colocated_engine=True,
        use_cpu=False,
        vllm_gpu_memory_utilization=0.65,
        device=torch.device("cuda", 0),
    )
    refuse_taken_card(config)  # no card is here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    refuse_taken_card(config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    with pytest.raises(UserError, match=r"0.65 is 52 of 80 GiB, and 40 GiB of this card are free"):
        refuse_taken_card(config)
    for key, value in (
        ("has_colocated_engine", False),
        ("use_cpu", True),
    ):
        other_config: Any = SimpleNamespace(**{**vars(config), key: value})
        refuse_taken_card(other_config)


@pytest.mark.parametrize("sleep_mode", [True, False])
def test_the_memory_of_a_gpu_is_logged_with_the_engine_awake_and_asleep(sleep_mode, monkeypatch):
    """A GPU's memory in use is logged for the rollout and for the policy's learning.

    A fake gather adds 1 GiB as the maximum over the ranks, so each metric is 1 more than this
    GPU's. With an engine that sleeps, the policy's peak is counted from then on.
    """
    free = {"bytes": 80 * GIB}
    peak = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peak["bytes"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(bytes=0))
    logged: list[tuple[str, float]] = []
    memory = GpuMemoryCallback(
        lambda name, value: logged.append((name, value)),
        largest_of_ranks=lambda value: value + 1,
        device=torch.device("cuda", 0),
        sleep_mode=sleep_mode,
    )

    clock = PhaseClock(print, sleep_mode=True, evaluates=False, memory=memory)
    free["bytes"] = 20 * GIB
    peak["bytes"] = 50 * GIB
    if sleep_mode:
        with clock.phase("sleep"):
            free["bytes"] = 70 * GIB
        peak["bytes"] = 19 * GIB
    callback_arguments: Any = (None, None, None)
    memory.on_step_end(*callback_arguments)
    policy_peak = 20.0 if sleep_mode else 51.0
    assert logged == [("memory/rollout", 61.0), ("memory/policy", policy_peak)]
    logged.clear()
    peak["bytes"] = 18 * GIB
    memory.on_step_end(*callback_arguments)
    expected = [("memory/policy", 19.0)]
    if not sleep_mode:
        expected = [("memory/rollout", 61.0), *expected]
    assert logged == expected, "a second step of the generation has no rollouts of its own"
