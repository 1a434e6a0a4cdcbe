"""Compares a policy step of stock TRL with ours: `python -m benchmarks.step`.

The lengths are those of real answers.

Stock is `trl.GRPOTrainer` itself. Each way runs in a process of its own, one after the other and by
turns, and both learn from the same recorded rollouts (`benchmarks.step_run`). The language model
has the width and vocabulary of Qwen2.5-VL-3B and few layers. Printed are medians over the turns:
seconds by phase, of all the processors together with `--seconds processor`, and the peak of memory
above what the process holds between steps.

On a card TRL's language-model head computes positions of the answers alone, and on a CPU those of
the prompts too. The way "stock, as on a card" is stock with that choice made as on a card;
everything else is the same. A model with all of its layers spends less of its time in the head.
Without Triton the head's passes hold whole tiles of the vocabulary in float32, which a card does
not; so the memory outside them is printed too. With `--as-on-a-card` each case ends with its row of
the table in docs/speed.md.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
# What a case is beside the defaults of `benchmarks.step_run`. A prompt has about 50 tokens of text.
# With gradient checkpointing, as TRL has it by default and our recipes do.
WORDS_BY_CASE: dict[str, list[str]] = {
    "P 700, C 400 long-tailed": ["--image", "650"],
    "P 700, C 400 equal": ["--image", "650", "--equal"],
    "P 350, C 400 long-tailed": ["--image", "300"],
    "P 1050, C 400 long-tailed": ["--image", "1000"],
    "P 700, C 1024 equal": ["--image", "650", "--completion", "1024", "--equal"],
    "P 700, C 100 long-tailed": ["--image", "650", "--completion", "100", "--limit", "400"],
    "P 85, C 400 long-tailed": ["--image", "36"],
    "P 85, C 400 equal": ["--image", "36", "--equal"],
    "P 700, C 400 long-tailed, 8 updates": ["--image", "650", "--updates", "8"],
    "P 700, C 400 long-tailed, all activations kept": ["--image", "650", "--keep-activations"],
}
TINY_MODEL_WORDS = (
    *("--width", "64", "--layers", "2", "--blocks", "1", "--vocabulary", "640"),
    *("--image", "16", "--completion", "12", "--limit", "40", "--generations", "4"),
)
STEP_PHASES = (
    *("data", "image", "grading", "old pass", "old pass, head", "policy forward"),
    *("policy forward, head", "backward", "backward, head", "optimizer", "other"),
)
POLICY_PHASES = [phase for phase in STEP_PHASES if phase.startswith(("old", "policy", "backward"))]
MEMORY_TITLES = {
    "step_bytes": "memory of the step",
    "step_bytes_outside_head": "the same, outside the head's passes",
    "peak_bytes": "peak of the process",
}
STOCK_AS_ON_A_CARD = "stock, as on a card"
STEP_WAYS = ("stock", STOCK_AS_ON_A_CARD, "ours")


def mrope_sections(head_size: int) -> list[int]:
    """Return the published sections of rotary frequencies, 16 : 24 : 24, for this head size."""
    half = head_size // 2
    time_section = head_size // 8
    height_section = (half - time_section) // 2
    return [time_section, height_section, half - time_section - height_section]


def answer_lengths(median: int, limit: int, rollouts: int, equal: bool) -> list[int]:
    """Return the tokens of each rollout of a group.

    If `equal`, all have the median. Otherwise they are quantiles of a log-normal distribution
    (sigma 0.8) that is cut off at the limit, and the longest one is at the limit. Of n rollouts
    number k is the quantile (k + 0.5) / n, so no length depends on chance. For example, a median of
    400 and a limit of 1,024 give 8 rollouts 117, 197, ... and 1,024 tokens.
    """
    if equal:
        return [median] * rollouts
    normal = statistics.NormalDist()
    drawn_lengths = [
        median * math.exp(0.8 * normal.inv_cdf((position + 0.5) / rollouts))
        for position in range(rollouts)
    ]
    lengths = [max(1, min(limit, round(length))) for length in drawn_lengths]
    return [*lengths[:-1], limit]


def measure(way: str, words: list[str], output: Path) -> dict[str, Any]:
    """Run one way in a process of its own, and return its figures."""
    file = output / "turn.json"
    # Freed blocks over 64 KiB go back to the system, so that the memory of the process follows its
    # tensors.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    environment.setdefault("OMP_WAIT_POLICY", "passive")  # a waiting thread is not to count as work
    command = [sys.executable, "-m", "benchmarks.step_run"]
    options = ["--way", way, "--output", str(file.resolve())]
    process = subprocess.run(
        [*command, *options, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{way}: exit code {process.returncode}\n{process.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def policy_seconds(seconds: dict[str, float]) -> float:
    """Return the seconds of the old pass, the forward and the backward."""
    return sum(seconds.get(phase, 0.0) for phase in POLICY_PHASES)


def medians(turns: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Return the medians of the turns of one way: seconds by phase of this kind, and memory."""
    names = [*STEP_PHASES, "whole step"]
    figures = {
        name: statistics.median(turn[kind].get(name, 0.0) for turn in turns) for name in names
    }
    figures |= {name: statistics.median(turn[name] for turn in turns) for name in MEMORY_TITLES}
    return figures


def table(name: str, ways: dict[str, dict[str, float]]) -> str:
    """Return a table of the ways beside each other, with the ratios of ours to the others.

    Args:
        name: the case, which stands above the table.
        ways: the medians of each way, from `medians`.
    """
    other_ways = [way for way in ways if way != "ours"]
    head = f"{name:<40}" + "".join(f"{way[-14:]:>16}" for way in ways)
    lines = [head + "   ours/ " * len(other_ways)]
    for phase in STEP_PHASES:
        seconds = {way: figures[phase] for way, figures in ways.items()}
        lines.append(_table_line(phase, seconds, other_ways, "s"))
    seconds_of_policy = {way: policy_seconds(figures) for way, figures in ways.items()}
    lines.append(_table_line("policy step", seconds_of_policy, other_ways, "s"))
    seconds_of_step = {way: figures["whole step"] for way, figures in ways.items()}
    lines.append(_table_line("whole step", seconds_of_step, other_ways, "s"))
    for key, title in MEMORY_TITLES.items():
        mebibytes = {way: figures[key] / 2**20 for way, figures in ways.items()}
        lines.append(_table_line(title, mebibytes, other_ways, "MiB"))
    return "\n".join(lines)


def _table_line(
    title: str, figures: dict[str, float], other_ways: list[str], unit: Literal["s", "MiB"]
) -> str:
    """Return a line of the table: the figure of each way, and the ratios of ours to the others.

    A ratio to a figure of less than 0.001 is left out.
    """
    number_format = "16.2f" if unit == "s" else "16.0f"
    line = f"  {title:<38}" + "".join(f"{figure:{number_format}}" for figure in figures.values())
    for way in other_ways:
        has_ratio = figures[way] > 1e-3
        line += f"{figures['ours'] / figures[way]:9.2f}" if has_ratio else " " * 9
    return f"{line} {unit}"


def page_row(ways: dict[str, dict[str, float]], prompt: int, answers: list[int]) -> str:
    """Return the row of docs/speed.md: ours beside stock as on a card."""
    stock = ways[STOCK_AS_ON_A_CARD]
    ours = ways["ours"]
    stock_seconds = policy_seconds(stock)
    our_seconds = policy_seconds(ours)
    memory = "step_bytes_outside_head"
    lengths_text = f"{min(answers):,} to {max(answers):,}, median {statistics.median(answers):.0f}"
    if min(answers) == max(answers):
        lengths_text = f"all {max(answers):,}"
    cells = (
        f"{prompt:,}",
        lengths_text,
        f"{stock_seconds:.0f}",
        f"{our_seconds:.0f}",
        f"**{our_seconds / stock_seconds:.2f}**",
    )
    return f"| {' | '.join(cells)} | {ours[memory] / stock[memory]:.2f} |"


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words that are handed on to every process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default=";".join(WORDS_BY_CASE), help="separated by semicolons; all by default"
    )
    parser.add_argument("--turns", type=int, default=3, help="of each way")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_step"))
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and short lengths, to try the command"
    )
    parser.add_argument(
        "--as-on-a-card", action="store_true", help="also stock with the head's choice on a card"
    )
    parser.add_argument("--seconds", choices=["wall", "processor"], default="wall")
    parser.epilog = (
        "All other options go to benchmarks.step_run, for instance --width 512 --vocabulary 16000."
    )
    options, words = parser.parse_known_args()
    options.cases = options.cases.split(";")
    unknown = [name for name in options.cases if name not in WORDS_BY_CASE]
    if unknown:
        sys.exit(f"--cases: {unknown[0]!r} is not one of {'; '.join(WORDS_BY_CASE)}")
    return options, words


def main() -> None:
    """Measure all cases, and print and write their medians."""
    options, words = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    ways = [way for way in STEP_WAYS if options.as_on_a_card or way != STOCK_AS_ON_A_CARD]
    results: dict[str, Any] = {}
    for name in tqdm(options.cases, desc="cases", file=sys.stderr):
        words_of_case = [*WORDS_BY_CASE[name]]
        if options.tiny:
            words_of_case += TINY_MODEL_WORDS
        words_of_case += words
        turns: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(options.turns):
            for way in ways:
                turns[way].append(measure(way, words_of_case, options.output))
        first_turn = turns["ours"][0]
        medians_of_way = {way: medians(turn, options.seconds) for way, turn in turns.items()}
        norms = [turns[way][0]["grad_norm"] for way in ways]
        tqdm.write(table(name, medians_of_way))
        tqdm.write(
            f"  prompt {first_turn['prompt']}, answers {first_turn['answers']}; gradient norms {norms}\n"
        )
        if options.as_on_a_card:
            tqdm.write(page_row(medians_of_way, first_turn["prompt"], first_turn["answers"]))
        results[name] = {"medians": medians_of_way, "turns": turns}
        (options.output / "step.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
