"""One case of `benchmarks.step`, under `accelerate launch`: stock's way and ours by turns, in one run.

Turns are two steps long and the first of each is not counted: the loader reads one batch ahead. With `--prefetch` they
are three steps long, and the last of each is counted, because the thread reads one batch further.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from adora_vl.rollout.environment import prepare_engine_environment

prepare_engine_environment()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor  # noqa: E402

from adora_vl.config import AdoraGRPOConfig  # noqa: E402
from adora_vl.config.speed import SWITCHES  # noqa: E402
from adora_vl.dedup import processor as step_processor  # noqa: E402
from adora_vl.models.tiny.build import PRETRAINED  # noqa: E402
from adora_vl.prompts import conversation  # noqa: E402
from adora_vl.rollout import image_cache  # noqa: E402
from adora_vl.rollout.prefetch import NoPrefetch  # noqa: E402
from adora_vl.trainer import AdoraGRPOTrainer  # noqa: E402
from benchmarks.clock import Clock, PeakMemory  # noqa: E402
from data_prep.schema import FEATURES  # noqa: E402
from data_prep.synthetic.generate import generate  # noqa: E402

AHEAD = "reading ahead"


class Turns(TrainerCallback):
    """Switches between stock's way and ours, and writes down what each step took."""

    def __init__(self, clock: Clock, distinct: int, ways: dict[str, list[str]], length: int = 2) -> None:
        """`length`: of a turn, in steps."""
        self.clock, self.distinct, self.ways, self.length = clock, distinct, ways, length
        self.memory = PeakMemory()
        self.steps: list[dict[str, Any]] = []
        self.processed = 0
        self.trainer: Any = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.way = list(self.ways)[state.global_step // self.length % len(self.ways)]
        for name in SWITCHES:
            setattr(args, name, name in self.ways[self.way])
        self.trainer.rows.share = args.adora_cache_images
        self.trainer.prefetch.finish()
        self.trainer.prefetch = self.trainer.ahead if self.way == AHEAD else NoPrefetch()

    def begin(self) -> None:
        self.clock.seconds.clear()
        self.started, self.resting = time.perf_counter(), self.memory.now()
        self.memory.peak, self.processed, self.seen = 0, 0, self.trainer.images.vision.seen

    def on_step_end(self, args, state, control, **kwargs):
        total = time.perf_counter() - self.started
        phases = dict(self.clock.seconds)
        self.steps.append(
            {
                "way": self.way,
                "counted": state.global_step % self.length == 0,
                "seconds": total,
                "phases": {**phases, "other": total - sum(phases.values())},
                "peak_bytes": max(0, self.memory.peak - self.resting),
                "processed": self.processed / self.distinct,
                "seen": (self.trainer.images.vision.seen - self.seen) / self.distinct,
            }
        )
        self.begin()


class Timed(AdoraGRPOTrainer):
    """The trainer with a clock at the seams between its phases."""

    def get_train_dataloader(self) -> Any:
        self.args.adora_cache_images = True
        loader = super().get_train_dataloader()
        self.rows, self.ahead = loader.dataset, self.prefetch
        return loader

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch.phase("policy forward" if torch.is_grad_enabled() else "old pass"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def count_images(turns: Turns, clock: Clock) -> None:
    """Of the trainer and of vLLM: both have processors of this class."""
    original = Qwen2VLImageProcessor.preprocess

    def preprocess(self: Any, images: Any, **kwargs: Any) -> Any:
        with clock.phase("image"):
            output = original(self, images, **kwargs)
        turns.processed += len(output["image_grid_thw"])
        return output

    Qwen2VLImageProcessor.preprocess = preprocess
    for module, name in ((image_cache, "_key"), (image_cache, "normalized"), (step_processor, "normalized")):
        clock.around(module, name, "image")  # what finding an image in our cache takes instead


def reward(completions: list[Any], silent: list[bool], **columns: Any) -> list[float]:
    """1, 0, 1, 0, ... ; the same for all rollouts of a silent problem. What is learned does not matter here."""
    return [0.0 if mute else float(row % 2) for row, mute in enumerate(silent)]


def dataset(problems: int, side: int, silent: float) -> Dataset:
    rows = list(generate(problems, seed=5))
    for row in rows:
        row["images"] = [image.resize((side, side), Image.Resampling.BICUBIC) for image in row["images"]]
    data = Dataset.from_list(rows, features=FEATURES)
    data = data.add_column("prompt", [conversation(row["problem"]) for row in rows])
    return data.add_column("silent", [number % 100 < 100 * silent for number in _spread(problems)])


def _spread(problems: int) -> list[int]:
    """0 to 99 in an order that gives every few neighbours their share."""
    return [(number * 50) % 100 for number in range(problems)]


def build(options: argparse.Namespace, turns: Turns) -> Timed:
    processes = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 1
    side = options.side
    args = AdoraGRPOConfig(
        output_dir=str(options.output.parent / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.25,
        vllm_max_model_length=512,
        vllm_importance_sampling_mode="token_truncate",
        adora_vllm_enforce_eager=False,  # as stock TRL builds its engine
        min_pixels=side * side,
        max_pixels=side * side,
        per_device_train_batch_size=4 * options.generations,
        num_generations=options.generations,
        max_completion_length=40,
        max_steps=len(turns.ways) * turns.length * options.turns,
        adora_prefetch_images=options.prefetch,
        adora_cache_images=False,  # so vLLM keeps processed images itself, as it does for stock
        learning_rate=1e-6,
        adora_mode="off",
        adora_max_drift=None,
        adora_freeze_vision_tower=options.frozen,
        adora_freeze_projector=options.frozen,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        seed=3,
    )
    problems = 4 * processes * (args.max_steps + 2)
    data = dataset(problems, side, options.silent)
    return Timed(model=str(PRETRAINED), reward_funcs=reward, args=args, train_dataset=data, callbacks=[turns])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--silent", type=float, default=0.0)
    parser.add_argument("--ablate", action="store_true", help="also switch off each switch alone")
    parser.add_argument("--prefetch", action="store_true", help="ours beside ours with images read ahead")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    clock = Clock()
    ways = {"stock": [], "ours": list(SWITCHES)}
    if options.ablate:
        ways |= {f"without {name}": [other for other in SWITCHES if other != name] for name in SWITCHES}
    if options.prefetch:
        ways = {"ours": list(SWITCHES), AHEAD: list(SWITCHES)}
    turns = Turns(clock, 4, ways, length=3 if options.prefetch else 2)
    trainer = build(options, turns)
    turns.trainer, trainer.stopwatch = trainer, clock
    count_images(turns, clock)
    clock.around(trainer, "get_batch_samples", "data")
    clock.around(trainer, "_calculate_rewards", "grading")
    clock.around(trainer.vllm_generation, "generate", "rollout")
    clock.around(trainer.vllm_generation, "sync_weights", "sync")
    clock.around(trainer.accelerator, "backward", "backward")
    clock.around(trainer, "create_optimizer_and_scheduler", "other")
    clock.around(torch.optim.AdamW, "step", "optimizer")
    turns.begin()
    trainer.train()
    if trainer.accelerator.is_main_process:
        options.output.write_text(json.dumps(turns.steps))
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
