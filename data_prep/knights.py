"""Knights and knaves: each person says one thing, knights tell the truth, knaves lie, and one reading alone fits.

The text half of ADORA trains on such puzzles with 3 to 7 people and tests on 2 to 8 (arXiv 2602.10019; `data/kk` of its
repository, which `knights_table` reads). These are drawn here; the solution is found, and its uniqueness checked, by
trying every assignment.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adora_vl.errors import UserError
from data_prep.schema import Row

PEOPLE = (2, 8)  # fewest and most
NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kai", "Lea", "Max", "Nia", "Otto", "Pia",
)  # fmt: skip
ROLES = ("knave", "knight")
QUESTION = (
    "On an island everyone is a knight, who always tells the truth, or a knave, who always lies. You meet {people}. "
    "{statements} Who is what? Put the answer in a box, like \\boxed{{{example}}}."
)
_MAX_REDRAWS = 20_000  # of one puzzle, before there are no more to be found
_TEST_SHARE = 0.25  # of all puzzles, by a hash of their text, so that no split has a puzzle of another


@dataclass(frozen=True)
class Statement:
    """What a person says: its words, with `{0}` and `{1}` for people, and when it is true of their being knights."""

    words: str
    people: int
    true: tuple[bool, ...]  # by knighthood of the first, or of (first, second) as 00, 01, 10, 11


STATEMENTS = (
    Statement("{0} is a knight", 1, (False, True)),
    Statement("{0} is a knave", 1, (True, False)),
    Statement("{0} and {1} are both knights", 2, (False, False, False, True)),
    Statement("{0} and {1} are both knaves", 2, (True, False, False, False)),
    Statement("{0} is a knight or {1} is a knave", 2, (True, False, True, True)),
    Statement("{0} and {1} are of the same kind", 2, (True, False, False, True)),
    Statement("exactly one of {0} and {1} is a knight", 2, (False, True, True, False)),
    Statement("if {0} is a knight, then {1} is a knave", 2, (True, True, True, False)),
)
Said = tuple[int, Statement, tuple[int, ...]]  # speaker, statement, whom it is about


def is_true(said: Said, assignment: int) -> bool:
    """Whether a statement holds where bit i of `assignment` says that person i is a knight."""
    _, statement, about = said
    index = 0
    for person in about:
        index = 2 * index + (assignment >> person & 1)
    return statement.true[index]


def solutions(people: int, everything_said: tuple[Said, ...]) -> list[int]:
    """Every assignment in which knights, and they alone, say what is true."""
    return [
        assignment
        for assignment in range(2**people)
        if all(is_true(said, assignment) == bool(assignment >> said[0] & 1) for said in everything_said)
    ]


def _draw(people: int, rng: random.Random) -> tuple[tuple[Said, ...], int]:
    """One statement a person, drawn anew until one assignment fits."""
    while True:
        said = []
        for speaker in range(people):
            statement = rng.choice(STATEMENTS)
            others = [person for person in range(people) if person != speaker]
            if statement.people > len(others):  # of two people, a statement about two is about the speaker too
                others.append(speaker)
            said.append((speaker, statement, tuple(rng.sample(others, statement.people))))
        found = solutions(people, tuple(said))
        if len(found) == 1:
            return tuple(said), found[0]


def assignment_text(names: tuple[str, ...], assignment: int) -> str:
    """`Ada is a knight, Ben is a knave`: the form of the gold and of an answer."""
    return ", ".join(f"{name} is a {ROLES[assignment >> person & 1]}" for person, name in enumerate(names))


def _row(names: tuple[str, ...], said: tuple[Said, ...], solution: int, row_id: str, split: str) -> Row:
    lines = [
        f"{names[speaker]} says: {statement.words.format(*(names[person] for person in about))}."
        for speaker, statement, about in said
    ]
    gold = assignment_text(names, solution)
    rng = random.Random(f"{row_id}/slip")
    wrong = solution ^ rng.randrange(1, 2 ** len(names))
    problem = QUESTION.format(
        people=", ".join(names[:-1]) + f" and {names[-1]}", statements=" ".join(lines), example=example_answer(names)
    )
    slip = f"\\boxed{{{assignment_text(names, wrong)}}}"
    return puzzle_row(row_id, problem, gold, people=len(names), split=split, slip=slip)


def example_answer(names: Sequence[str]) -> str:
    """`Ada is a knight, ...`: what an answer looks like; the last person is never in it."""
    hints = [f"{name} is a {role}" for name, role in zip(names[: len(names) - 1], ("knight", "knave"), strict=False)]
    return ", ".join([*hints, "..."])


def puzzle_row(row_id: str, problem: str, gold: str, *, people: int, split: str, slip: str = "") -> Row:
    """A puzzle as a row: no images, and its roles (`assignment_text`) as the answer. `slip`: a wrong one, in a box."""
    return {
        "id": row_id,
        "images": [],
        "problem": problem,
        "answer": gold,
        "answer_raw": gold,
        "choices": None,
        "split": split,
        "source": "knights",
        "meta": {
            "goal": "knights and knaves",
            "shapes": [],
            "family": f"{people} people",
            "kind": "",
            "solution": f"\\boxed{{{gold}}}",
            "slip": slip,
        },
    }


def generate(rows: int, *, split: str = "train", seed: int = 0, people: tuple[int, int] = PEOPLE) -> Iterator[Row]:
    """Yield `rows` puzzles of `split`, each once, with `people` (fewest, most) in turn; equal for equal arguments.

    Raises `UserError` where `people` is not within 2 and 8.
    """
    fewest, most = people
    if not PEOPLE[0] <= fewest <= most <= PEOPLE[1]:
        raise UserError(f"people: {fewest}-{most} is no range within {PEOPLE[0]}-{PEOPLE[1]}, the smaller number first")
    rng = random.Random(f"knights/{seed}/{split}")
    seen: set[str] = set()
    redraws = 0
    while len(seen) < rows:
        count = fewest + len(seen) % (most - fewest + 1)
        names = tuple(rng.sample(NAMES, count))
        said, solution = _draw(count, rng)
        row = _row(names, said, solution, f"knights/{seed}/{split}/{len(seen)}", split)
        digest = hashlib.sha256(row["problem"].encode()).hexdigest()
        in_test = int(digest[:8], 16) < _TEST_SHARE * 2**32
        if in_test == (split == "test") and digest not in seen:
            seen.add(digest)
            redraws = 0
            yield row
        elif (redraws := redraws + 1) == _MAX_REDRAWS:
            raise UserError(
                f"rows: {rows} of split {split!r} are more than the {len(seen)} different puzzles that were found; "
                "ask for fewer, or for more --people"
            )
