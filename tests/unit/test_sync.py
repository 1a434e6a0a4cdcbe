"""Weights on their way into an engine: one at a time, and still there when the trainer's own is gone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from adora_vl.rollout.sync import push_weights

NAMES = ["first", "second", "third"]


class Runner:
    """What vLLM's model runners do with tensors: the CPU's keeps them until a layer is complete, the GPU's copies."""

    def __init__(self, device: str, events: list[str]) -> None:
        self.device, self.events = torch.device(device), events
        self.model = self
        self.got: dict[str, Tensor] = {}

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights_iterator:
            self.events.append(f"engine takes {name}")
            self.got[name] = tensor

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.events.append(f"engine takes {name}")
            self.got[name] = tensor.clone()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gathered_weight_is_taken_before_the_next_is_gathered_and_outlives_it(device):
    events: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(NAMES):
            events.append(f"gather {name}")
            whole = torch.full((3,), float(number))
            yield name, whole
            whole.fill_(torch.nan)  # as ZeRO-3 frees what it has gathered

    runner = Runner(device, events)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
    assert push_weights(llm, gathered()) == len(NAMES)
    assert events == [event for name in NAMES for event in (f"gather {name}", f"engine takes {name}")]
    assert {name: tensor.tolist() for name, tensor in runner.got.items()} == {
        name: [float(number)] * 3 for number, name in enumerate(NAMES)
    }
