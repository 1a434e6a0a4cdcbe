"""Training with vLLM inside: the doctor on the tiny model, in both dtypes, and rollouts that can be drawn again.

The doctor compares engine and policy cold, far from the start, after changes to the language model and to the vision
tower (weights streamed, caches reset), and after the engine has slept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adora_vl.doctor.result import Status
from adora_vl.rollout.environment import find_cpu_build
from benchmarks.gpu.isolated import REPOSITORY
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import Line, Verdict, failed, holds, skipped

_SAME_PLACE = "gpu-benchmark"


def run(setting: Setting) -> Iterator[Line]:
    if setting.on_gpu and find_cpu_build():
        yield skipped("all of it", "the vLLM that is installed is the CPU build; a GPU wants `pip install vllm`")
        return
    with tempfile.TemporaryDirectory() as folder:
        dtypes = ("bfloat16", "float32") if setting.on_gpu else ("float32",)
        for dtype in dtypes:
            yield from doctor(setting, dtype, Path(folder))
        if not setting.on_gpu:
            yield skipped("bfloat16", "the CPU engine is held in float32 here; bfloat16 is what a GPU trains in")
        yield from seeded(setting, Path(folder))


def arguments(setting: Setting, dtype: str, folder: Path) -> list[str]:
    """The arguments of the training command."""
    half = dtype == "bfloat16"
    keys: dict[str, object] = {
        "config": REPOSITORY / "configs" / "train" / "smoke_cpu.yaml", "output_dir": folder / "run", "dtype": dtype,
        "per_device_train_batch_size": 8, "num_generations": 4, "adora_synthetic_rows": 64,
        "vllm_max_model_length": 2048, "dataset_name": "synthetic",
    }  # fmt: skip
    if setting.on_gpu:
        keys |= {"use_cpu": "false", "bf16": str(half).lower(), "vllm_enable_sleep_mode": "true"}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def doctor(setting: Setting, dtype: str, folder: Path) -> Iterator[Line]:
    """A line for each of its own."""
    output = folder / f"{dtype}.json"
    command = [sys.executable, "-m", "adora_vl.doctor", *arguments(setting, dtype, folder), "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not output.is_file():
        words = (done.stderr or done.stdout).strip().splitlines()
        yield failed(f"doctor, {dtype}", f"exit code {done.returncode}: {words[-1][:300] if words else 'no output'}")
        return
    yield from (as_line(found, dtype) for found in json.loads(output.read_text(encoding="utf-8")))


def as_line(found: dict[str, Any], dtype: str) -> Line:
    """One of the doctor's lines, whose detail has figure and bound in words."""
    what, detail = f"{dtype}: {found['name']}", found["detail"]
    if found["status"] == Status.SKIPPED:
        return skipped(what, detail)
    ok = found["status"] == Status.PASSED
    return Line(what, detail, "the doctor's", Verdict.OK if ok else Verdict.FAIL, found["remedy"])


def seeded(setting: Setting, folder: Path) -> Iterator[Line]:
    """The same seeds twice from one engine, with other requests in between, and other seeds."""
    from adora_vl.doctor.probe import read_prompts, sample
    from adora_vl.prepare import prepare
    from adora_vl.train import build_trainer

    trainer: Any = build_trainer(prepare(arguments(setting, "float32", folder), to_train=False))
    try:
        rows = [trainer.train_dataset[number] for number in range(8)]
        prompts = read_prompts(trainer, rows)
        places = (_SAME_PLACE, "elsewhere", _SAME_PLACE)
        first, other, again = (sample(trainer, prompts, tokens=32, where=where).completion_ids for where in places)
    finally:
        trainer.close()
    same = sum(one == two for one, two in zip(first, again, strict=True))
    yield holds("seeded rollouts, drawn again", f"{same} of {len(first)} equal", "all", same == len(first), "float32")
    yield holds("under other seeds", "other" if other != first else "the same", "other", other != first, "")
