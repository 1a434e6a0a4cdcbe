"""Computes the log-probabilities of a generation that the loss compares the new policy's with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from adora_vl.models.families import freeze
from adora_vl.packing.policy_pass import ModelPass, PolicyPass, generation_logps
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.training.batch_rows import RowReader
from adora_vl.training.guards import DriftGuard, ReferenceGuard
from adora_vl.training.old_logps import OldLogps
from adora_vl.types import Batch, StepContext


@dataclass(frozen=True, kw_only=True)
class GenerationLogps:
    """Computes old and reference log-probabilities, and compares the engine's with the policy's.

    The old policy is the one that has sampled the rollouts. TRL's loss takes the ratio of the new
    policy to the old one, and with `beta` the distance of the new policy from the reference. Before
    the first optimizer step on a generation the training pass, whose loss is backpropagated, gives
    the old log-probabilities too. Later micro-batches need a pass of their own, which `old_logps`
    decides. There are B rollouts of C tokens. All methods are collective: with sharded weights
    every rank has to make each pass.
    """

    context: StepContext
    policy: PreTrainedModel
    reference: PreTrainedModel | None
    """None without a KL term, and where the policy without its adapter is the reference."""
    model_pass: ModelPass
    """TRL's `_get_per_token_logps_and_entropies`, whose first argument is the model."""
    policy_pass: PolicyPass
    old_logps: OldLogps
    """Decides which rollouts need a pass of their own."""
    importance_ratio: ImportanceRatio
    drift_guard: DriftGuard
    reference_guard: ReferenceGuard
    record_drift: Callable[[Batch, Tensor], None]
    """Records how far the engine is from the policy's log-probabilities, (B, C), of a batch."""
    metrics_by_mode: Mapping[str, dict[str, list[float]]]
    """TRL's metrics for the next log, under "train" and "eval"."""

    @property
    def makes_passes(self) -> bool:
        """Whether the policy or the reference model makes a pass over each batch before grading."""
        has_kl_term = self.context.config.beta != 0.0
        return has_kl_term or self.old_logps.needs_pass_over_generation

    def add_to_generation(self, batch: Batch, mode: str) -> None:
        """Add the log-probabilities that are computed before the rollouts are graded.

        - `old_per_token_logps`, those of the policy that has sampled the rollouts, unless later
          passes compute them.
        - `ref_per_token_logps`, those of the reference model, if the loss has a KL term.

        Before the first update of a run the two have to agree. Raises `SharedUserError` if they do
        not, since the reference is then not the model that the policy starts from.

        Args:
            batch: the generation of this rank.
            mode: "train" or "eval".
        """
        config = self.context.config
        is_training = mode == "train"
        rows_per_pass = config.per_device_eval_batch_size
        if is_training:
            rows_per_pass = config.per_device_train_batch_size

        def compute_logps(model: PreTrainedModel) -> Tensor:
            """Return the log-probabilities of the batch's completions by a model, (B, C)."""
            model_pass = partial(self.model_pass, model)
            return generation_logps(batch, model_pass=model_pass, rows_per_pass=rows_per_pass)

        with disable_gradient_checkpointing(self.policy, config.gradient_checkpointing_kwargs):
            # In a training, later passes over single micro-batches may take the place of this one.
            needs_old_pass_now = self.old_logps.needs_pass_over_generation
            if not is_training:
                needs_old_pass_now = self.old_logps.loss_needs_old_logps
            if needs_old_pass_now:
                old_logps_BC = compute_logps(self.policy)
                batch["old_per_token_logps"] = old_logps_BC
                # The loss is corrected by the ratio of the policy's probabilities to the engine's.
                if self.old_logps.corrects_engine:
                    for metric in self.importance_ratio.add_to_batch(batch, old_logps_BC):
                        self.metrics_by_mode[mode][metric.name].append(metric.value)
            if config.beta != 0.0:
                batch["ref_per_token_logps"] = self._compute_reference_logps(compute_logps)
            if is_training and self.reference_guard.needs_check(self.context.state().global_step):
                # It computes the policy's log-probabilities itself where the batch has none.
                self.reference_guard.check(batch, self.context.policy_logps)

    def _compute_reference_logps(
        self, compute_logps: Callable[[PreTrainedModel], Tensor]
    ) -> Tensor:
        """Return the reference's log-probabilities of a batch, (B, C).

        With LoRA the reference is the policy with another adapter, or with none.

        `compute_logps`: returns the log-probabilities of the batch by a model.
        """
        if self.reference is not None:
            return compute_logps(self.reference)
        policy = self.context.accelerator.unwrap_model(self.policy)
        # TRL keeps a copy of an adapter that the run continues as "ref". None: the base model
        # alone.
        reference_adapter = "ref" if "ref" in policy.peft_config else None
        with use_adapter(policy, adapter_name=reference_adapter):
            logps_BC = compute_logps(self.policy)
        # PEFT has made all of the adapter trainable again, also in components that the run does not
        # train (`adora_freeze`).
        freeze(policy, self.context.config.adora_freeze)
        return logps_BC

    def check_shared_prompts(self, batch: Batch) -> None:
        """Compare the policy's pass with and without shared prompts, once in a run.

        If they disagree, prompts are not shared from then on. The check comes before a generation
        is cut into micro-batches, since more rows fit into one if they share their prompts. It
        compares only as many rows as fit into memory without shared prompts.
        """
        if not self.policy_pass.needs_check:
            return
        row_count = min(self.context.layout.micro_batch_rows, len(batch["completion_ids"]))
        compared_rows = RowReader(batch).take(range(row_count))
        self.policy_pass.check(self.policy, compared_rows)

    def add_to_later_updates(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the old log-probabilities of later optimizer steps and add them to their batches.

        The first optimizer step on a generation changes the weights, so this is called before it.
        Groups whose advantages are all 0 need none, even where a KL term learns from them. Every
        rank makes equally many passes. Raises `RolloutError` where the engine's log-probabilities
        are too far from the policy's.

        `micro_batches`: those of the generation. They get the column `old_per_token_logps`.
        """
        checkpointing_kwargs = self.context.config.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.policy, checkpointing_kwargs):
            # Each of these passes is over some rows of a micro-batch.
            for old_pass in self.old_logps.passes_to_make(micro_batches):
                rows = old_pass.rows_as_batch()
                # `watch` gives the pass the columns that are no argument of TRL's method.
                with self.policy_pass.watch(rows):
                    logps_BC = generation_logps(
                        rows,
                        model_pass=partial(self.model_pass, self.policy),
                        rows_per_pass=len(rows["completion_ids"]),
                    )
                rows["old_per_token_logps"] = logps_BC
                if self.old_logps.corrects_engine:
                    self.compare_with_engine(rows, logps_BC)
                old_pass.store(rows)  # into the micro-batch

    def add_to_loss(
        self, stored_micro_batch: Batch, micro_batch: Batch, micro_step: int, logps_BC: Tensor
    ) -> None:
        """Add to a micro-batch the columns of TRL's loss that follow from its training pass.

        These are the importance ratio to the engine, and old log-probabilities that no earlier pass
        has computed. This is called between the policy's forward pass and the rest of TRL's loss.
        Raises `RolloutError` where policy and engine are too far apart.

        Args:
            stored_micro_batch: the micro-batch as the next iteration (`num_iterations`) reads it.
            micro_batch: its copy for this loss alone.
            micro_step: how many micro-batches of the generation were learned from before this one.
            logps_BC: the policy's log-probabilities in the pass of this loss, detached.
        """
        old_logps = self.old_logps
        if self.importance_ratio.needs_ratio(micro_batch) and old_logps.compares_engine(micro_step):
            self.compare_with_engine(micro_batch, logps_BC)
        old_logps.fill_missing(micro_batch, logps_BC)
        old_logps.keep_for_next_iteration(stored_micro_batch, micro_batch, logps_BC, micro_step)

    def compare_with_engine(self, micro_batch: Batch, logps_BC: Tensor) -> None:
        """Compare policy and engine on the tokens of a micro-batch, and add their ratio.

        The column `importance_sampling_ratio`, policy to engine, is added where it corrects the
        loss. Raises `RolloutError` where the two are too far apart.

        `logps_BC`: the policy's log-probabilities, detached, by the weights that have sampled the
        micro-batch.
        """
        self.drift_guard.check_batch(micro_batch, self.context.state().global_step, logps_BC)
        self.record_drift(micro_batch, logps_BC)
        if self.old_logps.corrects_engine:
            # The metrics of the ratio are averaged over the micro-batches of the step.
            for metric in self.importance_ratio.add_to_batch(micro_batch, logps_BC):
                self.context.log_weighted(metric.name, metric.value, weight=metric.weight)
