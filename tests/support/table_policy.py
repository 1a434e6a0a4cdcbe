"""A trainer whose policy is a table of logits in float64, for exact tests of the loss.

There is no model and no engine: the policy's log-probabilities of a rollout are read from the
table.
"""

from collections import defaultdict
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from adora_vl.packing.image_store import ImageBanks
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.entropy_bonus import EntropyBonus
from adora_vl.training.generation_logps import GenerationLogps
from adora_vl.training.guards import DriftGuard, RatioGuard, ReferenceGuard
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.training.old_logps import OldLogps
from adora_vl.types import Batch, StepContext
from tests.support.stand_ins import FakeAccelerator
from tests.support.step_context import step_context

TABLE_VOCABULARY = 7  # tokens


class LogitsTable(nn.Module):
    """A policy that is a table of logits: a distribution over 7 tokens for each token of each row.

    The logits, (rows, tokens, 7), are its only parameter, and do not depend on the prompt.
    """

    is_gradient_checkpointing = False

    def __init__(self, rows: int, tokens: int, shared: float = 0.0) -> None:
        """Draw the logits, always the same ones.

        Args:
            rows: the number of rollouts, numbered from 0.
            tokens: the most tokens of a rollout.
            shared: multiplies the sum of all rows' logits, which is added to the logits of each
                row. Above 0 learning from one row changes all others.
        """
        super().__init__()
        self.shared = shared
        self.rows_without_gradient = 0  # in passes that only compute log-probabilities
        draw = torch.Generator().manual_seed(3)
        shape = (rows, tokens, TABLE_VOCABULARY)
        logits = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.logits = nn.Parameter(3 * logits)

    def scores(self, row_B: Tensor, ids_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the tokens `ids_BC`, both (B, C).

        `row_B`: the numbers of the rows.
        """
        if not torch.is_grad_enabled():
            self.rows_without_gradient += len(row_B)
        logits_RCV = self.logits + self.shared * self.logits.sum(dim=0)
        logp_BCV = logits_RCV[row_B, : ids_BC.size(1)].log_softmax(dim=-1)
        entropy_BC = -(logp_BCV.exp() * logp_BCV).sum(dim=-1)
        return logp_BCV.gather(2, ids_BC[..., None]).squeeze(2), entropy_BC


class TableTrainer(AdoraGRPOTrainer):
    """Our trainer, whose model is a `LogitsTable`. A prompt is one token, the number of its row."""

    def _get_per_token_logps_and_entropies(
        self, model: LogitsTable, ids_BS: Tensor, *rest: Any, **_: object
    ) -> Any:
        """Make a pass as our trainer does, but without the columns of images."""
        return self.parts.policy_pass(model, ids_BS, *rest)


def look_up(
    model: LogitsTable,
    ids_BS: Tensor,
    mask_BS: Tensor,
    completion_length: int,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, None]:
    """Return a table's log-probabilities and entropies in place of TRL's method.

    That method returns a loss of experts as well.
    """
    row_B = ids_BS[:, 0]  # a prompt is one token, the number of its row
    completion_ids_BC = ids_BS[:, -completion_length:]
    logps_BC, entropies_BC = model.scores(row_B, completion_ids_BC)
    return logps_BC, entropies_BC, None


class FakeRecord:
    """A fake of the record of rollouts, which keeps the numbers of the rollouts that it gets."""

    def __init__(self) -> None:
        self.measured_rows: list[int] = []  # the rollouts that were compared with the engine

    def add_measured_drift(self, micro_batch: Batch, logps_BC: Tensor) -> None:
        self.measured_rows += micro_batch["rollout_number"].tolist()


def table_trainer(policy: LogitsTable, **keys: object) -> Any:
    """Return a trainer of a `LogitsTable` with the attributes that `_compute_loss` needs.

    With a KL term the reference is a copy of the policy as it is now. The trainer's
    `logged_metrics` has the list of values that were logged under each name.

    `keys`: the keys of the config that differ from their defaults.
    """
    logged_metrics = defaultdict[str, list[float]](list)
    # A table has no attention over a prompt that its rows could share, and large ratios are meant.
    settings: dict[str, Any] = {"adora_max_ratio": None, "adora_stock_step": ["share_prompt"]}
    settings |= keys
    context = step_context(
        lambda name, value: logged_metrics[name].append(value),
        accelerator=FakeAccelerator(),
        **settings,
    )
    trainer: Any = object.__new__(TableTrainer)
    trainer.__dict__.update(
        _attributes_of_stock(policy, context), log_metric=context.log, logged_metrics=logged_metrics
    )
    trainer.parts = _build_parts(trainer, policy, context)
    return trainer


def _attributes_of_stock(policy: LogitsTable, context: StepContext) -> dict[str, Any]:
    """Return the attributes that TRL's constructor would set, and that its loss reads."""
    args = context.config
    adaptive = args.use_adaptive_entropy
    return {
        "args": args,
        "accelerator": context.accelerator,
        "model": policy,
        "loss_type": args.loss_type,
        "beta": args.beta,
        "ref_model": deepcopy(policy) if args.beta else None,
        "num_iterations": args.num_iterations,
        "epsilon_low": args.epsilon,
        "epsilon_high": 5.0,
        "top_entropy_quantile": args.top_entropy_quantile,
        "entropy_coef": args.entropy_coef,
        "use_adaptive_entropy": adaptive,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "use_vllm": args.use_vllm,
        "vllm_importance_sampling_correction": args.vllm_importance_sampling_correction,
        "max_completion_length": args.max_completion_length,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": args.gradient_accumulation_steps,
        "state": SimpleNamespace(global_step=0),
        "_entropy_bonus_enabled": args.entropy_coef != 0 or adaptive,
        "_last_world_entropy": 0.0 if adaptive else float("inf"),
        "_entropy_window_stats": None,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_step": 0,
    }


def _build_parts(
    trainer: TableTrainer, policy: LogitsTable, context: StepContext
) -> SimpleNamespace:
    """Build the parts of the training step that `_compute_loss` uses."""
    args = context.config
    reference_guard = ReferenceGuard(context, rounding=0.0)
    # It would make a pass of the reference, which tests that count passes do not expect.
    reference_guard.needs_check = lambda step: False  # type: ignore[method-assign]
    policy_pass = PolicyPass(
        look_up,
        context.accelerator,
        args,
        may_have_images=False,
        checkpointing_context=lambda size: nullcontext(),
    )
    recorder = FakeRecord()
    micro_batcher = MicroBatcher(
        context,
        ImageBanks(),
        every_row_counts=trainer._entropy_bonus_enabled or args.beta != 0.0,
    )
    return SimpleNamespace(
        context=context,
        policy_pass=policy_pass,
        ratio_guard=RatioGuard(context),
        recorder=recorder,
        micro_batcher=micro_batcher,
        entropy_bonus=EntropyBonus(args, micro_batcher),
        generation_logps=GenerationLogps(
            context=context,
            policy=policy,  # a table
            reference=trainer.ref_model,
            model_pass=trainer._get_per_token_logps_and_entropies,
            policy_pass=policy_pass,
            old_logps=OldLogps(context, has_dropout=False),
            importance_ratio=ImportanceRatio(context),
            drift_guard=DriftGuard(context),
            reference_guard=reference_guard,
            record_drift=recorder.add_measured_drift,
            metrics_by_mode=trainer._metrics,
        ),
    )
