"""Checks of a training with vLLM inside.

They look at rollouts that are drawn again, at the doctor on the 3B model, and at the path of the
one-GPU recipe at the widths of the 3B model.

The doctor compares engine and policy cold, far from the start, after changes to the language model
and to the vision tower (weights streamed, caches reset), and after the engine has slept. A CPU
engine has neither tied embeddings nor sleep nor model runner V2, so without a GPU the recipe's path
is rehearsed without these three.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PretrainedConfig

from adora_vl.config.command import parse_command
from adora_vl.doctor.engine import FEATURES_CHECK
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.utils.checks import Status
from adora_vl.utils.files import GIB
from adora_vl.utils.launch import has_vllm_cpu_build
from benchmarks.gpu.checks import REPOSITORY
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.streaming import TARGETS
from benchmarks.gpu.table import (
    CheckLine,
    CheckResult,
    at_most_line,
    failed_line,
    skipped_line,
    verdict_line,
)
from benchmarks.gpu.trainer import model_shapes

_SEED_PLACE = "gpu-benchmark"
GENERATIONS_TRAINED = 3
ROWS_A_STEP = 8
ENGINE_START_SECONDS = {
    True: 240,
    False: 400,
}  # seconds of one engine from its start, on a GPU and without
NUMBER_OF_SLEEPS = 10
# GiB that a sleep may cost; a leak of weights or graphs is far larger
LEAK_GIB = 0.01
# of the 3B model's 36 and 32; the eighth block of its tower is the first without windows
_TEXT_LAYERS_KEPT = 4
_VISION_LAYERS_KEPT = 8
# GiB in bfloat16: a layer of the 3B model, its embedding and vision tower, and beside the weights
# the engine's share (keys and values, a step's activations, graphs), and what the policy's pass,
# both contexts and sleep leave behind take
_LAYER_GIB = 0.144
_EMBEDDING_AND_TOWER_GIB = 1.85
_ENGINE_EXTRA_GIB = 5.0
_LEFTOVER_GIB = 7.0
# At this rate a step moves the policy by a third of a nat per token, so weights that do not arrive
# are seen
LARGE_LEARNING_RATE = 0.05
_DRIFT_BOUNDS = {"bfloat16": 0.15, "float32": 0.01}  # nats per token
_DRIFT_SOURCE = "weights that do not arrive cost 0.33"
_RUNNER_VALUES = {"V2": "1", "V1": "0"}  # values of VLLM_USE_V2_MODEL_RUNNER
REWARD = """
def varied(completions, completion_ids, **kwargs):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def run(setting: Setting) -> Iterator[CheckLine]:
    """Compare rollouts that are drawn again, and the memory that sleeps cost.

    The doctor looks at neither.
    """
    if setting.on_gpu and has_vllm_cpu_build():
        yield WRONG_BUILD
        return
    with tempfile.TemporaryDirectory() as folder:
        yield from seeded_rollout_lines(setting, Path(folder))


def train_arguments(setting: Setting, dtype: str, folder: Path, *, eager: bool = True) -> list[str]:
    """Return the arguments of the training command.

    `eager`: an engine on a card without CUDA graphs, which take longer to capture than they save
    in a few short generations.
    """
    is_half = dtype == "bfloat16"
    keys: dict[str, object] = {
        "config": REPOSITORY / "configs" / "train" / "smoke_cpu.yaml",
        "output_dir": folder / "run",
        "dtype": dtype,
        "per_device_train_batch_size": ROWS_A_STEP,
        "num_generations": 4,
        "adora_synthetic_rows": 64,
        "vllm_max_model_length": 2048,
        "dataset_name": "synthetic",
    }
    if setting.on_gpu:
        keys |= {"use_cpu": "false", "bf16": str(is_half).lower(), "vllm_enable_sleep_mode": "true"}
        keys["adora_vllm_enforce_eager"] = str(eager).lower()
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def doctor_lines(
    setting: Setting,
    dtype: str,
    folder: Path,
    arguments: Sequence[str] = (),
    runner: str | None = None,
    model_description: str = "",
) -> Iterator[CheckLine]:
    """Run the doctor, and yield its lines about the engine.

    Args:
        setting: the device.
        dtype: that of model and engine.
        folder: where the run and the doctor's file go.
        arguments: further arguments of the command.
        runner: vLLM's model runner, V1 or V2; None for vLLM's choice.
        model_description: what is examined, for the titles of the lines.
    """
    title = ", ".join(filter(None, (model_description, dtype, runner)))
    output = folder / f"{title}.json"
    module = [
        "adora_vl.doctor",
        *train_arguments(setting, dtype, folder),
        *arguments,
        "--json",
        str(output),
    ]
    outcome = run_module(module, runner_environment(runner))
    if not output.is_file():
        yield failed_line(f"doctor, {title}", outcome)
        return
    yield from engine_lines(json.loads(output.read_text(encoding="utf-8")), title)


def runner_environment(runner: str | None) -> dict[str, str]:
    """Return the environment that chooses one of vLLM's model runners; {} for vLLM's choice."""
    return {"VLLM_USE_V2_MODEL_RUNNER": _RUNNER_VALUES[runner]} if runner else {}


def run_module(
    module: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> str:
    """Run a module, and return its exit code and last line in words.

    It is stopped after `seconds`, so that one cold engine that hangs leaves the others theirs.
    """
    seconds = seconds or ENGINE_START_SECONDS[torch.cuda.is_available()]
    try:
        process = subprocess.run(
            [sys.executable, "-m", *module],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:g} s; stopped"
    printed_lines = (process.stderr or process.stdout).strip().splitlines()
    last_line = printed_lines[-1][:300] if printed_lines else "no output"
    return f"exit code {process.returncode}: {last_line}"


def engine_lines(entries: Sequence[dict[str, Any]], title: str) -> Iterator[CheckLine]:
    """Yield the doctor's lines about the engine.

    Those about the machine are the same every time, and become one line, and one for each failure.
    """
    names = [entry["name"] for entry in entries]
    engine_start = names.index(FEATURES_CHECK) if FEATURES_CHECK in names else len(names)
    machine_entries = entries[:engine_start]
    failures = [entry for entry in machine_entries if entry["status"] == Status.FAILED]
    passed_count = len(machine_entries) - len(failures)
    if passed_count:
        yield verdict_line(
            f"{title}: versions, data, folders",
            f"{passed_count} of {engine_start}",
            "all",
            not failures,
            "see the others",
        )
    for entry in [*failures, *entries[engine_start:]]:
        yield line_of_entry(entry, title)


def line_of_entry(entry: dict[str, Any], group: str) -> CheckLine:
    """Return one of the doctor's lines, whose detail has figure and bound in words."""
    title = f"{group}: {entry['name']}"
    detail = entry["detail"]
    if entry["status"] == Status.SKIPPED:
        return skipped_line(title, detail)
    is_ok = entry["status"] == Status.PASSED
    return CheckLine(
        what=title,
        figure=detail,
        bound="the doctor's",
        verdict=CheckResult.OK if is_ok else CheckResult.FAIL,
        note=entry["remedy"],
    )


def seeded_rollout_lines(setting: Setting, folder: Path) -> Iterator[CheckLine]:
    """Sample twice under one seed, with other requests in between, and compare.

    Rollouts under other seeds have to differ.
    """
    from adora_vl.prepare import prepare
    from adora_vl.train import build_trainer

    trainer: Any = build_trainer(
        prepare(parse_command(train_arguments(setting, "float32", folder, eager=False)), "inspect")
    )
    try:
        rows = [trainer.train_dataset[number] for number in range(8)]
        engine_and_policy = trainer.parts.engine_and_policy
        prompts = engine_and_policy.read_prompts(rows)
        sample = partial(engine_and_policy.sample, prompts)
        # The seeds follow from the place where rollouts are drawn.
        first_ids = sample(max_tokens=32, check_name=_SEED_PLACE).completion_ids
        other_seed_ids = sample(max_tokens=32, check_name="elsewhere").completion_ids
        repeated_ids = sample(max_tokens=32, check_name=_SEED_PLACE).completion_ids
        yield sleep_memory_line(setting, lambda: sample(max_tokens=8, check_name=_SEED_PLACE))
    finally:
        trainer.close()
    pairs = zip(first_ids, repeated_ids, strict=True)
    equal_count = sum(tokens == repeated_tokens for tokens, repeated_tokens in pairs)
    differs = other_seed_ids != first_ids
    yield verdict_line(
        "seeded rollouts, drawn again",
        f"{equal_count} of {len(first_ids)} equal",
        "all",
        equal_count == len(first_ids),
        "float32",
    )
    yield verdict_line(
        "under other seeds", "other" if differs else "the same", "other", differs, ""
    )


def sleep_memory_line(setting: Setting, sample_and_sleep: Callable[[], object]) -> CheckLine:
    """Compare the memory that is free after the last of some sleeps with that after the first."""
    title = f"memory lost over {NUMBER_OF_SLEEPS} sleeps"
    if not setting.on_gpu:
        return skipped_line(title, "a CPU engine does not sleep")
    free = []
    for _ in range(NUMBER_OF_SLEEPS):
        sample_and_sleep()
        torch.cuda.synchronize(setting.device)
        free.append(torch.cuda.mem_get_info(setting.device)[0] / GIB)
    source = (
        f"{LEAK_GIB} GiB a sleep, since allocators round; {free[0]:.3g} GiB free after the first"
    )
    return at_most_line(
        title,
        value=free[0] - free[-1],
        bound=LEAK_GIB * NUMBER_OF_SLEEPS,
        unit="GiB",
        source=source,
    )


def rollout_rate_line(title: str, steps: Sequence[dict[str, Any]]) -> CheckLine:
    """Return the tokens of all completions a second of rollouts.

    The first step, which warms up, is not counted.
    """
    warm_steps = steps[1:]
    tokens = sum(ROWS_A_STEP * step["completions/mean_length"] for step in warm_steps)
    seconds = sum(step["seconds/rollout"] for step in warm_steps)
    value = tokens / seconds if seconds else 0.0
    return verdict_line(
        title, f"{value:.0f}", "above 0", value > 0, f"{ROWS_A_STEP} rollouts a step; metrics.jsonl"
    )


def recipe(setting: Setting) -> Iterator[CheckLine]:
    """Train with LoRA on tied embeddings and with sleep, three generations on the V2 runner."""
    yield from recipe_lines(setting, "V2")


def recipe_v1(setting: Setting) -> Iterator[CheckLine]:
    """Do the same on vLLM's older model runner, which some models still have."""
    if not setting.on_gpu:
        yield skipped_line("all of it", "a CPU engine has one runner, which `recipe` uses")
        return
    yield from recipe_lines(setting, "V1")


def recipe_lines(setting: Setting, model_runner: str) -> Iterator[CheckLine]:
    """Run the doctor and three generations on one of vLLM's model runners.

    The generations are skipped where the doctor has written no file: its engine did not start. A
    CPU engine has one runner, so none is chosen for it.
    """
    if setting.on_gpu and has_vllm_cpu_build():
        yield WRONG_BUILD
        return
    dtype = "bfloat16" if setting.on_gpu else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = recipe_arguments(setting, folder)
        runner = model_runner if setting.on_gpu else None
        yield from doctor_lines(
            setting, dtype=dtype, folder=folder, arguments=arguments, runner=runner
        )
        if not list(folder.glob(f"*{runner or dtype}.json")):
            yield skipped_line(
                f"{GENERATIONS_TRAINED} generations, {runner or dtype}",
                "the doctor got no engine to answer",
            )
            return
        title = f"{GENERATIONS_TRAINED} generations{f', {runner}' if runner else ''}"
        run = folder / f"run-{runner}"
        yield from generation_lines(
            title,
            [*train_arguments(setting, dtype, folder), *arguments],
            dtype,
            run,
            runner_environment(runner),
        )
        if run.is_dir():
            yield runner_line(title, run, runner or "V1")
    if not setting.on_gpu:
        yield skipped_line(
            "tied embeddings, sleep, model runner V2", "a CPU engine has none of them"
        )


def drift(setting: Setting) -> Iterator[CheckLine]:
    """Run the doctor on the published 3B model with random weights.

    It has as many layers as there is room for.
    """
    if setting.on_gpu and has_vllm_cpu_build():
        yield WRONG_BUILD
        return
    config = model_shapes(setting)
    arguments: list[str] = []
    if setting.full and setting.on_gpu:
        card = torch.cuda.get_device_properties(setting.device).total_memory
        layers, share = layers_that_fit(card)
        if not layers:
            yield skipped_line(
                "all of it",
                f"policy and engine do not fit into {card / GIB:.0f} GiB with a single layer",
            )
            return
        keep_layers(config.text_config, layers)
        arguments = ["--vllm_gpu_memory_utilization", f"{share:.2f}"]
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = setting.on_gpu
    with tempfile.TemporaryDirectory() as name:
        write_random_model(setting, config, Path(name) / "model")
        arguments += ["--model_name_or_path", str(Path(name) / "model")]
        model_description = f"{config.text_config.num_hidden_layers} layers"
        yield from doctor_lines(
            setting,
            dtype="bfloat16" if setting.on_gpu else "float32",
            folder=Path(name),
            arguments=arguments,
            model_description=model_description,
        )


def layers_that_fit(card_bytes: int) -> tuple[int, float]:
    """Return how many layers of the 3B model fit, and the engine's share of the memory.

    The layers lie twice in the `card_bytes` of a card, in the policy and in the engine, and so do
    the embedding and the vision tower. Of the memory that is left beside the other needs, each
    copy gets one half. The model has 36 layers.
    """
    room = card_bytes / GIB - _LEFTOVER_GIB - _ENGINE_EXTRA_GIB
    layers = max(0, min(36, int((room / 2 - _EMBEDDING_AND_TOWER_GIB) / _LAYER_GIB)))
    return layers, (
        _EMBEDDING_AND_TOWER_GIB + layers * _LAYER_GIB + _ENGINE_EXTRA_GIB
    ) * GIB / card_bytes


def keep_layers(text_config: PretrainedConfig, layers: int) -> None:
    """Cut the config of a language model to its first `layers` layers."""
    text_config.num_hidden_layers = layers
    text_config.max_window_layers = layers
    text_config.layer_types = ["full_attention"] * layers


def write_random_model(setting: Setting, config: PretrainedConfig, folder: Path) -> None:
    """Write a model with random weights and the tiny model's processor to `folder`."""
    model = setting.model(config, torch.bfloat16 if setting.on_gpu else torch.float32)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(PRETRAINED_FOLDER).save_pretrained(folder)
    del model
    if setting.on_gpu:
        torch.cuda.empty_cache()  # this process has no more use for the card


def recipe_arguments(setting: Setting, folder: Path) -> list[str]:
    """Return the arguments by which the recipe's path differs from the tiny model's.

    The model and the reward are written to `folder`.
    """
    config = model_shapes(setting)
    text = config.text_config
    vision = config.vision_config
    if setting.full:
        keep_layers(text, _TEXT_LAYERS_KEPT)
        vision.depth = _VISION_LAYERS_KEPT
        vision.fullatt_block_indexes = [_VISION_LAYERS_KEPT - 1]
    # as published; a CPU engine refuses it
    config.tie_word_embeddings = text.tie_word_embeddings = setting.on_gpu
    write_random_model(setting, config, folder / "model")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    keys = {
        "model_name_or_path": folder / "model",
        "use_peft": "true",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "adora_freeze": "vision_tower",
        "adora_reward": f"{folder / 'rewards.py'}:varied",
        "adora_method": "grpo",
        "max_steps": GENERATIONS_TRAINED,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": LARGE_LEARNING_RATE,
        "max_completion_length": 64,
    }
    return [
        *(word for key, value in keys.items() for word in (f"--{key}", str(value))),
        "--lora_target_modules",
        *TARGETS,
    ]


def generation_lines(
    title: str, arguments: Sequence[str], dtype: str, run: Path, environment: Mapping[str, str]
) -> Iterator[CheckLine]:
    """Train for three generations, and compare engine and policy in each.

    By then there were as many syncs of the weights, and as many sleeps.
    """
    outcome = run_module(["adora_vl.train", *arguments, "--output_dir", str(run)], environment)
    metrics = run / "metrics.jsonl"
    if not outcome.startswith("exit code 0:") or not metrics.is_file():
        yield failed_line(title, outcome)
        return
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if "adora/drift" in step]
    norms = [step["grad_norm"] for step in steps]
    has_learned = len(steps) == GENERATIONS_TRAINED and all(norm > 0 for norm in norms)
    yield verdict_line(
        f"{title}: gradient norms",
        ", ".join(f"{norm:.2g}" for norm in norms),
        "above 0",
        has_learned,
        "random rewards",
    )
    drifts = [step["adora/drift"] for step in steps]
    bound = _DRIFT_BOUNDS[dtype]
    yield at_most_line(
        f"{title}: drift at most",
        value=max(drifts, default=float("nan")),
        bound=bound,
        unit="nats a token",
        source=_DRIFT_SOURCE,
    )
    yield rollout_rate_line(f"{title}: rollout tokens per second", steps)


def runner_line(title: str, run: Path, expected_runner: str) -> CheckLine:
    """Return whether the model runner was the one that was asked for."""
    actual_runner = json.loads((run / "manifest.json").read_text(encoding="utf-8"))[
        "vllm_model_runner"
    ]
    return verdict_line(
        f"{title}: vLLM's model runner",
        actual_runner,
        expected_runner,
        actual_runner == expected_runner,
        "manifest.json",
    )
