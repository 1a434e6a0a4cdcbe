"""One way of one case of `python -m benchmarks.step`, in a process of its own.

`--way stock` is `trl.GRPOTrainer` itself, `--way ours` is our trainer with its defaults. Both learn
from the same recorded rollouts: an object with the methods of the engine gives the same token ids
to the same prompts, so the seconds are those of everything but sampling. The first generation has
short answers and is not counted.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import torch  # noqa: E402
import trl.trainer.grpo_trainer as stock_module  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.kernels import ChunkedLogProbFunction  # noqa: E402
from trl.trainer import utils as trl_utils  # noqa: E402

from adora_vl import model_setup  # noqa: E402
from adora_vl.config import AdoraGRPOConfig  # noqa: E402
from adora_vl.models.load import PRETRAINED_FOLDER  # noqa: E402
from adora_vl.models.shape import SHAPES_FOLDER  # noqa: E402
from adora_vl.packing.policy_pass import PolicyPass  # noqa: E402
from adora_vl.preflight import check_model  # noqa: E402
from adora_vl.trainer import AdoraGRPOTrainer  # noqa: E402
from adora_vl.training.scoring import RewardFunctions  # noqa: E402
from benchmarks.measure import Clock, PeakMemory  # noqa: E402
from benchmarks.recorded_answers import RecordedAnswers  # noqa: E402
from benchmarks.sized_inputs import (  # noqa: E402
    image_size,
    set_special_tokens,
    sized_problems,
)
from benchmarks.step import (  # noqa: E402
    STEP_WAYS,
    STOCK_AS_ON_A_CARD,
    answer_lengths,
    mrope_sections,
)

IMAGE_TOKEN_SIDE = 28  # pixels
MIN_PIXELS = IMAGE_TOKEN_SIDE**2
MAX_PIXELS = 2000 * IMAGE_TOKEN_SIDE**2
PUBLISHED_HEAD_SIZE = 128  # for which the published `mrope_section` is
SHORT_TOKENS = 8  # of each answer of the first generation, which is not counted


def model_config(options: argparse.Namespace, processor: ProcessorMixin) -> Qwen2_5_VLConfig:
    """Return the config of Qwen2.5-VL-3B with few layers.

    With another width than its 2,048 the language model's other sizes shrink alike, and the vision
    tower is a tiny one.
    """
    width = options.width
    file = SHAPES_FOLDER / "Qwen2.5-VL-3B-Instruct" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    set_special_tokens(config, processor.tokenizer)
    vision = config.pop("vision_config")
    vision["depth"] = options.blocks
    vision["fullatt_block_indexes"] = [options.blocks - 1]
    vision["out_hidden_size"] = width
    scale = width / config["hidden_size"]
    if scale != 1:
        vision |= {"hidden_size": 80, "num_heads": 2, "intermediate_size": 160}
    heads = max(2, round(config["num_attention_heads"] * scale))
    config |= {
        "hidden_size": width,
        "intermediate_size": round(config["intermediate_size"] * scale),
        "num_attention_heads": heads,
        "num_key_value_heads": min(2, heads),
        "num_hidden_layers": options.layers,
        "max_window_layers": options.layers,
        "vocab_size": options.vocabulary,
    }
    head_size = width // heads
    if head_size != PUBLISHED_HEAD_SIZE:
        config["rope_scaling"] = {"type": "mrope", "mrope_section": mrope_sections(head_size)}
    return Qwen2_5_VLConfig(**config, vision_config=vision)


def reward(completions: Sequence[object], **columns: object) -> list[float]:
    """Return 1, 0, 1, 0, ..., so that every group has signal."""
    return [float(row % 2) for row in range(len(completions))]


def build_trainer(options: argparse.Namespace) -> GRPOTrainer:
    """Build the trainer of one way, with a random model that is the same for all ways.

    Recorded answers take the place of the engine, by a patch of the module that makes it: ours is
    `model_setup`, TRL's is that of its trainer.
    """
    processor = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        model_config(options, processor), dtype=getattr(torch, options.dtype)
    )
    arguments = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": sized_problems(
            2 * options.groups, image_size(options.image, IMAGE_TOKEN_SIDE)
        ),
        "processing_class": processor,
    }
    keys = common_keys(options)
    if options.way == "ours":
        config = AdoraGRPOConfig(
            **keys,
            min_pixels=MIN_PIXELS,
            max_pixels=MAX_PIXELS,
            adora_method="grpo",
            # The answers are no engine's, so nothing is compared with one.
            adora_self_check=False,
            adora_max_drift=None,
        )
        with (
            mock.patch.object(model_setup, "AdoraVLLMGeneration", RecordedAnswers),
            # 3B has tied embeddings, which an engine on a CPU does not refresh; here is no engine.
            mock.patch.object(check_model, "refuse_on_cpu"),
        ):
            return AdoraGRPOTrainer(args=config, **arguments)
    stock_module.VLLMGeneration = RecordedAnswers
    if options.way == STOCK_AS_ON_A_CARD:
        # This chooses the positions that the head computes, not the kernel.
        trl_utils._use_triton = lambda device: True
    processor.image_processor.size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return GRPOTrainer(args=GRPOConfig(**keys), **arguments)


def common_keys(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of the config that are the same for all ways."""
    return {
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
        "max_steps": 2 * options.updates,  # two generations
        # Updates change next to nothing, and SGD has no moments that would take memory.
        "learning_rate": 1e-9,
        "optim": "sgd",
        "loss_type": "grpo",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }


class SecondGeneration(TrainerCallback):
    """Measures seconds and memory of the second generation, and of the updates that learn from it.

    The first generation, which has short answers, does not count.
    """

    def __init__(self, clocks: dict[str, Clock], updates: int) -> None:
        """Start to watch the memory.

        Args:
            clocks: clocks of different kinds, which the trainer's methods run.
            updates: how many optimizer steps learn from a generation.
        """
        phases = clocks["wall"].phases

        def is_in_head() -> bool:
            # A slice, since the main thread may leave the last phase in the meantime.
            return any(phase.endswith("head") for phase in phases[-1:])

        self.clocks = clocks
        self.updates = updates
        self.memory = PeakMemory(leaves_out=is_in_head)
        self.result: dict[str, Any] = {}
        self._started_at: dict[str, float] = {}
        self._bytes_before = 0

    def on_step_end(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start to measure after the first generation's last step; write down after the second."""
        if state.global_step == self.updates:
            for name, clock in self.clocks.items():
                clock.seconds.clear()
                self._started_at[name] = clock.now()
            self._bytes_before = self.memory.now()
            self.memory.restart()
        if state.global_step == 2 * self.updates:
            self._write_result()

    def _write_result(self) -> None:
        """Write what was measured to `result`."""
        memory = self.memory
        self.result["step_bytes"] = max(0, memory.peak - self._bytes_before)
        self.result["step_bytes_outside_head"] = max(0, memory.peak_of_rest - self._bytes_before)
        self.result["peak_bytes"] = memory.peak
        for name, clock in self.clocks.items():
            step_seconds = clock.now() - self._started_at[name]
            phases = dict(clock.seconds)
            self.result[name] = {
                **phases,
                "other": step_seconds - sum(phases.values()),
                "whole step": step_seconds,
            }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--way", choices=STEP_WAYS, required=True)
    parser.add_argument("--output", type=Path, required=True, help="file of the figures")
    for name, default, help_text in (
        ("image", 650, "tokens of an image"),
        ("completion", 400, "median tokens of an answer"),
        ("limit", 1024, "tokens of the longest answer"),
        ("generations", 8, "rollouts of a group"),
        ("groups", 1, "of a generation"),
        ("updates", 1, "optimizer steps that learn from a generation"),
        ("width", 2048, "of the language model"),
        ("layers", 2, "of the language model"),
        ("blocks", 2, "of the vision tower"),
        ("vocabulary", 151_936, "of the language model"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--equal", action="store_true", help="all answers have the median length")
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    return parser.parse_args()


def time_phases(trainer: GRPOTrainer) -> dict[str, Clock]:
    """Let clocks time the trainer's methods by phase, and return the clocks.

    The clock `wall` counts seconds, and `processor` those of all of the process's threads.
    """
    clocks = {"wall": Clock(), "processor": Clock(time.process_time)}

    def name_of_pass(clock: Clock) -> str:
        return "policy forward" if torch.is_grad_enabled() else "old pass"

    def name_of_head(clock: Clock) -> str:
        return f"{clock.phases[-1]}, head"

    for clock in clocks.values():
        clock.around(trainer, "get_batch_samples", "data")
        clock.around(trainer.processing_class.image_processor, "preprocess", "image")
        clock.around(RewardFunctions, "score", "grading")
        clock.around(trainer, "_get_per_token_logps_and_entropies", name_of_pass)
        # Packed and padded rows are compared once, in the first generation, which is not measured.
        clock.around(PolicyPass, "check", "check")
        clock.around(trainer.accelerator, "backward", "backward")
        clock.around(ChunkedLogProbFunction, "forward", name_of_head)
        # Autograd has a thread of its own, so this phase is not inside `backward`.
        clock.around(ChunkedLogProbFunction, "backward", "backward, head")
    return clocks


def main() -> None:
    """Train for the steps of one turn, and write its figures."""
    options = parse()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    lengths = answer_lengths(
        options.completion, limit=options.limit, rollouts=options.generations, equal=options.equal
    )
    RecordedAnswers.first_length = SHORT_TOKENS
    RecordedAnswers.lengths = lengths
    trainer = build_trainer(options)
    second_generation = SecondGeneration(time_phases(trainer), options.updates)
    trainer.add_callback(second_generation)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    # The tokens that the trainer has seen are those of two generations: prompts and answers.
    tokens_per_group = trainer.state.num_input_tokens_seen / options.groups
    answer_tokens = SHORT_TOKENS * options.generations + sum(lengths)
    prompt_tokens = round((tokens_per_group - answer_tokens) / (2 * options.generations))
    figures = {
        **second_generation.result,
        "answers": lengths,
        "prompt": prompt_tokens,
        "layers": options.layers,
        "grad_norm": log[-1]["grad_norm"],
    }
    options.output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
