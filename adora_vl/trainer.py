"""One training step, from top to bottom: TRL's `GRPOTrainer` with ADORA's weights and rollouts that
can be trusted.

    1. a generation   sample, grade, record; resample, weigh; then rebalance, cut into micro-batches,
                      and score those of later updates
    2. a micro-batch  the policy's pass, its ratio to the engine, the loss
    3. a checkpoint   written beside its place, sealed, renamed

The parts of a step are objects that `parts.py` makes; this file has the order in which they work.
Where a method of stock TRL is overridden, the docstring says what TRL does there and why that is
not enough.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

from adora_vl.checkpoint.store import facts_of
from adora_vl.checkpoint.trl_state import LossSums, SavedLossSums
from adora_vl.checkpoint.universal import expect_universal, is_universal, load_shards
from adora_vl.checkpoint.writer import recording_saved_files, set_aside
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import regroup_obstacle, regroups
from adora_vl.config.run_context import RunContext
from adora_vl.data.dataloader import DistinctRows, EpochRepeatSampler
from adora_vl.models.adapter import begin_with, in_float32, name_base, trained_alone
from adora_vl.models.check import with_own_layers
from adora_vl.models.families import freeze, sees_images
from adora_vl.models.load import restore_weights
from adora_vl.models.lora_branch import compute_branches_first
from adora_vl.models.precision import restore_buffers
from adora_vl.models.reference import copied_policy
from adora_vl.packing.pass_differences import evaluation_mode
from adora_vl.packing.policy_pass import generation_logps
from adora_vl.packing.prompts import PromptBatch
from adora_vl.packing.split_attention import disable_cudnn_attention
from adora_vl.parts import TrainerParts
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
from adora_vl.record.card import write_card
from adora_vl.record.card_memory import CardMemory
from adora_vl.record.manifest import end_manifest, failure_noted, write_manifest
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import engine_settings
from adora_vl.rollout.prompt_tokens import folder_settings_left_out
from adora_vl.rollout.rollouts import RolloutGroup, StepKey, row_for_rewards
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.rollout.weight_sync import refuse_unmergeable
from adora_vl.training.batch_rows import RowReader
from adora_vl.training.generation import Generation, PresentGeneration, ScoredGroups
from adora_vl.training.guards import errors_with_step
from adora_vl.training.rollout_facts import rows_of_rank
from adora_vl.training.schedule import OVERSAMPLE, groups_for
from adora_vl.types import Batch, Row, loss_mask
from adora_vl.utils import compat
from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.files import usual_modes
from adora_vl.utils.seeding import drawn_at


class AdoraGRPOTrainer(TrainerParts):
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
        check of `adora_vl/preflight/run_checks.py` before, unless `run` has made them, and puts its
        own class in place.

        Raises `UserError`, in one line, for what cannot work.
        """
        if run is None:
            refuse_objects(
                train_dataset,
                reward_funcs=reward_funcs,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
            config = config_of(args, model)
            peft_config = with_own_layers(peft_config)
            source = ModelSource(
                keys=model_keys(
                    model, config=config, peft_config=peft_config, quantised=quantization_config
                ),
                peft_config=peft_config,
                loaded=None if isinstance(model, str) else model,
                processor=processing_class,
            )
            request = RunRequest(
                config=config,
                model=source,
                rows=Datasets(train_dataset, eval_dataset),
                rewards=reward_funcs,
                tools=tools or (),
                environment_factory=environment_factory,
            )
            run = run_checks(request, RunContext.of_launch("leave"))
            train_dataset = run.data.train
            eval_dataset = run.data.evaluated
        args = run.config
        self.run = run
        self.toolbox = run.prompts.toolbox or self.toolbox
        disable_cudnn_attention()
        self.run_facts: dict[str, Any] = {}  # into the manifest of every checkpoint
        self.manifest: dict[str, Any] = {}  # of the run, from the beginning of `train` on
        trackers.prepare_trackers(args.report_to, args.output_dir)
        engine = partial(
            AdoraVLLMGeneration,
            settings=engine_settings(args, run.model.revision),
            timed=self._start_clock(args),
        )
        compat.SHARD_LOADING.install(load_shards, on=transformers_trainer)
        policy = run.policy() if isinstance(model, str) else model
        with (
            compat.GENERATION_CLASS.replaced_by(engine, on=grpo_trainer),
            self._reference_of(policy),
        ):
            super().__init__(
                model=policy,
                reward_funcs=list(run.rewards.functions),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=run.prompts.processor,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        self._build_collaborators(args, self._prepared_models(run, args))

    def _start_clock(self, args: AdoraGRPOConfig) -> Callable[[str], AbstractContextManager[None]]:
        """Begin to measure seconds by phase, and on a card its memory.

        Returns a context for a named phase, which the engine enters too.
        """
        sleeps = args.use_vllm and args.vllm_enable_sleep_mode
        self.clock = phases.PhaseClock(self.log_figure, sleep_mode=sleeps)
        if args.device.type != "cuda":
            return self.clock.phase
        self.card_memory = CardMemory(
            self.log_figure,
            largest_of_ranks=self._largest_of_ranks,
            device=args.device,
            sleep_mode=sleeps,
        )
        return partial(self.card_memory.phase, clock=self.clock.phase)

    def _prepared_models(self, run: ResolvedRun, args: AdoraGRPOConfig) -> list[Any]:
        """Prepare the loaded policy and its reference for training, and return them.

        The adapter begins with its weights, buffers have their precision, and parts are frozen.
        """
        if run.model.continued is not None:
            begin_with(self.model, run.model.continued)
        elif run.model.four_bit:
            in_float32(self.model)
        models = [self.model]
        if self.ref_model is not None:
            models.append(self.ref_model)
        for model in models:
            restore_buffers(model)
        if is_peft_model(self.model):
            name_base(self.model, run.model.merged)
            if args.gradient_checkpointing:
                compute_branches_first(self.model)
            if not self._dist.is_fsdp and not run.model.four_bit:
                refuse_unmergeable(self.model, self._dist.gather_params)
        freeze(self.model, args.adora_freeze)
        return models

    @staticmethod
    def _reference_of(policy: str | PreTrainedModel) -> AbstractContextManager[None]:
        """Inside, the reference beside a model object is a copy of it.

        Stock TRL reads the folder that the object's config names, whatever has become of the
        weights since, and fails where there is no folder.
        """
        if isinstance(policy, str):
            return nullcontext()
        copied = partial(copied_policy, policy)
        return compat.REFERENCE_MODEL.replaced_by(copied, on=grpo_trainer)

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
        anew. A command's run has its folder already. Raises `UserError` for a folder of another
        run, and `RunError` where a step fails.
        """
        run = self.run
        output_dir = Path(self.args.output_dir)
        is_main = self.accelerator.is_main_process
        from_python = run.request.cli_args is None
        if from_python:
            run = run.claimed(resume_from_checkpoint)
            self.run = run
        try:
            if from_python and is_main:
                print("\n".join(run.first_lines()), flush=True)
            if from_python and run.finished is not None:
                return self._nothing_left(run.finished)
            self._begin_run(output_dir)
            with failure_noted(
                self.manifest,
                output_dir=output_dir,
                steps=lambda: self.state.global_step,
                is_main=is_main,
            ):
                with errors_with_step(
                    lambda: self.state.global_step, self.checkpoints.where_to_go_on
                ):
                    output = super().train(run.output.start.checkpoint, trial, ignore_keys_for_eval)
                if self.bad_steps.reason:
                    raise RunError(f"step {self.state.global_step}: {self.bad_steps.reason}")
            if from_python and is_main:
                end_manifest(
                    self.manifest,
                    output_dir=output_dir,
                    status="finished",
                    steps=self.state.global_step,
                )
            return output
        finally:
            if from_python:
                run.folder.release()

    def _begin_run(self, output_dir: Path) -> None:
        """Write the manifest, set an older run aside, and restore the checkpoint's state.

        The state is all that the checkpoint has besides weights and optimizer.
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
            if run.output.start.replaces:
                set_aside(output_dir)  # now that all that is known of the new run is in order
            write_manifest(self.manifest, output_dir)
        self.accelerator.wait_for_everyone()
        if run.output.start.checkpoint:
            self.restore(run.output.start.checkpoint)
            if is_universal(Path(run.output.start.checkpoint)):
                expect_universal(self)

    def _nothing_left(self, checkpoint: Path) -> TrainOutput:
        """Return the end of a run of Python's that has made its last step: weights and state."""
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
        if not self.model.training or not self._cuts:
            micro_batch = super()._prepare_inputs(generation_batch)
        else:
            present = self._generation
            if (
                present is None
                or not 0
                <= self._step - present.first_micro_step
                < self.layout.micro_batches_per_generation
            ):
                present = self._generation = self._sample(generation_batch)
            micro_batch = present.micro_batches[self._step % self.layout.steps_per_generation]
            if micro_batch:  # of a checkpoint, which was cut in another process
                self._check_shared_prompts(micro_batch)
        if self.model.training and self.accelerator.sync_gradients:
            self.rollouts.before_weights_change()
        return micro_batch

    @property
    def _cuts(self) -> bool:
        """Whether a generation is divided here.

        Otherwise TRL divides it, into `_buffered_inputs`.
        """
        return regroups(self.args) and not regroup_obstacle(self.args)

    def _sample(self, rows: list[Row]) -> PresentGeneration:
        """Return a generation from these rows, ready to be learned from."""
        key = self._step_key
        with self._engine_awake():
            # TRL's name for it, which a subclass may override
            batch = self._generate_and_score_completions(rows)
        self._check_shared_prompts(batch)
        # 9. Cut: groups without signal are left out.
        micro_batches = self.batcher.split(batch, key.position)
        # 10. Score what is learned from after the weights have changed.
        self._add_old_logps(micro_batches)
        return PresentGeneration(
            first_micro_step=self._first_micro_step, micro_batches=micro_batches
        )

    def _check_shared_prompts(self, batch: Batch) -> None:
        """Compare packed rows with separate ones, once in a run. Collective.

        It comes before a generation is cut: how much a micro-batch may hold depends on whether its
        rows share their prompts. Separate rows are as many as memory is planned for.
        """
        if not self.policy_pass.check_is_due:
            return
        rows = range(min(self.layout.micro_batch_rows, len(batch["completion_ids"])))
        policy = partial(self._get_per_token_logps_and_entropies, self.model)
        self.policy_pass.check(RowReader(batch).take(rows), policy)

    def _engine_awake(self) -> AbstractContextManager[None]:
        """Inside, the engine stays awake from the first batch of dynamic sampling to the last.

        It does not where the policy makes a pass after each batch and needs the engine's memory.
        """
        passes = self.beta != 0.0 or self.old_logps.needs_pass_over_generation
        if passes or not self.args.adora_rollouts.refill:
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
        training = self.model.training
        if training:
            trackers.empty(self._logs)
        if training and self._step == self._step_began:
            self.unfinished.begins(self._step, self._facts())
        group_size = self.num_generations if training else self.num_generations_eval
        generation = self.pool.generations.at(self._step_key, group_size, inputs)
        # 1. Draw: images can be read, environments are reset.
        drawn = self.rollouts.draw(generation, inputs)
        if not training:
            with self.rollouts.sampling():
                groups = self.rollouts.sample_all(generation, drawn)
            return self._evaluated(self._score(generation, groups))
        # From here a run that dies before it learns goes on.
        self.pool.begin_step(generation)
        with self.rollouts.sampling():
            # 2. Schedule: which groups begin or go on, and how far.
            self.rollouts.schedule(generation, drawn)
            # 3. Sample, with all turns.
            groups = self.rollouts.sample(generation, drawn)
        # 4. Select: complete groups, equally many on every rank; the others wait.
        selected = self.pool.select(groups, self.pool.slots)
        assert selected, "a generation has groups that are complete on every rank"
        # 5. Build, and 6. score.
        scored = self._score(generation, selected)
        # 7. Refill: groups without signal give their slots to further problems.
        scored = self._refill(generation, scored)
        # 8. Weigh, once.
        batch = self._weigh(generation, scored)
        self.prefetch.start()
        return batch

    def _score(self, generation: Generation, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        """Stages 5 and 6: make complete groups into a batch, score it, and judge all ranks' groups.

        Collective: every rank has equally many groups.

        Args:
            generation: that the groups are scored for.
            groups: of this rank, complete.

        Raises:
            RunError: a reward function failed, or no rollout has a reward.
            RolloutError: the engine and the policy drift apart.
        """
        is_training = generation.key.mode == "train"
        step = generation.key.step
        built = self.builder.build(generation, groups, self.prompt_reader.take(groups, generation))
        self._add_logps(built.batch, generation.key.mode)
        with self.clock.phase("grading"):
            function_scores = self.rewards(
                [
                    row_for_rewards(row, rollout)
                    for row, rollout in zip(built.rows, built.rollouts, strict=True)
                ],
                built.prompts.messages,
                built.completions,
                [rollout.policy_tokens for rollout in built.rollouts],
                thinking_opened=built.thinking_opened,
                state=self.state,
            )
        facts = self.scorer.score(built, function_scores, generation.group_size, step)
        if is_training and self.accelerator.is_main_process:
            self.first_answers.look(built.rows, facts)
        if is_training:
            self.drift_guard.check_batch(built.batch, step)
        assessment = self.advantages.assess(facts, generation.group_size, step)
        scored = ScoredGroups(groups=groups, batch=built.batch, facts=facts, assessment=assessment)
        with self.clock.phase("other"):
            self.generation_log.log_scored(generation, built, scored)
        return scored

    def _refill(self, generation: Generation, scored: ScoredGroups) -> ScoredGroups:
        """Stage 7: exchange groups without signal for groups of further problems. Collective.

        Rounds of further problems follow as long as any rank lacks groups with signal, `refill` of
        them at most: DAPO's dynamic sampling (arXiv 2503.14476).
        """
        pool = self.pool
        rounds = pool.options.refill
        lengths = scored.facts.length_N.int().tolist()
        replaced = 0
        share = pool.note_signal_share(scored.assessment) if rounds else 0.0
        for attempt in range(1, rounds + 1):
            missing = pool.most_missing(scored.assessment)
            if not missing:
                break
            retry = generation.attempt(attempt)
            max_groups = groups_for(OVERSAMPLE * missing, [share], pool.slots)
            further_groups = self.rollouts.sample_further(
                retry, max_groups - pool.state.min_complete
            )
            selected = pool.select([*pool.state.waiting, *further_groups], max_groups)
            if not selected:  # on no rank: none has ended within the budget
                continue
            refill = self._score(retry, selected)
            lengths += refill.facts.length_N.int().tolist()
            # Collective: where only one of the two batches has images on some rank, their rows have
            # different columns, and no rank exchanges any.
            if not all(gather_object([refill.batch.keys() == scored.batch.keys()])):
                continue
            chosen = pool.choose_groups(scored.assessment, refill.assessment)
            for numbers in chosen:  # of every rank, since the figure is that of all
                for slot, number in enumerate(numbers[: len(scored.groups)]):
                    if number != slot:
                        replaced += 1
            rank = self.accelerator.process_index
            scored = scored.exchanged(refill, chosen, pad_id=self.context.pad_id, rank=rank)
            assessment = self.advantages.assess(
                scored.facts, generation.group_size, generation.key.step
            )
            scored = replace(scored, assessment=assessment)
        if rounds:
            groups_of_ranks = len(scored.groups) * self.accelerator.num_processes
            self.log_figure("adora/refilled_groups", replaced / groups_of_ranks)
        pool.note_learned(scored.batch, lengths)
        return scored

    def _evaluated(self, scored: ScoredGroups) -> Batch:
        """Return the batch of an evaluation, with the advantages that TRL would give it."""
        batch = scored.batch
        batch["advantages"] = self._rows_on_device(scored.assessment.trl_advantages_PG)
        batch["num_items_in_batch"] = self._loss_tokens(batch)
        return batch

    def _weigh(self, generation: Generation, scored: ScoredGroups) -> Batch:
        """Stage 8: the batch with its final advantages, once no group is exchanged any more.

        Collective.
        """
        advantages = self.advantages.compute(scored.assessment)
        batch = scored.batch
        batch["advantages"] = self._rows_on_device(advantages.final_PG)
        batch["num_items_in_batch"] = self._loss_tokens(batch)
        with self.clock.phase("policy"):
            for extension in self.extensions:
                extension.after_weighing(generation, batch, advantages)
        with self.clock.phase("other"):
            self.generation_log.log_learned(batch, advantages)
        return batch

    def _rows_on_device(self, values_PG: Tensor) -> Tensor:
        """Return the part of this rank, (B,), of values of all ranks' groups, on the device."""
        values_B = rows_of_rank(values_PG.flatten(), self.accelerator)
        return values_B.to(self.accelerator.device, non_blocking=True)

    def _loss_tokens(self, batch: Batch) -> Tensor:
        """Return the number of tokens in the loss over all ranks, (). Collective."""
        tokens: Tensor = self.accelerator.gather(loss_mask(batch).sum()).sum()
        return tokens

    def _turn(self, prompts: PromptBatch) -> list[list[int]]:
        """Sample one turn by the policy itself, with Transformers: token ids, (B,).

        Stock TRL takes settings of the model's folder where no key says another, and samples with
        dropout, which the log-probabilities of the answers do not have.
        """
        with folder_settings_left_out(self.model), evaluation_mode(self.model):
            turn = self._generate_single_turn(prompts.ids, prompts.images, prompts.fields, 1)
        return cast("list[list[int]]", turn[0])

    def _add_logps(self, batch: Batch, mode: str) -> None:
        """Put those log-probabilities into a batch that the loss compares its own with.

        They are of the policy that has sampled, unless only some micro-batches need them, and of
        the reference model.
        """
        args = self.args
        training = mode == "train"
        corrects = self.old_logps.corrects_engine
        has_old_pass = corrects or not self.layout.has_one_step
        if training and not self.old_logps.needs_pass_over_generation:
            has_old_pass = False
        rows = args.per_device_train_batch_size if training else args.per_device_eval_batch_size

        def scored(model: PreTrainedModel) -> Tensor:
            """Log-probabilities of the batch's completions by a model, (B, C)."""
            return generation_logps(
                batch, partial(self._get_per_token_logps_and_entropies, model), rows
            )

        with disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            if has_old_pass:
                batch["old_per_token_logps"] = scored(self.model)
            if has_old_pass and corrects:
                for name, value in self.ratio.complete(batch, batch["old_per_token_logps"]).items():
                    self._metrics[mode][name].append(value)
            if self.beta != 0.0 and self.ref_model is not None:
                batch["ref_per_token_logps"] = scored(self.ref_model)
            elif self.beta != 0.0:  # the base model of an adapter, or the adapter as it was
                policy = self.accelerator.unwrap_model(self.model)
                with use_adapter(
                    policy, adapter_name="ref" if "ref" in policy.peft_config else None
                ):
                    batch["ref_per_token_logps"] = scored(self.model)
                # PEFT has made all of the adapter trainable again
                freeze(policy, args.adora_freeze)
            if training and self.reference_guard.is_due(self.state.global_step):
                self.reference_guard.check(batch, self._policy_logps)

    def _add_old_logps(self, micro_batches: Sequence[Batch]) -> None:
        """Stage 10: put the old log-probabilities into the micro-batches that need a pass for them.

        Groups without signal need none, even where a KL term learns from them. It comes before the
        first update, which changes the weights. Collective: every rank makes equally many passes.
        Raises `RolloutError` where the engine drifts.
        """
        policy = partial(self._get_per_token_logps_and_entropies, self.model)
        checkpointing = disable_gradient_checkpointing(
            self.model, self.args.gradient_checkpointing_kwargs
        )
        with checkpointing:
            for old_pass in self.old_logps.due(micro_batches):
                part = old_pass.batch()
                rows = len(part["completion_ids"])
                with self.policy_pass.watch(None, part):
                    logps_BC = generation_logps(part, policy, rows)
                part["old_per_token_logps"] = logps_BC
                if self.old_logps.corrects_engine:
                    self._compare_with_engine(part, logps_BC)
                old_pass.store(part)

    def _compare_with_engine(self, micro: Batch, logps_BC: Tensor) -> None:
        """Measure the drift of a micro-batch, and complete its ratio to the engine. Collective.

        `logps_BC`: those of the policy that has sampled it, detached.
        """
        self.drift_guard.check_batch(micro, self.state.global_step, logps_BC)
        self.recorder.add_measured_drift(micro, logps_BC)
        if self.old_logps.corrects_engine:
            for name, value in self.ratio.complete(micro, logps_BC).items():
                self.log_figure(name, value)

    @property
    def _step_key(self) -> StepKey:
        """Where the run stands."""
        return StepKey(
            mode="train" if self.model.training else "eval",
            step=self.state.global_step,
            micro=self._step % self.args.gradient_accumulation_steps,
        )

    @property
    def _first_micro_step(self) -> int:
        """TRL's `_step` where the present generation begins."""
        return int(self._step - self._step % self.layout.micro_batches_per_generation)

    # ----------------------------------------------------------------------------- 2. a micro-batch

    def training_step(self, model: PreTrainedModel, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """One micro-batch forward and backward; returns its loss, ().

        Stock TRL runs every micro-batch, and counts them through all epochs. Ours skips those that
        are empty, which they are on all ranks alike. Where several generations make a step and an
        epoch's last step has fewer, the next one begins at its own first micro-batch, as in a run
        that resumes from there. One that runs out of a card's memory is made once more, with all
        layers recomputed.
        """
        started = time.perf_counter()
        model.train()
        has_work = not self._cuts or bool(self._prepare_inputs(inputs))
        self._current_train_step_time += time.perf_counter() - started
        loss = torch.zeros((), device=self.args.device)
        if has_work:
            step = partial(super().training_step, model, inputs, num_items_in_batch)
            loss = self.recompute.retried(step, self._metrics["train"])
        if not has_work:  # TRL counts the others
            self._step += 1
        if self.layout.has_one_step and self.accelerator.sync_gradients:
            # The next step begins at its own first micro-batch, however few this one had.
            begun = self._step % self.layout.gradient_accumulation_steps
            if begun:
                self._step += self.layout.gradient_accumulation_steps - begun
        return loss

    def _compute_loss(self, model: PreTrainedModel, inputs: Any) -> Tensor:
        """Return the loss of a micro-batch, (), with its weight among those of the step.

        Stock TRL takes the ratio to the engine from an earlier pass, averages the loss over the
        rows of a micro-batch, however many there are, and clips the ratio of new to old policy on
        one side only. Ours computes the ratio to the engine in the policy's own pass, weighs a
        micro-batch by its rows or tokens, and skips a step in which the ratio of new to old policy
        explodes. Random numbers of a micro-batch, such as those of dropout, are seeded by its
        position alone, so that a resumed run draws the same.
        """
        micro = cast("Batch", {**inputs})
        micro_step = self._step - self._first_micro_step
        if model.training:
            self.old_logps.prepare_loss(micro, micro_step)
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        coefficient = self._entropy_coefficient

        def note_pass(logps_BC: Tensor, entropies_BC: Tensor | None) -> None:
            """Keep what the policy's pass computed, and compare it with the engine's."""
            logps.append(logps_BC)
            if entropies_BC is not None:
                entropies.append(entropies_BC)
            if not model.training:
                return
            if self.ratio.is_due(micro) and self.old_logps.compares_engine(micro_step):
                self._compare_with_engine(micro, logps_BC)
            self.old_logps.fill_missing(micro, logps_BC)
            self.old_logps.keep_for_next_iteration(inputs, micro, logps_BC, micro_step)

        rank = self.accelerator.process_index
        seed = f"micro-batch/{self.args.seed}/{self._step_key.position}/{rank}"
        draws = drawn_at(seed) if model.training else nullcontext()
        with self.policy_pass.watch(note_pass, micro), draws:
            loss = super()._compute_loss(model, micro)
        if model.training:
            loss = self.ratio_guard.loss(loss, logps[0] if logps else None, micro)
        loss = loss * self.batcher.weight(micro)
        if model.training and self.entropy_bonus.is_on:
            accumulated = self.current_gradient_accumulation_steps
            (entropies_BC,) = entropies
            loss = loss + self.entropy_bonus.missing(micro, entropies_BC, coefficient, accumulated)
        return loss

    @property
    def _entropy_coefficient(self) -> float:
        """The coefficient of TRL's bonus in this step; an adaptive one changes at the step's end."""
        too_high = self._last_world_entropy > self.args.entropy_target
        return 0.0 if self.use_adaptive_entropy and too_high else float(self.entropy_coef)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return the tokens of the highest entropy, (B, C).

        Stock TRL chooses them for the policy's loss. Ours keeps its choice for the entropy bonus too.
        """
        chosen_BC: Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        self.entropy_bonus.chosen_BC = chosen_BC
        return chosen_BC

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Log-probabilities of completions, and entropies where they are asked for.

        Stock TRL computes the prompt again with every rollout, and pads rows to one length. Ours
        computes it once per group and without padding where that is less work and the model's
        attention allows it.
        """
        return self.policy_pass(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def _policy_logps(self, batch: Batch, pixels: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of a generation's completions by the policy, (B, C)."""
        policy = partial(self._get_per_token_logps_and_entropies, self.model)
        return generation_logps(
            batch,
            model_pass=policy,
            rows_per_pass=self.args.per_device_train_batch_size,
            pixels=pixels,
        )

    # ------------------------------------------------------------------------------ 3. a checkpoint

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        """Write the checkpoint of the present step.

        Stock TRL writes into `checkpoint-N` itself and deletes older ones on the way, so a crash
        can leave an incomplete checkpoint, or none. Ours lets it write into another folder, seals
        the result, renames it, and then deletes older ones.
        """
        stock = super()._save_checkpoint
        facts = self.unfinished.facts_to_save(self._step_began, self._facts())

        def save(folder: Path) -> dict[str, Any]:
            """Write all parts into the folder; returns the facts for its manifest."""
            stock(model, trial)
            self.reference.save(folder)
            table = trackers.to_json(self._logs)
            self.pool.save(folder)
            micro_batches: list[Batch] | None = self._buffered_inputs
            if self._cuts:
                present = self._generation
                micro_batches = None if present is None else present.micro_batches
            unfinished = self.unfinished.save(folder, self._step_began, micro_batches, table)
            return {**LossSums.with_all_ranks(facts), **unfinished}

        self.checkpoints.write(self.state.global_step, save)

    def _get_output_dir(self, trial: object) -> str:
        """Return the folder to write into: while a checkpoint is written, its staging folder.

        Stock TRL returns `output_dir`, which ours returns otherwise.
        """
        staging = self.checkpoints.staging
        return str(staging) if staging is not None else str(super()._get_output_dir(trial))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        """Load the weights of a checkpoint.

        Stock TRL leaves this to Transformers 5.17, which loads weights by their names in the
        file. Qwen2.5-VL's modules have other names, so a resumed run would only print a warning and
        start from the untrained weights. Of several adapters it reads those in folders alone, and
        not the one that is trained.
        """
        model = self.model if model is None else model
        folder = Path(resume_from_checkpoint)
        if self._dist.is_fsdp or not list(folder.glob("*.safetensors")):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            restore_weights(model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimizer and scheduler, and what no library saves.

        Stock TRL restores these and the coefficient of the entropy. Ours also restores a moving
        reference and the sums of the loss.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.reference.load(Path(checkpoint))
            self.loss_sums.load(Path(checkpoint))

    def restore(self, checkpoint: str) -> None:
        """Restore what a checkpoint holds besides weights and optimizer, which `train` restores.

        It is what the methods remember, the rollouts that are still to be learned from, and the
        figures since the last log.
        """
        facts = facts_of(Path(checkpoint))
        self.checkpoints.began_at = checkpoint
        self.methods.load(facts.get("methods", {}))
        self.pool.load(Path(checkpoint))
        unfinished = self.unfinished.load(Path(checkpoint))
        if unfinished is not None:
            self._step = unfinished.micro_step
            self._buffered_inputs = unfinished.micro_batches
            self._generation = PresentGeneration(
                first_micro_step=self._first_micro_step, micro_batches=self._buffered_inputs
            )
            trackers.from_json(unfinished.table, self._logs)
        for name, values in facts.get("metrics", {}).items():
            self._metrics["train"][name] = list(values)

    def save_here(self) -> Path:
        """Return the checkpoint of the present step, written unless it is there already.

        All ranks call this together.
        """
        return self.checkpoints.at(
            self.state.global_step, lambda: self._save_checkpoint(self.model, None)
        )

    def _facts(self) -> dict[str, Any]:
        """Return the present facts of the run, for a checkpoint's manifest."""
        figures = {name: list(values) for name, values in self._metrics["train"].items()}
        sums = self._loss_sums()
        return {
            **self.run_facts,
            **({} if sums is None else sums.facts()),
            "methods": self.methods.state(),
            "metrics": figures,
        }

    def _loss_sums(self) -> LossSums | None:
        """Return Transformers' sums of losses, of this rank; None before the training begins."""
        if not hasattr(self, "_tr_loss"):
            return None
        # It stays a tensor until it is written, because its value would have to wait for the device.
        unlogged_sum = self._tr_loss.detach().clone()
        return LossSums(
            logged_sum=self._total_loss_scalar,
            last_log_step=self._globalstep_last_logged,
            unlogged_sum=unlogged_sum,
        )

    def _put_loss_sums(self, sums: SavedLossSums) -> None:
        """Let Transformers go on from the sums of losses of a checkpoint."""
        rank = self.accelerator.process_index
        self._tr_loss += sums.unlogged_sum_of(rank, ranks=self.accelerator.num_processes)
        self._total_loss_scalar = sums.logged_sum
        self._globalstep_last_logged = sums.last_log_step

    @property
    def _step_began(self) -> int:
        """TRL's `_step` where the present optimizer step began.

        A run that goes on from a checkpoint makes it whole.
        """
        return int(self._step - self._step % self.args.gradient_accumulation_steps)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights, processor and model card.

        Stock TRL saves weights and processor. Ours also writes the card, in checkpoints too, and
        lets others read the weights where the umask does.
        """
        folder = Path(output_dir or self.args.output_dir)
        final = folder == Path(self.args.output_dir)
        lacks_reference = self._dist.is_zero3 and is_peft_model(self.model)
        with recording_saved_files(folder, self.args.should_save) if final else nullcontext():
            with trained_alone(self.model) if lacks_reference else nullcontext():
                super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                usual_modes(folder)
                write_card(self.manifest, folder, self.state)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model of a checkpoint.

        Stock TRL copies the model into `output_dir` to push it. Ours also notes that a run wrote
        it.
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
        options = self.args.adora_rollouts
        share = self.args.uses("cache_images")
        numbered = options.budget is not None or options.ahead > 0
        if not is_training or not (share or numbered) or not hasattr(dataset, "__len__"):
            return super()._get_dataloader(
                dataset,
                description=description,
                batch_size=batch_size,
                sampler_fn=sampler_fn,
                is_training=is_training,
                dataloader_key=dataloader_key,
            )
        rows = DistinctRows(dataset, numbered=numbered, share=share)
        loader = super()._get_dataloader(
            rows,
            description=description,
            batch_size=batch_size,
            sampler_fn=sampler_fn,
            is_training=is_training,
            dataloader_key=dataloader_key,
        )
        self.rows_ahead.rows = rows
        self.rows_ahead.order = self._row_order
        self.prefetch = self.images.prefetch(rows, self._row_order, dataset)
        return loader

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return the sampler that orders the rows.

        Stock TRL's draws one epoch's order after the other, from `seed` alone. Ours draws each from
        the epoch's number, and from `data_seed` where it is set.
        """
        stock = super()._get_train_sampler(dataset)
        self._row_order = EpochRepeatSampler.like(stock, seed=self.args.seed_of_rows)
        return self._row_order

    def _largest_of_ranks(self, value: float) -> float:
        """Return the largest value of all ranks. Collective."""
        values = torch.tensor([value], device=self.accelerator.device)
        return float(self.accelerator.gather(values).max())

    def log_evaluation(self, figures: dict[str, float]) -> None:
        """Log the figures of an evaluation, as an entry of its own.

        TRL's `log` would add averages of the training's figures so far, so this is Transformers'.
        """
        # Transformers takes this entry for the log of the step, and would leave that out.
        should_log = self.control.should_log
        Trainer.log(self, figures)
        self.control.should_log = should_log

    def log_figure(self, name: str, value: float) -> None:
        """Add a value of this step to the next log, which averages them.

        It is the same on every rank.
        """
        self._metrics["train"][name].append(value)

    def close(self) -> None:
        """Shut a colocated engine down while its process groups still exist.

        Nothing can be sampled after this.
        """
        self.prefetch.finish()
        self.run.folder.release()
        if isinstance(self.sampler, AsyncServerSampler):
            self.sampler.close()
        if self.use_vllm and self.vllm_mode == "colocate":
            self.vllm_generation.shut_down()
