"""Parts of a step that compute something once give the losses and gradients of stock TRL.

`speed_run.py` trains on the same rollouts in each step, with other parts switched on; its steps are
named by what is on, such as "vision" or "all".
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import accelerate_launch

pytestmark = pytest.mark.slow
SPEED_SCRIPT = str(Path(__file__).with_name("speed_run.py"))
# Of a policy in float64, relative to each gradient's norm: 5e-14 at most was measured. No processor
# is 20,000 times worse, and a factor of 1 + 1e-8 that one of the switches forgets is still found.
GRADIENT_BOUND = 1e-9
# Of a policy in float32: DeepSpeed's ZeRO-3 takes no float64 ("allowed values are [torch.half,
# torch.bfloat16, torch.float]"). No parameter's gradient was further off than 1.3e-5 of its norm on
# any processor, so the norm of all is not either; 3e-7 was measured. The loss is a mean of products
# of advantages below 2.5 and ratios that are as exact as log-probabilities, 1e-6; 8e-9 was
# measured. What the processes might weigh wrongly changes both by a tenth or more.
NORM_BOUND_FLOAT32 = 1e-4
LOSS_BOUND_FLOAT32 = 3e-6
# Nats on average between the policy and the engine, which is float32; 3e-7 was measured. Another
# row's tokens, or the same ones a position further on, are 0.2 and more.
DRIFT_BOUND = 1e-4
# Four micro-batches of half a group on each process
HALF_GROUPS_ON_TWO_PROCESSES = (
    "per_device_train_batch_size=4",
    "gradient_accumulation_steps=4",
    "adora_freeze=[vision_tower]",
    "loss_type=dapo",
)


def run_speed_script(folder: Path, config: str, *argv: str) -> dict[str, Any]:
    """Train with other parts switched on in each step, and return the JSON of `speed_run.py`.

    `config`: the accelerate config. `argv`: arguments of the script.
    """
    output = folder / "result.json"
    accelerate_launch(config, SPEED_SCRIPT, "--output", str(output), *argv)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.fixture(scope="module")
def result_of_all_steps(tmp_path_factory):
    """Return the figures of one process, each step with other parts switched on."""
    return run_speed_script(tmp_path_factory.mktemp("one"), "cpu")


def values_by_step(result: dict[str, Any], figure: str) -> dict[str, Any]:
    """Return a result of each step by its name, but for "refill", which has other rollouts."""
    figures = dict(zip(result["steps"], result[figure], strict=True))
    return {name: value for name, value in figures.items() if name != "refill"}


def assert_equal_steps(result: dict[str, Any], loss_bound: float = 1e-12) -> None:
    """Assert that all steps have the same rollouts and loss, and that engine and policy agree."""
    assert all(result["has_same_samples"]), "the rollouts were not the same"
    for name, loss in values_by_step(result, "losses").items():
        assert loss == pytest.approx(result["losses"][0], abs=loss_bound, rel=0), name
    assert max(result["drift"]) < DRIFT_BOUND


def test_every_switch_keeps_the_loss_and_every_gradient(result_of_all_steps):
    """Gradients of each step are those of the step with all parts off."""
    assert_equal_steps(result_of_all_steps)
    assert result_of_all_steps["norms"][0] > 0.05
    for name, distance in values_by_step(result_of_all_steps, "distances").items():
        assert distance <= GRADIENT_BOUND, name


def test_a_reference_model_is_asked_the_same(tmp_path):
    """Policy and reference are equal, so the KL is 0 unless the two are asked different things.

    The script trains one step with no shortcut (`off`), one with each alone, and one with all.
    """
    only = "off,cache,vision,prompt,old pass,no padding,all"
    result = run_speed_script(
        tmp_path, "cpu", "beta=0.1", "max_completion_length=24", "--only", only
    )
    assert_equal_steps(result)
    assert sum(result["packed_passes"]) > 0
    assert not result["packing_disabled_reason"]
    # One float32 step of a log-probability, 1.4e-7 nats, is a KL of 1e-14.
    assert max(result["kl"]) < 1e-14
    assert max(result["distances"]) <= GRADIENT_BOUND, "gradients differ from those of `off`"


def test_turns_with_pictures_of_tools(tmp_path):
    """Rollouts share a prompt although tools have shown them different pictures since.

    Nothing is learned of what tools say.
    """
    result = run_speed_script(
        tmp_path, "cpu", "--tools", "--only", "off,vision,prompt,no padding,all"
    )
    assert_equal_steps(result)
    assert sum(result["packed_passes"]) > 0
    assert not result["packing_disabled_reason"]
    assert result["image_passes"][1] < result["image_passes"][0]
    assert max(result["distances"]) <= GRADIENT_BOUND


def test_the_work_is_really_saved(result_of_all_steps):
    """The passes that each part has to save are gone from the counts of its step."""
    # 4 problems, 8 rollouts each; the image of each went through the processor once in the whole
    # run
    assert sum(result_of_all_steps["images_processed"]) == 4
    image_passes = values_by_step(result_of_all_steps, "image_passes")
    assert image_passes["off"] == 2 * 32, (
        "a pass for the old log-probabilities and the policy's own, over every copy"
    )
    assert image_passes["old pass"] == 32
    assert image_passes["vision"] == 2 * 4
    assert image_passes["zero signal"] == 32 + 16, "two of four problems have no signal"
    assert image_passes["all"] == 2
    skipped = values_by_step(result_of_all_steps, "skipped_groups")
    assert skipped["all"] == skipped["zero signal"] == 0.5
    assert skipped["no padding"] == 0
    assert sum(result_of_all_steps["packed_passes"]) > 0
    assert not result_of_all_steps["packing_disabled_reason"]
    assert values_by_step(result_of_all_steps, "packed_passes")["no padding"] > 0, (
        "no pass was without padding"
    )


def test_groups_of_a_further_batch_bring_all_that_is_theirs(result_of_all_steps):
    """Each row of a refilled batch has its own tokens, images and log-probabilities.

    If one were another row's, engine and policy would differ on it.
    """
    assert result_of_all_steps["steps"][-1] == "refill"
    assert result_of_all_steps["refilled_groups"] > 0
    assert result_of_all_steps["drift"][-1] < DRIFT_BOUND
    assert result_of_all_steps["distances"][-1] > 1e-2, "nothing else was learned from"


def test_micro_batches_of_half_a_group(tmp_path):
    """A micro-batch may have fewer rows than a group, as in the recipes for large models.

    None is run for nothing.
    """
    argv = ("per_device_train_batch_size=4", "gradient_accumulation_steps=8")
    result = run_speed_script(
        tmp_path, "cpu", *argv, "--only", "off,vision,zero signal,no padding,all"
    )
    assert_equal_steps(result)
    assert max(result["distances"]) <= GRADIENT_BOUND
    micro_batches = values_by_step(result, "micro_batches")
    assert micro_batches["off"] == micro_batches["no padding"] == 8
    assert micro_batches["zero signal"] == micro_batches["all"] == 4


def test_filled_micro_batches(tmp_path):
    """More groups share a micro-batch where answers are far shorter than they may be.

    They do so with a shared prompt and with separate rows, whose padding counts.
    """
    argv = ("per_device_train_batch_size=4", "gradient_accumulation_steps=8")
    only = "off,fill,fill separate rows,all"
    result = run_speed_script(tmp_path, "cpu", *argv, "max_completion_length=192", "--only", only)
    assert_equal_steps(result)
    assert max(result["distances"]) <= GRADIENT_BOUND
    micro_batches = values_by_step(result, "micro_batches")
    assert micro_batches["off"] == 8
    assert micro_batches["fill"] <= 4
    assert micro_batches["fill separate rows"] < 8
    assert micro_batches["all"] < micro_batches["fill"], "two of four problems have no signal"


def test_a_step_with_a_fault_put_in_is_told_apart_from_a_right_one(tmp_path):
    """Broken are positions, one further on, and weights of micro-batches, alike for any rows.

    Three of six problems have signal, so of the micro-batches of 16 rows one is full and one is
    half full.
    """
    only = "off,prompt,zero signal,off again"
    argv = ("--sabotage", "positions,rows", "gradient_accumulation_steps=3")
    result = run_speed_script(tmp_path, "cpu", *argv, "--only", only)
    assert "differ by" in result["packing_disabled_reason"], (
        "the check on the first batch did not fall back"
    )
    assert values_by_step(result, "distances")["zero signal"] > 1e-3


def test_two_zero3_processes_with_groups_without_signal(tmp_path):
    """Skipping groups without signal saves passes only after `spread` has evened out the ranks.

    `spread` moves groups between processes; losses and gradients stay equal.
    """
    only = "off,prompt,zero signal,spread,all,refill"
    result = run_speed_script(
        tmp_path, "cpu_zero3", "--float32", *HALF_GROUPS_ON_TWO_PROCESSES, "--only", only
    )
    assert_equal_steps(result, LOSS_BOUND_FLOAT32)

    assert sum(result["packed_passes"]) > 0
    assert not result["packing_disabled_reason"]
    for norm in values_by_step(result, "norms").values():
        assert norm == pytest.approx(result["norms"][0], rel=NORM_BOUND_FLOAT32)
    skipped = values_by_step(result, "skipped_groups")
    moved = values_by_step(result, "moved_groups")
    # the silent problems are the first process's: alone, it would look on while the other takes all
    # of its own
    assert skipped["zero signal"] == 0
    assert skipped["spread"] == skipped["all"] == 0.5
    assert moved["spread"] == 0.5
    micro_batches = values_by_step(result, "micro_batches")
    assert micro_batches["off"] == micro_batches["zero signal"] == 4
    assert micro_batches["spread"] == micro_batches["all"] == 2
