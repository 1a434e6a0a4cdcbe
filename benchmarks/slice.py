"""A slice of Qwen2.5-VL-7B through the real training command: `python -m benchmarks.slice`.

Builds the model (published widths, few layers, random weights) and its data where they are missing, trains with
`configs/train/slice_7b_cpu.yaml` in one process and under ZeRO-3 with two, makes each run's page, and prints a table:
the distance of engine and trainer by position, the peak of a process's memory against the prediction, seconds by phase,
the page. What follows `--` goes to the training (`-- --max_completion_length 64`). `python -m benchmarks.slice build`
builds alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adora_vl.memory import GIB
from adora_vl.rollout_log.metrics_file import METRICS, read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = "configs/train/slice_7b_cpu.yaml"
# name -> accelerate config, and further words. Two processes keep a generation at two prompts. So that they fit into
# 24 GB, they divide one engine, and a micro-batch is half a group.
_DIVIDED = ["--vllm_tensor_parallel_size", "2", "--vllm_gpu_memory_utilization", "0.15"]
CASES: dict[str, tuple[str, list[str]]] = {
    "one": ("cpu", []),
    "zero3": ("cpu_zero3", ["--per_device_train_batch_size", "4", *_DIVIDED]),
}
ROWS = 8
PHASES = ("rollout", "policy", "sync", "grading", "other")


def build(folder: Path, layers: int, blocks: int) -> None:
    """Model and data of the slice, unless they are there; the model is renamed into place when it is whole."""
    from benchmarks.slice_model import build_model, draw_rows, slice_config, write_data

    rows = draw_rows(ROWS)
    write_data(folder / "data", rows)
    if _layers_of(folder / "model") == (layers, blocks):
        return
    partial = folder / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    count = build_model(partial, slice_config(layers, blocks), rows)
    shutil.rmtree(folder / "model", ignore_errors=True)
    partial.rename(folder / "model")
    print(f"{folder / 'model'}: {count / 1e9:.2f} billion parameters", flush=True)


def _layers_of(model: Path) -> tuple[int, int] | None:
    file = model / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return config["text_config"]["num_hidden_layers"], config["vision_config"]["depth"]


def _launch(name: str, module: str, folder: Path, words: Sequence[str]) -> list[str]:
    accelerate, case = CASES[name]
    own = ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data"), *case]
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    launcher += ["--config_file", f"configs/accelerate/{accelerate}.yaml"]
    return [*launcher, "-m", module, "--config", CONFIG, *own, *words]


def predicted(name: str, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """What the dry run says of the same command."""
    file = folder / "dry_run.json"
    command = _launch(name, "adora_vl.train", folder, [*words, "--dry-run", "--json", str(file)])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def train(name: str, folder: Path, words: Sequence[str]) -> float:
    """Run it, and leave what the observer saw in `NAME-seen`. Returns seconds."""
    seen = folder / f"{name}-seen"
    shutil.rmtree(seen, ignore_errors=True)
    seen.mkdir()
    own = [*words, "--output_dir", str(folder / name), "--overwrite_output_dir", "true"]
    began = time.perf_counter()
    with (folder / f"{name}.log").open("w") as log:
        command = _launch(name, "benchmarks.slice_run", folder, own)
        environment = {**os.environ, "SLICE_SEEN": str(seen)}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n{(folder / f'{name}.log').read_text()[-3000:]}")
    return time.perf_counter() - began


def peaks(seen: Path) -> dict[str, int]:
    """The largest of all ranks, in bytes: of the libraries alone, until the first step, in training; and resident with
    mapped files.
    """
    ranks = [json.loads(file.read_text()) for file in sorted(seen.glob("rank-*.memory.json"))]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def gaps_by_place(folder: Path) -> list[list[float]]:
    """Absolute differences in nats at each place of the answers, over all ranks and steps."""
    places: list[list[float]] = []
    for file in sorted(folder.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines():
            for place, gaps in enumerate(json.loads(line)["gaps"]):
                places.extend([[] for _ in range(place + 1 - len(places))])
                places[place] += gaps
    return places


def by_quarters(places: Sequence[Sequence[float]]) -> list[tuple[int, int, float, float]]:
    """(first place, last place, mean, largest) of four equal parts of the answers."""
    ends = [round(len(places) * part / 4) for part in range(5)]
    spans = list(itertools.pairwise(ends))
    parts = [(first, last - 1, [gap for place in places[first:last] for gap in place]) for first, last in spans]
    return [(first, last, statistics.fmean(gaps), max(gaps)) for first, last, gaps in parts if gaps]


def page(run: Path) -> tuple[float, float]:
    """Seconds to make the report page, and its megabytes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "adora_vl.report", str(run)], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began, (run / "report.html").stat().st_size / 1e6


def report(name: str, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """One run with all its figures."""
    plan = predicted(name, folder, words)
    seconds, seen = train(name, folder, words), folder / f"{name}-seen"
    metrics = read_metrics(folder / name / METRICS)
    steps = [{key: line.get(key) for key in ("reward", "adora/drift", "grad_norm", *(f"seconds/{p}" for p in PHASES))}
             for line in metrics if line["kind"] == "train"]  # fmt: skip
    figures = {
        "seconds": seconds,
        "peaks": peaks(seen),
        "predicted_bytes": plan["peak_bytes"],
        "phases": plan["phases"],
        "steps": steps,
        "drift": by_quarters(gaps_by_place(seen)),
        "page": page(folder / name),
    }
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1))
    return figures


def table(name: str, figures: dict[str, Any]) -> str:
    """What a person reads of it."""
    made, size = figures["page"]
    gib = {name: value / GIB for name, value in figures["peaks"].items()}
    own, plan = gib["training"] - gib["libraries"], figures["predicted_bytes"] / GIB
    starting = gib["start"] - gib["libraries"]
    lines = [
        f"{name}: {figures['seconds']:.0f} s in all; page made in {made:.1f} s, {size:.2f} MB",
        f"  memory of a process in training {own:.2f} GiB beside {gib['libraries']:.2f} of libraries",
        f"  predicted {plan:.2f} ({plan / own - 1:+.0%}); while the engine starts {starting:.2f}",
        f"  resident at most {gib['resident']:.2f} GiB, mapped weights included",
    ]
    for number, step in enumerate(figures["steps"], start=1):
        phases = ", ".join(f"{p} {step[f'seconds/{p}'] or 0:.1f}" for p in PHASES)
        drift = step["adora/drift"]
        lines.append(f"  step {number}: drift {drift if drift is None else f'{drift:.5f}'}, seconds: {phases}")
    for first, last, mean, largest in figures["drift"]:
        lines.append(f"  tokens {first:>4} to {last:>4}: mean {mean:.5f}, largest {largest:.5f} nats")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("build", "run"), default="run")
    parser.add_argument("--layers", type=int, default=1, help="decoder layers (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="vision blocks (%(default)s)")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/slice"))
    words = sys.argv[1:]
    own, more = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser.parse_args(own)
    unknown = [name for name in options.cases.split(",") if name not in CASES]
    if unknown:
        sys.exit(f"--cases: {unknown[0]!r} is not one of {', '.join(CASES)}")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build(folder, options.layers, options.blocks)
    for name in options.cases.split(",") if options.what == "run" else []:
        print(table(name, report(name, folder, more)), flush=True)


if __name__ == "__main__":
    main()
