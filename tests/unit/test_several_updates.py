"""Several updates per generation with PPO's clip, a wider upper clip and SAPO's gate, as the recipes use them."""

from __future__ import annotations

import pytest

from adora_vl.rollout_log.metrics_file import METRICS, read_metrics
from tests.tiny_run import STEPS, train

pytestmark = pytest.mark.slow

FOUR_UPDATES = {
    "per_device_train_batch_size": 8,
    "steps_per_generation": 4,
    "adora_mode": "off",
    "learning_rate": 3e-3,
    "adora_max_ratio": "null",
    "save_strategy": "no",
    "epsilon": 0.01,
    "seed": 1,
}  # fmt: skip; so narrow a clip acts within four updates
LOSSES: dict[str, dict[str, object]]
LOSSES = {
    "clip": {},
    "clip_higher": {"epsilon_high": 0.28},
    "sapo": {"loss_type": "sapo"},
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The steps of a run with each loss: one generation, learned from four times, at a rate that makes ratios large."""
    folder = tmp_path_factory.mktemp("updates")
    found = {}
    for name, changed in LOSSES.items():
        train(folder / name, **FOUR_UPDATES, **changed)
        found[name] = [entry for entry in read_metrics(folder / name / METRICS) if "grad_norm" in entry]
        assert len(found[name]) == STEPS
    return found


@pytest.mark.parametrize("name", ["clip_higher", "sapo"])
def test_the_first_update_is_that_of_ppo(logs, name):
    """There every ratio is 1: nothing is clipped, and the slope of SAPO's gate 4 / tau x sigmoid(tau (r - 1)) is 1."""
    assert logs[name][0]["grad_norm"] == pytest.approx(logs["clip"][0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["clip_higher", "sapo"])
def test_later_updates_are_not(logs, name):
    """So that the test before can fail, and so that the keys of the recipes do something."""
    later = [[round(entry["grad_norm"], 6) for entry in logs[each][1:]] for each in ("clip", name)]
    assert later[0] != later[1]


def test_the_wider_clip_clips_less(logs):
    wider, narrow = (sum(entry["clip_ratio/high_mean"] for entry in logs[each]) for each in ("clip_higher", "clip"))
    assert wider < narrow
