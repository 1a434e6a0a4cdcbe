"""A soak of the grader, and its speed beside math-verify's: `python -m benchmarks.grading_speed`.

The soak grades `--responses` mixed responses, 1 % of them attacks, on two threads, and prints throughput, the slowest
percent, the verdicts and the memory of this process and its workers over time. The speed is measured on honest answers
alone, in one process and on one thread, in alternation, as completions per second and their ratio. Needs the
`dev` extra.

With `--generations N` it measures instead how long a training step waits for the grades of 128 rollouts, N times.
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
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adora_vl.rewards import Grade, grade
from adora_vl.rewards.grade import grade_batch
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


def worker_seconds() -> float:
    """The processor's seconds of the workers that there are now."""
    ticks = 0
    for pid in shared_pool().pids:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def generations(count: int, seed: int) -> None:
    """What grading could save at most if it were done while others are still sampled: all that it takes."""
    names = ("waited", "this process", "workers")
    found: dict[str, list[tuple[float, float, float]]] = {"honest": [], "one attack": []}
    for warm in range(2):  # the workers start
        grade_batch([rf"\boxed{{\sin({30 + warm})}}"] * 8, ["x"] * 8)
    for number in range(count):
        drawn = mixed(128, seed + number)
        for name, batch in (("honest", [case for case in drawn if case.kind != "attacks"]), ("one attack", drawn)):
            before = time.perf_counter(), time.process_time(), worker_seconds()
            grade_batch([case.response for case in batch], [case.gold for case in batch])
            after = time.perf_counter(), time.process_time(), worker_seconds()
            found[name].append(tuple(b - a for a, b in zip(before, after, strict=True)))  # type: ignore[arg-type]
    for name, each in found.items():
        medians = [sorted(column)[len(column) // 2] for column in zip(*each, strict=True)]
        said = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in zip(names, medians, strict=True))
        print(f"128 rollouts, {name}: medians of {count}: {said}; longest wait {max(each)[0]:.3f} s")


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
    parser.add_argument("--generations", type=int, default=0)
    options = parser.parse_args()
    if options.generations:
        generations(options.generations, options.seed)
        return
    soak(options.responses, options.seed)
    if options.rounds:
        speed(options.rounds)


if __name__ == "__main__":
    main()
