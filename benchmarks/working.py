"""ADORA by work that is true and new, against ADORA by length: `python -m benchmarks.working`.

The task is `benchmarks/angles.py`. `benchmarks/working.yaml` is the plan: question, arms, unit,
rule, stopping rule, and all settings. Every finished run is a line of OUTPUT/runs.jsonl; the
command can be stopped and started again, and goes on with what is missing, in the order of the
plan. `--pilot` runs the pilot's seed alone. `--tables` prints the tables of
docs/experiments_appendix.md from `benchmarks/working.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from transformers import TrainerCallback

from adora_vl.data.dataset import stored_rows, write_manifest, write_split
from adora_vl.data.output import complete_or_absent
from adora_vl.evals.scoring.statistics import t_half_width
from adora_vl.rewards.grade import grade
from adora_vl.rewards.steps import check_claims
from benchmarks.angles import (
    FIGURE_KINDS,
    AnglesStart,
    build_angles_start,
    draw_angle_problem,
    prompt_text,
    solved_row,
)
from benchmarks.attenuation.start import hash_of_weights
from benchmarks.scanned import (
    STEPS_PER_MEAN,
    commit_of_runs,
    mean_and_interval,
    read_runs,
    sign_flips,
    train,
    words_of_keys,
)
from data_prep.solved_rows import features_with_figure

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.data.dataset import Row
    from adora_vl.trainer import AdoraGRPOTrainer

REPOSITORY = Path(__file__).parents[1]
PLAN = Path(__file__).with_suffix(".yaml")
STORED_RUNS = Path(__file__).with_suffix(".jsonl")
STORED_EXAMPLES = 6  # answers of a run's end that are stored
Plan = Mapping[str, Any]
Run = Mapping[str, Any]


def build_data(folder: Path, plan: Plan) -> None:
    """Training and held-out problems, the same for all runs; what is there stays.

    No problem of a split is there twice, as far as a kind has so many.
    """
    if folder.is_dir():
        return
    description = {"source": "angles", "input": None, "revision": None, "arguments": plan["rows"]}
    features = features_with_figure()
    counts = {}
    with complete_or_absent(folder, description) as staging:
        for split, number in plan["rows"].items():
            counts[split] = write_split(_rows(split, number), staging, split, features)
        write_manifest(staging, description, counts)


def _rows(split: str, number: int) -> list[Row]:
    """Draw different problems of one split, equally many of each kind as far as there are so many.

    Problems of the last kind take the place of those that other kinds lack. The draws end after 100
    for each problem, in case there are too few.
    """
    rng = random.Random(f"angles/{split}")
    problems = {}
    counts = dict.fromkeys((kind.name for kind in FIGURE_KINDS), 0)
    for _ in range(100 * number):
        problem = draw_angle_problem(rng, for_testing=split == "test")
        kind = problem.kind.name
        is_full = counts[kind] >= number / len(FIGURE_KINDS) and kind != FIGURE_KINDS[-1].name
        if problem.text in problems or is_full:
            continue
        problems[problem.text] = problem
        counts[kind] += 1
        if len(problems) == number:
            break
    return [
        solved_row(problem, f"angles/{split}/{index}", split)
        for index, problem in enumerate(problems.values())
    ]


class HeldOutWork(TrainerCallback):
    """Evaluates on held-out problems, with answers sampled as in training.

    Every evaluation of a seed draws from the same random numbers.
    """

    def __init__(self, rows: Sequence[Row], plan: Plan, seed: int, *, at_start: bool) -> None:
        self.rows = [row for row in rows for _ in range(plan["answers"])]
        self.every = plan["eval_steps"]
        self.seed = seed
        self.at_start = at_start
        self.points: list[dict[str, float]] = []
        self.examples: list[str] = []
        self.trainer: AdoraGRPOTrainer | None = None

    def watch(self, trainer: AdoraGRPOTrainer) -> None:
        """Evaluate the policy of this trainer."""
        self.trainer = trainer
        trainer.add_callback(self)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Evaluate the start, where it is asked for."""
        if self.at_start:
            self._evaluate(0)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Evaluate every so many steps, and after the last one."""
        step = state.global_step
        if step % self.every == 0 or step == state.max_steps:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        """Sample an answer to each held-out problem, and note what they show at this step.

        `lucky` is a share of the right answers alone. The other shares are of all answers.
        """
        answers = self._answers()
        checks = [
            check_claims(text, row["figure"]) for text, row in zip(answers, self.rows, strict=True)
        ]
        rights = [
            grade(text, row["answer"]).verdict == "correct"
            for text, row in zip(answers, self.rows, strict=True)
        ]
        lucky = [
            check.is_right_by_luck for check, right in zip(checks, rights, strict=True) if right
        ]
        kinds = [row["meta"]["kind"] for row in self.rows]
        by_kind = {
            kind.name: _share(
                [right for right, at in zip(rights, kinds, strict=True) if at == kind.name]
            )
            for kind in FIGURE_KINDS
        }
        self.points.append(
            {
                "step": step,
                "accuracy": _share(rights),
                "lucky": _share(lucky),
                "new": _share([check.new_count > 0 for check in checks]),
                "false": _share([check.false_count > 0 for check in checks]),
                "share": statistics.fmean(check.reward for check in checks),
                "tokens": statistics.fmean(self.lengths),
                **by_kind,
            }
        )
        chosen = range(0, len(answers), len(answers) // STORED_EXAMPLES)
        self.examples = [
            f"{self.rows[number]['problem']} -> {answers[number]}" for number in chosen
        ][:STORED_EXAMPLES]

    @torch.no_grad()
    def _answers(self) -> list[str]:
        """Return a sampled answer to each problem."""
        assert self.trainer is not None, "it is watched"
        model = self.trainer.model
        tokenizer = self.trainer.processing_class
        prompts = [prompt_text(tokenizer, row["problem"]) for row in self.rows]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            out_BT = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                top_k=0,
                max_new_tokens=self.trainer.max_completion_length,
            )
        answers_BT = out_BT[:, inputs["input_ids"].shape[1] :]
        self.lengths = (answers_BT != tokenizer.pad_token_id).sum(dim=1).tolist()
        return list(tokenizer.batch_decode(answers_BT, skip_special_tokens=True))


def _share(values: Sequence[bool]) -> float:
    """Return the share of what is true; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


# Of a run's log: what the training answers are like, as means of five steps.
TRAINING_NAMES = {
    "grading/correct": "right",
    "steps/lucky": "lucky",
    "steps/new": "new",
    "steps/false": "false",
    "completions/mean_length": "tokens",
    "adora/tds_share": "tds_share",
    "adora/weight_mean": "weight_mean",
}


def training_curve(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return what a stored run has of its log."""
    trained = [line for line in lines if line["kind"] == "train"]
    points = []
    for first in range(0, len(trained), STEPS_PER_MEAN):
        block = trained[first : first + STEPS_PER_MEAN]
        point = {"step": block[-1]["step"]}
        for key, name in TRAINING_NAMES.items():
            values = [line[key] for line in block if line.get(key) is not None]
            if values:
                point[name] = round(statistics.fmean(values), 4)
        points.append(point)
    return points


def runs_in_order(plan: Plan, *, pilot: bool = False) -> list[tuple[int, str]]:
    """Seed and arm of the runs in their order: a block's seed is whole before the next begins."""
    seed_groups = plan["pilot"]["seeds"] if pilot else plan["seeds"]
    return [
        (seed, arm)
        for seeds in seed_groups
        for block in plan["blocks"]
        for seed in seeds
        for arm in block
    ]


def train_all(plan: Plan, output: Path, *, pilot: bool) -> None:
    """Train every run of the plan that `output` has no line of."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    file = output / "runs.jsonl"
    code = commit_of_runs()
    stored = read_runs(file) if file.is_file() else []
    done = {(run["seed"], run["arm"]) for run in stored}
    data = output / "data"
    build_data(data, plan)
    rows = list(stored_rows(data, "test"))
    for seed, arm in runs_in_order(plan, pilot=pilot):
        if (seed, arm) in done:
            continue
        began = time.perf_counter()
        processor = time.process_time()
        model = output / "starts" / str(seed)
        build_angles_start(model, AnglesStart(**plan["start"], seed=seed))
        # The start is the same for all arms of a seed.
        watch = HeldOutWork(rows, plan, seed, at_start=arm == next(iter(plan["arms"])))
        run_keys = {"model_name_or_path": str(model), "dataset_name": str(data), "seed": seed}
        words = words_of_keys({**plan["train"], **plan["arms"][arm], **run_keys})
        lines = train(words, output / "run", watch.watch)
        run = {
            "seed": seed,
            "arm": arm,
            "model": hash_of_weights(model),
            "commit": code,
            "held_out": [
                {name: round(value, 4) for name, value in point.items()} for point in watch.points
            ],
            "steps": training_curve(lines),
            "examples": watch.examples,
            "processor_seconds": round(time.process_time() - processor, 1),
        }
        with file.open("a") as stream:
            stream.write(json.dumps(run) + "\n")
        seconds = round(time.perf_counter() - began)
        print(seed, arm, json.dumps(watch.points[-1]), f"{seconds} s", flush=True)


def runs_of_whole_blocks(plan: Plan, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that count: those of a seed of a block of which every run is there."""
    present = {(run["seed"], run["arm"]) for run in runs}
    counted = set()
    for seed in {seed for seed, _ in runs_in_order(plan)}:
        for block in plan["blocks"]:
            if all((seed, arm) in present for arm in block):
                counted |= {(seed, arm) for arm in block}
    return [run for run in runs if (run["seed"], run["arm"]) in counted]


ARM_TITLES = {
    "grpo": "GRPO",
    "length": "ADORA, `length`",
    "working": "ADORA, `working`",
    "random": "`working`, random groups",
    "rate": "`working`, lower rate",
    "steps 0.2": "GRPO, `steps` at 0.2",
    "gate": "GRPO, `steps` as gate",
    "steps alone": "GRPO, `steps` alone, 100 steps",
}
COMPARED_ARMS = (
    ("working", "length"),
    ("working", "random"),
    ("working", "rate"),
    ("working", "grpo"),
    ("length", "grpo"),
    ("steps 0.2", "grpo"),
    ("gate", "grpo"),
)
HELD_OUT_FIGURES = ("accuracy", "lucky", "new", "false", *(kind.name for kind in FIGURE_KINDS))


def held_out_at_end(run: Run, key: str) -> float:
    """Return a held-out figure at the last step, in percent."""
    return 100 * float(run["held_out"][-1][key])


def mean_weight(run: Run) -> float:
    """Return the mean weight of a run's groups over all its steps."""
    return statistics.fmean(point["weight_mean"] for point in run["steps"])


def runs_of_arm(runs: Sequence[Run], arm: str) -> list[Run]:
    """Return the runs of an arm, by their seeds."""
    return sorted((run for run in runs if run["arm"] == arm), key=lambda run: int(run["seed"]))


def level_table(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Return a Markdown table of every arm's means, with the lowest and the highest seed."""
    head = "| work or length: arm | seeds | accuracy, end | lucky of the right | with a step | with an error"
    lines = [
        f"{head} | isosceles | parallels | sums | tokens | mean weight |",
        "|---" * 11 + "|",
    ]
    for arm in plan["arms"]:
        arm_runs = runs_of_arm(runs, arm)
        if not arm_runs:
            continue
        accuracies = [held_out_at_end(run, "accuracy") for run in arm_runs]
        means = [
            f"{statistics.fmean(held_out_at_end(run, key) for run in arm_runs):.1f}"
            for key in HELD_OUT_FIGURES[1:]
        ]
        tokens = statistics.fmean(run["held_out"][-1]["tokens"] for run in arm_runs)
        level = (
            f"{statistics.fmean(accuracies):.1f} ({min(accuracies):.1f} to {max(accuracies):.1f})"
        )
        weight = statistics.fmean(map(mean_weight, arm_runs))
        cells = [
            ARM_TITLES[arm],
            str(len(arm_runs)),
            level,
            *means,
            f"{tokens:.1f}",
            f"{weight:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def paired_differences(runs: Sequence[Run], first: str, second: str, key: str) -> list[float]:
    """Return the differences of two arms at the last step, by seed, in points.

    Of seeds that both have.
    """
    controls = {run["seed"]: run for run in runs_of_arm(runs, second)}
    return [
        held_out_at_end(run, key) - held_out_at_end(controls[run["seed"]], key)
        for run in runs_of_arm(runs, first)
        if run["seed"] in controls
    ]


def difference_table(runs: Sequence[Run]) -> list[str]:
    """Return a Markdown table of paired differences, with the accuracy's sign-flip test."""
    lines = [
        "| work or length: difference in points [95 %] | seeds | accuracy, end | lucky of the right | p |",
        "|---" * 5 + "|",
    ]
    for first, second in COMPARED_ARMS:
        accuracy = paired_differences(runs, first, second, "accuracy")
        lucky = paired_differences(runs, first, second, "lucky")
        if not accuracy:
            continue
        cells = [
            f"{ARM_TITLES[first]} - {ARM_TITLES[second]}",
            str(len(accuracy)),
            mean_and_interval(accuracy),
            mean_and_interval(lucky),
            f"{sign_flips(accuracy):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict_of_rule(runs: Sequence[Run]) -> str:
    """Return what the plan's rule says of these runs: `gain`, or `no gain`.

    It is a gain where `working` is ahead of `length` and of random groups, each by more than half
    the width of the 95 % interval, so that the interval lies above 0.
    """
    for control in ("length", "random"):
        points = paired_differences(runs, "working", control, "accuracy")
        if len(points) < 2 or statistics.fmean(points) <= t_half_width(points):
            return "no gain"
    return "gain"


def tables(plan: Plan, every_run: Sequence[Run]) -> str:
    """Return what was run, and the tables of the whole seeds alone."""
    runs = runs_of_whole_blocks(plan, every_run)
    if not runs:
        return "No seed is whole."
    minutes = sum(run["processor_seconds"] for run in runs) / 60
    commits = ", ".join(sorted({run["commit"] for run in runs}))
    starts = [run["held_out"][0] for run in runs if run["held_out"][0]["step"] == 0]
    before = 100 * statistics.fmean(start["accuracy"] for start in starts)
    lucky = 100 * statistics.fmean(start["lucky"] for start in starts)
    parts = [
        f"{len(runs)} runs of commit {commits}; {minutes:.0f} processor minutes. {before:.1f} % before "
        f"training, {lucky:.1f} % of these lucky.\nBy the plan's rule: {verdict_of_rule(runs)}.",
        "\n".join(level_table(plan, runs)),
        "\n".join(difference_table(runs)),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Run the plan, or print the tables of stored runs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.working",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "working")
    parser.add_argument(
        "--pilot", action="store_true", help="the pilot's seed, which does not count"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        nargs="?",
        const=STORED_RUNS,
        metavar="FILE",
        help="only print the tables",
    )
    options = parser.parse_args()
    plan = yaml.safe_load(PLAN.read_text())
    if options.tables:
        if not options.tables.is_file():
            raise SystemExit(f"--tables: {options.tables} is no file; runs write OUTPUT/runs.jsonl")
        print(tables(plan, read_runs(options.tables)))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    train_all(plan, options.output.resolve(), pilot=options.pilot)


if __name__ == "__main__":
    main()
