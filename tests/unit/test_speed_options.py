"""Keys of the step's work that cannot be what was meant: one line, with key, value and remedy."""

from __future__ import annotations

import pytest

from adora_vl.config.command_line import parse
from adora_vl.config.speed import SWITCHES, check_speed, stock_work
from adora_vl.errors import UserError

CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x", "--per_device_train_batch_size", "8"]
WRONG = [
    (["--adora_dynamic_sampling", "-1"], "adora_dynamic_sampling: -1 is not a whole number of at least 0"),
    (["--adora_image_cache_mb", "-5"], "adora_image_cache_mb: -5 is not a whole number of at least 0"),
    (
        ["--adora_dynamic_sampling", "2", "--loss_type", "bnpo"],
        "adora_dynamic_sampling: 2 does not go with loss_type: bnpo.*a loss_type of cispo, dapo",
    ),
    (
        ["--adora_dynamic_sampling", "2", "--top_entropy_quantile", "0.2"],
        "does not go with top_entropy_quantile: 0.2, which depends on the rows",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_one_line_names_key_value_and_remedy(arguments, message):
    with pytest.raises(UserError, match=message):
        check_speed(parse([*CPU, *arguments])[1])


def test_parts_of_groups_cannot_be_replaced():
    """Two processes with half a group each, which TRL allows."""
    config = parse([*CPU, "--adora_dynamic_sampling", "2", "--num_generations", "8"])[1]
    check_speed(config)
    config.per_device_train_batch_size = 4
    with pytest.raises(UserError, match="needs whole groups.*samples 4 rollouts.*num_generations is 8"):
        check_speed(config)


def test_stock_work_is_every_switch_off():
    config = parse(CPU)[1]
    assert all(getattr(config, name) is True for name in SWITCHES)
    assert stock_work() == dict.fromkeys(SWITCHES, False) and len(SWITCHES) == 8
