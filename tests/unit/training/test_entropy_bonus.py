"""The gradient of the entropy bonus is that of the mean entropy over the tokens of a generation,
however its rows are divided, beside TRL's own loss on a table of logits in float64.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from adora_vl.types import Batch
from tests.support.table_policy import VOCABULARY, Table, trainer_of

ROWS = 8
LENGTHS = torch.tensor([2, 40, 3, 17, 40, 1, 9, 26])
COEFFICIENT = 0.3


def table() -> Table:
    return Table(ROWS, int(LENGTHS.max()))


def generation(rows: int) -> Batch:
    mask_BC = (torch.arange(int(LENGTHS.max())) < LENGTHS[:rows, None]).long()
    draw = torch.Generator().manual_seed(5)
    numbers = torch.arange(rows)
    return {
        "prompt_ids": numbers[:, None],
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.randint(VOCABULARY, mask_BC.shape, generator=draw) * mask_BC,
        "completion_mask": mask_BC,
        "advantages": torch.linspace(-1, 1, rows, dtype=torch.float64),
        "num_items_in_batch": mask_BC.sum(),
    }


def as_trl_divides(batch: Any, rows: int) -> list[Any]:
    """Micro-batches of equally many rows, as where no key regroups them."""
    parts = range(0, len(batch["completion_ids"]), rows)
    return [
        {
            name: value[first : first + rows] if value.dim() else value
            for name, value in batch.items()
        }
        for first in parts
    ]


def gradient(coefficient: float, rows: int, *, by_trl: bool = False, **keys: Any) -> Tensor:
    """Of the loss of an optimizer step, by the logits, float64."""
    policy = table()
    policy.train()
    trainer = trainer_of(
        policy,
        entropy_coef=coefficient,
        steps_per_generation=keys.get("gradient_accumulation_steps", 1),
        max_completion_length=40,
        **keys,
    )
    batch = generation(rows)
    if by_trl:
        micro_batches = as_trl_divides(batch, keys["per_device_train_batch_size"])
    else:
        micro_batches = trainer.batcher.split(batch, "0/0")
    for number, micro in enumerate(micro_batches, 1):
        trainer.accelerator.sync_gradients = number == len(micro_batches)
        if micro:
            trainer._compute_loss(policy, micro).backward()
    assert policy.logits.grad is not None
    return policy.logits.grad


def of_the_mean_entropy(rows: int) -> Tensor:
    """The gradient that the bonus should have, by hand."""
    policy = table()
    batch = generation(rows)
    _, entropy_BC = policy.scores(batch["prompt_ids"][:, 0], batch["completion_ids"])
    mask_BC = batch["completion_mask"]
    (-COEFFICIENT * (entropy_BC * mask_BC).sum() / mask_BC.sum()).backward()
    assert policy.logits.grad is not None
    return policy.logits.grad


DIVIDED = {
    "one micro-batch": (ROWS, {"per_device_train_batch_size": 8}),
    "four of two rows": (
        ROWS,
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    "eight of one row": (
        ROWS,
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    ),
    "half of the rollouts are there": (
        4,
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
}


@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo", "grpo", "dr_grpo", "sapo", "bnpo"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_a_token_gets_the_same_bonus_whichever_rows_share_its_micro_batch(loss, adaptive, subtests):
    for name, (rows, sizes) in DIVIDED.items():
        keys = {"loss_type": loss, "num_generations": 2, "use_adaptive_entropy": adaptive, **sizes}
        keys["entropy_target"] = 9.0
        with subtests.test(name):
            plain = gradient(0.0, rows, **{**keys, "use_adaptive_entropy": False})
            bonus = gradient(COEFFICIENT, rows, **keys) - plain
            apart = (bonus - of_the_mean_entropy(rows)).abs().max()
            assert apart < 1e-12, f"{float(apart):.2g} of {float(bonus.abs().max()):.2g}"


@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo"])
def test_it_is_the_same_where_trl_divides_the_rows(loss):
    keys: dict[str, Any] = {
        "loss_type": loss,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "by_trl": True,
    }
    bonus = gradient(COEFFICIENT, ROWS, **keys) - gradient(0.0, ROWS, **keys)
    assert (bonus - of_the_mean_entropy(ROWS)).abs().max() < 1e-12


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_loss_beside_the_bonus_is_divided_as_without_one(loss):
    """The bonus is added to what the loss would be, to the last digit of float64."""
    sizes: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    whole: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    keys: dict[str, Any] = {"loss_type": loss, "num_generations": 2}
    found = gradient(COEFFICIENT, ROWS, **keys, **sizes)
    assert (found - gradient(COEFFICIENT, ROWS, **keys, **whole)).abs().max() < 1e-12


def test_with_a_share_of_the_tokens_the_bonus_is_that_of_those():
    """`top_entropy_quantile` chooses in each micro-batch; the others get no bonus, and those that
    are chosen weigh alike.
    """
    quantile = 0.25
    keys: dict[str, Any] = {
        "loss_type": "dapo",
        "num_generations": 2,
        "top_entropy_quantile": quantile,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "by_trl": True,
    }
    bonus = gradient(COEFFICIENT, ROWS, **keys) - gradient(0.0, ROWS, **keys)
    tokens = float(LENGTHS.sum())
    policy = table()
    batch = generation(ROWS)
    _, entropy_BC = policy.scores(batch["prompt_ids"][:, 0], batch["completion_ids"])
    (-COEFFICIENT * entropy_BC.sum() / (quantile * tokens)).backward()
    assert policy.logits.grad is not None
    chosen = bonus.abs().sum(dim=2) > 0
    assert 0.15 < chosen.sum() / tokens < 0.35
    assert (bonus - policy.logits.grad)[chosen].abs().max() < 1e-12
