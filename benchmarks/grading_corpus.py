"""Three graders on the labelled corpus of the tests: `python -m benchmarks.grading_corpus`. Prints a Markdown table.

Ours, math-verify as its README has it (`verify(parse(gold), parse(response))`, the gold as it is and between dollar
signs) and TRL's `accuracy_reward`. The others run in a child process that is killed after `--limit` seconds on one
case, since neither comes back from every attack. About six minutes. Needs the `dev` extra (math-verify).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adora_vl.rewards import grade
from tests.grading_corpus import Case, cases

Grader = Callable[[Case], bool]


def ours(case: Case) -> bool:
    return grade(case.response, case.gold, choices=case.choices, rounding=case.rounding).verdict == "correct"


def math_verify(case: Case, gold: str | None = None) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(case.gold if gold is None else gold), parse(case.response)))


def math_verify_dollars(case: Case) -> bool:
    return math_verify(case, f"${case.gold}$")


def trl(case: Case) -> bool:
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": case.response}]], [case.gold])[0] == 1.0


def trl_in_a_thread(case: Case) -> bool:
    """Where math-verify's time-outs, which are signals, do not work."""
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
    """How often each thing happened, and the names of the cases that went wrong."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for one case before its process is killed")
    parser.add_argument("--cases", action="store_true", help="also list every case that a grader gets wrong")
    options = parser.parse_args()
    corpus = cases()
    right = sum(case.label == "correct" for case in corpus)
    print(f"{len(corpus)} cases: {right} to accept, {len(corpus) - right} to reject\n")
    columns = ["right", "false accept", "false reject", "raised", "hung", "died"]
    print("| grader | right | false accepts | false rejects | raised | hung | died |")
    print("|---|---|---|---|---|---|---|")
    listed: list[str] = []
    by_kind: dict[str, Counter[str]] = {}
    for name in GRADERS:
        counts, failed = figures(name, corpus, options.limit)
        print(f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)
        listed += [f"\n{name}", *failed]
        by_kind[name] = counts
    print("\nBy kind, false accepts / false rejects:\n")
    print(f"| kind | to accept, to reject | {' | '.join(by_kind)} |\n|---|---|{'---|' * len(by_kind)}")
    for kind in sorted({case.kind for case in corpus}):
        labels = [case.label == "correct" for case in corpus if case.kind == kind]
        cells = [f"{one[f'{kind} false accept']} / {one[f'{kind} false reject']}" for one in by_kind.values()]
        print(f"| {kind} | {labels.count(True)}, {labels.count(False)} | {' | '.join(cells)} |")
    if options.cases:
        print("\n".join(listed))


if __name__ == "__main__":
    main()
