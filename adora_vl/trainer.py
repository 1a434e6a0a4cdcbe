"""A training step, top to bottom: TRL's `GRPOTrainer` with ADORA's weights and checked rollouts.

    1. a generation   sample, grade, record; resample, weigh; then rebalance, cut into
                      micro-batches, compute old log-probabilities for those of later updates
    2. a micro-batch  the policy's pass, its ratio to the engine, the loss

The objects that work in a step are `self.parts`, a `StepParts` of `parts.py`; this file has the
order in which they work. Methods of the whole run, of its data and log, and of checkpoints come
after those of the step. Where a method of stock TRL is overridden, the docstring says what TRL does
there and why that is not enough.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers import trainer as transformers_trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from adora_vl.checkpoint.callback_states import (
    ENDED_KEY,
    restore_callback_states,
    was_ended_by_callback,
)
from adora_vl.checkpoint.run_files import recording_saved_files
from adora_vl.checkpoint.store import read_checkpoint_manifest
from adora_vl.checkpoint.trl_state import load_to_numbered_cpus
from adora_vl.checkpoint.universal import expect_universal_checkpoint, is_universal, load_shards
from adora_vl.checkpoint.writer import move_old_run_aside
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import BatchLayout, regroups_micro_batches
from adora_vl.config.run_context import RunContext
from adora_vl.data.dataloader import DistinctRows, EpochRepeatSampler, NoPrefetch
from adora_vl.model_setup import prepare_models, use_own_classes_in_trl
from adora_vl.models.adapter import without_reference_adapter
from adora_vl.models.load import restore_weights
from adora_vl.packing.policy_pass import WatchedPass, generation_logps
from adora_vl.packing.split_attention import disable_cudnn_attention
from adora_vl.parts import StepParts
from adora_vl.preflight.python_inputs import AnyDatasets, Datasets
from adora_vl.preflight.request import (
    ModelSource,
    RunRequest,
    copy_or_default_config,
    model_source,
    refuse_unsupported_arguments,
    rows_for_environments,
)
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.preflight.run_checks import run_checks
from adora_vl.record import trackers
from adora_vl.record.card import write_card
from adora_vl.record.manifest import (
    end_manifest,
    mark_failed_on_error,
    mark_finished,
    write_manifest,
)
from adora_vl.record.metrics import write_missing_end_of_metrics
from adora_vl.record.micro_batch_means import MicroBatchMeans
from adora_vl.record.phases import PhaseClock, start_clock
from adora_vl.record.shown_metrics import LARGEST_VALUE_KEYS, keep_largest
from adora_vl.rollout.rollouts import RolloutGroup, StepKey
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.training.entropy_bonus import TRLBonus
from adora_vl.training.generation import Generation, ScoredGroups
from adora_vl.training.guards import errors_with_step
from adora_vl.training.rollout_facts import rows_of_rank
from adora_vl.types import Batch, Row, StepContext, loss_mask
from adora_vl.utils import compat
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.files import set_default_file_modes
from adora_vl.utils.seeding import seeded_by_key

_SAMPLING_REMEDY = "give tools, or override _generate_and_score_completions"
# Methods of TRL's step that ours does not call, and what to do in place of overriding them.
_REMEDY_BY_UNCALLED_METHOD = {
    "_calculate_rewards": "give a function as reward_funcs",
    "_generate": _SAMPLING_REMEDY,
    "_get_tool_suffix_ids": _SAMPLING_REMEDY,
    "_tokenize_prompts": "change the prompts of train_dataset",
    "_tool_call_loop": _SAMPLING_REMEDY,
}


def _refuse_override(trainer_class: type, name: str, remedy: str) -> None:
    """Raise `UserError` if a class overrides a method of TRL's that no step of ours calls.

    The override would do nothing, and no error would say so.

    Args:
        trainer_class: a subclass of our trainer.
        name: the name of the method.
        remedy: what to do in place of overriding it.
    """
    if getattr(trainer_class, name) is not getattr(GRPOTrainer, name):
        raise UserError(
            f"{trainer_class.__name__}.{name}: a step calls no such method here, so it would do "
            f"nothing; {remedy}"
        )


class AdoraGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """A trainer like `trl.GRPOTrainer`, whose `args` is an `AdoraGRPOConfig`.

    A generation is all rollouts that are sampled before the policy learns again. It consists of
    groups, the rollouts of one prompt each. A group has signal if any of its advantages is not 0.
    A generation is split into micro-batches, of which one or more make an optimizer step. TRL
    counts the micro-batches of the whole run in `_step`. Tensors have P groups of G rollouts, or B
    rollouts of C completion tokens.

    The objects that do the work of a step are attributes of `self.parts`. For example, `parts.pool`
    remembers groups that wait for a later generation, and `parts.generation_sampler` samples.
    `_metric_means` averages what TRL logs over the micro-batches of a step. Its `snapshot` returns
    a function that undoes what was logged since.
    """

    parts: StepParts
    run: ResolvedRun
    # The manifest of the run, from the beginning of `train` on.
    manifest: dict[str, Any]
    _step: int  # TRL's count of micro-batches
    _buffered_inputs: list[Batch] | None  # TRL's: the micro-batches of the present generation
    # The seconds that the present optimizer step has taken, up to its last micro-batch.
    _seconds_of_step: float = 0.0
    # The values of `_step` at which the present generation is learned from, such as 4 to 7.
    _micro_steps_of_generation: range = range(0)

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Raise `UserError` for a subclass that overrides a method of TRL's which no step calls."""
        super().__init_subclass__(**kwargs)
        for name, remedy in _REMEDY_BY_UNCALLED_METHOD.items():
            _refuse_override(cls, name, remedy)

    def __init__(  # noqa: PLR0913  # the parameters of TRL's trainer
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: AdoraGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: ProcessorMixin | None = None,
        reward_processing_classes: object = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        quantization_config: object = None,
        peft_config: object = None,
        tools: Sequence[Any] | None = None,
        rollout_func: object = None,
        environment_factory: Callable[[], object] | None = None,
        *,
        run: ResolvedRun | None = None,
    ) -> None:
        """Take the parameters of stock TRL 1.16.

        Stock TRL loads the weights first and builds its own generation class. Ours first makes all
        checks of `adora_vl/preflight/run_checks.py`, and uses a generation class of its own. It
        does not change the configs that Python code passes. So a second trainer that is built from
        them belongs to the same run.

        `run`: a run that the command has checked already. Its data, rewards and adapter are used.
        Raises `UserError`, in one line, for what cannot work.
        """
        if run is None:
            config = copy_or_default_config(args, model)
            refuse_unsupported_arguments(
                train_dataset,
                reward_funcs=reward_funcs,
                rollout_func=rollout_func,
                has_environments=bool(environment_factory or config.environment_factory),
            )
            source = model_source(
                model,
                config=config,
                processor=processing_class,
                peft_config=peft_config,
                quantization_config=quantization_config,
            )
            run = self._check_run(
                config,
                source=source,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                rewards=reward_funcs,
                tools=tools or (),
                environment_factory=environment_factory,
            )
        self.run = run
        self.manifest = {}  # filled in `train`
        disable_cudnn_attention()
        trackers.prepare_trackers(run.config.report_to, run.config.output_dir)
        clock = start_clock(run.config, self.log_metric, evaluates=run.evaluations is not None)
        compat.SHARD_LOADING.install(load_shards, on=transformers_trainer)
        policy = run.policy() if isinstance(model, str) else model
        with use_own_classes_in_trl(run, policy, clock.phase):
            super().__init__(
                model=policy,
                reward_funcs=list(run.rewards.functions),
                args=run.config,
                train_dataset=run.data.train_dataset,
                eval_dataset=run.data.eval_dataset,
                processing_class=run.prompts.processor,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=run.request.model.peft_config,
            )
        self._metric_means = MicroBatchMeans(run.config, self._metrics["train"])
        self.prefetch = NoPrefetch()  # until the data loader is made
        self.parts = self._build_parts(clock)
        self._replace_callbacks()

    def _check_run(
        self,
        config: AdoraGRPOConfig,
        source: ModelSource,
        train_dataset: Dataset | IterableDataset | None,
        eval_dataset: AnyDatasets | None,
        rewards: object,
        tools: Sequence[str | Callable[..., Any]],
        environment_factory: Callable[[], object] | None,
    ) -> ResolvedRun:
        """Make all checks of a run from Python, before its weights are loaded.

        The arguments are those of a `RunRequest`. If `train_dataset` is None, the prompts are
        empty, and the `reset` of each environment says its problem. Raises `UserError`, in one
        line, for what cannot work.
        """
        if config.use_vllm:
            # Only a run without an engine samples by this method.
            _refuse_override(type(self), "_generate_single_turn", remedy="set use_vllm: false")
        context = RunContext.of_launch(config, output_dir_mode="ignore")
        if train_dataset is None:
            train_dataset = rows_for_environments(config, processes=context.sharding.processes)
        request = RunRequest(
            config=config,
            model=source,
            data_source=Datasets(train_dataset, eval_dataset),
            rewards=rewards,
            tools=tools,
            environment_factory=environment_factory,
        )
        return run_checks(request, context)

    def _build_parts(self, clock: PhaseClock) -> StepParts:
        """Return the objects that a training step consists of, once TRL has loaded the models.

        `clock`: what measures the phases of a step.
        """
        context = StepContext(
            accelerator=self.accelerator,
            config=self.run.config,
            log=self.log_metric,
            pad_id=self._tokenizer.pad_token_id,
            state=lambda: self.state,
            policy_logps=self._policy_logps,
            save_now=self.save_here,
            log_weighted=self._metric_means.add,
        )
        models = prepare_models(self.model, self.ref_model, self.run, self._dist.gather_params)
        return StepParts(
            self,
            self.run,
            context,
            clock=clock,
            models=models,
            trl_pass=super()._get_per_token_logps_and_entropies,
        )

    def _replace_callbacks(self) -> None:
        """Add this package's callbacks, and remove those of Transformers that print."""
        # Transformers' progress bar has another class in a notebook than in a terminal.
        self.remove_callback(transformers_trainer.DEFAULT_PROGRESS_CALLBACK)
        self.remove_callback(PrinterCallback)
        for callback in self.parts.callbacks(self.models_by_role(), self.log_evaluation):
            self.add_callback(callback)

    @property
    def layout(self) -> BatchLayout:
        """The sizes of a generation and of its micro-batches."""
        return self.parts.context.layout

    def models_by_role(self) -> dict[str, Any]:
        """Return the present policy, and the reference model; None in a run without one."""
        return {"policy": self.model, "reference": self.ref_model}

    # ------------------------------------------------------------------------------ 1. a generation

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return the next micro-batch to train on; a second call returns the same one.

        Stock TRL shuffles the rows of a generation, splits them into micro-batches, and pads each
        row to the longest of the generation. Ours keeps groups together, leaves out groups without
        signal, and pads to the longest row of the micro-batch.

        `generation_batch`: the rows of the data loader, from which a new generation is sampled if
        the present one is used up.
        """
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        # For most configs this class splits the generation into micro-batches, else TRL does.
        if regroups_micro_batches(self.args):
            micro_batch = self._next_micro_batch(generation_batch)
        else:
            micro_batch = super()._prepare_inputs(generation_batch)
        if self.accelerator.sync_gradients:
            # This micro-batch is the last one before the weights change. In a run with `ahead` the
            # servers are compared with the policy here.
            self.parts.generation_sampler.compare_servers_before_update()
        return micro_batch

    def _next_micro_batch(self, rows: list[Row]) -> Batch:
        """Return the next micro-batch to train on, where this class splits generations itself.

        If the present generation is used up, the next one is sampled from these rows. TRL counts
        micro-batches through the whole run, in `_step`. For example, with 4 micro-batches per
        generation `_step` 6 takes the one with the index 2.
        """
        if self._step not in self._micro_steps_of_generation:
            self._buffered_inputs = self._sample_generation(rows)
            self._micro_steps_of_generation = self.layout.micro_steps_of_generation(self._step)
        assert self._buffered_inputs is not None
        micro_batch = self._buffered_inputs[self._step % self.layout.steps_per_generation]
        # A micro-batch is empty if all of its groups were left out for having no signal.
        if micro_batch:
            # This check is made once in a run. A run that resumes within a generation has not made
            # it in `_sample_generation`.
            self.parts.generation_logps.check_shared_prompts(micro_batch)
        return micro_batch

    def _sample_generation(self, rows: list[Row]) -> list[Batch]:
        """Sample a generation of rollouts from these rows, and return its micro-batches.

        Groups without signal are left out, and a micro-batch that gets no group is empty. With
        several iterations (`num_iterations`) the same micro-batches are learned from again.
        """
        key = self._step_key
        self._metric_means.begin()  # averages over the micro-batches that follow
        generation_logps = self.parts.generation_logps
        # With refill a sleeping engine stays awake between the batches, unless the policy's own
        # passes after each batch need its memory.
        with self.parts.generation_sampler.keeping_engine_awake(generation_logps.makes_passes):
            # TRL's method, which a subclass may override.
            batch = self._generate_and_score_completions(rows)
        generation_logps.check_shared_prompts(batch)
        # 9. Split into micro-batches; groups without signal are left out.
        micro_batches = self.parts.micro_batcher.split(batch, key.position)
        # 10. Compute the old log-probabilities of micro-batches that follow a weight update.
        generation_logps.add_to_later_updates(micro_batches)
        return micro_batches

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        """Return the batch of a generation, sampled, graded and weighed.

        It differs from stock TRL in these points:

        - TRL processes the image of every copy of a row twice. Ours processes each image once.
        - Whenever vLLM samples, TRL makes a pass for the old log-probabilities here. Ours makes it
          later, and only where it is needed.
        - TRL keeps every group. Ours replaces groups without signal.
        - TRL returns group-normalised advantages. Ours then weighs all groups together.

        All ranks go through the stages together.
        """
        if not self.model.training:
            return self._sample_for_evaluation(inputs)
        parts = self.parts
        pool = parts.pool
        generation_sampler = parts.generation_sampler
        self.prefetch.finish()
        trackers.empty_table(self._logs)
        if self._step == self._first_micro_step:
            # A run that resumes from a checkpoint written within this step begins the step again.
            unfinished = parts.checkpoint_state.unfinished_generation
            unfinished.remember_step_start(self._step, self._metadata())
        generation = pool.generation_numbers.generation_at(
            self._step_key, self.num_generations, inputs
        )
        # 1. Draw: rows become groups; an image that cannot be read ends the run.
        drawn_groups = generation_sampler.draw(generation, inputs)
        # A run that dies before it learns from this generation resumes at this point.
        pool.remember_state_before_step(generation)
        with generation_sampler.sampling():
            # 2. Schedule: which groups begin or go on, and for how many tokens.
            generation_sampler.schedule(generation, drawn_groups)
            # 3. Sample their rollouts, with all turns.
            groups = generation_sampler.sample(generation, drawn_groups)
        # 4. Select complete groups, equally many on every rank; other groups wait in the pool.
        complete_groups = pool.select_complete(groups, pool.max_groups)
        assert complete_groups, "stage 3 has completed some on every rank"
        # 5. Build the batch, and 6. score it.
        scored_groups = self._score(generation, complete_groups)
        # 7. Refill: groups of further problems replace those without signal.
        scored_groups = parts.refill.replace_groups(generation, scored_groups, self._score)
        # 8. Weigh the groups, once.
        batch = self._weigh(generation, scored_groups)
        self.prefetch.start()
        return batch

    def _sample_for_evaluation(self, rows: list[Row]) -> Batch:
        """Return a batch of TRL's own evaluation, sampled and graded, with TRL's advantages."""
        parts = self.parts
        self.prefetch.finish()
        generation = parts.pool.generation_numbers.generation_at(
            self._step_key, self.num_generations_eval, rows
        )
        drawn_groups = parts.generation_sampler.draw(generation, rows)
        with parts.generation_sampler.sampling():
            groups = parts.generation_sampler.sample_all(generation, drawn_groups)
        scored_groups = self._score(generation, groups)
        return self._with_advantages(
            scored_groups.batch, scored_groups.assessment.trl_advantages_PG
        )

    def _score(self, generation: Generation, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        """Make groups into a batch, grade their rollouts, and compute TRL's advantages.

        This is stages 5 and 6 of a generation. The final advantages are computed later, by
        `_weigh`. Collective: every rank has equally many groups.

        Args:
            generation: where in the run the groups are sampled.
            groups: this rank's groups, whose rollouts have all ended.

        Raises:
            RunError: a reward function failed, or no rollout has a reward.
            RolloutError: the log-probabilities of engine and policy are too far apart.
        """
        parts = self.parts
        is_training = generation.key.mode == "train"
        step = generation.key.step
        prompts = parts.prompt_reader.pop(groups, generation)
        unscored_groups = parts.batch_builder.build(generation, groups, prompts)
        # The log-probabilities of the reference model, for example.
        parts.generation_logps.add_to_generation(unscored_groups.batch, generation.key.mode)
        # The seconds of the block are logged under the name of the phase.
        with parts.clock.phase("grading"):
            scores = parts.reward_functions.score(unscored_groups, self.state)
        # Rewards, lengths and further facts of all ranks' rollouts.
        facts = parts.scorer.score(unscored_groups, scores, generation.group_size, step)
        if is_training:
            if self.accelerator.is_main_process:
                parts.first_answers.warn_if_none_is_right(unscored_groups.rows, facts)
            # Ends the run if the log-probabilities of engine and policy are too far apart.
            parts.generation_logps.drift_guard.check_batch(unscored_groups.batch, step)
        # TRL's advantages, and which groups have signal.
        assessment = parts.advantage_computer.assess(facts, generation.group_size, step)
        scored_groups = ScoredGroups(
            groups=groups, batch=unscored_groups.batch, facts=facts, assessment=assessment
        )
        with parts.clock.phase("other"):
            parts.metrics_logger.log_scored(generation, unscored_groups, scored_groups)
        return scored_groups

    def _weigh(self, generation: Generation, scored_groups: ScoredGroups) -> Batch:
        """Compute the final advantages, and return the batch with them. Collective.

        This is stage 8 of a generation. ADORA multiplies the advantages of each group by a weight,
        which may depend on all other groups. So this is called once, when no group is replaced any
        more. Then extensions may change the batch, and its metrics are logged.

        Args:
            generation: where in the run the groups were sampled.
            scored_groups: this rank's groups, with what is known of the groups of all ranks.
        """
        parts = self.parts
        advantages = parts.advantage_computer.compute(scored_groups.assessment)
        batch = self._with_advantages(scored_groups.batch, advantages.final_PG)
        # The seconds of each block are logged under the name of its phase.
        with parts.clock.phase("policy"):
            for extension in parts.extensions:
                extension.after_weighing(generation, batch, advantages)
        with parts.clock.phase("other"):
            parts.metrics_logger.log_learned(generation, batch, advantages)
        return batch

    def _with_advantages(self, batch: Batch, advantages_PG: Tensor) -> Batch:
        """Return the batch with the columns `advantages` and `num_items_in_batch`. Collective.

        TRL's losses divide by `num_items_in_batch`, the number of tokens that they count on all
        ranks together.

        Args:
            batch: B rollouts of this rank. It is changed in place.
            advantages_PG: the advantages of all ranks' groups.
        """
        advantages_B = rows_of_rank(advantages_PG.flatten(), self.accelerator)
        batch["advantages"] = advantages_B.to(self.accelerator.device, non_blocking=True)
        batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()
        return batch

    @property
    def _step_key(self) -> StepKey:
        """The optimizer step and micro-batch at which the run is. Seeds are derived from it."""
        return StepKey(
            mode="train" if self.model.training else "eval",
            step=self.state.global_step,
            micro=self._step % self.args.gradient_accumulation_steps,
        )

    @property
    def _first_micro_step(self) -> int:
        """The value of `_step`, TRL's count of micro-batches, at which the optimizer step began.

        For example, with 4 micro-batches per optimizer step it is 8 while `_step` is 8 to 11. A run
        that resumes from this step's checkpoint begins there.
        """
        return int(self._step - self._step % self.args.gradient_accumulation_steps)

    # ----------------------------------------------------------------------------- 2. a micro-batch

    def training_step(self, model: PreTrainedModel, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Run one micro-batch forward and backward, and return its loss, ().

        It differs from stock TRL in these points:

        - TRL runs every micro-batch. Ours skips empty ones, which are empty on all ranks.
        - TRL counts the micro-batches that were run. Ours counts as if every optimizer step had
          all of its micro-batches, because a run that resumes after a shorter step counts so.
        - If a micro-batch runs out of a GPU's memory, ours runs it once more, with all layers
          recomputed.
        """
        start_time = time.perf_counter()
        model.train()
        metrics = self._metrics["train"]
        # `get` does not create the entry. If this step fails, the checkpoint that is then written
        # must not have an entry without a value.
        step_times_before = len(metrics.get("step_time", ()))
        trl_step = partial(super().training_step, model, inputs, num_items_in_batch)
        loss = self._train_unless_empty(trl_step, inputs)
        # TRL logs the time of a step after every `gradient_accumulation_steps` micro-batches. The
        # last step of an epoch may have fewer, so TRL's entries then come in the middle of steps.
        # So TRL's entry is removed, and ours is added where the weights change.
        del metrics["step_time"][step_times_before:]
        self._seconds_of_step += time.perf_counter() - start_time
        if self.accelerator.sync_gradients:
            self._step += self.layout.micro_step_correction(self._step)
            self._metric_means.begin()
            metrics["step_time"].append(self._seconds_of_step)
            self._seconds_of_step = 0.0
        return loss

    def _train_unless_empty(self, trl_step: Callable[[], Tensor], inputs: object) -> Tensor:
        """Run TRL's training step on the next micro-batch, and return its loss; 0 for an empty one.

        A micro-batch is empty if all of its groups were left out for having no signal. Where TRL
        splits the generation, no micro-batch is empty.

        Args:
            trl_step: TRL's training step. If it runs out of memory, it is run a second time.
            inputs: the rows of the data loader, which TRL's training step gets too.
        """
        run_with_retry = self.parts.recomputed_layers.run_with_retry
        if not regroups_micro_batches(self.args):
            return run_with_retry(trl_step, snapshot_log=self._metric_means.snapshot)
        micro_batch = self._prepare_inputs(inputs)
        if not micro_batch:
            self._step += 1  # TRL's step would count this micro-batch, but it is not run
            return torch.zeros((), device=self.args.device)
        # TRL's step calls `_prepare_inputs` again, which returns the same micro-batch. What it logs
        # is averaged over the micro-batches of the step, weighed by their tokens or rows.
        with self._metric_means.combine_logged(micro_batch):
            return run_with_retry(trl_step, snapshot_log=self._metric_means.snapshot)

    def _compute_loss(self, model: PreTrainedModel, inputs: Any) -> Tensor:
        """Return the loss of a micro-batch, (), multiplied by its weight in the optimizer step.

        It differs from stock TRL in three points:

        - TRL takes the ratio to the engine from an earlier pass. Ours computes it in this pass.
        - TRL averages over the rows of a micro-batch, however many there are. Ours weighs a
          micro-batch by its rows or tokens.
        - TRL clips the ratio of new to old policy on one side only. Ours also skips an optimizer
          step in which this ratio explodes.

        The random numbers that a micro-batch draws, such as dropout's, are seeded by its position
        alone, so that a resumed run draws the same ones.

        Args:
            model: the policy, with or without a wrapper.
            inputs: the micro-batch. The columns that are added to it here are kept only where the
                next iteration (`num_iterations`) needs them.
        """
        micro_batch = cast("Batch", {**inputs})  # columns are added for this loss alone
        parts = self.parts
        if not model.training:
            with parts.policy_pass.watch(micro_batch):
                evaluation_loss: Tensor = super()._compute_loss(model, micro_batch)
            return evaluation_loss
        # The number of micro-batches of this generation that were learned from before this one.
        micro_step = self._step % self.layout.micro_batches_per_generation
        # The column `old_per_token_logps`, from which TRL takes the ratio of new to old policy.
        parts.generation_logps.old_logps.set_or_remove_column(micro_batch, micro_step)
        # The entropy bonus that TRL adds below. It is read before TRL's loss, which changes an
        # adaptive coefficient at the end of a step.
        trl_bonus = parts.entropy_bonus.trl_bonus(
            self.entropy_coef,
            last_entropy=self._last_world_entropy,
            micro_batches_per_step=self.current_gradient_accumulation_steps,
        )
        # Called between the policy's pass and the rest of TRL's loss, it adds the column of the
        # ratio to the engine.
        add_to_loss = partial(parts.generation_logps.add_to_loss, inputs, micro_batch, micro_step)
        with (
            parts.policy_pass.watch(micro_batch, add_to_loss) as watched_pass,
            self._seeded_by_micro_batch(),
        ):
            loss: Tensor = super()._compute_loss(model, micro_batch)
        return self._complete_loss(loss, micro_batch, watched_pass, trl_bonus=trl_bonus)

    def _complete_loss(
        self, loss: Tensor, micro_batch: Batch, watched_pass: WatchedPass, *, trl_bonus: TRLBonus
    ) -> Tensor:
        """Turn TRL's loss of a micro-batch into its part of the loss of the optimizer step, ().

        If the ratio of new to old policy explodes, the result is NaN, with which every rank skips
        the optimizer step. Otherwise it is multiplied by the weight of the micro-batch, and what
        TRL's entropy bonus lacks is added. Collective.

        Args:
            loss: TRL's loss of the micro-batch, ().
            micro_batch: with the columns that this loss has used.
            watched_pass: log-probabilities and entropies of the policy's pass.
            trl_bonus: the entropy bonus that is a part of TRL's loss.
        """
        parts = self.parts
        entropies_BC = cast("Tensor", watched_pass.entropies_BC)  # TRL's loss asks for them
        # A micro-batch has this column if it is weighed by its tokens. The loss of a mixture of
        # experts contains an auxiliary loss, so TRL's own metric of the policy loss stays.
        if "share_of_tokens" in micro_batch and not self.aux_loss_enabled:
            self._replace_policy_loss_metric(
                parts.entropy_bonus.policy_loss_sums(micro_batch, loss, entropies_BC, trl_bonus)
            )
        loss = parts.ratio_guard.loss_or_nan(loss, watched_pass.logps_BC, micro_batch)
        loss = loss * parts.micro_batcher.loss_weight(micro_batch)
        if parts.entropy_bonus.is_on:
            loss = loss + parts.entropy_bonus.missing_bonus(micro_batch, entropies_BC, trl_bonus)
        return loss

    def _replace_policy_loss_metric(self, sums_2: Tensor) -> None:
        """Replace the loss that TRL has logged by the average over the tokens of all ranks.

        For example, let the first rank have the loss 0.5 over 10 tokens, and the second 0.1 over
        30. Their sums (5, 10) and (3, 30) give 8 / 40 = 0.2. Collective.

        `sums_2`: this rank's policy loss times its number of tokens, and that number.
        """
        total, token_count = self.accelerator.reduce(sums_2, reduction="sum").tolist()
        self._metrics["train"]["policy_loss"][-1] = total / max(token_count, 1.0)

    def _seeded_by_micro_batch(self) -> AbstractContextManager[None]:
        """Return a context in which random numbers are seeded by the micro-batch and the rank.

        For example, the seed of micro-batch 0 of step 12 on rank 1 is made of
        `micro-batch/42/12/0/1`, with the run's seed 42.
        """
        rank = self.accelerator.process_index
        return seeded_by_key(f"micro-batch/{self.args.seed}/{self._step_key.position}/{rank}")

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return 1 at the tokens of the highest entropy, (B, C).

        Stock TRL learns from these tokens alone. Ours also keeps the mask for the entropy bonus.
        """
        chosen_BC: Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        self.parts.entropy_bonus.high_entropy_mask_BC = chosen_BC
        return chosen_BC

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities of completions, and entropies where they are asked for.

        Stock TRL computes the prompt again for every rollout, and pads rows to one length. Ours
        computes a prompt once per group and without padding. It does so where that is less work and
        the model's attention allows it.
        """
        return self.parts.policy_pass(*args, **kwargs)

    def _policy_logps(self, batch: Batch, pixels: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of a generation's completions by the policy, (B, C).

        `pixels`: used in place of the batch's own pixels; None for the batch's own.
        """
        return generation_logps(
            batch,
            model_pass=partial(self._get_per_token_logps_and_entropies, self.model),
            rows_per_pass=self.args.per_device_train_batch_size,
            pixels=pixels,
        )

    # ------------------------------------------------------------------------------- the whole run

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the beginning or from a checkpoint.

        Stock TRL leaves this to Transformers, which goes on from the newest checkpoint in the
        folder, even if another run wrote it. Ours locks `output_dir` for this run, goes on from
        checkpoints of this run alone and restores all that they hold, and notes in `manifest.json`
        how the run ends.

        `resume_from_checkpoint` counts for a run from Python: True, "auto", or a folder; None and
        False begin anew. For a run of the command, the command has locked the folder and chosen a
        checkpoint already.

        Raises `UserError` for a folder of another run, and `RunError` where a step fails.
        """
        if self.run.request.cli_args is not None:
            return self._train_in_folder(trial, ignore_keys_for_eval)
        # Lock the folder for this run, and choose the checkpoint to go on from.
        run = self.run.lock_output_dir(resume_from_checkpoint)
        self.run = run
        is_main = self.accelerator.is_main_process
        try:
            final_checkpoint = self._checkpoint_of_finished_run()
            if final_checkpoint is None:
                self._refuse_second_training()
            if is_main:
                print("\n".join(run.lines_before_start()), flush=True)
            if final_checkpoint is not None:
                output = self._load_finished_run(final_checkpoint)
                self.manifest = run.manifest()
                if is_main:
                    output_dir = Path(self.args.output_dir)
                    metadata = read_checkpoint_manifest(final_checkpoint)
                    write_missing_end_of_metrics(output_dir, metadata, self.state)
                    mark_finished(self.manifest, output_dir, steps=self.state.global_step)
                return output
            output = self._train_in_folder(trial, ignore_keys_for_eval)
            if is_main:
                end_manifest(
                    self.manifest,
                    output_dir=Path(self.args.output_dir),
                    status="finished",
                    steps=self.state.global_step,
                )
            return output
        finally:
            run.folder.release()

    def _refuse_second_training(self) -> None:
        """Raise `UserError` if this trainer has trained before.

        A step that was interrupted leaves parts of its generation behind, and a run that begins
        would not begin with its model.
        """
        if self.manifest:
            raise UserError(
                "train: this trainer has trained before, and still has that training's weights and "
                "rollouts; build a new one, whose train(resume_from_checkpoint=True) goes on"
            )

    def _train_in_folder(
        self, trial: object, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        """Train in the folder that the run has locked, and record in its manifest if that fails.

        If this run replaces an older run in the folder, the older run's files are moved aside
        first. The arguments are those of `train`.
        """
        run = self.run
        output_dir = Path(self.args.output_dir)
        is_main = self.accelerator.is_main_process
        checkpoint = run.output.start_point.checkpoint
        model_runner = self.vllm_generation.model_runner if self.use_vllm else None
        self.manifest = {**run.manifest(), "vllm_model_runner": model_runner}
        if is_main:
            # Not earlier: until here the new run could still have failed.
            if run.output.start_point.replaces_old_run:
                move_old_run_aside(output_dir)
            write_manifest(self.manifest, output_dir)
        self.accelerator.wait_for_everyone()

        steps_of_checkpoint = _read_state(Path(checkpoint)).global_step if checkpoint else 0

        def steps_done() -> int:
            """Return how many optimizer steps the run has made, for messages."""
            # TRL's count is 0 until `super().train` has read the count of the checkpoint.
            return max(int(self.state.global_step), steps_of_checkpoint)

        with mark_failed_on_error(
            self.manifest, output_dir=output_dir, count_steps=steps_done, is_main=is_main
        ):
            if checkpoint:
                load_to_numbered_cpus()
                self.restore(checkpoint)
                if is_universal(Path(checkpoint)):
                    expect_universal_checkpoint(self)
            with errors_with_step(steps_done, self.parts.checkpoint_writer.describe_resume_point):
                output = super().train(checkpoint, trial, ignore_keys_for_eval)
            # If too many steps in a row had unusable gradients, the training has ended early
            # without an error of its own, and this has the reason. Else it is None.
            reason_to_stop = self.parts.skip_bad_steps.stop_reason
            if reason_to_stop:
                raise RunError(f"step {steps_done()}: {reason_to_stop}")
            # Transformers ends a training with a line in the log if its data give no batch. A
            # callback that ends a training in its first step has seen a micro-batch.
            if steps_done() == 0 and self._step == 0:
                raise RunError(
                    "no step was made: the stream of problems ends before it has the "
                    f"{pluralize(self.layout.prompts_per_generation, 'prompt')} of a generation"
                )
        return output

    def _checkpoint_of_finished_run(self) -> Path | None:
        """Return the checkpoint to resume from if the run has ended there; else None.

        It has made its last step, or a callback such as early stopping ended it.
        """
        if self.run.finished_checkpoint is not None:
            return self.run.finished_checkpoint
        start_checkpoint = self.run.output.start_point.checkpoint
        if start_checkpoint is None:
            return None
        checkpoint = Path(start_checkpoint)
        callbacks = self.callback_handler.callbacks
        restore_callback_states(callbacks, _read_state(checkpoint).stateful_callbacks)
        return checkpoint if was_ended_by_callback(checkpoint, callbacks) else None

    def _load_finished_run(self, checkpoint: Path) -> TrainOutput:
        """Load the weights and state of a finished run's last checkpoint, in place of training.

        This is for a run from Python, whose caller goes on with the model. Raises `UserError` with
        DeepSpeed, whose checkpoints cannot be loaded here.
        """
        finding = f"{checkpoint} is the last step: nothing left to train"
        if self.run.finished_checkpoint is None:
            finding = f"a callback ended the run at {checkpoint}: nothing left to train"
        if self.is_deepspeed_enabled:
            raise UserError(f"{finding}; `python -m adora_vl.export` loads it")
        self._load_from_checkpoint(str(checkpoint))
        self.state = _read_state(checkpoint)
        print(finding)
        return TrainOutput(self.state.global_step, 0.0, {})

    # -------------------------------------------------------------- data, log, and the engine's end

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the data loader of a training or an evaluation.

        Stock TRL reads and decodes every copy of a row. Ours reads each row of a training batch
        once. Where possible it reads them while the policy learns from the previous batch.
        """
        dataset = kwargs["dataset"]
        shares_rows = self.args.uses("cache_images")
        # Problems that wait for a later generation are read again by their numbers.
        needs_numbers = self.parts.pool.allows_stale_rollouts
        has_length = hasattr(dataset, "__len__")  # a streamed data set has none
        is_training = kwargs.get("is_training", False)
        # An evaluation neither shares rows nor reads them again. A streamed row has no number.
        if not is_training or not has_length or not (shares_rows or needs_numbers):
            return super()._get_dataloader(*args, **kwargs)
        rows = DistinctRows(dataset, numbered=needs_numbers, share=shares_rows)
        loader = super()._get_dataloader(*args, **{**kwargs, "dataset": rows})
        self.parts.generation_sampler.upcoming_rows = partial(rows.rows_after, self._row_order)
        self.prefetch = self.parts.images.prefetch(rows, self._row_order, dataset)
        return loader

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return the sampler that orders the rows.

        Stock TRL's sampler draws the orders of all epochs one after the other from one generator,
        seeded by `seed` alone. Ours seeds each order by the epoch's number, and by `data_seed`
        where it is set, so that a resumed run draws the same.
        """
        trl_sampler = super()._get_train_sampler(dataset)
        self._row_order = EpochRepeatSampler.from_sampler(trl_sampler, seed=self.args.seed_of_rows)
        return self._row_order

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation, as an entry of its own.

        TRL's `log` would add averages of the training's metrics so far, so the `log` of
        Transformers is called.
        """
        # Logging resets `should_log`. Then Transformers would not log the training's own metrics of
        # this step any more.
        should_log = self.control.should_log
        Trainer.log(self, metrics)
        self.control.should_log = should_log

    def log_metric(self, name: str, value: float) -> None:
        """Add a value of this step to the next log, which averages the values of its steps.

        Metrics in `LARGEST_VALUE_KEYS` are not averaged: the log has their largest value. The value
        has to be the same on every rank.
        """
        values = self._metrics["train"][name]
        if name in LARGEST_VALUE_KEYS:
            keep_largest(values, value)
        else:
            values.append(value)

    def close(self) -> None:
        """End what the trainer has started: threads, the lock of the folder, a colocated engine.

        The engine is shut down while its process groups still exist. Nothing can be sampled after
        this.
        """
        self.prefetch.finish()
        self.run.folder.release()
        if isinstance(self.parts.sampler, AsyncServerSampler):
            self.parts.sampler.close()
        if self.use_vllm and self.vllm_mode == "colocate":
            self.vllm_generation.shut_down()

    # ---------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        """Write the checkpoint of the present step.

        Stock TRL writes into `checkpoint-N` itself and deletes older checkpoints meanwhile, so a
        crash can leave an incomplete checkpoint, or none. Ours lets TRL write into another folder,
        adds what a resumed run needs, renames the folder to `checkpoint-N`, and then deletes older
        checkpoints.
        """
        trl_save_checkpoint = super()._save_checkpoint
        checkpoint_state = self.parts.checkpoint_state
        # A signal or an error stops the training only after its checkpoint is written.
        has_ended = self.control.should_training_stop
        # At the last step it is Transformers that ends the training. A resumed run may have more
        # steps.
        ended_by_callback = has_ended and self.state.global_step < self.state.max_steps
        self.parts.epoch_end.note_save(self.state.global_step, ended=has_ended)
        metadata = checkpoint_state.unfinished_generation.metadata_to_save(
            self._first_micro_step, self._metadata()
        )

        def write_files(folder: Path) -> dict[str, Any]:
            """Write all files into the folder, and return what its manifest says of the run."""
            trl_save_checkpoint(model, trial)
            self._forget_best_checkpoint(folder)
            saved_metadata = checkpoint_state.save(
                folder,
                metadata=metadata,
                micro_step=self._first_micro_step,
                micro_batches=self._buffered_inputs,
            )
            return {**saved_metadata, ENDED_KEY: ended_by_callback}

        self.parts.checkpoint_writer.write(self.state.global_step, write_files)

    def _forget_best_checkpoint(self, checkpoint: Path) -> None:
        """Remove the folder of the best checkpoint from Transformers' state; step and metric stay.

        With `metric_for_best_model`, which early stopping needs, Transformers notes the folder that
        it writes into. That folder is renamed afterwards. Transformers would look for it at the end
        of the run, and with `save_total_limit: 1` would delete every other checkpoint, also the
        newest one.

        `checkpoint`: the folder that is being written. It has the file of the state already.
        """
        if self.state.best_model_checkpoint is None:
            return
        self.state.best_model_checkpoint = None
        if self.args.should_save:
            self.state.save_to_json(str(checkpoint / TRAINER_STATE_NAME))

    def save_here(self) -> Path | None:
        """Return the folder of the present step's checkpoint, and write it if it is missing.

        Before a training there is nothing to save, as in an evaluation that Python code calls
        first. The result is None then. All ranks call this together.
        """
        if not self.manifest:
            return None
        return self.parts.checkpoint_writer.ensure_checkpoint(
            self.state.global_step, lambda: self._save_checkpoint(self.model, trial=None)
        )

    def _get_output_dir(self, trial: object) -> str:
        """Return the folder that Transformers writes into.

        Stock TRL returns `output_dir`. While a checkpoint is written, ours returns a temporary
        folder, which is renamed when it is complete.
        """
        staging = self.parts.checkpoint_writer.staging
        return str(staging) if staging is not None else str(super()._get_output_dir(trial))

    def _metadata(self) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of the run at this moment.

        That is the state of methods, the metrics since the last log, and so on, by their keys.
        """
        return self.parts.checkpoint_state.metadata(self.run.fingerprint)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        """Load the weights of a checkpoint.

        Stock TRL leaves this to Transformers 5.17, which has two faults here:

        - It loads weights by their names in the file, but Qwen2.5-VL's modules have other names.
          A resumed run would only print a warning and start from the untrained weights.
        - If there are several adapters, it reads only those in subfolders. The adapter that is
          trained lies in the checkpoint's folder itself, and would not be read.
        """
        model = self.model if model is None else model
        folder = Path(resume_from_checkpoint)
        # The weights of a whole model, or of the adapter that is trained, lie in the folder itself.
        has_whole_weights = any(folder.glob("*.safetensors"))
        if has_whole_weights:
            restore_weights(model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_callback_state(self) -> None:
        """Restore the states of callbacks from the checkpoint, whose state is `self.state` now.

        Stock TRL leaves this to Transformers, which does it only with
        `restore_callback_states_from_checkpoint: true`. Transformers then builds the callbacks anew
        with the arguments that the checkpoint has. If a callback with a state is not in the
        checkpoint, it cannot save again. Ours restores the states in every run, since early
        stopping would count anew.
        """
        callbacks = self.callback_handler.callbacks
        restore_callback_states(callbacks, self.state.stateful_callbacks)
        # Transformers expects an entry for each callback with a state when it saves. The
        # constructor of `TrainerState` makes the entries of the callbacks that it gets.
        exportable = [
            item for item in (*callbacks, self.control) if isinstance(item, ExportableState)
        ]
        self.state.stateful_callbacks = TrainerState(
            stateful_callbacks=exportable
        ).stateful_callbacks

    def restore(self, checkpoint: str) -> None:
        """Restore what a checkpoint has beside TRL's own state, which `train` restores."""
        self.parts.checkpoint_writer.resumed_from = checkpoint
        # A generation that the run was still learning from; None: the checkpoint has none.
        unfinished = self.parts.checkpoint_state.restore(Path(checkpoint))
        if unfinished is not None:
            self._step = unfinished.micro_step
            self._buffered_inputs = unfinished.micro_batches
            self._micro_steps_of_generation = self.layout.micro_steps_of_generation(self._step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights, processor and model card.

        Stock TRL saves weights and processor. Ours also writes the card, in checkpoints too, and
        gives the files the permissions that the umask allows.
        """
        folder = Path(output_dir or self.args.output_dir)
        is_final_model = folder == Path(self.args.output_dir)
        # A later run in the folder may replace the files of this run, but none of the user's.
        recording: AbstractContextManager[None] = nullcontext()
        if is_final_model:
            recording = recording_saved_files(folder, self.args.should_save)
        hiding_reference: AbstractContextManager[None] = nullcontext()
        if self._dist.is_zero3 and is_peft_model(self.model):
            # PEFT would save the reference adapter too, but the state that ZeRO-3 gathers lacks it.
            hiding_reference = without_reference_adapter(self.model)
        with recording:
            with hiding_reference:
                super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                set_default_file_modes(folder)
                write_card(self.manifest, folder, self.state)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model of a checkpoint to the hub.

        Stock TRL copies the model into `output_dir` to push it. Ours also records these files as
        files of this run.
        """
        with recording_saved_files(Path(self.args.output_dir), self.accelerator.is_main_process):
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write nothing.

        Stock TRL writes a card at every save, which would replace ours.
        """


def _read_state(checkpoint: Path) -> TrainerState:
    """Read Transformers' state of a training from one of its checkpoints."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
