"""The same rollouts with each way to save work, in one run: writes losses and every gradient's
distance from stock's.

Usage: accelerate launch ... speed_run.py --output FILE.json [--only STEP,STEP] [--sabotage NAME]
[key=value ...] The policy stands still (learning rate 0), the problems and the rollouts' seeds come
again at every step, and only the switches differ: the first step has all of them off, which is
stock TRL's way.

The policy is float64, so that rounding (1e-16 an operation, on every processor) hides nothing; the
engine is float32, and its rollouts are data here. With `--float32` the policy is float32, the only
one of the two that DeepSpeed takes.
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
from adora_vl.models.load import PRETRAINED  # noqa: E402
from adora_vl.packing import packed_forward as packed_module  # noqa: E402
from adora_vl.packing.shared_prompt import PackedSequence, pack, sharing_pays  # noqa: E402
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
    Gradients,
    training_data_set,
)

PARTS = [part for part in get_args(StepPart) if part != "seeded_rollouts"]
# What each step has on. Sharing vision and prompts needs the references that the image cache gives.
STEPS: dict[str, list[str]] = {
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
    "no padding": [
        "share_prompt"
    ],  # without references to images nothing tells which rows share a prompt
    "all": PARTS,
    "refill": PARTS,  # with a further batch in the place of what has no signal
}


class InFloat64(TorchFunctionMode):
    """Inside, a cast to float32 is one to float64.

    Transformers computes norms and RoPE in float32, and TRL the head's log-probabilities and its
    gradients, which is more than bfloat16 has and less than float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wider = [torch.float64 if value is torch.float32 else value for value in args]
        named = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*wider, **named)


def in_float64(function: Any) -> Any:
    @wraps(function)
    def wider(*args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return function(*args, **kwargs)

    return wider


class SameAgain(AdoraGRPOTrainer):
    """Every step samples what the first one did."""

    passes = 0
    loss = 0.0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Add up the losses of a step in float32, as the Trainer does."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.loss += loss.item()
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.passes += 1
        return super()._compute_loss(model, inputs)

    @property
    def _step_key(self) -> StepKey:
        """The same in each step, so that the same rollouts are drawn again."""
        return StepKey(mode="train", step=0, micro=0)

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        self.before = self.images._cache.processed, self.images.vision.image_passes
        return super()._generate_and_score_completions(inputs)

    def _build_collaborators(self, *args: Any) -> None:
        super()._build_collaborators(*args)
        log_scored = self.metrics_logger.log_scored

        def noted(generation: Generation, built: Any, scored: Any) -> None:
            log_scored(generation, built, scored)
            if not generation.key.attempt:
                processed, seen = self.before
                self.work.append(
                    {"processed": self.images._cache.processed - processed, "seen": seen}
                )
                self.sampled.append(scored.batch["completion_ids"].tolist())

        self.metrics_logger.log_scored = noted  # type: ignore[method-assign]


class Switches(TrainerCallback):
    """Sets what the step that begins has on."""

    trainer: SameAgain

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.begun.append(self.trainer.passes)
        name = self.names[state.global_step]
        self.trainer.packed.append(self.trainer.policy_pass.packed_forward.passes)
        pays = (lambda *_: True) if name == "no padding" else sharing_pays
        mock.patch.object(packed_module, "sharing_pays", pays).start()
        args.adora_stock_step = [part for part in PARTS if part not in STEPS[name]]
        self.trainer.pool.options = RolloutOptions(refill=int(name == "refill"))
        self.trainer.loss = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.losses.append(self.trainer.loss)


def distances(gradients: list[dict[str, torch.Tensor]]) -> list[float]:
    """Measure the largest relative distance of a gradient from the first step's, for each step."""
    scale = max(tensor.norm() for tensor in gradients[0].values())
    result = []
    for step in gradients:
        assert step.keys() == gradients[0].keys()
        far = {
            n: float((step[n] - g).norm() / torch.maximum(g.norm(), 1e-4 * scale))
            for n, g in gradients[0].items()
        }
        result.append(max(far.values()))
    return result


def reward_without_signal(ids: set[str]) -> Any:
    """Return the preset, but every rollout of these problems gets 0.1, as if boxed and wrong."""
    preset = reward_function("adora")

    def reward(completions: list[Any], id: list[str], **columns: Any) -> list[float]:
        graded = preset(completions=completions, id=id, **columns)
        return [0.1 if row_id in ids else value for row_id, value in zip(id, graded, strict=True)]

    return reward


def sabotage(names: str) -> None:
    """Break parts, comma-separated, to see that the tests notice."""
    if "positions" in names:  # every rollout one place further on

        def shifted(input_ids: torch.Tensor, **layout: Any) -> PackedSequence:
            packed = pack(input_ids, **layout)
            after_the_prompt = (
                torch.arange(packed.ids_NS.size(1)) >= packed.layout.groups[0].prompt_length
            )
            return dataclasses.replace(packed, position_ids=packed.position_ids + after_the_prompt)

        mock.patch.object(packed_module, "pack", shifted).start()
    if "rows" in names:  # micro-batches weigh alike however many rows they have
        mock.patch.object(batcher_module, "LOSSES_WITH_ROW_MEAN", frozenset()).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sabotage", default="")
    parser.add_argument("--only", default=",".join(STEPS), help="the steps to take, 'off' first")
    parser.add_argument("--float32", action="store_true", help="the policy too")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--tools", action="store_true", help="that draw pictures between the turns")
    options = parser.parse_intermixed_args()
    steps = options.only.split(",")
    if options.tools:
        SameAgain.toolbox = DrawnPictureTools.of_process()
    changed = {
        key: yaml.safe_load(value)
        for key, value in (word.split("=", 1) for word in options.settings)
    }
    settings: dict[str, Any] = {
        **KEYS_WITH_ENGINE,
        "adora_vllm_dtype": "float32",
        "vllm_importance_sampling_mode": "token_truncate",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "loss_type": "grpo",
        "max_steps": len(steps),
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "shuffle_dataset": False,
        "adora_self_check": False,  # its images would be in the cache before the first step
        **(KEYS_FOR_DRAWN_TOOLS if options.tools else {}),
        **changed,
    }
    args = AdoraGRPOConfig(output_dir=str(options.output.parent / "run"), **settings)
    groups = args.generation_batch_size // args.num_generations
    rows = list(generate(groups, seed=5))
    gradients = Gradients()
    switches = Switches(steps)
    model: Any = str(PRETRAINED)
    if not options.float32:
        model = AutoModelForImageTextToText.from_pretrained(PRETRAINED, dtype=torch.float64)
    trainer = SameAgain(
        model=model,
        reward_funcs=reward_without_signal({row["id"] for row in rows[: len(rows) // 2]}),
        args=args,
        train_dataset=training_data_set(rows),
        callbacks=[switches, gradients],
    )
    trainer.work = []
    trainer.sampled = []
    trainer.begun = []
    trainer.packed = []
    trainer.losses = []
    if not options.float32:
        pass_of_trl = in_float64(trainer._get_per_token_logps_and_entropies)
        trainer._get_per_token_logps_and_entropies = pass_of_trl  # type: ignore[method-assign]
        # autograd runs outside of every mode; of what it runs here, TRL's head alone has casts
        ChunkedLogProbFunction.backward = staticmethod(in_float64(ChunkedLogProbFunction.backward))
    switches.trainer = trainer
    sabotage(options.sabotage)
    trainer.train()
    losses = trainer.accelerator.gather(torch.tensor([trainer.losses], dtype=torch.float64)).mean(
        dim=0
    )
    if trainer.accelerator.is_main_process:
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        result = {
            "steps": steps,
            "losses": losses.tolist(),
            "norms": [entry["grad_norm"] for entry in log],
            "moved": [entry.get("adora/moved_groups") for entry in log],
            "skipped": [entry.get("adora/skipped_groups") for entry in log],
            "kl": [entry["kl"] for entry in log] if args.beta else None,
            "drift": [entry.get("adora/drift", 0.0) for entry in log],
            "work": trainer.work,
            "seen_in_step": [
                b - a
                for a, b in pairwise(
                    [*(w["seen"] for w in trainer.work), trainer.images.vision.image_passes]
                )
            ],
            "same": [sampled == trainer.sampled[0] for sampled in trainer.sampled],
            "refilled": log[-1].get("adora/refilled_groups"),
            "distances": distances(gradients.steps)
            if gradients.steps and gradients.steps[0]
            else None,
            "packed": trainer.policy_pass.packed_forward.passes,
            "packed_in_step": [
                b - a
                for a, b in pairwise([*trainer.packed, trainer.policy_pass.packed_forward.passes])
            ],
            "micro_batches": [
                later - before for before, later in pairwise([*trainer.begun, trainer.passes])
            ],
            "refused": trainer.policy_pass.packed_forward.refusal,
        }
        options.output.write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
