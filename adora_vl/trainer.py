"""One training step, from top to bottom: TRL's `GRPOTrainer` with ADORA's weights and rollouts that
can be trusted.

    1. a generation   sample, grade, record; resample, weigh; then rebalance, cut into micro-batches,
                      and compute the old log-probabilities of those of later updates
    2. a micro-batch  the policy's pass, its ratio to the engine, the loss

The parts of a step are objects that `parts.py` makes; this file has the order in which they work.
Checkpoints are in `trainer_checkpoints.py`.
Where a method of stock TRL is overridden, the docstring says what TRL does there and why that is
not enough.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers import trainer as transformers_trainer
from transformers.trainer_utils import TrainOutput
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import use_adapter

from adora_vl.checkpoint.universal import expect_universal_checkpoint, is_universal, load_shards
from adora_vl.checkpoint.writer import set_run_aside
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import asks_for_regrouping, regroup_obstacle
from adora_vl.config.run_context import RunContext
from adora_vl.data.dataloader import DistinctRows, EpochRepeatSampler
from adora_vl.models.adapter import cast_trained_to_float32, load_adapter_weights, record_base
from adora_vl.models.families import freeze, sees_images
from adora_vl.models.lora_branch import compute_branches_first
from adora_vl.models.precision import restore_buffers
from adora_vl.models.reference import copy_policy
from adora_vl.packing.pass_differences import evaluation_mode
from adora_vl.packing.policy_pass import generation_logps
from adora_vl.packing.prompts import PromptBatch
from adora_vl.packing.split_attention import disable_cudnn_attention
from adora_vl.preflight.facts import ResolvedRun
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.preflight.request import (
    ModelSource,
    RunRequest,
    config_of,
    model_keys,
    refuse_objects,
)
from adora_vl.preflight.run_checks import run_checks
from adora_vl.record import phases, trackers
from adora_vl.record.card_memory import CardMemory
from adora_vl.record.manifest import end_manifest, noting_failure, write_manifest
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import engine_settings
from adora_vl.rollout.prompt_tokens import ignoring_generation_config
from adora_vl.rollout.rollouts import RolloutGroup, StepKey, row_for_rewards
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.rollout.weight_sync import refuse_unmergeable
from adora_vl.trainer_checkpoints import CheckpointedTrainer
from adora_vl.training.batch_rows import RowReader
from adora_vl.training.generation import Generation, PresentGeneration, ScoredGroups
from adora_vl.training.guards import errors_with_step
from adora_vl.training.rollout_facts import rows_of_rank
from adora_vl.training.schedule import OVERSAMPLING_FACTOR, count_groups_for_signal
from adora_vl.types import Batch, Row, loss_mask
from adora_vl.utils import compat
from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.seeding import drawing_by_key


class AdoraGRPOTrainer(CheckpointedTrainer):
    """A trainer like `trl.GRPOTrainer`, whose `args` is an `AdoraGRPOConfig`."""

    def __init__(
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

        Stock TRL loads the weights first and builds its own generation class. Ours makes every
        check of `adora_vl/preflight/run_checks.py` before, and puts its own class in place. The
        configs that Python code passes stay as they are, so that a second trainer with them is of
        the same run.

        `run`: a run that the command has checked already; its data and rewards are taken. Raises
        `UserError`, in one line, for what cannot work.
        """
        if run is None:
            refuse_objects(
                train_dataset,
                reward_funcs=reward_funcs,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
            config = config_of(args, model)
            # PEFT writes into it what it was trained on.
            peft_config = deepcopy(peft_config)
            request = RunRequest(
                config=config,
                model=_model_source(
                    model,
                    config=config,
                    peft_config=peft_config,
                    quantization_config=quantization_config,
                    processor=processing_class,
                ),
                rows=Datasets(train_dataset, eval_dataset),
                rewards=reward_funcs,
                tools=tools or (),
                environment_factory=environment_factory,
            )
            run = run_checks(request, RunContext.of_launch("leave"))
            train_dataset = run.data.train
            eval_dataset = run.data.evaluated
        self.run = run
        self.toolbox = run.prompts.toolbox or self.toolbox
        self.run_facts = {}  # filled in `train`
        self.manifest = {}  # filled in `train`
        disable_cudnn_attention()
        trackers.prepare_trackers(run.config.report_to, run.config.output_dir)
        timed_phase = self._start_clock(run)
        compat.SHARD_LOADING.install(load_shards, on=transformers_trainer)
        policy = run.policy() if isinstance(model, str) else model
        with _use_own_classes_in_trl(run, policy, timed_phase):
            super().__init__(
                model=policy,
                reward_funcs=list(run.rewards.functions),
                args=run.config,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=run.prompts.processor,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        self._build_collaborators(run.config, self._prepare_models(run))

    def _start_clock(self, run: ResolvedRun) -> Callable[[str], AbstractContextManager[None]]:
        """Begin to measure the seconds of each phase of a step, and on a GPU its memory.

        Returns a function from the name of a phase to the context that measures it. The engine
        enters such contexts too.

        `run`: the checked run. Only one that is evaluated on its way, or whose engine sleeps, has
        the phases for that.
        """
        args = run.config
        engine_sleeps = args.use_vllm and args.vllm_enable_sleep_mode
        self.phase_clock = phases.PhaseClock(
            self.log_figure, sleep_mode=engine_sleeps, evaluates=run.evaluations is not None
        )
        if args.device.type != "cuda":
            return self.phase_clock.phase
        self.card_memory = CardMemory(
            self.log_figure,
            largest_of_ranks=self._largest_of_ranks,
            device=args.device,
            sleep_mode=engine_sleeps,
        )
        # Its context measures the seconds of the phase too.
        return partial(self.card_memory.phase, clock=self.phase_clock.phase)

    def _prepare_models(self, run: ResolvedRun) -> list[Any]:
        """Prepare the loaded policy and the reference model for training, and return them.

        An adapter that a run continues gets its weights, buffers get their precision back, and
        parts of the model are frozen (`adora_freeze`).
        """
        if run.model.continued is not None:
            load_adapter_weights(self.model, run.model.continued)
        elif run.model.four_bit:
            cast_trained_to_float32(self.model)
        models = [self.model]
        if self.ref_model is not None:
            models.append(self.ref_model)
        for model in models:
            restore_buffers(model)
        if is_peft_model(self.model):
            record_base(self.model, run.model.merged)
            if run.config.gradient_checkpointing:
                compute_branches_first(self.model)
            if not run.model.four_bit:
                refuse_unmergeable(self.model, self._dist.gather_params)
        freeze(self.model, run.config.adora_freeze)
        return models

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the beginning or from a checkpoint.

        Stock TRL leaves this to Transformers, which takes any folder for its own, and goes on from
        the newest checkpoint in it, of whatever run. Ours holds `output_dir` for this run
        alone, goes on from its own checkpoints with all that they have, and notes in
        `manifest.json` how it ends.

        From Python `resume_from_checkpoint` is True, "auto", or a folder; None and False begin
        anew. A run of the command has claimed its folder, and chosen a checkpoint, before. Raises
        `UserError` for a folder of another run, and `RunError` where a step fails.
        """
        run = self.run
        output_dir = Path(self.args.output_dir)
        is_main = self.accelerator.is_main_process
        is_from_python = run.request.cli_args is None
        if is_from_python:
            # Lock the folder for this run, and choose the checkpoint to go on from.
            run = run.claimed(resume_from_checkpoint)
            self.run = run
        try:
            if is_from_python and is_main:
                print("\n".join(run.first_lines()), flush=True)
            if is_from_python and run.finished is not None:
                return self._load_finished_run(run.finished)
            self._begin_run(output_dir)
            with noting_failure(
                self.manifest,
                output_dir=output_dir,
                steps=lambda: self.state.global_step,
                is_main=is_main,
            ):
                with errors_with_step(
                    lambda: self.state.global_step, self.checkpoint_writer.where_to_go_on
                ):
                    output = super().train(run.output.start.checkpoint, trial, ignore_keys_for_eval)
                if self.skip_bad_steps.reason:
                    raise RunError(f"step {self.state.global_step}: {self.skip_bad_steps.reason}")
            if is_from_python and is_main:
                end_manifest(
                    self.manifest,
                    output_dir=output_dir,
                    status="finished",
                    steps=self.state.global_step,
                )
            return output
        finally:
            if is_from_python:
                run.folder.release()

    def _begin_run(self, output_dir: Path) -> None:
        """Write the manifest of the run, and restore what TRL does not from its checkpoint.

        An older run in the folder that this one replaces is set aside before.
        """
        run = self.run
        self.run_facts = {"fingerprint": run.fingerprint}
        self.manifest = run.manifest()
        self.manifest["model"]["sees_images"] = sees_images(self.model.config)
        if run.model.adapters:
            self.manifest["model"]["base"] = run.model.name
        self.manifest["vllm_model_runner"] = (
            self.vllm_generation.model_runner if self.use_vllm else None
        )
        if self.accelerator.is_main_process:
            # Not earlier: until here the new run could still have failed.
            if run.output.start.replaces:
                set_run_aside(output_dir)
            write_manifest(self.manifest, output_dir)
        self.accelerator.wait_for_everyone()
        checkpoint = run.output.start.checkpoint
        if checkpoint:
            self.restore(checkpoint)
            if is_universal(Path(checkpoint)):
                expect_universal_checkpoint(self)

    def _load_finished_run(self, checkpoint: Path) -> TrainOutput:
        """Load weights and state of a finished run's last checkpoint, in place of training.

        This is for a run from Python, whose caller goes on with the model.
        """
        if self.is_deepspeed_enabled:
            raise UserError(
                f"{checkpoint} is the last step: nothing left to train; `python -m "
                "adora_vl.export` loads it"
            )
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        print(f"{checkpoint} is the last step: nothing left to train")
        return TrainOutput(self.state.global_step, 0.0, {})

    # ------------------------------------------------------------------------------ 1. a generation

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return the micro-batch that is learned from next; a second call returns the same one.

        Stock TRL shuffles the rows of a generation and divides them into micro-batches, padded to
        its longest row. Ours keeps groups together, leaves out those without signal, and cuts
        padding.
        """
        if not self.model.training or not self._cuts_generations:
            micro_batch = super()._prepare_inputs(generation_batch)
        else:
            if not self._is_in_generation():
                self._present_generation = self._sample_generation(generation_batch)
            assert self._present_generation is not None
            number = self._step % self.layout.steps_per_generation
            micro_batch = self._present_generation.micro_batches[number]
            if micro_batch:
                # Due again where a checkpoint had the generation: another process has checked it.
                self._check_packed_rows(micro_batch)
        if self.model.training and self.accelerator.sync_gradients:
            self.generation_sampler.before_weights_change()
        return micro_batch

    def _is_in_generation(self) -> bool:
        """Return whether the next micro-batch belongs to the generation that was sampled last."""
        if self._present_generation is None:
            return False
        first_micro_step = self._present_generation.first_micro_step
        end_micro_step = first_micro_step + self.layout.micro_batches_per_generation
        return self._step in range(first_micro_step, end_micro_step)

    @property
    def _cuts_generations(self) -> bool:
        """Whether generations are cut into micro-batches here.

        Otherwise TRL cuts them, into `_buffered_inputs`.
        """
        return asks_for_regrouping(self.args) and not regroup_obstacle(self.args)

    def _sample_generation(self, rows: list[Row]) -> PresentGeneration:
        """Sample a generation of rollouts from these rows, and make it ready to be learned from."""
        key = self._step_key
        with self._keeping_engine_awake():
            # TRL's method, which a subclass may override.
            batch = self._generate_and_score_completions(rows)
        self._check_packed_rows(batch)
        # 9. Cut into micro-batches; groups without signal are left out.
        micro_batches = self.micro_batcher.split(batch, key.position)
        # 10. Compute the old log-probabilities of what is learned from after a weight update.
        self._add_old_logps(micro_batches)
        return PresentGeneration(
            first_micro_step=self._first_micro_step, micro_batches=micro_batches
        )

    def _check_packed_rows(self, batch: Batch) -> None:
        """Compare the policy's pass with and without shared prompts, once in a run. Collective.

        If they disagree, prompts are not shared from then on. It comes before a generation is cut,
        since more rows fit into a micro-batch if they share their prompts. As many rows are
        compared as memory is planned for without.
        """
        if not self.policy_pass.check_is_due:
            return
        compared_rows = range(min(self.layout.micro_batch_rows, len(batch["completion_ids"])))
        policy = partial(self._get_per_token_logps_and_entropies, self.model)
        self.policy_pass.check(RowReader(batch).take(compared_rows), policy)

    def _keeping_engine_awake(self) -> AbstractContextManager[None]:
        """Return the context in which a generation is sampled.

        With `refill` (dynamic sampling) an engine that sleeps between calls stays awake from the
        first batch to the last, unless the policy makes a pass after each batch and needs the
        engine's memory.
        """
        has_kl_term = self.beta != 0.0
        policy_makes_passes = has_kl_term or self.old_logps.needs_pass_over_generation
        if policy_makes_passes or not self.args.adora_rollouts.refill:
            return nullcontext()
        return self.sampler.awake()

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        """Return the batch of a generation, sampled, graded and weighed.

        Stock TRL processes the image of every copy of a row twice, samples, makes a pass for the
        old log-probabilities whenever vLLM samples, grades, and returns group-normalised
        advantages. Ours processes each image once, makes that pass later, where it is needed at
        all, replaces groups without signal, and then weighs all together. Every rank goes through
        the stages together.
        """
        self.prefetch.finish()
        is_training = self.model.training
        if is_training:
            trackers.empty_table(self._logs)
        if is_training and self._step == self._step_began:
            self.unfinished_generation.note_step_begin(self._step, self._facts())
        group_size = self.num_generations if is_training else self.num_generations_eval
        generation = self.pool.generation_numbers.generation_at(self._step_key, group_size, inputs)
        # 1. Draw: rows become groups; an image that cannot be read ends the run.
        drawn_groups = self.generation_sampler.draw(generation, inputs)
        if not is_training:
            with self.generation_sampler.sampling():
                groups = self.generation_sampler.sample_all(generation, drawn_groups)
            return self._as_evaluation_batch(self._score(generation, groups))
        # A run that dies before it learns from this generation goes on from here.
        self.pool.begin_step(generation)
        with self.generation_sampler.sampling():
            # 2. Schedule: which groups begin or go on, and for how many tokens.
            self.generation_sampler.schedule(generation, drawn_groups)
            # 3. Sample their rollouts, with all turns.
            groups = self.generation_sampler.sample(generation, drawn_groups)
        # 4. Select complete groups, equally many on every rank; the others wait.
        complete_groups = self.pool.select_complete(groups, self.pool.max_groups)
        assert complete_groups, "stage 3 has completed some on every rank"
        # 5. Build the batch, and 6. score it.
        scored_groups = self._score(generation, complete_groups)
        # 7. Refill: groups of further problems replace those without signal.
        scored_groups = self._refill(generation, scored_groups)
        # 8. Weigh the groups, once.
        batch = self._weigh(generation, scored_groups)
        self.prefetch.start()
        return batch

    def _score(self, generation: Generation, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        """Stages 5 and 6: make groups into a batch, call the reward functions, compute advantages.

        The advantages are TRL's; `_weigh` computes the final ones. Collective: every rank has
        equally many groups.

        Args:
            generation: where in the run the groups are sampled.
            groups: this rank's groups, whose rollouts have all ended.

        Raises:
            RunError: a reward function failed, or no rollout has a reward.
            RolloutError: the log-probabilities of engine and policy are too far apart.
        """
        is_training = generation.key.mode == "train"
        step = generation.key.step
        prompts = self.prompt_reader.take(groups, generation)
        built_groups = self.batch_builder.build(generation, groups, prompts)
        rollouts = built_groups.rollouts
        self._add_logps(built_groups.batch, generation.key.mode)
        with self.phase_clock.phase("grading"):
            rows = [
                row_for_rewards(row, rollout)
                for row, rollout in zip(built_groups.rows, rollouts, strict=True)
            ]
            function_scores = self.reward_functions(
                rows,
                prompts=built_groups.prompts.messages,
                completions=built_groups.completions,
                completion_ids=[rollout.policy_tokens for rollout in rollouts],
                thinking_opened=built_groups.thinking_opened,
                state=self.state,
            )
        facts = self.scorer.score(built_groups, function_scores, generation.group_size, step)
        if is_training and self.accelerator.is_main_process:
            self.first_answers.warn_if_none_is_right(built_groups.rows, facts)
        if is_training:
            self.drift_guard.check_batch(built_groups.batch, step)
        scored_groups = ScoredGroups(
            groups=groups,
            batch=built_groups.batch,
            facts=facts,
            assessment=self.advantage_computer.assess(facts, generation.group_size, step),
        )
        with self.phase_clock.phase("other"):
            self.metrics_logger.log_scored(generation, built_groups, scored_groups)
        return scored_groups

    def _refill(self, generation: Generation, scored_groups: ScoredGroups) -> ScoredGroups:
        """Stage 7: replace groups without signal by groups of further problems. Collective.

        A group has signal if its rollouts' rewards differ. While any rank lacks such groups, a
        further round of problems is sampled, `refill` rounds at most: DAPO's dynamic sampling
        (arXiv 2503.14476).
        """
        pool = self.pool
        max_rounds = pool.options.refill
        completion_lengths = scored_groups.facts.length_N.int().tolist()
        replaced_count = 0
        signal_share = 0.0  # not used without a round
        if max_rounds:
            signal_share = pool.note_signal_share(scored_groups.assessment)
        for round_number in range(1, max_rounds + 1):
            missing_groups = pool.most_missing(scored_groups.assessment)
            if not missing_groups:
                break
            refill = self._sample_refill(
                generation.in_round(round_number), missing_groups, signal_share
            )
            if refill is None:
                continue
            completion_lengths += refill.facts.length_N.int().tolist()
            # Where one of the two batches has no images on some rank, their columns differ, and
            # rows cannot be joined. Collective: then no rank joins any.
            has_same_columns = refill.batch.keys() == scored_groups.batch.keys()
            if not all(gather_object([has_same_columns])):
                continue
            chosen_by_rank = pool.choose_groups(scored_groups.assessment, refill.assessment)
            replaced_count += _count_replaced_groups(chosen_by_rank, len(scored_groups.groups))
            scored_groups = scored_groups.exchange_groups(
                refill,
                chosen_by_rank=chosen_by_rank,
                pad_id=self.context.pad_id,
                rank=self.accelerator.process_index,
            )
            assessment = self.advantage_computer.assess(
                scored_groups.facts, generation.group_size, generation.key.step
            )
            scored_groups = replace(scored_groups, assessment=assessment)
        if max_rounds:
            groups_of_all_ranks = len(scored_groups.groups) * self.accelerator.num_processes
            self.log_figure("adora/refilled_groups", replaced_count / groups_of_all_ranks)
            self.log_figure("adora/further_batches", self.generation_sampler.take_further_batches())
        pool.note_learned(scored_groups.batch, completion_lengths)
        return scored_groups

    def _sample_refill(
        self, generation: Generation, missing_groups: int, signal_share: float
    ) -> ScoredGroups | None:
        """Sample and score groups of further problems. Collective.

        Groups that wait from earlier generations are taken first.

        Args:
            generation: the present one, in the round of this refill.
            missing_groups: how many groups with signal are missing on the rank that lacks most.
            signal_share: the share of groups with signal in this generation.

        Returns:
            The groups; None on all ranks where none is complete within the token budget.
        """
        pool = self.pool
        max_groups = count_groups_for_signal(
            OVERSAMPLING_FACTOR * missing_groups, [signal_share], pool.max_groups
        )
        # Every rank has this many complete groups that wait.
        waiting_count = pool.state.min_complete
        further_groups = self.generation_sampler.sample_further(
            generation, count=max_groups - waiting_count
        )
        complete_groups = pool.select_complete([*pool.state.waiting, *further_groups], max_groups)
        if not complete_groups:
            return None
        return self._score(generation, complete_groups)

    def _as_evaluation_batch(self, scored_groups: ScoredGroups) -> Batch:
        """Return the batch of an evaluation, with the advantages that TRL would give it."""
        batch = scored_groups.batch
        batch["advantages"] = self._rows_on_device(scored_groups.assessment.trl_advantages_PG)
        batch["num_items_in_batch"] = self._loss_tokens(batch)
        return batch

    def _weigh(self, generation: Generation, scored_groups: ScoredGroups) -> Batch:
        """Stage 8: return the batch with its final advantages. Collective.

        They may weigh a group by all others, so this comes when no group is replaced any more.
        """
        advantages = self.advantage_computer.compute(scored_groups.assessment)
        batch = scored_groups.batch
        batch["advantages"] = self._rows_on_device(advantages.final_PG)
        batch["num_items_in_batch"] = self._loss_tokens(batch)
        with self.phase_clock.phase("policy"):
            for extension in self.extensions:
                extension.after_weighing(generation, batch, advantages)
        with self.phase_clock.phase("other"):
            self.metrics_logger.log_learned(generation, batch, advantages)
        return batch

    def _rows_on_device(self, values_PG: Tensor) -> Tensor:
        """Return this rank's part, (B,), of values of all ranks' groups, on the device."""
        values_B = rows_of_rank(values_PG.flatten(), self.accelerator)
        return values_B.to(self.accelerator.device, non_blocking=True)

    def _loss_tokens(self, batch: Batch) -> Tensor:
        """Return the number of tokens in the loss over all ranks, (). Collective."""
        tokens: Tensor = self.accelerator.gather(loss_mask(batch).sum()).sum()
        return tokens

    def _sample_turn(self, prompts: PromptBatch) -> list[list[int]]:
        """Sample one turn with Transformers, from the policy itself: token ids, (B,).

        Stock TRL takes settings from the model's folder where no key of the run sets them, and
        samples with dropout. Log-probabilities are computed without dropout, and would not be those
        of the samples.
        """
        with ignoring_generation_config(self.model), evaluation_mode(self.model):
            completion_ids, *_ = self._generate_single_turn(
                prompts.ids, prompts.images, prompts.fields, num_generations=1
            )
        return cast("list[list[int]]", completion_ids)

    def _add_logps(self, batch: Batch, mode: str) -> None:
        """Add the log-probabilities to a batch that the loss compares the new policy's with.

        They are those of the policy that has sampled the batch (old), unless later passes compute
        them, and with a KL term those of the reference model.

        Args:
            batch: the generation of this rank.
            mode: "train" or "eval".
        """
        args = self.args
        is_training = mode == "train"
        corrects_engine = self.old_logps.corrects_engine
        has_old_pass = corrects_engine or not self.layout.has_one_step
        rows_per_pass = args.per_device_eval_batch_size
        if is_training:
            has_old_pass = has_old_pass and self.old_logps.needs_pass_over_generation
            rows_per_pass = args.per_device_train_batch_size

        def compute_logps(model: PreTrainedModel) -> Tensor:
            """Return the log-probabilities of the batch's completions by a model, (B, C)."""
            model_pass = partial(self._get_per_token_logps_and_entropies, model)
            return generation_logps(batch, model_pass=model_pass, rows_per_pass=rows_per_pass)

        with disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            if has_old_pass:
                old_logps_BC = compute_logps(self.model)
                batch["old_per_token_logps"] = old_logps_BC
                if corrects_engine:
                    for name, value in self.importance_ratio.complete(batch, old_logps_BC).items():
                        self._metrics[mode][name].append(value)
            if self.beta != 0.0 and self.ref_model is not None:
                batch["ref_per_token_logps"] = compute_logps(self.ref_model)
            elif self.beta != 0.0:
                # The reference is the adapter as it was at the start, or the base model without.
                policy = self.accelerator.unwrap_model(self.model)
                reference_adapter = "ref" if "ref" in policy.peft_config else None
                with use_adapter(policy, adapter_name=reference_adapter):
                    batch["ref_per_token_logps"] = compute_logps(self.model)
                # PEFT has made all of the adapter trainable again.
                freeze(policy, args.adora_freeze)
            if is_training and self.reference_guard.is_due(self.state.global_step):
                self.reference_guard.check(batch, self._policy_logps)

    def _add_old_logps(self, micro_batches: Sequence[Batch]) -> None:
        """Stage 10: compute old log-probabilities for micro-batches that need a pass for them.

        Those are learned from after the first optimizer step on the generation has changed the
        weights. Groups whose advantages are all 0 need none, even where a KL term learns from them.
        Collective: every rank makes equally many passes. Raises `RolloutError` where the engine's
        log-probabilities are too far from the policy's.
        """
        policy_forward = partial(self._get_per_token_logps_and_entropies, self.model)
        without_checkpointing = disable_gradient_checkpointing(
            self.model, self.args.gradient_checkpointing_kwargs
        )
        with without_checkpointing:
            for old_pass in self.old_logps.passes_due(micro_batches):
                batch = old_pass.batch()
                # Tells the pass its micro-batch; nobody has to observe what it computes.
                with self.policy_pass.watch(observer=None, micro_batch=batch):
                    logps_BC = generation_logps(
                        batch, model_pass=policy_forward, rows_per_pass=len(batch["completion_ids"])
                    )
                batch["old_per_token_logps"] = logps_BC
                if self.old_logps.corrects_engine:
                    self._compare_with_engine(batch, logps_BC)
                old_pass.store(batch)

    def _compare_with_engine(self, micro: Batch, logps_BC: Tensor) -> None:
        """Compare policy and engine on the tokens of a micro-batch, and add their ratio. Collective.

        The importance ratio of the policy to the engine is added where it corrects the loss. Raises
        `RolloutError` where the two are too far apart.

        `logps_BC`: log-probabilities by the weights that have sampled the micro-batch, detached.
        """
        self.drift_guard.check_batch(micro, self.state.global_step, logps_BC)
        self.recorder.add_measured_drift(micro, logps_BC)
        if self.old_logps.corrects_engine:
            for name, value in self.importance_ratio.complete(micro, logps_BC).items():
                self.log_figure(name, value)

    @property
    def _step_key(self) -> StepKey:
        """The step and micro-batch at which the run stands; seeds are made of it."""
        return StepKey(
            mode="train" if self.model.training else "eval",
            step=self.state.global_step,
            micro=self._step % self.args.gradient_accumulation_steps,
        )

    @property
    def _first_micro_step(self) -> int:
        """TRL's `_step`, its count of micro-batches, where the present generation begins."""
        return int(self._step - self._step % self.layout.micro_batches_per_generation)

    # ----------------------------------------------------------------------------- 2. a micro-batch

    def training_step(self, model: PreTrainedModel, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Run one micro-batch forward and backward, and return its loss, ().

        Stock TRL runs every micro-batch, and counts them through all epochs. Ours skips those that
        are empty, on all ranks alike. It counts as if every optimizer step had all of its
        micro-batches, as a run does that resumes after a shorter one. A micro-batch that runs out
        of a GPU's memory is run once more, with all layers recomputed.
        """
        start_time = time.perf_counter()
        model.train()
        has_rows = not self._cuts_generations or bool(self._prepare_inputs(inputs))
        # TRL's own time of the step, of which this was a part.
        self._current_train_step_time += time.perf_counter() - start_time
        if has_rows:
            trl_step = partial(super().training_step, model, inputs, num_items_in_batch)
            loss = self.recomputed_layers.run_with_retry(trl_step, self._metrics["train"])
        else:
            loss = torch.zeros((), device=self.args.device)
            self._step += 1  # TRL counts the others
        if self.accelerator.sync_gradients:
            self._step += self._missing_micro_batches
        return loss

    @property
    def _missing_micro_batches(self) -> int:
        """How many micro-batches TRL's count lacks behind the last optimizer step of an epoch.

        That step may have fewer than the others. The next one begins at a count at which both an
        optimizer step and a generation begin, as that of a run does which resumes there. 0 behind
        any other step.
        """
        layout = self.layout
        per_step = layout.gradient_accumulation_steps
        if self._step % per_step == 0:
            return 0
        return -self._step % math.lcm(per_step, layout.micro_batches_per_generation)

    def _compute_loss(self, model: PreTrainedModel, inputs: Any) -> Tensor:
        """Return the loss of a micro-batch, (), with its weight among those of the step.

        Stock TRL takes the ratio to the engine from an earlier pass, averages the loss over the
        rows of a micro-batch, however many there are, and clips the ratio of new to old policy on
        one side only. Ours computes the ratio to the engine in the policy's own pass, weighs a
        micro-batch by its rows or tokens, and skips a step in which the ratio of new to old policy
        explodes. Random numbers of a micro-batch, such as those of dropout, are seeded by its
        position alone, so that a resumed run draws the same.
        """
        micro = cast("Batch", {**inputs})  # columns are added for this loss alone
        micro_step = self._step - self._first_micro_step
        if model.training:
            self.old_logps.prepare_loss(micro, micro_step)
        # Read before TRL's loss, which changes an adaptive one at the end of a step.
        entropy_coefficient = self._entropy_coefficient
        # What the policy's pass inside TRL's loss computes, (B, C); filled by `observe`.
        observed_logps: list[Tensor] = []
        observed_entropies: list[Tensor] = []

        def observe(logps_BC: Tensor, entropies_BC: Tensor | None) -> None:
            """Keep what the policy's pass computed, and compare it with the engine's."""
            observed_logps.append(logps_BC)
            if entropies_BC is not None:
                observed_entropies.append(entropies_BC)
            if not model.training:
                return
            if self.importance_ratio.is_due(micro) and self.old_logps.compares_engine(micro_step):
                self._compare_with_engine(micro, logps_BC)
            self.old_logps.fill_missing(micro, logps_BC)
            self.old_logps.keep_for_next_iteration(inputs, micro, logps_BC, micro_step)

        rank = self.accelerator.process_index
        seed = f"micro-batch/{self.args.seed}/{self._step_key.position}/{rank}"
        seeded_draws = drawing_by_key(seed) if model.training else nullcontext()
        with self.policy_pass.watch(observe, micro), seeded_draws:
            loss: Tensor = super()._compute_loss(model, micro)
        if model.training:
            logps_BC = observed_logps[0] if observed_logps else None
            loss = self.ratio_guard.loss_or_nan(loss, logps_BC, micro)
        loss = loss * self.micro_batcher.loss_weight(micro)
        if model.training and self.entropy_bonus.is_on:
            loss = loss + self.entropy_bonus.missing_bonus(
                micro,
                entropies_BC=observed_entropies[0],
                coefficient=entropy_coefficient,
                micro_batches_per_step=self.current_gradient_accumulation_steps,
            )
        return loss

    @property
    def _entropy_coefficient(self) -> float:
        """The coefficient of TRL's entropy bonus in this step.

        An adaptive one changes at the end of a step, and is 0 while the entropy is above its target.
        """
        is_above_target = self._last_world_entropy > self.args.entropy_target
        if self.use_adaptive_entropy and is_above_target:
            return 0.0
        return float(self.entropy_coef)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return 1 at the tokens of the highest entropy, (B, C).

        Stock TRL learns from these tokens alone. Ours also keeps its choice for the entropy bonus.
        """
        chosen_BC: Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        self.entropy_bonus.chosen_BC = chosen_BC
        return chosen_BC

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities of completions, and entropies where they are asked for.

        Stock TRL computes the prompt again with every rollout, and pads rows to one length. Ours
        computes it once per group and without padding where that is less work and the model's
        attention allows it.
        """
        return self.policy_pass(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def _policy_logps(self, batch: Batch, pixels: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of a generation's completions by the policy, (B, C).

        `pixels`: used in place of the batch's own images, if there are any.
        """
        policy = partial(self._get_per_token_logps_and_entropies, self.model)
        return generation_logps(
            batch,
            model_pass=policy,
            rows_per_pass=self.args.per_device_train_batch_size,
            pixels=pixels,
        )

    # -------------------------------------------------------------- data, log, and the engine's end

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return the data loader of a training or an evaluation.

        Stock TRL reads and decodes every copy of a row. Ours reads each row of a training batch
        once, if possible while the policy learns from the batch before.
        """
        stock_loader = partial(
            super()._get_dataloader,
            description=description,
            batch_size=batch_size,
            sampler_fn=sampler_fn,
            is_training=is_training,
            dataloader_key=dataloader_key,
        )
        options = self.args.adora_rollouts
        shares_rows = self.args.uses("cache_images")
        # Problems that wait for a later generation are read again by their numbers.
        needs_numbers = options.budget is not None or options.ahead > 0
        has_length = hasattr(dataset, "__len__")  # a streamed data set has none
        if not is_training or not has_length or not (shares_rows or needs_numbers):
            return stock_loader(dataset)
        rows = DistinctRows(dataset, numbered=needs_numbers, share=shares_rows)
        loader = stock_loader(rows)
        self.upcoming_rows.rows = rows
        self.upcoming_rows.order = self._row_order
        self.prefetch = self.images.prefetch(rows, self._row_order, dataset)
        return loader

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return the sampler that orders the rows.

        Stock TRL's draws one epoch's order after the other, from `seed` alone. Ours draws each from
        the epoch's number, and from `data_seed` where it is set.
        """
        trl_sampler = super()._get_train_sampler(dataset)
        self._row_order = EpochRepeatSampler.like(trl_sampler, seed=self.args.seed_of_rows)
        return self._row_order

    def _largest_of_ranks(self, value: float) -> float:
        """Return the largest value of all ranks. Collective."""
        values = torch.tensor([value], device=self.accelerator.device)
        return float(self.accelerator.gather(values).max())

    def log_evaluation(self, figures: dict[str, float]) -> None:
        """Log the figures of an evaluation, as an entry of its own.

        TRL's `log` would add averages of the training's figures so far, so this calls that of
        Transformers.
        """
        # Transformers would take this entry for the log of the step, and leave that one out.
        should_log = self.control.should_log
        Trainer.log(self, figures)
        self.control.should_log = should_log

    def log_figure(self, name: str, value: float) -> None:
        """Add a value of this step to the next log, which averages the values of its steps.

        The value has to be the same on every rank.
        """
        self._metrics["train"][name].append(value)

    def close(self) -> None:
        """End what the trainer has started: threads, the lock of the folder, a colocated engine.

        The engine is shut down while its process groups still exist. Nothing can be sampled after
        this.
        """
        self.prefetch.finish()
        self.run.folder.release()
        if isinstance(self.sampler, AsyncServerSampler):
            self.sampler.close()
        if self.use_vllm and self.vllm_mode == "colocate":
            self.vllm_generation.shut_down()


def _model_source(
    model: str | PreTrainedModel,
    config: AdoraGRPOConfig,
    *,
    peft_config: object,
    quantization_config: object,
    processor: ProcessorMixin | None,
) -> ModelSource:
    """Return the description of the model that the preflight checks look at.

    The arguments are those of the trainer.
    """
    return ModelSource(
        keys=model_keys(
            model, config=config, peft_config=peft_config, quantised=quantization_config
        ),
        peft_config=peft_config,
        loaded=None if isinstance(model, str) else model,
        processor=processor,
    )


@contextmanager
def _use_own_classes_in_trl(
    run: ResolvedRun,
    policy: str | PreTrainedModel,
    timed_phase: Callable[[str], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let TRL's `__init__`, called inside the block, build our vLLM class and our reference model.

    Beside a model object stock TRL loads the reference from the folder that the object's config
    names, whatever has become of the weights since, and fails where there is no folder. Ours is a
    copy of the object.

    Args:
        run: the checked run.
        policy: a name, or a model object.
        timed_phase: makes the context in which the seconds of a phase are measured.
    """
    engine_class = partial(
        AdoraVLLMGeneration,
        settings=engine_settings(run.config, run.model.revision),
        timed=timed_phase,
    )
    with ExitStack() as replacements:
        replacements.enter_context(
            compat.GENERATION_CLASS.replaced_by(engine_class, on=grpo_trainer)
        )
        if not isinstance(policy, str):
            copy_of_policy = partial(copy_policy, policy)
            replacements.enter_context(
                compat.REFERENCE_MODEL.replaced_by(copy_of_policy, on=grpo_trainer)
            )
        yield


def _count_replaced_groups(chosen_by_rank: Sequence[Sequence[int]], groups_per_rank: int) -> int:
    """Return how many groups of all ranks a refill has replaced.

    Slots that were free before do not count.

    Args:
        chosen_by_rank: for each rank the number of the group in each slot: its own number where
            the group stays.
        groups_per_rank: groups that each rank had before.
    """
    replaced_count = 0
    for chosen_groups in chosen_by_rank:
        for slot, group in enumerate(chosen_groups[:groups_per_rank]):
            if group != slot:
                replaced_count += 1
    return replaced_count
