"""Two paths of a run that no other check takes: a base in 4 bits, and turns with a tool."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from adora_vl.record.metrics import METRICS_FILE
from adora_vl.utils.launch import has_vllm_cpu_build
from benchmarks.gpu.checks import REPOSITORY
from benchmarks.gpu.engine import GENERATIONS_TRAINED, recipe_arguments, run_module
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.table import CheckLine, at_most_line, failed_line, skipped_line, verdict_line

LIMIT_SECONDS = 280  # seconds of a training command
DRIFT_BOUND = 0.15  # nats per token, in bfloat16
_CALL_FREQUENCY_KEY = "tools/call_frequency"


def four_bit(setting: Setting) -> Iterator[CheckLine]:
    """Train LoRA on a base in 4 bits, made on the card from 16 bits, for three generations."""
    if not setting.on_gpu:
        yield skipped_line("all of it", "a CPU engine has no 4 bits")
        return
    if has_vllm_cpu_build():
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
        arguments = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        yield from _training_lines([*arguments, *recipe_arguments(setting, folder)], folder / "run")


def tools(setting: Setting) -> Iterator[CheckLine]:
    """Train the zoom recipe on the tiny model: what the model calls is answered, and it goes on."""
    if setting.on_gpu and has_vllm_cpu_build():
        yield WRONG_BUILD
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["data_prep", "synthetic", "--families", "corners", "--size", "448"]
        outcome = run_module(
            [*command, "--rows", "64", "--test-rows", "8", "--output", str(folder / "data")]
        )
        if not outcome.startswith("exit code 0:"):
            yield failed_line("drawn problems", outcome)
            return
        keys = {
            "config": REPOSITORY / "configs" / "train" / "tiny_zoom.yaml",
            "dataset_name": folder / "data",
            "output_dir": folder / "run",
            "max_steps": GENERATIONS_TRAINED,
            "per_device_train_batch_size": 16,
        }
        if setting.on_gpu:
            keys |= {"use_cpu": "false", "adora_vllm_enforce_eager": "true"}
        arguments = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        yield from _training_lines(arguments, folder / "run")
        call_shares = _logged_values(folder / "run", _CALL_FREQUENCY_KEY)
        if call_shares:
            share = max(call_shares)
            yield verdict_line(
                "rollouts that called zoom", f"{share:.0%}", "above 0", share > 0, METRICS_FILE
            )


def _training_lines(arguments: Sequence[str], run: Path) -> Iterator[CheckLine]:
    """Train for three generations, and say whether that ended, learned, and agreed."""
    title = f"{GENERATIONS_TRAINED} generations"
    outcome = run_module(["adora_vl.train", *arguments], seconds=LIMIT_SECONDS)
    if not outcome.startswith("exit code 0:"):
        yield failed_line(title, outcome)
        return
    norms = _logged_values(run, "grad_norm")
    yield verdict_line(
        f"{title}: steps",
        str(len(norms)),
        str(GENERATIONS_TRAINED),
        len(norms) == GENERATIONS_TRAINED,
        "",
    )
    drift = max(_logged_values(run, "adora/drift"), default=float("nan"))
    source = "weights that do not arrive cost 0.33"
    yield at_most_line(f"{title}: drift at most", drift, DRIFT_BOUND, "nats a token", source)


def _logged_values(run: Path, key: str) -> list[float]:
    """Return the values of a figure in the log of a run, by step."""
    lines = (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [entry[key] for entry in entries if entry.get(key) is not None]
