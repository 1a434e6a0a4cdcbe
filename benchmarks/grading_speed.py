"""A soak of the grader, and its speed beside math-verify's: `python -m benchmarks.grading_speed`.

The soak grades `--responses` mixed responses, 1 % of them attacks, on two threads, and prints throughput, the slowest
percent, the verdicts and the memory of this process and its workers over time. The speed is measured on honest answers
alone, in one process and on one thread, in alternation, as completions per second and their ratio. Needs the
`dev` extra.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adora_vl.rewards import Grade, grade
from adora_vl.rewards.pool import shared_pool
from tests.grading_corpus import Case, cases

PAGE = os.sysconf("SC_PAGE_SIZE")
CHECKPOINTS = 8


def resident_mb(pids: list[int]) -> float:
    """The memory of some processes; a worker may end while it is looked at."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        except OSError:
            continue
    return total / 1e6


def mixed(count: int, seed: int) -> list[Case]:
    """`count` cases: 1 % attacks, the others drawn from the rest of the corpus, inside a chain of thought."""
    rng = random.Random(seed)
    corpus = cases()
    attacks = [case for case in corpus if case.kind == "attacks" and case.label != "correct"]
    others = [case for case in corpus if case.kind != "attacks"]
    drawn = [rng.choice(attacks) for _ in range(count // 100)]
    drawn += [rng.choice(others) for _ in range(count - len(drawn))]
    rng.shuffle(drawn)
    return drawn


def soak(count: int, seed: int) -> None:
    drawn = mixed(count, seed)
    thought = "The triangle is right, so I use $a^2 + b^2 = c^2$ and {2} \\frac{1}{2}. " * 20
    verdicts: Counter[str] = Counter()
    times_ms = {"honest": array("d"), "attacks": array("d")}  # no grade is kept, so that what grows is the grader's
    memory: list[str] = []

    def one(case: Case) -> tuple[Case, Grade]:
        return case, grade(thought + case.response, case.gold, choices=case.choices, rounding=case.rounding)

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for step in range(CHECKPOINTS):
            for case, found in threads.map(one, drawn[step * count // CHECKPOINTS : (step + 1) * count // CHECKPOINTS]):
                verdicts[found.verdict] += 1
                verdicts["not as labelled"] += found.verdict != case.label and case.label != "rejected"
                verdicts["reached sympy"] += found.symbolic
                times_ms["attacks" if case.kind == "attacks" else "honest"].append(found.ms)
            memory.append(f"{resident_mb([os.getpid()]):.0f}+{resident_mb(shared_pool().pids):.0f}")
    seconds = time.perf_counter() - began
    print(f"soak: {count} responses, 1 % attacks, 2 threads: {seconds:.1f} s, {count / seconds:.0f} per second")
    for name, times in {"all": times_ms["honest"] + times_ms["attacks"], **times_ms}.items():
        ordered = sorted(times)
        median, p99 = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
        print(f"  {name:<8} median {median:.2f} ms, p99 {p99:.2f} ms, slowest {ordered[-1]:.0f} ms")
    print(f"  {', '.join(f'{name} {number}' for name, number in verdicts.items())}")
    print(f"  resident MB, this process + workers, at {CHECKPOINTS} points: {', '.join(memory)}")


def rate(grader: Callable[[Case], object], corpus: list[Case]) -> float:
    """Cases per second."""
    began = time.perf_counter()
    for case in corpus:
        grader(case)
    return len(corpus) / (time.perf_counter() - began)


def speed(rounds: int) -> None:
    from math_verify import parse, verify

    honest = [case for case in cases() if case.label == "correct" and case.kind not in ("attacks", "responses")]

    def theirs(case: Case) -> object:
        return verify(parse(f"${case.gold}$"), parse(case.response))

    def mine(case: Case) -> object:
        return grade(case.response, case.gold, choices=case.choices, rounding=case.rounding)

    for grader in (mine, theirs):
        rate(grader, honest[:20])  # imports, the first worker, the first parser
    ratios = []
    for _ in range(rounds):
        fast, slow = rate(mine, honest), rate(theirs, honest)
        ratios.append(fast / slow)
        print(f"speed: {len(honest)} honest answers a second: ours {fast:.0f}, math-verify {slow:.0f}")
    print(f"  median ratio {sorted(ratios)[len(ratios) // 2]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of speeds; 0 leaves it out")
    options = parser.parse_args()
    soak(options.responses, options.seed)
    if options.rounds:
        speed(options.rounds)


if __name__ == "__main__":
    main()
