"""The entropy bonus is the mean entropy of a generation's tokens, however its rows are divided.

Its gradient is what the gradient of TRL's loss with the bonus has more than without. The policy is
a table of logits in float64.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from adora_vl.training.entropy_bonus import EntropyBonus, TRLBonus
from adora_vl.types import Batch
from tests.support.stand_ins import training_config
from tests.support.step_context import FIRST_GENERATION
from tests.support.table_policy import TABLE_VOCABULARY, LogitsTable, table_trainer

ROWS = 8
COMPLETION_LENGTHS = torch.tensor([2, 40, 3, 17, 40, 1, 9, 26])
COEFFICIENT = 0.3


def logits_table() -> LogitsTable:
    """Return a new policy."""
    return LogitsTable(ROWS, int(COMPLETION_LENGTHS.max()))


def make_generation(rows: int) -> Batch:
    """Return the first `rows` rollouts of a generation."""
    mask_BC = (torch.arange(int(COMPLETION_LENGTHS.max())) < COMPLETION_LENGTHS[:rows, None]).long()
    generator = torch.Generator().manual_seed(5)
    numbers = torch.arange(rows)
    return {
        "prompt_ids": numbers[:, None],
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.randint(TABLE_VOCABULARY, mask_BC.shape, generator=generator)
        * mask_BC,
        "completion_mask": mask_BC,
        "advantages": torch.linspace(-1, 1, rows, dtype=torch.float64),
        "num_items_in_batch": mask_BC.sum(),
    }


def divide_like_trl(batch: Any, rows: int) -> list[Any]:
    """Divide a batch into micro-batches of `rows` rows, in order; scalars are copied into each."""
    micro_batches = []
    for first_row in range(0, len(batch["completion_ids"]), rows):
        micro_batch = {}
        for name, value in batch.items():
            micro_batch[name] = value[first_row : first_row + rows] if value.dim() else value
        micro_batches.append(micro_batch)
    return micro_batches


def gradient_of_step(
    coefficient: float, rows: int, *, trl_divides: bool = False, **keys: Any
) -> Tensor:
    """Return the gradient of an optimizer step's loss with respect to the logits, float64.

    Args:
        coefficient: the coefficient of the entropy bonus.
        rows: rollouts of the generation.
        trl_divides: whether micro-batches are those that TRL makes.
        keys: further keys of the run.
    """
    policy = logits_table()
    policy.train()
    trainer = table_trainer(
        policy,
        entropy_coef=coefficient,
        steps_per_generation=keys.get("gradient_accumulation_steps", 1),
        max_completion_length=40,
        **keys,
    )
    batch = make_generation(rows)
    if trl_divides:
        micro_batches = divide_like_trl(batch, keys["per_device_train_batch_size"])
    else:
        micro_batches = trainer.parts.micro_batcher.split(batch, FIRST_GENERATION)
    for number, micro_batch in enumerate(micro_batches, 1):
        trainer.accelerator.sync_gradients = number == len(micro_batches)
        if micro_batch:
            trainer._compute_loss(policy, micro_batch).backward()
    assert policy.logits.grad is not None
    return policy.logits.grad


def gradient_of_mean_entropy(rows: int) -> Tensor:
    """Return the gradient that the bonus should have: that of the mean over all tokens."""
    policy = logits_table()
    batch = make_generation(rows)
    _, entropy_BC = policy.scores(batch["prompt_ids"][:, 0], batch["completion_ids"])
    mask_BC = batch["completion_mask"]
    (-COEFFICIENT * (entropy_BC * mask_BC).sum() / mask_BC.sum()).backward()
    assert policy.logits.grad is not None
    return policy.logits.grad


# (rollouts of the generation, the keys by which they are divided into micro-batches)
ROWS_AND_KEYS_BY_DIVISION = {
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
    """The gradient with the bonus less that without it is the gradient of the mean entropy.

    `adaptive`: TRL's adaptive coefficient, which is on where the entropy is below a target.
    """
    for name, (rows, sizes) in ROWS_AND_KEYS_BY_DIVISION.items():
        keys = {"loss_type": loss, "num_generations": 2, "use_adaptive_entropy": adaptive, **sizes}
        # An adaptive bonus is there only below the target. No entropy of 7 tokens is above ln 7.
        keys["entropy_target"] = 9.0
        with subtests.test(name):
            without_bonus = gradient_of_step(
                coefficient=0.0, rows=rows, **{**keys, "use_adaptive_entropy": False}
            )
            bonus = gradient_of_step(COEFFICIENT, rows, **keys) - without_bonus
            difference = (bonus - gradient_of_mean_entropy(rows)).abs().max()
            assert difference < 1e-12, f"{float(difference):.2g} of {float(bonus.abs().max()):.2g}"


@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo"])
def test_the_bonus_is_the_same_where_trl_divides_the_rows(loss):
    """The bonus is that of the mean entropy over all tokens in TRL's own micro-batches too.

    They have equally many rows, and are not ordered by length.
    """
    keys: dict[str, Any] = {
        "loss_type": loss,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "trl_divides": True,
    }
    bonus = gradient_of_step(COEFFICIENT, ROWS, **keys) - gradient_of_step(
        coefficient=0.0, rows=ROWS, **keys
    )
    assert (bonus - gradient_of_mean_entropy(ROWS)).abs().max() < 1e-12


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_loss_beside_the_bonus_is_divided_as_without_one(loss):
    """The loss with the bonus has the same gradient in one micro-batch and in four.

    The gradients agree to 1e-12, which is near the rounding of float64.
    """
    four_parts: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    one_part: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    keys: dict[str, Any] = {"loss_type": loss, "num_generations": 2}
    gradient_in_parts = gradient_of_step(COEFFICIENT, ROWS, **keys, **four_parts)
    gradient_at_once = gradient_of_step(COEFFICIENT, ROWS, **keys, **one_part)
    assert (gradient_in_parts - gradient_at_once).abs().max() < 1e-12


def test_with_a_share_of_the_tokens_the_bonus_is_that_of_those():
    """`top_entropy_quantile` chooses the tokens with the largest entropy in each micro-batch.

    All others get no bonus. Each chosen token gets the one that it would have in a mean over a
    quarter of all tokens.
    """
    quantile = 0.25
    keys: dict[str, Any] = {
        "loss_type": "dapo",
        "num_generations": 2,
        "top_entropy_quantile": quantile,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "trl_divides": True,
    }
    bonus = gradient_of_step(COEFFICIENT, ROWS, **keys) - gradient_of_step(
        coefficient=0.0, rows=ROWS, **keys
    )
    tokens = float(COMPLETION_LENGTHS.sum())
    policy = logits_table()
    batch = make_generation(ROWS)
    _, entropy_BC = policy.scores(batch["prompt_ids"][:, 0], batch["completion_ids"])
    (-COEFFICIENT * entropy_BC.sum() / (quantile * tokens)).backward()

    assert policy.logits.grad is not None
    is_chosen_BC = bonus.abs().sum(dim=2) > 0
    assert 0.15 < is_chosen_BC.sum() / tokens < 0.35
    assert (bonus - policy.logits.grad)[is_chosen_BC].abs().max() < 1e-12


def test_the_policy_loss_is_what_the_loss_would_be_without_the_bonus():
    """The policy loss that is logged is TRL's loss of a micro-batch without the entropy bonus.

    TRL divides its loss, and the bonus in it, by the step's 2 micro-batches. The sums are the loss
    times the 4 tokens, and the tokens. The bonus is the coefficient times the mean entropy:
    (1 + 2 + 3 + 6) / 4 = 3. The 9 stands at padding.
    """
    config = training_config(entropy_coef=COEFFICIENT, loss_type="dapo")
    micro_batch: Batch = {"completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    entropies_BC = torch.tensor([[1.0, 2.0, 3.0], [6.0, 9.0, 9.0]])
    policy_loss = 0.7
    loss = torch.tensor((policy_loss - COEFFICIENT * 3.0) / 2, requires_grad=True)
    sums_2 = EntropyBonus(config, batcher=None).policy_loss_sums(
        micro_batch,
        loss,
        entropies_BC=entropies_BC,
        bonus=TRLBonus(COEFFICIENT, micro_batches_per_step=2),
    )

    assert sums_2.tolist() == [pytest.approx(4 * policy_loss), 4.0]
    assert not sums_2.requires_grad
