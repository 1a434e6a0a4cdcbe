"""Compares losses, rollouts and weights of a run that is killed with an uninterrupted one's.

    python -m benchmarks.kill_and_resume --kills rollout:4,grading:9,saving:18 --processes 1

Each kill is a SIGKILL to every process of the run, at a random moment inside the phase of that
step. Then the same command is started again. Prints a table, and ends with exit code 1 where
anything differs.

A card adds in any order, so two runs that nobody kills differ there too. `--references 2` makes two
of them, and judges the killed run by their distance.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from adora_vl.record.record_files import ROLLOUTS_FOLDER, list_record_files, read_record_files

if TYPE_CHECKING:
    from trl import GRPOTrainer

REPOSITORY = Path(__file__).parents[1]
KILL_PHASES = ("rollout", "grading", "backward", "saving")
# How far a killed run may be away from a reference, in distances of two references.
ALLOWED_NOISE_MULTIPLE = 3.0
CHILD_FLAG = "--child"
KILL_VARIABLE = (
    "ADORA_KILL"  # phase:step:delay in seconds, for the child; with :rank that rank alone dies
)
TIMING_FIGURE_PREFIXES = (
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "total_flos",
    "grading/ms",
    "seconds/",
    "memory/",
    "adora/servers_waited_s",
    "adora/trainer_waited_s",
    "adora/tools_s",
    "adora/sync_mb",  # the first sync of a start sends the engine everything
)


def smaller_demo_arguments(folder: Path, steps: int, extra: list[str]) -> list[str]:
    """Return the demo's command, smaller, with every step logged."""
    keys = {
        "config": "configs/train/smoke_cpu.yaml",
        "output_dir": str(folder),
        "max_steps": steps,
        "logging_steps": 1,
        "save_steps": 3,
        "save_total_limit": 2,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "adora_synthetic_rows": 128,
        "max_completion_length": 24,
    }
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))] + extra


def run_training_command(folder: Path, options: argparse.Namespace, kill: str = "") -> int:
    """Run the training command in a session of its own. Returns 0, or -9 where it was killed."""
    zero3 = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "configs/accelerate/cpu_zero3.yaml",
    ]
    command = [
        sys.executable,
        *(zero3 if options.processes == 2 else []),
        "-m",
        "benchmarks.kill_and_resume",
        CHILD_FLAG,
    ]
    command += smaller_demo_arguments(folder, options.steps, options.extra)
    environment = {**os.environ, KILL_VARIABLE: kill, "TOKENIZERS_PARALLELISM": "false"}
    # Several threads of a busy machine add numbers in another order from run to run.
    environment.setdefault("OMP_NUM_THREADS", "1")
    log = folder.with_suffix(".log")
    with log.open("a") as stream:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        code = process.wait()
    if kill and code == 1 and "SIGKILL" in log.read_text():
        # the launcher of several processes outlives them, and says what they died of
        return -signal.SIGKILL
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"the run ended with {code}; see {log}\n{log.read_text()[-1500:]}")
    return code


def train_until_killed(arguments: list[str]) -> int:
    """Run the training command, and return its exit code.

    It is killed on its way where the environment variable ADORA_KILL says so: a timer starts as
    soon as the phase of the step begins.
    """
    from adora_vl.train import main

    if os.environ.get(KILL_VARIABLE):
        kill_in_phase(*os.environ[KILL_VARIABLE].split(":"))
    return main(arguments)


def patched_place_of_phase(phase: str) -> tuple[type[GRPOTrainer], object, str]:
    """Return the trainer's class, and what is patched for this phase: owner and name."""
    from adora_vl.checkpoint import store
    from adora_vl.trainer import AdoraGRPOTrainer
    from adora_vl.training.scoring import RewardFunctions

    places = {
        "rollout": (AdoraGRPOTrainer, "_generate_and_score_completions"),
        "grading": (RewardFunctions, "score"),
        "backward": (AdoraGRPOTrainer, "_compute_loss"),
        "saving": (store, "publish_checkpoint"),
    }
    return AdoraGRPOTrainer, *places[phase]


def kill_in_phase(phase: str, step: str, delay: str, rank: str = "") -> None:
    """Let this process die `delay` seconds after `phase` begins, in `step` or the first one behind.

    It dies by SIGKILL with all processes of the run, its process group. With `rank` the process of
    that rank dies alone, and nothing is patched in the others.
    """
    if rank and os.environ.get("RANK") != rank:
        return
    die = (os.kill, (os.getpid(), signal.SIGKILL)) if rank else (os.killpg, (0, signal.SIGKILL))
    trainer_class, owner, name = patched_place_of_phase(phase)
    original = getattr(owner, name)
    state: dict[str, int] = {"step": 0}
    stock_step = trainer_class.training_step

    def training_step(self: GRPOTrainer, *args: object, **kwargs: object) -> object:
        state["step"] = self.state.global_step + 1
        return stock_step(self, *args, **kwargs)

    def entered(*args: object, **kwargs: object) -> object:
        if state["step"] >= int(step):
            threading.Timer(float(delay), *die).start()
        return original(*args, **kwargs)

    trainer_class.training_step = training_step
    setattr(owner, name, entered)


_COMPARED_TABLE_COLUMNS = ("step", "prompt", "completion", "advantage", "adora_weight")


def comparable_results(folder: Path) -> dict[str, Any]:
    """Return what has to be equal in two runs.

    That is the figures and rollouts of each step, TRL's tables of completions where the run writes
    them, and the bytes of the final weights.
    """
    import pandas as pd

    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    steps: dict[int, dict[str, Any]] = {}
    for entry in history:
        if not entry.keys().isdisjoint({"loss", "train_loss"}):
            timeless = {
                key: value
                for key, value in entry.items()
                if not key.startswith(TIMING_FIGURE_PREFIXES)
            }
            steps.setdefault(entry["step"], {}).update(timeless)
    tables = {}
    for path in sorted((folder / "completions").glob("*.parquet")):
        table = pd.read_parquet(path, columns=list(_COMPARED_TABLE_COLUMNS))
        tables[path.stem] = hashlib.sha256(table.to_json().encode()).hexdigest()
    weights = hashlib.sha256()
    for file in sorted({*folder.glob("*.safetensors"), *folder.glob("ref/*.safetensors")}):
        weights.update(file.read_bytes())
    return {
        "steps": steps,
        "rollouts": hash_recorded_rollouts(folder),
        "tables": tables,
        "weights": weights.hexdigest(),
    }


def hash_recorded_rollouts(folder: Path) -> dict[str, str]:
    """Return a hash of each file of rollouts that a run has recorded.

    The seconds that tools took do not count. Empty where nothing was recorded.
    """
    files = list_record_files(folder / ROLLOUTS_FOLDER)
    if not files:
        return {}
    digests: dict[str, Any] = {}
    for row in read_record_files(files).to_pylist():
        for turn in row["turns"] or ():
            del turn["seconds"]
        digest = digests.setdefault(f"step {row['step']}", hashlib.sha256())
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return {step: digest.hexdigest() for step, digest in digests.items()}


def describe_differences(reference: dict[str, Any], killed: dict[str, Any]) -> list[str]:
    """Return one line per difference: each step's figures, rollouts, tables, and final weights.

    Of a step only the first figure that differs is named. That no rollouts were recorded counts as
    a difference, since nothing would be compared then.
    """
    lines = []
    for step, figures in reference["steps"].items():
        killed_step = killed["steps"].get(step, {})
        names = [name for name in figures if figures[name] != killed_step.get(name)]
        if names:
            name = names[0]
            lines.append(
                f"step {step}: {name} is {figures[name]} and {killed_step.get(name)} ({len(names)} "
                "figures differ)"
            )
    if not reference["rollouts"]:
        lines.append("no rollouts, because none were recorded: set adora_record_gb above 0")
    for kind, words in (("rollouts", "rollouts of"), ("tables", "the table")):
        first = reference[kind]
        second = killed[kind]
        names = [name for name in first | second if first.get(name) != second.get(name)]
        if names:
            lines.append(f"{words} {', '.join(names)}")
    if reference["weights"] != killed["weights"]:
        lines.append("the final weights")
    return lines


def weight_distance(folder: Path, reference: Path) -> float:
    """Return the norm of the final weights' difference as a share of the norm of `reference`."""
    gap = 0.0
    size = 0.0
    for file in sorted(reference.glob("*.safetensors")):
        tensors = load_file(folder / file.name)
        for name, tensor in load_file(file).items():
            gap += float((tensors[name].double() - tensor.double()).square().sum())
            size += float(tensor.double().square().sum())
    return math.sqrt(gap / size) if size else math.nan


def judge_by_noise(killed: Path, references: Sequence[Path]) -> bool:
    """Print the distances of the final weights, and return whether the killed run is within noise.

    `references`: two runs that nobody has killed.
    """
    first, second = references
    noise = weight_distance(second, first)
    distance = weight_distance(killed, first)
    is_noise = distance <= ALLOWED_NOISE_MULTIPLE * noise
    print(
        f"Of the weights' norm the references are {noise:.2e} apart, the killed run {distance:.2e}: "
        f"{'within' if is_noise else 'more than'} {ALLOWED_NOISE_MULTIPLE:g} times the noise"
    )
    return is_noise


def killed_run(folder: Path, options: argparse.Namespace) -> None:
    """Start the run, kill it, start it again, and so on; print one line per start."""
    rng = random.Random(options.seed)
    print(f"{'start':>5}  {'killed in':<12}{'at step':>8}{'after s':>9}  {'went on from'}")
    for number, kill in enumerate([*options.kills.split(","), ""]):
        phase, _, step = kill.partition(":")
        # Short enough for the kill to fall into its phase, of which these two are shorter.
        delay = rng.uniform(0, 0.05 if phase in ("grading", "saving") else 0.3)
        before = sorted(
            (int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")), reverse=True
        )
        code = run_training_command(folder, options, f"{kill}:{delay:.3f}" if kill else "")
        assert bool(code) == bool(kill), (
            f"start {number} was to be killed in {kill!r} and ended with {code}"
        )
        start = f"checkpoint-{before[0]}" if before else "the beginning"
        print(
            f"{number:>5}  {phase or '(finished)':<12}{step:>8}{delay if kill else 0:>9.3f}  "
            f"{start}",
            flush=True,
        )


def main() -> int:
    """Run the comparison, and return its exit code: 1 where the runs differ by more than noise.

    With `--child` before the other words the process is a run itself.
    """
    if sys.argv[1:2] == [CHILD_FLAG]:
        return train_until_killed(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", default="rollout:4,grading:10,backward:14,saving:18,rollout:25")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--references",
        type=int,
        choices=(1, 2),
        default=2 if torch.cuda.is_available() else 1,
        help="2: judge by the distance of two runs that nobody kills; default: 2 on a card",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "kill_and_resume")
    parser.add_argument("extra", nargs="*", help="further training options, after --")
    options = parser.parse_args()
    out = options.output.resolve() / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    run_training_command(out / "whole", options)
    if options.references == 2:
        run_training_command(out / "again", options)
    killed_run(out / "killed", options)
    reference = comparable_results(out / "whole")
    differences = describe_differences(reference, comparable_results(out / "killed"))
    print(
        f"{len(reference['steps'])} steps, the rollouts of {len(reference['rollouts'])}, weights: ",
        end="",
    )
    print("all equal" if not differences else "\n".join(["different", *differences]))
    if differences and options.references == 2:
        return 0 if judge_by_noise(out / "killed", [out / "whole", out / "again"]) else 1
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
