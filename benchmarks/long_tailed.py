"""Answers of drawn lengths, some of which run to the limit: `python -m benchmarks.rollouts
--lengths long-tailed`.

The real trainer with the real engine and the tiny model, with and without `adora_rollouts.budget`.
An answer ends at a length that is drawn from its seed, whatever the model says, so both runs have
the same answers. Every answer is a request of its own, with its image. With `--server URL` a vLLM
server of the same model samples, whose own count of steps is read. Printed are engine steps and the
processor's seconds, in these steps and in all of the sampling, for each rollout that is learned
from: of the whole run, and of its middle, without the first generations, which have fewer groups,
and the last one, which has no budget.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import requests

# Median and limit, and of each run budget and staleness of `adora_rollouts`: an answer that is one
# generation older than that is sampled to its end, so a limit of 1,600 has room for five segments
# of 320 tokens, or for nine of 200.
SETTINGS = (((100, 1600), (("320", "4"), ("200", "8"))), ((50, 400), (("100", "4"), ("80", "5"))))
COLUMNS = {"steps": ("steps", 1), "decoding": ("ms in steps", 1e3), "seconds": ("ms", 1e3)}
BEGINNING = 3  # generations
SEED = 0
LIMIT_SHARE = 0.01
SIGMA = 0.7


def drawn(seed: int, median: int, limit: int) -> int:
    """The length of the answer that begins with this seed: lognormal, and one in a hundred runs to
    the limit.
    """
    rng = random.Random(seed)
    return (
        limit
        if rng.random() < LIMIT_SHARE
        else max(5, min(limit, int(median * rng.lognormvariate(0, SIGMA))))
    )


def arguments(
    folder: Path, limit: int, budget: str, staleness: str, generations: int, server: str
) -> list[str]:
    """The demo's command with 8 problems x 8 rollouts and answers of up to `limit` tokens."""
    served = (
        {"vllm_mode": "server", "vllm_server_base_url": server, "adora_weight_transfer": "file"}
        if server
        else {}
    )
    keys = {
        "config": "configs/train/smoke_cpu.yaml",
        "output_dir": str(folder),
        "max_steps": generations,
        "per_device_train_batch_size": 64,
        "max_completion_length": limit,
        "vllm_max_model_length": limit + 256,
        "adora_stock_step": "group_requests",
        "generation_kwargs": '{"ignore_eos": true}',
        "save_strategy": "no",
        "adora_synthetic_rows": 256,
        "logging_steps": 1,
        "seed": SEED,
        "adora_rollouts.budget": budget,
        "adora_record_every": 0,
        "log_completions": "false",
        "adora_rollouts.staleness": staleness,
        **served,
    }
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def force_lengths(length: Callable[[int], int]) -> None:
    """From here on an answer ends at the length that `length` says of its seed."""
    from adora_vl.rollout.rollouts import RolloutGroup
    from adora_vl.training.pool import Pool
    from adora_vl.utils.seeding import rollout_seed

    def longest(self: Any, group: RolloutGroup, member: int) -> int:
        return length(rollout_seed(SEED, group.problem.where, group.problem.place, member))

    Pool.longest = longest  # type: ignore[method-assign]


def steps_of(server: str) -> float:
    """That a server's engine has made since it was started; 0 without a server."""
    if not server:
        return 0.0
    counted = requests.get(f"{server}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in counted
        if line.startswith("vllm:iteration_tokens_total_count")
    )


def child(
    median: int, limit: int, budget: str, staleness: str, generations: int, server: str
) -> list[dict[str, float]]:
    """One training: of each generation engine steps and the seconds in them, all seconds, rollouts
    and tokens.
    """
    from adora_vl.utils.launch import prepare_engine_environment

    prepare_engine_environment()
    from vllm.v1.engine.llm_engine import LLMEngine

    from adora_vl.train import main
    from adora_vl.training.judge import Judge
    from adora_vl.training.pool import Pool

    found: list[dict[str, float]] = []
    force_lengths(lambda seed: drawn(seed, median, limit))
    engine_step = LLMEngine.step
    sample = Pool._sampled
    fill = Pool.fill
    judge = Judge.__call__

    def timed(method: Any, name: str) -> Any:
        def run(*given: Any) -> Any:
            start = time.process_time()
            answer = method(*given)
            if found:  # the check before the first step samples too
                found[-1][name] += time.process_time() - start
                found[-1]["steps"] += method is engine_step
            return answer

        return run

    def filled(*given: Any) -> None:
        found.append(dict.fromkeys(("steps", "decoding", "seconds", "rollouts", "tokens"), 0.0))
        before = steps_of(server)
        fill(*given)
        found[-1]["steps"] += steps_of(server) - before

    def judged(self: Judge, generation: Any, groups: Any, *given: Any, **more: Any) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        found[-1]["rollouts"] += len(rollouts)
        found[-1]["tokens"] += sum(len(rollout.tokens) for rollout in rollouts)
        judge(self, generation, groups, *given, **more)

    LLMEngine.step = timed(engine_step, "decoding")
    Pool.fill = filled  # type: ignore[method-assign,assignment]
    Pool._sampled = timed(sample, "seconds")  # type: ignore[method-assign]
    Judge.__call__ = judged  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        assert main(arguments(Path(folder), limit, budget, staleness, generations, server)) == 0
    return found


def per_rollout(found: list[dict[str, float]], columns: Sequence[str]) -> list[float]:
    """Engine steps, milliseconds in them and milliseconds in all, for each rollout that was learned
    from.
    """
    rollouts = sum(each["rollouts"] for each in found)
    return [sum(each[name] for each in found) / rollouts * COLUMNS[name][1] for name in columns]


def compare(generations: int, server: str) -> None:
    """Print two lines for each run: all of it, and its middle, each with the ratios to the run
    without a budget.
    """
    columns = [*COLUMNS][: 1 if server else None]  # a server's seconds are its own
    titles = f"{'median':>6} {'limit':>6} {'budget':>7} {'staleness':>9} {'':>7}{'rollouts':>9}"
    print(titles + "".join(f"{COLUMNS[name][0]:>14}" for name in columns))
    for lengths, runs in SETTINGS:
        whole: dict[str, list[float]] = {}
        for budget in (("null", "4"), *runs):
            words = [*map(str, lengths), *budget, str(generations), f"--server={server}"]
            command = [sys.executable, "-m", "benchmarks.long_tailed", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            found = json.loads(done.stdout.splitlines()[-1])
            for part, chosen in (("whole", found), ("middle", found[BEGINNING:-1])):
                values = per_rollout(chosen, columns)
                first = whole.setdefault(part, values)
                both = "".join(
                    f"{a:>9.2f}{a / b:>5.2f}" for a, b in zip(values, first, strict=True)
                )
                count = sum(generation["rollouts"] for generation in chosen)
                print(
                    "{:>6} {:>6} {:>7} {:>9}".format(*words[:4]) + f" {part:>7}{count:>9.0f}{both}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("median", type=int)
    parser.add_argument("limit", type=int)
    parser.add_argument("budget", help="of adora_rollouts.budget")
    parser.add_argument("staleness", help="of adora_rollouts.staleness")
    parser.add_argument("generations", type=int)
    parser.add_argument(
        "--server", default="", help="URL; empty: the engine of the trainer's own process"
    )
    print(json.dumps(child(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
