"""Whatever is computed once gives the losses and gradients of stock TRL's way, on the same
rollouts.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import launch

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("speed_run.py"))
# Of a policy in float64, relative to each gradient's norm: 5e-14 at most was measured. No processor
# is 20,000 times worse, and a factor of 1 + 1e-8 that one of the switches forgets is still found.
BOUND = 1e-9
# Of a policy in float32: DeepSpeed's ZeRO-3 takes no float64 ("allowed values are [torch.half,
# torch.bfloat16, torch.float]"). No parameter's gradient was further off than 1.3e-5 of its norm on
# any processor, so the norm of all is not either; 3e-7 was measured. The loss is a mean of products
# of advantages below 2.5 and ratios that are as exact as log-probabilities, 1e-6; 8e-9 was
# measured. What the processes might weigh wrongly changes both by a tenth or more.
NORM_FLOAT32 = 1e-4
LOSS_FLOAT32 = 3e-6
# Nats on average between the policy and the engine, which is float32; 3e-7 was measured. Another
# row's tokens, or the same ones a position further on, are 0.2 and more.
DRIFT = 1e-4
# Four micro-batches of half a group on each process
TWO_PROCESSES = (
    "per_device_train_batch_size=4",
    "gradient_accumulation_steps=4",
    "adora_freeze=[vision_tower]",
    "loss_type=dapo",
)


def speed(folder: Path, config: str, *words: str) -> dict[str, Any]:
    output = folder / "result.json"
    launch(config, SCRIPT, "--output", str(output), *words)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return speed(tmp_path_factory.mktemp("one"), "cpu")


def each(result: dict[str, Any], figure: str) -> dict[str, Any]:
    """Return the figure of each step that learns from the same rollouts."""
    figures = dict(zip(result["steps"], result[figure], strict=True))
    return {name: value for name, value in figures.items() if name != "refill"}


def assert_equal_steps(result: dict[str, Any], loss_bound: float = 1e-12) -> None:
    assert all(result["same"]), "the rollouts were not the same"
    for name, loss in each(result, "losses").items():
        assert loss == pytest.approx(result["losses"][0], abs=loss_bound, rel=0), name
    assert max(result["drift"]) < DRIFT


def test_every_switch_keeps_the_loss_and_every_gradient(one_process):
    assert_equal_steps(one_process)
    assert one_process["norms"][0] > 0.05
    for name, distance in each(one_process, "distances").items():
        assert distance <= BOUND, name


def test_a_reference_model_is_asked_the_same(tmp_path):
    """Policy and reference are equal here, so any difference between what the two are asked is a KL
    above 0.
    """
    only = "off,cache,vision,prompt,old pass,no padding,all"
    result = speed(tmp_path, "cpu", "beta=0.1", "max_completion_length=24", "--only", only)
    assert_equal_steps(result)
    assert result["packed"] > 0
    assert not result["refused"]
    assert max(result["kl"]) < 1e-14, "log-probabilities are 1.4e-7 nats apart or more"
    assert max(result["distances"]) <= BOUND


def test_turns_with_pictures_of_tools(tmp_path):
    """A prompt shared by rollouts that have seen different pictures since, and of what tools say
    nothing is learned.
    """
    result = speed(tmp_path, "cpu", "--tools", "--only", "off,vision,prompt,no padding,all")
    assert_equal_steps(result)
    assert result["packed"] > 0
    assert not result["refused"]
    assert result["seen_in_step"][1] < result["seen_in_step"][0]
    assert max(result["distances"]) <= BOUND


def test_the_work_is_really_saved(one_process):
    # 4 problems, 8 rollouts each; the image of each went through the processor once in the whole
    # run
    assert sum(step["processed"] for step in one_process["work"]) == 4
    rows_seen = each(one_process, "seen_in_step")
    assert rows_seen["off"] == 2 * 32, (
        "a pass for the old log-probabilities and the policy's own, over every copy"
    )
    assert rows_seen["old pass"] == 32
    assert rows_seen["vision"] == 2 * 4
    assert rows_seen["zero signal"] == 32 + 16, "two of four problems have no signal"
    assert rows_seen["all"] == 2
    skipped = each(one_process, "skipped")
    assert skipped["all"] == skipped["zero signal"] == 0.5
    assert skipped["no padding"] == 0
    assert one_process["packed"] > 0
    assert not one_process["refused"]
    assert each(one_process, "packed_in_step")["no padding"] > 0, "no pass was without padding"


def test_groups_of_a_further_batch_bring_all_that_is_theirs(one_process):
    """Were a token, an image or a log-probability another row's, engine and policy would differ on
    it.
    """
    assert one_process["steps"][-1] == "refill"
    assert one_process["refilled"] > 0
    assert one_process["drift"][-1] < DRIFT
    assert one_process["distances"][-1] > 1e-2, "nothing else was learned from"


def test_micro_batches_of_half_a_group(tmp_path):
    """A micro-batch may have fewer rows than a group, as in the recipes for large models.

    None is run for nothing.
    """
    words = ("per_device_train_batch_size=4", "gradient_accumulation_steps=8")
    result = speed(tmp_path, "cpu", *words, "--only", "off,vision,zero signal,no padding,all")
    assert_equal_steps(result)
    assert max(result["distances"]) <= BOUND
    run = each(result, "micro_batches")
    assert run["off"] == run["no padding"] == 8
    assert run["zero signal"] == run["all"] == 4


def test_filled_micro_batches(tmp_path):
    """Answers are far shorter than they may be, so more groups share a micro-batch.

    They do so with a shared prompt and with separate rows, whose padding counts.
    """
    words = ("per_device_train_batch_size=4", "gradient_accumulation_steps=8")
    only = "off,fill,fill separate rows,all"
    result = speed(tmp_path, "cpu", *words, "max_completion_length=192", "--only", only)
    assert_equal_steps(result)
    assert max(result["distances"]) <= BOUND
    run = each(result, "micro_batches")
    assert run["off"] == 8
    assert run["fill"] <= 4
    assert run["fill separate rows"] < 8
    assert run["all"] < run["fill"], "two of four problems have no signal"


def test_a_step_with_a_fault_put_in_is_told_apart_from_a_right_one(tmp_path):
    """Rollouts one position further on; micro-batches that weigh alike however many rows they have.

    Three of six problems have signal, so of the micro-batches of 16 rows one is full and one is
    half full.
    """
    only = "off,prompt,zero signal,off again"
    words = ("--sabotage", "positions,rows", "gradient_accumulation_steps=3")
    result = speed(tmp_path, "cpu", *words, "--only", only)
    assert "differ by" in result["refused"], "the check on the first batch did not fall back"
    assert each(result, "distances")["zero signal"] > 1e-3


def test_two_zero3_processes_with_groups_without_signal(tmp_path):
    only = "off,prompt,zero signal,spread,all,refill"
    result = speed(tmp_path, "cpu_zero3", "--float32", *TWO_PROCESSES, "--only", only)
    assert_equal_steps(result, LOSS_FLOAT32)
    assert result["packed"] > 0
    assert not result["refused"]
    for norm in each(result, "norms").values():
        assert norm == pytest.approx(result["norms"][0], rel=NORM_FLOAT32)
    skipped = each(result, "skipped")
    moved = each(result, "moved")
    # the silent problems are the first process's: alone, it would look on while the other takes all
    # of its own
    assert skipped["zero signal"] == 0
    assert skipped["spread"] == skipped["all"] == 0.5
    assert moved["spread"] == 0.5
    run = each(result, "micro_batches")
    assert run["off"] == run["zero signal"] == 4
    assert run["spread"] == run["all"] == 2
