"""Trains on the same rollouts in every step, each time with other time-saving parts switched on.

Writes the losses, and each gradient's relative distance from that of the first step, which has all
parts off as stock TRL has. The policy does not change (learning rate 0), and problems and seeds are
the same in each step.

The policy is float64, so that rounding (1e-16 an operation, on every processor) hides nothing; the
engine is float32, and its rollouts are data here. With `--float32` the policy is float32, the only
one of the two that DeepSpeed takes.

Usage: accelerate launch ... speed_run.py --output FILE.json [--only STEP,STEP] [--sabotage NAME]
[key=value ...]
"""

import argparse
import dataclasses
import json
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import torch  # noqa: E402
import yaml  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import AutoModelForImageTextToText, TrainerCallback  # noqa: E402
from trl.kernels import ChunkedLogProbFunction  # noqa: E402

from adora_vl.config import AdoraGRPOConfig  # noqa: E402
from adora_vl.config.blocks import RolloutOptions  # noqa: E402
from adora_vl.config.keys import StepPart  # noqa: E402
from adora_vl.models.load import PRETRAINED_FOLDER  # noqa: E402
from adora_vl.packing import packed_forward as packed_module  # noqa: E402
from adora_vl.packing.shared_prompt import PackedSequence, pack_rows, packing_pays  # noqa: E402
from adora_vl.rewards import reward_function  # noqa: E402
from adora_vl.rollout.rollouts import StepKey  # noqa: E402
from adora_vl.synthetic.generate import generate  # noqa: E402
from adora_vl.trainer import AdoraGRPOTrainer  # noqa: E402
from adora_vl.training import micro_batches as batcher_module  # noqa: E402
from adora_vl.training.generation import Generation  # noqa: E402
from tests.support.parity import (  # noqa: E402
    KEYS_FOR_DRAWN_TOOLS,
    KEYS_WITH_ENGINE,
    DrawnPictureTools,
    GradientRecorder,
    training_data_set,
)

SWITCHABLE_PARTS = [part for part in get_args(StepPart) if part != "seeded_rollouts"]
# What each step has on. Sharing vision and prompts needs the image cache's patch numbers.
PARTS_ON_BY_STEP: dict[str, list[str]] = {
    "off": [],
    "off again": [],
    "cache": ["cache_images"],
    "requests": ["cache_images", "group_requests"],
    "vision": ["cache_images", "share_vision"],
    "windows": ["batch_windows"],
    "prompt": ["cache_images", "share_prompt"],
    "old pass": ["skip_old_pass"],
    "zero signal": ["skip_zero_signal"],
    "spread": ["cache_images", "skip_zero_signal", "spread_signal"],
    "fill": ["cache_images", "share_prompt", "fill_micro_batches"],
    "fill separate rows": ["fill_micro_batches"],
    "no padding": ["share_prompt"],  # without patch numbers nothing tells which rows share a prompt
    "all": SWITCHABLE_PARTS,
    "refill": SWITCHABLE_PARTS,  # with a further batch in the place of what has no signal
}


class CastToFloat64(TorchFunctionMode):
    """Makes every cast to float32 inside the block one to float64.

    Transformers computes norms and RoPE in float32, and TRL the head's log-probabilities and its
    gradients, which is more than bfloat16 has and less than float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with float64 in place of float32."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wider_args = [torch.float64 if value is torch.float32 else value for value in args]
        wider_kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*wider_args, **wider_kwargs)


def compute_in_float64(function: Any) -> Any:
    """Wrap a function so that it computes in float64 where it would cast to float32."""

    @wraps(function)
    def function_in_float64(*args: Any, **kwargs: Any) -> Any:
        with CastToFloat64():
            return function(*args, **kwargs)

    return function_in_float64


class TrainerThatSamplesAgain(AdoraGRPOTrainer):
    """Samples in every step what the first one did, and counts the work of each."""

    forward_passes = 0
    loss = 0.0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Add up the losses of a step in float32, as the Trainer does."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.loss += loss.item()
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.forward_passes += 1
        return super()._compute_loss(model, inputs)

    @property
    def _step_key(self) -> StepKey:
        """The same in each step, so that the same rollouts are drawn again."""
        return StepKey(mode="train", step=0, micro=0)

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        images = self.parts.images
        self.processed_before = self.image_cache.processed_count
        self.image_passes_before = images.vision.image_passes
        return super()._generate_and_score_completions(inputs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.parts.images.cache is not None
        self.image_cache = self.parts.images.cache
        log_scored = self.parts.metrics_logger.log_scored

        def log_and_record(
            generation: Generation, unscored_groups: Any, scored_groups: Any
        ) -> None:
            log_scored(generation, unscored_groups, scored_groups)
            if generation.key.refill_round == 0:  # no batch that refills the generation
                processed = self.image_cache.processed_count
                self.images_processed.append(processed - self.processed_before)
                self.image_passes_at_start.append(self.image_passes_before)
                self.completion_ids.append(scored_groups.batch["completion_ids"].tolist())

        self.parts.metrics_logger.log_scored = log_and_record  # type: ignore[method-assign]


class SwitchPartsByStep(TrainerCallback):
    """Switches on, at the start of each step, the parts that this step is to have."""

    trainer: TrainerThatSamplesAgain

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def on_step_begin(self, args, state, control, **kwargs):
        """Record the counts so far, and switch the parts of this step on."""
        self.trainer.forward_passes_at_start.append(self.trainer.forward_passes)
        name = self.names[state.global_step]
        packed_passes = self.trainer.parts.policy_pass.packed_forward.pass_count
        self.trainer.packed_passes_at_start.append(packed_passes)
        # "no padding" packs also where that does not pay
        packs_always = name == "no padding"
        should_pack = (lambda *_: True) if packs_always else packing_pays
        mock.patch.object(packed_module, "packing_pays", should_pack).start()
        args.adora_stock_step = [
            part for part in SWITCHABLE_PARTS if part not in PARTS_ON_BY_STEP[name]
        ]
        # These two were made with all parts on.
        images = self.trainer.parts.images
        vision = images.vision
        images.cache = self.trainer.image_cache
        if not args.uses("cache_images"):
            images.cache = None
        # Without a cache there is nothing to share images by.
        vision.shares_images = args.uses("share_vision") and images.cache is not None
        vision.switch_batched_windows(on=args.uses("batch_windows"))
        self.trainer.parts.pool.options = RolloutOptions(refill=int(name == "refill"))
        self.trainer.loss = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.losses.append(self.trainer.loss)


def gradient_distances(gradients: list[dict[str, torch.Tensor]]) -> list[float]:
    """Measure the largest relative distance of a gradient from the first step's, for each step."""
    scale = max(tensor.norm() for tensor in gradients[0].values())
    largest_distances = []
    for step in gradients:
        assert step.keys() == gradients[0].keys()
        relative_distances = [
            float((step[name] - stock).norm() / torch.maximum(stock.norm(), 1e-4 * scale))
            for name, stock in gradients[0].items()
        ]
        largest_distances.append(max(relative_distances))
    return largest_distances


def increments(counts: list[int]) -> list[int]:
    """Return by how much each count is above the one before it: [2, 5, 6] gives [3, 1]."""
    return [later - earlier for earlier, later in pairwise(counts)]


def reward_without_signal(ids: set[str]) -> Any:
    """Return the preset's reward, but 0.1 for every rollout of the problems with these ids.

    That is what a boxed and wrong answer gets, so their groups have no signal.
    """
    preset = reward_function("boxed_accuracy")

    def reward(completions: list[Any], id: list[str], **columns: Any) -> list[float]:
        graded = preset(completions=completions, id=id, **columns)
        return [0.1 if row_id in ids else value for row_id, value in zip(id, graded, strict=True)]

    return reward


def break_parts(names: str) -> None:
    """Break parts, comma-separated, to see that the tests notice."""
    if "positions" in names:  # every rollout one place further on

        def pack_one_place_further_on(input_ids: torch.Tensor, **layout: Any) -> PackedSequence:
            packed = pack_rows(input_ids, **layout)
            after_the_prompt = (
                torch.arange(packed.ids_NS.size(1)) >= packed.layout.groups[0].prompt_length
            )
            return dataclasses.replace(packed, position_ids=packed.position_ids + after_the_prompt)

        mock.patch.object(packed_module, "pack_rows", pack_one_place_further_on).start()
    if "rows" in names:  # micro-batches weigh alike however many rows they have
        mock.patch.object(batcher_module, "LOSSES_WITH_ROW_MEAN", frozenset()).start()


def read_options() -> argparse.Namespace:
    """Parse the command line; `settings` are the keys of the config that it changes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sabotage", default="")
    parser.add_argument(
        "--only", default=",".join(PARTS_ON_BY_STEP), help="the steps to take, 'off' first"
    )
    parser.add_argument("--float32", action="store_true", help="the policy too")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--tools", action="store_true", help="that draw pictures between the turns")
    options = parser.parse_intermixed_args()
    pairs = (word.split("=", 1) for word in options.settings)
    options.settings = {key: yaml.safe_load(value) for key, value in pairs}
    options.only = options.only.split(",")
    return options


def config_of_run(options: argparse.Namespace) -> AdoraGRPOConfig:
    """Return the config of the run.

    The learning rate is 0, so that losses and gradients of all steps have to be equal.
    """
    settings: dict[str, Any] = {
        **KEYS_WITH_ENGINE,
        "adora_vllm_dtype": "float32",
        "vllm_importance_sampling_mode": "token_truncate",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "loss_type": "grpo",
        "max_steps": len(options.only),
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "shuffle_dataset": False,
        "adora_self_check": False,  # its images would be in the cache before the first step
    }
    if options.tools:
        DrawnPictureTools.of_process()
        settings |= KEYS_FOR_DRAWN_TOOLS
    settings |= options.settings
    return AdoraGRPOConfig(output_dir=str(options.output.parent / "run"), **settings)


def build_trainer(
    options: argparse.Namespace, gradients: GradientRecorder, switches: SwitchPartsByStep
) -> TrainerThatSamplesAgain:
    """Return the trainer of the run. In half of its groups no rollout has a signal.

    Args:
        options: the command line; without `float32` the policy computes in float64.
        gradients: keeps the gradients of each step.
        switches: switches the parts of each step on.
    """
    args = config_of_run(options)
    groups = args.generation_batch_size // args.num_generations
    rows = list(generate(groups, seed=5))
    model: Any = str(PRETRAINED_FOLDER)
    if not options.float32:
        model = AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER, dtype=torch.float64)
    trainer = TrainerThatSamplesAgain(
        model=model,
        reward_funcs=reward_without_signal({row["id"] for row in rows[: len(rows) // 2]}),
        args=args,
        train_dataset=training_data_set(rows),
        callbacks=[switches, gradients],
    )
    trainer.images_processed = []
    trainer.image_passes_at_start = []
    trainer.completion_ids = []
    trainer.forward_passes_at_start = []
    trainer.packed_passes_at_start = []
    trainer.losses = []
    switches.trainer = trainer
    if not options.float32:
        pass_of_trl = compute_in_float64(trainer._get_per_token_logps_and_entropies)
        trainer._get_per_token_logps_and_entropies = pass_of_trl  # type: ignore[method-assign]
        # autograd runs outside of every mode; of what it runs here, TRL's head alone has casts
        ChunkedLogProbFunction.backward = staticmethod(
            compute_in_float64(ChunkedLogProbFunction.backward)
        )
    return trainer


def results_of_steps(
    trainer: TrainerThatSamplesAgain, gradients: GradientRecorder
) -> dict[str, Any]:
    """Return what each step logged and counted, and the distances of its gradients."""
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    packed_forward = trainer.parts.policy_pass.packed_forward
    image_passes = [*trainer.image_passes_at_start, trainer.parts.images.vision.image_passes]
    packed_passes = [*trainer.packed_passes_at_start, packed_forward.pass_count]
    forward_passes = [*trainer.forward_passes_at_start, trainer.forward_passes]
    # Gradients of a sharded model are not there to be copied.
    has_gradients = bool(gradients.steps and gradients.steps[0])
    first_ids = trainer.completion_ids[0]
    return {
        "norms": [entry["grad_norm"] for entry in log],
        "moved_groups": [entry.get("adora/moved_groups") for entry in log],
        "skipped_groups": [entry.get("adora/skipped_groups") for entry in log],
        "kl": [entry["kl"] for entry in log] if trainer.args.beta else None,
        "drift": [entry.get("adora/drift", 0.0) for entry in log],
        "images_processed": trainer.images_processed,
        "image_passes": increments(image_passes),
        "has_same_samples": [ids == first_ids for ids in trainer.completion_ids],
        "refilled_groups": log[-1].get("adora/refilled_groups"),
        "distances": gradient_distances(gradients.steps) if has_gradients else None,
        "packed_passes": increments(packed_passes),
        "micro_batches": increments(forward_passes),
        "packing_disabled_reason": packed_forward.disabled_reason,
    }


def main() -> None:
    """Train each step on the same rollouts with other time-saving parts on, and write figures."""
    options = read_options()
    gradients = GradientRecorder()
    trainer = build_trainer(options, gradients, SwitchPartsByStep(options.only))
    break_parts(options.sabotage)
    trainer.train()
    losses = torch.tensor([trainer.losses], dtype=torch.float64)
    mean_losses = trainer.accelerator.gather(losses).mean(dim=0)
    if trainer.accelerator.is_main_process:
        result = {
            "steps": options.only,
            "losses": mean_losses.tolist(),
            **results_of_steps(trainer, gradients),
        }
        options.output.write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
