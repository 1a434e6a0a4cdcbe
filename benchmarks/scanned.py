"""Compares ADORA with GRPO on handwritten digits: `python -m benchmarks.scanned`.

It needs `pip install scikit-learn`. The task is the demo's, the last digit of a perimeter, with two
differences: scanned digits stand at the figure in place of drawn ones, and the last digit alone is
rewarded. `benchmarks/scanned.yaml` is the plan: question, unit, stopping rule, and all settings. No
scanned picture is in both the train and the test split. Every finished run is a line of
OUTPUT/runs.jsonl. The command can be stopped and started again, and goes on with what is missing,
in the order of the plan. `--pilot` runs the pilot's seeds alone. `--tables` prints the tables of
docs/experiments.md from `benchmarks/scanned.jsonl`.

`--card` is the same for a model of 60 million parameters in bfloat16 on one GPU, by the plan of
`benchmarks/scanned_card.yaml`. `--width`, `--layers` and `--dtype` choose another size for either
plan; `--rehearse` tries the command with two steps of everything.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from PIL import Image

from adora_vl.builtin import SHIPPED_SIZE, ModelSize
from adora_vl.evals.scoring.statistics import paired_t_interval
from adora_vl.synthetic.drawing import OVERSAMPLING, Canvas, Point
from adora_vl.synthetic.perimeter import USUAL_DIGITS, perimeter_digit
from adora_vl.utils.cli import Parser, number_between, run_command
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import read_json_object
from adora_vl.utils.launch import prepare_engine_environment, use_expandable_segments
from benchmarks.attenuation.start import hash_of_weights

if TYPE_CHECKING:
    from adora_vl.builtin.small_model import UntrainedModel
    from adora_vl.builtin.tiny_perimeter import PerimeterStart
    from adora_vl.data.dataset import Row
    from adora_vl.trainer import AdoraGRPOTrainer

REPOSITORY = Path(__file__).parents[1]
PLAN = Path(__file__).with_suffix(".yaml")
CARD_PLAN = PLAN.with_name("scanned_card.yaml")
STORED_RUNS = Path(__file__).with_suffix(".jsonl")
DEMO_CONFIG = REPOSITORY / "configs" / "train" / "demo_cpu.yaml"
PICTURE_PIXELS = 56  # pixels of a picture, as the tiny model's
Digits = dict[str, list[Image.Image]]  # the scanned pictures of each digit
Plan = dict[str, Any]
Run = dict[str, Any]
RunPlace = tuple[str, int, int, str]  # case, start, seed, arm


# What a rehearsal has in the place of a plan's numbers: two steps of each lesson and of each arm.
REHEARSAL_NUMBERS: dict[str, dict[str, object]] = {
    "rows": {"train": 16, "test": 8},
    "start": {"steps": 2, "short_prompt_steps": 1, "teacher_steps": 2, "batch_size": 2, "rows": 16},
    "train": {
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "eval_steps": 1,
        "adora_eval_limit": 8,
        "max_completion_length": 16,
    },
}


def rehearsal_of(plan: Plan, folder: Path) -> Plan:
    """Return a plan of the same model and arms with numbers that count for nothing.

    An untaught model is never right, so a reward that differs by chance is added; else no step
    would have a gradient. `folder`: where its file is written.
    """
    from benchmarks.gpu.engine import REWARD

    file = folder / "rewards.py"
    file.write_text(REWARD)
    rehearsal = {**plan, "starts": plan["starts"][:1], "seeds": plan["seeds"][:1]}
    for part, numbers in REHEARSAL_NUMBERS.items():
        rehearsal[part] = {**plan[part], **numbers}
    every_step = f"{DEMO_CONFIG.with_name('every_step.py')}:every_step"
    rehearsal["train"]["adora_reward"] = ["accuracy", every_step, f"{file}:varied"]
    rehearsal["train"]["reward_weights"] = [*plan["train"]["reward_weights"], 1]
    return rehearsal


def size_of(plan: Plan) -> ModelSize | None:
    """Return the size of the plan's model; None where the shipped model goes on."""
    return ModelSize(**plan["model"]) if "model" in plan else None


def with_model_size(plan: Plan, sizes: Mapping[str, Any]) -> Plan:
    """Return a plan with another width, depth or dtype; a None in `sizes` leaves what is there.

    Raises `UserError` for what is no size of a model.
    """
    chosen = {key: value for key, value in sizes.items() if value is not None}
    if not chosen:
        return plan
    size = replace(size_of(plan) or SHIPPED_SIZE, **chosen)
    return {**plan, "model": asdict(size)}


def machine_keys(size: ModelSize | None, device: str) -> dict[str, bool]:
    """Return the keys of the training config that the machine and the model's dtype decide.

    The policy keeps float32 weights in either dtype, since bfloat16 would swallow updates of these
    rates; with `bf16` the policy and the engine compute in bfloat16.
    """
    keys = {"use_cpu": device == "cpu"}
    if size is not None:
        keys["bf16"] = size.dtype == "bfloat16"
    return keys


def commit_of_runs() -> str:
    """Return the commit that the runs are made from, with a plus sign if files differ from it.

    It is `unknown` outside of a repository, and where git is not installed.
    """
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        described = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def sign_flips(differences: Sequence[float]) -> float:
    """Return the exact two-sided p of the sign-flip test for paired differences.

    Of all 2^n ways to give n differences a sign, it is the share whose sum is at least as far from
    0 as the sum of the differences as they are. For 1, 2 and 3 it is 2 of 8: only all plus and all
    minus are as far from 0 as 6.
    """
    size = abs(sum(differences)) * (1 - 1e-12)  # what differs by rounding counts as equal
    flips = product(*((difference, -difference) for difference in differences))
    far = [abs(sum(flipped)) >= size for flipped in flips]
    return sum(far) / len(far)


def mean_and_interval(differences: Sequence[float]) -> str:
    """Return the mean with its 95 % interval, as `+4.1 [+1.0, +7.2]`.

    In bold where 0 lies outside.
    """
    if len(differences) < 2:
        return "-"
    mean = statistics.fmean(differences)
    interval = paired_t_interval(differences)
    if interval is None:  # equal differences
        return f"{mean:+.1f}"
    low, high = interval
    text = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def scanned_digits(split: str, pixels: int) -> Digits:
    """Return the pictures of a split, black on white: of each digit one in five is for testing.

    Raises `SystemExit` where scikit-learn, which has them, is not installed.
    """
    try:
        loaded = import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise SystemExit(
            "benchmarks.scanned: the scanned digits come with scikit-learn; pip install "
            "scikit-learn"
        ) from None
    digits: Digits = defaultdict(list)
    for grey, digit in zip(loaded.images, loaded.target, strict=True):  # 8 x 8 numbers from 0 to 16
        small = Image.fromarray((255 - grey * 255 / 16).astype("uint8")).convert("RGB")
        digits[str(digit)].append(small.resize((pixels, pixels), Image.Resampling.BICUBIC))
    for digit, pictures in digits.items():
        random.Random(f"scanned/{digit}").shuffle(pictures)
        tests = len(pictures) // 5
        digits[digit] = pictures[:tests] if split == "test" else pictures[tests:]
    return digits


def draw_rows(
    number: int, split: str, seed: int, pixels: int, one_digit: float = 0.0
) -> list[dict[str, Any]]:
    """Draw problems whose two sides at the figure are scanned digits, `pixels` wide.

    Each picture of a digit is one of its split's.

    `one_digit`: the share of the problems that are drawn until their answer is the first of the
    usual digits, so that a guess of this digit is often right.
    """
    rng = random.Random(f"scanned/{split}/{seed}")
    digits = scanned_digits(split, pixels * OVERSAMPLING)

    class Paper(Canvas):
        def label(self, text: str, centre: Point) -> None:
            """Paste a scanned picture of each digit side by side, in place of the drawn text."""
            (x, y) = self._scaled([centre])[0]
            side = pixels * OVERSAMPLING
            for position, digit in enumerate(text):
                digit_x = x + side * (position - len(text) / 2)
                self._image.paste(rng.choice(digits[digit]), (round(digit_x), round(y - side / 2)))

    rows = []
    for index in range(number):
        is_one_digit = rng.random() < one_digit
        problem = perimeter_digit(rng, PICTURE_PIXELS, canvas_class=Paper)
        while is_one_digit and problem.answer != str(USUAL_DIGITS[0]):
            problem = perimeter_digit(rng, PICTURE_PIXELS, canvas_class=Paper)
        meta = {
            key: getattr(problem, key) for key in ("goal", "family", "kind", "solution", "slip")
        }
        rows.append(
            {
                "id": f"scanned/{seed}/{split}/{index}",
                "images": [problem.image],
                "problem": problem.question,
                "answer": problem.answer,
                "answer_raw": problem.answer,
                "choices": None,
                "split": split,
                "source": "scanned",
                "meta": meta | {"shapes": list(problem.shapes)},
            }
        )
    return rows


def build_data(folder: Path, plan: Plan, case: str) -> None:
    """Training and held-out problems of a case, the same for all its runs; what is there stays."""
    from adora_vl.data.dataset import write_manifest, write_split
    from adora_vl.data.output import complete_or_absent

    if folder.is_dir():
        return
    description = {"source": "scanned", "input": None, "revision": None, "arguments": plan["rows"]}
    counts = {}
    with complete_or_absent(folder, description) as staging:
        for split, number in plan["rows"].items():
            rows = draw_rows(
                number,
                split=split,
                seed=0,
                pixels=plan["pixels"],
                one_digit=plan["cases"][case]["one_digit"],
            )
            counts[split] = write_split(rows, staging, split)
        write_manifest(staging, description, counts)


def start_folder(output: Path, plan: Plan, start: int) -> Path:
    """Return the folder of a start, whose name has the size where it is not the shipped model's."""
    size = size_of(plan)
    name = str(start)
    if size is not None:
        name = f"{start}_{size.width}x{size.layers}_{size.dtype}"
    return output / "starts" / name


def build_start(folder: Path, plan: Plan, start: int, device: str = "cpu") -> None:
    """Teach the plan's model on other problems with the training pictures; what is there stays."""
    from adora_vl.builtin.small_model import is_built
    from adora_vl.builtin.small_model import train_and_save as build
    from adora_vl.builtin.tiny_perimeter import PerimeterStart

    start_plan = PerimeterStart(**plan["start"], seed=start)
    if not is_built(folder, asdict(start_plan)):
        rows = draw_rows(start_plan.rows, split="train", seed=start, pixels=plan["pixels"])
        prepare = partial(prepare_lessons, rows=rows, size=size_of(plan), device=device)
        build(folder, start_plan, prepare, device)


def prepare_lessons(
    start_plan: "PerimeterStart", rows: "list[Row]", size: ModelSize | None, device: str
) -> "UntrainedModel":
    """Return the model and its lessons; on a GPU its vision tower batches its windows.

    Transformers computes the attention of every window by itself, and a batch of 128 images has so
    many that a GPU waits for the host. On a CPU the start stays the same to the bit.
    """
    from adora_vl.builtin.tiny_perimeter import prepare_perimeter
    from adora_vl.packing.vision import vision_language_model
    from adora_vl.packing.vision_windows import batch_windows

    untrained = prepare_perimeter(start_plan, rows=rows, size=size)
    vl_model = vision_language_model(untrained.model)
    if device != "cpu" and vl_model is not None:
        batch_windows(vl_model.visual, True)
    return untrained


def runs_in_order(plan: Plan, pilot: bool) -> list[RunPlace]:
    """Return the runs in their order: a seed is whole before the next one begins."""
    runs_of_plan = plan["pilot"] if pilot else plan
    return [
        (case, start, seed, arm)
        for seed in runs_of_plan["seeds"]
        for case in plan["cases"]
        for start in runs_of_plan["starts"]
        for arm in plan["cases"][case]["arms"]
    ]


def words_of_keys(options: Mapping[str, Any]) -> list[str]:
    """Keys of a training config as a command has them."""
    words = []
    for key, value in options.items():
        values = (
            value
            if isinstance(value, list)
            else [json.dumps(value) if isinstance(value, dict) else value]
        )
        words += [f"--{key}", *map(str, values)]
    return words


def train(
    words: Sequence[str], folder: Path, watch: Callable[["AdoraGRPOTrainer"], None] | None = None
) -> list[dict[str, Any]]:
    """Do what `python -m adora_vl.train` does, with this process's engine and without saving.

    Returns the log's lines. `watch`: gets the trainer before its first step.
    """
    from adora_vl.config.command import parse_command
    from adora_vl.prepare import prepare
    from adora_vl.record.metrics import METRICS_FILE, read_metrics
    from adora_vl.train import build_trainer

    shutil.rmtree(folder, ignore_errors=True)
    with folder.with_suffix(".log").open("w") as log, contextlib.redirect_stdout(log):
        trainer = build_trainer(prepare(parse_command([*words, "--output_dir", str(folder)])))
        if watch is not None:
            watch(trainer)
        trainer.train()
    trainer.prefetch.finish()  # as its `close`, which would end the engine too
    trainer.run.folder.release()
    lines = read_metrics(folder / METRICS_FILE)
    del trainer
    gc.collect()
    return lines


# of a run's log: what is held out, by step, and what the training answers are like, as means of
# five steps
HELD_OUT_NAMES = {
    "accuracy": "accuracy",
    "perimeter_usual_accuracy": "usual",
    "perimeter_any_accuracy": "any",
}
TRAINING_NAMES = {
    "grading/worked": "worked",
    "rewards/every_step/mean": "every_step",
    "grading/correct": "right",
    "completions/mean_length": "tokens",
    "adora/tds_share": "tds_share",
    "adora/weight_mean": "weight_mean",
}
STEPS_PER_MEAN = 5
# The accuracy of the held-out split in a log; earlier runs have it under the second name.
HELD_OUT_KEYS = ("eval_problems_accuracy", "eval_geometry3k_accuracy")


def stored_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is stored of a run's log: held-out shares by step, and means of training figures.

    Each mean is over `STEPS_PER_MEAN` steps.
    """
    held_out = []
    steps = []
    for line in lines:
        if line["kind"] == "eval":
            prefix = next(key.removesuffix("accuracy") for key in HELD_OUT_KEYS if key in line)
            shares = {
                stored_name: round(line[f"{prefix}{logged_name}"], 4)
                for logged_name, stored_name in HELD_OUT_NAMES.items()
            }
            held_out.append({"step": line["step"], **shares})
    train_lines = [line for line in lines if line["kind"] == "train"]
    for first in range(0, len(train_lines), STEPS_PER_MEAN):
        block = train_lines[first : first + STEPS_PER_MEAN]
        figures = {
            stored_name: [line[logged_name] for line in block if line.get(logged_name) is not None]
            for logged_name, stored_name in TRAINING_NAMES.items()
        }
        means = {
            name: round(statistics.fmean(values), 4) for name, values in figures.items() if values
        }
        steps.append({"step": block[-1]["step"], **means})
    return {"held_out": held_out, "steps": steps}


def prepare_machine() -> str:
    """Prepare the environment of the engine as a run does. Returns `cuda`, or `cpu` without a GPU.

    One engine serves all runs of this process.
    """
    prepare_engine_environment()
    use_expandable_segments()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    from benchmarks.attenuation.run import keep_one_engine

    keep_one_engine()
    return device


def is_too_late(seconds: Sequence[float], remaining: float) -> bool:
    """Return whether the next run would not end in the seconds that are left.

    The longest run so far is the measure, and the first run always begins.
    """
    return bool(seconds) and max(seconds) > remaining


def train_all(plan: Plan, output: Path, pilot: bool, minutes: float = math.inf) -> None:
    """Make every run of the plan that `output` has no line of, as far as the minutes go."""
    deadline = time.perf_counter() + 60 * minutes
    device = prepare_machine()
    file = output / "runs.jsonl"
    stored = {place_of_run(run) for run in read_runs(file)} if file.is_file() else set()
    for case in plan["cases"]:
        build_data(output / "data" / case, plan, case)
    seconds: list[float] = []
    for trial in runs_in_order(plan, pilot):
        if trial in stored:
            continue
        _, start, _, _ = trial
        time_before = time.perf_counter()
        build_start(start_folder(output, plan, start), plan, start, device)
        time_taught = time.perf_counter()
        if time_taught - time_before > 1:  # a start that is there takes no time
            print(f"start {start}: {time_taught - time_before:.0f} s", flush=True)
        if is_too_late(seconds, deadline - time_taught):
            print(f"The time is over: {trial} and what follows were not run.", flush=True)
            return
        run = train_one(plan, output, trial, device)
        with file.open("a") as lines:
            lines.write(json.dumps(run) + "\n")
        seconds.append(time.perf_counter() - time_taught)
        summary = {**run["held_out"][-1], **run["steps"][-1], "seconds": round(seconds[-1])}
        print(*trial, json.dumps(summary), flush=True)


def train_one(plan: Plan, output: Path, trial: RunPlace, device: str) -> Run:
    """Train one arm, and return the line of it that is stored.

    The start is evaluated only in the first arm of its case, since it is the same for all of them.
    """
    case, start, seed, arm = trial
    model = start_folder(output, plan, start)
    processor = time.process_time()
    options: dict[str, Any] = {
        **plan["train"],
        **plan["arms"][arm],
        **machine_keys(size_of(plan), device),
        "model_name_or_path": str(model),
        "dataset_name": str(output / "data" / case),
        "seed": seed,
        # The start is the same for all arms of a case, so the first arm measures it.
        "eval_on_start": arm == plan["cases"][case]["arms"][0],
    }
    curve = stored_curves(
        train(["--config", str(DEMO_CONFIG), *words_of_keys(options)], output / "run")
    )
    return {
        "case": case,
        "start": start,
        "seed": seed,
        "arm": arm,
        "model": hash_of_weights(model),
        "start_losses": read_json_object(model / "build.json").get("final_losses"),
        "device": device,
        "commit": commit_of_runs(),
        **curve,
        "processor_seconds": round(time.process_time() - processor, 1),
    }


def read_runs(file: Path) -> list[Run]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def place_of_run(run: Run) -> RunPlace:
    return run["case"], run["start"], run["seed"], run["arm"]


def runs_of_whole_seeds(plan: Plan, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that count: those of the plan whose case and seed have every run."""
    expected = runs_in_order(plan, pilot=False)
    present = {place_of_run(run) for run in runs}
    missing = {
        (case, seed)
        for case, start, seed, arm in expected
        if (case, start, seed, arm) not in present
    }
    return [
        run
        for run in runs
        if place_of_run(run) in expected and (run["case"], run["seed"]) not in missing
    ]


ARM_TITLES = {
    "grpo": "`grpo`, GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "`dapo`, GRPO",
    "adora": "`grpo`, ADORA 0.1",
    "adora_dapo": "`dapo`, ADORA 0.1",
    "random": "`grpo`, random groups",
}
COMPARED_ARMS = (
    ("adora", "grpo"),
    ("adora", "random"),
    ("adora", "dr_grpo"),
    ("adora_dapo", "dapo"),
    ("adora_dapo", "dr_grpo"),
    ("random", "grpo"),
    ("dr_grpo", "grpo"),
    ("dapo", "grpo"),
)


def held_out_at_end(key: str) -> Callable[[Run], float]:
    """Return a held-out figure at the last step."""
    return lambda run: float(run["held_out"][-1][key])


def training_at_end(key: str) -> Callable[[Run], float]:
    """Return the mean of a figure of the training answers over the last steps."""
    return lambda run: float(run["steps"][-1][key])


def accuracy_half_way(run: Run) -> float:
    return float(run["held_out"][-2]["accuracy"])


def percent_by_seed(
    runs: Sequence[Run], case: str, arm: str, value: Callable[[Run], Any]
) -> list[float]:
    """Return a figure of every seed in percent: its mean over the starts."""
    arm_runs = [run for run in runs if (run["case"], run["arm"]) == (case, arm)]
    seeds = sorted({run["seed"] for run in arm_runs})
    return [
        100 * statistics.fmean(value(run) for run in arm_runs if run["seed"] == seed)
        for seed in seeds
    ]


def level_table(plan: Plan, runs: Sequence[Run], case: str) -> list[str]:
    """Return a Markdown table of every arm's means, with the lowest and the highest seed."""
    lines = [
        f"| {case}: arm | runs | accuracy, end | by start | `usual` | `any` | workings | all "
        "steps right | tokens |",
        "|---" * 9 + "|",
    ]
    for arm in plan["cases"][case]["arms"]:
        arm_runs = [run for run in runs if (run["case"], run["arm"]) == (case, arm)]
        ends = percent_by_seed(runs, case=case, arm=arm, value=held_out_at_end("accuracy"))
        starts = [
            statistics.fmean(
                100 * run["held_out"][-1]["accuracy"] for run in arm_runs if run["start"] == start
            )
            for start in plan["starts"]
        ]
        values = (
            held_out_at_end("usual"),
            held_out_at_end("any"),
            training_at_end("worked"),
            training_at_end("every_step"),
        )
        cells = [
            ARM_TITLES[arm],
            str(len(arm_runs)),
            f"{statistics.fmean(ends):.1f} ({min(ends):.1f} to {max(ends):.1f})",
        ]
        cells += [" / ".join(f"{mean:.1f}" for mean in starts)]
        cells += [
            f"{statistics.fmean(percent_by_seed(runs, case, arm, value)):.1f}" for value in values
        ]
        lines.append(
            f"| {' | '.join(cells)} | {statistics.fmean(map(training_at_end('tokens'), arm_runs)):.1f} |"
        )
    return lines


def difference_table(plan: Plan, runs: Sequence[Run], case: str) -> list[str]:
    """Return a Markdown table of paired differences with the seed as the unit.

    It has the exact sign-flip test of the last evaluation.
    """
    lines = [
        f"| {case}: difference in points [95 %] | seeds | accuracy, half way | end | workings | p "
        "|",
        "|---" * 6 + "|",
    ]
    for first_arm, second_arm in COMPARED_ARMS:
        if not {first_arm, second_arm} <= set(plan["cases"][case]["arms"]):
            continue
        cells = []
        for value in (accuracy_half_way, held_out_at_end("accuracy"), training_at_end("worked")):
            first = percent_by_seed(runs, case=case, arm=first_arm, value=value)
            second = percent_by_seed(runs, case=case, arm=second_arm, value=value)
            cells.append([a - b for a, b in zip(first, second, strict=True)])
        texts = " | ".join(map(mean_and_interval, cells))
        lines.append(
            f"| {ARM_TITLES[first_arm]} - {ARM_TITLES[second_arm]} | {len(cells[0])} | {texts} | "
            f"{sign_flips(cells[1]):.3f} |"
        )
    return lines


def tables(plan: Plan, all_runs: Sequence[Run]) -> str:
    """Return what was run, and for each case the tables, of the whole seeds alone."""
    runs = runs_of_whole_seeds(plan, all_runs)
    minutes = sum(run["processor_seconds"] for run in runs) / 60
    commits = ", ".join(sorted({run["commit"] for run in runs}))
    parts = [[f"{len(runs)} runs of commit {commits}; {minutes:.0f} processor minutes."]]
    for case in plan["cases"]:
        case_runs = [run for run in runs if run["case"] == case]
        if not case_runs:
            continue
        before = [
            100 * run["held_out"][0]["accuracy"]
            for run in case_runs
            if run["held_out"][0]["step"] == 0
        ]
        seeds = f"{len({run['seed'] for run in case_runs})} of {len(plan['seeds'])} seeds are whole"
        parts += [[f"{case}: {seeds}; {statistics.fmean(before):.1f} % before training."]]
        parts += [level_table(plan, case_runs, case), difference_table(plan, case_runs, case)]
    return "\n\n".join("\n".join(part) for part in parts)


def verdict(plan: Plan, all_runs: Sequence[Run]) -> str:
    """Judge the whole seeds by the bounds of the plan's `gain`: a gain, no gain, or no answer.

    A gain is that ADORA leads GRPO by both bounds, in percentage points, in the plan's case
    `long is better`. There is no answer where a start's loss says that it cannot read the digits.
    """
    runs = runs_of_whole_seeds(plan, all_runs)
    if not runs:
        return "no answer: no seed is whole"
    bounds = plan["gain"]
    loss = max(run["start_losses"][0] for run in runs)
    if loss > bounds["reads"]:
        return (
            f"no answer: the start's loss of right workings is {loss:.3f}, above "
            f"{bounds['reads']}, so it has not learned to read"
        )
    lead_by_figure = {}
    for name, value in (
        ("accuracy", held_out_at_end("accuracy")),
        ("workings", training_at_end("worked")),
    ):
        means = {
            arm: statistics.fmean(
                percent_by_seed(runs, case="long is better", arm=arm, value=value)
            )
            for arm in ("adora", "grpo")
        }
        lead_by_figure[name] = means["adora"] - means["grpo"]
    is_gain = all(lead >= bounds[name] for name, lead in lead_by_figure.items())
    return (
        f"{'a gain' if is_gain else 'no gain'}: ADORA is {lead_by_figure['accuracy']:+.1f} points of "
        f"accuracy from GRPO ({bounds['accuracy']} are asked for), and {lead_by_figure['workings']:+.1f} "
        f"points of workings ({bounds['workings']}), in {len({run['seed'] for run in runs})} seeds"
    )


def read_plan(options: argparse.Namespace) -> Plan:
    """Return the plan of the command. Raises `UserError` for what is no size of a model."""
    file = CARD_PLAN if options.card else PLAN
    plan: Plan = yaml.safe_load(file.read_text())
    sizes = {"width": options.width, "layers": options.layers, "dtype": options.dtype}
    return with_model_size(plan, sizes)


def refuse_without_a_card(options: argparse.Namespace) -> None:
    """Raise `UserError` where the card's plan would run on a CPU, which would take days."""
    import torch

    if options.card and not options.rehearse and not torch.cuda.is_available():
        raise UserError(
            "--card: no GPU is visible, and a CPU would take days; add --rehearse to try two steps "
            "of each arm"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan, or print the tables of its runs; 2: the input is wrong."""
    return run_command(partial(command, arguments), interrupt_note="every finished run is kept")


def command(arguments: Sequence[str] | None) -> None:
    """Do what the words of the command say. Raises `UserError`."""
    parser = Parser(
        prog="benchmarks.scanned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--card", action="store_true", help=f"the plan of {CARD_PLAN.name}")
    parser.add_argument("--width", type=int, help="of the model; with any size it starts untaught")
    parser.add_argument("--layers", type=int, help="its depth")
    parser.add_argument("--dtype", help="float32 or bfloat16")
    parser.add_argument("--rehearse", action="store_true", help="two steps of everything")
    parser.add_argument(
        "--minutes",
        type=number_between(1, 10_000),
        default=math.inf,
        help="no run begins that would not end in time",
    )
    parser.add_argument("--output", type=Path, help="runs/scanned by default, or a folder in it")
    parser.add_argument(
        "--pilot", action="store_true", help="the pilot's starts and seeds, which count for nothing"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        nargs="?",
        const=STORED_RUNS,
        metavar="FILE",
        help="only print the tables",
    )
    options = parser.parse_args(arguments)
    plan = read_plan(options)
    if options.tables:
        if not options.tables.is_file():
            raise UserError(
                f"--tables: {options.tables} is no file; the runs write OUTPUT/runs.jsonl"
            )
        print(tables(plan, read_runs(options.tables)))
        return
    refuse_without_a_card(options)
    output = output_folder(options)
    if options.rehearse:
        plan = rehearsal_of(plan, output)
    train_all(plan, output, options.pilot, options.minutes)
    if "gain" in plan and not options.pilot:
        runs = read_runs(output / "runs.jsonl")
        print(f"{tables(plan, runs)}\n\n{verdict(plan, runs)}")


def output_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the runs, made where it is missing: one for each plan and rehearsal."""
    folder: Path = options.output or REPOSITORY / "runs" / "scanned"
    if options.card:
        folder = folder / "card"
    if options.rehearse:
        folder = folder / "rehearsal"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


if __name__ == "__main__":
    sys.exit(main())
