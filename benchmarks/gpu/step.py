"""A shipped recipe at its own sizes, with random weights and rewards that differ.

One generation of `adora_3b_1gpu_lora.yaml`: seconds by phase, the memory awake and asleep beside
the dry run's prediction, and the drift. Random weights hardly ever end an answer, so all answers
are as long as allowed, which is the worst case of a step. Without a GPU the same path is taken with
small widths and short answers.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adora_vl.record.gpu_memory import POLICY_MEMORY_KEY, ROLLOUT_MEMORY_KEY
from adora_vl.record.metrics import METRICS_FILE
from adora_vl.utils.files import GIB
from adora_vl.utils.launch import has_vllm_cpu_build
from benchmarks.gpu.checks import REPOSITORY
from benchmarks.gpu.engine import REWARD, run_module, write_random_model
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.table import CheckLine, at_most_line, failed_line, skipped_line, verdict_line
from benchmarks.gpu.trainer import model_shapes

RECIPE_NAME = "adora_3b_1gpu_lora"
OPTIMIZER_UPDATES = 2  # optimizer steps of one generation of the recipe
LIMIT_SECONDS = 420  # seconds of the training command
DRIFT_BOUND = 0.15  # nats per token, in bfloat16
# The same path on two CPU cores.
KEYS_ON_A_CPU: dict[str, object] = {
    "use_cpu": "true",
    "bf16": "false",
    "dtype": "float32",
    "vllm_enable_sleep_mode": "false",
    "min_pixels": 3136,
    "max_pixels": 3136,
    "max_completion_length": 16,
    "vllm_max_model_length": 256,
    "vllm_gpu_memory_utilization": 0.3,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": "false",
}


def run(setting: Setting) -> Iterator[CheckLine]:
    """Yield the figures of one generation of the recipe."""
    if setting.on_gpu and has_vllm_cpu_build():
        yield WRONG_BUILD
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = recipe_arguments(setting, folder)
        yield from dry_run_and_run_lines(setting, arguments, folder)


def recipe_arguments(setting: Setting, folder: Path) -> list[str]:
    """Return the arguments of the recipe.

    Its model has random weights, and is written to `folder`.
    """
    config = model_shapes(setting)
    # as published; a CPU engine refuses it
    config.text_config.tie_word_embeddings = setting.on_gpu
    config.tie_word_embeddings = setting.on_gpu
    write_random_model(setting, config, folder / "model")
    rewards = folder / "rewards.py"
    rewards.write_text(REWARD, encoding="utf-8")
    keys: dict[str, object] = {
        "config": REPOSITORY / "configs" / "train" / f"{RECIPE_NAME}.yaml",
        "model_name_or_path": folder / "model",
        "output_dir": folder / "run",
        "dataset_name": "synthetic",
        "adora_synthetic_rows": 256,
        # Drawn pictures grow to 512 image tokens
        "min_pixels": 401408,
        "adora_reward": f"{rewards}:varied",
        "max_steps": OPTIMIZER_UPDATES,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    if setting.on_gpu:
        # Graphs of 36 layers take a minute to compile and capture, and give 20 s of a generation.
        keys["adora_vllm_enforce_eager"] = "true"
    if not setting.full:
        keys |= KEYS_ON_A_CPU
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def dry_run_and_run_lines(
    setting: Setting, arguments: Sequence[str], folder: Path
) -> Iterator[CheckLine]:
    """Take a dry run and the run itself, and yield their lines."""
    plan = folder / "plan.json"
    dry_run_outcome = run_module(["adora_vl.train", *arguments, "--dry-run", "--json", str(plan)])
    if not plan.is_file():
        yield failed_line("dry run", dry_run_outcome)
        return
    prediction = json.loads(plan.read_text(encoding="utf-8"))
    run_outcome = run_module(["adora_vl.train", *arguments], seconds=LIMIT_SECONDS)
    metrics = folder / "run" / METRICS_FILE
    if not run_outcome.startswith("exit code 0:") or not metrics.is_file():
        yield failed_line("one generation", run_outcome)
        return
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    yield from step_lines([step for step in steps if "grad_norm" in step], prediction, setting)


def step_lines(
    steps: Sequence[dict[str, Any]], prediction: dict[str, Any], setting: Setting
) -> Iterator[CheckLine]:
    """Yield the lines of the steps of one generation.

    Args:
        steps: the steps of `metrics.jsonl`.
        prediction: the figures of the dry run, in bytes.
        setting: where the run was.
    """
    norms = [step["grad_norm"] for step in steps]
    norms_in_words = ", ".join(f"{norm:.2g}" for norm in norms)
    has_learned = len(steps) == OPTIMIZER_UPDATES and all(norm > 0 for norm in norms)
    yield verdict_line(
        "gradient norms", norms_in_words, "above 0", has_learned, "rewards that differ"
    )
    phases = {
        key.removeprefix("seconds/"): sum(step.get(key) or 0.0 for step in steps)
        for key in steps[0]
        if key.startswith("seconds/")
    }
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
    yield verdict_line("seconds by phase", seconds, "reported", True, METRICS_FILE)
    drift = max(step.get("adora/drift") or 0.0 for step in steps)
    yield at_most_line(
        "drift at most", drift, DRIFT_BOUND, "nats a token", "the bound of the recipe's path"
    )
    peak = prediction["peak_bytes"] / GIB
    for title, key in (
        ("memory, engine awake", ROLLOUT_MEMORY_KEY),
        ("memory, policy step", POLICY_MEMORY_KEY),
    ):
        values = [step[key] for step in steps if step.get(key) is not None]
        if not setting.on_gpu:
            yield skipped_line(
                title, "a card's memory is measured on a card", f"{peak:.3g} GiB planned"
            )
        elif values:
            yield at_most_line(title, max(values), peak, "GiB", "the dry run's peak")
        else:
            yield failed_line(title, f"{METRICS_FILE} has no {key}")
