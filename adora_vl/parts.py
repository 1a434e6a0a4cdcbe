"""Makes the objects that a training step consists of, before and after TRL's own constructor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, TrainerCallback
from transformers.utils.generic import is_flash_attention_requested
from trl import GRPOTrainer

from adora_vl.checkpoint.trl_state import LossSums, MovingReference
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.checkpoint_state import CheckpointState
from adora_vl.config.methods import build_pipeline
from adora_vl.data.context_limit import served_length
from adora_vl.data.prompts import control_tokens
from adora_vl.evaluation import EvaluateOnTheWay
from adora_vl.models.precision import RefuseWrongBuffers
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.pass_differences import (
    computing_dtype,
    evaluation_mode,
    has_dropout,
    rounding_bound,
)
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.packing.prompts import PromptBatch
from adora_vl.packing.split_attention import configured_attention
from adora_vl.preflight.facts import ResolvedRun
from adora_vl.record import metrics, progress
from adora_vl.record.clocks import StepClocks
from adora_vl.record.metrics_logger import MetricsLogger
from adora_vl.record.recorder import Recorder
from adora_vl.record.rollout_figures import TieNotice
from adora_vl.rollout.agreement import SelfCheck
from adora_vl.rollout.engine_pair import Collate, EnginePair
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.rollout.prompt_tokens import (
    ignoring_generation_config,
    never_sample,
    never_sampled_ids,
)
from adora_vl.rollout.samplers import AsyncServerSampler, Sampler, TransformersSampler, VLLMSampler
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import ToolLoop
from adora_vl.tools.run import Toolbox
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.entropy_bonus import EntropyBonus
from adora_vl.training.extensions import Extension
from adora_vl.training.first_answers import FirstAnswers
from adora_vl.training.generation_logps import GenerationLogps
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
from adora_vl.training.recompute import RecomputedLayers, activation_memory_of, card_bytes
from adora_vl.training.refill import Refill
from adora_vl.training.scoring import RewardFunctions, Scorer
from adora_vl.training.unfinished import UnfinishedGeneration
from adora_vl.types import StepContext


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The objects that a training step consists of, about in the order in which it uses them."""

    context: StepContext
    """What every one of them is built from."""
    clocks: StepClocks
    images: DistinctImages
    """Processes each distinct image once, and has the patches of the present generation."""
    upcoming_rows: UpcomingRows
    """The rows that the data loader will draw, once the trainer has made it."""
    pool: Pool
    """The groups that have begun, and the rules by which they fill a generation."""
    sampler: Sampler
    """Samples rollouts: Transformers, vLLM, or servers that sample ahead."""
    generation_sampler: GenerationSampler
    """Stages 1 to 3: draws, schedules and samples the groups of a generation."""
    prompt_reader: PromptReader
    """Tokenizes prompts and processes their images."""
    batch_builder: BatchBuilder
    """Stage 5: makes complete groups into a batch."""
    generation_logps: GenerationLogps
    """Old and reference log-probabilities of a generation, and how far the engine's are off."""
    reward_functions: RewardFunctions
    """Stage 6: calls the reward functions on this rank's rollouts."""
    scorer: Scorer
    """Gathers rewards and other facts of all ranks' rollouts."""
    first_answers: FirstAnswers
    """Warns where not one of a run's first rollouts is right."""
    advantage_computer: AdvantageComputer
    """Computes the advantages of all ranks' groups by the methods of the run."""
    refill: Refill
    """Stage 7: replaces groups without signal."""
    extensions: list[Extension]
    """Methods of the user's that reach into the step (`adora_extensions`)."""
    recorder: Recorder
    """Records rollouts."""
    metrics_logger: MetricsLogger
    """Logs and records what is scored and learned."""
    micro_batcher: MicroBatcher
    """Stage 9: divides a generation into micro-batches, and weighs the loss of each."""
    policy_pass: PolicyPass
    """The policy's forward pass, with shared prompts."""
    recomputed_layers: RecomputedLayers
    """Decides how many layers the backward pass computes again."""
    ratio_guard: RatioGuard
    """Skips a step whose ratio of new to old policy explodes."""
    entropy_bonus: EntropyBonus
    """What TRL's entropy bonus lacks."""
    skip_bad_steps: SkipBadSteps
    """Skips a step whose gradients are not finite."""
    checkpoint_writer: CheckpointWriter
    """Writes checkpoints that are complete or absent."""
    checkpoint_state: CheckpointState
    """What a checkpoint has beside TRL's own state."""
    engine_pair: EnginePair
    """Engine and policy, for checks that compare them, and for evaluations."""


def build_parts(
    trainer: GRPOTrainer,
    run: ResolvedRun,
    context: StepContext,
    *,
    clocks: StepClocks,
    models: list[PreTrainedModel],
) -> StepParts:
    """Make the objects that a training step consists of, once TRL has loaded the models.

    Args:
        trainer: TRL's part of the trainer, of which each object gets what it needs.
        run: the checked run.
        context: accelerator, config, log and state, which every part of a training step gets.
        clocks: what measures the phases of a step.
        models: the policy, and the reference model where there is one.
    """
    config = context.config
    accelerator = context.accelerator
    device = accelerator.device
    toolbox = run.prompts.toolbox
    has_tools = toolbox is not None
    images = DistinctImages(
        models=models,
        processor=trainer.processing_class,
        device=device,
        config=config,
        dataset=trainer.train_dataset,
        tools_show_images=has_tools,
    )
    pipeline = build_pipeline(config)
    advantage_computer = AdvantageComputer(
        context, pipeline=pipeline, reward_weights_F=trainer.reward_weights, tools=has_tools
    )
    recomputed = RecomputedLayers(
        context,
        model=trainer.model,
        shape=lambda: run.shape,
        sharding=run.context.sharding,
        read_card=partial(card_bytes, device) if device.type == "cuda" else None,
    )
    policy_pass = PolicyPass(
        accelerator,
        config,
        may_have_images=images.may_be_shown,
        checkpointing_context=recomputed.switched,
    )
    micro_batcher = _micro_batcher(trainer, run, context, images=images, policy_pass=policy_pass)
    extensions = [*run.extensions.values()]
    for extension in extensions:
        extension.start(context, images)
    recorder = _recorder(trainer, context, toolbox)
    logps = _generation_logps(trainer, context, policy_pass=policy_pass, recorder=recorder)
    pool = Pool(context, trainer.train_dataset, has_tools=has_tools)
    sampler = _sampler(trainer, context, images)
    stop_criteria = StopCriteria.from_config(
        {*trainer.eos_token_ids, context.pad_id}, config.generation_kwargs or {}, _decode(trainer)
    )
    batch_builder = BatchBuilder(
        context=context,
        images=images,
        processor=trainer.processing_class,
        stop_criteria=stop_criteria,
        to_device=_to_device(trainer),
        has_engine_logps=sampler.returns_logps,
        pad_to_multiple_of=trainer.pad_to_multiple_of,
        has_tools=has_tools,
        allows_stale_rollouts=pool.allows_stale_rollouts,
        shows_other_images=any(extension.changes_images for extension in extensions),
    )
    engine_pair = _engine_pair(
        trainer, context, images=images, sampler=sampler, collate=batch_builder.collated
    )
    upcoming_rows = UpcomingRows()
    prompt_reader = PromptReader(images)
    server_context = _server_context(trainer, context)
    group_sampler = GroupSampler(
        context,
        prompt_reader=prompt_reader,
        sampler=sampler,
        stop_criteria=stop_criteria,
        extensions=extensions,
        tool_loop=_tool_loop(
            trainer,
            context,
            toolbox=toolbox,
            images=images,
            context_length=server_context or config.vllm_max_model_length,
        ),
        server_context=server_context,
    )
    generation_sampler = GenerationSampler(
        context,
        pool=pool,
        group_sampler=group_sampler,
        guard=GenerationGuard(context, control_tokens(trainer.processing_class)),
        phase=clocks.seconds.phase,
        environments=run.tools.environments,
        upcoming_rows=upcoming_rows.rows_after,
        drift_check=LateDriftCheck(engine_pair, logps.drift_guard),
    )
    reward_guard = RewardGuard(context)
    ratio_guard = RatioGuard(context)
    return StepParts(
        context=context,
        clocks=clocks,
        images=images,
        upcoming_rows=upcoming_rows,
        pool=pool,
        sampler=sampler,
        generation_sampler=generation_sampler,
        prompt_reader=prompt_reader,
        batch_builder=batch_builder,
        generation_logps=logps,
        reward_functions=_reward_functions(trainer, reward_guard),
        scorer=Scorer(
            context,
            guard=reward_guard,
            weights_F=trainer.reward_weights,
            names=trainer.reward_func_names,
        ),
        first_answers=FirstAnswers(),
        advantage_computer=advantage_computer,
        refill=Refill(
            context=context,
            pool=pool,
            generation_sampler=generation_sampler,
            advantage_computer=advantage_computer,
        ),
        extensions=extensions,
        recorder=recorder,
        metrics_logger=_metrics_logger(
            trainer, context, recorder=recorder, advantage_computer=advantage_computer
        ),
        micro_batcher=micro_batcher,
        policy_pass=policy_pass,
        recomputed_layers=recomputed,
        ratio_guard=ratio_guard,
        entropy_bonus=EntropyBonus(config, micro_batcher),
        skip_bad_steps=_skip_bad_steps(trainer, context, ratio_guard),
        checkpoint_writer=CheckpointWriter(
            Path(config.output_dir), config.save_total_limit, accelerator
        ),
        checkpoint_state=CheckpointState(
            pipeline=pipeline,
            pool=pool,
            unfinished_generation=UnfinishedGeneration(context, images.banks),
            moving_reference=_moving_reference(trainer, context),
            loss_sums=LossSums(trainer),
            metrics=trainer._metrics["train"],
            table=trainer._logs,
            function_names=trainer.reward_func_names,
        ),
        engine_pair=engine_pair,
    )


def callbacks_of_run(
    parts: StepParts,
    run: ResolvedRun,
    *,
    models_by_role: Mapping[str, Any],
    end_tokens: Iterable[int],
    log_evaluation: Callable[[dict[str, float]], None],
) -> list[TrainerCallback]:
    """Return this package's callbacks, in the order in which Transformers calls them at a step.

    Args:
        parts: the objects of the training step, some of which are callbacks.
        run: the checked run.
        models_by_role: the policy and its reference.
        end_tokens: the tokens that end an answer.
        log_evaluation: logs the figures of an evaluation by their names.
    """
    callbacks: list[TrainerCallback] = [
        parts.checkpoint_state.loss_sums,
        ScaledRate(lambda: parts.advantage_computer.pipeline.learning_rate_factor),
        parts.clocks.seconds,
        parts.recorder,
        progress.ProgressLine(),
        metrics.MetricsFile(),
        parts.skip_bad_steps,
        RefuseWrongBuffers(models_by_role),
    ]
    if parts.clocks.memory is not None:
        callbacks.append(parts.clocks.memory)
    if run.config.adora_self_check:
        callbacks.append(SelfCheck(parts.engine_pair))
    if run.evaluations is not None:
        callbacks.append(
            EvaluateOnTheWay(
                pair=parts.engine_pair,
                generation_sampler=parts.generation_sampler,
                plan=run.evaluations,
                end_tokens=end_tokens,
                log_evaluation=log_evaluation,
                timed_evaluation=parts.clocks.seconds.evaluation,
                system_prompt=run.system_prompt,
                revision=run.model.revision,
            )
        )
    return callbacks


def _decode(trainer: GRPOTrainer) -> Callable[[Sequence[int]], str]:
    """Return what makes token ids a text, without special tokens."""
    return partial(trainer._tokenizer.decode, skip_special_tokens=True)


def _to_device(trainer: GRPOTrainer) -> Callable[[Any], Any]:
    """Return Transformers' own method that moves a batch to the device: TRL overrides it."""
    to_device: Callable[[Any], Any] = super(GRPOTrainer, trainer)._prepare_inputs
    return to_device


def _micro_batcher(
    trainer: GRPOTrainer,
    run: ResolvedRun,
    context: StepContext,
    *,
    images: DistinctImages,
    policy_pass: PolicyPass,
) -> MicroBatcher:
    """Return what cuts a generation into micro-batches."""
    config = context.config
    # With a KL term, an entropy bonus or an auxiliary loss of experts a row adds to the loss even
    # if its advantage is 0.
    has_kl_term = config.beta != 0.0
    every_row_counts = bool(
        has_kl_term or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled
    )
    attention = configured_attention(trainer.model.config)
    micro_batch_room = MicroBatchRoom(
        activation_memory=lambda: activation_memory_of(
            config,
            shape=run.shape,
            sharding=run.context.sharding,
            on_gpu=context.accelerator.device.type == "cuda",
        ),
        longest_completion=config.max_completion_length,
        shares_prompts=lambda: policy_pass.shares_prompts and not trainer.aux_loss_enabled,
        masks_padding=not is_flash_attention_requested(
            requested_attention_implementation=attention
        ),
    )
    return MicroBatcher(
        context,
        images.banks,
        every_row_counts=every_row_counts,
        micro_batch_room=micro_batch_room,
    )


def _recorder(trainer: GRPOTrainer, context: StepContext, toolbox: Toolbox | None) -> Recorder:
    """Return what records rollouts, with the texts of all turns in a run with tools."""
    if toolbox is None:
        return Recorder(context)
    return Recorder(context, decode=_decode(trainer), view=toolbox.view)


def _generation_logps(
    trainer: GRPOTrainer, context: StepContext, *, policy_pass: PolicyPass, recorder: Recorder
) -> GenerationLogps:
    """Return what computes the old log-probabilities of a generation, and those of the reference."""
    rounding = rounding_bound(computing_dtype(context.accelerator, trainer.model))
    return GenerationLogps(
        context=context,
        policy=trainer.model,
        reference=trainer.ref_model,
        # Looked up at each call: benchmarks wrap it.
        model_pass=lambda *args, **kwargs: trainer._get_per_token_logps_and_entropies(
            *args, **kwargs
        ),
        policy_pass=policy_pass,
        old_logps=OldLogps(context, has_dropout=has_dropout(trainer.model)),
        importance_ratio=ImportanceRatio(context),
        drift_guard=DriftGuard(context),
        reference_guard=ReferenceGuard(context, rounding),
        record_drift=recorder.add_measured_drift,
        metrics_by_mode=trainer._metrics,
    )


def _sampler(trainer: GRPOTrainer, context: StepContext, images: DistinctImages) -> Sampler:
    """Return the sampler of the rollouts: Transformers, vLLM, or servers that sample ahead."""
    if trainer.use_vllm:
        samples_ahead = context.config.adora_rollouts.ahead
        sampler_class = AsyncServerSampler if samples_ahead else VLLMSampler
        return sampler_class(context, images, trainer.vllm_generation)
    never_sample(
        never_sampled_ids(trainer._tokenizer), trainer.generation_kwargs, trainer.generation_config
    )

    def sample_turn(prompts: PromptBatch) -> list[list[int]]:
        """Sample one turn from the policy itself: token ids, (B,).

        TRL takes settings from the model's folder where no key of the run sets them, and samples
        with dropout. Log-probabilities are computed without dropout, and would not be those of the
        samples.
        """
        with ignoring_generation_config(trainer.model), evaluation_mode(trainer.model):
            completion_ids, *_ = trainer._generate_single_turn(
                prompts.ids, prompts.images, prompts.fields, num_generations=1
            )
        return cast("list[list[int]]", completion_ids)

    return TransformersSampler(sample_turn)


def _engine_pair(
    trainer: GRPOTrainer,
    context: StepContext,
    *,
    images: DistinctImages,
    sampler: Sampler,
    collate: Collate,
) -> EnginePair:
    """Return the engine and the policy as a pair, for checks that compare them, and evaluations."""
    return EnginePair(
        context=context,
        policy=trainer.model,
        dataset=trainer.train_dataset,
        images=images,
        processor=trainer.processing_class,
        tokenizer=trainer._tokenizer,
        sampler=sampler,
        engine=trainer.vllm_generation if trainer.use_vllm else None,
        collate=collate,
    )


def _server_context(trainer: GRPOTrainer, context: StepContext) -> int | None:
    """Return how many tokens of a prompt with its completion the run's servers take.

    None without servers, and where they do not say it. Collective: the first rank asks them.
    """
    config = context.config
    if not config.uses_servers:
        return None
    served: int | None = trainer.vllm_generation.server_group.on_first_rank(
        lambda _: served_length(config)
    )
    return served


def _tool_loop(
    trainer: GRPOTrainer,
    context: StepContext,
    *,
    toolbox: Toolbox | None,
    images: DistinctImages,
    context_length: int | None,
) -> ToolLoop | None:
    """Return what runs the tools that the policy calls; None in a run without tools.

    `context_length`: how many tokens of a prompt with its completion the engine takes; None: any
    number.
    """
    if toolbox is None:
        return None
    config = context.config
    return ToolLoop(
        tools=toolbox,
        processor=trainer.processing_class,
        template=config.chat_template_kwargs or {},
        tokens_of=images.tokens_of,
        max_answers=config.max_tool_calling_iterations,
        decode=_decode(trainer),
        turn_tokens=config.adora_tool_options.turn_tokens,
        context_length=context_length,
    )


def _reward_functions(trainer: GRPOTrainer, guard: RewardGuard) -> RewardFunctions:
    """Return what calls the run's reward functions; the guard notes their failures."""
    return RewardFunctions(
        functions=guard.wrap_functions(trainer.reward_funcs, trainer.reward_func_names),
        tokenizers=trainer.reward_processing_classes,
        template_kwargs=trainer.chat_template_kwargs,
        to_device=_to_device(trainer),
        event_loop=lambda: trainer.async_loop,
    )


def _metrics_logger(
    trainer: GRPOTrainer,
    context: StepContext,
    *,
    recorder: Recorder,
    advantage_computer: AdvantageComputer,
) -> MetricsLogger:
    """Return what logs the metrics of a generation, and records its rollouts."""
    options = advantage_computer.pipeline.adora_options
    return MetricsLogger(
        context=context,
        recorder=recorder,
        metrics_by_mode=trainer._metrics,
        table=trainer._logs,
        function_names=trainer.reward_func_names,
        tie_notice=TieNotice(options, speaks=context.accelerator.is_main_process),
        assess=advantage_computer.assess,
        synced_bytes=(lambda: trainer.vllm_generation.bytes_sent) if trainer.use_vllm else None,
    )


def _skip_bad_steps(
    trainer: GRPOTrainer, context: StepContext, ratio_guard: RatioGuard
) -> SkipBadSteps:
    """Return what skips optimizer steps whose gradients are not finite."""
    # A function, since DeepSpeed's engine exists only when the training begins.
    deepspeed_engine = (lambda: trainer.model_wrapped) if trainer.is_deepspeed_enabled else None
    return SkipBadSteps(context, ratio_guard, deepspeed_engine)


def _moving_reference(trainer: GRPOTrainer, context: StepContext) -> MovingReference:
    """Return what saves and loads the reference model, where TRL moves it."""
    reference = None
    if trainer.ref_model is not None:
        reference = context.accelerator.unwrap_model(trainer.ref_model)
    return MovingReference(
        reference,
        moves=context.config.sync_ref_model,
        is_main=context.accelerator.is_main_process,
        gather=trainer._dist.gather_params,
    )
