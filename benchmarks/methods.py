"""GRPO against ADORA, DARO and the rest of the family on the tiny model: `python -m
benchmarks.methods`.

    python -m benchmarks.methods --methods grpo,adora,daro --seeds 3 --jobs 2
    python -m benchmarks.methods --parts tau,lambda_att,lambda_amp --seeds 2 --jobs 2

Trains every (method, seed) from one start on the same rollout seeds, by
configs/train/smoke_cpu.yaml with a KL term, evaluates on the same held-out problems every few
steps, prints a table and draws the curves. The other parts vary one of ADORA's own numbers at a
time, or compare 2,000 with 10,000 training problems (`samples`). A finished run is not repeated, so
the command can be stopped and started again; `--report` only reads what is there. A run of 60 steps
takes about two minutes on a free core. It has not been run on today's drawings, so no page has its
figures.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tqdm import tqdm

from eval.scoring.statistics import half_width

REPOSITORY = Path(__file__).parents[1]
RECIPE = ("--config", "configs/train/smoke_cpu.yaml")
COMMON = (
    "--eval_strategy",
    "steps",
    "--eval_on_start",
    "true",
    "--logging_steps",
    "1",
    "--beta",
    "0.001",
    "--save_strategy",
    "no",
    "--overwrite_output_dir",
    "true",
)
TEST_ROWS = 600
Run = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """The training options that make a method what it is, its training problems, and its updates
    per generation.

    The recipe has `loss_type` grpo; a method that needs another one sets it.
    """

    options: tuple[str, ...]
    rows: int = 4096
    updates: int = 1

    def arguments(self, steps: int, eval_every: int) -> list[str]:
        """All options of a run of so many generations: the same rollouts for every method, however
        many updates.
        """
        length = (
            "--max_steps",
            str(self.updates * steps),
            "--eval_steps",
            str(self.updates * eval_every),
        )
        return [*length, *COMMON, *self.options]


def grpo(*options: str, updates: int = 1) -> Variant:
    """GRPO with something else.

    Where a generation has four updates, ratios leave 1 and clipping acts.
    """
    four = (
        "--per_device_train_batch_size",
        "32",
        "--steps_per_generation",
        "4",
    )  # of the recipe's 128 rollouts
    return Variant(
        ("--adora_method", "grpo", *options, *(four if updates == 4 else ())), updates=updates
    )


def method(name: str, *options: str) -> Variant:
    return Variant(("--adora_method", name, *options))


METHODS = {
    "grpo": grpo(),
    "dr_grpo": method("dr_grpo"),
    "lite_ppo": method("lite_ppo"),
    "dapo": method("dapo", "--adora_method.dapo.keep_settings", "beta"),
    "adora": method("adora"),
    "adora_difficulty": method("adora", "--adora_method.adora.criteria", "difficulty"),
    "adora_amplify": method(
        "adora", "--adora_method.adora.mode", "amplification", "--adora_method.adora.factor", "2"
    ),
    "daro": method("daro"),
    "mc_grpo": method("mc_grpo", "--num_generations", "9", "--per_device_train_batch_size", "144"),
    "ngrpo": method("ngrpo"),
    "a_grae": method("a_grae"),
    "canon": method("canon"),
    "d3s": method("d3s"),
    "ssb": method("ssb"),
    "rrb": method("rrb"),
    "replay": grpo("--adora_rollouts.replay", "64"),
    "vppo": grpo("--adora_extensions", "{visual_tokens: {share: 0.4, scale_min: 0.9}}"),
    # as published without a KL term: to the clean image the answers to distorted ones can be very
    # unlikely
    "noisy": grpo("--adora_extensions.noisy_rollouts.share", "0.5", "--beta", "0"),
    "large_images": grpo("--min_pixels", "12544"),  # twice as high and wide as they are drawn
    "grpo_x4": grpo(updates=4),
    "clip_higher_x4": grpo("--epsilon_high", "0.28", updates=4),
    "sapo_x4": grpo("--loss_type", "sapo", updates=4),
}
# Each is varied alone, and every part has its neutral or usual value in it.
PARTS: dict[str, dict[str, Variant]] = {
    "methods": METHODS,
    "tau": {
        f"tau_{tau:g}": method(
            "adora",
            "--adora_method.adora.criteria",
            "difficulty",
            "--adora_method.adora.tau",
            str(tau),
        )
        for tau in (0.125, 0.25, 0.5, 0.75)
    },
    "lambda_att": {
        f"att_{factor:g}": method("adora", "--adora_method.adora.factor", str(factor))
        for factor in (0.01, 0.1, 0.3, 0.6)
    },
    "lambda_amp": {
        f"amp_{factor:g}": method(
            "adora",
            "--adora_method.adora.mode",
            "amplification",
            "--adora_method.adora.factor",
            str(factor),
        )
        for factor in (1.5, 2.0, 4.0)
    },
    "samples": {
        f"{name}_{rows // 1000}k": Variant(("--adora_method", name), rows)
        for rows in (2000, 10000)
        for name in ("adora", "grpo")
    },
}
# Generations of a run and between evaluations. Those of `samples` are enough to see 2,000 problems
# twice.
LENGTHS = {"methods": (60, 10), "samples": (250, 50)}
SHORT = (40, 8)  # of the other parts

# What each logged step contributes to the curves: its key in the log, and the panel's title
CURVES = {
    "reward": ("reward", "training reward"),
    "length_right": ("adora/length_correct", "tokens of right rollouts"),
    "length_wrong": ("adora/length_wrong", "tokens of wrong rollouts"),
    "entropy": ("entropy", "entropy, nats per token"),
    "tds_share": ("adora/tds_share", "share of TDS prompts"),
    "kl": ("kl", "KL to the start, nats per token"),
    "loss": ("loss", "loss"),
    "pass_rate": ("adora/pass_rate", "pass rate of the rollouts"),
}
WEIGHT = "adora/daro/weight"


class FailedError(RuntimeError):
    """A command ended with an error."""


def command(
    words: Sequence[str | Path], log: Path | None = None, threads: int | None = None
) -> None:
    """Run from the repository's root, with so many OpenMP threads where the environment does not
    say how many.

    Raises `FailedError` with the end of what it said.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ} if threads else None
    done = subprocess.run(
        [str(w) for w in words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise FailedError(f"{shlex.join(map(str, words))}\n{done.stderr[-2000:]}")


def make_data(out: Path, rows: int) -> Path:
    """The drawn problems, made once."""
    data = out / f"data-{rows}"
    if not (data / "manifest.json").is_file():
        numbers = ["--rows", str(rows), "--test-rows", str(TEST_ROWS)]
        command([sys.executable, "-m", "data_prep", "synthetic", "--output", data, *numbers])
    return data


@dataclass(frozen=True)
class Job:
    """One run of a variant."""

    name: str
    seed: int
    variant: Variant
    arguments: tuple[str, ...]

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.seed}"


def train(out: Path, job: Job, threads: int) -> Run:
    """The figures of one run, read from its folder if it is finished with the same options."""
    folder = out / job.folder
    kept = read_result(out, job)
    if kept is not None and kept["arguments"] == list(job.arguments):
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    accelerate = Path(sys.executable).with_name("accelerate")
    words: list[str | Path] = [accelerate, "launch", "--config_file", "configs/accelerate/cpu.yaml"]
    words += ["-m", "adora_vl.train", *RECIPE, "--dataset_name", out / f"data-{job.variant.rows}"]
    words += ["--output_dir", folder, "--seed", str(job.seed), *job.arguments]
    command(words, out / f"{job.folder}.log", threads)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    found = {"name": job.name, "seed": job.seed, "arguments": list(job.arguments)}
    found |= in_generations(figures(history), job.variant.updates)
    (folder / "result.json").write_text(json.dumps(found))
    return found


def read_result(out: Path, job: Job) -> Run | None:
    result = out / job.folder / "result.json"
    return json.loads(result.read_text()) if result.is_file() else None


def train_all(out: Path, jobs: Sequence[Job], parallel: int) -> list[Run]:
    """All runs, `parallel` at a time.

    One that fails is reported and left out; starting again tries it again.

    They share the cores: the launcher would give every core to each of them, which makes them
    several times slower.
    """
    for rows in {job.variant.rows for job in jobs}:
        make_data(out, rows)
    results: dict[Job, Run] = {}
    threads = max(1, (os.cpu_count() or 1) // parallel)
    with ThreadPoolExecutor(parallel) as pool:
        waiting = {pool.submit(train, out, job, threads): job for job in jobs}
        try:
            for future in tqdm(as_completed(waiting), total=len(jobs), desc="runs", unit="run"):
                job = waiting[future]
                try:
                    results[job] = future.result()
                except FailedError as error:
                    tqdm.write(
                        f"{job.folder} failed, see {out / job.folder}.log: {error}", file=sys.stderr
                    )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[job] for job in jobs if job in results]


def figures(history: Sequence[Mapping[str, Any]]) -> Run:
    """A run's curves and what the table needs; `held_out` is [step, accuracy, low, high] of each
    evaluation.
    """
    steps = [entry for entry in history if "reward" in entry]
    weights = sorted({key for entry in steps for key in entry if key.startswith(WEIGHT)})
    keys = {name: key for name, (key, _) in CURVES.items()} | {
        key.removeprefix("adora/"): key for key in weights
    }
    curves = {
        name: [[entry["step"], entry[key]] for entry in steps if entry.get(key) is not None]
        for name, key in keys.items()
    }
    # of every step: one without rollouts of its own has no reward
    curves["step_time"] = [
        [entry["step"], entry["step_time"]] for entry in history if "step_time" in entry
    ]
    # Earlier runs have the accuracy of the held-out split under the second name.
    names = ("eval_problems_accuracy", "eval_geometry3k_accuracy")
    name = next((key for key in names if any(key in e for e in history)), names[0])
    held_out = [
        [e["step"], e[name], e[f"{name}_low"], e[f"{name}_high"]] for e in history if name in e
    ]
    fifth = max(1, len(steps) // 5)
    last = {key: _mean([value for _, value in values[-fifth:]]) for key, values in curves.items()}
    strange = {key: outliers([value for _, value in curves[key]]) for key in ("kl", "loss")}
    return {"held_out": held_out, "curves": curves, "last_fifth": last, "outliers": strange}


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if value == value]
    return fmean(finite) if finite else None


def outliers(values: Sequence[float], window: int = 11, times: float = 5.0) -> int:
    """How many values lie further from the median of the `window` around them than `times` the
    median distance.
    """
    half = window // 2
    distances = [
        abs(value - median(values[max(0, index - half) : index + half + 1]))
        for index, value in enumerate(values)
    ]
    typical = median(distances) if distances else 0.0
    return sum(distance > times * typical for distance in distances) if typical > 0 else 0


def in_generations(run: Run, updates: int) -> Run:
    """Figures by generation instead of by step.

    `generation_seconds` is the median of one with its updates.
    """
    seconds = [value for _, value in run["curves"]["step_time"]]
    sums = [sum(seconds[first : first + updates]) for first in range(0, len(seconds), updates)]
    curves = {
        name: [[step / updates, value] for step, value in points]
        for name, points in run["curves"].items()
    }
    held_out = [[step / updates, *rest] for step, *rest in run["held_out"]]
    return {
        **run,
        "curves": curves,
        "held_out": held_out,
        "generation_seconds": median(sums) if sums else None,
    }


def at_equal_seconds(run: Run, base: Run) -> float:
    """The accuracy at the last evaluation before the baseline ended; evaluations take no time here."""
    budget = base["held_out"][-1][0] * base["generation_seconds"]
    return float(
        [
            point[1]
            for point in run["held_out"]
            if point[0] * run["generation_seconds"] <= budget + 1e-9
        ][-1]
    )


def reached(held_out: Sequence[Sequence[float]], value: float) -> int | None:
    """The first evaluated generation with at least this accuracy."""
    return next((round(at) for at, accuracy, *_ in held_out if accuracy >= value - 1e-9), None)


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
    "held-out: accuracy in percent at the end; the interval is Wilson's for one run, Student's t "
    "over seeds for more.\nahead: of GRPO, in points, seed by seed, and half of the 95 % interval "
    "of the mean.\nequal s: accuracy at the last evaluation before GRPO's end; evaluations take "
    "no time here.\n*_x4: four updates per generation. s/gen.: median seconds of a generation "
    "with its updates.\nreaches: mean generation of the first evaluation at GRPO's final "
    "accuracy, or how many of the runs did.\nright, wrong: tokens of right and wrong rollouts, "
    "first and last fifth of the steps; entropy, TDS, KL: last.\n"
    "out: steps further from the median of the 11 around them than five times the run's median "
    "distance."
)


def table(results: Sequence[Run], names: Sequence[str], baseline: str = "grpo") -> list[str]:
    """One row per method. Entropy, TDS share and KL are means over the last fifth of the steps."""
    by_name = {name: [run for run in results if run["name"] == name] for name in names}
    base = {run["seed"]: run for run in by_name.get(baseline, [])}
    head = (
        f"{'method':<18}{'runs':>5}  "
        f"{'held-out [95 %]':<20}{'ahead':>11}{'equal s':>8}{'reaches':>8}"
    )
    head += f"{'right':>13}{'wrong':>13}"
    lines = [head + f"{'entropy':>9}{'TDS':>6}{'KL':>9}{'KL out':>8}{'loss out':>9}{'s/gen.':>9}"]
    for name, runs in by_name.items():
        if not runs:
            continue
        compared = "".join(
            f"{cell:>{width}}"
            for cell, width in zip(_compared(runs, base), (11, 8, 8), strict=True)
        )
        lengths = "".join(
            f"{_over_time(runs, key):>13}" for key in ("length_right", "length_wrong")
        )
        row = "".join(_cell(runs, path, form) for path, form in COLUMNS)
        lines.append(f"{name:<18}{len(runs):>5}  {_held_out(runs):<20}{compared}{lengths}{row}")
    return lines


def _held_out(runs: Sequence[Run]) -> str:
    ends = [run["held_out"][-1] for run in runs]
    mean = fmean(end[1] for end in ends)
    low, high = ends[0][2:]
    if len(runs) > 1:
        half = half_width([end[1] for end in ends])
        low = max(0.0, mean - half)
        high = min(1.0, mean + half)
    return f"{100 * mean:5.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _compared(runs: Sequence[Run], base: Mapping[int, Run]) -> tuple[str, str, str]:
    """Points ahead of the baseline seed by seed, accuracy at equal seconds, and when its final
    accuracy is reached.
    """
    pairs = [(run, base[run["seed"]]) for run in runs if run["seed"] in base]
    if not pairs:
        return "-", "-", "-"
    ahead = [100 * (run["held_out"][-1][1] - other["held_out"][-1][1]) for run, other in pairs]
    is_base = all(run is other for run, other in pairs)
    points = "-" if len(ahead) < 2 or is_base else f"{fmean(ahead):+.1f} +-{half_width(ahead):.1f}"
    timed = f"{100 * fmean(at_equal_seconds(run, other) for run, other in pairs):.1f}"
    goal = fmean(run["held_out"][-1][1] for run in base.values())
    there = [step for run in runs if (step := reached(run["held_out"], goal)) is not None]
    return (
        points,
        timed,
        f"{fmean(there):.0f}" if len(there) == len(runs) else f"{len(there)}/{len(runs)}",
    )


def _over_time(runs: Sequence[Run], name: str) -> str:
    """The mean over the first fifth of the steps, and over the last."""
    ends: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        values = [value for _, value in run["curves"][name] if value == value]
        fifth = max(1, len(values) // 5)
        for end, part in zip(ends, (values[:fifth], values[-fifth:]), strict=True):
            end += part
    return " > ".join(f"{fmean(end):.1f}" for end in ends) if all(ends) else "-"


def _cell(runs: Sequence[Run], path: Sequence[str], form: str) -> str:
    """The mean of a figure over the runs that have it."""
    values: list[Any] = list(runs)
    for key in path:
        values = [value[key] for value in values]
    known = [value for value in values if value is not None]
    return f"{fmean(known):{form}}" if known else "-".rjust(int(form.split(".")[0]))


def mean_curve(runs: Sequence[Run], name: str) -> list[tuple[float, float]]:
    """The mean over runs at each generation that all of them have."""
    curves = [
        {
            p[0]: p[1]
            for p in (run["held_out"] if name == "held_out" else run["curves"].get(name, []))
        }
        for run in runs
    ]
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [(step, fmean(curve[step] for curve in curves)) for step in shared]


def smoothed(points: Sequence[tuple[float, float]], window: int = 5) -> list[tuple[float, float]]:
    """Means over a window that ends at each point."""
    values = [value for _, value in points]
    return [
        (step, fmean(values[max(0, i - window + 1) : i + 1])) for i, (step, _) in enumerate(points)
    ]


def draw_curves(results: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """One panel per quantity with one line per method, means over the seeds; all but the held-out
    accuracy are means over five steps. The last panel has DARO's learned weights. Writes a PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "held_out": "held-out accuracy",
        **{name: title for name, (_, title) in CURVES.items()},
    }
    fig, axes = pyplot.subplots(5, 2, figsize=(13, 21), constrained_layout=True)
    colours = pyplot.get_cmap("tab20")
    for (name, title), axis in zip(panels.items(), axes.flat, strict=False):
        for number, one in enumerate(names):
            points = mean_curve([run for run in results if run["name"] == one], name)
            points = points if name == "held_out" else smoothed(points)
            if points:
                style = "-" if number < 10 else "--"
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    label=one,
                    color=colours(number % 20),
                    linewidth=1.4,
                )
        axis.set_title(title)
    last = axes.flat[len(panels)]
    daro = [run for run in results if run["name"].startswith("daro")]
    last.set_visible(bool(daro))
    last.set_title("DARO's weights by right rollouts")
    for name in sorted(
        {name for run in daro for name in run["curves"] if name.startswith("daro/weight_")}
    ):
        label = name.removeprefix("daro/weight_").replace("_", " ")
        last.plot(*zip(*mean_curve(daro, name), strict=True), label=label, linewidth=1.4)
    for axis in axes.flat:
        axis.set_xlabel("generation")
        axis.grid(alpha=0.3)
    for axis in (axes.flat[0], *([last] if daro else [])):
        axis.legend(fontsize=8, ncols=2)
    fig.savefig(path, dpi=90)
    pyplot.close(fig)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default="methods", help=f"some of {','.join(PARTS)} (%(default)s)"
    )
    parser.add_argument(
        "--methods", default=",".join(METHODS), help="of the part methods; default: all"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, help="generations of a run; default: 60, 250 for samples, else 40"
    )
    parser.add_argument("--eval-every", type=int, help="generations; default: 10, 50 and 8")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument(
        "--report", action="store_true", help="only make the tables and curves of the finished runs"
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "methods")
    options = parser.parse_args()
    for option, known in (("parts", PARTS), ("methods", METHODS)):
        names = getattr(options, option).split(",")
        setattr(options, option, names)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option}: unknown {unknown[0]!r}, use some of {', '.join(known)}")
    return options


def main() -> int:
    options = parse()
    out = options.output.resolve()
    missing = 0
    out.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        names = options.methods if part == "methods" else list(PARTS[part])
        steps, eval_every = LENGTHS.get(part, SHORT)
        steps = options.steps or steps
        eval_every = options.eval_every or eval_every
        # seed by seed, so that an unfinished comparison is a complete one with fewer seeds
        jobs = [
            Job(name, seed, variant, tuple(variant.arguments(steps, eval_every)))
            for seed in range(options.seeds)
            for name, variant in ((name, PARTS[part][name]) for name in names)
        ]
        if options.report:
            results = [found for job in jobs if (found := read_result(out, job)) is not None]
        else:
            results = train_all(out, jobs, options.jobs)
        missing += len(jobs) - len(results)
        print("\n".join([f"\n{part}", *table(results, names)]), flush=True)
        draw_curves(results, names, out / f"{part}.png")
        print(f"Curves: {out / part}.png")
    print(f"\n{LEGEND}")
    return 0 if options.report or not missing else 1


if __name__ == "__main__":
    sys.exit(main())
