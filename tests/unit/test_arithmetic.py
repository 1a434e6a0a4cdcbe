"""Batches and groups."""

from __future__ import annotations

import pytest

from adora_vl.config.arithmetic import check_rows, plan_batches
from adora_vl.errors import UserError


def plan(**changes):
    values = {
        "per_device_train_batch_size": 4,
        "num_processes": 2,
        "num_generations": 8,
        "gradient_accumulation_steps": 4,
    }
    return plan_batches(**{**values, **changes})


def test_the_numbers_of_a_run():
    numbers = plan()
    assert (numbers.global_batch, numbers.optimizer_batch, numbers.generation_batch) == (8, 32, 32)
    assert numbers.prompts_per_generation == 4
    assert numbers.cycle_micro_batches == 4
    assert "4 prompts per generation (32 rollouts)" in numbers.describe()


def test_a_group_may_be_spread_over_ranks():
    assert plan(per_device_train_batch_size=4, gradient_accumulation_steps=1).prompts_per_generation == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 1, "num_generations": 6}, "8 sequences does not divide .* num_generations: 6"),
        ({"generation_batch_size": 12}, "generation_batch_size: 12 is not a multiple .* 4 x 2 = 8"),
        ({"generation_batch_size": 32, "steps_per_generation": 4}, "both set"),
        ({"num_generations": 1}, "num_generations: 1 must be at least 2"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: 0"),
        ({"num_iterations": 0}, "num_iterations: 0"),
    ],
)
def test_what_does_not_divide_is_named(changes, message):
    with pytest.raises(UserError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "updates"),
    [({}, 1), ({"steps_per_generation": 32}, 8), ({"num_iterations": 3}, 3), ({"steps_per_generation": 6}, 1.5)],
)
def test_how_many_optimizer_steps_learn_from_a_generation(changes, updates):
    assert plan(**changes).updates_per_generation == updates
    assert f"{updates} optimizer step{'' if updates == 1 else 's'} a generation" in plan(**changes).describe()


def test_too_few_rows_are_an_error_and_not_a_run_of_zero_steps():
    check_rows(plan(), 4)
    with pytest.raises(UserError, match="3 rows cannot fill one generation of 4 prompts"):
        check_rows(plan(), 3)
