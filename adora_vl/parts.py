"""Makes the objects that a training step consists of, once TRL has loaded the models."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedModel, TrainerCallback
from transformers.utils.generic import is_flash_attention_requested
from trl import GRPOTrainer

from adora_vl.checkpoint.callback_states import EpochEnd
from adora_vl.checkpoint.trl_state import LossSums, SyncedReferenceModel
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.checkpoint_state import CheckpointState
from adora_vl.config.methods import build_pipeline
from adora_vl.data.context_limit import server_context_length
from adora_vl.data.prompts import control_tokens
from adora_vl.evaluation import EvaluationCallback
from adora_vl.models.precision import RefuseWrongBuffers
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.pass_differences import (
    computing_dtype,
    evaluation_mode,
    has_dropout,
    rounding_bound,
)
from adora_vl.packing.policy_pass import ModelPass, PolicyPass
from adora_vl.packing.prompts import PromptBatch
from adora_vl.packing.split_attention import configured_attention
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.record import metrics, progress
from adora_vl.record.metrics_logger import MetricsLogger
from adora_vl.record.phases import PhaseClock
from adora_vl.record.recorder import Recorder
from adora_vl.record.rollout_metrics import TieNotice
from adora_vl.rollout.agreement import SelfCheck
from adora_vl.rollout.engine_and_policy import EngineAndPolicy
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.rollout.prompt_tokens import (
    ban_tokens,
    greedy_settings,
    ignoring_generation_config,
    never_sampled_ids,
)
from adora_vl.rollout.samplers import AsyncServerSampler, Sampler, TransformersSampler, VLLMSampler
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import ToolLoop
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.entropy_bonus import EntropyBonus
from adora_vl.training.extensions import Extension
from adora_vl.training.first_answers import FirstAnswers
from adora_vl.training.generation_logps import GenerationLogps
from adora_vl.training.generation_sampler import GenerationSampler
from adora_vl.training.group_sampler import GroupSampler, PromptReader
from adora_vl.training.guards import (
    DriftGuard,
    GenerationGuard,
    RatioGuard,
    ReferenceGuard,
    RewardGuard,
)
from adora_vl.training.late_drift import LateDriftCheck
from adora_vl.training.micro_batch_memory import MicroBatchMemory
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.training.old_logps import OldLogps
from adora_vl.training.optimizer_steps import ScaledRate, SkipBadSteps
from adora_vl.training.pool import Pool
from adora_vl.training.recompute import RecomputedLayers, activation_memory_of, gpu_bytes
from adora_vl.training.refill import Refill
from adora_vl.training.scoring import RewardFunctions, Scorer
from adora_vl.training.unfinished import UnfinishedGeneration
from adora_vl.types import StepContext


class StepParts:
    """The objects that a training step consists of, about in the order in which it uses them.

    Each is a cached property: it is made once, from attributes of TRL's trainer and from other
    objects of this class. The stages of a step are: 1 draw groups, 2 schedule them, 3 sample their
    rollouts, 4 select complete groups, 5 build a batch, 6 score it, 7 refill it, 8 weigh its
    groups, 9 split it into micro-batches, 10 compute old log-probabilities.

    `context` is accelerator, config, log and state, which every object gets. `_run` is the run as
    it was checked before anything was loaded; it has a toolbox if the policy may call tools.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        run: ResolvedRun,
        context: StepContext,
        *,
        clock: PhaseClock,
        models: list[PreTrainedModel],
        trl_pass: ModelPass,
    ) -> None:
        """Make all objects, once TRL has loaded the models.

        Args:
            trainer: the trainer; only its attributes of TRL's class are used.
            run: the checked run.
            context: accelerator, config, log and state. Every object gets it.
            clock: what measures the phases of a step.
            models: the policy, and the reference model where there is one.
            trl_pass: TRL's `_get_per_token_logps_and_entropies` of the trainer, without ours.
        """
        self._trainer = trainer
        self._trl_pass = trl_pass
        self._run = run
        self._models = models
        self.context = context
        self.clock = clock
        # A cached property makes its object when it is read first. All are read now, since an
        # extension may refuse the run, and should do so before the training begins.
        for name, attribute in vars(StepParts).items():
            if isinstance(attribute, cached_property):
                getattr(self, name)

    # ------------------------------------------------------------------------------ the generation

    @cached_property
    def images(self) -> DistinctImages:
        """Processes each distinct image once, and stores the patches of the present generation."""
        return DistinctImages(
            models=self._models,
            processor=self._trainer.processing_class,
            device=self.context.accelerator.device,
            config=self.context.config,
            dataset=self._trainer.train_dataset,
            tools_show_images=self._has_tools,
        )

    @cached_property
    def extensions(self) -> list[Extension]:
        """The user's methods that change the training step (`adora_extensions`), once started."""
        extensions = [*self._run.extensions.values()]
        for extension in extensions:
            extension.start(self.context, self.images)
        return extensions

    @cached_property
    def pool(self) -> Pool:
        """Remembers groups that have begun, and decides which of them fill the next generation."""
        return Pool(self.context, self._trainer.train_dataset, has_tools=self._has_tools)

    @cached_property
    def sampler(self) -> Sampler:
        """Samples rollouts: Transformers, vLLM, or servers that sample ahead."""
        trainer = self._trainer
        if trainer.use_vllm:
            samples_ahead = self.context.config.adora_rollouts.ahead
            sampler_class = AsyncServerSampler if samples_ahead else VLLMSampler
            return sampler_class(self.context, self.images, trainer.vllm_generation)
        ban_tokens(
            never_sampled_ids(trainer._tokenizer),
            trainer.generation_kwargs,
            trainer.generation_config,
        )
        return TransformersSampler(
            generate=self._sample_turn_by_policy,
            generate_greedily=self._sample_turn_greedily_by_policy,
        )

    @cached_property
    def prompt_reader(self) -> PromptReader:
        """Tokenizes prompts and processes their images."""
        return PromptReader(self.images)

    @cached_property
    def generation_sampler(self) -> GenerationSampler:
        """Stages 1 to 3: draws, schedules and samples the groups of a generation."""
        return GenerationSampler(
            context=self.context,
            pool=self.pool,
            group_sampler=GroupSampler(
                context=self.context,
                prompt_reader=self.prompt_reader,
                sampler=self.sampler,
                stop_criteria=self._stop_criteria,
                extensions=self.extensions,
                tool_loop=self._tool_loop,
                server_context=self._server_context,
            ),
            guard=GenerationGuard(self.context, control_tokens(self._trainer.processing_class)),
            phase=self.clock.phase,
            environments=self._run.tools.environments,
            drift_check=LateDriftCheck(self.engine_and_policy, self.generation_logps.drift_guard),
        )

    @cached_property
    def batch_builder(self) -> BatchBuilder:
        """Stage 5: makes complete groups of rollouts into a batch, before they are scored."""
        return BatchBuilder(
            context=self.context,
            images=self.images,
            processor=self._trainer.processing_class,
            stop_criteria=self._stop_criteria,
            to_device=_to_device(self._trainer),
            has_engine_logps=self.sampler.returns_logps,
            pad_to_multiple_of=self._trainer.pad_to_multiple_of,
            has_tools=self._has_tools,
            allows_stale_rollouts=self.pool.allows_stale_rollouts,
            shows_other_images=any(extension.changes_images for extension in self.extensions),
        )

    @cached_property
    def generation_logps(self) -> GenerationLogps:
        """Computes old and reference log-probabilities; compares the engine's with the policy's.

        The loss needs the log-probabilities of the old policy, which has sampled the rollouts, and
        with a KL term those of the reference model.
        """
        trainer = self._trainer
        context = self.context
        rounding = rounding_bound(computing_dtype(context.accelerator, trainer.model))
        return GenerationLogps(
            context=context,
            policy=trainer.model,
            reference=trainer.ref_model,
            # The method is looked up at each call, since benchmarks replace it by a wrapper.
            model_pass=lambda *args, **kwargs: trainer._get_per_token_logps_and_entropies(
                *args, **kwargs
            ),
            policy_pass=self.policy_pass,
            old_logps=OldLogps(context, has_dropout=has_dropout(trainer.model)),
            importance_ratio=ImportanceRatio(context),
            drift_guard=DriftGuard(context),
            reference_guard=ReferenceGuard(context, rounding),
            record_drift=self.recorder.add_measured_drift,
            metrics_by_mode=trainer._metrics,
        )

    @cached_property
    def reward_functions(self) -> RewardFunctions:
        """Stage 6: calls the reward functions on this rank's rollouts.

        The functions are wrapped, so that each has a time limit, and one that fails ends the run.
        """
        trainer = self._trainer
        return RewardFunctions(
            functions=self._reward_guard.wrap_functions(
                trainer.reward_funcs, trainer.reward_func_names
            ),
            tokenizers=trainer.reward_processing_classes,
            template_kwargs=trainer.chat_template_kwargs,
            to_device=_to_device(trainer),
            event_loop=lambda: trainer.async_loop,
        )

    @cached_property
    def scorer(self) -> Scorer:
        """Gathers rewards, lengths and other facts of all ranks' rollouts.

        It works after `reward_functions`.
        """
        return Scorer(
            self.context,
            guard=self._reward_guard,
            weights_F=self._trainer.reward_weights,
            function_names=self._trainer.reward_func_names,
        )

    @cached_property
    def first_answers(self) -> FirstAnswers:
        """Warns if none of a run's first rollouts is right."""
        return FirstAnswers()

    @cached_property
    def advantage_computer(self) -> AdvantageComputer:
        """Computes the advantages of all ranks' groups by the methods of the run."""
        return AdvantageComputer(
            self.context,
            pipeline=build_pipeline(self.context.config),
            reward_weights_F=self._trainer.reward_weights,
            has_tools=self._has_tools,
        )

    @cached_property
    def refill(self) -> Refill:
        """Stage 7: replaces groups without signal, whose rewards are all equal, by further ones."""
        return Refill(
            context=self.context,
            pool=self.pool,
            generation_sampler=self.generation_sampler,
            advantage_computer=self.advantage_computer,
        )

    @cached_property
    def recorder(self) -> Recorder:
        """Records rollouts, with the texts of all turns in a run with tools."""
        toolbox = self._run.prompts.toolbox
        if toolbox is None:
            return Recorder(self.context)
        return Recorder(self.context, decode=self._decode, view=toolbox.view)

    @cached_property
    def metrics_logger(self) -> MetricsLogger:
        """Logs metrics of scored and learned groups, and records their rollouts."""
        trainer = self._trainer
        is_main = self.context.accelerator.is_main_process
        return MetricsLogger(
            context=self.context,
            recorder=self.recorder,
            metrics_by_mode=trainer._metrics,
            table=trainer._logs,
            function_names=trainer.reward_func_names,
            tie_notice=TieNotice(self.advantage_computer.pipeline.adora_options, prints=is_main),
            assess=self.advantage_computer.assess,
            synced_bytes=(
                (lambda: trainer.vllm_generation.bytes_sent) if trainer.use_vllm else None
            ),
        )

    # ---------------------------------------------------------------------------- the micro-batches

    @cached_property
    def micro_batcher(self) -> MicroBatcher:
        """Stage 9: splits a generation into micro-batches, and weighs the loss of each."""
        trainer = self._trainer
        # With a KL term, an entropy bonus or an auxiliary loss of experts, a row contributes to the
        # loss even if its advantage is 0. Then no group may be left out.
        has_kl_term = self.context.config.beta != 0.0
        every_row_counts = bool(
            has_kl_term or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled
        )
        return MicroBatcher(
            self.context,
            self.images.banks,
            every_row_counts=every_row_counts,
            micro_batch_memory=self._micro_batch_memory,
        )

    @cached_property
    def policy_pass(self) -> PolicyPass:
        """Runs the policy forward, computing the prompt of a group once where it can."""
        return PolicyPass(
            self._trl_pass,
            self.context.accelerator,
            self.context.config,
            may_have_images=self.images.may_be_shown,
            checkpointing_context=self.recomputed_layers.switched,
        )

    @cached_property
    def recomputed_layers(self) -> RecomputedLayers:
        """Decides in how many layers gradient checkpointing is on, by the GPU's free memory."""
        device = self.context.accelerator.device
        return RecomputedLayers(
            self.context,
            model=self._trainer.model,
            shape=lambda: self._run.shape,
            sharding=self._run.context.sharding,
            read_gpu_bytes=partial(gpu_bytes, device) if device.type == "cuda" else None,
        )

    @cached_property
    def ratio_guard(self) -> RatioGuard:
        """Skips a step whose ratio of new to old policy explodes."""
        return RatioGuard(self.context)

    @cached_property
    def entropy_bonus(self) -> EntropyBonus:
        """Adds the part of the entropy bonus that TRL's loss lacks."""
        return EntropyBonus(self.context.config, self.micro_batcher)

    @cached_property
    def skip_bad_steps(self) -> SkipBadSteps:
        """Skips optimizer steps whose gradients are not finite."""
        trainer = self._trainer
        # It is a function, since DeepSpeed's engine does not exist before the training begins.
        get_deepspeed_engine = (
            (lambda: trainer.model_wrapped) if trainer.is_deepspeed_enabled else None
        )
        return SkipBadSteps(self.context, self.ratio_guard, get_deepspeed_engine)

    # ------------------------------------------------------------------------------------- the run

    @cached_property
    def checkpoint_writer(self) -> CheckpointWriter:
        """Writes checkpoints that are complete or absent."""
        config = self.context.config
        return CheckpointWriter(
            Path(config.output_dir), config.save_total_limit, self.context.accelerator
        )

    @cached_property
    def epoch_end(self) -> EpochEnd:
        """Lets the checkpoint of an epoch's last step wait for the figures of the epoch."""
        return EpochEnd()

    @cached_property
    def checkpoint_state(self) -> CheckpointState:
        """Saves and restores what a checkpoint has beside TRL's own state.

        That is what the advantage methods and the pool remember, the rest of a generation that is
        partly learned from, a reference model that TRL moves, and metrics since the last log.
        """
        trainer = self._trainer
        return CheckpointState(
            pipeline=self.advantage_computer.pipeline,
            pool=self.pool,
            unfinished_generation=UnfinishedGeneration(self.context, self.images.banks),
            moving_reference=self._moving_reference,
            loss_sums=LossSums(trainer),
            skip_bad_steps=self.skip_bad_steps,
            metrics=trainer._metrics["train"],
            table=trainer._logs,
        )

    @cached_property
    def engine_and_policy(self) -> EngineAndPolicy:
        """The engine and the policy, for checks that compare them, and for evaluations."""
        trainer = self._trainer
        return EngineAndPolicy(
            context=self.context,
            policy=trainer.model,
            dataset=trainer.train_dataset,
            images=self.images,
            processor=trainer.processing_class,
            tokenizer=trainer._tokenizer,
            sampler=self.sampler,
            engine=trainer.vllm_generation if trainer.use_vllm else None,
            collate=self.batch_builder.collate,
        )

    # ------------------------------------------------------------------------------- the callbacks

    def callbacks(
        self, models_by_role: Mapping[str, Any], log_evaluation: Callable[[dict[str, float]], None]
    ) -> list[TrainerCallback]:
        """Return this package's callbacks, in the order in which Transformers calls them.

        Args:
            models_by_role: the policy and its reference model, by the names `policy` and
                `reference`.
            log_evaluation: logs the metrics of an evaluation by their names.
        """
        callbacks: list[TrainerCallback] = [
            self.checkpoint_state.loss_sums,
            ScaledRate(lambda: self.advantage_computer.pipeline.learning_rate_factor),
            self.clock,
            self.recorder,
            progress.ProgressLine(),
            metrics.MetricsFile(),
            self.skip_bad_steps,
            self.epoch_end,
            RefuseWrongBuffers(models_by_role),
        ]
        if self.clock.memory is not None:
            callbacks.append(self.clock.memory)
        if self.context.config.adora_self_check:
            callbacks.append(SelfCheck(self.engine_and_policy))
        if self._run.evaluations is not None:
            callbacks.append(
                EvaluationCallback(
                    engine_and_policy=self.engine_and_policy,
                    generation_sampler=self.generation_sampler,
                    plan=self._run.evaluations,
                    end_tokens=self._trainer.eos_token_ids,
                    log_evaluation=log_evaluation,
                    timed_evaluation=self.clock.evaluation,
                    system_prompt=self._run.system_prompt,
                    revision=self._run.model.revision,
                )
            )
        return callbacks

    # ------------------------------------------------------------- what only the objects above need

    @property
    def _has_tools(self) -> bool:
        """Whether the policy may call tools."""
        return self._run.prompts.toolbox is not None

    @property
    def _decode(self) -> Callable[[Sequence[int]], str]:
        """The function that decodes token ids to a text, without special tokens."""
        return partial(self._trainer._tokenizer.decode, skip_special_tokens=True)

    def _sample_turn_by_policy(self, prompts: PromptBatch, max_tokens: int) -> list[list[int]]:
        """Return the token ids of a turn for each prompt, sampled by the policy without an engine.

        It differs from stock TRL in three points:

        - Where no key of the run sets a sampling option, TRL takes it from the generation config in
          the model's folder. Here that config is ignored.
        - TRL samples with dropout. Here dropout is off. Log-probabilities are computed without
          dropout, and would not be those of the distribution that was sampled from.
        - TRL samples a whole completion in each turn, and cuts the conversation to its length
          afterwards. Here a turn has `max_tokens` at most.
        """
        policy = self._trainer.model
        generation_config = self._trainer.generation_config
        with ignoring_generation_config(policy), evaluation_mode(policy):
            generation_config.max_new_tokens = max_tokens
            try:
                completion_ids, *_ = self._trainer._generate_single_turn(
                    prompts.ids, prompts.images, prompts.fields, num_generations=1
                )
            finally:
                generation_config.max_new_tokens = self.context.config.max_completion_length
        return cast("list[list[int]]", completion_ids)

    def _sample_turn_greedily_by_policy(
        self, prompts: PromptBatch, max_tokens: int
    ) -> list[list[int]]:
        """Return the likeliest token ids of a turn for each prompt, for an evaluation.

        Filters and penalties of the run's sampling do not act, as with vLLM.
        """
        trainer = self._trainer
        # TRL reads the settings of sampling from these two attributes.
        sampling_settings = trainer.generation_kwargs
        sampling_config = trainer.generation_config
        settings = greedy_settings(sampling_settings)
        trainer.generation_kwargs = settings
        trainer.generation_config = GenerationConfig(**settings, disable_compile=True)
        try:
            return self._sample_turn_by_policy(prompts, max_tokens)
        finally:
            trainer.generation_kwargs = sampling_settings
            trainer.generation_config = sampling_config

    @cached_property
    def _stop_criteria(self) -> StopCriteria:
        """Says whether a turn has ended by itself."""
        end_ids = {*self._trainer.eos_token_ids, self.context.pad_id}
        return StopCriteria.from_config(
            end_ids, self.context.config.generation_kwargs or {}, self._decode
        )

    @cached_property
    def _server_context(self) -> int | None:
        """The largest number of tokens of prompt and completion that the run's servers accept.

        It is None without servers, and if the servers do not report it. Collective: the first rank
        asks the servers.
        """
        config = self.context.config
        if not config.uses_servers:
            return None
        served: int | None = self._trainer.vllm_generation.server_group.on_first_rank(
            lambda _: server_context_length(config)
        )
        return served

    @property
    def _tool_loop(self) -> ToolLoop | None:
        """Runs the tools that the policy calls; None in a run without tools."""
        toolbox = self._run.prompts.toolbox
        if toolbox is None:
            return None
        config = self.context.config
        return ToolLoop(
            tools=toolbox,
            processor=self._trainer.processing_class,
            chat_template_kwargs=config.chat_template_kwargs or {},
            count_image_tokens=self.images.count_image_tokens,
            max_answers=config.max_tool_calling_iterations,
            decode=self._decode,
            max_turn_tokens=config.adora_tool_options.turn_tokens,
            context_length=self._server_context or config.vllm_max_model_length,
        )

    @cached_property
    def _reward_guard(self) -> RewardGuard:
        """Ends the run where a reward function fails."""
        return RewardGuard(self.context)

    @property
    def _micro_batch_memory(self) -> MicroBatchMemory:
        """Says how many groups fit into the memory that is planned for a micro-batch.

        The memory of a pass is predicted from its lengths, as in the dry run.
        """
        trainer = self._trainer
        config = self.context.config
        attention = configured_attention(trainer.model.config)
        return MicroBatchMemory(
            make_activation_memory=lambda: activation_memory_of(
                config,
                shape=self._run.shape,
                sharding=self._run.context.sharding,
                on_gpu=self.context.accelerator.device.type == "cuda",
            ),
            longest_completion=config.max_completion_length,
            shares_prompts=lambda: self.policy_pass.shares_prompts and not trainer.aux_loss_enabled,
            masks_padding=not is_flash_attention_requested(
                requested_attention_implementation=attention
            ),
        )

    @property
    def _moving_reference(self) -> SyncedReferenceModel:
        """Saves and loads the reference model, where TRL moves it towards the policy."""
        accelerator = self.context.accelerator
        reference = self._trainer.ref_model
        if reference is not None:
            reference = accelerator.unwrap_model(reference)
        return SyncedReferenceModel(
            reference,
            moves=self.context.config.sync_ref_model,
            is_main=accelerator.is_main_process,
            gather=self._trainer._dist.gather_params,
        )


def _to_device(trainer: GRPOTrainer) -> Callable[[Any], Any]:
    """Return Transformers' own `_prepare_inputs`, which moves a batch to the device.

    TRL overrides that method, so it is taken from the class above TRL's.
    """
    to_device: Callable[[Any], Any] = super(GRPOTrainer, trainer)._prepare_inputs
    return to_device
