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

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MEMORY_CHECKPOINTS = 8  # at which the memory is looked at
Grader = Callable[[Case], bool]


def grade_by_ours(case: Case) -> bool:
    """Return whether our grader accepts a case."""
    return (
        grade(case.response, case.gold, choices=case.choices, rounding=case.rounding).verdict
        == "correct"
    )


def grade_by_math_verify(case: Case, gold: str | None = None) -> bool:
    """Return whether math-verify accepts a case; `gold` replaces its reference answer."""
    from math_verify import parse, verify

    return bool(verify(parse(case.gold if gold is None else gold), parse(case.response)))


def grade_by_math_verify_in_dollars(case: Case) -> bool:
    """Return whether math-verify accepts a case whose gold stands between dollar signs."""
    return grade_by_math_verify(case, f"${case.gold}$")


def grade_by_trl(case: Case) -> bool:
    """Return whether TRL's `accuracy_reward` accepts a case."""
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": case.response}]], [case.gold])[0] == 1.0


def grade_by_trl_in_a_thread(case: Case) -> bool:
    """Return what TRL's grader says in a thread.

    Math-verify's time-outs do not work there, because they are signals.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(grade_by_trl, case).result()


GRADER_BY_NAME: dict[str, Grader] = {
    "`adora_vl.rewards.grade`": grade_by_ours,
    "math-verify, gold as it is": grade_by_math_verify,
    "math-verify, gold in `$...$`": grade_by_math_verify_in_dollars,
    "TRL's `accuracy_reward`": grade_by_trl,
    "the same, off the main thread": grade_by_trl_in_a_thread,
}


def serve_cases(connection: Connection, name: str) -> None:
    """Grade the cases that come, in the child process."""
    logging.disable(logging.CRITICAL)
    while True:
        case = connection.recv()
        try:
            connection.send(GRADER_BY_NAME[name](case))
        except Exception:  # an exception would end a training run
            connection.send("raised")


class GraderProcess:
    """A child process that grades, replaced when it hangs or dies."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        """Start a new child process."""
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=serve_cases, args=(child_connection, self._name), daemon=True
        )
        self._process.start()
        child_connection.close()

    def ask(self, case: Case, limit: float) -> bool | str:
        """Return the verdict on a case; "hung" or "died" if the child gives none in `limit` s."""
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
        """Kill the child process."""
        self._process.kill()
        self._process.join()


def read_figures(name: str, corpus: list[Case], limit: float) -> tuple[Counter[str], list[str]]:
    """Return the number of cases by outcome, and the names of those that were graded wrongly."""
    counts: Counter[str] = Counter()
    wrong_cases: list[str] = []
    child = GraderProcess(name)
    child.ask(corpus[0], 120)  # its imports are not what is judged
    for case in corpus:
        outcome = child.ask(case, limit)
        if isinstance(outcome, str):
            result = outcome
        elif outcome == (case.label == "correct"):
            result = "right"
        else:
            result = "false accept" if outcome else "false reject"
        counts[result] += 1
        counts[f"{case.kind} {result}"] += 1
        if result != "right":
            wrong_cases.append(f"{result:<13}{case.name}")
    child.close()
    return counts, wrong_cases


def print_correctness(limit: float, list_cases: bool) -> None:
    """Print how every grader judges the corpus, overall and by kind."""
    corpus = cases()
    right = sum(case.label == "correct" for case in corpus)
    print(f"{len(corpus)} cases: {right} to accept, {len(corpus) - right} to reject\n")
    columns = ["right", "false accept", "false reject", "raised", "hung", "died"]
    print("| grader | right | false accepts | false rejects | raised | hung | died |")
    print("|---|---|---|---|---|---|---|")
    wrong_case_lines: list[str] = []
    counts_by_grader: dict[str, Counter[str]] = {}
    for name in GRADER_BY_NAME:
        counts, wrong_cases = read_figures(name, corpus, limit)
        print(f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)
        wrong_case_lines += [f"\n{name}", *wrong_cases]
        counts_by_grader[name] = counts
    print("\nBy kind, false accepts / false rejects:\n")
    print(
        f"| kind | to accept, to reject | {' | '.join(counts_by_grader)} |\n|---|---|{'---|' * len(counts_by_grader)}"
    )
    for kind in sorted({case.kind for case in corpus}):
        labels = [case.label == "correct" for case in corpus if case.kind == kind]
        cells = [
            f"{counts[f'{kind} false accept']} / {counts[f'{kind} false reject']}"
            for counts in counts_by_grader.values()
        ]
        print(f"| {kind} | {labels.count(True)}, {labels.count(False)} | {' | '.join(cells)} |")
    if list_cases:
        print("\n".join(wrong_case_lines))


def resident_mb() -> float:
    """Return the memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


def draw_cases(count: int, seed: int) -> list[Case]:
    """Draw `count` cases: 1 % attacks, and the others from the rest of the corpus."""
    rng = random.Random(seed)
    corpus = cases()
    attacks = [case for case in corpus if case.kind == "attacks" and case.label != "correct"]
    honest_cases = [case for case in corpus if case.kind != "attacks"]
    drawn = [rng.choice(attacks) for _ in range(count // 100)]
    drawn += [rng.choice(honest_cases) for _ in range(count - len(drawn))]
    rng.shuffle(drawn)
    return drawn


def measure_throughput(count: int, seed: int) -> None:
    """Grade `count` responses, and print the times, the verdicts and the memory.

    Honest responses and attacks are timed apart. The memory is looked at after each eighth of the
    responses, since a leak would show as steady growth.
    """
    drawn = draw_cases(count, seed)
    # Stands before each answer, as the working of a real response does.
    thought = "The triangle is right, so I use $a^2 + b^2 = c^2$ and {2} \\frac{1}{2}. " * 20
    verdicts: Counter[str] = Counter()
    # No grade is kept, so that memory which grows is the grader's.
    times_ms = {
        "honest": array("d"),
        "attacks": array("d"),
    }
    memory: list[str] = []

    start = time.process_time()
    for step in range(MEMORY_CHECKPOINTS):
        for case in drawn[
            step * count // MEMORY_CHECKPOINTS : (step + 1) * count // MEMORY_CHECKPOINTS
        ]:
            before = time.process_time()
            graded = grade(
                thought + case.response, case.gold, choices=case.choices, rounding=case.rounding
            )
            times_ms["attacks" if case.kind == "attacks" else "honest"].append(
                1000 * (time.process_time() - before)
            )
            verdicts[graded.verdict] += 1
            # The entry is there also where all verdicts are as labelled.
            verdicts["not as labelled"] += int(
                graded.verdict != case.label and case.label != "rejected"
            )
        memory.append(f"{resident_mb():.0f}")
    seconds = time.process_time() - start
    print(
        f"soak: {count} responses, 1 % attacks: {seconds:.1f} s of the processor, "
        f"{count / seconds:.0f} per second"
    )
    for name, times in {"all": times_ms["honest"] + times_ms["attacks"], **times_ms}.items():
        ordered = sorted(times)
        median = ordered[int(0.5 * len(ordered))]
        p99 = ordered[int(0.99 * len(ordered))]
        print(f"  {name:<8} median {median:.2f} ms, p99 {p99:.2f} ms, slowest {ordered[-1]:.0f} ms")
    print(f"  {', '.join(f'{name} {number}' for name, number in verdicts.items())}")
    print(f"  resident MB at {MEMORY_CHECKPOINTS} points: {', '.join(memory)}")


def measure_generations(count: int, seed: int) -> None:
    """Time the grades of a generation of 128 rollouts, `count` times.

    Grading during sampling could save this time at most.
    """
    seconds_by_batch: dict[str, list[float]] = {"honest": [], "one attack": []}
    grade_batch([r"\boxed{\sin(30)}"], ["1"])  # imports mpmath
    for number in range(count):
        drawn = draw_cases(128, seed + number)
        for name, batch in (
            ("honest", [case for case in drawn if case.kind != "attacks"]),
            ("one attack", drawn),
        ):
            start = time.process_time()
            grade_batch([case.response for case in batch], [case.gold for case in batch])
            seconds_by_batch[name].append(time.process_time() - start)
    for name, seconds in seconds_by_batch.items():
        median = sorted(seconds)[len(seconds) // 2]
        print(
            f"128 rollouts, {name}: median of {count} {median:.3f} s of the processor, longest "
            f"{max(seconds):.3f} s"
        )


def cases_per_second(grader: Grader, corpus: list[Case]) -> float:
    """Return how many cases a grader judges in a second."""
    start = time.perf_counter()
    for case in corpus:
        grader(case)
    return len(corpus) / (time.perf_counter() - start)


def compare_speed(rounds: int) -> None:
    """Compare our speed with math-verify's on honest answers, in alternation."""
    honest = [
        case
        for case in cases()
        if case.label == "correct" and case.kind not in ("attacks", "responses")
    ]
    for grader in (grade_by_ours, grade_by_math_verify_in_dollars):
        cases_per_second(grader, honest[:20])  # imports, the first parser
    ratios = []
    for _ in range(rounds):
        fast = cases_per_second(grade_by_ours, honest)
        slow = cases_per_second(grade_by_math_verify_in_dollars, honest)
        ratios.append(fast / slow)
        print(
            f"speed: {len(honest)} honest answers a second: ours {fast:.0f}, math-verify {slow:.0f}"
        )
    print(f"  median ratio {sorted(ratios)[len(ratios) // 2]:.1f}")


def main() -> None:
    """Run the comparison that the options name."""
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
        measure_generations(options.generations, options.seed)
    elif options.speed:
        measure_throughput(options.responses, options.seed)
        if options.rounds:
            compare_speed(options.rounds)
    else:
        print_correctness(options.limit, options.cases)


if __name__ == "__main__":
    main()
