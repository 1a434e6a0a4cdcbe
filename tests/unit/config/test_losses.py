"""A loss whose own keys would make it another one is refused before a run."""

from __future__ import annotations

from typing import Any

import pytest

from adora_vl.config.losses import check_loss
from adora_vl.utils.errors import UserError
from tests.support.stand_ins import checked_config

# keys, how the error line begins, and the remedy that it names
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
    """A loss with keys that would make another loss of it is refused in one line with the remedy.

    CISPO with TRL's default epsilon, for example, would clip what its paper never clips.
    """
    with pytest.raises(UserError) as caught:
        check_loss(checked_config(**keys))
    line = str(caught.value)
    assert line.startswith(begins)
    assert remedy in line
    assert "\n" not in line


@pytest.mark.parametrize("keys", TAKEN)
def test_what_the_papers_of_the_losses_set_is_taken(keys):
    check_loss(checked_config(**keys))
