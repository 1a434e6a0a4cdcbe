"""The doctor with a real engine: on a healthy run, and with each of our corrections taken out.

The doctor's command checks whether engine and trainer agree. One engine serves all cases.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from adora_vl.doctor.engine import (
    BANNED_CHECK,
    BUFFERS_CHECK,
    FEATURES_CHECK,
    LANGUAGE_CHECK,
    SLEEP_CHECK,
    VISION_CHECK,
)
from adora_vl.rollout.agreement import AGREEMENT_CHECK, DISTANT_CHECK, PROMPTS_CHECK
from tests.support.engine_errors import lost_image_features
from tests.support.launch import cli_arguments, run_command
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.slow
DOCTOR_SCRIPT = str(Path(__file__).with_name("doctor_run.py"))


@pytest.fixture(scope="module")
def doctor_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the doctor on a healthy run, then with each correction taken out.

    Returns the checks of each, by the name of the sabotage, the healthy run's table and output, and
    its folder.
    """
    folder = tmp_path_factory.mktemp("doctor")
    output = folder / "result.json"
    argv = [
        *cli_arguments(
            config=REPOSITORY / "configs" / "train" / "smoke_cpu.yaml",
            output_dir=folder / "run",
            per_device_train_batch_size=8,
            num_generations=4,
            adora_synthetic_rows=64,
        ),
        "--vllm_max_model_length",
        "2048",  # of which the far prompts take 2,000
        "--model_name_or_path",
        "tiny_perimeter",  # its answers begin with what it sees, those of `tiny` with wording
    ]
    completed = run_command([sys.executable, DOCTOR_SCRIPT, str(output), *argv])
    return {
        **json.loads(output.read_text()),
        "table": json.loads(output.with_suffix(".table.json").read_text()),
        "stdout": completed.stdout,
        "run": folder / "run",
    }


def only_check(checks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the check of this name, of which there is one."""
    (check,) = [check for check in checks if check["name"] == name]
    return check


def test_a_healthy_run_passes_every_line(doctor_results):
    """All checks pass but one, which is skipped: the engine of this run never sleeps."""
    assert [check for check in doctor_results["table"] if check["status"] == "failed"] == []
    status = {check["name"]: check["status"] for check in doctor_results["table"]}
    checks = (
        FEATURES_CHECK,
        BUFFERS_CHECK,
        PROMPTS_CHECK,
        AGREEMENT_CHECK,
        DISTANT_CHECK,
        LANGUAGE_CHECK,
        VISION_CHECK,
        BANNED_CHECK,
    )
    for name in (*checks, "grader on 8 reference answers", "output folder has room"):
        assert status[name] == "passed", name
    assert status[SLEEP_CHECK] == "skipped"
    assert (
        "vllm_enable_sleep_mode: false"
        in only_check(doctor_results["table"], SLEEP_CHECK)["detail"]
    )
    assert "moved the policy by" in only_check(doctor_results["table"], LANGUAGE_CHECK)["detail"]
    # the far prompts leave room for their answers in a context of 2,048 tokens: 19xx
    assert (
        "answers from position 19" in only_check(doctor_results["table"], DISTANT_CHECK)["detail"]
    )
    assert "0 failed" in doctor_results["stdout"]


def test_nothing_of_the_run_is_changed(doctor_results):
    """Hashes of weights, random states and counters are equal before and after the checks.

    So a run that was checked is the run that it would have been, to the bit.
    """
    assert doctor_results["checks_change_nothing"]
    assert doctor_results["self_check_unchanged"]
    assert not doctor_results["run"].exists(), "the user's folder is not touched"


@pytest.mark.parametrize(
    ("sabotage", "name", "remedy"),
    [
        ("expanded", PROMPTS_CHECK, "expanded twice"),
        ("pixel_limits", PROMPTS_CHECK, "min_pixels and max_pixels in the config"),
        ("doubled", FEATURES_CHECK, "the processor expands images in its own way"),
        ("no_sync", LANGUAGE_CHECK, "weights do not reach the engine"),
        ("stale_encoder_cache", VISION_CHECK, "both caches have to be reset"),
        ("unbanned", BANNED_CHECK, "remove logit_bias"),
    ],
)
def test_without_a_correction_its_line_fails_with_the_remedy(
    doctor_results, sabotage, name, remedy
):
    """Each sabotage takes back one of our corrections, and one check fails with a remedy for it.

    Instead of a failed check, an encoder cache that is not reset may make a CPU's engine raise,
    because it misses the features of an image.
    """
    checks = doctor_results[sabotage]
    if "raised" in checks[0]:
        assert sabotage == "stale_encoder_cache", checks[0]
        assert lost_image_features(checks[0]["raised"]), checks[0]
        return
    check = only_check(checks, name)
    assert check["status"] == "failed", check
    assert remedy in check["remedy"]


def test_expanded_prompts_also_show_in_the_log_probabilities(doctor_results):
    """An engine whose prompt check notices nothing is found by its log-probabilities."""
    assert only_check(doctor_results["unnoticed"], AGREEMENT_CHECK)["status"] == "failed"


def test_rounded_rotary_frequencies_show_far_from_the_start_and_not_near_it(doctor_results):
    """The angle's error grows with the position, so only the check of distant tokens can see it."""
    checks = doctor_results["rounded"]
    assert "inv_freq is bfloat16, not float32" in only_check(checks, BUFFERS_CHECK)["detail"]
    assert (
        only_check(checks, PROMPTS_CHECK)["status"]
        == only_check(checks, AGREEMENT_CHECK)["status"]
        == "passed"
    )
    assert only_check(checks, DISTANT_CHECK)["status"] == "failed"


def test_the_engine_is_healthy_again_after_each(doctor_results):
    """A sabotage that were still at work would let the checks after it fail for another reason."""
    assert {check["status"] for check in doctor_results["healthy_again"]} == {"passed"}


def test_a_training_refuses_to_start_where_the_doctor_fails(doctor_results):
    """The check before a training refuses three of the sabotages, and no healthy run.

    The refusal says how to start anyway, and names the doctor, which tells more.
    """
    refusals = doctor_results["refusals"]
    assert refusals["healthy"] == ""
    for name in ("expanded", "pixel_limits", "rounded"):
        assert refusals[name].startswith("before the first step:")
        assert "--adora_self_check false" in refusals[name]
        assert "adora_vl.doctor" in refusals[name]
