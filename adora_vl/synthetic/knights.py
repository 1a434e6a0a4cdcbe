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
from adora_vl.utils.errors import UserError, describe_error

PEOPLE_RANGE = (2, 8)  # the fewest and the most people in a puzzle
PEOPLE_NAMES = (
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
_QUESTION_TEMPLATE = (
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
    # Returns what the statement claims of these people, as the nested tuple that `claim_holds`
    # reads.
    claim: Callable[..., tuple[Any, ...]]


KNIGHT = "telling-truth"
KNAVE = "lying"
_STATEMENT_KINDS = (
    Statement("{0} is a knight", people=1, claim=lambda first: (KNIGHT, first)),
    Statement("{0} is a knave", people=1, claim=lambda first: (KNAVE, first)),
    Statement(
        "{0} and {1} are both knights",
        people=2,
        claim=lambda first, second: ("and", (KNIGHT, first), (KNIGHT, second)),
    ),
    Statement(
        "{0} and {1} are both knaves",
        people=2,
        claim=lambda first, second: ("and", (KNAVE, first), (KNAVE, second)),
    ),
    Statement(
        "{0} is a knight or {1} is a knave",
        people=2,
        claim=lambda first, second: ("or", (KNIGHT, first), (KNAVE, second)),
    ),
    Statement(
        "{0} and {1} are of the same kind",
        people=2,
        claim=lambda first, second: ("<=>", (KNIGHT, first), (KNIGHT, second)),
    ),
    Statement(
        "exactly one of {0} and {1} is a knight",
        people=2,
        claim=lambda first, second: ("<=>", (KNIGHT, first), (KNAVE, second)),
    ),
    Statement(
        "if {0} is a knight, then {1} is a knave",
        people=2,
        claim=lambda first, second: ("->", (KNIGHT, first), (KNAVE, second)),
    ),
)


class SaidStatement(NamedTuple):
    """What one person of a puzzle says."""

    statement: Statement
    subjects: list[int]  # the people that it is about, numbered from 0

    def claim(self) -> tuple[Any, ...]:
        """Return what is claimed of these people, as `claim_holds` reads it."""
        return self.statement.claim(*self.subjects)

    def sentence(self, names: Sequence[str]) -> str:
        """Return the sentence with the names of these people."""
        return self.statement.words.format(*(names[person] for person in self.subjects))


class Puzzle(NamedTuple):
    """What the people of a puzzle say, in the order of their numbers, and who is a knight."""

    statements: list[SaidStatement]
    is_knight: tuple[bool, ...]


def _draw_puzzle(people: int, rng: random.Random) -> Puzzle:
    """Draw statements for `people` people, again and again until there is exactly one solution."""
    while True:
        statements = []
        for speaker in range(people):
            kind = rng.choice(_STATEMENT_KINDS)
            candidates = [person for person in range(people) if person != speaker]
            # If a puzzle has two people, a statement about two is about the speaker too.
            if kind.people > len(candidates):
                candidates.append(speaker)
            subjects = rng.sample(candidates, kind.people)
            statements.append(SaidStatement(kind, subjects))
        solutions = find_solutions(tuple(statement.claim() for statement in statements))
        if len(solutions) == 1:
            return Puzzle(statements, is_knight=solutions[0])


def roles_text(names: Sequence[str], is_knight: Sequence[bool]) -> str:
    """Return a solution as text, in the form of an answer: `Ada is a knight, Ben is a knave`."""
    roles = []
    for name, person_is_knight in zip(names, is_knight, strict=True):
        role = "knight" if person_is_knight else "knave"
        roles.append(f"{name} is a {role}")
    return ", ".join(roles)


def example_answer(names: Sequence[str]) -> str:
    """Return an example of an answer for the question: `Ada is a knight, Ben is a knave, ...`.

    The last person is never named, so that the example cannot be a whole answer.
    """
    shown_names = names[: min(2, len(names) - 1)]
    shown_roles = (True, False)[: len(shown_names)]
    return roles_text(shown_names, shown_roles) + ", ..."


def puzzle_row(
    row_id: str, problem: str, answer: str, *, people: int, split: str, wrong_answer: str = ""
) -> Row:
    """Return the dataset row of a puzzle, which has no image.

    Args:
        row_id: the id of the row.
        problem: the question.
        answer: the right answer, such as `Ada is a knight, Ben is a knave`.
        people: how many people the puzzle has.
        split: `train` or `test`.
        wrong_answer: a wrong answer in a box; empty for none.
    """
    meta = {
        "goal": "knights and knaves",
        "shapes": [],
        "family": f"{people} people",
        "kind": "",
        "slip": wrong_answer,
        "solution": f"\\boxed{{{answer}}}",
    }
    return {
        "id": row_id,
        "images": [],
        "problem": problem,
        "answer": answer,
        "answer_raw": answer,
        "choices": None,
        "split": split,
        "source": "knights",
        "meta": meta,
    }


def generate(
    rows: int, split: str = "train", *, seed: int = 0, people: tuple[int, int] = PEOPLE_RANGE
) -> Iterator[Row]:
    """Draw `rows` different puzzles of a split, and yield them as rows.

    `people` is the smallest and the largest number of people; the puzzles take the numbers from one
    to the other in turn. Equal arguments give equal puzzles.

    Raises `UserError` for a range that is not within 2 and 8, and for more puzzles than there are.
    """
    min_people, max_people = people
    if not PEOPLE_RANGE[0] <= min_people <= max_people <= PEOPLE_RANGE[1]:
        raise UserError(
            f"people: {min_people}-{max_people} is no range within {PEOPLE_RANGE[0]}-{PEOPLE_RANGE[1]}, the smaller "
            "number first"
        )
    rng = random.Random(f"knights/{seed}/{split}")
    known_digests: set[str] = set()  # the hashes of all puzzles that were yielded so far
    redraws = 0  # since the last new puzzle
    while len(known_digests) < rows:
        people_count = min_people + len(known_digests) % (max_people - min_people + 1)
        names = tuple(rng.sample(PEOPLE_NAMES, people_count))
        puzzle = _draw_puzzle(people_count, rng)
        problem = _puzzle_text(puzzle, names)
        digest = hashlib.sha256(problem.encode()).hexdigest()
        is_test_puzzle = int(digest[:8], 16) < _TEST_SHARE * 2**32
        is_in_split = is_test_puzzle == (split == "test")
        if not is_in_split or digest in known_digests:
            redraws += 1
            if redraws == _MAX_REDRAWS:
                raise UserError(
                    f"rows: {rows} of split {split!r} are more than the {len(known_digests)} "
                    "different puzzles that were found; ask for fewer, or for more --people"
                )
            continue
        row_id = f"knights/{seed}/{split}/{len(known_digests)}"
        wrong_roles = _swap_some_roles(puzzle.is_knight, random.Random(f"{row_id}/slip"))
        known_digests.add(digest)
        redraws = 0
        yield puzzle_row(
            row_id,
            problem=problem,
            answer=roles_text(names, puzzle.is_knight),
            people=people_count,
            split=split,
            wrong_answer=f"\\boxed{{{roles_text(names, wrong_roles)}}}",
        )


def _puzzle_text(puzzle: Puzzle, names: Sequence[str]) -> str:
    """Return the question of a puzzle: what each person says, and how to answer."""
    statements = " ".join(
        f"{name} says: {statement.sentence(names)}."
        for name, statement in zip(names, puzzle.statements, strict=True)
    )
    people_in_words = f"{', '.join(names[:-1])} and {names[-1]}"
    return _QUESTION_TEMPLATE.format(
        people=people_in_words, statements=statements, example=example_answer(names)
    )


def _swap_some_roles(is_knight: Sequence[bool], rng: random.Random) -> list[bool]:
    """Return a wrong solution, with at least one role changed from knight to knave or back."""
    # Bit i of this number says whether person i changes the role. It is not 0.
    swap_bits = rng.randrange(1, 2 ** len(is_knight))
    wrong_roles = []
    for person, person_is_knight in enumerate(is_knight):
        is_swapped = bool(swap_bits >> person & 1)
        wrong_roles.append(person_is_knight != is_swapped)
    return wrong_roles


_REFERENCE_COLUMNS = ("quiz", "names", "solution", "statements", "extra_info")
_BOX_REQUEST = "Put the answer in a box, like \\boxed{{{example}}}."
# What may follow the quiz: our own way to ask for a box, or nothing, where the system prompt says
# how to answer.
QUESTION_STYLES = ("box", "plain")


def claim_holds(claim: Any, is_knight: tuple[bool, ...]) -> bool:
    """Return whether a claim is true, given for each person whether that is a knight.

    A claim is a nested tuple such as `("or", ("telling-truth", 1), ("lying", 2))`: person 1 is a
    knight, or person 2 a knave. People are numbered from 0.

    Raises `ValueError` for a claim of another form.
    """
    match claim:
        case (("telling-truth" | "lying") as role, int(person)) if person in range(len(is_knight)):
            return bool(is_knight[person] == (role == KNIGHT))
        case ("not", inner):
            return not claim_holds(inner, is_knight)
        case ("and", *parts) if parts:
            return all(claim_holds(part, is_knight) for part in parts)
        case ("or", *parts) if parts:
            return any(claim_holds(part, is_knight) for part in parts)
        case ("->", first, second):
            return claim_holds(second, is_knight) or not claim_holds(first, is_knight)
        case ("<=>", first, second):
            return claim_holds(first, is_knight) == claim_holds(second, is_knight)
        case _:
            raise ValueError(f"{str(claim)[:60]!r} is no claim about knights and knaves")


def find_solutions(claims: tuple[Any, ...]) -> list[tuple[bool, ...]]:
    """Return all solutions of a puzzle, in which person i makes claim i.

    A solution says for each person whether that is a knight. Knights claim what is true, and knaves
    what is false. If person 0 says that person 1 is a knave, and person 1 that person 0 is one, the
    claims `(("lying", 1), ("lying", 0))` have the solutions (True, False) and (False, True).
    """
    solutions = []
    for is_knight in product((True, False), repeat=len(claims)):
        if all(
            claim_holds(claim, is_knight) == speaker_is_knight
            for claim, speaker_is_knight in zip(claims, is_knight, strict=True)
        ):
            solutions.append(is_knight)
    return solutions


def read_puzzles(location: Path, question: str) -> dict[str, list[Row]]:
    """Read published puzzles from a Parquet file, or from all such files below a folder, by split.

    `question` is one of `QUESTION_STYLES`: whether the puzzle ends with how to answer.

    Raises `UserError` for a file or a row that cannot be used, and for a puzzle that comes twice.
    """
    files = sorted(location.rglob("*.parquet")) if location.is_dir() else [location]
    if not files or not files[0].is_file():
        raise UserError(
            f"input: {str(location)!r} has no Parquet file; give the reference's data/kk, or a "
            "file of it"
        )
    rows_by_split: dict[str, list[Row]] = {}
    origin_by_problem: dict[str, str] = {}
    for file in files:
        for index, record in enumerate(_read_records(file)):
            origin = f"row {index} of {file}"
            row = _row_of_record(record, origin, question)
            problem = row["problem"]
            if problem in origin_by_problem:
                raise UserError(
                    f"input: {origin} has the same puzzle as {origin_by_problem[problem]}; leave "
                    "one file out"
                )
            origin_by_problem[problem] = origin
            split_rows = rows_by_split.setdefault(row["split"], [])
            row["id"] = f"knights/reference/{row['split']}/{len(split_rows)}"
            split_rows.append(row)
    if not rows_by_split:
        raise UserError(f"input: {str(location)!r} has no rows; give files that have some")
    return {split: rows_by_split[split] for split in SPLITS if split in rows_by_split}


def _read_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of the reference, or raise `UserError`."""
    try:
        table = pq.ParquetFile(file)
        missing = [name for name in _REFERENCE_COLUMNS if name not in table.schema_arrow.names]
        if missing:
            raise UserError(
                f"input: {str(file)!r} has no column {missing[0]!r}; it is none of the "
                "reference's data/kk"
            )
        yield from table.read(columns=[*_REFERENCE_COLUMNS]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"input: {str(file)!r} cannot be read ({describe_error(error)}); download it again"
        ) from error


def _row_of_record(record: Mapping[str, Any], origin: str, question: str) -> Row:
    """Return the dataset row of a record of the published puzzles, whose solution is checked.

    `origin` names the record in messages, such as `row 3 of FILE`. `question` is `box` or `plain`,
    as in `read_puzzles`. The row has no id yet: the caller numbers the rows of each split.

    Raises `UserError` for a record that is no puzzle with exactly one solution.
    """
    try:
        names = record["names"]
        solution = record["solution"]
        split = record["extra_info"]["split"]
        # The reference stores the statements as the text of nested Python tuples.
        claims = ast.literal_eval(record["statements"])
        are_words = all(isinstance(name, str) and name.isalpha() for name in names)
        if not are_words or not PEOPLE_RANGE[0] <= len(names) <= PEOPLE_RANGE[1]:
            raise ValueError(
                f"names is {names!r}, and not {PEOPLE_RANGE[0]} to {PEOPLE_RANGE[1]} words"
            )
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, and not one of {', '.join(SPLITS)}")
        if not len(claims) == len(solution) == len(set(names)) == len(names):
            raise ValueError(
                f"{len(claims)} statements and {len(solution)} solutions for {len(set(names))} "
                "people"
            )
        if find_solutions(claims) != [tuple(solution)]:
            raise ValueError("solution is not the only one that fits the statements")
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"input: {origin}: {describe_error(error)}; leave the row out") from error
    problem = record["quiz"].strip()
    if question == "box":
        problem += f" {_BOX_REQUEST.format(example=example_answer(names))}"
    return puzzle_row(
        row_id="",
        problem=problem,
        answer=roles_text(names, solution),
        people=len(names),
        split=split,
    )
