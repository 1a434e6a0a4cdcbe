"""Two paths of a run that no other check takes: a base in 4 bits, and turns with a tool."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from adora_vl.record.metrics import METRICS
from adora_vl.utils.launch import find_cpu_build
from benchmarks.gpu.checks import REPOSITORY
from benchmarks.gpu.engine import GENERATIONS, recipe_words, run_module
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.table import Line, at_most, failed, holds, skipped

LIMIT = 280  # seconds of a training command
DRIFT = 0.15  # nats per token, in bfloat16
_CALLS = "tools/call_frequency"


def four_bit(setting: Setting) -> Iterator[Line]:
    """LoRA on a base in 4 bits, made on the card from 16 bits, for three generations."""
    if not setting.on_gpu:
        yield skipped("all of it", "a CPU engine has no 4 bits")
        return
    if find_cpu_build():
        yield WRONG_BUILD
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = {
            "config": REPOSITORY / "configs" / "train" / "smoke_cpu.yaml",
            "output_dir": folder / "run",
            "dtype": "bfloat16",
            "bf16": "true",
            "use_cpu": "false",
            "load_in_4bit": "true",
            "vllm_enable_sleep_mode": "true",
            "adora_vllm_enforce_eager": "true",
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "adora_synthetic_rows": 64,
            "vllm_max_model_length": 2048,
            "dataset_name": "synthetic",
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        yield from _trained([*words, *recipe_words(setting, folder)], folder / "run")


def tools(setting: Setting) -> Iterator[Line]:
    """The zoom recipe on the tiny model: what the model calls is answered, and it goes on."""
    if setting.on_gpu and find_cpu_build():
        yield WRONG_BUILD
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drawn = ["data_prep", "synthetic", "--families", "corners", "--size", "448"]
        made = run_module(
            [*drawn, "--rows", "64", "--test-rows", "8", "--output", str(folder / "data")]
        )
        if not made.startswith("exit code 0:"):
            yield failed("drawn problems", made)
            return
        keys = {
            "config": REPOSITORY / "configs" / "train" / "tiny_zoom.yaml",
            "dataset_name": folder / "data",
            "output_dir": folder / "run",
            "max_steps": GENERATIONS,
            "per_device_train_batch_size": 16,
        }
        if setting.on_gpu:
            keys |= {"use_cpu": "false", "adora_vllm_enforce_eager": "true"}
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        yield from _trained(words, folder / "run")
        called = _shares(folder / "run", _CALLS)
        if called:
            share = max(called)
            yield holds("rollouts that called zoom", f"{share:.0%}", "above 0", share > 0, METRICS)


def _trained(words: Sequence[str], run: Path) -> Iterator[Line]:
    """The lines of a training of three generations: whether it ended, learned, and agreed."""
    what = f"{GENERATIONS} generations"
    ended = run_module(["adora_vl.train", *words], seconds=LIMIT)
    if not ended.startswith("exit code 0:"):
        yield failed(what, ended)
        return
    norms = _shares(run, "grad_norm")
    yield holds(f"{what}: steps", str(len(norms)), str(GENERATIONS), len(norms) == GENERATIONS, "")
    drift = max(_shares(run, "adora/drift"), default=float("nan"))
    source = "weights that do not arrive cost 0.33"
    yield at_most(f"{what}: drift at most", drift, DRIFT, "nats a token", source)


def _shares(run: Path, key: str) -> list[float]:
    """The values of a figure in the log of a run, by step."""
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [entry[key] for entry in entries if entry.get(key) is not None]
