"""Whatever is computed once gives the losses and gradients of stock TRL's way, on the same rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import launch

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("speed_run.py"))
# Relative to each gradient's norm. Rounding alone, from another order of the same micro-batches, gives 5e-7.
BOUNDS = {"vision": 1e-5, "prompt": 1e-5, "all": 1e-5, "padding": 5e-6}


def speed(folder: Path, config: str, *words: str) -> dict[str, Any]:
    output = folder / "result.json"
    launch(config, SCRIPT, "--output", str(output), *words)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return speed(tmp_path_factory.mktemp("one"), "cpu")


def assert_equal_steps(result: dict[str, Any]) -> None:
    assert all(result["same"]), "the rollouts were not the same"
    for name, loss in zip(result["steps"], result["losses"], strict=True):
        assert loss == pytest.approx(result["losses"][0], rel=1e-6, abs=2e-7), name
    assert max(result["drift"]) < 1e-5


def test_every_switch_keeps_the_loss_and_every_gradient(one_process):
    assert_equal_steps(one_process)
    assert one_process["norms"][0] > 0.05
    for name, distance in zip(one_process["steps"], one_process["distances"], strict=True):
        assert distance <= BOUNDS.get(name, 1e-6), name


def test_the_work_is_really_saved(one_process):
    steps = dict(zip(one_process["steps"], one_process["work"], strict=True))
    # 4 problems, 8 rollouts each; the image of each went through the processor once in the whole run
    assert sum(step["processed"] for step in steps.values()) == 4
    seen = dict(zip(one_process["steps"], one_process["seen_in_step"], strict=True))
    assert seen["off"] == 2 * 32, "a pass for the old log-probabilities and the policy's own, over every copy"
    assert seen["old pass"] == 32
    assert seen["vision"] == 2 * 4
    assert seen["zero signal"] == 32 + 16, "two of four problems have no signal"
    assert seen["all"] == 2
    skipped = dict(zip(one_process["steps"], one_process["skipped"], strict=True))
    assert skipped["all"] == skipped["zero signal"] == 0.5 and skipped["padding"] == 0
    assert one_process["packed"] > 0 and not one_process["refused"]


@pytest.mark.parametrize(("fault", "named"), [("positions", "all"), ("rows", "zero signal")])
def test_a_fault_is_noticed(tmp_path, fault, named):
    """Rollouts one position further on; micro-batches that are weighed alike however many rows they have."""
    result = speed(tmp_path, "cpu", "--sabotage", fault, "max_completion_length=12")
    if fault == "positions":
        assert "differ by" in result["refused"], "the check on the first batch did not fall back"
    else:
        worst = dict(zip(result["steps"], result["distances"], strict=True))
        assert worst[named] > 1e-3


def test_two_zero3_processes_with_groups_without_signal(tmp_path):
    result = speed(
        tmp_path, "cpu_zero3", "per_device_train_batch_size=8", "adora_freeze_vision_tower=true", "loss_type=dapo"
    )
    assert_equal_steps(result)
    for norm in result["norms"]:
        assert norm == pytest.approx(result["norms"][0], rel=1e-5)
