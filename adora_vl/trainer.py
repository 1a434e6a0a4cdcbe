"""One training step, from top to bottom: TRL's `GRPOTrainer` with ADORA's weights and rollouts that can be trusted.

    1. a generation   sample, grade, weigh, record; then resample, rebalance, cut into micro-batches
    2. a micro-batch  the policy's pass, its ratio to the engine, the loss
    3. a checkpoint   written beside its place, sealed, renamed

Each concern is an object that `_build_collaborators` makes, named after what it does; this file has their order. Where
stock TRL is overridden, the docstring says what it does and why that is not enough.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import get_config_model_id

from adora_vl import build, compat
from adora_vl.batch import Batch, Row
from adora_vl.batching.unfinished import UnfinishedGeneration
from adora_vl.checkpoint.sampler import EpochRepeatSampler
from adora_vl.checkpoint.store import facts_of
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.advantage import method_run
from adora_vl.config.speed import regroup_obstacle, regroups
from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.log_probabilities import LogProbabilities, evaluating
from adora_vl.guards import DriftGuard, RatioGuard, RewardGuard, RowGuard
from adora_vl.models.components import freeze
from adora_vl.models.load import limit_pixels, load_processor, restore_weights, restores_by_name
from adora_vl.models.precision import restore_buffers
from adora_vl.report.card import CardWriter
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.distinct_rows import DistinctRows
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.importance import has_dropout
from adora_vl.rollout.prefetch import NoPrefetch
from adora_vl.rollout.tokens import mismatch_named, never_sample, never_sampled_ids
from adora_vl.rollout_log import completions_table
from adora_vl.rollout_log.figures import weighed_figures
from adora_vl.rollout_log.phases import PhaseClock
from adora_vl.rollout_log.texts import gather_texts
from adora_vl.weighing import Scores


class AdoraGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """As `trl.GRPOTrainer`; `args` is an `AdoraGRPOConfig`."""

    reward_funcs: list[Any]

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: AdoraGRPOConfig | None = None, processing_class: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Stock TRL builds its own generation class; ours takes that place, with the same arguments.

        Raises `UserError` where a part to freeze has no parameters, or the CPU engine cannot sync this model.
        """
        args = args if args is not None else AdoraGRPOConfig()
        self.run_facts: dict[str, Any] = {}  # into the manifest of every checkpoint
        self.card = CardWriter()  # the README.md of every saved model
        self.clock = PhaseClock()
        revision = dict(args.model_init_kwargs or {}).get("revision")
        if processing_class is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            processing_class = load_processor(name, revision=revision)
        limit_pixels(processing_class, args.min_pixels, args.max_pixels)
        engine = partial(
            AdoraVLLMGeneration,
            settings=build.engine_settings(args, revision),
            timed_sync=partial(self.clock.phase, "sync"),
        )
        with compat.GENERATION_CLASS.replaced_by(engine, on=grpo_trainer):
            super().__init__(
                model=model, reward_funcs=reward_funcs, args=args, processing_class=processing_class, **kwargs
            )
        models = [one for one in (self.model, self.ref_model) if one is not None]
        for one in models:
            restore_buffers(one)
        freeze(self.model, args.frozen_components)
        self._build_collaborators(args, models)

    def _build_collaborators(self, args: AdoraGRPOConfig, models: list[Any]) -> None:
        """The objects that a step is made of; each gets the accelerator, settings and callables, never the trainer."""
        accelerator, log, pad_id = self.accelerator, self.log_figure, self._tokenizer.pad_token_id
        self.shape = build.batch_shape(args, self.num_iterations)
        self.images = DistinctImages(models, self.processing_class, accelerator.device, args, self.train_dataset)
        self.methods = method_run(args)
        self.weigher = build.weigher(args, accelerator, self.methods, self.reward_weights)
        self.checkpoints = CheckpointWriter(Path(args.output_dir), args.save_total_limit, accelerator)
        self.row_guard = RowGuard(self.save_here)
        self.reward_guard = RewardGuard(args.adora_reward_timeout, self.save_here, self._metrics["train"])
        self.reward_funcs = self.reward_guard.around(self.reward_funcs, self.reward_func_names)
        self.drift_guard = DriftGuard(accelerator, args.adora_max_drift, self.save_here, log)
        self.ratio_guard = RatioGuard(accelerator, args.adora_max_ratio, args.importance_sampling_level, log)
        self.resample = build.dynamic_sampling(args, accelerator, log, pad_id)
        counts_all = bool(self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled)
        self.prefetch = NoPrefetch()  # until there is a loader
        self.replay = build.sample_replay(args, accelerator, log, self.images, pad_id)
        self.batcher = build.batcher(args, accelerator, log, self.shape, self.images.banks, pad_id, counts_all)
        self.unfinished = UnfinishedGeneration(accelerator, self.images.banks, self.shape)
        self.log_probabilities = LogProbabilities(accelerator, args, images=self.images.shown)
        self.ratio = build.importance_ratio(args, accelerator, log)
        self.noise = build.noisy_rollouts(args, accelerator, log, lambda: self.state)
        self.visual = build.visual_dependency(args, accelerator, self.images, log, dropout=has_dropout(self.model))
        self.recorder = build.recorder(args, accelerator, self.shape)
        self._buffered_inputs: list[Batch] | None = None  # the micro-batches of the present generation, as TRL has it
        self._ready: Batch | None = None  # the micro-batch that `training_step` has prepared
        self._scores: Scores | None = None  # of the generation that is being collected
        self.log_multimodal = build.logs_images(args)
        if not self.use_vllm:
            never_sample(never_sampled_ids(self._tokenizer), self.generation_kwargs, self.generation_config)
        for noisy in (ProgressCallback, PrinterCallback):
            self.remove_callback(noisy)
        for callback in build.callbacks(self.clock, self.recorder, self.batcher, log, self.methods):
            self.add_callback(callback)

    # ------------------------------------------------------------------------------------------- 1. a generation

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Stock TRL shuffles the rows of a generation and divides them into micro-batches, padded to the longest row of
        the generation. Ours keeps groups together, leaves out those without signal, and removes padding.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        if not self.model.training or not regroups(self.args) or regroup_obstacle(self.args):
            return super()._prepare_inputs(generation_batch)
        if self._step % self.shape.cycle == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            batch = self.resample(batch, self._collect, DistinctRows(self.train_dataset), self._place)
            batch = self.replay(batch, self._policy_pass, self.state.global_step, f"{self.args.seed}/{self._place}")
            self._buffered_inputs = self.batcher.split(batch)
        return self._buffered_inputs[self._step % self.shape.steps]

    def _generate_and_score_completions(self, inputs: list[Row]) -> Any:
        """Stock TRL processes the image of every copy of a row twice, makes a pass for the old log-probabilities
        whenever vLLM samples, and returns group-normalised advantages. Ours processes each image once, makes that pass
        only if it is needed, and weighs the groups.
        """
        return self._collect(inputs)

    def _collect(self, rows: list[Row], attempt: int = 0) -> Batch:
        """Sample, grade and weigh the rollouts of these rows, and record them. `attempt`: which further batch of this
        generation it is, 0 for the first.
        """
        training, mode = self.model.training, "train" if self.model.training else "eval"
        self.prefetch.finish()
        self.row_guard.check(rows, self.state.global_step)
        if not attempt:
            self.reward_guard.begin()
        processor = self.images.generation(rows, mode, further=attempt > 0, processor=self.processing_class)
        with (
            processor as taken,
            compat.PROCESSOR.replaced_by(taken, on=self),
            self._old_pass(needed=not training or self.replay.capacity > 0),
        ):
            batch = self.images.completed(self._sample_and_grade(rows, mode, attempt))
        assert self._scores is not None
        generations = self.num_generations if training else self.num_generations_eval
        if training:
            self.drift_guard.check_batch(batch, self.state.global_step)
        weighed = self.weigher(self._scores, batch, generations, self.state.global_step, training=training)
        for name, value in weighed_figures(weighed, self._scores).items():
            self._metrics[mode][name].append(value)
        completions_table.add_weighed(self._logs, weighed, texts=build.logs_tables(self.args))
        if training:
            first = self.accelerator.process_index * len(rows)
            batch["advantages"] = weighed.advantages_PG.flatten()[first : first + len(rows)]
            with self.clock.phase("policy"):
                live_B = weighed.live_B[first : first + len(rows)]
                self.visual.weigh(batch, live_B, self._policy_pass, f"{self.args.seed}/{self._place}/{attempt}")
            batch["rollout_number"] = self.recorder.number(len(rows))
            with self.clock.phase("other"):
                self.recorder.add(
                    rows, batch, self._scores, weighed, self._logs, self.reward_func_names, self.state.global_step
                )
            self.prefetch.start()
        return batch

    def _sample_and_grade(self, rows: list[Row], mode: str, attempt: int) -> Batch:
        """TRL's part of a generation: weights into the engine, prompts, rollouts, rewards, advantages."""
        if self.use_vllm:
            where = f"{mode}/{self._place}{f'/{attempt}' if attempt else ''}"  # a resumed run arrives at it too
            position = (self.args.seed, where) if self.args.adora_seeded_rollouts else None
            noise = self.noise.now(f"{self.args.seed}/{where}") if mode == "train" else None
            self.vllm_generation.prepare(position, self.images.cache, self.args.adora_group_requests, noise)
        with compat.PROMPT_GATHERING.replaced_by(gather_texts, on=grpo_trainer), mismatch_named(rows):
            batch = cast("Batch", super()._generate_and_score_completions(rows))
        if mode == "train" and self.use_vllm:
            self.log_figure("adora/sync_mb", self.vllm_generation.bytes_sent / 2**20)
            self.noise.mark(batch, self.vllm_generation.distorted)
        return batch

    def _generate(self, prompts: list[Any]) -> Any:
        """Stock TRL processes images, samples and decodes here, timed for wandb alone; ours times it for the log."""
        with self.clock.phase("rollout"):
            return super()._generate(prompts)

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Stock TRL returns the rewards gathered from all ranks, (B, functions), and if a function raises, only that
        rank stops. Ours also keeps rewards and lengths, times the functions, and stops all ranks.
        """
        with self.clock.phase("grading"):
            rewards_BF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.reward_guard.check(self.state.global_step)
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        texts = [completion_text(completion) for completion in completions]
        self._scores = Scores.gathered(rewards_BF, completion_ids_list, texts, ends, self.accelerator)
        return rewards_BF

    @property
    def _place(self) -> str:
        """Where the run stands: the optimizer step and the micro-batch in it."""
        return f"{self.state.global_step}/{self._step % self.args.gradient_accumulation_steps}"

    # ------------------------------------------------------------------------------------------ 2. a micro-batch

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Stock TRL runs every micro-batch forward and backward; ours skips those that are empty, which they are on all
        ranks alike.
        """
        started = time.perf_counter()
        model.train()
        self._ready = self._prepare_inputs(inputs)
        self._current_train_step_time += time.perf_counter() - started
        if self._ready:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        self._ready = None
        self._step += 1
        return torch.zeros((), device=self.args.device)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Stock TRL takes the ratio to the engine from an earlier pass, averages the loss over the rows of a
        micro-batch, however many there are, and clips the ratio of new to old policy on one side only. Ours computes
        the ratio to the engine in the policy's own pass, weighs a micro-batch by its rows, and skips a step in which
        the ratio of new to old policy explodes.
        """
        micro = self.visual.applied(cast("Batch", {**inputs}))
        logps: list[Tensor] = []
        corrects_ratio = self.use_vllm and self.vllm_importance_sampling_correction

        def seen(logps_BC: Tensor) -> None:
            logps.append(logps_BC)
            if corrects_ratio and self.ratio.is_due(micro):
                self.drift_guard.check_batch(micro, self.state.global_step, logps_BC)
                self.recorder.measured(micro, logps_BC)
                self.ratio.complete(micro, logps_BC)

        with self.log_probabilities.watched(seen):
            loss = super()._compute_loss(model, micro)
        if model.training:
            loss = self.ratio_guard.loss(loss, logps[0] if logps else None, micro)
            if self.ratio_guard.exploded is not None:
                self.replay.forget()
        return self.batcher.scaled(loss, micro)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Stock TRL computes the prompt again with every rollout, and pads rows to one length. Ours computes it once
        per group and without padding where that is less work and the model's attention allows it.
        """
        return self.log_probabilities(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def _policy_pass(self, *args: Any, **kwargs: Any) -> Any:
        """A pass of the policy as it answers, without dropout."""
        with evaluating(self.model):
            return self._get_per_token_logps_and_entropies(self.model, *args, **kwargs)

    def _old_pass(self, *, needed: bool) -> AbstractContextManager[None]:
        """Inside, TRL makes no pass for the old log-probabilities if they equal those of the policy's own pass."""
        on_policy = self.shape.has_one_step and not has_dropout(self.model)
        if needed or not self.args.adora_skip_old_pass or not on_policy:
            return nullcontext()
        return compat.OLD_PASS.replaced_by(False, on=self)

    # ------------------------------------------------------------------------------------------ 3. a checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Stock TRL writes into `checkpoint-N` itself and deletes older ones on the way, so a crash can leave an
        incomplete checkpoint, or none. Ours lets it write into another folder, seals the result, renames it, and then
        deletes older ones.
        """
        stock = super()._save_checkpoint

        def save(folder: Path) -> dict[str, Any]:
            stock(model, trial)
            table = completions_table.to_json(self._logs)
            self.replay.save(folder)
            return {**self._facts(), **self.unfinished.save(folder, self._step, self._buffered_inputs, table)}

        self.checkpoints.write(self.state.global_step, save)

    def _get_output_dir(self, trial: Any) -> str:
        """Stock TRL returns `output_dir`; ours returns the checkpoint's staging folder while one is being written."""
        staging = self.checkpoints.staging
        return str(staging) if staging is not None else str(super()._get_output_dir(trial))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Stock TRL leaves this to Transformers 5.17, which loads weights by their names in the file. Qwen2.5-VL's
        modules have other names, so a resumed run would only print a warning and start from the untrained weights.
        """
        model = self.model if model is None else model
        if self._dist.is_fsdp or restores_by_name(model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            restore_weights(model, Path(resume_from_checkpoint))

    def begin_at(self, checkpoint: str) -> None:
        """Restore what a checkpoint holds besides weights and optimizer, which `train` restores: what the methods
        remember, the rollouts that are still to be learned from, and the figures since the last log.
        """
        facts = facts_of(Path(checkpoint))
        self.checkpoints.began_at = checkpoint
        self.methods.load(facts.get("methods", {}))
        self.replay.load(Path(checkpoint))
        unfinished = self.unfinished.load(Path(checkpoint))
        if unfinished is not None:
            self._step, self._buffered_inputs, table = unfinished
            completions_table.from_json(table, self._logs)
        for name, values in facts.get("metrics", {}).items():
            self._metrics["train"][name] = list(values)

    def save_here(self) -> Path:
        """The checkpoint of the present step, written unless it is there already. All ranks call this together."""
        return self.checkpoints.at(self.state.global_step, lambda: self._save_checkpoint(self.model, None))

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says, for a run that goes on from it."""
        return {**self.run_facts, "methods": self.methods.state(), "metrics": self._metrics["train"]}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Stock TRL saves weights and processor; ours also writes the model card, in checkpoints too."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self.card.write(Path(output_dir or self.args.output_dir), self.state)

    def create_model_card(self, model_name: Any = None, dataset_name: Any = None, tags: Any = None) -> None:
        """Stock TRL writes a card of its own into output_dir at every save, which would replace ours."""
        if self.card.text is None:
            super().create_model_card(model_name, dataset_name, tags)

    # -------------------------------------------------------------------------------- data, log, and the engine's end

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """Stock TRL reads and decodes every copy of a row; ours reads each row of a training batch once, if possible
        while the policy learns from the batch before.
        """
        if not is_training or not self.args.adora_cache_images or not hasattr(dataset, "__len__"):
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        rows = DistinctRows(dataset)
        loader = super()._get_dataloader(rows, description, batch_size, sampler_fn, is_training, dataloader_key)
        self.prefetch = build.prefetch(self.args, self.images, rows, self._row_order, dataset)
        return loader

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Stock TRL's sampler draws one epoch's order after the other; ours draws each from the epoch's number."""
        self._row_order = EpochRepeatSampler.like(super()._get_train_sampler(dataset))
        return self._row_order

    def log_figure(self, name: str, value: float) -> None:
        """Add a value of this step to the next log, which averages them. It is the same on every rank."""
        self._metrics["train"][name].append(value)

    def close(self) -> None:
        """Shut a colocated engine down while its process groups still exist. Nothing can be sampled after this."""
        self.prefetch.finish()
        if self.use_vllm and self.vllm_mode == "colocate":
            self.vllm_generation.llm.llm_engine.engine_core.shutdown()
