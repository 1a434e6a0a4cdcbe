"""Makes the parts of a training step: the objects of a trainer, and its callbacks in their order."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils.generic import is_flash_attention_requested
from trl import GRPOTrainer

from adora_vl.checkpoint.trl_state import MovingReference, RestoreLossSums
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.methods import build_pipeline
from adora_vl.data.dataloader import NoPrefetch
from adora_vl.data.prompts import control_tokens
from adora_vl.evaluation import EvaluateOnTheWay
from adora_vl.models.precision import RefuseWrongBuffers
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.pass_differences import computing_dtype, has_dropout, rounding_bound
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.packing.split_attention import configured_attention
from adora_vl.preflight.facts import ResolvedRun
from adora_vl.record import metrics, phases, progress, rollout_figures, trackers
from adora_vl.record.card_memory import CardMemory
from adora_vl.record.recorder import MetricsLogger, Recorder
from adora_vl.rollout.agreement import SelfCheck
from adora_vl.rollout.engine_pair import EnginePair
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.rollout.prompt_tokens import never_sample, never_sampled_ids
from adora_vl.rollout.samplers import AsyncServerSampler, Sampler, TransformersSampler, VLLMSampler
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import ToolLoop, Tools
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.entropy_bonus import EntropyBonus
from adora_vl.training.first_answers import FirstAnswers
from adora_vl.training.generation import PresentGeneration
from adora_vl.training.generation_sampler import GenerationSampler, LateDriftCheck, UpcomingRows
from adora_vl.training.group_sampler import GroupSampler, PromptReader
from adora_vl.training.guards import (
    DriftGuard,
    GenerationGuard,
    RatioGuard,
    ReferenceGuard,
    RewardGuard,
)
from adora_vl.training.micro_batch_room import MicroBatchRoom
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.training.old_logps import OldLogps
from adora_vl.training.optimizer_steps import ScaledRate, SkipBadSteps
from adora_vl.training.pool import Pool
from adora_vl.training.recompute import activation_memory_of, recomputed_layers
from adora_vl.training.scoring import RewardFunctions, Scorer
from adora_vl.training.unfinished import UnfinishedGeneration
from adora_vl.types import StepContext


class TrainerParts(GRPOTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """Makes the parts of a trainer; `AdoraGRPOTrainer` has the order in which they work."""

    reward_funcs: list[Any]
    toolbox: Tools | None = None  # what the policy may call
    run: ResolvedRun
    phase_clock: phases.PhaseClock
    card_memory: CardMemory | None = None  # on a card
    _step: int  # TRL's count of micro-batches

    def _build_collaborators(self, args: AdoraGRPOConfig, models: list[Any]) -> None:
        """Make the objects that a training step consists of, once TRL has loaded the models.

        The order matters: a part may be built from earlier ones.

        Args:
            args: the training arguments.
            models: the policy, and the reference model where there is one.
        """
        context = StepContext(
            accelerator=self.accelerator,
            config=args,
            log=self.log_figure,
            pad_id=self._tokenizer.pad_token_id,
            state=lambda: self.state,
            policy_logps=self._policy_logps,
            save_now=self.save_here,
        )
        self.context = context
        self.layout = BatchLayout.of(args)
        self._make_models_parts(context, models)
        self._make_guards(context)
        # Transformers' own method, which moves a batch to the device: TRL overrides it.
        to_device = super(GRPOTrainer, self)._prepare_inputs
        reward_guard = RewardGuard(context)
        self.reward_functions = self._reward_functions(reward_guard, to_device)
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        stop_criteria = StopCriteria.of(
            {*self.eos_token_ids, context.pad_id}, args.generation_kwargs or {}, decode
        )
        self.scorer = Scorer(
            context=context,
            guard=reward_guard,
            weights_F=self.reward_weights,
            names=self.reward_func_names,
        )
        self._make_learning_parts(context)
        self.extensions = [*self.run.extensions.values()]
        for extension in self.extensions:
            extension.start(context, self.images)
        self.sampler = self._sampler(context)
        self.importance_ratio = ImportanceRatio(context)
        toolbox = self.run.prompts.toolbox
        self.recorder = Recorder(
            context=context,
            decode=decode if self.toolbox else None,
            view=toolbox.view if toolbox is not None else None,
        )
        self.pool = Pool(context, self.train_dataset, has_tools=self.toolbox is not None)
        self.prompt_reader = PromptReader(self.images)
        self.upcoming_rows = UpcomingRows()
        self.batch_builder = self._batch_builder(context, stop_criteria, to_device)
        self.engine_pair = self._engine_pair(context)
        self.generation_sampler = self._generation_sampler(context, stop_criteria)
        self.metrics_logger = self._metrics_logger(context)
        self.first_answers = FirstAnswers()
        # The generation that is learned from; the trainer fills it when it samples the first one.
        self._present_generation: PresentGeneration | None = None
        self.log_multimodal = trackers.logs_images(args)
        if not self.use_vllm:
            never_sample(
                never_sampled_ids(self._tokenizer), self.generation_kwargs, self.generation_config
            )
        self._add_callbacks(context, args)

    def _batch_builder(
        self, context: StepContext, stop_criteria: StopCriteria, to_device: Callable[[Any], Any]
    ) -> BatchBuilder:
        """Return what makes the rollouts of complete groups into a batch.

        `to_device`: moves a batch to the device as Transformers does.
        """
        return BatchBuilder(
            context=context,
            images=self.images,
            processor=self.processing_class,
            stop_criteria=stop_criteria,
            to_device=to_device,
            has_engine_logps=self.sampler.scores,
            pad_to_multiple_of=self.pad_to_multiple_of,
            has_tools=self.toolbox is not None,
            allows_stale_rollouts=self.pool.allows_stale_rollouts,
            shows_other_images=any(extension.changes_images for extension in self.extensions),
        )

    def _make_models_parts(self, context: StepContext, models: list[Any]) -> None:
        """Make what processes images, computes advantages and writes checkpoints.

        `models`: the policy, and the reference model where there is one.
        """
        args = context.config
        has_tools = self.toolbox is not None
        self.images = DistinctImages(
            models=models,
            processor=self.processing_class,
            device=self.accelerator.device,
            config=args,
            dataset=self.train_dataset,
            tools_show_images=has_tools,
        )
        self.advantage_methods = build_pipeline(args)
        self.advantage_computer = AdvantageComputer(
            context=context,
            methods=self.advantage_methods,
            reward_weights_F=self.reward_weights,
            tools=has_tools,
        )
        self.checkpoint_writer = CheckpointWriter(
            Path(args.output_dir), args.save_total_limit, self.accelerator
        )
        reference = None
        if self.ref_model is not None:
            reference = self.accelerator.unwrap_model(self.ref_model)
        self.moving_reference = MovingReference(
            reference,
            moves=args.sync_ref_model,
            is_main=self.accelerator.is_main_process,
            zero3=self._dist.is_zero3,
        )
        self.loss_sums = RestoreLossSums(self._put_loss_sums)

    def _make_guards(self, context: StepContext) -> None:
        """Make what ends the run, or skips a step, where log-probabilities are not as they must be."""
        self.drift_guard = DriftGuard(context)
        self.ratio_guard = RatioGuard(context)
        self.reference_guard = ReferenceGuard(
            context, rounding_bound(computing_dtype(self.accelerator, self.model))
        )

    def _reward_functions(
        self, guard: RewardGuard, to_device: Callable[[Any], Any]
    ) -> RewardFunctions:
        """Return what calls the run's reward functions; the guard notes their failures."""
        return RewardFunctions(
            functions=guard.wrap_functions(self.reward_funcs, self.reward_func_names),
            tokenizers=self.reward_processing_classes,
            template=self.chat_template_kwargs,
            to_device=to_device,
            loop=lambda: self.async_loop,
        )

    def _make_learning_parts(self, context: StepContext) -> None:
        """Make what cuts a generation into micro-batches, and computes the policy's pass and loss."""
        args = context.config
        # With a KL term, an entropy bonus or an auxiliary loss of experts a row adds to the loss even
        # if its advantage is 0.
        has_kl_term = self.beta != 0.0
        every_row_counts = bool(has_kl_term or self._entropy_bonus_enabled or self.aux_loss_enabled)
        self.prefetch = NoPrefetch()  # until the trainer makes the data loader
        self.unfinished_generation = UnfinishedGeneration(context, self.images.banks)
        self.recomputed_layers = recomputed_layers(
            context,
            model=self.model,
            shape=lambda: self.run.shape,
            sharding=self.run.context.sharding,
        )
        self.policy_pass = PolicyPass(
            self.accelerator,
            args,
            may_have_images=self.images.shown,
            checkpointing_context=self.recomputed_layers.switched,
        )
        attention = configured_attention(self.model.config)
        micro_batch_room = MicroBatchRoom(
            activation_memory=lambda: activation_memory_of(
                args,
                shape=self.run.shape,
                sharding=self.run.context.sharding,
                on_gpu=self.accelerator.device.type == "cuda",
            ),
            longest_completion=args.max_completion_length,
            shares_prompts=lambda: self.policy_pass.shares_prompts and not self.aux_loss_enabled,
            masked=not is_flash_attention_requested(requested_attention_implementation=attention),
        )
        self.micro_batcher = MicroBatcher(
            context,
            self.images.banks,
            every_row_counts=every_row_counts,
            micro_batch_room=micro_batch_room,
        )
        self.entropy_bonus = EntropyBonus(args, self.micro_batcher)
        self.old_logps = OldLogps(context, has_dropout=has_dropout(self.model))

    def _sampler(self, context: StepContext) -> Sampler:
        """Return the sampler of the rollouts: Transformers, vLLM, or servers that sample ahead."""
        if not self.use_vllm:
            return TransformersSampler(self._sample_turn)
        samples_ahead = context.config.adora_rollouts.ahead
        sampler_class = AsyncServerSampler if samples_ahead else VLLMSampler
        return sampler_class(context, self.images, self.vllm_generation)

    def _engine_pair(self, context: StepContext) -> EnginePair:
        """Return the engine and the policy as a pair, for checks that compare them, and evaluations."""
        return EnginePair(
            context=context,
            policy=self.model,
            dataset=self.train_dataset,
            images=self.images,
            processor=self.processing_class,
            tokenizer=self._tokenizer,
            sampler=self.sampler,
            engine=self.vllm_generation if self.use_vllm else None,
            collate=self.batch_builder.collated,
        )

    def models_by_role(self) -> dict[str, Any]:
        """Return the present policy, and the reference model; None in a run without one."""
        return {"policy": self.model, "reference": self.ref_model}

    def _metrics_logger(self, context: StepContext) -> MetricsLogger:
        """Return what logs the metrics of a generation, and records its rollouts."""
        synced_bytes = (lambda: self.vllm_generation.bytes_sent) if self.use_vllm else None
        return MetricsLogger(
            context=context,
            recorder=self.recorder,
            metrics_by_mode=self._metrics,
            table=self._logs,
            function_names=self.reward_func_names,
            tie_notice=rollout_figures.TieNotice(
                self.advantage_methods.adora_options, speaks=self.accelerator.is_main_process
            ),
            assess=self.advantage_computer.assess,
            synced_bytes=synced_bytes,
        )

    def _generation_sampler(
        self, context: StepContext, stop_criteria: StopCriteria
    ) -> GenerationSampler:
        """Return what draws, schedules and samples the groups of each generation."""
        group_sampler = GroupSampler(
            context=context,
            prompt_reader=self.prompt_reader,
            sampler=self.sampler,
            stop_criteria=stop_criteria,
            extensions=self.extensions,
            tool_loop=self._tool_loop(),
        )
        return GenerationSampler(
            context=context,
            pool=self.pool,
            group_sampler=group_sampler,
            guard=GenerationGuard(context, control_tokens(self.processing_class)),
            phase=self.phase_clock.phase,
            environments=self.run.tools.environments,
            upcoming_rows=self.upcoming_rows.rows_after,
            drift_check=LateDriftCheck(self.engine_pair, self.drift_guard.check),
        )

    def _tool_loop(self) -> ToolLoop | None:
        """Return what runs the tools that the policy calls; None in a run without tools."""
        options = self.args.adora_tool_options
        toolbox = self.toolbox
        if toolbox is None:
            return None
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        return ToolLoop(
            tools=toolbox,
            processor=self.processing_class,
            template=self.args.chat_template_kwargs or {},
            tokens_of=self.images.tokens_of,
            max_answers=self.args.max_tool_calling_iterations,
            decode=decode,
            turn_tokens=options.turn_tokens,
            context_length=self.args.vllm_max_model_length,
        )

    def _add_callbacks(self, context: StepContext, args: AdoraGRPOConfig) -> None:
        """Add this package's callbacks, in the order in which Transformers calls them at a step.

        The callbacks of Transformers that print are removed.
        """
        for printing_callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(printing_callback)
        # A function, since DeepSpeed's engine exists only when the training begins.
        deepspeed_engine = (lambda: self.model_wrapped) if self.is_deepspeed_enabled else None
        self.skip_bad_steps = SkipBadSteps(context, self.ratio_guard, deepspeed_engine)
        callbacks: list[TrainerCallback] = [
            self.loss_sums,
            ScaledRate(lambda: self.advantage_methods.learning_rate_factor),
            self.phase_clock,
            self.recorder,
            progress.ProgressLine(),
            metrics.MetricsFile(),
            self.skip_bad_steps,
            RefuseWrongBuffers(self.models_by_role()),
        ]
        if self.card_memory is not None:
            callbacks.append(self.card_memory)
        if args.adora_self_check:
            callbacks.append(SelfCheck(self.engine_pair))
        run = self.run
        if run.evaluations is not None:
            callbacks.append(
                EvaluateOnTheWay(
                    pair=self.engine_pair,
                    generation_sampler=self.generation_sampler,
                    plan=run.evaluations,
                    end_tokens=self.eos_token_ids,
                    log_evaluation=self.log_evaluation,
                    timed_evaluation=self.phase_clock.evaluation,
                    system_prompt=run.system_prompt,
                    revision=run.model.revision,
                )
            )
        for callback in callbacks:
            self.add_callback(callback)
