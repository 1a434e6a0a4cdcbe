"""TRL's trainer with a step that does nothing twice. Overrides only; the work is in this package's other files."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.options.speed import regroup_obstacle
from adora_vl.passes import unfinished
from adora_vl.passes.bank import Banks
from adora_vl.passes.batches import (
    MEAN_OVER_ROWS,
    by_length,
    chosen_units,
    live_units,
    planned,
    take_rows,
    unit_size,
    without_padding,
)
from adora_vl.passes.importance import has_dropout, importance_ratio, ratio_figures
from adora_vl.passes.numbers import RolloutNumbers
from adora_vl.passes.packed import PackedPass, Result
from adora_vl.passes.processor import StepProcessor
from adora_vl.passes.refill import exchanges, further_rows, refilled
from adora_vl.passes.spread import Carrier, movable, moves, spread
from adora_vl.passes.vision import SharedVision
from adora_vl.record.trainer import RecordedGRPOTrainer
from adora_vl.replaced import replaced
from adora_vl.rollout.drift import rollout_drift
from adora_vl.rollout.image_cache import ImageCache, can_cache
from adora_vl.rollout.rows import DistinctRows


class OnceGRPOTrainer(RecordedGRPOTrainer):
    """As `trl.GRPOTrainer`; each image, prompt and pass is worked on once. The keys are in `options/speed.py`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing but the arguments of `trl.GRPOTrainer`."""
        super().__init__(*args, **kwargs)
        self._buffered_inputs: list[dict[str, Any]] | None
        self.image_cache: ImageCache | None = None
        self.banks = Banks()
        self.vision = SharedVision(self.banks)
        self.packed_pass = PackedPass()
        self.flat_pass = PackedPass(by_group=False)
        self.rollouts = RolloutNumbers(self.accelerator.process_index, self.accelerator.num_processes)
        self._carrier = Carrier()
        self._prepared: dict[str, Any] | None = None  # the micro-batch that is about to be run
        self._moved = False  # whether rollouts of this step are learned from on another rank than their own
        self._attempt = 0  # which further batch of this generation is being sampled
        self._unfinished: dict[str, Any] | None = None  # a micro-batch whose importance ratio is still to be formed
        takes_references = self.vision.install(self.model)
        if self.ref_model is not None:
            takes_references = self.vision.install(self.ref_model) and takes_references
        if takes_references and can_cache(getattr(self.processing_class, "image_processor", None)):
            self.image_cache = ImageCache(self.args.adora_image_cache_mb * 2**20)

    @property
    def _is_on_policy(self) -> bool:
        """Whether the policy of the old log-probabilities is the one that is differentiated, at every micro-batch."""
        cycle = self.args.steps_per_generation * self.num_iterations
        return self.args.gradient_accumulation_steps % cycle == 0 and not has_dropout(self.model)

    def get_train_dataloader(self) -> Any:
        """Stock TRL reads and decodes every copy of a row; ours reads a row of a batch once."""
        if not self.args.adora_cache_images or not hasattr(self.train_dataset, "__len__"):
            return super().get_train_dataloader()
        with replaced(self, "train_dataset", DistinctRows(self.train_dataset)):
            return super().get_train_dataloader()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Stock TRL processes the image of every copy twice, and beside vLLM always makes a pass for the old
        log-probabilities.
        """
        training = self.model.training
        self.vision.share = self.args.adora_share_vision
        self.vision.batch_windows(self.args.adora_batch_windows)
        with ExitStack() as stack:
            cache = self.image_cache if self.args.adora_cache_images else None
            bank = self.banks.more() if self._attempt else None
            if bank is None:
                bank = self.banks.new("train" if training else "eval")
            if cache is not None and any(row.get("images") for row in inputs):
                processor = StepProcessor(self.processing_class, cache, bank, self.accelerator.device)
                stack.enter_context(replaced(self, "processing_class", processor))
            if self.use_vllm:
                self.vllm_generation.image_cache = cache
                self.vllm_generation.group_requests = self.args.adora_group_requests
            if training and self.args.adora_skip_old_pass and self._is_on_policy:
                stack.enter_context(replaced(self, "vllm_importance_sampling_correction", False))
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if training:
            output["rollout_number"] = self.rollouts.numbers(len(inputs), self.accelerator.device)
        if training and self.use_vllm:
            self._metrics["train"]["adora/sync_mb"].append(self.vllm_generation.bytes_sent / 2**20)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Stock TRL shuffles the rows of a generation and cuts them into micro-batches, padded to the generation's
        longest; ours keeps groups together, leaves out those without signal, and cuts padding off.
        """
        if self._prepared is not None:
            ready, self._prepared = self._prepared, None
            return ready
        wanted = self.args.adora_share_vision or self.args.adora_share_prompt or self.args.adora_skip_zero_signal
        wanted = wanted or self.args.adora_less_padding or self.args.adora_dynamic_sampling > 0
        if not self.model.training or not wanted or regroup_obstacle(self.args):
            prepared: dict[str, Any] = super()._prepare_inputs(generation_batch)
            return prepared
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            if self.args.adora_dynamic_sampling:
                batch = self._refill(batch)
            self._buffered_inputs = self._micro_batches(batch)
        buffered: dict[str, Any] = self._buffered_inputs[self._step % steps]
        return buffered

    def save_unfinished(self, folder: Path) -> dict[str, Any]:
        """Stock TRL's checkpoints have neither the rollouts that are left to learn from nor where the run stands in
        them, so one that goes on within a generation samples anew, out of phase.
        """
        return unfinished.save(folder, self)

    def begin_at(self, checkpoint: str) -> None:
        """Also the rollouts that are left to learn from."""
        super().begin_at(checkpoint)
        unfinished.go_on(Path(checkpoint), self)

    def _refill(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Replace groups without signal by groups of further problems, on every rank as often as any rank needs."""
        size, device, steps = self.num_generations, self.accelerator.device, self.args.gradient_accumulation_steps
        count = len(batch["prompt_ids"]) // size
        live, replaced_groups = live_units(batch["advantages"], size), 0
        rows = DistinctRows(self.train_dataset)
        for attempt in range(1, self.args.adora_dynamic_sampling + 1):
            dead = self.accelerator.gather(torch.tensor([live.count(False)], device=device))
            if not dead.any():
                break
            step, rank = f"{self.state.global_step}/{self._step % steps}", self.accelerator.process_index
            drawn = further_rows(len(rows), count, f"{self.args.seed}/{step}/{attempt}/{rank}")
            self._attempt = attempt
            try:
                further = self._generate_and_score_completions(
                    rows.__getitems__([row for row in drawn for _ in range(size)])
                )
            finally:
                self._attempt = 0
            self._metrics["train"]["adora/further_batches"].append(1.0)
            if not all(gather_object([further.keys() == batch.keys()])):
                continue  # images in one of the two batches only, so the rows have not the same columns
            pairs = exchanges(live, live_units(further["advantages"], size))
            batch = refilled(batch, further, pairs, size, self._tokenizer.pad_token_id)
            live = live_units(batch["advantages"], size)
            replaced_groups += len(pairs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        batch["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        self._metrics["train"]["adora/refilled_groups"].append(replaced_groups / len(live))
        return batch

    def _micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The generation batch as `steps_per_generation` micro-batches of whole units, as many on every rank."""
        rows, steps = self.args.per_device_train_batch_size, self.args.steps_per_generation
        unit = unit_size(rows, self.num_generations)
        live = live_units(batch["advantages"], unit)
        count = len(live)
        if not self._can_skip:
            live = [True] * count
        elif self.args.adora_spread_signal and self.accelerator.num_processes > 1:
            batch, live = self._spread(batch, live, unit)
        wanted = self.accelerator.gather(torch.tensor([sum(live)], device=self.accelerator.device)).max().item()
        chunk = self._chunk
        units = chosen_units(live, max(int(wanted), steps // chunk))
        self._metrics["train"]["adora/skipped_groups"].append(1 - len(units) / count)
        one_step = self.args.gradient_accumulation_steps % (steps * self.num_iterations) == 0
        if one_step and self.args.adora_less_padding:
            lengths_B = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
            units = by_length(units, lengths_B, unit)
        elif not one_step:  # each optimizer step should see groups of all kinds
            units = [units[place] for place in torch.randperm(len(units)).tolist()]
        split = split_pixel_values_by_grid(batch)
        micro_batches: list[dict[str, Any]] = []
        for part in planned(units, steps // chunk, chunk, rows // unit):
            if not part:
                micro_batches.append({})
                continue
            micro = take_rows(split, [unit * number + row for number in part for row in range(unit)])
            micro = unsplit_pixel_values_by_grid(micro)
            micro = without_padding(micro) if self.args.adora_less_padding else micro
            micro_batches.append({**micro, "share_of_rows": len(part) * unit / rows})
        return micro_batches

    def _spread(self, batch: dict[str, Any], live: list[bool], unit: int) -> tuple[dict[str, Any], list[bool]]:
        """Move units with signal between ranks where the one with most of them would otherwise take longer."""
        counts, names = zip(*gather_object([(sum(live), movable(batch))]), strict=True)
        alike = names[0] and all(own == names[0] for own in names)  # a rank without any image has no columns for them
        plan = moves(counts, self.args.steps_per_generation // self._chunk) if alike else []
        self._metrics["train"]["adora/moved_groups"].append(len(plan) / max(sum(counts), 1))
        if not plan:
            return batch, live
        self._moved = True
        rank, pad_id = self.accelerator.process_index, self._tokenizer.pad_token_id
        return spread(batch, live, unit, plan, rank, self.banks, pad_id, self._carrier.carry)

    @property
    def _chunk(self) -> int:
        """How many micro-batches one generation has within one optimizer step; all but the last may be empty."""
        steps, accumulated = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        return min(steps, accumulated) if steps % accumulated == 0 or accumulated % steps == 0 else 1

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Stock TRL runs every micro-batch forward and backward; ours passes over those that are empty, as they are on
        all ranks.
        """
        started = time.perf_counter()
        model.train()
        self._prepared = self._prepare_inputs(inputs)
        self._current_train_step_time += time.perf_counter() - started
        if self._prepared:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        self._prepared = None
        self._step += 1
        return torch.zeros((), device=self.args.device)

    @property
    def _can_skip(self) -> bool:
        """Whether a row without advantage adds nothing to the loss."""
        extra = self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled
        return bool(self.args.adora_skip_zero_signal and not extra)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Stock TRL takes a mean over the rows of the micro-batch, and a ratio to the engine from a pass before; ours
        weighs a micro-batch by its rows, and forms the ratio in the policy's own pass.
        """
        inputs = dict(inputs)
        share = inputs.pop("share_of_rows", 1.0)
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        if corrected and "importance_sampling_ratio" not in inputs and "sampling_per_token_logps" in inputs:
            self._unfinished = inputs
        loss: Tensor = super()._compute_loss(model, inputs)
        self._unfinished = None
        return loss * share if share != 1.0 and self.loss_type in MEAN_OVER_ROWS else loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> Result:
        """Stock TRL runs the prompt with every rollout, padded; ours once a group where that is less work, or rows
        without padding where the attention takes them.
        """
        tokens = (input_ids, attention_mask, logits_to_keep, batch_size)
        separate: Callable[[], Result] = partial(
            super()._get_per_token_logps_and_entropies, model, *tokens, compute_entropy, compute_aux_loss, **inputs
        )
        result = None
        for packing in (self.packed_pass, self.flat_pass):
            wanted = getattr(self.args, packing.switch) and not compute_aux_loss and not packing.refused
            if result is None and wanted:
                result = packing(self, model, *tokens, compute_entropy, inputs, separate)
        result = result if result is not None else separate()
        if self._unfinished is not None:
            self._form_ratio(self._unfinished, result[0].detach())
            self._unfinished = None
        return result

    def _form_ratio(self, inputs: dict[str, Any], logps_BC: Tensor) -> None:
        """What stock TRL computes after its old pass, with its metrics' names."""
        mask_BC = inputs["completion_mask"]
        mask_BC = mask_BC * inputs["tool_mask"] if "tool_mask" in inputs else mask_BC
        sampling_BC = inputs["sampling_per_token_logps"]
        ratio = importance_ratio(
            logps_BC,
            sampling_BC,
            mask_BC,
            mode=self.vllm_importance_sampling_mode,
            clip_min=self.vllm_importance_sampling_clip_min,
            clip_max=self.vllm_importance_sampling_clip_max,
        )
        inputs["importance_sampling_ratio"] = ratio
        self._compare_with_engine(logps_BC, sampling_BC, mask_BC)
        self.rollouts.measured(inputs["rollout_number"], rollout_drift(logps_BC, sampling_BC, mask_BC))
        for name, own, everywhere in ratio_figures(ratio, logps_BC, sampling_BC, mask_BC):
            self._metrics["train"][name].append(everywhere(self.accelerator.gather(own.reshape(1))).item())

    def late_drift(self) -> list[float]:
        """Of the rollouts that the policy's own pass was the first to look at, on whichever rank."""
        if self._moved:
            self.rollouts.heard(gather_object(self.rollouts.take_of_others()))
            self._moved = False
        return self.rollouts.take()

    def _compare_with_engine(self, logps_BC: Tensor, sampling_BC: Tensor, mask_BC: Tensor) -> None:
        """Called with what policy and engine give the sampled tokens, on every rank, before they are learned from."""
