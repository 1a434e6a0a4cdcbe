"""Runs the grader on data of others.

`python -m benchmarks.grading_data --cases cases.jsonl --golds test.jsonl`.

`--cases`: rows with `gold`, `answer` and `right`, as in math-verify's tests. An answer without a
box is put into one, and of a gold with boxes the last ones count. Prints every verdict that does
not agree, and a table of those that do by `group`. The exit code is 1 if a wrong answer is
accepted. `--golds`: rows with an `answer` or `solution`. Prints the golds that are refused, and
every pair of different texts of which one is accepted for the other: they should be the same value.
Of rows with `options` it prints each option, as its letter or its value, that is not graded as it
should be.
"""

import argparse
import json
import sys
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from adora_vl.rewards import grade, verify_gold
from adora_vl.rewards.completion import last_adjacent_boxes, last_boxed

SHOWN_CHARACTERS = 60  # characters of a text


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def print_agreement(path: Path) -> bool:
    """Print how many cases agree with their labels; return whether no wrong answer is accepted."""
    all_rows = read_rows(path)
    accepted = 0
    agreements_by_group: dict[str, list[bool]] = {}
    for number, row in enumerate(all_rows, 1):
        gold = ", ".join(last_adjacent_boxes(row["gold"], answer_tags=False)) or row["gold"]
        answer = (
            row["answer"]
            if last_boxed(row["answer"]) is not None
            else rf"\boxed{{{row['answer']}}}"
        )
        graded = grade(answer, gold)
        is_accepted = graded.verdict == "correct"
        agrees = is_accepted == row["right"]
        agreements_by_group.setdefault(row.get("group", "all"), []).append(agrees)
        if not agrees:
            if is_accepted:
                accepted += 1
            print(
                f"{number:4} {graded.verdict} ({graded.reason}): {row['answer']!r:.{SHOWN_CHARACTERS}} for "
                f"{gold!r:.{SHOWN_CHARACTERS}}"
            )
    wrong = sum(not row["right"] for row in all_rows)
    print(
        "\n".join(
            f"| {group.removeprefix('test_')} | {sum(agreements)} of {len(agreements)} |"
            for group, agreements in agreements_by_group.items()
        )
    )
    print(
        f"{sum(map(sum, agreements_by_group.values()))} of {len(all_rows)} agree; {accepted} of {wrong} wrong "
        "answers are accepted"
    )
    return not accepted


def print_neighbours(path: Path) -> None:
    """Print refused golds, and pairs of different texts of which one is right for the other."""
    with_options = [row for row in read_rows(path) if row.get("options")]
    all_rows = sorted(
        {row.get("answer") or row["solution"] for row in read_rows(path) if not row.get("options")}
    )
    reasons = {gold: verify_gold(gold) for gold in all_rows}
    for gold, reason in reasons.items():
        if reason:
            print(f"refused: {gold!r:.{SHOWN_CHARACTERS}} ({reason})")
    usable = [gold for gold in all_rows if reasons[gold] is None]
    for gold in usable:
        for answer in usable:
            if answer != gold and grade(rf"\boxed{{{answer}}}", gold).verdict == "correct":
                print(f"accepted: {answer!r:.{SHOWN_CHARACTERS}} for {gold!r:.{SHOWN_CHARACTERS}}")
    print(
        f"{len(usable)} of {len(all_rows)} different golds are graded as right against themselves"
    )
    if with_options:
        print(
            f"{sum(map(print_options, with_options))} of {len(with_options)} rows "
            "with options are, too"
        )


def print_options(row: dict[str, Any]) -> bool:
    """Return whether the right option is right, and no other one is.

    Each is graded as a letter and as a value; what is not so is printed.
    """
    gold = row["answer"]
    options = row["options"]
    wrong_answers = [
        answer
        for letter, value in zip(ascii_uppercase, options, strict=False)
        for answer in (letter, value)
        if (grade(rf"\boxed{{{answer}}}", gold, choices=options).verdict == "correct")
        != (letter == gold)
    ]
    for answer in wrong_answers:
        print(
            f"option {answer!r:.{SHOWN_CHARACTERS}} of {options!r:.{SHOWN_CHARACTERS}} for {gold!r}"
        )
    return not wrong_answers


def main() -> int:
    """Run the command, and return its exit code: 1 where a wrong answer is accepted, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--golds", type=Path)
    options = parser.parse_args()
    if options.golds:
        print_neighbours(options.golds)
    return 0 if not options.cases or print_agreement(options.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
