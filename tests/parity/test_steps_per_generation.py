"""Several optimizer steps learn from one generation, each with stock TRL's gradient.

The gradients are compared on the same rollouts.
"""

from typing import Any, cast

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from adora_vl.config import AdoraGRPOConfig
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.synthetic.generate import generate
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.batch_rows import RowReader
from adora_vl.types import Batch
from tests.support.parity import training_data_set

pytestmark = pytest.mark.slow
# 4 updates of 2 x 8 sequences per generation: 16 groups of 4
GROUP_SIZE = 4
ROWS_PER_MICRO_BATCH = 8
MICRO_BATCHES_PER_UPDATE = 2
UPDATES = 4
# groups without signal, so that fewer live ones than updates x micro-batches
GROUPS_WITHOUT_SIGNAL = (
    0,
    1,
    2,
    5,
    6,
    7,
    8,
    9,
    12,
    15,
)


def reward_every_second_rollout(completions: list[Any], **columns: Any) -> list[float]:
    """Return 1 for every second rollout, whatever it says, but 0 in the groups without signal."""
    return [
        0.0 if row // GROUP_SIZE in GROUPS_WITHOUT_SIGNAL else float(row % 2)
        for row in range(len(completions))
    ]


class RecordingTrainer(AdoraGRPOTrainer):
    """A trainer that records its generation, the log-probabilities of that time, and each update.

    `update` has the micro-batches of the present update, and `updates` what `CompareWithStock` has
    measured in each.
    """

    update: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample a generation, and keep it with the log-probabilities of the present policy."""
        output = super()._generate_and_score_completions(inputs)
        self.sampled_logps = self._policy_logps(output)
        self.generation = {**output, "old_per_token_logps": self.sampled_logps}
        self.update: list[Any] = []
        self.updates: list[Any] = []
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.update.append(inputs)
        return super()._compute_loss(model, inputs)

    def stock_gradients(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """Return these rollouts' gradients, weighted as in stock TRL's full micro-batches."""
        batch = RowReader(cast("Batch", self.generation)).take(rows)
        self.args.adora_stock_step = ["share_vision", "share_prompt"]
        self.parts.images.vision.shares_images = False
        loss = GRPOTrainer._compute_loss(self, self.model, batch) * len(rows) / ROWS_PER_MICRO_BATCH
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        self.args.adora_stock_step = False
        self.parts.images.vision.shares_images = True
        return {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}


class CompareWithStock(TrainerCallback):
    """Compares the gradient of each update with stock TRL's on the same rollouts."""

    trainer: RecordingTrainer

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Note how far the update's gradient is from TRL's.

        Also how far its old log-probabilities are from those of the policy that sampled.
        """
        trainer = self.trainer
        micro_batches = self.trainer.update
        rows = [
            row for micro_batch in micro_batches for row in micro_batch["rollout_number"].tolist()
        ]
        expected = trainer.stock_gradients(rows)
        largest_norm = max(float(gradient.norm()) for gradient in expected.values())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        # the norm of the difference, of the parameter where it is largest
        largest_distance = max(
            float((gradients[name] - gradient).norm()) for name, gradient in expected.items()
        )
        old_gaps = []
        for micro_batch in micro_batches:
            if "old_per_token_logps" in micro_batch:
                gaps_BC = (
                    micro_batch["old_per_token_logps"] - self._logps_when_sampled(micro_batch)
                ).abs()
                old_gaps.append(float((gaps_BC * micro_batch["completion_mask"]).max()))
        trainer.updates.append(
            {
                "rows": rows,
                "relative_distance": largest_distance / largest_norm,
                "largest_norm": largest_norm,
                "old_logp_gaps": old_gaps,
                "micro_batches": len(micro_batches),
            }
        )
        trainer.update = []

    def _logps_when_sampled(self, micro_batch):
        """Return what the policy that sampled gave these rows, (B, C)."""
        return self.trainer.sampled_logps[micro_batch["rollout_number"]][
            :, : micro_batch["completion_mask"].size(1)
        ]


@pytest.fixture(scope="module")
def updates(tmp_path_factory) -> list[dict[str, Any]]:
    """Train on one generation; return each update's rollouts and its distance from stock TRL."""
    args = AdoraGRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("steps") / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS_PER_MICRO_BATCH,
        gradient_accumulation_steps=MICRO_BATCHES_PER_UPDATE,
        steps_per_generation=MICRO_BATCHES_PER_UPDATE * UPDATES,
        num_generations=GROUP_SIZE,
        max_completion_length=20,
        max_steps=UPDATES,
        learning_rate=1e-3,
        temperature=2.0,
        loss_type="grpo",
        adora_method="grpo",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=2,
        max_grad_norm=1e9,  # clipped gradients could not be compared
    )
    compare = CompareWithStock()
    trainer = RecordingTrainer(
        model=str(PRETRAINED_FOLDER),
        reward_funcs=reward_every_second_rollout,
        args=args,
        train_dataset=training_data_set(list(generate(16, seed=6))),
        processing_class=load_processor(str(PRETRAINED_FOLDER)),
        callbacks=[compare],
    )
    compare.trainer = trainer
    trainer.train()
    return trainer.updates


def test_every_update_has_stocks_gradient_on_its_rollouts(updates):
    """The relative distance of the gradients is below 1e-3.

    Rounding is 1e-5 on any processor; a rollout with a wrong weight or old log-probability is above
    1e-2.
    """
    assert len(updates) == UPDATES
    assert all(update["largest_norm"] > 1e-4 for update in updates), (
        "an update without a gradient shows nothing"
    )
    assert max(update["relative_distance"] for update in updates) < 1e-3


def test_groups_stay_whole_and_none_with_signal_is_lost_or_seen_twice(updates):
    """Each update learns from whole groups, and all together from every group with signal."""
    for update in updates:
        groups = {row // GROUP_SIZE for row in update["rows"]}
        assert sorted(update["rows"]) == [
            group * GROUP_SIZE + row for group in sorted(groups) for row in range(GROUP_SIZE)
        ]
    learned_groups = [
        row // GROUP_SIZE for update in updates for row in update["rows"][::GROUP_SIZE]
    ]
    assert sorted(learned_groups) == [
        group for group in range(16) if group not in GROUPS_WITHOUT_SIGNAL
    ]


def test_the_old_log_probabilities_are_those_of_the_policy_that_sampled(updates):
    """The first update has none, since they are those of its own pass.

    The others have them to the rounding of another packing, 1e-6; an update moves them by 1e-3.
    """
    assert not updates[0]["old_logp_gaps"]
    for update in updates[1:]:
        assert len(update["old_logp_gaps"]) == update["micro_batches"]
        assert max(update["old_logp_gaps"]) < 1e-4
