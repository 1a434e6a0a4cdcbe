"""Training with vLLM inside: rollouts that can be drawn again, the doctor on the 3B model, and the
one-GPU recipe's path at the widths of the 3B model.

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
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PretrainedConfig

from adora_vl.config.command import read
from adora_vl.doctor.engine import FEATURES
from adora_vl.models.load import PRETRAINED
from adora_vl.utils.checks import Status
from adora_vl.utils.files import GIB
from adora_vl.utils.launch import find_cpu_build
from benchmarks.gpu.checks import REPOSITORY
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.streaming import TARGETS
from benchmarks.gpu.table import CheckResult, Line, at_most, failed, holds, skipped
from benchmarks.gpu.trainer import shapes

_SAME_PLACE = "gpu-benchmark"
GENERATIONS = 3
ROWS = 8
COLD = {True: 240, False: 400}  # seconds of one engine from its start, on a GPU and without
# GiB that a sleep may cost; a leak of weights or graphs is far larger
SLEEPS = 10
LEAK = 0.01
# of the 3B model's 36 and 32; the eighth block of its tower is the first without windows
_LAYERS = 4
_EYE_LAYERS = 8
# GiB in bfloat16: a layer of the 3B model, its embedding and vision tower, and beside the weights
# the engine's share (keys and values, a step's activations, graphs), and what the policy's pass,
# both contexts and sleep leave behind take
_A_LAYER = 0.144
_OUTSIDE = 1.85
_CACHE = 5.0
_REST = 7.0
# At this rate a step moves the policy by a third of a nat per token, so weights that do not arrive
# are seen
LEARNING_RATE = 0.05
_DRIFT = {"bfloat16": 0.15, "float32": 0.01}  # nats per token
_SEEN = "weights that do not arrive cost 0.33"
_RUNNERS = {"V2": "1", "V1": "0"}  # values of VLLM_USE_V2_MODEL_RUNNER
REWARD = """
def varied(completions, completion_ids, **kwargs):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def run(setting: Setting) -> Iterator[Line]:
    """What the doctor does not look at: rollouts drawn again, and memory that sleeps may cost."""
    if setting.on_gpu and find_cpu_build():
        yield WRONG_BUILD
        return
    with tempfile.TemporaryDirectory() as folder:
        yield from seeded(setting, Path(folder))


def arguments(setting: Setting, dtype: str, folder: Path, *, eager: bool = True) -> list[str]:
    """The arguments of the training command.

    `eager`: an engine on a card without CUDA graphs, which take longer to capture than they save
    in a few short generations.
    """
    half = dtype == "bfloat16"
    keys: dict[str, object] = {
        "config": REPOSITORY / "configs" / "train" / "smoke_cpu.yaml",
        "output_dir": folder / "run",
        "dtype": dtype,
        "per_device_train_batch_size": ROWS,
        "num_generations": 4,
        "adora_synthetic_rows": 64,
        "vllm_max_model_length": 2048,
        "dataset_name": "synthetic",
    }
    if setting.on_gpu:
        keys |= {"use_cpu": "false", "bf16": str(half).lower(), "vllm_enable_sleep_mode": "true"}
        keys["adora_vllm_enforce_eager"] = str(eager).lower()
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def doctor(
    setting: Setting,
    dtype: str,
    folder: Path,
    words: Sequence[str] = (),
    runner: str | None = None,
    of: str = "",
) -> Iterator[Line]:
    """The doctor's lines about the engine.

    `words`: further arguments; `runner`: vLLM's model runner, V1 or V2; `of`: what is examined.
    """
    title = ", ".join(filter(None, (of, dtype, runner)))
    output = folder / f"{title}.json"
    module = ["adora_vl.doctor", *arguments(setting, dtype, folder), *words, "--json", str(output)]
    last_words = run_module(module, chosen(runner))
    if not output.is_file():
        yield failed(f"doctor, {title}", last_words)
        return
    yield from engine_lines(json.loads(output.read_text(encoding="utf-8")), title)


def chosen(runner: str | None) -> dict[str, str]:
    """The environment that chooses one of vLLM's model runners."""
    return {"VLLM_USE_V2_MODEL_RUNNER": _RUNNERS[runner]} if runner else {}


def run_module(
    module: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> str:
    """Run a module, and stop it in time: one cold engine that hangs leaves the others theirs.

    Returns its end.
    """
    seconds = seconds or COLD[torch.cuda.is_available()]
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:g} s; stopped"
    words = (done.stderr or done.stdout).strip().splitlines()
    return f"exit code {done.returncode}: {words[-1][:300] if words else 'no output'}"


def engine_lines(table: Sequence[dict[str, Any]], what: str) -> Iterator[Line]:
    """The doctor's lines about the engine, and those about the machine, which are the same every
    time, as one.
    """
    names = [found["name"] for found in table]
    start = names.index(FEATURES) if FEATURES in names else len(names)
    right = sum(found["status"] != Status.FAILED for found in table[:start])
    if right:
        yield holds(
            f"{what}: versions, data, folders",
            f"{right} of {start}",
            "all",
            right == start,
            "see the others",
        )
    failures = [found for found in table[:start] if found["status"] == Status.FAILED]
    yield from (as_line(found, what) for found in [*failures, *table[start:]])


def as_line(found: dict[str, Any], dtype: str) -> Line:
    """One of the doctor's lines, whose detail has figure and bound in words."""
    what = f"{dtype}: {found['name']}"
    detail = found["detail"]
    if found["status"] == Status.SKIPPED:
        return skipped(what, detail)
    ok = found["status"] == Status.PASSED
    return Line(
        what=what,
        figure=detail,
        bound="the doctor's",
        verdict=CheckResult.OK if ok else CheckResult.FAIL,
        note=found["remedy"],
    )


def seeded(setting: Setting, folder: Path) -> Iterator[Line]:
    """The same seeds twice from one engine, with other requests in between, and other seeds."""
    from adora_vl.prepare import prepare
    from adora_vl.train import build_trainer

    trainer: Any = build_trainer(
        prepare(read(arguments(setting, "float32", folder, eager=False)), "look")
    )
    try:
        rows = [trainer.train_dataset[number] for number in range(8)]
        pair = trainer.engine_pair
        prompts = pair.read(rows)
        places = (_SAME_PLACE, "elsewhere", _SAME_PLACE)
        first, other, again = (
            pair.sample(prompts, tokens=32, where=where).completion_ids for where in places
        )
        yield free_after_sleeps(setting, lambda: pair.sample(prompts, tokens=8, where=_SAME_PLACE))
    finally:
        trainer.close()
    same = sum(tokens == tokens_again for tokens, tokens_again in zip(first, again, strict=True))
    yield holds(
        "seeded rollouts, drawn again",
        f"{same} of {len(first)} equal",
        "all",
        same == len(first),
        "float32",
    )
    yield holds(
        "under other seeds", "other" if other != first else "the same", "other", other != first, ""
    )


def free_after_sleeps(setting: Setting, sample_and_sleep: Callable[[], object]) -> Line:
    """Whether the card has as much memory free after the last of some sleeps as after the first."""
    title = f"memory lost over {SLEEPS} sleeps"
    if not setting.on_gpu:
        return skipped(title, "a CPU engine does not sleep")
    free = []
    for _ in range(SLEEPS):
        sample_and_sleep()
        torch.cuda.synchronize(setting.device)
        free.append(torch.cuda.mem_get_info(setting.device)[0] / GIB)
    source = f"{LEAK} GiB a sleep, since allocators round; {free[0]:.3g} GiB free after the first"
    return at_most(title, value=free[0] - free[-1], bound=LEAK * SLEEPS, unit="GiB", source=source)


def rate(what: str, steps: Sequence[dict[str, Any]]) -> Line:
    """Tokens of all completions by the seconds of the rollouts, without the first step, which warms
    up.
    """
    counted = steps[1:]
    tokens = sum(ROWS * step["completions/mean_length"] for step in counted)
    seconds = sum(step["seconds/rollout"] for step in counted)
    value = tokens / seconds if seconds else 0.0
    return holds(
        what, f"{value:.0f}", "above 0", value > 0, f"{ROWS} rollouts a step; metrics.jsonl"
    )


def recipe(setting: Setting) -> Iterator[Line]:
    """LoRA on a model with tied embeddings and sleep mode, three generations, on vLLM's V2 runner."""
    yield from recipe_on(setting, "V2")


def recipe_v1(setting: Setting) -> Iterator[Line]:
    """The same on vLLM's older model runner, which some models still have."""
    if not setting.on_gpu:
        yield skipped("all of it", "a CPU engine has one runner, which `recipe` uses")
        return
    yield from recipe_on(setting, "V1")


def recipe_on(setting: Setting, of: str) -> Iterator[Line]:
    """The doctor and three generations on one of vLLM's model runners."""
    if setting.on_gpu and find_cpu_build():
        yield WRONG_BUILD
        return
    dtype = "bfloat16" if setting.on_gpu else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = recipe_words(setting, folder)
        runner = of if setting.on_gpu else None
        yield from doctor(setting, dtype=dtype, folder=folder, words=words, runner=runner)
        if not list(folder.glob(f"*{runner or dtype}.json")):
            yield skipped(
                f"{GENERATIONS} generations, {runner or dtype}",
                "the doctor got no engine to answer",
            )
            return
        title = f"{GENERATIONS} generations{f', {runner}' if runner else ''}"
        run = folder / f"run-{runner}"
        yield from generations(
            title, [*arguments(setting, dtype, folder), *words], dtype, run, chosen(runner)
        )
        if run.is_dir():
            yield ran_by(title, run, runner or "V1")
    if not setting.on_gpu:
        yield skipped("tied embeddings, sleep, model runner V2", "a CPU engine has none of them")


def drift(setting: Setting) -> Iterator[Line]:
    """The doctor on the 3B model as it is published, but for its weights, with as many layers as
    there is room for.
    """
    if setting.on_gpu and find_cpu_build():
        yield WRONG_BUILD
        return
    config = shapes(setting)
    words: list[str] = []
    if setting.full and setting.on_gpu:
        card = torch.cuda.get_device_properties(setting.device).total_memory
        layers, share = layers_that_fit(card)
        if not layers:
            yield skipped(
                "all of it",
                f"policy and engine do not fit into {card / GIB:.0f} GiB with a single layer",
            )
            return
        cut(config.text_config, layers)
        words = ["--vllm_gpu_memory_utilization", f"{share:.2f}"]
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = setting.on_gpu
    with tempfile.TemporaryDirectory() as name:
        write(setting, config, Path(name) / "model")
        words += ["--model_name_or_path", str(Path(name) / "model")]
        of = f"{config.text_config.num_hidden_layers} layers"
        yield from doctor(
            setting,
            dtype="bfloat16" if setting.on_gpu else "float32",
            folder=Path(name),
            words=words,
            of=of,
        )


def layers_that_fit(card: int) -> tuple[int, float]:
    """How many of the 3B model's layers fit twice into `card` bytes, in policy and engine, and the
    engine's share.
    """
    room = card / GIB - _REST - _CACHE
    layers = max(0, min(36, int((room / 2 - _OUTSIDE) / _A_LAYER)))
    return layers, (_OUTSIDE + layers * _A_LAYER + _CACHE) * GIB / card


def cut(text: Any, layers: int) -> None:
    """Leave the text config so many layers."""
    text.num_hidden_layers = text.max_window_layers = layers
    text.layer_types = ["full_attention"] * layers


def write(setting: Setting, config: PretrainedConfig, folder: Path) -> None:
    """A model with random weights, and the tiny model's processor."""
    model = setting.model(config, torch.bfloat16 if setting.on_gpu else torch.float32)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(PRETRAINED).save_pretrained(folder)
    del model
    if setting.on_gpu:
        torch.cuda.empty_cache()  # this process has no more use for the card


def recipe_words(setting: Setting, folder: Path) -> list[str]:
    """The arguments by which this path differs from the tiny model's; the model and the reward lie
    in `folder`.
    """
    config = shapes(setting)
    text = config.text_config
    eye = config.vision_config
    if setting.full:
        cut(text, _LAYERS)
        eye.depth = _EYE_LAYERS
        eye.fullatt_block_indexes = [_EYE_LAYERS - 1]
    # as published; a CPU engine refuses it
    config.tie_word_embeddings = text.tie_word_embeddings = setting.on_gpu
    write(setting, config, folder / "model")
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
        "max_steps": GENERATIONS,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": LEARNING_RATE,
        "max_completion_length": 64,
    }
    return [
        *(word for key, value in keys.items() for word in (f"--{key}", str(value))),
        "--lora_target_modules",
        *TARGETS,
    ]


def generations(
    what: str, words: Sequence[str], dtype: str, run: Path, environment: Mapping[str, str]
) -> Iterator[Line]:
    """The training command for three generations: engine against policy in each, after as many
    syncs and sleeps.
    """
    last_words = run_module(["adora_vl.train", *words, "--output_dir", str(run)], environment)
    metrics = run / "metrics.jsonl"
    if not last_words.startswith("exit code 0:") or not metrics.is_file():
        yield failed(what, last_words)
        return
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if "adora/drift" in step]
    norms = [step["grad_norm"] for step in steps]
    learned = len(steps) == GENERATIONS and all(norm > 0 for norm in norms)
    yield holds(
        f"{what}: gradient norms",
        ", ".join(f"{norm:.2g}" for norm in norms),
        "above 0",
        learned,
        "random rewards",
    )
    drifts = [step["adora/drift"] for step in steps]
    bound = _DRIFT[dtype]
    yield at_most(
        f"{what}: drift at most",
        value=max(drifts, default=float("nan")),
        bound=bound,
        unit="nats a token",
        source=_SEEN,
    )
    yield rate(f"{what}: rollout tokens per second", steps)


def ran_by(what: str, run: Path, wanted: str) -> Line:
    """Whether the model runner was the one that was asked for."""
    ran = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["vllm_model_runner"]
    return holds(f"{what}: vLLM's model runner", ran, wanted, ran == wanted, "manifest.json")
