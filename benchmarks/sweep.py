"""ADORA's own numbers on the tiny model: tau, lambda_att, lambda_amp, and 2K against 10K training problems.

    python -m benchmarks.sweep --seeds 2 --jobs 2

Each is varied alone around the recipe of the comparison (`benchmarks.advantages`), whose runs are not shared. Finished
runs are kept, so the command can be stopped and started again; `--report` prints the finished runs. The runs of the
last part are long enough to see 2,000 problems twice; all others have `--steps`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.advantages import LEGEND, in_generations, table
from benchmarks.runs import REPOSITORY, Job, finished, make_data, train_all

TAUS = (0.125, 0.25, 0.5, 0.75)
ATTENUATIONS = (0.01, 0.1, 0.3, 0.6)
AMPLIFICATIONS = (1.5, 2.0, 4.0)
SAMPLES = (2000, 10000)


def variants() -> dict[str, dict[str, tuple[str, ...]]]:
    """Part -> name -> training options. Every part has its neutral or usual value in it."""
    amplify = ("--adora_mode", "amplification", "--adora_factor")
    return {
        "tau": {f"tau_{tau:g}": ("--adora_criteria", "difficulty", "--adora_tau", str(tau)) for tau in TAUS},
        "lambda_att": {f"att_{factor:g}": ("--adora_factor", str(factor)) for factor in ATTENUATIONS},
        "lambda_amp": {f"amp_{factor:g}": (*amplify, str(factor)) for factor in AMPLIFICATIONS},
        "samples": {f"{method}_{rows // 1000}k": options for rows in SAMPLES
                    for method, options in (("adora", ()), ("grpo", ("--adora_method", "grpo")))},
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(variants()), help="comma-separated; default: all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample-steps", type=int, default=250, help="of the part samples")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--prefix", default="", help="words before each training command, such as 'nice -n 10'")
    parser.add_argument("--report", action="store_true", help="only print the tables of the finished runs")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "sweep")
    options = parser.parse_args()
    for part in options.parts.split(","):
        if part not in variants():
            parser.error(f"--parts: unknown {part!r}, use some of {', '.join(variants())}")
    return options


def main() -> int:
    options = parse()
    out, missing = options.output.resolve(), 0
    for part in options.parts.split(","):
        named = variants()[part]
        steps = options.sample_steps if part == "samples" else options.steps
        evaluation = ("--eval_strategy", "steps", "--eval_steps", str(max(1, steps // 5)), "--eval_on_start", "true")
        common = ("--max_steps", str(steps), *evaluation, "--logging_steps", "1", "--beta", "0.001")
        jobs = [Job(name, seed, named[name], common) for seed in range(options.seeds) for name in named]
        if options.report:
            results = finished(out, jobs)
        else:
            results = []
            for rows in SAMPLES if part == "samples" else (4096,):
                chosen = [job for job in jobs if part != "samples" or job.name.endswith(f"_{rows // 1000}k")]
                results += train_all(out, chosen, make_data(out, rows), options.jobs, options.prefix)
        missing += len(jobs) - len(results)
        print(f"\n{part}, {steps} steps")
        print("\n".join(table([in_generations(run) for run in results], list(named), baseline="")), flush=True)
    print(f"\n{LEGEND}")
    return 0 if options.report or not missing else 1


if __name__ == "__main__":
    sys.exit(main())
