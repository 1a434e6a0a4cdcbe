"""Training runs that are compared: started as a user would, kept when finished, reduced to their figures."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

REPOSITORY = Path(__file__).parents[1]
# What each logged step contributes to the curves: name, key of the log
CURVES = {
    "reward": "reward",
    "length_right": "adora/length_correct",
    "length_wrong": "adora/length_wrong",
    "entropy": "entropy",
    "tds_share": "adora/tds_share",
    "kl": "kl",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "pass_rate": "adora/pass_rate",
}


@dataclass(frozen=True)
class Job:
    """One run: a folder's name, the training options that make it what it is, and its seed."""

    name: str
    seed: int
    arguments: tuple[str, ...]
    common: tuple[str, ...] = field(default=(), repr=False)

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.seed}"


def outliers(values: Sequence[float], window: int = 11, times: float = 5.0) -> int:
    """How many values lie further from the median of the `window` around them than `times` the median distance."""
    half = window // 2
    distances = [
        abs(value - statistics.median(values[max(0, index - half) : index + half + 1]))
        for index, value in enumerate(values)
    ]
    typical = statistics.median(distances) if distances else 0.0
    return sum(distance > times * typical for distance in distances) if typical > 0 else 0


def figures(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A run's curves and what the table needs; `held_out` is [step, accuracy, low, high] of each evaluation."""
    steps = [entry for entry in history if "reward" in entry]
    curves = {
        name: [[entry["step"], entry[key]] for entry in steps if entry.get(key) is not None]
        for name, key in CURVES.items()
    }
    # of every step: one without rollouts of its own has no reward
    curves["step_time"] = [[entry["step"], entry["step_time"]] for entry in history if "step_time" in entry]
    weights = sorted({key for entry in steps for key in entry if key.startswith("adora/daro/weight")})
    for key in weights:
        curves[key.removeprefix("adora/")] = [[entry["step"], entry[key]] for entry in steps if key in entry]
    name = "eval_geometry3k_accuracy"
    held_out = [[e["step"], e[name], e[f"{name}_low"], e[f"{name}_high"]] for e in history if name in e]
    fifth = max(1, len(steps) // 5)
    last = {key: _mean([value for _, value in values[-fifth:]]) for key, values in curves.items()}
    return {
        "held_out": held_out,
        "curves": curves,
        "last_fifth": last,
        "outliers": {key: outliers([value for _, value in curves[key]]) for key in ("kl", "loss")},
        "seconds": next((e["train_runtime"] for e in reversed(history) if "train_runtime" in e), None),
    }


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if value == value]
    return statistics.fmean(finite) if finite else None


class FailedError(RuntimeError):
    """A command ended with an error."""


def command(words: Sequence[str | Path], log: Path | None = None, threads: int | None = None) -> None:
    """Run from the repository's root, with so many OpenMP threads where the environment does not say how many.

    Raises `FailedError` with the end of what it said.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ} if threads else None
    done = subprocess.run(
        [str(w) for w in words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise FailedError(f"{shlex.join(map(str, words))}\n{done.stderr[-2000:]}")


def make_data(out: Path, rows: int = 4096, test_rows: int = 600) -> Path:
    """The drawn problems, made once."""
    data = out / f"data-{rows}"
    if not (data / "manifest.json").is_file():
        numbers = ["--rows", str(rows), "--test-rows", str(test_rows)]
        command([sys.executable, "-m", "data_prep", "synthetic", "--output", data, *numbers])
    return data


def _kept(result: Path) -> dict[str, Any]:
    """A result; one from before a figure was added gets it from the log of its run."""
    found: dict[str, Any] = json.loads(result.read_text())
    if "step_time" not in found["curves"]:
        found |= figures(json.loads(result.with_name("trainer_state.json").read_text())["log_history"])
    return found


def train(out: Path, job: Job, data: Path, prefix: Sequence[str], threads: int) -> dict[str, Any]:
    """The figures of one run, read from its folder if it is finished with the same options."""
    folder = out / job.folder
    result, words = folder / "result.json", [*job.common, *job.arguments]
    if result.is_file():
        kept = _kept(result)
        if kept["arguments"] == words:
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    launch = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--config_file",
        "configs/accelerate/cpu.yaml",
    ]
    run = ["-m", "adora_vl.train", "--config", "configs/train/smoke_cpu.yaml", "--dataset_name", str(data)]
    own = [
        "--output_dir",
        str(folder),
        "--seed",
        str(job.seed),
        "--overwrite_output_dir",
        "true",
        "--save_strategy",
        "no",
    ]
    started = time.perf_counter()
    command([*prefix, *launch, *run, *own, *words], out / f"{job.folder}.log", threads)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    found = {"name": job.name, "seed": job.seed, "arguments": words, **figures(history)}
    found["wall_seconds"] = time.perf_counter() - started
    result.write_text(json.dumps(found))
    return found


def train_all(out: Path, jobs: Sequence[Job], data: Path, parallel: int, prefix: str = "") -> list[dict[str, Any]]:
    """All runs, `parallel` at a time. One that fails is reported and left out; starting again tries it again.

    They share the cores: the launcher would give every core to each of them, which makes them several times slower.
    """
    results: dict[Job, dict[str, Any]] = {}
    threads = max(1, (os.cpu_count() or 1) // parallel)
    with ThreadPoolExecutor(parallel) as pool:
        waiting = {pool.submit(train, out, job, data, shlex.split(prefix), threads): job for job in jobs}
        try:
            for future in tqdm(as_completed(waiting), total=len(jobs), desc="runs", unit="run"):
                job = waiting[future]
                try:
                    results[job] = future.result()
                except FailedError as error:
                    tqdm.write(f"{job.folder} failed, see {out / job.folder}.log: {error}", file=sys.stderr)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[job] for job in jobs if job in results]


def finished(out: Path, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Only the results that were kept."""
    paths = [out / job.folder / "result.json" for job in jobs]
    return [_kept(path) for path in paths if path.is_file()]
