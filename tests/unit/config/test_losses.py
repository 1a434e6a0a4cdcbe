"""A loss whose own keys cannot be meant is refused before a run, and a key that no loss reads is
named.
"""

from __future__ import annotations

from typing import Any

import pytest

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.checks import check_config, costs_of
from adora_vl.config.losses import CLIPPED, check_loss
from adora_vl.utils.errors import UserError


def config(**keys: Any) -> AdoraGRPOConfig:
    return AdoraGRPOConfig(use_cpu=True, bf16=False, output_dir="nowhere", max_steps=10, **keys)


ENGINE = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
# keys -> how the line begins, and what it has as its remedy
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"loss_type": "cispo"}, "epsilon_high: null, so epsilon: 0.2,", "epsilon_high: 5.0"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high: 0.28", "epsilon_high: 5.0"),
    ({"loss_type": "cispo", "epsilon_high": 1.0}, "epsilon_high: 1", "above 1"),
    ({"delta": 0.5}, "delta: 0.5", "such as 2.2"),
    ({"delta": 1.28, "epsilon_high": 0.28}, "delta: 1.28", "1.28 (1 + epsilon_high)"),
    ({"loss_type": "luspo"}, "importance_sampling_level: token", "set it to sequence"),
    ({"importance_sampling_level": "sequence"}, "importance_sampling_level", "loss_type: grpo"),
    (
        {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"},
        "importance_sampling_level: sequence with loss_type: dr_grpo",
        "loss_type: grpo",
    ),
    (
        {"importance_sampling_level": "sequence", "loss_type": "vespo"},
        "importance_sampling_level: sequence with loss_type: vespo",
        "set it to token",
    ),
    ({"loss_type": "vespo", **ENGINE}, "vllm_importance_sampling_mode: sequence_mask", "token_tr"),
    ({"use_adaptive_entropy": True, "entropy_coef": 2.0}, "entropy_coef: 2", "entropy_coef_max: 1"),
]
TAKEN: list[dict[str, Any]] = [
    {},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon": 4.0},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 4e-4},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"delta": 4.0},
    {"use_adaptive_entropy": True, "entropy_coef": 0.5},
]


@pytest.mark.parametrize(("keys", "begins", "remedy"), REFUSED)
def test_keys_that_would_be_another_loss_are_refused_in_one_line(keys, begins, remedy):
    with pytest.raises(UserError) as caught:
        check_config(config(**keys))
    line = str(caught.value)
    assert line.startswith(begins) and remedy in line and "\n" not in line


@pytest.mark.parametrize("keys", TAKEN)
def test_what_the_papers_of_the_losses_set_is_taken(keys):
    check_loss(config(**keys))


def test_a_key_that_the_loss_does_not_read_is_named_before_the_run():
    sapo = config(loss_type="sapo", delta=4.0, epsilon_high=0.28, sapo_temperature_neg=1.1)
    lines = [line for line in costs_of(sapo) if "changes nothing" in line]
    assert lines == [
        "epsilon_high: 0.28 changes nothing with loss_type: sapo",
        "delta: 4 changes nothing with loss_type: sapo",
    ]
    fixed = config(entropy_target=0.5)
    (line,) = [line for line in costs_of(fixed) if "changes nothing" in line]
    assert line == "entropy_target: 0.5 changes nothing with use_adaptive_entropy: false"
    for loss in CLIPPED - {"luspo"}:
        clipped = config(loss_type=loss, epsilon=0.1, epsilon_high=0.3, delta=4.0)
        assert not any("changes nothing" in line for line in costs_of(clipped))
