"""GRPO against ADORA, DARO and the rest of the family on the tiny model, from one start on the same rollout seeds.

    python -m benchmarks.advantages --methods grpo,adora,daro --seeds 3 --jobs 2

Trains every (method, seed) by the demo's recipe with a KL term, evaluates on the same held-out problems every few
steps, prints a table and writes `OUTPUT/index.html` with the curves. A finished run is not repeated, so the command can
be stopped and started again; `--report` only reads what is there. A run of 60 steps takes about two minutes on a free
core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import REPOSITORY, Job, finished, make_data, train_all

KEEP_BETA = '{"keep_settings": ["beta"]}'
# A generation of the recipe's 128 rollouts in four updates of 32, where ratios leave 1 and clipping acts
FOUR_UPDATES = ("--per_device_train_batch_size", "32", "--steps_per_generation", "4")
# What each name trains with. The recipe has loss_type grpo; a method that needs another one sets it.
METHODS: dict[str, tuple[str, ...]] = {
    "grpo": ("--adora_method", "grpo"),
    "dr_grpo": ("--adora_method", "dr_grpo"),
    "lite_ppo": ("--adora_method", "lite_ppo"),
    "dapo": ("--adora_method", "dapo", "--adora_method_options", KEEP_BETA),
    "adora": ("--adora_method", "adora"),
    "adora_difficulty": ("--adora_criteria", "difficulty"),
    "adora_amplify": ("--adora_mode", "amplification", "--adora_factor", "2"),
    "daro": ("--adora_method", "daro"),
    "mc_grpo": ("--adora_method", "mc_grpo", "--num_generations", "9", "--per_device_train_batch_size", "144"),
    "ngrpo": ("--adora_method", "ngrpo"),
    "a_grae": ("--adora_method", "a_grae"),
    "canon": ("--adora_method", "canon"),
    "d3s": ("--adora_method", "d3s"),
    "ssb": ("--adora_method", "ssb"),
    "rrb": ("--adora_method", "rrb"),
    "replay": ("--adora_method", "grpo", "--adora_replay_groups", "64"),
    "vppo": ("--adora_method", "grpo", "--adora_visual_tokens", "0.4", "--adora_visual_scale_min", "0.9"),
    # as published without a KL term: to the clean image the answers to distorted ones can be very unlikely
    "noisy": ("--adora_method", "grpo", "--adora_noisy_rollouts", "0.5", "--beta", "0"),
    "large_images": ("--adora_method", "grpo", "--min_pixels", "12544"),  # twice as high and wide as they are drawn
    "grpo_x4": ("--adora_method", "grpo", *FOUR_UPDATES),
    "clip_higher_x4": ("--adora_method", "grpo", "--epsilon_high", "0.28", *FOUR_UPDATES),
    "sapo_x4": ("--adora_method", "grpo", "--loss_type", "sapo", *FOUR_UPDATES),
}


def updates(name: str) -> int:
    """How many optimizer steps a method takes per generation."""
    return 4 if name.endswith("_x4") else 1


def numbers(name: str, steps: int, eval_every: int) -> tuple[str, ...]:
    """The options for the length of a run: the same rollouts for every method, in four times the updates for `*_x4`."""
    times = updates(name)
    return ("--max_steps", str(times * steps), "--eval_steps", str(times * eval_every))


def in_generations(run: dict[str, Any]) -> dict[str, Any]:
    """Its figures by generation instead of by step: four steps are one in a run of `*_x4`. `generation_seconds` is the
    median of a generation with its updates.
    """
    times = updates(run["name"])
    seconds = [value for _, value in run["curves"]["step_time"]]
    sums = [sum(seconds[first : first + times]) for first in range(0, len(seconds), times)]
    curves = {name: [[step / times, value] for step, value in points] for name, points in run["curves"].items()}
    held_out = [[step / times, *rest] for step, *rest in run["held_out"]]
    return {**run, "curves": curves, "held_out": held_out, "generation_seconds": statistics.median(sums)}


def at_equal_seconds(run: dict[str, Any], base: dict[str, Any]) -> float:
    """Its accuracy when the baseline has ended: at the last evaluation before, without the time of evaluations."""
    budget = base["held_out"][-1][0] * base["generation_seconds"]
    return float([point[1] for point in run["held_out"] if point[0] * run["generation_seconds"] <= budget + 1e-9][-1])


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean over seeds, by Student's t."""
    quantile = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(values), 2.3)
    return quantile * statistics.stdev(values) / len(values) ** 0.5


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of an accuracy's mean over seeds."""
    middle, half = statistics.fmean(values), half_width(values)
    return max(0.0, middle - half), min(1.0, middle + half)


def against(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] | None) -> str:
    """Points ahead of the baseline at the end, seed by seed, and half of the 95 % interval of their mean."""
    ends = {run["seed"]: run["held_out"][-1][1] for run in base or ()}
    ahead = [100 * (run["held_out"][-1][1] - ends[run["seed"]]) for run in runs if run["seed"] in ends]
    if len(ahead) < 2 or runs is base:
        return "-"
    return f"{statistics.fmean(ahead):+.1f} +-{half_width(ahead):.1f}"


def reached(held_out: Sequence[Sequence[float]], value: float) -> int | None:
    """The first evaluated step with at least this accuracy."""
    return next((round(step) for step, accuracy, *_ in held_out if accuracy >= value - 1e-9), None)


def _average(runs: Sequence[dict[str, Any]], *path: str) -> float | None:
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value[key]
        values.append(value)
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _over_time(runs: Sequence[dict[str, Any]], name: str) -> str:
    """The mean over the first fifth of the steps, and over the last."""
    ends: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        values = [value for _, value in run["curves"][name] if value == value]
        fifth = max(1, len(values) // 5)
        for end, part in zip(ends, (values[:fifth], values[-fifth:]), strict=True):
            end += part
    return " > ".join(f"{statistics.fmean(end):.1f}" for end in ends) if all(ends) else "-"


def _timed(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] | None) -> str:
    of_seed = {run["seed"]: run for run in base or ()}
    values = [at_equal_seconds(run, of_seed[run["seed"]]) for run in runs if run["seed"] in of_seed]
    return f"{100 * statistics.fmean(values):.1f}" if values else "-"


def table(results: Sequence[dict[str, Any]], names: Sequence[str], baseline: str = "grpo") -> list[str]:
    """One row per method. Entropy, TDS share and KL are means over the last fifth of the steps."""
    by_name = {name: [run for run in results if run["name"] == name] for name in names}
    base = by_name.get(baseline)
    goal = statistics.fmean(run["held_out"][-1][1] for run in base) if base else None
    head = f"{'method':<18}{'runs':>5}  {'held-out [95 %]':<20}{'ahead':>11}{'equal s':>8}{'reaches':>8}"
    head += f"{'right':>13}{'wrong':>13}"
    lines = [head + f"{'entropy':>9}{'TDS':>6}{'KL':>9}{'KL out':>8}{'loss out':>9}{'s/gen.':>9}"]
    for name, runs in by_name.items():
        if not runs:
            continue
        ends = [run["held_out"][-1] for run in runs]
        accuracies = [end[1] for end in ends]
        low, high = t_interval(accuracies) if len(runs) > 1 else (ends[0][2], ends[0][3])
        held = f"{100 * statistics.fmean(accuracies):5.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        steps = [reached(run["held_out"], goal) for run in runs] if goal is not None else []
        there = [step for step in steps if step is not None]
        reach = f"{statistics.fmean(there):.0f}" if there and len(there) == len(runs) else f"{len(there)}/{len(runs)}"
        reach = reach if goal is not None else "-"
        lengths = "".join(f"{_over_time(runs, key):>13}" for key in ("length_right", "length_wrong"))
        cells = [(_average(runs, *path), form) for path, form in COLUMNS]
        row = "".join(
            f"{value:{form}}" if value is not None else "-".rjust(int(form.split(".")[0])) for value, form in cells
        )
        compared = f"{against(runs, base):>11}{_timed(runs, base):>8}{reach:>8}"
        lines.append(f"{name:<18}{len(runs):>5}  {held:<20}{compared}{lengths}{row}")
    return lines


# where the number of a column is in a run's figures, and its format
COLUMNS = (
    (("last_fifth", "entropy"), "9.3f"),
    (("last_fifth", "tds_share"), "6.2f"),
    (("last_fifth", "kl"), "9.4f"),
    (("outliers", "kl"), "8.1f"),
    (("outliers", "loss"), "9.1f"),
    (("generation_seconds",), "9.2f"),
)
LEGEND = (
    "held-out: accuracy in percent at the end; the interval is Wilson's for one run, Student's t over seeds for more.\n"
    "ahead: of GRPO, in points, seed by seed, and half of the 95 % interval of the mean.\n"
    "equal s: accuracy at the last evaluation before GRPO's end; evaluations take no time here.\n"
    "*_x4: four updates per generation. s/gen.: median seconds of a generation with its updates.\n"
    "reaches: mean generation of the first evaluation at GRPO's final accuracy, or how many of the runs did.\n"
    "right, wrong: tokens of right and wrong rollouts, first and last fifth of the steps; entropy, TDS, KL: last.\n"
    "out: steps further from the median of the 11 around them than five times the run's median distance."
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--prefix", default="", help="put before each training command, such as 'nice -n 10'")
    parser.add_argument("--report", action="store_true", help="only make the table and the page from the finished runs")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "advantages")
    options = parser.parse_args()
    for name in options.methods.split(","):
        if name not in METHODS:
            parser.error(f"--methods: unknown {name!r}, use some of {', '.join(METHODS)}")
    return options


def main() -> int:
    options = parse()
    from benchmarks.plots import write_page

    out, names = options.output.resolve(), options.methods.split(",")
    common = (
        "--eval_strategy",
        "steps",
        "--eval_on_start",
        "true",
        "--logging_steps",
        "1",
        "--beta",
        "0.001",
    )
    # seed by seed, so that an unfinished comparison is a complete one with fewer seeds
    jobs = [
        Job(name, seed, METHODS[name], (*numbers(name, options.steps, options.eval_every), *common))
        for seed in range(options.seeds)
        for name in names
    ]
    if options.report:
        results = finished(out, jobs)
    else:
        results = train_all(out, jobs, make_data(out), options.jobs, options.prefix)
    results = [in_generations(run) for run in results]
    lines = table(results, names)
    print("\n".join([*lines, "", LEGEND]))
    print(f"Curves: {write_page(out, results, names, lines, LEGEND)}")
    return 0 if options.report or len(results) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
