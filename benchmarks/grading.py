"""Graders on the labelled corpus, and how fast ours is: `python -m benchmarks.grading`.

Needs the `dev` extra.

By itself it prints a Markdown table of three graders: ours, math-verify as its README has it
(`verify(parse(gold), parse(response))`, the reference answer as it is and between dollar signs) and
TRL's `accuracy_reward`. They run in a child process that is killed after `--limit` seconds on one
case, since the others do not come back from every attack. About six minutes.

`--speed` grades `--responses` mixed responses instead, 1 % of them attacks, and prints throughput,
the slowest percent, the verdicts and the memory over time; its times are the processor's, whatever
else the machine does. Then it compares with math-verify on honest answers alone, on one thread, in
alternation, as completions per second and their ratio. `--generations N` measures what the grades
of a generation of 128 rollouts take, N times.
"""

import argparse
import logging
import multiprocessing
import os
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from adora_vl.rewards import grade
from adora_vl.rewards.grade import grade_batch
from benchmarks.grading_corpus import Case, cases

PAGE = os.sysconf("SC_PAGE_SIZE")
CHECKPOINTS = 8
Grader = Callable[[Case], bool]


def ours(case: Case) -> bool:
    return (
        grade(case.response, case.gold, choices=case.choices, rounding=case.rounding).verdict
        == "correct"
    )


def math_verify(case: Case, gold: str | None = None) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(case.gold if gold is None else gold), parse(case.response)))


def math_verify_dollars(case: Case) -> bool:
    return math_verify(case, f"${case.gold}$")


def trl(case: Case) -> bool:
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": case.response}]], [case.gold])[0] == 1.0


def trl_in_a_thread(case: Case) -> bool:
    """TRL's grader in a thread, where math-verify's time-outs do not work, because they are
    signals.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(trl, case).result()


GRADERS: dict[str, Grader] = {
    "`adora_vl.rewards.grade`": ours,
    "math-verify, gold as it is": math_verify,
    "math-verify, gold in `$...$`": math_verify_dollars,
    "TRL's `accuracy_reward`": trl,
    "the same, off the main thread": trl_in_a_thread,
}


def serve(connection: Connection, name: str) -> None:
    """In the child: grade what comes."""
    logging.disable(logging.CRITICAL)
    while True:
        case = connection.recv()
        try:
            connection.send(GRADERS[name](case))
        except Exception:  # an exception would end a training run
            connection.send("raised")


class Child:
    """A child process that grades, replaced when it hangs or dies."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._name), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, case: Case, limit: float) -> bool | str:
        try:
            self._connection.send(case)
            if self._connection.poll(limit):
                return self._connection.recv()
            outcome = "hung"
        except (EOFError, OSError):
            outcome = "died"
        self.close()
        self._start()
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def figures(name: str, corpus: list[Case], limit: float) -> tuple[Counter[str], list[str]]:
    """The number of cases by outcome, and the names of those that were graded wrongly."""
    counts: Counter[str] = Counter()
    failed: list[str] = []
    child = Child(name)
    child.ask(corpus[0], 120)  # its imports are not what is judged
    for case in corpus:
        outcome = child.ask(case, limit)
        if isinstance(outcome, str):
            what = outcome
        elif outcome == (case.label == "correct"):
            what = "right"
        else:
            what = "false accept" if outcome else "false reject"
        counts[what] += 1
        counts[f"{case.kind} {what}"] += 1
        if what != "right":
            failed.append(f"{what:<13}{case.name}")
    child.close()
    return counts, failed


def correctness(limit: float, list_cases: bool) -> None:
    """Every grader on the corpus, overall and by kind."""
    corpus = cases()
    right = sum(case.label == "correct" for case in corpus)
    print(f"{len(corpus)} cases: {right} to accept, {len(corpus) - right} to reject\n")
    columns = ["right", "false accept", "false reject", "raised", "hung", "died"]
    print("| grader | right | false accepts | false rejects | raised | hung | died |")
    print("|---|---|---|---|---|---|---|")
    listed: list[str] = []
    by_kind: dict[str, Counter[str]] = {}
    for name in GRADERS:
        counts, failed = figures(name, corpus, limit)
        print(f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)
        listed += [f"\n{name}", *failed]
        by_kind[name] = counts
    print("\nBy kind, false accepts / false rejects:\n")
    print(
        f"| kind | to accept, to reject | {' | '.join(by_kind)} |\n|---|---|{'---|' * len(by_kind)}"
    )
    for kind in sorted({case.kind for case in corpus}):
        labels = [case.label == "correct" for case in corpus if case.kind == kind]
        cells = [
            f"{one[f'{kind} false accept']} / {one[f'{kind} false reject']}"
            for one in by_kind.values()
        ]
        print(f"| {kind} | {labels.count(True)}, {labels.count(False)} | {' | '.join(cells)} |")
    if list_cases:
        print("\n".join(listed))


def resident_mb() -> float:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


def mixed(count: int, seed: int) -> list[Case]:
    """`count` cases: 1 % attacks, the others drawn from the rest of the corpus, inside a chain of
    thought.
    """
    rng = random.Random(seed)
    corpus = cases()
    attacks = [case for case in corpus if case.kind == "attacks" and case.label != "correct"]
    honest_cases = [case for case in corpus if case.kind != "attacks"]
    drawn = [rng.choice(attacks) for _ in range(count // 100)]
    drawn += [rng.choice(honest_cases) for _ in range(count - len(drawn))]
    rng.shuffle(drawn)
    return drawn


def soak(count: int, seed: int) -> None:
    drawn = mixed(count, seed)
    thought = "The triangle is right, so I use $a^2 + b^2 = c^2$ and {2} \\frac{1}{2}. " * 20
    verdicts: Counter[str] = Counter()
    # no grade is kept, so that what grows is the grader's
    times_ms = {
        "honest": array("d"),
        "attacks": array("d"),
    }
    memory: list[str] = []

    began = time.process_time()
    for step in range(CHECKPOINTS):
        for case in drawn[step * count // CHECKPOINTS : (step + 1) * count // CHECKPOINTS]:
            before = time.process_time()
            graded = grade(
                thought + case.response, case.gold, choices=case.choices, rounding=case.rounding
            )
            times_ms["attacks" if case.kind == "attacks" else "honest"].append(
                1000 * (time.process_time() - before)
            )
            verdicts[graded.verdict] += 1
            verdicts["not as labelled"] += graded.verdict != case.label and case.label != "rejected"
        memory.append(f"{resident_mb():.0f}")
    seconds = time.process_time() - began
    print(
        f"soak: {count} responses, 1 % attacks: {seconds:.1f} s of the processor, "
        f"{count / seconds:.0f} per second"
    )
    for name, times in {"all": times_ms["honest"] + times_ms["attacks"], **times_ms}.items():
        ordered = sorted(times)
        median, p99 = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
        print(f"  {name:<8} median {median:.2f} ms, p99 {p99:.2f} ms, slowest {ordered[-1]:.0f} ms")
    print(f"  {', '.join(f'{name} {number}' for name, number in verdicts.items())}")
    print(f"  resident MB at {CHECKPOINTS} points: {', '.join(memory)}")


def generations(count: int, seed: int) -> None:
    """The most that grading during sampling could save: the whole time of grading."""
    found: dict[str, list[float]] = {"honest": [], "one attack": []}
    grade_batch([r"\boxed{\sin(30)}"], ["1"])  # imports mpmath
    for number in range(count):
        drawn = mixed(128, seed + number)
        for name, batch in (
            ("honest", [case for case in drawn if case.kind != "attacks"]),
            ("one attack", drawn),
        ):
            began = time.process_time()
            grade_batch([case.response for case in batch], [case.gold for case in batch])
            found[name].append(time.process_time() - began)
    for name, seconds in found.items():
        median = sorted(seconds)[len(seconds) // 2]
        print(
            f"128 rollouts, {name}: median of {count} {median:.3f} s of the processor, longest "
            f"{max(seconds):.3f} s"
        )


def rate(grader: Grader, corpus: list[Case]) -> float:
    """Cases per second."""
    began = time.perf_counter()
    for case in corpus:
        grader(case)
    return len(corpus) / (time.perf_counter() - began)


def speed(rounds: int) -> None:
    honest = [
        case
        for case in cases()
        if case.label == "correct" and case.kind not in ("attacks", "responses")
    ]
    for grader in (ours, math_verify_dollars):
        rate(grader, honest[:20])  # imports, the first parser
    ratios = []
    for _ in range(rounds):
        fast = rate(ours, honest)
        slow = rate(math_verify_dollars, honest)
        ratios.append(fast / slow)
        print(
            f"speed: {len(honest)} honest answers a second: ours {fast:.0f}, math-verify {slow:.0f}"
        )
    print(f"  median ratio {sorted(ratios)[len(ratios) // 2]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=10.0,
        help="seconds for one case before its process is killed",
    )
    parser.add_argument(
        "--cases", action="store_true", help="also list every case that a grader gets wrong"
    )
    parser.add_argument("--speed", action="store_true", help="throughput instead")
    parser.add_argument("--responses", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of the comparison of speeds; 0 leaves it out"
    )
    parser.add_argument("--generations", type=int, default=0)
    options = parser.parse_args()
    if options.generations:
        generations(options.generations, options.seed)
    elif options.speed:
        soak(options.responses, options.seed)
        if options.rounds:
            speed(options.rounds)
    else:
        correctness(options.limit, options.cases)


if __name__ == "__main__":
    main()
