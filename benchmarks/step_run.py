"""One way of one case of `python -m benchmarks.step`, in a process of its own.

`--way stock` is `trl.GRPOTrainer` itself, `--way ours` is our trainer with its defaults. Both learn
from the same recorded rollouts: an object with the methods of the engine gives the same token ids
to the same prompts, so the seconds are those of everything but sampling. The first generation has
short answers and is not counted.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import torch  # noqa: E402
import trl.trainer.grpo_trainer as stock_module  # noqa: E402
from datasets import Dataset  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLConfig,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.kernels import ChunkedLogProbFunction  # noqa: E402
from trl.trainer import utils as trl_utils  # noqa: E402

from adora_vl import model_setup  # noqa: E402
from adora_vl.config import AdoraGRPOConfig  # noqa: E402
from adora_vl.data.dataset import schema  # noqa: E402
from adora_vl.data.prompts import conversation  # noqa: E402
from adora_vl.models.load import PRETRAINED_FOLDER  # noqa: E402
from adora_vl.models.shape import SHAPES_FOLDER  # noqa: E402
from adora_vl.preflight import check_model  # noqa: E402
from adora_vl.synthetic.generate import generate  # noqa: E402
from adora_vl.trainer import AdoraGRPOTrainer  # noqa: E402
from adora_vl.training.scoring import RewardFunctions  # noqa: E402
from benchmarks.measure import Clock, PeakMemory  # noqa: E402
from benchmarks.recorded_answers import RecordedAnswers  # noqa: E402
from benchmarks.step import answer_lengths, mrope_sections  # noqa: E402

PATCH_PIXELS = 28  # pixels of an image token's side
SHORT_TOKENS = 8  # tokens of the answers that are not counted


def config(
    width: int, layers: int, blocks: int, vocabulary: int, processor: Any
) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL-3B with few layers; another width than its 2,048 shrinks the other sizes alike."""
    published = json.loads(
        (SHAPES_FOLDER / "Qwen2.5-VL-3B-Instruct" / "config.json").read_text(encoding="utf-8")
    )
    vision = published.pop("vision_config")
    part = width / published["hidden_size"]
    heads = max(2, round(published["num_attention_heads"] * part))
    vision |= {"depth": blocks, "fullatt_block_indexes": [blocks - 1], "out_hidden_size": width}
    if part != 1:
        vision |= {"hidden_size": 80, "num_heads": 2, "intermediate_size": 160}
    published |= {
        "hidden_size": width,
        "intermediate_size": round(published["intermediate_size"] * part),
        "num_attention_heads": heads,
        "num_key_value_heads": min(2, heads),
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "vocab_size": vocabulary,
    }
    if width // heads != 128:
        published["rope_scaling"] = {
            "type": "mrope",
            "mrope_section": mrope_sections(width // heads),
        }
    tokenizer = processor.tokenizer
    names = {
        "image_token_id": "image_pad",
        "video_token_id": "video_pad",
        "vision_start_token_id": "vision_start",
    }
    names |= {"vision_end_token_id": "vision_end"}
    published |= {
        key: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for key, token in names.items()
    }
    published |= {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2_5_VLConfig(**published, vision_config=vision)


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """1, 0, 1, 0, ...: every group has a signal."""
    return [float(row % 2) for row in range(len(completions))]


def image_size(tokens: int) -> tuple[int, int]:
    """Pixels of an image of about so many tokens."""
    wide = max(1, round(math.sqrt(tokens)))
    return wide * PATCH_PIXELS, max(1, round(tokens / wide)) * PATCH_PIXELS


def problems(number: int, size: tuple[int, int]) -> Dataset:
    """Drawn problems with images of this size in pixels."""
    rows = list(generate(number, seed=5))
    for row in rows:
        row["images"] = [image.resize(size, Image.Resampling.BICUBIC) for image in row["images"]]
    data = Dataset.from_list(rows, features=schema())
    return data.add_column("prompt", [conversation(row["problem"]) for row in rows])


def build(options: argparse.Namespace) -> Any:
    """Build the trainer of one way, with a random model."""
    processor = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    pixels: dict[str, Any] = {
        "min_pixels": PATCH_PIXELS * PATCH_PIXELS,
        "max_pixels": 2000 * PATCH_PIXELS * PATCH_PIXELS,
    }
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config(
            options.width,
            layers=options.layers,
            blocks=options.blocks,
            vocabulary=options.vocabulary,
            processor=processor,
        ),
        dtype=getattr(torch, options.dtype),
    )
    both: dict[str, Any] = {
        "output_dir": str(options.output.parent / f"run_{options.way}"),
        "use_cpu": True,
        "bf16": False,  # the weights have the dtype already
        "gradient_checkpointing": not options.keep_activations,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_importance_sampling_mode": "token_truncate",
        "per_device_train_batch_size": options.generations,
        "gradient_accumulation_steps": options.groups,
        "num_generations": options.generations,
        "num_iterations": options.updates,
        "max_completion_length": max(options.limit, options.completion),
        "max_steps": 2 * options.updates,
        "learning_rate": 1e-9,
        "optim": "sgd",
        "loss_type": "grpo",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }
    data = problems(2 * options.groups, image_size(options.image))
    arguments: dict[str, Any] = {"reward_funcs": reward, "train_dataset": data}
    if options.way == "ours":
        # The answers are no engine's, so nothing is compared with one.
        ours: dict[str, Any] = {
            "adora_method": "grpo",
            "adora_self_check": False,
            "adora_max_drift": None,
        }
        args = AdoraGRPOConfig(**both, **pixels, **ours)
        with (
            mock.patch.object(model_setup, "AdoraVLLMGeneration", RecordedAnswers),
            # 3B has tied embeddings, which an engine on a CPU does not refresh; here is no engine.
            mock.patch.object(check_model, "refuse_on_cpu"),
        ):
            return AdoraGRPOTrainer(model=model, args=args, processing_class=processor, **arguments)
    stock_module.VLLMGeneration = RecordedAnswers
    if options.way == "stock, as on a card":
        # chooses the positions that are scored, not the kernel
        trl_utils._use_triton = lambda device: True
    processor.image_processor.size = {
        "shortest_edge": pixels["min_pixels"],
        "longest_edge": pixels["max_pixels"],
    }
    return GRPOTrainer(
        model=model, args=GRPOConfig(**both), processing_class=processor, **arguments
    )


class Watch(TrainerCallback):
    """Restarts the clock at the generation that counts, and writes down what it took."""

    def __init__(self, clocks: dict[str, Clock], updates: int) -> None:
        phases = clocks["wall"].phases
        self.clocks = clocks
        self.updates = updates
        # a slice, since the main thread may leave the last phase meanwhile
        self.memory = PeakMemory(apart=lambda: any(phase.endswith("head") for phase in phases[-1:]))
        self.result: dict[str, Any] = {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.updates:
            for clock in self.clocks.values():
                clock.seconds.clear()
            self.started = {name: clock.now() for name, clock in self.clocks.items()}
            self.resting = self.memory.now()
            self.memory.restart()
        if state.global_step == 2 * self.updates:
            peaks = {
                "step_bytes": self.memory.peak,
                "step_bytes_outside_head": self.memory.peak_of_rest,
            }
            self.result = {name: max(0, peak - self.resting) for name, peak in peaks.items()}
            self.result["peak_bytes"] = self.memory.peak
            for name, clock in self.clocks.items():
                step_seconds = clock.now() - self.started[name]
                phases = dict(clock.seconds)
                self.result[name] = {
                    **phases,
                    "other": step_seconds - sum(phases.values()),
                    "whole step": step_seconds,
                }


def parse() -> argparse.Namespace:
    """Parse the words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["stock", "stock, as on a card", "ours"], required=True)
    parser.add_argument("--output", type=Path, required=True)
    sizes = {
        "image": 650,
        "completion": 400,
        "limit": 1024,
        "generations": 8,
        "groups": 1,
        "updates": 1,
    }
    sizes |= {"width": 2048, "layers": 2, "blocks": 2, "vocabulary": 151_936}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--equal", action="store_true", help="all answers have the median length")
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    return parser.parse_args()


def timed(trainer: Any) -> dict[str, Clock]:
    """Times the trainer's methods by phase."""
    clocks = {"wall": Clock(), "processor": Clock(time.process_time)}

    def passing(clock: Clock) -> str:
        return "policy forward" if torch.is_grad_enabled() else "old pass"

    def head(clock: Clock) -> str:
        return f"{clock.phases[-1]}, head"

    for clock in clocks.values():
        clock.around(trainer, "get_batch_samples", "data")
        clock.around(trainer.processing_class.image_processor, "preprocess", "image")
        clock.around(RewardFunctions, "__call__", "grading")
        clock.around(trainer, "_get_per_token_logps_and_entropies", passing)
        clock.around(trainer.accelerator, "backward", "backward")
        clock.around(ChunkedLogProbFunction, "forward", head)
        # autograd has a thread of its own
        clock.around(ChunkedLogProbFunction, "backward", "backward, head")
    return clocks


def main() -> None:
    """Train for the steps of one turn, and write its figures."""
    options = parse()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    RecordedAnswers.first_length = SHORT_TOKENS
    RecordedAnswers.lengths = answer_lengths(
        options.completion, limit=options.limit, rollouts=options.generations, equal=options.equal
    )
    trainer = build(options)
    watch = Watch(timed(trainer), options.updates)
    trainer.add_callback(watch)
    trainer.train()
    tokens = RecordedAnswers.lengths
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    tokens_per_group = trainer.state.num_input_tokens_seen / options.groups  # of both generations
    prompt = round(
        (tokens_per_group - sum(tokens) - SHORT_TOKENS * len(tokens)) / (2 * options.generations)
    )
    result = {
        "answers": tokens,
        "prompt": prompt,
        "layers": options.layers,
        "grad_norm": log[-1]["grad_norm"],
    }
    options.output.write_text(json.dumps({**watch.result, **result}))


if __name__ == "__main__":
    main()
