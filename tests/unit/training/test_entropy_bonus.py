"""The gradient of the entropy bonus is that of the mean entropy over the tokens of a generation,
however its rows are divided, beside TRL's own loss on a table of logits in float64.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.packing.image_store import ImageBanks
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.entropy_bonus import EntropyBonus
from adora_vl.training.guards import RatioGuard
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.types import Batch
from tests.support.step_context import step_context

ROWS = 8
LENGTHS = torch.tensor([2, 40, 3, 17, 40, 1, 9, 26])
VOCABULARY = 7
COEFFICIENT = 0.3


class Table(nn.Module):
    """A policy whose logits are its parameters: one distribution for each token of each row."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        shape = (ROWS, int(LENGTHS.max()), VOCABULARY)
        logits = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.logits = nn.Parameter(3 * logits)

    def scores(self, row_B: Tensor, ids_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the tokens, (B, C)."""
        logp_BCV = self.logits[row_B, : ids_BC.size(1)].log_softmax(dim=-1)
        entropy_BC = -(logp_BCV.exp() * logp_BCV).sum(dim=-1)
        return logp_BCV.gather(2, ids_BC[..., None]).squeeze(2), entropy_BC


class OfATable(AdoraGRPOTrainer):
    """The loss of our trainer alone; a prompt is the number of its row."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids_BS: Tensor, *rest: Any, **_: Any):
        def scored(model: Table, ids_BS: Tensor, mask_BS: Tensor, answer: int, *_: Any, **__: Any):
            return *model.scores(ids_BS[:, 0], ids_BS[:, -answer:]), None

        return self.policy_pass(scored, model, ids_BS, *rest)


class Alone:
    """An accelerator of one process."""

    num_processes = 1
    process_index = 0
    device = torch.device("cpu")

    @staticmethod
    def gather(value: Tensor) -> Tensor:
        return value

    @staticmethod
    def pad_across_processes(value: Tensor, **_: Any) -> Tensor:
        return value

    @staticmethod
    def reduce(value: Tensor, **_: Any) -> Tensor:
        return value


def trainer_of(policy: Table, coefficient: float, **keys: Any) -> Any:
    context = step_context(
        accelerator=Alone(),
        entropy_coef=coefficient,
        adora_max_ratio=None,
        steps_per_generation=keys.get("gradient_accumulation_steps", 1),
        adora_stock_step=["share_prompt"],
        **keys,
    )
    args = context.config
    trainer: Any = object.__new__(OfATable)
    adaptive = args.use_adaptive_entropy
    trainer.__dict__.update(
        args=args,
        accelerator=context.accelerator,
        model=policy,
        loss_type=args.loss_type,
        beta=0.0,
        epsilon_low=args.epsilon,
        epsilon_high=5.0,
        top_entropy_quantile=args.top_entropy_quantile,
        entropy_coef=coefficient,
        use_adaptive_entropy=adaptive,
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=40,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=args.gradient_accumulation_steps,
        state=SimpleNamespace(global_step=0),
        has_dropout=False,
        _entropy_bonus_enabled=coefficient != 0 or adaptive,
        _last_world_entropy=0.0 if adaptive else float("inf"),
        _entropy_window_stats=None,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _step=0,
    )
    trainer.layout = BatchLayout.of(args)
    trainer.policy_pass = PolicyPass(context.accelerator, args)
    trainer.ratio_guard = RatioGuard(context)
    trainer.batcher = MicroBatcher(context, ImageBanks(), every_row_counts=True)
    trainer.entropy_bonus = EntropyBonus(args, trainer.batcher)
    return trainer


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
    policy = Table()
    policy.train()
    trainer = trainer_of(policy, coefficient, **keys)
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
    policy = Table()
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
    policy = Table()
    batch = generation(ROWS)
    _, entropy_BC = policy.scores(batch["prompt_ids"][:, 0], batch["completion_ids"])
    (-COEFFICIENT * entropy_BC.sum() / (quantile * tokens)).backward()
    assert policy.logits.grad is not None
    chosen = bonus.abs().sum(dim=2) > 0
    assert 0.15 < chosen.sum() / tokens < 0.35
    assert (bonus - policy.logits.grad)[chosen].abs().max() < 1e-12
