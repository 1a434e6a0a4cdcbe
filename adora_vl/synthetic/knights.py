"""Knights-and-knaves puzzles: drawn, or from the reference's Parquet files."""

import ast
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from adora_vl.data.dataset import SPLITS, Row
from adora_vl.utils.errors import UserError, in_one_line

PEOPLE = (2, 8)  # fewest and most
NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jane",
    "Kai",
    "Lea",
    "Max",
    "Nia",
    "Otto",
    "Pia",
)
ROLES = ("knave", "knight")
QUESTION = (
    "On an island everyone is a knight, who always tells the truth, or a knave, who always lies. "
    "You meet {people}. {statements} Who is what? Put the answer in a box, like "
    "\\boxed{{{example}}}."
)
_MAX_REDRAWS = 20_000  # draws for one new puzzle, after which there are taken to be no more
# The share of all puzzles that are of the split test. A hash of a puzzle's text decides, so that no
# split has a puzzle of another.
_TEST_SHARE = 0.25


class Statement(NamedTuple):
    """Something that a person may say about one or two people."""

    words: str  # the sentence, with `{0}` and `{1}` for people
    people: int  # how many people it is about
    claim: Callable[..., tuple[Any, ...]]  # makes the claim about these people that `holds` reads


KNIGHT = "telling-truth"
KNAVE = "lying"
STATEMENTS = (
    Statement("{0} is a knight", 1, lambda first: (KNIGHT, first)),
    Statement("{0} is a knave", 1, lambda first: (KNAVE, first)),
    Statement(
        "{0} and {1} are both knights",
        2,
        lambda first, second: ("and", (KNIGHT, first), (KNIGHT, second)),
    ),
    Statement(
        "{0} and {1} are both knaves",
        2,
        lambda first, second: ("and", (KNAVE, first), (KNAVE, second)),
    ),
    Statement(
        "{0} is a knight or {1} is a knave",
        2,
        lambda first, second: ("or", (KNIGHT, first), (KNAVE, second)),
    ),
    Statement(
        "{0} and {1} are of the same kind",
        2,
        lambda first, second: ("<=>", (KNIGHT, first), (KNIGHT, second)),
    ),
    Statement(
        "exactly one of {0} and {1} is a knight",
        2,
        lambda first, second: ("<=>", (KNIGHT, first), (KNAVE, second)),
    ),
    Statement(
        "if {0} is a knight, then {1} is a knave",
        2,
        lambda first, second: ("->", (KNIGHT, first), (KNAVE, second)),
    ),
)


def _draw(
    people: int, rng: random.Random
) -> tuple[list[tuple[Statement, list[int]]], tuple[bool, ...]]:
    """Draw a puzzle of `people` people until there is exactly one solution.

    Returns the statement of each person with the people that it is about, and who is a knight.
    """
    while True:
        statements = []
        for speaker in range(people):
            statement = rng.choice(STATEMENTS)
            subjects = [person for person in range(people) if person != speaker]
            # Where there are two people, a statement about two is about the speaker too.
            if statement.people > len(subjects):
                subjects.append(speaker)
            statements.append((statement, rng.sample(subjects, statement.people)))
        solutions = fitting(tuple(statement.claim(*about) for statement, about in statements))
        if len(solutions) == 1:
            return statements, solutions[0]


def roles_text(names: Sequence[str], is_knight: Sequence[bool]) -> str:
    """Write roles in the form of the gold and of an answer: `Ada is a knight, Ben is a knave`."""
    return ", ".join(
        f"{name} is a {ROLES[kind]}" for name, kind in zip(names, is_knight, strict=True)
    )


def example_answer(names: Sequence[str]) -> str:
    """Show how an answer looks: `Ada is a knight, ...`.

    The last person is never named, so that it is no whole answer.
    """
    return roles_text(names[: min(2, len(names) - 1)], (True, False)[: len(names) - 1]) + ", ..."


def puzzle_row(
    row_id: str, problem: str, gold: str, *, people: int, split: str, slip: str = ""
) -> Row:
    """Make the row of a puzzle, without images, whose answer are its roles (`roles_text`).

    `slip` is a wrong answer in a box.
    """
    meta = {
        "goal": "knights and knaves",
        "shapes": [],
        "family": f"{people} people",
        "kind": "",
        "slip": slip,
    }
    return {
        "id": row_id,
        "images": [],
        "problem": problem,
        "answer": gold,
        "answer_raw": gold,
        "choices": None,
        "split": split,
        "source": "knights",
        "meta": {**meta, "solution": f"\\boxed{{{gold}}}"},
    }


def generate(
    rows: int, split: str = "train", *, seed: int = 0, people: tuple[int, int] = PEOPLE
) -> Iterator[Row]:
    """Yield `rows` puzzles of `split`, each once, with numbers of `people` in turn.

    `people` is the smallest and the largest number. Equal arguments give equal puzzles. Raises
    `UserError` for a range that is not within 2 and 8, and for more puzzles than there are.
    """
    min_people, max_people = people
    if not PEOPLE[0] <= min_people <= max_people <= PEOPLE[1]:
        raise UserError(
            f"people: {min_people}-{max_people} is no range within {PEOPLE[0]}-{PEOPLE[1]}, the smaller "
            "number first"
        )
    rng = random.Random(f"knights/{seed}/{split}")
    known_digests: set[str] = set()
    redraws = 0
    while len(known_digests) < rows:
        count = min_people + len(known_digests) % (max_people - min_people + 1)
        names = tuple(rng.sample(NAMES, count))
        drawn_statements, solution = _draw(count, rng)
        lines = (
            statement.words.format(*(names[person] for person in about))
            for statement, about in drawn_statements
        )
        statements = " ".join(
            f"{name} says: {line}." for name, line in zip(names, lines, strict=True)
        )
        people_met = f"{', '.join(names[:-1])} and {names[-1]}"
        problem = QUESTION.format(
            people=people_met, statements=statements, example=example_answer(names)
        )
        digest = hashlib.sha256(problem.encode()).hexdigest()
        in_test = int(digest[:8], 16) < _TEST_SHARE * 2**32
        if in_test == (split == "test") and digest not in known_digests:
            row_id = f"knights/{seed}/{split}/{len(known_digests)}"
            turned = random.Random(f"{row_id}/slip").randrange(1, 2**count)
            wrong = [kind != bool(turned >> person & 1) for person, kind in enumerate(solution)]
            slip = f"\\boxed{{{roles_text(names, wrong)}}}"
            known_digests.add(digest)
            redraws = 0
            yield puzzle_row(
                row_id,
                problem=problem,
                gold=roles_text(names, solution),
                people=count,
                split=split,
                slip=slip,
            )
        elif (redraws := redraws + 1) == _MAX_REDRAWS:
            raise UserError(
                f"rows: {rows} of split {split!r} are more than the {len(known_digests)} different puzzles "
                "that were found; ask for fewer, or for more --people"
            )


COLUMNS = ("quiz", "names", "solution", "statements", "extra_info")
BOX = "Put the answer in a box, like \\boxed{{{example}}}."
# What may follow the quiz: our own way to ask for a box, or nothing, where the system prompt says
# how to answer.
QUESTIONS = ("box", "plain")


def holds(claim: Any, is_knight: tuple[bool, ...]) -> bool:
    """Return whether a claim is true of these people, who are numbered from 0.

    A claim is a nested tuple such as `("or", ("telling-truth", 1), ("lying", 2))`. Raises
    `ValueError` for a claim of another form.
    """
    match claim:
        case (("telling-truth" | "lying") as role, int(person)) if person in range(len(is_knight)):
            return bool(is_knight[person] == (role == KNIGHT))
        case ("not", inner):
            return not holds(inner, is_knight)
        case ("and", *parts) if parts:
            return all(holds(part, is_knight) for part in parts)
        case ("or", *parts) if parts:
            return any(holds(part, is_knight) for part in parts)
        case ("->", first, second):
            return holds(second, is_knight) or not holds(first, is_knight)
        case ("<=>", first, second):
            return holds(first, is_knight) == holds(second, is_knight)
        case _:
            raise ValueError(f"{str(claim)[:60]!r} is no claim about knights and knaves")


def fitting(claims: tuple[Any, ...]) -> list[tuple[bool, ...]]:
    """Return every way to call people knights in which knights, and they alone, say what is true.

    Person i makes claim i.
    """
    assignments = product((True, False), repeat=len(claims))
    return [
        kinds
        for kinds in assignments
        if all(holds(c, kinds) == k for c, k in zip(claims, kinds, strict=True))
    ]


def read_puzzles(location: Path, question: str) -> dict[str, list[Row]]:
    """Read the rows of a file, or of all Parquet files below a folder at any depth, by split.

    `question`: one of `QUESTIONS`. Raises `UserError` that names the file and the row.
    """
    files = sorted(location.rglob("*.parquet")) if location.is_dir() else [location]
    if not files or not files[0].is_file():
        raise UserError(
            f"input: {str(location)!r} has no Parquet file; give the reference's data/kk, or a "
            "file of it"
        )
    by_split: dict[str, list[Row]] = {}
    origin_of: dict[str, str] = {}  # by the text of the puzzle
    for file in files:
        for index, record in enumerate(_records(file)):
            origin = f"row {index} of {file}"
            row = _row_of_record(record, origin, question)
            if row["problem"] in origin_of:
                raise UserError(
                    f"input: {origin} has the same puzzle as {origin_of[row['problem']]}; leave "
                    "one file out"
                )
            origin_of[row["problem"]] = origin
            rows = by_split.setdefault(row["split"], [])
            row["id"] = f"knights/reference/{row['split']}/{len(rows)}"
            rows.append(row)
    if not by_split:
        raise UserError(f"input: {str(location)!r} has no rows; give files that have some")
    return {split: by_split[split] for split in SPLITS if split in by_split}


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of the reference, or raise `UserError`."""
    try:
        table = pq.ParquetFile(file)
        missing = [name for name in COLUMNS if name not in table.schema_arrow.names]
        if missing:
            raise UserError(
                f"input: {str(file)!r} has no column {missing[0]!r}; it is none of the "
                "reference's data/kk"
            )
        yield from table.read(columns=[*COLUMNS]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"input: {str(file)!r} cannot be read ({in_one_line(error)}); download it again"
        ) from error


def _row_of_record(record: Mapping[str, Any], origin: str, question: str) -> Row:
    """Make the row of a record of the reference.

    Raises `UserError` for a record that is no puzzle with exactly one solution.
    """
    try:
        names = record["names"]
        solution = record["solution"]
        split = record["extra_info"]["split"]
        # The reference stores the statements as the text of nested Python tuples.
        claims = ast.literal_eval(record["statements"])
        words = all(isinstance(name, str) and name.isalpha() for name in names)
        if not words or not PEOPLE[0] <= len(names) <= PEOPLE[1]:
            raise ValueError(f"names is {names!r}, and not {PEOPLE[0]} to {PEOPLE[1]} words")
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, and not one of {', '.join(SPLITS)}")
        if not len(claims) == len(solution) == len(set(names)) == len(names):
            raise ValueError(
                f"{len(claims)} statements and {len(solution)} solutions for {len(set(names))} "
                "people"
            )
        if fitting(claims) != [tuple(solution)]:
            raise ValueError("solution is not the only one that fits the statements")
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"input: {origin}: {in_one_line(error)}; leave the row out") from error
    instruction = f" {BOX.format(example=example_answer(names))}" if question == "box" else ""
    return puzzle_row(
        "",
        problem=record["quiz"].strip() + instruction,
        gold=roles_text(names, solution),
        people=len(names),
        split=split,
    )
